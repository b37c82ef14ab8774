"""Making the table that a write goes to, when it is not there yet."""

from __future__ import annotations

import logging
from typing import Any

import lance
import pyarrow as pa
from pyspark.sql import types as st

from lancewal.base import BaseTable, lance_errors, table_schema
from lancewal.errors import InvalidInputError, NotInitializedError, OutcomeUnknownError, StorageError
from lancewal.format import PRIMARY_KEY_KEY, MemWalDetails, TableSchema
from lancewal.initialization import check_new_table, initialize
from lancewal.shard import BUCKET, IDENTITY, ShardRouter
from lancewal.spark.columns import arrow_schema
from lancewal.spark.options import Options
from lancewal.storage import ObjectStore

logger = logging.getLogger(__name__)

DEFAULT_BUCKETS = 8
#: Lance's own, which every table has.
_VERSIONS_DIR = "_versions"
_POSITION_KEY = b"lance-schema:unenforced-primary-key:position"


def open_for_writing(options: Options, schema: st.StructType) -> BaseTable:
    """The table that a write goes to; created from the rows' ``schema`` if that is asked for.

    Also initialises a Lance table that has no write path yet. Where the table is there
    already, its own key and sharding count, and an option that contradicts them is refused.
    """
    uri, may_create = options.uri, options.flag("createIfMissing")
    try:
        base = BaseTable.open(uri, options.storage)
    except NotInitializedError:
        if not may_create:
            raise
        with lance_errors(f"open the table at {uri}"):
            dataset = lance.dataset(uri, storage_options=options.storage)
        _refuse_contradictions(table_schema(dataset), uri, options)
        return _initialized(options)
    except InvalidInputError as error:
        if not _is_missing(options):
            raise
        if not may_create:
            raise InvalidInputError(f"{error}; or set the option createIfMissing") from None
        _create(options, table_columns(options, schema))
        return _initialized(options)
    _refuse_contradictions(base.schema, base.uri, options, base.details)
    return base


def _is_missing(options: Options) -> bool:
    return not ObjectStore.from_uri(options.uri, options.storage).list(_VERSIONS_DIR)


def table_columns(options: Options, schema: st.StructType) -> pa.Schema:
    """The columns of a new table for rows of ``schema``: key columns marked, vectors of fixed size."""
    key = options.names("primaryKey") or []
    change_column = options.text("changeTypeColumn")
    dimensions = options.dimensions()
    fields = {f.name: f for f in arrow_schema(schema) if f.name != change_column}
    for kind, names in (("primaryKey", key), ("vectorDimensions", list(dimensions))):
        unknown = [name for name in names if name not in fields]
        if unknown:
            raise InvalidInputError(f"option {kind} names {', '.join(unknown)}, which the rows do not have")
    for name, size in dimensions.items():
        type_ = fields[name].type
        if not pa.types.is_list(type_) or not pa.types.is_floating(type_.value_type):
            raise InvalidInputError(f"column {name} is {type_}; a vector is an array of float or double")
        fields[name] = fields[name].with_type(pa.list_(type_.value_type, size))
    columns = []
    for name, field in fields.items():
        if name in key:
            marks = {PRIMARY_KEY_KEY: b"true", _POSITION_KEY: str(key.index(name) + 1).encode()}
            columns.append(field.with_nullable(False).with_metadata(marks))
        else:
            # Spark says "not null" of many computed columns; a delete needs nulls.
            columns.append(field.with_nullable(True))
    return pa.schema(columns)


def _create(options: Options, columns: pa.Schema) -> None:
    check_new_table(columns, **_sharding(options))
    uri = ObjectStore.from_uri(options.uri, options.storage).uri
    try:
        with lance_errors(f"make a table at {options.uri}", commits=True):
            lance.write_dataset(columns.empty_table(), uri, storage_options=options.storage or None)
    except (StorageError, OutcomeUnknownError) as error:
        if "already exists" not in str(error.__cause__):
            raise
        logger.info("another writer created the table at %s first", options.uri)


def _initialized(options: Options) -> BaseTable:
    try:
        initialize(options.uri, **_sharding(options), storage_options=options.storage)
    except InvalidInputError as error:
        # Another writer may have done it meanwhile.
        try:
            base = BaseTable.open(options.uri, options.storage)
        except NotInitializedError:
            raise error from None
        _refuse_contradictions(base.schema, base.uri, options, base.details)
        return base
    return BaseTable.open(options.uri, options.storage)


def _sharding(options: Options) -> dict[str, Any]:
    """The sharding that the options ask for, as :func:`initialize` takes it."""
    identity = options.text("identityColumn")
    if identity is not None and (options.text("numBuckets") or options.text("bucketColumn")):
        raise InvalidInputError("option identityColumn excludes numBuckets and bucketColumn; choose one way")
    bucket = _bucket(options) if identity is None else None
    return {"bucket": bucket, "identity": identity, "unsharded": identity is None and bucket is None}


def _bucket(options: Options) -> tuple[str, int] | None:
    key = options.names("primaryKey") or []
    number = options.number("numBuckets")
    column = options.text("bucketColumn") or (key[0] if key else None)
    if column is None:
        if number is not None and number > 1:
            raise InvalidInputError("option numBuckets needs bucketColumn, or primaryKey, to hash by")
        return None
    return column, number or DEFAULT_BUCKETS


def _refuse_contradictions(
    schema: TableSchema, uri: str, options: Options, details: MemWalDetails | None = None
) -> None:
    """``details`` are those of a table that has its write path already."""
    key = options.names("primaryKey")
    if key is not None and tuple(key) != schema.primary_key:
        raise InvalidInputError(
            f"option primaryKey is {', '.join(key)}, but the table at {uri} has "
            f"{', '.join(schema.primary_key) or 'none'}; a table's key cannot be changed"
        )
    if details is not None:
        _refuse_other_sharding(details, schema, uri, options)
    for name, size in options.dimensions().items():
        type_ = schema.plain.field(name).type if name in schema.names else None
        if type_ is None or not pa.types.is_fixed_size_list(type_) or type_.list_size != size:
            raise InvalidInputError(f"option vectorDimensions has {name}:{size}, but the table has {type_}")


def _refuse_other_sharding(details: MemWalDetails, schema: TableSchema, uri: str, options: Options) -> None:
    router = ShardRouter.for_table(details, schema)
    number, stored = options.number("numBuckets"), router.num_buckets
    if number is not None and (router.transform != BUCKET or number != stored):
        has = f"{stored} of them" if router.transform == BUCKET else "none"
        raise InvalidInputError(
            f"option numBuckets is {number}, but the table at {uri} has {has}; leave it out"
        )
    for name, transform in (("bucketColumn", BUCKET), ("identityColumn", IDENTITY)):
        column = options.text(name)
        if column is not None and (router.transform, router.column) != (transform, column):
            raise InvalidInputError(
                f"option {name} is {column}, but the table at {uri} is sharded by "
                f"{router.transform} of {router.column}; leave it out"
            )
