"""The client of a gateway: reads and writes a served table like :class:`~lancewal.Table`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
from pyarrow import flight

from lancewal.errors import InvalidInputError, LanceWalError, UnavailableError
from lancewal.format import TableSchema, checked_columns
from lancewal.gateway.connection import DEFAULT_TIMEOUT, Connection, Trying, as_error, chunks_of
from lancewal.gateway.contract import Request
from lancewal.gateway.remote_writer import RemoteWriter
from lancewal.reader import LookupResult, Queries, asked_keys, is_one_key, run_sql
from lancewal.storage import span
from lancewal.writer import Cast, Intake


def connect(
    address: str | Sequence[str],
    *,
    table: str = "",
    token: str | None = None,
    tls_root_certs: bytes | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> RemoteTable:
    """Connect to a table that ``lancewal serve`` serves, to read it and to write to it.

    ``address`` is the gateway's, such as ``grpc+tls://host:port``. With several addresses, such as a gateway
    and its stand-by, the next one is tried when one cannot be reached. ``table`` is the table's name, if the
    gateway serves several. ``token`` is sent with every call. A call is retried for ``timeout`` seconds while
    no gateway accepts it.

    >>> import tempfile, lancewal
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1}], key="id")
    >>> with lancewal.Gateway({"events": table}) as gateway:
    ...     with lancewal.connect(gateway.address, table="events", timeout=10) as remote:
    ...         remote.count_rows()
    1
    """
    is_one = isinstance(address, str | bytes) or not isinstance(address, Iterable)
    addresses: list[Any] = [address] if is_one else list(address)
    if not isinstance(table, str):
        raise InvalidInputError(f"table is {table!r}; give the name under which the gateway serves it")
    if not addresses:
        raise InvalidInputError("connect needs the address of a gateway, as grpc+tls://host:port")
    return RemoteTable(Connection(addresses, token, tls_root_certs, timeout), table)


class RemoteView:
    """Reads of a table behind a gateway, now or at a checkpoint, like :class:`~lancewal.TableView`."""

    def __init__(self, connection: Connection, name: str = "", checkpoint: str | None = None) -> None:
        self._connection = connection
        self._name = name
        self._at = {} if checkpoint is None else {"at": checkpoint}
        self._lock = threading.Lock()
        self._schema: TableSchema | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    @property
    def uri(self) -> str:
        """The gateway's address and the table's name there."""
        return f"{self._connection.address}/{self._name}"

    @property
    def schema(self) -> pa.Schema:
        """The table's columns; read from the gateway each time."""
        return self._read_schema().plain

    @property
    def primary_key(self) -> tuple[str, ...]:
        """The key columns in key order, empty for an append-only table; read from the gateway each time."""
        return self._read_schema().primary_key

    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        limit: int | None = None,
        offset: int | None = None,
        with_row_source: bool = False,
    ) -> RemoteScan:
        """All rows, each key once, in its newest version; nothing is read before the result is used."""
        args: dict[str, Any] = {
            "columns": _listed(columns),
            "filter": filter,
            "limit": limit,
            "offset": offset,
        }
        if with_row_source:
            args["with_row_source"] = True
        # A limit of 0 is no missing limit.
        return RemoteScan(self, {name: value for name, value in args.items() if value is not None})

    def count_rows(self, filter: str | None = None) -> int:
        """The number of rows."""
        said = self._act("count_rows", {} if filter is None else {"filter": filter})
        return int(json.loads(said)["rows"])

    def lookup(self, keys: Any, columns: Sequence[str] | None = None) -> LookupResult | dict[str, Any] | None:
        """The newest rows of some keys: for one key its row or ``None``, for several a
        :class:`LookupResult`."""
        schema = self._known_schema()
        if not schema.primary_key:
            raise InvalidInputError("this table has no primary key, so no row can be looked up by it")
        arrays = asked_keys(keys, schema, Intake(schema))
        values = pa.Table.from_arrays(arrays, names=list(schema.primary_key))
        args = {} if columns is None else {"columns": _listed(columns)}
        rows, said = self._get(Request("lookup", self._name, args, values))
        result = LookupResult(rows, np.array(said["found"], np.bool_))
        if not is_one_key(keys, schema):
            return result
        found: list[dict[str, Any]] = rows.to_pylist()
        return found[0] if found else None

    def search(
        self, query: Any = None, k: int = 10, *, vector: Any = None, text: Any = None, **how: Any
    ) -> pa.Table:
        """The ``k`` best rows for a vector, a text or both, or for a batch, like :meth:`Table.search`."""
        queries = Queries.of(query, vector, text)
        return self._search("search", {"text": queries.text, "k": k, **how}, queries.vector)

    def vector_search(self, column: str, query: Any, k: int = 10, **how: Any) -> pa.Table:
        """The ``k`` rows whose vectors are nearest to ``query``, like :meth:`Table.vector_search`."""
        return self._search("vector_search", {"column": column, "k": k, **how}, query)

    def full_text_search(self, column: str, query: str, k: int = 10, **how: Any) -> pa.Table:
        """The ``k`` rows that match best, like :meth:`Table.full_text_search`."""
        return self._search("full_text_search", {"column": column, "query": query, "k": k, **how}, None)

    def hybrid_search(
        self, vector_column: str, vector: Any, text_column: str, text: str, k: int = 10, **how: Any
    ) -> pa.Table:
        """The best rows of a vector and a text search together, like :meth:`Table.hybrid_search`."""
        args = {"vector_column": vector_column, "text_column": text_column, "text": text, "k": k, **how}
        return self._search("hybrid_search", args, vector)

    def sql(self, query: str) -> pa.Table:
        """The result of an SQL query, like :meth:`Table.sql`; it runs in this process."""
        return run_sql(query, self.schema, lambda columns: self.scan(columns=columns).to_table())

    def _search(self, op: str, args: dict[str, Any], vector: Any) -> pa.Table:
        if "columns" in args:
            args["columns"] = _listed(args["columns"])
        values = None if vector is None else pa.table({"vector": _vector(vector)})
        return self._get(Request(op, self._name, args, values))[0]

    def _get(self, request: Request, *, streams: bool = False) -> tuple[pa.Table, dict[str, Any]]:
        """The rows and the metadata that a read returns."""
        ticket = flight.Ticket(replace(request, args={**request.args, **self._at}).encode())

        def get(
            client: flight.FlightClient, options: flight.FlightCallOptions
        ) -> tuple[pa.Table, dict[str, Any]]:
            reader = client.do_get(ticket, options)
            batches, said = [], {}
            for chunk in chunks_of(reader):
                batches.append(chunk.data)
                if chunk.app_metadata is not None:
                    said = json.loads(chunk.app_metadata.to_pybytes())
            return pa.Table.from_batches(batches, reader.schema), said

        with span("lancewal.call", kind="CLIENT", operation=request.op, served_as=self._name):
            return self._connection.call(get, streams=streams)

    def _act(self, op: str, args: Mapping[str, Any]) -> bytes:
        action = flight.Action(op, Request(op, self._name, {**args, **self._at}).encode())

        def act(client: flight.FlightClient, options: flight.FlightCallOptions) -> bytes:
            (result,) = client.do_action(action, options)
            body: bytes = result.body.to_pybytes()
            return body

        with span("lancewal.call", kind="CLIENT", operation=op, served_as=self._name):
            return self._connection.call(act)

    def _known_schema(self) -> TableSchema:
        with self._lock:
            known = self._schema
        return known or self._read_schema()

    def _read_schema(self) -> TableSchema:
        said, _, columns = self._act("schema", {}).partition(b"\n")
        schema = TableSchema(
            pa.ipc.read_schema(pa.py_buffer(columns)), tuple(json.loads(said)["primary_key"])
        )
        with self._lock:
            self._schema = schema
        return schema


class RemoteTable(RemoteView):
    """A table behind a gateway; see :class:`~lancewal.Table` for what its methods do.

    >>> import tempfile, lancewal
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1, "text": "a fox"}], key="id")
    >>> with lancewal.Gateway({"t": table}) as gateway, lancewal.connect(gateway.address) as remote:
    ...     with remote.writer() as writer:
    ...         _ = writer.put({"id": 2, "text": "a wolf"})
    ...         _ = writer.delete(1)
    ...     remote.lookup(2), remote.count_rows("id > 1")
    ...     remote.search("wolf", columns=["id"]).num_rows, sorted(remote.status())[:1]
    ({'id': 2, 'text': 'a wolf'}, 1)
    (1, ['base'])
    """

    def writer(self, *, cast: Cast = "numbers") -> RemoteWriter:
        """A writer that writes through the gateway; ``cast`` works as in :meth:`Table.writer`."""
        return RemoteWriter(
            self._connection,
            self._name,
            self._known_schema(),
            cast,
            newest=self._read_schema,
            find=lambda where, columns: self.scan(columns, where).to_batches(),
        )

    def at(self, name: str) -> RemoteView:
        """The rows and columns of a checkpoint, like :meth:`Table.at`."""
        if not isinstance(name, str):
            raise InvalidInputError(f"{name!r} is no name of a checkpoint")
        view = RemoteView(self._connection, self._name, name)
        _ = view.schema  # refuses an unknown checkpoint
        return view

    def changes(
        self,
        start: Mapping[UUID, int] | Mapping[str, int] | None = None,
        *,
        follow: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[pa.RecordBatch, dict[UUID, int]]]:
        """Changes from ``start`` on; each batch has a place to continue from, like :meth:`Table.changes`.

        ``stop`` is asked after each batch, and every few seconds without any.
        If the gateway is lost, the changes go on with the next one. Some batches may come again then: with
        ``follow`` those after the last place, otherwise all, because their place is the end of the changes.
        """
        args: dict[str, Any] = {"follow": follow}
        if start is not None and not isinstance(start, Mapping):
            raise InvalidInputError(f"start is {start!r}; give a place that came with a batch")
        if start is not None:
            args["start"] = {str(shard): position for shard, position in start.items()}
        trying = Trying(self._connection.timeout)
        while not (follow and stop()):
            client, turn = self._connection.client()
            failure: LanceWalError = UnavailableError("the gateway ended the feed")
            ticket = flight.Ticket(Request("changes", self._name, args).encode())
            try:
                for batch, place in _with_places(client.do_get(ticket, self._connection.options())):
                    if batch.num_rows:
                        yield batch, {UUID(shard): position for shard, position in place.items()}
                    if follow:
                        # Whatever comes after a lost connection begins here, at this or another gateway.
                        args["start"] = place
                        if stop():
                            return
                    trying = Trying(self._connection.timeout)
                if not follow:
                    return
            except (flight.FlightError, pa.ArrowException, OSError) as error:
                failure = as_error(error)
            trying.again(self._connection, turn, failure)

    def flush(self) -> None:
        """Move all rows from MemTables and WALs to SSTables."""
        self._act("flush", {})

    def status(self) -> dict[str, Any]:
        """What waits for a flush, for compaction and for an index, as ``Table.status().to_dict()``."""
        said: dict[str, Any] = json.loads(self._act("status", {}))
        return said

    def close(self) -> None:
        """Close the connection, which this table shares with its writers."""
        self._connection.close()

    def __enter__(self) -> RemoteTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class RemoteScan:
    """A scan; nothing is read before one of its methods is called."""

    _table: RemoteView
    _args: Mapping[str, Any]

    def to_table(self) -> pa.Table:
        """Read all rows into memory."""
        return self._table._get(Request("scan", self._table._name, self._args), streams=True)[0]

    def to_pandas(self) -> Any:
        """Read all rows into a pandas DataFrame; requires pandas, which you install yourself."""
        return self.to_table().to_pandas()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_batches().__arrow_c_stream__(requested_schema)

    def to_batches(self) -> pa.RecordBatchReader:
        """The rows as they arrive. If the connection is lost in between, the read fails."""
        args = {**self._args, **self._table._at}
        ticket = flight.Ticket(Request("scan", self._table._name, args).encode())
        with span("lancewal.call", kind="CLIENT", operation="scan", served_as=self._table._name):
            reader = self._table._connection.call(
                lambda client, options: client.do_get(ticket, options), streams=True
            )

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                for chunk in chunks_of(reader):
                    yield chunk.data
            except (flight.FlightError, pa.ArrowException, OSError) as error:
                raise as_error(error) from None

        return pa.RecordBatchReader.from_batches(reader.schema, batches())

    def count_rows(self) -> int:
        """The number of rows."""
        if self._args.get("columns") is not None:
            checked_columns(self._args["columns"], self._table._read_schema())
        if set(self._args) <= {"filter", "columns"}:
            return self._table.count_rows(self._args.get("filter"))
        return int(self.to_table().num_rows)


def _with_places(reader: Any) -> Iterator[tuple[pa.RecordBatch, dict[str, int]]]:
    """The batches of the feed with their places, which come with the batch or with an empty one after it."""
    held: list[pa.RecordBatch] = []
    for chunk in chunks_of(reader):
        held.append(chunk.data)
        if chunk.app_metadata is not None:
            place = json.loads(chunk.app_metadata.to_pybytes())["place"]
            for batch in [each for each in held if each.num_rows] or held[:1]:
                yield batch, place
            held = []


def _listed(columns: Any) -> Any:
    """Names of columns as a list; the gateway refuses what is none."""
    is_several = isinstance(columns, Iterable) and not isinstance(columns, str | Mapping)
    return list(columns) if is_several else columns


def _vector(query: Any) -> pa.Array:
    """A query vector with its own type, or a list of vectors."""
    try:
        if isinstance(query, pa.Array):
            return query
        found = np.asarray(query)
        if found.ndim > 2:
            raise ValueError(f"it has the shape {found.shape}")
        return pa.array(list(found) if found.ndim == 2 else found.ravel())
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise InvalidInputError(f"a query vector is an array of numbers: {error}") from None
