"""The tasks with LanceDB."""

from __future__ import annotations

from typing import Any

from bench.user_tasks.tasks import NEWER, QUERY, ROWS

# mypy: ignore-errors


def contents(uri: str) -> dict[int, int]:
    import lancedb

    found = lancedb.connect(uri).open_table("t").to_arrow()
    return dict(zip(found["id"].to_pylist(), found["n"].to_pylist(), strict=True))


def create(uri: str) -> None:
    import lancedb
    import pyarrow as pa

    schema = pa.schema(
        {"id": pa.int64(), "n": pa.int64(), "text": pa.utf8(), "vector": pa.list_(pa.float32(), 6)}
    )
    lancedb.connect(uri).create_table("t", schema=schema)


def insert(uri: str) -> None:
    import lancedb

    table = lancedb.connect(uri).open_table("t")
    table.add(ROWS)


def upsert(uri: str) -> None:
    import lancedb

    table = lancedb.connect(uri).open_table("t")
    table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(NEWER)


def delete_keys(uri: str) -> None:
    import lancedb

    table = lancedb.connect(uri).open_table("t")
    table.delete("id IN (2, 3)")


def delete_where(uri: str) -> None:
    import lancedb

    table = lancedb.connect(uri).open_table("t")
    table.delete("n >= 30")


def update_where(uri: str) -> None:
    import lancedb

    table = lancedb.connect(uri).open_table("t")
    table.update(where="n >= 40", values_sql={"n": "n + 1"})


def lookup(uri: str) -> Any:
    import lancedb

    table = lancedb.connect(uri).open_table("t")
    row = table.search().where("id = 3").to_list()[0]
    return row["id"], row["n"]


def lookup_many(uri: str) -> Any:
    import lancedb

    table = lancedb.connect(uri).open_table("t")
    found = table.search().where("id IN (1, 3, 5)").to_arrow()
    return found["id"].to_pylist()


def count(uri: str) -> Any:
    import lancedb

    table = lancedb.connect(uri).open_table("t")
    return table.count_rows("n >= 20")


def scan(uri: str) -> Any:
    import lancedb

    table = lancedb.connect(uri).open_table("t")
    found = table.search().where("n >= 40").select(["id", "text"]).to_arrow()
    return found["id"].to_pylist()


def to_pandas(uri: str) -> Any:
    import lancedb

    frame = lancedb.connect(uri).open_table("t").to_pandas()
    return len(frame), frame["n"].sum()


def vector_search(uri: str) -> Any:
    import lancedb

    table = lancedb.connect(uri).open_table("t")
    return table.search(QUERY).limit(1).to_list()[0]["id"]


def text_search(uri: str) -> Any:
    import lancedb

    table = lancedb.connect(uri).open_table("t")
    table.create_fts_index("text")
    return [row["id"] for row in table.search("red", query_type="fts").to_list()]


def hybrid_search(uri: str) -> Any:
    import lancedb

    table = lancedb.connect(uri).open_table("t")
    table.create_fts_index("text")
    query = table.search(query_type="hybrid", fts_columns="text").vector([1.0, 0, 0, 0, 0, 0]).text("red")
    return query.limit(1).to_list()[0]["id"]


def add_column(uri: str) -> Any:
    import lancedb

    table = lancedb.connect(uri).open_table("t")
    table.add_columns({"twice": "n * 2"})
    return "twice" in lancedb.connect(uri).open_table("t").schema.names


def earlier_state(uri: str) -> Any:
    import lancedb

    table = lancedb.connect(uri).open_table("t")
    table.tags.create("before", table.version)
    upsert(uri)
    table.checkout("before")
    return table.count_rows()


def one_by_one(uri: str) -> Any:
    import lancedb

    table = lancedb.connect(uri).open_table("t")
    for n in range(20):
        merge = table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        merge.execute([{"id": n, "n": n, "text": "a", "vector": QUERY}])
    return table.count_rows()


def keep_in_shape(uri: str) -> Any:
    from datetime import timedelta

    import lancedb

    table = lancedb.connect(uri).open_table("t")
    table.optimize(cleanup_older_than=timedelta(days=1))
    return table.count_rows()
