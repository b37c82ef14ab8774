"""One budget for what a process keeps: what goes first, and that it is never exceeded."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancewal.errors import InvalidInputError
from lancewal.storage import cache as module
from lancewal.storage.cache import CACHE_VARIABLE, Cache, Shelf

ENTRY = module._ENTRY_BYTES


def test_what_was_not_used_for_longest_goes_first_whichever_shelf_it_lies_on() -> None:
    cache = Cache(3 * (ENTRY + 10))
    one, two = Shelf[str, str](cache), Shelf[str, str](cache)
    one.put("a", "A", 10)
    two.put("b", "B", 10)
    one.put("c", "C", 10)
    assert one.get("a") == "A"
    two.put("d", "D", 10)
    assert (one.get("a"), two.get("b"), one.get("c"), two.get("d")) == ("A", None, "C", "D")


def test_shelves_make_room_for_a_lease_and_no_lease_exceeds_the_budget() -> None:
    cache = Cache(1000)
    shelf = Shelf[str, str](cache)
    shelf.put("a", "A", 400)
    lease = cache.lease(900)
    assert lease is not None
    assert shelf.get("a") is None
    assert cache.used_bytes == 900
    assert cache.lease(101) is None
    shelf.put("b", "B", 400)
    assert shelf.get("b") is None
    del lease
    gc.collect()
    assert cache.free_bytes == 1000
    assert cache.lease(1000) is not None


def test_what_is_larger_than_the_budget_pushes_nothing_out() -> None:
    cache = Cache(1000)
    shelf = Shelf[str, str](cache)
    shelf.put("a", "A", 10)
    shelf.put("b", "B", 1001)
    assert (shelf.get("a"), shelf.get("b")) == ("A", None)


def test_what_is_made_once_is_found_again() -> None:
    shelf, made = Shelf[str, list[int]](Cache(10_000)), []

    def make() -> list[int]:
        made.append(1)
        return [1, 2]

    assert shelf.get_or_make("a", make, len) is shelf.get_or_make("a", make, len)
    assert made == [1]
    assert shelf.remove("a") == [1, 2]
    assert len(shelf) == 0


def test_a_budget_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "1 GB")
    with pytest.raises(InvalidInputError, match="LANCEWAL_CACHE_BYTES must be a number of bytes"):
        Cache().lease(1)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "remove", "lease", "return"]), st.integers(0, 5), st.integers(0, 900)
    ),
    max_size=60,
)


@given(STEPS)
def test_the_budget_holds_and_what_is_kept_is_what_was_put(steps: list[tuple[str, int, int]]) -> None:
    cache = Cache(2000)
    shelves = [Shelf[int, object](cache), Shelf[int, object](cache)]
    put: dict[tuple[int, int], object] = {}
    leases: list[object] = []
    for step, key, num_bytes in steps:
        shelf = shelves[key % 2]
        if step == "put":
            put[key % 2, key] = value = object()
            shelf.put(key, value, num_bytes)
        elif step == "get":
            assert shelf.get(key) in (None, put.get((key % 2, key)))
        elif step == "remove":
            shelf.remove(key)
            assert shelf.get(key) is None
        elif step == "lease":
            leases.append(cache.lease(num_bytes))
        else:
            leases.clear()
        assert cache.used_bytes <= 2000
    leases.clear()
    for shelf in shelves:
        shelf.clear()
    assert cache.used_bytes == 0


class InterruptedKey:
    """A key whose hash is interrupted when it is asked for the ``nth`` time; Ctrl-C may come there."""

    left: ClassVar[int] = 0

    def __hash__(self) -> int:
        InterruptedKey.left -= 1
        if InterruptedKey.left == 0:
            raise KeyboardInterrupt
        return 1

    def __eq__(self, other: object) -> bool:
        return self is other


@pytest.mark.parametrize("call", ["put", "put again", "remove", "make room"])
def test_what_was_interrupted_while_it_was_kept_could_never_be_looked_up_again(call: str) -> None:
    """A value without its entry: every later look raised KeyError."""
    nth = 1
    while True:
        cache = Cache(4 * ENTRY)
        shelf, other = Shelf[InterruptedKey, str](cache), Shelf[str, str](cache)
        key = InterruptedKey()
        if call != "put":
            shelf.put(key, "A", 10)
        InterruptedKey.left = nth
        with suppress(KeyboardInterrupt):
            if call == "remove":
                shelf.remove(key)
            elif call == "make room":
                other.put("large", "B", 3 * ENTRY)
            else:
                shelf.put(key, "A", 10)
        done = InterruptedKey.left > 0
        InterruptedKey.left = 0
        assert shelf.get(key) in ("A", None)
        shelf.put(key, "C", 10)
        assert shelf.get(key) == "C"
        shelf.clear()
        other.clear()
        shelf.remove(key)
        assert cache.used_bytes == 0
        if done:
            return
        nth += 1
