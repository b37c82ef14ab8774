"""A base table that is compacted again and again stays in shape, at a cost that does not grow with it."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance.dataset import MergeInsertBuilder
from lance.query import FullTextOperator, MatchQuery

from bench.distant import distant_store, measured_depth
from lancewal.base import BaseTable
from lancewal.errors import StorageError
from lancewal.maintenance import at_crash_points, compact
from lancewal.maintenance.commits import LostRaceError
from lancewal.maintenance.tidy import File, Tidying
from lancewal.shard import discover_manifests
from tests.maintenance.support import Site, pairs
from tests.tables import rows

PASSES = 40
#: The module; the room's door has a function of that name.
tidy = importlib.import_module("lancewal.maintenance.tidy")


def indexed_site(where: Path, **how: Any) -> Site:
    dataset = lance.write_dataset(pa.Table.from_batches([rows(0, 2000, prefix="base")]), where, **how)
    dataset.create_scalar_index("id", "BTREE")
    dataset.create_scalar_index("name", "INVERTED")
    return Site.of(lance.dataset(where))


def test_after_many_compactions_every_row_is_indexed_and_files_are_few(tmp_path: Path) -> None:
    site = indexed_site(tmp_path / "table")
    for number in range(PASSES):
        site.flush(rows(1990 + 20 * number, 30, prefix=f"p{number}"), [number])
        assert site.compact().indexes_optimized
        manifest = site.base.manifest
        assert manifest.covered_fragments("id_idx") == manifest.fragment_ids
        assert manifest.covered_fragments("name_idx") == manifest.fragment_ids
        # At most three of a size, and as many sizes as the table doubled.
        assert len(manifest.fragment_ids) <= 10
        assert len(manifest.indexes) <= 2 * 10
    assert len(site.plain()) == site.dataset.count_rows() == 1990 + 20 * PASSES + 10 - PASSES
    assert site.merged() == site.plain()
    # Nothing more is due.
    version = site.dataset.version
    site.compact()
    assert site.dataset.version == version


def test_rows_are_rewritten_as_often_as_the_table_doubles() -> None:
    files = [File(0, 100, 0)]
    copied, number = 0, 0
    for _ in range(1000):
        number += 1
        files.append(File(number, 100, 0))
        joined = Tidying.due(files, []).files
        if joined:
            number += 1
            rows_in = sum(file.rows for file in files if file.number in joined)
            files = [*(file for file in files if file.number not in joined), File(number, rows_in, 0)]
            copied += rows_in
        assert len(files) <= 14
    assert copied <= 100 * 1000 * 10


LARGE = 1 << 16


@pytest.mark.parametrize(("deleted", "due"), [(LARGE // 2, frozenset()), (LARGE // 2 + 1, frozenset({0}))])
def test_a_file_is_rewritten_when_most_of_its_rows_are_deleted(deleted: int, due: frozenset[int]) -> None:
    assert Tidying.due([File(0, LARGE, deleted), File(1, 10, 0)], []).files == due


def test_small_files_with_deleted_rows_are_rewritten_together() -> None:
    """Each alone would cost a commit and the remapping of all indexes, to save a read almost nothing."""
    dead = [File(number, 100, 51) for number in range(3)]
    newest = File(9, 10, 0)
    assert Tidying.due([*dead, newest], []).files == frozenset()
    assert Tidying.due([*dead, File(3, 100, 51), newest], []).files == frozenset({0, 1, 2, 3})
    # They also go with a large one, or with files that are joined.
    large = File(3, LARGE, LARGE // 2 + 1)
    assert Tidying.due([*dead[:2], large, newest], []).files == frozenset({0, 1, 3})
    some = [File(number, 10, 0) for number in range(5, 9)]
    assert Tidying.due([dead[0], File(3, 100_000, 0), *some], []).files == frozenset({0, 5, 6, 7, 8})


def test_small_files_with_index_segments_of_their_own_could_not_be_joined(tmp_path: Path) -> None:
    """Lance joins no files that different segments cover: upkeep tried in vain again and again."""
    site = indexed_site(tmp_path / "table")
    for number in range(3):
        site.flush(rows(3000 + 5 * number, 5, prefix=f"p{number}"), [number])
        site.compact()
    manifest = site.base.manifest
    assert (len(manifest.fragment_ids), len(manifest.indexes)) == (4, 8)
    before = site.plain()
    assert site.compact(compact_files=True).files_removed > 0
    manifest = site.base.manifest
    assert (len(manifest.fragment_ids), len(manifest.indexes)) == (1, 2)
    for name in ("id_idx", "name_idx"):
        assert manifest.covered_fragments(name) == manifest.fragment_ids
    assert site.plain() == before


def test_files_that_are_full_are_left_alone() -> None:
    assert not Tidying.due([File(number, 2 << 20, 0) for number in range(8)], [])


def append(site: Site) -> None:
    lance.write_dataset(
        pa.Table.from_batches([rows(9000, 10, prefix="direct")]), site.store.uri, mode="append"
    )


def delete(site: Site) -> None:
    site.dataset.delete("id = 50 or id between 4005 and 4010")


def update(site: Site) -> None:
    site.dataset.update({"name": "'changed'"}, where="id < 20 or id between 3990 and 4002")


def join_all(site: Site) -> None:
    site.dataset.optimize.compact_files()


def index_all(site: Site) -> None:
    site.dataset.optimize.optimize_indices(num_indices_to_merge=10)


def compact_more(site: Site) -> None:
    site.flush(rows(4000, 10, prefix="rival"), [3005])
    site.compact()


def compact_and_collect(site: Site) -> None:
    compact_more(site)
    site.collect()
    # As an owner may do who needs no old versions.
    site.dataset.cleanup_old_versions(timedelta(0), error_if_tagged_old_versions=False)


@pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable row ids"])
@pytest.mark.parametrize("step", ["index_rows", "tidy: files are written"])
@pytest.mark.parametrize(
    "rival", [append, delete, update, join_all, index_all, compact_more, compact_and_collect]
)
def test_whatever_comes_between_two_steps_indexes_find_the_rows_that_there_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rival: Callable[[Site], None],
    step: str,
    stable: bool,
) -> None:
    site = indexed_site(tmp_path / "table", enable_stable_row_ids=stable)
    for number in range(3):
        site.flush(rows(3000 + 20 * number, 30, prefix=f"p{number}"))
        site.compact()
    site.dataset.tags.create("kept", site.dataset.version)
    tagged = pairs(site.dataset.to_table())
    site.flush(rows(4000, 30, prefix="x"), [1, 2])
    came: list[str] = []

    def once(reached: str) -> None:
        if reached == step and not came:
            came.append(step)
            rival(site)

    def interrupted(*args: Any, **how: Any) -> object:
        once("index_rows")
        return original(*args, **how)

    original = tidy.index_rows
    monkeypatch.setattr(tidy, "index_rows", interrupted)
    at_crash_points(once)
    try:
        site.compact()
    finally:
        at_crash_points(None)
    assert came
    for _ in range(2):
        dataset = site.dataset
        there = pairs(dataset.to_table())
        ids = [each for each, _ in there]
        assert site.merged() == there
        assert len(set(ids)) == len(ids)
        by_index = dataset.scanner(filter=f"id in ({', '.join(map(str, ids))})", use_scalar_index=True)
        assert pairs(by_index.to_table()) == there
        words = {"x_4001", "p1_3021", "base_100", "rival_4001", "changed", "direct_9001"}
        for word in words:
            found = dataset.to_table(full_text_query=MatchQuery(word, "name", operator=FullTextOperator.AND))
            assert {name for _, name in pairs(found) if name == word} == {n for _, n in there if n == word}
        site.compact()
    assert pairs(lance.dataset(site.store.uri, version="kept").to_table()) == tagged


def test_rows_that_were_replaced_came_back_if_the_versions_since_were_cleaned_up(tmp_path: Path) -> None:
    """Lance compares a commit with the versions that are still there, and found no conflict."""
    site = indexed_site(tmp_path / "table")
    for number in range(4):
        site.flush(rows(3000 + 20 * number, 20, prefix=f"p{number}"))
        site.compact(compact_files=False)
    stopped = site.dataset
    others = [each.fragment_id for each in stopped.get_fragments()][:1]
    site.flush(rows(3000, 5, prefix="new"), [3020])
    site.compact(compact_files=False)
    site.dataset.cleanup_old_versions(timedelta(0))
    expected = site.plain()

    with pytest.raises(LostRaceError, match="cleaned up"):
        tidy.join_files(site.store, stopped, excluded_fragment_ids=others)
    assert site.plain() == site.merged() == expected
    removed, _ = tidy.join_files(site.store, site.dataset, excluded_fragment_ids=others)
    assert removed >= 4
    assert site.plain() == site.merged() == expected


def test_an_index_that_cannot_be_brought_up_to_date_fails_no_compaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = indexed_site(tmp_path / "table")
    site.flush(rows(0, 5, prefix="new"))

    def fail(*args: object, **how: object) -> None:
        raise StorageError("no space")

    monkeypatch.setattr(tidy, "index_rows", fail)
    report = site.compact()
    assert (report.indexes_optimized, report.rows_upserted, site.marker) == (False, 5, 1)
    monkeypatch.undo()
    assert site.compact().indexes_optimized


def test_an_index_that_fails_for_ever_kept_the_others_from_new_rows_and_files_from_being_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = indexed_site(tmp_path / "table")
    index_rows = tidy.index_rows

    def fail(dataset: lance.LanceDataset, *, index_names: list[str], **how: object) -> None:
        if "name_idx" in index_names:
            raise StorageError("this index cannot be brought up to date")
        index_rows(dataset, index_names=index_names, **how)

    monkeypatch.setattr(tidy, "index_rows", fail)
    for number in range(8):
        site.flush(rows(3000 + 5 * number, 5, prefix=f"p{number}"))
        assert not site.compact().indexes_optimized
    manifest = site.base.manifest
    assert len(manifest.fragment_ids) <= 5
    assert manifest.covered_fragments("id_idx") == manifest.fragment_ids


def test_an_index_that_lance_cannot_update_kept_the_others_from_new_rows_and_files_from_being_joined(
    tmp_path: Path,
) -> None:
    """Lance's own error for it looks like that of a commit whose reply was lost."""
    schema = pa.schema([*rows(0, 1).schema, pa.field("vector", pa.list_(pa.float32(), 2))])
    dataset = lance.write_dataset(schema.empty_table(), tmp_path / "table")
    dataset.create_scalar_index("name", "BTREE")
    dataset.create_index("vector", "IVF_RQ", num_partitions=1)  # which takes multiples of 8 dimensions
    site = Site.of(lance.dataset(tmp_path / "table"))
    for number in range(3):
        vectors = pa.array([[1.0, 2.0]] * 5, schema.field("vector").type)
        site.flush(pa.Table.from_batches([rows(5 * number, 5)]).append_column("vector", vectors))
        assert not site.compact().indexes_optimized
    manifest = site.base.manifest
    assert manifest.covered_fragments("name_idx") == manifest.fragment_ids
    assert len(manifest.fragment_ids) == 3
    report = site.compact(compact_files=True)
    assert (report.indexes_optimized, report.files_removed) == (False, 3)
    manifest = site.base.manifest
    assert manifest.covered_fragments("name_idx") == manifest.fragment_ids


def test_a_compaction_failed_after_its_commit_because_files_could_not_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = indexed_site(tmp_path / "table")
    site.flush(rows(0, 5, prefix="new"))

    def fail(*args: object) -> None:
        raise StorageError("slow down")

    monkeypatch.setattr(tidy, "fragments_of", fail)
    report = site.compact()
    assert (report.indexes_optimized, report.rows_upserted, site.marker) == (False, 5, 1)


def test_far_away_a_compaction_leaves_the_same_table(tmp_path: Path) -> None:
    """There it does side by side what it does in order near by, and looks for no version that it made."""
    site = indexed_site(tmp_path / "near")
    for number in range(6):
        site.flush(rows(1990 + 20 * number, 30, prefix=f"p{number}"), [number])
    store, _ = distant_store(shutil.copytree(tmp_path / "near", tmp_path / "far"))
    with measured_depth() as depth:
        report = compact(store)
        # Without what Lance asks for: the merge, and bringing indexes up to date.
        assert depth() <= 14
    near, there = site.compact(), BaseTable.open(store.uri, store=store)
    assert (report.base_version, report.commits) == (near.base_version, 1)
    assert report.indexes_optimized
    assert report.rows_inserted == near.rows_inserted
    assert there.version == site.dataset.version
    for name in ("id_idx", "name_idx"):
        assert there.manifest.covered_fragments(name) == there.manifest.fragment_ids
    assert pairs(there.dataset.to_table()) == site.plain()
    (far_away,) = discover_manifests(store)
    assert [e.generation for e in far_away.sstables] == [e.generation for e in site.manifest.sstables]


def test_indexes_follow_the_rows_of_a_compaction_that_lost_a_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handle of the first attempt stays behind; what is tidied is the newest version."""
    site = indexed_site(tmp_path / "table")
    site.flush(rows(1990, 30))
    real = MergeInsertBuilder.execute
    lost: list[str] = []

    def loses_once(builder: MergeInsertBuilder, rows: Any, **how: Any) -> Any:
        if not lost:
            lost.append("Too many concurrent writers")
            raise RuntimeError(lost[0])
        return real(builder, rows, **how)

    monkeypatch.setattr(MergeInsertBuilder, "execute", loses_once)
    report = site.compact()
    assert (report.retries, report.commits, report.indexes_optimized) == (1, 1, True)
    manifest = site.base.manifest
    assert manifest.covered_fragments("id_idx") == manifest.fragment_ids
