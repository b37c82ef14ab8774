"""Garbage collection: what neither a writer, a reader nor a retained version needs any more.

The collector claims no shard. It may run beside writers, readers, compactors and other
collectors, and may be killed anywhere: every step leaves a state that is whole.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from uuid import UUID

from lancewal.errors import DifferentHistoryError, InvalidInputError, LanceWalError, StorageError
from lancewal.format import ShardManifest, SsTableEntry
from lancewal.maintenance.commits import crash_point, open_base
from lancewal.maintenance.needs import Extent, Looks, Needs, Retention, content, waits
from lancewal.maintenance.reports import Collected, GcReport, Kept, Resource
from lancewal.publish import STAGED_DELETION_AGE, SsTablePointer, Unsettled, is_staged
from lancewal.shard import ShardManifestStore, WalTailer, discover_shards, read_manifests
from lancewal.sstable import copy_of, forget_sstable, held_generation
from lancewal.storage import HostClock, ObjectInfo, ObjectStore, host_clock, layout, ordered_map

logger = logging.getLogger(__name__)

_REMOTE_READERS = 16
_USUAL_RETENTION = Retention()
_IN_DIRECTORIES = frozenset({Resource.SSTABLES, Resource.ORPHANS})


def collect_garbage(
    store: ObjectStore,
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
        retention = _USUAL_RETENTION if min_age is None else Retention.of(min_age)
    wanted = _chosen(resources)
    started = time.perf_counter()
    # The state that decisions rest on is read first and then made durable: what it holds may go.
    base = open_base(store)
    shard_ids = discover_shards(store) if shards is None else [layout.parse_shard_id(s) for s in shards]
    manifests = read_manifests(store, shard_ids)
    if not dry_run:
        sync_file_system(store)
    report = GcReport(base.uri, dry_run)
    now = now or _storage_time(store, dry_run=dry_run)
    clock = clock or host_clock()
    needs = Needs(base, store, now, for_all_versions=retention.for_all_versions)
    crash_point("collect: nothing is deleted yet")
    for shard_id, manifest in zip(shard_ids, manifests, strict=True):
        if manifest is None:
            raise InvalidInputError(f"there is no shard {shard_id} in {store.uri}")
        shard = ShardGarbage(store, manifest, needs, retention, now, clock, report)
        if not dry_run:
            # First, so that a collection which is always killed half way still comes forward.
            shard.looks.record(store, _dead_directories(shard) if wanted & _IN_DIRECTORIES else None)
        _collect_shard(shard, wanted)
    if Resource.STAGING_FILES in wanted:
        _collect_staging_files(store, retention.staging_files, now, clock, report)
    report.seconds = time.perf_counter() - started
    logger.info("garbage collection of %s: %s", store.uri, report.counts())
    return report


def prune_compacted(store: ObjectStore, shards: Sequence[UUID] | None = None) -> None:
    """Take the generations that the base holds, and that nobody else needs, out of the shards' manifests.

    Only markers say that such a generation is compacted, and they are gone when the MemWAL index is
    dropped: its rows would then lie over newer ones. Directories stay for garbage collection.
    A failure is only logged, because garbage collection does the same later.
    """
    try:
        collect_garbage(store, resources=[Resource.MANIFEST_ENTRIES], shards=shards)
    except LanceWalError as error:
        logger.warning("compacted generations are still listed: %s", error)


def _chosen(resources: Iterable[Resource | str] | None) -> frozenset[Resource]:
    if resources is None:
        return frozenset(Resource)
    try:
        return frozenset(Resource(each) for each in resources)
    except ValueError:
        known = ", ".join(Resource)
        raise InvalidInputError(f"unknown resource in {list(resources)!r}; there are: {known}") from None


def sync_file_system(store: ObjectStore) -> None:
    """Write all that the table's file system holds in memory to disk.

    Lance never syncs. Before anything is deleted that the base table holds by now, the base
    table's own files must survive a power cut. Does nothing on object storage, nor on a
    store that was opened without fsync.
    """
    root = store.local_path("_versions")
    if root is None or not store.fsync:
        return
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if sys.platform != "linux" or ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
                os.sync()
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        raise StorageError(f"cannot sync the file system of {store.uri}: {error}") from error


def _storage_time(store: ObjectStore, *, dry_run: bool) -> datetime:
    """The time by the clock that stamps objects, also on local disks, which may be mounted.

    A dry run writes nothing, and goes by this machine's clock.
    """
    if dry_run:
        return datetime.now(UTC)
    store.put(f"{layout.CLOCK_DIR}/now", b"", durable=False)
    # By a listing, like all other times: those of single objects may be rounded differently.
    stamps = [info.modified for info in store.list(layout.CLOCK_DIR)]
    return max(stamps, default=datetime.now(UTC))


def _collect_shard(shard: ShardGarbage, wanted: frozenset[Resource]) -> None:
    if Resource.MANIFEST_ENTRIES in wanted:
        _prune_manifest_entries(shard)
    # Before the SSTables: an entry that goes keeps none.
    if Resource.WAL_ENTRIES in wanted:
        _collect_wal_entries(shard)
    if wanted & _IN_DIRECTORIES:
        _collect_sstables(shard, wanted)
    if Resource.MANIFEST_VERSIONS in wanted:
        _collect_manifest_versions(shard)


@dataclass
class ShardGarbage:
    """One shard during one collection: what all its collectors look at."""

    store: ObjectStore
    manifest: ShardManifest
    needs: Needs
    retention: Retention
    now: datetime
    clock: HostClock
    report: GcReport
    #: SSTables whose manifest entries this collection pruned, or would prune: path, generation.
    pruned: dict[str, int] = field(default_factory=dict)
    #: WAL positions that this collection deleted, or would delete.
    deleted_positions: set[int] = field(default_factory=set)
    _files: dict[str, list[ObjectInfo]] = field(default_factory=dict)
    _once_listed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shard_id = self.manifest.shard_id
        self.dry_run = self.report.dry_run
        self.manifests = ShardManifestStore(self.store, self.shard_id)
        covered = self.manifest.replay_after_wal_entry_position
        extent = Extent(covered, self.manifest.version, self.needs.stored_marker(self.shard_id))
        self.looks = Looks.read(self.store, self.shard_id, extent, self.clock)

    @cached_property
    def marker(self) -> int:
        """The newest generation of this shard that the base table holds; 0 while that is in doubt.

        Never above the stored marker: what only a tag says is taken for waiting. A copy's markers are
        not about the copy's generations: those stay.
        """
        marker = self.needs.stored_marker(self.shard_id)
        try:
            return min(marker, held_generation(self.needs.base, self.store, self.manifest)) if marker else 0
        except DifferentHistoryError as error:
            logger.warning("nothing of the shard counts as compacted: %s", error)
            return 0

    @cached_property
    def wal_infos(self) -> dict[int, ObjectInfo]:
        """The WAL's entries by position, ascending, as listed once."""
        return _numbered(self.store.list(layout.wal_dir(self.shard_id)), layout.parse_wal_name)

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

    def first_written(self, directory_name: str) -> datetime | None:
        """When the first file of an SSTable was written; ``None`` when there is none."""
        return min((info.modified for info in self.files(directory_name)), default=None)

    def unlisted(self) -> list[str]:
        """The directories of SSTables that the manifest does not name."""
        listed = {entry.path for entry in self.manifest.sstables} - self.pruned.keys()
        return [
            name
            for name in self.directory_names
            if name not in listed and layout.parse_sstable_name(name) is not None
        ]

    def once_generation(self, name: str) -> int | None:
        """The generation under which the manifest once named an SSTable, as far as its versions tell.

        Newest version first, and only as many as it takes.
        """
        known = self._once_listed
        known.update(self.pruned)
        while name not in known and self._unread_versions:
            try:
                manifest = self.manifests.read_version(self._unread_versions.pop())
            except FileNotFoundError:
                continue
            known.update({entry.path: entry.generation for entry in manifest.sstables})
        return known.get(name)

    @cached_property
    def _unread_versions(self) -> list[int]:
        infos = self.store.list(layout.manifest_dir(self.shard_id))
        return list(_numbered(infos, layout.parse_manifest_name))

    def is_old(self, modified: datetime, age: timedelta) -> bool:
        """By its stamp; that alone is not enough for anything to go (see ``looks``)."""
        return self.now - modified >= age

    def needed(self, generation: int, age: timedelta, path: str) -> str | None:
        """Why the SSTable of a compacted generation has to stay; ``None`` when it need not."""
        created = partial(self.first_written, path)
        reason = self.needs.reason(self.shard_id, generation, age, created)
        return reason or self.looks.unseen("compacted", generation, age)

    def collected(self, resource: Resource, name: str, num_bytes: int = 0) -> None:
        self.report.collected.append(Collected(resource, self.shard_id, name, num_bytes))

    def kept(self, resource: Resource, name: str, reason: str) -> None:
        self.report.kept.append(Kept(resource, self.shard_id, name, reason))


def _numbered(infos: Sequence[ObjectInfo], parse: Callable[[str], int | None]) -> dict[int, ObjectInfo]:
    """Objects by the number in their names, ascending; others are left out."""
    numbers = ((parse(info.path.rsplit("/", 1)[-1]), info) for info in infos)
    found = {number: info for number, info in numbers if number is not None}
    return dict(sorted(found.items()))


def _prune_manifest_entries(shard: ShardGarbage) -> None:
    """Prune what the base table holds; at the writer's own epoch, which stays as it is."""
    prunable = [
        entry
        for entry in shard.manifest.sstables
        if entry.generation <= shard.marker and not _entry_stays(shard, entry)
    ]
    if not prunable:
        return
    shard.pruned = {entry.path: entry.generation for entry in prunable}
    if not shard.dry_run:
        # A job that is run again finds its earlier run by these entries.
        Unsettled.read(shard.store).preserve(shard.shard_id, sstables=shard.pruned.keys())
        gone = {(entry.generation, entry.path) for entry in prunable}

        def without(manifest: ShardManifest) -> ShardManifest:
            rest = tuple(e for e in manifest.sstables if (e.generation, e.path) not in gone)
            return manifest if len(rest) == len(manifest.sstables) else replace(manifest, sstables=rest)

        shard.manifest = shard.manifests.commit_update(None, without)
        crash_point("collect: manifest entries are pruned")
    for path in shard.pruned:
        shard.report.collected.append(Collected(Resource.MANIFEST_ENTRIES, shard.shard_id, path))


def _entry_stays(shard: ShardGarbage, entry: SsTableEntry) -> bool:
    copy = copy_of(shard.store)
    if copy is not None and entry.generation <= copy.markers.get(shard.shard_id, 0):
        reason: str | None = "the table is a copy, and the marker that came along is not about it"
    else:
        reason = shard.needed(entry.generation, shard.retention.manifest_entries, entry.path)
    if reason is not None:
        shard.kept(Resource.MANIFEST_ENTRIES, entry.path, reason)
    return reason is not None


def _collect_manifest_versions(shard: ShardGarbage) -> None:
    """Old versions of the shard's manifest, in ascending order.

    Whoever knows an older version and probes for the next one takes a version whose successor is
    missing for the newest, so there must never be a gap.
    """
    listing = shard.store.list(layout.manifest_dir(shard.shard_id))
    infos = _numbered(listing, layout.parse_manifest_name)
    # Pruning writes a version of its own; a dry run tells of what that would leave.
    superseded = list(infos) if shard.dry_run and shard.pruned else list(infos)[:-1]
    age = shard.retention.manifest_versions
    for version in superseded:
        name, info = f"manifest/{version}", infos[version]
        if not shard.is_old(info.modified, age):
            break
        if reason := shard.looks.unseen("version", version, age):
            shard.kept(Resource.MANIFEST_VERSIONS, name, reason)
            break
        if not shard.dry_run:
            shard.store.delete(info.path)
            crash_point("collect: an old manifest is deleted")
        shard.collected(Resource.MANIFEST_VERSIONS, name, info.size)


def _collect_wal_entries(shard: ShardGarbage) -> None:
    """WAL entries whose rows are in SSTables, in ascending order.

    So what stays has no gap whenever the collection ends. The last entry always stays, covered or
    not: Lance's own writers look there for the end of the WAL, and would begin again at position 1,
    with their fence where no other writer meets it.
    """
    doomed = _doomed_positions(shard)
    if not doomed:
        return
    if not shard.dry_run:
        # A job that is run again finds its earlier run by these entries. Read after the listing.
        unsettled = Unsettled.read(shard.store)
        unsettled.preserve(shard.shard_id, positions=range(doomed[0], doomed[-1] + 1))
    for position in doomed:
        if not shard.dry_run:
            shard.store.delete(layout.wal_entry(shard.shard_id, position))
            crash_point("collect: a WAL entry is deleted")
        shard.deleted_positions.add(position)
        shard.collected(Resource.WAL_ENTRIES, f"wal/{position}", shard.wal_infos[position].size)


def _doomed_positions(shard: ShardGarbage) -> list[int]:
    """Covered positions that are old enough, ascending, without the last entry of the WAL."""
    infos = shard.wal_infos
    last_run = max(infos, default=0)
    while last_run - 1 in infos:
        last_run -= 1
    doomed = []
    age = shard.retention.wal_entries
    for position in list(infos)[:-1]:
        if position > shard.manifest.replay_after_wal_entry_position:
            break
        if shard.is_old(infos[position].modified, age):
            if reason := shard.looks.unseen("covered", position, age):
                shard.kept(Resource.WAL_ENTRIES, f"wal/{position}", reason)
                break
            doomed.append(position)
        elif position >= last_run:
            break
        # Below the last run lies what a stalled writer dropped into an emptied slot.
    return doomed


def _collect_sstables(shard: ShardGarbage, resources: frozenset[Resource]) -> None:
    """Delete directories of compacted generations, or of dead attempts, or both."""
    directories = [_Directory(shard, name) for name in shard.unlisted()]
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


def _dead_directories(shard: ShardGarbage) -> dict[str, str]:
    """The directories that the manifest does not name and no flush will, with what they hold."""
    return {
        name: content(shard.files(name))
        for name in shard.unlisted()
        if is_staged(name) or (layout.parse_sstable_name(name) or 0) < shard.manifest.current_generation
    }


@dataclass(frozen=True)
class _Directory:
    """One directory that the newest manifest does not name: a compacted generation, or a dead attempt.

    A flush publishes its SSTable only under the generation that the manifest expects next. So a
    directory of that generation or a later one may yet be published, however old it is, and stays; one
    of an earlier generation is dead. A bulk load gives its directories numbers beyond all generations
    and publishes them under the next ones; those that it did not publish are dead after the time that
    it has for it (``lancewal.publish.staging``).
    """

    shard: ShardGarbage
    name: str

    @property
    def infos(self) -> Sequence[ObjectInfo]:
        return self.shard.files(self.name)

    @property
    def path(self) -> str:
        return layout.sstable_dir(self.shard.shard_id, self.name)

    @cached_property
    def resource(self) -> Resource | None:
        """What kind of garbage it is; ``None`` while it may be none."""
        number = layout.parse_sstable_name(self.name)
        assert number is not None
        if is_staged(self.name):
            if self.shard.once_generation(self.name) is not None:
                return Resource.SSTABLES
            return Resource.ORPHANS if self._is_abandoned else None
        if number >= self.shard.manifest.current_generation:
            return None
        if number > self.shard.marker:
            return Resource.ORPHANS if self._is_abandoned else None
        if self._is_abandoned or self.shard.once_generation(self.name) is not None:
            return Resource.SSTABLES
        return None

    @property
    def need(self) -> str | None:
        """Why it has to stay although it is garbage."""
        if self.resource is Resource.ORPHANS and not is_staged(self.name):
            return None
        # The name tells the generation only where nobody gave it another one since. Of a bulk load
        # whose manifest is gone nobody knows it: the newest one that is compacted has to be free.
        generation = self.shard.once_generation(self.name)
        if generation is None and not is_staged(self.name):
            generation = layout.parse_sstable_name(self.name)
        if generation is None:
            generation = self.shard.marker
        return self.shard.needed(generation, self.shard.retention.sstables, self.name)

    @property
    def _is_abandoned(self) -> bool:
        """Whether nobody can be at work on it any more."""
        return self._looks_abandoned and self.waits is None

    @cached_property
    def waits(self) -> str | None:
        """Why it stays although its files look old enough."""
        age = self.shard.looks.age_of_name(self.name, content(self.infos))
        return waits(age, self._least_age) if self._looks_abandoned and age < self._least_age else None

    @property
    def _looks_abandoned(self) -> bool:
        newest = max((info.modified for info in self.infos), default=None)
        return newest is None or self.shard.is_old(newest, self._least_age)

    @property
    def _least_age(self) -> timedelta:
        age = self.shard.retention.orphans
        if is_staged(self.name) and not self.shard.retention.allow_unsafe:
            return max(STAGED_DELETION_AGE, age)
        return age


def _pointed(shard: ShardGarbage) -> set[str]:
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


def _delete(shard: ShardGarbage, directory: _Directory) -> bool:
    """Delete unless it was published since; its dataset's versions first, so that no half of it opens."""
    newest = shard.manifests.require_latest()
    if any(entry.path == directory.name for entry in newest.sstables):
        return False
    if any(info.path == directory.path for info in directory.infos):
        logger.warning("%s is a symbolic link; what it points at stays", directory.path)
    else:
        shard.store.delete_prefix(f"{directory.path}/_versions")
    crash_point("collect: an SSTable is half deleted")
    shard.store.delete_prefix(directory.path)
    forget_sstable(shard.store, directory.path)
    crash_point("collect: an SSTable is deleted")
    return True


def _collect_staging_files(
    store: ObjectStore, least_age: timedelta, now: datetime, clock: HostClock, report: GcReport
) -> None:
    """Half-written files that processes which died have left; local disks only."""
    infos = store.list_staging(layout.MEM_WAL_DIR)
    if not infos:
        return
    looks = Looks.read(store, None, Extent(), clock)
    if not report.dry_run:
        looks.record(store, {info.path: content([info]) for info in infos})
    for info in infos:
        if now - info.modified < least_age:
            continue
        age = looks.age_of_name(info.path, content([info]))
        if age < least_age:
            report.kept.append(Kept(Resource.STAGING_FILES, None, info.path, waits(age, least_age)))
            continue
        if not report.dry_run:
            store.delete(info.path)
        report.collected.append(Collected(Resource.STAGING_FILES, None, info.path, info.size))
