"""Checkpoints stay readable through all that happens to a table, and keep no more than they need."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import lancewal
from lancewal.base import BaseTable
from lancewal.errors import ConflictError, InvalidInputError, StorageError
from lancewal.format import ShardManifest
from lancewal.maintenance import Kind, Resource, at_crash_points, checkpoints, collect_garbage, gc
from lancewal.maintenance.checkpoints import _ATTEMPTS, _Record, create_checkpoint, drop_checkpoint
from lancewal.reader import ShardPlace, TableState
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import ObjectStore, layout
from lancewal.table import Table
from tests.maintenance.support import (
    NOTHING_KEPT,
    Site,
    collect_later,
    directories,
    named,
    pairs,
    positions,
)
from tests.patience import PATIENCE, wait_until
from tests.tables import KEYED, rows, writable_table

AtPoint = Callable[[str, Callable[[], object]], None]

MAKING = (
    "checkpoint: announced",
    "checkpoint: the state is read",
    "checkpoint: a version is tagged",
    "checkpoint: tagged",
    "checkpoint: recorded",
)
DROPPING = ("checkpoint: untagged", "checkpoint: not announced")


class Killed(BaseException):
    """The process ends here."""


def killed_at(point: str, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """``call`` in a process that dies at a point: it withdraws nothing."""

    def die(reached: str) -> None:
        if reached == point:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "_withdraw", lambda store, place: None)
        at_crash_points(die)
        try:
            with pytest.raises(Killed):
                call()
        finally:
            at_crash_points(None)


def clean_up(uri: str) -> None:
    """Lance's own cleanup, of all that it may remove."""
    lance.dataset(uri).cleanup_old_versions(
        timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
    )


def tags(store: ObjectStore) -> list[str]:
    return sorted(lance.dataset(store.uri, storage_options=dict(store.storage_options) or None).tags.list())


def left_of_checkpoints(store: ObjectStore) -> list[str]:
    return [info.path for info in store.list(layout.CHECKPOINTS_DIR)]


def seen(table: Table, name: str) -> list[tuple[Any, Any]]:
    return pairs(table.at(name).scan().to_table())


def opened(site: Site) -> Table:
    return Table.open(site.store.uri, store=site.store)


@pytest.fixture
def mixed(site: Site) -> Site:
    """A part in the base, a part in SSTables, a part in the log of a writer that died."""
    site.compact()
    site.flush(rows(40, 5, prefix="flushed"), [11])
    writer = site.writer()
    writer.put(rows(42, 6, prefix="logged"))
    writer.delete([12])
    writer._finalizer()
    return site


MIXED = sorted(
    [
        *named([i for i in range(5) if i not in (0, 1, 2, 3, 4)], "name"),
        *named([*range(10)], "g0"),
        *named([i for i in range(10, 20) if i not in (11, 12)], "g1"),
        *named([*range(20, 32)], "g2"),
        *named([40, 41], "flushed"),
        *named([*range(42, 48)], "logged"),
    ]
)


def grow(site: Site) -> None:
    """Everything changes: rows, SSTables, base version, its fragments; then all garbage goes."""
    site.flush(rows(0, 60, prefix="later"))
    site.compact(compact_files=True)
    site.flush(rows(5, 3, prefix="even later"), [41])
    site.compact(compact_files=True)
    collect_later(site.store, retention=NOTHING_KEPT)
    clean_up(site.store.uri)


class TestReads:
    def test_a_checkpoint_shows_its_rows_whatever_comes_after(self, mixed: Site) -> None:
        table = opened(mixed)
        made = table.checkpoint("before")
        assert (made.name, made.version, made.expires) == ("before", mixed.base.version, None)
        assert seen(table, "before") == MIXED == mixed.merged()
        grow(mixed)
        view = opened(mixed).at("before")
        assert pairs(view.scan().to_table()) == MIXED
        assert view.count_rows() == len(MIXED)
        assert view.count_rows("name LIKE 'logged%'") == 6
        assert view.lookup(12) is None
        assert view.lookup(43) == {"id": 43, "name": "logged_43"}
        assert view.lookup([5, 11, 40]).found.tolist() == [True, False, True]
        assert mixed.merged() != MIXED
        assert opened(mixed).lookup(43) == {"id": 43, "name": "later_43"}
        assert mixed.verify().ok

    def test_the_searches_of_a_checkpoint_find_its_rows(self, tmp_path: Path) -> None:
        schema = pa.schema([*KEYED, pa.field("v", pa.list_(pa.float32(), 2))])

        def some(first: int, count: int, word: str) -> pa.RecordBatch:
            ids = list(range(first, first + count))
            vectors = [[float(i), 0.0] for i in ids]
            return pa.RecordBatch.from_pydict(
                {"id": ids, "name": [f"{word} n{i}" for i in ids], "v": vectors}, schema=schema
            )

        table = writable_table(tmp_path / "t", schema, pa.Table.from_batches([some(0, 20, "old")]))
        lance.dataset(table.uri).create_scalar_index("name", "INVERTED")
        with table.writer() as writer:
            writer.put(some(10, 20, "flushed"))
        with table.writer() as writer:
            writer.put(some(25, 10, "logged"))
            table.checkpoint("now")

            def results(view: lancewal.TableView) -> list[list[int]]:
                near = view.vector_search("v", [26.2, 0.0], 3)
                words = view.full_text_search("name", "logged", 20)
                both = view.hybrid_search("v", [11.0, 0.0], "name", "n11", 2)
                return [near["id"].to_pylist(), sorted(words["id"].to_pylist()), both["id"].to_pylist()]

            expected = results(table)
            assert expected[:2] == [[26, 27, 25], list(range(25, 35))]
            writer.put(some(0, 50, "logged"))
        table.compact(compact_files=True)
        collect_later(ObjectStore.from_uri(table.uri), retention=NOTHING_KEPT)
        clean_up(table.uri)
        assert results(lancewal.open(table.uri).at("now")) == expected
        assert len(table.full_text_search("name", "logged", 99)) == 50

    def test_it_has_the_columns_of_its_time(self, mixed: Site) -> None:
        table = opened(mixed)
        table.checkpoint("narrow")
        mixed.dataset.add_columns(pa.field("length", pa.int64()))
        grow(mixed)
        assert table.at("narrow").schema.names == ["id", "name"]
        assert opened(mixed).schema.names == ["id", "name", "length"]
        assert seen(table, "narrow") == MIXED

    def test_on_object_storage(self, s3_store: ObjectStore) -> None:
        site = Site(s3_store.uri, store=s3_store)
        site.flush(rows(0, 10))
        site.writer().put(rows(5, 10, prefix="logged"))
        table = opened(site)
        table.checkpoint("far")
        expected = seen(table, "far")
        site.flush(rows(0, 30, prefix="later"))
        site.compact()
        site.dataset.cleanup_old_versions(timedelta(0), error_if_tagged_old_versions=False)
        collect_later(site.store, retention=NOTHING_KEPT)
        assert (
            seen(opened(site), "far")
            == expected
            == sorted(named([*range(5)], "name") + named([*range(5, 15)], "logged"))
        )
        table.drop_checkpoint("far")
        assert (tags(site.store), left_of_checkpoints(site.store)) == ([], [])


class TestCollection:
    def test_exactly_what_it_needs_is_kept_until_it_is_dropped(self, mixed: Site) -> None:
        table = opened(mixed)
        place = table._reader.state().shards[0]
        table.checkpoint("kept")
        grow(mixed)
        assert directories(mixed) == [4]
        assert positions(mixed)[:-1] == list(place.wal_range)
        report = collect_later(mixed.store, retention=NOTHING_KEPT)
        assert {each.reason for each in report.kept} == {"the checkpoint 'kept' needs it"}
        table.drop_checkpoint("kept")
        assert tags(mixed.store) == []
        collect_later(mixed.store, retention=NOTHING_KEPT)
        assert (directories(mixed), len(positions(mixed))) == ([], 1)
        clean_up(mixed.store.uri)
        assert len(mixed.dataset.versions()) == 1

    def test_two_checkpoints_keep_what_either_needs(self, mixed: Site) -> None:
        table = opened(mixed)
        table.checkpoint("first")
        mixed.flush(rows(100, 2))
        table.checkpoint("second")
        expected = seen(table, "second")
        grow(mixed)
        assert directories(mixed) == [4, 5]
        table.drop_checkpoint("first")
        collect_later(mixed.store, retention=NOTHING_KEPT)
        assert (seen(table, "second"), directories(mixed)) == (expected, [4, 5])

    def test_an_age_ends_it(self, mixed: Site) -> None:
        table = opened(mixed)
        made = table.checkpoint("month", keep=timedelta(days=30))
        assert made.expires == made.created + timedelta(days=30)
        assert table.checkpoints() == [made]
        for days, left in ((29, ["month"]), (31, [])):
            collect_garbage(mixed.store, now=datetime.now(UTC) + timedelta(days=days), dry_run=True)
            collect_garbage(mixed.store, now=datetime.now(UTC) + timedelta(days=days))
            assert [each.name for each in table.checkpoints()] == left
        assert (tags(mixed.store), left_of_checkpoints(mixed.store)) == ([], [])

    def test_a_dry_run_ends_none(self, mixed: Site) -> None:
        opened(mixed).checkpoint("short", keep=timedelta(seconds=1))
        collect_garbage(mixed.store, now=datetime.now(UTC) + timedelta(days=1), dry_run=True)
        assert len(opened(mixed).checkpoints()) == 1

    def test_the_change_feed_goes_on_after_what_is_kept(self, mixed: Site) -> None:
        """Entries of a checkpoint lie below a gap: nobody can follow from there, nor needs to."""
        table = opened(mixed)
        table.checkpoint("kept")
        grow(mixed)
        assert positions(mixed)[0] < positions(mixed)[-1] - 1
        assert table.feed().earliest()[mixed.shard_id] == positions(mixed)[-1]
        with pytest.raises(lancewal.errors.WalTruncatedError):
            list(table.changes({mixed.shard_id: positions(mixed)[0]}))
        mixed.flush(rows(900, 1))
        assert table.lookup(900) is not None

    def test_no_gap_comes_above_the_position_where_lances_writers_begin(self, mixed: Site) -> None:
        """They look from there up to the first that is missing, and would take it for the end of the log."""
        opened(mixed).checkpoint("kept")
        needed = opened(mixed)._reader.state().shards[0].wal_range
        mixed.flush(rows(0, 3))
        manifests = ShardManifestStore(mixed.store, mixed.shard_id)
        mixed.flush(rows(0, 3))
        manifests.commit_update(None, lambda m: replace(m, wal_entry_position_last_seen=needed[0]))
        before = positions(mixed)
        collect_later(mixed.store, retention=NOTHING_KEPT)
        assert positions(mixed) == [each for each in before if each >= needed[0]]


class TestMaking:
    @pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a b", "a..b", "ö", "x" * 101, 7])
    def test_names_that_cannot_be_files_or_tags_are_refused(self, site: Site, name: Any) -> None:
        with pytest.raises(InvalidInputError, match="name of a checkpoint"):
            opened(site).checkpoint(name)
        assert left_of_checkpoints(site.store) == []

    @pytest.mark.parametrize("keep", [timedelta(0), 30, timedelta(days=-1), timedelta.max])
    def test_an_age_that_is_none_is_refused(self, site: Site, keep: Any) -> None:
        with pytest.raises(InvalidInputError, match="keep"):
            opened(site).checkpoint("one", keep=keep)

    def test_a_name_is_given_once(self, site: Site) -> None:
        table = opened(site)
        made = table.checkpoint("v1.0-rc_1")
        with pytest.raises(InvalidInputError, match="already"):
            table.checkpoint("v1.0-rc_1")
        assert table.checkpoints() == [made]
        table.drop_checkpoint("v1.0-rc_1")
        site.flush(rows(500, 1))
        table.checkpoint("v1.0-rc_1")
        assert (500, "name_500") in seen(table, "v1.0-rc_1")

    def test_of_two_that_make_one_name_not_both_succeed(self, site: Site, at_point: AtPoint) -> None:
        def rival() -> None:
            with pytest.raises(ConflictError, match="another process"):
                create_checkpoint(site.store, "one")

        at_point("checkpoint: announced", rival)
        create_checkpoint(site.store, "one")
        assert len(opened(site).checkpoints()) == 1

    def test_all_that_made_one_name_at_a_time_gave_way(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each saw the announcements of the others."""
        announced, stored = threading.Barrier(4), checkpoints._stored
        looked, made, refused = set[threading.Thread](), list[str](), list[Exception]()

        def after_all(store: ObjectStore) -> Any:
            this = threading.current_thread()
            if this in makers and this not in looked:
                looked.add(this)
                announced.wait(PATIENCE)
            return stored(store)

        def make() -> None:
            try:
                made.append(create_checkpoint(site.store, "one").name)
            except (ConflictError, InvalidInputError) as error:
                refused.append(error)

        monkeypatch.setattr(checkpoints, "_stored", after_all)
        monkeypatch.setattr(checkpoints, "_LOOKS", (0.05,) * int(PATIENCE * 20))
        makers = [threading.Thread(target=make) for _ in range(4)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
        assert (made, len(refused)) == (["one"], 3)
        assert len(opened(site).checkpoints()) == len(tags(site.store)) == 1

    def test_an_unknown_name_is_told_with_those_that_there_are(self, site: Site) -> None:
        table = opened(site)
        table.checkpoint("one")
        for call in (table.at, table.drop_checkpoint):
            with pytest.raises(InvalidInputError, match=r"no checkpoint 'two'; its checkpoints are one"):
                call("two")

    def test_rows_that_are_not_durable_are_not_in_it(self, tmp_path: Path) -> None:
        table = writable_table(tmp_path / "t")
        with table.writer(durable_write=False, max_wal_flush_interval=None) as writer:
            writer.put(rows(0, 4))
            table.checkpoint("durable")
            before = table.at("durable").count_rows()
            assert (table.count_rows(), before) == (4, 0)

    def test_a_backup_has_none(self, mixed: Site, tmp_path: Path) -> None:
        table = opened(mixed)
        table.checkpoint("here")
        table.backup(tmp_path / "backup")
        restored = lancewal.restore(str(tmp_path / "backup"), str(tmp_path / "restored"))
        assert restored.checkpoints() == []
        assert pairs(restored.scan().to_table()) == MIXED


class TestVerify:
    def test_checkpoints_are_counted_and_have_what_they_need(self, mixed: Site) -> None:
        table = opened(mixed)
        table.checkpoint("one")
        mixed.compact()
        report = table.verify()
        assert (report.ok, report.checked["checkpoints"]) == (True, 1)

    @pytest.mark.parametrize("what", ["SSTables", "log", "base version"])
    def test_files_that_a_checkpoint_lacks_are_told(self, mixed: Site, what: str) -> None:
        table = opened(mixed)
        table.checkpoint("one")
        kept = checkpoints.checkpoint_state(mixed.store, "one")
        mixed.compact()
        for place in kept.shards:
            shard = Path(table.uri) / layout.shard_dir(place.shard_id)
            for entry in place.manifest.sstables if what == "SSTables" else ():
                shutil.rmtree(shard / entry.path)
            for position in place.wal_range if what == "log" else ():
                (Path(table.uri) / layout.wal_entry(place.shard_id, position)).unlink()
        if what == "base version":
            for tag in tags(mixed.store):
                lance.dataset(table.uri).tags.delete(tag)
            clean_up(table.uri)
        found = [each for each in table.verify(deep=False).findings if "checkpoint" in each.kind]
        assert [(each.kind, each.subject) for each in found] == [(Kind.CHECKPOINT_INCOMPLETE, "one")]
        table.drop_checkpoint("one")
        assert not [each for each in table.verify(deep=False).findings if "checkpoint" in each.kind]

    def test_a_damaged_record_is_told(self, mixed: Site) -> None:
        table = opened(mixed)
        table.checkpoint("one")
        [record] = [path for path in left_of_checkpoints(mixed.store) if path.endswith(".json")]
        mixed.store.put(record, b"{}")
        [found] = [each for each in table.verify(deep=False).findings if "checkpoint" in each.kind]
        assert (found.kind, found.subject) == (Kind.CHECKPOINT_UNREADABLE, "one")
        assert table.status().checkpoints[0].checkpoint.problem is not None


class TestRaces:
    """One collector and one maker, each stopped where the other does the most harm."""

    def test_a_collector_that_reads_after_the_maker_keeps_all(self, mixed: Site, at_point: AtPoint) -> None:
        def rest() -> None:
            mixed.flush(rows(0, 60, prefix="later"))
            mixed.compact()
            report = collect_garbage(mixed.store, retention=NOTHING_KEPT)
            assert not report.counts()["wal_entries"] + report.counts()["sstables"]
            assert "the checkpoint 'one' is being made" in {each.reason for each in report.kept}

        at_point("checkpoint: tagged", rest)
        opened(mixed).checkpoint("one")
        assert seen(opened(mixed), "one") == MIXED
        grow(mixed)
        assert seen(opened(mixed), "one") == MIXED

    @pytest.mark.parametrize("point", MAKING)
    def test_a_maker_that_stands_still_for_hours(self, mixed: Site, at_point: AtPoint, point: str) -> None:
        """It is taken for dead; it makes a checkpoint that is whole, or none, and says which."""
        at_point(point, lambda: grow(mixed))
        try:
            opened(mixed).checkpoint("slow")
        except ConflictError:
            assert point != "checkpoint: recorded"
            assert (tags(mixed.store), left_of_checkpoints(mixed.store)) == ([], [])
            return
        assert point == "checkpoint: recorded"
        assert seen(opened(mixed), "slow") == MIXED

    def test_a_collector_that_stands_still_before_it_deletes(self, mixed: Site, at_point: AtPoint) -> None:
        """It saw no checkpoint; what it deletes is garbage for those that came since."""
        mixed.flush(rows(200, 3))
        mixed.compact()
        expected: list[Any] = []

        def make() -> None:
            opened(mixed).checkpoint("one")
            expected.extend(seen(opened(mixed), "one"))
            mixed.flush(rows(0, 300, prefix="later"))
            mixed.compact(compact_files=True)

        at_point("collect: nothing is deleted yet", make)
        assert collect_later(mixed.store, retention=NOTHING_KEPT).counts()["sstables"]
        assert seen(opened(mixed), "one") == expected

    def test_a_collector_looks_for_checkpoints_after_it_has_read_the_table(
        self, mixed: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that came before its look at the table has to be among those that it keeps files for."""
        read = gc.open_base
        made: list[lancewal.Checkpoint] = []

        def made_before(store: ObjectStore) -> BaseTable:
            if not made:
                made.append(opened(mixed).checkpoint("one"))
                mixed.flush(rows(0, 60, prefix="later"))
                mixed.compact()
            return read(store)

        monkeypatch.setattr(gc, "open_base", made_before)
        collect_garbage(mixed.store, retention=NOTHING_KEPT)
        assert seen(opened(mixed), "one") == MIXED

    def test_a_maker_that_ends_just_before_it_is_revoked(
        self, mixed: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The collector had seen no record when it decided; what was returned stays all the same."""
        tagged, go_on = threading.Event(), threading.Event()

        def wait(point: str) -> None:
            if point == "checkpoint: tagged":
                at_crash_points(None)
                tagged.set()
                assert go_on.wait(PATIENCE)

        at_crash_points(wait)
        made: list[lancewal.Checkpoint] = []
        maker = threading.Thread(target=lambda: made.append(create_checkpoint(mixed.store, "one")))
        maker.start()
        assert tagged.wait(PATIENCE)
        revoke = checkpoints._Keeper._revoked

        def revoke_later(self: checkpoints._Keeper, place: Any) -> Any:
            go_on.set()
            maker.join()
            return revoke(self, place)

        monkeypatch.setattr(checkpoints._Keeper, "_revoked", revoke_later)
        grow(mixed)
        assert [each.name for each in made] == ["one"]
        assert seen(opened(mixed), "one") == MIXED

    def test_lances_cleanup_between_state_and_tag(self, mixed: Site, at_point: AtPoint) -> None:
        def commit() -> None:
            mixed.compact()
            clean_up(mixed.store.uri)

        at_point("checkpoint: the state is read", commit)
        made = opened(mixed).checkpoint("one")
        assert made.version == mixed.base.version
        assert seen(opened(mixed), "one") == MIXED
        assert len(tags(mixed.store)) == 1

    def test_a_cleanup_that_did_not_see_the_tag(self, mixed: Site, at_point: AtPoint) -> None:
        """It knows a newer version only if the maker finds it too, and begins again."""
        at_point("checkpoint: a version is tagged", lambda: mixed.compact())
        made = opened(mixed).checkpoint("one")
        assert made.version == mixed.base.version
        (tag,) = lance.dataset(mixed.store.uri).tags.list().values()
        assert tag["version"] == made.version

    def test_a_base_that_is_committed_to_all_the_time(self, site: Site) -> None:
        commits = 0

        def commit(point: str) -> None:
            nonlocal commits
            if point == "checkpoint: a version is tagged":
                commits += 1
                site.dataset.update_config({"commits": str(commits)})

        at_crash_points(commit)
        try:
            with pytest.raises(ConflictError, match="less is going on"):
                opened(site).checkpoint("one")
        finally:
            at_crash_points(None)
        assert commits == _ATTEMPTS
        assert (tags(site.store), left_of_checkpoints(site.store)) == ([], [])


class TestDeaths:
    @pytest.mark.parametrize("point", MAKING)
    def test_a_maker_that_died_holds_up_collection_for_an_hour(
        self, mixed: Site, monkeypatch: pytest.MonkeyPatch, point: str
    ) -> None:
        killed_at(point, lambda: create_checkpoint(mixed.store, "dead"), monkeypatch)
        table = opened(mixed)
        if point == "checkpoint: recorded":
            grow(mixed)
            assert seen(table, "dead") == MIXED
            return
        assert table.checkpoints() == []
        with pytest.raises(InvalidInputError, match="no checkpoint"):
            table.at("dead")
        with pytest.raises(ConflictError, match="another process is making"):
            table.checkpoint("dead")
        mixed.flush(rows(0, 5))
        mixed.compact()
        young = collect_garbage(mixed.store, retention=NOTHING_KEPT)
        assert not young.counts()["sstables"] + young.counts()["wal_entries"]
        old = collect_garbage(mixed.store, retention=NOTHING_KEPT, now=datetime.now(UTC) + timedelta(hours=2))
        assert old.counts()["sstables"]
        assert old.counts()["wal_entries"]
        assert (tags(mixed.store), left_of_checkpoints(mixed.store)) == ([], [])
        table.checkpoint("dead")

    def test_the_tag_of_a_maker_that_was_taken_for_dead_and_then_died_goes(
        self, mixed: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A collection removes all that is known of the checkpoint, and only then its maker sets the tag."""

        def read_late(*args: Any) -> Any:
            collect_garbage(mixed.store, now=datetime.now(UTC) + timedelta(hours=2))
            return tagged_state(*args)

        tagged_state = checkpoints._tagged_state
        with monkeypatch.context() as patched:
            patched.setattr(checkpoints, "_tagged_state", read_late)
            killed_at("checkpoint: tagged", lambda: create_checkpoint(mixed.store, "late"), monkeypatch)
        assert (len(tags(mixed.store)), left_of_checkpoints(mixed.store)) == (1, [])
        kept = opened(mixed).checkpoint("kept")
        collect_garbage(mixed.store, dry_run=True)
        assert len(tags(mixed.store)) == 2
        collect_garbage(mixed.store)
        assert [tag.startswith("lancewal-kept-") for tag in tags(mixed.store)] == [True]
        assert seen(opened(mixed), kept.name) == MIXED

    def test_a_dead_one_can_be_dropped_at_once(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        killed_at("checkpoint: tagged", lambda: create_checkpoint(site.store, "dead"), monkeypatch)
        opened(site).drop_checkpoint("dead")
        assert (tags(site.store), left_of_checkpoints(site.store)) == ([], [])

    @pytest.mark.parametrize("point", DROPPING)
    @pytest.mark.parametrize("by", ["the next drop", "a collection"])
    def test_a_drop_that_died_is_ended(
        self, mixed: Site, monkeypatch: pytest.MonkeyPatch, point: str, by: str
    ) -> None:
        opened(mixed).checkpoint("one", keep=timedelta(days=1))
        killed_at(point, lambda: drop_checkpoint(mixed.store, "one"), monkeypatch)
        if by == "a collection":
            collect_later(mixed.store, retention=NOTHING_KEPT)
        elif point == "checkpoint: untagged":
            opened(mixed).drop_checkpoint("one")
        else:
            opened(mixed).checkpoint("one")
            opened(mixed).drop_checkpoint("one")
            collect_garbage(mixed.store)
        assert (tags(mixed.store), left_of_checkpoints(mixed.store)) == ([], [])


class TestDamage:
    def test_a_damaged_record_is_told_and_keeps_everything(self, mixed: Site) -> None:
        table = opened(mixed)
        table.checkpoint("one")
        (path,) = [path for path in left_of_checkpoints(mixed.store) if path.endswith(".json")]
        mixed.store.put(path, mixed.store.get(path).replace(b"1", b"2", 1))
        with pytest.raises(StorageError, match="damaged"):
            table.at("one")
        (shown,) = table.checkpoints()
        assert shown.name == "one"
        assert "damaged" in str(shown.problem)
        mixed.flush(rows(0, 60, prefix="later"))
        mixed.compact()
        report = collect_later(mixed.store, retention=NOTHING_KEPT)
        kinds = {each.resource for each in report.collected}
        assert not kinds & {Resource.SSTABLES, Resource.WAL_ENTRIES, Resource.ORPHANS}
        assert any("cannot be read, drop it" in each.reason for each in report.kept)
        table.drop_checkpoint("one")
        assert collect_later(mixed.store, retention=NOTHING_KEPT).counts()["sstables"]

    def test_a_record_of_a_later_release_is_kept(self, mixed: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as later:
            later.setattr(checkpoints, "_FORMAT", 2)
            opened(mixed).checkpoint("one")
        with pytest.raises(StorageError, match="newer lancewal"):
            opened(mixed).at("one")
        mixed.compact()
        assert not collect_later(mixed.store, retention=NOTHING_KEPT).counts()["sstables"]

    def test_another_table_at_the_same_place_is_noticed(self, tmp_path: Path) -> None:
        table = writable_table(tmp_path / "t", data=pa.Table.from_batches([rows(0, 3)]))
        table.checkpoint("one")
        records = {path: table._store.get(path) for path in left_of_checkpoints(table._store)}
        shutil.rmtree(tmp_path / "t")
        again = writable_table(tmp_path / "t", data=pa.Table.from_batches([rows(0, 9)]))
        for path, data in records.items():
            again._store.put(path, data)
        with pytest.raises(StorageError, match="another table"):
            again.at("one")

    @given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
    @settings(max_examples=200, deadline=None)
    def test_every_flipped_bit_of_a_record_is_noticed(self, place: int, bit: int) -> None:
        manifest = ShardManifest(version=3, writer_epoch=2, shard_id=UUID(int=7))
        record = _Record(TableState("u", 4, (ShardPlace(manifest, 9),), 5), timedelta(days=2))
        data = bytearray(record.encode())
        assert _Record.decode(bytes(data), "p", "u") == record
        data[place % len(data)] ^= 1 << bit
        with pytest.raises(StorageError):
            _Record.decode(bytes(data), "p", "u")


class Checkpoints(RuleBasedStateMachine):
    """A table and its checkpoints beside dictionaries."""

    made = Bundle("made")

    @initialize()
    def begin(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.site = Site(Path(self._directory.name) / "t")
        self.table = opened(self.site)
        self.rows: dict[int, str] = {}
        self.kept: dict[str, dict[int, str]] = {}
        self.writer = self.site.writer()
        self.number = 0

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            self.writer.close()
            self._directory.cleanup()

    @rule(first=st.integers(0, 12), count=st.integers(1, 6))
    def put(self, first: int, count: int) -> None:
        self.number += 1
        self.writer.put(rows(first, count, prefix=f"v{self.number}"))
        self.rows |= {i: f"v{self.number}_{i}" for i in range(first, first + count)}

    @rule(key=st.integers(0, 18))
    def delete(self, key: int) -> None:
        self.writer.delete([key])
        self.rows.pop(key, None)

    @rule()
    def flush(self) -> None:
        self.writer.close()
        self.writer = self.site.writer()

    @rule(files=st.booleans())
    def compact(self, files: bool) -> None:
        self.site.compact(compact_files=files)

    @rule()
    def collect(self) -> None:
        collect_later(self.site.store, retention=NOTHING_KEPT)

    @rule()
    def clean_up(self) -> None:
        clean_up(self.site.store.uri)

    @rule(target=made, name=st.sampled_from("abc"))
    def checkpoint(self, name: str) -> str:
        if name in self.kept:
            with pytest.raises(InvalidInputError):
                self.table.checkpoint(name)
        else:
            self.table.checkpoint(name)
            self.kept[name] = dict(self.rows)
        return name

    @rule(name=made)
    def drop(self, name: str) -> None:
        if self.kept.pop(name, None) is not None:
            self.table.drop_checkpoint(name)

    @invariant()
    def every_checkpoint_has_its_rows(self) -> None:
        if not hasattr(self, "kept"):
            return
        assert sorted(each.name for each in self.table.checkpoints()) == sorted(self.kept)
        for name, expected in self.kept.items():
            view = self.table.at(name)
            assert dict(pairs(view.scan().to_table())) == expected
            keys = [0, 5, 17]
            assert view.lookup(keys).found.tolist() == [key in expected for key in keys]


def test_checkpoints_have_their_rows_in_any_order_of_events() -> None:
    run_state_machine_as_test(
        Checkpoints,
        settings=settings(
            max_examples=10,
            stateful_step_count=16,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )


class Load:
    """A writer that counts every key up, and maintenance beside it, until it is stopped."""

    KEYS = 20

    def __init__(self, table: Table) -> None:
        self.table = table
        self.acknowledged = 0
        self.sent = 0
        self.rounds = 0
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(call,)) for call in (self._write, self._tend)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    @property
    def failed(self) -> bool:
        return bool(self._failures)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self._failures.append(error)

    def _write(self) -> None:
        with self.table.writer() as writer:
            while not self._stop.is_set():
                self.sent += 1
                writer.put(
                    pa.table(
                        {"id": list(range(self.KEYS)), "name": [str(self.sent)] * self.KEYS}, schema=KEYED
                    )
                )
                self.acknowledged = self.sent

    def _tend(self) -> None:
        store = ObjectStore.from_uri(self.table.uri, fsync=False)
        while not self._stop.is_set():
            self.table.flush()
            self.table.compact(compact_files=self.rounds % 2 == 0)
            collect_garbage(store, retention=NOTHING_KEPT)
            lance.dataset(self.table.uri).cleanup_old_versions(
                timedelta(seconds=1), error_if_tagged_old_versions=False
            )
            self.rounds += 1


def test_a_checkpoint_taken_under_load_reads_the_same_rows_until_it_is_dropped(tmp_path: Path) -> None:
    table = writable_table(tmp_path / "t")
    taken: dict[str, list[tuple[Any, Any]]] = {}
    with Load(table) as load:
        for number in range(3):
            wait_until(lambda number=number: load.rounds > number or load.failed, "a round")
            before = load.acknowledged
            table.checkpoint(f"c{number}")
            after = load.sent
            found = seen(table, f"c{number}")
            assert [key for key, _ in found] == list(range(load.KEYS))
            assert all(before <= int(value) <= after for _, value in found)
            taken[f"c{number}"] = found
        wait_until(lambda rounds=load.rounds: load.rounds > rounds + 1 or load.failed, "two more rounds")
    table.flush()
    table.compact(compact_files=True)
    store = ObjectStore.from_uri(table.uri, fsync=False)
    collect_later(store, retention=NOTHING_KEPT)
    clean_up(table.uri)
    assert {name: seen(lancewal.open(table.uri), name) for name in taken} == taken
    assert table.verify().ok
    with_checkpoints = len(store.list(layout.MEM_WAL_DIR))
    for name in taken:
        table.drop_checkpoint(name)
    collect_later(store, retention=NOTHING_KEPT)
    clean_up(table.uri)
    assert len(store.list(layout.MEM_WAL_DIR)) < with_checkpoints
    assert len(lance.dataset(table.uri).versions()) == 1
    for info in table.shards():
        assert store.list_directories(layout.shard_dir(info.shard_id)) == ["manifest", "wal"]
        assert len(store.list(layout.wal_dir(info.shard_id))) == 1
    assert table.count_rows() == load.KEYS
