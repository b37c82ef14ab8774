"""SsTableSource: a flushed MemTable as one level of a merged read."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property, partial

import numpy as np
import pyarrow as pa

from lancewal.base import row_count
from lancewal.format import TOMBSTONE, KeySet, TableSchema, key_values, numbers
from lancewal.index import NOTHING, FullTextIndex, search_rows
from lancewal.predicate import Predicate, sql_of
from lancewal.reader.lance_search import LanceIndexes, LanceLevel
from lancewal.reader.source import (
    Found,
    Hidden,
    Hits,
    Mask,
    NearestQuery,
    Newer,
    Request,
    Rows,
    TextLevel,
    WordsQuery,
)
from lancewal.reader.words import FIXED, FixedIndex, IndexedLevel, is_large
from lancewal.sstable import ROW_OFFSET, KeyProbe, SsTable
from lancewal.storage import Shelf, lazy_property

#: Up to this many rows, every vector is compared: this is as fast as an index, and always exact.
EXACT_SSTABLE_ROWS = 4096

#: By :attr:`SsTableSource.identity`.
_key_sets: Shelf[Hashable, KeySet] = Shelf()


class SsTableSource:
    """One SSTable, shown as the columns of ``schema``. Rows are identified by their offset."""

    in_memory = False

    def __init__(self, sstable: SsTable, schema: TableSchema) -> None:
        self.sstable = sstable
        self.schema = schema
        self.name = f"sstable:{sstable.generation}"
        self.shard_id = sstable.shard_id
        self.generation = sstable.generation
        #: The size of its rows in memory; ``None`` if Lance wrote the SSTable.
        self.num_bytes = sstable.entry.in_memory_bytes

    def shown_as(self, schema: TableSchema) -> SsTableSource:
        """The same SSTable for a reader that sees the columns of ``schema``."""
        shown = SsTableSource(self.sstable, schema)
        shown._indexes = self._indexes
        return shown

    @lazy_property
    def _indexes(self) -> LanceIndexes:
        return LanceIndexes(lambda: self.sstable.dataset)

    @cached_property
    def identity(self) -> Hashable:
        """The SSTable, which never changes, and the ids and types of the table's key columns."""
        schema = self.schema
        types = [str(schema.plain.field(name).type) for name in schema.primary_key]
        return self.sstable.uri, *(schema.field_ids[name] for name in schema.primary_key), *types

    def keys(self) -> KeySet:
        return _key_sets.get_or_make(
            self.identity, lambda: KeySet.of([self.key_values()]), lambda keys: keys.nbytes
        )

    def key_values(self) -> pa.Array:
        return key_values(self.sstable.keys(self.schema)[0])

    def hide(self, superseded: Mask) -> Hidden:
        _, offsets, tombstones = self.sstable.keys(self.schema)
        live = int(np.count_nonzero(~superseded & ~tombstones))
        if not superseded.any():
            return Hidden(None, live)
        # Offsets that are not listed belong to older versions, which no scan returns.
        rows = np.ones(int(offsets.max()) + 1, np.bool_)
        rows[offsets] = superseded
        return Hidden(rows, live)

    def batches(self, request: Request, newer: Newer) -> Iterator[pa.RecordBatch]:
        dead = self._superseded(newer)
        if dead is None:
            yield from self.sstable.scan(self.schema, request.columns, filter=request.predicate)
            return
        if dead.all():
            return
        found = self.sstable.scan(self.schema, request.columns, filter=request.predicate, with_offsets=True)
        for batch in found:
            kept = ~dead[_offsets(batch)]
            rows = batch.select(list(request.columns))
            yield rows if kept.all() else rows.filter(pa.array(kept))

    def count(self, predicate: Predicate | None, newer: Newer) -> int:
        hidden = self._hidden(newer)
        if predicate is None:
            return self.sstable.count_live() if hidden is None else hidden.live
        dead = None if hidden is None else hidden.rows
        found = self._matching(predicate)
        if dead is None:
            return sum(len(offsets) for offsets in found)
        return sum(int(np.count_nonzero(~dead[offsets])) for offsets in found)

    def look_up(self, keys: KeyProbe, columns: Sequence[str]) -> Found:
        def take(offsets: Rows) -> tuple[pa.Table, Mask]:
            rows = self.sstable.take(offsets, self.schema, columns, with_tombstone=True)
            deleted = np.asarray(rows.column(TOMBSTONE).to_numpy(zero_copy_only=False), np.bool_)
            return pa.Table.from_batches([rows.select(list(columns))]), deleted

        return Found.at(self.sstable.lookup(keys), take)

    def take(self, rows: Rows, columns: Sequence[str]) -> pa.Table:
        return pa.Table.from_batches([self.sstable.take(rows, self.schema, columns)])

    def nearest(self, query: NearestQuery, newer: Newer) -> Hits:
        """Search a large SSTable with Lance's index; compare every row of a small one."""
        name = self._stored_name(query.column)
        if name is None:
            return Hits.none(self)
        dead = self._superseded(newer)
        indexed = row_count(self.sstable.dataset) > EXACT_SSTABLE_ROWS and (
            self._indexes.metric(name) is query.metric
        )
        if not indexed or not self._takes_filter(query.predicate):
            return self._compared(query, dead)
        # An SSTable is one fragment: addresses are offsets.
        return self._indexes.nearest_live(
            self, query, name, partial(_live, dead), _count(dead), "_rowaddr", use_index=True
        )

    def words(self, query: WordsQuery, newer: Newer) -> list[TextLevel]:
        name = self._stored_name(query.column)
        if name is None:
            return []
        dataset, dead = self.sstable.dataset, self._superseded(newer)
        large = is_large(row_count(dataset)) and self._takes_filter(query.predicate)
        if large and self._indexes.text_params(name) == query.params:
            sql = sql_of(query.predicate)
            if name in map(self._stored_name, self.schema.primary_key):
                # A deleted row still has its key columns, so the index finds it there.
                sql = f"NOT {TOMBSTONE}" if sql is None else f"({sql}) AND NOT {TOMBSTONE}"
            live_rows, lost = partial(_live, dead), _count(dead)
            return [LanceLevel(query, self, self._indexes, dataset, name, live_rows, lost, "_rowaddr", sql)]
        made = FIXED.get((self.sstable.uri, name, query.params), lambda: self._index_of_words(query))
        matching = live = _live(dead, made.rows)
        if query.predicate is not None:
            offsets = list(self._matching(query.predicate))
            matching = live & np.isin(made.rows, np.concatenate(offsets) if offsets else [])
        return [IndexedLevel(query, self, made.index, made.index.rows, live, matching, made.rows)]

    def explain(self, predicate: Predicate | None) -> str:
        return "" if predicate is None else ", filter pushed down"

    def _superseded(self, newer: Newer) -> Mask | None:
        """A mask, by row offset, of the rows that newer levels replace; ``None`` if there are none."""
        hidden = self._hidden(newer)
        return None if hidden is None else hidden.rows

    def _hidden(self, newer: Newer) -> Hidden | None:
        """What newer SSTables and rows in memory hide together; ``None`` if nothing is known to be hidden."""
        dead = newer.hidden_rows
        if not len(newer) or (dead is not None and dead.all()):
            return newer.hidden
        superseded = newer.contains(self.key_values())
        if not superseded.any():
            return newer.hidden
        if dead is not None:
            superseded |= dead[self.sstable.keys(self.schema)[1]]
        return self.hide(superseded)

    def _matching(self, predicate: Predicate | None) -> Iterator[Rows]:
        """The offsets of the live rows that match, batch by batch."""
        return map(_offsets, self.sstable.scan(self.schema, [], filter=predicate, with_offsets=True))

    def _compared(self, query: NearestQuery, dead: Mask | None) -> Hits:
        """Compare the vector of every row, batch by batch."""
        near = NOTHING
        found = self.sstable.scan(self.schema, [query.column], filter=query.predicate, with_offsets=True)
        for batch in found:
            offsets = _offsets(batch)
            part = offsets, batch.column(query.column), _live(dead, offsets)
            near = search_rows(part, query.vector, query.k, query.metric, near)
        return Hits(self, *near)

    def _index_of_words(self, query: WordsQuery) -> FixedIndex:
        index, offsets = FullTextIndex(query.params), [np.empty(0, np.int64)]
        for batch in self.sstable.scan(self.schema, [query.column], with_offsets=True):
            index.insert(batch.column(query.column), index.rows)
            offsets.append(_offsets(batch))
        return FixedIndex(index, np.concatenate(offsets))

    def _stored_name(self, column: str) -> str | None:
        """The name of a column in the SSTable's own dataset; ``None`` if the dataset does not have it."""
        return self.sstable.alignment(self.schema).sources[column].stored_name

    def _takes_filter(self, predicate: Predicate | None) -> bool:
        """Whether the SSTable's own dataset has the predicate's columns as they are now."""
        alignment = self.sstable.alignment(self.schema)
        return predicate is None or not alignment.differing(predicate.columns)


def _offsets(batch: pa.RecordBatch) -> Rows:
    return numbers(batch.column(ROW_OFFSET)).astype(np.int64, copy=False)


def _live(dead: Mask | None, rows: Rows, _: object = None) -> Mask:
    """A mask of ``rows`` that are not ``dead``."""
    return np.ones(len(rows), np.bool_) if dead is None else ~dead[rows]


def _count(dead: Mask | None) -> int:
    return 0 if dead is None else int(np.count_nonzero(dead))
