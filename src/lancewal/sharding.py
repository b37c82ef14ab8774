"""Which shard a row belongs to, and which shards a table has.

Lance evaluates a sharding spec to a value (a bucket number, or the column's own value)
and leaves open which shard holds it. Here the shard's id is computed from the spec and
the value, so that every process on every machine sends a row to the same shard without
asking anyone. The value is also written into the shard's first manifest, where Lance
and our own readers find it when they skip shards.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid5

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal import layout
from lancewal.errors import InvalidInputError
from lancewal.format.bucket import bucket_of, check_bucket_type
from lancewal.format.index_details import MemWalDetails, ShardingField, ShardingSpec
from lancewal.format.schema import TableSchema, field_id
from lancewal.format.shard_manifest import ShardFieldEntry, ShardManifest
from lancewal.format.shard_value import decode_shard_value, encode_shard_value, result_type_to_arrow
from lancewal.manifest import ShardManifestStore
from lancewal.objects import ObjectStore
from lancewal.parallel import ordered_map

logger = logging.getLogger(__name__)

BUCKET = "bucket"
IDENTITY = "identity"
UNSHARDED = "unsharded"

MAX_BUCKETS = 1024

#: Manifests read at a time where each read is a network round trip.
_REMOTE_READERS = 16

#: Part of the format: another value would send every row to another shard.
_NAMESPACE = UUID("5f0b2a52-3d0c-4f0e-9a53-0d6f3f6a8c1e")

_UNSHARDED_VALUE = 0


def shard_id_of(spec_id: int, field: str, value: bytes | None) -> UUID:
    """The id of the shard that holds one stored sharding value; ``None`` is null.

    >>> shard_id_of(1, "bucket", bytes(4))
    UUID('02c4dbd5-02e0-5e2a-b6a4-86ca43ae2e65')
    """
    return uuid5(_NAMESPACE, f"{spec_id}/{field}/{'null' if value is None else value.hex()}")


@dataclass(frozen=True)
class Shard:
    """A shard by its id and what its first manifest says: spec and field values."""

    shard_id: UUID
    spec_id: int
    field_entries: tuple[ShardFieldEntry, ...]

    def create(self, store: ObjectStore, *, first_generation: int | None = None) -> ShardManifest:
        """Write the shard's first manifest unless it is there; an equal one is left as it is."""
        return ShardManifestStore(store, self.shard_id).initialize_shard(
            self.spec_id, self.field_entries, first_generation=first_generation
        )


class ShardRouter:
    """Sends rows to shards by the table's sharding spec.

    >>> from lancewal.format.index_details import MemWalDetails, ShardingField, ShardingSpec
    >>> field = ShardingField("bucket", (0,), "bucket", None, "int32", {"num_buckets": "8"})
    >>> id_field = pa.field("id", pa.int32(), metadata={"lance:field_id": "0"})
    >>> schema = TableSchema(pa.schema([id_field]), ("id",))
    >>> router = ShardRouter.for_table(MemWalDetails(8, (ShardingSpec(1, (field,)),)), schema)
    >>> batch = pa.record_batch({"id": pa.array([1, 2, 1], pa.int32())})
    >>> [(shard == router.shard_of(1), rows.num_rows) for shard, rows in router.split(batch)]
    [(True, 2), (False, 1)]
    """

    def __init__(self, spec: ShardingSpec, field: ShardingField, source: pa.Field | None) -> None:
        self.spec_id = spec.spec_id
        self._spec = spec
        self._field = field
        self._source = source
        self._value_type = result_type_to_arrow(field.result_type)
        self._num_buckets = _num_buckets(field) if field.transform == BUCKET else 0
        self._only: Shard | None = None
        # Identity values recur from batch to batch; hashing one costs some microseconds.
        self._shard = functools.lru_cache(maxsize=1 << 16)(self._compute_shard)

    @classmethod
    def for_table(cls, details: MemWalDetails, schema: TableSchema) -> ShardRouter:
        """The router of the table's newest spec; refuses a table whose shards are chosen by hand."""
        if not details.sharding_specs:
            raise InvalidInputError(
                "this table has no sharding spec, so nothing says which shard a row belongs to; "
                "write to a shard of your choice with table.shard_writer(shard_id)"
            )
        spec = max(details.sharding_specs, key=lambda each: each.spec_id)
        if len(spec.fields) != 1 or spec.fields[0].transform not in (BUCKET, IDENTITY, UNSHARDED):
            shown = [each.transform or each.expression for each in spec.fields]
            raise InvalidInputError(
                f"sharding spec {spec.spec_id} has the fields {shown}; rows can be routed by one bucket, "
                "identity or unsharded field. Write with table.shard_writer(shard_id) instead"
            )
        field = spec.fields[0]
        source = None
        if field.transform != UNSHARDED:
            sources = {field_id(column): column for column in schema.columns}
            if len(field.source_ids) != 1 or field.source_ids[0] not in sources:
                raise InvalidInputError(
                    f"sharding spec {spec.spec_id} routes by field {list(field.source_ids)}, which is no "
                    "column of the table (any more): it was dropped, got another type, or is nested"
                )
            source = sources[field.source_ids[0]]
            check_shard_column(source, str(field.transform))
        return cls(spec, field, source)

    def adopting(self, present: Sequence[ShardManifest]) -> ShardRouter:
        """The same router, but for the shard that others made first where there is only one.

        Lance lets the first writer of an unsharded table choose any shard id. Rows that went
        to another shard than those would be neither older nor newer than they are.
        """
        if self.transform != UNSHARDED or not present:
            return self
        own = self._shard(_UNSHARDED_VALUE).shard_id
        others = [manifest for manifest in present if manifest.shard_id != own]
        if len(others) != len(present):
            return self
        if len(others) > 1:
            raise InvalidInputError(
                f"this table is unsharded but has {len(others)} shards, made by hand; nothing says where a "
                "row belongs. Write to one of them with table.shard_writer(shard_id)"
            )
        adopted = ShardRouter(self._spec, self._field, self._source)
        found = others[0]
        adopted._only = Shard(found.shard_id, found.shard_spec_id, found.shard_field_entries)
        return adopted

    @property
    def transform(self) -> str:
        """ "bucket", "identity" or "unsharded"."""
        return str(self._field.transform)

    @property
    def column(self) -> str | None:
        """The column that decides; ``None`` when there is one shard for all rows."""
        return None if self._source is None else str(self._source.name)

    def known_shards(self) -> list[Shard]:
        """The shards that exist whatever the rows are: every bucket, or the one. Identity has none."""
        if self.transform == IDENTITY:
            return []
        values = range(self._num_buckets) if self.transform == BUCKET else [_UNSHARDED_VALUE]
        return [self._shard(value) for value in values]

    def values(self, batch: pa.RecordBatch) -> pa.Array:
        """The sharding value of every row, as Lance evaluates the spec."""
        if self._source is None:
            return pa.array(np.zeros(batch.num_rows, np.int32))
        position = batch.schema.get_field_index(self._source.name)
        if position < 0:
            raise InvalidInputError(f"the rows lack {self._source.name}, the column that decides their shard")
        return self._evaluate(batch.column(position))

    def shard_of(self, value: Any) -> UUID:
        """The shard of the rows that have ``value`` in the sharding column.

        ``value`` is ignored where all rows have the same shard.
        """
        return self.shard_for(value).shard_id

    def shard_for(self, value: Any) -> Shard:
        """As :meth:`shard_of`, with what is needed to create the shard."""
        if self._source is None:
            return self._shard(_UNSHARDED_VALUE)
        try:
            column = pa.array([value], self._source.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InvalidInputError(
                f"{value!r} is no value of column {self._source.name} ({self._source.type}): {error}"
            ) from None
        return self._shard(self._evaluate(column)[0].as_py())

    def split(self, batch: pa.RecordBatch) -> list[tuple[UUID, pa.RecordBatch]]:
        """The rows by shard, in their order; a batch of one shard comes back as it is.

        Every part has buffers of its own, so that no shard keeps another one's rows in memory.
        """
        return [(shard.shard_id, rows) for shard, rows in self.route(batch)]

    def route(self, batch: pa.RecordBatch) -> list[tuple[Shard, pa.RecordBatch]]:
        """As :meth:`split`, with what is needed to create the shards."""
        if batch.num_rows == 0:
            return []
        if self._source is None:
            return [(self._shard(_UNSHARDED_VALUE), batch)]
        encoded = self.values(batch).dictionary_encode(null_encoding="encode")
        shards = [self._shard(value) for value in encoded.dictionary.to_pylist()]
        if len(shards) == 1:
            return [(shards[0], batch)]
        codes = encoded.indices.to_numpy()
        return [(shards[code], batch.take(rows)) for code, rows in _rows_by_code(codes, len(shards))]

    def _evaluate(self, column: pa.Array) -> pa.Array:
        # View strings are the one type that Lance routes by and the hash does not take.
        if pa.types.is_string_view(column.type):
            column = column.cast(pa.string())
        if self.transform == BUCKET:
            return pa.array(bucket_of(column, self._num_buckets))
        return column if column.type == self._value_type else column.cast(self._value_type)

    def _compute_shard(self, value: bool | int | str | None) -> Shard:
        if self._only is not None:
            return self._only
        stored = None if value is None else encode_shard_value(value, self._value_type)
        name = self._field.field_id
        entries = () if stored is None else (ShardFieldEntry(name, stored),)
        return Shard(shard_id_of(self.spec_id, name, stored), self.spec_id, entries)


def check_shard_column(column: pa.Field, transform: str) -> None:
    """Refuses a column whose type Lance cannot route by with this transform."""
    type_ = pa.string() if pa.types.is_string_view(column.type) else column.type
    if transform == BUCKET:
        try:
            check_bucket_type(type_)
        except InvalidInputError as error:
            raise InvalidInputError(f"column {column.name} cannot be a bucket column: {error}") from None
    elif identity_result_type(type_) is None:
        raise InvalidInputError(
            f"column {column.name} has type {column.type} and cannot be an identity column; "
            "use a boolean, integer or text column, or bucket by it"
        )


def identity_result_type(type_: pa.DataType) -> str | None:
    """What Lance calls the type of an identity column's values; ``None`` when it takes none of that type."""
    if pa.types.is_boolean(type_):
        return "boolean"
    if pa.types.is_integer(type_):
        return str(type_)
    if pa.types.is_string(type_) or pa.types.is_string_view(type_):
        return "utf8"
    return "large_utf8" if pa.types.is_large_string(type_) else None


def decoded_values(details: MemWalDetails, manifest: ShardManifest) -> dict[str, bool | int | str]:
    """The shard's sharding values by field id; fields that no spec of the table explains are left out."""
    for spec in details.sharding_specs:
        if spec.spec_id == manifest.shard_spec_id:
            types = {each.field_id: each.result_type for each in spec.fields}
            return {
                name: decode_shard_value(value, result_type_to_arrow(types[name]))
                for name, value in manifest.field_values.items()
                if name in types
            }
    return {}


def discover_shards(store: ObjectStore) -> list[UUID]:
    """The ids of the table's shards, by listing, sorted; see :func:`discover_manifests`."""
    return [manifest.shard_id for manifest in discover_manifests(store)]


def discover_manifests(store: ObjectStore) -> list[ShardManifest]:
    """The newest manifest of every shard, sorted by shard id.

    A directory that is no shard's, or has no manifest (its writer is just making it, or
    died doing so), is skipped with a warning. It holds nothing that was acknowledged.
    """
    shard_ids = []
    for name in store.list_directories(layout.MEM_WAL_DIR):
        shard_id = layout.parse_shard_dir(name)
        if shard_id is not None:
            shard_ids.append(shard_id)
        elif name != layout.OWN_DIR.rpartition("/")[2]:
            _warn_once(store.uri, name, "its name is no shard id")
    manifests = []
    for shard_id, manifest in zip(shard_ids, read_manifests(store, shard_ids), strict=True):
        if manifest is None:
            _warn_once(store.uri, str(shard_id), "it has no manifest")
        else:
            manifests.append(manifest)
    return manifests


def read_manifests(store: ObjectStore, shard_ids: Sequence[UUID]) -> list[ShardManifest | None]:
    """The newest manifest of each shard, several at a time on a remote store."""

    def read(shard_id: UUID) -> ShardManifest | None:
        return ShardManifestStore(store, shard_id).read_latest()

    return list(ordered_map(read, shard_ids, 1 if store.is_local else _REMOTE_READERS))


@functools.lru_cache(maxsize=4096)
def _warn_once(table_uri: str, name: str, why: str) -> None:
    """Once per process and directory: readers come by with every query."""
    logger.warning("skipped %s: %s", layout.child_uri(table_uri, f"{layout.MEM_WAL_DIR}/{name}"), why)


def _num_buckets(field: ShardingField) -> int:
    text = field.parameters.get("num_buckets", "")
    if not text.isdigit() or not 1 <= int(text) <= MAX_BUCKETS:
        raise InvalidInputError(
            f"the sharding spec says num_buckets = {text!r}; it must be from 1 to {MAX_BUCKETS}"
        )
    return int(text)


def _rows_by_code(codes: npt.NDArray[np.int32], count: int) -> list[tuple[int, pa.Array]]:
    """The row numbers of every code, ascending within each."""
    # Up to 16 bits numpy sorts by radix, in linear time.
    keys = codes.astype(np.uint16) if count <= 1 << 16 else codes
    order = np.argsort(keys, kind="stable")
    starts = np.searchsorted(keys[order], np.arange(count + 1))
    return [(code, pa.array(order[starts[code] : starts[code + 1]])) for code in range(count)]
