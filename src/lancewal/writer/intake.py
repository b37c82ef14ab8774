"""Checks a caller's data and converts it to batches in the table's stored form, or refuses it.

Everything is checked here, before anything is written: a refused batch has no effect anywhere,
and an accepted batch cannot fail later at flush.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from lancewal.errors import InvalidInputError, LanceWalError
from lancewal.format import (
    TOMBSTONE,
    CastRefusedError,
    TableSchema,
    align,
    aligned,
    column_sources,
    encode_new_json,
    exactly,
    from_python,
    has_dictionary,
    has_floats,
    has_json,
    has_wide_values,
    in_place,
    is_json,
    is_text,
    same_kind,
    same_values,
    with_dictionary_in_place,
    without_field_ids,
    without_null_words,
)
from lancewal.index import IndexSpec
from lancewal.predicate import Predicate
from lancewal.sstable import check_storable, needs_present_structs, present_values, refuse_null_structs
from lancewal.writer.rows import as_batches, is_key_sequence, is_row, is_tabular, key_sequence

#: A slice keeps its whole parent in memory; if that wastes more than this, the slice is copied.
_SLICE_WASTE_BYTES = 64 * 1024

#: Text that conditions contain and keys rarely do.
_COMPARES = re.compile(r"[=<>]|\b(is|in|like|ilike|between)\b", re.IGNORECASE)

_Convert = Callable[[pa.Array], pa.Array]

#: How values of other types than the table's are converted. ``"numbers"``: numbers and times, if no value
#: changes. ``False``: not at all. ``"exact"`` or ``True``: also text that spells a number. ``"round"``: like
#: ``"exact"``, and floats are rounded to the table's precision.
Cast = bool | Literal["numbers", "exact", "round"]
_CASTS = (False, True, "numbers", "exact", "round")


@dataclass(frozen=True)
class _Plan:
    """How to convert the columns of one input schema to the table's columns; made once per schema."""

    schema: pa.Schema
    columns: list[tuple[int | None, _Convert | None, pa.Field]]

    @cached_property
    def as_given(self) -> bool:
        """Whether the columns already have the table's form and order."""
        return all(
            source == place and convert is None for place, (source, convert, _) in enumerate(self.columns)
        )

    def shaped(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """The columns of ``batch``, converted to the table's columns."""
        given = batch.columns
        if self.as_given:
            return given  # type: ignore[no-any-return]
        columns = []
        for source, convert, field in self.columns:
            if source is None:
                columns.append(pa.nulls(batch.num_rows, field.type))
            else:
                columns.append(given[source] if convert is None else convert(given[source]))
        return columns


class Rows(NamedTuple):
    """The accepted rows of one put; they stay together from here to the WAL."""

    batches: list[pa.RecordBatch]
    num_rows: int
    num_bytes: int
    #: The intake that still has to shape the rows, if any. Arrow releases the GIL while it shapes rows. So
    #: with many threads it is faster if the leader of a group commit shapes the rows of all puts in one go.
    unshaped: Intake | None = None

    @classmethod
    def of(cls, batches: list[pa.RecordBatch], unshaped: Intake | None = None) -> Rows:
        num_rows = num_bytes = 0
        for batch in batches:
            num_rows += batch.num_rows
            num_bytes += batch.get_total_buffer_size()
        return Rows(batches, num_rows, num_bytes, unshaped)


class Intake:
    """Checks rows against one table and converts them to the form that its MemTables hold.

    Columns are matched by name; a nullable column that is missing is filled with nulls. Another physical form
    of the same values (large or view strings, large lists, dictionaries) is accepted, and so are numbers and
    times of another type if no value changes. ``cast`` can allow more or less than that.
    """

    def __init__(
        self,
        schema: TableSchema,
        *,
        cast: Cast = "numbers",
        storage_version: str | None = None,
        newest: Callable[[], TableSchema] | None = None,
    ) -> None:
        """``storage_version`` is the table's: the intake refuses values that its files cannot hold.

        ``newest`` reads the table's current columns. It distinguishes a column that was added later
        from one that does not exist.
        """
        if cast not in _CASTS:
            raise InvalidInputError(f'cast is {cast!r}; pass "numbers", False, True ("exact") or "round"')
        if storage_version is not None:
            check_storable(schema, storage_version)
        self.schema = schema
        self._storage_version = storage_version
        present = storage_version is not None and needs_present_structs(storage_version, schema.stored)
        self._version_without_null_structs = storage_version if present else None
        self._cast = cast
        self._newest = newest
        # Callers send the same schema over and over, but pyarrow makes a new object for every access.
        # So the last schema is compared by value.
        self._last_plan: _Plan | None = None
        self.plain = schema.plain
        self._stored = schema.stored
        self._key_plain = pa.schema([self.plain.field(name) for name in schema.primary_key])
        self._strict = [
            i for i, f in enumerate(schema.columns) if not f.nullable or f.name in schema.primary_key
        ]
        self._deep_checks = [i for i, f in enumerate(schema.columns) if _has_strict_child(f.type)]
        self._wide = [i for i, f in enumerate(schema.columns) if has_wide_values(f.type)]
        self._dictionaries = [i for i, f in enumerate(schema.columns) if has_dictionary(f.type)]
        self._looks_deep = bool(self._deep_checks or self._wide or self._dictionaries or present)
        self._least_row_bytes = sum(_least_bytes(field.type) for field in schema.columns)
        self._no_tombstones = _false(1)

    @property
    def casts(self) -> bool:
        """Whether values of other kinds are converted, such as text to numbers."""
        return self._cast in (True, "exact", "round")

    def casting(self, cast: Cast) -> Intake:
        """A copy of this intake with another ``cast``."""
        return Intake(self.schema, cast=cast, storage_version=self._storage_version, newest=self._newest)

    def upserts(self, data: Any) -> Rows:
        """``data`` as rows to write, with the columns of ``schema.stored``."""
        return self.shaped(self.batches(data))

    def batches(self, data: Any) -> list[pa.RecordBatch]:
        """``data`` of any supported form as Arrow batches. Arrow data is not checked here."""
        if isinstance(data, pa.RecordBatch):
            return [data]
        if isinstance(data, pa.Table):
            return list(data.to_batches())
        return as_batches(data, self.plain, casts=self.casts)

    def shaped(self, batches: Sequence[pa.RecordBatch]) -> Rows:
        """``batches`` as rows to write, with the columns of ``schema.stored``."""
        if not batches:
            raise InvalidInputError("cannot write an empty batch list; pass at least one batch")
        return Rows.of([self._upsert(batch, index) for index, batch in enumerate(batches)])

    def fit_as_given(self, batches: Sequence[pa.RecordBatch]) -> bool:
        """Whether :meth:`shaped` accepts these batches without conversion, so it is fast and cannot refuse.

        Returns ``False`` for the first rows of a schema, because there is no plan for it yet.
        """
        plan = self._last_plan
        if plan is None or not plan.as_given or self._looks_deep:
            return False
        for batch in batches:
            if not batch.num_rows or not batch.schema.equals(plan.schema):
                return False
            for position in self._strict:
                if batch.column(position).null_count:
                    return False
        return bool(batches)

    def refuse_newer_columns(self) -> None:
        """Raise if the table's columns have changed since this writer was opened.

        An update reads rows and writes them back whole, so it would empty columns that this writer
        does not know.
        """
        newest = None if self._newest is None else self._newest().columns
        if newest is not None and not newest.equals(self.schema.columns, check_metadata=True):
            raise InvalidInputError(
                "the table's columns have changed since this writer was opened, and it would empty those "
                "that it does not know; close it and open another one"
            )

    def deletes(self, keys: Any) -> Rows:
        """Tombstones for ``keys``: one value, a list of values, or Arrow data with the key columns."""
        if not self.schema.primary_key:
            raise InvalidInputError(
                "this table has no primary key, so rows cannot be deleted through the WAL; "
                "delete from the base table with lance.LanceDataset.delete"
            )
        if isinstance(keys, str) and is_condition(keys, self.schema.plain):
            raise InvalidInputError(
                f"delete takes keys, and {keys!r} is a condition; delete what matches it with "
                "delete(where=…), or pass a list where it really is a key"
            )
        batches = [self._tombstones(batch, index) for index, batch in enumerate(self.key_batches(keys))]
        if not batches:
            raise InvalidInputError("cannot delete an empty list of keys; pass at least one key")
        return Rows.of(batches)

    def key_batches(self, keys: Any) -> list[pa.RecordBatch]:
        """``keys`` as batches of exactly the key columns, in key order, checked."""
        names = self.schema.primary_key
        if is_tabular(keys) or is_row(keys):
            batches = as_batches(keys, self._key_plain, casts=self.casts)
        else:
            if len(names) != 1:
                raise InvalidInputError(
                    f"the key has the columns {', '.join(names)}; pass a table with these columns"
                )
            one = keys[()] if isinstance(keys, np.ndarray) and not keys.ndim else keys
            values = key_sequence(keys) if is_key_sequence(keys) else [one]
            batches = [self._key_batch(values)] if len(values) else []
        return [self._only_keys(batch, index) for index, batch in enumerate(batches)]

    def _key_batch(self, values: Any) -> pa.RecordBatch:
        key = self._key_plain.field(0)
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        if not isinstance(values, pa.Array):
            try:
                values = from_python(values, key.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise InvalidInputError(f"keys are not of type {key.type}: {error}") from None
        return pa.RecordBatch.from_arrays([values], names=[key.name])

    def _only_keys(self, batch: pa.RecordBatch, index: int) -> pa.RecordBatch:
        batch = in_place(batch)
        columns = []
        for field in self._key_plain:
            position = batch.schema.get_field_index(field.name)
            if position < 0:
                raise InvalidInputError(f"batch {index} lacks the key column {field.name}")
            convert = self._conversion(batch.schema.field(position), field)
            column = batch.column(position)
            columns.append(convert(column) if convert else column)
            self._refuse_nulls(columns[-1], field.name, index)
        return pa.RecordBatch.from_arrays(columns, schema=self._key_plain)

    def _upsert(self, batch: pa.RecordBatch, index: int) -> pa.RecordBatch:
        rows = batch.num_rows
        if rows == 0:
            raise InvalidInputError(f"batch {index} is empty; leave it out")
        batch = in_place(batch)
        plan, schema = self._last_plan, batch.schema
        if plan is None or not schema.equals(plan.schema):
            plan = self._last_plan = self._plan(schema)
        columns = plan.shaped(batch)
        for position in self._dictionaries:
            column = without_null_words(columns[position])
            if isinstance(column, pa.DictionaryArray):
                column = with_dictionary_in_place(column)
            columns[position] = column
        for position in self._strict:
            if columns[position].null_count:
                self._refuse_nulls(columns[position], self.schema.columns.field(position).name, index)
        for position in self._deep_checks:
            _refuse_nested_nulls(columns[position], self.schema.columns.field(position), index)
        for position in self._wide:
            columns[position] = aligned(columns[position])
        live = self._no_tombstones
        if len(live) != rows:
            live = self._no_tombstones = _false(rows)
        columns.append(live)
        stored = pa.RecordBatch.from_arrays(columns, schema=self._stored)
        if self._version_without_null_structs is not None:
            refuse_null_structs(stored, self._version_without_null_structs)
        return self._compact(stored)

    def _tombstones(self, keys: pa.RecordBatch, index: int) -> pa.RecordBatch:
        if keys.num_rows == 0:
            raise InvalidInputError(f"batch {index} of keys is empty; leave it out")
        columns = [
            keys.column(field.name)
            if field.name in self.schema.primary_key
            else self._nothing(field, keys.num_rows)
            for field in self._stored
            if field.name != TOMBSTONE
        ]
        for position in self._wide:
            columns[position] = aligned(columns[position])
        columns.append(pa.array([True] * keys.num_rows, pa.bool_()))
        return self._compact(pa.RecordBatch.from_arrays(columns, schema=self._stored))

    def _nothing(self, field: pa.Field, rows: int) -> pa.Array:
        """The values of a tombstone in a column that is not part of the key."""
        version = self._version_without_null_structs
        return pa.nulls(rows, field.type) if version is None else present_values(field, version, rows)

    def _compact(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Copy a narrow slice, so that it does not keep its parent in memory."""
        held = batch.get_total_buffer_size()
        # nbytes is slow to compute, so a lower bound of the size is tried first.
        if held <= 2 * self._least_row_bytes * batch.num_rows + _SLICE_WASTE_BYTES:
            return batch
        if held <= 2 * batch.nbytes + _SLICE_WASTE_BYTES:
            return batch
        return pa.ipc.read_record_batch(batch.serialize(), batch.schema)

    def _plan(self, schema: pa.Schema) -> _Plan:
        names = schema.names
        if len(set(names)) != len(names):
            raise InvalidInputError(f"the data has a column name twice: {', '.join(names)}")
        unknown = [name for name in names if name not in self.schema.field_ids]
        if unknown:
            raise self._unknown_columns(unknown)
        columns: list[tuple[int | None, _Convert | None, pa.Field]] = []
        for field in self.plain:
            position = schema.get_field_index(field.name)
            if position < 0 and not field.nullable:
                raise InvalidInputError(f"column {field.name} is missing and cannot be null; add it")
            stored = self._stored.field(field.name)
            if position < 0:
                columns.append((None, None, stored))
            else:
                columns.append((position, self._conversion(schema.field(position), field), stored))
        return _Plan(schema, columns)

    def _unknown_columns(self, names: Sequence[str]) -> InvalidInputError:
        shown = ", ".join(names)
        if self._newest is not None:
            with suppress(LanceWalError):
                present = self._newest().field_ids
                if all(name in present for name in names):
                    return InvalidInputError(
                        f"the table got the column {shown} after this writer was opened; close it and open "
                        "a new one"
                    )
        return InvalidInputError(
            f"the table has no column {shown}; its columns are {', '.join(self.schema.names)}. Leave it out, "
            "or add it to the table and open a new writer"
        )

    def _conversion(self, given: pa.Field, wanted: pa.Field) -> _Convert | None:
        if has_json(wanted.type):
            return self._json_conversion(given, wanted)
        annotated = self.schema.columns.field(wanted.name).type
        if given.type.equals(annotated):
            return None
        if same_values(without_field_ids(given).type, wanted.type):
            return _reformer(annotated, wanted.name)
        numbers = self._cast == "numbers"
        if self._cast and (not numbers or same_kind(given.type, wanted.type)):
            return _caster(annotated, wanted.name, rounding=self._cast == "round")
        more = "cast=True, which also takes numbers from text" if numbers else 'cast="numbers"'
        raise InvalidInputError(
            f"column {wanted.name} is {given.type}, the table has {wanted.type}; convert it, "
            f"or open the writer with {more}"
        )

    def _json_conversion(self, given: pa.Field, wanted: pa.Field) -> _Convert:
        """The conversion of text or Arrow's JSON to the form that the table's MemTables hold."""
        if is_json(wanted.type) and (is_text(given.type) or is_json(given.type)):
            return encode_new_json
        if not same_values(without_field_ids(given).type, wanted.type):
            raise InvalidInputError(
                f"column {wanted.name} is {given.type}, the table has {wanted.type}; "
                "pass JSON as text or in Arrow's JSON type"
            )
        annotated = self.schema.columns.field(wanted.name).type
        cast = None if given.type.equals(annotated) else _reformer(annotated, wanted.name)
        own = column_sources(self.schema.columns, self.schema, self.schema.version, as_stored=True)
        encode = own[wanted.name].convert
        assert encode is not None, "JSON is stored in another form than shown"
        return lambda column: encode(column if cast is None else cast(column))

    def _refuse_nulls(self, column: pa.Array, name: str, index: int) -> None:
        if column.null_count:
            what = "key column" if name in self.schema.primary_key else "column"
            row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            raise InvalidInputError(
                f"batch {index} has {column.null_count} nulls in {what} {name}, which cannot be null, the "
                f"first in row {row}; give it a value, or leave the row out"
            )


def is_condition(text: str, schema: pa.Schema) -> bool:
    """Whether a text is an SQL condition on columns of ``schema``.

    >>> is_condition("name = 'x'", pa.schema({"name": pa.string()})), is_condition("a = b", pa.schema({}))
    (True, False)
    """
    if _COMPARES.search(text) is None:
        return False
    try:
        return bool(Predicate.parse(text, schema).columns)
    except InvalidInputError:
        return False


def _false(rows: int) -> pa.Array:
    return pa.Array.from_buffers(pa.bool_(), rows, [None, pa.py_buffer(bytes((rows + 7) // 8))])


def _least_bytes(type_: pa.DataType) -> int:
    """The least bytes that a value of a type takes; 0 if that depends on the value."""
    if pa.types.is_fixed_size_list(type_):
        return int(type_.list_size * _least_bytes(type_.value_type))
    return int(type_.bit_width // 8) if pa.types.is_primitive(type_) else 0


def _reformer(target: pa.DataType, name: str) -> _Convert:
    """A conversion to another physical form of the same values."""

    def convert(column: pa.Array) -> pa.Array:
        try:
            return column.cast(target, safe=True)
        except pa.ArrowException as error:
            raise InvalidInputError(f"column {name} cannot be converted to {target}: {error}") from None

    return convert


def _caster(target: pa.DataType, name: str, *, rounding: bool) -> _Convert:
    def convert(column: pa.Array) -> pa.Array:
        try:
            return exactly(column, target, rounding=rounding)
        except CastRefusedError as error:
            rounds = not rounding and has_floats(target)
            hint = "; change the value" + (', or open the writer with cast="round"' if rounds else "")
            raise InvalidInputError(f"column {name} cannot be converted to {target}: {error}{hint}") from None

    return convert


def _has_strict_child(type_: pa.DataType) -> bool:
    children = [type_.field(i) for i in range(type_.num_fields)]
    return any(not child.nullable or _has_strict_child(child.type) for child in children)


def _refuse_nested_nulls(column: pa.Array, field: pa.Field, index: int, path: str = "") -> None:
    """Refuse nulls in nested fields that cannot be null; nulls under a null parent do not count."""
    path = f"{path}.{field.name}" if path else field.name
    if pa.types.is_map(field.type):
        # Arrow can take a map apart only as a list of pairs.
        field = field.with_type(pa.list_(field.type.field(0)))
        column = column.cast(field.type)
    for position in range(field.type.num_fields):
        child = field.type.field(position)
        values = (
            column.flatten() if not pa.types.is_struct(field.type) else column.drop_null().field(position)
        )
        if not child.nullable and values.null_count:
            raise InvalidInputError(f"batch {index} has nulls in {path}.{child.name}, which cannot be null")
        _refuse_nested_nulls(values, child, index, path)


@dataclass(frozen=True)
class Adapter:
    """Converts rows with the columns of an older table ``version`` to rows of ``schema``.

    A writer that was opened before the table's columns changed may claim a shard whose log has rows
    with columns that this writer does not know. If it loaded them with its own columns, the values of
    the new columns would be lost. So it keeps all rows with the newest columns, including its own puts.
    """

    schema: TableSchema
    version: int

    def adapted(self, rows: Rows) -> Rows:
        return Rows.of([align(batch, self.schema, self.version) for batch in rows.batches])

    def indexes(self, specs: Sequence[IndexSpec]) -> list[IndexSpec]:
        """The ``specs`` whose columns still exist, with the current column names."""
        gone = self.schema.replaced_since(self.version)
        names = {number: name for name, number in self.schema.field_ids.items() if number not in gone}
        return [replace(spec, column=names[spec.field_id]) for spec in specs if spec.field_id in names]
