"""Puts that come while others are under way go together, as one message.

Threads and coroutines of a client each wait for a put of their own. Sent one by one, each would cost the
client and the gateway a message, an answer and a thread that wakes up; gathered, many share one. It is the
idea of the group commit (``lancewal.writer.group_commit``) one step earlier, and works alike: whoever comes
first sends, those that come meanwhile stand in line, and one of these sends for all of them next. A lone put
is sent at once, by its own thread.

A thread that sends is a caller's, so an interrupt (Ctrl-C) may end it at any step. What it was sending stays
where the others find it, and one of them sends it again, under the same id.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import pyarrow as pa

from lancewal.errors import LanceWalError
from lancewal.gateway.contract import describe, rebuilt
from lancewal.storage import LOOK_AGAIN_SECONDS

logger = logging.getLogger(__name__)

#: Bytes that go together.
_MOST_BYTES = 16 << 20
#: Seconds. A message that has been under way for longer is not waited for: the next one goes beside it. So
#: nobody waits for a large put, or for one whose shard has no room.
_LONG = 0.1
#: Whoever sends next waits for company, but no longer than this share of what the last message took.
_GATHER_SHARE = 0.5


@dataclass(eq=False)
class Waiting(ABC):
    """One put or delete, and whoever waits for it."""

    op: str
    #: Batches, or what a delete takes.
    data: Any
    #: The columns of the batches; what has none goes alone.
    schema: pa.Schema | None
    num_rows: int
    num_bytes: int

    @abstractmethod
    def settle(self, outcome: int | BaseException) -> None:
        """Tell the rows that were written, or why they were not; only the first outcome counts."""

    def wake(self) -> None:  # noqa: B027
        """If this is a thread that waits, it looks for an outcome or for something to send."""

    @property
    def given_up(self) -> bool:
        """Whether nobody waits any more."""
        return False

    def goes_with(self, first: Waiting) -> bool:
        return bool(
            self.op == first.op
            and self.schema is not None
            and first.schema is not None
            and self.schema.equals(first.schema, check_metadata=True)
        )


W = TypeVar("W", bound=Waiting)
M = TypeVar("M")


def take_group(waiting: list[W]) -> list[W]:
    """Remove from the front what goes together next."""
    group: list[W] = []
    taken = num_bytes = 0
    for each in waiting:
        if not each.given_up:
            num_bytes += each.num_bytes
            if group and (num_bytes > _MOST_BYTES or not each.goes_with(group[0])):
                break
            group.append(each)
        taken += 1
    del waiting[:taken]
    return group


@dataclass(eq=False)
class ThreadPut(Waiting):
    """A put whose thread waits."""

    outcome: int | BaseException | None = field(init=False, default=None)
    group: Group[Any] | None = field(init=False, default=None)
    #: Held by ``with`` for as long as the thread is there.
    present: threading.Lock = field(init=False, default_factory=threading.Lock)
    #: Locked while the thread waits, and released by whoever wakes it.
    gate: threading.Lock = field(init=False, default_factory=threading.Lock)

    def settle(self, outcome: int | BaseException) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self.wake()

    @property
    def given_up(self) -> bool:
        return not self.present.locked()

    def wake(self) -> None:
        if self.gate.locked():
            with suppress(RuntimeError):  # another thread has opened it
                self.gate.release()


@dataclass(eq=False)
class Group(Generic[M]):
    """Puts that one message carries."""

    puts: Sequence[Waiting]
    leader: ThreadPut | None = None
    began: float = field(default_factory=time.monotonic)
    #: How far its sender has come, for another one that has to go on: the message, once there is one, and the
    #: puts one by one, once it was refused as a whole.
    message: M | None = None
    apart: list[Group[M]] | None = None

    @property
    def is_led(self) -> bool:
        return self.leader is not None and self.leader.present.locked()

    @property
    def is_abandoned(self) -> bool:
        return all(put.given_up for put in self.puts)

    def settle(self, error: BaseException | None = None) -> None:
        """Every put that has no outcome yet gets the error, or else its rows."""
        for put in self.puts:
            put.settle(put.num_rows if error is None else own_copy(error))


def own_copy(error: BaseException) -> BaseException:
    """An error for one of several threads: the object itself would mix their tracebacks."""
    return rebuilt(describe(error)) if isinstance(error, LanceWalError) else error


class Gathering(Generic[M]):
    """The line of the threads that write through one writer."""

    def __init__(self, send: Callable[[Group[M]], None]) -> None:
        """``send`` settles all puts of a group; if it was cut short it is called with that group again."""
        self._send = send
        self._lock = threading.Lock()
        self._waiting: list[ThreadPut] = []
        self._under_way: list[Group[M]] = []
        self._expected = 0
        self._gather_until = 0.0

    def write(self, put: ThreadPut) -> int:
        """Send the put, or have it sent; its rows."""
        with put.present:
            with self._lock:
                self._waiting.append(put)
            while put.outcome is None:
                group = self._to_lead(put)
                if group is not None:
                    self._lead(group)
                elif put.outcome is None:
                    put.gate.acquire(timeout=self._look_again_after(put))
        if isinstance(put.outcome, int):
            return put.outcome
        try:
            raise put.outcome
        finally:
            put.outcome = 0  # or this frame and the error would keep each other alive

    def _to_lead(self, put: ThreadPut) -> Group[M] | None:
        """What this thread has to send now; ``None`` if it has to wait."""
        with self._lock:
            put.gate.acquire(blocking=False)  # whoever wakes it from here on finds it locked
            if put.outcome is not None:
                return None
            group = put.group
            if group is None:
                if self._is_sending() or self._is_gathering():
                    return None
                taken = take_group(self._waiting)
                group = Group(taken)
                for each in taken:
                    each.group = group
            elif group.is_led:
                return None
            group.leader = put
            self._under_way.append(group)
            return group

    def _is_sending(self) -> bool:
        """Requires the lock. Whether a message is under way that is worth waiting for."""
        self._under_way = [group for group in self._under_way if group.is_led]
        latest = time.monotonic() - _LONG
        return any(group.began > latest for group in self._under_way)

    def _is_gathering(self) -> bool:
        """Requires the lock. Whether those that the last message served are about to come again.

        Without it two halves of the callers take turns with half-empty messages. A lone caller never waits,
        and with the last one that is expected the wait ends.
        """
        return len(self._waiting) < self._expected and time.monotonic() < self._gather_until

    def _look_again_after(self, put: ThreadPut) -> float:
        if put.group is not None:
            return LOOK_AGAIN_SECONDS
        left = self._gather_until - time.monotonic()
        return left if left > 0.0 and not self._under_way else _LONG

    def _lead(self, group: Group[M]) -> None:
        sent = False
        try:
            self._send(group)
            sent = True
        except Exception as error:
            logger.debug("a message was not sent", exc_info=True)
            group.settle(error)
            sent = True
        finally:
            with self._lock:
                if group in self._under_way:
                    self._under_way.remove(group)
                now = time.monotonic()
                took = now - group.began
                if took < _LONG:
                    self._expected = len(group.puts) + len(self._waiting)
                    self._gather_until = now + _GATHER_SHARE * took
                for put in (*self._waiting[:1], *group.puts[: 0 if sent else None]):
                    put.wake()
