"""The sink of ``format("lancewal")``: tasks stage rows, or send a few rows along, and the driver commits.

Tasks claim no shard and change no manifest. The driver's commit gets the messages of the winning
attempts only. So an attempt that failed, was killed or lost a speculation is never published,
whenever it writes. A stream's commit is a transaction of (query id, batch id), see
``lancewal.publish``.

A task with few rows sends them along with its message and makes no request. If all tasks do so,
and nobody owns a shard of the table, the commit appends the rows: one WAL entry for each shard, a
few requests instead of an SSTable with its indexes. Otherwise the commit stages them itself and publishes
all SSTables. Which way a run takes depends on where Spark puts the rows and on who else writes to the table,
so a rerun may take the other way. That is safe, because either way writes a shard's whole part atomically,
and because both ways claim the shard first and then look for both kinds of proof (``lancewal.publish``).

This module also has the checks before any write.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from lancewal.base import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.errors import (
    InvalidInputError,
    LanceWalError,
)
from lancewal.publish import (
    DEFAULT_STAGING_BYTES,
    ShardWrite,
    Staged,
    Stager,
    Transaction,
    append_rows,
)
from lancewal.service import flush_through_owners, may_claim, publish_through_owners
from lancewal.shard import Shard, ShardManifestStore, ShardRouter
from lancewal.spark.columns import DELETES, SparkRows, arrow_schema
from lancewal.spark.creation import open_for_writing
from lancewal.spark.options import OpenTable, Options
from lancewal.spark.worker import settle

logger = logging.getLogger(__name__)

#: The property of a stream's tasks that has the query id, which a restart from the checkpoint keeps.
_QUERY_ID_PROPERTY = "sql.streaming.queryId"


#: Writes up to this size go to the write-ahead logs, unless the option walBytes sets another limit.
DEFAULT_WAL_BYTES = 4 << 20
#: The most bytes that one task sends to the driver.
_MOST_SENT_BYTES = 1 << 20
#: The commit flushes logs that are longer than this. If all writes come through this sink, nobody else may
#: flush them, even if somebody compacts. Some of a log's positions are sentinels.
LONG_TAIL, LONG_TAIL_BYTES = 256, 64 << 20


@dataclass
class TaskMessage(WriterCommitMessage):
    """What one task sends to the driver: the SSTables that it staged, or its rows as an Arrow stream."""

    partition: int
    staged: list[Staged] = field(default_factory=list)
    rows: bytes = field(default=b"", repr=False)
    query_id: str | None = None
    #: Rows of a later turn are newer, whatever task they come from.
    turn: int = 0


def take_rows(options: Options, batches: Iterator[pa.RecordBatch], partition: int) -> TaskMessage:
    """The work of a task: it sends a few rows along with its message, and stages more."""
    settle()
    most = _sent_bytes(_wal_bytes(options), partition)
    held: list[pa.RecordBatch] = []
    size = turn = 0
    for batch in batches:
        if batch.num_rows:
            turn = turn if held else _turn(options, batch)
            held.append(batch)
            size += batch.nbytes
        if size > most:
            staged = stage_rows(options, chain(held, batches), partition, turn)
            return TaskMessage(partition, staged, turn=turn)
    if not held:
        return TaskMessage(partition)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, held[0].schema) as writer:
        for batch in held:
            writer.write_batch(batch)
    return TaskMessage(partition, rows=sink.getvalue().to_pybytes(), turn=turn)


def _turn(options: Options, batch: pa.RecordBatch) -> int:
    """When the rows of ``batch`` count: with ``deletesFirst``, upserts come after the deletes of all tasks.

    A MERGE may delete a row and insert another one with its key, in different tasks. The inserted row stays.
    The planner's front passes deletes and upserts separately, so one row tells for all.
    """
    change_column = options.text("changeTypeColumn")
    if change_column is None or not options.flag("deletesFirst"):
        return 0
    return 0 if batch.column(change_column)[0].as_py() in DELETES else 1


def _wal_bytes(options: Options) -> int:
    number = options.number("walBytes", least=0)
    return DEFAULT_WAL_BYTES if number is None else number


def _sent_bytes(wal_bytes: int, partition: int) -> int:
    """The most bytes that a task may send.

    A task does not know how many tasks there are, only that there are at least as many as its own number
    says. If rows are spread evenly and the whole write fits into ``wal_bytes``, every share fits too, up to
    the limit per task. Ten thousand tasks together send at most about ten times ``wal_bytes``.
    """
    return min(_MOST_SENT_BYTES, wal_bytes // (partition + 1))


def stage_rows(
    options: Options, batches: Iterator[pa.RecordBatch], partition: int, turn: int = 0
) -> list[Staged]:
    """Write a task's rows as staged SSTables."""
    table = OpenTable.open(options)
    rows = SparkRows(table.base.schema, table.base.storage_version, options)
    stager = _stager(table, options, turn, partition)
    for batch in batches:
        stored = rows.stored(batch)
        if stored is not None:
            stager.add(stored)
    return stager.finish()


def _stager(table: OpenTable, options: Options, turn: int, partition: int) -> Stager:
    return Stager(
        table.base,
        table.store,
        ShardRouter.of_table(table.base, table.store),
        order=(turn, partition),
        max_bytes=options.number("stagingBytes") or DEFAULT_STAGING_BYTES,
    )


class BatchSink(DataSourceArrowWriter):
    """``df.write.format("lancewal").mode("append").save(uri)``."""

    def __init__(self, options: Options) -> None:
        self._options = options
        app_id, version = options.text("txnAppId"), options.number("txnVersion", least=0)
        if app_id is not None and version is None:
            raise InvalidInputError("option txnAppId needs txnVersion, a number that grows with every write")
        self._transaction = None if app_id is None or version is None else Transaction(app_id, version)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        return take_rows(self._options, iterator, _context().partitionId())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        commit_write(self._options, messages, self._transaction)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _log_abort(messages)


class StreamSink(DataSourceStreamArrowWriter):
    """``df.writeStream.format("lancewal").start(uri)``; Spark makes a new one for every commit."""

    def __init__(self, options: Options) -> None:
        if options.text("txnVersion") is not None:
            raise InvalidInputError("a stream's version is its batch id; leave the option txnVersion out")
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        context = _context()
        query_id = context.getLocalProperty(_QUERY_ID_PROPERTY)
        if not query_id and self._options.text("txnAppId") is None:
            _refuse_without_key(self._options)
        message = take_rows(self._options, iterator, context.partitionId())
        message.query_id = query_id
        return message

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        told = (m.query_id for m in messages if isinstance(m, TaskMessage) and m.query_id)
        app_id = self._options.text("txnAppId") or next(told, None)
        commit_write(self._options, messages, None if app_id is None else Transaction(app_id, batchId))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        _log_abort(messages)


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "Spark calls this in tasks only"
    return context


def commit_write(
    options: Options, messages: Sequence[WriterCommitMessage | None], transaction: Transaction | None
) -> list[ShardWrite]:
    """Write what the tasks sent or staged to the table; returns what was done in each shard."""
    told = sorted((m for m in messages if isinstance(m, TaskMessage)), key=lambda m: (m.turn, m.partition))
    table = OpenTable.open(options)
    sent = _sent_rows(table, options, told)
    staged = [each for message in told for each in message.staged]
    total = sum(batch.nbytes for batches in sent.values() for batch in batches)
    take_over = options.take_over
    # Ownership is checked right before the claim.
    if sent and not staged and total <= _wal_bytes(options) and may_claim(table.store, take_over):
        router = ShardRouter.of_table(table.base, table.store)
        parts: dict[Shard, list[pa.RecordBatch]] = {}
        for batch in chain.from_iterable(sent.values()):
            for shard, part in router.route(batch):
                parts.setdefault(shard, []).append(part)
        written = append_rows(table.store, parts, transaction, base_version=table.base.version)
        logger.info("appended rows to the logs of %d shards", len(written))
        _flush_long_logs(table, written)
        return written
    staged += _staged_here(table, options, told, sent)
    written = publish_through_owners(table.base, table.store, staged, transaction, take_over)
    logger.info("published %d SSTables in %d shards", len(staged), len(written))
    return written


def _sent_rows(
    table: OpenTable, options: Options, told: Sequence[TaskMessage]
) -> dict[int, list[pa.RecordBatch]]:
    """The rows that tasks sent, in stored form, by the message's place in ``told``.

    Checks all rows before anything is written.
    """
    rows = SparkRows(table.base.schema, table.base.storage_version, options)
    found: dict[int, list[pa.RecordBatch]] = {}
    for place, message in enumerate(told):
        if message.rows:
            stored = map(rows.stored, pa.ipc.open_stream(message.rows))
            found[place] = [batch for batch in stored if batch is not None]
    return {place: batches for place, batches in found.items() if batches}


def _staged_here(
    table: OpenTable, options: Options, told: Sequence[TaskMessage], sent: dict[int, list[pa.RecordBatch]]
) -> list[Staged]:
    """Stage the rows that tasks sent. Neighbouring tasks share SSTables, and the order of tasks is kept."""
    staged: list[Staged] = []
    for _, neighbours in groupby(enumerate(told), lambda each: (each[1].turn, bool(each[1].staged))):
        places = [place for place, _ in neighbours if place in sent]
        if places:
            first = told[places[0]]
            stager = _stager(table, options, first.turn, first.partition)
            for batch in chain.from_iterable(sent[place] for place in places):
                stager.add(batch)
            staged += stager.finish()
    return staged


def _flush_long_logs(table: OpenTable, written: Sequence[ShardWrite]) -> None:
    long = [w for w in written if w.tail > LONG_TAIL or w.tail * w.wal_bytes > LONG_TAIL_BYTES]
    if not long:
        return
    config = ShardWriterConfig.from_defaults(table.base.details.writer_config_defaults)
    try:
        manifests = [ShardManifestStore(table.store, each.shard_id).require_latest() for each in long]
        flush_through_owners(table.base, manifests, table.store, config)
    except LanceWalError as error:
        # The rows are written. The next commit tries again to flush.
        logger.warning("%d long logs are not flushed: %s", len(long), error)


def _refuse_without_key(options: Options) -> None:
    if not OpenTable.open(options).base.schema.primary_key:
        raise InvalidInputError(
            "this stream cannot be told from others, and the table has no primary key: rows that are "
            "written again after a failure would be there twice. Set the option txnAppId to a name of its own"
        )


def _log_abort(messages: Sequence[WriterCommitMessage | None]) -> None:
    # Nothing is deleted here: a commit that failed half-way may have published some SSTables. Garbage
    # collection deletes the rest.
    staged = sum(len(m.staged) for m in messages if isinstance(m, TaskMessage))
    logger.warning("a write was aborted; %d staged SSTables are left to garbage collection", staged)


def check_write(options: Options, schema: st.StructType, overwrite: bool = False) -> BaseTable:
    """Refuse on the driver what every task would refuse; creates the table if the options ask for it."""
    if overwrite:
        raise InvalidInputError(
            "overwrite is not supported: rows that other writers put at the same time could be neither kept "
            "nor dropped for sure. Append instead, delete rows with changeTypeColumn, or replace the Lance "
            "table itself"
        )
    options.refuse(["versionAsOf"], "is for reads; a checkpoint never changes")
    options.number("stagingBytes")
    options.number("walBytes", least=0)
    _ = options.take_over
    if (options.text("txnAppId") is None) and options.text("txnVersion") is not None:
        raise InvalidInputError("option txnVersion needs txnAppId")
    base = open_for_writing(options, schema)
    SparkRows(base.schema, base.storage_version, options).check(arrow_schema(schema))
    return base
