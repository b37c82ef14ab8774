"""The sink by format: rows in any distribution, staged by tasks and published by the driver.

Tasks claim nothing and list nothing. The driver's commit sees the messages of the winning
attempts only, so what failed, was killed or lost a speculation is never published, whenever
it writes. A stream's commit is a transaction of (query id, batch id), see ``lancewal.publish``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from lancewal.base import BaseTable
from lancewal.errors import InvalidInputError
from lancewal.format import check_columns
from lancewal.publish import DEFAULT_STAGING_BYTES, FEED_COLUMNS, Staged, Stager, Transaction, publish
from lancewal.spark.columns import arrow_schema, for_table
from lancewal.spark.creation import open_for_writing
from lancewal.spark.options import OpenTable, Options
from lancewal.writer import Intake

logger = logging.getLogger(__name__)

# Rows from Spark in the form in which the table stores them, deletes among them.


#: What a row's change is called: by our own feed, by Delta's, by Debezium's.
_UPSERTS = ("upsert", "insert", "update", "update_postimage", "c", "u", "r")
_DELETES = ("delete", "d")
#: The old version of a row that another row of the feed replaces.
_NOTHING = ("update_preimage",)

_Mask = npt.NDArray[np.bool_]


class SparkRows:
    """Checks rows against the table; refusals name the column, and the key where it helps.

    ``change_column`` holds what is to be done with each row; null is an upsert. With it
    the columns that our change feed adds may be among the rows and are left out.
    """

    def __init__(
        self, base: BaseTable, change_column: str | None = None, *, round_floats: bool = False
    ) -> None:
        self._schema = base.schema
        self._round_floats = round_floats
        self._change_column = change_column
        check_columns(base.schema)
        self._intake = Intake(base.schema, storage_version=base.storage_version)
        if change_column is not None and change_column in base.schema.names:
            raise InvalidInputError(
                f"{change_column} is a column of the table and cannot say what becomes of a row; rename one"
            )

    @classmethod
    def of(cls, base: BaseTable, options: Options) -> SparkRows:
        """As the options of a write ask for."""
        return cls(base, options.text("changeTypeColumn"), round_floats=options.flag("roundFloats"))

    def check(self, given: pa.Schema) -> None:
        """Refuse rows of a schema that does not fit, whatever their values are."""
        empty = pa.RecordBatch.from_arrays([pa.nulls(0, type_) for type_ in given.types], schema=given)
        if self._change_column is not None:
            _, empty = self._take_changes(empty)
        unknown = [name for name in empty.schema.names if name not in self._schema.names]
        if unknown:
            raise InvalidInputError(
                f"the table has no column {', '.join(unknown)}; "
                f"its columns are {', '.join(self._schema.names)}"
            )
        required = [field.name for field in self._schema.plain if not field.nullable]
        if self._change_column is None:
            required += self._schema.primary_key
        missing = sorted(set(required) - set(empty.schema.names))
        if missing:
            raise InvalidInputError(f"the rows lack {', '.join(missing)}, which cannot be null; add it")
        self._for_table(empty)

    def stored(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """The rows in ``schema.stored``, in their order; ``None`` when nothing is left to do."""
        if batch.num_rows == 0:
            return None
        if self._change_column is None:
            return self._upserts(batch)
        changes, batch = self._take_changes(batch)
        deleted = _is_one_of(changes, _DELETES)
        ignored = _is_one_of(changes, _NOTHING)
        self._refuse_unknown(changes, deleted | ignored)
        upserted = ~(deleted | ignored)
        parts, places = [], []
        for wanted, convert in ((upserted, self._upserts), (deleted, self._deletes)):
            if wanted.any():
                part = batch if wanted.all() else batch.filter(pa.array(wanted))
                parts.append(convert(part))
                places.append(np.flatnonzero(wanted))
        if not parts:
            return None
        if len(parts) == 1:
            return parts[0]
        # Each kind was converted by itself; a key's last change must stay the last.
        order = np.argsort(np.concatenate(places), kind="stable")
        return pa.concat_batches(parts).take(pa.array(order))

    def _upserts(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return self._intake.upserts(self._for_table(batch)).batches[0]

    def _deletes(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        names = [name for name in self._schema.primary_key if name in batch.schema.names]
        return self._intake.deletes(self._for_table(batch.select(names))).batches[0]

    def _for_table(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        key = self._schema.primary_key
        return for_table(batch, self._schema.plain, key, round_floats=self._round_floats)

    def _take_changes(self, batch: pa.RecordBatch) -> tuple[pa.Array, pa.RecordBatch]:
        assert self._change_column is not None
        place = batch.schema.get_field_index(self._change_column)
        if place < 0:
            raise InvalidInputError(
                f"option changeTypeColumn names {self._change_column}, which the rows do not have; "
                f"their columns are {', '.join(batch.schema.names)}"
            )
        changes = batch.column(place)
        if not pa.types.is_string(changes.type) and not pa.types.is_large_string(changes.type):
            raise InvalidInputError(f"column {self._change_column} must hold text, not {changes.type}")
        left_out = {self._change_column, *(c for c in FEED_COLUMNS if c not in self._schema.names)}
        return changes, batch.select([name for name in batch.schema.names if name not in left_out])

    def _refuse_unknown(self, changes: pa.Array, known: _Mask) -> None:
        unknown = ~(known | _is_one_of(changes, _UPSERTS) | changes.is_null().to_numpy(zero_copy_only=False))
        if unknown.any():
            found = changes.filter(pa.array(unknown)).unique().slice(0, 3).to_pylist()
            raise InvalidInputError(
                f"column {self._change_column} says {found}; known are {', '.join((*_UPSERTS, *_DELETES))}"
            )


def _is_one_of(changes: pa.Array, words: tuple[str, ...]) -> _Mask:
    found = pc.is_in(pc.utf8_lower(changes), value_set=pa.array(words, changes.type))
    return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)


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
