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
from lancewal.format.keys import key_values
from lancewal.format.spans import numbers, one_array
from lancewal.predicate import Predicate
from lancewal.reader.key_set import KeySet
from lancewal.reader.source import Request, Rows
from lancewal.sstable.lance_errors import lance_errors

#: The least that a batch is worth reading for, and the most that is held of one.
_BATCH_BYTES = 16 << 20
_MIN_BATCH_ROWS = 1024
_MAX_BATCH_ROWS = 65_536
#: Values of variable length are taken to be of this size.
_VARIABLE_BYTES = 64
#: Keys in one ``IN``: Lance's planner slows down beyond.
_KEYS_AT_A_TIME = 5_000


class BaseSource:
    """Reads one version of the base table; superseded rows are told by their keys."""

    name = "base"

    def __init__(self, base: BaseTable) -> None:
        self._base = base
        self._dataset = base.dataset
        self._key_names = list(base.schema.primary_key)

    def batches(self, request: Request, newer: KeySet) -> Iterator[pa.RecordBatch]:
        """The rows that the request is about, without ``newer`` keys."""
        read = list(request.columns)
        if len(newer):
            read += [name for name in self._key_names if name not in read]
        limit = None if request.limit is None else request.limit + len(newer)
        for batch in self._scan(read, request.sql, limit):
            if len(newer):
                dead = newer.contains(key_values([batch.column(name) for name in self._key_names]))
                batch = batch.select(list(request.columns))
                if dead.any():
                    batch = batch.filter(pa.array(~dead))
            if batch.num_rows:
                yield batch

    def count(self, predicate: Predicate | None, newer: KeySet) -> int:
        sql = None if predicate is None else predicate.sql
        if not len(newer):
            with lance_errors("count the rows of the base table"), _refusing(sql):
                return int(self._dataset.count_rows(filter=sql))
        counted = superseded = 0
        for batch in self._scan(self._key_names, sql, None):
            counted += batch.num_rows
            superseded += int(np.count_nonzero(newer.contains(key_values(batch.columns))))
        return counted - superseded

    def lookup(self, keys: Sequence[pa.Array], columns: Sequence[str]) -> tuple[pa.Table, Rows]:
        """The rows of some keys, and for each row the number of its key.

        ``keys`` are the key columns; a key is asked for once.
        """
        tables, numbers_of_keys = [], []
        for start in range(0, len(keys[0]), _KEYS_AT_A_TIME):
            asked = [column.slice(start, _KEYS_AT_A_TIME) for column in keys]
            rows, found = self._lookup(asked, columns)
            tables.append(rows)
            numbers_of_keys.append(found + start)
        return pa.concat_tables(tables), np.concatenate(numbers_of_keys)

    def take(self, row_ids: Rows, columns: Sequence[str]) -> pa.Table:
        """Rows by Lance's row ids, in the order asked."""
        with lance_errors("read rows of the base table"):
            return self._dataset._take_rows(pa.array(row_ids, pa.uint64()), columns=list(columns))

    def _lookup(self, keys: Sequence[pa.Array], columns: Sequence[str]) -> tuple[pa.Table, Rows]:
        sql = " AND ".join(
            among(name, column if len(column) == 1 else column.unique())
            for name, column in zip(self._key_names, keys, strict=True)
        )
        exact = len(keys) == 1 or len(keys[0]) == 1
        read = [*columns, *(name for name in self._key_names if name not in columns)]
        with lance_errors("look up rows of the base table"):
            if exact:
                rows = self._dataset.scanner(columns=read, filter=sql).to_table()
            else:
                # Each column has a wanted value, but not every combination was asked for.
                candidates = self._dataset.scanner(
                    columns=self._key_names, filter=sql, with_row_id=True
                ).to_table()
                wanted = pc.is_in(_keys_of(candidates, self._key_names), value_set=key_values(keys))
                rows = self.take(numbers(one_array(candidates["_rowid"].filter(wanted))), read)
        found = pc.index_in(_keys_of(rows, self._key_names), value_set=key_values(keys))
        return rows.select(list(columns)), numbers(found).astype(np.int64)

    def _scan(self, columns: Sequence[str], sql: str | None, limit: int | None) -> Iterator[pa.RecordBatch]:
        scanner = self._dataset.scanner(
            columns=list(columns), filter=sql, limit=limit, batch_size=self._batch_rows(columns)
        )
        with lance_errors("read the base table"), _refusing(sql):
            yield from scanner.to_batches()

    def _batch_rows(self, columns: Sequence[str]) -> int:
        width = sum(_byte_width(self._base.schema.plain.field(name).type) for name in columns)
        return min(max(_BATCH_BYTES // max(width, 1), _MIN_BATCH_ROWS), _MAX_BATCH_ROWS)


@contextmanager
def _refusing(sql: str | None) -> Iterator[None]:
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
