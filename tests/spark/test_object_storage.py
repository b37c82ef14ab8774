"""Everything on S3, with storage options as options of the format and as arguments."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import lance

import lancewal
from lancewal.spark import changes, compact, flush, gc, route, stream, write
from tests.servers import S3Server
from tests.spark.tables import frame, named, spark_content

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW = {"availableNow": True}


def test_a_table_on_s3_is_made_written_read_followed_and_compacted(
    spark: SparkSession, s3: S3Server, tmp_path: Path
) -> None:
    uri, storage = s3.uri(f"{uuid.uuid4().hex}/table"), dict(s3.storage_options)
    options = {f"storage.{name}": value for name, value in storage.items()}
    created = {"createIfMissing": "true", "primaryKey": "id", "numBuckets": "2"}
    frame(spark, named(0, 5)).write.format("lancewal").mode("append").options(**options, **created).save(uri)
    write(frame(spark, named(5, 5)), uri, storage_options=storage)
    routed = route(frame(spark, named(10, 5)), uri, storage_options=storage)
    routed.write.format("lancewal").mode("append").options(**options).save(uri)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "one.json").write_text('{"id": 15, "name": "name_15"}')
    incoming = spark.readStream.schema("id long, name string").json(str(tmp_path / "in"))
    stream(
        incoming, uri, str(tmp_path / "checkpoint"), trigger=NOW, storage_options=storage
    ).awaitTermination()
    assert spark_content(spark, uri, **options) == named(0, 16)
    seen: list[int] = []
    feed = changes(spark, uri, starting_position="earliest", storage_options=storage)
    query = feed.writeStream.foreachBatch(lambda batch, _: seen.extend(row.id for row in batch.collect()))
    query = query.option("checkpointLocation", str(tmp_path / "feed"))
    query.trigger(**NOW).start().awaitTermination()  # type: ignore[arg-type]
    assert sorted(seen) == list(range(16))
    for job in (flush, compact, gc):
        assert job(spark, uri, storage_options=storage)
    assert lancewal.open(uri, storage).scan().count_rows() == 16
    assert lance.dataset(uri, storage_options=storage).count_rows() == 16
    view = ", ".join(f"`{name}` '{value}'" for name, value in options.items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW on_s3 USING lancewal OPTIONS (path '{uri}', {view})")
    spark.sql("INSERT INTO on_s3 VALUES (16, 'name_16')")
    assert sorted(map(tuple, spark.sql("SELECT * FROM on_s3").collect())) == named(0, 17)
