"""UpkeepSettings: the limits within which upkeep keeps a table, and the record that stores them.

The record is in lancewal's own directory. Lance ignores it, and backups include it. The last write wins.
A table without a record has the defaults.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lancewal.errors import InvalidInputError
from lancewal.format import decode_record, encode_record
from lancewal.storage import MIN_DELETION_AGE, ObjectStore, layout

logger = logging.getLogger(__name__)

_MB = 1 << 20
_LONGEST = timedelta(days=36_500)


@dataclass(frozen=True)
class UpkeepSettings:
    """The limits within which upkeep keeps a table. Work is due when a limit is exceeded.

    For each shard:

    ``max_sstables``
        SSTables that the base table does not hold yet. Each of them makes every read a little slower.
    ``max_uncompacted_bytes``, ``max_uncompacted_age``
        The size of their rows in memory, and the age of the oldest. Plain Lance does not see these rows until
        they are compacted.
    ``max_unflushed_bytes``, ``max_unflushed_age``
        The size and age of a log that nobody flushes because its writer is gone. Live writers flush by
        themselves (``max_memtable_size`` and ``max_memtable_age`` of :class:`lancewal.ShardWriterConfig`).

    For the base table:

    ``max_index_lag``
        Rows that an index does not cover. Compaction brings indexes up to date; this limit is for rows that
        were written to the base table directly.
    ``max_small_files``
        Files with fewer than 65,536 rows.
    ``version_age``
        How long old versions without a tag are kept; at least ten minutes.

    ``garbage_age``
        How long files that nobody needs any more are kept, like ``min_age`` of ``Table.gc``. Files that a
        stalled writer could still depend on are kept for at least ten minutes.
    ``max_garbage_bytes``
        Above this size, garbage is kept for ten minutes only, so that a busy table does not fill its disk
        within ``garbage_age``. ``None``, the default, means no limit: readers, and followers of the log, may
        rely on ``garbage_age``. Files that checkpoints need do not count.
    ``interval``
        How often upkeep checks whether work is due.
    ``max_share``
        The share of the time that upkeep may work, above 0 and up to 1. At 0.5 it rests for a second after
        each second of work.

    >>> UpkeepSettings(max_sstables=8).max_sstables
    8
    """

    max_sstables: int = 4
    max_uncompacted_bytes: int = 512 * _MB
    max_uncompacted_age: timedelta = timedelta(minutes=15)
    max_unflushed_bytes: int = 256 * _MB
    max_unflushed_age: timedelta = timedelta(minutes=10)
    max_index_lag: int = 10_000
    max_small_files: int = 32
    garbage_age: timedelta = timedelta(days=1)
    max_garbage_bytes: int | None = None
    version_age: timedelta = timedelta(days=7)
    interval: timedelta = timedelta(seconds=10)
    max_share: float = 0.5

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            _check(each.name, getattr(self, each.name))

    @classmethod
    def of(cls, given: UpkeepSettings | Mapping[str, Any] | None) -> UpkeepSettings:
        """The settings that a caller gave: all of them, some by name, or none (the defaults)."""
        if given is None or isinstance(given, UpkeepSettings):
            return given or cls()
        if not isinstance(given, Mapping):
            raise InvalidInputError(
                f"upkeep settings are an UpkeepSettings or a mapping of some of them, not {given!r}"
            )
        return cls().changed(given)

    def changed(self, changes: Mapping[str, Any]) -> UpkeepSettings:
        """These settings with some of them replaced."""
        known = [each.name for each in dataclasses.fields(self)]
        unknown = sorted(set(changes) - set(known))
        if unknown:
            raise InvalidInputError(
                f"there is no upkeep setting {', '.join(unknown)}; there are {', '.join(known)}"
            )
        return dataclasses.replace(self, **changes)

    def kept_for(self, garbage_bytes: int) -> timedelta:
        """How long garbage is kept if there are ``garbage_bytes`` of it.

        >>> UpkeepSettings(max_garbage_bytes=1000).kept_for(1001)
        datetime.timedelta(seconds=600)
        """
        most = self.max_garbage_bytes
        too_much = most is not None and garbage_bytes > most
        return min(self.garbage_age, MIN_DELETION_AGE) if too_much else self.garbage_age

    def to_dict(self) -> dict[str, Any]:
        """The settings as they are stored and printed, with ages in seconds.

        >>> UpkeepSettings().to_dict()["garbage_age"]
        86400.0
        """
        return {
            each.name: value.total_seconds() if isinstance(value, timedelta) else value
            for each in dataclasses.fields(self)
            for value in [getattr(self, each.name)]
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> UpkeepSettings:
        """The inverse of :meth:`to_dict`; ignores settings that a later release has added."""
        defaults, found = cls(), dict[str, Any]()
        for each in dataclasses.fields(cls):
            if each.name in stored:
                value = stored[each.name]
                is_age = isinstance(getattr(defaults, each.name), timedelta)
                found[each.name] = timedelta(seconds=float(value)) if is_age else value
        return cls(**found)


def read_upkeep_settings(store: ObjectStore) -> UpkeepSettings:
    """The table's settings; the defaults if none are stored or the record cannot be read."""
    try:
        data = store.get(layout.UPKEEP_SETTINGS)
    except FileNotFoundError:
        return UpkeepSettings()
    try:
        return UpkeepSettings.from_dict(decode_record(data, must_have_checksum=True))
    except (ValueError, TypeError, OverflowError, InvalidInputError) as error:
        # No rows depend on the settings, and a table with a damaged record still needs upkeep.
        logger.warning("the upkeep settings of %s are damaged; the defaults count: %s", store.uri, error)
        return UpkeepSettings()


def store_upkeep_settings(store: ObjectStore, settings: UpkeepSettings) -> None:
    store.put(layout.UPKEEP_SETTINGS, encode_record(settings.to_dict()), durable=True)


def _check(name: str, value: object) -> None:
    default = next(each.default for each in dataclasses.fields(UpkeepSettings) if each.name == name)
    if isinstance(default, timedelta):
        least = MIN_DELETION_AGE if name == "version_age" else timedelta(0)
        if not isinstance(value, timedelta):
            raise InvalidInputError(f"{name} must be a timedelta, got {value!r}")
        if not least <= value <= _LONGEST or (name == "interval" and not value):
            raise InvalidInputError(
                f"{name} must be {'above zero' if name == 'interval' else f'at least {least}'} "
                f"and at most {_LONGEST.days} days, got {value}"
            )
    elif isinstance(default, float):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise InvalidInputError(f"{name} must be above 0 and at most 1, got {value!r}")
    elif default is None and value is None:
        return
    elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInputError(f"{name} must be a whole number of at least 1, got {value!r}")
