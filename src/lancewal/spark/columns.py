"""Rows between Spark and a table: schemas, types, and the change type of each row.

Spark has fewer types than Arrow: unsigned integers become the next wider signed ones,
vectors become arrays, all texts are one type. Rows from Spark are converted to the table's types
if no value changes; otherwise they are refused, with the column and the key of the row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkTypeError
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as st
from pyspark.sql.pandas.types import to_arrow_schema

from lancewal.errors import InvalidInputError
from lancewal.format import CastRefusedError, TableSchema, check_columns, exactly
from lancewal.publish import FEED_COLUMNS
from lancewal.spark.options import Options
from lancewal.writer import Intake

if TYPE_CHECKING:
    from pyspark.sql import Column

_SCALARS: dict[pa.DataType, st.DataType] = {
    pa.null(): st.NullType(),
    pa.bool_(): st.BooleanType(),
    pa.int8(): st.ByteType(),
    pa.int16(): st.ShortType(),
    pa.int32(): st.IntegerType(),
    pa.int64(): st.LongType(),
    pa.uint8(): st.ShortType(),
    pa.uint16(): st.IntegerType(),
    pa.uint32(): st.LongType(),
    pa.uint64(): st.DecimalType(20, 0),
    pa.float16(): st.FloatType(),
    pa.float32(): st.FloatType(),
    pa.float64(): st.DoubleType(),
}
#: Spark 4.1 has no argument for the time zone, and always uses UTC here.
_IN_UTC: dict[str, Any] = (
    {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
)
_MAX_PRECISION = 38
_MICROSECONDS = 6

#: Spark's ``hash`` starts with seed 42 and uses the hash of each argument as the seed of the next. This
#: number hashes to 0, so the argument after it is hashed with seed 0, as in Lance.
_SEED_ZERO = -1693959553

_AS_INT = frozenset(
    [pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16(), pa.date32(), pa.string()]
)
_AS_IS = frozenset([pa.int64(), pa.large_string(), pa.string_view(), pa.float32(), pa.float64()]) | _AS_INT

#: Names of change types in our own feed, in Delta's and in Debezium's.
UPSERTS = ("upsert", "insert", "update", "update_postimage", "c", "u", "r")
DELETES = ("delete", "d")
#: The old version of a row, which another row of the feed replaces.
NOTHING = ("update_preimage",)

_Mask = npt.NDArray[np.bool_]


def spark_schema(columns: pa.Schema) -> st.StructType:
    """The Spark schema for rows of ``columns``.

    >>> spark_schema(pa.schema([("id", pa.int64()), ("v", pa.list_(pa.float32(), 2))])).simpleString()
    'struct<id:bigint,v:array<float>>'
    """
    return st.StructType([_spark_field(field, field.name) for field in columns])


def arrow_schema(schema: st.StructType) -> pa.Schema:
    """The exact Arrow schema that Spark wants for rows of ``schema``."""
    columns: list[pa.Field] = []
    for field in schema.fields:
        try:
            columns += to_arrow_schema(st.StructType([field]), **_IN_UTC)
        except PySparkTypeError:
            raise InvalidInputError(
                f"column {field.name} is {field.dataType.simpleString()}, which no table can hold; "
                "convert it with cast, or leave it out"
            ) from None
    return pa.schema(columns)


def for_spark(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """Rows of a table in the schema ``wanted``, which is :func:`arrow_schema` of the table's Spark schema."""
    gone = [name for name in wanted.names if name not in batch.schema.names]
    if gone:
        raise InvalidInputError(
            f"the table has no column {', '.join(gone)} any more; load it, or start the stream, again"
        )
    columns = [_reshape(batch.column(field.name), field.type, _exactly) for field in wanted]
    return pa.RecordBatch.from_arrays(columns, schema=wanted)


def for_table(
    batch: pa.RecordBatch, wanted: pa.Schema, key: Sequence[str], *, round_floats: bool = False
) -> pa.RecordBatch:
    """Rows from Spark with their columns in the types of ``wanted``.

    Columns that ``wanted`` does not have stay as they are; names are checked elsewhere. With
    ``round_floats``, floats may lose digits, but never become infinite.
    """
    columns = []
    leaf = partial(_losslessly, rounding=round_floats)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        place = wanted.get_field_index(name)
        if place < 0:
            columns.append(column)
            continue
        try:
            columns.append(_reshape(column, wanted.field(place).type, leaf))
        except _RefusedError as refusal:
            where = _row_named(batch, key, column, refusal)
            raise InvalidInputError(f"column {name}{where}: {refusal}") from None
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def bucket_column(field: pa.Field, num_buckets: int) -> Column:
    """The bucket of each row, from 0 to ``num_buckets`` - 1, exactly as the table computes it."""
    value = quoted(field.name).cast(spark_schema(pa.schema([field]))[0].dataType)
    hashed = F.hash(F.lit(_SEED_ZERO), _hashed_value(value, field))
    return (hashed.bitwiseAND(F.lit(0x7FFFFFFF)) % F.lit(num_buckets)).cast("int")


def _hashed_value(value: Column, field: pa.Field) -> Column:
    type_ = field.type
    if type_ in _AS_IS:
        return value
    if type_ == pa.uint32():
        # The table hashes the bits. Above the greatest signed number, these are the bits of a negative one.
        return F.when(value >= 1 << 31, value - (1 << 32)).otherwise(value).cast("int")
    if type_ == pa.uint64():
        wrapped = value - F.lit(str(1 << 64)).cast("decimal(20,0)")
        return (
            F.when(value >= F.lit(str(1 << 63)).cast("decimal(20,0)"), wrapped)
            .otherwise(value)
            .cast("bigint")
        )
    if pa.types.is_timestamp(type_) and type_.unit == "us":
        return value
    raise InvalidInputError(
        f"rows cannot be routed by {field.name} of type {type_} inside Spark; write them with "
        'df.write.format("lancewal"), which needs no routing'
    )


def quoted(name: str) -> Column:
    return F.col("`" + name.replace("`", "``") + "`")


class SparkRows:
    """Checks and converts rows for the table; errors name the column, and the row's key where it is known.

    The column that ``changeTypeColumn`` names has the change type of each row; null means upsert. With this
    option, rows may also have the columns that our change feed adds, which are left out.
    """

    def __init__(self, schema: TableSchema, storage_version: str, options: Options) -> None:
        self._schema = schema
        self._round_floats = options.flag("roundFloats")
        self._change_column = change_column = options.text("changeTypeColumn")
        check_columns(schema)
        self._intake = Intake(schema, storage_version=storage_version)
        if change_column is not None and change_column in schema.names:
            raise InvalidInputError(
                f"{change_column} is a column of the table and cannot say what becomes of a row; rename one"
            )

    def check(self, given: pa.Schema) -> None:
        """Refuse a schema that does not fit the table."""
        empty = pa.RecordBatch.from_arrays([pa.nulls(0, type_) for type_ in given.types], schema=given)
        if self._change_column is not None:
            _, empty = self._take_changes(empty)
        unknown = [name for name in empty.schema.names if name not in self._schema.names]
        if unknown:
            raise InvalidInputError(
                f"the table has no column {', '.join(unknown)}; "
                f"its columns are {', '.join(self._schema.names)}"
            )
        required = [field.name for field in self._schema.plain if not field.nullable]
        if self._change_column is None:
            required += self._schema.primary_key
        missing = sorted(set(required) - set(empty.schema.names))
        if missing:
            raise InvalidInputError(f"the rows lack {', '.join(missing)}, which cannot be null; add it")
        self._for_table(empty)

    def stored(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """The rows in ``schema.stored``, in order; ``None`` if there is nothing to write."""
        if batch.num_rows == 0:
            return None
        if self._change_column is None:
            return self._upserts(batch)
        changes, batch = self._take_changes(batch)
        deleted = _is_one_of(changes, DELETES)
        ignored = _is_one_of(changes, NOTHING)
        self._refuse_unknown(changes, deleted | ignored)
        upserted = ~(deleted | ignored)
        parts, places = [], []
        for wanted, convert in ((upserted, self._upserts), (deleted, self._deletes)):
            if wanted.any():
                part = batch if wanted.all() else batch.filter(pa.array(wanted))
                parts.append(convert(part))
                places.append(np.flatnonzero(wanted))
        if not parts:
            return None
        if len(parts) == 1:
            return parts[0]
        # Upserts and deletes were converted separately. Restore the order: a key's last change stays last.
        order = np.argsort(np.concatenate(places), kind="stable")
        return pa.concat_batches(parts).take(pa.array(order))

    def _upserts(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return self._intake.upserts(self._for_table(batch)).batches[0]

    def _deletes(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        names = [name for name in self._schema.primary_key if name in batch.schema.names]
        return self._intake.deletes(self._for_table(batch.select(names))).batches[0]

    def _for_table(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        key = self._schema.primary_key
        return for_table(batch, self._schema.plain, key, round_floats=self._round_floats)

    def _take_changes(self, batch: pa.RecordBatch) -> tuple[pa.Array, pa.RecordBatch]:
        assert self._change_column is not None
        place = batch.schema.get_field_index(self._change_column)
        if place < 0:
            raise InvalidInputError(
                f"option changeTypeColumn names {self._change_column}, which the rows do not have; "
                f"their columns are {', '.join(batch.schema.names)}"
            )
        changes = batch.column(place)
        if not pa.types.is_string(changes.type) and not pa.types.is_large_string(changes.type):
            raise InvalidInputError(f"column {self._change_column} must hold text, not {changes.type}")
        left_out = {self._change_column, *(c for c in FEED_COLUMNS if c not in self._schema.names)}
        return changes, batch.select([name for name in batch.schema.names if name not in left_out])

    def _refuse_unknown(self, changes: pa.Array, known: _Mask) -> None:
        unknown = ~(known | _is_one_of(changes, UPSERTS) | changes.is_null().to_numpy(zero_copy_only=False))
        if unknown.any():
            found = changes.filter(pa.array(unknown)).unique().slice(0, 3).to_pylist()
            raise InvalidInputError(
                f"column {self._change_column} says {found}; known are {', '.join((*UPSERTS, *DELETES))}"
            )


def _is_one_of(changes: pa.Array, words: tuple[str, ...]) -> _Mask:
    found = pc.is_in(pc.utf8_lower(changes), value_set=pa.array(words, changes.type))
    return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)


def _spark_field(field: pa.Field, path: str) -> st.StructField:
    return st.StructField(field.name, _spark_type(field.type, path), field.nullable)


def _spark_type(type_: pa.DataType, path: str) -> st.DataType:
    types = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        type_ = type_.storage_type
    if types.is_dictionary(type_):
        type_ = type_.value_type
    if type_ in _SCALARS:
        return _SCALARS[type_]
    if types.is_decimal(type_) and type_.precision <= _MAX_PRECISION and 0 <= type_.scale <= type_.precision:
        return st.DecimalType(type_.precision, type_.scale)
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        return st.StringType()
    if _is_bytes(type_):
        return st.BinaryType()
    if types.is_date(type_):
        return st.DateType()
    if types.is_timestamp(type_):
        return st.TimestampNTZType() if type_.tz is None else st.TimestampType()
    if types.is_time(type_):
        return st.TimeType(_MICROSECONDS)
    if types.is_duration(type_):
        return st.DayTimeIntervalType()
    if _is_list(type_):
        item = type_.value_field
        return st.ArrayType(_spark_type(item.type, f"{path}.item"), item.nullable)
    if types.is_struct(type_):
        fields = [type_.field(i) for i in range(type_.num_fields)]
        return st.StructType([_spark_field(each, f"{path}.{each.name}") for each in fields])
    if types.is_map(type_):
        return st.MapType(
            _spark_type(type_.key_type, f"{path}.key"),
            _spark_type(type_.item_type, f"{path}.value"),
            type_.item_field.nullable,
        )
    raise InvalidInputError(
        f"column {path} has type {type_}, which Spark cannot show; leave it out with the option columns"
    )


class _RefusedError(ValueError):
    """A value does not fit; ``row`` is its number in the array, if it is known."""

    def __init__(self, text: str, row: int | None = None) -> None:
        super().__init__(text)
        self.row = row


_Leaf = Callable[[pa.Array, pa.DataType], pa.Array]


def _reshape(array: pa.Array, wanted: pa.DataType, leaf: _Leaf) -> pa.Array:
    """``array`` as ``wanted``, through lists, structs and maps; ``leaf`` converts the values below."""
    types = pa.types
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if isinstance(wanted, pa.BaseExtensionType):
        return wanted.wrap_array(_reshape(array, wanted.storage_type, leaf))
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_dictionary(wanted):
        return _reshape(array, wanted.value_type, leaf).dictionary_encode().cast(wanted)
    if array.type == wanted and _same_children(array.type, wanted):
        return array
    if types.is_null(array.type):
        return pa.nulls(len(array), wanted)
    if types.is_struct(wanted) and types.is_struct(array.type):
        return _reshape_struct(array, wanted, leaf)
    if types.is_map(wanted) and types.is_map(array.type):
        return _reshape_map(array, wanted, leaf)
    if types.is_fixed_size_list(wanted) and _is_list(array.type):
        return _to_fixed_size(array, wanted, leaf)
    if (types.is_list(wanted) or types.is_large_list(wanted)) and _is_list(array.type):
        items = _reshape(array.flatten(), wanted.value_type, leaf)
        offset_type = pa.int64() if types.is_large_list(wanted) else pa.int32()
        kind = pa.LargeListArray if types.is_large_list(wanted) else pa.ListArray
        return kind.from_arrays(_offsets(array, offset_type), items, type=wanted, mask=_nulls(array))
    if wanted.num_fields or array.type.num_fields:
        raise _RefusedError(f"{array.type} does not fit {wanted}")
    return leaf(array, wanted)


def _reshape_struct(array: pa.StructArray, wanted: pa.StructType, leaf: _Leaf) -> pa.Array:
    given = {array.type.field(i).name: i for i in range(array.type.num_fields)}
    fields = [wanted.field(i) for i in range(wanted.num_fields)]
    unknown = sorted(given.keys() - {field.name for field in fields})
    missing = sorted(field.name for field in fields if field.name not in given and not field.nullable)
    if unknown or missing:
        raise _RefusedError(
            f"fields {unknown or missing} are {'unknown' if unknown else 'missing'} in the struct"
        )
    children = [
        _reshape(array.field(given[field.name]), field.type, leaf)
        if field.name in given
        else pa.nulls(len(array), field.type)
        for field in fields
    ]
    return pa.StructArray.from_arrays(children, fields=fields, mask=_nulls(array))


def _reshape_map(array: pa.MapArray, wanted: pa.MapType, leaf: _Leaf) -> pa.Array:
    first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
    keys = _reshape(array.keys.slice(first, last - first), wanted.key_type, leaf)
    items = _reshape(array.items.slice(first, last - first), wanted.item_type, leaf)
    offsets = pc.subtract(array.offsets, pa.scalar(first, pa.int32()))
    return pa.MapArray.from_arrays(offsets, keys, items, type=wanted, mask=_nulls(array))


def _to_fixed_size(array: pa.Array, wanted: pa.DataType, leaf: _Leaf) -> pa.Array:
    size = wanted.list_size
    lengths = pc.list_value_length(array)
    wrong = pc.fill_null(pc.not_equal(lengths, size), False)
    if pc.any(wrong).as_py():
        row = pc.index(wrong, True).as_py()
        raise _RefusedError(f"it has {lengths[row].as_py()} values, the vector has {size}", row)
    if array.null_count:
        # A null list has no items, but a null vector takes the space of all its items.
        array = pc.if_else(array.is_valid(), array, pa.scalar([None] * size, array.type))
    items = _reshape(array.flatten(), wanted.value_type, leaf)
    return pa.FixedSizeListArray.from_arrays(items, type=wanted, mask=_nulls(lengths))


def _exactly(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Convert from the table to Spark, whose type should hold every value; raises if one does not fit."""
    types = pa.types
    if types.is_time(array.type) and types.is_time(wanted):
        # Arrow cannot cast from 32 to 64 bits between all units.
        array = array.cast(pa.time64("us")) if array.type != pa.time64("ns") else array
    try:
        return array.cast(wanted)
    except pa.ArrowException as error:
        raise InvalidInputError(
            f"a value of type {array.type} does not fit Spark's {wanted}: {error}"
        ) from error


def _losslessly(array: pa.Array, wanted: pa.DataType, *, rounding: bool) -> pa.Array:
    if not _may_convert(array.type, wanted):
        raise _RefusedError(f"{array.type} does not fit the table's {wanted}; convert it with cast")
    try:
        return exactly(array, wanted, rounding=rounding)
    except CastRefusedError as error:
        value = "" if error.row is None else f"{array[error.row].as_py()!r} is not a value of "
        hint = "; the option roundFloats rounds" if not rounding and pa.types.is_floating(wanted) else ""
        raise _RefusedError(
            f"{value or f'{array.type} does not fit '}the table's {wanted}{hint}", error.row
        ) from None


def _may_convert(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether two types hold the same kind of value; other casts would invent values."""
    types = pa.types
    if types.is_timestamp(given) and types.is_timestamp(wanted):
        return (given.tz is None) == (wanted.tz is None)
    kinds: list[Callable[[pa.DataType], bool]] = [
        lambda t: types.is_integer(t) or types.is_decimal(t),
        types.is_floating,
        lambda t: types.is_string(t) or types.is_large_string(t) or types.is_string_view(t),
        _is_bytes,
        types.is_date,
        types.is_time,
        types.is_duration,
        types.is_boolean,
    ]
    return any(kind(given) and kind(wanted) for kind in kinds)


def _row_named(batch: pa.RecordBatch, key: Sequence[str], column: pa.Array, refusal: _RefusedError) -> str:
    """Text that names the key of the refused row; empty if the row is unknown, as for a value in a list."""
    names = [name for name in key if name in batch.schema.names]
    if refusal.row is None or refusal.row >= len(column) or not names:
        return ""
    shown = ", ".join(f"{name} = {batch.column(name)[refusal.row].as_py()!r}" for name in names)
    return f" of the row with {shown}"


def _same_children(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether nested names and nullability agree too; Arrow's equality ignores some of them."""
    if one.num_fields != other.num_fields:
        return False
    pairs = [(one.field(i), other.field(i)) for i in range(one.num_fields)]
    return all(
        a.name == b.name and a.nullable == b.nullable and _same_children(a.type, b.type) for a, b in pairs
    )


def _is_list(type_: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_))


def _is_bytes(type_: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(type_)
        or types.is_large_binary(type_)
        or types.is_binary_view(type_)
        or types.is_fixed_size_binary(type_)
    )


def _offsets(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """Offsets for the flattened items of ``array``; null lists have no items."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), type_)


def _nulls(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None
