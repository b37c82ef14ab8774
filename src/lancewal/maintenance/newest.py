"""The newest row of each key in the SSTables of a shard, for a compaction.

Small SSTables are read in one pass. Large ones take two passes. The first reads only keys, newest generation
first, and notes which rows no newer generation replaces; it keeps keys in memory, but no rows. The second
reads the rows, oldest generation first, which is the order in which they were written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeAlias
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.errors import LanceWalError
from lancewal.format import (
    TOMBSTONE,
    SsTableEntry,
    TableSchema,
    key_values,
    superseded,
)
from lancewal.sstable import SsTable
from lancewal.storage import ObjectStore, ordered_map

Mask: TypeAlias = npt.NDArray[np.bool_]
#: SSTables of shards, ascending.
Generations: TypeAlias = Mapping[UUID, Sequence[SsTableEntry]]

_REMOTE_READERS = 16
#: Rows are read in batches of about this size.
_BATCH_BYTES = 16 << 20
_MOST_ROWS = 8192
#: Batches below this size are put together.
_SMALL_PIECE_BYTES = 64 << 10
_JOINED_BYTES = 4 << 20
#: SSTables below this size are read in one pass.
_SMALL_BYTES = 1 << 20


class UnreadableError(LanceWalError):
    """The rows of some shards cannot be read."""

    def __init__(self, errors: Mapping[UUID, Exception]) -> None:
        super().__init__("some shards cannot be read")
        self.errors = errors


@dataclass(frozen=True)
class _Level:
    """The keys of one SSTable in the order of its rows, and which rows are tombstones or replaced within it.

    ``rows`` is set only if the SSTable is small.
    """

    table: SsTable
    columns: list[pa.Array]
    values: pa.Array
    tombstones: Mask
    newest: Mask | None
    rows: pa.RecordBatch | None


@dataclass(frozen=True)
class NewestRows:
    """Which rows of each SSTable of a shard are the newest of their keys, oldest generation first.

    ``dead`` holds the key columns of keys whose newest version is a tombstone. ``keys`` holds all keys, dead
    or not. ``small`` holds the rows themselves for SSTables whose rows are in memory.
    """

    shard_id: UUID
    schema: TableSchema
    sstables: Sequence[SsTable]
    kept: Sequence[Mask]
    small: Sequence[pa.RecordBatch | None]
    dead: Sequence[pa.Array]
    keys: pa.Array
    rows_in: int
    num_rows: int
    num_dead: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The live rows, in the table's current columns."""
        for table, kept, small in zip(self.sstables, self.kept, self.small, strict=True):
            if not kept.any():
                continue
            if small is not None:
                yield small
                continue
            try:
                yield from _rows(table, self.schema, kept)
            except Exception as error:
                raise UnreadableError({self.shard_id: error}) from error


def newest_rows(
    store: ObjectStore, shard_id: UUID, entries: Sequence[SsTableEntry], schema: TableSchema
) -> NewestRows:
    """Which rows of ``entries`` (in any order) are the newest of their keys."""
    ((_, found),) = read_shards(store, schema, {shard_id: entries})
    if isinstance(found, Exception):
        raise found
    return found


def read_shards(
    store: ObjectStore, schema: TableSchema, generations: Generations
) -> Iterator[tuple[UUID, NewestRows | Exception]]:
    """The newest rows of each shard, or why they cannot be read."""
    entries = [(shard_id, entry) for shard_id in generations for entry in generations[shard_id]]
    read = partial(_read_level, store, schema)
    levels = ordered_map(read, entries, 1 if store.is_local else _REMOTE_READERS)
    for shard_id, some in generations.items():
        found = list(islice(levels, len(some)))
        errors = [each for each in found if isinstance(each, Exception)]
        yield shard_id, errors[0] if errors else _newest(shard_id, schema, found)  # type: ignore[arg-type]


def _newest(shard_id: UUID, schema: TableSchema, levels: Sequence[_Level]) -> NewestRows:
    levels = sorted(levels, key=lambda level: level.table.generation)
    kept: list[Mask] = []
    dead: list[list[pa.Array]] = []
    keys: list[pa.Array] = []
    newest_first = levels[::-1]
    for level, replaced in zip(newest_first, superseded([each.values for each in newest_first]), strict=True):
        counts = ~replaced
        if level.newest is not None:
            counts &= level.newest
        keys.append(level.values if counts.all() else level.values.filter(pa.array(counts)))
        dying = counts & level.tombstones
        if dying.any():
            dead.append([column.filter(pa.array(dying)) for column in level.columns])
        kept.append(counts & ~level.tombstones)
    kept.reverse()
    return NewestRows(
        shard_id,
        schema,
        [level.table for level in levels],
        kept,
        [
            None if level.rows is None else _filtered(level.rows, mask)
            for level, mask in zip(levels, kept, strict=True)
        ],
        [pa.concat_arrays(parts) for parts in zip(*dead, strict=True)],
        pa.concat_arrays(keys),
        sum(len(level.values) for level in levels),
        sum(int(np.count_nonzero(mask)) for mask in kept),
        sum(len(columns[0]) for columns in dead),
    )


def _read_level(
    store: ObjectStore, schema: TableSchema, wanted: tuple[UUID, SsTableEntry]
) -> _Level | Exception:
    shard_id, entry = wanted
    table = SsTable.open(store, shard_id, entry)
    try:
        rows = None
        if (entry.in_memory_bytes or _SMALL_BYTES) < _SMALL_BYTES:
            read, offsets, tombstones = table.read(schema, schema.names)
            rows = pa.RecordBatch.from_arrays(read, schema=schema.plain)
            columns = [rows.column(name) for name in schema.primary_key]
        else:
            columns, offsets, tombstones = table.keys(schema)
        values = key_values(columns)
        newest: Mask | None = None
        table.check_count(len(values), may_have_more=True)
        if len(pc.unique(values)) != len(values):
            # Written without a deletion vector. The lookup finds the newest version of each key.
            newest = table.lookup(columns) == offsets
    except Exception as error:
        return error
    return _Level(table, columns, values, tombstones, newest, rows)


def _rows(table: SsTable, schema: TableSchema, kept: Mask) -> Iterator[pa.RecordBatch]:
    start = 0
    scan = table.scan(schema, schema.names, with_tombstone=True, batch_size=rows_per_batch(table.entry))
    for batch in scan:
        mask = kept[start : start + batch.num_rows]
        start += batch.num_rows
        rows = _filtered(batch.drop_columns([TOMBSTONE]), mask)
        if rows.num_rows:
            yield rows


def _filtered(rows: pa.RecordBatch, mask: Mask) -> pa.RecordBatch:
    return rows if mask.all() else rows.filter(pa.array(mask))


def rows_per_batch(entry: SsTableEntry) -> int:
    """How many rows of an SSTable to read at a time; fewer if rows are wide, to bound memory."""
    if not entry.in_memory_bytes or not entry.physical_rows:
        return _MOST_ROWS
    row_bytes = max(entry.in_memory_bytes // entry.physical_rows, 1)
    return min(max(_BATCH_BYTES // row_bytes, 1), _MOST_ROWS)


def joined_rows(shards: Mapping[UUID, NewestRows], sizes: Counter[UUID]) -> Iterator[pa.RecordBatch]:
    """The live rows of all shards, with small batches put together, because a merge has a cost per batch.

    ``sizes`` counts the bytes of each shard's rows.
    """
    small: list[pa.RecordBatch] = []
    size = 0
    for shard_id, rows in shards.items():
        for batch in rows.batches():
            sizes[shard_id] += batch.nbytes
            if batch.nbytes < _SMALL_PIECE_BYTES:
                small.append(batch)
                size += batch.nbytes
            if small and (batch.nbytes >= _SMALL_PIECE_BYTES or size > _JOINED_BYTES):
                yield pa.concat_batches(small)
                small, size = [], 0
            if batch.nbytes >= _SMALL_PIECE_BYTES:
                yield batch
    if small:
        yield pa.concat_batches(small)


def chunks(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, limit: int
) -> Iterator[tuple[pa.Table, bool]]:
    """The rows as tables of about ``limit`` bytes, each with whether it is the last.

    There is at least one table, which may be empty.
    """
    chunk: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        rows = max(1, min(batch.num_rows, limit * batch.num_rows // max(batch.nbytes, 1)))
        for start in range(0, batch.num_rows, rows):
            piece = batch.slice(start, rows)
            if chunk and size + piece.nbytes > limit:
                yield pa.Table.from_batches(chunk, schema), False
                chunk, size = [], 0
            chunk.append(piece)
            size += piece.nbytes
    yield pa.Table.from_batches(chunk, schema), True
