"""One Spark session for all tests of this directory: starting one takes longer than most of them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from lancewal.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Where workers find lancewal, the tests, the faults that some of them inject, and the driver's own PySpark,
#: which is another one than the environment's when ``matrix.py`` runs the tests.
ROOT = Path(__file__).parents[2]
WORKER_PATH = os.pathsep.join(map(str, (ROOT / "src", ROOT, Path(pyspark.__file__).parents[1])))

TEST_CONF = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.sql.streaming.stopTimeout": "30s",
    "spark.executorEnv.PYTHONPATH": WORKER_PATH,
}


@pytest.fixture(scope="session")
def spark(faults: None) -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = WORKER_PATH
    started = session("local[2,4]", app_name="lancewal tests", conf=TEST_CONF, front=True)
    started.sparkContext.setLogLevel("OFF")
    yield started
    started.stop()


@pytest.fixture
def by_tasks(spark: SparkSession) -> Iterator[None]:
    """Small reads too are left to Python tasks."""
    spark.conf.set("spark.sql.lancewal.answers", "false")
    yield
    spark.conf.set("spark.sql.lancewal.answers", "true")


@pytest.fixture
def root(spark: SparkSession, tmp_path: Path) -> str:
    """A catalog of its own, whose tables are below one directory."""
    spark.conf.set("spark.sql.catalog.here", "lancewal.LanceCatalog")
    spark.conf.set("spark.sql.catalog.here.root", str(tmp_path))
    # Spark keeps a catalog that it has made.
    spark._jsparkSession.sessionState().catalogManager().reset()
    return str(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def ended_like_interrupted() -> Iterator[None]:
    """Who ends the run (``timeout`` does) must not leave clusters behind: they are ended by the tests."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session", autouse=True)
def faults(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where tests put out tickets for faults; workers inherit the variable, so it comes first."""
    os.environ["LANCEWAL_TEST_FAULTS"] = str(tmp_path_factory.mktemp("faults"))
