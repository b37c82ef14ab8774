"""Backlog: how far compaction is behind a shard's writer, and for how long each put is delayed for it.

A writer learns with every flush which SSTables its shard has. Above ``slowdown_sstables`` each put is delayed
a little, twice as long for every SSTable more, so that reads do not grow without limit and puts meet no wall.

Only where somebody compacts: slowing down helps nobody else. That is known from the lists themselves: their
oldest generation has moved within the last minutes. So a table that nobody compacts is written at full speed,
and one whose compactor died is again after some minutes. A delay is never longer than :data:`LONGEST_DELAY`,
and no put is stopped for good.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lancewal.format import ShardManifest

#: Of a small put, with the first SSTable that is too many.
FIRST_DELAY = 0.002
LONGEST_DELAY = 5.0
#: Bytes that are delayed as a small put is.
_SMALL_BYTES = 64 << 10
#: For how long a compaction that was seen counts as somebody who compacts.
COMPACTED_LATELY = 600.0


class Backlog:
    """What one writer knows of its shard's SSTables."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._oldest: int | None = None
        self._moved = float("-inf")
        #: SSTables above the setting, as of the last look; puts look at it first.
        self.excess = 0

    def note(self, manifest: ShardManifest) -> None:
        """Take over what the newest manifest lists."""
        listed = [entry.generation for entry in manifest.sstables]
        oldest = min(listed, default=manifest.current_generation)
        if self._oldest is not None and oldest > self._oldest:
            self._moved = self._clock()
        self._oldest = oldest
        self.excess = max(0, len(listed) - self._most)

    def delay(self, num_bytes: int) -> float:
        """Seconds that a put of so many bytes waits.

        >>> backlog = Backlog(most=4)
        >>> backlog.excess = 3
        >>> backlog.delay(100)  # nobody compacts
        0.0
        """
        if not self.excess or self._clock() - self._moved > COMPACTED_LATELY:
            return 0.0
        weight = max(1.0, num_bytes / _SMALL_BYTES)
        return min(FIRST_DELAY * weight * 2.0 ** min(self.excess - 1, 30), LONGEST_DELAY)
