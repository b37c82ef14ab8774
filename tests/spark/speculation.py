"""A driver whose jobs speculate, and whose losers write only after the winners' commit.

``python -m tests.spark.speculation '{"master": …, "directory": …, "tables": {way: uri}}'``: writes the
same rows in every way. The first attempt of one task reads its input and stands still until the commit is
through; then it writes, and leaves a note of what it did.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext

from lancewal.publish import ShardWrite
from lancewal.spark import low_latency, session
from lancewal.spark.low_latency import Appending
from lancewal.spark.sink import BatchSink, TaskMessage
from tests.patience import wait_until
from tests.spark.conftest import TEST_CONF
from tests.spark.faulty import SourceWithSinks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMAT = "slow_lancewal"
DIRECTORY = "LANCEWAL_TEST_SPECULATION"
ROWS = 30
SLOW_TASK = 1
CONF = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.3",
    "spark.speculation.minTaskRuntime": "100ms",
    # Spark ends a loser's Python process after some seconds. This one lives on, as one would on a
    # machine that hung.
    "spark.python.task.killTimeout": "600s",
}


def note(name: str) -> Path:
    return Path(os.environ[DIRECTORY]) / name


def is_loser(uri: str) -> bool:
    """Whether this attempt is to be late; if so, returns only when the commit is through."""
    context = TaskContext.get()
    assert context is not None
    way = Path(uri).name
    if context.partitionId() != SLOW_TASK or context.attemptNumber() != 0:
        return False
    note(f"{way} waits").touch()
    wait_until(note(f"{way} committed").exists, "the commit")
    return True


class SlowBatchSink(BatchSink):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        batches = list(iterator)
        late = is_loser(self._options.uri)
        message = super().write(iter(batches))
        if late:
            # Written in one piece: whoever sees the note reads all of it.
            done = note("writing")
            done.write_text(json.dumps([len(message.rows), *(each.entry.path for each in message.staged)]))
            done.rename(note(f"{Path(self._options.uri).name} loser"))
        return message


class SlowAppending(Appending):
    def append(self, batches: Iterator[pa.RecordBatch], partition: int) -> list[ShardWrite]:
        held = list(batches)
        late = is_loser(self.uri)
        outcome: list[Any] = []
        try:
            written = super().append(iter(held), partition)
            outcome = [write.skipped for write in written]
            return written
        except Exception as error:
            outcome = [type(error).__name__]
            raise
        finally:
            if late:
                done = note("writing")
                done.write_text(json.dumps(outcome))
                done.rename(note(f"{Path(self.uri).name} loser"))


class SlowSource(SourceWithSinks):
    format = FORMAT
    batch_sink = SlowBatchSink


def main(config: dict[str, Any]) -> None:
    os.environ[DIRECTORY] = config["directory"]
    conf = {**TEST_CONF, **CONF, "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"], **config["conf"]}
    conf[f"spark.executorEnv.{DIRECTORY}"] = config["directory"]
    spark = session(config["master"], app_name="lancewal speculation", conf=conf)
    spark.sparkContext.setLogLevel("OFF")
    spark.dataSource.register(SlowSource)
    low_latency.APPENDING = SlowAppending
    for way, uri in config["tables"].items():
        write(spark, way, uri)
        assert note(f"{way} waits").exists(), "the loser had begun before the commit"
        note(f"{way} committed").touch()
        wait_until(note(f"{way} loser").exists, "the loser's write")
    spark.stop()


def write(spark: SparkSession, way: str, uri: str) -> None:
    rows = spark.createDataFrame([(i, f"name_{i}") for i in range(ROWS)], "id long, name string")
    if way == "by format":
        rows.repartition(3).write.format(FORMAT).mode("append").option("walBytes", 0).save(uri)
    elif way == "by format, few rows":
        rows.repartition(3).write.format(FORMAT).mode("append").save(uri)
    elif way == "low latency":
        low_latency.write(rows, uri)
    else:
        low_latency.write(rows, uri, txn_app_id="app", txn_version=1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
