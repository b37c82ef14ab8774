"""Rows that nobody waits for reach the WAL by size or by time."""

from __future__ import annotations

import logging
import time

from lancewal.errors import LanceWalError
from lancewal.writer.commit_log import CommitLog
from lancewal.writer.config import ShardWriterConfig
from lancewal.writer.state import WriterState
from lancewal.writer.worker import Worker

logger = logging.getLogger(__name__)


class WalFlushWorker:
    """Commits the log once it holds ``max_wal_buffer_size`` bytes, or its oldest row is old enough."""

    def __init__(self, config: ShardWriterConfig, log: CommitLog, state: WriterState) -> None:
        self._log = log
        self._state = state
        self._max_bytes = config.max_wal_buffer_size
        interval = config.max_wal_flush_interval
        self._interval = interval.total_seconds() if interval is not None else None
        self._waiting_since: float | None = None
        self._worker = Worker(f"lancewal-wal-{state.shard_id}", self._step)

    def nudge(self) -> None:
        """Called after rows were queued; cheap unless there is something to do."""
        if self._log.pending_bytes >= self._max_bytes:
            self._worker.kick()
        elif self._waiting_since is None and self._interval is not None:
            self._waiting_since = time.monotonic()
            try:
                self._worker.kick()
            except BaseException:
                self._waiting_since = None  # or later rows would take this one's kick for granted
                raise

    def stop(self, timeout: float | None = None) -> None:
        self._worker.stop(timeout)

    def _step(self) -> float | None:
        if self._state.failure is not None:
            return None
        since = self._waiting_since
        if self._log.pending_bytes < self._max_bytes and since is not None and self._interval is not None:
            left = since + self._interval - time.monotonic()
            if left > 0:
                return left
        # Cleared first: rows that are queued from here on start the next interval.
        self._waiting_since = None
        try:
            self._log.commit_all()
        except LanceWalError:
            # Latched in the log: the next put, wait or close raises it.
            logger.debug("timed WAL flush failed", exc_info=True)
        return None
