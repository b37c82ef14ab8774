"""WAL entries whose rows are in SSTables.

In ascending order, so that what stays has no gap whenever the collection ends. The last entry
always stays, covered or not: Lance's own writers look there for the end of the WAL, and
would begin again at position 1, with their fence where no other writer meets it.
"""

from __future__ import annotations

from lancewal import layout
from lancewal.maintenance import points
from lancewal.maintenance.gc.context import ShardContext
from lancewal.maintenance.gc.retention import Resource

_RESOURCE = Resource.WAL_ENTRIES


def collect(shard: ShardContext) -> None:
    infos = shard.wal_infos
    covered = shard.manifest.replay_after_wal_entry_position
    last_run = max(infos, default=0)
    while last_run - 1 in infos:
        last_run -= 1
    for position in list(infos)[:-1]:
        if position > covered:
            break
        info = infos[position]
        if not shard.is_old(info.modified, _RESOURCE):
            if position < last_run:
                # What a stalled writer dropped into an emptied slot; nobody reads it.
                continue
            break
        if not shard.dry_run:
            shard.store.delete(layout.wal_entry(shard.shard_id, position))
            points.reached("collect: a WAL entry is deleted")
        shard.deleted_positions.add(position)
        shard.collected(_RESOURCE, f"wal/{position}", info.size)
