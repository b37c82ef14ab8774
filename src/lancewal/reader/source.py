"""Source: one level of a table, which is a MemTable or log tail, an SSTable, or the base table.

Every level answers the same questions. It leaves out rows that a newer version in the level itself
replaces, and rows whose keys a newer level has: :class:`Newer` tells which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.format import KeySet, TableSchema, refuse_added
from lancewal.index import CorpusStatistics, FullTextParams, Metric, Vector
from lancewal.predicate import Predicate
from lancewal.sstable import KeyProbe
from lancewal.storage import lazy_property

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Values = npt.NDArray[np.float32]

ABSENT = -1
#: Times as many rows as a search wants; one odd query must not make the next one slow.
_LEAST_SURPLUS, _MOST_SURPLUS = 2.0, 16.0

DISTANCE = "_distance"
SCORE = "_score"
#: The columns that say where a row came from.
SOURCE = "_source"
SHARD_ID = "_shard_id"
_LABELS = [pa.field(SOURCE, pa.string(), nullable=False), pa.field(SHARD_ID, pa.string())]

_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)


class Source(Protocol):
    """One level. ``newer`` is what the levels above it say."""

    @property
    def name(self) -> str:
        """As the column ``_source`` shows it."""

    @property
    def shard_id(self) -> UUID | None:
        """The base table has none."""

    @property
    def generation(self) -> int: ...

    @property
    def in_memory(self) -> bool:
        """Whether the rows were not flushed yet; other levels wait for I/O."""

    def batches(self, request: Request, newer: Newer) -> Iterator[pa.RecordBatch]:
        """The rows that the request is about."""

    def count(self, predicate: Predicate | None, newer: Newer) -> int:
        """How many rows :meth:`batches` would give, without reading more than it takes."""

    def look_up(self, keys: KeyProbe, columns: Sequence[str]) -> Found:
        """The newest rows of some keys, each of which is asked for once."""

    def nearest(self, query: NearestQuery, newer: Newer) -> Hits:
        """The ``k`` rows whose vectors are nearest."""

    def words(self, query: WordsQuery, newer: Newer) -> list[TextLevel]:
        """The level as full-text search sees it: some parts, each indexed in one way."""

    def take(self, rows: Rows, columns: Sequence[str]) -> pa.Table:
        """Rows that a search found, in the order asked."""

    def explain(self, predicate: Predicate | None) -> str:
        """How the rows are read and filtered."""


class ShardLevel(Source, Protocol):
    """A level above the base. Its keys, those of deletes included, hide rows of older levels."""

    @property
    def identity(self) -> Hashable:
        """What is found out about the keys of an SSTable is kept by this; rows in memory have none."""

    def keys(self) -> KeySet:
        """All keys here, whatever a filter says."""

    def key_values(self) -> pa.Array:
        """The key of every row that could be shown, in the type that the table's key has."""

    def hide(self, superseded: Mask) -> Hidden:
        """What is left when the rows of some of :meth:`key_values` go."""


@dataclass(frozen=True)
class Hidden:
    """By row number, which rows of a level newer levels hide, ``None`` if none, and how many others live."""

    rows: Mask | None
    live: int

    @property
    def nbytes(self) -> int:
        return 0 if self.rows is None else self.rows.nbytes


class Newer:
    """What is newer than one level: rows that are known to be hidden, and keys that hide others."""

    def __init__(self, keys: Iterable[KeySet] = (), hidden: Hidden | None = None) -> None:
        self._keys = keys
        self.hidden = hidden

    @lazy_property
    def keys(self) -> list[KeySet]:
        """Sets to be asked one by one, none of them empty."""
        return [keys for keys in self._keys if len(keys)]

    @lazy_property
    def levels(self) -> list[KeySet]:
        """The keys of each newer level that has any."""
        return self.keys

    @property
    def hidden_rows(self) -> Mask | None:
        """By row number, those that are known to be hidden; ``None`` if none is."""
        return None if self.hidden is None else self.hidden.rows

    def __len__(self) -> int:
        """How many keys there are, at most."""
        return sum(map(len, self.keys))

    def contains(self, keys: pa.Array) -> Mask:
        found = np.zeros(len(keys), np.bool_)
        for each in self.keys:
            found |= each.contains(keys)
        return found


@dataclass(frozen=True)
class Request:
    """Which rows and columns are wanted; ``limit`` is how many rows are enough (``None``: all)."""

    columns: Sequence[str]
    predicate: Predicate | None = None
    limit: int | None = None


def sql_of(predicate: Predicate | None) -> str | None:
    """A filter as Lance takes it."""
    return None if predicate is None else predicate.sql


class Found(NamedTuple):
    """What a level knows of some keys, which are numbered in the order asked.

    ``known`` are the numbers of the keys that it has, deletes included. ``rows`` are those that are
    not deleted, and ``numbers`` tells which key each row is for.
    """

    known: Rows
    rows: pa.Table
    numbers: Rows

    @classmethod
    def nothing(cls) -> Found:
        """None of the keys."""
        return _NOTHING

    @classmethod
    def at(cls, positions: Rows, take: Callable[[Rows], tuple[pa.Table, Mask]]) -> Found:
        """The rows at ``positions``, one for each key, ``ABSENT`` for a key that is not here.

        ``take`` gives rows by position, and which of them are deletes.
        """
        if len(positions) == 1:  # so often that it goes without numpy's masks
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
        """What its live rows add to the statistics of the table."""

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

    @classmethod
    def filled_up(
        cls,
        source: Source,
        fetch: Callable[[int], Candidates],
        k: int,
        rows: int,
        superseded: int,
        surplus: Surplus,
    ) -> Hits:
        """The best ``k`` live rows of a level that has ``rows`` rows, ``superseded`` of them replaced.

        ``fetch(n)`` gives the best ``n`` rows, fewer when there are no more. It is asked for more
        until enough are left: a row that was replaced must not take a fresh one's place.
        """
        wanted = min(surplus.candidates(k) if superseded else k, rows)
        while wanted:
            found = fetch(wanted)
            kept = np.flatnonzero(found.live)[:k]
            if len(kept) == k or len(found.rows) < wanted or wanted == rows:
                if superseded and len(kept) == k:
                    surplus.learn(k, int(kept[-1]) + 1)
                return cls(source, found.rows[kept], found.values[kept])
            sure = k + superseded
            wanted = min(4 * wanted, sure if wanted < sure else rows, rows)
        return cls.none(source)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class Surplus:
    """How many more rows than wanted a search asks a level for, because newer ones hide some.

    Twice as many as the search before needed: asking again costs a round trip or two.
    """

    factor: float = _LEAST_SURPLUS

    def candidates(self, k: int) -> int:
        return math.ceil(self.factor * k)

    def learn(self, k: int, needed: int) -> None:
        """So many rows were needed to have ``k`` that live."""
        self.factor = min(max(_LEAST_SURPLUS, 2 * needed / k), _MOST_SURPLUS)


class Candidates(NamedTuple):
    """What Lance found in one level, best first, and which of it no newer level replaces."""

    rows: Rows
    values: Values
    live: Mask

    def in_order(self, *, largest_first: bool) -> Candidates:
        """Best first, and equally good ones by row: Lance leaves their order open."""
        order = np.lexsort((self.rows, -self.values if largest_first else self.values))
        return Candidates(self.rows[order], self.values[order], self.live[order])


def newest_first(in_memory: bool, generation: int, shard_id: UUID) -> tuple[bool, int, UUID]:
    """The order of levels of several shards that may hold versions of one key.

    What is newer in two shards nothing on storage says, so it is a rule: rows in memory or in
    the WAL before flushed ones, then the higher generation, then the lower shard id. Reads of every kind
    follow it, and compaction does: it brings levels into the base in the opposite order, so
    that at no moment an older level lies over a newer one. (Flushing moves rows in the order; only the
    rows of one shard are for certain in the order of their puts.)
    """
    return not in_memory, -generation, shard_id


def shown_schema(schema: TableSchema, columns: Sequence[str], row_source: bool) -> pa.Schema:
    """What a read of ``columns`` returns."""
    if row_source:
        refuse_added(schema, SOURCE, SHARD_ID)
    fields = [schema.plain.field(name) for name in columns]
    return pa.schema([*fields, *_LABELS] if row_source else fields)


def labelled(rows: _Rows, source: Source) -> _Rows:
    """``rows`` with the columns that name their source."""
    shard = None if source.shard_id is None else str(source.shard_id)
    for field, value in zip(_LABELS, (source.name, shard), strict=True):
        rows = rows.append_column(field, pa.repeat(pa.scalar(value, pa.string()), rows.num_rows))
    return rows
