"""Whether a writer may still write and be read: the latch that all its parts share."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar
from uuid import UUID

from lancewal.errors import ClosedError, LanceWalError, OutcomeUnknownError, StorageError
from lancewal.storage import Bell, check_process
from lancewal.writer.stats import WriteStats

logger = logging.getLogger(__name__)

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
        if isinstance(self._failure, OutcomeUnknownError):
            # Of an earlier write; what comes now does not happen.
            raise StorageError(f"the writer ended before: {self._failure}; open a new one") from self._failure
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


# Puts wait here while memory holds more than it may.


class Backpressure:
    """Holds callers back while what is in memory, and what was let in, is at or above the limit.

    ``unflushed`` tells what is in memory, ``relieve`` is called at every turn to make sure that
    something will lower it (a flush that runs, or one that must be started); it raises when
    nothing ever will.

    A put counts from the moment it is let in: many threads that come at the same time would
    otherwise all find room. Each holds a lock of its own, its ``put``, by ``with`` until it is over,
    so that one that was interrupted does not count.
    """

    def __init__(
        self,
        limit: int,
        log_interval: float,
        stats: WriteStats,
        *,
        unflushed: Callable[[], int],
        relieve: Callable[[], None],
        context: dict[str, object],
    ) -> None:
        self._limit = limit
        self._log_interval = log_interval
        self._stats = stats
        self._unflushed = unflushed
        self._relieve = relieve
        self._context = context
        self._lock = threading.Lock()
        self._let_in: dict[threading.Lock, int] = {}
        self._bell = Bell()
        self._wakes = 0

    @property
    def let_in_bytes(self) -> int:
        """Bytes of the puts that were let in and are not in memory yet."""
        if not self._let_in:
            return 0
        return sum([num_bytes for put, num_bytes in list(self._let_in.items()) if put.locked()])

    def admit(self, put: threading.Lock, num_bytes: int) -> None:
        """Return once there is room. Never fails for lack of room alone, however long it takes."""
        if self._let_in_now(put, num_bytes):
            return
        started = time.monotonic()
        try:
            while True:
                seen = self._wakes
                self._relieve()
                if self._let_in_now(put, num_bytes):
                    return
                # A wake since `seen` may be an error that relieve() came too early for.
                if not self._bell.wait_for(lambda: self._wakes != seen, self._log_interval):  # noqa: B023
                    logger.warning(
                        "put has waited %.1f s for a flush: %d unflushed bytes, limit %d",
                        time.monotonic() - started,
                        self._unflushed(),
                        self._limit,
                        extra=self._context,
                    )
        finally:
            self._stats.record_backpressure(time.monotonic() - started)

    def settle(self, put: threading.Lock) -> None:
        """The rows of the put are in memory, or will never be."""
        self._let_in.pop(put, None)

    def wake(self) -> None:
        """Something changed (a flush ended, an error was latched, the writer closes): look again."""
        self._wakes += 1
        self._bell.ring()

    def _let_in_now(self, put: threading.Lock, num_bytes: int) -> bool:
        with self._lock:
            if self._unflushed() + self.let_in_bytes >= self._limit:
                return False
            self._let_in[put] = num_bytes
            return True
