"""What a put of a gateway's client is said to have come to, where tries go wrong one after the other.

Tables have no key: rows that are sent again without need are there twice.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from pyarrow import flight

import lancewal
from lancewal.errors import (
    BusyError,
    InvalidInputError,
    LanceWalError,
    OutcomeUnknownError,
    PartialWriteError,
    StorageError,
)
from lancewal.gateway import Gateway
from lancewal.gateway import served as served_module
from lancewal.gateway import server as server_module
from lancewal.gateway.contract import Answer
from lancewal.gateway.gathering import ThreadPut
from tests.patience import PATIENCE
from tests.tables import APPEND_ONLY, ids, wal_table


@pytest.fixture
def table(tmp_path: Path) -> lancewal.Table:
    return wal_table(tmp_path / "table", APPEND_ONLY, bucket=("id", 2))


def row(number: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array([number]), pa.array(["x"])], schema=APPEND_ONLY)


def together(writer: lancewal.RemoteWriter, *batches: pa.RecordBatch) -> list[Any]:
    """The outcomes of puts that are sent as one message."""
    puts = [ThreadPut("put", [each], each.schema, each.num_rows, each.nbytes) for each in batches]
    for put in puts:
        put.present.acquire()
    writer.write_group(puts)
    return [put.outcome for put in puts]


def test_puts_that_were_written_were_sent_again_when_their_message_was_refused_later(
    table: lancewal.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One shard had no room; then another gateway took the message, which allows smaller ones."""
    (first, one), (second, other) = {table.shard_for(number): number for number in range(40)}.items()
    write = served_module.Served.write
    calls: list[int] = []

    def unsteady(self: Any, op: str, batch: pa.RecordBatch, *rest: Any) -> int:
        calls.append(batch.num_rows)
        if len(calls) == 1:
            write(self, op, batch.slice(0, 1), *rest)
            raise PartialWriteError("put", {second: BusyError("no room")}, {first: 1})
        if len(calls) == 2:
            raise InvalidInputError("the put is too large")
        return write(self, op, batch, *rest)

    monkeypatch.setattr(served_module.Served, "write", unsteady)
    with Gateway({"t": table}) as gateway, lancewal.connect(gateway.address, timeout=PATIENCE) as remote:
        assert together(remote.writer(), row(one), row(other)) == [1, 1]
    assert calls == [2, 2, 1]
    assert ids(table.scan().to_table()) == sorted([one, other])


class Lost:
    """Answers of gateways that never arrive: the rows are written, and the call breaks."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then = then
        self._answered = server_module.answered
        self.count = 0

    def __call__(self, *args: Any) -> Answer:
        self._answered(*args)
        self.count += 1
        self._then()
        raise flight.FlightUnavailableError("the answer is lost")


def test_a_put_that_may_be_written_was_said_to_be_refused_by_a_closed_connection(
    table: lancewal.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Gateway({"t": table}) as gateway:
        remote = lancewal.connect(gateway.address, timeout=PATIENCE)
        monkeypatch.setattr(server_module, "answered", Lost(remote.close))
        with remote.writer() as writer, pytest.raises(OutcomeUnknownError):
            writer.put(row(1))
    assert ids(table.scan().to_table()) == [1]


def test_puts_of_a_message_were_sent_one_by_one_when_nobody_could_lead_after_it(
    table: lancewal.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever leads listens on a socket, which may fail; that says nothing about the rows."""
    with Gateway({"t": table}) as gateway:
        with lancewal.connect(gateway.address, timeout=PATIENCE) as remote, remote.writer() as writer:
            connection = remote._connection
            began: list[bool] = []

            def lead() -> None:
                if began:
                    raise InvalidInputError("cannot listen")

            connection._before_try = lead
            lost = Lost(lambda: began.append(True))
            monkeypatch.setattr(server_module, "answered", lost)
            outcomes = together(writer, row(1), row(2))
        assert all(isinstance(each, OutcomeUnknownError) for each in outcomes)
        assert lost.count == 1
    assert ids(table.scan().to_table()) == [1, 2]


def test_an_answer_with_many_errors_was_taken_for_a_refusal_of_the_rows(
    table: lancewal.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was longer than a request may be. Puts that were written were sent again."""
    failed = {uuid4(): StorageError("x" * 2000) for _ in range(600)}
    written = uuid4()
    write = served_module.Served.write
    calls: list[int] = []

    def fail(self: Any, op: str, batch: pa.RecordBatch, *rest: Any) -> int:
        calls.append(write(self, op, batch, *rest))
        raise PartialWriteError("put", failed, {written: 1})

    monkeypatch.setattr(served_module.Served, "write", fail)
    shards = {written: [0], **{shard: [1] for shard in failed}}
    monkeypatch.setattr(served_module.Served, "shards_of", lambda *_: shards)
    with Gateway({"t": table}) as gateway, lancewal.connect(gateway.address, timeout=PATIENCE) as remote:
        outcomes = together(remote.writer(), row(1), row(2))
    assert outcomes[0] == 1
    assert isinstance(outcomes[1], PartialWriteError)
    assert outcomes[1].failed.keys() == failed.keys()
    assert calls == [2]


@pytest.mark.parametrize("said", [b"\xff", b"[]", b'{"number": 7, "rows": 1}', b'{"number": 1, "error": 3}'])
def test_what_is_no_answer_to_the_put_leaves_its_outcome_open(
    table: lancewal.Table, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(Answer, "encode", lambda self: said)
    with Gateway({"t": table}) as gateway, lancewal.connect(gateway.address, timeout=PATIENCE) as remote:
        outcomes = together(remote.writer(), row(1), row(2))
    assert all(isinstance(each, OutcomeUnknownError) for each in outcomes)
    assert ids(table.scan().to_table()) == [1, 2]


def test_a_put_that_was_written_failed_for_want_of_a_thread(
    table: lancewal.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread closes streams that are idle, and holds nobody up: streams are closed at once without it."""

    def no_thread(timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    with Gateway({"t": table}) as gateway, lancewal.connect(gateway.address, timeout=PATIENCE) as remote:
        writer = remote.writer()
        with monkeypatch.context() as limits:
            limits.setattr(threading.Timer, "start", no_thread)
            assert writer.put(row(1)).num_rows == 1
            assert writer._idle == []
        assert writer.put(row(2)).num_rows == 1
        assert len(writer._idle) == 1
        assert writer._reaper is not None
        writer.close()
    assert ids(table.scan().to_table()) == [1, 2]


@pytest.mark.parametrize("fails", [False, True])
def test_rows_of_a_put_stayed_in_memory_until_the_garbage_collector_came(
    table: lancewal.Table, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def refuse(*_: Any) -> int:
        raise StorageError("no")

    with Gateway({"t": table}) as gateway, lancewal.connect(gateway.address, timeout=PATIENCE) as remote:
        writer = remote.writer()
        writer.put(row(0))
        if fails:
            monkeypatch.setattr(served_module.Served, "write", refuse)
        batch = row(1)
        freed = threading.Event()
        watched = pa.foreign_buffer(batch.column(0).buffers()[1].address, 8, Watch(batch, freed))
        batch = pa.RecordBatch.from_arrays(
            [pa.Array.from_buffers(pa.int64(), 1, [None, watched]), batch.column(1)], schema=APPEND_ONLY
        )
        del watched
        gc.collect()
        gc.disable()
        try:
            put(writer, batch)
            del batch
            assert freed.wait(PATIENCE)
        finally:
            gc.enable()


class Watch:
    """The owner of a buffer, which tells when nobody uses it any more."""

    def __init__(self, batch: pa.RecordBatch, freed: threading.Event) -> None:
        self._batch = batch
        self._freed = freed

    def __del__(self) -> None:
        self._freed.set()


def put(writer: lancewal.RemoteWriter, batch: pa.RecordBatch) -> None:
    with contextlib.suppress(LanceWalError):
        writer.put(batch)
