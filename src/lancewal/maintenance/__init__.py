"""Keeping a table in shape: compaction, garbage collection, verification, repair."""

from lancewal.maintenance import history
from lancewal.maintenance.backup import BackupReport, back_up, check_backup, restore_backup
from lancewal.maintenance.compact import compact, execute_shard, finish_compaction, optimize_base
from lancewal.maintenance.findings import REPAIRABLE, Finding, Kind, Severity, VerifyReport
from lancewal.maintenance.gc import collect_garbage
from lancewal.maintenance.plan import (
    DEFAULT_COMMIT_BYTES,
    CommitPlan,
    CompactionPlan,
    CompactionReport,
    Progress,
    ShardPlan,
    ShardReport,
    plan_compaction,
)
from lancewal.maintenance.repair import RepairReport, repair
from lancewal.maintenance.retention import Collected, GcReport, Kept, Resource, Retention
from lancewal.maintenance.verify import verify

__all__ = [
    "DEFAULT_COMMIT_BYTES",
    "REPAIRABLE",
    "BackupReport",
    "Collected",
    "CommitPlan",
    "CompactionPlan",
    "CompactionReport",
    "Finding",
    "GcReport",
    "Kept",
    "Kind",
    "Progress",
    "RepairReport",
    "Resource",
    "Retention",
    "Severity",
    "ShardPlan",
    "ShardReport",
    "VerifyReport",
    "back_up",
    "check_backup",
    "collect_garbage",
    "compact",
    "execute_shard",
    "finish_compaction",
    "history",
    "optimize_base",
    "plan_compaction",
    "repair",
    "restore_backup",
    "verify",
]
