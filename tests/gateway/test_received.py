"""Arrow data of clients that is not what it says, or that unfolds to far more than was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

import lancewal
from lancewal.gateway import Gateway, Limits
from lancewal.gateway.contract import Request
from lancewal.gateway.received import may_unfold, unfolded_bytes
from tests.patience import PATIENCE
from tests.tables import rows, wal_table

PUT_BYTES = 100_000
VECTOR = pa.list_(pa.float32(), 8)
COLUMNS = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("name", pa.string()),
        pa.field("tags", pa.list_(pa.int64())),
        pa.field("vector", VECTOR),
        pa.field("place", pa.struct([("x", pa.int64()), ("y", pa.string())])),
    ]
)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    """A table without a key, so that no column has to be there."""
    table = wal_table(tmp_path / "table", COLUMNS)
    with Gateway({"events": table}, limits=Limits(put_bytes=PUT_BYTES)) as serving:
        yield serving


def put(gateway: Gateway, batch: pa.RecordBatch, op: str = "put") -> None:
    command = flight.FlightDescriptor.for_command(Request(op, "events").encode())
    options = flight.FlightCallOptions(timeout=PATIENCE)
    with flight.connect(gateway.address) as client:
        writer, answers = client.do_put(command, batch.schema, options)
        writer.write_batch(batch)
        answers.read()
        writer.close()


def spans(type_: pa.DataType, offsets: list[int], *below: Any) -> pa.Array:
    """Texts or lists between given offsets, whatever they are."""
    children = {} if pa.types.is_string(type_) else {"children": list(below)}
    buffers = [None, pa.py_buffer(np.array(offsets, np.int32))]
    data = [] if children else [pa.py_buffer(bytes(*below))]
    return pa.Array.from_buffers(type_, len(offsets) - 1, [*buffers, *data], **children)


def view(text: bytes, count: int) -> pa.Array:
    """So many views of one long text."""
    views = np.zeros(4 * count, np.int32)
    views[0::4] = len(text)
    views[1::4] = np.frombuffer(text[:4], np.int32)[0]
    return pa.Array.from_buffers(pa.string_view(), count, [None, pa.py_buffer(views), pa.py_buffer(text)])


MALFORMED = {
    "text beyond its buffer": ("name", lambda: spans(pa.string(), [0, 1 << 30, 1], b"a")),
    "text before its buffer": ("name", lambda: spans(pa.string(), [0, -(1 << 30), 1], b"a")),
    "text that is none": ("name", lambda: spans(pa.string(), [0, 1, 2], b"\xff\xfe")),
    "items beyond their buffer": (
        "tags",
        lambda: spans(pa.list_(pa.int64()), [0, 1 << 30, 1], pa.array([1])),
    ),
    "a word that is not in the dictionary": (
        "name",
        lambda: pa.DictionaryArray.from_arrays(pa.array([0, 9]), pa.array(["a"]), safe=False),
    ),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_rows_whose_values_lead_out_of_their_buffers_were_read(gateway: Gateway, what: str) -> None:
    """The gateway read other memory of its process, or ended with a segmentation fault."""
    column, make = MALFORMED[what]
    batch = pa.record_batch([pa.array([1, 2]), make()], ["id", column])
    with pytest.raises(flight.FlightServerError, match="no valid Arrow data"):
        put(gateway, batch)
    with lancewal.connect(gateway.address, timeout=PATIENCE) as remote:
        assert remote.count_rows() == 0


MANY = 10**6
BOMBS: dict[str, Callable[[], pa.RecordBatch]] = {
    "nulls of no type": lambda: pa.record_batch([pa.nulls(MANY)], ["id"]),
    "lists of nulls of no type": lambda: pa.record_batch(
        [spans(pa.list_(pa.null()), [0, MANY], pa.nulls(MANY))], ["tags"]
    ),
    "vectors that are missing": lambda: pa.record_batch([pa.array(range(5000))], ["id"]),
    "one word of a dictionary": lambda: pa.record_batch(
        [pa.DictionaryArray.from_arrays(pa.array(np.zeros(5000, np.int8)), pa.array(["x" * 5000]))], ["name"]
    ),
    "one text that views name": lambda: pa.record_batch([view(b"x" * 50_000, 1000)], ["name"]),
    "structs of nulls": lambda: pa.record_batch(
        [pa.StructArray.from_arrays([pa.nulls(MANY), pa.nulls(MANY)], ["x", "y"])], ["place"]
    ),
}


@pytest.mark.parametrize("what", BOMBS)
def test_small_messages_unfolded_to_more_memory_than_a_put_may_have(gateway: Gateway, what: str) -> None:
    with pytest.raises(flight.FlightServerError, match="are allowed"):
        put(gateway, BOMBS[what]())
    with lancewal.connect(gateway.address, timeout=PATIENCE) as remote:
        assert remote.count_rows() == 0


@pytest.mark.parametrize(
    "values", [pa.nulls(MANY), spans(pa.string(), [0, 1 << 30, 1], b"a")], ids=["nulls", "malformed"]
)
def test_keys_and_vectors_of_a_read_are_checked_too(events: lancewal.Table, values: pa.Array) -> None:
    limits = Limits(put_bytes=PUT_BYTES)
    with Gateway({"events": events}, limits=limits) as gateway, flight.connect(gateway.address) as client:
        for op in ("lookup", "vector_search"):
            asked = Request(op, "events", values=pa.table([values], ["id"])).encode()
            with pytest.raises(flight.FlightServerError, match=r"more than|no valid Arrow data"):
                client.do_get(flight.Ticket(asked)).read_all()


def test_rows_in_another_form_that_are_no_larger_are_taken(gateway: Gateway) -> None:
    words = pa.array(["red", "blue", None, "red"])
    batch = pa.record_batch(
        [pa.array([1, 2, 3, 4], pa.int8()), words.dictionary_encode(), pa.nulls(4)], ["id", "name", "tags"]
    )
    put(gateway, batch)
    put(gateway, batch.set_column(1, "name", words.cast(pa.string_view())))
    put(gateway, batch.set_column(1, "name", words.cast(pa.large_string())))
    with lancewal.connect(gateway.address, timeout=PATIENCE) as remote:
        found = remote.scan(columns=["name"]).to_table().column("name").to_pylist()
    assert sorted(found, key=str) == sorted(3 * words.to_pylist(), key=str)


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, None, 3]),
        pa.array(["a", None, "bcd"]),
        pa.array(["a", None, "bcd"], pa.string_view()),
        pa.array(["a", None, "bcd"]).dictionary_encode(),
        pa.array([[1, 2], None, []]),
        pa.array([[1.0] * 8, None], VECTOR),
        pa.array([{"x": 1, "y": "a"}, None]),
        pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
        pa.array([True, None, False]),
        pa.nulls(3),
        pa.array([], pa.string()),
    ],
    ids=lambda array: str(array.type),
)
def test_the_unfolded_size_of_usual_columns_is_about_their_own(array: pa.Array) -> None:
    for some in (array, array.slice(1)):
        size = unfolded_bytes(pa.record_batch([some], ["a"]))
        assert 0 <= size <= 200


def test_many_keys_of_wide_rows_are_deleted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key becomes a row with nulls in all other columns, so a message of keys unfolds too."""
    monkeypatch.setattr("lancewal.gateway.remote_writer._PART_BYTES", PUT_BYTES // 2)
    table = wal_table(tmp_path / "table", pa.schema([*rows(0, 1).schema, pa.field("vector", VECTOR)]))
    with (
        Gateway({"events": table}, limits=Limits(put_bytes=PUT_BYTES)) as gateway,
        lancewal.connect(gateway.address, timeout=PATIENCE) as remote,
        remote.writer() as writer,
    ):
        writer.put([{"id": number} for number in range(1000)])
        assert writer.delete(list(range(5000))).num_rows == 5000
        assert remote.count_rows() == 0


def test_columns_that_unfolded_after_others_that_did_not_are_checked(gateway: Gateway) -> None:
    """The gateway looks closer at columns that it has not seen before."""
    plain = pa.record_batch([pa.array([[1], [2]]), pa.array([[0.0] * 8] * 2, VECTOR)], ["tags", "vector"])
    whole = plain.append_column("id", pa.array([1, 2])).append_column("name", pa.array(["a", "b"]))
    whole = whole.append_column("place", pa.array([{"x": 1, "y": "a"}] * 2))
    put(gateway, whole)
    for what in BOMBS:
        with pytest.raises(flight.FlightServerError, match="are allowed"):
            put(gateway, BOMBS[what]())
    put(gateway, whole)


@pytest.mark.parametrize("type_", [pa.int8(), pa.string(), pa.list_(pa.int64()), VECTOR, pa.decimal128(9, 2)])
def test_plain_columns_do_not_unfold(type_: pa.DataType) -> None:
    columns = pa.schema({"a": type_})
    assert not may_unfold(columns, columns)
    assert may_unfold(columns, pa.schema({"a": type_, "b": type_}))


@pytest.mark.parametrize(
    "type_",
    [pa.null(), pa.int8(), pa.list_(pa.null()), pa.dictionary(pa.int8(), pa.int64()), pa.string_view()],
)
def test_other_columns_may_unfold(type_: pa.DataType) -> None:
    assert may_unfold(pa.schema({"a": type_}), pa.schema({"a": pa.int64()}))
