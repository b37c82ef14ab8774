"""What waits in a table, and for how long."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import lance
import pyarrow as pa
import pytest

import lancewal
from bench.distant import DistantBackend, distant_store, measured_depth
from lancewal.base import BaseTable
from lancewal.maintenance import at_crash_points
from lancewal.shard import ShardManifestStore
from lancewal.status import Lag, TableStatus, table_status
from lancewal.storage import ObjectInfo, ObjectStore, layout
from tests.faults import FaultyStore
from tests.tables import APPEND_ONLY, fast, rows, wal_table

pytestmark = pytest.mark.sharding(unsharded=True)


def test_a_fresh_table_waits_for_nothing(table: lancewal.Table) -> None:
    status = table.status()
    (shard,) = status.shards
    assert status.unflushed == Lag()
    assert status.uncompacted == Lag()
    assert (shard.epoch, shard.wal_tip, shard.last_write) == (0, 1, None)


def test_opening_a_writer_leaves_nothing_that_waits(table: lancewal.Table) -> None:
    """A sentinel in the log is no row: it must not look like a writer that fell behind."""
    for _ in range(3):
        table.shard_writer(table.shard_for()).close()
    (shard,) = table.status().shards
    assert shard.wal_tip > 1
    assert shard.unflushed == Lag()
    assert shard.last_write is not None


def test_rows_wait_in_the_wal_and_then_in_sstables(table: lancewal.Table) -> None:
    with table.shard_writer(table.shard_for()) as writer:
        writer.put(rows(0, 10))
        writer.put(rows(10, 10))
        lag = table.status().unflushed
        assert (lag.count, lag.rows, lag.estimated) == (2, None, False)
        assert lag.num_bytes == sum(info.size for info in _entries(table))
    status = table.status()
    assert status.unflushed == Lag()
    assert (status.uncompacted.count, status.uncompacted.rows) == (1, 20)
    assert status.uncompacted.num_bytes > 0
    table.compact()
    status = table.status()
    assert (status.uncompacted, status.base_rows) == (Lag(), 20)
    assert status.shards[0].compacted_generation == 1


def _position(info: ObjectInfo) -> int:
    return layout.parse_wal_name(info.path.rsplit("/", 1)[-1]) or 0


def _entries(table: lancewal.Table) -> list[ObjectInfo]:
    store = ObjectStore.from_uri(table.uri)
    return [info for info in store.list(layout.MEM_WAL_DIR) if "/wal/" in info.path]


def test_ages_are_those_of_the_oldest(table: lancewal.Table) -> None:
    with table.shard_writer(table.shard_for(), enable_memtable=False) as writer:
        writer.put(rows(0, 1))
        writer.put(rows(1, 1))
    first, second = (Path(table.uri) / info.path for info in sorted(_entries(table), key=_position)[-2:])
    for path, age in ((first, 0), (second, 1800)):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime + age))
    later = datetime.now(UTC) + timedelta(hours=1)
    store = ObjectStore.from_uri(table.uri)
    status = table_status(store, table._reader.base, now=later)
    assert 3590 < status.unflushed.seconds(status.taken_at) < 3700
    last_write = status.shards[0].last_write
    assert last_write is not None
    assert 1790 < (later - last_write).total_seconds() < 1900
    document = status.to_dict()
    assert 3590 < document["unflushed"]["seconds"] < 3700
    assert document["uncompacted"]["seconds"] == 0


def test_a_long_tail_on_a_remote_store_is_measured_as_exactly_as_a_local_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = wal_table(tmp_path / "t")
    with table.shard_writer(table.shard_for(), enable_memtable=False) as writer:
        for number in range(40):
            writer.put(rows(number, 1))
    exact = table.status().unflushed
    monkeypatch.setattr(ObjectStore, "is_local", False)
    found = table.status().unflushed
    assert found == exact
    assert (found.count, found.estimated) == (40, False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bucket": ("id", 3)}, "bucket(id, 3)"),
        ({"identity": "id"}, "identity(id)"),
        ({}, "unsharded"),
        ({"by_hand": True}, "by hand"),
    ],
)
def test_sharding_in_words(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    assert wal_table(tmp_path / "t", **options).status().sharding == text


def test_buckets_come_in_their_order(tmp_path: Path) -> None:
    status = wal_table(tmp_path / "t", bucket=("id", 12)).status()
    assert [shard.values["bucket"] for shard in status.shards] == list(range(12))


def test_indexes_tell_how_far_they_are(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    dataset = lance.write_dataset(pa.Table.from_batches([rows(0, 30)]), uri)
    dataset.create_scalar_index("id", "BTREE")
    dataset.create_scalar_index("name", "INVERTED")
    table = lancewal.initialize(uri, unsharded=True, writer_defaults=fast())
    with table.writer() as writer:
        writer.put(rows(30, 5))
    table.compact(optimize_indexes=False)
    found = {index.name: (index.kind, index.columns, index.rows_behind) for index in table.status().indexes}
    assert found == {"id_idx": ("BTree", ("id",), 5), "name_idx": ("Inverted", ("name",), 5)}
    table.compact(optimize_indexes=True)
    assert {index.rows_behind for index in table.status().indexes} == {0}
    stats = lance.dataset(uri).stats.index_stats("id_idx")
    assert stats["num_unindexed_rows"] == 0


def test_append_only_tables_have_a_status_too(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", APPEND_ONLY)
    with table.writer() as writer:
        writer.put(rows(0, 3, schema=APPEND_ONLY))
    status = table.status()
    assert (status.primary_key, status.uncompacted.rows) == ((), 3)


class KilledError(BaseException):
    """Stands for a kill: no handler of errors may catch it."""


def test_shards_and_status_agree_after_a_compactor_died_between_rows_and_marker(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", APPEND_ONLY)
    with table.writer() as writer:
        writer.put(rows(0, 5, schema=APPEND_ONLY))

    def die(point: str) -> None:
        if point == "append: rows and tag are committed":
            raise KilledError

    at_crash_points(die)
    try:
        with pytest.raises(KilledError):
            table.compact()
    finally:
        at_crash_points(None)
    assert table.details.compacted == {}
    (listed,), (shard,) = table.shards(), table.status().shards
    assert listed.compacted_generation == shard.compacted_generation == 1
    assert (shard.uncompacted, table.count_rows()) == (Lag(), 5)
    assert not table.plan_compaction()
    table.compact()
    (listed,), (shard,) = table.shards(), table.status().shards
    assert listed.compacted_generation == shard.compacted_generation == 1


def test_a_marker_that_came_with_a_copy_does_not_count_as_compacted(tmp_path: Path) -> None:
    """Shards that Lance's own writer made in a clone begin at generation 1, below the copied marker."""
    table = wal_table(tmp_path / "t")
    for first in (0, 10):
        with table.writer() as writer:
            writer.put(rows(first, 5))
    table.compact()
    source = lance.dataset(table.uri)
    copy = lancewal.open(source.deep_clone(tmp_path / "copy", source.version).uri)
    shard_id = table.shards()[0].shard_id
    with lance.dataset(copy.uri).mem_wal_writer(str(shard_id)) as theirs:
        theirs.put(pa.Table.from_batches([rows(20, 5)]))
    (listed,), (shard,) = copy.shards(), copy.status().shards
    assert listed.compacted_generation == shard.compacted_generation == 0
    assert shard.uncompacted.count == len(shard.generations) == 1


def _distant(table: lancewal.Table) -> tuple[ObjectStore, DistantBackend, Callable[[], TableStatus]]:
    """The table far away, and its status there."""
    store, backend = distant_store(table.uri)
    return store, backend, lambda: table_status(store, lambda: BaseTable.open(store.uri, store=store))


def test_what_has_not_changed_is_not_read_again(table: lancewal.Table) -> None:
    """The base's listing is Lance's own: with it a warm status is three requests deep."""
    with table.shard_writer(table.shard_for(), enable_memtable=False) as writer:
        writer.put(rows(0, 1))
    _, backend, status = _distant(table)
    found = status()
    for _ in range(2):
        backend.requests.clear()
        with measured_depth() as depth:
            again = status()
            assert depth() <= 3  # with the look at the owners
        assert backend.requests == {"list_directories": 1, "list": 4}
        assert replace(again, taken_at=found.taken_at) == found


def test_what_has_changed_is_seen_although_the_rest_is_kept(table: lancewal.Table) -> None:
    store, _, status = _distant(table)
    status()
    with table.shard_writer(table.shard_for()) as writer:
        writer.put(rows(0, 3))
        assert (status().unflushed.count, status().uncompacted.count) == (1, 0)
    assert (status().unflushed.count, status().uncompacted.rows) == (0, 3)
    # As it may be after a stalled writer: another entry in the place of one that was read.
    info = max(_entries(table), key=_position)
    with table.shard_writer(table.shard_for(), enable_memtable=False) as writer:
        writer.put(rows(3, 1))
        entry = max(_entries(table), key=_position)
        assert status().unflushed.count == 1
        store.put(entry.path, store.get(info.path))
    assert _position(entry) > _position(info)
    assert status().unflushed.count == 0, "a sentinel is in its place"


def test_the_base_is_read_after_the_manifests(table: lancewal.Table) -> None:
    """Otherwise what is compacted and taken off the manifest in between would be in neither."""
    with table.shard_writer(table.shard_for()) as writer:
        writer.put(rows(0, 3))
    slow = FaultyStore(ObjectStore.from_uri(table.uri))
    slow.faults.before("list", lambda: table.compact() and None)
    status = table_status(slow, lambda: BaseTable.open(slow.uri, store=slow))
    assert (status.shards[0].generations, status.shards[0].compacted_generation) == ((), 1)
    assert (status.uncompacted, status.base_rows) == (Lag(), 3)


def test_a_manifest_that_is_collected_after_the_listing_is_looked_for_again(table: lancewal.Table) -> None:
    with table.shard_writer(table.shard_for()) as writer:
        writer.put(rows(0, 3))
    slow = FaultyStore(ObjectStore.from_uri(table.uri))
    shard_id = table.shard_for()
    manifests = ShardManifestStore(slow, shard_id)
    newest = manifests.require_latest()

    def supersede() -> None:
        manifests.commit_update(None, lambda m: replace(m, wal_entry_position_last_seen=1))
        slow.delete(layout.manifest_file(shard_id, newest.version))

    slow.faults.before("get", supersede, where=layout.manifest_file(shard_id, newest.version))
    status = table_status(slow, lambda: BaseTable.open(slow.uri, store=slow))
    assert status.uncompacted.rows == 3


def test_a_shard_without_a_manifest_is_left_out(table: lancewal.Table) -> None:
    store = ObjectStore.from_uri(table.uri)
    store.put(layout.wal_entry(uuid4(), 1), b"a writer is just making it")
    assert [shard.shard_id for shard in table.status().shards] == [table.shard_for()]


def test_checkpoints_were_not_shown_nor_what_they_hold_back(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t")
    with table.writer() as writer:
        writer.put(rows(0, 20))
    table.checkpoint("monday", keep=timedelta(days=3))
    (kept,) = table.status().checkpoints
    assert (kept.checkpoint.name, kept.held.count) == ("monday", 0)  # the table needs the same files
    table.compact()
    status = table.status()
    (kept,) = status.checkpoints
    assert kept.checkpoint == table.checkpoints()[0]
    assert 0 < kept.held.count < status.garbage.count
    assert 0 < kept.held.num_bytes < status.garbage.num_bytes
    (shown,) = json.loads(json.dumps(status.to_dict()))["checkpoints"]
    assert (shown["name"], shown["held"]["count"]) == ("monday", kept.held.count)
    assert 0 <= shown["age_seconds"] < 3600
    table.drop_checkpoint("monday")
    assert table.status().checkpoints == ()


def test_a_checkpoint_keeps_entries_of_the_log_too(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t")
    with table.writer() as writer:
        writer.put(rows(0, 20))
        table.checkpoint("in-the-log")
        writer.put(rows(20, 20))
    table.compact()
    (kept,) = table.status().checkpoints
    assert kept.held.count == 1  # the first put; the second one is newer


def test_what_two_checkpoints_hold_counts_once(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t")
    with table.writer() as writer:
        writer.put(rows(0, 20))
    table.checkpoint("monday")
    table.checkpoint("tuesday")
    table.compact()
    status = table.status()
    one, other = status.checkpoints
    assert status.held == one.held == other.held
    assert status.held.count > 0
