"""Whether a column is the one that rows were written to, or a later column with the same field id.

Lance numbers a new column above all ids in the table's schema and data files. WALs and SSTables are
not data files of the table. So a column that was added, written to, and dropped before anything
was compacted leaves no trace there, and the next column gets its id. By id and type alone, the
old column's values would be read as values of the new one.

The base table's versions tell the two apart: a column is the same as long as its id is in every
version. Rows that record the version they were written for are judged by that version alone, whatever the
columns are called. Other rows (Lance's own writer records no version) are judged by the names
that the column has had.

Not every version must be read. No new column gets an id while a data file with values of that column, or of a
column with a higher id, stays in the table. So if both ends of a range of versions have the column and share
such a file, the column existed all the time (:class:`Traces`). The same holds for the MemWAL index if it has
the same UUID at both ends. If the ends do not suffice, the range is halved. (A file that was dropped comes
back only through Lance's ``restore``, which also brings back its columns.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from zlib import crc32

from lancewal.format import decode_record, encode_record
from lancewal.storage import ordered_map

#: The field id under which the MemWAL index is tracked: it, too, may be dropped and made again.
MEM_WAL_INDEX = -(1 << 31)
#: How many versions are read. Before these, or if versions were cleaned up, a column counts as the same.
MAX_LOOKBACK = 1_000
#: Up to this many versions are read one by one, without looking for stored runs.
_FEW_VERSIONS = 8
#: How many versions the first stored runs look back.
_FIRST_LOOKBACK = 100
_READERS = 16
#: Of the data files with the same highest field id, at most this many are kept. A hash of their names chooses
#: them, so that two versions that share many files also share some of the chosen ones.
_FILES_OF_A_FIELD = 64
#: How many results for ranges of versions are kept.
_MAX_SPANS = 256

#: The field names of a version by id, nested ones included; ``None`` if the version is gone.
FieldsOf = Callable[[int], Mapping[int, str] | None]


@dataclass(frozen=True)
class Traces:
    """Evidence of columns in a version: some data files, each with the highest field id in it.

    ``mem_wal`` is the UUID of the MemWAL index.

    >>> old, new = Traces({"a": 3, "b": 5}), Traces({"a": 3, "c": 7})
    >>> old.last_until(new, [3]), old.last_until(new, [3, 5])
    (True, False)
    """

    files: Mapping[str, int]
    mem_wal: bytes = b""

    @classmethod
    def of(cls, highest_fields: Mapping[str, int], mem_wal: bytes) -> Traces:
        files: dict[int, list[str]] = {}
        for path, number in highest_fields.items():
            files.setdefault(number, []).append(path)
        chosen = {
            path: number
            for number, paths in files.items()
            for path in nsmallest(_FILES_OF_A_FIELD, paths, key=lambda path: crc32(path.encode()))
        }
        return cls(chosen, mem_wal)

    def last_until(self, later: Traces, field_ids: Iterable[int]) -> bool:
        """Whether fields that both versions have were in all versions between them."""
        common = self.files.keys() & later.files.keys()
        highest = max((min(self.files[path], later.files[path]) for path in common), default=-1)
        same_index = bool(self.mem_wal) and self.mem_wal == later.mem_wal
        return all(same_index if number == MEM_WAL_INDEX else number <= highest for number in field_ids)


@dataclass(frozen=True)
class ColumnRuns:
    """The version since which each field of ``version`` has existed without a break.

    The versions before ``first`` are unknown: a run that begins there may be longer.

    >>> runs = ColumnRuns.starting_at(3, [0, 1]).through(4, [0]).through(5, [0, 1])
    >>> dict(runs.since)
    {0: 3, 1: 5}
    """

    first: int
    version: int
    since: Mapping[int, int]

    @classmethod
    def starting_at(cls, version: int, field_ids: Iterable[int]) -> ColumnRuns:
        return cls(version, version, dict.fromkeys(field_ids, version))

    def through(self, version: int, field_ids: Iterable[int]) -> ColumnRuns:
        """The runs for a later version. Missing versions in between do not end a run."""
        since = {number: self.since.get(number, self.version + 1) for number in field_ids}
        return ColumnRuns(self.first, version, since)

    def to_json(self) -> bytes:
        return encode_record(
            {"first": self.first, "version": self.version, "since": sorted(self.since.items())}
        )

    @classmethod
    def from_json(cls, data: bytes) -> ColumnRuns | None:
        """The inverse of :meth:`to_json`; ``None`` for any other bytes."""
        try:
            found = decode_record(data)
            since = {int(number): int(start) for number, start in found["since"]}
            return cls(int(found["first"]), int(found["version"]), since)
        except (ValueError, TypeError, KeyError, OverflowError):
            return None


class ColumnLog:
    """The known columns of all versions of one table; shared by the readers of a process.

    Thread-safe: its state is replaced as a whole.
    """

    def __init__(
        self,
        fields_of: FieldsOf,
        load: Callable[[], ColumnRuns | None] | None = None,
        traces_of: Callable[[int], Traces | None] = lambda version: None,
        existing: Callable[[range], Sequence[int]] | None = None,
    ) -> None:
        """``load`` returns runs of :meth:`unstored_runs` that were stored earlier.

        ``existing`` returns those of some versions that exist; without it each version is read.
        """
        self.fields_of = fields_of
        self._load = load
        self._traces_of = traces_of
        self._existing = existing or (lambda versions: [v for v in versions if fields_of(v) is not None])
        self._runs: ColumnRuns | None = None
        self._spans: dict[tuple[int, int], ColumnRuns] = {}

    def is_unbroken(self, field_id: int, start: int, end: int) -> bool:
        """Whether every known version from ``start`` to ``end`` has the field."""
        runs = self._up_to(end)
        since = runs.since.get(field_id)
        if since is not None and since <= start:
            return True
        if since is not None and runs.version == end and since > runs.first:
            return False
        span = self._span(max(start, end - MAX_LOOKBACK), end)
        return span is None or span.since.get(field_id, end + 1) <= span.first

    def _span(self, start: int, end: int) -> ColumnRuns | None:
        """The runs since the first existing version of a range; ``None`` if there is none."""
        span = self._spans.get((start, end))
        if span is None:
            first: int | None = start
            if self.fields_of(start) is None:
                first = next(iter(self._existing(range(start + 1, end + 1))), None)
            fields = None if first is None else self.fields_of(first)
            if first is None or fields is None:
                return None
            span = self._advanced(ColumnRuns.starting_at(first, fields), end)
            if len(self._spans) >= _MAX_SPANS:
                self._spans = {}
            self._spans[start, end] = span
        return span

    def _advanced(self, runs: ColumnRuns, version: int) -> ColumnRuns:
        """``runs`` for a later version; that version is read first, because it often suffices."""
        if runs.version >= version:
            return runs
        if self._last(runs, version):
            return runs.through(version, runs.since)
        after = max(runs.version, version - MAX_LOOKBACK) + 1
        return self._through(runs, self._existing(range(after, version + 1)))

    def _through(self, runs: ColumnRuns, versions: Sequence[int]) -> ColumnRuns:
        """``runs`` for the last of ``versions``, which are all later versions that exist."""
        if len(versions) > _READERS:
            if self._last(runs, versions[-1]):
                return runs.through(versions[-1], runs.since)
            middle = len(versions) // 2
            return self._through(self._through(runs, versions[:middle]), versions[middle:])
        workers = max(1, min(len(versions), _READERS))
        for number, fields in zip(versions, ordered_map(self.fields_of, versions, workers), strict=True):
            if fields is not None:
                runs = runs.through(number, fields)
        return runs

    def _last(self, runs: ColumnRuns, version: int) -> bool:
        """Whether the two versions alone prove that the later one has had the same fields all the time."""
        fields = self.fields_of(version)
        if fields is None or fields.keys() != runs.since.keys():
            return False
        old, new = self._traces_of(runs.version), self._traces_of(version)
        return old is not None and new is not None and old.last_until(new, runs.since)

    def run_start(self, field_id: int, version: int) -> tuple[int, bool]:
        """The version since which a field of ``version`` has existed, and whether that is certain."""
        runs = self._up_to(version)
        if runs.version == version and runs.since.get(field_id, runs.first) > runs.first:
            return runs.since[field_id], True
        start = version
        for number, fields in self._downwards(version - 1):
            if fields is None:
                return start, False
            if field_id not in fields:
                return start, True
            start = number
        return start, False

    def newest_with(self, field_id: int, version: int) -> int | None:
        """The newest version up to ``version`` that has the field; ``None`` if one in between is gone."""
        for number, fields in self._downwards(version):
            if fields is None:
                return None
            if field_id in fields:
                return number
        return None

    def _downwards(self, version: int) -> Iterator[tuple[int, Mapping[int, str] | None]]:
        """Versions from ``version`` down to the limit of the lookback, with their fields."""
        last = max(version - MAX_LOOKBACK, 0)
        size = 1
        while version > last:
            some = range(version, max(version - size, last), -1)
            workers = 1 if len(some) <= _FEW_VERSIONS else _READERS
            yield from zip(some, ordered_map(self.fields_of, some, workers), strict=True)
            version, size = some[-1] - 1, min(size * 2, 4 * _READERS)

    def unstored_runs(self, version: int) -> ColumnRuns | None:
        """The runs for ``version`` or a later version; ``None`` if they are stored already."""
        stored = None if self._load is None else self._load()
        if stored is not None and stored.version >= version:
            return None
        if stored is None:
            there = self._existing(range(max(version - _FIRST_LOOKBACK, 1), version))
            first = there[0] if there else version
            stored = ColumnRuns.starting_at(first, self.fields_of(first) or ())
        # The runs in memory would overwrite the stored ones, so they must reach back as far.
        if self._runs is None or stored.first < self._runs.first:
            self._runs = stored
        return self._up_to(version)

    def _up_to(self, version: int) -> ColumnRuns:
        runs = self._runs
        if runs is None or version - runs.version > _FEW_VERSIONS:
            stored = None if self._load is None else self._load()
            if stored is not None and (runs is None or stored.version > runs.version):
                runs = stored
        if runs is None:
            runs = ColumnRuns.starting_at(version, self.fields_of(version) or ())
        return self._keep(self._advanced(runs, version))

    def _keep(self, runs: ColumnRuns) -> ColumnRuns:
        known = self._runs
        if known is None or known.version < runs.version:
            self._runs = known = runs
        return known


class ColumnHistory:
    """The columns of one version of a table, compared with those of other versions.

    >>> versions = {1: {0: "id"}, 2: {0: "id", 1: "draft"}, 3: {0: "id"}, 4: {0: "key", 1: "note"}}
    >>> history = ColumnHistory(4, ColumnLog(versions.get))
    >>> history.was_called(0, "id"), history.was_called(1, "draft")
    (True, False)
    >>> history.replaced_since(2)
    frozenset({1})
    """

    def __init__(self, version: int, log: ColumnLog, source: object = None) -> None:
        """``source`` is what the log reads from; this object keeps it alive."""
        self.version = version
        self._log = log
        self._source = source
        self._names: dict[tuple[int, str], bool] = {}
        self._replaced: dict[int, frozenset[int]] = {version: frozenset()}
        self._continued: dict[int, bool] = {version: True}

    def was_called(self, field_id: int, name: str) -> bool:
        """Whether the column had this name in any version since it was added."""
        known = self._names.get((field_id, name))
        if known is None:
            known = self._names[field_id, name] = self._find(field_id, name)
        return known

    def replaced_since(self, version: int) -> frozenset[int]:
        """The field ids of this version that belonged to another column, or to none, in ``version``."""
        known = self._replaced.get(version)
        if known is None:
            start, end = sorted((version, self.version))
            present = set(self._log.fields_of(self.version) or ()) - {MEM_WAL_INDEX}
            known = frozenset(number for number in present if not self._log.is_unbroken(number, start, end))
            self._replaced[version] = known
        return known

    def is_continued_since(self, version: int) -> bool:
        """Whether every known version since ``version`` has the MemWAL index."""
        known = self._continued.get(version)
        if known is None:
            start, end = sorted((version, self.version))
            known = self._continued[version] = self._log.is_unbroken(MEM_WAL_INDEX, start, end)
        return known

    def _find(self, field_id: int, name: str) -> bool:
        oldest = max(self.version - MAX_LOOKBACK, 1)
        for version in range(self.version, oldest - 1, -1):
            columns = self._log.fields_of(version)
            if columns is None:
                return True
            present = columns.get(field_id)
            if present is None or present == name:
                return present is not None
        return oldest > 1
