"""Lists of numbers as the rows of Spark's JVM hold them, so that nothing there touches their items.

Spark turns Arrow columns into its own rows, and a list item by item: of 30,000 vectors with 1024 items, that
is most of the time that a read takes. The planner's front therefore asks for binary values that are such
arrays already, and shows them as what they are. The layout is that of Spark's ``UnsafeArrayData``, in little
endian as in Arrow, in words of 8 bytes:

- one word, how many items there are
- a bit for each item, set if it is null, filled up to whole words
- the items one after the other, filled up with zeros to whole words; a null item is zero

Spark compares and hashes such arrays by their bytes, so what is filled up has to be zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

#: How many bytes of packed lists go into one batch, unless a row has more. The offsets of binary values end
#: at 2 GB.
_BATCH_BYTES = 64 << 20
_WORD = 8
_BITS = 64

_Numbers = npt.NDArray[np.int64]


def packed_batches(batch: pa.RecordBatch, wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of ``batch`` with the lists packed that ``wanted`` has as binary columns."""
    places = [
        place
        for place, field in enumerate(wanted)
        if pa.types.is_list(batch.schema.field(place).type) and not pa.types.is_list(field.type)
    ]
    for part in _parts(batch, [batch.column(place) for place in places]):
        columns = part.columns
        for place in places:
            columns[place] = packed(columns[place]).cast(wanted.field(place).type)
        yield pa.RecordBatch.from_arrays(columns, schema=wanted)


def packed(lists: pa.ListArray) -> pa.BinaryArray:
    """Each list of numbers as the bytes of Spark's array; null where the list is.

    >>> packed(pa.array([[1, None]], pa.list_(pa.int16())))[0].as_py().hex(" ", 8)
    '0200000000000000 0200000000000000 0100000000000000'
    """
    lengths = _lengths(lists)
    # Without the items below null lists, which no length counts.
    items = lists.flatten()
    if not lists.null_count and not items.null_count and _are_alike(lengths):
        return _packed_alike(items.to_numpy(), len(lists))
    sizes = lengths * _width(lists.type)
    heads = _binary(_heads(lengths, items), (1 + _null_words(lengths)) * _WORD)
    if lists.null_count:
        # What is joined of parts is null where one of them is.
        heads = pc.if_else(lists.is_valid(), heads, None)
    parts = [heads, _binary(pc.fill_null(items, 0).to_numpy(), sizes)]
    padding = -sizes % _WORD
    if padding.any():
        parts.append(_binary(np.zeros(padding.sum(), np.uint8), padding))
    return pc.binary_join_element_wise(*parts, b"")


def _packed_alike(items: npt.NDArray[np.generic], num_lists: int) -> pa.BinaryArray:
    """Lists of one length without nulls, as vectors are: each is a row of a matrix, filled in one go."""
    length = np.array([len(items) // num_lists])
    head = np.zeros(1 + _null_words(length)[0], np.int64)
    head[0] = length[0]
    content = items.view(np.uint8).reshape(num_lists, -1)
    start, end = head.nbytes, head.nbytes + content.shape[1]
    packed = np.empty((num_lists, end + -end % _WORD), np.uint8)
    packed[:, :start] = head.view(np.uint8)
    packed[:, start:end] = content
    packed[:, end:] = 0
    return _binary(packed, np.full(num_lists, packed.shape[1]))


def _are_alike(lengths: _Numbers) -> bool:
    return bool(len(lengths)) and bool((lengths == lengths[0]).all())


def _heads(lengths: _Numbers, items: pa.Array) -> _Numbers:
    """What comes before the items of each list."""
    sizes = 1 + _null_words(lengths)
    starts = np.cumsum(sizes) - sizes
    words = np.zeros(sizes.sum(), np.int64)
    words[starts] = lengths
    if items.null_count:
        nulls = np.flatnonzero(items.is_null())
        ends = np.cumsum(lengths)
        lists = np.searchsorted(ends, nulls, side="right")
        within = nulls - (ends - lengths)[lists]
        bits = np.left_shift(np.uint64(1), (within % _BITS).astype(np.uint64))
        # Several nulls have one word: plain assignment would keep the last of them.
        np.bitwise_or.at(words.view(np.uint64), starts[lists] + 1 + within // _BITS, bits)
    return words


def _parts(batch: pa.RecordBatch, lists: list[pa.ListArray]) -> Iterator[pa.RecordBatch]:
    """The rows in parts whose packed lists are not too large."""
    sizes = np.zeros(batch.num_rows, np.int64)
    for column in lists:
        lengths = _lengths(column)
        sizes += (1 + _null_words(lengths)) * _WORD + lengths * _width(column.type)
    ends = np.cumsum(sizes)
    start = 0
    while start < batch.num_rows:
        taken = int(ends[start - 1]) if start else 0
        end = max(int(np.searchsorted(ends, taken + _BATCH_BYTES, side="right")), start + 1)
        yield batch.slice(start, end - start)
        start = end


def _lengths(lists: pa.ListArray) -> _Numbers:
    """How many items each list has; a null list has none."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)


def _width(type_: pa.ListType) -> int:
    return int(type_.value_type.bit_width) // _WORD


def _null_words(lengths: _Numbers) -> _Numbers:
    return -(-lengths // _BITS)


def _binary(content: npt.NDArray[np.generic], sizes: _Numbers) -> pa.BinaryArray:
    """``content`` cut into values of ``sizes`` bytes, without a copy."""
    # The cast raises where the offsets would wrap around.
    offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]), pa.int64()).cast(pa.int32())
    buffers = [None, offsets.buffers()[1], pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.binary(), len(sizes), buffers)
