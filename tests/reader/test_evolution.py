"""Columns that were added, dropped and renamed while older rows lie in SSTables, WAL and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import lancewal
from bench.distant import distant_store
from lancewal.errors import InvalidInputError
from lancewal.reader import TableReader
from tests.reader.support import TableUnderTest, named
from tests.tables import KEY

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), False, KEY),
        pa.field("name", pa.string()),
        pa.field("size", pa.int64()),
        pa.field("place", pa.struct([("x", pa.int64()), ("y", pa.int64())])),
    ]
)

ID_AND_V = pa.schema([pa.field("id", pa.int64(), False, KEY), pa.field("v", pa.int64())])


def row(key: int, name: str) -> dict[str, Any]:
    return {"id": key, "name": name, "size": key * 10, "place": {"x": key, "y": -key}}


def rows(*entries: tuple[int, str]) -> pa.Table:
    return pa.Table.from_pylist([row(key, name) for key, name in entries], SCHEMA)


@pytest.fixture
def table(tmp_path: Path) -> TableUnderTest:
    """Base 0 and 1, flushed 1 and 2."""
    table = TableUnderTest(tmp_path / "t", SCHEMA, rows((0, "base"), (1, "base")))
    with table.writer() as writer:
        writer.put(rows((1, "flushed"), (2, "flushed")))
    return table


def shown(reader: TableReader, **options: Any) -> list[dict[str, Any]]:
    return sorted(reader.scan(**options).to_table().to_pylist(), key=lambda each: int(each["id"]))


def test_a_dropped_column_is_gone_from_every_level(table: TableUnderTest) -> None:
    with table.writer() as writer:
        writer.put(rows((2, "live"), (3, "live")))
        table.dataset.drop_columns(["size"])
        for reader in table.readers:
            found = shown(reader)
            assert [each["name"] for each in found] == ["base", "flushed", "live", "live"]
            assert all("size" not in each for each in found)
            assert reader.lookup([3, 1]).table["name"].to_pylist() == ["live", "flushed"]


def test_an_added_column_reads_as_null_in_older_rows(table: TableUnderTest) -> None:
    with table.writer() as writer:
        writer.put(rows((2, "live"), (3, "live")))
        table.dataset.add_columns(pa.field("note", pa.string()))
        fill = pa.Table.from_pylist([{**row(0, "base"), "note": "filled"}], table.live.base().schema.plain)
        table.dataset.merge_insert("id").when_matched_update_all().execute(fill)
        for reader in table.readers:
            assert [each["note"] for each in shown(reader)] == ["filled", None, None, None]
            assert [each["id"] for each in shown(reader, filter="note IS NULL")] == [1, 2, 3]
            assert [each["id"] for each in shown(reader, filter="note = 'filled'")] == [0]
            assert reader.scan(filter="note IS NULL AND name = 'flushed'").count_rows() == 1
            assert reader.lookup([1], ["note", "id"]).table.to_pylist() == [{"note": None, "id": 1}]


def test_the_first_filter_on_a_new_column_is_understood(table: TableUnderTest) -> None:
    assert [len(shown(reader)) for reader in table.readers] == [3, 3]
    table.dataset.add_columns(pa.field("note", pa.string()))
    for reader in table.readers:
        assert reader.scan(filter="note IS NULL").count_rows() == 3
    table.dataset.alter_columns({"path": "note", "name": "remark"})
    for reader in table.readers:
        with pytest.raises(InvalidInputError, match="note"):
            reader.scan(filter="note IS NULL").count_rows()


def test_a_renamed_column_is_found_in_older_rows_under_its_new_name(table: TableUnderTest) -> None:
    with table.writer() as writer:
        writer.put(rows((2, "live"), (3, "live")))
        table.dataset.alter_columns({"path": "name", "name": "title"})
        for reader in table.readers:
            assert [each["title"] for each in shown(reader)] == ["base", "flushed", "live", "live"]
            assert [each["id"] for each in shown(reader, filter="title = 'flushed'")] == [1]
            assert [each["id"] for each in shown(reader, filter="title IN ('live', 'base')")] == [0, 2, 3]
            assert reader.scan(filter="title = 'live'").count_rows() == 2
            assert reader.lookup([2, 1]).table["title"].to_pylist() == ["live", "flushed"]
    again = table.open()
    again.put(
        pa.Table.from_pylist(
            [{"id": 4, "title": "after"}], pa.schema([SCHEMA.field("id"), ("title", pa.string())])
        )
    )
    for reader in table.readers:
        assert shown(reader, filter="title = 'after'")[0]["size"] is None
    again.close()


def test_a_name_that_was_dropped_and_used_again_shows_no_old_values(table: TableUnderTest) -> None:
    with table.writer() as writer:
        writer.put(rows((3, "live")))
        table.dataset.drop_columns(["size"])
        table.dataset.add_columns(pa.field("size", pa.int64()))
        for reader in table.readers:
            assert [each["size"] for each in shown(reader)] == [None, None, None, None]


def test_a_reused_field_id_pairs_no_wrong_columns(tmp_path: Path) -> None:
    # The tombstone column of an SSTable has the id that the base's next column gets.
    table = TableUnderTest(tmp_path / "t", data=named({0: "base"}))
    table.flushed({1: "flushed"}, [0])
    with table.writer() as writer:
        writer.put(named({2: "live"}))
        table.dataset.add_columns(pa.field("flag", pa.bool_()))
        for reader in table.readers:
            assert shown(reader) == [
                {"id": 1, "name": "flushed", "flag": None},
                {"id": 2, "name": "live", "flag": None},
            ]
            assert reader.scan(filter="flag IS NULL").count_rows() == 2
            assert reader.scan(filter="flag").count_rows() == 0


def test_a_field_of_a_struct_can_be_filtered_and_read(table: TableUnderTest) -> None:
    with table.writer() as writer:
        writer.put(rows((3, "live")))
        for reader in table.readers:
            assert [each["id"] for each in shown(reader, filter="place.x >= 2")] == [2, 3]
            assert [each["place"] for each in shown(reader, filter="place.y = -1")] == [{"x": 1, "y": -1}]


def test_a_writer_with_an_older_schema_is_read_beside_one_with_the_newer(table: TableUnderTest) -> None:
    old = table.open()
    old.put(rows((5, "old schema")))
    table.dataset.add_columns(pa.field("extra", pa.string()))
    old.put(rows((6, "old schema")))
    for reader in table.readers:
        assert [each["extra"] for each in shown(reader, filter="id >= 5")] == [None, None]
    new = table.open()
    extended = pa.schema([*SCHEMA, pa.field("extra", pa.string())])
    new.put(pa.Table.from_pylist([{**row(6, "new schema"), "extra": "x"}], extended))
    for reader in table.readers:
        assert [each["extra"] for each in shown(reader, filter="id >= 5")] == [None, "x"]
    new.close()
    for reader in table.readers:
        assert [each["extra"] for each in shown(reader, filter="id >= 5")] == [None, "x"]


def _first_read(where: Path) -> tuple[pa.Table, int]:
    """What a reader sees that knows nothing yet, and how many requests it made, without Lance's."""
    store, backend = distant_store(where)
    rows = TableReader(store).scan().to_table()
    return rows.sort_by("id"), sum(backend.requests.values())


def test_the_first_read_after_many_versions_does_not_read_each_of_them(tmp_path: Path) -> None:
    where = tmp_path / "table"
    lance.write_dataset(pa.table({"id": [1], "v": [1]}, ID_AND_V), where)
    table = lancewal.initialize(where, unsharded=True)
    with table.writer() as writer:
        writer.put(pa.table({"id": [2], "v": [2]}, ID_AND_V))
    few = _first_read(where)[1]
    for number in range(100):
        lance.write_dataset(pa.table({"id": [10 + number], "v": [0]}, ID_AND_V), where, mode="append")
    rows, many = _first_read(where)
    assert rows.num_rows == 102
    assert many <= few + 5


def test_a_column_dropped_and_added_again_among_many_versions_is_another_one(tmp_path: Path) -> None:
    where = tmp_path / "table"
    lance.write_dataset(pa.table({"id": [1], "v": [1]}, ID_AND_V), where)
    table = lancewal.initialize(where, unsharded=True)
    lance.dataset(where).add_columns(pa.field("draft", pa.int64()))
    with table.writer() as writer:
        writer.put(pa.table({"id": [2], "v": [2], "draft": [7]}))
    for number in range(40):
        dataset = lance.dataset(where)
        if number == 20:
            dataset.drop_columns(["draft"])
        elif number == 21:
            dataset.add_columns(pa.field("note", pa.int64()))
        else:
            dataset.delete(f"id = {100 + number}")
    rows, _ = _first_read(where)
    assert rows["note"].to_pylist() == [None, None], "7 is a draft, not a note"
