"""Half-written files that processes which died have left; local disks only."""

from __future__ import annotations

from datetime import datetime

from lancewal import layout
from lancewal.clock import HostClock
from lancewal.maintenance.gc.looks import Extent, Looks, held, unseen
from lancewal.maintenance.gc.report import Collected, GcReport, Kept
from lancewal.maintenance.gc.retention import Resource, Retention
from lancewal.objects import ObjectStore

_RESOURCE = Resource.STAGING_FILES


def collect(
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
