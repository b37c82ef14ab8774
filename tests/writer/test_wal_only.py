"""WAL-only mode: the log and nothing else."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import pytest

from lancewal.base.table import BaseTable
from lancewal.errors import FencedError, InvalidInputError, StorageError
from lancewal.index.kinds import BTreeParams, IndexSpec
from lancewal.shard import WalTailer
from lancewal.storage import ObjectStore
from lancewal.writer import ShardWriter, open_shard_writer
from tests.faults import FaultyStore
from tests.patience import PATIENCE, wait_until
from tests.tables import fast, ids, open_writer, rows


def wal_only(base: BaseTable, shard: uuid.UUID | None = None, **settings: object) -> ShardWriter:
    store = settings.pop("store", None)
    return open_writer(base, shard, store=store, enable_memtable=False, **settings)  # type: ignore[arg-type]


def entries(base: BaseTable, shard: uuid.UUID) -> list[list[int]]:
    tailer = WalTailer(ObjectStore.from_uri(base.uri), shard)
    return [[i for b in e.batches for i in b.column("id").to_pylist()] for e in tailer if not e.sentinel]


def test_durable_round_trip(base: BaseTable) -> None:
    with wal_only(base) as writer:
        assert writer.put(rows(0, 4)).batch_positions == range(1)
        assert writer.put(rows(100, 2)).batch_positions == range(1, 2)
    tailer = WalTailer(ObjectStore.from_uri(base.uri), writer.shard_id)
    assert (tailer.first_position(), tailer.next_position()) == (1, 3)
    first, second = tailer.entries()
    assert [b.num_rows for b in first.batches] == [4]
    assert [b.num_rows for b in second.batches] == [2]
    assert first.writer_epoch == second.writer_epoch == 1
    assert first.generation is None, "WAL-only entries belong to no generation"


def test_indexes_are_refused_before_the_claim(base: BaseTable) -> None:
    spec = IndexSpec("id_idx", "id", 0, BTreeParams())
    shard = uuid.uuid4()
    with pytest.raises(InvalidInputError, match="indexes require enable_memtable"):
        open_shard_writer(base, shard, fast(enable_memtable=False), indexes=[spec])
    assert not (Path(base.uri) / "_mem_wal" / str(shard)).exists()


def test_empty_batches_are_refused(base: BaseTable) -> None:
    with wal_only(base) as writer:
        with pytest.raises(InvalidInputError, match="empty batch list"):
            writer.put([])
        with pytest.raises(InvalidInputError, match="batch 0 is empty"):
            writer.put(rows(0, 0))


def test_memtable_accessors_say_why_they_are_not_there(base: BaseTable) -> None:
    with wal_only(base) as writer:
        for accessor in (
            writer.memtable_stats,
            writer.scan,
            writer.active_memtable_ref,
            writer.in_memory_memtable_refs,
            writer.force_seal_active,
            writer.wait_for_flush_drain,
            writer.flush,
        ):
            with pytest.raises(InvalidInputError, match="WAL-only mode"):
                accessor()


def test_puts_that_nobody_waits_for_share_one_entry(base: BaseTable) -> None:
    with wal_only(base, durable_write=False, max_wal_flush_interval=None) as writer:
        for i in range(3):
            writer.put(rows(i * 10, 10))
        assert entries(base, writer.shard_id) == []
    assert entries(base, writer.shard_id) == [list(range(30))]


def test_time_trigger_keeps_firing(base: BaseTable) -> None:
    with wal_only(base, durable_write=False) as writer:
        for i in range(3):
            result = writer.put(rows(i, 1))
            wait_until(result.durable.done)
    assert entries(base, writer.shard_id) == [[0], [1], [2]]


def test_size_trigger_fires_at_every_crossing(base: BaseTable) -> None:
    with wal_only(base, durable_write=False, max_wal_flush_interval=None, max_wal_buffer_size=1) as writer:
        for i in range(3):
            result = writer.put(rows(i, 1))
            wait_until(result.durable.done)
    assert entries(base, writer.shard_id) == [[0], [1], [2]]


def test_fencing(base: BaseTable) -> None:
    shard = uuid.uuid4()
    first = wal_only(base, shard)
    first.put(rows(0, 1))
    with wal_only(base, shard) as second:
        assert second.epoch > first.epoch
        second.put(rows(1, 1))
        with pytest.raises(FencedError):
            first.put(rows(2, 1))
    assert entries(base, shard) == [[0], [1]]


def test_concurrent_puts_on_a_fenced_writer_do_not_silently_succeed(base: BaseTable) -> None:
    """A drain before a failing append once made the second put find an empty queue and return."""
    shard = uuid.uuid4()
    first = wal_only(base, shard)
    first.put(rows(0, 1))
    second = wal_only(base, shard)
    second.put(rows(1, 1))
    outcomes: list[str] = []

    def put(i: int) -> None:
        try:
            first.put(rows(i, 1))
            outcomes.append("acknowledged")
        except FencedError:
            outcomes.append("fenced")

    threads = [threading.Thread(target=put, args=(i,)) for i in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert outcomes == ["fenced", "fenced"]
    second.close()


def test_a_failed_append_keeps_its_rows_in_the_queue(base: BaseTable) -> None:
    store = FaultyStore(ObjectStore.from_uri(base.uri, fsync=False))
    writer = wal_only(base, store=store, durable_write=False, max_wal_flush_interval=None)
    writer.put(rows(0, 2))
    store.faults.fail("put_if_absent", times=2, where="/wal/")  # fewer than the log tries
    writer.put(rows(2, 2)).durable.wait()
    assert entries(base, writer.shard_id) == [[0, 1, 2, 3]]
    writer.close()


def test_backpressure_writes_the_queue_instead_of_waiting_for_somebody(base: BaseTable) -> None:
    with wal_only(
        base, durable_write=False, max_wal_flush_interval=None, max_unflushed_memtable_bytes=500
    ) as writer:
        for i in range(30):
            writer.put(rows(i * 10, 10))
            assert writer.wal_stats().pending_bytes < 500 + 1000
        assert writer.stats().backpressure_count > 0
    assert sorted(i for entry in entries(base, writer.shard_id) for i in entry) == list(range(300))


def test_statistics_know_no_flush_and_no_index(base: BaseTable) -> None:
    writer = wal_only(base)
    writer.put(rows(0, 1))
    handle = writer.stats_handle
    writer.close()
    snapshot = handle.snapshot()
    assert (snapshot.put_count, snapshot.wal_flush_count) == (1, 1)
    assert (snapshot.memtable_flush_count, snapshot.index_update_count) == (0, 0)


def test_wal_stats_are_right_before_the_first_put_after_reopen(base: BaseTable) -> None:
    shard = uuid.uuid4()
    with wal_only(base, shard) as writer:
        writer.put(rows(0, 1))
    with wal_only(base, shard) as again:
        # Entry 1, then this writer's own sentinel at 2.
        assert again.wal_stats().next_wal_entry_position == 3


def test_close_raises_when_the_queue_cannot_be_written(base: BaseTable) -> None:
    store = FaultyStore(ObjectStore.from_uri(base.uri, fsync=False))
    writer = wal_only(base, store=store, durable_write=False, max_wal_flush_interval=None)
    writer.put(rows(0, 1))
    store.faults.fail("put_if_absent", times=None, where="/wal/")
    with pytest.raises(StorageError):
        writer.close()


def test_a_memtable_writer_replays_what_wal_only_wrote(base: BaseTable) -> None:
    shard = uuid.uuid4()
    with wal_only(base, shard) as writer:
        writer.put(rows(0, 3))
        writer.delete([1])
    with open_writer(base, shard) as reader:
        assert ids(reader.scan()) == [0, 2]
