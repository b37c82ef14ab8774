"""IndexStore: all indexes of one MemTable, and the rows that they leave to test for a filter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.errors import InvalidInputError, LanceWalError
from lancewal.format import TableSchema
from lancewal.index.btree import BTreeIndex, Matches
from lancewal.index.full_text import FullTextIndex
from lancewal.index.kinds import FullTextParams, IndexSpec, Metric, RowPositions, VectorParams
from lancewal.index.primary_key import PrimaryKeyIndex
from lancewal.index.vector import VectorIndex
from lancewal.predicate import Among, Compare, Condition, Every, IsNull, Predicate

#: If a BTree leaves more than this share of the rows, testing every row is as fast.
_MAX_SHARE = 0.125


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


class Narrowed(NamedTuple):
    """Ascending rows that include all matching ones; found by the BTree on ``column``."""

    column: str
    rows: RowPositions


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

    def narrowed(
        self, predicate: Predicate, names: Mapping[str, str | None], row_count: int
    ) -> Narrowed | None:
        """The rows below ``row_count`` that must be tested after the best BTree; ``None`` if no BTree helps.

        ``names`` has the MemTable's name of each column of the predicate; ``None`` for one that it lacks.
        """
        best: _Choice | None = None
        for column, wanted in _wanted(predicate.conditions).items():
            name = names[column]
            index = None if name is None else self.btree(name)
            if index is None or not wanted.fits(index.type):
                continue
            unindexed = max(row_count - index.rows, 0)
            matches = wanted.matches(index)
            if best is None or len(matches) + unindexed < best.rows_left:
                best = _Choice(column, matches, row_count - unindexed, len(matches) + unindexed)
        if best is None or best.rows_left > _MAX_SHARE * row_count:
            return None
        found = best.matches.below(best.indexed)
        return Narrowed(best.column, np.concatenate([found, np.arange(best.indexed, row_count)]))

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


class _Choice(NamedTuple):
    column: str
    matches: Matches
    indexed: int
    rows_left: int


class _End(NamedTuple):
    """One end of a range."""

    value: pa.Scalar
    inclusive: bool


@dataclass
class _Wanted:
    """The conditions on one column, all of which must be met."""

    values: pa.Array | None = None
    lows: list[_End] = field(default_factory=list)
    highs: list[_End] = field(default_factory=list)
    null: bool = False

    def add(self, condition: Among | Compare | IsNull) -> None:
        if isinstance(condition, IsNull):
            self.null = True
        elif isinstance(condition, Among):
            known, values = self.values, condition.values
            self.values = values if known is None else known.filter(pc.is_in(known, value_set=values))
        else:
            ends = self.lows if condition.operator in (">", ">=") else self.highs
            ends.append(_End(condition.value, condition.operator in (">=", "<=")))

    def fits(self, type_: pa.DataType) -> bool:
        """Whether all values have the type of the index."""
        values = [self.values] if self.values is not None else []
        return all(each.type == type_ for each in [*values, *(end.value for end in self.lows + self.highs)])

    def matches(self, index: BTreeIndex) -> Matches:
        """A superset of the rows that meet the conditions."""
        if not all(end.value.is_valid for end in self.lows + self.highs):
            return Matches([])
        if self.values is not None:
            return index.equal_to(self.values)
        if self.null:
            return index.nulls()
        low, high = _strictest(self.lows, max), _strictest(self.highs, min)
        return index.between(
            low.value if low else None,
            high.value if high else None,
            low.inclusive if low else True,
            high.inclusive if high else True,
        )


def _strictest(ends: Sequence[_End], choose: Callable[..., _End]) -> _End | None:
    """The highest low end, or the lowest high end; exclusive if one of the equal ends is."""
    if not ends:
        return None
    value = choose(ends, key=lambda end: end.value.as_py()).value
    return _End(value, all(end.inclusive for end in ends if end.value == value))


def _wanted(conditions: Iterable[Condition]) -> dict[str, _Wanted]:
    """By column, the conditions that a BTree can answer."""
    found: dict[str, _Wanted] = {}
    for condition in _flat(conditions):
        if len(condition.path) == 1:
            found.setdefault(condition.path[0], _Wanted()).add(condition)
    return found


def _flat(conditions: Iterable[Any]) -> Iterator[Among | Compare | IsNull]:
    for condition in conditions:
        if isinstance(condition, Every):
            yield from _flat(condition.parts)
        elif isinstance(condition, Compare):
            if condition.operator in ("<", "<=", ">", ">="):
                yield condition
        elif isinstance(condition, Among | IsNull) and not condition.negated:
            yield condition
