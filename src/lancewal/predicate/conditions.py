"""Simple conditions on columns, evaluated by Arrow in SQL's three-valued logic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

#: A column, or a field of a struct column.
Path = tuple[str, ...]
#: From this many chunks on, copying a column costs less than a kernel call for each chunk.
_MANY_CHUNKS = 32

_KERNELS = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


class Condition(Protocol):
    """A condition that is true, false or null for each row."""

    @property
    def columns(self) -> frozenset[str]:
        """The top-level columns that it reads."""

    def evaluate(self, rows: pa.Table) -> pa.Array | pa.ChunkedArray: ...


@dataclass(frozen=True)
class Compare:
    """Compares a column with a value of its type; the result is null if either is null."""

    path: Path
    operator: str
    value: pa.Scalar

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(self.path[:1])

    def evaluate(self, rows: pa.Table) -> pa.Array | pa.ChunkedArray:
        return _KERNELS[self.operator](_column(rows, self.path), self.value)


@dataclass(frozen=True)
class Among:
    """Whether a column's value is in ``values``, which are distinct and not null.

    ``with_null`` means that the list also contained null: for a value that is not in the list the result is
    then null instead of false.
    """

    path: Path
    values: pa.Array
    negated: bool = False
    with_null: bool = False

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(self.path[:1])

    def evaluate(self, rows: pa.Table) -> pa.Array | pa.ChunkedArray:
        column = _column(rows, self.path)
        if len(self.values) == 1:
            found = pc.equal(column, self.values[0])
        else:
            found = pc.is_in(column, value_set=self.values)
            if column.null_count:
                found = pc.if_else(column.is_valid(), found, None)
        if self.with_null:
            found = pc.if_else(found, True, None)
        return pc.invert(found) if self.negated else found


@dataclass(frozen=True)
class IsNull:
    path: Path
    negated: bool = False

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(self.path[:1])

    def evaluate(self, rows: pa.Table) -> pa.Array | pa.ChunkedArray:
        column = _column(rows, self.path)
        return column.is_valid() if self.negated else column.is_null()


@dataclass(frozen=True)
class _Several:
    parts: Sequence[Condition]

    @property
    def columns(self) -> frozenset[str]:
        return frozenset().union(*(part.columns for part in self.parts))


class Every(_Several):
    """Whether all of several conditions are true."""

    def evaluate(self, rows: pa.Table) -> pa.Array | pa.ChunkedArray:
        return reduce(pc.and_kleene, (part.evaluate(rows) for part in self.parts))


class Some(_Several):
    """Whether at least one of several conditions is true."""

    def evaluate(self, rows: pa.Table) -> pa.Array | pa.ChunkedArray:
        return reduce(pc.or_kleene, (part.evaluate(rows) for part in self.parts))


@dataclass(frozen=True)
class Negation:
    part: Condition

    @property
    def columns(self) -> frozenset[str]:
        return self.part.columns

    def evaluate(self, rows: pa.Table) -> pa.Array | pa.ChunkedArray:
        return pc.invert(self.part.evaluate(rows))


def _column(rows: pa.Table, path: Path) -> pa.Array | pa.ChunkedArray:
    column = rows.column(path[0])
    if len(path) > 1:
        column = pc.struct_field(column, list(path[1:]))
    return column.combine_chunks() if column.num_chunks > _MANY_CHUNKS else column
