"""Writes and reads a small and a large batch, and prints how much memory the driver's side took.

The driver's side is this process, its Java machine, and the Python processes that plan and commit; the
executors are processes of their own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import functions as F  # noqa: N812

from lancewal.spark import compact, flush, session, write

CONF = {
    "spark.driver.memory": "400m",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
}
_EXECUTOR = b"CoarseGrainedExecutorBackend"


def main(directory: str, *sizes: str) -> None:
    spark = session("local-cluster[2,1,1024]", app_name="memory", conf=CONF)
    spark.sparkContext.setLogLevel("OFF")
    for size in map(int, sizes):
        text = F.repeat(F.sha2(F.col("id").cast("string"), 256), 6)
        rows = spark.range(0, size, 1, 8).select("id", text.alias("name"))
        uri = f"{directory}/table-{size}"
        options = {"createIfMissing": "true", "primaryKey": "id", "numBuckets": "4"}
        rows.write.format("lancewal").mode("append").options(**options).save(uri)
        write(rows.filter("id % 4 = 0"), uri)
        flush(spark, uri)
        compact(spark, uri)
        read = spark.read.format("lancewal").load(uri).agg(F.count("*"), F.sum(F.length("name"))).first()
        assert read is not None
        sys.stdout.write(json.dumps({"rows": read[0], "bytes": read[1], "python_kb": peak_kb()}) + "\n")
        sys.stdout.flush()
    spark.stop()


def peak_kb() -> int:
    """The peaks of all Python processes on the driver's side, added up."""
    parents = {}
    for name in os.listdir("/proc"):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except (ValueError, OSError):
            continue
    total = 0
    pending = [os.getpid()]
    while pending:
        pid = pending.pop()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if _EXECUTOR in command:
            continue
        pending += [child for child, parent in parents.items() if parent == pid]
        if b"python" in command.split(b"\0")[0]:
            status = Path(f"/proc/{pid}/status").read_text()
            total += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return total


if __name__ == "__main__":
    main(*sys.argv[1:])
