"""asyncio: the methods of a table and its writer as coroutines, for local and served tables.

Puts that are awaited at the same time are gathered: while one call runs, new puts wait, and the next call
writes them together. So one thread writes for any number of coroutines, and more coroutines need fewer calls
per put, as in the group commit itself. All coroutines of a call hear its outcome at once, and the next call
waits a moment for them to put again. A put that is refused fails alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from lancewal.errors import BusyError, ClosedError, InvalidInputError, PartialWriteError
from lancewal.format import size_of
from lancewal.gateway.client import RemoteTable, RemoteView
from lancewal.gateway.gathering import Turnout, Waiting, own_copy, take_group
from lancewal.gateway.remote_writer import RemoteWriter
from lancewal.reader import TableView
from lancewal.storage import Bell, check_process, is_forked, run_in_background
from lancewal.table import Table
from lancewal.writer import TableWriter, as_batches, is_stream

logger = logging.getLogger(__name__)

#: The most concurrent reads of one :class:`AsyncTable`; further reads wait.
_READERS = 16

T = TypeVar("T")


class _Writer(Protocol):
    def batches(self, data: Any) -> list[pa.RecordBatch]: ...

    def put(self, data: Any) -> Any: ...

    def delete(self, keys: Any = None, *, where: str | None = None) -> Any: ...

    def update(
        self, where: str, set: Mapping[str, Any] | None = None, *, set_sql: Mapping[str, str] | None = None
    ) -> Any: ...

    def close(self) -> None: ...


class AsyncView:
    """Reads of a table, now or at a checkpoint, for asyncio; see :class:`~lancewal.TableView`."""

    def __init__(self, table: TableView | RemoteView) -> None:
        self._view = table
        self._threads = ThreadPoolExecutor(_READERS, "lancewal-async-read")
        self._closed = False

    async def scan(self, *args: Any, **how: Any) -> pa.Table:
        """All matching rows as a table; takes the arguments of ``Table.scan``."""
        return await self._run(lambda: self._view.scan(*args, **how).to_table())

    async def batches(self, *args: Any, **how: Any) -> AsyncIterator[pa.RecordBatch]:
        """The rows batch by batch; takes the arguments of ``Table.scan``."""
        reader = await self._run(lambda: self._view.scan(*args, **how).to_batches())
        while True:
            batch = await self._run(lambda: next(reader, None))
            if batch is None:
                return
            yield batch

    async def count_rows(self, filter: str | None = None) -> int:
        """The number of rows."""
        return await self._run(lambda: self._view.count_rows(filter))

    async def lookup(self, keys: Any, columns: Sequence[str] | None = None) -> Any:
        """The newest rows of some keys, like ``Table.lookup``."""
        return await self._run(lambda: self._view.lookup(keys, columns))

    async def search(self, *args: Any, **how: Any) -> pa.Table:
        """Like ``Table.search``."""
        return await self._run(lambda: self._view.search(*args, **how))

    async def vector_search(self, *args: Any, **how: Any) -> pa.Table:
        """Like ``Table.vector_search``."""
        return await self._run(lambda: self._view.vector_search(*args, **how))

    async def full_text_search(self, *args: Any, **how: Any) -> pa.Table:
        """Like ``Table.full_text_search``."""
        return await self._run(lambda: self._view.full_text_search(*args, **how))

    async def hybrid_search(self, *args: Any, **how: Any) -> pa.Table:
        """Like ``Table.hybrid_search``."""
        return await self._run(lambda: self._view.hybrid_search(*args, **how))

    async def sql(self, query: str) -> pa.Table:
        """Like ``Table.sql``."""
        return await self._run(lambda: self._view.sql(query))

    def close(self) -> None:
        """End the threads after their current reads; the table itself stays open."""
        self._closed = True
        self._threads.shutdown(wait=False)

    async def _run(self, call: Callable[[], T]) -> T:
        check_process()  # first: a forked child does not have the threads, and would wait for ever
        if self._closed:
            raise ClosedError("this AsyncTable is closed; make a new one of its table")
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


class AsyncTable(AsyncView):
    """A :class:`~lancewal.Table`, or a table from :func:`lancewal.connect`, for asyncio.

    >>> import tempfile, lance, lancewal
    >>> uri = tempfile.mkdtemp() + "/events"
    >>> _ = lance.write_dataset(pa.schema([("id", pa.int64())]).empty_table(), uri)
    >>> async def run():
    ...     table = AsyncTable(lancewal.initialize(uri, unsharded=True))
    ...     async with table.writer() as writer:
    ...         await asyncio.gather(*(writer.put(pa.table({"id": [i]})) for i in range(100)))
    ...     return await table.count_rows()
    >>> asyncio.run(run())
    100
    """

    def __init__(self, table: Table | RemoteTable) -> None:
        super().__init__(table)
        self.table = table

    def writer(self, **settings: Any) -> AsyncWriter:
        """An :class:`AsyncWriter`; takes the settings of the table's own ``writer``."""
        return AsyncWriter(lambda: self.table.writer(**settings))

    async def at(self, name: str) -> AsyncView:
        """The rows and columns of a checkpoint, like ``Table.at``."""
        return AsyncView(await self._run(lambda: self.table.at(name)))

    async def flush(self) -> None:
        """Like ``Table.flush``."""
        await self._run(self.table.flush)

    async def status(self) -> Any:
        """Like ``Table.status``."""
        return await self._run(self.table.status)


@dataclass(eq=False)
class _Awaited(Waiting):
    """One put, delete or update, and the coroutine that awaits it."""

    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[int]
    #: Shared by all operations of a writer: those with an outcome that their event loops do not know yet.
    #: Only the thread that writes uses it.
    settled: list[_Awaited]

    def settle(self, outcome: int | BaseException) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self.settled.append(self)

    def wake(self) -> None:
        """Tell the event loops all outcomes at once.

        Told one by one, the first coroutine would put its next rows while the others still wait, and the
        next message would have one put instead of all.
        """
        if not self.settled:
            return
        settled = self.settled.copy()
        self.settled.clear()
        for loop in {id(each.loop): each.loop for each in settled}.values():
            # The loop may have been closed while the rows were written: then no coroutine awaits them.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_tell, [each for each in settled if each.loop is loop])


def _tell(settled: Sequence[_Awaited]) -> None:
    """Give coroutines their outcomes, in their event loop. Those that were cancelled get none."""
    for each in settled:
        done, outcome = each.done, each.outcome
        # The error's frames have the operation. Together they would keep its rows in memory.
        each.data, each.outcome = None, 0
        del each.done
        if done.done():
            continue
        if isinstance(outcome, int):
            done.set_result(outcome)
        elif outcome is not None:
            done.set_exception(outcome)


class AsyncWriter:
    """Puts as coroutines; an asynchronous context manager. Get one from :meth:`AsyncTable.writer`.

    ``await put(rows)`` returns the number of rows when they are durable (if the writer has
    ``durable_write``). Puts that one coroutine awaits one after the other keep their order. If a coroutine
    is cancelled while it waits, its rows may or may not be written; those that were not sent yet are dropped.

    >>> import asyncio, tempfile, lancewal
    >>> async def main() -> tuple[int, int]:
    ...     table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1}], key="id")
    ...     events = lancewal.AsyncTable(table)
    ...     async with events.writer() as writer:
    ...         await writer.put([{"id": 2}, {"id": 3}])
    ...         await writer.delete(1)
    ...         await events.flush()
    ...         found = await events.lookup([2, 9])
    ...         return await events.count_rows(), found.table.num_rows
    >>> asyncio.run(main())
    (2, 1)
    """

    def __init__(self, open_writer: Callable[[], _Writer]) -> None:
        self._line = _Line(open_writer)
        self._batches: Callable[[Any], list[pa.RecordBatch]] | None = None
        # The thread does not keep this object alive. If the object is dropped without close, the thread ends.
        weakref.finalize(self, self._line.end).atexit = False

    async def put(self, data: Any) -> int:
        """Write rows in any form that the writer's ``put`` accepts, except streams."""
        check_process()  # first: a forked child may wait for ever for a lock that a thread of the parent held
        if is_stream(data):
            raise InvalidInputError(
                "an asynchronous put takes rows that are in memory; put a stream's batches"
            )
        if self._batches is None and not isinstance(data, (pa.RecordBatch, pa.Table)):
            # The table's columns and the writer's settings decide the types of Python rows.
            self._batches = await asyncio.get_running_loop().run_in_executor(
                None, lambda: self._line.opened().batches
            )
        batches = [batch for batch in (self._batches or as_batches)(data) if batch.num_rows]
        if not batches:
            return 0
        rows, num_bytes = sum([batch.num_rows for batch in batches]), sum([size_of(each) for each in batches])
        return await self._submit("put", batches, batches[0].schema, rows, num_bytes)

    async def delete(self, keys: Any = None, *, where: str | None = None) -> int:
        """Delete rows by key, or rows that match a condition, like the writer's ``delete``."""
        return await self._submit("delete", {"keys": keys, "where": where})

    async def update(
        self, where: str, set: Mapping[str, Any] | None = None, *, set_sql: Mapping[str, str] | None = None
    ) -> int:
        """Set columns of the rows that match ``where`` to new values, like the writer's ``update``."""
        return await self._submit("update", {"where": where, "set": set, "set_sql": set_sql})

    async def close(self) -> None:
        """Write everything that waits, and close the writer. Raises what its ``close`` raises.

        In a forked child this does nothing, because the writer and its thread belong to the parent.
        """
        if is_forked():
            return
        self._line.close()
        await asyncio.get_running_loop().run_in_executor(None, self._line.wait_until_closed)

    async def __aenter__(self) -> AsyncWriter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _submit(
        self, op: str, data: Any, schema: pa.Schema | None = None, rows: int = 0, num_bytes: int = 0
    ) -> int:
        check_process()  # first: a forked child has no thread that writes, and would wait for ever
        loop = asyncio.get_running_loop()
        settled = self._line.settled
        waiting = _Awaited(op, data, schema, rows, num_bytes, loop, loop.create_future(), settled)
        self._line.add(waiting)
        try:
            return await waiting.done
        except asyncio.CancelledError:
            self._line.forget(waiting)
            raise


class _Line:
    """The queue of what waits to be written, and the thread that writes it in order of arrival."""

    def __init__(self, open_writer: Callable[[], _Writer]) -> None:
        self._open_writer = open_writer
        self._opening = threading.Lock()
        self._writer: _Writer | None = None
        self._lock = threading.Lock()
        self._come = Bell()
        self._turnout = Turnout()
        self._waiting: dict[_Awaited, None] = {}
        #: The thread is woken when so many operations wait.
        self._wanted = 1
        self.settled: list[_Awaited] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        self._writer_closed = False
        self._ended: Exception | None = None

    def add(self, waiting: _Awaited) -> None:
        """Queue an operation for the thread, which starts with the first one."""
        with self._lock:
            if self._closed:
                raise ClosedError("this writer is closed; open a new one")
            if self._thread is None:
                self._thread = self._started()
            self._waiting[waiting] = None
            is_wanted = len(self._waiting) >= self._wanted
        if is_wanted:
            self._come.ring()

    def forget(self, waiting: _Awaited) -> None:
        """Drop an operation, unless the thread is writing it."""
        with self._lock:
            self._waiting.pop(waiting, None)

    def opened(self) -> _Writer:
        """The writer; the first caller opens it. Call it in a thread that may wait."""
        with self._opening:
            if self._writer_closed:
                raise ClosedError("this writer is closed; open a new one")
            if self._writer is None:
                self._writer = self._open_writer()
            return self._writer

    def close(self) -> None:
        """Accept nothing more."""
        with self._lock:  # so that nothing is added while the thread ends
            self.end()

    def end(self) -> None:
        """Like :meth:`close`, if nothing more can be added. Takes no lock: the garbage collector calls it."""
        self._closed = True
        self._come.ring()

    def wait_until_closed(self) -> None:
        """Wait until everything is written and the writer is closed; raises what its ``close`` raised."""
        with self._lock:
            thread = self._thread
        if thread is None:
            self._close_writer()
        else:
            thread.join()
        ended, self._ended = self._ended, None
        if ended is not None:
            raise ended

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._write_all, name="lancewal-async-write", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise BusyError(f"no thread is left to write rows ({error}); nothing was written") from error
        return thread

    def _write_all(self) -> None:
        """Run the writing thread until this writer is closed and nothing waits."""
        while group := self._next_group():
            run_in_background(partial(self._write_group, group))
            del group  # otherwise the last rows and their coroutines would stay in memory until new ones come
        run_in_background(self._close_writer)

    def _write_group(self, group: list[_Awaited]) -> None:
        began = time.monotonic()
        try:
            _write(self.opened(), group)
        except BaseException as error:  # a panic of Lance is no Exception, and all would wait for ever
            for each in group:
                each.settle(own_copy(error))
        finally:
            # Before they are told: who puts again at once would be counted twice.
            self._turnout.note(len(group), len(self._waiting), time.monotonic() - began)
            group[0].wake()

    def _next_group(self) -> list[_Awaited]:
        """The next operations that are written together; empty at the end."""
        while True:
            self._wait_for(1)
            if left := self._turnout.seconds_left(len(self._waiting)):
                self._wait_for(self._turnout.expected, left)
            with self._lock:
                group = take_group(self._waiting)
                if group or self._closed:  # all coroutines may have been cancelled meanwhile
                    return group

    def _wait_for(self, number: int, seconds: float | None = None) -> None:
        """Wait until so many operations wait, or the writer is closed, or time is over."""
        self._wanted = number
        self._come.wait_for(lambda: len(self._waiting) >= number or self._closed, seconds)

    def _close_writer(self) -> None:
        with self._opening:
            self._writer_closed = True
        try:
            if self._writer is not None:
                self._writer.close()
        except Exception as error:
            logger.debug("the writer of coroutines was closed with an error", exc_info=True)
            self._ended = error


def _write(writer: _Writer, group: list[_Awaited]) -> None:
    """Write a group, and settle each of its operations separately. The caller wakes who waits."""
    if len(group) > 1 and isinstance(writer, RemoteWriter):
        writer.write_group(group)
        return
    try:
        if len(group) > 1:
            writer.put([batch for each in group for batch in each.data])
            for each in group:
                each.settle(each.num_rows)
            return
    except InvalidInputError:
        pass  # Nothing was written. One of the puts is invalid, so each is written alone.
    except BaseException as error:
        for each in group:
            each.settle(each.num_rows if _is_written(writer, each, error) else own_copy(error))
        return
    for each in group:
        try:
            each.settle(_written(writer, each))
        except BaseException as error:
            each.settle(error)
        each.wake()


def _written(writer: _Writer, each: _Awaited) -> int:
    """Write one operation alone; returns its rows."""
    if each.op == "put":
        result = writer.put(each.data)
    else:
        result = (writer.delete if each.op == "delete" else writer.update)(**each.data)
    return int(result.num_rows)


def _is_written(writer: _Writer, put: _Awaited, error: BaseException) -> bool:
    """Whether a put of a group is written although some shards failed: it has no rows in those shards."""
    if not isinstance(error, PartialWriteError) or not isinstance(writer, TableWriter):
        return False
    return writer.shards_of(put.data).isdisjoint(error.failed)
