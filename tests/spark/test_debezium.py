"""Change events of databases, as Debezium writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import lancewal
from lancewal.errors import InvalidInputError
from lancewal.publish import ChangeFeed
from lancewal.spark import BatchReport, apply_changes, batch_writer, from_debezium, stream
from lancewal.storage import layout
from tests.spark.tables import content, frame, named, new_table
from tests.tables import APPEND_ONLY, KEYED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROW = "struct<id: bigint, name: string>"
ENVELOPE = f"before {ROW}, after {ROW}, op string, source struct<ts_ms: bigint>"


def event(op: str | None, ts: int, before: Any = None, after: Any = None) -> str:
    if op is None:
        return "{}"
    return json.dumps({"before": before, "after": after, "op": op, "source": {"ts_ms": ts}})


def row(key: int, name: str) -> dict[str, Any]:
    return {"id": key, "name": name}


def test_events_that_came_out_of_order_leave_what_the_source_has(spark: SparkSession, tmp_path: Path) -> None:
    """Reads, creates, updates, deletes with their tombstones, and a key that changed twice in a batch."""
    table = new_table(tmp_path / "table")
    files = tmp_path / "in"
    files.mkdir()
    (files / "first.json").write_text(
        "\n".join(
            [
                event("u", 30, row(1, "b"), row(1, "c")),
                event("r", 10, None, row(1, "a")),
                event("c", 11, None, row(2, "x")),
                event("u", 20, row(1, "a"), row(1, "b")),
                event("d", 40, row(2, "x"), None),
                event(None, 0),
                event("c", 12, None, row(3, "kept")),
            ]
        )
    )
    events = spark.readStream.schema(ENVELOPE).json(str(files))
    reports: list[BatchReport] = []
    query = stream(
        from_debezium(events),
        table.uri,
        str(tmp_path / "checkpoint"),
        change_type_column="_op",
        order_by="_sequence",
        trigger={"availableNow": True},
        report=reports.append,
    )
    query.awaitTermination()
    assert content(table) == [(1, "c"), (3, "kept")]
    (told,) = reports
    assert (told.batch_id, told.rows, told.skipped, told.through_owners) == (0, 6, 0, False)
    ends = ChangeFeed.open(table.uri).latest().values()
    assert told.entries == sum(end > layout.FIRST_WAL_POSITION for end in ends)
    assert told.wal_bytes > 0


SEQUENCED = pa.schema(
    [*KEYED, pa.field("_sequence", pa.int64()), pa.field("gone", pa.bool_())], metadata=KEYED.metadata
)


def applied(spark: SparkSession, table: lancewal.Table, place: Path, events: list[str], **how: Any) -> None:
    """The events of one micro-batch, by a stream that goes on with its checkpoint."""
    place.mkdir(exist_ok=True)
    (place / f"{len(list(place.iterdir()))}.json").write_text("\n".join(events))
    source = from_debezium(spark.readStream.schema(ENVELOPE).json(str(place)))
    query = apply_changes(
        source,
        table.uri,
        str(place) + "-checkpoint",
        sequence_by="_sequence",
        change_type_column="_op",
        trigger={"availableNow": True},
        **how,
    )
    query.awaitTermination()


def test_an_event_that_comes_late_loses_in_a_later_micro_batch_too(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = new_table(tmp_path / "table", SEQUENCED)
    kept = {"deleted_column": "gone"}
    place = tmp_path / "in"
    first = [event("u", 30, None, row(1, "c")), event("u", 20, None, row(1, "b"))]
    applied(spark, table, place, [*first, event("d", 40, row(2, "x"), None)], **kept)
    late = [event("r", 10, None, row(1, "a")), event("u", 35, None, row(2, "back"))]
    applied(spark, table, place, [*late, event("c", 5, None, row(3, "new"))], **kept)
    assert content(table) == [(1, "c", 30, False), (2, "x", 40, True), (3, "new", 5, False)]
    newer = [event("u", 50, None, row(2, "again")), event("d", 31, row(1, "c"), None)]
    applied(spark, table, place, newer, **kept)
    assert [(key, gone) for key, _, _, gone in content(table)] == [(1, True), (2, False), (3, False)]


def test_a_row_before_its_change_is_no_event_where_deletes_are_kept(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = new_table(tmp_path / "table", SEQUENCED)
    events = "id long, name string, _sequence long, _change_type string"

    def apply(kinds: list[tuple[int, str, int, str | None]]) -> None:
        frame(spark, kinds, events).coalesce(1).write.mode("append").json(str(tmp_path / "in"))
        apply_changes(
            spark.readStream.schema(events).json(str(tmp_path / "in")),
            table.uri,
            str(tmp_path / "checkpoint"),
            sequence_by="_sequence",
            change_type_column="_change_type",
            deleted_column="gone",
            trigger={"availableNow": True},
        ).awaitTermination()

    # As Delta tells of an update: both rows have the same version.
    pairs = [[(i, "new", 1, "update_postimage"), (i, "old", 1, "update_preimage")] for i in range(4)]
    apply([*(each for pair in pairs for each in pair), (9, "x", 1, None), (8, "y", 1, "Delete")])
    assert content(table) == [
        *((i, "new", 1, False) for i in range(4)),
        (8, "y", 1, True),
        (9, "x", 1, False),
    ]
    with pytest.raises(Exception, match="column _change_type says remove; known are upsert"):
        apply([(1, "z", 2, "remove")])


def test_deletes_in_sequence_remove_rows_where_no_column_keeps_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = new_table(tmp_path / "table", SEQUENCED)
    place = tmp_path / "in"
    applied(spark, table, place, [event("c", 30, None, row(key, "a")) for key in (1, 2)])
    # The one is older than the row, the other is not.
    applied(spark, table, place, [event("d", 20, row(1, "a"), None), event("d", 40, row(2, "a"), None)])
    assert [row[:3] for row in content(table)] == [(1, "a", 30)]


def test_a_table_that_cannot_keep_the_sequence_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    keyed = new_table(tmp_path / "keyed")
    events = from_debezium(spark.readStream.schema(ENVELOPE).json(str(tmp_path)))
    with pytest.raises(InvalidInputError, match="both have _sequence"):
        apply_changes(events, keyed.uri, str(tmp_path / "c"), sequence_by="_sequence")
    sequenced = new_table(tmp_path / "table", SEQUENCED)
    how = {"sequence_by": "_sequence", "change_type_column": "_op", "deleted_column": "name"}
    with pytest.raises(InvalidInputError, match="no boolean column"):
        apply_changes(events, sequenced.uri, str(tmp_path / "c"), **how)


def test_a_sequence_of_structs_failed_in_the_second_micro_batch(spark: SparkSession, tmp_path: Path) -> None:
    at = pa.struct([("file", pa.int32()), ("row", pa.int32())])
    table = new_table(tmp_path / "table", pa.schema([*KEYED, pa.field("at", at)], metadata=KEYED.metadata))
    events = spark.readStream.schema("id long, name string, at struct<file: int, row: int>")
    with pytest.raises(InvalidInputError, match=r"sequence_by names at, which is struct.*plain value"):
        apply_changes(events.json(str(tmp_path)), table.uri, str(tmp_path / "c"), sequence_by="at")


def test_one_query_fills_two_tables_each_micro_batch_once(spark: SparkSession, tmp_path: Path) -> None:
    tables = [new_table(tmp_path / name, APPEND_ONLY) for name in ("one", "other")]
    writers = [batch_writer(table.uri, f"of-{number}") for number, table in enumerate(tables)]
    for number in (0, 1, 1):
        for writer in writers:
            writer(frame(spark, named(number * 10, 3)), number)
    for table in tables:
        assert content(table) == named(0, 3) + named(10, 3)
    with pytest.raises(InvalidInputError, match="nothing"):
        batch_writer(tables[0].uri, "third")(frame(spark, [(1,)], "nothing long"), 0)


def test_what_is_no_event_is_refused(spark: SparkSession) -> None:
    with pytest.raises(InvalidInputError, match="before, after is missing"):
        from_debezium(frame(spark, [], "id long, op string"))
    with pytest.raises(InvalidInputError, match="the same columns"):
        from_debezium(frame(spark, [], f"op string, before {ROW}, after struct<id: bigint>"))
    twice = "struct<id: bigint, _op: string>"
    with pytest.raises(InvalidInputError, match="rename it"):
        from_debezium(frame(spark, [], f"op string, before {twice}, after {twice}"))
