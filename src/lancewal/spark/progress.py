"""What a streaming query has done and has left to do, in addition to Spark's own progress.

Spark 4.3 takes no figures from Python data sources: neither readers nor writers have a method for
them, and the process of a sink's commit returns only one number, which says that it is finished
(``pyspark/sql/worker/python_streaming_sink_runner.py``). Spark's progress has the rows of a micro-batch, and
for the feed the place that was reached and the newest place. So the commit stores its figures in the table,
in the record that says that the micro-batch is done. :func:`sink_report` reads them from any process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from lancewal.publish import ShardWrite, Transaction, TransactionLog
from lancewal.spark.options import POSITIONS, parse_positions
from lancewal.storage import ObjectStore, layout

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True)
class BatchReport:
    """What a stream did with one micro-batch.

    ``rows`` is the number of written rows. ``entries`` and ``wal_bytes`` count the entries that were appended
    to logs; rows that came as SSTables have one entry per shard, without rows, that points to them.
    ``skipped`` counts the shards that had their part already from an interrupted attempt. ``conflicts``
    counts how often another process claimed a shard during the write, which was then retried. ``positions``
    are the positions of the entries by shard. ``tails`` is how many positions of a shard's log are in no
    SSTable yet, if that is known. ``through_owners`` says that the shards' owners, other processes that
    write to the table, took the rows.
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
    """What the newest finished micro-batch of a query did in the table, in either kind of sink.

    ``query`` may also be its progress, as a ``StreamingQueryListener`` gets it, or the ``txn_app_id`` that it
    writes under. Returns ``None`` before the first micro-batch. ``through_owners`` is not known here.

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
    """How many log positions of each shard a query on the change feed had left after its last micro-batch.

    Empty before the first micro-batch. A position is one entry, with any number of rows.

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
        if reached is None or newest is None:
            continue
        for shard, end in newest.items():
            # A shard that came since is read from its beginning.
            left = end - reached.get(shard, layout.FIRST_WAL_POSITION)
            lag[shard] = lag.get(shard, 0) + max(left, 0)
    return lag


def _positions(offset: object) -> dict[UUID, int] | None:
    """The positions in an offset of the feed; ``None`` for any other source's offset."""
    try:
        found = json.loads(offset) if isinstance(offset, str) else offset
    except ValueError:
        return None
    if not isinstance(found, dict) or POSITIONS not in found:
        return None
    return parse_positions(found[POSITIONS], "the query's offset")
