"""A load: how much is written to a table, by how many writers, and how often it is maintained."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from lancewal.config import ShardWriterConfig
from lancewal.errors import InvalidInputError

DAY = 86_400.0
#: A round trip to object storage in the same region, in seconds.
ROUND_TRIP = 0.030


@dataclass(frozen=True)
class Load:
    """What is written in a day, spread evenly over the day and over the shards.

    ``writers`` are processes or Spark executors with ``memory`` bytes each. A put of several rows has rows of
    as many shards as possible. A feed and a reader of one key poll every ``poll_seconds``. By default,
    compaction and garbage collection run as often as the documentation advises.

    >>> load = Load(shards=1000, bytes_per_day=1e12, writers=100)
    >>> round(load.rows_per_second), round(load.flushes_per_day)
    (11574, 125000)
    """

    shards: int = 8
    bytes_per_day: float = 10e9
    row_bytes: float = 1000.0
    rows_per_put: int = 1000
    writers: int = 1
    memory: float = 4e9
    poll_seconds: float = 5.0
    compact_seconds: float = 300.0
    gc_seconds: float = 3600.0
    config: ShardWriterConfig = field(default_factory=ShardWriterConfig)

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name != "config" and not 0 < value < float("inf"):
                raise InvalidInputError(f"{each.name} must be above zero, got {value}")

    @property
    def rows_per_second(self) -> float:
        return self.bytes_per_day / self.row_bytes / DAY

    @property
    def shards_of_a_put(self) -> int:
        return min(self.shards, self.rows_per_put)

    @property
    def puts_per_second_and_shard(self) -> float:
        """How many parts of puts a shard gets per second."""
        return self.rows_per_second / self.rows_per_put * self.shards_of_a_put / self.shards

    @property
    def entries_per_day(self) -> float:
        """WAL entries of all shards. Puts during one round trip share an entry, up to its size limit."""
        shared = min(self.puts_per_second_and_shard, 1 / ROUND_TRIP) * self.shards * DAY
        return max(shared, self.bytes_per_day / self.config.max_wal_buffer_size)

    @property
    def flushed_bytes(self) -> float:
        """How many bytes a MemTable holds when it is flushed: the lowest of its three limits."""
        config = self.config
        part = self.row_bytes * self.rows_per_put / self.shards_of_a_put
        return min(
            config.max_memtable_size,
            config.max_memtable_rows * self.row_bytes,
            config.max_memtable_batches * part,
        )

    @property
    def flushes_per_day(self) -> float:
        return self.bytes_per_day / self.flushed_bytes

    @property
    def compactions_per_day(self) -> float:
        """Compactions that find something to do."""
        return min(DAY / self.compact_seconds, self.flushes_per_day)

    @property
    def heartbeats_per_day(self) -> float:
        """Heartbeats of one writing process, three per lease; each renews its record and polls requests."""
        return 3 * DAY / self.config.owner_lease.total_seconds()

    @property
    def polls_per_day(self) -> float:
        return DAY / self.poll_seconds
