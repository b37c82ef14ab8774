"""Writes what was measured into the documentation: ``python -m bench.pages``.

docs/benchmarks.md and its plot hold every stored result; the README has how many meet their target, and those
that miss it. The curves of growing tables are in docs/scale.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.growth_pages import is_exponent, write_scale

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs"
README = Path(__file__).parent.parent / "README.md"
README_START, README_END = "<!-- measured: written by python -m bench.pages -->", "<!-- end of measured -->"
PLOT = "benchmarks.svg"
#: What the plot shows: rows of workloads, each with the name of its bar. The rest is in the tables.
SHOWN = {
    ("durable_latency", "durable put, no fsync, p50"): "durable put, p50",
    ("durable_threads", "16 threads, no fsync"): "durable puts of 16 threads",
    ("durable_latency", "durable put, fsync, p50"): "durable put with fsync, p50",
    ("gateway", "16 clients, beside LanceDB merge_insert, 4 processes"): "16 clients, beside LanceDB",
    ("gateway", "16 clients, beside Delta merge, 4 processes"): "16 clients, beside Delta Lake",
    ("indexed_ingest", "all three, in put"): "put with three indexes",
    ("replay", "replay on open"): "replay",
    ("live_queries", "vector, 10 nearest, p50"): "vector search of fresh rows",
    ("lookups", "one key in SSTables"): "lookup of one key",
    ("merged_scan", "1,000,000 base rows"): "merged scan of a million rows",
    ("compaction", "compaction"): "compaction",
    ("spark_write", "low latency (WAL)"): "Spark write",
    ("spark_read", "merged read"): "Spark merged read",
}
#: Readable on white and on black.
_GREY = "#808890"

HEAD = f"""# Benchmarks

Every figure here was measured by `make bench` (one workload: `make bench ARGS="durable_latency"`) and
written by `python -m bench.pages`; nothing is typed in by hand. Ours and the peer run in one process run
on the same rows, call by call in turn where calls are short. Compare ratios, not absolute times: they
were taken on a small shared machine. The load is what it had to do on average near the end of the run, ours
included; runs whose section names none did not record it. A busy machine makes times longer and changes no
number of requests.

The ratio is ours ÷ peer. ↑ means that higher is better, ↓ that lower is better. The range beside it is
that of the single passes. A target is what we set ourselves; a missed one is shown as such.

![How many times as good as the peer, thirteen measures with both values]({PLOT})
"""


def stored_results() -> list[dict[str, Any]]:
    """Those of workloads; other figures that are stored beside them have pages of their own."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    return [each for each in found if "workload" in each]


def write_pages() -> None:
    results = stored_results()
    parts = [HEAD, _machine(results)]
    write_scale(results, DOCS)
    README.write_text(with_measured(README.read_text(), results))
    results = [each for each in map(_without_exponents, results) if each["rows"]]
    for result in results:
        parts.append(_section(result))
    (DOCS / "benchmarks.md").write_text("\n".join(parts).rstrip() + "\n")
    _plot(results)


def _without_exponents(result: dict[str, Any]) -> dict[str, Any]:
    return {**result, "rows": [row for row in result["rows"] if not is_exponent(row)]}


def with_measured(readme: str, results: Sequence[dict[str, Any]]) -> str:
    """``readme`` with what is between its marks replaced by what ``results`` say."""
    before, rest = readme.split(README_START)
    after = rest.split(README_END)[1]
    aimed = [(result, row) for result in results for row in result["rows"] if row["target"] is not None]
    missed = [(result, row) for result, row in aimed if not row["target_met"]]
    lines = [f"{len(aimed) - len(missed)} of {len(aimed)} measures that have a target meet it."]
    if missed:
        lines += ["These miss it (↑ means that higher is better, ↓ that lower is better):", ""]
        lines += ["| measure | ours ÷ peer | target | again with `make bench ARGS=…` |", "|---|---|---|---|"]
    for result, row in missed:
        lines.append(
            f"| {row['name']} {_arrow(row)} | {row['ratio']:.3g}× ({row['peer_name']}) "
            f"| {_target(row)} | `{result['workload']}` |"
        )
    return "\n".join([f"{before}{README_START}", *lines, f"{README_END}{after}"])


def _machine(results: Sequence[dict[str, Any]]) -> str:
    machine = results[0]["machine"]
    libraries = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items())
    return (
        f"Machine: {machine['cores']} cores, {machine['memory_gb']} GB, {machine['system']} "
        f"{machine['architecture']}, Python {machine['python']}; {libraries}.\n"
    )


def _section(result: dict[str, Any]) -> str:
    lines = [
        f"## {result['workload']}",
        "",
        f"{result['description']} ({result['repeats']} passes, {result['date']}{_load(result['machine'])}).",
        "",
        "| measure | ours | peer | ratio | range | target |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        low, high = row["ratio_range"]
        target = "" if row["target"] is None else _target(row)
        lines.append(
            f"| {row['name']} {_arrow(row)} | {_figure(row['ours'])} {row['unit']} "
            f"| {_figure(row['peer'])} {row['unit']} ({row['peer_name']}) "
            f"| {row['ratio']:.3g}× | {low:.3g} to {high:.3g} | {target} |"
        )
    return "\n".join([*lines, ""])


def _figure(value: float) -> str:
    """
    >>> _figure(0.61854), _figure(12.0), _figure(25860.0)
    ('0.6185', '12', '25,860')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _load(machine: dict[str, Any]) -> str:
    return f", load {machine['load']} on {machine['cores']} cores" if "load" in machine else ""


def _arrow(row: dict[str, Any]) -> str:
    return "↑" if row["higher_is_better"] else "↓"


def _target(row: dict[str, Any]) -> str:
    bound = "≥" if row["higher_is_better"] else "≤"
    return f"{bound} {row['target']:g}× {'met' if row['target_met'] else 'missed'}"


def chosen_rows(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the plot, in its order, of those that were measured."""
    known = {(result["workload"], row["name"]): row for result in results for row in result["rows"]}
    return [{**known[key], "title": title} for key, title in SHOWN.items() if key in known]


def _plot(results: Sequence[dict[str, Any]]) -> None:
    """A bar for each chosen row, with both values beside it; readable on a light and on a dark page."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "lancewal"
    from matplotlib import pyplot

    rows = list(reversed(chosen_rows(results)))
    figure, axes = pyplot.subplots(figsize=(8, 0.36 * len(rows) + 0.9))
    advantages = [row["advantage"] for row in rows]
    colours = ["#2f9e77" if advantage >= 1 else "#d1603d" for advantage in advantages]
    axes.barh([row["title"] for row in rows], [each - 1 for each in advantages], left=1, color=colours)
    axes.set_xscale("log")
    axes.margins(y=0.01)
    most = max(advantages)
    axes.set_xlim(min(*advantages, 1) / 1.15, most**2.25)  # room for the texts
    axes.set_xticks([1, 10, 100], ["1", "10", "100"])
    axes.minorticks_off()
    for place, row in enumerate(rows):
        unit = f" {row['unit']}"
        text = f"{_figure(row['ours'])} against {_figure(row['peer'])}{unit} ({row['peer_name']})"
        axes.text(max(row["advantage"], 1) * 1.12, place, text, va="center", fontsize=9, color=_GREY)
    axes.axvline(1, color=_GREY, linewidth=0.8)
    axes.set_xlabel("times as good as the peer (log scale; right of 1 is better)", color=_GREY, fontsize=9)
    axes.tick_params(axis="both", which="both", labelsize=9, colors=_GREY)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_GREY)
    figure.tight_layout()
    figure.savefig(DOCS / PLOT, metadata={"Date": None}, transparent=True)
    pyplot.close(figure)


if __name__ == "__main__":
    write_pages()
