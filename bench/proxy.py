"""An S3 server that is far away: a proxy in front of it delays, refuses and records every request.

What passes through it is everything that reaches storage, pylance's own requests included. The proxy
is a process of its own, so that it takes no part in the work that is measured:

    with S3Server() as server, Proxy(server.endpoint, latency=0.060) as proxy:
        options = {**server.storage_options, "aws_endpoint": proxy.endpoint}
        table = lancewal.open(server.uri("table"), storage_options=options)
        with proxy.recording() as recording:
            table.lookup([7])
        print(len(recording.requests), recording.depth)

The depth of an operation is its longest chain of requests of which each began after the one before had
ended: what it costs in round trips, however many requests run side by side. It is computed from the times
that the proxy saw. Requests that are made side by side must overlap for that, so leave ``latency``
well above the time that it takes to send them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.servers import ServerProcess

_CONTROL = "/_proxy/"
_HEAD_BYTES = 1 << 20
_SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the proxy saw it; times by the machine's monotonic clock."""

    kind: str
    path: str
    status: int
    began: float
    ended: float
    sent: int
    received: int


@dataclass(slots=True)
class Recording:
    """The requests of a block, once the block has ended."""

    requests: list[Request] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return depth_of(self.requests)

    @property
    def kinds(self) -> Counter[str]:
        return Counter(request.kind for request in self.requests)

    @property
    def bytes_read(self) -> int:
        return sum(request.received for request in self.requests)

    @property
    def bytes_written(self) -> int:
        return sum(request.sent for request in self.requests)


def depth_of(requests: Iterable[Request]) -> int:
    """The longest chain in which each request began after the one before had ended."""
    deepest = 0
    running: list[tuple[float, int]] = []
    longest_ended = 0
    for request in sorted(requests, key=lambda request: request.began):
        while running and running[0][0] <= request.began:
            longest_ended = max(longest_ended, heappop(running)[1])
        heappush(running, (request.ended, longest_ended + 1))
        deepest = max(deepest, longest_ended + 1)
    return deepest


class Proxy(ServerProcess):
    """The proxy's process; it ends with the block, and with the process that started it.

    ``latency`` and ``jitter`` are in seconds: each request waits for the first and a random part of the
    second. Beyond ``requests_per_second`` requests are refused as S3 does it, with 503.
    Shares of the requests, by chance: ``refuse`` are refused too, of ``cut`` the connection is cut before
    the server hears of them, and of ``lose`` the reply is lost.
    """

    def __init__(
        self,
        upstream: str,
        *,
        latency: float = 0.0,
        jitter: float = 0.0,
        requests_per_second: float | None = None,
    ) -> None:
        self._upstream = upstream
        self._settings = {"latency": latency, "jitter": jitter, "requests_per_second": requests_per_second}

    def __enter__(self) -> Proxy:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.proxy", self._upstream, json.dumps(self._settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        port = self.process.stdout.readline().strip()
        if not port:
            self.stop()
            raise RuntimeError("the proxy did not start")
        self.endpoint = f"http://127.0.0.1:{port}"
        return self

    def set(self, **settings: float | None) -> None:
        """Change any of the settings from now on."""
        self._ask("settings", json.dumps(settings).encode())

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """The requests that end within the block."""
        recording = Recording()
        self._ask("requests")
        try:
            yield recording
        finally:
            recording.requests = [Request(**request) for request in self._ask("requests")]

    def _ask(self, what: str, body: bytes | None = None) -> Any:
        request = urllib.request.Request(f"{self.endpoint}{_CONTROL}{what}", body)
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.loads(reply.read())


# ------------------------------------------------------------------ the process


@dataclass
class _Message:
    """The head of a request or reply, and its body."""

    first_line: bytes
    headers: Mapping[bytes, bytes]
    raw_head: bytes
    body: bytes


class _Server:
    def __init__(self, upstream: str, settings: dict[str, float | None]) -> None:
        where = urlsplit(upstream)
        self._upstream = (where.hostname, where.port)
        self._settings = settings
        self._random = random.Random(0)
        self._requests: list[Request] = []
        self._second, self._in_second = 0, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection, and one connection to the server behind it."""
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while (request := await _read_message(reader)) is not None:
                path = request.first_line.split(b" ")[1].decode()
                if path.startswith(_CONTROL):
                    writer.write(_reply(b"200 OK", self._control(path, request.body), b"application/json"))
                else:
                    began = time.monotonic()
                    if upstream is None:
                        upstream = await asyncio.open_connection(*self._upstream)
                    reply = await self._forward(request, *upstream)
                    writer.write(reply.raw_head + reply.body)
                    self._record(request, reply, path, began)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            for each in (writer, *([upstream[1]] if upstream is not None else [])):
                each.close()

    async def _forward(
        self, request: _Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> _Message:
        delay = (self._settings["latency"] or 0) + (self._settings["jitter"] or 0) * self._random.random()
        await asyncio.sleep(delay)
        if self._happens("cut"):
            raise ConnectionError("cut on purpose")
        if self._is_throttled() or self._happens("refuse"):
            raw = _reply(b"503 Slow Down", _SLOW_DOWN, b"application/xml")
            return _Message(b"HTTP/1.1 503 Slow Down", {}, raw, b"")
        writer.write(request.raw_head + request.body)
        await writer.drain()
        reply = await _read_message(reader, is_reply_to=request.first_line.split(b" ")[0])
        if reply is None:
            raise ConnectionError("the server behind the proxy hung up")
        if self._happens("lose"):
            raise ConnectionError("lost on purpose")
        return reply

    def _happens(self, trouble: str) -> bool:
        return self._random.random() < (self._settings.get(trouble) or 0)

    def _is_throttled(self) -> bool:
        most = self._settings["requests_per_second"]
        if most is None:
            return False
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._in_second = second, 0
        self._in_second += 1
        return self._in_second > most

    def _record(self, request: _Message, reply: _Message, path: str, began: float) -> None:
        method = request.first_line.split(b" ")[0].decode()
        status = int(reply.first_line.split(b" ")[1])
        self._requests.append(
            Request(
                kind=_kind(method, path),
                path=urlsplit(path).path,
                status=status,
                began=began,
                ended=time.monotonic(),
                sent=len(request.body),
                received=len(reply.body),
            )
        )

    def _control(self, path: str, body: bytes) -> bytes:
        if path == f"{_CONTROL}settings":
            self._settings.update(json.loads(body))
            return b"{}"
        taken, self._requests = self._requests, []
        return json.dumps([asdict(request) for request in taken]).encode()


def _kind(method: str, path: str) -> str:
    query = parse_qs(urlsplit(path).query, keep_blank_values=True)
    if method == "GET" and ("list-type" in query or "prefix" in query):
        return "LIST"
    if method == "POST" and "delete" in query:
        return "DELETE MANY"
    return method


async def _read_message(reader: asyncio.StreamReader, is_reply_to: bytes | None = None) -> _Message | None:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first_line, *lines = raw[:-4].split(b"\r\n")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)
    }
    if is_reply_to == b"HEAD" or first_line.split(b" ")[1] in (b"204", b"304"):
        body = b""
    elif headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        body = await _read_chunks(reader)
    else:
        body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
    return _Message(first_line, headers, raw, body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    """A chunked body with its framing, as it is passed on."""
    parts = []
    while True:
        size = await reader.readuntil(b"\r\n")
        length = int(size.split(b";")[0], 16)
        parts += [size, await reader.readexactly(length + 2)]
        if length == 0:
            return b"".join(parts)


def _reply(status: bytes, body: bytes, content_type: bytes) -> bytes:
    head = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (
        status,
        content_type,
        len(body),
    )
    return head + body


async def _serve(upstream: str, settings: dict[str, float | None]) -> None:
    server = await asyncio.start_server(_Server(upstream, settings).serve, "127.0.0.1", 0, limit=_HEAD_BYTES)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


def _end_with_the_starter() -> None:
    """The starter closes our standard input when it stops or dies; nobody waits for open connections."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="the proxy's process; see Proxy")
    parser.add_argument("upstream")
    parser.add_argument("settings", type=json.loads)
    arguments = parser.parse_args()
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    asyncio.run(_serve(arguments.upstream, arguments.settings))
