"""What a writer hands out: write results, and looks at its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lancewal.memtable import MemTableView
from lancewal.writer.commit_log import CommitLog


class Durability:
    """Whether the rows of one put are in the WAL, and a way to make sure."""

    __slots__ = ("_end_position", "_log")

    def __init__(self, log: CommitLog, end_position: int) -> None:
        self._log = log
        self._end_position = end_position

    def done(self) -> bool:
        """Whether the rows are durable; does not wait."""
        return self._log.durable_position >= self._end_position

    def wait(self, timeout: float | None = None) -> bool:
        """Make the rows durable now; ``False`` when ``timeout`` seconds were not enough.

        Takes part in the group commit instead of waiting for the next timed flush. Raises
        the writer's error when the rows never will be durable.
        """
        return self._log.commit(self._end_position, timeout)


class WriteResult(NamedTuple):
    """``batch_positions`` count batches over the writer's life, replayed ones included."""

    batch_positions: range
    durable: Durability


@dataclass(frozen=True)
class InMemoryMemTables:
    """All rows of a shard that are in memory, newest generation last."""

    active: MemTableView
    frozen: list[MemTableView]


@dataclass(frozen=True)
class MemTableStats:
    """The active MemTable, and how much waits frozen behind it."""

    row_count: int
    batch_count: int
    estimated_size: int
    index_bytes: int
    generation: int
    max_buffered_batch_position: int | None
    max_flushed_batch_position: int | None
    pending_wal_start_batch_position: int | None
    pending_wal_end_batch_position: int | None
    pending_wal_batch_count: int
    pending_wal_row_count: int
    pending_wal_estimated_bytes: int
    frozen_count: int
    frozen_bytes: int


@dataclass(frozen=True)
class WalStats:
    """Where the next WAL entry goes (best knowledge), and what is not in the WAL yet."""

    next_wal_entry_position: int
    pending_batches: int
    pending_bytes: int
