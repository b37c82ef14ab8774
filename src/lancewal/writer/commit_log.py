"""Group commit: threads that wait for durability share one WAL entry.

Whoever waits first becomes the leader. It takes all rows that are queued, writes them
as one entry, and wakes those whose rows were in it; if others queued up meanwhile, it
passes the lead to the first of them. No thread stands between a put and the store, so
a lone writer pays one round trip and nothing else.

Guarantees: entries are written in queue order and never overlap. One put is one queue
item and never split. An entry holds rows of one generation. After a write that failed
for good nothing is written any more and every waiter, now and later, gets the error.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from lancewal.errors import FencedError, LanceWalError, StorageError
from lancewal.wal.appender import WalAppender
from lancewal.writer.stats import WriteStats

logger = logging.getLogger(__name__)

#: Tries to write one entry before the writer gives up for good. The store itself
#: retries passing faults; these cover a longer outage.
WRITE_ATTEMPTS = 3
RETRY_PAUSE_SECONDS = 0.2
#: A leader waits for company no longer than this share of what the last write took.
GATHER_SHARE = 0.5


class DurableRows(Protocol):
    """Where the rows of a queue item live, to be told when they are durable."""

    def note_durable(self, end_position: int, wal_position: int) -> None: ...


@dataclass(slots=True)
class _Item:
    batches: Sequence[pa.RecordBatch]
    end_position: int
    num_bytes: int
    generation: int | None
    home: DurableRows | None


@dataclass(slots=True)
class _Group:
    items: list[_Item]
    data: memoryview


@dataclass(slots=True, eq=False)
class _Waiter:
    end_position: int
    leads: bool = False
    # Held by the waiter; released by whoever wakes it. A bare lock is several times
    # cheaper than a Condition, which matters with many threads per entry.
    gate: threading.Lock = field(default_factory=threading.Lock)


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
        self._lock = threading.Lock()
        self._queue: deque[_Item] = deque()
        self._waiters: deque[_Waiter] = deque()
        # Encoded and perhaps stored already: the next leader writes these very bytes
        # again, so that the store can recognise them as its own.
        self._in_flight: _Group | None = None
        self._leading = False
        self._expected_puts = 0
        self._gather_seconds = 0.0
        self._gather_target = 0
        self._gathered = threading.Lock()
        self._gathered.acquire()
        self._failure: LanceWalError | None = None
        self._pending_bytes = 0
        self._durable_position = 0
        self._queued_position = 0

    @property
    def durable_position(self) -> int:
        """Batches below this position are in the WAL."""
        return self._durable_position

    @property
    def queued_position(self) -> int:
        return self._queued_position

    @property
    def pending_bytes(self) -> int:
        return self._pending_bytes

    @property
    def pending_batches(self) -> int:
        return self._queued_position - self._durable_position

    @property
    def failure(self) -> LanceWalError | None:
        return self._failure

    def start_at(self, position: int) -> None:
        """Count from ``position``: batches below it came from the WAL itself."""
        self._durable_position = self._queued_position = position

    def enqueue(
        self,
        batches: Sequence[pa.RecordBatch],
        num_bytes: int,
        generation: int | None = None,
        home: DurableRows | None = None,
    ) -> range:
        """Queue the rows of one put; returns their batch positions.

        Callers serialise: positions are given in call order.
        """
        with self._lock:
            start = self._queued_position
            end = start + len(batches)
            self._queue.append(_Item(batches, end, num_bytes, generation, home))
            self._queued_position = end
            self._pending_bytes += num_bytes
            if self._gather_target and len(self._queue) >= self._gather_target:
                self._gather_target = 0
                self._gathered.release()
        return range(start, end)

    def commit(self, end_position: int, timeout: float | None = None) -> bool:
        """Return once batches below ``end_position`` are durable; ``False`` when time ran out.

        Raises the latched error when they never will be.
        """
        waiter = self._register(end_position)
        if waiter is None:
            return True
        if not waiter.leads and not self._await(waiter, timeout):
            return False
        if waiter.leads:
            self._lead(waiter)
        if self._durable_position >= end_position:
            return True
        raise self._error()

    def commit_all(self) -> None:
        """Everything that is queued now becomes durable."""
        self.commit(self._queued_position)

    def fail(self, error: LanceWalError) -> None:
        """Stop for good: nothing is written any more, everybody who waits gets ``error``."""
        with self._lock:
            self._failure = self._failure or error
            if not self._leading:
                self._wake_all()

    def _error(self) -> LanceWalError:
        """A copy of the latched error: one object raised in many threads mixes their tracebacks."""
        if self._failure is None:
            return StorageError("a WAL waiter was woken without an outcome")
        error = copy.copy(self._failure)
        error.__cause__ = self._failure.__cause__
        return error

    def _register(self, end_position: int) -> _Waiter | None:
        with self._lock:
            if self._durable_position >= end_position:
                return None
            if self._failure is not None:
                raise self._error()
            waiter = _Waiter(end_position)
            if self._leading:
                waiter.gate.acquire()
                self._waiters.append(waiter)
            else:
                self._leading = waiter.leads = True
        return waiter

    def _await(self, waiter: _Waiter, timeout: float | None) -> bool:
        try:
            if waiter.gate.acquire(timeout=-1 if timeout is None else max(timeout, 0)):
                return True
        except BaseException:
            self._leave(waiter)
            raise
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                return False
        return True  # woken at the last moment: the outcome is there, or the lead is

    def _leave(self, waiter: _Waiter) -> None:
        """An interrupt took the waiter's thread away: a lead it was just given goes on."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif waiter.leads:
                self._pass_lead()

    def _lead(self, waiter: _Waiter) -> None:
        try:
            while self._durable_position < waiter.end_position and self._failure is None:
                self._write_group()
        except Exception as error:
            if not isinstance(error, LanceWalError):
                error = StorageError(f"the WAL write failed unexpectedly: {error!r}")
            self._failure = self._failure or error
            logger.error(
                "the WAL cannot be written any more: %s",
                error,
                extra={"shard": str(self._appender.shard_id), "epoch": self._appender.epoch},
            )
            self._on_failure(self._failure)
        finally:
            with self._lock:
                if self._failure is not None:
                    self._leading = False
                    self._wake_all()
                else:
                    self._pass_lead()

    def _pass_lead(self) -> None:
        """Requires the lock. The first waiter leads from here; without one nobody does."""
        self._leading = bool(self._waiters)
        if self._waiters:
            successor = self._waiters.popleft()
            successor.leads = True
            successor.gate.release()

    def _wake_all(self) -> None:
        while self._waiters:
            self._waiters.popleft().gate.release()

    def _write_group(self) -> None:
        started = time.perf_counter()
        group = self._in_flight
        if group is None:
            self._gather()
            group = self._in_flight = self._next_group()
        io_started = time.perf_counter()
        wal_position = self._append(group.data)
        finished = time.perf_counter()
        for item in group.items:
            if item.home is not None:
                item.home.note_durable(item.end_position, wal_position)
        with self._lock:
            self._in_flight = None
            for item in group.items:
                self._queue.popleft()
                self._pending_bytes -= item.num_bytes
            self._durable_position = group.items[-1].end_position
            self._expected_puts = len(group.items) + len(self._queue)
            self._gather_seconds = GATHER_SHARE * (finished - io_started)
            while self._waiters and self._waiters[0].end_position <= self._durable_position:
                self._waiters.popleft().gate.release()
        self._stats.record_wal_flush(finished - started, len(group.data), len(group.items))
        self._stats.record_wal_io(finished - io_started)

    def _gather(self) -> None:
        """Wait a moment for the puts that came with the last group to come again.

        Without it two halves of the callers take turns with half-empty entries: one half
        is queued while the other has just been woken. A lone caller never waits.
        """
        with self._lock:
            if len(self._queue) >= self._expected_puts:
                return
            self._gather_target = self._expected_puts
        if not self._gathered.acquire(timeout=self._gather_seconds):
            with self._lock:
                if not self._gather_target:
                    self._gathered.acquire()  # released at the last moment: take it back
                self._gather_target = 0

    def _next_group(self) -> _Group:
        """The longest run of queued puts that may share an entry."""
        items: list[_Item] = []
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
        return _Group(items, data)

    def _append(self, data: memoryview) -> int:
        for attempt in range(1, WRITE_ATTEMPTS + 1):
            try:
                return self._appender.append_encoded(data)
            except FencedError:
                raise
            except StorageError as error:
                if attempt == WRITE_ATTEMPTS:
                    raise
                logger.warning(
                    "WAL write failed, trying again (%d of %d): %s",
                    attempt,
                    WRITE_ATTEMPTS,
                    error,
                    extra={"shard": str(self._appender.shard_id), "epoch": self._appender.epoch},
                )
                self._sleep(RETRY_PAUSE_SECONDS * attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")
