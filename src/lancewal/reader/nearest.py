"""Vector search over all levels: the nearest rows, each key in its newest version only.

MemTables are searched through their index, and row by row where rows are not indexed (yet);
SSTables and the base through Lance, which searches fragments that its index does not cover
one by one. Every level leaves out superseded rows before its own cut to ``k``, so the
merged result is short only when the table is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format.keys import key_values
from lancewal.format.spans import numbers
from lancewal.index.distance import Vector, checked_query
from lancewal.index.kinds import Metric
from lancewal.index.segments import is_vector
from lancewal.index.vector import search_rows
from lancewal.memtable.scan import checked_columns
from lancewal.predicate import Predicate
from lancewal.reader.hits import Hits, Values, best_rows, without_superseded
from lancewal.reader.key_set import KeySet
from lancewal.reader.memory_source import MemorySource
from lancewal.reader.snapshot import Snapshot
from lancewal.reader.source import Rows
from lancewal.reader.sstable_source import SsTableSource
from lancewal.sstable import ROW_OFFSET
from lancewal.sstable.lance_errors import lance_errors

logger = logging.getLogger(__name__)

DISTANCE = "_distance"
DEFAULT_NPROBES = 20
#: Candidates per row asked for that Lance ranks again by exact distance: quantised
#: distances must not compete with exact ones of other levels.
DEFAULT_REFINE_FACTOR = 5


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

    def lance(self, k: int, *, use_index: bool) -> dict[str, Any]:
        """The query in pylance's form."""
        query: dict[str, Any] = {"column": self.column, "q": self.vector, "k": k, "use_index": use_index}
        query["metric"] = self.metric.value
        if use_index:
            query |= {"nprobes": self.nprobes, "refine_factor": self.refine_factor}
        return query


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
    if column not in snapshot.schema.names:
        raise InvalidInputError(f"the table has no column {column!r}; it has {snapshot.schema.names}")
    type_ = snapshot.schema.plain.field(column).type
    if not is_vector(type_):
        raise InvalidInputError(
            f"column {column!r} is {type_}; vector search needs float vectors of one size"
        )
    if isinstance(k, bool) or not isinstance(k, int) or k <= 0:
        raise InvalidInputError(f"k must be a positive number of rows, got {k!r}")
    for name, value in (("nprobes", nprobes), ("refine_factor", refine_factor)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidInputError(f"{name} must be at least 1, got {value!r}")
    indexed = _index_metric(snapshot.base.dataset, column)
    if metric is None:
        chosen = indexed or Metric.L2
    else:
        known = [each.value for each in Metric]
        if metric.lower() not in known:
            raise InvalidInputError(f"metric {metric!r} is not known; use one of {', '.join(known)}")
        chosen = Metric(metric.lower())
    if indexed is None and snapshot.base.manifest.fragment_ids:
        logger.info("column %s has no vector index in the base table: every row is compared", column)
    return NearestQuery(
        column,
        checked_query(query, type_.list_size),
        k,
        chosen,
        predicate,
        nprobes or DEFAULT_NPROBES,
        refine_factor or DEFAULT_REFINE_FACTOR,
    )


def nearest(snapshot: Snapshot, query: NearestQuery, columns: Sequence[str] | None = None) -> pa.Table:
    """The ``k`` nearest rows, nearest first, with their distance as ``_distance``."""
    shown = checked_columns(columns, snapshot.schema)
    parts: list[Hits] = []
    if not query.is_undefined:
        for source, newer in snapshot.levels():
            if isinstance(source, MemorySource):
                parts.append(_in_memory(source, query, newer))
            elif isinstance(source, SsTableSource):
                parts.append(_in_sstable(source, query, newer))
        parts.append(_in_base(snapshot, query))
    return best_rows(snapshot, parts, query.k, shown, DISTANCE, largest_first=False)


def _in_memory(source: MemorySource, query: NearestQuery, newer: KeySet) -> Hits:
    allowed = source.matching(query.predicate, newer)
    rows = source.row_count
    found: list[tuple[Rows, Values]] = []
    indexed = 0
    name = source.written_name(query.column)
    index = None if name is None else source.view.indexes.vector(name, query.metric)
    if index is not None:
        indexed = min(index.rows, rows)
        near = index.search(query.vector, query.k, indexed, allowed[:indexed])
        found.append((near.positions, near.distances))
    if indexed < rows:
        tail = source.column(query.column).slice(indexed)
        near = search_rows(tail, query.vector, query.k, query.metric, allowed=allowed[indexed:])
        found.append((near.positions + indexed, near.distances))
    positions = np.concatenate([part[0] for part in found]) if found else np.empty(0, np.int64)
    distances = np.concatenate([part[1] for part in found]) if found else np.empty(0, np.float32)
    return Hits(source, positions, distances)


def _in_sstable(source: SsTableSource, query: NearestQuery, newer: KeySet) -> Hits:
    dead = source.superseded(newer)
    dataset = source.sstable.dataset
    stored = source.stored_as_shown(query.column)
    index = _index_metric(dataset, query.column) if stored else None
    if index is query.metric and (query.predicate is None or source.is_exact):
        count = 0 if dead is None else int(np.count_nonzero(dead))
        if count <= 4 * query.k + 64:
            return _through_lance(source, query, dead, query.k + count)
    # Without a usable index, or with too many replaced rows: compare them all.
    found_rows, found_values = [], []
    for batch in source.sstable.scan(source.schema, [query.column], filter=_sql(query), with_offsets=True):
        offsets = numbers(batch.column(ROW_OFFSET)).astype(np.int64)
        allowed = None if dead is None else ~dead[offsets]
        near = search_rows(batch.column(query.column), query.vector, query.k, query.metric, allowed=allowed)
        found_rows.append(offsets[near.positions])
        found_values.append(near.distances)
    if not found_rows:
        return Hits(source, np.empty(0, np.int64), np.empty(0, np.float32))
    return Hits(source, np.concatenate(found_rows), np.concatenate(found_values))


def _through_lance(source: SsTableSource, query: NearestQuery, dead: Any, k: int) -> Hits:
    with lance_errors("search an SSTable"):
        found = source.sstable.dataset.scanner(
            columns=[DISTANCE],
            nearest=query.lance(k, use_index=True),
            filter=_sql(query),
            prefilter=True,
            with_row_address=True,
            disable_scoring_autoprojection=True,
        ).to_table()
    # One fragment: the low half of an address is the row's offset.
    offsets = (numbers(found.column("_rowaddr")) & np.uint64(0xFFFF_FFFF)).astype(np.int64)
    distances = numbers(found.column(DISTANCE)).astype(np.float32)
    kept = np.isfinite(distances)
    if dead is not None:
        kept &= ~dead[offsets]
    return Hits(source, offsets[kept][: query.k], distances[kept][: query.k])


def _in_base(snapshot: Snapshot, query: NearestQuery) -> Hits:
    dataset = snapshot.base.dataset
    names = list(snapshot.schema.primary_key)
    use_index = _index_metric(dataset, query.column) is query.metric

    def fetch(k: int) -> tuple[pa.Array, Rows, Values]:
        with lance_errors("search the base table"):
            found = dataset.scanner(
                columns=[*names, DISTANCE],
                nearest=query.lance(k, use_index=use_index),
                filter=_sql(query),
                prefilter=True,
                with_row_id=True,
                disable_scoring_autoprojection=True,
            ).to_table()
        keys = key_values([found.column(name) for name in names]) if names else pa.nulls(found.num_rows)
        distances = numbers(found.column(DISTANCE)).astype(np.float32)
        return keys, numbers(found.column("_rowid")).astype(np.int64), distances

    if not snapshot.base.manifest.fragment_ids:
        return Hits(None, np.empty(0, np.int64), np.empty(0, np.float32))
    rows, distances = without_superseded(fetch, query.k, snapshot.newer_than_base())
    defined = np.isfinite(distances)
    return Hits(None, rows[defined], distances[defined])


def _sql(query: NearestQuery) -> str | None:
    return None if query.predicate is None else query.predicate.sql


def _index_metric(dataset: lance.LanceDataset, column: str) -> Metric | None:
    """The metric of the column's vector index; ``None`` when it has none that we know."""
    for description in dataset.describe_indices():
        if list(description.field_names) == [column] and str(description.index_type).startswith("IVF"):
            metric = str(dict(description.details).get("metric_type", "")).lower()
            if metric in [each.value for each in Metric]:
                return Metric(metric)
    return None
