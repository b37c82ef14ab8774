"""A writer that was superseded never acknowledges again, however long it stood still."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lancewal.base.table import BaseTable
from lancewal.errors import FencedError, LanceWalError
from lancewal.index.kinds import FullTextParams, IndexSpec
from lancewal.storage import layout
from lancewal.storage.clock import MIN_DELETION_AGE, RECHECK_AFTER
from lancewal.writer import ShardWriter, open_shard_writer
from tests.faults import FaultyStore
from tests.patience import PATIENCE
from tests.shards import manifest_of, settled_rows, sstable_rows, store_of, wal_entries
from tests.tables import APPEND_ONLY, abandon, fast, ids, new_table, open_writer, rows


class FakeClock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def sleep_past_collection(self) -> None:
        self.seconds += MIN_DELETION_AGE.total_seconds() + 1


@pytest.fixture
def base(tmp_path: Path) -> BaseTable:
    return new_table(tmp_path / "t", APPEND_ONLY)


def batch(number: int) -> object:
    return rows(number * 10, 2, schema=APPEND_ONLY)


def stalling_writer(
    base: BaseTable, shard: uuid.UUID, store: FaultyStore | None = None
) -> tuple[ShardWriter, FakeClock]:
    clock = FakeClock()
    return open_shard_writer(base, shard, fast(), indexes=(), store=store, clock=clock), clock


def take_over_and_collect(base: BaseTable, shard: uuid.UUID) -> None:
    """A successor claims, writes, flushes all; then garbage collection empties the whole WAL."""
    with open_writer(base, shard) as successor:
        successor.put(batch(8))
        successor.put(batch(9))
    store = store_of(base)
    covered = manifest_of(base, shard).replay_after_wal_entry_position
    for position in range(1, covered + 1):
        store.delete(layout.wal_entry(shard, position))


def test_a_put_into_a_slot_that_was_emptied_meanwhile_is_not_acknowledged(base: BaseTable) -> None:
    """The write itself succeeds, for nobody is in its way; only the epoch tells."""
    shard = uuid.uuid4()
    writer, clock = stalling_writer(base, shard)
    writer.put(batch(0))
    take_over_and_collect(base, shard)
    clock.sleep_past_collection()
    with pytest.raises(FencedError) as caught:
        writer.put(batch(1))
    assert (caught.value.local_epoch, caught.value.stored_epoch) == (1, 2)
    with pytest.raises(FencedError):
        writer.put(batch(2))
    abandon(writer)
    with open_writer(base, shard) as again:
        assert sorted({row["id"] // 10 for row in settled_rows(base, again)}) == [0, 8, 9]


def test_a_put_that_stalls_inside_its_write_is_not_acknowledged(base: BaseTable) -> None:
    """The epoch was ours when the write began, and is lost when it lands."""
    shard = uuid.uuid4()
    store = FaultyStore(store_of(base))
    writer, clock = stalling_writer(base, shard, store)
    writer.put(batch(0))
    outcomes: list[object] = []

    def put() -> None:
        try:
            outcomes.append(writer.put(batch(1)))
        except LanceWalError as error:
            outcomes.append(type(error))

    with store.faults.pause("put_if_absent", where="/wal/") as pause:
        thread = threading.Thread(target=put, daemon=True)
        thread.start()
        pause.wait_until_reached()
        take_over_and_collect(base, shard)
        clock.sleep_past_collection()
    thread.join(PATIENCE)
    assert outcomes == [FencedError]
    abandon(writer)


def test_a_writer_that_only_rested_goes_on(base: BaseTable) -> None:
    """Long idle, nobody else there, its own entries flushed and collected: no reason to refuse."""
    shard = uuid.uuid4()
    writer, clock = stalling_writer(base, shard)
    writer.put(batch(0))
    writer.force_seal_active()
    writer.wait_for_flush_drain()
    store_of(base).delete(layout.wal_entry(shard, 1))
    clock.sleep_past_collection()
    writer.put(batch(1))
    abandon(writer)
    assert [entry.position for entry in wal_entries(base, shard)] == [2]
    with open_writer(base, shard) as again:
        assert ids(again.scan()) == [10, 11]


def test_an_idle_writer_looks_at_the_manifest_no_more_often_than_it_must(base: BaseTable) -> None:
    store = FaultyStore(store_of(base))
    writer, clock = stalling_writer(base, uuid.uuid4(), store)
    writer.put(batch(0))
    store.faults.clear()
    for number in range(1, 5):
        clock.seconds += RECHECK_AFTER.total_seconds() / 2
        writer.put(batch(number))
    assert store.faults.count("head", "/manifest/") == 0
    clock.seconds += RECHECK_AFTER.total_seconds() + 1
    writer.put(batch(5))
    assert store.faults.count("head", "/manifest/") > 0
    abandon(writer)


@pytest.mark.parametrize("collected", ["all", "none", "all but the last"])
def test_a_fence_never_lands_below_the_replay_cursor(base: BaseTable, collected: str) -> None:
    """It took the first free slot it saw, in the collected part, where no replay would see what follows."""
    shard = uuid.uuid4()
    with open_writer(base, shard) as writer:
        for number in range(3):
            writer.put(batch(number))
    covered = manifest_of(base, shard).replay_after_wal_entry_position
    assert covered == 3
    gone = {"all": range(1, 4), "none": range(0), "all but the last": range(1, 3)}[collected]
    for position in gone:
        store_of(base).delete(layout.wal_entry(shard, position))
    second = open_writer(base, shard)
    second.put(batch(3))
    abandon(second)
    tail = [entry for entry in wal_entries(base, shard) if entry.position > covered]
    assert [(entry.position, entry.sentinel) for entry in tail] == [(4, True), (5, False)]
    third = open_writer(base, shard)
    assert ids(third.scan()) == [30, 31]
    assert third.stats().replayed_entries == 1
    abandon(third)


def test_a_flush_by_the_predecessor_that_lost_its_epoch_is_not_published(base: BaseTable) -> None:
    """Its SSTable is written, the successor claims, and only then it comes to the manifest."""
    shard = uuid.uuid4()
    store = FaultyStore(store_of(base))
    writer = open_writer(base, shard, store=store)
    writer.put(batch(0))
    with store.faults.pause("put_if_absent", where="/manifest/") as pause:
        writer.force_seal_active()
        pause.wait_until_reached()
        successor = open_writer(base, shard)
    with pytest.raises(FencedError):
        writer.wait_for_flush_drain()
    assert manifest_of(base, shard).sstables == ()
    assert ids(successor.scan()) == [0, 1]
    successor.close()
    abandon(writer)
    assert sorted(row["id"] for row in sstable_rows(base, shard)) == [0, 1]


LOST_REPLIES: dict[str, Callable[[ShardWriter], object]] = {
    "/wal/": lambda writer: writer.put(batch(1)),
    "/manifest/": lambda writer: writer.close(),
}


@pytest.mark.parametrize("where", LOST_REPLIES)
def test_a_lost_reply_of_the_own_write_is_not_taken_for_a_rival(base: BaseTable, where: str) -> None:
    shard = uuid.uuid4()
    store = FaultyStore(store_of(base))
    writer = open_writer(base, shard, store=store)
    writer.put(batch(0))
    store.faults.fail("put_if_absent", after=True, where=where)
    LOST_REPLIES[where](writer)
    if where == "/wal/":
        writer.put(batch(2))
        writer.close()
    found = sorted(row["id"] // 10 for row in sstable_rows(base, shard))
    assert found == ([0, 0, 1, 1, 2, 2] if where == "/wal/" else [0, 0])
    assert [entry.generation for entry in manifest_of(base, shard).sstables] == [1]


def test_the_bytes_of_indexes_count_for_freezing_and_backpressure(base: BaseTable) -> None:
    """Rows were small and their index was not: memory grew past the limit, and nobody saw it."""
    text = FullTextParams()
    spec = IndexSpec("name_fts", "name", 1, text)
    huge = 1 << 40
    unlimited: dict[str, Any] = {"max_memtable_size": huge, "max_unflushed_memtable_bytes": huge}
    with open_writer(base, indexes=[spec], **unlimited) as writer:
        writer.put(rows(0, 500, schema=APPEND_ONLY))
        stats = writer.memtable_stats()
        abandon(writer)
        writer._state.close()
    assert stats.index_bytes > 0
    assert stats.estimated_size > stats.index_bytes
    limit = stats.estimated_size - stats.index_bytes // 2
    limited: dict[str, Any] = {"max_memtable_size": limit, "max_unflushed_memtable_bytes": limit}
    with open_writer(base, indexes=[spec], **limited) as writer:
        writer.put(rows(0, 500, schema=APPEND_ONLY))
        assert writer.memtable_stats().generation == 2, "the index's bytes did not freeze the MemTable"
    with open_writer(base, **limited) as writer:
        writer.put(rows(0, 500, schema=APPEND_ONLY))
        assert writer.memtable_stats().generation == 1, "without the index it fits"


@pytest.mark.parametrize("noticed", [True, False], ids=["after a put", "before it knows"])
@pytest.mark.parametrize("memtable", [True, False], ids=["memtable", "wal only"])
def test_close_of_a_fenced_writer_raised_although_all_was_durable(
    base: BaseTable, memtable: bool, noticed: bool
) -> None:
    shard = uuid.uuid4()
    fenced = open_writer(base, shard, enable_memtable=memtable)
    fenced.put(batch(1))
    with open_writer(base, shard) as successor:
        if noticed:
            with pytest.raises(FencedError):
                fenced.put(batch(2))
        fenced.close()
        fenced.close()
        assert fenced.closed
        assert ids(successor.scan()) == [10, 11]


@pytest.mark.parametrize("memtable", [True, False], ids=["memtable", "wal only"])
def test_close_of_a_fenced_writer_says_which_rows_are_lost(base: BaseTable, memtable: bool) -> None:
    shard = uuid.uuid4()
    fenced = open_writer(
        base, shard, enable_memtable=memtable, durable_write=False, max_wal_flush_interval=None
    )
    fenced.put(batch(1))
    with open_writer(base, shard):
        with pytest.raises(FencedError):
            fenced.close()
        assert fenced.closed


def test_a_flush_that_was_fenced_is_no_silent_one(base: BaseTable) -> None:
    """Who drains a shard must hear that its rows are not in an SSTable."""
    shard = uuid.uuid4()
    fenced = open_writer(base, shard)
    fenced.put(batch(1))
    with open_writer(base, shard), pytest.raises(FencedError):
        fenced.finish()


def test_a_flush_of_a_cloned_writer_counted_the_rows_of_the_other_as_flushed(base: BaseTable) -> None:
    shard = uuid.uuid4()
    writer = open_writer(base, shard)
    writer.put(batch(1))
    # What a clone of the machine goes on with: the same epoch, and the same idea of the tail.
    appender = writer._appender
    clone = type(appender)(
        store_of(base), appender.manifests, appender.epoch, appender.claimed, keep_metadata=True
    )
    clone.seed_next_position(appender.next_position_hint)
    stored = pa.ipc.read_record_batch(
        wal_entries(base, shard)[0].batches[0].serialize(), writer._intake.schema.stored
    )
    clone.append([stored], generation=1)
    with pytest.raises(FencedError, match="another process writes under epoch 1"):
        writer.finish()
    with open_writer(base, shard) as again:
        assert ids(again.scan()) == [10, 10, 11, 11], "both entries are replayed"
