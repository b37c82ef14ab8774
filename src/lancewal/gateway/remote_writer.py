"""The writer of a client: puts that are sent until they are answered, and land once."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

import pyarrow as pa
from pyarrow import flight

from lancewal.errors import (
    ClosedError,
    InvalidInputError,
    LanceWalError,
    PartialWriteError,
    ShardOwnedError,
)
from lancewal.format import TableSchema
from lancewal.gateway.connection import PASSING, Connection, Trying, as_error
from lancewal.gateway.contract import Answer, Numbered, Request
from lancewal.storage import check_process, span, trace_headers
from lancewal.writer import RETRY_WINDOW, Cast, Intake, is_stream, streamed_batches

#: A connection that no put uses for so long is given back to the gateway.
_IDLE_SECONDS = 5.0


@dataclass(frozen=True)
class RemoteResult:
    """What one put or delete did; its rows are durable."""

    num_rows: int

    def done(self) -> bool:
        """Always: the gateway answers when the rows are durable."""
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Returns at once, as :meth:`done`."""
        return True


class RemoteWriter:
    """Sends rows to a gateway. Thread-safe; a context manager. Rows are durable when a put returns.

    Each thread that puts at the same time has a stream of its own; rows of one key stay in the order in
    which one thread puts them.

    >>> import tempfile, lancewal
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1}], key="id")
    >>> with lancewal.Gateway({"t": table}) as gateway, lancewal.connect(gateway.address) as remote:
    ...     with remote.writer() as writer:
    ...         writer.put([{"id": 2}, {"id": 3}]).num_rows, writer.delete([1, 2]).num_rows
    ...     remote.scan().to_table().to_pylist()
    (2, 2)
    [{'id': 3}]
    """

    def __init__(self, connection: Connection, table: str, schema: TableSchema, cast: Cast) -> None:
        self._connection = connection
        self._table = table
        self._intake = Intake(schema, cast=cast)
        self._cast = cast
        self._session = secrets.token_hex(12)
        self._lock = threading.Lock()
        self._numbers = 0
        self._under_way: set[int] = set()
        self._idle: list[_Stream] = []
        self._closed = False
        self._reaper: threading.Timer | None = None

    @property
    def schema(self) -> pa.Schema:
        """The columns that :meth:`put` takes."""
        return self._intake.schema.plain

    def put(self, data: Any) -> RemoteResult:
        """Write rows: what :meth:`TableWriter.put` takes. Large ones are sent as several puts."""
        batches = (
            streamed_batches(data, self._intake.plain)
            if is_stream(data)
            else _joined(self._intake.batches(data))
        )
        return RemoteResult(sum(self._send("put", batch) for batch in batches if batch.num_rows))

    def delete(self, keys: Any) -> RemoteResult:
        """Delete rows by key: what :meth:`TableWriter.delete` takes."""
        self._intake.deletes(keys)  # refuses what is no key
        return RemoteResult(sum(self._send("delete", batch) for batch in self._intake.key_batches(keys)))

    def close(self) -> None:
        """Give the streams back; what was put is durable already. Closing twice is harmless."""
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

    def _send(self, op: str, batch: pa.RecordBatch) -> int:
        """Send one put until it is answered; its rows."""
        # Ids are known for the retry window, so nothing is sent again after it.
        trying = Trying(min(self._connection.timeout, 0.9 * RETRY_WINDOW))
        number, rows = self._next_number(), 0
        landed: dict[UUID, int] = {}
        try:
            while True:
                stream: _Stream | None = None
                turn = self._connection.turn
                try:
                    stream = self._stream(op, batch.schema)
                    turn = stream.turn
                    with span("lancewal.call", kind="CLIENT", operation=op, served_as=self._table):
                        answer = stream.send(
                            batch, Numbered(number, self._settled(), trace_headers()), trying
                        )
                    rows, failure = answer.rows, answer.error
                    self._give_back(stream)
                except (flight.FlightError, pa.ArrowException, OSError, StopIteration) as error:
                    failure = as_error(error)
                    if stream is not None:
                        stream.close()
                if failure is None:
                    return rows
                if isinstance(failure, PartialWriteError):
                    # Two gateways may have the shards of one put between them: what one of them wrote stays.
                    landed |= failure.written
                    left = [each for shard, each in failure.failed.items() if shard not in landed]
                    if not left:
                        return sum(landed.values())
                    trying.unanswered |= bool(landed)
                    if all(isinstance(each, (*PASSING, ShardOwnedError)) for each in left):
                        failure = cast("LanceWalError", left[0])
                trying.again(self._connection, turn, failure)
        finally:
            with self._lock:
                self._under_way.discard(number)

    def _next_number(self) -> int:
        check_process()
        with self._lock:
            if self._closed:
                raise ClosedError("this writer is closed; open a new one")
            self._numbers += 1
            self._under_way.add(self._numbers)
            return self._numbers

    def _settled(self) -> int:
        """Numbers up to this one are never sent again."""
        with self._lock:
            return min(self._under_way) - 1

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
        # The timeout is that of all puts of a stream together, so an old stream is not used for another.
        # Without one, a put to a machine that vanished would wait for ever.
        options = self._connection.options(2 * self._connection.timeout)
        writer, reader = client.do_put(command, schema, options)
        return _Stream(op, schema, turn, writer, reader, opened=time.monotonic())

    def _is_fresh(self, stream: _Stream) -> bool:
        young = time.monotonic() - stream.opened < self._connection.timeout
        return young and stream.turn == self._connection.turn

    def _give_back(self, stream: _Stream) -> None:
        stream.idle_since = time.monotonic()
        with self._lock:
            if not self._closed:
                self._idle.append(stream)
                if self._reaper is None:
                    self._reaper = threading.Timer(_IDLE_SECONDS, self._close_idle)
                    self._reaper.daemon = True
                    self._reaper.start()
                return
        stream.close()

    def _close_idle(self) -> None:
        """Close the streams that were not used for a while: each holds a thread of the gateway."""
        now = time.monotonic()
        with self._lock:
            idle = [each for each in self._idle if now - each.idle_since >= _IDLE_SECONDS]
            self._idle = [each for each in self._idle if now - each.idle_since < _IDLE_SECONDS]
            self._reaper = None
            if self._idle and not self._closed:
                self._reaper = threading.Timer(_IDLE_SECONDS, self._close_idle)
                self._reaper.daemon = True
                self._reaper.start()
        for each in idle:
            each.close()


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
                trying.unanswered = before  # the gateway itself says why it refused
            raise
        if said is None:
            raise flight.FlightUnavailableError("the gateway ended the stream without an answer")
        trying.unanswered = before  # an answer speaks for its own try alone
        return Answer.decode(said.to_pybytes())

    def close(self) -> None:
        # The gateway may be gone; what was answered is durable.
        with contextlib.suppress(pa.ArrowException, OSError):
            self.writer.done_writing()
        with contextlib.suppress(pa.ArrowException, OSError):
            self.writer.close()


def _joined(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The rows of one put as one batch, since a batch is a put."""
    if len(batches) <= 1:
        return list(batches)
    try:
        return list(pa.Table.from_batches(batches).combine_chunks().to_batches())
    except pa.ArrowInvalid as error:
        raise InvalidInputError(f"the batches of one put have different columns: {error}") from None
