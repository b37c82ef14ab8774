"""Garbage collection deletes what nobody needs, and nothing else."""

from __future__ import annotations

import ctypes
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import lance
import pyarrow as pa
import pytest

import lancewal.maintenance.gc as collect_module
from lancewal.base.table import BaseTable
from lancewal.errors import FencedError, InvalidInputError, StorageError, WalTruncatedError
from lancewal.maintenance import Resource, Retention, at_crash_points, plan_compaction
from lancewal.maintenance.gc import collect_garbage, sync_file_system
from lancewal.publish.feed import ChangeFeed
from lancewal.publish.publishing import publish
from lancewal.publish.staging import STAGED_DELETION_AGE
from lancewal.publish.transactions import TRANSACTIONS_DIR, Run, Transaction, TransactionLog
from lancewal.reader.table_reader import TableReader
from lancewal.shard import WalAppender, WalTailer
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import ObjectStore, layout
from lancewal.storage.clock import MIN_DELETION_AGE
from lancewal.writer import open_shard_writer
from lancewal.writer.intake import Intake
from tests.faults import FaultyStore
from tests.maintenance.support import (
    NOTHING_KEPT,
    Site,
    age,
    clock_at,
    collect_later,
    directories,
    execute_shard,
    named,
    positions,
    stage,
    versions,
)
from tests.tables import APPEND_ONLY, abandon, fast, rows

DAY = timedelta(days=1)


class TestCompactedGenerations:
    def test_nothing_is_collected_before_compaction(self, site: Site) -> None:
        report = site.collect(resources=["manifest_entries", "sstables", "orphans"])
        assert (report.collected, directories(site)) == ([], [1, 2, 3])

    def test_entries_and_directories_go_after_it(self, site: Site) -> None:
        expected = site.merged()
        site.merge()
        report = site.collect()
        assert (site.manifest.sstables, directories(site)) == ((), [])
        assert report.counts()["manifest_entries"] == report.counts()["sstables"] == 3
        assert report.num_bytes > 0
        assert site.merged() == site.plain() == expected

    def test_entries_go_at_once_and_directories_after_the_grace_period(self, site: Site) -> None:
        site.compact()
        site.collect(now=datetime.now(UTC))
        assert (site.manifest.sstables, directories(site)) == ((), [1, 2, 3])
        report = site.collect(now=datetime.now(UTC) + timedelta(hours=23))
        assert directories(site) == [1, 2, 3]
        assert {kept.reason for kept in report.kept} == {"the base table took it over less than 1 day ago"}
        site.collect(now=datetime.now(UTC) + timedelta(hours=25))
        assert directories(site) == []

    def test_the_grace_period_counts_from_compaction_not_from_the_flush(self, site: Site) -> None:
        for name in site.store.list_directories(layout.shard_dir(site.shard_id)):
            age(site, layout.sstable_dir(site.shard_id, name), timedelta(days=30))
        site.compact()
        site.collect(now=datetime.now(UTC))
        assert directories(site) == [1, 2, 3]

    def test_a_read_that_began_before_compaction_can_end(self, site: Site) -> None:
        expected = site.merged()
        scan = TableReader(site.store).scan()
        site.compact()
        site.collect(now=datetime.now(UTC))
        found = scan.to_table()
        assert sorted(zip(found["id"].to_pylist(), found["name"].to_pylist(), strict=True)) == expected

    def test_pruning_keeps_the_writers_epoch_and_lets_it_go_on(self, site: Site) -> None:
        writer = site.writer()
        epoch = writer.epoch
        writer.put(rows(500, 2))
        site.compact()
        site.collect()
        writer.put(rows(502, 2))
        writer.close()
        assert site.manifest.writer_epoch == epoch
        assert set(named(range(500, 504), "name")) <= set(site.merged())

    def test_what_is_flushed_after_compaction_stays(self, site: Site) -> None:
        site.compact()
        site.flush(rows(3, 1, prefix="late"))
        site.collect()
        assert directories(site) == [4]
        assert (3, "late_3") in site.merged()

    def test_a_tagged_version_keeps_the_generations_that_it_does_not_hold(self, site: Site) -> None:
        site.dataset.tags.create("before", site.dataset.version)
        site.compact()
        report = site.collect()
        assert (len(site.manifest.sstables), directories(site)) == (3, [1, 2, 3])
        assert all("tagged 'before'" in kept.reason for kept in report.kept)
        site.dataset.tags.delete("before")
        site.collect()
        assert directories(site) == []

    def test_a_tag_on_an_older_version_needs_nothing_that_came_after_it(self, site: Site) -> None:
        site.compact()
        site.dataset.tags.create("now", site.dataset.version)
        # Until another version comes, the tagged one is read together with what is flushed.
        lance.write_dataset(rows(900, 1), site.store.uri, mode="append")
        site.flush(rows(40, 5))
        site.compact()
        site.collect()
        assert directories(site) == []

    def test_every_version_counts_on_request(self, site: Site) -> None:
        site.compact()
        retention = Retention(for_all_versions=True)
        report = site.collect(retention=retention)
        assert directories(site) == [1, 2, 3]
        assert all("clean up old versions" in kept.reason for kept in report.kept)
        site.dataset.cleanup_old_versions(timedelta(0), delete_unverified=True)
        site.collect(retention=retention)
        assert directories(site) == []

    def test_an_index_that_has_not_caught_up_keeps_its_generations(self, tmp_path: Path) -> None:
        uri = tmp_path / "table"
        dataset = lance.write_dataset(pa.Table.from_batches([rows(0, 300)]), uri)
        dataset.create_scalar_index("name", "BTREE")
        site = Site.of(lance.dataset(uri))
        site.flush(rows(200, 200))
        site.compact(optimize_indexes=False)
        report = site.collect()
        assert directories(site) == [1]
        assert all("'name_idx' has caught up to generation 0" in kept.reason for kept in report.kept)
        site.dataset.optimize.optimize_indices()
        site.collect()
        assert directories(site) == []

    def test_an_index_that_covers_every_fragment_needs_nothing(self, tmp_path: Path) -> None:
        uri = tmp_path / "table"
        dataset = lance.write_dataset(pa.Table.from_batches([rows(0, 300)]), uri)
        dataset.create_scalar_index("name", "BTREE")
        site = Site.of(lance.dataset(uri))
        site.flush(rows(200, 200))
        # Joining files makes Lance forget how far the index had caught up.
        site.compact(optimize_indexes=True)
        site.dataset.optimize.compact_files()
        assert site.base.details.index_catchup == {}
        site.collect()
        assert directories(site) == []


class TestOrphans:
    def test_a_dead_attempt_of_an_earlier_generation_goes(self, site: Site) -> None:
        dead = layout.sstable_dir(site.shard_id, "0123abcd_gen_2")
        site.store.put(f"{dead}/data/x.lance", b"left by a flush that was killed")
        site.collect(now=datetime.now(UTC))
        assert directories(site) == [1, 2, 2, 3]
        report = site.collect(now=datetime.now(UTC) + 2 * DAY)
        assert report.names(Resource.ORPHANS) == ["0123abcd_gen_2"]
        assert directories(site) == [1, 2, 3]

    def test_what_a_flush_may_still_publish_stays_however_old(self, site: Site) -> None:
        coming = layout.sstable_dir(site.shard_id, "0123abcd_gen_4")
        site.store.put(f"{coming}/data/x.lance", b"being written")
        site.collect(retention=NOTHING_KEPT)
        assert directories(site) == [1, 2, 3, 4]
        site.flush(rows(90, 1))
        site.collect()
        assert site.store.list(coming) == []

    def test_a_bulk_load_has_its_time(self, site: Site) -> None:
        (staged,) = stage(site, rows(600, 5))
        half = datetime.now(UTC) + STAGED_DELETION_AGE / 2
        site.collect(now=half, min_age=timedelta(0))
        assert staged.entry.path in site.store.list_directories(layout.shard_dir(site.shard_id))
        publish(site.base, site.store, [staged])
        site.collect()
        assert set(named(range(600, 605), "name")) <= set(site.merged())

    def test_a_bulk_load_that_was_given_up_goes(self, site: Site) -> None:
        (staged,) = stage(site, rows(600, 5))
        site.look()
        report = site.collect(now=datetime.now(UTC) + 2 * DAY, resources=[Resource.ORPHANS])
        assert report.names(Resource.ORPHANS) == [staged.entry.path]

    def test_a_compacted_bulk_load_goes_after_the_grace_period(self, site: Site) -> None:
        (staged,) = stage(site, rows(600, 5))
        publish(site.base, site.store, [staged])
        age(site, layout.sstable_dir(site.shard_id, staged.entry.path), timedelta(days=9))
        site.compact()
        now = datetime.now(UTC)
        site.collect(resources=[Resource.MANIFEST_ENTRIES], now=now)
        site.collect(resources=[Resource.SSTABLES, Resource.ORPHANS], now=now)
        assert len(directories(site)) == 4
        site.collect(now=now + 2 * DAY)
        assert directories(site) == []

    def test_half_written_files_of_dead_processes_go(self, site: Site) -> None:
        left = Path(site.store.uri) / layout.wal_dir(site.shard_id) / ".entry.arrow.1f2e.tmp"
        left.write_bytes(b"cut")
        site.collect(now=datetime.now(UTC))
        assert left.exists()
        report = site.collect()
        assert (left.exists(), report.counts()["staging_files"]) == (False, 1)


class TestWal:
    def test_covered_entries_go_and_the_last_one_stays(self, site: Site) -> None:
        assert positions(site) == list(range(1, 6))
        assert site.manifest.replay_after_wal_entry_position == 5
        report = site.collect(resources=["wal_entries"])
        assert (positions(site), len(report.collected)) == ([5], 4)

    def test_uncovered_entries_stay_whatever_their_age(self, site: Site) -> None:
        writer = site.writer(durable_write=True)
        writer.put(rows(700, 3))
        before = positions(site)
        site.collect(resources=["wal_entries"])
        assert positions(site) == before[5:]
        assert set(named(range(700, 703), "name")) <= set(site.merged())
        writer.close()

    def test_young_entries_stay(self, site: Site) -> None:
        for position in (1, 2):
            age(site, layout.wal_entry(site.shard_id, position), timedelta(days=3))
        # Older than its neighbours, but behind them: going first would leave a gap.
        age(site, layout.wal_entry(site.shard_id, 4), timedelta(days=3))
        seen = clock_at(datetime.now(UTC) - timedelta(days=2))
        site.collect(resources=["wal_entries"], now=datetime.now(UTC), clock=seen)
        assert positions(site) == [1, 2, 3, 4, 5]
        site.collect(resources=["wal_entries"], now=datetime.now(UTC))
        assert positions(site) == [3, 4, 5]

    def test_a_follower_that_is_too_far_behind_hears_of_it(self, site: Site) -> None:
        site.collect(resources=["wal_entries"])
        assert [entry.position for entry in WalTailer(site.store, site.shard_id)] == [5]
        with pytest.raises(WalTruncatedError):
            list(WalTailer(site.store, site.shard_id).entries(1, 6))

    def test_lance_finds_the_end_of_a_collected_wal(self, site: Site) -> None:
        site.collect(retention=NOTHING_KEPT)
        with site.dataset.mem_wal_writer(str(site.shard_id), durable_write=True) as writer:
            assert positions(site) == [5, 6]
            writer.put(rows(800, 2))
        assert set(named([800, 801], "name")) <= set(site.merged())

    def test_sstables_that_a_retained_pointer_names_stay(self, site: Site) -> None:
        (staged,) = stage(site, rows(600, 5))
        publish(site.base, site.store, [staged])
        site.compact()
        expected = feed_ids(site)
        report = site.collect(resources=["manifest_entries", "sstables"])
        reasons = {kept.name: kept.reason for kept in report.kept}
        assert reasons == {staged.entry.path: "a WAL entry points to it"}
        assert feed_ids(site) == expected
        site.collect()
        assert directories(site) == []

    def test_a_job_that_is_run_again_still_finds_its_first_run(self, site: Site) -> None:
        transaction = Transaction("app", 7)
        appender = WalAppender.open(site.store, site.shard_id)
        log = TransactionLog(site.store, transaction)
        log.start(Run(7, floors={site.shard_id: 1}))
        stored = Intake(site.base.schema).upserts(rows(950, 1)).batches
        appender.append(stored, tags=transaction.tags)
        site.flush(rows(960, 1))
        site.collect()
        assert log.read().marks


def feed_ids(site: Site) -> list[int]:
    feed = ChangeFeed(site.store, site.base.schema)
    batches = list(feed.changes(feed.earliest(), feed.latest()))
    return [i for batch in batches for i in batch.column("id").to_pylist()]


class TestManifestVersions:
    def test_old_versions_go_and_the_newest_stays(self, site: Site) -> None:
        newest = site.manifest
        site.collect(resources=["manifest_versions"])
        assert versions(site) == [newest.version]
        assert site.manifest == newest

    def test_there_is_never_a_gap(self, site: Site) -> None:
        age(site, layout.manifest_file(site.shard_id, 1), timedelta(days=3))
        age(site, layout.manifest_file(site.shard_id, 3), timedelta(days=3))
        newest = site.manifest.version
        site.collect(now=datetime.now(UTC), clock=clock_at(datetime.now(UTC) - timedelta(days=2)))
        site.collect(resources=["manifest_versions"], now=datetime.now(UTC))
        assert versions(site) == list(range(2, newest + 1))

    def test_who_knows_an_old_version_finds_the_newest(self, site: Site) -> None:
        known = ShardManifestStore(site.store, site.shard_id)
        before = known.require_latest()
        site.flush(rows(80, 1))
        site.collect(resources=["manifest_versions"])
        assert known.require_latest().version > before.version


class TestStalledWriter:
    def test_a_writer_that_slept_through_a_collection_is_refused(self, tmp_path: Path) -> None:
        """Its slot in the WAL is empty again: the put succeeds, and must not count."""
        site = Site(tmp_path / "table")
        slow = FaultyStore(site.store)
        now = [0.0]
        stale = open_shard_writer(
            site.base, site.shard_id, fast(durable_write=True), store=slow, indexes=(), clock=lambda: now[0]
        )
        stale.put(rows(0, 1))
        stale.put(rows(1, 1))
        with ThreadPoolExecutor(1) as pool, slow.faults.pause("put_if_absent", where="/wal/") as pause:
            waiting = pool.submit(stale.put, rows(666, 1))
            pause.wait_until_reached()
            site.flush(rows(10, 3))
            site.flush(rows(20, 3))
            site.compact()
            site.collect(retention=NOTHING_KEPT)
            assert positions(site) == [6]
            now[0] += MIN_DELETION_AGE.total_seconds()
            pause.release()
            with pytest.raises(FencedError):
                waiting.result()
        # It had created its entry, in the slot that its successor's sentinel had before.
        assert positions(site) == [3, 6]
        abandon(stale)
        assert 666 not in [i for i, _ in site.merged()]
        site.flush(rows(30, 1))
        site.compact()
        assert [i for i, _ in site.plain()] == [0, 1, 10, 11, 12, 20, 21, 22, 30]

    def test_what_it_left_behind_is_no_part_of_the_log_and_is_collected(self, site: Site) -> None:
        site.collect(resources=["wal_entries"])
        stray = layout.wal_entry(site.shard_id, 2)
        site.store.put(stray, site.store.get(layout.wal_entry(site.shard_id, 5)))
        assert [entry.position for entry in WalTailer(site.store, site.shard_id)] == [5]
        site.collect(resources=["wal_entries"])
        assert positions(site) == [5]


class TestChoices:
    def test_a_dry_run_tells_the_same_and_deletes_nothing(self, site: Site) -> None:
        site.compact()
        site.store.put(f"{layout.sstable_dir(site.shard_id, '0123abcd_gen_1')}/x", b"dead")
        before = [info.path for info in site.store.list(layout.MEM_WAL_DIR)]
        now = datetime.now(UTC) + 2 * DAY
        dry = site.collect(dry_run=True, now=now)
        assert [info.path for info in site.store.list(layout.MEM_WAL_DIR)] == before
        wet = site.collect(now=now)
        assert set(dry.collected) == set(wet.collected)
        assert (dry.dry_run, wet.dry_run) == (True, False)
        assert "would delete" in str(dry)
        assert dry.to_dict()["counts"] == wet.to_dict()["counts"]

    def test_the_base_table_is_synced_before_anything_goes(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Lance does not sync, and a power cut must not take both copies of a row."""
        site.compact()
        watched = FaultyStore(ObjectStore.from_uri(site.store.uri, fsync=True))
        site.store = watched
        changed = ("delete", "delete_prefix", "put", "put_if_absent")
        before: list[int] = []

        def sync(store: ObjectStore) -> None:
            sync_file_system(store)
            before.append(sum(watched.faults.count(kind) for kind in changed))

        monkeypatch.setattr(collect_module, "sync_file_system", sync)
        site.collect(min_age=timedelta(0), now=datetime.now(UTC))
        assert before == [0]
        assert sum(watched.faults.count(kind) for kind in changed) > 5

    def test_one_resource_alone(self, site: Site) -> None:
        site.merge()
        report = site.collect(resources=[Resource.MANIFEST_ENTRIES])
        assert {each.resource for each in report.collected} == {Resource.MANIFEST_ENTRIES}
        assert (directories(site), positions(site)) == ([1, 2, 3], [1, 2, 3, 4, 5])

    def test_one_shard_alone(self, site: Site) -> None:
        other = uuid4()
        site.flush(rows(900, 1), shard_id=other)
        site.compact()
        report = site.collect(shards=[other])
        assert {each.shard_id for each in report.collected} == {other}
        with pytest.raises(InvalidInputError, match="no shard"):
            site.collect(shards=[uuid4()])

    def test_unknown_resources_are_refused(self, site: Site) -> None:
        with pytest.raises(InvalidInputError, match="manifest_entries"):
            site.collect(resources=["everything"])

    @pytest.mark.parametrize("name", ["wal_entries", "orphans", "manifest_versions", "staging_files"])
    def test_an_age_at_which_a_stalled_writer_could_lose_rows_is_refused(self, name: str) -> None:
        with pytest.raises(InvalidInputError, match="0:10:00"):
            Retention(**{name: MIN_DELETION_AGE - timedelta(seconds=1)})

    def test_min_age_never_goes_below_what_is_safe(self, site: Site) -> None:
        site.compact()
        site.collect(min_age=timedelta(0), now=datetime.now(UTC))
        assert (directories(site), len(positions(site))) == ([], 5)
        with pytest.raises(InvalidInputError, match="not both"):
            site.collect(min_age=timedelta(0), retention=Retention())


def test_a_table_without_a_key_is_collected_like_any_other(tmp_path: Path) -> None:
    site = Site(tmp_path / "table", APPEND_ONLY)
    site.flush(rows(0, 3, schema=APPEND_ONLY))
    site.flush(rows(0, 3, schema=APPEND_ONLY))
    site.compact()
    site.collect()
    assert (directories(site), site.manifest.sstables) == ([], ())
    assert site.merged() == site.plain() == sorted(named(range(3), "name") * 2)


def test_rows_with_a_tag_alone_are_not_pruned(tmp_path: Path) -> None:
    """Other readers know markers only; between tag and marker they need the entries."""
    site = Site(tmp_path / "table", APPEND_ONLY)
    site.flush(rows(0, 3, schema=APPEND_ONLY))

    def stop(point: str) -> None:
        if point == "append: rows and tag are committed":
            raise KeyboardInterrupt

    at_crash_points(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            execute_shard(plan_compaction(site.store).shards[0], store=site.store)
    finally:
        at_crash_points(None)
    site.collect()
    assert len(site.manifest.sstables) == 1
    assert BaseTable.open(site.store.uri).compacted_generation(site.shard_id) == 1
    assert site.merged() == named(range(3), "name")


def test_a_failed_sync_of_the_base_table_counted_as_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another call stood in for it that tells of no failure, and what the base could not hold was deleted."""

    class BrokenDisk:
        def __init__(self, *arguments: object, **how: object) -> None:
            pass

        def syncfs(self, descriptor: int) -> int:
            ctypes.set_errno(errno.EIO)
            return -1

    site.compact()
    monkeypatch.setattr(ctypes, "CDLL", BrokenDisk)
    store = ObjectStore.from_uri(site.store.uri, fsync=True)
    before = store.list()
    with pytest.raises(StorageError, match=os.strerror(errno.EIO)):
        collect_later(store)
    assert [each.path for each in store.list()] == [each.path for each in before]


def test_a_full_disk_could_not_be_freed_by_a_collection(site: Site) -> None:
    """A collection notes what it sees before it deletes anything, and on a full disk it cannot."""
    site.compact()
    site.collect(now=None)  # leaves the storage's time, and a look
    store = FaultyStore(site.store)
    for part in (layout.CLOCK_NOW, layout.LOOKS_DIR):
        store.faults.fail("put", times=None, where=part, error=StorageError(f"the disk is full: {part}"))
    later = datetime.now(UTC) + 2 * DAY
    assert directories(site) == [1, 2, 3]

    with pytest.raises(StorageError, match="disk is full"):
        collect_garbage(store, now=later, clock=clock_at(later))
    assert directories(site) == []

    with pytest.raises(StorageError, match=layout.LOOKS_DIR):
        collect_garbage(store)  # by the time of the collection before it
    site.store.delete(layout.CLOCK_NOW)
    with pytest.raises(StorageError, match=layout.CLOCK_NOW):
        collect_garbage(store)


def test_the_longest_age_was_out_of_range(site: Site) -> None:
    site.compact()
    before = directories(site)
    site.collect(now=None)
    collect_garbage(site.store, min_age=timedelta.max)
    assert directories(site) == before


def test_a_full_disk_that_took_no_record_of_an_unfinished_job_kept_all_other_garbage(site: Site) -> None:
    site.compact()
    site.collect(now=None)
    TransactionLog(site.store, Transaction("app", 0)).start(Run(0, floors={}))
    store = FaultyStore(site.store)
    store.faults.fail("put", times=None, where=TRANSACTIONS_DIR, error=StorageError("the disk is full"))
    later = datetime.now(UTC) + 2 * DAY
    with pytest.raises(StorageError, match="disk is full"):
        collect_garbage(store, now=later, clock=clock_at(later))
    assert directories(site) == []


def test_the_look_that_a_full_disk_did_not_take_is_recorded_when_there_is_space(site: Site) -> None:
    site.compact()
    store = FaultyStore(site.store)
    store.faults.fail("put", error=StorageError("the disk is full (ENOSPC)"), where=layout.LOOKS_DIR)
    now = datetime.now(UTC)
    collect_garbage(store, now=now, clock=clock_at(now))
    site.collect(now=now + 2 * DAY)
    assert directories(site) == []
