"""Half-written files that processes which died have left; local disks only."""

from __future__ import annotations

from datetime import datetime

from lancewal import layout
from lancewal.maintenance.gc.report import Collected, GcReport
from lancewal.maintenance.gc.retention import Resource, Retention
from lancewal.objects import ObjectStore


def collect(store: ObjectStore, retention: Retention, now: datetime, report: GcReport) -> None:
    for info in store.list_staging(layout.MEM_WAL_DIR):
        if now - info.modified < retention.staging_files:
            continue
        if not report.dry_run:
            store.delete(info.path)
        report.collected.append(Collected(Resource.STAGING_FILES, None, info.path, info.size))
