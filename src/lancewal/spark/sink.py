"""The sink by format: rows in any distribution, staged by tasks and published by the driver.

Tasks claim nothing and list nothing. The driver's commit sees the messages of the winning
attempts only, so what failed, was killed or lost a speculation is never published, whenever
it writes. A stream's commit is a transaction of (query id, batch id), see ``lancewal.publish``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from lancewal.base import BaseTable
from lancewal.errors import InvalidInputError
from lancewal.publish import publish
from lancewal.spark.access import OpenTable
from lancewal.spark.columns import arrow_schema
from lancewal.spark.creation import open_for_writing
from lancewal.spark.options import Options
from lancewal.spark.rows import SparkRows
from lancewal.staging import DEFAULT_STAGING_BYTES, Staged, Stager
from lancewal.transactions import Transaction

logger = logging.getLogger(__name__)

#: The property of a stream's tasks that names the query; the same after a restart from its checkpoint.
_QUERY_ID_PROPERTY = "sql.streaming.queryId"


@dataclass
class StagedMessage(WriterCommitMessage):
    """What one task wrote, on its way to the driver."""

    staged: list[Staged] = field(default_factory=list)
    query_id: str | None = None


def check_write(options: Options, schema: st.StructType, overwrite: bool) -> BaseTable:
    """Refuse on the driver what every task would refuse; make the table if that is asked for."""
    if overwrite:
        raise InvalidInputError(
            "overwrite is not supported: rows that other writers put at the same time could be neither kept "
            "nor dropped for sure. Append instead, delete rows with changeTypeColumn, or replace the Lance "
            "table itself"
        )
    options.number("stagingBytes")
    if (options.text("txnAppId") is None) and options.text("txnVersion") is not None:
        raise InvalidInputError("option txnVersion needs txnAppId")
    base = open_for_writing(options, schema)
    SparkRows.of(base, options).check(arrow_schema(schema))
    return base


def stage_rows(options: Options, batches: Iterator[pa.RecordBatch], partition: int) -> list[Staged]:
    """Write a task's rows as staged SSTables."""
    table = OpenTable.open(options)
    rows = SparkRows.of(table.base, options)
    stager = Stager(
        table.base,
        table.store,
        table.router(),
        order=(partition,),
        max_bytes=options.number("stagingBytes") or DEFAULT_STAGING_BYTES,
    )
    for batch in batches:
        stored = rows.stored(batch)
        if stored is not None:
            stager.add(stored)
    return stager.finish()


class BatchSink(DataSourceArrowWriter):
    """``df.write.format("lancewal").mode("append").save(uri)``."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._transaction = batch_transaction(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        return StagedMessage(stage_rows(self._options, iterator, _context().partitionId()))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _publish(self._options, messages, self._transaction)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _log_abort(messages)


class StreamSink(DataSourceStreamArrowWriter):
    """``df.writeStream.format("lancewal").start(uri)``; Spark makes a new one for every commit."""

    def __init__(self, options: Options) -> None:
        if options.text("txnVersion") is not None:
            raise InvalidInputError("a stream's version is its batch id; leave the option txnVersion out")
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        context = _context()
        query_id = context.getLocalProperty(_QUERY_ID_PROPERTY)
        if not query_id and self._options.text("txnAppId") is None:
            _refuse_without_key(self._options)
        return StagedMessage(stage_rows(self._options, iterator, context.partitionId()), query_id)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        app_id = self._options.text("txnAppId") or _query_id(messages)
        transaction = None if app_id is None else Transaction(app_id, batchId)
        _publish(self._options, messages, transaction)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        _log_abort(messages)


def batch_transaction(options: Options) -> Transaction | None:
    """The identity that a batch write was given; a part of one is refused."""
    app_id, version = options.text("txnAppId"), options.number("txnVersion", least=0)
    if app_id is None:
        return None
    if version is None:
        raise InvalidInputError("option txnAppId needs txnVersion, a number that grows with every write")
    return Transaction(app_id, version)


def _publish(
    options: Options, messages: Sequence[WriterCommitMessage | None], transaction: Transaction | None
) -> None:
    staged = [s for message in messages if isinstance(message, StagedMessage) for s in message.staged]
    table = OpenTable.open(options)
    written = publish(table.base, table.store, staged, transaction)
    logger.info("published %d SSTables in %d shards", len(staged), len(written))


def _query_id(messages: Sequence[WriterCommitMessage | None]) -> str | None:
    return next((m.query_id for m in messages if isinstance(m, StagedMessage) and m.query_id), None)


def _refuse_without_key(options: Options) -> None:
    if not OpenTable.open(options).base.schema.primary_key:
        raise InvalidInputError(
            "this stream cannot be told from others, and the table has no primary key: rows that are "
            "written again after a failure would be there twice. Set the option txnAppId to a name of its own"
        )


def _log_abort(messages: Sequence[WriterCommitMessage | None]) -> None:
    # Nothing is removed: a commit that failed half-way may have published some of it. What is
    # published nowhere is garbage, and collected as such.
    staged = sum(len(m.staged) for m in messages if isinstance(m, StagedMessage))
    logger.warning("a write was aborted; %d staged SSTables are left to garbage collection", staged)


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "Spark calls this in tasks only"
    return context
