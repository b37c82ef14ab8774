from __future__ import annotations

import logging
from datetime import timedelta

import pytest

from lancewal.writer import WriteStats, WriteStatsSnapshot


def ms(milliseconds: float) -> timedelta:
    return timedelta(milliseconds=milliseconds)


def test_puts_are_counted_and_averaged() -> None:
    stats = WriteStats()
    stats.add(put_count=1, put_time=0.010, put_rows=3)
    stats.add(put_count=1, put_time=0.020, put_rows=4)
    snapshot = stats.snapshot()
    assert (snapshot.put_count, snapshot.put_rows, snapshot.put_time) == (2, 7, ms(30))
    assert snapshot.avg_put_latency() == ms(15)
    assert snapshot.put_throughput() == pytest.approx(2 / 0.030)


def test_wal_flushes_are_counted_and_averaged() -> None:
    stats = WriteStats()
    stats.add(wal_flush_count=1, wal_flush_time=0.100, wal_flush_bytes=1024, wal_flush_puts=3)
    stats.add(wal_flush_count=1, wal_flush_time=0.200, wal_flush_bytes=2048, wal_flush_puts=1)
    stats.add(wal_io_count=1, wal_io_time=0.250)
    snapshot = stats.snapshot()
    assert (snapshot.wal_flush_count, snapshot.wal_flush_time) == (2, ms(300))
    assert (snapshot.wal_flush_bytes, snapshot.avg_wal_flush_bytes()) == (3072, 1536)
    assert snapshot.avg_group_size() == 2.0
    assert snapshot.wal_throughput_bytes() == pytest.approx(10240)
    assert snapshot.avg_wal_io_latency() == ms(250)


def test_memtable_flushes_and_index_updates_are_counted() -> None:
    stats = WriteStats()
    stats.add(memtable_flush_count=1, memtable_flush_time=1.0, memtable_flush_rows=10_000)
    stats.add(index_update_count=1, index_update_time=0.5, index_update_rows=20)
    stats.add(index_update_count=1, index_update_time=0.5, index_update_rows=40)
    stats.add(backpressure_count=1, backpressure_wait=0.25)
    stats.add(replay_time=0.1, replayed_entries=3, replayed_rows=30)
    snapshot = stats.snapshot()
    assert (snapshot.memtable_flush_count, snapshot.memtable_flush_rows) == (1, 10_000)
    assert snapshot.avg_memtable_flush_latency() == ms(1000)
    assert snapshot.avg_memtable_flush_rows() == 10_000
    assert (snapshot.avg_index_update_latency(), snapshot.avg_index_update_rows()) == (ms(500), 30)
    assert (snapshot.backpressure_count, snapshot.backpressure_wait) == (1, ms(250))
    assert (snapshot.replayed_entries, snapshot.replayed_rows) == (3, 30)


def test_nothing_recorded_has_no_averages() -> None:
    snapshot = WriteStats().snapshot()
    assert snapshot == WriteStatsSnapshot()
    assert snapshot.avg_put_latency() is None
    assert snapshot.avg_wal_flush_bytes() is None
    assert snapshot.put_throughput() == 0.0


def test_reset_forgets_everything() -> None:
    stats = WriteStats()
    stats.add(put_count=1, put_time=0.01)
    stats.add(wal_flush_count=1, wal_flush_time=0.1, wal_flush_bytes=1024)
    stats.reset()
    assert stats.snapshot() == WriteStatsSnapshot()


def test_log_lines_carry_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    stats = WriteStats()
    with caplog.at_level(logging.INFO):
        stats.snapshot().log_wal_breakdown("quiet")
        assert not caplog.records, "no WAL flush yet: nothing to break down"
        stats.add(put_count=1, put_time=0.01)
        stats.add(wal_flush_count=1, wal_flush_time=0.1, wal_flush_bytes=777)
        stats.snapshot().log_summary("shard x")
        stats.snapshot().log_wal_breakdown("shard x")
    summary, breakdown = (record.getMessage() for record in caplog.records)
    assert summary.startswith("shard x: 1 puts")
    assert "777 bytes" in summary
    assert breakdown.startswith("shard x: WAL flush avg 0:00:00.1")
