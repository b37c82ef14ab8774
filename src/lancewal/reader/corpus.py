"""What a Lance full-text index knows of its documents, as far as it can be asked."""

from __future__ import annotations

from functools import lru_cache

import lance
import numpy as np
from lance.query import MatchQuery

from lancewal.errors import InvalidInputError
from lancewal.index.bm25 import CorpusStatistics
from lancewal.index.full_text import FullTextIndex, index_of
from lancewal.index.kinds import FullTextParams
from lancewal.index.tokens import QueryTerm, Tokenizer
from lancewal.lance_errors import lance_errors, row_count
from lancewal.reader.base_indexes import once

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
