"""Writing by format: any distribution, exactly once, refused where it cannot be right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812

import lancewal
from lancewal.publish.staging import is_staged
from lancewal.shard.discovery import discover_manifests
from lancewal.spark.sink import StreamSink, TaskMessage, stage_rows
from lancewal.storage import ObjectStore
from tests.spark.tables import (
    content,
    frame,
    named,
    new_table,
    options_of,
    spark_content,
)
from tests.tables import APPEND_ONLY, KEYED, rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def save(df: Any, uri: str, mode: str = "append", **options: Any) -> None:
    df.write.format("lancewal").mode(mode).options(**options).save(uri)


def test_rows_from_spark_are_read_by_python_and_by_pylance_after_compaction(
    spark: SparkSession, tmp_path: Path
) -> None:
    uri = str(tmp_path / "table")
    df = frame(spark, named(0, 50)).repartition(3, F.col("id") % 7)
    save(df, uri, createIfMissing=True, primaryKey="id", numBuckets=3)
    assert content(uri) == named(0, 50)
    table = lancewal.open(uri)
    table.flush()
    table.compact()
    in_base = lance.dataset(uri).to_table().to_pylist()
    assert sorted((row["id"], row["name"]) for row in in_base) == named(0, 50)
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(40, 20, prefix="live"))
        assert spark_content(spark, uri) == sorted(named(0, 40) + named(40, 20, "live"))


def test_the_same_transaction_is_written_once_and_another_application_is_not_affected(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = new_table(tmp_path / "table", APPEND_ONLY)
    for app, version, start in (("a", 1, 0), ("a", 1, 0), ("a", 0, 50), ("b", 1, 10), ("a", 2, 20)):
        save(frame(spark, named(start, 5)), table.uri, txnAppId=app, txnVersion=version)
    assert content(table) == named(0, 5) + named(10, 5) + named(20, 5)


def test_a_column_says_which_rows_are_deleted(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    with table.writer() as writer:
        writer.put(rows(0, 6))
    df = frame(
        spark,
        [(0, None, "delete"), (1, "new", "upsert"), (7, "c", "insert"), (2, None, "d"), (9, None, "delete")],
        "id long, name string, op string",
    )
    save(df, table.uri, changeTypeColumn="op")
    assert content(table) == [(1, "new"), *named(3, 3), (7, "c")]


@pytest.mark.parametrize(
    ("rows_", "schema", "options", "reason"),
    [
        ([(1, "a")], "id long, name string", {"mode": "overwrite"}, "overwrite is not supported"),
        ([(1, "a")], "id long, other string", {}, "no column other"),
        ([(1,)], "id string", {}, "column id"),
        ([(1, "a")], "id long, name string", {"primaryKeys": "id"}, "did you mean primaryKey"),
        ([(1, "a")], "id long, name string", {"txnVersion": 1}, "txnVersion needs txnAppId"),
        ([(1, "a")], "id long, name string", {"txnAppId": "a"}, "txnAppId needs txnVersion"),
        ([(None, "a"), (2, "b")], "id long, name string", {}, "nulls in key column id"),
    ],
    ids=["overwrite", "unknown column", "type", "option", "version", "app", "null key"],
)
def test_what_cannot_be_written_leaves_nothing_behind(
    spark: SparkSession,
    tmp_path: Path,
    rows_: list[tuple[Any, ...]],
    schema: str,
    options: dict[str, Any],
    reason: str,
) -> None:
    table = new_table(tmp_path / "table")
    values = [(str(row[0]),) for row in rows_] if schema == "id string" else rows_
    with pytest.raises(Exception, match=reason):
        save(spark.createDataFrame(values, schema), table.uri, **options)
    assert content(table) == []
    assert all(m.writer_epoch == 0 for m in discover_manifests(ObjectStore.from_uri(table.uri)))


def test_a_vector_of_the_wrong_length_is_refused_with_its_rows_key(
    spark: SparkSession, tmp_path: Path
) -> None:
    schema = pa.schema([KEYED.field("id"), pa.field("v", pa.list_(pa.float32(), 2))])
    table = new_table(tmp_path / "table", schema)
    df = frame(spark, [(1, [1.0, 2.0]), (77, [1.0]), (3, None)], "id long, v array<float>")
    with pytest.raises(
        Exception, match=r"column v of the row with id = 77: it has 1 values, the vector has 2"
    ):
        save(df, table.uri)
    assert content(table) == []
    save(df.filter("id != 77"), table.uri)
    assert [(i, v and list(v)) for i, v in content(table)] == [(1, [1.0, 2.0]), (3, None)]


def test_a_slow_loser_that_writes_after_the_commit_changes_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Speculation leaves attempts running; here the loser's whole task runs again afterwards."""
    table = new_table(tmp_path / "table", APPEND_ONLY)
    save(frame(spark, named(0, 20)), table.uri)
    before = content(table)
    loser = stage_rows(options_of(table), iter([rows(0, 20, schema=APPEND_ONLY)]), partition=0)
    assert loser
    assert all(is_staged(each.entry.path) for each in loser)
    assert content(table) == before == named(0, 20)
    assert spark_content(spark, table.uri) == before


def test_a_stream_without_identity_is_refused_on_a_table_without_a_key(tmp_path: Path) -> None:
    class NoProperties:
        def getLocalProperty(self, name: str) -> None:  # noqa: N802
            return None

        def partitionId(self) -> int:  # noqa: N802
            return 0

    def write(table: lancewal.Table, schema: pa.Schema, **options: Any) -> TaskMessage:
        from lancewal.spark import sink

        patched = pytest.MonkeyPatch()
        patched.setattr(sink, "_context", NoProperties)
        try:
            return StreamSink(options_of(table, **options)).write(iter([rows(0, 5, schema=schema)]))
        finally:
            patched.undo()

    keyless = new_table(tmp_path / "keyless", APPEND_ONLY)
    with pytest.raises(Exception, match="txnAppId"):
        write(keyless, APPEND_ONLY)
    assert write(keyless, APPEND_ONLY, txnAppId="mine").rows
    keyed = new_table(tmp_path / "keyed")
    message = write(keyed, KEYED)
    StreamSink(options_of(keyed)).commit([message], 0)
    assert content(keyed) == named(0, 5)


def test_a_view_in_sql_can_be_read_and_inserted_into(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW people USING lancewal OPTIONS (path '{table.uri}')")
    spark.sql("INSERT INTO people VALUES (1, 'one'), (2, 'two')")
    spark.sql("INSERT INTO people SELECT id + 1, upper(name) FROM people")
    assert content(table) == [(1, "one"), (2, "ONE"), (3, "TWO")]
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW people USING lancewal OPTIONS (path '{table.uri}')")
    found = spark.sql("SELECT count(*), max(name) FROM people WHERE id >= 2").first()
    assert tuple(found or ()) == (2, "TWO")
