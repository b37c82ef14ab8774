"""SQL through the catalog, and the same changes by calls; plain Python reads what came of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import lancewal
from lancewal.errors import InvalidInputError
from lancewal.spark import delete, merge, update
from tests.spark.tables import ask, content, new_table
from tests.tables import APPEND_ONLY, KEYED, rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_table_is_created_described_changed_merged_and_dropped(spark: SparkSession, root: str) -> None:
    from pyspark.errors import AnalysisException

    ask(
        spark,
        "CREATE TABLE here.docs (id BIGINT, text STRING, embedding ARRAY<FLOAT>, PRIMARY KEY (id)) "
        "PARTITIONED BY (bucket(2, id)) TBLPROPERTIES (vectorDimensions = 'embedding:2')",
    )
    uri = f"{root}/docs"
    table = lancewal.open(uri)
    assert table.primary_key == ("id",)
    assert table.router().num_buckets == 2
    with pytest.raises(AnalysisException, match="already exists"):
        ask(spark, "CREATE TABLE here.docs (id BIGINT)")
    assert ask(spark, "SHOW TABLES IN here") == [("", "docs", False)]
    described = ask(spark, "DESCRIBE EXTENDED here.docs")
    assert ("embedding", "array<float>", None) in described
    assert any("primaryKey=id" in str(line) for line in described)
    ask(spark, "INSERT INTO here.docs VALUES (1, 'one', array(1, 2)), (2, 'two', NULL), (3, 'three', NULL)")
    table.checkpoint("before")
    ask(spark, "UPDATE here.docs SET text = upper(text) WHERE id >= 2")
    ask(spark, "DELETE FROM here.docs WHERE id = 1")
    assert content(uri) == [(2, "TWO", None), (3, "THREE", None)]
    then = ask(spark, "SELECT id, text FROM here.docs VERSION AS OF 'before' ORDER BY id")
    assert then == [(1, "one"), (2, "two"), (3, "three")]
    ask(
        spark,
        "MERGE INTO here.docs t USING "
        "(SELECT * FROM VALUES (2L, 'merged'), (3L, NULL), (9L, 'new') AS s(id, text)) s ON t.id = s.id "
        "WHEN MATCHED AND s.text IS NULL THEN DELETE WHEN MATCHED THEN UPDATE SET text = s.text "
        "WHEN NOT MATCHED THEN INSERT (id, text) VALUES (s.id, s.text)",
    )
    assert ask(spark, f"SELECT * FROM lance.`{uri}` ORDER BY id") == [(2, "merged", None), (9, "new", None)]
    with pytest.raises(Exception, match="cannot change a primary key"):
        ask(spark, "UPDATE here.docs SET id = id + 1")
    assert len(content(uri)) == 2
    ask(spark, "CALL here.flush('docs')")
    assert json.loads(ask(spark, "CALL here.compact(table => 'docs')")[0][0])["rows_in"] > 0
    assert json.loads(ask(spark, "CALL here.gc('docs', dry_run => true)")[0][0])["dry_run"]
    assert json.loads(ask(spark, "CALL here.verify('docs')")[0][0])["ok"]
    assert json.loads(ask(spark, "CALL here.system.upkeep('docs')")[0][0])["ok"]
    copied = json.loads(ask(spark, f"CALL here.backup('docs', to => '{root}-backups')")[0][0])
    restored = lancewal.restore(f"{root}-backups", f"{root}-restored", backup=copied["id"])
    assert content(restored) == content(uri) != []
    ask(spark, "DROP TABLE here.docs")
    assert not Path(uri).exists()
    with pytest.raises(AnalysisException, match="TABLE_OR_VIEW_NOT_FOUND"):
        ask(spark, "SELECT * FROM here.docs")


def test_changes_beside_a_live_writer_go_through_it_and_do_not_fence_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = new_table(tmp_path / "table")
    with table.writer() as writer:
        writer.put(rows(0, 6))
        ask(spark, f"DELETE FROM lance.`{table.uri}` WHERE id < 2")
        with pytest.raises(Exception, match="close the writers first"):
            ask(spark, f"DROP TABLE lance.`{table.uri}`")
        writer.put(rows(10, 1))
    assert [i for i, _ in content(table)] == [2, 3, 4, 5, 10]


@pytest.mark.parametrize("staged", [False, True], ids=["few rows", "SSTables"])
def test_a_row_that_a_merge_inserts_is_not_deleted_with_the_old_row_of_its_key(
    spark: SparkSession, tmp_path: Path, root: str, staged: bool
) -> None:
    table = new_table(tmp_path / "docs")
    with table.writer() as writer:
        writer.put(rows(0, 60))
    spark.conf.set("spark.sql.adaptive.enabled", "false")
    spark.conf.set("spark.sql.catalog.here.walBytes", str(0 if staged else 1 << 20))
    spark.range(60).selectExpr("id", "concat('new_', id) AS name").createOrReplaceTempView("renamed")
    try:
        # Joined by another column than the key: the two rows of a key are in different tasks.
        ask(
            spark,
            "MERGE INTO here.docs t USING renamed s ON t.name = s.name "
            "WHEN NOT MATCHED THEN INSERT * WHEN NOT MATCHED BY SOURCE THEN DELETE",
        )
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", "true")
        spark.conf.unset("spark.sql.catalog.here.walBytes")
    assert content(table) == [(i, f"new_{i}") for i in range(60)]


def test_rows_with_a_key_of_bytes_are_updated_and_merged(spark: SparkSession, root: str) -> None:
    ask(
        spark,
        "CREATE TABLE here.raw (id BINARY, part BIGINT, text STRING, PRIMARY KEY (id, part)) "
        "PARTITIONED BY (bucket(2, part))",
    )
    ask(spark, "INSERT INTO here.raw VALUES (X'0102', 1, 'one'), (X'03', 2, 'two')")
    ask(spark, "UPDATE here.raw SET text = upper(text) WHERE part = 1")
    ask(
        spark,
        "MERGE INTO here.raw t USING (SELECT X'03' AS id, 2L AS part, 'zwei' AS text) s "
        "ON t.id = s.id AND t.part = s.part WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *",
    )
    assert content(f"{root}/raw") == [(b"\x01\x02", 1, "ONE"), (b"\x03", 2, "zwei")]
    with pytest.raises(Exception, match="cannot change a primary key"):
        ask(spark, "UPDATE here.raw SET id = X'04'")


def test_rows_are_changed_by_keys_of_every_type_and_a_key_with_a_comma_in_its_name_was_a_syntax_error(
    spark: SparkSession, root: str
) -> None:
    key = ["`a,b`", "`c d`", "`SELECT`", "Mixed", "`it's`", "text", "raw"]
    types = ["BOOLEAN", "TINYINT", "SMALLINT", "INT", "BIGINT", "STRING", "BINARY"]
    columns = ", ".join(map(" ".join, zip(key, types, strict=True)))
    ask(
        spark,
        f"CREATE TABLE here.odd ({columns}, v STRUCT<x: INT, `y z`: STRING>, PRIMARY KEY ({', '.join(key)})) "
        "PARTITIONED BY (bucket(2, text))",
    )
    least = (False, -(1 << 7), -(1 << 15), -(1 << 31), -(1 << 63), "", b"")
    most = (True, (1 << 7) - 1, (1 << 15) - 1, (1 << 31) - 1, (1 << 63) - 1, "\u017c", b"\xff\0")
    found = spark.createDataFrame([(*least, None), (*most, (1, "one"))], spark.table("here.odd").schema)
    found.writeTo("here.odd").append()
    ask(spark, "UPDATE here.odd SET V.x = 2, v.`y z` = concat(v.`y z`, '!') WHERE `A,B` AND MIXED > 0")
    assert content(f"{root}/odd") == [(*least, None), (*most, {"x": 2, "y z": "one!"})]
    found.selectExpr("*", "`c d` < 0 AS gone").createOrReplaceTempView("found")
    ask(
        spark,
        f"MERGE INTO here.odd USING found s ON {' AND '.join(f'odd.{name} = s.{name}' for name in key)} "
        "WHEN MATCHED AND s.gone THEN DELETE WHEN MATCHED THEN UPDATE SET odd.v = s.v",
    )
    assert content(f"{root}/odd") == [(*most, {"x": 1, "y z": "one"})]
    ask(spark, "DELETE FROM here.odd t WHERE t.raw = (SELECT max(u.raw) FROM here.odd u)")
    assert content(f"{root}/odd") == []


def test_of_columns_that_differ_in_case_an_update_wrote_the_one_into_the_other(
    spark: SparkSession, tmp_path: Path, root: str
) -> None:
    table = new_table(
        tmp_path / "docs",
        pa.schema([*KEYED, ("Name", pa.string()), ("n", pa.int32())], metadata=KEYED.metadata),
    )
    with table.writer() as writer:
        writer.put([{"id": 1, "name": "lower", "Name": "Upper", "n": 1}])
    update = "UPDATE here.docs SET n = 2"
    merge = "MERGE INTO here.docs t USING (SELECT 1L AS i) s ON t.id = s.i WHEN MATCHED THEN UPDATE SET n = 3"
    for statement in (update, merge):
        with pytest.raises(Exception, match=r"differs from Name in case only.*spark\.sql\.caseSensitive"):
            ask(spark, statement)
    assert content(table) == [(1, "lower", "Upper", 1)]
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        for number, statement in ((2, update), (3, merge)):
            ask(spark, statement)
            assert content(table) == [(1, "lower", "Upper", number)]
    finally:
        spark.conf.set("spark.sql.caseSensitive", "false")


def test_a_statement_about_its_own_table_finds_the_rows_of_one_state(
    spark: SparkSession, tmp_path: Path, root: str
) -> None:
    table = new_table(tmp_path / "docs")
    with table.writer() as writer:
        writer.put(rows(0, 6))
    ask(spark, "INSERT INTO here.docs SELECT id + 10, name FROM here.docs")
    ask(spark, "DELETE FROM here.docs t WHERE EXISTS (SELECT 1 FROM here.docs u WHERE u.id = t.id + 12)")
    assert [i for i, _ in content(table)] == [4, 5, *range(10, 16)]
    ask(spark, "UPDATE here.docs SET name = (SELECT max(name) FROM here.docs) WHERE id NOT IN (4, 10)")
    ask(
        spark,
        "MERGE INTO here.docs t "
        "USING (SELECT id + 5 AS id, name FROM here.docs WHERE id > 9) s ON t.id = s.id "
        "WHEN MATCHED THEN UPDATE SET name = s.name WHEN NOT MATCHED THEN INSERT * "
        "WHEN NOT MATCHED BY SOURCE AND t.id < 14 THEN DELETE",
    )
    expected = [(14, "name_5"), (15, "name_0"), *((i, "name_5") for i in range(16, 21))]
    assert content(table) == expected


def test_a_column_that_is_created_not_null_takes_no_nulls(spark: SparkSession, root: str) -> None:
    ask(spark, "CREATE TABLE here.strict (id BIGINT, text STRING NOT NULL, more INT, PRIMARY KEY (id))")
    ask(spark, "INSERT INTO here.strict VALUES (1, 'one', NULL), (2, 'two', 2)")
    with pytest.raises(Exception, match="NOT_NULL_ASSERT_VIOLATION"):
        ask(spark, "INSERT INTO here.strict VALUES (3, NULL, 3)")
    with pytest.raises(Exception, match="NOT_NULL_ASSERT_VIOLATION"):
        ask(spark, "UPDATE here.strict SET text = NULL WHERE id = 1")
    ask(spark, "DELETE FROM here.strict WHERE more = 2")
    assert content(f"{root}/strict") == [(1, "one", None)]


def test_the_same_changes_by_calls(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    with table.writer() as writer:
        writer.put(rows(0, 5))
    delete(spark, table.uri, "id % 2 = 1")
    update(spark, table.uri, {"name": "concat(name, '!')"}, "id = 2")
    source = spark.createDataFrame(
        [(2, "x", False), (4, "y", True), (7, "z", True)], "id long, name string, gone boolean"
    )
    merge(source, table.uri, update={"name": "concat(target.name, source.name)"}, delete="source.gone")
    assert content(table) == [(0, "name_0"), (2, "name_2!x"), (7, "z")]
    merge(source.filter("id > 5"), table.uri, insert=False)
    assert content(table)[-1] == (7, "z")


def test_changes_that_cannot_be_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    keyed, append_only = new_table(tmp_path / "keyed"), new_table(tmp_path / "all", APPEND_ONLY)
    with pytest.raises(InvalidInputError, match="needs a primary key"):
        delete(spark, append_only.uri, "id = 1")
    with pytest.raises(InvalidInputError, match="cannot be changed"):
        update(spark, keyed.uri, {"id": "id + 1"})
    with pytest.raises(InvalidInputError, match="nothing can be set"):
        update(spark, keyed.uri, {"nothing": "1"})
    with pytest.raises(InvalidInputError, match="lacks id"):
        merge(spark.createDataFrame([("x",)], "name string"), keyed.uri)


@pytest.mark.parametrize("key", [2, 9], ids=["matched", "new"])
def test_a_source_that_has_a_key_twice_is_refused_and_nothing_is_written(
    spark: SparkSession, tmp_path: Path, key: int
) -> None:
    table = new_table(tmp_path / "table")
    with table.writer() as writer:
        writer.put(rows(0, 3))
    before = content(table)
    twice = spark.createDataFrame([(1, "x"), (key, "one"), (key, "other")], "id long, name string")
    with pytest.raises(InvalidInputError, match=f"several rows with id = {key}"):
        merge(twice, table.uri)
    assert content(table) == before
    twice.createOrReplaceTempView("twice")
    statement = (
        f"MERGE INTO lance.`{table.uri}` t USING twice s ON t.id = s.id "
        "WHEN MATCHED THEN UPDATE SET name = s.name WHEN NOT MATCHED THEN INSERT *"
    )
    if key == 2:
        # Spark's own rule, and Delta's.
        with pytest.raises(Exception, match="MERGE_CARDINALITY_VIOLATION"):
            ask(spark, statement)
        assert content(table) == before
    else:
        # Two inserts of one key, as by INSERT: one of them stays.
        ask(spark, statement)
        found = dict(content(table))
        assert found.pop(9) in ("one", "other")
        assert found == {**dict(before), 1: "x"}
