"""How many shards are flushed at a time: as many as their logs leave room for.

Whoever publishes flushes the logs of its shards, and that may be the driver of a cluster, whose
memory must not depend on what its cluster writes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from lancewal import layout
from lancewal.manifest import ShardManifestStore
from lancewal.objects import ObjectStore
from lancewal.parallel import Room
from lancewal.wal.tip import find_tip, first_unsettled

#: Logs that are flushed at a time, but for a single one that is larger.
ROOM_BYTES = 16 << 20
#: Longer logs are not measured: they get the room for themselves.
_FEW_ENTRIES = 16


class DrainRoom:
    """Lets threads in one by one while their logs together are larger than the room."""

    def __init__(self, store: ObjectStore, room_bytes: int = ROOM_BYTES) -> None:
        self._store = store
        self._room_bytes = room_bytes
        self._room = Room(room_bytes)

    @contextmanager
    def for_log_of(self, shard_id: UUID) -> Iterator[None]:
        drain = threading.Lock()
        try:
            with drain:
                self._room.enter(drain, unflushed_bytes(self._store, shard_id, self._room_bytes))
                yield
        finally:
            self._room.leave(drain)


def unflushed_bytes(store: ObjectStore, shard_id: UUID, many: int) -> int:
    """The size of the entries that no SSTable covers; ``many`` when there are more than a few."""
    manifest = ShardManifestStore(store, shard_id).read_latest()
    if manifest is None:
        return 0
    positions = range(first_unsettled(manifest), find_tip(store, shard_id, manifest))
    if len(positions) > _FEW_ENTRIES:
        return many
    found = (store.head(layout.wal_entry(shard_id, position)) for position in positions)
    return sum(info.size for info in found if info is not None)
