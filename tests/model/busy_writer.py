"""A process that writes to a table until it is killed, freezing and flushing all the time.

Run as ``python -m tests.model.busy_writer <table> <counter file>``. Put number ``n`` has
``put_size(n)`` rows; where the table has a key, one more that every put rewrites. The counter
file holds how many puts were acknowledged.
"""

from __future__ import annotations

import itertools
import mmap
import struct
import sys
import time
from pathlib import Path

import pyarrow as pa

import lancewal
from lancewal.maintenance import compact
from lancewal.storage import ObjectStore
from lancewal.table import Table

HOT = -1
_MAX_PUT_ROWS = 5
_COUNTER = struct.Struct("<Q")
_FREEZE_EVERY = 13
_COMPACT_EVERY = 150
_PAUSE_SECONDS = 0.001


def put_size(number: int) -> int:
    return 1 + number % _MAX_PUT_ROWS


def acknowledged(counter: Path) -> int:
    """How many puts were acknowledged so far."""
    return int(_COUNTER.unpack(counter.read_bytes())[0])


def make_counter(path: Path) -> Path:
    path.write_bytes(_COUNTER.pack(0))
    return path


def put_rows(number: int, *, keyed: bool) -> pa.Table:
    """The rows of one put: an id of their own, the put's number, and how many they are."""
    size = put_size(number)
    ids = [number * _MAX_PUT_ROWS + row for row in range(size)] + ([HOT] if keyed else [])
    return pa.table({"id": ids, "put": [number] * len(ids), "size": [size] * len(ids)})


def _write(table: Table, counter: mmap.mmap) -> None:
    keyed = bool(table.primary_key)
    with table.writer(max_memtable_rows=40) as writer:
        for number in itertools.count():
            writer.put(put_rows(number, keyed=keyed))
            # One aligned word: a reader sees the old or the new number.
            _COUNTER.pack_into(counter, 0, number + 1)
            if number % _FREEZE_EVERY == 0:
                for shard in writer.shard_writers.values():
                    shard.force_seal_active()
            if number % _COMPACT_EVERY == _COMPACT_EVERY - 1:
                compact(ObjectStore.from_uri(table.uri))
            time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    with open(sys.argv[2], "r+b") as file, mmap.mmap(file.fileno(), _COUNTER.size) as counter:
        _write(lancewal.open(sys.argv[1]), counter)
