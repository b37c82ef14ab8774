"""Bucket hashes, which route rows to shards, and sharding values as shard manifests store them.

The hash is Spark's variant of 32-bit Murmur3, seed 0. It differs from the standard in the tail of
a text: each of the last one to three bytes is mixed as a block of its own, sign-extended. A row
must hash the same in every writer and in Lance, or its versions end up in different shards.

A stored sharding value is a little-endian integer of its own width, UTF-8 text, or one byte for a
bool; other types cannot be sharding fields. Lance compares the stored bytes when it skips shards,
so one value must always give the same bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.errors import CorruptManifestError, InvalidInputError
from lancewal.format.kinds import is_text
from lancewal.format.spans import (
    ByteSpans,
    byte_spans,
    longest_first,
    numbers,
    one_array,
    row_slices,
    unaligned_words,
)

_Words = npt.NDArray[np.uint32]

_C1 = np.uint32(0xCC9E2D51)
_C2 = np.uint32(0x1B873593)
_CHAIN = 0xE6546B64
_FINAL_1 = np.uint32(0x85EBCA6B)
_FINAL_2 = np.uint32(0xC2B2AE35)
_MASK = 0xFFFFFFFF
_MAX_BUCKETS = 0x7FFFFFFF

#: Below this many rows, Python's own integers are faster than numpy's cost per call.
_FEW_ROWS = 16

#: The word type of a float's bits, and the bits of the two values that have several patterns.
_FLOATS: dict[pa.DataType, tuple[str, int, int]] = {
    pa.float32(): ("u4", 0x7FC00000, 1 << 31),
    pa.float64(): ("u8", 0x7FF8000000000000, 1 << 63),
}


def bucket_hash(array: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.int32]:
    """The 32-bit hash of every row; null hashes to 0.

    >>> bucket_hash(pa.array(["a", None, "test"])).tolist()
    [721651713, 0, -1167338989]
    """
    values = one_array(array)
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        hashes = _hash_text(byte_spans(values))
    else:
        hashes = _hash_blocks(_fixed_width(values))
    if values.null_count:
        hashes[values.is_null().to_numpy(zero_copy_only=False)] = 0
    return hashes.view(np.int32)


def bucket_of(array: pa.Array | pa.ChunkedArray, num_buckets: int) -> npt.NDArray[np.int32]:
    """The bucket, from 0 to ``num_buckets`` - 1, of every row.

    >>> bucket_of(pa.array([1, 2, 3], pa.int32()), 8).tolist()
    [2, 7, 1]
    """
    if not 1 <= num_buckets <= _MAX_BUCKETS:
        raise InvalidInputError(f"num_buckets is {num_buckets}; it must be from 1 to {_MAX_BUCKETS}")
    return (bucket_hash(array) & np.int32(_MAX_BUCKETS)) % np.int32(num_buckets)


def check_bucket_type(type_: pa.DataType) -> None:
    """Refuse a column type that Lance cannot route by."""
    bucket_hash(pa.array([], type_))


def _fixed_width(array: pa.Array) -> npt.NDArray[Any]:
    """The values as unsigned words of the hashed width; nulls may have any value."""
    kind = array.type
    if kind in _FLOATS:
        word, canonical_nan, negative_zero = _FLOATS[kind]
        floats = numbers(array)
        bits = floats.view(word).copy()
        bits[np.isnan(floats)] = canonical_nan
        bits[bits == negative_zero] = 0
        return bits
    if pa.types.is_boolean(kind):
        return numbers(array).astype(np.uint32)
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        array = array.view(pa.int32())
    elif pa.types.is_timestamp(kind) or pa.types.is_time64(kind):
        array = array.view(pa.int64())
    elif not pa.types.is_integer(kind):
        raise InvalidInputError(
            f"a column of type {kind} cannot be bucketed; bucket by a boolean, integer, "
            "32- or 64-bit float, date32, time, timestamp or text column"
        )
    integers = numbers(array)
    # Narrow integers are hashed as 32-bit integers; signed ones are sign-extended.
    return integers.view(np.uint64) if integers.itemsize == 8 else integers.astype(np.int32).view(np.uint32)


def _hash_blocks(values: npt.NDArray[Any]) -> _Words:
    """Hash rows of one 32-bit block each, or of two blocks with the low one first."""
    hashes = np.zeros(len(values), np.uint32)
    for rows in row_slices(len(values)):
        part, state = values[rows], hashes[rows]
        if part.itemsize == 8:
            _mix(state, part.astype(np.uint32))
            _mix(state, (part >> np.uint64(32)).astype(np.uint32))
        else:
            _mix(state, part.copy())
        _finish(state, np.uint32(part.itemsize))
    return hashes


def _hash_text(spans: ByteSpans) -> _Words:
    hashes = np.empty(len(spans), np.uint32)
    words = unaligned_words(spans.data, np.uint32)
    for rows, piece in spans.pieces():
        blocks = piece.lengths >> 2
        order, having = longest_first(blocks)
        starts, blocks, lengths = piece.starts[order], blocks[order], piece.lengths[order]
        state = np.zeros(len(piece), np.uint32)
        for i, count in enumerate(having):
            if count <= _FEW_ROWS:
                for row in range(count):
                    end = starts[row] + 4 * blocks[row]
                    state[row] = _chain(int(state[row]), words[starts[row] + 4 * i : end : 4].copy())
                break
            _mix(state[:count], words[starts[:count] + 4 * i])
        for i in range(3):
            tailed = np.flatnonzero(lengths & 3 > i)
            if not tailed.size:
                break
            tail_bytes = spans.data[starts[tailed] + 4 * blocks[tailed] + i]
            mixed = state[tailed]
            _mix(mixed, tail_bytes.view(np.int8).astype(np.int32).view(np.uint32))
            state[tailed] = mixed
        _finish(state, lengths.astype(np.uint32))
        hashes[rows][order] = state
    return hashes


def _scramble(blocks: _Words) -> None:
    """The part of a mixing step that does not depend on the hash so far, in place."""
    blocks *= _C1
    _rotate_left(blocks, 15)
    blocks *= _C2


def _mix(state: _Words, blocks: _Words) -> None:
    """Mix one block per row into ``state``, in place; overwrites ``blocks``."""
    _scramble(blocks)
    state ^= blocks
    _rotate_left(state, 13)
    state *= np.uint32(5)
    state += np.uint32(_CHAIN)


def _chain(state: int, blocks: _Words) -> int:
    """Mix many blocks of one row into ``state``; overwrites ``blocks``."""
    _scramble(blocks)
    for block in blocks.tolist():
        state ^= block
        state = (state << 13 | state >> 19) & _MASK
        state = (state * 5 + _CHAIN) & _MASK
    return state


def _finish(state: _Words, lengths: _Words | np.uint32) -> None:
    state ^= lengths
    state ^= state >> np.uint32(16)
    state *= _FINAL_1
    state ^= state >> np.uint32(13)
    state *= _FINAL_2
    state ^= state >> np.uint32(16)


def _rotate_left(values: _Words, bits: int) -> None:
    low = values >> np.uint32(32 - bits)
    values <<= np.uint32(bits)
    values |= low


_RESULT_TYPES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "utf8": pa.string(),
    "large_utf8": pa.large_string(),
}


def result_type_to_arrow(name: str) -> pa.DataType:
    """The Arrow type that a ``ShardingField.result_type`` names.

    >>> result_type_to_arrow("utf8")
    DataType(string)
    """
    try:
        return _RESULT_TYPES[name]
    except KeyError:
        raise InvalidInputError(
            f"sharding result type {name!r} is not supported; expected one of {', '.join(_RESULT_TYPES)}"
        ) from None


def encode_shard_value(value: object, arrow_type: pa.DataType) -> bytes:
    """The stored form of one non-null value.

    A shard of rows whose sharding column is null stores no value at all.

    >>> encode_shard_value(-2, pa.int32()).hex()
    'feffffff'
    """
    if isinstance(value, pa.Scalar):
        value = value.as_py()
    if value is None:
        raise InvalidInputError("null has no stored form: leave the shard's field entry out")
    if pa.types.is_boolean(arrow_type) and isinstance(value, bool | np.bool_):
        return b"\x01" if value else b"\x00"
    # bool is a subclass of int, but True is not a bucket number.
    if (
        pa.types.is_integer(arrow_type)
        and isinstance(value, int | np.integer)
        and not isinstance(value, bool)
    ):
        try:
            return int(value).to_bytes(
                arrow_type.bit_width // 8, "little", signed=pa.types.is_signed_integer(arrow_type)
            )
        except OverflowError:
            raise InvalidInputError(f"shard value {value} does not fit {arrow_type}") from None
    if is_text(arrow_type) and isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"shard value {value!r} is not valid text: {error}") from error
    raise InvalidInputError(
        f"shard value {value!r} ({type(value).__name__}) cannot be stored as {arrow_type}: "
        f"sharding fields hold integers, text or bool, and the value must be of that type"
    )


def decode_shard_value(data: bytes, arrow_type: pa.DataType) -> bool | int | str:
    """The inverse of :func:`encode_shard_value`.

    >>> decode_shard_value(bytes.fromhex("feffffff"), pa.int32())
    -2
    """
    if is_text(arrow_type):
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise CorruptManifestError(f"shard field value {data!r} is not UTF-8: {error}") from error
    if pa.types.is_boolean(arrow_type):
        if data not in (b"\x00", b"\x01"):
            raise CorruptManifestError(f"shard field value {data!r} is no bool: expected one byte, 0 or 1")
        return data == b"\x01"
    if pa.types.is_integer(arrow_type):
        if len(data) * 8 != arrow_type.bit_width:
            raise CorruptManifestError(f"shard field value {data!r} has the wrong length for {arrow_type}")
        return int.from_bytes(data, "little", signed=pa.types.is_signed_integer(arrow_type))
    raise InvalidInputError(f"{arrow_type} cannot be a sharding field's type: use integers, text or bool")
