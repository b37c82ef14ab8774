"""The base table as the write path needs it: columns with field ids, key, MemWAL details."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from uuid import UUID
from weakref import ReferenceType, WeakKeyDictionary, ref

import lance

from lancewal import layout
from lancewal.column_history import MEM_WAL_INDEX, ColumnHistory, ColumnLog, ColumnRuns
from lancewal.errors import InvalidInputError, NotInitializedError, StorageError
from lancewal.format.index_details import (
    MEM_WAL_INDEX_NAME,
    BaseManifest,
    MemWalDetails,
    newest_manifest_name,
    read_base_manifest,
)
from lancewal.format.schema import ColumnIdentity, TableSchema
from lancewal.markers import appended_generations
from lancewal.objects import ObjectStore

logger = logging.getLogger(__name__)

_VERSIONS_DIR = "_versions"

#: Versions never change: what one reader found out about columns serves all of the process.
_column_logs: WeakKeyDictionary[ObjectStore, ColumnLog] = WeakKeyDictionary()


@dataclass(frozen=True)
class BaseTable:
    """One version of a base table, opened by pylance, with what pylance does not tell."""

    uri: str
    dataset: lance.LanceDataset
    schema: TableSchema
    manifest: BaseManifest
    details: MemWalDetails
    storage_options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        uri: str | lance.LanceDataset,
        storage_options: Mapping[str, str] | None = None,
        *,
        store: ObjectStore | None = None,
        version: int | None = None,
    ) -> BaseTable:
        """Open the newest (or the given) version of the table at ``uri``."""
        if isinstance(uri, lance.LanceDataset):
            storage_options = storage_options if storage_options is not None else uri._storage_options
            version = uri.version if version is None else version
            uri = uri.uri
        options = dict(storage_options or {})
        store = store or ObjectStore.from_uri(uri, options)
        dataset = _open_dataset(uri, options, version)
        manifest = read_manifest(store, dataset.version)
        if manifest.mem_wal is None:
            raise NotInitializedError(
                f"the table at {uri} has no MemWAL index; call lancewal.initialize({uri!r}) once"
            )
        schema = table_schema(dataset, ColumnHistory(dataset.version, column_log(store), store))
        return cls(uri, dataset, schema, manifest, manifest.mem_wal, options)

    @property
    def version(self) -> int:
        return int(self.dataset.version)

    @property
    def storage_version(self) -> str:
        return str(self.dataset.data_storage_version)

    def compacted_generation(self, shard_id: UUID) -> int:
        """The highest generation of the shard that this version contains; 0 for none."""
        return self._held.get(shard_id, 0)

    def initialized_since(self, version: int) -> bool:
        """Whether every version from ``version`` on has had the MemWAL index, as far as known."""
        identity = self.schema.identity
        return not isinstance(identity, ColumnHistory) or identity.is_continued_since(version)

    @cached_property
    def _held(self) -> Mapping[UUID, int]:
        return appended_generations(self)


def table_schema(dataset: lance.LanceDataset, identity: ColumnIdentity | None = None) -> TableSchema:
    """The columns of a Lance dataset with their field ids and its primary key in key order."""
    lance_schema = dataset.lance_schema
    keys = [f for f in lance_schema.fields() if f.is_unenforced_primary_key()]
    keys.sort(key=lambda f: f.unenforced_primary_key_position() or 0)
    return TableSchema.from_lance(dataset.schema, lance_schema.fields(), [f.name() for f in keys], identity)


def _open_dataset(uri: str, options: Mapping[str, str], version: int | None) -> lance.LanceDataset:
    try:
        return lance.dataset(uri, version=version, storage_options=dict(options) or None)
    except ValueError as error:
        # pylance has no class of its own for this.
        if "not found" in str(error).lower():
            if version is not None:
                raise InvalidInputError(
                    f"there is no version {version} of a Lance table at {uri}; it may have been cleaned up"
                ) from error
            raise InvalidInputError(
                f"there is no Lance table at {uri}; write one with lance.write_dataset first"
            ) from error
        raise InvalidInputError(f"the table at {uri} cannot be opened: {error}") from error
    except OSError as error:
        raise StorageError(f"the table at {uri} cannot be opened: {error}") from error


def manifest_path(store: ObjectStore, version: int) -> str:
    """The path of the manifest file of ``version``, whether or not it exists."""
    inverted, plain = _manifest_paths(version)
    return plain if store.head(plain) is not None else inverted


def _manifest_paths(version: int) -> tuple[str, str]:
    """By the present naming scheme, and by the old one."""
    return f"{_VERSIONS_DIR}/{(1 << 64) - 1 - version:020d}.manifest", f"{_VERSIONS_DIR}/{version}.manifest"


def find_manifest(store: ObjectStore, version: int) -> BaseManifest | None:
    """The manifest file of ``version``; ``None`` when there is none (any more)."""
    for path in _manifest_paths(version):
        try:
            return read_base_manifest(bytes(store.get(path)))
        except FileNotFoundError:
            continue
    return None


def read_manifest(store: ObjectStore, version: int) -> BaseManifest:
    """As :func:`find_manifest`, of a version that must exist."""
    found = find_manifest(store, version)
    if found is not None:
        return found
    names = [info.path.rsplit("/", 1)[-1] for info in store.list(_VERSIONS_DIR)]
    raise StorageError(
        f"the manifest of version {version} is not in {layout.child_uri(store.uri, _VERSIONS_DIR)} "
        f"(newest there: {newest_manifest_name(names)}); it may have been cleaned up meanwhile, open again"
    )


def column_log(store: ObjectStore) -> ColumnLog:
    """What this process knows of the columns of the table's versions; reads while ``store`` is kept."""
    log = _column_logs.get(store)
    if log is None:
        # The log must not hold on to the store, by which it is found.
        reference = ref(store)
        log = ColumnLog(_fields_by_version(reference), partial(_load_runs, reference))
        log = _column_logs.setdefault(store, log)
    return log


def store_column_history(store: ObjectStore, version: int) -> None:
    """Store since when the columns of ``version`` are there, for readers that cannot see the versions before.

    Old versions may be cleaned up, or too many to be read one by one. Readers do without this
    where it is missing; so a failure is only logged.
    """
    try:
        runs = column_log(store).unstored_runs(version)
        if runs is not None:
            store.put(layout.COLUMN_HISTORY, runs.to_json(), durable=False)
    except StorageError as error:
        logger.warning("the history of the table's columns was not stored: %s", error)


def _load_runs(reference: ReferenceType[ObjectStore]) -> ColumnRuns | None:
    store = reference()
    if store is None:
        return None
    try:
        runs = ColumnRuns.from_json(store.get(layout.COLUMN_HISTORY))
    except FileNotFoundError:
        return None
    if runs is None or MEM_WAL_INDEX in runs.since:
        return runs
    # An earlier release did not look for the index; it stored runs for tables that have it.
    return replace(runs, since={**runs.since, MEM_WAL_INDEX: runs.first})


def _fields_by_version(reference: ReferenceType[ObjectStore]) -> Callable[[int], Mapping[int, str] | None]:
    known: dict[int, Mapping[int, str]] = {}

    def fields_of(version: int) -> Mapping[int, str] | None:
        store = reference()
        if version not in known and store is not None:
            try:
                manifest = read_manifest(store, version)
                own = {} if manifest.mem_wal is None else {MEM_WAL_INDEX: MEM_WAL_INDEX_NAME}
                known[version] = {**manifest.fields, **own}
            except StorageError:
                return None
        return known.get(version)

    return fields_of
