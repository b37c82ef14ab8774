"""Making what Lance committed as durable as what we delete because of it."""

from __future__ import annotations

import ctypes
import os
import sys

from lancewal.errors import StorageError
from lancewal.objects import ObjectStore


def sync_file_system(store: ObjectStore) -> None:
    """Write all that the table's file system holds in memory to disk.

    Lance never syncs. Before anything is deleted that the base table holds by now, the base
    table's own files must survive a power cut. Does nothing on object storage, nor on a
    store that was opened without fsync.
    """
    root = store.local_path("_versions")
    if root is None or not store.fsync:
        return
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if sys.platform != "linux" or ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
                os.sync()
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        raise StorageError(f"cannot sync the file system of {store.uri}: {error}") from error
