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
   generations at all (a copied table, see :mod:`lancewal.lineage`) it says nothing.

A shard that appears after the listing is left out: its rows are younger than the read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.errors import LanceWalError
from lancewal.format.schema import TableSchema
from lancewal.format.shard_manifest import ShardManifest
from lancewal.lineage import check_entries, held_generation
from lancewal.manifest import DEFAULT_SCAN_BATCH_SIZE, ShardManifestStore
from lancewal.memtable import MemTableView
from lancewal.objects import ObjectStore
from lancewal.reader.base_source import BaseSource
from lancewal.reader.key_set import KeySet
from lancewal.reader.memory_source import MemorySource
from lancewal.reader.pruning import ShardIdentity, ShardPruner
from lancewal.reader.restart import SnapshotMovedError
from lancewal.reader.source import Source
from lancewal.reader.sstable_source import KeyedSsTable, SsTableSource
from lancewal.reader.tail import ShardTail, TailEntries
from lancewal.sstable import SsTable
from lancewal.writer.registry import live_writer

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

        A group is a shard, unless a key can be in several. What is newer in two shards
        nothing says; then rows in memory count as newer than flushed ones, and a higher
        generation as newer than a lower one, so that every read gives the same answer.
        """
        filled = [shard for shard in self.shards if shard.sources]
        if self.pruner.keys_have_one_shard([shard.identity for shard in filled]):
            return [list(shard.sources) for shard in filled]
        sources = [source for shard in filled for source in shard.sources]
        sources.sort(key=lambda s: (not s.in_memory, -s.generation, s.shard_id))
        return [sources]

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
        self._sstables: dict[str, KeyedSsTable] = {}
        #: Known once the shard was read; it never changes.
        self.identity: ShardIdentity | None = None

    def read(self) -> ShardState | None:
        """Steps 1 and 2; ``None`` for a shard that has no manifest yet."""
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
        return ShardState(manifest, None, self._tail.read(manifest))

    def resolve(self, state: ShardState, base: BaseTable) -> ShardSnapshot:
        """Step 4, and the levels as sources."""
        manifest, marker = state.manifest, held_generation(base, self._store, state.manifest)
        if marker >= manifest.current_generation:
            raise SnapshotMovedError(
                f"shard {self._shard_id} was compacted up to generation {marker}, "
                f"read at generation {manifest.current_generation}"
            )
        views = state.views
        if state.tail is not None and state.tail.entries:
            check_entries(base, self._store, state.tail.entries)
        if views is None:
            views = self._tail.views(state.tail or TailEntries((), 0), manifest, base.schema)
        memory = [
            MemorySource(view, base.schema)
            for view in reversed(views)
            if view.row_count and view.generation >= manifest.current_generation
        ]
        flushed = [entry for entry in manifest.sstables if entry.generation > marker]
        flushed.sort(key=lambda entry: entry.generation, reverse=True)
        known = self._sstables
        opened = {
            entry.path: known.get(entry.path)
            or KeyedSsTable(SsTable.open(self._store, self._shard_id, entry))
            for entry in flushed
        }
        # What no reader needs any more is let go with the old dictionary.
        self._sstables = opened
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
