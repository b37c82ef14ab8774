"""Puts of many threads and coroutines in one message: fewer messages, and each put's own outcome."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

import lancewal
from lancewal.errors import (
    BusyError,
    InvalidInputError,
    LanceWalError,
    OutcomeUnknownError,
    ShardOwnedError,
)
from lancewal.gateway import Gateway, remote_writer
from lancewal.gateway import served as served_module
from lancewal.gateway import server as server_module
from lancewal.gateway.aio import AsyncTable
from lancewal.gateway.contract import Request
from lancewal.gateway.gathering import Gathering, Group, ThreadPut, take_group
from tests.patience import PATIENCE
from tests.tables import APPEND_ONLY, ids, rows, wal_table

#: A row that looks like the others until its values are looked at.
NO_ID = pa.RecordBatch.from_arrays([pa.array([None], pa.int64()), pa.array(["x"])], schema=APPEND_ONLY)


class Held:
    """The puts that a gateway takes; the first one waits until it is let go."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.begun, self.go = threading.Event(), threading.Event()

    def wait(self, num_rows: int) -> None:
        first = not self.sizes
        self.sizes.append(num_rows)
        if first:
            self.begun.set()
            assert self.go.wait(PATIENCE)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held()
    write = served_module.Served.write

    def slow(self: Any, op: str, batch: pa.RecordBatch, *rest: Any) -> int:
        held.wait(batch.num_rows)
        return write(self, op, batch, *rest)

    monkeypatch.setattr(served_module.Served, "write", slow)
    # However slow the machine is, the first message is waited for.
    monkeypatch.setattr("lancewal.gateway.gathering._LONG", PATIENCE)
    return held


class Outcomes(dict[int, Any]):
    """What threads got from a put each."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, number: int, call: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                self[number] = call()
            except BaseException as error:
                self[number] = error

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def all(self) -> Outcomes:
        for thread in self._threads:
            thread.join()
        return self


def together(held: Held, writer: Any, first: pa.RecordBatch, puts: list[Any]) -> Outcomes:
    """The outcomes of puts that came while a first one was under way, in this order."""
    outcomes = Outcomes()
    outcomes.start(-1, lambda: writer.put(first).num_rows)
    assert held.begun.wait(PATIENCE)
    for number, put in enumerate(puts):
        outcomes.start(number, put if callable(put) else lambda put=put: writer.put(put).num_rows)
        while len(writer._gathering._waiting) <= number:
            threading.Event().wait(0.001)
    held.go.set()
    return outcomes.all()


def test_puts_of_threads_that_come_meanwhile_are_one_message(
    remote: lancewal.RemoteTable, held: Held
) -> None:
    with remote.writer() as writer:
        outcomes = together(held, writer, rows(0, 1), [rows(n, 1) for n in range(1, 21)])
    assert list(outcomes.values()) == [1] * 21
    assert held.sizes == [1, 20]
    assert ids(remote.scan().to_table()) == list(range(21))


def test_deletes_go_together_and_not_with_puts(remote: lancewal.RemoteTable, held: Held) -> None:
    with remote.writer() as writer:
        deletes: list[Any] = [lambda n=n: writer.delete([n]).num_rows for n in range(3)]
        outcomes = together(held, writer, rows(0, 10), [*deletes, rows(20, 1)])
    assert [outcomes[n] for n in range(-1, 4)] == [10, 1, 1, 1, 1]
    assert held.sizes == [10, 3, 1]
    assert ids(remote.scan().to_table()) == [*range(3, 10), 20]


def waiting(op: str, number: int, *, is_there: bool = True) -> ThreadPut:
    """A put of one row whose columns are its key: those of a delete are the same."""
    batch = pa.record_batch({"id": [number]})
    put = ThreadPut(op, [batch], batch.schema, 1, batch.nbytes)
    if is_there:
        put.present.acquire()
    return put


def test_a_delete_with_the_columns_of_a_put_does_not_go_with_it() -> None:
    puts = [waiting("put", 1), waiting("put", 2), waiting("delete", 1), waiting("put", 3)]
    line = dict.fromkeys(puts)
    groups = [take_group(line) for _ in range(3)]
    assert groups == [puts[:2], puts[2:3], puts[3:]]
    assert not line


def test_a_put_whose_thread_is_gone_before_it_was_sent_is_left_out() -> None:
    gone, first, second = waiting("put", 1, is_there=False), waiting("put", 2), waiting("put", 3)
    line = dict.fromkeys([gone, first, waiting("put", 4, is_there=False), second])
    assert take_group(line) == [first, second]
    assert not line


def test_a_bad_put_in_a_message_of_many_fails_alone(tmp_path: Path, held: Held) -> None:
    """Without a key: what was written with the message and then alone would be there twice."""
    table = wal_table(tmp_path / "t", APPEND_ONLY, bucket=("id", 2))
    puts = [NO_ID if n in (3, 7) else rows(n, 1, schema=APPEND_ONLY) for n in range(10)]
    with served(table) as writer:
        outcomes = together(held, writer, rows(100, 1, schema=APPEND_ONLY), puts)
    for number in range(10):
        if number in (3, 7):
            assert isinstance(outcomes[number], InvalidInputError)
        else:
            assert outcomes[number] == 1
    assert outcomes[3] is not outcomes[7], "each thread has an error of its own"
    assert held.sizes == [1, 10, *[1] * 10]
    assert ids(table.scan().to_table()) == [0, 1, 2, 4, 5, 6, 8, 9, 100]


@contextmanager
def few_tries() -> Iterator[None]:
    """What is refused is not sent again for long, and what is answered late is answered all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_writer, "RETRY_WINDOW", 1.0)
        yield


@contextmanager
def served(table: lancewal.Table) -> Iterator[lancewal.RemoteWriter]:
    with (
        few_tries(),
        Gateway({"t": lancewal.open(table.uri)}) as gateway,
        lancewal.connect(gateway.address, timeout=PATIENCE) as remote,
        remote.writer() as writer,
    ):
        yield writer


def test_puts_whose_shards_are_well_do_not_share_the_fate_of_a_shard_that_is_not(
    tmp_path: Path, held: Held
) -> None:
    table = wal_table(tmp_path / "t", bucket=("id", 2))
    by_shard: dict[Any, list[int]] = {}
    for number in range(40):
        by_shard.setdefault(table.shard_for(number), []).append(number)
    well, taken = by_shard.values()
    both = pa.concat_batches([rows(well[6], 1), rows(taken[6], 1)])
    with table.writer() as owner:  # nobody can send it rows
        owner.put(rows(taken[0], 1))
        with served(table) as writer:
            puts = [*(rows(n, 1) for n in (*well[1:6], *taken[1:6])), both]
            outcomes = together(held, writer, rows(well[0], 1), puts)
    assert [outcomes[n] for n in range(5)] == [1] * 5
    assert all(isinstance(outcomes[n], LanceWalError) for n in range(5, 10))
    assert len({id(outcomes[n]) for n in range(5, 10)}) == 5, "each thread has an error of its own"
    assert isinstance(outcomes[10], OutcomeUnknownError)
    assert ids(table.scan().to_table()) == sorted([*well[:7], taken[0]])


def test_a_put_that_nothing_was_written_of_is_not_said_to_be_unknown(tmp_path: Path, held: Held) -> None:
    """Its message was written in part, but not with its rows."""
    table = wal_table(tmp_path / "t", bucket=("id", 2))
    well, taken = {table.shard_for(number): number for number in range(40)}.values()
    with table.writer() as owner:
        owner.put(rows(taken, 1))
        with served(table) as writer:
            outcomes = together(held, writer, rows(well, 1), [rows(well, 1), rows(taken, 1)])
    assert outcomes[0] == 1
    assert isinstance(outcomes[1], ShardOwnedError)


def test_a_message_whose_answer_was_lost_is_sent_again_and_lands_once(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = wal_table(tmp_path / "t", APPEND_ONLY, bucket=("id", 2))
    answered = server_module.answered
    lost: list[int] = []

    def losing(*args: Any) -> Any:
        answer = answered(*args)
        if answer.rows > 1 and not lost:
            lost.append(answer.rows)
            raise flight.FlightUnavailableError("the answer is lost")
        return answer

    monkeypatch.setattr(server_module, "answered", losing)
    puts = [rows(n, 1, schema=APPEND_ONLY) for n in range(1, 11)]
    with Gateway({"t": table}) as gateway, lancewal.connect(gateway.address) as remote:
        outcomes = together(held, remote.writer(), rows(0, 1, schema=APPEND_ONLY), puts)
    assert list(outcomes.values()) == [1] * 11
    assert lost == [10]
    assert ids(table.scan().to_table()) == list(range(11))


def test_rows_of_a_message_whose_sender_was_interrupted_land_once(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = wal_table(tmp_path / "t", APPEND_ONLY, bucket=("id", 2))
    send = remote_writer._Stream.send
    interrupted: list[int] = []

    def interrupt(self: Any, batch: pa.RecordBatch, *rest: Any) -> Any:
        answer = send(self, batch, *rest)
        if batch.num_rows > 1 and not interrupted:
            interrupted.append(batch.num_rows)
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(remote_writer._Stream, "send", interrupt)
    puts = [rows(n, 1, schema=APPEND_ONLY) for n in range(1, 11)]
    with served(table) as writer:
        outcomes = together(held, writer, rows(0, 1, schema=APPEND_ONLY), puts)
    assert list(outcomes.values()).count(1) == 10
    assert interrupted == [10]
    assert ids(table.scan().to_table()) == list(range(11))
    assert writer._settled() == writer._numbers, "nothing is under way for ever"


def test_many_threads_go_on_with_the_gateway_that_takes_the_place_of_theirs(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", APPEND_ONLY)
    first, second = Gateway({"t": table}), Gateway({"t": lancewal.open(table.uri)})
    outcomes, sent = Outcomes(), threading.Event()
    with (
        lancewal.connect([first.address, second.address], timeout=PATIENCE) as remote,
        remote.writer() as writer,
    ):

        def produce(start: int) -> None:
            for number in range(start, start + 40):
                writer.put(rows(number, 1, schema=APPEND_ONLY))
                if number % 40 == 10:
                    sent.set()

        for thread in range(12):
            outcomes.start(thread, lambda thread=thread: produce(40 * thread))
        assert sent.wait(PATIENCE)
        first.close()
        assert set(outcomes.all().values()) == {None}
    second.close()
    assert ids(table.scan().to_table()) == list(range(480))


def test_versions_of_a_key_that_one_thread_puts_stay_in_order(
    remote: lancewal.RemoteTable, events: lancewal.Table
) -> None:
    outcomes = Outcomes()
    with remote.writer() as writer:

        def produce(key: int) -> None:
            for version in range(30):
                writer.put(rows(key, 1, prefix=str(version)))
                found = events.lookup(key)
                assert isinstance(found, dict)
                assert found["name"] == f"{version}_{key}"

        for key in range(8):
            outcomes.start(key, lambda key=key: produce(key))
        assert set(outcomes.all().values()) == {None}


def thread_put(number: int) -> ThreadPut:
    batch = rows(number, 1)
    return ThreadPut("put", [batch], batch.schema, 1, batch.nbytes)


def test_when_the_thread_that_sends_for_others_is_interrupted_one_of_them_goes_on() -> None:
    tried: list[Group[Any]] = []
    begun, go = threading.Event(), threading.Event()

    def send(group: Group[Any]) -> None:
        tried.append(group)
        if len(tried) == 1:
            begun.set()
            assert go.wait(PATIENCE)
        if len(tried) == 2:
            raise KeyboardInterrupt
        group.settle()

    gathering = Gathering(send)
    outcomes = Outcomes()
    outcomes.start(-1, lambda: gathering.write(thread_put(0)))
    assert begun.wait(PATIENCE)
    gathering._under_way[0].began = float("inf")  # on a busy machine it is waited for all the same
    for number in range(5):
        outcomes.start(number, lambda number=number: gathering.write(thread_put(number)))
    while len(gathering._waiting) < 5:
        threading.Event().wait(0.001)
    go.set()
    found = list(outcomes.all().values())
    assert found.count(1) == 5
    assert sum(isinstance(each, KeyboardInterrupt) for each in found) == 1
    assert tried[2] is tried[1], "the same group, under the id that it has"


def test_a_message_that_takes_long_does_not_hold_up_the_next_one() -> None:
    begun, go = threading.Event(), threading.Event()

    def send(group: Group[Any]) -> None:
        if not begun.is_set():
            begun.set()
            assert go.wait(PATIENCE)
        group.settle()

    gathering = Gathering(send)
    outcomes = Outcomes()
    outcomes.start(0, lambda: gathering.write(thread_put(0)))
    assert begun.wait(PATIENCE)
    assert gathering.write(thread_put(1)) == 1, "while the first one is under way"
    go.set()
    assert outcomes.all() == {0: 1}


def test_what_failed_unexpectedly_fails_for_all_that_went_together() -> None:
    def send(group: Group[Any]) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        Gathering(send).write(thread_put(0))


@pytest.mark.parametrize("puts", [[1, 1], [3, -1], [2, 0], "2", [True, True], [1.0, 1.0]])
def test_a_message_whose_puts_do_not_add_up_is_refused(gateway: Gateway, puts: Any) -> None:
    with flight.connect(gateway.address) as client:
        command = flight.FlightDescriptor.for_command(Request("put", "events", {"session": "s"}).encode())
        writer, reader = client.do_put(command, rows(0, 3).schema)
        writer.write_with_metadata(rows(0, 3), json.dumps({"number": 1, "settled": 0, "puts": puts}).encode())
        assert json.loads(reader.read().to_pybytes())["error"]["class"] == "InvalidInputError"
        said = json.dumps({"number": 2, "settled": 0, "puts": [1, 2]}).encode()
        writer.write_with_metadata(rows(0, 3), said)
        assert json.loads(reader.read().to_pybytes()) == {"number": 2, "rows": 3}
        writer.close()


@pytest.mark.parametrize("where", ["local", "remote"])
def test_coroutines_whose_shards_are_well_are_told_so(tmp_path: Path, where: str) -> None:
    table = wal_table(tmp_path / "t", bucket=("id", 2))
    by_shard = {table.shard_for(number): number for number in range(40)}
    well, taken = by_shard.values()

    async def run(where: lancewal.Table | lancewal.RemoteTable) -> list[Any]:
        async with AsyncTable(where).writer() as writer:
            puts = [writer.put(rows(number, 1)) for number in (well, well, taken, well, taken)]
            return await asyncio.gather(*puts, return_exceptions=True)

    with table.writer() as owner:
        owner.put(rows(taken, 1))
        other = lancewal.open(table.uri)
        if where == "local":
            found = asyncio.run(run(other))
        else:
            with (
                few_tries(),
                Gateway({"t": other}) as gateway,
                lancewal.connect(gateway.address, timeout=PATIENCE) as remote,
            ):
                found = asyncio.run(run(remote))
    assert [each if isinstance(each, int) else "failed" for each in found] == [1, 1, "failed", 1, "failed"]


def test_backpressure_comes_back_as_busy(remote: lancewal.RemoteTable, monkeypatch: Any) -> None:
    def busy(*_: Any) -> int:
        raise BusyError("no room")

    monkeypatch.setattr(served_module.Served, "write", busy)
    with few_tries(), pytest.raises(BusyError):
        remote.writer().put(rows(0, 1))
