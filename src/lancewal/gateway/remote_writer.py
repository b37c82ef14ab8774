"""The writer of a gateway's client: retries puts until they are answered, and each is written once."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

import pyarrow as pa
from pyarrow import flight

from lancewal.errors import (
    ClosedError,
    InvalidInputError,
    LanceWalError,
    OutcomeUnknownError,
    PartialWriteError,
    ShardOwnedError,
)
from lancewal.format import TableSchema, size_of
from lancewal.gateway.connection import PASSING, Connection, Trying, as_error
from lancewal.gateway.contract import Answer, Numbered, Request
from lancewal.gateway.gathering import Gathering, Group, ThreadPut, Waiting
from lancewal.gateway.received import unfolded_bytes
from lancewal.storage import check_process, is_forked, run_in_background, span, trace_headers
from lancewal.writer import RETRY_WINDOW, Cast, Find, Intake, Matching, is_stream, streamed_batches

logger = logging.getLogger(__name__)

#: A stream that was idle for so many seconds is closed, because it holds a thread of the gateway.
_IDLE_SECONDS = 5.0
#: The most bytes of one part of a delete.
_PART_BYTES = 16 << 20
_FAILED_CALLS = (flight.FlightError, pa.ArrowException, OSError, StopIteration)


@dataclass(frozen=True)
class RemoteResult:
    """The result of one put, delete or update; its rows are durable."""

    num_rows: int

    def done(self) -> bool:
        """Always ``True``: the gateway answers when the rows are durable."""
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Return ``True`` at once, like :meth:`done`."""
        return True


class RemoteWriter:
    """Sends rows to a gateway. Thread-safe; a context manager. Rows are durable when a put returns.

    Puts that arrive while another is being sent go together as one message. Each succeeds or fails
    separately. Rows of one key stay in the order in which one thread puts them.

    >>> import tempfile, lancewal
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1}], key="id")
    >>> with lancewal.Gateway({"t": table}) as gateway, lancewal.connect(gateway.address) as remote:
    ...     with remote.writer() as writer:
    ...         writer.put([{"id": 2}, {"id": 3}]).num_rows, writer.delete([1, 2]).num_rows
    ...     remote.scan().to_table().to_pylist()
    (2, 2)
    [{'id': 3}]
    """

    def __init__(
        self,
        connection: Connection,
        table: str,
        schema: TableSchema,
        cast: Cast,
        *,
        newest: Callable[[], TableSchema],
        find: Find,
    ) -> None:
        """``newest`` reads the table's current columns, and ``find`` reads rows that match a condition."""
        self._connection = connection
        self._table = table
        self._intake = Intake(schema, cast=cast, newest=newest)
        self._matching = Matching(self._intake, find)
        self._cast = cast
        self._session = secrets.token_hex(12)
        self._lock = threading.Lock()
        self._numbers = 0
        self._under_way: dict[int, Group[_Message]] = {}
        self._idle: list[_Stream] = []
        self._closed = False
        self._reaper: threading.Timer | None = None
        self._gathering = Gathering[_Message](self._send)

    @property
    def schema(self) -> pa.Schema:
        """The columns that :meth:`put` accepts."""
        return self._intake.schema.plain

    def batches(self, data: Any) -> list[pa.RecordBatch]:
        """Convert rows in memory, of any form that :meth:`put` accepts, to Arrow; nothing is written."""
        return self._intake.batches(data)

    def put(self, data: Any) -> RemoteResult:
        """Write rows in any form that :meth:`TableWriter.put` accepts.

        Rows in memory are sent as one put, and a stream as one put for each batch.
        """
        if is_stream(data):
            return RemoteResult(self._put_stream(data))
        found = [batch for batch in self.batches(data) if batch.num_rows]
        return RemoteResult(self._gathered("put", _joined(found)) if found else 0)

    def delete(self, keys: Any = None, *, where: str | None = None) -> RemoteResult:
        """Delete rows by key, or rows that match a condition, like :meth:`TableWriter.delete`."""
        keys = self._matching.keys_to_delete(keys, where)
        if keys is None:
            return RemoteResult(0)
        self._intake.deletes(keys)  # refuses invalid keys
        batches = self._intake.key_batches(keys)
        return RemoteResult(
            sum(self._gathered("delete", part) for each in batches for part in self._parts(each))
        )

    def update(
        self, where: str, set: Mapping[str, Any] | None = None, *, set_sql: Mapping[str, str] | None = None
    ) -> RemoteResult:
        """Set columns of the rows that match ``where`` to new values, like :meth:`TableWriter.update`.

        This process reads the rows and sends them back with their new values. If it fails after some rows
        were written, :class:`OutcomeUnknownError` says how many.
        """
        written = 0
        try:
            for rows in self._matching.updated(where, set, set_sql):
                written += self.put(rows).num_rows
        except LanceWalError as error:
            if not written:
                raise
            raise OutcomeUnknownError(f"{written} rows were updated, then: {error}") from error
        return RemoteResult(written)

    def close(self) -> None:
        """Close the streams; all rows that were put are already durable.

        Closing twice is harmless. In a forked child this does nothing, because the streams belong to the
        parent.
        """
        if is_forked():
            return
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            reaper = self._reaper
        if reaper is not None:
            reaper.cancel()
        for stream in idle:
            stream.close()

    def __enter__(self) -> RemoteWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _parts(self, keys: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Parts of the keys of a delete: each key becomes a row with a null in every other column."""
        size = unfolded_bytes(keys, self._intake.plain)
        rows = max(1, -(-keys.num_rows // (size // _PART_BYTES + 1)))
        return [keys.slice(first, rows) for first in range(0, keys.num_rows, rows)]

    def _put_stream(self, stream: Any) -> int:
        written = 0
        try:
            for batch in streamed_batches(stream, self._intake.plain, casts=self._intake.casts):
                if batch.num_rows:
                    written += self._gathered("put", batch)
        except (InvalidInputError, *PASSING) as error:
            # These errors say that nothing was written, which is true of the last batch alone.
            raise type(error)(f"{error} (of the stream, {written} rows before it are written)") from None
        return written

    def _gathered(self, op: str, batch: pa.RecordBatch) -> int:
        """Send one put, alone or with others; returns its rows."""
        check_process()
        if self._closed:
            raise ClosedError("this writer is closed; open a new one")
        return self._gathering.write(ThreadPut(op, [batch], batch.schema, batch.num_rows, size_of(batch)))

    def write_group(self, puts: Sequence[Waiting]) -> None:
        """Send the puts of several callers together, and settle each of them separately."""
        group = Group[_Message](puts)
        try:
            self._send(group)
        except Exception as error:
            group.settle(error)

    def _send(self, group: Group[_Message]) -> None:
        """Send puts as one message until it is answered; if it is refused, send them one by one."""
        if group.apart is None:
            try:
                if group.message is None:
                    group.message = self._begun(group)
                self._send_whole(group, group.message)
                group.settle()
                return
            except InvalidInputError as error:
                if len(group.puts) == 1:
                    raise
                # One of the puts is invalid, so each is sent alone; but not those that an earlier try wrote.
                logger.debug("%d puts are sent one by one: %s", len(group.puts), error)
            group.apart = [Group([put]) for put in group.puts]
        for each in group.apart:
            if each.puts[0].outcome is not None:
                continue
            try:
                self._send(each)
            except LanceWalError as error:
                each.settle(error)

    def _begun(self, group: Group[_Message]) -> _Message:
        batch = _joined([batch for put in group.puts for batch in put.data])
        parts = tuple(put.num_rows for put in group.puts) if len(group.puts) > 1 else ()
        # Writers remember ids only for the retry window, so nothing is sent again after it.
        trying = Trying(min(self._connection.timeout, 0.9 * RETRY_WINDOW))
        with self._lock:
            self._numbers += 1
            self._under_way[self._numbers] = group
            return _Message(group.puts[0].op, batch, parts, self._numbers, trying)

    def _send_whole(self, group: Group[_Message], message: _Message) -> None:
        """Send a message until all its rows are durable; raises errors that a retry would not change."""
        trying = message.trying
        failure: LanceWalError | None
        ended = False
        try:
            while True:
                stream: _Stream | None = None
                turn = self._connection.turn
                answer = Answer(message.number)
                try:
                    stream = self._stream(message.op, message.batch.schema)
                    turn = stream.turn
                    with span("lancewal.call", kind="CLIENT", operation=message.op, served_as=self._table):
                        said = Numbered(message.number, self._settled(), message.parts, trace_headers())
                        answer = stream.send(message.batch, said, trying)
                    failure = answer.error
                    self._give_back(stream)
                except (LanceWalError, *_FAILED_CALLS) as error:
                    # One of our own, such as that of a closed connection, is no answer: it says nothing about
                    # earlier tries.
                    failure = error if isinstance(error, LanceWalError) else as_error(error)
                    if stream is not None:
                        stream.close()
                if isinstance(failure, PartialWriteError):
                    failure = self._left_of(failure, answer, group, message)
                if failure is None:
                    ended = True
                    return
                trying.again(self._connection, turn, failure)
        except Exception:
            ended = True
            raise
        finally:
            # Otherwise this thread was interrupted, and another one continues with the message.
            if ended:
                with self._lock:
                    self._under_way.pop(message.number, None)

    def _left_of(
        self, failure: PartialWriteError, answer: Answer, group: Group[_Message], message: _Message
    ) -> LanceWalError | None:
        """Settle the puts that are written in all their shards; returns the error for the others, if any."""
        # Two gateways may share the shards of one put, so the shards that one of them wrote are remembered.
        message.landed |= failure.written
        left = {shard: each for shard, each in failure.failed.items() if shard not in message.landed}
        if not left:
            return None
        open_puts, landed_puts = (
            {put for shard in shards for put in answer.shards.get(shard, range(len(group.puts)))}
            for shards in (left, message.landed)
        )
        for number, put in enumerate(group.puts):
            if number not in open_puts:
                put.settle(put.num_rows)
                put.wake()
        message.trying.unanswered |= bool(open_puts & landed_puts)
        if all(isinstance(each, (*PASSING, ShardOwnedError)) for each in left.values()):
            return cast("LanceWalError", next(iter(left.values())))
        return failure

    def _settled(self) -> int:
        """The highest settled number: it and all lower numbers are never sent again."""
        with self._lock:
            self._under_way = {
                number: group for number, group in self._under_way.items() if not group.is_abandoned
            }
            return min(self._under_way, default=self._numbers + 1) - 1

    def _stream(self, op: str, schema: pa.Schema) -> _Stream:
        """An idle stream for these columns, or a new one."""
        found = None
        with self._lock:
            fresh = [each for each in self._idle if self._is_fresh(each)]
            stale = [each for each in self._idle if each not in fresh]
            self._idle = fresh
            for position in range(len(self._idle) - 1, -1, -1):
                if self._idle[position].takes(op, schema):
                    found = self._idle.pop(position)
                    break
        for each in stale:
            each.close()
        if found is not None:
            return found
        client, turn = self._connection.client()
        args = {"session": self._session, **({} if self._cast == "numbers" else {"cast": self._cast})}
        command = flight.FlightDescriptor.for_command(Request(op, self._table, args).encode())
        # The timeout applies to all puts of a stream together, so an old stream is not reused. Without a
        # timeout, a put to a machine that vanished would wait for ever.
        options = self._connection.options(2 * self._connection.timeout)
        writer, reader = client.do_put(command, schema, options)
        return _Stream(op, schema, turn, writer, reader, opened=time.monotonic())

    def _is_fresh(self, stream: _Stream) -> bool:
        young = time.monotonic() - stream.opened < self._connection.timeout
        return young and stream.turn == self._connection.turn and not self._connection.closed

    def _give_back(self, stream: _Stream) -> None:
        stream.idle_since = time.monotonic()
        with self._lock:
            kept = not self._closed and self._has_reaper()
            if kept:
                self._idle.append(stream)
        if not kept:
            stream.close()

    def _has_reaper(self) -> bool:
        """Whether idle streams will be closed; starts the timer for that. Requires the lock."""
        if self._reaper is None:
            reaper = threading.Timer(_IDLE_SECONDS, self._close_idle)
            reaper.daemon = True
            try:
                reaper.start()
            except RuntimeError as error:  # no thread is left, and the rows are written all the same
                logger.debug("no stream is kept: %s", error)
                return False
            self._reaper = reaper
        return True

    def _close_idle(self) -> None:
        """Close streams that were idle for a while, because each holds a thread of the gateway."""
        now = time.monotonic()
        with self._lock:
            idle = [each for each in self._idle if now - each.idle_since >= _IDLE_SECONDS]
            self._idle = [each for each in self._idle if now - each.idle_since < _IDLE_SECONDS]
            self._reaper = None
            if self._idle and (self._closed or not self._has_reaper()):
                idle, self._idle = [*idle, *self._idle], []
        for each in idle:
            run_in_background(each.close)


@dataclass(eq=False)
class _Message:
    """The rows of one or more puts under one number, and the shards that have written them so far."""

    op: str
    batch: pa.RecordBatch
    #: The number of rows of each put, if there are several.
    parts: tuple[int, ...]
    number: int
    trying: Trying
    landed: dict[UUID, int] = field(default_factory=dict)


@dataclass(eq=False)
class _Stream:
    """An open ``DoPut``: one thread at a time sends a put and reads its answer."""

    op: str
    schema: pa.Schema
    turn: int
    writer: flight.FlightStreamWriter
    reader: flight.FlightMetadataReader
    opened: float
    idle_since: float = field(default=0.0)

    def takes(self, op: str, schema: pa.Schema) -> bool:
        return op == self.op and bool(schema.equals(self.schema, check_metadata=True))

    def send(self, batch: pa.RecordBatch, numbered: Numbered, trying: Trying) -> Answer:
        before, trying.unanswered = trying.unanswered, True
        try:
            self.writer.write_with_metadata(batch, numbered.encode())
            said = self.reader.read()
            if said is None:
                self.writer.close()  # raises what ended the stream
        except flight.FlightError as error:
            if error.extra_info:
                trying.unanswered = before  # the gateway itself refused, so this attempt wrote nothing
            raise
        if said is None:
            raise flight.FlightUnavailableError("the gateway ended the stream without an answer")
        answer = Answer.decode(said.to_pybytes())
        if answer.number != numbered.number and (answer.number is not None or answer.error is None):
            raise flight.FlightInternalError(f"put {numbered.number} got the answer to {answer.number}")
        trying.unanswered = before  # an answer is only about its own attempt, not about earlier ones
        return answer

    def close(self) -> None:
        # The gateway may be gone; all answered rows are durable.
        with contextlib.suppress(pa.ArrowException, OSError):
            self.writer.done_writing()
        with contextlib.suppress(pa.ArrowException, OSError):
            self.writer.close()


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """All rows as one batch, because a batch is a put."""
    if len(batches) == 1:
        return batches[0]
    try:
        return pa.concat_batches(batches)
    except pa.ArrowInvalid as error:
        raise InvalidInputError(f"the batches of one put have different columns: {error}") from None
