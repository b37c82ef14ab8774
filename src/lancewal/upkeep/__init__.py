"""A table that looks after itself: what is due, who does it, and what users can do by hand."""

from lancewal.upkeep.maintained import MaintainedTable
from lancewal.upkeep.means import Done, Here, Means
from lancewal.upkeep.plan import UpkeepPlan, UpkeepTask, Work, plan_upkeep
from lancewal.upkeep.rounds import TaskOutcome, Upkeep, UpkeepReport
from lancewal.upkeep.upkeeper import Upkeeper

__all__ = [
    "Done",
    "Here",
    "MaintainedTable",
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
