"""Runs workloads: every pass measures ours and the peer, the median of the passes counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from bench.comparison import summarize
from bench.context import Context
from bench.machine import machine_facts
from bench.registry import Workload
from bench.report import Result
from bench.scratch import scratch_directory

RESULTS = Path(__file__).parent / "results"
DEFAULT_REPEATS = 5
QUICK_REPEATS = 1


def run(
    workload: Workload,
    *,
    repeats: int,
    quick: bool,
    progress: Callable[[int], object] = lambda done: None,
) -> Result:
    """Make ``repeats`` passes; ``progress`` hears the number of passes done so far.

    Each pass has its own directory below the system's temporary one (``TMPDIR`` moves it: a file
    system in memory makes fsync free). They are removed after the last pass, not between passes.
    """
    if repeats < 1:
        raise ValueError(f"at least one pass is needed, not {repeats}")
    passes = []
    with scratch_directory() as scratch:
        for repeat in range(repeats):
            progress(repeat)
            passes.append(workload.run(Context(scratch.new_place(), quick, repeat)))
            # What was written must not reach the disk at the next pass's expense.
            os.sync()
    return Result(
        workload.name,
        workload.description,
        datetime.now(UTC).date().isoformat(),
        repeats,
        quick,
        machine_facts(),
        summarize(passes),
    )
