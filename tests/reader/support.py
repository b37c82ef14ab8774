"""A table with its writers and both kinds of readers, for tests of merged reads."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa
from lance.mem_wal import CompactedSsTable, LsmPointLookupPlanner, LsmScanner
from lance.mem_wal import ShardSnapshot as LanceShard

from lancewal.base.table import BaseTable
from lancewal.format.schema import TOMBSTONE
from lancewal.predicate.dialect import among
from lancewal.reader import TableReader
from lancewal.shard.manifest import ShardManifestStore
from lancewal.sstable import SsTable
from lancewal.storage import ObjectStore
from lancewal.writer import ShardWriter
from tests.tables import KEYED, new_table, open_writer

Row = dict[str, Any]


def named(rows: Mapping[int, str]) -> pa.Table:
    """Rows of ``KEYED`` from names by id."""
    return pa.table([pa.array(list(rows), pa.int64()), pa.array(list(rows.values()))], schema=KEYED)


class TableUnderTest:
    """``live`` reads through writers of this process, ``other`` as another process would."""

    def __init__(
        self, where: Path | str, schema: pa.Schema = KEYED, data: pa.Table | None = None, **mem_wal: Any
    ) -> None:
        new_table(where, schema, data, **(mem_wal or {"unsharded": True, "maintained_indexes": []}))
        self.uri = str(where)
        self.store = ObjectStore.from_uri(self.uri, fsync=False)
        self.live = TableReader(self.store)
        self.other = TableReader(self.store, live_writers=False)
        self.shard = uuid.uuid4()

    @property
    def readers(self) -> list[TableReader]:
        return [self.live, self.other]

    @property
    def dataset(self) -> lance.LanceDataset:
        return lance.dataset(self.uri)

    @contextmanager
    def writer(self, shard: UUID | None = None, **settings: Any) -> Iterator[ShardWriter]:
        writer = self.open(shard, **settings)
        try:
            yield writer
        finally:
            writer.close()

    def open(self, shard: UUID | None = None, **settings: Any) -> ShardWriter:
        return open_writer(BaseTable.open(self.uri), shard or self.shard, store=self.store, **settings)

    def flushed(
        self, rows: Mapping[int, str], deletes: Sequence[int] = (), shard: UUID | None = None
    ) -> None:
        """One SSTable with these rows and deletes."""
        with self.writer(shard) as writer:
            if rows:
                writer.put(named(rows))
            if deletes:
                writer.delete(list(deletes))

    def flushed_by_lance(self, rows: Mapping[int, str], deletes: Sequence[int] = ()) -> None:
        """As :meth:`flushed`, written by pylance."""
        with self.dataset.mem_wal_writer(str(self.shard)) as writer:
            if rows:
                writer.put(named(rows))
            if deletes:
                writer.delete(pa.table({"id": pa.array(deletes, pa.int64())}))

    def compact(self, generation: int, shard: UUID | None = None) -> None:
        """Merge the shard's SSTables up to ``generation`` into the base, and mark them."""
        shard = shard or self.shard
        base = BaseTable.open(self.uri)
        (key,) = base.schema.primary_key
        newest: dict[Any, Row] = {}
        manifest = ShardManifestStore(self.store, shard).require_latest()
        for entry in sorted(manifest.sstables, key=lambda e: e.generation):
            if base.compacted_generation(shard) < entry.generation <= generation:
                sstable = SsTable.open(self.store, shard, entry)
                for batch in sstable.scan(base.schema, base.schema.names, with_tombstone=True):
                    newest.update({row[key]: row for row in batch.to_pylist()})
        live = [
            {name: row[name] for name in base.schema.names} for row in newest.values() if not row[TOMBSTONE]
        ]
        dead = [k for k, row in newest.items() if row[TOMBSTONE]]
        merge = self.dataset.merge_insert(key).when_matched_update_all().when_not_matched_insert_all()
        if dead:
            merge = merge.when_not_matched_by_source_delete(
                among(key, pa.array(dead, base.schema.plain.field(key).type))
            )
        marked = merge.mark_sstables_as_compacted([CompactedSsTable(str(shard), generation)])
        marked.execute(pa.Table.from_pylist(live, base.schema.plain))

    def lance_snapshots(self) -> list[LanceShard]:
        """The SSTables above the marker, as pylance takes them."""
        snapshots = []
        base = BaseTable.open(self.uri)
        for name in self.store.list_directories("_mem_wal"):
            manifest = ShardManifestStore(self.store, UUID(name)).require_latest()
            snapshot = LanceShard(name).with_current_generation(manifest.current_generation)
            for entry in manifest.sstables:
                if entry.generation > base.compacted_generation(UUID(name)):
                    snapshot = snapshot.with_sstable(entry.generation, entry.path)
            snapshots.append(snapshot)
        return snapshots

    def lance_scan(self) -> LsmScanner:
        return LsmScanner.from_snapshots(self.dataset, self.lance_snapshots())

    def lance_lookup(self, key: int) -> list[Row]:
        planner = LsmPointLookupPlanner(self.dataset, self.lance_snapshots())
        return list(planner.plan_lookup(pa.array([key], pa.int64())).to_table().to_pylist())


def names(table: pa.Table) -> dict[int, str]:
    """Names by id; a key that is there twice fails the test."""
    keys = table.column("id").to_pylist()
    assert len(keys) == len(set(keys)), f"keys came twice: {sorted(keys)}"
    return dict(zip(keys, table.column("name").to_pylist(), strict=True))


def everywhere(table: TableUnderTest, **options: Any) -> dict[int, str]:
    """What a scan shows, the same to all readers, in one piece, in batches and counted."""
    found = [reader.scan(**options) for reader in table.readers]
    shown = [names(scan.to_table()) for scan in found]
    assert shown[0] == shown[1]
    for scan in found:
        assert names(scan.to_batches().read_all()) == shown[0]
        assert scan.count_rows() == len(shown[0])
    return shown[0]


def looked_up(table: TableUnderTest, keys: Sequence[Any]) -> list[str | None]:
    """The names found for some keys, the same through all readers; ``None`` for a missing key."""
    answers = []
    for reader in table.readers:
        result = reader.lookup(keys)
        rows = iter(result.table.column("name").to_pylist())
        answers.append([next(rows) if found else None for found in result.found])
    assert answers[0] == answers[1]
    return answers[0]
