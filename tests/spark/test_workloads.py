"""The measurements of Spark in their quick form: what they compare is the same, whatever it takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.context import Context
from bench.workloads import spark_scan as scan
from bench.workloads import spark_shards as shards

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.soak
def test_a_pipeline_of_many_shards_goes_through_every_step(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step checks what it has found: a count of all rows, one row of a key, all rows in the base."""
    monkeypatch.setattr(shards, "spark_session", lambda slots: spark)
    found = shards.spark_shards(Context(tmp_path, quick=True))
    assert [each.name for each in found] == [
        "write, low latency",
        "count",
        "one key",
        "flush",
        "write, by format",
        "compact",
    ]


def test_every_way_to_read_gives_the_same_rows(spark: SparkSession, tmp_path: Path) -> None:
    parquet, table = scan._written(tmp_path / "wide", scan._rows(60))
    everything = sorted(row.id for row in spark.read.parquet(parquet).select("id").collect())
    query = scan.Query("ids", lambda df: df.collect(), 1.0, ("id",), "id < 40")
    mapped = scan._mapped(spark, table, query).collect()
    assert sorted(row.id for row in mapped) == everything[:40]
    assert sorted(row.id for row in spark.read.format("lancewal").load(table).collect()) == everything
