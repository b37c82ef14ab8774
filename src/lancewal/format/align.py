"""Rows that were stored under an earlier version of a table's schema, converted to the current one.

Columns are matched by field id, nested ones included: a renamed column keeps its id, and a column
that was added later is missing in older rows and reads as nulls. In some cases Lance gives the id
of a dropped column to a new one. So rows carry the version of the table that they were written
for: if the field id was missing in any version since then, it now means another field. If the
version is not known, names decide: a stored name that the table's column never had means another field.

Lance never changes a column's type in a table with a WAL. So a field with the same id and another
type is either a later field, added when the id was free, or damage; rows without a key are damage
too. Damaged rows are refused: read as nulls, they would be lost for good at the next compaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import pyarrow as pa

from lancewal.errors import ColumnMismatchError, InvalidInputError
from lancewal.format.kinds import is_list
from lancewal.format.schema import (
    FIELD_ID_KEY,
    TOMBSTONE,
    TableSchema,
    field_id,
    holds_encoded_json,
    is_blob,
    is_json,
    map_children,
)
from lancewal.format.values import Convert, changed, decode_json, encode_json, with_items

_OLDEST_VERSION = 1

_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)


@dataclass(frozen=True)
class ColumnSource:
    """Where one wanted column comes from: a stored column, converted if needed, or ``None`` for nulls."""

    field: pa.Field
    stored_name: str | None
    convert: Convert | None

    @property
    def is_same(self) -> bool:
        """Whether the stored column is the wanted one, name included."""
        return self.stored_name == self.field.name and self.convert is None

    def array(self, rows: pa.RecordBatch | pa.Table) -> pa.Array | pa.ChunkedArray:
        """The wanted column of ``rows``, which have the stored columns."""
        if self.stored_name is None:
            return pa.nulls(rows.num_rows, self.field.type)
        column = rows.column(self.stored_name)
        if self.convert is None:
            return column
        if isinstance(column, pa.ChunkedArray):
            return pa.chunked_array([self.convert(chunk) for chunk in column.chunks], self.field.type)
        return self.convert(column)


def column_sources(
    stored: pa.Schema, schema: TableSchema, written_for: int | None, *, as_stored: bool = False
) -> Mapping[str, ColumnSource]:
    """For every column of ``schema``, where it comes from in rows with the columns ``stored``.

    ``written_for`` is the version of the table that had these columns, ``None`` if it is not
    known. Columns are matched by name only when no stored field has an id, as in entries of old
    writers. ``as_stored`` asks for the columns in the form of MemTables; otherwise they come as the
    table shows them.

    Raises :class:`ColumnMismatchError` for columns that cannot be the table's.
    """
    wanted = [field for field in (schema.stored if as_stored else schema.columns) if field.name != TOMBSTONE]
    columns = [field for field in stored if field.name != TOMBSTONE]
    matching = _Matching(schema, written_for)
    if all(field_id(field) < 0 for field in columns):
        by_name = {field.name: field for field in columns}
        sources = {field.name: matching.named(by_name.get(field.name), field) for field in wanted}
    else:
        if replaced := schema.replaced_since(written_for):
            columns = [_without_replaced_ids(field, replaced) for field in columns]
        by_id = {field_id(field): field for field in columns}
        sources = {
            # Blobs are not read here: a request for one is refused by its name.
            field.name: ColumnSource(field, None, None)
            if is_blob(field)
            else matching.numbered(by_id.get(field_id(field)), field)
            for field in wanted
        }
    for name in schema.primary_key:
        if sources[name].stored_name is None:
            raise ColumnMismatchError(f"there is no key column {name!r}, only {', '.join(stored.names)}")
    return sources


@dataclass(frozen=True)
class Alignment:
    """How every column that a table shows is made from the columns of stored rows."""

    sources: Mapping[str, ColumnSource]
    stored_names: frozenset[str]
    #: Columns that are blobs in the stored rows: a scan would show their positions instead of their values.
    stored_blobs: frozenset[str] = frozenset()

    @classmethod
    def of(cls, schema: TableSchema, stored: pa.Schema, written_for: int | None) -> Alignment:
        """From the columns ``stored``, annotated with their field ids, to those that ``schema`` shows.

        ``written_for`` is the version of the table that had the stored columns; ``None`` if it is not known.
        """
        sources = column_sources(stored, schema, written_for)
        shown = {field.name: replace(sources[field.name], field=field) for field in schema.plain}
        ids = {field_id(field) for field in stored if is_blob(field)}
        blobs = frozenset(name for name in schema.blob_columns if schema.field_ids[name] in ids)
        return cls(shown, frozenset(stored.names) - {TOMBSTONE}, blobs)

    @classmethod
    def between(cls, written: TableSchema, shown: TableSchema) -> Alignment | None:
        """From the rows of a MemTable to those that ``shown`` shows; ``None`` if they are the same."""
        if shown.shows_as_stored:
            if written.columns is shown.columns and written.version == shown.version:
                return None
            equal = written.columns.equals(shown.columns, check_metadata=True)
            if equal and not shown.replaced_since(written.version):
                return None
        return cls.of(shown, written.stored, written.version)

    @cached_property
    def is_exact(self) -> bool:
        """Whether the stored rows have the shown columns, and no others."""
        return len(self.sources) == len(self.stored_names) and all(s.is_same for s in self.sources.values())

    def select(self, columns: Sequence[str]) -> list[ColumnSource]:
        """The sources of ``columns``; refuses columns that cannot be read."""
        unknown = [name for name in columns if name not in self.sources]
        if unknown:
            raise InvalidInputError(f"no such columns: {unknown}; the table has {list(self.sources)}")
        blobs = [name for name in columns if name in self.stored_blobs]
        if blobs:
            raise InvalidInputError(
                f"an SSTable holds values of the blob column {', '.join(blobs)}, which lancewal cannot "
                "read or compact yet; compact it with the tool that wrote it"
            )
        return [self.sources[name] for name in columns]

    def differing(self, columns: Iterable[str]) -> list[ColumnSource]:
        """The sources of ``columns``, unless the stored rows have all of them under their names."""
        used = [] if self.is_exact else self.select(sorted(columns))
        return [] if all(source.is_same for source in used) else used


def stored_names(chosen: Iterable[ColumnSource]) -> list[str]:
    """The stored columns that are needed for some sources."""
    return list(dict.fromkeys(source.stored_name for source in chosen if source.stored_name is not None))


def as_shown(stored: _Rows, chosen: Sequence[ColumnSource]) -> _Rows:
    """The columns of some sources, made from stored rows."""
    if not chosen:
        return stored.select([])
    schema = pa.schema([source.field for source in chosen])
    return type(stored).from_arrays([source.array(stored) for source in chosen], schema=schema)


def align(batch: pa.RecordBatch, schema: TableSchema, written_for: int | None = None) -> pa.RecordBatch:
    """``batch`` as ``schema.stored``: columns matched by field id, tombstone last.

    A missing column reads as nulls, a missing tombstone as "live". ``written_for`` is the
    version of the table that had the batch's columns, ``None`` if it is not known.

    >>> wanted = pa.field("id", pa.int64(), metadata={"lance:field_id": "0"})
    >>> older = wanted.with_name("number")
    >>> rows = pa.record_batch([pa.array([7])], schema=pa.schema([older]))
    >>> align(rows, TableSchema(pa.schema([wanted]), ())).to_pydict()
    {'id': [7], '_tombstone': [False]}
    """
    if batch.schema.equals(schema.stored, check_metadata=True) and not schema.replaced_since(written_for):
        return batch
    sources = column_sources(batch.schema, schema, written_for, as_stored=True)
    arrays = [sources[name].array(batch) for name in schema.names]
    return pa.RecordBatch.from_arrays([*arrays, _tombstones(batch)], schema=schema.stored)


def shown(rows: pa.Table, schema: TableSchema) -> pa.Table:
    """``rows`` in ``schema.stored``, with their columns as the table shows them, tombstone last."""
    if schema.shows_as_stored:
        return rows
    sources = column_sources(schema.stored, schema, schema.version)
    columns = [sources[name].array(rows) for name in schema.names]
    return pa.Table.from_arrays([*columns, rows.column(TOMBSTONE)], [*schema.names, TOMBSTONE])


def _tombstones(batch: pa.RecordBatch) -> pa.Array:
    if TOMBSTONE in batch.schema.names:
        marks = batch.column(TOMBSTONE)
        if marks.type != pa.bool_() or marks.null_count:
            raise ColumnMismatchError(
                f"the column {TOMBSTONE} is {marks.type}, or null; it says true or false"
            )
        return marks
    return pa.array(np.zeros(batch.num_rows, np.bool_))


@dataclass(frozen=True)
class _Matching:
    """Compares stored fields with the wanted fields of the same id, or of the same name."""

    schema: TableSchema
    written_for: int | None

    def named(self, stored: pa.Field | None, wanted: pa.Field) -> ColumnSource:
        if stored is None:
            return ColumnSource(wanted, None, None)
        if not _is_same_field(stored, wanted):
            raise _mismatch(stored, wanted)
        return ColumnSource(wanted, stored.name, self._conversion(stored, wanted))

    def numbered(self, stored: pa.Field | None, wanted: pa.Field) -> ColumnSource:
        if stored is None or self._had_other_name(stored, wanted) or self._is_other_field(stored, wanted):
            return ColumnSource(wanted, None, None)
        return ColumnSource(wanted, stored.name, self._conversion(stored, wanted))

    def _had_other_name(self, stored: pa.Field, wanted: pa.Field) -> bool:
        """Whether the wanted column never had the stored name; checked only if the version is not known."""
        identity = self.schema.identity
        if stored.name == wanted.name or identity is None or self.written_for is not None:
            return False
        return not identity.was_called(field_id(wanted), stored.name)

    def _is_other_field(self, stored: pa.Field, wanted: pa.Field) -> bool:
        """Whether a field with the same id and another type is a different field; refuses damage."""
        if _is_same_field(stored, wanted):
            return False
        unknown = self.written_for is None
        if unknown and field_id(wanted) in self.schema.replaced_since(_OLDEST_VERSION):
            return True
        raise _mismatch(stored, wanted)

    def _conversion(self, stored: pa.Field, wanted: pa.Field) -> Convert | None:
        """Converts arrays of ``stored`` to ``wanted``; ``None`` when there is nothing to convert."""
        if is_json(stored.type) != is_json(wanted.type):
            return encode_json if is_json(stored.type) else decode_json
        if _fits(stored.type, wanted.type):
            return None
        if pa.types.is_struct(wanted.type):
            return self._struct_conversion(stored.type, wanted.type)
        items = self._conversion(stored.type.value_field, wanted.type.value_field)
        return lambda array: with_items(array, wanted.type, items)

    def _struct_conversion(self, stored: pa.DataType, wanted: pa.DataType) -> Convert:
        places = {field_id(child): place for place, child in enumerate(_children(stored))}
        fields = _children(wanted)
        found = [self._child(stored, places.get(field_id(field)), field) for field in fields]

        def convert(array: pa.Array) -> pa.Array:
            children = [child(array) for child in found]
            return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())

        return convert

    def _child(self, stored: pa.DataType, place: int | None, wanted: pa.Field) -> Convert:
        """Takes one wanted field, which is at ``place`` or missing, out of arrays of a struct."""
        if place is None or self._is_other_field(stored.field(place), wanted):
            return lambda array: pa.nulls(len(array), wanted.type)
        change = self._conversion(stored.field(place), wanted)
        # ``field`` applies the array's offset, but not its nulls: those go into the new struct's mask.
        return lambda array: changed(array.field(place), change)


def _mismatch(stored: pa.Field, wanted: pa.Field) -> ColumnMismatchError:
    return ColumnMismatchError(
        f"column {stored.name!r} (field id {field_id(stored)}) is stored as {stored.type}, the table has it "
        f"as {wanted.name!r} of type {wanted.type}"
    )


def _without_replaced_ids(stored: pa.Field, replaced: frozenset[int]) -> pa.Field:
    """``stored`` without the field ids, nested ones included, that mean something else now."""
    stored = stored.with_type(map_children(stored.type, lambda child: _without_replaced_ids(child, replaced)))
    if field_id(stored) not in replaced:
        return stored
    return stored.with_metadata({k: v for k, v in stored.metadata.items() if k != FIELD_ID_KEY} or None)


def _is_same_field(stored: pa.Field, wanted: pa.Field) -> bool:
    """Whether two fields with one id are the same field: equal types, apart from a struct's children."""
    old, new = stored.type, wanted.type
    if is_json(old) or is_json(new):
        return _holds_json(stored) and _holds_json(wanted)
    if old.id != new.id:
        return False
    if pa.types.is_struct(new):
        return True
    if not is_list(new):
        return bool(old == new)
    same_size = getattr(old, "list_size", None) == getattr(new, "list_size", None)
    return same_size and _is_same_field(old.value_field, new.value_field)


def _holds_json(field: pa.Field) -> bool:
    return is_json(field.type) or holds_encoded_json(field)


def _fits(stored: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether types, nested names and nested ids are all equal."""
    if stored != wanted:
        return False
    pairs = zip(_children(stored), _children(wanted), strict=True)
    return all(field_id(old) == field_id(new) and _fits(old.type, new.type) for old, new in pairs)


def _children(type_: pa.DataType) -> list[pa.Field]:
    return [type_.field(i) for i in range(type_.num_fields)]
