"""Many overlapping SSTables: what merging costs beside the plain read of the same files.

Every key is in two SSTables on average, however many there are, so the rows of the result grow as
those of the files do, and a merge that takes one pass grows no faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID, uuid4

import lance
import numpy as np
import pyarrow as pa

from bench.comparison import Comparison
from bench.context import Context, Laps
from bench.growth import LINEAR, exponent_of
from bench.registry import workload
from bench.tables import KEY, expect, new_table
from lancewal.base.table import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.reader import TableReader
from lancewal.shard.manifest import ShardManifestStore
from lancewal.sstable import keep_sstables
from lancewal.storage import ObjectStore, layout, process_cache
from lancewal.writer import open_shard_writer

PEER = "plain read by Lance"
SSTABLES = (4, 16, 64)
VERSIONS_OF_A_KEY = 2

_ROWS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("price", pa.float64()),
        pa.field("name", pa.string()),
    ]
)


@workload(
    "overlapping_sstables",
    "scan and count of 4, 16 and 64 SSTables of 50,000 rows that replace each other's, cold and warm",
)
def overlapping_sstables(context: Context) -> list[Comparison]:
    rows_each = context.size(full=50_000, quick=500)
    comparisons: list[Comparison] = []
    taken: dict[str, list[float]] = {"cold": [], "warm": [], "warm count": []}
    for count in SSTABLES:
        laps = _laps(context, count, rows_each)
        for name, ours, plain, target in (
            ("cold", laps["cold"], laps["plain_cold"], None),
            ("warm", laps["warm"], laps["plain"], 3.0),
            ("warm count", laps["warm_count"], laps["plain"], None),
        ):
            comparisons.append(_median(f"{count} SSTables, {name}", ours, plain, target))
            taken[name].append(ours.percentile(50))
    for name, seconds in taken.items():
        comparisons.append(exponent_of(f"exponent by SSTables, {name}", SSTABLES, seconds, LINEAR))
    return comparisons


def _laps(context: Context, count: int, rows_each: int) -> dict[str, Laps]:
    table, shard, live = _overlapping(context, count, rows_each)
    store, reader, uris = ObjectStore.from_uri(table.uri), _reader(table), _uris(table, shard)
    opened = [lance.dataset(uri) for uri in uris]

    def scan_cold(_: int) -> None:
        # Also the handles go, and all that the process keeps of the table.
        process_cache.after_fork()
        keep_sstables(store, shard, ())
        expect(_reader(table).scan().to_table().num_rows, live)

    cold = context.alternate(
        context.size(full=5, quick=1),
        cold=scan_cold,
        plain_cold=lambda _: _read_plain([lance.dataset(uri) for uri in uris], rows_each),
    )
    warm = context.alternate(
        context.size(full=7, quick=2),
        warm=lambda _: expect(reader.scan().to_table().num_rows, live),
        warm_count=lambda _: expect(reader.scan().count_rows(), live),
        plain=lambda _: _read_plain(opened, rows_each),
    )
    return cold | warm


def _overlapping(context: Context, count: int, rows_each: int) -> tuple[BaseTable, UUID, int]:
    """A table with an empty base, its shard, and how many keys it has."""
    random = np.random.default_rng(11)
    table = new_table(context.directory(f"sstables_{count}"), _ROWS)
    shard = uuid4()
    every: set[int] = set()
    config = ShardWriterConfig(fsync=False, durable_write=False, stats_log_interval=None)
    for number in range(count):
        keys = random.choice(count * rows_each // VERSIONS_OF_A_KEY, rows_each, replace=False)
        names = pa.array([f"flushed {number} {key}" for key in keys.tolist()])
        with open_shard_writer(table, shard, config, indexes=()) as writer:
            writer.put(pa.table([pa.array(keys), pa.array(keys * 1.5), names], schema=_ROWS))
        every.update(keys.tolist())
    return table, shard, len(every)


def _uris(table: BaseTable, shard: UUID) -> list[str]:
    manifest = ShardManifestStore(ObjectStore.from_uri(table.uri), shard).require_latest()
    return [f"{table.uri}/{layout.sstable_dir(shard, entry.path)}" for entry in manifest.sstables]


def _read_plain(datasets: Sequence[lance.LanceDataset], rows_each: int) -> None:
    columns = _ROWS.names
    rows = pa.concat_tables([each.to_table(columns=columns) for each in datasets]).num_rows
    expect(rows, rows_each * len(datasets))


def _reader(table: BaseTable) -> TableReader:
    return TableReader(ObjectStore.from_uri(table.uri))


def _median(name: str, ours: Laps, plain: Laps, target: float | None) -> Comparison:
    return Comparison(name, ours.percentile(50) * 1e3, plain.percentile(50) * 1e3, "ms", False, PEER, target)
