"""One consistent state of a table: as data, and opened as its levels.

As data, a state is the version of the base table and, for each shard, the manifest and the end of the WAL
(:class:`TableState`). It can be sent to another process and opened there, also later.

The order of the reads decides whether a row is missed or seen twice while writers flush, jobs compact and
garbage collectors delete beside the reader:

1. **MemTables of writers in this process**, before the shard's manifest. A MemTable that
   is published between the two reads is then in both. Its generation shows this: the manifest's
   ``current_generation`` is above it, so the view is dropped, and the SSTable holds all of
   its rows. In the opposite order the MemTable could be in neither: not yet in the manifest, and no
   longer in memory. Views count only if the manifest still names the writer's epoch, because a
   writer that was superseded does not know what its successor wrote.
2. **The shard's manifest**, then, if no writer of this process has the shard, **the end of its WAL**, then
   the manifest once more. Two things can go wrong in between. Entries may be flushed and collected, and then
   the WAL seems to end where they began. Or rows may be published that the first manifest lacks, and newer
   rows follow them in the WAL. So the end counts only if both manifests describe the same rows. The first
   manifest may come from an earlier read: if it is still the newest afterwards, it was the newest before.
3. **The base version with its markers**, last. A compaction between 2 and 3 only raises a
   marker, and SSTables at or below the marker are left out here. If the base were read first, a
   compaction followed by pruning would hide the rows from both reads. The base may be read at the same time
   as the manifest is read again: if the manifest has not changed, the base is later than the manifest. If
   the manifest has changed, the base is read again.
4. If a marker has reached the ``current_generation`` that was read, the base holds generations that this
   reader knows as MemTable or WAL rows, or not at all. Those rows would lie above newer ones, so the
   snapshot starts again. It also starts again if a compaction in several commits has announced such a
   generation, because the base may hold a part of its rows. A marker that is not about this shard's
   generations (in a copied table, see :mod:`lancewal.sstable.lineage`) is ignored.
5. **The WAL entries**, up to the end that was found. An entry that has vanished was flushed since step 2:
   the snapshot starts again.

A shard that appears after the listing is left out, because its rows are younger than the read. If the base
may hold a part of them, the snapshot starts again.

With ``max_staleness`` a shard, the listing and the base are each kept for that long, counted from the moment
of the request, and never replaced by something older. A snapshot is correct if steps 2 and 3 are in order for
each shard. So a base may be used with shards that were read before it, however long before. Rows of writers
in this process are always read again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar
from uuid import UUID

from lancewal.base import BaseTable, forget_columns, open_base, parts_id
from lancewal.errors import ConflictError, LanceWalError, StorageError
from lancewal.format import ShardIdentity, ShardManifest
from lancewal.memtable import MemTableView
from lancewal.reader.base_source import BaseSource
from lancewal.reader.memory_source import MemorySource
from lancewal.reader.pruning import KeyLocator, ShardPruner
from lancewal.reader.snapshot import ShardSnapshot, Snapshot
from lancewal.reader.source import ShardLevel
from lancewal.reader.sstable_source import SsTableSource
from lancewal.reader.tail import ShardTail, SnapshotMovedError
from lancewal.shard import DEFAULT_SCAN_BATCH_SIZE, ShardManifestStore
from lancewal.sstable import SsTable, check_rows_in_log, held_generation, keep_sstables
from lancewal.storage import ObjectStore, Shelf, boot_time, both, check_process, layout, ordered_map
from lancewal.writer import live_writer, open_writers

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Each attempt fails only when a flush or a compaction got in between.
_ATTEMPTS = 16
_REMOTE_READERS = 64
#: The assumed memory of an open version of a table.
_BASE_BYTES = 1 << 20


@dataclass(frozen=True)
class ShardPlace:
    """One shard of a state: its manifest, and where its WAL ended.

    If a writer of this process has the rows in memory, ``views`` has its MemTables, oldest first, and the WAL
    is not needed. Views exist only in the process that read them.
    """

    manifest: ShardManifest
    wal_end: int
    views: tuple[MemTableView, ...] = field(default=(), compare=False, repr=False)
    #: A moment after the manifest was read and before the rest was, a :func:`boot_time`; 0 if another process
    #: may have read it.
    read_at: float = field(default=0.0, compare=False, repr=False)

    @property
    def shard_id(self) -> UUID:
        return self.manifest.shard_id

    @property
    def wal_range(self) -> range:
        return range(self.manifest.first_unsettled, self.wal_end)


@dataclass(frozen=True)
class TableState:
    """A state of the table as data. Equal states have equal rows.

    ``checksum`` is the checksum of the version's manifest: another table may be created at the same place.
    """

    uri: str
    version: int
    shards: tuple[ShardPlace, ...]
    checksum: int

    def positions(self) -> dict[UUID, int]:
        """The position in the change feed where this state ends; rows from there on are not part of it."""
        return {place.shard_id: place.wal_end for place in self.shards}

    def base(self, storage_options: Mapping[str, str]) -> BaseSource:
        """The base table of this state; cached, because every task of a query needs it."""
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
        """The levels of ``shards`` in this state; SSTables are not read yet."""
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


#: By table and storage options, the version that was used last. Only one version of each, because the memory
#: that Lance keeps for an open version is not counted.
_bases: Shelf[tuple[str, frozenset[tuple[str, str]]], BaseSource] = Shelf()


def read_state(store: ObjectStore) -> TableState:
    """The newest state of the table, with durable rows only."""
    return StateReader(store, live_writers=False).state()


class ShardReader:
    """Reads the state of one shard; keeps what a later read can reuse."""

    def __init__(self, store: ObjectStore, shard_id: UUID, *, live_writers: bool = True) -> None:
        self._store = store
        self.shard_id = shard_id
        self._live_writers = live_writers
        self._sstables: dict[str, SsTableSource] | None = None
        #: The newest manifest at the last read.
        self._manifest: ShardManifest | None = None
        self._keeping = threading.Lock()
        self._kept: ShardPlace | None = None
        self._kept_at = float("-inf")
        #: Known once the shard was read; it never changes.
        self.identity: ShardIdentity | None = None
        #: Whether SSTables that are not in its latest snapshot may be closed.
        self._is_newest = True

    @classmethod
    def at(cls, store: ObjectStore, place: ShardPlace) -> ShardReader:
        """A reader of one state of the shard; other readers may read newer states at the same time."""
        reader = cls(store, place.shard_id, live_writers=False)
        reader.identity = place.manifest.identity
        reader._is_newest = False
        return reader

    @cached_property
    def _manifests(self) -> ShardManifestStore:
        # Locally each probe of a version costs the same, so they go one by one. Remote probes go in parallel.
        at_once = 1 if self._store.is_local else DEFAULT_SCAN_BATCH_SIZE
        return ShardManifestStore(self._store, self.shard_id, at_once)

    @cached_property
    def _tail(self) -> ShardTail:
        return ShardTail(self._store, self.shard_id)

    def read(self) -> ShardPlace | None:
        """Steps 1 and 2, up to the second read of the manifest; ``None`` for a shard without a manifest."""
        views, epoch = self._live_rows()
        manifest = self._manifest
        if manifest is None or (views and epoch != manifest.writer_epoch):
            manifest = self.newest_manifest()
            if manifest is None:
                return None
        # Take the time after the manifest: a base that another thread read before it must not count as later.
        now = boot_time()
        if views and epoch == manifest.writer_epoch:
            return ShardPlace(manifest, manifest.first_unsettled, views, now)
        return ShardPlace(manifest, self._tail.find_end(manifest), read_at=now)

    def confirmed(self, place: ShardPlace) -> ShardPlace:
        """Read the manifest again; return ``place`` itself, or a new place if the manifest has changed.

        With a new place, the base must be read after this call.
        """
        for _ in range(_ATTEMPTS):
            newest = self.newest_manifest() or self._manifests.require_latest()
            if newest.version == place.manifest.version:
                return place
            if place.views and newest.writer_epoch == place.manifest.writer_epoch:
                return replace(place, manifest=newest, wal_end=newest.first_unsettled)
            if not place.views and _rows_of(newest) == _rows_of(place.manifest):
                return replace(place, manifest=newest)
            place = ShardPlace(newest, self._tail.find_end(newest), read_at=place.read_at)
        raise ConflictError(
            f"shard {self.shard_id} was flushed {_ATTEMPTS} times while its state was read; read again "
            "when less is going on"
        )

    def newest_manifest(self) -> ShardManifest | None:
        manifest = self._manifests.read_latest()
        self._manifest = manifest
        if manifest is not None:
            self.identity = manifest.identity
        return manifest

    def keep(self, place: ShardPlace) -> None:
        """Keep ``place`` for later reads, which use it while it is fresh enough."""
        with self._keeping:
            kept = self._kept
            if kept is not None and place.read_at < self._kept_at:
                # Either of two concurrent reads may have seen more, whichever began first.
                read_at = max(kept.read_at, place.read_at)
                place = replace(max(kept, place, key=_progress), read_at=read_at)
            self._kept = place
            self._kept_at = boot_time()

    def kept(self, after: float) -> ShardPlace | None:
        """The place that was read after that time, with the present rows of a writer of this process."""
        place = self._kept
        if place is None or place.read_at <= after:
            return None
        views, epoch = self._live_rows()
        if not views:
            # If the place has views, their writer was closed since, and may have put rows before that.
            return None if place.views else place
        manifest = place.manifest
        # Rows that were flushed since are no longer in memory, and this manifest does not list them.
        if epoch != manifest.writer_epoch or views[0].generation > manifest.current_generation:
            return None
        return replace(place, wal_end=manifest.first_unsettled, views=views)

    def _live_rows(self) -> tuple[tuple[MemTableView, ...], int]:
        """The MemTables of the shard's writer in this process, oldest first, and its epoch."""
        writer = live_writer(self._store.uri, self.shard_id) if self._live_writers else None
        if writer is None:
            return (), 0
        try:
            tables = writer.in_memory_memtable_refs()
        except LanceWalError:
            # The writer was closed, or may hold rows that never reached the WAL: read the WAL instead.
            return (), 0
        return (*tables.frozen, tables.active), writer.epoch

    def held(self, place: ShardPlace, base: BaseTable) -> int:
        """Step 4: the newest generation that ``base`` holds of the shard, which was read before it."""
        held = held_generation(base, self._store, place.manifest)
        reached = held
        # In a copied table neither the marker nor the announcement is about this shard.
        if base.details.compacted and held == base.compacted_generation(self.shard_id):
            reached = max(held, base.announced_generation(self.shard_id))
        if reached >= place.manifest.current_generation:
            raise SnapshotMovedError(
                f"shard {self.shard_id} was compacted up to generation {reached}, "
                f"read at generation {place.manifest.current_generation}"
            )
        return held

    def open(self, place: ShardPlace, base: BaseTable) -> ShardSnapshot:
        """Steps 4 and 5, and the levels as sources."""
        manifest = place.manifest
        flushed = self._flushed(manifest, self.held(place, base), base)
        memory = [MemorySource(view, base.schema) for view in place.views] or self._logged(place, base)
        sources: list[ShardLevel] = [
            source
            for source in reversed(memory)
            if source.row_count and source.generation >= manifest.current_generation
        ]
        return ShardSnapshot(manifest, (*sources, *flushed), bool(place.views))

    def _logged(self, place: ShardPlace, base: BaseTable) -> list[MemorySource]:
        """The rows of the WAL as levels, oldest first."""
        if not place.wal_range:
            return []
        tail = self._tail.load(place.manifest, place.wal_end, base.schema, place.read_at)
        check_rows_in_log(base, self._store, self.shard_id, tail.written_for)
        return self._tail.sources(tail, place.manifest, base.schema)

    def _flushed(self, manifest: ShardManifest, held: int, base: BaseTable) -> list[SsTableSource]:
        """The SSTables above what the base holds, newest first."""
        known = self._sstables
        opened: dict[str, SsTableSource] = {}
        for entry in sorted(manifest.sstables, key=lambda entry: entry.generation, reverse=True):
            if entry.generation > held:
                source = None if known is None else known.get(entry.path)
                if source is None:
                    source = SsTableSource(SsTable.open(self._store, self.shard_id, entry), base.schema)
                elif source.schema is not base.schema:
                    source = source.shown_as(base.schema)
                opened[entry.path] = source
        # SSTables that no reader needs any more are released with the old dictionary.
        self._sstables = opened
        if self._is_newest and (known is None or known.keys() != opened.keys()):
            keep_sstables(self._store, self.shard_id, opened.keys())
        return list(opened.values())


def _rows_of(manifest: ShardManifest) -> tuple[int, int]:
    """The fields of a manifest that change with every flush and publication."""
    return manifest.current_generation, manifest.replay_after_wal_entry_position


def _progress(place: ShardPlace) -> tuple[int, bool, int]:
    """A sort key: larger for the place that shows more. Views are not compared; each read takes new ones."""
    return place.manifest.version, bool(place.views), place.wal_end


@dataclass(frozen=True)
class _Chosen:
    """Which shards a read needs. For ``unknown`` ones only their manifests can tell."""

    shards: Sequence[ShardReader]
    wanted: Sequence[ShardReader]
    unknown: Sequence[ShardReader]

    def left_out(self) -> tuple[UUID, ...]:
        kept = {shard.shard_id for shard in (*self.wanted, *self.unknown)}
        return tuple(sorted(shard.shard_id for shard in self.shards if shard.shard_id not in kept))


class _ShardsByValue:
    """Shards by spec and sharding value, to find the shards of a key fast among many."""

    def __init__(self, shards: list[ShardReader], pruner: ShardPruner) -> None:
        self.shards = shards
        self.pruner = pruner
        #: Shards that were never read, and whose ids do not tell their values.
        self.unknown: list[ShardReader] = []
        self._places: dict[int, dict[bytes | None, list[int]]] = {}
        for place, shard in enumerate(shards):
            identity = shard.identity or pruner.identity_of(shard.shard_id)
            if identity is None:
                self.unknown.append(shard)
            else:
                of_spec = self._places.setdefault(identity.spec_id, {})
                of_spec.setdefault(pruner.stored_value(identity), []).append(place)

    def holding(self, wants: KeyLocator) -> list[ShardReader]:
        """The shards that can hold the wanted keys, in their order."""
        found: list[int] = []
        for spec_id, by_value in self._places.items():
            values = wants.stored_values(spec_id)
            for value in by_value if values is None else (None, *values):
                found += by_value.get(value, ())
        return [self.shards[place] for place in sorted(found)]


class StateReader:
    """Reads the newest state of one table; keeps handles, keys and WAL tails between reads. Thread-safe.

    Unless a state may be stale, the kept data never decides what is read: every state requests the newest
    manifests, WAL entries and base version from storage.
    """

    def __init__(self, store: ObjectStore, *, live_writers: bool = True, max_staleness: float = 0.0) -> None:
        """Without ``live_writers``, the rows of this process's writers are read from the WAL, as all others.

        ``max_staleness`` is how many seconds ago a snapshot may have been read.
        """
        self._store = store
        self._live_writers = live_writers
        self._max_staleness = max_staleness
        self._shards: tuple[list[ShardReader], float] = [], float("-inf")
        #: The directories of the last listing.
        self._names: list[str] = []
        self._by_value: _ShardsByValue | None = None
        self._keeping = threading.Lock()
        self._base: BaseSource | None = None
        self._base_at = float("-inf")
        #: The last base version that was found to hold no rows of an unlisted shard.
        self._complete = 0
        #: How often another table was found at the same place.
        self._replaced = 0

    def base(self) -> BaseTable:
        """The newest version of the base table."""
        return self._newest_base().base

    def known_base(self) -> BaseSource:
        """A version for interpreting a request; the snapshot that follows shows whether it was the newest."""
        return self._base or self._newest_base()

    def state(self) -> TableState:
        """The newest state as data."""
        return self._retried(lambda _: self._read_state())

    def snapshot(self, wants: KeyLocator | None = None, *, max_staleness: float | None = None) -> Snapshot:
        """The state, opened; shards that cannot hold what ``wants`` locates are left out."""
        check_process()  # even if storage is not used: Lance would hang in a forked process
        staleness = self._max_staleness if max_staleness is None else max_staleness
        # A kept state may be too old to be readable, so a retry reads a new one.
        return self._retried(lambda attempt: self._take_snapshot(wants, staleness if attempt == 1 else 0.0))

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
        places, base, _ = self._read_places(None, boot_time())
        for shard, place in places:
            shard.held(place, base.base)
        found, shards = base.base, tuple(replace(place, read_at=0.0) for _, place in places)
        return TableState(self._store.uri, found.version, shards, found.manifest.checksum)

    def _take_snapshot(self, wants: KeyLocator | None, max_staleness: float) -> Snapshot:
        places, base, chosen = self._read_places(wants, boot_time() - max_staleness)
        shards = ordered_map(lambda each: each[0].open(each[1], base.base), places, self._workers(places))
        return Snapshot(base, tuple(shards), chosen.left_out, not self._store.is_local)

    def _read_places(
        self, wants: KeyLocator | None, after: float
    ) -> tuple[list[tuple[ShardReader, ShardPlace]], BaseSource, _Chosen]:
        """Steps 1 to 3 in order, reusing what was read after the time ``after``; also returns the shards."""
        now, replaced = boot_time(), self._replaced
        found: dict[ShardReader, ShardPlace | None] = {}

        def read(shards: list[ShardReader]) -> None:
            wanted = [shard for shard in self._chosen(shards, wants).wanted if shard not in found]
            found.update((shard, shard.kept(after)) for shard in wanted)
            stale = [shard for shard in wanted if found[shard] is None]
            found.update(zip(stale, ordered_map(ShardReader.read, stale, self._workers(stale)), strict=True))

        known, listed_at = self._shards
        shards = known
        if listed_at <= after or not self._has_live_shards(known):
            # Read the shards that are known already while the directories are listed.
            _, shards = both(lambda: read(known), self._readers, at_once=not self._store.is_local)
        unknown = self._chosen(shards, wants).unknown
        list(ordered_map(ShardReader.newest_manifest, unknown, self._workers(unknown)))
        read(shards)
        chosen = self._chosen(shards, wants)
        places = {shard: place for shard in chosen.wanted if (place := found.get(shard)) is not None}
        fresh = {shard: place for shard, place in places.items() if place.read_at >= now}
        since = max([place.read_at for place in places.values()], default=after)
        confirm = ordered_map(lambda shard: shard.confirmed(fresh[shard]), fresh, self._workers(fresh))
        confirmed, base = both(
            lambda: list(confirm),
            lambda: self._base_after(max(since, after)),
            at_once=not self._store.is_local,
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

        One check for each version is enough: every later listing finds a shard that this version has rows of.
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
        now, before = boot_time(), self._shards
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
            # Keep shards that another thread listed meanwhile: a read may have shown their rows already.
            others = known.values() if self._shards is not before else ()
            found += others
            self._shards, self._names = (found, max(now, listed_at)), names
        return found

    def _has_live_shards(self, shards: Sequence[ShardReader]) -> bool:
        """Whether ``shards`` include all shards that have a writer in this process."""
        uri = self._store.uri.rstrip("/")
        live = (
            {shard_id for table, shard_id in open_writers() if table == uri} if self._live_writers else None
        )
        return not live or live <= {shard.shard_id for shard in shards}

    def _workers(self, shards: Sized) -> int:
        """How many shards to read in parallel; on local storage a read does not wait."""
        return 1 if self._store.is_local else min(_REMOTE_READERS, len(shards))

    def _base_after(self, after: float) -> BaseSource:
        """The kept base if it was read after that time, else the newest."""
        is_recent = self._base_at > after
        return self._base if is_recent and self._base is not None else self._newest_base()

    def _newest_base(self) -> BaseSource:
        check_process()
        now = boot_time()
        known = before = self._base
        is_another = False
        if known is None:
            known = BaseSource(open_base(self._store))
        elif (newest := known.base.refreshed(self._store)) is not known.base:
            is_another = not newest.continues(known.base, self._store)
            if is_another:
                forget_columns(self._store)
                newest = open_base(self._store)
            known = BaseSource(newest, earlier=None if is_another else known)
        with self._keeping:
            if is_another and self._base is before:
                # All kept data about shards belongs to the old table, whose shards may have the same ids.
                self._shards, self._names = ([], float("-inf")), []
                self._replaced += 1
            # A base that another thread found meanwhile may be newer, whichever read began first.
            if self._base is None or self._base is before or self._base.base.version < known.base.version:
                self._base = known
            # Set the time after the base: a thread that reads the time first must not get an older base.
            self._base_at = max(self._base_at, now)
        return known
