"""A service and a Spark stream on the same shards: what the stream does to the service's durable puts.

The service is a process of its own that puts a row every 20 ms, synced to disk, and owns the shards. A stream
of one file a second, if it keeps up, comes in by one of both ways and is adopted by the service, in turn with
times in which the service is alone. The table has no key, so a row that came twice would show; it is compared
at the end, and so are the epochs: nobody may have claimed a shard.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

import lancewal
from bench.comparison import Comparison
from bench.context import Context
from bench.registry import workload
from bench.tables import expect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SHARDS = 4
ROWS_PER_FILE = 500
SECONDS_PER_FILE = 1.0
_PAUSE = 0.02
#: Files that may wait for the stream.
_AHEAD = 3
#: The service's ids; those of the stream are below.
_FIRST = 1 << 40
_SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])

Seconds = npt.NDArray[np.float64]
_Start = Callable[["DataFrame", str, str], "StreamingQuery"]


@workload("together", "a service's durable puts beside a Spark stream on the same shards", repeats=1)
def together(context: Context) -> list[Comparison]:
    spark = _session()
    table = _table(context.directory("table") / "table")
    found: list[Comparison] = []
    with _service(table) as service:
        service.lap()  # until it has written to every shard
        epochs = _epochs(table)
        files = 0
        for name, start in (("low latency", _by_log), ("by format", _by_format)):
            alone = _alone(context, service)
            files += (feed := _Feed(context.directory(f"in-{name}"), files)).run(
                spark, context, start, table, service
            )
            alone = np.concatenate([alone, _alone(context, service)])
            for percent in (50, 99):
                beside, by_itself = (
                    float(np.percentile(each, percent)) * 1e3 for each in (feed.beside, alone)
                )
                what, goal = f"{name}, p{percent} of a put", 3.0 if percent == 99 else None
                found.append(Comparison(what, beside, by_itself, "ms", False, "service alone", goal))
        kept = _epochs(table) == epochs
        acknowledged = service.stop()
    expect(kept, True)
    _expect_once(table, files * ROWS_PER_FILE, acknowledged)
    return found


def _alone(context: Context, service: _Service) -> Seconds:
    service.lap()
    time.sleep(context.size(full=30, quick=1))
    return service.lap()


class _Feed:
    """Files that arrive one by one while the stream runs, with ids that go on from the last one."""

    def __init__(self, directory: Path, first_file: int) -> None:
        self._directory = directory
        self._first = first_file
        self.beside = np.empty(0)

    def run(
        self, spark: SparkSession, context: Context, start: _Start, table: lancewal.Table, service: _Service
    ) -> int:
        """Run the stream; how many files it took in."""
        files = spark.readStream.schema("id long, text string").option("maxFilesPerTrigger", 1)
        checkpoint = str(self._directory.with_name(f"{self._directory.name}-checkpoint"))
        query = start(files.parquet(str(self._directory)), table.uri, checkpoint)
        self._drop(0)  # the first micro-batch starts workers, and does not count
        query.processAllAvailable()
        service.lap()
        number = 1
        until = time.monotonic() + context.size(full=150, quick=3)
        while time.monotonic() < until:
            if number - _batches(query) < _AHEAD:
                self._drop(number)
                number += 1
            time.sleep(SECONDS_PER_FILE)
        self.beside = service.lap()
        query.processAllAvailable()
        query.stop()
        return number

    def _drop(self, number: int) -> None:
        first = (self._first + number) * ROWS_PER_FILE
        ids = pa.array(range(first, first + ROWS_PER_FILE), pa.int64())
        rows = pa.table({"id": ids, "text": [f"row {each}" for each in range(ROWS_PER_FILE)]})
        hidden, shown = (self._directory / f"{dot}{number:05}.parquet" for dot in (".", ""))
        pq.write_table(rows, hidden)
        os.replace(hidden, shown)


def _batches(query: StreamingQuery) -> int:
    progress = query.lastProgress
    return 0 if progress is None else int(progress["batchId"]) + 1


def _by_log(df: DataFrame, uri: str, checkpoint: str) -> StreamingQuery:
    from lancewal.spark import stream

    return stream(df, uri, checkpoint)


def _by_format(df: DataFrame, uri: str, checkpoint: str) -> StreamingQuery:
    writer = df.writeStream.format("lancewal").option("checkpointLocation", checkpoint)
    return writer.start(uri)


def _session() -> SparkSession:
    from lancewal.spark import session

    os.environ["PYSPARK_PYTHON"] = sys.executable
    conf = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2", "spark.driver.memory": "1g"}
    spark = session("local[2]", app_name="lancewal bench", conf=conf)
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _table(where: Path) -> lancewal.Table:
    lance.write_dataset(_SCHEMA.empty_table(), str(where))
    return lancewal.initialize(str(where), bucket=("id", SHARDS))


def _epochs(table: lancewal.Table) -> dict[UUID, int]:
    return {shard.shard_id: shard.epoch for shard in table.shards()}


def _expect_once(table: lancewal.Table, streamed: int, acknowledged: int) -> None:
    ids = np.sort(table.scan(["id"]).to_table()["id"].to_numpy())
    whole = np.concatenate([np.arange(streamed), np.arange(_FIRST, _FIRST + acknowledged)])
    expect(bool(np.array_equal(ids, whole)), True)


class _Service:
    """The other process, which puts all the time."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def lap(self) -> Seconds:
        """How long each put took since the last lap, in seconds."""
        return np.array(self._ask("lap"))

    def stop(self) -> int:
        """Have it close; how many puts were acknowledged in all."""
        return int(self._ask("stop"))

    def _ask(self, what: str) -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(f"{what}\n")
        self._child.stdin.flush()
        return json.loads(self._child.stdout.readline())


@contextmanager
def _service(table: lancewal.Table) -> Iterator[_Service]:
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.workloads.together", table.uri],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield _Service(child)
    finally:
        child.kill()
        child.communicate()


def main(uri: str) -> None:
    """The service: puts until it is told to stop."""
    took: list[float] = []
    stopped = threading.Event()
    every_shard = threading.Event()

    def put() -> None:
        number = _FIRST
        with lancewal.open(uri).writer() as writer:
            while not stopped.wait(_PAUSE):
                row = pa.record_batch([pa.array([number]), pa.array(["service"])], schema=_SCHEMA)
                began = time.perf_counter()
                writer.put(row)
                took.append(time.perf_counter() - began)
                number += 1
                if len(writer.shard_writers) == SHARDS:
                    every_shard.set()

    thread = threading.Thread(target=put)
    thread.start()
    every_shard.wait()
    since = 0
    for line in sys.stdin:
        if line.strip() == "stop":
            stopped.set()
            thread.join()
            print(len(took), flush=True)
            return
        now = len(took)
        print(json.dumps(took[since:now]), flush=True)
        since = now


if __name__ == "__main__":
    main(sys.argv[1])
