"""An SSTable's columns as the columns of the table's current schema, matched by field id.

A renamed column keeps its id, one that was added later is missing here and reads as
nulls, and a name that was dropped and used again belongs to another id. Lance gives
the id of a dropped column to a later one in some cases; a field whose type differs is
therefore not the same field, and the tombstone column is never another column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format.schema import TOMBSTONE, TableSchema, field_id

#: Makes an array of the wanted type from the stored one.
_Convert = Callable[[pa.Array], pa.Array]


@dataclass(frozen=True)
class ColumnFit:
    """One wanted column: where it is stored (``None``: nowhere), and how its arrays are reshaped."""

    field: pa.Field
    source: str | None
    convert: _Convert | None

    @property
    def is_same(self) -> bool:
        """Whether the stored column is the wanted one, name included."""
        return self.source == self.field.name and self.convert is None

    def array(self, stored: pa.RecordBatch | pa.Table) -> pa.Array | pa.ChunkedArray:
        if self.source is None:
            return pa.nulls(stored.num_rows, self.field.type)
        column = stored.column(self.source)
        if self.convert is None:
            return column
        if isinstance(column, pa.ChunkedArray):
            return pa.chunked_array([self.convert(chunk) for chunk in column.chunks], self.field.type)
        return self.convert(column)


@dataclass(frozen=True)
class Alignment:
    """How every column of a table's current schema is made from an SSTable's."""

    fits: Mapping[str, ColumnFit]
    stored_names: frozenset[str]

    @classmethod
    def of(cls, schema: TableSchema, stored: pa.Schema) -> Alignment:
        """``stored`` holds the SSTable's columns, annotated with their field ids."""
        by_id = {field_id(field): field for field in stored if field.name != TOMBSTONE}
        fits = {
            plain.name: _column_fit(wanted, plain, by_id.get(field_id(wanted)))
            for wanted, plain in zip(schema.columns, schema.plain, strict=True)
        }
        return cls(fits, frozenset(stored.names) - {TOMBSTONE})

    @cached_property
    def is_exact(self) -> bool:
        """Whether the SSTable has the current schema's columns, and no others."""
        return len(self.fits) == len(self.stored_names) and all(fit.is_same for fit in self.fits.values())

    def select(self, columns: Sequence[str]) -> list[ColumnFit]:
        unknown = [name for name in columns if name not in self.fits]
        if unknown:
            raise InvalidInputError(f"no such columns: {unknown}; the table has {list(self.fits)}")
        return [self.fits[name] for name in columns]


def _column_fit(wanted: pa.Field, plain: pa.Field, stored: pa.Field | None) -> ColumnFit:
    if stored is None or not _pairs(stored, wanted):
        return ColumnFit(plain, None, None)
    convert = None if _is_same(stored, wanted) else _reshape(stored, wanted, plain)
    return ColumnFit(plain, stored.name, convert)


def _children(type_: pa.DataType) -> Iterator[pa.Field]:
    return (type_.field(i) for i in range(type_.num_fields))


def _is_same(stored: pa.Field, wanted: pa.Field) -> bool:
    """Whether types, nested names and nested ids are all equal."""
    if stored.type != wanted.type:
        return False
    pairs = zip(_children(stored.type), _children(wanted.type), strict=True)
    return all(field_id(old) == field_id(new) and _is_same(old, new) for old, new in pairs)


def _pairs(stored: pa.Field, wanted: pa.Field) -> bool:
    """Whether two fields of one id are the same field: same type, apart from a struct's children."""
    old, new = stored.type, wanted.type
    if pa.types.is_struct(old) or pa.types.is_struct(new):
        return bool(pa.types.is_struct(old) and pa.types.is_struct(new))
    if not _is_list(new):
        return bool(old == new)
    if old.id != new.id or getattr(old, "list_size", 0) != getattr(new, "list_size", 0):
        return False
    return _pairs(old.value_field, new.value_field)


def _is_list(type_: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
    )


def _reshape(stored: pa.Field, wanted: pa.Field, plain: pa.Field) -> _Convert:
    """From ``stored`` to ``wanted``, whose type without ids is ``plain``'s."""
    if _is_same(stored, wanted):
        return _unchanged
    if pa.types.is_struct(wanted.type):
        return _reshape_struct(stored, wanted, plain.type)
    items = _reshape(stored.type.value_field, wanted.type.value_field, plain.type.value_field)
    return lambda array: _with_items(array, items, plain.type)


def _unchanged(array: pa.Array) -> pa.Array:
    return array


def _reshape_struct(stored: pa.Field, wanted: pa.Field, type_: pa.DataType) -> _Convert:
    places = {field_id(child): i for i, child in enumerate(_children(stored.type))}
    plan: list[tuple[int | None, _Convert]] = []
    for child, plain in zip(_children(wanted.type), _children(type_), strict=True):
        place = places.get(field_id(child))
        old = None if place is None else stored.type.field(place)
        if old is None or not _pairs(old, child):
            plan.append((None, _unchanged))
        else:
            plan.append((place, _reshape(old, child, plain)))

    def convert(array: pa.Array) -> pa.Array:
        children = [
            pa.nulls(len(array), field.type) if place is None else change(array.field(place))
            for (place, change), field in zip(plan, _children(type_), strict=True)
        ]
        return pa.StructArray.from_arrays(children, fields=list(_children(type_)), mask=array.is_null())

    return convert


def _with_items(array: pa.Array, change: _Convert, type_: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_list(type_):
        size = type_.list_size
        items = change(array.values.slice(array.offset * size, len(array) * size))
        return pa.FixedSizeListArray.from_arrays(items, type=type_, mask=array.is_null())
    kind = pa.LargeListArray if pa.types.is_large_list(type_) else pa.ListArray
    # A null list's offsets are those of an empty one or of items that nobody reads.
    first = array.offsets[0].as_py()
    offsets = pa.compute.subtract(array.offsets, array.offsets[0])
    items = change(array.values.slice(first, array.offsets[-1].as_py() - first))
    return kind.from_arrays(offsets, items, type=type_, mask=array.is_null())
