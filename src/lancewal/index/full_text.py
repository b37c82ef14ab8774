"""FullTextIndex: rows by words, with BM25 scores as Lance computes them.

    score = Σ over query terms  idf · tf · (k1 + 1) / (tf + k1 · (1 - b + b · length / average))
    idf   = ln(1 + (documents - df + 0.5) / (df + 0.5))

with k1 = 1.2 and b = 0.75. A document is a row with at least one token. ``length`` is
its number of tokens after all token filters, ``df`` the number of documents that
contain the term. A term counts again if the query repeats it at another position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.index.kinds import (
    FullTextParams,
    RowMask,
    RowPositions,
    checked_bound,
    grown,
    not_yet_in,
    with_run,
)
from lancewal.index.tokens import Numbers, QueryTerm, Tokenizer, distinct_texts

K1 = 1.2
B = 0.75
#: The tail is scanned once per query token, which takes a few microseconds.
_TAIL = 16_384


class Occurrences(NamedTuple):
    """The occurrences of one token: their rows, ascending, and their positions in the texts."""

    rows: Numbers
    places: Numbers | None


class _Run(NamedTuple):
    """Occurrences grouped by token: ``tokens[i]`` occurs in ``rows[starts[i]:starts[i + 1]]``."""

    tokens: Numbers
    starts: Numbers
    rows: Numbers
    places: Numbers | None

    @property
    def memory_bytes(self) -> int:
        return sum(part.nbytes for part in self if part is not None)


class _State(NamedTuple):
    runs: tuple[_Run, ...]
    tail_tokens: Numbers
    tail_rows: Numbers
    tail_places: Numbers | None
    tail_length: int


class Postings:
    """An inverted list for each token; one thread appends, many search.

    Occurrences arrive in row order and keep it within a token. New ones go to a short tail, which a search
    scans. A full tail is grouped by token into a run, and neighbouring runs are merged so that their sizes
    grow geometrically. Everything that a search reads hangs on one attribute that is replaced as a whole.
    """

    def __init__(self, with_places: bool) -> None:
        self._with_places = with_places
        self._state = self._fresh_state(())
        self._run_bytes = 0

    @property
    def memory_bytes(self) -> int:
        return self._run_bytes + _TAIL * (12 if self._with_places else 8)

    def append(self, tokens: Numbers, rows: Numbers, places: Numbers) -> None:
        """Add occurrences; their rows must be above all rows in the index."""
        state = self._state
        start, end = state.tail_length, state.tail_length + len(tokens)
        if end <= _TAIL:
            state.tail_tokens[start:end] = tokens
            state.tail_rows[start:end] = rows
            if state.tail_places is not None:
                state.tail_places[start:end] = places
            self._state = _State(state.runs, state.tail_tokens, state.tail_rows, state.tail_places, end)
            return
        all_tokens = np.concatenate([state.tail_tokens[:start], tokens])
        run = _grouped(
            all_tokens,
            _stable_order(all_tokens),
            np.concatenate([state.tail_rows[:start], rows]),
            None if state.tail_places is None else np.concatenate([state.tail_places[:start], places]),
        )
        runs = with_run(state.runs, run, _merged)
        self._run_bytes = sum(run.memory_bytes for run in runs)
        # Searches may still read the old tail, so the next tail is a new array.
        self._state = self._fresh_state(runs)

    def occurrences(self, token: int) -> Occurrences:
        """All occurrences of a token."""
        state = self._state
        rows, places = [], []
        for run in state.runs:
            at = int(run.tokens.searchsorted(token))
            if at < len(run.tokens) and run.tokens[at] == token:
                span = slice(run.starts[at], run.starts[at + 1])
                rows.append(run.rows[span])
                if run.places is not None:
                    places.append(run.places[span])
        in_tail = np.flatnonzero(state.tail_tokens[: state.tail_length] == token)
        if len(in_tail) or not rows:
            rows.append(state.tail_rows[in_tail])
            if state.tail_places is not None:
                places.append(state.tail_places[in_tail])
        return Occurrences(np.concatenate(rows), np.concatenate(places) if self._with_places else None)

    def _fresh_state(self, runs: tuple[_Run, ...]) -> _State:
        places = np.empty(_TAIL, np.int32) if self._with_places else None
        return _State(runs, np.empty(_TAIL, np.int32), np.empty(_TAIL, np.int32), places, 0)


def _grouped(tokens: Numbers, order: npt.NDArray[np.int64], rows: Numbers, places: Numbers | None) -> _Run:
    """A run from occurrences; ``order`` is a stable sort of ``tokens``, so rows ascend within a token."""
    ordered = tokens[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    return _Run(
        ordered[starts],
        np.append(starts, len(ordered)).astype(np.int32),
        rows[order],
        None if places is None else places[order],
    )


def _stable_order(tokens: Numbers) -> npt.NDArray[np.int64]:
    # Three times as fast as a stable argsort: plain integers sort without an index array.
    keys = (tokens.astype(np.int64) << 32) | np.arange(len(tokens))
    keys.sort()
    return keys & 0xFFFFFFFF


def _merged(first: _Run, second: _Run) -> _Run:
    places = None
    if first.places is not None and second.places is not None:
        places = np.concatenate([first.places, second.places])
    tokens = np.concatenate([_token_of_each(first), _token_of_each(second)])
    rows = np.concatenate([first.rows, second.rows])
    # On two sorted runs this is a linear merge.
    return _grouped(tokens, np.argsort(tokens, kind="stable"), rows, places)


def _token_of_each(run: _Run) -> Numbers:
    return np.repeat(run.tokens, np.diff(run.starts))


OPERATORS = ("or", "and")


@dataclass(frozen=True)
class CorpusStatistics:
    """The statistics of a corpus for BM25; the statistics of several sources can be added.

    >>> CorpusStatistics(2, 6, {"fox": 1}) + CorpusStatistics(1, 3, {"fox": 1, "dog": 1})
    CorpusStatistics(documents=3, tokens=9, document_frequency={'fox': 2, 'dog': 1})
    """

    documents: int = 0
    tokens: int = 0
    document_frequency: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: CorpusStatistics) -> CorpusStatistics:
        frequency = dict(self.document_frequency)
        for token, count in other.document_frequency.items():
            frequency[token] = frequency.get(token, 0) + count
        return CorpusStatistics(self.documents + other.documents, self.tokens + other.tokens, frequency)

    @classmethod
    def combined(cls, parts: Iterable[CorpusStatistics]) -> CorpusStatistics:
        total = cls()
        for part in parts:
            total += part
        return total

    @property
    def average_length(self) -> float:
        return self.tokens / self.documents if self.documents else 0.0

    def inverse_frequency(self, token: str) -> float:
        """The weight of a token: the rarer, the higher."""
        frequency = self.document_frequency.get(token, 0)
        return float(np.log(1 + (self.documents - frequency + 0.5) / (frequency + 0.5)))


def term_scores(
    statistics: CorpusStatistics,
    token: str,
    term_counts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
) -> npt.NDArray[np.float64]:
    """The part of a term in the scores of documents that contain it ``term_counts`` times."""
    relative = lengths / (statistics.average_length or 1.0)
    damping = K1 * (1 - B + B * relative)
    scores: npt.NDArray[np.float64] = (
        statistics.inverse_frequency(token) * (K1 + 1) * term_counts / (term_counts + damping)
    )
    return scores


class TextHits(NamedTuple):
    """Matching rows, best first; rows with equal scores are in row order."""

    positions: RowPositions
    scores: npt.NDArray[np.float32]


class _Term(NamedTuple):
    """The rows of one token, ascending and distinct, with its number of occurrences in each."""

    rows: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


class FullTextIndex:
    """The words of one text column.

    Statistics cover the rows that a search may return: those below ``bound`` and, if there is a mask,
    allowed by it. With a mask of the live rows, replaced and deleted versions of a row do not count. Pass
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
        #: Rows below this position are in the index.
        self.rows = 0

    @property
    def memory_bytes(self) -> int:
        return self._tokenizer.memory_bytes + self._postings.memory_bytes + self._lengths.nbytes

    def insert(self, column: pa.Array, first_row: int) -> None:
        """Add the texts of ``column``, the first of which is at ``first_row``."""
        if not is_text(column.type):
            raise InvalidInputError(f"a full-text index takes text, not {column.type}")
        column = not_yet_in(column, self.rows, first_row)
        if not len(column):
            return
        first, end = self.rows, self.rows + len(column)
        tokens, texts, places = self._tokenizer.batch(column)
        lengths = grown(self._lengths, first, end)
        lengths[first:end] = np.bincount(texts, minlength=len(column))
        self._lengths = lengths
        self._postings.append(tokens, texts + np.int32(first), places)
        self.rows = end

    def statistics(self, query: str, bound: int, *, allowed: RowMask | None = None) -> CorpusStatistics:
        """The statistics below ``bound``, with the document frequencies of the query's tokens."""
        bound = checked_bound(bound, self.rows)
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

        With ``operator`` "or" a row must have any of the words, with "and" all of them. With ``phrase`` it
        must have all words in the query's order and distances, which needs an index with positions. A query
        that has only stop words matches nothing, as in Lance; an empty query is refused.
        """
        if operator not in OPERATORS:
            raise InvalidInputError(f"operator must be one of {OPERATORS}, not {operator!r}")
        if limit is not None and limit <= 0:
            raise InvalidInputError(f"the number of hits asked for must be positive, not {limit}")
        if phrase and not self.params.with_position:
            raise InvalidInputError(
                "a phrase query needs positions; create the base table's index with with_position=True"
            )
        bound = checked_bound(bound, self.rows)
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
        """Rows where the terms have the query's distances; at each position one alternative is enough."""
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
        """Where the phrase starts if ``text`` is its word at ``place``: row and position in one number."""
        rows, places = self._postings.occurrences(self._tokenizer.number(text))
        assert places is not None
        start = places.astype(np.int64) - place
        fits = start >= 0
        return (rows[fits].astype(np.int64) << 32) | start[fits]


def index_of(column: pa.Array | pa.ChunkedArray, params: FullTextParams) -> FullTextIndex:
    """An index of all texts of a column."""
    index = FullTextIndex(params)
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        index.insert(chunk, index.rows)
    return index


def is_text(type_: pa.DataType) -> bool:
    """Whether a full-text index can hold a column of this type."""
    return type_ in (pa.string(), pa.large_string())


class _Candidates:
    """Rows that contain a term, numbered consecutively; if there are many, a row is its own number."""

    def __init__(self, parts: Sequence[npt.NDArray[np.int64]], bound: int) -> None:
        # Sorting pays only if the parts have far fewer rows than the whole index.
        few = 8 * sum(map(len, parts)) < bound
        self._rows = np.unique(np.concatenate(parts)) if parts and few else None
        self.size = bound if self._rows is None else len(self._rows)

    def locate(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers of ``rows``, all of which must be candidates."""
        return rows if self._rows is None else self._rows.searchsorted(rows)

    def locate_known(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers of those of ``rows`` that are candidates."""
        if self._rows is None:
            return rows[rows < self.size]
        return self.locate(rows[np.isin(rows, self._rows)])

    def rows(self, numbers: npt.NDArray[np.int64]) -> RowPositions:
        """The rows with these numbers."""
        return numbers if self._rows is None else self._rows[numbers]


def _all_places(
    query_terms: Sequence[QueryTerm], terms: dict[str, _Term], candidates: _Candidates
) -> RowMask:
    """Rows that contain one of the terms of every position of the query."""
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
