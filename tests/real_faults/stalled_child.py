"""A writer in a process of its own, with clocks that a file sets, which notes what it has acknowledged.

Arguments: the table, the file of the clocks ("boot wall": seconds ahead of the true ones), and the journal.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any


def main(table: str, clocks: str, journal_path: str) -> None:
    real_gettime, real_time = time.clock_gettime, time.time

    def ahead(which: int) -> float:
        with open(clocks) as file:
            return float(file.read().split()[which])

    def gettime(clock: Any) -> float:
        return real_gettime(clock) + ahead(0)

    time.clock_gettime = gettime
    time.time = lambda: real_time() + ahead(1)

    # After the clocks are set: modules take them when they are imported.
    import lancewal
    from lancewal.errors import LanceWalError
    from tests.tables import rows

    writer = lancewal.open(table).writer(take_over="now")
    with open(journal_path, "a", buffering=1) as journal:
        number = 0
        while os.getppid() != 1:
            try:
                writer.put(rows(1_000_000 + number, 1))
            except LanceWalError as error:
                failed = getattr(error, "failed", {None: error})
                names = sorted({type(each).__name__ for each in failed.values()})
                journal.write("ended " + ",".join(names) + "\n")
                break
            journal.write(f"{number}\n")
            number += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
