"""Small charts as SVG: lines, stacked areas, bars. Colours are classes, so that a page can restyle them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 860
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 40
_LABEL_ROOM = 96
#: Less than this is nothing.
_SMALLEST = 1e-9


@dataclass(frozen=True)
class Series:
    """Values at each ``x`` of the chart; ``style`` is the class of its colour."""

    name: str
    style: str
    values: Sequence[float]


@dataclass(frozen=True)
class Note:
    """A line at some ``x`` with a few words on top."""

    x: float
    text: str


@dataclass(frozen=True)
class Axis:
    """One direction of the plane: which values it spans and where they lie."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.logarithmic:
            low, high, at = math.log(low), math.log(high), math.log(max(value, self.low))
        share = (at - low) / (high - low) if high > low else 0.0
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def lines(
    x: Sequence[float], series: Sequence[Series], unit: str, notes: Sequence[Note] = (), height: int = 260
) -> str:
    """Lines over time."""
    frame = _Frame(x[0], x[-1], max((max(s.values, default=0) for s in series), default=0), height)
    parts = []
    for each in series:
        points = " ".join(
            f"{frame.x.place(a):.1f},{frame.y.place(b):.1f}" for a, b in zip(x, each.values, strict=True)
        )
        parts.append(f'<polyline class="line {each.style}" points="{points}"/>')
    return frame.drawn("".join(parts), unit, "seconds since the start", notes, series)


def stacked(
    x: Sequence[float], series: Sequence[Series], unit: str, notes: Sequence[Note] = (), height: int = 300
) -> str:
    """Areas on top of each other over time, the first one at the bottom."""
    totals = [sum(column) for column in zip(*(each.values for each in series), strict=True)]
    frame = _Frame(x[0], x[-1], max(totals, default=0), height)
    below = [0.0] * len(x)
    parts = []
    for each in series:
        above = [a + b for a, b in zip(below, each.values, strict=True)]
        edge = [(a, b) for a, b in zip(x, above, strict=True)]
        back = [(a, b) for a, b in zip(reversed(x), reversed(below), strict=True)]
        points = " ".join(f"{frame.x.place(a):.1f},{frame.y.place(b):.1f}" for a, b in [*edge, *back])
        parts.append(f'<polygon class="area {each.style}" points="{points}"/>')
        below = above
    return frame.drawn("".join(parts), unit, "seconds since the start", notes, series)


def histogram(
    values: Sequence[float], style: str, unit: str, notes: Sequence[Note] = (), height: int = 240
) -> str:
    """How often values fall between two ticks of a logarithmic axis."""
    low = min(values) / 1.1
    high = max(max(values) * 1.1, low * 2)
    bins = 48
    edges = [low * (high / low) ** (place / bins) for place in range(bins + 1)]
    counts = [0] * bins
    for value in values:
        place = int(math.log(value / low) / math.log(high / low) * bins)
        counts[min(max(place, 0), bins - 1)] += 1
    # Room above the bars for the notes.
    frame = _Frame(low, high, max(counts) * 1.2, height, logarithmic=True)
    parts = []
    for number, (left, right) in zip(counts, itertools.pairwise(edges), strict=True):
        if not number:
            continue
        a, b, top = frame.x.place(left), frame.x.place(right), frame.y.place(number)
        title = f"{number:,} between {_figure(left)} and {_figure(right)} {unit}"
        parts.append(
            f'<rect class="bar {style}" x="{a + 0.5:.1f}" y="{top:.1f}" width="{b - a - 1:.1f}" '
            f'height="{frame.y.start - top:.1f}"><title>{escape(title)}</title></rect>'
        )
    return frame.drawn("".join(parts), "puts", unit, notes, ())


class _Frame:
    """Axes, ticks, notes and the legend around a plot."""

    def __init__(
        self, low: float, high: float, top: float, height: int, *, logarithmic: bool = False
    ) -> None:
        self._height = height
        self._ticks = _round_ticks(top)
        self.x = Axis(low, high, _LEFT, WIDTH - _RIGHT, logarithmic)
        self.y = Axis(0, self._ticks[-1], height - _BOTTOM, _TOP)

    def drawn(
        self, inside: str, y_name: str, x_name: str, notes: Sequence[Note], series: Sequence[Series]
    ) -> str:
        legend = self._legend(series, y_name)
        return (
            f'<svg viewBox="0 0 {WIDTH} {self._height}" role="img">{self._grid()}{inside}'
            f"{self._notes(notes)}{legend}"
            f'<text class="name" x="{WIDTH - _RIGHT}" y="{self._height - 4}" text-anchor="end">'
            f"{escape(x_name)}</text></svg>"
        )

    def _grid(self) -> str:
        parts = []
        for value in self._ticks:
            y = self.y.place(value)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
                f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
                f"{_figure(value)}</text>"
            )
        across = _log_ticks(self.x) if self.x.logarithmic else _inner_ticks(self.x)
        for value in across:
            x = self.x.place(value)
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{self.y.start + 17:.1f}" text-anchor="middle">'
                f"{_figure(value)}</text>"
            )
        return "".join(parts)

    def _notes(self, notes: Sequence[Note]) -> str:
        """Words beside their lines; where lines are close, one below the other."""
        parts = []
        free = [-math.inf] * 4
        for note in sorted(notes, key=lambda each: each.x):
            x = self.x.place(note.x)
            room = 7.0 * len(note.text) + 10
            side = -1 if x + room > WIDTH else 1
            left = x if side > 0 else x - room
            row = next((place for place, until in enumerate(free) if until <= left), len(free) - 1)
            free[row] = left + room
            y = _TOP + 12 + 15 * row
            anchor = "start" if side > 0 else "end"
            parts.append(
                f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{self.y.start}"/>'
                f'<text class="note" x="{x + 4 * side:.1f}" y="{y}" text-anchor="{anchor}">'
                f"{escape(note.text)}</text>"
            )
        return "".join(parts)

    def _legend(self, series: Sequence[Series], y_name: str) -> str:
        parts = [f'<text class="name" x="8" y="16">{escape(y_name)}</text>']
        x = _LEFT + _LABEL_ROOM
        for each in series:
            parts.append(f'<rect class="key {each.style}" x="{x}" y="7" width="11" height="11" rx="2"/>')
            parts.append(f'<text class="name" x="{x + 17}" y="16">{escape(each.name)}</text>')
            x += 34 + round(7.2 * len(each.name))
        return "".join(parts)


def _round_ticks(top: float) -> list[float]:
    """About four round steps from 0 to at least ``top``.

    >>> _round_ticks(930)
    [0.0, 250.0, 500.0, 750.0, 1000.0]
    """
    if top < _SMALLEST:
        return [0.0, 1.0]
    magnitude = 10 ** math.floor(math.log10(top / 4))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude * 4 >= top * 0.999)
    return [step * place for place in range(math.ceil(top / step * 0.999) + 1)]


def _inner_ticks(axis: Axis) -> list[float]:
    ticks = _round_ticks((axis.high - axis.low) / 2)
    step = ticks[1] - ticks[0]
    first = math.ceil(axis.low / step)
    return [step * place for place in range(first, math.floor(axis.high / step) + 1)]


def _log_ticks(axis: Axis) -> list[float]:
    """1, 2 and 5 of every decade inside."""
    decades = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    return [m * 10.0**d for d in decades for m in (1, 2, 5) if axis.low <= m * 10.0**d <= axis.high]


def _figure(value: float) -> str:
    """
    >>> [_figure(each) for each in (0, 0.25, 2.5, 1200)]
    ['0', '0.25', '2.5', '1,200']
    """
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
