"""Reading the 32-bit Roaring bitmaps in which Lance stores sets of fragment ids."""

from __future__ import annotations

import struct
from typing import TypeVar

import numpy as np
import numpy.typing as npt

_COOKIE_WITHOUT_RUNS = 12346
_COOKIE_WITH_RUNS = 12347
#: With runs, fewer containers than this have no table of offsets.
_OFFSETS_FROM = 4
_MAX_CONTAINERS = 1 << 16
#: More values than this in a container make it a plain bitmap.
_MAX_ARRAY_VALUES = 4096
_BITMAP_BYTES = 8192

_Number = TypeVar("_Number", bound=np.generic)


def decode_roaring(data: bytes) -> npt.NDArray[np.uint32]:
    """The members in ascending order; ValueError when ``data`` is no Roaring bitmap."""
    try:
        return _decode(memoryview(data))
    except struct.error as error:
        raise ValueError(f"the bitmap is cut off: {error}") from error


def _decode(data: memoryview) -> npt.NDArray[np.uint32]:
    (cookie,) = struct.unpack_from("<I", data)
    at = 4
    runs = np.zeros(0, dtype=np.uint8)
    if cookie & 0xFFFF == _COOKIE_WITH_RUNS:
        count = (cookie >> 16) + 1
        flags = _take(data, at, (count + 7) // 8, np.uint8)
        at += flags.nbytes
        runs = np.unpackbits(flags, bitorder="little")
        has_offsets = count >= _OFFSETS_FROM
    elif cookie == _COOKIE_WITHOUT_RUNS:
        (count,) = struct.unpack_from("<I", data, at)
        at += 4
        has_offsets = True
    else:
        raise ValueError(f"the bitmap starts with {cookie}, which is no Roaring cookie")
    if count > _MAX_CONTAINERS:
        raise ValueError(f"the bitmap claims {count} containers")

    header = _take(data, at, 2 * count, np.uint16).reshape(count, 2).astype(np.uint32)
    at += 4 * count
    if has_offsets:
        at += 4 * count  # the containers follow each other anyway
    parts = []
    for number, (key, last) in enumerate(header.tolist()):
        size = last + 1
        if len(runs) and runs[number]:
            (pairs,) = struct.unpack_from("<H", data, at)
            values = _expand_runs(_take(data, at + 2, 2 * pairs, np.uint16).reshape(pairs, 2))
            at += 2 + 4 * pairs
        elif size > _MAX_ARRAY_VALUES:
            bits = _take(data, at, _BITMAP_BYTES, np.uint8)
            values = np.flatnonzero(np.unpackbits(bits, bitorder="little")).astype(np.uint32)
            at += _BITMAP_BYTES
        else:
            values = _take(data, at, size, np.uint16).astype(np.uint32)
            at += 2 * size
        if len(values) != size:
            raise ValueError(f"container {number} of the bitmap has {len(values)} values, not {size}")
        parts.append(values + np.uint32(key << 16))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint32)


def _expand_runs(pairs: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    starts = pairs[:, 0].astype(np.uint32)
    lengths = pairs[:, 1].astype(np.int64) + 1
    if not len(lengths) or int(lengths.sum()) > 1 << 16:
        raise ValueError("a run container of the bitmap is empty or overlaps itself")
    before = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(before, lengths)
    return (np.repeat(starts, lengths) + within).astype(np.uint32)


def _take(data: memoryview, at: int, count: int, dtype: type[_Number]) -> npt.NDArray[_Number]:
    size = count * np.dtype(dtype).itemsize
    if at + size > len(data):
        raise ValueError(f"the bitmap is cut off: {at + size} bytes expected, {len(data)} found")
    return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<"), count=count, offset=at)
