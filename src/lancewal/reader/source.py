"""Source: one level of a table, which is a MemTable or log tail, an SSTable, or the base table.

All levels have the same interface. A level leaves out rows that a newer version in the level itself
replaces, and rows whose keys a newer level has (:class:`Newer`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.format import KeySet
from lancewal.index import CorpusStatistics, FullTextParams, Metric, Vector
from lancewal.predicate import Predicate
from lancewal.sstable import KeyProbe
from lancewal.storage import lazy_property

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Values = npt.NDArray[np.float32]

ABSENT = -1

DISTANCE = "_distance"
SCORE = "_score"


class Source(Protocol):
    """One level. ``newer`` has the keys and hidden rows that the levels above it know of."""

    @property
    def name(self) -> str:
        """The name that the column ``_source`` shows."""

    @property
    def shard_id(self) -> UUID | None:
        """The shard of the level; ``None`` for the base table."""

    @property
    def generation(self) -> int: ...

    @property
    def in_memory(self) -> bool:
        """Whether the rows are not flushed yet; other levels wait for I/O."""

    def batches(self, request: Request, newer: Newer) -> Iterator[pa.RecordBatch]:
        """The rows that the request asks for."""

    def count(self, predicate: Predicate | None, newer: Newer) -> int:
        """How many rows :meth:`batches` would return; reads no more than counting needs."""

    def look_up(self, keys: KeyProbe, columns: Sequence[str]) -> Found:
        """The newest rows of ``keys``, which are distinct."""

    def nearest(self, query: NearestQuery, newer: Newer) -> Hits:
        """The ``k`` rows whose vectors are nearest."""

    def words(self, query: WordsQuery, newer: Newer) -> list[TextLevel]:
        """The parts of the level for full-text search, each of which is indexed in one way."""

    def take(self, rows: Rows, columns: Sequence[str]) -> pa.Table:
        """Rows that a search found, in the order of ``rows``."""

    def explain(self, predicate: Predicate | None) -> str:
        """How the rows are read and filtered."""


class ShardLevel(Source, Protocol):
    """A level above the base. Its keys, including those of deletes, hide rows of older levels."""

    @property
    def identity(self) -> Hashable:
        """The cache key for what is known about the keys of an SSTable; ``None`` for rows in memory."""

    def keys(self) -> KeySet:
        """All keys of the level, independent of any filter."""

    def key_values(self) -> pa.Array:
        """The key of every row that may be visible, in the type of the table's key."""

    def hide(self, superseded: Mask) -> Hidden:
        """The hidden rows of the level; ``superseded`` marks keys of :meth:`key_values`."""


@dataclass(frozen=True)
class Hidden:
    """A mask of the rows of a level that newer levels hide (``None``: none), and the number of live rows."""

    rows: Mask | None
    live: int

    @property
    def nbytes(self) -> int:
        return 0 if self.rows is None else self.rows.nbytes


@dataclass(eq=False)
class Newer:
    """What newer levels hide in one level: rows that are known to be hidden, and keys that hide others."""

    key_sets: Sequence[KeySet] = ()
    hidden: Hidden | None = None

    @property
    def hidden_rows(self) -> Mask | None:
        """A mask of the rows that are known to be hidden; ``None`` if there are none."""
        return None if self.hidden is None else self.hidden.rows

    @lazy_property
    def keys(self) -> list[KeySet]:
        """The non-empty key sets, which must be probed one by one."""
        return [keys for keys in self.key_sets if len(keys)]

    @lazy_property
    def levels(self) -> list[KeySet]:
        """The non-empty key set of each newer level."""
        return self.keys

    def __len__(self) -> int:
        """An upper bound of the number of keys."""
        return sum(map(len, self.keys))

    def contains(self, keys: pa.Array) -> Mask:
        """A mask of ``keys`` that a newer level has."""
        found = np.zeros(len(keys), np.bool_)
        for each in self.keys:
            found |= each.contains(keys)
        return found

    def without(self, live: Mask, keys: Callable[[], pa.Array]) -> Mask:
        """``live`` without the rows that newer levels hide; ``keys`` returns the keys of all its rows."""
        if self.hidden_rows is not None:
            live = live & ~self.hidden_rows
        return live & ~self.contains(keys()) if len(self) else live


@dataclass(frozen=True)
class Request:
    """Which rows and columns are wanted; ``limit`` is how many rows are enough (``None``: all)."""

    columns: Sequence[str]
    predicate: Predicate | None = None
    limit: int | None = None


class Found(NamedTuple):
    """The result of a lookup in one level. Keys are numbered in the order of the request.

    ``known`` are the numbers of the keys that the level has, deletes included. ``rows`` are the rows that
    are not deleted, and ``numbers`` has the number of the key of each row.
    """

    known: Rows
    rows: pa.Table
    numbers: Rows

    @classmethod
    def nothing(cls) -> Found:
        """The result of a level that has none of the keys."""
        return _NOTHING

    @classmethod
    def at(cls, positions: Rows, take: Callable[[Rows], tuple[pa.Table, Mask]]) -> Found:
        """The rows at ``positions``, one for each key; ``ABSENT`` is for a key that the level does not have.

        ``take`` returns the rows at some positions, and which of them are deletes.
        """
        if len(positions) == 1:  # the most frequent case, so it avoids numpy's masks
            if positions[0] == ABSENT:
                return _NOTHING
            rows, deleted = take(positions)
            return cls(_FIRST, rows.slice(1), _NO_ROWS) if deleted[0] else cls(_FIRST, rows, _FIRST)
        known = np.flatnonzero(positions != ABSENT)
        if not len(known):
            return _NOTHING
        rows, deleted = take(positions[known])
        if deleted.any():
            return cls(known, rows.filter(pa.array(~deleted)), known[~deleted])
        return cls(known, rows, known)


_NO_ROWS: Rows = np.empty(0, np.int64)
_FIRST: Rows = np.zeros(1, np.int64)
_NOTHING = Found(_NO_ROWS, pa.table({}), _NO_ROWS)


@dataclass(frozen=True)
class NearestQuery:
    """A vector search, checked against the table."""

    column: str
    vector: Vector
    k: int
    metric: Metric
    predicate: Predicate | None
    nprobes: int
    refine_factor: int


@dataclass(frozen=True)
class WordsQuery:
    """A full-text search, checked against the table."""

    column: str
    field_id: int
    text: str
    k: int
    params: FullTextParams
    operator: str = "or"
    phrase: bool = False
    predicate: Predicate | None = None


class TextLevel(Protocol):
    """Rows of one level whose words are indexed in one way."""

    @property
    def waits(self) -> bool:
        """Whether it reads from storage."""

    @property
    def scores_alone(self) -> bool:
        """Whether its rows are scored against its own statistics, not those of the whole table."""

    def statistics(self) -> CorpusStatistics:
        """The part of its live rows in the statistics of the table."""

    def search(self, corpus: CorpusStatistics) -> Hits:
        """Its best ``k`` rows, best first."""


@dataclass(frozen=True)
class Hits:
    """Rows of one level with their distances or scores, best first."""

    source: Source
    rows: Rows
    values: Values

    @classmethod
    def none(cls, source: Source) -> Hits:
        return cls(source, _NO_ROWS, np.empty(0, np.float32))

    @classmethod
    def joined(cls, source: Source, parts: Sequence[tuple[Rows, Values]]) -> Hits:
        if not parts:
            return cls.none(source)
        rows, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return cls(source, rows, values)
