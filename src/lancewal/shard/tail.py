"""WalTailer: reads a shard's WAL from any process, without a claim."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from uuid import UUID

from lancewal.errors import InvalidInputError, WalCorruptError, WalTruncatedError
from lancewal.format import EntryHeader, ShardManifest, WalEntry, decode_entry, decode_header
from lancewal.shard.log import WatchedTip, established_tip, first_readable, first_unsettled, lost_entry
from lancewal.shard.manifest import DEFAULT_SCAN_BATCH_SIZE, ShardManifestStore
from lancewal.storage import RECHECK_AFTER, Clock, Crew, ObjectStore, Task, boot_time, layout, ordered_map

logger = logging.getLogger(__name__)

DEFAULT_READ_AHEAD = 8
_HEADER_BYTES = 64 * 1024
_CURSOR_INTERVAL_SECONDS = 5.0


class WalTailer:
    """Reads entries by position, by range, or as they come.

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
        update_cursor: bool = True,
        manifest_scan_batch_size: int = DEFAULT_SCAN_BATCH_SIZE,
        clock: Clock = boot_time,
    ) -> None:
        """``update_cursor`` leaves a hint of the read position in the manifest, best effort."""
        if read_ahead < 1:
            raise InvalidInputError(f"read_ahead must be at least 1, got {read_ahead}")
        self._store = store
        self._shard_id = layout.parse_shard_id(shard_id)
        self._manifests = ShardManifestStore(store, self._shard_id, manifest_scan_batch_size, clock)
        self._workers = 1 if store.is_local else read_ahead
        self._clock = clock
        self._cursor = _CursorHint(self._manifests, clock) if update_cursor else None

    @property
    def shard_id(self) -> UUID:
        return self._shard_id

    def read_entry(self, position: int) -> WalEntry | None:
        """The entry at ``position``; ``None`` when there is none (not yet, or no more)."""
        if position < layout.FIRST_WAL_POSITION:
            raise InvalidInputError(f"WAL positions start at {layout.FIRST_WAL_POSITION}, got {position}")
        try:
            data = self._store.get(layout.wal_entry(self._shard_id, position))
        except FileNotFoundError:
            return None
        entry = decode_entry(data, self._shard_id, position)
        if self._cursor is not None:
            self._cursor.seen(position)
        return entry

    def read_header(self, position: int) -> EntryHeader | None:
        """Epoch and generation of an entry without fetching its rows."""
        path = layout.wal_entry(self._shard_id, position)
        info = self._store.head(path)
        if info is None:
            return None
        try:
            start = self._store.get_range(path, 0, min(info.size, _HEADER_BYTES))
        except FileNotFoundError:
            return None
        try:
            return decode_header(start, self._shard_id, position)
        except WalCorruptError:
            if info.size <= _HEADER_BYTES:
                raise
            # A schema beyond the first bytes: rare enough to fetch the whole entry for.
            return decode_header(self._store.get(path), self._shard_id, position)

    def headers(self, start: int, end: int) -> Iterator[EntryHeader | None]:
        """:meth:`read_header` of every position from ``start`` up to ``end`` (exclusive), read ahead."""
        return ordered_map(self.read_header, range(start, end), self._workers)

    def first_position(self) -> int:
        """The first position that can be read up to the tip without a gap."""
        manifest = self._manifests.read_latest()
        return first_readable(self._store, self._shard_id, manifest)

    def next_position(self) -> int:
        """The tip: the position that the next entry will take. Lists, so that no hole is taken for it."""
        return established_tip(self._store, self._shard_id, self._manifests.read_latest())

    def __iter__(self) -> Iterator[WalEntry]:
        return self.entries()

    def entries(self, start: int | None = None, end: int | None = None) -> Iterator[WalEntry]:
        """Entries from ``start`` (the first retained) up to ``end`` (exclusive; the tip).

        Reads ahead. With an ``end`` every position must be there: one that was collected
        raises :class:`WalTruncatedError`, any other hole :class:`WalCorruptError`.
        """
        first = self.first_position() if start is None else start
        last = self.next_position() if end is None else end
        positions = range(first, last)
        read = ordered_map(self.read_entry, positions, self._workers)
        for position, entry in zip(positions, read, strict=True):
            if entry is None:
                raise self._missing(position, last)
            yield entry

    def follow(
        self,
        start: int | None = None,
        *,
        stop: Callable[[], bool],
        poll_interval: float = 0.1,
        wait: Callable[[float], object] | None = None,
    ) -> Iterator[WalEntry]:
        """Entries as they appear, until ``stop()`` is true.

        ``stop`` is asked before every read and after every wait. ``wait`` replaces the
        sleep between polls, e.g. with ``threading.Event.wait`` so that a stop is heard at once.
        """
        pause = wait or threading.Event().wait
        position = self.first_position() if start is None else start
        tip = WatchedTip(self._store, self._shard_id, self._clock)
        # Since when the position is known to be the tip: neither collected nor lost.
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
                covered = manifest is not None and position <= manifest.replay_after_wal_entry_position
                # Covered, so it existed: either it came between the two reads, or it is gone.
                if covered and self.read_entry(position) is None:
                    raise self._missing(position, None)
                # What does not come may have been lost, with others behind it.
                tip.find(manifest)
                at_tip_since = now

    def _missing(self, position: int, end: int | None) -> WalTruncatedError | WalCorruptError:
        manifest = self._manifests.read_latest()
        covered = manifest.replay_after_wal_entry_position if manifest else 0
        if position <= covered:
            first = first_readable(self._store, self._shard_id, manifest)
            return WalTruncatedError(self._shard_id, position, first)
        reach = f" although entries up to {end - 1} were asked for" if end is not None else ""
        return lost_entry(self._shard_id, position, reach)


class _CursorHint:
    """Raises the manifest's cursor hint now and then, away from the reader's thread.

    Only a hint: any failure is ignored, and one update at a time is under way.
    """

    def __init__(self, manifests: ShardManifestStore, clock: Clock) -> None:
        self._manifests = manifests
        self._clock = clock
        self._lock = threading.Lock()
        self._latest = 0
        self._updating = False
        self._next_update = float("-inf")

    def seen(self, position: int) -> None:
        with self._lock:
            self._latest = max(self._latest, position)
            now = self._clock()
            if self._updating or now < self._next_update:
                return
            self._next_update = now + _CURSOR_INTERVAL_SECONDS
            self._updating = True
        try:
            _cursor_thread().take(Task(self._update))
        except RuntimeError as error:
            # The interpreter is shutting down: the read still counts.
            logger.debug("cursor hint not updated: %s", error)

    def _update(self) -> None:
        position = self._latest

        def raised(manifest: ShardManifest) -> ShardManifest:
            if position <= manifest.wal_entry_position_last_seen:
                return manifest
            return replace(manifest, wal_entry_position_last_seen=position)

        try:
            self._manifests.commit_update(None, raised)
        except Exception as error:
            logger.debug("cursor hint not updated: %s", error)
        finally:
            self._updating = False


@cache
def _cursor_thread() -> Crew:
    crew = Crew(1, "lancewal-cursor")
    # The interpreter must not go away under a call to the store.
    atexit.register(partial(crew.dismiss, wait=True))
    return crew


def has_unflushed_rows(manifest: ShardManifest, store: ObjectStore) -> bool:
    """Whether the WAL has an entry with rows that no SSTable of the manifest holds."""
    tailer = WalTailer(store, manifest.shard_id, update_cursor=False)
    end = established_tip(store, manifest.shard_id, manifest)
    for position in range(first_unsettled(manifest), end):
        header = tailer.read_header(position)
        # A missing one was flushed meanwhile.
        if header is None or header.sentinel:
            continue
        if header.generation is None or header.generation >= manifest.current_generation:
            return True
    return False
