"""Gathers puts that arrive while others are being sent, and sends them together as one message.

Each thread or coroutine of a client waits for its own put. Sent one by one, each put would cost the client
and the gateway a message, an answer and a thread that wakes up; gathered puts share these costs. This is the
idea of the group commit (``lancewal.writer.group_commit``) one step earlier, and it works the same way: the
first thread sends, later ones wait in line, and then one of these sends for all of them. A lone put is sent
at once, by its own thread.

The sending thread belongs to a caller, so an interrupt (Ctrl-C) may end it at any step. The other threads
still have the group that it was sending, and one of them sends it again, under the same id.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

import pyarrow as pa

from lancewal.errors import LanceWalError
from lancewal.gateway.contract import describe, rebuilt
from lancewal.storage import LOOK_AGAIN_SECONDS

logger = logging.getLogger(__name__)

#: The most bytes of one message, unless a single put is larger.
_MOST_BYTES = 16 << 20
#: After so many seconds a running message is no longer waited for: the next one is sent alongside it. So no
#: put waits for a large one, or for one whose shard has no room.
_LONG = 0.1
#: The next sender waits for more puts no longer than this share of the last message's duration.
_GATHER_SHARE = 0.5


@dataclass(eq=False)
class Waiting(ABC):
    """One operation, and the thread or coroutine that waits for it."""

    op: str
    #: Batches, or the arguments of a delete or update.
    data: Any
    #: The columns of the batches; an operation without them is sent alone.
    schema: pa.Schema | None
    num_rows: int
    num_bytes: int
    #: The number of rows written, or the error; ``None`` until that is known.
    outcome: int | BaseException | None = field(init=False, default=None)

    @abstractmethod
    def settle(self, outcome: int | BaseException) -> None:
        """Set the outcome: the number of rows written, or the error; only the first outcome counts.

        Whoever waits learns of it by :meth:`wake`.
        """

    @abstractmethod
    def wake(self) -> None:
        """Wake whoever waits, so that they look for an outcome or for something to send."""

    @property
    def given_up(self) -> bool:
        """Whether the caller no longer waits."""
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


def take_group(waiting: dict[W, None]) -> list[W]:
    """Remove the operations of the next message from the front of the line."""
    group: list[W] = []
    gone: list[W] = []
    num_bytes = 0
    for each in waiting:
        if each.given_up:
            gone.append(each)
            continue
        num_bytes += each.num_bytes
        if group and (num_bytes > _MOST_BYTES or not each.goes_with(group[0])):
            break
        group.append(each)
    for each in (*gone, *group):
        del waiting[each]
    return group


@dataclass(eq=False)
class ThreadPut(Waiting):
    """A put whose caller is a waiting thread."""

    group: Group[Any] | None = field(init=False, default=None)
    #: The thread holds this lock, by ``with``, for as long as it waits.
    present: threading.Lock = field(init=False, default_factory=threading.Lock)
    #: Locked while the thread waits; the thread that wakes it releases it.
    gate: threading.Lock = field(init=False, default_factory=threading.Lock)

    def settle(self, outcome: int | BaseException) -> None:
        if self.outcome is None:
            self.outcome = outcome

    @property
    def given_up(self) -> bool:
        return not self.present.locked()

    def wake(self) -> None:
        if self.gate.locked():
            with suppress(RuntimeError):  # another thread has opened it
                self.gate.release()


@dataclass(eq=False)
class Group(Generic[M]):
    """The puts of one message."""

    puts: Sequence[Waiting]
    leader: ThreadPut | None = None
    began: float = field(default_factory=time.monotonic)
    #: The sender's progress, so that another thread can continue: the message, once it is made, and a group
    #: for each put, once the message was refused as a whole.
    message: M | None = None
    apart: list[Group[M]] | None = None

    @property
    def is_led(self) -> bool:
        return self.leader is not None and self.leader.present.locked()

    @property
    def is_abandoned(self) -> bool:
        return all(put.given_up for put in self.puts)

    def settle(self, error: BaseException | None = None) -> None:
        """Give every put without an outcome the error, or its number of rows if there is no error."""
        for put in self.puts:
            put.settle(put.num_rows if error is None else own_copy(error))
        if isinstance(error, LanceWalError):
            # Its frames have the rows and the error: together they would stay in memory.
            error.__traceback__ = None
        for put in self.puts:
            put.wake()


def own_copy(error: BaseException) -> BaseException:
    """A copy of an error for one of several threads: a shared object would mix their tracebacks."""
    return rebuilt(describe(error)) if isinstance(error, LanceWalError) else error


class Turnout:
    """How many puts the next message is likely to get, and how long it is worth waiting for them.

    The callers of a message usually put again as soon as it is answered. Without a short wait, two halves of
    them would take turns with half-empty messages. A lone caller never waits, and the wait ends when all
    expected puts have come.
    """

    def __init__(self) -> None:
        self.expected = 0
        self._until = 0.0

    def note(self, sent: int, waiting: int, seconds: float) -> None:
        """A message of ``sent`` puts was answered after so many seconds, while ``waiting`` others waited."""
        if seconds < _LONG:
            self.expected = sent + waiting
            self._until = time.monotonic() + _GATHER_SHARE * seconds

    def seconds_left(self, waiting: int) -> float:
        """How long to wait for more puts than those that wait already; 0 if no longer."""
        return max(0.0, self._until - time.monotonic()) if waiting < self.expected else 0.0


class Gathering(Generic[M]):
    """The line of threads that write through one writer."""

    def __init__(self, send: Callable[[Group[M]], None]) -> None:
        """``send`` settles all puts of a group; after an interrupt it is called again with the same group."""
        self._send = send
        self._lock = threading.Lock()
        self._waiting: dict[ThreadPut, None] = {}
        self._under_way: list[Group[M]] = []
        self._turnout = Turnout()

    def write(self, put: ThreadPut) -> int:
        """Send the put, or let another thread send it; returns its rows."""
        with put.present:
            with self._lock:
                self._waiting[put] = None
            while put.outcome is None:
                group = self._to_lead(put)
                if group is not None:
                    self._lead(group)
                elif put.outcome is None:
                    put.gate.acquire(timeout=self._look_again_after(put))
        put.group = None  # the group has the put: together they would keep its rows in memory
        if isinstance(put.outcome, int):
            return put.outcome
        try:
            raise put.outcome
        finally:
            put.outcome = 0  # otherwise this frame and the error would keep each other alive

    def _to_lead(self, put: ThreadPut) -> Group[M] | None:
        """The group that this thread has to send now; ``None`` if it has to wait."""
        with self._lock:
            put.gate.acquire(blocking=False)  # from here on a wake-up finds the gate locked and opens it
            if put.outcome is not None:
                return None
            group = put.group
            if group is None:
                if self._is_sending() or self._turnout.seconds_left(len(self._waiting)):
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
        """Whether a running message is worth waiting for. Requires the lock."""
        self._under_way = [group for group in self._under_way if group.is_led]
        latest = time.monotonic() - _LONG
        return any(group.began > latest for group in self._under_way)

    def _look_again_after(self, put: ThreadPut) -> float:
        if put.group is not None:
            return LOOK_AGAIN_SECONDS
        left = self._turnout.seconds_left(len(self._waiting))
        return left if left and not self._under_way else _LONG

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
                self._turnout.note(len(group.puts), len(self._waiting), time.monotonic() - group.began)
                for put in (*islice(self._waiting, 1), *group.puts[: 0 if sent else None]):
                    put.wake()
