"""The memory budget of this process, and the share of it for rows that are not flushed yet.

Each writer has its own limit. Many writers in one process may all reach their limits at the same time, so
their MemTables also share a part of the process's budget. When that part is nearly full, the largest MemTable
is flushed. When it is full, puts wait.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from lancewal.errors import InvalidInputError
from lancewal.storage.forks import in_forked_child

MEMORY_VARIABLE = "LANCEWAL_MEMORY_BYTES"
#: The share of the machine's memory that the process gets, unless the environment sets the bytes.
_OF_THE_MACHINE = 0.5
#: The share for rows that are not flushed yet. The rest is for caches, compaction, and puts in progress.
_ROWS_SHARE = 0.5
#: The share of the limit from which on the largest MemTable is flushed.
_NEARLY_FULL = 0.75
#: For so many seconds a running flush counts as room to come. If its storage does not answer, it may take for
#: ever, so other MemTables are flushed after that time.
PATIENCE = 10.0


def memory_bytes() -> int:
    """How much memory this process may use: ``LANCEWAL_MEMORY_BYTES``, by default half of the machine's."""
    text = os.environ.get(MEMORY_VARIABLE)
    if text is None:
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _OF_THE_MACHINE)
    if not text.isdecimal() or not int(text):
        raise InvalidInputError(f"{MEMORY_VARIABLE} must be a number of bytes, not {text!r}")
    return int(text)


class Holder(Protocol):
    """A holder of rows that are not flushed yet."""

    @property
    def active_bytes(self) -> int:
        """The bytes that a new flush would free."""

    @property
    def is_over(self) -> bool:
        """Whether it will never flush again."""

    def flush_soon(self) -> None:
        """Start that flush in another thread; takes no lock that is held while rows are inserted."""


class RowMemory:
    """The unflushed rows of all writers of a process. The process has one; tests make others."""

    def __init__(self, limit: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._start_empty()
        in_forked_child(self._start_empty)

    def _start_empty(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Holder, int] = {}
        self._total = 0
        #: The holders whose flush is running, and since when.
        self._chosen: dict[Holder, float] = {}
        # The garbage collector may end a holder at any time, also while this thread holds the lock.
        self._released: deque[Holder] = deque()

    @property
    def limit(self) -> int:
        if self._limit is None:
            self._limit = int(memory_bytes() * _ROWS_SHARE)
        return self._limit

    @property
    def total(self) -> int:
        """Bytes of rows and their indexes, as each holder last reported them."""
        with self._lock:
            self._settle()
            return self._total

    @property
    def is_full(self) -> bool:
        return self._total >= self.limit and self.total >= self.limit

    def hold(self, holder: Holder, num_bytes: int) -> None:
        """Record that ``holder`` has ``num_bytes`` now; flushes the largest from 3/4 of the limit on."""
        with self._lock:
            self._total += num_bytes - self._held.get(holder, 0)
            self._held[holder] = num_bytes
            nearly_full = self._total >= self.limit * _NEARLY_FULL
        if nearly_full:
            self.relieve()

    def flushed(self, holder: Holder, num_bytes: int) -> None:
        """Record that ``holder`` has flushed and has ``num_bytes`` left; starts another flush if needed."""
        with self._lock:
            self._chosen.pop(holder, None)
        self.hold(holder, num_bytes)

    def relieve(self) -> None:
        """Make sure that enough is being flushed, the largest holder first."""
        with self._lock:
            self._released.extend([each for each in self._held if each.is_over])
            self._settle()
            largest = self._largest()
        if largest is not None:
            largest.flush_soon()

    def release(self, holder: Holder) -> None:
        """Record that ``holder`` is closed. Takes no lock, because the garbage collector may call it."""
        self._released.append(holder)

    def _settle(self) -> None:
        while self._released:
            holder = self._released.popleft()
            self._total -= self._held.pop(holder, 0)
            self._chosen.pop(holder, None)

    def _largest(self) -> Holder | None:
        """The next holder to flush, or ``None`` if running flushes make enough room. Requires the lock."""
        now = self._clock()
        coming = sum(
            self._held.get(each, 0) for each, since in self._chosen.items() if now - since < PATIENCE
        )
        if self._total - coming < self.limit * _NEARLY_FULL:
            return None
        others = [each for each in self._held if each not in self._chosen]
        largest = max(others, key=lambda each: each.active_bytes, default=None)
        if largest is None or not largest.active_bytes:
            return None
        self._chosen[largest] = now
        return largest


#: The row memory of this process.
row_memory = RowMemory()
