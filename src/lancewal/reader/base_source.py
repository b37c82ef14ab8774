"""BaseSource: one version of the base table, the oldest level of a read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.base import BaseTable, fragments_of, lance_errors, projection, row_count
from lancewal.format import (
    KeySet,
    key_values,
    key_words,
    numbers,
    one_array,
    row_keys,
    without_null_words_in,
)
from lancewal.index import FullTextIndex, index_of
from lancewal.predicate import Predicate, among, sql_of
from lancewal.reader.base_keys import KEYS_AT_A_TIME, Addresses, BaseOverlap, KeyPlaces, positions_of
from lancewal.reader.lance_search import LanceIndexes, LanceLevel
from lancewal.reader.pruning import ShardPruner
from lancewal.reader.source import (
    Found,
    Hits,
    Mask,
    NearestQuery,
    Newer,
    Request,
    Rows,
    TextLevel,
    WordsQuery,
)
from lancewal.reader.words import FIXED, FixedIndex, IndexedLevel, ReadLevel, is_large
from lancewal.sstable import KeyProbe

#: Adding one key to a joint set costs as much as probing a second set for this many rows.
_ROWS_PER_UNITED_KEY = 8
#: The intended size of a batch, and the bounds for its number of rows.
_BATCH_BYTES = 16 << 20
_MIN_BATCH_ROWS = 1024
_MAX_BATCH_ROWS = 65_536
#: The batch size for a text search that reads rows: every batch is indexed by itself, which costs time.
_SEARCHED_ROWS = 32_768
#: Up to this many rows that a full-text index lacks are indexed in memory, once for each version.
_MAX_FRESH_ROWS = 1 << 16
#: The assumed size of a value of variable length.
_VARIABLE_BYTES = 64
#: If the pieces between dropped rows are larger than this on average, they are passed on without a copy.
_UNCOPIED_BYTES = 64 << 10


@dataclass(frozen=True)
class _Fresh:
    """Fragments that an index does not cover, and how many rows they have."""

    fragments: tuple[lance.LanceFragment, ...] = ()
    rows: int = 0


class BaseSource:
    """One version of the base table, or some of its fragments."""

    name = "base"
    shard_id = None
    generation = 0
    in_memory = False

    def __init__(
        self,
        base: BaseTable,
        fragment_ids: frozenset[int] | None = None,
        earlier: BaseSource | None = None,
        rows: tuple[int, int] | None = None,
    ) -> None:
        """Reuse what ``earlier``, a source for another version, knows about shards, if they are the same."""
        self.base = base
        self.pruner: ShardPruner = ShardPruner.of(base, None if earlier is None else earlier.pruner)
        self.indexes = LanceIndexes(lambda: base.dataset)
        self._dataset = base.dataset
        self._fragment_ids = fragment_ids
        self._row_range = rows
        self._key_names = list(base.schema.primary_key)
        self._overlap = BaseOverlap(base)
        self._places = KeyPlaces(base)

    def of_fragments(self, fragment_ids: frozenset[int], rows: tuple[int, int] | None = None) -> BaseSource:
        """A part of the table, for one of several tasks; only for :meth:`batches` and :meth:`nearest`.

        ``rows`` has the first and the end of the rows to read, deleted ones not counted. Only for
        :meth:`batches` without a filter: Lance counts the rows that match one.
        """
        return BaseSource(self.base, fragment_ids, rows=rows)

    def batches(self, request: Request, newer: Newer) -> Iterator[pa.RecordBatch]:
        if self._is_empty_for(request.predicate):
            return
        superseded = self._superseded(newer)
        read = list(request.columns)
        if isinstance(superseded, Newer) and len(superseded):
            read += [name for name in self._key_names if name not in read]
        limit = None if request.limit is None else request.limit + len(superseded)
        by_address = isinstance(superseded, np.ndarray)
        scanned = kept = 0
        for batch in self._scan(read, sql_of(request.predicate), limit, with_row_address=by_address):
            dead = self._dead_rows(batch, superseded)
            scanned, kept = scanned + batch.num_rows, kept + batch.num_rows - len(dead)
            yield from without_rows(batch.select(list(request.columns)), dead)
        if request.limit is not None and scanned == limit and kept < request.limit:
            # Lance does not enforce unique keys. The base had a key more than once, so more rows were dropped
            # than the limit allowed for.
            for batch in self._scan(
                read, sql_of(request.predicate), None, with_row_address=by_address, offset=scanned
            ):
                dead = self._dead_rows(batch, superseded)
                yield from without_rows(batch.select(list(request.columns)), dead)

    def count(self, predicate: Predicate | None, newer: Newer) -> int:
        if self._is_empty_for(predicate):
            return 0
        sql = sql_of(predicate)
        superseded = self._superseded(newer)
        if sql is None and isinstance(superseded, np.ndarray):
            return row_count(self._dataset) - len(superseded)
        if not len(superseded):
            with lance_errors("count the rows of the base table", sql=sql):
                return int(self._dataset.count_rows(filter=sql))
        read = [] if isinstance(superseded, np.ndarray) else self._key_names
        batches = self._scan(read, sql, None, with_row_address=isinstance(superseded, np.ndarray))
        return sum(batch.num_rows - len(self._dead_rows(batch, superseded)) for batch in batches)

    @property
    def finds_keys_fast(self) -> bool:
        """Whether a lookup avoids a scan of all keys that no BTree covers."""
        return self._places.are_fast

    def look_up(self, keys: KeyProbe, columns: Sequence[str]) -> Found:
        """Find the rows of keys. A key that is twice in the base, which Lance permits, has two rows here."""
        read = [*columns, *(name for name in self._key_names if name not in columns)]
        parts = list(self._rows_of(keys, read))
        if not parts:
            return Found.nothing()
        rows = parts[0] if len(parts) == 1 else pa.concat_tables(parts)
        found = pc.index_in(row_keys(rows, self._key_names), value_set=keys.values)
        if found.null_count:  # several keys may share a word: these rows have another key
            rows, found = rows.filter(found.is_valid()), found.drop_null()
        known = numbers(one_array(found)).astype(np.int64)
        return Found(known, rows.select(list(columns)), known)

    def take(self, rows: Rows, columns: Sequence[str]) -> pa.Table:
        """The rows with these row ids of Lance, in the given order."""
        with lance_errors("read rows of the base table"):
            taken = self._dataset._take_rows(pa.array(rows, pa.uint64()), columns=list(columns))
        return self._joinable(taken)

    def nearest(self, query: NearestQuery, newer: Newer) -> Hits:
        """Search with Lance, which compares every row of the fragments that its index does not cover."""
        if self._is_empty_for(None):
            return Hits.none(self)
        # An index can only be searched as a whole, so a part of a table compares its rows one by one.
        use_index = self._fragment_ids is None and self.indexes.metric(query.column) is query.metric
        return self.indexes.nearest_live(
            self,
            query,
            query.column,
            lambda _, found: self._live(found, newer),
            len(newer),
            "_rowid",
            columns=self._key_names,
            use_index=use_index,
            fragments=self._fragments(),
        )

    def words(self, query: WordsQuery, newer: Newer) -> list[TextLevel]:
        if self._is_empty_for(None):
            return []
        if not is_large(row_count(self._dataset)):
            return [self._indexed_words(query, newer)]
        if self.indexes.text_params(query.column) is None:
            return [ReadLevel(query, self, lambda predicate: self._read_words(query, predicate, newer))]

        fresh = self.indexes.once(("fresh", query.field_id), lambda: self._fresh_fragments(query.field_id))
        covered = LanceLevel(
            query,
            self,
            self.indexes,
            self._dataset,
            query.column,
            lambda _, found: self._live(found, newer),
            len(newer),
            "_rowid",
            sql_of(query.predicate),
            self._key_names,
            fresh.rows,
        )
        return [covered, self._indexed_words(query, newer, fresh.fragments)] if fresh.rows else [covered]

    def _fresh_fragments(self, field_id: int) -> _Fresh:
        """The new fragments that the column's full-text index lacks, if they have few rows.

        Lance reads all texts of these fragments for every search. The result is empty for a table with stable
        row ids: there a row keeps its id in its new fragment, so Lance may still find it in the index.
        """
        segments = [
            each
            for each in self.base.manifest.indexes
            if each.field_ids == (field_id,) and "Inverted" in each.details_type
        ]
        known = {each.name for each in segments}
        if len(known) != 1 or any(each.fragments is None for each in segments) or self._has_stable_row_ids():
            return _Fresh()
        lacking = self.base.manifest.fragment_ids - self.base.manifest.covered_fragments(known.pop())
        found = [each for each in fragments_of(self._dataset) if each.fragment_id in lacking]
        rows = sum(int(each.physical_rows) for each in found)
        return _Fresh(tuple(found), rows) if rows <= _MAX_FRESH_ROWS else _Fresh()

    def _has_stable_row_ids(self) -> bool:
        with lance_errors("read the base table"):
            return bool(self._dataset.has_stable_row_ids)

    def explain(self, predicate: Predicate | None) -> str:
        return "" if predicate is None else ", filter pushed down"

    def _is_empty_for(self, predicate: Predicate | None) -> bool:
        """Whether Lance need not be asked: there is no row, and no filter that Lance might refuse."""
        return not self.base.manifest.fragment_ids and (predicate is None or predicate.is_simple)

    def _superseded(self, newer: Newer) -> Newer | Addresses:
        """The rows to leave out: by address if an index finds them, else by key."""
        # Not for a part of the table: the search would cover all fragments.
        if self._overlap.usable and self._fragment_ids is None and newer.levels:
            addresses = self._overlap.addresses(newer.levels)
            if addresses is not None:
                return addresses
        if len(newer.keys) > 1 and len(newer) * _ROWS_PER_UNITED_KEY <= row_count(self._dataset):
            return Newer([KeySet.union(newer.keys)])
        return newer

    def _dead_rows(self, batch: pa.RecordBatch, superseded: Newer | Addresses) -> Rows:
        if isinstance(superseded, np.ndarray):
            return positions_of(superseded, numbers(batch.column("_rowaddr")))
        return np.flatnonzero(~self._live(batch, superseded)) if len(superseded) else np.empty(0, np.int64)

    def _rows_of(self, keys: KeyProbe, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows that have one of the keys, and maybe some more; ``columns`` must include the key."""
        for where in self._places.scans:
            for start in range(0, len(keys), KEYS_AT_A_TIME):
                asked = [column.slice(start, KEYS_AT_A_TIME) for column in keys.columns]
                yield self._scanned_for(asked, columns, where)
        if self._places.are_kept:
            rows = self._places.kept().find(key_words(keys.values))
            if len(rows):
                yield self.take(rows.view(np.int64), columns)

    def _scanned_for(
        self, keys: Sequence[pa.Array], columns: Sequence[str], where: Mapping[str, Any]
    ) -> pa.Table:
        sql = " AND ".join(
            among(name, column if len(column) == 1 else column.unique())
            for name, column in zip(self._key_names, keys, strict=True)
        )
        with lance_errors("look up rows of the base table"):
            if len(keys) == 1 or len(keys[0]) == 1:
                asked = projection(columns, self.base.schema.names)
                found = self._dataset.scanner(columns=asked, filter=sql, **where).to_table()
                return self._joinable(found)
            # The filter checks each column by itself, so it also finds combinations that nobody asked for.
            candidates = self._dataset.scanner(
                columns=self._key_names, filter=sql, with_row_id=True, **where
            ).to_table()
        wanted = pc.is_in(row_keys(candidates, self._key_names), value_set=key_values(keys))
        return self.take(numbers(one_array(candidates["_rowid"].filter(wanted))), columns)

    def _scan(
        self,
        columns: Sequence[str],
        sql: str | None,
        limit: int | None,
        *,
        with_row_address: bool,
        offset: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        if self._row_range is not None:
            first, end = self._row_range
            offset = first + (offset or 0)
            limit = end - offset if limit is None else min(limit, end - offset)
        with lance_errors("read the base table", sql=sql):
            scanner = self._dataset.scanner(
                columns=projection(columns, self.base.schema.names),
                filter=sql,
                limit=limit,
                offset=offset,
                fragments=self._fragments(),
                batch_size=self._batch_rows(columns),
                with_row_address=with_row_address,
            )
            batches = scanner.to_batches()
            yield from map(without_null_words_in, batches) if self.base.schema.has_dictionaries else batches

    def _fragments(self) -> list[lance.LanceFragment] | None:
        wanted = self._fragment_ids
        if wanted is None:
            return None
        return [each for each in self._dataset.get_fragments() if each.fragment_id in wanted]

    def _joinable(self, rows: pa.Table) -> pa.Table:
        return without_null_words_in(rows) if self.base.schema.has_dictionaries else rows

    def _live(self, rows: pa.Table | pa.RecordBatch, newer: Newer) -> Mask:
        return newer.without(np.ones(rows.num_rows, np.bool_), lambda: row_keys(rows, self._key_names))

    def _indexed_words(
        self, query: WordsQuery, newer: Newer, fragments: Sequence[lance.LanceFragment] | None = None
    ) -> IndexedLevel:
        """The words of all rows, or of some fragments, indexed in memory."""
        # A table that was deleted and created again may have the same version number, but not the same files.
        files = self.indexes.once("files", lambda: _data_files(self._dataset))
        part = None if fragments is None else tuple(each.fragment_id for each in fragments)
        key = (files, self.base.version, query.column, query.params, part)
        made = FIXED.get(key, lambda: self._index_of_words(query, fragments))
        matching = live = newer.without(np.ones(len(made.rows), np.bool_), lambda: made.keys)
        if query.predicate is not None:
            with lance_errors("read the base table", sql=sql_of(query.predicate)):
                found = self._dataset.scanner(
                    columns=[], filter=sql_of(query.predicate), with_row_id=True, fragments=fragments
                ).to_table()
            matching = live & np.isin(made.rows, _row_ids(found))
        return IndexedLevel(query, self, made.index, made.index.rows, live, matching, made.rows)

    def _index_of_words(
        self, query: WordsQuery, fragments: Sequence[lance.LanceFragment] | None
    ) -> FixedIndex:
        columns = list(dict.fromkeys([query.column, *self._key_names]))
        with lance_errors("read the base table"):
            rows = self._dataset.scanner(
                columns=columns, with_row_id=True, scan_in_order=True, fragments=fragments
            ).to_table()
        index = index_of(one_array(rows.column(query.column)), query.params)
        keys = row_keys(rows, self._key_names) if self._key_names else None
        return FixedIndex(index, _row_ids(rows), keys)

    def _read_words(
        self, query: WordsQuery, predicate: Predicate | None, newer: Newer
    ) -> Iterator[tuple[FullTextIndex, Rows, Mask]]:
        sql = sql_of(predicate)
        columns = list(dict.fromkeys([query.column, *self._key_names]))
        with lance_errors("read the base table", sql=sql):
            scanner = self._dataset.scanner(
                columns=columns, filter=sql, with_row_id=True, batch_size=_SEARCHED_ROWS
            )
            for batch in scanner.to_batches():
                index = index_of(batch.column(query.column), query.params)
                yield index, _row_ids(batch), self._live(batch, newer)

    def _batch_rows(self, columns: Sequence[str]) -> int:
        width = sum(byte_width(self.base.schema.plain.field(name).type) for name in columns)
        return min(max(_BATCH_BYTES // max(width, 1), _MIN_BATCH_ROWS), _MAX_BATCH_ROWS)


def without_rows(batch: pa.RecordBatch, dead: Rows) -> Iterator[pa.RecordBatch]:
    """``batch`` without the rows at the ascending positions ``dead``; in pieces to avoid a large copy."""
    if len(dead) == 0:
        yield batch
    elif batch.nbytes > (len(dead) + 1) * _UNCOPIED_BYTES:
        starts = [0, *(dead + 1).tolist()]
        for start, end in zip(starts, [*dead.tolist(), batch.num_rows], strict=True):
            if start < end:
                yield batch.slice(start, end - start)
    else:
        kept = np.ones(batch.num_rows, np.bool_)
        kept[dead] = False
        yield batch.filter(pa.array(kept))


def _data_files(dataset: lance.LanceDataset) -> frozenset[str]:
    with lance_errors("read the base table"):
        return frozenset(file.path for each in dataset.get_fragments() for file in each.data_files())


def _row_ids(rows: pa.Table | pa.RecordBatch) -> Rows:
    return numbers(rows.column("_rowid")).astype(np.int64)


def byte_width(type_: pa.DataType) -> int:
    """The approximate size of a value in bytes."""
    if pa.types.is_fixed_size_list(type_):
        return int(type_.list_size) * byte_width(type_.value_type)
    if type_.num_fields:
        return sum(byte_width(type_.field(i).type) for i in range(type_.num_fields))
    try:
        return max(int(type_.bit_width) // 8, 1)
    except ValueError:
        return _VARIABLE_BYTES
