"""Full-text search over all levels: rows by words, each key in its newest version only.

Rows in memory and in small SSTables are scored by BM25 against the statistics of the
whole table: their own, exactly, plus those of the base (documents and document
frequencies as Lance counts them, the average length from a sample). Rows of the base, and
of SSTables too large to index on the fly, carry the scores that Lance gives them against
their own statistics. The words, the formula and its constants are the same everywhere.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import lance
import numpy as np
import pyarrow as pa
from lance.query import FullTextOperator, MatchQuery, PhraseQuery

from lancewal.errors import InvalidInputError
from lancewal.format.keys import key_values
from lancewal.format.spans import numbers
from lancewal.index.bm25 import CorpusStatistics
from lancewal.index.full_text import OPERATORS, FullTextIndex, index_of, is_text
from lancewal.index.kinds import FullTextParams
from lancewal.index.specs import full_text_params
from lancewal.index.store import IndexStore
from lancewal.index.tokens import Tokenizer, distinct_texts
from lancewal.memtable.scan import checked_columns
from lancewal.predicate import Predicate
from lancewal.reader.hits import Hits, Values, best_rows, without_superseded
from lancewal.reader.key_set import KeySet
from lancewal.reader.memory_source import MemorySource
from lancewal.reader.snapshot import Snapshot
from lancewal.reader.source import Mask, Rows
from lancewal.reader.sstable_source import SsTableSource
from lancewal.sstable import ROW_OFFSET, SsTable
from lancewal.sstable.lance_errors import lance_errors

logger = logging.getLogger(__name__)

SCORE = "_score"
#: SSTables up to this many rows are indexed in memory once and scored with the whole table.
MAX_INDEXED_ON_THE_FLY = 20_000
_LENGTH_SAMPLE_ROWS = 64


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

    def lance(self, text: str | None = None) -> MatchQuery | PhraseQuery:
        """The query in pylance's form; with ``text``, for that word alone."""
        if self.phrase and text is None:
            return PhraseQuery(self.text, self.column)
        operator = FullTextOperator.AND if self.operator == "and" else FullTextOperator.OR
        return MatchQuery(self.text if text is None else text, self.column, operator=operator)


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
    if column not in snapshot.schema.names:
        raise InvalidInputError(f"the table has no column {column!r}; it has {snapshot.schema.names}")
    type_ = snapshot.schema.plain.field(column).type
    if not is_text(type_):
        raise InvalidInputError(f"column {column!r} is {type_}; full-text search needs text")
    if not isinstance(text, str) or not text.strip():
        raise InvalidInputError("the full-text query is empty; give at least one word")
    if isinstance(k, bool) or not isinstance(k, int) or k <= 0:
        raise InvalidInputError(f"k must be a positive number of rows, got {k!r}")
    if operator not in OPERATORS:
        raise InvalidInputError(f"operator must be one of {', '.join(OPERATORS)}, got {operator!r}")
    params = full_text_params(snapshot.base.dataset, column)
    if params is None:
        logger.info("column %s has no full-text index in the base table: every row is read", column)
        params = FullTextParams()
    if phrase and not params.with_position:
        raise InvalidInputError(
            f"a phrase query on {column!r} needs an index with positions; create the base table's "
            "INVERTED index with with_position=True"
        )
    return WordsQuery(column, text, k, params, operator, phrase, predicate)


def find_words(snapshot: Snapshot, query: WordsQuery, columns: Sequence[str] | None = None) -> pa.Table:
    """The ``k`` best rows, best first, with their score as ``_score``."""
    shown = checked_columns(columns, snapshot.schema)
    if not Tokenizer(query.params).query_terms(query.text):
        return best_rows(snapshot, [], query.k, shown, SCORE, largest_first=True)
    exact: list[_ExactLevel] = []
    parts: list[Hits] = []
    for source, newer in snapshot.levels():
        if isinstance(source, MemorySource):
            exact.append(_memory_level(source, query, newer))
        elif isinstance(source, SsTableSource):
            level = _sstable_level(source, query, newer)
            if level is not None:
                exact.append(level)
            else:
                parts.append(_through_lance(source, query, newer))
    if exact:
        statistics = CorpusStatistics.combined(level.statistics(query) for level in exact)
        statistics += _base_statistics(snapshot, query, statistics)
        parts += [level.search(query, statistics) for level in exact]
    parts.append(_in_base(snapshot, query))
    return best_rows(snapshot, parts, query.k, shown, SCORE, largest_first=True)


@dataclass(frozen=True)
class _ExactLevel:
    """A level whose words are indexed in memory. ``rows`` maps index positions to the level's rows."""

    source: MemorySource | SsTableSource
    index: FullTextIndex
    bound: int
    live: Mask
    matching: Mask
    rows: Rows | None = None

    def statistics(self, query: WordsQuery) -> CorpusStatistics:
        return self.index.statistics(query.text, self.bound, allowed=self.live)

    def search(self, query: WordsQuery, statistics: CorpusStatistics) -> Hits:
        found = self.index.search(
            query.text,
            self.bound,
            operator=query.operator,
            phrase=query.phrase,
            allowed=self.matching,
            statistics=statistics,
            limit=query.k,
        )
        positions = found.positions if self.rows is None else self.rows[found.positions]
        return Hits(self.source, positions, found.scores)


def _memory_level(source: MemorySource, query: WordsQuery, newer: KeySet) -> _ExactLevel:
    name = source.written_name(query.column)
    index = None if name is None else source.view.indexes.full_text(name)
    if index is None or index.params != query.params or index.rows < source.row_count:
        index = _cached_index(source, query)
    live = source.matching(None, newer)
    matching = live if query.predicate is None else source.matching(query.predicate, newer)
    return _ExactLevel(source, index, source.row_count, live, matching)


#: Indexes that this module made for MemTables and WAL tails without one. They grow with the rows.
_made: weakref.WeakKeyDictionary[IndexStore, dict[tuple[str, FullTextParams], FullTextIndex]] = (
    weakref.WeakKeyDictionary()
)
_made_lock = threading.Lock()


def _cached_index(source: MemorySource, query: WordsQuery) -> FullTextIndex:
    with _made_lock:
        made = _made.setdefault(source.view.indexes, {})
        index = made.setdefault((query.column, query.params), FullTextIndex(query.params))
        if index.rows < source.row_count:
            for chunk in source.column(query.column).slice(index.rows).chunks:
                index.insert(chunk, index.rows)
    return index


def _sstable_level(source: SsTableSource, query: WordsQuery, newer: KeySet) -> _ExactLevel | None:
    """``None`` for an SSTable that is better searched by Lance."""
    large = source.sstable.dataset.count_rows() > MAX_INDEXED_ON_THE_FLY
    if large and source.stored_as_shown(query.column) and source.is_exact:
        return None
    index, offsets = _sstable_index(source, query)
    dead = source.superseded(newer)
    live = np.ones(len(offsets), np.bool_) if dead is None else ~dead[offsets]
    matching = live
    if query.predicate is not None:
        allowed = np.zeros(int(offsets.max(initial=-1)) + 1, np.bool_)
        allowed[_offsets(source, [], query.sql)[1]] = True
        matching = live & allowed[offsets]
    return _ExactLevel(source, index, index.rows, live, matching, offsets)


#: Indexes that this module made of SSTables, with the offset of each of their rows.
_made_of_sstables: weakref.WeakKeyDictionary[
    SsTable, dict[tuple[str, FullTextParams], tuple[FullTextIndex, Rows]]
] = weakref.WeakKeyDictionary()


def _sstable_index(source: SsTableSource, query: WordsQuery) -> tuple[FullTextIndex, Rows]:
    with _made_lock:
        made = _made_of_sstables.setdefault(source.sstable, {})
        known = made.get((query.column, query.params))
        if known is None:
            texts, offsets = _offsets(source, [query.column], None)
            known = made[query.column, query.params] = (index_of(texts[0], query.params), offsets)
    return known


def _offsets(
    source: SsTableSource, columns: Sequence[str], sql: str | None
) -> tuple[list[pa.ChunkedArray], Rows]:
    """Columns of the live rows that match, and the offsets of these rows."""
    found = list(source.sstable.scan(source.schema, columns, filter=sql, with_offsets=True))
    offsets = [numbers(batch.column(ROW_OFFSET)).astype(np.int64) for batch in found]
    arrays = [
        pa.chunked_array([batch.column(name) for batch in found], source.schema.plain.field(name).type)
        for name in columns
    ]
    return arrays, np.concatenate(offsets) if offsets else np.empty(0, np.int64)


def _through_lance(source: SsTableSource, query: WordsQuery, newer: KeySet) -> Hits:
    dataset = source.sstable.dataset
    names = list(source.schema.primary_key)

    def fetch(k: int) -> tuple[pa.Array, Rows, Values]:
        found = _scan(dataset, query, k, names, "_rowaddr")
        offsets = (numbers(found.column("_rowaddr")) & np.uint64(0xFFFF_FFFF)).astype(np.int64)
        return _keys(found, names), offsets, numbers(found.column(SCORE)).astype(np.float32)

    rows, scores = without_superseded(fetch, query.k, newer)
    return Hits(source, rows, scores)


def _in_base(snapshot: Snapshot, query: WordsQuery) -> Hits:
    names = list(snapshot.schema.primary_key)
    if not snapshot.base.manifest.fragment_ids:
        return Hits(None, np.empty(0, np.int64), np.empty(0, np.float32))

    def fetch(k: int) -> tuple[pa.Array, Rows, Values]:
        found = _scan(snapshot.base.dataset, query, k, names, "_rowid")
        rows = numbers(found.column("_rowid")).astype(np.int64)
        return _keys(found, names), rows, numbers(found.column(SCORE)).astype(np.float32)

    rows, scores = without_superseded(fetch, query.k, snapshot.newer_than_base())
    return Hits(None, rows, scores)


def _scan(
    dataset: lance.LanceDataset, query: WordsQuery, k: int, names: Sequence[str], row_name: str
) -> pa.Table:
    with lance_errors("search for words"):
        return dataset.scanner(
            columns=[*names, SCORE],
            full_text_query=query.lance(),
            filter=query.sql,
            prefilter=True,
            limit=k,
            with_row_id=row_name == "_rowid",
            with_row_address=row_name == "_rowaddr",
            disable_scoring_autoprojection=True,
        ).to_table()


def _keys(found: pa.Table, names: Sequence[str]) -> pa.Array:
    return key_values([found.column(name) for name in names]) if names else pa.nulls(found.num_rows)


def _base_statistics(snapshot: Snapshot, query: WordsQuery, live: CorpusStatistics) -> CorpusStatistics:
    """The base's part of the corpus, as well as it can be had without reading it whole."""
    dataset = snapshot.base.dataset
    if not snapshot.base.manifest.fragment_ids:
        return CorpusStatistics()
    with lance_errors("count words of the base table"):
        documents = dataset.count_rows()
        frequency = {
            term: dataset.scanner(
                columns=[],
                full_text_query=query.lance(term),
                with_row_id=True,
                disable_scoring_autoprojection=True,
            )
            .to_table()
            .num_rows
            for term in distinct_texts(Tokenizer(query.params).query_terms(query.text))
        }
        step = max(documents // _LENGTH_SAMPLE_ROWS, 1)
        sample = dataset.take(list(range(0, documents, step))[:_LENGTH_SAMPLE_ROWS], columns=[query.column])
    sampled = FullTextIndex(query.params)
    for chunk in sample.column(query.column).chunks:
        sampled.insert(chunk, sampled.rows)
    average = sampled.statistics(query.text, sampled.rows).average_length or live.average_length
    return CorpusStatistics(documents, round(documents * average), frequency)
