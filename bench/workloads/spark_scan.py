"""Queries of Spark that need little of a table, with and without the planner's front, against Parquet.

The table has 20 columns, one of them a vector of 1024 floats. A tenth of its rows is in SSTables, half of
them with an older version in the base, and some are in the WAL.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import lancewal
from bench.comparison import Comparison
from bench.context import Context
from bench.registry import workload
from bench.tables import KEY
from bench.workloads.spark import BUCKETS, PEER, SLOTS, spark_session, timed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DIMENSION = 1024
FILES = 4
_SWITCH = "spark.sql.lancewal.front"
_NARROW = [pa.field(f"c{i}", pa.int64() if i % 2 else pa.string()) for i in range(18)]
_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        *_NARROW,
        pa.field("vector", pa.list_(pa.float32(), DIMENSION)),
    ]
)
#: Each query with the least ratio that is wanted.
_QUERIES: dict[str, tuple[Callable[[DataFrame], object], float]] = {
    "count(*)": (lambda df: df.count(), 0.8),
    "limit 10 of a narrow column": (lambda df: df.select("id").limit(10).collect(), 0.8),
    "one narrow column": (lambda df: df.selectExpr("sum(c3)").collect(), 0.8),
    "one key": (lambda df: df.filter("id = 12345").collect(), 2.0),
    "all columns": (lambda df: df.write.format("noop").mode("overwrite").save(), 0.7),
}


@workload(
    "spark_scan", "queries of 30,000 rows with a 1024-d vector: what each needs, against a Parquet read"
)
def spark_scan(context: Context) -> list[Comparison]:
    spark = spark_session(SLOTS)
    count = context.size(full=30_000, quick=2_000)
    parquet, table = _written(context.scratch, count)
    comparisons = []
    for name, (query, target) in _QUERIES.items():

        def ours(query: Callable[[DataFrame], object] = query) -> None:
            query(spark.read.format("lancewal").load(table))

        def plain(query: Callable[[DataFrame], object] = query) -> None:
            spark.conf.set(_SWITCH, "false")
            try:
                query(spark.read.format("lancewal").load(table))
            finally:
                spark.conf.set(_SWITCH, "true")

        def theirs(query: Callable[[DataFrame], object] = query) -> None:
            query(spark.read.parquet(parquet))

        ways = {"ours": ours, "plain": plain, "peer": theirs}
        for warm_up in ways.values():
            warm_up()
        seconds = context.in_turn(**{way: timed(run) for way, run in ways.items()})
        peer = 1 / seconds["peer"]
        comparisons += [
            Comparison(name, 1 / seconds["ours"], peer, "queries/s", True, PEER, target),
            Comparison(f"{name}, without the front", 1 / seconds["plain"], peer, "queries/s", True, PEER),
        ]
    return comparisons


def _written(scratch: Path, count: int) -> tuple[str, str]:
    """The same rows as Parquet files and as a table with levels above its base."""
    rows = _rows(count)
    parquet = scratch / "wide.parquet"
    parquet.mkdir()
    share = -(-count // FILES)
    for number in range(FILES):
        pq.write_table(rows.slice(number * share, share), parquet / f"{number}.parquet")
    uri = str(scratch / "wide")
    lance.write_dataset(rows.slice(0, count * 9 // 10), uri, max_rows_per_file=share)
    table = lancewal.initialize(uri, bucket=("id", BUCKETS))
    for start in (count * 85 // 100, count * 95 // 100):
        with table.writer() as writer:
            writer.put(rows.slice(start, count // 10))
        if start < count * 9 // 10:
            table.flush()
    return str(parquet), uri


def _rows(count: int) -> pa.Table:
    random = np.random.default_rng(0)
    columns: list[pa.Array] = [pa.array(np.arange(count))]
    for field in _NARROW:
        values = random.integers(0, 1000, count)
        columns.append(pa.array(values if field.type == pa.int64() else [f"text {n}" for n in values]))
    vectors = random.random(count * DIMENSION, dtype=np.float32)
    columns.append(pa.FixedSizeListArray.from_arrays(pa.array(vectors), DIMENSION))
    return pa.table(columns, schema=_SCHEMA)
