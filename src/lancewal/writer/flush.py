"""A writer's background work: flush frozen MemTables to SSTables, and write queued rows to the WAL."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from lancewal.base import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.errors import ClosedError, FencedError, LanceWalError, StorageError
from lancewal.format import ShardManifest, SsTableEntry
from lancewal.index import IndexSpec
from lancewal.memtable import MemTable
from lancewal.shard import WalAppender
from lancewal.sstable import write_sstable
from lancewal.storage import Bell, ObjectStore, Worker, in_thread, span
from lancewal.writer.backlog import Backlog
from lancewal.writer.group_commit import CommitLog
from lancewal.writer.state import WriterState, WriteStats, fresh_copy

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.2
MAX_RETRY_SECONDS = 30.0
#: How often ``close`` tries the last flushes; after that the rows stay in the WAL.
CLOSE_ATTEMPTS = 3


class WalFlushWorker:
    """Writes queued rows to the WAL when no caller waits for them.

    Writes once ``max_wal_buffer_size`` bytes are queued, or the oldest row is ``max_wal_flush_interval`` old.
    """

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
            self._worker.kick_for_later()
        elif self._waiting_since is None and self._interval is not None:
            kicked = False
            self._waiting_since = time.monotonic()
            try:
                kicked = self._worker.kick_for_later()
            finally:
                if not kicked:
                    self._waiting_since = None  # otherwise later rows would assume that the worker was kicked

    def stop(self, timeout: float | None = None) -> None:
        self._worker.stop(timeout)

    def _step(self) -> float | None:
        if self._state.ended.failure is not None:
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
            # The log has latched the error: the next put, wait or close raises it.
            logger.debug("timed WAL flush failed", exc_info=True)
        return None


class FlushQueue:
    """Flushes frozen MemTables in the background; they stay readable until published.

    Oldest first and never out of order: the manifest's replay cursor covers every WAL entry up to
    the published generation, so skipping a failed generation would lose its rows. A failed flush
    is retried with growing pauses for as long as the writer lives; a fence is final.
    """

    def __init__(
        self,
        base: BaseTable,
        indexes: Sequence[IndexSpec],
        store: ObjectStore,
        appender: WalAppender,
        log: CommitLog,
        state: WriterState,
        stats: WriteStats,
        *,
        row_sums: bool,
        backlog: Backlog,
        freeze_active: Callable[[], object],
        after_flush: Callable[[], object],
    ) -> None:
        """``backlog`` gets the shard's new manifest after every flush; ``after_flush`` is called then.

        ``freeze_active`` freezes the active MemTable, for :meth:`ask`.
        """
        self._row_sums = row_sums
        self._backlog = backlog
        self._freeze_active = freeze_active
        self._after_flush = after_flush
        self._asked = False
        self._schema = base.schema
        self._storage_version = base.storage_version
        self._indexes = indexes
        self._store = store
        self._appender = appender
        self._log = log
        self._state = state
        self._stats = stats
        # Guards the fields below; never held across a wait.
        self._lock = threading.Lock()
        self._changed = Bell()
        #: MemTables that are frozen and not yet published, oldest first; other threads may copy the deque.
        self.frozen: deque[MemTable] = deque()
        self._failures = 0
        self._failures_in_a_row = 0
        #: The error that keeps the oldest frozen MemTable from being flushed.
        self._last_error: LanceWalError | None = None
        # An SSTable that is complete, but not published yet. Retries reuse it: while the manifest
        # cannot be written, each retry would otherwise leave another copy behind. Garbage collection
        # keeps directories of generations that are not published yet.
        self._written: SsTableEntry | None = None
        self._worker = Worker(f"lancewal-flush-{state.shard_id}", self._step)

    def add(self, memtable: MemTable, *, start: bool = True) -> None:
        """Queue a frozen MemTable; with ``start=False`` it waits for :meth:`start`."""
        with self._lock:
            self.frozen.append(memtable)
        if start:
            self._worker.kick()

    def ask(self) -> None:
        """Have the flush thread freeze and flush the active MemTable."""
        self._asked = True
        self._worker.kick_for_later()

    def start(self) -> None:
        """Flush what is queued now; ends the pause after a failure."""
        if self.frozen:
            self._worker.kick()

    def drain(self, attempts: int = 1) -> None:
        """Wait until every MemTable that is frozen now is published.

        Raises the last error if flushes fail ``attempts`` times during the wait. The rows then
        stay frozen and readable, and the flush is retried in the background.
        """
        with self._lock:
            if not self.frozen:
                return
            last = self.frozen[-1].generation
            failures = self._failures
            # A caller waits now, so the retry pauses start short again.
            self._failures_in_a_row = 0

        def drained() -> bool:
            with self._lock:
                if not self.frozen or self.frozen[0].generation > last:
                    return True
                if self._state.ended.fence is not None:
                    raise fresh_copy(self._state.ended.fence)
                if self._failures - failures >= attempts and self._last_error is not None:
                    raise fresh_copy(self._last_error)
                if self._worker.stopping:
                    raise ClosedError("the writer was closed before its MemTables were flushed")
                return False

        self._worker.kick()
        self._changed.wait_for(drained)

    def stop(self, timeout: float | None = None) -> None:
        """End the background thread after the current flush; wait for it up to ``timeout``."""
        self._worker.stop(timeout)
        self._changed.ring()

    def _step(self) -> float | None:
        if self._asked:
            self._asked = False
            self._freeze_active()
        while not self._worker.stopping and self._state.ended.fence is None:
            with self._lock:
                if not self.frozen:
                    return None
                memtable = self.frozen[0]
            try:
                self._flush(memtable)
            except FencedError as error:
                self._log.fail(error, memory_ahead_of_log=self._log.pending_batches > 0)
                self._failed(memtable, error)
                return None
            except BaseException as error:
                return self._failed(memtable, error)
        return None

    def _flush(self, memtable: MemTable) -> None:
        started = time.perf_counter()
        with span("lancewal.flush", self._state.trace, generation=memtable.generation):
            if self._written is None or self._written.generation != memtable.generation:
                self._written = self._write_beside_log(memtable)
            self._publish(memtable, self._written)
        rows, seconds = memtable.row_count, time.perf_counter() - started
        # Counted before the MemTable is let go: who waits for that asks how many rows were flushed.
        self._stats.add(memtable_flush_count=1, memtable_flush_time=seconds, memtable_flush_rows=rows)
        with self._lock:
            self.frozen.popleft()
            self._last_error = None
            self._failures_in_a_row = 0
        self._after_flush()
        self._changed.ring()
        self._state.note_change()
        logger.info(
            "flushed generation %d: %d rows in %.3f s",
            memtable.generation,
            rows,
            seconds,
            extra=self._context(memtable),
        )

    def _write_beside_log(self, memtable: MemTable) -> SsTableEntry:
        """Write the SSTable while another thread writes the last rows to the WAL; publishing needs both."""
        if self._log.durable_position >= memtable.end_position:
            return self._write_sstable(memtable)
        if self._state.ended.log_failure is not None:
            self._log.commit(memtable.end_position)  # raises: nothing more gets into the log
        logged = in_thread(partial(self._log.commit, memtable.end_position), "lancewal-flush-log")
        try:
            return self._write_sstable(memtable)
        finally:
            logged.result()

    def _write_sstable(self, memtable: MemTable) -> SsTableEntry:
        return write_sstable(
            store=self._store,
            shard_id=self._state.shard_id,
            generation=memtable.generation,
            schema=self._schema,
            batches=memtable.batches,
            storage_version=self._storage_version,
            indexes=self._indexes,
            in_memory_bytes=memtable.row_bytes,
            row_sums=self._row_sums,
        )

    def _publish(self, memtable: MemTable, entry: SsTableEntry) -> None:
        def published(manifest: ShardManifest) -> ShardManifest:
            if manifest.current_generation == memtable.generation + 1:
                if any(
                    each.generation == entry.generation and each.path != entry.path
                    for each in manifest.sstables
                ):
                    # A copy of this writer, with the same epoch, has flushed its own rows.
                    epoch = self._state.epoch
                    raise FencedError(self._state.shard_id, epoch, epoch, "at a flush")
                # An earlier attempt succeeded, and its reply was lost.
                return manifest
            if manifest.current_generation != memtable.generation:
                raise StorageError(
                    f"shard {self._state.shard_id} is at generation {manifest.current_generation}, "
                    f"generation {memtable.generation} cannot be published"
                )
            return replace(
                manifest,
                sstables=(*manifest.sstables, entry),
                current_generation=memtable.generation + 1,
                replay_after_wal_entry_position=memtable.covered_wal_position,
                wal_entry_position_last_seen=max(
                    manifest.wal_entry_position_last_seen, memtable.covered_wal_position
                ),
            )

        self._appender.check_alone()
        self._backlog.note(self._appender.manifests.commit_update(self._state.epoch, published))

    def _failed(self, memtable: MemTable, error: BaseException) -> float:
        if not isinstance(error, LanceWalError):
            error = StorageError(f"flush of generation {memtable.generation} failed: {error!r}")
        self._stats.add(memtable_flush_failures=1)
        with self._lock:
            self._last_error = error
            self._failures += 1
            pause = min(FIRST_RETRY_SECONDS * float(1 << self._failures_in_a_row), MAX_RETRY_SECONDS)
            self._failures_in_a_row = min(self._failures_in_a_row + 1, 16)
        self._changed.ring()
        logger.warning(
            "flush of generation %d failed, next try in %.1f s: %s",
            memtable.generation,
            pause,
            error,
            extra=self._context(memtable),
        )
        self._state.note_change()
        return pause

    def _context(self, memtable: MemTable) -> dict[str, object]:
        return {
            **self._state.context,
            "generation": memtable.generation,
            "position": memtable.covered_wal_position,
        }
