"""Micro-batches of few rows: what one costs beside Spark's own Parquet sink, and on storage that is far away.

A stream takes one file of 200 rows with each trigger. The time of a trigger is what Spark says in the query's
progress: it includes reading the file and writing the checkpoint, which is the same for every sink. Parquet
files are not synced, so lancewal's tables do without it here. Far away means an S3 server behind a proxy that
takes 20 ms for each request; the checkpoint stays on the local disk.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pyarrow.parquet as pq

import lancewal
from bench.comparison import Comparison
from bench.context import Context
from bench.far import FarStorage
from bench.registry import workload
from bench.tables import KEY, expect
from bench.workloads.spark import PEER, SLOTS, spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

ROWS_PER_FILE = 200
_LATENCY = 0.020
#: The first triggers of a stream start workers and plan for the first time.
_WARM_UP = 3

_SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=KEY), pa.field("text", pa.string())])

#: Starts a query that writes to a table; the last arguments are its checkpoint and its storage's options.
_Start = Callable[["DataFrame", str, str, Mapping[str, str]], "StreamingQuery"]


@workload(
    "spark_stream",
    "a micro-batch of 200 rows beside Spark's Parquet sink; 20 ms away, to 32 shards beside 1",
)
def spark_stream(context: Context) -> list[Comparison]:
    return [*_beside_parquet(context), *_far_away(context)]


def _beside_parquet(context: Context) -> list[Comparison]:
    found = []
    for shards in (1, 8):
        stream = _Stream(context, f"near-{shards}", context.size(full=15, quick=1))

        def ours(name: str, start: _Start, shards: int = shards, stream: _Stream = stream) -> float:
            path = context.directory(f"{name}-{shards}") / "table"
            return stream.into(_table(path, shards), f"{name}-{shards}", start, {})

        def parquet(stream: _Stream = stream, shards: int = shards) -> float:
            where = str(context.directory(f"parquet-{shards}") / "files")
            return stream.milliseconds(where, f"parquet-{shards}", _parquet, {})

        times = context.in_turn(
            parquet=parquet, **{name: lambda name=name: ours(name, _SINKS[name]) for name in _SINKS}
        )
        found += [
            Comparison(f"{name}, {_counted(shards)}", times[name], times["parquet"], "ms", False, PEER, 1.5)
            for name in _SINKS
        ]
    return found


def _far_away(context: Context) -> list[Comparison]:
    few, many = 1, context.size(full=32, quick=2)
    stream = _Stream(context, "far", context.size(full=6, quick=1))
    times: dict[tuple[str, int], float] = {}
    with FarStorage(latency=_LATENCY) as far:
        for name, start in _SINKS.items():
            for shards in (few, many):
                local = _table(context.directory(f"far-{name}-{shards}") / "table", shards)
                place = far.place(Path(local.uri))
                far.proxy.set(latency=_LATENCY)
                times[name, shards] = stream.into(place.table(), f"far-{name}-{shards}", start, place.options)
                far.proxy.set(latency=0.0)
    return [
        Comparison(
            f"{name}, {_counted(many)}, 20 ms a request",
            times[name, many],
            times[name, few],
            "ms",
            False,
            _counted(few),
            3.0,
        )
        for name in _SINKS
    ]


class _Stream:
    """Files of rows, which a query takes one by one."""

    def __init__(self, context: Context, name: str, triggers: int) -> None:
        self._context = context
        self._directory = context.directory(f"in-{name}")
        self._files = _WARM_UP + triggers
        for number in range(self._files):
            ids = range(number * ROWS_PER_FILE, (number + 1) * ROWS_PER_FILE)
            rows = {"id": pa.array(ids, pa.int64()), "text": [f"row {each}" for each in ids]}
            pq.write_table(pa.table(rows), self._directory / f"{number:05}.parquet")

    def into(self, table: lancewal.Table, name: str, start: _Start, options: Mapping[str, str]) -> float:
        """The median time of a trigger, in milliseconds; fails when a row is missing."""
        median = self.milliseconds(table.uri, name, start, options)
        expect(table.count_rows(), self._files * ROWS_PER_FILE)
        return median

    def milliseconds(self, uri: str, name: str, start: _Start, options: Mapping[str, str]) -> float:
        spark = spark_session(SLOTS)
        files = spark.readStream.schema("id long, text string").option("maxFilesPerTrigger", 1)
        checkpoint = str(self._context.directory(f"checkpoint-{name}"))
        query = start(files.parquet(str(self._directory)), uri, checkpoint, options)
        query.awaitTermination()
        took = [
            each["durationMs"]["triggerExecution"] for each in query.recentProgress if each["numInputRows"]
        ]
        expect(len(took), self._files)
        return float(statistics.median(took[_WARM_UP:]))


def _by_log(df: DataFrame, uri: str, checkpoint: str, options: Mapping[str, str]) -> StreamingQuery:
    from lancewal.spark import stream

    return stream(df, uri, checkpoint, trigger={"availableNow": True}, storage_options=options)


def _by_format(df: DataFrame, uri: str, checkpoint: str, options: Mapping[str, str]) -> StreamingQuery:
    storage = {f"storage.{name}": value for name, value in options.items()}
    writer = df.writeStream.format("lancewal").options(checkpointLocation=checkpoint, **storage)
    return writer.trigger(availableNow=True).start(uri)


def _parquet(df: DataFrame, uri: str, checkpoint: str, options: Mapping[str, str]) -> StreamingQuery:
    writer = df.writeStream.format("parquet").option("checkpointLocation", checkpoint)
    return writer.trigger(availableNow=True).start(uri)


_SINKS: dict[str, _Start] = {"low latency": _by_log, "by format": _by_format}


def _table(where: Path, shards: int) -> lancewal.Table:
    lance.write_dataset(_SCHEMA.empty_table(), str(where))
    defaults = lancewal.ShardWriterConfig(fsync=False)
    return lancewal.initialize(str(where), bucket=("id", shards), writer_defaults=defaults)


def _counted(shards: int) -> str:
    return "1 shard" if shards == 1 else f"{shards} shards"
