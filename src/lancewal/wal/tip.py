"""Where a shard's WAL begins and ends. Entries above the replay cursor have no gaps."""

from __future__ import annotations

from uuid import UUID

from lancewal import layout
from lancewal.format.shard_manifest import ShardManifest
from lancewal.objects import ObjectStore


def first_unsettled(manifest: ShardManifest | None) -> int:
    """The lowest position at which a tip may lie.

    Never below the replay cursor: an entry that landed there would not be replayed.
    """
    if manifest is None:
        return layout.FIRST_WAL_POSITION
    return max(manifest.replay_after_wal_entry_position + 1, layout.FIRST_WAL_POSITION)


def find_tip(store: ObjectStore, shard_id: UUID, manifest: ShardManifest | None) -> int:
    """The first free position at or above the replay cursor.

    The cursor hint is tried first; from there the search gallops and then halves, so
    a tail of n entries costs about 2·log2(n) HEAD requests however stale the hint is.
    """

    def taken(position: int) -> bool:
        return store.head(layout.wal_entry(shard_id, position)) is not None

    low = first_unsettled(manifest)
    hint = manifest.wal_entry_position_last_seen if manifest else 0
    if hint >= low and taken(hint):
        low = hint + 1
    step = 1
    while taken(low + step - 1):
        low, step = low + step, step * 2
    # low is the lowest candidate, low + step - 1 is free: halve what lies between.
    high = low + step - 1
    while low < high:
        middle = (low + high) // 2
        if taken(middle):
            low = middle + 1
        else:
            high = middle
    return low


def retained_positions(store: ObjectStore, shard_id: UUID) -> list[int]:
    """Every position that has an entry, ascending, by listing."""
    names = (info.path.rsplit("/", 1)[-1] for info in store.list(layout.wal_dir(shard_id)))
    found = (layout.parse_wal_name(name) for name in names)
    return sorted(
        position for position in found if position is not None and position >= layout.FIRST_WAL_POSITION
    )


def first_readable(store: ObjectStore, shard_id: UUID, manifest: ShardManifest | None) -> int:
    """The first position from which entries can be read up to the tip without a gap.

    ``manifest`` must have been read before this call: what it covers existed by then, so
    what the listing lacks of it was collected. A stalled writer may have dropped an entry
    into a collected slot far below; it belongs to no run that a reader could follow.
    """
    unsettled = first_unsettled(manifest)
    positions = retained_positions(store, shard_id)
    if not positions or positions[-1] < unsettled - 1:
        return unsettled
    listed = set(positions)
    first = positions[-1]
    # A listing is no snapshot: an entry that came while it ran may be missing although a
    # later one is there. So a gap counts only once it was looked at.
    while first > layout.FIRST_WAL_POSITION and (
        first - 1 in listed or store.head(layout.wal_entry(shard_id, first - 1)) is not None
    ):
        first -= 1
    return first
