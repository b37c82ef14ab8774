"""The rows of a MemTable by key: which are newest, and in which order an index lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.errors import InvalidInputError
from lancewal.format.keys import key_values
from lancewal.format.spans import numbers

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class KeyOrder:
    """Distinct keys in ascending order, each with its newest row.

    ``newest`` marks those rows among all; ``None`` means all of them.
    """

    values: pa.Array
    rows: Rows
    newest: Mask | None

    @classmethod
    def of(cls, columns: Sequence[pa.Array | pa.ChunkedArray]) -> KeyOrder:
        """The order of rows whose later ones replace earlier ones of the same key.

        >>> order = KeyOrder.of([pa.array([7, 3, 7])])
        >>> order.values.to_pylist(), order.rows.tolist(), order.newest.tolist()
        ([3, 7], [1, 2], [False, True, True])
        """
        values = key_values(columns)
        if values.null_count:
            raise InvalidInputError(f"{values.null_count} rows have a null primary key; a key has a value")
        if _strictly_ascending(values):
            return cls(values, np.arange(len(values)), None)
        order = _stable_argsort(values)
        values = values.take(pa.array(order))
        last_of_key = _differs_from_next(values)
        if last_of_key.all():
            return cls(values, order, None)
        rows = order[last_of_key]
        newest = np.zeros(len(order), np.bool_)
        newest[rows] = True
        return cls(values.filter(pa.array(last_of_key)), rows, newest)

    def offsets(self) -> Rows:
        """Where each key's newest row lies once all other rows are left out."""
        if self.newest is None:
            return self.rows
        return (np.cumsum(self.newest, dtype=np.int64) - 1)[self.rows]


def _strictly_ascending(values: pa.Array) -> bool:
    return len(values) < 2 or bool(pc.all(pc.less(values[:-1], values[1:])).as_py())


def _stable_argsort(values: pa.Array) -> Rows:
    if pa.types.is_integer(values.type):
        return np.argsort(numbers(values), kind="stable").astype(np.int64, copy=False)
    # Arrow's sort is stable too.
    return np.asarray(pc.sort_indices(values).to_numpy(), np.int64)


def _differs_from_next(values: pa.Array) -> Mask:
    differs = np.ones(len(values), np.bool_)
    differs[:-1] = pc.not_equal(values[:-1], values[1:]).to_numpy(zero_copy_only=False)
    return differs
