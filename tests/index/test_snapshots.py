"""What a search holds in its hands does not change under it, whatever is inserted meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal.index import btree as runs
from lancewal.index import full_text as postings
from lancewal.index.btree import BytesRuns, NumberRuns, Range, values_array
from lancewal.index.full_text import Postings
from lancewal.index.kinds import VectorParams
from lancewal.index.vector import VectorIndex


@pytest.fixture(autouse=True, scope="module")
def _short_tails() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "NUMBER_FRESH", 3)
        patch.setattr(runs, "NUMBER_TAIL", 8)
        patch.setattr(runs, "BYTES_TAIL", 8)
        patch.setattr(postings, "_TAIL", 8)
        yield


def number_runs() -> tuple[Any, Callable[[Any, int], None], Callable[[Any], Any]]:
    def insert(index: NumberRuns, row: int) -> None:
        index.append(pa.array([row * 7 % 5]), np.array([row], np.int32))

    return NumberRuns(), insert, lambda index: index.between(Range(values_array([1], pa.int64()), None))


def bytes_runs() -> tuple[Any, Callable[[Any, int], None], Callable[[Any], Any]]:
    def insert(index: BytesRuns, row: int) -> None:
        index.append(pa.array([str(row * 7 % 5)]), np.array([row], np.int32))

    return BytesRuns(), insert, lambda index: index.equal_to(pa.array(["1", "3"]))


def token_postings() -> tuple[Any, Callable[[Any, int], None], Callable[[Any], Any]]:
    def insert(index: Postings, row: int) -> None:
        index.append(*(np.array([n], np.int32) for n in (row * 7 % 5, row, 0)))

    return Postings(True), insert, lambda index: [index.occurrences(token).rows for token in range(5)]


def vector_index() -> tuple[Any, Callable[[Any, int], None], Callable[[Any], Any]]:
    def insert(index: VectorIndex, row: int) -> None:
        vector = [float("inf"), 0.0] if row % 11 == 3 else [row * 7 % 5, row % 3]
        index.insert(pa.array([vector], pa.list_(pa.float32(), 2)), row)

    index = VectorIndex(VectorParams(2), segment_rows=300)
    return index, insert, lambda index: index.search([1, 1], 1000, 1000)


@pytest.mark.parametrize("make", [number_runs, bytes_runs, token_postings, vector_index])
@settings(max_examples=30)
@given(before=st.integers(0, 700), after=st.integers(1, 700))
def test_a_state_taken_before_insertions_answers_as_before(make: Any, before: int, after: int) -> None:
    index, insert, ask = make()
    if make is not vector_index:
        before, after = before // 10, after // 10 + 1
    for row in range(before):
        insert(index, row)
    taken = copy.copy(index)
    answer = [np.copy(part) for part in ask(taken)]
    for row in range(before, before + after):
        insert(index, row)
    again = ask(taken)
    assert len(again) == len(answer)
    assert all(np.array_equal(first, second) for first, second in zip(answer, again, strict=True))
    assert sum(map(len, ask(index))) >= sum(map(len, answer))
