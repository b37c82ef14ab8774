"""One state of a table for all tasks of a query, small enough to travel with them.

The driver reads no rows: of each shard it notes the manifest and where the WAL ends, and
of the base table the version. Tasks open the same SSTables, WAL positions and fragments, whatever
is written, flushed or compacted meanwhile. The order of reading is that of ``lancewal.reader``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.errors import ConflictError, StorageError, WalTruncatedError
from lancewal.format.shard_manifest import ShardManifest
from lancewal.format.wal_entry import WalEntry
from lancewal.lineage import held_generation
from lancewal.manifest import ShardManifestStore
from lancewal.objects import ObjectStore
from lancewal.parallel import ordered_map
from lancewal.pointers import Pointer
from lancewal.reader.key_set import KeySet
from lancewal.reader.pruning import ShardIdentity
from lancewal.reader.snapshot import ShardReader, ShardSnapshot, ShardState
from lancewal.reader.tail import TailEntries
from lancewal.sharding import discover_shards
from lancewal.wal.tailer import WalTailer
from lancewal.wal.tip import find_tip, first_unsettled

logger = logging.getLogger(__name__)

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


def resolved_shard(store: ObjectStore, base: BaseTable, place: ShardPlace) -> ShardSnapshot:
    """The levels of one shard, with the rows of its WAL in memory."""
    manifest = place.manifest
    try:
        entries = tuple(_open_entries(store, place))
    except WalTruncatedError as error:
        raise StorageError(
            f"the query's state of shard {place.shard_id} is no longer there ({error}); run the query again, "
            "and collect garbage with a min_age above the duration of queries"
        ) from error
    state = ShardState(manifest, None, TailEntries(entries, place.wal_end))
    return ShardReader(store, place.shard_id).resolve(state, base)


def base_of(state: TableState, storage_options: Mapping[str, str]) -> BaseTable:
    """The base version of a state; kept, because every task of a query asks for it."""
    return _open_base(state.uri, state.version, frozenset(storage_options.items()))


def newer_than_base(
    state: TableState, places: tuple[ShardPlace, ...], storage_options: Mapping[str, str]
) -> KeySet:
    """The keys in all levels of ``places``, which hide rows of the base; kept for the next task."""
    return _newer_keys(state.uri, state.version, places, frozenset(storage_options.items()))


@lru_cache(maxsize=4)
def _open_base(uri: str, version: int, options: frozenset[tuple[str, str]]) -> BaseTable:
    return BaseTable.open(uri, dict(options), version=version)


@lru_cache(maxsize=2)
def _newer_keys(
    uri: str, version: int, places: tuple[ShardPlace, ...], options: frozenset[tuple[str, str]]
) -> KeySet:
    base = _open_base(uri, version, options)
    if not base.schema.primary_key:
        return KeySet.empty()
    store = ObjectStore.from_uri(uri, dict(options))
    # One shard at a time: the rows of its WAL are let go before the next one is read.
    return KeySet.union(
        KeySet.union(source.keys() for source in resolved_shard(store, base, place).sources)
        for place in places
    )


def _read_place(store: ObjectStore, shard_id: UUID, ends_before_pointers: bool) -> ShardPlace | None:
    manifests = ShardManifestStore(store, shard_id)
    manifest = manifests.read_latest()
    for _ in range(_ATTEMPTS):
        if manifest is None:
            return None
        end = find_tip(store, shard_id, manifest)
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


def _open_entries(store: ObjectStore, place: ShardPlace) -> Iterator[WalEntry]:
    """The entries whose rows no SSTable of the state holds."""
    positions, current = place.wal_range, place.manifest.current_generation
    for entry in WalTailer(store, place.shard_id, update_cursor=False).entries(
        positions.start, positions.stop
    ):
        flushed = entry.generation is not None and entry.generation < current
        if not entry.sentinel and not flushed:
            yield entry
