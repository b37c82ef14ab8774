"""One state of a table as data: what to open to read the same rows again, later or elsewhere.

Of each shard it has the manifest and where the WAL ended, and of the base table the version. The order
of reading is that of ``lancewal.reader.snapshot``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.errors import ConflictError
from lancewal.format.shard_manifest import ShardManifest
from lancewal.lineage import held_generation
from lancewal.manifest import ShardManifestStore
from lancewal.objects import ObjectStore
from lancewal.parallel import ordered_map
from lancewal.pointers import Pointer
from lancewal.reader.pruning import ShardIdentity
from lancewal.sharding import discover_shards
from lancewal.wal.tailer import WalTailer
from lancewal.wal.tip import established_tip, first_unsettled

#: Each attempt fails only when a flush or a compaction got in between.
_ATTEMPTS = 32
_REMOTE_READERS = 16


@dataclass(frozen=True)
class ShardPlace:
    """One shard of the state: its manifest, and where its WAL ended."""

    manifest: ShardManifest
    wal_end: int

    @property
    def shard_id(self) -> UUID:
        return self.manifest.shard_id

    @property
    def identity(self) -> ShardIdentity:
        return ShardIdentity.of(self.manifest)

    @property
    def wal_range(self) -> range:
        return range(first_unsettled(self.manifest), self.wal_end)


@dataclass(frozen=True)
class TableState:
    """A state of the table. Equal ones have equal rows."""

    uri: str
    version: int
    shards: tuple[ShardPlace, ...]

    def positions(self) -> dict[UUID, int]:
        """The place in the change feed from which on nothing is part of this state."""
        return {place.shard_id: place.wal_end for place in self.shards}


def read_state(store: ObjectStore, *, ends_before_pointers: bool = False) -> TableState:
    """The newest state of the table.

    ``ends_before_pointers`` is for a change feed that goes on from it: rows that a pointer
    in the WAL stands for are not part of the state, so it ends before the first one.
    """
    workers = 1 if store.is_local else _REMOTE_READERS

    def read(shard_id: UUID) -> ShardPlace | None:
        return _read_place(store, shard_id, ends_before_pointers)

    for _ in range(_ATTEMPTS):
        places = [p for p in ordered_map(read, discover_shards(store), workers) if p is not None]
        # Last: a marker that has passed a shard's generation means that the shard was read too early.
        base = BaseTable.open(store.uri, store.storage_options, store=store)
        if all(held_generation(base, store, p.manifest) < p.manifest.current_generation for p in places):
            return TableState(store.uri, base.version, tuple(places))
    raise ConflictError(f"the table at {store.uri} was compacted {_ATTEMPTS} times while its state was read")


def _read_place(store: ObjectStore, shard_id: UUID, ends_before_pointers: bool) -> ShardPlace | None:
    manifests = ShardManifestStore(store, shard_id)
    manifest = manifests.read_latest()
    for _ in range(_ATTEMPTS):
        if manifest is None:
            return None
        end = established_tip(store, shard_id, manifest)
        newest = manifests.require_latest()
        if _same_rows(manifest, newest):
            place = ShardPlace(manifest, end)
            return _before_pointer(store, place) if ends_before_pointers else place
        # Flushed or published meanwhile: what the first manifest lacks may be in SSTables alone.
        manifest = newest
    raise ConflictError(f"shard {shard_id} was flushed {_ATTEMPTS} times while its state was read")


def _same_rows(one: ShardManifest, other: ShardManifest) -> bool:
    def rows(m: ShardManifest) -> tuple[int, int]:
        return m.current_generation, m.replay_after_wal_entry_position

    return rows(one) == rows(other)


def _before_pointer(store: ObjectStore, place: ShardPlace) -> ShardPlace:
    tailer = WalTailer(store, place.shard_id, update_cursor=False)
    positions = place.wal_range
    for position, header in zip(positions, tailer.headers(positions.start, positions.stop), strict=True):
        entry = tailer.read_entry(position) if header is None or header.sentinel else None
        if entry is not None and Pointer.of(entry) is not None:
            return replace(place, wal_end=position)
    return place
