"""The change feed by format: as a stream, as a range, and after a snapshot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pytest

import lancewal
from lancewal.errors import InvalidInputError, StorageError
from lancewal.publish.feed import ChangeFeed, feed_schema
from lancewal.publish.publishing import publish
from lancewal.shard.discovery import discover_manifests
from lancewal.spark import changes, feed_lag
from lancewal.spark.columns import spark_schema
from lancewal.spark.feed_source import HAS_LIMITS, FeedReader, FeedStream
from lancewal.spark.options import OpenTable
from lancewal.spark.source import DefaultSource
from lancewal.storage import ObjectStore, layout
from tests.patience import wait_until
from tests.publish.test_feed import staged
from tests.spark.tables import content, new_table, options_of
from tests.tables import rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW = {"availableNow": True}
needs_limits = pytest.mark.skipif(
    not HAS_LIMITS, reason="Spark 4.1 does not say where a stream is, nor limits it"
)


def stream_of(table: lancewal.Table, **options: Any) -> FeedStream:
    parsed = options_of(table, readChangeFeed="true", **options)
    return FeedStream(parsed, spark_schema(feed_schema(OpenTable.open(parsed).base.schema)))


def read(stream: FeedStream, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[Any, ...]]:
    found = [b for partition in stream.partitions(start, end) for b in stream.read(partition)]
    return [(r["id"], r["name"], r["_change_type"]) for batch in found for r in batch.to_pylist()]


def advance(stream: FeedStream, start: dict[str, Any]) -> dict[str, Any]:
    """As Spark does it: offsets are JSON between two calls."""
    end: dict[str, Any] = json.loads(json.dumps(stream.latestOffset(start, stream.getDefaultReadLimit())))
    return end


@pytest.mark.parametrize("columns", ["name", "_change_type", "id,_change_type"])
def test_a_snapshot_with_a_filter_needs_no_key_among_the_columns(tmp_path: Path, columns: str) -> None:
    table = new_table(tmp_path / "table")
    with table.writer() as writer:
        writer.put(rows(0, 5))
    options = {"path": table.uri, "startingPosition": "snapshot", "columns": columns, "filter": "id > 2"}
    source = DefaultSource({"readChangeFeed": "true", **options})
    stream = source.streamReader(source.schema())
    start = stream.initialOffset()
    with table.writer() as writer:
        writer.put(rows(1, 6))

    def count(first: dict[str, Any], last: dict[str, Any]) -> int:
        return sum(b.num_rows for part in stream.partitions(first, last) for b in stream.read(part))

    # Two rows of the snapshot, four of the changes.
    if HAS_LIMITS:
        middle = stream.latestOffset(start)
        assert (count(start, middle), count(middle, stream.latestOffset(middle))) == (2, 4)
    else:
        assert count(start, stream.latestOffset()) == 2 + 4


def test_a_stream_is_applied_to_another_table_which_ends_up_the_same(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Upserts, deletes and published rows, in two runs from one checkpoint."""
    source = new_table(tmp_path / "source")
    target = new_table(tmp_path / "target", unsharded=True)
    most = 7 if HAS_LIMITS else None

    def run() -> None:
        df = changes(spark, source.uri, starting_position="earliest", max_entries_per_trigger=most)
        query = (
            df.writeStream.format("lancewal")
            .option("changeTypeColumn", "_change_type")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(**NOW)  # type: ignore[arg-type]
            .start(target.uri)
        )
        query.awaitTermination()

    with source.writer() as writer:
        writer.put(rows(0, 20))
        writer.delete([3, 4])
    run()
    assert content(target) == content(source) != []
    store = ObjectStore.from_uri(source.uri)
    publish(OpenTable.open(options_of(source)).base, store, staged_all(source, 10, 20))
    with source.writer() as writer:
        writer.delete([12, 25])
    run()
    assert content(target) == content(source)
    assert (25, "name_25") not in content(target)


def staged_all(table: lancewal.Table, start: int, count: int) -> list[Any]:
    return staged(ObjectStore.from_uri(table.uri), rows(start, count))


def test_a_range_is_read_as_a_batch(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    with table.writer() as writer:
        writer.put(rows(0, 5))
    middle = ChangeFeed.open(table.uri).latest()
    with table.writer() as writer:
        writer.put(rows(5, 5))

    def read_range(**options: Any) -> list[int]:
        reader = spark.read.format("lancewal").option("readChangeFeed", "true")
        return sorted(row.id for row in reader.options(**options).load(table.uri).collect())

    place = json.dumps({str(shard): position for shard, position in middle.items()})
    assert read_range() == list(range(10))
    assert read_range(startingPosition=place) == list(range(5, 10))
    assert read_range(endingPosition=place, columns="id") == list(range(5))
    assert read_range(startingPosition="latest") == []


def test_a_column_that_was_renamed_under_a_feed_was_a_key_error(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    with table.writer() as writer:
        writer.put(rows(0, 3))
    stream = stream_of(table, startingPosition="earliest")
    start, end = stream.initialOffset(), stream.latestOffset()
    assert len(read(stream, start, end)) == 3
    lance.dataset(table.uri).alter_columns({"path": "name", "name": "title"})
    with pytest.raises(InvalidInputError, match=r"has no column name any more; .* start the stream, again"):
        read(stream, start, end)


@needs_limits
def test_a_snapshot_is_followed_by_the_feed_without_gap_or_overlap(tmp_path: Path) -> None:
    """A row is written at every step that the stream takes; a published batch is in the middle."""
    table = new_table(tmp_path / "table", unsharded=True)
    stream = stream_of(table, startingPosition="snapshot")
    written = 0

    def write(count: int = 3) -> None:
        nonlocal written
        with table.writer(enable_memtable=bool(written % 2)) as writer:
            writer.put(rows(written, count))
        written += count

    write()
    table.flush()
    table.compact()
    write()
    store = ObjectStore.from_uri(table.uri)
    publish(OpenTable.open(options_of(table)).base, store, staged(store, rows(written, 3)))
    written += 3
    write()
    offset = json.loads(json.dumps(stream.initialOffset()))
    seen = []
    for _ in range(4):
        write()
        table.flush()
        end = advance(stream, offset)
        write()
        seen += read(stream, offset, end)
        offset = end
    seen += read(stream, offset, advance(stream, offset))
    assert sorted(i for i, _, _ in seen) == list(range(written))


@needs_limits
def test_a_snapshot_ends_before_rows_that_are_not_published_yet(tmp_path: Path) -> None:
    from tests.publish.test_feed import list_sstables, pointer_by_hand

    table = new_table(tmp_path / "table", unsharded=True)
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(0, 2))
    store = ObjectStore.from_uri(table.uri)
    found = staged(store, rows(10, 2))
    shard = table.shard_for()
    appender, _, position = pointer_by_hand(store, shard, tuple(s.entry.path for s in found))
    stream = stream_of(table, startingPosition="snapshot")
    start = stream.initialOffset()
    end = advance(stream, start)
    assert [i for i, _, _ in read(stream, start, end)] == [0, 1]
    assert advance(stream, end) == end, "the outcome is open"
    list_sstables(appender, found, position)
    table.flush()
    assert [i for i, _, _ in read(stream, end, advance(stream, end))] == [10, 11]


@needs_limits
def test_limits_and_a_target_bound_every_step(tmp_path: Path) -> None:
    from pyspark.sql.streaming import datasource as limits

    table = new_table(tmp_path / "table", unsharded=True)
    stream = stream_of(table, startingPosition="earliest", maxEntriesPerTrigger="2")
    assert stream.getDefaultReadLimit() == limits.ReadMaxFiles(2)
    assert stream_of(table, maxBytesPerTrigger="9").getDefaultReadLimit() == limits.ReadMaxBytes(9)
    assert stream_of(table).getDefaultReadLimit() == limits.ReadAllAvailable()
    start = stream.initialOffset()
    with table.writer(enable_memtable=False) as writer:
        for i in range(5):
            writer.put(rows(i, 1))
        stream.prepareForTriggerAvailableNow()
        writer.put(rows(5, 1))
    steps, place = [], start
    while (end := advance(stream, place)) != place:
        steps.append([i for i, _, _ in read(stream, place, end)])
        place = end
    assert steps == [[0, 1], [2, 3], [4]]
    assert stream.latestOffset(start, limits.ReadAllAvailable()) == place
    assert [i for i, _, _ in read(stream, place, stream.reportLatestOffset())] == [5]


def test_a_stream_behind_the_retained_log_fails_loudly(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table", unsharded=True)
    for start in (0, 1):
        with table.writer() as writer:
            writer.put(rows(start, 1))
    shard = table.shard_for()
    ObjectStore.from_uri(table.uri).delete(layout.wal_entry(shard, 1))
    df = changes(spark, table.uri, starting_position={str(shard): 1})
    query = (
        df.writeStream.format("memory")
        .queryName("behind")
        .option("checkpointLocation", str(tmp_path / "c"))
        .trigger(**NOW)  # type: ignore[arg-type]
        .start()
    )
    with pytest.raises(Exception, match="WalTruncatedError"):
        query.awaitTermination()


@needs_limits
def test_a_snapshot_whose_manifests_were_collected_fails_loudly(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table", unsharded=True)
    stream = stream_of(table, startingPosition="snapshot")
    start = stream.initialOffset()
    store = ObjectStore.from_uri(table.uri)
    for manifest in discover_manifests(store):
        with table.writer() as writer:
            writer.put(rows(0, 1))
        store.delete(layout.manifest_file(manifest.shard_id, manifest.version))
    with pytest.raises(StorageError, match="new checkpoint"):
        stream.partitions(start, advance(stream, start))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"readChangeFeed": "false"}, "set the option readChangeFeed"),
        ({"endingPosition": "latest"}, "has no end"),
        ({"startingPosition": "yesterday"}, "neither a known word nor JSON"),
    ],
    ids=str,
)
def test_what_a_stream_cannot_do_is_said_by_the_query(
    spark: SparkSession, tmp_path: Path, options: dict[str, str], reason: str
) -> None:
    """Spark replaces what a reader's constructor raises by a complaint of its own."""
    table = new_table(tmp_path / "table")
    df = spark.readStream.format("lancewal").options(**{"readChangeFeed": "true", **options}).load(table.uri)
    query = df.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c")).start()
    with pytest.raises(Exception, match=reason):
        query.awaitTermination()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("shards", " ", "option shards names nothing"),
        ("changeTypes", "", "option changeTypes names nothing"),
        ("limit", "1", "option limit does not apply to the change feed"),
    ],
)
def test_an_option_of_a_feed_that_read_nothing_or_did_nothing_is_refused(
    tmp_path: Path, option: str, value: str, said: str
) -> None:
    stream = stream_of(new_table(tmp_path / "table"), **{option: value})
    with pytest.raises(InvalidInputError, match=said):
        stream.initialOffset()


def test_limits_that_are_no_numbers_are_refused_at_once(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    with pytest.raises(Exception, match="maxEntriesPerTrigger must be a whole number"):
        changes(spark, table.uri, max_entries_per_trigger=0)


def test_places_that_the_table_does_not_have_are_refused(tmp_path: Path) -> None:
    """Rows between the end and a place beyond it would be left out."""
    table = new_table(tmp_path / "table", unsharded=True)
    with table.writer() as writer:
        writer.put(rows(0, 2))
    shard, end = table.shard_for(), ChangeFeed.open(table.uri).latest()[table.shard_for()]
    assert stream_of(table, startingPosition=json.dumps({str(shard): end})).initialOffset()
    with pytest.raises(InvalidInputError, match="beyond its end"):
        stream_of(table, startingPosition=json.dumps({str(shard): end + 1})).initialOffset()
    other = "00000000-0000-0000-0000-000000000001"
    with pytest.raises(InvalidInputError, match="does not have"):
        stream_of(table, startingPosition=json.dumps({other: 1})).initialOffset()
    parsed = options_of(table, readChangeFeed="true", endingPosition=json.dumps({str(shard): end + 1}))
    batch = FeedReader(parsed, spark_schema(feed_schema(OpenTable.open(parsed).base.schema)))
    with pytest.raises(InvalidInputError, match=r"endingPosition.*beyond its end"):
        batch.partitions()


def test_a_feed_of_some_shards_or_some_changes_leaves_the_others_out(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    with table.writer() as writer:
        writer.put(rows(0, 30))
        writer.delete([3, 4, 5])
    whole = stream_of(table, startingPosition="earliest")
    start, end = whole.initialOffset(), whole.reportLatestOffset()
    everything = read(whole, start, end)
    deleted = read(stream_of(table, changeTypes="delete"), start, end)
    assert sorted(deleted) == [(i, None, "delete") for i in (3, 4, 5)]
    upserted = read(stream_of(table, changeTypes="upsert, insert"), start, end)
    assert sorted(upserted + deleted, key=str) == sorted(everything, key=str)
    ids = [str(info.shard_id) for info in table.shards()]
    by_shard = [read(stream_of(table, shards=each), start, end) for each in ids]
    assert all(by_shard)
    assert sorted((each for some in by_shard for each in some), key=str) == sorted(everything, key=str)
    assert len(stream_of(table, shards=ids[0]).partitions(start, end)) == 1, "other logs are not read"
    with pytest.raises(InvalidInputError, match="there are upsert"):
        read(stream_of(table, changeTypes="deleted"), start, end)
    with pytest.raises(InvalidInputError, match="excludes a snapshot"):
        stream_of(table, shards=ids[0], startingPosition="snapshot").initialOffset()


def test_a_feed_of_a_range_of_keys_reads_the_shards_that_can_hold_them(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    with table.writer() as writer:
        writer.put(rows(0, 30))
        writer.delete([3, 4, 25])
    whole = stream_of(table, startingPosition="earliest")
    start, end = whole.initialOffset(), whole.reportLatestOffset()
    some = stream_of(table, filter="id >= 4 AND id < 8")
    expected = [each for each in read(whole, start, end) if 4 <= each[0] < 8]
    assert sorted(read(some, start, end), key=str) == sorted(expected, key=str)
    assert (4, None, "delete") in expected
    one = stream_of(table, filter="id = 5")
    assert len(one.partitions(start, end)) == 1, "the logs of other shards are not read"
    assert [each[0] for each in read(one, start, end)] == [5]
    # A snapshot that comes before the changes too.
    snapshot = stream_of(table, startingPosition="snapshot", filter="id = 5 OR id = 4").initialOffset()
    from_state = stream_of(table, filter="id = 5 OR id = 4")
    assert [each[0] for each in read(from_state, snapshot, end)] == [5]
    with pytest.raises(InvalidInputError, match="key columns only, not name"):
        read(stream_of(table, filter="id = 5 AND name = 'x'"), start, end)


@needs_limits
def test_a_query_on_the_feed_tells_how_far_behind_it_is(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table", unsharded=True)
    with table.writer() as writer:
        for start in (0, 2, 4):
            writer.put(rows(start, 2))
    feed = changes(spark, table.uri, starting_position="earliest", max_entries_per_trigger=1)
    query = feed.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
    running = query.trigger(processingTime="1 hour").start()
    try:
        wait_until(lambda: running.lastProgress is not None, "the first micro-batch")
        (left,) = feed_lag(running).items()
    finally:
        running.stop()
    shard = table.shard_for()
    end = ChangeFeed.open(table.uri).latest()[shard]
    reached = json.loads(running.lastProgress.sources[0].endOffset)["positions"][str(shard)]
    assert left == (shard, end - reached)
    assert left[1] > 0
