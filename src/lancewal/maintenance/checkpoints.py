"""Checkpoints: named states of a table that stay readable until they are dropped.

A checkpoint is the readers' snapshot as data (:mod:`lancewal.reader.state`). It holds the base version, and
for each shard where the WAL ended and the manifest, with the SSTables that this version does not hold. No
row is copied. The manifests are in the record itself, so old versions of them may be collected. The WAL
entries and SSTables have to stay (:class:`NeededFiles`). A Lance tag protects the base version from
Lance's ``cleanup_old_versions``.

**Two objects.** ``NAME.TOKEN.begun`` announces a checkpoint, ``NAME.TOKEN.json`` is its record. The token
is random, so that a stalled process never deletes a later checkpoint of the same name. A checkpoint
exists while *both* objects exist. To make it: ``.begun``, state, tag, ``.json``. To drop it: tag,
``.begun``, ``.json``. If a drop dies after the tag, the next drop repeats it. Once ``.begun`` is gone, what
is left is no longer a checkpoint.

**Why a collector deletes nothing that a finished checkpoint needs.** The collector reads the base version,
then the shards, *then* lists the checkpoints, then deletes. The maker announces, then reads the shards,
then the base.

- If the collector's base is older than the checkpoint's: generations that the collector calls compacted are
  compacted in the checkpoint's base too, because markers only grow, so the checkpoint does not need them.
  If its manifest is older than the checkpoint's: entries that the collector calls flushed are at or below
  the checkpoint's replay cursor too.
- Otherwise the collector read later than the maker, which had announced before. So the collector's listing
  shows ``.begun``. If there is a record, it keeps what the record names. If not, it keeps all rows of all
  shards.

This holds however long either of them is stopped, because it does not depend on a clock. ``.begun`` stays
while the checkpoint exists, because a listing of a local directory may miss a file that was created during
the listing, but not one that existed all the time.

**A maker that died** must not stop collection for good. An announcement without a record that is old
is *revoked*: the collector puts a void record in place of the record, if there is none. (The age is by the
storage's clock; if that is wrong, the maker has to try again, and nothing else happens.) Either the maker
or the collector creates the object. If the maker does, the collector reads the record. If the collector
does, the maker is refused, and the announcement is deleted. Then the void record is deleted too. A maker
that is even later finds no announcement after its put, and gives up. If it dies instead, it may leave a tag
that nothing belongs to; the next collection deletes it (:func:`drop_left_tags`).

**Lance's cleanup** never removes the newest version that it knows, nor tagged ones. After the maker has set
the tag, it checks whether its version is still the newest, and starts again if not. So a cleanup that did
not see the tag knew no newer version.

**Damage.** To open a record that cannot be read is an error. What the checkpoint needs is then unknown, so
collectors keep all rows of all shards until it is dropped.
"""

from __future__ import annotations

import binascii
import logging
import re
import secrets
import time
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import lance

from lancewal.base import BaseTable, lance_errors, open_base, tagged_versions
from lancewal.errors import ConflictError, InvalidInputError, LanceWalError, StorageError
from lancewal.format import decode_manifest, decode_record, encode_manifest, encode_record, reading_record
from lancewal.maintenance.commits import crash_point
from lancewal.reader import ShardPlace, StateReader, TableState
from lancewal.sstable import held_generation
from lancewal.storage import ObjectInfo, ObjectStore, PutOutcome, layout, ordered_map, sync_file_system

logger = logging.getLogger(__name__)

_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.)){0,99}")
_FILE = re.compile(r"(.+)\.([0-9a-f]{16})\.(begun|json)")
_TAG = re.compile(r"lancewal-.+-[0-9a-f]{16}")
#: How long an announcement stops collection, if its maker does not finish.
_ANNOUNCED_FOR = timedelta(hours=1)
#: Each attempt fails only if somebody committed to the base table in between.
_ATTEMPTS = 16
#: Seconds between looks at whether another maker of the same name has given way.
_LOOKS = (0.05, 0.1, 0.2, 0.4, 0.8)
_REMOTE_READERS = 16
#: Keeps expiry dates within the range of ``datetime``.
_LONGEST = timedelta(days=365_000)


@dataclass(frozen=True)
class Checkpoint:
    """A named state of a table, as ``table.checkpoints()`` lists it.

    ``version`` is the version of the base table. Times are by the storage's clock. The first garbage
    collection after ``expires`` drops the checkpoint; ``None`` means never. ``problem`` says why it cannot be
    read, and is ``None`` if it can.

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
        """The checkpoint as JSON values."""
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
    """The objects of one checkpoint in a listing; ``is_over`` if its announcement is gone."""

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
        # put_if_absent needs bytes that only this call writes.
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
    """Refuse a name that another checkpoint has.

    Of two concurrent makers, at least one sees the other. The one with the higher token gives way, and the
    other waits until it has: otherwise both could give way. It goes on only when it sees nobody else.
    """
    for pause in (*_LOOKS, None):
        others = [
            each
            for each in _stored(store)
            if each.place.name == place.name and each.place.token != place.token and not each.is_over
        ]
        if not others:
            return
        if any(each.recorded is not None for each in others):
            raise InvalidInputError(
                f"there is a checkpoint {place.name!r} already; drop it, or choose another name"
            )
        if pause is None or any(each.place.token < place.token for each in others):
            raise ConflictError(
                f"another process is making the checkpoint {place.name!r}; if it died, drop the checkpoint"
            )
        time.sleep(pause)


def _tagged_state(store: ObjectStore, place: _Place) -> TableState:
    """The newest state. Its base version is tagged, and was still the newest one after that."""
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
                continue  # the version was cleaned up meanwhile, so there is a newer one
        crash_point("checkpoint: a version is tagged")
        if reader.base().version == state.version:
            return replace(state, shards=tuple(_pending(store, base, each) for each in state.shards))
    raise ConflictError(
        f"the base table at {store.uri} was committed to {_ATTEMPTS} times while the checkpoint "
        f"{place.name!r} was made; make it again when less is going on"
    )


def _pending(store: ObjectStore, base: BaseTable, place: ShardPlace) -> ShardPlace:
    """``place`` without the SSTables that the base holds, and without rows that only this process has."""
    held = held_generation(base, store, place.manifest)
    pending = tuple(entry for entry in place.manifest.sstables if entry.generation > held)
    return ShardPlace(replace(place.manifest, sstables=pending), place.wal_end)


def _withdraw(store: ObjectStore, place: _Place) -> None:
    """Remove an unfinished checkpoint; if that fails now, garbage collection does it later."""
    try:
        _remove(store, place)
    except LanceWalError as error:
        logger.warning("what was made of the checkpoint %s is still there: %s", place.name, error)


def _remove(store: ObjectStore, place: _Place) -> None:
    """Delete the tag, the announcement and the record, in this order."""
    _drop_tag(open_base(store).dataset, place.tag)
    crash_point("checkpoint: untagged")
    store.delete(place.announcement)
    crash_point("checkpoint: not announced")
    store.delete(place.record)


def _drop_tag(dataset: lance.LanceDataset, tag: str) -> None:
    """Delete a tag, if it is there."""
    with lance_errors(f"drop the tag {tag!r} of a checkpoint"):
        try:
            dataset.tags.delete(tag)
        except ValueError as error:
            if not _is_missing(error):
                raise


def _is_missing(error: ValueError) -> bool:
    """Whether Lance says that a tag, or the version for it, does not exist."""
    return "not found" in str(error) or "does not exist" in str(error)


def drop_checkpoint(store: ObjectStore, name: str) -> None:
    """Drop a checkpoint, even a damaged one; refuses an unknown name."""
    found = [each for each in _stored(store) if each.place.name == name and not each.is_over]
    if not found:
        raise _unknown(store, name)
    for each in found:
        _remove(store, each.place)


def drop_checkpoint_tags(dataset: lance.LanceDataset) -> None:
    """Drop the tags of all checkpoints, including half made and half dropped ones."""
    with lance_errors("drop the tags of checkpoints"):
        for tag in filter(is_checkpoint_tag, tagged_versions(dataset)):
            dataset.tags.delete(tag)


def drop_left_tags(store: ObjectStore, dataset: lance.LanceDataset) -> None:
    """Drop the tags of checkpoints that are neither announced nor recorded.

    A maker that was taken for dead may tag a version after all, and then die. The checkpoints are listed
    after the tags, and each is announced before its tag is set. So a tag that the listing does not explain
    belongs to a maker that will find no announcement, and give up.
    """
    tags = [tag for tag in tagged_versions(dataset) if is_checkpoint_tag(tag)]
    if not tags:
        return
    explained = {each.place.tag for each in _stored(store)}
    for tag in tags:
        if tag not in explained:
            logger.info("the tag %s belongs to no checkpoint", tag)
            _drop_tag(dataset, tag)


def list_checkpoints(store: ObjectStore) -> list[Checkpoint]:
    """All checkpoints, oldest first; those that cannot be read have a ``problem``."""
    return [checkpoint for checkpoint, _ in read_checkpoints(store)]


def read_checkpoints(store: ObjectStore) -> list[tuple[Checkpoint, TableState | None]]:
    """Like :func:`list_checkpoints`, each with the state that it names; ``None`` if it cannot be read."""

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
    """The state that a checkpoint names; raises :class:`StorageError` if its record is damaged."""
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
    """The record; ``None`` if it is gone."""
    try:
        return _Record.decode(store.get(place.record), place.record, store.uri)
    except FileNotFoundError:
        return None


def _stored(store: ObjectStore) -> list[_Stored]:
    """All checkpoints in storage, including unfinished and half dropped ones."""
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
    """The files that a collection must keep for checkpoints."""

    #: Why all rows of all shards stay; ``None`` if it is known what is needed.
    everything: str | None = None
    _sstables: dict[tuple[UUID, str], str] = field(default_factory=dict)
    _entries: dict[UUID, list[tuple[range, str]]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def read(cls, store: ObjectStore, now: datetime, *, dry_run: bool) -> NeededFiles:
        """What the checkpoints need that exist now. Drops those that are over, except in a dry run.

        Must be called after the state that decides what is garbage was read.
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
        """Why a WAL entry has to stay; ``None`` if it need not."""
        if self.everything is not None:
            return self.everything
        needed: Sequence[tuple[range, str]] = self._entries.get(shard_id, ())
        return next((reason for positions, reason in needed if position in positions), None)

    def needs_sstable(self, shard_id: UUID, name: str) -> str | None:
        """Why an SSTable has to stay; ``None`` if it need not."""
        return self.everything or self._sstables.get((shard_id, name))


@dataclass(frozen=True)
class _Keeper:
    """What one collection does about each checkpoint."""

    store: ObjectStore
    now: datetime
    dry_run: bool

    def needed(self, stored: _Stored) -> tuple[str, TableState] | str | None:
        """The name and state of a checkpoint that needs files, or why everything has to stay, or ``None``."""
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
        """Revoke an unfinished checkpoint; returns a void record, or the maker's if it has one by now."""
        void = _Record(None)
        if self.dry_run or self.store.put_if_absent(place.record, void.encode()) is PutOutcome.CREATED:
            return void
        return _read(self.store, place) or void

    def _remove(self, place: _Place) -> None:
        if not self.dry_run:
            logger.info("the checkpoint %s is over", place.name)
            _remove(self.store, place)
