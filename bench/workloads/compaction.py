"""Compaction against a plain ``merge_insert`` of the same rows, each in a process of its own.

The peer has its rows ready in one Lance dataset, without tombstones, older versions or a
marker; ours finds them in SSTables. Both write into a copy of the same base table.

``python -m bench.workloads.compaction SIDE TABLE ROWS`` measures one side.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import UUID, uuid4

import lance
import numpy as np
import pyarrow as pa

import lancewal
from bench.comparison import Comparison
from bench.context import Context
from bench.registry import workload
from bench.tables import new_table, upsert, vector_batches, vector_schema
from lancewal.base.table import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.maintenance import Pack, compact, execute_pack, finish_compaction, plan_compaction
from lancewal.storage import ObjectStore
from lancewal.writer import open_shard_writer

PEER = "plain merge_insert"
DIMENSION = 128
SSTABLES = 10
_WRITE_ROWS = 10_000


@dataclass(frozen=True)
class Measured:
    """One side: how long, how much memory beyond the start, how many bytes written."""

    seconds: float
    peak_bytes: int
    written_bytes: int


@workload("compaction", "10 SSTables with 500,000 rows × 128-d, half of them updates, into 1 M rows")
def compaction(context: Context) -> list[Comparison]:
    base_rows = context.size(full=1_000_000, quick=20_000)
    rows = context.size(full=500_000, quick=10_000)
    sides = _prepare(context, base_rows, rows, sstables=SSTABLES, indexed=False)
    measured = context.in_turn(**{side: partial(_measure, side, *paths) for side, paths in sides.items()})
    ours, peer = measured["ours"], measured["peer"]
    payload = rows * (8 + 4 * DIMENSION)

    def row(name: str, of: tuple[float, float], unit: str, higher: bool, target: float | None) -> Comparison:
        return Comparison(name, of[0], of[1], unit, higher, PEER, target)

    return [
        row("compaction", (rows / ours.seconds, rows / peer.seconds), "rows/s", True, 0.9),
        row("peak memory", (ours.peak_bytes / 1e6, peer.peak_bytes / 1e6), "MB", False, None),
        row(
            "write amplification",
            (ours.written_bytes / payload, peer.written_bytes / payload),
            "bytes per byte",
            False,
            None,
        ),
    ]


@workload("compaction_cost", "few updated rows into base tables of growing size, with a BTree on the key")
def compaction_cost(context: Context) -> list[Comparison]:
    sizes = (100_000, 1_000_000) if not context.quick else (5_000, 20_000)
    found = []
    for rows in (1_000, 10_000) if not context.quick else (10, 100):
        seconds = []
        for base_rows in sizes:
            part = Context(context.directory(f"{rows}-{base_rows}"), context.quick, context.repeat)
            sides = _prepare(part, base_rows, rows, sstables=2, indexed=True)
            taken = part.in_turn(**{side: partial(_measure, side, *paths) for side, paths in sides.items()})
            seconds.append(taken["ours"].seconds)
            found.append(
                Comparison(
                    f"{rows} rows into {base_rows}",
                    taken["ours"].seconds * 1e3,
                    taken["peer"].seconds * 1e3,
                    "ms",
                    False,
                    PEER,
                )
            )
        found.append(
            Comparison(
                f"{rows} rows, large base",
                seconds[-1] * 1e3,
                seconds[0] * 1e3,
                "ms",
                False,
                f"ours, base of {sizes[0]} rows",
                # Ten times the table, and not ten times the cost.
                3.0,
            )
        )
    return found


@workload("compaction_shards", "many small shards in one commit, against one commit for each shard")
def compaction_shards(context: Context) -> list[Comparison]:
    found = []
    for shards in (64, 256, 1024) if not context.quick else (8, 32):
        root = context.directory(f"{shards}") / "table"
        schema = vector_schema(8)
        data = pa.Table.from_batches(vector_batches(1, 1000, 8), schema)
        lance.write_dataset(data, str(root))
        defaults = ShardWriterConfig(fsync=False, stats_log_interval=None)
        table = lancewal.initialize(str(root), bucket=("id", shards), writer_defaults=defaults)
        with table.writer() as writer:
            writer.put(pa.Table.from_batches(vector_batches(1, 20 * shards, 8), schema))
        peer = context.directory(f"{shards}-peer") / "table"
        shutil.copytree(root, peer)
        ours, peers = _together(root), _one_by_one(peer)
        by = "one commit per shard"
        found += [
            Comparison(f"{shards} shards, CPU", ours[0] * 1e3, peers[0] * 1e3, "ms", False, by, None),
            Comparison(f"{shards} shards, versions", ours[1], peers[1], "versions", False, by, None),
        ]
    return found


def _together(table: Path) -> tuple[float, int]:
    """CPU seconds, and versions of the base table that came of it."""
    store = ObjectStore.from_uri(str(table), fsync=False)
    before, started = lance.dataset(str(table)).version, time.process_time()
    compact(store)
    return time.process_time() - started, lance.dataset(str(table)).version - before


def _one_by_one(table: Path) -> tuple[float, int]:
    store = ObjectStore.from_uri(str(table), fsync=False)
    before, started = lance.dataset(str(table)).version, time.process_time()
    for part in plan_compaction(store).shards:
        assert not execute_pack(Pack((part,)), store=store).failed
    finish_compaction(store)
    return time.process_time() - started, lance.dataset(str(table)).version - before


def _prepare(
    context: Context, base_rows: int, rows: int, *, sstables: int, indexed: bool
) -> dict[str, tuple[Path, Path]]:
    """The same base table for both sides: with SSTables for ours, with a dataset of rows for the peer."""
    schema = vector_schema(DIMENSION)
    base_batches = vector_batches(base_rows // _WRITE_ROWS or 1, min(_WRITE_ROWS, base_rows), DIMENSION)
    root = context.directory("base") / "table"
    base = new_table(root, schema, pa.Table.from_batches(base_batches, schema))
    if indexed:
        lance.dataset(base.uri).create_scalar_index("id", "BTREE")
    incoming = _incoming(base_rows, rows)
    peer_rows = context.directory("rows") / "rows"
    lance.write_dataset(incoming, str(peer_rows))
    peer = context.directory("peer") / "table"
    # Lance never changes a file that it has written: links do.
    shutil.copytree(root, peer, copy_function=os.link)
    _flush(BaseTable.open(str(root)), incoming, sstables)
    return {"ours": (root, peer_rows), "peer": (peer, peer_rows)}


def _incoming(base_rows: int, rows: int) -> pa.Table:
    """Half updates of keys all over the base, half new keys, mixed."""
    random = np.random.default_rng(11)
    updated = random.choice(base_rows, rows // 2, replace=False)
    ids = np.concatenate([updated, np.arange(base_rows, base_rows + rows - rows // 2)])
    random.shuffle(ids)
    values = pa.array(random.random(rows * DIMENSION, dtype=np.float32))
    vectors = pa.FixedSizeListArray.from_arrays(values, DIMENSION)
    return pa.table([pa.array(ids), vectors], schema=vector_schema(DIMENSION))


def _flush(base: BaseTable, incoming: pa.Table, sstables: int, shard_id: UUID | None = None) -> None:
    config = ShardWriterConfig(fsync=False, stats_log_interval=None, durable_write=False)
    per_sstable = -(-incoming.num_rows // sstables)
    with open_shard_writer(base, shard_id or uuid4(), config, indexes=()) as writer:
        for start in range(0, incoming.num_rows, per_sstable):
            writer.put(incoming.slice(start, per_sstable))
            writer.force_seal_active()
            writer.wait_for_flush_drain()


def _measure(side: str, table: Path, rows: Path) -> Measured:
    command = [sys.executable, "-m", "bench.workloads.compaction", side, str(table), str(rows)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def _run(side: str, table: str, rows: str) -> Measured:
    # What is opened, imported and allocated before is no part of the work.
    store = ObjectStore.from_uri(table, fsync=False)
    base = BaseTable.open(table, store=store)
    incoming = lance.dataset(rows)
    base.dataset.count_rows()
    before, size = _memory("VmRSS"), _stored_bytes(table)
    started = time.perf_counter()
    if side == "ours":
        compact(store)
    else:
        upsert(base.dataset, incoming.to_table())
    seconds = time.perf_counter() - started
    return Measured(seconds, max(_memory("VmHWM") - before, 1), _stored_bytes(table) - size)


def _memory(name: str) -> int:
    """A figure of this process; ``getrusage`` would tell the parent's peak where that is higher."""
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name))
    return int(line.split()[1]) * 1024


def _stored_bytes(table: str) -> int:
    """What the base table's own files take, whatever version they belong to."""
    parts = ("data", "_deletions", "_versions", "_transactions")
    files = (file for part in parts for file in (Path(table) / part).rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())


if __name__ == "__main__":
    print(json.dumps(_run(*sys.argv[1:4]).__dict__))
