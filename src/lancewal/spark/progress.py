"""What a streaming query has done and has left to do, beside what Spark's own progress says.

Spark 4.3 takes no figures from Python data sources: neither their readers nor their writers have a method for
it. Its progress has the rows of a micro-batch, and of the feed the place that was reached and the newest one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from lancewal.publish import ShardWrite
from lancewal.spark.options import POSITIONS, parse_positions

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True)
class BatchReport:
    """What :func:`~lancewal.spark.stream` did with one micro-batch.

    ``rows``, ``entries`` and ``wal_bytes`` are those that were appended. ``skipped`` counts the shards that
    had their part already, from an attempt that was interrupted. ``conflicts`` counts how often somebody
    else claimed a shard while a task wrote to it, which was then tried again. ``positions`` are those of the
    entries, by shard. ``through_owners`` says that somebody else writes to the table: then its owners took
    the rows, and the figures are 0.
    """

    batch_id: int
    rows: int
    entries: int
    wal_bytes: int
    skipped: int
    through_owners: bool
    conflicts: int = 0
    positions: Mapping[UUID, int] = field(default_factory=dict)

    @classmethod
    def of(cls, batch_id: int, written: Sequence[ShardWrite] | None) -> BatchReport:
        """``None`` where owners took the rows."""
        parts = [each for each in written or () if not each.skipped]
        return cls(
            batch_id,
            sum(each.rows for each in parts),
            len(parts),
            sum(each.wal_bytes for each in parts),
            len(written or ()) - len(parts),
            written is None,
            sum(each.conflicts for each in written or ()),
            {each.shard_id: each.position for each in parts if each.position is not None},
        )


def feed_lag(query: StreamingQuery) -> dict[UUID, int]:
    """How many positions of each shard's log a query on the change feed had left after its last micro-batch.

    Empty before the first one. A position is an entry, whatever number of rows it has.

    .. code-block:: python

        query = changes(spark, uri).writeStream.foreachBatch(apply).start()
        if sum(feed_lag(query).values()) > 1000:
            warn()

    >>> from types import SimpleNamespace
    >>> feed_lag(SimpleNamespace(lastProgress=None))  # a query that has just been started
    {}
    """
    progress = query.lastProgress
    lag: dict[UUID, int] = {}
    for source in progress.sources if progress is not None else ():
        reached, newest = (_positions(each) for each in (source.endOffset, source.latestOffset))
        for shard, end in newest.items():
            lag[shard] = lag.get(shard, 0) + max(end - reached.get(shard, end), 0)
    return lag


def _positions(offset: object) -> dict[UUID, int]:
    """Those of an offset of the feed; none of any other's."""
    try:
        found = json.loads(offset) if isinstance(offset, str) else offset
    except ValueError:
        return {}
    if not isinstance(found, dict) or POSITIONS not in found:
        return {}
    return parse_positions(found[POSITIONS], "the query's offset")
