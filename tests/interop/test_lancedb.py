"""A LanceDB application goes on after ``initialize``: queries, writes, indexes that it makes later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pytest
from lancedb.index import FTS, BTree, IvfPq

import lancewal
from tests.tables import fast

_RANDOM = np.random.default_rng(5)
DOCUMENTS = [
    {"id": n, "text": f"a dog number {n}", "vector": _RANDOM.random(8).astype("float32").tolist()}
    for n in range(300)
]


@pytest.fixture
def db(tmp_path: Path) -> Any:
    return lancedb.connect(tmp_path)


def indexed(db: Any) -> Any:
    """As an application has it: rows of dicts, so that ids are nullable, and its indexes."""
    table = db.create_table("docs", DOCUMENTS)
    index(table)
    table.create_index("id", config=BTree())
    return table


def index(table: Any) -> None:
    table.create_index("vector", config=IvfPq(num_partitions=2, num_sub_vectors=2))
    table.create_index("text", config=FTS())


def found(table: Any) -> dict[str, set[int]]:
    """What each kind of query finds of documents 7, 1000 and 1001."""
    near, some = DOCUMENTS[7]["vector"], "id IN (7, 1000, 1001)"

    def ids(query: Any) -> set[int]:
        return {row["id"] for row in query.where(some).limit(5).to_list()}

    return {
        "vector": ids(table.search(near)),
        "text": ids(table.search("dog", query_type="fts", fts_columns="text")),
        "hybrid": ids(
            table.search(query_type="hybrid", fts_columns="text").vector(near).text("dog").use_lsm(False)
        ),
        "scan": ids(table.search()),
    }


def put(wal: lancewal.Table, number: int) -> None:
    with wal.writer() as writer:
        writer.put({"id": number, "text": "another dog", "vector": DOCUMENTS[7]["vector"]})


def test_queries_go_on_and_see_rows_that_were_flushed(db: Any) -> None:
    table = indexed(db)
    before = found(table)
    wal = lancewal.initialize(f"{db.uri}/docs.lance", key="id", writer_defaults=fast())
    assert found(db.open_table("docs")) == before == {key: {7} for key in before}
    put(wal, 1000)
    fresh = found(db.open_table("docs"))
    assert fresh == {"vector": {7, 1000}, "text": {7, 1000}, "hybrid": {7}, "scan": {7, 1000}}
    wal.compact()
    assert found(db.open_table("docs")) == {key: {7, 1000} for key in before}


def test_an_index_that_is_made_later_is_searched(db: Any) -> None:
    table = db.create_table("docs", DOCUMENTS)
    wal = lancewal.initialize(f"{db.uri}/docs.lance", key="id", writer_defaults=fast())
    index(table)
    put(wal, 1000)
    assert found(db.open_table("docs"))["vector"] == {7, 1000}
    assert found(db.open_table("docs"))["text"] == {7, 1000}


def test_writes_of_the_application_go_on(db: Any) -> None:
    indexed(db)
    wal = lancewal.initialize(f"{db.uri}/docs.lance", key="id", unsharded=True, writer_defaults=fast())
    table = db.open_table("docs")
    row = {"id": 1001, "text": "dog", "vector": DOCUMENTS[7]["vector"]}
    table.add([row])
    assert wal.lookup(1001, columns=["text"]) == {"text": "dog"}
    merge = table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    merge.execute([{**row, "text": "two dogs"}])
    table.close_lsm_writers()
    assert wal.lookup(1001, columns=["text"]) == {"text": "two dogs"}
    table.update(where="id = 7", values={"text": "a cat"})
    table.delete("id = 8")
    assert (wal.lookup(7, columns=["text"]), wal.lookup(8)) == ({"text": "a cat"}, None)
    table.optimize()
    put(wal, 1000)
    wal.compact()
    assert wal.count_rows() == db.open_table("docs").count_rows() == 301
    assert wal.verify().ok


def test_without_a_write_path_again_all_is_as_before(db: Any) -> None:
    before = found(indexed(db))
    wal = lancewal.initialize(f"{db.uri}/docs.lance", key="id", writer_defaults=fast())
    put(wal, 1000)
    lancewal.uninitialize(wal.uri)
    table = db.open_table("docs")
    assert found(table) == {key: {7, 1000} for key in before}
    # What LanceDB refuses beside any write path, its own included.
    assert table.search("dog", query_type="fts").where("id = 7").to_list()
    hybrid = table.search(query_type="hybrid").vector(DOCUMENTS[7]["vector"]).text("dog")
    assert hybrid.limit(3).to_list()
    assert lancewal.initialize(wal.uri).count_rows() == 301
