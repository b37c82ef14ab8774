"""What a streaming query has done and has left to do, beside what Spark's own progress says.

Spark 4.3 takes no figures from Python data sources: neither their readers nor their writers have a method for
it, and the process of a sink's commit answers with one number, which says that it is through
(``pyspark/sql/worker/python_streaming_sink_runner.py``). Its progress has the rows of a micro-batch, and of
the feed the place that was reached and the newest one. So the commit leaves its figures in the table, in the
record that says that the micro-batch is done, where :func:`sink_report` finds them from any process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from lancewal.publish import ShardWrite, Transaction, TransactionLog
from lancewal.spark.options import POSITIONS, parse_positions
from lancewal.storage import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True)
class BatchReport:
    """What a stream did with one micro-batch.

    ``rows`` were written. ``entries`` and ``wal_bytes`` are those that were appended to logs; what came as
    SSTables has an entry of no rows in each shard that points to them. ``skipped`` counts the shards that
    had their part already, from an attempt that was interrupted. ``conflicts`` counts how often somebody
    else claimed a shard while it was written to, which was then tried again. ``positions`` are those of the
    entries, by shard, and ``tails`` how many positions of its log no SSTable holds, where that is known.
    ``through_owners`` says that somebody else writes to the table: then its owners took the rows.
    """

    batch_id: int
    rows: int
    entries: int
    wal_bytes: int
    skipped: int
    through_owners: bool
    conflicts: int = 0
    positions: Mapping[UUID, int] = field(default_factory=dict)
    tails: Mapping[UUID, int] = field(default_factory=dict)

    @classmethod
    def of(cls, batch_id: int, written: Sequence[ShardWrite], *, through_owners: bool = False) -> BatchReport:
        parts = [each for each in written if not each.skipped]
        return cls(
            batch_id,
            sum(each.rows for each in parts),
            len(parts),
            sum(each.wal_bytes for each in parts),
            len(written) - len(parts),
            through_owners,
            sum(each.conflicts for each in written),
            {each.shard_id: each.position for each in parts if each.position is not None},
            {each.shard_id: each.tail for each in parts if each.tail},
        )


def sink_report(
    query: StreamingQuery | StreamingQueryProgress | str,
    uri: str,
    *,
    storage_options: Mapping[str, str] | None = None,
) -> BatchReport | None:
    """What the newest micro-batch that a query has finished did in the table, by format or with low latency.

    ``query`` may also be its progress, as a ``StreamingQueryListener`` gets it, or the ``txn_app_id`` that it
    writes under. ``None`` before the first one. ``through_owners`` is not known here.

    .. code-block:: python

        class Conflicts(StreamingQueryListener):
            def onQueryProgress(self, event):
                report = sink_report(event.progress, uri)
                if report is not None and report.conflicts:
                    warn(event.progress.batchId, report)
    """
    app_id = query if isinstance(query, str) else str(query.id)
    store = ObjectStore.from_uri(uri, storage_options)
    found = TransactionLog(store, Transaction(app_id, 0)).last_written()
    return None if found is None else BatchReport.of(*found)


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
