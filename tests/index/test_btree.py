"""Equality, sets, ranges and nulls against a scan, and against Lance's own filters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancewal.errors import InvalidInputError
from lancewal.index import btree as runs
from lancewal.index.btree import BTreeIndex

VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.integers(-5, 5) | st.sampled_from([-(2**63), 2**63 - 1]),
    pa.uint64(): st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1]),
    pa.float32(): st.sampled_from([-math.inf, -1.5, 0.0, 1.5, math.inf]),
    pa.float64(): st.sampled_from([-math.inf, -1e-300, 0.0, 1e-300, 2.5, math.inf]),
    pa.bool_(): st.booleans(),
    pa.string(): st.text("aé\U0001f98a", max_size=3),
    pa.large_string(): st.text("ab", max_size=3),
    pa.binary(): st.binary(max_size=2),
    pa.binary(2): st.binary(min_size=2, max_size=2),
    pa.date32(): st.dates(date(1969, 1, 1), date(1971, 1, 1)),
    pa.timestamp("us"): st.datetimes(datetime(1969, 1, 1), datetime(1971, 1, 1)),
}
typed_values = st.sampled_from(list(VALUES)).flatmap(
    lambda type_: st.tuples(
        st.just(type_), st.lists(st.lists(st.none() | VALUES[type_], max_size=6), max_size=6)
    )
)


@pytest.fixture(autouse=True, scope="module")
def _short_tails() -> Iterator[None]:
    """So that few rows make many runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "NUMBER_FRESH", 2)
        patch.setattr(runs, "NUMBER_TAIL", 4)
        patch.setattr(runs, "BYTES_TAIL", 4)
        yield


def index_of(values: list[Any], type_: pa.DataType, step: int = 3) -> BTreeIndex:
    index = BTreeIndex(type_)
    for start in range(0, len(values), step):
        index.insert(pa.array(values[start : start + step], type_), start)
    return index


@given(typed_values, st.data())
def test_answers_are_those_of_a_scan(typed: tuple[pa.DataType, list[list[Any]]], data: st.DataObject) -> None:
    type_, lists = typed
    index = BTreeIndex(type_)
    for values in lists:
        index.insert(pa.array(values, type_), index.rows)
    rows = [value for values in lists for value in values]
    bound = data.draw(st.integers(0, len(rows)))
    visible = list(enumerate(rows[:bound]))
    value = VALUES[type_]

    one = data.draw(value)
    assert index.equal_to([one]).below(bound).tolist() == [r for r, v in visible if v == one]
    several = data.draw(st.lists(st.none() | value, max_size=4))
    wanted = [v for v in several if v is not None]
    assert index.equal_to(several).below(bound).tolist() == [
        r for r, v in visible if v is not None and v in wanted
    ]
    assert index.nulls().below(bound).tolist() == [r for r, v in visible if v is None]

    low, high = data.draw(st.none() | value), data.draw(st.none() | value)
    with_low, with_high = data.draw(st.booleans()), data.draw(st.booleans())

    def inside(v: Any) -> bool:
        above = low is None or v > low or (with_low and v == low)
        return above and (high is None or v < high or (with_high and v == high))

    expected = [r for r, v in visible if v is not None and inside(v)]
    assert index.between(low, high, with_low, with_high).below(bound).tolist() == expected


FLOATS = [0.0, -0.0, math.nan, -math.nan, 1.0, math.inf, -math.inf, None, 1e-310]


def test_floats_compare_as_lances_filters_do(tmp_path: Path) -> None:
    dataset = lance.write_dataset(
        pa.table({"row": range(len(FLOATS)), "f": pa.array(FLOATS, pa.float64())}), tmp_path / "t"
    )
    index = index_of(FLOATS, pa.float64())
    bound = len(FLOATS)

    def by_lance(filter_: str) -> list[int]:
        return sorted(dataset.to_table(filter=filter_)["row"].to_pylist())

    assert index.equal_to([0.0]).below(bound).tolist() == by_lance("f = 0.0")
    assert index.equal_to([-0.0]).below(bound).tolist() == by_lance("f = -0.0")
    assert index.equal_to([math.nan]).below(bound).tolist() == by_lance("f = CAST('NaN' AS DOUBLE)")
    assert index.between(0.5).below(bound).tolist() == by_lance("f >= 0.5")
    assert index.between(None, 0.0, high_inclusive=False).below(bound).tolist() == by_lance("f < 0.0")
    assert index.between(-0.0, 1.0).below(bound).tolist() == by_lance("f BETWEEN -0.0 AND 1.0")
    assert index.between(None, math.nan, high_inclusive=False).below(bound).tolist() == by_lance(
        "f < CAST('NaN' AS DOUBLE)"
    )
    assert index.nulls().below(bound).tolist() == by_lance("f IS NULL")


def test_rows_handed_in_again_are_found_once() -> None:
    index = BTreeIndex(pa.int64())
    column = pa.array([7, None, 7, 8, 7, 7])
    index.insert(column, 0)
    index.insert(column, 0)
    index.insert(pa.array([7, 7, 9]), 4)
    assert index.equal_to([7]).below(10).tolist() == [0, 2, 4, 5]
    assert index.nulls().below(10).tolist() == [1]
    assert index.equal_to([9]).below(10).tolist() == [6]


def test_a_gap_a_wrong_type_and_a_wrong_value_are_refused() -> None:
    index = BTreeIndex(pa.int32())
    with pytest.raises(InvalidInputError, match="in order"):
        index.insert(pa.array([1], pa.int32()), 5)
    with pytest.raises(InvalidInputError, match="int64"):
        index.insert(pa.array([1], pa.int64()), 0)
    index.insert(pa.array([1], pa.int32()), 0)
    assert index.rows == 1
    for value in ("a", 1.5, 2**40):
        with pytest.raises(InvalidInputError, match="int32"):
            index.equal_to([value]).below(1)


def test_types_without_an_order_are_refused() -> None:
    for type_ in (pa.list_(pa.int64()), pa.decimal128(10, 2), pa.struct([("a", pa.int64())])):
        with pytest.raises(InvalidInputError, match="BTree"):
            BTreeIndex(type_)


def test_one_batch_larger_than_many_tails_is_found() -> None:
    values = [i * 37 % 1000 for i in range(1000)]
    index = BTreeIndex(pa.int64())
    index.insert(pa.array(values), 0)
    assert index.between(10, 19).below(1000).tolist() == [r for r, v in enumerate(values) if 10 <= v <= 19]


@pytest.mark.parametrize("type_", [pa.int64(), pa.string()])
def test_memory_grows_with_rows(type_: pa.DataType) -> None:
    def bytes_with(rows: int) -> int:
        return index_of([str(i) if type_ == pa.string() else i for i in range(rows)], type_, 20).memory_bytes

    assert bytes_with(2000) > bytes_with(20) + 1900 * 12


@pytest.mark.parametrize("type_", [pa.int64(), pa.string()])
def test_a_batch_that_failed_to_go_in_goes_in_once_the_next_time(
    type_: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batch(first: int) -> pa.Array:
        return pa.array(range(first, first + 3)).cast(type_)

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    index = BTreeIndex(type_)
    index.insert(batch(0), 0)
    with monkeypatch.context() as patch:
        # Every batch is sorted at once, and that fails.
        for name in ("NUMBER_FRESH", "NUMBER_TAIL", "BYTES_TAIL"):
            patch.setattr(runs, name, 0)
        for name in ("_sorted_numbers", "_sorted_bytes"):
            patch.setattr(runs, name, fail)
        with pytest.raises(MemoryError):
            index.insert(batch(3), 3)
    assert index.rows == 3
    index.insert(batch(3), 3)
    index.insert(batch(6), 6)
    assert index.between().below(9).tolist() == list(range(9))
    assert index.equal_to(batch(3)).below(9).tolist() == [3, 4, 5]
