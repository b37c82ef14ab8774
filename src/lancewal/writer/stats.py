"""What a writer did and how long it took: counters, snapshots, log lines."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, fields
from datetime import timedelta
from uuid import UUID

logger = logging.getLogger(__name__)


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
    replayed_entries: int = 0
    replayed_rows: int = 0
    replay_time: timedelta = timedelta(0)

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
        """Puts that shared one WAL entry, on average."""
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
        """One line with the totals."""
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
        """One line that splits a WAL flush into storage and index time; silent before the first."""
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


class WriteStats:
    """Thread-safe counters; :meth:`snapshot` is consistent. Seconds in, ``timedelta`` out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self.reset()

    def reset(self) -> None:
        """Back to zero."""
        with self._lock:
            self._values = dict.fromkeys((field.name for field in fields(WriteStatsSnapshot)), 0)

    def snapshot(self) -> WriteStatsSnapshot:
        with self._lock:
            values = dict(self._values)
        return WriteStatsSnapshot(
            **{  # type: ignore[arg-type]
                name: timedelta(seconds=value) if name.endswith(("_time", "_wait")) else int(value)
                for name, value in values.items()
            }
        )

    def record_put(self, seconds: float, rows: int = 0) -> None:
        with self._lock:
            values = self._values
            values["put_count"] += 1
            values["put_rows"] += rows
            values["put_time"] += seconds

    def record_wal_flush(self, seconds: float, wal_bytes: int, puts: int = 1) -> None:
        with self._lock:
            values = self._values
            values["wal_flush_count"] += 1
            values["wal_flush_time"] += seconds
            values["wal_flush_bytes"] += wal_bytes
            values["wal_flush_puts"] += puts

    def record_wal_io(self, seconds: float) -> None:
        with self._lock:
            self._values["wal_io_count"] += 1
            self._values["wal_io_time"] += seconds

    def record_index_update(self, seconds: float, rows: int) -> None:
        with self._lock:
            values = self._values
            values["index_update_count"] += 1
            values["index_update_time"] += seconds
            values["index_update_rows"] += rows

    def record_memtable_flush(self, seconds: float, rows: int) -> None:
        with self._lock:
            values = self._values
            values["memtable_flush_count"] += 1
            values["memtable_flush_time"] += seconds
            values["memtable_flush_rows"] += rows

    def record_memtable_flush_failure(self) -> None:
        with self._lock:
            self._values["memtable_flush_failures"] += 1

    def record_backpressure(self, seconds: float) -> None:
        with self._lock:
            self._values["backpressure_count"] += 1
            self._values["backpressure_wait"] += seconds

    def record_replay(self, seconds: float, entries: int, rows: int) -> None:
        with self._lock:
            values = self._values
            values["replayed_entries"] += entries
            values["replayed_rows"] += rows
            values["replay_time"] += seconds


class StatsLogger:
    """Logs the statistics with the first put after every interval; an idle writer stays silent."""

    def __init__(self, stats: WriteStats, interval: timedelta | None, shard_id: UUID) -> None:
        self._stats = stats
        self._interval = interval.total_seconds() if interval is not None else None
        self._prefix = f"shard {shard_id}"
        self._next = time.monotonic() + (self._interval or 0.0)

    def maybe_log(self) -> None:
        if self._interval is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._interval
        snapshot = self._stats.snapshot()
        snapshot.log_summary(self._prefix)
        snapshot.log_wal_breakdown(self._prefix)


def added(one: WriteStatsSnapshot | None, other: WriteStatsSnapshot) -> WriteStatsSnapshot:
    """Two snapshots as one.

    >>> added(WriteStatsSnapshot(put_count=2), WriteStatsSnapshot(put_count=3)).put_count
    5
    """
    if one is None:
        return other
    return WriteStatsSnapshot(
        **{each.name: getattr(one, each.name) + getattr(other, each.name) for each in fields(one)}
    )


def _per_second(amount: float, time: timedelta) -> float:
    seconds = time.total_seconds()
    return amount / seconds if seconds > 0 else 0.0
