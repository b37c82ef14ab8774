"""Maintained indexes: ingest beside Lance's own writer, live queries, recall.

Both writers maintain the indexes of the same kind of table and wait for nothing
(``durable_write`` off, no fsync). Lance's builds its vector graph in the put; ours is
searchable when put returns and builds graphs behind it, so its time is given twice: to the
end of the puts, and until the last graph is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lance.mem_wal import LsmVectorSearchPlanner, ShardSnapshot

import lancewal
from bench.comparison import Comparison
from bench.context import Context, Laps
from bench.registry import workload
from bench.tables import KEY, expect
from lancewal.base.table import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import ObjectStore
from lancewal.writer import ShardWriter, open_shard_writer

PEER = "Lance writer"
FLUSHED = "Lance, flushed rows"
DIMENSION = 128
ROWS_PER_BATCH = 20
K = 10
WORDS_PER_TEXT = 12

BTREE, WORDS, VECTOR = "n", "text", "vector"
GIB = 1 << 30

_Vectors = npt.NDArray[np.float32]


@workload("indexed_ingest", "20-row batches × 128-d with maintained indexes: rows/s in put")
def indexed_ingest(context: Context) -> list[Comparison]:
    comparisons = []
    for name, columns, count, target in (
        ("BTree", [BTREE], context.size(full=4_000, quick=20), 2.0),
        ("full text", [WORDS], context.size(full=4_000, quick=20), 1.0),
        ("vector", [VECTOR], context.size(full=1_500, quick=20), 3.0),
        ("all three", [BTREE, WORDS, VECTOR], context.size(full=1_500, quick=20), 3.0),
    ):
        base = _table(context.directory(name.replace(" ", "_")), columns)
        batches = _batches(count, ROWS_PER_BATCH)
        rows = count * ROWS_PER_BATCH
        seconds = context.in_turn(
            ours=partial(_ingest, base, batches), peer=partial(_ingest_by_lance, base, batches)
        )
        (in_put, until_built), theirs = seconds["ours"], seconds["peer"][0]
        comparisons.append(_rate(f"{name}, in put", rows / in_put, rows / theirs, target))
        if VECTOR in columns:
            name = f"{name}, until graphs are done"
            comparisons.append(_rate(name, rows / until_built, rows / theirs, None))
    return comparisons


def _rate(name: str, ours: float, peer: float, target: float | None) -> Comparison:
    return Comparison(name, ours, peer, "rows/s", True, PEER, target)


def _ingest(base: BaseTable, batches: Sequence[pa.RecordBatch]) -> tuple[float, float]:
    """Seconds to the end of the puts, and until every graph is built."""
    writer = _writer(base, uuid4())
    started = time.perf_counter()
    for batch in batches:
        writer.put(batch)
    in_put = time.perf_counter() - started
    expect(writer.active_memtable_ref().row_count, len(batches) * ROWS_PER_BATCH)
    _wait_for_graphs(writer)
    until_built = time.perf_counter() - started
    writer._finalizer()  # as a crash would: closing would flush
    return in_put, until_built


def _ingest_by_lance(base: BaseTable, batches: Sequence[pa.RecordBatch]) -> tuple[float, float]:
    writer = lance.dataset(base.uri).mem_wal_writer(str(uuid4()), durable_write=False)
    started = time.perf_counter()
    for batch in batches:
        writer.put(batch)
    in_put = time.perf_counter() - started
    expect(writer.memtable_stats()["row_count"], len(batches) * ROWS_PER_BATCH)
    return in_put, in_put


@workload("live_queries", "queries of 90,000 live rows in 20-row batches × 128-d: vector, words, range")
def live_queries(context: Context) -> list[Comparison]:
    """The peer has no vector and no word search of live rows: its searches go to the same rows, flushed."""
    count = context.size(full=4_500, quick=20)
    batches = _batches(count, ROWS_PER_BATCH)
    live = _table(context.directory("live"), [BTREE, WORDS, VECTOR])
    writer = _writer(live, uuid4())
    for batch in batches:
        writer.put(batch)
    _wait_for_graphs(writer)
    flushed, shard = _flushed(context.directory("flushed"), batches)
    theirs = _peer_of_ranges(context.directory("peer"), batches)
    reader = lancewal.open(live.uri)
    (entry,) = ShardManifestStore(ObjectStore.from_uri(flushed.uri), shard).require_latest().sstables
    snapshot = ShardSnapshot(str(shard)).with_current_generation(2).with_sstable(1, entry.path)
    planner = LsmVectorSearchPlanner(lance.dataset(flushed.uri), [snapshot], VECTOR, distance_type="l2")
    sstable = lance.dataset(f"{flushed.uri}/_mem_wal/{shard}/{entry.path}")

    random = np.random.default_rng(11)
    times = context.size(full=200, quick=3)
    queries = _vectors(random, times)
    words = _texts(random, times, 2)
    lows = random.integers(0, 900_000, times).tolist()
    step = max(1_000_000 // (count * ROWS_PER_BATCH) * 100, 1)

    def by_lance(place: int) -> pa.Table:
        query = pa.array(queries[place])
        return planner.plan_search(query, k=K, refine_base_table=True).to_table()

    near = context.alternate(
        times,
        ours=lambda i: reader.vector_search(VECTOR, queries[i], K, columns=["id"]),
        peer=by_lance,
    )
    found = context.alternate(
        times,
        ours=lambda i: reader.full_text_search(WORDS, words[i], K, columns=["id"]),
        peer=lambda i: sstable.scanner(
            columns=["id", "_score"], full_text_query=words[i], limit=K
        ).to_table(),
    )
    ranges = [f"{BTREE} >= {low} AND {BTREE} < {low + step}" for low in lows]
    between = context.alternate(
        times,
        ours=lambda i: reader.scan(columns=["id"], filter=ranges[i]).to_table(),
        peer=lambda i: theirs.lsm_scanner().project(["id"]).filter(ranges[i]).to_table(),
    )
    writer._finalizer()
    return [
        _median(f"vector, {K} nearest", near, FLUSHED),
        _median(f"words, {K} best of 2 words", found, FLUSHED),
        _median("range of about 100 rows", between, PEER),
    ]


def _flushed(directory: Path, batches: Sequence[pa.RecordBatch]) -> tuple[BaseTable, UUID]:
    base, shard = _table(directory, [BTREE, WORDS, VECTOR]), uuid4()
    writer = _writer(base, shard, sync_indexed_write=False)
    for batch in batches:
        writer.put(batch)
    writer.close()
    return base, shard


def _peer_of_ranges(directory: Path, batches: Sequence[pa.RecordBatch]) -> Any:
    writer = lance.dataset(_table(directory, [BTREE]).uri).mem_wal_writer(str(uuid4()), durable_write=False)
    for batch in batches:
        writer.put(batch)
    return writer


@workload("live_recall", "recall@10 of 100,000 live rows at 128-d and 1024-d, and the time of a query")
def live_recall(context: Context) -> list[Comparison]:
    comparisons = []
    for dimension in (DIMENSION, 1024):
        count = context.size(full=100_000, quick=2_000)
        random = np.random.default_rng(dimension)
        vectors = _vectors(random, count, dimension)
        schema = _schema(dimension)
        base = _table(context.directory(f"{dimension}"), [VECTOR], dimension)
        writer = _writer(base, uuid4())
        for start in range(0, count, 1000):
            writer.put(_rows(random, vectors[start : start + 1000], start, schema))
        _wait_for_graphs(writer)
        reader = lancewal.open(base.uri)
        queries = _vectors(random, context.size(full=200, quick=5), dimension)
        hits = 0
        ours, exact = Laps(), Laps()
        for query in queries:
            found = ours.time(reader.vector_search, VECTOR, query, K, columns=["id"])
            hits += len(set(found["id"].to_pylist()) & set(exact.time(_nearest, vectors, query).tolist()))
        recall = hits / (K * len(queries))
        where = f"{count:,} live rows × {dimension}-d"
        comparisons += [
            Comparison(f"recall@{K}, {where}", recall, 1.0, "", True, "exact search", 0.95),
            _median(f"query, {where}", {"ours": ours, "peer": exact}, "exact search in numpy"),
        ]
        writer._finalizer()
    return comparisons


def _nearest(vectors: _Vectors, query: _Vectors) -> npt.NDArray[np.intp]:
    apart = np.einsum("ij,ij->i", vectors, vectors) - 2 * (vectors @ query)
    return np.argpartition(apart, K)[:K]


def _median(name: str, laps: dict[str, Laps], peer: str) -> Comparison:
    ours, theirs = (laps[side].percentile(50) * 1e3 for side in ("ours", "peer"))
    return Comparison(f"{name}, p50", ours, theirs, "ms", False, peer)


def _writer(base: BaseTable, shard: UUID, **settings: Any) -> ShardWriter:
    config = ShardWriterConfig(
        **{
            "durable_write": False,
            "fsync": False,
            "stats_log_interval": None,
            # All rows stay live: none of these may freeze the MemTable.
            "max_memtable_rows": 1_000_000,
            "max_memtable_batches": 1_000_000,
            "max_memtable_size": 8 * GIB,
            "max_unflushed_memtable_bytes": 16 * GIB,
            **settings,
        }
    )
    return open_shard_writer(base, shard, config)


def _wait_for_graphs(writer: ShardWriter) -> None:
    index = writer.active_memtable_ref().indexes.vector(VECTOR)
    if index is not None:
        index.wait_for_graphs()


def _table(directory: Path, indexed: Sequence[str], dimension: int = DIMENSION) -> BaseTable:
    """A table without rows whose writers maintain indexes on some columns."""
    uri = str(directory / "table")
    dataset = lance.write_dataset(_schema(dimension).empty_table(), uri)
    create: dict[str, Callable[[], object]] = {
        BTREE: lambda: dataset.create_scalar_index(BTREE, "BTREE"),
        WORDS: lambda: dataset.create_scalar_index(WORDS, "INVERTED"),
        VECTOR: lambda: dataset.create_index(
            VECTOR,
            "IVF_FLAT",
            metric="l2",
            num_partitions=1,
            ivf_centroids=np.zeros((1, dimension), np.float32),
        ),
    }
    for column in indexed:
        create[column]()
    dataset.initialize_mem_wal(unsharded=True)
    return BaseTable.open(uri)


def _schema(dimension: int) -> pa.Schema:
    return pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False, metadata=KEY),
            pa.field(BTREE, pa.int64()),
            pa.field(WORDS, pa.string()),
            pa.field(VECTOR, pa.list_(pa.float32(), dimension)),
        ]
    )


def _batches(count: int, rows: int) -> list[pa.RecordBatch]:
    random = np.random.default_rng(7)
    schema = _schema(DIMENSION)
    vectors = _vectors(random, count * rows)
    return [_rows(random, vectors[at : at + rows], at, schema) for at in range(0, count * rows, rows)]


def _rows(random: np.random.Generator, vectors: _Vectors, first: int, schema: pa.Schema) -> pa.RecordBatch:
    count, dimension = vectors.shape
    columns = [
        pa.array(np.arange(first, first + count)),
        pa.array(random.integers(0, 1_000_000, count)),
        pa.array(_texts(random, count, WORDS_PER_TEXT)),
        pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), dimension),
    ]
    return pa.record_batch(columns, schema=schema)


def _vectors(random: np.random.Generator, count: int, dimension: int = DIMENSION) -> _Vectors:
    """Vectors in clusters of their own sizes and shapes, as those of real embeddings are."""
    centres = np.random.default_rng(dimension).normal(size=(256, dimension)).astype(np.float32)
    chosen = random.integers(0, len(centres), count)
    noise = random.normal(size=(count, dimension)).astype(np.float32)
    return centres[chosen] + np.float32(0.6) * noise


_VOCABULARY = np.array([f"word{number}" for number in range(20_000)])
_FREQUENCY = 1 / np.arange(1, len(_VOCABULARY) + 1)
_FREQUENCY /= _FREQUENCY.sum()


def _texts(random: np.random.Generator, count: int, words: int) -> list[str]:
    """Texts whose words are as unevenly frequent as those of a language."""
    chosen = random.choice(_VOCABULARY, size=(count, words), p=_FREQUENCY)
    return [" ".join(each) for each in chosen.tolist()]
