"""Queries of Spark that need little of a table, in each way that there is to read it, against Parquet.

The ways: through the planner's front, which tells the table what a query needs; the Python data source alone;
the same with the columns and the filter of the query as options; and ``mapInArrow`` over the table's
partitions with these, which is no ordinary query any more.

The wide table has 20 columns, one of them a vector of 1024 floats. A tenth of its rows is in SSTables, half
of them with an older version in the base, and some are in the WAL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    from pyspark.sql import DataFrame, SparkSession

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
_LONGS = pa.schema(
    [pa.field("id", pa.int64(), nullable=False, metadata=KEY)]
    + [pa.field(f"n{i}", pa.int64()) for i in range(6)]
)


@dataclass(frozen=True)
class Query:
    """A query, with what it needs of the table and the least ratio that is wanted."""

    name: str
    run: Callable[[DataFrame], object]
    target: float
    columns: tuple[str, ...] | None = None
    filter: str | None = None


def _all_rows(df: DataFrame) -> None:
    df.write.format("noop").mode("overwrite").save()


_WIDE_QUERIES = [
    Query("count(*)", lambda df: df.groupBy().count().collect(), 0.8, ("id",)),
    Query("limit 10 of a narrow column", lambda df: df.select("id").limit(10).collect(), 0.8, ("id",)),
    Query("one narrow column", lambda df: df.selectExpr("sum(c3)").collect(), 0.8, ("c3",)),
    Query("one key", lambda df: df.filter("id = 12345").collect(), 2.0, None, "id = 12345"),
    Query("all columns", _all_rows, 0.7),
]


@workload(
    "spark_scan", "queries of 30,000 rows with a 1024-d vector: what each needs, against a Parquet read"
)
def spark_scan(context: Context) -> list[Comparison]:
    spark = spark_session(SLOTS)
    rows = _rows(context.size(full=30_000, quick=2_000))
    parquet, table = _written(context.scratch / "wide", rows)
    return [each for query in _WIDE_QUERIES for each in _compared(context, spark, query, table, parquet)]


@workload("spark_narrow", "all of 400,000 rows of 7 longs and of 1 M, against a Parquet read")
def spark_narrow(context: Context) -> list[Comparison]:
    spark = spark_session(SLOTS)
    comparisons = []
    for full, quick in ((400_000, 2_000), (1_000_000, 5_000)):
        count = context.size(full=full, quick=quick)
        random = np.random.default_rng(0)
        numbers = [pa.array(random.integers(0, 1 << 40, count)) for _ in _LONGS.names[1:]]
        rows = pa.table([pa.array(np.arange(count)), *numbers], schema=_LONGS)
        parquet, table = _written(context.scratch / f"narrow-{count}", rows)
        query = Query(f"all of {count:,} rows", _all_rows, 0.7)
        comparisons += _compared(context, spark, query, table, parquet)
    return comparisons


def _compared(
    context: Context, spark: SparkSession, query: Query, table: str, parquet: str
) -> list[Comparison]:
    def ours() -> None:
        query.run(spark.read.format("lancewal").load(table))

    def without_front(**options: str) -> None:
        spark.conf.set(_SWITCH, "false")
        try:
            query.run(spark.read.format("lancewal").options(**options).load(table))
        finally:
            spark.conf.set(_SWITCH, "true")

    def told() -> None:
        named = {"columns": ",".join(query.columns or ()), "filter": query.filter or ""}
        without_front(**{name: value for name, value in named.items() if value})

    ways: dict[str, Callable[[], object]] = {
        "ours": ours,
        "alone": without_front,
        "told": told,
        "mapped": lambda: query.run(_mapped(spark, table, query)),
        "peer": lambda: query.run(spark.read.parquet(parquet)),
    }
    for warm_up in ways.values():
        warm_up()
    seconds = context.in_turn(**{way: timed(run) for way, run in ways.items()})
    labels = {
        "ours": (query.name, query.target),
        "alone": (f"{query.name}, the Python source alone", None),
        "told": (f"{query.name}, with columns and filter as options", None),
        "mapped": (f"{query.name}, by mapInArrow", None),
    }
    peer = 1 / seconds["peer"]
    return [
        Comparison(label, 1 / seconds[way], peer, "queries/s", True, PEER, target)
        for way, (label, target) in labels.items()
    ]


def _mapped(spark: SparkSession, table: str, query: Query) -> DataFrame:
    """The rows by ``mapInArrow``: every task is given a part of the table."""
    from pyspark import cloudpickle

    from lancewal.spark.columns import arrow_schema, for_spark, spark_schema
    from lancewal.spark.merged import MergedState, Wanted
    from lancewal.spark.options import Options, state_to_read

    options = Options.of(table)
    merged = MergedState(options, state_to_read(options))
    wanted = Wanted(query.columns or tuple(merged.columns), query.filter)
    schema = spark_schema(pa.schema([lancewal.open(table).schema.field(name) for name in wanted.columns]))
    parts = [(cloudpickle.dumps(part),) for part in merged.partitions(wanted)]  # type: ignore[no-untyped-call]

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        shape = arrow_schema(schema)
        for batch in batches:
            for pickled in batch.column(0).to_pylist():
                for rows in merged.read(cloudpickle.loads(pickled), wanted):
                    yield for_spark(rows, shape)

    plan = spark.createDataFrame(parts, "part binary").repartition(len(parts))
    return plan.mapInArrow(read, schema)


def _written(place: Path, rows: pa.Table) -> tuple[str, str]:
    """The same rows as Parquet files and as a table with levels above its base."""
    count = rows.num_rows
    parquet = place.with_suffix(".parquet")
    parquet.mkdir()
    share = -(-count // FILES)
    for number in range(FILES):
        pq.write_table(rows.slice(number * share, share), parquet / f"{number}.parquet")
    uri = str(place)
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
