"""Merged reads against Lance's own scanner and point look-up, on the same tables.

The peer is given its handles and shard snapshots ready-made; ours asks storage for the
newest manifests and base version in every read, as ``Table.scan`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import lance
import numpy as np
import pyarrow as pa
from lance.mem_wal import LsmPointLookupPlanner, LsmScanner, ShardSnapshot

from bench.comparison import Comparison
from bench.context import Context, Laps
from bench.registry import workload
from bench.tables import KEY, expect, new_table, vector_batches, vector_schema
from lancewal.base.table import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.reader import TableReader
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import ObjectStore
from lancewal.writer import ShardWriter, open_shard_writer

PEER = "Lance scanner"
DIMENSION = 128
OVERLAPPING_SSTABLES = 3

_ROWS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("price", pa.float64()),
        pa.field("name", pa.string()),
    ]
)


@workload("live_reads", "reads of rows in memory: full scan, one key by filter, count (90,000 × 128-d)")
def live_reads(context: Context) -> list[Comparison]:
    batches = vector_batches(context.size(full=90, quick=4), rows=1000, dimension=DIMENSION)
    rows = sum(batch.num_rows for batch in batches)
    ours = new_table(context.directory("ours"), vector_schema(DIMENSION))
    peer = new_table(context.directory("peer"), vector_schema(DIMENSION))
    with _writer(ours, uuid4()) as writer:
        theirs = lance.dataset(peer.uri).mem_wal_writer(str(uuid4()), durable_write=False)
        for batch in batches:
            writer.put(batch)
            theirs.put(batch)
        reader = _reader(ours)
        scans = context.alternate(
            context.size(full=10, quick=2),
            ours=lambda _: expect(reader.scan().to_table().num_rows, rows),
            peer=lambda _: expect(theirs.lsm_scanner().to_table().num_rows, rows),
        )
        points = context.alternate(
            context.size(full=400, quick=10),
            ours=lambda i: expect(reader.scan(filter=f"id = {i * 7 % rows}").to_table().num_rows, 1),
            peer=lambda i: expect(theirs.lsm_scanner().filter(f"id = {i * 7 % rows}").to_table().num_rows, 1),
        )
        counts = context.alternate(
            context.size(full=20, quick=2),
            ours=lambda _: expect(reader.scan().count_rows(), rows),
            peer=lambda _: expect(theirs.lsm_scanner().count_rows(), rows),
        )
        theirs.close()
    return [
        _median("full scan of live rows", scans, 1.0),
        _median("id = x on live rows", points, 1.0),
        _median("count of live rows", counts, 1.0),
    ]


@workload("lookups", "rows by key from SSTables and base: one key, and 1,000 at once")
def lookups(context: Context) -> list[Comparison]:
    base_rows = context.size(full=1_000_000, quick=2_000)
    base, shard, keys = _overlapped(context, base_rows, context.size(full=10_000, quick=100))
    reader, dataset = _reader(base), lance.dataset(base.uri)
    snapshots = _snapshots(base, shard)
    planner = LsmPointLookupPlanner(dataset, snapshots)
    flushed = context.alternate(
        context.size(full=300, quick=10),
        ours=lambda i: expect(reader.lookup([int(keys[i])]).table.num_rows, 1),
        peer=lambda i: expect(planner.plan_lookup(pa.array([keys[i]])).to_table().num_rows, 1),
    )
    random = np.random.default_rng(3)
    asked = random.choice(base_rows, min(1000, base_rows), replace=False)
    many = context.alternate(
        context.size(full=3, quick=1),
        ours=lambda _: expect(reader.lookup(pa.array(asked)).table.num_rows, len(asked)),
        # An IN of so many keys takes Lance's merging scanner several times as long.
        peer=lambda _: expect(
            sum(planner.plan_lookup(pa.array([key])).to_table().num_rows for key in asked), len(asked)
        ),
    )
    return [
        _median("one key in SSTables", flushed, 1 / 3),
        _median("1,000 keys at once", many, 1.0),
    ]


@workload("merged_scan", "scan of a base with 3 overlapping SSTables, at 10 k, 100 k and 1 M base rows")
def merged_scan(context: Context) -> list[Comparison]:
    """Updates of rows anywhere against Lance's scanner; those of recent rows beside the base alone.

    The second shows what merging itself costs: batches of the base that hold no superseded
    row are passed on as they are.
    """
    comparisons = []
    for base_rows in (10_000, 100_000, 1_000_000):
        rows = context.size(full=base_rows, quick=base_rows // 100)
        rows_each = context.size(full=1_000, quick=20)
        anywhere, shard, _ = _overlapped(context, rows, rows_each)
        recent, _, _ = _overlapped(context, rows, rows_each, recent=True)
        indexed, _, _ = _overlapped(context, rows, rows_each, recent=True, indexed=True)
        sides = _scans(rows, _reader(anywhere), _reader(recent), lance.dataset(anywhere.uri))
        sides["indexed"] = partial(_merged_rows, _reader(indexed), rows)
        sides["peer"] = _peer_scan(rows, lance.dataset(anywhere.uri), _snapshots(anywhere, shard))
        laps = context.alternate(context.size(full=5, quick=1), **sides)
        comparisons += [
            _median(f"{rows:,} base rows", laps, 1.0),
            _median(
                f"{rows:,} base rows, recent ones updated", _pair(laps, "recent", "alone"), None, "base alone"
            ),
            _median(
                f"{rows:,} base rows, recent ones updated, BTree on the key",
                _pair(laps, "indexed", "alone"),
                None,
                "base alone",
            ),
        ]
    return comparisons


def _scans(
    rows: int, anywhere: TableReader, recent: TableReader, alone: lance.LanceDataset
) -> dict[str, Callable[[int], object]]:
    return {
        "ours": lambda _: expect(anywhere.scan().to_table().num_rows, rows),
        "recent": lambda _: expect(recent.scan().to_table().num_rows, rows),
        "alone": lambda _: expect(alone.to_table().num_rows, rows),
    }


def _merged_rows(reader: TableReader, rows: int, _: int) -> None:
    expect(reader.scan().to_table().num_rows, rows)


def _peer_scan(
    rows: int, dataset: lance.LanceDataset, snapshots: list[ShardSnapshot]
) -> Callable[[int], object]:
    return lambda _: expect(LsmScanner.from_snapshots(dataset, snapshots).to_table().num_rows, rows)


def _pair(laps: dict[str, Laps], ours: str, peer: str) -> dict[str, Laps]:
    return {"ours": laps[ours], "peer": laps[peer]}


def _median(name: str, laps: dict[str, Laps], target: float | None, peer_name: str = PEER) -> Comparison:
    ours, theirs = laps["ours"].percentile(50) * 1e3, laps["peer"].percentile(50) * 1e3
    return Comparison(name, ours, theirs, "ms", False, peer_name, target)


def _overlapped(
    context: Context, base_rows: int, rows_each: int, *, recent: bool = False, indexed: bool = False
) -> tuple[BaseTable, UUID, Any]:
    """A table whose SSTables replace random rows of the base; the keys of the oldest one that are alive.

    ``recent`` takes them from the base's last rows only; ``indexed`` puts a BTree on the key.
    """
    random = np.random.default_rng(5)
    variant = ("_recent" if recent else "") + ("_indexed" if indexed else "")
    directory = context.directory(f"base_{base_rows}{variant}")
    base = new_table(directory, _ROWS, _some(np.arange(base_rows), "base"))
    if indexed:
        base.dataset.create_scalar_index("id", "BTREE")
        base = BaseTable.open(str(directory))
    candidates = np.arange(base_rows)[-4 * rows_each if recent else 0 :]
    shard = uuid4()
    first: Any = None
    for number in range(OVERLAPPING_SSTABLES):
        keys = np.sort(random.choice(candidates, rows_each, replace=False))
        with _writer(base, shard) as writer:
            writer.put(_some(keys, f"flushed {number}"))
        first = keys if first is None else np.setdiff1d(first, keys)
    random.shuffle(first)
    return base, shard, np.resize(first, 1000)


def _some(keys: Any, prefix: str) -> pa.Table:
    names = pa.array([f"{prefix} {key}" for key in keys.tolist()])
    return pa.table([pa.array(keys), pa.array(keys * 1.5), names], schema=_ROWS)


def _writer(base: BaseTable, shard: UUID) -> ShardWriter:
    config = ShardWriterConfig(fsync=False, durable_write=False, stats_log_interval=None)
    return open_shard_writer(base, shard, config, indexes=())


def _reader(base: BaseTable) -> TableReader:
    return TableReader(ObjectStore.from_uri(base.uri))


def _snapshots(base: BaseTable, shard: UUID) -> list[ShardSnapshot]:
    manifest = ShardManifestStore(ObjectStore.from_uri(base.uri), shard).require_latest()
    snapshot = ShardSnapshot(str(shard)).with_current_generation(manifest.current_generation)
    for entry in manifest.sstables:
        snapshot = snapshot.with_sstable(entry.generation, entry.path)
    return [snapshot]
