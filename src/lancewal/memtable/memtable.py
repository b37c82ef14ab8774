"""MemTable: the rows of one generation, in insert order, readable while they grow.

One thread inserts at a time (the writer's lock ensures that); any number of threads read. A reader takes a
:class:`MemTableView`, which is fixed: rows that come later are not in it.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.config import ShardWriterConfig
from lancewal.format import (
    TOMBSTONE,
    KeySet,
    TableSchema,
    checked_columns,
    key_values,
    no_rows,
    one_array,
    shown,
)
from lancewal.index import FullTextIndex, FullTextParams, IndexStore
from lancewal.predicate import Predicate, selected

logger = logging.getLogger(__name__)

Mask = npt.NDArray[np.bool_]

#: Up to this many rows are sliced out of their batches one by one. More are taken in one call, which joins
#: all batches first: that takes milliseconds for thousands of batches with vectors.
FEW_ROWS = 256


class _Seen(NamedTuple):
    """The first rows of a MemTable as one table, and the positions of the deletes."""

    rows: pa.Table
    deletes: npt.NDArray[np.int64]


class RowsSoFar:
    """The data that grows with a MemTable: its indexes, and what readers computed about its rows.

    Going through thousands of small batches costs more than most reads. A MemTable only grows, so only the
    first reader that sees a batch processes it, and the others reuse the result. Every method may be called
    from any thread.
    """

    def __init__(self, schema: TableSchema, indexes: IndexStore) -> None:
        self.schema = schema
        self.indexes = indexes
        self._lock = threading.Lock()
        #: The first row of each batch, then the number of rows; only ever appended to.
        self.starts: list[int] = [0]
        # Both are replaced as a whole.
        self._seen = _Seen(no_rows(schema.stored), np.empty(0, np.int64))
        self._keys: tuple[int, KeySet] = (0, KeySet.empty())
        self._texts: dict[tuple[int, FullTextParams], _GrowingTextIndex] = {}

    def of(self, view: MemTableView) -> _Seen:
        """The rows of ``view``, and perhaps some later ones."""
        seen = self._seen
        if seen.rows.num_rows >= view.row_count:
            return seen
        with self._lock:
            seen = self._seen
            first = seen.rows.num_rows
            fresh = view.batches_from(first)
            if not fresh:
                return seen
            added = pa.Table.from_batches(fresh, self.schema.stored)
            deletes = [seen.deletes]
            for batch in fresh:
                marks = batch.column(TOMBSTONE)
                if marks.true_count:
                    deletes.append(first + np.flatnonzero(marks.to_numpy(zero_copy_only=False)))
                first += batch.num_rows
            rows = pa.concat_tables([seen.rows, added]) if seen.rows.num_rows else added
            self._seen = _Seen(rows, np.concatenate(deletes))
            return self._seen

    def hold(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Replace the batches that were seen by ``batches``, which have the same rows in fewer pieces.

        Does nothing if another reader has seen more rows than ``batches`` have.
        """
        with self._lock:
            rows = self._seen.rows.num_rows
            held = pa.Table.from_batches(batches, self.schema.stored)
            if 0 < rows <= held.num_rows:
                self._seen = _Seen(held.slice(0, rows), self._seen.deletes)

    def starts_of(self, batches: Sequence[pa.RecordBatch]) -> list[int]:
        """The first row of each of ``batches``, then the number of their rows; perhaps with later ones."""
        if len(self.starts) <= len(batches):
            with self._lock:
                for batch in batches[len(self.starts) - 1 :]:
                    self.starts.append(self.starts[-1] + batch.num_rows)
        return self.starts

    def keys(self, view: MemTableView) -> KeySet:
        """The keys of the rows of ``view``, including those of deletes."""
        known_rows, known = self._keys
        if known_rows == view.row_count:
            return known
        if known_rows > view.row_count:
            return KeySet.of([view.keys()])
        grown = known | KeySet.of([view.keys(known_rows)])
        self._keys = (view.row_count, grown)
        return grown

    def text_index(
        self, field_id: int, params: FullTextParams, column: pa.ChunkedArray, first: int
    ) -> FullTextIndex:
        """An index of a column from row ``first`` on; its positions count from there.

        ``column`` has the rows that the caller sees; the index may also hold later ones.
        """
        key = (field_id, params)
        made = self._texts.get(key) or self._texts.setdefault(key, _GrowingTextIndex(params, first))
        if made.first != first:
            # The MemTable's own index has advanced, so this one starts again behind it.
            made = self._texts[key] = _GrowingTextIndex(params, first)
        with made.lock:
            missing = column.slice(first + made.index.rows)
            if len(missing):
                made.index.insert(one_array(missing), made.index.rows)
        return made.index


class _GrowingTextIndex:
    """An index of the rows from ``first`` on."""

    def __init__(self, params: FullTextParams, first: int) -> None:
        self.first = first
        self.index = FullTextIndex(params)
        self.lock = threading.Lock()


class MemTableView:
    """The first rows of a MemTable, as many as were visible when the view was taken.

    Row positions count from the MemTable's first row, with all versions and tombstones. They give the order
    of the versions of a key.
    """

    def __init__(
        self,
        shard_id: UUID,
        generation: int,
        batches: Sequence[pa.RecordBatch],
        rows: RowsSoFar,
        starts: Sequence[int] | None = None,
    ) -> None:
        """``starts`` are the first rows of ``batches``, if they are not the batches that ``rows`` grew by."""
        self.shard_id = shard_id
        self.generation = generation
        self.batches = batches
        self.rows = rows
        self.schema = rows.schema
        self.indexes = rows.indexes
        self._starts = rows.starts_of(batches) if starts is None else starts
        self.row_count = self._starts[len(batches)]

    @cached_property
    def stored(self) -> pa.Table:
        """Every row, in insert order, with the tombstone column; chunks are the batches, not copies."""
        rows = self.rows.of(self).rows
        return rows if rows.num_rows == self.row_count else rows.slice(0, self.row_count)

    @cached_property
    def tombstones(self) -> Mask:
        """A mask of the rows that are deletes."""
        deletes = self.rows.of(self).deletes
        mask = np.zeros(self.row_count, dtype=np.bool_)
        mask[deletes[: deletes.searchsorted(self.row_count)]] = True
        return mask

    @cached_property
    def newest_mask(self) -> Mask:
        """A mask of the rows that are the newest version of their key in this view, deletes included."""
        keys = self.indexes.primary_key
        if keys is None:
            return np.ones(self.row_count, dtype=np.bool_)
        keys.catch_up(self.batches)
        return keys.live_mask(self.row_count)

    @cached_property
    def live_mask(self) -> Mask:
        """A mask of the rows that a scan returns: the newest version of their key, and not a delete."""
        return ~self.tombstones & self.newest_mask

    def newest_positions(self, keys: pa.Array) -> npt.NDArray[np.int64]:
        """The newest row of each key (in the key index's form); -1 for a key without one."""
        index = self.indexes.primary_key
        assert index is not None, "a table without a primary key has no keys to look up"
        index.catch_up(self.batches)
        return index.newest(keys, self.row_count)

    def keys(self, first: int = 0) -> pa.Array:
        """The key of every row from ``first`` on, older versions and deletes included."""
        return key_values([self.stored.column(name).slice(first) for name in self.schema.primary_key])

    def rows_at(self, positions: npt.NDArray[np.int64]) -> pa.Table:
        """The rows at ``positions``, in this order, with the tombstone column."""
        if len(positions) > FEW_ROWS:
            return self.stored.take(pa.array(positions))
        pieces = []
        for position in positions.tolist():
            place = self._batch_of(position)
            pieces.append(self.batches[place].slice(position - self._starts[place], 1))
        return pa.Table.from_batches(pieces, self.schema.stored)

    def batches_from(self, first: int) -> list[pa.RecordBatch]:
        """The rows from position ``first`` on."""
        if first >= self.row_count:
            return []
        place = self._batch_of(first)
        skipped = first - self._starts[place]
        return [self.batches[place].slice(skipped), *self.batches[place + 1 :]]

    def _batch_of(self, position: int) -> int:
        return bisect_right(self._starts, position, hi=len(self.batches)) - 1


#: The memory that Python and Arrow need for a batch besides the rows (schema, arrays, buffers).
BATCH_OVERHEAD_BYTES = 1024
_SMALL_ROWS = 8192


class MemTable:
    """An append-only sequence of record batches with its indexes."""

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
        """``first_position`` is the writer-wide batch position that the first batch will have."""
        self.shard_id = shard_id
        self.schema = schema
        self.generation = generation
        self.indexes = indexes
        self._rows = RowsSoFar(schema, indexes)
        self._starts = self._rows.starts
        self.first_position = first_position
        self._index_on_insert = index_on_insert
        self._index_failed = False
        self._indexed_batches = 0
        self._indexed_rows = 0
        self._index_bytes = 0
        self._measure_at = 0
        #: All batches, visible or not; only :meth:`insert` adds to the list.
        self.batches: list[pa.RecordBatch] = []
        self.row_bytes = 0
        #: The last WAL position that holds rows of this MemTable; 0 before the first.
        self.covered_wal_position = 0
        self.index_seconds = 0.0

    def successor(self, generation: int | None = None) -> MemTable:
        """An empty MemTable for the batches after these; of the next generation unless another is given."""
        return MemTable(
            self.shard_id,
            self.schema,
            self.generation + 1 if generation is None else generation,
            IndexStore(self.indexes.specs, self.schema),
            self.end_position,
            index_on_insert=self._index_on_insert,
        )

    @property
    def batch_count(self) -> int:
        return len(self.batches)

    @property
    def row_count(self) -> int:
        return self._starts[-1]

    @property
    def end_position(self) -> int:
        """The writer-wide batch position after the last batch."""
        return self.first_position + len(self.batches)

    @property
    def estimated_size(self) -> int:
        """Bytes held by rows, bookkeeping and indexes; 0 without rows, because a flush would free nothing."""
        if not self.batches:
            return 0
        rows = self._starts[-1]
        if rows >= self._measure_at:
            self._index_bytes = self.indexes.memory_bytes
            # Every put reads this size several times, and a few rows change it little.
            self._measure_at = rows + max(rows, _SMALL_ROWS) // 64
        return self.row_bytes + self._index_bytes

    def takes(self, rows: int, batches: int, limits: ShardWriterConfig) -> bool:
        """Whether this many more fit without exceeding a limit; an empty MemTable takes any number."""
        count = len(self.batches)
        return not count or (
            self.estimated_size < limits.max_memtable_size
            and self._starts[-1] + rows <= limits.max_memtable_rows
            and count + batches <= limits.max_memtable_batches
        )

    def insert(self, batches: Sequence[pa.RecordBatch], num_bytes: int) -> None:
        """Add ``batches``, which have the schema ``schema.stored`` and a size of ``num_bytes``."""
        for batch in batches:
            self.batches.append(batch)
            self._starts.append(self._starts[-1] + batch.num_rows)
        self.row_bytes += num_bytes + BATCH_OVERHEAD_BYTES * len(batches)
        if self._index_on_insert:
            self.update_indexes()

    def update_indexes(self, max_rows: int | None = None) -> int:
        """Index the rows that are not indexed yet: whole batches, until ``max_rows`` are reached.

        If an index fails, this MemTable stops indexing, and later rows are searched one by one. A failed
        index must not make a put fail or a shard unwritable.
        """
        if self._index_failed or not self.indexes.specs:
            return 0
        started = time.perf_counter()
        before = self._indexed_rows
        try:
            for index in range(self._indexed_batches, len(self.batches)):
                batch = self.batches[index]
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

    def view(self, end_position: int) -> MemTableView:
        """A fixed view of the batches below the writer-wide ``end_position``."""
        batches = self.batches[: max(end_position - self.first_position, 0)]
        return MemTableView(self.shard_id, self.generation, batches, self._rows)


def scan_views(
    views: Sequence[MemTableView],
    schema: TableSchema,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
) -> pa.Table:
    """The live rows of some MemTables, oldest generation first.

    The newest version of a key is chosen across all of them before ``filter`` is applied.
    """
    names = checked_columns(columns, schema)
    predicate = Predicate.parse(filter, schema.plain) if filter is not None else None
    wanted = pa.schema([schema.plain.field(name) for name in names])
    parts = None if predicate is None else _looked_up(views, schema, names, predicate)
    if parts is None:
        parts = [
            selected(shown(view.stored, schema), mask, names, predicate)
            for view, mask in zip(views, _live_masks(views), strict=True)
        ]
    found = [pa.Table.from_arrays(part.columns, schema=wanted) for part in parts if part.num_rows]
    return pa.concat_tables(found) if found else no_rows(wanted)


def _looked_up(
    views: Sequence[MemTableView], schema: TableSchema, columns: Sequence[str], predicate: Predicate
) -> list[pa.Table] | None:
    """The matching rows, found by the key index, if the filter names all keys; else ``None``."""
    keys = predicate.values_of(schema.primary_key[0]) if len(schema.primary_key) == 1 else None
    if keys is None:
        return None
    parts = []
    for view in reversed(views):
        positions = view.newest_positions(keys)
        found = positions[positions >= 0]
        rows = shown(view.rows_at(found), schema)
        parts.append(selected(rows, ~deleted_rows(rows), columns, predicate))
        keys = keys.filter(pa.array(positions < 0))
    return parts


def deleted_rows(stored: pa.Table) -> Mask:
    """A mask of the rows that are deletes."""
    return np.asarray(stored.column(TOMBSTONE).to_numpy(), np.bool_)


def _live_masks(views: Sequence[MemTableView]) -> list[Mask]:
    """For each view, oldest first, a mask of the rows that no later row of any view replaces or deletes."""
    masks = []
    for place, view in enumerate(views):
        mask = view.live_mask
        for newer in views[place + 1 :]:
            if view.schema.primary_key and newer.row_count and view.row_count:
                mask = mask & ~_superseded(view, newer)
        masks.append(mask)
    return masks


def _superseded(older: MemTableView, newer: MemTableView) -> Mask:
    """A mask of the older view's newest rows that have a version, or a delete, in the newer view.

    Rows that are already replaced within the older view may or may not be marked.
    """
    if older.row_count <= newer.row_count:
        return newer.newest_positions(older.keys()) >= 0
    mask = np.zeros(older.row_count, np.bool_)
    positions = older.newest_positions(newer.keys())
    mask[positions[positions >= 0]] = True
    return mask
