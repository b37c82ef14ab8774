"""ShardWriter: puts and deletes into one shard, durable, readable at once, fenced.

``put`` checks its rows, waits for room, and adds the rows to the MemTable and the commit log
under one short lock. With ``durable_write`` it leads or joins a group commit, whose leader
adds the rows of the whole group. No lock is held during slow work: flushes, deferred indexing and
WAL writes.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

import pyarrow as pa

from lancewal.config import ShardWriterConfig
from lancewal.errors import BusyError, FencedError, OutcomeUnknownError, StorageError
from lancewal.format import PutId, ShardManifest, check_put_id, size_of
from lancewal.memtable import MemTableView, scan_views
from lancewal.shard import WalAppender
from lancewal.storage import Room, check_process, is_forked, row_memory, span
from lancewal.writer.backlog import Brake
from lancewal.writer.flush import WalFlushWorker
from lancewal.writer.group_commit import CommitLog, Put, PutState
from lancewal.writer.intake import Adapter, Intake, Rows
from lancewal.writer.modes import InMemoryMemTables, MemTableStats, WriteMode
from lancewal.writer.put_ids import PutIds
from lancewal.writer.state import WriterState, WriteStats, WriteStatsSnapshot, close_after

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Shaping a put above this size may copy slices. So the put's own thread shapes it, not the leader, because
#: others wait for the leader. All threads that do so share a memory budget.
_LARGE_PUT_BYTES = 256 * 1024
#: How often a put checks for room, in seconds, while the memory of the whole process is full.
_LOOK_AGAIN = 0.02


@dataclass(slots=True, eq=False)
class Durability:
    """Whether the rows of one put are in the WAL, and a way to make sure."""

    _log: CommitLog
    _end_position: int

    def __repr__(self) -> str:
        return f"{type(self).__name__}(done={self.done()})"

    def done(self) -> bool:
        """Whether the rows are durable; does not wait."""
        return self._log.durable_position >= self._end_position

    def wait(self, timeout: float | None = None) -> bool:
        """Make the rows durable now; ``False`` when ``timeout`` seconds were not enough.

        Takes part in the group commit instead of waiting for the next timed flush. Raises
        the writer's error if the rows can no longer become durable.
        """
        return self._log.commit(self._end_position, timeout)


class WriteResult(NamedTuple):
    """The result of one put; ``batch_positions`` count all batches of the writer, including replayed ones.

    >>> import tempfile, lancewal
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1}], key="id", unsharded=True)
    >>> with table.shard_writer(table.shard_for(), durable_write=False) as writer:
    ...     result = writer.put({"id": 2})
    ...     result.durable.wait(), result.durable.done(), result.batch_positions
    (True, True, range(0, 1))
    """

    batch_positions: range
    durable: Durability


@dataclass(frozen=True)
class WalStats:
    """The position of the next WAL entry, as far as the writer knows, and what is not in the WAL yet."""

    next_wal_entry_position: int
    pending_batches: int
    pending_bytes: int


class Memory(Protocol):
    """The rows of a writer that are not flushed yet."""

    @property
    def unflushed_bytes(self) -> int: ...

    @property
    def bytes_at_last_put(self) -> int:
        """An upper estimate of ``unflushed_bytes`` that is cheap to read."""

    def make_room(self) -> None:
        """Make sure that something is running that lowers ``unflushed_bytes``."""


class Backpressure:
    """Holds puts back while the bytes in memory and of admitted puts are at or above the limit.

    An admitted put counts until its rows are in memory. Otherwise many threads that come at the same
    time would all find room. An interrupted put does not count, because its thread no longer holds the
    ``present`` lock.
    """

    def __init__(
        self, limit: int, log_interval: float, memory: Memory, state: WriterState, stats: WriteStats
    ) -> None:
        self._limit = limit
        self._log_interval = log_interval
        self._memory = memory
        self._state = state
        self._stats = stats
        self._lock = threading.Lock()
        #: Puts from their admission to their end; the thread of each put removes it.
        self.let_in: dict[Put, None] = {}
        self._held_back = False

    @property
    def let_in_bytes(self) -> int:
        """Bytes of admitted puts whose rows are not in memory yet; forgets puts whose threads are gone."""
        num_bytes = 0
        for put in list(self.let_in):
            if not put.present.locked():
                self.let_in.pop(put, None)  # its thread was interrupted, or is about to remove it
            elif put.state is PutState.WAITING:
                num_bytes += put.rows.num_bytes
        return num_bytes

    def admit(self, put: Put, patience: float | None = None) -> None:
        """Return once there is room; waits at most ``patience`` seconds, without it as long as needed.

        Raises the writer's error if the writer is closed or has failed, and :class:`BusyError` when
        ``patience`` runs out.
        """
        if self._lets_in(put, counted=False) or self._lets_in(put):
            return
        started = time.monotonic()
        wait = self._log_interval if patience is None else min(patience, self._log_interval)
        try:
            while True:
                seen = self._state.changes
                if row_memory.is_full:
                    row_memory.relieve()
                else:
                    self._memory.make_room()
                if self._lets_in(put):
                    return
                if patience is not None and time.monotonic() - started >= patience:
                    put.state = PutState.REFUSED  # no leader has seen it, so its id need not keep its rows
                    raise BusyError(
                        f"shard {self._state.shard_id} has {self._memory.unflushed_bytes} bytes to flush, of "
                        f"at most {self._limit}. No row of this put was written to it: send it again"
                    )
                if row_memory.is_full:
                    # Flushes of other writers make room too, but they do not wake this thread.
                    self._state.wait_for_change(seen, _LOOK_AGAIN)
                elif not self._state.wait_for_change(seen, wait) and patience is None:
                    logger.warning(
                        "put has waited %.1f s for a flush: %d unflushed bytes, limit %d",
                        time.monotonic() - started,
                        self._memory.unflushed_bytes,
                        self._limit,
                        extra=self._state.context,
                    )
        finally:
            self._stats.add(backpressure_count=1, backpressure_wait=time.monotonic() - started)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Admit no put during the block; all admitted puts have ended when it begins."""
        with self._lock:
            self._held_back = True
        try:
            while True:
                seen = self._state.changes
                if not any(put.present.locked() for put in list(self.let_in)):
                    break
                self._state.wait_for_change(seen, self._log_interval)
            yield
        finally:
            self._held_back = False
            self._state.note_change()

    def _lets_in(self, put: Put, *, counted: bool = True) -> bool:
        check_process()  # before the lock: in a forked child it may be locked for good
        memory = self._memory
        with self._lock:
            # Before the bytes in memory: a put that is inserted in between is counted twice rather than
            # not at all.
            num_bytes = self.let_in_bytes if self.let_in else 0
            self._state.check_usable()
            if self._held_back:
                return False
            num_bytes += memory.unflushed_bytes if counted else memory.bytes_at_last_put
            if num_bytes >= self._limit or row_memory.is_full:
                return False
            self.let_in[put] = None
            return True


class ShardWriter:
    """The one writer of a shard. Thread-safe; a context manager.

    Open one with ``Table.shard_writer`` or :func:`lancewal.writer.open_shard_writer`.

    >>> import tempfile, lancewal
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1}], key="id", unsharded=True)
    >>> with table.shard_writer(table.shard_for()) as writer:
    ...     result = writer.put([{"id": 2}, {"id": 3}])
    ...     _ = writer.delete(2)
    ...     result.durable.done(), writer.scan().num_rows, writer.stats().put_count
    (True, 1, 2)
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
        put_ids: PutIds | None = None,
    ) -> None:
        """``adapter`` is needed if ``mode`` keeps rows with other columns than ``intake`` returns."""
        self.config = config
        self.shard_id = state.shard_id
        self.epoch = state.epoch
        self._adapter = adapter
        self._put_ids = put_ids or PutIds()
        self._intake = intake
        self._appender = appender
        self._log = log
        self._mode = mode
        self._state = state
        self._stats = stats
        self._backpressure = Backpressure(
            config.max_unflushed_memtable_bytes,
            config.backpressure_log_interval.total_seconds(),
            mode,
            state,
            stats,
        )
        self._brake = Brake(
            mode.backlog, appender.manifests.read_latest, config.stop_timeout.total_seconds(), state, stats
        )
        self._wal_flusher = WalFlushWorker(config, log, state)
        interval = config.stats_log_interval
        self._log_stats_every = float("inf") if interval is None else interval.total_seconds()
        self._log_stats_at = time.monotonic() + self._log_stats_every
        self._close_lock = threading.Lock()
        self._inserting = threading.Lock()
        self._in_hand = Room(config.max_unflushed_memtable_bytes)
        #: Called once the writer is closed, before :meth:`close` returns.
        self.after_close: Callable[[], object] = _nothing
        self._finalizer = weakref.finalize(self, _abandon, mode, self._wal_flusher, state)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called; a closed writer refuses puts."""
        return self._state.closed

    @property
    def usable(self) -> bool:
        """Whether puts are accepted: the writer is open, has not failed for good, and knows of no fence."""
        return not self._state.closed and self._state.ended.failure is None and self._finalizer.alive

    @property
    def closing(self) -> bool:
        """Whether a thread is closing it: it takes no puts, and still needs its shard for its last rows."""
        is_at_work = self._state.ended.failure is None and self._finalizer.alive
        return self._state.closed and self._close_lock.locked() and is_at_work

    @property
    def readable(self) -> bool:
        """Whether this writer serves reads: it has MemTables, is open, and memory is not ahead of the log."""
        return self.config.enable_memtable and not self._state.closed and not self._state.ended.poisoned

    @property
    def schema(self) -> pa.Schema:
        """The columns that :meth:`put` accepts."""
        return self._intake.schema.plain

    def put(self, data: Any, *, put_id: PutId | None = None) -> WriteResult:
        """Write rows: dicts, dataclasses, pandas, polars, structured numpy arrays or Arrow data.

        The forms of input, and the rules for rounding and refusing values, are those of
        :meth:`TableWriter.put`. A stream is read completely before the first row is written.

        All batches of one call become visible together and are durable together. Returns
        when the rows are readable and, with ``durable_write``, in the WAL. Rows are kept
        without a copy: buffers that Arrow shares with numpy or others must not be changed
        while they are in memory. Puts with a ``put_id`` are idempotent: if rows were already written
        under the same id, also through another writer, they are not written again.
        """
        check_put_id(put_id)
        batches = self._intake.batches(data)
        if self._adapter is None and self._intake.fit_as_given(batches):
            rows = Rows.of(batches, unshaped=self._intake)
            if rows.num_bytes <= _LARGE_PUT_BYTES:
                return self.write_rows(rows, put_id)
        check_process()
        call = threading.Lock()
        try:
            with call:
                # Entered before the rows are copied: otherwise each thread would hold its copy while it
                # waits for room in memory.
                self._in_hand.enter(call, sum([size_of(batch) for batch in batches]))
                return self.write_rows(self._intake.shaped(batches), put_id)
        finally:
            self._in_hand.leave(call)

    def delete(self, keys: Any, *, put_id: PutId | None = None) -> WriteResult:
        """Delete rows by key: one key, a list of keys, or Arrow data with the key columns."""
        check_put_id(put_id)
        return self.write_rows(self._intake.deletes(keys), put_id)

    def write_rows(
        self, rows: Rows, put_id: PutId | None = None, patience: float | None = None
    ) -> WriteResult:
        """Write rows that an :class:`Intake` with this writer's schema has accepted.

        Raises :class:`BusyError` if there is no room after ``patience`` seconds.
        """
        started = time.perf_counter()
        if self._adapter is not None:
            rows = self._adapter.adapted(rows)
        put = Put(rows, self._mode, put_id)
        try:
            with put.present, span("lancewal.put", self._state.trace, rows=rows.num_rows):
                if put_id is not None and (end := self._put_ids.begin(put)) is not None:
                    return self._landed_before(end)
                if self._mode.backlog.behind:
                    patience = self._brake.hold(put, patience)
                self._backpressure.admit(put, patience)
                if self.config.durable_write:
                    self._log.commit_put(put)
                else:
                    self._mode.insert(put)
                    self._wal_flusher.nudge()
        finally:
            if put_id is not None:
                self._put_ids.end(put)
            self._backpressure.let_in.pop(put, None)
            self._state.note_change()  # a refused put frees room without a write or a flush
        self._stats.add(put_count=1, put_rows=rows.num_rows, put_time=time.perf_counter() - started)
        if time.monotonic() >= self._log_stats_at:
            self._log_stats()
        return WriteResult(put.positions, Durability(self._log, put.end_position))

    def _landed_before(self, end: int) -> WriteResult:
        """The result of a put whose rows an earlier put with the same id has written, up to ``end``."""
        self._state.check_usable()
        if self.config.durable_write:
            self._log.commit(end)
        return WriteResult(range(end, end), Durability(self._log, end))

    def _log_stats(self) -> None:
        """Log the statistics; called by the first put after each interval, so an idle writer logs nothing."""
        self._log_stats_at = time.monotonic() + self._log_stats_every
        snapshot = self._stats.snapshot()
        snapshot.log_summary(f"shard {self.shard_id}")
        snapshot.log_wal_breakdown(f"shard {self.shard_id}")

    def scan(self, columns: Sequence[str] | None = None, filter: str | None = None) -> pa.Table:
        """Read the newest rows in memory: active and frozen MemTables, with deletes applied.

        Flushed rows are not included; ``Table.scan`` reads all levels.
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
        """The size of the active MemTable, and of the frozen ones that wait for their flush."""
        check_process()
        return self._mode.memtable_stats()

    def wal_stats(self) -> WalStats:
        """The position of the next WAL entry, and what is not in the WAL yet."""
        check_process()
        return WalStats(self._appender.next_position_hint, self._log.pending_batches, self._log.pending_bytes)

    def stats(self) -> WriteStatsSnapshot:
        """The writer's counters at this moment."""
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
        """Raise :class:`FencedError` if another writer has claimed the shard."""
        self._appender.check_fenced()

    def force_seal_active(self) -> None:
        """Freeze the active MemTable and queue it for flush; does nothing when it is empty."""
        self._state.check_usable()
        self._appender.check_fenced()
        self._mode.seal_active()

    def tend(self) -> None:
        """Do periodic work: flush rows that are old, and check whether compaction has caught up."""
        if not self.usable:
            return
        self._mode.seal_if_old()
        if self._mode.backlog.behind and self._brake.look():
            self._state.note_change()

    def flush(self) -> int:
        """Flush all rows in memory, and wait until they are published; returns how many rows were flushed."""
        self._state.check_usable()
        before = self._stats.snapshot().memtable_flush_rows
        self._appender.check_fenced()
        self._mode.flush()
        return self._stats.snapshot().memtable_flush_rows - before

    def wait_for_flush_drain(self) -> None:
        """Wait until every frozen MemTable is published; raises if a flush fails during the wait."""
        check_process()
        self._mode.wait_for_flush_drain()

    def insert_generations(
        self, prepare: Callable[[], object], commit: Callable[[WalAppender], tuple[T, ShardManifest | None]]
    ) -> T:
        """Let ``commit`` add SSTables to the shard: newer than every earlier row, older than every later row.

        ``commit`` appends sentinels and commits a manifest under this writer's epoch. It returns its result
        and that manifest, or ``None`` for the manifest. All earlier rows are flushed before, and no put runs
        at the same time. To keep that time short, most rows are flushed, and ``prepare`` is called, before
        puts are held back. Only one call runs at a time.

        If ``commit`` fails, the writer ends. The pointer may already be in the log, and if the log continued
        under this epoch, the next flush would make it count (``lancewal.publish.sstable_pointers``). Later
        puts do not get what ``commit`` raised, but an error that says that a new writer takes their rows.
        """
        with self._inserting:
            self.flush()
            prepare()
            with self._backpressure.held_back():
                self._state.check_usable()
                self._mode.flush()
                try:
                    result, manifest = commit(self._appender)
                    if manifest is not None:
                        self._mode.continue_at(manifest.current_generation)
                        self._mode.backlog.note(manifest)
                except BaseException as error:
                    failure = error
                    if not isinstance(failure, FencedError | StorageError | OutcomeUnknownError):
                        failure = StorageError(
                            f"the writer of shard {self.shard_id} ended because SSTables could not be added "
                            f"({error!r}); its rows are flushed: open a new writer"
                        )
                    self._state.fail(failure, memory_ahead_of_log=False, ends_log=True)
                    raise
                return result

    def close(self) -> None:
        """Write and flush everything, then end all threads.

        Raises if the last rows could not be flushed. All acknowledged rows are in the WAL then, and come
        back when the shard is opened again. An interrupted close still completes the log and ends the
        threads, so its rows come back as well. Closing twice is harmless.

        A fenced writer has nothing to flush: the new writer has read its rows from the WAL. So a fence
        raises no error here, unless rows that were put without ``durable_write`` are lost. In a forked
        child this does nothing, because the writer belongs to the parent.
        """
        try:
            self.finish()
        except FencedError:
            if self._log.pending_batches and not self.config.durable_write:
                raise
            logger.info("closed a writer that was fenced; its rows are in the WAL", extra=self._state.context)

    def finish(self) -> None:
        """Close like :meth:`close`, but raise for every fence that keeps rows from being flushed."""
        if is_forked():
            return
        with self._close_lock:
            if self._state.closed:
                return
            try:
                if self._state.ended.failure is None:
                    self._write_all()
                else:
                    with self._mode.lock:
                        self._state.close()
                    if self._log.pending_batches or self._mode.has_rows():
                        raise self._state.latched()
            finally:
                if self._state.closed:  # otherwise an interrupt came first, and nothing may be ended
                    self._wal_flusher.stop(self._state.patience())
                    self._mode.stop()
                    self._log.close()
                    self._finalizer.detach()
                    self.after_close()
        logger.info("closed writer", extra=self._state.context)

    def _write_all(self) -> None:
        """Refuse further puts and flush everything; rows that cannot be flushed are written to the log."""
        try:
            try:
                with self._mode.lock:
                    self._state.close()
                self._mode.finish()
            finally:
                self._log.commit_all()
        finally:
            self._log.commit_all()  # again: an interrupt may have cut the first call short

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_after(error, self.close, self._state.context)


def _nothing() -> None:
    """The default callback: do nothing."""


def _abandon(mode: WriteMode, wal_flusher: WalFlushWorker, state: WriterState) -> None:
    """End the threads of a writer that was dropped without close. Acknowledged rows are in the WAL."""
    if is_forked():
        return  # the writer and its threads belong to the parent
    logger.warning(
        "writer was not closed; rows it acknowledged stay in the WAL", extra={"shard": str(state.shard_id)}
    )
    wal_flusher.stop(state.patience())
    mode.stop()
