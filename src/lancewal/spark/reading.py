"""Reading through Spark where the format's name alone is not enough."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Place = str | Mapping[str, int]


def changes(
    spark: SparkSession,
    uri: str,
    *,
    starting_position: Place = "latest",
    max_entries_per_trigger: int | None = None,
    max_bytes_per_trigger: int | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The change feed of a table as a streaming DataFrame.

    ``starting_position``: "earliest" (all that is retained), "latest", "snapshot" (the table's rows
    now, then what follows), or a map from shard id to WAL position.

    .. code-block:: python

        feed = changes(spark, "s3://bucket/documents", starting_position="snapshot")
        feed.writeStream.foreachBatch(apply).option("checkpointLocation", "s3://bucket/checkpoints").start()
    """
    place = starting_position if isinstance(starting_position, str) else json.dumps(dict(starting_position))
    reader = spark.readStream.format("lancewal").option("readChangeFeed", "true")
    reader = reader.option("startingPosition", place)
    if max_entries_per_trigger is not None:
        reader = reader.option("maxEntriesPerTrigger", str(max_entries_per_trigger))
    if max_bytes_per_trigger is not None:
        reader = reader.option("maxBytesPerTrigger", str(max_bytes_per_trigger))
    for name, value in (storage_options or {}).items():
        reader = reader.option(f"storage.{name}", value)
    return reader.load(uri)
