"""MemTable: the rows of one generation, in insert order, readable while they grow.

One thread inserts at a time (the writer's lock sees to that); any number read. A
reader takes a :class:`MemTableView`, which is fixed: rows that come later are not in it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.format import TOMBSTONE, TableSchema, no_rows
from lancewal.index import IndexStore

logger = logging.getLogger(__name__)

# What readers find out about a MemTable, kept for those that come after them.
#
# A MemTable only grows. Going through thousands of small batches costs more than most
# reads of them, so each batch is gone through once, by the first reader that sees it.


class _Seen(NamedTuple):
    """The first ``batches`` of a MemTable as one table, and where its deletes are."""

    batches: int
    rows: pa.Table
    deletes: npt.NDArray[np.int64]


_seen: weakref.WeakKeyDictionary[IndexStore, _Seen] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def rows_of(
    owner: IndexStore, batches: Sequence[pa.RecordBatch], schema: pa.Schema, row_count: int
) -> pa.Table:
    """The rows of the first batches of a MemTable; chunks are the batches, nothing is copied."""
    rows = _grown(owner, batches, schema).rows
    return rows if rows.num_rows == row_count else rows.slice(0, row_count)


def deletes_of(
    owner: IndexStore, batches: Sequence[pa.RecordBatch], schema: pa.Schema
) -> npt.NDArray[np.int64]:
    """The positions of the deletes in at least the first batches of a MemTable, ascending."""
    return _grown(owner, batches, schema).deletes


def _grown(owner: IndexStore, batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> _Seen:
    seen = _seen.get(owner)
    if seen is not None and seen.batches >= len(batches):
        return seen
    with _lock:
        seen = _seen.get(owner)
        if seen is None:
            seen = _Seen(0, no_rows(schema), np.empty(0, np.int64))
        fresh = batches[seen.batches :]
        if fresh:
            added = pa.Table.from_batches(fresh, schema)
            found = [seen.deletes]
            first = seen.rows.num_rows
            for batch in fresh:
                marks = batch.column(TOMBSTONE)
                if marks.true_count:
                    found.append(first + np.flatnonzero(marks.to_numpy(zero_copy_only=False)))
                first += batch.num_rows
            rows = pa.concat_tables([seen.rows, added]) if seen.batches else added
            seen = _seen[owner] = _Seen(len(batches), rows, np.concatenate(found))
    return seen


# A fixed look at one MemTable: newest row per key, without what was deleted.


class MemTableView:
    """The first rows of a MemTable, as many as were visible when the view was taken.

    Row positions count from the MemTable's first row, all versions and tombstones
    included; they order versions of a key.
    """

    def __init__(
        self,
        shard_id: UUID,
        generation: int,
        schema: TableSchema,
        batches: Sequence[pa.RecordBatch],
        indexes: IndexStore,
        row_count: int | None = None,
    ) -> None:
        """``row_count``, if it is known, is that of ``batches``."""
        self.shard_id = shard_id
        self.generation = generation
        self.schema = schema
        self.batches = batches
        self.indexes = indexes
        self.row_count = sum(batch.num_rows for batch in batches) if row_count is None else row_count

    @cached_property
    def stored(self) -> pa.Table:
        """Every row, in insert order, with the tombstone column; chunks are the batches."""
        return rows_of(self.indexes, self.batches, self.schema.stored, self.row_count)

    @cached_property
    def tombstones(self) -> npt.NDArray[np.bool_]:
        """Which rows are deletes."""
        deletes = deletes_of(self.indexes, self.batches, self.schema.stored)
        mask = np.zeros(self.row_count, dtype=np.bool_)
        mask[deletes[: deletes.searchsorted(self.row_count)]] = True
        return mask

    @cached_property
    def newest_mask(self) -> npt.NDArray[np.bool_]:
        """Which rows are the newest version of their key here, deletes included."""
        if not self.schema.primary_key:
            return np.ones(self.row_count, dtype=np.bool_)
        keys = self.indexes.primary_key
        keys.catch_up(self.batches)
        return keys.live_mask(self.row_count)

    @cached_property
    def live_mask(self) -> npt.NDArray[np.bool_]:
        """Which rows a scan returns: newest version of their key, and not a delete."""
        return self.newest_mask & ~self.tombstones

    def count_live(self) -> int:
        return int(np.count_nonzero(self.live_mask))

    def newest_positions(self, keys: pa.Array) -> npt.NDArray[np.int64]:
        """The newest row of each key (in the key index's form), -1 where there is none."""
        index = self.indexes.primary_key
        index.catch_up(self.batches)
        return index.newest(keys, self.row_count)

    def take(self, positions: npt.NDArray[np.int64], columns: Sequence[str]) -> pa.Table:
        """Rows by position, in the order asked."""
        return self.stored.select(list(columns)).take(pa.array(positions))

    def live_rows(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows that a scan of this view returns, in insert order."""
        chosen = self.stored.select(list(columns if columns is not None else self.schema.names))
        mask = self.live_mask
        return chosen if mask.all() else chosen.filter(pa.array(mask))


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
