"""What lancewal changes in the Python processes of Spark, and in no other."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from lancewal.spark.source import DefaultSource
from lancewal.spark.worker import settle
from tests.spark.tables import new_table
from tests.tables import KEYED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_spark_collects_the_modules_of_a_worker_again_after_every_task(
    spark: SparkSession, tmp_path: Path
) -> None:
    uri = new_table(tmp_path / "t", KEYED, pa.table({"id": [1], "name": ["a"]}, KEYED)).uri

    def read(_: Iterable[int]) -> Iterator[tuple[int, int]]:
        source = DefaultSource({"path": uri})
        reader = source.reader(source.schema())
        for part in reader.partitions():
            list(reader.read(part))
        yield gc.get_freeze_count(), len(gc.get_objects())

    ((frozen, visited),) = spark.sparkContext.parallelize([0], 1).mapPartitions(read).collect()
    assert frozen > 10 * visited


def test_a_process_that_spark_did_not_start_is_left_alone(tmp_path: Path) -> None:
    settle()
    DefaultSource({"path": new_table(tmp_path / "t").uri}).schema()
    assert gc.get_freeze_count() == 0
