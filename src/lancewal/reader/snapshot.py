"""Snapshot: the levels of a table at one moment, in the order of their age."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.format import ShardIdentity, ShardManifest, TableSchema
from lancewal.reader.base_source import BaseSource
from lancewal.reader.newer import Newer, NewerThanBase, merged
from lancewal.reader.pruning import ShardPruner
from lancewal.reader.source import ShardLevel, Source
from lancewal.reader.sstable_source import SsTableSource
from lancewal.sstable import KeyProbe
from lancewal.storage import ordered_map

R = TypeVar("R")
#: A level, and the keys and rows of newer levels that hide its rows.
Level = tuple[Source, Newer]

_REMOTE_READERS = 64
#: How many levels are read in parallel whatever their size, and how many bytes more levels may hold.
_LEVELS_AT_ONCE = 4
_AHEAD_BYTES = 128 << 20


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

    @property
    def pruner(self) -> ShardPruner:
        return self.base_source.pruner

    @cached_property
    def groups(self) -> list[tuple[ShardIdentity, list[ShardLevel]]]:
        """Groups of levels that may hold versions of the same keys, newest first; groups share no key.

        A group is one shard, unless a key can be in several shards. Then their levels are in the order of
        :func:`newest_first`. Each group has the identity of one of its shards.
        """
        filled = {shard.manifest.identity: shard for shard in self.shards if shard.sources}
        return [
            (group[0], _in_order([filled[identity] for identity in group]))
            for group in self.pruner.key_groups(list(filled))
        ]

    def newest_levels_first(self) -> list[Source]:
        """Every level, ordered so that the first level with a key has its newest version."""
        levels: list[Source] = []
        for _, group in self.groups:
            levels += group
        levels.append(self.base_source)
        return levels

    def levels(self) -> Iterator[Level]:
        """Every level with what is newer than it; newest first, the base last."""
        yield from self.levels_above_base()
        yield self.base_source, self.newer_than_base

    def levels_above_base(self) -> Iterator[Level]:
        for _, group in self.groups:
            # Without a primary key no row replaces another.
            if self.schema.primary_key:
                yield from merged(group, self._key_readers)
            else:
                yield from ((source, Newer()) for source in group)

    @cached_property
    def newer_than_base(self) -> Newer:
        """The keys of all levels above the base."""
        levels = [level for _, group in self.groups for level in group] if self.schema.primary_key else []
        return NewerThanBase(levels, self._key_readers)

    def ask_levels(self, ask: Callable[[Source, Newer], R], levels: Iterable[Level] | None = None) -> list[R]:
        """The answers of all levels, or of ``levels``, newest level first."""
        asked = self.levels() if levels is None else levels
        return list(ordered_map(lambda level: ask(*level), asked, self.levels_at_once))

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
            unopened = [each for each in self._flushed if not each.is_open_for(keys)]
            list(ordered_map(lambda each: each.open_for(keys), unopened, min(len(unopened), _REMOTE_READERS)))

    @cached_property
    def _flushed(self) -> list[SsTableSource]:
        return [each for shard in self.shards for each in shard.sources if isinstance(each, SsTableSource)]

    @property
    def _key_readers(self) -> int:
        return _REMOTE_READERS if self.is_remote else 1


def _in_order(shards: Sequence[ShardSnapshot]) -> list[ShardLevel]:
    """The levels of some shards, newest first; the levels of a single shard already are."""
    if len(shards) == 1:
        return list(shards[0].sources)
    levels = [(shard.shard_id, source) for shard in shards for source in shard.sources]
    levels.sort(key=lambda level: newest_first(level[1].in_memory, level[1].generation, level[0]))
    return [source for _, source in levels]


def newest_first(in_memory: bool, generation: int, shard_id: UUID) -> tuple[bool, int, UUID]:
    """A sort key for the levels of several shards that may hold versions of one key.

    Nothing on storage says which of two shards has the newer row, so a rule decides: rows in memory or in
    the WAL come before flushed ones, then the higher generation, then the lower shard id. All reads follow
    this rule. Compaction follows it too: it merges levels into the base in the opposite order, so that an
    older level never lies above a newer one. (A flush changes the place of rows in this order. Only the rows
    of one shard are certainly in the order of their puts.)
    """
    return not in_memory, -generation, shard_id
