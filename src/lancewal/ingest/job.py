"""Files into a table, each row exactly once, however often the job is cut off and run again.

A file goes in as one part, or as several when it is large. The rows of a part reach all their
shards as one transaction: small parts as one WAL entry a shard, large ones as SSTables that
are written beside the table and then published. Taking part in neither is a writer with
MemTables, because nobody waits for single rows here.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa

from lancewal.base import BaseTable
from lancewal.errors import InvalidInputError, LanceWalError, PartialWriteError
from lancewal.ingest.files import SourceFile
from lancewal.ingest.journal import Journal, Part, State
from lancewal.ingest.reading import Opened, open_file
from lancewal.objects import ObjectStore
from lancewal.parallel import ordered_map
from lancewal.publish import ShardWrite, append_transaction, begin_append, finish_append, publish
from lancewal.sharding import Shard
from lancewal.staging import Staged, Stager
from lancewal.table import Table, locate
from lancewal.transactions import Transaction, TransactionLog
from lancewal.writer.config import ShardWriterConfig
from lancewal.writer.intake import Intake

logger = logging.getLogger(__name__)

#: Up to so many bytes of rows go to the WAL, more become SSTables right away.
WAL_PART_BYTES = 32 << 20
#: Where a file is cut: so much is done again at most after an interruption.
MAX_PART_BYTES = 1 << 30
#: WAL bytes of this job after which it flushes: readers go through the WAL row by row.
FLUSH_AFTER_BYTES = 128 << 20

_CONCURRENT_SHARDS = 4


@dataclass(frozen=True)
class Step:
    """How far the job is: rows of this file, and the fraction of it that was read."""

    file: SourceFile
    rows: int
    fraction: float


ProgressCallback: TypeAlias = Callable[[Step], object]


@dataclass
class IngestReport:
    """What a run did. ``refused`` gives the reason for each file whose rows the table did not take."""

    files: int = 0
    rows: int = 0
    skipped: int = 0
    refused: dict[str, str] = field(default_factory=dict)


class Ingestion:
    """Takes files into one table.

    Every shard that rows go to is taken over: **a writer that is open on one of them is fenced**.

    >>> import tempfile, lance, lancewal, pathlib
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
        store: ObjectStore | None = None,
    ) -> None:
        """``source`` names where the files come from, by default their directory. ``again`` takes
        files that were taken before; ``drop_unknown`` leaves out columns that the table lacks.
        ``store`` is for tests that need a faulty one."""
        if store is None:
            uri, options = locate(uri, storage_options)
            defaults = BaseTable.open(uri, options).details.writer_config_defaults
            fsync = ShardWriterConfig.from_defaults(defaults).fsync
            store = ObjectStore.from_uri(uri, options, fsync=fsync)
        self._store = store
        self._table = Table.open(store.uri, store=store)
        self._source = source
        self._drop_unknown = drop_unknown
        self._again = again
        self._progress = progress or (lambda step: None)
        self._wal_bytes = 0
        self.report = IngestReport()

    def run(self, files: Iterable[SourceFile], *, skip_refused: bool = False) -> IngestReport:
        """Take every file that was not taken before; returns what all runs of this object did.

        A file that is refused ends the run, unless ``skip_refused``: then the report names it.
        """
        for source, group in itertools.groupby(files, key=lambda file: self._source or file.source):
            journal = Journal(self._store, source)
            state = self._settled(journal, wanted := list(group))
            for file in wanted:
                try:
                    state = self._take(journal, state, file, wanted)
                except InvalidInputError as error:
                    if not skip_refused:
                        raise
                    logger.warning("%s is left out: %s", file, error)
                    self.report.refused[str(file)] = str(error)
                    state = journal.read()
        return self.report

    def flush(self, *, at_least: int = 1) -> None:
        """Move what this job put into WALs to SSTables, when it is ``at_least`` so many bytes."""
        if self._wal_bytes >= at_least:
            self._table.flush()
            self._wal_bytes = 0

    def pending(self, files: Iterable[SourceFile]) -> list[SourceFile]:
        """The files that were not taken yet."""
        if self._again:
            return list(files)
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
        """Forget the part of a file that an earlier run left unfinished; what it wrote stays."""
        journal = Journal(self._store, self._source or source)
        state = journal.read()
        if state.newest is None or journal.is_written(state.version):
            return None
        TransactionLog(self._store, journal.transaction(state.version)).finish()
        return state.newest

    def _settled(self, journal: Journal, files: list[SourceFile]) -> State:
        """The journal's state, once the part that an earlier run has left unfinished is written."""
        state = journal.read()
        part = state.newest
        if part is None or journal.is_written(state.version):
            return state
        same = [f for f in files if (f.name, f.size, f.modified) == (part.name, part.size, part.modified)]
        if not same:
            raise InvalidInputError(
                f"another run has begun to write rows {part.start} to {part.stop} of "
                f"{journal.source}/{part.name} and has not finished, and that file is not among these or has "
                "changed since; put it back and include it, or give up on these rows (--give-up)"
            )
        logger.info("finishing rows %d to %d of %s", part.start, part.stop, same[0])
        self._write(self._prepare(same[0], part.start, part.stop), journal.transaction(state.version))
        return state

    def _take(self, journal: Journal, state: State, file: SourceFile, others: list[SourceFile]) -> State:
        if state.has(file) and not self._again:
            self.report.skipped += 1
            return state
        start = 0 if self._again else state.rows_of(file)
        while True:
            prepared = self._prepare(file, start, None)
            version = state.version + 1
            if not journal.begin(version, prepared.part):
                # Another process takes files from here too.
                state = self._settled(journal, others)
                if not self._again:
                    start = state.rows_of(file)
                    if state.has(file):
                        self.report.skipped += 1
                        return state
                continue
            self._write(prepared, journal.transaction(version))
            state = state.after(prepared.part)
            journal.summarise(state)
            start = prepared.part.stop
            self.flush(at_least=FLUSH_AFTER_BYTES)
            if prepared.part.last:
                self.report.files += 1
                return state

    def _prepare(self, file: SourceFile, start: int, stop: int | None) -> _Prepared:
        """Read the rows of a part, from ``start`` up to ``stop`` or to where the part is full."""
        base = BaseTable.open(self._store.uri, self._store.storage_options, store=self._store)
        opened = open_file(file, base.schema.plain, drop_unknown=self._drop_unknown)
        rows = _Rows(opened, start, stop)
        intake = Intake(base.schema, cast=True, storage_version=base.storage_version)
        prepared = _Prepared(base)
        for batch in rows:
            try:
                stored = intake.upserts(batch).batches
            except InvalidInputError as error:
                raise InvalidInputError(_refusal(file, start, rows.position, batch, error)) from None
            self._stage(prepared, stored)
            self._progress(Step(file, rows.position, opened.fraction()))
            if stop is None and prepared.num_bytes >= MAX_PART_BYTES:
                break
        prepared.finish(Part.of(file, start, rows.position, last=rows.at_end()))
        if not file.is_unchanged():
            raise InvalidInputError(
                f"{file} was written to while it was read; ingest it once it is whole"
                + (f" (its first {start} rows are in the table)" if start else "")
            )
        return prepared

    def _stage(self, prepared: _Prepared, stored: list[pa.RecordBatch]) -> None:
        prepared.num_bytes += sum(batch.nbytes for batch in stored)
        prepared.held += stored
        if prepared.stager is None and prepared.num_bytes > WAL_PART_BYTES:
            prepared.stager = Stager(prepared.base, self._store, self._table.router())
        if prepared.stager is not None:
            for batch in prepared.held:
                prepared.stager.add(batch)
            prepared.held = []

    def _write(self, prepared: _Prepared, transaction: Transaction) -> None:
        if prepared.stager is not None:
            publish(prepared.base, self._store, prepared.staged, transaction)
        else:
            self._append(prepared.held, transaction)
            self._wal_bytes += prepared.num_bytes
        self.report.rows += prepared.part.stop - prepared.part.start

    def _append(self, batches: list[pa.RecordBatch], transaction: Transaction) -> None:
        router = self._table.router()
        by_shard: dict[Shard, list[pa.RecordBatch]] = {}
        for batch in batches:
            for shard, rows in router.route(batch):
                by_shard.setdefault(shard, []).append(rows)
        if not begin_append(self._store, transaction):
            return
        failed: dict[Shard, Exception] = {}

        def one(item: tuple[Shard, list[pa.RecordBatch]]) -> list[ShardWrite]:
            shard, rows = item
            try:
                return [append_transaction(self._store, shard, rows, transaction)]
            except LanceWalError as error:
                failed[shard] = error
                return []

        written = [w for found in ordered_map(one, by_shard.items(), _CONCURRENT_SHARDS) for w in found]
        if failed:
            rows = {w.shard_id: w.rows for w in written if not w.skipped}
            errors = {shard.shard_id: error for shard, error in failed.items()}
            raise PartialWriteError("ingest", errors, rows) from next(iter(failed.values()))
        finish_append(self._store, transaction, written)


@dataclass
class _Prepared:
    """The rows of a part: in memory, or in SSTables that nothing lists yet."""

    base: BaseTable
    num_bytes: int = 0
    held: list[pa.RecordBatch] = field(default_factory=list)
    stager: Stager | None = None
    staged: list[Staged] = field(default_factory=list)
    part: Part = field(init=False)

    def finish(self, part: Part) -> None:
        self.part = part
        if self.stager is not None:
            self.staged = self.stager.finish()


class _Rows:
    """The batches of a file from one row up to another; ``position`` is behind the last one given."""

    def __init__(self, opened: Opened, start: int, stop: int | None) -> None:
        self._batches = opened.batches
        self._start = start
        self._stop = stop
        self.position = start

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        end = 0
        for batch in self._batches:
            begin, end = end, end + batch.num_rows
            if end <= self._start:
                continue
            if self._stop is not None and end > self._stop:
                batch, end = batch.slice(0, self._stop - begin), self._stop
            if begin < self._start:
                batch = batch.slice(self._start - begin)
            self.position = end
            yield batch
            if self._stop is not None and end >= self._stop:
                return

    def at_end(self) -> bool:
        """Whether the file has no more rows. Takes a batch off the file: call it last."""
        return next(self._batches, None) is None


def _refusal(
    file: SourceFile, part_start: int, position: int, batch: pa.RecordBatch, error: InvalidInputError
) -> str:
    text = f"{file}, rows {position - batch.num_rows} to {position}: {error}"
    return text if part_start == 0 else f"{text} (the first {part_start} rows of the file are in the table)"
