"""An SSTable's bloom filter over its primary keys, byte-equal with Lance's.

A bare Parquet split-block filter: blocks of eight 32-bit words; a key sets one bit in each
word of one block. A key is hashed with SipHash-1-3 over its columns: ``01`` for a
null, else ``00`` and the value, integers little-endian at their own width, text closed
by ``ff``, binary after its length in 8 bytes.

Lance hashes only the values of int32, int64, text and binary columns. For every other type it
hashes only the ``00``. If a key has such a column, its filter must not rule keys out: if a later
Lance hashed those values, we would miss rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.errors import InvalidInputError
from lancewal.format.keys import key_columns
from lancewal.format.siphash import Hashes, siphash13_spans, siphash13_words
from lancewal.format.spans import as_binary, byte_spans, numbers, packed_rows, row_slices

FILTER_BYTES = 32_768

_WORDS_PER_BLOCK = 8
_SALTS = np.array(
    [0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31],
    np.uint32,
)
_WORD_OF_BLOCK = np.arange(_WORDS_PER_BLOCK, dtype=np.int64)

_PRESENT = pa.scalar(b"\x00", pa.binary())
_NULL = b"\x01"
_TEXT_END = pa.scalar(b"\xff", pa.binary())
_NOTHING = pa.scalar(b"", pa.binary())

_INTEGERS = {pa.int32(): "<i4", pa.int64(): "<i8"}


class BloomFilter:
    """Which keys an SSTable may hold; a "no" is certain, a "maybe" is not.

    >>> BloomFilter.build([pa.array([1, 2])]).might_contain(key_hashes([pa.array([2, 3])])).tolist()
    [True, False]
    """

    def __init__(self, words: npt.NDArray[np.uint32] | None = None) -> None:
        self._words = np.zeros(FILTER_BYTES // 4, np.uint32) if words is None else words

    @classmethod
    def build(cls, columns: Sequence[pa.Array | pa.ChunkedArray]) -> BloomFilter:
        """Build a filter of the keys in all rows, tombstones included."""
        bloom = cls()
        bloom.add(columns)
        return bloom

    @classmethod
    def from_bytes(cls, raw: bytes) -> BloomFilter:
        """Read a filter; refuses another size than Lance's, because keys set other bits there."""
        if len(raw) != FILTER_BYTES:
            raise InvalidInputError(f"a bloom filter has {FILTER_BYTES} bytes, this one has {len(raw)}")
        return cls(np.frombuffer(raw, "<u4").astype(np.uint32))

    def to_bytes(self) -> bytes:
        return self._words.astype("<u4").tobytes()

    def add(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> None:
        """Add the keys of more rows."""
        hashes = key_hashes(columns)
        bits = np.zeros(len(self._words) * 32, np.bool_)
        for rows in row_slices(len(hashes)):
            words, places = self._bits(hashes[rows])
            bits[words * 32 + places] = True
        self._words |= np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)

    def might_contain(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """For every hash of :func:`key_hashes`, whether the SSTable may hold that key.

        Meaningful only for key types with :func:`can_rule_out`.
        """
        found = np.empty(len(hashes), np.bool_)
        for rows in row_slices(len(hashes)):
            words, places = self._bits(hashes[rows])
            found[rows] = (self._words[words] >> places & np.uint32(1)).all(axis=1)
        return found

    def _bits(self, hashes: Hashes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """For every hash, its eight words and the bit in each."""
        blocks = np.uint64(len(self._words) // _WORDS_PER_BLOCK)
        block = ((hashes >> np.uint64(32)) * blocks >> np.uint64(32)).astype(np.int64)
        words = block[:, None] * _WORDS_PER_BLOCK + _WORD_OF_BLOCK
        places = hashes.astype(np.uint32)[:, None] * _SALTS >> np.uint32(27)
        return words, places


def can_rule_out(types: Sequence[pa.DataType]) -> bool:
    """Whether Lance hashes the values of all these key columns, so that a "no" is certain."""
    return all(_hashes_value(type_) for type_ in types)


def key_hashes(columns: Sequence[pa.Array | pa.ChunkedArray]) -> Hashes:
    """The 64-bit hash of every row's key."""
    arrays = key_columns(columns)
    if any(array.null_count or _is_text_or_binary(array.type) for array in arrays):
        parts = [_message(array) for array in arrays]
        messages = pc.binary_join_element_wise(
            *parts, _NOTHING, null_handling="replace", null_replacement=_NULL
        )
        return siphash13_spans(byte_spans(messages))
    return siphash13_words(_fixed_messages(arrays))


def _is_text_or_binary(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_binary(type_))


def _hashes_value(type_: pa.DataType) -> bool:
    return type_ in _INTEGERS or _is_text_or_binary(type_)


def _fixed_messages(arrays: Sequence[pa.Array]) -> npt.NDArray[np.uint64]:
    """The hash input of integers without nulls: padded to words, with its length in the last byte."""
    offsets: list[int] = []
    formats: list[str] = []
    length = 0
    for array in arrays:
        length += 1
        if array.type in _INTEGERS:
            offsets.append(length)
            formats.append(_INTEGERS[array.type])
            length += np.dtype(formats[-1]).itemsize
    padded = length // 8 * 8 + 8
    names = [str(i) for i in range(len(formats))]
    layout = np.dtype(
        {
            "names": [*names, "length"],
            "formats": [*formats, "u1"],
            "offsets": [*offsets, padded - 1],
            "itemsize": padded,
        }
    )
    rows = np.zeros(len(arrays[0]), layout)
    for name, array in zip(names, (a for a in arrays if a.type in _INTEGERS), strict=True):
        rows[name] = array.to_numpy()
    rows["length"] = length % 256
    return rows.view("<u8").reshape(len(rows), padded // 8)


def _message(array: pa.Array) -> pa.Array:
    """The hash input of one column; null for nulls."""
    valid = array.is_valid() if array.null_count else None
    if pa.types.is_string(array.type):
        return pc.binary_join_element_wise(_PRESENT, as_binary(array), _TEXT_END, _NOTHING)
    if pa.types.is_binary(array.type):
        lengths = byte_spans(array).lengths
        return pc.binary_join_element_wise(packed_rows(_headed(lengths, "<u8")), array, _NOTHING)
    if array.type in _INTEGERS:
        return packed_rows(_headed(numbers(array), _INTEGERS[array.type]), valid)
    return packed_rows(np.zeros(len(array), [("head", "u1")]), valid)


def _headed(values: npt.NDArray[np.integer], dtype: str) -> npt.NDArray[np.void]:
    """``00`` and the number, for every row."""
    rows = np.zeros(len(values), [("head", "u1"), ("value", dtype)])
    rows["value"] = values
    return rows
