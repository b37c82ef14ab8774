"""Who still needs the SSTables of a compacted generation.

A reader leaves out the generations that its base version holds. So a generation is needed by
base versions that do not hold it yet: those which were the newest one until a moment ago, because
reads of them are still going on, and those which somebody tagged to come back to. And it is needed
by the search over an index that has not caught up with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from uuid import UUID

from lancewal.base import BaseTable, lance_errors
from lancewal.format import MEM_WAL_INDEX_NAME, parse_manifest_version, read_base_manifest
from lancewal.storage import ObjectStore

logger = logging.getLogger(__name__)

_VERSIONS_DIR = "_versions"


@dataclass(frozen=True)
class _Version:
    """One retained base version; ``superseded`` is when the next one came, ``None`` for the newest."""

    number: int
    path: str
    superseded: datetime | None


@dataclass(frozen=True)
class _Tagged:
    name: str
    version: _Version
    markers: Mapping[UUID, int]


class Needs:
    """The needs of one table at one moment, ``now`` by the storage's clock."""

    def __init__(
        self, base: BaseTable, store: ObjectStore, now: datetime, *, for_all_versions: bool = False
    ) -> None:
        self._base = base
        self._store = store
        self._now = now
        self._for_all_versions = for_all_versions
        self._floors: dict[timedelta, Mapping[UUID, int]] = {}
        self._read: dict[int, Mapping[UUID, int] | None] = {}

    @property
    def base(self) -> BaseTable:
        return self._base

    def marker(self, shard_id: UUID) -> int:
        """The newest generation that the base table holds and says so; tags do not count here."""
        return self._base.details.compacted.get(shard_id, 0)

    def reason(
        self, shard_id: UUID, generation: int, min_age: timedelta, created: Callable[[], datetime | None]
    ) -> str | None:
        """Why the SSTable of a compacted generation has to stay; ``None`` when it need not.

        ``created`` tells when it was written; asked only where a tag makes it matter.
        """
        if generation > self._floor(min_age).get(shard_id, 0):
            # Whole days read better without their zero hours.
            age = str(min_age).removesuffix(", 0:00:00")
            return f"the base table took it over less than {age} ago"
        for tagged in self._tagged:
            if generation > tagged.markers.get(shard_id, 0) and _met(tagged.version, created()):
                return f"base version {tagged.version.number}, tagged {tagged.name!r}, does not hold its rows"
        if self._for_all_versions:
            number = self._version_without(shard_id, generation, created())
            if number is not None:
                return f"base version {number} does not hold its rows; clean up old versions"
        for name in self._lagging_indexes:
            caught_up = self._base.details.index_catchup.get(name, {}).get(shard_id, 0)
            if generation > caught_up:
                return f"index {name!r} has caught up to generation {caught_up} only; optimise the indexes"
        return None

    def _floor(self, min_age: timedelta) -> Mapping[UUID, int]:
        """What all base versions hold that were the newest one within ``min_age``."""
        known = self._floors.get(min_age)
        if known is None:
            known = self._floors[min_age] = self._read_floor(min_age)
        return known

    def _read_floor(self, min_age: timedelta) -> Mapping[UUID, int]:
        stored = self._base.details.compacted
        since = self._now - min_age
        # Markers only grow, so the oldest of them holds least.
        for version in self._versions:
            if version.number >= self._base.version:
                break
            if version.superseded is None or version.superseded <= since:
                continue
            held = self._markers(version)
            if held is not None:
                return {shard_id: min(held.get(shard_id, 0), stored[shard_id]) for shard_id in stored}
        return stored

    def _version_without(self, shard_id: UUID, generation: int, created: datetime | None) -> int | None:
        """The oldest version that was the newest one beside the SSTable, if it does not hold it."""
        for version in self._versions:
            if _met(version, created):
                held = self._markers(version)
                if held is not None:
                    return None if generation <= held.get(shard_id, 0) else version.number
        return None

    @cached_property
    def _versions(self) -> list[_Version]:
        infos = {}
        for info in self._store.list(_VERSIONS_DIR):
            number = parse_manifest_version(info.path.rsplit("/", 1)[-1])
            if number is not None:
                infos[number] = info
        numbers = sorted(infos)
        following = [*numbers[1:], None]
        return [
            _Version(number, infos[number].path, None if after is None else infos[after].modified)
            for number, after in zip(numbers, following, strict=True)
        ]

    @cached_property
    def _tagged(self) -> list[_Tagged]:
        with lance_errors("read the tags of the base table"):
            tags = self._base.dataset.tags.list()
        by_number = {version.number: version for version in self._versions}
        found = []
        for name, tag in sorted(tags.items()):
            version = by_number.get(int(tag["version"]))
            markers = None if version is None else self._markers(version)
            if version is not None and markers is not None:
                found.append(_Tagged(name, version, markers))
        return found

    @cached_property
    def _lagging_indexes(self) -> list[str]:
        """Maintained indexes that do not cover all fragments of the base table."""
        details, manifest = self._base.details, self._base.manifest
        present = sorted({index.name for index in manifest.indexes} - {MEM_WAL_INDEX_NAME})
        return [
            name
            for name in present
            if (details.maintain_all_indexes or name in details.maintained_indexes)
            # Joining files resets what Lance notes of the catch-up; the fragments tell anyway.
            and manifest.covered_fragments(name) != manifest.fragment_ids
        ]

    def _markers(self, version: _Version) -> Mapping[UUID, int] | None:
        """``None`` when the version was cleaned up meanwhile."""
        if version.number not in self._read:
            try:
                details = read_base_manifest(self._store.get(version.path), name=version.path).mem_wal
                self._read[version.number] = details.compacted if details is not None else {}
            except FileNotFoundError:
                self._read[version.number] = None
        return self._read[version.number]


def _met(version: _Version, created: datetime | None) -> bool:
    """Whether a version was the newest one at a time when the SSTable was there."""
    return created is None or version.superseded is None or created <= version.superseded
