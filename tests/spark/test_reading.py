"""The merged read, through a real session."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import lancewal
from tests.spark.tables import content, named, new_table, spark_content
from tests.spark.test_merged import fill_all_levels
from tests.tables import KEYED, rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> lancewal.Table:
    table = new_table(tmp_path_factory.mktemp("reading") / "table")
    fill_all_levels(table, KEYED)
    return table


def test_all_levels_are_seen_and_columns_chosen(spark: SparkSession, table: lancewal.Table) -> None:
    assert spark_content(spark, table.uri) == content(table)
    names = spark.read.format("lancewal").option("columns", "name").load(table.uri)
    assert names.columns == ["name"]
    assert sorted(row.name for row in names.collect()) == sorted(name for _, name in content(table))


def test_filters_reach_the_table_and_those_that_cannot_are_evaluated_by_spark(
    spark: SparkSession, table: lancewal.Table
) -> None:
    df = spark.read.format("lancewal").load(table.uri)
    pushed = df.filter("id > 10 AND name LIKE 'logged%' AND id IN (40, 41, 5)")
    plan = pushed._jdf.queryExecution().executedPlan().toString()
    assert "Filter" not in plan.replace("RuntimeFilters", "")
    assert sorted(map(tuple, pushed.collect())) == named(40, 2, "logged")
    mixed = df.filter("id > 50 AND length(name) > 3 AND (id = 60 OR id = 61)")
    assert sorted(map(tuple, mixed.collect())) == named(60, 2, "logged")


def test_reading_works_where_filter_pushdown_is_off(spark: SparkSession, table: lancewal.Table) -> None:
    name = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(name, "false")
    try:
        df = spark.read.format("lancewal").load(table.uri).filter("id = 40")
        assert [tuple(row) for row in df.collect()] == named(40, 1, "logged")
    finally:
        spark.conf.set(name, "true")


def test_a_data_frame_keeps_the_state_that_it_was_planned_for(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    with table.writer() as writer:
        writer.put(rows(0, 10))
    df = spark.read.format("lancewal").load(table.uri)
    assert df.count() == 10
    with table.writer() as writer:
        writer.put(rows(0, 30, prefix="later"))
    assert spark_content(spark, table.uri) == named(0, 30, "later")


@pytest.mark.parametrize("option", ["versionAsOf", "timestampAsOf"])
def test_time_travel_is_refused(spark: SparkSession, table: lancewal.Table, option: str) -> None:
    with pytest.raises(Exception, match="approximate"):
        spark.read.format("lancewal").option(option, "1").load(table.uri)


def test_a_place_without_a_table_is_named(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="there is no Lance table at"):
        spark.read.format("lancewal").load(str(tmp_path / "nothing"))
