"""Many threads put through one writer: what their leader does for them must not show."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pyarrow as pa
import pytest

import lancewal.storage.parallel
import lancewal.writer.group_commit
from lancewal.base.table import BaseTable
from lancewal.errors import InvalidInputError, LanceWalError, OutcomeUnknownError, StorageError
from lancewal.index.kinds import BTreeParams, IndexSpec
from lancewal.shard import ShardManifestStore, WalTailer
from lancewal.storage import ObjectStore
from lancewal.writer import ShardWriter
from lancewal.writer.group_commit import MOST_GATHER_SECONDS, CommitLog, Put, Waiter
from lancewal.writer.shard_writer import Backpressure
from lancewal.writer.state import WriterState, without_frames
from tests.faults import FaultyStore, Pause
from tests.patience import PATIENCE, wait_until
from tests.tables import APPEND_ONLY, abandon, ids, open_writer, rows

KIB = 1024


def faulty_store(base: BaseTable) -> FaultyStore:
    return FaultyStore(ObjectStore.from_uri(base.uri, fsync=False))


@contextmanager
def stalled(writer: ShardWriter, store: FaultyStore) -> Iterator[Pause]:
    """A first put is inside its WAL write until the block ends."""
    with store.faults.pause("put_if_absent", where="/wal/") as pause:
        first = threading.Thread(target=writer.put, args=(rows(0, 1, schema=writer.schema),))
        first.start()
        pause.wait_until_reached()
        yield pause
    first.join(PATIENCE)
    assert not first.is_alive()


def big(number: int, size: int = 100 * KIB) -> pa.RecordBatch:
    return pa.record_batch([pa.array([number]), pa.array(["x" * size])], schema=APPEND_ONLY)


@pytest.mark.parametrize("memtable", [True, False], ids=["memtable", "wal only"])
def test_puts_that_stand_in_line_count_for_backpressure(append_only: BaseTable, memtable: bool) -> None:
    """A slow WAL write let in as many puts as there were threads, whatever the limit."""
    store = faulty_store(append_only)
    limit = 400 * KIB
    writer = open_writer(
        append_only,
        store=store,
        enable_memtable=memtable,
        max_memtable_size=limit,
        max_unflushed_memtable_bytes=limit,
    )
    threads = []
    pressure: Backpressure = writer._backpressure
    with stalled(writer, store):
        for number in range(1, 21):
            before = pressure.let_in_bytes
            threads.append(threading.Thread(target=writer.put, args=(big(number),)))
            threads[-1].start()
            wait_until(
                lambda: pressure.let_in_bytes > before or pressure.let_in_bytes >= limit,  # noqa: B023
                "put in line",
            )
        assert limit - 110 * KIB <= pressure.let_in_bytes <= limit + 110 * KIB
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a put that waited for room was never woken"
    assert pressure.let_in_bytes == 0
    assert writer._log.durable_position == 21
    writer.close()


def test_a_put_that_waits_for_room_goes_on_with_the_next_entry(append_only: BaseTable) -> None:
    """In WAL-only mode nobody woke it before ``backpressure_log_interval`` had passed."""
    writer = open_writer(
        append_only,
        enable_memtable=False,
        max_unflushed_memtable_bytes=300 * KIB,
        backpressure_log_interval=timedelta(hours=1),
    )

    def work(number: int) -> None:
        for _ in range(10):
            writer.put(big(number))

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    writer.close()


@pytest.mark.parametrize(
    "wrong",
    [
        pa.record_batch({"id": [1], "other": ["x"]}),
        pa.record_batch({"id": pa.array([None], pa.int64()), "name": ["x"]}),
        pa.record_batch({"id": pa.array([], pa.int64()), "name": pa.array([], pa.string())}),
        [],
    ],
    ids=["unknown column", "null key", "empty batch", "no batch"],
)
def test_wrong_rows_are_refused_at_once_whatever_the_store_does(base: BaseTable, wrong: object) -> None:
    """They stood in line behind a stalled write, and got its error."""
    store = faulty_store(base)
    writer = open_writer(base, store=store)
    with stalled(writer, store), pytest.raises(InvalidInputError):
        writer.put(wrong)
    assert ids(writer.scan()) == [0]
    writer.close()
    with pytest.raises(InvalidInputError):
        writer.put(wrong)


def test_a_failed_writer_that_is_dropped_is_collected(
    base: BaseTable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its log kept the puts that the failure had met, and through them the writer."""
    caplog.set_level(logging.CRITICAL)  # records of the failure would keep its frames
    monkeypatch.setattr(lancewal.writer.group_commit, "RETRY_PAUSE_SECONDS", 0.0)
    ended: list[type] = []

    def put(writer: ShardWriter, number: int) -> None:
        try:
            writer.put(rows(number, 1))
        except StorageError as error:
            ended.append(type(error))

    def fail_while_three_wait(writer: ShardWriter) -> None:
        appender = writer._log._appender
        append = appender.append_encoded
        entries = 0

        def fail(data: memoryview) -> int:
            nonlocal entries
            entries += 1
            if entries > 1:
                raise StorageError("the disk is gone")
            wait_until(lambda: len(writer._log._line) == 3, "puts in line")
            return append(data)

        appender.append_encoded = fail  # type: ignore[method-assign]
        threads = [threading.Thread(target=put, args=(writer, number)) for number in (1, 2, 3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        del appender.append_encoded

    writer = open_writer(base)
    writer.put(rows(0, 1))
    fail_while_three_wait(writer)
    assert ended == [StorageError] * 3
    kept = weakref.ref(writer)
    del writer
    gc.collect()
    assert kept() is None


@pytest.mark.timeout(60)
def test_errors_that_cause_each_other_do_not_keep_the_leader_busy_for_ever() -> None:
    one, other = StorageError("one"), StorageError("other")
    try:
        raise one from other
    except StorageError:
        other.__cause__ = one
    assert without_frames(one) is one
    assert one.__traceback__ is None


def test_an_interrupted_lead_does_not_stay_with_one_that_has_gone() -> None:
    """Ctrl-C between waking the next in line and taking it out of the line: it woke with its rows
    durable, passed the lead on to itself, and went; everybody after it waited for ever."""
    from tests.writer.test_commit_log import Fixture

    fixture = Fixture(ObjectStore.from_uri("memory://interrupted-lead"))
    log = fixture.log
    gone = threading.Event()
    interrupted = False
    leave = log._leave

    def interrupted_wake() -> None:
        nonlocal interrupted
        interrupted = True
        log._line[0].wake()
        raise KeyboardInterrupt

    def slow_leave(waiter: Waiter) -> None:
        if threading.current_thread() is not threading.main_thread():
            leave(waiter)
            gone.set()
            return
        if interrupted:
            assert gone.wait(PATIENCE)  # the other one is faster
        else:
            log._wake_first = interrupted_wake  # type: ignore[method-assign]
        try:
            leave(waiter)
        finally:
            log._wake_first = CommitLog._wake_first.__get__(log)  # type: ignore[method-assign]

    log._leave = slow_leave  # type: ignore[method-assign]
    second = threading.Thread(target=fixture.put, args=(2,), daemon=True)

    def first() -> None:
        second.start()
        wait_until(lambda: bool(log._line), "put in line")

    with suppress(KeyboardInterrupt):
        fixture.put(1, before=first)
    assert interrupted
    later = threading.Thread(target=fixture.put, args=(3,), daemon=True)
    later.start()
    for thread in (second, later):
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert fixture.entries() == [[1, 2], [3]]


def test_one_in_line_at_the_end_of_its_patience_does_not_lead_for_ever(base: BaseTable) -> None:
    """``wait`` with a short timeout, again and again, while others put: none of them hangs."""
    writer = open_writer(base, durable_write=False, max_wal_flush_interval=None)
    stop = threading.Event()

    def work(number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            result = writer.put(rows(number * 1000 + turn % 50, 1))
            while not result.durable.wait(0.0002):
                continue

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert writer._log._leader is None
    abandon(writer)


@pytest.mark.parametrize("memtable", [True, False], ids=["memtable", "wal only"])
def test_a_put_that_was_never_tried_was_told_that_it_may_have_happened(
    append_only: BaseTable, memtable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows of the entry that failed. What waited behind it was never sent."""
    monkeypatch.setattr(lancewal.writer.group_commit, "RETRY_PAUSE_SECONDS", 0.0)
    store = faulty_store(append_only)
    writer = open_writer(append_only, store=store, enable_memtable=memtable)
    told: dict[int, type[LanceWalError]] = {}

    def put(number: int) -> None:
        try:
            writer.put(rows(number, 1, schema=APPEND_ONLY))
        except LanceWalError as error:
            told[number] = type(error)

    threads = [threading.Thread(target=put, args=(number,), daemon=True) for number in (1, 2)]
    with store.faults.pause("put_if_absent", where="/wal/") as pause:
        store.faults.fail("put_if_absent", times=None, error=OutcomeUnknownError("no reply"), where="/wal/")
        threads[0].start()
        pause.wait_until_reached()
        threads[1].start()
        wait_until(lambda: bool(writer._log._arrived), "put in line")
    for thread in threads:
        thread.join(PATIENCE)
    put(3)
    assert told == {1: OutcomeUnknownError, 2: StorageError, 3: StorageError}
    abandon(writer)


def test_a_put_that_waited_for_room_was_told_that_it_may_have_happened(
    append_only: BaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In WAL-only mode it writes the queue itself, of which nobody knows."""
    monkeypatch.setattr(lancewal.writer.group_commit, "RETRY_PAUSE_SECONDS", 0.0)
    store = faulty_store(append_only)
    writer = open_writer(
        append_only,
        store=store,
        enable_memtable=False,
        durable_write=False,
        max_wal_flush_interval=None,
        max_unflushed_memtable_bytes=50 * KIB,
    )
    first = writer.put(big(1))
    store.faults.fail("put_if_absent", times=None, error=OutcomeUnknownError("no reply"), where="/wal/")
    with pytest.raises(StorageError, match="ended before"):
        writer.put(big(2))
    with pytest.raises(OutcomeUnknownError, match="no reply"):
        first.durable.wait()
    abandon(writer)


def test_two_interrupts_in_a_row_gave_the_lead_to_one_that_nobody_woke() -> None:
    """It took its own lead for that of another, and waited for itself; so did all who came later."""
    from tests.writer.test_commit_log import Fixture

    fixture = Fixture(ObjectStore.from_uri("memory://interrupted-twice"))
    log = fixture.log
    interrupts = 0

    def interrupted_wake() -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts == 2:
            log._wake_first = CommitLog._wake_first.__get__(log)  # type: ignore[method-assign]
        raise KeyboardInterrupt

    second = threading.Thread(target=fixture.put, args=(2,), daemon=True)

    def first() -> None:
        log._wake_first = interrupted_wake  # type: ignore[method-assign]
        second.start()
        wait_until(lambda: bool(log._line), "put in line")

    with pytest.raises(KeyboardInterrupt):
        fixture.put(1, before=first)
    assert interrupts == 2
    later = threading.Thread(target=fixture.put, args=(3,), daemon=True)
    later.start()
    for thread in (second, later):
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert sorted(value for entry in fixture.entries() for value in entry) == [1, 2, 3]


@pytest.mark.parametrize("durable", [True, False])
def test_a_put_failed_for_want_of_a_thread_although_its_rows_were_in(
    append_only: BaseTable, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sent them again had them twice."""
    index = [IndexSpec("id_index", "id", 0, BTreeParams())]
    settings = {"sync_indexed_write": False, "async_index_buffer_rows": 1}
    writer = open_writer(append_only, durable_write=durable, indexes=index, **settings)

    def no_more_threads(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(lancewal.storage.parallel, "start_thread", no_more_threads)
        result = writer.put(rows(1, 1, schema=APPEND_ONLY))
    assert ids(writer.scan()) == [1]
    writer.put(rows(2, 1, schema=APPEND_ONLY))
    assert result.durable.wait(PATIENCE)
    wait_until(lambda: not writer._mode._active.unindexed_rows, "index")  # type: ignore[union-attr]
    writer.close()


def test_a_put_was_refused_for_a_failure_that_came_after_its_rows_were_queued(
    append_only: BaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The MemTable that it filled could not be flushed; its rows were written nevertheless."""
    writer = open_writer(append_only, max_memtable_rows=2)
    writer.put(rows(1, 1, schema=APPEND_ONLY))

    def no_more_threads(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(lancewal.storage.parallel, "start_thread", no_more_threads)
        assert writer.put(rows(2, 1, schema=APPEND_ONLY)).durable.done()
    with pytest.raises(StorageError, match="a freeze was cut short"):
        writer.put(rows(3, 1, schema=APPEND_ONLY))
    abandon(writer)
    with open_writer(append_only, writer.shard_id) as again:
        assert ids(again.scan()) == [1, 2]


@pytest.mark.parametrize("memtable", [True, False], ids=["memtable", "wal only"])
def test_a_put_that_stands_in_line_when_the_writer_ends_is_not_taken_in(
    append_only: BaseTable, memtable: bool
) -> None:
    """An insert that was cut short may have left half a put in memory: nothing comes on top of it."""
    store = faulty_store(append_only)
    writer = open_writer(append_only, store=store, enable_memtable=memtable)
    told: list[str] = []

    def put() -> None:
        try:
            writer.put(rows(1, 1, schema=APPEND_ONLY))
        except StorageError as error:
            told.append(str(error))

    second = threading.Thread(target=put, daemon=True)
    with stalled(writer, store):
        second.start()
        wait_until(lambda: bool(writer._log._arrived), "put in line")
        writer._state.fail(StorageError("cut short"), memory_ahead_of_log=True, ends_log=False)
    second.join(PATIENCE)
    assert told == ["cut short"]
    assert writer._log.pending_batches == 0
    abandon(writer)


def test_a_put_waited_for_the_room_of_one_that_was_refused(append_only: BaseTable) -> None:
    """Nobody said that it had gone: the other one slept until it was time to log that it waits."""
    writer = open_writer(
        append_only,
        enable_memtable=False,
        max_unflushed_memtable_bytes=50 * KIB,
        backpressure_log_interval=timedelta(seconds=2 * PATIENCE),
    )
    waits = threading.Thread(target=writer.put, args=(big(2),), daemon=True)

    def refuse(put: Put) -> None:
        writer._log.commit_put = CommitLog.commit_put.__get__(writer._log)  # type: ignore[method-assign]
        waits.start()
        wait_until(lambda: bool(writer._state._changed._waiting), "put that waits for room")
        raise InvalidInputError("refused")

    writer._log.commit_put = refuse  # type: ignore[method-assign]
    with pytest.raises(InvalidInputError):
        writer.put(big(1))
    waits.join(PATIENCE)
    assert not waits.is_alive()
    abandon(writer)


def test_the_first_error_of_a_writer_stays() -> None:
    state = WriterState(uuid.uuid4(), 1)
    state.fail(StorageError("first"), memory_ahead_of_log=False, ends_log=True)
    state.fail(OutcomeUnknownError("second"), memory_ahead_of_log=True, ends_log=True)
    assert str(state.ended.failure) == str(state.ended.log_failure) == "first"
    assert state.ended.poisoned


def test_a_leader_waited_half_as_long_as_a_suspended_machine_slept(
    append_only: BaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For company that did not come. Seeds 99405 and 99503 of the simulator."""
    store = faulty_store(append_only)
    writer = open_writer(append_only, store=store)
    hours = itertools.count(time.perf_counter() + 3600.0, 3600.0)
    slow = SimpleNamespace(perf_counter=lambda: next(hours), monotonic=time.monotonic)
    with stalled(writer, store):
        threads = [threading.Thread(target=writer.put, args=(big(n, 10),)) for n in (1, 2)]
        for number, thread in enumerate(threads, start=1):
            thread.start()
            wait_until(lambda: len(writer._log._arrived) == number, "put in line")  # noqa: B023
        monkeypatch.setattr(lancewal.writer.group_commit, "time", slow)
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert 0 < writer._log._gather_seconds <= MOST_GATHER_SECONDS
    writer.put(big(3, 10))
    writer.close()


def test_an_entry_holds_rows_of_one_generation(append_only: BaseTable) -> None:
    """It is replayed or passed over as a whole: by the generation that it names."""
    store = faulty_store(append_only)
    writer = open_writer(append_only, store=store, max_memtable_rows=1)
    with stalled(writer, store):
        threads = [threading.Thread(target=writer.put, args=(big(n, 10),)) for n in (1, 2, 3)]
        for number, thread in enumerate(threads, start=1):
            thread.start()
            wait_until(lambda: len(writer._log._arrived) == number, "put in line")  # noqa: B023
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    tailer = WalTailer(store, writer.shard_id)
    entries = [entry for entry in tailer.entries(1, tailer.next_position()) if not entry.sentinel]
    assert [entry.generation for entry in entries] == [1, 2, 3, 4]
    assert [sum(batch.num_rows for batch in entry.batches) for entry in entries] == [1, 1, 1, 1]
    writer.close()


def test_rows_that_the_log_did_not_take_are_not_published(append_only: BaseTable) -> None:
    """An SSTable is written beside the log, and counts only when its rows are in both."""
    store = faulty_store(append_only)
    writer = open_writer(append_only, store=store, durable_write=False, max_wal_flush_interval=None)
    writer.put(big(1, 10))
    store.faults.fail("put_if_absent", where="/wal/", times=None)
    with suppress(LanceWalError):
        writer.force_seal_active()
        writer.wait_for_flush_drain()
    with suppress(LanceWalError):
        writer.close()
    assert ShardManifestStore(store, writer.shard_id).require_latest().sstables == ()


def test_a_flush_does_not_publish_at_a_generation_that_is_not_its_own(append_only: BaseTable) -> None:
    """It would set the shard back to a generation that another SSTable has."""
    store = faulty_store(append_only)
    writer = open_writer(append_only, store=store)
    writer.put(big(1, 10))
    manifests = ShardManifestStore(store, writer.shard_id)
    ahead = manifests.commit_update(writer.epoch, lambda manifest: replace(manifest, current_generation=5))
    writer.force_seal_active()
    with pytest.raises(StorageError, match="generation 1 cannot be published"):
        writer.wait_for_flush_drain()
    assert manifests.require_latest() == ahead
    abandon(writer)
