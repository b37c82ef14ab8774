"""What a workload is given: a place to write, its size, and clocks."""

from __future__ import annotations

import gc
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
    """One pass over a workload. ``scratch`` is empty at its start and removed at its end."""

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
            # The garbage of the side before must not be collected at this one's expense.
            gc.collect()
            results[name] = sides[name]()
        return results

    def alternate(self, times: int, **sides: Callable[[int], object]) -> dict[str, Laps]:
        """Call every side ``times`` times, call by call in turn, and time each call.

        For short calls: a disturbance that lasts longer than a call meets all sides alike.
        """
        laps = {name: Laps() for name in sides}
        gc.collect()
        for index in range(times):
            for name in _rotated(list(sides), self.repeat + index):
                laps[name].time(sides[name], index)
        return laps


def _rotated(names: list[str], by: int) -> list[str]:
    offset = by % len(names)
    return names[offset:] + names[:offset]
