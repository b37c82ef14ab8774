"""Full-text indexes that searches make and keep."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

from lancewal.errors import StorageError
from lancewal.format.schema import TableSchema
from lancewal.index.full_text import index_of
from lancewal.index.kinds import FullTextParams
from lancewal.index.store import IndexStore
from lancewal.memtable import RowsSoFar
from lancewal.reader.words import FixedIndex, FixedIndexes
from lancewal.storage import Cache
from tests.patience import PATIENCE

PARAMS = FullTextParams()
TEXTS = pa.chunked_array([["fox", "dog"], ["the fox"], ["cat", "fox dog"]])


def fixed(count: int = 1) -> FixedIndex:
    return FixedIndex(index_of(pa.array(["fox"] * count), PARAMS), np.arange(count), pa.array(range(count)))


def test_each_is_made_once_while_there_is_room() -> None:
    made: list[str] = []
    indexes = FixedIndexes()

    def make(name: str) -> FixedIndex:
        made.append(name)
        return fixed()

    first = indexes.get("a", lambda: make("a"))
    assert indexes.get("a", lambda: make("a")) is first
    assert indexes.get("b", lambda: make("b")) is not first
    assert made == ["a", "b"]


def test_the_least_recently_used_makes_room() -> None:
    cache = Cache(1 << 20)
    FixedIndexes(cache).get("a", fixed)
    indexes = FixedIndexes(Cache(2 * cache.used_bytes + cache.used_bytes // 2))
    a, b = indexes.get("a", fixed), indexes.get("b", fixed)
    assert indexes.get("a", fixed) is a
    indexes.get("c", fixed)
    assert indexes.get("a", fixed) is a
    assert indexes.get("b", fixed) is not b


def test_one_that_is_too_large_is_used_and_not_kept() -> None:
    indexes = FixedIndexes(Cache(1))
    large = indexes.get("a", lambda: fixed(1000))
    assert large.index.rows == 1000
    assert indexes.get("a", fixed) is not large


def test_threads_that_want_the_same_wait_for_the_one_that_makes_it() -> None:
    indexes, gate, makers = FixedIndexes(), threading.Event(), []

    def make() -> FixedIndex:
        makers.append(threading.get_ident())
        gate.wait(PATIENCE)
        return fixed()

    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(indexes.get, "a", make) for _ in range(8)]
        gate.set()
        assert len({id(each.result()) for each in waiting}) == 1
    assert len(makers) == 1


def test_one_that_could_not_be_made_is_tried_again() -> None:
    indexes = FixedIndexes()

    def fail() -> FixedIndex:
        raise StorageError("no connection")

    for _ in range(2):
        with pytest.raises(StorageError, match="no connection"):
            indexes.get("a", fail)
    assert indexes.get("a", fixed).index.rows == 1


def test_a_thread_that_waited_in_vain_makes_it_itself() -> None:
    indexes, begun, gate = FixedIndexes(), threading.Event(), threading.Event()

    def fail() -> FixedIndex:
        begun.set()
        gate.wait(PATIENCE)
        raise StorageError("no connection")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(indexes.get, "a", fail)
        assert begun.wait(PATIENCE)
        second = pool.submit(indexes.get, "a", fixed)
        gate.set()
        assert isinstance(first.exception(), StorageError)
        assert second.result() is indexes.get("a", fail)


def owner() -> RowsSoFar:
    schema = TableSchema(pa.schema([("text", pa.string())]), ())
    return RowsSoFar(schema, IndexStore((), schema))


def test_an_index_of_a_memtable_grows_with_it_and_starts_where_it_is_told() -> None:
    rows = owner()
    index = rows.text_index(1, PARAMS, TEXTS.slice(0, 3), 0)
    assert index.rows == 3
    assert rows.text_index(1, PARAMS, TEXTS, 0) is index
    assert index.rows == 5
    assert index.search("fox", 5).positions.tolist() == [0, 2, 4]
    # A reader with an older view finds more in it than it may see, and bounds its search.
    assert rows.text_index(1, PARAMS, TEXTS.slice(0, 1), 0) is index
    assert rows.text_index(2, PARAMS, TEXTS, 0) is not index
    assert rows.text_index(1, FullTextParams(stem=False), TEXTS, 0) is not index
    rest = rows.text_index(1, PARAMS, TEXTS, 3)
    assert rest.rows == 2
    assert rest.search("dog", 2).positions.tolist() == [1]
    assert owner().text_index(1, PARAMS, TEXTS, 0) is not index


def test_readers_at_once_add_each_row_once() -> None:
    rows, texts = owner(), pa.chunked_array([["fox"] for _ in range(500)])
    with ThreadPoolExecutor(8) as pool:
        sizes = [pool.submit(rows.text_index, 1, PARAMS, texts.slice(0, n), 0) for n in range(1, 500, 7)]
        index = {id(each.result()): each.result() for each in sizes}
    (one,) = index.values()
    assert len(one.search("fox", one.rows).positions) == one.rows
