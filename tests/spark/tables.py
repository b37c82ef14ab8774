"""Tables and helpers that the tests of this directory share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa

import lancewal
from lancewal.spark.options import Options
from tests.tables import APPEND_ONLY, KEYED, fast

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Rows = list[tuple[Any, ...]]


def new_table(
    path: Path, schema: pa.Schema = KEYED, data: pa.Table | None = None, **how: Any
) -> lancewal.Table:
    """A table in three buckets of ``id``, unless told otherwise."""
    lance.write_dataset(schema.empty_table() if data is None else data, str(path), schema=schema)
    return lancewal.initialize(str(path), writer_defaults=fast(), **(how or {"bucket": ("id", 3)}))


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
