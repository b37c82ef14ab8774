"""Conversions of values: to another type, JSON to Lance's encoding and back, dictionaries.

A conversion never changes a value; it names the first row that it would change.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.errors import InvalidInputError
from lancewal.format.schema import stored_field
from lancewal.format.spans import has_dictionary, one_array

Convert = Callable[[pa.Array], pa.Array]
_Rows = TypeVar("_Rows", pa.RecordBatch, pa.Table)
_Mask = npt.NDArray[np.bool_]
#: The first row whose value would change, and why.
_Change = tuple[int, str]

_SHOWN_VALUE = 60
_ANY_INTEGER = pa.decimal128(20, 0)
_WHOLE = (int, np.integer, type(None))


class CastRefusedError(ValueError):
    """A column cannot be converted; ``row`` is the first row that prevents it, if a row does."""

    def __init__(self, text: str, row: int | None = None) -> None:
        super().__init__(text)
        self.row = row


def exactly(column: pa.Array, target: pa.DataType, *, rounding: bool = False) -> pa.Array:
    """Convert ``column`` to ``target`` without changing any value.

    With ``rounding``, floats and decimals may lose digits to narrower floats, but never become
    infinite.

    >>> exactly(pa.array([1.5, 2.0]), pa.float32()).to_pylist()
    [1.5, 2.0]
    >>> exactly(pa.array([2.0, 0.1]), pa.float32())
    Traceback (most recent call last):
        ...
    lancewal.format.values.CastRefusedError: row 1 is 0.1, which float cannot hold exactly
    """
    try:
        if pa.types.is_integer(column.type) and pa.types.is_decimal(target):
            # Otherwise Arrow requires room for the largest integer of the type, not for the actual values.
            column = column.cast(_ANY_INTEGER)
        converted = column.cast(target, safe=True)
    except pa.ArrowNotImplementedError as error:
        raise CastRefusedError(f"{column.type} cannot become {target}: {error}") from None
    except pa.ArrowException as error:
        row = _first_failing(column, target)
        raise CastRefusedError(
            f"row {row} is {_shown(column, row)}: {_other_length(column[row], target) or error}", row
        ) from None
    change = _first_change(column, converted, rounding)
    if change is not None:
        row, why = change
        raise CastRefusedError(f"row {row} is {_shown(column, row)}, {why}", row)
    return converted


def from_python(values: Any, type_: pa.DataType) -> pa.Array:
    """Convert Python values to ``type_`` without changing any; Arrow alone converts 1.5 to the integer 1.

    >>> from_python([1, 2.0], pa.int32()).to_pylist()
    [1, 2]
    """
    made = pa.array(values, type_)
    if pa.types.is_integer(type_) and isinstance(values, list | tuple) and not are_whole(values):
        return exactly(pa.array(values), type_)
    return made


def are_whole(values: Iterable[Any]) -> bool:
    """Whether all values are integers of Python or numpy, or ``None``."""
    return all(issubclass(kind, _WHOLE) for kind in set(map(type, values)))


def has_floats(type_: pa.DataType) -> bool:
    """Whether values of a type are or contain floats."""
    children = (type_.field(place).type for place in range(type_.num_fields))
    return bool(pa.types.is_floating(type_)) or any(map(has_floats, children))


def _first_change(given: pa.Array, made: pa.Array, rounding: bool) -> _Change | None:
    """The first row that differs between ``given`` and ``made``."""
    given, made = _unwrapped(given), _unwrapped(made)
    if given.type == made.type or not len(given):
        return None
    if pa.types.is_struct(made.type) and pa.types.is_struct(given.type):
        return _first_struct_change(given, made, rounding)
    if _is_list(made.type) and _is_list(given.type):
        found = _first_change(given.flatten(), made.flatten(), rounding)
        if found is None:
            return None
        lengths = pc.fill_null(pc.list_value_length(given), 0).to_numpy(zero_copy_only=False)
        return int(np.searchsorted(np.cumsum(lengths), found[0], side="right")), found[1]
    changed = _changed_values(given, made, rounding)
    if changed is None or not changed.any():
        return None
    return int(np.argmax(changed)), f"which {made.type} cannot hold{'' if rounding else ' exactly'}"


def _first_struct_change(given: pa.StructArray, made: pa.StructArray, rounding: bool) -> _Change | None:
    before = dict(zip([field.name for field in given.type], given.flatten(), strict=True))
    after = dict(zip([field.name for field in made.type], made.flatten(), strict=True))
    for name, child in before.items():
        if name not in after:
            return 0, f"whose field {name} the table does not have"
        found = _first_change(child, after[name], rounding)
        if found is not None:
            return found
    return None


def _changed_values(given: pa.Array, made: pa.Array, rounding: bool) -> _Mask | None:
    """Which values differ, in a column without children; ``None`` if none can differ."""
    types = pa.types
    if types.is_null(given.type):
        return None
    if types.is_floating(made.type):
        if _is_text(given.type):
            # Digits stand for the nearest double; only the word itself stands for infinity.
            infinite = pc.match_substring(given.cast(pa.string()), "inf", ignore_case=True)
            given = given.cast(pa.float64())
            told = infinite.fill_null(True).to_numpy(zero_copy_only=False)
        else:
            told = np.ones(len(given), np.bool_)
        if types.is_floating(given.type) or (rounding and types.is_decimal(given.type)):
            before, after = _doubles(given), _doubles(made)
            if rounding:
                return np.asarray(np.isinf(after) & ~(np.isinf(before) & told))
            same = (before == after) | (np.isnan(before) & np.isnan(after))
            return np.asarray(~same | (np.isinf(after) & ~told))
    if _is_text(given.type):
        return None  # the cast has refused text that does not parse
    if types.is_decimal(given.type) and types.is_integer(made.type):
        return None  # the cast has refused fractions and values out of range
    try:
        back = made.cast(given.type, safe=False)
    except pa.ArrowException:
        return np.asarray(given.is_valid().to_numpy(zero_copy_only=False))
    return np.asarray(pc.not_equal(given, back).fill_null(False).to_numpy(zero_copy_only=False))


def _doubles(array: pa.Array) -> npt.NDArray[np.float64]:
    """The values as doubles, nulls as NaN."""
    return np.asarray(array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)


def _first_failing(column: pa.Array, target: pa.DataType) -> int:
    """The first row that cannot be cast."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            column.slice(low, middle - low).cast(target, safe=True)
            low = middle
        except pa.ArrowException:
            high = middle
    return low


def _other_length(value: pa.Scalar, target: pa.DataType) -> str | None:
    """A clearer error text than Arrow's if a list has not the length of the table's vectors."""
    if not pa.types.is_fixed_size_list(target) or not _is_list(value.type) or not value.is_valid:
        return None
    length = len(value.values)
    return None if length == target.list_size else f"it has {length} items, the table has {target.list_size}"


def _unwrapped(array: pa.Array) -> pa.Array:
    """``array`` without extension types, dictionaries and maps around its values."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_map(array.type):
        # Arrow can take a map apart only as a list of pairs.
        array = array.cast(pa.list_(array.type.field(0)))
    return array


def _shown(column: pa.Array, row: int) -> str:
    text = repr(column[row].as_py())
    return text if len(text) <= _SHOWN_VALUE else text[: _SHOWN_VALUE - 1] + "…"


def _one_of(*kinds: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    return lambda type_: any(kind(type_) for kind in kinds)


_is_list = _one_of(pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
_is_text = _one_of(
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
    *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view),
)


# Lance has its own encoding of JSON (JSONB), and does not replay entries that hold the text. Its public
# API converts only the rows of a dataset, so we use one in memory. Every value then reads the same in
# memory, in an SSTable and in the base table.
_TEXT = pa.field("json", pa.json_())
_ENCODED = stored_field(_TEXT)
#: Finds texts that may have numbers such as NaN or 1e400. With an exponent of two digits such a number needs
#: many digits before it.
_NO_NUMBER = r"(?i)(^|[\[,:\s])[+-]?(nan|inf|infinity)\s*($|[\],}])|\de\+?\d{3}|\d{200}"
#: An expression, because Lance would return the plain column as text.
_AS_STORED = {"json": "json || X''"}


def encode_json(text: pa.Array) -> pa.Array:
    """Convert JSON text (of the JSON type, or plain) to Lance's encoding; refuses other text.

    >>> decode_json(encode_json(pa.array(['{"b": 1, "a": null}', None]))).to_pylist()
    ['{"a":null,"b":1}', None]
    """
    storage = text.storage if isinstance(text, pa.ExtensionArray) else text
    given = pa.ExtensionArray.from_storage(_TEXT.type, storage.cast(pa.string()))
    if not len(given):
        return pa.array([], _ENCODED.type)
    try:
        return one_array(_dataset(given, _TEXT).scanner(columns=_AS_STORED).to_table().column(0))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"a JSON column is given text that is no JSON: {error}") from error


def encode_new_json(text: pa.Array) -> pa.Array:
    """Like :func:`encode_json`, for new rows; refuses numbers that would be lost.

    Lance accepts NaN and numbers beyond a double, although JSON has none, and returns them as null.
    """
    encoded = encode_json(text)
    plain = (text.storage if isinstance(text, pa.ExtensionArray) else text).cast(pa.string())
    doubtful = np.flatnonzero(pc.match_substring_regex(plain, _NO_NUMBER).fill_null(False).to_numpy(False))
    if len(doubtful):
        some = encoded.take(doubtful)
        for row, before, after in zip(doubtful, some, encode_json(decode_json(some)), strict=True):
            if before != after:
                raise InvalidInputError(
                    f"a JSON column is given text that is no JSON: row {row} is {_shown(plain, int(row))}, "
                    "with a number that is none, or larger than a double"
                )
    return encoded


def decode_json(encoded: pa.Array) -> pa.Array:
    """Convert JSON in Lance's encoding to text, in Arrow's JSON type."""
    if not len(encoded):
        return pa.array([], _TEXT.type)
    return one_array(_dataset(encoded, _ENCODED).to_table().column(0))


def _dataset(values: pa.Array, field: pa.Field) -> lance.LanceDataset:
    rows = pa.table([values], schema=pa.schema([field]))
    return lance.write_dataset(rows, f"memory://{secrets.token_hex(16)}", mode="create")


def without_null_words(array: pa.Array) -> pa.Array:
    """``array`` without nulls in its dictionaries, nested ones included; itself if there are none.

    Arrow has two ways to represent null: a null index, and the index of a null in the dictionary. It cannot
    concatenate arrays of the second kind ("cannot yet unify dictionaries with nulls"). Lance returns
    such arrays from files of version 2.0, and callers may pass them.

    >>> given = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2]), pa.array(["a", None, "b"]))
    >>> joinable = without_null_words(given)
    >>> joinable.to_pylist(), joinable.dictionary.to_pylist()
    (['a', None, 'b'], ['a', 'b'])
    """
    type_ = array.type
    if not has_dictionary(type_):
        return array
    if pa.types.is_dictionary(type_):
        return _renumbered(array) if array.dictionary.null_count else array
    if pa.types.is_struct(type_):
        children = [without_null_words(array.field(place)) for place in range(type_.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=array.is_null())
    if pa.types.is_map(type_):
        return array
    return with_items(array, type_, without_null_words)


def without_null_words_in(rows: _Rows) -> _Rows:
    """``rows`` with :func:`without_null_words` applied to every column."""
    return _with_each(rows, without_null_words)


def with_nulls_below_in(rows: _Rows) -> _Rows:
    """``rows`` with :func:`with_nulls_below` applied to every column."""
    return _with_each(rows, with_nulls_below)


def _with_each(rows: _Rows, change: Convert) -> _Rows:
    """``rows`` with ``change`` applied to every column; it keeps their types."""
    if isinstance(rows, pa.RecordBatch):
        return pa.RecordBatch.from_arrays(list(map(change, rows.columns)), schema=rows.schema)
    columns = [
        pa.chunked_array([change(chunk) for chunk in column.chunks], column.type) for column in rows.columns
    ]
    return pa.Table.from_arrays(columns, schema=rows.schema)


def _renumbered(array: pa.DictionaryArray) -> pa.DictionaryArray:
    present = array.dictionary.is_valid().to_numpy(zero_copy_only=False)
    numbers = pa.array(np.cumsum(present) - 1, array.type.index_type, mask=~present)
    return pa.DictionaryArray.from_arrays(
        pc.take(numbers, array.indices), array.dictionary.drop_null(), ordered=array.type.ordered
    )


def with_nulls_below(array: pa.Array) -> pa.Array:
    """``array`` with null fields in all null structs, nested ones included; itself if it has no structs.

    A null struct may have values below it, which mean nothing. Lance's files do not store them, but
    DataFusion reads a field of a struct without looking at the struct.

    >>> given = pa.StructArray.from_arrays([pa.array([1, 2])], ["x"], mask=pa.array([False, True]))
    >>> given.field("x").to_pylist(), with_nulls_below(given).field("x").to_pylist()
    ([1, 2], [1, None])
    """
    type_ = array.type
    if not _has_struct(type_):
        return array
    if pa.types.is_struct(type_):
        children = [with_nulls_below(child) for child in array.flatten()]
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=array.is_null())
    return with_items(array, type_, with_nulls_below)


def _has_struct(type_: pa.DataType) -> bool:
    """Whether a type is a struct, or lists or maps with structs as values."""
    if pa.types.is_map(type_):
        return _has_struct(type_.item_type)
    return pa.types.is_struct(type_) or (_is_list(type_) and _has_struct(type_.value_type))


def with_items(array: pa.Array, type_: pa.DataType, change: Convert | None) -> pa.Array:
    """The lists or maps of ``array`` as ``type_``, with ``change`` applied to the items or map values."""
    if pa.types.is_fixed_size_list(type_):
        size = type_.list_size
        items = array.values.slice(array.offset * size, len(array) * size)
        return pa.FixedSizeListArray.from_arrays(changed(items, change), type=type_, mask=array.is_null())
    first, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
    items = array.values.slice(first, end - first)
    offsets = pc.subtract(array.offsets, array.offsets[0])
    if pa.types.is_map(type_):
        return pa.MapArray.from_arrays(
            offsets, items.field(0), changed(items.field(1), change), type=type_, mask=array.is_null()
        )
    kind = pa.LargeListArray if pa.types.is_large_list(type_) else pa.ListArray
    return kind.from_arrays(offsets, changed(items, change), type=type_, mask=array.is_null())


def changed(items: pa.Array, change: Convert | None) -> pa.Array:
    """``change(items)``, or ``items`` themselves without a ``change``."""
    return items if change is None else change(items)
