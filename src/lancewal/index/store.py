"""IndexStore: all indexes of one MemTable."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

import pyarrow as pa

from lancewal.errors import InvalidInputError, LanceWalError
from lancewal.format import TableSchema
from lancewal.index.btree import BTreeIndex
from lancewal.index.full_text import FullTextIndex
from lancewal.index.kinds import FullTextParams, IndexSpec, Metric, VectorParams
from lancewal.index.primary_key import PrimaryKeyIndex
from lancewal.index.vector import VectorIndex


class ColumnIndex(Protocol):
    """The interface of every index of a column.

    One thread inserts while any number of threads search. Rows are inserted in order, each batch whole or
    not at all, and rows that are already in the index are skipped.
    """

    @property
    def rows(self) -> int:
        """Rows below this position are in the index."""

    @property
    def memory_bytes(self) -> int:
        """Bytes held in addition to the MemTable's own; cheap to read."""

    def insert(self, column: pa.Array, first_row: int) -> None:
        """Add the values of a batch, the first of which is at ``first_row``."""


class IndexInsertError(LanceWalError):
    """Some indexes did not take a batch; ``failures`` has the cause by index name.

    The other indexes have the batch. The failed ones are unchanged: search the rows from
    ``IndexStore.rows_indexed`` on without an index, or repeat the insertion.
    """

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        self.failures = dict(failures)
        reasons = "; ".join(f"{name}: {error}" for name, error in self.failures.items())
        super().__init__(
            f"rows could not be indexed ({reasons}); they can be read and searched without index"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (IndexInsertError, (self.failures,))


_Index = TypeVar("_Index", bound=ColumnIndex)


class IndexStore:
    """The primary-key index and the maintained indexes of one MemTable.

    :meth:`insert` adds rows to the maintained indexes. Readers bring the primary-key index up to
    date themselves (:meth:`PrimaryKeyIndex.catch_up`).
    """

    def __init__(self, specs: Iterable[IndexSpec], schema: TableSchema) -> None:
        self.specs = tuple(specs)
        #: The index of the newest row of each key; ``None`` for a table without a primary key.
        self.primary_key = PrimaryKeyIndex(schema.primary_key) if schema.primary_key else None
        # Indexes of the same kind and parameters on one column give the same answers: one replaces both.
        self._indexes: dict[IndexSpec, ColumnIndex] = {}
        for spec in self.specs:
            if all((spec.column, spec.params) != (other.column, other.params) for other in self._indexes):
                self._indexes[spec] = _new_index(spec, schema)
        # Columns by position: a lookup by name takes as long as some insertions.
        self._targets = [
            (spec.name, schema.names.index(spec.column), index) for spec, index in self._indexes.items()
        ]
        self._seconds = {spec.name: 0.0 for spec in self._indexes}
        self._rows = 0

    @property
    def rows_indexed(self) -> int:
        """Rows below this position are in every maintained index."""
        return min((index.rows for index in self._indexes.values()), default=self._rows)

    @property
    def memory_bytes(self) -> int:
        """Bytes held by all indexes, the primary key's included."""
        keys = 0 if self.primary_key is None else self.primary_key.memory_bytes
        return keys + sum(index.memory_bytes for index in self._indexes.values())

    @property
    def seconds(self) -> Mapping[str, float]:
        """Time spent inserting, by index name."""
        return dict(self._seconds)

    def insert(self, batch: pa.RecordBatch, first_row: int) -> None:
        """Add a batch of ``TableSchema.stored`` rows to every maintained index.

        If an index fails, the others still take the batch; :class:`IndexInsertError` names the failed ones.
        """
        failures: dict[str, Exception] = {}
        for name, place, index in self._targets:
            started = time.perf_counter()
            try:
                index.insert(batch.column(place), first_row)
            except Exception as error:
                failures[name] = error
            self._seconds[name] += time.perf_counter() - started
        if failures:
            raise IndexInsertError(failures)
        self._rows = max(self._rows, first_row + batch.num_rows)

    def btree(self, column: str) -> BTreeIndex | None:
        """The BTree of a column, if there is one."""
        return self._first(column, BTreeIndex)

    def full_text(self, column: str) -> FullTextIndex | None:
        """The full-text index of a column, if there is one; the first of several."""
        return self._first(column, FullTextIndex)

    def vector(self, column: str, metric: Metric | None = None) -> VectorIndex | None:
        """The vector index of a column, with ``metric`` if one is given; the first of several."""
        for spec, index in self._indexes.items():
            if (
                spec.column == column
                and isinstance(index, VectorIndex)
                and metric in (None, index.params.metric)
            ):
                return index
        return None

    def _first(self, column: str, class_: type[_Index]) -> _Index | None:
        for spec, index in self._indexes.items():
            if spec.column == column and isinstance(index, class_):
                return index
        return None


def _new_index(spec: IndexSpec, schema: TableSchema) -> ColumnIndex:
    if spec.column not in schema.names:
        raise InvalidInputError(
            f"index {spec.name!r} is on {spec.column!r}, which is not a column of the table"
        )
    if isinstance(spec.params, FullTextParams):
        return FullTextIndex(spec.params)
    if isinstance(spec.params, VectorParams):
        return VectorIndex(spec.params)
    return BTreeIndex(schema.columns.field(spec.column).type)
