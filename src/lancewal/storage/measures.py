"""Measures what this process does, for metrics and tracing: how long reads take, and what maintenance did."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

from lancewal.storage.forks import in_forked_child
from lancewal.storage.tracing import NoSpan, Span, span, trace_runner

T = TypeVar("T")

#: Bounds of the histograms of puts and reads, in seconds: from reads of memory to distant stores.
LATENCY_BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


class Latencies(NamedTuple):
    """A histogram with :data:`LATENCY_BOUNDS` and a last count for longer calls; the sum of ``seconds``."""

    counts: tuple[int, ...]
    seconds: float


class ReadTimes:
    """The latencies of all reads, by table and operation. Thread-safe; they only grow."""

    def __init__(self) -> None:
        self._start_empty()
        in_forked_child(self._start_empty)

    def _start_empty(self) -> None:
        """Reset. Also called in a forked child: another thread may have held the lock at the fork."""
        # Reentrant: the garbage collector may end an abandoned scan while this thread holds the lock.
        self._lock = threading.RLock()
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._seconds: dict[tuple[str, str], float] = {}

    def add(self, table: str, operation: str, seconds: float) -> None:
        key = (table, operation)
        with self._lock:
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = [0] * (len(LATENCY_BOUNDS) + 1)
                self._seconds[key] = 0.0
            counts[bisect_left(LATENCY_BOUNDS, seconds)] += 1
            self._seconds[key] += seconds

    def taken(self) -> dict[tuple[str, str], Latencies]:
        """The latencies so far, by table and operation.

        >>> times = ReadTimes()
        >>> times.add("memory://table", "lookup", 0.0003)
        >>> times.taken()["memory://table", "lookup"].counts[:4]
        (0, 0, 1, 0)
        """
        with self._lock:
            return {key: Latencies(tuple(counts), self._seconds[key]) for key, counts in self._counts.items()}

    @contextmanager
    def timed(self, table: str, operation: str, before: float = 0.0) -> Iterator[Span | NoSpan]:
        """Measure a read that returns one result; ``before`` is time already spent. Failures don't count."""
        began = time.perf_counter()
        with span(f"lancewal.{operation}", table=table) as current:
            yield current
        self.add(table, operation, before + time.perf_counter() - began)

    def streamed(self, table: str, operation: str, items: Iterator[T], before: float = 0.0) -> Iterator[T]:
        """Measure a read that yields its items one by one; the consumer's own time does not count.

        The read belongs to the trace in which this is called, even if another thread consumes the items.
        """
        current, run = span(f"lancewal.{operation}", table=table), trace_runner()

        def steps() -> Iterator[T]:
            seconds = before
            run(current.__enter__)
            try:
                while True:
                    began = time.perf_counter()
                    item = run(next, items, None)
                    seconds += time.perf_counter() - began
                    if item is None:
                        break
                    yield item
            except BaseException as error:
                run(current.__exit__, type(error), error, None)
                if isinstance(error, GeneratorExit):
                    self.add(table, operation, seconds)  # the consumer stopped early, which is no failure
                raise
            run(current.__exit__, None, None, None)
            self.add(table, operation, seconds)

        return steps()


#: The read times of this process, for all tables.
read_times = ReadTimes()


class Report(Protocol):
    """The result of some maintenance."""

    def totals(self) -> Mapping[str, float]:
        """What the work adds to the totals of its table, by name."""


R = TypeVar("R", bound=Report)


class Totals:
    """Counters of what this process did to its tables. They only grow, and metrics read them."""

    def __init__(self) -> None:
        self._start_empty()
        in_forked_child(self._start_empty)

    def _start_empty(self) -> None:
        """Also called in a forked child: it has done nothing yet, and its copy of the lock may be held."""
        self._lock = threading.Lock()
        self._by_table: dict[str, Counter[str]] = {}

    def add(self, table_uri: str, amounts: Mapping[str, float]) -> None:
        with self._lock:
            counter = self._by_table.setdefault(table_uri, Counter())
            for name, amount in amounts.items():
                counter[name] += amount  # type: ignore[assignment]

    def counted(self, table_uri: str, kind: str, work: Callable[[], R]) -> R:
        """Do the work and add its totals, or count a failure."""
        try:
            with span(f"lancewal.{kind}", table=table_uri):
                report = work()
        except BaseException:
            self.add(table_uri, {f"{kind}_failures": 1})
            raise
        self.add(table_uri, report.totals())
        return report

    def by_table(self) -> dict[str, dict[str, float]]:
        """All totals by table and name.

        >>> totals = Totals()
        >>> totals.add("memory://table", {"compactions": 1, "compaction_seconds": 0.5})
        >>> totals.add("memory://table", {"compactions": 1})
        >>> totals.by_table()
        {'memory://table': {'compactions': 2, 'compaction_seconds': 0.5}}
        """
        with self._lock:
            return {table: dict(counter) for table, counter in self._by_table.items()}


#: The maintenance of this process, for all tables.
process_totals = Totals()
