"""Writes with one of the two libraries and kills itself. Run by ``test_alternation``."""

from __future__ import annotations

import json
import os
import signal
import sys


def main() -> None:
    import lance
    import pyarrow as pa

    from lancewal.base.table import BaseTable
    from lancewal.config import ShardWriterConfig
    from lancewal.writer import open_shard_writer

    order = json.load(sys.stdin)
    dataset = lance.dataset(order["uri"])
    ours = order["library"] == "lancewal"
    if ours:
        config = ShardWriterConfig(fsync=False, max_memtable_rows=4)
        writer = open_shard_writer(BaseTable.open(order["uri"]), order["shard"], config, indexes=())
    else:
        writer = dataset.mem_wal_writer(order["shard"], max_wal_flush_interval_ms=1, max_memtable_size=500)
    keys = pa.schema([dataset.schema.field(name) for name in order["key"]])
    for kind, rows in order["operations"]:
        if kind == "put":
            writer.put(pa.Table.from_pylist(rows, schema=dataset.schema))
        elif kind == "delete":
            writer.delete(pa.Table.from_pylist(rows, schema=keys))
        elif ours:
            writer.force_seal_active()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
