"""Verification finds every breach that it names, and nothing in a healthy table."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import lance
import pyarrow as pa
import pytest

from bench.distant import distant_store, measured_depth
from lancewal.base.table import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.errors import InvalidInputError, SplitShardError, WalCorruptError
from lancewal.format.schema import TOMBSTONE_FIELD
from lancewal.format.shard_manifest import ShardManifest, ShardStatus, encode_manifest
from lancewal.maintenance import (
    Kind,
    Severity,
    at_crash_points,
    compact,
    plan_compaction,
    repair,
    verify,
)
from lancewal.maintenance.commits import commit_markers
from lancewal.reader.table_reader import TableReader
from lancewal.shard import WalAppender
from lancewal.shard.discovery import discover_manifests
from lancewal.shard.manifest import ShardManifestStore
from lancewal.shard.routing import ShardRouter
from lancewal.sstable import SsTable
from lancewal.storage import ObjectInfo, ObjectStore, layout
from lancewal.table import Table
from lancewal.writer import flush_shard
from tests.faults import FaultyStore
from tests.maintenance.support import Site, execute_shard, named
from tests.shard.support import contents
from tests.tables import APPEND_ONLY, KEYED, new_table, open_writer, rows


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """One compacted generation, two flushed ones, and rows that are in the WAL alone."""
    site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, 5)]))
    site.flush(rows(3, 5, prefix="one"))
    site.merge()
    site.flush(rows(10, 5, prefix="two"), [3])
    site.flush(rows(12, 5, prefix="three"))
    appender = WalAppender.open(site.store, site.shard_id)
    for start in (20, 21, 22):
        appender.append([stored(site, rows(start, 1))])
    return site


def stored(site: Site, batch: pa.RecordBatch) -> pa.RecordBatch:
    tombstones = pa.array([False] * batch.num_rows)
    return pa.RecordBatch.from_arrays([*batch.columns, tombstones], schema=site.base.schema.stored)


def newest_sstable(site: Site) -> str:
    return layout.sstable_dir(site.shard_id, site.manifest.sstables[-1].path)


def rewrite_manifest(site: Site, change: Callable[[ShardManifest], ShardManifest]) -> None:
    """Replace the newest manifest by force, as no writer does."""
    newest = site.manifest
    site.store.put(layout.manifest_file(site.shard_id, newest.version), encode_manifest(change(newest)))


def kinds(site: Site, **how: Any) -> list[tuple[Kind, Severity]]:
    return sorted({(finding.kind, finding.severity) for finding in site.verify(**how).findings})


class TestHealthy:
    def test_a_healthy_table_has_no_findings(self, site: Site) -> None:
        report = site.verify()
        assert (report.findings, report.ok, report.exit_code) == ([], True, 0)
        assert report.checked["shards"] == 1
        assert report.checked["SSTables"] == 3
        assert report.checked["base rows"] == 8
        assert report.checked["rows"] == 5 + 6 + 5

    def test_so_has_one_that_lance_wrote(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table")
        for start in (0, 3):
            with site.dataset.mem_wal_writer(str(site.shard_id), durable_write=True) as writer:
                writer.put(rows(start, 5))
                writer.put(rows(start, 2))
                writer.delete(pa.table({"id": [start]}))
        assert site.verify().findings == []

    def test_so_has_one_after_collection_without_a_key_or_after_schema_changes(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table", APPEND_ONLY)
        site.flush(rows(0, 5, schema=APPEND_ONLY))
        site.flush(rows(0, 5, schema=APPEND_ONLY))
        site.compact()
        site.collect()
        site.flush(rows(0, 5, schema=APPEND_ONLY))
        site.dataset.alter_columns({"path": "name", "name": "title"})
        site.dataset.add_columns(pa.schema([pa.field("later", pa.int32())]))
        assert site.verify().findings == []

    def test_the_report_is_json(self, site: Site) -> None:
        site.store.delete(layout.wal_entry(site.shard_id, site.manifest.replay_after_wal_entry_position + 2))
        report = json.loads(site.verify().to_json())
        assert (report["ok"], report["exit_code"]) == (False, 2)
        (finding,) = report["findings"]
        assert (finding["kind"], finding["shard_id"]) == ("wal_gap", str(site.shard_id))

    def test_an_unknown_shard_is_refused(self, site: Site) -> None:
        with pytest.raises(InvalidInputError):
            site.verify(shards=[uuid4()])

    def test_what_changes_meanwhile_is_looked_at_again(self, site: Site) -> None:
        slow = FaultyStore(site.store)
        site.store = slow
        # Between the manifest and the directories it names: compaction and collection.
        slow.faults.before("list_directories", lambda: (site.compact(), site.collect()), nth=2)
        assert site.verify().findings == []

    def test_what_changes_meanwhile_is_looked_at_in_the_newest_base(self, site: Site) -> None:
        """The second look at a shard goes with a second look at the base: markers may have come."""
        slow = FaultyStore(site.store)
        site.store = slow
        slow.faults.before("list_directories", lambda: (site.compact(), site.flush(rows(50, 2))), nth=2)
        # Found once: what it names is gone.
        path = layout.sstable_dir(site.shard_id, "0123abcd_gen_9")
        slow.put(f"{path}/x", b"an orphan")
        report = site.verify()
        assert [finding.kind for finding in report.findings] == [Kind.ORPHANED_SSTABLE]

    def test_the_base_is_read_after_the_manifests(self, site: Site) -> None:
        """Otherwise generations that were compacted and pruned in between would look lost."""
        slow = FaultyStore(site.store)
        slow.faults.before("get", lambda: site.compact() and None, where=layout.version_hint(site.shard_id))
        assert verify(slow).findings == []
        assert site.manifest.sstables == ()

    def test_nothing_is_read_again_where_nothing_was_found(self, site: Site) -> None:
        counted = FaultyStore(site.store)
        site.store = counted
        site.verify(deep=False)
        once = counted.faults.count("get", layout.version_hint(site.shard_id))
        counted.faults.clear()
        counted.put(f"{layout.shard_dir(site.shard_id)}/backup/x", b"?")
        site.verify(deep=False)
        assert counted.faults.count("get", layout.version_hint(site.shard_id)) == once + 1


def far(site: Site) -> ObjectStore:
    return distant_store(site.store.uri)[0]


def _damages() -> dict[str, Callable[[Site], object]]:
    """One of each kind that a shard can have, by what it is."""

    def entry(site: Site, offset: int) -> str:
        return layout.wal_entry(site.shard_id, site.manifest.replay_after_wal_entry_position + offset)

    def rename_directory(site: Site) -> None:
        site.store.put(f"{layout.sstable_dir(site.shard_id, '0123abcd_gen_1')}/x", b"dead")

    return {
        "nothing": lambda site: None,
        "a gap": lambda site: site.store.delete(entry(site, 2)),
        "an unreadable entry": lambda site: site.store.put(entry(site, 1), b"garbage"),
        "an old unreadable entry": lambda site: site.store.put(layout.wal_entry(site.shard_id, 1), b"?"),
        "an unclaimed epoch": lambda site: rewrite_manifest(site, lambda m: replace(m, writer_epoch=2)),
        "a missing version": lambda site: site.store.delete(layout.manifest_file(site.shard_id, 3)),
        "an old unreadable version": lambda site: site.store.put(
            layout.manifest_file(site.shard_id, 2), b"\xff"
        ),
        "a regression": lambda site: rewrite_manifest(
            site, lambda m: replace(m, replay_after_wal_entry_position=1)
        ),
        "a wrong hint": lambda site: site.store.put(layout.version_hint(site.shard_id), b"{}"),
        "a marker above": lambda site: commit_markers(site.dataset, {site.shard_id: 9}),
        "no manifest": lambda site: site.store.delete_prefix(layout.manifest_dir(site.shard_id)),
        "a generation that is not listed": lambda site: rewrite_manifest(
            site, lambda m: replace(m, sstables=(m.sstables[0], m.sstables[2]))
        ),
        "another's directory": lambda site: site.store.put(
            f"{layout.shard_dir(site.shard_id)}/backup/x", b"?"
        ),
        "a leftover": rename_directory,
        "a path that leads nowhere": lambda site: site.store.delete_prefix(newest_sstable(site)),
        "one that the base holds": lambda site: site.store.delete_prefix(
            layout.sstable_dir(site.shard_id, site.manifest.sstables[0].path)
        ),
        "no rows": lambda site: site.store.delete_prefix(f"{newest_sstable(site)}/data"),
        "no bloom filter": lambda site: site.store.delete(
            f"{newest_sstable(site)}/{layout.BLOOM_FILTER_NAME}"
        ),
        "a bloom filter that denies": lambda site: site.store.put(
            f"{newest_sstable(site)}/{layout.BLOOM_FILTER_NAME}", bytes(32768)
        ),
        "a damaged key index": lambda site: site.store.put(
            f"{newest_sstable(site)}/{layout.PK_PAGE_DATA_NAME}", b"damaged"
        ),
        "no notes": lambda site: site.store.delete(f"{newest_sstable(site)}/{layout.SSTABLE_NOTES_NAME}"),
        "a wrong count": lambda site: rewrite_manifest(
            site,
            lambda m: replace(m, sstables=(*m.sstables[:-1], replace(m.sstables[-1], physical_rows=99))),
        ),
        "a key twice in the base": lambda site: lance.write_dataset(
            rows(4, 1), site.store.uri, mode="append"
        ),
    }


@pytest.mark.parametrize("deep", [True, False], ids=["deep", "quick"])
@pytest.mark.parametrize("damage", _damages())
def test_side_by_side_the_same_is_found_as_one_by_one(site: Site, damage: str, deep: bool) -> None:
    """Far away all checks of a shard run at a time; near by they run in order."""
    _damages()[damage](site)
    near = site.verify(deep=deep)
    found = verify(far(site), deep=deep)
    assert [(f.kind, f.severity, f.subject) for f in found.findings] == [
        (f.kind, f.severity, f.subject) for f in near.findings
    ]
    for report in (found, near):
        del report.checked["flushes"]  # which SSTables that were deleted are still open here is by chance
    assert (found.checked, found.base_version) == (near.checked, near.base_version)
    assert bool(found.findings) or damage == "nothing" or not deep


def test_a_check_of_one_shard_is_fourteen_requests_deep_at_most(site: Site) -> None:
    """Its log, its versions and its SSTables are read beside each other; Lance's requests are not counted."""
    for number in range(6):
        site.flush(rows(30 + number, 5))
    with measured_depth() as depth:
        assert verify(far(site)).findings == []
        assert depth() <= 14


class TestWal:
    def test_a_gap(self, site: Site) -> None:
        covered = site.manifest.replay_after_wal_entry_position
        site.store.delete(layout.wal_entry(site.shard_id, covered + 2))
        (finding,) = site.verify().findings
        assert (finding.kind, finding.severity) == (Kind.WAL_GAP, Severity.ERROR)
        assert f"entry {covered + 2} is missing" in finding.text

    def test_an_entry_that_came_while_the_log_was_listed_is_no_gap(self, site: Site) -> None:
        missed = layout.wal_entry(site.shard_id, site.manifest.replay_after_wal_entry_position + 2)

        class Listing(FaultyStore):
            def list(self, prefix: str = "") -> list[ObjectInfo]:
                return [info for info in super().list(prefix) if info.path != missed]

        assert verify(Listing(site.store)).findings == []

    def test_lost_entries_can_be_given_up(self, site: Site) -> None:
        covered = site.manifest.replay_after_wal_entry_position
        for position in (covered + 1, covered + 3):
            site.store.delete(layout.wal_entry(site.shard_id, position))
        assert [finding.kind for finding in site.verify().findings] == [Kind.WAL_GAP] * 2
        before = contents(site.store)
        with pytest.raises(WalCorruptError, match="verify --accept-lost-entries"):
            site.writer()
        report = repair(site.store)
        assert ([f.kind for f in report.left], report.repaired) == ([Kind.WAL_GAP] * 2, [])
        assert contents(site.store) == before, "something was written to a damaged log"
        report = repair(site.store, accept_lost_entries=True)
        assert ([f.kind for f in report.repaired], report.left) == ([Kind.WAL_GAP] * 2, [])
        assert site.verify().findings == []
        left = [20, 22]
        reader = TableReader(site.store, live_writers=False)
        assert sorted(reader.scan(["id"], "id >= 20").to_table()["id"].to_pylist()) == left
        with site.dataset.mem_wal_writer(str(site.shard_id), durable_write=True) as writer:
            writer.put(rows(30, 1))
        assert sorted(reader.scan(["id"], "id >= 20").to_table()["id"].to_pylist()) == [*left, 30]

    def test_a_file_that_does_not_belong_there_is_no_loss_to_accept(self, site: Site) -> None:
        last = WalAppender.open(site.store, site.shard_id).append([stored(site, rows(9, 1))]).position
        site.store.put(layout.wal_entry(site.shard_id, 1 << 40), b"?")
        report = repair(site.store, accept_lost_entries=True)
        assert [(f.kind, "does not belong" in text) for f, text in report.failed] == [(Kind.WAL_GAP, True)]
        assert site.store.head(layout.wal_entry(site.shard_id, last + 1)) is None

    def test_the_place_of_a_lost_entry_taken_by_a_writer_that_did_not_look(self, site: Site) -> None:
        covered = site.manifest.replay_after_wal_entry_position
        site.store.delete(layout.wal_entry(site.shard_id, covered + 2))
        with site.dataset.mem_wal_writer(str(site.shard_id), durable_write=True):
            (finding,) = site.verify().findings
            assert (finding.kind, finding.severity) == (Kind.WAL_EPOCH_BEHIND, Severity.WARNING)
            assert f"the place of a lost entry {covered + 2}" in finding.text

    @pytest.mark.parametrize(
        "damage", [lambda d: d[:-100], lambda d: d[:-90] + b"x" + d[-89:], lambda d: b""]
    )
    def test_an_entry_that_is_cut_or_altered(self, site: Site, damage: Callable[[bytes], bytes]) -> None:
        path = layout.wal_entry(site.shard_id, site.manifest.replay_after_wal_entry_position + 1)
        site.store.put(path, damage(bytes(site.store.get(path))))
        assert (Kind.WAL_UNREADABLE, Severity.ERROR) in kinds(site)

    def test_a_covered_entry_is_read_only_in_depth(self, site: Site) -> None:
        site.store.put(layout.wal_entry(site.shard_id, 1), b"garbage")
        assert kinds(site) == [(Kind.WAL_UNREADABLE, Severity.WARNING)]
        assert kinds(site, deep=False) == []

    def test_an_epoch_that_nobody_has_claimed(self, site: Site) -> None:
        rewrite_manifest(site, lambda m: replace(m, writer_epoch=2))
        assert (Kind.WAL_EPOCH_AHEAD, Severity.ERROR) in kinds(site)

    def test_wrong_field_ids(self, site: Site) -> None:
        fields = [pa.field("id", pa.int64(), metadata={"lance:field_id": "9"}), pa.field("name", pa.string())]
        schema = pa.schema([*fields, TOMBSTONE_FIELD])
        batch = pa.record_batch([pa.array([1]), pa.array(["x"]), pa.array([False])], schema=schema)
        WalAppender.open(site.store, site.shard_id).append([batch])
        assert (Kind.FIELD_ID_MISMATCH, Severity.ERROR) in kinds(site)

    def test_what_a_stalled_writer_dropped_below(self, site: Site) -> None:
        site.store.delete(layout.wal_entry(site.shard_id, 2))
        report = site.verify()
        assert [(f.kind, f.severity) for f in report.findings] == [(Kind.WAL_STRAY, Severity.INFO)]
        assert report.ok


class TestManifests:
    def test_a_missing_version(self, site: Site) -> None:
        site.store.delete(layout.manifest_file(site.shard_id, 3))
        assert kinds(site) == [(Kind.MANIFEST_GAP, Severity.ERROR)]

    def test_an_unreadable_newest_version(self, site: Site) -> None:
        site.store.put(layout.manifest_file(site.shard_id, site.manifest.version), b"\xff\xff")
        assert (Kind.MANIFEST_UNREADABLE, Severity.ERROR) in kinds(site)

    def test_an_unreadable_old_version(self, site: Site) -> None:
        site.store.put(layout.manifest_file(site.shard_id, 2), b"\xff\xff")
        assert kinds(site) == [(Kind.MANIFEST_UNREADABLE, Severity.WARNING)]

    def test_a_version_that_takes_something_back(self, site: Site) -> None:
        rewrite_manifest(site, lambda m: replace(m, replay_after_wal_entry_position=1))
        assert (Kind.MANIFEST_REGRESSION, Severity.ERROR) in kinds(site)

    @pytest.mark.parametrize("hint", [b"", b"{}", b'{"version":1}', b'{"version":999}'])
    def test_a_wrong_hint(self, site: Site, hint: bytes) -> None:
        site.store.put(layout.version_hint(site.shard_id), hint)
        assert kinds(site) == [(Kind.HINT_WRONG, Severity.WARNING)]

    def test_a_shard_without_a_manifest(self, site: Site) -> None:
        site.store.delete_prefix(layout.manifest_dir(site.shard_id))
        assert (Kind.MANIFEST_MISSING, Severity.ERROR) in kinds(site)

    def test_a_generation_that_is_not_listed(self, site: Site) -> None:
        rewrite_manifest(site, lambda m: replace(m, sstables=(m.sstables[0], m.sstables[2])))
        assert (Kind.GENERATION_GAP, Severity.ERROR) in kinds(site)

    def test_a_marker_above_the_manifest(self, site: Site) -> None:
        commit_markers(site.dataset, {site.shard_id: 9})
        assert kinds(site) == [(Kind.MARKER_ABOVE_MANIFEST, Severity.ERROR)]

    def test_a_marker_of_no_shard(self, site: Site) -> None:
        commit_markers(site.dataset, {uuid4(): 1})
        assert kinds(site) == [(Kind.MARKER_WITHOUT_SHARD, Severity.WARNING)]

    def test_directories_of_others(self, site: Site) -> None:
        site.store.put(f"{layout.MEM_WAL_DIR}/notes/readme.txt", b"?")
        site.store.put(f"{layout.shard_dir(site.shard_id)}/backup/x", b"?")
        assert kinds(site) == [(Kind.UNKNOWN_DIRECTORY, Severity.WARNING)]
        assert len(site.verify().findings) == 2


class TestSsTables:
    def test_a_path_that_leads_nowhere(self, site: Site) -> None:
        site.store.delete_prefix(newest_sstable(site))
        assert kinds(site) == [(Kind.DANGLING_PATH, Severity.ERROR)]

    def test_one_that_the_base_holds_already_matters_less(self, site: Site) -> None:
        entry = site.manifest.sstables[0]
        site.store.delete_prefix(layout.sstable_dir(site.shard_id, entry.path))
        assert kinds(site) == [(Kind.DANGLING_PATH, Severity.INFO)]

    def test_an_unreadable_one(self, site: Site) -> None:
        site.store.delete_prefix(f"{newest_sstable(site)}/data")
        assert (Kind.SSTABLE_UNREADABLE, Severity.ERROR) in kinds(site)

    @pytest.mark.parametrize(
        "name", [layout.BLOOM_FILTER_NAME, layout.PK_PAGE_DATA_NAME, layout.PK_PAGE_LOOKUP_NAME]
    )
    def test_a_missing_sidecar(self, site: Site, name: str) -> None:
        site.store.delete(f"{newest_sstable(site)}/{name}")
        assert (Kind.SIDECAR_MISSING, Severity.ERROR) in kinds(site)

    def test_a_bloom_filter_that_denies_keys(self, site: Site) -> None:
        site.store.put(f"{newest_sstable(site)}/{layout.BLOOM_FILTER_NAME}", bytes(32768))
        assert kinds(site) == [(Kind.SIDECAR_WRONG, Severity.ERROR)]
        assert kinds(site, deep=False) == [(Kind.SIDECAR_WRONG, Severity.ERROR)]

    def test_a_bloom_filter_of_lances_that_denies_keys(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table")
        with site.dataset.mem_wal_writer(str(site.shard_id)) as writer:
            writer.put(pa.Table.from_batches([rows(0, 5)]))
        site.store.put(f"{newest_sstable(site)}/{layout.BLOOM_FILTER_NAME}", bytes(32768))
        assert kinds(site) == [(Kind.SIDECAR_WRONG, Severity.ERROR)]
        assert kinds(site, deep=False) == []

    def test_a_damaged_key_index_was_beyond_repair(self, site: Site) -> None:
        path = f"{newest_sstable(site)}/{layout.PK_PAGE_DATA_NAME}"
        content = bytearray(site.store.get(path))
        content[0] ^= 1
        site.store.put(path, content)
        assert kinds(site) == [(Kind.SIDECAR_WRONG, Severity.ERROR)]
        assert len(repair(site.store).repaired) == 1
        assert kinds(site) == []

    def test_notes_of_lancewals_own(self, site: Site) -> None:
        path = f"{newest_sstable(site)}/{layout.SSTABLE_NOTES_NAME}"
        content = site.store.get(path)
        site.store.put(path, content.replace(b"base_version", b"base_verSion"))
        assert kinds(site) == [(Kind.SIDECAR_WRONG, Severity.ERROR)]
        site.store.delete(path)
        assert kinds(site) == [(Kind.SIDECAR_MISSING, Severity.ERROR)]
        # The manifest's copy says what they were.
        assert len(repair(site.store).repaired) == 1
        assert kinds(site) == []
        assert SsTable.open(site.store, site.shard_id, site.manifest.sstables[-1]).written_for == 3

    def test_a_row_count_that_does_not_fit(self, site: Site) -> None:
        last = site.manifest.sstables[-1]
        rewrite_manifest(
            site, lambda m: replace(m, sstables=(*m.sstables[:-1], replace(last, physical_rows=99)))
        )
        assert kinds(site) == [(Kind.ROW_COUNT_WRONG, Severity.ERROR)]

    def test_a_key_more_than_once(self, site: Site) -> None:
        uri = layout.child_uri(site.store.uri, newest_sstable(site))
        dataset = lance.dataset(uri)
        dataset.insert(dataset.to_table().slice(0, 2), mode="append")
        found = kinds(site)
        assert (Kind.DUPLICATE_KEYS, Severity.ERROR) in found

    def test_field_ids_that_are_not_the_tables(self, site: Site) -> None:
        directory = newest_sstable(site)
        site.store.delete_prefix(directory)
        fields = [pa.field("name", pa.string()), pa.field("id", pa.int64()), TOMBSTONE_FIELD]
        content = [pa.array(["x"] * 5), pa.array(range(5)), pa.array([False] * 5)]
        lance.write_dataset(
            pa.table(content, schema=pa.schema(fields)), layout.child_uri(site.store.uri, directory)
        )
        assert (Kind.FIELD_ID_MISMATCH, Severity.ERROR) in kinds(site)

    def test_leftovers_are_told_but_no_error(self, site: Site) -> None:
        site.store.put(f"{layout.sstable_dir(site.shard_id, '0123abcd_gen_1')}/x", b"dead")
        report = site.verify()
        assert [f.kind for f in report.findings] == [Kind.ORPHANED_SSTABLE]
        assert report.ok


def test_a_key_more_than_once_in_the_base(site: Site) -> None:
    lance.write_dataset(rows(4, 1), site.store.uri, mode="append")
    assert kinds(site) == [(Kind.DUPLICATE_KEYS, Severity.ERROR)]


class TestBaseFiles:
    @pytest.mark.parametrize("deep", [True, False])
    @pytest.mark.parametrize("schema", [KEYED, APPEND_ONLY], ids=["with a key", "without a key"])
    def test_a_lost_file_was_not_noticed_or_hid_all_other_findings(
        self, tmp_path: Path, schema: pa.Schema, deep: bool
    ) -> None:
        site = Site(tmp_path / "table", schema)
        site.flush(rows(0, 5, schema=schema))
        site.compact()
        site.store.put(layout.version_hint(site.shard_id), b"garbage")
        [file] = site.store.list("data")
        whole = site.store.get(file.path)
        found = [(Kind.BASE_DAMAGED, Severity.ERROR), (Kind.HINT_WRONG, Severity.WARNING)]

        site.store.delete(file.path)
        assert kinds(site, deep=deep) == found
        site.store.put(file.path, whole[:-9])
        assert kinds(site, deep=deep) == found

        site.store.put(file.path, whole)
        assert [each.kind for each in repair(site.store).repaired] == [Kind.HINT_WRONG]
        assert kinds(site, deep=deep) == []

    def test_a_file_that_cannot_be_read_hid_all_other_findings(self, site: Site) -> None:
        [file] = site.dataset.get_fragments()[0].data_files()
        path = f"data/{file.path}"
        site.store.put(path, bytes(len(site.store.get(path))))
        site.store.put(layout.version_hint(site.shard_id), b"garbage")
        assert kinds(site) == [(Kind.BASE_DAMAGED, Severity.ERROR), (Kind.HINT_WRONG, Severity.WARNING)]
        assert [each.kind for each in repair(site.store).repaired] == [Kind.HINT_WRONG]

    def test_lost_deletions_and_indexes_were_not_noticed(self, site: Site) -> None:
        site.dataset.create_scalar_index("name", "BTREE")
        site.dataset.delete("id = 1")
        assert kinds(site, deep=False) == []
        for directory in ("_indices", "_deletions"):
            for info in site.store.list(directory):
                site.store.delete(info.path)
        found = site.verify(deep=False).findings
        assert [finding.kind for finding in found] == [Kind.BASE_DAMAGED, Kind.BASE_DAMAGED]
        assert any("'name_idx'" in finding.text for finding in found)

    def test_a_version_that_was_cleaned_up_meanwhile_is_no_damage(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base = site.base
        site.dataset.delete("id >= 0")
        site.dataset.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
        newest = iter([base])
        monkeypatch.setattr(
            sys.modules["lancewal.maintenance.verify"], "open_base", lambda store: next(newest, site.base)
        )
        assert site.verify(deep=False).ok


class TestRepair:
    def test_the_hint(self, site: Site) -> None:
        site.store.put(layout.version_hint(site.shard_id), b"garbage")
        report = repair(site.store)
        assert [f.kind for f in report.repaired] == [Kind.HINT_WRONG]
        assert ShardManifestStore(site.store, site.shard_id).read_hint() == site.manifest.version
        assert site.verify().findings == []

    @pytest.mark.parametrize(
        "damage",
        [
            lambda site: site.store.delete(f"{newest_sstable(site)}/{layout.BLOOM_FILTER_NAME}"),
            lambda site: site.store.delete_prefix(f"{newest_sstable(site)}/{layout.PK_INDEX_DIR}"),
            lambda site: site.store.put(f"{newest_sstable(site)}/{layout.BLOOM_FILTER_NAME}", bytes(32768)),
            lambda site: site.store.put(f"{newest_sstable(site)}/{layout.PK_PAGE_DATA_NAME}", b"damaged"),
            lambda site: site.store.put(f"{newest_sstable(site)}/{layout.PK_PAGE_LOOKUP_NAME}", b"damaged"),
        ],
    )
    def test_sidecars(self, site: Site, damage: Callable[[Site], object]) -> None:
        expected = site.merged()
        damage(site)
        SsTable.open(site.store, site.shard_id, site.manifest.sstables[-1]).forget()
        assert not site.verify().ok
        report = repair(site.store)
        assert (bool(report.repaired), report.left, report.failed) == (True, [], [])
        assert (site.verify().findings, site.merged()) == ([], expected)

    def test_an_append_without_its_marker(self, tmp_path: Path) -> None:
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
        assert kinds(site) == [(Kind.APPEND_UNFINISHED, Severity.INFO)]
        repair(site.store)
        assert (site.verify().findings, site.marker) == ([], 1)
        assert site.plain() == named(range(3), "name")

    def test_what_needs_a_decision_is_left(self, site: Site) -> None:
        site.store.delete_prefix(newest_sstable(site))
        report = repair(site.store)
        assert ([f.kind for f in report.left], report.repaired) == ([Kind.DANGLING_PATH], [])
        assert report.to_dict()["left"][0]["kind"] == "dangling_path"


# --- rows that belong together in several shards ------------------------------------------


class TestSplitShards:
    """A table in buckets that an earlier lancewal and LanceDB have both written."""

    @pytest.fixture
    def split(self, tmp_path: Path) -> Split:
        return Split(tmp_path / "table")

    def test_one_key_in_two_shards_is_reported(self, split: Split) -> None:
        report = verify(split.store)
        found = {(finding.kind, finding.severity) for finding in report.findings}
        assert found == {
            (Kind.SPLIT_SHARD, Severity.WARNING),
            (Kind.KEYS_IN_TWO_SHARDS, Severity.ERROR),
        }
        shared = report.of(Kind.KEYS_IN_TWO_SHARDS)
        assert sum(int(finding.text.split()[0]) for finding in shared) == 32
        assert {finding.shard_id for finding in report.of(Kind.SPLIT_SHARD)} == {
            shard.rivals[0] for shard in split.shards
        }
        quick = verify(split.store, deep=False)
        assert {finding.kind for finding in quick.findings} == {Kind.SPLIT_SHARD}

    def test_compaction_changed_32_of_32_keys(self, split: Split) -> None:
        flush_all(split.base, split.store)
        before = split.merged()
        compact(split.store)
        assert split.merged() == before

    def test_repair_retires_the_shards_of_the_earlier_version(self, split: Split) -> None:
        table = Table.open(split.base.uri)
        with pytest.raises(SplitShardError), table.writer(fsync=False) as writer:
            writer.put(rows(0, 32, prefix="refused"))
        flush_all(split.base, split.store)
        before = split.merged()
        report = table.repair()
        assert report.failed == []
        assert {finding.kind for finding in report.repaired} == {Kind.SPLIT_SHARD}
        assert split.merged() == before
        assert table.verify().findings == []
        sealed = {info.shard_id for info in table.shards() if info.status is ShardStatus.SEALED}
        assert sealed == {shard.rivals[0] for shard in split.shards}
        with table.writer(fsync=False) as writer:
            writer.put(rows(0, 32, prefix="after"))
            assert set(writer.shard_writers) == {shard.shard_id for shard in split.shards}
        assert {row["name"] for row in split.merged()} == {f"after_{number}" for number in range(32)}
        assert table.verify().findings == []

    def test_a_shard_that_was_taken_over_meanwhile_is_not_sealed(self, split: Split) -> None:
        def claim(point: str) -> None:
            for shard in split.shards:
                ShardManifestStore(split.store, shard.rivals[0]).claim_epoch(1)

        at_crash_points(claim)
        try:
            report = repair(split.store)
        finally:
            at_crash_points(None)
        assert report.failed
        assert all("epoch" in text for _, text in report.failed)
        assert repair(split.store).failed == []
        assert verify(split.store).findings == []


class Split:
    """Four buckets, each with a shard of an earlier lancewal and a silent one that Lance made."""

    def __init__(self, where: Path) -> None:
        self.base = new_table(where, bucket_column="id", num_buckets=4)
        self.store = ObjectStore.from_uri(self.base.uri, fsync=False)
        router = ShardRouter.for_table(self.base.details, self.base.schema)
        self.shards = router.known_shards()
        for shard, part in router.route(rows(0, 32, prefix="lancewal")):
            ShardManifestStore(self.store, shard.rivals[0]).initialize_shard(1, shard.field_entries)
            for prefix in ("older", "lancewal"):
                with open_writer(self.base, shard.rivals[0], store=self.store) as writer:
                    writer.put(renamed(part, prefix))
        for shard, part in router.route(rows(0, 32, prefix="lancedb")):
            with self.base.dataset.mem_wal_writer(str(shard.shard_id), durable_write=True) as theirs:
                theirs.put(part)

    def merged(self) -> list[dict[str, Any]]:
        return TableReader(self.store, live_writers=False).scan().to_table().sort_by("id").to_pylist()


def renamed(batch: pa.RecordBatch, prefix: str) -> pa.RecordBatch:
    names = [f"{prefix}_{number}" for number in batch.column("id").to_pylist()]
    return pa.record_batch([batch.column("id"), pa.array(names)], schema=batch.schema)


def flush_all(base: BaseTable, store: ObjectStore) -> None:
    for manifest in discover_manifests(store):
        flush_shard(base, manifest, store, ShardWriterConfig())
