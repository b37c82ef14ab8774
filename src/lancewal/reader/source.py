"""What a merged read reads from: MemTables, SSTables and the base table, behind one interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.format import KeySet, TableSchema, refuse_added
from lancewal.predicate import Predicate
from lancewal.sstable import KeyProbe

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

ABSENT = -1


@dataclass(frozen=True)
class Request:
    """Which rows and columns are wanted; ``limit`` is how many rows are enough (``None``: all)."""

    columns: Sequence[str]
    predicate: Predicate | None = None
    limit: int | None = None

    @property
    def sql(self) -> str | None:
        return None if self.predicate is None else self.predicate.sql


def newest_first(in_memory: bool, generation: int, shard_id: UUID) -> tuple[bool, int, UUID]:
    """The order of levels of several shards that may hold versions of one key.

    What is newer in two shards nothing on storage says, so it is a rule: rows in memory or in
    the WAL before flushed ones, then the higher generation, then the lower shard id. Reads of every kind
    follow it, and compaction does: it brings levels into the base in the opposite order, so
    that at no moment an older level lies over a newer one. (Flushing moves rows in the order; only the
    rows of one shard are for certain in the order of their puts.)
    """
    return not in_memory, -generation, shard_id


class Source(Protocol):
    """One level of a shard. Keys of newer levels are passed in; their rows here are superseded.

    All of a level's own superseded rows are left out by itself.
    """

    @property
    def name(self) -> str:
        """As ``_source`` shows it."""

    @property
    def shard_id(self) -> UUID: ...

    @property
    def generation(self) -> int: ...

    @property
    def in_memory(self) -> bool: ...

    def keys(self) -> KeySet:
        """All keys here, those of deletes included, whatever a filter says."""

    def batches(self, request: Request, newer: KeySet) -> Iterator[pa.RecordBatch]:
        """The live rows that the request is about, without ``newer`` keys."""

    def count(self, predicate: Predicate | None, newer: KeySet) -> int:
        """How many rows :meth:`batches` would give, without reading more than it takes."""

    def find(self, keys: KeyProbe) -> Rows:
        """The newest row of each key, ``ABSENT`` where there is none; deletes are found too."""

    def take(self, positions: Rows, columns: Sequence[str]) -> tuple[pa.Table, Mask]:
        """Rows that :meth:`find` found, in the order asked, and which of them are deletes."""


# The columns that say where a row came from.


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
