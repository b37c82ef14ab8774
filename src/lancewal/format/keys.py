"""Primary keys as values, and sets of them.

A key of one column is its value, a key of several columns one order-preserving binary.

The encoding of a composite key sorts, byte by byte, as the tuple of its columns does,
nulls first. Per column, in key order: ``00`` for a null, else ``01`` and the value:

- integers as 8 bytes, big-endian, the sign bit of signed ones flipped,
- a boolean as one byte,
- text and binary with ``00`` written as ``00 ff``, closed by ``00 00``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.errors import InvalidInputError
from lancewal.format.schema import TableSchema
from lancewal.format.siphash import siphash13_spans
from lancewal.format.spans import as_binary, byte_spans, numbers, one_array, packed_rows

Mask = npt.NDArray[np.bool_]
_Words = npt.NDArray[np.uint64]

KEY_TYPES = frozenset(
    [
        pa.bool_(),
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
        *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary()),
    ]
)

_SIGN = np.uint64(1 << 63)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
#: A bitmap may take this many bytes per key, and a small set this many in all.
_BITMAP_BYTES_PER_KEY = 64
_SMALL_BITMAP = 1 << 16
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
    """One value per row that identifies its key and sorts like it.

    A key of one column is returned as it is, a composite key encoded.
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


class KeySet:
    """Distinct keys of one type, in the form of :func:`key_values`; immutable.

    Holds the keys of newer levels, against which every batch of an older level is checked. Integers
    are looked up in a bitmap where their range allows one, otherwise by a small hashed filter and a
    binary search behind it. Text, binary and composite keys are searched by their 64-bit hash, and a
    match is compared byte by byte. A key costs some nanoseconds, and batches outside the set's range
    cost nothing, however many keys there are.

    >>> keys = KeySet.of([pa.array([5, 3]), pa.array([9])])
    >>> len(keys), keys.contains(pa.array([1, 3, 9])).tolist()
    (3, [False, True, True])
    """

    def __init__(self, type_: pa.DataType, words: _Words, values: pa.Array | None) -> None:
        """``words`` are sorted and distinct for integers; sorted hashes of ``values`` for others."""
        self._type = type_
        self._words = words
        self._values = values

    @classmethod
    def empty(cls) -> KeySet:
        return _EMPTY

    @classmethod
    def of(cls, keys: Iterable[pa.Array]) -> KeySet:
        """The set of all keys in arrays of one type; a key may occur several times."""
        arrays = [array for array in keys if len(array)]
        if not arrays:
            return _EMPTY
        values = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
        if _is_word(values.type):
            return cls(values.type, _distinct(np.sort(_words(values), kind="stable")), None)
        hashes = _hashes(values)
        order = np.argsort(hashes, kind="stable")
        return cls(values.type, hashes[order], values.take(pa.array(order)))

    @classmethod
    def union(cls, sets: Iterable[KeySet]) -> KeySet:
        """The keys of several sets of one type."""
        filled = [each for each in sets if len(each)]
        if len(filled) < 2:
            return filled[0] if filled else _EMPTY
        values = [each._values for each in filled if each._values is not None]
        words = np.concatenate([each._words for each in filled])
        type_ = filled[0]._type
        # A stable sort of sorted pieces is a merge.
        if not values:
            return cls(type_, _distinct(np.sort(words, kind="stable")), None)
        order = np.argsort(words, kind="stable")
        return cls(type_, words[order], pa.concat_arrays(values).take(pa.array(order)))

    def __len__(self) -> int:
        return len(self._words)

    def __or__(self, other: KeySet) -> KeySet:
        return KeySet.union([self, other])

    @cached_property
    def _finder(self) -> _Finder:
        return _finder(self._words, self._values is None)

    def to_array(self) -> pa.Array:
        """The keys; one may occur more than once."""
        if self._values is not None or not len(self):
            return pa.array([], self._type) if self._values is None else self._values
        signed = pa.types.is_signed_integer(self._type)
        plain = (self._words ^ _SIGN).view(np.int64) if signed else self._words
        return pa.array(plain).cast(self._type)

    @property
    def nbytes(self) -> int:
        return self._words.nbytes + (0 if self._values is None else int(self._values.nbytes))

    def contains(self, keys: pa.Array) -> Mask:
        """Which of ``keys`` are in the set; a null never is."""
        found = np.zeros(len(keys), np.bool_)
        if not len(self) or not len(keys):
            return found
        if keys.null_count:
            valid = keys.is_valid().to_numpy(zero_copy_only=False)
            found[valid] = self.contains(keys.drop_null())
            return found
        if self._is_outside(keys):
            return found
        words = _words(keys) if self._values is None else _hashes(keys)
        rows, places = self._finder.find(words)
        if self._values is None or not len(rows):
            found[rows] = True
            return found
        candidates = keys.take(pa.array(rows))
        same = pc.equal(candidates, self._values.take(pa.array(places))).to_numpy(zero_copy_only=False)
        found[rows[same]] = True
        if not same.all():
            # Two keys with the same hash: rare enough to be slow.
            unsure = rows[~same]
            again = pc.is_in(keys.take(pa.array(unsure)), value_set=self._values)
            found[unsure] = again.to_numpy(zero_copy_only=False)
        return found

    def _is_outside(self, keys: pa.Array) -> bool:
        """Whether all keys are numbers below the least or above the greatest in the set."""
        if self._values is not None:
            return False
        low, high = _words(pa.array([bound.as_py() for bound in pc.min_max(keys).values()], keys.type))
        return bool(high < self._words[0] or low > self._words[-1])


class _Finder(Protocol):
    """Finds words in a sorted array."""

    def find(self, words: _Words) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Which of ``words`` are there, and their places, which a bitmap does not know."""


@dataclass(frozen=True)
class _Bitmap:
    """One byte for every number between the least and the greatest."""

    least: np.uint64
    present: Mask

    def find(self, words: _Words) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        # For numbers below the least, the difference wraps around to beyond the end.
        distance = words - self.least
        inside = np.flatnonzero(distance < np.uint64(len(self.present)))
        if len(inside) == 0:
            return inside, inside
        if len(inside) < len(words):
            distance = distance[inside]
        rows = inside[self.present[distance]]
        return rows, rows


@dataclass(frozen=True)
class _Hashed:
    """A filter of hash bits before a binary search."""

    words: _Words
    present: Mask
    shift: np.uint64

    def find(self, words: _Words) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        rows = np.flatnonzero((words >= self.words[0]) & (words <= self.words[-1]))
        wanted = words if len(rows) == len(words) else words[rows]
        maybe = np.flatnonzero(self.present[(wanted * _GOLDEN) >> self.shift])
        rows, wanted = rows[maybe], wanted[maybe]
        places = np.searchsorted(self.words, wanted)
        hit = self.words[places] == wanted
        return rows[hit], places[hit]


def _finder(words: _Words, are_keys: bool) -> _Finder:
    extent = int(words[-1]) - int(words[0]) + 1
    if are_keys and extent <= max(_SMALL_BITMAP, _BITMAP_BYTES_PER_KEY * len(words)):
        present = np.zeros(extent, np.bool_)
        present[words - words[0]] = True
        return _Bitmap(words[0], present)
    bits = max(len(words) * 8, 2).bit_length()
    shift = np.uint64(64 - bits)
    present = np.zeros(1 << bits, np.bool_)
    present[(words * _GOLDEN) >> shift] = True
    return _Hashed(words, present, shift)


def _is_word(type_: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type_) or pa.types.is_boolean(type_))


def _words(values: pa.Array) -> _Words:
    """Integers as unsigned words in the same order."""
    plain = numbers(values)
    if plain.dtype.kind == "i":
        return plain.astype(np.int64, copy=False).view(np.uint64) ^ _SIGN
    return plain.astype(np.uint64, copy=False)


def key_words(values: pa.Array) -> _Words:
    """One 64-bit word per key of :func:`key_values`: an integer itself, of other keys a hash."""
    return _words(values) if _is_word(values.type) else _hashes(values)


def _hashes(values: pa.Array) -> _Words:
    return siphash13_spans(byte_spans(values))


def _distinct(words: _Words) -> _Words:
    if len(words) < 2:
        return words
    differs = words[1:] != words[:-1]
    return words if differs.all() else words[np.concatenate([[True], differs])]


_EMPTY = KeySet(pa.null(), np.empty(0, np.uint64), None)
