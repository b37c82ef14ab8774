"""WAL tails that do not fit in memory: the same rows, from keys in memory and rows on storage."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal.base.table import BaseTable
from lancewal.errors import InvalidInputError
from lancewal.format.shard_manifest import ShardManifest
from lancewal.reader import Newer, TableReader, TableView, runs, tail
from lancewal.reader.memory_source import StreamedSource
from lancewal.reader.runs import Run, in_fewer
from lancewal.reader.search import checked_nearest, nearest
from lancewal.shard import ShardManifestStore, WalAppender, WalTailer
from lancewal.storage import Cache, layout
from tests.patience import PATIENCE
from tests.reader.support import TableUnderTest, named, names
from tests.tables import APPEND_ONLY, KEY, KEYED


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> Cache:
    """No entry is kept: all rows are fetched again."""
    cache = Cache(0)
    monkeypatch.setattr(tail, "ROOM", tail.LogRoom(cache))
    return cache


def other(table: TableUnderTest) -> TableReader:
    return TableReader(table.store, live_writers=False)


Change = tuple[int, str | None]
ENTRY = st.lists(
    st.lists(st.tuples(st.integers(0, 6), st.none() | st.sampled_from("abc")), min_size=1, max_size=4),
    min_size=1,
    max_size=3,
)


def as_batches(base: BaseTable, entry: list[list[Change]], keyed: bool) -> list[pa.RecordBatch]:
    stored = []
    for changes in entry:
        ids = pa.array([key for key, _ in changes], pa.int64())
        texts = pa.array([name for _, name in changes], pa.string())
        deletes = pa.array([keyed and name is None for _, name in changes])
        stored.append(pa.RecordBatch.from_arrays([ids, texts, deletes], schema=base.schema.stored))
    return stored


@given(
    log=st.lists(st.tuples(ENTRY, st.booleans()), min_size=1, max_size=8),
    room=st.sampled_from([0, 1500, 4000, 1 << 20]),
    keyed=st.booleans(),
)
@settings(max_examples=120)
def test_any_log_reads_the_same_whatever_fits_in_memory(
    tmp_path_factory: pytest.TempPathFactory,
    log: list[tuple[list[list[Change]], bool]],
    room: int,
    keyed: bool,
) -> None:
    """Updates, deletes, duplicates inside of entries, several generations, with and without a key."""
    table = TableUnderTest(tmp_path_factory.mktemp("log") / "t", KEYED if keyed else APPEND_ONLY)
    base = BaseTable.open(table.uri)
    appender = WalAppender.open(table.store, table.shard)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail, "ROOM", tail.LogRoom(Cache(room)))
        # One that follows the log, and one that meets all of it at once.
        follower = other(table)
        state: dict[int, str] = {}
        kept: list[Change] = []
        generation = 1
        for number, (entry, rises) in enumerate(log):
            generation += rises and number > 0
            appender.append(as_batches(base, entry, keyed), generation=generation)
            for key, name in (change for changes in entry for change in changes):
                kept.append((key, name))
                state.pop(key, None)
                if name is not None:
                    state[key] = name
            rows = sorted(state.items()) if keyed else sorted(kept, key=repr)
            for reader in (follower, other(table)):
                check(reader, rows, keyed)


def check(reader: TableReader, rows: list[Any], keyed: bool) -> None:
    def read(filter: str | None = None, **how: Any) -> list[Any]:
        found = reader.scan(filter=filter, **how).to_table()
        pairs = zip(found["id"].to_pylist(), found["name"].to_pylist(), strict=True)
        return sorted(pairs, key=None if keyed else repr)

    assert read() == rows
    assert reader.scan().count_rows() == len(rows)
    for sql, holds in (
        ("name = 'b'", lambda row: row[1] == "b"),
        ("id > 3", lambda row: row[0] > 3),
        ("id < 2 or name = 'a'", lambda row: row[0] < 2 or row[1] == "a"),
    ):
        wanted = [row for row in rows if holds(row)]
        assert read(sql) == wanted
        assert reader.scan(filter=sql).count_rows() == len(wanted)
    assert all(row in rows for row in read(limit=2))
    assert len(read(limit=2)) == min(2, len(rows))
    if keyed:
        asked = [6, 0, 3, 9, 1, 3]
        found = reader.lookup(asked)
        held = dict(rows)
        assert found.found.tolist() == [key in held for key in asked]
        assert found.table["name"].to_pylist() == [held[key] for key in asked if key in held]
        for key in (0, 5):
            assert reader.lookup([key]).table["name"].to_pylist() == [held[key] for _ in range(key in held)]


def test_only_the_entries_that_hold_wanted_rows_are_fetched(
    tmp_path: Path, no_room: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableUnderTest(tmp_path / "t")
    with table.writer() as writer:
        for number in range(10):
            writer.put(named({number: "old", 100 + number: "row"}))
        writer.put(named(dict.fromkeys(range(10), "new")))
        reader = other(table)
        scan = reader.scan()
        assert "rows fetched from the log" in scan.explain()
        fetched: list[int] = []
        real = WalTailer.read_entry

        def counted(self: WalTailer, position: int) -> object:
            fetched.append(position)
            return real(self, position)

        monkeypatch.setattr(WalTailer, "read_entry", counted)

        def reading(what: Any) -> list[int]:
            fetched.clear()
            what()
            return list(fetched)

        assert reading(lambda: reader.lookup([3])) == [11]
        assert reading(lambda: reader.lookup([104, 107, 3])) == [5, 8, 11]
        assert reading(lambda: reader.lookup([999])) == []
        assert reading(lambda: reader.scan().count_rows()) == []
        assert reading(lambda: reader.scan(filter="id > 105").count_rows()) == []
        assert reading(lambda: reader.scan(filter="id > 107").to_table()) == [9, 10]
        assert reading(lambda: reader.scan(limit=1).to_table()) == [1]
        assert reading(lambda: reader.scan().to_table()) == list(range(1, 12))
        # All of its rows were replaced since.
        writer.put(named({104: "newer"}))
        assert 5 not in reading(lambda: reader.scan().to_table())


def test_rows_are_kept_once_there_is_room(tmp_path: Path, no_room: Cache) -> None:
    table = TableUnderTest(tmp_path / "t")
    with table.writer() as writer:
        writer.put(named({1: "a"}))
        writer.put(named({1: "b", 2: "c"}))
        reader = other(table)

        def is_streamed() -> bool:
            (shard,) = reader.scan().snapshot.shards
            return any(isinstance(source, StreamedSource) for source in shard.sources)

        assert is_streamed()
        no_room._max_bytes = 1 << 20
        assert not is_streamed()
        assert names(reader.scan().to_table()) == {1: "b", 2: "c"}
        no_room._max_bytes = 0
        assert not is_streamed(), "what was read stays"
        writer.put(named({3: "d"}))
        assert is_streamed()
        assert names(reader.scan().to_table()) == {1: "b", 2: "c", 3: "d"}


def test_the_room_is_for_all_tables_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(20_000)
    monkeypatch.setattr(tail, "ROOM", tail.LogRoom(cache))
    tables = [TableUnderTest(tmp_path / str(number)) for number in range(3)]
    writers = [table.open() for table in tables]
    for writer in writers:
        for number in range(5):
            writer.put(named({number: "x" * 1500}))
    readers = [other(table) for table in tables]
    for reader in readers:
        assert names(reader.scan().to_table()) == dict.fromkeys(range(5), "x" * 1500)
        assert 0 <= cache.free_bytes < 20_000
    assert cache.free_bytes < 2_500, "not all of the room is used"
    # What nobody reads for a while makes room.
    monkeypatch.setattr(tail, "_IDLE_SECONDS", 0.0)
    last = readers[2].scan().snapshot.shards[0].sources[0]
    assert not isinstance(last, StreamedSource)
    del last, reader
    readers.clear()
    assert cache.free_bytes == 20_000
    for writer in writers:
        writer.close()


def test_columns_that_changed_since_the_keys_were_read(tmp_path: Path, no_room: Cache) -> None:
    table = TableUnderTest(tmp_path / "t")
    with table.writer() as writer:
        writer.put(named({1: "a", 2: "b"}))
        reader = other(table)
        assert names(reader.scan().to_table()) == {1: "a", 2: "b"}
        table.dataset.alter_columns({"path": "name", "name": "title"})
        table.dataset.add_columns(pa.schema([pa.field("later", pa.int32())]))
        found = reader.scan().to_table()
        assert dict(zip(found["id"].to_pylist(), found["title"].to_pylist(), strict=True)) == {
            1: "a",
            2: "b",
        }


def test_an_entry_that_was_collected_before_its_rows_were_fetched(
    tmp_path: Path, no_room: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableUnderTest(tmp_path / "t")
    with table.writer() as writer:
        writer.put(named({1: "a"}))
        reader = other(table)
        take = StreamedSource._marked

        def flush_and_collect(self: StreamedSource, *args: Any) -> Any:
            if table.store.head(layout.wal_entry(table.shard, 1)) is not None:
                writer.force_seal_active()
                writer.wait_for_flush_drain()
                table.store.delete(layout.wal_entry(table.shard, 1))
            return take(self, *args)

        monkeypatch.setattr(StreamedSource, "_marked", flush_and_collect)
        assert reader.lookup([1]).table["name"].to_pylist() == ["a"]


def test_two_threads_that_extended_one_tail_took_each_others_rows_for_their_own(
    tmp_path: Path, no_room: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They shared what grows with the rows, but had cut the new rows into different batches."""
    table = TableUnderTest(tmp_path / "t")
    schema = BaseTable.open(table.uri).schema
    with table.writer() as writer:
        for number in range(4):
            writer.put(named({number: "row"}))
        manifest = ShardManifestStore(table.store, table.shard).require_latest()
        shared = tail.ShardTail(table.store, table.shard)
        known = shared.load(manifest, 3, schema)
        shared.sources(known, manifest, schema)
        shorter = shared.load(manifest, 4, schema)
        shared._kept = known
        longer = shared.load(manifest, 5, schema)
        found: dict[str, int] = {}

        def extend(name: str, entries: tail.TailEntries) -> None:
            (source,) = shared.sources(entries, manifest, schema)
            found[name] = len(source.keys())

        other = threading.Thread(target=extend, args=("longer", longer))
        batches = tail._batches

        def interrupted(*arguments: Any) -> Any:
            if other.ident is None:
                other.start()
                other.join(0.5)
            return batches(*arguments)

        monkeypatch.setattr(tail, "_batches", interrupted)
        extend("shorter", shorter)
        other.join()
        assert found == {"shorter": 3, "longer": 4}


def long_tail(table: TableUnderTest, entries: int, first: int = 0) -> WalAppender:
    """One row an entry."""
    stored = BaseTable.open(table.uri).schema.stored
    appender = WalAppender.open(table.store, table.shard)
    for number in range(first, first + entries):
        row = [pa.array([number]), pa.array([f"row {number}"]), pa.array([False])]
        appender.append([pa.RecordBatch.from_arrays(row, schema=stored)], generation=1)
    return appender


def calls_of(what: Callable[[], object]) -> int:
    """How many functions are called, C ones included: what Python does, in a figure that does not vary."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    what()
    sys.setprofile(count)
    try:
        what()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("room", [0, 1 << 26], ids=["keys only", "whole"])
def test_a_lookup_went_through_all_entries_of_the_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(tail, "ROOM", tail.LogRoom(Cache(room)))
    done = []
    for entries in (100, 3_000):
        table = TableUnderTest(tmp_path / str(entries))
        long_tail(table, entries)
        reader = other(table)
        assert reader.lookup([5]).table["name"].to_pylist() == ["row 5"]
        done.append(calls_of(lambda: reader.lookup([entries - 1])))  # noqa: B023
    assert done[1] < 1.3 * done[0]


def test_small_entries_took_a_hundred_times_the_bytes_of_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(1 << 26)
    monkeypatch.setattr(tail, "ROOM", tail.LogRoom(cache))
    table = TableUnderTest(tmp_path / "t")
    long_tail(table, 3_000)
    before = pa.total_allocated_bytes()
    reader = other(table)
    (source,) = reader.scan().snapshot.shards[0].sources
    assert source.row_count == 3_000
    # 8 bytes of the key, 12 of the text with its offset; Arrow's buffers have some to spare.
    assert pa.total_allocated_bytes() - before < 3_000 * 100
    assert cache.used_bytes < 3_000 * 150


def test_a_reader_that_follows_a_log_keeps_few_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(1 << 26)
    monkeypatch.setattr(tail, "ROOM", tail.LogRoom(cache))
    table = TableUnderTest(tmp_path / "t")
    schema, store = BaseTable.open(table.uri).schema, table.store
    followed = tail.ShardTail(store, table.shard)
    appender = long_tail(table, 1)
    manifest = ShardManifestStore(store, table.shard).require_latest()
    joined = 0
    real = Run.joined

    def counted(run: Run, later: Run) -> Run:
        nonlocal joined
        joined += run.num_rows + later.num_rows
        return real(run, later)

    monkeypatch.setattr(Run, "joined", counted)
    for number in range(1, 300):
        row = [pa.array([number % 50]), pa.array([f"row {number}"]), pa.array([False])]
        appender.append([pa.RecordBatch.from_arrays(row, schema=schema.stored)], generation=1)
        entries = followed.load(manifest, number + 2, schema)
        (source,) = followed.sources(entries, manifest, schema)
        assert sum(run.num_rows for run in entries.runs) == source.row_count == number + 1
        assert len(entries.runs) <= 10
        assert source.count(None, Newer()) == min(number + 1, 50)
    assert joined < 300 * 12, "each row is copied some log2(n) times"


def test_keys_push_rows_of_their_tail_out_when_the_room_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(60_000)
    monkeypatch.setattr(tail, "ROOM", tail.LogRoom(cache))
    table = TableUnderTest(tmp_path / "t")
    reader = other(table)
    with table.writer() as writer:
        for number in range(12):
            rows = {100 * number + row: "x" * 60 for row in range(100)}
            writer.put(named(rows))
            found = reader.scan().to_table()
            assert found.num_rows == 100 * (number + 1)
            assert reader.lookup([100 * number]).found.all()
            (followed,) = tail.ROOM._tails
            # An entry with rows is about 13 KB, its keys 7: those of eight entries fit, without any row.
            if number < 8:
                assert all(run.lease is not None for run in followed._kept.runs)
            assert followed._kept.is_whole == (number < 4)


def test_a_new_version_of_the_base_does_not_read_the_tail_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableUnderTest(tmp_path / "t", data=named({-1: "base"}))
    long_tail(table, 20)
    reader = other(table)
    assert reader.scan().count_rows() == 21
    fetched: list[int] = []
    real = WalTailer.read_entry
    monkeypatch.setattr(
        WalTailer, "read_entry", lambda self, position: fetched.append(position) or real(self, position)
    )
    lance.write_dataset(named({-2: "more"}), table.uri, mode="append")
    assert reader.scan().count_rows() == 22
    assert reader.lookup([7]).table["name"].to_pylist() == ["row 7"]
    assert fetched == []
    table.dataset.add_columns(pa.schema([pa.field("later", pa.int32())]))
    assert reader.scan().to_table()["later"].null_count == 22
    assert fetched == list(range(1, 21)), "other columns: the rows are read once more, and once only"


def test_rows_of_a_long_log_showed_json_as_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False, KEY), pa.field("doc", pa.json_())])
    table = TableUnderTest(tmp_path / "t", schema)
    with table.writer() as writer:
        docs = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', None]))
        writer.put(pa.table([pa.array([1, 2]), docs], schema=schema))
        found = []
        for room in (1 << 20, 0):
            monkeypatch.setattr(tail, "ROOM", tail.LogRoom(Cache(room)))
            reader = other(table)
            shown = reader.scan().to_table()
            found.append((shown.schema, shown.to_pylist(), reader.lookup([1]).table.to_pylist()))
        assert found[0] == found[1]


SEARCHED = pa.schema(
    [
        pa.field("id", pa.int64(), False, KEY),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 2)),
    ]
)


def test_searches_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TableUnderTest(tmp_path / "t", SEARCHED)
    with table.writer() as writer:
        for number in range(30):
            ids = [number, number // 2]
            texts = [f"fox number{number}", "a fox jumps" if number % 3 else "nothing"]
            vectors = pa.array([[number, 1.0], [0.5, number]], pa.list_(pa.float32(), 2))
            writer.put(pa.table([pa.array(ids), texts, vectors], schema=SEARCHED))
        writer.delete([7])
        found = []
        for room in (1 << 20, 0):
            monkeypatch.setattr(tail, "ROOM", tail.LogRoom(Cache(room)))
            reader = other(table)
            scan = reader.scan()
            query = checked_nearest(scan.snapshot, "vector", [3.0, 1.0], 5)
            words = TableView(table.store, reader).full_text_search("text", "fox", 8, filter="id > 2")
            found.append((nearest(scan.snapshot, query).to_pylist(), words.to_pylist()))
        assert found[0] == found[1]
        assert len(found[0][0]) == 5
        assert len(found[0][1]) == 8


def test_a_wrong_size_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LANCEWAL_CACHE_BYTES", "256MB")
    monkeypatch.setattr(tail, "ROOM", tail.LogRoom(Cache()))
    table = TableUnderTest(tmp_path / "t")
    with table.writer() as writer:
        writer.put(named({1: "a"}))
        with pytest.raises(InvalidInputError, match="LANCEWAL_CACHE_BYTES must be a number of bytes"):
            other(table).scan()


READ = """
    import json, sys
    import lancewal
    from lancewal.reader import TableReader
    from lancewal.storage import ObjectStore

    def peak():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

    def forget_peak():
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    warm, uri, what = sys.argv[1:]
    reads = {
        "lookup": lambda t: t.lookup([5]).table.num_rows,
        "limit": lambda t: t.scan(limit=1).to_table().num_rows,
        "count": lambda t: t.scan().count_rows(),
        "filtered": lambda t: t.scan(filter="id = 3 or payload IS NULL").count_rows(),
        "stream": lambda t: sum(batch.num_rows for batch in t.scan().to_batches()),
    }
    reads[what](TableReader(ObjectStore.from_uri(warm)))
    forget_peak()
    before = peak()
    answer = reads[what](TableReader(ObjectStore.from_uri(uri)))
    print(json.dumps({"answer": answer, "grown": peak() - before}))
"""
MEGABYTE = 1 << 20
BIG = pa.schema([pa.field("id", pa.int64(), False, KEY), pa.field("payload", pa.binary())])


@pytest.fixture(scope="module")
def long_log(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A table with one small entry, and one with 240 MB of rows in its log."""
    tables = []
    for name, entries, size in (("small", 1, 10), ("long", 60, MEGABYTE)):
        table = TableUnderTest(tmp_path_factory.mktemp(name) / "t", BIG)
        base = BaseTable.open(table.uri)
        appender = WalAppender.open(table.store, table.shard)
        for number in range(entries):
            ids = pa.array(range(4 * number, 4 * number + 4), pa.int64())
            payload = pa.array([bytes([number]) * size] * 4, pa.binary())
            deletes = pa.array([False] * 4)
            appender.append([pa.RecordBatch.from_arrays([ids, payload, deletes], schema=base.schema.stored)])
        tables.append(table.uri)
    return tables[0], tables[1]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure memory")
@pytest.mark.parametrize(
    ("what", "answer"), [("lookup", 1), ("limit", 1), ("count", 240), ("filtered", 1), ("stream", 240)]
)
def test_one_row_of_a_long_log_took_as_much_memory_as_the_log(
    long_log: tuple[str, str], what: str, answer: int
) -> None:
    small, long = long_log
    room = 16 * MEGABYTE
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(READ), small, long, what],
        env={"LANCEWAL_CACHE_BYTES": str(2 * room), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=True,
        timeout=PATIENCE,
    )
    found = json.loads(done.stdout)
    assert found["answer"] == answer
    # The room, and some entries of 4 MB in different forms.
    assert found["grown"] < room + 40 * MEGABYTE, f"{found['grown'] / MEGABYTE:.0f} MB for a log of 240 MB"


def test_a_tail_that_is_kept_serves_other_manifests_with_what_they_leave_and_no_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush that raises the generation need not move the cursor: entries without one wait for it."""
    table = TableUnderTest(tmp_path / "t")
    schema = BaseTable.open(table.uri).schema
    appender = WalAppender.open(table.store, table.shard)
    for number, generation in enumerate([None, 1, 1, 2], 1):
        row = [pa.array([number]), pa.array(["x"]), pa.array([False])]
        appender.append([pa.RecordBatch.from_arrays(row, schema=schema.stored)], generation=generation)
    first = ShardManifestStore(table.store, table.shard).require_latest()
    raised = replace(first, current_generation=2)
    moved = replace(raised, replay_after_wal_entry_position=3)
    halfway = replace(first, replay_after_wal_entry_position=2)
    left = {first: [1, 2, 3, 4], raised: [1, 4], moved: [4], halfway: [3, 4]}
    fetched: list[int] = []
    real = WalTailer.read_entry
    monkeypatch.setattr(
        WalTailer, "read_entry", lambda self, position: fetched.append(position) or real(self, position)
    )

    def rows_of(shared: tail.ShardTail, manifest: ShardManifest, end: int) -> list[int]:
        entries = shared.load(manifest, end, schema)
        sources = shared.sources(entries, manifest, schema)
        assert all(source.generation >= manifest.current_generation for source in sources)
        rows = [row for source in sources for row in source.view.stored["id"].to_pylist()]
        assert rows == [position for run in entries.runs for position in run.positions.tolist()]
        return rows

    for manifests in permutations(left):
        shared = tail.ShardTail(table.store, table.shard)
        for manifest in manifests:
            assert rows_of(shared, manifest, 5) == left[manifest]
            assert rows_of(shared, manifest, 4) == [row for row in left[manifest] if row < 4]
            assert rows_of(shared, manifest, 5) == left[manifest]
    shared = tail.ShardTail(table.store, table.shard)
    fetched.clear()
    assert [rows_of(shared, manifest, 5) for manifest in (first, raised, moved)] == [
        [1, 2, 3, 4],
        [1, 4],
        [4],
    ]
    assert fetched == [1, 2, 3, 4], "what is kept is not read again for a newer manifest"


def test_entries_that_were_collected_are_not_asked_for_by_a_reader_left_behind(
    tmp_path: Path,
) -> None:
    table = TableUnderTest(tmp_path / "t")
    schema = BaseTable.open(table.uri).schema
    long_tail(table, 4)
    manifest = ShardManifestStore(table.store, table.shard).require_latest()
    shared = tail.ShardTail(table.store, table.shard)
    assert len(shared.load(manifest, 2, schema).runs) == 1
    for position in (1, 2, 3):
        table.store.delete(layout.wal_entry(table.shard, position))
    moved = replace(manifest, replay_after_wal_entry_position=3)
    (run,) = shared.load(moved, 5, schema).runs
    assert run.positions.tolist() == [4]


def test_runs_are_joined_in_order_where_they_are_alike_and_up_to_a_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(position: int, rows: int, generation: int, written_for: int, is_whole: bool) -> Run:
        batch = pa.record_batch({"id": [position * 100 + row for row in range(rows)]})
        places, ends = np.array([position]), np.array([rows])
        return Run(generation, written_for, places, ends, 10 * rows, is_whole, (batch,))

    alike = [run(position, 1, 1, 1, True) for position in range(1, 8)]
    others = [run(8, 2, 2, 1, True), run(9, 2, 2, 2, True), run(10, 2, 2, 2, False), run(11, 2, 2, 2, False)]
    fewer = in_fewer([*alike, *others])
    assert [each.positions.tolist() for each in fewer] == [[1, 2, 3, 4], [5, 6], [7], [8], [9], [10, 11]]
    for each in fewer:
        rows = [row for batch in each.batches for row in batch["id"].to_pylist()]
        assert rows == sorted(rows)
        assert each.num_rows == len(rows)
        assert each.num_bytes == 10 * len(rows)
        parts = [each.between(position, position + 1) for position in each.positions.tolist()]
        assert [
            row for part in parts if part for batch in part.batches for row in batch["id"].to_pylist()
        ] == rows
    monkeypatch.setattr(runs, "_RUN_BYTES", alike[0].held_bytes * 2)
    assert max(len(each.positions) for each in in_fewer(alike)) == 2


def test_rows_that_gave_their_room_to_keys_were_kept_after_a_load_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(15_000)
    monkeypatch.setattr(tail, "ROOM", tail.LogRoom(cache))
    monkeypatch.setattr(runs, "_READ_BYTES", 1)
    table = TableUnderTest(tmp_path / "t")
    schema = BaseTable.open(table.uri).schema
    long_tail(table, 30)
    manifest = ShardManifestStore(table.store, table.shard).require_latest()
    shared = tail.ShardTail(table.store, table.shard)
    assert shared.load(manifest, 6, schema).is_whole
    real = WalTailer.read_entry
    flushed = replace(manifest, replay_after_wal_entry_position=30)
    monkeypatch.setattr(shared._tailer._manifests, "read_latest", lambda: flushed)
    monkeypatch.setattr(
        WalTailer, "read_entry", lambda self, position: None if position == 30 else real(self, position)
    )
    with pytest.raises(tail.SnapshotMovedError):
        shared.load(manifest, 31, schema)
    held = sum(run.held_bytes for run in shared._kept.runs)
    assert held <= cache.used_bytes <= 15_000
