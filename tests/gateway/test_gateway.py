"""The gateway and its client: what a local table can do, from another process's point of view."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import lance
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import flight

import lancewal
from lancewal.errors import (
    BusyError,
    ClosedError,
    InvalidInputError,
    LanceWalError,
    PartialWriteError,
    ShardOwnedError,
    UnavailableError,
    WalTruncatedError,
)
from lancewal.gateway import Gateway, Limits, remote_writer, served, server
from lancewal.gateway.connection import Connection, as_error
from lancewal.gateway.contract import Answer, Numbered, Request, describe, rebuilt
from lancewal.storage import ObjectStore
from lancewal.writer import TableWriter
from tests.faults import FaultyStore
from tests.patience import PATIENCE, wait_until
from tests.tables import APPEND_ONLY, KEY, fast, ids, rows, wal_table

SEARCHABLE = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 4)),
    ]
)


def test_rows_that_a_client_puts_are_seen_by_all(
    remote: lancewal.RemoteTable, events: lancewal.Table
) -> None:
    with remote.writer() as writer:
        assert writer.put(rows(0, 100)).num_rows == 100
        assert writer.put(pd.DataFrame({"id": [3], "name": ["newer"]})).num_rows == 1
        assert writer.delete([5, 6]).num_rows == 2
    assert remote.count_rows() == events.count_rows() == 98
    assert remote.lookup(3) == {"id": 3, "name": "newer"}
    assert remote.lookup(5) is None
    found = remote.lookup([3, 5, 7], columns=["name"])
    assert isinstance(found, lancewal.LookupResult)
    assert found.found.tolist() == [True, False, True]
    assert found.table.to_pydict() == {"name": ["newer", "name_7"]}
    assert ids(remote.scan(filter="id < 10").to_table()) == [0, 1, 2, 3, 4, 7, 8, 9]
    assert remote.scan(columns=["name"], limit=4).to_table().num_rows == 4
    assert sum(batch.num_rows for batch in remote.scan().to_batches()) == 98
    assert pa.table(remote.scan()).num_rows == len(remote.scan().to_pandas()) == 98
    assert remote.schema.equals(events.schema)
    assert remote.primary_key == ("id",)


def test_flush_and_status_go_through_the_gateway(
    remote: lancewal.RemoteTable, events: lancewal.Table
) -> None:
    with remote.writer() as writer:
        writer.put(rows(0, 10))
        assert remote.status()["unflushed"]["count"] > 0
        remote.flush()
        assert remote.status()["unflushed"]["count"] == 0
        writer.put(rows(10, 10))  # the gateway's writer was not fenced by the flush
    assert remote.count_rows() == 20


def test_searches_find_through_the_gateway_what_they_find_beside_it(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "table", SEARCHABLE)
    words = ["red fox", "blue fox", "red hen", "grey owl"]
    vectors = np.eye(4, dtype=np.float32)
    with Gateway({"table": table}) as gateway, lancewal.connect(gateway.address) as remote:
        with remote.writer() as writer:
            writer.put(
                pa.table(
                    {"id": range(4), "text": words, "vector": pa.array(list(vectors), SEARCHABLE[2].type)}
                )
            )
        query = [0.0, 1.0, 0.2, 0.0]
        for one, other in (
            (table.vector_search("vector", query, 3), remote.vector_search("vector", query, 3)),
            (
                table.vector_search("vector", query, 3, filter="id > 1", metric="cosine"),
                remote.vector_search("vector", query, 3, filter="id > 1", metric="cosine"),
            ),
            (table.full_text_search("text", "red fox", 3), remote.full_text_search("text", "red fox", 3)),
            (
                table.hybrid_search("vector", query, "text", "red fox", 3),
                remote.hybrid_search("vector", query, "text", "red fox", 3),
            ),
            (table.search("red fox", 3), remote.search("red fox", 3)),
            (table.search(query, columns=["id"]), remote.search(query, columns=["id"])),
            (
                table.search(["fox", "hen"], vector=vectors[:2]),
                remote.search(["fox", "hen"], vector=vectors[:2]),
            ),
        ):
            assert one.equals(other)
            assert one.num_rows
        best = table.hybrid_search("vector", query, "text", "fox", 1)
        assert best["text"].to_pylist() == ["blue fox"]


def test_changes_stream_through_the_gateway(remote: lancewal.RemoteTable) -> None:
    with remote.writer() as writer:
        writer.put(rows(0, 5))
        seen = list(remote.changes())
        assert sorted(each for batch, _ in seen for each in batch["id"].to_pylist()) == list(range(5))
        place = seen[-1][1]
        writer.put(rows(5, 5))
        followed: set[int] = set()
        for batch, _ in remote.changes(place, follow=True):
            followed |= set(batch["id"].to_pylist())
            if followed == set(range(5, 10)):
                break
    with pytest.raises(InvalidInputError, match="positions start at 1"):
        list(remote.changes({next(iter(place)): -5}))


def test_a_put_that_is_refused_says_why_and_the_stream_goes_on(remote: lancewal.RemoteTable) -> None:
    with remote.writer() as writer:
        with pytest.raises(InvalidInputError, match="no column wrong"):
            writer.put(pa.table({"id": [1], "wrong": [2]}))
        with pytest.raises(InvalidInputError, match="id is string"):
            writer.put(pa.table({"id": ["text"]}))
        writer.put(rows(0, 3))
        with pytest.raises(InvalidInputError, match="null"):
            writer.put(pa.table({"id": pa.array([None], pa.int64()), "name": ["x"]}))
        writer.put(rows(3, 3))
    assert remote.count_rows() == 6


def test_what_a_client_asks_wrongly_is_refused_with_its_class(remote: lancewal.RemoteTable) -> None:
    with pytest.raises(InvalidInputError):
        remote.scan(filter="no such thing").to_table()
    with pytest.raises(InvalidInputError):
        remote.scan(columns=["missing"]).to_table()
    with pytest.raises(InvalidInputError):
        remote.scan(limit="many").to_table()  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError):
        remote.vector_search("name", [1.0], 3)
    with pytest.raises(InvalidInputError):
        remote.lookup({"wrong": 1})
    with pytest.raises(InvalidInputError):
        remote.vector_search("name", [1.0], 3, unheard_of=1)


def test_a_table_that_is_not_served_is_refused(gateway: Gateway) -> None:
    with lancewal.connect(gateway.address, table="other", timeout=PATIENCE) as other:
        with pytest.raises(InvalidInputError, match="serves no table 'other'"):
            other.count_rows()
        with pytest.raises(InvalidInputError, match="serves no table"):
            other.writer()


def test_casts_are_made_by_the_gateway(remote: lancewal.RemoteTable) -> None:
    with remote.writer(cast=True) as writer:
        writer.put(pa.table({"id": pa.array([1, 2], pa.int16()), "name": ["a", "b"]}))
        with pytest.raises(InvalidInputError):
            writer.put(pa.table({"id": [1.5]}))
    assert remote.count_rows() == 2


@pytest.mark.parametrize("flushed", [False, True])
def test_rows_with_dictionaries_were_refused_by_the_gateway(tmp_path: Path, flushed: bool) -> None:
    """Rows from a message are copied if their addresses are odd, and the copy lost the dictionaries."""
    kinds = pa.dictionary(pa.int32(), pa.int64())
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False, metadata=KEY),
            pa.field("name", pa.string()),
            pa.field("kind", kinds),
        ]
    )
    table = wal_table(tmp_path / "t", schema)
    sizes = range(1, 12)  # so that messages, and with them addresses, differ
    with Gateway({"t": table}) as gateway, lancewal.connect(gateway.address, timeout=PATIENCE) as remote:
        with remote.writer() as writer:
            for size in sizes:
                frame = pd.DataFrame({"id": range(size), "name": pd.Categorical(["n" * size] * size)})
                frame["kind"] = pd.Categorical(range(size))
                writer.put(frame)
                kind = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), pa.array([size]))
                writer.put(pa.table({"id": [100 + size], "name": ["x" * size], "kind": kind}))
        if flushed:
            remote.flush()
        found = {row["id"]: (row["name"], row["kind"]) for row in remote.scan().to_table().to_pylist()}
    assert found == {
        **{number: ("n" * max(sizes), number) for number in range(max(sizes))},
        **{100 + size: ("x" * size, size) for size in sizes},
    }


def test_many_clients_share_one_group_commit(gateway: Gateway, events: lancewal.Table) -> None:
    def produce(first: int) -> None:
        with lancewal.connect(gateway.address, timeout=PATIENCE) as table, table.writer() as writer:
            for start in range(first, first + 100, 10):
                writer.put(rows(start, 10))

    threads = [threading.Thread(target=produce, args=(100 * number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ids(events.scan().to_table()) == list(range(1600))


def test_a_stopped_gateway_has_flushed_and_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = wal_table(tmp_path / "table", bucket=("id", 4))
    gateway = Gateway({"table": table})
    remote = lancewal.connect(gateway.address, timeout=PATIENCE)
    writer = remote.writer()
    writer.put(rows(0, 50))  # its stream stays open, and idle
    gateway.close()
    gateway.close()
    assert not gateway.ready
    assert table.status().unflushed.count == 0
    monkeypatch.setattr(remote_writer, "RETRY_WINDOW", 1.0)
    with pytest.raises((UnavailableError, lancewal.errors.OutcomeUnknownError)):
        writer.put(rows(50, 1))
    writer.close()
    with pytest.raises(ClosedError):
        writer.put(rows(50, 1))


def test_a_read_whose_client_took_its_rows_was_cut_when_the_gateway_stopped(tmp_path: Path) -> None:
    """Between two batches it seemed to wait for its client alone."""
    table = wal_table(tmp_path / "table", APPEND_ONLY)
    gateway = Gateway({"t": table}, upkeep=False)
    with table.writer() as writer, lancewal.connect(gateway.address, timeout=PATIENCE) as remote:
        for start in range(60):  # more than is on its way to a client that takes nothing
            writer.put(
                pa.table({"id": range(1000 * start, 1000 * start + 1000), "name": ["x" * 1000] * 1000})
            )
        batches = iter(remote.scan().to_batches())
        found = next(batches)["id"].to_pylist()
        closing = threading.Thread(target=gateway.close)
        closing.start()
        wait_until(lambda: not gateway.ready)
        for batch in batches:
            found += batch["id"].to_pylist()
            threading.Event().wait(0.02)
        closing.join()
    assert sorted(found) == list(range(60_000))


def test_clients_that_a_stand_by_sent_to_a_gateway_that_was_stopping_were_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had taken its address back before it had let its shards go: the stand-by could name nobody."""
    table = wal_table(tmp_path / "table")
    gateway = Gateway({"t": table})
    with lancewal.connect(gateway.address, timeout=30) as remote, remote.writer() as writer:
        writer.put(rows(0, 3))
    close, told = TableWriter.close, []

    def close_and_look(writer: TableWriter) -> None:
        told.extend(owner.address for owner in table.owners() if owner.shards)
        close(writer)

    monkeypatch.setattr(TableWriter, "close", close_and_look)
    gateway.close()
    assert told == [gateway.address]
    assert table.owners() == []


def test_a_client_goes_on_with_the_gateway_that_takes_the_place_of_its_own(tmp_path: Path) -> None:
    """Without a key every row that a retry wrote twice would be seen twice."""
    table = wal_table(tmp_path / "table", APPEND_ONLY)
    first, second = Gateway({"t": table}), Gateway({"t": lancewal.open(table.uri)})
    remote = lancewal.connect([first.address, second.address], timeout=PATIENCE)
    sent = threading.Event()

    def produce() -> None:
        with remote.writer() as writer:
            for start in range(300):
                writer.put(rows(start, 1, schema=APPEND_ONLY))
                if start == 100:
                    sent.set()

    producer = threading.Thread(target=produce)
    producer.start()
    assert sent.wait(60)
    first.close()
    producer.join()
    second.close()
    assert ids(table.scan().to_table()) == list(range(300))


def test_plain_flight_clients_can_put_and_read(gateway: Gateway) -> None:
    client = flight.connect(gateway.address)
    (info,) = client.list_flights()
    writer, reader = client.do_put(info.descriptor, info.schema)
    for start in (0, 10):
        writer.write_batch(rows(start, 10))
        assert json.loads(reader.read().to_pybytes())["rows"] == 10
    writer.close()
    read = client.do_get(client.get_flight_info(info.descriptor).endpoints[0].ticket).read_all()
    assert ids(read) == list(range(20))
    assert client.get_schema(info.descriptor).schema.names == ["id", "name"]
    assert {action.type for action in client.list_actions()} >= {"flush", "status"}
    writer, reader = client.do_put(info.descriptor, pa.schema([("wrong", pa.int64())]))
    writer.write_batch(pa.record_batch({"wrong": [1]}))
    assert reader.read() is None
    with pytest.raises(flight.FlightServerError, match="no column wrong"):
        writer.close()
    client.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"op": 1}',
        b'{"op": "flush", "table": 3}',
        b'{"op":"flush"}\nnot arrow',
        b"\xff\xfe",
    ],
)
def test_malformed_requests_are_refused(gateway: Gateway, body: bytes) -> None:
    client = flight.connect(gateway.address)
    with pytest.raises(flight.FlightServerError) as refused:
        list(client.do_action(flight.Action("flush", body)))
    assert json.loads(refused.value.extra_info)["class"] == "InvalidInputError"
    with pytest.raises(flight.FlightServerError):
        client.do_get(flight.Ticket(body)).read_all()
    with pytest.raises(flight.FlightServerError):
        client.get_flight_info(flight.FlightDescriptor.for_command(body))
    client.close()


def test_oversized_puts_are_refused(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "table")
    with (
        Gateway({"table": table}, limits=Limits(put_bytes=10_000)) as gateway,
        lancewal.connect(gateway.address) as remote,
        remote.writer() as writer,
    ):
        with pytest.raises(InvalidInputError, match="in parts"):
            writer.put(rows(0, 5_000))
        writer.put(rows(0, 10))
        assert remote.count_rows() == 10


def test_callers_beyond_the_limit_are_told_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_writer, "_IDLE_SECONDS", PATIENCE)
    table = wal_table(tmp_path / "table")
    with Gateway({"table": table}, limits=Limits(calls=2)) as gateway:
        first, second, third = (lancewal.connect(gateway.address, timeout=PATIENCE) for _ in range(3))
        writers = [first.writer(), second.writer()]
        for number, writer in enumerate(writers):
            writer.put(rows(number, 1))  # each holds its stream
        with flight.FlightClient(gateway.address) as hasty, pytest.raises(flight.FlightError) as refused:
            list(hasty.do_action(flight.Action("count_rows", Request("count_rows", "table").encode())))
        assert isinstance(as_error(refused.value), BusyError)
        writers[0].close()
        while gateway.calls_under_way > 1:
            threading.Event().wait(0.01)
        assert third.count_rows() == 2
        writers[1].close()
        for each in (first, second, third):
            each.close()


def test_errors_come_back_as_what_they_were() -> None:
    one, two = uuid4(), uuid4()
    for error in (
        InvalidInputError("column id: no"),
        WalTruncatedError(one, 3, 9),
        lancewal.errors.FencedError(one, 1, 2),
        lancewal.errors.SplitShardError([one, two]),
        PartialWriteError("put", {one: BusyError("full"), two: ValueError("odd")}, {two: 3}),
    ):
        back = rebuilt(json.loads(json.dumps(describe(error))))
        assert type(back) is type(error)
        assert isinstance(back, LanceWalError)
        for name in ("shard_id", "position", "first_retained", "local_epoch", "shard_ids", "written"):
            assert getattr(back, name, None) == getattr(error, name, None)
        if not isinstance(error, PartialWriteError):
            assert str(back) == str(error)
    assert type(rebuilt({"class": "Exception", "text": "no class of ours"})) is LanceWalError
    assert Answer.decode(Answer(3, 7).encode()) == Answer(3, 7)
    assert Numbered.decode(Numbered(3, 2).encode()) == Numbered(3, 2)
    assert Request.decode(Request("scan", "t", {"limit": 1}).encode()) == Request("scan", "t", {"limit": 1})


def test_reads_that_clients_gave_up_before_they_began_took_their_places_for_ever(
    gateway: Gateway, events: lancewal.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = events.scan
    gone = threading.Event()

    def slow(*args: object, **how: object) -> object:
        assert gone.wait(60)
        return scan(*args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(events, "scan", slow)
    client = flight.connect(gateway.address)
    ticket = flight.Ticket(Request("scan", "events").encode())
    for _ in range(3):
        with pytest.raises(flight.FlightTimedOutError):
            client.do_get(ticket, flight.FlightCallOptions(timeout=0.05)).read_all()
    gone.set()
    client.close()
    while gateway.calls_under_way:
        threading.Event().wait(0.01)


def test_a_put_whose_shards_two_gateways_have_ends_when_each_has_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went to and fro between them until its time was over."""
    table = wal_table(tmp_path / "table", bucket=("id", 2))
    one, two = (rows(start, 1) for start in _ids_of_two_shards(table))
    owner = table.writer()
    owner.put(one)
    with Gateway({"t": lancewal.open(table.uri)}) as gateway:
        with lancewal.connect(gateway.address, timeout=PATIENCE) as remote, remote.writer() as writer:
            writer.put(two)
            monkeypatch.setattr(remote_writer, "RETRY_WINDOW", 1.0)
            both = pa.Table.from_batches([one, two])
            (kept,) = owner.shard_writers
            # The other owner has no address, so nobody can send the rest there.
            with pytest.raises(lancewal.errors.OutcomeUnknownError):
                writer.put(both)
        assert table.count_rows() == 2
        assert kept in owner.shard_writers
    owner.close()


def _ids_of_two_shards(table: lancewal.Table) -> tuple[int, int]:
    by_shard = {table.shard_for(number): number for number in range(50)}
    first, second = list(by_shard.values())[:2]
    return first, second


def test_a_shard_whose_log_failed_takes_puts_with_an_id_again(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "table", APPEND_ONLY)
    store = FaultyStore(ObjectStore.from_uri(table.uri, fsync=False))
    with Gateway({"t": lancewal.Table.open(table.uri, store=store)}) as gateway:
        with lancewal.connect(gateway.address, timeout=PATIENCE) as remote, remote.writer() as writer:
            writer.put(rows(0, 1, schema=APPEND_ONLY))
            store.faults.fail("put_if_absent", where="/wal/", times=3, after=True)
            writer.put(rows(1, 1, schema=APPEND_ONLY))
            writer.put(rows(2, 1, schema=APPEND_ONLY))
        assert ids(remote_rows(gateway)) == [0, 1, 2]


def remote_rows(gateway: Gateway) -> pa.Table:
    with lancewal.connect(gateway.address) as remote:
        return remote.scan().to_table()


@given(st.integers(0, 10**20), st.integers(0, 10**20), st.integers(0, 10**9))
def test_what_every_put_says_is_read_as_any_json_is(number: int, settled: int, num_rows: int) -> None:
    """There is a short way for it, which must not take anything else, nor leave anything out."""
    said = Numbered(number, settled).encode()
    assert Numbered.decode(said) == Numbered.decode(json.dumps(json.loads(said)).encode())
    answer = Answer(number, num_rows).encode()
    assert json.loads(answer) == {"number": number, "rows": num_rows}
    assert Answer.decode(answer) == Answer(number, num_rows)


@pytest.mark.parametrize(
    "said",
    [
        b'{"number":01,"settled":0}',
        b'{"number":1,"settled":0}x',
        b'{"number":-,"settled":0}',
        b'{"number":1.5}',
    ],
)
def test_metadata_that_look_like_a_puts_and_are_not_are_refused(said: bytes) -> None:
    with pytest.raises(InvalidInputError):
        Numbered.decode(said)


def test_columns_that_a_table_got_were_refused_until_the_gateway_was_restarted(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "table")
    with Gateway({"t": table}) as gateway, lancewal.connect(gateway.address, timeout=PATIENCE) as remote:
        before = remote.writer()
        before.put(rows(0, 2))
        lance.dataset(table.uri).add_columns(pa.field("country", pa.string()))
        with remote.writer(cast=True) as after, remote.writer() as plain:
            after.put({"id": "2", "name": "c", "country": "US"})
            plain.put({"id": 3, "name": "d", "country": "NL"})
            with pytest.raises(InvalidInputError, match="no column planet"):
                plain.put(pa.table({"id": [4], "planet": ["Earth"]}))
        before.put(rows(5, 1))
        before.close()
        found = {row["id"]: row["country"] for row in remote.scan().to_table().to_pylist()}
    assert found == {0: None, 1: None, 2: "US", 3: "NL", 5: None}


def test_a_put_that_was_on_its_way_when_columns_came_kept_others_from_using_them(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "table")
    with Gateway({"t": table}) as gateway, lancewal.connect(gateway.address, timeout=PATIENCE) as remote:
        remote.writer(cast=True).put(rows(0, 1))
        (serving,) = gateway._tables.values()
        old = serving._open_writer()
        lance.dataset(table.uri).add_columns(pa.field("country", pa.string()))
        remote.writer().put({"id": 1, "name": "a", "country": "NL"})
        serving._intake(old, True)  # by the one that is on its way
        remote.writer(cast=True).put({"id": "2", "name": "b", "country": "US"})
        assert remote.count_rows("country = 'US'") == 1


def test_a_writer_beside_the_gateway_in_its_process_is_told_at_once(tmp_path: Path) -> None:
    """The address of the shard's owner was the gateway's own, and its clients asked it again and again."""
    table = wal_table(tmp_path / "table")
    with table.writer() as beside, Gateway({"t": table}, upkeep=False) as gateway:
        beside.put(rows(0, 1))
        with (
            lancewal.connect(gateway.address, timeout=10 * PATIENCE) as remote,
            remote.writer() as writer,
            pytest.raises(ShardOwnedError, match="open in this process") as refused,
        ):
            writer.put(rows(1, 1))
    assert refused.value.address is None


@pytest.mark.parametrize(
    ("listen", "advertise", "told"),
    [
        ("127.0.0.1:0", None, "grpc://127.0.0.1:"),
        ("127.0.0.1:0", "gateway.internal:9465", "grpc://gateway.internal:9465"),
    ],
)
def test_owners_have_the_address_that_clients_reach(
    tmp_path: Path, listen: str, advertise: str | None, told: str
) -> None:
    table = wal_table(tmp_path / "table")
    with Gateway({"t": table}, listen=listen, advertise=advertise) as gateway:
        with lancewal.connect(gateway.address, timeout=PATIENCE) as remote, remote.writer() as writer:
            writer.put(rows(0, 1))
        (owner,) = [owner for owner in table.owners() if owner.shards]
    assert str(owner.address).startswith(told)


def test_a_gateway_on_all_interfaces_told_others_to_go_to_0_0_0_0() -> None:
    assert server._advertised("grpc+tls://0.0.0.0:9465", None) == f"grpc+tls://{socket.getfqdn()}:9465"
    assert server._advertised("grpc+tls://[::]:9465", None) == f"grpc+tls://{socket.getfqdn()}:9465"
    for wrong in ("host", "host:", ":1", "host:70000", "grpc://host:1"):
        with pytest.raises(InvalidInputError, match="advertise"):
            server._check_advertise(wrong)


def test_a_client_tried_every_gateway_that_it_had_ever_been_sent_to() -> None:
    connection = Connection(["grpc://one:1", "grpc://two:2"], None, None, 1.0)
    for port in range(50):
        connection.turn_away(connection.turn, f"grpc://other:{port}")
        assert connection.address == f"grpc://other:{port}"
    tried = set()
    for _ in range(10):
        connection.turn_away(connection.turn)
        tried.add(connection.address)
    assert {"grpc://one:1", "grpc://two:2", "grpc://other:49"} < tried
    assert len(tried) < 10


def test_a_gateway_acknowledged_rows_that_were_in_memory_only(tmp_path: Path) -> None:
    """The table's own settings say so, or those of whoever opens it."""
    stored = fast(durable_write=False, max_wal_flush_interval=timedelta(days=1))
    table = wal_table(tmp_path / "table", writer_defaults=stored)
    with Gateway({"t": table}) as gateway, lancewal.connect(gateway.address, timeout=PATIENCE) as remote:
        assert remote.writer().put(rows(0, 3)).num_rows == 3
        assert ids(lancewal.open(table.uri).scan().to_table()) == [0, 1, 2]
        (writer,) = next(iter(gateway._tables.values()))._open_writer().shard_writers.values()
        assert writer.wal_stats().pending_batches == 0
    for settings in ({"durable_write": False}, {"config": stored}):
        with pytest.raises(InvalidInputError, match="durable_write"):
            Gateway({"t": table}, **settings)
        with pytest.raises(InvalidInputError, match="durable_write"):
            lancewal.share(table.uri, directory=tmp_path, **settings)


def test_refusals_that_quote_a_long_filter_were_too_large_for_a_reply(remote: lancewal.RemoteTable) -> None:
    with pytest.raises(InvalidInputError, match="characters"):
        remote.count_rows("nothing = '" + "z" * 20_000 + "'")


def test_more_rows_than_there_are_numbers_for_can_be_asked_for(remote: lancewal.RemoteTable) -> None:
    with remote.writer() as writer:
        writer.put(rows(0, 3))
    assert remote.scan(limit=10**30).to_table().num_rows == 3
    assert remote.scan(limit=10**30, offset=10**30).to_table().num_rows == 0


def test_only_operations_that_take_values_decode_them(gateway: Gateway) -> None:
    """A few bytes may decode to gigabytes."""
    values = Request("scan", "events", values=pa.table({"id": [1]})).encode()
    with (
        flight.connect(gateway.address) as client,
        pytest.raises(flight.FlightServerError, match="takes no values"),
    ):
        client.do_get(flight.Ticket(values)).read_all()
    request = Request.decode(Request("lookup", "events", values=pa.table({"id": range(1000)})).encode())
    with pytest.raises(InvalidInputError, match="more than 1000 bytes"):
        request.decoded_values(1000)
    decoded = request.decoded_values(10_000)
    assert decoded is not None
    assert decoded.num_rows == 1000


class TestFollowers:
    def followed(self, remote: lancewal.RemoteTable, seen: list[int], enough: int) -> threading.Thread:
        def follow() -> None:
            for batch, _ in remote.changes(dict.fromkeys(self.shards, 1), follow=True):
                seen.extend(batch["id"].to_pylist())
                if len(set(seen)) >= enough:
                    return

        thread = threading.Thread(target=follow)
        thread.start()
        return thread

    @pytest.fixture(autouse=True)
    def _table(self, tmp_path: Path) -> None:
        self.table = wal_table(tmp_path / "table")
        with self.table.writer() as writer:
            writer.put(rows(0, 1))
        self.shards = [shard.shard_id for shard in self.table.shards()]

    def test_a_follower_ended_when_its_gateway_did(self) -> None:
        """It goes on with the stand-by, from its last place; batches may come twice, none is left out."""
        seen: list[int] = []
        with Gateway({"t": self.table}) as standby:
            gateway = Gateway({"t": lancewal.open(self.table.uri)})
            addresses = [gateway.address, standby.address]
            with lancewal.connect(addresses, timeout=PATIENCE) as remote:
                following = self.followed(remote, seen, 3)
                with lancewal.connect(addresses, timeout=PATIENCE) as other, other.writer() as writer:
                    writer.put(rows(1, 1))
                    wait_until(lambda: 1 in seen, "the second row")
                    gateway.close()
                    writer.put(rows(2, 1))
                    following.join(PATIENCE)
                assert not following.is_alive()
        assert set(seen) == {0, 1, 2}

    def test_the_feed_was_read_at_the_first_address_only(self) -> None:
        start = dict.fromkeys(self.shards, 1)
        with (
            Gateway({"t": self.table}) as gateway,
            lancewal.connect(["grpc://127.0.0.1:1", gateway.address], timeout=PATIENCE) as remote,
        ):
            assert [batch["id"].to_pylist() for batch, _ in remote.changes(start)] == [[0]]

    def test_followers_without_news_kept_others_out_for_ever(self) -> None:
        seen: list[int] = []
        limits = Limits(calls=2, idle=0.2)
        with Gateway({"t": self.table}, limits=limits) as gateway:
            remotes = [lancewal.connect(gateway.address, timeout=PATIENCE) for _ in range(2)]
            following = [self.followed(remote, seen, 2) for remote in remotes]
            wait_until(lambda: gateway.calls_under_way == 2, "two followers")
            with lancewal.connect(gateway.address, timeout=PATIENCE) as other, other.writer() as writer:
                writer.put(rows(1, 1))
            for thread in following:
                thread.join(PATIENCE)
            assert not any(thread.is_alive() for thread in following)
            for remote in remotes:
                remote.close()
        assert set(seen) == {0, 1}

    def test_an_idle_follower_is_told_that_the_gateway_lives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(served, "_HEARTBEAT", 0.0)
        with Gateway({"t": self.table}) as gateway, flight.connect(gateway.address) as client:
            stream = client.do_get(flight.Ticket(Request("changes", "t", {"follow": True}).encode()))
            chunks = [stream.read_chunk() for _ in range(2)]
            stream.cancel()
        assert [chunk.data.num_rows for chunk in chunks] == [0, 0]
        assert all("place" in json.loads(chunk.app_metadata.to_pybytes()) for chunk in chunks)


def test_a_gateway_that_hangs_held_up_its_clients_although_there_is_a_stand_by(tmp_path: Path) -> None:
    """A stopped process keeps its connections, and answers nothing."""
    table = wal_table(tmp_path / "table")
    program = (
        "import sys, time, lancewal\n"
        "gateway = lancewal.Gateway({'t': lancewal.open(sys.argv[1])}, owner_lease=timedelta(seconds=1))\n"
        "print(gateway.address, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", "from datetime import timedelta\n" + program, table.uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hung:
        try:
            assert hung.stdout is not None
            address = hung.stdout.readline().strip()
            with (
                Gateway({"t": table}) as standby,
                # Without a check the put would wait for twice this time.
                lancewal.connect([address, standby.address], timeout=120) as remote,
                remote.writer() as writer,
            ):
                writer.put(rows(0, 1))
                hung.send_signal(signal.SIGSTOP)
                writer.put(rows(1, 1))
                assert ids(remote.scan().to_table()) == [0, 1]
                assert remote._connection.address == standby.address
        finally:
            hung.kill()
