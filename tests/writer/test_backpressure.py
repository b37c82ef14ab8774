from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable

import pytest

from lancewal.errors import StorageError
from lancewal.writer import WriteStats
from lancewal.writer.group_commit import Put, PutState
from lancewal.writer.intake import Rows
from lancewal.writer.shard_writer import Backpressure
from lancewal.writer.state import WriterState
from tests.patience import PATIENCE


def put_under_way(num_bytes: int = 1) -> Put:
    """A put whose thread is there."""
    put = Put(Rows([], 0, num_bytes), None)  # type: ignore[arg-type]
    put.present.acquire()
    return put


class Memory:
    def __init__(self, held: list[int], relieve: Callable[[], None]) -> None:
        self.held = held
        self.make_room = relieve
        self.bytes_at_last_put = held[0]

    @property
    def unflushed_bytes(self) -> int:
        return self.held[0]


class Pressure(Backpressure):
    def wake(self) -> None:
        self._state.note_change()


def make(
    stats: WriteStats,
    held: list[int],
    relieve: Callable[[], None] = lambda: None,
    log_interval: float = PATIENCE,
) -> Pressure:
    return Pressure(100, log_interval, Memory(held, relieve), WriterState(uuid.uuid4(), 1), stats)


def test_nobody_waits_under_the_limit() -> None:
    stats = WriteStats()
    make(stats, [99], relieve=lambda: pytest.fail("there is nothing to relieve")).admit(put_under_way())
    assert stats.snapshot().backpressure_count == 0


def test_what_was_flushed_since_the_last_put_holds_nobody_back() -> None:
    stats = WriteStats()
    pressure = make(stats, [50], relieve=lambda: pytest.fail("there is nothing to relieve"))
    pressure._memory.bytes_at_last_put = 1000  # type: ignore[misc]
    pressure.admit(put_under_way())
    assert stats.snapshot().backpressure_count == 0


def test_waits_until_enough_was_flushed_and_counts_once() -> None:
    stats, held = WriteStats(), [1000]
    pressure = make(stats, held)
    admitted = threading.Event()

    def put() -> None:
        pressure.admit(put_under_way())
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
            pressure.admit(put_under_way())
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
    pressure: Pressure
    turns: list[int] = []

    def relieve() -> None:
        turns.append(1)
        if len(turns) == 1:
            # An error or a flush that comes right here must lead to another turn.
            pressure.wake()
        else:
            held[0] = 0

    pressure = make(WriteStats(), held, relieve)
    pressure.admit(put_under_way())
    assert len(turns) == 2


def test_a_long_wait_is_logged_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    held, turns = [1000], []

    def relieve() -> None:
        turns.append(1)
        if len(turns) == 3:
            held[0] = 0

    with caplog.at_level(logging.WARNING):
        make(WriteStats(), held, relieve, log_interval=0.001).admit(put_under_way())
    assert "1000 unflushed bytes, limit 100" in caplog.records[0].getMessage()


def test_an_error_that_is_latched_while_a_put_waits_reaches_it() -> None:
    pressure = make(WriteStats(), [1000])
    errors: list[BaseException] = []

    def put() -> None:
        try:
            pressure.admit(put_under_way())
        except StorageError as error:
            errors.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    pressure._state.fail(StorageError("the disk is gone"), memory_ahead_of_log=True, ends_log=True)
    thread.join(PATIENCE)
    assert [str(error) for error in errors] == ["the disk is gone"]


def test_a_put_counts_from_its_admission_until_its_rows_are_in_memory_or_its_thread_is_gone() -> None:
    pressure = make(WriteStats(), [0])
    queued, interrupted = put_under_way(70), put_under_way(20)
    pressure.admit(queued)
    pressure.admit(interrupted)
    assert pressure.let_in_bytes == 90
    queued.state = PutState.QUEUED
    assert pressure.let_in_bytes == 20
    interrupted.present.release()
    assert pressure.let_in_bytes == 0
    pressure.admit(put_under_way())
    assert interrupted not in pressure.let_in, "its rows stayed in memory"
