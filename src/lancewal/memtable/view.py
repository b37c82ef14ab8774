"""A fixed look at one MemTable: newest row per key, without what was deleted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.format.schema import TableSchema
from lancewal.index.store import IndexStore
from lancewal.memtable.growth import deletes_of, rows_of


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
