"""FullTextIndex: rows by words, scored as Lance scores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.index.bm25 import CorpusStatistics, term_scores
from lancewal.index.kinds import FullTextParams
from lancewal.index.postings import Postings
from lancewal.index.rows import RowMask, RowPositions, already_in, checked_bound, grown
from lancewal.index.tokens import QueryTerm, Tokenizer, distinct_texts

OPERATORS = ("or", "and")


class TextHits(NamedTuple):
    """Matching rows, best first, equal scores in row order."""

    positions: RowPositions
    scores: npt.NDArray[np.float32]


class _Term(NamedTuple):
    """The rows of one token, ascending, each once, with how often it occurs there."""

    rows: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


class FullTextIndex:
    """The words of one text column.

    Statistics are taken over the rows that a search may return: those below ``bound``
    and, where a mask is given, allowed by it. With the mask of live rows, replaced and
    deleted versions of a row weigh nothing, as in a table without them. Pass
    ``statistics`` to score against a corpus that spans several sources.

    >>> index = FullTextIndex(FullTextParams())
    >>> index.insert(pa.array(["The quick fox", None, "foxes and dogs"]), 0)
    >>> index.search("fox", 3).positions.tolist(), index.search("the", 3).positions.tolist()
    ([0, 2], [])
    """

    def __init__(self, params: FullTextParams) -> None:
        self.params = params
        self._tokenizer = Tokenizer(params)
        self._postings = Postings(params.with_position)
        self._lengths = np.empty(256, np.int32)
        self._rows = 0

    @property
    def rows(self) -> int:
        """Rows below this position are in the index."""
        return self._rows

    @property
    def memory_bytes(self) -> int:
        return self._tokenizer.memory_bytes + self._postings.memory_bytes + self._lengths.nbytes

    def insert(self, column: pa.Array, first_row: int) -> None:
        """Add the texts of ``column``, the first of which is at ``first_row``."""
        if not is_text(column.type):
            raise InvalidInputError(f"a full-text index takes text, not {column.type}")
        known = already_in(self._rows, first_row, len(column))
        if known == len(column):
            return
        if known:
            column = column.slice(known)
        first, end = self._rows, self._rows + len(column)
        tokens, texts, places = self._tokenizer.batch(column)
        lengths = grown(self._lengths, first, end)
        lengths[first:end] = np.bincount(texts, minlength=len(column))
        self._lengths = lengths
        self._postings.append(tokens, texts + np.int32(first), places)
        self._rows = end

    def statistics(self, query: str, bound: int, *, allowed: RowMask | None = None) -> CorpusStatistics:
        """The corpus below ``bound`` with the document frequencies of the query's tokens."""
        bound = checked_bound(bound, self._rows)
        terms = {text: self._term(text, bound, allowed) for text in distinct_texts(self._terms(query))}
        return self._statistics(terms, bound, allowed)

    def search(
        self,
        query: str,
        bound: int,
        *,
        operator: str = "or",
        phrase: bool = False,
        allowed: RowMask | None = None,
        statistics: CorpusStatistics | None = None,
        limit: int | None = None,
    ) -> TextHits:
        """Rows below ``bound`` (and allowed) that match, with their scores.

        ``operator`` "or" asks for any of the words, "and" for all; ``phrase`` for all in
        the query's order and distances, which needs an index with positions. A query of
        nothing but stop words has no words left and matches nothing, as in Lance; a query
        without any text is refused.
        """
        if operator not in OPERATORS:
            raise InvalidInputError(f"operator must be one of {OPERATORS}, not {operator!r}")
        if limit is not None and limit <= 0:
            raise InvalidInputError(f"the number of hits asked for must be positive, not {limit}")
        if phrase and not self.params.with_position:
            raise InvalidInputError(
                "a phrase query needs positions; create the base table's index with with_position=True"
            )
        bound = checked_bound(bound, self._rows)
        query_terms = self._terms(query)
        terms = {text: self._term(text, bound, allowed) for text in distinct_texts(query_terms)}
        if statistics is None:
            statistics = self._statistics(terms, bound, allowed)
        candidates = _Candidates([term.rows for term in terms.values()], bound)
        scores = np.zeros(candidates.size, np.float64)
        for text, _ in query_terms:
            rows, counts = terms[text]
            scores[candidates.locate(rows)] += term_scores(statistics, text, counts, self._lengths[rows])
        if phrase or operator == "and":
            scores[~_all_places(query_terms, terms, candidates)] = 0
        if phrase:
            scores[~self._phrase_mask(query_terms, candidates)] = 0
        return _best(scores, candidates, limit)

    def _terms(self, query: str) -> list[QueryTerm]:
        if not query.strip():
            raise InvalidInputError("the full-text query is empty; give at least one word")
        return self._tokenizer.query_terms(query)

    def _term(self, text: str, bound: int, allowed: RowMask | None) -> _Term:
        occurring = self._postings.occurrences(self._tokenizer.number(text)).rows
        occurring = occurring[: occurring.searchsorted(bound)]
        firsts = np.flatnonzero(np.concatenate([[True], occurring[1:] != occurring[:-1]])[: len(occurring)])
        counts = np.diff(firsts, append=len(occurring))
        rows = occurring[firsts].astype(np.int64)
        if allowed is not None:
            kept = allowed[rows]
            rows, counts = rows[kept], counts[kept]
        return _Term(rows, counts)

    def _statistics(self, terms: dict[str, _Term], bound: int, allowed: RowMask | None) -> CorpusStatistics:
        lengths = self._lengths[:bound]
        if allowed is not None:
            lengths = lengths[allowed[:bound]]
        frequency = {text: len(term.rows) for text, term in terms.items()}
        return CorpusStatistics(int(np.count_nonzero(lengths)), int(lengths.sum(dtype=np.int64)), frequency)

    def _phrase_mask(self, query_terms: Sequence[QueryTerm], candidates: _Candidates) -> RowMask:
        """Rows where the terms stand at the query's distances; alternatives at one place count as one."""
        starts: npt.NDArray[np.int64] | None = None
        for place in dict.fromkeys(term.place for term in query_terms):
            found = [self._starts(term.text, place) for term in query_terms if term.place == place]
            here = np.concatenate(found)
            starts = here if starts is None else np.intersect1d(starts, here)
        mask = np.zeros(candidates.size, np.bool_)
        if starts is not None:
            mask[candidates.locate_known(starts >> 32)] = True
        return mask

    def _starts(self, text: str, place: int) -> npt.NDArray[np.int64]:
        """Where a phrase would start if ``text`` stands at ``place`` of it: row and place in one number."""
        rows, places = self._postings.occurrences(self._tokenizer.number(text))
        assert places is not None
        start = places.astype(np.int64) - place
        fits = start >= 0
        return (rows[fits].astype(np.int64) << 32) | start[fits]


def search_rows(
    column: pa.Array | pa.ChunkedArray,
    query: str,
    params: FullTextParams | None = None,
    *,
    operator: str = "or",
    phrase: bool = False,
    allowed: RowMask | None = None,
    statistics: CorpusStatistics | None = None,
    limit: int | None = None,
) -> TextHits:
    """Search texts that no index holds: same words, same scores, positions within ``column``."""
    index = index_of(column, params or FullTextParams(), phrase=phrase)
    return index.search(
        query,
        index.rows,
        operator=operator,
        phrase=phrase,
        allowed=allowed,
        statistics=statistics,
        limit=limit,
    )


def index_of(
    column: pa.Array | pa.ChunkedArray, params: FullTextParams, *, phrase: bool = False
) -> FullTextIndex:
    """An index of texts that are all there, with positions if ``phrase`` asks for them."""
    if phrase and not params.with_position:
        params = replace(params, with_position=True)
    index = FullTextIndex(params)
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        index.insert(chunk, index.rows)
    return index


def is_text(type_: pa.DataType) -> bool:
    """Can a full-text index hold this column?"""
    return type_ in (pa.string(), pa.large_string())


class _Candidates:
    """Rows that contain a term, numbered: by themselves when they are many, else in a list."""

    def __init__(self, parts: Sequence[npt.NDArray[np.int64]], bound: int) -> None:
        # Sorting pays as long as it touches much less than all rows.
        few = 8 * sum(map(len, parts)) < bound
        self._rows = np.unique(np.concatenate(parts)) if parts and few else None
        self.size = bound if self._rows is None else len(self._rows)

    def locate(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers of rows that are candidates."""
        return rows if self._rows is None else self._rows.searchsorted(rows)

    def locate_known(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers of those among ``rows`` that are candidates."""
        if self._rows is None:
            return rows[rows < self.size]
        return self.locate(rows[np.isin(rows, self._rows)])

    def rows(self, numbers: npt.NDArray[np.int64]) -> RowPositions:
        """The rows with these numbers."""
        return numbers if self._rows is None else self._rows[numbers]


def _all_places(
    query_terms: Sequence[QueryTerm], terms: dict[str, _Term], candidates: _Candidates
) -> RowMask:
    """Rows that contain, for every place of the query, one of the terms that stand there."""
    everywhere = np.full(candidates.size, bool(query_terms))
    for place in dict.fromkeys(term.place for term in query_terms):
        here = np.zeros(candidates.size, np.bool_)
        for term in query_terms:
            if term.place == place:
                here[candidates.locate(terms[term.text].rows)] = True
        everywhere &= here
    return everywhere


def _best(scores: npt.NDArray[np.float64], candidates: _Candidates, limit: int | None) -> TextHits:
    numbers = np.flatnonzero(scores)
    found = scores[numbers].astype(np.float32)
    if limit is not None and limit < len(numbers):
        cut = np.partition(found, len(found) - limit)[len(found) - limit]
        kept = np.flatnonzero(found >= cut)
        numbers, found = numbers[kept], found[kept]
    order = np.argsort(-found, kind="stable")[:limit]
    return TextHits(candidates.rows(numbers[order]), found[order])
