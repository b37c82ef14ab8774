"""Decimals from IPC streams, whose buffers begin at multiples of 8 bytes only."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

import lancewal
from lancewal.format.spans import aligned, aligned_batch
from tests.tables import KEY, fast

PRICE = pa.decimal128(10, 2)
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("price", PRICE),
        pa.field("parts", pa.list_(pa.struct([pa.field("price", PRICE), pa.field("what", pa.string())]))),
    ]
)
_ROWS = [
    {"id": 1, "price": Decimal("1.10"), "parts": [{"price": Decimal("0.10"), "what": "a"}, None]},
    {"id": 2, "price": None, "parts": None},
    {"id": 3, "price": Decimal("-9.99"), "parts": []},
]


def at_offset(batch: pa.RecordBatch, offset: int) -> pa.RecordBatch:
    """``batch`` out of an IPC stream that begins ``offset`` bytes after an aligned address."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    stream = sink.getvalue()
    memory = pa.allocate_buffer(stream.size + offset)
    np.frombuffer(memory, np.uint8)[offset:] = np.frombuffer(stream, np.uint8)
    return pa.ipc.open_stream(memory.slice(offset)).read_next_batch()


def addresses(array: pa.Array) -> list[int]:
    return [buffer.address % 16 for buffer in array.buffers() if buffer is not None]


@pytest.mark.parametrize("name", ["price", "parts"])
def test_values_are_moved_where_they_must_be_and_nowhere_else(name: str) -> None:
    batch = pa.RecordBatch.from_pylist(_ROWS, schema=SCHEMA)
    both = [at_offset(batch, offset) for offset in (0, 8)]
    assert any(any(addresses(each.column(name))) for each in both)
    for each in both:
        moved = aligned(each.column(name))
        assert not any(addresses(moved))
        assert moved.equals(batch.column(name))
        assert aligned(moved) is moved
        assert aligned_batch(each).equals(batch)
        ids = batch.select(["id"])
        assert aligned_batch(ids) is ids


@pytest.mark.parametrize("offset", [0, 8])
def test_misaligned_decimals_are_flushed_replayed_and_compacted(tmp_path: Path, offset: int) -> None:
    """Lance's engine died of them, and a table whose log held some could not be flushed any more."""
    uri = str(tmp_path / "table")
    lance.write_dataset(SCHEMA.empty_table(), uri)
    table = lancewal.initialize(uri, bucket=("id", 1), writer_defaults=fast())
    batch = at_offset(pa.RecordBatch.from_pylist(_ROWS, schema=SCHEMA), offset)
    with table.writer() as writer:
        writer.put(batch.slice(0, 1))
    with table.writer(enable_memtable=False) as writer:
        writer.put(batch.slice(1))
    assert table.scan(filter="price > 0").to_table().num_rows == 1
    table.flush()
    table.compact()
    assert lance.dataset(uri).to_table().sort_by("id").to_pylist() == _ROWS
