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

#: Seconds on a clock that only grows; tests pass their own.
Clock = Callable[[], float]


def boot_time() -> float:
    """Seconds since boot, time in suspend included (a monotonic clock would stand still)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
