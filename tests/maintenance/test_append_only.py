"""Tables without a key: every row arrives once, whoever is interrupted when."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import lance
import pyarrow as pa
import pytest

from lancewal.base import appended_generations
from lancewal.base.lance import next_fragment_id
from lancewal.base.markers import effective_markers, tag, tags
from lancewal.base.table import BaseTable
from lancewal.maintenance import (
    finish_compaction,
    optimize_base,
    plan_compaction,
)
from lancewal.maintenance.append_only import mark_pending, remove_tags
from lancewal.maintenance.commits import APPEND_POINTS
from tests.maintenance.support import Site, execute_shard, named
from tests.tables import APPEND_ONLY, rows

COMMITTED = "append: rows and tag are committed"
WRITTEN = "append: files are written"


AtPoint = Callable[[str, Callable[[], object]], None]


class KilledError(BaseException):
    """Raised at a point in place of a kill: no handler of errors may catch it."""


def some(start: int, count: int, prefix: str = "name") -> pa.RecordBatch:
    return rows(start, count, schema=APPEND_ONLY, prefix=prefix)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Five rows in the base, two generations of which one repeats rows of the base."""
    site = Site(tmp_path / "table", APPEND_ONLY, pa.Table.from_batches([some(0, 5)]))
    site.flush(some(3, 4))
    site.flush(some(100, 2), some(100, 1))
    return site


EXPECTED = sorted([*named(range(5), "name"), *named(range(3, 7), "name"), *named([100, 101, 100], "name")])


def stop() -> None:
    raise KilledError


class TestResult:
    def test_every_row_arrives_once_and_the_table_is_as_plain_as_before(self, site: Site) -> None:
        schema = site.dataset.schema
        assert site.merged() == EXPECTED
        report = site.compact()
        assert site.plain() == EXPECTED
        assert site.merged() == EXPECTED
        assert (site.marker, report.rows_upserted, report.generations) == (2, 7, 2)
        assert site.dataset.schema.equals(schema, check_metadata=True)

    def test_a_second_run_changes_nothing(self, site: Site) -> None:
        site.compact()
        version = site.dataset.version
        site.compact()
        assert (site.plain(), site.dataset.version) == (EXPECTED, version)

    def test_several_shards(self, site: Site) -> None:
        others = [uuid4() for _ in range(3)]
        for place, shard_id in enumerate(others):
            site.flush(some(1000 * place + 1000, 4), shard_id=shard_id)
        report = site.compact()
        assert len(report.shards) == 4
        assert len(site.plain()) == len(EXPECTED) + 12
        assert all(site.base.details.compacted[shard_id] == 1 for shard_id in others)

    def test_indexes_do_not_claim_the_new_rows(self, site: Site) -> None:
        site.dataset.create_scalar_index("id", "BTREE")
        # The fragment goes, its number must not come back: the index still lists it.
        lance.write_dataset(some(500, 5), site.store.uri, mode="append")
        site.dataset.optimize.optimize_indices()
        site.dataset.delete("id >= 500")
        assert next_fragment_id(site.dataset) == 2
        site.compact()
        assert site.dataset.to_table(filter="id = 101").num_rows == 1
        assert site.dataset.to_table(filter="id = 100").num_rows == 2
        assert 1 not in site.base.manifest.fragment_ids

    def test_stable_row_ids_go_on(self, tmp_path: Path) -> None:
        table = pa.Table.from_batches([some(0, 5)])
        site = Site.of(lance.write_dataset(table, tmp_path / "table", enable_stable_row_ids=True))
        site.flush(some(10, 3))
        site.compact()
        lance.write_dataset(some(20, 1), site.store.uri, mode="append")
        assert site.dataset.to_table(with_row_id=True)["_rowid"].to_pylist() == list(range(9))

    def test_new_columns_read_as_nulls(self, site: Site) -> None:
        site.dataset.add_columns(pa.schema([pa.field("later", pa.int32())]))
        site.dataset.alter_columns({"path": "name", "name": "title"})
        site.compact()
        assert site.plain("title") == EXPECTED
        assert set(site.dataset.to_table()["later"].to_pylist()) == {None}


class TestInterrupted:
    @pytest.mark.parametrize("point", APPEND_POINTS)
    def test_no_reader_notices_and_the_next_run_finishes(
        self, site: Site, at_point: AtPoint, point: str
    ) -> None:
        at_point(point, stop)
        with pytest.raises(KilledError):
            site.compact()
        assert site.merged() == EXPECTED
        site.compact()
        assert site.plain() == EXPECTED
        assert site.merged() == EXPECTED
        assert (site.marker, tags(site.base.schema.columns)) == (2, {})

    def test_rows_and_tag_come_in_one_version(self, site: Site, at_point: AtPoint) -> None:
        plan = plan_compaction(site.store)
        at_point(COMMITTED, stop)
        with pytest.raises(KilledError):
            execute_shard(plan.shards[0], store=site.store)
        base = site.base
        assert (base.details.compacted, appended_generations(base)) == ({}, {site.shard_id: 2})
        assert base.dataset.count_rows() == len(EXPECTED)
        before = BaseTable.open(site.store.uri, version=base.version - 1)
        assert (appended_generations(before), before.dataset.count_rows()) == ({}, 5)

    def test_the_tag_survives_whatever_is_committed_or_cleaned_up(
        self, site: Site, at_point: AtPoint
    ) -> None:
        plan = plan_compaction(site.store)
        at_point(COMMITTED, stop)
        with pytest.raises(KilledError):
            execute_shard(plan.shards[0], store=site.store)
        lance.write_dataset(some(900, 1), site.store.uri, mode="append")
        site.dataset.delete("id = 900")
        site.dataset.update({"name": "'name_0'"}, where="id = 0")
        site.dataset.create_scalar_index("id", "BTREE")
        site.dataset.optimize.compact_files()
        site.dataset.drop_columns(["name"])
        site.dataset.add_columns(pa.schema([pa.field("name", pa.string())]))
        site.dataset.cleanup_old_versions(timedelta(0), delete_unverified=True)
        assert len(site.merged("id")) == len(EXPECTED)
        assert execute_shard(plan.shards[0], store=site.store).rows_inserted == 0
        assert (site.marker, len(site.plain("id"))) == (2, len(EXPECTED))

    def test_an_unfinished_append_is_marked_before_files_are_joined(
        self, site: Site, at_point: AtPoint
    ) -> None:
        plan = plan_compaction(site.store)
        at_point(COMMITTED, stop)
        with pytest.raises(KilledError):
            execute_shard(plan.shards[0], store=site.store)
        assert site.marker == 0
        optimize_base(site.store)
        assert mark_pending(site.store) == []
        assert (site.marker, site.plain()) == (2, EXPECTED)


class TestBeside:
    def test_a_compactor_that_was_overtaken_appends_nothing(self, site: Site, at_point: AtPoint) -> None:
        plan = plan_compaction(site.store)
        at_point(WRITTEN, lambda: site.compact())
        late = execute_shard(plan.shards[0], store=site.store)
        assert (late.rows_inserted, late.skipped) == (0, [1, 2])
        assert site.plain() == EXPECTED

    def test_a_compactor_that_was_overtaken_in_part_appends_the_rest(
        self, site: Site, at_point: AtPoint
    ) -> None:
        first = plan_compaction(site.store)
        site.flush(some(200, 3))
        plan = plan_compaction(site.store)
        at_point(WRITTEN, lambda: execute_shard(first.shards[0], store=site.store))
        late = execute_shard(plan.shards[0], store=site.store)
        assert (late.generations, late.skipped, late.retries) == ([3], [1, 2], 1)
        assert site.plain() == sorted(EXPECTED + named(range(200, 203), "name"))

    @pytest.mark.parametrize(
        "change",
        [
            lambda site: lance.write_dataset(some(700, 2), site.store.uri, mode="append"),
            lambda site: site.dataset.delete("id = 0"),
            lambda site: site.dataset.update({"name": "'x'"}, where="id = 1"),
            lambda site: site.dataset.update_field_metadata({"name": {"unit": "none"}}),
            lambda site: site.dataset.create_scalar_index("id", "BTREE"),
            lambda site: site.dataset.add_columns(pa.schema([pa.field("extra", pa.int32())])),
            lambda site: site.dataset.drop_columns(["name"]),
            lambda site: (
                site.dataset.drop_columns(["name"]),
                site.dataset.add_columns(pa.schema([pa.field("name", pa.string())])),
            ),
        ],
        ids=[
            "append",
            "delete",
            "update",
            "metadata",
            "index",
            "add column",
            "drop column",
            "replace column",
        ],
    )
    def test_what_others_commit_meanwhile_is_kept(
        self,
        site: Site,
        at_point: AtPoint,
        change: Callable[[Site], object],
    ) -> None:
        alone = Site(Path(site.store.uri).parent / "alone", APPEND_ONLY, site.dataset.to_table())
        change(alone)
        expected = alone.dataset.to_table()
        at_point(WRITTEN, lambda: change(site))
        site.compact()
        found = site.dataset.to_table()
        assert found.schema.equals(expected.schema, check_metadata=True)
        assert sorted(found["id"].to_pylist()) == sorted(
            [*expected["id"].to_pylist(), 3, 4, 5, 6, 100, 101, 100]
        )
        assert site.dataset.count_rows("id = 0") == alone.dataset.count_rows("id = 0")
        if "name" in expected.schema.names and expected["name"].null_count:
            # Another column of the same name: the rows that were flushed have no value in it.
            assert found["name"].null_count == found.num_rows
        assert len(site.dataset.describe_indices()) == len(alone.dataset.describe_indices())

    def test_an_append_of_others_that_began_before_ours_goes_through(self, site: Site) -> None:
        stale = site.dataset
        site.compact()
        lance.write_dataset(some(800, 1), stale, mode="append")
        assert site.plain() == sorted([*EXPECTED, (800, "name_800")])
        assert site.marker == 2

    def test_lance_replays_beside_the_tag(self, site: Site, at_point: AtPoint) -> None:
        shard = uuid4()
        writer = site.dataset.mem_wal_writer(str(shard), durable_write=True)
        writer.put(some(300, 2))
        plan = plan_compaction(site.store)
        at_point(COMMITTED, stop)
        with pytest.raises(KilledError):
            execute_shard(next(p for p in plan.shards if p.shard_id == site.shard_id), store=site.store)
        again = site.dataset.mem_wal_writer(str(shard), durable_write=True)
        assert again.memtable_stats()["row_count"] == 2
        again.close()
        assert site.merged() == sorted(EXPECTED + named([300, 301], "name"))


class TestTags:
    def test_a_late_removal_leaves_newer_tags(self) -> None:
        shard = UUID(int=5)
        columns = pa.schema([pa.field("a", pa.int64(), metadata={tag(shard, 3): "", tag(shard, 8): ""})])
        assert effective_markers({shard: 4}, columns) == {shard: 8}
        assert tags(columns) == {tag(shard, 3): (shard, 3), tag(shard, 8): (shard, 8)}

    @pytest.mark.parametrize(
        "key", ["lancewal:appended", "lancewal:appended:x:1", "lancewal:appended:1", f"other:{UUID(int=1)}:3"]
    )
    def test_other_metadata_is_no_tag(self, key: str) -> None:
        assert tags(pa.schema([pa.field("a", pa.int64(), metadata={key: ""})])) == {}

    def test_nothing_is_removed_where_there_is_no_tag(self, site: Site) -> None:
        version = site.dataset.version
        assert not remove_tags(site.store)
        finish_compaction(site.store)
        assert site.dataset.version == version
