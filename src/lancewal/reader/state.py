"""One consistent state of a table: as data, and opened as its levels.

As data it is the version of the base table and, of each shard, the manifest and where the WAL ended
(:class:`TableState`). That can be sent to another process and opened there, later too.

What is read in which order decides whether a row is missed or seen twice while writers
flush, jobs compact and collectors delete beside the reader:

1. **MemTables of writers in this process**, before the shard's manifest. A MemTable that
   is published between the two is then in both, and is told by its generation: the manifest's
   ``current_generation`` is above it, so the view is dropped, and the SSTable holds all of
   its rows. The other way round it could be in neither: not yet in the manifest, no
   longer in memory. Views count only if the manifest still names the writer's epoch; a
   writer that was superseded does not know what its successor wrote.
2. **The shard's manifest**, then, where no writer lives here, **the end of its WAL**, then the
   manifest once more. Entries vanish when they are flushed and collected meanwhile, and then the WAL
   seems to end where they began; or rows were published that the first manifest lacks, and newer
   ones follow them in the WAL. So the end is believed only when both manifests tell of the same rows.
3. **The base version with its markers**, last. A compaction between 2 and 3 only raises a
   marker, and SSTables at or below it are left out here. Were the base read first, a
   compaction followed by pruning would hide the rows from both reads.
4. A marker that has reached ``current_generation`` as read means that the base holds
   generations which this reader knows as MemTable or WAL rows, or not at all: those rows
   would lie over newer ones. The snapshot starts again. Where the marker is not about this shard's
   generations at all (a copied table, see :mod:`lancewal.sstable.lineage`) it says nothing.
5. **The WAL entries**, up to the end that was found. One that vanished was flushed since 2: the
   snapshot starts again.

A shard that appears after the listing is left out: its rows are younger than the read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.errors import ConflictError, LanceWalError, StorageError
from lancewal.format import ShardManifest, TableSchema
from lancewal.memtable import MemTableView
from lancewal.reader.base_source import BaseSource
from lancewal.reader.memory_source import MemorySource
from lancewal.reader.merge import NewerThanBase, merged
from lancewal.reader.pruning import ShardIdentity, ShardPruner
from lancewal.reader.source import Newer, ShardLevel, Source, newest_first
from lancewal.reader.sstable_source import SsTableSource
from lancewal.reader.tail import ShardTail, SnapshotMovedError
from lancewal.shard import DEFAULT_SCAN_BATCH_SIZE, ShardManifestStore, first_unsettled
from lancewal.sstable import SsTable, check_rows_in_log, held_generation, keep_sstables
from lancewal.storage import ObjectStore, Shelf, check_process, layout, ordered_map
from lancewal.writer import live_writer

logger = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")
WantsShard = Callable[[ShardIdentity], bool]

#: Each attempt fails only when a flush or a compaction got in between.
_ATTEMPTS = 16
_REMOTE_READERS = 16
#: What an open version of a table is taken to hold in memory.
_BASE_BYTES = 1 << 20


@dataclass(frozen=True)
class ShardPlace:
    """One shard of a state: its manifest, and where its WAL ended.

    Where a writer of this process has the rows in memory, they are ``views``, oldest first, and nothing
    of the WAL is needed. Only what is read and used in this process has them.
    """

    manifest: ShardManifest
    wal_end: int
    views: tuple[MemTableView, ...] = field(default=(), compare=False, repr=False)

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
    """A state of the table as data. Equal ones have equal rows.

    ``checksum`` is that of the version's manifest: another table may be made at the same place.
    """

    uri: str
    version: int
    shards: tuple[ShardPlace, ...]
    checksum: int

    def positions(self) -> dict[UUID, int]:
        """The place in the change feed from which on nothing is part of this state."""
        return {place.shard_id: place.wal_end for place in self.shards}

    def base(self, storage_options: Mapping[str, str]) -> BaseSource:
        """The base table of this state; kept, because every task of a query asks for it."""
        key = (self.uri, frozenset(storage_options.items()))
        known = _bases.get(key)
        if known is None or not self._is_of(known.base):
            known = BaseSource(BaseTable.open(self.uri, dict(storage_options), version=self.version))
            if not self._is_of(known.base):
                raise StorageError(
                    f"the query's state of the table at {self.uri} is no longer there: another table was "
                    "made at its place; run the query again"
                )
            _bases.put(key, known, _BASE_BYTES)
        return known

    def _is_of(self, base: BaseTable) -> bool:
        return (base.version, base.manifest.checksum) == (self.version, self.checksum)

    def open(self, storage_options: Mapping[str, str], shards: Sequence[ShardPlace]) -> Snapshot:
        """The levels of some shards of this state; of SSTables nothing is read yet."""
        base = self.base(storage_options)
        store = ObjectStore.from_uri(self.uri, storage_options)
        try:
            opened = [ShardReader(store, place.shard_id).open(place, base.base) for place in shards]
        except SnapshotMovedError as error:
            raise StorageError(
                f"the query's state of the table at {self.uri} is no longer there ({error}); run the query "
                "again, and collect garbage with a min_age above the duration of queries"
            ) from error
        return Snapshot(base, tuple(opened), is_remote=not store.is_local)


#: By table and storage options the version that was last asked for. One of each: what Lance keeps with
#: an open version is not counted.
_bases: Shelf[tuple[str, frozenset[tuple[str, str]]], BaseSource] = Shelf()


def read_state(store: ObjectStore) -> TableState:
    """The newest state of the table, of rows that are durable."""
    return StateReader(store, live_writers=False).state()


@dataclass(frozen=True)
class ShardSnapshot:
    """One shard: its levels that the base does not hold yet, newest first."""

    manifest: ShardManifest
    sources: tuple[ShardLevel, ...]
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

    @cached_property
    def groups(self) -> list[tuple[ShardIdentity, list[ShardLevel]]]:
        """Levels that may hold versions of the same keys, newest first; keys of groups are disjoint.

        A group is a shard, unless a key can be in several; their levels are in the order of
        :func:`~lancewal.reader.source.newest_first`. With each goes the identity of one of its shards.
        """
        filled = {shard.identity: shard for shard in self.shards if shard.sources}
        return [
            (group[0], _in_order([filled[identity] for identity in group]))
            for group in self.pruner.key_groups(list(filled))
        ]

    def newest_levels_first(self) -> list[Source]:
        """Every level, in an order in which the first one that has a key has its newest version."""
        levels: list[Source] = []
        for _, group in self.groups:
            levels += group
        levels.append(self.base_source)
        return levels

    def levels(self) -> Iterator[tuple[Source, Newer]]:
        """Every level, newest first, the base last, with what is newer than it."""
        yield from self.levels_above_base()
        yield self.base_source, self.newer_than_base

    def levels_above_base(self) -> Iterator[tuple[Source, Newer]]:
        for _, group in self.groups:
            # Without a primary key no row replaces another.
            if self.schema.primary_key:
                yield from merged(group, self._key_readers)
            else:
                yield from ((source, Newer()) for source in group)

    @cached_property
    def newer_than_base(self) -> Newer:
        """The keys of all levels above the base."""
        levels = [level for _, group in self.groups for level in group] if self.schema.primary_key else []
        return NewerThanBase(levels, self._key_readers)

    @property
    def _key_readers(self) -> int:
        return _REMOTE_READERS if self.is_remote else 1


def _in_order(shards: Sequence[ShardSnapshot]) -> list[ShardLevel]:
    """The levels of some shards, newest first; those of one shard are in that order already."""
    if len(shards) == 1:
        return list(shards[0].sources)
    levels = [(shard.shard_id, source) for shard in shards for source in shard.sources]
    levels.sort(key=lambda level: newest_first(level[1].in_memory, level[1].generation, level[0]))
    return [source for _, source in levels]


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
        self._sstables: dict[str, SsTableSource] | None = None
        #: Known once the shard was read; it never changes.
        self.identity: ShardIdentity | None = None

    @cached_property
    def _tail(self) -> ShardTail:
        return ShardTail(self._store, self._shard_id)

    def read(self) -> ShardPlace | None:
        """Steps 1 and 2; ``None`` for a shard that has no manifest yet."""
        views, epoch = self._live_rows()
        manifest = self._manifests.read_latest()
        if manifest is None:
            return None
        self.identity = ShardIdentity.of(manifest)
        if views and epoch == manifest.writer_epoch:
            return ShardPlace(manifest, first_unsettled(manifest), views)
        for _ in range(_ATTEMPTS):
            end = self._tail.find_end(manifest)
            newest = self._manifests.require_latest()
            if _rows_of(newest) == _rows_of(manifest):
                return ShardPlace(manifest, end)
            manifest = newest
        raise ConflictError(
            f"shard {self._shard_id} was flushed {_ATTEMPTS} times while its state was read; read again "
            "when less is going on"
        )

    def _live_rows(self) -> tuple[tuple[MemTableView, ...], int]:
        """The MemTables of the shard's writer in this process, oldest first, and its epoch."""
        writer = live_writer(self._store.uri, self._shard_id) if self._live_writers else None
        if writer is None:
            return (), 0
        try:
            tables = writer.in_memory_memtable_refs()
        except LanceWalError:
            # It was closed, or may hold rows that the log never got: the WAL knows better.
            return (), 0
        return (*tables.frozen, tables.active), writer.epoch

    def held(self, place: ShardPlace, base: BaseTable) -> int:
        """Step 4: the newest generation that ``base`` holds of the shard, which was read before it."""
        held = held_generation(base, self._store, place.manifest)
        if held >= place.manifest.current_generation:
            raise SnapshotMovedError(
                f"shard {self._shard_id} was compacted up to generation {held}, "
                f"read at generation {place.manifest.current_generation}"
            )
        return held

    def open(self, place: ShardPlace, base: BaseTable) -> ShardSnapshot:
        """Steps 4 and 5, and the levels as sources."""
        manifest, held = place.manifest, self.held(place, base)
        memory = [MemorySource(view, base.schema) for view in place.views] or self._logged(place, base)
        sources: list[ShardLevel] = [
            source
            for source in reversed(memory)
            if source.row_count and source.generation >= manifest.current_generation
        ]
        return ShardSnapshot(manifest, (*sources, *self._flushed(manifest, held, base)), bool(place.views))

    def _logged(self, place: ShardPlace, base: BaseTable) -> list[MemorySource]:
        """The rows of the WAL as levels, oldest first."""
        if not place.wal_range:
            return []
        tail = self._tail.load(place.manifest, place.wal_end, base.schema)
        check_rows_in_log(base, self._store, self._shard_id, tail.written_for)
        return self._tail.sources(tail, place.manifest, base.schema)

    def _flushed(self, manifest: ShardManifest, held: int, base: BaseTable) -> list[SsTableSource]:
        """The SSTables above what the base holds, newest first."""
        known = self._sstables
        opened: dict[str, SsTableSource] = {}
        for entry in sorted(manifest.sstables, key=lambda entry: entry.generation, reverse=True):
            if entry.generation > held:
                source = None if known is None else known.get(entry.path)
                if source is None:
                    source = SsTableSource(SsTable.open(self._store, self._shard_id, entry), base.schema)
                opened[entry.path] = source.shown_as(base.schema)
        # What no reader needs any more is let go with the old dictionary.
        self._sstables = opened
        if known is None or known.keys() != opened.keys():
            keep_sstables(self._store, self._shard_id, opened.keys())
        return list(opened.values())


def _rows_of(manifest: ShardManifest) -> tuple[int, int]:
    """What changes with every flush and publication."""
    return manifest.current_generation, manifest.replay_after_wal_entry_position


class StateReader:
    """Reads the newest state of one table; keeps handles, keys and WAL tails between reads. Thread-safe.

    What it keeps never decides what is read: every state asks storage for the newest
    manifests, WAL entries and base version.
    """

    def __init__(self, store: ObjectStore, *, live_writers: bool = True) -> None:
        """Without ``live_writers``, writers of this process are read as those of any other: by their WAL."""
        self._store = store
        self._live_writers = live_writers
        self._shards: dict[str, ShardReader] = {}
        self._base: BaseSource | None = None

    def base(self) -> BaseTable:
        """The newest version of the base table."""
        return self._newest_base().base

    def state(self) -> TableState:
        """The state as data."""
        return self._retried(self._read_state)

    def snapshot(self, wants: WantsShard | None = None) -> Snapshot:
        """The state, opened; shards that ``wants`` is false for are left out."""
        return self._retried(lambda: self._take_snapshot(wants))

    def _retried(self, read: Callable[[], T]) -> T:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return read()
            except SnapshotMovedError as error:
                if attempt == _ATTEMPTS:
                    raise ConflictError(
                        f"the table at {self._store.uri} was flushed or compacted {_ATTEMPTS} times while "
                        "its state was read; read again when less is going on"
                    ) from error
                logger.debug("snapshot started again: %s", error)
        raise AssertionError("the last attempt raises")

    def _read_state(self) -> TableState:
        places, base = self._read_places(self._readers())
        for shard, place in places:
            shard.held(place, base.base)
        found, shards = base.base, tuple(place for _, place in places)
        return TableState(self._store.uri, found.version, shards, found.manifest.checksum)

    def _take_snapshot(self, wants: WantsShard | None) -> Snapshot:
        pruned: list[UUID] = []
        places, base = self._read_places(
            [shard for shard in self._readers() if _is_wanted(shard, wants, pruned)]
        )
        # Only now is a shard that was read for the first time known well enough to be left out.
        wanted = [each for each in places if _is_wanted(each[0], wants, pruned)]
        shards = self._all_of(lambda each: each[0].open(each[1], base.base), wanted)
        return Snapshot(base, tuple(shards), tuple(sorted(pruned)), not self._store.is_local)

    def _read_places(
        self, shards: Sequence[ShardReader]
    ) -> tuple[list[tuple[ShardReader, ShardPlace]], BaseSource]:
        """Steps 1 to 3, in their order."""
        read = self._all_of(ShardReader.read, shards)
        places = [(shard, place) for shard, place in zip(shards, read, strict=True) if place is not None]
        return places, self._newest_base()

    def _readers(self) -> list[ShardReader]:
        """The readers of all shards that have a directory."""
        known = self._shards
        found: dict[str, ShardReader] = {}
        for name in self._store.list_directories(layout.MEM_WAL_DIR):
            reader = known.get(name)
            if reader is None and (shard_id := layout.parse_shard_dir(name)) is not None:
                reader = ShardReader(self._store, shard_id, live_writers=self._live_writers)
            if reader is not None:
                found[name] = reader
        self._shards = found
        return list(found.values())

    def _all_of(self, call: Callable[[S], T], shards: Sequence[S]) -> list[T]:
        """``call`` for every shard, at once where each waits for the network."""
        if self._store.is_local:
            return [call(shard) for shard in shards]
        return list(ordered_map(call, shards, min(_REMOTE_READERS, len(shards))))

    def _known_base(self) -> BaseSource:
        """A version to interpret a request by; the snapshot that follows tells whether it was the newest."""
        return self._base or self._newest_base()

    def _newest_base(self) -> BaseSource:
        check_process()
        known = self._base
        if known is None or known.base.dataset.latest_version != known.base.version:
            options = self._store.storage_options
            known = BaseSource(BaseTable.open(self._store.uri, options, store=self._store))
            self._base = known
        return known


def _is_wanted(shard: ShardReader, wants: WantsShard | None, pruned: list[UUID]) -> bool:
    """Whether a shard is to be read; one that is known and not wanted is noted in ``pruned``."""
    if wants is None or shard.identity is None or wants(shard.identity):
        return True
    pruned.append(shard.identity.shard_id)
    return False
