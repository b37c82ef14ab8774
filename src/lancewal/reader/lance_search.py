"""Search SSTables and base tables with Lance's own indexes, and read the settings of these indexes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import lance
import numpy as np
import pyarrow as pa
from lance.query import FullTextOperator, MatchQuery, PhraseQuery

from lancewal.base import lance_errors, row_count
from lancewal.format import numbers
from lancewal.index import (
    CorpusStatistics,
    FullTextIndex,
    FullTextParams,
    Metric,
    full_text_params,
    index_of,
)
from lancewal.predicate import sql_of
from lancewal.reader.source import (
    DISTANCE,
    SCORE,
    Hits,
    Mask,
    NearestQuery,
    Rows,
    Source,
    Values,
    WordsQuery,
)
from lancewal.reader.words import query_terms

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SAMPLE_ROWS = 128
#: Listing all rows of a frequent word would take longer than the search.
_MAX_COUNTED = 10_000
_MAX_REMEMBERED_WORDS = 10_000
#: Bounds of the surplus, so that one odd query does not make the next one slow.
_LEAST_SURPLUS, _MOST_SURPLUS = 2.0, 16.0

#: A mask of the rows that no newer level replaces; called with rows and with what Lance returned of them.
Live = Callable[[Rows, pa.Table], Mask]


class Candidates(NamedTuple):
    """Rows that Lance found in one level, best first; ``live`` marks those that no newer level replaces."""

    rows: Rows
    values: Values
    live: Mask

    @classmethod
    def of(cls, found: pa.Table, row_column: str, value_column: str, live: Live) -> Candidates:
        """The rows of ``found``. Equally good ones come by row, because Lance does not define their order."""
        rows = numbers(found.column(row_column)).astype(np.int64)
        values = numbers(found.column(value_column)).astype(np.float32)
        order = np.lexsort((rows, -values if value_column == SCORE else values))
        return cls(rows[order], values[order], live(rows, found)[order])


class LanceIndexes:
    """The indexes of one version of a Lance dataset. They never change, so results are cached."""

    def __init__(self, dataset: Callable[[], lance.LanceDataset]) -> None:
        """``dataset`` opens the dataset. No handle is kept: it would hold the files of a deleted SSTable."""
        self._dataset = dataset
        self._known: dict[Any, Any] = {}
        #: How many times ``k`` rows a search requests, because newer levels hide some of them. Twice what the
        #: search before needed, because a second request costs a round trip or two.
        self._surplus = _LEAST_SURPLUS

    def once(self, what: object, find: Callable[[], T]) -> T:
        """The cached result of ``find()``. Two threads that come first together may both call it."""
        if what not in self._known:
            self._known[what] = find()
        return cast("T", self._known[what])

    def hint(self, message: str, *args: object) -> None:
        """Log once why a search is slow."""
        self.once(("hint", message, args), lambda: logger.info(message, *args))

    def metric(self, column: str) -> Metric | None:
        """The metric of the column's vector index; ``None`` if it has no index or an unknown metric."""
        return self.once(("metric", column), lambda: _metric(self._dataset(), column))

    def nearest(
        self,
        query: NearestQuery,
        column: str,
        k: int,
        *,
        columns: Sequence[str] = (),
        use_index: bool,
        **options: Any,
    ) -> pa.Table:
        """The ``k`` nearest rows with ``columns``, the distance and what ``options`` add."""
        nearest: dict[str, Any] = {"column": column, "q": query.vector, "k": k, "metric": query.metric.value}
        nearest["use_index"] = use_index
        if use_index:
            # Not ``nprobes``: it is also a maximum, and with a filter or a large ``k`` the nearest
            # partitions may hold fewer than ``k`` rows.
            nearest |= {"minimum_nprobes": query.nprobes, "refine_factor": query.refine_factor}
        with lance_errors("search for vectors", sql=sql_of(query.predicate)):
            found = (
                self._dataset()
                .scanner(
                    columns=[*columns, DISTANCE],
                    nearest=nearest,
                    filter=sql_of(query.predicate),
                    prefilter=True,
                    disable_scoring_autoprojection=True,
                    **options,
                )
                .to_table()
            )
        if use_index and found.num_rows < k:
            # With a filter, a graph search may not reach all matching rows. Few rows match, so comparing all
            # of them is cheap.
            return self.nearest(query, column, k, columns=columns, use_index=False, **options)
        return found

    def nearest_live(
        self,
        source: Source,
        query: NearestQuery,
        column: str,
        live: Live,
        superseded: int,
        row_column: str,
        **options: Any,
    ) -> Hits:
        """The nearest rows of ``source`` that no newer level replaces; see :meth:`filled_up`."""

        def fetch(k: int) -> Candidates:
            found = self.nearest(query, column, k, **_with_column(row_column), **options)
            return Candidates.of(found, row_column, DISTANCE, live)

        return self.filled_up(source, fetch, query.k, superseded)

    def filled_up(self, source: Source, fetch: Callable[[int], Candidates], k: int, superseded: int) -> Hits:
        """The best ``k`` live rows of ``source``, of whose rows at most ``superseded`` are replaced.

        ``fetch(n)`` returns the best ``n`` rows, or fewer if there are no more. It is called for more rows
        until ``k`` of them are live: a replaced row must not take the place of a live one.
        """
        rows = row_count(self._dataset())
        wanted = min(math.ceil(self._surplus * k) if superseded else k, rows)
        while wanted:
            found = fetch(wanted)
            kept = np.flatnonzero(found.live)[:k]
            if len(kept) == k or len(found.rows) < wanted or wanted == rows:
                if superseded and len(kept) == k:
                    needed = int(kept[-1]) + 1
                    self._surplus = min(max(_LEAST_SURPLUS, 2 * needed / k), _MOST_SURPLUS)
                return Hits(source, found.rows[kept], found.values[kept])
            sure = k + superseded
            wanted = min(4 * wanted, sure if wanted < sure else rows, rows)
        return Hits.none(source)

    def text_params(self, column: str) -> FullTextParams | None:
        """The tokenizer settings of the column's full-text index; ``None`` if it has no such index."""

        def find() -> FullTextParams | None:
            with lance_errors("read the indexes of a table"):
                return full_text_params(self._dataset(), column)

        return self.once(("words", column), find)

    def statistics(self, column: str, params: FullTextParams, text: str, fresh: int = 0) -> CorpusStatistics:
        """Document frequencies of the words of ``text``, counted by Lance, and lengths from a sample.

        The ``fresh`` rows, which the index does not cover, are left out.

        Rows that newer levels replace are included, as in Lance's own scores. The frequency of a word in
        10,000 rows or more is estimated from the sample.
        """
        rows = row_count(self._dataset())
        if not rows:
            return CorpusStatistics()
        sample = self.once(("sample", column, params), lambda: self._sample(column, params, rows))
        in_sample = sample.statistics(text, sample.rows)
        scale = max(rows - fresh, 0) / sample.rows
        counts: dict[str, int] = self.once(("counts", column), dict)
        if len(counts) > _MAX_REMEMBERED_WORDS:
            counts.clear()
        frequency = {}
        for term, word in _words(params, text).items():
            count = counts.get(word)
            if count is None:
                count = counts[word] = self._count(column, word, indexed_only=bool(fresh))
            if count >= _MAX_COUNTED:
                count = max(count, round(scale * in_sample.document_frequency[term]))
            frequency[term] = count
        return CorpusStatistics(
            round(scale * in_sample.documents), round(scale * in_sample.tokens), frequency
        )

    def _sample(self, column: str, params: FullTextParams, rows: int) -> FullTextIndex:
        chosen = np.unique(np.linspace(0, rows - 1, _SAMPLE_ROWS).astype(np.int64))
        with lance_errors("read some texts of a table"):
            texts = self._dataset().take(chosen.tolist(), columns=[column]).column(column)
        return index_of(texts, params)

    def _count(self, column: str, word: str, *, indexed_only: bool) -> int:
        with lance_errors("count the rows that contain a word"):
            found = (
                self._dataset()
                .scanner(
                    columns=[],
                    full_text_query=MatchQuery(word, column),
                    limit=_MAX_COUNTED,
                    with_row_id=True,
                    disable_scoring_autoprojection=True,
                    fast_search=indexed_only,
                )
                .to_table()
            )
        return int(found.num_rows)


def _metric(dataset: lance.LanceDataset, column: str) -> Metric | None:
    known = [each.value for each in Metric]
    with lance_errors("read the indexes of a table"):
        for description in dataset.describe_indices():
            if list(description.field_names) == [column] and str(description.index_type).startswith("IVF"):
                named = dict(description.details).get("metric_type")
                # Older versions of Lance leave the metric out of the description.
                segments = [] if named else dataset.stats.index_stats(description.name)["indices"]
                metric = str(named or next((part.get("metric_type") for part in segments), "")).lower()
                if metric in known:
                    return Metric(metric)
    return None


def _words(params: FullTextParams, text: str) -> dict[str, str]:
    """The terms of a query, each with a word of the query that yields it.

    Searching for the term itself could find other rows: stemmed or cut again, it may become another term.
    """
    words = {term.text: term.text for term in query_terms(params, text)}
    for word in text.split():
        terms = query_terms(params, word)
        if len(terms) == 1 and terms[0].text in words:
            words[terms[0].text] = word
    return words


def _with_column(row_column: str) -> dict[str, Any]:
    """The option of Lance's scanner that adds ``row_column``, which is ``_rowid`` or ``_rowaddr``."""
    return {"with_row_id" if row_column == "_rowid" else "with_row_address": True}


@dataclass(frozen=True)
class LanceLevel:
    """A large SSTable or base, searched with Lance's full-text index.

    Lance scores its rows against the level's own statistics, which are good enough because the level has many
    rows. ``row_column``, ``_rowid`` or ``_rowaddr``, identifies rows for the source. ``live`` gets the found
    rows with the columns ``keys``; newer levels replace ``superseded`` rows at most.
    """

    query: WordsQuery
    source: Source
    indexes: LanceIndexes
    dataset: lance.LanceDataset
    column: str
    live: Live
    superseded: int
    row_column: str
    filter: str | None
    keys: Sequence[str] = ()
    #: The number of rows that the index does not cover; another level searches them.
    fresh: int = 0

    waits = True
    scores_alone = True

    def statistics(self) -> CorpusStatistics:
        return self.indexes.statistics(self.column, self.query.params, self.query.text, self.fresh)

    def search(self, corpus: CorpusStatistics) -> Hits:
        return self.indexes.filled_up(self.source, self._fetch, self.query.k, self.superseded)

    def _fetch(self, k: int) -> Candidates:
        with lance_errors("search for words", sql=sql_of(self.query.predicate)):
            found = self.dataset.scanner(
                columns=[*self.keys, SCORE],
                full_text_query=self._lance_query(),
                filter=self.filter,
                prefilter=True,
                limit=k,
                disable_scoring_autoprojection=True,
                fast_search=bool(self.fresh),
                **_with_column(self.row_column),
            ).to_table()
        return Candidates.of(found, self.row_column, SCORE, self.live)

    def _lance_query(self) -> MatchQuery | PhraseQuery:
        if self.query.phrase:
            return PhraseQuery(self.query.text, self.column)
        operator = FullTextOperator.AND if self.query.operator == "and" else FullTextOperator.OR
        return MatchQuery(self.query.text, self.column, operator=operator)
