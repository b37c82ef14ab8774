"""How long ago something was, for a process that may have been stopped meanwhile.

Garbage collection empties slots (WAL positions, manifest versions) whose numbers a
stalled writer may still believe free. No slot is emptied before what was in it has
aged ``MIN_DELETION_AGE``. So whoever confirmed its claim less than that ago cannot
have met an emptied slot, and whoever waited longer than half of it must look again.

Both sides measure with clocks that nobody sets: the writer with its machine's own, the
collector by what earlier collections saw (``lancewal.maintenance.needs``).
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

# Without CLOCK_BOOTTIME this is macOS, whose CLOCK_MONOTONIC goes on while it sleeps.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

#: Seconds on a clock that only grows; tests pass their own.
Clock = Callable[[], float]


def boot_time() -> float:
    """Seconds since boot, time in suspend included (``time.monotonic`` stands still then).

    A virtual machine that is paused from outside cannot tell: resume none after hours.
    """
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True)
class HostClock:
    """A clock with a name: readings that different processes took can be compared if it is the same."""

    name: str
    read: Clock


@functools.lru_cache(maxsize=1)
def host_clock() -> HostClock:
    """This machine's clock since its last boot; every process on it has the same one."""
    return HostClock(_boot_name(), boot_time)


def _boot_name() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # A container may have a namespace of its own in which the clock is shifted.
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    except OSError:
        return _boot_name_without_proc()


def _boot_name_without_proc() -> str:
    command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return found.stdout.strip() or str(uuid4())
    except (OSError, subprocess.SubprocessError):
        # Nobody else has this name: what other processes measured does not count here.
        return str(uuid4())
