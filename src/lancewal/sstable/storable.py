"""Find rows that Lance's files cannot hold. A put refuses them, because at a flush it is too late.

- **Null structs.** File version 2.0 cannot store a null struct. In all versions a packed struct cannot
  contain nulls, and a struct without fields cannot be null. Lance refuses such rows when it writes
  the file. A tombstone has no values except its key, so its structs get placeholder values.
- **Other columns.** Lance creates an empty table with columns that its file version cannot store, or
  cannot read back, and fails with the first rows. Which columns those are depends on Lance and
  on the file version, so the check writes some rows in memory with Lance.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.base import lance_errors
from lancewal.errors import InvalidInputError, StorageError
from lancewal.format import TOMBSTONE, TOMBSTONE_FIELD, TableSchema, without_field_ids
from lancewal.storage import Shelf

_VERSIONS_WITHOUT_NULL_STRUCTS = frozenset(["2.0"])
_PACKED_KEYS = (b"packed", b"lance-encoding:packed")


def cannot_be_null(field: pa.Field, storage_version: str) -> bool:
    """Whether a file of this version cannot hold a null in such a column.

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
    """Whether the metadata tells Lance to store a struct's fields side by side."""
    marks = field.metadata or {}
    return any(marks.get(key, b"").lower() == b"true" for key in _PACKED_KEYS)


def needs_present_structs(storage_version: str, schema: pa.Schema) -> bool:
    """Whether rows of ``schema`` may have structs that the file version cannot hold."""
    return any(_has_never_null_structs(field, storage_version) for field in schema)


def refuse_null_structs(batch: pa.RecordBatch, storage_version: str) -> None:
    """Refuse live rows that could not be flushed; call this before they are written anywhere."""
    if not needs_present_structs(storage_version, batch.schema):
        return
    live = batch.filter(pc.invert(batch.column(TOMBSTONE))) if TOMBSTONE in batch.schema.names else batch
    for field, column in zip(live.schema, live.columns, strict=True):
        found = _null_in(column, field, storage_version)
        if found is not None:
            raise InvalidInputError(f"column {field.name!r} has {found}")


def present_values(field: pa.Field, storage_version: str, rows: int) -> pa.Array:
    """Placeholder values for rows without values: nulls, if the column can hold them."""
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
            # The last row of the concatenation is the placeholder.
            both = pa.concat_arrays([columns[place], present_values(field, storage_version, 1)])
            columns[place] = both.take(pa.array(np.where(dead, len(dead), np.arange(len(dead)))))
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def without_dead_values(rows: pa.RecordBatch, key: Sequence[str]) -> pa.RecordBatch:
    """``rows`` with nulls in the structs of tombstones, instead of the file's placeholders."""
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


def _has_never_null_structs(field: pa.Field, storage_version: str) -> bool:
    """Whether a column is a struct that cannot be null, or contains such structs in lists."""
    if pa.types.is_map(field.type):
        # A map's pairs are structs that are never null.
        return False
    return cannot_be_null(field, storage_version) or any(
        _has_never_null_structs(child, storage_version) for child in _children(field)
    )


def _null_in(array: pa.Array, field: pa.Field, storage_version: str) -> str | None:
    """A description of a null that the file cannot hold; ``None`` if there is none."""
    if not _has_never_null_structs(field, storage_version):
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
    """Rows of zeros, empty texts, and lists with one such item each."""
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


def check_storable(schema: TableSchema, storage_version: str) -> None:
    """Refuse a table with columns whose rows could be acknowledged, but not flushed or read back."""
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
    """Whether every file version is known to hold this type, nulls included, so that no test is needed."""
    types = pa.types
    if types.is_fixed_size_list(type_) or types.is_list(type_) or types.is_large_list(type_):
        return bool(types.is_integer(type_.value_type) or types.is_floating(type_.value_type))
    return not (
        isinstance(type_, pa.BaseExtensionType) or types.is_nested(type_) or types.is_dictionary(type_)
    )


#: Lance's objection to a schema of one column at a file version; in a tuple, because it may be ``None``.
_problems: Shelf[tuple[bytes, str], tuple[str | None]] = Shelf()


def _known_problem(serialized: bytes, storage_version: str) -> str | None:
    key = serialized, storage_version
    return _problems.get_or_make(key, lambda: (_problem(*key),), lambda _: len(serialized))[0]


def _problem(serialized: bytes, storage_version: str) -> str | None:
    """Lance's objection to rows with this one column; ``None`` if it accepts them."""
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
