"""What lancewal writes as an SSTable, read by pylance and beside pylance's own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.file import LanceFileReader

from lancewal.errors import InvalidInputError, StorageError
from lancewal.format.schema import TOMBSTONE
from lancewal.format.shard_manifest import SsTableEntry
from lancewal.sstable import SsTable, rebuild_sidecars, refuse_null_structs, write_sstable
from lancewal.storage import ObjectStore, layout
from tests.sstable.tables import Base, Row, by_key, dead, key_field, live, stored

KEYS: dict[str, tuple[list[pa.Field], Any]] = {
    "int64": ([key_field("k", pa.int64())], lambda i: {"k": i - 3}),
    "int32": ([key_field("k", pa.int32())], lambda i: {"k": i - 3}),
    "uint64": ([key_field("k", pa.uint64())], lambda i: {"k": i + (1 << 63)}),
    "text": ([key_field("k", pa.string())], lambda i: {"k": f"key-{i}\u00e9" * (i % 3 + 1)}),
    "large_text": ([key_field("k", pa.large_string())], lambda i: {"k": f"key-{i}"}),
    "binary": ([key_field("k", pa.binary())], lambda i: {"k": bytes([i, 0, 255]) * (i % 3)}),
    "composite": (
        [key_field("k", pa.string(), 1), key_field("n", pa.int64(), 2)],
        lambda i: {"k": "ab\0"[: i % 4], "n": i},
    ),
}


@pytest.fixture(params=KEYS, ids=str)
def keyed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Base, Any]:
    fields, key = KEYS[request.param]
    base = Base.create(
        tmp_path / "t",
        [*fields, pa.field("x", pa.int64()), pa.field("s", pa.string())],
        [{**key(i), "x": -i, "s": "base"} for i in range(6)],
    )
    return base.initialize(), key


def _history(key: Any) -> list[list[Row]]:
    """Updates within and across batches, deletes, a key deleted and written again."""
    return [
        [{**key(i), "x": i, "s": f"s{i}"} for i in (7, 2, 5, 7)],
        [{**key(2), "x": 20, "s": None}, dead(**key(1)), {**key(9), "x": 9, "s": "nine"}],
        [dead(**key(9)), dead(**key(5)), {**key(5), "x": 50, "s": "again"}, {**key(8), "x": 8, "s": ""}],
    ]


def test_pylance_scans_counts_filters_and_looks_up_our_rows(keyed: tuple[Base, Any]) -> None:
    base, key = keyed
    names = base.schema.primary_key
    batches = _history(key)
    entry = base.write(*batches)
    under = [{**key(i), "x": -i, "s": "base"} for i in range(6)]
    expected = live([under, *batches], names)

    assert by_key(base.lsm(entry).to_table().to_pylist(), names) == expected
    assert base.lsm(entry).count_rows() == len(expected)
    matching = {k: row for k, row in expected.items() if row["x"] > 7}
    assert by_key(base.lsm(entry).filter("x > 7").to_table().to_pylist(), names) == matching

    for i in range(10):
        value = key(i)
        if len(names) == 1:
            array = pa.array([value["k"]], base.schema.columns.field("k").type)
        else:
            array = pa.array([value], pa.struct([base.dataset.schema.field(name) for name in names]))
        found = base.point_lookup(entry, array)
        assert found == [expected[k] for k in [tuple(value.values())] if k in expected]


def test_sidecars_are_what_pylance_writes_for_the_same_rows(keyed: tuple[Base, Any]) -> None:
    base, key = keyed
    rows = [{**key(i), "x": i, "s": "v"} for i in (4, 1, 8, 6)]
    theirs = base.flush_with_pylance(rows)
    ours = base.write(rows)
    for name in (layout.PK_PAGE_DATA_NAME, layout.PK_PAGE_LOOKUP_NAME):
        mine, other = (_lance_file(base, entry, name) for entry in (ours, theirs))
        assert mine.metadata().schema.equals(other.metadata().schema, check_metadata=True)
        assert mine.read_all().to_table() == other.read_all().to_table()
    bloom = [base.store.get(f"{_directory(base, e)}/{layout.BLOOM_FILTER_NAME}") for e in (ours, theirs)]
    assert bloom[0] == bloom[1]
    assert ours.primary_key_bytes == theirs.primary_key_bytes
    assert ours.physical_rows == theirs.physical_rows


def test_columns_get_the_ids_that_pylance_gives_them(tmp_path: Path) -> None:
    base = _evolved(tmp_path / "t")
    rows = [_evolved_row(i) for i in range(5)]
    theirs = base.lance_sstable(base.flush_with_pylance(rows))
    ours = base.lance_sstable(base.write(rows))
    assert str(ours.lance_schema) == str(theirs.lance_schema)
    assert ours.data_storage_version == theirs.data_storage_version
    assert ours.to_table() == theirs.to_table()
    fragments = [[f.metadata for f in dataset.get_fragments()] for dataset in (ours, theirs)]
    assert [f.files[0].fields for f in fragments[0]] == [f.files[0].fields for f in fragments[1]]


@pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
def test_nested_columns_with_gaps_and_ids_out_of_order_read_back(tmp_path: Path, version: str) -> None:
    base = _evolved(tmp_path / "t", data_storage_version=version)
    ids = [field.id() for field in _walk(base.dataset.lance_schema.fields())]
    assert len(ids) <= max(ids), "the case needs gaps"
    assert ids != sorted(ids) or version != "2.2", "the case needs ids out of order"
    rows = [_evolved_row(i) for i in range(50)]
    if version != "2.2":
        for row in rows:
            row["s"] = {"b": None, "c": None, **(row["s"] or {})}
            row["s"].pop("d", None)
    entry = base.write(rows[:20], rows[20:])
    dataset = base.lance_sstable(entry)
    assert dataset.data_storage_version == version
    assert [f.id() for f in _walk(dataset.lance_schema.fields())] == [*ids, max(ids) + 1]
    assert dataset.to_table().drop_columns([TOMBSTONE]).to_pylist() == rows
    dataset.validate()
    assert by_key(base.lsm(entry).to_table().to_pylist(), ["id"]) == by_key(rows, ["id"])


def test_a_table_without_gaps_is_one_commit(tmp_path: Path) -> None:
    base = Base.create(tmp_path / "t", [key_field("id", pa.int64()), pa.field("x", pa.int32())])
    entry = base.write([{"id": 1, "x": 1}, {"id": 1, "x": 2}])
    dataset = base.lance_sstable(entry)
    assert (dataset.version, len(dataset.get_fragments())) == (1, 1)
    assert dataset.to_table().to_pylist() == [{"id": 1, "x": 2, TOMBSTONE: False}]
    assert entry.physical_rows == 1


def test_rows_keep_their_insert_order(tmp_path: Path) -> None:
    base = Base.create(tmp_path / "t", [key_field("id", pa.int64()), pa.field("x", pa.int32())])
    rows = [{"id": i * 7919 % 1000, "x": i} for i in range(1000)]
    entry = base.write(*([row] for row in rows))
    assert base.lance_sstable(entry).to_table(columns=["id", "x"]).to_pylist() == rows


def test_a_table_without_a_key_keeps_every_row_and_has_no_sidecars(tmp_path: Path) -> None:
    fields = [pa.field("a", pa.int64()), pa.field("b", pa.string())]
    base = Base.create(tmp_path / "t", fields).initialize()
    rows: list[Row] = [{"a": 1, "b": "x"}, {"a": 1, "b": "x"}, {"a": None, "b": None}]
    theirs, ours = base.flush_with_pylance(rows), base.write(rows)
    assert base.lance_sstable(ours).to_table() == base.lance_sstable(theirs).to_table()
    assert not [i for i in base.store.list(_directory(base, ours)) if layout.PK_INDEX_DIR in i.path]
    assert ours.primary_key_bytes is None
    assert theirs.primary_key_bytes is None
    assert (ours.physical_rows, base.open(ours).count_live()) == (3, 3)


def test_the_entry_says_what_was_written(tmp_path: Path) -> None:
    base = Base.create(tmp_path / "t", [key_field("id", pa.int64())])
    entry = base.write([{"id": 3}], [{"id": 3}, {"id": 4}], generation=7, in_memory_bytes=123)
    assert replace(entry, notes="") == SsTableEntry(7, entry.path, 123, 2, 16)
    assert layout.parse_sstable_name(entry.path) == 7


def test_every_attempt_has_a_directory_of_its_own(tmp_path: Path) -> None:
    base = Base.create(tmp_path / "t", [key_field("id", pa.int64())])
    assert base.write([{"id": 1}]).path != base.write([{"id": 1}]).path


def test_nothing_to_write_is_refused(tmp_path: Path) -> None:
    base = Base.create(tmp_path / "t", [key_field("id", pa.int64())])
    with pytest.raises(InvalidInputError, match="no rows"):
        base.write([])
    assert base.store.list(layout.shard_dir(base.shard_id)) == []


def test_a_store_that_pylance_does_not_share_is_refused(tmp_path: Path, memory_store: ObjectStore) -> None:
    base = Base.create(tmp_path / "t", [key_field("id", pa.int64())])
    base.store = memory_store
    with pytest.raises(InvalidInputError, match="memory"):
        base.write([{"id": 1}])


def test_what_pylance_refuses_is_a_storage_error_with_its_cause(tmp_path: Path) -> None:
    base = Base.create(tmp_path / "t", [key_field("id", pa.int64())])
    with pytest.raises(StorageError, match="write the SSTable") as failure:
        base.write([{"id": 1}], storage_version="77.0")
    assert isinstance(failure.value.__cause__, ValueError)


def test_a_delete_in_a_table_of_an_old_file_version_can_be_flushed(tmp_path: Path) -> None:
    inner = pa.struct([pa.field("b", pa.int32())])
    struct = pa.struct([pa.field("a", pa.int32()), pa.field("i", inner)])
    fields = [key_field("id", pa.int64()), pa.field("s", struct)]
    base = Base.create(
        tmp_path / "t", fields, [{"id": 2, "s": {"a": 0, "i": {"b": 0}}}], data_storage_version="2.0"
    )
    kept = {"id": 1, "s": {"a": 1, "i": {"b": None}}}
    entry = base.initialize().write([kept, dead(id=2)])
    assert base.lsm(entry).to_table().to_pylist() == [kept]


@pytest.mark.parametrize("value", [None, {"a": None}, {"a": [{"b": 1}, None]}])
def test_a_null_struct_that_could_not_be_flushed_is_refused_on_the_way_in(value: Any) -> None:
    item = pa.struct([pa.field("b", pa.int32())])
    schema = pa.schema(
        [pa.field("s", pa.struct([pa.field("a", pa.list_(item))])), pa.field(TOMBSTONE, pa.bool_())]
    )
    batch = pa.RecordBatch.from_pylist([{"s": value, TOMBSTONE: False}], schema=schema)
    storable = value == {"a": None}
    if storable:
        refuse_null_structs(batch, "2.0")
    else:
        with pytest.raises(InvalidInputError, match="null struct"):
            refuse_null_structs(batch, "2.0")
    refuse_null_structs(batch, "2.1")
    refuse_null_structs(pa.RecordBatch.from_pylist([{"s": value, TOMBSTONE: True}], schema=schema), "2.0")


@pytest.mark.parametrize(
    "key", [key_field("id", pa.int64()), pa.field("id", pa.int64())], ids=["key", "no key"]
)
def test_every_file_and_directory_is_synced_before_the_writer_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: pa.Field
) -> None:
    base = Base.create(tmp_path / "t", [key, pa.field("x", pa.int32())])
    synced: set[str] = set()
    real = os.fsync

    def recording(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    schema = base.schema
    entry = write_sstable(
        store=ObjectStore.from_uri(base.uri, fsync=True),
        shard_id=base.shard_id,
        generation=1,
        schema=schema,
        batches=[stored(schema, [{"id": 1, "x": 1}])],
        storage_version="2.2",
    )
    shard = tmp_path / "t" / layout.shard_dir(base.shard_id)
    directory = shard / entry.path
    files = {str(path) for path in directory.rglob("*")}
    assert len(files) > 5
    assert files | {str(directory), str(shard)} <= synced


def test_rebuilt_sidecars_serve_pylance_and_us(keyed: tuple[Base, Any]) -> None:
    base, key = keyed
    entry = base.flush_with_pylance(*_history(key))
    expected = base.lsm(entry).to_table().to_pylist()
    names = (layout.BLOOM_FILTER_NAME, layout.PK_PAGE_DATA_NAME, layout.PK_PAGE_LOOKUP_NAME)
    bloom = base.store.get(f"{_directory(base, entry)}/{names[0]}")
    for name in names:
        base.store.delete(f"{_directory(base, entry)}/{name}")

    rebuild_sidecars(base.store, base.shard_id, entry, base.schema)
    assert base.store.get(f"{_directory(base, entry)}/{names[0]}") == bloom
    assert base.lsm(entry).to_table().to_pylist() == expected
    columns, offsets, _ = base.open(entry).keys(base.schema)
    assert base.open(entry).lookup(columns).tolist() == offsets.tolist()


def test_rebuilding_replaces_a_broken_index_also_for_who_has_it_open(tmp_path: Path) -> None:
    base = Base.create(tmp_path / "t", [key_field("id", pa.int64())])
    entry = base.write([{"id": i} for i in range(10)])
    wrong = base.write([{"id": i + 100} for i in range(10)])
    for name in (layout.BLOOM_FILTER_NAME, layout.PK_PAGE_DATA_NAME, layout.PK_PAGE_LOOKUP_NAME):
        base.store.put(
            f"{_directory(base, entry)}/{name}", base.store.get(f"{_directory(base, wrong)}/{name}")
        )
    keys = [pa.array([3])]
    with pytest.raises(StorageError, match="repair"):
        base.open(entry).lookup(keys)
    rebuild_sidecars(base.store, base.shard_id, entry, base.schema)
    assert base.open(entry).lookup(keys).tolist() == [3]


def test_many_duplicates_over_many_pages(tmp_path: Path) -> None:
    base = Base.create(tmp_path / "t", [key_field("id", pa.int64()), pa.field("x", pa.int64())])
    schema = base.schema
    ids = np.random.default_rng(5).integers(0, 30_000, 90_000)
    batches = [
        pa.record_batch(
            [pa.array(part), pa.array(np.arange(len(part)) + start), pa.array(np.zeros(len(part), bool))],
            schema=schema.stored,
        )
        for start, part in zip(range(0, 90_000, 1_000), np.split(ids, 90), strict=True)
    ]
    entry = write_sstable(
        store=base.store,
        shard_id=base.shard_id,
        generation=1,
        schema=schema,
        batches=batches,
        storage_version="2.2",
    )
    newest = dict(zip(ids.tolist(), range(90_000), strict=True))
    base.initialize()
    rows = base.lsm(entry).to_table()
    assert dict(zip(rows["id"].to_pylist(), rows["x"].to_pylist(), strict=True)) == newest
    table = base.open(entry)
    keys = pa.array(np.arange(30_000))
    offsets = table.lookup([keys])
    assert np.array_equal(offsets >= 0, np.isin(np.arange(30_000), ids))
    found = table.take(offsets[offsets >= 0], schema, ["id", "x"])
    assert dict(zip(found["id"].to_pylist(), found["x"].to_pylist(), strict=True)) == newest


def _directory(base: Base, entry: SsTableEntry) -> str:
    return layout.sstable_dir(base.shard_id, entry.path)


def _lance_file(base: Base, entry: SsTableEntry, name: str) -> LanceFileReader:
    return LanceFileReader(f"{base.uri}/{_directory(base, entry)}/{name}")


def _walk(fields: Any) -> Any:
    for field in fields:
        yield field
        yield from _walk(field.children())


def _evolved(directory: Path, **write: Any) -> Base:
    """A table whose field ids have gaps at the top and inside a struct, and are out of order."""
    point = pa.struct([pa.field("u", pa.string()), pa.field("w", pa.int8())])
    struct = pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.list_(point)), pa.field("c", pa.bool_())])
    fields = [
        pa.field("first", pa.int32()),
        key_field("id", pa.int64()),
        pa.field("s", struct),
        pa.field("gone", pa.string()),
        pa.field("v", pa.list_(pa.float32(), 2)),
    ]
    base = Base.create(directory, fields, **write)
    base.dataset.drop_columns(["first", "gone", "s.a"])
    if base.dataset.data_storage_version == "2.2":
        # Earlier versions of Lance's format cannot add a child to a struct.
        base.dataset.add_columns(pa.schema([pa.field("s", pa.struct([pa.field("d", pa.int16())]))]))
    base.dataset.add_columns(pa.schema([pa.field("late", pa.string())]))
    return base.initialize()


def _evolved_row(i: int) -> Row:
    return {
        "id": i,
        "s": {"b": [{"u": str(i), "w": i % 100}] * (i % 3), "c": i % 2 == 0, "d": i} if i % 4 else None,
        "v": [float(i), -1.0],
        "late": f"late {i}",
    }


def test_the_public_reader_is_the_sstable(tmp_path: Path) -> None:
    base = Base.create(tmp_path / "t", [key_field("id", pa.int64())])
    entry = base.write([{"id": 1}], generation=4)
    table = base.open(entry)
    assert isinstance(table, SsTable)
    assert isinstance(table.dataset, lance.LanceDataset)
    assert (table.generation, table.count_live()) == (4, 1)
