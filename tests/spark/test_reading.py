"""The merged read, through a real session."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import lancewal
from lancewal.spark.spark_session import front_settings
from tests.spark.tables import content, named, new_table, spark_content
from tests.spark.test_merged import fill_all_levels
from tests.tables import KEYED, rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


pytestmark = pytest.mark.usefixtures("by_tasks")


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


def load(spark: SparkSession, table: lancewal.Table, **options: str) -> DataFrame:
    return spark.read.format("lancewal").options(**options).load(table.uri)


def test_filters_reach_the_table_and_those_that_cannot_are_evaluated_by_spark(
    spark: SparkSession, table: lancewal.Table
) -> None:
    pushed = load(spark, table, filterPushdown="true").filter(
        "id > 10 AND name LIKE 'logged%' AND id IN (40, 41, 5)"
    )
    plan = pushed._jdf.queryExecution().executedPlan().toString()
    assert "Filter" not in plan.replace("RuntimeFilters", "")
    assert sorted(map(tuple, pushed.collect())) == named(40, 2, "logged")
    mixed = load(spark, table, filterPushdown="true").filter(
        "id > 50 AND length(name) > 3 AND (id = 60 OR id = 61)"
    )
    assert sorted(map(tuple, mixed.collect())) == named(60, 2, "logged")
    asked = load(spark, table, filter="id = 60 OR id = 61", columns="name")
    assert sorted(map(tuple, asked.collect())) == [("logged_60",), ("logged_61",)]


def test_a_decimal_of_more_digits_than_pyspark_passes_found_no_row(
    spark: SparkSession, tmp_path: Path
) -> None:
    large = Decimal("-1234567890123456789012345678.0123456789")
    schema = pa.schema([*KEYED, pa.field("n", pa.decimal128(38, 10))], metadata=KEYED.metadata)
    table = new_table(tmp_path / "decimals", schema)
    with table.writer() as writer:
        writer.put([{"id": 1, "name": "one", "n": large}, {"id": 2, "name": "two", "n": None}])
    for front in ("false", "true"):
        spark.conf.set("spark.sql.lancewal.front", front)
        try:
            df = spark.read.format("lancewal").option("filterPushdown", front == "false").load(table.uri)
            assert [row.id for row in df.filter(f"n = {large}").collect()] == [1], front
        finally:
            spark.conf.set("spark.sql.lancewal.front", "true")


@pytest.mark.parametrize("pushdown", ["true", "false"])
def test_queries_of_one_frame_do_not_filter_each_others_rows(
    spark: SparkSession, table: lancewal.Table, pushdown: str
) -> None:
    """Spark keeps what the last query pushed down, and applies it to the others of the same frame."""
    name = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(name, pushdown)
    try:
        df = load(spark, table)
        ids = [i for i, _ in content(table)]
        assert df.filter("id > 60").count() == 4
        assert df.count() == len(ids)
        both = df.filter("id > 60").union(df.filter("id < 5"))
        assert sorted(row.id for row in both.collect()) == [i for i in ids if i > 60 or i < 5]
        assert df.filter("id < 5").join(df, "id").count() == len([i for i in ids if i < 5])
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW reading USING lancewal OPTIONS (path '{table.uri}')")
        counts = [
            spark.sql(query).first()[0]  # type: ignore[index]
            for query in ("SELECT count(*) FROM reading WHERE id > 60", "SELECT count(*) FROM reading")
        ]
        assert counts == [4, len(ids)]
    finally:
        spark.conf.set(name, "true")


def test_taking_filters_over_needs_the_setting_of_the_session(
    spark: SparkSession, table: lancewal.Table
) -> None:
    name = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(name, "false")
    try:
        df = load(spark, table, filterPushdown="true").filter("id = 40")
        assert [tuple(row) for row in df.collect()] == named(40, 1, "logged")
    finally:
        spark.conf.set(name, "true")


@pytest.mark.parametrize("front", ["true", "false"])
def test_a_frame_that_is_loaded_again_sees_what_was_written_meanwhile(
    spark: SparkSession, tmp_path: Path, front: str
) -> None:
    spark.conf.set("spark.sql.lancewal.front", front)
    table = new_table(tmp_path / "table")
    with table.writer() as writer:
        writer.put(rows(0, 10))
    df = load(spark, table)
    assert df.count() == 10
    with table.writer() as writer:
        writer.put(rows(0, 30, prefix="later"))
    # Without the front Spark keeps the plan of a frame, and with it the state.
    kept = df.count()
    spark.conf.set("spark.sql.lancewal.front", "true")
    assert kept == (30 if front == "true" and front_settings({}) else 10)
    assert spark_content(spark, table.uri) == named(0, 30, "later")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"columns": "name,name"}, "twice"),
        ({"columns": "absent"}, "absent"),
        ({"filter": "absent = 1"}, "absent"),
        ({"startingPosition": "earliest"}, "readChangeFeed"),
        ({"filterPushdown": "maybe"}, "true or false"),
    ],
    ids=str,
)
def test_options_that_a_read_cannot_follow_are_refused(
    spark: SparkSession, table: lancewal.Table, options: dict[str, str], reason: str
) -> None:
    with pytest.raises(Exception, match=reason):
        load(spark, table, **options).collect()


def test_a_table_of_sparks_catalog_is_refused_with_what_works(
    spark: SparkSession, table: lancewal.Table
) -> None:
    with pytest.raises(Exception, match="CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE kept USING lancewal OPTIONS (path '{table.uri}')")


def test_time_travel_to_any_moment_is_refused(spark: SparkSession, table: lancewal.Table) -> None:
    with pytest.raises(Exception, match="versionAsOf=NAME"):
        spark.read.format("lancewal").option("timestampAsOf", "2026-01-01").load(table.uri)


def test_a_place_without_a_table_is_named(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="there is no Lance table at"):
        spark.read.format("lancewal").load(str(tmp_path / "nothing"))
