"""Drain: move the rows of a shard's log into SSTables, no matter which writer put them there.

``Table.flush``, Spark's flush, publish and repair all use this module. A drain opens a writer, which replays
the log, and closes it, which flushes. So it has to claim the shard, and this fences the current writer.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.config import MB, ShardWriterConfig
from lancewal.errors import InvalidInputError, LanceWalError, PartialWriteError
from lancewal.format import ShardManifest, ShardStatus
from lancewal.shard import (
    ShardManifestStore,
    ShardRouter,
    discover_manifests,
    first_unsettled,
    has_unflushed_rows,
)
from lancewal.sstable import copied_marker
from lancewal.storage import ObjectStore, Room, both, layout, numbered, ordered_map
from lancewal.writer.open import live_writer, open_shard_writer

#: How much of a log a drain holds in memory by default; a single entry may be larger.
_DRAIN_BYTES = 64 * MB
#: How many shards are flushed at a time, on a local disk and over the network.
_LOCAL_FLUSHES = 4
_REMOTE_FLUSHES = 64
#: How much several drains may hold together; a single log may be larger.
_BUDGET_BYTES = 16 * MB


@dataclass(frozen=True)
class Drained:
    """The ``epoch`` under which the shard was claimed, and how many ``rows`` its log had."""

    epoch: int
    rows: int


def flush_shard(
    base: BaseTable,
    manifest: ShardManifest,
    store: ObjectStore,
    config: ShardWriterConfig | None = None,
    budget: DrainBudget | None = None,
) -> int:
    """Move the shard's rows from MemTables and WAL to SSTables; return how many rows.

    ``manifest`` is the shard's newest. If this process has a writer that still owns the shard, that writer
    flushes. Otherwise the shard is drained if its WAL has rows, or if markers of a copied table conflict with
    its generations. Any other shard is left alone, so that no writer is fenced without need.
    With a ``budget`` the drain waits for its turn, and then reads the manifest again.
    """
    shard_id = manifest.shard_id
    writer = live_writer(base.uri, shard_id)
    if writer is not None and writer.epoch >= manifest.writer_epoch:
        return writer.flush()
    if budget is not None:
        with budget.for_log_of(shard_id):
            # The shard's writer may have flushed during the wait.
            newest = ShardManifestStore(store, shard_id).require_latest()
            return flush_shard(base, newest, store, config)
    if has_unflushed_rows(manifest, store) or copied_marker(base, store, manifest):
        return drain_shard(base, store, shard_id, config).rows
    return 0


def flush_shards(
    base: BaseTable, manifests: Sequence[ShardManifest], store: ObjectStore, config: ShardWriterConfig
) -> None:
    """Flush many shards with :func:`flush_shard`; a failure in one shard does not stop the others.

    Together the drains hold no more bytes of logs than one MemTable may hold, unless one log is larger.
    """
    budget = DrainBudget(store, config.max_memtable_size)
    failed: dict[UUID, Exception] = {}

    def flush(manifest: ShardManifest) -> None:
        try:
            flush_shard(base, manifest, store, config, budget)
        except LanceWalError as error:
            failed[manifest.shard_id] = error

    list(ordered_map(flush, manifests, _LOCAL_FLUSHES if store.is_local else _REMOTE_FLUSHES))
    if failed:
        raise PartialWriteError("flush", failed, {}) from next(iter(failed.values()))


def drain_shard(
    base: BaseTable, store: ObjectStore, shard_id: UUID, config: ShardWriterConfig | None = None
) -> Drained:
    """Claim a shard and move the rows of its WAL to SSTables: **its writer is fenced**.

    ``config`` sets the size of the MemTables that the rows pass through. MemTables are used even if
    ``config`` turns them off. By default they are small, so that one process can drain many shards.
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


def seal_shard(base: BaseTable, store: ObjectStore, shard_id: UUID) -> None:
    """Flush a shard and seal it, so that it takes no more writers; a sealed shard stays as it is."""
    manifests = ShardManifestStore(store, shard_id)
    manifest = manifests.require_latest()
    if manifest.status is ShardStatus.SEALED:
        return
    # A writer of this process may hold rows that are not in the log yet; it has to flush them itself.
    flush_shard(base, manifest, store)
    manifests.seal(drain_shard(base, store, shard_id).epoch)


def unseal_shard(base: BaseTable, store: ObjectStore, shard_id: UUID) -> None:
    """Let a sealed shard take writers again; refused if another active shard has the same sharding value."""
    manifests = ShardManifestStore(store, shard_id)
    sealed = manifests.require_latest()
    if sealed.status is ShardStatus.SEALED and base.details.sharding_specs:
        active = [m for m in discover_manifests(store) if m.status is ShardStatus.ACTIVE]
        for group in ShardRouter.for_table(base.details, base.schema).groups([*active, sealed]):
            if sealed in group:
                others = ", ".join(str(m.shard_id) for m in group if m is not sealed)
                raise InvalidInputError(
                    f"shard {sealed.shard_id} stays sealed: {others} takes the rows of the same sharding "
                    "value, and a row must not have two shards"
                )
    manifests.unseal()


class DrainBudget:
    """Bounds the log bytes that concurrent drains hold to ``max_bytes``; a larger log is drained alone.

    For a process that drains shards which other processes write, such as the driver of a cluster: its memory
    must not depend on how much the cluster writes.
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
    """The total size of the WAL entries that no SSTable covers."""
    directory = layout.wal_dir(shard_id)
    manifest, infos = both(
        ShardManifestStore(store, shard_id).read_latest,
        lambda: store.list(directory),
        at_once=not store.is_local,
    )
    start = first_unsettled(manifest)
    entries = numbered(infos, directory, layout.parse_wal_name)
    return sum(info.size for position, info in entries.items() if position >= start)
