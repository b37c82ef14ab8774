"""ShardWriter against Lance's own shard writer on the same table, in the same run.

The peer runs at its best setting (a flush interval of 1 ms where puts are durable; at
its default of 100 ms every durable put waits for the next tick). It never syncs to
disk, so the fair comparison is ours without fsync; ours with fsync is shown beside it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import lance
import pyarrow as pa

from bench.comparison import Comparison
from bench.context import Context, Laps, by_threads
from bench.memory import peak_growth
from bench.registry import workload
from bench.tables import expect, new_table, peer_writer, vector_batches, vector_schema
from lancewal.base.table import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.writer import ShardWriter, open_shard_writer

PEER = "Lance writer"
THREADS = 16
#: A put with fsync keeps the file system's journal busy, a put of the peer its own threads: turns
#: of single puts would charge that to whoever comes next.
_PUTS_IN_A_ROW = 200


def _ours(base: BaseTable, **settings: Any) -> ShardWriter:
    config = ShardWriterConfig(**{"fsync": False, "stats_log_interval": None, **settings})
    return open_shard_writer(base, uuid4(), config, indexes=())


@workload("durable_latency", "durable puts of one thread: 20 rows × 1024-d, p50 and p99")
def durable_latency(context: Context) -> list[Comparison]:
    batches = vector_batches(context.size(full=600, quick=20), rows=20, dimension=1024)
    contents = [batch.serialize() for batch in batches]
    files = context.directory("files")
    base = new_table(context.directory("table"), vector_schema(1024))
    peer = peer_writer(lance.dataset(base.uri))
    with _ours(base) as plain, _ours(base, fsync=True) as synced:
        laps = context.alternate(
            len(batches),
            _PUTS_IN_A_ROW,
            ours=lambda index: plain.put(batches[index]),
            synced=lambda index: synced.put(batches[index]),
            file=lambda index: _write_synced(files / str(index), contents[index]),
            peer=lambda index: peer.put(batches[index]),
        )
    peer.close()

    def row(name: str, side: str, percent: float, target: float | None) -> Comparison:
        ours, theirs = laps[side].percentile(percent) * 1e3, laps["peer"].percentile(percent) * 1e3
        return Comparison(name, ours, theirs, "ms", False, PEER, target)

    return [
        row("durable put, no fsync, p50", "ours", 50, 0.5),
        row("durable put, no fsync, p99", "ours", 99, None),
        row("durable put, fsync, p50", "synced", 50, 1.0),
        row("durable put, fsync, p99", "synced", 99, None),
        # Below this no put with fsync can come.
        row("a synced file of the same rows and nothing else, p50", "file", 50, None),
    ]


def _write_synced(path: Path, content: pa.Buffer) -> None:
    """What a power cut leaves whole or not at all: written, synced, named, and the name synced."""
    staging = path.with_suffix(".tmp")
    with staging.open("xb", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())
    os.rename(staging, path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(directory)
    os.close(directory)


@workload("durable_threads", "durable puts of 16 threads: 20 rows × 8-d")
def durable_threads(context: Context) -> list[Comparison]:
    base = new_table(context.directory("table"), vector_schema(8))
    puts = context.size(full=400, quick=5)
    batches = vector_batches(puts, rows=20, dimension=8)

    def ours(**settings: Any) -> float:
        with _ours(base, **settings) as writer:
            return _puts_per_second(writer.put, batches)

    def theirs() -> float:
        writer = peer_writer(lance.dataset(base.uri))
        rate = _puts_per_second(writer.put, batches)
        writer.close()
        return rate

    rates = context.in_turn(ours=ours, synced=lambda: ours(fsync=True), peer=theirs)
    return [
        Comparison("16 threads, no fsync", rates["ours"], rates["peer"], "puts/s", True, PEER, 8.0),
        Comparison("16 threads, fsync", rates["synced"], rates["peer"], "puts/s", True, PEER),
    ]


def _puts_per_second(put: Callable[[pa.RecordBatch], object], batches: list[pa.RecordBatch]) -> float:
    """The rate of the second round; the first warms up threads and memory."""
    return [_round_of_puts(put, batches) for _ in range(2)][1]


def _round_of_puts(put: Callable[[pa.RecordBatch], object], batches: list[pa.RecordBatch]) -> float:
    started = time.perf_counter()
    by_threads(THREADS, len(batches), lambda number: put(batches[number % len(batches)]))
    return THREADS * len(batches) / (time.perf_counter() - started)


@workload("bulk_write", "puts that nobody waits for: MB/s in put, and to the end of close")
def bulk_write(context: Context) -> list[Comparison]:
    shapes = {
        "20 rows × 1024-d": (context.size(full=2000, quick=20), 20, 1024),
        "1000 rows × 128-d": (context.size(full=400, quick=4), 1000, 128),
    }
    comparisons = []
    for name, (count, rows, dimension) in shapes.items():
        base = new_table(context.directory(name.replace(" ", "")), vector_schema(dimension))
        batches = vector_batches(count, rows, dimension)
        megabytes = sum(batch.nbytes for batch in batches) / 1e6
        laps = context.in_turn(
            ours=partial(_bulk, partial(_ours, base, durable_write=False), batches),
            peer=partial(_bulk, partial(peer_writer, lance.dataset(base.uri), durable_write=False), batches),
        )
        for phase, index, target in (("in put", 0, None), ("to the end of close", 1, 1.0)):
            ours, theirs = megabytes / laps["ours"][index], megabytes / laps["peer"][index]
            comparisons.append(Comparison(f"{name}, {phase}", ours, theirs, "MB/s", True, PEER, target))
    return comparisons


def _bulk(open_writer: Callable[[], Any], batches: list[pa.RecordBatch]) -> tuple[float, float]:
    writer = open_writer()
    started = time.perf_counter()
    for batch in batches:
        writer.put(batch)
    in_put = time.perf_counter() - started
    writer.close()
    return in_put, time.perf_counter() - started


@workload("replay", "open a shard whose WAL holds 90 entries of 1000 rows × 128-d")
def replay(context: Context) -> list[Comparison]:
    entries = context.size(full=90, quick=5)
    base = new_table(context.directory("table"), vector_schema(128))
    shard = uuid4()
    config = ShardWriterConfig(enable_memtable=False, fsync=False)
    with open_shard_writer(base, shard, config) as writer:
        for batch in vector_batches(entries, rows=1000, dimension=128):
            writer.put(batch)
    rows = entries * 1000
    laps = {"ours": Laps(), "peer": Laps()}

    def ours() -> None:
        opened = laps["ours"].time(open_shard_writer, base, shard, ShardWriterConfig(fsync=False), indexes=())
        expect(opened.memtable_stats().row_count, rows)
        opened._finalizer()  # as a crash would: closing would flush what the peer is to replay

    def theirs() -> None:
        dataset = lance.dataset(base.uri)
        opened = laps["peer"].time(dataset.mem_wal_writer, str(shard))
        expect(opened.memtable_stats()["row_count"], rows)

    context.in_turn(ours=ours, peer=theirs)
    return [
        Comparison(
            "replay on open", rows / laps["ours"].total, rows / laps["peer"].total, "rows/s", True, PEER, 1.5
        )
    ]


@workload("memory", "memory that a MemTable takes for each byte of rows: 90 × 1000 rows × 128-d")
def memory(context: Context) -> list[Comparison]:
    base = new_table(context.directory("table"), vector_schema(128))
    count = context.size(full=90, quick=10)
    held = count * 1000 * (128 * 4 + 8)
    peaks = context.in_turn(
        ours=lambda: peak_growth("ours", base.uri, count),
        peer=lambda: peak_growth("peer", base.uri, count),
    )
    return [
        Comparison(
            "peak memory per byte held", peaks["ours"] / held, peaks["peer"] / held, "B/B", False, PEER
        )
    ]
