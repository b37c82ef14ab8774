"""Spark reads a checkpoint by ``versionAsOf``, whatever has become of the table since."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

import lancewal
from lancewal.storage import ObjectStore
from tests.maintenance.support import NOTHING_KEPT, collect_later
from tests.spark.tables import content, frame, named, new_table, spark_content
from tests.tables import rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def table(tmp_path: Path) -> lancewal.Table:
    """Rows on every level, a checkpoint of them, and then everything else."""
    table = new_table(tmp_path / "t", data=pa.Table.from_batches([rows(0, 20)]))
    with table.writer() as writer:
        writer.put(rows(10, 20, prefix="flushed"))
    with table.writer() as writer:
        writer.put(rows(25, 10, prefix="logged"))
        writer.delete([3])
        table.checkpoint("training")
        writer.put(rows(0, 50, prefix="later"))
    lance.dataset(table.uri).add_columns(pa.field("more", pa.int64()))
    table.compact(compact_files=True)
    collect_later(ObjectStore.from_uri(table.uri), retention=NOTHING_KEPT)
    lance.dataset(table.uri).cleanup_old_versions(
        timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
    )
    return table


EXPECTED = sorted(
    [row for row in named(0, 10) if row[0] != 3] + named(10, 15, "flushed") + named(25, 10, "logged")
)


def test_a_checkpoint_is_read_with_its_rows_and_columns(spark: SparkSession, table: lancewal.Table) -> None:
    assert spark_content(spark, table.uri, versionAsOf="training") == EXPECTED
    assert len(spark_content(spark, table.uri)[0]) == 3
    frame = spark.read.format("lancewal").option("versionAsOf", "training").load(table.uri)
    assert frame.columns == ["id", "name"]
    assert frame.filter("id >= 25").count() == 10
    table.drop_checkpoint("training")
    with pytest.raises(Exception, match="no checkpoint 'training'"):
        spark_content(spark, table.uri, versionAsOf="training")
    assert len(content(table)) == 50


def test_what_has_no_checkpoint_refuses_the_option(spark: SparkSession, table: lancewal.Table) -> None:
    source = spark.read.format("lancewal").option("versionAsOf", "training")
    with pytest.raises(Exception, match="does not apply to the change feed"):
        source.option("readChangeFeed", "true").load(table.uri).collect()
    one = frame(spark, [(1, "one")]).write.format("lancewal").mode("append").option("versionAsOf", "training")
    with pytest.raises(Exception, match="is for reads"):
        one.save(table.uri)
