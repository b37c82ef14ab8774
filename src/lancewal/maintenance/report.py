"""What a compaction did."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeAlias
from uuid import UUID


@dataclass(frozen=True)
class Progress:
    """One step of a compaction. ``rows`` are those that the base has taken of this shard so far."""

    shard_id: UUID
    step: str
    through: int
    rows: int


ProgressCallback: TypeAlias = Callable[[Progress], object]


@dataclass
class ShardReport:
    """One shard. ``skipped`` are generations that somebody else had compacted meanwhile.

    ``rows_in`` counts every row of the generations, ``rows_inserted`` and ``rows_updated`` those
    that reached the base, ``rows_deleted`` those that left it. ``rows_replaced`` were older
    versions of keys that later generations had again, or tombstones.
    """

    shard_id: UUID
    generations: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    rows_in: int = 0
    rows_inserted: int = 0
    rows_updated: int = 0
    rows_deleted: int = 0
    num_bytes: int = 0
    commits: int = 0
    retries: int = 0
    seconds: float = 0.0

    @property
    def through(self) -> int:
        """The newest generation that the base holds of the plan's."""
        return max([*self.generations, *self.skipped], default=0)

    @property
    def rows_upserted(self) -> int:
        return self.rows_inserted + self.rows_updated

    @property
    def rows_replaced(self) -> int:
        return self.rows_in - self.rows_upserted

    def add(self, later: ShardReport) -> None:
        """Take up a further part of the same shard."""
        for each in fields(self):
            if each.name != "shard_id":
                setattr(self, each.name, getattr(self, each.name) + getattr(later, each.name))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "shard_id": str(self.shard_id)}


@dataclass
class CompactionReport:
    """All shards, and what followed on the base table itself."""

    uri: str
    shards: list[ShardReport] = field(default_factory=list)
    base_version: int = 0
    seconds: float = 0.0
    indexes_optimized: bool = False
    files_removed: int = 0
    files_added: int = 0

    @property
    def generations(self) -> int:
        """How many generations were compacted."""
        return sum(len(shard.generations) for shard in self.shards)

    @property
    def rows_in(self) -> int:
        return sum(shard.rows_in for shard in self.shards)

    @property
    def rows_upserted(self) -> int:
        return sum(shard.rows_upserted for shard in self.shards)

    @property
    def rows_deleted(self) -> int:
        return sum(shard.rows_deleted for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def commits(self) -> int:
        return sum(shard.commits for shard in self.shards)

    @property
    def retries(self) -> int:
        return sum(shard.retries for shard in self.shards)

    def to_dict(self) -> dict[str, Any]:
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "shards"}
        totals = {name: getattr(self, name) for name in _TOTALS}
        return {**own, **totals, "shards": [shard.to_dict() for shard in self.shards]}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


_TOTALS = ("generations", "rows_in", "rows_upserted", "rows_deleted", "num_bytes", "commits", "retries")
