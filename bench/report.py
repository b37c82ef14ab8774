"""Results as a table to read and as JSON to keep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from bench.comparison import Comparison, Row


@dataclass(frozen=True, slots=True)
class Result:
    """Everything about one workload's run."""

    workload: str
    description: str
    date: str
    repeats: int
    quick: bool
    machine: dict[str, object]
    rows: Sequence[Row]

    def to_dict(self) -> dict[str, object]:
        return {
            "workload": self.workload,
            "description": self.description,
            "date": self.date,
            "repeats": self.repeats,
            "quick": self.quick,
            "machine": self.machine,
            "rows": [_row_to_dict(row) for row in self.rows],
        }


def render(result: Result) -> Table:
    """The table of ratios. A ratio is always ours ÷ peer; the sign says which way is better."""
    passes = "1 pass" if result.repeats == 1 else f"median of {result.repeats} passes"
    table = Table(
        title=f"{result.workload}: {result.description}",
        caption=f"{passes}{', quick sizes' if result.quick else ''}; ratio = ours ÷ peer, "
        "↑ higher is better, ↓ lower is better",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("measure")
    table.add_column("ours", justify="right")
    table.add_column("peer", justify="right")
    table.add_column("peer is")
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("target", justify="right", no_wrap=True)
    for row in result.rows:
        middle = row.median
        table.add_row(
            f"{middle.name} {'↑' if middle.higher_is_better else '↓'}{_span(middle)}",
            f"{_figure(middle.ours)} {middle.unit}",
            f"{_figure(middle.peer)} {middle.unit}",
            middle.peer_name,
            f"{_figure(middle.ratio)}×",
            _target(middle),
        )
    return table


def write_json(document: object, path: Path) -> None:
    """Write ``document``, creating the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _row_to_dict(row: Row) -> dict[str, object]:
    middle = row.median
    document: dict[str, object] = {
        "name": middle.name,
        "unit": middle.unit,
        "higher_is_better": middle.higher_is_better,
        "ours": _rounded(middle.ours),
        "peer": _rounded(middle.peer),
        "peer_name": middle.peer_name,
        "ratio": _rounded(middle.ratio),
        "ratio_range": [_rounded(row.lowest_ratio), _rounded(row.highest_ratio)],
        "advantage": _rounded(middle.advantage),
        "target": middle.target,
        "target_met": middle.target_met,
    }
    if middle.points:
        document["points_unit"] = middle.points_unit
        document["points"] = [
            [_rounded(p.size), _rounded(p.ours), None if p.peer is None else _rounded(p.peer)]
            for p in middle.points
        ]
    return document


def _span(comparison: Comparison) -> str:
    """The ends of a curve."""
    if not comparison.points:
        return ""
    first, last = comparison.points[0], comparison.points[-1]
    return f" ({_figure(first.ours)} → {_figure(last.ours)} {comparison.points_unit})"


def _target(comparison: Comparison) -> str:
    if comparison.target is None:
        return "-"
    bound = "≥" if comparison.higher_is_better else "≤"
    return f"{bound} {_figure(comparison.target)}× {'met' if comparison.target_met else 'missed'}"


def _figure(value: float) -> str:
    """Three significant digits, never in exponent form."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".removesuffix(".")


def _rounded(value: float) -> float:
    """Four significant digits: what lies beyond is noise."""
    return float(f"{value:.4g}")
