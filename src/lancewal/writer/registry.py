"""The shard writers of this process: readers here see live rows, and metrics what was written."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from uuid import UUID

from lancewal.forks import in_forked_child
from lancewal.writer.shard_writer import ShardWriter
from lancewal.writer.stats import WriteStats, WriteStatsSnapshot, added

_lock = threading.Lock()
_writers: weakref.WeakValueDictionary[tuple[str, UUID], ShardWriter] = weakref.WeakValueDictionary()

#: Writers that are gone keep their statistics until so many of them are added up.
_FOLD_AFTER = 64


@dataclass(frozen=True)
class _Opened:
    key: tuple[str, UUID]
    writer: weakref.ref[ShardWriter]
    stats: WriteStats


_opened: list[_Opened] = []
_of_the_gone: dict[tuple[str, UUID], WriteStatsSnapshot] = {}


def _start_empty() -> None:
    """A forked child has no writers; another thread may have held the lock when it was forked."""
    global _lock, _writers
    _lock = threading.Lock()
    _writers = weakref.WeakValueDictionary()
    _opened.clear()
    _of_the_gone.clear()


in_forked_child(_start_empty)


def register_writer(table_uri: str, writer: ShardWriter) -> None:
    """Make ``writer`` the live one of its shard; a newer claim replaces an older one."""
    with _lock:
        key = (_normal(table_uri), writer.shard_id)
        present = _writers.get(key)
        if present is None or present.epoch < writer.epoch:
            _writers[key] = writer


def count_writer(table_uri: str, writer: ShardWriter) -> None:
    """Have :func:`written` count this writer, of either mode, also when it is gone."""
    with _lock:
        _opened.append(
            _Opened((_normal(table_uri), writer.shard_id), weakref.ref(writer), writer.stats_handle)
        )
        if len(_opened) > _FOLD_AFTER:
            _fold()


def written() -> dict[tuple[str, UUID], WriteStatsSnapshot]:
    """By table and shard what all writers of this process did since it began; it only grows."""
    with _lock:
        _fold()
        total = dict(_of_the_gone)
        live = list(_opened)
    for each in live:
        total[each.key] = added(total.get(each.key), each.stats.snapshot())
    return total


def open_writers() -> dict[tuple[str, UUID], ShardWriter]:
    """By table and shard the writers that are open here, the newest of each shard."""
    with _lock:
        found = [(each.key, each.writer()) for each in _opened]
    return {key: writer for key, writer in found if writer is not None and not writer.closed}


def _fold() -> None:
    """Add up the statistics of writers that are gone. Requires the lock."""
    left = []
    for each in _opened:
        if each.writer() is None:
            _of_the_gone[each.key] = added(_of_the_gone.get(each.key), each.stats.snapshot())
        else:
            left.append(each)
    _opened[:] = left


def live_writer(table_uri: str, shard_id: UUID) -> ShardWriter | None:
    """The open MemTable-mode writer of a shard in this process, if there is one that can be read."""
    with _lock:
        writer = _writers.get((_normal(table_uri), shard_id))
    if writer is None or not writer.readable:
        return None
    return writer


def _normal(table_uri: str) -> str:
    return table_uri.rstrip("/")
