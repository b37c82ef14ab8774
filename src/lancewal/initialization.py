"""Initialization: one commit adds the MemWAL index, which makes a Lance table writable through the WAL."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import lance
import pyarrow as pa
from lance.commit import CommitConflictError
from lance.dataset import Index

from lancewal.base import BaseTable, lance_errors, locate, table_schema
from lancewal.config import ShardWriterConfig
from lancewal.errors import (
    InvalidInputError,
    LanceWalError,
    NotInitializedError,
    OutcomeUnknownError,
    StorageError,
)
from lancewal.format import (
    MEM_WAL_INDEX_NAME,
    PRIMARY_KEY_KEY,
    MemWalDetails,
    MemWalIndexDetailsMessage,
    ShardingField,
    ShardingSpec,
    TableSchema,
    check_key_types,
    check_new_columns,
)
from lancewal.index import maintained_specs
from lancewal.maintenance import UpkeepSettings, restore_backup, store_upkeep_settings
from lancewal.shard import (
    BUCKET,
    IDENTITY,
    MAX_BUCKETS,
    UNSHARDED,
    Shard,
    ShardManifestStore,
    ShardRouter,
    check_shard_column,
    discover_shards,
    identity_result_type,
)
from lancewal.sstable import check_storable
from lancewal.storage import ObjectStore, layout, ordered_map
from lancewal.table import Table, open_table

logger = logging.getLogger(__name__)

_KEY_MARK = PRIMARY_KEY_KEY.decode()
_DETAILS_TYPE = "/lance.table.MemWalIndexDetails"
#: The spec id and the field name that Lance uses.
_SPEC_ID = 1
_FIELD_ID = "bucket"
#: Never stored: they select a shard, and are not settings of its writer.
_NOT_DEFAULTS = ("shard_id", "shard_spec_id")

_COMMIT_ATTEMPTS = 5
#: Creating a shard waits for the disk or the network, so many are created at once.
_SHARD_CREATORS = 16


def initialize(
    uri_or_dataset: str | os.PathLike[str] | lance.LanceDataset,
    *,
    bucket: tuple[str, int] | None = None,
    identity: str | None = None,
    unsharded: bool = False,
    maintained_indexes: Sequence[str] | None = None,
    writer_defaults: ShardWriterConfig | Mapping[str, str] | None = None,
    upkeep: UpkeepSettings | Mapping[str, Any] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Table:
    """Give an existing Lance table a streaming write path. Done once per table.

    At most one way of sharding: ``bucket=("id", 8)`` hashes a column into 1 to 1024 shards,
    ``identity="tenant"`` makes a shard for every value of a column, ``unsharded=True`` one
    for all rows. With none of them shards are chosen by hand, see ``Table.shard_writer``.
    Where the table has a primary key, the sharding column must be part of it: otherwise two
    versions of a row could lie in different shards, where nothing tells which one is newer.

    ``maintained_indexes`` names the indexes that writers keep up to date on rows that are not
    compacted yet; by default all, also those created later; ``[]`` is none.

    ``writer_defaults`` is stored in the table and applied by every later writer, unless it is
    given another value. A mapping holds the persisted form (``ShardWriterConfig.to_defaults``)
    and may have further keys of your own; they are kept.

    ``upkeep`` is what the table is kept within, whole or as a mapping of single settings;
    ``Table.set_upkeep`` changes it.

    Blob columns are refused, and so are names with which Lance or the reads above it cannot work.

    Everything is checked first: after an :class:`InvalidInputError` the table is as it was.

    >>> import tempfile, lance, pyarrow as pa
    >>> key = pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
    >>> uri = tempfile.mkdtemp() + "/table"
    >>> _ = lance.write_dataset(pa.table({"id": [1]}, pa.schema([key])), uri)
    >>> table = initialize(uri, bucket=("id", 4), writer_defaults={"durable_write": "false"})
    >>> len(table.shards()), table.details.writer_config_defaults
    (4, {'durable_write': 'false'})
    """
    defaults = _persisted(writer_defaults)
    kept_within = UpkeepSettings.of(upkeep)
    uri, options = locate(uri_or_dataset, storage_options)
    store = ObjectStore.from_uri(uri, options)
    for _ in range(_COMMIT_ATTEMPTS):
        leftovers = _leftovers(store)
        dataset = _open_uninitialized(store)
        if leftovers:
            raise InvalidInputError(
                f"{layout.child_uri(store.uri, layout.MEM_WAL_DIR)} holds {leftovers} of an earlier table at "
                "this place, whose rows would come back; delete that directory first. Where the MemWAL index "
                "was only dropped and those rows belong to the table, make the index again as it was, with "
                "LanceDataset.initialize_mem_wal, and open the table with lancewal.open"
            )
        schema = table_schema(dataset)
        check_key_types(schema)
        check_new_columns(schema)
        check_storable(schema, str(dataset.data_storage_version))
        spec = sharding_spec(schema, bucket, identity, unsharded)
        details = MemWalDetails(
            num_shards=_num_shards(spec),
            sharding_specs=() if spec is None else (spec,),
            maintained_indexes=_checked_indexes(dataset, maintained_indexes),
            maintain_all_indexes=maintained_indexes is None,
            writer_config_defaults=defaults,
        )
        if _commit(dataset, details):
            break
    else:
        raise StorageError(
            f"the table at {uri} changed {_COMMIT_ATTEMPTS} times while it was being initialised; try again"
        )
    if spec is not None:
        _create_shards(store, ShardRouter.for_table(details, schema))
    if upkeep is not None:
        store_upkeep_settings(store, kept_within)
    return Table.open(uri, options)


def check_new_table(
    columns: pa.Schema,
    *,
    bucket: tuple[str, int] | None = None,
    identity: str | None = None,
    unsharded: bool = False,
    maintained_indexes: Sequence[str] | None = None,
    writer_defaults: ShardWriterConfig | Mapping[str, str] | None = None,
    dataset: lance.LanceDataset | None = None,
) -> None:
    """Refuse columns and settings that are unfit for a table with a write path.

    Checked in memory, so that no half-made table is left. ``dataset`` is the existing table with its
    indexes, if there is one.
    """
    _persisted(writer_defaults)
    try:
        tried = lance.write_dataset(columns.empty_table(), f"memory://{secrets.token_hex(16)}")
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InvalidInputError(f"Lance makes no table of these columns: {error}") from error
    schema = table_schema(tried)
    check_key_types(schema)
    check_new_columns(schema)
    sharding_spec(schema, bucket, identity, unsharded)
    _checked_indexes(dataset or tried, maintained_indexes)


def key_marks(place: int) -> dict[str, str]:
    """Lance's metadata for the column at ``place`` of a primary key, counted from 1."""
    return {_KEY_MARK: "true", f"{_KEY_MARK}:position": str(place)}


def with_key(columns: pa.Schema, key: Sequence[str]) -> pa.Schema:
    """``columns`` for a new table: ``key`` marked in this order and not null, all others nullable."""
    return pa.schema(
        [
            field.with_nullable(False).with_metadata(key_marks(list(key).index(field.name) + 1))
            if field.name in key
            else field.with_nullable(True)
            for field in columns
        ]
    )


def create_table(
    uri: str, columns: pa.Schema, storage_options: Mapping[str, str] | None = None, **settings: Any
) -> None:
    """Write an empty Lance table that :func:`initialize` accepts with the same ``settings``."""
    check_new_table(columns, **settings)
    where = ObjectStore.from_uri(uri, storage_options).uri
    with lance_errors(f"create the table at {uri}", commits=True):
        lance.write_dataset(columns.empty_table(), where, storage_options=dict(storage_options or {}) or None)


def _persisted(given: ShardWriterConfig | Mapping[str, str] | None) -> dict[str, str]:
    if given is None:
        return {}
    if isinstance(given, ShardWriterConfig):
        return given.to_defaults()
    for key, value in given.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidInputError(
                f"writer default {key!r}: {value!r} is not text; pass strings as "
                "ShardWriterConfig.to_defaults() gives them, or a ShardWriterConfig"
            )
        if key in _NOT_DEFAULTS:
            raise InvalidInputError(f"{key} names a shard and cannot be a default of all writers")
    # They cannot be changed later, and writers would use other values.
    ShardWriterConfig.check_defaults(given)
    return dict(given)


def _leftovers(store: ObjectStore) -> str | None:
    """What an overwritten or deleted table left behind: Lance clears the index, not the directory."""
    shards = discover_shards(store)
    if shards:
        return f"{len(shards)} shards (such as {shards[0]})"
    return "records" if store.list(layout.OWN_DIR) else None


def _open_uninitialized(store: ObjectStore) -> lance.LanceDataset:
    try:
        BaseTable.open(store.uri, store.storage_options, store=store)
    except NotInitializedError:
        with lance_errors(f"open the table at {store.uri}"):
            dataset = lance.dataset(store.uri, storage_options=dict(store.storage_options) or None)
            # This handle may be newer than the check above. A commit on top of a rival's index would
            # replace it: Lance reports a conflict only for commits after the handle's version.
            if dataset.mem_wal_index_details() is None:
                return dataset
    raise InvalidInputError(
        f"the table at {store.uri} is initialised already; open it with lancewal.open({store.uri!r})"
    )


def sharding_spec(
    schema: TableSchema, bucket: tuple[str, int] | None, identity: str | None, unsharded: bool
) -> ShardingSpec | None:
    """The sharding that :func:`initialize` would give a table; refuses what it would refuse."""
    if (bucket is not None) + (identity is not None) + bool(unsharded) > 1:
        raise InvalidInputError("choose one of bucket, identity and unsharded")
    if unsharded:
        field = ShardingField(_FIELD_ID, (), UNSHARDED, None, "int32")
    elif identity is not None:
        source = _source(schema, identity, IDENTITY)
        field = ShardingField(
            _FIELD_ID,
            (schema.field_ids[identity],),
            IDENTITY,
            None,
            identity_result_type(schema.columns.field(source).type) or "",
        )
    elif bucket is not None:
        column, num_buckets = _bucket_arguments(bucket)
        _source(schema, column, BUCKET)
        parameters = {"num_buckets": str(num_buckets)}
        field = ShardingField(_FIELD_ID, (schema.field_ids[column],), BUCKET, None, "int32", parameters)
    else:
        return None
    return ShardingSpec(_SPEC_ID, (field,))


def _bucket_arguments(bucket: tuple[str, int]) -> tuple[str, int]:
    if not isinstance(bucket, tuple | list) or len(bucket) != 2:
        raise InvalidInputError(f"bucket is {bucket!r}; pass a column and a number, such as ('id', 8)")
    column, num_buckets = bucket
    is_number = isinstance(num_buckets, int) and not isinstance(num_buckets, bool)
    if not is_number or not 1 <= num_buckets <= MAX_BUCKETS:
        raise InvalidInputError(f"the number of buckets must be from 1 to {MAX_BUCKETS}, not {num_buckets!r}")
    return column, num_buckets


def _source(schema: TableSchema, column: str, transform: str) -> str:
    if column not in schema.field_ids:
        raise InvalidInputError(
            f"the table has no column {column!r} to shard by; its columns are {', '.join(schema.names)}"
        )
    check_shard_column(schema.columns.field(column), transform)
    if schema.primary_key and column not in schema.primary_key:
        raise InvalidInputError(
            f"column {column} is not part of the primary key ({', '.join(schema.primary_key)}), so two "
            "versions of a row could land in different shards; shard by a key column, or add "
            f"{column} to the key"
        )
    return column


def _num_shards(spec: ShardingSpec | None) -> int:
    if spec is None or spec.fields[0].transform == IDENTITY:
        return 0
    return int(spec.fields[0].parameters.get("num_buckets", "1"))


def _checked_indexes(dataset: lance.LanceDataset, wanted: Sequence[str] | None) -> tuple[str, ...]:
    if wanted is None:
        return ()
    if isinstance(wanted, str):
        raise InvalidInputError(f"maintained_indexes is the text {wanted!r}; pass a list of index names")
    with lance_errors("read the indexes of the table"):
        names = {description.name for description in dataset.describe_indices()}
    present = sorted(names - {MEM_WAL_INDEX_NAME})
    unknown = [name for name in wanted if name not in present]
    if unknown:
        raise InvalidInputError(
            f"the table has no index {', '.join(map(repr, unknown))}; "
            f"its indexes are {', '.join(present) or 'none'}"
        )
    maintained_specs(dataset, wanted, maintain_all=False)  # refuses what cannot be maintained
    return tuple(dict.fromkeys(wanted))


def _commit(dataset: lance.LanceDataset, details: MemWalDetails) -> bool:
    """Add the index; False if a concurrent commit may have initialised the table.

    ``LanceDataset.initialize_mem_wal`` makes the same commit, but takes only its own settings. Two of
    these commits never both succeed, whichever function makes them.
    """
    index = Index(
        uuid=str(uuid4()),
        name=MEM_WAL_INDEX_NAME,
        fields=[],
        dataset_version=dataset.version,
        fragment_ids=set(),
        index_version=0,
        index_details=(_DETAILS_TYPE, _encode(details)),
    )
    operation = lance.LanceOperation.CreateIndex(new_indices=[index], removed_indices=[])
    try:
        with lance_errors(f"initialise the table at {dataset.uri}", commits=True):
            lance.LanceDataset.commit(dataset, operation, read_version=dataset.version)
    except (StorageError, OutcomeUnknownError) as error:
        cause = error.__cause__
        if isinstance(cause, CommitConflictError):
            logger.debug("initialisation lost a race: %s", cause)
            return False
        if isinstance(error, StorageError):
            raise
        raise OutcomeUnknownError(
            f"initialising the table at {dataset.uri} failed, and may have taken effect nevertheless "
            f"(lancewal.open tells): {cause}"
        ) from cause
    return True


def _encode(details: MemWalDetails) -> bytes:
    message = MemWalIndexDetailsMessage(
        num_shards=details.num_shards,
        maintained_indexes=details.maintained_indexes,
        maintain_all_indexes=details.maintain_all_indexes,
    )
    for spec in details.sharding_specs:
        stored = message.sharding_specs.add(spec_id=spec.spec_id)
        for field in spec.fields:
            added = stored.fields.add(
                field_id=field.field_id,
                source_ids=field.source_ids,
                transform=field.transform,
                result_type=field.result_type,
            )
            for key, value in sorted(field.parameters.items()):
                added.parameters.add(key=key, value=value)
    for key, value in sorted(details.writer_config_defaults.items()):
        message.writer_config_defaults.add(key=key, value=value)
    return bytes(message.SerializeToString(deterministic=True))


def _create_shards(store: ObjectStore, router: ShardRouter) -> None:
    """Write the first manifests of the shards that are known already.

    The table is initialised already, and the first writer of a missing shard creates it: a
    failure here is only a warning.
    """
    shards = router.known_shards()

    def create(shard: Shard) -> None:
        # Nobody can have made a rival either.
        manifests = ShardManifestStore(store, shard.shard_id)
        manifests.initialize_shard(shard.spec_id, shard.field_entries, is_new=True)

    try:
        list(ordered_map(create, shards, min(_SHARD_CREATORS, len(shards))))
    except LanceWalError as error:
        logger.warning("not all %d shards were created, their first writers will: %s", len(shards), error)


def restore(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    backup: str | None = None,
    source_options: Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Table:
    """Make a table at ``destination``, where nothing is yet, of a backup that :meth:`Table.backup` made.

    ``backup`` is its id; the newest one unless told otherwise. Every file is compared with its checksum,
    and the table is verified. ``source_options`` are for the backup's storage, ``storage_options``
    for the table's.
    """
    store = ObjectStore.from_uri(destination, storage_options)
    restore_backup(ObjectStore.from_uri(source, source_options), store, backup)
    return open_table(store.uri, storage_options)
