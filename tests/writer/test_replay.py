"""Opening a shard restores what was acknowledged and is in no SSTable: all of it, once."""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import lancewal.writer.flush
import lancewal.writer.open
from lancewal.base.table import BaseTable
from lancewal.errors import (
    FencedError,
    InvalidInputError,
    LanceWalError,
    OutcomeUnknownError,
    StorageError,
    WalCorruptError,
)
from lancewal.format.wal_entry import encode_entry, entry_schema
from lancewal.index.kinds import BTreeParams, FullTextParams, IndexSpec
from lancewal.shard import WalAppender
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import ObjectStore, layout
from lancewal.writer import ShardWriter
from lancewal.writer.group_commit import Put
from lancewal.writer.intake import Rows
from lancewal.writer.modes import MemTableMode
from tests.faults import FaultyStore
from tests.patience import PATIENCE, wait_until
from tests.shards import (
    Row,
    manifest_of,
    memory_rows,
    newest,
    settled_rows,
    sstable_rows,
    store_of,
    stored_batches,
    wal_entries,
    write_entry,
)
from tests.tables import APPEND_ONLY, KEYED, abandon, ids, new_table, open_writer, rows


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lancewal.writer.flush, "FIRST_RETRY_SECONDS", 0.001)


def appended(number: int, count: int = 2) -> pa.RecordBatch:
    return rows(number * 100, count, schema=APPEND_ONLY)


def appended_ids(numbers: range, count: int = 2) -> list[int]:
    return [number * 100 + i for number in numbers for i in range(count)]


def all_ids(base: BaseTable, writer: ShardWriter) -> list[int]:
    return sorted(row["id"] for row in settled_rows(base, writer))


def make_wal(base: BaseTable, generations: list[int | None]) -> uuid.UUID:
    """A shard whose WAL holds one entry per item, as writers in both modes leave it when killed."""
    shard = uuid.uuid4()
    appender = WalAppender.open(store_of(base), shard)
    for number, generation in enumerate(generations):
        write_entry(base, appender, appended(number), generation)
    return shard


# --- what comes back --------------------------------------------------------------------


def test_replay_recovers_unflushed_writes(base: BaseTable) -> None:
    shard = uuid.uuid4()
    writer = open_writer(base, shard)
    writer.put(rows(0, 5))
    writer.put([rows(5, 3), rows(8, 2)])
    writer.delete([0])
    abandon(writer)
    with open_writer(base, shard) as again:
        stats = again.memtable_stats()
        assert (stats.row_count, stats.batch_count, stats.generation) == (11, 4, 1)
        assert (stats.pending_wal_batch_count, stats.max_flushed_batch_position) == (0, 3)
        assert ids(again.scan()) == list(range(1, 10))
        snapshot = again.stats()
        assert (snapshot.replayed_entries, snapshot.replayed_rows) == (3, 11)
        assert snapshot.put_count == 0, "replayed rows are no puts"
        assert again.put(rows(10, 1)).batch_positions == range(4, 5)
        assert ids(again.scan()) == list(range(1, 11))
    assert ids(pa.Table.from_pylist(list(newest(sstable_rows(base, shard)).values()))) == list(range(1, 11))


def test_replay_is_a_no_op_on_a_fresh_shard(base: BaseTable) -> None:
    store = FaultyStore(store_of(base))
    with open_writer(base, store=store) as writer:
        stats = writer.memtable_stats()
        assert (stats.row_count, stats.generation) == (0, 1)
        assert writer.stats().replayed_entries == 0
        assert writer.wal_stats().next_wal_entry_position == 1
        assert store.faults.count("get", "/wal/") == 0


def test_flushed_rows_are_not_loaded_again(base: BaseTable) -> None:
    shard = uuid.uuid4()
    with open_writer(base, shard) as writer:
        writer.put(rows(0, 5))
    with open_writer(base, shard) as again:
        stats = again.memtable_stats()
        assert (stats.row_count, stats.generation) == (0, 2)
        assert again.wal_stats().next_wal_entry_position == 3, "after the entry and the own sentinel"


def test_entries_are_not_loaded_again_after_a_compactor_drained_the_manifest(base: BaseTable) -> None:
    """An empty list of SSTables was once taken for a shard that never flushed."""
    shard = uuid.uuid4()
    writer = open_writer(base, shard)
    writer.put(rows(0, 5))
    writer.force_seal_active()
    writer.wait_for_flush_drain()
    writer.put(rows(5, 2))
    abandon(writer)
    flushed = manifest_of(base, shard)
    assert flushed.replay_after_wal_entry_position == 1
    ShardManifestStore(store_of(base), shard).commit_update(None, lambda m: replace(m, sstables=()))
    with open_writer(base, shard) as again:
        assert ids(again.scan()) == [5, 6]
        assert again.memtable_stats().generation == 2
    assert [entry.generation for entry in manifest_of(base, shard).sstables] == [2]


def test_entries_of_a_drained_generation_above_the_cursor_are_passed_over(append_only: BaseTable) -> None:
    """Lance's writer may stamp a cursor below entries that its flush covered; the generation tells."""
    shard = make_wal(append_only, [1, 1, 2])
    manifests = ShardManifestStore(store_of(append_only), shard)
    manifests.commit_update(None, lambda m: replace(m, current_generation=2))
    with open_writer(append_only, shard) as writer:
        assert ids(writer.scan()) == appended_ids(range(2, 3))


def test_an_entry_of_a_higher_epoch_aborts_the_open(base: BaseTable) -> None:
    shard = uuid.uuid4()
    with open_writer(base, shard) as writer:
        writer.put(rows(0, 1))
    batches = stored_batches(base, rows(1, 1))
    entry = encode_entry(entry_schema(batches[0].schema, 100, 2), batches)
    store_of(base).put_if_absent(layout.wal_entry(shard, 2), entry)
    before = manifest_of(base, shard)
    with pytest.raises(FencedError, match="WAL replay aborted at position 2") as caught:
        open_writer(base, shard)
    assert (caught.value.local_epoch, caught.value.stored_epoch) == (2, 100)
    after = manifest_of(base, shard)
    assert (after.sstables, after.current_generation) == (before.sstables, before.current_generation)
    assert not [thread for thread in threading.enumerate() if str(shard) in thread.name]


def test_rows_come_back_in_their_order_and_the_newest_wins(base: BaseTable) -> None:
    shard = uuid.uuid4()
    writer = open_writer(base, shard)
    for version in range(4):
        writer.put(rows(0, 3, prefix=f"v{version}"))
    writer.delete([1])
    abandon(writer)
    with open_writer(base, shard) as again:
        assert again.scan().sort_by("id").to_pylist() == [
            {"id": 0, "name": "v3_0"},
            {"id": 2, "name": "v3_2"},
        ]


def test_a_row_that_was_never_durable_does_not_come_back(base: BaseTable) -> None:
    shard = uuid.uuid4()
    writer = open_writer(base, shard, durable_write=False, max_wal_flush_interval=None)
    assert writer.put(rows(0, 1)).durable.wait(PATIENCE)
    writer.put(rows(1, 1))
    abandon(writer)
    with open_writer(base, shard) as again:
        assert ids(again.scan()) == [0]


# --- generations ------------------------------------------------------------------------


def test_a_frozen_generation_and_the_next_one_become_two_memtables(append_only: BaseTable) -> None:
    """The writer froze generation 1, wrote generation 2, and died before the flush of 1."""
    shard = uuid.uuid4()
    store = FaultyStore(store_of(append_only))
    writer = open_writer(append_only, shard, store=store)
    store.faults.fail("put_if_absent", times=None, where="/manifest/")
    writer.put(appended(0))
    writer.put(appended(1))
    writer.force_seal_active()
    writer.put(appended(2))
    abandon(writer)
    assert [entry.generation for entry in wal_entries(append_only, shard)] == [1, 1, 2]
    again = open_writer(append_only, shard)
    assert again.memtable_stats().generation == 2
    again.put(appended(3))
    again.wait_for_flush_drain()
    manifest = manifest_of(append_only, shard)
    assert [(e.generation, e.physical_rows) for e in manifest.sstables] == [(1, 4)]
    assert manifest.replay_after_wal_entry_position == 2
    assert sorted(row["id"] for row in memory_rows(again)) == appended_ids(range(2, 4))
    again.close()
    manifest = manifest_of(append_only, shard)
    assert [(e.generation, e.physical_rows) for e in manifest.sstables] == [(1, 4), (2, 4)]
    assert sorted(row["id"] for row in sstable_rows(append_only, shard)) == appended_ids(range(4))


def test_generations_of_new_entries_never_fall_behind_replayed_ones(append_only: BaseTable) -> None:
    """Lance refuses a shard whose entries go back to an older generation."""
    shard = make_wal(append_only, [1, 2, None, 3])
    for number in range(4, 7):
        writer = open_writer(append_only, shard)
        writer.put(appended(number))
        abandon(writer)
    generations = [e.generation for e in wal_entries(append_only, shard) if e.generation is not None]
    assert generations == sorted(generations)
    oracle = lance.dataset(append_only.uri).mem_wal_writer(str(shard))
    oracle.close()
    assert sorted(row["id"] for row in sstable_rows(append_only, shard)) == appended_ids(range(7))


def test_an_entry_of_an_older_generation_than_the_one_before_it_is_refused(append_only: BaseTable) -> None:
    """Generation 1 must not be published: the next open would then pass over the last entry."""
    shard = make_wal(append_only, [1, 2, 1])
    for _ in range(2):
        store = FaultyStore(store_of(append_only))
        # Time enough for a flush that should not have begun.
        store.faults.before("get", lambda: time.sleep(0.2), where=layout.wal_entry(shard, 3))
        with pytest.raises(WalCorruptError, match="generation 1 comes after generation 2") as caught:
            open_writer(append_only, shard, store=store)
        assert caught.value.position == 3
        manifest = manifest_of(append_only, shard)
        assert (manifest.sstables, manifest.current_generation) == ((), 1)


# --- memory -----------------------------------------------------------------------------

INTERLEAVINGS: list[list[int | None]] = [
    [None, None, None],
    [1, None, 1],
    [None, 1, None],
    [1, None, None, 1, None],
    [1, None, 2, None],
    [None, 2, None, 2],
    [1, 2, None, 2, 3, None],
    [None, None, 1, 1, None, 2],
]


@pytest.mark.parametrize("generations", INTERLEAVINGS, ids=str)
@pytest.mark.parametrize("killed_after", [0, 1, 2])
def test_replay_that_flushes_and_is_killed_never_makes_an_entry_skippable(
    append_only: BaseTable, generations: list[int | None], killed_after: int
) -> None:
    """MemTable-mode and WAL-only writers took turns; every entry fills a MemTable of the new writer.

    Its replay has to flush as it goes, and is killed after some manifest commits. A flush that
    published generation g while another entry of g was still to come would lose that entry.
    """
    shard = make_wal(append_only, generations)
    store = FaultyStore(store_of(append_only))
    # Of these commits the first is the claim.
    store.faults.fail(
        "put_if_absent", nth=2 + killed_after, times=None, where=lambda path: "/manifest/" in path
    )
    try:
        abandon(open_writer(append_only, shard, store=store, max_memtable_rows=2))
    except StorageError:
        assert manifest_of(append_only, shard).current_generation <= 1 + killed_after
    again = open_writer(append_only, shard, max_memtable_rows=2)
    again.put(appended(len(generations)))
    again.close()
    found = sorted(row["id"] for row in sstable_rows(append_only, shard))
    assert found == appended_ids(range(len(generations) + 1))


@pytest.mark.parametrize("generations", INTERLEAVINGS[:4], ids=str)
def test_replay_that_flushed_leaves_a_shard_that_lance_opens(
    append_only: BaseTable, generations: list[int | None]
) -> None:
    shard = make_wal(append_only, generations)
    writer = open_writer(append_only, shard, max_memtable_rows=2)
    writer.put(appended(len(generations)))
    abandon(writer)
    lance.dataset(append_only.uri).mem_wal_writer(str(shard)).close()
    found = sorted(row["id"] for row in sstable_rows(append_only, shard))
    assert found == appended_ids(range(len(generations) + 1))


def test_a_long_wal_only_tail_is_replayed_within_the_memory_limit(
    append_only: BaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    mb = 1 << 20
    shard = uuid.uuid4()
    with open_writer(append_only, shard, enable_memtable=False) as writer:
        for number in range(12):
            text = pa.array(["x" * 1024] * 1024)
            writer.put(
                pa.record_batch(
                    [pa.array(range(number * 1024, (number + 1) * 1024)), text], APPEND_ONLY.names
                )
            )
    held: list[int] = []
    plain_replay = MemTableMode.replay

    def watched(mode: MemTableMode, *arguments: object) -> None:
        plain_replay(mode, *arguments)  # type: ignore[arg-type]
        held.append(mode.unflushed_bytes)

    monkeypatch.setattr(MemTableMode, "replay", watched)
    limits: dict[str, Any] = {"max_memtable_size": 3 * mb, "max_unflushed_memtable_bytes": 4 * mb}
    with open_writer(append_only, shard, **limits) as again:
        assert len(held) == 12
        assert max(held) < 4 * mb + 2 * mb, "one entry above the limit at most"
        assert len(manifest_of(append_only, shard).sstables) >= 3
        assert all_ids(append_only, again) == list(range(12 * 1024))


def test_a_replayed_memtable_above_the_backpressure_limit_does_not_deadlock_the_first_put(
    append_only: BaseTable,
) -> None:
    """Replayed rows reach the limit below which puts wait, but no freeze limit."""
    shard = make_wal(append_only, [1, 1, 1])
    huge = 1 << 40
    writer = open_writer(append_only, shard, max_memtable_size=huge, max_unflushed_memtable_bytes=huge)
    limit = writer.memtable_stats().estimated_size
    abandon(writer)
    # The freeze limit is not met by this size, the other one is.
    again = open_writer(append_only, shard, max_memtable_size=limit, max_unflushed_memtable_bytes=limit)
    again._backpressure._limit = 1
    thread = threading.Thread(target=again.put, args=(appended(3),), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the put waits for a flush that nobody started"
    again.close()
    assert sorted(row["id"] for row in sstable_rows(append_only, shard)) == appended_ids(range(4))


def test_puts_after_a_replay_were_let_in_as_if_it_had_left_nothing(append_only: BaseTable) -> None:
    """Each of those that came at once found the whole limit free beside what was replayed."""
    shard = make_wal(append_only, [1, 1, 1])
    writer = open_writer(append_only, shard)
    pressure, replayed = writer._backpressure, writer._mode.unflushed_bytes
    pressure._limit = replayed + 1000
    first, second = (Put(Rows([], 0, 1000), writer._mode) for _ in range(2))
    with first.present, second.present:
        assert pressure._lets_in(first, counted=False)
        assert not pressure._lets_in(second, counted=False)
    abandon(writer)


@pytest.mark.parametrize("settings", [{}, {"max_memtable_rows": 1}])
def test_an_empty_memtable_never_holds_a_put_back(base: BaseTable, settings: dict[str, Any]) -> None:
    """The fixed cost of empty indexes alone was above a small limit, and no flush could lower it."""
    limits: dict[str, Any] = {"max_memtable_size": 1000, "max_unflushed_memtable_bytes": 1000}
    writer = open_writer(base, uuid.uuid4(), **limits, **settings)
    thread = threading.Thread(target=lambda: [writer.put(rows(i, 1)) for i in range(3)], daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    writer.close()


# --- interrupted and repeated -----------------------------------------------------------


def test_replays_that_are_repeated_add_nothing(append_only: BaseTable) -> None:
    shard = make_wal(append_only, [1, None, 1])
    for _ in range(3):
        writer = open_writer(append_only, shard)
        assert all_ids(append_only, writer) == appended_ids(range(3))
        abandon(writer)
    with open_writer(append_only, shard) as writer:
        writer.put(appended(3))
    assert sorted(row["id"] for row in sstable_rows(append_only, shard)) == appended_ids(range(4))


@pytest.mark.parametrize("landed", [False, True])
def test_a_kill_around_the_commit_of_a_replayed_generation(append_only: BaseTable, landed: bool) -> None:
    """Two replayed generations; the writer is killed before or after the first commit lands."""
    shard = make_wal(append_only, [1, 2])
    store = FaultyStore(store_of(append_only))
    store.faults.fail("put_if_absent", nth=2, where="/manifest/", after=landed)
    store.faults.fail("put_if_absent", nth=3, times=None, where="/manifest/")
    writer = open_writer(append_only, shard, store=store)
    # The lost reply may be in before the wait begins, which then meets the failures after it.
    with pytest.raises((OutcomeUnknownError, StorageError) if landed else StorageError):
        writer.wait_for_flush_drain()
    abandon(writer)
    assert manifest_of(append_only, shard).current_generation == (2 if landed else 1)
    with open_writer(append_only, shard) as again:
        assert all_ids(append_only, again) == appended_ids(range(2))
    assert sorted(row["id"] for row in sstable_rows(append_only, shard)) == appended_ids(range(2))


def test_an_open_that_cannot_read_the_wal_leaves_everything_to_the_next(append_only: BaseTable) -> None:
    shard = make_wal(append_only, [1, 2, 2])
    store = FaultyStore(store_of(append_only))
    store.faults.fail("get", times=None, where=layout.wal_entry(shard, 3))
    with pytest.raises(StorageError, match="injected"):
        open_writer(append_only, shard, store=store)
    assert not [thread for thread in threading.enumerate() if str(shard) in thread.name]
    with open_writer(append_only, shard) as again:
        assert all_ids(append_only, again) == appended_ids(range(3))


# --- indexes ----------------------------------------------------------------------------

INDEXES = [
    IndexSpec("name_fts", "name", 1, FullTextParams()),
    IndexSpec("id_btree", "id", 0, BTreeParams()),
]


@pytest.mark.parametrize("at_once", [True, False])
def test_replayed_rows_are_indexed_once(append_only: BaseTable, at_once: bool) -> None:
    """Rows that were appended and indexed twice doubled every search result."""
    shard = uuid.uuid4()
    for opened in range(3):
        settings: dict[str, Any] = {"sync_indexed_write": at_once, "async_index_buffer_rows": 1}
        writer = open_writer(append_only, shard, indexes=INDEXES, **settings)
        writer.put(rows(opened, 1, schema=APPEND_ONLY, prefix="walrus"))
        view = writer.active_memtable_ref()
        wait_until(lambda view=view, rows=opened + 1: view.indexes.rows_indexed >= rows)
        assert view.row_count == view.indexes.rows_indexed == opened + 1
        text, ordered = view.indexes.full_text("name"), view.indexes.btree("id")
        assert text is not None
        assert ordered is not None
        assert sorted(text.search("walrus", view.row_count).positions.tolist()) == list(range(opened + 1))
        assert ordered.equal_to([0]).below(view.row_count).tolist() == [0]
        abandon(writer)


def test_deferred_indexing_happens_in_time_however_few_the_rows(append_only: BaseTable) -> None:
    shard = uuid.uuid4()
    soon = timedelta(milliseconds=1)
    for opened in range(2):
        writer = open_writer(
            append_only, shard, indexes=INDEXES, sync_indexed_write=False, async_index_interval=soon
        )
        if not opened:
            writer.put(appended(0))
        view = writer.active_memtable_ref()
        wait_until(lambda view=view: view.indexes.rows_indexed >= 2)
        assert view.indexes.rows_indexed == 2, "replayed rows too" if opened else ""
        abandon(writer)


def test_an_index_that_cannot_be_kept_is_refused_before_the_claim(append_only: BaseTable) -> None:
    shard = uuid.uuid4()
    with open_writer(append_only, shard) as writer:
        lost = IndexSpec("gone", "no_such_column", 9, BTreeParams())
        with pytest.raises(InvalidInputError, match="no_such_column"):
            open_writer(append_only, shard, indexes=[lost])
        writer.put(appended(0))  # still the holder


# --- round trips ------------------------------------------------------------------------


class CountingStore(FaultyStore):
    """Knows how many reads of WAL entries were under way at a time."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0

    def get(self, path: str) -> bytes:
        if "/wal/" not in path:
            return super().get(path)
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            time.sleep(0.01)  # a round trip
            return super().get(path)
        finally:
            with self._lock:
                self._now -= 1


def test_entries_are_fetched_in_parallel_and_replayed_in_order(
    base: BaseTable, memory_store: ObjectStore
) -> None:
    """Serial replay after a long outage took longer than the outage."""
    store = CountingStore(memory_store)
    shard = uuid.uuid4()
    writer = open_writer(base, shard, store=store)
    for version in range(40):
        writer.put(rows(0, 2, prefix=f"v{version}"))
    abandon(writer)
    again = open_writer(base, shard, store=store)
    assert again.stats().replayed_entries == 40
    assert store.most >= 8
    assert store.most <= lancewal.writer.open.REPLAY_READ_AHEAD
    assert {row["name"] for row in again.scan().to_pylist()} == {"v39_0", "v39_1"}
    abandon(again)


def test_the_first_put_after_a_replay_needs_no_probe(base: BaseTable, memory_store: ObjectStore) -> None:
    store = FaultyStore(memory_store)
    shard = uuid.uuid4()
    writer = open_writer(base, shard, store=store)
    for i in range(5):
        writer.put(rows(i, 1))
    abandon(writer)
    again = open_writer(base, shard, store=store)
    assert again.wal_stats().next_wal_entry_position == 7, "five entries and the own sentinel"
    store.faults.clear()
    again.put(rows(5, 1))
    assert [(call.kind, call.path) for call in store.faults.calls] == [
        ("put_if_absent", layout.wal_entry(shard, 7))
    ]
    abandon(again)


def test_each_entry_is_read_once(base: BaseTable, memory_store: ObjectStore) -> None:
    store = FaultyStore(memory_store)
    shard = uuid.uuid4()
    writer = open_writer(base, shard, store=store)
    for i in range(9):
        writer.put(rows(i, 1))
    abandon(writer)
    store.faults.clear()
    abandon(open_writer(base, shard, store=store))
    assert store.faults.count("get", "/wal/") == 9
    assert store.faults.count("get_range", "/wal/") == 0, "nothing had to be split"


# --- damage -----------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
def test_a_corrupt_entry_stops_the_open_and_the_shard_stays_as_it_is(
    append_only: BaseTable, damage: str
) -> None:
    shard = make_wal(append_only, [1, 2, 2, 2])
    path = Path(append_only.uri) / layout.wal_entry(shard, 3)
    good = path.read_bytes()
    middle = len(good) // 2
    flipped = good[:middle] + bytes([good[middle] ^ 0xFF]) + good[middle + 1 :]
    path.write_bytes({"cut": good[:middle], "flipped": flipped, "emptied": b""}[damage])
    for _ in range(2):
        with pytest.raises(WalCorruptError) as caught:
            open_writer(append_only, shard)
        assert (caught.value.shard_id, caught.value.position) == (shard, 3)
        manifest = manifest_of(append_only, shard)
        assert (manifest.sstables, manifest.current_generation) == ((), 1)
        assert manifest.replay_after_wal_entry_position == 0
    path.write_bytes(good)  # restored from a backup
    with open_writer(append_only, shard) as writer:
        assert all_ids(append_only, writer) == appended_ids(range(4))


def test_a_hole_in_the_wal_stops_the_open(append_only: BaseTable) -> None:
    shard = make_wal(append_only, [1] * 8)
    path = Path(append_only.uri) / layout.wal_entry(shard, 2)
    good = path.read_bytes()
    path.unlink()
    with pytest.raises(WalCorruptError, match="missing") as caught:
        open_writer(append_only, shard)
    assert caught.value.position == 2
    path.write_bytes(good)
    with open_writer(append_only, shard) as writer:
        assert all_ids(append_only, writer) == appended_ids(range(8))


# --- the table changed meanwhile --------------------------------------------------------


def with_unflushed_row(where: Path) -> tuple[BaseTable, uuid.UUID]:
    schema = pa.schema([*KEYED, pa.field("score", pa.float64())])
    base = new_table(where, schema)
    writer = open_writer(base, shard := uuid.uuid4())
    writer.put(pa.record_batch([pa.array([1, 2]), pa.array(["a", "b"]), pa.array([0.5, 1.5])], schema=schema))
    writer.delete([2])
    abandon(writer)
    return base, shard


def reopened(base: BaseTable, shard: uuid.UUID) -> list[Row]:
    """What a writer on the table's newest schema replays, flushes, and replays no more."""
    now = BaseTable.open(base.uri)
    with open_writer(now, shard) as writer:
        replayed: list[Row] = writer.scan().to_pylist()
        assert writer.scan().schema.equals(now.schema.plain)
    assert list(newest(sstable_rows(now, shard)).values()) == replayed
    return replayed


def test_a_column_added_after_the_write_is_replayed_as_null(tmp_path: Path) -> None:
    base, shard = with_unflushed_row(tmp_path / "t")
    base.dataset.add_columns(pa.schema([pa.field("extra", pa.int32())]))
    assert reopened(base, shard) == [{"id": 1, "name": "a", "score": 0.5, "extra": None}]


def test_a_column_dropped_after_the_write_is_left_out(tmp_path: Path) -> None:
    base, shard = with_unflushed_row(tmp_path / "t")
    base.dataset.drop_columns(["name"])
    assert reopened(base, shard) == [{"id": 1, "score": 0.5}]


def test_a_column_renamed_after_the_write_keeps_its_values(tmp_path: Path) -> None:
    base, shard = with_unflushed_row(tmp_path / "t")
    base.dataset.alter_columns({"path": "name", "name": "title"})
    assert reopened(base, shard) == [{"id": 1, "title": "a", "score": 0.5}]


def test_a_name_that_was_dropped_and_used_again_is_another_column(tmp_path: Path) -> None:
    base, shard = with_unflushed_row(tmp_path / "t")
    base.dataset.drop_columns(["name"])
    lance.dataset(base.uri).add_columns(pa.schema([pa.field("name", pa.string())]))
    assert reopened(base, shard) == [{"id": 1, "score": 0.5, "name": None}]


def test_any_failure_of_open_is_typed(append_only: BaseTable) -> None:
    shard = make_wal(append_only, [1])
    (Path(append_only.uri) / layout.wal_entry(shard, 1)).write_bytes(b"\xff" * 100)
    with pytest.raises(LanceWalError):
        open_writer(append_only, shard)
