"""Commits that carry many shards: what each shard is promised holds for all of them, one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa
import pytest
from lance.dataset import MergeInsertBuilder

from lancewal.base import fence_id
from lancewal.errors import PartialWriteError
from lancewal.maintenance import (
    Pack,
    Progress,
    at_crash_points,
    execute_pack,
    keyed,
    newest,
    plan_compaction,
    verify,
)
from lancewal.maintenance.commits import APPEND_POINTS, MERGE_POINTS
from lancewal.maintenance.reports import PackReport
from tests.maintenance.support import Site, execute_shard, named
from tests.tables import APPEND_ONLY, KEYED, rows

AtPoint = Callable[[str, Callable[[], object]], None]
READ, WRITTEN = MERGE_POINTS[0], APPEND_POINTS[0]
_TABLES = pytest.mark.parametrize("schema", [KEYED, APPEND_ONLY], ids=["keyed", "append only"])


class KilledError(BaseException):
    pass


def stop() -> None:
    raise KilledError


class Shards(Site):
    """A table with hand-made shards: shard ``n`` holds ids from ``100 n``, in two generations."""

    def __init__(self, where: Path, schema: pa.Schema = KEYED, count: int = 4) -> None:
        self.schema = schema
        super().__init__(where, schema, pa.Table.from_batches([rows(0, 3, schema=schema, prefix="base")]))
        self.ids = [UUID(int=number + 1) for number in range(count)]
        self.is_keyed = schema is KEYED
        for number in range(count):
            for generation in (1, 2):
                self.add(number, f"g{generation}", 10 * generation)

    def add(self, number: int, prefix: str, count: int, dead: tuple[int, ...] = ()) -> None:
        first = 100 * number + 3 + (0 if self.is_keyed else self.generations(number) * 20)
        operations: list[Any] = [rows(first, count, schema=self.schema, prefix=prefix)]
        if self.is_keyed:
            operations.append([100 * number, *dead])
        self.flush(*operations, shard_id=self.ids[number])

    def generations(self, number: int) -> int:
        directory = Path(self.store.uri) / "_mem_wal" / str(self.ids[number])
        return len(list(directory.glob("*_gen_*")))

    def pack(self, *numbers: int) -> Pack:
        wanted = {self.ids[number] for number in numbers} or set(self.ids)
        return Pack(tuple(part for part in plan_compaction(self.store).shards if part.shard_id in wanted))

    @property
    def markers(self) -> list[int]:
        compacted = self.base.details.compacted
        return [compacted.get(shard_id, 0) for shard_id in self.ids]

    @property
    def fences(self) -> list[int]:
        compacted = self.base.details.compacted
        return [compacted.get(fence_id(shard_id), 0) for shard_id in self.ids]

    def damage(self, number: int) -> None:
        """Replace the data of the shard's first generation."""
        shard = Path(self.store.uri) / "_mem_wal" / str(self.ids[number])
        (file,) = next(iter(sorted(shard.glob("*_gen_1")))).glob("data/*.lance")
        file.write_bytes(b"\0" * file.stat().st_size)

    def is_whole(self, expected: list[tuple[int, str]]) -> None:
        assert self.merged() == expected
        assert self.plain() == expected
        assert self.dataset.count_rows() == len(expected)
        report = verify(self.store)
        assert report.ok, str(report)


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    return Shards(tmp_path / "table")


class TestOneCommit:
    def test_carries_rows_deletes_markers_and_fences_of_all_shards(self, shards: Shards) -> None:
        expected, before = shards.merged(), shards.dataset.version
        assert (0, "base_0") not in expected
        told: list[Progress] = []
        report = shards.compact(progress=told.append)
        assert shards.dataset.version == before + 1
        assert (shards.markers, shards.fences) == ([2] * 4, [1] * 4)
        shards.is_whole(expected)
        assert {(each.shard_id, each.step, each.through, each.rows) for each in told} == {
            (shard_id, "merged", 2, 20) for shard_id in shards.ids
        }
        # The commit is counted once, and Lance's own counts are those of all shards together.
        assert (report.commits, report.rows_inserted, report.rows_updated) == (1, 80, 0)
        assert (report.rows_deleted, report.rows_upserted, report.generations) == (1, 80, 8)
        assert [(s.commits, s.rows_upserted, s.rows_in, s.rows_inserted) for s in report.shards] == [
            (1, 20, 32, None)
        ] * 4

    def test_of_an_append_only_table(self, tmp_path: Path) -> None:
        shards = Shards(tmp_path / "table", APPEND_ONLY)
        expected, before = shards.merged(), shards.dataset.version
        report = shards.compact()
        # Rows, markers, and the removal of the tags.
        assert shards.dataset.version == before + 3
        assert shards.markers == [2] * 4
        shards.is_whole(expected)
        assert (report.commits, report.rows_inserted) == (2, 120)
        assert [each.rows_inserted for each in report.shards] == [30] * 4
        assert len(shards.dataset.get_fragments()) == 2, "the rows of all shards are in one file"

    @_TABLES
    def test_takes_as_many_shards_as_fit(self, tmp_path: Path, schema: pa.Schema) -> None:
        shards = Shards(tmp_path / "table", schema)
        expected = shards.merged()
        sizes = [part.num_bytes for part in plan_compaction(shards.store).shards]
        plan = plan_compaction(shards.store, max_commit_bytes=sizes[2] + sizes[3])
        assert [[part.shard_id for part in pack.parts] for pack in plan.packs] == [
            shards.ids[:2],
            shards.ids[2:],
        ]
        each = 1 if schema is KEYED else 2
        assert plan.commits_expected == 2 * each + (schema is APPEND_ONLY)
        assert shards.compact(plan=plan).commits == 2 * each
        shards.is_whole(expected)

    @pytest.mark.parametrize("listed", [4096, 0], ids=["listed", "as a source"])
    def test_deletes_the_keys_of_each_shard_and_no_others(
        self, shards: Shards, listed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shards.compact()
        shards.add(0, "later", 2, dead=(7, 9))
        shards.add(2, "later", 2, dead=(207, 9_999))
        shards.flush([307, 308], shard_id=shards.ids[3])
        expected = shards.merged()
        assert not {7, 9, 207, 307, 308} & {key for key, _ in expected}
        monkeypatch.setattr(keyed, "_MOST_LISTED", listed)
        report = shards.compact()
        assert (report.rows_deleted, report.commits) == (5, 1 if listed else 2)
        shards.is_whole(expected)

    def test_a_pack_that_is_larger_than_planned_is_divided_under_the_fences_of_all(
        self, shards: Shards, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = shards.merged()
        plan = plan_compaction(shards.store)
        held = []

        def look(point: str) -> None:
            if point == MERGE_POINTS[1]:
                held.append((shards.markers, shards.fences))

        real = keyed.KeyedCompaction.__init__

        def small(self: Any, *args: Any) -> None:
            real(self, *args)
            self._limit = 700

        monkeypatch.setattr(keyed.KeyedCompaction, "__init__", small)
        at_crash_points(look)
        try:
            done = execute_pack(plan.packs[0], store=shards.store)
        finally:
            at_crash_points(None)
        assert done.commits > 2
        assert held == [([0] * 4, [number + 1] * 4) for number in range(done.commits - 1)]
        assert shards.markers == [2] * 4
        shards.compact()
        shards.is_whole(expected)


class TestRivals:
    """Another compactor takes a shard of the pack between its preparation and its commit."""

    def check(self, shards: Shards, done: PackReport, expected: list[tuple[int, str]]) -> None:
        assert not done.failed
        assert done.shards[shards.ids[1]].skipped == [1, 2]
        assert not done.shards[shards.ids[1]].generations
        assert [done.shards[each].generations for each in (shards.ids[0], *shards.ids[2:])] == [[1, 2]] * 3
        assert shards.markers == [2] * 4
        shards.compact()
        shards.is_whole(expected)

    @_TABLES
    def test_the_others_go_through(self, tmp_path: Path, schema: pa.Schema, at_point: AtPoint) -> None:
        shards = Shards(tmp_path / "table", schema)
        expected, rival = shards.merged(), shards.pack(1).parts[0]
        point = READ if schema is KEYED else WRITTEN
        at_point(point, lambda: execute_shard(rival, store=shards.store))
        done = execute_pack(shards.pack(), store=shards.store)
        if schema is KEYED:
            assert (done.commits, done.retries, shards.fences) == (1, 1, [1] * 4)
        self.check(shards, done, expected)

    def test_one_that_comes_when_lance_commits_is_seen_by_the_fence(
        self, shards: Shards, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After our own look at the newest version."""
        expected, rival = shards.merged(), shards.pack(1).parts[0]
        real = MergeInsertBuilder.execute
        rivals = iter([rival])

        def execute(self: MergeInsertBuilder, *args: Any, **kwargs: Any) -> Any:
            for part in rivals:
                execute_shard(part, store=shards.store)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(MergeInsertBuilder, "execute", execute)
        done = execute_pack(shards.pack(), store=shards.store)
        assert done.commits == 1
        self.check(shards, done, expected)

    def test_a_key_that_was_deleted_since_does_not_come_back(self, shards: Shards, at_point: AtPoint) -> None:
        """The rival brought in older generations; our deletes have to see its rows."""
        rival = shards.pack(1).parts[0]
        shards.flush([105, 106], shard_id=shards.ids[1])
        expected = shards.merged()
        at_point(READ, lambda: execute_shard(rival, store=shards.store))
        done = execute_pack(shards.pack(), store=shards.store)
        assert (done.shards[shards.ids[1]].generations, done.shards[shards.ids[1]].skipped) == ([3], [1, 2])
        assert (done.commits, shards.markers, shards.fences) == (2, [2, 3, 2, 2], [1, 2, 1, 1])
        shards.compact()
        shards.is_whole(expected)

    @pytest.mark.parametrize("schema", [KEYED, APPEND_ONLY], ids=["keyed", "append only"])
    def test_two_of_the_same_pack_do_the_work_once(
        self, tmp_path: Path, schema: pa.Schema, at_point: AtPoint
    ) -> None:
        shards = Shards(tmp_path / "table", schema)
        expected, pack = shards.merged(), shards.pack()
        at_point(READ if schema is KEYED else WRITTEN, lambda: execute_pack(pack, store=shards.store))
        done = execute_pack(pack, store=shards.store)
        assert [each.skipped for each in done.shards.values()] == [[1, 2]] * 4
        assert (done.rows_inserted, shards.markers) == (0, [2] * 4)
        shards.compact()
        shards.is_whole(expected)

    def test_what_was_read_for_the_others_is_not_read_again(
        self, shards: Shards, at_point: AtPoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read: list[UUID] = []
        real = newest._read_level

        def counted(store: Any, schema: Any, wanted: Any) -> Any:
            read.append(wanted[0])
            return real(store, schema, wanted)

        pack, rival = shards.pack(), shards.pack(1).parts[0]
        monkeypatch.setattr(newest, "_read_level", counted)
        at_point(READ, lambda: (execute_shard(rival, store=shards.store), read.clear()))
        execute_pack(pack, store=shards.store)
        assert read == []


@_TABLES
def test_a_pack_that_is_killed_anywhere_is_finished_by_the_next_run(
    tmp_path: Path, schema: pa.Schema, at_point: AtPoint
) -> None:
    points = [READ, MERGE_POINTS[2]] if schema is KEYED else APPEND_POINTS
    for number, point in enumerate(points):
        shards = Shards(tmp_path / f"table{number}", schema)
        expected = shards.merged()
        at_point(point, stop)
        with pytest.raises(KilledError):
            shards.compact()
        assert shards.merged() == expected
        assert len(set(shards.markers)) == 1, "all shards of a commit, or none"
        shards.compact()
        shards.is_whole(expected)


@pytest.mark.parametrize("takes_effect", [False, True])
def test_a_commit_without_an_answer_is_neither_denied_nor_done_twice(
    shards: Shards, takes_effect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = shards.merged()
    real = MergeInsertBuilder.execute

    def lost(*args: Any, **kwargs: Any) -> Any:
        if takes_effect:
            real(*args, **kwargs)
        raise OSError("LanceError(IO): connection reset by peer (os error 104)")

    with monkeypatch.context() as patch:
        patch.setattr(MergeInsertBuilder, "execute", lost)
        if takes_effect:
            shards.compact()
        else:
            with pytest.raises(PartialWriteError) as caught:
                shards.compact()
            assert set(caught.value.failed) == set(shards.ids)
    shards.compact()
    shards.is_whole(expected)


class TestDamage:
    @_TABLES
    @pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
    def test_a_shard_that_cannot_be_read_does_not_stop_the_others(
        self, tmp_path: Path, schema: pa.Schema, small: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not small:
            monkeypatch.setattr(newest, "_SMALL_BYTES", 0)
        shards = Shards(tmp_path / "table", schema)
        plan = plan_compaction(shards.store)
        shards.damage(2)
        with pytest.raises(PartialWriteError) as caught:
            shards.compact(plan=plan)
        assert set(caught.value.failed) == {shards.ids[2]}
        each = 20 if schema is KEYED else 30
        assert caught.value.written == {shards.ids[number]: each for number in (0, 1, 3)}
        assert shards.markers == [2, 2, 0, 2]

    def test_rows_that_turn_out_to_be_unreadable_after_their_keys(
        self, shards: Shards, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(newest, "_SMALL_BYTES", 0)
        real = newest._rows

        def rows_of(table: Any, *args: Any) -> Any:
            if table.shard_id == shards.ids[2]:
                raise OSError("a bad sector")
            return real(table, *args)

        expected = shards.merged()
        with monkeypatch.context() as patch:
            patch.setattr(newest, "_rows", rows_of)
            with pytest.raises(PartialWriteError, match="a bad sector") as caught:
                shards.compact()
        assert set(caught.value.failed) == {shards.ids[2]}
        assert (shards.markers, shards.merged()) == ([2, 2, 0, 2], expected)
        shards.compact()
        shards.is_whole(expected)

    def test_a_key_in_two_shards_of_a_pack_is_not_inserted_twice(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nobody routes rows so; Lance inserts a key that is new to the table as often as it comes."""
        site = Site(tmp_path / "table")
        one, other, third = (UUID(int=number) for number in (1, 2, 3))
        site.flush(rows(0, 5, prefix="one"), shard_id=one)
        site.flush(rows(3, 5, prefix="other"), [0], shard_id=other)
        site.flush(rows(100, 2, prefix="third"), shard_id=third)
        parts = plan_compaction(site.store).shards
        done = execute_pack(Pack(tuple(sorted(parts, key=lambda p: p.shard_id))), store=site.store)
        assert (done.commits, done.failed) == (2, {})
        # As if each shard had a commit of its own, in this order.
        assert site.plain() == sorted(
            [*named([1, 2], "one"), *named(range(3, 8), "other"), *named([100, 101], "third")]
        )
        assert "run verify" in caplog.text
        assert site.base.details.compacted.keys() >= {one, other, third}


def test_many_small_shards_make_few_versions_and_each_sstable_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = Shards(tmp_path / "table", count=12)
    expected = shards.merged()
    scans = []
    real = newest.SsTable.scan

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        scans.append(self.uri)
        return real(self, *args, **kwargs)

    plan = plan_compaction(shards.store)
    before = lance.dataset(shards.store.uri).version
    monkeypatch.setattr(newest.SsTable, "scan", counted)
    shards.compact(plan=plan)
    assert len(scans) == len(set(scans)) == 24
    assert shards.dataset.version == before + 1
    shards.is_whole(expected)
