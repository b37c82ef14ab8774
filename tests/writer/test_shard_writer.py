"""MemTable mode: every behaviour that Lance's own writer tests assert, and ours on top."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
import uuid
from datetime import timedelta

import lance
import pyarrow as pa
import pytest

from lancewal.base.table import BaseTable
from lancewal.errors import ClosedError, FencedError, InvalidInputError, OutcomeUnknownError, StorageError
from lancewal.memtable import scan_views
from lancewal.shard import WalTailer
from lancewal.storage import ObjectStore, layout
from lancewal.writer import open_shard_writer
from lancewal.writer.group_commit import Put
from tests.faults import FaultyStore
from tests.patience import PATIENCE, wait_until
from tests.servers import S3Server
from tests.tables import APPEND_ONLY, KEYED, abandon, fast, ids, new_table, open_writer, rows


def store_of(base: BaseTable) -> FaultyStore:
    return FaultyStore(ObjectStore.from_uri(base.uri, fsync=False))


def sstable_ids(base: BaseTable, shard_id: uuid.UUID, path: str) -> list[int]:
    uri = layout.child_uri(base.uri, layout.sstable_dir(shard_id, path))
    return ids(lance.dataset(uri, storage_options=dict(base.storage_options)).to_table())


# --- basic writes -----------------------------------------------------------------------


def test_basic_write(base: BaseTable) -> None:
    with open_writer(base, durable_write=False, max_wal_flush_interval=None) as writer:
        result = writer.put(rows(0, 10))
        assert result.batch_positions == range(1)
        stats = writer.memtable_stats()
        assert (stats.row_count, stats.batch_count) == (10, 1)


def test_several_batches_in_one_put(base: BaseTable) -> None:
    with open_writer(base) as writer:
        result = writer.put([rows(i * 10, 10) for i in range(5)])
        assert result.batch_positions == range(5)
        stats = writer.memtable_stats()
        assert (stats.row_count, stats.batch_count) == (50, 5)
        assert WalTailer(store_of(base), writer.shard_id).next_position() == 2, "one put is one entry"


def test_rows_are_readable_when_put_returns_in_every_batch(base: BaseTable) -> None:
    """Without indexes only the first batch was visible once."""
    for durable in (True, False):
        with open_writer(base, durable_write=durable) as writer:
            for i in range(5):
                writer.put(rows(i * 10, 10))
                assert ids(writer.scan()) == list(range((i + 1) * 10))


def test_flush_interval_zero_leaves_nothing_invisible(base: BaseTable) -> None:
    shard = uuid.uuid4()
    with open_writer(base, shard, durable_write=False, max_wal_flush_interval=timedelta(0)) as writer:
        result = writer.put(rows(0, 3))
        assert ids(writer.scan()) == [0, 1, 2]
        wait_until(result.durable.done, "an interval of zero must flush at once")


def test_newest_version_wins_and_deletes_hide(base: BaseTable) -> None:
    with open_writer(base) as writer:
        writer.put(rows(0, 3, prefix="old"))
        writer.put(rows(1, 1, prefix="new"))
        writer.delete([0])
        assert writer.scan().sort_by("id").to_pylist() == [
            {"id": 1, "name": "new_1"},
            {"id": 2, "name": "old_2"},
        ]
        writer.put(rows(0, 1, prefix="back"))
        assert ids(writer.scan()) == [0, 1, 2]


def test_append_only_table_keeps_every_row(append_only: BaseTable) -> None:
    with open_writer(append_only) as writer:
        writer.put(rows(0, 2, schema=APPEND_ONLY))
        writer.put(rows(0, 2, schema=APPEND_ONLY))
        assert ids(writer.scan()) == [0, 0, 1, 1]
        with pytest.raises(InvalidInputError, match="no primary key"):
            writer.delete([0])


def test_scan_selects_columns_and_filters(base: BaseTable) -> None:
    with open_writer(base) as writer:
        writer.put(rows(0, 10))
        found = writer.scan(columns=["name"], filter="id >= 7")
        assert found.column_names == ["name"]
        assert sorted(found.column("name").to_pylist()) == ["name_7", "name_8", "name_9"]


def test_a_reader_never_sees_a_row_that_is_not_durable_yet(base: BaseTable) -> None:
    store = store_of(base)
    writer = open_writer(base, store=store)
    writer.put(rows(0, 1))
    with store.faults.pause("put_if_absent", where="/wal/") as pause:
        thread = threading.Thread(target=writer.put, args=(rows(1, 1),))
        thread.start()
        pause.wait_until_reached()
        assert ids(writer.scan()) == [0]
    thread.join(PATIENCE)
    assert ids(writer.scan()) == [0, 1]
    writer.close()


# --- freezing and flushing --------------------------------------------------------------


def test_auto_flush_by_size(base: BaseTable) -> None:
    with open_writer(base, durable_write=False, max_memtable_size=8192) as writer:
        first = writer.memtable_stats().generation
        for i in range(20):
            writer.put(rows(i * 10, 10))
        assert writer.memtable_stats().generation > first


@pytest.mark.parametrize("limit", [{"max_memtable_rows": 20}, {"max_memtable_batches": 2}])
def test_rows_and_batches_limits_are_enforced(base: BaseTable, limit: dict[str, int]) -> None:
    """A row limit that nobody enforced let an index overflow and the shard become unopenable."""
    with open_writer(base, **limit) as writer:
        for i in range(10):
            writer.put(rows(i * 10, 10))
            stats = writer.memtable_stats()
            assert stats.row_count <= limit.get("max_memtable_rows", 1000)
            assert stats.batch_count <= limit.get("max_memtable_batches", 1000)
        writer.wait_for_flush_drain()
        manifest = writer.manifest()
        assert manifest is not None
        for entry in manifest.sstables:
            assert entry.physical_rows is not None
            assert entry.physical_rows <= 20


def test_a_put_larger_than_the_row_limit_is_taken_whole(base: BaseTable) -> None:
    with open_writer(base, max_memtable_rows=10) as writer:
        writer.put(rows(0, 3))
        writer.put(rows(100, 50))
        writer.wait_for_flush_drain()
        manifest = writer.manifest()
        assert manifest is not None
        assert [entry.physical_rows for entry in manifest.sstables] == [3, 50]


def test_auto_flush_repeatedly_under_stress(base: BaseTable) -> None:
    """Every put freezes: generations follow each other without a gap, none is written twice."""
    with open_writer(base, max_memtable_size=64) as writer:
        for i in range(60):
            writer.put(rows(i * 10, 10))
        writer.wait_for_flush_drain()
        manifest = writer.manifest()
    assert manifest is not None
    assert [entry.generation for entry in manifest.sstables] == list(range(1, 61))
    assert manifest.current_generation == 61
    assert len({entry.path for entry in manifest.sstables}) == 60
    found = [i for entry in manifest.sstables for i in sstable_ids(base, manifest.shard_id, entry.path)]
    assert found == list(range(600))


def test_auto_flush_on_an_object_store(s3: S3Server) -> None:
    """Storage options must reach the SSTable writer."""
    options = s3.storage_options
    base = new_table(s3.uri(f"{uuid.uuid4().hex}/t"), storage_options=options)
    writer = open_shard_writer(base, uuid.uuid4(), fast(max_memtable_rows=20), indexes=())
    for i in range(6):
        writer.put(rows(i * 10, 10))
    writer.close()
    manifest = writer.manifest()
    assert manifest is not None
    assert [entry.generation for entry in manifest.sstables] == [1, 2, 3]
    found = [i for entry in manifest.sstables for i in sstable_ids(base, manifest.shard_id, entry.path)]
    assert found == list(range(60))


def test_close_flushes_the_active_memtable(base: BaseTable) -> None:
    shard = uuid.uuid4()
    huge = 1 << 62
    writer = open_writer(base, shard, max_memtable_size=huge, max_unflushed_memtable_bytes=huge)
    for i in range(20):
        writer.put(rows(i * 10, 10))
    assert writer.memtable_stats().generation == 1
    writer.close()
    reopened = open_writer(base, shard)
    manifest = reopened.manifest()
    assert manifest is not None
    assert manifest.current_generation == 2
    assert sstable_ids(base, shard, manifest.sstables[0].path) == list(range(200))
    assert reopened.memtable_stats().row_count == 0
    reopened.close()


def test_force_seal_and_wait_for_flush_drain(base: BaseTable) -> None:
    with open_writer(base, durable_write=False, max_wal_flush_interval=None) as writer:
        writer.force_seal_active()
        assert writer.memtable_stats().generation == 1, "an empty MemTable is not sealed"
        writer.put(rows(0, 10))
        writer.force_seal_active()
        writer.wait_for_flush_drain()
        stats = writer.memtable_stats()
        assert (stats.generation, stats.batch_count, stats.frozen_count) == (2, 0, 0)
        manifest = writer.manifest()
        assert manifest is not None
        assert [entry.generation for entry in manifest.sstables] == [1]
        assert manifest.replay_after_wal_entry_position == 1


def test_a_flush_says_how_many_rows_it_published(base: BaseTable) -> None:
    with open_writer(base) as writer:
        assert writer.flush() == 0
        writer.put(rows(0, 10))
        assert writer.flush() == 10
        manifest = writer.manifest()
        assert manifest is not None
        assert [entry.physical_rows for entry in manifest.sstables] == [10]
        assert writer.flush() == 0


def test_frozen_memtable_is_dropped_after_its_flush(base: BaseTable) -> None:
    with open_writer(base) as writer:
        writer.put(rows(0, 10))
        writer.force_seal_active()
        writer.wait_for_flush_drain()
        refs = writer.in_memory_memtable_refs()
        assert refs.frozen == []
        assert refs.active.generation == 2


def test_frozen_memtable_stays_readable_after_a_failed_flush(base: BaseTable) -> None:
    writer = open_writer(base, shard := uuid.uuid4())
    writer.put(rows(0, 10))
    successor = open_writer(base, shard)
    assert successor.epoch > writer.epoch
    writer._mode.seal_active()  # force_seal_active would notice the fence first
    with pytest.raises(FencedError):
        writer.wait_for_flush_drain()
    refs = writer.in_memory_memtable_refs()
    assert [view.generation for view in refs.frozen] == [1]
    assert ids(scan_views([refs.frozen[0]], base.schema, None, None)) == list(range(10))
    assert refs.active.generation == 2
    writer.close()
    successor.close()


def test_a_flush_that_failed_is_never_passed_by_a_later_one(base: BaseTable) -> None:
    """Flush N fails and N+1 commits: the replay cursor would then skip N's rows."""
    store = store_of(base)
    shard = uuid.uuid4()
    writer = open_writer(base, shard, store=store)
    writer.put(rows(0, 5))
    store.faults.fail("put_if_absent", times=2, where="/manifest/")
    writer.force_seal_active()
    writer.put(rows(5, 5))
    writer.force_seal_active()
    with contextlib.suppress(StorageError):
        writer.wait_for_flush_drain()
    assert writer.stats().memtable_flush_failures >= 1
    wait_until(lambda: not writer.memtable_stats().frozen_count)
    manifest = writer.manifest()
    assert manifest is not None
    assert [entry.generation for entry in manifest.sstables] == [1, 2]
    assert manifest.replay_after_wal_entry_position == 2
    writer.close()


def test_a_published_flush_whose_reply_was_lost_is_not_published_twice(base: BaseTable) -> None:
    store = store_of(base)
    with open_writer(base, store=store) as writer:
        writer.put(rows(0, 5))
        store.faults.fail("put_if_absent", where="/manifest/", after=True)
        writer.force_seal_active()
        # The failed try may be over before the first wait begins.
        with contextlib.suppress(OutcomeUnknownError):
            writer.wait_for_flush_drain()
        writer.wait_for_flush_drain()
        manifest = writer.manifest()
        assert manifest is not None
        assert [entry.generation for entry in manifest.sstables] == [1]


def test_covered_wal_position_is_exact(base: BaseTable) -> None:
    """It covers the MemTable's own entries, not those that other MemTables wrote meanwhile."""
    store = store_of(base)
    with open_writer(base, store=store) as writer:
        writer.put(rows(0, 1))
        writer.put(rows(1, 1))
        with store.faults.pause("put_if_absent", where="/manifest/") as pause:
            writer.force_seal_active()
            pause.wait_until_reached()
            for i in range(2, 6):
                writer.put(rows(i, 1))
        writer.wait_for_flush_drain()
        manifest = writer.manifest()
        assert manifest is not None
        assert manifest.replay_after_wal_entry_position == 2


def test_a_delete_that_straddles_a_freeze_hides_the_row(base: BaseTable) -> None:
    store = store_of(base)
    with open_writer(base, store=store) as writer:
        writer.put(rows(0, 3))
        with store.faults.pause("put_if_absent", where="/manifest/") as pause:
            writer.force_seal_active()
            writer.delete([1])
            pause.wait_until_reached()
            assert ids(writer.scan()) == [0, 2]


def test_memtable_flushes_carry_accounting_into_the_manifest(base: BaseTable) -> None:
    with open_writer(base) as writer:
        writer.put(rows(0, 7))
        writer.force_seal_active()
        writer.wait_for_flush_drain()
        manifest = writer.manifest()
    assert manifest is not None
    (entry,) = manifest.sstables
    assert entry.physical_rows == 7
    assert entry.primary_key_bytes == 7 * 8
    assert entry.in_memory_bytes
    assert layout.parse_sstable_name(entry.path) == 1


def test_a_flush_told_of_fewer_rows_than_it_had_flushed(
    base: BaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were counted only after the wait for them was over."""
    waiting: list[int] = []
    with open_writer(base) as writer:
        count, queue = writer.stats_handle.add, writer._mode._flushes  # type: ignore[union-attr]

        def counted(**amounts: float) -> None:
            if "memtable_flush_rows" in amounts:
                waiting.append(len(queue.frozen))
            count(**amounts)

        monkeypatch.setattr(writer.stats_handle, "add", counted)
        writer.put(rows(0, 7))
        assert writer.flush() == 7
    assert waiting == [1]


# --- backpressure -----------------------------------------------------------------------


def test_backpressure_holds_puts_until_a_flush_and_is_counted(base: BaseTable) -> None:
    store = store_of(base)
    limit = 20_000
    writer = open_writer(base, store=store, max_memtable_size=limit, max_unflushed_memtable_bytes=limit)
    with store.faults.pause("put_if_absent", where="/manifest/") as pause:
        while writer.memtable_stats().frozen_count == 0:
            writer.put(rows(0, 100))
        pause.wait_until_reached()
        blocked = threading.Thread(target=writer.put, args=(rows(0, 100),))
        blocked.start()
        blocked.join(0.05)
        assert blocked.is_alive(), "the put did not wait for the flush"
    blocked.join(PATIENCE)
    assert not blocked.is_alive()
    assert writer.stats().backpressure_count >= 1
    writer.close()


def test_memtable_above_the_backpressure_limit_but_below_the_freeze_limits_does_not_deadlock(
    base: BaseTable,
) -> None:
    """Rows that pass the limit in one put, with no freeze due: the waiting put starts the flush."""
    with open_writer(base, max_memtable_size=30_000, max_unflushed_memtable_bytes=30_000) as writer:
        writer.put(rows(0, 500))
        # One byte below the freeze limit is above what the next put may find.
        writer._backpressure._limit = 10
        thread = threading.Thread(target=writer.put, args=(rows(1000, 1),))
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "deadlock between backpressure and freeze"


def test_close_wakes_a_put_that_waits_for_room(base: BaseTable) -> None:
    store = store_of(base)
    writer = open_writer(base, store=store, max_memtable_size=2000, max_unflushed_memtable_bytes=2000)
    errors: list[BaseException] = []

    def put() -> None:
        try:
            writer.put(rows(100, 1))
        except ClosedError as error:
            errors.append(error)

    with store.faults.pause("put_if_absent", where="/manifest/") as pause:
        writer.put(rows(0, 100))
        pause.wait_until_reached()
        blocked = threading.Thread(target=put)
        blocked.start()
        while writer.stats().backpressure_count == 0 and blocked.is_alive() and not errors:
            if writer._state._changed._waiting:
                break
            time.sleep(0.001)
        closer = threading.Thread(target=writer.close)
        closer.start()
        blocked.join(PATIENCE)
        assert not blocked.is_alive()
        assert len(errors) == 1
    closer.join(PATIENCE)
    assert not closer.is_alive()


# --- closing and failing ----------------------------------------------------------------


def test_close_raises_when_the_final_flush_failed_and_nothing_is_lost(base: BaseTable) -> None:
    store = store_of(base)
    shard = uuid.uuid4()
    writer = open_writer(base, shard, store=store)
    writer.put(rows(0, 5))
    store.faults.fail("put_if_absent", times=None, where="/manifest/")
    with pytest.raises(StorageError, match="injected"):
        writer.close()
    store.faults.clear()
    with open_writer(base, shard) as again:
        assert ids(again.scan()) == [0, 1, 2, 3, 4]


def test_close_raises_when_the_last_wal_write_failed(base: BaseTable) -> None:
    store = store_of(base)
    writer = open_writer(base, store=store, durable_write=False, max_wal_flush_interval=None)
    writer.put(rows(0, 5))
    store.faults.fail("put_if_absent", times=None, where="/wal/")
    with pytest.raises(StorageError, match="injected"):
        writer.close()


def test_closing_twice_is_harmless_and_a_closed_writer_refuses(base: BaseTable) -> None:
    writer = open_writer(base)
    writer.close()
    writer.close()
    with pytest.raises(ClosedError):
        writer.put(rows(0, 1))
    with pytest.raises(ClosedError):
        writer.delete([1])
    with pytest.raises(ClosedError):
        writer.force_seal_active()


def test_no_thread_outlives_close(base: BaseTable) -> None:
    before = set(threading.enumerate())
    for durable in (True, False):
        with open_writer(
            base, durable_write=durable, max_memtable_rows=5, sync_indexed_write=False
        ) as writer:
            for i in range(5):
                writer.put(rows(i * 4, 4))
    left = {thread for thread in set(threading.enumerate()) - before if "lancewal" in thread.name}
    assert left == set()


def test_a_collected_writer_ends_its_threads_and_loses_nothing(
    base: BaseTable, caplog: pytest.LogCaptureFixture
) -> None:
    shard = uuid.uuid4()
    writer = open_writer(base, shard, max_memtable_rows=5)
    for i in range(5):
        writer.put(rows(i * 4, 4))
    with caplog.at_level(logging.WARNING):
        del writer
        gc.collect()
    assert any("not closed" in record.message for record in caplog.records)
    assert not [t for t in threading.enumerate() if str(shard) in t.name]
    with open_writer(base, shard) as again:
        manifest = again.manifest()
        assert manifest is not None
        flushed = [i for entry in manifest.sstables for i in sstable_ids(base, shard, entry.path)]
        assert sorted(flushed + ids(again.scan())) == list(range(20))


def test_poisoned_writer_refuses_reads_too(base: BaseTable) -> None:
    """A writer whose WAL failed holds rows that no log has: serving them would show lost rows."""
    store = store_of(base)
    writer = open_writer(base, store=store, durable_write=False, max_wal_flush_interval=None)
    result = writer.put(rows(0, 5))
    store.faults.fail("put_if_absent", times=None, where="/wal/")
    with pytest.raises(StorageError):
        result.durable.wait()
    for read in (writer.scan, writer.active_memtable_ref, writer.in_memory_memtable_refs):
        with pytest.raises(StorageError):
            read()
    with pytest.raises(StorageError):
        writer.put(rows(5, 1))
    with pytest.raises(StorageError):
        writer.close()


def test_only_the_put_that_was_sent_has_an_unknown_outcome(append_only: BaseTable) -> None:
    """It is in the log, although its writer never heard so; what is put after it is not."""
    store = store_of(append_only)
    shard = uuid.uuid4()
    writer = open_writer(append_only, shard, store=store)
    store.faults.fail("put_if_absent", times=None, after=True, where="/wal/")
    sent = rows(0, 2, schema=append_only.schema.plain)
    with pytest.raises(OutcomeUnknownError, match="injected"):
        writer.put(sent)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"ended before.*open a new one"):
            writer.put(rows(2, 2, schema=append_only.schema.plain))
    abandon(writer)
    with open_writer(append_only, shard) as again:
        assert sorted(ids(again.scan())) == [0, 1]


def test_a_put_that_the_storage_refused_did_not_happen(append_only: BaseTable) -> None:
    store = store_of(append_only)
    shard = uuid.uuid4()
    writer = open_writer(append_only, shard, store=store)
    store.faults.fail("put_if_absent", times=None, where="/wal/")
    with pytest.raises(StorageError, match="injected"):
        writer.put(rows(0, 2, schema=append_only.schema.plain))
    abandon(writer)
    with open_writer(append_only, shard) as again:
        assert ids(again.scan()) == []


def test_fenced_writer_fails_at_once_and_reports_both_epochs(base: BaseTable) -> None:
    shard = uuid.uuid4()
    writer = open_writer(base, shard)
    writer.put(rows(0, 1))
    with open_writer(base, shard) as successor:
        successor.put(rows(1, 1))
        with pytest.raises(FencedError) as caught:
            writer.put(rows(2, 1))
        assert (caught.value.local_epoch, caught.value.stored_epoch) == (1, 2)
        with pytest.raises(FencedError):
            writer.check_fenced()
        with pytest.raises(FencedError):
            writer.put(rows(3, 1))
        successor.check_fenced()
        assert ids(successor.scan()) == [0, 1]
    writer.close()


def test_concurrent_puts_on_a_fenced_writer_never_succeed(base: BaseTable) -> None:
    shard = uuid.uuid4()
    writer = open_writer(base, shard)
    writer.put(rows(0, 1))
    successor = open_writer(base, shard)
    outcomes: list[str] = []

    def put(i: int) -> None:
        try:
            writer.put(rows(i, 1))
            outcomes.append("acknowledged")
        except FencedError:
            outcomes.append("fenced")

    threads = [threading.Thread(target=put, args=(i,)) for i in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert outcomes == ["fenced"] * 8
    assert ids(successor.scan()) == [0]
    successor.close()
    abandon(writer)


def test_predecessor_cannot_acknowledge_after_the_successor_opened(base: BaseTable) -> None:
    """The successor has not written a row yet; its sentinel alone must stop the predecessor."""
    shard = uuid.uuid4()
    writer = open_writer(base, shard)
    successor = open_writer(base, shard)
    with pytest.raises(FencedError):
        writer.put(rows(0, 1))
    assert ids(successor.scan()) == []
    successor.close()
    abandon(writer)


# --- bad input --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "empty batch list"),
        (KEYED.empty_table().to_batches(), "empty batch list"),
        (pa.RecordBatch.from_pylist([], schema=KEYED), "batch 0 is empty"),
        (pa.record_batch({"id": ["x"], "name": ["y"]}), "column id is string"),
        (pa.record_batch({"id": [1.5], "name": ["y"]}), "column id .* row 0 is 1.5"),
        (pa.record_batch({"name": ["y"]}), "column id is missing"),
        (pa.record_batch({"id": pa.array([None], pa.int64())}), "1 nulls in key column id"),
        (pa.record_batch({"id": [1], "other": [2]}), "no column other"),
        (42, "cannot read rows from int"),
    ],
)
def test_a_refused_put_has_no_effect(base: BaseTable, data: object, message: str) -> None:
    store = store_of(base)
    with open_writer(base, store=store) as writer:
        writer.put(rows(0, 1))
        written = store.faults.count("put_if_absent")
        with pytest.raises(InvalidInputError, match=message):
            writer.put(data)
        # One bad batch refuses the good one beside it.
        if isinstance(data, pa.RecordBatch):
            with pytest.raises(InvalidInputError):
                writer.put([rows(50, 1), data])
        assert store.faults.count("put_if_absent") == written
        assert ids(writer.scan()) == [0]
        writer.put(rows(1, 1))
        assert ids(writer.scan()) == [0, 1]


def test_missing_nullable_column_is_filled_and_order_does_not_matter(base: BaseTable) -> None:
    with open_writer(base) as writer:
        writer.put(pa.record_batch({"id": [1]}))
        writer.put(pa.record_batch({"name": ["b"], "id": [2]}))
        assert writer.scan().sort_by("id").to_pylist() == [{"id": 1, "name": None}, {"id": 2, "name": "b"}]


def test_a_shard_id_that_is_none_is_refused(base: BaseTable) -> None:
    with pytest.raises(InvalidInputError, match="not a UUID"):
        open_shard_writer(base, "not-a-shard", fast())


def test_spec_id_mismatch_is_found_before_the_epoch_is_bumped(base: BaseTable) -> None:
    shard = uuid.uuid4()
    with open_shard_writer(base, shard, fast(), spec_id=1, indexes=()) as writer:
        before = writer.manifest()
        with pytest.raises(InvalidInputError, match="spec 1"):
            open_shard_writer(base, shard, fast(), spec_id=2, indexes=())
        assert writer.manifest() == before
        writer.put(rows(0, 1))


# --- statistics -------------------------------------------------------------------------


def test_statistics_of_a_life(base: BaseTable) -> None:
    writer = open_writer(base, max_memtable_rows=10)
    for i in range(3):
        writer.put(rows(i * 10, 10))
    handle = writer.stats_handle
    writer.close()
    snapshot = handle.snapshot()
    assert (snapshot.put_count, snapshot.put_rows) == (3, 30)
    assert snapshot.wal_flush_count == 3
    assert snapshot.wal_flush_bytes > 0
    assert (snapshot.memtable_flush_count, snapshot.memtable_flush_rows) == (3, 30)
    assert snapshot.index_update_count == 0, "there is no index to update"


def test_statistics_are_logged_with_the_first_put_after_the_interval(
    base: BaseTable, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), open_writer(base, stats_log_interval=timedelta(0)) as writer:
        writer.put(rows(0, 1))
        assert any(f"shard {writer.shard_id}: 1 puts" in r.getMessage() for r in caplog.records)


def test_memtable_stats_tell_what_is_not_in_the_wal(base: BaseTable) -> None:
    with open_writer(base, durable_write=False, max_wal_flush_interval=None) as writer:
        first = writer.put(rows(0, 4))
        writer.put([rows(4, 4), rows(8, 4)])
        stats = writer.memtable_stats()
        assert (stats.pending_wal_start_batch_position, stats.pending_wal_end_batch_position) == (0, 3)
        assert (stats.pending_wal_batch_count, stats.pending_wal_row_count) == (3, 12)
        assert (stats.max_buffered_batch_position, stats.max_flushed_batch_position) == (2, None)
        assert writer.wal_stats().pending_batches == 3
        assert first.durable.wait(PATIENCE)
        stats = writer.memtable_stats()
        assert stats.pending_wal_batch_count == 0
        assert stats.pending_wal_start_batch_position is None
        assert stats.max_flushed_batch_position == 2
        assert writer.wal_stats().next_wal_entry_position == 2


def test_size_trigger_writes_the_wal_without_a_waiter(base: BaseTable) -> None:
    with open_writer(base, durable_write=False, max_wal_flush_interval=None, max_wal_buffer_size=1) as writer:
        for i in range(3):
            result = writer.put(rows(i, 1))
            wait_until(result.durable.done, f"the WAL write of crossing {i}")
        assert writer.wal_stats().next_wal_entry_position == 4


def test_threads_that_come_at_the_same_time_all_found_room(base: BaseTable) -> None:
    """Each looked before the others' rows were counted."""
    limit, size = 1 << 20, 300_000
    writer = open_writer(base, max_memtable_size=limit, max_unflushed_memtable_bytes=limit)
    pressure = writer._backpressure
    let_in: list[int] = []
    insert = writer._mode.insert
    meeting = threading.Barrier(16)

    def counted(put_: Put) -> None:
        let_in.append(pressure.let_in_bytes + writer._mode.unflushed_bytes)
        insert(put_)

    writer._mode.insert = counted  # type: ignore[method-assign]

    def put(number: int) -> None:
        batch = pa.record_batch([pa.array([number]), pa.array(["x" * size])], schema=base.schema.plain)
        meeting.wait(PATIENCE)
        writer.put(batch)

    threads = [threading.Thread(target=put, args=(number,), daemon=True) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    writer.close()
    assert len(let_in) == 16
    assert max(let_in) <= limit + 2 * size
    assert pressure.let_in_bytes == 0
