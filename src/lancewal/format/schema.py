"""A table's columns for the write path: types, Lance field ids, primary key, and limits.

Readers of WAL entries and SSTables match columns by field id, never by name: a
renamed column keeps its id. Lance may give the id of a dropped column to a new one, so
rows also carry the version of the table that they were written for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar
from uuid import UUID

import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format.spans import has_dictionary

TOMBSTONE = "_tombstone"
FIELD_ID_KEY = b"lance:field_id"
PRIMARY_KEY_KEY = b"lance-schema:unenforced-primary-key"
_EXTENSION_NAME = b"ARROW:extension:name"
_EXTENSION_METADATA = b"ARROW:extension:metadata"
_LANCE_JSON = b"lance.json"

#: File versions up to 2.1 mark blob columns with this key; later ones have a blob type.
_BLOB_KEY = b"lance-encoding:blob"
BLOB_TYPE = "lance.blob."

#: Lance refuses these names for new tables, but lets columns be renamed to some of them.
LANCE_NAMES = frozenset(
    ["_rowid", "_rowaddr", "_rowoffset", "_row_created_at_version", "_row_last_updated_at_version"]
)
#: The columns that a read adds on request: where each row came from.
SOURCE, SHARD_ID = "_source", "_shard_id"
_LABELS = [pa.field(SOURCE, pa.string(), nullable=False), pa.field(SHARD_ID, pa.string())]
#: Columns that reads add. The change feed's columns are not included, because a table may store the rows of
#: a feed with these columns. Only a feed of such a table is refused.
ADDED_NAMES = frozenset([SOURCE, "_distance", "_score"])

#: Properties of a TableSchema that follow from its columns alone.
_DERIVED = frozenset(["stored", "shows_as_stored", "plain", "field_ids", "has_dictionaries", "blob_columns"])

TOMBSTONE_FIELD = pa.field(TOMBSTONE, pa.bool_(), nullable=False)

_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)


class LanceField(Protocol):
    """The methods of pylance's ``LanceField`` that we use."""

    def id(self) -> int: ...
    def name(self) -> str: ...
    def children(self) -> list[Any]: ...


class ColumnIdentity(Protocol):
    """Distinguishes the columns of one table version from other columns that had the same field ids."""

    @property
    def version(self) -> int: ...

    def was_called(self, field_id: int, name: str) -> bool:
        """Whether the column once had this name."""

    def replaced_since(self, version: int) -> frozenset[int]:
        """The field ids that meant something else, or nothing, in ``version``."""


@dataclass(frozen=True)
class TableSchema:
    """The columns of one table version.

    ``columns`` has ``lance:field_id`` in every field's metadata, nested fields
    included, in addition to the table's own metadata.

    ``identity`` tells whether rows that were stored earlier belong to these columns. Without
    it (``None``) every field id and every former name is accepted.
    """

    columns: pa.Schema
    primary_key: tuple[str, ...]
    identity: ColumnIdentity | None = field(default=None, compare=False, repr=False)
    #: The table's schema metadata (pandas leaves some there). Lance replays a WAL entry only if the
    #: entry has the same.
    metadata: Mapping[bytes, bytes] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_lance(
        cls, arrow: pa.Schema, lance_fields: Sequence[LanceField], primary_key: Sequence[str]
    ) -> TableSchema:
        annotated = [_with_field_ids(arrow.field(f.name()), f) for f in lance_fields]
        return cls(pa.schema(annotated), tuple(primary_key), metadata=dict(arrow.metadata or {}))

    @property
    def version(self) -> int | None:
        """The table's version that has these columns; ``None`` when it is not known."""
        return None if self.identity is None else self.identity.version

    def identified(self, identity: ColumnIdentity | None) -> TableSchema:
        """The same columns for another version; keeps the values that were derived from the columns."""
        other = replace(self, identity=identity)
        derived = {name: value for name, value in vars(self).items() if name in _DERIVED}
        vars(other).update(derived)
        return other

    def has_columns_of(self, other: TableSchema) -> bool:
        """Whether the two have the same key and the same columns, with the same field ids."""
        return self is other or (
            self.primary_key == other.primary_key
            and bool(self.columns.equals(other.columns, check_metadata=True))
        )

    def replaced_since(self, version: int | None) -> frozenset[int]:
        """The field ids that did not mean these columns in ``version``, as far as known."""
        if self.identity is None or version is None:
            return frozenset()
        return self.identity.replaced_since(version)

    @cached_property
    def stored(self) -> pa.Schema:
        """The columns as MemTables, WAL entries and SSTables hold them: tombstone last.

        Columns outside the key are always nullable there, because a tombstone has no values.
        JSON is in Lance's own encoding. Lance stores columns in this form, and replays only entries
        in this form.
        """
        columns = [
            field if field.name in self.primary_key else stored_field(field).with_nullable(True)
            for field in self.columns
        ]
        return pa.schema([*columns, TOMBSTONE_FIELD], metadata=dict(self.metadata) or None)

    @cached_property
    def shows_as_stored(self) -> bool:
        """Whether users see values in the form that MemTables hold; false if there is JSON."""
        return not any(has_json(field.type) for field in self.columns)

    @cached_property
    def plain(self) -> pa.Schema:
        """The columns without the field-id annotations, as users see them."""
        return pa.schema([without_field_ids(field) for field in self.columns])

    @cached_property
    def field_ids(self) -> Mapping[str, int]:
        """Top-level field id by column name."""
        return {field.name: field_id(field) for field in self.columns}

    @property
    def names(self) -> list[str]:
        return list(self.columns.names)

    @cached_property
    def has_dictionaries(self) -> bool:
        """Whether a column, or a field nested in one, is dictionary-encoded."""
        return any(map(has_dictionary, self.columns.types))

    @cached_property
    def blob_columns(self) -> tuple[str, ...]:
        """The columns whose values Lance stores outside the rows, as blobs."""
        return tuple(field.name for field in self.columns if is_blob(field))

    @cached_property
    def without_blobs(self) -> TableSchema:
        """This schema without its blob columns."""
        if not self.blob_columns:
            return self
        kept = [field for field in self.columns if field.name not in self.blob_columns]
        return replace(self, columns=pa.schema(kept))


def is_blob(field: pa.Field) -> bool:
    """Whether Lance stores the values of a column, or of a field nested in it, as blobs."""
    marks = field.metadata or {}
    kinds = (getattr(field.type, "extension_name", None), marks.get(_EXTENSION_NAME, b"").decode())
    if marks.get(_BLOB_KEY) == b"true" or any((kind or "").startswith(BLOB_TYPE) for kind in kinds):
        return True
    return any(is_blob(field.type.field(place)) for place in range(field.type.num_fields))


def field_id(field: pa.Field) -> int:
    """The Lance field id in the metadata of ``field``; -1 if it has none."""
    metadata = field.metadata or {}
    return int(metadata.get(FIELD_ID_KEY, b"-1"))


def without_field_ids(field: pa.Field) -> pa.Field:
    """``field`` and its children without their field-id annotations."""
    metadata = {k: v for k, v in (field.metadata or {}).items() if k != FIELD_ID_KEY}
    return field.with_type(map_children(field.type, without_field_ids)).with_metadata(metadata or None)


def check_readable(schema: pa.Schema) -> None:
    """Refuse columns for which Arrow returns wrong values.

    On a slice of fixed-size lists of fixed-size lists, ``take`` returns rows outside the slice (seen in
    pyarrow 26.0.1). The merge of rows uses slices everywhere.
    """
    for column in schema:
        if _nests_fixed_lists(column.type):
            raise InvalidInputError(
                f"column {column.name!r} is {column.type}: Arrow reads wrong values out of such lists of "
                "lists; store a flat fixed-size list, or a list of fixed-size lists"
            )


def _nests_fixed_lists(type_: pa.DataType) -> bool:
    fixed = pa.types.is_fixed_size_list
    if fixed(type_) and fixed(type_.value_type):
        return True
    return any(_nests_fixed_lists(type_.field(place).type) for place in range(type_.num_fields))


def hashable(schema: pa.Schema) -> pa.Schema:
    """``schema`` as a cache key: without extension types written in Python, which do not hash.

    The storage type replaces them.
    """
    if not any(isinstance(type_, pa.ExtensionType) for type_ in schema.types):
        return schema
    return pa.schema(
        [
            field.with_type(field.type.storage_type) if isinstance(field.type, pa.ExtensionType) else field
            for field in schema
        ]
    )


def no_rows(schema: pa.Schema) -> pa.Table:
    """A table without rows; Arrow's own ``empty_table`` fails on nested extension types."""
    return pa.Table.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def is_json(type_: pa.DataType) -> bool:
    """Whether a type is Arrow's JSON type, in which Lance returns a JSON column."""
    return isinstance(type_, pa.JsonType)


def has_json(type_: pa.DataType) -> bool:
    """Whether a type is Arrow's JSON type or contains it.

    >>> has_json(pa.struct([("a", pa.list_(pa.json_()))])), has_json(pa.string())
    (True, False)
    """
    return is_json(type_) or any(has_json(type_.field(place).type) for place in range(type_.num_fields))


def holds_encoded_json(field: pa.Field) -> bool:
    """Whether a field itself, not a nested one, holds JSON in Lance's encoding."""
    marks = field.metadata or {}
    return bool(pa.types.is_large_binary(field.type)) and marks.get(_EXTENSION_NAME) == _LANCE_JSON


def stored_field(field: pa.Field) -> pa.Field:
    """``field`` with JSON, nested included, as Lance stores it.

    >>> stored_field(pa.field("document", pa.json_())).type
    DataType(large_binary)
    """
    if is_json(field.type):
        marks = {_EXTENSION_NAME: _LANCE_JSON, _EXTENSION_METADATA: b""}
        return field.with_type(pa.large_binary()).with_metadata({**(field.metadata or {}), **marks})
    return field.with_type(map_children(field.type, stored_field)) if has_json(field.type) else field


def _with_field_ids(field: pa.Field, lance_field: LanceField) -> pa.Field:
    # In Lance a map has one child for the pairs, but ``map_children`` visits key and item directly.
    pairs = lance_field.children()[0].children() if pa.types.is_map(field.type) else None
    children = iter(lance_field.children() if pairs is None else pairs)

    def annotate(child: pa.Field) -> pa.Field:
        # Fixed-size lists of scalars have no child field in Lance: nothing to annotate.
        lance_child = next(children, None)
        return child if lance_child is None else _with_field_ids(child, lance_child)

    metadata = {**(field.metadata or {}), FIELD_ID_KEY: str(lance_field.id()).encode()}
    return field.with_type(map_children(field.type, annotate)).with_metadata(metadata)


def map_children(type_: pa.DataType, change: Callable[[pa.Field], pa.Field]) -> pa.DataType:
    """``type_`` with its child fields changed."""
    if pa.types.is_map(type_):
        return pa.map_(change(type_.key_field), change(type_.item_field), type_.keys_sorted)
    if pa.types.is_struct(type_):
        return pa.struct([change(type_.field(i)) for i in range(type_.num_fields)])
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(change(type_.value_field), type_.list_size)
    if pa.types.is_large_list(type_):
        return pa.large_list(change(type_.value_field))
    if pa.types.is_list(type_):
        return pa.list_(change(type_.value_field))
    return type_


def check_new_columns(schema: TableSchema) -> None:
    """Refuse a new table whose columns the write path cannot support."""
    check_columns(schema)
    added = [name for name in schema.names if name in ADDED_NAMES]
    if added:
        raise InvalidInputError(
            f"column {', '.join(added)} has a name that reads or searches add; "
            "rename it with lance.LanceDataset.alter_columns"
        )


def check_columns(schema: TableSchema) -> None:
    """Refuse columns whose rows could be written, but never read, flushed or compacted.

    Lance creates tables with column names that its own appends, merges and scans cannot handle; rows of
    such a table would be stuck on their way to the base. Lance stores blobs outside the rows, and the
    write path does not support that yet.
    """
    for name in schema.names:
        problem = _name_problem(name, name in schema.primary_key)
        if problem:
            raise InvalidInputError(
                f"column {name!r} {problem}; rename it with lance.LanceDataset.alter_columns, or write the "
                "table anew"
            )
    for column in schema.columns:
        if any(not child.name for child in _fields_below(column)):
            raise InvalidInputError(
                f"column {column.name!r} has a field without a name, which no filter can mean; rename it"
            )
    if schema.blob_columns:
        raise InvalidInputError(
            f"column {', '.join(schema.blob_columns)} is a blob column, whose values do not go through the "
            "write path yet and would be lost; write such tables with lance.write_dataset and "
            "lance.LanceDataset.merge_insert, or keep the values in a plain large_binary column"
        )


def refuse_added(schema: TableSchema, *names: str) -> None:
    """Refuse a table that has columns with these names, because a read would add such columns."""
    taken = [name for name in names if name in schema.field_ids]
    if taken:
        raise InvalidInputError(
            f"the table has columns of its own named {', '.join(taken)}, which are added here; rename them "
            "with lance.LanceDataset.alter_columns"
        )


def shown_schema(schema: TableSchema, columns: Sequence[str], row_source: bool) -> pa.Schema:
    """The schema of a read of ``columns``; ``row_source`` adds the columns of :func:`labelled`."""
    if row_source:
        refuse_added(schema, SOURCE, SHARD_ID)
    fields = [schema.plain.field(name) for name in columns]
    return pa.schema([*fields, *_LABELS] if row_source else fields)


def labelled(rows: _Rows, source: str, shard_id: UUID | None) -> _Rows:
    """``rows`` with the columns that say where they came from."""
    shard = None if shard_id is None else str(shard_id)
    for label, value in zip(_LABELS, (source, shard), strict=True):
        rows = rows.append_column(label, pa.repeat(pa.scalar(value, pa.string()), rows.num_rows))
    return rows


def checked_columns(columns: Sequence[str] | None, schema: TableSchema) -> list[str]:
    """The requested columns, all of them for ``None``; refuses columns that the table does not have."""
    if columns is None:
        return readable_columns(schema, schema.names) if schema.blob_columns else schema.names
    if isinstance(columns, str):  # otherwise its letters would be taken as names
        raise InvalidInputError(f"columns is {columns!r}; pass a list of names, such as [{columns!r}]")
    if isinstance(columns, Mapping):  # otherwise its expressions would be ignored
        raise InvalidInputError(
            "columns is a dict; pass a list of names, and compute values with table.sql or from the result"
        )
    names = list(columns)
    unknown = [name for name in names if name not in schema.field_ids]
    if unknown:
        raise InvalidInputError(
            f"the table has no column {', '.join(map(repr, unknown))}; "
            f"its columns are {', '.join(schema.names)}"
        )
    if not names or len(set(names)) < len(names):
        raise InvalidInputError(f"select columns by name, each once and at least one, not {names}")
    return readable_columns(schema, names) if schema.blob_columns else names


def readable_columns(schema: TableSchema, names: Iterable[str]) -> list[str]:
    """Return ``names``; refuses blob columns, whose values merged reads cannot return."""
    chosen = list(names)
    blobs = [name for name in chosen if name in schema.blob_columns]
    if blobs:
        others = [name for name in schema.names if name not in schema.blob_columns]
        raise InvalidInputError(
            f"column {', '.join(blobs)} is a blob column, which lancewal does not read yet; select others "
            f"({', '.join(others)}), and read the blobs with lance.LanceDataset.take_blobs"
        )
    return chosen


def refuse_blob_values(batch: pa.RecordBatch) -> None:
    """Refuse rows of another writer with values in blob columns: the values would be lost."""
    for field_, column in zip(batch.schema, batch.columns, strict=True):
        if is_blob(field_) and column.null_count < len(column):
            raise InvalidInputError(
                f"the log holds values of the blob column {field_.name}, which lancewal cannot flush yet; "
                "flush the shard with the writer that wrote them"
            )


def _name_problem(name: str, is_key: bool) -> str | None:
    if not name:
        return "has no name, and Lance cannot append to such a table"
    if name == TOMBSTONE:
        return "has the name that marks deletes"
    if name in LANCE_NAMES:
        return "has a name that Lance keeps for itself"
    if name == "*":
        return "has the name that stands for all columns"
    if "`" in name or "." in name:
        return "has a backtick or a dot in its name, and Lance cannot append to such a table"
    if is_key and '"' in name:
        return "is a key and has a double quote in its name, which Lance cannot merge by"
    return None


def _fields_below(parent: pa.Field) -> Iterator[pa.Field]:
    for place in range(parent.type.num_fields):
        child = parent.type.field(place)
        yield child
        yield from _fields_below(child)
