"""Rows that come in a trickle are flushed, puts slow down for compaction, and writers share the memory."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import lancewal
from lancewal.base import BaseTable
from lancewal.errors import BusyError
from lancewal.maintenance import compact
from lancewal.storage import ObjectStore, RowMemory
from lancewal.storage.memory import PATIENCE as FLUSH_PATIENCE
from lancewal.writer import modes, shard_writer
from lancewal.writer.backlog import COMPACTED_LATELY, FIRST_DELAY, LONGEST_DELAY, Backlog
from tests.faults import FaultyStore
from tests.patience import PATIENCE, wait_until
from tests.tables import open_writer, rows, wal_table


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
