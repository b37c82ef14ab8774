"""Columns as Lance stores them: NOT NULL, JSON, tombstones without values; and those that do not match."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from lancewal.errors import InvalidInputError, LanceWalError, WalCorruptError
from lancewal.format.schema import TOMBSTONE
from lancewal.format.values import encode_json
from lancewal.maintenance.reports import Kind, Severity
from lancewal.publish.feed import ChangeFeed
from lancewal.reader import TableReader
from lancewal.shard import WalAppender
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import layout
from tests.maintenance.support import Site
from tests.tables import KEY, KEYED, abandon, rows

STRICT = pa.schema(
    [
        pa.field("id", pa.int64(), False, KEY),
        pa.field("vector", pa.list_(pa.float32(), 2), False),
        pa.field("name", pa.string(), False),
    ]
)
DOCUMENTS = pa.schema([pa.field("id", pa.int64(), False, KEY), pa.field("document", pa.json_())])


def strict_rows(*ids: int) -> pa.Table:
    return pa.Table.from_pylist([{"id": i, "vector": [i, 0], "name": f"n{i}"} for i in ids], STRICT)


def documents(values: dict[int, str | None]) -> pa.Table:
    texts = pa.array(list(values.values()), pa.string())
    column = pa.ExtensionArray.from_storage(pa.json_(), texts)
    return pa.table([pa.array(list(values), pa.int64()), column], schema=DOCUMENTS)


def shown(site: Site, column: str) -> dict[int, Any]:
    """What readers of this process and of others see, and Lance's own writer if it is asked to."""
    found = []
    for live_writers in (True, False):
        table = TableReader(site.store, live_writers=live_writers).scan().to_table()
        assert table.schema.equals(site.dataset.schema)
        found.append(dict(zip(table["id"].to_pylist(), table[column].to_pylist(), strict=True)))
    assert found[0] == found[1]
    return found[0]


def by_lance(writer: lance.mem_wal.ShardWriter, column: str) -> dict[int, Any]:
    table = writer.lsm_scanner().to_table()
    return dict(zip(table["id"].to_pylist(), table[column].to_pylist(), strict=True))


def lance_writer(site: Site) -> lance.mem_wal.ShardWriter:
    return site.dataset.mem_wal_writer(str(site.shard_id), durable_write=True, max_wal_flush_interval_ms=1)


def entry_fields(site: Site, position: int) -> pa.Schema:
    data = site.store.get(layout.wal_entry(site.shard_id, position))
    schema = pa.ipc.open_stream(pa.py_buffer(bytes(data))).schema
    return schema.remove_metadata()


def test_deletes_on_a_table_with_not_null_columns_go_back_and_forth_with_lance(tmp_path: Path) -> None:
    site = Site(tmp_path / "t", STRICT, strict_rows(*range(6)))
    ours = site.writer()
    ours.put(strict_rows(10))
    ours.delete([0])
    assert shown(site, "name") == {i: f"n{i}" for i in (1, 2, 3, 4, 5, 10)}
    abandon(ours)
    theirs = lance_writer(site)
    assert by_lance(theirs, "name") == shown(site, "name")
    theirs.delete(pa.table({"id": pa.array([1, 10], pa.int64())}))
    theirs.put(strict_rows(11))
    wanted = {i: f"n{i}" for i in (2, 3, 4, 5, 11)}
    assert by_lance(theirs, "name") == shown(site, "name") == wanted
    # Two of our entries, a fence, two of Lance's.
    assert entry_fields(site, 1).equals(entry_fields(site, 5), check_metadata=True)
    again = site.writer()
    again.delete([2])
    wanted.pop(2)
    assert shown(site, "name") == wanted
    again.close()
    with lance_writer(site) as flushing:
        flushing.delete(pa.table({"id": pa.array([3], pa.int64())}))
        wanted.pop(3)
        assert by_lance(flushing, "name") == wanted
    assert shown(site, "name") == wanted
    site.compact()
    assert shown(site, "name") == dict(site.plain()) == wanted


def test_a_delete_of_a_not_null_column_has_no_values_in_the_feed(tmp_path: Path) -> None:
    place = pa.struct([pa.field("x", pa.int32(), False)])
    schema = pa.schema([*STRICT, pa.field("place", place, metadata={"packed": "true"})])
    site = Site(tmp_path / "t", schema)
    writer = site.writer()
    writer.put(pa.Table.from_pylist([{"id": 1, "vector": [1, 1], "name": "a", "place": {"x": 5}}], schema))
    writer.delete([1])
    feed = ChangeFeed(site.store, site.base.schema)
    changes = pa.Table.from_batches(feed.changes(feed.earliest(), feed.latest())).to_pylist()
    writer.close()
    assert [(change["_change_type"], change["name"], change["place"]) for change in changes] == [
        ("upsert", "a", {"x": 5}),
        ("delete", None, None),
    ]


def test_json_that_we_wrote_is_replayed_and_flushed_by_lance(tmp_path: Path) -> None:
    site = Site(tmp_path / "t", DOCUMENTS, documents({0: '{"from": "base"}'}))
    ours = site.writer()
    ours.put(documents({1: '{"b": [1, 2.5, -3],  "a": "é"}', 2: None, 3: "[]"}))
    ours.delete([0, 3])
    wanted = {1: '{"a":"é","b":[1,2.5,-3]}', 2: None}
    assert shown(site, "document") == wanted
    abandon(ours)
    with lance_writer(site) as theirs:
        assert by_lance(theirs, "id") == {1: 1, 2: 2}
    assert site.manifest.sstables
    assert shown(site, "document") == wanted
    site.compact()
    assert shown(site, "document") == dict(site.plain("document")) == wanted


def test_json_that_lance_wrote_is_read_replayed_flushed_and_compacted(tmp_path: Path) -> None:
    site = Site(tmp_path / "t", DOCUMENTS)
    stored = pa.schema([field for field in site.base.schema.stored if field.name != TOMBSTONE])
    theirs = lance_writer(site)
    texts = ['{"a": {"b": [null, true]}}', '"text"', "12345678901234567890"]
    encoded = encode_json(pa.array(texts))
    theirs.put(pa.table([pa.array([1, 2, 3]), encoded], schema=stored))
    wanted = dict(enumerate((json.dumps(json.loads(text), separators=(",", ":")) for text in texts), start=1))
    assert shown(site, "document") == wanted
    ours = site.writer()
    ours.put(documents({4: '{"ours": 1}'}))
    wanted[4] = '{"ours":1}'
    assert shown(site, "document") == wanted
    names = [entry_fields(site, position).field("document") for position in (1, 3)]
    assert names[0].equals(names[1], check_metadata=True)
    ours.close()
    assert shown(site, "document") == wanted
    found = TableReader(site.store).lookup([4, 1]).table
    assert found["document"].to_pylist() == [wanted[4], wanted[1]]
    site.compact()
    assert shown(site, "document") == dict(site.plain("document")) == wanted


def test_text_that_is_no_json_is_refused_by_put(tmp_path: Path) -> None:
    site = Site(tmp_path / "t", DOCUMENTS)
    writer = site.writer()
    for text in ("{", "nope", '{"a": 1} and more'):
        with pytest.raises(InvalidInputError, match="no JSON"):
            writer.put(documents({1: text}))
    with pytest.raises(InvalidInputError, match="document"):
        writer.put(pa.table({"id": [1], "document": [5]}))
    writer.put(pa.table({"id": [1], "document": ['{"plain": "text"}']}))
    assert shown(site, "document") == {1: '{"plain":"text"}'}
    writer.close()


def _damaged_entry(site: Site, change: Callable[[pa.Schema], pa.Schema]) -> None:
    """A WAL entry after the newest, whose columns are the table's but for a change."""
    schema = change(site.base.schema.stored)
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([False]) if field.name == TOMBSTONE else pa.array([7]).cast(field.type)
            for field in schema
        ],
        schema=schema,
    )
    appender = WalAppender.open(site.store, site.shard_id, site.manifest.shard_spec_id)
    appender.append([batch], generation=site.manifest.current_generation)


def _retyped(schema: pa.Schema) -> pa.Schema:
    place = schema.get_field_index("name")
    return schema.set(place, schema.field(place).with_type(pa.int64()))


def _keyless(schema: pa.Schema) -> pa.Schema:
    return schema.remove(schema.get_field_index("id"))


@pytest.mark.parametrize("change", [_retyped, _keyless])
def test_a_wal_entry_with_other_columns_is_an_error_and_no_nulls(
    tmp_path: Path, change: Callable[[pa.Schema], pa.Schema]
) -> None:
    site = Site(tmp_path / "t")
    site.flush(rows(0, 3))
    _damaged_entry(site, change)
    reader = TableReader(site.store)
    for read in (
        lambda: reader.scan().to_table(),
        lambda: reader.scan().count_rows(),
        lambda: reader.lookup([7]),
        lambda: list(ChangeFeed(site.store, site.base.schema).read(site.shard_id, 1, 4)),
        site.writer,
    ):
        with pytest.raises(WalCorruptError, match=r"WAL entry \d of shard.*(int64|no key column)"):
            read()
    problems = [finding for finding in site.verify().findings if finding.kind is Kind.FIELD_ID_MISMATCH]
    assert [finding.severity for finding in problems] == [Severity.ERROR]
    with pytest.raises(OSError, match=r"stored as Int64|\bid\b"):
        lance_writer(site)
    site.compact()
    assert [key for key, _ in site.plain()] == [0, 1, 2]


@pytest.mark.parametrize("change", [_retyped, _keyless])
def test_an_sstable_with_other_columns_is_not_compacted_to_nulls(
    tmp_path: Path, change: Callable[[pa.Schema], pa.Schema]
) -> None:
    site = Site(tmp_path / "t", KEYED, pa.Table.from_batches([rows(0, 3)]))
    site.flush(rows(1, 2, prefix="new"))
    directory = layout.sstable_dir(site.shard_id, site.manifest.sstables[0].path)
    whole = lance.dataset(layout.child_uri(site.store.uri, directory)).to_table()
    site.store.delete_prefix(directory)
    numbered = change(site.base.schema.stored)
    content = pa.table(
        [whole[n] if n != "name" else pa.array([1, 2]) for n in numbered.names], numbered.names
    )
    # Lance numbers columns from 0: where the key is missing, the next one has its id and another type.
    lance.write_dataset(content, layout.child_uri(site.store.uri, directory))
    # As of an SSTable that Lance wrote: no note says for which columns.
    ShardManifestStore(site.store, site.shard_id).commit_update(
        None, lambda m: replace(m, sstables=tuple(replace(entry, notes="") for entry in m.sstables))
    )
    for use in (lambda: TableReader(site.store).scan().to_table(), site.compact):
        with pytest.raises(LanceWalError, match="does not fit the table"):
            use()
    assert site.marker == 0
    assert site.plain() == [(i, f"name_{i}") for i in range(3)]
    assert (Kind.FIELD_ID_MISMATCH, Severity.ERROR) in {
        (finding.kind, finding.severity) for finding in site.verify().findings
    }
