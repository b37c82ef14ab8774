"""What users get wrong: addresses, settings and arguments that are none."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import numpy as np
import pytest

import lancewal
from lancewal.errors import ClosedError, InvalidInputError, ShardOwnedError
from lancewal.gateway import Access, Gateway, Limits
from lancewal.gateway.connection import Connection, Trying
from tests.patience import PATIENCE
from tests.tables import rows


@pytest.mark.parametrize(
    "address",
    [
        *["", "127.0.0.1:1", "grpc://", "grpc://:1", "grpc://host:99999", "grpc://host:x", "grpc://a b:1"],
        *["grpc+unix://", None, 5, b"grpc://host:1", [], [None], ["grpc://host:1", 5]],
    ],
)
def test_what_is_no_address_was_an_error_of_arrow_or_tried_for_a_minute(address: Any) -> None:
    with pytest.raises(InvalidInputError, match="address"):
        lancewal.connect(address)


@pytest.mark.parametrize(
    "how",
    [{"timeout": each} for each in (0, -1, float("nan"), "5", None, True)] + [{"token": b"x"}, {"table": 5}],
)
def test_settings_of_a_client_that_are_none_are_refused_before_the_first_call(how: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(how))):
        lancewal.connect("grpc://127.0.0.1:1", **how)


@pytest.mark.parametrize(
    "how",
    [
        {"calls": 0},
        {"calls": 1.5},
        {"put_bytes": "1"},
        {"patience": -1},
        {"idle": None},
        {"drain": float("nan")},
    ],
)
def test_limits_that_are_none_are_refused(how: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(how))):
        Limits(**how)


def test_settings_of_a_gateway_that_are_none_are_refused_before_it_serves(events: lancewal.Table) -> None:
    refused: list[dict[str, Any]] = [{"take_over": "later"}, {"nonsense": 1}, {"listen": "a b:0"}]
    for how in refused:
        with pytest.raises(InvalidInputError):
            Gateway({"events": events}, **how)
    with pytest.raises(InvalidInputError, match="tables"):
        Gateway({"events": events.uri})  # type: ignore[dict-item]
    with pytest.raises(InvalidInputError, match="a list"):
        Access(read_write="a token, not a list of them")  # type: ignore[arg-type]


def test_an_owner_at_an_address_that_a_client_cannot_use_was_asked_for_until_the_time_was_over() -> None:
    """One that is forged, or of another kind, as that of a gateway is for processes that share a socket."""
    for given, told in (
        ("grpc+unix:///tmp/socket", "grpc://127.0.0.1:1"),
        ("grpc+tls://host:1", "grpc://host:1"),
        ("grpc://host:1", "grpc://host:99999"),
        ("grpc://host:1", "grpc://"),
        ("grpc://host:1", "nowhere"),
    ):
        connection = Connection([given], None, None, PATIENCE)
        owned = ShardOwnedError(uuid4(), "owner", "host", 1, told)
        with pytest.raises(ShardOwnedError):
            Trying(PATIENCE).again(connection, connection.turn, owned)
        assert connection.address == given


def test_arguments_of_numpy_are_sent_and_what_json_has_no_form_for_is_refused(
    remote: lancewal.RemoteTable,
) -> None:
    with remote.writer() as writer:
        writer.put(rows(0, 5))
    assert remote.scan(limit=np.int64(2)).to_table().num_rows == 2  # type: ignore[arg-type]
    assert remote.full_text_search("name", "name", k=np.int32(3)).num_rows == 3  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="JSON"):
        remote.full_text_search("name", "name", filter=object())
    with pytest.raises(InvalidInputError, match="pass a list of names"):
        remote.scan(columns="name").to_table()
    with pytest.raises(InvalidInputError, match="cannot be asked"):
        remote.scan(columns=5).to_table()  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="start"):
        next(remote.changes(5))  # type: ignore[arg-type]


def test_a_writer_of_a_closed_connection_went_on_with_its_open_stream(
    remote: lancewal.RemoteTable,
) -> None:
    writer = remote.writer()
    writer.put(rows(0, 1))
    remote.close()
    with pytest.raises(ClosedError):
        writer.put(rows(1, 1))
