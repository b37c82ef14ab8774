"""UpkeepSettings: what a table that looks after itself stays within, and the record that keeps them.

The record lies in lancewal's own directory, where Lance ignores it and backups take it along. Whoever stores
last wins; a table without one has the defaults.
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
    """What upkeep keeps a table within; what is beyond it is due.

    For each shard:

    ``max_sstables``
        SSTables that the base table does not hold yet. Each of them makes every read a little slower.
    ``max_uncompacted_bytes``, ``max_uncompacted_age``
        Their rows in memory, and how long the oldest waits; plain Lance does not see them until then.
    ``max_unflushed_bytes``, ``max_unflushed_age``
        A log that nobody flushes, because its writer is gone. Writers that live flush by themselves
        (``max_memtable_size`` and ``max_memtable_age`` of :class:`lancewal.ShardWriterConfig`).

    For the base table:

    ``max_index_lag``
        Rows that an index does not cover. Compaction brings indexes up to date; this is for rows that came
        another way.
    ``max_small_files``
        Files with fewer than 65,536 rows.
    ``version_age``
        How long old versions are kept that have no tag; at least ten minutes.

    ``garbage_age``
        How long files are kept that nobody needs any more, as ``min_age`` of ``Table.gc``. Where a writer
        that stood still could lose rows, ten minutes count at least.
    ``max_garbage_bytes``
        Above this they are kept for ten minutes only, so that a busy table does not fill its disk within
        ``garbage_age``. ``None``, the default, is without a bound: readers, and followers of the log, may
        rely on the age. What checkpoints hold does not count.
    ``interval``
        How often somebody who keeps the table in shape looks whether something is due.
    ``max_share``
        The part of the time that it may work, from above 0 to 1: after a second of work at 0.5 it rests for
        another one.

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
        """Settings as a caller gave them: whole, single ones by name, or none."""
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
        """How long garbage stays where there is so much of it.

        >>> UpkeepSettings(max_garbage_bytes=1000).kept_for(1001)
        datetime.timedelta(seconds=600)
        """
        most = self.max_garbage_bytes
        too_much = most is not None and garbage_bytes > most
        return min(self.garbage_age, MIN_DELETION_AGE) if too_much else self.garbage_age

    def to_dict(self) -> dict[str, Any]:
        """As they are stored and printed: ages in seconds.

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
        """The inverse of :meth:`to_dict`; what a later release has added is left out."""
        defaults, found = cls(), dict[str, Any]()
        for each in dataclasses.fields(cls):
            if each.name in stored:
                value = stored[each.name]
                is_age = isinstance(getattr(defaults, each.name), timedelta)
                found[each.name] = timedelta(seconds=float(value)) if is_age else value
        return cls(**found)


def read_upkeep_settings(store: ObjectStore) -> UpkeepSettings:
    """What the table wants; the defaults where nothing is stored, or what is cannot be read."""
    try:
        data = store.get(layout.UPKEEP_SETTINGS)
    except FileNotFoundError:
        return UpkeepSettings()
    try:
        return UpkeepSettings.from_dict(decode_record(data, must_have_checksum=True))
    except (ValueError, TypeError, OverflowError, InvalidInputError) as error:
        # Nobody's rows depend on them, and a table that cannot say what it wants must still be kept.
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
