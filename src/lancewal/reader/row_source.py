"""The columns that say where a row came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pyarrow as pa

from lancewal.format.columns import refuse_added
from lancewal.format.schema import TableSchema
from lancewal.reader.source import Source

SOURCE = "_source"
SHARD_ID = "_shard_id"
_BASE = "base"

_FIELDS = [pa.field(SOURCE, pa.string(), nullable=False), pa.field(SHARD_ID, pa.string())]

_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)


def shown_schema(schema: TableSchema, columns: Sequence[str], row_source: bool) -> pa.Schema:
    """What a read of ``columns`` returns."""
    if row_source:
        refuse_added(schema, SOURCE, SHARD_ID)
    fields = [schema.plain.field(name) for name in columns]
    return pa.schema([*fields, *_FIELDS] if row_source else fields)


def labelled(rows: _Rows, source: Source | None) -> _Rows:
    """``rows`` with the columns that name their source; ``None`` is the base table."""
    name, shard = (_BASE, None) if source is None else (source.name, str(source.shard_id))
    for field, value in zip(_FIELDS, (name, shard), strict=True):
        rows = rows.append_column(field, pa.repeat(pa.scalar(value, pa.string()), rows.num_rows))
    return rows
