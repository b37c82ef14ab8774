"""Compact flushed generations into the base table, collect garbage, verify and repair."""

from lancewal.maintenance.compact import compact, execute_shard, finish_compaction
from lancewal.maintenance.gc import GcReport, Resource, Retention, collect_garbage
from lancewal.maintenance.optimize import optimize_base
from lancewal.maintenance.plan import CommitPlan, CompactionPlan, ShardPlan, plan_compaction
from lancewal.maintenance.repair import RepairReport, repair
from lancewal.maintenance.report import CompactionReport, Progress, ShardReport
from lancewal.maintenance.verify import Finding, Kind, Severity, VerifyReport, verify

__all__ = [
    "CommitPlan",
    "CompactionPlan",
    "CompactionReport",
    "Finding",
    "GcReport",
    "Kind",
    "Progress",
    "RepairReport",
    "Resource",
    "Retention",
    "Severity",
    "ShardPlan",
    "ShardReport",
    "VerifyReport",
    "collect_garbage",
    "compact",
    "execute_shard",
    "finish_compaction",
    "optimize_base",
    "plan_compaction",
    "repair",
    "verify",
]
