"""A small table with one shard, whose generations tests flush one by one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import lance
import pyarrow as pa

from lancewal.base import BaseTable
from lancewal.format.shard_manifest import ShardManifest
from lancewal.maintenance import (
    CompactionReport,
    GcReport,
    Retention,
    VerifyReport,
    collect_garbage,
    compact,
    execute_shard,
    plan_compaction,
    verify,
)
from lancewal.manifest import ShardManifestStore
from lancewal.objects import ObjectStore
from lancewal.reader.table_reader import TableReader
from lancewal.writer import ShardWriter
from tests.tables import KEYED, new_table, open_writer

LATER = timedelta(days=365)
#: Ages that no real collection may have; tests of what is left at once use them.
NOTHING_KEPT = Retention(*[timedelta(0)] * 6, allow_unsafe=True)


class Site:
    """One table, one shard, and shorthands for what maintenance does to them."""

    def __init__(
        self,
        where: Path | str,
        schema: pa.Schema = KEYED,
        data: pa.Table | None = None,
        store: ObjectStore | None = None,
        **mem_wal: Any,
    ) -> None:
        options = dict(store.storage_options) if store is not None else None
        new_table(where, schema, data, options, **mem_wal)
        self.store = store or ObjectStore.from_uri(str(where), fsync=False)
        self.shard_id = uuid4()

    @classmethod
    def of(cls, dataset: lance.LanceDataset) -> Site:
        """A site on a table that exists."""
        dataset.initialize_mem_wal(unsharded=True)
        site = cls.__new__(cls)
        site.store = ObjectStore.from_uri(dataset.uri, fsync=False)
        site.shard_id = uuid4()
        return site

    @property
    def base(self) -> BaseTable:
        return BaseTable.open(self.store.uri, self.store.storage_options, store=self.store)

    @property
    def dataset(self) -> lance.LanceDataset:
        return lance.dataset(self.store.uri, storage_options=dict(self.store.storage_options) or None)

    @property
    def manifest(self) -> ShardManifest:
        return ShardManifestStore(self.store, self.shard_id).require_latest()

    @property
    def marker(self) -> int:
        return self.base.details.compacted.get(self.shard_id, 0)

    def writer(self, shard_id: UUID | None = None, **settings: Any) -> ShardWriter:
        return open_writer(self.base, shard_id or self.shard_id, store=self.store, **settings)

    def flush(self, *operations: pa.RecordBatch | pa.Table | list[Any], shard_id: UUID | None = None) -> None:
        """One generation: batches are put, lists of keys deleted, in this order."""
        writer = self.writer(shard_id)
        apply(writer, *operations)
        writer.close()

    def compact(self, **how: Any) -> CompactionReport:
        return compact(self.base, self.store, **how)

    def merge(self) -> None:
        """Compaction that dies before its end: what it has compacted is still listed."""
        for shard in plan_compaction(self.base, self.store).shards:
            execute_shard(shard, store=self.store)

    def collect(self, **how: Any) -> GcReport:
        """Everything that may go, as if a year had passed."""
        how.setdefault("now", datetime.now(UTC) + LATER)
        return collect_garbage(self.base, self.store, **how)

    def verify(self, **how: Any) -> VerifyReport:
        return verify(self.base, self.store, **how)

    def merged(self, value: str = "name") -> list[tuple[Any, Any]]:
        """All rows through the reader: id and one more column, sorted."""
        return pairs(TableReader(self.store).scan().to_table(), value)

    def plain(self, value: str = "name") -> list[tuple[Any, Any]]:
        """All rows of the base table as plain Lance shows them."""
        return pairs(self.dataset.to_table(), value)


def apply(writer: ShardWriter, *operations: pa.RecordBatch | pa.Table | list[Any]) -> None:
    for operation in operations:
        if isinstance(operation, list):
            writer.delete(operation)
        else:
            writer.put(operation)


def pairs(table: pa.Table, value: str = "name") -> list[tuple[Any, Any]]:
    return sorted(zip(table["id"].to_pylist(), table[value].to_pylist(), strict=True))


def named(ids: range | list[int], prefix: str) -> list[tuple[int, str]]:
    """What :func:`tests.tables.rows` gives for these ids."""
    return [(i, f"{prefix}_{i}") for i in ids]
