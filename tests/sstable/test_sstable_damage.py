"""Damage to what answers for an SSTable's keys: noticed, never a wrong row or a missing one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lance.file import LanceFileReader, LanceFileWriter

from lancewal.errors import StorageError
from lancewal.format.bloom import FILTER_BYTES
from lancewal.format.shard_manifest import SsTableEntry
from lancewal.sstable import SsTable, SsTableNotes, rebuild_sidecars
from lancewal.sstable.notes import checksum
from lancewal.storage import layout
from tests.faults import FaultyStore
from tests.servers import S3Server
from tests.sstable.tables import Base, Row, key_field

KINDS: dict[str, tuple[list[pa.Field], Callable[[int], Row]]] = {
    "number": ([key_field("k", pa.int32())], lambda i: {"k": i * 7}),
    "text": ([key_field("k", pa.string())], lambda i: {"k": f"key {i:03}"}),
    "several": (
        [key_field("k", pa.int64(), 1), key_field("j", pa.binary(), 2)],
        lambda i: {"k": i // 2, "j": bytes([i])},
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def base(tmp_path: Path, kind: str) -> Base:
    return Base.create(tmp_path / "t", [*KINDS[kind][0], pa.field("x", pa.int64())]).initialize()


def rows_of(kind: str, count: int = 12) -> list[Row]:
    return [{**KINDS[kind][1](i), "x": i} for i in range(count)]


def keys_of(base: Base, rows: list[Row]) -> list[pa.Array]:
    schema = base.schema
    return [pa.array([row[n] for row in rows], schema.plain.field(n).type) for n in schema.primary_key]


def damaged(content: bytes, step: int) -> Iterator[bytes]:
    for at in range(0, len(content), step):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        yield bytes(flipped)
    yield from (content[:end] for end in range(0, len(content), 97))


@pytest.mark.parametrize("name", [layout.PK_PAGE_DATA_NAME, layout.PK_PAGE_LOOKUP_NAME])
def test_a_damaged_key_index_found_wrong_rows_or_none(base: Base, kind: str, name: str) -> None:
    entry = base.write(rows_of(kind), [{**row, "x": row["x"] + 100} for row in rows_of(kind)[::3]])
    # Also for keys that are not there: the bloom filter must not be what saves us.
    base.store.delete(f"{layout.sstable_dir(base.shard_id, entry.path)}/{layout.BLOOM_FILTER_NAME}")
    asked = keys_of(base, rows_of(kind, 30))
    expected = base.open(entry).lookup(asked).tolist()
    assert expected.count(-1) == 18
    path = f"{layout.sstable_dir(base.shard_id, entry.path)}/{name}"
    whole = base.store.get(path)
    for content in damaged(whole, 2):
        base.store.put(path, content)
        base.open(entry).forget()
        with pytest.raises(StorageError, match="repair"):
            base.open(entry).lookup(asked)
    base.store.put(path, whole)
    base.open(entry).forget()
    assert base.open(entry).lookup(asked).tolist() == expected


@pytest.mark.parametrize("writer", ["ours", "pylance"])
def test_a_key_index_with_other_keys_or_rows_found_wrong_rows(base: Base, kind: str, writer: str) -> None:
    """What a flipped bit in the values does; Lance's own index, and ours where files have no checksum."""
    history = [rows_of(kind), [{**row, "x": row["x"] + 100} for row in rows_of(kind)[::3]]]
    entry = base.write(*history) if writer == "ours" else base.flush_with_pylance(*history)
    if writer == "ours":
        # As object storage has it, where whole files are not compared.
        entry = TestNotes.rewritten(base, entry, files={})
    directory = layout.sstable_dir(base.shard_id, entry.path)
    base.store.delete(f"{directory}/{layout.BLOOM_FILTER_NAME}")
    asked = keys_of(base, rows_of(kind, 30))
    expected = base.open(entry).lookup(asked).tolist()
    for name, column in (
        *((layout.PK_PAGE_DATA_NAME, column) for column in ("values", "ids")),
        *((layout.PK_PAGE_LOOKUP_NAME, column) for column in ("min", "max", "batch_size")),
    ):
        path = f"{directory}/{name}"
        whole = base.store.get(path)
        for change in range(4):
            with_other(layout.child_uri(base.uri, path), column, change)
            base.open(entry).forget()
            with pytest.raises(StorageError, match="damaged"):
                base.open(entry).lookup(asked)
            base.store.put(path, whole)
    base.open(entry).forget()
    assert base.open(entry).lookup(asked).tolist() == expected


def with_other(path: str, column: str, change: int) -> None:
    """A key index's file with one value that is another."""
    reader = LanceFileReader(path)
    table, metadata = reader.read_all().to_table(), reader.metadata().schema.metadata or {}
    if column == "batch_size":
        metadata[b"batch_size"] = str(3 + change).encode()
    else:
        values = table[column].to_pylist()
        at = (change * 5) % len(values)
        value = values[at]
        values[at] = value + 1 if isinstance(value, int) else value + value[:1]
        place = table.schema.get_field_index(column)
        table = table.set_column(
            place, table.schema.field(place), pa.array(values, table.schema.types[place])
        )
    with LanceFileWriter(path, table.schema.remove_metadata(), version="2.0") as file:
        for key, text in metadata.items():
            file.add_schema_metadata(key.decode(), text.decode())
        file.write_batch(table)


def test_a_damaged_bloom_filter_denied_rows(base: Base, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    entry = base.write(rows_of(kind))
    asked = keys_of(base, rows_of(kind))
    path = f"{layout.sstable_dir(base.shard_id, entry.path)}/{layout.BLOOM_FILTER_NAME}"
    whole = base.store.get(path)
    assert len(whole) == FILTER_BYTES
    set_bits = [bit for bit in range(FILTER_BYTES * 8) if whole[bit // 8] >> bit % 8 & 1]
    cleared = []
    for bit in set_bits[::7]:
        one = bytearray(whole)
        one[bit // 8] ^= 1 << bit % 8
        cleared.append(bytes(one))
    # One of another size has keys elsewhere.
    for content in (*cleared, whole[:64], whole[: FILTER_BYTES // 2], whole * 2, bytes(FILTER_BYTES)):
        base.store.put(path, content)
        base.open(entry).forget()
        caplog.clear()
        assert (base.open(entry).lookup(asked) >= 0).all()
        assert "bloom filter" in caplog.text
        assert base.open(entry).bloom_problem() is not None


def test_a_key_of_ours_in_the_schema_made_lookups_of_some_versions_of_lance_panic(
    base: Base, kind: str
) -> None:
    """pylance 7 to 10 compare the metadata of all levels in a point lookup."""
    for entry in (base.write(rows_of(kind)), base.write([{**row, "x": None} for row in rows_of(kind)])):
        assert not base.lance_sstable(entry).schema.metadata
    theirs = base.lance_sstable(base.flush_with_pylance(rows_of(kind)))
    assert base.lance_sstable(entry).schema.equals(theirs.schema, check_metadata=True)


class TestNotes:
    @pytest.fixture
    def kind(self) -> str:
        return "number"

    @staticmethod
    def path(base: Base, entry: SsTableEntry) -> str:
        return f"{layout.sstable_dir(base.shard_id, entry.path)}/{layout.SSTABLE_NOTES_NAME}"

    @staticmethod
    def noted(base: Base, entry: SsTableEntry, version: int) -> SsTableEntry:
        """The entry as of an SSTable that was written for a version of the base table."""
        return TestNotes.rewritten(base, entry, base_version=version)

    @staticmethod
    def rewritten(base: Base, entry: SsTableEntry, **changes: Any) -> SsTableEntry:
        notes = replace(SsTableNotes.parse(entry.notes, "t"), **changes).to_text()
        base.store.put(TestNotes.path(base, entry), notes.encode())
        return replace(entry, notes=notes)

    def test_they_lie_beside_the_rows_and_in_the_manifest(self, base: Base, kind: str) -> None:
        entry = base.write(rows_of(kind))
        stored = SsTableNotes.parse(base.store.get(self.path(base, entry)).decode(), "t")
        assert entry.notes == stored.copy() != ""
        entry = self.noted(base, entry, 41)
        assert base.open(entry).written_for == 41
        base.open(entry).forget()
        # Lance drops the manifest's copy when it rewrites the manifest.
        assert base.open(replace(entry, notes="")).written_for == 41

    def test_the_manifests_copy_saves_the_request(self, s3: S3Server, kind: str) -> None:
        base = Base.create(s3.uri(f"{uuid4().hex}/table"), KINDS[kind][0], storage_options=s3.storage_options)
        entry = self.noted(base, base.write(rows_of(kind)), 41)
        for copied, requests in ((entry, 0), (replace(entry, notes=""), 1)):
            store = FaultyStore(base.store)
            base.open(entry).forget()
            table = SsTable.open(store, base.shard_id, copied)
            assert (table.written_for, table.lookup(keys_of(base, rows_of(kind, 1))).tolist()) == (41, [0])
            paths = [call.path for call in store.faults.calls]
            assert paths.count(self.path(base, entry)) == requests

    def test_long_ones_are_left_to_the_file(self, tmp_path: Path) -> None:
        base = Base.create(tmp_path / "long", KINDS["number"][0])
        assert SsTableNotes(1, {}, 3, tuple(range(400))).copy() != ""
        assert SsTableNotes(1, {}, 3, tuple(range(800))).copy() == ""
        entry = self.noted(base, base.write([{"k": i} for i in range(10)]), 7)
        assert base.open(replace(entry, notes="")).written_for == 7

    def test_a_version_in_the_schema_is_still_read(self, base: Base, kind: str) -> None:
        entry = base.write(rows_of(kind))
        base.lance_sstable(entry).update_schema_metadata({"lancewal:base_version": "12"})
        base.store.delete(self.path(base, entry))
        assert base.open(replace(entry, notes="")).written_for == 12

    def test_sstables_of_lance_have_none(self, base: Base, kind: str) -> None:
        entry = base.flush_with_pylance(rows_of(kind))
        assert base.open(entry).written_for is None
        assert entry.notes == ""

    def test_damaged_ones_are_an_error(self, base: Base, kind: str) -> None:
        entry = self.noted(base, base.write(rows_of(kind)), 41)
        whole = base.store.get(self.path(base, entry))
        for content in damaged(whole, 1):
            base.store.put(self.path(base, entry), content)
            base.open(entry).forget()
            with suppress(StorageError):
                assert base.open(replace(entry, notes="")).written_for == 41

    def test_a_table_without_a_key_has_them_too(self, tmp_path: Path) -> None:
        base = Base.create(tmp_path / "bare", [pa.field("x", pa.int64())])
        entry = base.write([{"x": 1}])
        assert base.open(self.noted(base, entry, 3)).written_for == 3

    def test_rebuilding_keeps_the_version(self, base: Base, kind: str) -> None:
        entry = self.noted(base, base.write(rows_of(kind)), 41)
        base.store.delete_prefix(f"{layout.sstable_dir(base.shard_id, entry.path)}/{layout.PK_INDEX_DIR}")
        assert rebuild_sidecars(base.store, base.shard_id, entry, base.schema) == entry.notes


@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.none(), min_size=1, max_size=8), st.data())
def test_a_checksum_is_about_values_and_not_about_how_arrow_keeps_them(
    values: list[int | None], data: st.DataObject
) -> None:
    texts = [str(value or "") for value in values]
    for array in (
        pa.array([value or 0 for value in values], pa.int32()),
        pa.array(texts),
        pa.array(texts, pa.large_binary()),
    ):
        start = data.draw(st.integers(0, len(array)))
        padded = pa.concat_arrays([array[:start], array])[start:]
        assert checksum([padded]) == checksum([array])
        if array[0] != array[-1]:
            assert checksum([array[::-1]]) != checksum([array])
