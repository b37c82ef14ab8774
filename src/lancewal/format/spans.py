"""Arrow columns as numpy arrays; text and binary as one byte buffer with a span for each row.

Hash functions process such columns block by block across all rows at once, not row by
row, so that the interpreter's cost is spread over the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]

#: Below this size it does not matter whether rows are a part of their buffers or all of them.
_SMALL_BYTES = 64 << 10
#: How many rows are processed at a time, so that temporary arrays stay in a core's cache.
ROWS_AT_A_TIME = 16_384


@dataclass(frozen=True)
class ByteSpans:
    """Row ``i`` is ``data[starts[i] : starts[i] + lengths[i]]``; rows may overlap or leave gaps."""

    data: Bytes
    starts: Positions
    lengths: Positions

    def __len__(self) -> int:
        return len(self.starts)

    def pieces(self) -> Iterator[tuple[slice, ByteSpans]]:
        """The rows in cache-sized runs, each with its slice of the whole."""
        for rows in row_slices(len(self)):
            yield rows, ByteSpans(self.data, self.starts[rows], self.lengths[rows])


def row_slices(rows: int) -> Iterator[slice]:
    """Consecutive slices that cover ``rows`` rows in cache-sized runs."""
    for start in range(0, rows, ROWS_AT_A_TIME):
        yield slice(start, min(start + ROWS_AT_A_TIME, rows))


def one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """``column`` as a single array; copies only when it has several chunks."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)


def numbers(array: pa.Array) -> npt.NDArray[Any]:
    """The values of a boolean, integer or float array, nulls as zero; read-only if not copied."""
    if array.null_count:
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    return cast("npt.NDArray[Any]", array.to_numpy(zero_copy_only=False))


def as_binary(array: pa.Array) -> pa.Array:
    """A text or binary array as binary with 32-bit offsets; copies only if the offsets have 64 bits."""
    small = pa.types.is_string(array.type) or pa.types.is_binary(array.type)
    return array.view(pa.binary()) if small else array.cast(pa.binary())


def packed_rows(rows: npt.NDArray[Any], valid: pa.Array | None = None) -> pa.Array:
    """The records of a structured array as a binary array; null where ``valid`` is false."""
    kind = pa.binary(rows.itemsize)
    packed = pa.FixedSizeBinaryArray.from_buffers(kind, len(rows), [None, pa.py_buffer(rows)])
    packed = packed.cast(pa.binary())
    return packed if valid is None else pc.if_else(valid, packed, None)


def byte_spans(array: pa.Array) -> ByteSpans:
    """The spans of a text or binary array with 32- or 64-bit offsets.

    In Arrow a null row may have bytes: ignore the span of a null.
    """
    if len(array) == 0:
        nothing = np.empty(0, np.int64)
        return ByteSpans(np.empty(0, np.uint8), nothing, nothing)
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offset_buffer, data_buffer = array.buffers()
    all_offsets = np.frombuffer(offset_buffer, np.int64 if wide else np.int32)
    offsets = all_offsets[array.offset : array.offset + len(array) + 1].astype(np.int64)
    first, end = int(offsets[0]), int(offsets[-1])
    # Only this array's own bytes: a slice has the buffer of its whole parent.
    data = np.frombuffer(data_buffer, np.uint8)[first:end] if end > first else np.empty(0, np.uint8)
    return ByteSpans(data, offsets[:-1] - first, np.diff(offsets))


def longest_first(counts: Positions) -> tuple[Positions | slice, list[int]]:
    """An order of the rows by descending block count, and how many rows have a block ``i``.

    In this order the rows that have a block ``i`` come first, so a loop over block numbers works on
    slices instead of masks.
    """
    longest = int(counts.max(initial=0))
    if len(counts) == 0 or counts.min() == longest:
        return slice(None), [len(counts)] * longest
    order = np.argsort(-counts, kind="stable")
    having = np.bincount(counts)[::-1].cumsum()[::-1][1:]
    return order, having.tolist()


def unaligned_words(data: Bytes, dtype: type[np.uint32] | type[np.uint64]) -> npt.NDArray[np.unsignedinteger]:
    """The little-endian words at every byte position of ``data``: item ``i`` starts at byte ``i``.

    Index it with an array of positions. ``take`` would first copy every item, because
    they are not aligned.
    """
    word = np.dtype(dtype).newbyteorder("<")
    count = max(len(data) - word.itemsize + 1, 0)
    return np.ndarray((count,), word, buffer=data if count else b"", strides=(1,))


# Arrow aligns buffers to 8 bytes in an IPC stream: a WAL entry, rows from Spark or another process.
# Lance reads a decimal as one number of 16 bytes, and crashes if its address is not a multiple of 16.
_WIDE_VALUE_BYTES = 16


def has_wide_values(type_: pa.DataType) -> bool:
    """Whether a type is a decimal or contains one.

    >>> has_wide_values(pa.list_(pa.decimal128(10, 2))), has_wide_values(pa.float64())
    (True, False)
    """
    if isinstance(type_, pa.BaseExtensionType):
        return has_wide_values(type_.storage_type)
    if pa.types.is_dictionary(type_):
        return has_wide_values(type_.value_type)
    return bool(pa.types.is_decimal(type_)) or any(
        has_wide_values(type_.field(place).type) for place in range(type_.num_fields)
    )


def size_of(batch: pa.RecordBatch) -> int:
    """About how many bytes the rows of ``batch`` take; for few, those of the buffers that they are a part of.

    ``nbytes`` looks at each column, which takes longer than all else that prepares a small put.
    """
    at_most: int = batch.get_total_buffer_size()
    return at_most if at_most <= _SMALL_BYTES else int(batch.nbytes)


def aligned(array: pa.Array) -> pa.Array:
    """``array``, copied when one of its buffers is not aligned as Lance needs it."""
    if all(buffer is None or buffer.address % _WIDE_VALUE_BYTES == 0 for buffer in array.buffers()):
        return array
    return array.take(pa.array(np.arange(len(array))))


def in_place(batch: pa.RecordBatch) -> pa.RecordBatch:
    """``batch``, copied if its buffers have addresses on which Lance would crash.

    Arrow requires addresses that are multiples of 8. The buffers of a batch from a Flight message are inside
    the message, all shifted by the same offset, so it is enough to check one column. Dictionaries are in
    messages of their own; see :func:`with_dictionary_in_place`.
    """
    if not batch.num_columns or not _is_shifted(batch.column(0)):
        return batch
    if not any(has_dictionary(type_) for type_ in batch.schema.types):
        return pa.ipc.read_record_batch(batch.serialize(), batch.schema)
    # A batch is serialized without its dictionaries, a stream with them.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def with_dictionary_in_place(array: pa.DictionaryArray) -> pa.DictionaryArray:
    """``array``, with a copy of its dictionary if that has addresses on which Lance would crash."""
    if not _is_shifted(array.dictionary):
        return array
    words = array.dictionary.take(pa.array(np.arange(len(array.dictionary))))
    return pa.DictionaryArray.from_arrays(array.indices, words, ordered=array.type.ordered)


def _is_shifted(array: pa.Array) -> bool:
    return any(buffer is not None and buffer.address % 8 for buffer in array.buffers())


def has_dictionary(type_: pa.DataType) -> bool:
    """Whether a type is a dictionary or contains one.

    >>> has_dictionary(pa.list_(pa.dictionary(pa.int8(), pa.string()))), has_dictionary(pa.string())
    (True, False)
    """
    if pa.types.is_dictionary(type_):
        return True
    return any(has_dictionary(type_.field(place).type) for place in range(type_.num_fields))


def aligned_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """``batch`` with its decimals aligned as Lance needs them; usually itself."""
    wide = [place for place, type_ in enumerate(batch.schema.types) if has_wide_values(type_)]
    if not wide:
        return batch
    columns = batch.columns
    for place in wide:
        columns[place] = aligned(columns[place])
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
