"""Search results of several levels: filled up to ``k``, cut to the best, and turned into rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format import KeySet, no_rows
from lancewal.reader.source import Mask, Rows, Source
from lancewal.reader.state import Snapshot
from lancewal.storage import ordered_map

T = TypeVar("T")
R = TypeVar("R")
Values = npt.NDArray[np.float32]

_MAX_AT_ONCE = 4


@dataclass(frozen=True)
class Hits:
    """Rows of one level (``None``: the base, by row id) with their distances or scores, best first."""

    source: Source | None
    rows: Rows
    values: Values

    @classmethod
    def none(cls, source: Source | None) -> Hits:
        return cls(source, np.empty(0, np.int64), np.empty(0, np.float32))

    @classmethod
    def joined(cls, source: Source | None, parts: Sequence[tuple[Rows, Values]]) -> Hits:
        if not parts:
            return cls.none(source)
        rows, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return cls(source, rows, values)

    def __len__(self) -> int:
        return len(self.rows)


class Candidates(NamedTuple):
    """What Lance found in one level, best first, and which of it no newer level replaces."""

    rows: Rows
    values: Values
    live: Mask

    def in_order(self, *, largest_first: bool) -> Candidates:
        """Best first, and equally good ones by row: Lance leaves their order open."""
        order = np.lexsort((self.rows, -self.values if largest_first else self.values))
        return Candidates(self.rows[order], self.values[order], self.live[order])


def filled_up(fetch: Callable[[int], Candidates], k: int, rows: int, superseded: int) -> tuple[Rows, Values]:
    """The best ``k`` live rows of a level that has ``rows`` rows, ``superseded`` of them replaced.

    ``fetch(n)`` gives the best ``n`` rows, fewer when there are no more. It is asked for more
    until enough are left: a row that was replaced must not take a fresh one's place.
    """
    wanted = min(2 * k if superseded else k, rows)
    while wanted:
        found = fetch(wanted)
        kept = np.flatnonzero(found.live)[:k]
        if len(kept) == k or len(found.rows) < wanted or wanted == rows:
            return found.rows[kept], found.values[kept]
        sure = k + superseded
        wanted = min(4 * wanted, sure if wanted < sure else rows, rows)
    return np.empty(0, np.int64), np.empty(0, np.float32)


def by_level(call: Callable[[tuple[Source | None, KeySet]], R], snapshot: Snapshot) -> list[R]:
    """``call`` for every level and the keys that are newer, newest level first.

    The base is ``None``, and comes last; without rows it is left out.
    """
    levels: list[tuple[Source | None, KeySet]] = list(snapshot.levels())
    if snapshot.base.manifest.fragment_ids:
        levels.append((None, snapshot.newer_than_base()))
    waiting = sum(source is None or not source.in_memory for source, _ in levels)
    return at_once(call, levels, waiting)


def at_once(call: Callable[[T], R], items: Sequence[T], waiting: int) -> list[R]:
    """``call`` for every item, in order; several at a time where more than one of them waits for I/O."""
    return list(ordered_map(call, items, min(waiting, _MAX_AT_ONCE)))


def best_rows(
    snapshot: Snapshot,
    parts: Sequence[Hits],
    k: int,
    columns: Sequence[str],
    value_name: str,
    *,
    largest_first: bool,
) -> pa.Table:
    """The best ``k`` of all hits as a table with ``value_name`` as its last column.

    Of equally good rows those of the level that comes first in ``parts`` come first.
    """
    parts = [part for part in parts if len(part)]
    shown = pa.schema([*(snapshot.schema.plain.field(name) for name in columns), (value_name, pa.float32())])
    if not parts:
        return no_rows(shown)
    values = np.concatenate([part.values for part in parts])
    order = np.argsort(-values if largest_first else values, kind="stable")[:k]
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    rows = np.concatenate([part.rows for part in parts])
    tables, places = [], []
    for number, part in enumerate(parts):
        chosen = np.flatnonzero(owners[order] == number)
        if len(chosen):
            tables.append(_taken(snapshot, part.source, rows[order[chosen]], columns))
            places.append(chosen)
    found = pa.concat_tables(tables).combine_chunks()
    if len(tables) > 1:
        found = found.take(pa.array(np.argsort(np.concatenate(places))))
    return pa.Table.from_arrays([*found.columns, pa.array(values[order])], schema=shown)


def _taken(snapshot: Snapshot, source: Source | None, rows: Rows, columns: Sequence[str]) -> pa.Table:
    shown = pa.schema([snapshot.schema.plain.field(name) for name in columns])
    table = snapshot.base_source.take(rows, columns) if source is None else source.take(rows, columns)[0]
    return pa.Table.from_arrays(table.columns, schema=shown)


def checked_column(snapshot: Snapshot, column: str) -> pa.DataType:
    """The type of a column to search; refuses one that the table does not have."""
    if column not in snapshot.schema.field_ids:
        raise InvalidInputError(
            f"the table has no column {column!r}; its columns are {', '.join(snapshot.schema.names)}"
        )
    return snapshot.schema.plain.field(column).type


def checked_number(name: str, value: Any) -> int:
    """A whole number of at least 1."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise InvalidInputError(f"{name} must be a whole number of at least 1, got {value!r}")
    return number
