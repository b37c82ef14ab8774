"""Applies events in the order of their source, across micro-batches: an older event never replaces a newer.

Within one write the events are sorted, as ``order_by`` does. For earlier writes, the table keeps each row's
sequence in a column. The tasks look it up after rows were routed to their shards, only for the keys of the
events, and drop events that are not above it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as st

from lancewal.errors import InvalidInputError
from lancewal.service import TakeOver
from lancewal.spark.columns import DELETES, NOTHING, UPSERTS, for_table, quoted
from lancewal.spark.low_latency import MicroBatches, format_options, start_stream
from lancewal.spark.options import OpenTable, Options
from lancewal.spark.sink import check_write
from lancewal.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


def apply_changes(
    df: DataFrame,
    uri: str,
    checkpoint: str,
    *,
    sequence_by: str,
    change_type_column: str | None = None,
    deleted_column: str | None = None,
    txn_app_id: str | None = None,
    trigger: Mapping[str, Any] | None = None,
    query_name: str | None = None,
    take_over: TakeOver = "when_gone",
    storage_options: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
) -> StreamingQuery:
    """Start a streaming query that applies events in the order of ``sequence_by``, even if they come late.

    ``sequence_by`` is a column of the events and of the table. An event whose value is not above that of its
    key's row is dropped, whether the row came in the same micro-batch or before. ``change_type_column`` says
    which events are deletes. A deleted row has no sequence any more, so an older event in a later micro-batch
    brings it back. To prevent that, set ``deleted_column``, a boolean column of the table: deletes are then
    kept as rows in which it is true. ``take_over`` is as in :func:`~lancewal.spark.write`.

    .. code-block:: python

        events = from_debezium(raw)  # with the columns _op and _sequence
        apply_changes(
            events, uri, checkpoint, sequence_by="_sequence", change_type_column="_op", deleted_column="gone"
        )
    """
    change_type = None if deleted_column else change_type_column
    parsed = format_options(uri, change_type, storage_options, options, take_over)
    in_sequence = InSequence.of(parsed, df.schema, sequence_by)
    if deleted_column is not None:
        df = _with_deletes_kept(df, in_sequence, change_type_column, deleted_column)
    check_write(parsed, df.schema)
    batches = MicroBatches(dict(parsed.values), txn_app_id, [sequence_by], checkpoint, in_sequence.filtered)
    return start_stream(df, batches, checkpoint, trigger=trigger, query_name=query_name)


@dataclass(frozen=True)
class InSequence:
    """Drops the events that are not newer than the table's rows of their keys."""

    options: Options = field(repr=False)
    key: tuple[str, ...]
    column: str
    columns: pa.Schema

    @classmethod
    def of(cls, options: Options, events: st.StructType, column: str) -> InSequence:
        schema = OpenTable.open(options).base.schema
        if not schema.primary_key:
            raise InvalidInputError(
                f"events are applied by key, and the table at {options.uri} has no primary key"
            )
        missing = [
            name
            for name in (*schema.primary_key, column)
            if name not in schema.names or name not in events.fieldNames()
        ]
        if missing:
            raise InvalidInputError(
                f"the events and the table must both have {', '.join(missing)}: the table keeps the sequence "
                "of each row to know what is newer"
            )
        type_ = schema.plain.field(column).type
        if type_.num_fields:
            raise InvalidInputError(
                f"sequence_by names {column}, which is {type_}; events are ordered by a plain value, such as "
                "a number, a text or a timestamp"
            )
        wanted = [schema.plain.field(name) for name in (*schema.primary_key, column)]
        return cls(options, tuple(schema.primary_key), column, pa.schema(wanted))

    def filtered(self, rows: DataFrame) -> DataFrame:
        """The events that are newer than the table's rows; keeps order and partitions."""
        return rows.mapInArrow(self, rows.schema)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The function for ``mapInArrow``."""
        table: Table | None = None
        for batch in batches:
            if batch.num_rows:
                table = table or Table.open(self.options.uri, self.options.storage)
                yield batch.filter(pa.array(self._counts(table, batch)))

    def _counts(self, table: Table, batch: pa.RecordBatch) -> np.ndarray[Any, np.dtype[np.bool_]]:
        given = for_table(batch.select([*self.key, self.column]), self.columns, self.key)
        events = given.column(self.column)
        if events.null_count:
            raise InvalidInputError(f"an event has no {self.column}, by which events are ordered")
        found = table.lookup(pa.table(given).select(list(self.key)), columns=[self.column])
        counts: np.ndarray[Any, np.dtype[np.bool_]] = ~found.found
        kept = found.table[self.column].combine_chunks()
        above = pc.fill_null(pc.greater(events.filter(pa.array(found.found)), kept), True)
        counts[found.found] = above.to_numpy(zero_copy_only=False)
        return counts


def _with_deletes_kept(
    df: DataFrame, events: InSequence, change_type_column: str | None, deleted_column: str
) -> DataFrame:
    """The events with deletes turned into rows whose ``deleted_column`` is true."""
    kept = OpenTable.open(events.options).base.schema.plain
    if deleted_column not in kept.names or not pa.types.is_boolean(kept.field(deleted_column).type):
        raise InvalidInputError(
            f"deleted_column is {deleted_column}, which is no boolean column of the table at "
            f"{events.options.uri}"
        )
    if change_type_column is None or change_type_column not in df.columns:
        raise InvalidInputError("deleted_column needs change_type_column, a column of the events")
    kind = F.lower(quoted(change_type_column))
    unknown = F.concat(F.lit(f"column {change_type_column} says "), quoted(change_type_column))
    deleted = (
        F.when(kind.isNull() | kind.isin(*UPSERTS), F.lit(False))
        .when(kind.isin(*DELETES), F.lit(True))
        .otherwise(F.raise_error(F.concat(unknown, F.lit(f"; known are {', '.join((*UPSERTS, *DELETES))}"))))
    )
    events_alone = df.where(kind.isNull() | ~kind.isin(*NOTHING))
    return events_alone.withColumn(deleted_column, deleted).drop(change_type_column)
