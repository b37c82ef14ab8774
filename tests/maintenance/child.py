"""What the children of :mod:`tests.maintenance.arena` do: maintenance without end, or until a point."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from lancewal.base import BaseTable
from lancewal.errors import ConflictError, PartialWriteError
from lancewal.maintenance import Retention, at_crash_points, collect_garbage, compact
from lancewal.storage import ObjectStore
from lancewal.upkeep import Upkeep
from tests.maintenance.arena import ALL_DUE, ages


def main() -> None:
    settings = json.loads(sys.argv[1])
    store = ObjectStore.from_uri(settings["uri"], fsync=False)
    retention = Retention(**ages(settings["ages"]), allow_unsafe=True)
    if settings["die_at"] is not None:
        at_crash_points(lambda point: _die(point, settings["die_at"], settings["reached"]))
    upkeep = Upkeep.here(store, lambda: BaseTable.open(store.uri, store=store))
    print("ready", flush=True)
    if settings["waits"]:
        sys.stdin.readline()
    while True:
        for job in settings["jobs"]:
            if job == "compact":
                _compact(store, settings["max_commit_bytes"])
            elif job == "upkeep":
                _keep_up(upkeep)
            else:
                collect_garbage(store, retention=retention)
        # Leaves the other processes of the test some of the machine.
        time.sleep(0.02)


def _compact(store: ObjectStore, max_commit_bytes: int) -> None:
    try:
        compact(store, max_commit_bytes=max_commit_bytes)
    except PartialWriteError as error:
        # Losing every race is allowed where others compact the same table all the time.
        if not all(isinstance(each, ConflictError) for each in error.failed.values()):
            raise


def _keep_up(upkeep: Upkeep) -> None:
    for outcome in upkeep.round(ALL_DUE).outcomes:
        for error in outcome.failed.values():
            # Files that cannot be joined, and races that were lost to the others, are left for later.
            assert isinstance(error, ConflictError) or "Lance found no files" in str(error), error


def _die(point: str, at: str, reached: str) -> None:
    if point == at:
        Path(reached).write_text(point)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
