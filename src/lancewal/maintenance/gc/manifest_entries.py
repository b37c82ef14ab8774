"""Entries of compacted generations in a shard's manifest."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from lancewal import layout
from lancewal.format.shard_manifest import ShardManifest, SsTableEntry
from lancewal.lineage import copy_of
from lancewal.maintenance import points
from lancewal.maintenance.gc.context import ShardContext
from lancewal.maintenance.gc.retention import Resource
from lancewal.transactions import Unsettled

_RESOURCE = Resource.MANIFEST_ENTRIES


def collect(shard: ShardContext) -> None:
    """Prune what the base table holds; at the writer's own epoch, which stays as it is."""
    compacted = [entry for entry in shard.manifest.sstables if entry.generation <= shard.marker]
    prunable = [
        entry for entry in compacted if not _came_along(shard, entry) and not _is_needed(shard, entry)
    ]
    if not prunable:
        return
    shard.pruned = {entry.path: entry.generation for entry in prunable}
    if not shard.dry_run:
        # A job that is run again finds its earlier run by these entries.
        Unsettled.read(shard.store).preserve(shard.shard_id, sstables=shard.pruned.keys())
        gone = {(entry.generation, entry.path) for entry in prunable}

        def pruned(manifest: ShardManifest) -> ShardManifest:
            rest = tuple(e for e in manifest.sstables if (e.generation, e.path) not in gone)
            return manifest if len(rest) == len(manifest.sstables) else replace(manifest, sstables=rest)

        shard.manifest = shard.manifests.commit_update(None, pruned)
        points.reached("collect: manifest entries are pruned")
    for entry in prunable:
        shard.collected(_RESOURCE, entry.path)


def _came_along(shard: ShardContext, entry: SsTableEntry) -> bool:
    """Whether the entry is below the marker that a copied table began with: that says nothing of it."""
    copy = copy_of(shard.store)
    if copy is None or entry.generation > copy.markers.get(shard.shard_id, 0):
        return False
    shard.kept(_RESOURCE, entry.path, "the table is a copy, and the marker that came along is not about it")
    return True


def _is_needed(shard: ShardContext, entry: SsTableEntry) -> bool:
    reason = shard.needs.reason(
        shard.shard_id,
        entry.generation,
        shard.retention.manifest_entries,
        lambda: written_at(shard, entry.path),
    )
    if reason is not None:
        shard.kept(_RESOURCE, entry.path, reason)
    return reason is not None


def written_at(shard: ShardContext, path: str) -> datetime | None:
    """When the first file of an SSTable was written; ``None`` when there is none."""
    infos = shard.store.list(layout.sstable_dir(shard.shard_id, path))
    return min((info.modified for info in infos), default=None)
