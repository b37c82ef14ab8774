"""Full-text search over all levels: rows by words, each key in its newest version only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import lance
import numpy as np
import pyarrow as pa
from lance.query import FullTextOperator, MatchQuery, PhraseQuery

from lancewal.base import lance_errors, row_count
from lancewal.errors import InvalidInputError
from lancewal.format import TOMBSTONE, KeySet, key_values, numbers, one_array, refuse_added
from lancewal.index import OPERATORS, CorpusStatistics, FullTextIndex, FullTextParams, index_of, is_text
from lancewal.memtable import checked_columns
from lancewal.predicate import Predicate
from lancewal.reader.base_source import hint, once, refusing, text_params
from lancewal.reader.corpus import FIXED, FixedIndex, index_from, lance_statistics, query_terms
from lancewal.reader.hits import (
    Candidates,
    Hits,
    at_once,
    best_rows,
    by_level,
    checked_column,
    checked_number,
    filled_up,
)
from lancewal.reader.memory_source import MemorySource
from lancewal.reader.source import Mask, Rows, Source
from lancewal.reader.sstable_source import SsTableSource
from lancewal.reader.state import Snapshot
from lancewal.reader.streamed_source import StreamedSource
from lancewal.sstable import ROW_OFFSET

# The levels of a table as full-text search sees them.
#
# Rows in memory, and those of SSTables and base tables that are small, are scored against
# the statistics of the whole table. So are the rows of a base without an index, which are
# read one by one. Larger SSTables and bases are left to Lance's index and carry the scores
# that it gives them against their own statistics, which are those of many rows.


SCORE = "_score"
#: A level of so few rows is indexed in memory once: its own statistics would say little.
MAX_INDEXED_ROWS = 10_000
#: Words are learned anew for each batch that is read.
_READ_ROWS = 32_768


@dataclass(frozen=True)
class WordsQuery:
    """What to look for, checked against the table."""

    column: str
    text: str
    k: int
    params: FullTextParams
    operator: str = "or"
    phrase: bool = False
    predicate: Predicate | None = None

    @property
    def sql(self) -> str | None:
        return None if self.predicate is None else self.predicate.sql

    def lance(self, column: str) -> MatchQuery | PhraseQuery:
        """The query in pylance's form, on a column that may have another name there."""
        if self.phrase:
            return PhraseQuery(self.text, column)
        operator = FullTextOperator.AND if self.operator == "and" else FullTextOperator.OR
        return MatchQuery(self.text, column, operator=operator)


class TextLevel(Protocol):
    """One level, or a part of one."""

    def statistics(self) -> CorpusStatistics:
        """What its live rows add to the corpus."""

    def search(self, corpus: CorpusStatistics) -> Hits:
        """Its best ``k`` rows, best first."""


def text_levels(snapshot: Snapshot, query: WordsQuery) -> list[TextLevel]:
    """All levels, newest first, the base last."""
    field_id = snapshot.schema.field_ids[query.column]

    def prepared(level: tuple[Source | None, KeySet]) -> list[TextLevel]:
        source, newer = level
        if isinstance(source, StreamedSource):
            return [StreamedLevel(query, source, newer)]
        if isinstance(source, MemorySource):
            return list(_memory_levels(source, field_id, query, newer))
        if isinstance(source, SsTableSource):
            found = _sstable_level(source, query, newer)
            return [] if found is None else [found]
        return [_base_level(snapshot, query, newer)]

    return [level for levels in by_level(prepared, snapshot) for level in levels]


@dataclass(frozen=True)
class IndexedLevel:
    """Rows whose words are indexed in memory, up to ``bound``.

    ``rows`` maps positions in the index to the level's own.
    """

    query: WordsQuery
    source: Source | None
    index: FullTextIndex
    bound: int
    live: Mask
    matching: Mask
    rows: Rows | None = None

    def statistics(self) -> CorpusStatistics:
        return self.index.statistics(self.query.text, self.bound, allowed=self.live)

    def search(self, corpus: CorpusStatistics) -> Hits:
        found = _search(self.index, self.query, self.bound, self.matching, corpus)
        positions = found.rows if self.rows is None else self.rows[found.rows]
        return Hits(self.source, positions, found.values)


class _ReadLevel:
    """Rows without an index that are read part by part, once to count and once to search."""

    query: WordsQuery
    source: Source | None

    def statistics(self) -> CorpusStatistics:
        return CorpusStatistics.combined(
            index.statistics(self.query.text, index.rows, allowed=live) for index, _, live in self._read(None)
        )

    def search(self, corpus: CorpusStatistics) -> Hits:
        parts = []
        for index, rows, live in self._read(self.query.predicate):
            found = _search(index, self.query, index.rows, live, corpus)
            parts.append((rows[found.rows], found.values))
        return Hits.joined(self.source, parts)

    def _read(self, predicate: Predicate | None) -> Iterator[tuple[FullTextIndex, Rows, Mask]]:
        raise NotImplementedError


@dataclass(frozen=True)
class StreamedLevel(_ReadLevel):
    """A WAL tail whose rows are not in memory."""

    query: WordsQuery
    source: StreamedSource
    newer: KeySet

    def _read(self, predicate: Predicate | None) -> Iterator[tuple[FullTextIndex, Rows, Mask]]:
        allowed = self.source.matching(predicate, self.newer)
        for first, texts in self.source.column_parts(self.query.column, wanted=allowed):
            rows = np.arange(first, first + len(texts))
            yield index_of(one_array(texts), self.query.params), rows, allowed[rows]


@dataclass(frozen=True)
class ReadLevel(_ReadLevel):
    """A base of any size without an index."""

    query: WordsQuery
    snapshot: Snapshot
    newer: KeySet
    source: None = None

    def _read(self, predicate: Predicate | None) -> Iterator[tuple[FullTextIndex, Rows, Mask]]:
        sql = None if predicate is None else predicate.sql
        names = list(self.snapshot.schema.primary_key)
        columns = list(dict.fromkeys([self.query.column, *names]))
        with lance_errors("read the base table"), refusing(sql):
            scanner = self.snapshot.base.dataset.scanner(
                columns=columns, filter=sql, with_row_id=True, batch_size=_READ_ROWS
            )
            for batch in scanner.to_batches():
                live = np.ones(batch.num_rows, np.bool_)
                if len(self.newer):
                    live = ~self.newer.contains(key_values([batch.column(name) for name in names]))
                index = index_of(batch.column(self.query.column), self.query.params)
                yield index, numbers(batch.column("_rowid")).astype(np.int64), live


@dataclass(frozen=True)
class LanceLevel:
    """An SSTable or the base, searched by Lance's own index."""

    query: WordsQuery
    dataset: lance.LanceDataset
    column: str
    source: SsTableSource | None
    keys: Sequence[str]
    newer: KeySet

    def statistics(self) -> CorpusStatistics:
        return lance_statistics(self.dataset, self.column, self.query.params, self.query.text)

    def search(self, corpus: CorpusStatistics) -> Hits:
        rows = row_count(self.dataset)
        return Hits(self.source, *filled_up(self._fetch, self.query.k, rows, len(self.newer)))

    def _fetch(self, k: int) -> Candidates:
        sql, is_base = self.query.sql, self.source is None
        if not is_base and self.query.column in self.keys:
            # The only column that a deleted row still has.
            sql = f"NOT {TOMBSTONE}" if sql is None else f"({sql}) AND NOT {TOMBSTONE}"
        with lance_errors("search for words"), refusing(self.query.sql):
            found = self.dataset.scanner(
                columns=[*self.keys, SCORE],
                full_text_query=self.query.lance(self.column),
                filter=sql,
                prefilter=True,
                limit=k,
                with_row_id=is_base,
                with_row_address=not is_base,
                disable_scoring_autoprojection=True,
            ).to_table()
        rows = numbers(found.column("_rowid" if is_base else "_rowaddr")).astype(np.int64)
        live = np.ones(len(rows), np.bool_)
        if len(self.newer):
            live = ~self.newer.contains(key_values([found.column(name) for name in self.keys]))
        scores = numbers(found.column(SCORE)).astype(np.float32)
        return Candidates(rows, scores, live).in_order(largest_first=True)


def _memory_levels(
    source: MemorySource, field_id: int, query: WordsQuery, newer: KeySet
) -> Iterator[TextLevel]:
    """The rows that the MemTable's index holds, and the others."""
    name = source.written_name(query.column)
    if name is None:
        return
    rows, indexes = source.row_count, source.view.indexes
    live = source.matching(None, newer)
    matching = live if query.predicate is None else source.matching(query.predicate, newer)
    kept_up = indexes.full_text(name)
    indexed = 0
    if kept_up is not None and kept_up.params == query.params:
        indexed = min(kept_up.rows, rows)
        yield IndexedLevel(query, source, kept_up, indexed, live[:indexed], matching[:indexed])
    if indexed < rows:
        made = index_from(indexes, field_id, query.params, source.column(query.column), indexed)
        others = np.arange(indexed, rows)
        yield IndexedLevel(query, source, made, len(others), live[indexed:], matching[indexed:], others)


def _sstable_level(source: SsTableSource, query: WordsQuery, newer: KeySet) -> TextLevel | None:
    name = source.stored_name(query.column)
    if name is None:
        return None
    dataset = source.sstable.dataset
    keys = [source.stored_name(key) or key for key in source.schema.primary_key]
    is_large = row_count(dataset) > MAX_INDEXED_ROWS and source.takes_filter(query.predicate)
    if is_large and text_params(dataset, name) == query.params:
        return LanceLevel(query, dataset, name, source, keys, newer)
    made = FIXED.get((source.sstable.uri, name, query.params), lambda: _index_of_sstable(source, query))
    dead = source.superseded(newer)
    live = np.ones(len(made.rows), np.bool_) if dead is None else ~dead[made.rows]
    matching = live
    if query.predicate is not None:
        found = source.sstable.scan(source.schema, [], filter=query.sql, with_offsets=True)
        offsets = [numbers(batch.column(ROW_OFFSET)) for batch in found]
        matching = live & np.isin(made.rows, np.concatenate(offsets) if offsets else [])
    return IndexedLevel(query, source, made.index, made.index.rows, live, matching, made.rows)


def _index_of_sstable(source: SsTableSource, query: WordsQuery) -> FixedIndex:
    index, offsets = FullTextIndex(query.params), [np.empty(0, np.int64)]
    for batch in source.sstable.scan(source.schema, [query.column], with_offsets=True):
        index.insert(batch.column(query.column), index.rows)
        offsets.append(numbers(batch.column(ROW_OFFSET)).astype(np.int64))
    return FixedIndex(index, np.concatenate(offsets))


def _base_level(snapshot: Snapshot, query: WordsQuery, newer: KeySet) -> TextLevel:
    dataset = snapshot.base.dataset
    names = list(snapshot.schema.primary_key)
    if row_count(dataset) > MAX_INDEXED_ROWS:
        if text_params(dataset, query.column) is None:
            return ReadLevel(query, snapshot, newer)
        return LanceLevel(query, dataset, query.column, None, names, newer)
    # A version of a table that was deleted and made anew would be another one: its files tell.
    files = once(dataset, "files", lambda: _data_files(dataset))
    key = (files, snapshot.base.version, query.column, query.params)
    made = FIXED.get(key, lambda: _index_of_base(dataset, query, names))
    live = np.ones(len(made.rows), np.bool_)
    if len(newer) and made.keys is not None:
        live = ~newer.contains(made.keys)
    matching = live
    if query.predicate is not None:
        with lance_errors("read the base table"), refusing(query.sql):
            found = dataset.scanner(columns=[], filter=query.sql, with_row_id=True).to_table()
        matching = live & np.isin(made.rows, numbers(found.column("_rowid")).astype(np.int64))
    return IndexedLevel(query, None, made.index, made.index.rows, live, matching, made.rows)


def _data_files(dataset: lance.LanceDataset) -> frozenset[str]:
    with lance_errors("read the base table"):
        return frozenset(file.path for each in dataset.get_fragments() for file in each.data_files())


def _index_of_base(dataset: lance.LanceDataset, query: WordsQuery, names: Sequence[str]) -> FixedIndex:
    columns = list(dict.fromkeys([query.column, *names]))
    with lance_errors("read the base table"):
        rows = dataset.scanner(columns=columns, with_row_id=True, scan_in_order=True).to_table()
    index = index_of(one_array(rows.column(query.column)), query.params)
    keys = key_values([rows.column(name) for name in names]) if names else None
    return FixedIndex(index, numbers(rows.column("_rowid")).astype(np.int64), keys)


def _search(
    index: FullTextIndex, query: WordsQuery, bound: int, allowed: Mask, corpus: CorpusStatistics
) -> Candidates:
    found = index.search(
        query.text,
        bound,
        operator=query.operator,
        phrase=query.phrase,
        allowed=allowed,
        statistics=corpus,
        limit=query.k,
    )
    return Candidates(found.positions, found.scores, np.ones(len(found.positions), np.bool_))


def checked_words(
    snapshot: Snapshot,
    column: str,
    text: str,
    k: int,
    operator: str = "or",
    phrase: bool = False,
    predicate: Predicate | None = None,
) -> WordsQuery:
    """Refuse what cannot be searched. A query of stop words alone is allowed and finds nothing."""
    type_ = checked_column(snapshot, column)
    if not is_text(type_):
        raise InvalidInputError(f"column {column!r} is {type_}; full-text search needs text")
    if not isinstance(text, str) or not text.strip():
        raise InvalidInputError(f"the full-text query is {text!r}; give at least one word")
    if operator not in OPERATORS:
        raise InvalidInputError(f"operator must be one of {', '.join(OPERATORS)}, got {operator!r}")
    params = text_params(snapshot.base.dataset, column)
    if params is None:
        hint(
            snapshot.base.dataset,
            "column %s has no full-text index in the base table: every row is read",
            column,
        )
        # Without an index nothing was left out at its creation.
        params = FullTextParams(with_position=phrase)
    if phrase and not params.with_position:
        raise InvalidInputError(
            f"the full-text index on {column!r} has no positions, which a phrase query needs; "
            "create the base table's INVERTED index with with_position=True"
        )
    return WordsQuery(column, text, checked_number("k", k), params, operator, phrase, predicate)


def find_words(snapshot: Snapshot, query: WordsQuery, columns: Sequence[str] | None = None) -> pa.Table:
    """The ``k`` best rows, best first, with their score as ``_score``."""
    refuse_added(snapshot.schema, SCORE)
    shown = checked_columns(columns, snapshot.schema)
    parts: list[Hits] = []
    if query_terms(query.params, query.text):
        levels = text_levels(snapshot, query)
        corpus = CorpusStatistics()
        waiting = sum(not isinstance(level, IndexedLevel) for level in levels)
        if not all(isinstance(level, LanceLevel) for level in levels):
            counted = at_once(lambda level: level.statistics(), levels, waiting)
            corpus = CorpusStatistics.combined(counted)
        parts = at_once(lambda level: level.search(corpus), levels, waiting)
    return best_rows(snapshot, parts, query.k, shown, SCORE, largest_first=True)
