"""The calls under way: how many there may be, which of them wait for their client, and who has to give way.

A call holds a thread of the server, also while it waits for its client: for the next put of an open stream,
or until rows were taken that a read has sent. So one client could keep all others out by doing nothing. When
there is no room left, the connections of calls that have waited for longer than ``Limits.idle`` are cut.
lancewal's own clients notice, connect again, and send what was not answered once more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lancewal.errors import BusyError, UnavailableError

STOPPING = "this gateway is stopping; call the one that takes its place"


@dataclass(frozen=True)
class Limits:
    """What one gateway takes on; who comes beyond it is told to try again."""

    #: Calls at a time. An open ``DoPut`` of a client is one, and holds a thread.
    calls: int = 512
    #: Bytes of one put.
    put_bytes: int = 64 << 20
    #: Seconds that a put waits for room in memory before it is told to try again.
    patience: float = 5.0
    #: Seconds that a call may wait for its client while others find no room.
    idle: float = 10.0
    #: Seconds that :meth:`Gateway.close` waits for reads that are under way.
    drain: float = 30.0


class Call:
    """One call under way. ``peer`` is its client's end of the connection, as Flight names it."""

    __slots__ = ("_calls", "peer", "waits_since")

    def __init__(self, calls: Calls, peer: str) -> None:
        self._calls = calls
        self.peer = peer
        self.waits_since: float | None = None

    def waiting(self) -> Call:
        """For a ``with`` while the call waits for its client."""
        return self

    def __enter__(self) -> None:
        # Without the lock of all calls: first it is said, then looked whether somebody waits for it.
        self.waits_since = time.monotonic()
        if self._calls.closed:
            self._calls.notify()

    def __exit__(self, *_: object) -> None:
        self.waits_since = None


class Calls:
    """Counts the calls under way, and refuses those beyond the limit or after the end."""

    def __init__(self, limits: Limits, cut: Callable[[set[str]], object]) -> None:
        """``cut`` ends the connections of some peers."""
        self._limits = limits
        self._cut = cut
        self._changed = threading.Condition()
        self._under_way: set[Call] = set()
        self.closed = False

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    @contextlib.contextmanager
    def counted(self, peer: str) -> Iterator[Call]:
        call = self.enter(peer)
        try:
            yield call
        finally:
            self.leave(call)

    def enter(self, peer: str) -> Call:
        with self._changed:
            if self.closed:
                raise UnavailableError(STOPPING)
            if len(self._under_way) < self._limits.calls:
                call = Call(self, peer)
                self._under_way.add(call)
                return call
            latest = time.monotonic() - self._limits.idle
            idle = {c.peer for c in self._under_way if c.waits_since is not None and c.waits_since < latest}
        if idle:
            self._cut(idle)
        raise BusyError(f"{self._limits.calls} calls are under way, as many as are allowed; call again")

    def leave(self, call: Call) -> None:
        with self._changed:
            self._under_way.discard(call)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.closed = True

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_until_idle(self, timeout: float) -> None:
        """Until no call is under way but those that only wait for their client."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(call.waits_since is not None for call in self._under_way), timeout
            )
