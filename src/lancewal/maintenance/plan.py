"""Compaction plans: which generations of which shards to compact, in how many commits.

A plan is data. It can be shown, stored as JSON and executed later or elsewhere; it holds no
credentials. It may be out of date when it is executed: generations that another compactor has compacted
by then are skipped, so nothing is done twice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from lancewal.base import BaseTable, open_base
from lancewal.errors import (
    CorruptManifestError,
    DifferentHistoryError,
    InvalidInputError,
    LanceWalError,
)
from lancewal.format import KeySet, ShardManifest, SsTableEntry, TableSchema
from lancewal.reader import ShardPruner, SsTableSource, newest_first
from lancewal.shard import ShardRouter, discover_manifests
from lancewal.sstable import SsTable, copied_marker, held_generation
from lancewal.storage import ObjectStore, both, layout, ordered_map

logger = logging.getLogger(__name__)

#: How many bytes of rows go into one commit. A merge needs two to three times that in memory.
DEFAULT_COMMIT_BYTES = 256 << 20
_REMOTE_READERS = 16
#: How many shards and SSTables are read ahead, before it is known that they are needed.
_AT_ONCE = 64
_KEY_READERS = 4
#: The fields of an SSTable in a stored plan.
_ENTRY_FIELDS = (
    "generation",
    "path",
    "in_memory_bytes",
    "physical_rows",
    "primary_key_bytes",
    "notes",
)


@dataclass(frozen=True)
class CommitPlan:
    """Generations that one commit merges into the base table, ascending.

    ``num_bytes`` is the size of their rows in memory, including older versions of keys.
    """

    sstables: tuple[SsTableEntry, ...]
    num_bytes: int

    @property
    def through(self) -> int:
        return self.sstables[-1].generation

    @property
    def generations(self) -> tuple[int, ...]:
        return tuple(entry.generation for entry in self.sstables)

    @property
    def rows(self) -> int:
        """Rows of all generations; a generation of unknown row count counts as zero."""
        return sum(entry.physical_rows or 0 for entry in self.sstables)


@dataclass(frozen=True)
class ShardPlan:
    """One shard's part of a plan. ``after`` is the newest generation that the base already held.

    ``together`` are the shards, including this one, that share keys. Their parts run one after the
    other, in the plan's order. If one fails, the later ones do not run.
    """

    uri: str
    shard_id: UUID
    after: int
    commits: tuple[CommitPlan, ...]
    max_commit_bytes: int = DEFAULT_COMMIT_BYTES
    together: tuple[UUID, ...] = ()

    @property
    def sstables(self) -> tuple[SsTableEntry, ...]:
        return tuple(entry for commit in self.commits for entry in commit.sstables)

    @property
    def generations(self) -> tuple[int, ...]:
        return tuple(entry.generation for entry in self.sstables)

    @property
    def through(self) -> int:
        return self.commits[-1].through

    @property
    def rows(self) -> int:
        return sum(commit.rows for commit in self.commits)

    @property
    def num_bytes(self) -> int:
        return sum(commit.num_bytes for commit in self.commits)

    @property
    def commits_expected(self) -> int:
        """An estimate of the number of commits: replaced rows need none, many deleted keys need one more."""
        return sum(max(1, -(-commit.num_bytes // self.max_commit_bytes)) for commit in self.commits)

    def to_dict(self) -> dict[str, Any]:
        return {
            "uri": self.uri,
            "shard_id": str(self.shard_id),
            "after": self.after,
            "max_commit_bytes": self.max_commit_bytes,
            "together": [str(shard_id) for shard_id in self.together],
            "commits": [
                {
                    "num_bytes": commit.num_bytes,
                    "sstables": [
                        {name: getattr(entry, name) for name in _ENTRY_FIELDS} for entry in commit.sstables
                    ],
                }
                for commit in self.commits
            ],
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> ShardPlan:
        try:
            commits = tuple(
                CommitPlan(tuple(SsTableEntry(**entry) for entry in commit["sstables"]), commit["num_bytes"])
                for commit in stored["commits"]
            )
            return cls(
                stored["uri"],
                UUID(stored["shard_id"]),
                stored["after"],
                commits,
                stored["max_commit_bytes"],
                tuple(UUID(shard_id) for shard_id in stored.get("together", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInputError(f"this is no compaction plan of a shard: {error!r}") from error


@dataclass(frozen=True)
class Pack:
    """Parts whose rows go into one commit: small parts of different shards that share no key.

    A single part may take several commits. If the parts are ``in_order``, because their shards share keys,
    each has a commit of its own, and no part runs after one that failed.
    """

    parts: tuple[ShardPlan, ...]
    in_order: bool = False

    @property
    def commits_expected(self) -> int:
        return (
            sum(part.commits_expected for part in self.parts)
            if self.in_order
            else max(part.commits_expected for part in self.parts)
        )


@dataclass(frozen=True)
class CompactionPlan:
    """All shards with generations to compact, planned for version ``base_version`` of the base table.

    A shard that shares keys with others may have several parts.
    """

    uri: str
    base_version: int
    has_key: bool
    shards: tuple[ShardPlan, ...]

    def __bool__(self) -> bool:
        return bool(self.shards)

    @property
    def packs(self) -> list[Pack]:
        """The independent pieces of work: shards that share keys, large shards, and small shards together."""
        packs: list[Pack] = []
        filling: list[ShardPlan] = []
        size = 0
        for unit in self.units:
            (part, *more) = unit
            if more or part.together or len(part.commits) > 1:
                packs.append(Pack(tuple(unit), in_order=bool(more or part.together)))
                continue
            if filling and size + part.num_bytes > part.max_commit_bytes:
                packs.append(Pack(tuple(filling)))
                filling, size = [], 0
            filling.append(part)
            size += part.num_bytes
        return [*packs, Pack(tuple(filling))] if filling else packs

    @property
    def units(self) -> list[list[ShardPlan]]:
        """Lists of parts. The lists may run in parallel; the parts of one list run in order."""
        units: list[list[ShardPlan]] = []
        sharing: dict[tuple[UUID, ...], list[ShardPlan]] = {}
        for part in self.shards:
            unit = sharing.setdefault(part.together, []) if part.together else []
            if not unit:
                units.append(unit)
            unit.append(part)
        return units

    def first(self, commits: int) -> CompactionPlan:
        """The plan cut to the first ``commits`` of each shard, its oldest generations.

        Shards that share keys are not cut.
        """
        shards = (s if s.together else replace(s, commits=s.commits[:commits]) for s in self.shards)
        return replace(self, shards=tuple(shards))

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def commits_expected(self) -> int:
        """About how many versions of the base table this creates."""
        if self.has_key:
            return sum(pack.commits_expected for pack in self.packs)
        # Each pack commits rows and markers. One last commit removes all tags.
        return 2 * len(self.packs) + bool(self.shards)

    def to_dict(self) -> dict[str, Any]:
        return {
            "uri": self.uri,
            "base_version": self.base_version,
            "has_key": self.has_key,
            "shards": [shard.to_dict() for shard in self.shards],
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> CompactionPlan:
        try:
            shards = tuple(ShardPlan.from_dict(shard) for shard in stored["shards"])
            return cls(stored["uri"], stored["base_version"], stored["has_key"], shards)
        except (KeyError, TypeError) as error:
            raise InvalidInputError(f"this is no compaction plan: {error!r}") from error

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> CompactionPlan:
        try:
            stored = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"this is no compaction plan: {error}") from error
        if not isinstance(stored, dict):
            raise InvalidInputError("this is no compaction plan: not an object")
        return cls.from_dict(stored)

    def __str__(self) -> str:
        lines = [
            f"compact {shard.shard_id}: generations {shard.generations[0]} to {shard.through}, "
            f"{shard.rows} rows, {shard.num_bytes / 1e6:.1f} MB"
            for shard in self.shards
        ]
        lines.append(f"{self.commits_expected} commits")
        return "\n".join(lines) if self.shards else "nothing to compact"


def plan_compaction(
    store: ObjectStore,
    shards: Sequence[UUID | str] | None = None,
    *,
    max_commit_bytes: int = DEFAULT_COMMIT_BYTES,
) -> CompactionPlan:
    """Plan the compaction of all SSTables that the base table does not hold yet, of all shards or of some.

    If shards share a key, the plan includes all of them. It compacts their SSTables oldest first, in the
    order in which reads rank them (:func:`lancewal.reader.snapshot.newest_first`). So a compaction never
    changes the result of a read, whether it is finished, running or failed.

    Generations are grouped up to ``max_commit_bytes``, and so are shards that share no key. A single larger
    generation takes several commits, the last of which sets its marker.
    """
    return planned(store, shards, max_commit_bytes=max_commit_bytes).plan


@dataclass(frozen=True)
class Planned:
    """A plan, the version of the base table that it was made for, and the manifests of all shards."""

    plan: CompactionPlan
    base: BaseTable
    manifests: Sequence[ShardManifest]


def planned(
    store: ObjectStore,
    shards: Sequence[UUID | str] | None = None,
    *,
    max_commit_bytes: int,
    open_sstables: bool = False,
) -> Planned:
    """:func:`plan_compaction`, together with what it read.

    ``open_sstables`` opens them ahead, for a caller that executes the plan at once.
    """
    if max_commit_bytes < 1:
        raise InvalidInputError(f"max_commit_bytes must be at least 1, got {max_commit_bytes}")
    wanted = None if shards is None else {layout.parse_shard_id(shard) for shard in shards}
    # On remote storage, read ahead what is likely to be needed.
    known = None if store.is_local else BaseTable.known(store)
    # Read all shards even if the caller wants only some: others may share their keys.
    manifests = discover_manifests(store, () if known is None else _named_shards(known))
    missing = (wanted or set()) - {manifest.shard_id for manifest in manifests}
    if missing:
        raise InvalidInputError(f"there are no shards {', '.join(map(str, sorted(missing)))} in {store.uri}")
    # Open the base after the manifests: in an older base version, pruned generations would look lost.
    ahead = _waiting(store, manifests, known) if open_sstables and known is not None else []
    if ahead:
        base, _ = both(partial(open_base, store), partial(_open_all, ahead), at_once=True)
    else:
        base = open_base(store)
    version, has_key = base.version, bool(base.schema.primary_key)
    for manifest in manifests:
        marker = copied_marker(base, store, manifest)
        if marker and (wanted is None or manifest.shard_id in wanted):
            raise DifferentHistoryError(
                f"the table is a copy, and generations of its shard {manifest.shard_id} are at or below the "
                f"marker {marker} that came along: they cannot be marked as compacted. table.flush(), or a "
                "writer that is opened with lancewal, gives them numbers above it"
            )
    markers = {manifest.shard_id: held_generation(base, store, manifest) for manifest in manifests}
    groups = [[manifest] for manifest in manifests]
    if has_key:
        groups = _sharing_keys(store, base, manifests, markers)
    plans: list[ShardPlan] = []
    for group in groups:
        if wanted is not None and wanted.isdisjoint(manifest.shard_id for manifest in group):
            continue
        together = tuple(sorted(m.shard_id for m in group)) if len(group) > 1 else ()
        for shard_id, after, pending in _in_order(group, markers):
            is_quick = store.is_local or all(entry.in_memory_bytes is not None for entry in pending)
            workers = 1 if is_quick else _REMOTE_READERS
            sizes = list(ordered_map(partial(_num_bytes, store, shard_id), pending, workers))
            limit = max_commit_bytes if has_key else sum(sizes)
            commits = tuple(_grouped(pending, sizes, limit))
            plans.append(ShardPlan(base.uri, shard_id, after, commits, max_commit_bytes, together))
    return Planned(CompactionPlan(base.uri, version, has_key, tuple(plans)), base, manifests)


def _named_shards(base: BaseTable) -> list[UUID]:
    """The shards that the table's sharding implies, if they are few; most of them exist."""
    try:
        router = ShardRouter.for_table(base.details, base.schema)
    except InvalidInputError:
        return []
    return [shard.shard_id for shard in router.known_shards()] if router.num_buckets <= _AT_ONCE else []


def _waiting(store: ObjectStore, manifests: Sequence[ShardManifest], base: BaseTable) -> list[SsTable]:
    """The SSTables that ``base`` does not hold, if they are few; otherwise none is opened ahead."""
    found = [
        SsTable.open(store, manifest.shard_id, entry)
        for manifest in manifests
        for entry in manifest.sstables
        if entry.generation > base.compacted_generation(manifest.shard_id)
    ]
    return found if len(found) <= _AT_ONCE else []


def _open_all(tables: Sequence[SsTable]) -> None:
    def touch(table: SsTable) -> None:
        # The next read raises the error again.
        with suppress(LanceWalError):
            _ = table.dataset

    for _ in ordered_map(touch, tables, len(tables)):
        pass


def _sharing_keys(
    store: ObjectStore, base: BaseTable, manifests: Sequence[ShardManifest], markers: Mapping[UUID, int]
) -> list[list[ShardManifest]]:
    """Shards with generations to compact, grouped by shared keys.

    Keys are read only if the sharding does not prove that the shards hold different keys.
    """

    def is_waiting(manifest: ShardManifest) -> bool:
        newest = max((entry.generation for entry in manifest.sstables), default=0)
        return max(newest, manifest.current_generation - 1) > markers.get(manifest.shard_id, 0)

    waiting = {manifest.identity: manifest for manifest in manifests if is_waiting(manifest)}
    if len(waiting) < 2:
        return [[manifest] for manifest in waiting.values()]
    groups: list[list[ShardManifest]] = []
    for possible in ShardPruner(base.details, base.schema).key_groups(list(waiting)):
        members = [waiting[identity] for identity in possible]
        if len(members) == 1:
            groups.append(members)
            continue
        try:
            keys = [flushed_keys(store, base.schema, m, markers.get(m.shard_id, 0)) for m in members]
        except Exception as error:
            # An SSTable is damaged, or others have compacted and collected it. To compact the shards one
            # after the other is always correct.
            logger.debug("keys were not read, so these shards are compacted in order: %s", error)
            groups.append(members)
        else:
            groups += [[members[number] for number in group] for group in sharing_keys(keys)]
    return sorted(groups, key=lambda group: group[0].shard_id)


def _in_order(
    group: Sequence[ShardManifest], markers: Mapping[UUID, int]
) -> Iterator[tuple[UUID, int, list[SsTableEntry]]]:
    """The SSTables of shards that share keys, oldest first.

    Each item is a shard, its generation before these SSTables, and the SSTables.
    """
    after = {manifest.shard_id: markers.get(manifest.shard_id, 0) for manifest in group}
    pending = [(m.shard_id, entry) for m in group for entry in pending_sstables(m, after[m.shard_id])]
    if len(group) > 1:
        pending.sort(key=lambda each: newest_first(False, each[1].generation, each[0]), reverse=True)
    for shard_id, run in groupby(pending, key=lambda each: each[0]):
        entries = [entry for _, entry in run]
        yield shard_id, after[shard_id], entries
        after[shard_id] = entries[-1].generation


def pending_sstables(manifest: ShardManifest, after: int) -> list[SsTableEntry]:
    """The SSTables above generation ``after``, ascending; refuses a list with gaps.

    A marker past a gap would claim that the base holds rows that are in no SSTable.
    """
    pending = sorted(
        (entry for entry in manifest.sstables if entry.generation > after), key=lambda e: e.generation
    )
    expected = list(range(max(after, 0) + 1, max(manifest.current_generation, after + 1)))
    found = [entry.generation for entry in pending]
    if found != expected:
        lost = sorted(set(expected) - set(found))
        raise CorruptManifestError(
            f"shard {manifest.shard_id} is at generation {manifest.current_generation}, the base table holds "
            f"it up to generation {after}, and its manifest lists {found or 'none'} in between"
            + (f"; {lost} are missing" if lost else "")
            + ". Compaction would lose rows; run verify"
        )
    return pending


def _num_bytes(store: ObjectStore, shard_id: UUID, entry: SsTableEntry) -> int:
    if entry.in_memory_bytes is not None:
        return entry.in_memory_bytes
    # Rows are smaller on storage than in memory, but of the same order of magnitude.
    return sum(info.size for info in store.list(layout.sstable_dir(shard_id, entry.path)))


def _grouped(sstables: Sequence[SsTableEntry], sizes: Sequence[int], limit: int) -> Iterator[CommitPlan]:
    group: list[SsTableEntry] = []
    total = 0
    for entry, size in zip(sstables, sizes, strict=True):
        if group and total + size > limit:
            yield CommitPlan(tuple(group), total)
            group, total = [], 0
        group.append(entry)
        total += size
    if group:
        yield CommitPlan(tuple(group), total)


@dataclass(frozen=True)
class SharedKeys:
    """Two shards, by number, with the count of keys that are in both, and an example.

    Nothing on storage says which version of such a key is newer.
    """

    first: int
    second: int
    count: int
    example: object


def flushed_keys(store: ObjectStore, schema: TableSchema, manifest: ShardManifest, after: int) -> KeySet:
    """The keys of a shard's SSTables above generation ``after``, including deleted ones."""
    entries = [entry for entry in manifest.sstables if entry.generation > after]

    def read(number: int) -> KeySet:
        table = SsTable.open(store, manifest.shard_id, entries[number])
        return SsTableSource(table, schema).keys()

    return KeySet.union(ordered_map(read, range(len(entries)), 1 if store.is_local else _KEY_READERS))


def shared_keys(shards: Sequence[KeySet]) -> list[SharedKeys]:
    """The pairs of shards that have keys in common.

    A key in three shards counts for the first and second, and for the second and third.

    >>> sets = [KeySet.of([pa.array([1, 2])]), KeySet.of([pa.array([3])]), KeySet.of([pa.array([2, 4])])]
    >>> shared_keys(sets)
    [SharedKeys(first=0, second=2, count=1, example=2)]
    """
    arrays = [keys.to_array().unique() if len(keys) else None for keys in shards]
    filled = [(number, array) for number, array in enumerate(arrays) if array is not None]
    if len(filled) < 2:
        return []
    keys = pa.concat_arrays([array for _, array in filled])
    owners = np.concatenate([np.full(len(array), number) for number, array in filled])
    codes = keys.dictionary_encode().indices.to_numpy()
    # A stable sort keeps the shards of one key in ascending order.
    order = np.argsort(codes, kind="stable")
    again = np.flatnonzero(codes[order][1:] == codes[order][:-1])
    if not len(again):
        return []
    pairs = np.stack([owners[order[again]], owners[order[again + 1]]], axis=1)
    found, first, counts = np.unique(pairs, axis=0, return_index=True, return_counts=True)
    return [
        SharedKeys(int(one), int(other), int(count), keys[int(order[again[place]])].as_py())
        for (one, other), place, count in zip(found, first, counts, strict=True)
    ]


def sharing_keys(shards: Sequence[KeySet]) -> list[list[int]]:
    """The shards, by number, in groups such that no key is in two groups.

    >>> sets = [KeySet.of([pa.array([1, 2])]), KeySet.of([pa.array([3])]), KeySet.of([pa.array([2, 4])])]
    >>> sharing_keys(sets)
    [[0, 2], [1]]
    """
    group_of = {number: {number} for number in range(len(shards))}
    for pair in shared_keys(shards):
        joined = group_of[pair.first] | group_of[pair.second]
        for number in joined:
            group_of[number] = joined
    return sorted({tuple(sorted(group)): sorted(group) for group in group_of.values()}.values())
