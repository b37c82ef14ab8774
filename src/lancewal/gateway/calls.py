"""The running calls of a gateway: their limit, which of them wait for their client, and which are cut.

A call holds a thread of the server, even while it waits: for the next put of an open stream, until the client
has received rows of a read, or until there is a change that a follower of the feed can be told. So one client
could block all others by doing nothing. When the limit is reached, the connections of calls that have waited
for longer than ``Limits.idle`` are cut.
lancewal's own clients notice that, connect again, and send what was not answered once more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from lancewal.errors import BusyError, InvalidInputError, UnavailableError

#: A client that takes no row of a read for so many seconds is not waited for when the gateway stops.
_READ_PAUSE = 1.0
#: A wait has a bound, because locks do not wait for longer than some hundred years.
LONGEST_WAIT = 3600.0

STOPPING = "this gateway is stopping; call the one that takes its place"


@dataclass(frozen=True)
class Limits:
    """The limits of one gateway."""

    #: The most concurrent calls; further calls get :class:`BusyError`. A client's open ``DoPut`` counts as a
    #: call, and holds a thread.
    calls: int = 512
    #: The most bytes of one put; a larger one is refused.
    put_bytes: int = 64 << 20
    #: How many seconds a put waits for room in memory before it gets :class:`BusyError`.
    patience: float = 5.0
    #: How many seconds a call may wait for its client while other calls are refused for lack of room.
    idle: float = 10.0
    #: How many seconds :meth:`Gateway.close` waits for running reads.
    drain: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, whole = getattr(self, field.name), field.name in ("calls", "put_bytes")
            is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not is_number or not value >= (1 if whole else 0):
                wanted = "a whole number of at least 1" if whole else "a number of seconds"
                raise InvalidInputError(f"the limit {field.name} is {value!r}; give {wanted}")


class Call:
    """One running call. ``peer`` is Flight's name of the client's end of the connection."""

    __slots__ = ("_calls", "_since", "is_cancelled", "is_read", "peer", "waits_since")

    def __init__(self, calls: Calls, peer: str, is_cancelled: Callable[[], bool], is_read: bool) -> None:
        self._calls = calls
        self.is_read = is_read
        self.peer = peer
        self.is_cancelled = is_cancelled
        self.waits_since: float | None = None
        self._since: float | None = None

    def waiting(self, since: float | None = None) -> Call:
        """A context manager for a time in which the call only waits; it began now, or at ``since``."""
        self._since = since
        return self

    def seconds_until_idle(self, now: float) -> float:
        """How long until the call counts as idle, if nothing happens; infinite for one that does not wait.

        A read waits for its client with every batch, so it is idle only if the client takes none for a while.
        """
        if self.waits_since is None:
            return float("inf")
        return self.waits_since + _READ_PAUSE - now if self.is_read else 0.0

    def __enter__(self) -> None:
        # Takes no lock in the common case. So the time is set first, and only then ``closed`` is checked, to
        # wake ``wait_until_idle``.
        self.waits_since = time.monotonic() if self._since is None else self._since
        if self._calls.closed:
            self._calls.notify()

    def __exit__(self, *_: object) -> None:
        self.waits_since = None


class Calls:
    """Counts the running calls, and refuses calls above the limit or after :meth:`close`."""

    def __init__(self, limits: Limits, cut: Callable[[set[str]], object]) -> None:
        """``cut`` ends the connections of the given peers."""
        self._limits = limits
        self._cut = cut
        self._changed = threading.Condition()
        self._under_way: set[Call] = set()
        self.closed = False

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    @property
    def any_read(self) -> bool:
        """Whether a read is under way."""
        with self._changed:
            return any(call.is_read for call in self._under_way)

    @contextlib.contextmanager
    def counted(self, peer: str) -> Iterator[Call]:
        call = self.enter(peer)
        try:
            yield call
        finally:
            self.leave(call)

    def enter(
        self, peer: str, is_cancelled: Callable[[], bool] = lambda: False, *, is_read: bool = False
    ) -> Call:
        with self._changed:
            if self.closed:
                raise UnavailableError(STOPPING)
            if len(self._under_way) < self._limits.calls:
                call = Call(self, peer, is_cancelled, is_read)
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

    def wait_until_idle(self, timeout: float) -> set[str]:
        """Wait until every running call only waits for its client; returns the peers of these calls."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                now = time.monotonic()
                left = max([call.seconds_until_idle(now) for call in self._under_way], default=0.0)
                if left <= 0 or now >= deadline:
                    return {call.peer for call in self._under_way}
                self._changed.wait(min(left, deadline - now, LONGEST_WAIT))
