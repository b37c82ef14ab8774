"""SQL on the merged view: right rows, few columns, and nothing but reading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

import lancewal
from lancewal.errors import InvalidInputError
from lancewal.reader import run_sql
from tests.tables import KEY, wal_table

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("Group", pa.string()),
        pa.field("n", pa.int64()),
        pa.field("vector", pa.list_(pa.float32(), 2)),
    ]
)


@pytest.fixture
def table(tmp_path: Path) -> lancewal.Table:
    """Ids 0 to 9 in the base table; then 9 is newer, 10 new and 0 deleted."""
    table = wal_table(tmp_path / "t", SCHEMA, some_rows(range(10)), bucket=("id", 2))
    with table.writer() as writer:
        writer.put(some_rows([9, 10], n=100))
        writer.delete(0)
    return table


def some_rows(ids: Sequence[int], n: int = 1) -> pa.Table:
    return pa.table(
        {
            "id": ids,
            "Group": ["even" if i % 2 == 0 else "odd" for i in ids],
            "n": [n * i for i in ids],
            "vector": [[float(i), 0.0] for i in ids],
        },
        SCHEMA,
    )


def test_a_query_sees_the_newest_version_of_each_key(table: lancewal.Table) -> None:
    found = table.sql("SELECT Group, count(*) AS rows, max(n) AS most FROM t GROUP BY Group ORDER BY Group")
    assert found.to_pylist() == [
        {"Group": "even", "rows": 5, "most": 1000},
        {"Group": "odd", "rows": 5, "most": 900},
    ]
    assert table.sql("SELECT count(*) AS n FROM t").to_pylist() == [{"n": 10}]
    joined = "SELECT a.id FROM t AS a JOIN t AS b ON a.id = b.n WHERE b.id = 3"
    assert table.sql(joined).to_pylist() == [{"id": 3}]
    above = "SELECT id FROM t WHERE n > (SELECT avg(n) FROM t) ORDER BY id"
    assert table.sql(above)["id"].to_pylist() == [9, 10]
    assert table.sql("SELECT vector FROM t WHERE id = 2").to_pylist() == [{"vector": [2.0, 0.0]}]


def test_a_query_of_an_empty_table_gives_no_rows(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "empty", SCHEMA)
    assert table.sql("SELECT id, n + 1 AS more FROM t").num_rows == 0
    assert table.sql("SELECT count(*) AS n FROM t").to_pylist() == [{"n": 0}]


def test_only_columns_that_a_query_uses_are_read() -> None:
    rows = some_rows(range(5))
    asked: list[list[str]] = []

    def read(columns: Sequence[str]) -> pa.Table:
        asked.append(list(columns))
        return rows.select(columns)

    run_sql("SELECT n FROM t WHERE id > 1", SCHEMA, read)
    run_sql("SELECT count(*) FROM t", SCHEMA, read)
    run_sql("SELECT count(*) FROM t WHERE Group = 'odd'", SCHEMA, read)
    run_sql("SELECT * FROM t", SCHEMA, read)
    assert asked == [["id", "n"], ["id"], ["Group"], SCHEMA.names]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT nothing FROM t",
        "SELECT * FROM elsewhere",
        "DELETE FROM t",
        "INSERT INTO t VALUES (1, 'a', 2, NULL)",
        "DROP TABLE t",
        "CREATE EXTERNAL TABLE x STORED AS CSV LOCATION '/etc/passwd'",
        "COPY t TO '/tmp/elsewhere.parquet'",
        "SET datafusion.execution.batch_size = 1",
        "SELECT 1 / 0 FROM t",
        "SELECT CAST('x' AS INT) FROM t",
        "SELECT * FROM t LIMIT -1",
        "SELEC",
        "",
    ],
)
def test_what_is_no_query_of_the_table_is_refused(table: lancewal.Table, query: str) -> None:
    with pytest.raises(InvalidInputError, match="the table is called t"):
        table.sql(query)
    assert table.count_rows() == 10


def test_a_description_of_the_table_shows_all_columns(table: lancewal.Table) -> None:
    assert table.sql("DESCRIBE t")["column_name"].to_pylist() == table.schema.names


def test_the_fields_of_a_null_struct_had_values_in_memory(tmp_path: Path) -> None:
    point = pa.struct([("x", pa.int32())])
    rows = pa.table({"id": range(2), "n": [0, 0], "point": pa.array([None, {"x": 0}], point)})
    table = lancewal.create(tmp_path / "t", rows.schema, key="id")
    with table.writer() as writer:
        writer.put(rows)
        xs = table.sql("SELECT id, point['x'] AS x FROM t ORDER BY id")["x"].to_pylist()
        assert xs == [None, 0]
        writer.update("true", set_sql={"n": "coalesce(point.x + 1, 7)"})
        assert table.sql("SELECT n FROM t ORDER BY id")["n"].to_pylist() == [7, 1]
