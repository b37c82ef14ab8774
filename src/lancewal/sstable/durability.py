"""Files that Lance wrote, made as durable as those that we write."""

from __future__ import annotations

import os

from lancewal.errors import StorageError
from lancewal.objects import ObjectStore
from lancewal.parallel import ordered_map

_SYNCS_AT_ONCE = 8


def sync_directory(store: ObjectStore, directory: str) -> None:
    """Sync every file and directory from ``directory`` down, and the entry that names it.

    Lance never syncs, and a manifest that names an SSTable lets WAL entries be deleted:
    without this a power cut after the flush could lose acknowledged rows. Does nothing
    on object storage, nor on a store that was opened without fsync.
    """
    if not store.fsync:
        return
    root = store.local_path(directory)
    assert root is not None, "a local store has local paths"
    try:
        # Each sync waits for the disk; together they share the file system's journal commits.
        files, directories = _below(root)
        for paths in (files, [*directories, os.path.dirname(root)]):
            for _ in ordered_map(_sync, paths, min(_SYNCS_AT_ONCE, len(paths))):
                continue
    except OSError as error:
        raise StorageError(f"cannot sync the SSTable at {root!r}: {error}") from error


def _below(root: str) -> tuple[list[str], list[str]]:
    files: list[str] = []
    directories: list[str] = []
    for parent, _, names in os.walk(root):
        directories.append(parent)
        files += [f"{parent}/{name}" for name in names]
    return files, directories


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
