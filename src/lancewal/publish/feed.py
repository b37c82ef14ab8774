"""The change feed: every row that reached a shard, in the order of the shard's write-ahead log.

A place in the feed is, for each shard, the WAL position that is read next. Positions have no
gaps and never change, so the rows between two places are the same whenever they are read.
Rows of different shards have no order relative to each other.

The rows of published SSTables are in the feed at the place of their pointer in the log. While
it is open whether a pointer's SSTables are published, the feed ends before the pointer. Nothing can
follow the pointer in the log until that is settled.

The feed reaches back as far as the WAL is retained. To read older positions raises
:class:`~lancewal.errors.WalTruncatedError`: nothing is ever left out silently.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.base import open_base
from lancewal.errors import InvalidInputError, StorageError, WalTruncatedError
from lancewal.format import TOMBSTONE, SsTableEntry, TableSchema, WalEntry, refuse_added, shown
from lancewal.publish.sstable_pointers import Fate, SsTablePointer, fate_of
from lancewal.reader import ShardPlace, TableState
from lancewal.shard import (
    ShardManifestStore,
    WalTailer,
    WatchedTip,
    discover_shards,
    first_readable,
    is_flushed,
    listed_shards,
    may_follow,
)
from lancewal.sstable import SsTable, without_dead_values
from lancewal.storage import RECHECK_AFTER, Clock, ObjectStore, boot_time, in_thread, layout, ordered_map

logger = logging.getLogger(__name__)

CHANGE_TYPE = "_change_type"
SHARD_ID = "_shard_id"
WAL_POSITION = "_wal_position"
WRITER_EPOCH = "_writer_epoch"
FEED_COLUMNS = (CHANGE_TYPE, SHARD_ID, WAL_POSITION, WRITER_EPOCH)

UPSERT = "upsert"
DELETE = "delete"
#: The change type of every row in a table without a primary key.
INSERT = "insert"

#: For each shard, the position that is read next.
Positions = dict[UUID, int]

_REMOTE_READERS = 64
#: Entries up to this size may be pointers, whose rows are elsewhere.
_MAY_BE_POINTER_BYTES = 64 * 1024
#: Above this many entries one listing is cheaper than a request for each size.
_FEW_ENTRIES = 64


class ChangeFeed:
    """Reads the changes of one table, with the columns that it had when the feed was opened.

    >>> import tempfile, lance, lancewal
    >>> key = pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
    >>> uri = tempfile.mkdtemp() + "/table"
    >>> _ = lance.write_dataset(pa.schema([key]).empty_table(), uri)
    >>> with lancewal.initialize(uri, unsharded=True).writer() as writer:
    ...     _ = writer.put(pa.table({"id": [1, 2]}))
    ...     _ = writer.delete(1)
    >>> feed = ChangeFeed.open(uri)
    >>> changes = pa.Table.from_batches(feed.changes(feed.earliest(), feed.latest()))
    >>> changes.select(["id", "_change_type"]).to_pydict()
    {'id': [1, 2, 1], '_change_type': ['upsert', 'upsert', 'delete']}
    """

    def __init__(self, store: ObjectStore, schema: TableSchema, clock: Clock = boot_time) -> None:
        self._store = store
        self._clock = clock
        self._table_schema = schema
        self._workers = 1 if store.is_local else _REMOTE_READERS
        self._tips: dict[UUID, WatchedTip] = {}
        #: Where each log ended when it was last read together with its manifest, and when that was.
        self._ends: dict[UUID, tuple[int, float]] = {}
        self.schema = feed_schema(schema)

    @classmethod
    def open(cls, uri: str, storage_options: Mapping[str, str] | None = None) -> ChangeFeed:
        store = ObjectStore.from_uri(uri, storage_options)
        return cls(store, open_base(store).schema)

    def earliest(self) -> Positions:
        """The earliest place from which everything is retained."""

        def first(shard_id: UUID) -> int:
            manifest = ShardManifestStore(self._store, shard_id).read_latest()
            return first_readable(self._store, shard_id, manifest)

        return self._for_all_shards(first)

    def latest(self) -> Positions:
        """The place after everything that can be read now."""
        return self._for_all_shards(self.end)

    def end(self, shard_id: UUID) -> int:
        """The position after a shard's last readable entry: the tip, or a pointer whose fate is open."""
        started = self._clock()
        end = self._find_end(shard_id)
        self._ends[shard_id] = end, started
        return end

    def _find_end(self, shard_id: UUID) -> int:
        manifest = ShardManifestStore(self._store, shard_id).read_latest()
        tip = self._tips.setdefault(shard_id, WatchedTip(self._store, shard_id)).find(manifest)
        if tip == layout.FIRST_WAL_POSITION or is_flushed(manifest, tip - 1):
            return tip
        tailer = WalTailer(self._store, shard_id)
        header = tailer.read_header(tip - 1)
        if header is None or not header.sentinel:
            return tip
        last = tailer.read_entry(tip - 1)
        pointer = None if last is None else SsTablePointer.of(last)
        if last is None or pointer is None:
            return tip
        fate = fate_of(self._store, shard_id, last.position, last.writer_epoch, pointer)
        return last.position if fate is Fate.OPEN else tip

    def advance(
        self,
        start: Mapping[UUID, int] | Mapping[str, int],
        *,
        until: Mapping[UUID, int] | None = None,
        max_entries: int | None = None,
        max_bytes: int | None = None,
    ) -> Positions:
        """The place that a reader at ``start`` should read up to, at most ``until`` (by default the end).

        The limits on WAL entries and bytes are for all shards together, and shared fairly. At least one
        entry is taken, however large. A shard that is not in ``start`` is new, and read from its beginning.
        """
        for name, limit in (("max_entries", max_entries), ("max_bytes", max_bytes)):
            if limit is not None and limit < 1:
                raise InvalidInputError(f"{name} must be at least 1, got {limit}")
        start = checked_place(start)
        goal = dict(until) if until is not None else _not_behind(start, self._ends_from(start))
        place = {**start}
        backlog = {
            shard: range(place.get(shard, layout.FIRST_WAL_POSITION), end) for shard, end in goal.items()
        }
        backlog = {shard: positions for shard, positions in backlog.items() if len(positions)}
        if max_entries is not None:
            backlog = _shared(backlog, max_entries)
        for shard, positions in backlog.items():
            place[shard] = positions.stop
        return place if max_bytes is None else self._within_bytes(start, backlog, max_bytes)

    def _ends_from(self, start: Mapping[UUID, int]) -> Positions:
        """The end of every shard. Takes one request for a shard that has nothing new since ``start``."""
        listing = in_thread(lambda: listed_shards(self._store), "lancewal-io")
        found = ordered_map(lambda shard: self._end_from(shard, start[shard]), start, self._workers)
        ends = dict(zip(start, found, strict=True))
        new = [shard for shard in listing.result() if shard not in ends]
        return {**ends, **dict(zip(new, ordered_map(self.end, new, self._workers), strict=True))}

    def _end_from(self, shard_id: UUID, place: int) -> int:
        known, looked_at = self._ends.get(shard_id, (None, 0.0))

        def is_young() -> bool:
            return self._clock() - looked_at <= RECHECK_AFTER.total_seconds()

        # A slot that was free a moment ago may have been written since, but not written, flushed and
        # collected. The time is checked after the answer too, because this process may have been stopped.
        if (
            known == place
            and is_young()
            and WalTailer(self._store, shard_id).read_entry(place) is None
            and is_young()
        ):
            return place
        return self.end(shard_id)

    def changes(self, start: Mapping[UUID, int], end: Mapping[UUID, int]) -> Iterator[pa.RecordBatch]:
        """All changes from one place up to another, shard by shard."""
        for shard_id, stop in end.items():
            yield from self.read(shard_id, start.get(shard_id, layout.FIRST_WAL_POSITION), stop)

    def up_to_now(
        self, start: Mapping[UUID, int] | Mapping[str, int] | None = None
    ) -> Iterator[tuple[pa.RecordBatch, Positions]]:
        """All changes from a place, or the earliest one, up to the latest.

        Each batch comes with the place after the last batch. A reader that stops before it and goes on
        from that place skips rows.
        """
        place = None if start is None else checked_place(start)
        end = _not_behind(place or {}, self.latest())
        for batch in self.changes(self.earliest() if place is None else place, end):
            yield batch, end

    def read(self, shard_id: UUID, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """The changes of one shard from position ``start`` up to ``end`` (exclusive)."""
        tailer = WalTailer(self._store, shard_id)
        for entry in _in_sequence(tailer.entries(start, end)):
            pointer = SsTablePointer.of(entry)
            batches = self._logged(entry) if pointer is None else self._published(entry, pointer)
            for batch in batches:
                if batch.num_rows:
                    yield self._change(batch, entry)

    def follow(
        self,
        start: Mapping[UUID, int] | Mapping[str, int] | None = None,
        *,
        stop: Callable[[], bool],
        poll_interval: float = 0.5,
        wait: Callable[[float], object] | None = None,
        tell_idle: bool = False,
    ) -> Iterator[tuple[pa.RecordBatch, Positions]]:
        """Changes as they arrive, until ``stop()`` is true, each with the place to resume from.

        Starts at the end by default. The place that comes with a batch is before all batches that were
        read from the same shard in the same poll, so a restart from it may repeat batches. With ``tell_idle``
        every poll that finds nothing yields an empty batch.
        """
        pause = wait or threading.Event().wait
        place = self.latest() if start is None else checked_place(start)
        while not stop():
            goal = self.advance(place)
            if goal == place:
                pause(poll_interval)
                if tell_idle:
                    yield pa.RecordBatch.from_pylist([], schema=self.schema), dict(place)
            for shard_id, end in goal.items():
                begin = place.get(shard_id, layout.FIRST_WAL_POSITION)
                before = dict(place)
                for batch in self.read(shard_id, begin, end):
                    yield batch, before
                    if stop():
                        return
                place[shard_id] = end

    def _for_all_shards(self, position: Callable[[UUID], int]) -> Positions:
        shards = discover_shards(self._store)
        return dict(zip(shards, ordered_map(position, shards, self._workers), strict=True))

    def _logged(self, entry: WalEntry) -> Iterator[pa.RecordBatch]:
        """The rows of an entry in the table's columns, with the tombstone column last."""
        for stored in entry.rows(self._table_schema):
            yield from shown(pa.Table.from_batches([stored]), self._table_schema).to_batches()

    def _published(self, entry: WalEntry, pointer: SsTablePointer) -> Iterator[pa.RecordBatch]:
        """The rows of a pointer's SSTables in the table's columns, with the tombstone column last."""
        fate = fate_of(self._store, entry.shard_id, entry.position, entry.writer_epoch, pointer)
        if fate is Fate.OPEN:
            raise StorageError(
                f"position {entry.position} of shard {entry.shard_id} is not settled yet; "
                "read up to ChangeFeed.end"
            )
        if fate is Fate.DROPPED:
            return
        for name in pointer.sstables:
            self._refuse_collected(entry, name)
            try:
                sstable = SsTable.open(self._store, entry.shard_id, SsTableEntry(1, name))
                rows = 0
                for batch in sstable.scan(self._table_schema, self._table_schema.names, with_tombstone=True):
                    rows += batch.num_rows
                    yield batch
                sstable.check_count(rows, may_have_more=bool(self._table_schema.primary_key))
            except StorageError:
                # If this process was stopped while it read, the rest of the SSTable may be collected.
                self._refuse_collected(entry, name)
                raise

    def _refuse_collected(self, entry: WalEntry, name: str) -> None:
        if not self._store.list(f"{layout.sstable_dir(entry.shard_id, name)}/{layout.VERSIONS_DIR}"):
            raise WalTruncatedError(entry.shard_id, entry.position, entry.position + 1)

    def _change(self, rows: pa.RecordBatch, entry: WalEntry) -> pa.RecordBatch:
        count = rows.num_rows
        if self._table_schema.primary_key:
            rows = without_dead_values(rows, self._table_schema.primary_key)
            kinds = pc.if_else(rows.column(TOMBSTONE), DELETE, UPSERT)
        else:
            kinds = pa.repeat(pa.scalar(INSERT), count)
        columns = [
            *(rows.column(name) for name in self._table_schema.names),
            kinds,
            pa.repeat(pa.scalar(str(entry.shard_id)), count),
            pa.repeat(pa.scalar(entry.position, pa.int64()), count),
            pa.repeat(pa.scalar(entry.writer_epoch, pa.int64()), count),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _within_bytes(
        self, start: Mapping[UUID, int], backlog: Mapping[UUID, range], max_bytes: int
    ) -> Positions:
        """The place that ``max_bytes`` allow; each step advances the shard with the fewest bytes so far."""
        sizes = {shard: self._sizes(shard, positions) for shard, positions in backlog.items()}
        place = {**start}
        taken = 0
        turns = [(0, str(shard), shard) for shard in backlog]
        heapq.heapify(turns)
        while turns:
            given, name, shard = heapq.heappop(turns)
            size = next(sizes[shard], None)
            if size is None:
                continue
            if taken and taken + size > max_bytes:
                break
            taken += size
            place[shard] = place.get(shard, layout.FIRST_WAL_POSITION) + 1
            heapq.heappush(turns, (given + size, name, shard))
        return place

    def _sizes(self, shard_id: UUID, positions: range) -> Iterator[int]:
        """The bytes of each entry's rows; a missing entry counts as 0, and fails when it is read."""
        listed: dict[str, int] = {}
        if len(positions) > _FEW_ENTRIES:
            listed = {info.path: info.size for info in self._store.list(layout.wal_dir(shard_id))}
        tailer = WalTailer(self._store, shard_id)

        def size(position: int) -> int:
            path = layout.wal_entry(shard_id, position)
            stored = listed.get(path)
            if stored is None:
                info = self._store.head(path)
                stored = 0 if info is None else info.size
            if not 0 < stored <= _MAY_BE_POINTER_BYTES:
                return stored
            entry = tailer.read_entry(position)
            pointer = None if entry is None else SsTablePointer.of(entry)
            return stored if pointer is None else pointer.num_bytes

        return ordered_map(size, positions, self._workers)


def checked_place(place: Mapping[UUID, int] | Mapping[str, int]) -> Positions:
    """Check a place that a caller kept. Shard ids may be strings, as in JSON; positions are integers.

    >>> checked_place({"00000000-0000-0000-0000-000000000007": 3})
    {UUID('00000000-0000-0000-0000-000000000007'): 3}
    """
    if not isinstance(place, Mapping):
        raise InvalidInputError(f"a place has a position for each shard, as a dict, not {place!r}")
    for shard, position in place.items():
        is_whole = isinstance(position, int | np.integer) and not isinstance(position, bool)
        if not is_whole or position < layout.FIRST_WAL_POSITION:
            raise InvalidInputError(
                f"WAL positions start at {layout.FIRST_WAL_POSITION} and are whole numbers; the place has "
                f"{position!r} for shard {shard}"
            )
    return {layout.parse_shard_id(shard): int(position) for shard, position in place.items()}


def _in_sequence(entries: Iterator[WalEntry]) -> Iterator[WalEntry]:
    """The entries in order; each is returned once the next one is read and may follow it.

    If a reader was stopped until its place was collected, a writer that was stopped too may have written a
    stray entry into the emptied slot. The stray entry is not part of the log.
    """
    held: WalEntry | None = None
    for entry in entries:
        if held is not None:
            if not may_follow(held, entry):
                raise WalTruncatedError(held.shard_id, held.position, entry.position)
            yield held
        held = entry
    if held is not None:
        yield held


def _not_behind(place: Mapping[UUID, int], ends: Positions) -> Positions:
    """``ends``, unless one is before ``place``: entries that are written in between would be skipped."""
    for shard, position in place.items():
        end = ends.get(shard, layout.FIRST_WAL_POSITION)
        if position > end:
            raise InvalidInputError(
                f"the place is at position {position} of shard {shard}, whose log ends before {end}: it is "
                "of another table, or this one was restored since; start from the earliest place"
            )
    return ends


def feed_schema(schema: TableSchema) -> pa.Schema:
    """The table's columns and those that the feed adds.

    Only the key columns and the change type are never null: a delete has no other values, and rows of a
    snapshot have no position.
    """
    columns = [
        field if field.name in schema.primary_key else field.with_nullable(True) for field in schema.plain
    ]
    refuse_added(schema, *FEED_COLUMNS)
    return pa.schema(
        [
            *columns,
            pa.field(CHANGE_TYPE, pa.string(), nullable=False),
            pa.field(SHARD_ID, pa.string()),
            pa.field(WAL_POSITION, pa.int64()),
            pa.field(WRITER_EPOCH, pa.int64()),
        ]
    )


def _shared(backlog: Mapping[UUID, range], max_entries: int) -> dict[UUID, range]:
    """The first positions of all ranges, ``max_entries`` in total, shared as evenly as possible."""
    shared: dict[UUID, range] = {}
    left = max_entries
    by_length = sorted(backlog, key=lambda shard: (len(backlog[shard]), shard))
    for place, shard in enumerate(by_length):
        share = -(-left // (len(by_length) - place)) if left else 0
        shared[shard] = backlog[shard][:share]
        left -= len(shared[shard])
    return {shard: positions for shard, positions in shared.items() if len(positions)}


def ending_before_pointers(store: ObjectStore, state: TableState) -> TableState:
    """A state that a change feed can continue: each shard's log ends before its first pointer.

    The rows of a pointer are in SSTables that the state may not list yet.
    """
    return replace(state, shards=tuple(_before_pointer(store, place) for place in state.shards))


def _before_pointer(store: ObjectStore, place: ShardPlace) -> ShardPlace:
    tailer = WalTailer(store, place.shard_id)
    positions = place.wal_range
    for position, header in zip(positions, tailer.headers(positions.start, positions.stop), strict=True):
        entry = tailer.read_entry(position) if header is None or header.sentinel else None
        if entry is not None and SsTablePointer.of(entry) is not None:
            return replace(place, wal_end=position)
    return place
