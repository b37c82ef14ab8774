"""Conversions keep every value or name the first that they would change."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancewal.format.values import CastRefusedError, exactly

VECTOR = pa.list_(pa.float32(), 2)
NOON = dt.datetime(2020, 1, 1, 12)

#: Values, the type to convert to, and the row that cannot be.
LOSSES: dict[str, tuple[pa.Array, pa.DataType, int]] = {
    "double too large for a float": (pa.array([1.5, 1e300]), pa.float32(), 1),
    "double with more digits than a float": (pa.array([0.5, None, 0.1]), pa.float32(), 2),
    "double with more digits than half a float": (pa.array([0.1]), pa.float16(), 0),
    "float with more digits than half a float": (pa.array([0.1], pa.float32()), pa.float16(), 0),
    "integer beyond a double": (pa.array([1, 2**53 + 1]), pa.float64(), 1),
    "integer beyond half a float": (pa.array([2048, 2049]), pa.float16(), 1),
    "integer beyond eight bits": (pa.array([1, 300]), pa.int8(), 1),
    "unsigned beyond signed": (pa.array([2**63], pa.uint64()), pa.int64(), 0),
    "fraction to integer": (pa.array([1.0, 2.5]), pa.int64(), 1),
    "NaN to integer": (pa.array([float("nan")]), pa.int64(), 0),
    "number to truth": (pa.array([1, 0, 2]), pa.bool_(), 2),
    "double to decimal": (pa.array([0.25, 0.123]), pa.decimal128(5, 2), 1),
    "decimal to fewer places": (pa.array([Decimal("1.23")]), pa.decimal128(5, 1), 0),
    "decimal to float": (pa.array([Decimal("16777217")]), pa.float32(), 0),
    "decimal to integer": (pa.array([Decimal("1.5")]), pa.int64(), 0),
    "microseconds to milliseconds": (pa.array([NOON, NOON.replace(microsecond=1)]), pa.timestamp("ms"), 1),
    "time of a day": (pa.array([NOON.replace(hour=0), NOON]), pa.date32(), 1),
    "day of a time": (pa.array([NOON]), pa.time64("us"), 0),
    "duration": (pa.array([dt.timedelta(microseconds=1)]), pa.duration("s"), 0),
    "word to number": (pa.array(["1", "x"]), pa.int64(), 1),
    "digits beyond a float": (pa.array(["inf", "1e300"]), pa.float32(), 1),
    "digits beyond a double": (pa.array(["1e400"]), pa.float64(), 0),
    "digits of a double": (pa.array(["0.5", "0.1"]), pa.float32(), 1),
    "bytes that are no text": (pa.array([b"a", b"\xff"]), pa.string(), 1),
    "vector": (pa.array([[1.0, 2.0], None, [3.0, 0.1]]), VECTOR, 2),
    "vector of another size": (pa.array([[1.0, 2.0], [3.0]]), VECTOR, 1),
    "large list": (pa.array([None, [], [0.1]], pa.large_list(pa.float64())), pa.list_(pa.float32()), 2),
    "struct": (pa.array([{"a": 1.0}, None, {"a": 1e300}]), pa.struct([("a", pa.float32())]), 2),
    "field that is not there": (pa.array([{"a": 1, "b": 2}]), pa.struct([("a", pa.int8())]), 0),
    "dictionary": (pa.array([1.5, 0.1]).dictionary_encode(), pa.float32(), 1),
    "map": (
        pa.array([[("a", 1.5)], [("b", 0.1)]], pa.map_(pa.string(), pa.float64())),
        pa.map_(pa.string(), pa.float32()),
        1,
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_cast_that_would_change_a_value_names_its_row(case: str) -> None:
    column, target, row = LOSSES[case]
    with pytest.raises(CastRefusedError, match=f"row {row} is") as refused:
        exactly(column, target)
    assert refused.value.row == row
    # The same in a slice, whose rows are counted from its own start.
    with pytest.raises(CastRefusedError) as refused:
        exactly(pa.concat_arrays([column, column]).slice(row), target)
    assert refused.value.row == 0


KEPT: list[tuple[list[Any], pa.DataType, pa.DataType]] = [
    ([1.5, None, float("nan"), float("-inf"), -0.0], pa.float64(), pa.float32()),
    ([1.0, None, -3.0], pa.float64(), pa.int8()),
    ([2**53], pa.int64(), pa.float64()),
    ([Decimal("1.50")], pa.decimal128(5, 2), pa.decimal128(5, 1)),
    ([Decimal("0.1")], pa.decimal128(5, 2), pa.float64()),
    ([0.1], pa.float64(), pa.decimal128(5, 2)),
    (["1", None], pa.string(), pa.int64()),
    (["0.1", "-Infinity"], pa.string(), pa.float64()),
    ([True, None], pa.bool_(), pa.int8()),
    ([NOON], pa.timestamp("ns"), pa.timestamp("s")),
    ([dt.date(2020, 1, 1)], pa.date32(), pa.timestamp("us")),
    ([[1.0, 2.0], None], pa.large_list(pa.float64()), VECTOR),
    ([{"a": 1}, None], pa.struct([("a", pa.int64())]), pa.struct([("a", pa.int8()), ("b", pa.int8())])),
    (["a"], pa.string_view(), pa.large_string()),
    ([None, None], pa.null(), VECTOR),
]


@pytest.mark.parametrize(("values", "source", "target"), KEPT)
def test_cast_that_changes_nothing_is_taken(
    values: list[Any], source: pa.DataType, target: pa.DataType
) -> None:
    column = pa.array(values, source)
    assert exactly(column, target).equals(column.cast(target)) or "nan" in str(column)


def test_rounding_loses_digits_and_is_never_infinite() -> None:
    doubles = pa.array([0.1, None, float("inf"), 1e-300])
    rounded = exactly(doubles, pa.float32(), rounding=True)
    assert rounded.to_pylist() == [float(np.float32(0.1)), None, float("inf"), 0.0]
    for values in (pa.array([0.1, 1e39]), pa.array(["0.1", "1e39"]), pa.array([0.1, 70_000.0])):
        with pytest.raises(CastRefusedError, match="row 1 is"):
            exactly(values, pa.float16(), rounding=True)
    vectors = pa.array([[0.1, 0.2], [1e39, 0.0]])
    assert exactly(vectors[:1], VECTOR, rounding=True).to_pylist()[0] == pytest.approx([0.1, 0.2])
    with pytest.raises(CastRefusedError, match="row 1 is"):
        exactly(vectors, VECTOR, rounding=True)
    with pytest.raises(CastRefusedError):
        exactly(pa.array([2**24 + 1]), pa.float32(), rounding=True)
    with pytest.raises(CastRefusedError):
        exactly(pa.array([1.5]), pa.int64(), rounding=True)


_numbers = st.one_of(
    st.lists(st.none() | st.floats(), min_size=1, max_size=8).map(lambda v: pa.array(v, pa.float64())),
    st.lists(st.none() | st.floats(width=32), min_size=1, max_size=8).map(
        lambda v: pa.array(v, pa.float64())
    ),
    st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), min_size=1).map(lambda v: pa.array(v, pa.int64())),
    st.lists(st.none() | st.integers(-300, 300), min_size=1).map(lambda v: pa.array(v, pa.int64())),
)
_types = st.sampled_from(
    [
        *(pa.float16(), pa.float32(), pa.float64(), pa.int8(), pa.int64(), pa.uint64(), pa.bool_()),
        *(pa.decimal128(30, 4), pa.string()),
    ]
)


@given(_numbers, _types)
def test_what_is_converted_is_equal_to_what_was_given(column: pa.Array, target: pa.DataType) -> None:
    try:
        converted = exactly(column, target)
    except CastRefusedError:
        return
    for before, after in zip(column.to_pylist(), converted.to_pylist(), strict=True):
        if isinstance(after, str):
            after = type(before)(after)
        elif isinstance(after, Decimal):
            after = float(after) if isinstance(before, float) else after
        assert before == after or (before != before and after != after)
