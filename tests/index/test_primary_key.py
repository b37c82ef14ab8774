"""Last write wins, for every bound, against a model that looks at all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lancewal.errors import InvalidInputError
from lancewal.format.keys import key_values
from lancewal.index import primary_key
from lancewal.index.primary_key import PrimaryKeyIndex

INT64 = pa.int64()
SINGLE = {
    pa.int64(): st.integers(-3, 3),
    pa.uint64(): st.sampled_from([0, 1, 2**63, 2**64 - 1]),
    pa.string(): st.sampled_from(["", "a", "b", "ab", "é"]),
    pa.large_binary(): st.sampled_from([b"", b"\0", b"\xff"]),
    pa.bool_(): st.booleans(),
}
batches_of_keys = st.sampled_from(list(SINGLE)).flatmap(
    lambda type_: st.tuples(st.just(type_), st.lists(st.lists(SINGLE[type_], max_size=6), max_size=8))
)


def batch(keys: Sequence[Any], type_: pa.DataType = INT64) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(keys, type_)})


def expected_live(keys: Sequence[Any], bound: int) -> list[bool]:
    return [keys[row] not in keys[row + 1 : bound] for row in range(bound)]


@pytest.fixture(params=["objects", "runs", "words that many keys share"])
def kept_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few keys there are: Python objects, or runs, which tell keys with the same word apart."""
    if request.param != "objects":
        monkeypatch.setattr(primary_key, "_MAX_OBJECTS", 2)
        monkeypatch.setattr(primary_key, "_FAN_OUT", 2)
    if request.param == "words that many keys share":
        words = primary_key.key_words

        def shared(keys: pa.Array) -> Any:
            return words(keys) if pa.types.is_primitive(keys.type) else words(keys) % np.uint64(2)

        monkeypatch.setattr(primary_key, "key_words", shared)


@pytest.mark.usefixtures("kept_as")
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(batches_of_keys, st.data())
def test_newest_rows_are_those_of_a_scan_for_every_bound(
    typed: tuple[pa.DataType, list[list[Any]]], data: st.DataObject
) -> None:
    type_, lists = typed
    index = PrimaryKeyIndex(["id"])
    for keys in lists:
        index.insert(batch(keys, type_), index.rows)
    rows = [key for keys in lists for key in keys]
    assert index.rows == len(rows)
    for bound in range(len(rows) + 1):
        assert index.live_mask(bound).tolist() == expected_live(rows, bound)
    bound = data.draw(st.integers(0, len(rows)))
    wanted = data.draw(st.lists(SINGLE[type_], max_size=5))
    positions = [max((r for r in range(bound) if rows[r] == key), default=-1) for key in wanted]
    assert index.newest(wanted, bound).tolist() == positions
    assert index.newest(pa.array(wanted, type_), bound).tolist() == positions


@pytest.mark.usefixtures("kept_as")
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["x", "y"])), max_size=20))
def test_composite_keys_are_told_apart_by_all_their_columns(rows: list[tuple[int, str]]) -> None:
    columns = {
        "a": pa.array([a for a, _ in rows], pa.int32()),
        "b": pa.array([b for _, b in rows], pa.string()),
    }
    index = PrimaryKeyIndex(["a", "b"])
    index.insert(pa.record_batch(columns), 0)
    assert index.live_mask(len(rows)).tolist() == expected_live(rows, len(rows))
    wanted = key_values([pa.array([1], pa.int32()), pa.array(["y"])])
    newest = max((row for row, key in enumerate(rows) if key == (1, "y")), default=-1)
    assert index.newest(wanted, len(rows)).tolist() == [newest]


@pytest.mark.usefixtures("kept_as")
def test_a_null_key_is_a_key_of_its_own() -> None:
    index = PrimaryKeyIndex(["id"])
    index.insert(batch([None, 0, None]), 0)
    assert index.live_mask(3).tolist() == [False, True, True]
    index.insert(batch([1, 2, 3, None]), 3)
    assert index.newest(pa.array([None, 0, 3, 4], INT64), 7).tolist() == [6, 1, 5, -1]
    assert index.newest(pa.array([None], INT64), 6).tolist() == [2]


def test_the_same_rows_in_fewer_batches_are_in_already() -> None:
    index = PrimaryKeyIndex(["id"])
    index.catch_up([batch([1]), batch([2, 1])])
    index.catch_up([batch([1, 2, 1]), batch([2])])
    index.catch_up([batch([1, 2, 1]), batch([2]), batch([1])])
    assert index.rows == 5
    assert index.live_mask(5).tolist() == [False, False, False, True, True]


def test_many_keys_take_few_bytes_each() -> None:
    index = PrimaryKeyIndex(["id"])
    rows = 400_000
    index.insert(batch(range(rows)), 0)
    assert index.newest([0, rows // 2, rows - 1, rows], rows).tolist() == [0, rows // 2, rows - 1, -1]
    # A word and a row for the key; the row before and the one after, whose arrays double.
    assert index.memory_bytes / rows < 60
    assert len(index._runs) <= 5


def test_replayed_rows_do_not_replace_themselves() -> None:
    index = PrimaryKeyIndex(["id"])
    index.insert(batch([1, 2]), 0)
    index.insert(batch([1, 2]), 0)
    assert index.rows == 2
    assert index.live_mask(2).all()
    index.insert(batch([1, 2, 3]), 0)
    assert index.rows == 3
    assert index.newest([1, 2, 3], 3).tolist() == [0, 1, 2]


def test_a_gap_is_refused() -> None:
    index = PrimaryKeyIndex(["id"])
    with pytest.raises(InvalidInputError, match="in order"):
        index.insert(batch([1]), 1)


def test_a_bound_above_the_rows_is_refused_rather_than_answered_from_too_few() -> None:
    index = PrimaryKeyIndex(["id"])
    index.insert(batch([1]), 0)
    with pytest.raises(InvalidInputError, match="bound 2"):
        index.live_mask(2)
    with pytest.raises(InvalidInputError, match="bound 2"):
        index.newest([1], 2)


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), max_size=8), st.data())
def test_catching_up_from_any_prefix_equals_inserting(lists: list[list[int]], data: st.DataObject) -> None:
    batches = [batch(keys) for keys in lists]
    rows = [key for keys in lists for key in keys]
    lazy = PrimaryKeyIndex(["id"])
    for _ in range(3):
        lazy.catch_up(batches[: data.draw(st.integers(0, len(batches)))])
        if data.draw(st.booleans()) and lazy.rows < len(rows):
            lazy.insert(batch(rows[lazy.rows : lazy.rows + 1]), lazy.rows)
    lazy.catch_up([pa.record_batch({"id": pa.array(rows, pa.int64())})])
    lazy.catch_up(batches)
    assert lazy.live_mask(len(rows)).tolist() == expected_live(rows, len(rows))


def test_memory_grows_with_rows_and_with_the_length_of_keys() -> None:
    def bytes_with(keys: Sequence[Any], type_: pa.DataType) -> int:
        index = PrimaryKeyIndex(["id"])
        index.insert(batch(keys, type_), 0)
        return index.memory_bytes

    assert bytes_with(range(1000), pa.int64()) > bytes_with(range(10), pa.int64()) + 990 * 80
    long = [f"{i:0100}" for i in range(1000)]
    short = [f"{i:04}" for i in range(1000)]
    assert bytes_with(long, pa.string()) - bytes_with(short, pa.string()) >= 96_000


def test_readers_with_an_old_bound_are_not_disturbed_by_later_versions() -> None:
    index = PrimaryKeyIndex(["id"])
    index.insert(batch(range(100)), 0)
    before = index.live_mask(100)
    index.insert(batch(range(0, 100, 2)), 100)
    assert np.array_equal(index.live_mask(100), before)
    assert index.newest([4, 5], 100).tolist() == [4, 5]
    assert index.newest([4, 5], 150).tolist() == [102, 5]


class _Watched(PrimaryKeyIndex):
    """Lets something happen whenever keys move from the dictionary to a run, and before it is looked at."""

    happening: Callable[[], object] = staticmethod(lambda: None)

    def _get(self, name: str) -> Any:
        self.happening()
        return self.__dict__[name]

    def _set(self, name: str, value: Any) -> None:
        self.happening()
        self.__dict__[name] = value
        self.happening()

    _newest = property(lambda self: self._get("keys"), lambda self, value: self._set("keys", value))
    _runs = property(lambda self: self._get("sorted"), lambda self, value: self._set("sorted", value))


def test_a_key_is_found_at_every_step_of_its_move_to_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primary_key, "_MAX_OBJECTS", 2)
    index = _Watched(["id"])
    index.insert(pa.record_batch({"id": [1, 2]}), 0)
    found: list[list[int]] = []

    def look() -> None:
        index.happening = lambda: None
        found.append(index.newest([1, 2], 2).tolist())
        index.happening = look

    index.happening = look
    index.insert(pa.record_batch({"id": [3]}), 2)
    assert len(found) > 4
    assert found == [[0, 1]] * len(found)


def test_a_key_that_moved_while_it_was_looked_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primary_key, "_MAX_OBJECTS", 2)
    for step in range(4):
        index = _Watched(["id"])
        index.insert(pa.record_batch({"id": [1, 2]}), 0)
        steps = iter(range(4))

        def move() -> None:
            if next(steps, None) == step:  # noqa: B023
                index.happening = lambda: None  # noqa: B023
                index.insert(pa.record_batch({"id": [3]}), 2)  # noqa: B023

        index.happening = move
        assert index.newest([1, 2], 2).tolist() == [0, 1]
