"""The WAL's lowest level against plain files that hold the same Arrow bytes.

The peer does what a careful program does without a WAL: encode, write a temporary
file, rename it, and, where a power cut counts, sync file and directory. It has no
fence, no put-if-absent and no checksum; the ratio is the price of those.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import numpy as np
import pyarrow as pa

from bench.comparison import Comparison
from bench.context import Context, Laps
from bench.registry import workload
from lancewal.shard import WalAppender, WalTailer
from lancewal.storage import ObjectStore

ROWS_PER_ENTRY = 20
DIMENSIONS = 1024


@workload("append_tail", "append to a WAL and read it back, against plain files")
def append_tail(context: Context) -> list[Comparison]:
    batches = _batches(context.size(full=400, quick=20))
    num_bytes = sum(batch.nbytes for batch in batches)
    synced = _append(context, "synced", batches, fsync=True)
    unsynced = _append(context, "unsynced", batches, fsync=False)
    tail = _tail(context, "unsynced", rows=len(batches) * ROWS_PER_ENTRY)
    tail_bytes = num_bytes * len(tail["ours"].seconds)
    return [
        _median("append, fsync", synced, "tmp + fsync + rename"),
        _rate("append, fsync", synced, num_bytes, "tmp + fsync + rename"),
        _median("append, no fsync", unsynced, "tmp + rename"),
        _rate("append, no fsync", unsynced, num_bytes, "tmp + rename"),
        _rate("tail", tail, tail_bytes, "read + decode"),
    ]


def _append(context: Context, name: str, batches: list[pa.RecordBatch], *, fsync: bool) -> dict[str, Laps]:
    store = ObjectStore.from_uri(context.directory(f"{name}/ours"), fsync=fsync)
    appender = WalAppender.open(store, uuid4())
    files = context.directory(f"{name}/files")
    return context.alternate(
        len(batches),
        ours=lambda index: appender.append([batches[index]]),
        peer=lambda index: _write_file(files, f"{index:08d}.arrow", batches[index], fsync),
    )


def _tail(context: Context, name: str, *, rows: int) -> dict[str, Laps]:
    root = context.scratch / name
    (shard,) = (root / "ours" / "_mem_wal").iterdir()
    store = ObjectStore.from_uri(root / "ours")

    def expect(found: int) -> None:
        if found != rows:
            raise RuntimeError(f"{rows} rows were written, but {found} came back")

    return context.alternate(
        context.size(full=5, quick=1),
        ours=lambda _: expect(sum(entry.num_rows for entry in WalTailer(store, shard.name))),
        peer=lambda _: expect(sum(map(_rows_in_file, sorted((root / "files").iterdir())))),
    )


def _median(name: str, laps: dict[str, Laps], peer_name: str) -> Comparison:
    return _compare(f"{name}, p50", laps, lambda side: side.percentile(50) * 1e3, "ms", False, peer_name)


def _rate(name: str, laps: dict[str, Laps], num_bytes: int, peer_name: str) -> Comparison:
    return _compare(name, laps, lambda side: num_bytes / side.total / 1e6, "MB/s", True, peer_name)


def _compare(
    name: str,
    laps: dict[str, Laps],
    measure: Callable[[Laps], float],
    unit: str,
    higher_is_better: bool,
    peer_name: str,
) -> Comparison:
    return Comparison(name, measure(laps["ours"]), measure(laps["peer"]), unit, higher_is_better, peer_name)


def _batches(count: int) -> list[pa.RecordBatch]:
    random = np.random.default_rng(7)
    vectors = random.random(ROWS_PER_ENTRY * DIMENSIONS, dtype=np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors), DIMENSIONS)
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("vector", column.type)])
    return [
        pa.record_batch([pa.array(range(start, start + ROWS_PER_ENTRY), pa.int64()), column], schema=schema)
        for start in range(0, count * ROWS_PER_ENTRY, ROWS_PER_ENTRY)
    ]


def _write_file(directory: Path, name: str, batch: pa.RecordBatch, fsync: bool) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    temporary = directory / f".{name}.tmp"
    with temporary.open("wb", buffering=0) as file:
        file.write(sink.getvalue())
        if fsync:
            os.fsync(file.fileno())
    temporary.rename(directory / name)
    if fsync:
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _rows_in_file(path: Path) -> int:
    with pa.ipc.open_stream(pa.py_buffer(path.read_bytes())) as reader:
        return sum(batch.num_rows for batch in reader)
