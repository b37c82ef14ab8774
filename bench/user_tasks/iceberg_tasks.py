"""The tasks with Iceberg (PyIceberg and a catalog in SQLite)."""

from __future__ import annotations

from typing import Any

from bench.user_tasks.tasks import NEWER, QUERY, ROWS

# mypy: ignore-errors


def _catalog(uri: str) -> Any:
    """A user writes this once into a configuration file, so it does not count."""
    from pathlib import Path

    from pyiceberg.catalog import load_catalog

    Path(uri).mkdir(parents=True, exist_ok=True)
    return load_catalog("local", type="sql", uri=f"sqlite:///{uri}/catalog.db", warehouse=f"file://{uri}")


def contents(uri: str) -> dict[int, int]:
    found = _catalog(uri).load_table("db.t").scan().to_arrow()
    return dict(zip(found["id"].to_pylist(), found["n"].to_pylist(), strict=True))


def create(uri: str) -> None:
    import pyarrow as pa

    vector = pa.field("vector", pa.list_(pa.float32()))
    key = pa.field("id", pa.int64(), nullable=False)
    catalog = _catalog(uri)
    catalog.create_namespace("db")
    catalog.create_table(
        "db.t", pa.schema([key, pa.field("n", pa.int64()), pa.field("text", pa.string()), vector])
    )


def insert(uri: str) -> None:
    import pyarrow as pa

    table = _catalog(uri).load_table("db.t")
    table.append(pa.Table.from_pylist(ROWS, table.schema().as_arrow()))


def upsert(uri: str) -> None:
    import pyarrow as pa

    table = _catalog(uri).load_table("db.t")
    table.upsert(pa.Table.from_pylist(NEWER, table.schema().as_arrow()), join_cols=["id"])


def delete_keys(uri: str) -> None:
    table = _catalog(uri).load_table("db.t")
    table.delete("id IN (2, 3)")


def delete_where(uri: str) -> None:
    table = _catalog(uri).load_table("db.t")
    table.delete("n >= 30")


def update_where(uri: str) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    table = _catalog(uri).load_table("db.t")
    found = table.scan(row_filter="n >= 40").to_arrow()
    changed = found.set_column(1, found.schema.field("n"), pc.add(found["n"], pa.scalar(1, pa.int64())))
    table.overwrite(changed, overwrite_filter="n >= 40")


def lookup(uri: str) -> Any:
    table = _catalog(uri).load_table("db.t")
    row = table.scan(row_filter="id = 3").to_arrow().to_pylist()[0]
    return row["id"], row["n"]


def lookup_many(uri: str) -> Any:
    table = _catalog(uri).load_table("db.t")
    found = table.scan(row_filter="id IN (1, 3, 5)").to_arrow()
    return found["id"].to_pylist()


def count(uri: str) -> Any:
    return _catalog(uri).load_table("db.t").scan(row_filter="n >= 20").count()


def scan(uri: str) -> Any:
    table = _catalog(uri).load_table("db.t")
    found = table.scan(row_filter="n >= 40", selected_fields=("id", "text")).to_arrow()
    return found["id"].to_pylist()


def to_pandas(uri: str) -> Any:
    frame = _catalog(uri).load_table("db.t").scan().to_pandas()
    return len(frame), frame["n"].sum()


def sql(uri: str) -> Any:
    connection = _catalog(uri).load_table("db.t").scan().to_duckdb(table_name="t")
    return connection.execute("SELECT n FROM t WHERE id = 3").fetchone()[0]


def add_column(uri: str) -> Any:
    from pyiceberg.types import LongType

    table = _catalog(uri).load_table("db.t")
    with table.update_schema() as update:
        update.add_column("twice", LongType())
    return "twice" in _catalog(uri).load_table("db.t").schema().column_names


def earlier_state(uri: str) -> Any:
    table = _catalog(uri).load_table("db.t")
    table.manage_snapshots().create_tag(table.current_snapshot().snapshot_id, "before").commit()
    upsert(uri)
    return table.scan().use_ref("before").to_arrow().num_rows


def one_by_one(uri: str) -> Any:
    import pyarrow as pa

    table = _catalog(uri).load_table("db.t")
    for n in range(20):
        row = {"id": n, "n": n, "text": "a", "vector": QUERY}
        table.upsert(pa.Table.from_pylist([row], table.schema().as_arrow()), join_cols=["id"])
    return table.scan().count()
