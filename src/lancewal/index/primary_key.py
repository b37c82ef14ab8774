"""PrimaryKeyIndex: which row is the newest version of its key.

For every row the index knows the row that it replaced and the row that replaced it. That
answers for any bound, so that readers with different snapshots share one index.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format import key_values
from lancewal.index.kinds import RowMask, RowPositions, already_in, grown

_NEVER = np.iinfo(np.int64).max
_FIRST_CAPACITY = 256
#: Bytes of a Python int that is a dictionary value, and of the header of a text or bytes key.
_INT_BYTES = 32
_OBJECT_BYTES = 49


class _Seen(NamedTuple):
    """How far the last catch-up went: the number of batches, the last one, and their rows."""

    batches: int
    last: pa.RecordBatch | None
    rows: int


class PrimaryKeyIndex:
    """Last-write-wins bookkeeping of one MemTable.

    >>> index = PrimaryKeyIndex(["id"])
    >>> index.insert(pa.record_batch({"id": [1, 2, 1]}), 0)
    >>> index.live_mask(3).tolist(), index.live_mask(2).tolist()
    ([False, True, True], [True, True])
    >>> index.newest([1, 2, 3], 3).tolist()
    [2, 1, -1]
    """

    def __init__(self, key_columns: Sequence[str]) -> None:
        if not key_columns:
            raise InvalidInputError("a primary key index needs at least one key column")
        self.key_columns = tuple(key_columns)
        self._newest: dict[Hashable, int] = {}
        self._previous = np.empty(_FIRST_CAPACITY, np.int64)
        self._superseded_at = np.empty(_FIRST_CAPACITY, np.int64)
        self._rows = 0
        self._key_bytes = 0
        # Readers bring the index up to date themselves, so insertions may run concurrently.
        self._insert_lock = threading.Lock()
        self._seen = _Seen(0, None, 0)

    @property
    def rows(self) -> int:
        """Rows below this position are in the index."""
        return self._rows

    @property
    def memory_bytes(self) -> int:
        tables = self._previous.nbytes + self._superseded_at.nbytes + sys.getsizeof(self._newest)
        return tables + self._key_bytes + len(self._newest) * _INT_BYTES

    def insert(self, batch: pa.RecordBatch, first_row: int) -> None:
        """Add the rows of ``batch``, the first of which is at ``first_row``."""
        with self._insert_lock:
            self._insert([batch], first_row)

    def catch_up(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Add the rows of ``batches``, which are all of a MemTable's, that are not in yet.

        Called before every read: rows that are in already cost nothing.
        """
        with self._insert_lock:
            seen = self._seen
            if 0 < seen.batches <= len(batches) and batches[seen.batches - 1] is seen.last:
                self._insert(batches[seen.batches :], seen.rows)
            else:
                self._insert(batches, 0)
            if len(batches) > seen.batches:
                self._seen = _Seen(len(batches), batches[-1], self._rows)

    def live_mask(self, bound: int) -> RowMask:
        """For each row below ``bound``: is it the newest version of its key below ``bound``?"""
        self._check_bound(bound)
        live: RowMask = self._superseded_at[:bound] >= bound
        return live

    def newest(self, keys: Sequence[Hashable] | pa.Array, bound: int) -> RowPositions:
        """The newest row below ``bound`` of each key, -1 where there is none.

        ``keys`` are in the form of :func:`lancewal.format.keys.key_values`, as an array or as
        Python values.
        """
        self._check_bound(bound)
        wanted = _hashable(keys) if isinstance(keys, (pa.Array, pa.ChunkedArray)) else keys
        positions = np.fromiter(map(self._newest.get, wanted, repeat(-1)), np.int64, len(wanted))
        # Read after the dictionary: it covers every position that the dictionary named.
        previous = self._previous
        while (above := np.flatnonzero(positions >= bound)).size:
            positions[above] = previous[positions[above]]
        return positions

    def _check_bound(self, bound: int) -> None:
        if not 0 <= bound <= self._rows:
            raise InvalidInputError(f"bound {bound} is outside the {self._rows} rows of the key index")

    def _insert(self, batches: Sequence[pa.RecordBatch], first_row: int) -> None:
        known = already_in(self._rows, first_row, sum(batch.num_rows for batch in batches))
        fresh = _without_first(batches, known)
        if not fresh:
            return
        columns = [[batch.column(name) for batch in fresh] for name in self.key_columns]
        values = key_values([c[0] if len(c) == 1 else pa.concat_arrays(c) for c in columns])
        self._add(_hashable(values), self._rows)
        if pa.types.is_primitive(values.type):
            self._key_bytes += len(values) * _INT_BYTES
        else:
            self._key_bytes += len(values) * _OBJECT_BYTES + values.nbytes

    def _add(self, keys: list[Hashable], first: int) -> None:
        end = first + len(keys)
        rows = range(first, end)
        newest = dict(zip(keys, rows, strict=True))
        if len(newest) == len(keys):
            replaced = np.fromiter(map(self._newest.get, keys, repeat(-1)), np.int64, len(keys))
        else:
            replaced = self._replaced_with_duplicates(keys, first)
        previous = grown(self._previous, first, end)
        superseded_at = grown(self._superseded_at, first, end)
        previous[first:end] = replaced
        superseded_at[first:end] = _NEVER
        replacing = np.flatnonzero(replaced >= 0)
        superseded_at[replaced[replacing]] = replacing + first
        # The arrays first, then the dictionary that leads readers into them.
        self._previous, self._superseded_at = previous, superseded_at
        self._newest.update(newest)
        self._rows = end

    def _replaced_with_duplicates(self, keys: list[Hashable], first: int) -> npt.NDArray[np.int64]:
        within: dict[Hashable, int] = {}
        replaced = np.empty(len(keys), np.int64)
        for offset, key in enumerate(keys):
            replaced[offset] = within[key] if key in within else self._newest.get(key, -1)
            within[key] = first + offset
        return replaced


def _without_first(batches: Sequence[pa.RecordBatch], rows: int) -> list[pa.RecordBatch]:
    kept = []
    for batch in batches:
        if rows < batch.num_rows:
            kept.append(batch.slice(rows) if rows else batch)
        rows = max(0, rows - batch.num_rows)
    return kept


def _hashable(values: pa.Array) -> list[Hashable]:
    """The values as Python objects, made in C."""
    listed: list[Hashable] = (
        values.to_numpy(zero_copy_only=False).tolist() if _is_primitive(values) else values.to_pylist()
    )
    return listed


def _is_primitive(values: pa.Array) -> bool:
    # A null would turn a numpy column of integers into floats.
    return isinstance(values, pa.Array) and pa.types.is_primitive(values.type) and values.null_count == 0
