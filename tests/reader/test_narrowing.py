"""Filters on rows in memory that a BTree answers for the most part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal.format.schema import TOMBSTONE, TableSchema
from lancewal.index.kinds import BTreeParams, IndexSpec
from lancewal.index.store import IndexStore
from lancewal.predicate.predicate import Predicate
from lancewal.reader import memory_source as narrowing
from lancewal.reader.memory_source import MemorySource, Narrowed, narrowed
from tests.reader.searched import ALL_INDEXES, Searched, as_table, kill, row, seal

PLAIN = pa.schema([("n", pa.int64()), ("name", pa.string()), ("f", pa.float64())])
SCHEMA = TableSchema(PLAIN, ())
SPECS = [
    IndexSpec(f"{name}_idx", name, place, BTreeParams()) for place, name in enumerate(("n", "name", "f"))
]
NUMBERS = st.none() | st.integers(-3, 3)
NAMES = st.none() | st.sampled_from(["", "a", "b", "bb", "ü"])

CONDITIONS = st.sampled_from(
    [
        *(f"n {op} {value}" for op in ("=", "<", "<=", ">", ">=", "!=") for value in (-2, 0, 3)),
        "n BETWEEN -1 AND 1",
        "n NOT BETWEEN -1 AND 1",
        "n IN (1, 2, 1)",
        "n IN (1, NULL)",
        "n NOT IN (1, 2)",
        "n IS NULL",
        "n IS NOT NULL",
        "n = NULL",
        "n > NULL",
        "1 < n",
        "name = 'b'",
        "name > 'a'",
        "name BETWEEN 'a' AND 'b'",
        "name IN ('ü', '')",
        "name IS NULL",
        "name LIKE 'b%'",
        "f > 0.5",
        "n + 1 = 2",
        "(n = 1 OR name = 'a')",
        "NOT (n = 1)",
    ]
)


def stored(values: list[tuple[int | None, str | None]]) -> pa.RecordBatch:
    columns = {
        "n": pa.array([n for n, _ in values], pa.int64()),
        "name": pa.array([name for _, name in values], pa.string()),
        "f": pa.array([None if n is None else n / 2 for n, _ in values], pa.float64()),
        TOMBSTONE: pa.array([False] * len(values)),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=SCHEMA.stored)


@settings(max_examples=300)
@given(
    values=st.lists(st.tuples(NUMBERS, NAMES), min_size=1, max_size=30),
    conditions=st.lists(CONDITIONS, min_size=1, max_size=3),
    indexed=st.integers(0, 30),
    visible=st.integers(1, 30),
)
def test_every_matching_row_is_among_those_left_to_ask(
    values: list[tuple[int | None, str | None]], conditions: list[str], indexed: int, visible: int
) -> None:
    rows = stored(values)
    store = IndexStore(SPECS, SCHEMA)
    if indexed:
        store.insert(rows.slice(0, indexed), 0)
    bound = min(visible, len(values))
    predicate = Predicate.parse(" AND ".join(conditions), PLAIN)
    expected = set(np.flatnonzero(predicate.mask(rows.slice(0, bound))).tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrowing, "_MAX_SHARE", 1.0)
        left = narrowed(predicate, store, lambda name: name, bound)
    if left is not None:
        assert left.rows.tolist() == sorted(set(left.rows.tolist()))
        assert expected <= set(left.rows.tolist()) <= set(range(bound))


def many() -> tuple[IndexStore, pa.RecordBatch]:
    rows = stored([(i, f"name {i % 2}") for i in range(1000)])
    store = IndexStore(SPECS, SCHEMA)
    store.insert(rows, 0)
    return store, rows


def left_of(filter_: str, store: IndexStore, row_count: int = 1000) -> Narrowed | None:
    return narrowed(Predicate.parse(filter_, PLAIN), store, lambda name: name, row_count)


def test_the_most_selective_column_is_asked() -> None:
    store, _ = many()
    left = left_of("name = 'name 1' AND n >= 10 AND n < 20 AND n != 15", store)
    assert left is not None
    assert left.column == "n"
    assert left.rows.tolist() == list(range(10, 20))
    left = left_of("n BETWEEN 5 AND 900 AND n > 890 AND n <= 893", store)
    assert left is not None
    assert left.rows.tolist() == [891, 892, 893]


@pytest.mark.parametrize(
    "filter_", ["n > 500", "name = 'name 1'", "n IS NOT NULL", "n != 3", "n = 1 OR n = 2", "n + 1 = 2"]
)
def test_where_many_rows_are_left_or_no_index_knows_all_are_asked(filter_: str) -> None:
    assert left_of(filter_, many()[0]) is None


def test_rows_that_are_not_indexed_yet_are_left_to_ask() -> None:
    store, _ = many()
    left = left_of("n = 7", store, row_count=1003)
    assert left is not None
    assert left.rows.tolist() == [7, 1000, 1001, 1002]
    assert left_of("n = 7", store, row_count=2000) is None


def test_a_column_that_has_another_type_by_now_is_not_asked() -> None:
    store, _ = many()
    predicate = Predicate.parse("n = 7", pa.schema([("n", pa.int32())]))
    assert narrowed(predicate, store, lambda name: name, 1000) is None
    assert narrowed(Predicate.parse("n = 7", PLAIN), store, lambda name: None, 1000) is None


def test_scans_with_a_btree_see_the_newest_rows_only_and_explain_it(tmp_path: Path) -> None:
    table = Searched(tmp_path, [row(1, n=5)], indexes={"n": ALL_INDEXES["n"]})
    writer = table.writer()
    writer.put(as_table([row(i, n=i % 100) for i in range(1000)]))
    for shard_writer in writer.shard_writers.values():
        shard_writer._mode._flushes._worker.stop()  # what is frozen stays frozen
    seal(writer)
    writer.put(as_table([row(i, n=i % 100) for i in range(1000, 2000)]))
    writer.put(as_table([row(5, n=7), row(1205, n=7), row(7, n=1)]))
    writer.delete([105, 1105])
    expected = {i for i in range(2000) if i % 100 == 5} - {5, 1205, 105, 1105}
    for reader in (table.live, table.other):
        scan = reader.scan(filter="n = 5", columns=["id"])
        assert set(scan.to_table()["id"].to_pylist()) == expected
        assert scan.count_rows() == len(expected)
    text = table.live.scan(filter="n = 5").explain()
    assert "memtable:1, filtered in memory: BTree on n leaves 10 of 1000 rows" in text
    assert "BTree on n leaves" not in table.other.scan(filter="n = 5").explain()
    assert "BTree on n leaves" not in table.live.scan(filter="n > 5").explain()
    assert set(table.live.scan(filter="n = 7").to_table()["id"].to_pylist()) == {
        *(i for i in range(2000) if i % 100 == 7 and i != 7),
        5,
        1205,
    }
    # A renamed column has the same BTree.
    table.dataset.alter_columns({"path": "n", "name": "number"})
    scan = table.live.scan(filter="number = 5", columns=["id", "number"])
    assert "BTree on number leaves" in scan.explain()
    assert set(scan.to_table()["id"].to_pylist()) == expected
    kill(writer)


def test_rows_of_wide_and_of_few_results_are_the_same(tmp_path: Path) -> None:
    """Few rows are cut out one by one, many are taken together."""
    table = Searched(tmp_path, indexes={"n": ALL_INDEXES["n"]})
    with table.writer(max_memtable_rows=100_000) as writer:
        for start in range(0, 8000, 500):
            writer.put(as_table([row(i, f"t{i}", [i, 0, 0, 0], i) for i in range(start, start + 500)]))
        for low, high in ((10, 13), (100, 800)):
            found = table.live.scan(filter=f"n >= {low} AND n < {high}").to_table()
            assert found["id"].to_pylist() == list(range(low, high))
            assert found["text"].to_pylist() == [f"t{i}" for i in range(low, high)]
            assert found["v"].to_pylist() == [[i, 0, 0, 0] for i in range(low, high)]
        ((_, (source,)),) = table.live.snapshot().groups
        assert isinstance(source, MemorySource)
        assert source.narrowed(Predicate.parse("n < 800", source.view.schema.plain)) is not None
