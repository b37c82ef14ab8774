"""Puts wait here while memory holds more than it may."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from lancewal.parallel import Bell
from lancewal.writer.stats import WriteStats

logger = logging.getLogger(__name__)


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
