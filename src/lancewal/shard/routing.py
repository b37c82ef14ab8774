"""Which shard a row belongs to.

Lance evaluates a sharding spec to a value (a bucket number, or the column's own value)
and leaves open which shard holds it. lancewal computes the shard's id from the value, exactly as
LanceDB does. So every process of either library sends a row to the same shard without
coordination. The value is also written into the shard's first manifest, where Lance
and our own readers find it when they skip shards.

Shards may exist under other ids: earlier versions of lancewal computed another id, and users of
pylance choose any id. Rows of one value must not be spread over two shards, because then nothing
says which version of a key is newer. So a router for writing knows the existing shards
(:meth:`ShardRouter.of_table`). It sends a value to the shard that has it, and refuses if several do.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid5

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.base import BaseTable
from lancewal.errors import InvalidInputError, SplitShardError
from lancewal.format import (
    MemWalDetails,
    ShardFieldEntry,
    ShardingField,
    ShardingSpec,
    ShardManifest,
    TableSchema,
    bucket_of,
    check_bucket_type,
    decode_shard_value,
    encode_shard_value,
    field_id,
    from_python,
    result_type_to_arrow,
)
from lancewal.shard.discovery import PresentShards
from lancewal.shard.manifest import ShardManifestStore, refuse_other_shard
from lancewal.storage import ObjectStore, layout

BUCKET = "bucket"
IDENTITY = "identity"
UNSHARDED = "unsharded"

MAX_BUCKETS = 1024

#: The UUID namespace of LanceDB's shard ids. Both namespaces are part of the format.
_NAMESPACE = UUID("4c534d57-5249-5445-5f53-484152443031")
#: The namespace of lancewal's former shard ids. Nulls still use it, because LanceDB does not route them.
_FORMER_NAMESPACE = UUID("5f0b2a52-3d0c-4f0e-9a53-0d6f3f6a8c1e")
#: The UUID version of an id that was computed from a name. Ids that users choose are random (version 4).
_NAMED = 5

_UNSHARDED_VALUE = 0


def shard_id_of(transform: str, value: bytes) -> UUID:
    """The id of the shard that holds one stored sharding value, as LanceDB computes it.

    >>> shard_id_of("bucket", (2).to_bytes(4, "little"))
    UUID('e00299e4-8c4b-50fc-bbdd-ce8179135761')
    >>> shard_id_of("identity", b"a")
    UUID('81e4f11a-aed9-5327-9633-84f7b1fa80f4')
    """
    if transform == BUCKET:
        return _bucket_shard_id(int.from_bytes(value, "little", signed=True))
    return _named(b"identity-" + value if transform == IDENTITY else b"unsharded")


@functools.lru_cache(maxsize=MAX_BUCKETS)
def _bucket_shard_id(bucket: int) -> UUID:
    """The same in all tables, so each process computes it once."""
    return _named(b"bucket-%d" % bucket)


def _named(name: bytes) -> UUID:
    # uuid5 takes text only before Python 3.12.
    return UUID(bytes=hashlib.sha1(_NAMESPACE.bytes + name).digest()[:16], version=_NAMED)


def former_shard_id_of(spec_id: int, field_id: str, value: bytes | None) -> UUID:
    """The id that earlier versions of lancewal gave to the shard of a stored value; ``None`` is null.

    >>> former_shard_id_of(1, "bucket", bytes(4))
    UUID('02c4dbd5-02e0-5e2a-b6a4-86ca43ae2e65')
    """
    return uuid5(_FORMER_NAMESPACE, f"{spec_id}/{field_id}/{'null' if value is None else value.hex()}")


@dataclass(frozen=True)
class Shard:
    """A shard's id, and the spec and field values for its first manifest.

    ``rivals`` are other ids under which a shard for the same value may appear.
    """

    shard_id: UUID
    spec_id: int
    field_entries: tuple[ShardFieldEntry, ...]
    rivals: tuple[UUID, ...] = field(default=(), compare=False)

    def create(self, store: ObjectStore, manifests: ShardManifestStore | None = None) -> ShardManifest:
        """Write the shard's first manifest unless there is one; an equal shard stays as it is.

        Refuses if a rival exists: another process created it after the router was made.
        ``manifests`` is the shard's store, for a caller that continues with what is read here.
        """
        manifests = manifests or ShardManifestStore(store, self.shard_id)
        return manifests.initialize_shard(
            self.spec_id, self.field_entries, check=lambda: self._refuse_rivals(store)
        )

    def require(self, present: ShardManifest) -> ShardManifest:
        """Return ``present``, the manifest of an existing shard; refuses one with another spec or values."""
        values = {entry.field_id: entry.value for entry in self.field_entries}
        refuse_other_shard(present, self.spec_id, values)
        return present

    def _refuse_rivals(self, store: ObjectStore) -> None:
        turned_up = [rival for rival in self.rivals if store.list(layout.manifest_dir(rival))]
        if turned_up:
            raise SplitShardError([self.shard_id, *turned_up])


class ShardRouter:
    """Sends rows to shards by the table's sharding spec.

    >>> from lancewal.format.base_manifest import MemWalDetails, ShardingField, ShardingSpec
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
        self._field = field
        self._source = source
        self._value_type = result_type_to_arrow(field.result_type)
        self._num_buckets = _num_buckets(field) if field.transform == BUCKET else 0
        self._present: PresentShards | None = None
        #: Shards whose ids were not computed from a value, by the stored value in their manifests.
        self._strangers: dict[bytes, list[UUID]] = {}
        # Cached, because identity values recur from batch to batch, and hashing one costs some microseconds.
        self._shard = functools.lru_cache(maxsize=1 << 16)(self._compute_shard)

    @classmethod
    def for_table(cls, details: MemWalDetails, schema: TableSchema) -> ShardRouter:
        """The router for the table's newest spec; refuses a table without one, whose users choose shards."""
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

    @classmethod
    def of_table(
        cls, base: BaseTable, store: ObjectStore, listed: Sequence[UUID] | None = None
    ) -> ShardRouter:
        """The router for writing: each value goes to the existing shard for it, whatever its id.

        The shards come from one listing, unless ``listed`` has them. The values of shards with chosen ids
        are read from their manifests; in an unsharded table every shard is for the one value.
        """
        router = cls.for_table(base.details, base.schema)
        router._present = present = PresentShards(base, store, listed)
        for manifest in present.manifests(sorted(router._unnamed(present.ids))):
            stored = router._value_held(manifest)
            if stored is not None:
                router._strangers.setdefault(stored, []).append(manifest.shard_id)
        return router

    @classmethod
    def knowing(cls, details: MemWalDetails, schema: TableSchema, shards: Sequence[Shard]) -> ShardRouter:
        """Rebuild a router whose :meth:`known_shards` are ``shards``; reads nothing from storage."""
        router = cls.for_table(details, schema)
        router._shard = dict(zip(router._known_values(), shards, strict=True)).__getitem__  # type: ignore[assignment]
        return router

    def _unnamed(self, shard_ids: frozenset[UUID]) -> Iterable[UUID]:
        """The ids that were not computed from a value.

        The value of an identity shard is only in its manifest, and there may be very many of them. So for
        identity every id of a computed version counts as computed.
        """
        if self.transform == IDENTITY:
            return (shard_id for shard_id in shard_ids if shard_id.version != _NAMED)
        names = {name for value in self._known_values() for name in self._names(self._stored(value))}
        return shard_ids - names

    def _value_held(self, manifest: ShardManifest) -> bytes | None:
        if self.transform == UNSHARDED:
            return self._stored(_UNSHARDED_VALUE)
        return (
            manifest.field_values.get(self._field.field_id)
            if manifest.shard_spec_id == self.spec_id
            else None
        )

    @property
    def transform(self) -> str:
        """ "bucket", "identity" or "unsharded"."""
        return str(self._field.transform)

    @property
    def column(self) -> str | None:
        """The sharding column; ``None`` if there is one shard for all rows."""
        return None if self._source is None else str(self._source.name)

    def known_shards(self) -> list[Shard]:
        """The shards that do not depend on the rows: one per bucket, or the only one; none for identity."""
        return [self._shard(value) for value in self._known_values()]

    @property
    def num_buckets(self) -> int:
        """The number of buckets; 0 for every other transform."""
        return self._num_buckets

    def groups(self, manifests: Iterable[ShardManifest]) -> list[list[ShardManifest]]:
        """For each value with several shards, a list of these shards; the one to keep comes first.

        That is the shard with LanceDB's id, because LanceDB continues to write there; otherwise the one that
        lancewal would choose. An unsharded table whose shards all have chosen ids is left out: its users
        divided it on purpose.
        """
        by_value: dict[bytes, list[ShardManifest]] = {}
        silent: list[ShardManifest] = []
        for manifest in manifests:
            stored = self._value_held(manifest)
            if stored is None:
                silent.append(manifest)
            else:
                by_value.setdefault(stored, []).append(manifest)
        if self.transform == BUCKET:
            for bucket in range(self._num_buckets):
                by_value.setdefault(self._stored(bucket) or b"", [])
        value_of_name = {name: stored for stored in by_value for name in self._names(stored)}
        for manifest in silent:
            stored = value_of_name.get(manifest.shard_id)
            if stored is not None and manifest.shard_spec_id == self.spec_id:
                by_value[stored].append(manifest)
        found = []
        for stored, several in by_value.items():
            if len(several) > 1 and not self._are_by_hand(several):
                names = self._names(stored)
                rank = {name: place for place, name in enumerate(names)}
                several.sort(key=lambda m: (rank.get(m.shard_id, len(rank)), m.shard_id))
                found.append(several)
        return found

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

        ``value`` is ignored if all rows have the same shard.
        """
        return self.shard_for(value).shard_id

    def shard_for(self, value: Any) -> Shard:
        """Like :meth:`shard_of`, but returns all that is needed to create the shard."""
        if self._source is None:
            return self._shard(_UNSHARDED_VALUE)
        try:
            column = from_python([value], self._source.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InvalidInputError(
                f"{value!r} is no value of column {self._source.name} ({self._source.type}): {error}"
            ) from None
        return self._shard(self._evaluate(column)[0].as_py())

    def split(self, batch: pa.RecordBatch) -> list[tuple[UUID, pa.RecordBatch]]:
        """Split the rows by shard and keep their order; a batch for one shard is returned as it is.

        Every part has its own buffers, so that no shard keeps another shard's rows in memory.
        """
        return [(shard.shard_id, rows) for shard, rows in self.route(batch)]

    def route(self, batch: pa.RecordBatch) -> list[tuple[Shard, pa.RecordBatch]]:
        """Like :meth:`split`, but returns all that is needed to create the shards."""
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
        # View strings are the only type that Lance routes by but the hash does not accept.
        if pa.types.is_string_view(column.type):
            column = column.cast(pa.string())
        if self.transform == BUCKET:
            return pa.array(bucket_of(column, self._num_buckets))
        return column if column.type == self._value_type else column.cast(self._value_type)

    def _known_values(self) -> Iterable[int]:
        if self.transform == IDENTITY:
            return ()
        return range(self._num_buckets) if self.transform == BUCKET else (_UNSHARDED_VALUE,)

    def _stored(self, value: bool | int | str | None) -> bytes | None:
        return None if value is None else encode_shard_value(value, self._value_type)

    def _names(self, stored: bytes | None) -> tuple[UUID, ...]:
        """The computed ids of a value; the id for a new shard comes first."""
        former = former_shard_id_of(self.spec_id, self._field.field_id, stored)
        return (former,) if stored is None else (shard_id_of(self.transform, stored), former)

    def _are_by_hand(self, manifests: Sequence[ShardManifest]) -> bool:
        """Whether users divided an unsharded table themselves: none of its shards has a computed id."""
        names = self._names(self._stored(_UNSHARDED_VALUE)) if self.transform == UNSHARDED else ()
        return self.transform == UNSHARDED and all(m.shard_id not in names for m in manifests)

    def _compute_shard(self, value: bool | int | str | None) -> Shard:
        stored = self._stored(value)
        names = self._names(stored)
        entries = () if stored is None else (ShardFieldEntry(self._field.field_id, stored),)
        new = Shard(names[0], self.spec_id, entries, names[1:])
        if self._present is None:
            return new
        strangers = self._strangers.get(stored, []) if stored is not None else []
        found = [name for name in (*names, *strangers) if name in self._present.ids]
        if found in ([], [new.shard_id]):
            return new
        manifests = self._present.manifests(found)
        in_use = [manifest for manifest in manifests if not self._present.is_retired(manifest)]
        if len(in_use) > 1 and self._are_by_hand(in_use):
            raise InvalidInputError(
                f"this table is unsharded but has {len(in_use)} shards, made by hand; nothing says where a "
                "row belongs. Write to one of them with table.shard_writer(shard_id)"
            )
        if len(in_use) > 1:
            raise SplitShardError([manifest.shard_id for manifest in in_use])
        retired = {manifest.shard_id for manifest in manifests} - {manifest.shard_id for manifest in in_use}
        rivals = set(names) - retired
        if not in_use:
            return Shard(new.shard_id, new.spec_id, entries, tuple(rivals - {new.shard_id}))
        (used,) = in_use
        return Shard(
            used.shard_id, used.shard_spec_id, used.shard_field_entries, tuple(rivals - {used.shard_id})
        )


def check_shard_column(column: pa.Field, transform: str) -> None:
    """Refuse a column if Lance cannot route by its type with this transform."""
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
    """Lance's name for the type of an identity column; ``None`` if Lance does not support the type."""
    if pa.types.is_boolean(type_):
        return "boolean"
    if pa.types.is_integer(type_):
        return str(type_)
    if pa.types.is_string(type_) or pa.types.is_string_view(type_):
        return "utf8"
    return "large_utf8" if pa.types.is_large_string(type_) else None


def decoded_values(details: MemWalDetails, manifest: ShardManifest) -> dict[str, bool | int | str]:
    """The shard's sharding values by field id; leaves out fields that the shard's spec does not have."""
    for spec in details.sharding_specs:
        if spec.spec_id == manifest.shard_spec_id:
            types = {each.field_id: each.result_type for each in spec.fields}
            return {
                name: decode_shard_value(value, result_type_to_arrow(types[name]))
                for name, value in manifest.field_values.items()
                if name in types
            }
    return {}


def _num_buckets(field: ShardingField) -> int:
    text = field.parameters.get("num_buckets", "")
    if not text.isdigit() or not 1 <= int(text) <= MAX_BUCKETS:
        raise InvalidInputError(
            f"the sharding spec says num_buckets = {text!r}; it must be from 1 to {MAX_BUCKETS}"
        )
    return int(text)


def _rows_by_code(codes: npt.NDArray[np.int32], count: int) -> list[tuple[int, pa.Array]]:
    """The row numbers of each code, in ascending order."""
    # Up to 16 bits numpy uses radix sort, which takes linear time.
    keys = codes.astype(np.uint16) if count <= 1 << 16 else codes
    order = np.argsort(keys, kind="stable")
    starts = np.searchsorted(keys[order], np.arange(count + 1))
    return [(code, pa.array(order[starts[code] : starts[code + 1]])) for code in range(count)]


def require_shard(store: ObjectStore, details: MemWalDetails, schema: TableSchema, shard_id: UUID) -> None:
    """Create the shard if the table's sharding spec has it; refuse an unknown shard."""
    if ShardManifestStore(store, shard_id).read_latest() is not None:
        return
    for shard in ShardRouter.for_table(details, schema).known_shards():
        if shard.shard_id == shard_id:
            shard.create(store)
            return
    raise InvalidInputError(
        f"{shard_id} is no shard of this table, whose sharding spec decides on the shards; write with "
        "table.writer(), or get the shard of a value with table.shard_for(value)"
    )
