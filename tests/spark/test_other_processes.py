"""Spark and plain Python on one table, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pytest
from lance.mem_wal import LsmScanner, ShardSnapshot

import lancewal
from lancewal.shard.discovery import discover_manifests
from lancewal.spark import flush, write
from lancewal.storage import ObjectStore, layout
from tests.spark.conftest import WORKER_PATH
from tests.spark.tables import frame, named, new_table, schema_of, spark_content

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

READER = """
import json, sys, lancewal
rows = lancewal.open(sys.argv[1]).scan().to_table().to_pylist()
print(json.dumps(sorted([row["id"], row["name"]] for row in rows)))
"""
#: Puts rows, and stays open until it is told to put more and to end.
WRITER = """
import sys, pyarrow as pa, lancewal
with lancewal.open(sys.argv[1]).writer() as writer:
    for line in sys.stdin:
        start = int(line)
        ids = range(start, start + 10)
        writer.put(pa.table({"id": list(ids), "name": [f"name_{i}" for i in ids]}))
        print("put", flush=True)
"""


def python(program: str, uri: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, uri],
        env={**os.environ, "PYTHONPATH": WORKER_PATH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_by_python(uri: str) -> list[tuple[int, str]]:
    out, _ = python(READER, uri).communicate()
    return [(i, name) for i, name in json.loads(out)]


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "append only"])
def test_each_reads_what_the_other_has_just_written_and_pylance_both(
    spark: SparkSession, tmp_path: Path, keyed: bool
) -> None:
    table = new_table(tmp_path / "table", schema_of(keyed))
    frame(spark, named(0, 10)).write.format("lancewal").mode("append").save(table.uri)
    write(frame(spark, named(10, 10)), table.uri)
    assert read_by_python(table.uri) == named(0, 20)

    writer = python(WRITER, table.uri)
    assert writer.stdin is not None
    assert writer.stdout is not None
    try:
        for number in (2, 3):
            writer.stdin.write(f"{10 * number}\n")
            writer.stdin.flush()
            assert writer.stdout.readline() == "put\n"
            assert spark_content(spark, table.uri) == named(0, 10 * number + 10), "it is still open"
        writer.stdin.close()
        assert writer.wait() == 0
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()

    write(frame(spark, named(40, 10)), table.uri)
    flush(spark, table.uri)
    assert sorted(map(tuple, read_by_pylance(table))) == named(0, 50)
    assert read_by_python(table.uri) == spark_content(spark, table.uri) == named(0, 50)


def read_by_pylance(table: lancewal.Table) -> list[tuple[int, str]]:
    """The base table and the SSTables that the manifests list: after a flush these are all rows."""
    manifests = discover_manifests(ObjectStore.from_uri(table.uri))
    dataset = lance.dataset(table.uri)
    if not table.primary_key:
        # Lance's own merge needs a key; without one there is nothing to merge.
        places = [layout.sstable_dir(m.shard_id, each.path) for m in manifests for each in m.sstables]
        parts = [dataset, *(lance.dataset(layout.child_uri(table.uri, place)) for place in places)]
        return [(row["id"], row["name"]) for part in parts for row in part.to_table().to_pylist()]
    snapshots = []
    for manifest in manifests:
        snapshot = ShardSnapshot(str(manifest.shard_id)).with_current_generation(manifest.current_generation)
        for entry in manifest.sstables:
            snapshot = snapshot.with_sstable(entry.generation, entry.path)
        snapshots.append(snapshot)
    found = LsmScanner.from_snapshots(dataset, snapshots).to_table().to_pylist()
    return [(row["id"], row["name"]) for row in found]
