"""What a Lance full-text index knows of its documents, as far as it can be asked."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache

import lance
import numpy as np
import pyarrow as pa
from lance.query import MatchQuery

from lancewal.base import lance_errors, row_count
from lancewal.errors import InvalidInputError
from lancewal.format import one_array
from lancewal.index import (
    CorpusStatistics,
    FullTextIndex,
    FullTextParams,
    IndexStore,
    QueryTerm,
    Tokenizer,
    index_of,
)
from lancewal.reader.base_source import once
from lancewal.reader.source import Rows
from lancewal.storage import Bell

_SAMPLE_ROWS = 128
#: Listing the rows of a word that is in most of them would take longer than the search.
_MAX_COUNTED = 10_000
_MAX_REMEMBERED_WORDS = 10_000


def lance_statistics(
    dataset: lance.LanceDataset, column: str, params: FullTextParams, text: str
) -> CorpusStatistics:
    """Document frequencies of the words of ``text`` as Lance finds them, lengths from a sample.

    Rows that newer levels replace count, as they do in Lance's own scores. A word in more than
    some thousand rows counts by its share of the sample. All of it is asked once per dataset.
    """
    rows = row_count(dataset)
    if not rows:
        return CorpusStatistics()
    sample = once(dataset, ("sample", column, params), lambda: _sample(dataset, column, params, rows))
    in_sample = sample.statistics(text, sample.rows)
    scale = rows / sample.rows
    counts: dict[str, int] = once(dataset, ("counts", column), dict)
    if len(counts) > _MAX_REMEMBERED_WORDS:
        counts.clear()
    frequency = {}
    for term, word in _words(params, text).items():
        count = counts.get(word)
        if count is None:
            count = counts[word] = _count(dataset, column, word)
        if count >= _MAX_COUNTED:
            count = max(count, round(scale * in_sample.document_frequency[term]))
        frequency[term] = count
    return CorpusStatistics(round(scale * in_sample.documents), round(scale * in_sample.tokens), frequency)


def _sample(dataset: lance.LanceDataset, column: str, params: FullTextParams, rows: int) -> FullTextIndex:
    chosen = np.unique(np.linspace(0, rows - 1, _SAMPLE_ROWS).astype(np.int64))
    with lance_errors("read some texts of a table"):
        texts = dataset.take(chosen.tolist(), columns=[column]).column(column)
    return index_of(texts, params)


def query_terms(params: FullTextParams, text: str) -> list[QueryTerm]:
    """The words of a query that count; refuses an index whose tokenizer does not work here."""
    try:
        return _tokenizer(params).query_terms(text)
    except Exception as error:  # pylance raises all kinds, for a missing language model for one
        raise InvalidInputError(f"the column's full-text index cannot be searched here: {error}") from error


@lru_cache(maxsize=64)
def _tokenizer(params: FullTextParams) -> Tokenizer:
    """For queries only, which leave it as it is."""
    return Tokenizer(params)


def _words(params: FullTextParams, text: str) -> dict[str, str]:
    """The terms of a query, each with a word that means it.

    A term itself will not do: stemmed or cut once more it may become another.
    """
    words = {term.text: term.text for term in query_terms(params, text)}
    for word in text.split():
        terms = query_terms(params, word)
        if len(terms) == 1 and terms[0].text in words:
            words[terms[0].text] = word
    return words


def _count(dataset: lance.LanceDataset, column: str, word: str) -> int:
    with lance_errors("count the rows that contain a word"):
        found = dataset.scanner(
            columns=[],
            full_text_query=MatchQuery(word, column),
            limit=_MAX_COUNTED,
            with_row_id=True,
            disable_scoring_autoprojection=True,
        ).to_table()
    return int(found.num_rows)


# Full-text indexes that searches make for themselves, of rows that have none, and keep.
#
# Those of MemTables and WAL tails grow with the rows and go when they do. Those of SSTables
# and base versions never change; the least recently used make room for others.


#: What the indexes of SSTables and base versions may take together.
MAX_BYTES = 256 << 20


class _Growing:
    """An index of the rows from ``first`` on."""

    def __init__(self, params: FullTextParams, first: int) -> None:
        self.first = first
        self.index = FullTextIndex(params)
        self.lock = threading.Lock()


_growing: weakref.WeakKeyDictionary[IndexStore, dict[Hashable, _Growing]] = weakref.WeakKeyDictionary()


def index_from(
    owner: IndexStore, field_id: int, params: FullTextParams, column: pa.ChunkedArray, first: int
) -> FullTextIndex:
    """An index of a MemTable's column from row ``first`` on; its positions count from there.

    ``column`` has the rows that the caller sees; another may have added some beyond.
    """
    known, key = _growing.setdefault(owner, {}), (field_id, params)
    made = known.get(key) or known.setdefault(key, _Growing(params, first))
    if made.first != first:
        # The MemTable's own index has got further, and the one of the rows before is not needed any more.
        made = known[key] = _Growing(params, first)
    with made.lock:
        missing = column.slice(first + made.index.rows)
        if len(missing):
            made.index.insert(one_array(missing), made.index.rows)
    return made.index


@dataclass(frozen=True)
class FixedIndex:
    """An index of rows that never change. ``rows`` are they, ``keys`` their keys where they matter."""

    index: FullTextIndex
    rows: Rows
    keys: pa.Array | None = None

    @property
    def memory_bytes(self) -> int:
        keys = 0 if self.keys is None else int(self.keys.nbytes)
        return self.index.memory_bytes + self.rows.nbytes + keys


class _Making:
    """An index that a thread makes, which holds the lock by ``with``: where that is free, it was given up."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: FixedIndex | None = None
        self.given_up = False

    @property
    def over(self) -> bool:
        return self.made is not None or self.given_up or not self.lock.locked()


class FixedIndexes:
    """As many as fit, found by what they were made of. Each is made by one thread; others wait for it."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._made: OrderedDict[Hashable, FixedIndex] = OrderedDict()
        self._making: dict[Hashable, _Making] = {}
        self._changed = Bell()

    def get(self, key: Hashable, make: Callable[[], FixedIndex]) -> FixedIndex:
        while True:
            mine = _Making()
            with mine.lock:
                with self._lock:
                    if (made := self._made.get(key)) is not None:
                        self._made.move_to_end(key)
                        return made
                    other = self._making.get(key)
                    if other is None or other.over:
                        other = self._making[key] = mine
                if other is mine:
                    return self._make(key, mine, make)
            self._changed.wait_for(lambda: other.over)  # noqa: B023
            if other.made is not None:
                return other.made
            # Who was to make it failed: now it is our turn.

    def _make(self, key: Hashable, mine: _Making, make: Callable[[], FixedIndex]) -> FixedIndex:
        try:
            made = mine.made = make()
            with self._lock:
                self._made[key] = made
                self._make_room()
            return made
        finally:
            mine.given_up = mine.made is None
            self._making.pop(key, None)
            self._changed.ring()

    def _make_room(self) -> None:
        """Requires the lock."""
        sizes = {key: made.memory_bytes for key, made in self._made.items()}
        total = sum(sizes.values())
        for key, size in sizes.items():
            if total <= self._max_bytes:
                return
            del self._made[key]
            total -= size


FIXED = FixedIndexes()
