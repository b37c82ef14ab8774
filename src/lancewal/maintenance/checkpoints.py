"""Checkpoints: named states of a table that stay readable until they are dropped.

A checkpoint is the readers' snapshot as data (:mod:`lancewal.reader.state`): the base version, and of
each shard the manifest, with the SSTables that this version does not hold, and where the WAL ended. No
row is copied. The manifests are in the record itself, so old versions of them may be collected; the WAL
entries and SSTables have to stay (:class:`NeededFiles`). A Lance tag keeps the base version through
Lance's ``cleanup_old_versions``.

**Two objects.** ``NAME.TOKEN.begun`` announces a checkpoint, ``NAME.TOKEN.json`` is its record; the token
is random, so that nobody who stood still for a while deletes a later checkpoint of the same name. It
exists while *both* are there. Made: ``.begun``, state, tag, ``.json``. Dropped: tag, ``.begun``,
``.json``; a drop that dies after the tag is repeated by the next one, and what is left after ``.begun``
is nobody's checkpoint.

**Why a collector takes nothing from a checkpoint that was returned.** It reads the base version, then the
shards, *then* lists the checkpoints, then deletes. Let the maker have announced, then read the shards,
then the base.

- The collector's base is older than the checkpoint's: what it calls compacted is compacted in the
  checkpoint's base too, because markers only grow, and the checkpoint does not need it. Its manifest is
  older than the checkpoint's: what it calls flushed lies at or below the checkpoint's replay cursor as
  well.
- Otherwise the collector read later than the maker, who had announced before, so its listing shows
  ``.begun``. With the record it keeps what the record names. Without it, it keeps all rows of all shards.

However long either of them stands still, no clock is in this. ``.begun`` stays while the checkpoint
exists, because a listing of a local directory may miss a file that came meanwhile, but none that was
there all the time.

**A maker that died** must not hold collection up for good. An announcement without a record that is old
(by the storage's clock; being wrong costs the maker another attempt and nothing else) is *revoked*: the
collector puts a void record in its place, if there is none. Of maker and collector one creates the
object. If it is the maker, the collector reads it; if it is the collector, the maker is refused, and the
announcement goes. Then the void record goes too; a maker that comes even later finds no announcement
after its put, and gives up.

**Lance's cleanup** never removes the newest version that it knows of, nor tagged ones. After the tag was
made, the maker looks whether its version is still the newest, and begins again where it is not. So a
cleanup that did not see the tag knew no newer version.

**Damage.** A record that cannot be read is an error for who opens it; a collector then keeps all rows of
all shards until it is dropped: what it needs, nobody knows.
"""

from __future__ import annotations

import binascii
import logging
import re
import secrets
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import lance

from lancewal.base import BaseTable, lance_errors, tagged_versions
from lancewal.errors import ConflictError, InvalidInputError, LanceWalError, StorageError
from lancewal.format import decode_manifest, decode_record, encode_manifest, encode_record, reading_record
from lancewal.maintenance.commits import crash_point, open_base
from lancewal.reader import ShardPlace, StateReader, TableState
from lancewal.sstable import held_generation
from lancewal.storage import ObjectInfo, ObjectStore, PutOutcome, layout, ordered_map, sync_file_system

logger = logging.getLogger(__name__)

_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.)){0,99}")
_FILE = re.compile(r"(.+)\.([0-9a-f]{16})\.(begun|json)")
_TAG = re.compile(r"lancewal-.+-[0-9a-f]{16}")
#: For how long an announcement holds collection up, if its maker does not finish.
_ANNOUNCED_FOR = timedelta(hours=1)
#: Each attempt fails only when somebody committed to the base table in between.
_ATTEMPTS = 16
_REMOTE_READERS = 16
#: Beyond that a date has no name.
_LONGEST = timedelta(days=365_000)


@dataclass(frozen=True)
class Checkpoint:
    """A named state of a table, as ``table.checkpoints()`` lists it.

    ``version`` is that of the base table. Times are by the storage's clock; from ``expires`` on the next
    garbage collection drops it, ``None`` is never. ``problem`` says why it cannot be read, and is ``None``
    while it can.

    >>> import tempfile, lancewal
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1}], key="id")
    >>> kept = table.checkpoint("monday")
    >>> kept.name, kept.to_dict()["expires"]
    ('monday', None)
    """

    name: str
    created: datetime
    version: int | None
    expires: datetime | None = None
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "name": self.name,
            "created": self.created.isoformat(),
            "version": self.version,
            "expires": None if self.expires is None else self.expires.isoformat(),
            "problem": self.problem,
        }


def is_checkpoint_tag(tag: str) -> bool:
    """Whether a tag of the base table belongs to a checkpoint."""
    return _TAG.fullmatch(tag) is not None


class _Place(NamedTuple):
    """Where one checkpoint is stored."""

    name: str
    token: str

    @classmethod
    def new(cls, name: str) -> _Place:
        return cls(name, secrets.token_hex(8))

    @property
    def announcement(self) -> str:
        return f"{layout.CHECKPOINTS_DIR}/{self.name}.{self.token}.begun"

    @property
    def record(self) -> str:
        return f"{layout.CHECKPOINTS_DIR}/{self.name}.{self.token}.json"

    @property
    def tag(self) -> str:
        return f"lancewal-{self.name}-{self.token}"


@dataclass(frozen=True)
class _Stored:
    """What a listing shows of one checkpoint; what is half dropped or void is ``is_over``."""

    place: _Place
    announced: ObjectInfo | None
    recorded: ObjectInfo | None

    @property
    def is_over(self) -> bool:
        return self.announced is None


@dataclass(frozen=True)
class _Record:
    """The content of a record; ``state`` is ``None`` in a void one."""

    state: TableState | None
    keep: timedelta | None = None

    def encode(self) -> bytes:
        # What only this call writes, for put_if_absent.
        content: dict[str, Any] = {"format": _FORMAT, "write_id": secrets.token_hex(8)}
        if self.state is None:
            return encode_record({**content, "void": True})
        return encode_record(
            {
                **content,
                "void": False,
                "keep": None if self.keep is None else self.keep.total_seconds(),
                "version": self.state.version,
                "checksum": self.state.checksum,
                "shards": [
                    {
                        "wal_end": place.wal_end,
                        "manifest": b64encode(encode_manifest(place.manifest)).decode(),
                    }
                    for place in self.state.shards
                ],
            }
        )

    @classmethod
    def decode(cls, data: bytes, path: str, uri: str) -> _Record:
        with reading_record(path):
            found = decode_record(data, must_have_checksum=True)
            if found["format"] != _FORMAT:
                raise StorageError(
                    f"the record {path!r} was written by a newer lancewal; read it with that one"
                )
            if found["void"]:
                return cls(None)
            shards = tuple(_decoded_place(each) for each in found["shards"])
            state = TableState(uri, int(found["version"]), shards, int(found["checksum"]))
            keep = found["keep"]
            return cls(state, None if keep is None else timedelta(seconds=keep))

    def shown(self, stored: _Stored) -> Checkpoint:
        """The checkpoint of this record."""
        assert stored.announced is not None
        assert self.state is not None
        created = stored.announced.modified
        expires = None if self.keep is None else created + self.keep
        return Checkpoint(stored.place.name, created, self.state.version, expires)


def _decoded_place(found: dict[str, Any]) -> ShardPlace:
    try:
        manifest = decode_manifest(b64decode(found["manifest"], validate=True))
    except (binascii.Error, LanceWalError) as error:
        raise ValueError(str(error)) from error
    return ShardPlace(manifest, int(found["wal_end"]))


def create_checkpoint(store: ObjectStore, name: str, *, keep: timedelta | None = None) -> Checkpoint:
    """Make a checkpoint of the newest durable state; see :meth:`lancewal.Table.checkpoint`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"{name!r} cannot be the name of a checkpoint: use up to 100 letters, digits, '-', '_' and "
            "single dots, and begin with a letter or digit"
        )
    if keep is not None and (not isinstance(keep, timedelta) or not timedelta(0) < keep <= _LONGEST):
        raise InvalidInputError(
            f"keep must be a timedelta above zero and up to {_LONGEST.days} days, or None for as long as "
            f"wanted, not {keep!r}"
        )
    place = _Place.new(name)
    store.put(place.announcement, b"")
    try:
        _refuse_taken(store, place)
        crash_point("checkpoint: announced")
        state = _tagged_state(store, place)
        sync_file_system(store)  # Lance does not sync its tag
        crash_point("checkpoint: tagged")
        record = _Record(state, keep)
        outcome = store.put_if_absent(place.record, record.encode())
        crash_point("checkpoint: recorded")
        announced = store.head(place.announcement)
        if outcome is PutOutcome.EXISTS or announced is None:
            raise ConflictError(
                f"the checkpoint {name!r} was dropped, or taken for abandoned, while it was made; "
                "make it again"
            )
        return record.shown(_Stored(place, announced, None))
    except BaseException:
        _withdraw(store, place)
        raise


def _refuse_taken(store: ObjectStore, place: _Place) -> None:
    """Refuse a name that another checkpoint has. Of two makers at a time at least one sees the other."""
    for other in _stored(store):
        if other.place.name != place.name or other.place.token == place.token or other.is_over:
            continue
        if other.recorded is None:
            raise ConflictError(
                f"another process is making the checkpoint {place.name!r}; if it died, drop the checkpoint"
            )
        raise InvalidInputError(
            f"there is a checkpoint {place.name!r} already; drop it, or choose another name"
        )


def _tagged_state(store: ObjectStore, place: _Place) -> TableState:
    """The newest state, whose base version is tagged and was the newest one even then."""
    reader = StateReader(store, live_writers=False)
    is_tagged = False
    for _ in range(_ATTEMPTS):
        state, base = reader.state(), reader.known_base().base
        assert base.version == state.version  # nobody else has the reader
        crash_point("checkpoint: the state is read")
        with lance_errors(f"tag version {state.version} of {store.uri}"):
            try:
                change = base.dataset.tags.update if is_tagged else base.dataset.tags.create
                change(place.tag, state.version)
                is_tagged = True
            except ValueError as error:
                if not _is_missing(error):
                    raise
                continue  # cleaned up meanwhile: there is a newer one
        crash_point("checkpoint: a version is tagged")
        if reader.base().version == state.version:
            return replace(state, shards=tuple(_pending(store, base, each) for each in state.shards))
    raise ConflictError(
        f"the base table at {store.uri} was committed to {_ATTEMPTS} times while the checkpoint "
        f"{place.name!r} was made; make it again when less is going on"
    )


def _pending(store: ObjectStore, base: BaseTable, place: ShardPlace) -> ShardPlace:
    """``place`` without the SSTables that the base holds, and without what only this process has."""
    held = held_generation(base, store, place.manifest)
    pending = tuple(entry for entry in place.manifest.sstables if entry.generation > held)
    return ShardPlace(replace(place.manifest, sstables=pending), place.wal_end)


def _withdraw(store: ObjectStore, place: _Place) -> None:
    """Take back what was not finished; what cannot be reached now, collections take back later."""
    try:
        _remove(store, place)
    except LanceWalError as error:
        logger.warning("what was made of the checkpoint %s is still there: %s", place.name, error)


def _remove(store: ObjectStore, place: _Place, dataset: lance.LanceDataset | None = None) -> None:
    """Tag, announcement, record, in this order."""
    if dataset is None:
        dataset = open_base(store).dataset
    with lance_errors(f"drop the tag of the checkpoint {place.name!r}"):
        try:
            dataset.tags.delete(place.tag)
        except ValueError as error:
            if not _is_missing(error):
                raise
    crash_point("checkpoint: untagged")
    store.delete(place.announcement)
    crash_point("checkpoint: not announced")
    store.delete(place.record)


def _is_missing(error: ValueError) -> bool:
    """Whether Lance says that a tag, or the version for it, does not exist."""
    return "not found" in str(error) or "does not exist" in str(error)


def drop_checkpoint(store: ObjectStore, name: str) -> None:
    """Drop a checkpoint, damaged ones too; refuses a name that there is none of."""
    found = [each for each in _stored(store) if each.place.name == name and not each.is_over]
    if not found:
        raise _unknown(store, name)
    for each in found:
        _remove(store, each.place)


def drop_checkpoint_tags(dataset: lance.LanceDataset) -> None:
    """Drop the tags of all checkpoints, also of those that are half made or half dropped."""
    with lance_errors("drop the tags of checkpoints"):
        for tag in filter(is_checkpoint_tag, tagged_versions(dataset)):
            dataset.tags.delete(tag)


def list_checkpoints(store: ObjectStore) -> list[Checkpoint]:
    """All checkpoints, oldest first; those that cannot be read say why."""
    return [checkpoint for checkpoint, _ in read_checkpoints(store)]


def read_checkpoints(store: ObjectStore) -> list[tuple[Checkpoint, TableState | None]]:
    """As :func:`list_checkpoints`, each with the state that it names; ``None`` where it cannot be read."""

    def shown(stored: _Stored) -> tuple[Checkpoint, TableState | None] | None:
        assert stored.announced is not None
        try:
            record = _read(store, stored.place)
        except StorageError as error:
            return Checkpoint(stored.place.name, stored.announced.modified, None, problem=str(error)), None
        return None if record is None or record.state is None else (record.shown(stored), record.state)

    finished = [each for each in _stored(store) if not each.is_over and each.recorded is not None]
    found = ordered_map(shown, finished, 1 if store.is_local else _REMOTE_READERS)
    return sorted(
        (each for each in found if each is not None), key=lambda each: (each[0].created, each[0].name)
    )


def checkpoint_state(store: ObjectStore, name: str) -> TableState:
    """The state that a checkpoint names; :class:`StorageError` where its record is damaged."""
    for each in _stored(store):
        if each.place.name == name and not each.is_over and each.recorded is not None:
            record = _read(store, each.place)
            if record is not None and record.state is not None:
                return record.state
    raise _unknown(store, name)


def _unknown(store: ObjectStore, name: str) -> InvalidInputError:
    known = sorted({each.place.name for each in _stored(store) if each.recorded and not each.is_over})
    there = f"its checkpoints are {', '.join(known)}" if known else "it has none"
    return InvalidInputError(f"the table at {store.uri} has no checkpoint {name!r}; {there}")


def _read(store: ObjectStore, place: _Place) -> _Record | None:
    """The record; ``None`` when it is gone."""
    try:
        return _Record.decode(store.get(place.record), place.record, store.uri)
    except FileNotFoundError:
        return None


def _stored(store: ObjectStore) -> list[_Stored]:
    """All that is stored of checkpoints."""
    files: dict[_Place, dict[str, ObjectInfo]] = defaultdict(dict)
    for info in store.list(layout.CHECKPOINTS_DIR):
        match = _FILE.fullmatch(info.path.removeprefix(f"{layout.CHECKPOINTS_DIR}/"))
        if match is None:
            logger.warning("%s is no file of a checkpoint", info.path)
        else:
            files[_Place(match[1], match[2])][match[3]] = info
    return [_Stored(place, each.get("begun"), each.get("json")) for place, each in files.items()]


@dataclass
class NeededFiles:
    """What a collection has to leave to checkpoints."""

    #: Why all rows of all shards stay; ``None`` where it is known what is needed.
    everything: str | None = None
    _sstables: dict[tuple[UUID, str], str] = field(default_factory=dict)
    _entries: dict[UUID, list[tuple[range, str]]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def read(cls, store: ObjectStore, now: datetime, *, dry_run: bool) -> NeededFiles:
        """What those need that are there now, and drop those that are over, unless it is a dry run.

        Called after the state was read that says what is garbage.
        """
        found = cls()
        keeper = _Keeper(store, now, dry_run)
        for record in ordered_map(keeper.needed, _stored(store), 1 if store.is_local else _REMOTE_READERS):
            if isinstance(record, str):
                found.everything = record
            elif record is not None:
                found._add(*record)
        return found

    def _add(self, name: str, state: TableState) -> None:
        reason = f"the checkpoint {name!r} needs it"
        for place in state.shards:
            self._entries[place.shard_id].append((place.wal_range, reason))
            for entry in place.manifest.sstables:
                self._sstables[place.shard_id, entry.path] = reason

    def needs_entry(self, shard_id: UUID, position: int) -> str | None:
        """Why a WAL entry has to stay; ``None`` when it need not."""
        if self.everything is not None:
            return self.everything
        needed: Sequence[tuple[range, str]] = self._entries.get(shard_id, ())
        return next((reason for positions, reason in needed if position in positions), None)

    def needs_sstable(self, shard_id: UUID, name: str) -> str | None:
        """Why an SSTable has to stay; ``None`` when it need not."""
        return self.everything or self._sstables.get((shard_id, name))


@dataclass(frozen=True)
class _Keeper:
    """What one collection does about each checkpoint."""

    store: ObjectStore
    now: datetime
    dry_run: bool

    def needed(self, stored: _Stored) -> tuple[str, TableState] | str | None:
        """Name and state of a checkpoint that needs files; why everything has to stay; or ``None``."""
        place, announced = stored.place, stored.announced
        if announced is None:
            self._remove(place)
            return None
        name = place.name
        if stored.recorded is None and self.now - announced.modified < _ANNOUNCED_FOR:
            return f"the checkpoint {name!r} is being made"
        try:
            record = self._revoked(place) if stored.recorded is None else _read(self.store, place)
        except StorageError as error:
            logger.warning("nothing is collected, nobody knows what a checkpoint needs: %s", error)
            return f"the checkpoint {name!r} cannot be read, drop it to go on ({error})"
        if record is None:
            return None  # dropped meanwhile
        is_expired = record.keep is not None and self.now - announced.modified >= record.keep
        if record.state is None or is_expired:
            self._remove(place)
            return None
        return name, record.state

    def _revoked(self, place: _Place) -> _Record:
        """The record of a checkpoint whose maker has not finished it: a void one, unless it has by now."""
        void = _Record(None)
        if self.dry_run or self.store.put_if_absent(place.record, void.encode()) is PutOutcome.CREATED:
            return void
        return _read(self.store, place) or void

    def _remove(self, place: _Place) -> None:
        if not self.dry_run:
            logger.info("the checkpoint %s is over", place.name)
            _remove(self.store, place)
