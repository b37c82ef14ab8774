"""Tables of the catalog: what makes them, what shows them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

import lancewal
from tests.spark.tables import ask, content, new_table
from tests.tables import KEYED, rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VECTORS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("a,b", pa.string(), nullable=False),
        pa.field("it's \u017cabi", pa.list_(pa.float32(), 3)),
        pa.field("wide:1", pa.list_(pa.float64(), 2)),
        pa.field("tags", pa.list_(pa.string()), nullable=False),
        pa.field("inside", pa.struct([("x, y", pa.decimal128(20, 3)), ("at", pa.timestamp("us", "UTC"))])),
        pa.field("day", pa.date32()),
        pa.field("pairs", pa.map_(pa.string(), pa.int32())),
    ]
)


def shape(uri: str) -> tuple[Any, ...]:
    """What a table is, whatever its rows are."""
    table = lancewal.open(uri)
    router = table.router()
    types = [
        (field.name, str(field.type).replace("item", "element"), field.nullable) for field in table.schema
    ]
    return types, table.primary_key, router.transform, router.column, router.num_buckets


@pytest.mark.parametrize(
    ("schema", "how"),
    [
        (KEYED, {"bucket": ("id", 3)}),
        (KEYED, {"unsharded": True}),
        (VECTORS, {"key": ["a,b", "id"], "bucket": ("id", 2)}),
        (VECTORS, {"key": "id", "identity": "id"}),
        (VECTORS, {"unsharded": True}),
        (VECTORS.append(pa.field("[0]", pa.int64(), False)), {"key": ["[0]", "id"], "bucket": ("[0]", 2)}),
    ],
    ids=["buckets", "unsharded", "composite", "identity", "no key", "brackets"],
)
def test_show_create_table_said_what_create_refused(
    spark: SparkSession, root: str, schema: pa.Schema, how: dict[str, Any]
) -> None:
    uri = f"{root}/docs"
    if "key" in how:
        lancewal.create(uri, schema, **how)
    else:
        new_table(Path(uri), schema, **how)
    before = shape(uri)
    ((shown,),) = ask(spark, "SHOW CREATE TABLE here.docs")
    ask(spark, "DROP TABLE here.docs")
    ask(spark, shown)
    assert shape(uri) == before
    # What it shows once more is the same, too.
    assert ask(spark, "SHOW CREATE TABLE here.docs") == [(shown,)]


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE OR REPLACE TABLE here.docs (id BIGINT, v VARIANT)",
        "CREATE OR REPLACE TABLE here.docs (id BIGINT, PRIMARY KEY (id))",
        "CREATE OR REPLACE TABLE here.docs AS SELECT 1L AS id",
        "REPLACE TABLE here.docs (id BIGINT)",
        "REPLACE TABLE here.docs AS SELECT id FROM here.docs",
    ],
)
def test_replace_dropped_a_table_before_it_made_another(
    spark: SparkSession, tmp_path: Path, root: str, statement: str
) -> None:
    table = new_table(tmp_path / "docs")
    with table.writer() as writer:
        writer.put(rows(0, 3))
    with pytest.raises(Exception, match=r"a table is not replaced.*DROP TABLE here\.docs first"):
        ask(spark, statement)
    assert len(content(table)) == 3


def test_a_frame_that_is_saved_over_a_table_dropped_it(
    spark: SparkSession, tmp_path: Path, root: str
) -> None:
    table = new_table(tmp_path / "docs")
    with table.writer() as writer:
        writer.put(rows(0, 3))
    frame = spark.range(2)
    for write in (
        lambda: frame.write.mode("overwrite").saveAsTable("here.docs"),
        lambda: frame.writeTo("here.docs").replace(),
        lambda: frame.writeTo("here.docs").createOrReplace(),
    ):
        with pytest.raises(Exception, match="a table is not replaced"):
            write()
    with pytest.raises(Exception, match="already exists"):
        frame.writeTo("here.docs").create()
    assert len(content(table)) == 3


def test_a_table_of_a_query_that_fails_is_not_left_behind(spark: SparkSession, root: str) -> None:
    how = "TBLPROPERTIES (primaryKey = 'id')"
    with pytest.raises(Exception, match="DIVIDE_BY_ZERO"):
        ask(spark, f"CREATE TABLE here.made {how} AS SELECT id, 1 / (id - 2) AS x FROM range(5)")
    assert not Path(root, "made").exists()
    ask(spark, f"CREATE TABLE here.made {how} AS SELECT id, id * 2 AS x FROM range(5)")
    ask(spark, f"CREATE TABLE IF NOT EXISTS here.made {how} AS SELECT 7L AS id, 7L AS x")
    assert content(f"{root}/made") == [(i, i * 2) for i in range(5)]
    spark.range(5, 7).selectExpr("id", "id AS x").write.mode("append").saveAsTable("here.made")
    spark.range(2).writeTo("here.other").tableProperty("primaryKey", "id").create()
    assert len(content(f"{root}/made")) == 7
    assert content(f"{root}/other") == [(0,), (1,)]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("id BIGINT, v VARCHAR(3)", "column v is varchar\\(3\\); tables limit no text"),
        (
            "id BIGINT, v ARRAY<STRUCT<a: STRING COLLATE UTF8_LCASE>>",
            "column v.a is .*; tables keep no collation",
        ),
        ("id BIGINT, v VARIANT", "column v is a variant"),
        ("id BIGINT, v INTERVAL YEAR", "column v is interval year, which no table can hold"),
        ("id BIGINT, v ARRAY<INTERVAL DAY>", "column v is interval day, which comes back as interval day to"),
        ("a BIGINT, b BIGINT, PRIMARY KEY (a, b)) PARTITIONED BY (a, b", "sharded by one column"),
        ("a BIGINT, b BIGINT, PRIMARY KEY (a, b)) PARTITIONED BY (bucket(4, a, b)", "sharded by one column"),
    ],
)
def test_what_a_new_table_would_not_keep_is_refused_by_name(
    spark: SparkSession, root: str, columns: str, said: str
) -> None:
    with pytest.raises(Exception, match=said):
        ask(spark, f"CREATE TABLE here.other ({columns})")
    assert not Path(root, "other").exists()


@pytest.mark.parametrize("name", ["path", "Path", "columns", "versionAsOf", "txnAppId"])
def test_a_property_that_is_none_of_a_table_made_one_elsewhere_or_did_nothing(
    spark: SparkSession, root: str, name: str
) -> None:
    elsewhere = f"{root}-elsewhere"
    with pytest.raises(Exception, match=f"{name} is no property of a table"):
        ask(spark, f"CREATE TABLE here.other (id BIGINT) TBLPROPERTIES ({name} = '{elsewhere}')")
    assert not Path(root, "other").exists()
    assert not Path(elsewhere).exists()
    # Options of the frame that fills a new table are not its properties.
    spark.range(3).writeTo("here.other").tableProperty("primaryKey", "id").option("walBytes", "0").create()
    assert len(content(f"{root}/other")) == 3


def test_a_table_without_columns_was_made_and_could_not_be_read(spark: SparkSession, root: str) -> None:
    with pytest.raises(Exception, match="a table needs columns"):
        ask(spark, "CREATE TABLE here.other")
    assert not Path(root, "other").exists()


def test_an_option_of_a_query_lost_against_the_catalogs_and_its_path_was_passed_over(
    spark: SparkSession, tmp_path: Path, root: str
) -> None:
    table = new_table(tmp_path / "docs")
    with table.writer() as writer:
        writer.put(rows(0, 5))
    spark.conf.set("spark.sql.catalog.here.filter", "id > 1")
    try:
        assert ask(spark, "SELECT count(*) FROM here.docs") == [(3,)]
        assert ask(spark, "SELECT id FROM here.docs WITH (Filter = 'id > 3')") == [(4,)]
    finally:
        spark.conf.unset("spark.sql.catalog.here.filter")
    with pytest.raises(Exception, match="the option path says /elsewhere; leave it out"):
        ask(spark, "INSERT INTO here.docs WITH (path = '/elsewhere') VALUES (9, 'x')")
    with pytest.raises(Exception, match="the option path says /elsewhere; leave it out"):
        ask(spark, "SELECT * FROM here.docs WITH (path = '/elsewhere')")
    assert len(content(table)) == 5


def test_a_past_time_and_a_procedure_without_its_table_are_refused_for_what_they_are(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = new_table(tmp_path / "table")
    with pytest.raises(Exception, match="VERSION AS OF reads a checkpoint"):
        ask(spark, f"SELECT * FROM lance.`{table.uri}` TIMESTAMP AS OF '2024-01-01'")
    with pytest.raises(Exception, match="the argument table of flush is null"):
        ask(spark, "CALL lance.flush(NULL)")
    with pytest.raises(Exception, match="the argument to of backup is null"):
        ask(spark, f"CALL lance.backup('{table.uri}', to => NULL)")


def test_columns_of_a_key_are_found_as_spark_finds_columns(spark: SparkSession, root: str) -> None:
    ask(spark, "CREATE TABLE here.docs (`a,b` BIGINT, Id BINARY, PRIMARY KEY (ID, `A,B`))")
    assert lancewal.open(f"{root}/docs").primary_key == ("Id", "a,b")


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("ALTER TABLE here.docs ADD COLUMN more INT", "columns are changed with Lance itself"),
        ("ALTER TABLE here.docs DROP COLUMN name", "columns are changed with Lance itself"),
        (
            "ALTER TABLE here.docs SET TBLPROPERTIES (numBuckets = '9')",
            "only columns of a table can be changed",
        ),
        ("COMMENT ON TABLE here.docs IS 'all of them'", "only columns of a table can be changed"),
        ("ALTER TABLE here.docs RENAME TO here.others", "it cannot be renamed"),
        ("TRUNCATE TABLE here.docs", "does not support truncate"),
        ("INSERT OVERWRITE here.docs VALUES (1, 'x')", "does not support truncate"),
        ("INSERT INTO here.docs REPLACE WHERE id = 1 VALUES (1, 'x')", "does not support overwrite"),
        (
            "CREATE TABLE here.other (id BIGINT) LOCATION '/tmp/x'",
            "name the table by its path, as here.`/tmp/x`",
        ),
        ("CREATE TABLE here.other (id BIGINT) USING csv", "tables of here are lancewal's, not csv's"),
        ("CALL here.optimize('docs')", "there is no procedure optimize; there are .flush, compact"),
        ("CALL here.other.flush('docs')", "there is no procedure other.flush"),
        ("CALL here.flush(tabel => 'docs')", "Did you mean one of the following. .`table`"),
        ("CALL here.flush('docs', 1)", "WRONG_NUM_ARGS"),
        ("CALL here.gc()", "REQUIRED_PARAMETER_NOT_FOUND"),
        ("CALL here.gc('docs', min_age_hours => -1)", "must be kept for at least"),
        ("SELECT * FROM here.docs VERSION AS OF 'none'", "has no checkpoint 'none'"),
    ],
)
def test_what_cannot_be_done_is_refused_for_what_it_is_and_changes_nothing(
    spark: SparkSession, tmp_path: Path, root: str, statement: str, said: str
) -> None:
    table = new_table(tmp_path / "docs")
    with table.writer() as writer:
        writer.put(rows(0, 3))
    with pytest.raises(Exception, match=said):
        ask(spark, statement)
    assert len(content(table)) == 3
    assert not Path(root, "other").exists()


def test_procedures_take_quoted_names_and_are_found_in_any_case(
    spark: SparkSession, tmp_path: Path, root: str
) -> None:
    new_table(tmp_path / "a.b")
    assert ask(spark, "CALL here.FLUSH('`a.b`')") == [("{}",)]
    assert ask(spark, "CALL here.System.flush(table => 'here.`a.b`')") == [("{}",)]


def test_an_option_of_a_query_that_hides_columns_was_an_internal_error_of_spark(
    spark: SparkSession, tmp_path: Path, root: str
) -> None:
    table = new_table(tmp_path / "docs")
    with table.writer() as writer:
        writer.put(rows(0, 2))
    table.checkpoint("before")
    lance.dataset(table.uri).add_columns(pa.field("more", pa.int32()))
    with pytest.raises(Exception, match="the table has no column id of type bigint"):
        ask(spark, "SELECT * FROM here.docs WITH (columns = 'name')")
    assert len(ask(spark, "SELECT name FROM here.docs WITH (columns = 'name')")) == 2
    assert spark.sql("SELECT * FROM here.docs WITH (versionAsOf = 'before')").columns == ["id", "name"]
