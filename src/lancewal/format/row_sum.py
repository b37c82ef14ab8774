"""A 64-bit checksum of rows that does not depend on their order, nor on how they are split into batches.

A flush records the sum of the rows that it writes. The same rows, read later from the log or from files, have
the same sum. A row that was lost, duplicated or mixed from two others changes it. Each row is hashed on its
own, in numpy, so two errors cancel each other out only by chance. Of a text only the length and four words
are hashed: hashing all of it would cost more than writing it.

The hash depends on values, not on their bytes in Arrow: bytes under a null, offsets, dictionaries and
extension types do not count. It is not cryptographic: an attacker can make rows with a given sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.format.schema import TOMBSTONE
from lancewal.format.spans import Positions, byte_spans, numbers, unaligned_words
from lancewal.format.values import encode_json

Hashes = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_WORD = 8
_NULL = np.uint64(0x6E756C6C6E756C6C)
_DEAD = np.uint64(0x6465616464656164)
_BASE = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class RowSum:
    """The number of rows, and the sum of their hashes modulo 2**64."""

    rows: int = 0
    value: int = 0

    def __add__(self, other: RowSum) -> RowSum:
        return RowSum(self.rows + other.rows, (self.value + other.value) & _MASK)

    def __str__(self) -> str:
        return f"{self.rows} rows with the sum {self.value:016x}"

    @classmethod
    def of_hashes(cls, hashes: Hashes) -> RowSum:
        return cls(len(hashes), int(np.add.reduce(hashes, dtype=np.uint64)) if len(hashes) else 0)

    @classmethod
    def of(cls, batches: Iterable[pa.RecordBatch], primary_key: Sequence[str]) -> RowSum:
        """The sum of all rows of ``batches``, which have the same columns.

        >>> rows = pa.record_batch({"id": [1, 2, 3], "text": ["a", None, "c"]})
        >>> RowSum.of([rows], ["id"]) == RowSum.of([rows[2:], rows[:2]], ["id"])
        True
        """
        total = cls()
        for batch in batches:
            total += cls.of_hashes(row_hashes(batch, primary_key))
        return total


def row_hashes(batch: pa.RecordBatch, primary_key: Sequence[str]) -> Hashes:
    """A hash of each row. For a tombstone only the key counts, because its other columns mean nothing."""
    names = [name for name in batch.schema.names if name != TOMBSTONE]
    hashes = _combined([_hashes(batch.column(name)) for name in names], batch.num_rows)
    if TOMBSTONE in batch.schema.names and batch.column(TOMBSTONE).true_count:
        dead = np.flatnonzero(batch.column(TOMBSTONE).to_numpy(zero_copy_only=False))
        keys = [_hashes(batch.column(name).take(pa.array(dead))) for name in primary_key]
        hashes[dead] = _mixed(_combined(keys, len(dead)) ^ _DEAD)
    return hashes


def _mixed(values: Hashes) -> Hashes:
    """Spread each bit over all others, in place; these are the last steps of MurmurHash3."""
    values ^= values >> np.uint64(33)
    values *= np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> np.uint64(33)
    values *= np.uint64(0xC4CEB9FE1A85EC53)
    values ^= values >> np.uint64(33)
    return values


_factors = np.empty(0, np.uint64)


def _factors_of(count: int) -> Hashes:
    """One odd factor for each of the first ``count`` places."""
    global _factors
    if len(_factors) < count:
        places = np.arange(1, max(count, 1024, 2 * len(_factors)) + 1, dtype=np.uint64)
        _factors = _mixed(places * np.uint64(_BASE)) | np.uint64(1)
    return _factors[:count]


def _combined(parts: Sequence[Hashes], rows: int) -> Hashes:
    """Combine several hashes into one that depends on their order; overwrites ``parts``."""
    total = np.full(rows, len(parts), np.uint64)
    for part, factor in zip(parts, _factors_of(len(parts)), strict=True):
        part *= factor
        total += part
    return _mixed(total)


def _hashes(array: pa.Array) -> Hashes:
    """A new array with a number for each value; equal values have equal numbers."""
    if isinstance(array, pa.ExtensionArray):
        # JSON is written in Lance's encoding, but read as text.
        return _hashes(encode_json(array) if isinstance(array.type, pa.JsonType) else array.storage)
    types, type_ = pa.types, array.type
    if types.is_null(type_) or not len(array):
        return np.full(len(array), _NULL, np.uint64)
    if types.is_dictionary(type_):
        # An extra word for nulls, which may be in the indices or in the dictionary.
        words = np.append(_hashes(array.dictionary), _NULL)
        places = array.indices.cast(pa.int64()).fill_null(len(words) - 1)
        return np.asarray(words[places.to_numpy()], np.uint64)
    if types.is_struct(type_):
        found = _combined([_hashes(array.field(i)) for i in range(type_.num_fields)], len(array))
    elif types.is_fixed_size_list(type_) and _width(type_.value_type):
        found = _of_vectors(array)
    elif types.is_list(type_) or types.is_large_list(type_) or types.is_map(type_):
        found = _of_lists(array, array.offsets)
    elif types.is_fixed_size_list(type_):
        offsets = np.arange(array.offset, array.offset + len(array) + 1) * type_.list_size
        found = _of_lists(array, pa.array(offsets))
    elif _width(type_):
        found = _of_words(_matrix(array, 1))
    elif _is_text(type_):
        found = _of_texts(array)
    else:
        # Lance stores no other types.
        found = np.zeros(len(array), np.uint64)
    if array.null_count:
        found[array.is_null().to_numpy(zero_copy_only=False)] = _NULL
    return found


def _is_text(type_: pa.DataType) -> bool:
    types = pa.types
    is_small = types.is_string(type_) or types.is_binary(type_)
    return bool(is_small or types.is_large_string(type_) or types.is_large_binary(type_))


def _width(type_: pa.DataType) -> int:
    """The width of a value in bytes; 0 for a type whose values have different widths."""
    if isinstance(type_, pa.BaseExtensionType):
        return _width(type_.storage_type)
    if pa.types.is_boolean(type_):
        return 1
    if type_.num_fields or pa.types.is_null(type_) or pa.types.is_dictionary(type_):
        return 0
    try:
        return int(type_.bit_width) // 8
    except ValueError:
        return 0


def _matrix(array: pa.Array, values_a_row: int) -> npt.NDArray[np.uint8]:
    """The bytes of the values, with ``values_a_row`` values in each row."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    rows = len(array) // values_a_row
    if pa.types.is_boolean(array.type):
        return numbers(array).astype(np.uint8).reshape(rows, values_a_row)
    width = _width(array.type)
    data = np.frombuffer(array.buffers()[1], np.uint8)
    return data[array.offset * width : (array.offset + len(array)) * width].reshape(
        rows, values_a_row * width
    )


def _of_words(rows: npt.NDArray[np.uint8]) -> Hashes:
    """A hash of each row of bytes."""
    count, width = rows.shape
    if width in (1, 2, 4):
        words = rows.view(f"<u{width}").astype(np.uint64)
    else:
        if width % _WORD:
            padded = np.zeros((count, width + _WORD - width % _WORD), np.uint8)
            padded[:, :width] = rows
            rows = padded
        words = rows.view("<u8")
    if words.shape[1] == 1:
        return words[:, 0].astype(np.uint64)
    return np.asarray(np.einsum("ij,j->i", words, _factors_of(words.shape[1])), np.uint64)


def _of_vectors(array: pa.FixedSizeListArray) -> Hashes:
    size = array.type.list_size
    values = array.values[array.offset * size : (array.offset + len(array)) * size]
    if not size:
        return np.zeros(len(array), np.uint64)
    rows = _matrix(values, size)
    if not values.null_count:
        return _of_words(rows)
    # The bytes under a null are undefined.
    nulls = values.is_null().to_numpy(zero_copy_only=False).reshape(len(array), size)
    rows = np.where(np.repeat(nulls, rows.shape[1] // size, axis=1), np.uint8(0), rows)
    marks = np.einsum("ij,j->i", nulls.astype(np.uint64), _factors_of(size) ^ _NULL)
    return np.asarray(_of_words(rows) + marks, np.uint64)


def _of_lists(array: pa.Array, offsets: pa.Array) -> Hashes:
    ends = offsets.to_numpy().astype(np.int64)
    lengths = np.diff(ends)
    first, end = int(ends[0]), int(ends[-1])
    children = array.values if not pa.types.is_map(array.type) else _pairs(array)
    values = _hashes(children[first:end])
    starts = ends[:-1] - first
    places = np.arange(len(values)) - np.repeat(starts, lengths)
    values = _mixed(values) * _factors_of(int(lengths.max(initial=0)))[places]
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values, out=sums[1:])
    return np.asarray(sums[starts + lengths] - sums[starts] + lengths.astype(np.uint64), np.uint64)


def _pairs(array: pa.MapArray) -> pa.StructArray:
    return pa.StructArray.from_arrays([array.keys, array.items], ["key", "value"])


def _of_texts(array: pa.Array) -> Hashes:
    """Hash the length of each text and four evenly spread words, which cover a text of up to 32 bytes."""
    spans = byte_spans(array)
    data, starts, lengths = spans.data, spans.starts, spans.lengths
    if len(data) < _WORD:
        data = np.append(data, np.zeros(_WORD, np.uint8))
    words = unaligned_words(data, np.uint64)
    found = lengths.astype(np.uint64)
    short = np.flatnonzero(lengths < _WORD)
    if len(short):
        # The last word of the data may begin before the text.
        first = np.minimum(starts[short], len(words) - 1)
        before, inside = (starts[short] - first) * 8, lengths[short] * 8
        value = words[first] >> np.minimum(before, 63).astype(np.uint64)
        found[short] += value & ((np.uint64(1) << inside.astype(np.uint64)) - np.uint64(1))
    if len(short) < len(found):
        rows: slice | Positions = np.flatnonzero(lengths >= _WORD) if len(short) else slice(None)
        start, last = starts[rows], lengths[rows] - _WORD
        total = words[start]
        for part, factor in zip((last // 3, last * 2 // 3, last), _factors_of(3), strict=True):
            value = words[start + part]
            value *= factor
            total += value
        found[rows] += total
    return found
