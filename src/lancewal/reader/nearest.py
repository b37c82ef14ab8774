"""Vector search over all levels: the nearest rows, each key in its newest version only.

MemTables are searched through their index, and row by row where rows are not indexed
(yet); small SSTables row by row; large ones and the base through Lance, which searches
fragments that its index does not cover one by one. Every level leaves out superseded rows
before its own cut to ``k``, so the merged result is short only when the table is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from lancewal.base import lance_errors, row_count
from lancewal.errors import InvalidInputError
from lancewal.format import KeySet, key_values, numbers, refuse_added
from lancewal.index import Metric, Vector, checked_query, is_vector, search_rows
from lancewal.memtable import checked_columns
from lancewal.predicate import Predicate
from lancewal.reader.base_source import hint, refusing, vector_metric
from lancewal.reader.hits import (
    Candidates,
    Hits,
    best_rows,
    by_level,
    checked_column,
    checked_number,
    filled_up,
)
from lancewal.reader.memory_source import MemorySource
from lancewal.reader.source import Source
from lancewal.reader.sstable_source import SsTableSource
from lancewal.reader.state import Snapshot
from lancewal.sstable import ROW_OFFSET

DISTANCE = "_distance"
DEFAULT_NPROBES = 20
#: Candidates per row asked for that Lance ranks again by exact distance: quantised
#: distances must not compete with exact ones of other levels.
DEFAULT_REFINE_FACTOR = 5
#: Of so few rows all are compared: as fast as an index, and exact whatever the vectors are.
EXACT_SSTABLE_ROWS = 4096


@dataclass(frozen=True)
class NearestQuery:
    """What to look for, checked against the table."""

    column: str
    vector: Vector
    k: int
    metric: Metric
    predicate: Predicate | None = None
    nprobes: int = DEFAULT_NPROBES
    refine_factor: int = DEFAULT_REFINE_FACTOR

    @property
    def is_undefined(self) -> bool:
        """Under cosine a zero vector has no direction: nothing is near it."""
        return self.metric is Metric.COSINE and not self.vector.any()

    @property
    def sql(self) -> str | None:
        return None if self.predicate is None else self.predicate.sql


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
    """Refuse what cannot be searched; the metric defaults to that of the column's index, else L2."""
    type_ = checked_column(snapshot, column)
    if not is_vector(type_):
        raise InvalidInputError(
            f"column {column!r} is {type_}; vector search needs float vectors of one size"
        )
    indexed = vector_metric(snapshot.base.dataset, column)
    chosen = indexed or Metric.L2 if metric is None else _checked_metric(metric)
    if snapshot.base.manifest.fragment_ids and indexed is not chosen:
        hint(
            snapshot.base.dataset,
            "column %s has no vector index for %s in the base table: every row is compared",
            column,
            chosen.value,
        )
    return NearestQuery(
        column,
        checked_query(query, type_.list_size),
        checked_number("k", k),
        chosen,
        predicate,
        DEFAULT_NPROBES if nprobes is None else checked_number("nprobes", nprobes),
        DEFAULT_REFINE_FACTOR if refine_factor is None else checked_number("refine_factor", refine_factor),
    )


def nearest(snapshot: Snapshot, query: NearestQuery, columns: Sequence[str] | None = None) -> pa.Table:
    """The ``k`` nearest rows, nearest first, with their distance as ``_distance``."""
    refuse_added(snapshot.schema, DISTANCE)
    shown = checked_columns(columns, snapshot.schema)
    parts: list[Hits] = []
    if not query.is_undefined:
        parts = by_level(partial(_in_level, snapshot, query), snapshot)
    return best_rows(snapshot, parts, query.k, shown, DISTANCE, largest_first=False)


def _in_level(snapshot: Snapshot, query: NearestQuery, level: tuple[Source | None, KeySet]) -> Hits:
    source, newer = level
    if isinstance(source, MemorySource):
        return _in_memory(source, query, newer)
    if isinstance(source, SsTableSource):
        return _in_sstable(source, query, newer)
    return _in_base(snapshot, query, newer)


def _in_memory(source: MemorySource, query: NearestQuery, newer: KeySet) -> Hits:
    rows = source.row_count
    name = source.written_name(query.column)
    if name is None:
        return Hits.none(source)
    allowed = source.matching(query.predicate, newer)
    index = source.view.indexes.vector(name, query.metric)
    indexed = 0 if index is None else min(index.rows, rows)
    parts = []
    if index is not None and indexed:
        near = index.search(query.vector, query.k, indexed, None if allowed.all() else allowed[:indexed])
        parts.append((near.positions, near.distances))
    if indexed < rows:
        for first, part in source.column_parts(query.column, indexed, allowed):
            here = allowed[first : first + len(part)]
            near = search_rows(part, query.vector, query.k, query.metric, allowed=here)
            parts.append((near.positions + first, near.distances))
    return Hits.joined(source, parts)


def _in_sstable(source: SsTableSource, query: NearestQuery, newer: KeySet) -> Hits:
    name = source.stored_name(query.column)
    if name is None:
        return Hits.none(source)
    dead = source.superseded(newer)
    dataset = source.sstable.dataset
    rows = row_count(dataset)
    indexed = rows > EXACT_SSTABLE_ROWS and vector_metric(dataset, name) is query.metric
    if not indexed or not source.takes_filter(query.predicate):
        return _compared(source, query, dead)

    def fetch(k: int) -> Candidates:
        found = _by_lance(dataset, query, name, k, use_index=True, with_row_address=True)
        # An SSTable is one fragment: addresses are offsets.
        offsets = numbers(found.column("_rowaddr")).astype(np.int64)
        live = np.ones(len(offsets), np.bool_) if dead is None else ~dead[offsets]
        return _candidates(offsets, found, live)

    superseded = 0 if dead is None else int(np.count_nonzero(dead))
    return Hits(source, *filled_up(fetch, query.k, rows, superseded))


def _compared(source: SsTableSource, query: NearestQuery, dead: Any) -> Hits:
    """Every row's distance, batch by batch."""
    parts = []
    for batch in source.sstable.scan(source.schema, [query.column], filter=query.sql, with_offsets=True):
        offsets = numbers(batch.column(ROW_OFFSET)).astype(np.int64)
        allowed = None if dead is None else ~dead[offsets]
        near = search_rows(batch.column(query.column), query.vector, query.k, query.metric, allowed=allowed)
        parts.append((offsets[near.positions], near.distances))
    return Hits.joined(source, parts)


def _in_base(snapshot: Snapshot, query: NearestQuery, newer: KeySet) -> Hits:
    dataset = snapshot.base.dataset
    names = list(snapshot.schema.primary_key)
    use_index = vector_metric(dataset, query.column) is query.metric

    def fetch(k: int) -> Candidates:
        found = _by_lance(
            dataset, query, query.column, k, columns=names, use_index=use_index, with_row_id=True
        )
        live = np.ones(found.num_rows, np.bool_)
        if len(newer):
            live = ~newer.contains(key_values([found.column(name) for name in names]))
        return _candidates(numbers(found.column("_rowid")).astype(np.int64), found, live)

    return Hits(None, *filled_up(fetch, query.k, row_count(dataset), len(newer)))


def _by_lance(
    dataset: lance.LanceDataset,
    query: NearestQuery,
    column: str,
    k: int,
    *,
    columns: Sequence[str] = (),
    use_index: bool,
    **options: bool,
) -> pa.Table:
    nearest: dict[str, Any] = {"column": column, "q": query.vector, "k": k, "metric": query.metric.value}
    nearest["use_index"] = use_index
    if use_index:
        # Not ``nprobes``: that is a limit too, and with a filter or a large ``k`` the nearest
        # partitions may hold fewer rows than were asked for.
        nearest |= {"minimum_nprobes": query.nprobes, "refine_factor": query.refine_factor}
    with lance_errors("search for vectors"), refusing(query.sql):
        found = dataset.scanner(
            columns=[*columns, DISTANCE],
            nearest=nearest,
            filter=query.sql,
            prefilter=True,
            disable_scoring_autoprojection=True,
            **options,
        ).to_table()
    if use_index and found.num_rows < k:
        # A graph may be left without a way to rows that match. Few match, so comparing all is cheap.
        return _by_lance(dataset, query, column, k, columns=columns, use_index=False, **options)
    return found


def _candidates(rows: Any, found: pa.Table, live: Any) -> Candidates:
    distances = numbers(found.column(DISTANCE)).astype(np.float32)
    return Candidates(rows, distances, live).in_order(largest_first=False)


def _checked_metric(metric: str) -> Metric:
    known = [each.value for each in Metric]
    if not isinstance(metric, str) or metric.lower() not in known:
        raise InvalidInputError(f"metric {metric!r} is not known; use one of {', '.join(known)}")
    return Metric(metric.lower())
