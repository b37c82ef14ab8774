"""Small reads are part of a query's plan: what is small, and that nothing differs from a read by tasks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as st

import lancewal
from lancewal.reader import Scan
from lancewal.spark import merged
from lancewal.spark.columns import arrow_schema, for_spark, spark_schema
from lancewal.spark.merged import REQUEST_KEY, AnsweredPartition, MergedReader, MergedState, Wanted
from lancewal.spark.options import state_to_read
from tests.spark.tables import content, new_table, options_of
from tests.spark.test_columns import COLUMNS
from tests.spark.test_merged import fill_all_levels, read
from tests.spark.test_round_trip import NOT_IN_LANCE
from tests.tables import KEY, KEYED, fast

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 1_600


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> lancewal.Table:
    made = new_table(tmp_path_factory.mktemp("front") / "table")
    fill_all_levels(made, KEYED)
    return made


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> lancewal.Table:
    """Columns of every type in all levels; more rows than a driver holds one by one."""
    names = [name for name in COLUMNS if name not in NOT_IN_LANCE["2.2"]]
    schema = pa.schema(
        [pa.field("id", pa.int64(), nullable=False, metadata=KEY)]
        + [pa.field(name, COLUMNS[name][1]) for name in names]
    )

    def rows(start: int, count: int, turn: int) -> pa.Table:
        numbers = range(start, start + count)
        columns = [pa.array(numbers, pa.int64())]
        for name in names:
            values, type_, _ = COLUMNS[name]
            columns.append(pa.array([values[(n + turn) % 3] for n in numbers], type_))
        return pa.table(columns, schema=schema)

    path = str(tmp_path_factory.mktemp("typed") / "table")
    lance.write_dataset(rows(0, ROWS, 0), path, data_storage_version="2.2", max_rows_per_file=ROWS // 2)
    made = lancewal.initialize(path, bucket=("id", 2), writer_defaults=fast())
    with made.writer() as writer:
        writer.put(rows(ROWS - 50, 100, 1))
        writer.delete([0, 7, ROWS - 3])
    with made.writer(enable_memtable=False) as writer:
        writer.put(rows(ROWS - 20, 100, 2))
        writer.delete([1, ROWS + 10])
    return made


def load(spark: SparkSession, table: lancewal.Table) -> DataFrame:
    return spark.read.format("lancewal").load(table.uri)


def plan_of(df: DataFrame) -> str:
    return str(df._jdf.queryExecution().executedPlan().toString())


def tasks_of(spark: SparkSession, df: DataFrame) -> tuple[pa.Table, int]:
    """The rows of a query, and how many tasks read them."""
    context = spark.sparkContext
    group = f"counted-{random.random()}"
    context.setJobGroup(group, "tasks are counted")
    try:
        found = df.toArrow()
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
    status = context.statusTracker()
    stages = [s for job in status.getJobIdsForGroup(group) for s in status.getJobInfo(job).stageIds]  # type: ignore[union-attr]
    return found, sum(status.getStageInfo(stage).numTasks for stage in stages)  # type: ignore[union-attr]


def expected(table: lancewal.Table, columns: list[str], filter: str | None = None) -> pa.Table:
    """What plain Python reads, as Spark shows it."""
    found = table.scan(columns=columns, filter=filter).to_table().combine_chunks()
    schema = arrow_schema(spark_schema(found.schema))
    return pa.Table.from_batches([for_spark(batch, schema) for batch in found.to_batches()], schema)


def in_order(rows: pa.Table) -> list[dict[str, Any]]:
    return sorted(rows.to_pylist(), key=lambda row: int(row["id"]))


def test_few_rows_and_counts_are_read_while_the_query_is_planned(
    spark: SparkSession, table: lancewal.Table
) -> None:
    expected = dict(content(table))
    few = load(spark, table).limit(3)
    assert len(few.collect()) == 3
    assert set(map(tuple, few.collect())) <= set(expected.items())
    keys = load(spark, table).filter("id IN (3, 40, 41, 1000) AND name IS NOT NULL")
    found = {(i, name) for i, name in expected.items() if i in (3, 40, 41) and name is not None}
    assert set(map(tuple, keys.collect())) == found
    none = load(spark, table).filter("id = 1000")
    assert none.collect() == []
    counted = load(spark, table).groupBy().count()
    assert counted.collect()[0][0] == len(expected)
    for df in (few, keys, none, counted):
        plan = df._jdf.queryExecution().executedPlan().toString()
        assert "LocalTableScan" in plan
        assert "BatchScan" not in plan
    # What is filtered by Spark is not counted by the table.
    assert load(spark, table).filter("id % 2 = 0").count() == sum(i % 2 == 0 for i in expected)
    by_key = load(spark, table).filter("id = 40").join(load(spark, table), "id")
    assert [row.id for row in by_key.collect()] == [40]


def test_what_is_too_much_to_read_while_planning_is_left_to_tasks(
    table: lancewal.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = MergedState(options_of(table), state_to_read(options_of(table)))
    count, key = Wanted(("count_0",), counts=True), Wanted(("name",), "id = 40")
    assert state.answer(count) == len(content(table))
    assert state.answer(key).to_pylist() == [{"name": dict(content(table))[40]}]  # type: ignore[union-attr]
    assert state.answer(Wanted(("name",), limit=5)).num_rows == 5  # type: ignore[union-attr]
    for wanted in (Wanted(("name",)), Wanted(("name",), "id > 40"), Wanted(("name",), limit=5_000)):
        assert state.answer(wanted) is not None
    monkeypatch.setattr(merged, "_SMALL_VIEW_BYTES", 100)
    assert state.answer(Wanted(("name",))) is None
    monkeypatch.setattr(merged, "_LOOKED_AT_BYTES", 100)
    monkeypatch.setattr(Scan, "to_batches", None)
    assert state.answer(Wanted(("name",), "id > 40")) is None
    monkeypatch.setattr(merged, "_FEW_BYTES", 100)
    assert state.answer(count) is None
    assert state.answer(key) is None


def test_every_type_of_a_small_view_is_shown_as_tasks_show_it(
    spark: SparkSession, typed: lancewal.Table
) -> None:
    names = typed.schema.names
    # A part of the columns at a time: all of them are more than a plan takes.
    for start in range(1, len(names), 8):
        columns = ["id", *names[start : start + 8]]
        oracle = in_order(expected(typed, columns))
        answered = load(spark, typed).select(*columns)
        assert "BatchScan" in plan_of(answered)
        found, tasks = tasks_of(spark, answered)
        assert tasks == 1
        assert in_order(found) == oracle
        few = load(spark, typed).select(*columns).filter("id > 1200 OR id = 3")
        assert "LocalTableScan" in plan_of(few)
        assert in_order(few.toArrow()) == [row for row in oracle if row["id"] > 1200 or row["id"] == 3]
        spark.conf.set("spark.sql.lancewal.answers", "false")
        try:
            by_tasks = load(spark, typed).select(*columns)
            found, tasks = tasks_of(spark, by_tasks)
            limited = load(spark, typed).select(*columns).limit(10 * ROWS).toArrow()
        finally:
            spark.conf.set("spark.sql.lancewal.answers", "true")
        assert tasks > 1
        assert in_order(found) == in_order(limited) == oracle


def reader_of(table: lancewal.Table, columns: list[str], request: dict[str, Any]) -> MergedReader:
    schema = spark_schema(pa.schema([table.schema.field(name) for name in columns]))
    first = schema.fields[0]
    told = st.StructField(first.name, first.dataType, first.nullable, {REQUEST_KEY: json.dumps(request)})
    return MergedReader(options_of(table), st.StructType([told, *schema.fields[1:]]))


@pytest.mark.parametrize("seed", range(12))
def test_any_columns_and_filter_give_what_a_scan_gives(typed: lancewal.Table, seed: int) -> None:
    chance = random.Random(seed)
    columns = ["id", *chance.sample(typed.schema.names[1:], chance.randint(0, 5))]
    low = chance.randint(0, ROWS)
    kinds = {
        f"id > {low}": {"name": ">", "children": [{"field": ["id"]}, {"type": "bigint", "value": str(low)}]},
        "int32 IS NULL": {"name": "IS_NULL", "children": [{"field": ["int32"]}]},
        "text = 'a'": {"name": "=", "children": [{"field": ["text"]}, {"type": "string", "value": "a"}]},
    }
    chosen = chance.sample(sorted(kinds), chance.randint(0, 2))
    request = {"answer": True, "conditions": [kinds[each] for each in chosen]}
    reader = reader_of(typed, columns, request)
    (partition,) = reader.partitions()
    assert isinstance(partition, AnsweredPartition)
    found = pa.Table.from_batches(reader.read(partition), arrow_schema(reader._schema))
    assert in_order(found) == in_order(expected(typed, columns, " AND ".join(chosen) or None))
    # Nobody but the front is answered.
    left = reader_of(typed, columns, {**request, "answer": False})
    assert not any(isinstance(each, AnsweredPartition) for each in left.partitions())
    assert len(read(left)) == found.num_rows


def test_a_narrow_column_of_a_wide_table_is_small_and_its_vectors_are_not(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False, metadata=KEY),
            pa.field("n", pa.int64()),
            pa.field("text", pa.string()),
            pa.field("vector", pa.list_(pa.float32(), 256)),
        ]
    )
    count = 8_000
    vectors = np.zeros(count * 256, np.float32)
    data = pa.table(
        [
            pa.array(range(count)),
            pa.array(range(count)),
            pa.array(["x" * 200] * count),
            pa.FixedSizeListArray.from_arrays(pa.array(vectors), 256),
        ],
        schema=schema,
    )
    table = new_table(tmp_path / "table", schema, data)
    request = {"answer": True}
    (narrow,) = reader_of(table, ["n"], request).partitions()
    assert isinstance(narrow, AnsweredPartition)
    # Its own bytes, and no more than a few of the stream's.
    assert count * 8 <= len(narrow.stream) < count * 8 + 4_096
    for columns in (["vector"], ["n", "vector"]):
        parts = reader_of(table, columns, request).partitions()
        assert not any(isinstance(each, AnsweredPartition) for each in parts)
    # How long texts are is seen as they are read.
    state = MergedState(options_of(table), state_to_read(options_of(table)))
    assert state.answer(Wanted(("text",))) is None
    assert state.answer(Wanted(("text",), "n < 100")).num_rows == 100  # type: ignore[union-attr]
