"""DELETE, UPDATE and MERGE as functions, for sessions without the catalog of ``front.jar``.

Spark finds the rows that change in one state of the table. They are written like any other rows, through
the owners of shards that have one. Writes of others to the same keys in between are not detected: the last
write of a key wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lancewal.errors import InvalidInputError
from lancewal.service import TakeOver
from lancewal.spark.columns import quoted
from lancewal.spark.low_latency import FORMAT
from lancewal.spark.options import OpenTable, Options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_CHANGE = "__lancewal_change"
_OLD, _NEW = "target", "source"


def delete(
    spark: SparkSession,
    uri: str,
    where: str,
    *,
    take_over: TakeOver = "when_gone",
    storage_options: Mapping[str, str] | None = None,
) -> None:
    """Delete the rows for which ``where``, an expression of Spark's SQL, is true.

    ``take_over`` is as in :func:`~lancewal.spark.write`.

    .. code-block:: python

        delete(spark, "s3://bucket/documents", "year(created) < 2020")
    """
    options = Options.of(uri, storage_options)
    key = _key(options, "delete")
    rows = _rows(spark, options).filter(where).select(*map(quoted, key))
    _write(rows, options, "delete", take_over)


def update(
    spark: SparkSession,
    uri: str,
    set: Mapping[str, str],
    where: str | None = None,
    *,
    take_over: TakeOver = "when_gone",
    storage_options: Mapping[str, str] | None = None,
) -> None:
    """Set columns to expressions of Spark's SQL, in the rows for which ``where`` is true.

    ``take_over`` is as in :func:`~lancewal.spark.write`.

    .. code-block:: python

        update(spark, "s3://bucket/documents", {"text": "trim(text)"}, "text LIKE ' %'")
    """
    from pyspark.sql import functions as F  # noqa: N812

    options = Options.of(uri, storage_options)
    rows = _rows(spark, options)
    _check_set(set, rows.columns, _key(options, "update"))
    changed = rows if where is None else rows.filter(where)
    types = {field.name: field.dataType for field in rows.schema.fields}
    columns = [
        (F.expr(set[name]).cast(types[name]) if name in set else quoted(name)).alias(name)
        for name in rows.columns
    ]
    _write(changed.select(*columns), options, "upsert", take_over)


def merge(
    source: DataFrame,
    uri: str,
    *,
    update: Mapping[str, str] | None = None,
    delete: str | None = None,
    insert: bool = True,
    take_over: TakeOver = "when_gone",
    storage_options: Mapping[str, str] | None = None,
) -> None:
    """Merge the rows of ``source`` into the table, by the table's primary key.

    If the table has a row with the same key, it is deleted if the expression ``delete`` is true, and
    otherwise updated by the expressions of ``update``. In these, ``source.…`` and ``target.…`` name the two
    rows; by default every column that ``source`` has is set. If the table has no such row, the row is
    inserted, unless ``insert`` is false. Two rows of ``source`` with the same key are refused before anything
    is written, because it is not clear which one counts. This check evaluates ``source`` a second time.
    ``take_over`` is as in :func:`~lancewal.spark.write`.

    .. code-block:: python

        merge(changes, uri, update={"views": "target.views + source.views"}, delete="source.gone")
    """
    from pyspark.sql import functions as F  # noqa: N812

    options = Options.of(uri, storage_options)
    key = _key(options, "merge")
    rows = _rows(source.sparkSession, options)
    given = [name for name in rows.columns if name in source.columns]
    missing = [name for name in key if name not in given]
    if missing:
        raise InvalidInputError(f"the source lacks {', '.join(missing)}, of the table's primary key")
    chosen = {name: f"{_NEW}.`{name}`" for name in given if name not in key} if update is None else update
    _check_set(chosen, rows.columns, key)
    _refuse_repeated(source, key)
    new, old = source.alias(_NEW), rows.withColumn(_CHANGE, F.lit(True)).alias(_OLD)
    same = [new[name].eqNullSafe(old[name]) for name in key]
    joined = new.join(old, same, "left")
    known = F.col(f"{_OLD}.{_CHANGE}").isNotNull()
    kind = F.when(known & F.expr(delete), "delete").otherwise("upsert") if delete else F.lit("upsert")
    columns = []
    for field in rows.schema.fields:
        name = field.name
        inserted = F.col(f"{_NEW}.`{name}`") if name in given else F.lit(None)
        kept = F.col(f"{_NEW}.`{name}`") if name in key else F.col(f"{_OLD}.`{name}`")
        updated = F.expr(chosen[name]) if name in chosen else kept
        columns.append(F.when(known, updated).otherwise(inserted).cast(field.dataType).alias(name))
    wanted = joined if insert else joined.filter(known)
    _write(wanted.select(*columns, kind.alias(_CHANGE)), options, None, take_over)


def _rows(spark: SparkSession, options: Options) -> DataFrame:
    return spark.read.format(FORMAT).options(**options.values).load()


def _key(options: Options, what: str) -> tuple[str, ...]:
    key = OpenTable.open(options).base.schema.primary_key
    if not key:
        raise InvalidInputError(f"{what} needs a primary key, and the table at {options.uri} has none")
    return key


def _check_set(chosen: Mapping[str, str], columns: list[str], key: tuple[str, ...]) -> None:
    unknown = [name for name in chosen if name not in columns]
    if unknown or not chosen:
        raise InvalidInputError(
            f"nothing can be set to {', '.join(unknown) or 'nothing'}; the columns are {', '.join(columns)}"
        )
    if set(chosen) & set(key):
        raise InvalidInputError("a primary key cannot be changed; delete the row and insert another")


def _refuse_repeated(source: DataFrame, key: tuple[str, ...]) -> None:
    """Refuse a source that has a key twice, because Spark would write its rows in any order."""
    from pyspark.sql import functions as F  # noqa: N812

    number = "__lancewal_rows"
    counted = source.groupBy(*map(quoted, key)).agg(F.count(F.lit(1)).alias(number))
    found = counted.filter(quoted(number) > 1).select(*map(quoted, key)).first()
    if found is not None:
        shown = ", ".join(f"{name} = {value!r}" for name, value in zip(key, found, strict=True))
        raise InvalidInputError(
            f"the source has several rows with {shown}; leave one for each key, the newest for example, "
            "and merge again"
        )


def _write(rows: DataFrame, options: Options, kind: str | None, take_over: TakeOver) -> None:
    """Write the rows with one write of the format, in which a task that dies publishes nothing."""
    from pyspark.sql import functions as F  # noqa: N812

    if kind is not None:
        rows = rows.withColumn(_CHANGE, F.lit(kind))
    writer = rows.write.format(FORMAT).mode("append").options(**options.values)
    writer.option("changeTypeColumn", _CHANGE).option("takeOver", take_over).save()
