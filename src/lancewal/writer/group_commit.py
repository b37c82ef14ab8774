"""Group commit: threads that wait for durability share one WAL entry.

Whoever waits first becomes the leader. It takes in the rows of all puts that wait, writes
what is queued as one entry, and passes the lead to the next in line: who finds its own rows
durable by then, passes it on at once and goes its way, and who does not, leads. No thread
stands between a put and the store, so a lone writer pays one round trip and nothing else.

Two things in this are for speed with many threads, of which the interpreter runs one at a
time. The leader takes in the rows of the others (checks them, gives them their place in
the MemTable): for a dozen puts in a row that takes a fraction of what it does when the
interpreter changes hands in the middle of it. And those who are done are woken one by the
other: all at once they would queue up for the interpreter.

Guarantees: entries are written in queue order and never overlap. One put is one queue
item and never split. An entry holds rows of one generation. A put that is refused fails
alone. After a write that failed for good nothing is written any more and every waiter, now
and later, gets the error.

A leader is a caller's thread, so an interrupt (Ctrl-C) may take it away between any two
steps. Whatever it was doing is therefore done in steps that the next leader can repeat
without harm, and what decides (rows are queued, an entry is stored, somebody leads) is
one assignment each.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from lancewal.errors import FencedError, LanceWalError, OutcomeUnknownError, StorageError
from lancewal.shard import WalAppender
from lancewal.storage import LOOK_AGAIN_SECONDS, check_process
from lancewal.writer.state import fresh_copy, without_frames
from lancewal.writer.stats import WriteStats

logger = logging.getLogger(__name__)

# What the commit log keeps in line: threads that wait, puts to be written, and those being written.


class DurableRows(Protocol):
    """Where the rows of a queue item live, to be told when they are durable."""

    def note_durable(self, end_position: int, wal_position: int) -> None: ...


@dataclass(slots=True, eq=False)
class Waiter:
    """A thread that waits: until where, or with which rows."""

    #: Where it may go on; ``None`` while its rows have no position yet.
    end_position: int | None
    #: Queues the rows of its put; ``None`` where there are none, or they were withdrawn.
    offer: Callable[[], object] | None = None
    positions: range | None = None
    refusal: Exception | None = None
    queued: bool = False
    #: Held by ``with`` for as long as the thread is there: an interrupt may keep it from saying that it goes.
    present: threading.Lock = field(default_factory=threading.Lock)
    # Held by the waiter; released by whoever wakes it. A bare lock is several times
    # cheaper than a Condition, which matters with many threads per entry.
    gate: threading.Lock | None = None

    @property
    def undecided(self) -> bool:
        """Whether it brought rows that are neither queued nor refused."""
        return self.offer is not None and self.end_position is None and self.refusal is None

    def wake(self) -> None:
        """May be called twice: nobody waits a second time."""
        if self.gate is not None and self.gate.locked():
            self.gate.release()


@dataclass(slots=True)
class Item:
    batches: Sequence[pa.RecordBatch]
    end_position: int
    num_bytes: int
    # Of all items up to this one, since the log began: differences tell what is queued.
    end_bytes: int
    generation: int | None
    home: DurableRows | None
    owner: Waiter | None


@dataclass(slots=True)
class Group:
    items: list[Item]
    data: memoryview
    # The appender's next position before the first try: once that has moved, the entry is stored.
    tried_from: int | None = None


#: Tries to write one entry before the writer gives up for good. The store itself
#: retries passing faults; these cover a longer outage.
WRITE_ATTEMPTS = 3
RETRY_PAUSE_SECONDS = 0.2
#: A leader waits for company no longer than this share of what the last write took.
GATHER_SHARE = 0.5


class CommitLog:
    """The queue between puts and the WAL."""

    def __init__(
        self,
        appender: WalAppender,
        stats: WriteStats,
        max_entry_bytes: int,
        *,
        on_failure: Callable[[LanceWalError], None] = lambda error: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._appender = appender
        self._stats = stats
        self._max_entry_bytes = max_entry_bytes
        self._on_failure = on_failure
        self._sleep = sleep
        #: Called after every entry: what was pending has become less.
        self.on_progress: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._queue: deque[Item] = deque()
        self._waiters: deque[Waiter] = deque()
        # Those whose rows are to be taken in, oldest first; only a leader removes any.
        self._offers: deque[Waiter] = deque()
        # Whose rows were taken in last, or are now.
        self._taken_in: Waiter | None = None
        # Encoded and perhaps stored already: the next leader writes these very bytes
        # again, so that the store can recognise them as its own.
        self._in_flight: Group | None = None
        self._leader: Waiter | None = None
        self._expected_puts = 0
        self._gather_seconds = 0.0
        self._gathering: threading.Lock | None = None
        self._failure: LanceWalError | None = None
        self._durable_position = 0
        self._durable_bytes = 0

    @property
    def durable_position(self) -> int:
        """Batches below this position are in the WAL."""
        return self._durable_position

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
            return self._queue_end()[0] - self._durable_position

    @property
    def failure(self) -> LanceWalError | None:
        return self._failure

    def start_at(self, position: int) -> None:
        """Count from ``position``: batches below it came from the WAL itself."""
        self._durable_position = position

    def enqueue(
        self,
        batches: Sequence[pa.RecordBatch],
        num_bytes: int,
        generation: int | None = None,
        home: DurableRows | None = None,
    ) -> range:
        """Queue the rows of one put; returns their batch positions.

        Callers serialise: positions are given in call order. A log whose puts come through
        :meth:`commit_put` must not be given others beside them.
        """
        with self._lock:
            start, bytes_before = self._queue_end()
            end = start + len(batches)
            end_bytes = bytes_before + num_bytes
            owner = self._taken_in
            self._queue.append(Item(batches, end, num_bytes, end_bytes, generation, home, owner))
            self._end_gathering()
        return range(start, end)

    def commit(self, end_position: int, timeout: float | None = None) -> bool:
        """Return once batches below ``end_position`` are durable; ``False`` when time ran out.

        Raises the latched error when they never will be.
        """
        return self._durable_position >= end_position or self._settle(Waiter(end_position), timeout)

    def commit_put(self, offer: Callable[[], object]) -> range:
        """Have ``offer`` enqueue the rows of one put; returns their positions once they are durable.

        The leader calls it, which is this thread or another, and calls it until it has queued
        something or raised; what it raises is raised here. It must not wait for anything.
        """
        waiter = Waiter(None, offer)
        self._settle(waiter, None)
        if waiter.refusal is not None:
            try:
                raise waiter.refusal
            finally:
                waiter.refusal = None  # or this frame and the error would keep each other alive
        assert waiter.positions is not None
        return waiter.positions

    def commit_all(self) -> None:
        """Everything that is queued now becomes durable."""
        self.commit(self.queued_position)

    def check_alone(self) -> None:
        """Raise :class:`FencedError` when a copy of this writer has written to its log."""
        self._appender.check_alone()

    def fail(self, error: LanceWalError) -> None:
        """Stop for good: nothing is written any more, everybody who waits gets ``error``."""
        with self._lock:
            self._failure = self._failure or error
            if self._leader is None:
                self._wake_all()

    def _error(self) -> LanceWalError:
        if self._failure is None:
            return StorageError("a WAL waiter was woken without an outcome")
        return fresh_copy(self._failure)

    def _queue_end(self) -> tuple[int, int]:
        """Requires the lock. Position and bytes after the last queued row."""
        if self._queue:
            last = self._queue[-1]
            return last.end_position, last.end_bytes
        return self._durable_position, self._durable_bytes

    def _settle(self, waiter: Waiter, timeout: float | None) -> bool:
        """Lead or wait until the waiter may go on; ``False`` when time ran out."""
        check_process()
        left = False
        with waiter.present:
            try:
                try:
                    if not self._lead_or_wait(waiter, timeout):
                        return False
                    if self._leader is waiter:
                        self._lead(waiter)
                finally:
                    if waiter.queued or waiter.undecided or self._leader is waiter:
                        self._leave(waiter)
                    left = True
            finally:
                if not left:
                    self._leave(waiter)  # an interrupt cut the first one short
        if self._may_go(waiter):
            return True
        raise self._error()

    def _may_go(self, waiter: Waiter) -> bool:
        """Whether the waiter's rows are durable, or were refused."""
        if waiter.refusal is not None:
            return True
        return waiter.end_position is not None and waiter.end_position <= self._durable_position

    def _lead_or_wait(self, waiter: Waiter, timeout: float | None) -> bool:
        """Become the leader, or wait for the outcome or the lead; ``False`` when time ran out."""
        with self._lock:
            if self._failure is not None and not self._may_go(waiter):
                raise self._error()
            if waiter.offer is not None:
                self._offers.append(waiter)
                self._end_gathering()
            if self._take_lead(waiter):
                return True
            waiter.gate = gate = threading.Lock()
            gate.acquire()
            waiter.queued = True
            self._waiters.append(waiter)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LOOK_AGAIN_SECONDS if deadline is None else max(deadline - time.monotonic(), 0.0)
            if gate.acquire(timeout=min(left, LOOK_AGAIN_SECONDS)):
                return True
            with self._lock:
                # Where it was woken at the last moment, the outcome is there, or the lead is.
                # And who was to wake it may have been interrupted.
                if not waiter.queued or self._failure is not None or self._take_lead(waiter):
                    return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def _take_lead(self, waiter: Waiter) -> bool:
        """Requires the lock. ``False`` while another leads."""
        if self._leader is not None and self._leader.present.locked():
            return False
        self._leader = waiter
        return True

    def _leave(self, waiter: Waiter) -> None:
        """The waiter goes, however its wait ended: a lead that it has goes to the next one."""
        with self._lock:
            waiter.offer = None
            # First: an interrupt may have left the leader in line, and it would succeed itself.
            if waiter.queued and waiter in self._waiters:
                self._waiters.remove(waiter)
            if self._leader is waiter:
                succeed = self._failure is None and self._waiters
                self._leader = self._waiters[0] if succeed else None
            if self._waiters and self._waiters[0] is self._leader:
                self._wake_first()
            if self._leader is None and self._failure is not None:
                self._wake_all()

    def _lead(self, waiter: Waiter) -> None:
        try:
            while self._failure is None and not self._may_go(waiter):
                if self._in_flight is None:
                    self._gather()
                    self._take_in()
                if self._in_flight is not None or self._queue:
                    self._write_group()
                    self.on_progress()
                elif not self._may_go(waiter):
                    raise StorageError(f"nothing is queued up to batch {waiter.end_position}")
                if not self._may_go(waiter):
                    self._wake_served()
        except Exception as error:
            if not isinstance(error, LanceWalError):
                error = OutcomeUnknownError(f"the WAL write failed unexpectedly: {error!r}")
            error = without_frames(error)
            try:
                self._on_failure(error)
            finally:
                self._failure = self._failure or error
            logger.error(
                "the WAL cannot be written any more: %s",
                error,
                extra={"shard": str(self._appender.shard_id), "epoch": self._appender.epoch},
            )

    def _take_in(self) -> None:
        """Queue the rows of all puts that wait. Requires the lead."""
        while self._offers:
            waiter = self._offers[0]
            # Of a leader that was interrupted, the last rows may be queued without its saying so.
            if not self._is_last(waiter) and (offer := waiter.offer) is not None and waiter.present.locked():
                self._taken_in = waiter
                try:
                    offer()
                except Exception as error:
                    logger.debug("a put was refused", exc_info=True)
                    waiter.refusal = without_frames(error)
            if self._is_last(waiter):
                last = self._queue[-1]
                waiter.positions = range(last.end_position - len(last.batches), last.end_position)
                waiter.end_position = last.end_position
            elif waiter.undecided:
                waiter.refusal = StorageError("a put was taken in, but none of its rows was queued")
            waiter.offer = None
            self._offers.popleft()

    def _is_last(self, waiter: Waiter) -> bool:
        """Whether the rows of this waiter were the last to be queued."""
        return bool(self._queue) and self._queue[-1].owner is waiter

    def _wake_first(self) -> None:
        """Requires the lock."""
        first = self._waiters[0]
        first.wake()
        self._waiters.popleft()
        first.queued = False

    def _wake_served(self) -> None:
        """A leader that goes on lets those go whom its last entry has served."""
        with self._lock:
            while self._waiters and self._may_go(self._waiters[0]):
                self._wake_first()

    def _wake_all(self) -> None:
        """Requires the lock."""
        self._offers.clear()
        while self._waiters:
            self._wake_first()

    def _write_group(self) -> None:
        """Write what is in flight or next in the queue, of which there must be something."""
        started = time.perf_counter()
        group = self._in_flight
        if group is None:
            group = self._in_flight = self._next_group()
        io_started = time.perf_counter()
        wal_position = self._append(group)
        finished = time.perf_counter()
        for item in group.items:
            if item.home is not None:
                item.home.note_durable(item.end_position, wal_position)
        last = group.items[-1]
        with self._lock:
            self._durable_position = last.end_position
            self._durable_bytes = last.end_bytes
            while self._queue and self._queue[0].end_position <= last.end_position:
                self._queue.popleft()
            self._expected_puts = len(group.items) + len(self._queue) + len(self._offers)
            self._gather_seconds = GATHER_SHARE * (finished - io_started)
            self._in_flight = None
        self._stats.record_wal_flush(finished - started, len(group.data), len(group.items))
        self._stats.record_wal_io(finished - io_started)

    def _gather(self) -> None:
        """Wait a moment for the puts that came with the last group to come again.

        Without it two halves of the callers take turns with half-empty entries: one half
        is queued while the other has just been woken. A lone caller never waits.
        """
        with self._lock:
            if len(self._queue) + len(self._offers) >= self._expected_puts:
                return
            gathering = threading.Lock()
            gathering.acquire()
            self._gathering = gathering
        gathering.acquire(timeout=self._gather_seconds)
        self._gathering = None

    def _end_gathering(self) -> None:
        """Requires the lock. Another put has come: with the last one that was expected the wait ends."""
        gathering = self._gathering
        if gathering is not None and len(self._queue) + len(self._offers) >= self._expected_puts:
            self._gathering = None
            gathering.release()

    def _next_group(self) -> Group:
        """The longest run of queued puts that may share an entry."""
        items: list[Item] = []
        num_bytes = 0
        with self._lock:
            for item in self._queue:
                fits = num_bytes + item.num_bytes <= self._max_entry_bytes
                if items and (item.generation != items[0].generation or not fits):
                    break
                items.append(item)
                num_bytes += item.num_bytes
        batches = [batch for item in items for batch in item.batches]
        try:
            data = self._appender.encode(batches, generation=items[0].generation)
        except (pa.ArrowException, MemoryError) as error:
            raise StorageError(
                f"a WAL entry of {len(batches)} batches could not be encoded: {error}"
            ) from error
        return Group(items, data)

    def _append(self, group: Group) -> int:
        """The position of the group's entry, which is written now unless it was before."""
        appender = self._appender
        if group.tried_from is None:
            group.tried_from = appender.next_position_hint
        elif appender.next_position_hint > group.tried_from:
            # The leader that wrote it was interrupted before it could say so.
            return appender.next_position_hint - 1
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
                    extra={"shard": str(appender.shard_id), "epoch": appender.epoch},
                )
                self._sleep(RETRY_PAUSE_SECONDS * attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")
