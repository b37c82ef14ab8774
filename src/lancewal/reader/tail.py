"""What a shard's WAL holds beyond its SSTables, for readers without the writer's help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import pyarrow as pa

from lancewal.errors import WalTruncatedError
from lancewal.format.align import align
from lancewal.format.schema import TableSchema
from lancewal.format.shard_manifest import ShardManifest
from lancewal.format.wal_entry import WalEntry
from lancewal.index.store import IndexStore
from lancewal.manifest import ShardManifestStore
from lancewal.memtable import MemTableView
from lancewal.objects import ObjectStore
from lancewal.reader.restart import SnapshotMovedError
from lancewal.wal.tailer import WalTailer
from lancewal.wal.tip import WatchedTip, first_unsettled

#: A longer tail is read anew each time instead of being kept in memory.
MAX_KEPT_BYTES = 256 << 20


@dataclass(frozen=True)
class TailEntries:
    """Entries with rows that no SSTable holds, oldest first; all below ``end`` are among them."""

    entries: tuple[WalEntry, ...]
    end: int

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)


@dataclass(frozen=True)
class _Group:
    """The rows of one generation so far, as ``schema``."""

    schema: TableSchema
    generation: int
    first_position: int
    entries: int
    batches: list[pa.RecordBatch]
    indexes: IndexStore


class ShardTail:
    """The tail of one shard; decoded entries and key indexes are kept from read to read.

    Safe from any thread: what is kept is replaced as a whole and never changed.
    """

    def __init__(self, store: ObjectStore, shard_id: UUID, manifests: ShardManifestStore) -> None:
        self._store = store
        self._shard_id = shard_id
        self._manifests = manifests
        self._tailer = WalTailer(store, shard_id, update_cursor=False)
        self._tip = WatchedTip(store, shard_id)
        self._kept = TailEntries((), 0)
        self._groups: tuple[_Group, ...] = ()

    def read(self, manifest: ShardManifest) -> TailEntries:
        """The entries that ``manifest``, just read, does not cover.

        Entries vanish when they are covered and collected meanwhile, and then the end of the
        WAL seems to lie where they began. So the end is believed only when a manifest that
        is read after it was found still leaves it uncovered; otherwise this raises
        :class:`SnapshotMovedError`.
        """
        start = first_unsettled(manifest)
        kept = self._kept
        if kept.end < start:
            kept = TailEntries((), start)
        entries = [entry for entry in kept.entries if entry.position >= start and _is_open(entry, manifest)]
        end = max(self._tip.find(manifest), kept.end)
        try:
            for entry in self._tailer.entries(kept.end, end):
                if not entry.sentinel and _is_open(entry, manifest):
                    entries.append(entry)
        except WalTruncatedError as error:
            raise SnapshotMovedError(str(error)) from error
        newest = self._manifests.read_latest()
        if newest is not None and newest.replay_after_wal_entry_position >= end:
            raise SnapshotMovedError(
                f"WAL entry {end} of shard {self._shard_id} was flushed while the tail was read"
            )
        tail = TailEntries(tuple(entries), end)
        self._kept = tail if tail.num_bytes <= MAX_KEPT_BYTES else TailEntries((), 0)
        return tail

    def views(self, tail: TailEntries, manifest: ShardManifest, schema: TableSchema) -> list[MemTableView]:
        """The rows of ``tail`` as MemTables, one a generation, oldest first."""
        groups = [
            self._group(generation, entries, schema)
            for generation, entries in _by_generation(tail.entries, manifest.current_generation)
        ]
        self._groups = tuple(groups) if tail.num_bytes <= MAX_KEPT_BYTES else ()
        return [
            MemTableView(self._shard_id, group.generation, schema, group.batches, group.indexes)
            for group in groups
        ]

    def _group(self, generation: int, entries: Sequence[WalEntry], schema: TableSchema) -> _Group:
        """Extends the group that was made of a part of the same entries, or makes one anew."""
        first = entries[0].position
        for known in self._groups:
            same_start = (known.generation, known.first_position) == (generation, first)
            if same_start and known.schema is schema and known.entries <= len(entries):
                added = _aligned(entries[known.entries :], schema)
                batches = [*known.batches, *added] if added else known.batches
                return replace(known, entries=len(entries), batches=batches)
        return _Group(
            schema, generation, first, len(entries), _aligned(entries, schema), IndexStore((), schema)
        )


def _is_open(entry: WalEntry, manifest: ShardManifest) -> bool:
    """Whether no SSTable holds the entry's rows; an entry without a generation is always open."""
    return entry.generation is None or entry.generation >= manifest.current_generation


def _aligned(entries: Sequence[WalEntry], schema: TableSchema) -> list[pa.RecordBatch]:
    return [align(batch, schema, entry.base_version) for entry in entries for batch in entry.batches]


def _by_generation(entries: Sequence[WalEntry], current: int) -> list[tuple[int, list[WalEntry]]]:
    """Entries in order, cut where the generation rises; one without counts to the one before it."""
    groups: list[tuple[int, list[WalEntry]]] = []
    for entry in entries:
        generation = max(entry.generation or 0, groups[-1][0] if groups else current)
        if not groups or generation > groups[-1][0]:
            groups.append((generation, []))
        groups[-1][1].append(entry)
    return groups
