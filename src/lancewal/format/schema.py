"""A table's columns as the write path sees them: types, Lance field ids, primary key.

Readers of WAL entries and SSTables match columns by field id, never by name: a
renamed column keeps its id, and a new column that reuses a name has another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import pyarrow as pa

TOMBSTONE = "_tombstone"
FIELD_ID_KEY = b"lance:field_id"
PRIMARY_KEY_KEY = b"lance-schema:unenforced-primary-key"

TOMBSTONE_FIELD = pa.field(TOMBSTONE, pa.bool_(), nullable=False)


class LanceField(Protocol):
    """What we use of pylance's ``LanceField``."""

    def id(self) -> int: ...
    def name(self) -> str: ...
    def children(self) -> list[Any]: ...


@dataclass(frozen=True)
class TableSchema:
    """The columns of one table version.

    ``columns`` carries ``lance:field_id`` in every field's metadata, nested ones
    included, next to what the table itself keeps there.

    ``was_called`` tells whether the column of a field id, one of these, once had some other
    name. Without it (``None``) any former name is believed.
    """

    columns: pa.Schema
    primary_key: tuple[str, ...]
    was_called: Callable[[int, str], bool] | None = field(default=None, compare=False, repr=False)
    #: What the table keeps in its schema's metadata (pandas leaves some there). Lance
    #: replays a WAL entry only if the entry has the same.
    metadata: Mapping[bytes, bytes] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_lance(
        cls,
        arrow: pa.Schema,
        lance_fields: Sequence[LanceField],
        primary_key: Sequence[str],
        was_called: Callable[[int, str], bool] | None = None,
    ) -> TableSchema:
        annotated = [_with_field_ids(arrow.field(f.name()), f) for f in lance_fields]
        return cls(pa.schema(annotated), tuple(primary_key), was_called, dict(arrow.metadata or {}))

    @cached_property
    def stored(self) -> pa.Schema:
        """The columns as MemTables, WAL entries and SSTables hold them: tombstone last."""
        return pa.schema([*self.columns, TOMBSTONE_FIELD], metadata=dict(self.metadata) or None)

    @cached_property
    def plain(self) -> pa.Schema:
        """The columns without the field-id annotations, as users see them."""
        return pa.schema([without_field_ids(field) for field in self.columns])

    @cached_property
    def field_ids(self) -> Mapping[str, int]:
        """Top-level field id by column name."""
        return {field.name: field_id(field) for field in self.columns}

    @cached_property
    def max_field_id(self) -> int:
        """The highest field id in use, nested fields included; -1 without columns."""
        return max((i for field in self.columns for i in _all_ids(field)), default=-1)

    @property
    def names(self) -> list[str]:
        return list(self.columns.names)


def field_id(field: pa.Field) -> int:
    """The Lance field id that ``field`` is annotated with; -1 when it has none."""
    metadata = field.metadata or {}
    return int(metadata.get(FIELD_ID_KEY, b"-1"))


def without_field_ids(field: pa.Field) -> pa.Field:
    """``field`` and its children without their field-id annotations."""
    metadata = {k: v for k, v in (field.metadata or {}).items() if k != FIELD_ID_KEY}
    return field.with_type(_map_children(field.type, without_field_ids)).with_metadata(metadata or None)


def _with_field_ids(field: pa.Field, lance_field: LanceField) -> pa.Field:
    # A map's children in Lance: one field for the pairs, which Arrow's type leaves no room for.
    pairs = lance_field.children()[0].children() if pa.types.is_map(field.type) else None
    children = iter(lance_field.children() if pairs is None else pairs)

    def annotate(child: pa.Field) -> pa.Field:
        # Fixed-size lists of scalars have no child field in Lance: nothing to annotate.
        lance_child = next(children, None)
        return child if lance_child is None else _with_field_ids(child, lance_child)

    metadata = {**(field.metadata or {}), FIELD_ID_KEY: str(lance_field.id()).encode()}
    return field.with_type(_map_children(field.type, annotate)).with_metadata(metadata)


def _map_children(type_: pa.DataType, change: Any) -> pa.DataType:
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


def _all_ids(field: pa.Field) -> list[int]:
    ids = [field_id(field)]
    for i in range(field.type.num_fields):
        ids += _all_ids(field.type.field(i))
    return ids
