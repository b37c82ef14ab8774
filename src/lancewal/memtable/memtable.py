"""MemTable: the rows of one generation, in insert order, readable while they grow.

One thread inserts at a time (the writer's lock sees to that); any number read. A
reader takes a :class:`MemTableView`, which is fixed: rows that come later are not in it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from uuid import UUID

import pyarrow as pa

from lancewal.format.schema import TableSchema
from lancewal.index.store import IndexStore
from lancewal.memtable.view import MemTableView

logger = logging.getLogger(__name__)

#: What Python and Arrow need per batch beside the rows (schema, arrays, buffers).
BATCH_OVERHEAD_BYTES = 1024
_SMALL_ROWS = 8192


class MemTable:
    """An append-only run of record batches with its indexes."""

    def __init__(
        self,
        shard_id: UUID,
        schema: TableSchema,
        generation: int,
        indexes: IndexStore,
        first_position: int,
        *,
        index_on_insert: bool = True,
    ) -> None:
        """``first_position`` is the writer-wide batch position of the first batch to come."""
        self.shard_id = shard_id
        self.schema = schema
        self.generation = generation
        self.indexes = indexes
        self.first_position = first_position
        self._index_on_insert = index_on_insert
        self._index_failed = False
        self._indexed_batches = 0
        self._indexed_rows = 0
        self._index_bytes = 0
        self._measure_at = 0
        self._batches: list[pa.RecordBatch] = []
        self._first_rows: list[int] = [0]
        self._row_bytes = 0
        self._visible_batches = 0
        self._durable_batches = 0
        #: The last WAL position that holds rows of this MemTable; 0 before the first.
        self.covered_wal_position = 0
        self.index_seconds = 0.0

    @property
    def batch_count(self) -> int:
        return len(self._batches)

    @property
    def row_count(self) -> int:
        return self._first_rows[-1]

    @property
    def end_position(self) -> int:
        """The writer-wide batch position after the last batch."""
        return self.first_position + len(self._batches)

    @property
    def durable_batches(self) -> int:
        return self._durable_batches

    @property
    def visible_rows(self) -> int:
        return self._first_rows[self._visible_batches]

    @property
    def estimated_size(self) -> int:
        """Bytes held: rows, bookkeeping and indexes; 0 without rows, since no flush would free them."""
        if not self._batches:
            return 0
        if self.row_count >= self._measure_at:
            self._index_bytes = self.indexes.memory_bytes
            # Every put asks twice, and a few rows change little.
            self._measure_at = self.row_count + max(self.row_count, _SMALL_ROWS) // 64
        return self._row_bytes + self._index_bytes

    @property
    def row_bytes(self) -> int:
        return self._row_bytes

    @property
    def batches(self) -> Sequence[pa.RecordBatch]:
        """All batches, visible or not, for the flush; do not change."""
        return self._batches

    def insert(self, batches: Sequence[pa.RecordBatch], num_bytes: int) -> range:
        """Add ``batches`` (in ``schema.stored``) of ``num_bytes``; returns their writer-wide positions.

        They stay invisible until :meth:`show` or :meth:`note_durable` says otherwise.
        """
        start = self.end_position
        for batch in batches:
            self._batches.append(batch)
            self._first_rows.append(self._first_rows[-1] + batch.num_rows)
        self._row_bytes += num_bytes + BATCH_OVERHEAD_BYTES * len(batches)
        if self._index_on_insert:
            self.update_indexes()
        return range(start, self.end_position)

    def update_indexes(self, max_rows: int | None = None) -> int:
        """Index what is not indexed yet (whole batches, at least one, up to ``max_rows``).

        An index that fails is given up for this MemTable: its rows are searched one by
        one from there on. A put must not fail, and a shard not become unwritable, for it.
        """
        if self._index_failed or not self.indexes.specs:
            return 0
        started = time.perf_counter()
        before = self._indexed_rows
        try:
            for index in range(self._indexed_batches, len(self._batches)):
                batch = self._batches[index]
                self.indexes.insert(batch, self._indexed_rows)
                self._indexed_batches = index + 1
                self._indexed_rows += batch.num_rows
                if max_rows is not None and self._indexed_rows - before >= max_rows:
                    break
        except Exception:
            self._index_failed = True
            logger.exception(
                "indexing failed; rows of this MemTable are searched without an index from row %d on",
                self.indexes.rows_indexed,
                extra={"shard": str(self.shard_id), "generation": self.generation},
            )
        if not self._index_on_insert:
            self._measure_at = 0
        self.index_seconds += time.perf_counter() - started
        return self._indexed_rows - before

    @property
    def unindexed_rows(self) -> int:
        return 0 if self._index_failed or not self.indexes.specs else self.row_count - self._indexed_rows

    def show(self, end_position: int) -> None:
        """Make batches below the writer-wide ``end_position`` visible; never hides any."""
        self._visible_batches = max(self._visible_batches, end_position - self.first_position)

    def note_durable(self, end_position: int, wal_position: int) -> None:
        """Batches below ``end_position`` are in the WAL, the last of them at ``wal_position``."""
        self._durable_batches = max(self._durable_batches, end_position - self.first_position)
        self.covered_wal_position = max(self.covered_wal_position, wal_position)
        self.show(end_position)

    def view(self) -> MemTableView:
        """What is visible now, fixed."""
        visible = self._visible_batches
        return MemTableView(
            self.shard_id,
            self.generation,
            self.schema,
            self._batches[:visible],
            self.indexes,
            self._first_rows[visible],
        )
