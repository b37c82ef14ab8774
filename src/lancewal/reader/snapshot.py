"""Snapshot: the levels of a table at one moment, newest first, each with what newer levels hide in it.

SSTables do not change, so the hidden rows of each set of SSTables are kept in the process's cache. Rows in
memory change with every put, so each read compares their keys with those of each SSTable.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import TypeVar
from uuid import UUID

import pyarrow as pa

from lancewal.base import BaseTable
from lancewal.format import KeySet, ShardIdentity, ShardManifest, TableSchema, superseded
from lancewal.reader.base_source import BaseSource
from lancewal.reader.source import Hidden, Newer, Request, ShardLevel, Source
from lancewal.reader.sstable_source import SsTableSource
from lancewal.sstable import KeyProbe
from lancewal.storage import Shelf, lazy_property, ordered_map

R = TypeVar("R")
#: A level, and the keys and rows of newer levels that hide its rows.
Level = tuple[Source, Newer]

_REMOTE_READERS = 64
#: How many levels are read in parallel whatever their size, and how many bytes more levels may hold.
_LEVELS_AT_ONCE = 4
_AHEAD_BYTES = 128 << 20

#: By the identities of SSTables, newest first.
_hidden: Shelf[tuple[Hashable, ...], list[Hidden]] = Shelf()
_keys: Shelf[tuple[Hashable, ...], KeySet] = Shelf()


@dataclass(frozen=True)
class ShardSnapshot:
    """One shard: the levels that the base does not hold yet, newest first."""

    manifest: ShardManifest
    sources: tuple[ShardLevel, ...]
    #: Whether the rows in memory come from a writer of this process, not from the WAL.
    is_live: bool

    @property
    def shard_id(self) -> UUID:
        return self.manifest.shard_id


@dataclass(frozen=True)
class Snapshot:
    """All levels of a table at one moment. ``find_pruned`` returns the shards that were left out."""

    base_source: BaseSource
    shards: tuple[ShardSnapshot, ...]
    find_pruned: Callable[[], tuple[UUID, ...]] = tuple
    is_remote: bool = False

    @property
    def pruned(self) -> tuple[UUID, ...]:
        return self.find_pruned()

    @property
    def base(self) -> BaseTable:
        return self.base_source.base

    @property
    def schema(self) -> TableSchema:
        return self.base.schema

    @cached_property
    def groups(self) -> list[tuple[ShardIdentity, list[ShardLevel]]]:
        """Groups of levels that may hold versions of the same keys, newest first; groups share no key.

        A group is one shard, unless a key can be in several shards. Then their levels are in the order of
        :func:`newest_first`. Each group has the identity of one of its shards.
        """
        filled = {shard.manifest.identity: shard for shard in self.shards if shard.sources}
        groups = []
        for group in self.base_source.pruner.key_groups(list(filled)):
            levels = [(shard.shard_id, source) for shard in group for source in filled[shard].sources]
            if len(group) > 1:  # the levels of a single shard are in this order already
                levels.sort(key=lambda level: newest_first(level[1].in_memory, level[1].generation, level[0]))
            groups.append((group[0], [source for _, source in levels]))
        return groups

    def newest_levels_first(self) -> list[Source]:
        """Every level, ordered so that the first level with a key has its newest version."""
        return [*(level for _, group in self.groups for level in group), self.base_source]

    def levels(self) -> Iterator[Level]:
        """Every level with what is newer than it; newest first, the base last."""
        yield from self.levels_above_base()
        yield self.base_source, self.newer_than_base

    def levels_above_base(self) -> Iterator[Level]:
        for _, group in self.groups:
            # Without a primary key no row replaces another.
            if self.schema.primary_key:
                yield from _merged(group, self._key_readers)
            else:
                yield from ((source, Newer()) for source in group)

    @cached_property
    def newer_than_base(self) -> Newer:
        """The keys of all levels above the base."""
        levels = [level for _, group in self.groups for level in group] if self.schema.primary_key else []
        return _NewerThanBase(levels, self._key_readers)

    def ask_levels(self, ask: Callable[[Source, Newer], R], levels: Iterable[Level] | None = None) -> list[R]:
        """The answers of all levels, or of ``levels``, newest level first."""
        asked = self.levels() if levels is None else levels
        return list(ordered_map(lambda level: ask(*level), asked, self.levels_at_once))

    def batches(self, request: Request) -> Iterator[tuple[Source, pa.RecordBatch]]:
        """The rows that the request asks for, newest level first, each batch with its level."""

        def begun(level: Level) -> tuple[Source, list[pa.RecordBatch], Iterator[pa.RecordBatch]]:
            """A level with its first batch, and its other batches."""
            source, newer = level
            batches = source.batches(request, newer)
            return source, list(islice(batches, 1)), batches

        # Prefetch only from remote storage, where each level waits, and only without a limit: with a limit
        # the first levels may be enough.
        ahead = self.levels_at_once if self.is_remote and request.limit is None else 1
        for source, first, rest in ordered_map(begun, self.levels(), ahead):
            yield from ((source, batch) for batch in chain(first, rest) if batch.num_rows)

    @cached_property
    def levels_at_once(self) -> int:
        """How many levels are read in parallel; each of them holds a batch of rows in memory."""
        sizes = [each.num_bytes or _AHEAD_BYTES for each in self._flushed]
        small = min(_REMOTE_READERS, _AHEAD_BYTES // max(sizes, default=1)) if self.is_remote else 0
        # One more for the base.
        return min(1 + len(sizes), max(_LEVELS_AT_ONCE, small))

    def prepare_lookup(self, keys: KeyProbe) -> None:
        """Open what a lookup of these keys needs of all SSTables in parallel, if the storage is remote."""
        if self.is_remote:
            every = [each.sstable for each in self._flushed]
            closed = [sstable for sstable in every if not sstable.is_open_for(keys)]
            list(ordered_map(lambda each: each.open_for(keys), closed, min(len(closed), _REMOTE_READERS)))

    @cached_property
    def _flushed(self) -> list[SsTableSource]:
        return [each for shard in self.shards for each in shard.sources if isinstance(each, SsTableSource)]

    @property
    def _key_readers(self) -> int:
        return _REMOTE_READERS if self.is_remote else 1


def newest_first(in_memory: bool, generation: int, shard_id: UUID) -> tuple[bool, int, UUID]:
    """A sort key for the levels of several shards that may hold versions of one key.

    Nothing on storage says which of two shards has the newer row, so a rule decides: rows in memory or in
    the WAL come before flushed ones, then the higher generation, then the lower shard id. All reads follow
    this rule. Compaction follows it too: it merges levels into the base in the opposite order, so that an
    older level never lies above a newer one. (A flush changes the place of rows in this order. Only the rows
    of one shard are certainly in the order of their puts.)
    """
    return not in_memory, -generation, shard_id


def _merged(levels: Sequence[ShardLevel], readers: int) -> Iterator[Level]:
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


class _NewerThanBase(Newer):
    """The keys of all levels above the base, collected on first use."""

    def __init__(self, levels: Sequence[ShardLevel], readers: int) -> None:
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


def _split(levels: Sequence[ShardLevel]) -> tuple[list[ShardLevel], list[ShardLevel]]:
    """The levels in memory, and the SSTables."""
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
