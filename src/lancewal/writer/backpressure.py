"""Puts wait here while memory holds more than it may."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from lancewal.writer.stats import WriteStats

logger = logging.getLogger(__name__)


class Backpressure:
    """Holds callers back while ``unflushed()`` is at or above the limit.

    ``relieve`` is called at every turn to make sure that something will lower it (a
    flush that runs, or one that must be started); it raises when nothing ever will.
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
        self._condition = threading.Condition()
        self._wakes = 0

    def admit(self) -> None:
        """Return once there is room. Never fails for lack of room alone, however long it takes."""
        if self._unflushed() < self._limit:
            return
        started = time.monotonic()
        try:
            while True:
                seen = self._wakes
                self._relieve()
                with self._condition:
                    if self._unflushed() < self._limit:
                        return
                    # A wake since `seen` may be an error that relieve() came too early for.
                    woken = self._wakes != seen or self._condition.wait(self._log_interval)
                if not woken:
                    logger.warning(
                        "put has waited %.1f s for a flush: %d unflushed bytes, limit %d",
                        time.monotonic() - started,
                        self._unflushed(),
                        self._limit,
                        extra=self._context,
                    )
        finally:
            self._stats.record_backpressure(time.monotonic() - started)

    def wake(self) -> None:
        """Something changed (a flush ended, an error was latched, the writer closes): look again."""
        with self._condition:
            self._wakes += 1
            self._condition.notify_all()
