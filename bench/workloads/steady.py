"""Steady state: the same writes and the same upkeep for a long time, and what reads cost as time goes by.

A table of 4 shards with a BTree on its key and indexes on text and vector takes 50 puts of 20 rows a
second, all updates of a fixed set of keys. Every 20 seconds it is flushed, compacted and collected, and old
base versions are cleaned up. Every third pass counts as a minute; reads are measured at its end, while the
puts pause. Nothing may grow: the table holds the same rows all the time.

``python -m bench.workloads.steady DIRECTORY --seconds 180 --cycle 6`` runs it alone and prints each minute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
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
from bench.growth_tables import (
    VECTOR,
    WORDS,
    query_vector,
    query_words,
    resident_bytes,
    searched_rows,
)
from bench.registry import workload
from lancewal.config import MB
from lancewal.maintenance import Retention
from lancewal.storage.cache import CACHE_VARIABLE

PUTS_PER_SECOND = 50
ROWS_PER_PUT = 20
SHARDS = 4
PASSES_PER_MINUTE = 3
K = 10

_CACHE_BYTES = 256 * MB
_WRITER: dict[str, Any] = {
    "fsync": False,
    "stats_log_interval": None,
    "max_memtable_size": 32 * MB,
    "max_unflushed_memtable_bytes": 64 * MB,
}
#: What the settings allow the process to take beyond its start: caches, and MemTables of each shard.
_ALLOWED_BYTES = _CACHE_BYTES + SHARDS * 64 * MB

#: What each minute tells, with its unit: the best of a few calls, or the mean of the passes.
MEASURES = {
    "lookup": "ms",
    "first lookup": "ms",
    "count": "ms",
    "vector search": "ms",
    "text search": "ms",
    "compact": "ms",
    "gc": "ms",
    "files": "files",
    "bytes": "MB",
}


_MOST_GROWTH = 1.3
#: A single call each, and what nobody waits for.
_UNBOUND = ("first lookup", "compact")


@workload(
    "steady",
    "50 puts/s of 20 rows into 4 shards, compact() and gc() every 20 s: the tenth minute against the second",
    repeats=1,
)
def steady(context: Context) -> list[Comparison]:
    seconds, cycle = (600, 20) if not context.quick else (18, 1)
    directory = context.directory("steady")
    command = [sys.executable, "-m", "bench.workloads.steady", str(directory)]
    command += ["--seconds", str(seconds), "--cycle", str(cycle)]
    if context.quick:
        command += ["--keys", "2000"]
    environment = {**os.environ, CACHE_VARIABLE: str(_CACHE_BYTES)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    minutes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return compared(minutes)


def compared(minutes: list[dict[str, Any]]) -> list[Comparison]:
    """The last minute against the second, each measure with its course."""
    second, last = minutes[1], minutes[-1]
    rows = [
        Comparison(
            name,
            max(last[name], 1e-9),
            max(second[name], 1e-9),
            unit,
            False,
            "minute two",
            None if name in _UNBOUND else _MOST_GROWTH,
            tuple(Point(each["minute"], each[name], None) for each in minutes),
            unit,
        )
        for name, unit in MEASURES.items()
    ]
    peak = max(each["memory"] for each in minutes)
    course = tuple(Point(each["minute"], each["memory"], None) for each in minutes)
    rows.append(
        Comparison(
            "memory beyond the start", peak, _ALLOWED_BYTES / MB, "MB", False, "settings", 1.0, course, "MB"
        )
    )
    return rows


class _Writing:
    """Puts at a steady rate from a thread of its own, until it is left."""

    def __init__(self, table: lancewal.Table, keys: int) -> None:
        self.writer = table.writer(**_WRITER)
        self._random = np.random.default_rng(3)
        self._stock = searched_rows(np.arange(keys), seed=4)
        self._ended = False
        self.failure: BaseException | None = None
        #: Held while a put is under way; whoever measures holds it so that none is.
        self.pause = threading.Lock()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        started, done = time.perf_counter(), 0
        try:
            while not self._ended:
                ahead = done / PUTS_PER_SECOND - (time.perf_counter() - started)
                if ahead > 0:
                    time.sleep(ahead)
                rows = self._random.choice(self._stock.num_rows, ROWS_PER_PUT, replace=False)
                with self.pause:
                    self.writer.put(self._stock.take(pa.array(rows)))
                done += 1
        except BaseException as error:
            self.failure = error

    def end(self) -> None:
        self._ended = True
        self._thread.join()
        self.writer.close()


def run(
    directory: Path, seconds: float, cycle: float, keys: int, report: Callable[[dict[str, Any]], object]
) -> None:
    table = _new_table(directory / "table", keys)
    table.lookup(0)
    writing = _Writing(table, keys)
    start_bytes = resident_bytes()
    started = time.perf_counter()
    costs: dict[str, list[float]] = {}
    passes = 0
    try:
        # On a busy machine the time may be over before the first minute is.
        while writing.failure is None and (
            passes < PASSES_PER_MINUTE or time.perf_counter() - started < seconds
        ):
            passes += 1
            time.sleep(max(0.0, started + passes * cycle - time.perf_counter()))
            for name, cost in {**_maintain(table, writing, cycle), **_on_disk(directory)}.items():
                costs.setdefault(name, []).append(cost)
            if passes % PASSES_PER_MINUTE == 0:
                with writing.pause:
                    minute: dict[str, Any] = {"minute": passes // PASSES_PER_MINUTE, **_reads(table, keys)}
                minute |= {name: float(np.mean(each)) for name, each in costs.items()}
                minute["memory"] = (resident_bytes() - start_bytes) / MB
                costs = {}
                report(minute)
    finally:
        writing.end()
    if writing.failure is not None:
        raise writing.failure


def _new_table(where: Path, keys: int) -> lancewal.Table:
    dataset = lance.write_dataset(searched_rows(np.arange(keys)), str(where))
    dataset.create_scalar_index("id", "BTREE")
    dataset.create_scalar_index(WORDS, "INVERTED")
    dataset.create_index(VECTOR, "IVF_FLAT", metric="l2", num_partitions=max(1, keys // 4000))
    return lancewal.initialize(str(where), bucket=("id", SHARDS))


def _maintain(table: lancewal.Table, writing: _Writing, cycle: float) -> dict[str, float]:
    age = timedelta(seconds=cycle)
    # No writer here stands still for longer than that.
    retention = Retention(age, age, age, age, age, age, allow_unsafe=True)
    writing.writer.flush()
    with writing.pause:
        compaction = _cpu_milliseconds(table.compact)
        collection = _cpu_milliseconds(lambda: table.gc(retention=retention))
    lance.dataset(table.uri).cleanup_old_versions(older_than=3 * age)
    return {"compact": compaction, "gc": collection}


def _reads(table: lancewal.Table, keys: int) -> dict[str, float]:
    some = np.random.default_rng(keys).integers(0, keys, 10).tolist()
    vector, words = query_vector(5), query_words(5)
    first = _cpu_milliseconds(lambda: table.lookup(some[0]))

    def lookups() -> None:
        for key in some:
            table.lookup(key)

    return {
        "first lookup": first,
        "lookup": _best(lookups) / len(some),
        "count": _best(table.count_rows),
        "vector search": _best(lambda: table.vector_search(VECTOR, vector, K, columns=["id"])),
        "text search": _best(lambda: table.full_text_search(WORDS, words, K, columns=["id"])),
    }


def _best(call: Callable[[], object]) -> float:
    return min(_cpu_milliseconds(call) for _ in range(5))


def _cpu_milliseconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return (time.process_time() - started) * 1e3


def _on_disk(directory: Path) -> dict[str, float]:
    """Files and MB, and the files of each directory of the table."""
    found: Counter[str] = Counter()
    for parent, _, names in os.walk(directory):
        part = "".join(Path(parent).relative_to(directory).parts[1:2])
        for name in names:
            try:
                size = os.stat(f"{parent}/{name}").st_size
            except FileNotFoundError:
                continue
            found.update({"files": 1, "bytes": size, f"files in {part}": 1})
    return {**found, "bytes": found["bytes"] / 1e6}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.workloads.steady")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--cycle", type=float, default=20)
    parser.add_argument("--keys", type=int, default=200_000)
    options = parser.parse_args()

    run(
        options.directory,
        options.seconds,
        options.cycle,
        options.keys,
        lambda minute: print(json.dumps(minute), flush=True),
    )
