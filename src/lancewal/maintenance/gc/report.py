"""What a collection deleted, or would delete, and what it left for which reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from lancewal.maintenance.gc.retention import Resource


@dataclass(frozen=True)
class Collected:
    """Something that was deleted. ``name`` is relative to the shard's directory."""

    resource: Resource
    shard_id: UUID | None
    name: str
    num_bytes: int = 0


@dataclass(frozen=True)
class Kept:
    """Garbage that something still needs."""

    resource: Resource
    shard_id: UUID | None
    name: str
    reason: str


@dataclass
class GcReport:
    """``dry_run`` means that nothing was deleted: ``collected`` is what would have been."""

    uri: str
    dry_run: bool = False
    collected: list[Collected] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.collected)

    def of(self, resource: Resource) -> list[Collected]:
        return [each for each in self.collected if each.resource is resource]

    def names(self, resource: Resource) -> list[str]:
        return [each.name for each in self.of(resource)]

    def counts(self) -> dict[str, int]:
        return {str(resource): len(self.of(resource)) for resource in Resource}

    def to_dict(self) -> dict[str, Any]:
        return {
            "uri": self.uri,
            "dry_run": self.dry_run,
            "seconds": self.seconds,
            "num_bytes": self.num_bytes,
            "counts": self.counts(),
            "collected": [_plain(each) for each in self.collected],
            "kept": [_plain(each) for each in self.kept],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        verb = "would delete" if self.dry_run else "deleted"
        counts = ", ".join(f"{count} {name}" for name, count in self.counts().items() if count)
        yield f"{verb} {counts or 'nothing'}, {self.num_bytes / 1e6:.1f} MB"
        for kept in self.kept:
            yield f"kept {kept.resource} {kept.name} of {kept.shard_id}: {kept.reason}"


def _plain(each: Collected | Kept) -> dict[str, Any]:
    plain = {key: getattr(each, key) for key in each.__dataclass_fields__}
    return {
        **plain,
        "resource": str(each.resource),
        "shard_id": str(each.shard_id) if each.shard_id else None,
    }
