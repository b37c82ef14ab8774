"""BTreeIndex: rows by value, for equality, sets, ranges and nulls.

New rows go to a short tail that is searched by comparing; a full tail is sorted
into a run, and neighbouring runs are merged so that their sizes grow geometrically.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.index.kinds import RowPositions, already_in, grown
from lancewal.index.runs import (
    BytesRuns,
    NumberRuns,
    Range,
    SortedRuns,
    is_bytes_like,
    is_number_like,
    values_array,
)


class BTreeIndex:
    """The values of one column in order.

    Tombstones have NULL in columns beside the key, so :meth:`nulls` names them too:
    the caller drops dead rows, here as everywhere.

    >>> index = BTreeIndex(pa.int64())
    >>> index.insert(pa.array([30, 10, None, 20]), 0)
    >>> found = (index.between(10, 20), index.nulls(), index.equal_to([30]))
    >>> [rows.below(4).tolist() for rows in found]
    [[1, 3], [2], [0]]
    """

    def __init__(self, type_: pa.DataType) -> None:
        if not is_supported(type_):
            raise InvalidInputError(f"a BTree index cannot hold values of type {type_}")
        self.type = type_
        self._runs: SortedRuns = NumberRuns() if is_number_like(type_) else BytesRuns()
        self._nulls = np.empty(0, np.int32)
        self._null_count = 0
        self._rows = 0

    @property
    def rows(self) -> int:
        """Rows below this position are in the index."""
        return self._rows

    @property
    def memory_bytes(self) -> int:
        return self._runs.memory_bytes + self._nulls.nbytes

    def insert(self, column: pa.Array, first_row: int) -> None:
        """Add the values of ``column``, the first of which is at ``first_row``."""
        if column.type != self.type:
            raise InvalidInputError(f"the index holds {self.type}, the batch {column.type}")
        known = already_in(self._rows, first_row, len(column))
        if known == len(column):
            return
        if known:
            column = column.slice(known)
        end = self._rows + len(column)
        rows = np.arange(self._rows, end, dtype=np.int32)
        missing = rows[:0]
        if column.null_count:
            valid = column.is_valid().to_numpy(zero_copy_only=False)
            missing, rows, column = rows[~valid], rows[valid], column.drop_null()
        null_count = self._null_count + len(missing)
        nulls = grown(self._nulls, self._null_count, null_count)
        nulls[self._null_count : null_count] = missing
        # Runs take the values whole or not at all; nothing fails after them.
        if len(rows):
            self._runs.append(column, rows)
        self._nulls, self._null_count, self._rows = nulls, null_count, end

    def equal_to(self, values: Any) -> Matches:
        """All rows with one of ``values``, NULL excepted."""
        wanted = values_array(values, self.type).drop_null().unique()
        return Matches(self._runs.equal_to(wanted) if len(wanted) else [])

    def between(
        self, low: Any = None, high: Any = None, low_inclusive: bool = True, high_inclusive: bool = True
    ) -> Matches:
        """All rows with a value between ``low`` and ``high``; None leaves a side open."""
        least = None if low is None else values_array([low], self.type)
        greatest = None if high is None else values_array([high], self.type)
        return Matches(self._runs.between(Range(least, greatest, low_inclusive, high_inclusive)))

    def nulls(self) -> Matches:
        """All rows without a value."""
        # The count first: the array that is read after it holds at least as many.
        count = self._null_count
        return Matches([self._nulls[:count]])


@dataclass(frozen=True)
class Matches:
    """Rows that were found, as they lie in the index: their number costs nothing, their order does."""

    parts: Sequence[npt.NDArray[np.int32]]

    def __len__(self) -> int:
        """How many there are, those at or above any bound included."""
        return sum(map(len, self.parts))

    def below(self, bound: int) -> RowPositions:
        """Those below ``bound``, in order."""
        if not self.parts:
            return np.empty(0, np.int64)
        rows = self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)
        return np.sort(rows[rows < bound]).astype(np.int64)


def is_supported(type_: pa.DataType) -> bool:
    """Can a BTree index hold values of this type?"""
    return is_number_like(type_) or is_bytes_like(type_)
