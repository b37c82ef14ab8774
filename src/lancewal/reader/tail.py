"""What a shard's WAL holds beyond its SSTables, for readers without the writer's help.

Entries stay decoded in memory under a lease of the process's cache. Of an entry that gets no lease its
keys are kept, which say what is newest, and its rows are fetched again by whoever needs them
(:class:`~lancewal.reader.memory_source.StreamedSource`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from uuid import UUID

import numpy as np
import pyarrow as pa

from lancewal.errors import ConflictError, WalCorruptError, WalTruncatedError
from lancewal.format import TOMBSTONE, ShardManifest, TableSchema, WalEntry
from lancewal.index import IndexStore
from lancewal.memtable import MemTableView, RowsSoFar
from lancewal.reader.memory_source import MemorySource, Part, StreamedSource
from lancewal.shard import WalTailer, WatchedTip, first_unsettled, is_flushed
from lancewal.storage import Cache, Lease, ObjectStore, in_forked_child, process_cache

#: A tail that nobody read for so long makes room for others.
_IDLE_SECONDS = 60.0
#: Keys of small entries are joined up to so many rows: a batch costs more than a few keys.
_RUN_ROWS = 65_536


class SnapshotMovedError(ConflictError):
    """What a reader listed is no longer all there is; reading again from the start helps."""


class LogRoom:
    """Leases for decoded entries. Where one is refused, tails that nobody reads are let go."""

    def __init__(self, cache: Cache = process_cache) -> None:
        self.cache = cache
        self._lock = threading.Lock()
        # Not a cache: the tails that are in use, to ask them.
        self._tails: weakref.WeakSet[ShardTail] = weakref.WeakSet()
        self._asked_idle_at = float("-inf")

    def add(self, tail: ShardTail) -> None:
        with self._lock:
            self._tails.add(tail)

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much would fit, if need be after idle tails were let go."""
        return num_bytes <= self.cache.free_bytes or (
            self._forget_idle() and num_bytes <= self.cache.free_bytes
        )

    def lease(self, num_bytes: int) -> Lease | None:
        """Room for an entry for as long as the lease lives; ``None`` when there is none."""
        lease = self.cache.lease(num_bytes)
        return self.cache.lease(num_bytes) if lease is None and self._forget_idle() else lease

    def after_fork(self) -> None:
        """Another thread may have held the lock when the process was forked."""
        self._lock = threading.Lock()

    def _forget_idle(self) -> bool:
        """Have idle tails let go; false when that was tried a moment ago."""
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


class _KeyRun:
    """Keys and tombstones of entries side by side whose rows are not kept."""

    def __init__(self) -> None:
        self._parts: list[pa.RecordBatch] = []
        self.rows = 0

    def add(self, keys: Sequence[pa.RecordBatch]) -> int:
        """Copy ``keys``, which would hold whole entries in memory; the place of the first."""
        first = self.rows
        for part in keys:
            self._parts.append(part.take(pa.array(np.arange(part.num_rows))))
            self.rows += part.num_rows
        return first

    def slice(self, first: int, rows: int) -> pa.RecordBatch:
        parts = self._parts
        if len(parts) > 1:
            parts = self._parts = pa.Table.from_batches(parts).combine_chunks().to_batches()
        return parts[0].slice(first, rows)


@dataclass(frozen=True, slots=True)
class TailEntry:
    """An entry with rows: decoded, under a lease, or only its keys, as a place in a run of them."""

    position: int
    generation: int | None
    num_rows: int
    num_bytes: int
    decoded: WalEntry | None
    #: The version of the base table that the rows were written for, if they say so.
    written_for: int | None
    lease: Lease | None = None
    run: _KeyRun | None = None
    place: int = 0


@dataclass(frozen=True)
class TailEntries:
    """The entries from ``start`` up to ``end`` (exclusive) whose rows no SSTable holds, oldest first.

    ``schema`` says which columns are keys, where only keys are kept.
    """

    entries: tuple[TailEntry, ...] = ()
    start: int = 0
    end: int = 0
    schema: TableSchema | None = None

    @property
    def written_for(self) -> int | None:
        """The version that the oldest rows were written for which say it."""
        return next((entry.written_for for entry in self.entries if entry.written_for is not None), None)

    @cached_property
    def is_whole(self) -> bool:
        """Whether all rows are in memory."""
        return all(entry.decoded is not None for entry in self.entries)

    def is_for(self, schema: TableSchema) -> bool:
        """Whether what is kept serves a reader that sees the columns of ``schema``."""
        return self.schema is schema or self.is_whole or _same_keys(self.schema, schema)


@dataclass(frozen=True)
class _Group:
    """The rows of one generation so far; their keys alone where not all rows are kept."""

    generation: int
    first_position: int
    entries: int
    is_whole: bool
    batches: list[pa.RecordBatch]
    rows: RowsSoFar = field(repr=False)


class ShardTail:
    """The tail of one shard; decoded entries and key indexes are kept from read to read.

    Safe from any thread: what is kept is replaced as a whole and never changed.
    """

    def __init__(self, store: ObjectStore, shard_id: UUID) -> None:
        self._shard_id = shard_id
        self._tailer = WalTailer(store, shard_id)
        self._tip = WatchedTip(store, shard_id)
        self._is_remote = not store.is_local
        self.last_read = time.monotonic()
        self._kept = TailEntries()
        self._groups: tuple[_Group, ...] = ()
        self._extending = threading.Lock()
        ROOM.add(self)

    def find_end(self, manifest: ShardManifest) -> int:
        """Where the WAL ends, unless what ``manifest`` does not cover was flushed and collected meanwhile."""
        return self._tip.find(manifest)

    def load(self, manifest: ShardManifest, end: int, schema: TableSchema) -> TailEntries:
        """The entries up to ``end`` that ``manifest`` does not cover.

        Raises :class:`SnapshotMovedError` for one that was collected.
        """
        self.last_read = time.monotonic()
        start = first_unsettled(manifest)
        kept = self._kept
        # Another thread may have kept what a newer manifest leaves uncovered, which is less.
        if not kept.start <= start <= kept.end or not kept.is_for(schema):
            kept = TailEntries((), start, start)
        entries = [
            entry
            for entry in kept.entries
            if entry.position >= start and not is_flushed(manifest, entry.position, entry.generation)
        ]
        if not kept.is_whole:
            entries = self._with_room(entries)
        run = _KeyRun()
        try:
            for stored in self._tailer.entries(kept.end, end):
                if not stored.sentinel and not is_flushed(manifest, stored.position, stored.generation):
                    if run.rows >= _RUN_ROWS:
                        run = _KeyRun()
                    entries.append(_kept_of(stored, schema, run))
        except WalTruncatedError as error:
            raise SnapshotMovedError(str(error)) from error
        self._kept = TailEntries(tuple(entries), start, max(end, kept.end), schema)
        if kept.end <= end:
            return self._kept
        return TailEntries(tuple(entry for entry in entries if entry.position < end), start, end, schema)

    def sources(self, tail: TailEntries, manifest: ShardManifest, schema: TableSchema) -> list[MemorySource]:
        """The rows of ``tail`` as levels, one a generation, oldest first."""
        generations = _by_generation(tail.entries, manifest.current_generation)
        # Two threads that extend one group at once would share what grows with it, but not its batches.
        with self._extending:
            groups = [self._group(generation, entries, schema) for generation, entries in generations]
            self._groups = tuple(groups)
        sources = []
        for group, (generation, entries) in zip(groups, generations, strict=True):
            view = MemTableView(self._shard_id, generation, group.batches, group.rows)
            if group.is_whole:
                sources.append(MemorySource(view, schema))
            else:
                parts = [Part(entry.num_rows, partial(self._rows, entry, schema)) for entry in entries]
                sources.append(StreamedSource(view, schema, parts, is_remote=self._is_remote))
        return sources

    def forget(self) -> None:
        """Let go of everything; the next read starts anew."""
        self._kept = TailEntries()
        self._groups = ()

    def _with_room(self, entries: list[TailEntry]) -> list[TailEntry]:
        """``entries``, decoded where there is room for all of them by now."""
        missing = sum(entry.num_bytes for entry in entries if entry.decoded is None)
        if not ROOM.has_room(missing):
            return entries
        return [
            entry
            if entry.decoded is not None or (lease := ROOM.lease(entry.num_bytes)) is None
            else replace(entry, decoded=self._fetched(entry), lease=lease, run=None)
            for entry in entries
        ]

    def _group(self, generation: int, entries: Sequence[TailEntry], schema: TableSchema) -> _Group:
        """Extends the group that was made of a part of the same entries, or makes one anew."""
        first = entries[0].position
        whole = all(entry.decoded is not None for entry in entries)
        for known in self._groups:
            same_start = (known.generation, known.first_position) == (generation, first)
            same_schema = known.rows.schema is schema if whole else _same_keys(known.rows.schema, schema)
            if same_start and same_schema and known.is_whole == whole and known.entries <= len(entries):
                added = list(_batches(entries[known.entries :], schema, whole))
                batches = [*known.batches, *added] if added else known.batches
                return replace(known, entries=len(entries), batches=batches)
        held = schema if whole else _keys_of(schema)
        batches = list(_batches(entries, schema, whole))
        rows = RowsSoFar(held, IndexStore((), held))
        return _Group(generation, first, len(entries), whole, batches, rows)

    def _rows(self, entry: TailEntry, schema: TableSchema) -> pa.Table:
        decoded = entry.decoded or self._fetched(entry)
        return pa.Table.from_batches(_aligned(decoded, schema), schema.stored)

    def _fetched(self, entry: TailEntry) -> WalEntry:
        try:
            (stored,) = self._tailer.entries(entry.position, entry.position + 1)
        except WalTruncatedError as error:
            raise SnapshotMovedError(
                f"{error} Its rows were flushed while they were read; read again, and collect garbage "
                "with a min_age above the duration of reads"
            ) from error
        if stored.num_rows != entry.num_rows:
            raise WalCorruptError(
                self._shard_id, entry.position, "it is another one than when it was read first"
            )
        return stored


def _kept_of(stored: WalEntry, schema: TableSchema, run: _KeyRun) -> TailEntry:
    """The whole entry where there is room, else its keys."""
    entry = TailEntry(
        stored.position, stored.generation, stored.num_rows, stored.num_bytes, stored, stored.base_version
    )
    lease = ROOM.lease(stored.num_bytes)
    if lease is not None:
        return replace(entry, lease=lease)
    return replace(entry, decoded=None, run=run, place=run.add(_key_batches(stored, schema)))


def _aligned(entry: WalEntry, schema: TableSchema) -> list[pa.RecordBatch]:
    return list(entry.rows(schema))


def _key_batches(entry: WalEntry, schema: TableSchema) -> list[pa.RecordBatch]:
    names = [*schema.primary_key, TOMBSTONE]
    held = _keys_of(schema).stored
    return [
        pa.RecordBatch.from_arrays([batch.column(name) for name in names], schema=held)
        for batch in _aligned(entry, schema)
    ]


def _batches(entries: Sequence[TailEntry], schema: TableSchema, whole: bool) -> Iterator[pa.RecordBatch]:
    """The rows of ``entries``, or their keys."""
    run: _KeyRun | None = None
    first = end = 0
    for entry in entries:
        if run is not None and (entry.run is not run or entry.place != end):
            yield run.slice(first, end - first)
            run = None
        if entry.decoded is not None:
            yield from _aligned(entry.decoded, schema) if whole else _key_batches(entry.decoded, schema)
            continue
        if run is None:
            run, first = entry.run, entry.place
        end = entry.place + entry.num_rows
    if run is not None:
        yield run.slice(first, end - first)


def _keys_of(schema: TableSchema) -> TableSchema:
    """The key columns of ``schema`` alone."""
    columns = pa.schema([schema.columns.field(name) for name in schema.primary_key])
    return TableSchema(columns, schema.primary_key)


def _same_keys(one: TableSchema | None, other: TableSchema) -> bool:
    """Whether keys that were read as the columns of ``one`` are those of ``other``."""
    if one is None or one.primary_key != other.primary_key:
        return False
    return all(
        one.columns.field(name).equals(other.columns.field(name), check_metadata=True)
        for name in other.primary_key
    )


def _by_generation(entries: Sequence[TailEntry], current: int) -> list[tuple[int, list[TailEntry]]]:
    """Entries in order, cut where the generation rises; one without counts to the one before it."""
    groups: list[tuple[int, list[TailEntry]]] = []
    for entry in entries:
        generation = max(entry.generation or 0, groups[-1][0] if groups else current)
        if not groups or generation > groups[-1][0]:
            groups.append((generation, []))
        groups[-1][1].append(entry)
    return groups
