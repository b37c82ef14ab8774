"""The tasks with lancewal."""

from __future__ import annotations

from typing import Any

from bench.user_tasks.tasks import NEWER, QUERY, ROWS

# mypy: ignore-errors


def contents(uri: str) -> dict[int, int]:
    import lancewal

    found = lancewal.open(uri).scan(columns=["id", "n"]).to_table()
    return dict(zip(found["id"].to_pylist(), found["n"].to_pylist(), strict=True))


def create(uri: str) -> None:
    import pyarrow as pa

    import lancewal

    schema = pa.schema(
        {"id": pa.int64(), "n": pa.int64(), "text": pa.utf8(), "vector": pa.list_(pa.float32(), 6)}
    )
    lancewal.create(uri, schema, key="id")


def insert(uri: str) -> None:
    import lancewal

    with lancewal.open(uri).writer() as writer:
        writer.put(ROWS)


def upsert(uri: str) -> None:
    import lancewal

    with lancewal.open(uri).writer() as writer:
        writer.put(NEWER)


def delete_keys(uri: str) -> None:
    import lancewal

    with lancewal.open(uri).writer() as writer:
        writer.delete([2, 3])


def delete_where(uri: str) -> None:
    import lancewal

    with lancewal.open(uri).writer() as writer:
        writer.delete(where="n >= 30")


def update_where(uri: str) -> None:
    import lancewal

    with lancewal.open(uri).writer() as writer:
        writer.update(where="n >= 40", set_sql={"n": "n + 1"})


def lookup(uri: str) -> Any:
    import lancewal

    row = lancewal.open(uri).lookup(3)
    return row["id"], row["n"]


def lookup_many(uri: str) -> Any:
    import lancewal

    found = lancewal.open(uri).lookup([1, 3, 5])
    return found.table["id"].to_pylist()


def count(uri: str) -> Any:
    import lancewal

    return lancewal.open(uri).count_rows("n >= 20")


def scan(uri: str) -> Any:
    import lancewal

    found = lancewal.open(uri).scan(columns=["id", "text"], filter="n >= 40").to_table()
    return found["id"].to_pylist()


def to_pandas(uri: str) -> Any:
    import lancewal

    frame = lancewal.open(uri).scan().to_table().to_pandas()
    return len(frame), frame["n"].sum()


def sql(uri: str) -> Any:
    import lancewal

    return lancewal.open(uri).sql("SELECT n FROM t WHERE id = 3")["n"][0].as_py()


def vector_search(uri: str) -> Any:
    import lancewal

    return lancewal.open(uri).vector_search("vector", QUERY, k=1)["id"][0].as_py()


def text_search(uri: str) -> Any:
    import lancewal

    return lancewal.open(uri).full_text_search("text", "red")["id"].to_pylist()


def hybrid_search(uri: str) -> Any:
    import lancewal

    found = lancewal.open(uri).hybrid_search("vector", [1.0, 0, 0, 0, 0, 0], "text", "red", k=1)
    return found["id"][0].as_py()


def add_column(uri: str) -> Any:
    import lance
    import pyarrow as pa

    lance.dataset(uri).add_columns(pa.field("twice", pa.int64()))
    return "twice" in lance.dataset(uri).schema.names


def earlier_state(uri: str) -> Any:
    import lancewal

    table = lancewal.open(uri)
    table.checkpoint("before")
    upsert(uri)
    return table.at("before").count_rows()


def changes(uri: str) -> Any:
    import lancewal

    table = lancewal.open(uri)
    place = table.feed().latest()
    upsert(uri)
    return [row["id"] for batch, _ in table.changes(place) for row in batch.to_pylist()]


def one_by_one(uri: str) -> Any:
    import lancewal

    table = lancewal.open(uri)
    with table.writer() as writer:
        for n in range(20):
            writer.put({"id": n, "n": n, "text": "a", "vector": QUERY})
    return table.count_rows()


def keep_in_shape(uri: str) -> Any:
    import lancewal

    lancewal.open(uri).upkeep()
    return lancewal.open(uri).count_rows()
