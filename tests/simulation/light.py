"""A base table and SSTables without Lance, so that a world takes milliseconds.

All of lancewal is the real one but what it asks of Lance: a version of the base table is its markers and its
rows, a merge is one step, as Lance's commit is, and an SSTable is two small objects. What Lance says when a
marker is stale, or a table is gone, is said here in its words.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import UUID

import pyarrow as pa

from lancewal.base import BaseTable
from lancewal.base import table as base_table
from lancewal.errors import StorageError, TableNotFoundError
from lancewal.format import TOMBSTONE, BaseManifest, SsTableEntry, TableSchema
from lancewal.sstable import ROW_OFFSET, SsTable
from lancewal.storage import ObjectStore, layout
from tests.simulation.store import Disk, Files

_VERSIONS = "_versions"
_IN_LIST = re.compile(r"`id` (?:IN \(([^)]*)\)|= (\d+))")


def _room(name: str) -> ModuleType:
    return import_module(f"lancewal.{name}")


class _Tags:
    """As pylance's; a tag keeps its version through a cleanup."""

    def __init__(self, table: LightTable) -> None:
        self._table = table
        self.versions: dict[str, int] = {}

    def list(self) -> dict[str, dict[str, int]]:
        return {name: {"version": version} for name, version in self.versions.items()}

    def create(self, name: str, version: int) -> None:
        with self._table.breaking("a tag", "create a tag"):
            if name in self.versions:
                raise ValueError(f"Ref conflict error: tag {name} already exists")
            self._set(name, version)

    def update(self, name: str, version: int) -> None:
        with self._table.breaking("a tag", "update a tag"):
            self._set(name, version)

    def _set(self, name: str, version: int) -> None:
        if not self._table.has(version):
            raise ValueError(f"Version not found error: version {version} does not exist")
        self.versions[name] = version

    def delete(self, name: str) -> None:
        with self._table.breaking("a tag", "delete a tag"):
            if self.versions.pop(name, None) is None:
                raise ValueError(f"Ref not found error: tag {name} does not exist")


class _Dataset:
    """What lancewal asks a dataset of pylance for, outside of reads."""

    data_storage_version = "2.1"

    def __init__(self, table: LightTable, version: int) -> None:
        self._table, self.version = table, version
        self.uri = table.uri
        self.tags = table.tags

    @property
    def latest_version(self) -> int:
        return self._table.newest

    def describe_indices(self) -> list[object]:
        return []

    def get_fragments(self) -> list[object]:
        return []

    def read_transaction(self, version: int) -> Any:
        return SimpleNamespace(operation=None)

    def cleanup_old_versions(self, age: timedelta, *, error_if_tagged_old_versions: bool) -> Any:
        return self._table.clean(age)

    def __copy__(self) -> _Dataset:
        return _Dataset(self._table, self.version)


@cache
def opened(template: Path) -> BaseTable:
    """The empty table that all light ones look like."""
    base = BaseTable.open(str(template))
    return replace(base, schema=base.schema.identified(None))


class LightTable:
    """The base table of a light world, in all its versions."""

    def __init__(self, disk: Disk, template: Path, met: Counter[str]) -> None:
        self._disk, self._met = disk, met
        self.uri = disk.root
        self._template = opened(template)
        self.newest = 0
        self.tags = _Tags(self)
        self._committed: dict[int, float] = {}
        self._markers: dict[int, Mapping[UUID, int]] = {}
        self._rows: dict[int, Mapping[int, int]] = {}
        self._commit({}, {})

    def _commit(self, markers: Mapping[UUID, int], rows: Mapping[int, int]) -> None:
        self.newest += 1
        self._markers[self.newest], self._rows[self.newest] = markers, rows
        self._committed[self.newest] = self._disk.world.now
        path = _manifest_path(self.newest)
        assert isinstance(self._disk.files, Files)
        self._disk.files.objects[path] = json.dumps(
            {"version": self.newest, "markers": {str(key): value for key, value in markers.items()}}
        ).encode()
        self._disk.note_written(path)

    def has(self, version: int) -> bool:
        assert isinstance(self._disk.files, Files)
        return _manifest_path(version) in self._disk.files.objects

    def clean(self, age: timedelta) -> Any:
        """As Lance does it: look at versions and tags, then delete. What is tagged in between is not seen."""
        world, files = self._disk.world, self._disk.files
        oldest = world.now - age.total_seconds()
        old = [version for version in range(1, self.newest) if self._committed[version] < oldest]
        gone = [
            version for version in old if self.has(version) and version not in self.tags.versions.values()
        ]
        if world.is_here():
            world.step("clean up old versions")
        for version in gone:
            files.delete(_manifest_path(version))
        self._met["old versions are cleaned up"] += bool(gone)
        return SimpleNamespace(bytes_removed=len(gone))

    @contextmanager
    def breaking(self, what: str, place: str) -> Iterator[None]:
        """One commit of Lance's, which may break before it or after."""
        world, faults = self._disk.world, self._disk.faults
        if world.is_here():
            world.step(place)
            if world.random.random() < faults.breaks_before * 5:
                faults.struck[f"{what} breaks before"] += 1
                raise OSError(f"simulated: {what} was not begun")
        yield
        if world.is_here():
            if world.random.random() < faults.breaks_after * 5:
                faults.struck[f"{what} breaks after"] += 1
                raise OSError(f"simulated: the reply of {what} is lost")
            world.step(f"reply to {what}")

    def rows(self, version: int) -> Mapping[int, int]:
        return self._rows[version]

    def marker(self, shard_id: UUID) -> int:
        return self._markers[self.newest].get(shard_id, 0)

    def open(self, store: ObjectStore) -> BaseTable:
        store.list(_VERSIONS)  # the step, and what goes wrong with it
        return self._at(self.newest)

    def _at(self, version: int) -> BaseTable:
        manifest = self._manifest(version, self._markers[version])
        return replace(
            self._template,
            uri=self._disk.root,
            dataset=_Dataset(self, version),  # type: ignore[arg-type]
            manifest=manifest,
            details=manifest.mem_wal,
            committed_at=version,
        )

    def _manifest(self, version: int, markers: Mapping[UUID, int]) -> BaseManifest:
        details = replace(self._template.details, compacted=dict(markers))
        return replace(self._template.manifest, version=version, mem_wal=details)

    def merge(
        self, markers: Mapping[UUID, int], rows: Mapping[int, int], dead: Sequence[int]
    ) -> dict[str, int]:
        """One commit of Lance's: to the newest version, whichever that is, unless a marker is stale."""
        with self.breaking("a merge", "merge into the base table"):
            stored = self._markers[self.newest]
            for key, value in markers.items():
                if value <= stored.get(key, 0):
                    self._met["a compactor finds its marker stale"] += 1
                    raise OSError(f"Stale SSTable compaction: {key} is at {stored[key]}, not below {value}")
            before = self._rows[self.newest]
            after = {key: value for key, value in {**before, **rows}.items() if key not in dead}
            self._commit({**stored, **markers}, after)
        new = len(rows.keys() - before.keys())
        return {
            "num_inserted_rows": new,
            "num_updated_rows": len(rows) - new,
            "num_deleted_rows": len(before.keys() & set(dead)),
        }

    def decode(self, data: bytes, *, name: str = "") -> BaseManifest:
        stored = json.loads(bytes(data))
        markers = {UUID(key): value for key, value in stored["markers"].items()}
        return self._manifest(stored["version"], markers)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """lancewal finds this in Lance's place within the block."""
        table = self

        def open_(
            uri: object,
            storage_options: object = None,
            *,
            store: ObjectStore | None = None,
            version: int | None = None,
        ) -> BaseTable:
            if version is not None:
                if not table.has(version):
                    raise TableNotFoundError(f"there is no version {version}; it may have been cleaned up")
                return table._at(version)
            assert store is not None
            return table.open(store)

        changes: list[tuple[Any, str, Any]] = [
            (BaseTable, "open", staticmethod(open_)),
            (BaseTable, "refreshed", lambda base, store: _same_or(base, table.open(store))),
            (BaseTable, "committed", lambda base, store: _same_or(base, table.open(store))),
            (base_table, "read_base_manifest", table.decode),
            (base_table, "highest_fields", lambda data: {}),
            (base_table, "row_count", lambda dataset: len(table._rows[dataset.version])),
            (_room("base.markers"), "read_base_manifest", table.decode),
            (_room("maintenance.needs"), "read_base_manifest", table.decode),
            (
                _room("maintenance.commits"),
                "marked_merge",
                lambda dataset, columns, markers: _Merge(table, markers),
            ),
            (_room("maintenance.compact"), "tidy", lambda *_, **__: (False, 0, 0)),
            (_room("maintenance.compact"), "open_indexes", lambda *_: None),
            (_room("maintenance.compact"), "store_column_history", lambda *_: None),
            (_room("maintenance.newest"), "SsTable", LightSsTable),
            (_room("publish.feed"), "SsTable", LightSsTable),
            (_room("reader.state"), "SsTable", LightSsTable),
            (_room("reader.state"), "_bases", _Forgetful()),
            (_room("reader.state"), "SsTableSource", _Source),
            (_room("reader.state"), "BaseSource", _BaseSource),
            (_room("status"), "fragments_of", lambda dataset: []),
            (_room("status"), "row_count", lambda dataset: len(table._rows[dataset.version])),
            (_room("sstable.lineage"), "open_sstable", lambda *_: LightSsTable),
            (_room("publish.staging"), "write_sstable", write_sstable),
            (_room("writer.flush"), "write_sstable", write_sstable),
        ]
        saved = [(owner, name, owner.__dict__[name]) for owner, name, _ in changes]
        for owner, name, value in changes:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in saved:
                setattr(owner, name, value)


def _manifest_path(version: int) -> str:
    return f"{_VERSIONS}/{(1 << 64) - 1 - version:020d}.manifest"


class _Forgetful:
    """A cache for processes that share none: those of a world, and those of the next one."""

    def get(self, key: object) -> None:
        return None

    def put(self, key: object, value: object, size: int) -> None:
        return


def _same_or(known: BaseTable, newest: BaseTable) -> BaseTable:
    return known if known.version == newest.version else newest


class _BaseSource:
    """A version of the base table; nobody prunes shards of a light one."""

    def __init__(self, base: BaseTable, earlier: object = None) -> None:
        self.base = base


class _Merge:
    """As pylance's builder."""

    def __init__(self, table: LightTable, markers: Mapping[UUID, int]) -> None:
        self._table, self._markers = table, markers
        self._deletes = False
        self._dead: list[int] = []

    def use_index(self, _: bool) -> _Merge:
        return self

    def when_matched_update_all(self) -> _Merge:
        return self

    def when_not_matched_insert_all(self) -> _Merge:
        return self

    def when_matched_delete(self) -> _Merge:
        self._deletes = True
        return self

    def when_not_matched_by_source_delete(self, condition: str) -> _Merge:
        found = _IN_LIST.fullmatch(condition)
        assert found is not None, condition
        self._dead = [int(key) for key in (found[1] or found[2]).split(",")]
        return self

    def execute(self, source: pa.Table) -> dict[str, int]:
        keys = source["id"].to_pylist()
        if self._deletes:
            return self._table.merge(self._markers, {}, keys)
        rows = dict(zip(keys, source["value"].to_pylist(), strict=True))
        return self._table.merge(self._markers, rows, self._dead)


def write_sstable(
    *,
    store: ObjectStore,
    shard_id: UUID,
    generation: int,
    batches: Sequence[pa.RecordBatch],
    in_memory_bytes: int | None = None,
    **_: object,
) -> SsTableEntry:
    """The newest row of each key, in two objects: the second makes it a dataset."""
    rows = _newest(pa.Table.from_batches(batches))
    name = layout.fresh_sstable_name(generation)
    directory = layout.sstable_dir(shard_id, name)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    store.put(f"{directory}/data", sink.getvalue())
    store.put(f"{directory}/{_VERSIONS}/1", b"")
    size = in_memory_bytes if in_memory_bytes is not None else rows.nbytes
    return SsTableEntry(generation, name, in_memory_bytes=size, physical_rows=rows.num_rows)


def _newest(rows: pa.Table) -> pa.Table:
    places = {key: place for place, key in enumerate(rows["id"].to_pylist())}
    return rows.take(sorted(places.values()))


class LightSsTable:
    """As ``SsTable``, as far as compaction and feed use it."""

    #: The version of the base table that it was written for.
    written_for = 1

    def __init__(self, store: ObjectStore, shard_id: UUID, entry: SsTableEntry) -> None:
        self.store, self.shard_id, self.entry = store, shard_id, entry

    @classmethod
    def open(cls, store: ObjectStore, shard_id: UUID, entry: SsTableEntry) -> LightSsTable:
        return cls(store, shard_id, entry)

    @property
    def generation(self) -> int:
        return self.entry.generation

    def check_count(self, rows: int, *, may_have_more: bool = False) -> None:
        """Raise if there are not all rows."""
        there = self.stored().num_rows
        assert rows >= there if may_have_more else rows == there

    def stored(self) -> pa.Table:
        """All rows; raises ``FileNotFoundError`` when it is no dataset any more."""
        directory = layout.sstable_dir(self.shard_id, self.entry.path)
        self.store.get(f"{directory}/{_VERSIONS}/1")
        return pa.ipc.open_stream(self.store.get(f"{directory}/data")).read_all()

    def scan(
        self,
        schema: TableSchema,
        columns: Sequence[str],
        *,
        with_offsets: bool = False,
        with_tombstone: bool = False,
        **_: object,
    ) -> Iterator[pa.RecordBatch]:
        try:
            rows = self.stored()
        except FileNotFoundError as error:
            raise StorageError(f"cannot read {self.entry.path}: {error}") from error
        offsets = pa.array(range(rows.num_rows), pa.int64())
        fields = [schema.plain.field(name) for name in columns]
        arrays = [rows[name] for name in columns]
        if with_offsets:
            fields.append(pa.field(ROW_OFFSET, pa.int64(), nullable=False))
            arrays.append(pa.chunked_array([offsets]))
        if with_tombstone:
            fields.append(rows.schema.field(TOMBSTONE))
            arrays.append(rows[TOMBSTONE])
        yield from pa.Table.from_arrays(arrays, schema=pa.schema(fields)).to_batches()

    read = SsTable.read


@dataclass
class _Source:
    """A level of a snapshot."""

    table: LightSsTable
    schema: TableSchema

    def shown_as(self, schema: TableSchema) -> _Source:
        return self

    def stored(self) -> pa.Table:
        return self.table.stored()


def rows_of(snapshot: Any, table: LightTable) -> dict[int, int]:
    """What a merged read of a snapshot gives: the newest version of each key."""
    found = dict(table.rows(snapshot.base_source.base.version))
    for shard in snapshot.shards:
        for source in reversed(shard.sources):
            rows = source.stored() if isinstance(source, _Source) else source.view.stored
            columns = (rows[name].to_pylist() for name in ("id", "value", TOMBSTONE))
            for key, value, is_dead in zip(*columns, strict=True):
                if is_dead:
                    found.pop(key, None)
                else:
                    found[key] = value
    return found
