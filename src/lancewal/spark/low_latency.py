"""The low-latency way: rows routed to their shards, one WAL entry per shard and micro-batch.

Each entry is durable, readable at once and atomic. Every task claims the shard that it owns,
which fences whatever attempt came before, looks whether that attempt's entry is there, and
appends only if it is not. So retries, speculation and restarts write nothing twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from lancewal.base import BaseTable
from lancewal.errors import InvalidInputError, NotInitializedError
from lancewal.publish import (
    ShardWrite,
    Transaction,
    TransactionLog,
    append_transaction,
    begin_append,
    finish_append,
)
from lancewal.shard import BUCKET, Shard, ShardRouter
from lancewal.spark.options import OpenTable, Options
from lancewal.spark.routing import routed
from lancewal.spark.sink import SparkRows, check_write

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

# The tasks of the low-latency way: each owns some shards and appends one WAL entry to each.


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


FORMAT = "lancewal"


def write(
    df: DataFrame,
    uri: str,
    *,
    txn_app_id: str | None = None,
    txn_version: int | None = None,
    change_type_column: str | None = None,
    order_by: str | Sequence[str] = (),
    storage_options: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
) -> None:
    """Append the rows of ``df`` to the table's write-ahead log.

    With ``txn_app_id`` and ``txn_version`` a write that was done before, in full or in part, is
    completed and not repeated. ``change_type_column`` holds "upsert" or "delete" for each row.
    ``order_by``: of several rows with one key the one that is greatest in these columns wins; those
    that the table does not have are left out. ``options`` are those of the format, such as
    ``createIfMissing``.

    .. code-block:: python

        write(rows, "s3://bucket/documents", txn_app_id="nightly", txn_version=20240501)
        write(changes, "s3://bucket/documents", change_type_column="op", order_by="sequence")
    """
    parsed = _options(uri, change_type_column, storage_options, options)
    if (txn_app_id is None) != (txn_version is None):
        raise InvalidInputError("pass txn_app_id and txn_version together, or neither")
    _check(df, parsed, order_by)
    if txn_app_id is None or txn_version is None:
        transaction = Transaction.anonymous()
        try:
            write_transaction(df, parsed, transaction, order_by)
        finally:
            # Nobody can run it again under this name.
            TransactionLog(OpenTable.open(parsed).store, transaction).forget()
    else:
        write_transaction(df, parsed, Transaction(txn_app_id, txn_version), order_by)


def stream(
    df: DataFrame,
    uri: str,
    checkpoint: str,
    *,
    txn_app_id: str | None = None,
    change_type_column: str | None = None,
    order_by: str | Sequence[str] = (),
    trigger: Mapping[str, Any] | None = None,
    query_name: str | None = None,
    output_mode: str = "append",
    storage_options: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
) -> StreamingQuery:
    """Start a streaming query that appends each micro-batch exactly once.

    ``trigger`` takes the arguments of Spark's own, such as ``{"availableNow": True}``. The
    stream's identity is its query id, which lives in ``checkpoint``; ``txn_app_id`` replaces it,
    for a stream that goes on from another checkpoint with the same batch ids. With ``output_mode``
    "update" the changed rows of an aggregation replace their older versions.

    .. code-block:: python

        query = stream(incoming, "s3://bucket/documents", "s3://bucket/checkpoints/documents")
        query.awaitTermination()
    """
    parsed = _options(uri, change_type_column, storage_options, options)
    if output_mode not in ("append", "update"):
        raise InvalidInputError(
            f"output_mode is {output_mode!r}; it can be append, or update where the table has a key. "
            "complete would have to delete the rows that are gone from a result"
        )
    base = _check(df, parsed, order_by)
    if output_mode == "update" and not base.schema.primary_key:
        raise InvalidInputError("output_mode update replaces rows by their key, and the table has none")
    order = [order_by] if isinstance(order_by, str) else list(order_by)
    batches = _MicroBatches(dict(parsed.values), checkpoint, txn_app_id, order)
    writer = df.writeStream.foreachBatch(batches).outputMode(output_mode)
    writer = writer.option("checkpointLocation", checkpoint)
    if query_name is not None:
        writer = writer.queryName(query_name)
    if trigger is not None:
        writer = writer.trigger(**trigger)
    return writer.start()


class _MicroBatches:
    """The function that Spark calls with every micro-batch; picklable, for Spark Connect."""

    def __init__(
        self, options: Mapping[str, str], checkpoint: str, app_id: str | None, order_by: Sequence[str]
    ) -> None:
        self._options = dict(options)
        self._checkpoint = checkpoint
        self._app_id = app_id
        self._order_by = list(order_by)

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        if self._app_id is None:
            self._app_id = query_id(batch.sparkSession, self._checkpoint)
        transaction = Transaction(self._app_id, batch_id)
        write_transaction(batch, Options(self._options), transaction, self._order_by)


def write_transaction(
    df: DataFrame, options: Options, transaction: Transaction, order_by: str | Sequence[str]
) -> None:
    """Route and append, unless the transaction is written already."""
    table = OpenTable.open(options)
    rows = routed(df, table, order_by).drop(*_unstored(df, table.base, options, order_by))
    if not begin_append(table.store, transaction):
        return
    writer = (
        rows.write.format(FORMAT).mode("append").option("walTransaction", encode_transaction(transaction))
    )
    for name, value in options.values.items():
        writer = writer.option(name, value)
    # The path is among the options; Spark refuses to be told twice.
    writer.save()


def _check(df: DataFrame, options: Options, order_by: str | Sequence[str]) -> BaseTable:
    """Refuse what every task would refuse; make the table if that is asked for, with all columns."""
    schema = df.schema
    try:
        base = OpenTable.open(options).base
    except (InvalidInputError, NotInitializedError):
        return check_write(options, schema, overwrite=False)
    unstored = _unstored(df, base, options, order_by)
    stored = StructType([field for field in schema.fields if field.name not in unstored])
    return check_write(options, stored, overwrite=False)


def _unstored(df: DataFrame, base: BaseTable, options: Options, order_by: str | Sequence[str]) -> list[str]:
    """Columns that only say which row of a key is the last."""
    order = [order_by] if isinstance(order_by, str) else order_by
    kept = {*base.schema.names, options.text("changeTypeColumn")}
    return [name for name in order if name in df.columns and name not in kept]


def query_id(spark: SparkSession, checkpoint: str) -> str:
    """The id of the streaming query that a checkpoint belongs to.

    Read through Spark, which reaches every place that a checkpoint can lie in.
    """
    line = spark.read.text(f"{checkpoint.rstrip('/')}/metadata").first()
    if line is None:
        raise InvalidInputError(f"the checkpoint at {checkpoint} has no metadata; pass txn_app_id")
    return str(json.loads(line[0])["id"])


def _options(
    uri: str,
    change_type_column: str | None,
    storage_options: Mapping[str, str] | None,
    options: Mapping[str, str] | None,
) -> Options:
    given = {
        **(options or {}),
        **{f"storage.{k}": v for k, v in (storage_options or {}).items()},
        "path": uri,
    }
    if change_type_column is not None:
        given["changeTypeColumn"] = change_type_column
    parsed = Options.parse(given)
    parsed.refuse(["txnAppId", "txnVersion"], "is for the format; pass txn_app_id and txn_version")
    return parsed
