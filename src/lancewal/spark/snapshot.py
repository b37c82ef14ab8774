"""One state of a table for all tasks of a query, small enough to travel with them.

The driver reads no rows. Tasks open the same SSTables, WAL positions and fragments, whatever
is written, flushed or compacted meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from lancewal.base import BaseTable
from lancewal.errors import StorageError, WalTruncatedError
from lancewal.format import KeySet
from lancewal.reader import ShardPlace, ShardReader, ShardSnapshot, TableState
from lancewal.storage import ObjectStore


def resolved_shard(store: ObjectStore, base: BaseTable, place: ShardPlace) -> ShardSnapshot:
    """The levels of one shard."""
    reader = ShardReader(store, place.shard_id)
    try:
        state = reader.read_until(place.manifest, place.wal_end, base.schema)
    except WalTruncatedError as error:
        raise StorageError(
            f"the query's state of shard {place.shard_id} is no longer there ({error}); run the query again, "
            "and collect garbage with a min_age above the duration of queries"
        ) from error
    return reader.resolve(state, base)


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
