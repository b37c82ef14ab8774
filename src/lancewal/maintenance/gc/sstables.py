"""Directories of SSTables that the manifest does not name: compacted ones, and dead attempts.

A flush publishes its SSTable only under the generation that the manifest expects next. So a
directory of that generation or a later one may yet be published, however old it is, and stays; one
of an earlier generation is dead. A bulk load gives its directories numbers beyond all generations
and publishes them under the next ones; those that it did not publish are dead after the time that
it has for it (``lancewal.staging``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial

from lancewal import layout
from lancewal.maintenance import points
from lancewal.maintenance.gc.context import ShardContext, numbered
from lancewal.maintenance.gc.retention import Resource
from lancewal.objects import ObjectInfo
from lancewal.parallel import ordered_map
from lancewal.pointers import Pointer
from lancewal.staging import STAGED_DELETION_AGE, is_staged
from lancewal.wal.tailer import WalTailer

logger = logging.getLogger(__name__)

_REMOTE_READERS = 16


def collect(shard: ShardContext, resources: frozenset[Resource]) -> None:
    """Delete directories of compacted generations, or of dead attempts, or both."""
    listed = {entry.path for entry in shard.manifest.sstables} - shard.pruned.keys()
    past = _Past(shard)
    directories = [
        _Directory(shard, name, past)
        for name in shard.store.list_directories(layout.shard_dir(shard.shard_id))
        if name not in listed and layout.parse_sstable_name(name) is not None
    ]
    garbage = [each for each in directories if each.resource in resources]
    if not garbage:
        return
    pointed = _pointed(shard)
    for each in garbage:
        assert each.resource is not None
        reason = "a WAL entry points to it" if each.name in pointed else each.need
        if reason is not None:
            shard.kept(each.resource, each.name, reason)
        elif shard.dry_run or _delete(shard, each.name):
            shard.collected(each.resource, each.name, sum(info.size for info in each.infos))


class _Past:
    """The generations of SSTables that the manifest once named, as far as its retained versions tell."""

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard
        self._known = dict(shard.pruned)

    @cached_property
    def _unread(self) -> list[int]:
        infos = self._shard.store.list(layout.manifest_dir(self._shard.shard_id))
        return list(numbered(infos, layout.parse_manifest_name))

    def generation(self, name: str) -> int | None:
        """Newest version first, and only as many as it takes."""
        while name not in self._known and self._unread:
            try:
                manifest = self._shard.manifests.read_version(self._unread.pop())
            except FileNotFoundError:
                continue
            self._known.update({entry.path: entry.generation for entry in manifest.sstables})
        return self._known.get(name)


@dataclass(frozen=True)
class _Directory:
    """One directory that the newest manifest does not name."""

    shard: ShardContext
    name: str
    past: _Past

    @cached_property
    def infos(self) -> Sequence[ObjectInfo]:
        return self.shard.store.list(layout.sstable_dir(self.shard.shard_id, self.name))

    @cached_property
    def resource(self) -> Resource | None:
        """What kind of garbage it is; ``None`` while it may be none."""
        number = layout.parse_sstable_name(self.name)
        assert number is not None
        if is_staged(self.name):
            if self.past.generation(self.name) is not None:
                return Resource.SSTABLES
            return Resource.ORPHANS if self._is_abandoned else None
        if number >= self.shard.manifest.current_generation:
            return None
        if number > self._marker:
            return Resource.ORPHANS if self._is_abandoned else None
        if self._is_abandoned or self.past.generation(self.name) is not None:
            return Resource.SSTABLES
        return None

    @property
    def need(self) -> str | None:
        """Why it has to stay although it is garbage."""
        if self.resource is Resource.ORPHANS and not is_staged(self.name):
            return None
        # The name tells the generation only where nobody gave it another one since. Of a bulk load
        # whose manifest is gone nobody knows it: the newest one that is compacted has to be free.
        generation = self.past.generation(self.name)
        if generation is None and not is_staged(self.name):
            generation = layout.parse_sstable_name(self.name)
        return self.shard.needs.reason(
            self.shard.shard_id,
            self._marker if generation is None else generation,
            self.shard.retention.sstables,
            partial(_first, self.infos),
        )

    @property
    def _marker(self) -> int:
        return self.shard.marker

    @property
    def _is_abandoned(self) -> bool:
        """Whether nobody can be at work on it any more."""
        newest = max((info.modified for info in self.infos), default=None)
        if newest is None:
            return True
        if is_staged(self.name) and not self.shard.retention.allow_unsafe:
            return self.shard.now - newest >= max(STAGED_DELETION_AGE, self.shard.retention.orphans)
        return self.shard.is_old(newest, Resource.ORPHANS)


def _first(infos: Sequence[ObjectInfo]) -> datetime | None:
    return min((info.modified for info in infos), default=None)


def _pointed(shard: ShardContext) -> set[str]:
    """The SSTables that retained WAL entries point to."""
    tailer = WalTailer(shard.store, shard.shard_id, update_cursor=False)
    positions = [p for p in shard.wal_infos if p not in shard.deleted_positions]
    workers = 1 if shard.store.is_local else _REMOTE_READERS
    pointed: set[str] = set()
    for position, header in zip(positions, ordered_map(tailer.read_header, positions, workers), strict=True):
        entry = tailer.read_entry(position) if header is not None and header.sentinel else None
        pointer = None if entry is None else Pointer.of(entry)
        if pointer is not None:
            pointed |= set(pointer.sstables)
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
