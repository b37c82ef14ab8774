"""Parses the options of the data source. Spark passes their names in lower case."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.errors import InvalidInputError, StorageError
from lancewal.maintenance import checkpoint_state
from lancewal.reader import StateReader, TableState
from lancewal.service import TakeOver, checked_take_over
from lancewal.storage import ObjectStore, Shelf, layout

#: Every option, as users write it.
READ_OPTIONS = ("columns", "filter", "limit", "filterPushdown", "versionAsOf")
FEED_OPTIONS = (
    "readChangeFeed",
    "startingPosition",
    "endingPosition",
    "maxEntriesPerTrigger",
    "maxBytesPerTrigger",
    "shards",
    "changeTypes",
)
WRITE_OPTIONS = (
    "changeTypeColumn",
    "roundFloats",
    "txnAppId",
    "txnVersion",
    "stagingBytes",
    "walBytes",
    "takeOver",
)
CREATE_OPTIONS = (
    "createIfMissing",
    "primaryKey",
    "numBuckets",
    "bucketColumn",
    "identityColumn",
    "unsharded",
    "vectorDimensions",
)
#: For our own calls only; not part of the interface.
INTERNAL_OPTIONS = ("job", "jobArguments", "deletesFirst")

#: Options of other formats that are not supported here.
_NO_SUCH_TIME = (
    "the merged state of any past moment is not kept; read a checkpoint with versionAsOf=NAME, the base "
    "table alone at a version with lance.dataset(uri, version=…), or the changes since with readChangeFeed"
)
_REFUSED = {
    **dict.fromkeys(("version", "timestampasof"), _NO_SUCH_TIME),
    # Spark adds this option to the tables of its catalog.
    "owner": "a table of Spark's catalog loses its options; use CREATE TEMPORARY VIEW … USING lancewal",
}

_KNOWN = ("path", *READ_OPTIONS, *FEED_OPTIONS, *WRITE_OPTIONS, *CREATE_OPTIONS, *INTERNAL_OPTIONS)
#: Options that Spark itself adds, and that are ignored here.
_SPARKS_OWN = frozenset(["checkpointlocation", "querynamefortest", "queryname"])

STORAGE_PREFIX = "storage."
#: The prefix of the storage options of a backup job's destination; only our own calls set them.
BACKUP_PREFIX = "backup."
#: Storage options that are recognised without the prefix.
_STORAGE_NAMES = ("aws_", "azure_", "google_", "gcs_", "allow_http", "client_", "headers.")

EARLIEST = "earliest"
LATEST = "latest"
SNAPSHOT = "snapshot"
#: The key of the positions in an offset of the change feed.
POSITIONS = "positions"


def is_storage_option(name: str) -> bool:
    """Whether an option is for the storage, with or without the prefix."""
    return name.lower().startswith((STORAGE_PREFIX, *_STORAGE_NAMES))


@dataclass(frozen=True)
class Options:
    """The options that a user set. Stored by lower-case name, read by the name that users write."""

    # Not in the repr, because credentials are among the values.
    values: Mapping[str, str] = field(repr=False)

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Options:
        """Parse options; refuses unknown ones, because a misspelt option would silently do nothing."""
        known = {name.lower(): name for name in _KNOWN}
        values = {}
        for name, value in given.items():
            lowered = name.lower()
            if lowered in _REFUSED:
                raise InvalidInputError(f"option {name} is refused: {_REFUSED[lowered]}")
            is_for_backup = "job" in given and lowered.startswith(BACKUP_PREFIX)
            if lowered in known or is_for_backup:
                values[lowered] = value
            elif is_storage_option(name):
                values[lowered if lowered.startswith(STORAGE_PREFIX) else STORAGE_PREFIX + lowered] = value
            elif lowered not in _SPARKS_OWN:
                close = get_close_matches(lowered, known, n=1)
                hint = (
                    f"did you mean {known[close[0]]}?"
                    if close
                    else f"known are {', '.join(_KNOWN[: -len(INTERNAL_OPTIONS)])}"
                )
                raise InvalidInputError(
                    f"there is no option {name!r}; {hint} Storage options start with 'storage.'"
                )
        return cls(values)

    @classmethod
    def of(
        cls,
        uri: str,
        storage_options: Mapping[str, str] | None = None,
        others: Mapping[str, str] | None = None,
    ) -> Options:
        """The options of a function that has arguments for table and storage."""
        storage = {f"{STORAGE_PREFIX}{name}": value for name, value in (storage_options or {}).items()}
        return cls.parse({**(others or {}), **storage, "path": uri})

    @property
    def uri(self) -> str:
        path = self.text("path")
        if not path:
            raise InvalidInputError(
                "the table's place is missing; pass it to load(…), save(…), start(…) or as path"
            )
        return path

    @property
    def storage(self) -> dict[str, str]:
        return self._prefixed(STORAGE_PREFIX)

    @property
    def backup_storage(self) -> dict[str, str]:
        return self._prefixed(BACKUP_PREFIX)

    def _prefixed(self, prefix: str) -> dict[str, str]:
        found = {name: value for name, value in self.values.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): value for name, value in found.items()}

    @property
    def take_over(self) -> TakeOver:
        """When a write may take the shards of another process."""
        return checked_take_over(self.text("takeOver") or "when_gone")

    def without(self, name: str) -> Options:
        return Options({other: value for other, value in self.values.items() if other != name.lower()})

    def text(self, name: str) -> str | None:
        return self.values.get(name.lower())

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Refuse options that would silently do nothing here."""
        given = [name for name in names if self.text(name) is not None]
        if given:
            raise InvalidInputError(f"option {', '.join(given)} {reason}")

    def flag(self, name: str) -> bool:
        value = self.text(name)
        if value is None:
            return False
        if value.lower() not in ("true", "false"):
            raise InvalidInputError(f"option {name} must be true or false, not {value!r}")
        return value.lower() == "true"

    def number(self, name: str, *, least: int = 1) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        try:
            number = int(value)
        except ValueError:
            number = least - 1
        if number < least:
            raise InvalidInputError(
                f"option {name} must be a whole number of at least {least}, not {value!r}"
            )
        return number

    def names(self, name: str) -> list[str] | None:
        """Column names, separated by commas; names that contain commas are given as a JSON list."""
        value = self.text(name)
        if value is None:
            return None
        if value.lstrip().startswith("["):
            parsed = _json(name, value)
            if not isinstance(parsed, list) or not all(isinstance(each, str) for each in parsed):
                raise InvalidInputError(f"option {name} must be a list of names, not {value!r}")
            return parsed
        return [each.strip() for each in value.split(",") if each.strip()]

    def dimensions(self) -> dict[str, int]:
        """``vectorDimensions`` as ``column:number`` pairs, separated by commas."""
        found = {}
        for pair in self.names("vectorDimensions") or []:
            column, _, number = pair.rpartition(":")
            if not column or not number.strip().isdigit() or int(number) < 1:
                raise InvalidInputError(
                    f"option vectorDimensions has {pair!r}; write column:dimension, such as embedding:128"
                )
            found[column.strip()] = int(number)
        return found

    def position(self, name: str, default: str) -> str | dict[UUID, int]:
        """A place in the change feed: a word, or a JSON map from shard id to WAL position.

        The map may also be an offset as a query's progress shows it.
        """
        value = self.text(name) or default
        if value.lower() in (EARLIEST, LATEST, SNAPSHOT):
            return value.lower()
        place = _json(name, value)
        if isinstance(place, dict) and list(place) == [POSITIONS]:
            place = place[POSITIONS]
        return parse_positions(place, f"option {name}")


def parse_positions(stored: object, what: str) -> dict[UUID, int]:
    """Check a map from shard id to WAL position that was read from JSON."""
    if not isinstance(stored, dict):
        raise InvalidInputError(
            f"{what} must be {EARLIEST}, {LATEST}, {SNAPSHOT} or a JSON map from shard id to position"
        )
    positions = {}
    for shard, position in stored.items():
        is_number = isinstance(position, int) and not isinstance(position, bool)
        if not is_number or position < layout.FIRST_WAL_POSITION:
            raise InvalidInputError(f"{what} has position {position!r} for shard {shard}; they count from 1")
        try:
            positions[layout.parse_shard_id(shard)] = position
        except InvalidInputError as error:
            raise InvalidInputError(f"{what}: {error}") from None
    return positions


def _json(name: str, value: str) -> object:
    try:
        return json.loads(value)
    except ValueError as error:
        raise InvalidInputError(
            f"option {name} is neither a known word nor JSON: {value!r} ({error})"
        ) from None


@dataclass(frozen=True)
class OpenTable:
    """The newest version of a table, opened in a driver or a task, and its storage for writing."""

    base: BaseTable
    store: ObjectStore

    @classmethod
    def open(cls, options: Options) -> OpenTable:
        reading = ObjectStore.from_uri(options.uri, options.storage)
        base = BaseTable.open(reading.uri, options.storage, store=reading)
        return cls(base, base.writer_store())


def state_to_read(options: Options) -> TableState:
    """The state that a merged read shows: the newest one, or the checkpoint that ``versionAsOf`` names."""
    store = ObjectStore.from_uri(options.uri, options.storage)
    name = options.text("versionAsOf")
    if name is not None:
        return checkpoint_state(store, name)
    key = (store.uri, frozenset(options.storage.items()))
    new = StateReader(store, live_writers=False)
    reader = _readers.get_or_make(key, lambda: new, lambda _: _READER_BYTES)
    try:
        return reader.state()
    except StorageError:
        if reader is new:
            raise
        # The table may have been created again at the same place, so try a new reader.
        state = new.state()
        _readers.put(key, new, _READER_BYTES)
        return state


#: A worker of the driver plans many queries. A cached reader knows what has not changed since the last one.
_readers: Shelf[tuple[str, frozenset[tuple[str, str]]], StateReader] = Shelf()
#: An estimate of the memory that a reader's handles take.
_READER_BYTES = 1 << 20
