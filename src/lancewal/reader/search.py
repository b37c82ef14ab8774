"""Search all levels by vector or by words: the best rows, each key in its newest version only.

Every level drops superseded rows before it cuts its result to ``k`` rows. So the merged result has fewer
than ``k`` rows only if the table has no more matches.
"""

from __future__ import annotations

import operator as operators
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format import checked_columns, no_rows, refuse_added
from lancewal.index import (
    OPERATORS,
    CorpusStatistics,
    FullTextParams,
    Metric,
    checked_query,
    is_text,
    is_vector,
)
from lancewal.predicate import Predicate
from lancewal.reader.snapshot import Level, Snapshot
from lancewal.reader.source import (
    DISTANCE,
    SCORE,
    Hits,
    NearestQuery,
    Rows,
    Source,
    TextLevel,
    WordsQuery,
)
from lancewal.reader.words import query_terms
from lancewal.storage import ordered_map

DEFAULT_NPROBES = 20
#: For each wanted row Lance ranks this many candidates again by exact distance, because quantised distances
#: must not compete with the exact distances of other levels.
DEFAULT_REFINE_FACTOR = 5


def checked_nearest(
    snapshot: Snapshot,
    column: str,
    query: Any,
    k: int,
    metric: str | None = None,
    predicate: Predicate | None = None,
    nprobes: int | None = None,
    refine_factor: int | None = None,
) -> NearestQuery:
    """Check a vector query; the default metric is that of the column's index, or L2 without an index."""
    type_ = _checked_column(snapshot, column)
    if not is_vector(type_):
        raise InvalidInputError(
            f"column {column!r} is {type_}; vector search needs float vectors of one size"
        )
    vector = checked_query(query, type_.list_size)
    indexes = snapshot.base_source.indexes
    indexed = indexes.metric(column)
    chosen = indexed or Metric.L2 if metric is None else _checked_metric(metric)
    if snapshot.base.manifest.fragment_ids and indexed is not chosen:
        indexes.hint(
            "column %s has no vector index for %s in the base table: every row is compared",
            column,
            chosen.value,
        )
    return NearestQuery(
        column,
        vector,
        _checked_number("k", k),
        chosen,
        predicate,
        DEFAULT_NPROBES if nprobes is None else _checked_number("nprobes", nprobes),
        DEFAULT_REFINE_FACTOR if refine_factor is None else _checked_number("refine_factor", refine_factor),
    )


def nearest(
    snapshot: Snapshot,
    query: NearestQuery,
    columns: Sequence[str] | None = None,
    levels: Iterable[Level] | None = None,
) -> pa.Table:
    """The ``k`` nearest rows, nearest first, with their distance as ``_distance``.

    ``levels`` restricts the search to some levels, if other tasks search the rest.
    """
    refuse_added(snapshot.schema, DISTANCE)
    shown = checked_columns(columns, snapshot.schema)
    parts: list[Hits] = []
    # A zero vector has no direction, so it has no cosine distance to any row.
    if query.metric is not Metric.COSINE or query.vector.any():
        parts = snapshot.ask_levels(lambda source, newer: source.nearest(query, newer), levels)
    return _best_rows(snapshot, parts, query.k, shown, DISTANCE, largest_first=False)


def checked_words(
    snapshot: Snapshot,
    column: str,
    text: str,
    k: int,
    operator: str = "or",
    phrase: bool = False,
    predicate: Predicate | None = None,
) -> WordsQuery:
    """Check a full-text query. A query that has only stop words is allowed and finds nothing."""
    type_ = _checked_column(snapshot, column)
    if not is_text(type_):
        raise InvalidInputError(f"column {column!r} is {type_}; full-text search needs text")
    if not isinstance(text, str) or not text.strip():
        raise InvalidInputError(f"the full-text query is {text!r}; give at least one word")
    if operator not in OPERATORS:
        raise InvalidInputError(f"operator must be one of {', '.join(OPERATORS)}, got {operator!r}")
    indexes = snapshot.base_source.indexes
    params = indexes.text_params(column)
    if params is None:
        indexes.hint("column %s has no full-text index in the base table: every row is read", column)
        # Without an index the rows are indexed now, with positions if the query needs them.
        params = FullTextParams(with_position=phrase)
    if phrase and not params.with_position:
        raise InvalidInputError(
            f"the full-text index on {column!r} has no positions, which a phrase query needs; "
            "create the base table's INVERTED index with with_position=True"
        )
    field_id = snapshot.schema.field_ids[column]
    return WordsQuery(column, field_id, text, _checked_number("k", k), params, operator, phrase, predicate)


def find_words(
    snapshot: Snapshot,
    query: WordsQuery,
    columns: Sequence[str] | None = None,
    levels: Iterable[Level] | None = None,
    corpus: CorpusStatistics | None = None,
) -> pa.Table:
    """The ``k`` best rows, best first, with their score as ``_score``.

    ``levels`` restricts the search to some levels, if other tasks search the rest; ``corpus`` must then have
    the statistics of all levels.
    """
    refuse_added(snapshot.schema, SCORE)
    shown = checked_columns(columns, snapshot.schema)
    parts: list[Hits] = []
    if query_terms(query.params, query.text):
        found = text_levels(snapshot, query, levels)
        known = corpus
        if known is None:
            scores_alone = all(level.scores_alone for level in found)
            known = CorpusStatistics() if scores_alone else _counted(snapshot, found)
        parts = list(ordered_map(lambda level: level.search(known), found, _texts_at_once(snapshot, found)))
    return _best_rows(snapshot, parts, query.k, shown, SCORE, largest_first=True)


def words_statistics(snapshot: Snapshot, query: WordsQuery, levels: Iterable[Level]) -> CorpusStatistics:
    """The part of ``levels`` in the statistics of the table."""
    if not query_terms(query.params, query.text):
        return CorpusStatistics()
    return _counted(snapshot, text_levels(snapshot, query, levels))


def text_levels(
    snapshot: Snapshot, query: WordsQuery, levels: Iterable[Level] | None = None
) -> list[TextLevel]:
    """All levels, newest first, split into the parts that full-text search uses."""
    parts = snapshot.ask_levels(lambda source, newer: source.words(query, newer), levels)
    return [level for levels in parts for level in levels]


def _counted(snapshot: Snapshot, levels: Sequence[TextLevel]) -> CorpusStatistics:
    counted = ordered_map(lambda level: level.statistics(), levels, _texts_at_once(snapshot, levels))
    return CorpusStatistics.combined(counted)


def _texts_at_once(snapshot: Snapshot, levels: Sequence[TextLevel]) -> int:
    return min(snapshot.levels_at_once, sum(level.waits for level in levels))


def _best_rows(
    snapshot: Snapshot,
    parts: Sequence[Hits],
    k: int,
    columns: Sequence[str],
    value_name: str,
    *,
    largest_first: bool,
) -> pa.Table:
    """The best ``k`` of all hits as a table with ``value_name`` as its last column.

    Equally good rows keep the order of their levels in ``parts``.
    """
    parts = [part for part in parts if len(part.rows)]
    shown = pa.schema([*(snapshot.schema.plain.field(name) for name in columns), (value_name, pa.float32())])
    if not parts:
        return no_rows(shown)
    values = np.concatenate([part.values for part in parts])
    order = np.argsort(-values if largest_first else values, kind="stable")[:k]
    owners = np.repeat(np.arange(len(parts)), [len(part.rows) for part in parts])
    rows = np.concatenate([part.rows for part in parts])
    places = [np.flatnonzero(owners[order] == number) for number in range(len(parts))]
    chosen = [
        (part.source, rows[order[place]]) for part, place in zip(parts, places, strict=True) if len(place)
    ]

    def take(hits: tuple[Source, Rows]) -> pa.Table:
        taken = hits[0].take(hits[1], columns)
        return pa.Table.from_arrays(taken.columns, schema=pa.schema(list(shown)[:-1]))

    tables = list(ordered_map(take, chosen, len(chosen) if snapshot.is_remote else 1))
    found = pa.concat_tables(tables).combine_chunks()
    if len(tables) > 1:
        found = found.take(pa.array(np.argsort(np.concatenate(places))))
    return pa.Table.from_arrays([*found.columns, pa.array(values[order])], schema=shown)


def _checked_column(snapshot: Snapshot, column: str) -> pa.DataType:
    """The type of a column to search; refuses a column that the table does not have."""
    if column not in snapshot.schema.field_ids:
        raise InvalidInputError(
            f"the table has no column {column!r}; its columns are {', '.join(snapshot.schema.names)}"
        )
    return snapshot.schema.plain.field(column).type


def _checked_number(name: str, value: Any) -> int:
    """``value`` as a whole number; refuses anything below 1."""
    try:
        number = 0 if isinstance(value, bool) else operators.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise InvalidInputError(f"{name} must be a whole number of at least 1, got {value!r}")
    return number


def _checked_metric(metric: str) -> Metric:
    known = [each.value for each in Metric]
    if not isinstance(metric, str) or metric.lower() not in known:
        raise InvalidInputError(f"metric {metric!r} is not known; use one of {', '.join(known)}")
    return Metric(metric.lower())
