"""docs/scale.md: the curves of the growth workloads and the steady state, as plots and tables.

Written by ``python -m bench.pages`` from the stored results and the stored profiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.comparison import Point
from bench.growth import Growth, exponent_of_peer, growths
from bench.growth_profile import PROFILES
from bench.registry import load_workloads

STEADY = "steady"
UPKEEP = "upkeep_steady"

HEAD = """# Scale

How costs grow, measured by `make bench ARGS=growth` (one axis: `make bench ARGS=growth_shards`) and written
by `python -m bench.pages`. Each operation is measured at growing sizes; times are those of the processor, of
all threads, the best of a few calls. The exponent is the power of the size that the cost grows with, fitted
to the upper half of the curve: 1 is proportional, 0 is constant. A bound of 1.1 is set where the work itself
grows with the size, or the exponent of the peer on the same tables where that is larger; one of 0.3 where the
work does not grow. In the plots the dotted line is proportional growth; the dashed line, where there is one,
is the peer.
"""

_STEADY_HEAD = """## Steady state

`make bench ARGS=steady`: {description}.

The table holds the same rows all the time, with a BTree on the key
and indexes on a text and a vector column. Times are those of the processor. "First lookup" is the first one
after a compaction.
"""

_UPKEEP_HEAD = """## Left alone

`make bench ARGS=upkeep_steady`: {description}.

Nobody flushes, compacts or collects by hand. Minute one begins when the table has been written to for ten
minutes: nothing younger may be deleted, so for so long files and bytes of every table grow. Times are those
of a clock, so a busy machine makes them longer; "CPU" is the processor time of the reading process, which it
does not. The machine had other users: its load was {load} near the end, on two processors.
"""

_PROFILES_HEAD = """## Profiles

Where the time of the worst points went, before and after; again with
`python -m bench.growth_profile growth_shards compact`.
"""

#: Readable on white and on black.
_INK, _OURS, _PEER = "#7d8590", "#1f9e78", "#d9822b"
_COLUMNS = 3


def write_scale(results: Sequence[dict[str, Any]], docs: Path) -> None:
    """Write the page and its plots into ``docs``, of those of ``results`` that have curves."""
    load_workloads()
    parts = [HEAD]
    for result in results:
        this = growths.get(result["workload"])
        if this is not None:
            parts.append(_section(this, result))
            _plot(this.axis, _curves(result), docs / _picture(result), scale="log")
    for result in results:
        if result["workload"] in (STEADY, UPKEEP):
            parts.append(_steady_section(result))
            _plot("minute", _curves(result), docs / _picture(result), scale="linear")
    paths = sorted(PROFILES.glob("*.txt"), key=lambda path: (path.name.split(".")[0], "after" in path.name))
    profiles = [path.read_text(encoding="utf-8").rstrip() for path in paths]
    if profiles:
        parts.append(_PROFILES_HEAD)
        parts += [f"```text\n{text}\n```\n" for text in profiles]
    (docs / "scale.md").write_text("\n".join(parts).rstrip() + "\n")


def is_exponent(row: dict[str, Any]) -> bool:
    """Whether a stored row is a curve's exponent, which only docs/scale.md shows."""
    return "points" in row and row["peer_name"] == "linear"


def _picture(result: dict[str, Any]) -> str:
    return f"scale-{result['workload'].removeprefix('growth_')}.svg"


def _curves(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if "points" in row]


def _section(this: Growth, result: dict[str, Any]) -> str:
    title = f"By {this.axis}"
    peer = f" Dashed: {this.peer_name}." if _has_peer(result) else ""
    lines = [
        f"## {title}",
        "",
        f"{result['description'][0].upper()}{result['description'][1:]} ({result['date']}).{peer}",
        "",
        f"![{title}: cost of each operation]({_picture(result)})",
        "",
        "| operation | smallest | largest | peer there | exponent | the peer's | bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in _curves(result):
        (low, first, _), (high, last, peer_last) = row["points"][0], row["points"][-1]
        unit = row["points_unit"]
        theirs = "" if peer_last is None else f"{_figure(peer_last)} {unit}"
        ends = f"{_figure(first)} {unit} at {low:,.0f} | {_figure(last)} {unit} at {high:,.0f}"
        lines.append(
            f"| {row['name']} | {ends} | {theirs} | {row['ours']:.2f} | {_power(row)} | {_bound(row)} |"
        )
    for row in result["rows"]:
        if "points" not in row:
            lines += [
                "",
                f"{row['name']}: {_figure(row['ours'])} {row['unit']}, {row['ratio']:.3g}× the "
                f"{row['peer_name']} ({_bound(row)}).",
            ]
    return "\n".join([*lines, ""])


def _steady_section(result: dict[str, Any]) -> str:
    lines = [
        (_UPKEEP_HEAD if result["workload"] == UPKEEP else _STEADY_HEAD).format(
            description=result["description"], load=result["machine"].get("load", "not noted")
        ),
        f"![Cost of each operation by minute]({_picture(result)})",
        "",
        "| measure | last minute | compared with | ratio | bound |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['name']} | {_figure(row['ours'])} {row['unit']} | {_figure(row['peer'])} {row['unit']} "
            f"({row['peer_name']}) | {row['ratio']:.2f}× | {_bound(row)} |"
        )
    return "\n".join([*lines, ""])


def _power(row: dict[str, Any]) -> str:
    """The peer's exponent, where there is a peer."""
    found = exponent_of_peer([Point(*point) for point in row["points"]])
    return "" if found is None else f"{found:.2f}"


def _has_peer(result: dict[str, Any]) -> bool:
    return any(peer is not None for row in _curves(result) for _, _, peer in row["points"])


def _bound(row: dict[str, Any]) -> str:
    if row["target"] is None:
        return ""
    return f"≤ {row['target']:g} {'met' if row['target_met'] else '**missed**'}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _plot(axis: str, curves: Sequence[dict[str, Any]], path: Path, *, scale: str) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "lancewal"
    from matplotlib import pyplot, ticker

    down = -(-len(curves) // _COLUMNS)
    across = -(-len(curves) // down)
    figure, grid = pyplot.subplots(down, across, figsize=(2.3 * across, 2.0 * down), squeeze=False)
    for axes, row in zip(grid.flat, curves, strict=False):
        _draw(axes, row, scale)
        for each in (axes.xaxis, axes.yaxis):
            each.set_major_formatter(ticker.FuncFormatter(lambda value, _: _tick(value)))
    for axes in list(grid.flat)[len(curves) :]:
        axes.set_visible(False)
    for axes in list(grid.flat)[max(0, len(curves) - across) : len(curves)]:
        axes.set_xlabel(axis, color=_INK, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None}, transparent=True)
    pyplot.close(figure)


def _tick(value: float) -> str:
    for suffix, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"


def _draw(axes: Any, row: dict[str, Any], scale: str) -> None:
    sizes, ours, peers = zip(*row["points"], strict=True)
    axes.set_xscale(scale)
    axes.set_yscale(scale)
    if scale == "log":
        start, figure = sizes[0], ours[0]
        axes.plot(
            [start, sizes[-1]], [figure, figure * sizes[-1] / start], ":", color=_INK, linewidth=1, zorder=1
        )
        title = f"{row['name']} ({row['points_unit']})\nexponent {row['ours']:.2f}"
    else:
        axes.axhline(row["peer"] * (row["target"] or 1.3), linestyle=":", color=_INK, linewidth=1)
        title = f"{row['name']} ({row['points_unit']})\n{row['ratio']:.2f}×"
    with_peer = [(size, peer) for size, peer in zip(sizes, peers, strict=True) if peer is not None]
    if with_peer:
        axes.plot(*zip(*with_peer, strict=True), "--", color=_PEER, linewidth=1.2, zorder=2)
    axes.plot(sizes, ours, "o-", color=_OURS, linewidth=1.6, markersize=3, zorder=3)
    low, high = min([*ours, *(p for _, p in with_peer)]), max([*ours, *(p for _, p in with_peer)])
    axes.set_ylim(*((low / 2, high * 2) if scale == "log" else (0, high * 1.5)))
    axes.set_title(title, fontsize=7.5, color=_INK)
    axes.tick_params(labelsize=7, colors=_INK, which="both")
    axes.minorticks_off()
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)
