"""Which shards can hold the rows that a predicate is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import pyarrow as pa

from lancewal.format.bucket import bucket_of
from lancewal.format.index_details import MemWalDetails, ShardingField
from lancewal.format.schema import TableSchema
from lancewal.format.shard_manifest import ShardManifest
from lancewal.format.shard_value import encode_shard_value, result_type_to_arrow
from lancewal.predicate import Predicate
from lancewal.sharding import BUCKET, IDENTITY


@dataclass(frozen=True)
class ShardIdentity:
    """What never changes about a shard: its spec, and the stored values of its sharding fields."""

    shard_id: UUID
    spec_id: int
    values: tuple[tuple[str, bytes], ...]

    @classmethod
    def of(cls, manifest: ShardManifest) -> ShardIdentity:
        return cls(
            manifest.shard_id, manifest.shard_spec_id, tuple(sorted(manifest.field_values.items()))
        )


class ShardPruner:
    """Rules shards out by the values that their sharding column can have.

    Only where that column belongs to the primary key, or there is none: elsewhere an
    update may have moved a key to another shard, and a shard that holds no matching row may
    still hold the newer version that hides one.
    """

    def __init__(self, details: MemWalDetails, schema: TableSchema) -> None:
        names = {number: name for name, number in schema.field_ids.items()}
        self._fields: dict[int, tuple[ShardingField, str]] = {}
        for spec in details.sharding_specs:
            if len(spec.fields) == 1 and spec.fields[0].transform in (BUCKET, IDENTITY):
                field = spec.fields[0]
                column = names.get(field.source_ids[0]) if len(field.source_ids) == 1 else None
                if column is not None and (not schema.primary_key or column in schema.primary_key):
                    self._fields[spec.spec_id] = (field, column)

    def keys_have_one_shard(self, shards: Sequence[ShardIdentity]) -> bool:
        """Whether all versions of a key are in the same shard."""
        specs = {shard.spec_id for shard in shards}
        return len(shards) <= 1 or (len(specs) == 1 and specs <= self._fields.keys())

    def may_match(self, shard: ShardIdentity, predicate: Predicate | None) -> bool:
        """Whether a row of the shard can fulfil the predicate."""
        known = self._fields.get(shard.spec_id)
        if predicate is None or known is None:
            return True
        wanted = predicate.values_of(known[1])
        stored = dict(shard.values).get(known[0].field_id)
        # A shard without a stored value holds nulls, or was made by somebody who did not say.
        return wanted is None or stored is None or stored in self._stored_values(known[0], wanted)

    def keys_of(self, shard: ShardIdentity, schema: TableSchema, keys: Sequence[pa.Array]) -> pa.Array | None:
        """Which keys (a mask) can be in the shard; ``None``: all of them."""
        known = self._fields.get(shard.spec_id)
        stored = None if known is None else dict(shard.values).get(known[0].field_id)
        if known is None or stored is None or known[1] not in schema.primary_key:
            return None
        field, column = known
        values = keys[schema.primary_key.index(column)]
        type_ = result_type_to_arrow(field.result_type)
        if field.transform == BUCKET:
            number = int.from_bytes(stored, "little")
            return pa.array(bucket_of(values, int(field.parameters["num_buckets"])) == number)
        return pa.array([encode_shard_value(value, type_) == stored for value in values.to_pylist()])

    @staticmethod
    def _stored_values(field: ShardingField, values: pa.Array) -> set[bytes]:
        type_ = result_type_to_arrow(field.result_type)
        if field.transform == BUCKET:
            values = pa.array(bucket_of(values, int(field.parameters["num_buckets"]))).unique()
        return {encode_shard_value(value, type_) for value in values.to_pylist()}
