"""Records of which writes of an application are in the table already. They survive crashes.

A job that writes several shards, and may be rerun after a crash, names its writes: an
application id, and a version that grows with every write (a stream's query id and batch id).
For each application there is::

    _mem_wal/_lancewal/transactions/{digest of the application id}/
        {version}.started.{run}     a run of this version is about to write; what it will leave
        {version}.shard.{shard}     a shard has the version; written before its proof is removed
        {version}.emptied.{shard}.{position}
                                    entries of a shard below the position are removed, and none of them is a
                                    proof of the version; written before they are
        {version}.done              all shards of this version, and all versions before, are written

A run writes its ``started`` record before anything else, and ``done`` after all shards. The
proof that one shard has a version is part of the shard itself: the tagged WAL entry, or
the SSTables in its manifest. Code that removes such a proof calls :meth:`Unsettled.preserve`
first, which leaves a ``shard`` record if the version is not done yet. So between
``started`` and ``done`` the proof is always found, however long the application was away.

A stalled run may write an entry into a slot that garbage collection had emptied. Such an entry proves
nothing, because the run was superseded and nobody replays the entry. The entry itself does not show this,
so ``emptied`` records do. A process that has found an entry reads the records again. It believes the entry
if no ``emptied`` record is above the entry's position, because then the slot was never emptied. A process
that has found no entry reads the records again too, because the proof may have become a ``shard`` record in
the meantime.

Only the newest version is kept, so the records of an application are bounded by its shards.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any
from uuid import UUID, uuid4

from lancewal.errors import InvalidInputError, LanceWalError
from lancewal.format import WalEntry, decode_record, encode_record, reading_record
from lancewal.shard import WalTailer
from lancewal.storage import ObjectStore, layout

logger = logging.getLogger(__name__)

TRANSACTIONS_DIR = f"{layout.OWN_DIR}/transactions"
#: The tag of a WAL entry or pointer that belongs to a transaction.
TRANSACTION_TAG = "transaction"

_MAX_VERSION = (1 << 63) - 1
_NAME = re.compile(r"(\d{20})\.(done|started|shard|emptied)(?:\.([0-9a-f-]+))?(?:\.(\d{20}))?")
#: So many ``emptied`` records of a shard stay. A listing beside a collection may miss the newest one.
_EMPTIED_KEPT = 2


@dataclass(frozen=True)
class Transaction:
    """One write of an application; versions of an application are written in ascending order."""

    app_id: str
    version: int

    def __post_init__(self) -> None:
        if not isinstance(self.app_id, str) or not self.app_id:
            raise InvalidInputError("a transaction needs an application id that is a text and not empty")
        is_number = isinstance(self.version, int) and not isinstance(self.version, bool)
        if not is_number or not 0 <= self.version <= _MAX_VERSION:
            raise InvalidInputError(f"a transaction's version must be a number from 0, got {self.version!r}")

    @classmethod
    def anonymous(cls) -> Transaction:
        """A transaction for a write that is never rerun under the same name."""
        return cls(f"anonymous-{uuid4()}", 0)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.app_id.encode()).hexdigest()[:32]

    @property
    def tags(self) -> dict[str, str]:
        """The tags of the transaction's WAL entries."""
        return {TRANSACTION_TAG: f"{self.digest}:{self.version}"}

    def wrote(self, entry: WalEntry) -> bool:
        """Whether the rows of ``entry`` are this transaction's."""
        return not entry.sentinel and entry.tags.get(TRANSACTION_TAG) == self.tags[TRANSACTION_TAG]


@dataclass(frozen=True)
class ShardWrite:
    """What a transaction did in one shard. ``skipped`` means that an earlier run had written it.

    ``position`` is the position of its entry or pointer, ``wal_bytes`` the size of the entry. ``conflicts``
    is how often another process took over the shard during the write. ``tail`` is how many positions of the
    log are in no SSTable yet, including the appended entry.
    """

    shard_id: UUID
    rows: int
    skipped: bool
    position: int | None = None
    wal_bytes: int = 0
    conflicts: int = 0
    tail: int = 0

    def to_dict(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if name != "shard_id"}

    @classmethod
    def from_dict(cls, shard_id: UUID, stored: Mapping[str, Any]) -> ShardWrite:
        position = stored["position"]
        return cls(
            shard_id,
            int(stored["rows"]),
            bool(stored["skipped"]),
            None if position is None else int(position),
            int(stored["wal_bytes"]),
            int(stored["conflicts"]),
            int(stored["tail"]),
        )


@dataclass(frozen=True)
class Run:
    """One attempt to write a version: the SSTables that it publishes, or where its WAL entries are.

    ``floors`` gives by shard the lowest position that an entry of the run can have. A shard
    that is not named did not exist when the run began. ``None`` means that the run appends no entries.
    """

    version: int
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    floors: Mapping[UUID, int] | None = None
    sstables: Mapping[UUID, tuple[str, ...]] = field(default_factory=dict)

    def floor(self, shard_id: UUID) -> int:
        return (self.floors or {}).get(shard_id, layout.FIRST_WAL_POSITION)


@dataclass(frozen=True)
class History:
    """What the records of an application say.

    ``done`` is the newest version that is written in full, -1 if there is none. ``runs``, ``marks`` and
    ``emptied`` are those of later versions. ``marks`` gives, by version and shard, the run that wrote it, and
    ``emptied`` the positions of its ``emptied`` records, ascending.
    """

    done: int
    runs: tuple[Run, ...]
    marks: Mapping[tuple[int, UUID], str]
    emptied: Mapping[tuple[int, UUID], Sequence[int]]

    def runs_of(self, version: int) -> list[Run]:
        return [run for run in self.runs if run.version == version]

    def proven_from(self, version: int, shard_id: UUID) -> int:
        """The lowest position in a shard at which an entry proves that it has the version."""
        return max(self.emptied.get((version, shard_id), ()), default=layout.FIRST_WAL_POSITION)


class TransactionLog:
    """The records of one application.

    Any process may use them: records are only added, and removed once a newer ``done`` makes them
    meaningless.
    """

    def __init__(self, store: ObjectStore, transaction: Transaction, known: Iterable[Run] = ()) -> None:
        """``known`` are runs whose records need not be read: a record never changes."""
        self._store = store
        self.transaction = transaction
        self._directory = f"{TRANSACTIONS_DIR}/{transaction.digest}"
        self._known = {_started_name(run): run for run in known}

    def read(self) -> History:
        while True:
            names = [info.path.rsplit("/", 1)[-1] for info in self._store.list(self._directory)]
            try:
                return _history(self._store, self._directory, names, self._known)
            except FileNotFoundError:
                logger.debug("a later version was finished while %s was read", self._directory)

    def is_done(self) -> bool:
        """Whether this version, or a later one, is written in full."""
        return self.read().done >= self.transaction.version

    def start(self, run: Run) -> None:
        """Record what is about to be written. Must return before the first shard is touched."""
        record = {
            "app": self.transaction.app_id,
            "floors": None if run.floors is None else {str(s): p for s, p in run.floors.items()},
            "sstables": {str(shard): list(names) for shard, names in run.sstables.items()},
        }
        self._put(_started_name(run), record)

    def finish(self, written: Sequence[ShardWrite] = (), floors: Mapping[UUID, int] | None = None) -> None:
        """Record that all shards have this version.

        ``floors`` are lower bounds for the positions of the next version's entries. ``written`` is what the
        last run wrote; it is only for progress reports.
        """
        version = self.transaction.version
        record = {
            "app": self.transaction.app_id,
            "floors": {str(shard): position for shard, position in (floors or {}).items()},
            "written": {str(each.shard_id): each.to_dict() for each in written},
        }
        self._put(f"{version:020d}.done", record)
        # Keep this version's own records: a concurrent listing might see neither those nor the new record.
        self._forget(below=version)

    def forget(self) -> None:
        """Remove all records, for an application that will not come back."""
        self._forget(below=_MAX_VERSION + 1)

    def floors(self, history: History) -> dict[UUID, int] | None:
        """The floors in the newest ``done`` record; ``None`` if there is none."""
        _, path, content = self._done_record(history)
        if content is None:
            return None
        with reading_record(path):
            return {UUID(shard): int(position) for shard, position in content["floors"].items()}

    def last_written(self) -> tuple[int, list[ShardWrite]] | None:
        """The newest version of the application that is done, and what its last run wrote."""
        done, path, content = self._done_record(self.read())
        if content is None:
            return None
        with reading_record(path):
            # Records of earlier releases do not have this field.
            stored = content.get("written", {})
            return done, [ShardWrite.from_dict(UUID(shard), each) for shard, each in stored.items()]

    def _done_record(self, history: History) -> tuple[int, str, dict[str, Any] | None]:
        """The version, path and content of the newest ``done`` record; no content if there is none."""
        while True:
            done = history.done
            path = f"{self._directory}/{done:020d}.done"
            if done < 0:
                return done, path, None
            try:
                return done, path, _get(self._store, path)
            except FileNotFoundError:
                logger.debug("version %d of %s was replaced by a later one", done, self._directory)
                history = self.read()

    def _put(self, name: str, record: Mapping[str, object]) -> None:
        self._store.put(f"{self._directory}/{name}", encode_record(record))

    def _forget(self, below: int) -> None:
        try:
            paths = [info.path for info in self._store.list(self._directory)]
            parsed = [_NAME.fullmatch(path.rsplit("/", 1)[-1]) for path in paths]
            old = [path for path, name in zip(paths, parsed, strict=True) if name and int(name[1]) < below]
            # The deletion may be partial, in any order: each record is valid without the others.
            self._store.delete_many(old)
        except LanceWalError as error:
            # The remaining records mean nothing any more; the next version removes them.
            logger.warning("old transaction records not removed: %s", error)


class Unsettled:
    """Transactions that were started and are not known to be done.

    Read it after the manifest or the listing that names what is to be removed. Then a transaction
    that is not in it has left nothing there.
    """

    def __init__(self, store: ObjectStore, histories: Mapping[str, History]) -> None:
        """``histories`` by the directories of the applications."""
        self._store = store
        self._histories = histories

    @classmethod
    def read(cls, store: ObjectStore) -> Unsettled:
        names: dict[str, list[str]] = {}
        for info in store.list(TRANSACTIONS_DIR):
            directory, _, name = info.path.rpartition("/")
            names.setdefault(directory, []).append(name)
        histories = {}
        for directory, present in names.items():
            try:
                history = _history(store, directory, present)
            except FileNotFoundError:
                # A transaction was finished in the meantime, so list again. Unfinished ones are still listed.
                return cls.read(store)
            if history.runs:
                histories[directory] = history
        return cls(store, histories)

    def __len__(self) -> int:
        return sum(len(history.runs) for history in self._histories.values())

    def preserve(
        self, shard_id: UUID, *, sstables: Collection[str] = (), positions: range = range(0)
    ) -> list[str]:
        """Record the proofs that would be lost with these SSTables of a manifest and these WAL entries.

        Call it before they are removed. Of transactions that may have entries among them, but have not,
        it records that. Returns the paths of the records that were written. Usually there are none, and
        no request is made.
        """
        written: list[str] = []
        for directory, history in self._histories.items():
            for version in dict.fromkeys(run.version for run in history.runs):
                record = self._record_of(directory, history, version, shard_id, set(sstables), positions)
                if record is not None and self._is_needed(directory, version, record):
                    written.append(record)
        return written

    def _record_of(
        self,
        directory: str,
        history: History,
        version: int,
        shard_id: UUID,
        sstables: set[str],
        positions: range,
    ) -> str | None:
        """Record that the shard has a version, or that none of these entries is of it; returns the path.

        All runs of a version count together: the entry of one may be below the floor of another.
        """
        if (version, shard_id) in history.marks:
            return None
        runs = history.runs_of(version)
        proof = next((run for run in runs if not sstables.isdisjoint(run.sstables.get(shard_id, ()))), None)
        appending = [run for run in runs if run.floors is not None]
        first = min(appending, key=lambda run: run.floor(shard_id), default=None)
        if proof is None and first is not None and first.floor(shard_id) < positions.stop:
            if not self._has_proof(directory, history, first, shard_id, positions):
                return self._note_emptied(directory, history, version, shard_id, positions.stop)
            proof = first
        if proof is None:
            return None
        path = f"{directory}/{version:020d}.shard.{shard_id}"
        self._store.put(path, encode_record({"run": proof.run_id}))
        return path

    def _is_needed(self, directory: str, version: int, record: str) -> bool:
        """Whether the transaction still has its records; if not, nobody else would ever remove this one."""
        start = f"{directory}/{version:020d}.started."
        if any(info.path.startswith(start) for info in self._store.list(directory)):
            return True
        self._store.delete(record)
        return False

    def _has_proof(
        self, directory: str, history: History, run: Run, shard_id: UUID, positions: range
    ) -> bool:
        """Whether one of the entries from the run's floor on proves that the shard has its version."""
        tag = f"{directory.rpartition('/')[2]}:{run.version}"
        tailer = WalTailer(self._store, shard_id)
        start = max(run.floor(shard_id), positions.start, history.proven_from(run.version, shard_id))
        for position in range(start, positions.stop):
            entry = tailer.read_entry(position)
            if entry is None or entry.sentinel or entry.tags.get(TRANSACTION_TAG) != tag:
                continue
            if position >= self._emptied_now(directory, run.version, shard_id):
                return True
        return False

    def _emptied_now(self, directory: str, version: int, shard_id: UUID) -> int:
        """The highest ``emptied`` record of a shard; another collection may have written it by now."""
        names = [info.path.rpartition("/")[2] for info in self._store.list(directory)]
        return max(_emptied(names).get((version, shard_id), ()), default=0)

    def _note_emptied(
        self, directory: str, history: History, version: int, shard_id: UUID, end: int
    ) -> str | None:
        """Record that entries below ``end`` prove nothing, unless that is recorded."""
        known = history.emptied.get((version, shard_id), ())
        if end <= max(known, default=0):
            return None
        stem = f"{directory}/{version:020d}.emptied.{shard_id}"
        self._store.put(f"{stem}.{end:020d}", encode_record({}))
        self._store.delete_many([f"{stem}.{old:020d}" for old in known[: 1 - _EMPTIED_KEPT]])
        return f"{stem}.{end:020d}"


def find_entry(
    store: ObjectStore, shard_id: UUID, transaction: Transaction, start: int, end: int
) -> WalEntry | None:
    """The first entry of a transaction among the positions from ``start`` up to ``end`` (exclusive).

    Neither an entry nor its absence counts before the records are read once more: slots may have been
    emptied, and filled by others. Raises :class:`WalTruncatedError` if some entries were collected; their
    proofs are then preserved.
    """
    entries = WalTailer(store, shard_id).entries(start, end)
    return next((entry for entry in entries if transaction.wrote(entry)), None)


def _started_name(run: Run) -> str:
    return f"{run.version:020d}.started.{run.run_id}"


def _history(
    store: ObjectStore, directory: str, names: Collection[str], known: Mapping[str, Run] | None = None
) -> History:
    parsed = [match for match in map(_NAME.fullmatch, names) if match]
    done = max((int(match[1]) for match in parsed if match[2] == "done"), default=-1)
    runs: list[Run] = []
    marks: dict[tuple[int, UUID], str] = {}
    for match in parsed:
        version = int(match[1])
        if version <= done or match[2] in ("done", "emptied") or match[3] is None:
            continue
        if known and match[0] in known:
            runs.append(known[match[0]])
            continue
        path = f"{directory}/{match[0]}"
        content = _get(store, path)
        with reading_record(path):
            if match[2] == "started":
                runs.append(_run(version, match[3], content))
            else:
                marks[version, UUID(match[3])] = str(content["run"])
    emptied = {key: positions for key, positions in _emptied(names).items() if key[0] > done}
    return History(done, tuple(runs), marks, emptied)


def _emptied(names: Iterable[str]) -> dict[tuple[int, UUID], list[int]]:
    """The positions of ``emptied`` records by version and shard, ascending; their names say all."""
    found: dict[tuple[int, UUID], list[int]] = {}
    for match in filter(None, map(_NAME.fullmatch, sorted(names))):
        if match[2] == "emptied" and match[4] is not None:
            with suppress(ValueError):  # not a shard's id: nobody of ours wrote it
                found.setdefault((int(match[1]), UUID(match[3])), []).append(int(match[4]))
    return found


def _run(version: int, run_id: str, content: Mapping[str, Any]) -> Run:
    floors = content["floors"]
    return Run(
        version,
        run_id,
        None if floors is None else {UUID(shard): int(position) for shard, position in floors.items()},
        {UUID(shard): tuple(names) for shard, names in content["sstables"].items()},
    )


def _get(store: ObjectStore, path: str) -> dict[str, Any]:
    data = store.get(path)
    with reading_record(path):
        return decode_record(data)


def has_mark(store: ObjectStore, tag: str, shard_id: UUID, run_id: str) -> bool:
    """Whether a mark says that this run wrote the tag's transaction to the shard."""
    digest, _, version = tag.partition(":")
    path = f"{TRANSACTIONS_DIR}/{digest}/{int(version):020d}.shard.{shard_id}"
    try:
        with reading_record(path):
            return bool(_get(store, path)["run"] == run_id)
    except FileNotFoundError:
        return False
