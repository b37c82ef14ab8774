"""The garbage of one shard: what it is, what of it is deleted, and in which order.

Every step leaves a consistent state, even if a store carries out only a part of it.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property, partial

from lancewal.errors import DifferentHistoryError
from lancewal.format import ShardManifest, SsTableEntry
from lancewal.maintenance.checkpoints import NeededFiles
from lancewal.maintenance.commits import crash_point
from lancewal.maintenance.needs import Looks, Needs, Retention
from lancewal.maintenance.reports import Collected, GcReport, Kept, Resource
from lancewal.publish import Unsettled
from lancewal.shard import ShardManifestStore
from lancewal.sstable import copy_of, held_generation
from lancewal.storage import (
    DELETED_AT_ONCE,
    ObjectInfo,
    ObjectStore,
    Once,
    Shelf,
    layout,
    numbered,
    ordered_map,
)

logger = logging.getLogger(__name__)

#: How many versions of a manifest are read ahead, before it is known that they are needed.
_VERSIONS_AHEAD = 8
#: How many versions of a manifest one request deletes. More would not be safe: see
#: :func:`collect_manifest_versions`.
_VERSIONS_AT_ONCE = 2

#: By store and version of a manifest: the SSTables that it names, with their generations.
_named: Shelf[Hashable, Mapping[str, int]] = Shelf()


@dataclass
class ShardGarbage:
    """One shard during one collection: the state that the collectors of all resources share.

    ``infos`` are the shard's files, listed before ``manifest`` was read.
    """

    store: ObjectStore
    manifests: ShardManifestStore
    manifest: ShardManifest
    infos: Sequence[ObjectInfo]
    needs: Needs
    looks: Looks
    checkpoints: Once[NeededFiles]
    unsettled: Once[Unsettled]
    retention: Retention
    report: GcReport
    #: How many requests this shard may have in flight.
    workers: int = 1
    #: SSTables whose manifest entries this collection pruned, or would prune: path, generation.
    pruned: dict[str, int] = field(default_factory=dict)
    #: WAL positions that this collection deleted, or would delete.
    deleted_positions: set[int] = field(default_factory=set)
    _once_listed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shard_id = self.manifest.shard_id
        self.dry_run = self.report.dry_run

    @cached_property
    def marker(self) -> int:
        """The newest generation of this shard that the base table holds; 0 while that is in doubt.

        Never above the stored marker: a generation that only a tag covers counts as not compacted yet. The
        markers of a copied table are not about the generations of the copy, so those stay.
        """
        base = self.needs.base
        marker = base.details.compacted.get(self.shard_id, 0)
        try:
            return min(marker, held_generation(base, self.store, self.manifest)) if marker else 0
        except DifferentHistoryError as error:
            logger.warning("nothing of the shard counts as compacted: %s", error)
            return 0

    @cached_property
    def wal_infos(self) -> dict[int, ObjectInfo]:
        """The WAL's entries by position, ascending."""
        return numbered(self.infos, layout.wal_dir(self.shard_id), layout.parse_wal_name)

    @cached_property
    def manifest_infos(self) -> dict[int, ObjectInfo]:
        """The versions of the manifest, ascending, without the one that this collection's pruning made."""
        return numbered(self.infos, layout.manifest_dir(self.shard_id), layout.parse_manifest_name)

    @cached_property
    def _by_directory(self) -> dict[str, list[ObjectInfo]]:
        """The shard's files by directory; a symbolic link is its own directory."""
        shard = layout.shard_dir(self.shard_id)
        # Local disks may have empty directories; remote stores have none.
        present = self.store.list_directories(shard) if self.store.is_local else []
        found: dict[str, list[ObjectInfo]] = {name: [] for name in present}
        for info in self.infos:
            name, below, _ = info.path[len(shard) + 1 :].partition("/")
            if below or name in found:
                found.setdefault(name, []).append(info)
        return dict(sorted(found.items()))

    def files(self, directory_name: str) -> Sequence[ObjectInfo]:
        """The files in one of the shard's directories; for a symbolic link, the link."""
        return self._by_directory.get(directory_name, [])

    def first_written(self, directory_name: str) -> datetime | None:
        """When the first file of an SSTable was written; ``None`` if it has no files."""
        return min((info.modified for info in self.files(directory_name)), default=None)

    def unlisted(self) -> list[str]:
        """The directories of SSTables that the manifest does not name."""
        listed = {entry.path for entry in self.manifest.sstables} - self.pruned.keys()
        return [
            name
            for name in self._by_directory
            if name not in listed and layout.parse_sstable_name(name) is not None
        ]

    def once_generation(self, name: str) -> int | None:
        """The generation under which a retained manifest version names an SSTable; ``None`` if none does.

        Reads versions newest first, and only as many as needed. A version never changes, so its content is
        cached.
        """
        known = self._once_listed
        known.update(self.pruned)
        while name not in known and self._unread_versions:
            ahead = min(self.workers, _VERSIONS_AHEAD)
            some = [self._unread_versions.pop() for _ in range(min(ahead, len(self._unread_versions)))]
            for named in ordered_map(self._named_by, some, ahead):
                # The newest version that names it counts.
                known |= {path: generation for path, generation in named.items() if path not in known}
        return known.get(name)

    def _named_by(self, version: int) -> Mapping[str, int]:
        info = self.manifest_infos[version]

        def read() -> Mapping[str, int]:
            try:
                manifest = self.manifests.read_version(version)
            except FileNotFoundError:
                return {}
            return {entry.path: entry.generation for entry in manifest.sstables}

        return _named.get_or_make((self.store.identity, info), read, lambda named: 200 * len(named))

    @cached_property
    def _unread_versions(self) -> list[int]:
        return list(self.manifest_infos)

    def is_old(self, modified: datetime, age: timedelta) -> bool:
        """Whether a timestamp is old enough; a deletion also needs an old enough look (see ``looks``)."""
        return self.needs.now - modified >= age

    def needed(self, generation: int, age: timedelta, path: str) -> str | None:
        """Why the SSTable of a compacted generation has to stay; ``None`` if it need not."""
        created = partial(self.first_written, path)
        reason = self.needs.reason(self.shard_id, generation, age, created)
        return reason or self.looks.unseen("compacted", generation, age)

    def collected(self, resource: Resource, name: str, num_bytes: int = 0) -> None:
        self.report.collected.append(Collected(resource, self.shard_id, name, num_bytes))

    def kept(self, resource: Resource, name: str, reason: str) -> None:
        self.report.kept.append(Kept(resource, self.shard_id, name, reason))


def prune_manifest_entries(shard: ShardGarbage) -> None:
    """Prune entries of generations that the base table holds; does not change the writer's epoch."""
    prunable = [
        entry
        for entry in shard.manifest.sstables
        if entry.generation <= shard.marker and not _entry_stays(shard, entry)
    ]
    if not prunable:
        return
    shard.pruned = {entry.path: entry.generation for entry in prunable}
    if not shard.dry_run:
        # A job that is rerun finds its earlier run by these entries, so record them first.
        shard.unsettled.get().preserve(shard.shard_id, sstables=shard.pruned.keys())
        shard.manifest = shard.manifests.commit_update(None, lambda manifest: manifest.without(prunable))
        crash_point("collect: manifest entries are pruned")
    pruned = (Collected(Resource.MANIFEST_ENTRIES, shard.shard_id, path) for path in shard.pruned)
    shard.report.collected.extend(pruned)


def _entry_stays(shard: ShardGarbage, entry: SsTableEntry) -> bool:
    copy = copy_of(shard.store)
    if copy is not None and entry.generation <= copy.markers.get(shard.shard_id, 0):
        reason: str | None = "the table is a copy, and the marker that came along is not about it"
    else:
        reason = shard.needed(entry.generation, shard.retention.manifest_entries, entry.path)
    if reason is not None:
        shard.kept(Resource.MANIFEST_ENTRIES, entry.path, reason)
    return reason is not None


def collect_manifest_versions(shard: ShardGarbage) -> None:
    """Delete old versions of the shard's manifest, two at a time, in ascending order.

    A process that knows an older version probes for the next ones. It takes a version without a successor
    for the newest, and would claim the shard again from there. A bulk request may be carried out partly, in
    any order. Of two versions, it can leave only the lower one: nobody builds on that one, because
    the version below it is gone (``lancewal.shard.manifest``). Of three, it could leave two with a gap above
    them. Lance's own writers start at the hint and never look below it, so the hint has to be above all
    deleted versions.
    """
    infos = shard.manifest_infos
    # Pruning writes a new version, so all listed ones are superseded. A dry run counts them in the same way.
    superseded = list(infos) if shard.pruned else list(infos)[:-1]
    age = shard.retention.manifest_versions
    doomed = []
    for version in superseded:
        if not shard.is_old(infos[version].modified, age):
            break
        if reason := shard.looks.unseen("version", version, age):
            shard.kept(Resource.MANIFEST_VERSIONS, f"manifest/{version}", reason)
            break
        doomed.append(version)
    if doomed and not shard.dry_run and (shard.manifests.read_hint() or 0) <= doomed[-1]:
        shard.manifests.repair_hint()
    for start in range(0, len(doomed), _VERSIONS_AT_ONCE):
        some = doomed[start : start + _VERSIONS_AT_ONCE]
        if not shard.dry_run:
            shard.store.delete_many([infos[version].path for version in some])
            crash_point("collect: an old manifest is deleted")
        for version in some:
            shard.collected(Resource.MANIFEST_VERSIONS, f"manifest/{version}", infos[version].size)


def collect_wal_entries(shard: ShardGarbage) -> None:
    """Delete WAL entries whose rows are in SSTables, in ascending steps of many entries.

    The last entry always stays, covered or not: Lance's own writers look there for the end of the
    WAL. Without it they would begin again at position 1, and put their fence where no other writer finds it.

    A step may be carried out partly, in any order, so it may leave a hole with entries below it.
    Nobody takes that hole for the end of the WAL:

    - our writers look for the end above the replay cursor, and every deleted entry is at or below it;
    - Lance's writers begin at the position that the newest manifest saw last, and go up to the first
      missing one. If their first one is missing already, they list the WAL. A flush, ours or Lance's,
      sets that position to the cursor or above. If somebody set the cursor alone, the position may be among
      the deleted ones. Then a step ends at that position, and the next step begins when it is gone;
    - a follower that is so far behind reads up to the hole and gets ``WalTruncatedError``, as it
      would if all of them were gone;
    - the next collection deletes what is left below the hole, as it does with a stalled writer's entry.
    """
    doomed = _doomed_positions(shard)
    if not doomed:
        return
    if not shard.dry_run:
        # A job that is rerun finds its earlier run by these entries, so record them first. The unsettled
        # transactions are read after the listing. Entries that stay below these are looked at too, because
        # no entry below the last one is believed any more.
        positions = range(min(shard.wal_infos), doomed[-1] + 1)
        shard.unsettled.get().preserve(shard.shard_id, positions=positions)
    for some in _steps(doomed, shard.manifest.wal_entry_position_last_seen):
        if not shard.dry_run:
            shard.store.delete_many([shard.wal_infos[position].path for position in some])
            crash_point("collect: a WAL entry is deleted")
        for position in some:
            shard.deleted_positions.add(position)
            shard.collected(Resource.WAL_ENTRIES, f"wal/{position}", shard.wal_infos[position].size)


def _steps(positions: Sequence[int], last_seen: int) -> Iterator[Sequence[int]]:
    """The ascending ``positions`` in steps that one request deletes; ``last_seen`` ends a step.

    >>> list(_steps([1, 2, 3, 5], last_seen=2))
    [[1, 2], [3, 5]]
    """
    end = bisect_right(positions, last_seen)
    for part in (positions[:end], positions[end:]):
        for start in range(0, len(part), DELETED_AT_ONCE):
            yield part[start : start + DELETED_AT_ONCE]


def _doomed_positions(shard: ShardGarbage) -> list[int]:
    """Covered positions that are old enough, ascending, without the last entry of the WAL."""
    infos = shard.wal_infos
    last_run = max(infos, default=0)
    while last_run - 1 in infos:
        last_run -= 1
    doomed = []
    age = shard.retention.wal_entries
    checkpoints, last_seen = shard.checkpoints.get(), shard.manifest.wal_entry_position_last_seen
    # While the entry at ``last_seen`` stays, Lance's writers would take a hole above it for the WAL's end.
    last_seen_stays = checkpoints.needs_entry(shard.shard_id, last_seen) is not None
    for position in list(infos)[:-1]:
        if position > shard.manifest.replay_after_wal_entry_position:
            break
        if last_seen_stays and position > last_seen:
            break
        if reason := checkpoints.needs_entry(shard.shard_id, position):
            shard.kept(Resource.WAL_ENTRIES, f"wal/{position}", reason)
        elif shard.is_old(infos[position].modified, age):
            if reason := shard.looks.unseen("covered", position, age):
                shard.kept(Resource.WAL_ENTRIES, f"wal/{position}", reason)
                break
            doomed.append(position)
        elif position >= last_run:
            break
        # A young entry below the last run was written into an emptied slot by a stalled writer: skip it.
    return doomed
