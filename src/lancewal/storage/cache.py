"""The cache of this process: one memory budget for everything that it caches of its tables.

Values that can be read or computed again are on a :class:`Shelf`. All shelves share one budget, which is part
of :func:`cache_bytes`. The least recently used value is dropped first, no matter which shelf holds it.
Memory that cannot be dropped at any moment (the rows of a log's tail during a read) takes a
:class:`Lease` of the same budget instead: shelves make room for it, and it is refused if
the leases alone would exceed the budget.

Lance has its own caches for the files of SSTables. They get a fixed part of :func:`cache_bytes`
(:func:`lance_cache_bytes`), because Lance does not report how full they are.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from lancewal.errors import InvalidInputError
from lancewal.storage.forks import in_forked_child
from lancewal.storage.memory import memory_bytes

#: The budget for all tables of a process, unless the environment sets another.
CACHE_BYTES = 1 << 30
CACHE_VARIABLE = "LANCEWAL_CACHE_BYTES"

#: The part of the process's memory (``lancewal.storage.memory``) that caches get, up to the budget above.
_OF_MEMORY = 0.25
#: The part of the budget that Lance's own caches get.
_LANCE_SHARE = 0.5
#: The cache's own overhead for each value.
_ENTRY_BYTES = 256

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def cache_bytes() -> int:
    """The budget in bytes: ``LANCEWAL_CACHE_BYTES``, by default a quarter of the memory, 1 GiB at most."""
    text = os.environ.get(CACHE_VARIABLE) or str(min(CACHE_BYTES, int(memory_bytes() * _OF_MEMORY)))
    if not text.isdecimal():
        raise InvalidInputError(f"{CACHE_VARIABLE} must be a number of bytes, not {text!r}")
    return int(text)


def lance_cache_bytes() -> int:
    """The part of :func:`cache_bytes` for Lance's own caches of SSTables and their indexes."""
    return int(cache_bytes() * _LANCE_SHARE)


class Cache:
    """One budget and the values kept within it. The process has one; tests make others."""

    def __init__(self, max_bytes: int | None = None) -> None:
        """Without ``max_bytes`` the environment sets the budget; it is read when first needed."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # The entries of all shelves with their bytes, least recently used first.
        self._entries: OrderedDict[tuple[Shelf[Any, Any], Hashable], int] = OrderedDict()
        self._kept_bytes = 0
        self._leased_bytes = 0
        # The garbage collector may end a lease at any time, also while this thread holds the lock.
        self._returned: deque[int] = deque()

    @property
    def max_bytes(self) -> int:
        if self._max_bytes is None:
            self._max_bytes = cache_bytes() - lance_cache_bytes()
        return self._max_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes on shelves and in leases."""
        with self._lock:
            self._settle()
            return self._kept_bytes + self._leased_bytes

    @property
    def free_bytes(self) -> int:
        """The largest lease that could be granted now: everything that is not leased."""
        with self._lock:
            self._settle()
            return self.max_bytes - self._leased_bytes

    def lease(self, num_bytes: int) -> Lease | None:
        """Reserve part of the budget while the lease lives; ``None`` when other leases leave too little."""
        with self._lock:
            self._settle()
            if self._leased_bytes + num_bytes > self.max_bytes:
                return None
            self._leased_bytes += num_bytes
            self._make_room()
        return Lease(num_bytes, self)

    def after_fork(self) -> None:
        """Start empty, with a new lock: another thread may have held it when the process was forked."""
        self._lock = threading.Lock()
        for shelf, _ in self._entries:
            shelf._values.clear()
        self._entries.clear()
        self._kept_bytes = 0

    def _settle(self) -> None:
        while self._returned:
            self._leased_bytes -= self._returned.popleft()

    def _make_room(self) -> None:
        """Drop the least recently used values until the rest fits. Requires the lock."""
        while self._entries and self._kept_bytes + self._leased_bytes > self.max_bytes:
            shelf, key = next(iter(self._entries))
            shelf._drop(key)


class Lease:
    """A reserved part of the budget, returned when the lease is no longer referenced."""

    __slots__ = ("_cache", "_num_bytes")

    def __init__(self, num_bytes: int, cache: Cache) -> None:
        self._num_bytes = num_bytes
        self._cache = cache

    @classmethod
    def joined(cls, leases: Sequence[Lease], num_bytes: int) -> Lease:
        """Join several leases of one cache into one of ``num_bytes``, but at most their total."""
        cache = leases[0]._cache
        with cache._lock:
            had = 0
            for lease in leases:
                had, lease._num_bytes = had + lease._num_bytes, 0
            kept = min(num_bytes, had)
            cache._returned.append(had - kept)
        return cls(kept, cache)

    @property
    def is_void(self) -> bool:
        """Whether this lease was joined into another one."""
        return not self._num_bytes

    def __del__(self) -> None:
        self._cache._returned.append(self._num_bytes)


#: The cache of this process.
process_cache = Cache()
in_forked_child(process_cache.after_fork)


class Shelf(Generic[K, V]):
    """Cached values of one kind, by key; every method may be called from any thread.

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
        """Keep ``value``, which takes ``num_bytes``, in place of the key's former value.

        A value larger than the whole budget is not kept: it would push everything else out.
        """
        with self._cache._lock:
            self._drop(key)
            if num_bytes + _ENTRY_BYTES > self._cache.max_bytes:
                return
            # First the entry, then the value; ``_drop`` removes them in reverse order. An interrupt may leave
            # an entry without its value, which only costs room until it is dropped. It must not leave a
            # value without its entry.
            self._cache._entries[self, key] = num_bytes + _ENTRY_BYTES
            self._cache._kept_bytes += num_bytes + _ENTRY_BYTES
            self._values[key] = value
            self._cache._settle()
            self._cache._make_room()

    def get_or_make(self, key: K, make: Callable[[], V], size_of: Callable[[V], int]) -> V:
        """The kept value, or else what ``make`` returns. Two threads may both make it; one is kept."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value, size_of(value))
        return value

    def remove(self, key: K) -> V | None:
        """Drop the key's value and return it."""
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
