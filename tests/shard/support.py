"""What the tests of manifests and of the WAL share: a clock, rows, and a hand-made collector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import pyarrow as pa

from lancewal.format.shard_manifest import ShardManifest
from lancewal.shard import WalAppender, WalTailer
from lancewal.shard.log import retained_positions
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import ObjectStore, layout
from lancewal.storage.clock import MIN_DELETION_AGE, Clock, boot_time

SHARD = UUID("9d2f0b7e-58c1-4a7b-8f64-0f3d1c6a2b90")


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def stall(self) -> None:
        """As long as garbage collection needs to empty a slot."""
        self.advance(MIN_DELETION_AGE.total_seconds() + 1)


def doing(action: Callable[[], object]) -> Callable[[], None]:
    """``action`` for its effect alone."""

    def do() -> None:
        action()

    return do


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(values or (1,), pa.int64())})


def contents(store: ObjectStore) -> dict[str, bytes]:
    """Every object and its bytes, to show that nothing was written."""
    return {info.path: store.get(info.path) for info in store.list()}


def cover(manifests: ShardManifestStore, epoch: int, position: int) -> ShardManifest:
    """Move the replay cursor as a flush would."""

    def covered(manifest: ShardManifest) -> ShardManifest:
        return replace(
            manifest,
            replay_after_wal_entry_position=position,
            current_generation=manifest.current_generation + 1,
        )

    return manifests.commit_update(epoch, covered)


def collect_entries(store: ObjectStore, up_to: int, shard: UUID = SHARD) -> None:
    """Delete WAL entries as garbage collection does, from the oldest."""
    for position in retained_positions(store, shard):
        if position <= up_to:
            store.delete(layout.wal_entry(shard, position))


def collect_manifests(store: ObjectStore, up_to: int, shard: UUID = SHARD) -> None:
    for version in range(1, up_to + 1):
        store.delete(layout.manifest_file(shard, version))


def values(tailer: WalTailer, start: int | None = None, end: int | None = None) -> list[int]:
    """The ids of all rows in a range, in order."""
    return [
        value
        for entry in tailer.entries(start, end)
        for each in entry.batches
        for value in each.column("id").to_pylist()
    ]


def tailer_of(store: ObjectStore, shard: UUID = SHARD) -> WalTailer:
    return WalTailer(store, shard)


def appender_at(store: ObjectStore, epoch: int, clock: Clock = boot_time) -> WalAppender:
    """One more appender under an epoch that somebody claimed."""
    manifests = ShardManifestStore(store, SHARD, clock=clock)
    return WalAppender(store, manifests, epoch, manifests.require_latest(), clock)
