"""Slow, silent, wrong and malicious clients: refused, logged without secrets, and a harm to nobody else."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import flight

import lancewal
from lancewal.gateway import Access, Gateway, Limits
from lancewal.gateway.contract import Numbered, Request
from tests.patience import PATIENCE, wait_until
from tests.tables import ids, rows, wal_table

TOKEN = "secret-token-of-these-tests"
WRONG = "another-token-that-nobody-knows"


def by_path(name: str) -> flight.FlightDescriptor:
    return flight.FlightDescriptor.for_path(name)


def ticket(op: str, table: str = "events") -> flight.Ticket:
    return flight.Ticket(Request(op, table).encode())


def put(client: flight.FlightClient, options: flight.FlightCallOptions, table: str = "events") -> object:
    batch = rows(0, 3)
    writer, answers = client.do_put(by_path(table), batch.schema, options)
    with writer:
        writer.write_batch(batch)
        answers.read()
        writer.done_writing()
    return None


CALLS: dict[str, Callable[[flight.FlightClient, flight.FlightCallOptions], object]] = {
    "put": put,
    "scan": lambda client, options: client.do_get(ticket("scan"), options).read_all(),
    "changes": lambda client, options: client.do_get(ticket("changes"), options).read_all(),
    "flush": lambda client, options: list(
        client.do_action(flight.Action("flush", Request("flush", "events").encode()), options)
    ),
    "tables": lambda client, options: list(client.list_flights(b"", options)),
    "info": lambda client, options: client.get_flight_info(by_path("events"), options),
    "schema": lambda client, options: client.get_schema(by_path("events"), options),
    "actions": lambda client, options: list(client.list_actions(options)),
}


def is_untouched(table: lancewal.Table) -> bool:
    """Whether nobody has claimed a shard, which comes before the first row."""
    return all(shard.epoch == 0 for shard in table.shards())


@pytest.mark.parametrize("header", [None, f"Bearer {WRONG}", f"Basic {TOKEN}", "Bearer"])
def test_no_call_is_taken_without_the_token(
    events: lancewal.Table, header: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    headers = [] if header is None else [(b"authorization", header.encode())]
    options = flight.FlightCallOptions(timeout=PATIENCE, headers=headers)
    with (
        Gateway({"events": events}, access=Access(read_write=(TOKEN,))) as gateway,
        flight.connect(gateway.address) as client,
        caplog.at_level(logging.DEBUG),
    ):
        for name, call in CALLS.items():
            caplog.clear()
            with pytest.raises((pa.ArrowException, OSError), match="known token"):
                call(client, options)
            assert "refused a call without a known token" in caplog.text, name
            assert TOKEN not in caplog.text
            assert WRONG not in caplog.text
        assert gateway.calls_under_way == 0
    assert is_untouched(events)


@pytest.mark.parametrize(
    "name", ["other", "../events", "/etc", "s3://bucket/events", "events/", "EVENTS", "\0"]
)
def test_a_path_that_is_not_served_is_refused(gateway: Gateway, events: lancewal.Table, name: str) -> None:
    options = flight.FlightCallOptions(timeout=PATIENCE)
    with flight.connect(gateway.address) as client:
        with pytest.raises(pa.ArrowException):
            put(client, options, name)
        with pytest.raises(pa.ArrowException):
            client.do_get(ticket("scan", name), options).read_all()
        with pytest.raises(pa.ArrowException):
            client.get_schema(by_path(name), options)
    assert is_untouched(events)


def test_a_path_of_several_parts_is_refused(gateway: Gateway) -> None:
    with flight.connect(gateway.address) as client, pytest.raises(pa.ArrowException, match="name alone"):
        client.get_schema(flight.FlightDescriptor.for_path("..", "events"))


@pytest.mark.parametrize(
    "said", [b"\x00\xff", b"[]", b'{"number": "one"}', b'{"number": true}', b"{" * 10_000, b" " * (2 << 20)]
)
def test_a_put_whose_metadata_is_no_number_is_refused(
    gateway: Gateway, events: lancewal.Table, said: bytes
) -> None:
    command = Request("put", "events", {"session": "s"}).encode()
    batch = rows(0, 3)
    with flight.connect(gateway.address) as client:
        writer, answers = client.do_put(flight.FlightDescriptor.for_command(command), batch.schema)
        with writer:
            writer.write_with_metadata(batch, said)
            assert b"InvalidInputError" in answers.read().to_pybytes()
            writer.write_with_metadata(batch, Numbered(1).encode())  # the stream goes on
            assert b'"rows": 3' in answers.read().to_pybytes()
            writer.done_writing()
    assert events.count_rows() == 3


def test_noise_on_the_wire_harms_nobody(gateway: Gateway, remote: lancewal.RemoteTable) -> None:
    host, _, port = gateway.address.removeprefix("grpc://").rpartition(":")
    for noise in (
        b"",
        b"\x00" * 100_000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 999,
    ):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(noise)
    with remote.writer() as writer:
        writer.put(rows(0, 3))
    assert remote.count_rows() == 3


def test_clients_that_do_nothing_keep_nobody_out(tmp_path: Path) -> None:
    """Each holds a call: open streams without a put, and a read whose rows nobody takes."""
    table = wal_table(tmp_path / "table")
    with table.writer() as writer:
        writer.put(pa.table({"id": range(400_000), "name": ["x" * 100] * 400_000}))
    limits = Limits(calls=4, idle=0.2)
    with (
        Gateway({"events": table}, limits=limits) as gateway,
        flight.connect(gateway.address) as silent,
        flight.connect(gateway.address, generic_options=[("grpc.use_local_subchannel_pool", 1)]) as slow,
    ):
        streams = [silent.do_put(by_path("events"), rows(0, 1).schema) for _ in range(3)]
        reading = slow.do_get(ticket("scan"))
        wait_until(lambda: gateway.calls_under_way == 4, "four calls")
        with lancewal.connect(gateway.address, timeout=PATIENCE) as remote, remote.writer() as writer:
            for number in range(10):
                writer.put(rows(1_000_000 + number, 1))
            assert remote.count_rows("id >= 1000000") == 10
        del streams, reading


def test_a_client_that_is_killed_gives_its_place_back(gateway: Gateway, remote: lancewal.RemoteTable) -> None:
    program = (
        "import sys, lancewal, pyarrow as pa\n"
        "writer = lancewal.connect(sys.argv[1], table='events').writer()\n"
        "writer.put(pa.table({'id': [1], 'name': ['a']}))\n"
        "print('put', flush=True)\n"
        "sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, gateway.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"put\n"
    assert gateway.calls_under_way == 1
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    wait_until(lambda: gateway.calls_under_way == 0, "the end of its call")
    assert remote.count_rows() == 1


def test_a_client_that_floods_does_not_stop_the_others(tmp_path: Path) -> None:
    """Puts beyond the limit and wrong ones, as fast as they go, from many threads."""
    table = wal_table(tmp_path / "table")
    stop = threading.Event()
    with Gateway({"events": table}, limits=Limits(put_bytes=100_000)) as gateway:

        def flood() -> None:
            large = rows(0, 20_000)
            with lancewal.connect(gateway.address, timeout=PATIENCE) as remote, remote.writer() as writer:
                while not stop.is_set():
                    with pytest.raises(lancewal.errors.InvalidInputError):
                        writer.put(large)

        threads = [threading.Thread(target=flood) for _ in range(4)]
        for each in threads:
            each.start()
        with lancewal.connect(gateway.address, timeout=PATIENCE) as remote, remote.writer() as writer:
            for number in range(50):
                writer.put(rows(number, 1))
        stop.set()
        for each in threads:
            each.join()
    assert ids(table.scan().to_table()) == list(range(50))


@pytest.mark.parametrize("cast", [["numbers"], {"a": 1}, 7.5, None])
def test_a_cast_that_is_none_was_logged_as_a_failure_of_the_gateway(
    gateway: Gateway, cast: object, caplog: pytest.LogCaptureFixture
) -> None:
    command = flight.FlightDescriptor.for_command(Request("put", "events", {"cast": cast}).encode())
    with flight.connect(gateway.address) as client:

        def put() -> None:
            writer, answers = client.do_put(command, rows(0, 1).schema)
            writer.write_batch(rows(0, 1))
            answers.read()
            writer.close()

        with pytest.raises(flight.FlightServerError, match="cast is"):
            put()
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize("op", ["flush", "status"])
def test_what_an_action_does_not_take_was_ignored(gateway: Gateway, op: str) -> None:
    """Whoever asks for the status of a checkpoint must not get that of the table."""
    with flight.connect(gateway.address) as client, pytest.raises(flight.FlightServerError, match="not at"):
        list(client.do_action(flight.Action(op, Request(op, "events", {"at": "then"}).encode())))


def test_a_feed_that_begins_at_a_checkpoint_was_the_whole_feed(gateway: Gateway) -> None:
    request = flight.Ticket(Request("changes", "events", {"at": "then"}).encode())
    with flight.connect(gateway.address) as client, pytest.raises(flight.FlightServerError, match="not at"):
        client.do_get(request).read_all()


def test_a_reader_with_a_deep_filter_ended_the_gateway(gateway: Gateway) -> None:
    deep = {"filter": " OR ".join(f"id + {number} = 5" for number in range(20_000))}
    with flight.connect(gateway.address) as client:
        with pytest.raises(flight.FlightServerError, match="too many parts"):
            client.do_get(flight.Ticket(Request("scan", "events", deep).encode())).read_all()
        with pytest.raises(flight.FlightServerError, match="too many parts"):
            list(
                client.do_action(flight.Action("count_rows", Request("count_rows", "events", deep).encode()))
            )
        put(client, flight.FlightCallOptions(timeout=PATIENCE))
