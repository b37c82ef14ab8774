"""BaseSource: the base table under everything that is newer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.base import BaseTable
from lancewal.dialect import among
from lancewal.errors import InvalidInputError
from lancewal.format.dictionaries import has_dictionary, without_null_words_in
from lancewal.format.keys import key_values
from lancewal.format.spans import numbers, one_array
from lancewal.lance_errors import lance_errors, row_count
from lancewal.predicate import Predicate
from lancewal.reader.base_overlap import KEYS_AT_A_TIME, Addresses, BaseOverlap, positions_of
from lancewal.reader.key_set import KeySet
from lancewal.reader.pruning import ShardPruner
from lancewal.reader.source import Request, Rows

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
