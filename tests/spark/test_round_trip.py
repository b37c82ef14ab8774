"""Every type through a real session: from a table to Spark, and from Spark to another table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

import lancewal
from lancewal.spark import write
from tests.spark.test_columns import COLUMNS
from tests.tables import KEY, fast

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: What Lance itself cannot store, by the version of its files.
NOT_IN_LANCE = {"2.1": {"decimal256", "nothing", "map"}, "2.2": {"decimal256", "nothing"}}


@pytest.mark.usefixtures("by_tasks")
@pytest.mark.parametrize("version", NOT_IN_LANCE)
def test_every_type_survives_the_way_through_spark(spark: SparkSession, tmp_path: Path, version: str) -> None:
    fields = [pa.field("id", pa.int64(), nullable=False, metadata=KEY)]
    arrays: list[pa.Array] = [pa.array([1, 2, 3], pa.int64())]
    for name, (values, type_, _) in COLUMNS.items():
        if name not in NOT_IN_LANCE[version]:
            fields.append(pa.field(name, type_))
            arrays.append(pa.array(values, type_))
    rows = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
    for name, data in (("source", rows), ("target", rows.schema.empty_table())):
        lance.write_dataset(data, str(tmp_path / name), data_storage_version=version)
        lancewal.initialize(str(tmp_path / name), bucket=("id", 2), writer_defaults=fast())
    df = spark.read.format("lancewal").load(str(tmp_path / "source"))
    df.filter("id < 3").write.format("lancewal").mode("append").save(str(tmp_path / "target"))
    write(df.filter("id >= 3"), str(tmp_path / "target"))
    copied = lancewal.open(str(tmp_path / "target")).scan().to_table().sort_by("id")
    assert copied.schema.equals(rows.schema)
    for name in rows.schema.names:
        assert copied[name].to_pylist() == rows[name].to_pylist(), name
    in_spark = {row.id: row for row in df.collect()}
    assert in_spark[1].decimal == COLUMNS["decimal"][0][0]
    assert in_spark[1].vector == [0.5, 2.0]
    assert in_spark[2].struct is None
    assert in_spark[3].uint64 == 0
