"""Primary keys as values: a single column as it is, several as one order-preserving binary.

The encoding of a composite key sorts, byte by byte, as the tuple of its columns does,
nulls first. Per column, in key order: ``00`` for a null, else ``01`` and the value:

- integers as 8 bytes, big-endian, the sign bit of signed ones flipped,
- a boolean as one byte,
- text and binary with ``00`` written as ``00 ff``, closed by ``00 00``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.errors import InvalidInputError
from lancewal.format.schema import TableSchema
from lancewal.format.spans import (
    ByteSpans,
    Positions,
    as_binary,
    binary_array,
    byte_spans,
    numbers,
    one_array,
    packed_rows,
)

KEY_TYPES = frozenset(
    [
        pa.bool_(),
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
        *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary()),
    ]
)

_SIGN = np.uint64(1 << 63)
_NULL = b"\x00"
_PRESENT = b"\x01"
_ZERO = b"\x00"
_ESCAPED_ZERO = b"\x00\xff"
_END = b"\x00\x00"
# Made once: turning bytes into scalars costs more than joining a small batch.
_PRESENT_SCALAR, _END_SCALAR, _NOTHING = (pa.scalar(raw, pa.binary()) for raw in (_PRESENT, _END, b""))


def check_key_types(schema: TableSchema) -> None:
    """Refuses a primary key whose columns are missing or of a type that Lance cannot hash."""
    for name in schema.primary_key:
        if name not in schema.columns.names:
            raise InvalidInputError(f"the primary key column {name!r} is not a column of the table")
        check_key_type(schema.columns.field(name).type, name)


def check_key_type(type_: pa.DataType, name: str | None = None) -> None:
    """Refuses a key column's type that Lance cannot hash."""
    if type_ not in KEY_TYPES:
        column = "A primary key column" if name is None else f"Primary key column {name!r}"
        raise InvalidInputError(
            f"{column} has type {type_}; Lance takes integers, booleans, text and binary as keys"
        )


def key_columns(columns: Sequence[pa.Array | pa.ChunkedArray]) -> list[pa.Array]:
    """The key columns of some rows, each as one array, after checking types and lengths."""
    arrays = [one_array(column) for column in columns]
    if not arrays:
        raise InvalidInputError("a key needs at least one column")
    for array in arrays:
        check_key_type(array.type)
        if len(array) != len(arrays[0]):
            raise InvalidInputError(f"key columns differ in length: {[len(a) for a in arrays]}")
    return arrays


def key_values(columns: Sequence[pa.Array | pa.ChunkedArray]) -> pa.Array:
    """One value per row that identifies its key and sorts as it does.

    A key of one column comes back as it is, a composite one encoded.
    """
    return encode_keys(columns) if len(columns) > 1 else key_columns(columns)[0]


def encode_keys(columns: Sequence[pa.Array | pa.ChunkedArray]) -> pa.Array:
    """The composite encoding of every row, as a binary array without nulls.

    >>> encode_keys([pa.array([1]), pa.array(["a"])])[0].as_py().hex(" ")
    '01 80 00 00 00 00 00 00 01 01 61 00 00'
    """
    arrays = key_columns(columns)
    if not any(_is_bytes(array.type) or array.null_count for array in arrays):
        return _encode_fixed(arrays)
    parts = [_encode_bytes(array) if _is_bytes(array.type) else _encode_nullable(array) for array in arrays]
    return pc.binary_join_element_wise(*parts, _NOTHING, null_handling="replace", null_replacement=_NULL)


def decode_keys(keys: pa.Array | pa.ChunkedArray, types: Sequence[pa.DataType]) -> list[pa.Array]:
    """The columns that :func:`encode_keys` made ``keys`` from.

    >>> decode_keys(encode_keys([pa.array([7]), pa.array(["a"])]), [pa.int64(), pa.string()])[1][0].as_py()
    'a'
    """
    for type_ in types:
        check_key_type(type_)
    encoded = one_array(keys)
    if encoded.type != pa.binary():
        raise InvalidInputError(f"encoded keys are binary, not {encoded.type}")
    if encoded.null_count:
        raise InvalidInputError("an encoded key is null; only the columns inside a key can be")
    decoder = _Decoder(byte_spans(encoded))
    columns = [decoder.next_column(type_) for type_ in types]
    decoder.expect_end()
    return columns


def _is_bytes(type_: pa.DataType) -> bool:
    return not (pa.types.is_integer(type_) or pa.types.is_boolean(type_))


def _encode_fixed(arrays: Sequence[pa.Array], valid: pa.Array | None = None) -> pa.Array:
    """The encodings of booleans and integers side by side; null where ``valid`` is false."""
    fields = [(f"{i}_{part}", dtype) for i, a in enumerate(arrays) for part, dtype in _layout(a.type)]
    rows = np.empty(len(arrays[0]), np.dtype(fields))
    for i, array in enumerate(arrays):
        values = numbers(array)
        if pa.types.is_signed_integer(array.type):
            values = values.astype(np.int64).view(np.uint64) ^ _SIGN
        rows[f"{i}_tag"] = _PRESENT[0]
        rows[f"{i}_value"] = values
    return packed_rows(rows, valid)


def _encode_nullable(array: pa.Array) -> pa.Array:
    return _encode_fixed([array], array.is_valid() if array.null_count else None)


def _layout(type_: pa.DataType) -> list[tuple[str, str]]:
    return [("tag", "u1"), ("value", "u1" if pa.types.is_boolean(type_) else ">u8")]


def _encode_bytes(array: pa.Array) -> pa.Array:
    escaped = pc.replace_substring(as_binary(array), _ZERO, _ESCAPED_ZERO)
    return pc.binary_join_element_wise(_PRESENT_SCALAR, escaped, _END_SCALAR, _NOTHING)


class _Decoder:
    """Reads column after column from all rows at once; every row has its own position."""

    def __init__(self, spans: ByteSpans) -> None:
        # Room behind the last row, so that a cut key is found by its position, not by a crash.
        self._data = np.append(spans.data, np.zeros(16, np.uint8))
        self._at: Positions = spans.starts.copy()
        self._ends: Positions = spans.starts + spans.lengths
        self._doubles: Positions | None = None

    def next_column(self, type_: pa.DataType) -> pa.Array:
        self._require(self._at < self._ends)
        tags = self._data[self._at]
        self._require(tags <= _PRESENT[0])
        present = tags == _PRESENT[0]
        self._at += 1
        if _is_bytes(type_):
            values = self._bytes(present)
            return self._cast(values if present.all() else pc.if_else(pa.array(present), values, None), type_)
        read = self._fixed(1 if pa.types.is_boolean(type_) else 8, present)
        if pa.types.is_boolean(type_):
            self._require((read <= 1) | ~present)
            return pa.array(read.astype(np.bool_), mask=~present)
        if pa.types.is_signed_integer(type_):
            read = (read ^ _SIGN).view(np.int64)
        return self._cast(pa.array(read, mask=~present), type_)

    def expect_end(self) -> None:
        self._require(self._at == self._ends)

    def _fixed(self, width: int, present: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        """The unsigned numbers at the rows' positions; rows without one stay where they are."""
        ends = self._at + width * present
        self._require(ends <= self._ends)
        # Absent rows read from position 0: whatever stands there is masked by the caller.
        starts = np.where(present, self._at, 0)
        raw = self._data[starts[:, None] + np.arange(width)]
        self._at = ends
        return raw.reshape(-1) if width == 1 else raw.view(">u8").reshape(-1).astype(np.uint64)

    def _bytes(self, present: npt.NDArray[np.bool_]) -> pa.Array:
        # A zero inside a value is followed by ff, so the first two in a row close it.
        if self._doubles is None:
            zero = self._data == 0
            self._doubles = np.flatnonzero(zero[:-1] & zero[1:])
        closing = self._doubles[np.searchsorted(self._doubles, self._at)]
        stops = np.where(present, closing, self._at)
        ends = stops + len(_END) * present
        # Before any copy: values that are never closed would each reach to the end of all rows.
        self._require(ends <= self._ends)
        escaped = ByteSpans(self._data, self._at, stops - self._at).gather()
        zeros = np.flatnonzero(escaped.data == 0)
        # No value ends in a zero, or it would have been closed there: a byte follows each.
        if not (escaped.data[zeros + 1] == _ESCAPED_ZERO[1]).all():
            raise InvalidInputError("an encoded key holds a zero byte that is not escaped")
        self._at = ends
        return pc.replace_substring(binary_array(escaped), _ESCAPED_ZERO, _ZERO)

    @staticmethod
    def _cast(values: pa.Array, type_: pa.DataType) -> pa.Array:
        try:
            return values.cast(type_)
        except pa.ArrowInvalid as error:
            raise InvalidInputError(f"an encoded key holds no {type_}: {error}") from None

    @staticmethod
    def _require(holds: npt.NDArray[np.bool_]) -> None:
        if not holds.all():
            row = int(np.argmin(holds))
            raise InvalidInputError(f"encoded key {row} does not fit the key's columns")
