"""Files into a table, each row exactly once, however often the job is cut off and run again.

A file goes in as one part, or as several when it is large. A part is entered in the journal
of its directory before any of its rows is written, and reaches all its shards as one
transaction under the journal's version.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from lancewal.base import BaseTable
from lancewal.errors import InvalidInputError
from lancewal.ingest.files import SourceFile
from lancewal.ingest.journal import Journal, Part, State
from lancewal.ingest.parts import LocalParts, Parts, ProgressCallback
from lancewal.objects import ObjectStore
from lancewal.table import Table, locate
from lancewal.transactions import TransactionLog
from lancewal.writer.config import ShardWriterConfig

logger = logging.getLogger(__name__)

#: WAL bytes of this job after which it flushes: readers go through the WAL row by row.
FLUSH_AFTER_BYTES = 128 << 20


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
        store: ObjectStore | None = None,
    ) -> None:
        """``source`` names where the files come from, by default their directory. ``again`` takes
        files that were taken before; ``drop_unknown`` leaves out columns that the table lacks.
        ``taken`` is called with each file that is in the table, and its rows of this run. ``parts``
        is another way to bring files in, ``store`` is for tests that need a faulty one."""
        self._store = store or _store(uri, storage_options)
        self._source = source
        self._again = again
        self._parts = parts or LocalParts(self._store, drop_unknown=drop_unknown, progress=progress)
        self._taken = taken or (lambda file, rows: None)
        self.report = IngestReport()

    def run(self, files: Iterable[SourceFile], *, skip_refused: bool = False) -> IngestReport:
        """Take every file that was not taken before; returns what all runs of this object did.

        A file that is refused ends the run, unless ``skip_refused``: then the report names it.
        """
        for source, group in itertools.groupby(files, key=lambda file: self._source or file.source):
            journal = Journal(self._store, source)
            wanted = list(group)
            state = self._settled(journal, wanted)
            for file in wanted:
                try:
                    state = self._take(journal, state, file, wanted)
                except InvalidInputError as error:
                    if not skip_refused:
                        raise
                    logger.info("%s is left out: %s", file, error)
                    self.report.refused[str(file)] = str(error)
                    state = journal.read()
        return self.report

    def flush(self, *, at_least: int = 1) -> None:
        """Move what this job put into WALs to SSTables, when it is ``at_least`` so many bytes."""
        if self._parts.wal_bytes >= at_least:
            Table.open(self._store.uri, store=self._store).flush()
            self._parts.wal_bytes = 0

    def pending(self, files: Iterable[SourceFile]) -> list[SourceFile]:
        """The files that are not in the table, or not in full."""
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
        if state.unfinished is not None:
            TransactionLog(self._store, journal.transaction(state.version)).finish()
        return state.unfinished

    def _settled(self, journal: Journal, files: list[SourceFile]) -> State:
        """The journal's state, once the part that an earlier run has left unfinished is written."""
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

    def _take(self, journal: Journal, state: State, file: SourceFile, others: list[SourceFile]) -> State:
        done = 0
        while self._again or not state.has(file):
            start = done if self._again else state.rows_of(file)
            prepared = self._parts.prepare(file, start)
            version = state.version + 1
            if not journal.begin(version, prepared.part):
                # Another process takes files from here too; it may have taken this very part.
                state = self._settled(journal, others)
                continue
            rows = prepared.write(journal.transaction(version))
            done += rows
            state = state.with_part(version, prepared.part)
            journal.summarise(state)
            self.flush(at_least=FLUSH_AFTER_BYTES)
            self._count(file, rows, prepared.part)
            if prepared.part.last:
                return state
        self.report.skipped += 1
        return state

    def _count(self, file: SourceFile, rows: int, part: Part) -> None:
        self.report.rows += rows
        if part.last:
            self.report.files += 1
            self._taken(file, part.start + rows)


def _store(uri: str, storage_options: Mapping[str, str] | None) -> ObjectStore:
    """The table's storage, which syncs to disk as the table's own settings say."""
    uri, options = locate(uri, storage_options)
    defaults = BaseTable.open(uri, options).details.writer_config_defaults
    return ObjectStore.from_uri(uri, options, fsync=ShardWriterConfig.from_defaults(defaults).fsync)
