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
   The first one may be that of an earlier read: if it is still the newest afterwards, it was so before.
3. **The base version with its markers**, last. A compaction between 2 and 3 only raises a
   marker, and SSTables at or below it are left out here. Were the base read first, a
   compaction followed by pruning would hide the rows from both reads. Beside the second look at the
   manifest the base may be read: it is later than a manifest that was known before and has not
   changed. If it has changed, the base is read again.
4. A marker that has reached ``current_generation`` as read means that the base holds
   generations which this reader knows as MemTable or WAL rows, or not at all: those rows
   would lie over newer ones. The snapshot starts again. So it does where a compaction in several commits
   has announced such a generation, whose rows the base may hold in part. Where the marker is not about this
   shard's generations at all (a copied table, see :mod:`lancewal.sstable.lineage`) it says nothing.
5. **The WAL entries**, up to the end that was found. One that vanished was flushed since 2: the
   snapshot starts again.

A shard that appears after the listing is left out: its rows are younger than the read. If the base may hold
a part of them, the snapshot starts again.

With ``max_staleness`` a shard, the listing and the base are kept for that long, each since it was asked
for, and never set back. What keeps a snapshot right is the order of 2 and 3 for each shard, so a base goes
with shards that were read before it, however long before. Rows of writers in this process are taken anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar
from uuid import UUID

from lancewal.base import BaseTable, forget_columns, parts_id
from lancewal.errors import ConflictError, LanceWalError, StorageError
from lancewal.format import ShardManifest
from lancewal.memtable import MemTableView
from lancewal.reader.base_source import BaseSource
from lancewal.reader.memory_source import MemorySource
from lancewal.reader.merge import ShardSnapshot, Snapshot
from lancewal.reader.pruning import KeyLocator, ShardIdentity, ShardPruner
from lancewal.reader.source import ShardLevel
from lancewal.reader.sstable_source import SsTableSource
from lancewal.reader.tail import ShardTail, SnapshotMovedError
from lancewal.shard import DEFAULT_SCAN_BATCH_SIZE, ShardManifestStore, first_unsettled
from lancewal.sstable import SsTable, check_rows_in_log, held_generation, keep_sstables
from lancewal.storage import ObjectStore, Shelf, both, check_process, layout, ordered_map
from lancewal.writer import live_writer, open_writers

logger = logging.getLogger(__name__)

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

#: Each attempt fails only when a flush or a compaction got in between.
_ATTEMPTS = 16
_REMOTE_READERS = 64
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
    #: When its manifest was known and the rest not yet, by the clock of the process that read it.
    read_at: float = field(default=0.0, compare=False, repr=False)

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
        #: The newest manifest when it was last looked for.
        self._manifest: ShardManifest | None = None
        self._keeping = threading.Lock()
        self._kept: ShardPlace | None = None
        self._kept_at = float("-inf")
        #: Known once the shard was read; it never changes.
        self.identity: ShardIdentity | None = None
        #: Whether what is not in the newest snapshot may be closed.
        self._is_newest = True

    @classmethod
    def at(cls, store: ObjectStore, place: ShardPlace) -> ShardReader:
        """A reader of one state of the shard; others may read newer ones beside it."""
        reader = cls(store, place.shard_id, live_writers=False)
        reader.identity = place.identity
        reader._is_newest = False
        return reader

    @property
    def shard_id(self) -> UUID:
        return self._shard_id

    @cached_property
    def _tail(self) -> ShardTail:
        return ShardTail(self._store, self._shard_id)

    def read(self) -> ShardPlace | None:
        """Steps 1 and 2, up to the second look at the manifest; ``None`` for a shard that has none yet."""
        views, epoch = self._live_rows()
        manifest = self._manifest
        if manifest is None or (views and epoch != manifest.writer_epoch):
            manifest = self.newest_manifest()
            if manifest is None:
                return None
        # Not before: a base that another thread read since then would pass for one that goes with it.
        now = time.monotonic()
        if views and epoch == manifest.writer_epoch:
            return ShardPlace(manifest, first_unsettled(manifest), views, now)
        return ShardPlace(manifest, self._tail.find_end(manifest), read_at=now)

    def confirmed(self, place: ShardPlace) -> ShardPlace:
        """The second look: ``place`` itself, or what the manifest says that has come since.

        With the latter a base goes that is read after this.
        """
        for _ in range(_ATTEMPTS):
            newest = self.newest_manifest() or self._manifests.require_latest()
            if newest.version == place.manifest.version:
                return place
            if place.views and newest.writer_epoch == place.manifest.writer_epoch:
                return replace(place, manifest=newest, wal_end=first_unsettled(newest))
            if not place.views and _rows_of(newest) == _rows_of(place.manifest):
                return replace(place, manifest=newest)
            place = ShardPlace(newest, self._tail.find_end(newest), read_at=place.read_at)
        raise ConflictError(
            f"shard {self._shard_id} was flushed {_ATTEMPTS} times while its state was read; read again "
            "when less is going on"
        )

    def newest_manifest(self) -> ShardManifest | None:
        manifest = self._manifests.read_latest()
        self._manifest = manifest
        if manifest is not None:
            self.identity = ShardIdentity.of(manifest)
        return manifest

    def keep(self, place: ShardPlace) -> None:
        """Have later reads use ``place``, for as long as they may."""
        with self._keeping:
            kept = self._kept
            if kept is not None and place.read_at < self._kept_at:
                # Of two reads at a time either may have seen more, whichever began first.
                read_at = max(kept.read_at, place.read_at)
                place = replace(max(kept, place, key=_progress), read_at=read_at)
            self._kept = place
            self._kept_at = time.monotonic()

    def kept(self, after: float) -> ShardPlace | None:
        """What was read after that time, with the rows that a writer of this process has by now."""
        place = self._kept
        if place is None or place.read_at <= after:
            return None
        views, epoch = self._live_rows()
        if not views:
            # Its writer was closed, and may have put rows before.
            return None if place.views else place
        manifest = place.manifest
        # What was flushed since is no longer in memory, and not in this manifest either.
        if epoch != manifest.writer_epoch or views[0].generation > manifest.current_generation:
            return None
        return replace(place, wal_end=first_unsettled(manifest), views=views)

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
        reached = held
        # In a copied table neither is about this shard.
        if base.details.compacted and held == base.compacted_generation(self._shard_id):
            reached = max(held, base.announced_generation(self._shard_id))
        if reached >= place.manifest.current_generation:
            raise SnapshotMovedError(
                f"shard {self._shard_id} was compacted up to generation {reached}, "
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
        if self._is_newest and (known is None or known.keys() != opened.keys()):
            keep_sstables(self._store, self._shard_id, opened.keys())
        return list(opened.values())


def _rows_of(manifest: ShardManifest) -> tuple[int, int]:
    """What changes with every flush and publication."""
    return manifest.current_generation, manifest.replay_after_wal_entry_position


def _progress(place: ShardPlace) -> tuple[int, bool, int]:
    """Ascends with what a reader may have seen; views are taken anew by every read."""
    return place.manifest.version, bool(place.views), place.wal_end


@dataclass(frozen=True)
class _Chosen:
    """Which of some shards a read is about. Of ``unknown`` ones only their manifests tell."""

    shards: Sequence[ShardReader]
    wanted: Sequence[ShardReader]
    unknown: Sequence[ShardReader]

    def left_out(self) -> tuple[UUID, ...]:
        kept = {shard.shard_id for shard in (*self.wanted, *self.unknown)}
        return tuple(sorted(shard.shard_id for shard in self.shards if shard.shard_id not in kept))


class _ShardsByValue:
    """Shards by spec and sharding value, so that those of a key are found however many there are."""

    def __init__(self, shards: list[ShardReader], pruner: ShardPruner) -> None:
        self.shards = shards
        self.pruner = pruner
        #: Those that were never read, and whose ids say nothing.
        self.unknown: list[ShardReader] = []
        self._places: dict[int, dict[bytes | None, list[int]]] = {}
        for place, shard in enumerate(shards):
            identity = shard.identity or pruner.named.get(shard.shard_id)
            if identity is None:
                self.unknown.append(shard)
            else:
                of_spec = self._places.setdefault(identity.spec_id, {})
                of_spec.setdefault(pruner.stored_value(identity), []).append(place)

    def holding(self, wants: KeyLocator) -> list[ShardReader]:
        """The shards that can hold what is wanted, in their order."""
        found: list[int] = []
        for spec_id, by_value in self._places.items():
            values = wants.stored_values(spec_id)
            for value in by_value if values is None else (None, *values):
                found += by_value.get(value, ())
        return [self.shards[place] for place in sorted(found)]


class StateReader:
    """Reads the newest state of one table; keeps handles, keys and WAL tails between reads. Thread-safe.

    Unless a state may be stale, what it keeps never decides what is read: every state asks storage
    for the newest manifests, WAL entries and base version.
    """

    def __init__(self, store: ObjectStore, *, live_writers: bool = True, max_staleness: float = 0.0) -> None:
        """Without ``live_writers``, writers of this process are read as those of any other: by their WAL.

        ``max_staleness`` is how many seconds ago a snapshot may have been read.
        """
        self._store = store
        self._live_writers = live_writers
        self._max_staleness = max_staleness
        self._shards: tuple[list[ShardReader], float] = [], float("-inf")
        #: The directories when they were last listed.
        self._names: list[str] = []
        self._by_value: _ShardsByValue | None = None
        self._keeping = threading.Lock()
        self._base: BaseSource | None = None
        self._base_at = float("-inf")
        #: The version that was last found to hold no part of the rows of a shard that was not listed.
        self._complete = 0
        #: How often another table was found at the place of the one before.
        self._replaced = 0

    def base(self) -> BaseTable:
        """The newest version of the base table."""
        return self._newest_base().base

    def known_base(self) -> BaseSource:
        """A version to interpret a request by; the snapshot that follows tells whether it was the newest."""
        return self._base or self._newest_base()

    def state(self) -> TableState:
        """The newest state as data."""
        return self._retried(lambda _: self._read_state())

    def snapshot(self, wants: KeyLocator | None = None, *, max_staleness: float | None = None) -> Snapshot:
        """The state, opened; shards that ``wants`` is false for are left out."""
        check_process()  # also where nothing is asked of storage: Lance would hang
        staleness = self._max_staleness if max_staleness is None else max_staleness

        def take(attempt: int) -> Snapshot:
            # What is kept may be too old to be read any more; what is new is not.
            return self._take_snapshot(wants, staleness if attempt == 1 else 0.0)

        return self._retried(take)

    def _retried(self, read: Callable[[int], T]) -> T:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return read(attempt)
            except SnapshotMovedError as error:
                if attempt == _ATTEMPTS:
                    raise ConflictError(
                        f"the table at {self._store.uri} was flushed or compacted {_ATTEMPTS} times while "
                        "its state was read; read again when less is going on"
                    ) from error
                logger.debug("snapshot started again: %s", error)
        raise AssertionError("the last attempt raises")

    def _read_state(self) -> TableState:
        places, base, _ = self._read_places(None, time.monotonic())
        for shard, place in places:
            shard.held(place, base.base)
        found, shards = base.base, tuple(place for _, place in places)
        return TableState(self._store.uri, found.version, shards, found.manifest.checksum)

    def _take_snapshot(self, wants: KeyLocator | None, max_staleness: float) -> Snapshot:
        places, base, chosen = self._read_places(wants, time.monotonic() - max_staleness)
        shards = self._all_of(lambda each: each[0].open(each[1], base.base), places)
        return Snapshot(base, tuple(shards), chosen.left_out, not self._store.is_local)

    def _read_places(
        self, wants: KeyLocator | None, after: float
    ) -> tuple[list[tuple[ShardReader, ShardPlace]], BaseSource, _Chosen]:
        """Steps 1 to 3 in their order, but for what was read after that time; and which shards that was."""
        now, replaced = time.monotonic(), self._replaced
        found: dict[ShardReader, ShardPlace | None] = {}

        def read(shards: list[ShardReader]) -> None:
            wanted = [shard for shard in self._chosen(shards, wants).wanted if shard not in found]
            found.update((shard, shard.kept(after)) for shard in wanted)
            stale = [shard for shard in wanted if found[shard] is None]
            found.update(zip(stale, self._all_of(lambda shard: shard.read(), stale), strict=True))

        known, listed_at = self._shards
        shards = known
        if listed_at <= after or not self._has_live_shards(known):
            # Beside the listing: those that were there before.
            _, shards = self._both(lambda: read(known), self._readers)
        self._all_of(ShardReader.newest_manifest, self._chosen(shards, wants).unknown)
        read(shards)
        chosen = self._chosen(shards, wants)
        places = {shard: place for shard in chosen.wanted if (place := found.get(shard)) is not None}
        fresh = {shard: place for shard, place in places.items() if place.read_at >= now}
        since = max([place.read_at for place in places.values()], default=after)
        confirmed, base = self._both(
            lambda: self._all_of(lambda shard: shard.confirmed(fresh[shard]), list(fresh)),
            lambda: self._base_after(max(since, after)),
        )
        if any(place is not fresh[shard] for shard, place in zip(fresh, confirmed, strict=True)):
            base = self._newest_base()
        if replaced != self._replaced:
            raise SnapshotMovedError(f"another table was made at {self._store.uri}")
        self._refuse_parts_of_others(base.base, shards)
        for shard, place in zip(fresh, confirmed, strict=True):
            places[shard] = place
            shard.keep(place)
        return list(places.items()), base, chosen

    def _chosen(self, shards: list[ShardReader], wants: KeyLocator | None) -> _Chosen:
        if wants is None:
            return _Chosen(shards, shards, [])
        pruner, known = self.known_base().pruner, self._by_value
        if known is None or known.shards is not shards or known.pruner is not pruner or known.unknown:
            known = self._by_value = _ShardsByValue(shards, pruner)
        return _Chosen(shards, known.holding(wants), known.unknown)

    def _refuse_parts_of_others(self, base: BaseTable, shards: Sequence[ShardReader]) -> None:
        """Start again if ``base`` may hold a part of the rows of a shard that came after the listing.

        Once for each version: a shard that it has rows of is found by every later listing.
        """
        if not base.details.compacted or not base.announced or base.version == self._complete:
            return
        if base.announced - {parts_id(shard.shard_id) for shard in shards}:
            ids = {shard.shard_id for shard in shards}
            if any(shard.shard_id not in ids for shard in self._readers()):
                raise SnapshotMovedError(f"a shard of {self._store.uri} was made and compacted meanwhile")
        self._complete = base.version

    def _readers(self) -> list[ShardReader]:
        """The readers of all shards that have a directory."""
        now, before = time.monotonic(), self._shards
        names = self._store.list_directories(layout.MEM_WAL_DIR)
        with self._keeping:
            shards, listed_at = self._shards
            if names == self._names:
                self._shards = shards, max(now, listed_at)
                return shards
            known = {str(shard.shard_id): shard for shard in shards}
            found = []
            for name in names:
                reader = known.pop(name, None)
                if reader is None and (shard_id := layout.parse_shard_dir(name)) is not None:
                    reader = ShardReader(self._store, shard_id, live_writers=self._live_writers)
                if reader is not None:
                    found.append(reader)
            # What another thread has listed meanwhile it may have shown as well.
            others = known.values() if self._shards is not before else ()
            found += others
            self._shards, self._names = (found, max(now, listed_at)), names
        return found

    def _has_live_shards(self, shards: Sequence[ShardReader]) -> bool:
        """Whether the shards that writers of this process have are among those that were listed."""
        uri = self._store.uri.rstrip("/")
        live = (
            {shard_id for table, shard_id in open_writers() if table == uri} if self._live_writers else None
        )
        return not live or live <= {shard.shard_id for shard in shards}

    def _all_of(self, call: Callable[[S], T], shards: Sequence[S]) -> list[T]:
        """``call`` for every shard, at once where each waits for the network."""
        if self._store.is_local or len(shards) < 2:
            return [call(shard) for shard in shards]
        return list(ordered_map(call, shards, min(_REMOTE_READERS, len(shards))))

    def _both(self, first: Callable[[], R], second: Callable[[], T]) -> tuple[R, T]:
        """What both return: at once where each waits for the network, else in this order."""
        return both(first, second, at_once=not self._store.is_local)

    def _base_after(self, after: float) -> BaseSource:
        """The base as it was read after that time, or else the newest."""
        is_recent = self._base_at > after
        return self._base if is_recent and self._base is not None else self._newest_base()

    def _newest_base(self) -> BaseSource:
        check_process()
        now = time.monotonic()
        known = before = self._base
        is_another = False
        if known is None:
            known = BaseSource(self._opened_base())
        elif (newest := known.base.refreshed(self._store)) is not known.base:
            is_another = not newest.continues(known.base, self._store)
            if is_another:
                forget_columns(self._store)
                newest = self._opened_base()
            known = BaseSource(newest, earlier=None if is_another else known)
        with self._keeping:
            if is_another and self._base is before:
                # All that is kept of shards is about the old one, whose shards may have had the same ids.
                self._shards, self._names = ([], float("-inf")), []
                self._replaced += 1
            # One that another thread found meanwhile may be newer, whichever look began first.
            if self._base is None or self._base is before or self._base.base.version < known.base.version:
                self._base = known
            # In this order: whoever looks at the time first never takes an older base for a recent one.
            self._base_at = max(self._base_at, now)
        return known

    def _opened_base(self) -> BaseTable:
        return BaseTable.open(self._store.uri, self._store.storage_options, store=self._store)
