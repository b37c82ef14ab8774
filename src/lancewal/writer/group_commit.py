"""Group commit: threads that wait for durability share one WAL entry.

The first thread that waits becomes the leader; later threads are followers and wait in line. The
leader inserts the rows of all waiting puts into the MemTable, writes everything that is queued as
one entry, and then passes the lead to the first thread in line. If the rows of that thread are
already durable, it passes the lead on at once and returns; otherwise it leads. No background
thread stands between a put and the store, so a lone writer pays one round trip and nothing else.

Two choices make this fast with many threads, because the GIL lets only one of them run at a time.
The leader inserts the rows of its followers: a dozen inserts in a row take a fraction of the time
that they take when the GIL changes hands between them. And followers whose rows are durable are
woken one after the other: if all woke at once, they would queue up for the GIL.

Guarantees:

1. Entries are written in queue order and never overlap.
2. A put is one element of the queue and never split. An entry holds rows of one generation.
3. A put that is refused fails alone.
4. After a write fails for good, nothing more is written, and every waiter, now and later, gets the
   error.

A leader is a caller's thread, so an interrupt (Ctrl-C) may end it between any two steps. So the
next leader can safely repeat each step, and one assignment decides each fact (a put is queued, an
entry is stored, a thread leads).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import pyarrow as pa

from lancewal.errors import FencedError, LanceWalError, OutcomeUnknownError, StorageError
from lancewal.format import PUT_IDS_TAG, PutId, put_ids_tag
from lancewal.memtable import MemTable
from lancewal.shard import WalAppender
from lancewal.storage import LOOK_AGAIN_SECONDS, check_process, span
from lancewal.writer.intake import Rows
from lancewal.writer.state import WriterState, WriteStats, for_others, fresh_copy, without_frames

logger = logging.getLogger(__name__)

#: How often one entry is tried before the writer gives up for good. The store itself
#: retries transient faults; these attempts cover a longer outage.
WRITE_ATTEMPTS = 3
RETRY_PAUSE_SECONDS = 0.2
#: A leader waits for more puts no longer than this share of the last write's duration.
GATHER_SHARE = 0.5
#: The upper bound of that wait: an outage or a suspended machine makes one write slow, but not the next.
MOST_GATHER_SECONDS = 0.1


class PutState(Enum):
    """Where the rows of a put are.

    There is no state for durable rows: a queued put is durable once the log's durable position
    has reached its end. One assignment decides that for a whole group.
    """

    #: With the caller, until a leader inserts them.
    WAITING = auto()
    #: In the queue of the log, and in the MemTable.
    QUEUED = auto()
    #: Nowhere: the insert raised an error.
    REFUSED = auto()
    #: Nowhere: the caller was interrupted before a leader inserted them.
    WITHDRAWN = auto()


@dataclass(slots=True, eq=False)
class Waiter:
    """A thread that waits until the rows below ``end_position`` are durable."""

    end_position: int
    state: PutState = field(init=False, default=PutState.QUEUED)
    #: The thread holds this lock, by ``with``, for as long as it waits. An interrupt may keep the thread
    #: from doing anything else to show that it is gone.
    present: threading.Lock = field(init=False, default_factory=threading.Lock)
    in_line: bool = field(init=False, default=False)
    #: The waiter locks it, and the thread that wakes the waiter releases it. A bare lock is several
    #: times cheaper than a Condition, which matters with many threads per entry.
    gate: threading.Lock | None = field(init=False, default=None)

    def wake(self) -> None:
        """Open the gate. May be called twice, because a waiter never waits a second time."""
        if self.gate is not None and self.gate.locked():
            self.gate.release()


@dataclass(slots=True, eq=False)
class Put(Waiter):
    """The rows of one put on their way to the WAL, and the thread that waits for them."""

    rows: Rows
    #: The leader calls its ``insert`` with this put.
    into: Destination
    put_id: PutId | None = None
    end_position: int = field(init=False, default=0)
    state: PutState = field(init=False, default=PutState.WAITING)
    refusal: Exception | None = field(init=False, default=None)
    #: Where the rows are in memory; ``None`` in WAL-only mode.
    memtable: MemTable | None = field(init=False, default=None)
    #: A put with the same id whose thread was interrupted. If a leader inserted it all the same, this put
    #: takes its place.
    earlier: Put | None = field(init=False, default=None)
    #: Bytes of all puts up to this one since the log began; differences give the queued bytes.
    end_bytes: int = field(init=False, default=0)

    @property
    def positions(self) -> range:
        """The batch positions of the rows, once they are queued."""
        return range(self.end_position - len(self.rows.batches), self.end_position)

    def stand_for_earlier(self) -> None:
        """Take the place of an earlier put that was queued.

        Requires that no leader can still insert the earlier put.
        """
        earlier = self.earlier
        while earlier is not None and self.state is PutState.WAITING:
            if earlier.state is PutState.QUEUED:
                self.end_position = earlier.end_position
                self.state = PutState.QUEUED
            earlier = earlier.earlier


class Destination(Protocol):
    """What rows pass through on their way to the log: a mode of the writer."""

    def insert(self, put: Put) -> None:
        """Insert the rows and :meth:`CommitLog.enqueue` the put, or raise. Must not wait for anything."""


@dataclass(slots=True)
class Group:
    """Puts that share an entry."""

    puts: list[Put]
    data: memoryview | None = None
    # The appender's next position before the first attempt. Once the position has moved, the entry is stored.
    tried_from: int | None = None
    io_seconds: float = 0.0


class CommitLog:
    """The queue between puts and the WAL."""

    def __init__(
        self,
        appender: WalAppender,
        state: WriterState,
        stats: WriteStats,
        max_entry_bytes: int,
        *,
        base_version: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``base_version`` is the version of the base table that defines the columns of the rows."""
        self._appender = appender
        self._state = state
        self._stats = stats
        self._max_entry_bytes = max_entry_bytes
        self._base_version = base_version
        self._sleep = sleep
        self._lock = threading.Lock()
        # Puts whose rows no leader has inserted yet, oldest first; only a leader removes any.
        self._arrived: deque[Put] = deque()
        # Puts whose rows are to be written, oldest first.
        self._queue: deque[Put] = deque()
        # Followers, in the order in which they get the lead.
        self._line: deque[Waiter] = deque()
        self._leader: Waiter | None = None
        # A group that is encoded and perhaps stored. After an interrupt the next leader writes the same
        # bytes again, so that the store can tell that an existing object is ours.
        self._in_flight: Group | None = None
        self._expected_puts = 0
        self._gather_seconds = 0.0
        self._gathering: threading.Lock | None = None
        #: Batches below this position are in the WAL.
        self.durable_position = 0
        self._durable_bytes = 0

    @property
    def queued_position(self) -> int:
        """The position that the next batch will get."""
        with self._lock:
            return self._queue_end()[0]

    @property
    def pending_bytes(self) -> int:
        with self._lock:
            return self._queue_end()[1] - self._durable_bytes

    @property
    def pending_batches(self) -> int:
        with self._lock:
            return self._queue_end()[0] - self.durable_position

    def start_at(self, position: int) -> None:
        """Count from ``position``: batches below it came from the WAL itself."""
        self.durable_position = position

    def commit_put(self, put: Put) -> None:
        """Have the rows inserted and return once they are durable; the caller holds ``put.present``.

        The leader, which is this thread or another, calls ``put.into.insert``. If that raises an error,
        this method raises it here, in the put's own thread.
        """
        self._settle(put, None)
        if put.refusal is not None:
            try:
                raise put.refusal
            finally:
                put.refusal = None  # otherwise this frame and the error would keep each other alive

    def commit(self, end_position: int, timeout: float | None = None) -> bool:
        """Return once batches below ``end_position`` are durable; ``False`` after ``timeout`` seconds.

        Raises the latched error if they can no longer become durable.
        """
        if self.durable_position >= end_position:
            return True
        waiter = Waiter(end_position)
        with waiter.present:
            return self._settle(waiter, timeout)

    def commit_all(self) -> None:
        """Make everything that is queued now durable."""
        self.commit(self.queued_position)

    def fail(self, error: LanceWalError, *, memory_ahead_of_log: bool) -> None:
        """Stop for good: nothing more is written, and every waiter gets ``error``."""
        self._state.fail(error, memory_ahead_of_log=memory_ahead_of_log, ends_log=True)
        self._dissolve_line()

    def close(self) -> None:
        """Stop for good; rows that are not durable by now never become durable."""
        self._state.end_log()
        self._dissolve_line()

    def _settle(self, waiter: Waiter, timeout: float | None) -> bool:
        """Lead or wait until the waiter has its outcome; ``False`` when time ran out."""
        check_process()
        left = False
        try:
            try:
                if not self._lead_or_wait(waiter, timeout):
                    return False
                if self._leader is waiter:
                    self._lead(waiter)
            finally:
                if waiter.in_line or waiter.state is PutState.WAITING or self._leader is waiter:
                    self._leave(waiter)
                left = True
        finally:
            if not left:
                self._leave(waiter)  # an interrupt cut the first call short
        if self._may_go(waiter):
            return True
        raise self._error(waiter)

    def _lead_or_wait(self, waiter: Waiter, timeout: float | None) -> bool:
        """Become the leader, or wait for the outcome or the lead; ``False`` when time ran out."""
        with self._lock:
            if self._state.ended.log_failure is not None and not self._may_go(waiter):
                raise self._error(waiter)
            if isinstance(waiter, Put):
                self._arrived.append(waiter)
                self._end_gathering()
            if self._take_lead(waiter):
                return True
            waiter.gate = gate = threading.Lock()
            gate.acquire()
            waiter.in_line = True
            self._line.append(waiter)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LOOK_AGAIN_SECONDS if deadline is None else max(deadline - time.monotonic(), 0.0)
            if gate.acquire(timeout=min(left, LOOK_AGAIN_SECONDS)):
                return True
            with self._lock:
                # The waiter may have been woken at the last moment: then it has its outcome or the lead.
                # Or an interrupt removed the thread that should have woken it.
                if not waiter.in_line or self._state.ended.log_failure is not None or self._take_lead(waiter):
                    return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def _may_go(self, waiter: Waiter) -> bool:
        """Whether the waiter's rows are durable or were refused."""
        if waiter.state is PutState.QUEUED:
            return waiter.end_position <= self.durable_position
        return waiter.state is PutState.REFUSED

    def _error(self, waiter: Waiter) -> LanceWalError:
        failure = self._state.ended.log_failure
        if failure is None:
            return StorageError("a WAL waiter was woken without an outcome")
        tried = () if self._in_flight is None else self._in_flight.puts
        if isinstance(waiter, Put) and waiter not in tried:
            return for_others(failure)
        return fresh_copy(failure)

    def _take_lead(self, waiter: Waiter) -> bool:
        """Make the waiter the leader; ``False`` while another thread leads. Requires the lock."""
        # The waiter itself may already be the leader without knowing it: an interrupt may have kept its
        # predecessor from waking it.
        if self._leader not in (None, waiter) and self._leader.present.locked():
            return False
        self._leader = waiter
        return True

    def _lead(self, leader: Waiter) -> None:
        """Write entries until the leader's own rows are durable."""
        try:
            while self._state.ended.log_failure is None and not self._may_go(leader):
                if self._in_flight is None:
                    self._gather()
                    self._take_in()
                if self._in_flight is not None or self._queue:
                    self._write_group()
                    self._state.note_change()
                elif not self._may_go(leader):
                    raise StorageError(f"nothing is queued up to batch {leader.end_position}")
                if not self._may_go(leader):
                    self._wake_served()
        except Exception as error:
            if not isinstance(error, LanceWalError):
                error = OutcomeUnknownError(f"the WAL write failed unexpectedly: {error!r}")
            error = without_frames(error)
            self._state.fail(error, memory_ahead_of_log=True, ends_log=True)
            logger.error("the WAL cannot be written any more: %s", error, extra=self._state.context)

    def _gather(self) -> None:
        """Wait a moment for as many puts as the last group had, because their callers usually put again.

        Otherwise two halves of the callers would take turns with half-empty entries: one half
        is queued while the other half has just been woken. A lone caller never waits.
        """
        with self._lock:
            if len(self._queue) + len(self._arrived) >= self._expected_puts:
                return
            gathering = threading.Lock()
            gathering.acquire()
            self._gathering = gathering
        gathering.acquire(timeout=self._gather_seconds)
        self._gathering = None

    def _end_gathering(self) -> None:
        """End the leader's wait if all expected puts have arrived. Requires the lock."""
        gathering = self._gathering
        if gathering is not None and len(self._queue) + len(self._arrived) >= self._expected_puts:
            self._gathering = None
            gathering.release()

    def _take_in(self) -> None:
        """Insert the rows of all puts that have arrived. Requires the lead."""
        while self._arrived:
            put = self._arrived[0]
            if put.earlier is not None:
                # The earlier put arrived before this one, so its state is final by now.
                put.stand_for_earlier()
            # An interrupted leader may have queued the rows without setting the state.
            undecided = put.state is PutState.WAITING and put.refusal is None and not self._is_last(put)
            if undecided and put.present.locked():
                try:
                    put.into.insert(put)
                except Exception as error:
                    logger.debug("a put was refused", exc_info=True)
                    if not self._is_last(put):
                        put.refusal = without_frames(error)
            if put.refusal is not None:
                put.state = PutState.REFUSED
            elif self._is_last(put):
                put.state = PutState.QUEUED
            elif put.state is PutState.WAITING:
                put.refusal = StorageError("a put was taken in, but none of its rows was queued")
                put.state = PutState.REFUSED
            self._arrived.popleft()

    def _is_last(self, put: Put) -> bool:
        """Whether this put was the last to be queued."""
        return bool(self._queue) and self._queue[-1] is put

    def enqueue(self, put: Put, memtable: MemTable | None = None) -> None:
        """Queue a put behind all others, which gives its rows their positions.

        Callers must serialise their calls: positions follow call order. While puts come through
        :meth:`commit_put`, only the leader may call this.
        """
        with self._lock:
            start, num_bytes = self._queue_end()
            put.memtable = memtable
            put.end_position = start + len(put.rows.batches)
            put.end_bytes = num_bytes + put.rows.num_bytes
            self._queue.append(put)
            put.state = PutState.QUEUED
            self._end_gathering()

    def _queue_end(self) -> tuple[int, int]:
        """The position and the bytes after the last queued row. Requires the lock."""
        if self._queue:
            last = self._queue[-1]
            return last.end_position, last.end_bytes
        return self.durable_position, self._durable_bytes

    def _write_group(self) -> None:
        """Write the group in flight, or else the next one in the queue. One of them must exist."""
        started = time.perf_counter()
        group = self._in_flight
        if group is None:
            group = self._in_flight = self._next_group()
        with span("lancewal.wal_entry", self._state.trace, puts=len(group.puts)):
            wal_position = self._store(group)
        seconds = time.perf_counter() - started
        last = group.puts[-1]
        if last.memtable is not None:
            # Set before durable_position: a thread that finds the rows durable reads this position.
            last.memtable.covered_wal_position = wal_position
        with self._lock:
            self.durable_position = last.end_position
            self._durable_bytes = last.end_bytes
            while self._queue and self._queue[0].end_position <= last.end_position:
                self._queue.popleft()
            self._expected_puts = len(group.puts) + len(self._queue) + len(self._arrived)
            self._gather_seconds = min(GATHER_SHARE * group.io_seconds, MOST_GATHER_SECONDS)
            self._in_flight = None
        assert group.data is not None
        self._stats.add(
            wal_flush_count=1,
            wal_flush_time=seconds,
            wal_flush_bytes=len(group.data),
            wal_flush_puts=len(group.puts),
            wal_io_count=1,
            wal_io_time=group.io_seconds,
        )

    def _next_group(self) -> Group:
        """The longest run of queued puts that may share an entry."""
        puts: list[Put] = []
        num_bytes = 0
        with self._lock:
            for put in self._queue:
                fits = num_bytes + put.rows.num_bytes <= self._max_entry_bytes
                if puts and (put.memtable is not puts[0].memtable or not fits):
                    break
                puts.append(put)
                num_bytes += put.rows.num_bytes
        return Group(puts)

    def _store(self, group: Group) -> int:
        """Write the group's entry unless it is already written; return its position."""
        appender = self._appender
        if group.data is None:
            group.data = self._encoded(group)
        if group.tried_from is None:
            group.tried_from = appender.next_position_hint
        elif appender.next_position_hint > group.tried_from:
            # The leader that wrote the entry was interrupted before it could record that.
            return appender.next_position_hint - 1
        started = time.perf_counter()
        for attempt in range(1, WRITE_ATTEMPTS + 1):
            try:
                return appender.append_encoded(group.data)
            except FencedError:
                raise
            except (StorageError, OutcomeUnknownError) as error:
                if attempt == WRITE_ATTEMPTS:
                    raise
                logger.warning(
                    "WAL write failed, trying again (%d of %d): %s",
                    attempt,
                    WRITE_ATTEMPTS,
                    error,
                    extra=self._state.context,
                )
                self._sleep(RETRY_PAUSE_SECONDS * attempt)
            finally:
                group.io_seconds = time.perf_counter() - started
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _encoded(self, group: Group) -> memoryview:
        batches = [batch for put in group.puts for batch in put.rows.batches]
        memtable = group.puts[0].memtable
        generation = None if memtable is None else memtable.generation
        ids = [put.put_id for put in group.puts if put.put_id is not None]
        tags = {PUT_IDS_TAG: put_ids_tag(ids)} if ids else None
        try:
            return self._appender.encode(
                batches, generation=generation, tags=tags, base_version=self._base_version
            )
        except (pa.ArrowException, MemoryError) as error:
            raise StorageError(
                f"a WAL entry of {len(batches)} batches could not be encoded: {error}"
            ) from error

    def _leave(self, waiter: Waiter) -> None:
        """Remove the waiter, however its wait ended. If it leads, pass the lead to the next in line."""
        with self._lock:
            if waiter.state is PutState.WAITING:
                waiter.state = PutState.WITHDRAWN
            # Before the lead is passed on: an interrupt may have left the leader in line, and it would
            # then become its own successor.
            if waiter.in_line and waiter in self._line:
                self._line.remove(waiter)
            if self._leader is waiter:
                succeed = self._state.ended.log_failure is None and self._line
                self._leader = self._line[0] if succeed else None
            if self._line and self._line[0] is self._leader:
                self._wake_first()
            if self._leader is None and self._state.ended.log_failure is not None:
                self._wake_all()

    def _wake_first(self) -> None:
        """Requires the lock."""
        first = self._line[0]
        first.wake()
        self._line.popleft()
        first.in_line = False

    def _wake_served(self) -> None:
        """Wake the followers whose rows the last entry made durable. For a leader that goes on leading."""
        with self._lock:
            while self._line and self._may_go(self._line[0]):
                self._wake_first()

    def _dissolve_line(self) -> None:
        """Wake all waiters after a failure. If a leader is at work, it does that itself when it leaves."""
        with self._lock:
            if self._leader is None:
                self._wake_all()

    def _wake_all(self) -> None:
        """Requires the lock."""
        self._arrived.clear()
        while self._line:
            self._wake_first()
