"""Gateway: one process that writes tables for many clients, over Arrow Flight.

All clients of a table share its writer in this process, and so one group commit. A client keeps a ``DoPut``
open and sends a batch for each put. A thread of the Flight server answers each put when it is durable. Reads
see the newest state, as in any process.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa
from pyarrow import flight

from lancewal.errors import (
    BusyError,
    InvalidInputError,
    LanceWalError,
    UnavailableError,
)
from lancewal.gateway.access import CALLER, Access, Doorkeeper
from lancewal.gateway.calls import LONGEST_WAIT, STOPPING, Call, Calls, Limits
from lancewal.gateway.contract import Request, described_briefly
from lancewal.gateway.served import ACTIONS, READS, Served, answered, with_dictionaries, without_values
from lancewal.gateway.sockets import BAD_CERTIFICATE, cut_connections, is_served, unix_address, why_not
from lancewal.gateway.watch import CallTimes
from lancewal.storage import is_forked, span
from lancewal.table import Table

logger = logging.getLogger(__name__)

_ALL_INTERFACES = ("0.0.0.0", "[::]", "::")  # compared, not bound


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
        advertise: str | None = None,
        access: Access | None = None,
        limits: Limits | None = None,
        upkeep: bool = True,
        **writer_settings: Any,
    ) -> None:
        """``tables`` has the names that clients use; ``writer_settings`` are those of :meth:`Table.writer`.

        ``listen`` is ``host:port`` (port 0 means any free port) or ``unix:/path`` for a socket. ``advertise``
        is the ``host:port`` under which clients reach this gateway, if that is another one; other gateways
        send clients there. A gateway that listens on all interfaces advertises this host's name. With
        ``upkeep`` each table has a thread that maintains it, see ``Table.upkeeper``.
        """
        if not all(isinstance(each, Table) for each in tables.values()):
            raise InvalidInputError("a gateway serves tables, as lancewal.open gives them, by name")
        self._access = access or Access()
        self._limits = limits or Limits()
        location = _location(listen, self._access)
        self._access.check_listen(listen)
        _check_advertise(advertise)
        #: The durations of calls, for monitoring.
        self.call_times = CallTimes()
        self._tables = {
            name: Served(name, table, writer_settings, self._limits, self.call_times)
            for name, table in tables.items()
        }
        if not self._tables:
            raise InvalidInputError("a gateway needs at least one table to serve")
        self._calls = Calls(self._limits, self._cut)
        if is_served(listen):
            raise InvalidInputError(f"cannot listen on {listen}: another process listens there")
        try:
            self._server = _FlightServer(location, self._access, self._tables, self._calls)
        except (pa.ArrowException, OSError) as error:
            reason = why_not(listen) or (BAD_CERTIFICATE if self._access.certificate else str(error))
            raise InvalidInputError(f"cannot listen on {listen}: {reason}") from None
        self._close_lock = threading.Lock()
        self._closed = False
        self.address = _address(listen, location, self._server.port)
        self._advertised = _advertised(self.address, advertise)
        for served in self._tables.values():
            served.table.announce(self._advertised)
        self._upkeepers = [served.table.upkeeper() for served in self._tables.values() if upkeep]
        logger.info("serving %s at %s", ", ".join(self._tables), self._advertised)

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
                self._end_calls()
            if errors:
                raise errors[0]
        logger.info("stopped serving %s", ", ".join(self._tables))

    def _end_calls(self) -> None:
        """Wait for running reads, then end Flight's server.

        All puts are answered by now. Flight would wait for idle streams for ever, so their connections are
        cut. Those of other clients stay, because the last rows may still be on their way.
        """
        deadline = time.monotonic() + self._limits.drain
        is_read = self._calls.any_read
        ending = threading.Thread(target=self._server.shutdown, daemon=True)
        ending.start()
        idle = self._calls.wait_until_idle(self._limits.drain)
        if is_read and (not idle or cut_connections(self.address, idle)):
            ending.join(min(max(deadline - time.monotonic(), 0.0), LONGEST_WAIT))
        if ending.is_alive():
            cut_connections(self.address)
            ending.join()

    def _cut(self, peers: set[str]) -> None:
        cut_connections(self.address, peers)

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """The Flight server; each call runs in its own thread."""

    def __init__(
        self, location: flight.Location, access: Access, tables: Mapping[str, Served], calls: Calls
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
                answer = answered(served, request.op, session, cast, chunk.data, said)
                if answer.error is not None and said is None:
                    raise answer.error  # a client that does not number its puts expects a failed call
                writer.write(answer.encode())
                if served.stop.is_set():
                    raise UnavailableError(STOPPING)

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        with _told():
            request = Request.decode(ticket.ticket)
            served = self._served(request.table)
            read = READS.get(request.op)
            if read is None:
                raise InvalidInputError(f"there is no read {request.op!r}; there are {', '.join(READS)}")
            call = self._calls.enter(context.peer(), context.is_cancelled, is_read=True)
            ended = False
            try:
                try:
                    with _serving(context, served, request), served.times.timed(served.name, request.op):
                        schema, items = read(served, request, call)
                except (TypeError, AttributeError) as error:
                    raise InvalidInputError(f"{request.op} cannot be asked like this: {error}") from None
                counted = self._counted_to_the_end(with_dictionaries(schema, items), call)
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
            act = ACTIONS.get(action.type)
            if act is None:
                raise InvalidInputError(f"there is no action {action.type!r}; there are {', '.join(ACTIONS)}")
            request = without_values(Request.decode(action.body.to_pybytes()))
            if act.writes:
                _check_writes(context)
            served = self._served(request.table)
            with _serving(context, served, request):
                return [flight.Result(act.run(served, request))]

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        return [(name, act.text) for name, act in ACTIONS.items()]

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[flight.FlightInfo]:
        with _told(), self._calls.counted(context.peer()):
            yield from [self._info(served) for served in self._tables.values()]

    def get_flight_info(self, context: Any, descriptor: Any) -> flight.FlightInfo:
        with _told(), self._calls.counted(context.peer()):
            return self._info(self._served(_put_request(descriptor).table))

    def get_schema(self, context: Any, descriptor: Any) -> flight.SchemaResult:
        with _told(), self._calls.counted(context.peer()):
            return flight.SchemaResult(self._served(_put_request(descriptor).table).table.schema)

    def _info(self, served: Served) -> flight.FlightInfo:
        ticket = flight.Ticket(Request("scan", served.name).encode())
        descriptor = flight.FlightDescriptor.for_path(served.name)
        return flight.FlightInfo(
            served.table.schema,
            descriptor,
            [flight.FlightEndpoint(ticket, [])],
            total_records=-1,
            total_bytes=-1,
        )

    def _served(self, name: str) -> Served:
        if name == "" and len(self._tables) == 1:
            return next(iter(self._tables.values()))
        if name not in self._tables:
            raise InvalidInputError(f"this gateway serves no table {name!r}")
        return self._tables[name]


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


def _serving(context: Any, served: Served, request: Request) -> AbstractContextManager[object]:
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
        raise flight.FlightUnavailableError(*described_briefly(error)) from None
    except LanceWalError as error:
        raise flight.FlightServerError(*described_briefly(error)) from None
    except (flight.FlightError, GeneratorExit):
        raise
    except Exception as error:
        logger.exception("a call failed unexpectedly")
        raise flight.FlightInternalError(
            f"the gateway failed ({type(error).__name__}); see its log"
        ) from None


def _location(listen: str, access: Access) -> flight.Location:
    if listen.startswith("unix:/"):
        return flight.Location(unix_address(listen.removeprefix("unix:")))
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidInputError(f"listen is {listen!r}; give host:port, as 127.0.0.1:9465, or unix:/path")
    scheme = "grpc+tls" if access.certificate else "grpc"
    try:
        return flight.Location(f"{scheme}://{host}:{port}")
    except pa.ArrowException:
        raise InvalidInputError(f"listen is {listen!r}, and {host!r} is no host") from None


def _check_advertise(advertise: str | None) -> None:
    if advertise is not None:
        host, _, port = advertise.rpartition(":")
        if not host or not port.isdecimal() or "/" in advertise or int(port) > 65535:
            raise InvalidInputError(f"advertise is {advertise!r}; give host:port, as gateway-1.internal:9465")


def _address(listen: str, location: flight.Location, port: int) -> str:
    """The address that clients connect to."""
    text = location.uri.decode() if isinstance(location.uri, bytes) else str(location.uri)
    return text if listen.startswith("unix:") else f"{text.rpartition(':')[0]}:{port}"


def _advertised(address: str, advertise: str | None) -> str:
    """The address that is told to others: ``advertise``, or that of the socket."""
    scheme, _, place = address.partition("://")
    if advertise is not None:
        return f"{scheme}://{advertise}"
    host, _, port = place.rpartition(":")
    return f"{scheme}://{socket.getfqdn()}:{port}" if host in _ALL_INTERFACES else address
