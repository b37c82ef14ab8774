"""Several MemTables read as one."""

from __future__ import annotations

from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal.errors import InvalidInputError
from lancewal.format.schema import TableSchema
from lancewal.index.store import IndexStore
from lancewal.memtable import MemTableView, RowsSoFar, scan_views
from lancewal.memtable.memtable import _live_masks

SHARD = UUID(int=1)
COLUMNS = pa.schema(
    [
        pa.field("id", pa.int64(), False, {"lance:field_id": "0"}),
        pa.field("name", pa.string(), metadata={"lance:field_id": "1"}),
    ]
)
KEYED = TableSchema(COLUMNS, ("id",))
APPEND_ONLY = TableSchema(COLUMNS, ())

Row = tuple[int, str | None]


def view(generation: int, batches: list[list[Row]], schema: TableSchema = KEYED) -> MemTableView:
    """A row without a name is a delete."""
    made = [
        pa.RecordBatch.from_arrays(
            [
                pa.array([key for key, _ in rows], pa.int64()),
                pa.array([name for _, name in rows], pa.string()),
                pa.array([name is None for _, name in rows], pa.bool_()),
            ],
            schema=schema.stored,
        )
        for rows in batches
    ]
    return MemTableView(SHARD, generation, made, RowsSoFar(schema, IndexStore((), schema)))


def shown(table: pa.Table) -> list[Row]:
    return sorted(zip(table.column("id").to_pylist(), table.column("name").to_pylist(), strict=True))


def test_the_newest_of_all_views_wins_and_deletes_hide_what_is_older() -> None:
    older = view(1, [[(1, "a"), (2, "b")], [(3, "c"), (1, "a2")]])
    newer = view(2, [[(2, None), (4, "d")], [(3, "c2")]])
    assert shown(scan_views([older, newer], KEYED)) == [(1, "a2"), (3, "c2"), (4, "d")]


def test_a_key_that_was_deleted_and_written_again_is_there() -> None:
    older = view(1, [[(1, "a"), (1, None)]])
    newer = view(2, [[(1, "again")]])
    assert shown(scan_views([older], KEYED)) == []
    assert shown(scan_views([older, newer], KEYED)) == [(1, "again")]


def test_deduplication_runs_before_the_filter() -> None:
    older, newer = view(1, [[(1, "match")]]), view(2, [[(1, "moved on")]])
    assert shown(scan_views([older, newer], KEYED, filter="name = 'match'")) == []


def test_columns_come_as_the_user_knows_them() -> None:
    found = scan_views([view(1, [[(1, "a")]])], KEYED, ["name"], "id = 1")
    assert found.schema.equals(pa.schema([pa.field("name", pa.string())]), check_metadata=True)
    assert found.column("name").to_pylist() == ["a"]


def test_keys_that_the_filter_names_are_found_in_their_newest_version() -> None:
    older = view(1, [[(1, "a"), (2, "b")], [(3, "c"), (1, "a2")]])
    newer = view(2, [[(2, None), (4, "d")], [(3, "c2"), (3, "c3")]])
    for keys, expected in (
        ("= 1", [(1, "a2")]),
        ("= 2", []),
        ("= 3", [(3, "c3")]),
        ("= 9", []),
        ("IN (4, 4, 1, 2, 9)", [(1, "a2"), (4, "d")]),
    ):
        assert shown(scan_views([older, newer], KEYED, filter=f"id {keys}")) == expected
        assert shown(scan_views([older, newer], KEYED, filter=f"id {keys} AND name LIKE '%2'")) == [
            row for row in expected if str(row[1]).endswith("2")
        ]
    many = ", ".join(map(str, range(40)))
    assert len(shown(scan_views([older, newer], KEYED, filter=f"id IN ({many})"))) == 3


def test_nothing_to_read_is_an_empty_table_with_columns() -> None:
    assert scan_views([], KEYED).schema.names == ["id", "name"]
    assert scan_views([view(1, [])], KEYED, filter="id > 3").num_rows == 0


def test_without_a_key_every_row_counts() -> None:
    views = [view(1, [[(1, "a"), (1, "a")]], APPEND_ONLY), view(2, [[(1, "a")]], APPEND_ONLY)]
    assert shown(scan_views(views, APPEND_ONLY)) == [(1, "a")] * 3


@pytest.mark.parametrize("columns", [["nope"], [], ["id", "id"]])
def test_columns_that_make_no_sense_are_refused(columns: list[str]) -> None:
    with pytest.raises(InvalidInputError):
        scan_views([view(1, [[(1, "a")]])], KEYED, columns)


_BATCHES = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["a", "b", "c", None])), min_size=1, max_size=5),
    max_size=4,
)


@settings(max_examples=60)
@given(tables=st.lists(_BATCHES, max_size=4))
def test_views_read_as_a_dictionary_would(tables: list[list[list[Row]]]) -> None:
    model: dict[int, str] = {}
    for batches in tables:
        for key, name in (row for batch in batches for row in batch):
            model.pop(key, None)
            if name is not None:
                model[key] = name
    views = [view(number, batches) for number, batches in enumerate(tables, 1)]
    assert shown(scan_views(views, KEYED)) == sorted(model.items())
    assert sum(int(mask.sum()) for mask in _live_masks(views)) == len(model)
    matching = sorted((key, name) for key, name in model.items() if name == "a" and key > 3)
    assert shown(scan_views(views, KEYED, filter="name = 'a' AND id > 3")) == matching


def test_deletes_were_noted_twice_when_a_reader_held_fewer_rows_than_another_had_seen() -> None:
    """Two threads that follow one log share what they know of it; the slower one has fewer entries."""
    whole = view(1, [[(key, None) for key in range(20)]])
    assert whole.stored.num_rows == 20
    whole.rows.hold([whole.batches[0].slice(0, 5)])
    again = MemTableView(SHARD, 1, whole.batches, whole.rows)
    assert again.tombstones.tolist() == [True] * 20
    for count in range(1, 20):
        part = MemTableView(SHARD, 1, [whole.batches[0].slice(0, count)], whole.rows, [0, count])
        assert part.tombstones.tolist() == [True] * count
