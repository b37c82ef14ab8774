"""ordered_map: several calls at a time, results in order, nothing left running."""

from __future__ import annotations

import itertools
import threading

import pytest

from lancewal.parallel import ordered_map

PATIENCE_SECONDS = 30.0


@pytest.mark.parametrize("workers", [1, 2, 5, 50])
def test_results_come_in_the_order_asked(workers: int) -> None:
    assert list(ordered_map(lambda item: item * item, range(20), workers)) == [i * i for i in range(20)]


def test_no_items_give_no_results() -> None:
    assert list(ordered_map(str, [], 4)) == []


def test_calls_run_at_the_same_time() -> None:
    meeting = threading.Barrier(4, timeout=PATIENCE_SECONDS)
    # Each call waits for three others: one at a time would never end.
    assert sorted(ordered_map(lambda _: meeting.wait(), range(4), 4)) == [0, 1, 2, 3]


def test_the_first_result_is_not_held_back_by_a_slow_second_one() -> None:
    release = threading.Event()

    def call(item: int) -> int:
        if item == 1:
            assert release.wait(PATIENCE_SECONDS)
        return item

    results = ordered_map(call, range(2), 2)
    assert next(results) == 0
    release.set()
    assert list(results) == [1]


@pytest.mark.parametrize("workers", [1, 3])
def test_results_that_nobody_took_are_bounded(workers: int) -> None:
    asked = itertools.count()
    taken = 0

    def source() -> itertools.count[int]:
        return asked

    for _ in itertools.islice(ordered_map(lambda item: item, source(), workers), 10):
        taken += 1
    # The source has no end: only so many were ever taken from it.
    assert next(asked) <= taken + workers


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_comes_at_its_items_turn(workers: int) -> None:
    def call(item: int) -> int:
        if item == 2:
            raise KeyError(item)
        return item

    results = ordered_map(call, range(5), workers)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(KeyError):
        next(results)


def test_threads_end_with_an_iteration_that_was_left_early() -> None:
    release = threading.Event()
    begun: list[int] = []

    def call(item: int) -> int:
        begun.append(item)
        assert item == 0 or release.wait(PATIENCE_SECONDS)
        return item

    before = set(threading.enumerate())
    results = ordered_map(call, itertools.count(), 4)
    next(results)
    threads = set(threading.enumerate()) - before
    assert threads
    # Closing waits for nobody, drops what has not begun, and lets the rest end.
    results.close()  # type: ignore[attr-defined]
    begun_by_then = len(begun)
    release.set()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert len(begun) - begun_by_then <= 4


def test_one_worker_needs_no_thread() -> None:
    names = list(ordered_map(lambda _: threading.current_thread().name, range(2), 1))
    assert names == [threading.current_thread().name] * 2
