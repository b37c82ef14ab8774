"""Snapshot: one consistent state of a table, from all its levels.

What is read in which order decides whether a row is missed or seen twice while writers
flush, jobs compact and collectors delete beside the reader:

1. **MemTables of writers in this process**, before the shard's manifest. A MemTable that
   is published between the two is then in both, and is told by its generation: the manifest's
   ``current_generation`` is above it, so the view is dropped, and the SSTable holds all of
   its rows. The other way round it could be in neither: not yet in the manifest, no
   longer in memory. Views count only if the manifest still names the writer's epoch; a
   writer that was superseded does not know what its successor wrote.
2. **The shard's manifest**, then, where no writer lives here, **its WAL tail**: what
   the manifest leaves uncovered. An entry that vanished meanwhile was flushed by
   then; the tail finds out and the snapshot starts again.
3. **The base version with its markers**, last. A compaction between 2 and 3 only raises a
   marker, and SSTables at or below it are left out here. Were the base read first, a
   compaction followed by pruning would hide the rows from both reads.
4. A marker that has reached ``current_generation`` as read means that the base holds
   generations which this reader knows as MemTable or WAL rows, or not at all: those rows
   would lie over newer ones. The snapshot starts again. Where the marker is not about this shard's
   generations at all (a copied table, see :mod:`lancewal.sstable.lineage`) it says nothing.

A shard that appears after the listing is left out: its rows are younger than the read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.errors import ConflictError, LanceWalError
from lancewal.format import KeySet, ShardManifest, TableSchema
from lancewal.memtable import MemTableView
from lancewal.reader.base_source import BaseSource
from lancewal.reader.memory_source import MemorySource
from lancewal.reader.pruning import ShardIdentity, ShardPruner
from lancewal.reader.source import Source, newest_first
from lancewal.reader.sstable_source import KeyedSsTable, SsTableSource
from lancewal.reader.tail import ShardTail, SnapshotMovedError, TailEntries
from lancewal.shard import (
    DEFAULT_SCAN_BATCH_SIZE,
    ShardManifestStore,
    discover_shards,
    established_tip,
    first_unsettled,
)
from lancewal.sstable import SsTable, check_rows_in_log, held_generation, keep_sstables
from lancewal.storage import ObjectStore, ordered_map
from lancewal.writer import live_writer

WantsShard = Callable[[ShardIdentity], bool]


@dataclass(frozen=True)
class ShardSnapshot:
    """One shard: its levels that the base does not hold yet, newest first."""

    manifest: ShardManifest
    sources: tuple[Source, ...]
    #: Whether its rows in memory come from a writer of this process, not from the WAL.
    is_live: bool

    @property
    def shard_id(self) -> UUID:
        return self.manifest.shard_id

    @cached_property
    def identity(self) -> ShardIdentity:
        return ShardIdentity.of(self.manifest)


@dataclass(frozen=True)
class Snapshot:
    """All levels of a table at one moment. ``pruned`` are the shards that were not asked for."""

    base_source: BaseSource
    shards: tuple[ShardSnapshot, ...]
    pruned: tuple[UUID, ...] = ()
    is_remote: bool = False

    @property
    def base(self) -> BaseTable:
        return self.base_source.base

    @property
    def schema(self) -> TableSchema:
        return self.base.schema

    @property
    def pruner(self) -> ShardPruner:
        return self.base_source.pruner

    def identity_of(self, shard_id: UUID) -> ShardIdentity:
        return self._identities[shard_id]

    @cached_property
    def _identities(self) -> dict[UUID, ShardIdentity]:
        return {shard.shard_id: shard.identity for shard in self.shards}

    @cached_property
    def groups(self) -> list[list[Source]]:
        """Levels that may hold versions of the same keys, newest first; keys of groups are disjoint.

        A group is a shard, unless a key can be in several; their levels are in the order of
        :func:`~lancewal.reader.source.newest_first`.
        """
        filled = {shard.identity: shard.sources for shard in self.shards if shard.sources}
        return [
            ordered([source for shard in group for source in filled[shard]], len(group))
            for group in self.pruner.key_groups(list(filled))
        ]

    def levels(self) -> Iterator[tuple[Source, KeySet]]:
        """Every level above the base, newest first, with the keys that are newer than it."""
        keyed = bool(self.schema.primary_key)
        for group in self.groups:
            newer = KeySet.empty()
            for place, source in enumerate(group):
                yield source, newer
                if keyed and place + 1 < len(group):
                    newer |= source.keys()

    def newer_than_base(self) -> KeySet:
        """The keys of all levels above the base; those of their rows in the base do not count."""
        return self._newer_than_base

    @cached_property
    def _newer_than_base(self) -> KeySet:
        return KeySet.union(self.key_sets())

    def key_sets(self) -> list[KeySet]:
        """The keys of each level above the base."""
        if not self.schema.primary_key:
            return []
        return [source.keys() for group in self.groups for source in group]


def ordered(sources: list[Source], num_shards: int) -> list[Source]:
    """The levels of some shards, newest first; those of one shard are in that order already."""
    if num_shards > 1:
        sources.sort(key=lambda source: newest_first(source.in_memory, source.generation, source.shard_id))
    return sources


class ShardReader:
    """Reads one shard's state; keeps what a later read can use again."""

    def __init__(self, store: ObjectStore, shard_id: UUID, *, live_writers: bool = True) -> None:
        self._store = store
        self._shard_id = shard_id
        self._live_writers = live_writers
        # A local look at one version costs as much as at another; remote ones are had together.
        self._manifests = ShardManifestStore(
            store, shard_id, 1 if store.is_local else DEFAULT_SCAN_BATCH_SIZE
        )
        self._tail = ShardTail(store, shard_id, self._manifests)
        self._sstables: dict[str, KeyedSsTable] | None = None
        #: Known once the shard was read; it never changes.
        self.identity: ShardIdentity | None = None

    def read(self, schema: TableSchema) -> ShardState | None:
        """Steps 1 and 2; ``None`` for a shard that has no manifest yet.

        ``schema`` is that of a base version which may be older than the one that step 3 will read.
        """
        writer = live_writer(self._store.uri, self._shard_id) if self._live_writers else None
        views: list[MemTableView] | None = None
        if writer is not None:
            try:
                tables = writer.in_memory_memtable_refs()
                views = [*tables.frozen, tables.active]
            except LanceWalError:
                # It was closed, or may hold rows that the log never got: the WAL knows better.
                views = None
        manifest = self._manifests.read_latest()
        if manifest is None:
            return None
        self.identity = ShardIdentity.of(manifest)
        if views is not None and writer is not None and writer.epoch == manifest.writer_epoch:
            return ShardState(manifest, views, None)
        return ShardState(manifest, None, self._tail.read(manifest, schema))

    def read_until(self, manifest: ShardManifest, wal_end: int, schema: TableSchema) -> ShardState:
        """The state that somebody else found: ``manifest``, and the WAL up to ``wal_end``."""
        return ShardState(manifest, None, self._tail.load(manifest, wal_end, schema))

    def resolve(self, state: ShardState, base: BaseTable) -> ShardSnapshot:
        """Step 4, and the levels as sources."""
        manifest, marker = state.manifest, held_generation(base, self._store, state.manifest)
        if marker >= manifest.current_generation:
            raise SnapshotMovedError(
                f"shard {self._shard_id} was compacted up to generation {marker}, "
                f"read at generation {manifest.current_generation}"
            )
        memory: list[MemorySource]
        if state.views is None:
            tail = state.tail or TailEntries((), 0)
            if not tail.is_for(base.schema):
                raise SnapshotMovedError(f"the key columns changed while shard {self._shard_id} was read")
            check_rows_in_log(base, self._store, self._shard_id, tail.written_for)
            memory = self._tail.sources(tail, manifest, base.schema)
        else:
            memory = [MemorySource(view, base.schema) for view in state.views]
        memory = [
            source
            for source in reversed(memory)
            if source.row_count and source.generation >= manifest.current_generation
        ]
        flushed = [entry for entry in manifest.sstables if entry.generation > marker]
        flushed.sort(key=lambda entry: entry.generation, reverse=True)
        known = self._sstables
        opened = {
            entry.path: (known or {}).get(entry.path)
            or KeyedSsTable(SsTable.open(self._store, self._shard_id, entry))
            for entry in flushed
        }
        # What no reader needs any more is let go with the old dictionary.
        self._sstables = opened
        if known is None or known.keys() != opened.keys():
            keep_sstables(self._store, self._shard_id, opened.keys())
        sources: list[Source] = [
            *memory,
            *(SsTableSource(opened[entry.path], base.schema) for entry in flushed),
        ]
        return ShardSnapshot(manifest, tuple(sources), state.views is not None)


@dataclass(frozen=True)
class ShardState:
    """A shard before the base was read: MemTables of a writer here, oldest first, or a WAL tail."""

    manifest: ShardManifest
    views: Sequence[MemTableView] | None
    tail: TailEntries | None


# One state of a table as data: what to open to read the same rows again, later or elsewhere.
#
# Of each shard it has the manifest and where the WAL ended, and of the base table the version. The order
# of reading is that of ``lancewal.reader.state``.


#: Each attempt fails only when a flush or a compaction got in between.
_ATTEMPTS = 32
_REMOTE_READERS = 16


@dataclass(frozen=True)
class ShardPlace:
    """One shard of the state: its manifest, and where its WAL ended."""

    manifest: ShardManifest
    wal_end: int

    @property
    def shard_id(self) -> UUID:
        return self.manifest.shard_id

    @property
    def identity(self) -> ShardIdentity:
        return ShardIdentity.of(self.manifest)

    @property
    def wal_range(self) -> range:
        return range(first_unsettled(self.manifest), self.wal_end)


@dataclass(frozen=True)
class TableState:
    """A state of the table. Equal ones have equal rows."""

    uri: str
    version: int
    shards: tuple[ShardPlace, ...]

    def positions(self) -> dict[UUID, int]:
        """The place in the change feed from which on nothing is part of this state."""
        return {place.shard_id: place.wal_end for place in self.shards}


def read_state(store: ObjectStore) -> TableState:
    """The newest state of the table."""
    workers = 1 if store.is_local else _REMOTE_READERS

    def read(shard_id: UUID) -> ShardPlace | None:
        return _read_place(store, shard_id)

    for _ in range(_ATTEMPTS):
        places = [p for p in ordered_map(read, discover_shards(store), workers) if p is not None]
        # Last: a marker that has passed a shard's generation means that the shard was read too early.
        base = BaseTable.open(store.uri, store.storage_options, store=store)
        if all(held_generation(base, store, p.manifest) < p.manifest.current_generation for p in places):
            return TableState(store.uri, base.version, tuple(places))
    raise ConflictError(f"the table at {store.uri} was compacted {_ATTEMPTS} times while its state was read")


def _read_place(store: ObjectStore, shard_id: UUID) -> ShardPlace | None:
    manifests = ShardManifestStore(store, shard_id)
    manifest = manifests.read_latest()
    for _ in range(_ATTEMPTS):
        if manifest is None:
            return None
        end = established_tip(store, shard_id, manifest)
        newest = manifests.require_latest()
        if _same_rows(manifest, newest):
            return ShardPlace(manifest, end)
        # Flushed or published meanwhile: what the first manifest lacks may be in SSTables alone.
        manifest = newest
    raise ConflictError(f"shard {shard_id} was flushed {_ATTEMPTS} times while its state was read")


def _same_rows(one: ShardManifest, other: ShardManifest) -> bool:
    def rows(m: ShardManifest) -> tuple[int, int]:
        return m.current_generation, m.replay_after_wal_entry_position

    return rows(one) == rows(other)
