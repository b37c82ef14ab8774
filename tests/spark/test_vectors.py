"""Vectors through the planner's front, which has them packed: nothing differs from the plain format."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as st

import lancewal
from lancewal.spark.columns import arrow_schema, spark_schema
from lancewal.spark.merged import REQUEST_KEY, MergedReader
from lancewal.spark.packed import packed
from tests.spark.tables import content, options_of
from tests.spark.test_answers import expected
from tests.spark.test_front import SWITCH, load
from tests.tables import KEY, fast

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 400
ODD = np.array([0x7FC00123, 0xFFC00001, 0x7F800000, 0xFF800000, 0x80000000, 1], np.uint32).view(np.float32)

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("name", pa.string()),
        pa.field("short", pa.list_(pa.float32(), 3)),
        pa.field("wide", pa.list_(pa.float64(), 70)),
        pa.field("sure", pa.list_(pa.field("item", pa.float32(), nullable=False), 2), nullable=False),
        pa.field("half", pa.list_(pa.float16(), 5)),
        pa.field("bytes", pa.list_(pa.int8(), 9)),
        pa.field("unsigned", pa.list_(pa.uint8(), 3)),
        pa.field("any", pa.list_(pa.float32())),
        pa.field("tokens", pa.large_list(pa.int64())),
        pa.field("words", pa.list_(pa.string())),
        pa.field("inside", pa.struct([("vector", pa.list_(pa.float32(), 3))])),
    ]
)
#: Those that are shown as arrays of numbers.
PACKED = ["short", "wide", "sure", "half", "bytes", "unsigned", "any", "tokens"]


def rows(start: int, count: int, seed: int) -> pa.Table:
    chance = random.Random(seed)

    def number(type_: pa.DataType) -> Any:
        if pa.types.is_integer(type_):
            return chance.randint(0, 100)
        if pa.types.is_float16(type_):
            return np.float16(chance.choice([0.5, -2.0, float("inf")]))
        return float(chance.choice([*ODD, 0.1, 2.5]))

    def list_of(type_: pa.DataType) -> Any:
        length = (
            type_.list_size if pa.types.is_fixed_size_list(type_) else chance.choice([0, 1, 2, 63, 64, 65])
        )
        return [number(type_.value_type) for _ in range(length)]

    def value(field: pa.Field) -> Any:
        if field.nullable and chance.random() < 0.2:
            return None
        if field.name == "words":
            return ["a", None][: chance.randint(0, 2)]
        if field.name == "inside":
            return {"vector": list_of(field.type.field("vector").type)}
        found = list_of(field.type)
        if field.name in ("any", "tokens"):
            found = [None if chance.random() < 0.1 else each for each in found]
        return found

    numbers = range(start, start + count)
    columns = [pa.array(numbers, pa.int64()), pa.array([f"name_{i}" for i in numbers])]
    columns += [pa.array([value(field) for _ in numbers], field.type) for field in list(SCHEMA)[2:]]
    return pa.table(columns, schema=SCHEMA)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> lancewal.Table:
    """Rows in the base, in SSTables and in the WAL, and newer versions of some in each."""
    path = str(tmp_path_factory.mktemp("vectors") / "table")
    lance.write_dataset(rows(0, ROWS, 0), path, data_storage_version="2.2", max_rows_per_file=ROWS // 3)
    made = lancewal.initialize(path, bucket=("id", 2), writer_defaults=fast())
    with made.writer() as writer:
        writer.put(rows(ROWS - 50, 100, 1))
        writer.delete([0, 7, ROWS - 3])
    made.flush()
    with made.writer(enable_memtable=False) as writer:
        writer.put(rows(ROWS - 20, 100, 2))
        writer.delete([1, ROWS + 10])
    return made


def bits_of(table: pa.Table) -> list[tuple[Any, ...]]:
    """Rows by their id, with the bits of all numbers: a NaN is no other NaN, and nothing else."""
    columns = []
    for column in table.combine_chunks().columns:
        found = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        if pa.types.is_list(found.type) and pa.types.is_primitive(found.type.value_type):
            columns.append(packed(found).to_pylist())
        else:
            # As text, because a NaN equals nothing, and -0.0 equals 0.0.
            columns.append(
                [each if isinstance(each, int | bytes | None) else repr(each) for each in found.to_pylist()]
            )
    return sorted(zip(*columns, strict=True), key=lambda row: int(row[0]))


def batch_of(df: DataFrame) -> str:
    """What the scan of a plan reads from."""
    plan = df._jdf.queryExecution().sparkPlan()
    return str(plan.collectLeaves().apply(0).batch())


def both_ways(
    spark: SparkSession, table: lancewal.Table, query: Callable[[DataFrame], DataFrame]
) -> pa.Table:
    """What the front gives, after a look at what the plain format does."""
    through_front = query(load(spark, table)).toArrow()
    spark.conf.set(SWITCH, "false")
    try:
        assert bits_of(query(load(spark, table)).toArrow()) == bits_of(through_front)
    finally:
        spark.conf.set(SWITCH, "true")
    return through_front


@pytest.mark.usefixtures("by_tasks")
@pytest.mark.parametrize(
    "columns", [SCHEMA.names, ["id", "short"], ["id", "any", "tokens"], ["id", "inside", "words"]], ids=str
)
def test_every_bit_of_every_level_comes_through(
    spark: SparkSession, table: lancewal.Table, columns: list[str]
) -> None:
    found = both_ways(spark, table, lambda df: df.select(*columns))
    assert bits_of(found) == bits_of(expected(table, columns))
    asked = batch_of(load(spark, table).select(*columns))
    assert asked.startswith("PackedLists") == bool(set(columns) & set(PACKED))


@pytest.mark.usefixtures("by_tasks")
def test_only_a_vector_is_read(spark: SparkSession, table: lancewal.Table) -> None:
    found = load(spark, table).select("short").toArrow()
    oracle = expected(table, ["short"])
    assert sorted(map(repr, found["short"].to_pylist())) == sorted(map(repr, oracle["short"].to_pylist()))


@pytest.mark.usefixtures("by_tasks")
def test_limits_and_filters_on_other_columns(spark: SparkSession, table: lancewal.Table) -> None:
    everything = bits_of(expected(table, SCHEMA.names))
    assert bits_of(load(spark, table).limit(100 * ROWS).toArrow()) == everything
    assert set(bits_of(load(spark, table).drop("inside", "words").limit(5).toArrow())) <= {
        (*row[:10],) for row in everything
    }
    some = both_ways(spark, table, lambda df: df.filter("id % 7 = 0 AND name LIKE 'name_3%'"))
    assert bits_of(some) == [row for row in everything if row[0] % 7 == 0 and row[1].startswith("'name_3")]


@pytest.mark.usefixtures("by_tasks")
def test_spark_computes_with_vectors_as_ever(spark: SparkSession, table: lancewal.Table) -> None:
    """Items and lengths are read, rows are sorted, shuffled and grouped by vectors, by their bytes."""
    both_ways(
        spark,
        table,
        lambda df: df.filter("size(wide) = 70 AND wide[69] > 0").selectExpr(
            "id",
            "short[2] AS c",
            "size(any)",
            "get(tokens, 62)",
            "exists(any, x -> x IS NULL) AS n",
            "reverse(short)",
        ),
    )
    both_ways(
        spark,
        table,
        lambda df: (
            df.repartition(3, "short").groupBy("any", "bytes").agg({"id": "min"}).select("min(id)", "any")
        ),
    )
    # The other side's arrays were made by Spark, item by item.
    oracle = expected(table, ["id", *PACKED])
    made = spark.createDataFrame(oracle)
    for one, other in ((load(spark, table).select("id", *PACKED), made), (made, load(spark, table))):
        assert one.exceptAll(other.select("id", *PACKED)).count() == 0


@pytest.mark.usefixtures("by_tasks")
def test_an_empty_table_has_no_vectors(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "empty")
    lance.write_dataset(SCHEMA.empty_table(), path, data_storage_version="2.2")
    table = lancewal.initialize(path, bucket=("id", 2), writer_defaults=fast())
    found = load(spark, table).toArrow()
    assert found.num_rows == 0
    assert found.schema.names == SCHEMA.names


@pytest.mark.usefixtures("by_tasks")
def test_vectors_are_changed_and_kept_by_sql(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "table")
    schema = pa.schema([SCHEMA.field("id"), SCHEMA.field("name"), SCHEMA.field("short"), SCHEMA.field("any")])
    data = [
        {"id": 1, "name": "a", "short": [1.0, 2.0, 3.0], "any": [1.0]},
        {"id": 2, "name": "b", "short": None, "any": [None, 2.0]},
        {"id": 3, "name": "c", "short": [0.5, 0.5, 0.5], "any": None},
        {"id": 4, "name": "d", "short": [9.0, 9.0, 9.0], "any": []},
    ]
    lance.write_dataset(pa.Table.from_pylist(data, schema), path)
    table = lancewal.initialize(path, bucket=("id", 2), writer_defaults=fast())
    table.checkpoint("before")
    name = f"lance.`{path}`"
    spark.sql(f"UPDATE {name} SET name = upper(name) WHERE id <= 3")
    spark.sql(f"UPDATE {name} SET short = transform(short, x -> x * 2F) WHERE short[0] = 1")
    spark.sql(f"DELETE FROM {name} WHERE short = array(9F, 9F, 9F)")
    spark.sql(
        f"MERGE INTO {name} t USING (SELECT * FROM VALUES (3L, array(7F)), (5L, array(8F)) AS s(id, any)) s "
        "ON t.id = s.id WHEN MATCHED AND t.short[1] = 0.5 THEN UPDATE SET any = s.any "
        "WHEN NOT MATCHED THEN INSERT (id, any) VALUES (s.id, s.any)"
    )
    assert content(path) == [
        (1, "A", [2.0, 4.0, 6.0], [1.0]),
        (2, "B", None, [None, 2.0]),
        (3, "C", [0.5, 0.5, 0.5], [7.0]),
        (5, None, None, [8.0]),
    ]
    assert sorted(map(tuple, spark.sql(f"SELECT * FROM {name}").collect())) == content(path)
    then = spark.sql(f"SELECT * FROM {name} VERSION AS OF 'before'").toArrow().to_pylist()
    assert sorted(then, key=lambda row: int(row["id"])) == data
    copy = str(tmp_path / "copy")
    lance.write_dataset(schema.empty_table(), copy)
    lancewal.initialize(copy, bucket=("id", 3), writer_defaults=fast())
    spark.sql(f"INSERT INTO lance.`{copy}` SELECT * FROM {name}")
    assert content(copy) == content(path)


@pytest.mark.usefixtures("by_tasks")
def test_the_change_feed_is_another_source_and_sends_lists_as_they_are(
    spark: SparkSession, table: lancewal.Table
) -> None:
    feed = spark.sql(f"SELECT id, short, any FROM lance.`{table.uri}` WITH (readChangeFeed = true)")
    plain = spark.read.format("lancewal").option("readChangeFeed", "true").load(table.uri)
    assert "PackedLists" not in batch_of(feed)
    assert bits_of(feed.toArrow()) == bits_of(plain.select("id", "short", "any").toArrow())


def reader_of(table: lancewal.Table, names: list[str], types: dict[str, str] | None) -> MergedReader:
    """As the front asks, which packs only what it says."""
    schema = spark_schema(pa.schema([table.schema.field(name) for name in names]))
    told = {
        name: json.loads(schema[name].dataType.json()) | {"elementType": item}
        for name, item in (types or {}).items()
    }
    request = {} if types is None else {"packed": told}
    fields = [
        st.StructField(f.name, st.BinaryType() if f.name in (types or {}) else f.dataType, f.nullable)
        for f in schema
    ]
    fields[0].metadata = {REQUEST_KEY: json.dumps(request)}
    return MergedReader(options_of(table), st.StructType(fields))


def read(reader: MergedReader) -> pa.Table:
    schema = arrow_schema(reader._sent)
    return pa.Table.from_batches([b for p in reader.partitions() for b in reader.read(p)], schema)


def test_lists_are_packed_only_for_who_asked(table: lancewal.Table) -> None:
    asked = read(reader_of(table, ["id", "short", "any"], {"short": "float"}))
    assert asked.schema.field("short").type == pa.binary()
    not_asked = read(reader_of(table, ["id", "short", "any"], None))
    assert not_asked.schema.field("short").type == asked.schema.field("any").type == pa.list_(pa.float32())
    assert bits_of(asked) == bits_of(not_asked)


def test_a_column_that_got_another_type_is_packed_as_the_plan_has_it(table: lancewal.Table) -> None:
    """The bytes do not say what they are: doubles shown as floats would be other numbers."""
    plain = read(reader_of(table, ["bytes"], None))["bytes"].combine_chunks()
    for type_, item in (("byte", pa.int8()), ("double", pa.float64())):
        found = read(reader_of(table, ["bytes"], {"bytes": type_}))["bytes"].to_pylist()
        assert found == packed(plain.cast(pa.list_(item))).to_pylist()
