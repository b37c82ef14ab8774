"""The value of a sharding field as a shard's manifest stores it.

Integers are little-endian at their own width, text is UTF-8 and a bool is one byte:
these are the types that a sharding field can have. Lance compares the stored bytes
when it skips shards, so one value must always give the same bytes.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from lancewal.errors import CorruptManifestError, InvalidInputError

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
    # bool is a subclass of int, and True is no bucket number.
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
    if _is_text(arrow_type) and isinstance(value, str):
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
    if _is_text(arrow_type):
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


def _is_text(arrow_type: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(arrow_type)
        or pa.types.is_large_string(arrow_type)
        or pa.types.is_string_view(arrow_type)
    )
