"""Drain: bring the rows of a shard's log into SSTables, whoever put them there.

``Table.flush``, Spark's flush, publish and repair all come here. To drain is to open a writer, which
replays the log, and to close it, which flushes: so it needs the shard, and takes it from its writer.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.config import MB, ShardWriterConfig
from lancewal.format import ShardManifest
from lancewal.shard import ShardManifestStore, first_unsettled, has_unflushed_rows
from lancewal.sstable import copied_marker
from lancewal.storage import ObjectStore, Room, both, layout
from lancewal.writer.open import live_writer, open_shard_writer

#: What a drain holds of a log at a time unless it is told otherwise, or one entry.
_DRAIN_BYTES = 64 * MB
#: What several drains may hold together, but for a single log that is larger.
_BUDGET_BYTES = 16 * MB


@dataclass(frozen=True)
class Drained:
    """The ``epoch`` that the shard was claimed under, and how many ``rows`` its log had."""

    epoch: int
    rows: int


def flush_shard(
    base: BaseTable,
    manifest: ShardManifest,
    store: ObjectStore,
    config: ShardWriterConfig | None = None,
    budget: DrainBudget | None = None,
) -> int:
    """Move the shard's rows from MemTables and WAL to SSTables; how many. ``manifest`` is its newest.

    Goes through the shard's writer in this process where there is one that still holds the
    shard. Otherwise the shard is drained where its WAL has rows, or where a copied table's markers are
    in the way of its generations; any other is left alone, so that no writer is fenced for nothing.
    With a ``budget`` the shard waits for its turn, and its manifest is read again.
    """
    shard_id = manifest.shard_id
    writer = live_writer(base.uri, shard_id)
    if writer is not None and writer.epoch >= manifest.writer_epoch:
        before = writer.stats().memtable_flush_rows
        writer.force_seal_active()
        writer.wait_for_flush_drain()
        return writer.stats().memtable_flush_rows - before
    if budget is not None:
        with budget.for_log_of(shard_id):
            # Its writer may have flushed by itself meanwhile.
            newest = ShardManifestStore(store, shard_id).require_latest()
            return flush_shard(base, newest, store, config)
    if has_unflushed_rows(manifest, store) or copied_marker(base, store, manifest):
        return drain_shard(base, store, shard_id, config).rows
    return 0


def drain_shard(
    base: BaseTable, store: ObjectStore, shard_id: UUID, config: ShardWriterConfig | None = None
) -> Drained:
    """Claim a shard and move the rows of its WAL to SSTables: **its writer is fenced**.

    ``config`` is for the MemTables in between; it is used with MemTables even if the table's own
    writers have none. By default they are small, for whoever drains many shards.
    """
    if config is None:
        config = ShardWriterConfig.from_defaults(
            base.details.writer_config_defaults,
            enable_memtable=True,
            stats_log_interval=None,
            max_memtable_size=_DRAIN_BYTES,
            max_unflushed_memtable_bytes=2 * _DRAIN_BYTES,
        )
    elif not config.enable_memtable:
        size = min(config.max_memtable_size, config.max_unflushed_memtable_bytes)
        config = dataclasses.replace(config, enable_memtable=True, max_memtable_size=size)
    writer = open_shard_writer(base, shard_id, config, store=store)
    writer.finish()
    return Drained(writer.epoch, writer.stats().replayed_rows)


class DrainBudget:
    """Lets threads drain together as long as their logs fit into ``max_bytes``, else one by one.

    For a process that drains the shards of others, such as the driver of a cluster: its memory must not
    depend on what the cluster writes.
    """

    def __init__(self, store: ObjectStore, max_bytes: int = _BUDGET_BYTES) -> None:
        self._store = store
        self._room = Room(max_bytes)

    @contextmanager
    def for_log_of(self, shard_id: UUID) -> Iterator[None]:
        drain = threading.Lock()
        try:
            with drain:
                self._room.enter(drain, unflushed_bytes(self._store, shard_id))
                yield
        finally:
            self._room.leave(drain)


def unflushed_bytes(store: ObjectStore, shard_id: UUID) -> int:
    """The size of the entries that no SSTable covers."""
    manifest, entries = both(
        ShardManifestStore(store, shard_id).read_latest,
        lambda: store.list(layout.wal_dir(shard_id)),
        at_once=not store.is_local,
    )
    start = first_unsettled(manifest)
    positions = ((layout.parse_wal_name(entry.path.rsplit("/", 1)[-1]), entry.size) for entry in entries)
    return sum(size for position, size in positions if position is not None and position >= start)
