"""Directories of SSTables that the manifest does not name: compacted ones, and dead attempts.

A flush publishes its SSTable only under the generation that the manifest expects next. So a
directory of that generation or a later one may yet be published, however old it is, and stays; one
of an earlier generation is dead, unless it belongs to a bulk load, which gets the time that
``Retention.orphans`` gives it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from functools import partial

from lancewal import layout
from lancewal.maintenance import points
from lancewal.maintenance.gc.context import ShardContext, numbered
from lancewal.maintenance.gc.retention import Resource
from lancewal.maintenance.pointers import pointed_sstables
from lancewal.objects import ObjectInfo
from lancewal.parallel import ordered_map
from lancewal.wal.tailer import WalTailer

logger = logging.getLogger(__name__)

_REMOTE_READERS = 16


def collect(shard: ShardContext, resources: frozenset[Resource]) -> None:
    """Delete directories of compacted generations, or of dead attempts, or both."""
    listed = {entry.path for entry in shard.manifest.sstables} - shard.pruned
    candidates = []
    for name in shard.store.list_directories(layout.shard_dir(shard.shard_id)):
        generation = layout.parse_sstable_name(name)
        if generation is not None and name not in listed and generation < shard.manifest.current_generation:
            candidates.append((generation, name))
    if not candidates:
        return
    published = _Published(shard)
    pointed = _pointed(shard)
    for generation, name in sorted(candidates):
        infos = shard.store.list(layout.sstable_dir(shard.shard_id, name))
        resource = _resource(shard, generation, name, infos, published)
        if resource is None or resource not in resources:
            continue
        reason = "a WAL entry points to it" if name in pointed else None
        if reason is None and resource is Resource.SSTABLES:
            reason = shard.needs.reason(
                shard.shard_id, generation, shard.retention.sstables, partial(_written_at, infos)
            )
        if reason is not None:
            shard.kept(resource, name, reason)
            continue
        if shard.dry_run or _delete(shard, name):
            shard.collected(resource, name, sum(info.size for info in infos))


def _written_at(infos: Sequence[ObjectInfo]) -> datetime | None:
    return min((info.modified for info in infos), default=None)


def _resource(
    shard: ShardContext, generation: int, name: str, infos: Sequence[ObjectInfo], published: _Published
) -> Resource | None:
    """What kind of garbage the directory is; ``None`` while it may be none."""
    compacted = generation <= shard.needs.marker(shard.shard_id)
    newest = max((info.modified for info in infos), default=datetime.min.replace(tzinfo=shard.now.tzinfo))
    if shard.is_old(newest, Resource.ORPHANS):
        return Resource.SSTABLES if compacted else Resource.ORPHANS
    return Resource.SSTABLES if compacted and name in published else None


class _Published:
    """Whether the manifest ever named an SSTable, as far as its retained versions tell."""

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard
        infos = numbered(shard.store.list(layout.manifest_dir(shard.shard_id)), layout.parse_manifest_name)
        self._unread = sorted(infos, reverse=True)
        self._names = set(shard.pruned)

    def __contains__(self, name: str) -> bool:
        while name not in self._names and self._unread:
            version = self._unread.pop(0)
            try:
                manifest = self._shard.manifests.read_version(version)
            except FileNotFoundError:
                continue
            self._names |= {entry.path for entry in manifest.sstables}
        return name in self._names


def _pointed(shard: ShardContext) -> set[str]:
    """The SSTables that retained WAL entries point to."""
    tailer = WalTailer(shard.store, shard.shard_id, update_cursor=False)
    positions = [p for p in shard.wal_infos if p not in shard.deleted_positions]
    workers = 1 if shard.store.is_local else _REMOTE_READERS
    pointed: set[str] = set()
    for position, header in zip(positions, ordered_map(tailer.read_header, positions, workers), strict=True):
        if header is not None and header.sentinel:
            entry = tailer.read_entry(position)
            if entry is not None:
                pointed |= set(pointed_sstables(entry))
    return pointed


def _delete(shard: ShardContext, name: str) -> bool:
    """Delete unless it was published since; its dataset's versions first, so that no half of it opens."""
    newest = shard.manifests.require_latest()
    if any(entry.path == name for entry in newest.sstables):
        return False
    directory = layout.sstable_dir(shard.shard_id, name)
    shard.store.delete_prefix(f"{directory}/_versions")
    points.reached("collect: an SSTable is half deleted")
    shard.store.delete_prefix(directory)
    points.reached("collect: an SSTable is deleted")
    return True
