"""BTrees of a MemTable, asked which of its rows a filter can be about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.conditions import Among, Compare, Condition, Every, IsNull
from lancewal.index.btree import BTreeIndex, Matches
from lancewal.index.store import IndexStore
from lancewal.predicate import Predicate
from lancewal.reader.source import Rows

#: With more than this share of the rows left, asking every row is as fast.
_MAX_SHARE = 0.125


@dataclass(frozen=True)
class Narrowed:
    """Rows, ascending, among which all are that match; found by the BTree on ``column``."""

    column: str
    rows: Rows


def narrowed(
    predicate: Predicate, indexes: IndexStore, written_name: Callable[[str], str | None], row_count: int
) -> Narrowed | None:
    """The rows below ``row_count`` that some BTree leaves to ask; ``None`` where none helps.

    ``written_name`` gives the name that the MemTable has for a column.
    """
    best: _Choice | None = None
    for column, wanted in _wanted(predicate.conditions).items():
        name = written_name(column)
        index = None if name is None else indexes.btree(name)
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
    """What conditions that must all be met say about one column."""

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
        """Whether all values are of the type that an index holds."""
        values = [self.values] if self.values is not None else []
        return all(each.type == type_ for each in [*values, *(end.value for end in self.lows + self.highs)])

    def matches(self, index: BTreeIndex) -> Matches:
        """A superset of the rows that meet the conditions, by the strictest of them."""
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
    """The highest of the low ends, or the lowest of the high ones; of equal ones that without its value."""
    if not ends:
        return None
    value = choose(ends, key=lambda end: end.value.as_py()).value
    return _End(value, all(end.inclusive for end in ends if end.value == value))


def _wanted(conditions: Iterable[Condition]) -> dict[str, _Wanted]:
    """By column, what all of the conditions say that a BTree understands."""
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
