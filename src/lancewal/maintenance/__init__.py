"""Keeping a table in shape: compaction, garbage collection, verification, repair, backups."""

from lancewal.maintenance.backup import BackupReport, back_up, check_backup, restore_backup
from lancewal.maintenance.commits import at_crash_points
from lancewal.maintenance.compact import (
    compact,
    execute_pack,
    execute_shard,
    finish_compaction,
)
from lancewal.maintenance.gc import collect_garbage
from lancewal.maintenance.needs import Retention
from lancewal.maintenance.plan import (
    DEFAULT_COMMIT_BYTES,
    CompactionPlan,
    Pack,
    ShardPlan,
    plan_compaction,
)
from lancewal.maintenance.repair import RepairReport, repair
from lancewal.maintenance.reports import (
    CompactionReport,
    Finding,
    GcReport,
    Kind,
    Progress,
    Resource,
    Severity,
    VerifyReport,
    process_totals,
)
from lancewal.maintenance.tidy import optimize_base
from lancewal.maintenance.verify import verify

__all__ = [
    "DEFAULT_COMMIT_BYTES",
    "BackupReport",
    "CompactionPlan",
    "CompactionReport",
    "Finding",
    "GcReport",
    "Kind",
    "Pack",
    "Progress",
    "RepairReport",
    "Resource",
    "Retention",
    "Severity",
    "ShardPlan",
    "VerifyReport",
    "at_crash_points",
    "back_up",
    "check_backup",
    "collect_garbage",
    "compact",
    "execute_pack",
    "execute_shard",
    "finish_compaction",
    "optimize_base",
    "plan_compaction",
    "process_totals",
    "repair",
    "restore_backup",
    "verify",
]
