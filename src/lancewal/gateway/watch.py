"""The data of a gateway's page for operators: the durations of calls, and the recent history of its tables.

A :class:`Watch` reads the status of every table from time to time and keeps the last results, so that the
page can show a history. Each look costs as much as ``Table.status``, a few requests to the storage. Measuring
a call costs only two readings of a clock.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from lancewal.errors import LanceWalError
from lancewal.status import TableStatus
from lancewal.storage import Worker
from lancewal.table import Table

#: Seconds between two looks, and how many looks are kept: one hour.
EVERY = 15.0
_KEPT = 240
#: How many pieces of upkeep work are kept.
_KEPT_WORKS = 50
#: How many calls of a kind are kept between two looks; the oldest are dropped first.
_REMEMBERED = 50_000


class CallTimes:
    """The durations of calls since the last look, by table and kind. Thread-safe.

    >>> times = CallTimes()
    >>> times.add("events", "put", 0.25)
    >>> {key: seconds.tolist() for key, seconds in times.since_last_look().items()}
    {('events', 'put'): [0.25]}
    >>> times.since_last_look()
    {}
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, table: str, kind: str, seconds: float) -> None:
        with self._lock:
            found = self._seconds[table, kind]
            if len(found) >= _REMEMBERED:
                del found[: _REMEMBERED // 2]
            found.append(seconds)

    def timed(self, table: str, kind: str) -> _Timed:
        """Measure the body of a ``with``, even if it fails."""
        return _Timed(self, table, kind)

    def since_last_look(self) -> dict[tuple[str, str], np.ndarray[Any, Any]]:
        """All durations since the last call, in seconds."""
        with self._lock:
            found, self._seconds = self._seconds, defaultdict(list)
        return {key: np.array(seconds) for key, seconds in found.items()}


class _Timed:
    """The context manager of ``timed``; a class, because a generator would be several times as slow."""

    __slots__ = ("_began", "_kind", "_table", "_times")

    def __init__(self, times: CallTimes, table: str, kind: str) -> None:
        self._times = times
        self._table = table
        self._kind = kind

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._times.add(self._table, self._kind, time.perf_counter() - self._began)


class Watch:
    """Looks at tables periodically until it is closed. Thread-safe."""

    def __init__(self, tables: Mapping[str, Table], times: CallTimes, every: float = EVERY) -> None:
        self._times = times
        self._every = every
        self._tables = {name: _Watched(table) for name, table in tables.items()}
        self._worker = Worker("lancewal-watch", self._look)
        self._worker.kick()

    def document(self) -> dict[str, Any]:
        """The page's data; ``status`` is ``None`` until the first look has ended."""
        return {
            "now": datetime.now(UTC).isoformat(),
            "every_seconds": self._every,
            "tables": {name: watched.document() for name, watched in self._tables.items()},
        }

    def close(self) -> None:
        """Stop; waits for the current look."""
        self._worker.stop()

    def _look(self) -> float:
        times = self._times.since_last_look()
        for name, watched in self._tables.items():
            if self._worker.stopping:
                break
            watched.look({kind: each for (table, kind), each in times.items() if table == name}, self._every)
        return self._every


class _Watched:
    """One table: its last status, and its recent history."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._status: TableStatus | None = None
        self._error: str | None = None
        self._looks: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        #: Finished upkeep work of all processes, by kind and time.
        self._upkeep: dict[tuple[str, datetime], dict[str, Any]] = {}

    def look(self, times: Mapping[str, np.ndarray[Any, Any]], every: float) -> None:
        error, status = None, None
        try:
            status = self._table.status()
        except LanceWalError as failed:
            error = f"{type(failed).__name__}: {failed}"
        with self._lock:
            self._error = error
            self._status = status or self._status
            if status is not None:
                calls = {kind: _latency(seconds, every) for kind, seconds in times.items()}
                self._looks.append({**_levels(status), "calls": calls})
                self._upkeep |= {
                    (each.work, each.at): each.to_dict() for each in status.duties if not each.under_way
                }
                for oldest in sorted(self._upkeep, key=lambda key: key[1])[:-_KEPT_WORKS]:
                    del self._upkeep[oldest]

    def document(self) -> dict[str, Any]:
        with self._lock:
            status = None if self._status is None else self._status.to_dict()
            newest_first = sorted(self._upkeep.items(), key=lambda item: item[0][1], reverse=True)
            return {
                "uri": self._table.uri,
                "error": self._error,
                "status": status,
                "looks": [*self._looks],
                "upkeep": [each for _, each in newest_first],
            }


def _levels(status: TableStatus) -> dict[str, Any]:
    """The figures of one look that the page plots over time."""
    return {
        "at": status.taken_at.isoformat(),
        "unflushed_entries": status.unflushed.count,
        "unflushed_bytes": status.unflushed.num_bytes,
        "uncompacted_sstables": status.uncompacted.count,
        "sstables_of_a_shard": max((shard.uncompacted.count for shard in status.shards), default=0),
        "base_rows": status.base_rows,
        "index_rows_behind": max((index.rows_behind for index in status.indexes), default=0),
    }


def _latency(seconds: np.ndarray[Any, Any], every: float) -> dict[str, float]:
    """
    >>> _latency(np.array([0.001, 0.002, 0.003]), 15.0)
    {'per_second': 0.2, 'p50_ms': 2.0, 'p99_ms': 2.98}
    """
    half, most = np.percentile(seconds, (50, 99)) * 1000
    return {
        "per_second": round(len(seconds) / every, 3),
        "p50_ms": round(float(half), 3),
        "p99_ms": round(float(most), 3),
    }
