"""An SSTable's columns: their field ids, how they become the table's, and what files can hold."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.fragment import DataFile, FragmentMetadata, write_fragments
from lance.lance import LanceSchema

from lancewal.base import lance_errors
from lancewal.errors import InvalidInputError, StorageError
from lancewal.format import (
    TOMBSTONE,
    TOMBSTONE_FIELD,
    ColumnSource,
    FieldMessage,
    TableSchema,
    column_sources,
    field_id,
    is_blob,
    without_field_ids,
)
from lancewal.storage import Shelf

# Structs that Lance's files cannot hold as null, and what stands there where a row has no values.
#
# File version 2.0 cannot say that a struct is null. A packed struct has no nulls in it, in any
# version, nor has a struct without fields. Lance refuses such rows when it writes the file, which is
# when a MemTable is flushed: too late for the caller. So they are refused on the way in. A
# tombstone has no values but its key, and nobody reads others: it gets some.


_VERSIONS_WITHOUT_NULL_STRUCTS = frozenset(["2.0"])
_PACKED_KEYS = (b"packed", b"lance-encoding:packed")


def cannot_be_null(field: pa.Field, storage_version: str) -> bool:
    """Whether a file of this version cannot hold a null in a column of this kind.

    >>> place = pa.field("place", pa.struct([("x", pa.int32())]))
    >>> cannot_be_null(place, "2.0"), cannot_be_null(place, "2.1")
    (True, False)
    """
    if not pa.types.is_struct(field.type):
        return False
    children = _children(field)
    if storage_version in _VERSIONS_WITHOUT_NULL_STRUCTS or is_packed(field) or not children:
        return True
    return any(cannot_be_null(child, storage_version) for child in children)


def is_packed(field: pa.Field) -> bool:
    """Whether Lance is told to store a struct's fields side by side."""
    marks = field.metadata or {}
    return any(marks.get(key, b"").lower() == b"true" for key in _PACKED_KEYS)


def needs_present_structs(storage_version: str, schema: pa.Schema) -> bool:
    """Whether rows of ``schema`` may have structs that the file version cannot hold."""
    return any(_holds_such(field, storage_version) for field in schema)


def refuse_null_structs(batch: pa.RecordBatch, storage_version: str) -> None:
    """Refuses live rows that could not be flushed; call before they are written anywhere."""
    if not needs_present_structs(storage_version, batch.schema):
        return
    live = batch.filter(pc.invert(batch.column(TOMBSTONE))) if TOMBSTONE in batch.schema.names else batch
    for field, column in zip(live.schema, live.columns, strict=True):
        found = _null_in(column, field, storage_version)
        if found is not None:
            raise InvalidInputError(f"column {field.name!r} has {found}")


def present_values(field: pa.Field, storage_version: str, rows: int) -> pa.Array:
    """Values for rows that have none: nulls, where the column can hold them."""
    if not cannot_be_null(field, storage_version):
        return pa.nulls(rows, field.type)
    packed = is_packed(field)
    children = [
        present_values(child, storage_version, rows)
        if child.nullable and not packed
        else some_values(child.type, rows)
        for child in _children(field)
    ]
    return _struct(children, field.type, rows)


def with_present_dead_structs(batch: pa.RecordBatch, storage_version: str) -> pa.RecordBatch:
    """``batch`` with values where a tombstone has nulls that the file version cannot hold."""
    dead = np.asarray(batch.column(TOMBSTONE).to_numpy(zero_copy_only=False), np.bool_)
    if not dead.any():
        return batch
    columns = batch.columns
    for place, field in enumerate(batch.schema):
        if cannot_be_null(field, storage_version):
            # The last row of the two together is the one without values.
            both = pa.concat_arrays([columns[place], present_values(field, storage_version, 1)])
            columns[place] = both.take(pa.array(np.where(dead, len(dead), np.arange(len(dead)))))
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def without_dead_values(rows: pa.RecordBatch, key: Sequence[str]) -> pa.RecordBatch:
    """``rows`` with nulls in the tombstones' structs, whatever stands there in the file."""
    structs = [
        place for place, f in enumerate(rows.schema) if pa.types.is_struct(f.type) and f.name not in key
    ]
    marks = rows.column(TOMBSTONE)
    if not structs or not marks.true_count:
        return rows
    positions = pc.if_else(marks, None, pa.array(np.arange(rows.num_rows)))
    columns = rows.columns
    for place in structs:
        columns[place] = columns[place].take(positions)
    return pa.RecordBatch.from_arrays(columns, names=rows.schema.names)


def _holds_such(field: pa.Field, storage_version: str) -> bool:
    """Whether a column is a struct that cannot be null, or holds some below lists."""
    if pa.types.is_map(field.type):
        # Its pairs are structs that are never null.
        return False
    return cannot_be_null(field, storage_version) or any(
        _holds_such(child, storage_version) for child in _children(field)
    )


def _null_in(array: pa.Array, field: pa.Field, storage_version: str) -> str | None:
    """What a column holds that its file cannot; ``None`` for nothing."""
    if not _holds_such(field, storage_version):
        return None
    if not pa.types.is_struct(field.type):
        return _null_in(array.flatten(), field.type.field(0), storage_version)
    if array.null_count and cannot_be_null(field, storage_version):
        if is_packed(field) or not _children(field):
            return "a null struct, which Lance cannot store in a packed struct or one without fields"
        return (
            f"a null struct, which the table's file version {storage_version} cannot store; "
            "write a struct of nulls, or rewrite the table at version 2.1 or later"
        )
    for place, child in enumerate(_children(field)):
        values = array.field(place)
        if array.null_count:
            values = values.filter(array.is_valid())
        if is_packed(field) and values.null_count:
            return f"a null in {child.name!r}, which Lance cannot store in a packed struct"
        found = _null_in(values, child, storage_version)
        if found is not None:
            return found
    return None


def some_values(type_: pa.DataType, rows: int) -> pa.Array:
    """Rows of zeros, empty texts, and lists with one such item."""
    if isinstance(type_, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type_, some_values(type_.storage_type, rows))
    types = pa.types
    if types.is_struct(type_):
        return _struct([some_values(type_.field(i).type, rows) for i in range(type_.num_fields)], type_, rows)
    if types.is_fixed_size_list(type_):
        items = some_values(type_.value_type, rows * type_.list_size)
        return pa.FixedSizeListArray.from_arrays(items, type=type_)
    if types.is_list(type_) or types.is_large_list(type_) or types.is_map(type_):
        offsets = pa.array(range(rows + 1), pa.int64() if types.is_large_list(type_) else pa.int32())
        if types.is_map(type_):
            keys, items = (some_values(each, rows) for each in (type_.key_type, type_.item_type))
            return pa.MapArray.from_arrays(offsets, keys, items, type=type_)
        kind = pa.LargeListArray if types.is_large_list(type_) else pa.ListArray
        return kind.from_arrays(offsets, some_values(type_.value_type, rows), type=type_)
    if types.is_dictionary(type_):
        zeros = some_values(type_.index_type, rows)
        return pa.DictionaryArray.from_arrays(zeros, some_values(type_.value_type, 1), ordered=type_.ordered)
    if types.is_null(type_):
        return pa.nulls(rows)
    try:
        width = int(type_.bit_width)
    except ValueError:
        return pa.array([b""] * rows, pa.binary()).cast(type_)
    return pa.Array.from_buffers(type_, rows, [None, pa.py_buffer(bytes((rows * width + 7) // 8))])


def _struct(children: Sequence[pa.Array], type_: pa.DataType, rows: int) -> pa.Array:
    # ``from_arrays`` cannot tell how many rows a struct without fields has.
    return pa.Array.from_buffers(type_, rows, [None], children=list(children))


def _children(field: pa.Field) -> list[pa.Field]:
    return [field.type.field(place) for place in range(field.type.num_fields)]


_ROOT = -1


# One fragment, whatever it takes: row offsets are row addresses only in the first one.
# (Far larger limits make Lance's writer twice as slow.)
_ROWS_PER_FILE = 1 << 31


@dataclass(frozen=True)
class NumberedSchema:
    """An SSTable's columns as Lance takes them, and the field ids they must get.

    ``ids`` maps the number that Lance would give a field to the one it has in the base
    table. The tombstone column gets the next free one, as it does in Lance.
    """

    arrow: pa.Schema
    ids: Mapping[int, int]

    @classmethod
    def of(cls, schema: TableSchema) -> NumberedSchema:
        arrow = pa.schema([without_field_ids(field) for field in schema.stored])
        columns = LanceSchema.from_pyarrow(arrow).fields()
        ids: dict[int, int] = {}
        for lance_field, field in zip(columns[:-1], schema.columns, strict=True):
            for number, base_id in _numbered(lance_field, field):
                ids[number] = base_id if base_id >= 0 else max(ids.values(), default=_ROOT) + 1
        ids[columns[-1].id()] = max(ids.values(), default=_ROOT) + 1
        return cls(arrow, ids)

    @property
    def is_dense(self) -> bool:
        """Whether these are the ids that Lance gives by itself."""
        return all(number == base_id for number, base_id in self.ids.items())

    def lance_schema(self) -> LanceSchema:
        """The schema with its ids; pylance has no public way to say them but its pickle format."""
        reduced: Any = LanceSchema.from_pyarrow(self.arrow).__reduce__()
        restore, (metadata, *fields) = reduced
        renumbered: LanceSchema = restore(metadata, *map(self._renumbered, fields))
        return renumbered

    def _renumbered(self, raw: bytes) -> bytes:
        message = FieldMessage.FromString(raw)
        message.id = self.ids[message.id]
        if message.parent_id != _ROOT:
            message.parent_id = self.ids[message.parent_id]
        return bytes(message.SerializeToString())

    def renumber(self, fragment: FragmentMetadata) -> FragmentMetadata:
        """``fragment``, written by Lance with its own numbers, with ours."""
        return replace(fragment, files=[self._renumbered_file(file) for file in fragment.files])

    def _renumbered_file(self, file: DataFile) -> DataFile:
        return DataFile(
            path=str(file.path),
            fields=[self.ids.get(number, number) for number in file.fields],
            column_indices=file.column_indices,
            file_major_version=file.file_major_version,
            file_minor_version=file.file_minor_version,
            file_size_bytes=file.file_size_bytes,
        )


def write_numbered(
    rows: Iterator[pa.RecordBatch],
    uri: str,
    schema: NumberedSchema,
    storage_version: str,
    storage_options: dict[str, str],
) -> lance.LanceDataset:
    """A new dataset at ``uri`` with ``rows`` in one fragment."""
    reader = pa.RecordBatchReader.from_batches(schema.arrow, rows)
    how: dict[str, Any] = {
        "mode": "create",
        "data_storage_version": storage_version,
        "storage_options": storage_options,
        "max_rows_per_file": _ROWS_PER_FILE,
    }
    if schema.is_dense:
        return lance.write_dataset(reader, uri, **how)
    (fragment,) = write_fragments(reader, uri, **how)
    # A commit that creates a dataset renumbers its fields, one that adds fields keeps
    # their ids: so create it without any.
    empty = lance.write_dataset(pa.table({}), uri, **how)
    return lance.LanceDataset.commit(
        empty,
        lance.LanceOperation.Merge([schema.renumber(fragment)], schema.lance_schema()),
        read_version=empty.version,
        storage_options=storage_options,
    )


def _numbered(lance_field: Any, field: pa.Field) -> Iterator[tuple[int, int]]:
    """Lance's number and the annotated id (-1 without) of a field and its children, in order."""
    yield lance_field.id(), field_id(field)
    for i, child in enumerate(lance_field.children()):
        yield from _numbered(child, field.type.field(i))


# An SSTable's columns as the columns of the table's current schema.


@dataclass(frozen=True)
class Alignment:
    """How every column of a table's current schema is made from an SSTable's; fields without ids."""

    sources: Mapping[str, ColumnSource]
    stored_names: frozenset[str]
    #: Columns that are blobs here, of which a scan would show places instead of values.
    stored_blobs: frozenset[str] = frozenset()

    @classmethod
    def of(cls, schema: TableSchema, stored: pa.Schema, written_for: int | None) -> Alignment:
        """``stored`` holds the SSTable's columns, annotated with their field ids.

        ``written_for`` is the version of the table that had them, ``None`` if it is not known.
        """
        sources = column_sources(stored, schema, written_for)
        shown = {field.name: replace(sources[field.name], field=field) for field in schema.plain}
        ids = {field_id(field) for field in stored if is_blob(field)}
        blobs = frozenset(name for name in schema.blob_columns if schema.field_ids[name] in ids)
        return cls(shown, frozenset(stored.names) - {TOMBSTONE}, blobs)

    @cached_property
    def is_exact(self) -> bool:
        """Whether the SSTable has the current schema's columns, and no others."""
        return len(self.sources) == len(self.stored_names) and all(s.is_same for s in self.sources.values())

    def select(self, columns: Sequence[str]) -> list[ColumnSource]:
        unknown = [name for name in columns if name not in self.sources]
        if unknown:
            raise InvalidInputError(f"no such columns: {unknown}; the table has {list(self.sources)}")
        if self.stored_blobs:
            blobs = [name for name in columns if name in self.stored_blobs]
            if blobs:
                raise InvalidInputError(
                    f"an SSTable holds values of the blob column {', '.join(blobs)}, which lancewal cannot "
                    "read or compact yet; compact it with the tool that wrote it"
                )
        return [self.sources[name] for name in columns]


# Whether Lance's files can hold the columns of a table, found out by writing some rows in memory.
#
# Lance creates an empty table with columns that its file version cannot store, or cannot read back, and
# says so when the first rows come. Through a WAL these come at the first flush, when they are
# acknowledged already. Which columns those are depends on Lance and on the file version, so it is asked.


def check_storable(schema: TableSchema, storage_version: str) -> None:
    """Refuses a table with columns whose rows could be acknowledged, but not flushed or read again."""
    for field in schema.stored:
        if field.name != TOMBSTONE and not _is_common(field.type):
            alone = pa.schema([without_field_ids(field)])
            problem = _known_problem(alone.serialize().to_pybytes(), storage_version)
            if problem is not None:
                raise InvalidInputError(
                    f"column {field.name!r} of type {field.type} cannot be written through a WAL: Lance's "
                    f"files of version {storage_version} do not hold such rows ({problem}). Write the table "
                    "without the column, or at another data_storage_version"
                )


def _is_common(type_: pa.DataType) -> bool:
    """Types that every file version is known to hold, nulls included: no need to try."""
    types = pa.types
    if types.is_fixed_size_list(type_) or types.is_list(type_) or types.is_large_list(type_):
        return bool(types.is_integer(type_.value_type) or types.is_floating(type_.value_type))
    return not (
        isinstance(type_, pa.BaseExtensionType) or types.is_nested(type_) or types.is_dictionary(type_)
    )


#: What Lance says of a schema of one column at a file version; in a tuple, for it may be ``None``.
_problems: Shelf[tuple[bytes, str], tuple[str | None]] = Shelf()


def _known_problem(serialized: bytes, storage_version: str) -> str | None:
    key = serialized, storage_version
    return _problems.get_or_make(key, lambda: (_problem(*key),), lambda _: len(serialized))[0]


def _problem(serialized: bytes, storage_version: str) -> str | None:
    """What Lance says against rows with this one column; ``None`` if it takes them."""
    field = pa.ipc.read_schema(pa.py_buffer(serialized)).field(0)
    live = some_values(field.type, 2)
    values = pa.concat_arrays([live, present_values(field, storage_version, 1)])
    marks = pa.array([False, False, True])
    rows = pa.table([values, marks], schema=pa.schema([field.with_nullable(True), TOMBSTONE_FIELD]))
    try:
        with lance_errors("store it"):
            dataset = lance.write_dataset(
                rows,
                f"memory://{secrets.token_hex(16)}",
                mode="create",
                data_storage_version=storage_version,
            )
            dataset.to_table()
            dataset.to_table(filter=f"NOT {TOMBSTONE}")
            dataset.take([2, 0])
    except StorageError as error:
        return str(error)
    return None
