"""ordered_map: several calls at a time, results in order, nothing left running."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lancewal.storage.parallel import Bell, Crew, Once, Room, Task, beside, in_thread, ordered_map
from tests.patience import PATIENCE


@pytest.mark.parametrize("workers", [1, 2, 5, 50])
def test_results_come_in_the_order_asked(workers: int) -> None:
    assert list(ordered_map(lambda item: item * item, range(20), workers)) == [i * i for i in range(20)]


def test_no_items_give_no_results() -> None:
    assert list(ordered_map(str, [], 4)) == []


def test_calls_run_at_the_same_time() -> None:
    meeting = threading.Barrier(4, timeout=PATIENCE)
    # Each call waits for three others: one at a time would never end.
    assert sorted(ordered_map(lambda _: meeting.wait(), range(4), 4)) == [0, 1, 2, 3]


def test_the_first_result_is_not_held_back_by_a_slow_second_one() -> None:
    release = threading.Event()

    def call(item: int) -> int:
        if item == 1:
            assert release.wait(PATIENCE)
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
        assert item == 0 or release.wait(PATIENCE)
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
        # One may be about to start still.
        while thread.ident is None:
            time.sleep(0.001)
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert len(begun) - begun_by_then <= 4


def test_one_worker_needs_no_thread() -> None:
    names = list(ordered_map(lambda _: threading.current_thread().name, range(2), 1))
    assert names == [threading.current_thread().name] * 2


# ---------------------------------------------------------------- waiting


def test_a_bell_wakes_all_who_wait() -> None:
    bell, things = Bell(), [0]
    woken: list[bool] = []
    threads = [
        threading.Thread(target=lambda: woken.append(bell.wait_for(lambda: things[0] == 1, PATIENCE)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    things[0] = 1
    bell.ring()
    for thread in threads:
        thread.join(PATIENCE)
    assert woken == [True] * 4
    assert not bell._waiting


def test_who_was_never_rung_for_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever should have rung was interrupted before it could."""
    monkeypatch.setattr("lancewal.storage.parallel.LOOK_AGAIN_SECONDS", 0.001)
    looks = itertools.count()
    assert Bell().wait_for(lambda: next(looks) > 20)


def test_a_wait_that_is_not_long_enough_says_so() -> None:
    assert not Bell().wait_for(lambda: False, 0.001)


def test_a_call_that_is_gone_without_leaving_takes_up_no_room() -> None:
    room = Room(10)
    gone, next_one = threading.Lock(), threading.Lock()
    with gone:
        room.enter(gone, 8)
        assert room.taken == 8
    with next_one:
        room.enter(next_one, 8)
        assert room.taken == 8
    room.leave(next_one)
    room.wait_until_empty()


def test_calls_wait_for_room_and_one_that_is_too_large_goes_alone() -> None:
    room, order = Room(10), []
    first = threading.Lock()

    def second() -> None:
        call = threading.Lock()
        with call:
            room.enter(call, 100)
            order.append("second")
        room.leave(call)

    with first:
        room.enter(first, 1)
        thread = threading.Thread(target=second)
        thread.start()
        while not room._left._waiting:
            threading.Event().wait(0.001)
        order.append("first")
    room.leave(first)
    thread.join(PATIENCE)
    assert order == ["first", "second"]


def test_a_task_gives_what_its_call_gave_or_raised() -> None:
    def fail() -> None:
        raise KeyError("no")

    assert in_thread(lambda: 7, "test").result() == 7
    with pytest.raises(KeyError):
        in_thread(fail, "test").result()


@pytest.mark.parametrize("at_once", [False, True])
def test_an_error_of_a_call_beside_comes_where_its_result_is_asked_for(at_once: bool) -> None:
    def fail() -> None:
        raise ValueError("no")

    where: list[threading.Thread] = []
    beside(lambda: where.append(threading.current_thread()), at_once=at_once).result()
    assert (where[0] is threading.current_thread()) is not at_once
    failed = beside(fail, at_once=at_once)
    with pytest.raises(ValueError, match="no"):
        failed.result()


def test_a_value_that_several_threads_need_is_read_once_and_again_after_an_error() -> None:
    answers: list[Exception | str] = [ValueError("not yet"), "found"]
    reads: list[int] = []

    def read() -> str:
        reads.append(len(reads))
        answer = answers[len(reads) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    value = Once(read)
    with pytest.raises(ValueError, match="not yet"):
        value.get()
    assert list(ordered_map(lambda _: value.get(), range(8), 8)) == ["found"] * 8
    assert len(reads) == 2


def test_a_task_that_was_dropped_in_time_is_never_run() -> None:
    ran: list[int] = []
    task = Task(lambda: ran.append(1))
    assert task.drop()
    task.run()
    assert not ran
    assert not task.drop(), "it is over"


def test_without_a_thread_to_be_had_the_caller_works_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("lancewal.storage.parallel.start_thread", none_left)
    assert list(ordered_map(lambda item: item + 1, range(5), 3)) == [1, 2, 3, 4, 5]
    assert in_thread(threading.get_ident, "test").result() == threading.get_ident()


def test_a_crew_has_no_more_threads_than_it_needs_and_ends_them() -> None:
    crew = Crew(8, "test-crew")
    for number in range(5):
        task = Task(lambda: number)  # noqa: B023
        crew.take(task)
        assert task.result() == number
    assert len([t for t in threading.enumerate() if t.name.startswith("test-crew")]) <= 5
    crew.dismiss(wait=True)
    assert not [t for t in threading.enumerate() if t.name.startswith("test-crew")]


EXITS = """
import sys, time
import lance, pyarrow as pa
from lancewal.storage import Crew, Task, Worker, in_thread

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1)  # so long does the interpreter take to shut down

slow, uri = Slow(), sys.argv[2]
lance.write_dataset(pa.table({"x": [1]}), uri)
end = time.monotonic() + 2

def read():
    while time.monotonic() < end:
        lance.dataset(uri).count_rows()

match sys.argv[1]:
    case "task":
        in_thread(read, "t")
    case "crew":
        Crew(1, "c").take(Task(read))
    case "worker":
        Worker("w", read).kick()
time.sleep(0.2)
"""


@pytest.mark.parametrize("kind", ["task", "crew", "worker"])
def test_a_process_aborted_that_exited_while_a_background_thread_was_in_native_code(
    tmp_path: Path, kind: str
) -> None:
    """The thread came back while the interpreter shut down, and was unwound through Rust: SIGABRT."""
    command = [sys.executable, "-c", EXITS, kind, str(tmp_path / "t")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
