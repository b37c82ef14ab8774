"""Automatic upkeep of a table: what work is due, which process does it, and when."""

from lancewal.upkeep.means import Done, Means
from lancewal.upkeep.plan import UpkeepPlan, UpkeepTask, Work, plan_upkeep
from lancewal.upkeep.rounds import TaskOutcome, Upkeep, UpkeepReport
from lancewal.upkeep.upkeeper import MOST_COMMITS, Upkeeper

__all__ = [
    "MOST_COMMITS",
    "Done",
    "Means",
    "TaskOutcome",
    "Upkeep",
    "UpkeepPlan",
    "UpkeepReport",
    "UpkeepTask",
    "Upkeeper",
    "Work",
    "plan_upkeep",
]
