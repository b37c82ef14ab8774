"""SsTableSource: a flushed MemTable as one level of a merged read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from uuid import UUID

import numpy as np
import pyarrow as pa

from lancewal.base import row_count
from lancewal.format import TOMBSTONE, KeySet, TableSchema, key_values, numbers
from lancewal.index import FullTextIndex, search_rows
from lancewal.predicate import Predicate
from lancewal.reader.lance_search import LanceIndexes, LanceLevel, nearest_candidates
from lancewal.reader.source import (
    Candidates,
    Found,
    Hits,
    Mask,
    NearestQuery,
    NewerKeys,
    Request,
    Rows,
    TextLevel,
    WordsQuery,
    sql_of,
)
from lancewal.reader.words import FIXED, FixedIndex, IndexedLevel, is_large
from lancewal.sstable import ROW_OFFSET, KeyProbe, SsTable
from lancewal.storage import Shelf

#: Of so few rows all are compared: as fast as an index, and exact whatever the vectors are.
EXACT_SSTABLE_ROWS = 4096

#: By the SSTable, which never changes, and the names of the key columns.
_key_sets: Shelf[tuple[str, tuple[str, ...]], KeySet] = Shelf()


class SsTableSource:
    """One SSTable, shown as the columns of ``schema``. Rows are known by their offset."""

    in_memory = False

    def __init__(self, sstable: SsTable, schema: TableSchema, indexes: LanceIndexes | None = None) -> None:
        self._sstable = sstable
        self._schema = schema
        self._indexes = indexes or LanceIndexes(lambda: sstable.dataset)
        self.name = f"sstable:{sstable.generation}"

    def shown_as(self, schema: TableSchema) -> SsTableSource:
        """The same SSTable for a reader that sees the columns of ``schema``."""
        return self if schema is self._schema else SsTableSource(self._sstable, schema, self._indexes)

    @property
    def shard_id(self) -> UUID:
        return self._sstable.shard_id

    @property
    def generation(self) -> int:
        return self._sstable.generation

    def keys(self) -> KeySet:
        def read() -> KeySet:
            return KeySet.of([key_values(self._sstable.keys(self._schema)[0])])

        key = (self._sstable.uri, self._schema.primary_key)
        return _key_sets.get_or_make(key, read, lambda keys: keys.nbytes)

    def batches(self, request: Request, newer: NewerKeys) -> Iterator[pa.RecordBatch]:
        dead = self._superseded(newer)
        if dead is None:
            yield from self._sstable.scan(self._schema, request.columns, filter=request.predicate)
            return
        if dead.all():
            return
        found = self._sstable.scan(self._schema, request.columns, filter=request.predicate, with_offsets=True)
        for batch in found:
            kept = ~dead[_offsets(batch)]
            rows = batch.select(list(request.columns))
            yield rows if kept.all() else rows.filter(pa.array(kept))

    def count(self, predicate: Predicate | None, newer: NewerKeys) -> int:
        dead = self._superseded(newer)
        if predicate is None and dead is None:
            return self._sstable.count_live()
        if predicate is None and dead is not None:
            _, offsets, tombstones = self._sstable.keys(self._schema)
            return int(np.count_nonzero(~dead[offsets] & ~tombstones))
        found = self._matching(predicate)
        if dead is None:
            return sum(len(offsets) for offsets in found)
        return sum(int(np.count_nonzero(~dead[offsets])) for offsets in found)

    def look_up(self, keys: KeyProbe, columns: Sequence[str]) -> Found:
        def take(offsets: Rows) -> tuple[pa.Table, Mask]:
            rows = self._sstable.take(offsets, self._schema, columns, with_tombstone=True)
            deleted = np.asarray(rows.column(TOMBSTONE).to_numpy(zero_copy_only=False), np.bool_)
            return pa.Table.from_batches([rows.select(list(columns))]), deleted

        return Found.at(self._sstable.lookup(keys), take)

    def take(self, rows: Rows, columns: Sequence[str]) -> pa.Table:
        return pa.Table.from_batches([self._sstable.take(rows, self._schema, columns)])

    def nearest(self, query: NearestQuery, newer: NewerKeys) -> Hits:
        """A large one through Lance; of a small one every row is compared."""
        name = self._stored_name(query.column)
        if name is None:
            return Hits.none(self)
        dead = self._superseded(newer)
        rows = row_count(self._sstable.dataset)
        indexed = rows > EXACT_SSTABLE_ROWS and self._indexes.metric(name) is query.metric
        if not indexed or not self._takes_filter(query.predicate):
            return self._compared(query, dead)

        def fetch(k: int) -> Candidates:
            found = self._indexes.nearest(query, name, k, use_index=True, with_row_address=True)
            # An SSTable is one fragment: addresses are offsets.
            offsets = numbers(found.column("_rowaddr")).astype(np.int64)
            live = np.ones(len(offsets), np.bool_) if dead is None else ~dead[offsets]
            return nearest_candidates(offsets, found, live)

        superseded = 0 if dead is None else int(np.count_nonzero(dead))
        return Hits.filled_up(self, fetch, query.k, rows, superseded)

    def words(self, query: WordsQuery, newer: NewerKeys) -> list[TextLevel]:
        name = self._stored_name(query.column)
        if name is None:
            return []
        dataset = self._sstable.dataset
        large = is_large(row_count(dataset)) and self._takes_filter(query.predicate)
        if large and self._indexes.text_params(name) == query.params:
            keys = [self._stored_name(key) or key for key in self._schema.primary_key]
            sql = sql_of(query.predicate)
            if name in keys:
                # The only column that a deleted row still has.
                sql = f"NOT {TOMBSTONE}" if sql is None else f"({sql}) AND NOT {TOMBSTONE}"
            return [LanceLevel(query, self, self._indexes, dataset, name, keys, newer, "_rowaddr", sql)]
        made = FIXED.get((self._sstable.uri, name, query.params), lambda: self._index_of_words(query))
        dead = self._superseded(newer)
        live = np.ones(len(made.rows), np.bool_) if dead is None else ~dead[made.rows]
        matching = live
        if query.predicate is not None:
            offsets = list(self._matching(query.predicate))
            matching = live & np.isin(made.rows, np.concatenate(offsets) if offsets else [])
        return [IndexedLevel(query, self, made.index, made.index.rows, live, matching, made.rows)]

    def explain(self, predicate: Predicate | None) -> str:
        return "" if predicate is None else ", filter pushed down"

    def _superseded(self, newer: NewerKeys) -> Mask | None:
        """By row offset, which rows newer levels replace; ``None`` when none is."""
        if not len(newer):
            return None
        columns, offsets, _ = self._sstable.keys(self._schema)
        replaced = newer.contains(key_values(columns))
        if not replaced.any():
            return None
        # Offsets between those listed belong to older versions, which no scan returns.
        dead = np.ones(int(offsets.max()) + 1, np.bool_)
        dead[offsets] = replaced
        return dead

    def _matching(self, predicate: Predicate | None) -> Iterator[Rows]:
        """The offsets of the live rows that match, batch by batch."""
        return map(_offsets, self._sstable.scan(self._schema, [], filter=predicate, with_offsets=True))

    def _compared(self, query: NearestQuery, dead: Mask | None) -> Hits:
        """Every row's distance, batch by batch."""
        parts = []
        found = self._sstable.scan(self._schema, [query.column], filter=query.predicate, with_offsets=True)
        for batch in found:
            offsets = _offsets(batch)
            allowed = None if dead is None else ~dead[offsets]
            vectors = batch.column(query.column)
            near = search_rows(vectors, query.vector, query.k, query.metric, allowed=allowed)
            parts.append((offsets[near.positions], near.distances))
        return Hits.joined(self, parts)

    def _index_of_words(self, query: WordsQuery) -> FixedIndex:
        index, offsets = FullTextIndex(query.params), [np.empty(0, np.int64)]
        for batch in self._sstable.scan(self._schema, [query.column], with_offsets=True):
            index.insert(batch.column(query.column), index.rows)
            offsets.append(_offsets(batch))
        return FixedIndex(index, np.concatenate(offsets))

    def _stored_name(self, column: str) -> str | None:
        """What the SSTable's own dataset calls a column; ``None`` when it has not got it."""
        return self._sstable.columns_for(self._schema)[column]

    def _takes_filter(self, predicate: Predicate | None) -> bool:
        """Whether the SSTable's own dataset has the predicate's columns under their present names."""
        names = () if predicate is None else predicate.columns
        stored = self._sstable.columns_for(self._schema)
        return all(stored[name] == name for name in names)


def _offsets(batch: pa.RecordBatch) -> Rows:
    return numbers(batch.column(ROW_OFFSET)).astype(np.int64, copy=False)
