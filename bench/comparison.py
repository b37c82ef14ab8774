"""Ours against a peer: one measure, its ratio, its target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a curve."""

    size: float
    ours: float
    peer: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure from one pass over a workload.

    ``target`` is a bound on the ratio ours ÷ peer: at least that much where higher is
    better, at most that much where lower is better. ``points`` is the curve that the figures
    were derived from, in ``points_unit``.
    """

    name: str
    ours: float
    peer: float
    unit: str
    higher_is_better: bool
    peer_name: str
    target: float | None = None
    points: tuple[Point, ...] = ()
    points_unit: str = ""

    def __post_init__(self) -> None:
        for side, value in (("ours", self.ours), ("peer", self.peer)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{self.name}: {side} measured {value}, which gives no ratio")

    @property
    def ratio(self) -> float:
        """Ours ÷ peer, whichever direction is the better one.

        >>> Comparison("latency", 1.0, 4.0, "ms", False, "file").ratio
        0.25
        """
        return self.ours / self.peer

    @property
    def advantage(self) -> float:
        """How many times as good ours is: above 1 means better, whatever the unit.

        >>> Comparison("latency", 1.0, 4.0, "ms", False, "file").advantage
        4.0
        """
        return self.ratio if self.higher_is_better else 1 / self.ratio

    @property
    def target_met(self) -> bool | None:
        """Whether the ratio keeps to the target; ``None`` without one."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.higher_is_better else self.ratio <= self.target


@dataclass(frozen=True, slots=True)
class Row:
    """A measure over all passes: the medians of both sides, and how far single passes strayed."""

    median: Comparison
    lowest_ratio: float
    highest_ratio: float


def summarize(passes: Sequence[Sequence[Comparison]]) -> list[Row]:
    """One row per measure, in the order of the first pass.

    Every pass must have the same measures: a median over a changing set means nothing.
    """
    if not passes or not passes[0]:
        raise ValueError("a workload must return at least one comparison")
    by_measure = [{_measure(each): each for each in one_pass} for one_pass in passes]
    first = by_measure[0]
    for one_pass, found in zip(passes, by_measure, strict=True):
        if found.keys() != first.keys() or len(found) != len(one_pass):
            raise ValueError("every pass of a workload must return the same measures, each once")
    return [_row([found[measure] for found in by_measure]) for measure in first]


def _measure(comparison: Comparison) -> tuple[object, ...]:
    c = comparison
    return (c.name, c.unit, c.higher_is_better, c.peer_name, c.target)


def _row(passes: Sequence[Comparison]) -> Row:
    first = passes[0]
    middle = Comparison(
        first.name,
        median(each.ours for each in passes),
        median(each.peer for each in passes),
        first.unit,
        first.higher_is_better,
        first.peer_name,
        first.target,
        first.points,
        first.points_unit,
    )
    ratios = [each.ratio for each in passes]
    return Row(middle, min(ratios), max(ratios))
