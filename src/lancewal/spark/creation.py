"""New tables: the columns and the sharding that options ask for, and the options that describe a table.

A write with ``createIfMissing`` and ``CREATE TABLE`` make tables; neither changes the key or the sharding
of a table that exists.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import lance
import pyarrow as pa
from pyspark.sql import types as st

from lancewal.base import BaseTable, lance_errors, table_schema
from lancewal.errors import (
    InvalidInputError,
    NotInitializedError,
    OutcomeUnknownError,
    StorageError,
    TableNotFoundError,
)
from lancewal.format import MemWalDetails, TableSchema
from lancewal.initialization import DEFAULT_BUCKETS, create_table, initialize, with_key
from lancewal.shard import BUCKET, IDENTITY, UNSHARDED, ShardRouter
from lancewal.spark.columns import arrow_schema
from lancewal.spark.options import Options

logger = logging.getLogger(__name__)


def open_for_writing(options: Options, schema: st.StructType, required: Sequence[str] = ()) -> BaseTable:
    """The table that a write goes to; creates it from the rows' ``schema`` if the options ask for it.

    Besides the key, the columns ``required`` of a new table cannot be null.
    Also initialises a Lance table that has no write path yet. An existing table keeps its key and
    sharding, and an option that contradicts them is refused.
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
    except TableNotFoundError as error:
        if not may_create:
            raise InvalidInputError(f"{error}; or set the option createIfMissing") from None
        try:
            columns = table_columns(options, schema, required)
            create_table(uri, columns, options.storage, **_sharding(options))
        except (StorageError, OutcomeUnknownError) as failure:
            if "already exists" not in str(failure.__cause__):
                raise
            logger.info("another writer created the table at %s first", uri)
        return _initialized(options)
    _refuse_contradictions(base.schema, base.uri, options, base.details)
    return base


def table_columns(options: Options, schema: st.StructType, required: Sequence[str] = ()) -> pa.Schema:
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
    # Others become nullable: Spark marks many computed columns "not null".
    columns = with_key(pa.schema(list(fields.values())), key)
    return pa.schema([f.with_nullable(f.nullable and f.name not in required) for f in columns])


def _initialized(options: Options) -> BaseTable:
    try:
        initialize(options.uri, **_sharding(options), storage_options=options.storage)
    except InvalidInputError as error:
        # Another writer may have initialised the table in the meantime.
        try:
            base = BaseTable.open(options.uri, options.storage)
        except NotInitializedError:
            raise error from None
        _refuse_contradictions(base.schema, base.uri, options, base.details)
        return base
    return BaseTable.open(options.uri, options.storage)


def _sharding(options: Options) -> dict[str, Any]:
    """The sharding that the options ask for, as arguments of :func:`initialize`."""
    key = options.names("primaryKey") or []
    number, column = options.number("numBuckets"), options.text("bucketColumn")
    identity, unsharded = options.text("identityColumn"), options.flag("unsharded")
    if unsharded and (number or column or identity):
        raise InvalidInputError("option unsharded excludes numBuckets, bucketColumn and identityColumn")
    if unsharded:
        return {"unsharded": True}
    if identity is not None:
        if number or column:
            raise InvalidInputError(
                "option identityColumn excludes numBuckets and bucketColumn; choose one way"
            )
        return {"identity": identity}
    if column is None and number is None:
        return {}
    column = column or (key[0] if key else None)
    if column is not None:
        return {"bucket": (column, number or DEFAULT_BUCKETS)}
    if number is not None and number > 1:
        raise InvalidInputError("option numBuckets needs bucketColumn, or primaryKey, to hash by")
    return {}


def _refuse_contradictions(
    schema: TableSchema, uri: str, options: Options, details: MemWalDetails | None = None
) -> None:
    """Refuse options that contradict the table; ``details`` is set if it has its write path already."""
    key = options.names("primaryKey")
    if key is not None and tuple(key) != schema.primary_key:
        raise InvalidInputError(
            f"option primaryKey is {', '.join(key)}, but the table at {uri} has "
            f"{', '.join(schema.primary_key) or 'none'}; a table's key cannot be changed"
        )
    if details is not None:
        _refuse_other_sharding(ShardRouter.for_table(details, schema), uri, options)
    for name, size in options.dimensions().items():
        type_ = schema.plain.field(name).type if name in schema.names else None
        if type_ is None or not pa.types.is_fixed_size_list(type_) or type_.list_size != size:
            raise InvalidInputError(f"option vectorDimensions has {name}:{size}, but the table has {type_}")


def _refuse_other_sharding(router: ShardRouter, uri: str, options: Options) -> None:
    number, stored = options.number("numBuckets"), router.num_buckets
    if number is not None and number != stored:
        raise InvalidInputError(
            f"option numBuckets is {number}, but the table at {uri} has "
            f"{f'{stored} of them' if stored else 'none'}; leave it out"
        )
    for name, transform in (("bucketColumn", BUCKET), ("identityColumn", IDENTITY)):
        column = options.text(name)
        if column is not None and (router.transform, router.column) != (transform, column):
            raise InvalidInputError(
                f"option {name} is {column}, but the table at {uri} is sharded by "
                f"{router.transform} of {router.column}; leave it out"
            )
    if options.flag("unsharded") and router.transform != UNSHARDED:
        raise InvalidInputError(
            f"option unsharded is true, but the table at {uri} is sharded by {router.transform} of "
            f"{router.column}; leave it out"
        )


def creation_options(base: BaseTable) -> dict[str, str]:
    """The options that make such a table again."""
    key = base.schema.primary_key
    vectors = [
        f"{field.name}:{field.type.list_size}"
        for field in base.schema.plain
        if pa.types.is_fixed_size_list(field.type) and pa.types.is_floating(field.type.value_type)
    ]
    found = {"primaryKey": _listed(key), "vectorDimensions": _listed(vectors)}
    # Without a sharding spec it is up to writers in Python, which no option says.
    if base.details.sharding_specs:
        router = ShardRouter.for_table(base.details, base.schema)
        if router.transform == BUCKET:
            found |= {"bucketColumn": router.column or "", "numBuckets": str(router.num_buckets)}
        elif router.transform == IDENTITY:
            found |= {"identityColumn": router.column or ""}
        else:
            found |= {"unsharded": "true"}
    return {name: value for name, value in found.items() if value}


def _listed(names: Sequence[str]) -> str:
    """Names as one option, as :meth:`Options.names` reads them."""
    plain = ",".join(names)
    # What begins with a bracket is read as JSON.
    if not plain.lstrip().startswith("[") and Options({"names": plain}).names("names") == list(names):
        return plain
    # Spark 4.1 takes no backslashes out of what its SHOW CREATE TABLE prints.
    return json.dumps(names, ensure_ascii=False)
