"""Reading SSTables that pylance wrote and that lancewal wrote, as the table's current schema."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from lancewal.base.table import BaseTable
from lancewal.errors import ColumnMismatchError, InvalidInputError, StorageError
from lancewal.format.schema import TOMBSTONE, TableSchema
from lancewal.format.shard_manifest import SsTableEntry
from lancewal.sstable import ROW_OFFSET, KeyProbe, SsTable
from lancewal.storage import layout
from tests.sstable.tables import Base, Row, by_key, dead, key_field, rows_of, where

Write = Callable[..., SsTableEntry]

HISTORY: list[list[Row]] = [
    [{"id": 5, "t": "five"}, {"id": 3, "t": "three"}, {"id": 5, "t": "FIVE"}],
    [dead(id=3), {"id": -1, "t": None}, {"id": 9, "t": "nine"}, dead(id=7)],
    [{"id": 9, "t": "NINE"}],
]
LIVE = {(5,): "FIVE", (-1,): None, (9,): "NINE"}


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return Base.create(tmp_path / "t", [key_field("id", pa.int64()), pa.field("t", pa.string())]).initialize()


@pytest.fixture(params=["ours", "pylance"])
def write(request: pytest.FixtureRequest, base: Base) -> Write:
    return base.write if request.param == "ours" else base.flush_with_pylance


@pytest.fixture
def table(base: Base, write: Write) -> SsTable:
    return base.open(write(*HISTORY))


def test_a_scan_gives_the_newest_live_rows_in_insert_order(base: Base, table: SsTable) -> None:
    rows = rows_of(table.scan(base.schema, ["t", "id"]))
    assert rows == [{"t": "FIVE", "id": 5}, {"t": None, "id": -1}, {"t": "NINE", "id": 9}]
    assert table.count_live() == 3


def test_a_scan_shows_tombstones_and_offsets_when_asked(base: Base, table: SsTable) -> None:
    rows = rows_of(table.scan(base.schema, ["id"], with_offsets=True, with_tombstone=True))
    assert {row["id"]: row[TOMBSTONE] for row in rows} == {5: False, 3: True, -1: False, 9: False, 7: True}
    offsets = [row[ROW_OFFSET] for row in rows]
    assert offsets == sorted(offsets)
    back = table.take(np.array(offsets), base.schema, ["id"], with_tombstone=True)
    assert back.to_pylist() == [{"id": row["id"], TOMBSTONE: row[TOMBSTONE]} for row in rows]


def test_a_filter_is_pushed_down(base: Base, table: SsTable) -> None:
    assert rows_of(table.scan(base.schema, ["id"], filter=where("id > 4 AND t != 'x'", base.schema))) == [
        {"id": 5},
        {"id": 9},
    ]
    assert (
        rows_of(table.scan(base.schema, [], filter=where("id IN (9, 9)", base.schema), with_offsets=True))
        != []
    )
    assert rows_of(table.scan(base.schema, ["id"], filter=where("id = 3", base.schema))) == []
    assert (
        rows_of(table.scan(base.schema, ["id"], filter=where("id = 3", base.schema), with_tombstone=True))
        != []
    )


@pytest.mark.parametrize("bad", ["nope = 1", "id = = 1", "id"])
def test_a_filter_that_does_not_fit_is_refused(base: Base, table: SsTable, bad: str) -> None:
    with pytest.raises(InvalidInputError, match="filter"):
        list(table.scan(base.schema, ["id"], filter=where(bad, base.schema)))


def test_an_unknown_column_is_refused(base: Base, table: SsTable) -> None:
    with pytest.raises(InvalidInputError, match="nope"):
        table.scan(base.schema, ["id", "nope"])
    with pytest.raises(InvalidInputError, match="nope"):
        table.take(np.array([0]), base.schema, ["nope"])


def test_small_batches_on_request(base: Base, table: SsTable) -> None:
    batches = list(table.scan(base.schema, ["id"], batch_size=1))
    assert [batch.num_rows for batch in batches] == [1, 1, 1]


def test_keys_are_all_keys_with_their_newest_row(base: Base, table: SsTable) -> None:
    (ids,), offsets, tombstones = table.keys(base.schema)
    assert dict(zip(ids.to_pylist(), tombstones.tolist(), strict=True)) == {
        5: False,
        3: True,
        -1: False,
        9: False,
        7: True,
    }
    assert table.take(offsets, base.schema, ["id"])["id"].to_pylist() == ids.to_pylist()
    assert table.keys(base.schema)[1] is offsets


def test_a_lookup_finds_the_newest_row_and_not_the_oldest_duplicate(base: Base, table: SsTable) -> None:
    asked = pa.array([9, 4, 5, 3, 5, -1, 1 << 40])
    found = table.lookup([asked])
    assert (found >= 0).tolist() == [True, False, True, True, True, True, False]
    rows = table.take(found[found >= 0], base.schema, ["id", "t"], with_tombstone=True).to_pylist()
    assert [(row["id"], row["t"], row[TOMBSTONE]) for row in rows] == [
        (9, "NINE", False),
        (5, "FIVE", False),
        (3, None, True),
        (5, "FIVE", False),
        (-1, None, False),
    ]


def test_one_probe_serves_many_sstables(base: Base, table: SsTable) -> None:
    probe = KeyProbe([pa.array([5, 6])])
    other = base.open(base.write([{"id": 6, "t": "six"}], generation=2))
    assert [(found >= 0).tolist() for found in (table.lookup(probe), other.lookup(probe))] == [
        [True, False],
        [False, True],
    ]


def test_a_null_key_is_never_found(base: Base) -> None:
    entry = base.write([{"id": 0, "t": ""}])
    asked = [pa.array([None, 0, None], pa.int64())]
    assert base.open(entry).lookup(asked).tolist() == [-1, 0, -1]
    base.store.delete(f"{layout.sstable_dir(base.shard_id, entry.path)}/{layout.BLOOM_FILTER_NAME}")
    base.open(entry).forget()
    assert base.open(entry).lookup(asked).tolist() == [-1, 0, -1]


def test_no_keys_and_no_rows_are_fine(base: Base, table: SsTable) -> None:
    assert table.lookup([pa.array([], pa.int64())]).tolist() == []
    empty = table.take(np.array([], np.int64), base.schema, ["t"])
    assert (empty.num_rows, empty.schema.names) == (0, ["t"])


def test_a_key_of_another_type_is_refused(base: Base) -> None:
    table = base.open(base.write([{"id": 1, "t": ""}]))
    with pytest.raises(InvalidInputError, match="int64"):
        table.lookup([pa.array([1], pa.uint64())])


def test_rows_come_in_the_order_asked(base: Base, table: SsTable) -> None:
    _, offsets, _ = table.keys(base.schema)
    wanted = np.concatenate([offsets[::-1], offsets[:1]])
    ids = table.keys(base.schema)[0][0].to_pylist()
    assert table.take(wanted, base.schema, ["id"])["id"].to_pylist() == [*ids[::-1], ids[0]]


@pytest.mark.parametrize("offset", [-1, 1000, 0])
def test_an_offset_that_is_no_newest_row_is_refused(base: Base, offset: int) -> None:
    table = base.open(base.flush_with_pylance([{"id": 1, "t": "old"}, {"id": 1, "t": "new"}]))
    with pytest.raises(InvalidInputError, match="1 of 2 row offsets"):
        table.take(np.array([1, offset]), base.schema, ["id"])


def test_a_lookup_without_sidecars_reads_the_key_column(base: Base, table: SsTable) -> None:
    directory = layout.sstable_dir(base.shard_id, table.entry.path)
    asked = [pa.array([9, 4, 5, 3])]
    expected = table.lookup(asked).tolist()
    for name in (layout.BLOOM_FILTER_NAME, layout.PK_PAGE_DATA_NAME, layout.PK_PAGE_LOOKUP_NAME):
        base.store.delete(f"{directory}/{name}")
    table.forget()
    bare = base.open(table.entry)
    assert bare.lookup(asked).tolist() == expected
    with pytest.raises(InvalidInputError, match="int64"):
        bare.lookup([pa.array([9], pa.int32())])


def test_a_broken_bloom_filter_slows_a_lookup_and_does_not_break_it(
    base: Base, table: SsTable, caplog: pytest.LogCaptureFixture
) -> None:
    directory = layout.sstable_dir(base.shard_id, table.entry.path)
    base.store.put(f"{directory}/{layout.BLOOM_FILTER_NAME}", b"short")
    assert table.lookup([pa.array([5])])[0] >= 0
    assert "bloom filter" in caplog.text


def test_a_broken_key_index_is_an_error(base: Base, table: SsTable) -> None:
    directory = layout.sstable_dir(base.shard_id, table.entry.path)
    base.store.put(f"{directory}/{layout.PK_PAGE_LOOKUP_NAME}", b"not a lance file at all")
    with pytest.raises(StorageError, match="key index"):
        table.lookup([pa.array([5])])


def test_an_sstable_that_is_gone_is_a_storage_error(base: Base) -> None:
    table = base.open(SsTableEntry(1, layout.fresh_sstable_name(1)))
    with pytest.raises(StorageError, match="open the SSTable"):
        table.count_live()


def test_a_bloom_filter_keeps_absent_keys_from_the_key_index(base: Base) -> None:
    table = base.open(base.write([{"id": i, "t": ""} for i in range(100)]))
    directory = layout.sstable_dir(base.shard_id, table.entry.path)
    base.store.delete(f"{directory}/{layout.PK_PAGE_LOOKUP_NAME}")
    base.store.put(f"{directory}/{layout.PK_PAGE_LOOKUP_NAME}", b"broken, and read only when it must be")
    assert table.lookup([pa.array([10**9 + 7])]).tolist() == [-1]


@pytest.mark.parametrize("kind", ["int", "text", "composite"])
def test_keys_over_many_pages_with_duplicates_across_their_borders(tmp_path: Path, kind: str) -> None:
    fields = {
        "int": [key_field("k", pa.int64())],
        "text": [key_field("k", pa.string())],
        "composite": [key_field("k", pa.string(), 1), key_field("j", pa.int32(), 2)],
    }[kind]
    base = Base.create(tmp_path / "t", [*fields, pa.field("x", pa.int64())]).initialize()
    numbers = np.concatenate([np.arange(15_000), np.full(9_000, 77), np.arange(0, 15_000, 3)]).astype(
        np.int64
    )
    columns = _key_columns(kind, numbers)
    names = [field.name for field in fields]
    rows = pa.Table.from_arrays([*columns, pa.array(np.arange(len(numbers)))], schema=base.dataset.schema)
    table = base.open(base.flush_table_with_pylance(rows.slice(0, 20_000), rows.slice(20_000)))

    newest = dict(zip(numbers.tolist(), range(len(numbers)), strict=True))
    asked = np.random.default_rng(1).permutation(np.arange(-10, 15_010))
    found = table.lookup(_key_columns(kind, asked))
    assert found.tolist() == [newest.get(number, -1) for number in asked.tolist()]
    few = np.array([77, 0, 14_999, -3])
    assert table.lookup(_key_columns(kind, few)).tolist() == [newest[77], newest[0], newest[14_999], -1]
    assert table.lookup(_key_columns(kind, np.array([77]))).tolist() == [newest[77]]
    assert rows_of(table.scan(base.schema, ["x"], filter=where("x > 23999 AND x < 24003", base.schema))) != []
    assert table.count_live() == 15_000
    assert len(table.keys(base.schema)[0]) == len(names)


def _key_columns(kind: str, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> list[pa.Array]:
    if kind == "int":
        return [pa.array(numbers)]
    texts = pa.array([f"k{number:07d}" for number in numbers.tolist()])
    return [texts] if kind == "text" else [texts, pa.array(numbers.astype(np.int32))]


def test_many_threads_share_one_sstable(base: Base) -> None:
    entry = base.write([{"id": i, "t": str(i)} for i in range(2_000)])
    schema = base.schema
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            asked = np.random.default_rng(seed).integers(0, 4_000, 50)
            table = base.open(entry)
            found = table.lookup([pa.array(asked)])
            assert found.tolist() == [i if i < 2_000 else -1 for i in asked.tolist()]
            rows = table.take(found[found >= 0], schema, ["t"])
            assert rows["t"].to_pylist() == [str(i) for i in asked.tolist() if i < 2_000]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_handles_are_shared_within_the_process(base: Base) -> None:
    entry = base.write([{"id": 1, "t": ""}])
    assert base.open(entry).dataset is base.open(entry).dataset


# The table's schema moves on after the SSTable was written.


@pytest.fixture
def wide(tmp_path: Path) -> Base:
    fields = [
        pa.field("old", pa.int64()),
        key_field("id", pa.int64()),
        pa.field("n", pa.int64()),
        pa.field("t", pa.string()),
    ]
    return Base.create(tmp_path / "t", fields, [{"old": 0, "id": -1, "n": 0, "t": ""}]).initialize()


WIDE: list[Row] = [{"old": i, "id": i, "n": 10 * i, "t": f"t{i}"} for i in range(4)]


@pytest.fixture(params=["ours", "pylance"])
def wide_table(request: pytest.FixtureRequest, wide: Base) -> SsTable:
    rows = [*WIDE, dead(id=99)]
    return wide.open(wide.write(rows) if request.param == "ours" else wide.flush_with_pylance(rows))


def _scan(table: SsTable, base: Base, columns: list[str], **how: Any) -> list[Row]:
    if "filter" in how:
        how["filter"] = where(how["filter"], base.schema)
    return rows_of(table.scan(base.schema, columns, **how))


def stored_names(table: SsTable, base: Base) -> dict[str, str | None]:
    """For every column that the table has now, its name in the SSTable."""
    return {name: source.stored_name for name, source in table.alignment(base.schema).sources.items()}


def test_a_column_added_later_reads_as_nulls(wide: Base, wide_table: SsTable) -> None:
    wide.dataset.add_columns(pa.schema([pa.field("added", pa.int64())]))
    assert stored_names(wide_table, wide)["added"] is None
    assert _scan(wide_table, wide, ["id", "added"]) == [{"id": i, "added": None} for i in range(4)]
    assert _scan(wide_table, wide, ["id"], filter="n >= 20") == [{"id": 2}, {"id": 3}]
    assert _scan(wide_table, wide, ["id"], filter="added IS NULL AND n = 30") == [{"id": 3}]
    assert _scan(wide_table, wide, ["id"], filter="added > 0") == []
    batch = wide_table.take(np.array([2]), wide.schema, ["added", "n"])
    assert batch.to_pylist() == [{"added": None, "n": 20}]


def test_a_scan_of_only_columns_added_later_has_all_rows(wide: Base, wide_table: SsTable) -> None:
    wide.dataset.add_columns(pa.schema([pa.field("added", pa.int64())]))
    assert _scan(wide_table, wide, ["added"]) == [{"added": None}] * 4
    assert wide_table.take(np.array([1, 0]), wide.schema, ["added"]).num_rows == 2


def test_a_renamed_column_keeps_its_values(wide: Base, wide_table: SsTable) -> None:
    wide.dataset.alter_columns({"path": "n", "name": "number"})
    wide.dataset.alter_columns({"path": "t", "name": "n"})
    assert stored_names(wide_table, wide) == {"old": "old", "id": "id", "number": "n", "n": "t"}
    assert _scan(wide_table, wide, ["n", "number"]) == [{"n": f"t{i}", "number": 10 * i} for i in range(4)]
    assert _scan(wide_table, wide, ["id"], filter="number = 10 OR n = 't3'") == [{"id": 1}, {"id": 3}]
    assert wide_table.take(np.array([3]), wide.schema, ["n"]).to_pylist() == [{"n": "t3"}]
    with pytest.raises(InvalidInputError, match="filter"):
        wide_table.scan(wide.schema, ["id"], filter=where("t = 't3'", wide.schema))


def test_a_renamed_key_is_still_the_key(wide: Base, wide_table: SsTable) -> None:
    renamed = [f.with_name("key") if f.name == "id" else f for f in wide.schema.columns]
    schema = TableSchema(pa.schema(renamed), ("key",))
    (keys,), offsets, tombstones = wide_table.keys(schema)
    assert keys.to_pylist() == [0, 1, 2, 3, 99]
    assert tombstones.tolist() == [False] * 4 + [True]
    assert wide_table.lookup([keys]).tolist() == offsets.tolist()


def test_a_dropped_column_is_not_read(wide: Base, wide_table: SsTable) -> None:
    wide.dataset.drop_columns(["old"])
    assert _scan(wide_table, wide, ["id", "n"], filter="n > 10") == [{"id": i, "n": 10 * i} for i in (2, 3)]
    with pytest.raises(InvalidInputError, match="filter"):
        wide_table.scan(wide.schema, ["id"], filter=where("old = 1", wide.schema))


def test_a_column_that_reuses_a_dropped_name_is_not_paired_with_the_old_one(
    wide: Base, wide_table: SsTable
) -> None:
    wide.dataset.drop_columns(["old"])
    wide.dataset.add_columns(pa.schema([pa.field("old", pa.int64())]))
    assert stored_names(wide_table, wide)["old"] is None
    assert _scan(wide_table, wide, ["old"]) == [{"old": None}] * 4
    assert _scan(wide_table, wide, ["id"], filter="old = 1") == []


def test_a_column_that_reuses_a_dropped_id_with_another_type_is_not_paired(wide: Base) -> None:
    wide.dataset.add_columns(pa.schema([pa.field("short_lived", pa.string())]))
    reused = wide.schema.field_ids["short_lived"]
    table = wide.open(wide.write([{**row, "short_lived": "x"} for row in WIDE]))
    wide.dataset.drop_columns(["short_lived"])
    wide.dataset.add_columns(pa.schema([pa.field("flag", pa.int64())]))
    assert wide.schema.field_ids["flag"] == reused, "the case needs Lance to reuse the id"
    schema = BaseTable.open(wide.uri).schema
    assert rows_of(table.scan(schema, ["flag"])) == [{"flag": None}] * 4


def test_an_sstable_with_another_type_under_a_columns_id_is_not_read_as_nulls(base: Base) -> None:
    table = base.open(base.write([{"id": 1, "t": "x"}]))
    other = pa.schema([f if f.name != "t" else f.with_type(pa.int64()) for f in base.schema.columns])
    schema = TableSchema(other, ("id",))
    for read in (lambda: list(table.scan(schema, ["id"])), lambda: table.keys(schema)):
        with pytest.raises(ColumnMismatchError, match=f"{table.entry.path}.*'t'.*string.*int64"):
            read()


def test_a_column_that_gets_the_tombstones_id_is_not_paired_with_it(wide: Base, wide_table: SsTable) -> None:
    wide.dataset.add_columns(pa.schema([pa.field("flag", pa.bool_())]))
    tombstone = {f.name(): f.id() for f in wide_table.dataset.lance_schema.fields()}[TOMBSTONE]
    assert wide.schema.field_ids["flag"] == tombstone, "the case needs the same id"
    assert _scan(wide_table, wide, ["id", "flag"]) == [{"id": i, "flag": None} for i in range(4)]


def test_children_of_structs_are_matched_by_id_too(tmp_path: Path) -> None:
    item = pa.struct([pa.field("p", pa.int32()), pa.field("q", pa.string())])
    struct = pa.struct(
        [pa.field("a", pa.int32()), pa.field("b", pa.list_(item)), pa.field("c", pa.float64())]
    )
    base = Base.create(tmp_path / "t", [key_field("id", pa.int64()), pa.field("s", struct)]).initialize()
    values: list[Row | None] = [
        {"a": 1, "b": [{"p": 1, "q": "x"}, None, {"p": 2, "q": None}], "c": 0.5},
        None,
        {"a": 2, "b": None, "c": None},
        {"a": None, "b": [], "c": 1.5},
    ]
    table = base.open(base.write([{"id": i, "s": value} for i, value in enumerate(values)]))
    for change in ({"path": "s.b.item.q", "name": "r"}, {"path": "s.c", "name": "a2"}):
        base.dataset.alter_columns(change)
    base.dataset.drop_columns(["s.a"])
    base.dataset.add_columns(pa.schema([pa.field("s", pa.struct([pa.field("new", pa.int8())]))]))
    assert [row["s"] for row in _scan(table, base, ["s"])] == [
        {"b": [{"p": 1, "r": "x"}, None, {"p": 2, "r": None}], "a2": pytest.approx(0.5), "new": None},
        None,
        {"b": None, "a2": None, "new": None},
        {"b": [], "a2": pytest.approx(1.5), "new": None},
    ]
    assert _scan(table, base, ["id"], filter="s.a2 > 1") == [{"id": 3}]
    assert [batch.num_rows for batch in table.scan(base.schema, ["s"], batch_size=2)] == [2, 2]
    batches = pa.Table.from_batches(table.scan(base.schema, ["s"], batch_size=1))
    assert [row["s"] for row in batches.to_pylist()] == [row["s"] for row in _scan(table, base, ["s"])]


def test_a_child_that_reuses_a_dropped_childs_name_is_not_paired_with_it(tmp_path: Path) -> None:
    struct = pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.int32())])
    fields = [key_field("id", pa.int64()), pa.field("s", struct), pa.field("last", pa.int8())]
    base = Base.create(tmp_path / "t", fields).initialize()
    table = base.open(base.write([{"id": 1, "s": {"a": 1, "b": 2}}]))
    base.dataset.drop_columns(["s.b"])
    base.dataset.add_columns(pa.schema([pa.field("s", pa.struct([pa.field("b", pa.int32())]))]))
    assert base.dataset.schema.field("s").type == struct
    assert _scan(table, base, ["s"]) == [{"s": {"a": 1, "b": None}}]
    assert _scan(table, base, ["id"], filter="s.b = 2") == []


def test_pylance_reads_our_sstable_after_the_schema_moved_on(wide: Base) -> None:
    entry = wide.write(WIDE)
    wide.dataset.alter_columns({"path": "n", "name": "number"})
    wide.dataset.drop_columns(["old"])
    wide.dataset.add_columns(pa.schema([pa.field("added", pa.int64())]))
    ours = by_key(_scan(wide.open(entry), wide, wide.schema.names), ["id"])
    moved = [{"id": r["id"], "number": r["n"], "t": r["t"], "added": None} for r in WIDE]
    assert ours == by_key(moved, ["id"])
    theirs = by_key(wide.lsm(entry).to_table().to_pylist(), ["id"])
    del theirs[(-1,)]
    assert theirs == ours


def test_a_table_without_a_key_is_scanned_and_not_looked_up(tmp_path: Path) -> None:
    base = Base.create(tmp_path / "t", [pa.field("a", pa.int64())]).initialize()
    table = base.open(base.write([{"a": 1}, {"a": 1}]))
    assert _scan(table, base, ["a"]) == [{"a": 1}, {"a": 1}]
    assert _scan(base.open(base.flush_with_pylance([{"a": 1}, {"a": 1}])), base, ["a"]) == [
        {"a": 1},
        {"a": 1},
    ]
    with pytest.raises(InvalidInputError, match="no primary key"):
        table.lookup([pa.array([1])])


def test_an_sstable_without_a_tombstone_column_has_only_live_rows(base: Base) -> None:
    entry = SsTableEntry(1, layout.fresh_sstable_name(1))
    path = layout.child_uri(base.uri, layout.sstable_dir(base.shard_id, entry.path))
    lance.write_dataset(pa.Table.from_pylist([{"id": 1, "t": "x"}], schema=base.dataset.schema), path)
    table = base.open(entry)
    assert rows_of(table.scan(base.schema, ["id"], with_tombstone=True)) == [{"id": 1, TOMBSTONE: False}]
    assert table.count_live() == 1
    assert table.lookup([pa.array([1, 2])]).tolist() == [0, -1]
    assert table.take(np.array([0]), base.schema, [], with_tombstone=True).to_pylist() == [{TOMBSTONE: False}]


def test_an_sstable_of_old_lance_has_its_newest_row_first(base: Base) -> None:
    entry = SsTableEntry(1, layout.fresh_sstable_name(1))
    path = layout.child_uri(base.uri, layout.sstable_dir(base.shard_id, entry.path))
    rows = [{"id": 1, "t": "new"}, {"id": 2, "t": "only"}, {"id": 1, "t": "old"}]
    lance.write_dataset(pa.Table.from_pylist(rows, schema=base.dataset.schema), path)
    assert base.open(entry).lookup([pa.array([1, 2])]).tolist() == [0, 1]


def test_a_schema_whose_key_the_sstable_lacks_is_an_error(base: Base) -> None:
    table = base.open(base.write([{"id": 1, "t": ""}]))
    other = TableSchema(pa.schema([pa.field("k", pa.int64(), metadata={"lance:field_id": "50"})]), ("k",))
    with pytest.raises(StorageError, match="no key column 'k'"):
        table.keys(other)
