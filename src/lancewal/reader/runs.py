"""Runs of WAL entries in memory, which make up a tail.

Entries are often small, and each entry in memory costs kilobytes besides its rows. So small entries are
copied into one batch, and runs are joined as they grow: any number of entries makes only a few runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from lancewal.format import TOMBSTONE, TableSchema, WalEntry
from lancewal.memtable import BATCH_OVERHEAD_BYTES
from lancewal.reader.source import Rows
from lancewal.storage import Lease

#: Entries are read into runs of up to ``_READ_BYTES``, and runs are joined up to ``_RUN_BYTES``.
_READ_BYTES = 2 << 20
_RUN_BYTES = 16 << 20
#: Batches that are smaller than this on average are copied into one.
_SMALL_BATCH = 128 << 10
#: A run is joined with the run before it, unless that run has at least this many times its rows.
_FAN_OUT = 2
#: The memory of a tail's key index besides the keys.
_INDEX_BYTES_PER_ROW = 48


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive entries of one generation that were written for one version of the base table.

    ``batches`` hold all columns, or only keys and tombstones. ``positions`` are the positions of the entries,
    ``ends`` the numbers of rows up to the end of each entry.
    """

    generation: int | None
    #: The version of the base table that the rows were written for, if they say so.
    written_for: int | None
    positions: Rows
    ends: Rows
    #: The size of the entries on storage.
    num_bytes: int
    is_whole: bool
    batches: tuple[pa.RecordBatch, ...]
    lease: Lease | None = None

    @classmethod
    def of(cls, entries: Sequence[WalEntry], schema: TableSchema) -> Run:
        """A run with all columns of entries that :func:`in_some` put together."""
        batches = [batch for entry in entries for batch in entry.rows(schema)]
        return cls(
            entries[0].generation,
            entries[0].base_version,
            np.array([entry.position for entry in entries], np.int64),
            np.cumsum([entry.num_rows for entry in entries], dtype=np.int64),
            sum(entry.num_bytes for entry in entries),
            True,
            _joined(batches),
        )

    @property
    def num_rows(self) -> int:
        return int(self.ends[-1])

    @cached_property
    def held_bytes(self) -> int:
        """The memory of the rows and of the index of their keys."""
        rows = sum(int(batch.get_total_buffer_size()) for batch in self.batches)
        return rows + BATCH_OVERHEAD_BYTES * len(self.batches) + _INDEX_BYTES_PER_ROW * self.num_rows

    def between(self, start: int, end: int) -> Run | None:
        """The entries from position ``start`` up to ``end`` (exclusive), if there are any."""
        first, last = np.searchsorted(self.positions, (start, end)).tolist()
        if last - first == len(self.positions):
            return self
        if first >= last:
            return None
        first_row = int(self.ends[first - 1]) if first else 0
        rows = pa.Table.from_batches(self.batches).slice(first_row, int(self.ends[last - 1]) - first_row)
        return replace(
            self,
            positions=self.positions[first:last],
            ends=self.ends[first:last] - first_row,
            num_bytes=self.num_bytes * (last - first) // len(self.positions),
            batches=tuple(rows.to_batches()),
        )

    def is_like(self, other: Run) -> bool:
        """Whether the two runs may be joined."""
        mine = self.generation, self.written_for, self.is_whole
        return mine == (other.generation, other.written_for, other.is_whole)

    def joined(self, later: Run) -> Run:
        """This run and the next one as one run."""
        one = replace(
            self,
            positions=np.concatenate([self.positions, later.positions]),
            ends=np.concatenate([self.ends, later.ends + self.num_rows]),
            num_bytes=self.num_bytes + later.num_bytes,
            batches=_joined((*self.batches, *later.batches)),
        )
        leases = [lease for lease in (self.lease, later.lease) if lease is not None]
        return replace(one, lease=Lease.joined(leases, one.held_bytes) if leases else None)

    def key_batches(self, schema: TableSchema) -> list[pa.RecordBatch]:
        """Only keys and tombstones, without a copy."""
        if not self.is_whole:
            return list(self.batches)
        names, held = [*schema.primary_key, TOMBSTONE], keys_of(schema).stored
        return [
            pa.RecordBatch.from_arrays([batch.column(name) for name in names], schema=held)
            for batch in self.batches
        ]

    def keys_only(self, schema: TableSchema) -> Run:
        """A copy with only keys and tombstones; it keeps the part of the lease that it needs."""
        rows = pa.Table.from_batches(self.key_batches(schema)).take(pa.array(np.arange(self.num_rows)))
        less = replace(self, is_whole=False, batches=tuple(rows.combine_chunks().to_batches()))
        return (
            less if self.lease is None else replace(less, lease=Lease.joined([self.lease], less.held_bytes))
        )


def in_some(entries: Iterable[WalEntry]) -> Iterator[list[WalEntry]]:
    """Split ordered entries into lists that make one run each."""
    some: list[WalEntry] = []
    num_bytes = 0
    for entry in entries:
        if some:
            before = some[-1]
            alike = (before.generation, before.base_version) == (entry.generation, entry.base_version)
            if not alike or num_bytes + entry.num_bytes > _READ_BYTES:
                yield some
                some, num_bytes = [], 0
        some.append(entry)
        num_bytes += entry.num_bytes
    if some:
        yield some


def _joined(batches: Sequence[pa.RecordBatch]) -> tuple[pa.RecordBatch, ...]:
    """The same rows, in one batch if the batches are small."""
    filled = [batch for batch in batches if batch.num_rows]
    if len(filled) < 2 or sum(batch.nbytes for batch in filled) > _SMALL_BATCH * len(filled):
        return tuple(filled)
    try:
        return tuple(pa.Table.from_batches(filled).combine_chunks().to_batches())
    except pa.ArrowException:
        # For example, joined dictionaries may have more values than their index type can number.
        return tuple(filled)


def in_fewer(runs: Iterable[Run]) -> list[Run]:
    """Join ordered runs until each has at least twice the rows of the next, or is as large as it may be."""
    fewer: list[Run] = []
    for run in runs:
        while fewer and fewer[-1].is_like(run) and fewer[-1].num_rows < _FAN_OUT * run.num_rows:
            if fewer[-1].held_bytes + run.held_bytes > _RUN_BYTES:
                break
            run = fewer.pop().joined(run)
        fewer.append(run)
    return fewer


def keys_of(schema: TableSchema) -> TableSchema:
    """A schema with only the key columns of ``schema``."""
    columns = pa.schema([schema.columns.field(name) for name in schema.primary_key])
    return TableSchema(columns, schema.primary_key)
