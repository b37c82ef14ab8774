"""A table that is left alone: puts, updates and deletes with reads beside them, and no maintenance call.

Twice at the same time on the same machine: with upkeep in the writing process, and without. 5 puts a second
of 20 rows into 4 shards, in small MemTables, so that SSTables come quickly; one put in ten deletes. A reader
in a process of its own scans, looks up and searches; its CPU time is what a read costs, whatever else the
machine does. Every minute tells its medians and 99th percentiles, the SSTables of the fullest shard, the mean
length of the logs, files and bytes.

Minute one begins when both sides have gone on for ten minutes. For so long nothing may be deleted, whatever
the settings are, because a writer that was stopped may still depend on it: files and bytes of every table
that is written to steadily grow for its first ten minutes.

``python -m bench.workloads.upkeep DIRECTORY --minutes 30`` runs it alone and prints each minute of each side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

import lancewal
from bench.comparison import Comparison, Point
from bench.context import Context
from bench.growth_tables import VECTOR, query_vector, searched_rows
from bench.registry import workload

PUTS_PER_SECOND = 5
ROWS_PER_PUT = 20
SHARDS = 4
KEYS = 20_000
K = 10

_WRITER: dict[str, Any] = {"fsync": False, "stats_log_interval": None, "max_memtable_rows": 250}
#: As short as garbage may be kept: entries of the log ten minutes, the rest two.
_SETTINGS = lancewal.UpkeepSettings(garbage_age=timedelta(minutes=2), version_age=timedelta(minutes=10))

#: What comes before minute one, in minutes: as long as entries of the log are kept at least.
_LEAD = 10

#: What each minute tells, with its unit and the most that the end may be above the beginning.
MEASURES = {
    "SSTables in the fullest shard": ("SSTables", 1.3),
    "log entries that no SSTable covers": ("entries", 1.3),
    "files": ("files", 1.3),
    "MB": ("MB", 1.3),
    "put p50": ("ms", 1.3),
    "put p99": ("ms", 1.3),
    "scan p50": ("ms", 1.3),
    "scan p99": ("ms", 1.3),
    "scan CPU": ("ms", 1.3),
    "vector search p50": ("ms", 1.3),
    "vector search p99": ("ms", 1.3),
    "vector search CPU": ("ms", 1.3),
    "lookup CPU": ("ms", 1.3),
}


@workload(
    "upkeep_steady",
    "30 minutes of puts, updates and deletes with reads beside them and no maintenance call: the end against "
    "minute five; dashed: the same at the same time without upkeep",
    repeats=1,
)
def upkeep_steady(context: Context) -> list[Comparison]:
    minutes, seconds = (30, 60.0) if not context.quick else (3, 2.0)
    directory = context.directory("upkeep")
    keys = context.size(KEYS, 500)
    return compared(*run_both(directory, minutes, seconds, keys, _tell_to_whoever_waits))


def _tell_to_whoever_waits(side: str, minute: dict[str, Any]) -> None:
    print(json.dumps({"side": side, **minute}), file=sys.stderr, flush=True)


def run_both(
    directory: Path,
    minutes: int,
    seconds: float,
    keys: int,
    report: Callable[[str, dict[str, Any]], object] = lambda side, minute: None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The minutes with upkeep and those without, of processes that run side by side."""
    found: dict[str, list[dict[str, Any]]] = {"with": [], "without": []}
    sides = [
        threading.Thread(
            target=_run_side,
            args=(directory / side, side, minutes, seconds, keys, found[side], report),
        )
        for side in found
    ]
    for side in sides:
        side.start()
    for side in sides:
        side.join()
    return found["with"], found["without"]


def compared(ours: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[Comparison]:
    """The last minutes with upkeep against early ones, each measure with both courses."""
    ours, others = ([each for each in side if each["minute"] > 0] for side in (ours, others))
    rows = []
    for name, (unit, most) in MEASURES.items():
        early = _around(ours, name, 5)
        late = _around(ours, name, len(ours) - 1)
        theirs = {each["minute"]: each.get(name) for each in others}
        points = tuple(
            Point(each["minute"], each[name], theirs.get(each["minute"])) for each in ours if name in each
        )
        rows.append(
            Comparison(
                name,
                max(late, 1e-9),
                max(early, 1e-9),
                unit,
                False,
                "fifth minute",
                most,
                points,
                unit,
            )
        )
    return rows


def _around(minutes: list[dict[str, Any]], name: str, minute: int) -> float:
    """The median of three minutes, or of what there is of them."""
    chosen = [each[name] for each in minutes if abs(each["minute"] - minute) <= 1 and name in each]
    return float(statistics.median(chosen or [each[name] for each in minutes if name in each] or [0.0]))


def _run_side(
    directory: Path,
    side: str,
    minutes: int,
    seconds: float,
    keys: int,
    found: list[dict[str, Any]],
    report: Callable[[str, dict[str, Any]], object],
) -> None:
    directory.mkdir(parents=True)
    uri = str(directory / "table")
    _new_table(uri, keys)
    shared = [uri, "--minutes", str(minutes), "--minute", str(seconds), "--keys", str(keys)]
    base = [sys.executable, "-m", "bench.workloads.upkeep"]
    writer = subprocess.Popen(
        [*base, *shared, "--role", f"write-{side}"], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    reader = subprocess.Popen(
        [*base, *shared, "--role", "read"], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    lines: dict[int, dict[str, Any]] = {}

    def follow(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            told = json.loads(line)
            minute = lines.setdefault(told["minute"], {})
            minute.update(told)
            report(side, told)

    threads = [threading.Thread(target=follow, args=(each,)) for each in (writer, reader)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if writer.wait() or reader.wait():
        raise RuntimeError(f"the side {side} upkeep failed")
    found += [lines[minute] for minute in sorted(lines)]


def _new_table(uri: str, keys: int) -> None:
    dataset = lance.write_dataset(searched_rows(np.arange(keys)), uri)
    dataset.create_scalar_index("id", "BTREE")
    dataset.create_index(VECTOR, "IVF_FLAT", metric="l2", num_partitions=max(1, keys // 4000))
    lancewal.initialize(uri, bucket=("id", SHARDS), upkeep=_SETTINGS)


class _Minutes:
    """Collects durations, and prints a line at the end of every minute."""

    def __init__(self, minute: float) -> None:
        self._minute = minute
        #: When minute one begins.
        self._started = time.time() + _LEAD * minute
        self.number = 1 - _LEAD
        self._laps: dict[str, list[float]] = {}
        self._levels: dict[str, list[float]] = {}

    def note(self, name: str, level: float) -> None:
        self._levels.setdefault(name, []).append(level)

    def add(self, name: str, milliseconds: float) -> None:
        self._laps.setdefault(name, []).append(milliseconds)

    def is_over(self) -> bool:
        return time.time() >= self._started + self.number * self._minute

    def tell(self, **more: float) -> None:
        told: dict[str, Any] = {"minute": self.number, **more}
        for name, laps in self._laps.items():
            if name.endswith("CPU"):
                told[name] = float(np.median(laps))
            else:
                told[f"{name} p50"], told[f"{name} p99"] = (float(np.percentile(laps, p)) for p in (50, 99))
        for name, levels in self._levels.items():
            told[name] = max(levels) if name.startswith("SSTables") else float(np.mean(levels))
        print(json.dumps(told), flush=True)
        self._laps.clear()
        self._levels.clear()
        self.number = int((time.time() - self._started) // self._minute) + 1


def write(uri: str, count: int, minute: float, keys: int, *, upkeep: bool) -> None:
    table = lancewal.open(uri)
    random = np.random.default_rng(3)
    stock = searched_rows(np.arange(keys), seed=4)
    minutes, done, started = _Minutes(minute), 0, time.time()
    with table.writer(upkeep=upkeep, **_WRITER) as writer:
        while minutes.number <= count:
            ahead = done / PUTS_PER_SECOND - (time.time() - started)
            if ahead > 0:
                time.sleep(ahead)
            else:
                started -= ahead  # the machine is behind; what was missed is not made up for
            chosen = random.choice(keys, ROWS_PER_PUT, replace=False)
            begun = time.perf_counter()
            if done % 10 == 9:
                writer.delete(chosen.tolist())
            else:
                writer.put(stock.take(pa.array(chosen)))
            minutes.add("put", (time.perf_counter() - begun) * 1e3)
            done += 1
            if minutes.is_over():
                minutes.tell(**_levels(table), puts=done)


def read(uri: str, count: int, minute: float, keys: int) -> None:
    table = lancewal.open(uri)
    random = np.random.default_rng(5)
    calls: dict[str, Callable[[], object]] = {
        "scan": lambda: table.scan(columns=["id"], filter="id < 1000").to_table(),
        "vector search": lambda: table.vector_search(VECTOR, query_vector(7), K, columns=["id"]),
        "lookup": lambda: table.lookup(random.integers(0, keys, 10).tolist(), columns=["id"]),
    }
    for call in calls.values():
        call()
    minutes, looked = _Minutes(minute), float("-inf")
    while minutes.number <= count:
        for name, call in calls.items():
            begun, cpu = time.perf_counter(), time.process_time()
            call()
            minutes.add(f"{name} CPU", (time.process_time() - cpu) * 1e3)
            minutes.add(name, (time.perf_counter() - begun) * 1e3)
            # A tenth of the time, so that a slow table is not also a busy machine.
            time.sleep(max(minute / 120, 9 * (time.perf_counter() - begun)))
            # Seldom: a look lists every file, which is a load on the very directories that puts go to.
            if time.perf_counter() - looked > minute / 10 or minutes.is_over():
                looked = time.perf_counter()
                _note_levels(table, minutes)
            if minutes.is_over():
                minutes.tell()


def _note_levels(table: lancewal.Table, minutes: _Minutes) -> None:
    status = table.status()
    minutes.note("SSTables in the fullest shard", max(each.uncompacted.count for each in status.shards))
    minutes.note("log entries that no SSTable covers", status.unflushed.count)


def _levels(table: lancewal.Table) -> dict[str, float]:
    sizes = [
        size for parent, _, names in os.walk(table.uri) for name in names if (size := _size(parent, name))
    ]
    return {
        "files": len(sizes),
        "MB": sum(sizes) / 1e6,
        "base version": lance.dataset(table.uri).version,
        "load": os.getloadavg()[0],
    }


def _size(parent: str, name: str) -> int:
    try:
        return os.stat(f"{parent}/{name}").st_size
    except FileNotFoundError:
        return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.workloads.upkeep")
    parser.add_argument("where")
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--minute", type=float, default=60.0, help="how many seconds a minute has")
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--role", default="both", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "read":
        read(options.where, options.minutes, options.minute, options.keys)
    elif options.role != "both":
        write(
            options.where,
            options.minutes,
            options.minute,
            options.keys,
            upkeep=options.role == "write-with",
        )
    else:
        run_both(
            Path(options.where),
            options.minutes,
            options.minute,
            options.keys,
            lambda side, minute: print(json.dumps({"side": side, **minute}), flush=True),
        )
