"""Spark with lancewal against Spark with Parquet: the same rows, the same routing, the same session.

Parquet is a plain file format: it keeps no log, finds no newest version and merges nothing. It
never syncs to disk either, so lancewal's tables do without it here.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pyarrow.parquet as pq

import lancewal
from bench.comparison import Comparison
from bench.context import Context
from bench.registry import workload
from bench.tables import KEY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PEER = "Spark Parquet"
BUCKETS = 8
DIMENSION = 32
SLOTS = 2
#: Rows of a pass that only warms up Java, Python workers and the page cache.
_WARM_UP_ROWS = 20_000

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), DIMENSION)),
    ]
)


@workload("spark_write", "1 M rows into 8 buckets: both ways in, against a Parquet write of the routed rows")
def spark_write(context: Context) -> list[Comparison]:
    from lancewal.spark import route, write

    spark = spark_session(SLOTS)
    count = context.size(full=1_000_000, quick=20_000)
    rows = _source(spark, context, count)

    def by_wal(number: int, df: DataFrame) -> None:
        write(df, _table(context.scratch / f"wal-{number}").uri)

    def by_format(number: int, df: DataFrame) -> None:
        uri = _table(context.scratch / f"sstables-{number}").uri
        route(df, uri).write.format("lancewal").mode("append").option("walBytes", 0).save(uri)

    def as_parquet(number: int, df: DataFrame) -> None:
        uri = _table(context.scratch / f"routing-{number}").uri
        route(df, uri).write.parquet(str(context.scratch / f"parquet-{number}"))

    ways = {"wal": by_wal, "sstables": by_format, "parquet": as_parquet}
    for way in ways.values():
        way(0, rows.limit(_WARM_UP_ROWS))
    seconds = context.in_turn(**{name: timed(way, 1, rows) for name, way in ways.items()})
    for name, kind in (("wal-1", "WAL"), ("sstables-1", "SSTable")):
        expect(lancewal.open(str(context.scratch / name)).scan().count_rows(), count, kind)
    parquet = count / seconds["parquet"]
    return [
        Comparison("low latency (WAL)", count / seconds["wal"], parquet, "rows/s", True, PEER, 0.7),
        Comparison("by format (SSTables)", count / seconds["sstables"], parquet, "rows/s", True, PEER, 0.5),
    ]


@workload("spark_read", "1 M rows, 5 % of them with a newer version in the WAL, against a Parquet read")
def spark_read(context: Context) -> list[Comparison]:
    from lancewal.spark import compact, route, write

    spark = spark_session(SLOTS)
    count = context.size(full=1_000_000, quick=20_000)
    rows = _source(spark, context, count)
    table = _table(context.scratch / "table")
    routed = route(rows, table.uri)
    routed.write.format("lancewal").mode("append").option("walBytes", 0).save(table.uri)
    routed.write.parquet(str(context.scratch / "parquet"))
    compact(spark, table.uri)
    write(rows.filter("id % 20 = 0"), table.uri)

    def ours() -> None:
        _consume(spark.read.format("lancewal").load(table.uri))

    def theirs() -> None:
        _consume(spark.read.parquet(str(context.scratch / "parquet")))

    for warm_up in (ours, theirs):
        warm_up()
    seconds = context.in_turn(ours=timed(ours), peer=timed(theirs))
    expect(spark.read.format("lancewal").load(table.uri).count(), count, "merged")
    return [
        Comparison("merged read", count / seconds["ours"], count / seconds["peer"], "rows/s", True, PEER, 0.7)
    ]


@workload("spark_compact", "compaction of 1 M rows in 8 shards: two task slots against one, and plain Lance")
def spark_compact(context: Context) -> list[Comparison]:
    from lancewal.spark import compact, route

    count = context.size(full=1_000_000, quick=20_000)
    spark = spark_session(SLOTS)
    flushed = _table(context.scratch / "flushed")
    rows = _source(spark, context, count)
    routed = route(rows, flushed.uri).write.format("lancewal").mode("append")
    routed.option("walBytes", 0).save(flushed.uri)

    def compacted_by(slots: int) -> float:
        session = spark_session(slots)
        warm_up = shutil.copytree(flushed.uri, context.scratch / f"warm-up-{slots}")
        compact(session, str(warm_up))
        copy = str(shutil.copytree(flushed.uri, context.scratch / f"copy-{slots}"))
        seconds = timed(lambda: compact(session, copy))()
        expect(lance.dataset(copy).count_rows(), count, "compacted")
        return seconds

    def merged_by_lance() -> float:
        base = lance.write_dataset(SCHEMA.empty_table(), str(context.scratch / "plain"))
        merge = base.merge_insert(["id"]).when_matched_update_all().when_not_matched_insert_all()
        newest = pq.read_table(context.scratch / "source").cast(SCHEMA)
        return timed(lambda: merge.execute(newest))()

    seconds = context.in_turn(
        one=lambda: compacted_by(1), two=lambda: compacted_by(SLOTS), lance=merged_by_lance
    )
    rate = {name: count / each for name, each in seconds.items()}
    return [
        Comparison("compaction", rate["two"], rate["one"], "rows/s", True, "one task slot"),
        Comparison("compaction beside one merge", rate["two"], rate["lance"], "rows/s", True, "plain Lance"),
    ]


@workload("spark_slots", "jobs on 1 M rows in the logs of 8 shards: two task slots against one")
def spark_slots(context: Context) -> list[Comparison]:
    from lancewal.spark import backup, flush, verify, write

    count = context.size(full=1_000_000, quick=20_000)
    spark = spark_session(SLOTS)
    logged = _table(context.scratch / "logged")
    write(_source(spark, context, count), logged.uri)

    def by(slots: int) -> dict[str, float]:
        session = spark_session(slots)
        flush(session, str(shutil.copytree(logged.uri, context.scratch / f"warm-up-{slots}")))
        copy = str(shutil.copytree(logged.uri, context.scratch / f"copy-{slots}"))
        seconds = {
            "flush": timed(lambda: flush(session, copy))(),
            "verify": timed(lambda: verify(session, copy))(),
            "backup": timed(lambda: backup(session, copy, str(context.scratch / f"backup-{slots}")))(),
        }
        expect(lancewal.open(copy).count_rows(), count, "flushed")
        return seconds

    seconds = context.in_turn(one=lambda: by(1), two=lambda: by(SLOTS))
    return [
        Comparison(f"{job} by two task slots", seconds["two"][job], one, "s", False, "one task slot", 1.0)
        for job, one in seconds["one"].items()
    ]


@cache
def _environment() -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)


def spark_session(slots: int) -> SparkSession:
    """A session with so many task slots; one with another number is stopped first."""
    from pyspark.sql import SparkSession

    from lancewal.spark import session

    _environment()
    master = f"local[{slots}]"
    active = SparkSession.getActiveSession()
    if active is not None and active.sparkContext.master != master:
        active.stop()
    spark = session(
        master,
        app_name="lancewal bench",
        front=True,
        conf={
            "spark.ui.enabled": "false",
            "spark.driver.memory": "4g",
            "spark.sql.shuffle.partitions": str(BUCKETS),
        },
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _source(spark: SparkSession, context: Context, count: int) -> DataFrame:
    """Rows of 160 bytes from Parquet files, so that making them is no part of the measurement."""
    path = str(context.scratch / "source")
    if not Path(path).exists():
        made_rows(spark, 0, count).write.parquet(path)
    return spark.read.parquet(path)


def made_rows(spark: SparkSession, start: int, count: int) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812

    vector = [(F.col("id") * (place + 1) % 1000 / 1000).cast("float") for place in range(DIMENSION)]
    return spark.range(start, start + count, 1, SLOTS).select(
        "id", F.concat(F.lit("row number "), F.col("id")).alias("text"), F.array(*vector).alias("vector")
    )


def _table(path: Path) -> lancewal.Table:
    lance.write_dataset(SCHEMA.empty_table(), str(path))
    defaults = lancewal.ShardWriterConfig(fsync=False)
    return lancewal.initialize(str(path), bucket=("id", BUCKETS), writer_defaults=defaults)


def _consume(df: DataFrame) -> None:
    """Read every column of every row and drop it."""
    df.write.format("noop").mode("overwrite").save()


def timed(call: Callable[..., object], *arguments: object) -> Callable[[], float]:
    def timed() -> float:
        started = time.perf_counter()
        call(*arguments)
        return time.perf_counter() - started

    return timed


def expect(found: int, rows: int, what: str) -> None:
    if found != rows:
        raise RuntimeError(f"{rows} rows were written, but the {what} table has {found}")
