"""What a table's shards look like from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from uuid import UUID

from lancewal.format.index_details import MemWalDetails
from lancewal.format.shard_manifest import ShardManifest, ShardStatus
from lancewal.objects import ObjectStore
from lancewal.parallel import ordered_map
from lancewal.sharding import decoded_values, discover_manifests
from lancewal.wal.tip import find_tip, first_unsettled

#: Shards looked at together where each look is several network round trips.
_REMOTE_LOOKS = 16


@dataclass(frozen=True)
class ShardInfo:
    """The state of one shard at one moment.

    ``values`` are its sharding values by field ("bucket" for all specs that Lance makes);
    empty for a shard of null values or one made by hand. ``generations`` are the SSTables
    that the manifest lists, ``compacted_generation`` is the newest one whose rows the base
    table holds (0: none). ``wal_tip`` is the position that the next WAL entry takes, and
    ``tail_length`` the number of entries that no SSTable covers, sentinels included.
    """

    shard_id: UUID
    spec_id: int
    values: Mapping[str, bool | int | str]
    status: ShardStatus
    epoch: int
    current_generation: int
    generations: tuple[int, ...]
    compacted_generation: int
    wal_tip: int
    tail_length: int


def shard_infos(store: ObjectStore, read_details: Callable[[], MemWalDetails]) -> list[ShardInfo]:
    """Every shard with its state, sorted by id."""
    manifests = discover_manifests(store)
    tips = list(
        ordered_map(
            lambda manifest: find_tip(store, manifest.shard_id, manifest),
            manifests,
            1 if store.is_local else _REMOTE_LOOKS,
        )
    )
    # Last, as readers do: what was pruned from a manifest by then is marked as compacted.
    details = read_details()
    return [_info(details, manifest, tip) for manifest, tip in zip(manifests, tips, strict=True)]


def _info(details: MemWalDetails, manifest: ShardManifest, tip: int) -> ShardInfo:
    return ShardInfo(
        shard_id=manifest.shard_id,
        spec_id=manifest.shard_spec_id,
        values=decoded_values(details, manifest),
        status=manifest.status,
        epoch=manifest.writer_epoch,
        current_generation=manifest.current_generation,
        generations=tuple(entry.generation for entry in manifest.sstables),
        compacted_generation=details.compacted.get(manifest.shard_id, 0),
        wal_tip=tip,
        tail_length=tip - first_unsettled(manifest),
    )
