"""Where benchmarks write: a place that earlier deletions do not slow down.

ext4 keeps the inode of a deleted file unused for minutes, and whoever creates a file looks at all
such inodes in the block group of its directory. After a few thousand deletions near by (a test run,
or the pass before) a create takes 0.7 ms instead of 0.01 ms, on either side of a comparison.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CANDIDATES = 12
_TRIALS = 5

# Of linux/fs.h.
_GET_FLAGS = 0x80086601
_SET_FLAGS = 0x40086602
_TOP_DIRECTORY = 0x00020000


class Scratch:
    """A directory below the system's temporary one, and places in it that lie far from each other."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def new_place(self) -> Path:
        """An empty directory, in the quickest of several parts of the file system."""
        # Names are drawn: ext4 places a directory by its name.
        candidates = [Path(tempfile.mkdtemp(dir=self._root)) for _ in range(_CANDIDATES)]
        # What was created to try it out stays beside the place; to delete it would slow it down.
        place = min(candidates, key=_seconds_to_create) / "place"
        place.mkdir()
        return place


def _seconds_to_create(directory: Path) -> float:
    started = time.perf_counter()
    for number in range(_TRIALS):
        (directory / str(number)).touch()
    return time.perf_counter() - started


@contextmanager
def scratch_directory() -> Iterator[Scratch]:
    """Removed at the end with all it holds, and not before: deletions are what slows others down."""
    with tempfile.TemporaryDirectory(prefix="lancewal-bench-") as name:
        spread_subdirectories(Path(name))
        yield Scratch(Path(name))


def spread_subdirectories(directory: Path) -> None:
    """Have ext4 give each directory that is made in this one a block group of its own, if it can.

    Other file systems have no such flag, and most of them no such search either.
    """
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            flags = struct.unpack("l", fcntl.ioctl(file, _GET_FLAGS, bytes(struct.calcsize("l"))))[0]
            fcntl.ioctl(file, _SET_FLAGS, struct.pack("l", flags | _TOP_DIRECTORY))
    finally:
        os.close(file)
