"""A Spark session for commands that were asked to use one."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

from lancewal.cli.exits import CommandError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def start_session() -> SparkSession:
    """The session of this process; quiet, because the command speaks for it."""
    # Spark's launcher forks to start Java, which is not what the warning is about.
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    try:
        from lancewal.spark import session

        started = session()
    except ImportError as error:
        raise CommandError(
            "--engine spark needs PySpark: pip install 'lancewal[spark,jre]', or use --engine local"
        ) from error
    started.sparkContext.setLogLevel("OFF")
    _silence_query_contexts()
    return started


def _silence_query_contexts() -> None:
    """PySpark prints a failed query with its stack besides raising the error."""
    from pyspark.logger import PySparkLogger

    PySparkLogger.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
