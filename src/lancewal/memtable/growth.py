"""What readers find out about a MemTable, kept for those that come after them.

A MemTable only grows. Going through thousands of small batches costs more than most
reads of them, so each batch is gone through once, by the first reader that sees it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.format.schema import TOMBSTONE, no_rows
from lancewal.index.store import IndexStore


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
