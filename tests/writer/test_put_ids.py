"""Put ids: a put that is sent again lands once, in one writer, in its successor, and shard by shard."""

from __future__ import annotations

import ctypes
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lancewal
from lancewal.base import BaseTable
from lancewal.errors import BusyError, InvalidInputError, PartialWriteError
from lancewal.format import PUT_IDS_TAG, PutId, encode_entry, entry_schema, put_ids_of, put_ids_tag
from lancewal.shard import WalTailer
from lancewal.storage import ObjectStore, layout
from lancewal.table import Table
from lancewal.writer import ShardWriter
from lancewal.writer import put_ids as put_ids_module
from lancewal.writer.group_commit import Put
from lancewal.writer.put_ids import PutIds
from tests.faults import FaultyStore
from tests.patience import PATIENCE, wait_until
from tests.tables import APPEND_ONLY, abandon, ids, open_writer, rows, wal_table


def append_only(where: Path, **how: object) -> Table:
    """Without a key every row that is written twice is seen twice."""
    return wal_table(where / "table", APPEND_ONLY, **how)


def some(start: int, count: int = 3) -> pa.RecordBatch:
    return rows(start, count, schema=APPEND_ONLY)


def test_a_put_that_is_sent_again_lands_once(tmp_path: Path) -> None:
    table = append_only(tmp_path)
    with table.writer() as writer:
        for _ in range(3):
            assert writer.put(some(0), put_id=PutId("one", 1)).num_rows == 3
        writer.put(some(0), put_id=PutId("one", 2, settled=1))
        writer.put(some(0), put_id=PutId("two", 1))
        assert ids(table.scan().to_table()) == sorted([0, 1, 2] * 3)


@pytest.mark.parametrize("durable", [True, False])
def test_the_same_put_from_many_threads_lands_once(tmp_path: Path, durable: bool) -> None:
    table = append_only(tmp_path)
    with table.writer(durable_write=durable) as writer:
        start = threading.Barrier(8)

        def send() -> None:
            start.wait()
            writer.put(some(0), put_id=PutId("one", 1)).wait()

        threads = [threading.Thread(target=send) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ids(table.scan().to_table()) == [0, 1, 2]


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("enable_memtable", [True, False])
def test_a_put_that_is_sent_again_to_the_next_writer_lands_once(
    tmp_path: Path, flushed: bool, enable_memtable: bool
) -> None:
    table = append_only(tmp_path)
    first = table.writer(enable_memtable=enable_memtable)
    for number in range(1, 40):
        first.put(some(number, 1), put_id=PutId("one", number))
    if flushed:
        first.close()
        table.flush()
    else:
        for shard_writer in first.shard_writers.values():
            abandon(shard_writer)
    with table.writer(enable_memtable=enable_memtable) as second:
        for number in (1, 17, 39, 40):
            second.put(some(number, 1), put_id=PutId("one", number))
    assert ids(table.scan().to_table()) == list(range(1, 41))


def test_entries_without_ids_in_between_hide_none(tmp_path: Path) -> None:
    table = append_only(tmp_path)
    with table.writer() as first:
        first.put(some(0), put_id=PutId("one", 1))
    for start in range(100, 130):
        with table.writer() as plain:
            plain.put(some(start, 1))
    with table.writer() as last:
        last.put(some(0), put_id=PutId("one", 1))
    assert ids(table.scan().to_table()) == [0, 1, 2, *range(100, 130)]


@pytest.mark.parametrize("gap", [False, True])
def test_an_entry_in_an_emptied_slot_passed_for_a_put_that_landed(tmp_path: Path, gap: bool) -> None:
    """Found by the simulator, seed 30955: the put was acknowledged, and its rows were nowhere."""
    table = append_only(tmp_path)
    shard = table.shard_for()
    for first in (0, 20, 30, 40):
        with table.writer() as writer:
            writer.put(some(first))
    # The first writer stood still before it wrote this, where its successor has put a sentinel. That was
    # collected, with or without more of the log, before the writer went on.
    written = encode_entry(entry_schema(APPEND_ONLY, 1, 1), [some(10)], {PUT_IDS_TAG: "one:1:0"})
    log = list(WalTailer(ObjectStore.from_uri(table.uri), shard).entries())
    slot = next(entry.position for entry in log if entry.sentinel and entry.writer_epoch == 2)
    for position in range(layout.FIRST_WAL_POSITION, slot + 1 + gap):
        (Path(table.uri) / layout.wal_entry(shard, position)).unlink()
    (Path(table.uri) / layout.wal_entry(shard, slot)).write_bytes(written)

    with table.writer() as writer:
        assert writer.put(some(10), put_id=PutId("one", 1)).num_rows == 3
        found = ids(table.scan().to_table())
    assert found == [0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32, 40, 41, 42]


def test_where_one_shard_failed_only_that_one_is_written_again(tmp_path: Path) -> None:
    table = append_only(tmp_path, bucket=("id", 4))
    store = FaultyStore(ObjectStore.from_uri(table.uri, fsync=False))
    writer = Table.open(table.uri, store=store).writer()
    writer.put(some(1000, 40))  # claims all shards
    failing = next(iter(writer.shard_writers))
    store.faults.fail("put_if_absent", where=layout.wal_dir(failing), times=None)
    with pytest.raises(PartialWriteError) as failed:
        writer.put(some(0, 40), put_id=PutId("one", 1))
    assert set(failed.value.failed) == {failing}
    with table.writer(take_over="now") as second:
        second.put(some(0, 40), put_id=PutId("one", 1))
        assert ids(table.scan(filter="id < 1000").to_table()) == list(range(40))


def test_a_refused_put_may_be_sent_again_under_its_id(tmp_path: Path) -> None:
    table = append_only(tmp_path)
    with table.writer() as writer:
        with pytest.raises(InvalidInputError):
            writer.put(pa.table({"wrong": [1]}), put_id=PutId("one", 1))
        writer.put(some(0), put_id=PutId("one", 1))
    assert ids(table.scan().to_table()) == [0, 1, 2]


def test_what_is_settled_is_forgotten_and_refused(tmp_path: Path) -> None:
    table = append_only(tmp_path)
    with table.writer() as writer:
        for number in range(1, 50):
            writer.put(some(number, 1), put_id=PutId("one", number, settled=number - 1))
        (shard_writer,) = writer.shard_writers.values()
        assert len(shard_writer._put_ids._sessions["one"].landed) == 1
        with pytest.raises(PartialWriteError, match="settled"):
            writer.put(some(1, 1), put_id=PutId("one", 1))


def test_sessions_that_are_not_used_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    known = PutIds(clock=lambda: now[0])
    known.note(put_ids_tag([PutId("old", 1)]))
    now[0] = put_ids_module.RETRY_WINDOW * 1.5
    known.note(put_ids_tag([PutId("new", 1)]))
    assert set(known._sessions) == {"new"}


def test_lance_reads_entries_with_ids(tmp_path: Path) -> None:
    table = append_only(tmp_path)
    writer = table.writer()
    writer.put(some(0), put_id=PutId("one", 1))
    (shard,) = writer.shard_writers
    for shard_writer in writer.shard_writers.values():
        abandon(shard_writer)
    (entry,) = [
        entry for entry in WalTailer(ObjectStore.from_uri(table.uri), shard).entries() if entry.batches
    ]
    assert list(put_ids_of(entry.tags["puts"])) == [PutId("one", 1)]
    with lance.dataset(table.uri).mem_wal_writer(str(shard)) as theirs:
        theirs.put(some(10))
    assert ids(table.scan().to_table()) == [0, 1, 2, 10, 11, 12]


def test_a_stream_takes_no_id(tmp_path: Path) -> None:
    table = append_only(tmp_path)
    with table.writer() as writer, pytest.raises(InvalidInputError, match="several puts"):
        writer.put(iter([some(0)]), put_id=PutId("one", 1))
    assert table.count_rows() == 0


@pytest.mark.parametrize("wrong", [("", 1, 0), ("a b", 1, 0), ("a", 0, 0), ("a", 1, 1), ("a", 1, -1)])
def test_ids_that_no_client_gives_are_refused(wrong: tuple[str, int, int]) -> None:
    with pytest.raises(InvalidInputError):
        PutId(*wrong)


@given(
    st.lists(
        st.builds(
            lambda session, settled, more: PutId(session, settled + more, settled),
            st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True),
            st.integers(0, 1 << 40),
            st.integers(1, 1 << 20),
        )
    )
)
def test_ids_come_back_from_their_tag(given_ids: list[PutId]) -> None:
    assert list(put_ids_of(put_ids_tag(given_ids))) == given_ids


@given(st.text())
def test_no_tag_is_too_strange_to_read(text: str) -> None:
    list(put_ids_of(text))


def test_a_put_with_little_patience_is_told_that_there_is_no_room(tmp_path: Path) -> None:
    table = append_only(tmp_path)
    store = FaultyStore(ObjectStore.from_uri(table.uri, fsync=False))
    writer = Table.open(table.uri, store=store).writer(
        max_memtable_size=20_000, max_unflushed_memtable_bytes=20_000
    )
    writer.put(some(0, 500), put_id=PutId("one", 1))
    with store.faults.pause("put_if_absent", where="manifest"):  # with which a flush ends
        number, full = 1, None
        while full is None and number < 200:
            number += 1
            try:
                writer.put(some(number * 1000, 500), put_id=PutId("one", number), patience=0.05)
            except PartialWriteError as error:
                full = error
    assert full is not None
    (busy,) = full.failed.values()
    assert isinstance(busy, BusyError)
    writer.put(some(number * 1000, 500), put_id=PutId("one", number))
    writer.close()
    assert table.count_rows() == number * 500


def test_a_stream_waited_for_room_whatever_its_patience(tmp_path: Path) -> None:
    with append_only(tmp_path).writer() as writer:
        writer.put(some(0, 1))
        (shard,) = writer.shard_writers.values()
        with shard._backpressure.held_back(), pytest.raises(PartialWriteError, match="BusyError"):
            writer.put(iter(some(1, 1).to_pylist()), patience=0.0)
        writer.put(iter(some(1, 1).to_pylist()), patience=PATIENCE)
        assert ids(shard.scan()) == [0, 1]


def test_a_put_waited_for_the_room_of_others_whatever_its_patience(tmp_path: Path) -> None:
    """Rows in hand, before they are split, have a room of their own."""
    with append_only(tmp_path).writer() as writer:
        rows, other = some(0, 1), threading.Lock()
        with other:
            writer._under_way.enter(other, writer._under_way._size)
            with pytest.raises(BusyError, match="No row of it was written"):
                writer.put(rows, patience=0.0)
            with pytest.raises(BusyError, match="0 rows before it are written"):
                writer.put(iter(rows.to_pylist()), patience=0.0)
        writer._under_way.leave(other)
        writer.put(rows, patience=0.0)
        assert writer.stats().put_rows == 1


def test_options_of_a_put_that_are_none_were_taken_or_failed_in_each_shard(tmp_path: Path) -> None:
    table = append_only(tmp_path)
    with table.writer() as writer, table.shard_writer(table.shard_for()) as shard:
        wrong: list[Any] = [-1, float("nan"), "1", True, timedelta(seconds=1)]
        for patience in wrong:
            for call in (writer.put, writer.delete):
                with pytest.raises(InvalidInputError, match="a number of seconds"):
                    call(some(0, 1), patience=patience)
        for put in (writer.put, writer.delete, shard.put, shard.delete):
            with pytest.raises(InvalidInputError, match=r"pass a lancewal\.PutId"):
                put(some(0, 1), put_id="one")  # type: ignore[operator]
        for session, number, settled in ((1, 1, 0), ("one", 1.5, 0), ("one", True, 0), ("one", 2, "1")):
            with pytest.raises(InvalidInputError, match="put id"):
                PutId(session, number, settled)  # type: ignore[arg-type]
    with table.writer() as writer:
        writer.put(some(0, 1), patience=np.int64(1))
    assert table.count_rows() == 1


def test_a_put_that_found_no_room_kept_the_rows_of_all_its_tries(tmp_path: Path) -> None:
    """The less room there was the more was kept: each try held on to the one before it."""
    with append_only(tmp_path).writer() as writer:
        writer.put(some(0, 1))
        (shard,) = writer.shard_writers.values()
        with shard._backpressure.held_back():
            for _ in range(3):
                with pytest.raises(PartialWriteError):
                    writer.put(some(1, 1), put_id=PutId("one", 1), patience=0.0)
        session = shard._put_ids._sessions["one"]
        assert not session.interrupted
        assert not session.under_way
        writer.put(some(1, 1), put_id=PutId("one", 1))
        assert ids(shard.scan()) == [0, 1]


@pytest.mark.parametrize("taken_in", [True, False])
def test_an_interrupted_put_that_a_leader_took_in_landed_twice(tmp_path: Path, taken_in: bool) -> None:
    """Its thread went while another inserted its rows: its id said that they were not written."""
    writer = _interrupted_while_a_leader_inserts(tmp_path, taken_in)
    for _ in range(2):
        writer.put(some(20, 1), put_id=PutId("one", 2))
    writer.close()
    assert ids(lancewal.open(tmp_path / "table").scan().to_table()) == [0, 10, 20]


@pytest.mark.parametrize("taken_in", [True, False])
def test_an_interrupted_put_that_was_refused_when_it_was_sent_again_landed_twice(
    tmp_path: Path, taken_in: bool
) -> None:
    """The refused one had taken the place of the interrupted one, and was forgotten with it."""
    writer = _interrupted_while_a_leader_inserts(tmp_path, taken_in)
    rows_again = writer._intake.shaped([some(20, 1)])
    with writer._backpressure.held_back(), pytest.raises(BusyError):
        writer.write_rows(rows_again, PutId("one", 2), patience=0.0)
    writer.put(some(20, 1), put_id=PutId("one", 2))
    writer.close()
    assert ids(lancewal.open(tmp_path / "table").scan().to_table()) == [0, 10, 20]


def _interrupted_while_a_leader_inserts(tmp_path: Path, taken_in: bool) -> ShardWriter:
    """A writer with rows 0 and 10, and a put of row 20, as ``one`` 2, whose thread is gone."""
    base = BaseTable.open(append_only(tmp_path).uri)
    store = FaultyStore(ObjectStore.from_uri(base.uri, fsync=False))
    writer = open_writer(base, store=store)
    follower = threading.Thread(target=_put_until_interrupted, args=(writer,))
    insert = writer._mode.insert

    def interrupting_insert(put: Put) -> None:
        if put.put_id is None or put.put_id.number != 2 or threading.current_thread() is not leader:
            return insert(put)
        assert follower.ident is not None
        interrupt = ctypes.py_object(KeyboardInterrupt)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(follower.ident), interrupt) == 1
        follower.join(PATIENCE)
        assert not follower.is_alive()
        if not taken_in:
            raise InvalidInputError("these rows are refused")
        return insert(put)

    writer._mode.insert = interrupting_insert  # type: ignore[method-assign]
    leader = threading.Thread(target=writer.put, args=(some(10, 1),), kwargs={"put_id": PutId("one", 1)})
    with store.faults.pause("put_if_absent", where="/wal/") as pause:
        first = threading.Thread(target=writer.put, args=(some(0, 1),))
        first.start()
        pause.wait_until_reached()
        for number, thread in enumerate((leader, follower), start=1):
            thread.start()
            wait_until(lambda: len(writer._log._line) == number, "put in line")  # noqa: B023
    for thread in (first, leader):
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return writer


def _put_until_interrupted(writer: ShardWriter) -> None:
    with pytest.raises(KeyboardInterrupt):
        writer.put(some(20, 1), put_id=PutId("one", 2))
