"""The report of a run: one HTML file with its plots inside, nothing fetched from anywhere."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path

import lance
import numpy as np

import lancewal
from demo import charts
from demo.measurements import Measurements
from demo.narration import Line, Narration
from demo.stage import Stage
from lancewal.cli.console import count, duration

#: So many points in a plot over time, at most one a second.
_BINS = 60


def write_report(stage: Stage, seconds: float) -> Path:
    """Write ``report.html`` beside the table; what a failed run did not measure is left out."""
    said, measured = stage.narration, stage.measured
    page = files("demo").joinpath("report.css").read_text()
    verdict = "Every check held" if said.holds else "Something did not hold"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>lancewal demo: {verdict.lower()}</title><style>{page}</style></head><body><main>",
        f"<h1>lancewal demo <span class='{'good' if said.holds else 'bad'}'>{verdict}</span></h1>",
        f"<p class='quiet'>{escape(_circumstances(stage, seconds))}</p>",
        _tiles(stage),
        *(_plots(measured) if measured.puts and len(measured.levels) > 1 else []),
        _steps(said),
        _further(stage),
        "</main></body></html>",
    ]
    where = stage.directory / "report.html"
    where.write_text("".join(parts), encoding="utf-8")
    return where


def _circumstances(stage: Stage, seconds: float) -> str:
    version = stage.spark.version if stage.spark else ""
    return ", ".join(
        [
            f"{datetime.now().astimezone():%Y-%m-%d %H:%M}",
            f"{duration(seconds)} on {os.cpu_count()} cores ({platform.machine()}, {platform.system()})",
            f"Python {platform.python_version()}",
            f"lancewal {lancewal.__version__}",
            f"pylance {lance.__version__}",
            *([f"Spark {version}"] if version else []),
        ]
    )


def _tiles(stage: Stage) -> str:
    measured = stage.measured
    tiles = [("checks", count(stage.narration.checks))]
    if measured.levels:
        last = measured.levels[-1]
        tiles.append(("documents in the end", count(last.memtable + last.wal + last.sstables + last.base)))
    if measured.arrivals:
        tiles.append(("changes by the stream", count(sum(each.rows for each in measured.arrivals))))
    if measured.puts:
        tiles.append(("puts by the service", count(len(measured.puts))))
    if measured.searches:
        tiles.append(("searches meanwhile", count(len(measured.searches))))
    kills = stage.scale.kills + (stage.spark.kills if stage.spark else 0)
    tiles.append(("kills survived", count(kills)))
    shown = "".join(f"<div><b>{value}</b>{escape(name)}</div>" for name, value in tiles)
    return f"<section class='tiles'>{shown}</section>"


def _plots(measured: Measurements) -> list[str]:
    notes = _notes(measured)
    return [
        _figure(
            "Throughput",
            "Rows that became durable and readable, per second. The stream writes whole "
            "micro-batches, the service one document a put.",
            _throughput(measured, notes),
        ),
        _figure(
            "Latency of a put",
            "From the call until the document was synced to disk and readable, in milliseconds "
            "(logarithmic), while the stream, the reader and compaction worked on the same cores.",
            _latency(measured),
        ),
        _figure(
            "Where rows are",
            "The level from which a reader took the newest version of each document. Rows go from MemTables "
            "and the WAL to SSTables (flush) and to the base table (compact).",
            _levels(measured, notes),
        ),
    ]


def _notes(measured: Measurements) -> list[charts.Note]:
    """Marks in words; several of a kind in a row are told once."""
    notes: list[charts.Note] = []
    before = ""
    for mark in measured.marks:
        if mark.text != before:
            notes.append(charts.Note(mark.at, mark.text))
        before = mark.text
    return notes


def _throughput(measured: Measurements, notes: Sequence[charts.Note]) -> str:
    puts = np.array([put.at for put in measured.puts])
    arrivals = np.array([each.at for each in measured.arrivals])
    begin, end = puts.min(), max(puts.max(), arrivals.max(initial=0.0))
    width = max(1.0, float(np.ceil((end - begin) / _BINS)))
    edges = np.arange(begin, end + 2 * width, width)
    weights = np.array([each.rows for each in measured.arrivals], float)
    streamed = np.histogram(arrivals, edges, weights=weights)[0] / width
    served = np.histogram(puts, edges)[0] / width
    middle = (edges[:-1] + width / 2).tolist()
    series = [
        charts.Series("stream", "c1", streamed.tolist()),
        charts.Series("service", "c2", served.tolist()),
    ]
    return charts.lines(middle, series, "rows per second", [n for n in notes if n.x <= middle[-1]])


def _latency(measured: Measurements) -> str:
    milliseconds = [put.seconds * 1e3 for put in measured.puts]
    notes = [
        charts.Note(float(np.percentile(milliseconds, share)), name)
        for share, name in ((50, "median"), (90, "90 %"), (99, "99 %"))
    ]
    return charts.histogram(
        milliseconds, "c2", "ms", [charts.Note(n.x, f"{n.text} {n.x:.1f} ms") for n in notes]
    )


def _levels(measured: Measurements, notes: Sequence[charts.Note]) -> str:
    looks = measured.levels
    series = [
        charts.Series("base table", "c4", [look.base for look in looks]),
        charts.Series("SSTables", "c3", [look.sstables for look in looks]),
        charts.Series("WAL", "c1", [look.wal for look in looks]),
        charts.Series("MemTables", "c2", [look.memtable for look in looks]),
    ]
    return charts.stacked([look.at for look in looks], series, "documents", notes)


def _figure(title: str, text: str, svg: str) -> str:
    head = f"<h2>{escape(title)}</h2><figcaption>{escape(text)}</figcaption>"
    return f'<figure>{head}<div class="plot">{svg}</div></figure>'


def _steps(said: Narration) -> str:
    parts = ["<h2>What happened</h2><ol>"]
    for step in said.steps:
        lines = "".join(_line(line) for line in step.lines)
        parts.append(f"<li><b>{escape(step.title)}</b><ul>{lines}</ul></li>")
    return "".join([*parts, "</ol>"])


def _line(line: Line) -> str:
    kind = {True: "good", False: "bad", None: "told"}[line.holds]
    return f"<li class='{kind}'>{escape(line.text)}</li>"


def _further(stage: Stage) -> str:
    uri = escape(stage.uri)
    return (
        "<h2>Look yourself</h2><pre>"
        f"lancewal status {uri}\n"
        f"lancewal query {uri} --words 'text=cancel a task' --columns kind,name,text\n"
        f"lancewal tail {uri} --columns name,edition\n"
        f"python -c \"import lance; print(lance.dataset('{uri}').count_rows())\""
        "</pre>"
    )
