"""Primary keys as single values: one column as it is, several as one order-preserving binary.

The encoding of a composite key sorts, byte by byte, like the tuple of its columns,
nulls first. Per column, in key order: ``00`` for a null, else ``01`` and the value:

- integers as 8 bytes, big-endian, the sign bit of signed ones flipped,
- a boolean as one byte,
- text and binary with ``00`` written as ``00 ff``, closed by ``00 00``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.errors import InvalidInputError
from lancewal.format.schema import TableSchema
from lancewal.format.spans import as_binary, numbers, one_array, packed_rows

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
# Made once: converting bytes to scalars costs more than joining a small batch.
_PRESENT_SCALAR, _END_SCALAR, _NOTHING = (pa.scalar(raw, pa.binary()) for raw in (_PRESENT, _END, b""))


def check_key_types(schema: TableSchema) -> None:
    """Refuse a primary key whose columns are missing or of a type that Lance cannot hash."""
    for name in schema.primary_key:
        if name not in schema.columns.names:
            raise InvalidInputError(f"the primary key column {name!r} is not a column of the table")
        check_key_type(schema.columns.field(name).type, name)


def check_key_type(type_: pa.DataType, name: str | None = None) -> None:
    """Refuse the type of a key column if Lance cannot hash it."""
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
    """One value per row that identifies its key and sorts like it.

    A key of one column is returned as it is, a composite key encoded.
    """
    return encode_keys(columns) if len(columns) > 1 else key_columns(columns)[0]


def row_keys(rows: pa.Table | pa.RecordBatch, names: Sequence[str]) -> pa.Array:
    """The key of every row, as from :func:`key_values`; ``names`` are the key columns."""
    return key_values([rows.column(name) for name in names])


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
