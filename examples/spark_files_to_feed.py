"""Spark streams files into a table, and a second stream follows what changes in it.

The first stream may be killed and started again: each file lands once. The second one keeps another table up
to date; it could as well fill a cache or call a service.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame

import lancewal
from lancewal.spark import changes, session, stream

ONCE = {"availableNow": True}
COLUMNS = pa.schema([("id", pa.int64()), ("text", pa.string())])


def main() -> None:
    directory = Path(tempfile.mkdtemp())
    files = directory / "files"
    files.mkdir()
    table = lancewal.create(directory / "documents.lance", COLUMNS, key="id")
    copy = lancewal.create(directory / "copy.lance", COLUMNS, key="id")
    spark = session()

    def arrive(name: str, *rows: dict[str, object]) -> None:
        (files / name).write_text("\n".join(json.dumps(row) for row in rows))

    def run_streams() -> None:
        incoming = spark.readStream.schema("id BIGINT, text STRING").json(str(files))
        stream(incoming, table.uri, str(directory / "in"), trigger=ONCE).awaitTermination()
        feed = changes(spark, table.uri, starting_position="earliest")
        follow = feed.writeStream.foreachBatch(apply).trigger(**ONCE)
        follow.option("checkpointLocation", str(directory / "out")).start().awaitTermination()

    def apply(batch: DataFrame, batch_id: int) -> None:
        rows = batch.select("id", "text").toArrow()
        with copy.writer() as writer:
            writer.put(rows)  # by key: a batch that comes again changes nothing

    arrive("1.json", {"id": 1, "text": "a red fox"}, {"id": 2, "text": "a grey owl"})
    run_streams()
    arrive("2.json", {"id": 2, "text": "two grey owls"})
    run_streams()
    spark.stop()
    found = sorted(copy.scan().to_table().to_pylist(), key=lambda row: row["id"])
    print("the copy has:", found)
    assert found == [{"id": 1, "text": "a red fox"}, {"id": 2, "text": "two grey owls"}]


if __name__ == "__main__":
    main()
