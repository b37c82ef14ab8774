"""Checks Arrow data from clients before it is used: it is whole, and it does not unfold to much more.

Arrow reads a batch from the wire without a look at its values. Offsets may lead out of its buffers, and
whoever follows them reads other memory of the process, or ends it. A small batch may stand for a large
one: a billion rows of a type without bytes, or a long text that a dictionary or views name again and again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.errors import InvalidInputError

_types = pa.types

#: The least bytes of a value of any length: its offset.
_OFFSET_BYTES = 4
#: The bytes of a value whose type in the table is not known.
_UNKNOWN_BYTES = 8
#: Values of any length, each with bytes of its own.
_TEXTS = (_types.is_string, _types.is_large_string, _types.is_binary, _types.is_large_binary)
#: Forms that no column takes, and that may name a value again and again.
_OTHER_FORMS = (
    _types.is_run_end_encoded,
    _types.is_union,
    _types.is_list_view,
    _types.is_large_list_view,
)


def refuse_malformed(batch: pa.RecordBatch) -> None:
    """Refuse a batch whose values are not what its columns say.

    >>> offsets = pa.py_buffer(np.array([0, 1 << 30, 1], np.int32))
    >>> text = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a")])
    >>> refuse_malformed(pa.record_batch([text], ["name"]))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    lancewal.errors.InvalidInputError: the rows are no valid Arrow data: ...
    """
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise InvalidInputError(f"the rows are no valid Arrow data: {error}") from None


def may_unfold(given: pa.Schema, wanted: pa.Schema) -> bool:
    """Whether rows with the columns ``given`` may take more bytes with the columns ``wanted``.

    >>> table = pa.schema({"id": pa.int64(), "name": pa.string()})
    >>> may_unfold(table, table), may_unfold(pa.schema({"id": pa.int64(), "name": pa.null()}), table)
    (False, True)
    """
    places = [(given.get_field_index(field.name), field.type) for field in wanted]
    return any(place < 0 or _differ(given.field(place).type, type_) for place, type_ in places)


def _differ(given: pa.DataType, wanted: pa.DataType) -> bool:
    is_text = all(any(is_one(type_) for is_one in _TEXTS) for type_ in (given, wanted))
    return not is_text and not given.equals(wanted)


def unfolded_bytes(batch: pa.RecordBatch, wanted: pa.Schema | None = None) -> int:
    """How many bytes a valid batch takes with the columns ``wanted``, in their plain form.

    Columns that it lacks are counted too, because nulls take their place. Without ``wanted`` these are the
    bytes of its own values.

    >>> nothing = pa.record_batch([pa.nulls(1000)], ["id"])
    >>> nothing.nbytes, unfolded_bytes(nothing, pa.schema({"id": pa.int64(), "n": pa.int32()}))
    (0, 12000)
    """
    if wanted is None:
        return sum(_unfolded(column, None) for column in batch.columns)
    places = [(batch.schema.get_field_index(field.name), field.type) for field in wanted]
    return sum(
        batch.num_rows * _bytes_of_null(type_) if place < 0 else _unfolded(batch.column(place), type_)
        for place, type_ in places
    )


def _unfolded(array: pa.Array, wanted: pa.DataType | None) -> int:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    given = array.type
    if not len(array):
        return 0
    if wanted is not None and given.equals(wanted):
        return int(array.nbytes)
    if _types.is_null(given):
        return len(array) * _bytes_of_null(wanted)
    if _types.is_dictionary(given):
        return _of_dictionary(array, wanted)
    if _types.is_string_view(given) or _types.is_binary_view(given):
        return int(_view_lengths(array).sum()) + len(array) * _OFFSET_BYTES
    if _types.is_struct(given):
        return _of_struct(array, wanted)
    if _types.is_list(given) or _types.is_large_list(given) or _types.is_map(given):
        first, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        # A map's entries are structs, and what is wanted of them is told by no single type.
        item = None if _types.is_map(given) else _item_type(wanted)
        return len(array) * _OFFSET_BYTES + _unfolded(array.values.slice(first, end - first), item)
    if _types.is_fixed_size_list(given):
        size = given.list_size
        items = array.values.slice(array.offset * size, len(array) * size)
        return _unfolded(items, _item_type(wanted))
    if any(is_other(given) for is_other in _OTHER_FORMS):
        raise InvalidInputError(f"rows of type {given} are not taken; send their values in a plain form")
    return max(int(array.nbytes), 0 if wanted is None else len(array) * _bytes_of_null(wanted))


def _of_dictionary(array: pa.DictionaryArray, wanted: pa.DataType | None) -> int:
    if wanted is not None and _types.is_dictionary(wanted):
        return int(array.nbytes)
    words = array.dictionary
    if not len(words):
        return len(array) * _bytes_of_null(wanted)
    if (width := _width(words.type)) is not None:
        return len(array) * width
    lengths = _lengths(words)
    if lengths is None:
        return len(array) * _unfolded(words, wanted)  # as if each row had all of them
    numbers = array.indices.drop_null().to_numpy(zero_copy_only=False)
    return int(lengths[numbers].sum()) + len(array) * _OFFSET_BYTES


def _lengths(words: pa.Array) -> npt.NDArray[np.int64] | None:
    """The bytes of each text; ``None`` for values of another type."""
    if _types.is_string_view(words.type) or _types.is_binary_view(words.type):
        return _view_lengths(words)
    wide = _types.is_large_binary(words.type) or _types.is_large_string(words.type)
    if not (wide or _types.is_binary(words.type) or _types.is_string(words.type)):
        return None
    offsets = np.frombuffer(words.buffers()[1], np.int64 if wide else np.int32)
    return np.diff(offsets[words.offset : words.offset + len(words) + 1]).astype(np.int64)


def _view_lengths(array: pa.Array) -> npt.NDArray[np.int64]:
    """The length of each text, which is the first quarter of its view."""
    views = np.frombuffer(array.buffers()[1], np.int32)[::4]
    lengths = views[array.offset : array.offset + len(array)].astype(np.int64)
    # A null's view may say anything.
    lengths[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return lengths


def _of_struct(array: pa.StructArray, wanted: pa.DataType | None) -> int:
    given = {field.name: array.field(place) for place, field in enumerate(array.type)}
    if wanted is None or not _types.is_struct(wanted):
        return len(array) + sum(_unfolded(child, None) for child in given.values())
    return len(array) + sum(
        _unfolded(given[field.name], field.type)
        if field.name in given
        else len(array) * _bytes_of_null(field.type)
        for field in wanted
    )


def _item_type(wanted: pa.DataType | None) -> pa.DataType | None:
    is_list = wanted is not None and (
        _types.is_list(wanted) or _types.is_large_list(wanted) or _types.is_fixed_size_list(wanted)
    )
    return wanted.value_type if is_list and wanted is not None else None


def _bytes_of_null(type_: pa.DataType | None) -> int:
    """The bytes that a null takes in a column."""
    if type_ is None:
        return _UNKNOWN_BYTES
    if isinstance(type_, pa.BaseExtensionType):
        type_ = type_.storage_type
    if _types.is_fixed_size_list(type_):
        return int(type_.list_size) * _bytes_of_null(type_.value_type)
    if _types.is_struct(type_):
        return 1 + sum(_bytes_of_null(field.type) for field in type_)
    return _width(type_) or _OFFSET_BYTES


def _width(type_: pa.DataType) -> int | None:
    """The bytes of each value; ``None`` if they differ."""
    if _types.is_nested(type_):
        return None
    try:
        return max(1, int(type_.bit_width) // 8)
    except ValueError:
        return None
