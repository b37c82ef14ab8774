"""BaseSource: the base table under everything that is newer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.base import BaseTable, lance_errors, row_count
from lancewal.errors import InvalidInputError
from lancewal.format import KeySet, has_dictionary, key_values, numbers, one_array, without_null_words_in
from lancewal.index import FullTextParams, Metric, full_text_params
from lancewal.predicate import Predicate, among
from lancewal.reader.pruning import ShardPruner
from lancewal.reader.source import Request, Rows

logger = logging.getLogger(__name__)

# What a Lance dataset's indexes say about a column, asked once per dataset.


T = TypeVar("T")

#: A handle stays at its version, so what was found stays true.
_known: weakref.WeakKeyDictionary[lance.LanceDataset, dict[Any, Any]] = weakref.WeakKeyDictionary()


def once(dataset: lance.LanceDataset, what: object, find: Callable[[], T]) -> T:
    """``find()`` the first time, what it gave ever after. Two threads may both be the first."""
    known = _known.setdefault(dataset, {})
    if what not in known:
        known[what] = find()
    return cast("T", known[what])


def vector_metric(dataset: lance.LanceDataset, column: str) -> Metric | None:
    """The metric of the column's vector index; ``None`` when it has none that we know."""
    return once(dataset, ("metric", column), lambda: _metric(dataset, column))


def text_params(dataset: lance.LanceDataset, column: str) -> FullTextParams | None:
    """The tokenizer settings of the column's full-text index; ``None`` when it has none."""

    def find() -> FullTextParams | None:
        with lance_errors("read the indexes of a table"):
            return full_text_params(dataset, column)

    return once(dataset, ("words", column), find)


def hint(dataset: lance.LanceDataset, message: str, *args: object) -> None:
    """Say in the log, once per dataset, why a search is slow."""
    once(dataset, ("hint", message, args), lambda: logger.info(message, *args))


def _metric(dataset: lance.LanceDataset, column: str) -> Metric | None:
    known = [each.value for each in Metric]
    with lance_errors("read the indexes of a table"):
        for description in dataset.describe_indices():
            if list(description.field_names) == [column] and str(description.index_type).startswith("IVF"):
                named = dict(description.details).get("metric_type")
                # Older versions of Lance left it out of the description.
                segments = [] if named else dataset.stats.index_stats(description.name)["indices"]
                metric = str(named or next((part.get("metric_type") for part in segments), "")).lower()
                if metric in known:
                    return Metric(metric)
    return None


# Which rows of the base are superseded, asked of its BTree on the key.
#
# Without it every key of the base has to be compared with those of newer levels. With it the
# cost is that of the newer keys, and for SSTables it is paid once for each base version.


Addresses = npt.NDArray[np.uint64]

_NOWHERE: Addresses = np.empty(0, np.uint64)
#: Keys in one ``IN``: Lance's planner slows down beyond.
KEYS_AT_A_TIME = 5_000
#: An index search for a key costs as much as comparing so many keys of the base. It is
#: several times as much, but a level is read again and again before it is compacted.
_ROWS_PER_SEARCH = 50


class BaseOverlap:
    """Row addresses, in one version of the base, of the keys that newer levels hold."""

    def __init__(self, base: BaseTable) -> None:
        self._base = base
        self._known: weakref.WeakKeyDictionary[KeySet, Addresses] = weakref.WeakKeyDictionary()
        self._usable = len(base.schema.primary_key) == 1 and _has_btree(base)

    def addresses(self, levels: Sequence[KeySet]) -> Addresses | None:
        """Ascending addresses of the superseded rows; ``None`` when comparing keys is cheaper."""
        unknown = sum(len(keys) for keys in levels if keys not in self._known)
        if not self._usable or unknown * _ROWS_PER_SEARCH > row_count(self._base.dataset):
            return None
        parts = [self._of(keys) for keys in levels]
        return np.unique(np.concatenate(parts)) if parts else _NOWHERE

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


#: The least that a batch is worth reading for, and the most that is held of one.
_BATCH_BYTES = 16 << 20
_MIN_BATCH_ROWS = 1024
_MAX_BATCH_ROWS = 65_536
#: Values of variable length are taken to be of this size.
_VARIABLE_BYTES = 64
#: Where pieces between rows to leave out are larger than this, they are passed on uncopied.
_UNCOPIED_BYTES = 64 << 10


class BaseSource:
    """Reads one version of the base table; what newer levels hold of it is left out."""

    name = "base"

    def __init__(self, base: BaseTable) -> None:
        self.base = base
        self._dataset = base.dataset
        self._key_names = list(base.schema.primary_key)
        self._has_dictionaries = any(map(has_dictionary, base.schema.columns.types))
        self._overlap = BaseOverlap(base)
        self.pruner = ShardPruner(base.details, base.schema)

    def batches(self, request: Request, newer: Sequence[KeySet]) -> Iterator[pa.RecordBatch]:
        """The rows that the request is about, without the keys of ``newer`` levels."""
        if self._has_nothing_to_say(request.predicate):
            return
        superseded = self._superseded(newer)
        read = list(request.columns)
        if isinstance(superseded, KeySet) and len(superseded):
            read += [name for name in self._key_names if name not in read]
        limit = None if request.limit is None else request.limit + len(superseded)
        by_address = isinstance(superseded, np.ndarray)
        scanned = kept = 0
        for batch in self._scan(read, request.sql, limit, with_row_address=by_address):
            dead = self._dead_rows(batch, superseded)
            scanned, kept = scanned + batch.num_rows, kept + batch.num_rows - len(dead)
            yield from without_rows(batch.select(list(request.columns)), dead)
        if request.limit is not None and scanned == limit and kept < request.limit:
            # Nobody enforces keys: the base had one of them more than once.
            for batch in self._scan(read, request.sql, None, with_row_address=by_address, offset=scanned):
                dead = self._dead_rows(batch, superseded)
                yield from without_rows(batch.select(list(request.columns)), dead)

    def count(self, predicate: Predicate | None, newer: Sequence[KeySet]) -> int:
        if self._has_nothing_to_say(predicate):
            return 0
        sql = None if predicate is None else predicate.sql
        superseded = self._superseded(newer)
        if sql is None and isinstance(superseded, np.ndarray):
            return row_count(self._dataset) - len(superseded)
        if not len(superseded):
            with lance_errors("count the rows of the base table"), refusing(sql):
                return int(self._dataset.count_rows(filter=sql))
        read = [] if isinstance(superseded, np.ndarray) else self._key_names
        batches = self._scan(read, sql, None, with_row_address=isinstance(superseded, np.ndarray))
        return sum(batch.num_rows - len(self._dead_rows(batch, superseded)) for batch in batches)

    def _has_nothing_to_say(self, predicate: Predicate | None) -> bool:
        """Without rows it has none to give, and a filter of simple conditions none to refuse."""
        return not self.base.manifest.fragment_ids and (predicate is None or predicate.is_simple)

    def _superseded(self, newer: Sequence[KeySet]) -> KeySet | Addresses:
        """The rows to leave out: by address where an index told them, else by key."""
        levels = [keys for keys in newer if len(keys)]
        if not levels:
            return KeySet.empty()
        addresses = self._overlap.addresses(levels)
        return KeySet.union(levels) if addresses is None else addresses

    def _dead_rows(self, batch: pa.RecordBatch, superseded: KeySet | Addresses) -> Rows:
        if isinstance(superseded, np.ndarray):
            return positions_of(superseded, numbers(batch.column("_rowaddr")))
        if not len(superseded):
            return np.empty(0, np.int64)
        keys = key_values([batch.column(name) for name in self._key_names])
        return np.flatnonzero(superseded.contains(keys))

    def lookup(self, keys: Sequence[pa.Array], columns: Sequence[str]) -> tuple[pa.Table, Rows]:
        """The rows of some keys, and for each row the number of its key.

        ``keys`` are the key columns; a key is asked for once.
        """
        tables, numbers_of_keys = [], []
        for start in range(0, len(keys[0]), KEYS_AT_A_TIME):
            asked = [column.slice(start, KEYS_AT_A_TIME) for column in keys]
            rows, found = self._lookup(asked, columns)
            tables.append(rows)
            numbers_of_keys.append(found + start)
        return pa.concat_tables(tables), np.concatenate(numbers_of_keys)

    def take(self, row_ids: Rows, columns: Sequence[str]) -> pa.Table:
        """Rows by Lance's row ids, in the order asked."""
        with lance_errors("read rows of the base table"):
            rows = self._dataset._take_rows(pa.array(row_ids, pa.uint64()), columns=list(columns))
        return self._joinable(rows)

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
            scanner = self._dataset.scanner(
                columns=list(columns),
                filter=sql,
                limit=limit,
                offset=offset,
                batch_size=self._batch_rows(columns),
                with_row_address=with_row_address,
            )
            batches = scanner.to_batches()
            yield from map(without_null_words_in, batches) if self._has_dictionaries else batches

    def _joinable(self, rows: pa.Table) -> pa.Table:
        return without_null_words_in(rows) if self._has_dictionaries else rows

    def _batch_rows(self, columns: Sequence[str]) -> int:
        width = sum(_byte_width(self.base.schema.plain.field(name).type) for name in columns)
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


@contextmanager
def refusing(sql: str | None) -> Iterator[None]:
    """Turns Lance's refusal of a filter, at planning or on some row's value, into ours."""
    try:
        yield
    except ValueError as error:
        about_rows = isinstance(error, pa.ArrowException)
        if sql is None or (about_rows and "filter expression" not in str(error)):
            raise
        raise InvalidInputError(f"the filter {sql!r} is refused: {error}") from error


def _keys_of(rows: pa.Table, names: Sequence[str]) -> pa.Array:
    return key_values([rows.column(name) for name in names])


def _byte_width(type_: pa.DataType) -> int:
    if pa.types.is_fixed_size_list(type_):
        return int(type_.list_size) * _byte_width(type_.value_type)
    if type_.num_fields:
        return sum(_byte_width(type_.field(i).type) for i in range(type_.num_fields))
    try:
        return max(int(type_.bit_width) // 8, 1)
    except ValueError:
        return _VARIABLE_BYTES
