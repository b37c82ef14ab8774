"""Each row exactly once, whatever fails, stops or runs twice."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lancewal
from lancewal.errors import InvalidInputError, LanceWalError
from lancewal.ingest import Ingestion, LocalParts, SourceFile, find_files, watch
from lancewal.ingest.journal import INGEST_DIR, Journal
from lancewal.storage import ObjectStore
from tests.faults import FaultyStore
from tests.tables import APPEND_ONLY, KEYED, ids, writable_table, write_parquet


@pytest.fixture
def table(tmp_path: Path) -> lancewal.Table:
    return writable_table(tmp_path / "t", APPEND_ONLY)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    where = tmp_path / "in"
    where.mkdir()
    for number in range(3):
        write_parquet(where / f"{number}.parquet", number * 20, 20)
    return where


def job(
    table: lancewal.Table, store: ObjectStore | None = None, *, kind: str = "wal", **options: object
) -> Ingestion:
    """``kind``: one WAL entry a file; SSTables; or several parts a file, as WAL entries."""
    store = store or ObjectStore.from_uri(table.uri, fsync=False)
    limits = {"wal": {}, "sstables": {"wal_part_bytes": 0}, "parts": {"max_part_bytes": 1}}[kind]
    return Ingestion(table.uri, store=store, parts=LocalParts(store, **limits), **options)  # type: ignore[arg-type]


KINDS = pytest.mark.parametrize("kind", ["wal", "sstables", "parts"])


@KINDS
def test_files_go_in_once(table: lancewal.Table, folder: Path, kind: str) -> None:
    files = find_files([folder])
    report = job(table, kind=kind).run(files)
    assert (report.files, report.rows, report.skipped) == (3, 60, 0)
    report = job(table, kind=kind).run(files)
    assert (report.files, report.rows, report.skipped) == (0, 0, 3)
    assert ids(table.scan().to_table()) == list(range(60))


@KINDS
@pytest.mark.parametrize("lost_reply", [False, True], ids=["failed", "reply lost"])
def test_a_run_that_fails_at_any_storage_call_is_finished_by_the_next(
    tmp_path: Path, folder: Path, kind: str, lost_reply: bool
) -> None:
    """Without a key a row that is written twice shows."""
    for nth in itertools.count(1, 5):
        table = writable_table(tmp_path / f"t{nth}", APPEND_ONLY)
        store = FaultyStore(ObjectStore.from_uri(table.uri, fsync=False))
        store.faults.fail("put_if_absent", nth=nth, after=lost_reply, times=2)
        store.faults.fail("put", nth=nth, after=lost_reply, times=1)
        try:
            job(table, store, kind=kind).run(find_files([folder]))
            failed = False
        except LanceWalError:
            failed = True
        job(table, kind=kind).run(find_files([folder]))
        assert ids(table.scan().to_table()) == list(range(60)), f"call {nth}"
        assert _feed(table) == list(range(60))
        if not failed:
            break
    assert nth > 5


def _feed(table: lancewal.Table) -> list[int]:
    from lancewal.publish.feed import ChangeFeed

    feed = ChangeFeed.open(table.uri)
    return sorted(
        i for batch in feed.changes(feed.earliest(), feed.latest()) for i in batch["id"].to_pylist()
    )


def test_a_large_file_goes_on_in_the_middle(table: lancewal.Table, tmp_path: Path) -> None:
    big = write_parquet(tmp_path / "big.parquet", 0, 50_000)
    files = find_files([big])
    store = FaultyStore(ObjectStore.from_uri(table.uri, fsync=False))
    # The journal's third entry: two parts are in by then.
    store.faults.fail("put_if_absent", where="2.part.json")
    with pytest.raises(LanceWalError):
        job(table, store, kind="parts").run(files)
    taken = table.count_rows()
    assert 0 < taken < 50_000
    second = job(table, kind="parts")
    assert second.run(files).rows == 50_000 - taken
    assert table.count_rows() == 50_000


def test_a_part_that_was_begun_keeps_its_rows_with_other_limits(
    table: lancewal.Table, tmp_path: Path
) -> None:
    big = write_parquet(tmp_path / "big.parquet", 0, 40_000)
    store = FaultyStore(ObjectStore.from_uri(table.uri, fsync=False))
    store.faults.fail("put_if_absent", where="/wal/", nth=2)
    with pytest.raises(LanceWalError):
        job(table, store, kind="parts").run(find_files([big]))
    job(table, kind="sstables").run(find_files([big]))
    assert ids(table.scan().to_table()) == list(range(40_000))


def test_a_file_that_changed_is_taken_again(tmp_path: Path, folder: Path) -> None:
    table = writable_table(tmp_path / "keyed", KEYED)
    job(table).run(find_files([folder]))
    write_parquet(folder / "0.parquet", 0, 21)
    report = job(table).run(find_files([folder]))
    assert (report.files, report.skipped) == (1, 2)
    assert ids(table.scan().to_table()) == list(range(60))


def test_again_takes_files_again(table: lancewal.Table, folder: Path) -> None:
    files = find_files([folder / "0.parquet"])
    job(table).run(files)
    assert job(table, again=True).run(files).rows == 20
    assert table.count_rows() == 40
    assert job(table).run(files).skipped == 1


@KINDS
@pytest.mark.parametrize("lost_reply", [False, True], ids=["failed", "reply lost"])
def test_a_run_that_takes_files_again_and_fails_wrote_rows_twice_when_it_was_rerun(
    tmp_path: Path, folder: Path, kind: str, lost_reply: bool
) -> None:
    """The rerun finished the part that was left, and then took all files from their beginnings."""
    for nth in itertools.count(1, 4):
        table = writable_table(tmp_path / f"t{nth}", APPEND_ONLY)
        files = find_files([folder])
        job(table, kind=kind).run(files)
        store = FaultyStore(ObjectStore.from_uri(table.uri, fsync=False))
        store.faults.fail("put_if_absent", nth=nth, after=lost_reply, times=2)
        store.faults.fail("put", nth=nth, after=lost_reply, times=1)
        try:
            job(table, store, kind=kind, again=True).run(files)
            failed = False
        except LanceWalError:
            failed = True
        if not failed:
            break
        report = job(table, kind=kind, again=True).run(files)
        assert report.files + report.skipped == len(files)
        assert ids(table.scan().to_table()) == sorted([*range(60), *range(60)]), f"call {nth}"
    assert nth > 5
    job(table, kind=kind, again=True).run(files)
    assert table.count_rows() == 3 * 60


def test_a_file_whose_first_run_was_interrupted_is_not_begun_anew_by_one_that_takes_files_again(
    table: lancewal.Table, tmp_path: Path
) -> None:
    big = write_parquet(tmp_path / "big.parquet", 0, 50_000)
    store = FaultyStore(ObjectStore.from_uri(table.uri, fsync=False))
    store.faults.fail("put_if_absent", where="2.part.json")
    with pytest.raises(LanceWalError):
        job(table, store, kind="parts").run(find_files([big]))
    job(table, kind="parts", again=True).run(find_files([big]))
    assert table.count_rows() == 50_000


def test_one_who_watches_took_files_again_at_every_look(table: lancewal.Table, folder: Path) -> None:
    watching = job(table, again=True)
    for _ in range(3):
        watching.run(watching.pending(find_files([folder])))
    assert (watching.report.files, table.count_rows()) == (3, 60)


@KINDS
def test_two_runs_at_a_time_take_each_file_once(table: lancewal.Table, folder: Path, kind: str) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            job(table, kind=kind).run(find_files([folder]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert ids(table.scan().to_table()) == list(range(60))


def test_an_unfinished_file_that_is_gone_is_named_and_can_be_given_up(
    table: lancewal.Table, folder: Path
) -> None:
    store = FaultyStore(ObjectStore.from_uri(table.uri, fsync=False))
    store.faults.fail("put_if_absent", where="/wal/", nth=2, times=None)
    with pytest.raises(LanceWalError):
        job(table, store).run(find_files([folder / "0.parquet"]))
    (folder / "0.parquet").unlink()
    again = job(table)
    assert len(again.pending(find_files([folder]))) == 2
    with pytest.raises(InvalidInputError, match=r"rows 0 to 20 of 0.parquet.*put it back.*--give-up"):
        again.run(find_files([folder]))
    assert again.give_up(str(folder)) is not None
    assert again.give_up(str(folder)) is None
    assert again.run(find_files([folder])).files == 2
    assert set(range(20, 60)) <= set(ids(table.scan().to_table()))


def test_an_unfinished_file_is_pending(table: lancewal.Table, folder: Path) -> None:
    store = FaultyStore(ObjectStore.from_uri(table.uri, fsync=False))
    store.faults.fail("put_if_absent", where="/wal/", nth=2, times=None)
    with pytest.raises(LanceWalError):
        job(table, store).run(find_files([folder / "0.parquet"]))
    assert len(job(table).pending(find_files([folder]))) == 3


def test_a_refused_file_has_no_effect_and_is_named(table: lancewal.Table, folder: Path) -> None:
    (folder / "1.parquet").unlink()
    (folder / "1.jsonl").write_text('{"id": 20, "name": "x"}\n{"id": null, "name": "y"}\n')
    files = find_files([folder])
    with pytest.raises(InvalidInputError, match=r"1\.jsonl, rows 0 to 2: .*nulls in column id"):
        job(table).run(files)
    assert ids(table.scan().to_table()) == list(range(20))
    report = job(table).run(files, skip_refused=True)
    assert list(report.refused) == [str(folder / "1.jsonl")]
    assert ids(table.scan().to_table()) == [*range(20), *range(40, 60)]


def test_an_unknown_column_is_refused_or_left_out(table: lancewal.Table, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,name,extra\n1,a,2\n")
    with pytest.raises(InvalidInputError, match="no column extra"):
        Ingestion(table.uri).run(find_files([path]))
    assert Ingestion(table.uri, drop_unknown=True).run(find_files([path])).rows == 1


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_number_too_large_for_a_float_was_taken_as_infinity(tmp_path: Path, ending: str) -> None:
    table = writable_table(tmp_path / "t", pa.schema([*APPEND_ONLY, pa.field("f", pa.float32())]))

    def write(number: str) -> Path:
        path = tmp_path / f"{number}.{ending}"
        if ending == "parquet":
            pq.write_table(pa.table({"id": [1], "f": [float(number)]}), path)
        else:
            path.write_text(f"id,f\n1,{number}\n" if ending == "csv" else f'{{"id": 1, "f": {number}}}\n')
        return path

    Ingestion(table.uri).run(find_files([str(write("0.1"))]))
    with pytest.raises(InvalidInputError, match=r"column f .*1e\+300"):
        Ingestion(table.uri).run(find_files([str(write("1e300"))]))
    assert table.scan(columns=["f"]).to_table()["f"].to_pylist() == [pytest.approx(0.1)]


def test_a_file_that_is_written_to_meanwhile_is_refused(table: lancewal.Table, folder: Path) -> None:
    files = find_files([folder / "0.parquet"])

    def touch(step: object) -> None:
        os.utime(folder / "0.parquet")

    store = ObjectStore.from_uri(table.uri, fsync=False)
    with pytest.raises(InvalidInputError, match="written to while it was read"):
        Ingestion(table.uri, store=store, parts=LocalParts(store, progress=touch)).run(files)
    assert table.count_rows() == 0


def test_a_file_without_rows_is_taken_too(table: lancewal.Table, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "empty.parquet", 0, 0)
    assert job(table).run(find_files([path])).files == 1
    assert job(table).run(find_files([path])).skipped == 1


def test_files_are_known_under_a_name_of_choice(table: lancewal.Table, folder: Path, tmp_path: Path) -> None:
    job(table, source="landing zone").run(find_files([folder]))
    moved = folder.rename(tmp_path / "elsewhere")
    assert job(table, source="landing zone").run(find_files([moved])).skipped == 3
    assert job(table).pending(find_files([moved])) != []


def test_the_journal_is_summarised_and_still_knows_all(table: lancewal.Table, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(130):
        (folder / f"{number:03}.csv").write_text(f"id,name\n{number},x\n")
    job(table).run(find_files([folder]))
    store = ObjectStore.from_uri(table.uri, fsync=False)
    assert len(store.list(INGEST_DIR)) <= 3
    assert job(table).run(find_files([folder])).skipped == 130
    assert ids(table.scan().to_table()) == list(range(130))


def test_a_version_that_was_summarised_is_not_begun_again(table: lancewal.Table, tmp_path: Path) -> None:
    """A process that slept through a summary finds the names of old versions free."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(64):
        (folder / f"{number:03}.csv").write_text(f"id,name\n{number},x\n")
    job(table).run(find_files([folder]))
    store = ObjectStore.from_uri(table.uri, fsync=False)
    journal = Journal(store, str(folder))
    assert journal.read().version == 63
    (late,) = find_files([folder / "000.csv"])
    part = LocalParts(store).prepare(late, 0).part
    assert not journal.begin(10, part)
    assert journal.read().version == 63


def test_what_went_to_the_wal_can_be_flushed(table: lancewal.Table, folder: Path) -> None:
    work = job(table)
    work.run(find_files([folder]))
    assert table.status().unflushed.count > 0
    work.flush(at_least=1 << 40)
    assert table.status().unflushed.count > 0
    work.flush()
    assert table.status().unflushed.count == 0
    assert table.count_rows() == 60


def test_a_damaged_journal_says_so(table: lancewal.Table, folder: Path) -> None:
    job(table).run(find_files([folder / "0.parquet"]))
    store = ObjectStore.from_uri(table.uri, fsync=False)
    (record,) = store.list(INGEST_DIR)
    store.put(record.path, b"{")
    with pytest.raises(LanceWalError, match="is damaged"):
        job(table).run(find_files([folder]))


def test_the_journal_tells_where_files_came_from(table: lancewal.Table, folder: Path) -> None:
    job(table).run(find_files([folder / "0.parquet"]))
    store = ObjectStore.from_uri(table.uri, fsync=False)
    (record,) = store.list(INGEST_DIR)
    assert json.loads(store.get(record.path))["source"] == str(folder)


# --- watching -----------------------------------------------------------------------------


def looks(paths: list[Path], times: int) -> Iterator[list[SourceFile]]:
    left = itertools.count(times, -1)
    return watch(paths, stop=lambda: next(left) <= 0, wait=lambda seconds: None)


def test_a_clock_that_was_ahead_took_a_file_that_was_being_written_for_whole(tmp_path: Path) -> None:
    """By its stamp it rests since long ago: the machine that stamps it has another clock."""
    path = tmp_path / "a.csv"
    path.write_text("id\n1\n")
    os.utime(path, (1000, 1000))
    first, second = itertools.islice(looks([tmp_path], 9), 2)
    assert (first, [file.name for file in second]) == ([], ["a.csv"])


def test_a_file_that_grows_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id\n1\n")
    seen = []
    for found in looks([tmp_path], 10):
        seen.append(len(found))
        if len(seen) == 2:
            path.write_text("id\n1\n2\n")
    assert seen == [0, 1, 0, 1, 1]


def test_a_table_whose_shards_are_chosen_by_hand_is_refused_before_anything_is_begun(tmp_path: Path) -> None:
    """A part that was begun and can never be written was left in the journal."""
    lance.write_dataset(APPEND_ONLY.empty_table(), str(tmp_path / "t"))
    table = lancewal.initialize(tmp_path / "t", by_hand=True)
    source = write_parquet(tmp_path / "rows.parquet", 0, 3)
    with pytest.raises(InvalidInputError, match="no sharding spec"):
        job(table).run(find_files([source]))
    store = ObjectStore.from_uri(table.uri, fsync=False)
    assert Journal(store, str(tmp_path)).read().unfinished is None
