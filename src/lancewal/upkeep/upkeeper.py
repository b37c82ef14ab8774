"""Upkeeper: runs rounds of upkeep in a thread of this process until it is closed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from lancewal.maintenance import UpkeepSettings
from lancewal.storage import Worker, is_forked, process_totals
from lancewal.upkeep.plan import Work
from lancewal.upkeep.rounds import TaskOutcome, Upkeep, UpkeepReport

logger = logging.getLogger(__name__)

#: The most commits of a shard in one task, so that a running task ends soon after a stop.
MOST_COMMITS = 4
#: While nothing is due, a look is delayed by up to this many extra intervals: each look costs requests.
_IDLE_INTERVALS = 6
#: How long ``stop`` waits for the running task. After that the task continues by itself, and does no harm.
_STOP_SECONDS = 30.0
#: How long the last round may take in a process that ended before its first look.
_LAST_ROUND_SECONDS = 30.0
_LONGEST_PAUSE = 600.0


def _nothing_changed() -> int:
    return 0


class Upkeeper:
    """Keeps a table in shape from a thread, until it is closed; a context manager.

    Get one with ``Table.upkeeper()``. It checks for work every ``interval`` of the table's settings, and less
    often while nothing is due. It does one task at a time and rests after each, so that it works for at most
    ``max_share`` of the time. It never holds a lock that a put needs.
    """

    def __init__(
        self,
        upkeep: Upkeep,
        *,
        changes: Callable[[], int] = _nothing_changed,
        report: Callable[[TaskOutcome], object] = lambda outcome: None,
        settings: UpkeepSettings | Mapping[str, Any] | None = None,
    ) -> None:
        """``changes`` counts this process's changes to the table; when it grows, the next look is due."""
        self._upkeep = upkeep
        self._changes = changes
        self._report = report
        self._settings = None if settings is None else UpkeepSettings.of(settings)
        self._tried: set[Work] = set()
        self._found_work = False
        self._idle_looks = 0
        self._failed_looks = 0
        self._seen_changes = 0
        self._interval = 0.0
        # The next look is at ``_latest``, or from ``_earliest`` on as soon as something has changed.
        self._earliest = self._latest = 0.0
        #: How many looks there were so far.
        self.looks = 0
        self._worker = Worker("lancewal-upkeep", self._step)

    def start(self, after: float = 0.0) -> Upkeeper:
        """Start the thread, with the first look after ``after`` seconds."""
        self._look_again(after)
        self._worker.kick_for_later()
        return self

    def stop(self, timeout: float | None = _STOP_SECONDS) -> None:
        """Start no more tasks, and wait for the running one. Safe to call twice."""
        if not is_forked():
            self._worker.stop(timeout)

    def close(self) -> None:
        """Stop. If there was no look so far, do what is due now, for up to half a minute.

        So a program that runs again and again, puts some rows and ends, keeps the table in shape too.
        """
        self.stop()
        if self.looks or is_forked():
            return
        self.looks += 1
        until = time.monotonic() + _LAST_ROUND_SECONDS
        try:
            report: UpkeepReport = self._upkeep.round(self._settings, stop=lambda: time.monotonic() > until)
        except Exception as error:
            logger.warning("upkeep of %s is left to others: %s", self._upkeep.uri, error)
        else:
            for outcome in report.outcomes:
                self._report(outcome)

    def __enter__(self) -> Upkeeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _step(self) -> float:
        now, changes = time.monotonic(), self._changes()
        if now < self._earliest:
            return self._earliest - now
        if now < self._latest and changes == self._seen_changes:
            return min(self._latest - now, self._interval)
        self._seen_changes = changes
        self.looks += 1
        try:
            outcome, settings = self._upkeep.do_next(
                self._tried, self._settings, lambda: self._worker.stopping
            )
        except Exception as error:
            return self._look_failed(error)
        self._failed_looks = 0
        self._interval = settings.interval.total_seconds()
        if outcome is None:
            return self._round_ended()
        self._tried.add(outcome.task.work)
        self._found_work |= not outcome.left_to_others and not outcome.failed
        self._report(outcome)
        return self._look_again(outcome.seconds * (1 / settings.max_share - 1))

    def _round_ended(self) -> float:
        """Called when nothing more is due. The next round begins at once if this one did some work."""
        self._tried.clear()
        found, self._found_work = self._found_work, False
        self._idle_looks = 0 if found else self._idle_looks + 1
        pause = self._look_again(0.0 if found else self._interval)
        self._latest += self._interval * min(max(self._idle_looks - 1, 0), _IDLE_INTERVALS)
        return pause

    def _look_failed(self, error: Exception) -> float:
        self._failed_looks += 1
        process_totals.add(self._upkeep.uri, {"upkeep.look.failures": 1})
        pause = min(2.0 ** min(self._failed_looks, 20), _LONGEST_PAUSE)
        logger.warning("upkeep of %s looks again in %.0f s: %s", self._upkeep.uri, pause, error)
        return self._look_again(pause)

    def _look_again(self, pause: float) -> float:
        self._earliest = self._latest = time.monotonic() + pause
        return pause
