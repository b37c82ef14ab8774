"""Backups: one consistent state of a table, copied to any store while writers and maintenance go on.

A plain copy mixes files of different moments: a base version from before a compaction without the
SSTables that it compacted, or a manifest without the log that it relies on. A backup reads a state
in the readers' order (shard manifests, ends of the logs, then the base version). It copies exactly
the files of that state, in parts that other processes may copy. If files of the state are collected
in the meantime, it starts again.

Below the destination::

    files/…                 files of tables whose content never changes under their name, shared by backups
    backups/{id}/…          files that are small or may change: WAL entries, manifests, records
    backups/{id}.json       the record: every file with its size and checksum, written last

A backup without a record was not finished, and a restore ignores it. Files that the newest record
names with the same size are not copied again.

The records of streams, which say what was written, are part of a state. Records that say "done" are
copied only if they existed before the state was read, so that none refers to rows that are not in it.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

import crc32c

from lancewal.base import BaseTable, lance_errors, manifest_info, open_base, store_column_history
from lancewal.errors import ConflictError, InvalidInputError, StorageError
from lancewal.format import WRITE_ID_BYTES, decode_entry, decode_record, encode_manifest, encode_record
from lancewal.maintenance.verify import verify
from lancewal.publish import TRANSACTIONS_DIR
from lancewal.reader import ShardPlace, read_state
from lancewal.shard import ShardManifestStore
from lancewal.sstable import held_generation
from lancewal.storage import ObjectInfo, ObjectStore, layout, ordered_map

logger = logging.getLogger(__name__)

_FORMAT = 1
_BACKUPS = "backups"
_FILES = "files"
_ATTEMPTS = 8
_CHUNK = 8 << 20
_REMOTE_COPIES = 8
#: Most bytes, and most files, of the base table that one task copies.
_PART_BYTES = 256 << 20
_PART_FILES = 256


@dataclass(frozen=True)
class CopiedFile:
    """A file of the table at ``path``, and where it is ``stored`` below the backups' root."""

    path: str
    stored: str
    size: int
    checksum: int


@dataclass(frozen=True)
class BackupRecord:
    """One finished backup."""

    id: str
    created: str
    version: int
    manifest: str
    files: tuple[CopiedFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def to_json(self) -> bytes:
        return encode_record({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, data: bytes, path: str) -> BackupRecord:
        try:
            found = decode_record(data)
            if found.pop("format") != _FORMAT:
                raise InvalidInputError(f"{path} was written by a newer lancewal; restore it with that one")
            files = tuple(CopiedFile(**file) for file in found.pop("files"))
            return cls(files=files, **found)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, InvalidInputError):
                raise
            raise StorageError(
                f"the backup's record {path} is damaged ({error!r}); delete it, or name another backup"
            ) from error


@dataclass(frozen=True)
class BackupReport:
    """What a backup holds, and how much of it had to be copied."""

    id: str
    version: int
    files: int
    num_bytes: int
    copied_files: int
    copied_bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class BackupPart:
    """Some files of a state, for one task to copy: the files of one shard, or some files of the base table.

    ``marker`` is the newest generation of the shard that the base holds. ``files`` are paths and sizes.
    ``known`` are the files of this part that an earlier backup has.
    """

    backup_id: str
    place: ShardPlace | None = None
    marker: int = 0
    files: tuple[tuple[str, int], ...] = ()
    known: tuple[CopiedFile, ...] = ()

    @property
    def shard_id(self) -> UUID | None:
        return None if self.place is None else self.place.shard_id

    def to_dict(self) -> dict[str, Any]:
        """The part as JSON; it names the shard's manifest by version only."""
        place = self.place
        shard = None
        if place is not None:
            shard = [str(place.shard_id), place.manifest.version, place.wal_end, self.marker]
        return {
            "backup_id": self.backup_id,
            "shard": shard,
            "files": self.files,
            "known": [astuple(file) for file in self.known],
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any], store: ObjectStore) -> BackupPart:
        """The part from JSON. Reads the shard's manifest; ``FileNotFoundError`` if that was collected."""
        place, marker = None, 0
        if found["shard"] is not None:
            shard_id, version, wal_end, marker = found["shard"]
            manifest = ShardManifestStore(store, UUID(shard_id)).read_version(version)
            place = ShardPlace(manifest, wal_end)
        files = tuple((path, size) for path, size in found["files"])
        known = tuple(CopiedFile(*file) for file in found["known"])
        return cls(found["backup_id"], place, marker, files, known)


@dataclass(frozen=True)
class CopiedPart:
    """The files of a part, and how much of them had to be copied."""

    files: tuple[CopiedFile, ...]
    copied_files: int
    copied_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "files": [astuple(file) for file in self.files]}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> CopiedPart:
        files = tuple(CopiedFile(*file) for file in found["files"])
        return cls(files, found["copied_files"], found["copied_bytes"])


#: Copies parts, here or in other processes; raises ``FileNotFoundError`` at the end if files were collected.
Copying = Callable[[Sequence[BackupPart]], Iterable[CopiedPart]]


def back_up(store: ObjectStore, destination: ObjectStore, copying: Copying | None = None) -> BackupReport:
    """Copy the current state of the table in ``store``; ``destination`` may hold earlier backups.

    ``copying`` copies the parts of the state. By default this process copies them one after the other.
    """
    started = time.perf_counter()
    if f"{destination.uri}/".startswith(f"{store.uri}/"):
        raise InvalidInputError(f"a backup at {destination.uri} would be part of the table that it is of")
    store_column_history(store, open_base(store).version)
    copying = copying or partial(_copied_here, store, destination)
    known = _known_files(destination)
    copied_files = copied_bytes = 0
    for attempt in range(1, _ATTEMPTS + 1):
        # Each attempt has its own id: a task of the last attempt may still be writing.
        copier = _Copier(store, destination, _new_id())
        try:
            plan = _plan(store, copier.id, known)
            files = [*plan.known, *(copier.keep(path, data) for path, data in plan.small.items())]
            for part in copying(plan.parts):
                files += part.files
                known |= {file.path: file for file in part.files if _is_shared(file)}
                copied_files += part.copied_files
                copied_bytes += part.copied_bytes
            break
        except FileNotFoundError as error:
            logger.info("backup started again, something was collected meanwhile: %s", error)
            destination.delete_prefix(f"{_BACKUPS}/{copier.id}")
            if attempt == _ATTEMPTS:
                raise ConflictError(
                    f"the table at {store.uri} was flushed and collected {_ATTEMPTS} times while it was "
                    "copied; collect garbage with a larger min_age"
                ) from error
    record = BackupRecord(copier.id, plan.created, plan.version, plan.manifest, tuple(files))
    destination.put(_record_path(record.id), record.to_json())
    return BackupReport(
        record.id,
        record.version,
        len(record.files),
        record.num_bytes,
        copied_files + copier.copied_files,
        copied_bytes + copier.copied_bytes,
        time.perf_counter() - started,
    )


def copy_part(store: ObjectStore, destination: ObjectStore, part: BackupPart) -> CopiedPart:
    """Copy one part; raises ``FileNotFoundError`` if a file of it was collected in the meantime.

    Idempotent: a second task, later or at the same time, writes the same bytes to the same places.
    """
    copier = _Copier(store, destination, part.backup_id, part.known)
    files = copier.share(part.files)
    if part.place is not None:
        # The log is copied first, because it is collected first.
        files += _log_files(store, copier, part.place)
        files += _shard_files(store, copier, part.place, part.marker)
    return CopiedPart(tuple(files), copier.copied_files, copier.copied_bytes)


def _copied_here(
    store: ObjectStore, destination: ObjectStore, parts: Sequence[BackupPart]
) -> Iterator[CopiedPart]:
    for part in parts:
        yield copy_part(store, destination, part)


def list_backups(source: ObjectStore) -> list[str]:
    """The ids of all finished backups, oldest first."""
    names = (info.path.removeprefix(f"{_BACKUPS}/") for info in source.list(_BACKUPS))
    return sorted(name.removesuffix(".json") for name in names if "/" not in name and name.endswith(".json"))


def read_record(source: ObjectStore, backup_id: str | None = None) -> BackupRecord:
    """The record of a backup, by default of the newest."""
    known = list_backups(source)
    if not known:
        raise InvalidInputError(
            f"there is no finished backup at {source.uri}; check the place, or back up again"
        )
    wanted = known[-1] if backup_id is None else backup_id
    if wanted not in known:
        raise InvalidInputError(
            f"there is no backup {wanted!r} at {source.uri}; those that are there: {', '.join(known)}"
        )
    return BackupRecord.from_json(source.get(_record_path(wanted)), _record_path(wanted))


def check_backup(source: ObjectStore, backup_id: str | None = None) -> list[str]:
    """Read all files of a backup; returns one problem for each file that is missing or damaged."""
    record = read_record(source, backup_id)

    def problem(file: CopiedFile) -> str | None:
        try:
            size, checksum = _measured(_chunks(source, file.stored))
        except FileNotFoundError:
            return f"{file.stored} is missing"
        same = (size, checksum) == (file.size, file.checksum)
        return None if same else f"{file.stored} is not what was copied"

    found = ordered_map(problem, record.files, 1 if source.is_local else _REMOTE_COPIES)
    return [text for text in found if text is not None]


def restore_backup(
    source: ObjectStore, destination: ObjectStore, backup_id: str | None = None
) -> BackupRecord:
    """Make a table from a backup, at a destination that is empty.

    Every file is compared with its checksum. The base table's manifest is copied last, so an unfinished
    restore leaves no table.
    """
    record = read_record(source, backup_id)
    if destination.list():
        raise InvalidInputError(
            f"there are files at {destination.uri} already; restore to an empty place, and move the table "
            "afterwards"
        )
    workers = 1 if source.is_local and destination.is_local else _REMOTE_COPIES
    last = [file for file in record.files if file.path == record.manifest]
    others = [file for file in record.files if file.path != record.manifest]
    for files in (others, last):
        for _ in ordered_map(lambda file: _restore_file(source, destination, file), files, workers):
            continue
    report = verify(destination, deep=False)
    if not report.ok:
        raise StorageError(f"the table at {destination.uri} was restored, but is not whole: {report}")
    return record


def _restore_file(source: ObjectStore, destination: ObjectStore, file: CopiedFile) -> None:
    try:
        size, checksum = _copy(source, file.stored, destination, file.path)
    except FileNotFoundError as error:
        raise StorageError(f"{file.stored} of the backup at {source.uri} is missing") from error
    if (size, checksum) != (file.size, file.checksum):
        destination.delete(file.path)
        raise StorageError(
            f"{file.stored} of the backup at {source.uri} is damaged: it should have {file.size} bytes and "
            f"checksum {file.checksum:08x}, it has {size} and {checksum:08x}; restore an earlier backup"
        )


class _Copier:
    """Copies files of a table to its backups, each once; ``known`` are the files of earlier backups."""

    def __init__(
        self, store: ObjectStore, destination: ObjectStore, backup_id: str, known: Iterable[CopiedFile] = ()
    ) -> None:
        self.id = backup_id
        self._store = store
        self._destination = destination
        self._workers = 1 if store.is_local and destination.is_local else _REMOTE_COPIES
        self.copied_files = 0
        self.copied_bytes = 0
        self._known = {file.path: file for file in known}

    def share(self, files: Iterable[tuple[str, int]]) -> list[CopiedFile]:
        """Copy files that never change under their names; skips files that an earlier backup has."""
        return list(ordered_map(self._shared, files, self._workers))

    def _shared(self, file: tuple[str, int]) -> CopiedFile:
        path, size = file
        known = self._known.get(path)
        if known is not None and known.size == size:
            return known
        # If an earlier backup has a file of this name with another size, that file must not be overwritten.
        stored = f"{_FILES}/{path}" if known is None else f"{_BACKUPS}/{self.id}/{path}"
        size, checksum = _copy(self._store, path, self._destination, stored)
        self._count(size)
        return CopiedFile(path, stored, size, checksum)

    def keep(self, path: str, data: bytes) -> CopiedFile:
        """Copy a small file, or one whose content may change under its name."""
        stored = f"{_BACKUPS}/{self.id}/{path}"
        self._destination.put(stored, data)
        self._count(len(data))
        return CopiedFile(path, stored, len(data), crc32c.crc32c(data))

    def _count(self, num_bytes: int) -> None:
        self.copied_files += 1
        self.copied_bytes += num_bytes


def _known_files(destination: ObjectStore) -> dict[str, CopiedFile]:
    """Files of the newest backup that still exist and may be shared, by path.

    A backup whose record is damaged is passed over: it must not keep others from being made.
    """
    for backup_id in reversed(list_backups(destination)):
        path = _record_path(backup_id)
        data = destination.get(path)
        try:
            files = BackupRecord.from_json(data, path).files
        except StorageError as error:
            logger.warning("an earlier backup cannot be used: %s", error)
            continue
        there = {info.path: info.size for info in destination.list(_FILES)}
        return {file.path: file for file in files if _is_shared(file) and there.get(file.stored) == file.size}
    return {}


def _is_shared(file: CopiedFile) -> bool:
    return file.stored.startswith(f"{_FILES}/")


@dataclass(frozen=True)
class _Plan:
    """A state to copy: its parts, its small files, and the known files, which need no copy."""

    created: str
    version: int
    manifest: str
    parts: tuple[BackupPart, ...]
    small: Mapping[str, bytes]
    known: tuple[CopiedFile, ...]


def _plan(store: ObjectStore, backup_id: str, known: Mapping[str, CopiedFile]) -> _Plan:
    """Read one state; raises ``FileNotFoundError`` if something of it was collected in the meantime."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    done_before = _own_records(store)
    state = read_state(store)
    records = {**_own_records(store, begun_only=True), **done_before}
    base = BaseTable.open(store.uri, store.storage_options, store=store, version=state.version)
    found = manifest_info(store, state.version)
    if found is None:
        raise FileNotFoundError(f"the manifest of base version {state.version} is not in {store.uri}")
    by_directory: dict[str, list[CopiedFile]] = {}
    for file in known.values():
        by_directory.setdefault("/".join(file.path.split("/")[:2]), []).append(file)
    parts = [
        BackupPart(
            backup_id,
            place,
            held_generation(base, store, place.manifest),
            known=tuple(by_directory.get(layout.shard_dir(place.shard_id), ())),
        )
        for place in state.shards
    ]
    there: list[CopiedFile] = []
    missing: list[tuple[str, int]] = []
    for info in _base_files(store, base):
        if info.path in known and known[info.path].size == info.size:
            there.append(known[info.path])
        else:
            missing.append((info.path, info.size))
    parts += [
        # Known files in these parts have another size than before.
        BackupPart(backup_id, files=some, known=tuple(known[path] for path, _ in some if path in known))
        for some in _in_parts(missing)
    ]
    small = {found.path: store.get(found.path), **records}
    return _Plan(created, state.version, found.path, tuple(parts), small, tuple(there))


def _in_parts(files: Sequence[tuple[str, int]]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Files in groups that one task copies quickly; a file above the limit is a group of its own."""
    some: list[tuple[str, int]] = []
    for file in files:
        if some and (len(some) == _PART_FILES or sum(size for _, size in some) + file[1] > _PART_BYTES):
            yield tuple(some)
            some = []
        some.append(file)
    if some:
        yield tuple(some)


def _log_files(store: ObjectStore, copier: _Copier, place: ShardPlace) -> Iterator[CopiedFile]:
    for position in place.wal_range:
        path = layout.wal_entry(place.shard_id, position)
        data = store.get(path)
        decode_entry(data, place.shard_id, position)
        yield copier.keep(path, data)


def _shard_files(store: ObjectStore, copier: _Copier, place: ShardPlace, marker: int) -> list[CopiedFile]:
    """Copy the SSTables that the base does not hold, and a manifest that names only these."""
    manifest, shard_id = place.manifest, place.shard_id
    pending = tuple(entry for entry in manifest.sstables if entry.generation > marker)
    files: list[CopiedFile] = []
    for entry in pending:
        directory = layout.sstable_dir(shard_id, entry.path)
        files += copier.share((info.path, info.size) for info in store.list(directory))
        # Garbage collection deletes ``_versions`` first. If it still exists, the copy is complete.
        if not store.list(f"{directory}/_versions"):
            raise FileNotFoundError(f"SSTable {entry.path} of shard {shard_id} is gone")
    # Every attempt of a task must write the same bytes: all write to the same place, and one is recorded.
    write_id = hashlib.sha256(f"{copier.id}/{shard_id}".encode()).digest()[:WRITE_ID_BYTES]
    data = bytes(encode_manifest(replace(manifest, sstables=pending), write_id))
    files.append(copier.keep(layout.manifest_file(shard_id, manifest.version), data))
    files.append(copier.keep(layout.version_hint(shard_id), b'{"version":%d}' % manifest.version))
    return files


def _base_files(store: ObjectStore, base: BaseTable) -> list[ObjectInfo]:
    """The data, deletion and index files of one version of the base table."""
    wanted: set[str] = set()
    with lance_errors("list the files of the base table"):
        for fragment in base.dataset.get_fragments():
            for file in fragment.data_files():
                if getattr(file, "base_id", None) is not None:
                    raise InvalidInputError(
                        f"the table at {base.uri} keeps files in another table (a shallow clone does); "
                        "back up a deep clone of it"
                    )
                wanted.add(f"data/{file.path}")
            deletions = fragment.deletion_file()
            if deletions is not None:
                wanted.add(deletions)
    listed = {info.path: info for directory in ("data", "_deletions") for info in store.list(directory)}
    if missing := sorted(wanted - set(listed)):
        raise FileNotFoundError(f"{missing[0]} of base version {base.version} is gone")
    # Large values of a data file are in a directory with the file's name.
    beside = tuple(f"{path.removesuffix('.lance')}/" for path in wanted)
    files = [info for path, info in listed.items() if path in wanted or path.startswith(beside)]
    for index in base.manifest.indexes:
        files += store.list(f"_indices/{index.uuid}")
    return files


def _own_records(store: ObjectStore, *, begun_only: bool = False) -> dict[str, bytes]:
    """lancewal's own records; ``begun_only`` reads those that say which transactions have begun.

    Not those that say "done", or which slots of a log were emptied since: the copied log has older entries.
    """
    found = {}
    prefix = TRANSACTIONS_DIR if begun_only else layout.OWN_DIR
    for info in store.list(prefix):
        if info.path.startswith((layout.CLOCK_DIR, layout.LOOKS_DIR, layout.CHECKPOINTS_DIR)) or (
            begun_only and (info.path.endswith(".done") or ".emptied." in info.path)
        ):
            continue
        try:
            found[info.path] = store.get(info.path)
        except FileNotFoundError:
            # Removed since the listing: its transaction is over.
            continue
    return found


def _copy(source: ObjectStore, path: str, destination: ObjectStore, target: str) -> tuple[int, int]:
    """Copy one file of any size; returns its size and checksum."""
    measured: list[tuple[int, int]] = []
    gone: list[FileNotFoundError] = []

    def chunks() -> Iterator[bytes]:
        size = checksum = 0
        try:
            for chunk in _chunks(source, path):
                size, checksum = size + len(chunk), crc32c.crc32c(chunk, checksum)
                yield chunk
        except FileNotFoundError as error:
            gone.append(error)
            raise
        measured.append((size, checksum))

    try:
        destination.put_from(target, chunks)
    except Exception:
        # If the source file is gone, the destination's error does not matter.
        if gone:
            raise gone[-1] from None
        raise
    return measured[-1]


def _chunks(store: ObjectStore, path: str) -> Iterator[bytes]:
    info = store.head(path)
    if info is None:
        raise FileNotFoundError(f"{path} in {store.uri} does not exist")
    for start in range(0, max(info.size, 1), _CHUNK):
        yield store.get_range(path, start, min(_CHUNK, info.size - start))


def _measured(chunks: Iterator[bytes]) -> tuple[int, int]:
    size = checksum = 0
    for chunk in chunks:
        size, checksum = size + len(chunk), crc32c.crc32c(chunk, checksum)
    return size, checksum


def _new_id() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{secrets.token_hex(4)}"


def _record_path(backup_id: str) -> str:
    return f"{_BACKUPS}/{backup_id}.json"
