"""Streams of changes land exactly once although tasks and commits die again and again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException

import lancewal
from lancewal.publish.feed import ChangeFeed
from lancewal.spark import low_latency
from tests.spark import faulty
from tests.spark.changes import ChangeFiles
from tests.spark.tables import content, new_table, schema_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

FAULTS = ["before raise", "before kill", "after raise", "after kill"]
NOW = {"availableNow": True}


def start(
    spark: SparkSession, path: str, files: ChangeFiles, uri: str, checkpoint: Path, attempt: int = 0
) -> StreamingQuery:
    change_column = "op" if files.keyed else None
    df = files.stream(spark)
    if path == "wal":
        return low_latency.stream(df, uri, str(checkpoint), trigger=NOW, change_type_column=change_column)
    writer = df.writeStream.format(faulty.FORMAT).option("checkpointLocation", str(checkpoint))
    if path == "sstables" or (path == "either" and attempt % 2):
        writer = writer.option("walBytes", 0)
    if change_column is not None:
        writer = writer.option("changeTypeColumn", change_column)
    return writer.trigger(**NOW).start(uri)  # type: ignore[arg-type]


def run_to_the_end(
    spark: SparkSession, path: str, files: ChangeFiles, uri: str, checkpoint: Path, attempts: int
) -> int:
    """Restart the query from its checkpoint until it gets through; how often it had to be."""
    for attempt in range(attempts):
        query = start(spark, path, files, uri, checkpoint, attempt)
        try:
            query.awaitTermination()
            return attempt
        except StreamingQueryException as error:
            if "InjectedError" not in str(error) and "exited unexpectedly" not in str(error):
                raise
    raise AssertionError(f"the stream did not get through in {attempts} attempts")


def changes_in(uri: str) -> int:
    feed = ChangeFeed.open(uri)
    return sum(batch.num_rows for batch in feed.changes(feed.earliest(), feed.latest()))


def check_stream(
    spark: SparkSession,
    tmp_path: Path,
    path: str,
    keyed: bool,
    batches: int,
    faults: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(low_latency, "APPENDING", faulty.FaultyAppending)
    spark.dataSource.register(faulty.FaultySource)
    files = ChangeFiles(tmp_path / "changes", keyed, seed=batches)
    files.add(batches)
    table = new_table(tmp_path / "table", schema_of(keyed))
    faulty.issue(*(FAULTS[i % len(FAULTS)] for i in range(faults)))
    for number in range(0, 3 * faults, 3):
        faulty.issue(f"commit {number}", "commit pass")
    try:
        restarts = run_to_the_end(spark, path, files, table.uri, tmp_path / "checkpoint", 5 + 4 * faults)
        suffered = faulty.suffered()
    finally:
        faulty.withdraw()
    # The first commit dies for certain; later ones need not come, where a batch is found done.
    assert restarts > 0
    assert "commit 0" in suffered
    assert content(table) == files.expected()
    assert changes_in(table.uri) == files.changes
    lancewal.open(table.uri).flush()
    lancewal.open(table.uri).compact()
    assert content(table) == files.expected()
    assert changes_in(table.uri) == files.changes


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "append only"])
@pytest.mark.parametrize("path", ["sink", "wal"])
def test_a_stream_lands_exactly_once_while_tasks_and_commits_die(
    spark: SparkSession, tmp_path: Path, path: str, keyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_stream(spark, tmp_path, path, keyed, batches=4, faults=4, monkeypatch=monkeypatch)


@pytest.mark.parametrize("path", ["sstables", "either"])
def test_a_stream_by_format_lands_once_also_as_sstables_and_where_a_batch_comes_again_the_other_way(
    spark: SparkSession, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other start of the query sends few rows to logs; the commit before it died at some write."""
    check_stream(spark, tmp_path, path, keyed=False, batches=4, faults=4, monkeypatch=monkeypatch)
