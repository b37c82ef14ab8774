"""The rows that some SSTables leave behind: the newest of every key, and the keys that are dead.

Two passes. The first reads only keys, newest generation first, and notes which rows no newer
generation replaces; it keeps keys in memory, no rows. The second reads the rows, oldest
generation first, so that they reach the base table in the order in which they were written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.format import TOMBSTONE, KeySet, SsTableEntry, TableSchema, key_values
from lancewal.sstable import SsTable
from lancewal.storage import ObjectStore, ordered_map

Mask = npt.NDArray[np.bool_]

_REMOTE_READERS = 4
#: Rows are read in batches of about this size, so that wide ones do not come thousands at a time.
_BATCH_BYTES = 16 << 20
_MOST_ROWS = 8192


@dataclass(frozen=True)
class _Keys:
    """Keys of one SSTable in the order of its rows, and which rows are tombstones or replaced within it."""

    columns: list[pa.Array]
    values: pa.Array
    tombstones: Mask
    newest: Mask | None


@dataclass(frozen=True)
class NewestRows:
    """Which rows of each SSTable count, oldest generation first.

    ``dead`` are the key columns of keys whose newest version is a tombstone.
    """

    schema: TableSchema
    sstables: Sequence[SsTable]
    kept: Sequence[Mask]
    dead: Sequence[pa.Array]
    rows_in: int

    @property
    def num_rows(self) -> int:
        return sum(int(np.count_nonzero(mask)) for mask in self.kept)

    @property
    def num_dead(self) -> int:
        return len(self.dead[0]) if self.dead else 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The live rows, in the table's current columns."""
        for table, kept in zip(self.sstables, self.kept, strict=True):
            if kept.any():
                yield from _rows(table, self.schema, kept)


def newest_rows(
    store: ObjectStore, shard_id: UUID, entries: Sequence[SsTableEntry], schema: TableSchema
) -> NewestRows:
    """Which rows of ``entries`` (in any order) are the newest of their keys."""
    newest_first = sorted(entries, key=lambda entry: -entry.generation)
    seen = KeySet.empty()
    kept: list[Mask] = []
    dead: list[list[pa.Array]] = []
    rows_in = 0
    workers = 1 if store.is_local else _REMOTE_READERS
    read = ordered_map(
        lambda entry: _read_keys(SsTable.open(store, shard_id, entry), schema), newest_first, workers
    )
    for keys in read:
        rows_in += len(keys.values)
        counts = ~seen.contains(keys.values)
        if keys.newest is not None:
            counts &= keys.newest
        dying = counts & keys.tombstones
        if dying.any():
            dead.append([column.filter(pa.array(dying)) for column in keys.columns])
        kept.append(counts & ~keys.tombstones)
        seen |= KeySet.of([keys.values])
    types = [schema.columns.field(name).type for name in schema.primary_key]
    return NewestRows(
        schema,
        [SsTable.open(store, shard_id, entry) for entry in reversed(newest_first)],
        kept[::-1],
        [pa.concat_arrays([part[i] for part in dead]) for i in range(len(types))] if dead else [],
        rows_in,
    )


def all_rows(
    store: ObjectStore, shard_id: UUID, entries: Sequence[SsTableEntry], schema: TableSchema
) -> Iterator[pa.RecordBatch]:
    """Every row of ``entries`` (ascending), for tables without a key."""
    for entry in entries:
        table = SsTable.open(store, shard_id, entry)
        yield from table.scan(schema, schema.names, batch_size=_batch_rows(entry))


def _read_keys(table: SsTable, schema: TableSchema) -> _Keys:
    columns, offsets, tombstones = table.keys(schema)
    values = key_values(columns)
    newest: Mask | None = None
    if len(pc.unique(values)) != len(values):
        # Written without a deletion vector; which version of a key counts there the lookup knows.
        newest = table.lookup(columns) == offsets
    return _Keys(columns, values, tombstones, newest)


def _rows(table: SsTable, schema: TableSchema, kept: Mask) -> Iterator[pa.RecordBatch]:
    start = 0
    scan = table.scan(schema, schema.names, with_tombstone=True, batch_size=_batch_rows(table.entry))
    for batch in scan:
        mask = kept[start : start + batch.num_rows]
        start += batch.num_rows
        rows = batch.drop_columns([TOMBSTONE])
        if not mask.all():
            rows = rows.filter(pa.array(mask))
        if rows.num_rows:
            yield rows


def _batch_rows(entry: SsTableEntry) -> int:
    if not entry.in_memory_bytes or not entry.physical_rows:
        return _MOST_ROWS
    row_bytes = max(entry.in_memory_bytes // entry.physical_rows, 1)
    return min(max(_BATCH_BYTES // row_bytes, 1), _MOST_ROWS)
