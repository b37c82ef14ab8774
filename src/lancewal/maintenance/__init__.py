"""Keeping a table in shape: compaction, garbage collection, verification, repair, backups."""

from lancewal.maintenance.backup import (
    BackupPart,
    BackupReport,
    CopiedPart,
    back_up,
    check_backup,
    copy_part,
    restore_backup,
)
from lancewal.maintenance.checkpoints import (
    Checkpoint,
    checkpoint_state,
    create_checkpoint,
    drop_checkpoint,
    drop_checkpoint_tags,
    list_checkpoints,
    read_checkpoints,
)
from lancewal.maintenance.commits import at_crash_points
from lancewal.maintenance.compact import (
    compact,
    execute_pack,
    finish_compaction,
)
from lancewal.maintenance.doctor import Check, examine
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
)
from lancewal.maintenance.settings import UpkeepSettings, read_upkeep_settings, store_upkeep_settings
from lancewal.maintenance.tidy import SMALL_FILE_ROWS, optimize_base, tidy
from lancewal.maintenance.verify import verify

__all__ = [
    "DEFAULT_COMMIT_BYTES",
    "SMALL_FILE_ROWS",
    "BackupPart",
    "BackupReport",
    "Check",
    "Checkpoint",
    "CompactionPlan",
    "CompactionReport",
    "CopiedPart",
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
    "UpkeepSettings",
    "VerifyReport",
    "at_crash_points",
    "back_up",
    "check_backup",
    "checkpoint_state",
    "collect_garbage",
    "compact",
    "copy_part",
    "create_checkpoint",
    "drop_checkpoint",
    "drop_checkpoint_tags",
    "examine",
    "execute_pack",
    "finish_compaction",
    "list_checkpoints",
    "optimize_base",
    "plan_compaction",
    "read_checkpoints",
    "read_upkeep_settings",
    "repair",
    "restore_backup",
    "store_upkeep_settings",
    "tidy",
    "verify",
]
