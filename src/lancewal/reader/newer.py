"""Which rows of a level newer levels hide, by their keys; deletes hide rows too.

SSTables do not change, so the hidden rows of each set of SSTables are kept in the process's cache. Rows in
memory change with every put, so each read compares their keys with those of each SSTable.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.format import KeySet, superseded
from lancewal.storage import Shelf, lazy_property, ordered_map

Mask = npt.NDArray[np.bool_]


class KeyedLevel(Protocol):
    """A level whose keys, including those of deletes, hide rows of older levels."""

    @property
    def in_memory(self) -> bool:
        """Whether the rows are not flushed yet; other levels wait for I/O."""

    @property
    def identity(self) -> Hashable:
        """The cache key for what is known about the keys of an SSTable; ``None`` for rows in memory."""

    def keys(self) -> KeySet:
        """All keys of the level, independent of any filter."""

    def key_values(self) -> pa.Array:
        """The key of every row that may be visible, in the type of the table's key."""

    def hide(self, superseded: Mask) -> Hidden:
        """The hidden rows of the level; ``superseded`` marks keys of :meth:`key_values`."""


_Level = TypeVar("_Level", bound=KeyedLevel)


@dataclass(frozen=True)
class Hidden:
    """A mask of the rows of a level that newer levels hide (``None``: none), and the number of live rows."""

    rows: Mask | None
    live: int

    @property
    def nbytes(self) -> int:
        return 0 if self.rows is None else self.rows.nbytes


class Newer:
    """What newer levels hide in one level: rows that are known to be hidden, and keys that hide others."""

    def __init__(self, keys: Iterable[KeySet] = (), hidden: Hidden | None = None) -> None:
        self._keys = keys
        self.hidden = hidden

    @lazy_property
    def keys(self) -> list[KeySet]:
        """The non-empty key sets, which must be probed one by one."""
        return [keys for keys in self._keys if len(keys)]

    @lazy_property
    def levels(self) -> list[KeySet]:
        """The non-empty key set of each newer level."""
        return self.keys

    @property
    def hidden_rows(self) -> Mask | None:
        """A mask of the rows that are known to be hidden; ``None`` if there are none."""
        return None if self.hidden is None else self.hidden.rows

    def __len__(self) -> int:
        """An upper bound of the number of keys."""
        return sum(map(len, self.keys))

    def contains(self, keys: pa.Array) -> Mask:
        found = np.zeros(len(keys), np.bool_)
        for each in self.keys:
            found |= each.contains(keys)
        return found


#: By the identities of SSTables, newest first.
_hidden: Shelf[tuple[Hashable, ...], list[Hidden]] = Shelf()
_keys: Shelf[tuple[Hashable, ...], KeySet] = Shelf()


def merged(levels: Sequence[_Level], readers: int) -> Iterator[tuple[_Level, Newer]]:
    """Levels that may hold versions of the same keys, newest first, each with what is newer than it.

    Levels in memory come first. Reads and comparisons happen only when the level that needs them is
    requested. ``readers`` is how many SSTables may be read at a time.
    """
    memory, flushed = _split(levels)
    hidden: list[Hidden] = []
    for place, level in enumerate(memory):
        if place < 2:
            # Probing one key set, which grows with its MemTable, is cheaper than comparing all keys.
            yield level, Newer([above.keys() for above in memory[:place]])
        else:
            hidden = hidden or _hide(memory, readers)
            yield level, Newer(hidden=hidden[place])
    in_memory = [KeySet.union(level.keys() for level in memory)] if flushed else []
    for place, level in enumerate(flushed):
        if place == 1:
            hidden = _hidden.get_or_make(
                _identities(flushed),
                lambda: _hide(flushed, readers),
                lambda made: sum(each.nbytes for each in made),
            )
        yield level, Newer(in_memory, hidden[place] if place else None)


class NewerThanBase(Newer):
    """The keys of all levels above the base, collected on first use."""

    def __init__(self, levels: Sequence[KeyedLevel], readers: int) -> None:
        super().__init__()
        self._levels = levels
        self._readers = readers

    @lazy_property
    def keys(self) -> list[KeySet]:
        memory, flushed = _split(self._levels)
        sets = [_keys_of(flushed, self._readers), KeySet.union(level.keys() for level in memory)]
        return [keys for keys in sets if len(keys)]

    @lazy_property
    def levels(self) -> list[KeySet]:
        found = ordered_map(lambda level: level.keys(), self._levels, self._readers)
        return [keys for keys in found if len(keys)]


def _split(levels: Sequence[_Level]) -> tuple[list[_Level], list[_Level]]:
    """The levels in memory, and the SSTables."""
    return [each for each in levels if each.in_memory], [each for each in levels if not each.in_memory]


def _keys_of(flushed: Sequence[KeyedLevel], readers: int) -> KeySet:
    if len(flushed) < 2:
        return flushed[0].keys() if flushed else KeySet.empty()
    return _keys.get_or_make(
        _identities(flushed), lambda: KeySet.of(_key_values(flushed, readers)), lambda keys: keys.nbytes
    )


def _hide(levels: Sequence[KeyedLevel], readers: int) -> list[Hidden]:
    masks = superseded(list(_key_values(levels, readers)))
    return [level.hide(mask) for level, mask in zip(levels, masks, strict=True)]


def _key_values(levels: Sequence[KeyedLevel], readers: int) -> Iterator[pa.Array]:
    return ordered_map(lambda level: level.key_values(), levels, readers)


def _identities(flushed: Sequence[KeyedLevel]) -> tuple[Hashable, ...]:
    return tuple(level.identity for level in flushed)
