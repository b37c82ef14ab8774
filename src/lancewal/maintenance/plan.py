"""What a compaction would do: which generations of which shards, in how many commits.

A plan is data. It can be shown, stored as JSON and executed later or elsewhere; it holds no
credentials. It may be out of date when it is executed: what somebody else has compacted by
then is left out, nothing is done twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from lancewal import layout
from lancewal.base import BaseTable
from lancewal.errors import CorruptManifestError, DifferentHistoryError, InvalidInputError
from lancewal.format.shard_manifest import ShardManifest, SsTableEntry
from lancewal.lineage import copied_marker, held_generation
from lancewal.objects import ObjectStore
from lancewal.parallel import ordered_map
from lancewal.sharding import discover_shards, read_manifests

#: Rows of so many bytes go into one commit. A merge needs two to three times that in memory.
DEFAULT_COMMIT_BYTES = 256 << 20
_REMOTE_READERS = 16


@dataclass(frozen=True)
class CommitPlan:
    """Generations that one commit brings into the base table, ascending.

    ``num_bytes`` is what their rows take in memory, older versions of keys included.
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
        """Rows of all generations; those whose writer did not say how many count as none."""
        return sum(entry.physical_rows or 0 for entry in self.sstables)


@dataclass(frozen=True)
class ShardPlan:
    """The part of one shard. ``after`` is the newest generation that the base held already."""

    uri: str
    shard_id: UUID
    after: int
    commits: tuple[CommitPlan, ...]
    max_commit_bytes: int = DEFAULT_COMMIT_BYTES

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
        """With a key, about: rows that later generations replace need none, many deleted keys one more."""
        return sum(max(1, -(-commit.num_bytes // self.max_commit_bytes)) for commit in self.commits)

    def to_dict(self) -> dict[str, Any]:
        return {
            "uri": self.uri,
            "shard_id": str(self.shard_id),
            "after": self.after,
            "max_commit_bytes": self.max_commit_bytes,
            "commits": [
                {
                    "num_bytes": commit.num_bytes,
                    "sstables": [
                        {
                            "generation": entry.generation,
                            "path": entry.path,
                            "in_memory_bytes": entry.in_memory_bytes,
                            "physical_rows": entry.physical_rows,
                            "primary_key_bytes": entry.primary_key_bytes,
                        }
                        for entry in commit.sstables
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
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInputError(f"this is no compaction plan of a shard: {error!r}") from error


@dataclass(frozen=True)
class CompactionPlan:
    """All shards that have something to compact; ``base_version`` is the one the plan was made for."""

    uri: str
    base_version: int
    has_key: bool
    shards: tuple[ShardPlan, ...]

    def __bool__(self) -> bool:
        return bool(self.shards)

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def commits_expected(self) -> int:
        """About how many versions of the base table this makes."""
        if self.has_key:
            return sum(shard.commits_expected for shard in self.shards)
        # Rows and marker of each shard, and in the end the tags of all.
        return 2 * len(self.shards) + bool(self.shards)

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
        except ValueError as error:
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
    base: BaseTable,
    store: ObjectStore,
    shards: Sequence[UUID | str] | None = None,
    *,
    max_commit_bytes: int = DEFAULT_COMMIT_BYTES,
) -> CompactionPlan:
    """Which SSTables the base table does not hold yet, of all shards or of some.

    Generations are grouped until a group has ``max_commit_bytes``. One that is larger by itself
    takes several commits, of which the last one carries its marker.
    """
    if max_commit_bytes < 1:
        raise InvalidInputError(f"max_commit_bytes must be at least 1, got {max_commit_bytes}")
    shard_ids = discover_shards(store) if shards is None else [layout.parse_shard_id(s) for s in shards]
    manifests = read_manifests(store, shard_ids)
    missing = [s for s, manifest in zip(shard_ids, manifests, strict=True) if manifest is None]
    if missing:
        raise InvalidInputError(f"there are no shards {', '.join(map(str, missing))} in {store.uri}")
    # After the manifests: in an older version pruned generations would look lost.
    base = BaseTable.open(base.uri, base.storage_options, store=store)
    has_key = bool(base.schema.primary_key)
    plans = []
    for manifest in manifests:
        assert manifest is not None
        if marker := copied_marker(base, store, manifest):
            raise DifferentHistoryError(
                f"the table is a copy, and generations of its shard {manifest.shard_id} are at or below the "
                f"marker {marker} that came along: they cannot be marked as compacted. table.flush(), or a "
                "writer that is opened with lancewal, gives them numbers above it"
            )
        after = held_generation(base, store, manifest)
        pending = pending_sstables(manifest, after)
        if pending:
            sizes = list(ordered_map(_sizer(store, manifest.shard_id), pending, _workers(store)))
            limit = max_commit_bytes if has_key else sum(sizes)
            commits = tuple(_grouped(pending, sizes, limit))
            plans.append(ShardPlan(base.uri, manifest.shard_id, after, commits, max_commit_bytes))
    return CompactionPlan(base.uri, base.version, has_key, tuple(plans))


def pending_sstables(manifest: ShardManifest, after: int) -> list[SsTableEntry]:
    """The SSTables above generation ``after``, ascending; refuses a list with holes.

    Marking past a hole would say that the base holds rows that nobody has.
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


def _sizer(store: ObjectStore, shard_id: UUID) -> Any:
    def size(entry: SsTableEntry) -> int:
        if entry.in_memory_bytes is not None:
            return entry.in_memory_bytes
        # What is on storage is smaller than in memory, but of the same order.
        return sum(info.size for info in store.list(layout.sstable_dir(shard_id, entry.path)))

    return size


def _workers(store: ObjectStore) -> int:
    return 1 if store.is_local else _REMOTE_READERS


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
