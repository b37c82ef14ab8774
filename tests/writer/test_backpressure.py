from __future__ import annotations

import logging
import threading

import pytest

from lancewal.errors import StorageError
from lancewal.writer import WriteStats
from lancewal.writer.state import Backpressure

PATIENCE = 10.0


def held_lock() -> threading.Lock:
    """What a put holds while it is under way."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def make(
    stats: WriteStats, held: list[int], relieve: object = None, log_interval: float = PATIENCE
) -> Backpressure:
    return Backpressure(
        100,
        log_interval,
        stats,
        unflushed=lambda: held[0],
        relieve=relieve or (lambda: None),  # type: ignore[arg-type]
        context={},
    )


def test_nobody_waits_under_the_limit() -> None:
    stats = WriteStats()
    make(stats, [99], relieve=lambda: pytest.fail("there is nothing to relieve")).admit(held_lock(), 1)
    assert stats.snapshot().backpressure_count == 0


def test_waits_until_enough_was_flushed_and_counts_once() -> None:
    stats, held = WriteStats(), [1000]
    pressure = make(stats, held)
    admitted = threading.Event()

    def put() -> None:
        pressure.admit(held_lock(), 1)
        admitted.set()

    thread = threading.Thread(target=put)
    thread.start()
    for left in (600, 200):
        held[0] = left
        pressure.wake()
        assert not admitted.is_set(), "admitted although the limit was still exceeded"
    held[0] = 50
    pressure.wake()
    assert admitted.wait(PATIENCE)
    thread.join()
    assert stats.snapshot().backpressure_count == 1


def test_an_error_while_waiting_reaches_the_waiter() -> None:
    broken = threading.Event()

    def relieve() -> None:
        if broken.is_set():
            raise StorageError("the writer is done for")

    stats = WriteStats()
    pressure = make(stats, [1000], relieve)
    errors: list[BaseException] = []

    def put() -> None:
        try:
            pressure.admit(held_lock(), 1)
        except StorageError as error:
            errors.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    broken.set()
    pressure.wake()
    thread.join(PATIENCE)
    assert [str(error) for error in errors] == ["the writer is done for"]


def test_a_wake_between_the_check_and_the_wait_is_not_missed() -> None:
    held = [1000]
    pressure: Backpressure
    turns: list[int] = []

    def relieve() -> None:
        turns.append(1)
        if len(turns) == 1:
            # An error or a flush that comes right here must lead to another turn.
            pressure.wake()
        else:
            held[0] = 0

    pressure = make(WriteStats(), held, relieve)
    pressure.admit(held_lock(), 1)
    assert len(turns) == 2


def test_a_long_wait_is_logged_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    held, turns = [1000], []

    def relieve() -> None:
        turns.append(1)
        if len(turns) == 3:
            held[0] = 0

    with caplog.at_level(logging.WARNING):
        make(WriteStats(), held, relieve, log_interval=0.001).admit(held_lock(), 1)
    assert "1000 unflushed bytes, limit 100" in caplog.records[0].getMessage()
