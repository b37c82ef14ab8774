"""How long garbage stays."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from lancewal.clock import MIN_DELETION_AGE
from lancewal.errors import InvalidInputError


class Resource(enum.StrEnum):
    """What can be collected, in the order in which it is."""

    MANIFEST_ENTRIES = "manifest_entries"
    WAL_ENTRIES = "wal_entries"
    SSTABLES = "sstables"
    ORPHANS = "orphans"
    MANIFEST_VERSIONS = "manifest_versions"
    STAGING_FILES = "staging_files"


#: Slots that a writer may still believe free (see ``lancewal.clock``), and files that a live
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
    have seen: nothing goes before one of them saw it, that long ago (``lancewal.maintenance.gc.looks``).

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
