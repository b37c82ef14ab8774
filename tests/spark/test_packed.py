"""Lists of numbers in the layout of Spark's own rows, read back by the layout's description alone."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lancewal.spark import packed as module
from lancewal.spark.packed import packed, packed_batches

LETTERS = {
    pa.int8(): "b",
    pa.int16(): "h",
    pa.int32(): "i",
    pa.int64(): "q",
    pa.float32(): "f",
    pa.float64(): "d",
}


def unpacked(content: bytes, item: pa.DataType) -> list[Any]:
    """The items of one array; what fills it up must be zero."""
    (count,) = struct.unpack_from("<q", content)
    head = 8 + -(-count // 64) * 8
    bits = content[8:head]
    letter = LETTERS[item]
    items = struct.unpack_from(f"<{count}{letter}", content, head)
    end = head + count * struct.calcsize(letter)
    assert len(content) == -(-end // 8) * 8
    assert not any(content[end:])
    nulls = [bool(bits[place // 8] >> place % 8 & 1) for place in range(len(bits) * 8)]
    assert not any(nulls[count:])
    assert not any(each for each, null in zip(items, nulls, strict=False) if null)
    return [None if null else each for each, null in zip(items, nulls, strict=False)]


def lists_of(item: pa.DataType, lengths: list[int | None], *, nulls: bool, seed: int = 0) -> pa.ListArray:
    random = np.random.default_rng(seed)

    def one() -> int | None:
        return None if nulls and random.random() < 0.2 else int(random.integers(-100, 100))

    return pa.array([None if n is None else [one() for _ in range(n)] for n in lengths], pa.list_(item))


@pytest.mark.parametrize("item", LETTERS, ids=str)
@pytest.mark.parametrize("nulls", [False, True], ids=["full", "with nulls"])
@pytest.mark.parametrize(
    "lengths",
    [
        [3] * 7,
        [65] * 3,
        [0, 0],
        [64, None, 64],
        [65, 0, None, 1, 63, 64, 127, 128, 129, 1024],
        [None, None],
        [0],
        [],
    ],
    ids=["vectors", "long vectors", "empty vectors", "null vector", "any", "only null", "empty", "no rows"],
)
def test_what_is_packed_is_read_back(item: pa.DataType, nulls: bool, lengths: list[int | None]) -> None:
    lists = lists_of(item, lengths, nulls=nulls)
    found = packed(lists)
    found.validate(full=True)
    assert [None if each is None else unpacked(each, item) for each in found.to_pylist()] == lists.to_pylist()


@pytest.mark.parametrize("start", range(0, 12, 3))
def test_a_slice_is_packed_like_a_whole_column(start: int) -> None:
    lists = lists_of(pa.float32(), [3, None, 70, 0, 5, None, 3, 3, 66, 1, 2, 9, None, 4], nulls=True)
    part = lists.slice(start, 5)
    assert packed(part).to_pylist() == packed(lists).to_pylist()[start : start + 5]


def test_items_below_null_lists_are_left_out() -> None:
    items = pa.array(range(6), pa.int32())
    lists = pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 6], pa.int32()), items, mask=pa.array([False, True, False])
    )
    found = packed(lists).to_pylist()
    assert found[1] is None
    assert [unpacked(found[0], pa.int32()), unpacked(found[2], pa.int32())] == [[0, 1], [4, 5]]


def test_every_bit_of_a_float_is_kept() -> None:
    bits = np.array([0x7FC00123, 0xFFC00001, 0x7F800000, 0xFF800000, 0x80000000, 1], np.uint32)
    lists = pa.ListArray.from_arrays(pa.array([0, 6], pa.int32()), pa.array(bits.view(np.float32)))
    (content,) = packed(lists).to_pylist()
    assert content == struct.pack("<qq", 6, 0) + bits.tobytes()


def test_what_would_be_too_large_for_one_batch_comes_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES", 200)
    lengths = [1, 2, None, 1_000, 0, 0, 3, 100, 100, 4]
    lists = lists_of(pa.float64(), lengths, nulls=True)
    batch = pa.record_batch({"id": range(len(lengths)), "a": lists, "b": lists})
    wanted = pa.schema([("id", pa.int64()), ("a", pa.binary()), ("b", batch.schema.field("b").type)])
    parts = list(packed_batches(batch, wanted))
    assert len(parts) > 3
    # A row of its own is all that may be larger.
    assert all(
        part.num_rows == 1 or sum(map(len, part["a"].drop_null().to_pylist())) <= 200 for part in parts
    )
    found = pa.Table.from_batches(parts, wanted)
    assert found["id"].to_pylist() == batch["id"].to_pylist()
    assert found["a"].combine_chunks().to_pylist() == packed(lists).to_pylist()
    assert found["b"].to_pylist() == lists.to_pylist()


def test_offsets_that_would_wrap_around_are_an_error() -> None:
    with pytest.raises(pa.ArrowInvalid):
        module._binary(np.zeros(1, np.int8), np.array([1 << 30, 1 << 30], np.int64))
