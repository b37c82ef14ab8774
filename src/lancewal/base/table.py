"""The base table as the write path needs it: columns with field ids, key, MemWAL details.

Opening a version takes a listing and two reads of its manifest: one by Lance, and one by lancewal for what
Lance does not expose. So the newest version that was opened through a store is kept. Opening the table again
through that store, or :meth:`BaseTable.refreshed`, lists once, and reads manifests only if there is another
version. The listing is never skipped: compaction removes SSTables from the shards' manifests, and a reader
that took an older version for the newest would find their rows in neither place.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from uuid import UUID
from weakref import ReferenceType, ref

import lance
from lance.lance import LanceSchema

from lancewal.base.columns import MEM_WAL_INDEX, ColumnHistory, ColumnLog, ColumnRuns, Traces
from lancewal.base.lance import committed_at, fragments_of, lance_errors, row_count
from lancewal.base.markers import effective_markers, is_parts, newest_manifest, parts_id, retained_versions
from lancewal.config import ShardWriterConfig
from lancewal.errors import (
    CorruptManifestError,
    InvalidInputError,
    LanceWalError,
    NotInitializedError,
    OutcomeUnknownError,
    StorageError,
    TableNotFoundError,
)
from lancewal.format import (
    MEM_WAL_INDEX_NAME,
    BaseManifest,
    MemWalDetails,
    TableSchema,
    check_readable,
    highest_fields,
    read_base_manifest,
)
from lancewal.storage import ObjectInfo, ObjectStore, Shelf, check_process, in_thread, layout

logger = logging.getLogger(__name__)


#: Parts of pylance's ``ValueError`` texts for missing credentials.
_NO_CREDENTIALS = re.compile(r"Failed to get AWS credentials|CredentialsNotLoaded|//169\.254\.169\.254/")
_NO_TABLE = re.compile(r"not found|not a directory", re.IGNORECASE)
_STORAGE_FAILED = re.compile(r"resolve region|Generic \S+ error|error sending request", re.IGNORECASE)

#: The column logs of tables, shared by all readers with the same store: versions never change.
_column_logs: Shelf[object, ColumnLog] = Shelf()
_columns: Shelf[tuple[object, int], tuple[Mapping[int, str], Traces]] = Shelf()
#: If the table has more than this many times the keys of a lookup, the BTree finds them faster than a scan
#: of the key column.
_INDEX_PAYS_FROM = 500
#: The assumed size of a key in a file, and of a file whose size Lance does not know.
_KEY_BYTES = 8
_UNKNOWN_BYTES = 1 << 30
#: The approximate memory of one name in a mapping.
_NAME_BYTES = 160


@dataclass(frozen=True)
class BaseTable:
    """One version of a base table, opened by pylance, with the details that pylance does not expose.

    ``dataset`` is a handle that this object does not share. A commit through it moves only this handle to the
    version that was committed; see :meth:`committed`.
    """

    uri: str
    dataset: lance.LanceDataset
    schema: TableSchema
    manifest: BaseManifest
    details: MemWalDetails
    #: The commit time of the version in nanoseconds. It distinguishes the version from one with the same
    #: number of another table that was created at the same place.
    committed_at: int
    lance_schema: LanceSchema = field(repr=False, compare=False)
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)

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
        if version is not None:
            dataset = _open_dataset(uri, options, version)
            return _table(uri, options, store, dataset, read_manifest(store, version))
        known = _newest.get(store.identity)
        if known is None or (known.uri, known.storage_options) != (uri, options):
            return _open_newest(uri, options, store)
        newest = known.refreshed(store)
        return newest if newest is not known else _with_history(known, store)

    @classmethod
    def known(cls, store: ObjectStore) -> BaseTable | None:
        """The newest version that was opened through ``store`` so far, if it is kept; makes no request.

        It may be out of date, so it is only good for guesses.
        """
        return _newest.get(store.identity)

    def refreshed(self, store: ObjectStore) -> BaseTable:
        """The newest version: this same object after one request, or a new one after three."""
        check_process()
        dataset = copy.copy(self.dataset)
        try:
            with lance_errors(f"look for the newest version of {self.uri}"):
                dataset.checkout_latest()
            return self._at(dataset, store)
        except StorageError:
            # The table or the found version is gone, or Lance failed: open the table from nothing.
            return _open_newest(self.uri, self.storage_options, store)

    def continues(self, earlier: BaseTable, store: ObjectStore) -> bool:
        """Whether ``earlier`` is a version of this table, and not of a former table at the same place.

        An index that both have proves it. Otherwise the earlier version is read from storage. If it was
        cleaned up, it counts as a version of another table: the caller then starts over, which is safe.
        """
        if earlier.version >= self.version:
            return (earlier.version, earlier.committed_at) == (self.version, self.committed_at)
        ours, theirs = self.manifest, earlier.manifest
        if ours.mem_wal_uuid == theirs.mem_wal_uuid:
            return True
        if {index.uuid for index in ours.indexes} & {index.uuid for index in theirs.indexes}:
            return True
        found = find_manifest(store, earlier.version)
        return found is not None and found.checksum == theirs.checksum

    def committed(self, store: ObjectStore) -> BaseTable:
        """The version that the last commit through :attr:`dataset` made; needs one request.

        Others may have committed since.
        """
        return self._at(self.dataset, store)

    def _at(self, dataset: lance.LanceDataset, store: ObjectStore) -> BaseTable:
        if (dataset.version, committed_at(dataset)) == (self.version, self.committed_at):
            return self
        manifest = read_manifest(store, dataset.version)
        return _kept(_table(self.uri, self.storage_options, store, dataset, manifest, self), store)

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def storage_version(self) -> str:
        return str(self.dataset.data_storage_version)

    def writer_store(self, *, fsync: bool | None = None) -> ObjectStore:
        """The table's storage for writers; if ``fsync`` is ``None``, the table's writer defaults decide."""
        if fsync is None:
            fsync = ShardWriterConfig.from_defaults(self.details.writer_config_defaults).fsync
        return ObjectStore.from_uri(self.uri, self.storage_options, fsync=fsync)

    def compacted_generation(self, shard_id: UUID) -> int:
        """The highest generation of the shard that this version contains; 0 for none."""
        return self._held.get(shard_id, 0)

    def announced_generation(self, shard_id: UUID) -> int:
        """The generation up to which this version may hold only a part of the shard's rows; 0 for none."""
        return self.details.compacted.get(parts_id(shard_id), 0) if self.announced else 0

    @cached_property
    def announced(self) -> frozenset[UUID]:
        """The ids under which compactions in several commits announced how far they go."""
        return frozenset(key for key in self.details.compacted if is_parts(key))

    def initialized_since(self, version: int) -> bool:
        """Whether every known version from ``version`` on has the MemWAL index."""
        identity = self.schema.identity
        return not isinstance(identity, ColumnHistory) or identity.is_continued_since(version)

    @cached_property
    def indexed_fragments(self) -> frozenset[int]:
        """The fragments that a BTree on the key covers; empty if the key has several columns."""
        if len(self.schema.primary_key) != 1:
            return frozenset()
        key = self.schema.field_ids[self.schema.primary_key[0]]
        names = {
            index.name
            for index in self.manifest.indexes
            if index.field_ids == (key,) and "BTree" in index.details_type
        }
        return max((self.manifest.covered_fragments(name) for name in names), key=len, default=frozenset())

    def key_index_pays(self, keys: int, *, replaces: bool) -> bool:
        """Whether a merge finds this many keys faster with the BTree than by reading the key column.

        With the BTree, Lance also reads the fragments that it does not cover: all columns to replace rows,
        only the key to delete rows.
        """
        covered, rows = self.indexed_fragments, row_count(self.dataset)
        if not covered or rows <= _INDEX_PAYS_FROM * keys:
            return False
        if not replaces or covered == self.manifest.fragment_ids:
            return True
        others = [each for each in fragments_of(self.dataset) if each.fragment_id not in covered]
        files = [file for each in others for file in each.data_files()]
        return sum(file.file_size_bytes or _UNKNOWN_BYTES for file in files) <= _KEY_BYTES * rows

    @cached_property
    def _held(self) -> Mapping[UUID, int]:
        return appended_generations(self)


def open_base(store: ObjectStore) -> BaseTable:
    """The newest version of the table of ``store``."""
    return BaseTable.open(store.uri, store.storage_options, store=store)


#: The newest version that was opened through each store. It holds no reference to the store, which would
#: otherwise live as long as the cache.
_newest: Shelf[object, BaseTable] = Shelf()
#: The approximate memory of an open version in Lance, without its caches for files and indexes.
_OPEN_BYTES = 1 << 20


def _open_newest(uri: str, options: Mapping[str, str], store: ObjectStore) -> BaseTable:
    """Open the newest version from nothing; on remote storage Lance and lancewal read it in parallel."""
    ours = None if store.is_local else in_thread(partial(_try_newest_manifest, store), "lancewal-base")
    dataset = _open_dataset(uri, options, None)
    manifest = None if ours is None else ours.result()
    if manifest is None or manifest.version != dataset.version:
        manifest = read_manifest(store, dataset.version)
    return _kept(_table(uri, options, store, dataset, manifest), store)


def _try_newest_manifest(store: ObjectStore) -> BaseManifest | None:
    try:
        return newest_manifest(store)
    except (LanceWalError, FileNotFoundError):
        return None  # the next read raises the error if it persists


def _table(
    uri: str,
    options: Mapping[str, str],
    store: ObjectStore,
    dataset: lance.LanceDataset,
    manifest: BaseManifest,
    earlier: BaseTable | None = None,
) -> BaseTable:
    """One version; reuses the columns of ``earlier`` and what was derived from them, if they are equal."""
    if manifest.mem_wal is None:
        raise NotInitializedError(
            f"the table at {uri} has no MemWAL index; call lancewal.initialize({uri!r}) once"
        )
    with lance_errors(f"read the columns of {uri}"):
        fields, metadata = dataset.lance_schema, _encoded(dataset.schema_metadata)
    same = earlier is not None and (earlier.lance_schema, earlier.schema.metadata) == (fields, metadata)
    columns = earlier.schema if earlier is not None and same else table_schema(dataset)
    stamp = committed_at(dataset)
    base = BaseTable(uri, dataset, columns, manifest, manifest.mem_wal, stamp, fields, dict(options))
    return _with_history(base, store)


def _with_history(base: BaseTable, store: ObjectStore) -> BaseTable:
    """``base`` with its own handle, and with columns whose history is read from ``store``."""
    history = ColumnHistory(base.version, column_log(store), store)
    return replace(base, dataset=copy.copy(base.dataset), schema=base.schema.identified(history))


def _kept(base: BaseTable, store: ObjectStore) -> BaseTable:
    kept = replace(base, dataset=copy.copy(base.dataset), schema=base.schema.identified(None))
    _newest.put(store.identity, kept, _OPEN_BYTES)
    return base


def _encoded(metadata: Mapping[str, str]) -> Mapping[bytes, bytes]:
    return {key.encode(): value.encode() for key, value in metadata.items()}


def appended_generations(base: BaseTable) -> Mapping[UUID, int]:
    """The newest generation of each shard whose rows this version of the base table holds.

    Readers compare an SSTable's generation with this, never with the stored marker alone. A shard
    without an entry has no such generation.
    """
    return effective_markers(base.details.compacted, base.schema.columns)


def table_schema(dataset: lance.LanceDataset) -> TableSchema:
    """The columns of a Lance dataset with their field ids and its primary key in key order."""
    with lance_errors(f"read the columns of {dataset.uri}"):
        lance_schema, columns = dataset.lance_schema, dataset.schema
        check_readable(columns)
        keys = [f for f in lance_schema.fields() if f.is_unenforced_primary_key()]
        keys.sort(key=lambda f: f.unenforced_primary_key_position() or 0)
        return TableSchema.from_lance(columns, lance_schema.fields(), [f.name() for f in keys])


def _open_dataset(uri: str, options: Mapping[str, str], version: int | None) -> lance.LanceDataset:
    try:
        with lance_errors(f"open the table at {uri}"):
            return lance.dataset(uri, version=version, storage_options=dict(options) or None)
    except StorageError as error:
        cause = error.__cause__
        if not isinstance(cause, ValueError):
            raise
        # pylance has no classes of its own for these.
        if _NO_CREDENTIALS.search(str(cause)):
            raise StorageError(
                f"there are no credentials for {uri}; set them in the environment (AWS_ACCESS_KEY_ID and so "
                "on) or pass them as storage options"
            ) from cause
        if _NO_TABLE.search(str(cause)):
            if version is not None:
                raise TableNotFoundError(
                    f"there is no version {version} of a Lance table at {uri}; it may have been cleaned up"
                ) from cause
            raise TableNotFoundError(
                f"there is no Lance table at {uri}; check the path, or make one with lancewal.create"
            ) from cause
        if _STORAGE_FAILED.search(str(cause)):
            raise
        raise InvalidInputError(f"the table at {uri} cannot be opened: {cause}") from cause


def find_manifest(store: ObjectStore, version: int) -> BaseManifest | None:
    """The manifest of ``version``; ``None`` if it does not exist, or no longer exists."""
    found = _manifest_file(store, version)
    return None if found is None else read_base_manifest(found[1], name=found[0])


def _manifest_file(store: ObjectStore, version: int) -> tuple[str, bytes] | None:
    """The path and the content of the manifest of ``version``; ``None`` if it does not exist."""
    for path in _manifest_paths(version):
        try:
            return path, bytes(store.get(path))
        except FileNotFoundError:
            continue
    return None


def read_manifest(store: ObjectStore, version: int) -> BaseManifest:
    """Like :func:`find_manifest`, for a version that must exist."""
    found = find_manifest(store, version)
    if found is not None:
        return found
    newest = max(retained_versions(store), default=None)
    raise StorageError(
        f"the manifest of version {version} is not in {layout.child_uri(store.uri, layout.VERSIONS_DIR)} "
        f"(newest there: {newest}); it may have been cleaned up meanwhile, open again"
    )


def manifest_info(store: ObjectStore, version: int) -> ObjectInfo | None:
    """The manifest file of ``version``, without its content; ``None`` if it was cleaned up."""
    found = (store.head(path) for path in _manifest_paths(version))
    return next((info for info in found if info is not None), None)


def _manifest_paths(version: int) -> tuple[str, str]:
    """The path in the current naming scheme, and in the old one."""
    inverted = f"{layout.VERSIONS_DIR}/{(1 << 64) - 1 - version:020d}.manifest"
    return inverted, f"{layout.VERSIONS_DIR}/{version}.manifest"


def column_log(store: ObjectStore) -> ColumnLog:
    """The log of the table's columns in this process; it can read only while ``store`` is alive."""
    # The log must not keep the store alive: it stays in the cache after the store is no longer used.
    reference = ref(store)
    return _column_logs.get_or_make(
        store.identity,
        lambda: ColumnLog(
            partial(_fields_of, reference),
            partial(_load_runs, reference),
            partial(_traces_of, reference),
            partial(_existing, reference),
        ),
        lambda _: _NAME_BYTES,
    )


def forget_columns(store: ObjectStore) -> None:
    """Forget the columns of the table's versions, because another table was created at the same place."""
    _column_logs.remove(store.identity)
    # Clear all tables: the keys are by table and version, and there is no list of those of one table.
    _columns.clear()


def store_column_history(store: ObjectStore, version: int) -> None:
    """Store since when the columns of ``version`` exist, for readers that cannot see earlier versions.

    Old versions may be cleaned up, or there may be too many to read them one by one. Readers work without
    this record, so a failure is only logged.
    """
    try:
        runs = column_log(store).unstored_runs(version)
        if runs is not None:
            store.put(layout.COLUMN_HISTORY, runs.to_json(), durable=False)
    except (StorageError, OutcomeUnknownError) as error:
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
    # An earlier release did not track the index, and stored runs only for tables that have it.
    return replace(runs, since={**runs.since, MEM_WAL_INDEX: runs.first})


def _fields_of(reference: ReferenceType[ObjectStore], version: int) -> Mapping[int, str] | None:
    found = _columns_of(reference, version)
    return None if found is None else found[0]


def _traces_of(reference: ReferenceType[ObjectStore], version: int) -> Traces | None:
    found = _columns_of(reference, version)
    return None if found is None else found[1]


def _columns_of(
    reference: ReferenceType[ObjectStore], version: int
) -> tuple[Mapping[int, str], Traces] | None:
    store = reference()
    if store is None:
        return None
    key = store.identity, version
    found = _columns.get(key)
    if found is None:
        try:
            file = _manifest_file(store, version)
            if file is None:
                return None
            path, data = file
            manifest = read_base_manifest(data, name=path)
        except StorageError:
            return None
        except CorruptManifestError as error:
            # Only the newest version is needed; an old one says as little as one that was cleaned up.
            logger.warning("an old version of the table at %s is passed over: %s", store.uri, error)
            return None
        own = {} if manifest.mem_wal is None else {MEM_WAL_INDEX: MEM_WAL_INDEX_NAME}
        traces = Traces.of(highest_fields(data), manifest.mem_wal_uuid)
        found = {**manifest.fields, **own}, traces
        _columns.put(key, found, _NAME_BYTES * (1 + len(found[0]) + len(traces.files)))
    return found


def _existing(reference: ReferenceType[ObjectStore], versions: range) -> list[int]:
    store = reference()
    return [] if store is None else [each for each in retained_versions(store) if each in versions]
