"""Converts callers' rows to record batches: Arrow, pandas and polars frames, dicts, dataclasses, numpy.

Arrow data has types, and they stay as they are. Python, pandas, polars and numpy have fewer types: a vector
is a list of doubles there. So the table's columns decide the types of these rows. If a column cannot hold a
value, the value is refused, and the error names its row.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from datetime import date, datetime, time
from enum import Enum
from operator import is_
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.errors import InvalidInputError
from lancewal.format import (
    UTC_NAMES,
    CastRefusedError,
    are_whole,
    changes_clock,
    exactly,
    is_bytes,
    is_float_list,
    is_json,
    is_text,
    same_kind,
)

#: Types that hold several keys, besides columns of pandas and polars.
_SEQUENCES = (list, tuple, range, Set, pa.Array, pa.ChunkedArray, np.ndarray)
_IN_MEMORY = (pa.Table, pa.RecordBatch, pa.ChunkedArray, list, tuple)
#: The errors that building an array from Python values may raise.
_FAILURES = (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError)
#: How many rows of a stream of single rows go into one batch.
_ROWS_AT_A_TIME = 1024
_BYTES = (bytes, bytearray, memoryview)
_NUMPY_DAY = np.dtype("M8[D]")
_SHOWN_VALUE = 60


def as_batches(data: Any, table: pa.Schema | None = None, *, casts: bool = False) -> list[pa.RecordBatch]:
    """Convert ``data`` of any supported form to record batches.

    ``table`` has the target columns, if they are known. With ``casts`` values of other kinds, such as text
    for a number, stay as they are, because the writer converts them later.
    """
    if isinstance(data, pa.RecordBatch):
        return [data]
    if isinstance(data, pa.Table):
        return list(data.to_batches())
    if is_row(data):
        return [_from_rows([data], table, casts)]
    if _is_pandas(data):
        return _from_pandas(data, table, casts)
    if isinstance(data, np.ndarray) and data.dtype.names:
        fields = {name: _numpy_field(data, name) for name in data.dtype.names}
        return [_from_columns(fields, table, casts)]
    try:
        if _is_polars(data):
            _refuse_objects(data)
            # Not through its Arrow stream: Arrow cannot decode the categories in it.
            return [_from_frame(b, table, casts) for b in data.to_arrow().to_batches() if b.num_rows]
        if isinstance(data, pa.RecordBatchReader) or hasattr(data, "__arrow_c_stream__"):
            return [b for b in pa.RecordBatchReader.from_stream(data) if b.num_rows]
    except pa.ArrowException as error:
        raise InvalidInputError(f"cannot read rows from this {type(data).__name__}: {error}") from error
    if _has_parts(data):
        items = list(data)
        if items and is_row(items[0]):
            return [_from_rows(items, table, casts)]
        return [batch for item in items for batch in as_batches(item, table, casts=casts)]
    raise _unreadable(data)


def _has_parts(data: Any) -> bool:
    """Whether ``data`` may be a collection of rows, frames or batches."""
    if isinstance(data, np.ndarray) or _is_series(data):
        return any(map(is_row, data[:1]))  # most arrays and series hold bare values
    return isinstance(data, Iterable) and not isinstance(data, str | bytes)


def _unreadable(data: Any) -> InvalidInputError:
    """The error for data without rows or column names; its text says what to pass instead."""
    kind = type(data)
    if isinstance(data, type):
        return InvalidInputError(f"cannot read rows from the class {data.__name__}; pass objects of it")
    if kind.__module__.startswith("polars") and kind.__name__ == "LazyFrame":
        return InvalidInputError("cannot read rows from LazyFrame; pass what its collect() returns")
    if _is_series(data):
        return InvalidInputError(
            f"cannot read rows from {kind.__name__}, which is one column; pass a frame, or a dict for one row"
        )
    if isinstance(data, np.ndarray):
        return InvalidInputError(
            f"cannot read rows from an array of {data.dtype}, whose columns have no names; pass a structured "
            'array, or dicts such as {"id": 1, "vector": array[0]}'
        )
    return InvalidInputError(
        f"cannot read rows from {kind.__name__} ({_shown(data)}); pass a dict, a dataclass, a RecordBatch, "
        "Table or RecordBatchReader, a pandas or polars frame, a structured numpy array, a list of these, or "
        "any object with __arrow_c_stream__"
    )


def new_table_of(data: Any) -> pa.Table:
    """Convert ``data`` to rows for a table that does not exist yet.

    Unless ``data`` is Arrow, lists of floats that all have the same length become vectors of float32.
    """
    batches = as_batches(data)
    if not batches:
        raise InvalidInputError("there are no rows to take columns from; pass an Arrow schema")
    try:
        rows = pa.Table.from_batches(batches).combine_chunks()
    except pa.ArrowException as error:
        raise InvalidInputError(f"the rows have different columns: {error}") from None
    for place, field in enumerate(rows.schema):
        if part := _unknown_part(field):
            raise InvalidInputError(
                f"column {part} holds nothing but nulls, so its type is unknown; pass an Arrow "
                "schema, or Arrow data with types"
            )
        if not _is_arrow(data) and is_float_list(field.type):
            size = _common_length(rows.column(place))
            if size:
                vector = pa.list_(pa.float32(), size)
                values = _rounded(rows.column(place).combine_chunks(), vector, field.name)
                rows = rows.set_column(place, pa.field(field.name, vector), values)
    return rows


def _unknown_part(field: pa.Field) -> str | None:
    """The name of the column, or of the nested field in it, that has no type."""
    if pa.types.is_null(field.type):
        return str(field.name)
    parts = (_unknown_part(field.type.field(place)) for place in range(field.type.num_fields))
    unknown = next(filter(None, parts), None)
    return f"{field.name}.{unknown}" if unknown else None


def is_row(data: Any) -> bool:
    """Whether ``data`` is one row: a dict, a dataclass, a named tuple, a numpy record or a pydantic model."""
    if isinstance(data, Mapping):
        return True
    if isinstance(data, type):
        return False
    if isinstance(data, np.void):
        return bool(data.dtype.names)
    return dataclasses.is_dataclass(data) or hasattr(data, "_asdict") or hasattr(data, "model_dump")


def is_tabular(data: Any) -> bool:
    """Whether ``data`` is a set of rows with columns, not a set of key values or a single row."""
    if isinstance(data, list | tuple) and not hasattr(data, "_asdict"):
        return bool(data) and all(isinstance(item, pa.RecordBatch) or is_row(item) for item in data)
    if isinstance(data, np.ndarray):
        return bool(data.dtype.names)
    if is_key_sequence(data):
        return False
    return hasattr(data, "__arrow_c_stream__") or isinstance(data, pa.RecordBatch) or _is_pandas(data)


def is_key_sequence(keys: Any) -> bool:
    """Whether ``keys`` holds several key values: a list, set or range, an array, a Series or an Index."""
    # An array of numpy without dimensions is one value.
    return (isinstance(keys, _SEQUENCES) and getattr(keys, "ndim", 1) > 0) or _is_series(keys)


def key_sequence(keys: Any) -> Any:
    """Key values in a form that Arrow can read."""
    if _is_series(keys):
        return keys.to_arrow() if hasattr(keys, "to_arrow") else keys
    return list(keys) if isinstance(keys, Set) else keys


def is_stream(data: Any) -> bool:
    """Whether ``data`` can be read only once, or may be larger than memory."""
    if isinstance(data, _IN_MEMORY):
        return False
    # Frames have the stream interface too, but all their rows are already in memory.
    if _is_pandas(data) or _is_polars(data) or is_row(data):
        return False
    return hasattr(data, "__arrow_c_stream__") or isinstance(data, Iterator)


def streamed_batches(
    stream: Any, table: pa.Schema | None = None, *, casts: bool = False
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a stream as they come, like :func:`as_batches`; gathers single rows to batches."""
    if isinstance(stream, Iterator) and not isinstance(stream, pa.RecordBatchReader):
        rows: list[Any] = []
        for item in stream:
            if is_row(item):
                rows.append(item)
                if len(rows) == _ROWS_AT_A_TIME:
                    yield _from_rows(rows, table, casts)
                    rows = []
                continue
            if rows:
                yield _from_rows(rows, table, casts)
                rows = []
            read = streamed_batches if is_stream(item) else as_batches
            yield from read(item, table, casts=casts)
        if rows:
            yield _from_rows(rows, table, casts)
    else:
        try:
            reader = pa.RecordBatchReader.from_stream(stream)
        except pa.ArrowException as error:
            raise InvalidInputError(f"cannot read rows from this {type(stream).__name__}: {error}") from error
        yield from reader


def _from_rows(rows: Sequence[Any], table: pa.Schema | None, casts: bool) -> pa.RecordBatch:
    dicts = []
    for place, row in enumerate(rows):
        if not is_row(row):
            raise InvalidInputError(
                f"row {place} is {_shown(row)}, of type {type(row).__name__}; the rows before are like "
                "dicts: make it one, or leave it out"
            )
        dicts.append(_fields(row))
    names = dict.fromkeys(name for row in dicts for name in row)
    for name in names:
        if not isinstance(name, str):
            raise InvalidInputError(f"a row has the column {name!r}; names of columns are text")
    if not names:
        raise InvalidInputError("the rows have no columns; pass dicts with a value for each column")
    return _from_columns({name: [row.get(name) for row in dicts] for name in names}, table, casts)


def _fields(row: Any) -> Mapping[str, Any]:
    if isinstance(row, Mapping):
        return row
    if hasattr(row, "_asdict"):
        return dict(row._asdict())
    if hasattr(row, "model_dump"):
        return dict(row.model_dump())
    if isinstance(row, np.void):
        return {name: row[name] for name in row.dtype.names or ()}
    # Not asdict: it copies every number of a vector.
    return {each.name: getattr(row, each.name) for each in dataclasses.fields(row)}


def _from_pandas(frame: Any, table: pa.Schema | None, casts: bool) -> list[pa.RecordBatch]:
    names = list(map(str, frame.columns))
    if len(set(names)) != len(names):
        raise InvalidInputError(f"the frame has a column name twice: {', '.join(names)}")
    if not len(frame):
        return []
    for name in frame.index.names:
        if name is not None and table is not None and name in table.names and name not in names:
            raise InvalidInputError(f"column {name} is the frame's index; pass frame.reset_index()")
    columns = {str(name): _pandas_column(frame[name]) for name in frame.columns}
    return [_from_columns(columns, table, casts)]


def _refuse_objects(frame: Any) -> None:
    """Refuse columns of Python objects: polars passes their memory addresses to Arrow."""
    for name, type_ in frame.schema.items():
        if type_ == sys.modules["polars"].Object:
            raise InvalidInputError(f"column {name} holds objects of Python in polars; convert it")


def _from_frame(batch: pa.RecordBatch, table: pa.Schema | None, casts: bool) -> pa.RecordBatch:
    return _from_columns(dict(zip(batch.schema.names, batch.columns, strict=True)), table, casts)


def _pandas_column(column: Any) -> Any:
    """A pandas column as an Arrow array, or as a list of Python values; NaN, NaT and NA become nulls."""
    if column.dtype != object:
        try:
            made = pa.array(column)
            return made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made
        except _FAILURES:
            pass  # the conversion of the Python values below finds the wrong row
    return list(column.astype(object).where(column.notna(), None))


def _numpy_field(data: Any, name: str) -> Any:
    """One field of a structured array, as an Arrow array, or as a list of Python values."""
    column = data[name]
    if column.dtype == object and column.ndim == 1:
        return column.tolist()
    try:
        return _numpy_column(column)
    except _FAILURES as error:
        raise InvalidInputError(f"column {name}, {column.dtype} in numpy, cannot be read: {error}") from None


def _numpy_column(column: Any) -> pa.Array:
    """A numpy column as an Arrow array; a field that is an array itself becomes a vector."""
    native = np.ascontiguousarray(column).astype(column.dtype.newbyteorder("="), copy=False)
    if native.ndim == 1:
        masked = np.ma.getmaskarray(column) if isinstance(column, np.ma.MaskedArray) else None
        return pa.array(native, mask=masked)
    return pa.FixedSizeListArray.from_arrays(
        _numpy_column(native.reshape(-1)), int(np.prod(native.shape[1:]))
    )


def _from_columns(columns: Mapping[str, Any], table: pa.Schema | None, casts: bool) -> pa.RecordBatch:
    made = {}
    for name, values in columns.items():
        place = -1 if table is None else table.get_field_index(name)
        field = None if table is None or place < 0 else table.field(place)
        made[name] = _column(name, values, field, casts)
    return pa.RecordBatch.from_arrays(list(made.values()), names=list(made))


def _column(name: str, values: Any, field: pa.Field | None, casts: bool) -> pa.Array:
    """``values`` as an array that the writer accepts for the table's ``field``."""
    if field is not None and is_json(field.type) and not isinstance(values, pa.Array):
        values = [_json_text(name, row, value) for row, value in enumerate(values)]
    try:
        array = values if isinstance(values, pa.Array) else _inferred(values)
    except _FAILURES as error:
        return _typed(name, values, field, error)
    if field is None or is_json(field.type):
        return array
    if not same_kind(array.type, field.type) and not isinstance(values, pa.Array):
        if casts and _has_casts(array.type, field.type):
            return array
        array = _typed(name, values, field, None)
    _refuse_a_guessed_zone(name, array, field.type)
    if is_float_list(field.type) and same_kind(array.type, field.type):
        return _rounded(array, field.type, name)
    return array


def _has_casts(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether Arrow can convert values of another kind with the same meaning as in Python.

    It cannot for a UUID: it would read the bytes as text.
    """
    if pa.types.is_nested(given) != pa.types.is_nested(wanted) or isinstance(given, pa.BaseExtensionType):
        return False
    return not _cannot_be_told(given) and not _cannot_be_told(wanted)


def _refuse_a_guessed_zone(name: str, array: pa.Array, wanted: pa.DataType) -> None:
    """Refuse a conversion that adds or drops a time zone: Arrow would assume UTC in both directions."""
    if not changes_clock(array.type, wanted) or array.null_count == len(array):
        return
    row = int(np.argmax(array.is_valid().to_numpy(zero_copy_only=False)))
    raise InvalidInputError(
        f"column {name}, row {row}: {_shown(array[row].as_py())} is {array.type}, the table has {wanted}: "
        "one has a time zone and the other has none; convert the value with datetime.astimezone or "
        "datetime.replace (only UTC is added or dropped by itself)"
    )


def _inferred(values: Sequence[Any]) -> pa.Array:
    """Python values as an array of the type that they imply, without loss.

    Values that Arrow does not know, such as dataclasses, are first converted with :func:`_plain`.
    """
    try:
        return _uncut(values)
    except _FAILURES:
        plain = list(map(_plain, values))
        if all(map(is_, plain, values)):
            raise
        return _uncut(plain)


def _uncut(values: Sequence[Any]) -> pa.Array:
    """``values`` as an array without loss; Arrow alone would infer the type from the first and cut others."""
    try:
        array = pa.array(values)
    except OverflowError:
        if not are_whole(values):
            raise
        return pa.array(values, pa.uint64())
    type_ = array.type
    if pa.types.is_nested(type_):
        return _by_parts(values, type_) if _is_cut(type_) else array
    if not _is_cut(type_):
        return array
    kinds = set(map(type, values))
    if pa.types.is_date(type_) and any(issubclass(kind, datetime) for kind in kinds):
        return _uncut([_moment(value) for value in values])
    if pa.types.is_timestamp(type_):
        return _moments(values, array)
    if pa.types.is_time(type_) and any(getattr(value, "tzinfo", None) for value in values):
        raise ValueError("a time of day has no time zone in Arrow")
    if pa.types.is_duration(type_) and any(getattr(value, "nanoseconds", 0) for value in values):
        return pa.array(values, pa.duration("ns"))
    if any(issubclass(kind, str) for kind in kinds) and any(issubclass(kind, _BYTES) for kind in kinds):
        raise ValueError("text and bytes are mixed")
    return array


def _moments(values: Sequence[Any], array: pa.Array) -> pa.Array:
    """Values that Arrow read as timestamps, with all digits kept and no time zone guessed."""
    type_ = array.type
    offsets = {value.utcoffset() for value in values if isinstance(value, datetime)}
    if None in offsets and len(offsets) > 1:
        raise ValueError("some have a time zone, and some have none")
    if type_.tz in UTC_NAMES and any(offsets):
        # The first value was in UTC, but the column's time zone must not depend on which value is first.
        type_ = pa.timestamp(type_.unit, next(_zone(value) for value in values if _zone(value)))
    if any(getattr(value, "nanosecond", 0) for value in values):
        type_ = pa.timestamp("ns", type_.tz)
    return array if type_ == array.type else pa.array(values, type_)


def _zone(value: Any) -> str | None:
    """The time zone of a datetime that is not in UTC; otherwise ``None``."""
    if isinstance(value, datetime) and value.utcoffset():
        return str(pa.array([value]).type.tz)
    return None


def _moment(value: Any) -> Any:
    is_day = isinstance(value, date) and not isinstance(value, datetime)
    return datetime.combine(value, time()) if is_day else value


def _plain(value: Any) -> Any:
    """``value`` in types that Arrow knows: dataclasses become dicts, and NA and NaT of pandas become null."""
    if isinstance(value, list | tuple):
        parts = list(map(_plain, value))
        return value if all(map(is_, parts, value)) else parts
    if isinstance(value, dict):
        changed = {key: _plain(part) for key, part in value.items()}
        return value if all(map(is_, changed.values(), value.values())) else changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(part) for key, part in _fields(value).items()}
    if isinstance(value, np.datetime64) and value.dtype == _NUMPY_DAY:
        return value.item()
    pandas = sys.modules.get("pandas")
    return None if pandas is not None and (value is pandas.NA or value is pandas.NaT) else value


def _typed(name: str, values: Sequence[Any], field: pa.Field | None, error: Exception | None) -> pa.Array:
    """Values whose type cannot be inferred, such as maps, in the type of ``field``; or raises a refusal."""
    if field is not None and _cannot_be_told(field.type):
        try:
            array, error = _by_parts(values, field.type), None
        except _FAILURES as typed_error:
            error = typed_error
        else:
            if same_kind(array.type, field.type):
                _refuse_a_guessed_zone(name, array, field.type)
                return _rounded(array, field.type, name)
    row = _first_misfit(values, field)
    wanted = "" if field is None else f", the table has {field.type}"
    text = f"column {name}, row {row}: {_shown(values[row])} is {type(values[row]).__name__}{wanted}"
    if field is None or error is not None:
        raise InvalidInputError(f"{text}: {error}; convert the value") from None
    raise InvalidInputError(f"{text}; {_way_out(values[row], field.type)}")


def _way_out(value: Any, wanted: pa.DataType) -> str:
    """Advice for an error text: what a caller can do with a value of the wrong kind."""
    if isinstance(value, Enum | UUID):
        return "pass its .value" if isinstance(value, Enum) else "pass str() of it"
    with suppress(*_FAILURES, CastRefusedError):
        exactly(_inferred([value]), wanted, rounding=True)
        return "convert the value, or open the writer with cast=True, which also takes numbers from text"
    if isinstance(value, list) and not pa.types.is_nested(wanted):
        return "a row has one value for each column: pass a list of dicts, or pyarrow.table(…) of lists"
    if isinstance(value, Mapping) and pa.types.is_struct(wanted):
        known = {wanted.field(place).name for place in range(wanted.num_fields)}
        if unknown := [str(name) for name in value if name not in known]:
            return f"the table has no field {', '.join(unknown)} in it: leave it out"
    return "convert the value"


def _by_parts(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """Values in the nested shape of ``type_``; numbers keep the type that they imply.

    Given the whole type, Arrow would cut 1.5 to 1 for an integer, and drop unknown fields of structs.
    """
    if not _cannot_be_told(type_) and not (pa.types.is_nested(type_) and _is_cut(type_)):
        return _inferred(values)
    if pa.types.is_fixed_size_binary(type_):
        return pa.array(values, type_)
    if pa.types.is_struct(type_):
        rows = [{} if value is None else _fields(value) for value in values]
        known = {field.name: field.type for field in type_}
        columns = {
            name: [row.get(name) for row in rows]
            for name in dict.fromkeys([*known, *(n for r in rows for n in r)])
        }
        parts = [_by_parts(c, known[n]) if n in known else _inferred(c) for n, c in columns.items()]
        return pa.StructArray.from_arrays(parts, list(columns), mask=pa.array([v is None for v in values]))
    lists = [list(v.items()) if isinstance(v, Mapping) else v for v in values]
    ends = np.cumsum([0, *(0 if each is None else len(each) for each in lists)])
    offsets = pa.array(ends, pa.int32(), mask=np.array([*(each is None for each in lists), False]))
    items = [item for each in lists if each is not None for item in each]
    if pa.types.is_map(type_):
        keys = _by_parts([key for key, _ in items], type_.key_type)
        return pa.MapArray.from_arrays(offsets, keys, _by_parts([item for _, item in items], type_.item_type))
    return pa.ListArray.from_arrays(offsets, _by_parts(items, type_.value_type))


def _cannot_be_told(type_: pa.DataType) -> bool:
    """Whether Arrow cannot infer this type from Python values: a map, or binary of a fixed size."""
    children = (type_.field(place).type for place in range(type_.num_fields))
    return bool(pa.types.is_map(type_) or pa.types.is_fixed_size_binary(type_)) or any(
        map(_cannot_be_told, children)
    )


def _is_cut(type_: pa.DataType) -> bool:
    """Whether Arrow may lose a part of Python values of this type: digits, time zones, text or bytes."""
    children = (type_.field(place).type for place in range(type_.num_fields))
    flat = pa.types.is_temporal(type_) or is_text(type_) or is_bytes(type_)
    return bool(flat) or any(map(_is_cut, children))


def _json_text(name: str, row: int, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"column {name}, row {row}: {_shown(value)} is no JSON: {error}") from None


def _first_misfit(values: Sequence[Any], field: pa.Field | None) -> int:
    """The first row whose value is not of the field's kind, or does not fit the values before it."""
    for row, value in enumerate(values):
        if value is None:
            continue
        try:
            kind = _inferred([value]).type
        except _FAILURES:
            return row
        if field is not None and not same_kind(kind, field.type):
            return row
    for row in range(1, len(values)):
        try:
            _inferred(values[: row + 1])
        except _FAILURES:
            return row
    return 0


def _rounded(array: pa.Array, target: pa.DataType, name: str) -> pa.Array:
    try:
        return exactly(array, target, rounding=True)
    except CastRefusedError as error:
        text = f"column {name} cannot be converted to {target}: {error}; change the value"
        raise InvalidInputError(text) from None


def _common_length(column: pa.ChunkedArray) -> int | None:
    lengths = pc.unique(pc.list_value_length(column).drop_null()).to_pylist()
    return int(lengths[0]) if len(lengths) == 1 and lengths[0] else None


def _is_arrow(data: Any) -> bool:
    if isinstance(data, list | tuple) and data:
        data = data[0]
    if isinstance(data, np.ndarray) or is_row(data) or _is_pandas(data) or _is_polars(data):
        return False
    return isinstance(data, pa.RecordBatch | pa.Table) or hasattr(data, "__arrow_c_stream__")


def _is_series(data: Any) -> bool:
    """Whether ``data`` is a column of pandas or polars; neither needs to be installed."""
    pandas, polars = sys.modules.get("pandas"), sys.modules.get("polars")
    return (pandas is not None and isinstance(data, (pandas.Series, pandas.Index))) or (
        polars is not None and isinstance(data, polars.Series)
    )


def _is_pandas(data: Any) -> bool:
    return type(data).__module__.startswith("pandas") and hasattr(data, "columns")


def _is_polars(data: Any) -> bool:
    return type(data).__module__.startswith("polars") and type(data).__name__ == "DataFrame"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_VALUE else text[: _SHOWN_VALUE - 1] + "…"
