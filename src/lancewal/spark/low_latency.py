"""The low-latency sink: rows are routed to their shards, one WAL entry per shard and micro-batch.

Each entry is durable, readable at once and atomic. Every task claims its shard, which fences
any earlier attempt, looks for that attempt's entry, and appends only if there is none. So
retries, speculation and restarts write nothing twice. While somebody else writes to the table, rows go
the other way, as staged SSTables which the shards' owners adopt.

A micro-batch goes through :func:`write_transaction` on the driver, :meth:`WalSink.append` in each
task, and :meth:`WalSink.commit` on the driver again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
from lancewal.service import is_owned
from lancewal.shard import BUCKET, IDENTITY, Shard, ShardRouter
from lancewal.spark.columns import SparkRows, bucket_column, quoted
from lancewal.spark.options import OpenTable, Options
from lancewal.spark.sink import check_write

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

FORMAT = "lancewal"
#: An entry is written, replayed and held in memory as a whole.
MAX_ENTRY_BYTES = 1 << 30


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
    ``order_by``: of several rows with one key the greatest in these columns wins; columns that the
    table does not have are not written. ``options`` are those of the format, such as
    ``createIfMissing``.

    .. code-block:: python

        write(rows, "s3://bucket/documents", txn_app_id="nightly", txn_version=20240501)
        write(changes, "s3://bucket/documents", change_type_column="op", order_by="sequence")
    """
    parsed = _options(uri, change_type_column, storage_options, options)
    if (txn_app_id is None) != (txn_version is None):
        raise InvalidInputError("pass txn_app_id and txn_version together, or neither")
    order = _names(order_by)
    _check(df, parsed, order)
    if txn_app_id is None or txn_version is None:
        transaction = Transaction.anonymous()
        try:
            write_transaction(df, parsed, transaction, order)
        finally:
            # Nobody can run it again under this name.
            TransactionLog(OpenTable.open(parsed).store, transaction).forget()
    else:
        write_transaction(df, parsed, Transaction(txn_app_id, txn_version), order)


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
    stream's identity is its query id, which is in ``checkpoint``; ``txn_app_id`` replaces it, for
    a stream that continues from another checkpoint with the same batch ids. With ``output_mode``
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
    order = _names(order_by)
    base = _check(df, parsed, order)
    if output_mode == "update" and not base.schema.primary_key:
        raise InvalidInputError("output_mode update replaces rows by their key, and the table has none")
    batches = _MicroBatches(dict(parsed.values), checkpoint, txn_app_id, order)
    writer = df.writeStream.foreachBatch(batches).outputMode(output_mode)
    writer = writer.option("checkpointLocation", checkpoint)
    if query_name is not None:
        writer = writer.queryName(query_name)
    if trigger is not None:
        writer = writer.trigger(**trigger)
    return writer.start()


@dataclass
class _MicroBatches:
    """The function that Spark calls with every micro-batch; picklable, for Spark Connect."""

    options: dict[str, str] = field(repr=False)
    checkpoint: str
    app_id: str | None
    order_by: list[str]

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        if self.app_id is None:
            self.app_id = query_id(batch.sparkSession, self.checkpoint)
        transaction = Transaction(self.app_id, batch_id)
        write_transaction(batch, Options.parse(self.options), transaction, self.order_by)


def write_transaction(
    df: DataFrame, options: Options, transaction: Transaction, order_by: Sequence[str]
) -> None:
    """Route and append, unless the transaction is written already."""
    table = OpenTable.open(options)
    unstored = _ordering_columns(df, table.base, options, order_by)
    rows = _routed(df, table, order_by).drop(*unstored)
    if not begin_append(table.store, transaction):
        return
    writer = rows.write.format(FORMAT).mode("append")
    for name, value in options.values.items():
        writer = writer.option(name, value)
    if is_owned(table.store):
        # A claim would fence whoever writes there: SSTables are staged, and the shards' owners adopt them.
        writer = writer.option("txnAppId", transaction.app_id).option("txnVersion", transaction.version)
    else:
        writer = writer.option("walTransaction", json.dumps(asdict(transaction)))
    # The path is among the options; Spark refuses a second one.
    writer.save()


@dataclass
class AppendedMessage(WriterCommitMessage):
    """What one task appended, on its way to the driver."""

    written: list[ShardWrite] = field(default_factory=list)


@dataclass
class WalSink(DataSourceArrowWriter):
    """Writes the rows of one transaction, which :func:`write_transaction` has routed by shard.

    What every task would refuse was refused by :func:`_check`, before the first transaction.
    """

    _options: Options

    @property
    def _transaction(self) -> Transaction:
        return Transaction(**json.loads(self._options.text("walTransaction") or "{}"))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> AppendedMessage:
        context = TaskContext.get()
        assert context is not None, "Spark calls this in tasks only"
        return self.append(iterator, context.partitionId())

    def append(self, batches: Iterator[pa.RecordBatch], partition: int) -> AppendedMessage:
        """The work of a task. Nothing is written before all its rows were checked."""
        table = OpenTable.open(self._options)
        router = ShardRouter.of_table(table.base, table.store)
        transaction = self._transaction
        rows = SparkRows(table.base, self._options)
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
        # If two tasks had rows of one shard, the second would count as a repetition of the first.
        if router.num_buckets and parts and set(parts) != {router.shard_of_bucket(partition)}:
            raise InvalidInputError(
                "rows came to a task that does not own their shard; write with lancewal.spark.write, "
                "which routes them"
            )
        version = table.base.version
        written = [
            append_transaction(table.store, shard, part, transaction, base_version=version)
            for shard, part in parts.items()
        ]
        return AppendedMessage(written)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        written = [w for m in messages if isinstance(m, AppendedMessage) for w in m.written]
        finish_append(OpenTable.open(self._options).store, self._transaction, written)


def route(
    df: DataFrame,
    uri: str,
    *,
    storage_options: Mapping[str, str] | None = None,
    order_by: str | Sequence[str] = (),
) -> DataFrame:
    """The rows of ``df`` with all rows of a shard in one partition, so that few SSTables are written.

    A table in n buckets gives n partitions, bucket i in partition i. ``order_by`` sorts the rows
    of each partition by columns (not in a stream), so that of several rows with one key the
    greatest is the last, and wins.

    .. code-block:: python

        route(rows, uri, order_by="changed_at").write.format("lancewal").mode("append").save(uri)
    """
    return _routed(df, OpenTable.open(Options.of(uri, storage_options)), _names(order_by))


def _routed(df: DataFrame, table: OpenTable, order_by: Sequence[str]) -> DataFrame:
    router = ShardRouter.of_table(table.base, table.store)
    if router.transform == BUCKET:
        assert router.column is not None
        count = router.num_buckets
        field = table.base.schema.plain.field(router.column)
        df = df.repartitionById(count, bucket_column(field, count))
    elif router.transform == IDENTITY:
        assert router.column is not None
        # A fixed number: otherwise Spark joins small partitions, and so shards.
        count = int(df.sparkSession.conf.get("spark.sql.shuffle.partitions") or 200)
        df = df.repartition(count, quoted(router.column))
    else:
        df = df.repartition(1)
    return df.sortWithinPartitions(*order_by) if order_by else df


def _check(df: DataFrame, options: Options, order_by: Sequence[str]) -> BaseTable:
    """Refuse what every task would refuse; create the table, with all columns, if that is asked for."""
    schema = df.schema
    try:
        base = OpenTable.open(options).base
    except (InvalidInputError, NotInitializedError):
        return check_write(options, schema)
    unstored = _ordering_columns(df, base, options, order_by)
    return check_write(options, StructType([field for field in schema.fields if field.name not in unstored]))


def _ordering_columns(df: DataFrame, base: BaseTable, options: Options, order_by: Sequence[str]) -> list[str]:
    """Columns that serve only to order the rows of a key."""
    kept = {*base.schema.names, options.text("changeTypeColumn")}
    return [name for name in order_by if name in df.columns and name not in kept]


def query_id(spark: SparkSession, checkpoint: str) -> str:
    """The id of the streaming query that a checkpoint belongs to.

    Read by Spark, which can reach every place of a checkpoint.
    """
    line = spark.read.text(f"{checkpoint.rstrip('/')}/metadata").first()
    if line is None:
        raise InvalidInputError(f"the checkpoint at {checkpoint} has no metadata; pass txn_app_id")
    return str(json.loads(line[0])["id"])


def _names(order_by: str | Sequence[str]) -> list[str]:
    return [order_by] if isinstance(order_by, str) else list(order_by)


def _options(
    uri: str,
    change_type_column: str | None,
    storage_options: Mapping[str, str] | None,
    options: Mapping[str, str] | None,
) -> Options:
    changes = {} if change_type_column is None else {"changeTypeColumn": change_type_column}
    parsed = Options.of(uri, storage_options, {**(options or {}), **changes})
    parsed.refuse(["txnAppId", "txnVersion"], "is for the format; pass txn_app_id and txn_version")
    return parsed
