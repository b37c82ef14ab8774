"""Which limits a load reaches first, and what to change before it does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lancewal.cost.bill import per_day
from lancewal.cost.load import DAY, ROUND_TRIP, Load
from lancewal.cost.measured import measured
from lancewal.maintenance import DEFAULT_COMMIT_BYTES
from lancewal.shard import MAX_BUCKETS

#: Requests per second that S3 accepts for each prefix, before it has split the prefix.
PUTS_PER_SECOND, GETS_PER_SECOND = 3_500, 5_500
#: Names that one listing request returns.
PAGE = 1_000
#: Log entries of a shard. To list this many takes 100 requests, one after the other.
ENTRIES_KEPT = 100 * PAGE
#: SSTables that a read without cached handles can open within a second.
SSTABLES_OF_A_SHARD = 64
#: Versions of the base table. Each look at the table lists them.
VERSIONS_KEPT = 3 * PAGE
#: How fast a commit reads and writes, including all indexes.
COMMIT_BYTES_PER_SECOND = 50e6
#: The share of a process's memory for MemTables; the rest is for rows in transit and caches.
MEMTABLE_SHARE = 0.5


@dataclass(frozen=True)
class Limit:
    """A figure of the load, its upper limit, and what to do if it is higher."""

    name: str
    value: float
    most: float
    unit: str
    advice: str

    @property
    def share(self) -> float:
        """
        >>> Limit("shards", 512, 1024, "", "").share
        0.5
        """
        return self.value / self.most

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "value": self.value,
            "most": self.most,
            "share": self.share,
            "unit": self.unit,
            "advice": self.advice,
        }


def limits(load: Load) -> list[Limit]:
    """All limits, starting with the one that is reached first."""
    return sorted(_limits(load), key=lambda limit: -limit.share)


def _limits(load: Load) -> Iterator[Limit]:
    lines = per_day(load)
    day = load.bytes_per_day
    yield Limit(
        "PUT and LIST",
        _puts(load),
        PUTS_PER_SECOND,
        "a second",
        f"put {_rows(load, _puts, PUTS_PER_SECOND)}; S3 takes more once it has split a busy prefix",
    )
    gets = sum(line.gets for line in lines) / DAY
    yield Limit(
        "GET and HEAD",
        gets,
        GETS_PER_SECOND,
        "a second",
        f"let feeds and readers look every {_seconds(load.poll_seconds * gets / GETS_PER_SECOND)}",
    )
    yield Limit(
        "puts of one thread to a shard",
        load.puts_per_second_and_shard,
        1 / ROUND_TRIP,
        "a second",
        "put from several threads, which share log entries, or "
        + _rows(load, lambda each: each.puts_per_second_and_shard, 1 / ROUND_TRIP),
    )
    yield _memory(load)
    yield Limit(
        "writers",
        load.writers,
        load.shards,
        "",
        f"a shard has one writer: more than {load.shards:,} have nothing to do; take more shards",
    )
    yield Limit("shards of a table", load.shards, MAX_BUCKETS, "", "use several tables, or fewer shards")
    kept = _entries_kept(load)
    yield Limit(
        "log entries kept in a shard",
        kept,
        ENTRIES_KEPT,
        "",
        f"put {_rows(load, _entries_kept, ENTRIES_KEPT)}, "
        f"or collect with min_age={_age(DAY * ENTRIES_KEPT / kept)}",
    )
    waiting = load.flushes_per_day / load.shards * load.compact_seconds / DAY
    yield Limit(
        "SSTables that wait in a shard",
        waiting,
        SSTABLES_OF_A_SHARD,
        "",
        f"compact every {_seconds(load.compact_seconds * SSTABLES_OF_A_SHARD / max(waiting, 1e-9))}",
    )
    yield Limit(
        "versions of a shard's manifest",
        2 * load.flushes_per_day / load.shards + DAY / load.gc_seconds,
        PAGE,
        "a day",
        "raise max_memtable_size, max_memtable_rows or max_memtable_batches: flushes are too small",
    )
    commits = max(day / DEFAULT_COMMIT_BYTES, load.compactions_per_day)
    seconds = (
        measured()["compact 8 SSTables"].depth * ROUND_TRIP + DEFAULT_COMMIT_BYTES / COMMIT_BYTES_PER_SECOND
    )
    yield Limit(
        "commits to the base",
        commits / 24,
        3600 / seconds,
        "an hour",
        "split the rows over several tables: commits to one table come one after another",
    )
    yield Limit(
        "versions of the base",
        commits,
        VERSIONS_KEPT,
        "a day",
        f"cleanup_old_versions every {_seconds(DAY * VERSIONS_KEPT / commits)}, or compact less often",
    )


def _memory(load: Load) -> Limit:
    """The limit of memory: in each shard of a writer, one MemTable fills while another is flushed."""
    shards = math.ceil(load.shards / load.writers)
    room = load.memory * MEMTABLE_SHARE
    held = min(2 * load.flushed_bytes, load.config.max_unflushed_memtable_bytes)
    size = f"{math.floor(room / shards / 2 / 1e6):,} MB"
    return Limit(
        "MemTables of one writer",
        shards * held,
        room,
        "bytes",
        f"set max_memtable_size to {size}, or have more writers: one has {shards:,} shards",
    )


def _puts(load: Load) -> float:
    return sum(line.puts for line in per_day(load)) / DAY


def _entries_kept(load: Load) -> float:
    return load.entries_per_day / load.shards


def _rows(load: Load, figure: Callable[[Load], float], most: float) -> str:
    """How many rows a put needs so that a figure is low enough, if larger puts alone are enough."""
    rows = load.rows_per_put
    while figure(replace(load, rows_per_put=rows)) > most:
        rows *= 2
        if rows * load.row_bytes > load.config.max_wal_buffer_size * load.shards:
            return "more rows at a time"
    return f"{rows:,} rows at a time"


def _seconds(number: float) -> str:
    """
    >>> _seconds(0.4), _seconds(90), _seconds(7300)
    ('0.4 s', '1 min', '2 h')
    """
    if number < 60:
        return f"{number:.2g} s"
    # Rounded down, because maintenance that runs too often does no harm.
    return f"{number // 60:.0f} min" if number < 7200 else f"{number // 3600:.0f} h"


def _age(seconds: float) -> str:
    return f"timedelta(hours={max(seconds / 3600, 0.2):.2g})"
