"""Why garbage has to stay: its least age, who still needs it, and when it was first seen.

**Who needs it.** A reader leaves out the generations that its base version holds. So base versions that do
not hold a compacted generation yet need its SSTables. These are versions that were the newest one until
recently, because reads of them may still be running, and versions that somebody tagged. A search
over an index that has not caught up with the generation needs its SSTables too.

**When it was first seen.** The timestamps of objects come from a clock that may step by hours: the clock of
a storage server, or of this machine if the table is on its disk. If timestamps alone decided, a collection
could empty a slot that was filled a moment ago, while a stalled writer still believes the slot free. So a
timestamp alone never decides. Each collection leaves a record of what it saw (a *look*). Garbage is deleted
only if a look that saw it is as old as the garbage must be.

Machines measure the age of a look themselves, each by its clock since boot. A record states, for each
clock, a reading at which the look had already been made. A machine that finds a reading of its own clock
knows the time since then. Another machine, or one that has booted since, starts from the age that
is proven so far, and counts on from there. So ages may come out too small, never too large. All statements
in a record stay true, so it does not matter which of two collectors writes last.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any
from uuid import UUID

from lancewal.base import BaseTable, retained_versions, tagged_versions
from lancewal.errors import InvalidInputError
from lancewal.format import (
    MEM_WAL_INDEX_NAME,
    ShardManifest,
    decode_record,
    encode_record,
    read_base_manifest,
)
from lancewal.maintenance.checkpoints import is_checkpoint_tag
from lancewal.maintenance.reports import Resource
from lancewal.storage import MIN_DELETION_AGE, HostClock, ObjectInfo, ObjectStore, layout

logger = logging.getLogger(__name__)

#: Resources that must never be deleted young: slots that a writer may still believe free (see
#: ``lancewal.storage.clock``), and files that a live process may be writing.
_NEVER_YOUNG = (
    Resource.WAL_ENTRIES,
    Resource.ORPHANS,
    Resource.MANIFEST_VERSIONS,
    Resource.STAGING_FILES,
)


@dataclass(frozen=True)
class Retention:
    """The least age of each resource.

    - ``manifest_entries``: since the generation was compacted. The default is zero: entries of
      compacted generations help nobody, and mislead readers that do not know markers.
    - ``sstables``: directories of compacted generations, since the compaction. Reads that began before
      may still be running, and Lance's own writers keep the list from when they were opened.
    - ``orphans``: directories that no manifest names, since their last file was written. A bulk load
      must be published within this time.
    - ``wal_entries``: since the entry was written. Followers of the WAL that are further behind
      get a ``WalTruncatedError``.
    - ``manifest_versions``: since the version was written.
    - ``staging_files``: since the file was last written to. The same age applies to the owner
      records of processes that are gone.

    The first two also wait for indexes that have not caught up, and for tagged base versions that do
    not hold the generation. With ``for_all_versions`` they wait for every base version that still exists
    and was the newest one while the SSTable existed, until it is cleaned up.

    Ages are measured by the storage's clock. Since any clock may be wrong, an earlier collection must
    also have seen the garbage at least that long ago (see :class:`Looks`).

    All but the first two must be at least ten minutes: it takes writers that long to
    notice that they were stopped, and that a slot may have been emptied meanwhile.
    ``allow_unsafe`` removes this limit for tests; with it a stalled writer may lose rows.
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
            age = _checked(resource, self.least_age(resource))
            safe = MIN_DELETION_AGE if resource in _NEVER_YOUNG and not self.allow_unsafe else timedelta(0)
            if age < safe:
                raise InvalidInputError(
                    f"{resource} must be kept for at least {safe}, not {age}: a writer that stood still "
                    "might lose rows"
                )

    @classmethod
    def of(cls, min_age: timedelta) -> Retention:
        """One age for all resources, raised to the safe minimum where a resource has one.

        >>> Retention.of(timedelta(0)).sstables, Retention.of(timedelta(0)).wal_entries
        (datetime.timedelta(0), datetime.timedelta(seconds=600))
        """
        _checked("everything", min_age)
        ages: dict[str, Any] = {
            resource.value: max(min_age, MIN_DELETION_AGE) if resource in _NEVER_YOUNG else min_age
            for resource in Resource
        }
        return replace(cls(), **ages)

    def least_age(self, resource: Resource) -> timedelta:
        age: timedelta = getattr(self, resource.value)
        return age


def _checked(what: str, age: object) -> timedelta:
    if not isinstance(age, timedelta):
        raise InvalidInputError(f"the age for {what} must be a timedelta, not {age!r}")
    return age


@dataclass(frozen=True)
class _Version:
    """One retained base version; ``superseded`` is when the next version came, ``None`` for the newest."""

    number: int
    path: str
    superseded: datetime | None


@dataclass(frozen=True)
class _Tagged:
    name: str
    version: _Version
    markers: Mapping[UUID, int]


@dataclass
class Needs:
    """What a table still needs at ``now``, a time by the storage's clock. Thread-safe."""

    base: BaseTable
    store: ObjectStore
    now: datetime
    for_all_versions: bool = False
    #: The tagged base versions, if the caller has read them already.
    tags: Mapping[str, int] | None = None
    _floors: dict[timedelta, Mapping[UUID, int]] = field(default_factory=dict)
    _read: dict[int, Mapping[UUID, int] | None] = field(default_factory=dict)
    #: Held during a read: all shards need the same data, and the first one reads it for all.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reason(
        self, shard_id: UUID, generation: int, min_age: timedelta, created: Callable[[], datetime | None]
    ) -> str | None:
        """Why the SSTable of a compacted generation has to stay; ``None`` if it need not.

        ``created`` returns when it was written. It is called only for a tagged version that does not hold the
        generation, or with ``for_all_versions``.
        """
        with self._lock:
            return self._reason(shard_id, generation, min_age, created)

    def _reason(
        self, shard_id: UUID, generation: int, min_age: timedelta, created: Callable[[], datetime | None]
    ) -> str | None:
        if generation > self._floor(min_age).get(shard_id, 0):
            # Whole days are shown without their zero hours.
            age = str(min_age).removesuffix(", 0:00:00")
            return f"the base table took it over less than {age} ago"
        if (lagging := self.awaited_by_index(shard_id, generation)) is not None:
            return lagging
        for tagged in self._tagged:
            if generation > tagged.markers.get(shard_id, 0) and _met(tagged.version, created()):
                return f"base version {tagged.version.number}, tagged {tagged.name!r}, does not hold its rows"
        if self.for_all_versions:
            number = self._version_without(shard_id, generation, created())
            if number is not None:
                return f"base version {number} does not hold its rows; clean up old versions"
        return None

    def awaited_by_index(self, shard_id: UUID, generation: int) -> str | None:
        """Why an index needs the SSTable, ``None`` if none does. Makes no request."""
        for name in self._lagging_indexes:
            caught_up = self.base.details.index_catchup.get(name, {}).get(shard_id, 0)
            if generation > caught_up:
                return f"index {name!r} has caught up to generation {caught_up} only; optimise the indexes"
        return None

    def has_tags(self) -> bool:
        """Whether base versions that still exist are tagged, other than by checkpoints."""
        with self._lock:
            return bool(self._tagged)

    def _floor(self, min_age: timedelta) -> Mapping[UUID, int]:
        """The generations that every base version holds that was the newest one within ``min_age``."""
        if min_age <= timedelta(0):
            return self.base.details.compacted
        if min_age not in self._floors:
            self._floors[min_age] = self._read_floor(min_age)
        return self._floors[min_age]

    def _read_floor(self, min_age: timedelta) -> Mapping[UUID, int]:
        stored = self.base.details.compacted
        since = self.now - min(min_age, self.now - datetime.min.replace(tzinfo=self.now.tzinfo))
        # Markers only grow, so the oldest of these versions holds the least.
        for version in self._versions:
            if version.number >= self.base.version:
                break
            if version.superseded is None or version.superseded <= since:
                continue
            held = self._markers(version)
            if held is not None:
                return {shard_id: min(held.get(shard_id, 0), stored[shard_id]) for shard_id in stored}
        return stored

    def _version_without(self, shard_id: UUID, generation: int, created: datetime | None) -> int | None:
        """The oldest version that was the newest one while the SSTable existed, if it does not hold it."""
        for version in self._versions:
            if _met(version, created):
                held = self._markers(version)
                if held is not None:
                    return None if generation <= held.get(shard_id, 0) else version.number
        return None

    @cached_property
    def _versions(self) -> list[_Version]:
        infos = retained_versions(self.store)
        superseded = [*(info.modified for info in infos.values()), None][1:]
        return [
            _Version(number, info.path, after)
            for (number, info), after in zip(infos.items(), superseded, strict=True)
        ]

    @cached_property
    def _tagged(self) -> list[_Tagged]:
        tags = tagged_versions(self.base.dataset) if self.tags is None else self.tags
        by_number = {version.number: version for version in self._versions} if tags else {}
        found = []
        for name, number in sorted(tags.items()):
            if is_checkpoint_tag(name):
                continue  # the checkpoint's record says what it needs
            version = by_number.get(number)
            markers = None if version is None else self._markers(version)
            if version is not None and markers is not None:
                found.append(_Tagged(name, version, markers))
        return found

    @cached_property
    def _lagging_indexes(self) -> list[str]:
        """Maintained indexes that do not cover all fragments of the base table."""
        details, manifest = self.base.details, self.base.manifest
        present = sorted({index.name for index in manifest.indexes} - {MEM_WAL_INDEX_NAME})
        return [
            name
            for name in present
            if (details.maintain_all_indexes or name in details.maintained_indexes)
            # When files are joined, Lance resets its record of how far an index has caught up. The covered
            # fragments are always right.
            and manifest.covered_fragments(name) != manifest.fragment_ids
        ]

    def _markers(self, version: _Version) -> Mapping[UUID, int] | None:
        """The markers of a version; ``None`` if it was cleaned up meanwhile."""
        if version.number not in self._read:
            try:
                details = read_base_manifest(self.store.get(version.path), name=version.path).mem_wal
                self._read[version.number] = details.compacted if details is not None else {}
            except FileNotFoundError:
                self._read[version.number] = None
        return self._read[version.number]


def _met(version: _Version, created: datetime | None) -> bool:
    """Whether a version was the newest one at a time when the SSTable existed."""
    return created is None or version.superseded is None or created <= version.superseded


#: How many machines' readings a look keeps. A machine whose reading was dropped starts from the proven age.
_MAX_CLOCKS = 8
#: A look is removed if the look before it is at most this many times as old as the look after it.
_SPREAD = 1.25


@dataclass(frozen=True)
class Extent:
    """How far a shard had come. Each number only grows.

    ``covered``: WAL positions up to this one are in SSTables. ``version``: the version of the newest
    manifest. ``compacted``: generations up to this one are in the base table.
    """

    covered: int = 0
    version: int = 0
    compacted: int = 0

    def reaches(self, other: Extent) -> bool:
        return all(ours >= theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True))


@dataclass
class _Look:
    """What one collection saw of a shard.

    ``names`` are the files and directories that this look was the first to see, with their content. They
    include those of earlier looks that were thinned out.
    """

    extent: Extent
    names: dict[str, str] = field(default_factory=dict)
    #: The proven age in seconds.
    age: float = 0.0
    #: By clock: a reading at which the look had already been made.
    made_by: dict[str, float] = field(default_factory=dict)

    def measure(self, clock: str, reading: float) -> None:
        made = min(self.made_by.pop(clock, math.inf), reading - self.age)
        self.age = reading - made
        self.made_by[clock] = made
        while len(self.made_by) > _MAX_CLOCKS:
            del self.made_by[next(iter(self.made_by))]


@dataclass(frozen=True)
class StoredLooks:
    """The record of earlier looks at a shard, as it was stored."""

    path: str
    looks: Sequence[_Look] = ()

    @classmethod
    def read(cls, store: ObjectStore, shard_id: UUID | None) -> StoredLooks:
        """The looks at a shard, or with ``None`` at files that belong to no shard."""
        path = f"{layout.LOOKS_DIR}/{'table' if shard_id is None else shard_id}.json"
        try:
            return cls(path, [_parsed(each) for each in decode_record(store.get(path))["looks"]])
        except FileNotFoundError:
            logger.debug("nobody has looked at %s before", path)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            # Without the record nothing is deleted too early: collection starts over.
            logger.warning("%s is damaged and begins anew: %s", path, error)
        return cls(path)


class Looks:
    """The looks at one shard, or at the files that belong to no shard, oldest first.

    ``extent`` is how far the shard has come by now. Not thread-safe.
    """

    def __init__(self, stored: StoredLooks, extent: Extent, clock: HostClock) -> None:
        self._path = stored.path
        self._extent = extent
        self._clock = clock
        # A look that saw more than the shard has now was made before the table was restored.
        self._looks = [look for look in stored.looks if extent.reaches(look.extent)]
        self._measure()

    @classmethod
    def of_shard(
        cls, stored: StoredLooks, manifest: ShardManifest, base: BaseTable, clock: HostClock
    ) -> Looks:
        """The looks at a shard that has come as far as its newest ``manifest`` and ``base`` say."""
        compacted = base.details.compacted.get(manifest.shard_id, 0)
        extent = Extent(manifest.replay_after_wal_entry_position, manifest.version, compacted)
        return cls(stored, extent, clock)

    def record(self, store: ObjectStore, names: Mapping[str, str] | None) -> None:
        """Add a look to the record: what exists now, and was read before this call.

        ``names`` are all unlisted files or directories, with their content; ``None`` if they were not looked
        at.
        """
        if names is not None:
            self._keep_names(names)
        known = {name for look in self._looks for name in look.names}
        new = {name: held for name, held in (names or {}).items() if name not in known}
        if new or not self._looks or self._looks[-1].extent != self._extent:
            self._looks.append(_Look(self._extent, new))
        self._measure()
        self._thin_out()
        data = encode_record({"looks": [_plain(look) for look in self._looks]})
        # If a power cut loses the record, later collections make it again. That only costs time.
        store.put(self._path, data, durable=False)

    def reach(self, which: str, age: timedelta) -> float:
        """How far the shard had come by the newest look that is at least ``age`` old."""
        if age <= timedelta(0):
            return math.inf
        needed = age.total_seconds()
        return max((getattr(look.extent, which) for look in self._looks if look.age >= needed), default=0)

    def unseen(self, which: str, number: int, age: timedelta) -> str | None:
        """Why ``number`` has to wait; ``None`` if a look that is at least ``age`` old saw it."""
        return None if number <= self.reach(which, age) else waits(self.age_of(which, number), age)

    def age_of(self, which: str, number: int) -> timedelta:
        """For how long the shard is known to have reached ``number``."""
        ages = (look.age for look in self._looks if getattr(look.extent, which) >= number)
        return timedelta(seconds=max(ages, default=0.0))

    def age_of_name(self, name: str, content: str) -> timedelta:
        """For how long a file or directory is known to have had this content."""
        ages = (look.age for look in self._looks if look.names.get(name) == content)
        return timedelta(seconds=max(ages, default=0.0))

    def _measure(self) -> None:
        reading = self._clock.read()
        least = 0.0
        for look in reversed(self._looks):
            look.age = max(look.age, least)
            look.measure(self._clock.name, reading)
            least = look.age

    def _keep_names(self, names: Mapping[str, str]) -> None:
        for look in self._looks:
            look.names = {name: held for name, held in look.names.items() if names.get(name) == held}

    def _thin_out(self) -> None:
        """Remove looks between others of similar age; garbage then waits at most a quarter longer."""
        place = 1
        while place < len(self._looks) - 1:
            older, look, younger = self._looks[place - 1 : place + 2]
            if older.age <= _SPREAD * younger.age:
                younger.names |= look.names
                del self._looks[place]
            else:
                place += 1


def content(infos: Sequence[ObjectInfo]) -> str:
    """A summary of a directory's content, which changes when somebody writes to it."""
    newest = max((info.modified.isoformat() for info in infos), default="")
    return f"{len(infos)} files, {sum(info.size for info in infos)} bytes, {newest}"


def waits(age: timedelta, needed: timedelta) -> str:
    """Why garbage stays that was first seen ``age`` ago, and has to have been seen ``needed`` ago."""
    since = f"{_rounded(age)} ago" if age >= timedelta(seconds=1) else "by this collection"
    return f"first seen {since}; goes in a collection {_rounded(needed - age)} from now or later"


def _rounded(span: timedelta) -> timedelta:
    return timedelta(seconds=math.ceil(span.total_seconds()))


def _plain(look: _Look) -> dict[str, Any]:
    return {**asdict(look.extent), "names": look.names, "age": look.age, "made_by": look.made_by}


def _parsed(stored: Mapping[str, Any]) -> _Look:
    extent = Extent(*(int(stored[name]) for name in ("covered", "version", "compacted")))
    names = {str(name): str(held) for name, held in stored["names"].items()}
    made_by = {str(clock): float(reading) for clock, reading in stored["made_by"].items()}
    age = float(stored["age"])
    if not all(map(math.isfinite, (age, *made_by.values()))):
        raise ValueError(f"a look of age {age} with readings {made_by}")
    return _Look(extent, names, age, made_by)
