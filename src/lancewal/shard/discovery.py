"""Finds a table's shards: lists their directories, and reads the manifests in them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from uuid import UUID

from lancewal.base import BaseTable, appended_generations
from lancewal.format import ShardManifest, ShardStatus
from lancewal.shard.manifest import ShardManifestStore
from lancewal.shard.tail import has_unflushed_rows
from lancewal.storage import ObjectInfo, ObjectStore, both, layout, ordered_map

logger = logging.getLogger(__name__)

#: How many manifests are read at a time on a remote store, where each read is a network round trip.
_REMOTE_READERS = 64


def discover_shards(store: ObjectStore) -> list[UUID]:
    """The ids of the table's shards, by listing, sorted; see :func:`discover_manifests`."""
    return [manifest.shard_id for manifest in discover_manifests(store)]


def discover_manifests(store: ObjectStore, likely: Sequence[UUID] = ()) -> list[ShardManifest]:
    """The newest manifest of every shard, sorted by shard id.

    A directory whose name is no shard id, or that has no manifest (a writer is just creating it, or
    died doing so), is skipped with a warning. It holds no acknowledged rows.
    On a remote store, the manifests of the ``likely`` shards are read while the shards are listed.
    """
    likely = () if store.is_local else likely[:_REMOTE_READERS]
    shard_ids, early = both(
        partial(listed_shards, store), partial(read_manifests, store, likely), at_once=bool(likely)
    )
    found = dict(zip(likely, early, strict=True))
    others = [shard_id for shard_id in shard_ids if found.get(shard_id) is None]
    found |= zip(others, read_manifests(store, others), strict=True)
    manifests = []
    for shard_id in shard_ids:
        manifest = found[shard_id]
        if manifest is None:
            _warn_once(store.uri, str(shard_id), "it has no manifest")
        else:
            manifests.append(manifest)
    return manifests


def listed_shards(store: ObjectStore) -> list[UUID]:
    """The shard ids of all directories named like a shard, sorted; some may have no manifest."""
    shard_ids = []
    for name in store.list_directories(layout.MEM_WAL_DIR):
        shard_id = layout.parse_shard_dir(name)
        if shard_id is not None:
            shard_ids.append(shard_id)
        elif name != layout.OWN_DIR.rpartition("/")[2]:
            _warn_once(store.uri, name, "its name is no shard id")
    return shard_ids


def shard_files(store: ObjectStore, shard_id: UUID) -> list[ObjectInfo]:
    """All files of a shard. Raises if its log is a symbolic link: the listing has only the link itself."""
    infos, log = store.list(layout.shard_dir(shard_id)), layout.wal_dir(shard_id)
    if any(info.path == log for info in infos):
        store.list(log)
    return infos


def read_manifests(store: ObjectStore, shard_ids: Sequence[UUID]) -> list[ShardManifest | None]:
    """The newest manifest of each shard, several at a time on a remote store."""

    def read(shard_id: UUID) -> ShardManifest | None:
        return ShardManifestStore(store, shard_id).read_latest()

    return list(ordered_map(read, shard_ids, 1 if store.is_local else _REMOTE_READERS))


@functools.lru_cache(maxsize=4096)
def _warn_once(table_uri: str, name: str, why: str) -> None:
    """Warn once per process and directory, because readers list with every query."""
    logger.warning("skipped %s: %s", layout.child_uri(table_uri, f"{layout.MEM_WAL_DIR}/{name}"), why)


class PresentShards:
    """A table's shards from one listing; manifests are read on request."""

    def __init__(self, base: BaseTable, store: ObjectStore, listed: Iterable[UUID] | None = None) -> None:
        self._store = store
        self._markers = appended_generations(base)
        self.ids = frozenset(listed_shards(store) if listed is None else listed)

    def manifests(self, shard_ids: Iterable[UUID]) -> list[ShardManifest]:
        """The newest manifests of the given shards that exist."""
        known = [shard_id for shard_id in shard_ids if shard_id in self.ids]
        return [manifest for manifest in read_manifests(self._store, known) if manifest is not None]

    def is_retired(self, manifest: ShardManifest) -> bool:
        """Whether a shard is sealed and the base table has all its rows."""
        return is_retired(self._store, manifest, self._markers.get(manifest.shard_id, 0))


def is_retired(store: ObjectStore, manifest: ShardManifest, compacted: int) -> bool:
    """Whether a shard is sealed and the base table has all its rows.

    ``compacted`` is the last generation of the shard that the base table has.
    """
    return (
        manifest.status is ShardStatus.SEALED
        and compacted >= manifest.current_generation - 1
        and not has_unflushed_rows(manifest, store)
    )
