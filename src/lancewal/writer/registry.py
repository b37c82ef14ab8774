"""The shard writers that are open in this process, so that readers here see live rows."""

from __future__ import annotations

import threading
import weakref
from uuid import UUID

from lancewal.writer.shard_writer import ShardWriter

_lock = threading.Lock()
_writers: weakref.WeakValueDictionary[tuple[str, UUID], ShardWriter] = weakref.WeakValueDictionary()


def register_writer(table_uri: str, writer: ShardWriter) -> None:
    """Make ``writer`` the live one of its shard; a newer claim replaces an older one."""
    with _lock:
        key = (_normal(table_uri), writer.shard_id)
        present = _writers.get(key)
        if present is None or present.epoch < writer.epoch:
            _writers[key] = writer


def live_writer(table_uri: str, shard_id: UUID) -> ShardWriter | None:
    """The open MemTable-mode writer of a shard in this process, if there is one that can be read."""
    with _lock:
        writer = _writers.get((_normal(table_uri), shard_id))
    if writer is None or not writer.readable:
        return None
    return writer


def _normal(table_uri: str) -> str:
    return table_uri.rstrip("/")
