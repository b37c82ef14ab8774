"""What the parts of one writer share: the latch that ends the writer, and its counters."""

from __future__ import annotations

import copy
import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import NamedTuple, TypeVar
from uuid import UUID

from lancewal.errors import ClosedError, FencedError, LanceWalError, OutcomeUnknownError, StorageError
from lancewal.storage import LATENCY_BOUNDS, Bell, check_process

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=BaseException)

#: How long the garbage collector waits for a thread of a writer that was dropped.
DROPPED_PATIENCE_SECONDS = 1.0


def close_after(
    error: BaseException | None, close: Callable[[], None], context: Mapping[str, object] | None = None
) -> None:
    """Close a writer at the end of its ``with`` block, which may have ended with ``error``.

    In that case an error of ``close`` is only logged, because it would hide the block's error.
    """
    try:
        close()
    except LanceWalError as close_error:
        if error is None:
            raise
        logger.warning("close failed after an error: %s", close_error, extra=context)


def fresh_copy(error: LanceWalError) -> LanceWalError:
    """A copy of a latched error, to be raised.

    Raising the object itself would mix the tracebacks of many threads, and would keep everything alive
    that their frames hold, including the dropped writer.
    """
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    return copied


def for_others(failure: LanceWalError) -> LanceWalError:
    """The error for a write that was not attempted after ``failure``: it certainly did not happen.

    This holds even if the outcome of the failed write itself is unknown.
    """
    if not isinstance(failure, OutcomeUnknownError):
        copied = fresh_copy(failure)
        if isinstance(copied, FencedError):
            copied.may_be_written = False
        return copied
    error = StorageError(f"the writer ended before: {failure}; open a new one")
    error.__cause__ = failure
    return error


def without_frames(error: E) -> E:
    """Remove the tracebacks of an error that is kept, or raised in another thread.

    Its frames would keep the rows of other puts alive.
    """
    seen: set[int] = set()
    each: BaseException | None = error
    # Causes may form a cycle.
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


class Ended(NamedTuple):
    """Which parts of a writer have ended, and why. Replaced as a whole, so an interrupt cannot split it."""

    #: Why puts are refused.
    failure: LanceWalError | None = None
    #: Why nothing more is written to the log.
    log_failure: LanceWalError | None = None
    #: Why nothing more is flushed.
    fence: FencedError | None = None
    #: Whether memory may hold rows that never reached the log.
    poisoned: bool = False


class WriterState:
    """Whether a writer is open, closed, or ended by a terminal error; the first error stays.

    This is the only latch of a writer: put, group commit, flush and backpressure all check it. They
    refer to this object instead of the writer. So the garbage collector can collect a writer that was
    dropped without ``close`` while its threads still wind down.
    """

    def __init__(self, shard_id: UUID, epoch: int, table: str = "") -> None:
        self.shard_id = shard_id
        self.epoch = epoch
        #: Extra fields of this writer's log records.
        self.context: dict[str, object] = {"shard": str(shard_id), "epoch": epoch}
        #: Attributes of this writer's spans.
        self.trace = {"lancewal.table": table, "lancewal.shard": str(shard_id)}
        self.closed = False
        self.ended = Ended()
        #: How often :meth:`note_change` was called.
        self.changes = 0
        self._lock = threading.Lock()
        self._changed = Bell()

    def fail(self, error: LanceWalError, *, memory_ahead_of_log: bool, ends_log: bool) -> None:
        """Latch ``error``: puts are refused from now on.

        With ``memory_ahead_of_log`` reads are refused too, because they would show lost rows. Without
        ``ends_log`` rows that are already queued may still be written.
        """
        with self._lock:
            was = self.ended
            self.ended = Ended(
                was.failure or error,
                was.log_failure or (error if ends_log else None),
                was.fence or (error if isinstance(error, FencedError) else None),
                was.poisoned or memory_ahead_of_log,
            )
        self.note_change()

    def close(self) -> None:
        """Refuse puts from now on; rows in memory may still be written."""
        self.closed = True
        self.note_change()

    def end_log(self) -> None:
        """End the log, because the writer is closed: nothing more is written."""
        with self._lock:
            closed = ClosedError(f"the writer of shard {self.shard_id} was closed")
            self.ended = self.ended._replace(log_failure=self.ended.log_failure or closed)
        self.note_change()

    def check_usable(self) -> None:
        """Raise the error that a put must fail with, if there is one."""
        check_process()
        failure = self.ended.failure
        if failure is not None:
            raise for_others(failure)
        if self.closed:
            raise self.latched()

    def check_readable(self) -> None:
        """Raise if memory may hold rows that never reached the log, or if the writer is closed."""
        check_process()
        if self.ended.poisoned:
            raise self.latched()
        if self.closed:
            raise ClosedError(f"the writer of shard {self.shard_id} is closed; read through Table.scan")

    def latched(self) -> LanceWalError:
        """A copy of the terminal error, to be raised."""
        if self.ended.failure is None:
            return ClosedError(f"the writer of shard {self.shard_id} is closed; open a new one")
        return fresh_copy(self.ended.failure)

    def patience(self) -> float | None:
        """How many seconds to wait for a background thread to end; ``None``: until it has ended.

        The garbage collector stops a writer that was dropped. It runs in any thread and under any
        lock, even a lock that the background thread needs to make progress, so the wait is short. At
        exit all threads must have ended, because the interpreter goes away.
        """
        if self.closed or not threading.main_thread().is_alive():
            return None
        return DROPPED_PATIENCE_SECONDS

    def note_change(self) -> None:
        """Wake puts that wait for room, because rows were stored or flushed, or the writer ended."""
        self.changes += 1
        self._changed.ring()

    def wait_for_change(self, seen: int, timeout: float) -> bool:
        """Return once ``changes`` differs from ``seen``; ``False`` after ``timeout`` seconds."""
        return self._changed.wait_for(lambda: self.changes != seen, timeout)


@dataclass(frozen=True)
class WriteStatsSnapshot:
    """The counters at one moment; times are totals."""

    put_count: int = 0
    put_rows: int = 0
    put_time: timedelta = timedelta(0)
    wal_flush_count: int = 0
    wal_flush_time: timedelta = timedelta(0)
    wal_flush_bytes: int = 0
    wal_flush_puts: int = 0
    wal_io_time: timedelta = timedelta(0)
    wal_io_count: int = 0
    index_update_time: timedelta = timedelta(0)
    index_update_count: int = 0
    index_update_rows: int = 0
    memtable_flush_count: int = 0
    memtable_flush_time: timedelta = timedelta(0)
    memtable_flush_rows: int = 0
    memtable_flush_failures: int = 0
    backpressure_count: int = 0
    backpressure_wait: timedelta = timedelta(0)
    slowdown_count: int = 0
    slowdown_wait: timedelta = timedelta(0)
    stop_count: int = 0
    stop_wait: timedelta = timedelta(0)
    stop_refusals: int = 0
    replayed_entries: int = 0
    replayed_rows: int = 0
    replay_time: timedelta = timedelta(0)
    #: A histogram of put latencies: one count for each of LATENCY_BOUNDS, and a last one for longer puts.
    put_latencies: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS) + 1)

    def avg_put_latency(self) -> timedelta | None:
        return self.put_time / self.put_count if self.put_count else None

    def put_throughput(self) -> float:
        """Puts per second of time spent in puts."""
        return _per_second(self.put_count, self.put_time)

    def avg_wal_flush_latency(self) -> timedelta | None:
        return self.wal_flush_time / self.wal_flush_count if self.wal_flush_count else None

    def avg_wal_flush_bytes(self) -> int | None:
        return self.wal_flush_bytes // self.wal_flush_count if self.wal_flush_count else None

    def avg_group_size(self) -> float | None:
        """The average number of puts that shared one WAL entry."""
        return self.wal_flush_puts / self.wal_flush_count if self.wal_flush_count else None

    def wal_throughput_bytes(self) -> float:
        """WAL bytes per second of time spent flushing."""
        return _per_second(self.wal_flush_bytes, self.wal_flush_time)

    def avg_wal_io_latency(self) -> timedelta | None:
        return self.wal_io_time / self.wal_io_count if self.wal_io_count else None

    def avg_index_update_latency(self) -> timedelta | None:
        return self.index_update_time / self.index_update_count if self.index_update_count else None

    def avg_index_update_rows(self) -> int | None:
        return self.index_update_rows // self.index_update_count if self.index_update_count else None

    def avg_memtable_flush_latency(self) -> timedelta | None:
        return self.memtable_flush_time / self.memtable_flush_count if self.memtable_flush_count else None

    def avg_memtable_flush_rows(self) -> int | None:
        return self.memtable_flush_rows // self.memtable_flush_count if self.memtable_flush_count else None

    def log_summary(self, prefix: str) -> None:
        """Log one line with the totals."""
        logger.info(
            "%s: %d puts (%.0f/s, avg %s), %d WAL flushes (%d bytes, avg %s), "
            "%d MemTable flushes (%d rows, avg %s), backpressure %d times for %s",
            prefix,
            self.put_count,
            self.put_throughput(),
            self.avg_put_latency(),
            self.wal_flush_count,
            self.wal_flush_bytes,
            self.avg_wal_flush_latency(),
            self.memtable_flush_count,
            self.memtable_flush_rows,
            self.avg_memtable_flush_latency(),
            self.backpressure_count,
            self.backpressure_wait,
            extra={"stats": self},
        )

    def log_wal_breakdown(self, prefix: str) -> None:
        """Log one line with the average WAL flush, I/O and index times; nothing before the first flush."""
        if self.wal_flush_count:
            logger.info(
                "%s: WAL flush avg %s, of which I/O %s; index update avg %s over %d rows",
                prefix,
                self.avg_wal_flush_latency(),
                self.avg_wal_io_latency(),
                self.avg_index_update_latency(),
                self.index_update_rows,
                extra={"stats": self},
            )


_COUNTERS = tuple(field.name for field in fields(WriteStatsSnapshot) if field.name != "put_latencies")


class WriteStats:
    """Thread-safe counters; :meth:`snapshot` is consistent. Seconds in, ``timedelta`` out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._put_latencies: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Reset all counters to zero."""
        with self._lock:
            self._values = dict.fromkeys(_COUNTERS, 0)
            self._put_latencies = [0] * (len(LATENCY_BOUNDS) + 1)

    def snapshot(self) -> WriteStatsSnapshot:
        with self._lock:
            values = dict(self._values)
            put_latencies = tuple(self._put_latencies)
        return WriteStatsSnapshot(
            put_latencies=put_latencies,
            **{  # type: ignore[arg-type]
                name: timedelta(seconds=value) if name.endswith(("_time", "_wait")) else int(value)
                for name, value in values.items()
            },
        )

    def add(self, **amounts: float) -> None:
        """Raise the counters named as the fields of a snapshot; times in seconds."""
        put_time = amounts.get("put_time")
        with self._lock:
            if put_time is not None:
                self._put_latencies[bisect_left(LATENCY_BOUNDS, put_time)] += 1
            values = self._values
            for name, amount in amounts.items():
                values[name] += amount


def added(one: WriteStatsSnapshot | None, other: WriteStatsSnapshot) -> WriteStatsSnapshot:
    """Add two snapshots up.

    >>> added(WriteStatsSnapshot(put_count=2), WriteStatsSnapshot(put_count=3)).put_count
    5
    """
    if one is None:
        return other
    return WriteStatsSnapshot(
        put_latencies=tuple(map(sum, zip(one.put_latencies, other.put_latencies, strict=True))),
        **{name: getattr(one, name) + getattr(other, name) for name in _COUNTERS},
    )


def _per_second(amount: float, time: timedelta) -> float:
    seconds = time.total_seconds()
    return amount / seconds if seconds > 0 else 0.0
