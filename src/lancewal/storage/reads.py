"""How long reads of this process took, as histograms for metrics, each with a span for tracing."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from lancewal.storage.forks import in_forked_child
from lancewal.storage.tracing import NoSpan, Span, span, trace_runner

T = TypeVar("T")

#: Bounds of the histograms of puts and reads, in seconds: from memory alone to a far store.
LATENCY_BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


class Latencies(NamedTuple):
    """How many calls took up to each of :data:`LATENCY_BOUNDS`, or longer, and how long all of them took."""

    counts: tuple[int, ...]
    seconds: float


class ReadTimes:
    """The latencies of all reads, by table and operation. Thread-safe; they only grow."""

    def __init__(self) -> None:
        self._start_empty()
        in_forked_child(self._start_empty)

    def _start_empty(self) -> None:
        """Also called in a forked child: it has read nothing, and another thread may have held the lock."""
        # One that its holder may take again: the garbage collector may end an abandoned scan at any point.
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
        """By table and operation.

        >>> times = ReadTimes()
        >>> times.add("memory://table", "lookup", 0.0003)
        >>> times.taken()["memory://table", "lookup"].counts[:4]
        (0, 0, 1, 0)
        """
        with self._lock:
            return {key: Latencies(tuple(counts), self._seconds[key]) for key, counts in self._counts.items()}

    @contextmanager
    def timed(self, table: str, operation: str, before: float = 0.0) -> Iterator[Span | NoSpan]:
        """One read that is answered at once; ``before`` is what it took so far. Failed ones don't count."""
        began = time.perf_counter()
        with span(f"lancewal.{operation}", table=table) as current:
            yield current
        self.add(table, operation, before + time.perf_counter() - began)

    def streamed(self, table: str, operation: str, items: Iterator[T], before: float = 0.0) -> Iterator[T]:
        """The items of a read that is answered bit by bit; the time of whoever takes them does not count.

        The read belongs to the trace in which this is called, whoever takes the items.
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
                    self.add(table, operation, seconds)  # whoever took the items had enough of them
                raise
            run(current.__exit__, None, None, None)
            self.add(table, operation, seconds)

        return steps()


#: Those of all tables.
read_times = ReadTimes()
