"""Reads a shard's WAL: WalTailer from any process, without a claim; Replay what a new claim has to load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Self
from uuid import UUID

from lancewal.errors import FencedError, InvalidInputError, WalCorruptError, WalTruncatedError
from lancewal.format import PUT_IDS_TAG, EntryHeader, ShardManifest, WalEntry, decode_entry, decode_header
from lancewal.shard.log import (
    WalAppender,
    WatchedTip,
    established_tip,
    first_readable,
    first_unsettled,
    is_flushed,
    lost_entry,
)
from lancewal.shard.manifest import DEFAULT_SCAN_BATCH_SIZE, ShardManifestStore
from lancewal.storage import (
    RECHECK_AFTER,
    Clock,
    ObjectInfo,
    ObjectStore,
    Shelf,
    boot_time,
    layout,
    ordered_map,
)

#: The most entries that are read ahead of the consumer, and how many before any entry's size is known.
DEFAULT_READ_AHEAD = 96
_FIRST_READ_AHEAD = 8
#: The most bytes that all readers of the process together read ahead.
_BYTES_AHEAD = 64 << 20
_HEADER_BYTES = 64 * 1024
#: How many headers are read at a time to see where a replay may flush.
_HEADERS_AT_ONCE = 64
#: How many headers are read at a time to find the first rows; usually one or two sentinels precede them.
_HEADERS_AHEAD = 4

#: Headers by store and entry. An entry never changes. The key has its size and time, because a stalled
#: writer may write another entry into an emptied slot.
_headers: Shelf[tuple[object, ObjectInfo], EntryHeader] = Shelf()
#: The approximate memory of a header.
_KEPT_BYTES = 512


class _Window:
    """How many entries may be read ahead of the consumer, based on the sizes of earlier entries."""

    #: All windows in use. Changed without a lock, because the garbage collector may end one.
    _all: ClassVar[set[_Window]] = set()

    def __init__(self, most: int, first: int) -> None:
        self._most = most
        self._last = first
        self._largest = 0.0

    def __enter__(self) -> Self:
        self._all.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._all.discard(self)

    def after(self, entry: WalEntry | None) -> int:
        # After a large entry more large ones are likely, so its size fades slowly.
        self._largest = max(0.95 * self._largest, entry.num_bytes if entry is not None else 0, 1)
        readers = max(1, len(self._all))
        fitting = min(self._most // readers, int(_BYTES_AHEAD / readers / self._largest))
        self._last = max(2, min(2 * self._last, fitting))
        return self._last


class WalTailer:
    """Reads entries by position, by range, or as they appear.

    >>> from uuid import uuid4
    >>> import pyarrow as pa
    >>> from lancewal.shard import WalAppender
    >>> store, shard = ObjectStore.from_uri("memory://tailer-example"), uuid4()
    >>> _ = WalAppender.open(store, shard).append([pa.record_batch({"id": [7]})])
    >>> [entry.num_rows for entry in WalTailer(store, shard)]
    [1]
    """

    def __init__(
        self,
        store: ObjectStore,
        shard_id: UUID | str,
        *,
        read_ahead: int = DEFAULT_READ_AHEAD,
        manifest_scan_batch_size: int = DEFAULT_SCAN_BATCH_SIZE,
        clock: Clock = boot_time,
    ) -> None:
        if read_ahead < 1:
            raise InvalidInputError(f"read_ahead must be at least 1, got {read_ahead}")
        self._store = store
        self._shard_id = layout.parse_shard_id(shard_id)
        self._manifests = ShardManifestStore(store, self._shard_id, manifest_scan_batch_size, clock)
        self._workers = 1 if store.is_local else read_ahead
        self._clock = clock

    @property
    def shard_id(self) -> UUID:
        """The shard whose log is read."""
        return self._shard_id

    def read_entry(self, position: int) -> WalEntry | None:
        """The entry at ``position``; ``None`` when there is none (not yet, or no more)."""
        if position < layout.FIRST_WAL_POSITION:
            raise InvalidInputError(f"WAL positions start at {layout.FIRST_WAL_POSITION}, got {position}")
        try:
            data = self._store.get(layout.wal_entry(self._shard_id, position))
        except FileNotFoundError:
            return None
        return decode_entry(data, self._shard_id, position)

    def read_header(self, position: int, info: ObjectInfo | None = None) -> EntryHeader | None:
        """Read the epoch and generation of an entry without its rows; ``info`` saves one request."""
        path = layout.wal_entry(self._shard_id, position)
        info = info or self._store.head(path)
        if info is None:
            return None
        try:
            start = self._store.get_range(path, 0, min(info.size, _HEADER_BYTES))
            try:
                return decode_header(start, self._shard_id, position)
            except WalCorruptError:
                # The schema may not fit into the first bytes. Or the size is that of an entry that was
                # collected, and a stalled writer has filled the slot again. So fetch the whole entry.
                return decode_header(self._store.get(path), self._shard_id, position)
        except FileNotFoundError:
            return None

    def headers(self, start: int, end: int) -> Iterator[EntryHeader | None]:
        """:meth:`read_header` of every position from ``start`` up to ``end`` (exclusive), read ahead."""
        return ordered_map(self.read_header, range(start, end), self._workers)

    def first_position(self) -> int:
        """The first position that can be read up to the tip without a gap."""
        manifest = self._manifests.read_latest()
        return first_readable(self._store, self._shard_id, manifest)

    def next_position(self) -> int:
        """The tip: the position of the next entry. Lists, so that a hole is not taken for the tip."""
        return established_tip(self._store, self._shard_id, self._manifests.read_latest())

    def __iter__(self) -> Iterator[WalEntry]:
        return self.entries()

    def entries(self, start: int | None = None, end: int | None = None) -> Iterator[WalEntry]:
        """Yield entries from ``start`` up to ``end`` (exclusive).

        By default from the first readable position up to the tip. Reads ahead. Every position must have an
        entry: a collected one raises :class:`WalTruncatedError`, any other hole :class:`WalCorruptError`.
        """
        first = self.first_position() if start is None else start
        last = self.next_position() if end is None else end
        yield from self.entries_at(range(first, last))

    def entries_at(self, positions: Sequence[int], *, first_ahead: int | None = None) -> Iterator[WalEntry]:
        """Yield the entries at ascending ``positions``; each of them must exist.

        ``first_ahead`` is how many entries are read ahead before the size of any is known.
        """
        first = first_ahead or _FIRST_READ_AHEAD
        with _Window(self._workers, first) as window:
            read = ordered_map(
                self.read_entry, positions, self._workers, first=first, ahead_after=window.after
            )
            for position, entry in zip(positions, read, strict=True):
                if entry is None:
                    raise self._missing(position, positions[-1] + 1)
                yield entry

    def follow(
        self,
        start: int | None = None,
        *,
        stop: Callable[[], bool],
        poll_interval: float = 0.1,
        wait: Callable[[float], object] | None = None,
    ) -> Iterator[WalEntry]:
        """Yield entries as they appear, until ``stop()`` is true.

        ``stop`` is called before every read and after every wait. ``wait`` replaces the
        sleep between polls, e.g. with ``threading.Event.wait`` so that a stop takes effect at once.
        """
        pause = wait or threading.Event().wait
        position = self.first_position() if start is None else start
        tip = WatchedTip(self._store, self._shard_id, self._clock)
        # Since when the position is known to be the tip, so that its entry is neither collected nor lost.
        at_tip_since = float("-inf")
        while not stop():
            now = self._clock()
            entry = self.read_entry(position)
            if entry is not None:
                at_tip_since = float("-inf")
                yield entry
                position += 1
            elif now - at_tip_since <= RECHECK_AFTER.total_seconds():
                pause(poll_interval)
            else:
                manifest = self._manifests.read_latest()
                # A flushed entry existed: either it was written between the two reads, or it is gone.
                if is_flushed(manifest, position) and self.read_entry(position) is None:
                    raise self._missing(position, None)
                # The next entry may have been lost, with later entries behind it; this raises then.
                tip.find(manifest)
                at_tip_since = now

    def _missing(self, position: int, end: int | None) -> WalTruncatedError | WalCorruptError:
        manifest = self._manifests.read_latest()
        if is_flushed(manifest, position):
            first = first_readable(self._store, self._shard_id, manifest)
            return WalTruncatedError(self._shard_id, position, first)
        reach = f" although entries up to {end - 1} were asked for" if end is not None else ""
        return lost_entry(self._shard_id, position, reach)


class Replay:
    """Reads the exact range that a claim has to restore, in order, with read-ahead.

    The range is fixed when this object is made: the sentinel (or, under the first
    epoch, the absence of any other writer) keeps it from growing.
    """

    def __init__(self, appender: WalAppender, tailer: WalTailer) -> None:
        self._appender = appender
        self._tailer = tailer
        start = first_unsettled(appender.claimed)
        end = appender.sentinel_position
        if end is None:
            # The first epoch has no predecessor, so the appender's tip is still exact.
            end = appender.next_position_hint
        #: The positions above the replay cursor, up to this writer's own sentinel.
        self.range = range(start, max(start, end))
        self._generations: dict[int, int | None] = {}
        #: The put-id tags of the entries that were read.
        self.put_ids: list[str] = []

    @property
    def next_position(self) -> int:
        """The position after the replayed range and the sentinel."""
        return self.range.stop + (1 if self._appender.sentinel_position is not None else 0)

    def entries(self) -> Iterator[WalEntry]:
        """Yield the entries with rows that no SSTable holds yet.

        Raises :class:`FencedError` on an entry of a higher epoch: a successor claimed the
        shard while this writer was opening it.
        """
        try:
            for entry in self._tailer.entries(self.range.start, self.range.stop):
                if entry.writer_epoch > self._appender.epoch:
                    raise FencedError(
                        entry.shard_id,
                        self._appender.epoch,
                        entry.writer_epoch,
                        f"(WAL replay aborted at position {entry.position})",
                    )
                if PUT_IDS_TAG in entry.tags:
                    self.put_ids.append(entry.tags[PUT_IDS_TAG])
                if entry.sentinel or self._is_flushed(entry.position, entry.generation):
                    continue
                yield entry
        except WalTruncatedError:
            # Only a successor can have flushed entries that this claim has to replay.
            self._appender.check_fenced()
            raise

    def may_split_after(self, position: int, generation: int) -> bool:
        """Whether a MemTable of ``generation`` may be flushed with ``position`` as its last entry.

        A flush raises the current generation, and replay skips entries of lower generations. So
        no later entry may belong to ``generation`` or an older one.
        """
        return not any(
            later <= generation
            for above in range(position + 1, self.range.stop)
            if (later := self._generation_at(above)) is not None
        )

    def _generation_at(self, position: int) -> int | None:
        """The generation of the rows to replay at ``position``; ``None`` without such rows or generation."""
        if position not in self._generations:
            some = range(position, min(position + _HEADERS_AT_ONCE, self.range.stop))
            for at, header in zip(some, self._tailer.headers(some.start, some.stop), strict=True):
                if header is None or header.sentinel or self._is_flushed(at, header.generation):
                    self._generations[at] = None
                else:
                    self._generations[at] = header.generation
        return self._generations[position]

    def _is_flushed(self, position: int, generation: int | None) -> bool:
        return is_flushed(self._appender.claimed, position, generation)


def first_unflushed(
    store: ObjectStore, manifest: ShardManifest, tip: int, infos: Mapping[int, ObjectInfo] | None = None
) -> int | None:
    """The first position below ``tip`` with rows that no SSTable of the manifest holds, if there is one.

    ``infos`` has entries of a listing: each saves a request, and its header is cached.
    """
    tailer = WalTailer(store, manifest.shard_id)

    def read(position: int) -> EntryHeader | None:
        info = (infos or {}).get(position)
        known = None if info is None else _headers.get((store.identity, info))
        if known is not None:
            return known
        header = tailer.read_header(position, info)
        if header is not None and info is not None:
            _headers.put((store.identity, info), header, _KEPT_BYTES)
        return header

    ahead = 1 if store.is_local else _HEADERS_AHEAD
    for start in range(manifest.first_unsettled, tip, ahead):
        some = range(start, min(start + ahead, tip))
        for position, header in zip(some, list(ordered_map(read, some, ahead)), strict=True):
            # A missing entry was flushed and collected in between.
            if header is None or header.sentinel or is_flushed(manifest, position, header.generation):
                continue
            return position
    return None


def has_unflushed_rows(manifest: ShardManifest, store: ObjectStore) -> bool:
    """Whether the WAL has rows that no SSTable of the manifest holds."""
    tip = established_tip(store, manifest.shard_id, manifest)
    return first_unflushed(store, manifest, tip) is not None
