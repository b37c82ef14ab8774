"""Writes, reads and compacts a small and a large batch, and prints how much memory the driver's side took.

The driver's side is this process, its Java machine, and the Python processes that plan and commit; the
executors are processes of their own. ``python -m tests.spark.memory_child directory rows…``
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import functions as F  # noqa: N812

from lancewal.spark import compact, flush, session, write
from tests.spark.processes import LOCAL_CLUSTER, children_of, command_line

CONF = {
    "spark.driver.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "4",
}
_EXECUTOR = b"CoarseGrainedExecutorBackend"


def main(directory: str, *sizes: str) -> None:
    conf = {**CONF, "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"]}
    spark = session(LOCAL_CLUSTER, app_name="memory", conf=conf)
    spark.sparkContext.setLogLevel("OFF")
    for size in map(int, sizes):
        text = F.repeat(F.sha2(F.col("id").cast("string"), 256), 6)
        rows = spark.range(0, size, 1, 8).select("id", text.alias("name"))
        uri = f"{directory}/table-{size}"
        options = {"createIfMissing": "true", "primaryKey": "id", "numBuckets": "4"}
        peaks: dict[str, int] = {}
        with peak_of_python(peaks, "append to an empty table"):
            rows.filter("id % 4 != 0").write.format("lancewal").mode("append").options(**options).save(uri)
        with peak_of_python(peaks, "low latency"):
            write(rows.filter("id % 4 = 0"), uri)
        with peak_of_python(peaks, "flush and compact"):
            flush(spark, uri)
            compact(spark, uri)
            write(rows.filter("id % 4 = 2"), uri)
        with peak_of_python(peaks, "read"):
            found = spark.read.format("lancewal").load(uri)
            read = found.agg(F.count("*"), F.sum(F.length("name"))).first()
        with peak_of_python(peaks, "append to long logs"):
            some = rows.filter("id % 100 = 0").write.format("lancewal").mode("append")
            some.option("walBytes", 0).save(uri)
        assert read is not None
        sys.stdout.write(json.dumps({"rows": read[0], "bytes": read[1], "peaks_kb": peaks}) + "\n")
        sys.stdout.flush()
    spark.stop()


@contextmanager
def peak_of_python(peaks: dict[str, int], step: str) -> Iterator[None]:
    """Note the most that all Python processes of the driver's side held together at a moment, in KB.

    Some of them live for one commit only, so it is looked at again and again.
    """
    over = threading.Event()
    peaks[step] = 0

    def look() -> None:
        while not over.wait(0.02):
            peaks[step] = max(peaks[step], sum(map(resident_kb, driver_side(os.getpid()))))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def driver_side(root: int) -> list[int]:
    """The Python processes below ``root``, but for those of executors."""
    found = []
    pending = [root]
    while pending:
        pid = pending.pop()
        command = command_line(pid)
        if _EXECUTOR in command:
            continue
        if b"python" in command.split(b"\0")[0]:
            found.append(pid)
        pending += children_of(pid)
    return found


def resident_kb(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    except OSError:
        return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
