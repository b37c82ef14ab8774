"""Markers count for the generations that they are about: in copies, and in tables that were made anew."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from uuid import UUID

import lance
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lance.mem_wal import LsmScanner, ShardSnapshot

import lancewal
from lancewal.base.markers import stored_markers, tag
from lancewal.base.table import BaseTable, read_manifest
from lancewal.errors import CorruptManifestError, DifferentHistoryError, LanceWalError, PartialWriteError
from lancewal.maintenance import Kind, Severity
from lancewal.publish.publishing import publish
from lancewal.publish.staging import Stager
from lancewal.shard.manifest import ShardManifestStore
from lancewal.sstable.lineage import copy_of, lift
from lancewal.storage import ObjectStore, layout
from tests.faults import ANY, FaultyStore
from tests.maintenance.support import Site, named
from tests.tables import APPEND_ONLY, KEYED, new_table, open_writer, rows

Copier = Callable[[lance.LanceDataset, Path], lance.LanceDataset]

COPIERS: dict[str, Copier] = {
    "branch": lambda dataset, where: dataset.create_branch(where.name),
    "shallow clone": lambda dataset, where: dataset.shallow_clone(where, dataset.version),
    "deep clone": lambda dataset, where: dataset.deep_clone(where, dataset.version),
}


class Copied(Site):
    """A copy of a table whose one shard was compacted up to generation 3; the copy has no shard yet."""

    def __init__(
        self, where: Path, copy: Copier = COPIERS["shallow clone"], schema: pa.Schema = KEYED
    ) -> None:
        source = Site(where / "source", schema)
        for generation in range(3):
            source.flush(rows(generation, 1, schema=schema, prefix="source"))
        source.compact()
        self.store = ObjectStore.from_uri(copy(source.dataset, where / "copy").uri, fsync=False)
        self.shard_id = source.shard_id

    def flush_by_lance(self, start: int, prefix: str, *, close: bool = True) -> None:
        """One generation by Lance's own writer, which begins with generation 1 in a copy."""
        writer = self.dataset.mem_wal_writer(str(self.shard_id), durable_write=True)
        writer.put(rows(start, 2, prefix=prefix))
        if close:
            writer.close()

    @property
    def generations(self) -> list[int]:
        return [entry.generation for entry in self.manifest.sstables]


SOURCE = named(range(3), "source")


@pytest.fixture(params=COPIERS)
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Copied:
    return Copied(tmp_path, COPIERS[request.param])


def lance_reads(site: Site) -> list[tuple[int, str]]:
    """What Lance's own reader gives of the base and all SSTables that are listed."""
    manifest = site.manifest
    snapshot = ShardSnapshot(str(site.shard_id)).with_current_generation(manifest.current_generation)
    for entry in manifest.sstables:
        snapshot = snapshot.with_sstable(entry.generation, entry.path)
    table = LsmScanner.from_snapshots(site.dataset, [snapshot]).to_table()
    return sorted(zip(table["id"].to_pylist(), table["name"].to_pylist(), strict=True))


class TestCopies:
    def test_acknowledged_rows_of_a_copy_are_neither_invisible_nor_skipped_nor_collected(
        self, copied: Copied
    ) -> None:
        expected = dict(SOURCE)
        assert copied.verify().findings == []
        for generation in range(4):
            writer = copied.writer()
            writer.put(rows(generation, 2, prefix=f"copy{generation}"))
            expected.update(named([generation, generation + 1], f"copy{generation}"))
            assert copied.merged() == sorted(expected.items())
            writer.close()
            assert copied.merged() == lance_reads(copied) == sorted(expected.items())
        assert copied.generations == [4, 5, 6, 7]
        copied.collect()
        assert copied.merged() == sorted(expected.items())
        assert copied.compact().generations == 4
        copied.collect()
        assert copied.plain() == copied.merged() == sorted(expected.items())
        assert copied.verify().findings == []

    def test_rows_that_lance_wrote_to_a_copy_are_read_kept_and_compacted_after_a_flush(
        self, copied: Copied
    ) -> None:
        expected = dict(SOURCE)
        for generation in range(5):
            copied.flush_by_lance(generation, f"copy{generation}")
            expected.update(named([generation, generation + 1], f"copy{generation}"))
            assert copied.merged() == sorted(expected.items())
            with pytest.raises(DifferentHistoryError, match=r"table\.flush\(\)"):
                copied.compact()
            copied.collect()
            assert copied.generations == list(range(1, generation + 2))
            assert copied.merged() == sorted(expected.items())
        assert [f.kind for f in copied.verify().findings] == [Kind.COPIED_MARKER]
        lancewal.open(copied.store.uri).flush()
        assert copied.generations == [4, 5, 6, 7, 8]
        assert copied.merged() == lance_reads(copied) == sorted(expected.items())
        copied.flush_by_lance(0, "after")
        expected.update(named([0, 1], "after"))
        assert copied.generations == [4, 5, 6, 7, 8, 9]
        assert copied.compact().generations == 6
        assert copied.plain() == copied.merged() == sorted(expected.items())

    def test_a_deletion_keeps_its_grace_period_although_the_names_have_lower_numbers(
        self, tmp_path: Path
    ) -> None:
        site = Copied(tmp_path)
        site.flush_by_lance(10, "copy")
        lancewal.open(site.store.uri).flush()
        (entry,) = site.manifest.sstables
        assert (entry.generation, layout.parse_sstable_name(entry.path)) == (4, 1)
        site.compact()
        site.collect(now=None)
        assert site.store.list(layout.sstable_dir(site.shard_id, entry.path))
        site.collect()
        assert not site.store.list(layout.sstable_dir(site.shard_id, entry.path))

    def test_repair_numbers_the_generations_of_a_copy_anew(self, tmp_path: Path) -> None:
        site = Copied(tmp_path)
        site.flush_by_lance(10, "copy")
        table = lancewal.open(site.store.uri)
        (finding,) = table.verify().findings
        assert (finding.kind, finding.severity, finding.repairable) == (
            Kind.COPIED_MARKER,
            Severity.WARNING,
            True,
        )
        assert table.repair([finding]).repaired == [finding]
        assert (site.generations, table.verify().findings) == ([4], [])

    def test_every_maker_of_a_shard_starts_above_the_marker(self, tmp_path: Path) -> None:
        table = lancewal.initialize(new_plain(tmp_path / "source"), unsharded=True)
        with table.writer() as writer:
            writer.put(rows(0, 3))
        table.compact()
        makers: list[Callable[[lancewal.Table], object]] = [
            lambda t: t.shard_for(),
            lambda t: t.writer().__enter__().put(rows(9, 1)),
            lambda t: ShardManifestStore(t._store, shard_of(t)).claim_epoch(1),
            _publish,
        ]
        for number, make in enumerate(makers):
            dataset = lance.dataset(table.uri)
            copy = lancewal.open(dataset.shallow_clone(tmp_path / f"copy{number}", dataset.version).uri)
            make(copy)
            (shard,) = copy.shards()
            assert min([*shard.generations, shard.current_generation]) == 2, number

    def test_a_copied_tag_counts_as_well(self, tmp_path: Path) -> None:
        """Without a key the rows come one commit before the marker, with a tag."""
        source = Site(tmp_path / "source", APPEND_ONLY)
        source.flush(rows(0, 3, schema=APPEND_ONLY))
        source.dataset.update_field_metadata({"id": {tag(source.shard_id, 1): ""}})
        assert stored_markers(source.store) == {source.shard_id: 1}
        uri = source.dataset.shallow_clone(tmp_path / "copy", source.dataset.version).uri
        manifests = ShardManifestStore(ObjectStore.from_uri(uri), source.shard_id)
        assert manifests.initialize_shard().current_generation == 2

    def test_shards_that_were_copied_by_hand_go_with_their_markers(self, tmp_path: Path) -> None:
        source = Site(tmp_path / "source", data=pa.Table.from_batches([rows(0, 1, prefix="base")]))
        source.flush(rows(0, 3, prefix="old"))
        source.merge()
        source.dataset.update({"name": "'direct'"}, where="id = 1")
        dataset = source.dataset
        uri = dataset.deep_clone(tmp_path / "copy", dataset.version).uri
        shutil.copytree(Path(source.store.uri) / "_mem_wal", Path(uri) / "_mem_wal")
        copy = lancewal.open(uri)
        assert copy.lookup(1) == {"id": 1, "name": "direct"}
        assert copy.verify().ok

    def test_a_shard_that_was_brought_back_from_a_backup_is_told_by_a_typed_error(
        self, tmp_path: Path
    ) -> None:
        site = Site(tmp_path / "table")
        site.flush(rows(0, 1))
        shard = Path(site.store.uri) / layout.shard_dir(site.shard_id)
        shutil.copytree(shard, tmp_path / "backup")
        site.flush(rows(1, 1))
        site.compact()
        shutil.rmtree(shard)
        shutil.copytree(tmp_path / "backup", shard)
        for attempt in (site.merged, site.writer):
            with pytest.raises(DifferentHistoryError, match="back to the newest state"):
                attempt()
        assert [f.kind for f in site.verify().findings] == [Kind.MARKER_ABOVE_MANIFEST]

    def test_a_table_that_is_no_copy_is_none(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table")
        site.flush(rows(0, 1))
        site.compact()
        site.dataset.cleanup_old_versions(timedelta(0), delete_unverified=True)
        assert copy_of(site.store) is None


def new_plain(where: Path) -> str:
    lance.write_dataset(KEYED.empty_table(), where)
    return str(where)


def shard_of(table: lancewal.Table) -> UUID:
    return table.router().shard_of(None)


def _publish(table: lancewal.Table) -> None:
    base = BaseTable.open(table.uri)
    stager = Stager(base, table._store, table.router())
    batch = rows(9, 1)
    stored = pa.RecordBatch.from_arrays([*batch.columns, pa.array([False])], schema=base.schema.stored)
    stager.add(stored)
    publish(base, table._store, stager.finish())


UNLIFTED = [*SOURCE, (10, "one_10"), (11, "two_11"), (12, "three_12"), (13, "three_13")]


class TestLifting:
    """Numbering generations anew under a writer that may die at every call to storage."""

    @pytest.fixture
    def site(self, tmp_path: Path) -> Copied:
        """Two flushed generations of Lance's writer below the marker, and rows in the log alone."""
        site = Copied(tmp_path)
        site.flush_by_lance(10, "one")
        site.flush_by_lance(11, "two")
        site.flush_by_lance(12, "three", close=False)
        return site

    def test_no_row_is_lost_whichever_call_to_storage_fails(self, site: Copied, tmp_path: Path) -> None:
        assert (site.merged(), site.generations) == (UNLIFTED, [1, 2])
        faulted = 0
        for kind, after in ((ANY, False), ("put_if_absent", True)):
            for nth in count(1):
                table = tmp_path / f"{kind.strip('*')}{nth}"
                shutil.copytree(site.store.uri, table)
                broken = FaultyStore(ObjectStore.from_uri(str(table), fsync=False))
                broken.faults.fail(kind, nth=nth, times=None, after=after)
                try:
                    open_writer(BaseTable.open(str(table)), site.shard_id, store=broken)
                    through = True
                except LanceWalError:
                    through = False
                    faulted += 1
                # Elsewhere: what was opened through the broken store is kept by its address.
                table = table.rename(f"{table}-healed")
                again = Copied.__new__(Copied)
                again.store, again.shard_id = ObjectStore.from_uri(str(table), fsync=False), site.shard_id
                assert again.merged() == UNLIFTED
                writer = again.writer()
                assert again.generations == [4, 5, 6]
                assert again.merged() == UNLIFTED
                writer.put(rows(12, 1, prefix="new"))
                writer.close()
                expected = sorted({**dict(UNLIFTED), 12: "new_12"}.items())
                assert again.merged() == lance_reads(again) == expected
                shutil.rmtree(table)
                if through:
                    break
        assert faulted > 10

    def test_it_is_done_once(self, site: Copied) -> None:
        writer = site.writer()
        before = site.manifest
        assert lift(ShardManifestStore(site.store, site.shard_id), writer.epoch, 3) == before
        writer.close()

    @settings(max_examples=10)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["lance", "lance, left open", "ours", "compact", "collect"]),
                st.integers(0, 5),
            ),
            min_size=2,
            max_size=7,
        )
    )
    def test_any_history_of_a_copy_reads_right(
        self, tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int]]
    ) -> None:
        site = Copied(tmp_path_factory.mktemp("any"))
        model = dict(SOURCE)
        for step, (what, start) in enumerate(history):
            if what.startswith("lance"):
                site.flush_by_lance(start, f"v{step}", close=what == "lance")
                model.update(named([start, start + 1], f"v{step}"))
            elif what == "ours":
                site.flush(rows(start, 2, prefix=f"v{step}"))
                model.update(named([start, start + 1], f"v{step}"))
            elif what == "collect":
                site.collect()
            elif layout.parse_shard_dir(str(site.shard_id)) in lancewal_shards(site):
                try:
                    site.compact()
                except DifferentHistoryError:
                    assert min(site.generations, default=1) <= 3
            assert site.merged() == sorted(model.items())
        lancewal.open(site.store.uri).flush()
        site.compact()
        assert site.plain() == site.merged() == sorted(model.items())


def lancewal_shards(site: Site) -> list[UUID]:
    return [shard.shard_id for shard in lancewal.open(site.store.uri).shards()]


def drop_index(site: Site) -> None:
    site.dataset.drop_index("__lance_mem_wal")


def write_directly(site: Site) -> None:
    drop_index(site)
    merge = site.dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    merge.execute(pa.Table.from_batches([rows(0, 1, prefix="direct")]))


def overwrite(site: Site) -> None:
    lance.write_dataset(pa.Table.from_batches([rows(7, 1, prefix="fresh")]), site.store.uri, mode="overwrite")


@pytest.mark.parametrize("by_lance", [False, True], ids=["ours", "lance"])
@pytest.mark.parametrize("listed", [False, True], ids=["pruned", "listed"])
class TestMadeAnew:
    """The MemWAL index is dropped and made again, which takes the markers away."""

    def _site(self, where: Path, by_lance: bool, listed: bool, pending: int = 0) -> Site:
        """Two generations are in the base, listed or not, and some are not."""
        site = Site(where / "table")
        self._by_lance = by_lance
        self._flush(site, rows(0, 2, prefix="one"))
        self._flush(site, rows(1, 2, prefix="two"))
        site.merge() if listed else site.compact()
        assert bool(site.manifest.sstables) is listed
        for generation in range(pending):
            self._flush(site, rows(0, 1, prefix=f"pending{generation}"))
        return site

    def _flush(self, site: Site, batch: pa.RecordBatch) -> None:
        if not self._by_lance:
            site.flush(batch)
            return
        with site.dataset.mem_wal_writer(str(site.shard_id), durable_write=True) as writer:
            writer.put(batch)

    def _go_on(self, site: Site, expected: list[tuple[int, str]]) -> None:
        """The table is as any other: written, compacted, collected."""
        self._flush(site, rows(50, 1, prefix="new"))
        expected = sorted([*expected, (50, "new_50")])
        assert site.merged() == expected
        site.compact()
        assert site.plain() == site.merged() == expected
        site.collect()
        assert site.merged() == expected
        assert site.verify().ok

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            (drop_index, [(0, "one_0"), (1, "two_1"), (2, "two_2")]),
            (write_directly, [(0, "direct_0"), (1, "two_1"), (2, "two_2")]),
            (overwrite, [(7, "fresh_7")]),
        ],
        ids=["dropped", "dropped and written", "overwritten"],
    )
    def test_what_was_compacted_before_does_not_shadow_newer_rows_nor_come_back(
        self,
        tmp_path: Path,
        by_lance: bool,
        listed: bool,
        change: Callable[[Site], None],
        expected: list[tuple[int, str]],
    ) -> None:
        site = self._site(tmp_path, by_lance, listed)
        change(site)
        site.dataset.initialize_mem_wal(unsharded=True)
        assert site.merged() == expected
        assert site.compact().generations == 0
        self._go_on(site, expected)

    def test_rows_that_nobody_compacted_stay_where_the_base_is_the_same(
        self, tmp_path: Path, by_lance: bool, listed: bool
    ) -> None:
        site = self._site(tmp_path, by_lance, listed, pending=2)
        before = site.merged()
        drop_index(site)
        site.dataset.initialize_mem_wal(unsharded=True)
        assert site.merged() == before
        self._go_on(site, before)

    @pytest.mark.parametrize(
        ("change", "kept", "dropped"),
        [
            (write_directly, "pending1_0", [(0, "direct_0"), (1, "two_1"), (2, "two_2")]),
            (overwrite, "pending1_0", [(7, "fresh_7")]),
        ],
        ids=["written", "overwritten"],
    )
    @pytest.mark.parametrize("decision", ["keep", "drop"])
    def test_rows_that_may_be_older_than_the_base_are_refused_until_somebody_decides(
        self,
        tmp_path: Path,
        by_lance: bool,
        listed: bool,
        change: Callable[[Site], None],
        kept: str,
        dropped: list[tuple[int, str]],
        decision: str,
    ) -> None:
        site = self._site(tmp_path, by_lance, listed, pending=2)
        change(site)
        site.dataset.initialize_mem_wal(unsharded=True)
        for attempt in (site.merged, site.compact, site.writer):
            with pytest.raises(DifferentHistoryError, match=r"generations 3 to 4 .*repair\(earlier='keep'\)"):
                attempt()
        site.collect()
        report = site.verify()
        assert [f.kind for f in report.findings if f.severity is Severity.ERROR] == [Kind.EARLIER_TABLE]
        table = lancewal.open(site.store.uri)
        assert [f.kind for f in table.repair().left if f.severity is Severity.ERROR] == [Kind.EARLIER_TABLE]
        assert [f.kind for f in table.repair(earlier=decision).repaired] == [Kind.EARLIER_TABLE]
        expected = sorted({**dict(dropped), 0: kept}.items()) if decision == "keep" else dropped
        assert site.merged() == expected
        self._go_on(site, expected)


class TestRowsInTheLog:
    def _site(self, tmp_path: Path) -> Site:
        site = Site(tmp_path / "table")
        writer = site.writer(enable_memtable=False)
        writer.put(rows(0, 3, prefix="old"))
        writer.close()
        assert len(site.merged()) == 3
        return site

    def test_rows_of_an_overwritten_table_do_not_come_back_from_the_log(self, tmp_path: Path) -> None:
        site = self._site(tmp_path)
        overwrite(site)
        site.dataset.initialize_mem_wal(unsharded=True)
        for attempt in (site.merged, site.writer):
            with pytest.raises(DifferentHistoryError, match="write-ahead log"):
                attempt()
        table = lancewal.open(site.store.uri)
        assert [f.kind for f in table.repair(earlier="drop").repaired] == [Kind.EARLIER_TABLE]
        assert site.merged() == [(7, "fresh_7")]
        site.flush(rows(8, 1))
        assert site.compact().generations == 1
        assert site.plain() == [(7, "fresh_7"), (8, "name_8")]

    def test_they_stay_where_the_base_is_the_same(self, tmp_path: Path) -> None:
        site = self._site(tmp_path)
        drop_index(site)
        site.dataset.initialize_mem_wal(unsharded=True)
        assert site.merged() == named(range(3), "old")
        site.flush(rows(8, 1))
        assert site.merged() == [*named(range(3), "old"), (8, "name_8")]


def test_a_shard_that_was_deleted_and_made_again_by_lance_is_not_taken_for_the_old_one(
    tmp_path: Path,
) -> None:
    """Its generations have the numbers of those that the earlier table held."""
    site = Site(tmp_path / "table")
    for start in range(3):
        site.flush(rows(start, 1, prefix="old"))
    site.compact()
    drop_index(site)
    site.store.delete_prefix(layout.MEM_WAL_DIR)
    site.dataset.initialize_mem_wal(unsharded=True)
    with site.dataset.mem_wal_writer(str(site.shard_id), durable_write=True) as writer:
        writer.put(rows(1, 1, prefix="new"))
    assert site.merged() == [(0, "old_0"), (1, "new_1"), (2, "old_2")]
    site.compact()
    assert site.plain() == [(0, "old_0"), (1, "new_1"), (2, "old_2")]


def test_a_record_of_an_earlier_release_says_nothing_about_the_index(tmp_path: Path) -> None:
    """It has no entry for the MemWAL index, which does not mean that the index came later."""
    site = Site(tmp_path / "table")
    site.flush(rows(0, 1))
    version = site.dataset.version
    columns = sorted((number, 1) for number in read_manifest(site.store, version).fields)
    site.store.put(
        layout.COLUMN_HISTORY,
        f'{{"first": 1, "version": {version}, "since": {columns}}}'.replace("(", "[")
        .replace(")", "]")
        .encode(),
    )
    site.dataset.update({"name": "'x'"}, where="id = 99")
    assert site.base.initialized_since(version)
    assert site.merged() == named([0], "name")


def test_a_generation_that_is_missing_is_no_earlier_table(tmp_path: Path) -> None:
    site = Site(tmp_path / "table")
    site.flush(rows(0, 1))
    site.compact()
    lance.dataset(site.store.uri, version=2).restore()
    site.flush(rows(1, 1))
    with pytest.raises(CorruptManifestError, match=r"\[1\] are missing"):
        site.compact()


def test_a_writer_of_many_shards_names_the_shard_that_is_refused(tmp_path: Path) -> None:
    new_table(tmp_path / "table", bucket_column="id", num_buckets=2)
    table = lancewal.open(str(tmp_path / "table"))
    with table.writer() as writer:
        writer.put(rows(0, 10))
    lance.write_dataset(KEYED.empty_table(), table.uri, mode="overwrite")
    lance.dataset(table.uri).initialize_mem_wal(bucket_column="id", num_buckets=2)
    with pytest.raises(PartialWriteError, match="made anew"), table.writer() as writer:
        writer.put(rows(0, 10))


def test_a_table_whose_oldest_version_moved_the_rows_of_an_index_was_neither_read_nor_collected(
    tmp_path: Path,
) -> None:
    """pylance cannot say what made such a version, and upkeep removes those before it."""
    site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, 3)]))
    site.dataset.create_scalar_index("name", "BTREE")
    site.dataset.delete("id = 0")
    site.dataset.optimize.compact_files()
    oldest = site.dataset.version
    site.dataset.cleanup_old_versions(timedelta(0))
    assert [version["version"] for version in site.dataset.versions()] == [oldest]
    site.flush(rows(3, 1))
    site.merge()
    assert copy_of(site.store) is None
    assert site.merged() == named([1, 2, 3], "name")
    site.collect()
    assert site.verify().findings == []
