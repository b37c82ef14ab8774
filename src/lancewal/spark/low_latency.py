"""The low-latency sink: routes rows to their shards, and writes one WAL entry per shard and micro-batch.

Each entry is durable, readable at once and atomic. A task claims its shards, which fences any earlier
attempt, looks for that attempt's entries, and appends only if there are none. So retries,
speculation and restarts write nothing twice. While another process owns shards of the table, rows are
staged as SSTables instead, and the shards' owners adopt them.

A micro-batch goes through :func:`write_transaction` on the driver, :meth:`Appending.append` in each
task, for some shards at a time, and :meth:`Appending.commit` on the driver again. Tasks get all that
the driver knows about the table, and read only their own shards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from lancewal.base import BaseTable
from lancewal.errors import InvalidInputError, NotInitializedError
from lancewal.format import MemWalDetails, TableSchema
from lancewal.publish import (
    Run,
    ShardWrite,
    Transaction,
    TransactionLog,
    append_transaction,
    begin_append,
    finish_append,
)
from lancewal.service import TakeOver, may_claim
from lancewal.shard import BUCKET, IDENTITY, Shard, ShardRouter
from lancewal.spark.columns import SparkRows, bucket_column, quoted
from lancewal.spark.options import OpenTable, Options
from lancewal.spark.progress import BatchReport
from lancewal.spark.sink import check_write
from lancewal.spark.spark_session import slots_of
from lancewal.spark.worker import settle
from lancewal.storage import ObjectStore, ordered_map

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

FORMAT = "lancewal"
#: The most bytes that a task may hold. It holds the entries of all its shards, each of them as a whole.
MAX_TASK_BYTES = 1 << 30
#: Shards that one task writes in parallel: a task costs more than a few requests.
_SHARDS_PER_TASK = 16


def write(
    df: DataFrame,
    uri: str,
    *,
    txn_app_id: str | None = None,
    txn_version: int | None = None,
    change_type_column: str | None = None,
    order_by: str | Sequence[str] = (),
    take_over: TakeOver = "when_gone",
    storage_options: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
) -> None:
    """Append the rows of ``df`` to the table's write-ahead log.

    With ``txn_app_id`` and ``txn_version``, a write that was done before, in full or in part, is
    completed and not repeated. ``change_type_column`` holds "upsert" or "delete" for each row.
    If several rows have the same key, the one that is greatest in the columns ``order_by`` wins; of these,
    columns that the table does not have are not written. ``take_over`` is for shards that another process
    owns: "when_gone" leaves the rows to that process while it lives, "now" takes over its shards, and "never"
    refuses rows for its shards. ``options`` are those of the format, such as ``createIfMissing``.

    .. code-block:: python

        write(rows, "s3://bucket/documents", txn_app_id="nightly", txn_version=20240501)
        write(changes, "s3://bucket/documents", change_type_column="op", order_by="sequence")
    """
    parsed = format_options(uri, change_type_column, storage_options, options, take_over)
    if (txn_app_id is None) != (txn_version is None):
        raise InvalidInputError("pass txn_app_id and txn_version together, or neither")
    order = _names(order_by)
    _check(df, parsed, order)
    if txn_app_id is None or txn_version is None:
        write_transaction(df, parsed, Transaction.anonymous(), order, is_anonymous=True)
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
    report: Callable[[BatchReport], object] | None = None,
    take_over: TakeOver = "when_gone",
    storage_options: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
) -> StreamingQuery:
    """Start a streaming query that appends each micro-batch exactly once.

    ``trigger`` has the arguments of Spark's own ``trigger``, such as ``{"availableNow": True}``. The
    stream's identity is its query id, which is in ``checkpoint``; ``txn_app_id`` replaces it, for
    a stream that continues from another checkpoint with the same batch ids. With ``output_mode``
    "update" the changed rows of an aggregation replace their older versions. ``report`` is called in the
    driver after each micro-batch with what was written. ``take_over`` is as in :func:`write`.

    .. code-block:: python

        query = stream(incoming, "s3://bucket/documents", "s3://bucket/checkpoints/documents")
        query.awaitTermination()
    """
    parsed = format_options(uri, change_type_column, storage_options, options, take_over)
    if output_mode not in ("append", "update"):
        raise InvalidInputError(
            f"output_mode is {output_mode!r}; it can be append, or update where the table has a key. "
            "complete would have to delete the rows that are gone from a result"
        )
    order = _names(order_by)
    base = _check(df, parsed, order)
    if output_mode == "update" and not base.schema.primary_key:
        raise InvalidInputError("output_mode update replaces rows by their key, and the table has none")
    batches = MicroBatches(dict(parsed.values), txn_app_id, order, checkpoint, report=report)
    return start_stream(
        df, batches, checkpoint, trigger=trigger, query_name=query_name, output_mode=output_mode
    )


def start_stream(
    df: DataFrame,
    batches: MicroBatches,
    checkpoint: str,
    *,
    trigger: Mapping[str, Any] | None,
    query_name: str | None,
    output_mode: str = "append",
) -> StreamingQuery:
    writer = df.writeStream.foreachBatch(batches).outputMode(output_mode)
    writer = writer.option("checkpointLocation", checkpoint)
    if query_name is not None:
        writer = writer.queryName(query_name)
    if trigger is not None:
        writer = writer.trigger(**trigger)
    return writer.start()


def batch_writer(
    uri: str,
    txn_app_id: str,
    *,
    change_type_column: str | None = None,
    order_by: str | Sequence[str] = (),
    take_over: TakeOver = "when_gone",
    storage_options: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
) -> Callable[[DataFrame, int], None]:
    """A function for ``foreachBatch`` that appends each micro-batch to a table exactly once, by its batch id.

    For queries that do more with a micro-batch than write it to one table. ``txn_app_id`` names the query
    and the table's part in it, and must stay the same when the query is restarted. ``take_over`` is as in
    :func:`write`.

    .. code-block:: python

        to_documents = batch_writer("s3://bucket/documents", "crawler-documents")
        to_links = batch_writer("s3://bucket/links", "crawler-links")

        def both(batch, number):
            to_documents(batch.select("id", "text"), number)
            to_links(batch.selectExpr("id", "explode(links) AS link"), number)

        pages.writeStream.foreachBatch(both).option("checkpointLocation", checkpoint).start()
    """
    parsed = format_options(uri, change_type_column, storage_options, options, take_over)
    return MicroBatches(dict(parsed.values), txn_app_id, _names(order_by))


@dataclass
class MicroBatches:
    """The function that Spark calls with every micro-batch; it can be pickled, for Spark Connect.

    ``app_id`` may be ``None`` if ``checkpoint`` is given: it is then the query's id. ``keep`` filters rows
    after they were routed to the partitions of their shards.
    """

    options: dict[str, str] = field(repr=False)
    app_id: str | None
    order_by: list[str]
    checkpoint: str = ""
    keep: Callable[[DataFrame], DataFrame] | None = None
    report: Callable[[BatchReport], object] | None = None
    #: A stream is checked before it starts. The columns of another query are known at its first micro-batch.
    _checked: bool = False

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        if self.app_id is None:
            self.app_id = query_id(batch.sparkSession, self.checkpoint)
        transaction = Transaction(self.app_id, batch_id)
        options = Options.parse(self.options)
        if not self.checkpoint and not self._checked:
            _check(batch, options, self.order_by)
            self._checked = True
        written = write_transaction(batch, options, transaction, self.order_by, keep=self.keep)
        if self.report is not None:
            if written is None:
                taken = TransactionLog(OpenTable.open(options).store, transaction).last_written()
                told = BatchReport.of(batch_id, taken[1] if taken else [], through_owners=True)
            else:
                told = BatchReport.of(batch_id, written)
            self.report(told)


def write_transaction(
    df: DataFrame,
    options: Options,
    transaction: Transaction,
    order_by: Sequence[str],
    *,
    is_anonymous: bool = False,
    keep: Callable[[DataFrame], DataFrame] | None = None,
) -> list[ShardWrite] | None:
    """Route and append rows, unless the transaction is written already; returns what was done in each shard.

    Returns ``None`` if the rows were left to the shards' owners.
    """
    table = OpenTable.open(options)
    unstored = _ordering_columns(df, table.base, options, order_by)
    router = ShardRouter.of_table(table.base, table.store)
    run = begin_append(table.store, transaction)
    if run is None:
        return []
    try:
        if not may_claim(table.store, options.take_over):
            # A claim would fence the shards' owners, so rows are staged as SSTables that the owners adopt.
            rows = _routed(df, table.base, router, order_by, _one_task_per_shard(df, router)).drop(*unstored)
            _write_by_format(rows if keep is None else keep(rows), options, transaction)
            return None
        tasks = _number_of_tasks(df, router)
        rows = _routed(df, table.base, router, order_by, tasks).drop(*unstored)
        rows = rows if keep is None else keep(rows)
        appending = APPENDING.of(table, router, options, transaction, run, tasks)
        found = rows.mapInArrow(appending, WRITTEN).collect()
        written = [
            ShardWrite(UUID(str(each.shard_id)), *(getattr(each, name) for name in _FIGURES))
            for each in found
        ]
        appending.commit(table.store, written)
        return written
    finally:
        if is_anonymous:
            # An anonymous transaction cannot be rerun under its name.
            TransactionLog(table.store, transaction).forget()


def _write_by_format(rows: DataFrame, options: Options, transaction: Transaction) -> None:
    writer = rows.write.format(FORMAT).mode("append")
    for name, value in options.values.items():
        writer = writer.option(name, value)
    # The path is among the options, and Spark refuses a second one, so ``save`` gets none.
    writer.option("txnAppId", transaction.app_id).option("txnVersion", transaction.version).save()


#: The columns of a task's report about each shard.
WRITTEN = (
    "shard_id string, rows long, skipped boolean, position long, wal_bytes long, conflicts long, tail long"
)
_WRITTEN_FIELDS = pa.schema(
    [
        ("shard_id", pa.string()),
        ("rows", pa.int64()),
        ("skipped", pa.bool_()),
        ("position", pa.int64()),
        ("wal_bytes", pa.int64()),
        ("conflicts", pa.int64()),
        ("tail", pa.int64()),
    ]
)
#: The fields of a ``ShardWrite`` without the shard, in order.
_FIGURES = _WRITTEN_FIELDS.names[1:]


@dataclass(frozen=True)
class Appending:
    """One transaction as it is sent to the tasks: its run, and what they need to know about the table.

    :func:`_check` has refused what every task would refuse, before the first transaction.
    """

    options: Options
    transaction: Transaction
    run: Run
    tasks: int
    uri: str
    fsync: bool
    schema: TableSchema
    details: MemWalDetails
    storage_version: str
    base_version: int
    #: One shard for each bucket, or the only shard; ``None`` if every value of a column has its own shard.
    shards: tuple[Shard, ...] | None

    @classmethod
    def of(
        cls,
        table: OpenTable,
        router: ShardRouter,
        options: Options,
        transaction: Transaction,
        run: Run,
        tasks: int,
    ) -> Appending:
        base = table.base
        shards = None if router.transform == IDENTITY else tuple(router.known_shards())
        # The columns' history is only needed for rows that are stored already. It is read from storage, and
        # cannot be sent.
        schema = base.schema.identified(None)
        return cls(
            options,
            transaction,
            run,
            tasks,
            table.store.uri,
            table.store.fsync,
            schema,
            base.details,
            base.storage_version,
            base.version,
            shards,
        )

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The function for ``mapInArrow``."""
        settle()
        context = TaskContext.get()
        assert context is not None, "Spark calls this in tasks only"
        written = self.append(batches, context.partitionId())
        reports = [
            {"shard_id": str(each.shard_id), **{name: getattr(each, name) for name in _FIGURES}}
            for each in written
        ]
        if reports:
            yield pa.RecordBatch.from_pylist(reports, schema=_WRITTEN_FIELDS)

    def append(self, batches: Iterator[pa.RecordBatch], partition: int) -> list[ShardWrite]:
        """The work of a task. Checks all its rows before it writes any."""
        parts, store = self._parts(batches, partition)

        def one(item: tuple[Shard, list[pa.RecordBatch]]) -> ShardWrite:
            shard, rows = item
            return append_transaction(
                store, shard, rows, self.transaction, base_version=self.base_version, run=self.run
            )

        return list(ordered_map(one, parts.items(), min(len(parts), _SHARDS_PER_TASK)))

    def commit(self, store: ObjectStore, written: Sequence[ShardWrite]) -> None:
        """Finish the transaction on the driver, when all tasks have ended."""
        finish_append(store, self.transaction, written, self.run)

    def _parts(
        self, batches: Iterator[pa.RecordBatch], partition: int
    ) -> tuple[dict[Shard, list[pa.RecordBatch]], ObjectStore]:
        """A task's rows by shard, in stored form, and the storage."""
        if self.shards is None:
            table = OpenTable.open(self.options)
            router, store = ShardRouter.of_table(table.base, table.store), table.store
        else:
            router = ShardRouter.knowing(self.details, self.schema, self.shards)
            store = ObjectStore.from_uri(self.uri, self.options.storage, fsync=self.fsync)
        rows = SparkRows(self.schema, self.storage_version, self.options)
        parts: dict[Shard, list[pa.RecordBatch]] = {}
        held = 0
        for batch in batches:
            stored = rows.stored(batch)
            if stored is None:
                continue
            held += stored.nbytes
            if held > MAX_TASK_BYTES:
                raise InvalidInputError(
                    f"one task gets more than {MAX_TASK_BYTES >> 20} MB in one write, too much for "
                    'WAL entries; use df.write.format("lancewal") for data of this size'
                )
            for shard, part in router.route(stored):
                parts.setdefault(shard, []).append(part)
        # If two tasks had rows of one shard, the second would be taken for a repetition of the first.
        if router.num_buckets and not parts.keys() <= set((self.shards or ())[partition :: self.tasks]):
            raise InvalidInputError(
                "rows came to a task that does not own their shard; write with lancewal.spark.write, "
                "which routes them"
            )
        return parts, store


#: Tests replace this to make tasks and drivers fail.
APPENDING = Appending


def _number_of_tasks(df: DataFrame, router: ShardRouter) -> int:
    """Enough tasks to use every slot, and not many more: each task writes some shards in parallel."""
    most = _one_task_per_shard(df, router)
    if router.transform != BUCKET:
        return most
    return min(most, max(slots_of(df.sparkSession), -(-most // _SHARDS_PER_TASK)))


def _one_task_per_shard(df: DataFrame, router: ShardRouter) -> int:
    if router.transform == IDENTITY:
        # A fixed number, or Spark would coalesce small partitions, and shards with them.
        return int(df.sparkSession.conf.get("spark.sql.shuffle.partitions") or 200)
    return router.num_buckets or 1


def route(
    df: DataFrame,
    uri: str,
    *,
    storage_options: Mapping[str, str] | None = None,
    order_by: str | Sequence[str] = (),
) -> DataFrame:
    """The rows of ``df`` with all rows of a shard in one partition, so that few SSTables are written.

    A table with n buckets gives n partitions, bucket i in partition i. ``order_by`` sorts the rows
    of each partition by columns (not in a stream). Then, of several rows with the same key, the
    greatest is last and wins.

    .. code-block:: python

        route(rows, uri, order_by="changed_at").write.format("lancewal").mode("append").save(uri)
    """
    table = OpenTable.open(Options.of(uri, storage_options))
    router = ShardRouter.of_table(table.base, table.store)
    return _routed(df, table.base, router, _names(order_by), _one_task_per_shard(df, router))


def _routed(
    df: DataFrame, base: BaseTable, router: ShardRouter, order_by: Sequence[str], tasks: int
) -> DataFrame:
    """Rows by shard: bucket i in partition i modulo ``tasks``, or all rows of a value in one partition."""
    if router.transform == BUCKET:
        assert router.column is not None
        count = router.num_buckets
        bucket = bucket_column(base.schema.plain.field(router.column), count)
        df = df.repartitionById(tasks, bucket if tasks == count else (bucket % F.lit(tasks)).cast("int"))
    elif router.transform == IDENTITY:
        assert router.column is not None
        df = df.repartition(tasks, quoted(router.column))
    else:
        df = df.repartition(1)
    return df.sortWithinPartitions(*order_by) if order_by else df


def _check(df: DataFrame, options: Options, order_by: Sequence[str]) -> BaseTable:
    """Refuse what every task would refuse; creates the table, with all columns, if the options ask for it."""
    schema = df.schema
    try:
        base = OpenTable.open(options).base
    except (InvalidInputError, NotInitializedError):
        return check_write(options, schema)
    unstored = _ordering_columns(df, base, options, order_by)
    return check_write(options, StructType([field for field in schema.fields if field.name not in unstored]))


def _ordering_columns(df: DataFrame, base: BaseTable, options: Options, order_by: Sequence[str]) -> list[str]:
    """Columns that only order the rows of a key, and are not written."""
    kept = {*base.schema.names, options.text("changeTypeColumn")}
    return [name for name in order_by if name in df.columns and name not in kept]


def query_id(spark: SparkSession, checkpoint: str) -> str:
    """The id of the streaming query that a checkpoint belongs to.

    Spark reads it, because Spark can reach every place that a checkpoint may be at.
    """
    # Spark takes the path of a read for a pattern, which a checkpoint's is not.
    literally = re.sub(r"[][{}*?\\]", r"\\\g<0>", checkpoint.rstrip("/"))
    line = spark.read.text(f"{literally}/metadata").first()
    if line is None:
        raise InvalidInputError(f"the checkpoint at {checkpoint} has no metadata; pass txn_app_id")
    return str(json.loads(line[0])["id"])


def _names(order_by: str | Sequence[str]) -> list[str]:
    return [order_by] if isinstance(order_by, str) else list(order_by)


def format_options(
    uri: str,
    change_type_column: str | None,
    storage_options: Mapping[str, str] | None,
    options: Mapping[str, str] | None,
    take_over: TakeOver = "when_gone",
) -> Options:
    """The options of a function that has arguments for some of them; the arguments override ``options``."""
    given = dict(options or {})
    if change_type_column is not None:
        given["changeTypeColumn"] = change_type_column
    if take_over != "when_gone":
        given["takeOver"] = take_over
    parsed = Options.of(uri, storage_options, given)
    parsed.refuse(["txnAppId", "txnVersion"], "is for the format; pass txn_app_id and txn_version")
    return parsed
