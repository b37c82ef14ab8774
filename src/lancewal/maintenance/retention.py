"""How long garbage stays."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from lancewal.errors import InvalidInputError
from lancewal.storage import MIN_DELETION_AGE


class Resource(enum.StrEnum):
    """What can be collected, in the order in which it is."""

    MANIFEST_ENTRIES = "manifest_entries"
    WAL_ENTRIES = "wal_entries"
    SSTABLES = "sstables"
    ORPHANS = "orphans"
    MANIFEST_VERSIONS = "manifest_versions"
    STAGING_FILES = "staging_files"


#: Slots that a writer may still believe free (see ``lancewal.storage.clock``), and files that a live
#: process may be writing.
_NEVER_YOUNG = (
    Resource.WAL_ENTRIES,
    Resource.ORPHANS,
    Resource.MANIFEST_VERSIONS,
    Resource.STAGING_FILES,
)


@dataclass(frozen=True)
class Retention:
    """The least age of each resource.

    - ``manifest_entries``: the time since the base table took the generation over. Entries of
      compacted generations help nobody, and mislead readers that do not know markers: none.
    - ``sstables``: the same, for directories of compacted generations. Reads that began before
      may still be going on, and Lance's own writers keep a list from when they were opened.
    - ``orphans``: directories that no manifest names, since their last file was written. A bulk load
      must be published within this time.
    - ``wal_entries``: since the entry was written. Followers of the WAL that are further behind
      get a ``WalTruncatedError``.
    - ``manifest_versions``: since the version was written.
    - ``staging_files``: since the file was last written to.

    The first two also wait for indexes that have not caught up, and for base versions that are
    tagged and do not hold the generation; with ``for_all_versions`` for every base version that
    still exists and was the newest one while the SSTable was there, until it is cleaned up.

    Ages are by the storage's clock, and, since any clock may be wrong, also by what collections
    have seen: nothing goes before one of them saw it, that long ago (``lancewal.maintenance.looks``).

    All but the first two must be at least ten minutes: it takes writers that long to
    notice that they were stopped, and that a slot may have been emptied meanwhile.
    ``allow_unsafe`` lifts that for tests; with it a stalled writer may lose rows.
    """

    manifest_entries: timedelta = timedelta(0)
    sstables: timedelta = timedelta(days=1)
    orphans: timedelta = timedelta(days=1)
    wal_entries: timedelta = timedelta(days=1)
    manifest_versions: timedelta = timedelta(days=1)
    staging_files: timedelta = timedelta(days=1)
    for_all_versions: bool = False
    allow_unsafe: bool = False

    def __post_init__(self) -> None:
        for resource in Resource:
            age = self.least_age(resource)
            safe = MIN_DELETION_AGE if resource in _NEVER_YOUNG and not self.allow_unsafe else timedelta(0)
            if age < safe:
                raise InvalidInputError(
                    f"{resource} must be kept for at least {safe}, not {age}: a writer that stood still "
                    "might lose rows"
                )

    @classmethod
    def of(cls, min_age: timedelta) -> Retention:
        """One age for all resources; where it is below what is safe, that counts instead.

        >>> Retention.of(timedelta(0)).sstables, Retention.of(timedelta(0)).wal_entries
        (datetime.timedelta(0), datetime.timedelta(seconds=600))
        """
        ages: dict[str, Any] = {
            resource.value: max(min_age, MIN_DELETION_AGE) if resource in _NEVER_YOUNG else min_age
            for resource in Resource
        }
        return replace(cls(), **ages)

    def least_age(self, resource: Resource) -> timedelta:
        age: timedelta = getattr(self, resource.value)
        return age


# What a collection deleted, or would delete, and what it left for which reason.


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
