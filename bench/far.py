"""Tables on an S3 server that is far away, and what an operation asks of it.

A table is built once, in a local directory, and put on the server under a new name for every try. So what
writes can be tried again, and nothing in this process knows the new name yet: the first read of it is cold.

    with FarStorage() as far:
        place = far.place(directory)
        cost = far.cost_of(lambda: place.table().lookup(7))
        print(cost.requests, cost.depth, cost.kinds)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

import lance

import lancewal
from bench.proxy import Proxy
from lancewal.storage import ObjectStore, ordered_map
from tests.servers import S3Server

#: Well above the time that it takes to send requests side by side, see ``bench.proxy``.
LATENCY = 0.030
_UPLOADS = 16


@dataclass(frozen=True)
class Cost:
    """What one call asked of the storage."""

    depth: int
    kinds: dict[str, int]
    bytes_read: int
    bytes_written: int

    @property
    def requests(self) -> int:
        return sum(self.kinds.values())

    def least(self, other: Cost | None) -> Cost:
        """The smaller of two tries, figure by figure: other work on the machine only adds."""
        if other is None:
            return self
        fewer = self if self.requests <= other.requests else other
        return Cost(min(self.depth, other.depth), fewer.kinds, fewer.bytes_read, fewer.bytes_written)


@dataclass(frozen=True)
class Place:
    """A table on the server, reached through the proxy."""

    uri: str
    options: dict[str, str]

    def table(self) -> lancewal.Table:
        return lancewal.open(self.uri, self.options)

    def store(self) -> ObjectStore:
        return ObjectStore.from_uri(self.uri, self.options)

    def dataset(self) -> lance.LanceDataset:
        return lance.dataset(self.uri, storage_options=self.options)

    def as_process(self, name: str) -> Place:
        """The same table as another process has it: what is kept under other options is not found."""
        return Place(self.uri, {**self.options, "user_agent": name})


class FarStorage:
    """The server and the proxy in front of it; both end with the block."""

    def __init__(self, *, latency: float = LATENCY, server: S3Server | None = None, **settings: Any) -> None:
        """``server``: one that runs already. ``settings``: of the proxy."""
        self._given = server
        self.latency = latency
        self._settings = settings
        self._open = ExitStack()

    def __enter__(self) -> FarStorage:
        with ExitStack() as opened:
            self.server = self._given or opened.enter_context(S3Server())
            self.proxy = opened.enter_context(Proxy(self.server.endpoint, **self._settings))
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def place(self, directory: Path | None = None) -> Place:
        """A new place on the server, with a copy of the table in ``directory`` unless it is empty."""
        uri = self.server.uri(f"{uuid4().hex}/table")
        if directory is not None:
            nearby = ObjectStore.from_uri(uri, self.server.storage_options)

            def upload(path: Path) -> None:
                nearby.put(path.relative_to(directory).as_posix(), path.read_bytes())

            files = [path for path in directory.rglob("*") if path.is_file()]
            list(ordered_map(upload, files, _UPLOADS))
        return Place(uri, {**self.server.storage_options, "aws_endpoint": self.proxy.endpoint})

    def cost_of(self, call: Callable[[], object]) -> Cost:
        """What ``call`` asks for, while every request takes :attr:`latency`; before and after none does."""
        self.proxy.set(latency=self.latency)
        try:
            with self.proxy.recording() as recording:
                call()
        finally:
            self.proxy.set(latency=0.0)
        return Cost(
            recording.depth,
            dict(sorted(recording.kinds.items())),
            recording.bytes_read,
            recording.bytes_written,
        )
