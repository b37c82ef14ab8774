"""Temporary directories for files that are made on this machine first; those of killed processes are removed.

Each directory is locked while its block runs. The system releases the lock when the process dies, however it
dies.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PREFIX = "lancewal-scratch-"
# A young directory may not be locked yet, and would look abandoned.
_YOUNG_SECONDS = 60.0


@contextmanager
def scratch_directory() -> Iterator[str]:
    """A directory for temporary files, which is removed after the block."""
    _sweep(tempfile.gettempdir())
    place = tempfile.mkdtemp(prefix=_PREFIX)
    lock = None
    try:
        # Without a lock another process may remove the directory. The upload then fails visibly.
        with suppress(OSError):
            lock = _lock(place)
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _sweep(parent: str) -> None:
    """Remove the directories of killed processes. Failures are ignored: the caller needs only a new one."""
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    _remove_if_left(entry)


def _remove_if_left(entry: os.DirEntry[str]) -> None:
    status = entry.stat(follow_symlinks=False)
    if status.st_uid == os.getuid() and time.time() - status.st_mtime > _YOUNG_SECONDS:
        lock = _lock(entry.path)
        try:
            shutil.rmtree(entry.path, ignore_errors=True)
        finally:
            os.close(lock)


def _lock(place: str) -> int:
    """Lock a directory until the descriptor is closed; ``OSError`` if another process holds the lock."""
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(directory)
        raise
    return directory
