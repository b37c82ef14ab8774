"""A process of a service that shares a table: puts one row after the other and notes each that returned."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pyarrow as pa

import lancewal


def main(uri: str, directory: str, notes: str, first: int) -> None:
    """Puts ids from ``first`` on until there is a file ``stop``; notes when each put began, and its time."""
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
            writer.put(pa.table({"id": [number], "name": [str(number)]}))
            acknowledged.write(f"done {number} {began:.3f} {time.monotonic() - began:.3f}\n")
            acknowledged.flush()


if __name__ == "__main__":
    uri, directory, notes, first = sys.argv[1:]
    main(uri, directory, notes, int(first))
