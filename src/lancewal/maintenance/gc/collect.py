"""Garbage collection: what neither a writer, a reader nor a retained version needs any more.

The collector claims no shard. It may run beside writers, readers, compactors and other
collectors, and may be killed anywhere: every step leaves a state that is whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from lancewal import layout
from lancewal.base import BaseTable
from lancewal.clock import HostClock, host_clock
from lancewal.errors import InvalidInputError
from lancewal.format.shard_manifest import ShardManifest
from lancewal.maintenance import points
from lancewal.maintenance.durability import sync_file_system
from lancewal.maintenance.gc import (
    manifest_entries,
    manifest_versions,
    sstables,
    staging_files,
    wal_entries,
)
from lancewal.maintenance.gc.context import ShardContext, storage_time
from lancewal.maintenance.gc.looks import Extent, Looks
from lancewal.maintenance.gc.needs import Needs
from lancewal.maintenance.gc.report import GcReport
from lancewal.maintenance.gc.retention import Resource, Retention
from lancewal.objects import ObjectStore
from lancewal.sharding import discover_shards, read_manifests

logger = logging.getLogger(__name__)


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
        staging_files.collect(store, retention, now, clock, report)
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
        shard.looks.record(shard.store, sstables.look(shard) if directories else None)
    if Resource.MANIFEST_ENTRIES in wanted:
        manifest_entries.collect(shard)
    # Before the SSTables: an entry that goes keeps none.
    if Resource.WAL_ENTRIES in wanted:
        wal_entries.collect(shard)
    if directories:
        sstables.collect(shard, wanted)
    if Resource.MANIFEST_VERSIONS in wanted:
        manifest_versions.collect(shard)


def _chosen(resources: Iterable[Resource | str] | None) -> frozenset[Resource]:
    if resources is None:
        return frozenset(Resource)
    try:
        return frozenset(Resource(each) for each in resources)
    except ValueError:
        known = ", ".join(Resource)
        raise InvalidInputError(f"unknown resource in {list(resources)!r}; there are: {known}") from None
