"""What a gateway does for its clients with one table: its writer, its reads, and its actions."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pyarrow as pa
from pyarrow import flight

from lancewal.config import ShardWriterConfig
from lancewal.errors import (
    ClosedError,
    InvalidInputError,
    LanceWalError,
    PartialWriteError,
    UnavailableError,
)
from lancewal.format import PutId, has_dictionary
from lancewal.gateway.calls import STOPPING, Call, Limits
from lancewal.gateway.contract import Answer, Numbered, Request
from lancewal.gateway.received import may_unfold, refuse_malformed, unfolded_bytes
from lancewal.gateway.watch import CallTimes
from lancewal.publish import checked_place
from lancewal.reader import TableView
from lancewal.service import checked_take_over
from lancewal.storage import span
from lancewal.table import Table
from lancewal.writer import Cast, Intake, TableWriter

logger = logging.getLogger(__name__)

#: A follower of the feed is sent an empty batch after so many seconds without changes. Clients take a
#: gateway that sends nothing for longer for hung.
_HEARTBEAT = 3.0
#: The arguments of :meth:`Table.writer` that are no settings of a shard's writer.
_NOT_OF_SHARDS = ("config", "cast", "take_over", "upkeep")


class Served:
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
        self._settings = durable(writer_settings)
        self._lock = threading.Lock()
        self._writer: TableWriter | None = None
        self._intakes: dict[Cast, tuple[TableWriter, Intake]] = {}
        #: The last columns whose rows take no more bytes in the table than in a message.
        self._as_they_are: tuple[TableWriter | None, pa.Schema] = (None, pa.schema([]))

    def write(self, op: str, batch: pa.RecordBatch, cast: Cast, put_id: PutId | None) -> int:
        """Write one put, after checking its form and its size; returns its rows."""
        refuse_malformed(batch)
        self._refuse_large(batch.nbytes)
        with self.times.timed(self.name, op):
            while True:
                writer = self._open_writer()
                try:
                    self._refuse_unfolded(op, batch, writer)
                    write = writer.delete if op == "delete" else writer.put
                    as_given = op == "delete" or cast == "numbers"
                    data: Any = batch if as_given else self._intake(writer, cast).upserts(batch)
                    return write(data, put_id=put_id, patience=self.limits.patience).num_rows
                except ClosedError:
                    if self.stop.is_set():
                        raise UnavailableError(STOPPING) from None
                    if writer is self._writer:
                        raise
                except InvalidInputError:
                    if not self._renewed(writer, batch.schema):
                        raise

    def _refuse_unfolded(self, op: str, batch: pa.RecordBatch, writer: TableWriter) -> None:
        made_for, columns = self._as_they_are
        if op == "put" and made_for is writer and batch.schema.equals(columns):
            return
        self._refuse_large(unfolded_bytes(batch, writer.schema))
        if op == "put" and not may_unfold(batch.schema, writer.schema):
            self._as_they_are = (writer, batch.schema)

    def _refuse_large(self, num_bytes: int) -> None:
        if num_bytes > self.limits.put_bytes:
            raise InvalidInputError(
                f"the put has {num_bytes} bytes, {self.limits.put_bytes} are allowed; send it in parts"
            )

    def _renewed(self, writer: TableWriter, given: pa.Schema) -> bool:
        """Whether ``writer`` was replaced because rows have columns that the table got after it was opened.

        Nothing of the rows was written. Puts that other threads have begun with it are finished first.
        """
        unknown = set(given.names) - set(writer.schema.names)
        if not unknown or not unknown <= set(self.table.schema.names):
            return False
        with self._lock:
            if self._writer is writer and not self.stop.is_set():
                logger.info("%s has new columns: %s", self.name, ", ".join(sorted(unknown)))
                self._writer = None
                writer.close()
        return True

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
            made_for, intake = self._intakes.get(cast, (None, None))
            if intake is None or made_for is not writer:
                intake = writer.intake(cast)
                self._intakes[cast] = (writer, intake)
            return intake


def durable(writer_settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a gateway's writer, which is durable whatever the table's own settings are."""
    checked_take_over(writer_settings.get("take_over", "when_gone"))
    named = {name: each for name, each in writer_settings.items() if name not in _NOT_OF_SHARDS}
    if not ShardWriterConfig.resolved(writer_settings.get("config"), {}, named).durable_write:
        raise InvalidInputError(
            "a gateway answers when rows are durable; leave durable_write=False out, or use table.writer"
        )
    return {**writer_settings, "durable_write": True}


def answered(
    served: Served, op: str, session: Any, cast: Any, batch: pa.RecordBatch, said: pa.Buffer | None
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


#: The argument of a read request that names a checkpoint.
_AT = "at"

_Read = Callable[[Served, Request, Call], tuple[pa.Schema, Iterable[Any]]]


def with_dictionaries(schema: pa.Schema, items: Iterable[Any]) -> Iterable[Any]:
    """``items`` so that the client gets their dictionaries, which pyarrow sends only with whole streams.

    Then the metadata of a batch follow it, with an empty batch.
    """
    if not any(map(has_dictionary, schema.types)):
        return items

    def streams() -> Iterator[Any]:
        for item in items:
            batch, said = item if isinstance(item, tuple) else (item, None)
            yield flight.RecordBatchStream(pa.RecordBatchReader.from_batches(schema, [batch]))
            if said is not None:
                yield batch.slice(0, 0), said

    return streams()


def _scan(served: Served, request: Request, call: Call) -> tuple[pa.Schema, Iterable[Any]]:
    reader = (
        _view(served, without_values(request))
        .scan(**_only(request, "columns", "filter", "limit", "offset", "with_row_source", _AT))
        .to_batches()
    )
    return reader.schema, reader


def _lookup(served: Served, request: Request, call: Call) -> tuple[pa.Schema, Iterable[Any]]:
    keys = request.decoded_values(served.limits.put_bytes)
    if keys is None:
        raise InvalidInputError(f"{request.op} takes values, as an Arrow IPC stream behind the line of JSON")
    result = _view(served, request).lookup(keys, **_only(request, "columns", _AT))
    found = json.dumps({"found": result.found.tolist()}).encode()
    # The empty batch carries the metadata even if nothing was found.
    first = (pa.RecordBatch.from_pylist([], schema=result.table.schema), found)
    return result.table.schema, [first, *result.table.to_batches()]


def _searched(served: Served, request: Request, call: Call) -> tuple[pa.Schema, Iterable[Any]]:
    args = _without_at(request)
    values = request.decoded_values(served.limits.put_bytes)
    if values is not None:
        if values.num_columns != 1:
            raise InvalidInputError(f"the values of {request.op} are one column, the vector or vectors")
        vector = values.column(0).combine_chunks()
        args["query" if request.op == "vector_search" else "vector"] = vector
    found = getattr(_view(served, request), request.op)(**args)
    return found.schema, found.to_batches()


def _changes(served: Served, request: Request, call: Call) -> tuple[pa.Schema, Iterable[Any]]:
    args = _only(without_values(request), "start", "follow")
    start = args.get("start")
    place = None if start is None else checked_place(start)
    feed = served.table.feed()

    def said(at: Mapping[UUID, int]) -> bytes:
        return json.dumps({"place": {str(shard): position for shard, position in at.items()}}).encode()

    def followed() -> Iterator[Any]:
        told = changed = time.monotonic()

        def wait(seconds: float) -> None:
            with call.waiting(since=changed):
                served.stop.wait(seconds)

        def stopped() -> bool:
            return served.stop.is_set() or call.is_cancelled()

        # Told before any change: a client that loses this gateway now goes on from here at the next one.
        begin = feed.latest() if place is None else place
        yield pa.RecordBatch.from_pylist([], schema=feed.schema), said(begin)
        for batch, at in feed.follow(begin, stop=stopped, wait=wait, tell_idle=True):
            if batch.num_rows:
                changed = time.monotonic()
            elif time.monotonic() - told < _HEARTBEAT:
                continue
            yield batch, said(at)
            told = time.monotonic()
        if served.stop.is_set():
            raise UnavailableError(STOPPING)

    if args.get("follow"):
        return feed.schema, followed()
    return feed.schema, ((batch, said(at)) for batch, at in feed.up_to_now(place))


def without_values(request: Request) -> Request:
    if request.encoded_values is not None:
        raise InvalidInputError(f"{request.op} takes no values behind the line of JSON")
    return request


def _only(request: Request, *names: str) -> dict[str, Any]:
    unknown = sorted(request.args.keys() - set(names))
    if unknown:
        takes = ", ".join(names) or "nothing"
        raise InvalidInputError(f"{request.op} takes {takes}, not {', '.join(unknown)}")
    return _without_at(request)


def _without_at(request: Request) -> dict[str, Any]:
    return {name: value for name, value in request.args.items() if name != _AT}


def _view(served: Served, request: Request) -> TableView:
    """The table itself, or the requested checkpoint."""
    name = request.args.get(_AT)
    if name is None:
        return served.table
    if not isinstance(name, str):
        raise InvalidInputError("at is the name of a checkpoint")
    return served.table.at(name)


READS: Mapping[str, _Read] = {
    "scan": _scan,
    "lookup": _lookup,
    "search": _searched,
    "vector_search": _searched,
    "full_text_search": _searched,
    "hybrid_search": _searched,
    "changes": _changes,
}


@dataclass(frozen=True)
class Action:
    text: str
    run: Callable[[Served, Request], bytes]
    writes: bool = field(default=False)


def _flush(served: Served, request: Request) -> bytes:
    _only(request)
    served.table.flush()
    return b"{}"


def _status(served: Served, request: Request) -> bytes:
    _only(request)
    return json.dumps(served.table.status().to_dict()).encode()


def _count(served: Served, request: Request) -> bytes:
    return json.dumps({"rows": _view(served, request).count_rows(**_only(request, "filter", _AT))}).encode()


def _schema(served: Served, request: Request) -> bytes:
    """A line of JSON with the key, followed by the columns with Lance's field ids."""
    schema = _view(served, request).table_schema
    said = json.dumps({"name": served.name, "primary_key": list(schema.primary_key)}).encode()
    columns: bytes = schema.columns.serialize().to_pybytes()
    return said + b"\n" + columns


ACTIONS: Mapping[str, Action] = {
    "count_rows": Action("How many rows there are; takes a filter", _count),
    "flush": Action("Move all rows from memory and logs to SSTables", _flush, writes=True),
    "schema": Action("The table's columns and key", _schema),
    "status": Action("What waits for a flush, for compaction and for an index", _status),
}
