"""The two modes of a writer: MemTables that are flushed to SSTables, or the log and nothing else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import pyarrow as pa

from lancewal.config import ShardWriterConfig
from lancewal.errors import FencedError, InvalidInputError, LanceWalError, StorageError, WalCorruptError
from lancewal.format import SsTableEntry, WalEntry
from lancewal.memtable import MemTable, MemTableView
from lancewal.shard import ShardManifestStore
from lancewal.writer.flush import CLOSE_ATTEMPTS, FlushQueue, Worker
from lancewal.writer.group_commit import CommitLog
from lancewal.writer.intake import Rows
from lancewal.writer.shard_writer import InMemoryMemTables, MemTableStats
from lancewal.writer.state import Backpressure, WriterState
from lancewal.writer.stats import WriteStats

logger = logging.getLogger(__name__)

# Rows that nobody waits for reach the WAL by size or by time.


class WalFlushWorker:
    """Commits the log once it holds ``max_wal_buffer_size`` bytes, or its oldest row is old enough."""

    def __init__(self, config: ShardWriterConfig, log: CommitLog, state: WriterState) -> None:
        self._log = log
        self._state = state
        self._max_bytes = config.max_wal_buffer_size
        interval = config.max_wal_flush_interval
        self._interval = interval.total_seconds() if interval is not None else None
        self._waiting_since: float | None = None
        self._worker = Worker(f"lancewal-wal-{state.shard_id}", self._step)

    def nudge(self) -> None:
        """Called after rows were queued; cheap unless there is something to do."""
        if self._log.pending_bytes >= self._max_bytes:
            self._worker.kick()
        elif self._waiting_since is None and self._interval is not None:
            self._waiting_since = time.monotonic()
            try:
                self._worker.kick()
            except BaseException:
                self._waiting_since = None  # or later rows would take this one's kick for granted
                raise

    def stop(self, timeout: float | None = None) -> None:
        self._worker.stop(timeout)

    def _step(self) -> float | None:
        if self._state.failure is not None:
            return None
        since = self._waiting_since
        if self._log.pending_bytes < self._max_bytes and since is not None and self._interval is not None:
            left = since + self._interval - time.monotonic()
            if left > 0:
                return left
        # Cleared first: rows that are queued from here on start the next interval.
        self._waiting_since = None
        try:
            self._log.commit_all()
        except LanceWalError:
            # Latched in the log: the next put, wait or close raises it.
            logger.debug("timed WAL flush failed", exc_info=True)
        return None


# MemTable mode: rows are kept in memory, readable and indexed, and flushed to SSTables.


class MemTableMode:
    """One active MemTable, and the frozen ones behind it that wait for their flush."""

    def __init__(
        self,
        config: ShardWriterConfig,
        manifests: ShardManifestStore,
        log: CommitLog,
        state: WriterState,
        stats: WriteStats,
        *,
        make_memtable: Callable[[int, int], MemTable],
        write_sstable: Callable[[MemTable], SsTableEntry],
        generation: int,
    ) -> None:
        """``make_memtable`` takes a generation and the first batch position."""
        self.lock = threading.Lock()
        self._config = config
        self._log = log
        self._state = state
        self._stats = stats
        self._make_memtable = make_memtable
        self._active = make_memtable(generation, 0)
        self._flushes = FlushQueue(
            manifests,
            state.epoch,
            log,
            stats,
            write_sstable,
            on_progress=lambda: self.backpressure.wake(),
            on_fenced=self._fenced,
        )
        self.backpressure = Backpressure(
            config.max_unflushed_memtable_bytes,
            config.backpressure_log_interval.total_seconds(),
            stats,
            unflushed=self._unflushed_bytes,
            relieve=self._make_room,
            context=state.context,
        )
        state.when_ended(self.backpressure.wake)
        log.on_progress = self.backpressure.wake
        self._wal_flusher = WalFlushWorker(config, log, state)
        self._indexer = Worker(f"lancewal-index-{state.shard_id}", self._index_step)
        self._unindexed_since: float | None = None

    def insert(self, rows: Rows) -> range:
        if self._would_overflow(rows):
            self.seal_active()
        active = self._active
        try:
            positions = self._insert_indexed(active, rows)
            self._log.enqueue(rows.batches, rows.num_bytes, active.generation, active)
        except BaseException as error:
            self._end_between("a put", error)
            raise
        self._index_later(active)
        if not self._config.durable_write:
            # Durable rows are shown by the commit that stored them: a reader never sees
            # a row that a crash could take back.
            active.show(positions.stop)
        if self._is_full(active):
            self.seal_active()
        return positions

    def nudge(self) -> None:
        self._wal_flusher.nudge()

    def seal_active(self) -> None:
        # After a failure the active MemTable may hold a part of a put: it is never flushed.
        if self._state.failure is None:
            self._freeze()

    def _freeze(self, *, start_flush: bool = True) -> None:
        frozen = self._active
        if frozen.batch_count == 0:
            return
        try:
            self._active = self._make_memtable(frozen.generation + 1, frozen.end_position)
            self._flushes.add(frozen, start=start_flush)
        except BaseException as error:
            self._end_between("a freeze", error)
            raise
        logger.debug("froze generation %d", frozen.generation, extra=self._state.context)

    def _end_between(self, what: str, error: BaseException) -> None:
        """Memory and log may differ by now: what is in the log is replayed by the next writer."""
        cause = StorageError(f"{what} was cut short by {error!r}; open a new writer")
        self._state.fail(cause, memory_ahead_of_log=True)

    def replay(self, entry: WalEntry, batches: Sequence[pa.RecordBatch]) -> None:
        """Take the rows of a WAL entry; called before the writer is open to anybody.

        MemTables that are complete wait for :meth:`finish_replay`: were one published before
        a later entry turned out to be unreadable or of an older generation, the next replay
        would pass over that entry.
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
        active.note_durable(active.end_position, entry.position)
        self._log.start_at(active.end_position)

    @property
    def active_generation(self) -> int:
        return self._active.generation

    def replay_needs_room(self) -> bool:
        """Whether replayed rows have reached a limit and should be flushed where that is sound."""
        return (
            self._is_full(self._active)
            or self._unflushed_bytes() >= self._config.max_unflushed_memtable_bytes
        )

    def flush_replayed(self) -> None:
        """Publish what was replayed so far, so that replay stays within its memory."""
        self.seal_active()
        self._flushes.drain(CLOSE_ATTEMPTS)

    def finish_replay(self) -> None:
        """All entries were read: what is full or belongs to an older generation may be flushed."""
        if self._is_full(self._active):
            self.seal_active()
        self._flushes.start()
        self._index_later(self._active)

    def renumber(self, lift: Callable[[], int]) -> None:
        """Flush all that was replayed, then go on with the generation that ``lift`` gives.

        Called after replay, before the writer is open to anybody.
        """
        self.flush_replayed()
        self._active = self._make_memtable(lift(), self._active.first_position)

    def views(self) -> list[MemTableView]:
        tables = self.memtables()
        return [*tables.frozen, tables.active]

    def memtables(self) -> InMemoryMemTables:
        # Frozen before active would miss a table that is frozen in between, so both are
        # taken under the lock that freezing requires.
        with self.lock:
            active, frozen = self._active, self._flushes.frozen
        return InMemoryMemTables(active.view(), [memtable.view() for memtable in frozen])

    def memtable_stats(self) -> MemTableStats:
        with self.lock:
            active, frozen = self._active, self._flushes.frozen
        durable, batches = active.durable_batches, active.batch_count
        first = active.first_position
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

    def wait_for_flush_drain(self) -> None:
        self._flushes.drain()

    def finish(self) -> None:
        with self.lock:
            self.seal_active()
        self._flushes.drain(CLOSE_ATTEMPTS)
        if self._active.batch_count:
            raise self._state.latched()

    def stop(self) -> None:
        patience = self._state.patience()
        self._wal_flusher.stop(patience)
        self._indexer.stop(patience)
        self._flushes.stop(patience)

    def _insert_indexed(self, active: MemTable, rows: Rows) -> range:
        before = active.index_seconds
        positions = active.insert(rows.batches, rows.num_bytes)
        if active.indexes.specs and self._config.sync_indexed_write:
            self._stats.record_index_update(active.index_seconds - before, rows.num_rows)
        return positions

    def _index_later(self, active: MemTable) -> None:
        """See that rows whose indexing was deferred are indexed, by number or by time."""
        if self._config.sync_indexed_write:
            return
        unindexed = active.unindexed_rows
        if unindexed >= self._config.async_index_buffer_rows:
            self._indexer.kick()
        elif unindexed and self._unindexed_since is None:
            self._unindexed_since = time.monotonic()
            try:
                self._indexer.kick()
            except BaseException:
                self._unindexed_since = None  # or later rows would take this one's kick for granted
                raise

    def _index_step(self) -> float | None:
        """Index what has gathered, oldest MemTable first; frozen ones too while they are readable."""
        with self.lock:
            tables = [*self._flushes.frozen, self._active]
        since = self._unindexed_since
        if since is not None and tables[-1].unindexed_rows < self._config.async_index_buffer_rows:
            left = since + self._config.async_index_interval.total_seconds() - time.monotonic()
            if left > 0:
                return left
        # Cleared first: rows that come from here on start the next interval.
        self._unindexed_since = None
        for memtable in tables:
            while memtable.unindexed_rows and not self._indexer.stopping:
                before = memtable.index_seconds
                rows = memtable.update_indexes(self._config.async_index_buffer_rows)
                self._stats.record_index_update(memtable.index_seconds - before, rows)
        return None

    def _would_overflow(self, rows: Rows) -> bool:
        active = self._active
        return active.batch_count > 0 and (
            active.row_count + rows.num_rows > self._config.max_memtable_rows
            or active.batch_count + len(rows.batches) > self._config.max_memtable_batches
        )

    def _is_full(self, memtable: MemTable) -> bool:
        return (
            memtable.estimated_size >= self._config.max_memtable_size
            or memtable.row_count >= self._config.max_memtable_rows
            or memtable.batch_count >= self._config.max_memtable_batches
        )

    def _unflushed_bytes(self) -> int:
        return self._active.estimated_size + self._flushes.frozen_bytes

    def _make_room(self) -> None:
        """Requires nothing held. A flush must be under way, or the wait would never end."""
        self._state.check_usable()
        with self.lock:
            if not self._flushes.frozen:
                self.seal_active()

    def _fenced(self, error: FencedError) -> None:
        ahead = self._log.pending_batches > 0
        self._log.fail(error)
        self._state.fail(error, memory_ahead_of_log=ahead)


class WalOnlyMode:
    """The commit log's queue is all there is; its budget is ``max_unflushed_memtable_bytes``.

    A put that meets a full queue writes the queue itself, so nobody has to be waited for.
    """

    def __init__(
        self, config: ShardWriterConfig, log: CommitLog, state: WriterState, stats: WriteStats
    ) -> None:
        self.lock = threading.Lock()
        self._log = log
        self._state = state
        self._flusher = WalFlushWorker(config, log, state)
        self.backpressure = Backpressure(
            config.max_unflushed_memtable_bytes,
            config.backpressure_log_interval.total_seconds(),
            stats,
            unflushed=lambda: log.pending_bytes,
            relieve=self._write_queue,
            context=state.context,
        )
        state.when_ended(self.backpressure.wake)
        log.on_progress = self.backpressure.wake

    def insert(self, rows: Rows) -> range:
        return self._log.enqueue(rows.batches, rows.num_bytes)

    def nudge(self) -> None:
        self._flusher.nudge()

    def has_rows(self) -> bool:
        return False

    def finish(self) -> None:
        """Nothing beyond the log, which the writer commits itself."""

    def stop(self) -> None:
        self._flusher.stop(self._state.patience())

    def views(self) -> list[MemTableView]:
        self._refuse("scan")

    def memtables(self) -> InMemoryMemTables:
        self._refuse("in_memory_memtable_refs")

    def memtable_stats(self) -> MemTableStats:
        self._refuse("memtable_stats")

    def seal_active(self) -> None:
        self._refuse("force_seal_active")

    def wait_for_flush_drain(self) -> None:
        self._refuse("wait_for_flush_drain")

    def _write_queue(self) -> None:
        self._state.check_usable()
        self._log.commit_all()

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidInputError(
            f"{what} is not available in WAL-only mode, which has no MemTable; "
            "open the writer with enable_memtable=True, or read through Table.scan"
        )
