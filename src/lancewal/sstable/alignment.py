"""An SSTable's columns as the columns of the table's current schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format.align import ColumnSource, column_sources
from lancewal.format.schema import TOMBSTONE, TableSchema


@dataclass(frozen=True)
class Alignment:
    """How every column of a table's current schema is made from an SSTable's; fields without ids."""

    sources: Mapping[str, ColumnSource]
    stored_names: frozenset[str]

    @classmethod
    def of(cls, schema: TableSchema, stored: pa.Schema, written_for: int | None) -> Alignment:
        """``stored`` holds the SSTable's columns, annotated with their field ids.

        ``written_for`` is the version of the table that had them, ``None`` if it is not known.
        """
        sources = column_sources(stored, schema, written_for)
        shown = {field.name: replace(sources[field.name], field=field) for field in schema.plain}
        return cls(shown, frozenset(stored.names) - {TOMBSTONE})

    @cached_property
    def is_exact(self) -> bool:
        """Whether the SSTable has the current schema's columns, and no others."""
        return len(self.sources) == len(self.stored_names) and all(s.is_same for s in self.sources.values())

    def select(self, columns: Sequence[str]) -> list[ColumnSource]:
        unknown = [name for name in columns if name not in self.sources]
        if unknown:
            raise InvalidInputError(f"no such columns: {unknown}; the table has {list(self.sources)}")
        return [self.sources[name] for name in columns]
