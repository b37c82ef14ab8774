"""Many shards in one process, and one number for its memory.

A process of its own writes rows of 4 KB, evenly over all shards, through one table writer, with a budget that
holds a part of them (``LANCEWAL_MEMORY_BYTES``). No MemTable is ever full by its own limit: without the
budget all rows would wait in memory. It reads meanwhile, and keeps the table in shape. The peak of what it
took beyond its start is compared with the budget.

Allocators keep memory that a thread has freed for that thread, and each shard has threads of its own. So the
process has them share it, as ``lancewal serve`` does.

``python -m bench.workloads.many_shards DIRECTORY --shards 500 --budget 512 --written 1536`` runs it alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

import lancewal
from bench.comparison import Comparison
from bench.context import Context
from bench.memory import peak, resident
from bench.registry import workload
from bench.tables import KEY
from lancewal.config import MB
from lancewal.storage import row_memory
from lancewal.storage.memory import MEMORY_VARIABLE

DIMENSION = 1024
_ROW_BYTES = 4 * DIMENSION
ROWS_PER_PUT = 4000
#: As ``lancewal serve`` begins.
_ALONE = """
from lancewal.cli.serve import share_freed_memory
share_freed_memory()
from bench.workloads.many_shards import main
main()
"""
_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("v", pa.list_(pa.float32(), DIMENSION)),
    ]
)


@workload(
    "many_shards",
    "500 shards in one process with a budget of 512 MB, 1.5 GB written: peak memory beyond its start",
    repeats=1,
)
def many_shards(context: Context) -> list[Comparison]:
    shards = context.size(full=500, quick=20)
    budget, written = (512, 1536) if not context.quick else (64, 48)
    found = measured(context.directory("many_shards") / "table", shards, budget * MB, written * MB)
    return [
        Comparison(
            f"memory of a process with {shards} shards",
            found["peak"] / 1e6,
            budget * MB / 1e6,
            "MB",
            False,
            "its budget",
            target=1.0,
        ),
        Comparison(
            "rows that wait for a flush, at most",
            found["waiting"] / 1e6,
            found["limit"] / 1e6,
            "MB",
            False,
            "their part of it",
            target=1.1,
        ),
    ]


def measured(where: Path, shards: int, budget: int, written: int) -> dict[str, Any]:
    """What a process with this ``budget`` took for writing so many bytes."""
    command = [sys.executable, "-c", _ALONE, str(where), "--shards", str(shards)]
    command += ["--budget", str(budget // MB), "--written", str(written // MB)]
    environment = {**os.environ, MEMORY_VARIABLE: str(budget)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(where: Path, shards: int, written: int) -> dict[str, int]:
    lance.write_dataset(_SCHEMA.empty_table(), str(where))
    table = lancewal.initialize(where, bucket=("id", shards))
    waiting = 0
    with table.writer(fsync=False, stats_log_interval=None, upkeep=True) as writer:
        # One row for each shard: their writers are open from here on.
        writer.put(_rows(0))
        gc.collect()
        before = resident()
        for number in range(1, written // (ROWS_PER_PUT * _ROW_BYTES) + 1):
            writer.put(_rows(number))
            waiting = max(waiting, row_memory.total)
            if number % 10 == 0:
                table.lookup([number * ROWS_PER_PUT], columns=["id"])
        opened = len(writer.shard_writers)
        return {
            "peak": peak() - before,
            "waiting": waiting,
            "limit": row_memory.limit,
            "shards": opened,
            "flushes": sum(len(each.generations) for each in table.shards()),
        }


def _rows(number: int) -> pa.Table:
    values = np.random.default_rng(number).random(ROWS_PER_PUT * DIMENSION, dtype=np.float32)
    return pa.table(
        {
            "id": pa.array(range(number * ROWS_PER_PUT, (number + 1) * ROWS_PER_PUT), pa.int64()),
            "v": pa.FixedSizeListArray.from_arrays(pa.array(values), DIMENSION),
        },
        schema=_SCHEMA,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.workloads.many_shards")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shards", type=int, default=500)
    parser.add_argument("--budget", type=int, default=512, help="MB, as the environment has it")
    parser.add_argument("--written", type=int, default=1536, help="MB")
    options = parser.parse_args()
    if MEMORY_VARIABLE in os.environ:
        print(json.dumps(run(options.directory, options.shards, options.written * MB)))
    else:
        print(
            json.dumps(measured(options.directory, options.shards, options.budget * MB, options.written * MB))
        )


if __name__ == "__main__":
    main()
