"""SsTableSource: a flushed MemTable as one level of a merged read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from uuid import UUID

import numpy as np
import pyarrow as pa

from lancewal.format import TOMBSTONE, KeySet, TableSchema, key_values, numbers
from lancewal.predicate import Predicate
from lancewal.reader.source import Mask, Request, Rows
from lancewal.sstable import ROW_OFFSET, KeyProbe, SsTable


class KeyedSsTable:
    """An open SSTable with its keys, kept between reads: neither ever changes."""

    def __init__(self, sstable: SsTable) -> None:
        self.sstable = sstable
        self._key_set: KeySet | None = None

    def key_set(self, schema: TableSchema) -> KeySet:
        if self._key_set is None:
            self._key_set = KeySet.of([key_values(self.sstable.keys(schema)[0])])
        return self._key_set


class SsTableSource:
    """One SSTable, shown as the columns of ``schema``."""

    in_memory = False

    def __init__(self, keyed: KeyedSsTable, schema: TableSchema) -> None:
        self._keyed = keyed
        self._sstable = keyed.sstable
        self._schema = schema

    @property
    def name(self) -> str:
        return f"sstable:{self._sstable.generation}"

    @property
    def shard_id(self) -> UUID:
        return self._sstable.shard_id

    @property
    def generation(self) -> int:
        return self._sstable.generation

    @property
    def sstable(self) -> SsTable:
        return self._sstable

    @property
    def schema(self) -> TableSchema:
        return self._schema

    def stored_name(self, column: str) -> str | None:
        """What the SSTable's own dataset calls a column; ``None`` when it has not got it."""
        return self._sstable.columns_for(self._schema)[column]

    def takes_filter(self, predicate: Predicate | None) -> bool:
        """Whether the SSTable's own dataset has the predicate's columns under their present names."""
        names = () if predicate is None else predicate.columns
        stored = self._sstable.columns_for(self._schema)
        return all(stored[name] == name for name in names)

    def keys(self) -> KeySet:
        return self._keyed.key_set(self._schema)

    def batches(self, request: Request, newer: KeySet) -> Iterator[pa.RecordBatch]:
        dead = self.superseded(newer)
        if dead is None:
            yield from self._sstable.scan(self._schema, request.columns, filter=request.sql)
            return
        if dead.all():
            return
        found = self._sstable.scan(self._schema, request.columns, filter=request.sql, with_offsets=True)
        for batch in found:
            kept = ~dead[numbers(batch.column(ROW_OFFSET))]
            rows = batch.select(list(request.columns))
            yield rows if kept.all() else rows.filter(pa.array(kept))

    def count(self, predicate: Predicate | None, newer: KeySet) -> int:
        dead = self.superseded(newer)
        if predicate is None and dead is None:
            return self._sstable.count_live()
        if predicate is None and dead is not None:
            _, offsets, tombstones = self._sstable.keys(self._schema)
            return int(np.count_nonzero(~dead[offsets] & ~tombstones))
        sql = predicate.sql if predicate is not None else None
        offset_batches = self._sstable.scan(self._schema, [], filter=sql, with_offsets=True)
        if dead is None:
            return sum(batch.num_rows for batch in offset_batches)
        return sum(
            int(np.count_nonzero(~dead[numbers(batch.column(ROW_OFFSET))])) for batch in offset_batches
        )

    def find(self, keys: KeyProbe) -> Rows:
        return self._sstable.lookup(keys)

    def take(self, positions: Rows, columns: Sequence[str]) -> tuple[pa.Table, Mask]:
        rows = self._sstable.take(positions, self._schema, columns, with_tombstone=True)
        deleted = np.asarray(rows.column(TOMBSTONE).to_numpy(zero_copy_only=False), np.bool_)
        return pa.Table.from_batches([rows.select(list(columns))]), deleted

    def superseded(self, newer: KeySet) -> Mask | None:
        """By row offset, which rows newer levels replace; ``None`` when none is."""
        if not len(newer):
            return None
        columns, offsets, _ = self._sstable.keys(self._schema)
        replaced = newer.contains(key_values(columns))
        if not replaced.any():
            return None
        # Offsets between those listed belong to older versions, which no scan returns.
        dead = np.ones(int(offsets.max()) + 1, np.bool_)
        dead[offsets] = replaced
        return dead
