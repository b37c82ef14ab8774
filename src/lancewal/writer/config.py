"""ShardWriterConfig: every knob of a shard writer, its default, and the persisted form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lancewal.errors import InvalidInputError

MB = 1024 * 1024

_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True)
class ShardWriterConfig:
    """How a shard writer trades latency, memory and durability.

    What changes behaviour:

    ``durable_write``
        ``put`` returns once its rows are in the WAL. When off it returns as soon as they
        are in memory; ``WriteResult.durable`` waits later, and a crash may lose the rows
        of the last flush interval.
    ``fsync``
        On a local directory sync every WAL entry, manifest and SSTable to disk, so that
        an acknowledged row survives a power cut and not only a crash. Costs a disk flush
        per group commit. Object stores are durable by themselves and ignore it.
    ``enable_memtable``
        Off is WAL-only mode: rows go to the log and nowhere else; no reads through the
        writer, no indexes, no flush.
    ``sync_indexed_write``
        Index rows in the put. When off, indexing is deferred and searches go through the
        rows that are not indexed yet one by one; results are the same.

    What changes performance:

    ``max_wal_buffer_size``, ``max_wal_flush_interval``
        When rows that nobody waits for go to the WAL: after so many bytes, or so long
        after the first of them (``None``: by size alone). Also the size above which a
        group of waiting puts is split into several entries.
    ``max_memtable_size``, ``max_memtable_rows``, ``max_memtable_batches``
        The MemTable is frozen and flushed once it reaches any of them; bytes count rows
        and indexes.
    ``max_unflushed_memtable_bytes``
        Puts wait while frozen and active MemTables hold this much (in WAL-only mode: the
        queue of rows that are not in the log yet).
    ``backpressure_log_interval``
        A put that waits says so in the log this often.
    ``async_index_buffer_rows``, ``async_index_interval``
        With deferred indexing: index after so many rows, or so long.
    ``manifest_scan_batch_size``
        How many manifest versions are probed at a time.
    ``stats_log_interval``
        Statistics are logged by the first put after this long; ``None`` is never.

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
    manifest_scan_batch_size: int = 2
    max_unflushed_memtable_bytes: int = 1024 * MB
    backpressure_log_interval: timedelta = timedelta(seconds=30)
    async_index_buffer_rows: int = 10_000
    async_index_interval: timedelta = timedelta(seconds=1)
    stats_log_interval: timedelta | None = timedelta(seconds=60)
    enable_memtable: bool = True
    fsync: bool = True

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
        """The knobs as a table persists them; durations as ``…_ms``, an absent one left out."""
        persisted = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, timedelta):
                persisted[f"{field.name}_ms"] = str(round(value / _MILLISECOND))
            elif isinstance(value, bool):
                persisted[field.name] = "true" if value else "false"
            elif value is not None:
                persisted[field.name] = str(value)
            else:
                persisted[f"{field.name}_ms"] = "0" if field.name == "stats_log_interval" else "none"
        return persisted

    @classmethod
    def from_defaults(cls, persisted: Mapping[str, str], **overrides: Any) -> ShardWriterConfig:
        """A configuration from a table's persisted knobs; keys that are not ours are left alone.

        ``overrides`` win over what is persisted, and that over the built-in defaults.

        >>> ShardWriterConfig.from_defaults({"max_wal_flush_interval_ms": "5"}, fsync=False).fsync
        False
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(overrides) - set(known))
        if unknown:
            raise InvalidInputError(
                f"unknown writer setting {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        values: dict[str, Any] = {}
        for name, field in known.items():
            if name in overrides:
                values[name] = overrides[name]
            elif f"{name}_ms" in persisted:
                values[name] = _parse_duration(name, persisted[f"{name}_ms"])
            elif name in persisted:
                values[name] = _parse_scalar(name, persisted[name], field.default)
        return cls(**values)


_OPTIONAL = {"max_wal_flush_interval", "stats_log_interval"}
_DURATIONS = {"backpressure_log_interval", "async_index_interval", *_OPTIONAL}
_FLAGS = {"durable_write", "sync_indexed_write", "enable_memtable", "fsync"}


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
        if value == timedelta(0) and name == "backpressure_log_interval":
            raise InvalidInputError("backpressure_log_interval must be above zero")
    elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInputError(f"{name} must be a whole number of at least 1, got {value!r}")


def _parse_duration(name: str, text: str) -> timedelta | None:
    if text == "none" and name in _OPTIONAL:
        return None
    if not text.isdigit():
        raise InvalidInputError(f"the table's writer default {name}_ms is {text!r}, not a number")
    # Lance persists "0" for "never log".
    if name == "stats_log_interval" and text == "0":
        return None
    return timedelta(milliseconds=int(text))


def _parse_scalar(name: str, text: str, default: object) -> object:
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise InvalidInputError(f"the table's writer default {name} is {text!r}, not true or false")
        return text == "true"
    if not text.isdigit():
        raise InvalidInputError(f"the table's writer default {name} is {text!r}, not a number")
    return int(text)
