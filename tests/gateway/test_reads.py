"""Reads through a gateway: they answer as reads beside it, and may be taken slowly, or not to the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

import lancewal
from lancewal.errors import InvalidInputError
from lancewal.gateway import Gateway
from lancewal.gateway.contract import Request
from tests.patience import PATIENCE, wait_until
from tests.tables import rows, wal_table

#: Far more than the buffers between a gateway and its client hold.
LARGE = pa.table({"id": range(300_000), "name": ["x" * 100] * 300_000})


@pytest.mark.parametrize(
    ("limit", "offset"), [(0, None), (0, 5), (3, None), (3, 9), (None, 0), (None, 9), (None, None)]
)
def test_a_scan_of_no_rows_gave_all_of_them(
    remote: lancewal.RemoteTable, events: lancewal.Table, limit: int | None, offset: int | None
) -> None:
    with remote.writer() as writer:
        writer.put(rows(0, 10))
    here, there = (table.scan(limit=limit, offset=offset) for table in (events, remote))
    assert there.to_table().num_rows == here.to_table().num_rows
    assert there.count_rows() == here.count_rows()


def test_a_search_for_no_number_of_rows_found_ten(tmp_path: Path) -> None:
    table = lancewal.create(tmp_path / "table", [{"id": 1, "text": "a fox", "v": [0.0, 1.0]}], key="id")
    with Gateway({"t": table}) as gateway, lancewal.connect(gateway.address, timeout=PATIENCE) as remote:
        for each in (table, remote):
            with pytest.raises(InvalidInputError, match="k must be"):
                each.full_text_search("text", "fox", k=None)  # type: ignore[arg-type]
            with pytest.raises(InvalidInputError, match="k must be"):
                each.vector_search("v", [0.0, 1.0], k=None)  # type: ignore[arg-type]


@pytest.fixture
def large(tmp_path: Path) -> lancewal.Table:
    table = wal_table(tmp_path / "table")
    with table.writer() as writer:
        writer.put(LARGE)
    return table


def test_a_read_that_took_longer_than_the_timeout_of_a_call_was_cut(large: lancewal.Table) -> None:
    """The timeout is for calls that no gateway takes."""
    with Gateway({"events": large}) as gateway, lancewal.connect(gateway.address, timeout=0.5) as remote:
        reader = remote.scan().to_batches()
        count = reader.read_next_batch().num_rows
        time.sleep(1)  # no wait for anything: whoever takes the rows has other work
        count += sum(batch.num_rows for batch in reader)
    assert count == LARGE.num_rows


TAKEN: dict[str, Callable[[lancewal.RemoteTable], Any]] = {
    "rows": lambda remote: remote.scan().to_batches(),
    "changes": lambda remote: remote.changes(),
}


@pytest.mark.parametrize("what", TAKEN)
def test_a_read_that_is_not_taken_to_its_end_gives_its_place_back(large: lancewal.Table, what: str) -> None:
    with (
        Gateway({"events": large}) as gateway,
        lancewal.connect(gateway.address, timeout=PATIENCE) as remote,
    ):
        reader = TAKEN[what](remote)
        next(iter(reader))
        del reader
        wait_until(lambda: gateway.calls_under_way == 0, "the end of the read")


def test_a_stream_that_a_gateway_refused_did_not_say_what_came_before(remote: lancewal.RemoteTable) -> None:
    wrong = pa.record_batch({"id": ["a"], "name": ["b"]})
    with remote.writer() as writer, pytest.raises(InvalidInputError, match="of the stream, 5 rows before it"):
        writer.put(iter([rows(0, 3), rows(3, 2), wrong]))
    assert remote.count_rows() == 5


def test_changes_after_a_lost_gateway_were_left_out(tmp_path: Path) -> None:
    """The place that comes with a batch is the end of all changes, and reading went on from there."""
    table = wal_table(tmp_path / "table")
    with table.writer() as writer:
        for first in range(0, LARGE.num_rows, 20_000):
            writer.put(LARGE.slice(first, 20_000))
    with Gateway({"events": lancewal.open(table.uri)}) as standby:
        gateway = Gateway({"events": table})
        with lancewal.connect([gateway.address, standby.address], timeout=PATIENCE) as remote:
            reader = remote.changes()
            seen = set(next(reader)[0]["id"].to_pylist())
            gateway.close()  # cuts the connection, because nobody takes the rest
            seen |= {number for batch, _ in reader for number in batch["id"].to_pylist()}
    assert seen == set(range(LARGE.num_rows))


def test_changes_before_the_first_that_a_follower_was_told_were_left_out(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that knew no place began again at the end of the feed when it lost its gateway."""
    monkeypatch.setattr("lancewal.gateway.served._HEARTBEAT", float("inf"))
    with flight.connect(gateway.address) as client:
        ticket = flight.Ticket(Request("changes", "events", {"follow": True}).encode())
        stream = client.do_get(ticket, flight.FlightCallOptions(timeout=20))
        chunk = stream.read_chunk()
        stream.cancel()
    assert chunk.data.num_rows == 0
    assert "place" in json.loads(chunk.app_metadata.to_pybytes())


def test_a_follower_is_stopped_as_beside_the_gateway(
    remote: lancewal.RemoteTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lancewal.gateway.served._HEARTBEAT", 0.0)
    answers = iter([False, False, False, True])
    assert list(remote.changes(follow=True, stop=lambda: next(answers))) == []
    assert next(answers, None) is None


def test_what_a_table_refuses_was_answered_by_its_gateway(
    remote: lancewal.RemoteTable, events: lancewal.Table
) -> None:
    """A client asked something else instead: no checkpoint, a flat vector, no columns."""
    place = {str(shard.shard_id): "1" for shard in events.shards()}
    asked: list[Callable[[Any], Any]] = [
        lambda table: table.at(None),
        lambda table: table.scan(columns=["nothing"]).count_rows(),
        lambda table: table.scan(columns=[]).count_rows(),
        lambda table: list(table.changes(place)),
    ]
    with remote.writer() as writer:
        writer.put(rows(0, 3))
    for ask in asked:
        for table in (events, remote):
            with pytest.raises(InvalidInputError):
                ask(table)


def test_vectors_of_other_shapes_were_laid_flat(tmp_path: Path) -> None:
    table = lancewal.create(tmp_path / "table", [{"id": 1, "v": [0.0, 1.0]}], key="id")
    with Gateway({"t": table}) as gateway, lancewal.connect(gateway.address, timeout=PATIENCE) as remote:
        for each in (table, remote):
            with pytest.raises(InvalidInputError):
                each.vector_search("v", [[[0.0, 1.0]]])
            assert each.vector_search("v", [0.0, 1.0], columns={"id"}).num_rows == 1
