"""The Python processes that Spark starts for tasks and for the questions of its planner."""

from __future__ import annotations

import gc
import sys


def settle() -> None:
    """Take all that the worker has imported out of the collections that Spark runs after each task.

    A worker that ``pyspark.daemon`` forked calls ``gc.collect()`` after every task and every question. With
    the modules of pyspark, pandas, pyarrow and Lance this takes about 60 ms of CPU, which can be more than
    the task itself, and the next task waits for it. What is frozen here stays until the worker ends:
    modules, and what the first task holds in cycles. Later garbage is collected as before.
    """
    if _is_forked_by_daemon() and not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def _is_forked_by_daemon() -> bool:
    # No other process collects garbage by itself, and a user's own process is not ours to change.
    return getattr(sys.modules["__main__"].__spec__, "name", None) == "pyspark.daemon"
