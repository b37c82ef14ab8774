"""How costs grow: operations measured at growing sizes, and the power of the size that each grows with.

A growth is a generator that builds its table up size by size and, at each, yields what is to be measured
there. Time is the processor's, of all threads, the best of a few calls: on a busy machine that is what
repeats. The exponent is fitted to the upper part of the curve, where fixed costs no longer hide it.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.comparison import Comparison, Point
from bench.context import Context
from bench.registry import workload

#: Bounds for exponents: as much work as there is of it, and work that does not depend on the size.
LINEAR = 1.1
FLAT = 0.3
#: Samples of an operation that cannot be repeated.
ONCE = 1

#: A call that would take longer at the next size is not made there: it has shown its slope.
_LONGEST_MILLISECONDS = 30_000.0
#: A measure takes no further sample after this long.
_ENOUGH_SECONDS = 1.5
#: A sample of calls that can be repeated lasts at least this long.
_SAMPLE_SECONDS = 0.02
_LEAST_EXPONENT = 0.01
_FEWEST_FITTED = 3


@dataclass(frozen=True, slots=True)
class Measure:
    """One operation at one size.

    Without ``before`` the first call only warms up. With it each call is a sample of its own and comes
    after one of ``before``, which is not measured. With another unit than milliseconds the calls return
    their figure and are not timed. ``peer`` gets its own ``before_peer``.
    """

    name: str
    call: Callable[[], object]
    peer: Callable[[], object] | None = None
    bound: float | None = LINEAR
    before: Callable[[], object] | None = None
    before_peer: Callable[[], object] | None = None
    unit: str = "ms"
    #: Samples at most.
    samples: int = 4


Steps = Iterator[tuple[int, Sequence[Measure]]]


@dataclass(frozen=True, slots=True)
class Growth:
    """What is measured along one axis. ``steps`` builds and yields each of the sizes that it is given."""

    name: str
    axis: str
    peer_name: str
    sizes: Sequence[int]
    quick_sizes: Sequence[int]
    steps: Callable[[Context, Sequence[int]], Steps]

    def sizes_of(self, context: Context) -> Sequence[int]:
        return self.quick_sizes if context.quick else self.sizes


#: Every growth by the name of its workload.
growths: dict[str, Growth] = {}


def growth(
    name: str,
    description: str,
    *,
    axis: str,
    sizes: Sequence[int],
    quick: Sequence[int],
    peer: str = "Lance",
    goals: Callable[[Sequence[Comparison]], Sequence[Comparison]] = lambda curves: (),
) -> Callable[[Callable[[Context, Sequence[int]], Steps]], Callable[[Context, Sequence[int]], Steps]]:
    """Register the decorated steps as a workload; ``goals`` derives further rows from its curves."""

    def register(
        steps: Callable[[Context, Sequence[int]], Steps],
    ) -> Callable[[Context, Sequence[int]], Steps]:
        growths[name] = this = Growth(name, axis, peer, sizes, quick, steps)

        @workload(name, description, repeats=1)
        def run(context: Context) -> list[Comparison]:
            curves = grow(this, context)
            return [*curves, *goals(curves)]

        return steps

    return register


@dataclass(slots=True)
class _Curve:
    measure: Measure
    points: list[Point] = field(default_factory=list)


def grow(this: Growth, context: Context) -> list[Comparison]:
    """Measure every size; one comparison for each operation, its exponent against 1 with the points."""
    curves: dict[str, _Curve] = {}
    for size, measures in this.steps(context, this.sizes_of(context)):
        for measure in measures:
            curve = curves.setdefault(measure.name, _Curve(measure))
            if measure.unit != "ms" or _expected(curve.points, size) < _LONGEST_MILLISECONDS:
                curve.points.append(Point(size, *_figures(measure)))
    return [
        Comparison(
            name,
            max(exponent(curve.points), _LEAST_EXPONENT),
            1.0,
            "",
            False,
            "linear",
            _bound(curve),
            tuple(curve.points),
            curve.measure.unit,
        )
        for name, curve in curves.items()
    ]


def _bound(curve: _Curve) -> float | None:
    """The measure's bound; of work that grows with the size no less than what the peer's grows with."""
    theirs = exponent_of_peer(curve.points)
    if curve.measure.bound != LINEAR or theirs is None:
        return curve.measure.bound
    return max(LINEAR, round(theirs, 2))


def exponent_of_peer(points: Sequence[Point]) -> float | None:
    """As :func:`exponent`, of the peer; ``None`` where it was not measured at every size."""
    theirs = [Point(point.size, point.peer, None) for point in points if point.peer is not None]
    return exponent(theirs) if len(theirs) == len(points) > 1 else None


def exponent(points: Sequence[Point]) -> float:
    """The power of the size that the figures grow with, by least squares over the upper half.

    >>> round(exponent([Point(1, 9, None), Point(10, 10, None), Point(100, 100, None),
    ...                 Point(1000, 1000, None)]), 3)
    1.0
    """
    upper = points[-max(_FEWEST_FITTED, math.ceil(len(points) / 2)) :]
    if len(upper) < 2:
        return 0.0
    sizes, figures = np.log([p.size for p in upper]), np.log([p.ours for p in upper])
    return float(np.polyfit(sizes, figures, 1)[0])


def exponent_of(name: str, sizes: Sequence[int], figures: Sequence[float], bound: float) -> Comparison:
    """The exponent of figures that were measured elsewhere, as a row of its own."""
    points = [Point(size, figure, None) for size, figure in zip(sizes, figures, strict=True)]
    return Comparison(name, max(exponent(points), _LEAST_EXPONENT), 1.0, "", False, "linear", bound)


def _expected(points: Sequence[Point], size: int) -> float:
    """The figure at ``size`` if the curve goes on as between its last two points."""
    if len(points) < 2:
        return 0.0
    before, last = points[-2:]
    slope = math.log(last.ours / before.ours) / math.log(last.size / before.size)
    return last.ours * float((size / last.size) ** max(slope, 0.0))


def _figures(measure: Measure) -> tuple[float, float | None]:
    take = _cpu_milliseconds if measure.unit == "ms" else _returned
    ours = take(measure.call, measure.before, measure.samples)
    theirs = None if measure.peer is None else take(measure.peer, measure.before_peer, measure.samples)
    return ours, theirs


def _returned(call: Callable[[], object], before: Callable[[], object] | None, samples: int) -> float:
    if before is not None:
        before()
    return max(float(call()), 1e-9)  # type: ignore[arg-type]


def _cpu_milliseconds(call: Callable[[], object], before: Callable[[], object] | None, samples: int) -> float:
    best = math.inf
    calls = 1
    gc.collect()
    if before is None:
        call()
    began = time.perf_counter()
    for _ in range(samples):
        if before is not None:
            before()
        started = time.process_time()
        for _ in range(calls):
            call()
        best = min(best, (time.process_time() - started) / calls)
        if time.perf_counter() - began > _ENOUGH_SECONDS:
            break
        if before is None:
            calls = max(1, min(1000, int(_SAMPLE_SECONDS / max(best, 1e-6))))
    return max(best, 1e-7) * 1e3
