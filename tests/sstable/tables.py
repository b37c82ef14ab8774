"""Small base tables with SSTables that pylance or lancewal wrote, and pylance's own reads of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import lance
import pyarrow as pa
from lance.mem_wal import LsmPointLookupPlanner, LsmScanner, ShardSnapshot

from lancewal.format.schema import TOMBSTONE, TableSchema
from lancewal.format.shard_manifest import SsTableEntry, decode_manifest
from lancewal.predicate import Predicate
from lancewal.sstable import SsTable, write_sstable
from lancewal.storage import ObjectStore, layout

Row = dict[str, Any]

_KEY = "lance-schema:unenforced-primary-key"


def key_field(name: str, type_: pa.DataType, position: int | None = None) -> pa.Field:
    metadata = {_KEY: "true"}
    if position is not None:
        metadata[f"{_KEY}:position"] = str(position)
    return pa.field(name, type_, nullable=False, metadata=metadata)


def schema_of(dataset: lance.LanceDataset) -> TableSchema:
    fields = dataset.lance_schema
    key = [field.name() for field in fields.unenforced_primary_key()]
    return TableSchema.from_lance(dataset.schema, fields.fields(), key)


def stored(schema: TableSchema, rows: Sequence[Row]) -> pa.RecordBatch:
    """A MemTable batch; a row with a true ``_tombstone`` is a delete."""
    full = [{TOMBSTONE: False, **row} for row in rows]
    arrays = [pa.array([row.get(field.name) for row in full], field.type) for field in schema.stored]
    return pa.record_batch(arrays, schema=schema.stored)


def dead(**key: Any) -> Row:
    return {**key, TOMBSTONE: True}


@dataclass
class Base:
    """A base table with the MemWAL index, and one shard of it."""

    uri: str
    store: ObjectStore
    shard_id: UUID

    @classmethod
    def create(
        cls,
        directory: Path | str,
        fields: Sequence[pa.Field],
        rows: Sequence[Row] = (),
        *,
        storage_options: Mapping[str, str] | None = None,
        **write: Any,
    ) -> Base:
        options = dict(storage_options or {})
        table = pa.Table.from_pylist(list(rows), schema=pa.schema(fields))
        lance.write_dataset(table, str(directory), storage_options=options, mode="create", **write)
        store = ObjectStore.from_uri(str(directory), options, fsync=False)
        return cls(str(directory), store, uuid4())

    def initialize(self) -> Base:
        self.dataset.initialize_mem_wal(unsharded=True)
        return self

    @property
    def dataset(self) -> lance.LanceDataset:
        return lance.dataset(self.uri, storage_options=dict(self.store.storage_options))

    @property
    def schema(self) -> TableSchema:
        return schema_of(self.dataset)

    def write(self, *batches: Sequence[Row], generation: int = 1, **how: Any) -> SsTableEntry:
        """An SSTable that lancewal writes."""
        schema = self.schema
        how.setdefault("storage_version", self.dataset.data_storage_version)
        return write_sstable(
            store=self.store,
            shard_id=self.shard_id,
            generation=generation,
            schema=schema,
            batches=[stored(schema, rows) for rows in batches],
            **how,
        )

    def flush_with_pylance(self, *batches: Sequence[Row]) -> SsTableEntry:
        """An SSTable that pylance writes from the same rows; the newest entry of its manifest."""
        dataset = self.dataset
        key = self.schema.primary_key
        with dataset.mem_wal_writer(str(self.shard_id), durable_write=False) as writer:
            for rows in batches:
                for row in rows:
                    if row.get(TOMBSTONE):
                        keys = pa.Table.from_pylist([row], schema=dataset.schema).select(key)
                        writer.delete(keys)
                    else:
                        writer.put(pa.Table.from_pylist([row], schema=dataset.schema))
        return self.published()[-1]

    def flush_table_with_pylance(self, *tables: pa.Table) -> SsTableEntry:
        with self.dataset.mem_wal_writer(str(self.shard_id), durable_write=False) as writer:
            for table in tables:
                writer.put(table)
        return self.published()[-1]

    def published(self) -> tuple[SsTableEntry, ...]:
        paths = [info.path for info in self.store.list(layout.manifest_dir(self.shard_id))]
        versions = {layout.parse_manifest_name(path.rpartition("/")[2]) or 0: path for path in paths}
        return decode_manifest(self.store.get(versions[max(versions)])).sstables

    def open(self, entry: SsTableEntry) -> SsTable:
        return SsTable.open(self.store, self.shard_id, entry)

    def lance_sstable(self, entry: SsTableEntry) -> lance.LanceDataset:
        """A fresh handle on an SSTable, past every cache of ours."""
        path = layout.sstable_dir(self.shard_id, entry.path)
        return lance.dataset(
            layout.child_uri(self.uri, path), storage_options=dict(self.store.storage_options)
        )

    def snapshot(self, *entries: SsTableEntry) -> ShardSnapshot:
        newest = max((entry.generation for entry in entries), default=0)
        snapshot = ShardSnapshot(str(self.shard_id)).with_current_generation(newest + 1)
        for entry in entries:
            snapshot = snapshot.with_sstable(entry.generation, entry.path)
        return snapshot

    def lsm(self, *entries: SsTableEntry) -> LsmScanner:
        return LsmScanner.from_snapshots(self.dataset, [self.snapshot(*entries)])

    def point_lookup(self, entry: SsTableEntry, key: pa.Array) -> list[Row]:
        planner = LsmPointLookupPlanner(self.dataset, [self.snapshot(entry)])
        rows: list[Row] = planner.plan_lookup(key).to_table().to_pylist()
        return rows


def rows_of(batches: Any) -> list[Row]:
    return [row for batch in batches for row in batch.to_pylist()]


def by_key(rows: Sequence[Row], key: Sequence[str]) -> dict[tuple[Any, ...], Row]:
    """Rows by key; every key may occur once only."""
    found = {tuple(row[name] for name in key): row for row in rows}
    assert len(found) == len(rows), "a key occurs twice"
    return found


def live(batches: Sequence[Sequence[Row]], key: Sequence[str]) -> dict[tuple[Any, ...], Row]:
    """The dict model: what is left of the rows when later ones replace earlier ones."""
    newest = {tuple(row[name] for name in key): row for rows in batches for row in rows}
    return {k: {**row} for k, row in newest.items() if not row.get(TOMBSTONE)}


def where(sql: str, schema: TableSchema) -> Predicate:
    """A filter over the columns of a table."""
    return Predicate.parse(sql, schema.plain)
