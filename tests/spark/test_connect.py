"""A Spark Connect session, in a process of its own: a process has one kind of session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import WORKER_PATH
from tests.spark.tables import content, named, new_table
from tests.tables import APPEND_ONLY

PROGRAM = """
import sys
from lancewal.spark import changes, compact, flush, gc, route, session, stream, write
table, files, checkpoint = sys.argv[1:]
conf = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2"}
spark = session(remote="local[2]", conf=conf, front=True)
assert "connect" in type(spark).__module__
spark.conf.set("spark.sql.lancewal.front", "false")
SCHEMA = "id long, name string"
frame = lambda start: spark.createDataFrame([(i, f"name_{i}") for i in range(start, start + 5)], SCHEMA)
frame(0).write.format("lancewal").mode("append").save(table)
write(frame(5), table)
incoming = spark.readStream.schema(SCHEMA).json(files)
query = stream(incoming, table, checkpoint, trigger={"availableNow": True})
query.awaitTermination()
flush(spark, table)
assert spark.read.format("lancewal").load(table).filter("id >= 3").count() == 8
assert spark.read.format("lancewal").option("filter", "id >= 3 OR id = 1").load(table).count() == 9
feed = spark.read.format("lancewal").option("readChangeFeed", "true").load(table)
assert feed.count() == 11
following = changes(spark, table, starting_position="earliest").writeStream.format("memory").queryName("seen")
following = following.option("checkpointLocation", checkpoint + "-feed").trigger(availableNow=True)
following.start().awaitTermination()
assert spark.sql("SELECT count(*) FROM seen").first()[0] == 11
assert route(frame(0), table).count() == 5
assert len(compact(spark, table)) == 3
assert gc(spark, table, dry_run=True)
assert spark.read.format("lancewal").load(table).count() == 11
spark.conf.set("spark.sql.lancewal.front", "true")
name = f"lance.`{table}-vectors`"
how = "TBLPROPERTIES (vectorDimensions = 'v:2')"
spark.sql(f"CREATE TABLE {name} (id BIGINT, v ARRAY<FLOAT>, PRIMARY KEY (id)) {how}")
spark.sql(f"INSERT INTO {name} VALUES (1, array(1, 2)), (2, NULL)")
spark.sql(f"UPDATE {name} SET v = array(3, 4) WHERE id = 1")
for answers in ("true", "false"):
    spark.conf.set("spark.sql.lancewal.answers", answers)
    assert sorted(map(tuple, spark.table(name).collect())) == [(1, [3.0, 4.0]), (2, None)]
assert spark.read.format("lancewal").load(table).count() == 11
spark.stop()
"""


def test_batches_streams_and_jobs_work_over_spark_connect(tmp_path: Path) -> None:
    pytest.importorskip("grpc_status", reason="Spark Connect needs pyspark[connect]")
    pytest.importorskip("zstandard", reason="Spark Connect needs pyspark[connect]")
    table = new_table(tmp_path / "table", APPEND_ONLY)
    files = tmp_path / "files"
    files.mkdir()
    (files / "one.json").write_text('{"id": 10, "name": "name_10"}')
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([WORKER_PATH, os.environ.get("PYTHONPATH", "")]),
    }
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, table.uri, str(files), str(tmp_path / "checkpoint")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert content(table) == named(0, 11)
