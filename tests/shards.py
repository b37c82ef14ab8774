"""What a shard holds, read level by level without the reader: the truth that tests compare with."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa

from lancewal.base.table import BaseTable
from lancewal.format.schema import TOMBSTONE
from lancewal.format.shard_manifest import ShardManifest
from lancewal.format.wal_entry import WalEntry
from lancewal.shard import WalAppender, WalTailer
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import ObjectStore, layout
from lancewal.writer import ShardWriter
from lancewal.writer.intake import Intake

Row = dict[str, Any]


def store_of(base: BaseTable) -> ObjectStore:
    return ObjectStore.from_uri(base.uri, dict(base.storage_options), fsync=False)


def manifest_of(base: BaseTable, shard_id: UUID) -> ShardManifest:
    return ShardManifestStore(store_of(base), shard_id).require_latest()


def wal_entries(base: BaseTable, shard_id: UUID) -> list[WalEntry]:
    """Everything in the WAL that is retained, sentinels too."""
    return list(WalTailer(store_of(base), shard_id))


def sstable_rows(base: BaseTable, shard_id: UUID) -> list[Row]:
    """Rows of all SSTables that the manifest lists, oldest generation first, tombstones too."""
    found: list[Row] = []
    for entry in manifest_of(base, shard_id).sstables:
        uri = layout.child_uri(base.uri, layout.sstable_dir(shard_id, entry.path))
        options = dict(base.storage_options) or None
        found += lance.dataset(uri, storage_options=options).to_table().to_pylist()
    return found


def memory_rows(writer: ShardWriter) -> list[Row]:
    """Rows of all MemTables, oldest first, every version and every tombstone."""
    refs = writer.in_memory_memtable_refs()
    return [row for view in [*refs.frozen, refs.active] for row in view.stored.to_pylist()]


def settled_rows(base: BaseTable, writer: ShardWriter) -> list[Row]:
    """SSTables and memory; no flush may be under way, or rows would be missing or counted twice."""
    writer.wait_for_flush_drain()
    return sstable_rows(base, writer.shard_id) + memory_rows(writer)


def newest(rows: Iterable[Row], key: Sequence[str] = ("id",)) -> dict[Hashable, Row]:
    """The live row of each key, where later rows replace earlier ones and tombstones remove them."""
    live: dict[Hashable, Row] = {}
    for row in rows:
        values = {name: value for name, value in row.items() if name != TOMBSTONE}
        name = tuple(row[column] for column in key) if len(key) > 1 else row[key[0]]
        if row.get(TOMBSTONE):
            live.pop(name, None)
        else:
            live[name] = values
    return live


def stored_batches(base: BaseTable, data: Any) -> list[pa.RecordBatch]:
    """``data`` as a WAL entry holds it."""
    return Intake(base.schema).upserts(data).batches


def write_entry(base: BaseTable, appender: WalAppender, data: Any, generation: int | None = None) -> int:
    """One WAL entry with ``data``, as a writer in either mode would write it; its position."""
    return appender.append(stored_batches(base, data), generation=generation).position
