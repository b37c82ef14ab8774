"""What went wrong in systems like this one, once each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from lance.mem_wal import LsmScanner, ShardSnapshot

from lancewal.base.markers import TAGGED_COLUMNS, tag
from lancewal.base.table import BaseTable
from lancewal.errors import NotInitializedError
from lancewal.format.schema import TOMBSTONE_FIELD
from lancewal.maintenance import collect_garbage, plan_compaction
from lancewal.maintenance.append_only import remove_tags
from lancewal.maintenance.commits import commit_markers
from lancewal.shard.manifest import ShardManifestStore
from lancewal.sstable import rebuild_sidecars
from lancewal.storage import ObjectStore, layout
from tests.faults import FaultyStore
from tests.maintenance.support import Site, execute_shard, named
from tests.tables import APPEND_ONLY, KEYED, rows

READ = "merge: rows are read"


AtPoint = Callable[[str, Callable[[], object]], None]


class TestCommitsWithoutRows:
    """A commit that changed metadata only published a table without its fragments."""

    def test_a_marker_alone(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, 50)]))
        fragments = site.base.manifest.fragment_ids
        commit_markers(site.dataset, {site.shard_id: 1})
        assert (site.plain(), site.base.manifest.fragment_ids) == (named(range(50), "name"), fragments)

    def test_a_generation_that_leaves_nothing(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, 50)]))
        site.flush(rows(100, 3), [100, 101, 102])
        site.compact()
        assert (site.plain(), site.marker) == (named(range(50), "name"), 1)

    def test_the_removal_of_tags(self, tmp_path: Path) -> None:
        table = pa.Table.from_batches([rows(0, 50, schema=APPEND_ONLY)])
        site = Site(tmp_path / "table", APPEND_ONLY, table)
        commit_markers(site.dataset, {site.shard_id: 1})
        site.dataset.update_field_metadata({"id": {tag(site.shard_id, 1): ""}})
        assert remove_tags(site.store)
        assert (site.plain(), site.dataset.schema.field("id").metadata) == (named(range(50), "name"), None)

    def test_a_tagged_append_to_an_empty_table(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table", APPEND_ONLY)
        site.flush(rows(0, 3, schema=APPEND_ONLY))
        site.compact()
        assert site.plain() == named(range(3), "name")
        assert TAGGED_COLUMNS >= 2


class TestLateCompactors:
    """A late compactor's rows landed under another job's marker."""

    def test_one_that_was_overtaken_changes_nothing(self, tmp_path: Path, at_point: AtPoint) -> None:
        site = Site(tmp_path / "table")
        site.flush(rows(0, 4, prefix="old"))
        plan = plan_compaction(site.store)

        def overtake() -> None:
            site.flush(rows(0, 2, prefix="new"), [3])
            site.compact()

        at_point(READ, overtake)
        late = execute_shard(plan.shards[0], store=site.store)
        assert (late.commits, late.skipped) == (0, [1])
        assert site.plain() == [*named([0, 1], "new"), (2, "old_2")]
        assert site.marker == 2

    def test_a_key_that_was_deleted_since_does_not_come_back(self, tmp_path: Path, at_point: AtPoint) -> None:
        """The late one knows more generations, so that its marker is above the other's: its
        deletes have to see the rows that the other brought in."""
        site = Site(tmp_path / "table")
        site.flush(rows(0, 4))
        first = plan_compaction(site.store)
        site.flush([1, 2])
        both = plan_compaction(site.store)
        at_point(READ, lambda: execute_shard(first.shards[0], store=site.store))
        late = execute_shard(both.shards[0], store=site.store)
        assert (late.generations, late.skipped, late.retries) == ([2], [1], 1)
        assert site.plain() == named([0, 3], "name")
        assert site.merged() == named([0, 3], "name")

    def test_a_part_of_a_generation_does_not_land_late(self, tmp_path: Path, at_point: AtPoint) -> None:
        """Commits without a marker of their own, of a generation that takes several."""
        site = Site(tmp_path / "table")
        site.flush(*(rows(start, 5000, prefix="old") for start in range(0, 30_000, 5000)))
        plan = plan_compaction(site.store, max_commit_bytes=300_000)

        def overtake() -> None:
            site.flush(rows(29_000, 1, prefix="new"), [28_000])
            site.compact()

        at_point("merge: a part of the rows is committed", overtake)
        late = execute_shard(plan.shards[0], store=site.store)
        assert late.skipped == [1]
        found = dict(site.plain())
        assert (found[29_000], 28_000 in found, len(found)) == ("new_29000", False, 29_999)

    def test_sstables_that_were_collected_meanwhile_are_no_failure(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table")
        site.flush(rows(0, 4))
        plan = plan_compaction(site.store)
        site.compact()
        site.collect()
        late = execute_shard(plan.shards[0], store=site.store)
        assert (late.commits, late.skipped) == (0, [1])


class TestVersionsInOneGeneration:
    """A key was inserted and updated in one generation, and compaction kept the old row."""

    def test_the_last_one_counts(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table")
        site.flush(rows(0, 3, prefix="insert"), rows(0, 2, prefix="update"), rows(0, 1, prefix="again"))
        site.compact()
        assert site.plain() == [(0, "again_0"), (1, "update_1"), (2, "insert_2")]

    def test_deleted_and_inserted_again(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, 2)]))
        site.flush([0, 1], rows(0, 1, prefix="again"))
        site.compact()
        assert site.plain() == [(0, "again_0")]

    @pytest.mark.parametrize("has_sidecars", [True, False])
    def test_in_an_sstable_without_a_deletion_vector(self, tmp_path: Path, has_sidecars: bool) -> None:
        """As older versions of Lance left it; those which had no key index put newer rows first."""
        site = Site(tmp_path / "table")
        site.flush(rows(0, 1))
        (entry,) = site.manifest.sstables
        directory = layout.sstable_dir(site.shard_id, entry.path)
        site.store.delete_prefix(directory)
        names = ["old", "old", "new", "new", "only"] if has_sidecars else ["new", "new", "old", "old", "only"]
        content = {"id": [0, 1, 0, 1, 2], "name": names, "_tombstone": [False] * 5}
        schema = pa.schema([*KEYED, TOMBSTONE_FIELD])
        lance.write_dataset(pa.table(content, schema), layout.child_uri(site.store.uri, directory))
        # Nor has the manifest what lancewal noted of the SSTable that was there.
        ShardManifestStore(site.store, site.shard_id).commit_update(
            None, lambda m: replace(m, sstables=(replace(entry, notes=""),))
        )
        if has_sidecars:
            rebuild_sidecars(site.store, site.shard_id, entry, site.base.schema)
        site.compact()
        assert site.plain() == [(0, "new"), (1, "new"), (2, "only")]


class TestFencing:
    """A compactor claimed the shard and fenced the healthy writer."""

    def test_compaction_and_collection_leave_the_epoch_alone(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table")
        writer = site.writer()
        writer.put(rows(0, 3))
        writer.force_seal_active()
        writer.wait_for_flush_drain()
        before = site.manifest
        site.compact()
        # What is compacted is not listed any more; that is all.
        assert site.manifest == replace(before, version=before.version + 1, sstables=())
        site.collect()
        assert site.manifest.writer_epoch == before.writer_epoch
        writer.check_fenced()
        writer.put(rows(1, 1, prefix="new"))
        writer.close()
        assert site.merged() == [(0, "name_0"), (1, "new_1"), (2, "name_2")]


class TestDuplicates:
    """Merging left physical duplicates, and counts were too high."""

    def test_counts_are_exact_after_many_updates_of_the_same_keys(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, 100)]))
        for generation in range(6):
            site.flush(rows(50, 100, prefix=f"g{generation}"))
            if generation % 2:
                site.compact()
        assert site.dataset.count_rows() == 150
        assert site.dataset.to_table().num_rows == 150
        assert site.plain() == [*named(range(50), "name"), *named(range(50, 150), "g5")]

    def test_the_same_generation_is_never_merged_twice(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table")
        site.flush(rows(0, 100))
        plan = plan_compaction(site.store)
        for _ in range(3):
            execute_shard(plan.shards[0], store=site.store)
        assert (site.dataset.count_rows(), site.dataset.version) == (100, 3)


class TestShadows:
    """A compacted SSTable that was still listed lay over newer rows of the base."""

    def test_our_reader_leaves_it_out_while_it_is_listed(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table")
        site.flush(rows(0, 3, prefix="old"))
        site.merge()
        site.dataset.update({"name": "'direct'"}, where="id = 1")
        assert len(site.manifest.sstables) == 1
        assert site.merged() == [(0, "old_0"), (1, "direct"), (2, "old_2")]

    def test_lances_own_reader_sees_the_newer_row_once_it_is_pruned(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table")
        site.flush(rows(0, 3, prefix="old"))
        site.merge()
        site.dataset.update({"name": "'direct'"}, where="id = 1")

        def lance_reads() -> dict[int, str]:
            snapshot = ShardSnapshot(str(site.shard_id)).with_current_generation(
                site.manifest.current_generation
            )
            for entry in site.manifest.sstables:
                snapshot = snapshot.with_sstable(entry.generation, entry.path)
            table = LsmScanner.from_snapshots(site.dataset, [snapshot]).to_table()
            return dict(zip(table["id"].to_pylist(), table["name"].to_pylist(), strict=True))

        assert lance_reads()[1] == "old_1"
        site.collect()
        assert lance_reads() == {0: "old_0", 1: "direct", 2: "old_2"}


class TestLeaks:
    """Directories of merged generations were never deleted."""

    def test_nothing_is_left_after_compaction_and_collection(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table")
        for start in range(0, 50, 10):
            site.flush(rows(start, 15))
            site.compact()
        site.collect()
        left = [info.path.rsplit("/", 2)[-2] for info in site.store.list(layout.shard_dir(site.shard_id))]
        assert sorted(left) == ["manifest", "manifest", "wal"]


class TestFileCompaction:
    """Joining the base table's files tripped over the MemWAL index, which has no columns."""

    @pytest.mark.parametrize("stable", [False, True])
    def test_files_are_joined_beside_it(self, tmp_path: Path, stable: bool) -> None:
        dataset = lance.write_dataset(
            pa.Table.from_batches([rows(0, 100)]), tmp_path / "table", enable_stable_row_ids=stable
        )
        dataset.create_scalar_index("id", "BTREE")
        site = Site.of(lance.dataset(dataset.uri))
        for generation in range(4):
            site.flush(rows(20 * generation, 40, prefix=f"g{generation}"))
            site.compact(optimize_indexes=False, compact_files=False)
        before = site.plain()
        assert len(site.dataset.get_fragments()) > 2
        report = site.compact(optimize_indexes=True, compact_files=True)
        assert report.files_removed > report.files_added
        assert len(site.dataset.get_fragments()) == 1
        assert (site.plain(), site.marker) == (before, 4)
        site.flush(rows(0, 1, prefix="later"))
        site.compact()
        assert dict(site.plain())[0] == "later_0"


def test_a_restored_base_table_is_noticed_before_rows_are_lost(tmp_path: Path) -> None:
    """Going back to a version before a compaction whose generations were collected since."""
    site = Site(tmp_path / "table")
    site.flush(rows(0, 3))
    site.compact()
    site.collect()
    lance.dataset(site.store.uri, version=2).restore()
    assert not site.verify().ok
    site.flush(rows(5, 1))
    with pytest.raises(Exception, match=r"\[1\] are missing"):
        site.compact()


def test_a_shard_made_by_hand_without_rows_needs_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path / "table")
    ShardManifestStore(site.store, site.shard_id).initialize_shard()
    assert not plan_compaction(site.store)
    assert (site.compact().commits, site.collect().collected, site.verify().findings) == (0, [], [])


@pytest.mark.parametrize("after", [False, True], ids=["not stored", "reply lost"])
def test_a_compaction_that_was_done_failed_for_a_lost_reply_to_a_side_note(
    tmp_path: Path, after: bool
) -> None:
    site = Site(tmp_path / "table")
    site.flush(rows(0, 3))
    site.store = store = FaultyStore(site.store)
    store.faults.fail("put", where=layout.COLUMN_HISTORY, times=None, after=after)
    assert site.compact().commits == 1
    assert store.faults.count("put", where=layout.COLUMN_HISTORY) == 1
    assert (site.plain(), site.manifest.sstables) == (named(range(3), "name"), ())


def test_compaction_needs_an_initialised_table(tmp_path: Path) -> None:
    dataset = lance.write_dataset(pa.Table.from_batches([rows(0, 3)]), tmp_path / "table")
    with pytest.raises(NotInitializedError):
        BaseTable.open(dataset)


def test_maintenance_works_on_object_storage(s3_store: ObjectStore) -> None:
    site = Site(s3_store.uri, store=s3_store)
    site.flush(rows(0, 10))
    site.flush(rows(5, 10, prefix="new"), [0])
    site.compact()
    assert site.plain() == [*named(range(1, 5), "name"), *named(range(5, 15), "new")]
    assert site.verify().findings == []
    # By the storage's own clock nothing is old yet, but manifest entries need no age.
    assert site.manifest.sstables == ()
    assert collect_garbage(site.store).counts()["wal_entries"] == 0
    site.collect()
    assert site.verify().findings == []
    assert replace(site.manifest, sstables=()) == site.manifest
