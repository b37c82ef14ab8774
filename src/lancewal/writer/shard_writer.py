"""ShardWriter: puts and deletes into one shard, durable, readable at once, fenced.

``put`` checks its rows, waits for room, and adds the rows to the MemTable and the commit log
under one short lock. With ``durable_write`` it leads or joins a group commit, whose leader
adds the rows of all who joined. All that takes longer (flushing, deferred indexing and WAL
writes) happens beside it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import pyarrow as pa

from lancewal.config import ShardWriterConfig
from lancewal.errors import ClosedError, FencedError, LanceWalError
from lancewal.format import ShardManifest
from lancewal.memtable import MemTableView, scan_views
from lancewal.shard import WalAppender
from lancewal.storage import Room, check_process, is_forked
from lancewal.writer.group_commit import CommitLog
from lancewal.writer.intake import Adapter, Intake, Rows, as_batches
from lancewal.writer.state import Backpressure, WriterState
from lancewal.writer.stats import StatsLogger, WriteStats, WriteStatsSnapshot

logger = logging.getLogger(__name__)

# What a writer hands out: write results, and looks at its state.


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


#: Rows above this size are shaped in the caller's own thread: others, whose rows the same
#: leader takes in, should not wait while a large slice is copied.
_LARGE_PUT_BYTES = 256 * 1024


class WriteMode(Protocol):
    """Where accepted rows go besides the WAL: MemTables, or nowhere."""

    lock: threading.Lock
    backpressure: Backpressure

    def insert(self, rows: Rows) -> range:
        """Take the rows of one put, visible or to be so. Requires ``lock``."""

    def nudge(self) -> None:
        """Rows were queued that nobody waits for: see that they reach the WAL in time."""

    def seal_active(self) -> None:
        """Freeze the active MemTable. Requires ``lock``."""

    def views(self) -> list[MemTableView]: ...
    def memtables(self) -> InMemoryMemTables: ...
    def memtable_stats(self) -> MemTableStats: ...
    def has_rows(self) -> bool: ...
    def wait_for_flush_drain(self) -> None: ...

    def finish(self) -> None:
        """Flush everything; raises when something could not be."""

    def stop(self) -> None:
        """End background threads without flushing."""


class ShardWriter:
    """The one writer of a shard. Thread-safe; a context manager.

    Open one with ``Table.shard_writer`` or :func:`lancewal.writer.open_shard_writer`.
    """

    def __init__(
        self,
        config: ShardWriterConfig,
        intake: Intake,
        appender: WalAppender,
        log: CommitLog,
        mode: WriteMode,
        state: WriterState,
        stats: WriteStats,
        adapter: Adapter | None = None,
    ) -> None:
        """``adapter`` is needed where ``mode`` keeps rows with other columns than ``intake`` gives."""
        self.config = config
        self._adapter = adapter
        self._intake = intake
        self._appender = appender
        self._log = log
        self._mode = mode
        self._backpressure = mode.backpressure
        self._state = state
        self._stats = stats
        self._stats_logger = StatsLogger(stats, config.stats_log_interval, state.shard_id)
        # Guards the order of inserts; held for microseconds, never across I/O.
        self._lock = mode.lock
        self._close_lock = threading.Lock()
        self._in_hand = Room(config.max_unflushed_memtable_bytes)
        self._finalizer = weakref.finalize(self, _abandon, mode, str(state.shard_id))

    @property
    def shard_id(self) -> UUID:
        return self._appender.shard_id

    @property
    def epoch(self) -> int:
        return self._appender.epoch

    @property
    def closed(self) -> bool:
        return self._state.closed

    @property
    def readable(self) -> bool:
        """Whether reads through this writer are served: open, and memory not ahead of the log."""
        return self.config.enable_memtable and not self._state.closed and not self._state.poisoned

    @property
    def schema(self) -> pa.Schema:
        """The columns that :meth:`put` takes."""
        return self._intake.schema.plain

    def put(self, data: Any) -> WriteResult:
        """Write rows: a RecordBatch, a list of them, a Table, a reader, or a frame.

        All batches of one call become visible together and are durable together. Returns
        when the rows are readable and, with ``durable_write``, in the WAL. Rows are kept
        without a copy: buffers that Arrow shares with numpy or others must not be changed
        while they are in memory.
        """
        batches = as_batches(data)
        num_bytes = sum([batch.get_total_buffer_size() for batch in batches])
        if (
            self._adapter is not None
            or num_bytes > _LARGE_PUT_BYTES
            or not self._intake.fit_as_given(batches)
        ):
            check_process()
            call = threading.Lock()
            try:
                with call:
                    # Before the copies that are made here: each thread would have one in hand
                    # while it waits for room in memory.
                    self._in_hand.enter(call, sum([batch.nbytes for batch in batches]))
                    return self.write_rows(self._intake.shaped(batches))
            finally:
                self._in_hand.leave(call)
        num_rows = sum([batch.num_rows for batch in batches])
        return self._write(lambda: self._intake.shaped(batches), num_rows, num_bytes)

    def delete(self, keys: Any) -> WriteResult:
        """Delete rows by key: one key, a list of keys, or Arrow data with the key columns."""
        return self.write_rows(self._intake.deletes(keys))

    def write_rows(self, rows: Rows) -> WriteResult:
        """Write what an :class:`Intake` of this writer's schema has accepted."""
        if self._adapter is not None:
            rows = self._adapter.adapted(rows)
        return self._write(lambda: rows, rows.num_rows, rows.num_bytes)

    def _write(self, shape: Callable[[], Rows], num_rows: int, num_bytes: int) -> WriteResult:
        """Write the rows that ``shape`` returns, which the leader of a group commit may call."""
        started = time.perf_counter()
        self._state.check_usable()
        put = threading.Lock()
        try:
            with put:
                self._backpressure.admit(put, num_bytes)
                if self.config.durable_write:
                    positions = self._log.commit_put(lambda: self._insert(shape(), put))
                else:
                    positions = self._insert(shape(), put)
                    self._mode.nudge()
        finally:
            self._backpressure.settle(put)
        self._stats.record_put(time.perf_counter() - started, num_rows)
        self._stats_logger.maybe_log()
        return WriteResult(positions, Durability(self._log, positions.stop))

    def _insert(self, rows: Rows, put: threading.Lock) -> range:
        with self._lock:
            self._state.check_usable()
            positions = self._mode.insert(rows)
            self._backpressure.settle(put)
            return positions

    def scan(self, columns: Sequence[str] | None = None, filter: str | None = None) -> pa.Table:
        """The newest rows that are in memory: active and frozen MemTables, deletes applied.

        Flushed rows are not among them; ``Table.scan`` reads all levels.
        """
        self._state.check_readable()
        schema = self._intake.schema if self._adapter is None else self._adapter.schema
        return scan_views(self._mode.views(), schema, columns, filter)

    def active_memtable_ref(self) -> MemTableView:
        """A fixed view of the active MemTable."""
        self._state.check_readable()
        return self._mode.memtables().active

    def in_memory_memtable_refs(self) -> InMemoryMemTables:
        """Fixed views of the active and all frozen MemTables, taken at one moment."""
        self._state.check_readable()
        return self._mode.memtables()

    def memtable_stats(self) -> MemTableStats:
        check_process()
        return self._mode.memtable_stats()

    def wal_stats(self) -> WalStats:
        check_process()
        return WalStats(self._appender.next_position_hint, self._log.pending_batches, self._log.pending_bytes)

    def stats(self) -> WriteStatsSnapshot:
        check_process()
        return self._stats.snapshot()

    @property
    def stats_handle(self) -> WriteStats:
        """The live counters; they outlive the writer."""
        return self._stats

    def manifest(self) -> ShardManifest | None:
        """The shard's newest manifest, read from storage."""
        return self._appender.manifests.read_latest()

    def check_fenced(self) -> None:
        """Raise :class:`FencedError` when another writer took the shard over."""
        self._appender.check_fenced()

    def force_seal_active(self) -> None:
        """Freeze the active MemTable and queue it for flush; nothing happens when it is empty."""
        self._state.check_usable()
        self.check_fenced()
        with self._lock:
            self._mode.seal_active()

    def wait_for_flush_drain(self) -> None:
        """Wait until every frozen MemTable is published; raises when a flush fails meanwhile."""
        check_process()
        self._mode.wait_for_flush_drain()

    def close(self) -> None:
        """Write and flush everything, then end all threads.

        Raises when the last rows could not be flushed; what was acknowledged is in the
        WAL then and comes back when the shard is opened again. So do rows of a close that is
        interrupted: it still completes the log and ends the threads. Closing twice is harmless.

        A writer that was fenced has nothing to flush: whoever took the shard over has its rows,
        from the WAL. So this is silent then, unless rows that were put without ``durable_write`` are
        lost. In a forked child it does nothing: the writer is its parent's.
        """
        try:
            self.finish()
        except FencedError:
            if self._log.pending_batches and not self.config.durable_write:
                raise
            logger.info("closed a writer that was fenced; its rows are in the WAL", extra=self._state.context)

    def finish(self) -> None:
        """Close, and raise also where all rows are durable, but were not flushed for a fence."""
        if is_forked():
            return
        with self._close_lock:
            if self._state.closed:
                return
            with self._lock:
                self._state.close()
            try:
                if self._state.failure is None:
                    try:
                        self._mode.finish()
                    finally:
                        # Rows that could not be flushed must at least be in the log.
                        self._log.commit_all()
                elif self._log.pending_batches or self._mode.has_rows():
                    raise self._state.latched()
            finally:
                self._mode.stop()
                self._log.fail(ClosedError(f"the writer of shard {self.shard_id} was closed"))
                self._finalizer.detach()
        logger.info("closed writer", extra=self._state.context)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except LanceWalError as close_error:
            if error is None:
                raise
            # The body's error is the cause worth seeing; this one would hide it.
            logger.warning("close failed after an error: %s", close_error, extra=self._state.context)


def _abandon(mode: WriteMode, shard_id: str) -> None:
    """The writer was dropped without close: end its threads. What it acknowledged is in the WAL."""
    if is_forked():
        return  # it is the parent's, and so are its threads
    logger.warning("writer was not closed; rows it acknowledged stay in the WAL", extra={"shard": shard_id})
    mode.stop()
