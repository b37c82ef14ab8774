"""Create new tables: with a key and a write path in one call, or from a backup."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import lance
import pyarrow as pa
from lance.fragment import write_fragments

from lancewal.base import check_unique, lance_errors
from lancewal.config import ShardWriterConfig
from lancewal.errors import InvalidInputError, OutcomeUnknownError, StorageError
from lancewal.format import no_rows
from lancewal.initialization.initialize import (
    check_new_table,
    initialize,
    key_columns,
    leftover_error,
    leftovers_at,
    marked_key,
    persisted_defaults,
)
from lancewal.initialization.sharding import Sharding
from lancewal.maintenance import restore_backup
from lancewal.storage import ObjectStore
from lancewal.table import Table, open_table
from lancewal.writer import is_stream, new_table_of

logger = logging.getLogger(__name__)


def create(
    uri: str | os.PathLike[str],
    schema_or_data: Any,
    *,
    key: str | Sequence[str] | None = None,
    bucket: tuple[str, int] | None = None,
    identity: str | None = None,
    unsharded: bool = False,
    by_hand: bool = False,
    writer_defaults: ShardWriterConfig | Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Table:
    """Make a new Lance table with a streaming write path, and write the rows that are given.

    ``schema_or_data`` is an Arrow schema, or rows as :meth:`TableWriter.put` takes them: dicts, dataclasses,
    pandas, polars, numpy, Arrow. Arrow data and schemas keep their types. In other rows, lists of floats
    that all have the same length become vectors of ``float32``, which Lance can search.

    ``key`` names the primary key, one column or several in order. With a key, writers can update and delete
    rows by key; its columns become non-null. Without a key, rows can only be appended. Sharding, writer
    defaults and storage options are those of :func:`initialize`, and all of them are optional.

    The call is refused if a table already exists, or if rows have the same key twice. A call that was killed
    may leave the table without its write path: :func:`initialize` adds it.

    >>> import tempfile, lancewal
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1, "vector": [0.5, 1.0]}], key="id")
    >>> table.schema.field("vector").type, table.primary_key
    (FixedSizeListType(fixed_size_list<item: float>[2]), ('id',))
    >>> with table.writer() as writer:
    ...     _ = writer.put({"id": 2, "vector": [0.1, 0.2]})
    >>> table.count_rows()
    2
    """
    sharding = Sharding(bucket, identity, unsharded, by_hand)
    persisted_defaults(writer_defaults)
    later = isinstance(schema_or_data, pa.RecordBatchReader) or (
        is_stream(schema_or_data) and not isinstance(schema_or_data, pa.Schema)
    )
    if isinstance(schema_or_data, pa.Schema):
        rows = no_rows(schema_or_data)
    elif isinstance(schema_or_data, pa.RecordBatchReader):
        rows = no_rows(schema_or_data.schema)
    elif later:
        raise InvalidInputError(
            "rows that come one by one do not tell the table's columns; create it with a schema, "
            "and put them with table.writer()"
        )
    else:
        rows = new_table_of(schema_or_data)
    names = key_columns(key)
    columns = marked_key(rows.schema, names)
    marked = check_new_table(columns, sharding).primary_key
    if names and marked != names:
        raise InvalidInputError(
            f"the columns are marked with the key {', '.join(marked)}, not {', '.join(names)}; leave the key "
            "out, or the marks"
        )
    if names:
        check_unique(lambda: rows.to_batches(), names)
    _write(uri, rows.cast(columns), storage_options)
    table = initialize(
        uri,
        bucket=bucket,
        identity=identity,
        unsharded=unsharded,
        by_hand=by_hand,
        writer_defaults=writer_defaults,
        storage_options=storage_options,
    )
    if later:
        with table.writer() as writer:
            writer.put(schema_or_data)
    return table


def with_key(columns: pa.Schema, key: Sequence[str]) -> pa.Schema:
    """``columns`` for a new table: ``key`` is marked in this order and not null, all others are nullable."""
    nullable = pa.schema([field.with_nullable(True).remove_metadata() for field in columns])
    return marked_key(nullable, key)


def create_table(
    uri: str | os.PathLike[str],
    columns: pa.Schema,
    storage_options: Mapping[str, str] | None = None,
    *,
    writer_defaults: ShardWriterConfig | Mapping[str, str] | None = None,
    maintained_indexes: Sequence[str] | None = None,
    **sharding: Any,
) -> None:
    """Write an empty Lance table that :func:`initialize` accepts with the same settings."""
    persisted_defaults(writer_defaults)
    check_new_table(columns, Sharding(**sharding), maintained_indexes)
    _write(uri, columns.empty_table(), storage_options)


def _write(uri: str | os.PathLike[str], rows: pa.Table, storage_options: Mapping[str, str] | None) -> None:
    """Write the first version of a table; refuse a place that already has one.

    Lance's ``write_dataset`` checks for a table before it writes rows, but not when it commits. If two calls
    create a table at the same time, the later one would overwrite the earlier table, its write path and all
    its rows.
    """
    store = ObjectStore.from_uri(uri, storage_options)
    options = dict(storage_options or {}) or None
    leftovers = leftovers_at(store)
    # Check for a table after listing the shards: shards of a table that is being created are no leftovers.
    if _maker(store.uri, options) is not None:
        raise _exists(store)
    if leftovers:
        raise leftover_error(store, leftovers)
    made = None
    try:
        with lance_errors(f"create the table at {os.fspath(uri)}", commits=True):
            made = write_fragments(
                rows, store.uri, mode="create", return_transaction=True, storage_options=options
            )
            # One attempt only: a retry would overwrite a table that was created meanwhile.
            lance.LanceDataset.commit(store.uri, made, max_retries=0, storage_options=options)
    except (StorageError, OutcomeUnknownError) as error:
        maker = _maker(store.uri, options)
        if maker is None:
            raise
        if made is None or maker != made.uuid:
            raise _exists(store) from error
        logger.info("the reply to the commit of %s was lost, the table is there: %s", store.uri, error)


def _exists(store: ObjectStore) -> InvalidInputError:
    return InvalidInputError(
        f"a table already exists at {store.uri}; open it with lancewal.open, or give it a write path with "
        "lancewal.initialize"
    )


def _maker(uri: str, options: dict[str, str] | None) -> str | None:
    """The id of the transaction that created the table; empty if unknown, ``None`` if there is no table."""
    try:
        dataset = lance.dataset(uri, storage_options=options)
    except (OSError, ValueError):
        return None
    try:
        first = dataset.read_transaction(1)
    except (OSError, ValueError):
        return ""  # the first version was cleaned up
    return "" if first is None else str(first.uuid)


def restore(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    backup: str | None = None,
    source_options: Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Table:
    """Restore a backup that :meth:`Table.backup` made to ``destination``, which must be empty.

    ``backup`` is its id; the default is the newest one. Every file is compared with its checksum, and the
    table is verified. ``source_options`` are for the backup's storage, ``storage_options`` for the table's.

    >>> import tempfile, lancewal
    >>> place = tempfile.mkdtemp()
    >>> table = lancewal.create(place + "/t", [{"id": 1}], key="id")
    >>> _ = table.backup(place + "/backups")
    >>> with table.writer() as writer:
    ...     _ = writer.put({"id": 2})
    >>> lancewal.restore(place + "/backups", place + "/restored").count_rows()
    1
    """
    store = ObjectStore.from_uri(destination, storage_options)
    restore_backup(ObjectStore.from_uri(source, source_options), store, backup)
    return open_table(store.uri, storage_options)
