"""Column values as keys that sort as Lance's filters compare them.

Numbers, booleans and moments become 64-bit integers; text and binary stay bytes.
Floats follow Lance: -0.0 equals 0.0, NaN lies above infinity (and NaN with a sign
below negative infinity), every NaN equals itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.errors import InvalidInputError

NumberKeys = npt.NDArray[np.int64]

#: Asked for every batch: by number, since Arrow's own predicates take a microsecond together.
_MOMENTS = frozenset(
    type_.id
    for type_ in (
        *(pa.date32(), pa.date64(), pa.time32("s"), pa.time64("us")),
        *(pa.timestamp("us"), pa.duration("us")),
    )
)
_SIGN = np.uint64(1 << 63)
_MAGNITUDE = np.int64(2**63 - 1)


def is_number_like(type_: pa.DataType) -> bool:
    """Integers, floats, booleans, dates, times, timestamps and durations."""
    types = pa.types
    return bool(
        types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_) or _is_moment(type_)
    )


def is_bytes_like(type_: pa.DataType) -> bool:
    """Text and binary of any offset width."""
    return type_ in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()) or bool(
        pa.types.is_fixed_size_binary(type_) and not pa.types.is_decimal(type_)
    )


def number_keys(array: pa.Array) -> NumberKeys:
    """One integer per value; ``array`` has no nulls.

    >>> number_keys(pa.array([-1.0, -0.0, 0.0])).tolist()[1:]
    [0, 0]
    """
    type_ = array.type
    if _is_moment(type_):
        array = array.view(pa.int32() if type_.bit_width == 32 else pa.int64())
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    if values.dtype.kind == "f":
        # Adding zero turns -0.0 into 0.0 and leaves everything else as it is.
        bits = (values.astype(np.float64) + 0.0).view(np.int64)
        return bits ^ ((bits >> 63) & _MAGNITUDE)
    if values.dtype == np.uint64:
        return (values ^ _SIGN).view(np.int64)
    return values.astype(np.int64, copy=False)


def bytes_keys(array: pa.Array) -> pa.LargeBinaryArray:
    """The values as binary with wide offsets, so that runs of any size concatenate."""
    return array.cast(pa.binary()).cast(pa.large_binary())


def values_array(values: Any, type_: pa.DataType) -> pa.Array:
    """Python values, or an array of any type that casts without loss, as the column's type."""
    try:
        if isinstance(values, (pa.Array, pa.ChunkedArray)):
            column = values.cast(type_)
            return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        plain = [v.as_py() if isinstance(v, pa.Scalar) else v for v in values]
        if pa.types.is_integer(type_) and any(isinstance(v, float) for v in plain):
            # Arrow would cut 1.5 to 1 without a word.
            return pa.array(plain, pa.float64()).cast(type_)
        return pa.array(plain, type_)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise InvalidInputError(f"not a value of the column's type {type_}: {error}") from error


def _is_moment(type_: pa.DataType) -> bool:
    return type_.id in _MOMENTS
