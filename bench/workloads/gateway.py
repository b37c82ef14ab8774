"""Puts through a gateway in a process of its own, beside puts in this process and Lance's merge_insert.

The clients are threads of this process, each with a stream of its own: on two cores they and the gateway take
each other's time, which puts in one process do not. Lance's merge_insert is the way for several processes to
write one table without a gateway: each call commits a version, and calls at the same time conflict.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import lance
import pyarrow as pa

import lancewal
from bench.comparison import Comparison
from bench.context import Context, Laps, by_threads
from bench.registry import workload
from bench.tables import expect, vector_batches, vector_schema

CLIENTS = (16, 128)
_SERVE = """
import sys, lancewal
with lancewal.Gateway({"table": lancewal.open(sys.argv[1])}, fsync=False) as gateway:
    print(gateway.address, flush=True)
    sys.stdin.read()
"""
_MERGE = """
import sys, lance
from bench.tables import vector_batches
batches = vector_batches(int(sys.argv[2]), rows=20, dimension=8)
print("ready", flush=True)
sys.stdin.readline()
for batch in batches:
    merge = lance.dataset(sys.argv[1]).merge_insert("id").when_matched_update_all()
    merge.when_not_matched_insert_all().conflict_retries(50).execute(batch)
"""


def _table(where: Path) -> lancewal.Table:
    lance.write_dataset(vector_schema(8).empty_table(), str(where))
    return lancewal.initialize(str(where), unsharded=True)


@contextmanager
def _served(table: lancewal.Table) -> Iterator[lancewal.RemoteTable]:
    child = subprocess.Popen(
        [sys.executable, "-c", _SERVE, table.uri], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with lancewal.connect(child.stdout.readline().strip()) as remote:
            yield remote
    finally:
        child.stdin.close()
        child.wait()


def _rate(put: Callable[[pa.RecordBatch], object], batches: list[pa.RecordBatch], threads: int) -> float:
    """Puts per second of the second round; the first warms up threads and connections."""
    for _ in range(2):
        started = time.perf_counter()
        by_threads(threads, len(batches), lambda number: put(batches[number % len(batches)]))
        seconds = time.perf_counter() - started
    return threads * len(batches) / seconds


@workload("gateway", "durable puts of 20 rows × 8-d by 1, 16 and 128 clients of a gateway")
def gateway(context: Context) -> list[Comparison]:
    ours = _table(context.directory("in_process") / "table")
    remote_table = _table(context.directory("served") / "table")
    found: list[Comparison] = []
    with ours.writer(fsync=False) as local, _served(remote_table) as remote, remote.writer() as writer:
        batches = vector_batches(context.size(full=400, quick=5), rows=20, dimension=8)
        laps = context.alternate(
            len(batches),
            20,
            gateway=lambda index: writer.put(batches[index]),
            local=lambda index: local.put(batches[index]),
        )
        added = (laps["gateway"].percentile(50) - laps["local"].percentile(50)) * 1e3
        found += [
            Comparison("added by the gateway, p50, goal 0.5", added, 0.5, "ms", False, "goal"),
            _latency("one client, p50", laps, 50),
            _latency("one client, p99", laps, 99),
        ]
        for clients in CLIENTS:
            some = vector_batches(context.size(full=6400 // clients, quick=2), rows=20, dimension=8)
            rates = context.in_turn(
                gateway=partial(_rate, writer.put, some, clients),
                local=partial(_rate, local.put, some, clients),
            )
            name = f"{clients} clients"
            found.append(
                Comparison(name, rates["gateway"], rates["local"], "puts/s", True, "in this process", 0.5)
            )
            if clients == CLIENTS[0]:
                merges = _merge_rate(context)
                found.append(
                    Comparison(
                        f"{name}, beside merge_insert of 4 processes",
                        rates["gateway"],
                        merges,
                        "puts/s",
                        True,
                        "Lance merge_insert",
                        20.0,
                    )
                )
        expect(remote.count_rows(), ours.count_rows())
    return found


def _latency(name: str, laps: dict[str, Laps], percent: float) -> Comparison:
    through, local = (laps[side].percentile(percent) * 1e3 for side in ("gateway", "local"))
    return Comparison(name, through, local, "ms", False, "in this process")


def _merge_rate(context: Context) -> float:
    """merge_insert calls per second of four processes on one table."""
    where = str(context.directory("merged") / "table")
    lance.write_dataset(vector_schema(8).empty_table(), where)
    calls = context.size(full=40, quick=2)

    command = [sys.executable, "-c", _MERGE, where, str(calls)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    started = time.perf_counter()
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        expect(child.wait(), 0)
    return 4 * calls / (time.perf_counter() - started)
