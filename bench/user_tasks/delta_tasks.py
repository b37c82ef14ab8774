"""The tasks with Delta Lake (delta-rs)."""

from __future__ import annotations

from typing import Any

from bench.user_tasks.tasks import NEWER, QUERY, ROWS

# mypy: ignore-errors


def contents(uri: str) -> dict[int, int]:
    from deltalake import DeltaTable

    found = DeltaTable(uri).to_pyarrow_table()
    return dict(zip(found["id"].to_pylist(), found["n"].to_pylist(), strict=True))


def create(uri: str) -> None:
    import pyarrow as pa
    from deltalake import DeltaTable

    schema = pa.schema(
        {"id": pa.int64(), "n": pa.int64(), "text": pa.utf8(), "vector": pa.list_(pa.float32())}
    )
    DeltaTable.create(uri, schema)


def insert(uri: str) -> None:
    import pyarrow as pa
    from deltalake import DeltaTable, write_deltalake

    write_deltalake(
        uri, pa.Table.from_pylist(ROWS, pa.schema(DeltaTable(uri).schema().to_arrow())), mode="append"
    )


def upsert(uri: str) -> None:
    import pyarrow as pa
    from deltalake import DeltaTable

    table = DeltaTable(uri)
    data = pa.Table.from_pylist(NEWER, pa.schema(table.schema().to_arrow()))
    merge = table.merge(data, "t.id = s.id", source_alias="s", target_alias="t")
    merge.when_matched_update_all().when_not_matched_insert_all().execute()


def delete_keys(uri: str) -> None:
    from deltalake import DeltaTable

    DeltaTable(uri).delete("id IN (2, 3)")


def delete_where(uri: str) -> None:
    from deltalake import DeltaTable

    DeltaTable(uri).delete("n >= 30")


def update_where(uri: str) -> None:
    from deltalake import DeltaTable

    DeltaTable(uri).update(predicate="n >= 40", updates={"n": "n + 1"})


def lookup(uri: str) -> Any:
    from deltalake import DeltaTable

    row = DeltaTable(uri).to_pyarrow_table(filters=[("id", "=", 3)]).to_pylist()[0]
    return row["id"], row["n"]


def lookup_many(uri: str) -> Any:
    from deltalake import DeltaTable

    found = DeltaTable(uri).to_pyarrow_table(filters=[("id", "in", [1, 3, 5])])
    return found["id"].to_pylist()


def count(uri: str) -> Any:
    from deltalake import DeltaTable

    return DeltaTable(uri).to_pyarrow_table(filters=[("n", ">=", 20)]).num_rows


def scan(uri: str) -> Any:
    from deltalake import DeltaTable

    found = DeltaTable(uri).to_pyarrow_table(columns=["id", "text"], filters=[("n", ">=", 40)])
    return found["id"].to_pylist()


def to_pandas(uri: str) -> Any:
    from deltalake import DeltaTable

    frame = DeltaTable(uri).to_pandas()
    return len(frame), frame["n"].sum()


def sql(uri: str) -> Any:
    import pyarrow as pa
    from deltalake import DeltaTable, QueryBuilder

    found = QueryBuilder().register("t", DeltaTable(uri)).execute("SELECT n FROM t WHERE id = 3").read_all()
    return pa.table(found)["n"][0].as_py()


def add_column(uri: str) -> Any:
    from deltalake import DeltaTable, Field
    from deltalake.schema import PrimitiveType

    DeltaTable(uri).alter.add_columns(Field("twice", PrimitiveType("long")))
    return "twice" in [field.name for field in DeltaTable(uri).schema().fields]


def earlier_state(uri: str) -> Any:
    from deltalake import DeltaTable

    before = DeltaTable(uri).version()
    upsert(uri)
    return DeltaTable(uri, version=before).to_pyarrow_table().num_rows


def changes(uri: str) -> Any:
    import pyarrow as pa
    from deltalake import DeltaTable

    table = DeltaTable(uri)
    table.alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    start = table.version() + 1
    upsert(uri)
    found = pa.table(DeltaTable(uri).load_cdf(starting_version=start).read_all())
    return {row["id"] for row in found.to_pylist() if row["_change_type"] in ("insert", "update_postimage")}


def one_by_one(uri: str) -> Any:
    import pyarrow as pa
    from deltalake import DeltaTable

    for n in range(20):
        table = DeltaTable(uri)
        row = {"id": n, "n": n, "text": "a", "vector": QUERY}
        data = pa.Table.from_pylist([row], pa.schema(table.schema().to_arrow()))
        merge = table.merge(data, "t.id = s.id", source_alias="s", target_alias="t")
        merge.when_matched_update_all().when_not_matched_insert_all().execute()
    return DeltaTable(uri).to_pyarrow_table().num_rows


def keep_in_shape(uri: str) -> Any:
    from deltalake import DeltaTable

    table = DeltaTable(uri)
    table.optimize.compact()
    table.vacuum(dry_run=False)
    return table.to_pyarrow_table().num_rows
