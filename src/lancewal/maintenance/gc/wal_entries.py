"""WAL entries whose rows are in SSTables.

In ascending order, so that what stays has no gap whenever the collection ends. The last entry
always stays, covered or not: Lance's own writers look there for the end of the WAL, and
would begin again at position 1, with their fence where no other writer meets it.
"""

from __future__ import annotations

from lancewal import layout
from lancewal.maintenance import points
from lancewal.maintenance.gc.context import ShardContext
from lancewal.maintenance.gc.looks import unseen
from lancewal.maintenance.gc.retention import Resource
from lancewal.transactions import Unsettled

_RESOURCE = Resource.WAL_ENTRIES


def collect(shard: ShardContext) -> None:
    doomed = _doomed(shard)
    if not doomed:
        return
    if not shard.dry_run:
        # A job that is run again finds its earlier run by these entries. Read after the listing.
        unsettled = Unsettled.read(shard.store)
        unsettled.preserve(shard.shard_id, positions=range(doomed[0], doomed[-1] + 1))
    for position in doomed:
        if not shard.dry_run:
            shard.store.delete(layout.wal_entry(shard.shard_id, position))
            points.reached("collect: a WAL entry is deleted")
        shard.deleted_positions.add(position)
        shard.collected(_RESOURCE, f"wal/{position}", shard.wal_infos[position].size)


def _doomed(shard: ShardContext) -> list[int]:
    """Covered positions that are old enough, ascending, without the last entry of the WAL."""
    infos = shard.wal_infos
    last_run = max(infos, default=0)
    while last_run - 1 in infos:
        last_run -= 1
    doomed = []
    age = shard.retention.least_age(_RESOURCE)
    seen = shard.looks.reach("covered", age)
    for position in list(infos)[:-1]:
        if position > shard.manifest.replay_after_wal_entry_position:
            break
        if shard.is_old(infos[position].modified, _RESOURCE):
            if position > seen:
                shard.kept(_RESOURCE, f"wal/{position}", unseen(shard.looks.age_of("covered", position), age))
                break
            doomed.append(position)
        elif position >= last_run:
            break
        # Below the last run lies what a stalled writer dropped into an emptied slot.
    return doomed
