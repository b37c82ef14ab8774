"""Full-text search of rows without an index on storage: searches make indexes in memory for them.

Rows in memory, and rows of small SSTables and base tables, are scored against the statistics of the whole
table. So are the rows of a base without an index, which are read part by part.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.index import CorpusStatistics, FullTextIndex, FullTextParams, QueryTerm, Tokenizer
from lancewal.predicate import Predicate
from lancewal.reader.source import Hits, Mask, Rows, Source, Values, WordsQuery
from lancewal.storage import Cache, Shelf, process_cache

#: A level of up to this many rows is indexed in memory once: scores by its own statistics would be poor.
MAX_INDEXED_ROWS = 10_000

_TOKENIZER_BYTES = 64 << 10
#: For queries only, because queries do not change a tokenizer.
_tokenizers: Shelf[FullTextParams, Tokenizer] = Shelf()


def is_large(rows: int) -> bool:
    """Whether a level has too many rows to be indexed in memory."""
    return rows > MAX_INDEXED_ROWS


def query_terms(params: FullTextParams, text: str) -> list[QueryTerm]:
    """The words of a query without stop words; refuses an index whose tokenizer does not work here."""
    try:
        tokenizer = _tokenizers.get_or_make(params, lambda: Tokenizer(params), lambda _: _TOKENIZER_BYTES)
        return tokenizer.query_terms(text)
    except Exception as error:  # pylance raises many classes, for example for a missing language model
        raise InvalidInputError(f"the column's full-text index cannot be searched here: {error}") from error


@dataclass(frozen=True)
class IndexedLevel:
    """Rows whose words are indexed in memory, up to ``bound``.

    ``rows`` maps positions in the index to rows of the level.
    """

    query: WordsQuery
    source: Source
    index: FullTextIndex
    bound: int
    live: Mask
    matching: Mask
    rows: Rows | None = None

    waits = False
    scores_alone = False

    def statistics(self) -> CorpusStatistics:
        return self.index.statistics(self.query.text, self.bound, allowed=self.live)

    def search(self, corpus: CorpusStatistics) -> Hits:
        positions, scores = _search(self.index, self.query, self.bound, self.matching, corpus)
        return Hits(self.source, positions if self.rows is None else self.rows[positions], scores)


@dataclass(frozen=True)
class ReadLevel:
    """Rows that are read part by part, once to count words and once to search.

    For each part ``read`` returns an index of the rows that match a predicate, these rows, and a mask of the
    live ones.
    """

    query: WordsQuery
    source: Source
    read: Callable[[Predicate | None], Iterator[tuple[FullTextIndex, Rows, Mask]]]

    waits = True
    scores_alone = False

    def statistics(self) -> CorpusStatistics:
        return CorpusStatistics.combined(
            index.statistics(self.query.text, index.rows, allowed=live) for index, _, live in self.read(None)
        )

    def search(self, corpus: CorpusStatistics) -> Hits:
        parts = []
        for index, rows, live in self.read(self.query.predicate):
            positions, scores = _search(index, self.query, index.rows, live, corpus)
            parts.append((rows[positions], scores))
        return Hits.joined(self.source, parts)


def _search(
    index: FullTextIndex, query: WordsQuery, bound: int, allowed: Mask, corpus: CorpusStatistics
) -> tuple[Rows, Values]:
    """The positions in ``index`` of its best rows, and their scores."""
    found = index.search(
        query.text,
        bound,
        operator=query.operator,
        phrase=query.phrase,
        allowed=allowed,
        statistics=corpus,
        limit=query.k,
    )
    return found.positions, found.scores


@dataclass(frozen=True)
class FixedIndex:
    """An index of an SSTable or a base version, which never changes.

    ``rows`` are the rows in the index, ``keys`` their keys if those are needed.
    """

    index: FullTextIndex
    rows: Rows
    keys: pa.Array | None = None

    @property
    def memory_bytes(self) -> int:
        keys = 0 if self.keys is None else int(self.keys.nbytes)
        return self.index.memory_bytes + self.rows.nbytes + keys


class _Making:
    """An index that one thread makes while others wait for the lock; freed when none of them needs it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: FixedIndex | None = None


class FixedIndexes:
    """A cache of indexes by what they were made of. One thread makes an index; others wait for it."""

    def __init__(self, cache: Cache = process_cache) -> None:
        self._lock = threading.Lock()
        self._made: Shelf[Hashable, FixedIndex] = Shelf(cache)
        self._making: weakref.WeakValueDictionary[Hashable, _Making] = weakref.WeakValueDictionary()

    def get(self, key: Hashable, make: Callable[[], FixedIndex]) -> FixedIndex:
        with self._lock:
            made = self._made.get(key)
            if made is not None:
                return made
            making = self._making.setdefault(key, _Making())
        with making.lock:
            # If the thread before failed, this thread makes the index.
            if making.made is None:
                making.made = make()
                self._made.put(key, making.made, making.made.memory_bytes)
            return making.made


FIXED = FixedIndexes()
