"""Garbage collection on a store that is far away: requests, the longest chain of them, and time.

Both sides work on a local directory behind a store that answers as slowly as object storage does.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pyarrow as pa

from bench.comparison import Comparison
from bench.context import Context
from bench.distant import distant_store, measured_depth
from bench.registry import workload
from bench.tables import new_table
from lancewal.config import ShardWriterConfig
from lancewal.maintenance import collect_garbage
from lancewal.storage import HostClock, ObjectStore, boot_time, host_clock, layout
from lancewal.writer import open_shard_writer

LATENCY = 0.015
_KEY = {"lance-schema:unenforced-primary-key": "true"}
_SCHEMA = pa.schema([pa.field("id", pa.int64(), False, _KEY), pa.field("v", pa.int64())])
_CONFIG = ShardWriterConfig(fsync=False, durable_write=True, stats_log_interval=None)
_LATER = timedelta(days=9)


@dataclass(frozen=True)
class Run:
    requests: int
    depth: int
    seconds: float


@workload("garbage", "1,600 WAL entries that are due, and nothing to do on 64 shards; 15 ms a request")
def garbage(context: Context) -> list[Comparison]:
    entries = context.size(full=1600, quick=40)
    shards = context.size(full=64, quick=4)
    due, beside = context.directory("due") / "table", context.directory("beside") / "table"
    one, many = context.directory("one") / "table", context.directory("many") / "table"
    build(due, shards=1, entries=entries)
    shutil.copytree(due, beside)
    build(one, shards=1, entries=10)
    build(many, shards=shards, entries=10)
    sides = context.in_turn(ours=lambda: collect(due, _LATER), peer=lambda: _delete_each(beside))
    idle = context.in_turn(ours=lambda: collect(many), peer=lambda: collect(one))
    named = f"{entries} entries that are due"
    return [
        *_rows(named, sides["ours"], sides["peer"], "one request per object", None),
        *_rows(f"nothing to do on {shards} shards", idle["ours"], idle["peer"], "ours, one shard", 3.0),
    ]


def _rows(name: str, ours: Run, peer: Run, peer_name: str, target: float | None) -> list[Comparison]:
    def row(what: str, one: float, other: float, unit: str, bound: float | None) -> Comparison:
        return Comparison(f"{name}: {what}", one, other, unit, False, peer_name, bound)

    return [
        row("depth", ours.depth, peer.depth, "requests", target or 1.0),
        row("requests", ours.requests, peer.requests, "requests", None),
        row("time", ours.seconds * 1e3, peer.seconds * 1e3, "ms", None),
    ]


def build(where: Path, *, shards: int, entries: int) -> None:
    """Each shard has flushed its entries, in eight generations, and a collection has seen them."""
    base = new_table(where, _SCHEMA)
    store = ObjectStore.from_uri(str(where), fsync=False)
    for _ in range(shards):
        shard_id = uuid4()
        for start in range(0, entries, -(-entries // 8)):
            writer = open_shard_writer(base, shard_id, _CONFIG, store=store, indexes=())
            for number in range(start, min(entries, start + -(-entries // 8))):
                writer.put(pa.table({"id": [number], "v": [number]}, _SCHEMA))
            writer.close()
    collect_garbage(store, min_age=timedelta(days=99))


def collect(where: Path, later: timedelta = timedelta(0)) -> Run:
    """A collection of the table at ``where``, as if so much time had passed since it was seen."""
    store, backend = distant_store(where, LATENCY)
    clock = HostClock(host_clock().name, lambda: boot_time() + later.total_seconds())
    now = datetime.now(UTC) + later if later else None
    with measured_depth() as depth:
        started = time.perf_counter()
        collect_garbage(store, now=now, clock=clock)
        return Run(backend.requests.total(), depth(), time.perf_counter() - started)


def _delete_each(where: Path) -> Run:
    store, backend = distant_store(where, LATENCY)
    with measured_depth() as depth:
        started = time.perf_counter()
        for shard in store.list_directories(layout.MEM_WAL_DIR):
            for info in store.list(f"{layout.MEM_WAL_DIR}/{shard}/wal")[:-1]:
                store.delete(info.path)
        return Run(backend.requests.total(), depth(), time.perf_counter() - started)
