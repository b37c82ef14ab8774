"""Gateway: one process that writes tables for many clients, over Arrow Flight.

All clients of a table share its writer in this process, and so one group commit. A client keeps a ``DoPut``
open and sends a batch for each put. A thread of the Flight server answers each put when it is durable. Reads
see the newest state, as in any process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pyarrow as pa
from pyarrow import flight

from lancewal.errors import (
    BusyError,
    ClosedError,
    InvalidInputError,
    LanceWalError,
    PartialWriteError,
    UnavailableError,
)
from lancewal.format import PutId
from lancewal.gateway.access import CALLER, Access, Doorkeeper
from lancewal.gateway.calls import STOPPING, Call, Calls, Limits
from lancewal.gateway.contract import Answer, Numbered, Request, describe
from lancewal.gateway.sockets import cut_connections
from lancewal.gateway.watch import CallTimes
from lancewal.reader import TableView
from lancewal.storage import is_forked, span
from lancewal.table import Table
from lancewal.writer import Cast, Intake, TableWriter

logger = logging.getLogger(__name__)


class Gateway:
    """Serves tables until it is closed; a context manager.

    >>> import tempfile, lance, lancewal
    >>> uri = tempfile.mkdtemp() + "/events"
    >>> _ = lance.write_dataset(pa.schema([("id", pa.int64())]).empty_table(), uri)
    >>> with Gateway({"events": lancewal.initialize(uri, unsharded=True)}) as gateway:
    ...     table = lancewal.connect(gateway.address, table="events")
    ...     with table.writer() as writer:
    ...         _ = writer.put(pa.table({"id": [1, 2, 3]}))
    ...     table.count_rows()
    3
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        *,
        listen: str = "127.0.0.1:0",
        access: Access | None = None,
        limits: Limits | None = None,
        upkeep: bool = True,
        **writer_settings: Any,
    ) -> None:
        """``tables`` has the names that clients use; ``writer_settings`` are those of :meth:`Table.writer`.

        ``listen`` is ``host:port`` (port 0 means any free port) or ``unix:/path`` for a socket. With
        ``upkeep`` each table has a thread that maintains it, see ``Table.upkeeper``.
        """
        self._access = access or Access()
        self._limits = limits or Limits()
        location = _location(listen, self._access)
        self._access.check_listen(listen)
        #: The durations of calls, for monitoring.
        self.call_times = CallTimes()
        self._tables = {
            name: _Served(name, table, writer_settings, self._limits, self.call_times)
            for name, table in tables.items()
        }
        if not self._tables:
            raise InvalidInputError("a gateway needs at least one table to serve")
        self._calls = Calls(self._limits, self._cut)
        try:
            self._server = _FlightServer(location, self._access, self._tables, self._calls)
        except (pa.ArrowException, OSError) as error:
            raise InvalidInputError(f"cannot listen on {listen}: {error}") from None
        self._close_lock = threading.Lock()
        self._closed = False
        self.address = _address(listen, location, self._server.port)
        for served in self._tables.values():
            served.table.announce(self.address)
        self._upkeepers = [served.table.upkeeper() for served in self._tables.values() if upkeep]
        logger.info("serving %s at %s", ", ".join(self._tables), self.address)

    @property
    def tables(self) -> dict[str, Table]:
        """The served tables, by name."""
        return {name: served.table for name, served in self._tables.items()}

    @property
    def ready(self) -> bool:
        """Whether calls are accepted, for orchestrators that send traffic only to ready processes."""
        return not self._calls.closed

    @property
    def calls_under_way(self) -> int:
        """The number of running calls; an open ``DoPut`` counts as one."""
        return self._calls.under_way

    def close(self) -> None:
        """Accept no more calls, finish the running ones, flush, and release the shards.

        Acknowledged rows are durable in any case. Raises what :meth:`TableWriter.close` raises. In a
        forked child this does nothing, because the gateway belongs to the parent.
        """
        if is_forked():
            return
        with self._close_lock:
            if self._closed:
                return
            self._calls.close()
            for served in self._tables.values():
                served.stop.set()
            for upkeeper in self._upkeepers:
                upkeeper.stop()
            try:
                errors = [error for served in self._tables.values() if (error := served.close()) is not None]
            finally:
                self._closed = True
                # Only after the shards are released: until then a stand-by sends clients back to the address
                # of this gateway. Without an address the clients would not retry, and their calls would fail.
                for served in self._tables.values():
                    served.table.announce(None)
                # All puts are answered by now. Only reads and idle streams are left, and Flight would wait
                # for idle streams for ever.
                ending = threading.Thread(target=self._server.shutdown, daemon=True)
                ending.start()
                self._calls.wait_until_idle(self._limits.drain)
                cut_connections(self.address)
                ending.join()
            if errors:
                raise errors[0]
        logger.info("stopped serving %s", ", ".join(self._tables))

    def _cut(self, peers: set[str]) -> None:
        cut_connections(self.address, peers)

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Served:
    """One served table and its writer, which is opened when the first rows come."""

    def __init__(
        self,
        name: str,
        table: Table,
        writer_settings: Mapping[str, Any],
        limits: Limits,
        times: CallTimes,
    ) -> None:
        self.name = name
        self.table = table
        self.limits = limits
        self.times = times
        self.stop = threading.Event()
        self._settings = dict(writer_settings)
        self._lock = threading.Lock()
        self._writer: TableWriter | None = None
        self._intakes: dict[Cast, Intake] = {}

    def write(self, op: str, batch: pa.RecordBatch, cast: Cast, put_id: PutId | None) -> int:
        """Write one put, after checking its size; returns its rows."""
        if batch.nbytes > self.limits.put_bytes:
            raise InvalidInputError(
                f"the put has {batch.nbytes} bytes, {self.limits.put_bytes} are allowed; send it in parts"
            )
        writer = self._open_writer()
        write = writer.delete if op == "delete" else writer.put
        as_given = op == "delete" or cast == "numbers"
        data: Any = batch if as_given else self._intake(writer, cast).upserts(batch)
        try:
            with self.times.timed(self.name, op):
                return write(data, put_id=put_id, patience=self.limits.patience).num_rows
        except ClosedError:
            if self.stop.is_set():
                raise UnavailableError(STOPPING) from None
            raise

    def shards_of(
        self, op: str, batch: pa.RecordBatch, cast: Cast, parts: Sequence[int]
    ) -> dict[UUID, list[int]]:
        """For each shard, which puts have rows in it; ``parts`` has their row counts. Empty if unknown."""
        writer = self._writer
        if writer is None:
            return {}  # the gateway is stopping
        intake = self._intake(writer, cast)
        found: dict[UUID, list[int]] = defaultdict(list)
        first = 0
        for number, rows in enumerate(parts):
            part = batch.slice(first, rows)
            first += rows
            for shard in writer.shards_of(intake.deletes(part) if op == "delete" else intake.upserts(part)):
                found[shard].append(number)
        return found

    def close(self) -> Exception | None:
        """Close the writer, which releases its shards; returns the error, if there was one."""
        with self._lock:
            writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except Exception as error:
            logger.error("the rows of %s were not all flushed: %s", self.name, error)
            return error
        return None

    def _open_writer(self) -> TableWriter:
        with self._lock:
            if self.stop.is_set():
                raise UnavailableError(
                    "this gateway is stopping; send the put to the one that takes its place"
                )
            if self._writer is None:
                self._writer = self.table.writer(**self._settings)
            return self._writer

    def _intake(self, writer: TableWriter, cast: Cast) -> Intake:
        with self._lock:
            if cast not in self._intakes:
                self._intakes[cast] = writer.intake(cast)
            return self._intakes[cast]


class _FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """The Flight server; each call runs in its own thread."""

    def __init__(
        self, location: flight.Location, access: Access, tables: Mapping[str, _Served], calls: Calls
    ) -> None:
        # Set first: calls may arrive before the base class's constructor has returned.
        self._tables = tables
        self._calls = calls
        certificates = [(access.certificate, access.key)] if access.certificate else None
        super().__init__(location, tls_certificates=certificates, middleware={CALLER: Doorkeeper(access)})

    def do_put(
        self, context: Any, descriptor: Any, reader: flight.MetadataRecordBatchReader, writer: Any
    ) -> None:
        with _told(), self._calls.counted(context.peer()) as call:
            request = _put_request(descriptor)
            served = self._served(request.table)
            _check_writes(context)
            session, cast = request.args.get("session"), request.args.get("cast", "numbers")
            for chunk in _chunks(reader, call):
                said = chunk.app_metadata
                answer = _answered(served, request.op, session, cast, chunk.data, said)
                if answer.error is not None and said is None:
                    raise answer.error  # a client that does not number its puts expects a failed call
                writer.write(answer.encode())
                if served.stop.is_set():
                    raise UnavailableError(STOPPING)

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        with _told():
            request = Request.decode(ticket.ticket)
            served = self._served(request.table)
            read = _READS.get(request.op)
            if read is None:
                raise InvalidInputError(f"there is no read {request.op!r}; there are {', '.join(_READS)}")
            call = self._calls.enter(context.peer())
            ended = False
            try:
                try:
                    with _serving(context, served, request), served.times.timed(served.name, request.op):
                        schema, items = read(served, request, context)
                except (TypeError, AttributeError) as error:
                    raise InvalidInputError(f"{request.op} cannot be asked like this: {error}") from None
                counted = self._counted_to_the_end(items, call)
                # Started here: if a generator was never started, its ``finally`` does not run when it is
                # dropped.
                next(counted)
                ended = True
                return flight.GeneratorStream(schema, counted)
            finally:
                if not ended:
                    self._calls.leave(call)

    def _counted_to_the_end(self, items: Iterable[Any], call: Call) -> Iterator[Any]:
        try:
            yield None
            with _told():
                for item in items:
                    with call.waiting():  # until the client has received it
                        yield item
        finally:
            self._calls.leave(call)

    def do_action(self, context: Any, action: flight.Action) -> list[flight.Result]:
        with _told(), self._calls.counted(context.peer()):
            act = _ACTIONS.get(action.type)
            if act is None:
                raise InvalidInputError(
                    f"there is no action {action.type!r}; there are {', '.join(_ACTIONS)}"
                )
            request = Request.decode(action.body.to_pybytes())
            if act.writes:
                _check_writes(context)
            served = self._served(request.table)
            with _serving(context, served, request):
                return [flight.Result(act.run(served, request))]

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        return [(name, act.text) for name, act in _ACTIONS.items()]

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[flight.FlightInfo]:
        with _told(), self._calls.counted(context.peer()):
            yield from [self._info(served) for served in self._tables.values()]

    def get_flight_info(self, context: Any, descriptor: Any) -> flight.FlightInfo:
        with _told(), self._calls.counted(context.peer()):
            return self._info(self._served(_put_request(descriptor).table))

    def get_schema(self, context: Any, descriptor: Any) -> flight.SchemaResult:
        with _told(), self._calls.counted(context.peer()):
            return flight.SchemaResult(self._served(_put_request(descriptor).table).table.schema)

    def _info(self, served: _Served) -> flight.FlightInfo:
        ticket = flight.Ticket(Request("scan", served.name).encode())
        descriptor = flight.FlightDescriptor.for_path(served.name)
        return flight.FlightInfo(
            served.table.schema,
            descriptor,
            [flight.FlightEndpoint(ticket, [])],
            total_records=-1,
            total_bytes=-1,
        )

    def _served(self, name: str) -> _Served:
        if name == "" and len(self._tables) == 1:
            return next(iter(self._tables.values()))
        if name not in self._tables:
            raise InvalidInputError(f"this gateway serves no table {name!r}")
        return self._tables[name]


def _answered(
    served: _Served, op: str, session: Any, cast: Any, batch: pa.RecordBatch, said: pa.Buffer | None
) -> Answer:
    """Write one put, and return the answer to it."""
    number = None
    try:
        numbered = Numbered.decode(None if said is None else said.to_pybytes())
        number = numbered.number
        if numbered.parts and (sum(numbered.parts) != batch.num_rows or min(numbered.parts) < 1):
            raise InvalidInputError(f"the message has {batch.num_rows} rows, its puts have others")
        put_id = None
        if session is not None and number is not None:
            put_id = PutId(str(session), number, numbered.settled)
        with span(
            "lancewal.serve", kind="SERVER", parent=numbered.trace, operation=op, served_as=served.name
        ):
            return Answer(number, served.write(op, batch, cast, put_id))
    except PartialWriteError as error:
        # If only one shard was involved, its own error is clearer.
        (*_, only) = error.failed.values()
        if len(error.failed) == 1 and not error.written and isinstance(only, LanceWalError):
            return Answer(number, error=only)
        return Answer(number, error=error, shards=served.shards_of(op, batch, cast, numbered.parts))
    except LanceWalError as error:
        return Answer(number, error=error)


def _put_request(descriptor: flight.FlightDescriptor) -> Request:
    """The request in a descriptor: an encoded :class:`Request`, or a path with the table's name for a put."""
    if descriptor.descriptor_type == flight.DescriptorType.PATH:
        path = [part.decode() if isinstance(part, bytes) else part for part in descriptor.path]
        if len(path) != 1:
            raise InvalidInputError("the path of a descriptor is the table's name alone")
        return Request("put", path[0])
    request = Request.decode(descriptor.command)
    if request.op not in ("put", "delete"):
        raise InvalidInputError(f"{request.op!r} is nothing to write; put and delete are")
    if not isinstance(request.args.get("cast", "numbers"), str | bool):
        raise InvalidInputError(f"cast is {request.args['cast']!r}; give its name")
    return request


def _chunks(reader: flight.MetadataRecordBatchReader, call: Call) -> Iterator[Any]:
    while True:
        try:
            with call.waiting():
                chunk = reader.read_chunk()
        except StopIteration:
            return
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, flight.FlightCancelledError | flight.FlightUnavailableError):
                return  # the client is gone
            raise InvalidInputError(f"unreadable rows: {error}") from None
        if chunk.data is not None:
            yield chunk


def _serving(context: Any, served: _Served, request: Request) -> AbstractContextManager[object]:
    trace = context.get_middleware(CALLER).trace
    return span("lancewal.serve", kind="SERVER", parent=trace, operation=request.op, served_as=served.name)


def _check_writes(context: Any) -> None:
    if not context.get_middleware(CALLER).writes:
        raise flight.FlightUnauthorizedError("this token may read, not write")


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Convert errors for Flight: our errors keep class and details, others lose their text."""
    try:
        yield
    except (BusyError, UnavailableError) as error:
        raise flight.FlightUnavailableError(str(error), json.dumps(describe(error)).encode()) from None
    except LanceWalError as error:
        raise flight.FlightServerError(str(error), json.dumps(describe(error)).encode()) from None
    except (flight.FlightError, GeneratorExit):
        raise
    except Exception as error:
        logger.exception("a call failed unexpectedly")
        raise flight.FlightInternalError(
            f"the gateway failed ({type(error).__name__}); see its log"
        ) from None


#: The argument of a read request that names a checkpoint.
_AT = "at"

_Read = Callable[[_Served, Request, Any], tuple[pa.Schema, Iterable[Any]]]


def _scan(served: _Served, request: Request, context: Any) -> tuple[pa.Schema, Iterable[Any]]:
    reader = (
        _view(served, request)
        .scan(**_only(request, "columns", "filter", "limit", "offset", "with_row_source", _AT))
        .to_batches()
    )
    return reader.schema, reader


def _lookup(served: _Served, request: Request, context: Any) -> tuple[pa.Schema, Iterable[Any]]:
    keys = _values(request)
    result = _view(served, request).lookup(keys, **_only(request, "columns", _AT))
    found = json.dumps({"found": result.found.tolist()}).encode()
    # The empty batch carries the metadata even if nothing was found.
    first = (pa.RecordBatch.from_pylist([], schema=result.table.schema), found)
    return result.table.schema, [first, *result.table.to_batches()]


def _searched(served: _Served, request: Request, context: Any) -> tuple[pa.Schema, Iterable[Any]]:
    args = _without_at(request)
    if request.values is not None:
        vector = request.values.column(0).combine_chunks()
        args["query" if request.op == "vector_search" else "vector"] = vector
    found = getattr(_view(served, request), request.op)(**args)
    return found.schema, found.to_batches()


def _changes(served: _Served, request: Request, context: Any) -> tuple[pa.Schema, Iterable[Any]]:
    args = _only(request, "start", "follow")
    start = args.get("start")
    try:
        place = None if start is None else {UUID(shard): int(at) for shard, at in start.items()}
    except (ValueError, TypeError, AttributeError):
        raise InvalidInputError("start is an object of shard ids and WAL positions") from None
    feed = served.table.feed()

    def stopped() -> bool:
        return bool(served.stop.is_set() or context.is_cancelled())

    def items() -> Iterator[Any]:
        follows = bool(args.get("follow"))
        found = feed.follow(place, stop=stopped, wait=served.stop.wait) if follows else feed.up_to_now(place)
        for batch, at in found:
            yield (
                batch,
                json.dumps({"place": {str(shard): position for shard, position in at.items()}}).encode(),
            )

    return feed.schema, items()


def _only(request: Request, *names: str) -> dict[str, Any]:
    unknown = sorted(request.args.keys() - set(names))
    if unknown:
        takes = ", ".join(names) or "nothing"
        raise InvalidInputError(f"{request.op} takes {takes}, not {', '.join(unknown)}")
    return _without_at(request)


def _without_at(request: Request) -> dict[str, Any]:
    return {name: value for name, value in request.args.items() if name != _AT}


def _view(served: _Served, request: Request) -> TableView:
    """The table itself, or the requested checkpoint."""
    name = request.args.get(_AT)
    if name is None:
        return served.table
    if not isinstance(name, str):
        raise InvalidInputError("at is the name of a checkpoint")
    return served.table.at(name)


def _values(request: Request) -> pa.Table:
    if request.values is None:
        raise InvalidInputError(f"{request.op} takes values, as an Arrow IPC stream behind the line of JSON")
    return request.values


_READS: Mapping[str, _Read] = {
    "scan": _scan,
    "lookup": _lookup,
    "search": _searched,
    "vector_search": _searched,
    "full_text_search": _searched,
    "hybrid_search": _searched,
    "changes": _changes,
}


@dataclass(frozen=True)
class _Action:
    text: str
    run: Callable[[_Served, Request], bytes]
    writes: bool = field(default=False)


def _flush(served: _Served, request: Request) -> bytes:
    _only(request)
    served.table.flush()
    return b"{}"


def _status(served: _Served, request: Request) -> bytes:
    _only(request)
    return json.dumps(served.table.status().to_dict()).encode()


def _count(served: _Served, request: Request) -> bytes:
    return json.dumps({"rows": _view(served, request).count_rows(**_only(request, "filter", _AT))}).encode()


def _schema(served: _Served, request: Request) -> bytes:
    """A line of JSON with the key, followed by the columns with Lance's field ids."""
    schema = _view(served, request).table_schema
    said = json.dumps({"name": served.name, "primary_key": list(schema.primary_key)}).encode()
    columns: bytes = schema.columns.serialize().to_pybytes()
    return said + b"\n" + columns


_ACTIONS: Mapping[str, _Action] = {
    "count_rows": _Action("How many rows there are; takes a filter", _count),
    "flush": _Action("Move all rows from memory and logs to SSTables", _flush, writes=True),
    "schema": _Action("The table's columns and key", _schema),
    "status": _Action("What waits for a flush, for compaction and for an index", _status),
}


def _location(listen: str, access: Access) -> flight.Location:
    if listen.startswith("unix:"):
        return flight.Location(f"grpc+unix://{listen.removeprefix('unix:')}")
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidInputError(f"listen is {listen!r}; give host:port, as 127.0.0.1:9465, or unix:/path")
    scheme = "grpc+tls" if access.certificate else "grpc"
    return flight.Location(f"{scheme}://{host}:{port}")


def _address(listen: str, location: flight.Location, port: int) -> str:
    """The address that clients connect to."""
    text = location.uri.decode() if isinstance(location.uri, bytes) else str(location.uri)
    return text if listen.startswith("unix:") else f"{text.rpartition(':')[0]}:{port}"
