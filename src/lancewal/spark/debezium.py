"""Converts Debezium's change events to rows with a change type, for :func:`~lancewal.spark.stream`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as st

from lancewal.errors import InvalidInputError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The columns that :func:`from_debezium` adds.
OPERATION = "_op"
SEQUENCE = "_sequence"
_DELETED = "d"


def from_debezium(df: DataFrame, *, sequence_by: str | None = "source.ts_ms") -> DataFrame:
    """The rows of Debezium's events: the columns of ``after``, or of ``before`` for deletes.

    ``df`` has the envelope's fields as columns: ``op``, and the structs ``before`` and ``after``. The result
    has the operation in the column ``_op``. Unless ``sequence_by`` is ``None``, the column ``_sequence`` has
    the value that orders the events of a key. Debezium's tombstones, which follow deletes and have no
    operation, are left out.

    .. code-block:: python

        events = raw.select(F.from_json("value", envelope).alias("e")).select("e.*")
        stream(
            from_debezium(events), uri, checkpoint, change_type_column="_op", order_by="_sequence"
        )
    """
    fields = {field.name: field.dataType for field in df.schema.fields}
    missing = [name for name in ("op", "before", "after") if name not in fields]
    if missing:
        raise InvalidInputError(
            f"a Debezium event has op, before and after; {', '.join(missing)} is missing in {df.columns}"
        )
    after = fields["after"]
    if not isinstance(after, st.StructType) or fields["before"] != after:
        raise InvalidInputError(
            f"before and after must be structs of the same columns, not {fields['before'].simpleString()} "
            f"and {after.simpleString()}"
        )
    taken = [name for name in (OPERATION, SEQUENCE) if name in after.fieldNames()]
    if taken:
        raise InvalidInputError(f"the table's rows have a column {', '.join(taken)}; rename it first")
    row = F.when(F.col("op") == _DELETED, F.col("before")).otherwise(F.col("after"))
    columns = [row.getField(name).alias(name) for name in after.fieldNames()]
    if sequence_by is not None:
        columns.append(F.col(sequence_by).alias(SEQUENCE))
    return df.where(F.col("op").isNotNull()).select(*columns, F.col("op").alias(OPERATION))
