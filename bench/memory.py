"""Peak memory of one writer, measured in a process of its own: ``python -m bench.memory SIDE URI COUNT``."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import lance

from bench.tables import peer_writer, vector_batches
from lancewal.base.table import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.writer import open_shard_writer


def peak_growth(side: str, uri: str, count: int) -> int:
    """Bytes by which ``count`` puts of 1000 rows × 128-d raise a fresh process's peak memory."""
    command = [sys.executable, "-m", "bench.memory", side, uri, str(count)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def peak() -> int:
    # Not ru_maxrss: a process takes over that of the one which started it.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _main(side: str, uri: str, count: int) -> int:
    base = BaseTable.open(uri)
    warm_up = vector_batches(1, rows=1000, dimension=128)
    if side == "ours":
        ours = open_shard_writer(base, uuid4(), ShardWriterConfig(fsync=False), indexes=())
        put = ours.put
    else:
        peer = peer_writer(lance.dataset(base.uri))
        put = peer.put
    put(warm_up[0])
    gc.collect()
    before = resident()
    for index in range(1, count + 1):
        # Made one at a time: what the writer does not keep is gone before the next.
        put(vector_batches(1, rows=1000, dimension=128, first_id=index * 1000)[0])
    return peak() - before


if __name__ == "__main__":
    print(_main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
