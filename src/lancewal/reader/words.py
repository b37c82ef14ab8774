"""Full-text search over all levels: rows by words, each key in its newest version only."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format.columns import refuse_added
from lancewal.index.bm25 import CorpusStatistics
from lancewal.index.full_text import OPERATORS, is_text
from lancewal.index.kinds import FullTextParams
from lancewal.memtable.scan import checked_columns
from lancewal.predicate import Predicate
from lancewal.reader.base_indexes import hint, text_params
from lancewal.reader.corpus import query_terms
from lancewal.reader.hits import Hits, at_once, best_rows, checked_column, checked_number
from lancewal.reader.snapshot import Snapshot
from lancewal.reader.text_levels import SCORE, IndexedLevel, LanceLevel, WordsQuery, text_levels


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
