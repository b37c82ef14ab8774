"""How long ago something was, for a process that may have been stopped meanwhile.

Garbage collection empties slots (WAL positions, manifest versions) whose numbers a
stalled writer may still believe free. No slot is emptied before what was in it has
aged ``MIN_DELETION_AGE``. So whoever confirmed its claim less than that ago cannot
have met an emptied slot, and whoever waited longer than half of it must look again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

MIN_DELETION_AGE = timedelta(minutes=10)
RECHECK_AFTER = MIN_DELETION_AGE / 2

# Without CLOCK_BOOTTIME this is macOS, whose CLOCK_MONOTONIC goes on while it sleeps.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

#: Seconds on a clock that only grows; tests pass their own.
Clock = Callable[[], float]


def boot_time() -> float:
    """Seconds since boot, time in suspend included (``time.monotonic`` stands still then).

    A virtual machine that is paused from outside cannot tell: resume none after hours.
    """
    return time.clock_gettime(_CLOCK)
