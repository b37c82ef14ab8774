"""Rows that come in a trickle are flushed, puts slow down for compaction, and writers share the memory."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import lancewal
from lancewal.base import BaseTable
from lancewal.errors import BusyError, ClosedError, FencedError, StorageError
from lancewal.format import PutId
from lancewal.maintenance import compact
from lancewal.storage import ObjectStore, RowMemory
from lancewal.storage.memory import PATIENCE as FLUSH_PATIENCE
from lancewal.writer import modes, shard_writer
from lancewal.writer.backlog import COMPACTED_LATELY, FIRST_DELAY, LONGEST_DELAY, Backlog
from lancewal.writer.group_commit import Put
from tests.faults import FaultyStore
from tests.patience import PATIENCE, wait_until
from tests.tables import ids, open_writer, rows, wal_table


def test_a_trickle_of_rows_does_not_stay_in_the_log_for_ever(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t")
    settings: dict[str, Any] = {"owner_lease": timedelta(seconds=0.3), "fsync": False}
    with table.writer(max_memtable_age=timedelta(milliseconds=50), **settings) as writer:
        writer.put(rows(0, 1))
        wait_until(lambda: table.status().uncompacted.count == 1, "the flush of one row by its age")
        assert table.status().unflushed.count == 0
        writer.put(rows(1, 1))
        wait_until(lambda: table.status().uncompacted.count == 2, "the next one")
    assert lancewal.ShardWriterConfig().max_memtable_age == timedelta(minutes=5)


def test_without_an_age_or_before_it_rows_stay(base: BaseTable) -> None:
    for age in (None, timedelta(hours=1)):
        with open_writer(base, max_memtable_age=age) as writer:
            writer.put(rows(0, 1))
            writer.tend()
            assert writer.memtable_stats().row_count == 1


def _listing(base: BaseTable, store: ObjectStore, **settings: Any) -> Any:
    """A writer of a shard with six SSTables, of which a compaction has taken some before."""
    writer = open_writer(base, store=store, **settings)
    for number in range(8):
        writer.put(rows(number, 1))
        writer.force_seal_active()
        writer.wait_for_flush_drain()
        if number == 1:
            compact(store)
    return writer


def test_puts_slow_down_while_compaction_is_behind_and_go_on_when_it_caught_up(
    base: BaseTable, local_store: ObjectStore
) -> None:
    store = ObjectStore.from_uri(base.uri, fsync=False)
    writer = _listing(base, store, slowdown_sstables=4)
    assert writer._mode.backlog.excess == 2
    writer.put(rows(100, 1))
    stats = writer.stats()
    # The puts before it met one too many, and it met two: twice as long.
    assert stats.slowdown_count >= 2
    assert stats.slowdown_wait.total_seconds() >= 3 * FIRST_DELAY
    compact(store)
    writer.tend()
    assert writer._mode.backlog.excess == 0
    before = writer.stats().slowdown_count
    writer.put(rows(101, 1))
    assert writer.stats().slowdown_count == before
    writer.close()


def _full(base: BaseTable, store: ObjectStore, **settings: Any) -> Any:
    """A writer of a shard with as many SSTables as it may have."""
    return _listing(
        base, store, **{"stop_sstables": 6, "stop_timeout": timedelta(seconds=PATIENCE), **settings}
    )


def _stopped(writer: Any) -> tuple[threading.Thread, list[BaseException]]:
    """A thread whose put is stopped, and what it will have raised."""
    raised: list[BaseException] = []

    def put() -> None:
        try:
            writer.put(rows(100, 1))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    wait_until(lambda: writer.stats().stop_count == 1, "a put that is stopped")
    assert ids(writer.scan()) == []
    return thread, raised


def test_a_put_is_stopped_at_the_bound_and_goes_on_when_compaction_caught_up(base: BaseTable) -> None:
    """Nobody tends this writer: whoever waits looks for itself."""
    store = ObjectStore.from_uri(base.uri, fsync=False)
    writer = _full(base, store)
    assert writer.stats().stop_count == 0, "one below the bound nobody waits"
    thread, raised = _stopped(writer)
    compact(store)
    thread.join(PATIENCE)
    assert (raised, ids(writer.scan())) == ([], [100])
    stats = writer.stats()
    assert (stats.stop_count, stats.stop_refusals) == (1, 0)
    assert stats.stop_wait > timedelta(0)
    writer.put(rows(101, 1))
    assert writer.stats().stop_count == 1
    writer.close()


def test_a_put_that_is_stopped_for_too_long_is_refused_and_lands_once_when_it_is_sent_again(
    base: BaseTable,
) -> None:
    store = ObjectStore.from_uri(base.uri, fsync=False)
    writer = _full(base, store, stop_timeout=timedelta(milliseconds=20))
    for patience in (None, 0.0, 0.01):
        with pytest.raises(BusyError, match=r"6 SSTables.*send it again"):
            writer.write_rows(writer._intake.shaped([rows(100, 1)]), PutId("one", 1), patience)
    assert writer.stats().stop_refusals == 3
    assert ids(writer.scan()) == []
    compact(store)
    writer.tend()
    for _ in range(2):
        writer.put(rows(100, 1), put_id=PutId("one", 1))
    writer.close()
    assert ids(lancewal.open(base.uri).scan().to_table()) == [*range(8), 100]


def test_closing_a_writer_ends_the_wait_of_its_puts(base: BaseTable) -> None:
    writer = _full(base, ObjectStore.from_uri(base.uri, fsync=False))
    thread, raised = _stopped(writer)
    writer.close()
    thread.join(PATIENCE)
    assert [type(error) for error in raised] == [ClosedError]


def test_a_put_that_is_stopped_learns_that_the_shard_has_another_writer(base: BaseTable) -> None:
    """As a refusal it would be sent again for ever: nobody would open the shard anew."""
    writer = _full(base, ObjectStore.from_uri(base.uri, fsync=False))
    thread, raised = _stopped(writer)
    with open_writer(base, writer.shard_id):
        thread.join(PATIENCE)
    assert [type(error) for error in raised] == [FencedError]
    writer.close()


def test_looks_that_fail_are_repeated(base: BaseTable) -> None:
    store = FaultyStore(ObjectStore.from_uri(base.uri, fsync=False))
    writer = _full(base, store)
    failed: list[int] = []
    read = writer._brake._read_newest

    def failing_twice() -> Any:
        if len(failed) < 2:
            failed.append(1)
            raise StorageError("no storage today")
        return read()

    writer._brake._read_newest = failing_twice
    compact(store)
    writer.put(rows(100, 1))
    assert len(failed) == 2
    writer.close()


def test_a_writer_that_is_opened_on_a_long_list_knows_it_at_once(base: BaseTable) -> None:
    store = ObjectStore.from_uri(base.uri, fsync=False)
    with _full(base, store, stop_sstables=None) as first:
        assert not first._mode.backlog.stops
    with (
        open_writer(base, first.shard_id, stop_sstables=6, stop_timeout=timedelta(0)) as second,
        pytest.raises(BusyError),
    ):
        second.put(rows(100, 1))


def test_delays_and_room_share_the_patience_of_a_put(base: BaseTable) -> None:
    writer = _listing(base, ObjectStore.from_uri(base.uri, fsync=False), slowdown_sstables=4)
    put = Put(writer._intake.shaped([rows(100, 1)]), writer._mode, None)
    assert writer._brake.hold(put, 0.5 * FIRST_DELAY) == 0.0
    assert writer._brake.hold(put, None) is None
    writer.close()


def test_nobody_waits_for_a_compaction_that_nobody_does() -> None:
    now = 0.0
    backlog = Backlog(4, clock=lambda: now)

    def lists(*generations: int) -> Any:
        entry = type("Entry", (), {})

        def made(number: int) -> Any:
            found = entry()
            found.generation = number
            return found

        manifest = type("Manifest", (), {})()
        manifest.sstables, manifest.current_generation = [made(n) for n in generations], 99
        return manifest

    backlog.note(lists(*range(1, 30)))
    assert (backlog.excess, backlog.delay(100)) == (25, 0.0)
    backlog.note(lists(*range(3, 8)))
    assert backlog.delay(100) == FIRST_DELAY
    backlog.note(lists(*range(3, 9)))
    assert backlog.delay(100) == 2 * FIRST_DELAY
    assert backlog.delay(1 << 20) == 32 * FIRST_DELAY
    backlog.note(lists(*range(3, 100)))
    assert backlog.delay(100) == LONGEST_DELAY
    now = COMPACTED_LATELY + 1
    assert backlog.delay(100) == 0.0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> RowMemory:
    """A process with room for 100 kB of rows."""
    small = RowMemory(100_000)
    monkeypatch.setattr(modes, "row_memory", small)
    monkeypatch.setattr(shard_writer, "row_memory", small)
    return small


def test_many_writers_stay_within_one_number_and_the_largest_is_flushed_first(
    base: BaseTable, memory: RowMemory
) -> None:
    writers = [open_writer(base) for _ in range(8)]
    writers[5].put(rows(0, 1500))
    largest = memory.total
    assert largest < 75_000
    most = 0
    for number in range(200):
        writers[number % 8].put(rows(10_000 + 10 * number, 60))
        most = max(most, memory.total)
    wait_until(lambda: writers[5].stats().memtable_flush_count > 0, "the flush of the largest")
    assert most < 100_000 + 10_000
    flushed = [writer.stats().memtable_flush_count for writer in writers]
    # Were each put flushed for itself there would be 200. Slow flushes let others be chosen beside them.
    assert sum(flushed) < 100, "small MemTables were flushed for nothing"
    for writer in writers:
        writer.close()
    assert memory.total == 0


def test_puts_wait_while_the_process_is_full_and_say_so(base: BaseTable, memory: RowMemory) -> None:
    store = FaultyStore(ObjectStore.from_uri(base.uri, fsync=False))
    one, other = open_writer(base, store=store), open_writer(base)
    with store.faults.pause("*", where="_gen_") as pause:
        one.put(rows(0, 6000))
        assert memory.is_full
        pause.wait_until_reached()
        with pytest.raises(BusyError):
            other.write_rows(other._intake.shaped([rows(9000, 1)]), patience=0.05)
        waiting = threading.Thread(target=other.put, args=(rows(9000, 1),))
        waiting.start()
        pause.release()
    waiting.join()
    assert other.memtable_stats().row_count == 1
    one.close()
    other.close()


def test_a_writer_that_failed_does_not_hold_the_others_up(base: BaseTable, memory: RowMemory) -> None:
    lost = open_writer(base)
    lost.put(rows(0, 1500))
    successor = open_writer(base, lost.shard_id)  # which has its rows now
    with pytest.raises(lancewal.errors.FencedError):
        lost.put(rows(5000, 1))
    other = open_writer(base)
    for number in range(40):
        other.put(rows(10_000 + 60 * number, 60))
    for writer in (lost, successor, other):
        writer.close()
    assert memory.total == 0


def test_a_flush_that_hangs_does_not_hold_up_the_writers_of_other_tables(
    base: BaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    memory = RowMemory(100_000, clock=lambda: now)
    monkeypatch.setattr(modes, "row_memory", memory)
    monkeypatch.setattr(shard_writer, "row_memory", memory)
    store = FaultyStore(ObjectStore.from_uri(base.uri, fsync=False))
    stuck, healthy = open_writer(base, store=store), open_writer(base)
    with store.faults.pause("*", where="_gen_") as pause:
        stuck.put(rows(0, 2700))
        healthy.put(rows(10_000, 2300))
        assert memory.is_full
        pause.wait_until_reached()
        with pytest.raises(BusyError):
            healthy.write_rows(healthy._intake.shaped([rows(20_000, 1)]), patience=0.05)
        now = FLUSH_PATIENCE
        healthy.write_rows(healthy._intake.shaped([rows(20_000, 1)]), patience=PATIENCE)
        assert healthy.stats().memtable_flush_count == 1
        pause.release()
    for writer in (stuck, healthy):
        writer.close()
    assert memory.total == 0


def test_sstables_that_a_job_brings_count_at_once(base: BaseTable) -> None:
    writer = _listing(base, ObjectStore.from_uri(base.uri, fsync=False), slowdown_sstables=4)
    manifest = writer.manifest()
    more = replace(manifest, sstables=manifest.sstables + manifest.sstables[:3])
    writer.insert_generations(lambda: None, lambda appender: (None, more))
    assert writer._mode.backlog.excess == 5
    writer.close()
