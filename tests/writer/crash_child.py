"""A process that writes durably until it is killed. Run by ``test_crash``, never imported by it.

It waits for one line of JSON on its standard input (so that the slow imports are over when its
turn comes), opens the shard, says ``ready``, and writes with several threads. What it is about to
do and what was acknowledged goes to the journal, a line each, unbuffered: a kill loses no line.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
from typing import Any

THREADS = 3
#: Rows small enough, and MemTables too, that freezes, flushes and commits happen all the time.
MAX_MEMTABLE_ROWS = 60


class NoPandas:
    """pyarrow imports pandas where it can, and takes twice as long for it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not needed here")


def main() -> None:
    sys.meta_path.insert(0, NoPandas())
    import pyarrow as pa

    from lancewal.base.table import BaseTable
    from lancewal.config import ShardWriterConfig
    from lancewal.writer import open_shard_writer

    order = json.loads(sys.stdin.readline())
    base = BaseTable.open(order["uri"])
    journal = os.open(order["journal"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    config = ShardWriterConfig(
        fsync=order["fsync"],
        stats_log_interval=None,
        enable_memtable=order["memtable"],
        max_memtable_rows=MAX_MEMTABLE_ROWS,
    )
    writer = open_shard_writer(base, order["shard"], config, indexes=() if order["memtable"] else None)
    keyed = bool(base.schema.primary_key)
    numbers = itertools.count(order["first"])

    def note(*words: Any) -> None:
        os.write(journal, (" ".join(map(str, words)) + "\n").encode())

    def rows(number: int, size: int) -> list[pa.RecordBatch]:
        ids = [number * 100 + i for i in range(size)]
        table = pa.table({"id": pa.array(ids, pa.int64()), "name": [f"{number}/{size}"] * size})
        return [batch for part in (0, 1) for batch in table.slice(part, None if part else 1).to_batches()]

    def write(seed: int) -> None:
        choose = random.Random(seed)
        mine: list[tuple[int, int]] = []
        while True:
            if keyed and mine and choose.random() < 0.25:
                number, size = mine.pop(choose.randrange(len(mine)))
                note("delete", number, size)
                writer.delete([number * 100 + i for i in range(size)])
                note("deleted", number, size)
            else:
                number, size = next(numbers), choose.randint(2, 7)
                writer.put(rows(number, size))
                note("put", number, size)
                mine.append((number, size))

    print("ready", flush=True)
    for thread in range(THREADS):
        threading.Thread(target=write, args=(order["first"] + thread,), daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
