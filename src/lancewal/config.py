"""ShardWriterConfig: every setting of a shard writer, its default, and its persisted form."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any

from lancewal.errors import InvalidInputError

logger = logging.getLogger(__name__)

MB = 1024 * 1024

#: Each probed version costs a request, and all of them are sent at once; more than this do not help.
MAX_SCAN_BATCH_SIZE = 1024
#: The longest interval that the operating system's clocks and waits can handle.
MAX_INTERVAL = timedelta(days=36_500)
_MAX_NUMBER = (1 << 63) - 1

_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True)
class ShardWriterConfig:
    """How a shard writer trades latency, memory and durability.

    Settings that change behaviour:

    ``durable_write``
        ``put`` returns once its rows are in the WAL. When off, ``put`` returns as soon as they
        are in memory; ``WriteResult.durable`` waits later, and a crash may lose the rows
        of the last flush interval.
    ``fsync``
        On a local directory, sync every WAL entry, manifest and SSTable to disk, so that
        an acknowledged row survives a power cut and not only a crash. Costs a disk flush
        per group commit. Object stores are durable by themselves and ignore it.
    ``enable_memtable``
        Off is WAL-only mode: rows go to the log and nowhere else; no reads through the
        writer, no indexes, no flush.
    ``owner_lease``
        How long a process that stopped without closing its writers keeps its shards. Writers send three
        heartbeats in this time; see "Who writes" in the documentation.
    ``sync_indexed_write``
        Index rows in the put. When off, indexing is deferred, and searches scan the rows that are not
        indexed yet; results are the same.

    ``row_sums``
        A flush records a checksum of the rows that it writes, so that ``verify`` notices rows that are lost
        or doubled later. This takes some of a flush's time.

    Settings that change performance:

    ``max_wal_buffer_size``, ``max_wal_flush_interval``
        When rows that nobody waits for go to the WAL: after this many bytes, or this long after
        the first of them (``None``: by size alone). A group of waiting puts above this size
        is split into several entries.
    ``max_memtable_size``, ``max_memtable_rows``, ``max_memtable_batches``
        The MemTable is frozen and flushed when it reaches any of these limits; the size includes its indexes.
    ``max_memtable_age``
        The MemTable is also flushed when its oldest rows have been in it for this long (``None``: never), so
        that a trickle of rows does not stay in the log for ever.
    ``slowdown_sstables``
        Puts are delayed while a shard has more SSTables than this and is being compacted. The delay doubles
        with every further SSTable, up to 5 seconds.
    ``stop_sstables``, ``stop_timeout``
        Puts wait while a shard has ``stop_sstables`` SSTables or more, whether it is being compacted or not.
        After ``stop_timeout`` they are refused with a :class:`~lancewal.errors.BusyError`. With
        ``stop_sstables`` of ``None`` they never wait for this.
    ``max_unflushed_memtable_bytes``
        Puts wait while frozen and active MemTables hold this much (in WAL-only mode: the
        queue of rows that are not in the log yet).
    ``backpressure_log_interval``
        How often a put that waits writes a message to the log.
    ``async_index_buffer_rows``, ``async_index_interval``
        With deferred indexing: index after this many rows, or after this long.
    ``manifest_scan_batch_size``
        How many manifest versions are probed at a time.
    ``stats_log_interval``
        The first put after this interval logs statistics; ``None`` is never.

    >>> ShardWriterConfig(max_memtable_size=8 * MB).to_defaults()["max_memtable_size"]
    '8388608'
    """

    durable_write: bool = True
    sync_indexed_write: bool = True
    max_wal_buffer_size: int = 10 * MB
    max_wal_flush_interval: timedelta | None = timedelta(milliseconds=100)
    max_memtable_size: int = 256 * MB
    max_memtable_rows: int = 100_000
    max_memtable_batches: int = 8_000
    max_memtable_age: timedelta | None = timedelta(minutes=5)
    slowdown_sstables: int = 20
    stop_sstables: int | None = None
    stop_timeout: timedelta = timedelta(seconds=30)
    manifest_scan_batch_size: int = 2
    max_unflushed_memtable_bytes: int = 1024 * MB
    backpressure_log_interval: timedelta = timedelta(seconds=30)
    async_index_buffer_rows: int = 10_000
    async_index_interval: timedelta = timedelta(seconds=1)
    stats_log_interval: timedelta | None = timedelta(seconds=60)
    enable_memtable: bool = True
    fsync: bool = True
    owner_lease: timedelta = timedelta(seconds=10)
    row_sums: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_kind(field.name, getattr(self, field.name))
        if self.enable_memtable and self.max_memtable_size > self.max_unflushed_memtable_bytes:
            raise InvalidInputError(
                f"max_memtable_size ({self.max_memtable_size}) is above max_unflushed_memtable_bytes "
                f"({self.max_unflushed_memtable_bytes}): puts would wait for a flush that never starts. "
                "Lower the first or raise the second."
            )

    def to_defaults(self) -> dict[str, str]:
        """The settings as a table persists them: durations in milliseconds as ``…_ms``.

        A number that is ``None`` is left out. A duration that is ``None`` is stored as ``none``, or as ``0``
        for ``stats_log_interval``, as Lance does it.
        """
        persisted = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, timedelta):
                persisted[f"{field.name}_ms"] = str(round(value / _MILLISECOND))
            elif isinstance(value, bool):
                persisted[field.name] = "true" if value else "false"
            elif value is not None:
                persisted[field.name] = str(value)
            elif field.name in _OPTIONAL:
                persisted[f"{field.name}_ms"] = "0" if field.name == "stats_log_interval" else "none"
        return persisted

    @classmethod
    def resolved(
        cls, given: ShardWriterConfig | None, persisted: Mapping[str, str], overrides: Mapping[str, Any]
    ) -> ShardWriterConfig:
        """Merge settings: ``overrides`` first, then ``given`` or the persisted ones, then the defaults."""
        if given is None:
            return cls.from_defaults(persisted, **overrides)
        if not isinstance(given, cls):
            raise InvalidInputError(
                f"writer settings are a ShardWriterConfig, not {given!r}; give single ones by name, as in "
                "durable_write=False"
            )
        unknown = sorted(set(overrides) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise InvalidInputError(f"unknown writer setting {', '.join(unknown)}")
        return dataclasses.replace(given, **overrides)

    @classmethod
    def from_defaults(cls, persisted: Mapping[str, str], **overrides: Any) -> ShardWriterConfig:
        """A configuration from a table's persisted settings; unknown keys are ignored.

        ``overrides`` win over persisted settings, and persisted settings win over the defaults. Overrides are
        checked. Persisted settings may come from other writers, which check less, and they cannot be changed
        any more. A persisted setting that is not valid is therefore brought within bounds or left out, with a
        warning in the log, so that the table stays writable.

        >>> ShardWriterConfig.from_defaults({"max_wal_flush_interval_ms": "5"}, fsync=False).fsync
        False
        >>> ShardWriterConfig.from_defaults({"max_memtable_size": "64MB"}).max_memtable_size == 64 * MB
        True
        """
        names = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(overrides) - names)
        if unknown:
            raise InvalidInputError(
                f"unknown writer setting {', '.join(unknown)}; known are {', '.join(sorted(names))}"
            )
        stored: dict[str, Any] = {}
        for name, key, text in _ours(persisted):
            if name in overrides:
                continue
            found = _read(name, text)
            if found is None:
                _warn_once(f"the table's writer default {key} is {text!r}; the built-in one is used instead")
                continue
            stored[name] = found.value
            if not found.exact:
                _warn_once(f"the table's writer default {key} is {text!r}; it is taken as {found.value}")
        values = {**stored, **overrides}
        sizes = ("max_memtable_size", "max_unflushed_memtable_bytes")
        if values.get("enable_memtable", cls.enable_memtable) and any(name in stored for name in sizes):
            size, room = (values.get(name, getattr(cls, name)) for name in sizes)
            if "max_memtable_size" not in overrides and isinstance(room, int) and size > room:
                _warn_once(
                    f"the table's writer defaults have max_memtable_size ({size}) above "
                    f"max_unflushed_memtable_bytes ({room}); {room} is taken for both"
                )
                values["max_memtable_size"] = room
        return cls(**values)

    @classmethod
    def check_defaults(cls, given: Mapping[str, str]) -> None:
        """Refuse persisted settings that :meth:`from_defaults` would change or leave out."""
        values: dict[str, Any] = {}
        for name, key, text in _ours(given):
            found = _read(name, text)
            if found is None or not found.exact:
                raise InvalidInputError(f"the writer default {key} is {text!r}, not {_expected(name)}")
            values[name] = found.value
        cls(**values)


_OPTIONAL = {"max_wal_flush_interval", "max_memtable_age", "stats_log_interval"}
#: Numbers that may be ``None``: no limit.
_OPTIONAL_NUMBERS = {"stop_sstables"}
_DURATIONS = {
    "backpressure_log_interval",
    "async_index_interval",
    "owner_lease",
    "stop_timeout",
    *_OPTIONAL,
}
_NEVER_ZERO = {"backpressure_log_interval", "max_memtable_age", "owner_lease"}
_FLAGS = {"durable_write", "sync_indexed_write", "enable_memtable", "fsync", "row_sums"}


def _check_kind(name: str, value: object) -> None:
    if name in _FLAGS:
        if not isinstance(value, bool):
            raise InvalidInputError(f"{name} must be True or False, got {value!r}")
    elif name in _DURATIONS:
        if value is None and name in _OPTIONAL:
            return
        if not isinstance(value, timedelta):
            raise InvalidInputError(f"{name} must be a timedelta, got {value!r}")
        if value < timedelta(0):
            raise InvalidInputError(f"{name} must not be negative, got {value}")
        if value == timedelta(0) and name in _NEVER_ZERO:
            raise InvalidInputError(f"{name} must be above zero")
        if value > MAX_INTERVAL:
            never = "; None is never" if name in _OPTIONAL else ""
            raise InvalidInputError(f"{name} must not be above {MAX_INTERVAL.days} days, got {value}{never}")
    elif value is None and name in _OPTIONAL_NUMBERS:
        return
    elif not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _maximum(name):
        raise InvalidInputError(f"{name} must be {_expected(name)}, got {value!r}")


@dataclass(frozen=True)
class _Read:
    """The meaning of a stored text; ``exact`` if lancewal would store it the same way."""

    value: Any
    exact: bool


_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_NUMBER = re.compile(r"([+-]?[0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([a-z]*)")
_BYTES = {"": 1, "k": 1024, "m": MB, "g": 1024 * MB, "t": 1024 * 1024 * MB}
_MILLISECONDS = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000}


def _ours(persisted: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Each persisted setting that lancewal knows: its name, the key under which it is stored, its text."""
    for field in dataclasses.fields(ShardWriterConfig):
        for key in (f"{field.name}_ms", field.name):
            if key in persisted:
                yield field.name, key, persisted[key]
                break


def _read(name: str, text: str) -> _Read | None:
    """The meaning of a stored text for a setting; ``None`` if it has none."""
    word = text.strip().lower()
    if name in _FLAGS:
        return _Read(word in _TRUE, text in ("true", "false")) if word in _TRUE + _FALSE else None
    if name in _OPTIONAL | _OPTIONAL_NUMBERS and word in ("none", "null", ""):
        return _Read(None, text == "none")
    match = _NUMBER.fullmatch(word)
    if match is None:
        return None
    amount, unit = Decimal(match[1]), match[2]
    if name not in _DURATIONS:
        scale = _BYTES.get(unit.removesuffix("b").removesuffix("i"))
        number = None if scale is None else min(max(int(amount * scale), 1), _maximum(name))
        return None if number is None else _Read(number, text == str(number))
    if unit not in _MILLISECONDS:
        return None
    least = 1 if name in _NEVER_ZERO else 0
    millis = min(max(int(amount * _MILLISECONDS[unit]), least), MAX_INTERVAL // _MILLISECOND)
    # Lance persists "0" for "never log".
    never = name == "stats_log_interval" and millis == 0
    return _Read(None if never else timedelta(milliseconds=millis), text == str(millis))


def _maximum(name: str) -> int:
    return MAX_SCAN_BATCH_SIZE if name == "manifest_scan_batch_size" else _MAX_NUMBER


def _expected(name: str) -> str:
    if name in _FLAGS:
        return "true or false"
    if name in _DURATIONS:
        return "a number of milliseconds"
    most = "" if _maximum(name) == _MAX_NUMBER else f" and at most {_maximum(name)}"
    return f"a whole number of at least 1{most}"


@lru_cache(maxsize=1024)
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
