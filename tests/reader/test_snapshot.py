"""What a reader sees while writers flush, jobs compact and collectors delete beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import lance
import pyarrow as pa
import pytest

from lancewal.base.table import BaseTable
from lancewal.errors import ConflictError, PartialWriteError, StorageError, WalCorruptError
from lancewal.format import encode_entry, entry_schema
from lancewal.format.shard_manifest import ShardManifest
from lancewal.maintenance import compact
from lancewal.maintenance.commits import at_crash_points
from lancewal.publish.feed import ChangeFeed
from lancewal.reader import TableReader, tail
from lancewal.reader import state as snapshot
from lancewal.reader.state import ShardReader, StateReader, read_state
from lancewal.shard import WalAppender, WalTailer
from lancewal.shard.log import WatchedTip
from lancewal.shard.manifest import ShardManifestStore
from lancewal.shard.tail import has_unflushed_rows
from lancewal.storage import Cache, ObjectStore, boot_time, layout
from tests.reader.support import TableUnderTest, everywhere, named, names
from tests.shard.support import contents
from tests.tables import APPEND_ONLY, abandon, rows


@pytest.fixture
def appended(tmp_path: Path) -> TableUnderTest:
    """Without a key: a row that is read twice shows."""
    return TableUnderTest(tmp_path / "t", APPEND_ONLY)


def ids(reader: TableReader) -> list[int]:
    return sorted(reader.scan().to_table()["id"].to_pylist())


def once(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    happening: Callable[[], object],
    *,
    before: bool = True,
) -> None:
    """Let something happen at the first call of a function, before or after it."""
    real = getattr(owner, name)
    done: list[bool] = []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first = not done
        done.append(True)
        if first and before:
            happening()
        result = real(*args, **kwargs)
        if first and not before:
            happening()
        return result

    monkeypatch.setattr(owner, name, wrapped)


def test_a_memtable_published_between_its_view_and_the_manifest_is_read_once(
    appended: TableUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with appended.writer() as writer:
        writer.put(rows(0, 3, schema=APPEND_ONLY))

        def flush() -> None:
            writer.force_seal_active()
            writer.wait_for_flush_drain()
            writer.put(rows(10, 1, schema=APPEND_ONLY))

        assert ids(appended.live) == [0, 1, 2]
        once(monkeypatch, type(writer), "in_memory_memtable_refs", flush, before=False)
        assert ids(appended.live) == [0, 1, 2]
        assert ids(appended.live) == [0, 1, 2, 10]


def test_a_memtable_published_just_before_its_view_is_taken_is_not_missed(
    appended: TableUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with appended.writer() as writer:
        writer.put(rows(0, 3, schema=APPEND_ONLY))
        assert ids(appended.live) == [0, 1, 2]

        def flush() -> None:
            writer.force_seal_active()
            writer.wait_for_flush_drain()

        once(monkeypatch, type(writer), "in_memory_memtable_refs", flush)
        assert ids(appended.live) == [0, 1, 2]


def test_a_writer_that_was_superseded_is_not_believed(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t")
    stale = table.open()
    stale.put(named({1: "stale"}))
    # Somebody else's claim, without the registry of this process.
    successor = WalAppender.open(table.store, table.shard, stale.manifest().shard_spec_id)  # type: ignore[union-attr]
    base = BaseTable.open(table.uri)
    batch = named({1: "successor"}).combine_chunks().to_batches()[0]
    successor.append([batch.cast(base.schema.columns)], generation=1)
    assert everywhere(table) == {1: "successor"}
    abandon(stale)


def test_a_writer_whose_log_failed_shows_what_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableUnderTest(tmp_path / "t")
    writer = table.open()
    writer.put(named({1: "durable"}))

    def broken(*_: object) -> None:
        raise StorageError("no more room")

    monkeypatch.setattr(table.store, "put_if_absent", broken)
    with pytest.raises(StorageError):
        writer.put(named({1: "lost", 2: "lost"}))
    monkeypatch.undo()
    assert everywhere(table) == {1: "durable"}
    abandon(writer)


def test_rows_in_the_wal_are_read_without_any_writer(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t")
    table.flushed({1: "flushed", 2: "flushed"})
    writer = table.open()
    writer.put(named({2: "logged", 3: "logged"}))
    writer.delete([1])
    abandon(writer)
    del writer
    assert everywhere(table) == {2: "logged", 3: "logged"}
    again = table.open()
    assert everywhere(table) == {2: "logged", 3: "logged"}
    again.close()
    assert everywhere(table) == {2: "logged", 3: "logged"}


def test_rows_of_a_wal_only_writer_are_read_from_its_log(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t")
    with table.writer(enable_memtable=False) as writer:
        writer.put(named({1: "logged"}))
        assert everywhere(table) == {1: "logged"}
    assert everywhere(table) == {1: "logged"}


def test_lances_own_log_is_read_too(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t")
    with table.dataset.mem_wal_writer(str(table.shard), durable_write=True) as writer:
        writer.put(named({1: "lance", 2: "lance"}))
        writer.delete(pa.table({"id": pa.array([2], pa.int64())}))
        assert everywhere(table) == {1: "lance"}
    assert everywhere(table) == {1: "lance"}


def test_repeated_reads_decode_a_log_entry_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TableUnderTest(tmp_path / "t")
    read: list[int] = []
    real = WalTailer.read_entry

    def counted(self: WalTailer, position: int) -> object:
        read.append(position)
        return real(self, position)

    monkeypatch.setattr(WalTailer, "read_entry", counted)
    with table.writer() as writer:
        for number in range(5):
            writer.put(named({number: "a", 99: str(number)}))
            assert names(table.other.scan().to_table())[99] == str(number)
        assert sorted(read) == sorted(set(read))
        assert table.other.lookup([99]).table["name"].to_pylist() == ["4"]
        assert len(read) == len(set(read))
        monkeypatch.setattr(tail, "ROOM", tail.LogRoom(Cache(0)))
        fresh = TableReader(table.store, live_writers=False)
        assert names(fresh.scan().to_table()) == names(fresh.scan().to_table())
        assert len(read) > len(set(read))


def test_log_entries_that_were_flushed_and_collected_meanwhile_start_the_snapshot_again(
    appended: TableUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with appended.writer() as writer:
        writer.put(rows(0, 3, schema=APPEND_ONLY))
        writer.put(rows(3, 3, schema=APPEND_ONLY))

        def flush_and_collect() -> None:
            writer.force_seal_active()
            writer.wait_for_flush_drain()
            manifest = writer.manifest()
            assert manifest is not None
            for position in range(1, manifest.replay_after_wal_entry_position + 1):
                appended.store.delete(layout.wal_entry(appended.shard, position))

        once(monkeypatch, WatchedTip, "find", flush_and_collect)
        assert ids(appended.other) == list(range(6))


def test_log_entries_that_vanish_while_they_are_read_start_the_snapshot_again(
    appended: TableUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with appended.writer() as writer:
        writer.put(rows(0, 3, schema=APPEND_ONLY))
        writer.put(rows(3, 3, schema=APPEND_ONLY))

        def flush_and_collect() -> None:
            writer.force_seal_active()
            writer.wait_for_flush_drain()
            for position in (1, 2):
                appended.store.delete(layout.wal_entry(appended.shard, position))

        once(monkeypatch, WatchedTip, "find", flush_and_collect, before=False)
        assert ids(appended.other) == list(range(6))


def test_a_reader_that_stood_still_showed_what_was_written_into_slots_that_were_collected(
    appended: TableUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next read did not show these rows of a stalled writer. Seed 187127 of the simulator."""
    with appended.writer() as writer:
        writer.put(rows(0, 3, schema=APPEND_ONLY))
        writer.put(rows(3, 3, schema=APPEND_ONLY))
        (first, *_) = WalTailer(appended.store, appended.shard).entries()
        stray = encode_entry(entry_schema(first.batches[0].schema, first.writer_epoch, 1), first.batches)

        def stand_still() -> None:
            writer.force_seal_active()
            writer.wait_for_flush_drain()
            for position in (1, 2):
                appended.store.delete(layout.wal_entry(appended.shard, position))
                appended.store.put_if_absent(layout.wal_entry(appended.shard, position), stray)
            monkeypatch.setattr(tail, "boot_time", lambda: boot_time() + 600)

        once(monkeypatch, tail.ShardTail, "load", stand_still)
        assert ids(appended.other) == list(range(6))


def test_a_reader_missed_rows_that_were_flushed_while_another_thread_read_with_it(
    appended: TableUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread kept the log behind the flush, and the first one took it for all of the log."""
    with appended.writer() as writer:
        writer.put(rows(0, 3, schema=APPEND_ONLY))

        def flush_and_read() -> None:
            writer.force_seal_active()
            writer.wait_for_flush_drain()
            writer.put(rows(3, 3, schema=APPEND_ONLY))
            assert ids(appended.other) == list(range(6))

        once(monkeypatch, WatchedTip, "find", flush_and_read)
        assert ids(appended.other) == list(range(6))


def test_a_state_is_opened_after_the_log_was_read_beyond_it(appended: TableUnderTest) -> None:
    """Also where another thread keeps a part of the log that begins behind the state's."""
    with appended.writer() as writer:
        writer.put(rows(0, 3, schema=APPEND_ONLY))
        place = appended.other._readers()[0].read()
        assert place is not None
        base = appended.other.base()
        writer.put(rows(3, 3, schema=APPEND_ONLY))
        assert ids(appended.other) == list(range(6))
        (shard,) = appended.other._readers()

        def held() -> list[int]:
            return [source.row_count for source in shard.open(place, base).sources]  # type: ignore[attr-defined]

        assert held() == [3]
        writer.force_seal_active()
        writer.wait_for_flush_drain()
        writer.put(rows(6, 1, schema=APPEND_ONLY))
        assert ids(appended.other) == list(range(7))
        assert held() == [3]


@pytest.mark.parametrize("live", [True, False])
def test_a_compaction_between_manifest_and_base_hides_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    table = TableUnderTest(tmp_path / "t", data=named({1: "base", 2: "base"}))
    table.flushed({1: "flushed", 3: "flushed"}, [2])
    reader = TableReader(table.store, live_writers=live)
    assert names(reader.scan().to_table()) == {1: "flushed", 3: "flushed"}

    def compact_and_prune() -> None:
        table.compact(1)
        manifests = ShardManifestStore(table.store, table.shard)
        manifests.commit_update(None, _without_sstables)

    once(monkeypatch, ShardReader, "read", compact_and_prune, before=False)
    assert names(reader.scan().to_table()) == {1: "flushed", 3: "flushed"}
    assert names(reader.scan().to_table()) == {1: "flushed", 3: "flushed"}


@pytest.mark.parametrize("is_new", [False, True])
def test_half_of_a_batch_was_read_beside_a_compaction_in_several_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """It was put, flushed and compacted in part behind the reader's back. Seed 328 of the simulator."""
    table = TableUnderTest(tmp_path / "t")
    if not is_new:
        table.flushed({1: "old", 2: "old"})
        compact(table.store)
    reader = TableReader(table.store, live_writers=False)
    before = {} if is_new else {1: "old", 2: "old"}
    assert names(reader.scan().to_table()) == before
    parts: list[str] = []

    def die(point: str) -> None:
        parts.append(point)
        if point == "merge: a part of the rows is committed":
            raise InterruptedError

    def overtake() -> None:
        table.flushed({3: "new", 4: "new"})
        at_crash_points(die)
        try:
            compact(table.store, max_commit_bytes=1)
        except PartialWriteError:
            parts.append("died")
        finally:
            at_crash_points(None)

    owner, call = (StateReader, "_readers") if is_new else (ShardReader, "confirmed")
    once(monkeypatch, owner, call, overtake, before=False)
    after = before | {3: "new", 4: "new"}
    assert names(reader.scan().to_table()) in (before, after)
    assert "died" in parts
    assert names(reader.scan().to_table()) == after
    compact(table.store)
    assert names(reader.scan().to_table()) == after


def _without_sstables(manifest: ShardManifest) -> ShardManifest:
    return replace(manifest, sstables=())


@pytest.mark.parametrize("live", [True, False])
def test_rows_read_from_memory_never_lie_over_newer_ones_that_were_compacted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    table = TableUnderTest(tmp_path / "t")
    with table.writer() as writer:
        writer.put(named({1: "old"}))
        reader = TableReader(table.store, live_writers=live)

        def overtake() -> None:
            writer.force_seal_active()
            writer.put(named({1: "new"}))
            writer.force_seal_active()
            writer.wait_for_flush_drain()
            table.compact(2)

        once(monkeypatch, ShardReader, "read", overtake, before=False)
        assert names(reader.scan().to_table()) == {1: "new"}


def test_a_table_that_never_stands_still_is_a_conflict_not_a_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableUnderTest(tmp_path / "t")
    table.flushed({1: "x"})
    # Whenever the base is looked at, it holds what was flushed since the manifest was read.
    monkeypatch.setattr(
        snapshot, "held_generation", lambda base, store, manifest: manifest.current_generation
    )
    with pytest.raises(ConflictError, match=r"compacted 16 times .* read again"):
        table.live.scan()


def test_foreign_and_half_made_directories_are_passed_over(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t")
    table.flushed({1: "x"})
    (tmp_path / "t" / "_mem_wal" / "notes").mkdir()
    (tmp_path / "t" / "_mem_wal" / str(UUID(int=9)) / "manifest").mkdir(parents=True)
    assert everywhere(table) == {1: "x"}


def test_a_new_base_version_is_seen_by_the_next_read(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t", data=named({1: "a"}))
    assert everywhere(table) == {1: "a"}
    table.dataset.merge_insert("id").when_not_matched_insert_all().execute(named({2: "b"}))
    assert everywhere(table) == {1: "a", 2: "b"}


def test_one_scan_shows_one_state_however_often_it_is_read(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t", data=named({1: "a"}))
    with table.writer() as writer:
        scan = table.live.scan()
        writer.put(named({2: "b"}))
        assert names(scan.to_table()) == {1: "a"}
        assert scan.count_rows() == 1


def test_reads_beside_a_busy_writer_miss_and_double_nothing(appended: TableUnderTest) -> None:
    stop = threading.Event()
    written: list[int] = [0]

    def write() -> None:
        with appended.writer() as writer:
            while not stop.is_set() and written[0] < 400:
                writer.put(rows(written[0], 2, schema=APPEND_ONLY))
                written[0] += 2
                if written[0] % 14 == 0:
                    writer.force_seal_active()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(12):
            for reader in appended.readers:
                acknowledged = written[0]
                found = ids(reader)
                assert found == list(range(len(found)))
                assert len(found) >= acknowledged
    finally:
        stop.set()
        thread.join()
    for reader in appended.readers:
        assert ids(reader) == list(range(written[0]))


WRITER = """
    import sys
    import uuid
    from lancewal.base.table import BaseTable
    from tests.tables import open_writer, rows

    base = BaseTable.open(sys.argv[1])
    with open_writer(base, uuid.UUID(sys.argv[2])) as writer:
        for number in range(24):
            writer.put(rows(number, 1))
            if number % 3 == 0:
                writer.delete([number])
            print(number, flush=True)
            if number % 7 == 6:
                writer.force_seal_active()
            sys.stdin.readline()
"""


def test_another_process_reads_every_durable_row_while_its_writer_freezes_and_flushes(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t")
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), table.uri, str(table.shard)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={"PYTHONPATH": f"{root / 'src'}:{root}", "PATH": ""},
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        for line in process.stdout:
            durable = {number: f"name_{number}" for number in range(int(line) + 1) if number % 3}
            assert names(table.live.scan().to_table()) == durable
            assert table.live.scan().count_rows() == len(durable)
            process.stdin.write("go on\n")
            process.stdin.flush()
    assert process.returncode == 0
    assert len(names(table.live.scan().to_table())) == 16


def test_a_memory_store_has_no_writers_of_other_tables(tmp_path: Path) -> None:
    first, second = TableUnderTest(tmp_path / "a"), TableUnderTest(tmp_path / "b")
    second.shard = first.shard
    with first.writer() as writer, second.writer() as other:
        writer.put(named({1: "first"}))
        other.put(named({2: "second"}))
        assert everywhere(first) == {1: "first"}
        assert everywhere(second) == {2: "second"}
        assert isinstance(first.store, ObjectStore)


def test_a_lost_log_entry_read_as_a_smaller_table(tmp_path: Path) -> None:
    """Old values without an error, wherever the search for the end of the log had landed."""
    table = TableUnderTest(tmp_path / "t")
    length = 9
    with table.writer() as writer:
        for number in range(length):
            writer.put(named({1: str(number)}))
        manifest = ShardManifestStore(table.store, table.shard).require_latest()
        warm = TableReader(table.store, live_writers=False)
        assert names(warm.scan().to_table()) == {1: str(length - 1)}
        for lost in range(1, length):
            path = layout.wal_entry(table.shard, lost)
            entry = table.store.get(path)
            table.store.delete(path)
            before = contents(table.store)
            for read in log_readers(table, manifest):
                with pytest.raises(WalCorruptError, match="missing") as refusal:
                    read()
                assert refusal.value.position == lost
            assert names(warm.scan().to_table()) == {1: str(length - 1)}, "what was read stays readable"
            assert contents(table.store) == before, "something was written to a damaged log"
            table.store.put_if_absent(path, entry)
        for read in log_readers(table, manifest)[:-3]:
            read()


def log_readers(table: TableUnderTest, manifest: ShardManifest) -> list[Callable[[], object]]:
    """Everything that reads a log to its end, for the first time; the last three never end, or claim."""
    reader = TableReader(table.store, live_writers=False)
    feed = ChangeFeed.open(table.uri)
    tailer = WalTailer(table.store, table.shard)
    return [
        lambda: reader.scan().to_table(),
        lambda: reader.scan().count_rows(),
        lambda: reader.lookup([1]),
        feed.latest,
        feed.earliest,
        lambda: read_state(table.store),
        lambda: list(tailer),
        lambda: has_unflushed_rows(manifest, table.store),
        lambda: list(tailer.follow(stop=lambda: False)),
        lambda: list(tailer.follow(1, stop=lambda: False)),
        table.open,
    ]


@pytest.mark.parametrize("more", range(1, 7))
def test_an_entry_lost_above_what_a_reader_knew_is_noticed(tmp_path: Path, more: int) -> None:
    table = TableUnderTest(tmp_path / "t")
    with table.writer() as writer:
        writer.put(named({0: "known"}))
        assert names(table.other.scan().to_table()) == {0: "known"}
        for number in range(1, more + 2):
            writer.put(named({number: "new"}))
        table.store.delete(layout.wal_entry(table.shard, more + 1))
        with pytest.raises(WalCorruptError, match="missing") as refusal:
            table.other.scan()
        assert refusal.value.position == more + 1


def test_a_stale_read_still_sees_what_a_writer_here_put_and_what_it_flushed_since(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t")
    reader = TableReader(table.store, max_staleness=3600)
    with table.writer() as writer:
        writer.put(named({1: "first"}))
        assert names(reader.scan().to_table()) == {1: "first"}
        writer.put(named({2: "second"}))
        assert names(reader.scan().to_table()) == {1: "first", 2: "second"}
        writer.force_seal_active()
        writer.wait_for_flush_drain()
        writer.put(named({3: "third"}))
        assert names(reader.scan().to_table()) == {1: "first", 2: "second", 3: "third"}
    assert names(reader.scan().to_table()) == {1: "first", 2: "second", 3: "third"}


def test_a_stale_read_shows_what_others_wrote_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableUnderTest(tmp_path / "t")
    table.flushed({1: "old"})
    reader = TableReader(table.store, live_writers=False, max_staleness=60)
    assert names(reader.scan().to_table()) == {1: "old"}
    table.flushed({1: "new"})
    table.compact(2)
    assert names(reader.scan().to_table()) == {1: "old"}
    later = boot_time() + 61
    monkeypatch.setattr(snapshot, "boot_time", lambda: later)
    assert names(reader.scan().to_table()) == {1: "new"}


def test_a_base_that_another_thread_read_before_the_manifest_hid_rows_that_were_compacted_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableUnderTest(tmp_path / "t")
    table.flushed({1: "flushed"})
    reader = TableReader(table.store, live_writers=False)

    def base_then_compaction() -> None:
        reader.base()
        compact(table.store)

    once(monkeypatch, ShardManifestStore, "read_latest", base_then_compaction)
    assert names(reader.scan().to_table()) == {1: "flushed"}


def test_a_base_that_was_read_beside_the_second_look_at_a_manifest_goes_with_the_first_look_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On object storage both are read at once: here the base came first, and a compaction before the look."""
    table = TableUnderTest(tmp_path / "t")
    table.flushed({1: "flushed"})
    reader = TableReader(table.store, live_writers=False)

    def base_then_compaction() -> None:
        reader.base()
        compact(table.store)

    once(monkeypatch, ShardReader, "confirmed", base_then_compaction)
    assert names(reader.scan().to_table()) == {1: "flushed"}


@pytest.fixture
def stale(tmp_path: Path) -> tuple[TableUnderTest, TableReader]:
    table = TableUnderTest(tmp_path / "t")
    table.flushed({1: "known"})
    return table, TableReader(table.store, live_writers=False, max_staleness=3600)


def test_a_listing_that_ended_late_took_a_shard_back_that_a_stale_read_had_shown(
    stale: tuple[TableUnderTest, TableReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, reader = stale
    shown: list[dict[int, str]] = []

    def another_thread_reads() -> None:
        table.flushed({2: "of a new shard"}, shard=uuid4())
        shown.append(names(reader.scan().to_table()))

    once(monkeypatch, table.store, "list_directories", another_thread_reads, before=False)
    reader.scan()
    assert shown == [{1: "known", 2: "of a new shard"}]
    assert names(reader.scan().to_table()) == shown[0]


def test_entries_that_a_stale_read_had_shown_were_taken_back_by_one_that_began_later_and_saw_less(
    stale: tuple[TableUnderTest, TableReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, reader = stale

    def another_thread_reads_before_a_put() -> None:
        assert names(reader.scan().to_table()) == {1: "known"}
        writer.put(named({2: "put"}))

    with table.writer() as writer:
        once(monkeypatch, WatchedTip, "find", another_thread_reads_before_a_put)
        assert names(reader.scan().to_table()) == {1: "known", 2: "put"}
        assert names(reader.scan().to_table()) == {1: "known", 2: "put"}


def test_a_base_that_a_stale_read_had_shown_was_taken_back_by_one_that_was_asked_for_later(
    stale: tuple[TableUnderTest, TableReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, reader = stale
    reader.scan()

    def another_thread_reads_before_an_append() -> None:
        reader.snapshot(max_staleness=0.0)
        lance.write_dataset(named({2: "appended"}), table.uri, mode="append")

    once(monkeypatch, BaseTable, "refreshed", another_thread_reads_before_an_append)
    assert reader.snapshot(max_staleness=0.0).base.version == table.dataset.version
    assert names(reader.scan().to_table()) == {1: "known", 2: "appended"}


def _emptied(where: Path) -> None:
    """The directory itself stays: stores of this process know another one by its inode, and refuse it."""
    for each in where.iterdir():
        shutil.rmtree(each)


@pytest.mark.parametrize("flushed", [False, True])
def test_a_table_that_was_made_anew_showed_the_rows_of_the_one_before(tmp_path: Path, flushed: bool) -> None:
    def made(name: str, keys: range) -> TableUnderTest:
        table = TableUnderTest(tmp_path / "t")
        table.shard = UUID(int=7)
        writer = table.open()
        writer.put(named(dict.fromkeys(keys, name)))
        if flushed:
            writer.close()
        else:
            abandon(writer)
        return table

    readers = made("before", range(3)).readers
    for reader in readers:
        assert names(reader.scan().to_table()) == dict.fromkeys(range(3), "before")
    _emptied(tmp_path / "t")
    made("after", range(2))
    for reader in readers:
        assert names(reader.scan().to_table()) == dict.fromkeys(range(2), "after")
        assert reader.lookup([1]).table["name"].to_pylist() == ["after"]


@pytest.mark.parametrize("cleaned", [False, True], ids=["all versions", "newest version"])
@pytest.mark.parametrize("flushed", [False, True], ids=["log", "SSTable"])
def test_a_table_that_was_made_anew_with_more_versions_showed_the_rows_of_the_one_before(
    tmp_path: Path, flushed: bool, cleaned: bool
) -> None:
    def made(name: str, versions: int) -> TableUnderTest:
        table = TableUnderTest(tmp_path / "t")
        table.shard = UUID(int=7)
        for number in range(versions):
            lance.write_dataset(named({100 + number: name}), table.uri, mode="append")
        writer = table.open()
        writer.put(named(dict.fromkeys(range(3), name)))
        if flushed:
            writer.close()
        else:
            abandon(writer)
        return table

    readers = made("before", 0).readers
    for reader in readers:
        assert set(names(reader.scan().to_table()).values()) == {"before"}
    _emptied(tmp_path / "t")
    after = made("after", 2)
    if cleaned:
        after.dataset.cleanup_old_versions(timedelta(0))
    expected = dict.fromkeys([0, 1, 2, 100, 101], "after")
    for reader in readers:
        assert names(reader.scan().to_table()) == expected
        assert reader.lookup([1]).table["name"].to_pylist() == ["after"]


def test_a_later_version_of_the_same_table_keeps_what_is_known_of_its_shards(tmp_path: Path) -> None:
    """Also after a compaction, which gives the MemWAL index another id."""
    table = TableUnderTest(tmp_path / "t")
    writer = table.open()
    writer.put(named({1: "one"}))
    writer.close()
    reader = table.readers[0]
    reader.scan()
    known = list(reader._shards[0])
    table.compact(1)
    lance.write_dataset(named({2: "two"}), table.uri, mode="append")
    assert names(reader.scan().to_table()) == {1: "one", 2: "two"}
    assert all(now is before for now, before in zip(reader._shards[0], known, strict=True))
