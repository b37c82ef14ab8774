"""What a shard's WAL holds beyond its SSTables, for readers without the writer's help.

Entries stay decoded in memory while the readers of this process together keep no more than
``LOG_CACHE_BYTES`` of them. Of an entry that finds no room its keys are kept, which say what
is newest, and its rows are fetched again by whoever needs them (``StreamedSource``).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from uuid import UUID

import numpy as np
import pyarrow as pa

from lancewal.errors import ConflictError, InvalidInputError, WalCorruptError, WalTruncatedError
from lancewal.format import TOMBSTONE, ShardManifest, TableSchema, WalEntry
from lancewal.index import IndexStore
from lancewal.memtable import MemTableView
from lancewal.reader.memory_source import MemorySource
from lancewal.reader.streamed_source import Part, StreamedSource
from lancewal.shard import ShardManifestStore, WalTailer, WatchedTip, first_unsettled, is_flushed
from lancewal.storage import ObjectStore

# When a snapshot could not be taken because the table moved on meanwhile.


class SnapshotMovedError(ConflictError):
    """What a reader listed is no longer all there is; reading again from the start helps."""


#: What all readers of a process keep of logs unless the environment says otherwise.
LOG_CACHE_BYTES = 256 << 20
LOG_CACHE_VARIABLE = "LANCEWAL_LOG_CACHE_BYTES"

#: A tail that nobody read for so long makes room for others.
_IDLE_SECONDS = 60.0
#: Keys of small entries are joined up to so many rows: a batch costs more than a few keys.
_RUN_ROWS = 65_536


class LogCache:
    """The room for decoded entries that all tails of the process share."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._taken = 0
        # Leases may end inside of any lock, whenever the garbage collector runs.
        self._given_back: deque[int] = deque()
        self._lock = threading.Lock()
        self._tails: weakref.WeakSet[ShardTail] = weakref.WeakSet()
        self._asked_idle_at = float("-inf")

    @property
    def max_bytes(self) -> int:
        if self._max_bytes is None:
            text = os.environ.get(LOG_CACHE_VARIABLE, str(LOG_CACHE_BYTES))
            if not text.isdecimal():
                raise InvalidInputError(f"{LOG_CACHE_VARIABLE} must be a number of bytes, not {text!r}")
            self._max_bytes = int(text)
        return self._max_bytes

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return self.max_bytes - self._settled()

    def add(self, tail: ShardTail) -> None:
        with self._lock:
            self._tails.add(tail)

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much would fit, if need be after tails that nobody reads were let go."""
        return num_bytes <= self.free_bytes or (self._forget_idle() and num_bytes <= self.free_bytes)

    def take(self, num_bytes: int) -> Lease | None:
        """Room for an entry for as long as the lease lives; ``None`` when there is none."""
        if self._try_to_take(num_bytes) or (self._forget_idle() and self._try_to_take(num_bytes)):
            return Lease(num_bytes, self._given_back)
        return None

    def after_fork(self) -> None:
        """Another thread may have held the lock when the process was forked."""
        self._lock = threading.Lock()

    def _try_to_take(self, num_bytes: int) -> bool:
        with self._lock:
            if self._settled() + num_bytes > self.max_bytes:
                return False
            self._taken += num_bytes
            return True

    def _settled(self) -> int:
        while self._given_back:
            self._taken -= self._given_back.popleft()
        return self._taken

    def _forget_idle(self) -> bool:
        """Have tails that nobody reads let go; false when that was tried a moment ago."""
        now = time.monotonic()
        with self._lock:
            if now - self._asked_idle_at < _IDLE_SECONDS / 10:
                return False
            self._asked_idle_at = now
            idle = [tail for tail in self._tails if now - tail.last_read > _IDLE_SECONDS]
        for tail in idle:
            tail.forget()
        return bool(idle)


class Lease:
    """Room in the cache; gives itself back."""

    __slots__ = ("_given_back", "_num_bytes")

    def __init__(self, num_bytes: int, given_back: deque[int]) -> None:
        self._num_bytes = num_bytes
        self._given_back = given_back

    def __del__(self) -> None:
        self._given_back.append(self._num_bytes)


CACHE = LogCache()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CACHE.after_fork)


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
    """Entries with rows that no SSTable holds, oldest first; all below ``end`` are among them.

    ``schema`` says which columns are keys, where only keys are kept.
    """

    entries: tuple[TailEntry, ...]
    end: int
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
    """The rows of one generation so far, as ``schema``; their keys alone where not all rows are kept."""

    schema: TableSchema
    generation: int
    first_position: int
    entries: int
    is_whole: bool
    batches: list[pa.RecordBatch]
    indexes: IndexStore = field(repr=False)


class ShardTail:
    """The tail of one shard; decoded entries and key indexes are kept from read to read.

    Safe from any thread: what is kept is replaced as a whole and never changed.
    """

    def __init__(self, store: ObjectStore, shard_id: UUID, manifests: ShardManifestStore) -> None:
        self._shard_id = shard_id
        self._manifests = manifests
        self._tailer = WalTailer(store, shard_id)
        self._tip = WatchedTip(store, shard_id)
        self._is_remote = not store.is_local
        self.last_read = time.monotonic()
        self._kept = TailEntries((), 0)
        self._groups: tuple[_Group, ...] = ()
        CACHE.add(self)

    def read(self, manifest: ShardManifest, schema: TableSchema) -> TailEntries:
        """The entries that ``manifest``, just read, does not cover.

        Entries vanish when they are covered and collected meanwhile, and then the end of the
        WAL seems to lie where they began. So the end is believed only when a manifest that
        is read after it was found still leaves it uncovered; otherwise this raises
        :class:`SnapshotMovedError`.
        """
        end = self._tip.find(manifest)
        try:
            tail = self.load(manifest, end, schema)
        except WalTruncatedError as error:
            raise SnapshotMovedError(str(error)) from error
        newest = self._manifests.read_latest()
        if newest is not None and newest.replay_after_wal_entry_position >= tail.end:
            raise SnapshotMovedError(
                f"WAL entry {tail.end} of shard {self._shard_id} was flushed while the tail was read"
            )
        self._kept = tail
        return tail

    def load(self, manifest: ShardManifest, end: int, schema: TableSchema) -> TailEntries:
        """The entries that ``manifest`` does not cover, up to ``end`` at least."""
        self.last_read = time.monotonic()
        start = first_unsettled(manifest)
        kept = self._kept
        if kept.end < start or not kept.is_for(schema):
            kept = TailEntries((), start)
        entries = [
            entry for entry in kept.entries if not is_flushed(manifest, entry.position, entry.generation)
        ]
        if not kept.is_whole:
            entries = self._with_room(entries)
        run = _KeyRun()
        for stored in self._tailer.entries(kept.end, end):
            if not stored.sentinel and not is_flushed(manifest, stored.position, stored.generation):
                if run.rows >= _RUN_ROWS:
                    run = _KeyRun()
                entries.append(_kept_of(stored, schema, run))
        return TailEntries(tuple(entries), max(end, kept.end), schema)

    def sources(self, tail: TailEntries, manifest: ShardManifest, schema: TableSchema) -> list[MemorySource]:
        """The rows of ``tail`` as levels, one a generation, oldest first."""
        groups, sources = [], []
        for generation, entries in _by_generation(tail.entries, manifest.current_generation):
            whole = tail.is_whole or all(entry.decoded is not None for entry in entries)
            group = self._group(generation, entries, schema, whole)
            groups.append(group)
            view = MemTableView(self._shard_id, generation, group.schema, group.batches, group.indexes)
            if group.is_whole:
                sources.append(MemorySource(view, schema))
            else:
                parts = [Part(entry.num_rows, partial(self._rows, entry, schema)) for entry in entries]
                sources.append(StreamedSource(view, schema, parts, is_remote=self._is_remote))
        self._groups = tuple(groups)
        return sources

    def forget(self) -> None:
        """Let go of everything; the next read starts anew."""
        self._kept = TailEntries((), 0)
        self._groups = ()

    def _with_room(self, entries: list[TailEntry]) -> list[TailEntry]:
        """``entries``, decoded where there is room for all of them by now."""
        missing = sum(entry.num_bytes for entry in entries if entry.decoded is None)
        if not CACHE.has_room(missing):
            return entries
        return [
            entry
            if entry.decoded is not None or (lease := CACHE.take(entry.num_bytes)) is None
            else replace(entry, decoded=self._fetched(entry), lease=lease, run=None)
            for entry in entries
        ]

    def _group(
        self, generation: int, entries: Sequence[TailEntry], schema: TableSchema, whole: bool
    ) -> _Group:
        """Extends the group that was made of a part of the same entries, or makes one anew."""
        first = entries[0].position
        for known in self._groups:
            same_start = (known.generation, known.first_position) == (generation, first)
            same_schema = known.schema is schema if whole else _same_keys(known.schema, schema)
            if same_start and same_schema and known.is_whole == whole and known.entries <= len(entries):
                added = list(_batches(entries[known.entries :], schema, whole))
                batches = [*known.batches, *added] if added else known.batches
                return replace(known, entries=len(entries), batches=batches)
        held = schema if whole else _keys_of(schema)
        batches = list(_batches(entries, schema, whole))
        return _Group(held, generation, first, len(entries), whole, batches, IndexStore((), held))

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
    lease = CACHE.take(stored.num_bytes)
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
