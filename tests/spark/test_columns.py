"""Arrow columns to Spark's types and back, without a session."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as st

from lancewal.errors import InvalidInputError
from lancewal.spark.columns import arrow_schema, for_spark, for_table, spark_schema

MOMENTS = [dt.datetime(2024, 7, 1, 1, 2, 3, 4000), None, dt.datetime(1969, 1, 1)]

COLUMNS: dict[str, tuple[list[Any], pa.DataType, str]] = {
    "bool": ([True, None, False], pa.bool_(), "boolean"),
    "int8": ([-128, None, 127], pa.int8(), "tinyint"),
    "int16": ([1, None, -3], pa.int16(), "smallint"),
    "int32": ([1, None, -3], pa.int32(), "int"),
    "int64": ([2**63 - 1, None, -(2**63)], pa.int64(), "bigint"),
    "uint8": ([255, None, 0], pa.uint8(), "smallint"),
    "uint16": ([65535, None, 0], pa.uint16(), "int"),
    "uint32": ([2**32 - 1, None, 0], pa.uint32(), "bigint"),
    "uint64": ([2**64 - 1, None, 0], pa.uint64(), "decimal(20,0)"),
    "half": ([0.5, None, -1.5], pa.float16(), "float"),
    "float": ([0.1, None, float("inf")], pa.float32(), "float"),
    "double": ([0.1, None, -0.0], pa.float64(), "double"),
    "decimal": ([Decimal("1.10"), None, Decimal("-9.99")], pa.decimal128(10, 2), "decimal(10,2)"),
    "decimal256": ([Decimal("1.10"), None, Decimal("-9.99")], pa.decimal256(30, 2), "decimal(30,2)"),
    "text": (["a", None, ""], pa.string(), "string"),
    "large_text": (["ä", None, ""], pa.large_string(), "string"),
    "binary": ([b"\0", None, b""], pa.binary(), "binary"),
    "large_binary": ([b"\0", None, b""], pa.large_binary(), "binary"),
    "fixed_binary": ([b"ab", None, b"cd"], pa.binary(2), "binary"),
    "date": ([dt.date(2024, 1, 1), None, dt.date(1, 1, 1)], pa.date32(), "date"),
    "date64": ([dt.date(2024, 1, 1), None, dt.date(1960, 1, 1)], pa.date64(), "date"),
    "zoned": (MOMENTS, pa.timestamp("us", "Europe/Berlin"), "timestamp"),
    "zoned_ms": (MOMENTS, pa.timestamp("ms", "UTC"), "timestamp"),
    "local": (MOMENTS, pa.timestamp("us"), "timestamp_ntz"),
    "local_ns": (MOMENTS, pa.timestamp("ns"), "timestamp_ntz"),
    "time_s": ([dt.time(1, 2, 3), None, dt.time(0)], pa.time32("s"), "time(6)"),
    "time_us": ([dt.time(1, 2, 3, 4), None, dt.time(0)], pa.time64("us"), "time(6)"),
    "time_ns": ([dt.time(1, 2, 3, 4), None, dt.time(0)], pa.time64("ns"), "time(6)"),
    "span": ([dt.timedelta(seconds=5), None, dt.timedelta(0)], pa.duration("ms"), "interval day to second"),
    "list": ([[1, None], None, []], pa.list_(pa.uint8()), "array<smallint>"),
    "large_list": ([[1, None], None, []], pa.large_list(pa.int32()), "array<int>"),
    "vector": ([[0.5, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2), "array<float>"),
    "struct": (
        [{"a": 1, "b": [{"c": "x"}]}, None, {"a": None, "b": None}],
        pa.struct([("a", pa.uint16()), ("b", pa.list_(pa.struct([("c", pa.large_string())])))]),
        "struct<a:int,b:array<struct<c:string>>>",
    ),
    "map": ([[("k", 1)], None, []], pa.map_(pa.string(), pa.uint8()), "map<string,smallint>"),
    "nothing": ([None, None, None], pa.null(), "void"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_every_type_comes_back_from_spark_as_it_was(name: str) -> None:
    values, type_, shown = COLUMNS[name]
    batch = pa.record_batch([pa.array(values, type_)], names=["c"])
    schema = spark_schema(batch.schema)
    assert schema[0].dataType.simpleString() == shown
    in_spark = for_spark(batch, arrow_schema(schema))
    in_spark.validate(full=True)
    assert in_spark.schema.equals(arrow_schema(schema))
    back = for_table(in_spark, batch.schema, [])
    assert back.column("c").type == type_
    assert back.column("c").to_pylist() == batch.column("c").to_pylist()


@pytest.mark.parametrize("name", COLUMNS)
def test_slices_are_converted_like_whole_columns(name: str) -> None:
    values, type_, _ = COLUMNS[name]
    batch = pa.record_batch([pa.array([*values, *values], type_)], names=["c"]).slice(1, 4)
    in_spark = for_spark(batch, arrow_schema(spark_schema(batch.schema)))
    back = for_table(in_spark, batch.schema, [])
    assert back.to_pylist() == batch.to_pylist()


def test_nullability_is_kept_on_every_level() -> None:
    item = pa.field("item", pa.int32(), nullable=False)
    columns = pa.schema(
        [
            pa.field("a", pa.int64(), nullable=False),
            pa.field("b", pa.struct([pa.field("l", pa.list_(item), False)])),
        ]
    )
    schema = spark_schema(columns)
    assert not schema["a"].nullable
    inner = schema["b"].dataType
    assert isinstance(inner, st.StructType)
    assert not inner["l"].nullable
    assert not inner["l"].dataType.containsNull  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (pa.array([300], pa.int16()), pa.uint8()),
        (pa.array([-1], pa.int64()), pa.uint32()),
        (pa.array([Decimal("1.5")], pa.decimal128(20, 1)), pa.uint64()),
        (pa.array([0.1], pa.float64()), pa.float32()),
        (pa.array([1e30], pa.float32()), pa.float16()),
        (pa.array(["5"]), pa.int64()),
        (pa.array([5]), pa.string()),
        (pa.array([dt.datetime(2024, 1, 1)], pa.timestamp("us")), pa.timestamp("us", "UTC")),
        (pa.array([dt.datetime(2024, 1, 1, 0, 0, 0, 5)], pa.timestamp("us")), pa.timestamp("ms")),
        (pa.array([b"abc"]), pa.binary(2)),
        (pa.array([{"a": 1, "z": 2}]), pa.struct([("a", pa.int64())])),
        (pa.array([[1]]), pa.int64()),
    ],
    ids=str,
)
def test_a_value_that_would_change_is_refused(given: pa.Array, wanted: pa.DataType) -> None:
    batch = pa.record_batch([given], names=["c"])
    with pytest.raises(InvalidInputError, match="column c"):
        for_table(batch, pa.schema([pa.field("c", wanted)]), [])


def test_floats_are_rounded_on_request_and_never_become_infinite() -> None:
    wanted = pa.schema([("id", pa.int64()), ("v", pa.list_(pa.float32(), 2)), ("f", pa.float32())])
    batch = pa.record_batch({"id": [1, 2], "v": [[0.1, 0.2], [0.5, None]], "f": [0.1, float("inf")]})
    with pytest.raises(InvalidInputError, match=r"column v.*0.1.*roundFloats"):
        for_table(batch, wanted, ["id"])
    rounded = for_table(batch, wanted, ["id"], round_floats=True)
    assert rounded.column("f").to_pylist() == [pytest.approx(0.1), float("inf")]
    assert rounded.column("v").to_pylist()[0] == pytest.approx([0.1, 0.2])
    huge = pa.record_batch({"id": [7], "f": [1e300]})
    with pytest.raises(InvalidInputError, match=r"column f of the row with id = 7.*1e.300"):
        for_table(huge, wanted, ["id"], round_floats=True)


def test_a_vector_of_the_wrong_length_is_refused_with_the_rows_key() -> None:
    batch = pa.record_batch({"tenant": ["x", "y"], "id": [7, 8], "v": [[1.0, 2.0], [1.0]]})
    wanted = pa.schema([("tenant", pa.string()), ("id", pa.int64()), ("v", pa.list_(pa.float64(), 2))])
    with pytest.raises(InvalidInputError, match=r"tenant = 'y', id = 8.*1 values.*has 2"):
        for_table(batch, wanted, ["tenant", "id"])


def test_a_struct_may_lack_fields_that_can_be_null() -> None:
    batch = pa.record_batch([pa.array([{"a": 1}, None])], names=["c"])
    wanted = pa.schema([pa.field("c", pa.struct([("a", pa.int64()), ("b", pa.string())]))])
    assert for_table(batch, wanted, []).column("c").to_pylist() == [{"a": 1, "b": None}, None]


def test_a_type_that_spark_lacks_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"column c\.item has type decimal256"):
        spark_schema(pa.schema([("c", pa.list_(pa.decimal256(60, 2)))]))
