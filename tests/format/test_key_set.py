"""Key sets answer as Python's sets do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal.format import key_set
from lancewal.format.key_set import KeySet
from lancewal.format.keys import key_values

_KEYS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "dense int64": (pa.int64(), st.integers(-50, 50)),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "bool": (pa.bool_(), st.booleans()),
    "string": (pa.string(), st.text(max_size=6)),
    "large_string": (pa.large_string(), st.text(max_size=6)),
    "binary": (pa.binary(), st.binary(max_size=20)),
}


@pytest.mark.parametrize("kind", _KEYS)
@settings(max_examples=40)
@given(data=st.data())
def test_membership_is_that_of_a_set(kind: str, data: st.DataObject) -> None:
    type_, values = _KEYS[kind]
    parts = data.draw(st.lists(st.lists(values, max_size=12), max_size=4))
    asked = data.draw(st.lists(values, max_size=12)) + [key for part in parts for key in part[:2]]
    whole = KeySet.of(pa.array(part, type_) for part in parts)
    united = KeySet.union(KeySet.of([pa.array(part, type_)]) for part in parts)
    known = {key for part in parts for key in part}
    expected = [key in known for key in asked]
    assert whole.contains(pa.array(asked, type_)).tolist() == expected
    assert united.contains(pa.array(asked, type_)).tolist() == expected
    assert len(whole) >= len(known)


def test_a_null_is_in_no_set_not_even_beside_a_zero() -> None:
    keys = KeySet.of([pa.array([0, 1])])
    assert keys.contains(pa.array([None, 0, 5])).tolist() == [False, True, False]


def test_slices_are_read_in_their_window() -> None:
    keys = KeySet.of([pa.array(["a", "b", "c"]).slice(1)])
    assert keys.contains(pa.array(["x", "a", "b", "c"]).slice(1)).tolist() == [False, True, True]


def test_keys_with_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_set, "_hashes", lambda values: np.full(len(values), 7, np.uint64))
    keys = KeySet.of([pa.array(["a", "b", "c"])])
    assert keys.contains(pa.array(["c", "d", "a"])).tolist() == [True, False, True]


def test_composite_keys_are_compared_whole() -> None:
    keys = KeySet.of([key_values([pa.array([1, 2]), pa.array(["x", "y"])])])
    asked = key_values([pa.array([1, 1, 2]), pa.array(["x", "y", "y"])])
    assert keys.contains(asked).tolist() == [True, False, True]


def test_the_empty_set_holds_nothing_and_joins_with_anything() -> None:
    assert KeySet.empty().contains(pa.array([1])).tolist() == [False]
    assert KeySet.of([]).contains(pa.array(["a"])).tolist() == [False]
    assert (KeySet.empty() | KeySet.of([pa.array(["a"])])).contains(pa.array(["a"])).tolist() == [True]
    assert KeySet.of([pa.array([1])]).contains(pa.array([], pa.int64())).tolist() == []


def test_extremes_of_the_type_do_not_wrap_around() -> None:
    low, high = -(2**63), 2**63 - 1
    assert KeySet.of([pa.array([low, high])]).contains(pa.array([low, 0, high])).tolist() == [
        True,
        False,
        True,
    ]
    assert KeySet.of([pa.array([low])]).contains(pa.array([high, low])).tolist() == [False, True]


@pytest.mark.parametrize("kind", [*_KEYS, "composite"])
@settings(max_examples=60)
@given(data=st.data())
def test_keys_are_superseded_as_a_set_of_those_seen_says(kind: str, data: st.DataObject) -> None:
    composite = kind == "composite"
    type_, values = (pa.int8(), st.integers(-2, 2)) if composite else _KEYS[kind]
    few = st.sampled_from(data.draw(st.lists(values, min_size=1, max_size=6)))
    levels = data.draw(st.lists(st.lists(few | values, max_size=8), max_size=12))
    arrays = [pa.array(level, type_) for level in levels]
    if composite:
        arrays = [key_values([array, array.cast(pa.string())]) for array in arrays]
    seen: set[Any] = set()
    for level, mask in zip(levels, key_set.superseded(arrays), strict=True):
        assert mask.tolist() == [key in seen for key in level]
        seen |= set(level)


def test_a_null_supersedes_nothing() -> None:
    levels = [pa.array([None, 1]), pa.array([None, 0]), pa.array([1, 0, None])]
    masks = [mask.tolist() for mask in key_set.superseded(levels)]
    assert masks == [[False, False], [False, False], [True, True, False]]
