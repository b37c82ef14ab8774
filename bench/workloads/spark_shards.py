"""A Spark pipeline from end to end on tables of few and of many shards, with as many rows in each shard.

Each step's time for a shard of the large table is compared with that of the small one: at most 1 where times
grow no faster than the number of shards.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import lance

import lancewal
from bench.comparison import Comparison
from bench.context import Context
from bench.registry import workload
from bench.workloads.spark import SCHEMA, SLOTS, expect, made_rows, spark_session, timed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ROWS_OF_A_SHARD = 1_000


@workload("spark_shards", "write both ways, count, one key, flush, compact: 200 shards against 8")
def spark_shards(context: Context) -> list[Comparison]:
    spark = spark_session(SLOTS)
    few, many = context.size(full=8, quick=2), context.size(full=200, quick=4)
    rows = context.size(full=_ROWS_OF_A_SHARD, quick=20)
    seconds = {}
    # The first pass only warms up, where times matter.
    for number, shards in enumerate((few, many) if context.quick else (few, few, many)):
        seconds[shards] = _steps(spark, context.scratch / f"table-{number}", shards, shards * rows)
    return [
        Comparison(
            step,
            1000 * seconds[many][step] / many,
            1000 * seconds[few][step] / few,
            "ms/shard",
            False,
            f"{few} shards",
            1.0,
        )
        for step in seconds[few]
    ]


def _steps(spark: SparkSession, place: Path, shards: int, count: int) -> dict[str, float]:
    """The seconds of each step, in their order."""
    from lancewal.spark import compact, flush, route, write

    uri = str(place)
    lance.write_dataset(SCHEMA.empty_table(), uri)
    lancewal.initialize(uri, bucket=("id", shards), writer_defaults=lancewal.ShardWriterConfig(fsync=False))

    def load() -> DataFrame:
        return spark.read.format("lancewal").load(uri)

    def by_format() -> None:
        routed = route(made_rows(spark, count, count), uri)
        routed.write.format("lancewal").mode("append").option("walBytes", 0).save(uri)

    steps: dict[str, Callable[[], object]] = {
        "write, low latency": lambda: write(made_rows(spark, 0, count), uri),
        "count": lambda: expect(load().count(), count, "logged"),
        "one key": lambda: expect(len(load().filter("id = 7").collect()), 1, "key of the"),
        "flush": lambda: flush(spark, uri),
        "write, by format": by_format,
        "compact": lambda: compact(spark, uri),
    }
    seconds = {step: timed(run)() for step, run in steps.items()}
    expect(lance.dataset(uri).count_rows(), 2 * count, "compacted")
    return seconds
