"""TableWriter: routes a table's rows to their shards, and writes the shards in parallel."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from numbers import Real
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, TypeVar
from uuid import UUID

import pyarrow as pa

from lancewal.errors import (
    BusyError,
    ClosedError,
    FencedError,
    InvalidInputError,
    LanceWalError,
    OutcomeUnknownError,
    PartialWriteError,
    StorageError,
)
from lancewal.format import PutId, TableSchema, check_put_id, size_of
from lancewal.shard import Shard, ShardRouter
from lancewal.storage import Crew, Room, Task, check_process, is_forked
from lancewal.writer.intake import Cast, Intake, Rows
from lancewal.writer.matching import Find, Matching
from lancewal.writer.rows import is_stream, streamed_batches
from lancewal.writer.shard_writer import ShardWriter, WriteResult
from lancewal.writer.state import DROPPED_PATIENCE_SECONDS, WriteStatsSnapshot, added, close_after

logger = logging.getLogger(__name__)

#: The most threads that write shards at the same time, one shard each; they are started as needed. A remote
#: store gets more of them, because its requests take longer.
MAX_CONCURRENT_SHARDS = 16
_REMOTE_SHARDS = 64

T = TypeVar("T")


@dataclass(frozen=True)
class TableWriteResult:
    """The result of one put, delete or update: its rows, and the last write of each shard that got some.

    >>> import tempfile, lancewal
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1}], key="id")
    >>> with table.writer(durable_write=False) as writer:
    ...     result = writer.put([{"id": 2}, {"id": 3}])  # readable now
    ...     result.wait(), result.done(), result.num_rows
    (True, True, 2)
    """

    num_rows: int
    shards: Mapping[UUID, WriteResult]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_rows={self.num_rows}, shards={len(self.shards)})"

    def done(self) -> bool:
        """Whether all rows are durable; does not wait."""
        return all(result.durable.done() for result in self.shards.values())

    def wait(self, timeout: float | None = None) -> bool:
        """Make all rows durable now; ``False`` when ``timeout`` seconds were not enough."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for result in self.shards.values():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not result.durable.wait(left):
                return False
        return True


class Companion(Protocol):
    """Something that runs alongside a writer and ends with it."""

    def stop(self, timeout: float | None = None) -> None:
        """Start no more work."""

    def close(self) -> None:
        """Do the remaining work; called when all shards are closed."""


class TableWriter:
    """Writes rows to the shards they belong to. Thread-safe; a context manager.

    Open one with ``Table.writer``. A shard is claimed when its first row comes, and held until
    :meth:`close`. If another writer holds it, ``take_over`` of ``Table.writer`` decides. With "when_gone"
    a writer may lose a shard because another writer took it for gone. The put that finds the loss claims the
    shard again if the other writer is gone, and is written under the new claim. If the other writer lives,
    the put names it (:class:`ShardOwnedError`). If the shard is lost again within one lease, the put raises
    :class:`FencedError`, so that two writers do not take a shard from each other for ever.

    Rows of one key stay in the order in which one thread puts them.

    A call either refuses its input (:class:`InvalidInputError`, nothing is written) or goes
    to all its shards. If one of them fails, the rows of the other shards are still written, and
    :class:`PartialWriteError` says which shards failed. A batch is atomic within a shard, not
    across shards.

    >>> import tempfile, lancewal
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1, "n": 1}, {"id": 2, "n": 2}], key="id")
    >>> with table.writer() as writer:
    ...     _ = writer.put([{"id": 3, "n": 3}, {"id": 4, "n": 4}])
    ...     _ = writer.delete(1)
    ...     _ = writer.delete(where="n = 4")
    ...     _ = writer.update("id = 2", set_sql={"n": "n * 10"})
    ...     writer.flush()
    >>> sorted(table.scan().to_table().to_pylist(), key=lambda row: row["id"])
    [{'id': 2, 'n': 20}, {'id': 3, 'n': 3}]
    """

    def __init__(
        self,
        schema: TableSchema,
        router: ShardRouter,
        open_shard: Callable[[Shard], ShardWriter],
        *,
        cast: Cast = "numbers",
        storage_version: str | None = None,
        newest: Callable[[], TableSchema] | None = None,
        max_bytes_in_hand: float = float("inf"),
        is_remote: bool = False,
        come_back_after: float | None = None,
        companion: Companion | None = None,
        find: Find | None = None,
    ) -> None:
        """``max_bytes_in_hand`` bounds the bytes that the puts of all threads shape and split at a time.

        ``companion`` lives as long as this writer. ``find`` reads the rows that match a condition.

        A lost shard is opened again, but not twice within ``come_back_after`` seconds (``None``: never).
        """
        self._come_back_after = come_back_after
        self._router = router
        self._open_shard = open_shard
        self._intake = Intake(schema, cast=cast, storage_version=storage_version, newest=newest)
        self._crew = Crew(_REMOTE_SHARDS if is_remote else MAX_CONCURRENT_SHARDS, "lancewal-shard")
        self._slots: dict[UUID, _Slot] = {}
        # Guards the slots; never held while a shard is opened or written.
        self._lock = threading.Lock()
        self._under_way = Room(max_bytes_in_hand)
        self._closed = False
        self._close_lock = threading.Lock()
        self._all_closed = False
        self._companion = companion
        self._matching = Matching(self._intake, find)
        self._finalizer = weakref.finalize(self, _dropped, self._crew, companion)

    @property
    def schema(self) -> pa.Schema:
        """The columns that :meth:`put` accepts."""
        return self._intake.schema.plain

    def batches(self, data: Any) -> list[pa.RecordBatch]:
        """Convert rows in memory, of any form that :meth:`put` accepts, to Arrow; nothing is written."""
        return self._intake.batches(data)

    @property
    def shard_writers(self) -> Mapping[UUID, ShardWriter]:
        """The writers of all shards that have got rows so far."""
        check_process()
        with self._lock:
            slots = dict(self._slots)
        return MappingProxyType({shard: slot.writer for shard, slot in slots.items() if slot.writer})

    def intake(self, cast: Cast) -> Intake:
        """An intake for this writer with another ``cast``; :meth:`put` accepts the rows that it returns."""
        return self._intake.casting(cast)

    def shards_of(self, data: Any) -> set[UUID]:
        """The shards that rows belong to; ``data`` is rows to put, or the result of an :meth:`intake`."""
        rows = data if isinstance(data, Rows) else self._intake.upserts(data)
        return {shard.shard_id for batch in rows.batches for shard, _ in self._router.route(batch)}

    def put(
        self, data: Any, *, put_id: PutId | None = None, patience: float | None = None
    ) -> TableWriteResult:
        """Write rows: a dict or dataclass for one row, or many as a list of them, a pandas or polars frame, a
        structured numpy array, a RecordBatch or Table, a list of these, or a stream.

        Columns are matched by name, in any order; a nullable column may be missing. The writer's ``cast``
        (:meth:`Table.writer`) says how values of other types are converted. A vector that is not Arrow data,
        such as a list of Python floats, which are doubles, is rounded to the column's precision, usually
        float32. A value that does not fit is refused, and the error names its column and row. So is a
        timestamp if its time zone would have to be guessed or dropped, unless the zone is UTC. Returns when
        the rows are readable and, with ``durable_write``, in the WAL.

        Data in memory is checked as a whole before its first row is written. A stream (a
        RecordBatchReader, an iterator of rows or batches, any other object with
        ``__arrow_c_stream__``) is checked and written batch by batch and never held in memory as a whole:
        when a batch is refused, the batches before it are already written.

        Puts with a ``put_id`` are idempotent: if rows were already written under the same id, also through
        another writer, they are not written again. Send exactly the same rows. ``patience`` bounds the
        seconds that a put, or each batch of a stream, waits for room in memory; a shard without room by then
        fails with :class:`BusyError`.
        """
        _check_options(put_id, patience)
        progress = _Progress()
        if not isinstance(data, pa.RecordBatch | pa.Table) and is_stream(data):
            if put_id is not None:
                raise InvalidInputError("a stream is several puts, so it takes no put_id; put its batches")
            self._put_stream(data, progress, patience)
        else:
            self._write("put", data, progress, put_id, patience)
        return TableWriteResult(sum(progress.rows.values()), MappingProxyType(progress.results))

    def delete(
        self,
        keys: Any = None,
        *,
        where: str | None = None,
        put_id: PutId | None = None,
        patience: float | None = None,
    ) -> TableWriteResult:
        """Delete rows by key, or the rows that match ``where``.

        ``keys`` is one key, several (a list, set, array or Series), or a table with the key columns.

        ``where`` is SQL as in ``Table.scan``. The keys of the matching rows are read from one snapshot of the
        table, and then deleted. A row that another writer changes in between is deleted all the same. A row
        that starts to match in between is not deleted.

        A single text that is an SQL condition on the table's columns is refused as a key; pass it in a list
        if it is one. ``put_id`` and ``patience`` work as in :meth:`put`.
        """
        _check_options(put_id, patience)
        keys = self._matching.keys_to_delete(keys, where)
        if keys is None:
            return TableWriteResult(0, MappingProxyType({}))
        column = self._router.column
        rows = self._intake.deletes(keys)
        if column is not None and column not in self._intake.schema.primary_key:
            raise InvalidInputError(
                f"a key does not tell the shard of its row, because {column} is not part of the primary key; "
                "delete through the shard that has the row, with table.shard_writer(shard_id).delete(keys)"
            )
        progress = _Progress()
        self._write("delete", rows, progress, put_id, patience)
        return TableWriteResult(rows.num_rows, MappingProxyType(progress.results))

    def update(
        self, where: str, set: Mapping[str, Any] | None = None, *, set_sql: Mapping[str, str] | None = None
    ) -> TableWriteResult:
        """Set columns of the rows that match ``where`` to new values.

        ``where`` is SQL as in ``Table.scan``. ``set`` has one Python value per column, the same for all rows.
        ``set_sql`` has one expression per column over the old row, as in ``{"n": "n + 1"}``. Rows are read
        from one snapshot of the table and written back whole, batch by batch. So a change that another writer
        makes to one of them in between is overwritten. A row that starts to match in between stays as it is.
        If an expression results in a value that its column refuses, the error says how many rows were
        written before it.
        """
        progress = _Progress()
        try:
            for rows in self._matching.updated(where, set, set_sql):
                self._write("update", rows, progress)
        except InvalidInputError as error:
            if not (before := sum(progress.rows.values())):
                raise
            raise InvalidInputError(f"{error} (of the update, {before} rows before it are written)") from None
        return TableWriteResult(sum(progress.rows.values()), MappingProxyType(progress.results))

    def flush(self) -> None:
        """Flush the MemTables of all shards that got rows, and wait until they are published."""
        self._refuse_if_closed()
        call = threading.Lock()
        try:
            with call:
                self._under_way.enter(call)
                self._refuse_if_closed()
                writers = self.shard_writers
                _, failed = self._run({shard: writer.flush for shard, writer in writers.items()})
        finally:
            self._under_way.leave(call)
        if failed:
            raise PartialWriteError("flush", failed, {}) from next(iter(failed.values()))

    def stats(self) -> WriteStatsSnapshot:
        """The counters of all shard writers, added up."""
        return reduce(added, [writer.stats() for writer in self.shard_writers.values()], WriteStatsSnapshot())

    def close(self) -> None:
        """Wait for writes in progress, close every shard's writer, and end all threads.

        Raises :class:`PartialWriteError` if the last rows of some shards could not be
        flushed; all acknowledged rows are in the WAL of their shards. Closing twice is harmless, and a
        second call completes a close that was interrupted. In a forked child this does nothing, because
        the writer belongs to the parent.
        """
        if is_forked():
            return
        with self._close_lock:
            if self._all_closed:
                return
            self._closed = True
            if self._companion is not None:
                self._companion.stop()
            self._under_way.wait_until_empty()
            writers = self.shard_writers
            _, failed = self._run({shard: writer.close for shard, writer in writers.items()})
            self._all_closed = True
            self._crew.dismiss(wait=True)
        if self._companion is not None:
            self._companion.close()
        if failed:
            raise PartialWriteError("close", failed, {}) from next(iter(failed.values()))

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_after(error, self.close)

    def _put_stream(self, stream: Any, progress: _Progress, patience: float | None) -> None:
        try:
            for batch in streamed_batches(stream, self._intake.plain, casts=self._intake.casts):
                self._write("put", batch, progress, patience=patience)
        except InvalidInputError as error:
            before = sum(progress.rows.values())
            raise InvalidInputError(f"{error} (of the stream, {before} rows before it are written)") from None
        except BusyError as error:
            before = sum(progress.rows.values())
            raise BusyError(f"{error} (of the stream, {before} rows before it are written)") from None

    def _write(
        self,
        doing: str,
        data: Any,
        progress: _Progress,
        put_id: PutId | None = None,
        patience: float | None = None,
    ) -> None:
        """Shape ``data`` unless it is accepted :class:`Rows`, split it by shard, and write the parts."""
        self._refuse_if_closed()
        accepted = data if isinstance(data, Rows) else None
        batches = accepted.batches if accepted else [b for b in self.batches(data) if b.num_rows]
        if not batches:
            return
        call = threading.Lock()
        try:
            with call:
                # Entered before the rows are shaped and split, which copies them: otherwise each
                # thread would hold its copy while it waits for room in a shard.
                began = time.monotonic()
                if not self._under_way.enter(call, sum([size_of(batch) for batch in batches]), patience):
                    raise BusyError(
                        f"the puts under way hold as many rows as the writer may; this one has waited "
                        f"{time.monotonic() - began:.1f} s. No row of it was written: send it again"
                    )
                if patience is not None:
                    patience = max(0.0, patience - (time.monotonic() - began))
                # Again: close() waits only for calls that entered before it.
                self._refuse_if_closed()
                split: dict[Shard, list[pa.RecordBatch]] = {}
                for batch in (accepted or self._intake.shaped(batches)).batches:
                    for shard, part in self._router.route(batch):
                        split.setdefault(shard, []).append(part)
                parts = {shard: Rows.of(its_batches) for shard, its_batches in split.items()}
                calls = {
                    shard.shard_id: partial(self._write_shard, shard, rows, put_id, patience)
                    for shard, rows in parts.items()
                }
                done, failed = self._run(calls, in_threads=len(calls) > 1 and self._must_wait(calls))
        finally:
            self._under_way.leave(call)
        for shard, rows in parts.items():
            if shard.shard_id in done:
                progress.rows[shard.shard_id] = progress.rows.get(shard.shard_id, 0) + rows.num_rows
                progress.results[shard.shard_id] = done[shard.shard_id]
        if failed:
            raise PartialWriteError(doing, failed, progress.rows) from next(iter(failed.values()))

    def _must_wait(self, shards: Iterable[UUID]) -> bool:
        """Whether writing needs storage round trips, for a claim or for durability."""
        with self._lock:
            writers = [self._slots[shard].writer if shard in self._slots else None for shard in shards]
        return any(writer is None or writer.config.durable_write for writer in writers)

    def _write_shard(
        self, shard: Shard, rows: Rows, put_id: PutId | None, patience: float | None
    ) -> WriteResult:
        with self._lock:
            slot = self._slots.setdefault(shard.shard_id, _Slot())
        # Only threads that need this shard wait here.
        with slot.opening:
            if slot.writer is None:
                slot.writer = self._open_shard(shard)
        writer = slot.writer
        had_ended = not writer.usable
        try:
            return writer.write_rows(rows, put_id, patience)
        except (FencedError, StorageError, OutcomeUnknownError) as error:
            if not self._may_come_back(slot, writer, error, put_id, had_ended):
                raise
            first = error
        try:
            return self._came_back(slot, writer, shard).write_rows(rows, put_id, patience)
        except LanceWalError as error:
            if (told := _of_both(first, error)) is error:
                raise
            raise told from error

    def _may_come_back(
        self, slot: _Slot, lost: ShardWriter, error: LanceWalError, put_id: PutId | None, had_ended: bool
    ) -> bool:
        """Whether the shard may be opened again for the rows that ``lost`` did not accept.

        Not if rows that it did accept may be lost, because the caller has to learn of that. Nor if its last
        rows may be in the log, and would be written twice because there is neither a key nor an id.
        """
        if self._come_back_after is None or not lost.config.durable_write:
            return False
        if not isinstance(error, FencedError):
            # Its log has ended for good. If that was with these rows, a new writer knows only by their id
            # whether they are in it.
            if lost.usable or (put_id is None and not had_ended):
                return False
        elif error.may_be_written and put_id is None and not self._intake.schema.primary_key:
            return False
        return slot.writer is not lost or slot.came_back + self._come_back_after <= time.monotonic()

    def _came_back(self, slot: _Slot, lost: ShardWriter, shard: Shard) -> ShardWriter:
        """A new writer in place of ``lost``; waits until the writer that took the shard is gone."""
        with slot.opening:
            if slot.writer is lost:
                logger.warning("the writer of shard %s has ended; opening it again", shard.shard_id)
                with suppress(LanceWalError):  # all rows that it acknowledged are in the log
                    lost.close()
                slot.writer = self._open_shard(shard)
                slot.came_back = time.monotonic()
            assert slot.writer is not None, "a slot keeps its writer"
            return slot.writer

    def _refuse_if_closed(self) -> None:
        check_process()
        if self._closed:
            raise ClosedError("this table writer is closed; open a new one")

    def _run(
        self, calls: Mapping[UUID, Callable[[], T]], *, in_threads: bool = True
    ) -> tuple[dict[UUID, T], dict[UUID, Exception]]:
        """Run all calls, the last one in this thread; returns results and errors by shard."""
        names = list(calls)
        away = {shard: Task(calls[shard]) for shard in names[:-1]} if in_threads else {}
        done: dict[UUID, T] = {}
        failed: dict[UUID, Exception] = {}
        try:
            for task in away.values():
                self._crew.take(task)
            for shard in names[len(away) :]:
                _settle(shard, calls[shard], done, failed)
            for shard, task in away.items():
                _settle(shard, task.result, done, failed)
        except BaseException:
            # Interrupted: rows that this thread puts next must not be written before these.
            for task in away.values():
                if not task.drop():
                    task.wait()
            raise
        return done, failed


def _check_options(put_id: PutId | None, patience: float | None) -> None:
    check_put_id(put_id)
    is_number = isinstance(patience, Real) and not isinstance(patience, bool)
    if patience is not None and not (is_number and patience >= 0):
        raise InvalidInputError(f"patience is {patience!r}; pass a number of seconds, 0 or more")


def _dropped(crew: Crew, companion: Companion | None) -> None:
    """End the threads of a writer that was dropped without close."""
    crew.dismiss()
    if companion is not None:
        companion.stop(DROPPED_PATIENCE_SECONDS)


def _settle(shard: UUID, call: Callable[[], T], done: dict[UUID, T], failed: dict[UUID, Exception]) -> None:
    try:
        done[shard] = call()
    except Exception as error:
        failed[shard] = error


def _of_both(first: LanceWalError, second: LanceWalError) -> LanceWalError:
    """The error for rows that were tried twice: it must not deny that the first try may have written them."""
    if isinstance(first, OutcomeUnknownError) or getattr(first, "may_be_written", False):
        if isinstance(second, FencedError):
            second.may_be_written = True
        elif not isinstance(second, OutcomeUnknownError):
            return OutcomeUnknownError(
                "the rows may be in the log of a writer that has lost the shard, and were not written "
                f"again: {second}"
            )
    return second


@dataclass
class _Slot:
    """A shard's writer, if it is open; ``writer`` is set under ``opening``, and again after a loss."""

    opening: threading.Lock = field(default_factory=threading.Lock)
    writer: ShardWriter | None = None
    came_back: float = float("-inf")


@dataclass
class _Progress:
    """What one call has written so far; a shard's last result also covers its earlier ones."""

    rows: dict[UUID, int] = field(default_factory=dict)
    results: dict[UUID, WriteResult] = field(default_factory=dict)
