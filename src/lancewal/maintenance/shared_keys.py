"""Keys that are in several shards, where nothing on storage says which version is newer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from lancewal.format.schema import TableSchema
from lancewal.format.shard_manifest import ShardManifest
from lancewal.objects import ObjectStore
from lancewal.parallel import ordered_map
from lancewal.reader.key_set import KeySet
from lancewal.reader.sstable_source import KeyedSsTable, SsTableSource
from lancewal.sstable import SsTable

_REMOTE_READERS = 4


@dataclass(frozen=True)
class SharedKeys:
    """Two shards, by their numbers, how many keys are in both, and one of them."""

    first: int
    second: int
    count: int
    example: object


def flushed_keys(store: ObjectStore, schema: TableSchema, manifest: ShardManifest, after: int) -> KeySet:
    """The keys of a shard's SSTables above generation ``after``, those of deletes included."""
    entries = [entry for entry in manifest.sstables if entry.generation > after]

    def read(number: int) -> KeySet:
        table = SsTable.open(store, manifest.shard_id, entries[number])
        return SsTableSource(KeyedSsTable(table), schema).keys()

    return KeySet.union(ordered_map(read, range(len(entries)), 1 if store.is_local else _REMOTE_READERS))


def shared_keys(shards: Sequence[KeySet]) -> list[SharedKeys]:
    """The keys that neighbours among the shards with one key have in common.

    A key in three shards counts for the first and second, and for the second and third.

    >>> sets = [KeySet.of([pa.array([1, 2])]), KeySet.of([pa.array([3])]), KeySet.of([pa.array([2, 4])])]
    >>> shared_keys(sets)
    [SharedKeys(first=0, second=2, count=1, example=2)]
    """
    arrays = [keys.to_array().unique() if len(keys) else None for keys in shards]
    filled = [(number, array) for number, array in enumerate(arrays) if array is not None]
    if len(filled) < 2:
        return []
    keys = pa.concat_arrays([array for _, array in filled])
    owners = np.concatenate([np.full(len(array), number) for number, array in filled])
    codes = keys.dictionary_encode().indices.to_numpy()
    # Stable: the owners of one key are in ascending order.
    order = np.argsort(codes, kind="stable")
    again = np.flatnonzero(codes[order][1:] == codes[order][:-1])
    if not len(again):
        return []
    pairs = np.stack([owners[order[again]], owners[order[again + 1]]], axis=1)
    found, first, counts = np.unique(pairs, axis=0, return_index=True, return_counts=True)
    return [
        SharedKeys(int(one), int(other), int(count), keys[int(order[again[place]])].as_py())
        for (one, other), place, count in zip(found, first, counts, strict=True)
    ]


def sharing_keys(shards: Sequence[KeySet]) -> list[list[int]]:
    """The numbers of the shards in groups, such that no key is in two groups.

    >>> sets = [KeySet.of([pa.array([1, 2])]), KeySet.of([pa.array([3])]), KeySet.of([pa.array([2, 4])])]
    >>> sharing_keys(sets)
    [[0, 2], [1]]
    """
    group_of = {number: {number} for number in range(len(shards))}
    for pair in shared_keys(shards):
        joined = group_of[pair.first] | group_of[pair.second]
        for number in joined:
            group_of[number] = joined
    return sorted({tuple(sorted(group)): sorted(group) for group in group_of.values()}.values())
