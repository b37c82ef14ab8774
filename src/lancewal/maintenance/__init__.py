"""Keeping a table in shape: compaction, garbage collection, verification, repair, backups."""

from lancewal.maintenance.backup import BackupReport, back_up, check_backup, restore_backup
from lancewal.maintenance.checkpoints import (
    Checkpoint,
    checkpoint_state,
    create_checkpoint,
    drop_checkpoint,
    list_checkpoints,
)
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
    "Checkpoint",
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
    "checkpoint_state",
    "collect_garbage",
    "compact",
    "create_checkpoint",
    "drop_checkpoint",
    "execute_pack",
    "execute_shard",
    "finish_compaction",
    "list_checkpoints",
    "optimize_base",
    "plan_compaction",
    "process_totals",
    "repair",
    "restore_backup",
    "verify",
]
