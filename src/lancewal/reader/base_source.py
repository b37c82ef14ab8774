"""BaseSource: one version of the base table, below everything that is newer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.base import BaseTable, lance_errors, row_count
from lancewal.format import KeySet, has_dictionary, key_values, numbers, one_array, without_null_words_in
from lancewal.index import FullTextIndex, index_of
from lancewal.predicate import Predicate, among
from lancewal.reader.lance_search import LanceIndexes, LanceLevel, nearest_candidates
from lancewal.reader.pruning import ShardPruner
from lancewal.reader.source import (
    Candidates,
    Found,
    Hits,
    Mask,
    NearestQuery,
    Newer,
    Request,
    Rows,
    TextLevel,
    WordsQuery,
    sql_of,
)
from lancewal.reader.words import FIXED, FixedIndex, IndexedLevel, ReadLevel, is_large
from lancewal.sstable import KeyProbe, refusing

Addresses = npt.NDArray[np.uint64]

_NOWHERE: Addresses = np.empty(0, np.uint64)
#: Keys in one ``IN``: Lance's planner slows down beyond.
KEYS_AT_A_TIME = 5_000
#: An index search for a key costs as much as comparing so many keys of the base. It is
#: several times as much, but a level is read again and again before it is compacted.
_ROWS_PER_SEARCH = 50
#: Adding a key of one set to another costs as much as asking a second set for so many rows.
_ROWS_PER_UNITED_KEY = 8


#: The least that a batch is worth reading for, and the most that is held of one.
_BATCH_BYTES = 16 << 20
_MIN_BATCH_ROWS = 1024
_MAX_BATCH_ROWS = 65_536
#: Words are learned anew for each batch that is read to be searched.
_SEARCHED_ROWS = 32_768
#: Values of variable length are taken to be of this size.
_VARIABLE_BYTES = 64
#: Where pieces between rows to leave out are larger than this, they are passed on uncopied.
_UNCOPIED_BYTES = 64 << 10


class BaseOverlap:
    """Row addresses, in one version of the base, of the keys that newer levels hold.

    They are asked of the BTree on the key. Without it every key of the base has to be compared with those
    of newer levels. With it the cost is that of the newer keys, and for SSTables it is paid once for
    each base version.
    """

    def __init__(self, base: BaseTable) -> None:
        self._base = base
        self._known: weakref.WeakKeyDictionary[KeySet, Addresses] = weakref.WeakKeyDictionary()
        # Those of all levels that were asked for last.
        self._joined: tuple[list[weakref.ref[KeySet]], Addresses] = [], _NOWHERE
        #: Whether there is such a BTree.
        self.usable = len(base.schema.primary_key) == 1 and _has_btree(base)

    def addresses(self, levels: Sequence[KeySet]) -> Addresses | None:
        """Ascending addresses of the superseded rows; ``None`` when comparing keys is cheaper."""
        unknown = sum(len(keys) for keys in levels if keys not in self._known)
        if unknown * _ROWS_PER_SEARCH > row_count(self._base.dataset):
            return None
        which = [weakref.ref(keys) for keys in levels]
        joined = self._joined
        if joined[0] != which:
            joined = self._joined = which, np.unique(np.concatenate([self._of(keys) for keys in levels]))
        return joined[1]

    def _of(self, keys: KeySet) -> Addresses:
        known = self._known.get(keys)
        if known is None:
            known = self._known[keys] = self._searched(keys.to_array())
        return known

    def _searched(self, keys: pa.Array) -> Addresses:
        (name,) = self._base.schema.primary_key
        parts = [_NOWHERE]
        for start in range(0, len(keys), KEYS_AT_A_TIME):
            asked = among(name, keys.slice(start, KEYS_AT_A_TIME))
            with lance_errors("search the base table's key index"):
                found = self._base.dataset.scanner(columns=[], filter=asked, with_row_address=True).to_table()
            parts.append(numbers(one_array(found.column("_rowaddr"))))
        return np.concatenate(parts)


def positions_of(dead: Addresses, addresses: Addresses) -> npt.NDArray[np.int64]:
    """Where in ``addresses`` those that are ``dead`` stand, ascending.

    Costs little more than the dead among them where ``addresses`` ascend, as in a scan in order.
    """
    if not len(addresses) or not len(dead):
        return np.empty(0, np.int64)
    if (addresses[1:] <= addresses[:-1]).any():
        return np.flatnonzero(np.isin(addresses, dead))
    low, high = np.searchsorted(dead, [addresses[0], addresses[-1] + np.uint64(1)])
    near = dead[low:high]
    places = np.searchsorted(addresses, near)
    here: npt.NDArray[np.int64] = places[addresses[places] == near]
    return here


def _has_btree(base: BaseTable) -> bool:
    """Whether a BTree on the key covers all fragments; one that does not would be a slow search."""
    key = base.schema.field_ids[base.schema.primary_key[0]]
    return any(
        "BTree" in index.details_type
        and index.field_ids == (key,)
        and base.manifest.covered_fragments(index.name) == base.manifest.fragment_ids
        for index in base.manifest.indexes
    )


class BaseSource:
    """One version of the base table, or some of its fragments."""

    name = "base"
    shard_id = None
    generation = 0
    in_memory = False

    def __init__(self, base: BaseTable, fragment_ids: frozenset[int] | None = None) -> None:
        self.base = base
        self.pruner = ShardPruner(base.details, base.schema)
        self.indexes = LanceIndexes(lambda: base.dataset)
        self._dataset = base.dataset
        self._fragment_ids = fragment_ids
        self._key_names = list(base.schema.primary_key)
        self._has_dictionaries = any(map(has_dictionary, base.schema.columns.types))
        self._overlap = BaseOverlap(base)

    def of_fragments(self, fragment_ids: frozenset[int]) -> BaseSource:
        """A part of the base table, for one of several tasks that read it; only :meth:`batches` knows."""
        return BaseSource(self.base, fragment_ids)

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
            # Nobody enforces keys: the base had one of them more than once.
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
            with lance_errors("count the rows of the base table"), refusing(sql):
                return int(self._dataset.count_rows(filter=sql))
        read = [] if isinstance(superseded, np.ndarray) else self._key_names
        batches = self._scan(read, sql, None, with_row_address=isinstance(superseded, np.ndarray))
        return sum(batch.num_rows - len(self._dead_rows(batch, superseded)) for batch in batches)

    def look_up(self, keys: KeyProbe, columns: Sequence[str]) -> Found:
        """A key that is twice in the base, which Lance does not rule out, has two rows here."""
        tables, numbers_of_keys = [], []
        for start in range(0, len(keys), KEYS_AT_A_TIME):
            asked = [column.slice(start, KEYS_AT_A_TIME) for column in keys.columns]
            rows, found = self._lookup(asked, columns)
            tables.append(rows)
            numbers_of_keys.append(found + start)
        found = np.concatenate(numbers_of_keys)
        return Found(found, pa.concat_tables(tables), found)

    def take(self, rows: Rows, columns: Sequence[str]) -> pa.Table:
        """Rows by Lance's row ids, in the order asked."""
        with lance_errors("read rows of the base table"):
            taken = self._dataset._take_rows(pa.array(rows, pa.uint64()), columns=list(columns))
        return self._joinable(taken)

    def nearest(self, query: NearestQuery, newer: Newer) -> Hits:
        """Through Lance, which searches fragments that its index does not cover one by one."""
        if self._is_empty_for(None):
            return Hits.none(self)
        use_index = self.indexes.metric(query.column) is query.metric

        def fetch(k: int) -> Candidates:
            found = self.indexes.nearest(
                query, query.column, k, columns=self._key_names, use_index=use_index, with_row_id=True
            )
            return nearest_candidates(_row_ids(found), found, self._live(found, newer))

        return Hits.filled_up(self, fetch, query.k, row_count(self._dataset), len(newer))

    def words(self, query: WordsQuery, newer: Newer) -> list[TextLevel]:
        if self._is_empty_for(None):
            return []
        if not is_large(row_count(self._dataset)):
            return [self._indexed_words(query, newer)]
        if self.indexes.text_params(query.column) is None:
            return [ReadLevel(query, self, lambda predicate: self._read_words(query, predicate, newer))]

        def live(_: Rows, found: pa.Table) -> Mask:
            return self._live(found, newer)

        column, names, sql = query.column, self._key_names, sql_of(query.predicate)
        return [
            LanceLevel(
                query, self, self.indexes, self._dataset, column, names, live, len(newer), "_rowid", sql
            )
        ]

    def explain(self, predicate: Predicate | None) -> str:
        return "" if predicate is None else ", filter pushed down"

    def _is_empty_for(self, predicate: Predicate | None) -> bool:
        """Whether there is no row, and no filter that Lance would have to judge: it may refuse one."""
        return not self.base.manifest.fragment_ids and (predicate is None or predicate.is_simple)

    def _superseded(self, newer: Newer) -> Newer | Addresses:
        """The rows to leave out: by address where an index told them, else by key."""
        # The keys of all fragments would be searched for the rows of some.
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
        if not len(superseded):
            return np.empty(0, np.int64)
        keys = key_values([batch.column(name) for name in self._key_names])
        return np.flatnonzero(superseded.contains(keys))

    def _lookup(self, keys: Sequence[pa.Array], columns: Sequence[str]) -> tuple[pa.Table, Rows]:
        sql = " AND ".join(
            among(name, column if len(column) == 1 else column.unique())
            for name, column in zip(self._key_names, keys, strict=True)
        )
        exact = len(keys) == 1 or len(keys[0]) == 1
        read = [*columns, *(name for name in self._key_names if name not in columns)]
        with lance_errors("look up rows of the base table"):
            if exact:
                rows = self._joinable(self._dataset.scanner(columns=read, filter=sql).to_table())
            else:
                # Each column has a wanted value, but not every combination was asked for.
                candidates = self._dataset.scanner(
                    columns=self._key_names, filter=sql, with_row_id=True
                ).to_table()
                wanted = pc.is_in(_keys_of(candidates, self._key_names), value_set=key_values(keys))
                rows = self.take(numbers(one_array(candidates["_rowid"].filter(wanted))), read)
        found = pc.index_in(_keys_of(rows, self._key_names), value_set=key_values(keys))
        return rows.select(list(columns)), numbers(found).astype(np.int64)

    def _scan(
        self,
        columns: Sequence[str],
        sql: str | None,
        limit: int | None,
        *,
        with_row_address: bool,
        offset: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        with lance_errors("read the base table"), refusing(sql):
            wanted = self._fragment_ids
            scanner = self._dataset.scanner(
                columns=list(columns),
                filter=sql,
                limit=limit,
                offset=offset,
                fragments=None
                if wanted is None
                else [each for each in self._dataset.get_fragments() if each.fragment_id in wanted],
                batch_size=self._batch_rows(columns),
                with_row_address=with_row_address,
            )
            batches = scanner.to_batches()
            yield from map(without_null_words_in, batches) if self._has_dictionaries else batches

    def _joinable(self, rows: pa.Table) -> pa.Table:
        return without_null_words_in(rows) if self._has_dictionaries else rows

    def _live(self, rows: pa.Table | pa.RecordBatch, newer: Newer) -> Mask:
        if not len(newer):
            return np.ones(rows.num_rows, np.bool_)
        return ~newer.contains(_keys_of(rows, self._key_names))

    def _indexed_words(self, query: WordsQuery, newer: Newer) -> IndexedLevel:
        # A version of a table that was deleted and made anew would be another one: its files tell.
        files = self.indexes.once("files", lambda: _data_files(self._dataset))
        key = (files, self.base.version, query.column, query.params)
        made = FIXED.get(key, lambda: self._index_of_words(query))
        live = np.ones(len(made.rows), np.bool_)
        if len(newer) and made.keys is not None:
            live = ~newer.contains(made.keys)
        matching = live
        if query.predicate is not None:
            with lance_errors("read the base table"), refusing(sql_of(query.predicate)):
                found = self._dataset.scanner(
                    columns=[], filter=sql_of(query.predicate), with_row_id=True
                ).to_table()
            matching = live & np.isin(made.rows, _row_ids(found))
        return IndexedLevel(query, self, made.index, made.index.rows, live, matching, made.rows)

    def _index_of_words(self, query: WordsQuery) -> FixedIndex:
        columns = list(dict.fromkeys([query.column, *self._key_names]))
        with lance_errors("read the base table"):
            rows = self._dataset.scanner(columns=columns, with_row_id=True, scan_in_order=True).to_table()
        index = index_of(one_array(rows.column(query.column)), query.params)
        keys = _keys_of(rows, self._key_names) if self._key_names else None
        return FixedIndex(index, _row_ids(rows), keys)

    def _read_words(
        self, query: WordsQuery, predicate: Predicate | None, newer: Newer
    ) -> Iterator[tuple[FullTextIndex, Rows, Mask]]:
        sql = sql_of(predicate)
        columns = list(dict.fromkeys([query.column, *self._key_names]))
        with lance_errors("read the base table"), refusing(sql):
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
    """``batch`` without the rows at some ascending positions; in pieces where that saves a large copy."""
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


def _keys_of(rows: pa.Table | pa.RecordBatch, names: Sequence[str]) -> pa.Array:
    return key_values([rows.column(name) for name in names])


def byte_width(type_: pa.DataType) -> int:
    """About how many bytes a value takes."""
    if pa.types.is_fixed_size_list(type_):
        return int(type_.list_size) * byte_width(type_.value_type)
    if type_.num_fields:
        return sum(byte_width(type_.field(i).type) for i in range(type_.num_fields))
    try:
        return max(int(type_.bit_width) // 8, 1)
    except ValueError:
        return _VARIABLE_BYTES
