"""The journal of the files of a directory that are in the table already. It is stored in the table.

For each directory that files came from there is::

    _mem_wal/_lancewal/ingest/{digest of the directory}/
        {version}.part.json     rows start to stop of one file are about to be written
        {version}.all.json      every file that was finished by this version
        again.json              a run that takes files again has begun, and has not come to its end

A part is written to the table as one transaction under its version. So an interrupted run
leaves at most one part that only some shards have, and the next run writes it to the others. If
several processes ingest from the same directory, one of them wins each version, and the others read
the journal again.

A run that takes files again gives its parts a mark of its own. If it is interrupted, the next such run of the
same files has the same mark, and finds out by it which files were taken again.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lancewal.errors import LanceWalError
from lancewal.format import decode_record, encode_record, reading_record
from lancewal.ingest.files import SourceFile
from lancewal.publish import Transaction, TransactionLog
from lancewal.storage import ObjectStore, PutOutcome, layout

logger = logging.getLogger(__name__)

INGEST_DIR = f"{layout.OWN_DIR}/ingest"

#: A summary is written after every so many versions.
_PARTS_PER_SUMMARY = 64
_NAME = re.compile(r"(\d{20})\.(part|all)\.json")
_AGAIN = "again.json"


@dataclass(frozen=True)
class Part:
    """Rows ``start`` to ``stop`` of a file (``None`` is the end); ``last`` says that the file ends there.

    ``again`` is the mark of the run, if it takes files again.
    """

    name: str
    size: int
    modified: int
    start: int
    stop: int | None
    last: bool
    again: str | None = None

    @classmethod
    def of(cls, file: SourceFile, start: int, stop: int | None, *, last: bool) -> Part:
        return cls(file.name, file.size, file.modified, start, stop, last)

    def __str__(self) -> str:
        end = "the end" if self.stop is None else str(self.stop)
        return f"rows {self.start} to {end} of {self.name}"


@dataclass(frozen=True)
class Progress:
    """How far one version of a file was ingested."""

    size: int
    modified: int
    rows: int
    finished: bool
    again: str | None = None


@dataclass(frozen=True)
class State:
    """What the journal says. ``version`` is the version of the newest part.

    ``unfinished`` is that part while it is not known to be in all its shards. ``files`` does not include it
    then.
    """

    version: int = -1
    files: Mapping[str, Progress] = field(default_factory=dict)
    unfinished: Part | None = None

    def rows_of(self, file: SourceFile) -> int:
        """How many rows of this file, in this version, are written; 0 if all are: then it is taken again."""
        known = self._progress_of(file)
        return 0 if known is None or known.finished else known.rows

    def has(self, file: SourceFile, again: str | None = None) -> bool:
        """Whether all rows of this file, in this version, are written; ``again``: by the run of this mark."""
        known = self._progress_of(file)
        return known is not None and known.finished and again in (None, known.again)

    def _progress_of(self, file: SourceFile) -> Progress | None:
        known = self.files.get(file.name)
        return known if known and (known.size, known.modified) == file.identity else None

    def with_part(self, version: int, part: Part) -> State:
        """The state after ``part`` is written."""
        taken = Progress(part.size, part.modified, part.stop or 0, part.last, part.again)
        return State(version, {**self.files, part.name: taken})


class Journal:
    """The journal of one directory."""

    def __init__(self, store: ObjectStore, source: str) -> None:
        self.source = source
        self._store = store
        digest = hashlib.sha256(source.encode()).hexdigest()[:32]
        self._directory = f"{INGEST_DIR}/{digest}"

    def transaction(self, version: int) -> Transaction:
        return Transaction(f"lancewal ingest from {self.source}", version)

    def is_written(self, version: int) -> bool:
        """Whether all shards have the part of this version."""
        return TransactionLog(self._store, self.transaction(version)).is_done()

    def read(self) -> State:
        while True:
            try:
                return self._read()
            except FileNotFoundError:
                logger.debug("the journal of %s was summarised while it was read", self.source)

    def begin(self, version: int, part: Part) -> bool:
        """Claim a version for ``part``; false if another process was faster."""
        record = {**asdict(part), "source": self.source, "write_id": secrets.token_hex(8)}
        path = f"{self._directory}/{version:020d}.part.json"
        if self._store.put_if_absent(path, encode_record(record)) is not PutOutcome.CREATED:
            return False
        # A version that was written and summarised has no part record any more, so its name is free again.
        return not self.is_written(version)

    def begin_again(self, files: Sequence[SourceFile]) -> str:
        """The mark of a run that takes files again; an interrupted run's, if it has one of the files."""
        wanted = {_identity(file) for file in files}
        path = f"{self._directory}/{_AGAIN}"
        mark = secrets.token_hex(8)
        try:
            found = self._get(path)
        except FileNotFoundError:
            found = None
        if found is not None:
            with reading_record(path):
                before, interrupted = {tuple(each) for each in found["files"]}, str(found["mark"])
            if wanted & before:
                wanted, mark = wanted | before, interrupted
        record = {"source": self.source, "mark": mark, "files": sorted(wanted)}
        self._store.put(path, encode_record(record))
        return mark

    def end_again(self) -> None:
        """Record that the run which takes files again has come to its end."""
        self._store.delete(f"{self._directory}/{_AGAIN}")

    def summarise(self, state: State) -> None:
        """From time to time, replace many part records with one. All of ``state`` must be written."""
        if (state.version + 1) % _PARTS_PER_SUMMARY:
            return
        record = {
            "source": self.source,
            "files": {name: _plain(progress) for name, progress in state.files.items()},
        }
        self._store.put(f"{self._directory}/{state.version:020d}.all.json", encode_record(record))
        try:
            for number, kind, path in self._names():
                if number < state.version or (kind == "part" and number == state.version):
                    self._store.delete(path)
        except LanceWalError as error:
            # The remaining records repeat the summary; the next one removes them.
            logger.warning("the journal of %s was not tidied up: %s", self.source, error)

    def _names(self) -> list[tuple[int, str, str]]:
        found = []
        for info in self._store.list(self._directory):
            match = _NAME.fullmatch(info.path.rpartition("/")[2])
            if match:
                found.append((int(match[1]), match[2], info.path))
        return sorted(found)

    def _read(self) -> State:
        names = self._names()
        summed = max((number for number, kind, _ in names if kind == "all"), default=-1)
        state = State()
        for number, kind, path in names:
            if kind == "all" and number == summed:
                content = self._get(path)
                with reading_record(path):
                    files = {name: Progress(**known) for name, known in content["files"].items()}
                state = State(number, files)
            elif kind == "part" and number > summed:
                content = self._get(path)
                with reading_record(path):
                    part = Part(**{key: content[key] for key in Part.__dataclass_fields__ if key in content})
                if number == names[-1][0] and not self.is_written(number):
                    return State(number, state.files, part)
                state = state.with_part(number, part)
        return state

    def _get(self, path: str) -> dict[str, Any]:
        data = self._store.get(path)
        with reading_record(path):
            return decode_record(data)


def _identity(file: SourceFile) -> tuple[str, int, int]:
    return (file.name, file.size, file.modified)


def _plain(progress: Progress) -> dict[str, Any]:
    """``progress`` for a record. Earlier releases do not know the mark, so it is left out if it is none."""
    return {key: value for key, value in asdict(progress).items() if value is not None}
