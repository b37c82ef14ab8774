"""Elapsed time, for processes that may have been suspended in between.

Garbage collection empties slots (WAL positions, manifest versions) that a stalled writer may
still take for free. No slot is emptied before its content is ``MIN_DELETION_AGE`` old. So a
writer that confirmed its claim less than that ago cannot have met an emptied slot. A writer
that waited longer than half of it must check its claim again.

Neither side relies on a clock that can be set. The writer uses the boot clock of its machine, and the
collector uses the records of earlier collections (``lancewal.maintenance.needs``).
"""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

MIN_DELETION_AGE = timedelta(minutes=10)
RECHECK_AFTER = MIN_DELETION_AGE / 2

# macOS has no CLOCK_BOOTTIME; its CLOCK_MONOTONIC counts the time asleep as well.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

#: Returns seconds on a clock that only moves forward; tests pass their own.
Clock = Callable[[], float]


def boot_time() -> float:
    """Seconds since boot, including time in suspend (when ``time.monotonic`` stands still).

    A virtual machine does not notice that it was paused from outside. Do not resume one after hours.
    """
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True)
class HostClock:
    """A named clock: readings of different processes can be compared if the names are equal."""

    name: str
    read: Clock


@functools.lru_cache(maxsize=1)
def host_clock() -> HostClock:
    """This machine's clock since its last boot; every process on it has the same one."""
    return HostClock(_boot_name(), boot_time)


def _boot_name() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # A container may have its own time namespace, in which the clock is shifted.
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    except OSError:
        return _boot_name_without_proc()


def _boot_name_without_proc() -> str:
    command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return found.stdout.strip() or str(uuid4())
    except (OSError, subprocess.SubprocessError):
        # A unique name: readings of other processes do not count here.
        return str(uuid4())
