"""Backlog: how far compaction is behind a shard's writer, and how that slows puts down.

A writer learns with every flush which SSTables its shard has. Above ``slowdown_sstables`` each put is delayed
a little, and the delay doubles with every further SSTable. So reads do not slow down without limit, and puts
are not stopped suddenly.

Puts are delayed only while compaction is running, because otherwise a delay would not help. The writer infers
this from the SSTable lists: the oldest generation moved within the last :data:`COMPACTED_LATELY` seconds. A
table without a compactor is written at full speed, and so is a table whose compactor died that long ago.
A delay is never longer than :data:`LONGEST_DELAY`.

``stop_sstables`` is an optional hard limit. From that number of SSTables on, puts wait until there are fewer,
whether compaction is running or not. After ``stop_timeout`` a waiting put is refused, and the caller can send
it again. A waiting put reads the manifest itself, so its wait does not depend on another thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from lancewal.errors import BusyError, StorageError
from lancewal.format import ShardManifest
from lancewal.writer.group_commit import Put, PutState
from lancewal.writer.state import WriterState, WriteStats

logger = logging.getLogger(__name__)

#: The delay of a small put when there is one SSTable too many, in seconds.
FIRST_DELAY = 0.002
LONGEST_DELAY = 5.0
#: A put of up to this many bytes is small; the delay of a larger one grows in proportion to its size.
_SMALL_BYTES = 64 << 10
#: For how many seconds after a compaction was seen the table counts as one that is compacted.
COMPACTED_LATELY = 600.0
#: How often stopped puts, all of them together, check whether compaction has caught up.
_LOOK_SECONDS = 0.5


class Backlog:
    """What one writer knows about its shard's SSTables."""

    def __init__(
        self, most: int, stop_at: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._stop_at = stop_at
        self._clock = clock
        self._oldest: int | None = None
        self._moved = float("-inf")
        self.listed = 0
        #: SSTables above ``slowdown_sstables`` in the last manifest that was read.
        self.excess = 0
        #: Whether puts have to wait until there are fewer SSTables.
        self.stops = False
        #: Whether puts are slowed down or stopped; puts check this first.
        self.behind = False

    def note(self, manifest: ShardManifest) -> None:
        """Update from the SSTables that the newest manifest lists."""
        listed = [entry.generation for entry in manifest.sstables]
        oldest = min(listed, default=manifest.current_generation)
        if self._oldest is not None and oldest > self._oldest:
            self._moved = self._clock()
        self._oldest = oldest
        self.listed = len(listed)
        self.excess = max(0, self.listed - self._most)
        self.stops = self._stop_at is not None and self.listed >= self._stop_at
        self.behind = self.excess > 0 or self.stops

    def delay(self, num_bytes: int) -> float:
        """Return the seconds that a put of ``num_bytes`` waits.

        >>> backlog = Backlog(most=4)
        >>> backlog.excess = 3
        >>> backlog.delay(100)  # nobody compacts
        0.0
        """
        if not self.excess or self._clock() - self._moved > COMPACTED_LATELY:
            return 0.0
        weight = max(1.0, num_bytes / _SMALL_BYTES)
        return min(FIRST_DELAY * weight * 2.0 ** min(self.excess - 1, 30), LONGEST_DELAY)


@dataclass(eq=False)
class Brake:
    """Holds back the puts of one writer while compaction is behind.

    No lock is held during a wait. When the writer is closed or fails, all waits end.
    """

    _backlog: Backlog
    _read_newest: Callable[[], ShardManifest | None]
    _stop_timeout: float
    _state: WriterState
    _stats: WriteStats
    _next_look: float = field(init=False, default=0.0)

    def look(self) -> bool:
        """Read the newest manifest; return whether this writer still owns the shard."""
        newest = self._read_newest()
        if newest is None or newest.writer_epoch > self._state.epoch:
            return False
        self._backlog.note(newest)
        return True

    def hold(self, put: Put, patience: float | None) -> float | None:
        """Wait as long as the backlog requires; return what is left of ``patience``.

        Raises :class:`BusyError` if a stopped put waited for all of ``patience`` or ``stop_timeout``. Raises
        the writer's own error if the writer has ended.
        """
        began = time.monotonic()
        if self._backlog.stops:
            self._stop(put, self._stop_timeout if patience is None else min(patience, self._stop_timeout))
        spent = time.monotonic() - began
        left = None if patience is None else max(0.0, patience - spent)
        delay = self._backlog.delay(put.rows.num_bytes)
        delay = delay if left is None else min(delay, left)
        if delay > 0.0:
            self._slow_down(delay)
        return None if left is None else left - delay

    def _slow_down(self, delay: float) -> None:
        until = time.monotonic() + delay
        self._stats.add(slowdown_count=1, slowdown_wait=delay)
        while (left := until - time.monotonic()) > 0:
            seen = self._state.changes
            self._state.check_usable()
            self._state.wait_for_change(seen, left)

    def _stop(self, put: Put, timeout: float) -> None:
        began = time.monotonic()
        logger.info(
            "a put waits for compaction: %d SSTables", self._backlog.listed, extra=self._state.context
        )
        self._stats.add(stop_count=1)
        try:
            while self._backlog.stops:
                seen = self._state.changes
                self._state.check_usable()
                if not self._has_looked():
                    return  # the shard is lost: the write to the log raises the right error
                left = began + timeout - time.monotonic()
                if self._backlog.stops and left <= 0.0:
                    self._refuse(put, time.monotonic() - began)
                if self._backlog.stops:
                    self._state.wait_for_change(seen, min(left, _LOOK_SECONDS))
        finally:
            self._stats.add(stop_wait=time.monotonic() - began)

    def _has_looked(self) -> bool:
        """Read the manifest if it is time, and wake the other puts; whether this writer still owns the shard.

        Two threads may read it at the same time, which does no harm. After a storage error the next turn
        reads it again.
        """
        now = time.monotonic()
        if now < self._next_look:
            return True
        self._next_look = now + _LOOK_SECONDS
        is_ours = True
        with suppress(StorageError):
            is_ours = self.look()
        self._state.note_change()
        return is_ours

    def _refuse(self, put: Put, waited: float) -> None:
        put.state = PutState.REFUSED  # no leader has seen this put, so its id need not keep its rows
        self._stats.add(stop_refusals=1)
        raise BusyError(
            f"shard {self._state.shard_id} has {self._backlog.listed} SSTables: stop_sstables lets no put "
            f"in before a compaction has taken some; this one has waited {waited:.1f} s. No row of it was "
            "written to the shard: send it again, and see that somebody compacts the table"
        )
