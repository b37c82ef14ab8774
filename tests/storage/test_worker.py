from __future__ import annotations

import ctypes
import queue
import threading

from lancewal.storage import Worker
from tests.patience import PATIENCE, wait_until


def test_a_failing_step_does_not_end_the_worker() -> None:
    calls: list[int] = []
    enough = threading.Event()

    def step() -> float | None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise RuntimeError("the first step fails on purpose")
        enough.set()
        return None

    worker = Worker("flaky", step, retry_seconds=0.001)
    worker.kick()
    try:
        assert enough.wait(PATIENCE), "the worker did not go on after an error"
    finally:
        worker.stop()


def test_no_thread_before_the_first_kick_and_none_after_stop() -> None:
    ran = threading.Event()
    worker = Worker("lazy-worker", lambda: ran.set())
    assert not any(thread.name == "lazy-worker" for thread in threading.enumerate())
    worker.kick()
    assert ran.wait(PATIENCE)
    worker.stop()
    assert not any(thread.name == "lazy-worker" for thread in threading.enumerate())
    worker.kick()
    assert not any(thread.name == "lazy-worker" for thread in threading.enumerate())


def test_a_kick_during_a_step_is_not_lost() -> None:
    in_step, go_on, second = threading.Event(), threading.Event(), threading.Event()
    count = 0

    def step() -> float | None:
        nonlocal count
        count += 1
        if count == 1:
            in_step.set()
            assert go_on.wait(PATIENCE)
        else:
            second.set()
        return None

    worker = Worker("busy", step)
    worker.kick()
    try:
        assert in_step.wait(PATIENCE)
        worker.kick()
        go_on.set()
        assert second.wait(PATIENCE), "the kick during the first step was lost"
    finally:
        worker.stop()


def test_a_step_is_repeated_after_the_time_it_asked_for() -> None:
    done = threading.Event()
    count = 0

    def step() -> float | None:
        nonlocal count
        count += 1
        if count == 3:
            done.set()
            return None
        return 0.001

    worker = Worker("ticker", step)
    worker.kick()
    try:
        assert done.wait(PATIENCE)
    finally:
        worker.stop()


def test_a_worker_can_stop_itself() -> None:
    stopped = threading.Event()
    worker: Worker

    def step() -> float | None:
        worker.stop()
        stopped.set()
        return None

    worker = Worker("suicidal", step)
    worker.kick()
    assert stopped.wait(PATIENCE)
    worker.stop()
    assert worker.stopping


def test_a_worker_whose_thread_was_interrupted_in_its_sleep_never_worked_again() -> None:
    ran: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    worker = Worker("sleeper", lambda: ran.put(threading.current_thread()))
    worker.kick()
    first = ran.get(timeout=PATIENCE)
    assert first.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(first.ident), ctypes.py_object(SystemExit))

    def ended() -> bool:
        worker.kick()
        return not first.is_alive()

    wait_until(ended)
    worker.kick()
    while (last := ran.get(timeout=PATIENCE)) is first:
        worker.kick()
    assert last.is_alive()
    worker.stop()
