"""Parts of files on their way into a table, read and written by this process.

Small parts become one WAL entry a shard, large ones SSTables that are written beside the table
and then published. There is no writer with MemTables in between, because nobody waits for
single rows here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias
from uuid import UUID

import pyarrow as pa

from lancewal.base import BaseTable
from lancewal.errors import InvalidInputError, LanceWalError, PartialWriteError
from lancewal.format.columns import check_columns
from lancewal.ingest.files import SourceFile
from lancewal.ingest.journal import Part
from lancewal.ingest.reading import Opened, open_file
from lancewal.objects import ObjectStore
from lancewal.parallel import ordered_map
from lancewal.publish import ShardWrite, append_transaction, begin_append, finish_append, publish
from lancewal.sharding import Shard
from lancewal.staging import Staged, Stager
from lancewal.table import Table
from lancewal.transactions import Transaction
from lancewal.writer.intake import Intake

#: Up to so many bytes of rows go to the WAL, more become SSTables right away.
WAL_PART_BYTES = 32 << 20
#: Where a file is cut: so much is done again at most after an interruption.
MAX_PART_BYTES = 1 << 30

_CONCURRENT_SHARDS = 4


@dataclass(frozen=True)
class Step:
    """How far a file was read: its rows, and the fraction of it from 0 to 1."""

    file: SourceFile
    rows: int
    fraction: float


ProgressCallback: TypeAlias = Callable[[Step], object]


class PreparedPart(Protocol):
    """A part whose rows were accepted and can be written."""

    @property
    def part(self) -> Part: ...

    def write(self, transaction: Transaction) -> int:
        """Write the rows to all their shards as one transaction; how many there are."""


class Parts(Protocol):
    """A way to bring files into a table."""

    #: WAL bytes written so far that no flush has moved on.
    wal_bytes: int

    def prepare(self, file: SourceFile, start: int) -> PreparedPart:
        """The next part of a file, from row ``start`` on; refuses rows that the table cannot take."""

    def prepare_again(self, file: SourceFile, part: Part) -> PreparedPart:
        """Exactly the rows of a part that another run has begun to write."""


class LocalParts:
    """Reads files and writes their rows in this process, with bounded memory."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        drop_unknown: bool = False,
        progress: ProgressCallback | None = None,
        max_part_bytes: int = MAX_PART_BYTES,
        wal_part_bytes: int = WAL_PART_BYTES,
    ) -> None:
        self.store = store
        self.table = Table.open(store.uri, store=store)
        self.wal_bytes = 0
        self._drop_unknown = drop_unknown
        self._progress = progress or (lambda step: None)
        self._max_part_bytes = max_part_bytes
        self.wal_part_bytes = wal_part_bytes

    def prepare(self, file: SourceFile, start: int) -> PreparedPart:
        return self._prepare(file, start, None, self._max_part_bytes)

    def prepare_again(self, file: SourceFile, part: Part) -> PreparedPart:
        # Not cut, however long: a transaction has the same rows in every run.
        return self._prepare(file, part.start, part.stop, sys.maxsize)

    def _prepare(self, file: SourceFile, start: int, stop: int | None, max_bytes: int) -> PreparedPart:
        base = BaseTable.open(self.store.uri, self.store.storage_options, store=self.store)
        opened = open_file(file, base.schema.plain, drop_unknown=self._drop_unknown)
        check_columns(base.schema)
        intake = Intake(base.schema, cast="round", storage_version=base.storage_version)
        rows = _Rows(opened, start, stop)
        prepared = _LocalPart(self, base)
        for batch in rows:
            try:
                accepted = intake.upserts(batch).batches
            except InvalidInputError as error:
                raise InvalidInputError(_refusal(file, start, rows.position, batch, error)) from None
            prepared.add(accepted)
            self._progress(Step(file, rows.position, opened.fraction()))
            if prepared.num_bytes >= max_bytes:
                break
        at_end = stop is None and rows.at_end()
        prepared.finish(Part.of(file, start, rows.position, last=at_end))
        if not file.is_unchanged():
            raise InvalidInputError(
                f"{file} was written to while it was read; ingest it once it is whole"
                + (f" (its first {start} rows are in the table)" if start else "")
            )
        return prepared


class _LocalPart:
    """The rows of a part: in memory, or in SSTables that nothing lists yet."""

    part: Part

    def __init__(self, parts: LocalParts, base: BaseTable) -> None:
        self._parts = parts
        self._store = parts.store
        self._base = base
        self._held: list[pa.RecordBatch] = []
        self._stager: Stager | None = None
        self._staged: list[Staged] = []
        self.num_bytes = 0

    def add(self, batches: list[pa.RecordBatch]) -> None:
        self.num_bytes += sum(batch.nbytes for batch in batches)
        self._held += batches
        if self._stager is None and self.num_bytes > self._parts.wal_part_bytes:
            self._stager = Stager(self._base, self._store, self._parts.table.router())
        if self._stager is not None:
            for batch in self._held:
                self._stager.add(batch)
            self._held = []

    def finish(self, part: Part) -> None:
        self.part = part
        if self._stager is not None:
            self._staged = self._stager.finish()

    def write(self, transaction: Transaction) -> int:
        if self._stager is not None:
            publish(self._base, self._store, self._staged, transaction)
        else:
            self._append(transaction)
            self._parts.wal_bytes += self.num_bytes
        return (self.part.stop or 0) - self.part.start

    def _append(self, transaction: Transaction) -> None:
        router = self._parts.table.router()
        by_shard: dict[Shard, list[pa.RecordBatch]] = {}
        for batch in self._held:
            for shard, rows in router.route(batch):
                by_shard.setdefault(shard, []).append(rows)
        if not begin_append(self._store, transaction):
            return
        failed: dict[UUID, Exception] = {}

        def one(item: tuple[Shard, list[pa.RecordBatch]]) -> list[ShardWrite]:
            shard, rows = item
            try:
                version = self._base.version
                return [append_transaction(self._store, shard, rows, transaction, base_version=version)]
            except LanceWalError as error:
                failed[shard.shard_id] = error
                return []

        written = [w for found in ordered_map(one, by_shard.items(), _CONCURRENT_SHARDS) for w in found]
        if failed:
            rows = {w.shard_id: w.rows for w in written if not w.skipped}
            raise PartialWriteError("ingest", failed, rows) from next(iter(failed.values()))
        finish_append(self._store, transaction, written)


@dataclass
class _Rows:
    """The batches of a file from one row up to another; ``position`` is behind the last one given."""

    opened: Opened
    start: int
    stop: int | None
    position: int = field(init=False)

    def __post_init__(self) -> None:
        self.position = self.start

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        end = 0
        for batch in self.opened.batches:
            begin, end = end, end + batch.num_rows
            if end <= self.start:
                continue
            if self.stop is not None and end > self.stop:
                batch, end = batch.slice(0, self.stop - begin), self.stop
            if begin < self.start:
                batch = batch.slice(self.start - begin)
            self.position = end
            yield batch
            if self.stop is not None and end >= self.stop:
                return

    def at_end(self) -> bool:
        """Whether the file has no more rows. Takes a batch off the file: call it last."""
        return next(self.opened.batches, None) is None


def _refusal(
    file: SourceFile, part_start: int, position: int, batch: pa.RecordBatch, error: InvalidInputError
) -> str:
    text = f"{file}, rows {position - batch.num_rows} to {position}: {error}"
    return text if part_start == 0 else f"{text} (the first {part_start} rows of the file are in the table)"
