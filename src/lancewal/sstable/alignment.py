"""An SSTable's columns as the columns of the table's current schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format.align import ColumnSource, column_sources
from lancewal.format.schema import TOMBSTONE, TableSchema, field_id, is_blob


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
