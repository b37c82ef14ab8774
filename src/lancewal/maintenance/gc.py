"""Garbage collection: deletes what no writer, reader or retained version needs any more.

The collector claims no shard. It may run beside writers, readers, compactors and other
collectors. It may be killed at any point: every step leaves a consistent state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import NamedTuple
from uuid import UUID

from lancewal.base import BaseTable, open_base
from lancewal.errors import InvalidInputError, StorageError
from lancewal.format import ShardManifest
from lancewal.maintenance.checkpoints import NeededFiles, drop_left_tags
from lancewal.maintenance.commits import crash_point
from lancewal.maintenance.directories import collect_sstables, dead_directories
from lancewal.maintenance.garbage import (
    ShardGarbage,
    collect_manifest_versions,
    collect_wal_entries,
    prune_manifest_entries,
)
from lancewal.maintenance.needs import Extent, Looks, Needs, Retention, StoredLooks, content, waits
from lancewal.maintenance.reports import Collected, GcReport, Kept, Resource
from lancewal.publish import Unsettled
from lancewal.shard import ShardManifestStore, listed_shards, shard_files
from lancewal.storage import (
    MIN_DELETION_AGE,
    HostClock,
    ObjectInfo,
    ObjectStore,
    Once,
    beside,
    host_clock,
    in_thread,
    layout,
    ordered_map,
    sync_file_system,
)

logger = logging.getLogger(__name__)

#: Requests in flight on remote storage, for many shards together or for one.
_AT_ONCE = 64
_IN_DIRECTORIES = frozenset({Resource.SSTABLES, Resource.ORPHANS})
_WITH_ROWS = _IN_DIRECTORIES | {Resource.WAL_ENTRIES}


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
    base: BaseTable | None = None,
) -> GcReport:
    """Delete garbage that is old enough, of all resources and shards or of some.

    ``retention`` sets a least age for each resource, ``min_age`` one age for all. Garbage with a least age
    is deleted only if an earlier collection saw it at least that long ago, so the first collection deletes
    little. ``dry_run`` deletes nothing, and does not record what it saw. ``now`` and ``clock`` are for
    tests; the defaults are the storage's time and this machine's own clock. ``base`` is a version of the
    base table that was opened just now.
    """
    if retention is not None and min_age is not None:
        raise InvalidInputError("pass retention or min_age, not both")
    if retention is None:
        retention = Retention() if min_age is None else Retention.of(min_age)
    if not isinstance(retention, Retention):
        raise InvalidInputError(f"retention must be a Retention, not {retention!r}")
    wanted = _chosen(resources)
    started = time.perf_counter()
    at_once = not store.is_local
    stamp = None
    if at_once:
        stamp = in_thread(partial(_storage_time, store, now, dry_run=dry_run), "lancewal-io")
    named = beside(partial(_shard_ids, store, shards), at_once=at_once)
    # First read the state that the decisions rest on, the base table before the shards. Then make it durable,
    # because what it replaces is deleted.
    base = base or open_base(store)
    shard_ids = named.result()
    workers = 1 if store.is_local else max(1, min(len(shard_ids), _AT_ONCE))
    each_has = 1 if store.is_local else _AT_ONCE // workers
    read = ordered_map(partial(_Shard.read, store), shard_ids, workers)
    states = [each for each in read if each is not None]
    if shards is not None and len(states) < len(shard_ids):
        absent = sorted(set(shard_ids) - {state.manifest.shard_id for state in states})
        raise InvalidInputError(f"there is no shard {', '.join(map(str, absent))} in {store.uri}")
    if not dry_run:
        sync_file_system(store)
    time_now, with_clock = _storage_time(store, now, dry_run=dry_run) if stamp is None else stamp.result()
    clock = clock or host_clock()
    needs = Needs(base, store, time_now, for_all_versions=retention.for_all_versions)
    # Listed after the states were read. A checkpoint that is newer than this listing needs no file that these
    # states count as garbage.
    checkpoints = Once(partial(NeededFiles.read, store, time_now, dry_run=dry_run))
    if wanted & _WITH_ROWS:
        beside(checkpoints.get, at_once=at_once)
    unsettled = Once(partial(Unsettled.read, store))
    left_tags = None
    if Resource.STAGING_FILES in wanted and not dry_run:
        left_tags = beside(partial(drop_left_tags, store, base.dataset), at_once=at_once)
    crash_point("collect: nothing is deleted yet")

    def collect(state: _Shard) -> tuple[GcReport, Exception | None]:
        part = GcReport(base.uri, dry_run)
        try:
            shard = ShardGarbage(
                store,
                ShardManifestStore(store, state.manifest.shard_id),
                state.manifest,
                state.infos,
                needs,
                Looks.of_shard(state.looks, state.manifest, base, clock),
                checkpoints,
                unsettled,
                retention,
                part,
                each_has,
            )
            _collect_shard(shard, wanted)
        except Exception as error:
            return part, error
        return part, None

    report = GcReport(base.uri, dry_run)
    failures: list[Exception] = []
    for state, (part, error) in zip(states, ordered_map(collect, states, workers), strict=True):
        report.collected += part.collected
        report.kept += part.kept
        if error is not None:
            failures.append(error)
            logger.info("garbage collection of shard %s failed: %s", state.manifest.shard_id, error)
    if failures:
        # Raised only after all other shards: one broken shard must not let the garbage of others pile up.
        raise failures[0]
    if Resource.STAGING_FILES in wanted:
        _collect_staging_files(store, retention.staging_files, time_now, clock, report)
        _collect_owner_records(store, with_clock, retention.staging_files, time_now, report)
    if left_tags is not None:
        left_tags.result()
    report.seconds = time.perf_counter() - started
    logger.info("garbage collection of %s: %s", store.uri, report.counts())
    return report


def _shard_ids(store: ObjectStore, shards: Sequence[UUID | str] | None) -> list[UUID]:
    return listed_shards(store) if shards is None else [layout.parse_shard_id(shard) for shard in shards]


def _chosen(resources: Iterable[Resource | str] | None) -> frozenset[Resource]:
    if resources is None:
        return frozenset(Resource)
    try:
        return frozenset(Resource(each) for each in resources)
    except ValueError:
        known = ", ".join(Resource)
        raise InvalidInputError(f"unknown resource in {list(resources)!r}; there are: {known}") from None


class _Shard(NamedTuple):
    """A shard by one listing, and the newest manifest in it.

    The listing comes first. A file that is written between the two is not in the listing, even if the
    manifest names it, so it is not taken for garbage.
    """

    infos: Sequence[ObjectInfo]
    manifest: ShardManifest
    looks: StoredLooks

    @classmethod
    def read(cls, store: ObjectStore, shard_id: UUID) -> _Shard | None:
        """``None`` if the shard has no manifest."""
        looks = beside(partial(StoredLooks.read, store, shard_id), at_once=not store.is_local)
        infos = shard_files(store, shard_id)
        manifest = ShardManifestStore(store, shard_id).read_listed(infos)
        stored = looks.result()
        return None if manifest is None else cls(infos, manifest, stored)


class _Clock(NamedTuple):
    """The storage's time, and all objects in the clock's directory."""

    now: datetime
    infos: Sequence[ObjectInfo]


def _storage_time(store: ObjectStore, now: datetime | None, *, dry_run: bool) -> _Clock:
    """The time by the clock that stamps objects; on local paths too, which may be network mounts.

    A dry run writes nothing, and uses this machine's clock. ``now`` is set by tests. If nothing can be
    written, it is the time of an earlier call: everything then counts as younger than it is, which is safe.
    """
    if dry_run or now is not None:
        return _Clock(now or datetime.now(UTC), store.list(layout.CLOCK_DIR))
    try:
        store.put(layout.CLOCK_NOW, b"", durable=False)
    except StorageError as error:
        if store.head(layout.CLOCK_NOW) is None:
            raise
        logger.info("garbage collection of %s goes by an earlier time: %s", store.uri, error)
    # Read from a listing, like all other times: the time of a single object may be rounded differently.
    infos = store.list(layout.CLOCK_DIR)
    stamps = [info.modified for info in infos if info.path == layout.CLOCK_NOW]
    return _Clock(max(stamps, default=datetime.now(UTC)), infos)


def _collect_owner_records(
    store: ObjectStore, infos: Sequence[ObjectInfo], least_age: timedelta, now: datetime, report: GcReport
) -> None:
    """Delete the owner records of processes that are long gone, and the requests to them.

    The storage's clock is enough here: nothing depends on such a record, and a live process writes its
    record again.
    """
    owned = [info for info in infos if info.path.startswith(f"{layout.OWNERS_DIR}/")]
    old = [info for info in owned if now - info.modified >= max(least_age, MIN_DELETION_AGE)]
    if old and not report.dry_run:
        store.delete_many([info.path for info in old])
    report.collected += [Collected(Resource.STAGING_FILES, None, info.path, info.size) for info in old]


def _collect_shard(shard: ShardGarbage, wanted: frozenset[Resource]) -> None:
    """Delete the shard's garbage of these resources.

    A full disk takes no record of what exists now, but what earlier collections saw can be deleted. Then
    there is space for the record, and for those about the log entries of jobs that have not ended.
    """
    record = partial(_record_look, shard, wanted)
    recorded = True
    if not shard.dry_run:
        try:
            # First, so that collections still make progress if every one of them is killed half way.
            record()
        except StorageError as error:
            recorded = False
            logger.info("no look at shard %s is recorded yet: %s", shard.shard_id, error)
    if Resource.MANIFEST_ENTRIES in wanted:
        prune_manifest_entries(shard)
    # Before the SSTables, because a deleted entry keeps no SSTable alive.
    refused: StorageError | None = None
    if Resource.WAL_ENTRIES in wanted:
        try:
            collect_wal_entries(shard)
        except StorageError as error:
            refused = error
    if wanted & _IN_DIRECTORIES:
        collect_sstables(shard, wanted)
    if Resource.MANIFEST_VERSIONS in wanted:
        collect_manifest_versions(shard)
    if not recorded:
        record()
    if refused is not None:
        raise refused


def _record_look(shard: ShardGarbage, wanted: frozenset[Resource]) -> None:
    shard.looks.record(shard.store, dead_directories(shard) if wanted & _IN_DIRECTORIES else None)


def _collect_staging_files(
    store: ObjectStore, least_age: timedelta, now: datetime, clock: HostClock, report: GcReport
) -> None:
    """Delete half-written files of processes that died; local disks only."""
    infos = store.list_staging(layout.MEM_WAL_DIR)
    if not infos:
        return
    looks = Looks(StoredLooks.read(store, None), Extent(), clock)
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
