"""Many threads, faults at random, closes and panics in between: nobody hangs, nothing is lost or doubled."""

from __future__ import annotations

import gc
import logging
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import lancewal
import lancewal.writer.flush
import lancewal.writer.group_commit
from lancewal.base.table import BaseTable
from lancewal.errors import ClosedError, LanceWalError, StorageError
from lancewal.format.shard_manifest import SsTableEntry
from lancewal.memtable import MemTable
from lancewal.shard import WalAppender
from lancewal.storage import ObjectStore, PutOutcome, Worker, layout
from lancewal.writer import ShardWriter, WriteStats
from lancewal.writer.group_commit import CommitLog, Put
from lancewal.writer.intake import Rows
from lancewal.writer.modes import WalOnlyMode
from lancewal.writer.state import WriterState
from tests.faults import FaultyStore, Pause
from tests.patience import PATIENCE, wait_until
from tests.shards import manifest_of, settled_rows, store_of
from tests.tables import APPEND_ONLY, abandon, new_table, open_writer, rows

ROWS_PER_PUT = 3


class Panic(BaseException):
    """What native code raises when it panics: no Exception."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lancewal.writer.flush, "FIRST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(lancewal.writer.flush, "MAX_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(lancewal.writer.group_commit, "RETRY_PAUSE_SECONDS", 0.0)


@pytest.fixture
def base(tmp_path: Path) -> BaseTable:
    return new_table(tmp_path / "t", APPEND_ONLY)


def join_all(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    asleep = [thread.name for thread in threads if thread.is_alive()]
    assert not asleep, f"never woken: {asleep}"


class Putters:
    """Threads that put numbered batches until they are refused, and what they were told."""

    def __init__(self, writer: ShardWriter, count: int) -> None:
        self._writer = writer
        self._numbers = iter(range(1 << 40))
        self._lock = threading.Lock()
        self.acknowledged: list[int] = []
        self.refused: list[tuple[int, LanceWalError]] = []
        self.threads = [
            threading.Thread(target=self._run, name=f"put-{i}", daemon=True) for i in range(count)
        ]
        for thread in self.threads:
            thread.daemon = True
            thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                number = next(self._numbers)
            try:
                self._writer.put(self._batches(number))
            except LanceWalError as error:
                self.refused.append((number, error))
                return
            self.acknowledged.append(number)

    def _batches(self, number: int) -> list[Any]:
        return [rows(number * 10 + i, 1, schema=APPEND_ONLY) for i in range(ROWS_PER_PUT)]

    def check(self, found: list[int], *, acknowledged_is_durable: bool = True) -> None:
        counts = Counter(found)
        attempted = {*self.acknowledged, *(number for number, _ in self.refused)}
        for number in attempted:
            copies = [counts.pop(number * 10 + i, 0) for i in range(ROWS_PER_PUT)]
            must = number in self.acknowledged and acknowledged_is_durable
            allowed = [[1] * ROWS_PER_PUT] + ([] if must else [[0] * ROWS_PER_PUT])
            assert copies in allowed, f"copies of the rows of put {number}: {copies}"
        assert not counts


def reopened_ids(base: BaseTable, shard: uuid.UUID) -> list[int]:
    writer = open_writer(base, shard)
    found = [row["id"] for row in settled_rows(base, writer)]
    abandon(writer)
    return found


@pytest.mark.parametrize("settings", [{}, {"durable_write": False}, {"enable_memtable": False}], ids=str)
def test_a_put_that_races_with_close_is_acknowledged_and_there_or_refused(
    base: BaseTable, settings: dict[str, Any]
) -> None:
    choose = random.Random(11)
    for _ in range(8):
        shard = uuid.uuid4()
        writer = open_writer(base, shard, max_memtable_batches=150, **settings)
        putters = Putters(writer, 5)
        time.sleep(choose.uniform(0, 0.02))
        closers = [threading.Thread(target=writer.close, daemon=True) for _ in range(2)]
        for thread in closers:
            thread.start()
        join_all([*closers, *putters.threads])
        assert {type(error) for _, error in putters.refused} == {ClosedError}
        putters.check(reopened_ids(base, shard))


class UnreliableStore(FaultyStore):
    """Every write may fail, before or after its effect."""

    def __init__(self, inner: ObjectStore, seed: int, share: float) -> None:
        super().__init__(inner)
        self._choose = random.Random(seed)
        self.share = share

    def put_if_absent(self, path: str, data: Any) -> PutOutcome:
        luck = self._choose.random()
        if luck < self.share / 2:
            raise StorageError("failed before its effect")
        outcome = super().put_if_absent(path, data)
        if luck < self.share:
            raise StorageError("failed after its effect")
        return outcome


@pytest.mark.parametrize("seed", range(4))
def test_faults_at_random_leave_nobody_asleep(base: BaseTable, seed: int) -> None:
    """Some of these writers survive, some end with a WAL that cannot be written; all answer everybody."""
    store = UnreliableStore(store_of(base), seed, 0.0)
    shard = uuid.uuid4()
    writer = open_writer(base, shard, store=store, max_memtable_batches=12, durable_write=seed % 2 == 0)
    store.share = 0.4
    putters = Putters(writer, 6)

    def look_around() -> None:
        while not writer._state.closed:
            try:
                writer.scan(columns=["id"])
                writer.force_seal_active()
                writer.memtable_stats()
                writer.wait_for_flush_drain()
            except LanceWalError:
                time.sleep(0.001)

    others = [threading.Thread(target=look_around, name=f"look-{i}", daemon=True) for i in range(2)]
    for thread in others:
        thread.start()
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline and any(thread.is_alive() for thread in putters.threads):
        time.sleep(0.01)
    survived = False
    try:
        writer.close()
        survived = writer._state.ended.failure is None
    except LanceWalError:
        assert writer._state.closed
    join_all([*putters.threads, *others])
    store.share = 0.0
    assert not [thread for thread in threading.enumerate() if str(shard) in thread.name]
    putters.check(reopened_ids(base, shard), acknowledged_is_durable=seed % 2 == 0 or survived)


class BrokenState(WriterState):
    def note_change(self) -> None:
        raise RuntimeError("telling others of the failure fails too")


def test_an_error_while_a_failure_is_latched_wakes_everybody_all_the_same(memory_store: ObjectStore) -> None:
    store = FaultyStore(memory_store)
    appender = WalAppender.open(store, uuid.uuid4())
    state = BrokenState(appender.shard_id, appender.epoch)
    log = CommitLog(appender, state, WriteStats(), 1 << 20, sleep=lambda seconds: None)
    store.faults.fail("put_if_absent", times=None, where="/wal/")
    outcomes: list[str] = []

    def commit(end: int) -> None:
        try:
            log.commit(end)
        except (RuntimeError, StorageError) as error:
            outcomes.append(type(error).__name__)

    puts = [Put(Rows.of([rows(i, 1)]), WalOnlyMode(log, state)) for i in range(5)]
    for put in puts:
        log.enqueue(put)
    threads = [threading.Thread(target=commit, args=(put.end_position,), daemon=True) for put in puts]
    for thread in threads:
        thread.start()
    join_all(threads)
    assert sorted(outcomes) == ["RuntimeError"] + ["StorageError"] * 4
    assert state.ended.log_failure is not None


def test_a_panic_in_a_flush_does_not_end_the_flushing(base: BaseTable) -> None:
    """The thread died of it, and drain, close and every put that waits for room waited for ever."""
    writer = open_writer(base, shard := uuid.uuid4())
    flushes = writer._mode._flushes  # type: ignore[attr-defined]
    write = flushes._write_sstable
    panics = [Panic("index out of bounds"), Panic("once more")]

    def panic_first(memtable: MemTable) -> SsTableEntry:
        if panics:
            raise panics.pop()
        entry: SsTableEntry = write(memtable)
        return entry

    flushes._write_sstable = panic_first
    writer.put(rows(0, 3, schema=APPEND_ONLY))
    writer.force_seal_active()
    failed: list[StorageError] = []

    def drain() -> None:
        while True:
            try:
                writer.wait_for_flush_drain()
                return
            except StorageError as error:
                failed.append(error)

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    join_all([thread])
    assert all("Panic" in str(error) for error in failed)
    assert sorted(reopened_ids(base, shard)) == [0, 1, 2]
    abandon(writer)


def test_a_panic_in_a_step_does_not_end_the_worker() -> None:
    calls: list[int] = []
    enough = threading.Event()

    def step() -> float | None:
        calls.append(1)
        if len(calls) == 1:
            raise Panic
        enough.set()
        return None

    worker = Worker("panicking", step, retry_seconds=0.001)
    worker.kick()
    try:
        assert enough.wait(PATIENCE)
    finally:
        worker.stop()


def test_a_worker_whose_thread_could_not_start_starts_with_the_next_kick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that never started stayed in its place: kicks did nothing, and stop raised."""
    ran = threading.Event()
    worker = Worker("late-starter", lambda: ran.set())

    def no_more_threads(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("lancewal.storage.parallel._thread.start_new_thread", no_more_threads)
        with pytest.raises(RuntimeError):
            worker.kick()
    worker.kick()
    assert ran.wait(PATIENCE)
    worker.stop()


def test_errors_of_a_drain_are_objects_of_their_own(base: BaseTable) -> None:
    """One kept error object, raised again and again, grows its traceback and keeps the writer alive."""
    store = FaultyStore(store_of(base))
    writer = open_writer(base, store=store)
    writer.put(rows(0, 1, schema=APPEND_ONLY))
    store.faults.fail("put_if_absent", times=None, where="/manifest/")
    writer.force_seal_active()
    caught = []
    for _ in range(2):
        with pytest.raises(StorageError, match="injected") as error:
            writer.wait_for_flush_drain()
        caught.append(error.value)
    assert caught[0] is not caught[1]
    assert writer._mode._flushes._last_error is not caught[1]  # type: ignore[attr-defined]
    abandon(writer)


def test_close_does_not_wait_out_the_long_pauses_of_an_outage(
    base: BaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lancewal.writer.flush, "MAX_RETRY_SECONDS", 3600.0)
    store = FaultyStore(store_of(base))
    writer = open_writer(base, store=store)
    writer.put(rows(0, 1, schema=APPEND_ONLY))
    flushes = writer._mode._flushes  # type: ignore[attr-defined]
    flushes._failures_in_a_row = 16
    store.faults.fail("put_if_absent", times=2, where="/manifest/")
    thread = threading.Thread(target=writer.close, daemon=True)
    thread.start()
    join_all([thread])


class DropsTheWriter(logging.Handler):
    """The collector may run at any allocation: here it does while a lock is held that a flush needs."""

    def __init__(self, held: list[Any], pause: Pause) -> None:
        super().__init__()
        self._held = held
        self._pause = pause

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "application":
            self._held.clear()
            self._pause.release()
            gc.collect()


def test_a_writer_that_is_collected_during_a_flush_blocks_nobody(base: BaseTable) -> None:
    """The collector waited for the flush, and the flush for the lock of the collector's thread."""
    store = FaultyStore(store_of(base))
    shard = uuid.uuid4()
    writer = open_writer(base, shard, store=store)
    writer.put(rows(0, 3, schema=APPEND_ONLY))
    with store.faults.pause("put_if_absent", where="/manifest/") as pause:
        writer.force_seal_active()
        pause.wait_until_reached()
        held: list[Any] = [writer]
        held.append(held)
        del writer
        handler = DropsTheWriter(held, pause)
        root = logging.getLogger()
        level = root.level
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        try:
            log = logging.getLogger("application")
            thread = threading.Thread(target=log.info, args=("anything",), daemon=True)
            thread.start()
            join_all([thread])
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
    wait_until(
        lambda: not [t for t in threading.enumerate() if str(shard) in t.name], "the end of its threads"
    )
    assert sorted(reopened_ids(base, shard)) == [0, 1, 2]


EXIT_WITHOUT_CLOSE = """
import sys
import pyarrow as pa
from lancewal.storage import layout
from lancewal.base.table import BaseTable
from lancewal.writer import ShardWriterConfig, open_shard_writer
uri, shard = sys.argv[1:]
writer = open_shard_writer(BaseTable.open(uri), shard, ShardWriterConfig(max_memtable_rows=50), indexes=())
for i in range(20):
    ids = pa.array(range(i * 20, i * 20 + 20))
    writer.put(pa.record_batch([ids, pa.array(["x"] * 20)], names=["id", "name"]))
"""


def test_a_process_that_exits_without_close_exits_cleanly_and_loses_nothing(base: BaseTable) -> None:
    shard = uuid.uuid4()
    done = subprocess.run(
        [sys.executable, "-c", EXIT_WITHOUT_CLOSE, base.uri, str(shard)],
        env={**os.environ, "PYTHONPATH": str(Path(lancewal.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(reopened_ids(base, shard)) == list(range(400))


def test_an_outage_of_the_manifest_leaves_no_heap_of_copies(base: BaseTable) -> None:
    """Every retry of the commit wrote the whole SSTable anew, until the disk was full."""
    store = FaultyStore(store_of(base))
    writer = open_writer(base, shard := uuid.uuid4(), store=store)
    writer.put(rows(0, 3, schema=APPEND_ONLY))
    store.faults.fail("put_if_absent", times=8, where="/manifest/")
    writer.force_seal_active()
    wait_until(lambda: not writer.memtable_stats().frozen_count)
    assert writer.stats().memtable_flush_failures == 8
    writer.put(rows(3, 3, schema=APPEND_ONLY))
    writer.close()
    written = [name for name in store.list_directories(layout.shard_dir(shard)) if "_gen_" in name]
    assert sorted(written) == sorted(entry.path for entry in manifest_of(base, shard).sstables)
    assert sorted(reopened_ids(base, shard)) == list(range(6))
