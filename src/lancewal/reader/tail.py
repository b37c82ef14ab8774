"""The tail of a shard's WAL, beyond its SSTables, for readers that do not use a writer of this process.

Rows stay in memory under a lease of the process's cache. If an entry gets no lease, only its keys are kept,
which decide what is newest; its rows are fetched again when a read needs them
(:class:`~lancewal.reader.memory_source.StreamedSource`). If keys get no lease, they evict rows.

Both are kept as a few runs (:mod:`lancewal.reader.runs`), however many entries there are. Data about rows,
such as the index of their keys, refers to row numbers, so it stays valid when runs are joined.
"""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from uuid import UUID

import numpy as np
import pyarrow as pa

from lancewal.errors import ConflictError, WalCorruptError, WalTruncatedError
from lancewal.format import ShardManifest, TableSchema, WalEntry
from lancewal.index import IndexStore
from lancewal.memtable import MemTableView, RowsSoFar
from lancewal.reader.memory_source import MemorySource, StreamedSource
from lancewal.reader.runs import Run, in_fewer, in_some, keys_of
from lancewal.reader.source import Rows
from lancewal.shard import ShardManifestStore, WalTailer, WatchedTip, first_unsettled, is_flushed
from lancewal.storage import (
    RECHECK_AFTER,
    Cache,
    Lease,
    ObjectStore,
    boot_time,
    in_forked_child,
    process_cache,
)

#: A tail that was not read for this long is dropped to make room for others.
_IDLE_SECONDS = 60.0


class SnapshotMovedError(ConflictError):
    """The table changed while its state was read; start the read again."""


class LogRoom:
    """Leases for decoded entries. If the cache refuses a lease, idle tails are dropped."""

    def __init__(self, cache: Cache = process_cache) -> None:
        self.cache = cache
        self._lock = threading.Lock()
        # The tails that are in use, so that idle ones can be told to forget their rows.
        self._tails: weakref.WeakSet[ShardTail] = weakref.WeakSet()
        self._asked_idle_at = float("-inf")

    def add(self, tail: ShardTail) -> None:
        with self._lock:
            self._tails.add(tail)

    def has_room(self, num_bytes: int) -> bool:
        """Whether this much fits, if necessary after dropping idle tails."""
        return num_bytes <= self.cache.free_bytes or (
            self._forget_idle() and num_bytes <= self.cache.free_bytes
        )

    def lease(self, num_bytes: int) -> Lease | None:
        """Room for an entry for as long as the lease lives; ``None`` if there is no room."""
        lease = self.cache.lease(num_bytes)
        return self.cache.lease(num_bytes) if lease is None and self._forget_idle() else lease

    def after_fork(self) -> None:
        """Replace the lock: another thread may have held it when the process was forked."""
        self._lock = threading.Lock()

    def _forget_idle(self) -> bool:
        """Make idle tails forget their rows; false if there were none, or if this was tried a moment ago."""
        now = time.monotonic()
        with self._lock:
            if now - self._asked_idle_at < _IDLE_SECONDS / 10:
                return False
            self._asked_idle_at = now
            idle = [tail for tail in self._tails if now - tail.last_read > _IDLE_SECONDS]
        for tail in idle:
            tail.forget()
        return bool(idle)


ROOM = LogRoom()
in_forked_child(ROOM.after_fork)


@dataclass(frozen=True, eq=False)
class TailEntries:
    """The entries from ``start`` up to ``end`` (exclusive) that a manifest does not cover, oldest first.

    ``generation`` is the manifest's current generation. The rows have the columns of ``schema``.
    """

    runs: tuple[Run, ...] = ()
    start: int = 0
    end: int = 0
    generation: int = 0
    schema: TableSchema | None = None

    @property
    def written_for(self) -> int | None:
        """The base version of the oldest rows that record the version they were written for."""
        return next((run.written_for for run in self.runs if run.written_for is not None), None)

    @cached_property
    def is_whole(self) -> bool:
        """Whether all rows are in memory."""
        return all(run.is_whole for run in self.runs)

    def serves(self, manifest: ShardManifest, schema: TableSchema) -> bool:
        """Whether these entries include all up to ``end`` that ``manifest`` does not cover, for ``schema``.

        Another thread may have kept the entries for a newer manifest, which covers some of these.
        """
        covered = self.start <= manifest.first_unsettled <= self.end
        known = self.schema
        return (
            covered
            and self.generation <= manifest.current_generation
            and known is not None
            and _same_columns(known, schema)
        )

    def up_to(self, end: int) -> TailEntries:
        if end >= self.end:
            return self
        runs = (run.between(self.start, end) for run in self.runs)
        return replace(self, runs=tuple(run for run in runs if run is not None), end=end)


@dataclass(frozen=True)
class _Group:
    """The rows of one generation so far. ``rows`` has only the keys if not all rows are kept."""

    generation: int
    runs: tuple[Run, ...]
    rows: RowsSoFar

    @property
    def first_position(self) -> int:
        return int(self.runs[0].positions[0])


class ShardTail:
    """The tail of one shard; rows, keys and key indexes are kept between reads.

    Thread-safe: the kept data is replaced as a whole and never changed.
    """

    def __init__(self, store: ObjectStore, shard_id: UUID) -> None:
        self._store = store
        self._shard_id = shard_id
        self._tailer = WalTailer(store, shard_id)
        self._tip = WatchedTip(store, shard_id)
        self.last_read = time.monotonic()
        self._kept = TailEntries()
        self._groups: tuple[_Group, ...] = ()
        # The last levels, with the entries and the columns that they are for.
        self._sources: tuple[TailEntries, TableSchema, list[MemorySource]] | None = None
        # Held while runs are joined and groups extended, never for I/O.
        self._lock = threading.Lock()
        ROOM.add(self)

    def find_end(self, manifest: ShardManifest) -> int:
        """The end of the WAL; wrong if entries after ``manifest`` were flushed and collected meanwhile."""
        return self._tip.find(manifest)

    def load(self, manifest: ShardManifest, end: int, schema: TableSchema, since: float = 0.0) -> TailEntries:
        """The entries up to ``end`` that ``manifest`` does not cover.

        ``since`` is the :func:`boot_time` at which they were known not to be covered, if it is known. Raises
        :class:`SnapshotMovedError` if one of them was collected.
        """
        self.last_read = time.monotonic()
        try:
            return self._loaded(manifest, end, schema, since)
        finally:
            # Keys may have taken the lease of rows that are still kept here, because the read failed or
            # another thread stored its result first.
            if any(run.is_whole and run.lease and run.lease.is_void for run in self._kept.runs):
                self.forget()

    def _loaded(self, manifest: ShardManifest, end: int, schema: TableSchema, since: float) -> TailEntries:
        start, generation = manifest.first_unsettled, manifest.current_generation
        kept = self._kept
        base = kept if kept.serves(manifest, schema) else TailEntries((), start, start, generation)
        runs = [run for each in base.runs if (run := _unflushed(each, manifest)) is not None]
        if not base.is_whole:
            runs = self._with_room(runs, schema)
        try:
            fresh = self._tailer.entries(base.end, end)
            for entries in in_some(entry for entry in fresh if not _is_over(entry, manifest)):
                _keep(entries, runs, schema)
        except WalTruncatedError as error:
            raise SnapshotMovedError(str(error)) from error
        if base.end < end:
            self._refuse_emptied(base.end, since)
        unchanged = (start, generation) == (kept.start, kept.generation) and _are_same(runs, kept.runs)
        if base is kept and unchanged and end <= kept.end:
            return kept.up_to(end)
        found = TailEntries(tuple(runs), start, max(end, base.end), generation, schema)
        with self._lock:
            # If another thread has replaced them, its runs stay: it may be joining the same ones.
            if self._kept is kept:
                found = self._kept = replace(found, runs=tuple(in_fewer(found.runs)))
        return found.up_to(end)

    def _refuse_emptied(self, start: int, since: float) -> None:
        """Start again if a slot from ``start`` on may have been emptied and filled before it was read.

        A slot is emptied only long after SSTables hold its entry. So a read that did not stand still need
        not look.
        """
        if not since or boot_time() - since <= RECHECK_AFTER.total_seconds():
            return
        newest = ShardManifestStore(self._store, self._shard_id).read_latest()
        if first_unsettled(newest) > start:
            raise SnapshotMovedError(f"shard {self._shard_id} was flushed while a reader stood still")

    def sources(self, tail: TailEntries, manifest: ShardManifest, schema: TableSchema) -> list[MemorySource]:
        """The rows of ``tail`` as levels, one for each generation, oldest first."""
        known = self._sources
        if known is not None and known[0] is tail and known[1] is schema:
            return known[2]
        generations = _by_generation(tail.runs, manifest.current_generation)
        # Two threads that extend one group at once would share its index but not its batches.
        with self._lock:
            groups = [self._group(generation, runs, schema) for generation, runs in generations]
            if tail is self._kept:
                self._groups = tuple(groups)
        sources = [self._source(group, schema) for group in groups]
        self._sources = (tail, schema, sources)
        return sources

    def forget(self) -> None:
        """Drop everything that is kept; the next read starts from nothing."""
        self._kept = TailEntries()
        self._groups = ()
        self._sources = None

    def _with_room(self, runs: list[Run], schema: TableSchema) -> list[Run]:
        """``runs`` with all their rows, if there is room for all of them now; else ``runs`` as they are."""
        if not ROOM.has_room(sum(run.num_bytes for run in runs if not run.is_whole)):
            return runs
        whole: list[Run] = []
        for run in runs:
            if run.is_whole:
                whole.append(run)
            else:
                for entries in in_some(self._entries(run.positions.tolist())):
                    _keep(entries, whole, schema)
        return whole

    def _group(self, generation: int, runs: Sequence[Run], schema: TableSchema) -> _Group:
        """Extend the group that was made of a part of the same entries, or make a new one."""
        whole = all(run.is_whole for run in runs)
        held = schema if whole else keys_of(schema)
        made = _Group(generation, tuple(runs), RowsSoFar(held, IndexStore((), held)))
        for known in self._groups:
            same_start = (known.generation, known.first_position) == (generation, made.first_position)
            if same_start and _same_columns(known.rows.schema, held):
                known.rows.hold(_batches(made, schema))
                return replace(made, rows=known.rows)
            if same_start and _same_columns(keys_of(known.rows.schema), keys_of(held)):
                # The index of the keys stays valid, whether or not other columns are kept.
                return replace(made, rows=RowsSoFar(held, known.rows.indexes))
        return made

    def _source(self, group: _Group, schema: TableSchema) -> MemorySource:
        batches = _batches(group, schema)
        starts = [0, *accumulate(batch.num_rows for batch in batches)]
        view = MemTableView(self._shard_id, group.generation, batches, group.rows, starts)
        if all(run.is_whole for run in group.runs):
            return MemorySource(view, schema)
        return StreamedSource(view, schema, _Parts(group.runs, schema, self._entries))

    def _entries(self, positions: Sequence[int], first_ahead: int | None = None) -> Iterator[WalEntry]:
        """Read entries again that were read before."""
        try:
            yield from self._tailer.entries_at(positions, first_ahead=first_ahead)
        except WalTruncatedError as error:
            raise SnapshotMovedError(
                f"{error} Its rows were flushed while they were read; read again, and collect garbage "
                "with a min_age above the duration of reads"
            ) from error


class _Parts:
    """The rows of runs in parts that can be fetched separately: whole runs, and entries of other runs."""

    def __init__(
        self, runs: Sequence[Run], schema: TableSchema, read: Callable[..., Iterator[WalEntry]]
    ) -> None:
        self._runs = runs
        self._schema = schema
        self._read = read
        self._firsts = [0, *accumulate(1 if run.is_whole else len(run.ends) for run in runs)]
        ends, before = [np.zeros(1, np.int64)], 0
        for run in runs:
            ends.append((run.ends[-1:] if run.is_whole else run.ends) + before)
            before += run.num_rows
        self.starts: Rows = np.concatenate(ends)

    def fetch(self, places: Sequence[int], *, ahead: bool) -> Iterator[pa.Table]:
        """The parts with these numbers; ``ahead`` prefetches, if most of them will be needed."""
        positions = [position for place in places if (position := self._position(place)) is not None]
        read = self._read(positions, None if ahead else 1)
        for place in places:
            position = self._position(place)
            if position is None:
                rows = pa.Table.from_batches(self._run(place).batches)
            else:
                entry = next(read)
                rows = pa.Table.from_batches(entry.rows(self._schema), self._schema.stored)
                if rows.num_rows != self.starts[place + 1] - self.starts[place]:
                    raise WalCorruptError(
                        entry.shard_id, position, "it is another one than when it was read first"
                    )
            yield rows

    def _run(self, place: int) -> Run:
        return self._runs[bisect_right(self._firsts, place) - 1]

    def _position(self, place: int) -> int | None:
        """The position of the part in the log; ``None`` if it is in memory."""
        number = bisect_right(self._firsts, place) - 1
        run = self._runs[number]
        return None if run.is_whole else int(run.positions[place - self._firsts[number]])


def _is_over(entry: WalEntry, manifest: ShardManifest) -> bool:
    """Whether an entry has no rows for a reader of the log."""
    return entry.sentinel or not entry.num_rows or is_flushed(manifest, entry.position, entry.generation)


def _unflushed(run: Run, manifest: ShardManifest) -> Run | None:
    """The part of a run that ``manifest`` does not cover."""
    last = int(run.positions[-1])
    if is_flushed(manifest, last, run.generation):
        return None
    return run.between(manifest.first_unsettled, last + 1)


def _keep(entries: Sequence[WalEntry], runs: list[Run], schema: TableSchema) -> None:
    """Add ``entries`` to ``runs``: with all columns if there is room, else with keys only."""
    run = Run.of(entries, schema)
    lease = ROOM.lease(run.held_bytes)
    if lease is not None:
        runs.append(replace(run, lease=lease))
    elif len(entries) > 1:
        middle = len(entries) // 2
        _keep(entries[:middle], runs, schema)
        _keep(entries[middle:], runs, schema)
    else:
        runs.append(_leased_keys(run, runs, schema))


def _leased_keys(run: Run, runs: list[Run], schema: TableSchema) -> Run:
    """The keys of a run, which evict rows of ``runs`` if necessary.

    Nothing can be read without keys, so they are kept even if they get no lease.
    """
    keys = run.keys_only(schema)
    leased = ((place, each) for place, each in enumerate(runs) if each.is_whole and each.lease is not None)
    while (lease := ROOM.lease(keys.held_bytes)) is None and (found := next(leased, None)) is not None:
        place, whole = found
        runs[place] = whole.keys_only(schema)
    return replace(keys, lease=lease)


def _batches(group: _Group, schema: TableSchema) -> list[pa.RecordBatch]:
    """The rows of a group, or their keys if not all rows are kept."""
    if all(run.is_whole for run in group.runs):
        return [batch for run in group.runs for batch in run.batches]
    return [batch for run in group.runs for batch in run.key_batches(schema)]


def _are_same(one: Sequence[Run], other: Sequence[Run]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _same_columns(one: TableSchema, other: TableSchema) -> bool:
    """Whether rows that were read with schema ``one`` are valid for ``other``, which is not older."""
    return one is other or (one.has_columns_of(other) and not other.replaced_since(one.version))


def _by_generation(runs: Sequence[Run], current: int) -> list[tuple[int, list[Run]]]:
    """Ordered runs, split where the generation rises; a run without one belongs to the generation before."""
    groups: list[tuple[int, list[Run]]] = []
    for run in runs:
        generation = max(run.generation or 0, groups[-1][0] if groups else current)
        if not groups or generation > groups[-1][0]:
            groups.append((generation, []))
        groups[-1][1].append(run)
    return groups
