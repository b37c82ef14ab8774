"""A driver to be killed: ``python -m tests.spark.driver '{"master": …, "streams": […]}'``.

Streams files of changes until the file that ``finish`` names is there and nothing is left of them, and
exits with 0. Whoever started it may kill it, or the executors that it has, and start it again with the
same argument. Streams that fail by faults of the tests' making go on from their checkpoints.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.errors import StreamingQueryException

from lancewal.spark import low_latency, session
from tests.spark import faulty
from tests.spark.changes import ChangeFiles
from tests.spark.conftest import TEST_CONF
from tests.spark.test_stream_faults import start

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: What a stream says that was hit by one of the tests' faults, or lost its executors too often.
_EXPECTED = ("InjectedError", "exited unexpectedly", "ExecutorLostFailure")


def main(config: dict[str, Any]) -> None:
    conf = {**TEST_CONF, "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"], **config["conf"]}
    conf[f"spark.executorEnv.{faulty.DIRECTORY}"] = os.environ[faulty.DIRECTORY]
    spark = session(config["master"], app_name="lancewal driver", conf=conf)
    spark.sparkContext.setLogLevel("OFF")
    spark.dataSource.register(faulty.FaultySource)
    low_latency.APPENDING = faulty.FaultyAppending
    finish = Path(config["finish"])
    running = [Restarted(spark, each, finish) for each in config["streams"]]
    while running:
        time.sleep(0.05)
        running = [each for each in running if each.is_running()]
    spark.stop()


class Restarted:
    """One stream, started again and again until it has seen everything.

    In the thread that has the session: others do not find the faulty source.
    """

    def __init__(self, spark: SparkSession, config: dict[str, Any], finish: Path) -> None:
        self._spark = spark
        self._config = config
        self._finish = finish
        self._start()

    def is_running(self) -> bool:
        if self._query.isActive:
            return True
        try:
            self._query.awaitTermination()
            is_over = self._is_last
        except StreamingQueryException as error:
            if not any(word in str(error) for word in _EXPECTED):
                raise
            is_over = False
        if not is_over:
            self._start()
        return not is_over

    def _start(self) -> None:
        # Asked before the query starts: it takes all files that are there by then.
        self._is_last = self._finish.exists()
        config = self._config
        files = ChangeFiles.existing(Path(config["changes"]), config["keyed"])
        self._query = start(self._spark, config["path"], files, config["uri"], Path(config["checkpoint"]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
