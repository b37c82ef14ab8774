"""Making the table that a write goes to, when it is not there yet."""

from __future__ import annotations

import logging

import lance
import pyarrow as pa
from pyspark.sql import types as st

from lancewal.base import BaseTable
from lancewal.errors import InvalidInputError, NotInitializedError
from lancewal.format.schema import PRIMARY_KEY_KEY
from lancewal.initialization import initialize
from lancewal.objects import ObjectStore
from lancewal.spark.columns import arrow_schema
from lancewal.spark.options import Options

logger = logging.getLogger(__name__)

DEFAULT_BUCKETS = 8
_POSITION_KEY = b"lance-schema:unenforced-primary-key:position"


def open_for_writing(options: Options, schema: st.StructType) -> BaseTable:
    """The table that a write goes to; created from the rows' ``schema`` if that is asked for.

    Also initialises a Lance table that has no write path yet. Where the table is there
    already, its own key and sharding count, and an option that contradicts them is refused.
    """
    try:
        base = BaseTable.open(options.uri, options.storage)
    except NotInitializedError:
        if not options.flag("createIfMissing"):
            raise
        return _initialized(options)
    except InvalidInputError as error:
        if not options.flag("createIfMissing"):
            raise InvalidInputError(f"{error}; or set the option createIfMissing") from None
        _create(options, schema)
        return _initialized(options)
    _refuse_contradictions(base, options)
    return base


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


def _create(options: Options, schema: st.StructType) -> None:
    empty = table_columns(options, schema).empty_table()
    try:
        lance.write_dataset(
            empty,
            ObjectStore.from_uri(options.uri, options.storage).uri,
            storage_options=options.storage or None,
        )
    except OSError as error:
        if "already exists" not in str(error):
            raise
        logger.info("another writer created the table at %s first", options.uri)


def _initialized(options: Options) -> BaseTable:
    identity = options.text("identityColumn")
    bucket = _bucket(options)
    try:
        initialize(
            options.uri,
            bucket=bucket if identity is None else None,
            identity=identity,
            unsharded=identity is None and bucket is None,
            storage_options=options.storage,
        )
    except InvalidInputError as error:
        # Another writer may have done it meanwhile.
        try:
            base = BaseTable.open(options.uri, options.storage)
        except NotInitializedError:
            raise error from None
        _refuse_contradictions(base, options)
        return base
    return BaseTable.open(options.uri, options.storage)


def _bucket(options: Options) -> tuple[str, int] | None:
    key = options.names("primaryKey") or []
    number = options.number("numBuckets")
    column = options.text("bucketColumn") or (key[0] if key else None)
    if column is None:
        if number is not None and number > 1:
            raise InvalidInputError("option numBuckets needs bucketColumn, or primaryKey, to hash by")
        return None
    return column, number or DEFAULT_BUCKETS


def _refuse_contradictions(base: BaseTable, options: Options) -> None:
    key = options.names("primaryKey")
    if key is not None and tuple(key) != base.schema.primary_key:
        raise InvalidInputError(
            f"option primaryKey is {', '.join(key)}, but the table at {base.uri} has "
            f"{', '.join(base.schema.primary_key) or 'none'}; a table's key cannot be changed"
        )
    number = options.number("numBuckets")
    specs = base.details.sharding_specs
    stored = specs[-1].fields[0].parameters.get("num_buckets") if specs and specs[-1].fields else None
    if number is not None and stored is not None and int(stored) != number:
        raise InvalidInputError(
            f"option numBuckets is {number}, but the table at {base.uri} has {stored}; leave it out"
        )
    for name, size in options.dimensions().items():
        type_ = base.schema.plain.field(name).type if name in base.schema.names else None
        if type_ is None or not pa.types.is_fixed_size_list(type_) or type_.list_size != size:
            raise InvalidInputError(f"option vectorDimensions has {name}:{size}, but the table has {type_}")
