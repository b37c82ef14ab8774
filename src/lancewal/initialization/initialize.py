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

from lancewal.base import (
    check_key_columns,
    declare_key,
    key_marks,
    lance_errors,
    locate,
    open_base,
    table_schema,
)
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
    MemWalDetails,
    MemWalIndexDetailsMessage,
    TableSchema,
    check_key_types,
    check_new_columns,
)
from lancewal.index import is_text, is_vector, maintained_specs
from lancewal.initialization.sharding import Sharding, num_shards
from lancewal.maintenance import UpkeepSettings, store_upkeep_settings
from lancewal.shard import Shard, ShardManifestStore, ShardRouter, discover_shards
from lancewal.sstable import check_storable
from lancewal.storage import ObjectStore, layout, ordered_map
from lancewal.table import Table

logger = logging.getLogger(__name__)

_DETAILS_TYPE = "/lance.table.MemWalIndexDetails"
#: Never stored: these keys select a shard and are not settings of its writer.
_NOT_DEFAULTS = ("shard_id", "shard_spec_id")

_COMMIT_ATTEMPTS = 5
#: Creating a shard waits for the disk or the network, so many are created at once.
_SHARD_CREATORS = 16


def initialize(
    uri_or_dataset: str | os.PathLike[str] | lance.LanceDataset,
    *,
    key: str | Sequence[str] | None = None,
    bucket: tuple[str, int] | None = None,
    identity: str | None = None,
    unsharded: bool = False,
    by_hand: bool = False,
    maintained_indexes: Sequence[str] | None = None,
    writer_defaults: ShardWriterConfig | Mapping[str, str] | None = None,
    upkeep: UpkeepSettings | Mapping[str, Any] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Table:
    """Give an existing Lance table a streaming write path; call it once per table.

    :func:`create` makes a new table.

    ``key`` names the primary key, one column or several in order, of a table that has none yet. All rows
    are checked first: a key has no nulls and no duplicates. Nullable columns become non-null, in the commit
    that declares the key. Without a key, rows can only be appended; with a key they can also be updated and
    deleted. A key cannot be changed later.

    Sharding is optional. By default rows go to 4 buckets of the first key column that can be hashed, or to a
    single shard if there is none. ``bucket=("id", 8)`` hashes a column into 1 to 1024 shards.
    ``identity="tenant"`` makes a shard for every value of a column. ``unsharded=True`` makes one
    shard for all rows. With ``by_hand=True`` writers name their shard; see ``Table.shard_writer``.
    If the table has a primary key, the sharding column must be part of it. Otherwise two versions of a row
    could be in different shards, and nothing would tell which one is newer.

    ``maintained_indexes`` names the indexes that writers keep up to date on rows that are not
    compacted yet. The default is all indexes, including those created later; ``[]`` is none.

    A LanceDB application works as before if the table has a key. LanceDB also reads the write path, through
    the vector and text indexes that the table names as maintained. By default the table names all of them,
    and also those that are created later under the names that LanceDB gives them. LanceDB supports vector
    queries, text queries with ``fts_columns``, and hybrid queries with ``use_lsm(False)``; see the page
    *Beside LanceDB*.

    ``writer_defaults`` is stored in the table. Every later writer applies it, unless the writer gets
    another value. A mapping holds the persisted form (``ShardWriterConfig.to_defaults``)
    and may have further keys of your own; they are kept.

    ``upkeep`` has the limits that upkeep keeps the table within, as a whole or as a mapping of single
    settings; ``Table.set_upkeep`` changes it.

    Blob columns are refused, and so are column names that Lance or lancewal's reads cannot handle.

    Everything is checked first: after an :class:`InvalidInputError` the table is as it was.
    :func:`uninitialize` takes the write path away again.

    >>> import tempfile, lance, lancewal, pyarrow as pa
    >>> uri = tempfile.mkdtemp() + "/table"
    >>> _ = lance.write_dataset(pa.table({"id": [1, 2], "text": ["a", "b"]}), uri)
    >>> table = lancewal.initialize(uri, key="id", writer_defaults={"durable_write": "false"})
    >>> table.primary_key, len(table.shards()), table.details.writer_config_defaults
    (('id',), 4, {'durable_write': 'false'})
    """
    sharding = Sharding(bucket, identity, unsharded, by_hand)
    wanted = key_columns(key)
    defaults = persisted_defaults(writer_defaults)
    kept_within = UpkeepSettings.of(upkeep)
    uri, options = locate(uri_or_dataset, storage_options)
    store = ObjectStore.from_uri(uri, options)
    for _ in range(_COMMIT_ATTEMPTS):
        leftovers = leftovers_at(store)
        dataset = _open_uninitialized(store)
        if leftovers:
            raise leftover_error(store, leftovers)
        schema = table_schema(dataset)
        if wanted and wanted != schema.primary_key:
            check_new_table(marked_key(dataset.schema, wanted), sharding, maintained_indexes, dataset)
            declare_key(dataset, wanted)
            schema = table_schema(dataset)
        check_key_types(schema)
        check_new_columns(schema)
        check_storable(schema, str(dataset.data_storage_version))
        spec = sharding.spec(schema)
        details = MemWalDetails(
            num_shards=num_shards(spec),
            sharding_specs=() if spec is None else (spec,),
            maintained_indexes=_maintained(dataset, maintained_indexes),
            maintain_all_indexes=maintained_indexes is None,
            writer_config_defaults=defaults,
        )
        if commit_index(dataset, details):
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


def key_columns(key: str | Sequence[str] | None) -> tuple[str, ...]:
    """The columns of a key as a tuple, from the argument of a caller; empty without a key."""
    if key is None:
        return ()
    if not key or not isinstance(key, Sequence):
        raise InvalidInputError(f"the key is {key!r}; name its columns, or leave it out")
    return (key,) if isinstance(key, str) else tuple(key)


def marked_key(columns: pa.Schema, key: Sequence[str]) -> pa.Schema:
    """``columns`` with ``key`` marked as the primary key, in this order and not null."""
    if not key:
        return columns
    check_key_columns(columns, key)
    for place, name in enumerate(key, 1):
        position = columns.get_field_index(name)
        field = columns.field(position)
        metadata = {**(field.metadata or {}), **key_marks(place)}
        columns = columns.set(position, field.with_nullable(False).with_metadata(metadata))
    return columns


def check_new_table(
    columns: pa.Schema,
    sharding: Sharding,
    maintained_indexes: Sequence[str] | None = None,
    dataset: lance.LanceDataset | None = None,
) -> TableSchema:
    """Refuse columns and a sharding that are unfit for a table with a write path; return the table's schema.

    The check happens in memory, so that it leaves no half-made table. ``dataset`` is the existing table with
    its indexes, if there is one.
    """
    try:
        tried = lance.write_dataset(columns.empty_table(), f"memory://{secrets.token_hex(16)}")
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InvalidInputError(f"Lance makes no table of these columns: {error}") from error
    schema = table_schema(tried)
    check_key_types(schema)
    check_new_columns(schema)
    sharding.spec(schema)
    _maintained(dataset or tried, maintained_indexes)
    return schema


def persisted_defaults(given: ShardWriterConfig | Mapping[str, str] | None) -> dict[str, str]:
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
    # Refuse invalid defaults now: they cannot be changed later, and writers would use other values instead.
    ShardWriterConfig.check_defaults(given)
    return dict(given)


def leftover_error(store: ObjectStore, leftovers: str) -> InvalidInputError:
    return InvalidInputError(
        f"{layout.child_uri(store.uri, layout.MEM_WAL_DIR)} holds {leftovers} of an earlier table at "
        "this place, whose rows would come back; delete that directory first. Where uninitialize was "
        "interrupted, call it again. Where the MemWAL index "
        "was only dropped and those rows belong to the table, make the index again as it was, with "
        "LanceDataset.initialize_mem_wal, and open the table with lancewal.open"
    )


def leftovers_at(store: ObjectStore) -> str | None:
    """What an overwritten or deleted table left behind: Lance clears the index, not the directory."""
    shards = discover_shards(store)
    if shards:
        return f"{len(shards)} shards (such as {shards[0]})"
    return "records" if store.list(layout.OWN_DIR) else None


def _open_uninitialized(store: ObjectStore) -> lance.LanceDataset:
    try:
        open_base(store)
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


def _maintained(dataset: lance.LanceDataset, wanted: Sequence[str] | None) -> tuple[str, ...]:
    """The names of maintained indexes that the table stores: those in ``wanted``, or all.

    If all indexes are maintained, Lance and lancewal need no names. LanceDB does: it refuses to search a
    column whose index the table does not name. So all are named, including those that do not exist yet.
    """
    with lance_errors("read the indexes of the table"):
        present = [each.name for each in dataset.describe_indices() if each.name != MEM_WAL_INDEX_NAME]
    if wanted is None:
        named = [spec.name for spec in maintained_specs(dataset, (), maintain_all=True)]
        searched = [field.name for field in dataset.schema if is_text(field.type) or is_vector(field.type)]
        later = [f"{name}_idx" for name in searched]
        return tuple(dict.fromkeys([*named, *(name for name in later if name not in present)]))
    if isinstance(wanted, str):
        raise InvalidInputError(f"maintained_indexes is the text {wanted!r}; pass a list of index names")
    unknown = [name for name in wanted if name not in present]
    if unknown:
        raise InvalidInputError(
            f"the table has no index {', '.join(map(repr, unknown))}; "
            f"its indexes are {', '.join(sorted(present)) or 'none'}"
        )
    maintained_specs(dataset, wanted, maintain_all=False)  # refuses what cannot be maintained
    return tuple(dict.fromkeys(wanted))


def commit_index(dataset: lance.LanceDataset, details: MemWalDetails) -> bool:
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
    for shard_id, generation in details.compacted.items():
        message.compacted_sstables.add(generation=generation).shard_id.uuid = shard_id.bytes
    for key, value in sorted(details.writer_config_defaults.items()):
        message.writer_config_defaults.add(key=key, value=value)
    return bytes(message.SerializeToString(deterministic=True))


def _create_shards(store: ObjectStore, router: ShardRouter) -> None:
    """Write the first manifests of the shards that are known from the start.

    A failure here is only a warning: the table is initialised already, and the first writer of a missing
    shard creates it.
    """
    shards = router.known_shards()

    def create(shard: Shard) -> None:
        # ``is_new``: the table had no shards before, so there can be no other shard for the same value.
        manifests = ShardManifestStore(store, shard.shard_id)
        manifests.initialize_shard(shard.spec_id, shard.field_entries, is_new=True)

    try:
        list(ordered_map(create, shards, min(_SHARD_CREATORS, len(shards))))
    except LanceWalError as error:
        logger.warning("not all %d shards were created, their first writers will: %s", len(shards), error)
