"""The Spark driver of the demo: ``python -m demo.spark_child URI INCOMING CHECKPOINT``.

A process of its own, so that it can be killed. It streams files into the table, says on standard
output what happened (a JSON document a line), and takes one command a line on standard input:
``stream`` starts the stream, ``drain`` waits for all files that are there, ``compact`` ends the
stream and runs the jobs.
"""

from __future__ import annotations

import json
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo.corpus import SCHEMA
from demo.incoming import CHANGE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_CONF = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    # A driver that lives for seconds: compiling less and collecting plainly leaves two cores to the rows.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}
_LOOK_EVERY = 0.1


def main(uri: str, incoming: str, checkpoint: str) -> None:
    # Spark's launcher forks to start Java, which is not what the warning is about.
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    from lancewal.spark import session

    spark = session("local[2,4]", app_name="lancewal demo", conf=_CONF)
    spark.sparkContext.setLogLevel("ERROR")
    _tell(event="ready", spark=spark.version)
    for line in sys.stdin:
        command = line.strip()
        if command == "stream":
            query = start_stream(spark, uri, incoming, checkpoint)
            threading.Thread(target=_follow, args=(query,), daemon=True).start()
        elif command == "drain":
            query.processAllAvailable()
        elif command == "compact":
            query.stop()
            flush_and_compact(spark, uri)
        _tell(event=command)
    spark.stop()


def start_stream(spark: SparkSession, uri: str, incoming: str, checkpoint: str) -> StreamingQuery:
    """Every file is one micro-batch, so that one can see each of them land."""
    from pyspark.sql.types import StringType

    from lancewal.spark import stream
    from lancewal.spark.columns import spark_schema

    columns = spark_schema(SCHEMA).add(CHANGE, StringType())
    files = spark.readStream.schema(columns).option("maxFilesPerTrigger", 1)
    # Spark takes paths that are no URIs from the working directory.
    documents = files.parquet(Path(incoming).resolve().as_uri())
    return stream(documents, uri, Path(checkpoint).resolve().as_uri(), change_type_column=CHANGE)


def flush_and_compact(spark: SparkSession, uri: str) -> None:
    """All rows into the base table, in tasks of one or more shards."""
    from lancewal.spark import compact, flush

    flush(spark, uri)
    compact(spark, uri)


def _follow(query: StreamingQuery) -> None:
    """Report every micro-batch once."""
    seen = -1
    while query.isActive:
        for progress in query.recentProgress:
            if progress.batchId > seen and progress.numInputRows:
                seen = progress.batchId
                _tell(event="batch", number=seen, rows=progress.numInputRows)
        threading.Event().wait(_LOOK_EVERY)


def _tell(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:4])
