"""MemorySource: a MemTable, or the tail of a WAL, as one level of a merged read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.format import ColumnSource, KeySet, TableSchema, column_sources, key_values
from lancewal.index import BTreeIndex, IndexStore, Matches
from lancewal.memtable import FEW_ROWS, MemTableView, deleted_rows, rows_at, selected
from lancewal.predicate import Among, Compare, Condition, Every, IsNull, Predicate
from lancewal.reader.source import Mask, Request, Rows
from lancewal.sstable import KeyProbe

# BTrees of a MemTable, asked which of its rows a filter can be about.


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


#: The keys of a MemTable as of a number of rows. A MemTable only grows, so a later
#: reader adds what is new.
_key_sets: weakref.WeakKeyDictionary[IndexStore, tuple[int, KeySet]] = weakref.WeakKeyDictionary()


class MemorySource:
    """Rows in memory, shown as the columns of ``schema`` whatever schema they were written with."""

    in_memory = True

    def __init__(self, view: MemTableView, schema: TableSchema) -> None:
        self._view = view
        self._schema = schema

    @property
    def name(self) -> str:
        return f"memtable:{self._view.generation}"

    @property
    def shard_id(self) -> UUID:
        return self._view.shard_id

    @property
    def generation(self) -> int:
        return self._view.generation

    @property
    def row_count(self) -> int:
        return int(self._view.row_count)

    @property
    def view(self) -> MemTableView:
        return self._view

    def keys(self) -> KeySet:
        view = self._view
        known_rows, known = _key_sets.get(view.indexes, (0, KeySet.empty()))
        if known_rows == view.row_count:
            return known
        if known_rows > view.row_count:
            return KeySet.of([self._keys_from(0)])
        grown = known | KeySet.of([self._keys_from(known_rows)])
        _key_sets[view.indexes] = (view.row_count, grown)
        return grown

    def batches(self, request: Request, newer: KeySet) -> Iterator[pa.RecordBatch]:
        predicate = request.predicate
        found = None if predicate is None else self._found(predicate, newer)
        if found is not None:
            yield from self._rows_at(found, request.columns).to_batches()
            return
        names = set(request.columns).union(predicate.columns if predicate else ())
        rows = self._rows([name for name in self._schema.names if name in names])
        yield from selected(rows, self._live(newer), request.columns, predicate).to_batches()

    def count(self, predicate: Predicate | None, newer: KeySet) -> int:
        return int(np.count_nonzero(self.matching(predicate, newer)))

    def matching(self, predicate: Predicate | None, newer: KeySet) -> Mask:
        """By row position, which rows are live, not superseded by ``newer``, and match."""
        if predicate is None:
            return self._live(newer)
        found = self._found(predicate, newer)
        if found is not None:
            mask = np.zeros(self.row_count, np.bool_)
            mask[found] = True
            return mask
        rows = self._rows(sorted(predicate.columns) or self._schema.names[:1])
        return self._live(newer) & predicate.mask(rows)

    def narrowed(self, predicate: Predicate) -> Narrowed | None:
        """The rows that a BTree leaves to ask; ``None`` where all are asked."""
        return narrowed(predicate, self._view.indexes, self.written_name, self.row_count)

    def _found(self, predicate: Predicate, newer: KeySet) -> Rows | None:
        """The positions that :meth:`matching` marks, where a BTree leaves few to ask."""
        left = self.narrowed(predicate)
        if left is None:
            return None
        rows = left.rows[self._view.live_mask[left.rows]]
        names = list(self._schema.primary_key) if len(newer) else []
        asked = self._rows_at(rows, list(dict.fromkeys([*sorted(predicate.columns), *names])))
        kept = predicate.mask(asked)
        if names:
            kept &= ~newer.contains(key_values([asked.column(name) for name in names]))
        return rows[kept]

    def column(self, name: str) -> pa.ChunkedArray:
        """A column of all rows, by row position."""
        return self._rows([name]).column(0)

    def column_parts(
        self, name: str, first_row: int = 0, wanted: Mask | None = None
    ) -> Iterator[tuple[int, pa.ChunkedArray]]:
        """A column from ``first_row`` on, in order, each part with the position of its first row.

        Parts that hold no ``wanted`` row may be left out.
        """
        yield first_row, self.column(name).slice(first_row)

    def written_name(self, column: str) -> str | None:
        """What the MemTable, and its indexes, call a column; ``None`` when it has not got it."""
        sources = self._column_sources
        return column if sources is None else sources[column].stored_name

    def find(self, keys: KeyProbe) -> Rows:
        return self._view.newest_positions(keys.values)

    def take(self, positions: Rows, columns: Sequence[str]) -> tuple[pa.Table, Mask]:
        stored = rows_at(self._view, positions)
        return self._aligned(stored, columns), deleted_rows(stored)

    def _live(self, newer: KeySet) -> Mask:
        live = self._view.live_mask
        return live & ~newer.contains(self._keys_from(0)) if len(newer) else live

    def _keys_from(self, row: int) -> pa.Array:
        names = self._view.schema.primary_key
        return key_values([self._view.stored.column(name).slice(row) for name in names])

    def _rows(self, columns: Sequence[str]) -> pa.Table:
        return self._aligned(self._view.stored, columns)

    def _rows_at(self, positions: Rows, columns: Sequence[str]) -> pa.Table:
        if len(positions) <= FEW_ROWS:
            return self._aligned(rows_at(self._view, positions), columns).combine_chunks()
        return self._rows(columns).take(pa.array(positions))

    def _aligned(self, stored: pa.Table, columns: Sequence[str]) -> pa.Table:
        sources = self._column_sources
        if sources is None:
            return stored.select(list(columns))
        shown = pa.schema([self._schema.plain.field(name) for name in columns])
        return pa.Table.from_arrays([sources[name].array(stored) for name in columns], schema=shown)

    @cached_property
    def _column_sources(self) -> dict[str, ColumnSource] | None:
        """``None`` when the rows were written with the very schema that is shown."""
        written, shown = self._view.schema, self._schema
        as_stored = shown.shows_as_stored
        if as_stored and written.columns is shown.columns:
            return None
        same = written.columns.equals(shown.columns, check_metadata=True)
        if as_stored and same and not shown.replaced_since(written.version):
            return None
        return dict(column_sources(written.stored, shown, written.version))
