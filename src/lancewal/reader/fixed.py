"""FixedReader: answers requests from one state of a table, however the table goes on."""

from __future__ import annotations

from lancewal.errors import StorageError, TableNotFoundError
from lancewal.reader.base_source import BaseSource
from lancewal.reader.merge import Snapshot
from lancewal.reader.pruning import KeyLocator
from lancewal.reader.state import ShardReader, TableState
from lancewal.reader.table_reader import TableReader
from lancewal.reader.tail import SnapshotMovedError
from lancewal.storage import ObjectStore, check_process


class FixedReader(TableReader):
    """Reads ``state``, which is called ``name`` in errors. Thread-safe.

    Somebody has to keep the files that the state names. A read that misses one is a
    :class:`~lancewal.errors.StorageError`: there is no newer state to turn to.
    """

    def __init__(self, store: ObjectStore, state: TableState, name: str) -> None:
        super().__init__(store, live_writers=False)
        self._name = name
        self._places = {place.shard_id: place for place in state.shards}
        self._fixed = [ShardReader.at(store, place) for place in state.shards]
        try:
            self._base = state.base(store.storage_options)
        except TableNotFoundError as error:
            raise self._gone(error) from error

    def snapshot(self, wants: KeyLocator | None = None, *, max_staleness: float | None = None) -> Snapshot:
        """The levels of the state; shards that ``wants`` is false for are left out."""
        if max_staleness is not None:
            # A lookup asks once more when rows were gone, for a newer state.
            raise self._gone("rows of its log were removed")
        base = self._newest_base()
        chosen = self._chosen(self._fixed, wants)
        try:
            shards = self._all_of(
                lambda shard: shard.open(self._places[shard.shard_id], base.base), chosen.wanted
            )
        except SnapshotMovedError as error:
            raise self._gone(error) from error
        return Snapshot(base, tuple(shards), chosen.left_out, not self._store.is_local)

    def _newest_base(self) -> BaseSource:
        check_process()
        assert self._base is not None
        return self._base

    def _gone(self, why: object) -> StorageError:
        return StorageError(f"{self._name} of the table at {self._store.uri} is no longer whole: {why}")
