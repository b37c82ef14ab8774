"""Tables and helpers that the tests of this directory share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import lancewal
from lancewal.spark.options import Options
from tests.tables import APPEND_ONLY, KEYED, writable_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Rows = list[tuple[Any, ...]]


def new_table(
    path: Path, schema: pa.Schema = KEYED, data: pa.Table | None = None, **how: Any
) -> lancewal.Table:
    """A table in three buckets of ``id``, unless told otherwise."""
    return writable_table(path, schema, data, **(how or {"bucket": ("id", 3)}))


def schema_of(keyed: bool) -> pa.Schema:
    return KEYED if keyed else APPEND_ONLY


def options_of(table: lancewal.Table | str, **given: Any) -> Options:
    uri = table if isinstance(table, str) else table.uri
    return Options.parse({"path": uri, **{name: str(value) for name, value in given.items()}})


def content(table: lancewal.Table | str) -> Rows:
    """All rows, as a plain Python process reads them."""
    opened = lancewal.open(table) if isinstance(table, str) else table
    return sorted(map(tuple, (row.values() for row in opened.scan().to_table().to_pylist())))


def spark_content(spark: SparkSession, uri: str, **options: str) -> Rows:
    """All rows, as Spark reads them."""
    return sorted(map(tuple, spark.read.format("lancewal").options(**options).load(uri).collect()))


def frame(spark: SparkSession, rows: Rows, schema: str = "id long, name string") -> DataFrame:
    return spark.createDataFrame(rows, schema)


def named(start: int, count: int, prefix: str = "name") -> Rows:
    return [(i, f"{prefix}_{i}") for i in range(start, start + count)]


def ask(spark: SparkSession, sql: str) -> Rows:
    return [tuple(row) for row in spark.sql(sql).collect()]
