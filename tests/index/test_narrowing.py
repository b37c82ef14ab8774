"""The rows that a BTree leaves to test for a filter."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal.format.schema import TOMBSTONE, TableSchema
from lancewal.index import store as narrowing
from lancewal.index.kinds import BTreeParams, IndexSpec
from lancewal.index.store import IndexStore, Narrowed
from lancewal.predicate.predicate import Predicate

PLAIN = pa.schema([("n", pa.int64()), ("name", pa.string()), ("f", pa.float64())])
SCHEMA = TableSchema(PLAIN, ())
SPECS = [
    IndexSpec(f"{name}_idx", name, place, BTreeParams()) for place, name in enumerate(("n", "name", "f"))
]
COLUMNS = {name: name for name in PLAIN.names}
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
        left = store.narrowed(predicate, COLUMNS, bound)
    if left is not None:
        assert left.rows.tolist() == sorted(set(left.rows.tolist()))
        assert expected <= set(left.rows.tolist()) <= set(range(bound))


def many() -> tuple[IndexStore, pa.RecordBatch]:
    rows = stored([(i, f"name {i % 2}") for i in range(1000)])
    store = IndexStore(SPECS, SCHEMA)
    store.insert(rows, 0)
    return store, rows


def left_of(filter_: str, store: IndexStore, row_count: int = 1000) -> Narrowed | None:
    return store.narrowed(Predicate.parse(filter_, PLAIN), COLUMNS, row_count)


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
    assert store.narrowed(predicate, COLUMNS, 1000) is None
    assert store.narrowed(Predicate.parse("n = 7", PLAIN), dict.fromkeys(COLUMNS), 1000) is None
