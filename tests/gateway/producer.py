"""A process of a service that shares a table: puts one row after the other and notes each that returned.

All processes write the same few ids; the name of a row is the number of its put, which no other one has.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pyarrow as pa

import lancewal

#: Few, so that every producer writes each of them again and again.
IDS = 50


def main(uri: str, directory: str, notes: str, first: int) -> None:
    """Puts with numbers from ``first`` on until there is a file ``stop``; notes when each began and ended."""
    stop = Path(directory) / "stop"
    with (
        lancewal.share(uri, directory=directory, timeout=60, fsync=False) as shared,
        shared.writer() as writer,
        Path(notes).open("a") as acknowledged,
    ):
        number = first
        while not stop.exists():
            number += 1
            began = time.monotonic()
            # Noted first: a process that is killed leaves the outcome of its last put open.
            acknowledged.write(f"try {number}\n")
            acknowledged.flush()
            writer.put(pa.table({"id": [number % IDS], "name": [str(number)]}))
            acknowledged.write(f"done {number} {began:.6f} {time.monotonic():.6f}\n")
            acknowledged.flush()


if __name__ == "__main__":
    uri, directory, notes, first = sys.argv[1:]
    main(uri, directory, notes, int(first))
