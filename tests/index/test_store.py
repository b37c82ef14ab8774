"""All indexes of one MemTable together."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from lancewal.errors import InvalidInputError, LanceWalError
from lancewal.format.schema import TOMBSTONE, TableSchema
from lancewal.index.btree import BTreeIndex
from lancewal.index.kinds import BTreeParams, FullTextParams, IndexSpec, Metric, VectorParams
from lancewal.index.store import IndexInsertError, IndexStore

SCHEMA = TableSchema(
    pa.schema([("id", pa.int64()), ("text", pa.string()), ("v", pa.list_(pa.float32(), 2))]), ("id",)
)
BY_ID = IndexSpec("by_id", "id", 0, BTreeParams())
BY_ID_TOO = IndexSpec("bitmap", "id", 0, BTreeParams())
WORDS = IndexSpec("words", "text", 1, FullTextParams())
NEAR = IndexSpec("near", "v", 2, VectorParams(2))
ALIGNED = IndexSpec("aligned", "v", 2, VectorParams(2, Metric.COSINE))
ALL = [BY_ID, BY_ID_TOO, WORDS, NEAR, ALIGNED]


def rows(first: int, count: int) -> pa.RecordBatch:
    ids = range(first, first + count)
    return pa.record_batch(
        [
            pa.array(ids, pa.int64()),
            pa.array([f"fox number {i}" for i in ids]),
            pa.array([[i, 1] for i in ids], pa.list_(pa.float32(), 2)),
            pa.array([False] * count),
        ],
        schema=SCHEMA.stored,
    )


def tombstone(key: int) -> pa.RecordBatch:
    columns = [pa.array([key]), pa.array([None], pa.string()), pa.array([None], pa.list_(pa.float32(), 2))]
    return pa.record_batch([*columns, pa.array([True])], schema=SCHEMA.stored)


def test_every_index_answers_for_its_column() -> None:
    store = IndexStore(ALL, SCHEMA)
    store.insert(rows(0, 10), 0)
    store.insert(tombstone(3), 10)
    assert store.rows_indexed == 11
    btree, words, near = store.btree("id"), store.full_text("text"), store.vector("v")
    assert btree is not None
    assert words is not None
    assert near is not None
    assert btree.equal_to([3]).below(11).tolist() == [3, 10]
    assert words.search("number", 11).positions.tolist() == list(range(10))
    assert near.search([4, 1], 1, 11).positions.tolist() == [4]
    assert store.btree("text") is None
    assert store.full_text("id") is None
    assert store.vector("id") is None


def test_vector_indexes_are_found_by_metric_and_equal_indexes_are_one() -> None:
    store = IndexStore(ALL, SCHEMA)
    assert {"by_id", "bitmap"} <= {spec.name for spec in store.specs}
    assert "bitmap" not in store.seconds
    aligned = store.vector("v", Metric.COSINE)
    assert aligned is not None
    assert aligned is not store.vector("v")
    assert store.vector("v", Metric.DOT) is None


def test_rows_handed_in_again_are_indexed_once() -> None:
    store = IndexStore(ALL, SCHEMA)
    for _ in range(2):
        store.insert(rows(0, 10), 0)
        store.insert(rows(10, 5), 10)
    words = store.full_text("text")
    assert words is not None
    assert store.rows_indexed == 15
    assert len(words.search("fox", 15).positions) == 15
    with pytest.raises(IndexInsertError, match="in order"):
        store.insert(rows(20, 1), 20)


def test_an_index_that_fails_neither_harms_the_others_nor_hides_how_far_it_got(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = IndexStore(ALL, SCHEMA)
    store.insert(rows(0, 5), 0)
    words = store.full_text("text")
    assert words is not None
    insert = words.insert

    def fail(column: pa.Array, first_row: int) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(words, "insert", fail)
    with pytest.raises(IndexInsertError, match="words: no room") as caught:
        store.insert(rows(5, 5), 5)
    assert isinstance(caught.value, LanceWalError)
    assert list(caught.value.failures) == ["words"]
    assert list(pickle.loads(pickle.dumps(caught.value)).failures) == ["words"]
    assert store.rows_indexed == 5
    near = store.vector("v")
    assert near is not None
    assert near.rows == 10
    # The same batch again completes the one that failed and changes nothing else.
    monkeypatch.setattr(words, "insert", insert)
    store.insert(rows(5, 5), 5)
    assert store.rows_indexed == 10
    assert len(words.search("fox", 10).positions) == 10
    assert near.search([7, 1], 20, 10).positions.tolist()[0] == 7
    assert len(near.search([7, 1], 20, 10).positions) == 10


def test_the_key_index_waits_for_its_readers() -> None:
    store = IndexStore([], SCHEMA)
    store.insert(rows(0, 10), 0)
    assert store.primary_key.rows == 0
    store.primary_key.catch_up([rows(0, 10)])
    assert store.primary_key.newest([9], 10).tolist() == [9]


def test_a_table_without_a_key_has_no_key_index() -> None:
    assert IndexStore([], TableSchema(SCHEMA.columns, ())).primary_key is None


def test_an_index_on_a_column_that_is_not_there_is_refused() -> None:
    spec = IndexSpec("gone", "gone", 9, BTreeParams())
    with pytest.raises(InvalidInputError, match="'gone'"):
        IndexStore([spec], SCHEMA)


def test_memory_of_all_indexes_counts_and_time_is_kept_by_index() -> None:
    store = IndexStore([BY_ID, WORDS, NEAR], SCHEMA)
    empty = store.memory_bytes
    store.insert(rows(0, 5000), 0)
    store.primary_key.catch_up([rows(0, 5000)])
    parts = [store.btree("id"), store.full_text("text"), store.vector("v"), store.primary_key]
    assert store.memory_bytes == sum(part.memory_bytes for part in parts if part is not None)
    assert store.memory_bytes > empty + 5000 * 100
    assert store.seconds.keys() == {"by_id", "words", "near"}
    assert all(spent > 0 for spent in store.seconds.values())


def test_tombstones_are_in_the_stored_schema_that_stores_take() -> None:
    assert rows(0, 1).schema.names[-1] == TOMBSTONE
    assert isinstance(IndexStore([BY_ID], SCHEMA).btree("id"), BTreeIndex)
