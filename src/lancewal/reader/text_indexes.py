"""Full-text indexes that searches make for themselves, of rows that have none, and keep.

Those of MemTables and WAL tails grow with the rows and go when they do. Those of SSTables
and base versions never change; the least recently used make room for others.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import pyarrow as pa

from lancewal.format.spans import one_array
from lancewal.index.full_text import FullTextIndex
from lancewal.index.kinds import FullTextParams
from lancewal.index.store import IndexStore
from lancewal.parallel import Bell
from lancewal.reader.source import Rows

#: What the indexes of SSTables and base versions may take together.
MAX_BYTES = 256 << 20


class _Growing:
    """An index of the rows from ``first`` on."""

    def __init__(self, params: FullTextParams, first: int) -> None:
        self.first = first
        self.index = FullTextIndex(params)
        self.lock = threading.Lock()


_growing: weakref.WeakKeyDictionary[IndexStore, dict[Hashable, _Growing]] = weakref.WeakKeyDictionary()


def index_from(
    owner: IndexStore, field_id: int, params: FullTextParams, column: pa.ChunkedArray, first: int
) -> FullTextIndex:
    """An index of a MemTable's column from row ``first`` on; its positions count from there.

    ``column`` has the rows that the caller sees; another may have added some beyond.
    """
    known, key = _growing.setdefault(owner, {}), (field_id, params)
    made = known.get(key) or known.setdefault(key, _Growing(params, first))
    if made.first != first:
        # The MemTable's own index has got further, and the one of the rows before is not needed any more.
        made = known[key] = _Growing(params, first)
    with made.lock:
        missing = column.slice(first + made.index.rows)
        if len(missing):
            made.index.insert(one_array(missing), made.index.rows)
    return made.index


@dataclass(frozen=True)
class FixedIndex:
    """An index of rows that never change. ``rows`` are they, ``keys`` their keys where they matter."""

    index: FullTextIndex
    rows: Rows
    keys: pa.Array | None = None

    @property
    def memory_bytes(self) -> int:
        keys = 0 if self.keys is None else int(self.keys.nbytes)
        return self.index.memory_bytes + self.rows.nbytes + keys


class _Making:
    """An index that a thread makes, which holds the lock by ``with``: where that is free, it was given up."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: FixedIndex | None = None
        self.given_up = False

    @property
    def over(self) -> bool:
        return self.made is not None or self.given_up or not self.lock.locked()


class FixedIndexes:
    """As many as fit, found by what they were made of. Each is made by one thread; others wait for it."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._made: OrderedDict[Hashable, FixedIndex] = OrderedDict()
        self._making: dict[Hashable, _Making] = {}
        self._changed = Bell()

    def get(self, key: Hashable, make: Callable[[], FixedIndex]) -> FixedIndex:
        while True:
            mine = _Making()
            with mine.lock:
                with self._lock:
                    if (made := self._made.get(key)) is not None:
                        self._made.move_to_end(key)
                        return made
                    other = self._making.get(key)
                    if other is None or other.over:
                        other = self._making[key] = mine
                if other is mine:
                    return self._make(key, mine, make)
            self._changed.wait_for(lambda: other.over)  # noqa: B023
            if other.made is not None:
                return other.made
            # Who was to make it failed: now it is our turn.

    def _make(self, key: Hashable, mine: _Making, make: Callable[[], FixedIndex]) -> FixedIndex:
        try:
            made = mine.made = make()
            with self._lock:
                self._made[key] = made
                self._make_room()
            return made
        finally:
            mine.given_up = mine.made is None
            self._making.pop(key, None)
            self._changed.ring()

    def _make_room(self) -> None:
        """Requires the lock."""
        sizes = {key: made.memory_bytes for key, made in self._made.items()}
        total = sum(sizes.values())
        for key, size in sizes.items():
            if total <= self._max_bytes:
                return
            del self._made[key]
            total -= size


FIXED = FixedIndexes()
