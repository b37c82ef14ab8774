"""Compaction of tables with a key: newest rows win, dead keys go, the marker comes with them."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lance.dataset import MergeInsertBuilder

from lancewal.base.markers import fence_id, is_fence
from lancewal.base.table import BaseTable
from lancewal.errors import (
    ConflictError,
    CorruptManifestError,
    InvalidInputError,
    OutcomeUnknownError,
    PartialWriteError,
    StorageError,
)
from lancewal.format import KeySet, superseded
from lancewal.maintenance import (
    CompactionPlan,
    Pack,
    Progress,
    at_crash_points,
    commits,
    compact,
    execute_pack,
    keyed,
    newest,
    plan_compaction,
)
from lancewal.maintenance.commits import MERGE_POINTS
from lancewal.maintenance.reports import PackReport
from lancewal.reader.table_reader import TableReader
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import ObjectStore
from tests.maintenance.support import Site, execute_shard, named
from tests.tables import APPEND_ONLY, KEY, KEYED, new_table, open_writer, rows

#: The package has a function of the same name.
compact_module = importlib.import_module("lancewal.maintenance.compact")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Ten rows in the base, three generations of which later ones replace and delete."""
    site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, 10, prefix="base")]))
    site.flush(rows(5, 10, prefix="one"), [0])
    site.flush(rows(8, 4, prefix="two"), [14])
    site.flush(rows(14, 1, prefix="three"), [5, 1])
    return site


EXPECTED = [
    *named(range(2, 5), "base"),
    *named(range(6, 8), "one"),
    *named(range(8, 12), "two"),
    *named(range(12, 14), "one"),
    (14, "three_14"),
]


class TestResult:
    def test_plain_lance_reads_the_newest_rows_after_compaction(self, site: Site) -> None:
        assert site.merged() == EXPECTED
        report = site.compact()
        assert site.plain() == EXPECTED
        assert site.merged() == EXPECTED
        assert site.marker == 3
        assert (report.generations, report.commits, report.rows_deleted) == (3, 1, 3)
        assert report.shards[0].generations == [1, 2, 3]

    def test_the_report_accounts_for_every_row(self, site: Site) -> None:
        (shard,) = site.compact().shards
        # 10 + 1, 4 + 1 and 1 + 2 rows and tombstones; 9 rows live on, 4 of them replace base rows.
        assert shard.rows_in == 19
        assert (shard.rows_inserted, shard.rows_updated, shard.rows_replaced) == (5, 4, 10)

    def test_a_second_run_has_nothing_to_do(self, site: Site) -> None:
        site.compact()
        version = site.dataset.version
        again = site.compact()
        assert (again.generations, again.commits, site.dataset.version) == (0, 0, version)

    def test_rows_reach_the_base_in_the_order_in_which_they_were_written(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table")
        site.flush(rows(100, 3))
        site.flush(rows(50, 3))
        site.flush(rows(0, 3))
        site.compact()
        assert site.dataset.to_table()["id"].to_pylist() == [100, 101, 102, 50, 51, 52, 0, 1, 2]

    def test_only_tombstones_commit_the_marker_and_keep_all_other_rows(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, 5)]))
        site.flush([3, 77])
        site.compact()
        assert site.plain() == named([0, 1, 2, 4], "name")
        assert site.marker == 1

    def test_some_shards_can_be_chosen(self, site: Site) -> None:
        other = uuid4()
        site.flush(rows(500, 3), shard_id=other)
        site.compact(shards=[str(other)])
        assert site.marker == 0
        assert site.base.details.compacted[other] == 1

    def test_an_unknown_shard_is_refused(self, site: Site) -> None:
        with pytest.raises(InvalidInputError, match="no shards"):
            site.compact(shards=[uuid4()])

    def test_many_shards_are_compacted(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, 1000)]))
        for number in range(6):
            site.flush(rows(100 * number, 50, prefix="new"), [100 * number + 60], shard_id=uuid4())
        report = site.compact()
        assert (len(report.shards), report.rows_upserted, report.rows_deleted) == (6, 300, 6)
        assert len(site.plain()) == 994

    def test_progress_is_told(self, site: Site) -> None:
        told: list[Progress] = []
        site.compact(progress=told.append)
        assert [(each.step, each.through, each.rows) for each in told] == [("merged", 3, 9)]


class TestPlan:
    def test_a_plan_survives_json_and_pickle(self, site: Site) -> None:
        plan = plan_compaction(site.store)
        assert CompactionPlan.from_json(plan.to_json()) == plan
        assert pickle.loads(pickle.dumps(plan)) == plan
        (shard,) = plan.shards
        assert (shard.generations, shard.rows, plan.commits_expected) == ((1, 2, 3), 19, 1)
        assert "generations 1 to 3" in str(plan)

    def test_generations_are_grouped_by_bytes(self, site: Site) -> None:
        sizes = [entry.in_memory_bytes or 0 for entry in site.manifest.sstables]
        plan = plan_compaction(site.store, max_commit_bytes=sizes[0] + sizes[1])
        assert [commit.generations for commit in plan.shards[0].commits] == [(1, 2), (3,)]
        report = site.compact(plan=plan)
        assert report.commits == 2
        assert site.plain() == EXPECTED

    def test_a_plan_shows_no_credentials(self, site: Site) -> None:
        store = ObjectStore.from_uri(site.store.uri, {"aws_secret_access_key": "hidden"}, fsync=False)
        assert "hidden" not in plan_compaction(store).to_json()

    def test_a_stale_plan_skips_what_is_compacted(self, site: Site) -> None:
        plan = plan_compaction(site.store)
        site.compact()
        site.flush(rows(6, 1, prefix="four"))
        site.compact()
        before = site.plain()
        report = execute_shard(plan.shards[0], store=site.store)
        assert (report.generations, report.skipped, report.commits) == ([], [1, 2, 3], 0)
        assert site.plain() == before

    def test_a_plan_is_executed_by_its_uri_alone(self, site: Site) -> None:
        plan = pickle.loads(pickle.dumps(plan_compaction(site.store)))
        execute_shard(plan.shards[0], {})
        assert site.plain() == EXPECTED

    def test_a_missing_generation_is_refused_before_anything_is_marked(self, site: Site) -> None:
        ShardManifestStore(site.store, site.shard_id).commit_update(
            None, lambda m: replace(m, sstables=(m.sstables[0], m.sstables[2]))
        )
        with pytest.raises(CorruptManifestError, match=r"\[2\] are missing"):
            site.compact()
        assert site.marker == 0

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"uri": "x"}', '{"shards": [{}]}'])
    def test_what_is_no_plan_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidInputError, match="no compaction plan"):
            CompactionPlan.from_json(text)


class TestBoundedMemory:
    def test_a_generation_above_the_limit_takes_several_commits(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, 100, prefix="base")]))
        writer = site.writer()
        for start in range(0, 50_000, 5000):
            writer.put(rows(start, 5000, prefix="new"))
        writer.delete([7, 30_000])
        writer.close()
        report = site.compact(max_commit_bytes=400_000)
        assert report.commits > 2
        assert site.plain() == named([i for i in range(50_000) if i not in (7, 30_000)], "new")
        # Only the last of them says that the generation is held.
        versions = [each["version"] for each in site.dataset.versions()][-report.commits :]
        held = [BaseTable.open(site.store.uri, version=v).details.compacted for v in versions]
        assert [markers.get(site.shard_id, 0) for markers in held] == [0] * (report.commits - 1) + [1]

    @pytest.mark.parametrize("upserts", [0, 5], ids=["deletes alone", "with rows"])
    def test_many_deleted_keys_take_several_fenced_commits(self, tmp_path: Path, upserts: int) -> None:
        count = 20_000
        site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, count + 10, prefix="base")]))
        operations = [list(range(count)), *([rows(count, upserts, prefix="new")] if upserts else [])]
        site.flush(*operations)
        before = site.dataset.version
        report = site.compact(max_commit_bytes=40_000, compact_files=False)
        assert report.commits == 4 + bool(upserts)
        assert report.rows_deleted == count
        updated = range(count, count + upserts)
        kept = range(count + upserts, count + 10)
        assert site.plain() == [*named(updated, "new"), *named(kept, "base")]
        bases = [
            BaseTable.open(site.store.uri, version=version)
            for version in range(before + 1, site.dataset.version + 1)
        ]
        assert len(bases) == report.commits
        # Every commit raises the fence, only the last one says that the generation is held.
        fence = fence_id(site.shard_id)
        assert [base.details.compacted[fence] for base in bases] == list(range(1, report.commits + 1))
        held = [base.details.compacted.get(site.shard_id, 0) for base in bases]
        assert held == [0] * (report.commits - 1) + [1]

    def test_a_stale_part_of_the_deletes_takes_no_key_away_that_was_written_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A compactor stands still between two commits, and another one gets further."""
        count = 20_000
        site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, count, prefix="base")]))
        site.flush(list(range(count)))
        plan = plan_compaction(site.store, max_commit_bytes=40_000)
        overtaken = []

        def overtake(point: str) -> None:
            if point == "merge: a part of the rows is committed" and not overtaken:
                overtaken.append(point)
                at_crash_points(None)
                site.flush(rows(0, count, prefix="again"))
                site.compact()

        at_crash_points(overtake)
        try:
            report = compact(site.store, plan=plan)
        finally:
            at_crash_points(None)
        assert overtaken
        assert report.shards[0].skipped == [1]
        assert site.plain() == site.merged() == named(range(count), "again")

    def test_the_memory_of_deletes_does_not_grow_with_their_number(self, tmp_path: Path) -> None:
        """Listed in a condition, each key took Lance two kilobytes."""
        script = """
import logging, resource, sys
import lance, pyarrow as pa
import lancewal
from lancewal.maintenance import compact
from lancewal.storage import ObjectStore
logging.disable(logging.CRITICAL)
uri, count, limit = sys.argv[1], 300_000, 4 << 20
key = pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
keys = pa.table({"id": range(count)}, pa.schema([key]))
lance.write_dataset(keys, uri)
with lancewal.initialize(uri, unsharded=True).writer(durable_write=False) as writer:
    writer.delete(keys)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = compact(ObjectStore.from_uri(uri), max_commit_bytes=limit)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert report.rows_deleted == count and lance.dataset(uri).count_rows() == 0
print((after - before) << 10)
"""
        run = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "table")],
            capture_output=True,
            text=True,
            check=True,
        )
        # The keys themselves take 2.4 MB, all of Lance's threads and caches some 100.
        assert int(run.stdout) < 300 << 20

    def test_keys_are_gone_through_once_however_many_generations_there_are(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site = Site(tmp_path / "table")
        for number in range(24):
            site.flush(rows(number * 5, 10, prefix=f"{number}"), [number * 5])
        compared: list[int] = []

        def counted(levels: Sequence[pa.Array]) -> Any:
            compared.append(sum(map(len, levels)))
            return superseded(levels)

        monkeypatch.setattr(newest, "superseded", counted)
        monkeypatch.setattr(KeySet, "contains", None)
        monkeypatch.setattr(KeySet, "union", None)
        found = newest.newest_rows(site.store, site.shard_id, site.manifest.sstables, site.base.schema)
        assert compared == [240]
        assert sum(int(kept.sum()) for kept in found.kept) == 23 * 4 + 9
        assert found.num_dead == 24


class TestSchema:
    def test_columns_are_matched_by_field_id(self, tmp_path: Path) -> None:
        schema = pa.schema([KEYED.field("id"), pa.field("a", pa.string()), pa.field("b", pa.int64())])
        site = Site(tmp_path / "table", schema)
        site.flush(pa.table({"id": [1], "a": ["kept"], "b": [5]}, schema))
        dataset = site.dataset
        dataset.drop_columns(["b"])
        dataset.alter_columns({"path": "a", "name": "renamed"})
        dataset.add_columns(pa.schema([pa.field("b", pa.string())]))
        site.compact()
        assert site.dataset.to_table().to_pylist() == [{"id": 1, "renamed": "kept", "b": None}]

    def test_nested_and_vector_columns_survive(self, tmp_path: Path) -> None:
        schema = pa.schema(
            [
                KEYED.field("id"),
                pa.field("v", pa.list_(pa.float32(), 3)),
                pa.field("s", pa.struct([pa.field("x", pa.int32()), pa.field("y", pa.list_(pa.string()))])),
            ]
        )
        content = {"id": [1, 2], "v": [[1, 2, 3], None], "s": [{"x": 1, "y": ["a"]}, {"x": None, "y": []}]}
        site = Site(tmp_path / "table", schema)
        site.flush(pa.table(content, schema))
        site.compact()
        assert site.dataset.to_table().to_pydict() == content


def _keyed(*types: pa.DataType) -> pa.Schema:
    keys = [
        pa.field(
            f"key {place}'s",
            type_,
            False,
            {**KEY, "lance-schema:unenforced-primary-key:position": str(place + 1)},
        )
        for place, type_ in enumerate(types)
    ]
    return pa.schema([*keys, pa.field("v", pa.int64())])


_TEXTS = [
    "",
    "'",
    "''",
    "a'b",
    'q"q',
    "back\\slash",
    "per%cent_",
    "line\nbreak",
    "naïve 雪",
    "x:y",
    "1:x",
    "`t`",
]
_INTEGERS = [0, 1, -1, 2**31, -(2**63), 2**63 - 1, -(2**63) + 1]
_BINARIES = [b"", b"\x00", b"'", b"\xff\x00", b"abc", b"ab"]


class TestKeys:
    @pytest.mark.parametrize(
        ("types", "keys"),
        [
            ((pa.int64(),), [(i,) for i in _INTEGERS]),
            ((pa.uint64(),), [(0,), (2**63,), (2**64 - 1,)]),
            ((pa.int8(),), [(-128,), (0,), (127,)]),
            ((pa.bool_(),), [(True,), (False,)]),
            ((pa.string(),), [(text,) for text in _TEXTS]),
            ((pa.large_string(),), [(text,) for text in _TEXTS]),
            ((pa.binary(),), [(each,) for each in _BINARIES]),
            (
                (pa.int64(), pa.string()),
                [(i, t) for i in (0, 11, -(2**63)) for t in ("", "1", ":", "1:1")],
            ),
            ((pa.string(), pa.string()), [(a, b) for a in ("", ":", "a:", "1:a") for b in ("", ":", ":a")]),
            ((pa.binary(), pa.bool_()), [(a, b) for a in _BINARIES for b in (True, False)]),
            ((pa.uint64(), pa.large_string(), pa.int8()), [(2**64 - 1, "'", -1), (2**64 - 1, "'", 1)]),
        ],
        ids=lambda value: "+".join(map(str, value)) if isinstance(value[0], pa.DataType) else "",
    )
    @pytest.mark.parametrize("listed", [True, False], ids=["listed", "by themselves"])
    def test_exactly_the_dead_keys_are_deleted(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        types: tuple[pa.DataType, ...],
        keys: list[tuple[Any, ...]],
        listed: bool,
    ) -> None:
        schema = _keyed(*types)
        names = schema.names[:-1]

        def table(of: list[tuple[Any, ...]], value: int) -> pa.Table:
            columns = [pa.array([key[i] for key in of], type_) for i, type_ in enumerate(types)]
            return pa.table([*columns, pa.array([value] * len(of), pa.int64())], schema=schema)

        # Few deleted keys go as a condition, many as the source of a merge of their own.
        monkeypatch.setattr(keyed, "_MOST_LISTED", 4096 if listed else 0)
        dead, updated = keys[::2], keys[1::2]
        site = Site(tmp_path / "table", schema, table(keys, 0))
        writer = site.writer()
        if updated:
            writer.put(table(updated, 1))
        writer.delete(table(dead, 0).select(names))
        writer.close()
        report = site.compact()
        found = site.dataset.to_table().to_pylist()
        assert sorted((tuple(row[n] for n in names) for row in found), key=repr) == sorted(updated, key=repr)
        assert all(row["v"] == 1 for row in found)
        assert report.rows_deleted == len(dead)


class TestLanceAsPeer:
    def test_generations_that_lance_flushed_are_compacted(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, 5, prefix="base")]))
        with site.dataset.mem_wal_writer(str(site.shard_id), durable_write=True) as writer:
            writer.put(rows(2, 6, prefix="one"))
            writer.put(rows(2, 2, prefix="two"))
            writer.delete(pa.table({"id": [0, 7]}))
        site.compact()
        assert site.plain() == [(1, "base_1"), *named([2, 3], "two"), *named([4, 5, 6], "one")]

    def test_lance_goes_on_after_our_compaction(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table")
        site.flush(rows(0, 5))
        site.compact()
        with site.dataset.mem_wal_writer(str(site.shard_id), durable_write=True) as writer:
            writer.put(rows(3, 5, prefix="lance"))
        site.compact()
        assert site.plain() == [*named(range(3), "name"), *named(range(3, 8), "lance")]

    def test_fences_are_markers_that_lance_keeps(self, site: Site) -> None:
        site.compact()
        site.dataset.create_scalar_index("name", "BTREE")
        site.dataset.optimize.optimize_indices()
        site.flush(rows(0, 1))
        site.compact()
        compacted = site.base.details.compacted
        assert compacted == {site.shard_id: 4, fence_id(site.shard_id): 2}
        assert [is_fence(each) for each in compacted].count(True) == 1


class TestIndexes:
    def test_a_small_merge_goes_through_the_index(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lancewal.base.table._INDEX_PAYS_FROM", 1)
        site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, 5000, prefix="base")]))
        site.dataset.create_scalar_index("id", "BTREE")
        site.flush(rows(4990, 20, prefix="new"))
        site.compact()
        assert site.plain() == [*named(range(4990), "base"), *named(range(4990, 5010), "new")]

    @pytest.mark.parametrize("added", [0, 5], ids=["deletes alone", "with rows"])
    def test_a_few_deletes_read_the_whole_key_column_of_a_large_base(
        self, tmp_path: Path, added: int
    ) -> None:
        """Although there is a BTree: twice the base must not be twice the bytes."""
        schema = pa.schema([pa.field("id", pa.int64(), False, KEY), pa.field("name", pa.string())])
        read = []
        for count in (100_000, 400_000):
            ids = np.random.default_rng(1).permutation(count) * 1_000_003
            names = pa.nulls(count, pa.string())
            site = Site(tmp_path / f"{count}", schema, pa.table([ids, names], schema=schema))
            site.dataset.create_scalar_index("id", "BTREE")
            dead = (np.arange(10) * 1_000_003).tolist()
            later = pa.table([[-1 - n for n in range(added)], ["new"] * added], schema=schema)
            # Outside the index, as what earlier compactions brought.
            site.dataset.insert(pa.table([[7], ["kept"]], schema=schema))
            site.flush([*dead, 7], *([later] if added else []))
            before = lance.bytes_read_counter()
            report = site.compact()
            read.append(lance.bytes_read_counter() - before)
            assert report.shards[0].rows_deleted == 11
            assert report.shards[0].rows_inserted == added
            assert site.dataset.count_rows() == count - 10 + added
            assert site.marker == 1
        assert read[1] < read[0] * 1.5 + 50_000, read

    @pytest.mark.parametrize("point", MERGE_POINTS)
    @pytest.mark.parametrize("rival", [False, True], ids=["alone", "a rival goes on"])
    def test_a_compactor_that_died_between_the_deletes_and_the_rows_loses_and_doubles_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, rival: bool
    ) -> None:
        monkeypatch.setattr("lancewal.base.table._INDEX_PAYS_FROM", 1)
        site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, 2000, prefix="base")]))
        site.dataset.create_scalar_index("id", "BTREE")
        site.flush(rows(5, 3, prefix="new"), [5, 1, 2, 99_999])
        site.flush(rows(1, 1, prefix="again"), [6])
        kinds: list[bool] = []
        execute = commits._merge

        def watched(base: Any, part: Any, *more: Any, **how: Any) -> Any:
            kinds.append(part.deletes)
            return execute(base, part, *more, **how)

        monkeypatch.setattr(commits, "_merge", watched)

        def stop(reached: str) -> None:
            if reached != point:
                return
            at_crash_points(None)
            if not rival:
                raise KeyboardInterrupt
            # This one was only stopped; a key that it deletes is written again and compacted meanwhile.
            site.flush(rows(2, 1, prefix="later"))
            site.compact()

        at_crash_points(stop)
        try:
            before = site.merged()
            if rival:
                site.compact()
            else:
                with pytest.raises(KeyboardInterrupt):
                    site.compact()
                assert site.merged() == before
                if point == MERGE_POINTS[1]:
                    assert (kinds, site.marker) == ([True], 0)
                site.flush(rows(2, 1, prefix="later"))
        finally:
            at_crash_points(None)
        expected = dict(before) | {2: "later_2"}
        assert site.merged() == sorted(expected.items())
        site.compact()
        assert kinds[:2] == [True, False] or point == MERGE_POINTS[1] or rival
        assert site.plain() == site.merged() == sorted(expected.items())
        assert site.verify().ok

    def test_indexes_and_files_are_optimized_on_request(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, 500)]))
        site.dataset.create_scalar_index("id", "BTREE")
        site.flush(rows(490, 100, prefix="new"))
        report = site.compact(optimize_indexes=True, compact_files=True)
        assert report.indexes_optimized
        assert report.files_removed > report.files_added >= 1
        manifest = site.base.manifest
        assert manifest.covered_fragments("id_idx") == manifest.fragment_ids
        assert len(site.plain()) == 590
        assert site.marker == 1


class TestDirectWrites:
    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            (lambda d: lance.write_dataset(rows(70, 2, prefix="direct"), d, mode="append"), [70, 71]),
            (lambda d: d.delete("id IN (2, 6)"), [6]),
            (lambda d: d.update({"name": "'x'"}, where="id IN (2, 6)"), [6]),
            (lambda d: _merge_direct(d, rows(2, 1, prefix="direct")), []),
            (lambda d: d.create_scalar_index("id", "BTREE"), []),
            (lambda d: d.add_columns(pa.schema([pa.field("extra", pa.int32())])), []),
        ],
        ids=["append", "delete", "update", "merge", "index", "new column"],
    )
    def test_what_is_written_to_the_base_meanwhile_is_kept(
        self, site: Site, change: Callable[[lance.LanceDataset], object], expected: list[int]
    ) -> None:
        """Between the reading of SSTables and the commit; rows of SSTables count as newer."""
        alone = Site(Path(site.store.uri).parent / "alone", data=site.dataset.to_table())
        change(alone.dataset)
        directly = dict(alone.plain())
        wanted = {**directly, **{key: name for key, name in EXPECTED if not name.startswith("base")}}
        dead = [0, 1, 5]

        def once(point: str) -> None:
            at_crash_points(None)
            change(site.dataset)

        at_crash_points(once)
        try:
            site.compact()
        finally:
            at_crash_points(None)
        assert dict(site.plain()) == {key: name for key, name in wanted.items() if key not in dead}
        assert set(expected) <= {key for key, _ in site.plain()}
        assert site.marker == 3
        assert len(site.plain()) == len(dict(site.plain()))


def _merge_direct(dataset: lance.LanceDataset, batch: pa.RecordBatch) -> None:
    merge = dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    merge.execute(pa.Table.from_batches([batch]))


class TestFailures:
    def test_one_failed_shard_does_not_stop_the_others(self, site: Site) -> None:
        # Nobody can say whether a key of the damaged shard is in the other one too, so both are compacted in
        # the order of reads: by its id the other one comes first.
        other = UUID(int=(1 << 128) - 1)
        site.flush(rows(500, 3), shard_id=other)
        (entry, *_) = site.manifest.sstables
        site.store.delete_prefix(f"_mem_wal/{site.shard_id}/{entry.path}")
        with pytest.raises(PartialWriteError) as raised:
            site.compact()
        assert set(raised.value.failed) == {site.shard_id}
        assert raised.value.written == {other: 3}
        assert (site.marker, site.base.details.compacted[other]) == (0, 1)

    @pytest.mark.parametrize("how", [{"compact_files": True}, {}], ids=["all files", "by default"])
    def test_an_error_of_what_follows_hid_which_shards_had_failed(
        self, site: Site, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
    ) -> None:
        other = UUID(int=(1 << 128) - 1)
        site.flush(rows(500, 3), shard_id=other)
        (entry, *_) = site.manifest.sstables
        site.store.delete_prefix(f"_mem_wal/{site.shard_id}/{entry.path}")

        def lost(*args: object, **how: object) -> tuple[bool, int, int]:
            raise ConflictError("file compaction lost 32 races in a row")

        monkeypatch.setattr(compact_module, "optimize_base", lost)
        monkeypatch.setattr(compact_module, "tidy", lost)
        with pytest.raises(PartialWriteError) as raised:
            site.compact(**how)
        assert (set(raised.value.failed), raised.value.written) == ({site.shard_id}, {other: 3})
        # Where no shard failed it is the error.
        with pytest.raises(ConflictError):
            site.compact(shards=[other], **how)

    def test_a_pack_that_cannot_begin_does_not_hide_what_the_others_did(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site = Site(tmp_path / "table")
        shards = [UUID(int=number) for number in (1, 2, 3)]
        for number, shard_id in enumerate(shards):
            site.flush(rows(10 * number, 3), shard_id=shard_id)
        plan = plan_compaction(site.store, max_commit_bytes=1)
        begun: list[UUID] = []

        def execute(pack: Pack, **how: Any) -> PackReport:
            begun.append(pack.parts[0].shard_id)
            if len(begun) == 2:
                raise StorageError("the table cannot be opened")
            return execute_pack(pack, **how)

        monkeypatch.setattr(compact_module, "execute_pack", execute)
        with pytest.raises(PartialWriteError, match="cannot be opened") as raised:
            site.compact(plan=plan)
        assert set(raised.value.failed) == {begun[1]}
        assert raised.value.written == dict.fromkeys([begun[0], begun[2]], 3)
        assert len(site.plain()) == 6

    def test_packs_at_the_same_time_made_lance_do_their_merges_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Compaction with two threads took 2.6 times as long as with one."""
        site = Site(tmp_path / "table")
        for number in range(4):
            site.flush(rows(10 * number, 1), shard_id=UUID(int=1 + number))
        plan = plan_compaction(site.store, max_commit_bytes=1)
        based_on: list[int] = []

        def execute(pack: Pack, **how: Any) -> PackReport:
            based_on.append(site.base.version)
            return execute_pack(pack, **how)

        monkeypatch.setattr(compact_module, "execute_pack", execute)
        report = site.compact(plan=plan)
        assert report.commits == 4
        assert based_on == list(range(based_on[0], based_on[0] + 4)), "each begins where the last one ended"

    def test_lance_lets_one_of_two_merges_that_insert_rows_commit(self, tmp_path: Path) -> None:
        """Why the packs of a compaction wait for each other. Lance compares Bloom filters of the new keys."""
        site = Site(tmp_path / "table", data=pa.Table.from_batches([rows(0, 2000)]))
        early, late = (lance.dataset(site.store.uri) for _ in range(2))

        def merge(dataset: lance.LanceDataset, start: int) -> None:
            builder = dataset.merge_insert(["id"]).when_matched_update_all().when_not_matched_insert_all()
            builder.conflict_retries(0).execute(pa.Table.from_batches([rows(start, 1000)]))

        merge(early, 2000)
        with pytest.raises(OSError, match="concurrent writers"):
            merge(late, 3000)
        updated, other = (lance.dataset(site.store.uri) for _ in range(2))
        merge(updated, 0)
        merge(other, 1000)


_Operation = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 30), st.integers(1, 12)),
    st.tuples(st.just("delete"), st.lists(st.integers(0, 40), min_size=1, max_size=6), st.just(0)),
    st.tuples(st.just("flush"), st.just(0), st.just(0)),
    st.tuples(st.just("compact"), st.sampled_from([1, 2000, 1 << 28]), st.just(0)),
    st.tuples(st.just("collect"), st.just(0), st.just(0)),
)


@settings(max_examples=25)
@given(st.lists(_Operation, min_size=3, max_size=14))
def test_any_history_reads_the_same_after_compaction(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, Any, int]]
) -> None:
    site = Site(tmp_path_factory.mktemp("any") / "table", data=pa.Table.from_batches([rows(0, 10)]))
    model = dict(named(range(10), "name"))
    writer = site.writer()
    for step, (kind, what, count) in enumerate(history):
        if kind == "put":
            writer.put(rows(what, count, prefix=f"v{step}"))
            model.update(named(range(what, what + count), f"v{step}"))
        elif kind == "delete":
            writer.delete(what)
            model = {key: value for key, value in model.items() if key not in what}
        elif kind == "flush":
            writer.force_seal_active()
            writer.wait_for_flush_drain()
        elif kind == "compact":
            site.compact(max_commit_bytes=what)
        else:
            site.collect()
        assert site.merged() == sorted(model.items())
    writer.close()
    site.compact()
    site.collect()
    assert site.plain() == sorted(model.items())
    assert site.verify().ok, str(site.verify())


# --- a key in two shards -----------------------------------------------------------------


class Divided:
    """A table whose keys may be in any of three shards, as several programs left it.

    Nobody says what is newer; but a read must give the same before, during and after a compaction.
    """

    def __init__(self, where: Path) -> None:
        self.base = new_table(where, data=pa.Table.from_batches([rows(0, 8, prefix="base")]))
        self.store = ObjectStore.from_uri(self.base.uri, fsync=False)
        self.shards = sorted(uuid4() for _ in range(3))

    def flush(self, shard: int, first: int, count: int, dead: int, prefix: str) -> None:
        with open_writer(self.base, self.shards[shard], store=self.store) as writer:
            writer.put(rows(first, count, prefix=prefix))
            writer.delete([dead])

    def append(self, shard: int, first: int, count: int, prefix: str) -> None:
        with open_writer(self.base, self.shards[shard], store=self.store, enable_memtable=False) as writer:
            writer.put(rows(first, count, prefix=prefix))

    def merged(self) -> list[dict[str, Any]]:
        reader = TableReader(self.store, live_writers=False)
        scanned = reader.scan().to_table().sort_by("id").to_pylist()
        looked_up = reader.lookup(list(range(20))).table.sort_by("id").to_pylist()
        assert looked_up == scanned, "a lookup and a scan let the same version win"
        return scanned


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    flushes=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 6), st.integers(0, 12)),
        min_size=2,
        max_size=7,
    ),
    tails=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=2),
    asked=st.none() | st.integers(0, 2),
    limit=st.sampled_from([1, 200, 1 << 30]),
)
def test_compaction_changed_what_reads_give_for_a_key_in_two_shards(
    tmp_path_factory: pytest.TempPathFactory,
    flushes: list[tuple[int, int, int, int]],
    tails: list[tuple[int, int]],
    asked: int | None,
    limit: int,
) -> None:
    table = Divided(tmp_path_factory.mktemp("divided") / "t")
    for number, (shard, first, count, dead) in enumerate(flushes):
        table.flush(shard, first, count, dead, f"flush{number}")
    for number, (shard, first) in enumerate(tails):
        table.append(shard, first, 3, f"tail{number}")
    expected = table.merged()
    wanted = None if asked is None else [table.shards[flushes[asked % len(flushes)][0]]]
    plan = plan_compaction(table.store, wanted, max_commit_bytes=limit)
    assert CompactionPlan.from_json(plan.to_json()) == plan
    # Every part may be the last one before a crash.
    for unit in plan.units:
        for part in unit:
            execute_shard(part, store=table.store)
            assert table.merged() == expected
    compact(table.store)
    assert table.merged() == expected


def test_parts_after_one_that_failed_would_change_reads_and_are_left(tmp_path: Path) -> None:
    table = Divided(tmp_path / "t")
    for number, shard in enumerate([0, 1, 0, 1]):
        table.flush(shard, 0, 5, 9, f"flush{number}")
    expected = table.merged()

    merges = iter(range(10))

    def fail(point: str) -> None:
        if point == "merge: rows are read" and next(merges) == 1:
            raise RuntimeError("the second part")

    at_crash_points(fail)
    try:
        with pytest.raises(PartialWriteError, match="the second part"):
            compact(table.store)
    finally:
        at_crash_points(None)
    assert next(merges) == 2, "nothing was tried after it"
    assert table.merged() == expected
    report = compact(table.store)
    assert table.merged() == expected
    assert sorted(shard.shard_id for shard in report.shards) == table.shards[:2], "one report for each shard"


def test_shards_that_say_nothing_but_share_no_key_are_compacted_side_by_side(tmp_path: Path) -> None:
    table = Divided(tmp_path / "t")
    for shard, first in [(0, 0), (0, 1), (1, 100), (1, 101), (2, 2)]:
        with open_writer(table.base, table.shards[shard], store=table.store) as writer:
            writer.put(rows(first, 3))
    plan = plan_compaction(table.store)
    assert [[part.shard_id for part in unit] for unit in plan.units if len(unit) == 1] == [[table.shards[1]]]
    (sharing,) = [unit for unit in plan.units if len(unit) > 1]
    assert {part.together for part in sharing} == {(table.shards[0], table.shards[2])}


def without_an_answer(patch: pytest.MonkeyPatch, schema: pa.Schema, *, takes_effect: bool) -> None:
    owner, name = (MergeInsertBuilder, "execute") if schema is KEYED else (lance.LanceDataset, "commit")
    real = getattr(owner, name)

    def lost(*args: Any, **kwargs: Any) -> Any:
        if takes_effect:
            real(*args, **kwargs)
        raise OSError("LanceError(IO): connection reset by peer (os error 104)")

    patch.setattr(owner, name, lost)


@pytest.mark.parametrize("takes_effect", [False, True])
@pytest.mark.parametrize("schema", [KEYED, APPEND_ONLY], ids=["keyed", "append only"])
def test_a_commit_without_an_answer_is_neither_denied_nor_done_twice(
    tmp_path: Path, schema: pa.Schema, takes_effect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path / "table", schema)
    site.flush(rows(0, 5, schema=schema))
    with monkeypatch.context() as patch:
        without_an_answer(patch, schema, takes_effect=takes_effect)
        if takes_effect and schema is KEYED:
            site.compact()  # finds its own marker
        else:
            with pytest.raises(PartialWriteError) as caught:
                site.compact()
            assert [type(error) for error in caught.value.failed.values()] == [OutcomeUnknownError]
    assert site.plain() == (named(range(5), "name") if takes_effect else [])
    site.compact()
    assert site.plain() == site.merged() == named(range(5), "name")


def test_a_commit_that_the_system_refused_did_not_happen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path / "table")
    site.flush(rows(0, 5))

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise OSError("LanceError(IO): No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(MergeInsertBuilder, "execute", refused)
        with pytest.raises(PartialWriteError) as caught:
            site.compact()
    assert [type(error) for error in caught.value.failed.values()] == [StorageError]
    assert site.plain() == []
