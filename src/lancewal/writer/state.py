"""Whether a writer may still write and be read: the latch that all its parts share."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import TypeVar
from uuid import UUID

from lancewal.errors import ClosedError, LanceWalError
from lancewal.forks import check_process

E = TypeVar("E", bound=BaseException)

#: How long the garbage collector waits for a thread of a writer that was dropped.
DROPPED_PATIENCE_SECONDS = 1.0


def fresh_copy(error: LanceWalError) -> LanceWalError:
    """A kept error, to be raised: the object itself would mix the tracebacks of many threads,
    and keep alive all that their frames hold, the dropped writer included."""
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    return copied


def without_frames(error: E) -> E:
    """An error to be kept, or to be raised in another thread: its frames hold the rows of others."""
    seen: set[int] = set()
    each: BaseException | None = error
    # Causes may go round in a circle.
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


class WriterState:
    """Open, closed, or ended by a terminal error; the first error stays.

    Parts of a writer hold this instead of the writer itself, so that a writer that was
    dropped without ``close`` can be collected while its threads still wind down.
    """

    def __init__(self, shard_id: UUID, epoch: int) -> None:
        self.shard_id = shard_id
        self.epoch = epoch
        self.closed = False
        self._failure: LanceWalError | None = None
        self._poisoned = False
        self._on_end: list[Callable[[], None]] = []

    @property
    def failure(self) -> LanceWalError | None:
        return self._failure

    @property
    def poisoned(self) -> bool:
        """Whether memory may hold rows that the log never got."""
        return self._poisoned

    @property
    def context(self) -> dict[str, object]:
        """What log records of this writer carry."""
        return {"shard": str(self.shard_id), "epoch": self.epoch}

    def when_ended(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when waiting makes no sense any more."""
        self._on_end.append(wake)

    def fail(self, error: LanceWalError, *, memory_ahead_of_log: bool) -> None:
        """Latch ``error``. With ``memory_ahead_of_log`` reads end too: they would show lost rows."""
        self._poisoned = self._poisoned or memory_ahead_of_log
        self._failure = self._failure or error
        self._wake_all()

    def close(self) -> None:
        self.closed = True
        self._wake_all()

    def check_usable(self) -> None:
        """Raise what a put must fail with, if any."""
        check_process()
        if self._failure is not None:
            raise self.latched()
        if self.closed:
            raise ClosedError(f"the writer of shard {self.shard_id} is closed; open a new one")

    def check_readable(self) -> None:
        """Raise when memory may hold rows that the log never got, or is not kept up any more."""
        check_process()
        if self._poisoned:
            raise self.latched()
        if self.closed:
            raise ClosedError(f"the writer of shard {self.shard_id} is closed; read through Table.scan")

    def patience(self) -> float | None:
        """How many seconds to wait for a background thread to end; ``None``: until it has ended.

        A writer that was dropped is stopped by the garbage collector, which runs in any
        thread and under any lock, also one that the background thread needs to get on. At
        exit all must have ended, or the interpreter would go away under them.
        """
        if self.closed or not threading.main_thread().is_alive():
            return None
        return DROPPED_PATIENCE_SECONDS

    def latched(self) -> LanceWalError:
        """The terminal error, to be raised."""
        if self._failure is None:
            return ClosedError(f"the writer of shard {self.shard_id} is closed; open a new one")
        return fresh_copy(self._failure)

    def _wake_all(self) -> None:
        for wake in self._on_end:
            wake()
