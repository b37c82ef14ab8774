"""Routing rows to their shards inside Spark: the bucket hash as a native expression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

from lancewal.errors import InvalidInputError
from lancewal.shard import BUCKET, IDENTITY
from lancewal.spark.columns import spark_schema
from lancewal.spark.options import OpenTable, Options

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: Spark's hash starts from 42. Hashed from there, this number gives 0, and ``hash`` goes on
#: from one argument to the next: so the second argument is hashed from 0, as Lance does.
_SEED_ZERO = -1693959553

_AS_INT = frozenset(
    [pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16(), pa.date32(), pa.string()]
)
_AS_IS = frozenset([pa.int64(), pa.large_string(), pa.string_view(), pa.float32(), pa.float64()]) | _AS_INT


def route(
    df: DataFrame,
    uri: str,
    *,
    storage_options: Mapping[str, str] | None = None,
    order_by: str | Sequence[str] = (),
) -> DataFrame:
    """The rows of ``df`` with all of a shard in one partition, so that few SSTables are written.

    A table in n buckets gives n partitions, bucket i in partition i. ``order_by`` sorts the rows
    of each partition by some columns (not in a stream), so that of several rows with one key
    the greatest one is the last, and wins.

    .. code-block:: python

        route(rows, uri, order_by="changed_at").write.format("lancewal").mode("append").save(uri)
    """
    options = Options.parse({**{f"storage.{k}": v for k, v in (storage_options or {}).items()}, "path": uri})
    return routed(df, OpenTable.open(options), order_by)


def routed(df: DataFrame, table: OpenTable, order_by: str | Sequence[str] = ()) -> DataFrame:
    router = table.router()
    if router.transform == BUCKET:
        assert router.column is not None
        count = router.num_buckets
        field = table.base.schema.plain.field(router.column)
        df = df.repartitionById(count, bucket_column(field, count))
    elif router.transform == IDENTITY:
        assert router.column is not None
        # A fixed number: by default Spark joins small partitions, and shards with them.
        count = int(df.sparkSession.conf.get("spark.sql.shuffle.partitions") or 200)
        df = df.repartition(count, _quoted(router.column))
    else:
        df = df.repartition(1)
    columns = [order_by] if isinstance(order_by, str) else list(order_by)
    return df.sortWithinPartitions(*columns) if columns else df


def bucket_column(field: pa.Field, num_buckets: int) -> Column:
    """The bucket of each row, from 0 to ``num_buckets`` - 1, exactly as the table computes it."""
    value = _quoted(field.name).cast(spark_schema(pa.schema([field]))[0].dataType)
    hashed = F.hash(F.lit(_SEED_ZERO), _hashed_value(value, field))
    return (hashed.bitwiseAND(F.lit(0x7FFFFFFF)) % F.lit(num_buckets)).cast("int")


def _hashed_value(value: Column, field: pa.Field) -> Column:
    type_ = field.type
    if type_ in _AS_IS:
        return value
    if type_ == pa.uint32():
        # The table hashes the bits; beyond the greatest signed number they are those of a negative one.
        return F.when(value >= 1 << 31, value - (1 << 32)).otherwise(value).cast("int")
    if type_ == pa.uint64():
        wrapped = value - F.lit(str(1 << 64)).cast("decimal(20,0)")
        return (
            F.when(value >= F.lit(str(1 << 63)).cast("decimal(20,0)"), wrapped)
            .otherwise(value)
            .cast("bigint")
        )
    if pa.types.is_timestamp(type_) and type_.unit == "us":
        return value
    raise InvalidInputError(
        f"rows cannot be routed by {field.name} of type {type_} inside Spark; write them with "
        'df.write.format("lancewal"), which needs no routing'
    )


def _quoted(name: str) -> Column:
    return F.col("`" + name.replace("`", "``") + "`")
