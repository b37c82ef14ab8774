"""How a table is divided into shards: as the user asks for, or by the default."""

from __future__ import annotations

from dataclasses import dataclass

from lancewal.errors import InvalidInputError
from lancewal.format import ShardingField, ShardingSpec, TableSchema
from lancewal.shard import (
    BUCKET,
    IDENTITY,
    MAX_BUCKETS,
    UNSHARDED,
    check_shard_column,
    identity_result_type,
)

#: The number of shards of a table with a key, unless the user asks for another.
DEFAULT_BUCKETS = 4
#: The spec id and the field name that Lance uses.
_SPEC_ID = 1
_FIELD_ID = "bucket"


@dataclass(frozen=True)
class Sharding:
    """The sharding that a user asks for; without any setting, the default.

    The default is :data:`DEFAULT_BUCKETS` buckets of the first key column that can be hashed, or one shard
    for a table without such a column.
    """

    bucket: tuple[str, int] | None = None
    identity: str | None = None
    unsharded: bool = False
    by_hand: bool = False

    def spec(self, schema: TableSchema) -> ShardingSpec | None:
        """The spec that the table stores; ``None`` if writers name their shard."""
        asked = (self.bucket is not None, self.identity is not None, self.unsharded, self.by_hand)
        if sum(map(bool, asked)) > 1:
            raise InvalidInputError("choose one of bucket, identity, unsharded and by_hand")
        if self.by_hand:
            return None
        if self.identity is not None:
            return _spec(_identity_field(schema, self.identity))
        bucket = self.bucket if any(asked) else _default_bucket(schema)
        return _spec(
            ShardingField(_FIELD_ID, (), UNSHARDED, None, "int32")
            if bucket is None
            else _bucket_field(schema, bucket)
        )


def num_shards(spec: ShardingSpec | None) -> int:
    """How many shards a table has from the start; 0 if its rows or writers decide."""
    if spec is None or spec.fields[0].transform == IDENTITY:
        return 0
    return int(spec.fields[0].parameters.get("num_buckets", "1"))


def _spec(field: ShardingField) -> ShardingSpec:
    return ShardingSpec(_SPEC_ID, (field,))


def _default_bucket(schema: TableSchema) -> tuple[str, int] | None:
    for name in schema.primary_key:
        try:
            check_shard_column(schema.columns.field(name), BUCKET)
        except InvalidInputError:
            continue
        return name, DEFAULT_BUCKETS
    return None


def _identity_field(schema: TableSchema, column: str) -> ShardingField:
    _check_source(schema, column, IDENTITY)
    result_type = identity_result_type(schema.columns.field(column).type) or ""
    return ShardingField(_FIELD_ID, (schema.field_ids[column],), IDENTITY, None, result_type)


def _bucket_field(schema: TableSchema, bucket: tuple[str, int]) -> ShardingField:
    if not isinstance(bucket, tuple | list) or len(bucket) != 2:
        raise InvalidInputError(f"bucket is {bucket!r}; pass a column and a number, such as ('id', 8)")
    column, num_buckets = bucket
    is_number = isinstance(num_buckets, int) and not isinstance(num_buckets, bool)
    if not is_number or not 1 <= num_buckets <= MAX_BUCKETS:
        raise InvalidInputError(f"the number of buckets must be from 1 to {MAX_BUCKETS}, not {num_buckets!r}")
    _check_source(schema, column, BUCKET)
    parameters = {"num_buckets": str(num_buckets)}
    return ShardingField(_FIELD_ID, (schema.field_ids[column],), BUCKET, None, "int32", parameters)


def _check_source(schema: TableSchema, column: str, transform: str) -> None:
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
