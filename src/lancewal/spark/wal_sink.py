"""The tasks of the low-latency way: each owns some shards and appends one WAL entry to each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from lancewal.errors import InvalidInputError
from lancewal.publish import ShardWrite, append_transaction, finish_append
from lancewal.sharding import BUCKET, Shard, ShardRouter
from lancewal.spark.access import OpenTable
from lancewal.spark.options import Options
from lancewal.spark.rows import SparkRows
from lancewal.transactions import Transaction

#: One entry is written, replayed and held in memory whole.
MAX_ENTRY_BYTES = 1 << 30


@dataclass
class AppendedMessage(WriterCommitMessage):
    """What one task appended, on its way to the driver."""

    written: list[ShardWrite] = field(default_factory=list)


def encode_transaction(transaction: Transaction) -> str:
    return json.dumps({"app": transaction.app_id, "version": transaction.version})


class WalSink(DataSourceArrowWriter):
    """Writes rows that were routed by shard, see ``lancewal.spark.low_latency``."""

    def __init__(self, options: Options, transaction: str) -> None:
        given = json.loads(transaction)
        self._options = options
        self._transaction = Transaction(given["app"], given["version"])

    def write(self, iterator: Iterator[pa.RecordBatch]) -> AppendedMessage:
        context = TaskContext.get()
        assert context is not None, "Spark calls this in tasks only"
        return self.append(iterator, context.partitionId())

    def append(self, batches: Iterator[pa.RecordBatch], partition: int) -> AppendedMessage:
        """The whole of a task. Nothing is written before all its rows were seen and checked."""
        table = OpenTable.open(self._options)
        router = table.router()
        rows = SparkRows.of(table.base, self._options)
        parts: dict[Shard, list[pa.RecordBatch]] = {}
        held = 0
        for batch in batches:
            stored = rows.stored(batch)
            if stored is None:
                continue
            held += stored.nbytes
            if held > MAX_ENTRY_BYTES:
                raise InvalidInputError(
                    f"one shard gets more than {MAX_ENTRY_BYTES >> 20} MB in one write, too much for "
                    'one WAL entry; use df.write.format("lancewal") for data of this size'
                )
            for shard, part in router.route(stored):
                parts.setdefault(shard, []).append(part)
        _refuse_misrouted(router, parts, partition)
        return AppendedMessage(
            [
                append_transaction(
                    table.store, shard, part, self._transaction, base_version=table.base.version
                )
                for shard, part in parts.items()
            ]
        )

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        written = [w for m in messages if isinstance(m, AppendedMessage) for w in m.written]
        finish_append(OpenTable.open(self._options).store, self._transaction, written)


def _refuse_misrouted(router: ShardRouter, parts: dict[Shard, list[pa.RecordBatch]], partition: int) -> None:
    """Two tasks with rows of one shard would take the second one's for a repetition of the first's."""
    if router.transform != BUCKET or not parts:
        return
    if set(parts) != {router.shard_of_bucket(partition)}:
        raise InvalidInputError(
            "rows came to a task that does not own their shard; write with lancewal.spark.write, "
            "which routes them"
        )
