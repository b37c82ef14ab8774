"""A driver to be killed: ``python -m tests.spark.driver '{"master": …, "streams": […]}'``.

Runs streams of changes to their end and exits with 0. Whoever started it may kill it, or the
executors that it has, and start it again with the same argument.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lancewal.spark import low_latency, session
from tests.spark import faulty
from tests.spark.changes import ChangeFiles
from tests.spark.conftest import TEST_CONF
from tests.spark.test_stream_faults import start


def main(config: dict[str, Any]) -> None:
    conf = {**TEST_CONF, **config.get("conf", {}), "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"]}
    conf[f"spark.executorEnv.{faulty.DIRECTORY}"] = os.environ[faulty.DIRECTORY]
    spark = session(config["master"], app_name="lancewal driver", conf=conf)
    spark.sparkContext.setLogLevel("OFF")
    spark.dataSource.register(faulty.FaultySource)
    low_latency.FORMAT = faulty.FORMAT
    queries = [
        start(
            spark,
            each["path"],
            ChangeFiles.existing(Path(each["changes"]), each["keyed"]),
            each["uri"],
            Path(each["checkpoint"]),
        )
        for each in config["streams"]
    ]
    for query in queries:
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
