"""What reaches a table of a query: columns, filters, limits and counts, and the freshness of views."""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import lancewal
from java.build import DIGEST, JAR, compiled, digest
from lancewal.spark.filters import accepted, planned_to_sql
from lancewal.spark.front import answer
from lancewal.spark.spark_session import front_settings
from tests.spark.tables import content, new_table
from tests.spark.test_merged import fill_all_levels, read, reader_of
from tests.tables import KEYED, rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SWITCH = "spark.sql.lancewal.front"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> lancewal.Table:
    made = new_table(tmp_path_factory.mktemp("front") / "table")
    fill_all_levels(made, KEYED)
    return made


@pytest.fixture
def without_front(spark: SparkSession) -> Iterator[None]:
    spark.conf.set(SWITCH, "false")
    yield
    spark.conf.set(SWITCH, "true")


def load(spark: SparkSession, table: lancewal.Table) -> DataFrame:
    return spark.read.format("lancewal").load(table.uri)


def scan_of(df: DataFrame) -> str:
    """The line of the physical plan that says what is read."""
    plan = df._jdf.queryExecution().executedPlan().toString()
    return next(line for line in plan.splitlines() if "BatchScan" in line)


@pytest.mark.usefixtures("by_tasks")
def test_a_query_reads_the_columns_it_names_and_no_other(spark: SparkSession, table: lancewal.Table) -> None:
    names = load(spark, table).select("name")
    assert "lancewal " + table.uri + " name {" in scan_of(names)
    assert sorted(row.name for row in names.collect()) == sorted(name for _, name in content(table))
    # Where no column is needed, the smallest one tells how many rows there are.
    counted = load(spark, table).filter("id % 2 = 0").groupBy().count()
    assert f"lancewal {table.uri} id {{" in scan_of(counted)


@pytest.mark.usefixtures("by_tasks")
def test_filters_limits_and_counts_are_told_to_the_table(spark: SparkSession, table: lancewal.Table) -> None:
    expected = [(i, name) for i, name in content(table) if i == 40 or i > 60]
    some = load(spark, table).filter("id = 40 OR id > 60")
    assert '"name":"OR"' in scan_of(some)
    assert sorted(map(tuple, some.collect())) == expected
    some = load(spark, table).limit(2_000)
    assert '"limit":2000' in scan_of(some)
    assert len(some.collect()) == len(content(table))


def test_every_query_of_one_frame_sees_what_was_written_before_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = new_table(tmp_path / "table")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW fresh USING lancewal OPTIONS (path '{table.uri}')")
    df = load(spark, table)
    counts = []
    for start in (0, 5):
        with table.writer() as writer:
            writer.put(rows(start, 5))
        counts += [df.count(), spark.sql("SELECT count(*) FROM fresh").collect()[0][0]]
    assert counts == [5, 5, 10, 10]
    # What is collected twice is one query: Spark keeps the plan with the object.
    derived = df.select("id")
    assert len(derived.collect()) == 10
    with table.writer() as writer:
        writer.put(rows(0, 11))
    assert (len(derived.collect()), len(df.select("id").collect())) == (10, 11)
    # Two scans of one query do not filter each other's rows.
    both = df.filter("id < 2").union(df.filter("id > 7"))
    assert sorted(row.id for row in both.collect()) == [0, 1, 8, 9, 10]


def test_without_the_front_the_format_reads_as_ever(
    spark: SparkSession, table: lancewal.Table, without_front: None
) -> None:
    df = load(spark, table)
    assert "lancewal " + table.uri not in scan_of(df)
    assert df.count() == len(content(table))


def test_an_error_of_a_query_stays_the_same_error(spark: SparkSession, table: lancewal.Table) -> None:
    from pyspark.errors import AnalysisException, ArithmeticException

    with pytest.raises(ArithmeticException, match="DIVIDE_BY_ZERO"):
        load(spark, table).selectExpr("1 / (id - id)").collect()
    with pytest.raises(AnalysisException, match="no option"):
        spark.read.format("lancewal").option("nonsense", "1").load(table.uri).collect()


@pytest.mark.parametrize("answers", ["true", "false"])
def test_a_schema_of_ones_own_showed_the_bytes_of_one_type_as_another(
    spark: SparkSession, tmp_path: Path, answers: str
) -> None:
    inside = pa.struct([("a", pa.int32()), ("b", pa.string())])
    schema = pa.schema([*KEYED, pa.field("st", inside)], metadata=KEYED.metadata)
    table = new_table(tmp_path / "table", schema)
    with table.writer() as writer:
        writer.put([{"id": 1, "name": "one", "st": {"a": 1, "b": "x"}}, {"id": 2, "name": None, "st": None}])

    def read(columns: str) -> list[Any]:
        df = spark.read.schema(columns).format("lancewal").load(table.uri)
        return sorted((row.asDict(recursive=True) for row in df.collect()), key=str)

    spark.conf.set("spark.sql.lancewal.answers", answers)
    try:
        assert read("st struct<b: string, a: int>") == [{"st": None}, {"st": {"b": "x", "a": 1}}]
        # What Python converts is converted with the front too.
        assert read("id int") == [{"id": 1}, {"id": 2}]
        assert read("name string, id long") == [{"name": "one", "id": 1}, {"name": None, "id": 2}]
        with pytest.raises(Exception, match="the table has no column none"):
            read("id long, none int")
    finally:
        spark.conf.set("spark.sql.lancewal.answers", "true")


def field(name: str) -> dict[str, Any]:
    return {"field": [name]}


def value(of: object, type_: str = "bigint") -> dict[str, Any]:
    return {"type": type_, "value": None if of is None else str(of)}


def condition(name: str, *children: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "children": list(children)}


ABOVE = condition(">", field("id"), value(50))
UNKNOWN = condition("=", condition("LENGTH", field("name")), value(3))


@pytest.mark.parametrize(
    ("planned", "sql"),
    [
        (ABOVE, "`id` > 50"),
        (condition("NOT", ABOVE), "NOT (`id` > 50)"),
        (condition("AND", ABOVE, UNKNOWN), "(`id` > 50)"),
        (condition("OR", ABOVE, UNKNOWN), None),
        (condition("OR", ABOVE, condition("IS_NULL", field("name"))), "(`id` > 50) OR (`name` IS NULL)"),
        (condition("IN", field("id"), value(1), value(2)), "(`id` IN (1, 2))"),
        (condition("IN", field("id"), value(1), value(None)), None),
        (condition("=", field("name"), value("it's", "string")), "`name` = 'it''s'"),
        (condition("=", field("id"), value("x", "interval")), None),
        (condition("STARTS_WITH", field("name"), value("a", "string")), "starts_with(`name`, 'a')"),
        (UNKNOWN, None),
    ],
)
def test_a_planned_condition_is_said_in_sql_or_left_to_spark(
    planned: dict[str, Any], sql: str | None
) -> None:
    assert planned_to_sql(planned, KEYED) == sql


@pytest.mark.parametrize(
    ("column", "of", "type_"),
    [
        (pa.date32(), 2932897, "date"),
        (pa.timestamp("us", "UTC"), 316516204800000000, "timestamp"),
        (pa.timestamp("us"), -(1 << 62), "timestamp_ntz"),
    ],
    ids=str,
)
def test_days_that_python_cannot_count_are_left_to_spark_and_fail_no_query(
    column: pa.DataType, of: int, type_: str
) -> None:
    schema = pa.schema([("at", column)])
    assert planned_to_sql(condition("<", field("at"), value(0, type_)), schema) is not None
    assert planned_to_sql(condition("<", field("at"), value(of, type_)), schema) is None
    assert planned_to_sql(condition("IN", field("at"), value(0, type_), value(of, type_)), schema) is None


def test_a_chain_that_is_too_long_for_the_table_is_left_to_spark() -> None:
    parts = [condition("AND", condition(">", field("id"), value(n)), ABOVE) for n in range(1000)]
    planned = planned_to_sql(condition("OR", *parts), KEYED)
    assert planned is not None
    assert accepted(["`id` > 50", planned], KEYED) == []
    assert accepted(["`id` > 50"], KEYED) == ["`id` > 50"]
    assert accepted([], KEYED) == []


def test_a_planned_float_is_the_column_s_own_value() -> None:
    schema = pa.schema([("score", pa.float32())])
    tenth = condition("NOT", condition("=", field("score"), value("0.1", "float")))
    assert planned_to_sql(tenth, schema) == "NOT (`score` = 0.10000000149011612)"


def test_a_task_stops_when_it_has_enough_rows_and_counts_without_reading_them(table: lancewal.Table) -> None:
    from pyspark.sql import types as st

    from lancewal.spark.merged import REQUEST_KEY, MergedReader
    from tests.spark.tables import options_of

    assert len(read(reader_of(table, limit=2))) <= 2 * len(reader_of(table).partitions())

    def asked(request: dict[str, Any], columns: st.StructType) -> MergedReader:
        columns.fields[0].metadata = {REQUEST_KEY: json.dumps(request)}
        return MergedReader(options_of(table), columns)

    number = st.StructType([st.StructField("count_0", st.LongType(), False)])
    assert sum(count for (count,) in read(asked({"count": True}, number))) == len(content(table))
    filtered = sum(count for (count,) in read(asked({"count": True, "conditions": [ABOVE]}, number)))
    assert filtered == len([i for i, _ in content(table) if i > 50])


def test_what_is_refused_is_an_answer(tmp_path: Path) -> None:
    asked = {"question": "describe", "options": {"path": str(tmp_path / "none")}, "arguments": {}}
    assert answer(asked)["error"] == "TableNotFoundError"


def test_the_jar_is_made_of_the_sources_that_are_here(tmp_path: Path) -> None:
    with zipfile.ZipFile(JAR) as jar:
        names = {name for name in jar.namelist() if name.endswith(".class")}
        assert jar.read(DIGEST).decode() == digest(), "run make jar"
    if shutil.which("javac") is None:
        pytest.skip("no Java compiler here")
    try:
        made = compiled(tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.fail(f"the sources do not compile: {error}")
    assert {str(path.relative_to(tmp_path)) for path in made} == names


def test_settings_of_ones_own_are_kept_beside_the_front() -> None:
    mine = {"spark.jars": "mine.jar", "spark.sql.extensions": "Mine", "spark.sql.catalog.lance": "Other"}
    settings = front_settings(mine)
    assert settings["spark.jars"].split(",")[0] == "mine.jar"
    assert settings["spark.sql.extensions"].split(",")[0] == "Mine"
    assert settings["spark.sql.catalog.lance"] == "Other"
