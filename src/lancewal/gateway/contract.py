"""The messages between clients and the gateway; ``docs/gateway.md`` describes them for users.

A *request* is a line of JSON (``table``, ``op``, and the operation's arguments). An Arrow IPC stream follows
if the request has values without a JSON type: keys, query vectors. A request is the ticket of a
``DoGet``, the body of a ``DoAction`` and the command of a ``DoPut``.

In a ``DoPut`` every record batch is one put. Its metadata may be JSON with a ``number`` and what is
``settled`` (see :class:`~lancewal.format.PutId`). Each put is answered with JSON that has its ``number`` and
either ``rows`` or an ``error``. An error is an object with its ``class``, ``text`` and a few details. A
client may gather the puts of several callers in one batch. Then ``puts`` has the number of rows of each put.
If only some shards fail, the answer says which puts have rows in which shard.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from lancewal import errors
from lancewal.errors import InvalidInputError, LanceWalError, PartialWriteError
from lancewal.gateway.received import refuse_malformed, unfolded_bytes

#: Attributes of errors that users branch on, besides the class.
_DETAILS = (
    "shard_id",
    "position",
    "first_retained",
    "found",
    "local_epoch",
    "stored_epoch",
    "doing",
    "address",
    "owner_id",
    "host",
    "pid",
    "shard_ids",
    "may_be_written",
    "why",
)
_MAX_JSON_BYTES = 1 << 20
#: gRPC refuses replies with more than 8 KiB of headers, and an error is in the headers twice.
_LONGEST_TEXT = 1000
#: The metadata of a single put as lancewal's clients write it; a JSON parser takes several times as long. Up
#: to 18 digits, which always fit 63 bits, and no leading zeros, which JSON does not allow.
_PLAIN = re.compile(rb'\{"number":(0|[1-9][0-9]{0,17}),"settled":(0|[1-9][0-9]{0,17})\}')


@dataclass(frozen=True, slots=True)
class Request:
    """One request: the operation, the name under which the table is served, and the arguments."""

    op: str
    table: str
    args: Mapping[str, Any] = field(default_factory=dict)
    values: pa.Table | None = None
    #: The values as they came. They may be a hundred times as large in memory, so only an operation that
    #: takes values decodes them.
    encoded_values: bytes | None = None

    def encode(self) -> bytes:
        """
        >>> Request.decode(Request("scan", "events", {"limit": 3}).encode()).args
        {'limit': 3}
        """
        try:
            said = json.dumps(
                {**self.args, "op": self.op, "table": self.table}, default=_without_numpy
            ).encode()
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"{self.op} cannot be sent to a gateway like this: {error}") from None
        if self.values is None:
            return said
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.values.schema) as writer:
            writer.write_table(self.values)
        return b"".join([said, b"\n", sink.getvalue()])

    @classmethod
    def decode(cls, data: bytes) -> Request:
        """Decode a request; raises :class:`InvalidInputError` for other bytes."""
        end = data.find(b"\n", 0, _MAX_JSON_BYTES + 1)
        said = data[:end] if end >= 0 else data
        args = _parsed(said)
        op, table = args.pop("op", None), args.pop("table", "")
        if not isinstance(op, str) or not isinstance(table, str):
            raise InvalidInputError('a request is JSON with the texts "op" and "table"')
        return cls(op, table, args, encoded_values=data[end + 1 :] if end >= 0 else None)

    def decoded_values(self, most_bytes: int) -> pa.Table | None:
        """The values of a decoded request, up to a limit; ``None`` if it has none."""
        if self.encoded_values is None:
            return None
        batches: list[pa.RecordBatch] = []
        held = 0
        try:
            with pa.ipc.open_stream(self.encoded_values) as stream:
                for batch in stream:
                    refuse_malformed(batch)
                    held += unfolded_bytes(batch)
                    if held > most_bytes:
                        raise InvalidInputError(
                            f"the request's values have more than {most_bytes} bytes; ask for fewer at a time"
                        )
                    batches.append(batch)
                return pa.Table.from_batches(batches, stream.schema)
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(f"the request's values are no Arrow IPC stream: {error}") from None


def _without_numpy(value: Any) -> Any:
    """A number of numpy as one of Python."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _parsed(said: bytes, most_bytes: int = _MAX_JSON_BYTES) -> dict[str, Any]:
    if len(said) > most_bytes:
        raise InvalidInputError(f"a request has {len(said)} bytes of JSON, {most_bytes} are allowed")
    try:
        parsed = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"a request begins with a line of JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidInputError("a request is a JSON object")
    return parsed


@dataclass(frozen=True, slots=True)
class Numbered:
    """The metadata of a put: its number in the session, and which numbers are settled."""

    number: int | None = None
    settled: int = 0
    #: The number of rows of each put, if a message carries several.
    parts: tuple[int, ...] = ()
    #: The client's trace headers. Each put has its own, because a stream sends its HTTP headers only once.
    trace: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        puts = b',"puts":[%s]' % ",".join(map(str, self.parts)).encode() if self.parts else b""
        trace = b',"trace":%s' % json.dumps(self.trace).encode() if self.trace else b""
        return b'{"number":%d,"settled":%d%s%s}' % (self.number or 0, self.settled, puts, trace)

    @classmethod
    def decode(cls, data: bytes | None) -> Numbered:
        if not data:
            return cls()
        plain = _PLAIN.fullmatch(data)
        if plain is not None:
            return cls(int(plain[1]), int(plain[2]))
        said = _parsed(data)
        number, settled, parts = said.get("number"), said.get("settled", 0), said.get("puts", [])
        if not isinstance(parts, list) or not all(_is_whole(each) for each in (number, settled, *parts)):
            raise InvalidInputError(
                'the metadata of a put is JSON with the whole numbers "number" and "settled", and "puts", a '
                "list of the rows of each, where it is several"
            )
        trace = said.get("trace", {})
        if not isinstance(trace, dict) or not all(isinstance(each, str) for each in trace.values()):
            raise InvalidInputError('"trace" in the metadata of a put is an object of texts')
        return cls(number, settled, tuple(parts), trace)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one message."""

    number: int | None
    rows: int = 0
    error: LanceWalError | None = None
    #: If only some shards failed: for each shard, which of the message's puts have rows in it.
    shards: Mapping[UUID, Sequence[int]] = field(default_factory=dict)

    def encode(self) -> bytes:
        if self.error is None and self.number is not None and not self.shards:
            return b'{"number": %d, "rows": %d}' % (self.number, self.rows)
        said: dict[str, Any] = {"number": self.number}
        if self.error is None:
            said["rows"] = self.rows
        else:
            said["error"] = describe(self.error)
        if self.shards:
            said["shards"] = {str(shard): list(puts) for shard, puts in self.shards.items()}
        return json.dumps(said).encode()

    @classmethod
    def decode(cls, data: bytes) -> Answer:
        """Decode an answer; raises :class:`LanceWalError` for other bytes, which do not say what happened."""
        try:
            said = _parsed(data, len(data))  # thousands of shards may each have an error
            if "error" in said:
                shards = {UUID(shard): puts for shard, puts in said.get("shards", {}).items()}
                return cls(said.get("number"), 0, rebuilt(said["error"]), shards)
            return cls(said.get("number"), int(said.get("rows", 0)))
        except (ValueError, TypeError, AttributeError) as error:
            raise LanceWalError(f"the gateway's answer is unreadable: {error}") from None


def describe(error: LanceWalError) -> dict[str, Any]:
    """Convert an error to JSON."""
    said: dict[str, Any] = {"class": type(error).__name__, "text": str(error)}
    details = {name: _plain(getattr(error, name)) for name in _DETAILS if hasattr(error, name)}
    if details:
        said["details"] = details
    if isinstance(error, PartialWriteError):
        said["failed"] = {
            str(shard): describe(each)
            if isinstance(each, LanceWalError)
            else {"class": "StorageError", "text": f"{type(each).__name__}: {each}"}
            for shard, each in error.failed.items()
        }
        said["written"] = {str(shard): rows for shard, rows in error.written.items()}
    return said


def described_briefly(error: LanceWalError) -> tuple[str, bytes]:
    """The text of an error, and :func:`describe` as JSON, both short enough for the headers of a reply."""
    text = str(error)
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]}… ({len(text)} characters)"
    said = json.dumps({**describe(error), "text": text}).encode()
    if len(said) > 4 * _LONGEST_TEXT:
        said = json.dumps({"class": type(error).__name__, "text": text}).encode()
    return text, said


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def rebuilt(said: Mapping[str, Any]) -> LanceWalError:
    """The inverse of :func:`describe`: an error with the same class, text and details.

    >>> rebuilt(describe(errors.ConflictError("came second")))
    ConflictError('came second')
    """
    kind = getattr(errors, str(said.get("class")), LanceWalError)
    if not (isinstance(kind, type) and issubclass(kind, LanceWalError)):
        kind = LanceWalError
    text = str(said.get("text", ""))
    if issubclass(kind, PartialWriteError):
        failed = {UUID(shard): rebuilt(each) for shard, each in said.get("failed", {}).items()}
        written = {UUID(shard): int(rows) for shard, rows in said.get("written", {}).items()}
        details = said.get("details", {})
        return PartialWriteError(str(details.get("doing", "put")), failed, written)
    # Not with its constructor, which takes other arguments and makes the text itself.
    error = kind.__new__(kind)
    error.args = (text,)
    for name, value in said.get("details", {}).items():
        if name in _DETAILS:
            setattr(error, name, _typed(name, value))
    return error


def _typed(name: str, value: Any) -> Any:
    if name == "shard_id" and isinstance(value, str):
        return UUID(value)
    if name == "shard_ids":
        return tuple(UUID(each) for each in value)
    return value
