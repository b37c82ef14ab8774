"""What a streaming query tells of itself: in its progress, by ``observe``, and in a report for each batch."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa
import pytest

from lancewal.format import bucket_of, encode_record
from lancewal.publish import TRANSACTIONS_DIR, Transaction
from lancewal.shard import WalAppender
from lancewal.spark import BatchReport, changes, feed_lag, sink_report, stream
from lancewal.spark.feed_source import HAS_LIMITS
from lancewal.spark.sink import StreamSink, take_rows
from lancewal.storage import ObjectStore
from tests.spark.tables import content, named, new_table, options_of
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
    assert sink_report(query, table.uri) == sink_report(query.lastProgress, table.uri) == report
    by_format_report = sink_report(other, table.uri)
    assert by_format_report is not None
    assert (by_format_report.rows, by_format_report.entries, by_format_report.skipped) == (12, 3, 0)
    assert (by_format_report.batch_id, by_format_report.conflicts) == (0, 0)
    assert by_format_report.wal_bytes > 0
    assert by_format_report.tails.keys() == by_format_report.positions.keys() == report.tails.keys()
    assert all(by_format_report.tails[shard] > tail > 0 for shard, tail in report.tails.items())
    assert sink_report("nobody", table.uri) is None
    ends = {shard.shard_id: shard.wal_tip for shard in table.shards()}
    assert (report.rows, report.entries, report.conflicts) == (12, 3, 0)
    assert report.wal_bytes > 0
    assert report.positions.keys() == ends.keys()
    assert all(position < ends[shard] for shard, position in report.positions.items())

    feed = changes(spark, table.uri, starting_position="earliest").writeStream.format("noop")
    following = feed.option("checkpointLocation", str(tmp_path / "feed")).trigger(availableNow=True).start()
    following.awaitTermination()
    (source,) = following.lastProgress.sources
    # PySpark 4.1 shows the dictionary that it made of the JSON.
    reached = (json.loads if HAS_LIMITS else ast.literal_eval)(source.endOffset)["positions"]
    assert {shard: reached[str(shard)] for shard in ends} == ends
    if HAS_LIMITS:
        assert json.loads(source.latestOffset)["positions"] == reached
        assert feed_lag(following) == dict.fromkeys(ends, 0)


def test_a_shard_that_came_since_the_last_micro_batch_had_no_lag() -> None:
    old, new = (str(UUID(int=number)) for number in (1, 2))
    source = SimpleNamespace(
        endOffset=json.dumps({"positions": {old: 3}}),
        latestOffset=json.dumps({"positions": {old: 5, new: 4}}),
    )
    query = SimpleNamespace(lastProgress=SimpleNamespace(sources=[source]))
    assert feed_lag(query) == {UUID(old): 2, UUID(new): 3}  # type: ignore[arg-type]
    source.endOffset = None
    assert feed_lag(query) == {}  # type: ignore[arg-type]


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


def test_figures_of_sstables_and_of_what_came_again_are_in_the_record_of_a_commit(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    message = take_rows(options_of(table, walBytes=0), iter([rows(0, 12)]), 0)
    assert message.staged
    StreamSink(options_of(table, txnAppId="mine")).commit([message], 3)
    report = sink_report("mine", table.uri)
    assert report is not None
    assert (report.batch_id, report.rows, report.entries, report.wal_bytes) == (3, 12, 3, 0)
    assert report.positions.keys() == {shard.shard_id for shard in table.shards()}
    again = take_rows(options_of(table), iter([rows(0, 12)]), 0)
    StreamSink(options_of(table, txnAppId="mine")).commit([again], 3)
    assert sink_report("mine", table.uri) == report, "nothing was left to do"


def test_a_record_of_an_earlier_release_has_no_figures(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    transaction = Transaction("mine", 3)
    record = {"app": "mine", "floors": {}}
    path = f"{TRANSACTIONS_DIR}/{transaction.digest}/{3:020d}.done"
    ObjectStore.from_uri(table.uri).put(path, encode_record(record))
    assert sink_report("mine", table.uri) == BatchReport.of(3, [])
