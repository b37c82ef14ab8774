"""Conversions between Arrow types that change no value, or say which one they would change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_Mask = npt.NDArray[np.bool_]
#: The first row that does not survive, and why.
_Change = tuple[int, str]

_SHOWN_VALUE = 60


class CastRefusedError(ValueError):
    """A column that cannot be converted; ``row`` is the first that stands in the way, where one does."""

    def __init__(self, text: str, row: int | None = None) -> None:
        super().__init__(text)
        self.row = row


def exactly(column: pa.Array, target: pa.DataType, *, rounding: bool = False) -> pa.Array:
    """``column`` as ``target``, every value the same.

    With ``rounding``, floats and decimals may lose digits to narrower floats, but never become
    infinite.

    >>> exactly(pa.array([1.5, 2.0]), pa.float32()).to_pylist()
    [1.5, 2.0]
    >>> exactly(pa.array([2.0, 0.1]), pa.float32())
    Traceback (most recent call last):
        ...
    lancewal.format.casts.CastRefusedError: row 1 is 0.1, which float cannot hold exactly
    """
    try:
        converted = column.cast(target, safe=True)
    except pa.ArrowNotImplementedError as error:
        raise CastRefusedError(f"{column.type} cannot become {target}: {error}") from None
    except pa.ArrowException as error:
        row = _first_failing(column, target)
        raise CastRefusedError(f"row {row} is {_shown(column, row)}: {error}", row) from None
    change = _change(column, converted, rounding)
    if change is not None:
        row, why = change
        raise CastRefusedError(f"row {row} is {_shown(column, row)}, {why}", row)
    return converted


def has_floats(type_: pa.DataType) -> bool:
    """Whether values of a type are, or contain, floats."""
    children = (type_.field(place).type for place in range(type_.num_fields))
    return bool(pa.types.is_floating(type_)) or any(map(has_floats, children))


def _change(given: pa.Array, made: pa.Array, rounding: bool) -> _Change | None:
    """The first row of ``given`` that ``made`` has not as it was."""
    given, made = _plain(given), _plain(made)
    if given.type == made.type or not len(given):
        return None
    if pa.types.is_struct(made.type) and pa.types.is_struct(given.type):
        return _struct_change(given, made, rounding)
    if _is_list(made.type) and _is_list(given.type):
        found = _change(given.flatten(), made.flatten(), rounding)
        if found is None:
            return None
        lengths = pc.fill_null(pc.list_value_length(given), 0).to_numpy(zero_copy_only=False)
        return int(np.searchsorted(np.cumsum(lengths), found[0], side="right")), found[1]
    changed = _changed(given, made, rounding)
    if changed is None or not changed.any():
        return None
    return int(np.argmax(changed)), f"which {made.type} cannot hold{'' if rounding else ' exactly'}"


def _struct_change(given: pa.StructArray, made: pa.StructArray, rounding: bool) -> _Change | None:
    before = dict(zip([field.name for field in given.type], given.flatten(), strict=True))
    after = dict(zip([field.name for field in made.type], made.flatten(), strict=True))
    for name, child in before.items():
        if name not in after:
            return 0, f"whose field {name} the table does not have"
        found = _change(child, after[name], rounding)
        if found is not None:
            return found
    return None


def _changed(given: pa.Array, made: pa.Array, rounding: bool) -> _Mask | None:
    """Which values of a column without children are others; ``None`` where none can be."""
    types = pa.types
    if types.is_null(given.type):
        return None
    if types.is_floating(made.type):
        if _is_text(given.type):
            # Digits mean the double nearest to them, and infinity is only what says so.
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
        return None  # what does not parse was refused
    try:
        back = made.cast(given.type, safe=False)
    except pa.ArrowException:
        return np.asarray(given.is_valid().to_numpy(zero_copy_only=False))
    return np.asarray(pc.not_equal(given, back).fill_null(False).to_numpy(zero_copy_only=False))


def _doubles(array: pa.Array) -> npt.NDArray[np.float64]:
    """Nulls as NaN."""
    return np.asarray(array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)


def _first_failing(column: pa.Array, target: pa.DataType) -> int:
    """The first row without which all before it can be cast."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            column.slice(low, middle - low).cast(target, safe=True)
            low = middle
        except pa.ArrowException:
            high = middle
    return low


def _plain(array: pa.Array) -> pa.Array:
    """Without the forms that hide other arrays."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_map(array.type):
        # Arrow takes a map apart only as the list of pairs that it is.
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
