"""What storage holds after every step, read without any of the code under test but its decoders."""

from __future__ import annotations

import io
from functools import lru_cache, partial
from uuid import UUID

import pyarrow as pa

from lancewal.format import TOMBSTONE, ShardManifest, decode_entry, decode_manifest
from lancewal.shard import is_flushed
from lancewal.storage import layout
from tests.simulation.light import LightTable
from tests.simulation.oracle import OWN, BrokenError, History
from tests.simulation.store import Files

_Rows = list[tuple[int, int | None]]
#: The names of a log are the same in all worlds.
_version_of = lru_cache(4096)(layout.parse_manifest_name)
_position_of = lru_cache(4096)(layout.parse_wal_name)


class Ledger:
    """Puts together what a reader would have to be shown, whenever an object has changed.

    The newest manifest counts. Rows are those of the base table, over them those of its SSTables that no
    marker covers, over them those of log entries behind the cursor that no SSTable holds.
    """

    def __init__(self, files: Files, table: LightTable, history: History, shard_id: UUID) -> None:
        self._files, self._table, self._history, self._shard_id = files, table, history, shard_id
        self._manifests = layout.manifest_dir(shard_id) + "/"
        self._entries = layout.wal_dir(shard_id) + "/"
        self._state: tuple[int, int, int] | None = None
        self._decoded: dict[tuple[str, bytes], object] = {}
        self.looks = 0

    def look(self) -> None:
        state = (self._files.changes, self._table.newest, self._history.version)
        if state == self._state:
            return
        self._state = state
        self.looks += 1
        rows = self._shown()
        now = self._history.now()
        self._history.check(rows.items(), now.shown, now.gone)
        self._history.reads -= 1

    def flushed(self) -> frozenset[int]:
        """The puts whose own rows are in SSTables or in the base table."""
        return frozenset(key - OWN for key in self._flushed_rows(self.manifest()) if key >= OWN)

    def manifest(self) -> ShardManifest | None:
        """The newest one."""
        directory = self._manifests
        versions = {
            _version_of(path[len(directory) :]): path
            for path in self._files.objects
            if path.startswith(directory)
        }
        newest = max((version for version in versions if version is not None), default=None)
        if newest is None:
            return None
        found: ShardManifest = self._once(
            versions[newest], lambda data: decode_manifest(data, shard_id=self._shard_id, version=newest)
        )
        return found

    def _flushed_rows(self, manifest: ShardManifest | None) -> dict[int, int]:
        rows = dict(self._table.rows(self._table.newest))
        marker = self._table.marker(self._shard_id)
        for entry in sorted(manifest.sstables, key=lambda each: each.generation) if manifest else ():
            if entry.generation > marker:
                self._lay(rows, self._once(self._data(entry.path), _flushed))
        return rows

    def _shown(self) -> dict[int, int]:
        objects = self._files.objects
        manifest = self.manifest()
        rows = self._flushed_rows(manifest)
        if manifest is None:
            return rows
        directory = self._entries
        covered = manifest.replay_after_wal_entry_position
        found = {_position_of(path[len(directory) :]): path for path in objects if path.startswith(directory)}
        tail = sorted(position for position in found if position is not None and position > covered)
        if tail and tail != list(range(covered + 1, tail[-1] + 1)):
            raise BrokenError(f"the log has a hole: entries {tail} are behind the cursor {covered}")
        for position in tail:
            entry = self._once(
                found[position], partial(decode_entry, shard_id=self._shard_id, position=position)
            )
            if entry.sentinel or is_flushed(manifest, position, entry.generation):
                continue
            for batch in entry.batches:
                self._lay(rows, self._once_of(batch))
        return rows

    def _data(self, name: str) -> str:
        path = f"{layout.sstable_dir(self._shard_id, name)}/data"
        if path not in self._files.objects:
            raise BrokenError(f"an SSTable that is needed was collected: {name}")
        return path

    def _once(self, path, decode):  # type: ignore[no-untyped-def]
        key = (path, self._files.objects[path])
        if key not in self._decoded:
            self._decoded[key] = decode(key[1])
        return self._decoded[key]

    def _once_of(self, batch: pa.RecordBatch) -> _Rows:
        key = ("rows", id(batch))
        if key not in self._decoded:
            self._decoded[key] = _pairs(batch)  # type: ignore[index]
        return self._decoded[key]  # type: ignore[index,return-value]

    def _lay(self, rows: dict[int, int], over: _Rows) -> None:
        for key, value in over:
            if value is None:
                rows.pop(key, None)
            else:
                rows[key] = value


def _flushed(data: bytes) -> _Rows:
    return _pairs(pa.ipc.open_stream(io.BytesIO(data)).read_all())


def _pairs(rows: pa.Table | pa.RecordBatch) -> _Rows:
    columns = [rows[name].to_pylist() for name in ("id", "value")]
    dead = rows[TOMBSTONE].to_pylist() if TOMBSTONE in rows.schema.names else [False] * rows.num_rows
    return [(key, None if gone else value) for key, value, gone in zip(*columns, dead, strict=True)]
