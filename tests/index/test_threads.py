"""One thread inserts, several search: no crash, no row at or above the bound, none missing below it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from lancewal.format.schema import TableSchema
from lancewal.index import btree as runs
from lancewal.index import full_text as postings
from lancewal.index.kinds import BTreeParams, FullTextParams, IndexSpec, VectorParams
from lancewal.index.store import IndexStore

DIMENSION = 8
ROWS = 12_000
STEP = 20
SCHEMA = TableSchema(
    pa.schema(
        [
            ("id", pa.int64()),
            ("name", pa.string()),
            ("text", pa.string()),
            ("v", pa.list_(pa.float32(), DIMENSION)),
        ]
    ),
    ("id",),
)
SPECS = [
    IndexSpec("by_id", "id", 0, BTreeParams()),
    IndexSpec("by_name", "name", 1, BTreeParams()),
    IndexSpec("words", "text", 2, FullTextParams()),
    IndexSpec("near", "v", 3, VectorParams(DIMENSION, m=8, ef_construction=32)),
]
#: Keys and words repeat with these periods.
KEYS, WORDS = 1000, 7


def all_rows() -> pa.Table:
    numbers = np.arange(ROWS)
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((10, DIMENSION))
    vectors = (centres[numbers % 10] + 0.1 * rng.standard_normal((ROWS, DIMENSION))).astype(np.float32)
    columns = [
        pa.array(numbers % KEYS),
        pa.array([f"n{i % KEYS}" for i in numbers]),
        pa.array([f"word{i % WORDS} filler text" for i in numbers]),
        pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), DIMENSION),
        pa.array([False] * ROWS),
    ]
    return pa.table(columns, schema=SCHEMA.stored)


def test_searching_while_inserting_sees_exactly_the_rows_below_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postings, "_TAIL", 512)
    monkeypatch.setattr(runs, "NUMBER_FRESH", 32)
    monkeypatch.setattr(runs, "NUMBER_TAIL", 256)
    monkeypatch.setattr(runs, "BYTES_TAIL", 128)
    table = all_rows()
    store = IndexStore(SPECS, SCHEMA)
    near = store.vector("v")
    assert near is not None
    near._segment_rows = 1024
    vectors = table.column("v").combine_chunks().flatten().to_numpy().reshape(ROWS, DIMENSION)
    batches = table.to_batches(max_chunksize=STEP)
    done = threading.Event()
    failures: list[BaseException] = []
    searches = [0] * 4

    def insert() -> None:
        try:
            for number, batch in enumerate(batches):
                store.insert(batch, number * STEP)
                store.primary_key.insert(batch, number * STEP)
        finally:
            done.set()

    def check_btree(bound: int, key: int) -> None:
        expected = list(range(key, bound, KEYS))
        for column, value in (("id", key), ("name", f"n{key}")):
            btree = store.btree(column)
            assert btree is not None
            assert btree.equal_to([value]).below(bound).tolist() == expected
        by_id = store.btree("id")
        assert by_id is not None
        assert len(by_id.between(0, 9).below(bound)) == sum(len(range(k, bound, KEYS)) for k in range(10))

    def check_words(bound: int, key: int) -> None:
        words = store.full_text("text")
        assert words is not None
        found = words.search(f"word{key % WORDS}", bound)
        assert sorted(found.positions.tolist()) == list(range(key % WORDS, bound, WORDS))
        assert words.statistics("filler", bound).document_frequency == {"filler": bound}

    def check_vectors(bound: int, key: int) -> None:
        found = near.search(vectors[key], 10, bound)
        assert (found.positions < bound).all()
        assert len(np.unique(found.positions)) == min(10, bound)
        exact = near.search(vectors[key], 5, bound, exact=True)
        apart = ((vectors[:bound] - vectors[key]) ** 2).sum(axis=1)
        assert np.allclose(exact.distances, np.sort(apart)[:5], atol=1e-5)

    def check_keys(bound: int, key: int) -> None:
        bound = min(bound, store.primary_key.rows)
        live = store.primary_key.live_mask(bound)
        assert np.array_equal(np.flatnonzero(live), np.arange(max(0, bound - KEYS), bound))
        expected = max(range(key, bound, KEYS), default=-1)
        assert store.primary_key.newest([key], bound).tolist() == [expected]

    checks: list[Callable[[int, int], None]] = [check_btree, check_words, check_vectors, check_keys]

    def search(number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            while not done.is_set() or searches[number] < 5:
                rows = store.rows_indexed
                bound = rows if rng.random() < 0.5 else int(rng.integers(0, rows + 1))
                for check in checks:
                    check(bound, int(rng.integers(0, KEYS)))
                searches[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=insert)]
    threads += [threading.Thread(target=search, args=(number,)) for number in range(len(searches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert store.rows_indexed == ROWS
    assert near.wait_for_graphs(60)
    for check in checks:
        check(ROWS, 5)


def test_readers_that_catch_a_lazy_key_index_up_together_insert_each_row_once() -> None:
    batches = all_rows().to_batches(max_chunksize=STEP)
    store = IndexStore([], SCHEMA)
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def read(number: int) -> None:
        try:
            start.wait()
            for count in range(number, len(batches) + 1, 13):
                store.primary_key.catch_up(batches[:count])
                bound = count * STEP
                live = np.flatnonzero(store.primary_key.live_mask(bound))
                assert np.array_equal(live, np.arange(max(0, bound - KEYS), bound))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
