"""PrimaryKeyIndex: which row is the newest version of its key.

For every row the index knows the row that it replaced and the row that replaced it. This answers a lookup
for any bound, so that readers with different snapshots share one index.

The keys that were inserted last are in a dictionary, which is the fastest structure for a lookup. All others
are in runs, sorted by a word of each key, because a Python object takes ten times the bytes of a key. Runs
are merged as they grow, so that there are few.
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
import pyarrow.compute as pc

from lancewal.errors import InvalidInputError
from lancewal.format import key_values, key_words
from lancewal.index.kinds import RowMask, RowPositions, batches_not_yet_in, grown

_NEVER = np.iinfo(np.int64).max
_FIRST_CAPACITY = 256
#: Bytes of a Python int that is a dictionary value, and of the header of a text or bytes key.
_INT_BYTES = 32
_OBJECT_BYTES = 49
#: At most this many keys are Python objects.
_MAX_OBJECTS = 16_384
#: A run is merged with the run before it, unless that run has at least this many times its keys.
_FAN_OUT = 4


class _Seen(NamedTuple):
    """How far the last catch-up went: the number of batches, the last batch, and the number of rows."""

    batches: int
    last: pa.RecordBatch | None
    rows: int


class _Run(NamedTuple):
    """Keys, sorted by their words, each with its row.

    A key may occur more than once; then its newest row is last. ``values`` are the keys, or ``None`` for
    numbers, which are their own words.
    """

    words: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.int64]
    values: pa.Array | None

    @classmethod
    def of(cls, keys: pa.Array, rows: npt.NDArray[np.int64]) -> _Run:
        """A run of ``keys``, none of which is null, with their ``rows``; older rows come first."""
        words = key_words(keys)
        order = np.argsort(words, kind="stable")
        values = None if pa.types.is_primitive(keys.type) else keys.take(pa.array(order))
        return cls(words[order], rows[order], values)._without_older()

    def merged_with(self, newer: _Run) -> _Run:
        words = np.concatenate([self.words, newer.words])
        # A stable sort of sorted parts is a merge.
        order = np.argsort(words, kind="stable")
        values = None
        if self.values is not None:
            values = pa.concat_arrays([self.values, newer.values]).take(pa.array(order))
        rows = np.concatenate([self.rows, newer.rows])[order]
        return _Run(words[order], rows, values)._without_older()

    def find(self, words: npt.NDArray[np.uint64], keys: pa.Array) -> npt.NDArray[np.int64]:
        """The newest rows of ``keys``, whose words are ``words``; -1 for a key that is not in the run."""
        places = np.searchsorted(self.words, words, side="right") - 1
        asked = np.flatnonzero((places >= 0) & (self.words[places] == words))
        found = np.full(len(words), -1, np.int64)
        if self.values is None:
            found[asked] = self.rows[places[asked]]
            return found
        # The key column may have a wider type now; numbers have the same words in both types.
        wanted = keys.take(pa.array(asked)).cast(self.values.type)
        same = _equal(self.values.take(pa.array(places[asked])), wanted)
        found[asked[same]] = self.rows[places[asked[same]]]
        for number in asked[~same].tolist():
            # The place holds another key with the same word. This is rare, so it may be slow.
            first = np.searchsorted(self.words, words[number])
            there = self.values.slice(first, places[number] - first).to_pylist()
            key = keys[number].as_py()
            if key in there:
                found[number] = self.rows[first + len(there) - 1 - there[::-1].index(key)]
        return found

    def _without_older(self) -> _Run:
        """Drop a key that is followed by itself: the index leads from the last row to the older ones."""
        older = np.flatnonzero(self.words[1:] == self.words[:-1])
        values = self.values
        if values is not None and len(older):
            older = older[_equal(values.take(pa.array(older)), values.take(pa.array(older + 1)))]
        if not len(older):
            return self
        kept = np.delete(np.arange(len(self.words)), older)
        return _Run(
            self.words[kept], self.rows[kept], None if values is None else values.take(pa.array(kept))
        )

    @property
    def nbytes(self) -> int:
        values = 0 if self.values is None else int(self.values.nbytes)
        return self.words.nbytes + self.rows.nbytes + values


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
        # Oldest first. A later run, and the dictionary, has a newer row of a key than an earlier run.
        self._runs: tuple[_Run, ...] = ()
        self._type: pa.DataType | None = None
        self._previous = np.empty(_FIRST_CAPACITY, np.int64)
        self._superseded_at = np.empty(_FIRST_CAPACITY, np.int64)
        #: Rows below this position are in the index.
        self.rows = 0
        self._key_bytes = 0
        # Readers bring the index up to date themselves, so insertions may be concurrent.
        self._insert_lock = threading.Lock()
        self._seen = _Seen(0, None, 0)

    @property
    def memory_bytes(self) -> int:
        tables = self._previous.nbytes + self._superseded_at.nbytes + sys.getsizeof(self._newest)
        runs = sum(run.nbytes for run in self._runs)
        return tables + runs + self._key_bytes + len(self._newest) * _INT_BYTES

    def insert(self, batch: pa.RecordBatch, first_row: int) -> None:
        """Add the rows of ``batch``, the first of which is at ``first_row``."""
        with self._insert_lock:
            self._insert([batch], first_row)

    def catch_up(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Add those rows of ``batches``, which are all batches of a MemTable, that are not in the index yet.

        Called before every read; rows that are already in the index cost nothing.
        """
        with self._insert_lock:
            seen = self._seen
            if 0 < seen.batches <= len(batches) and batches[seen.batches - 1] is seen.last:
                rows = seen.rows + self._insert(batches[seen.batches :], seen.rows)
            else:
                rows = self._insert(batches, 0)
            # Other batches may hold the same rows, so remember only batches that hold all of them.
            if batches and rows == self.rows:
                self._seen = _Seen(len(batches), batches[-1], rows)

    def live_mask(self, bound: int) -> RowMask:
        """A mask of the rows below ``bound`` that are the newest version of their key below ``bound``."""
        self._check_bound(bound)
        live: RowMask = self._superseded_at[:bound] >= bound
        return live

    def newest(self, keys: Sequence[Hashable] | pa.Array, bound: int) -> RowPositions:
        """The newest row below ``bound`` of each key; -1 for a key without one.

        ``keys`` are in the form of :func:`lancewal.format.keys.key_values`, as an array or as
        Python values.
        """
        self._check_bound(bound)
        positions = self._found(keys)
        # Read this array after the keys: it then covers every position that was found.
        previous = self._previous
        while (above := np.flatnonzero(positions >= bound)).size:
            positions[above] = previous[positions[above]]
        return positions

    def _found(self, keys: Sequence[Hashable] | pa.Array) -> RowPositions:
        """The newest row of each key in the index at this moment; -1 for a key without one."""
        wanted = _hashable(keys) if isinstance(keys, (pa.Array, pa.ChunkedArray)) else keys
        # Read the dictionary before the runs: a key that moves to a run is in both for a moment.
        newest = self._newest
        positions = np.fromiter(map(newest.get, wanted, repeat(-1)), np.int64, len(wanted))
        runs = self._runs
        missing = np.flatnonzero(positions < 0) if runs else ()
        if len(missing):
            asked = keys if isinstance(keys, pa.Array) else pa.array(wanted, self._type)
            asked = asked if len(missing) == len(asked) else asked.take(pa.array(missing))
            if asked.null_count:
                valid = asked.is_valid()
                missing, asked = missing[valid.to_numpy(zero_copy_only=False)], asked.filter(valid)
            positions[missing] = _in_runs(runs, asked)
        return positions

    def _check_bound(self, bound: int) -> None:
        if not 0 <= bound <= self.rows:
            raise InvalidInputError(f"bound {bound} is outside the {self.rows} rows of the key index")

    def _insert(self, batches: Sequence[pa.RecordBatch], first_row: int) -> int:
        """Insert the new rows of ``batches``; return the number of all their rows."""
        count: int = sum(batch.num_rows for batch in batches)
        fresh = batches_not_yet_in(batches, self.rows, first_row)
        if fresh:
            end = first_row + count
            # Readers use only the entries of rows that are in the index.
            self._previous = grown(self._previous, self.rows, end)
            self._superseded_at = grown(self._superseded_at, self.rows, end)
            columns = [[batch.column(name) for batch in fresh] for name in self.key_columns]
            values = key_values([c[0] if len(c) == 1 else pa.concat_arrays(c) for c in columns])
            self._type = values.type
            for start in range(0, len(values), _MAX_OBJECTS):
                self._insert_some(values.slice(start, _MAX_OBJECTS))
        return count

    def _insert_some(self, values: pa.Array) -> None:
        self._add(_hashable(values), self.rows)
        if pa.types.is_primitive(values.type):
            self._key_bytes += len(values) * _INT_BYTES
        else:
            self._key_bytes += len(values) * _OBJECT_BYTES + values.nbytes
        if len(self._newest) > _MAX_OBJECTS:
            self._move_to_run()

    def _move_to_run(self) -> None:
        """Move all keys of the dictionary to a run, except the null, which no run can hold."""
        keys = {key: row for key, row in self._newest.items() if key is not None}
        run = _Run.of(pa.array(list(keys), self._type), np.fromiter(keys.values(), np.int64, len(keys)))
        runs = list(self._runs)
        while runs and len(runs[-1].words) < _FAN_OUT * len(run.words):
            run = runs.pop().merged_with(run)
        self._runs = (*runs, run)
        self._newest = {key: row for key, row in self._newest.items() if key is None}
        self._key_bytes = 0

    def _add(self, keys: list[Hashable], first: int) -> None:
        end = first + len(keys)
        rows = range(first, end)
        newest = dict(zip(keys, rows, strict=True))
        if len(newest) == len(keys):
            replaced = self._found(keys)
        else:
            replaced = self._replaced_with_duplicates(keys, first)
        self._previous[first:end] = replaced
        self._superseded_at[first:end] = _NEVER
        replacing = np.flatnonzero(replaced >= 0)
        self._superseded_at[replaced[replacing]] = replacing + first
        # Fill the arrays before the dictionary, which leads readers into them.
        self._newest.update(newest)
        self.rows = end

    def _replaced_with_duplicates(self, keys: list[Hashable], first: int) -> npt.NDArray[np.int64]:
        within: dict[Hashable, int] = {}
        replaced = self._found(keys)
        for offset, key in enumerate(keys):
            if key in within:
                replaced[offset] = within[key]
            within[key] = first + offset
        return replaced


def _in_runs(runs: Sequence[_Run], keys: pa.Array) -> RowPositions:
    positions = np.full(len(keys), -1, np.int64)
    missing = np.arange(len(keys))
    words = key_words(keys)
    for run in reversed(runs):
        asked = keys if len(missing) == len(keys) else keys.take(pa.array(missing))
        positions[missing] = run.find(words[missing], asked)
        missing = missing[positions[missing] < 0]
        if not len(missing):
            break
    return positions


def _equal(first: pa.Array, second: pa.Array) -> RowMask:
    same: RowMask = pc.equal(first, second).to_numpy(zero_copy_only=False)
    return same


def _hashable(values: pa.Array) -> list[Hashable]:
    """The values as Python objects, converted in C."""
    listed: list[Hashable] = (
        values.to_numpy(zero_copy_only=False).tolist() if _is_primitive(values) else values.to_pylist()
    )
    return listed


def _is_primitive(values: pa.Array) -> bool:
    # A null would turn a numpy column of integers into floats.
    return isinstance(values, pa.Array) and pa.types.is_primitive(values.type) and values.null_count == 0
