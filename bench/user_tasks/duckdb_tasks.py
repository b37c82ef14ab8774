"""The tasks with DuckDB."""

from __future__ import annotations

from typing import Any

from bench.user_tasks.tasks import NEWER, QUERY, ROWS

# mypy: ignore-errors


def contents(uri: str) -> dict[int, int]:
    import duckdb

    return dict(duckdb.connect(uri).execute("SELECT id, n FROM t").fetchall())


def create(uri: str) -> None:
    import duckdb

    database = duckdb.connect(uri)
    database.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, n BIGINT, text VARCHAR, vector FLOAT[6])")


def insert(uri: str) -> None:
    import duckdb

    database = duckdb.connect(uri)
    database.executemany("INSERT INTO t VALUES ($id, $n, $text, $vector)", ROWS)


def upsert(uri: str) -> None:
    import duckdb

    database = duckdb.connect(uri)
    database.executemany("INSERT OR REPLACE INTO t VALUES ($id, $n, $text, $vector)", NEWER)


def delete_keys(uri: str) -> None:
    import duckdb

    duckdb.connect(uri).execute("DELETE FROM t WHERE id IN (2, 3)")


def delete_where(uri: str) -> None:
    import duckdb

    duckdb.connect(uri).execute("DELETE FROM t WHERE n >= 30")


def update_where(uri: str) -> None:
    import duckdb

    duckdb.connect(uri).execute("UPDATE t SET n = n + 1 WHERE n >= 40")


def lookup(uri: str) -> Any:
    import duckdb

    return duckdb.connect(uri).execute("SELECT id, n FROM t WHERE id = 3").fetchone()


def lookup_many(uri: str) -> Any:
    import duckdb

    return [
        key for (key,) in duckdb.connect(uri).execute("SELECT id FROM t WHERE id IN (1, 3, 5)").fetchall()
    ]


def count(uri: str) -> Any:
    import duckdb

    return duckdb.connect(uri).execute("SELECT count(*) FROM t WHERE n >= 20").fetchone()[0]


def scan(uri: str) -> Any:
    import duckdb

    found = duckdb.connect(uri).execute("SELECT id, text FROM t WHERE n >= 40").to_arrow_table()
    return found["id"].to_pylist()


def to_pandas(uri: str) -> Any:
    import duckdb

    frame = duckdb.connect(uri).execute("SELECT * FROM t").df()
    return len(frame), frame["n"].sum()


def sql(uri: str) -> Any:
    import duckdb

    return duckdb.connect(uri).execute("SELECT n FROM t WHERE id = 3").fetchone()[0]


def vector_search(uri: str) -> Any:
    import duckdb

    order = f"ORDER BY array_distance(vector, {QUERY}::FLOAT[6])"
    return duckdb.connect(uri).execute(f"SELECT id FROM t {order} LIMIT 1").fetchone()[0]


def add_column(uri: str) -> Any:
    import duckdb

    database = duckdb.connect(uri)
    database.execute("ALTER TABLE t ADD COLUMN twice BIGINT")
    return "twice" in database.execute("SELECT * FROM t").df().columns


def one_by_one(uri: str) -> Any:
    import duckdb

    database = duckdb.connect(uri)
    for n in range(20):
        database.execute("INSERT OR REPLACE INTO t VALUES (?, ?, ?, ?)", [n, n, "a", QUERY])
    return database.execute("SELECT count(*) FROM t").fetchone()[0]


def keep_in_shape(uri: str) -> Any:
    import duckdb

    return duckdb.connect(uri).execute("SELECT count(*) FROM t").fetchone()[0]
