"""SsTable: one flushed MemTable, read with the table's current schema.

Row offsets count from the SSTable's first row in insert order, and include older versions of keys. They are
equal to Lance's row addresses, because an SSTable is one fragment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.base import lance_errors
from lancewal.errors import ColumnMismatchError, InvalidInputError, StorageError
from lancewal.format import (
    TOMBSTONE,
    TOMBSTONE_FIELD,
    Alignment,
    ColumnSource,
    RowSum,
    SsTableEntry,
    TableSchema,
    as_shown,
    numbers,
    one_array,
    stored_names,
    without_null_words_in,
)
from lancewal.predicate import Predicate
from lancewal.sstable.key_index import ABSENT, KeyOrder, KeyProbe, Mask, Rows
from lancewal.sstable.opened import ROW_ADDRESS, OpenedSsTable, forget_sstable, open_sstable
from lancewal.storage import ObjectStore, layout, lazy_property

#: The optional offset column of scans. Lance refuses this name, so no table has such a column.
ROW_OFFSET = "_rowoffset"
_ROW_OFFSET_FIELD = pa.field(ROW_OFFSET, pa.int64(), nullable=False)
_KEY_BATCH_ROWS = 1 << 16


class SsTable:
    """One SSTable of a shard; every method may be called from any thread.

    Opening reads nothing. Lance's handles are shared by all instances of the process.
    """

    def __init__(
        self, store: ObjectStore, shard_id: UUID, entry: SsTableEntry, opened: OpenedSsTable
    ) -> None:
        self._store = store
        self._opened = opened
        self._aligned_to: tuple[TableSchema, Alignment] | None = None
        self._keys: tuple[tuple[str | None, ...], tuple[list[pa.Array], Rows, Mask]] | None = None
        self.shard_id = shard_id
        self.entry = entry
        self.generation = entry.generation
        self.uri = opened.uri

    @classmethod
    def open(cls, store: ObjectStore, shard_id: UUID, entry: SsTableEntry) -> SsTable:
        directory = layout.sstable_dir(shard_id, entry.path)
        return cls(store, shard_id, entry, open_sstable(store, directory, entry.notes))

    def __repr__(self) -> str:
        return f"SsTable({self.uri!r})"

    @property
    def dataset(self) -> lance.LanceDataset:
        """The rows as an ordinary Lance dataset, with the SSTable's own column names."""
        return self._opened.dataset

    @property
    def stored_columns(self) -> pa.Schema:
        """The columns of :attr:`dataset`, annotated with their field ids."""
        return self._opened.stored.columns

    @property
    def written_for(self) -> int | None:
        """The version of the base table that had these columns; ``None`` if it is unknown."""
        return self._opened.written_for

    @property
    def noted_rows(self) -> RowSum | None:
        """The checksum of the rows that the flush wrote; ``None`` if it was not recorded."""
        return self._opened.notes.rows

    def check_count(self, rows: int, *, may_have_more: bool = False) -> None:
        """Raise StorageError if the flush wrote another number of rows, tombstones included.

        ``may_have_more`` permits additional rows; it is for tables with a key, which decides what counts.
        """
        noted = self.noted_rows
        if noted is not None and (rows < noted.rows if may_have_more else rows != noted.rows):
            raise StorageError(f"{self.uri} has {rows} rows, the flush wrote {noted.rows}; run verify")

    def sum_rows(self) -> RowSum:
        """The checksum of the rows that the SSTable has now, over its own columns."""
        with lance_errors(f"read {self.uri}"):
            return RowSum.of(self.dataset.to_batches(), self._opened.stored.primary_key)

    def forget(self) -> None:
        """Close the process's handles on this SSTable; call after its sidecars were rewritten."""
        forget_sstable(self._store, layout.sstable_dir(self.shard_id, self.entry.path))

    def bloom_problem(self) -> str | None:
        """The problem with the bloom filter, as far as it can be found without the rows."""
        return self._opened.checked_bloom()[1]

    def alignment(self, schema: TableSchema) -> Alignment:
        """How the columns of ``schema`` are made from those of :attr:`dataset`."""
        known = self._aligned_to
        if known is None or known[0] is not schema:
            try:
                alignment = Alignment.of(schema, self._opened.stored.columns, self._opened.written_for)
            except ColumnMismatchError as error:
                raise ColumnMismatchError(f"{self.uri} does not fit the table: {error}") from error
            known = self._aligned_to = schema, alignment
        return known[1]

    def count_live(self) -> int:
        """How many rows a reader sees: the newest row of each key, without tombstones."""
        with lance_errors(f"count the rows of {self.uri}"):
            if not self._has_tombstones:
                return int(self.dataset.count_rows())
            return int(self.dataset.count_rows(filter=f"NOT {TOMBSTONE}"))

    def scan(
        self,
        schema: TableSchema,
        columns: Sequence[str],
        *,
        filter: Predicate | None = None,
        with_offsets: bool = False,
        with_tombstone: bool = False,
        batch_size: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The newest row of each key, in insert order, as ``columns`` of ``schema``.

        ``filter`` is over the columns of ``schema``. ``with_offsets`` adds ``_rowoffset``. Deleted keys
        are left out, unless ``with_tombstone`` adds them and the column ``_tombstone``; their other
        columns are null, also for the filter.
        """
        alignment = self.alignment(schema)
        chosen = alignment.select(columns)
        later = [] if filter is None else alignment.differing(filter.columns)
        read = stored_names([*chosen, *later]) + ([TOMBSTONE] if self._has_tombstones else [])
        sql = None if filter is None or later else filter.sql
        with lance_errors(f"read {self.uri}", sql=sql):
            scanner = self.dataset.scanner(
                columns=read,
                filter=sql,
                with_row_address=with_offsets or not read,
                batch_size=batch_size,
                scan_in_order=True,
            )
        return self._scan(scanner, chosen, sql, filter, later, with_offsets, with_tombstone)

    def _scan(
        self,
        scanner: lance.LanceScanner,
        chosen: Sequence[ColumnSource],
        sql: str | None,
        predicate: Predicate | None,
        later: Sequence[ColumnSource],
        with_offsets: bool,
        with_tombstone: bool,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of :meth:`scan`; ``later`` has the predicate's columns if Lance does not evaluate it."""
        for stored in self._batches(scanner, sql):
            tombstones = self._tombstones(stored)
            kept = np.ones(stored.num_rows, np.bool_) if with_tombstone else ~tombstones
            if predicate is not None and later:
                kept &= predicate.mask(as_shown(stored, later))
            rows = as_shown(stored, chosen)
            if with_offsets:
                offsets = numbers(stored.column(ROW_ADDRESS)).astype(np.int64)
                rows = rows.append_column(_ROW_OFFSET_FIELD, pa.array(offsets))
            if with_tombstone:
                rows = rows.append_column(TOMBSTONE_FIELD, pa.array(tombstones))
            if not kept.all():
                rows = rows.filter(pa.array(kept))
            if rows.num_rows:
                yield rows

    def keys(self, schema: TableSchema) -> tuple[list[pa.Array], Rows, Mask]:
        """Key columns, row offset and tombstone mark of every key's newest row, in insert order.

        Reads only the key columns, once per instance.
        """
        chosen = self.alignment(schema).select(schema.primary_key)
        sources = tuple(source.stored_name for source in chosen)
        known = self._keys
        if known is None or known[0] != sources:
            known = self._keys = sources, self.read(schema, schema.primary_key)
        return known[1]

    def read(self, schema: TableSchema, columns: Sequence[str]) -> tuple[list[pa.Array], Rows, Mask]:
        """``columns``, row offset and tombstone mark of every key's newest row, in insert order; all at once.

        Read like this only what fits into memory; :meth:`scan` returns one batch after the other.
        """
        batches = self.scan(
            schema, columns, with_offsets=True, with_tombstone=True, batch_size=_KEY_BATCH_ROWS
        )
        fields = [*(schema.plain.field(name) for name in columns), _ROW_OFFSET_FIELD, TOMBSTONE_FIELD]
        rows = pa.Table.from_batches(batches, pa.schema(fields))
        *found, offsets, tombstones = (one_array(column) for column in rows.columns)
        return found, numbers(offsets), np.asarray(tombstones.to_numpy(zero_copy_only=False), np.bool_)

    def lookup(self, keys: Sequence[pa.Array] | KeyProbe) -> Rows:
        """The row offset of each key's newest version; -1 for a key that the SSTable does not have.

        A tombstone is found like any other row. ``keys`` are the key columns, in the order of the
        primary key and with its exact types. To search several SSTables, pass a
        :class:`~lancewal.sstable.KeyProbe`, so that keys are hashed once.
        """
        probe = keys if isinstance(keys, KeyProbe) else KeyProbe(keys)
        found = np.full(len(probe), ABSENT, np.int64)
        asked = probe.candidates(self._opened.bloom)
        if len(asked) == 0:
            return found
        index = self._opened.key_index
        values = probe.values_at(asked)
        found[asked] = self._find_by_scan(values) if index is None else index.find(values)
        return found

    def is_open_for(self, keys: KeyProbe) -> bool:
        """Whether the files that a lookup of these keys needs are open."""
        opened = self._opened
        return opened.has("key_index", "_fragments") or (
            opened.has("bloom") and not len(keys.candidates(opened.bloom))
        )

    def open_for(self, keys: KeyProbe | None = None) -> None:
        """Open the files that a lookup of these keys needs, or all; in parallel if the storage is remote."""
        if keys is None or len(keys.candidates(self._opened.bloom)):
            self._opened.open_for_lookups()

    def take(
        self,
        offsets: Rows,
        schema: TableSchema,
        columns: Sequence[str],
        with_tombstone: bool = False,
    ) -> pa.RecordBatch:
        """The rows at ``offsets``, in this order, as ``columns`` of ``schema``.

        Raises InvalidInputError for an offset that is not the newest row of its key.
        """
        chosen = self.alignment(schema).select(columns)
        read = stored_names(chosen)
        if not read or (with_tombstone and self._has_tombstones):
            read.append(TOMBSTONE if self._has_tombstones else self.dataset.schema.names[0])
        outside = np.count_nonzero((offsets < 0) | (offsets >= self._opened.physical_rows))
        table = None if outside else self._opened.rows_at(offsets, read)
        if table is None or table.num_rows != len(offsets):
            missing = outside if table is None else len(offsets) - table.num_rows
            raise InvalidInputError(f"{missing} of {len(offsets)} row offsets are no rows of {self.uri}")
        stored = pa.RecordBatch.from_arrays([one_array(c) for c in table.columns], schema=table.schema)
        rows = as_shown(stored, chosen)
        if with_tombstone:
            rows = rows.append_column(TOMBSTONE_FIELD, pa.array(self._tombstones(stored)))
        return rows

    @lazy_property
    def _has_tombstones(self) -> bool:
        """Whether there is a tombstone column; without one every row is live."""
        return TOMBSTONE in self._opened.stored.columns.names

    def _batches(self, scanner: lance.LanceScanner, sql: str | None) -> Iterator[pa.RecordBatch]:
        with lance_errors(f"read {self.uri}", sql=sql):
            batches = scanner.to_batches()
            has_dictionaries = self._opened.stored.has_dictionaries
            yield from map(without_null_words_in, batches) if has_dictionaries else batches

    def _tombstones(self, stored: pa.RecordBatch) -> Mask:
        if not self._has_tombstones:
            return np.zeros(stored.num_rows, np.bool_)
        return np.asarray(stored.column(TOMBSTONE).to_numpy(zero_copy_only=False), np.bool_)

    @lazy_property
    def _scanned_keys(self) -> tuple[pa.Array, Rows]:
        """All keys and their newest rows, for an SSTable without a key index."""
        stored = self._opened.stored
        if not stored.primary_key:
            raise InvalidInputError(f"{self.uri} has no primary key, so that no row can be looked up by it")
        own = TableSchema(pa.schema([f for f in stored.columns if f.name != TOMBSTONE]), stored.primary_key)
        columns, offsets, _ = self.keys(own)
        # Lance wrote such SSTables with the newest row first, but KeyOrder expects the newest row last.
        order = KeyOrder.of([column[::-1] for column in columns])
        return order.values, offsets[::-1][order.rows]

    def _find_by_scan(self, values: pa.Array) -> Rows:
        known, offsets = self._scanned_keys
        if values.type != known.type:
            raise InvalidInputError(f"the keys of {self.uri} are {known.type}, not {values.type}")
        places = pc.index_in(values, value_set=known).fill_null(ABSENT).to_numpy().astype(np.int64)
        return np.where(places != ABSENT, offsets[places], ABSENT)
