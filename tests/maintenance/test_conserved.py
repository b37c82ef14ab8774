"""A row that is lost or doubled on its way, at any stage, is noticed by verification."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lance
import pyarrow as pa
import pytest

import lancewal.maintenance.append_only as append_only
from lancewal.errors import PartialWriteError
from lancewal.format import SsTableEntry, encode_manifest
from lancewal.maintenance import Kind, Severity
from lancewal.shard import ShardManifestStore
from lancewal.sstable import SsTable, write_sstable
from lancewal.storage import layout
from tests.maintenance.support import Site
from tests.tables import APPEND_ONLY, KEYED, abandon, open_writer, rows

Change = Callable[[pa.Table], pa.Table]


def without_one(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table.slice(0, 2), table.slice(3)])


def with_one_twice(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table, table.slice(2, 1)])


def with_names_swapped(table: pa.Table) -> pa.Table:
    """The same keys and the same names, of which two belong to each other's row."""
    names = table.column("name").take(pa.array([1, 0, *range(2, table.num_rows)]))
    return table.set_column(table.schema.get_field_index("name"), table.schema.field("name"), names)


CHANGES = [without_one, with_one_twice, with_names_swapped]


def changed_rows(site: Site) -> list[tuple[Severity, int | None]]:
    found = site.verify().findings
    return [(each.severity, each.generation) for each in found if each.kind is Kind.ROWS_CHANGED]


def rewrite_rows(site: Site, entry: SsTableEntry, change: Change) -> None:
    """Replace the rows of an SSTable, and leave its sidecars and its notes as they are."""
    uri = layout.child_uri(site.store.uri, layout.sstable_dir(site.shard_id, entry.path))
    table = lance.dataset(uri).to_table()
    for part in ("data", "_versions", "_transactions"):
        shutil.rmtree(f"{uri}/{part}", ignore_errors=True)
    lance.write_dataset(change(table), uri, mode="create")
    SsTable.open(site.store, site.shard_id, entry).forget()


@pytest.mark.parametrize("schema", [KEYED, APPEND_ONLY], ids=["keyed", "append-only"])
class TestSumsOfRows:
    def test_a_healthy_table_has_its_sums_at_every_stage(self, schema: pa.Schema, tmp_path: Path) -> None:
        site = Site(tmp_path / "table", schema)
        site.flush(rows(0, 9, schema=schema), rows(5, 9, schema=schema), *([[7]] if schema is KEYED else []))
        site.flush(rows(3, 9, schema=schema))
        site.compact()
        site.flush(rows(4, 9, schema=schema))
        report = site.verify()
        assert not report.findings
        assert report.checked["flushes"] == 3
        assert report.checked["sums"] == 1

    @pytest.mark.parametrize("change", CHANGES)
    def test_in_an_sstable(self, change: Change, schema: pa.Schema, tmp_path: Path) -> None:
        site = Site(tmp_path / "table", schema)
        site.flush(rows(0, 9, schema=schema))
        rewrite_rows(site, site.manifest.sstables[0], change)
        assert changed_rows(site) == [(Severity.ERROR, 1)]

    @pytest.mark.parametrize("change", CHANGES)
    def test_by_a_flush(self, change: Change, schema: pa.Schema, tmp_path: Path) -> None:
        """The SSTable and its notes agree, but the log has other rows."""
        site = Site(tmp_path / "table", schema)
        site.flush(rows(0, 9, schema=schema))
        (entry,) = site.manifest.sstables
        base = site.base
        uri = layout.child_uri(site.store.uri, layout.sstable_dir(site.shard_id, entry.path))
        kept = change(lance.dataset(uri).to_table())
        made = write_sstable(
            store=site.store,
            shard_id=site.shard_id,
            generation=1,
            schema=base.schema,
            batches=[
                pa.RecordBatch.from_arrays(b.columns, schema=base.schema.stored) for b in kept.to_batches()
            ],
            storage_version=base.storage_version,
        )
        manifest = replace(site.manifest, sstables=(made,))
        path = layout.manifest_file(site.shard_id, manifest.version)
        site.store.put(path, encode_manifest(manifest))
        doubled_key = change is with_one_twice and schema is KEYED  # the flush keeps one of them
        assert changed_rows(site) == ([] if doubled_key else [(Severity.ERROR, 1)])

    @pytest.mark.parametrize("change", [without_one, with_one_twice])
    def test_compaction_takes_no_sstable_with_another_number_of_rows(
        self, change: Change, schema: pa.Schema, tmp_path: Path
    ) -> None:
        site = Site(tmp_path / "table", schema)
        site.flush(rows(0, 9, schema=schema))
        rewrite_rows(site, site.manifest.sstables[0], change)
        if change is with_one_twice and schema is KEYED:
            site.compact()
            assert len(site.plain()) == 9
            return
        with pytest.raises(PartialWriteError, match="the flush wrote 9"):
            site.compact()
        assert site.plain() == []


def test_replayed_rows_are_compared_with_the_log(tmp_path: Path) -> None:
    site = Site(tmp_path / "table")
    writer = open_writer(site.base, site.shard_id, store=site.store)
    writer.put(rows(0, 5))
    abandon(writer)
    site.flush(rows(3, 5))
    report = site.verify()
    assert not [each for each in report.findings if each.kind is Kind.ROWS_CHANGED]
    assert report.checked["flushes"] == 1


def test_rows_that_the_base_table_lost_after_their_compaction(tmp_path: Path) -> None:
    site = Site(tmp_path / "table")
    site.flush(rows(0, 9), [4])
    site.compact()
    assert changed_rows(site) == []
    site.dataset.delete("id = 3")
    assert changed_rows(site) == [(Severity.WARNING, None)]


@pytest.mark.parametrize("change", CHANGES)
def test_rows_that_an_append_to_the_base_table_lost_or_doubled(
    change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path / "table", APPEND_ONLY)
    site.flush(rows(0, 9, schema=APPEND_ONLY))
    write = append_only.write_fragments

    def wrong(reader: pa.RecordBatchReader, *where: object, **how: object) -> object:
        return write(change(reader.read_all()), *where, **how)

    monkeypatch.setattr(append_only, "write_fragments", wrong)
    site.compact()
    assert changed_rows(site) == [(Severity.ERROR, None)]


def test_later_changes_of_the_base_table_are_not_held_against_an_append(tmp_path: Path) -> None:
    site = Site(tmp_path / "table", APPEND_ONLY)
    site.flush(rows(0, 9, schema=APPEND_ONLY))
    site.compact()
    site.dataset.delete("id < 5")
    lance.write_dataset(
        pa.Table.from_batches([rows(0, 3, schema=APPEND_ONLY)]), site.store.uri, mode="append"
    )
    assert changed_rows(site) == []


def test_a_writer_without_sums_notes_none(tmp_path: Path) -> None:
    site = Site(tmp_path / "table")
    writer = site.writer(row_sums=False)
    writer.put(rows(0, 5))
    writer.close()
    (entry,) = ShardManifestStore(site.store, site.shard_id).require_latest().sstables
    assert SsTable.open(site.store, site.shard_id, entry).noted_rows is None
    site.compact()
    assert not site.verify().findings
