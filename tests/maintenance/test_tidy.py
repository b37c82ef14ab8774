"""A base table that is compacted again and again stays in shape, at a cost that does not grow with it."""

from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa
import pytest

from lancewal.errors import StorageError
from lancewal.maintenance import tidy
from lancewal.maintenance.tidy import File, Tidying
from tests.maintenance.support import Site
from tests.tables import rows

PASSES = 40


def indexed_site(where: Path) -> Site:
    dataset = lance.write_dataset(pa.Table.from_batches([rows(0, 2000, prefix="base")]), where)
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


@pytest.mark.parametrize(("deleted", "due"), [(50, frozenset()), (51, frozenset({0}))])
def test_a_file_is_rewritten_when_most_of_its_rows_are_deleted(deleted: int, due: frozenset[int]) -> None:
    assert Tidying.due([File(0, 100, deleted), File(1, 10, 0)], []).files == due


def test_files_that_are_full_are_left_alone() -> None:
    assert not Tidying.due([File(number, 2 << 20, 0) for number in range(8)], [])


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
