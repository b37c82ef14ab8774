"""The merge of levels: which rows newer levels hide, found once for all levels and kept for the next read.

SSTables do not change, so what their keys say of each other is kept for each set of SSTables, within the
process's cache. Rows in memory change with every put: their keys are asked of each SSTable's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property

import pyarrow as pa

from lancewal.format import KeySet, superseded
from lancewal.reader.source import Hidden, Newer, ShardLevel
from lancewal.storage import Shelf, ordered_map

#: By the identities of SSTables, newest first.
_hidden: Shelf[tuple[Hashable, ...], list[Hidden]] = Shelf()
_keys: Shelf[tuple[Hashable, ...], KeySet] = Shelf()


def merged(levels: Sequence[ShardLevel], readers: int) -> Iterator[tuple[ShardLevel, Newer]]:
    """Levels that may hold versions of the same keys, newest first, each with what is newer than it.

    Levels in memory come first. Nothing is read or compared before the level that needs it is asked for.
    ``readers`` is how many SSTables may be read at a time.
    """
    memory, flushed = _split(levels)
    hidden: list[Hidden] = []
    for place, level in enumerate(memory):
        if place < 2:
            # One set that grows with its MemTable is cheaper to ask than all keys are to compare.
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
    """The keys of all levels above the base, gathered when they are needed."""

    def __init__(self, levels: Sequence[ShardLevel], readers: int) -> None:
        super().__init__()
        self._levels = levels
        self._readers = readers

    @cached_property
    def keys(self) -> list[KeySet]:
        memory, flushed = _split(self._levels)
        sets = [_keys_of(flushed, self._readers), KeySet.union(level.keys() for level in memory)]
        return [keys for keys in sets if len(keys)]

    @cached_property
    def levels(self) -> list[KeySet]:
        found = ordered_map(lambda level: level.keys(), self._levels, self._readers)
        return [keys for keys in found if len(keys)]


def _split(levels: Sequence[ShardLevel]) -> tuple[list[ShardLevel], list[ShardLevel]]:
    """Those in memory, and SSTables."""
    return [each for each in levels if each.in_memory], [each for each in levels if not each.in_memory]


def _keys_of(flushed: Sequence[ShardLevel], readers: int) -> KeySet:
    if len(flushed) < 2:
        return flushed[0].keys() if flushed else KeySet.empty()
    return _keys.get_or_make(
        _identities(flushed), lambda: KeySet.of(_key_values(flushed, readers)), lambda keys: keys.nbytes
    )


def _hide(levels: Sequence[ShardLevel], readers: int) -> list[Hidden]:
    masks = superseded(list(_key_values(levels, readers)))
    return [level.hide(mask) for level, mask in zip(levels, masks, strict=True)]


def _key_values(levels: Sequence[ShardLevel], readers: int) -> Iterator[pa.Array]:
    return ordered_map(lambda level: level.key_values(), levels, readers)


def _identities(flushed: Sequence[ShardLevel]) -> tuple[Hashable, ...]:
    return tuple(level.identity for level in flushed)
