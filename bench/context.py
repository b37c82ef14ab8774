"""What a workload is given: a place to write, its size, and clocks."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class Laps:
    """Durations of the same call, made again and again."""

    seconds: list[float] = field(default_factory=list)

    def time(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Make one call and note how long it took."""
        started = time.perf_counter()
        result = call(*args, **kwargs)
        self.seconds.append(time.perf_counter() - started)
        return result

    @property
    def total(self) -> float:
        return sum(self.seconds)

    def percentile(self, percent: float) -> float:
        """The duration that ``percent`` of the calls did not exceed, in seconds.

        >>> Laps([0.1, 0.2, 0.3]).percentile(50)
        0.2
        """
        return float(np.percentile(self.seconds, percent))


@dataclass(frozen=True, slots=True)
class Context:
    """One pass over a workload. ``scratch`` is empty at its start and removed after the last pass."""

    scratch: Path
    quick: bool
    repeat: int = 0

    def size(self, full: int, quick: int) -> int:
        """``full``, or ``quick`` when the run only has to show that the workload works."""
        return quick if self.quick else full

    def directory(self, name: str) -> Path:
        """A new directory below ``scratch``."""
        path = self.scratch / name
        path.mkdir(parents=True)
        return path

    def in_turn(self, **sides: Callable[[], R]) -> dict[str, R]:
        """Run every side once and return what each returned, by its name. For long work.

        The order rotates from pass to pass, so that none always meets the warm cache.
        """
        results = {}
        for name in _rotated(list(sides), self.repeat):
            # Garbage and unwritten pages of the side before are not this one's expense.
            gc.collect()
            os.sync()
            results[name] = sides[name]()
        return results

    def alternate(
        self, times: int, in_a_row: int = 1, /, **sides: Callable[[int], object]
    ) -> dict[str, Laps]:
        """Call every side ``times`` times, ``in_a_row`` calls in turn, and time each call.

        For short calls: a disturbance that lasts longer than a turn meets all sides alike. More
        than one in a row where a call leaves work behind (threads that go on, a disk that is
        still syncing) which would be charged to the side that comes next.
        """
        laps = {name: Laps() for name in sides}
        gc.collect()
        os.sync()
        for turn, start in enumerate(range(0, times, in_a_row)):
            for name in _rotated(list(sides), self.repeat + turn):
                for index in range(start, min(start + in_a_row, times)):
                    laps[name].time(sides[name], index)
        return laps


def _rotated(names: list[str], by: int) -> list[str]:
    offset = by % len(names)
    return names[offset:] + names[:offset]


def by_threads(threads: int, each: int, call: Callable[[int], object]) -> None:
    """``threads`` threads make ``each`` calls, one for each number from zero on; raises the first error."""
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for number in range(each):
                call(thread * each + number)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]
