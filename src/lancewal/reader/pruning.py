"""Find the shards that can hold rows that match a predicate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.base import BaseTable
from lancewal.format import (
    MemWalDetails,
    ShardIdentity,
    ShardingField,
    TableSchema,
    bucket_of,
    decode_shard_value,
    encode_shard_value,
    result_type_to_arrow,
)
from lancewal.predicate import Predicate
from lancewal.shard import BUCKET, IDENTITY, former_shard_id_of, shard_id_of

Mask = npt.NDArray[np.bool_]


class ShardPruner:
    """Rules shards out by the values that their sharding column can have.

    This works only if the column belongs to the primary key, or if there is no key. Otherwise an update may
    have moved a key to another shard, and a shard without a matching row may still hold the newer version
    that hides one.
    """

    def __init__(self, details: MemWalDetails, schema: TableSchema) -> None:
        names = {number: name for name, number in schema.field_ids.items()}
        self._details = details
        self._schema = schema
        self._fields: dict[int, tuple[ShardingField, str]] = {}
        for spec in details.sharding_specs:
            if len(spec.fields) == 1 and spec.fields[0].transform in (BUCKET, IDENTITY):
                field = spec.fields[0]
                column = names.get(field.source_ids[0]) if len(field.source_ids) == 1 else None
                if column is not None and (not schema.primary_key or column in schema.primary_key):
                    self._fields[spec.spec_id] = (field, column)

    @classmethod
    def of(cls, base: BaseTable, known: ShardPruner | None) -> ShardPruner:
        """The pruner of a base version; ``known`` itself, if sharding and columns are the same."""
        if (
            known is not None
            and known._details.sharding_specs == base.details.sharding_specs
            and known._schema.has_columns_of(base.schema)
        ):
            return known
        return cls(base.details, base.schema)

    def identity_of(self, shard_id: UUID) -> ShardIdentity | None:
        """The identity that the id alone tells: that of a bucket's shard, if there is one spec.

        The id of such a shard is derived from its bucket, and every router, including LanceDB's, uses it.
        (The ids of identity shards are derived from values too, but those values cannot be listed.)
        """
        value = self._buckets_by_id.get(shard_id) or self._buckets_by_former_id.get(shard_id)
        if value is None:
            return None
        ((spec_id, (field, _)),) = self._fields.items()
        return ShardIdentity(shard_id, spec_id, ((field.field_id, value),))

    @cached_property
    def _buckets_by_id(self) -> Mapping[UUID, bytes]:
        return {shard_id_of(BUCKET, value): value for value in self._buckets}

    @cached_property
    def _buckets_by_former_id(self) -> Mapping[UUID, bytes]:
        """Computed only if a table has a shard with another id: most tables have none."""
        return {
            former_shard_id_of(spec_id, field.field_id, value): value
            for spec_id, (field, _) in self._fields.items()
            for value in self._buckets
        }

    @cached_property
    def _buckets(self) -> Sequence[bytes]:
        """The stored values of all buckets; none if ids do not tell buckets."""
        specs = self._details.sharding_specs
        if len(specs) != 1 or not self._fields or specs[0].fields[0].transform != BUCKET:
            return []
        field = specs[0].fields[0]
        type_ = result_type_to_arrow(field.result_type)
        return [encode_shard_value(bucket, type_) for bucket in range(int(field.parameters["num_buckets"]))]

    def key_groups(self, shards: Sequence[ShardIdentity]) -> list[list[ShardIdentity]]:
        """Group the shards so that all versions of a key are in the shards of one group.

        Shards with the same stored value form a group. When Lance creates a shard, it stores the spec but
        no value. Such a shard may hold any key, so then all shards are one group.
        """
        specs = {shard.spec_id for shard in shards}
        if len(shards) > 1 and (len(specs) != 1 or not specs <= self._fields.keys()):
            return [list(shards)]
        groups: dict[bytes | None, list[ShardIdentity]] = {}
        for shard in shards:
            groups.setdefault(self.stored_value(shard), []).append(shard)
        return [list(shards)] if None in groups else list(groups.values())

    def stored_value(self, shard: ShardIdentity) -> bytes | None:
        """The sharding value of all rows of a shard; ``None`` if it may hold any row.

        A shard without a stored value holds nulls, or its creator did not store the value.
        """
        known = self._fields.get(shard.spec_id)
        return None if known is None else dict(shard.values).get(known[0].field_id)

    def matching(self, predicate: Predicate | None) -> KeyLocator | None:
        """A locator for the rows that match the predicate; ``None`` if they can be in any shard."""
        if predicate is None:
            return None
        values = {spec_id: predicate.values_of(name) for spec_id, (_, name) in self._fields.items()}
        placed = {spec_id: (self._fields[spec_id][0], v) for spec_id, v in values.items() if v is not None}
        return KeyLocator(placed) if placed else None

    def may_match(self, shard: ShardIdentity, predicate: Predicate | None) -> bool:
        """Whether a row of the shard can match the predicate."""
        wants, stored = self.matching(predicate), self.stored_value(shard)
        values = None if wants is None else wants.stored_values(shard.spec_id)
        return values is None or stored is None or stored in values

    def locate(self, schema: TableSchema, keys: Sequence[pa.Array]) -> KeyLocator:
        """A locator for keys, which are given as key columns in key order."""
        columns = dict(zip(schema.primary_key, keys, strict=True))
        placed = {
            spec_id: (field, columns[column])
            for spec_id, (field, column) in self._fields.items()
            if column in columns
        }
        return KeyLocator(placed)


class KeyLocator:
    """Tells which of the given keys, or of the values that a filter allows, a shard can hold."""

    def __init__(self, placed: Mapping[int, tuple[ShardingField, pa.Array]]) -> None:
        """``placed`` has, by spec, the sharding field and the column of values that it is computed from."""
        self._placed = placed
        self._values: dict[int, pa.Array] = {}
        self._stored: dict[int, set[bytes]] = {}

    def stored_values(self, spec_id: int) -> set[bytes] | None:
        """The stored values of the shards of a spec that can hold one of the keys; ``None`` if all can."""
        placed = self._placed.get(spec_id)
        if placed is None:
            return None
        stored = self._stored.get(spec_id)
        if stored is None:
            field, column = placed
            type_ = result_type_to_arrow(field.result_type)
            values = _sharding_values(field, column).unique().to_pylist()
            stored = self._stored[spec_id] = {encode_shard_value(value, type_) for value in values}
        return stored

    def keys_in(self, shard: ShardIdentity) -> Mask | None:
        """A mask of the keys that can be in the shard; ``None`` if all can."""
        placed = self._placed.get(shard.spec_id)
        stored = None if placed is None else dict(shard.values).get(placed[0].field_id)
        if placed is None or stored is None:
            return None
        field, column = placed
        values = self._values.get(shard.spec_id)
        if values is None:
            values = self._values[shard.spec_id] = _sharding_values(field, column)
        value = decode_shard_value(stored, result_type_to_arrow(field.result_type))
        # Give the scalar its exact type: Arrow takes a bare number for a signed one.
        value = pa.scalar(value, values.type)
        return np.asarray(pc.equal(values, value).to_numpy(zero_copy_only=False), np.bool_)


def _sharding_values(field: ShardingField, values: pa.Array) -> pa.Array:
    if field.transform == BUCKET:
        return pa.array(bucket_of(values, int(field.parameters["num_buckets"])))
    return values
