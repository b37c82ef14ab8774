"""What a streaming query tells of itself: in its progress, by ``observe``, and in a report for each batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from lancewal.format import bucket_of
from lancewal.publish import Transaction
from lancewal.shard import WalAppender
from lancewal.spark import BatchReport, changes, feed_lag, stream
from lancewal.spark.feed_source import HAS_LIMITS
from lancewal.storage import ObjectStore
from tests.spark.tables import content, named, new_table
from tests.spark.test_low_latency import part_of, task
from tests.tables import rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_progress_has_rows_observed_figures_and_places_and_reports_have_the_rest(
    spark: SparkSession, tmp_path: Path
) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    table = new_table(tmp_path / "table")
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"id": i, "name": name}) for i, name in named(0, 12)]
    (tmp_path / "in" / "one.json").write_text("\n".join(lines))
    incoming = spark.readStream.schema("id long, name string").json(str(tmp_path / "in"))
    watched = incoming.observe("seen", F.count("*").alias("rows"), F.max("id").alias("newest"))
    reports: list[BatchReport] = []
    trigger = {"availableNow": True}
    query = stream(watched, table.uri, str(tmp_path / "c"), trigger=trigger, report=reports.append)
    query.awaitTermination()
    by_format = watched.writeStream.format("lancewal").option("checkpointLocation", str(tmp_path / "f"))
    other = by_format.trigger(availableNow=True).start(table.uri)
    other.awaitTermination()
    for each in (query, other):
        (batch,) = [progress for progress in each.recentProgress if progress.numInputRows]
        assert batch.numInputRows == 12
        assert batch.observedMetrics["seen"].asDict() == {"rows": 12, "newest": 11}
    (report,) = reports
    ends = {shard.shard_id: shard.wal_tip for shard in table.shards()}
    assert (report.rows, report.entries, report.conflicts) == (12, 3, 0)
    assert report.wal_bytes > 0
    assert report.positions.keys() == ends.keys()
    assert all(position < ends[shard] for shard, position in report.positions.items())

    feed = changes(spark, table.uri, starting_position="earliest").writeStream.format("noop")
    following = feed.option("checkpointLocation", str(tmp_path / "feed")).trigger(availableNow=True).start()
    following.awaitTermination()
    (source,) = following.lastProgress.sources
    reached = json.loads(source.endOffset)["positions"]
    assert {shard: reached[str(shard)] for shard in ends} == ends
    if HAS_LIMITS:
        assert json.loads(source.latestOffset)["positions"] == reached
        assert feed_lag(following) == dict.fromkeys(ends, 0)


def test_a_claim_in_the_midst_of_a_write_is_a_conflict_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = new_table(tmp_path / "table")
    store = ObjectStore.from_uri(table.uri)
    append, others = WalAppender.append, []

    def taken_over(self: WalAppender, *arguments: Any, **named_ones: Any) -> Any:
        if len(others) < 2:
            others.append(WalAppender.open(store, table.shard_for(2), None))
        return append(self, *arguments, **named_ones)

    monkeypatch.setattr(WalAppender, "append", taken_over)
    mine: pa.RecordBatch = part_of(table, int(bucket_of(rows(2, 1)["id"], 3)[0]))
    (written,) = task(table, Transaction("app", 0)).append(
        iter([mine]), int(bucket_of(rows(2, 1)["id"], 3)[0])
    )
    assert (written.conflicts, written.skipped) == (2, False)
    assert len(content(table)) == mine.num_rows
    report = BatchReport.of(7, [written])
    assert (report.batch_id, report.conflicts, report.entries) == (7, 2, 1)
