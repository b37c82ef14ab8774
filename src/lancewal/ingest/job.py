"""Ingests files into a table, each row exactly once, however often the job is interrupted and rerun.

A file is one part, or several if it is large. A part is recorded in the journal of its
directory before any of its rows is written. Then it is written to all its shards as one transaction
under the journal's version.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias
from uuid import UUID

import pyarrow as pa

from lancewal.base import BaseTable, locate, open_base
from lancewal.errors import InvalidInputError, LanceWalError, PartialWriteError
from lancewal.format import check_columns
from lancewal.ingest.files import SourceFile
from lancewal.ingest.journal import Journal, Part, State
from lancewal.ingest.reading import Opened, open_file
from lancewal.publish import (
    ShardWrite,
    Staged,
    Stager,
    Transaction,
    TransactionLog,
    append_transaction,
    begin_append,
    finish_append,
)
from lancewal.service import TakeOver, checked_take_over, is_owned, publish_through_owners
from lancewal.shard import Shard, ShardRouter
from lancewal.storage import ObjectStore, ordered_map
from lancewal.table import Table
from lancewal.writer import Intake

logger = logging.getLogger(__name__)

#: Parts up to this size go to the WAL; larger ones become SSTables at once.
WAL_PART_BYTES = 32 << 20
#: A larger file is cut into parts; after an interruption at most one part is repeated.
MAX_PART_BYTES = 1 << 30

_CONCURRENT_SHARDS = 4


@dataclass(frozen=True)
class Step:
    """How far a file was read: the number of rows, and the fraction from 0 to 1."""

    file: SourceFile
    rows: int
    fraction: float


ProgressCallback: TypeAlias = Callable[[Step], object]


class PreparedPart(Protocol):
    """A part whose rows were accepted and can be written."""

    @property
    def part(self) -> Part: ...

    def write(self, transaction: Transaction) -> int:
        """Write the rows to all their shards as one transaction; returns their number."""


class Parts(Protocol):
    """A way to write files to a table."""

    #: Bytes written to the WAL and not flushed yet.
    wal_bytes: int

    def prepare(self, file: SourceFile, start: int) -> PreparedPart:
        """The next part of a file, from row ``start`` on; refuses rows that the table cannot take."""

    def prepare_again(self, file: SourceFile, part: Part) -> PreparedPart:
        """Prepare exactly the rows of a part that another run has begun to write."""


class LocalParts:
    """Reads files and writes their rows in this process, with bounded memory.

    Small parts become one WAL entry per shard. Large ones become SSTables that are staged and then
    published. No writer with MemTables is involved, because nobody waits for single rows here.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        drop_unknown: bool = False,
        progress: ProgressCallback | None = None,
        take_over: TakeOver = "when_gone",
        max_part_bytes: int = MAX_PART_BYTES,
        wal_part_bytes: int = WAL_PART_BYTES,
    ) -> None:
        self.store = store
        self.wal_bytes = 0
        self._drop_unknown = drop_unknown
        self._progress = progress or (lambda step: None)
        self._max_part_bytes = max_part_bytes
        self.wal_part_bytes = wal_part_bytes
        self.take_over = take_over

    def prepare(self, file: SourceFile, start: int) -> PreparedPart:
        return self._prepare(file, start, None, self._max_part_bytes)

    def prepare_again(self, file: SourceFile, part: Part) -> PreparedPart:
        # Never cut again, because a transaction must have the same rows in every run.
        return self._prepare(file, part.start, part.stop, sys.maxsize)

    def _prepare(self, file: SourceFile, start: int, stop: int | None, max_bytes: int) -> PreparedPart:
        base = open_base(self.store)
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
    """The rows of a part: in memory, or in staged SSTables."""

    part: Part

    def __init__(self, parts: LocalParts, base: BaseTable) -> None:
        self._parts = parts
        self._store = parts.store
        self._base = base
        self._router = ShardRouter.of_table(base, parts.store)
        self._held: list[pa.RecordBatch] = []
        self._stager: Stager | None = None
        self._staged: list[Staged] = []
        self.num_bytes = 0

    def add(self, batches: list[pa.RecordBatch]) -> None:
        self.num_bytes += sum(batch.nbytes for batch in batches)
        self._held += batches
        if self._stager is None and self.num_bytes > self._parts.wal_part_bytes:
            self._stager = Stager(self._base, self._store, self._router)
        if self._stager is not None:
            for batch in self._held:
                self._stager.add(batch)
            self._held = []

    def finish(self, part: Part) -> None:
        self.part = part
        if self._stager is not None:
            self._staged = self._stager.finish()

    def write(self, transaction: Transaction) -> int:
        take_over = self._parts.take_over
        if self._stager is None and take_over != "now" and (take_over == "never" or is_owned(self._store)):
            # A claim would fence the shards' owners, so stage SSTables, which the owners can adopt.
            self._stager = Stager(self._base, self._store, self._router)
            for batch in self._held:
                self._stager.add(batch)
            self._held, self._staged = [], self._stager.finish()
        if self._stager is not None:
            publish_through_owners(self._base, self._store, self._staged, transaction, take_over)
        else:
            self._append(transaction)
            self._parts.wal_bytes += self.num_bytes
        return (self.part.stop or 0) - self.part.start

    def _append(self, transaction: Transaction) -> None:
        by_shard: dict[Shard, list[pa.RecordBatch]] = {}
        for batch in self._held:
            for shard, rows in self._router.route(batch):
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
    """The batches of a file from row ``start`` to ``stop``; ``position`` is where the last one ended."""

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
        """Whether the file has no more rows. Reads a batch: call it last."""
        return next(self.opened.batches, None) is None


def _refusal(
    file: SourceFile, part_start: int, position: int, batch: pa.RecordBatch, error: InvalidInputError
) -> str:
    text = f"{file}, rows {position - batch.num_rows} to {position}: {error}"
    return text if part_start == 0 else f"{text} (the first {part_start} rows of the file are in the table)"


#: After this many bytes written to the WAL the job flushes, because unflushed rows slow readers down.
FLUSH_AFTER_BYTES = 128 << 20


@dataclass
class IngestReport:
    """What all runs did. ``refused`` has the reason for each file whose rows the table did not accept."""

    files: int = 0
    rows: int = 0
    skipped: int = 0
    refused: dict[str, str] = field(default_factory=dict)


class Ingestion:
    """Ingests files into one table.

    If another process owns shards of the table, it adopts the rows as SSTables, in its own order. Shards
    without an owner are taken over for a moment: **a writer that is not known as an owner, such as Lance's
    own, is fenced**.

    >>> import tempfile, lance, lancewal, pathlib, pyarrow as pa
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> key = pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
    >>> _ = lance.write_dataset(pa.schema([key, pa.field("text", pa.string())]).empty_table(), folder / "t")
    >>> table = lancewal.initialize(folder / "t", unsharded=True)
    >>> _ = (folder / "rows.csv").write_text("id,text\\n1,a\\n2,b\\n")
    >>> from lancewal.ingest import find_files
    >>> job = Ingestion(table.uri)
    >>> job.run(find_files([folder / "rows.csv"])).rows, job.run(find_files([folder / "rows.csv"])).skipped
    (2, 1)
    >>> table.count_rows()
    2
    """

    def __init__(
        self,
        uri: str,
        storage_options: Mapping[str, str] | None = None,
        *,
        source: str | None = None,
        drop_unknown: bool = False,
        again: bool = False,
        progress: ProgressCallback | None = None,
        taken: Callable[[SourceFile, int], object] | None = None,
        parts: Parts | None = None,
        take_over: TakeOver = "when_gone",
        store: ObjectStore | None = None,
    ) -> None:
        """``source`` names where the files come from, by default their directory.

        ``again`` ingests files that were ingested before, each once, also if the run is interrupted and
        rerun. ``drop_unknown`` leaves out columns that the table lacks. ``taken`` is called with each
        finished file and the number of its rows. ``parts`` is another way to write files. ``take_over`` is
        about shards that another process owns: "now" takes them over, "never" refuses the files. Tests pass a
        faulty ``store``.
        """
        self._take_over = checked_take_over(take_over)
        self._store = store or BaseTable.open(*locate(uri, storage_options)).writer_store()
        self._source = source
        self._again = again
        self._parts = parts or LocalParts(
            self._store, drop_unknown=drop_unknown, progress=progress, take_over=take_over
        )
        self._taken = taken or (lambda file, rows: None)
        self._finished: set[tuple[str, tuple[int, int]]] = set()
        #: Those of earlier runs.
        self._before: frozenset[tuple[str, tuple[int, int]]] = frozenset()
        self.report = IngestReport()

    def run(self, files: Iterable[SourceFile], *, skip_refused: bool = False) -> IngestReport:
        """Ingest every file that was not ingested before; the report covers all runs of this object.

        A refused file ends the run with an error; with ``skip_refused`` the report names it instead.
        """
        self._before = frozenset(self._finished)
        for source, group in itertools.groupby(files, key=lambda file: self._source or file.source):
            journal = Journal(self._store, source)
            wanted = list(group)
            mark = journal.begin_again(wanted) if self._again else None
            state = self._settled(journal, wanted)
            for file in wanted:
                try:
                    state = self._take(journal, state, file, wanted, mark)
                except InvalidInputError as error:
                    if not skip_refused:
                        raise
                    logger.info("%s is left out: %s", file, error)
                    self.report.refused[str(file)] = str(error)
                    state = journal.read()
            if mark is not None:
                journal.end_again()
        return self.report

    def flush(self, *, at_least: int = 1) -> None:
        """Flush what this job wrote to WALs, if it is at least ``at_least`` bytes."""
        if self._parts.wal_bytes >= at_least:
            Table.open(self._store.uri, store=self._store).flush(take_over=self._take_over)
            self._parts.wal_bytes = 0

    def pending(self, files: Iterable[SourceFile]) -> list[SourceFile]:
        """The files that are not completely in the table, or all that this object has not taken again."""
        if self._again:
            return [file for file in files if not self._has_taken(file)]
        states: dict[str, State] = {}
        left = []
        for file in files:
            source = self._source or file.source
            if source not in states:
                states[source] = Journal(self._store, source).read()
            if not states[source].has(file):
                left.append(file)
        return left

    def give_up(self, source: str) -> Part | None:
        """Forget the part that an earlier run left unfinished, and return it; rows that were written stay."""
        journal = Journal(self._store, self._source or source)
        state = journal.read()
        if state.unfinished is not None:
            TransactionLog(self._store, journal.transaction(state.version)).finish()
        return state.unfinished

    def _settled(self, journal: Journal, files: list[SourceFile]) -> State:
        """The journal's state, after completing the part that an earlier run left unfinished."""
        state = journal.read()
        part = state.unfinished
        if part is None:
            return state
        same = [f for f in files if (f.name, f.size, f.modified) == (part.name, part.size, part.modified)]
        if not same:
            raise InvalidInputError(
                f"another run has begun to write {part} in {journal.source} and has not finished, and that "
                "file is not among these or has changed since; put it back and include it, or give up on "
                "these rows (--give-up)"
            )
        logger.info("finishing %s", part)
        rows = self._parts.prepare_again(same[0], part).write(journal.transaction(state.version))
        self._count(same[0], rows, part)
        return state.with_part(state.version, part)

    def _take(
        self, journal: Journal, state: State, file: SourceFile, others: list[SourceFile], mark: str | None
    ) -> State:
        while not self._has_taken(file) and not state.has(file, mark):
            prepared = self._parts.prepare(file, state.rows_of(file))
            part = replace(prepared.part, again=mark)
            version = state.version + 1
            if not journal.begin(version, part):
                # Another process ingests from this directory too, and may have written this part.
                state = self._settled(journal, others)
                continue
            rows = prepared.write(journal.transaction(version))
            state = state.with_part(version, part)
            journal.summarise(state)
            self.flush(at_least=FLUSH_AFTER_BYTES)
            self._count(file, rows, part)
        if not self._has_taken(file) or (str(file), file.identity) in self._before:
            self.report.skipped += 1
        return state

    def _count(self, file: SourceFile, rows: int, part: Part) -> None:
        self.report.rows += rows
        if part.last:
            self._finished.add((str(file), file.identity))
            self.report.files += 1
            self._taken(file, part.start + rows)

    def _has_taken(self, file: SourceFile) -> bool:
        return (str(file), file.identity) in self._finished
