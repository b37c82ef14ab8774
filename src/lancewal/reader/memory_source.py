"""MemorySource: a MemTable, or the tail of a WAL, as one level of a merged read.

If a BTree of the MemTable narrows a filter down to few rows, only these are tested. For a long WAL tail only
the keys are in memory: :class:`StreamedSource` fetches the rows that are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import pyarrow as pa

from lancewal.format import Alignment, KeySet, TableSchema, as_shown, one_array, row_keys
from lancewal.index import (
    NOTHING,
    ColumnPart,
    FullTextIndex,
    Narrowed,
    index_of,
    search_rows,
)
from lancewal.memtable import FEW_ROWS, MemTableView, deleted_rows
from lancewal.predicate import Predicate, selected
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
from lancewal.reader.words import IndexedLevel, ReadLevel
from lancewal.sstable import KeyProbe

_FIRST = pa.array([0])


class MemorySource:
    """Rows in memory, shown as the columns of ``schema`` whatever schema they were written with."""

    in_memory = True
    identity = None

    def __init__(self, view: MemTableView, schema: TableSchema, written: TableSchema | None = None) -> None:
        """``written`` is the schema of the rows, if the view does not have all of their columns."""
        self.view = view
        self._schema = schema
        self._written = written or view.schema
        self.name = f"memtable:{view.generation}"
        self.shard_id = view.shard_id
        self.generation = view.generation
        self.row_count = view.row_count

    def keys(self) -> KeySet:
        return self.view.rows.keys(self.view)

    def key_values(self) -> pa.Array:
        values, names = self.view.keys(), self._schema.primary_key
        return values.cast(self._schema.plain.field(names[0]).type) if len(names) == 1 else values

    def hide(self, superseded: Mask) -> Hidden:
        return Hidden(superseded, int(np.count_nonzero(self.view.live_mask & ~superseded)))

    def batches(self, request: Request, newer: Newer) -> Iterator[pa.RecordBatch]:
        predicate = request.predicate
        found = None if predicate is None else self._found(predicate, newer)
        if found is not None:
            yield from self._rows_at(found, request.columns).to_batches()
            return
        names = set(request.columns).union(predicate.columns if predicate else ())
        rows = self._rows([name for name in self._schema.names if name in names])
        yield from selected(rows, self._live(newer), request.columns, predicate).to_batches()

    def count(self, predicate: Predicate | None, newer: Newer) -> int:
        return int(np.count_nonzero(self.matching(predicate, newer)))

    def look_up(self, keys: KeyProbe, columns: Sequence[str]) -> Found:
        return Found.at(
            self.view.newest_positions(keys.values), lambda positions: self._marked(positions, columns)
        )

    def take(self, rows: Rows, columns: Sequence[str]) -> pa.Table:
        return self._marked(rows, columns)[0]

    def nearest(self, query: NearestQuery, newer: Newer) -> Hits:
        """Search the MemTable's index, and compare the rows that are not in it one by one."""
        name = self.written_name(query.column)
        if name is None:
            return Hits.none(self)
        allowed = self.matching(query.predicate, newer)
        index = self.view.indexes.vector(name, query.metric)
        indexed = 0 if index is None else min(index.rows, self.row_count)
        found = NOTHING
        if index is not None and indexed:
            found = index.search(query.vector, query.k, indexed, None if allowed.all() else allowed[:indexed])
        if indexed < self.row_count:
            for part in self._column_parts(query.column, indexed, allowed):
                found = search_rows(part, query.vector, query.k, query.metric, found)
        return Hits(self, *found)

    def words(self, query: WordsQuery, newer: Newer) -> list[TextLevel]:
        """One level for the rows in the MemTable's index, and one for the others."""
        rows, name = self.row_count, self.written_name(query.column)
        if name is None:
            return []
        live = self.matching(None, newer)
        matching = live if query.predicate is None else self.matching(query.predicate, newer)
        levels: list[TextLevel] = []
        indexed, own = 0, self.view.indexes.full_text(name)
        if own is not None and own.params == query.params:
            indexed = min(own.rows, rows)
            levels.append(IndexedLevel(query, self, own, indexed, live[:indexed], matching[:indexed]))
        if indexed < rows:
            texts = self._rows([query.column]).column(0)
            made = self.view.rows.text_index(query.field_id, query.params, texts, indexed)
            others = np.arange(indexed, rows)
            levels.append(
                IndexedLevel(query, self, made, len(others), live[indexed:], matching[indexed:], others)
            )
        return levels

    def explain(self, predicate: Predicate | None) -> str:
        if predicate is None:
            return ""
        left = self.narrowed(predicate)
        if left is None:
            return ", filtered in memory"
        return (
            f", filtered in memory: BTree on {left.column} leaves {len(left.rows)} of {self.row_count} rows"
        )

    def matching(self, predicate: Predicate | None, newer: Newer) -> Mask:
        """A mask of the rows that are live, not superseded by ``newer``, and match."""
        if predicate is None:
            return self._live(newer)
        found = self._found(predicate, newer)
        if found is not None:
            mask = np.zeros(self.row_count, np.bool_)
            mask[found] = True
            return mask
        rows = self._rows(sorted(predicate.columns) or self._schema.names[:1])
        return self._live(newer) & predicate.mask(rows)

    def narrowed(self, predicate: Predicate) -> Narrowed | None:
        """The rows that must be tested after a BTree; ``None`` if all must be."""
        names = {column: self.written_name(column) for column in predicate.columns}
        return self.view.indexes.narrowed(predicate, names, self.row_count)

    def _found(self, predicate: Predicate, newer: Newer) -> Rows | None:
        """The positions that :meth:`matching` marks, if a BTree leaves few rows to test; else ``None``."""
        left = self.narrowed(predicate)
        if left is None:
            return None
        rows = left.rows[self.view.live_mask[left.rows]]
        if newer.hidden_rows is not None:
            rows = rows[~newer.hidden_rows[rows]]
        names = list(self._schema.primary_key) if len(newer) else []
        asked = self._rows_at(rows, list(dict.fromkeys([*sorted(predicate.columns), *names])))
        kept = predicate.mask(asked)
        if names:
            kept &= ~newer.contains(row_keys(asked, names))
        return rows[kept]

    def _column_parts(self, name: str, first_row: int, wanted: Mask) -> Iterator[ColumnPart]:
        """A column from ``first_row`` on, in order. Parts without a ``wanted`` row may be left out."""
        column = self._rows([name]).column(0).slice(first_row)
        yield np.arange(first_row, self.row_count), column, wanted[first_row:]

    def written_name(self, column: str) -> str | None:
        """The name of a column in the MemTable and its indexes; ``None`` if they do not have it."""
        alignment = self._alignment
        return column if alignment is None else alignment.sources[column].stored_name

    def _live(self, newer: Newer) -> Mask:
        return newer.without(self.view.live_mask, self.view.keys)

    def _marked(self, positions: Rows, columns: Sequence[str]) -> tuple[pa.Table, Mask]:
        """The rows at ``positions``, and which of them are deletes."""
        stored = self.view.rows_at(positions)
        return self._aligned(stored, columns), deleted_rows(stored)

    def _rows(self, columns: Sequence[str]) -> pa.Table:
        return self._aligned(self.view.stored, columns)

    def _rows_at(self, positions: Rows, columns: Sequence[str]) -> pa.Table:
        if len(positions) <= FEW_ROWS:
            return self._aligned(self.view.rows_at(positions), columns).combine_chunks()
        return self._rows(columns).take(pa.array(positions))

    def _aligned(self, stored: pa.Table, columns: Sequence[str]) -> pa.Table:
        alignment = self._alignment
        if alignment is None:
            return stored.select(list(columns))
        return as_shown(stored, [alignment.sources[name] for name in columns])

    @cached_property
    def _alignment(self) -> Alignment | None:
        return Alignment.between(self._written, self._schema)


class Parts(Protocol):
    """The rows of a level, with tombstones, in parts that can be fetched separately."""

    @property
    def starts(self) -> Rows:
        """The position of the first row of each part, then the number of rows. No part is empty."""

    def fetch(self, places: Sequence[int], *, ahead: bool) -> Iterator[pa.Table]:
        """The parts with these ascending numbers; ``ahead`` prefetches, if most of them will be needed."""


class StreamedSource(MemorySource):
    """Rows that are fetched part by part, and only the parts that hold a wanted row.

    ``view`` holds the keys and tombstones of all rows, from which it knows which rows are live.
    """

    def __init__(self, view: MemTableView, schema: TableSchema, parts: Parts) -> None:
        super().__init__(view, schema, schema)
        self._parts = parts

    def batches(self, request: Request, newer: Newer) -> Iterator[pa.RecordBatch]:
        predicate = request.predicate
        wanted = self._wanted(predicate, newer)
        names = list(dict.fromkeys([*request.columns, *(predicate.columns if predicate else ())]))
        # With a limit the first part may be enough, so nothing is prefetched.
        for first, rows in self._read(wanted, names, ahead=request.limit is None):
            mask = wanted[first : first + rows.num_rows]
            yield from selected(rows, mask, request.columns, predicate).to_batches()

    def matching(self, predicate: Predicate | None, newer: Newer) -> Mask:
        wanted = self._wanted(predicate, newer)
        if predicate is None or self._is_about_keys(predicate):
            return wanted
        matching = np.zeros(self.row_count, np.bool_)
        for first, rows in self._read(wanted, sorted(predicate.columns) or self._schema.names[:1]):
            here = slice(first, first + rows.num_rows)
            matching[here] = wanted[here] & predicate.mask(rows)
        return matching

    def narrowed(self, predicate: Predicate) -> Narrowed | None:
        return None

    def written_name(self, column: str) -> str | None:
        return column

    def words(self, query: WordsQuery, newer: Newer) -> list[TextLevel]:
        def read(predicate: Predicate | None) -> Iterator[tuple[FullTextIndex, Rows, Mask]]:
            allowed = self.matching(predicate, newer)
            for rows, texts, here in self._column_parts(query.column, 0, allowed):
                yield index_of(one_array(texts), query.params), rows, here

        return [ReadLevel(query, self, read)]

    def explain(self, predicate: Predicate | None) -> str:
        return super().explain(predicate) + ", rows fetched from the log"

    def _column_parts(self, name: str, first_row: int, wanted: Mask) -> Iterator[ColumnPart]:
        asked = wanted.copy()
        asked[:first_row] = False
        for first, rows in self._read(asked, [name]):
            start, end = max(first, first_row), first + rows.num_rows
            yield np.arange(start, end), rows.column(0).slice(start - first), wanted[start:end]

    def _marked(self, positions: Rows, columns: Sequence[str]) -> tuple[pa.Table, Mask]:
        deleted = self.view.tombstones[positions]
        starts = self._parts.starts
        part_of = np.searchsorted(starts, positions, side="right") - 1
        parts = np.unique(part_of).tolist()
        pieces, places = [], []
        for part, rows in zip(parts, self._parts.fetch(parts, ahead=True), strict=True):
            asked = np.flatnonzero(part_of == part)
            pieces.append(self._aligned(_copied(rows, positions[asked] - starts[part]), columns))
            places.append(asked)
        if not pieces:
            return self._aligned(self._schema.stored.empty_table(), columns), deleted
        found = pa.concat_tables(pieces)
        if len(pieces) > 1:
            found = found.combine_chunks().take(pa.array(np.argsort(np.concatenate(places))))
        return found, deleted

    def _wanted(self, predicate: Predicate | None, newer: Newer) -> Mask:
        """The live rows; if the predicate uses key columns only, those of them that match."""
        live = self._live(newer)
        if predicate is not None and self._is_about_keys(predicate):
            live = live & predicate.mask(self.view.stored.select(sorted(predicate.columns)))
        return live

    def _is_about_keys(self, predicate: Predicate) -> bool:
        return bool(predicate.columns) and predicate.columns <= set(self.view.schema.primary_key)

    def _read(
        self, wanted: Mask, columns: Sequence[str], *, ahead: bool = True
    ) -> Iterator[tuple[int, pa.Table]]:
        """The parts that hold a wanted row, each with the position of its first row."""
        starts = self._parts.starts
        chosen = np.flatnonzero(np.add.reduceat(wanted, starts[:-1], dtype=np.int64)).tolist()
        for place, rows in zip(chosen, self._parts.fetch(chosen, ahead=ahead), strict=True):
            yield int(starts[place]), self._aligned(rows, columns)


def _copied(rows: pa.Table, places: Rows) -> pa.Table:
    """The rows at ``places``, as a copy: a slice would keep all rows in memory."""
    if len(places) > FEW_ROWS:
        return rows.take(pa.array(places))
    # Slice first: Arrow's ``take`` joins all chunks before it takes a row.
    return pa.concat_tables([rows.slice(place, 1).take(_FIRST) for place in places.tolist()])
