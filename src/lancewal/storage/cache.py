"""What this process keeps of tables in memory: one budget for all of it.

Everything that could be read or computed again and is kept because that is slow lies on a
:class:`Shelf`. All shelves share :func:`cache_bytes`; what was not used for longest goes first,
whichever shelf it lies on. What a reader cannot let go of at any moment (the rows of a log's
tail, while a read is under way) takes a :class:`Lease` of the same budget instead: shelves make
room for it, and it is refused where the leases alone would exceed the budget.

Lance has caches of its own for the files of SSTables. They get a fixed part of the budget
(:func:`lance_cache_bytes`), because nothing tells how full they are.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from lancewal.errors import InvalidInputError
from lancewal.storage.forks import in_forked_child

#: What a process keeps of all its tables unless the environment says otherwise.
CACHE_BYTES = 1 << 30
CACHE_VARIABLE = "LANCEWAL_CACHE_BYTES"

#: The part of the budget that Lance's own caches get.
_LANCE_SHARE = 0.5
#: What the cache itself needs for each thing it keeps.
_ENTRY_BYTES = 256

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def cache_bytes() -> int:
    """How many bytes this process keeps of its tables: ``LANCEWAL_CACHE_BYTES``, else 1 GiB."""
    text = os.environ.get(CACHE_VARIABLE, str(CACHE_BYTES))
    if not text.isdecimal():
        raise InvalidInputError(f"{CACHE_VARIABLE} must be a number of bytes, not {text!r}")
    return int(text)


def lance_cache_bytes() -> int:
    """The part of :func:`cache_bytes` that Lance keeps of SSTables and their indexes."""
    return int(cache_bytes() * _LANCE_SHARE)


class Cache:
    """One budget, and what is kept within it. The process has one; tests make others."""

    def __init__(self, max_bytes: int | None = None) -> None:
        """``max_bytes`` is the environment's where it is ``None``, read when it is first needed."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # All shelves' entries by last use. The value is the number of bytes.
        self._entries: OrderedDict[tuple[Shelf[Any, Any], Hashable], int] = OrderedDict()
        self._kept_bytes = 0
        self._leased_bytes = 0
        # A lease ends whenever the garbage collector runs, perhaps while this thread has the lock.
        self._returned: deque[int] = deque()

    @property
    def max_bytes(self) -> int:
        if self._max_bytes is None:
            self._max_bytes = cache_bytes() - lance_cache_bytes()
        return self._max_bytes

    @property
    def used_bytes(self) -> int:
        """What lies on shelves and what is leased."""
        with self._lock:
            self._settle()
            return self._kept_bytes + self._leased_bytes

    @property
    def free_bytes(self) -> int:
        """What a lease could get now: all that is not leased."""
        with self._lock:
            self._settle()
            return self.max_bytes - self._leased_bytes

    def lease(self, num_bytes: int) -> Lease | None:
        """So much of the budget for as long as the lease lives; ``None`` when leases have taken it up."""
        with self._lock:
            self._settle()
            if self._leased_bytes + num_bytes > self.max_bytes:
                return None
            self._leased_bytes += num_bytes
            self._make_room()
        return Lease(num_bytes, self._returned)

    def after_fork(self) -> None:
        """Another thread may have held the lock when the process was forked."""
        self._lock = threading.Lock()
        for shelf, _ in self._entries:
            shelf._values.clear()
        self._entries.clear()
        self._kept_bytes = 0

    def _settle(self) -> None:
        while self._returned:
            self._leased_bytes -= self._returned.popleft()

    def _make_room(self) -> None:
        """Requires the lock. Drop what was used least recently, until all fits."""
        while self._entries and self._kept_bytes + self._leased_bytes > self.max_bytes:
            shelf, key = next(iter(self._entries))
            shelf._drop(key)


class Lease:
    """A part of the budget; it goes back when the lease is no longer referenced."""

    __slots__ = ("_num_bytes", "_returned")

    def __init__(self, num_bytes: int, returned: deque[int]) -> None:
        self._num_bytes = num_bytes
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append(self._num_bytes)


#: The process's own.
process_cache = Cache()
in_forked_child(process_cache.after_fork)


class Shelf(Generic[K, V]):
    """One kind of thing that is kept, by key; every method may be called from any thread.

    >>> pages: Shelf[str, bytes] = Shelf()
    >>> pages.put("first", b"rows", num_bytes=4)
    >>> pages.get("first"), pages.get("second")
    (b'rows', None)
    """

    def __init__(self, cache: Cache = process_cache) -> None:
        self._cache = cache
        self._values: dict[Hashable, V] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        with self._cache._lock:
            value = self._values.get(key)
            if value is not None:
                self._cache._entries.move_to_end((self, key))
            return value

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Keep ``value``, which takes ``num_bytes``, instead of what was kept under the key.

        What would take up the whole budget is not kept: everything else would go for it.
        """
        with self._cache._lock:
            self._drop(key)
            if num_bytes + _ENTRY_BYTES > self._cache.max_bytes:
                return
            # In this order, and dropped in the other one: an interrupt may leave an entry without its
            # value, which costs room until it is dropped, but no value without its entry.
            self._cache._entries[self, key] = num_bytes + _ENTRY_BYTES
            self._cache._kept_bytes += num_bytes + _ENTRY_BYTES
            self._values[key] = value
            self._cache._settle()
            self._cache._make_room()

    def get_or_make(self, key: K, make: Callable[[], V], size_of: Callable[[V], int]) -> V:
        """What is kept, else what ``make`` returns. Two threads may both make it; one is kept."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value, size_of(value))
        return value

    def remove(self, key: K) -> V | None:
        """Keep nothing under the key any more; returns what was kept."""
        with self._cache._lock:
            return self._drop(key)

    def clear(self) -> None:
        with self._cache._lock:
            for key in list(self._values):
                self._drop(key)

    def _drop(self, key: Hashable) -> V | None:
        value = self._values.pop(key, None)
        num_bytes = self._cache._entries.get((self, key))
        if num_bytes is not None:
            del self._cache._entries[self, key]
            self._cache._kept_bytes -= num_bytes
        return value
