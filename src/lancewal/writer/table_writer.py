"""TableWriter: takes a table's rows, sends each to its shard, and writes the shards side by side."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, TypeVar
from uuid import UUID

import pyarrow as pa

from lancewal.errors import (
    ClosedError,
    FencedError,
    InvalidInputError,
    LanceWalError,
    OutcomeUnknownError,
    PartialWriteError,
    StorageError,
)
from lancewal.format import PutId, TableSchema
from lancewal.shard import Shard, ShardRouter
from lancewal.storage import Crew, Room, Task, check_process, is_forked
from lancewal.writer.intake import Cast, Intake, Rows
from lancewal.writer.matching import Find, Matching
from lancewal.writer.rows import is_stream, streamed_batches
from lancewal.writer.shard_writer import ShardWriter, WriteResult
from lancewal.writer.state import DROPPED_PATIENCE_SECONDS, WriteStatsSnapshot, added, close_after

logger = logging.getLogger(__name__)

#: Threads that wait for the storage of one shard each; started as they are needed. More of them pay where a
#: request takes long.
MAX_CONCURRENT_SHARDS = 16
_REMOTE_SHARDS = 64

T = TypeVar("T")


@dataclass(frozen=True)
class TableWriteResult:
    """What one put or delete did: its rows, and the last write of each shard that it went to.

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
    """Something that runs beside a writer and ends with it."""

    def stop(self, timeout: float | None = None) -> None:
        """Begin nothing more."""

    def close(self) -> None:
        """Do what is left to do; called when all shards are closed."""


class TableWriter:
    """Writes rows to the shards they belong to. Thread-safe; a context manager.

    Open one with ``Table.writer``. A shard is claimed when its first row comes, and held until
    :meth:`close`. Where another writer has it, ``take_over`` of ``Table.writer`` decides. With "when_gone"
    a writer that lost a shard, because it was taken for gone, comes back when the other one is: the
    put that finds out waits and is written by the new claim. Whoever loses it again within a lease gets
    the :class:`FencedError`, so that no two take a shard from each other without end.

    Rows of one key stay in the order in which one thread puts them.

    A call either refuses its input (:class:`InvalidInputError`, nothing is written) or goes
    to all its shards. Where one of them fails, the others' rows are written nevertheless, and
    :class:`PartialWriteError` says which is which. A batch is atomic within a shard, not
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
        """``max_bytes_in_hand`` bounds what the puts of all threads have shaped and split at a time.

        ``companion`` is there as long as this writer is. ``find`` reads the rows that match a condition.

        A shard that was lost is opened again, but not twice within ``come_back_after`` seconds (``None``:
        never).
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
        """The columns that :meth:`put` takes."""
        return self._intake.schema.plain

    def batches(self, data: Any) -> list[pa.RecordBatch]:
        """Rows that are in memory, in any form that :meth:`put` takes, as Arrow; nothing is written."""
        return self._intake.batches(data)

    @property
    def shard_writers(self) -> Mapping[UUID, ShardWriter]:
        """The writers of the shards that rows went to so far."""
        check_process()
        with self._lock:
            slots = dict(self._slots)
        return MappingProxyType({shard: slot.writer for shard, slot in slots.items() if slot.writer})

    def intake(self, cast: Cast) -> Intake:
        """What accepts rows for this writer with another ``cast``; :meth:`put` takes what it gives."""
        return self._intake.casting(cast)

    def shards_of(self, data: Any) -> set[UUID]:
        """The shards that rows belong to: rows to put, or what an :meth:`intake` gave."""
        rows = data if isinstance(data, Rows) else self._intake.upserts(data)
        return {shard.shard_id for batch in rows.batches for shard, _ in self._router.route(batch)}

    def put(
        self, data: Any, *, put_id: PutId | None = None, patience: float | None = None
    ) -> TableWriteResult:
        """Write rows: a dict or dataclass for one row, or many as a list of them, a pandas or polars frame, a
        structured numpy array, a RecordBatch or Table, a list of these, or a stream.

        Columns are matched by name, in any order; a nullable one may be missing. Values are taken as the
        writer's ``cast`` says (:meth:`Table.writer`). A vector that does not come as Arrow, such as a list of
        Python's floats, which are doubles, is rounded to the column's precision, float32 as a rule. What
        does not fit is refused with its column and row; so is a time zone that would have to be guessed or
        dropped, unless it is UTC. Returns when the rows are readable and, with
        ``durable_write``, in the WAL.

        What is in memory is checked as a whole before its first row is written. A stream (a
        RecordBatchReader, an iterator of rows or batches, any other object with
        ``__arrow_c_stream__``) is checked and written batch by batch and never held whole:
        when a batch is refused, those before it are written.

        With a ``put_id`` rows that landed under the same id before, also through another writer, are not
        written again: send the very same rows. ``patience`` bounds the seconds that a put waits for
        room in memory; a shard that has none by then fails with :class:`BusyError`.
        """
        progress = _Progress()
        if not isinstance(data, pa.RecordBatch | pa.Table) and is_stream(data):
            if put_id is not None:
                raise InvalidInputError("a stream is several puts, so it takes no put_id; put its batches")
            self._put_stream(data, progress)
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
        """Delete rows by key: one, several (a list, set, array or Series), or a table with the key columns.

        Or those that match ``where``, SQL as ``Table.scan`` takes it: their keys are read at one state of the
        table, and deleted. A row that another writer changes in between is deleted all the same, and
        one that comes to match in between stays.

        A single text that is an SQL condition on the table's columns is refused as a key; in a list it is
        one. ``put_id`` and ``patience`` as in :meth:`put`.
        """
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
        """Give columns of the rows that match ``where`` new values.

        ``where`` is SQL as ``Table.scan`` takes it. ``set`` has a Python value for a column, the same for all
        rows; ``set_sql`` an expression over the row as it was, as in ``{"n": "n + 1"}``. Rows are read at one
        state of the table and written again, batch by batch: what another writer changes in one of them in
        between is overwritten, and a row that comes to match in between stays as it is. Where an expression
        gives a row no value that its column takes, the error says how many rows were written before it.
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
        """Flush the MemTables of all shards that rows went to, and wait until they are published."""

        def flush(writer: ShardWriter) -> None:
            writer.force_seal_active()
            writer.wait_for_flush_drain()

        self._refuse_if_closed()
        call = threading.Lock()
        try:
            with call:
                self._under_way.enter(call)
                self._refuse_if_closed()
                writers = self.shard_writers
                _, failed = self._run({shard: partial(flush, writer) for shard, writer in writers.items()})
        finally:
            self._under_way.leave(call)
        if failed:
            raise PartialWriteError("flush", failed, {}) from next(iter(failed.values()))

    def stats(self) -> WriteStatsSnapshot:
        """The counters of all shard writers, added up."""
        return reduce(added, [writer.stats() for writer in self.shard_writers.values()], WriteStatsSnapshot())

    def close(self) -> None:
        """Wait for writes under way, close every shard's writer, and end all threads.

        Raises :class:`PartialWriteError` when the last rows of some shards could not be
        flushed; what was acknowledged is in their WAL. Closing twice is harmless, and one that was
        interrupted is completed by the next. In a forked child it does nothing: the writer is its
        parent's.
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

    def _put_stream(self, stream: Any, progress: _Progress) -> None:
        try:
            for batch in streamed_batches(stream, self._intake.plain, casts=self._intake.casts):
                self._write("put", batch, progress)
        except InvalidInputError as error:
            before = sum(progress.rows.values())
            raise InvalidInputError(f"{error} (of the stream, {before} rows before it are written)") from None

    def _write(
        self,
        doing: str,
        data: Any,
        progress: _Progress,
        put_id: PutId | None = None,
        patience: float | None = None,
    ) -> None:
        """Shape ``data`` unless it is accepted :class:`Rows`, split it by shard, and write that."""
        self._refuse_if_closed()
        accepted = data if isinstance(data, Rows) else None
        batches = accepted.batches if accepted else [b for b in self.batches(data) if b.num_rows]
        if not batches:
            return
        call = threading.Lock()
        try:
            with call:
                # Before the rows are shaped and split, which copies them: each thread would
                # have its copy in hand while it waits for room in a shard.
                self._under_way.enter(call, sum([batch.nbytes for batch in batches]))
                # Again: close() waits for those only that were under way before it.
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
        """Whether writing takes storage round trips: for a claim, or for durability."""
        with self._lock:
            writers = [self._slots[shard].writer if shard in self._slots else None for shard in shards]
        return any(writer is None or writer.config.durable_write for writer in writers)

    def _write_shard(
        self, shard: Shard, rows: Rows, put_id: PutId | None, patience: float | None
    ) -> WriteResult:
        with self._lock:
            slot = self._slots.setdefault(shard.shard_id, _Slot())
        # Whoever waits here needs this very shard; all others go on.
        with slot.opening:
            if slot.writer is None:
                slot.writer = self._open_shard(shard)
        writer = slot.writer
        try:
            return writer.write_rows(rows, put_id, patience)
        except (FencedError, StorageError, OutcomeUnknownError) as error:
            if not self._may_come_back(slot, writer, error, put_id):
                raise
            first = error
        try:
            return self._came_back(slot, writer, shard).write_rows(rows, put_id, patience)
        except LanceWalError as error:
            if (told := _of_both(first, error)) is error:
                raise
            raise told from error

    def _may_come_back(
        self, slot: _Slot, lost: ShardWriter, error: LanceWalError, put_id: PutId | None
    ) -> bool:
        """Whether the shard may be opened again for the rows that ``lost`` did not take.

        Not where rows that it did take are lost, which its caller has to hear of, nor where its last rows
        may be in the log and would come twice, for want of a key or an id.
        """
        if self._come_back_after is None or not lost.config.durable_write:
            return False
        if not isinstance(error, FencedError):
            # Its log failed for good. Only an id tells a new writer whether the rows are in it.
            if put_id is None or lost.usable:
                return False
        elif error.may_be_written and put_id is None and not self._intake.schema.primary_key:
            return False
        return slot.writer is not lost or slot.came_back + self._come_back_after <= time.monotonic()

    def _came_back(self, slot: _Slot, lost: ShardWriter, shard: Shard) -> ShardWriter:
        """A new writer in the place of ``lost``; waits until whoever took the shard is gone."""
        with slot.opening:
            if slot.writer is lost:
                logger.warning("the writer of shard %s has ended; opening it again", shard.shard_id)
                with suppress(LanceWalError):  # all that it acknowledged is in the log
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
        """All calls, the last one in this thread; results and errors by shard."""
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
            # Interrupted: rows that this thread puts next must not come before these.
            for task in away.values():
                if not task.drop():
                    task.wait()
            raise
        return done, failed


def _dropped(crew: Crew, companion: Companion | None) -> None:
    """The writer was dropped without close: nothing goes on without it."""
    crew.dismiss()
    if companion is not None:
        companion.stop(DROPPED_PATIENCE_SECONDS)


def _settle(shard: UUID, call: Callable[[], T], done: dict[UUID, T], failed: dict[UUID, Exception]) -> None:
    try:
        done[shard] = call()
    except Exception as error:
        failed[shard] = error


def _of_both(first: LanceWalError, second: LanceWalError) -> LanceWalError:
    """What a caller has to know of rows that were tried twice: the second try must not deny the first."""
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
    """A shard's place in the writer; ``writer`` is set under ``opening``, again when it came back."""

    opening: threading.Lock = field(default_factory=threading.Lock)
    writer: ShardWriter | None = None
    came_back: float = float("-inf")


@dataclass
class _Progress:
    """What one call has written so far; the last result of a shard stands for all before it."""

    rows: dict[UUID, int] = field(default_factory=dict)
    results: dict[UUID, WriteResult] = field(default_factory=dict)
