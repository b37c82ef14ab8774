"""The two modes of a writer: MemTables that are flushed to SSTables, or WAL only."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import pyarrow as pa

from lancewal.base import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.errors import InvalidInputError, LanceWalError, StorageError, WalCorruptError
from lancewal.format import WalEntry
from lancewal.index import IndexSpec, IndexStore
from lancewal.memtable import MemTable, MemTableView
from lancewal.shard import WalAppender
from lancewal.storage import ObjectStore, Worker, layout, row_memory
from lancewal.writer.backlog import Backlog
from lancewal.writer.flush import CLOSE_ATTEMPTS, FlushQueue
from lancewal.writer.group_commit import CommitLog, Put
from lancewal.writer.state import WriterState, WriteStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InMemoryMemTables:
    """All rows of a shard that are in memory; ``frozen`` has the newest generation last."""

    active: MemTableView
    frozen: list[MemTableView]


@dataclass(frozen=True)
class MemTableStats:
    """The size of the active MemTable, and of the frozen ones that wait for their flush."""

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


class MemTableMode:
    """One active MemTable, and the frozen ones that wait for their flush."""

    def __init__(
        self,
        config: ShardWriterConfig,
        base: BaseTable,
        indexes: Sequence[IndexSpec],
        store: ObjectStore,
        appender: WalAppender,
        log: CommitLog,
        state: WriterState,
        stats: WriteStats,
    ) -> None:
        # Guards the order of inserts; held for microseconds, never across I/O.
        self.lock = threading.Lock()
        self._config = config
        self._indexes = indexes
        self._log = log
        self._state = state
        self._stats = stats
        claimed = appender.claimed
        generation = claimed.current_generation if claimed else layout.FIRST_GENERATION
        self._active = MemTable(
            state.shard_id,
            base.schema,
            generation,
            IndexStore(indexes, base.schema),
            0,
            index_on_insert=config.sync_indexed_write,
        )
        #: How far compaction is behind.
        self.backlog = Backlog(config.slowdown_sstables, config.stop_sstables)
        if claimed is not None:
            self.backlog.note(claimed)
        self._flushes = FlushQueue(
            base,
            indexes,
            store,
            appender,
            log,
            state,
            stats,
            row_sums=config.row_sums,
            backlog=self.backlog,
            freeze_active=self.seal_active,
            after_flush=self._note_flushed,
        )
        self._memory = row_memory
        # When the active MemTable got its first rows.
        self._active_since = 0.0
        self._indexer = Worker(f"lancewal-index-{state.shard_id}", self._index_step)
        self._unindexed_since: float | None = None
        #: The value of ``unflushed_bytes`` after the last insert. Flushes may have lowered it since then.
        self.bytes_at_last_put = 0

    @property
    def unflushed_bytes(self) -> int:
        """Bytes of the active and all frozen MemTables."""
        frozen = self._flushes.frozen
        total = self._active.estimated_size
        return total + sum([memtable.estimated_size for memtable in list(frozen)]) if frozen else total

    @property
    def active_bytes(self) -> int:
        """Bytes of the active MemTable, whose flush has not begun."""
        return self._active.estimated_size if self._active.batch_count else 0

    @property
    def is_over(self) -> bool:
        """Whether the writer has failed: its rows are never flushed, and the log has them."""
        return self._state.ended.failure is not None

    def flush_soon(self) -> None:
        """Have the flush thread freeze and flush the active MemTable."""
        self._flushes.ask()

    def seal_if_old(self) -> None:
        """Freeze the active MemTable if its first rows are older than ``max_memtable_age``."""
        age = self._config.max_memtable_age
        with self.lock:
            waited = time.monotonic() - self._active_since if self._active.batch_count else 0.0
            if age is not None and waited >= age.total_seconds():
                self._seal()

    def _note_flushed(self) -> None:
        self._memory.flushed(self, self.unflushed_bytes)

    def make_room(self) -> None:
        """Make sure that a flush is running: without one, ``unflushed_bytes`` would never fall."""
        with self.lock:
            if not self._flushes.frozen:
                self._seal()

    def insert(self, put: Put) -> None:
        """Insert the rows of one put, and queue the put for the log."""
        with self.lock:
            self._state.check_usable()
            rows = put.rows
            if rows.unshaped is not None:
                rows = put.rows = rows.unshaped.shaped(rows.batches)
            others = self.unflushed_bytes
            if not self._active.takes(rows.num_rows, len(rows.batches), self._config):
                self._seal()
            active = self._active
            others -= active.estimated_size
            before = active.index_seconds
            if not active.batch_count:
                self._active_since = time.monotonic()
            try:
                active.insert(rows.batches, rows.num_bytes)
                # Set before the put is queued: backpressure counts the put as admitted only until then.
                self.bytes_at_last_put = others + active.estimated_size
                self._log.enqueue(put, active)
            except BaseException as error:
                self._end_between("a put", error)
                raise
            self._memory.hold(self, self.bytes_at_last_put)
            if self._indexes and self._config.sync_indexed_write:
                self._count_indexed(active.index_seconds - before, rows.num_rows)
            elif self._indexes:
                self._index_later(active)
            if not active.takes(1, 1, self._config):
                self._seal()

    def seal_active(self) -> None:
        """Freeze the active MemTable and queue it for flush; does nothing when it is empty."""
        with self.lock:
            self._seal()

    def _seal(self) -> None:
        """Freeze the active MemTable unless the writer has failed. Requires the lock."""
        # After a failure the active MemTable may hold only a part of a put, so it is never flushed.
        if self._state.ended.failure is None:
            self._freeze()

    def _freeze(self, *, start_flush: bool = True) -> None:
        frozen = self._active
        if frozen.batch_count == 0:
            return
        try:
            self._active = frozen.successor()
            self._flushes.add(frozen, start=start_flush)
        except BaseException as error:
            self._end_between("a freeze", error)
            raise
        logger.debug("froze generation %d", frozen.generation, extra=self._state.context)

    def _end_between(self, what: str, error: BaseException) -> None:
        """Fail the writer after ``error``: memory and log may differ. The next writer replays the log."""
        cause = StorageError(f"{what} was cut short by {error!r}; open a new writer")
        self._state.fail(cause, memory_ahead_of_log=True, ends_log=False)

    def replay(self, entry: WalEntry, batches: Sequence[pa.RecordBatch]) -> None:
        """Insert the rows of a WAL entry; called before the writer takes puts.

        This starts no flush: complete MemTables wait for :meth:`finish_replay` or :meth:`flush_replayed`. A
        later entry may turn out to be unreadable or of an older generation. If a MemTable were published
        before that, the next replay would skip that entry.
        """
        generation = entry.generation
        if generation is not None and generation < self._active.generation:
            raise WalCorruptError(
                entry.shard_id,
                entry.position,
                f"its generation {generation} comes after generation {self._active.generation}",
            )
        if generation is not None and generation > self._active.generation:
            self._freeze(start_flush=False)
        active = self._active
        active.insert(batches, sum(batch.nbytes for batch in batches))
        active.covered_wal_position = entry.position
        self._log.start_at(active.end_position)

    @property
    def active_generation(self) -> int:
        return self._active.generation

    def replay_needs_room(self) -> bool:
        """Whether replayed rows have reached a limit and should be flushed as soon as that is safe."""
        return (
            not self._active.takes(1, 1, self._config)
            or self.unflushed_bytes >= self._config.max_unflushed_memtable_bytes
        )

    def flush_replayed(self) -> None:
        """Publish what was replayed so far, so that replay stays within its memory limit."""
        self._seal()
        self._flushes.drain(CLOSE_ATTEMPTS)

    def finish_replay(self) -> None:
        """End the replay: all entries are read, so full and older MemTables may be flushed."""
        self.bytes_at_last_put = self.unflushed_bytes
        self._active_since = time.monotonic()
        self._memory.hold(self, self.bytes_at_last_put)
        if not self._active.takes(1, 1, self._config):
            self._seal()
        self._flushes.start()
        if self._indexes and not self._config.sync_indexed_write:
            self._index_later(self._active)

    def continue_at(self, generation: int) -> None:
        """Continue with a higher ``generation``. Requires that all rows are flushed and no put is running."""
        with self.lock:
            if self._active.batch_count:
                raise StorageError(f"generation {self._active.generation} has rows and cannot be passed over")
            self._active = self._active.successor(generation)

    def views(self) -> list[MemTableView]:
        tables = self.memtables()
        return [*tables.frozen, tables.active]

    def memtables(self) -> InMemoryMemTables:
        # Both are read under the lock that freezing requires: otherwise a MemTable that is frozen in
        # between could be missed.
        with self.lock:
            active, frozen = self._active, list(self._flushes.frozen)
            # With durable_write a reader must not see a row that a crash could undo.
            end = self._log.durable_position if self._config.durable_write else active.end_position
        return InMemoryMemTables(active.view(end), [memtable.view(end) for memtable in frozen])

    def memtable_stats(self) -> MemTableStats:
        with self.lock:
            active, frozen = self._active, list(self._flushes.frozen)
        batches, first = active.batch_count, active.first_position
        durable = min(max(self._log.durable_position - first, 0), batches)
        pending = list(active.batches[durable:batches])
        return MemTableStats(
            row_count=active.row_count,
            batch_count=batches,
            estimated_size=active.estimated_size,
            index_bytes=active.indexes.memory_bytes,
            generation=active.generation,
            max_buffered_batch_position=first + batches - 1 if batches else None,
            max_flushed_batch_position=first + durable - 1 if durable else None,
            pending_wal_start_batch_position=first + durable if pending else None,
            pending_wal_end_batch_position=first + batches if pending else None,
            pending_wal_batch_count=len(pending),
            pending_wal_row_count=sum(batch.num_rows for batch in pending),
            pending_wal_estimated_bytes=sum(batch.nbytes for batch in pending),
            frozen_count=len(frozen),
            frozen_bytes=sum(memtable.estimated_size for memtable in frozen),
        )

    def has_rows(self) -> bool:
        return self._active.batch_count > 0 or bool(self._flushes.frozen)

    def flush(self) -> None:
        """Freeze the active MemTable, and wait until it and all older ones are published."""
        self.seal_active()
        self._flushes.drain()

    def wait_for_flush_drain(self) -> None:
        self._flushes.drain()

    def finish(self) -> None:
        """Flush everything; raises if something could not be flushed."""
        self.seal_active()
        self._flushes.drain(CLOSE_ATTEMPTS)
        if self._active.batch_count:
            raise self._state.latched()

    def stop(self) -> None:
        """End background threads without flushing."""
        patience = self._state.patience()
        self._memory.release(self)
        self._indexer.stop(patience)
        self._flushes.stop(patience)

    def _index_later(self, active: MemTable) -> None:
        """Have deferred rows indexed: once there are enough of them, or after an interval."""
        unindexed = active.unindexed_rows
        if unindexed >= self._config.async_index_buffer_rows:
            self._indexer.kick_for_later()
        elif unindexed and self._unindexed_since is None:
            kicked = False
            self._unindexed_since = time.monotonic()
            try:
                kicked = self._indexer.kick_for_later()
            finally:
                if not kicked:
                    self._unindexed_since = None  # otherwise later rows would assume that it was kicked

    def _index_step(self) -> float | None:
        """Index the deferred rows, oldest MemTable first; frozen MemTables too, because they are readable."""
        with self.lock:
            tables = [*self._flushes.frozen, self._active]
        since = self._unindexed_since
        if since is not None and tables[-1].unindexed_rows < self._config.async_index_buffer_rows:
            left = since + self._config.async_index_interval.total_seconds() - time.monotonic()
            if left > 0:
                return left
        # Cleared first: rows that arrive from here on start the next interval.
        self._unindexed_since = None
        for memtable in tables:
            while memtable.unindexed_rows and not self._indexer.stopping:
                before = memtable.index_seconds
                rows = memtable.update_indexes(self._config.async_index_buffer_rows)
                self._count_indexed(memtable.index_seconds - before, rows)
        return None

    def _count_indexed(self, seconds: float, rows: int) -> None:
        self._stats.add(index_update_count=1, index_update_time=seconds, index_update_rows=rows)


class WalOnlyMode:
    """No MemTables: rows are only in the commit log's queue, bounded by ``max_unflushed_memtable_bytes``.

    A put that finds the queue full writes the queue itself, so it does not wait for another thread.
    """

    def __init__(self, log: CommitLog, state: WriterState) -> None:
        self.lock = threading.Lock()
        self._log = log
        self._state = state

    @property
    def unflushed_bytes(self) -> int:
        return self._log.pending_bytes

    bytes_at_last_put = unflushed_bytes
    backlog = Backlog(most=1)

    def seal_if_old(self) -> None:
        """Do nothing: there is no MemTable."""

    def make_room(self) -> None:
        try:
            self._log.commit_all()
        except LanceWalError:
            # The caught error is about the queued rows. The put that waits for room gets its own error.
            self._state.check_usable()
            raise

    def insert(self, put: Put) -> None:
        with self.lock:
            self._state.check_usable()
            if put.rows.unshaped is not None:
                put.rows = put.rows.unshaped.shaped(put.rows.batches)
            self._log.enqueue(put)

    def has_rows(self) -> bool:
        return False

    def finish(self) -> None:
        """Do nothing: the writer itself commits the log."""

    def stop(self) -> None:
        """Do nothing: there are no background threads."""

    def views(self) -> list[MemTableView]:
        self._refuse("scan")

    def memtables(self) -> InMemoryMemTables:
        self._refuse("in_memory_memtable_refs")

    def memtable_stats(self) -> MemTableStats:
        self._refuse("memtable_stats")

    def seal_active(self) -> None:
        self._refuse("force_seal_active")

    def flush(self) -> None:
        self._refuse("flush")

    def wait_for_flush_drain(self) -> None:
        self._refuse("wait_for_flush_drain")

    def continue_at(self, generation: int) -> None:
        self._refuse("continue_at")

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidInputError(
            f"{what} is not available in WAL-only mode, which has no MemTable; "
            "open the writer with enable_memtable=True, or read through Table.scan"
        )


WriteMode = MemTableMode | WalOnlyMode
