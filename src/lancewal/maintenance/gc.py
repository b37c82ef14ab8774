"""Garbage collection: what neither a writer, a reader nor a retained version needs any more.

The collector claims no shard. It may run beside writers, readers, compactors and other
collectors, and may be killed anywhere: every step leaves a state that is whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.errors import DifferentHistoryError, InvalidInputError
from lancewal.format import ShardManifest, SsTableEntry
from lancewal.maintenance import points
from lancewal.maintenance.commits import sync_file_system
from lancewal.maintenance.looks import Extent, Looks, held, unseen
from lancewal.maintenance.needs import Needs
from lancewal.maintenance.retention import Collected, GcReport, Kept, Resource, Retention
from lancewal.publish import STAGED_DELETION_AGE, SsTablePointer, Unsettled, is_staged
from lancewal.shard import ShardManifestStore, WalTailer, discover_shards, read_manifests
from lancewal.sstable import copy_of, forget_sstable, held_generation
from lancewal.storage import HostClock, ObjectInfo, ObjectStore, host_clock, layout, ordered_map

logger = logging.getLogger(__name__)

# What the collectors of one shard share.


def storage_time(store: ObjectStore, *, dry_run: bool) -> datetime:
    """The time by the clock that stamps objects, also on local disks, which may be mounted.

    A dry run writes nothing, and goes by this machine's clock.
    """
    if dry_run:
        return datetime.now(UTC)
    store.put(f"{layout.CLOCK_DIR}/now", b"", durable=False)
    # By a listing, like all other times: those of single objects may be rounded differently.
    stamps = [info.modified for info in store.list(layout.CLOCK_DIR)]
    return max(stamps, default=datetime.now(UTC))


@dataclass
class ShardContext:
    """One shard during one collection."""

    store: ObjectStore
    shard_id: UUID
    manifest: ShardManifest
    needs: Needs
    retention: Retention
    now: datetime
    looks: Looks
    report: GcReport
    #: SSTables whose manifest entries this collection pruned, or would prune: path, generation.
    pruned: dict[str, int] = field(default_factory=dict)
    #: WAL positions that this collection deleted, or would delete.
    deleted_positions: set[int] = field(default_factory=set)
    _files: dict[str, list[ObjectInfo]] = field(default_factory=dict)

    @property
    def dry_run(self) -> bool:
        return self.report.dry_run

    @cached_property
    def marker(self) -> int:
        """The newest generation of this shard that the base table holds; 0 while that is in doubt.

        A copy's markers are not about the copy's generations: those stay.
        """
        marker = self.needs.marker(self.shard_id)
        if not marker:
            return 0
        try:
            return min(marker, held_generation(self.needs.base, self.store, self.manifest))
        except DifferentHistoryError as error:
            logger.warning("nothing of the shard counts as compacted: %s", error)
            return 0

    @cached_property
    def manifests(self) -> ShardManifestStore:
        return ShardManifestStore(self.store, self.shard_id)

    @cached_property
    def wal_infos(self) -> dict[int, ObjectInfo]:
        """The WAL's entries by position, ascending, as listed once."""
        return numbered(self.store.list(layout.wal_dir(self.shard_id)), layout.parse_wal_name)

    @cached_property
    def directory_names(self) -> list[str]:
        """The shard's directories, as listed once."""
        return self.store.list_directories(layout.shard_dir(self.shard_id))

    def files(self, directory_name: str) -> Sequence[ObjectInfo]:
        """What one of the shard's directories holds, as listed once; of a link, the link."""
        if directory_name not in self._files:
            path = layout.sstable_dir(self.shard_id, directory_name)
            link = self.store.link(path)
            self._files[directory_name] = self.store.list(path) if link is None else [link]
        return self._files[directory_name]

    def is_old(self, modified: datetime, resource: Resource) -> bool:
        """By its stamp; that alone is not enough for anything to go (see ``looks``)."""
        return self.now - modified >= self.retention.least_age(resource)

    def unseen_compacted(self, generation: int, resource: Resource) -> str | None:
        """Why a generation stays that was not known to be compacted long enough ago."""
        age = self.retention.least_age(resource)
        if generation <= self.looks.reach("compacted", age):
            return None
        return unseen(self.looks.age_of("compacted", generation), age)

    def collected(self, resource: Resource, name: str, num_bytes: int = 0) -> None:
        self.report.collected.append(Collected(resource, self.shard_id, name, num_bytes))

    def kept(self, resource: Resource, name: str, reason: str) -> None:
        self.report.kept.append(Kept(resource, self.shard_id, name, reason))


def numbered(infos: Sequence[ObjectInfo], parse: Callable[[str], int | None]) -> dict[int, ObjectInfo]:
    """Objects by the number in their names, ascending; others are left out."""
    found = {}
    for info in infos:
        number = parse(info.path.rsplit("/", 1)[-1])
        if number is not None:
            found[number] = info
    return dict(sorted(found.items()))


# Entries of compacted generations in a shard's manifest.


_ENTRIES = Resource.MANIFEST_ENTRIES


def prune_manifest_entries(shard: ShardContext) -> None:
    """Prune what the base table holds; at the writer's own epoch, which stays as it is."""
    compacted = [entry for entry in shard.manifest.sstables if entry.generation <= shard.marker]
    prunable = [
        entry for entry in compacted if not _came_along(shard, entry) and not _is_needed(shard, entry)
    ]
    if not prunable:
        return
    shard.pruned = {entry.path: entry.generation for entry in prunable}
    if not shard.dry_run:
        # A job that is run again finds its earlier run by these entries.
        Unsettled.read(shard.store).preserve(shard.shard_id, sstables=shard.pruned.keys())
        gone = {(entry.generation, entry.path) for entry in prunable}

        def pruned(manifest: ShardManifest) -> ShardManifest:
            rest = tuple(e for e in manifest.sstables if (e.generation, e.path) not in gone)
            return manifest if len(rest) == len(manifest.sstables) else replace(manifest, sstables=rest)

        shard.manifest = shard.manifests.commit_update(None, pruned)
        points.reached("collect: manifest entries are pruned")
    for entry in prunable:
        shard.collected(_ENTRIES, entry.path)


def _came_along(shard: ShardContext, entry: SsTableEntry) -> bool:
    """Whether the entry is below the marker that a copied table began with: that says nothing of it."""
    copy = copy_of(shard.store)
    if copy is None or entry.generation > copy.markers.get(shard.shard_id, 0):
        return False
    shard.kept(_ENTRIES, entry.path, "the table is a copy, and the marker that came along is not about it")
    return True


def _is_needed(shard: ShardContext, entry: SsTableEntry) -> bool:
    reason = shard.needs.reason(
        shard.shard_id,
        entry.generation,
        shard.retention.manifest_entries,
        lambda: written_at(shard, entry.path),
    ) or shard.unseen_compacted(entry.generation, _ENTRIES)
    if reason is not None:
        shard.kept(_ENTRIES, entry.path, reason)
    return reason is not None


def written_at(shard: ShardContext, path: str) -> datetime | None:
    """When the first file of an SSTable was written; ``None`` when there is none."""
    return min((info.modified for info in shard.files(path)), default=None)


# Old versions of a shard's manifest.
#
# In ascending order: whoever knows an older version and probes for the next one takes a version
# whose successor is missing for the newest, so there must never be a gap.


_VERSIONS = Resource.MANIFEST_VERSIONS


def collect_manifest_versions(shard: ShardContext) -> None:
    listing = shard.store.list(layout.manifest_dir(shard.shard_id))
    infos = numbered(listing, layout.parse_manifest_name)
    # Pruning writes a version of its own; a dry run tells of what that would leave.
    superseded = list(infos) if shard.dry_run and shard.pruned else list(infos)[:-1]
    age = shard.retention.least_age(_VERSIONS)
    seen = shard.looks.reach("version", age)
    for version in superseded:
        info = infos[version]
        if not shard.is_old(info.modified, _VERSIONS):
            break
        if version > seen:
            shard.kept(_VERSIONS, f"manifest/{version}", unseen(shard.looks.age_of("version", version), age))
            break
        if not shard.dry_run:
            shard.store.delete(info.path)
            points.reached("collect: an old manifest is deleted")
        shard.collected(_VERSIONS, f"manifest/{version}", info.size)


# WAL entries whose rows are in SSTables.
#
# In ascending order, so that what stays has no gap whenever the collection ends. The last entry
# always stays, covered or not: Lance's own writers look there for the end of the WAL, and
# would begin again at position 1, with their fence where no other writer meets it.


_WAL = Resource.WAL_ENTRIES


def collect_wal_entries(shard: ShardContext) -> None:
    doomed = _doomed(shard)
    if not doomed:
        return
    if not shard.dry_run:
        # A job that is run again finds its earlier run by these entries. Read after the listing.
        unsettled = Unsettled.read(shard.store)
        unsettled.preserve(shard.shard_id, positions=range(doomed[0], doomed[-1] + 1))
    for position in doomed:
        if not shard.dry_run:
            shard.store.delete(layout.wal_entry(shard.shard_id, position))
            points.reached("collect: a WAL entry is deleted")
        shard.deleted_positions.add(position)
        shard.collected(_WAL, f"wal/{position}", shard.wal_infos[position].size)


def _doomed(shard: ShardContext) -> list[int]:
    """Covered positions that are old enough, ascending, without the last entry of the WAL."""
    infos = shard.wal_infos
    last_run = max(infos, default=0)
    while last_run - 1 in infos:
        last_run -= 1
    doomed = []
    age = shard.retention.least_age(_WAL)
    seen = shard.looks.reach("covered", age)
    for position in list(infos)[:-1]:
        if position > shard.manifest.replay_after_wal_entry_position:
            break
        if shard.is_old(infos[position].modified, _WAL):
            if position > seen:
                shard.kept(_WAL, f"wal/{position}", unseen(shard.looks.age_of("covered", position), age))
                break
            doomed.append(position)
        elif position >= last_run:
            break
        # Below the last run lies what a stalled writer dropped into an emptied slot.
    return doomed


# Directories of SSTables that the manifest does not name: compacted ones, and dead attempts.
#
# A flush publishes its SSTable only under the generation that the manifest expects next. So a
# directory of that generation or a later one may yet be published, however old it is, and stays; one
# of an earlier generation is dead. A bulk load gives its directories numbers beyond all generations
# and publishes them under the next ones; those that it did not publish are dead after the time that
# it has for it (``lancewal.publish.staging``).


_REMOTE_READERS = 16


def collect_sstables(shard: ShardContext, resources: frozenset[Resource]) -> None:
    """Delete directories of compacted generations, or of dead attempts, or both."""
    past = _Past(shard)
    directories = [_Directory(shard, name, past) for name in _unlisted(shard)]
    for each in directories:
        if each.resource is None and each.waits is not None:
            shard.kept(Resource.ORPHANS, each.name, each.waits)
    garbage = [each for each in directories if each.resource in resources]
    if not garbage:
        return
    pointed = _pointed(shard)
    for each in garbage:
        assert each.resource is not None
        reason = "a WAL entry points to it" if each.name in pointed else each.need
        if reason is not None:
            shard.kept(each.resource, each.name, reason)
        elif shard.dry_run or _delete(shard, each):
            shard.collected(each.resource, each.name, sum(info.size for info in each.infos))


def look(shard: ShardContext) -> dict[str, str]:
    """The directories that the manifest does not name and no flush will, with what they hold."""
    return {
        name: held(shard.files(name))
        for name in _unlisted(shard)
        if is_staged(name) or (layout.parse_sstable_name(name) or 0) < shard.manifest.current_generation
    }


def _unlisted(shard: ShardContext) -> list[str]:
    listed = {entry.path for entry in shard.manifest.sstables} - shard.pruned.keys()
    return [
        name
        for name in shard.directory_names
        if name not in listed and layout.parse_sstable_name(name) is not None
    ]


class _Past:
    """The generations of SSTables that the manifest once named, as far as its retained versions tell."""

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard
        self._known = dict(shard.pruned)

    @cached_property
    def _unread(self) -> list[int]:
        infos = self._shard.store.list(layout.manifest_dir(self._shard.shard_id))
        return list(numbered(infos, layout.parse_manifest_name))

    def generation(self, name: str) -> int | None:
        """Newest version first, and only as many as it takes."""
        while name not in self._known and self._unread:
            try:
                manifest = self._shard.manifests.read_version(self._unread.pop())
            except FileNotFoundError:
                continue
            self._known.update({entry.path: entry.generation for entry in manifest.sstables})
        return self._known.get(name)


@dataclass(frozen=True)
class _Directory:
    """One directory that the newest manifest does not name."""

    shard: ShardContext
    name: str
    past: _Past

    @property
    def infos(self) -> Sequence[ObjectInfo]:
        return self.shard.files(self.name)

    @property
    def path(self) -> str:
        return layout.sstable_dir(self.shard.shard_id, self.name)

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link, to be removed as what it is."""
        return any(info.path == self.path for info in self.infos)

    @cached_property
    def resource(self) -> Resource | None:
        """What kind of garbage it is; ``None`` while it may be none."""
        number = layout.parse_sstable_name(self.name)
        assert number is not None
        if is_staged(self.name):
            if self.past.generation(self.name) is not None:
                return Resource.SSTABLES
            return Resource.ORPHANS if self._is_abandoned else None
        if number >= self.shard.manifest.current_generation:
            return None
        if number > self._marker:
            return Resource.ORPHANS if self._is_abandoned else None
        if self._is_abandoned or self.past.generation(self.name) is not None:
            return Resource.SSTABLES
        return None

    @property
    def need(self) -> str | None:
        """Why it has to stay although it is garbage."""
        if self.resource is Resource.ORPHANS and not is_staged(self.name):
            return None
        # The name tells the generation only where nobody gave it another one since. Of a bulk load
        # whose manifest is gone nobody knows it: the newest one that is compacted has to be free.
        generation = self.past.generation(self.name)
        if generation is None and not is_staged(self.name):
            generation = layout.parse_sstable_name(self.name)
        if generation is None:
            generation = self._marker
        return self.shard.needs.reason(
            self.shard.shard_id,
            generation,
            self.shard.retention.sstables,
            partial(_first, self.infos),
        ) or self.shard.unseen_compacted(generation, Resource.SSTABLES)

    @property
    def _marker(self) -> int:
        return self.shard.marker

    @property
    def _is_abandoned(self) -> bool:
        """Whether nobody can be at work on it any more."""
        return self._looks_abandoned and self.waits is None

    @cached_property
    def waits(self) -> str | None:
        """Why it stays although its files look old enough."""
        age = self.shard.looks.age_of_name(self.name, held(self.infos))
        return unseen(age, self._least_age) if self._looks_abandoned and age < self._least_age else None

    @property
    def _looks_abandoned(self) -> bool:
        newest = max((info.modified for info in self.infos), default=None)
        return newest is None or self.shard.now - newest >= self._least_age

    @property
    def _least_age(self) -> timedelta:
        age = self.shard.retention.orphans
        if is_staged(self.name) and not self.shard.retention.allow_unsafe:
            return max(STAGED_DELETION_AGE, age)
        return age


def _first(infos: Sequence[ObjectInfo]) -> datetime | None:
    return min((info.modified for info in infos), default=None)


def _pointed(shard: ShardContext) -> set[str]:
    """The SSTables that retained WAL entries point to."""
    tailer = WalTailer(shard.store, shard.shard_id)
    positions = [p for p in shard.wal_infos if p not in shard.deleted_positions]
    workers = 1 if shard.store.is_local else _REMOTE_READERS
    pointed: set[str] = set()
    for position, header in zip(positions, ordered_map(tailer.read_header, positions, workers), strict=True):
        entry = tailer.read_entry(position) if header is not None and header.sentinel else None
        pointer = None if entry is None else SsTablePointer.of(entry)
        if pointer is not None:
            pointed |= set(pointer.sstables)
    return pointed


def _delete(shard: ShardContext, directory: _Directory) -> bool:
    """Delete unless it was published since; its dataset's versions first, so that no half of it opens."""
    newest = shard.manifests.require_latest()
    if any(entry.path == directory.name for entry in newest.sstables):
        return False
    if directory.is_link:
        logger.warning("%s is a symbolic link; what it points at stays", directory.path)
    else:
        shard.store.delete_prefix(f"{directory.path}/_versions")
    points.reached("collect: an SSTable is half deleted")
    shard.store.delete_prefix(directory.path)
    forget_sstable(shard.store, directory.path)
    points.reached("collect: an SSTable is deleted")
    return True


# Half-written files that processes which died have left; local disks only.


_RESOURCE = Resource.STAGING_FILES


def collect_staging_files(
    store: ObjectStore, retention: Retention, now: datetime, clock: HostClock, report: GcReport
) -> None:
    infos = store.list_staging(layout.MEM_WAL_DIR)
    if not infos:
        return
    looks = Looks.read(store, None, Extent(), clock)
    if not report.dry_run:
        looks.record(store, {info.path: held([info]) for info in infos})
    for info in infos:
        if now - info.modified < retention.staging_files:
            continue
        age = looks.age_of_name(info.path, held([info]))
        if age < retention.staging_files:
            reason = unseen(age, retention.staging_files)
            report.kept.append(Kept(_RESOURCE, None, info.path, reason))
            continue
        if not report.dry_run:
            store.delete(info.path)
        report.collected.append(Collected(_RESOURCE, None, info.path, info.size))


def collect_garbage(
    base: BaseTable,
    store: ObjectStore | None = None,
    *,
    retention: Retention | None = None,
    min_age: timedelta | None = None,
    resources: Iterable[Resource | str] | None = None,
    shards: Sequence[UUID | str] | None = None,
    dry_run: bool = False,
    now: datetime | None = None,
    clock: HostClock | None = None,
) -> GcReport:
    """Delete garbage that is old enough; of all resources and shards, or of some.

    ``retention`` gives each resource its age, ``min_age`` one for all. What has to have an age
    goes when an earlier collection has seen it, that long ago; so the first one leaves most of
    it. ``dry_run`` deletes nothing, and leaves no record of having seen anything. ``now`` and
    ``clock`` are for tests; by default the storage's time and this machine's own clock count.
    """
    if retention is not None and min_age is not None:
        raise InvalidInputError("pass retention or min_age, not both")
    if retention is None:
        retention = Retention() if min_age is None else Retention.of(min_age)
    wanted = _chosen(resources)
    started = time.perf_counter()
    store = store or ObjectStore.from_uri(base.uri, base.storage_options)
    # The state that decisions rest on is read first and then made durable: what it holds may go.
    base = BaseTable.open(base.uri, base.storage_options, store=store)
    shard_ids = discover_shards(store) if shards is None else [layout.parse_shard_id(s) for s in shards]
    manifests = read_manifests(store, shard_ids)
    if not dry_run:
        sync_file_system(store)
    report = GcReport(base.uri, dry_run)
    now = now or storage_time(store, dry_run=dry_run)
    needs = Needs(base, store, now, for_all_versions=retention.for_all_versions)
    points.reached("collect: nothing is deleted yet")
    clock = clock or host_clock()
    for shard_id, manifest in zip(shard_ids, manifests, strict=True):
        if manifest is None:
            raise InvalidInputError(f"there is no shard {shard_id} in {store.uri}")
        looks = Looks.read(store, shard_id, _extent(manifest, needs), clock)
        _collect_shard(ShardContext(store, shard_id, manifest, needs, retention, now, looks, report), wanted)
    if Resource.STAGING_FILES in wanted:
        collect_staging_files(store, retention, now, clock, report)
    report.seconds = time.perf_counter() - started
    logger.info("garbage collection of %s: %s", store.uri, report.counts())
    return report


def _extent(manifest: ShardManifest, needs: Needs) -> Extent:
    covered = manifest.replay_after_wal_entry_position
    return Extent(covered, manifest.version, needs.marker(manifest.shard_id))


def _collect_shard(shard: ShardContext, wanted: frozenset[Resource]) -> None:
    directories = bool(wanted & {Resource.SSTABLES, Resource.ORPHANS})
    if not shard.dry_run:
        # First, so that a collection which is always killed half way still comes forward.
        shard.looks.record(shard.store, look(shard) if directories else None)
    if Resource.MANIFEST_ENTRIES in wanted:
        prune_manifest_entries(shard)
    # Before the SSTables: an entry that goes keeps none.
    if Resource.WAL_ENTRIES in wanted:
        collect_wal_entries(shard)
    if directories:
        collect_sstables(shard, wanted)
    if Resource.MANIFEST_VERSIONS in wanted:
        collect_manifest_versions(shard)


def _chosen(resources: Iterable[Resource | str] | None) -> frozenset[Resource]:
    if resources is None:
        return frozenset(Resource)
    try:
        return frozenset(Resource(each) for each in resources)
    except ValueError:
        known = ", ".join(Resource)
        raise InvalidInputError(f"unknown resource in {list(resources)!r}; there are: {known}") from None
