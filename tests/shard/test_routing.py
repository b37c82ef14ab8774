"""Routing rows to shards, checked against Lance's own evaluation of the spec, and finding shards."""

from __future__ import annotations

import datetime
import logging
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import lance
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lance.mem_wal import evaluate_sharding_spec

from lancewal.base.table import BaseTable
from lancewal.errors import InvalidInputError, SplitShardError
from lancewal.format.base_manifest import MemWalDetails, ShardingField, ShardingSpec
from lancewal.format.bucket import result_type_to_arrow
from lancewal.format.schema import FIELD_ID_KEY, TableSchema
from lancewal.format.shard_manifest import ShardFieldEntry, ShardManifest
from lancewal.shard.discovery import discover_manifests, discover_shards
from lancewal.shard.manifest import ShardManifestStore
from lancewal.shard.routing import ShardRouter, decoded_values, former_shard_id_of, shard_id_of
from lancewal.storage import ObjectStore, layout
from lancewal.table import Table
from tests.tables import APPEND_ONLY, KEYED, new_table, open_writer, rows

NOON = datetime.datetime(2026, 11, 15, 12)

#: Values of every type that Lance takes as a bucket column; the last ones also as identity.
SHARD_COLUMNS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "float32": (pa.float32(), [0.0, -0.0, float("nan"), 1.25, None]),
    "float64": (pa.float64(), [0.0, -0.0, float("nan"), -1e300, None]),
    "date32": (pa.date32(), [NOON.date(), None]),
    "time32": (pa.time32("s"), [NOON.time(), None]),
    "time64": (pa.time64("us"), [NOON.time(), None]),
    "timestamp": (pa.timestamp("us"), [NOON, None]),
    "zoned": (pa.timestamp("ms", "UTC"), [NOON, None]),
    "boolean": (pa.bool_(), [True, False, None]),
    "int8": (pa.int8(), [-128, 127, 0, None]),
    "uint16": (pa.uint16(), [65535, 0, None]),
    "int32": (pa.int32(), [1, 2, 3, -(1 << 31), None]),
    "int64": (pa.int64(), [1, -1, 1 << 62, None]),
    "uint64": (pa.uint64(), [(1 << 64) - 1, 0, None]),
    "text": (pa.string(), ["", "a", "tenant", "ä€😀", None]),
    "large text": (pa.large_string(), ["b", "x" * 100, None]),
    "view text": (pa.string_view(), ["b", "x" * 100, None]),
}
IDENTITY_COLUMNS = [name for name in SHARD_COLUMNS if "float" not in name and "time" not in name]
IDENTITY_COLUMNS = [name for name in IDENTITY_COLUMNS if name not in ("date32", "zoned")]


def routed(where: Path, column: pa.Field, **mem_wal: Any) -> tuple[lance.LanceDataset, ShardRouter]:
    """A table that Lance itself initialised, and our router for it."""
    base = new_table(where, pa.schema([pa.field("other", pa.int64()), column]), **mem_wal)
    return base.dataset, ShardRouter.for_table(base.details, base.schema)


def oracle(dataset: lance.LanceDataset, batch: pa.RecordBatch) -> list[Any]:
    (spec,) = dataset.mem_wal_index_details()["sharding_specs"]
    return evaluate_sharding_spec(batch, spec, dataset.lance_schema).column(0).to_pylist()


def batch_of(dataset: lance.LanceDataset, values: list[Any]) -> pa.RecordBatch:
    column = dataset.schema.field(1)
    numbers = pa.array(range(len(values)), pa.int64())
    return pa.record_batch([numbers, pa.array(values, column.type)], schema=dataset.schema)


@pytest.mark.parametrize("name", SHARD_COLUMNS)
def test_buckets_are_those_of_lance(tmp_path: Path, name: str) -> None:
    type_, values = SHARD_COLUMNS[name]
    dataset, router = routed(tmp_path / "t", pa.field("k", type_), bucket_column="k", num_buckets=7)
    batch = batch_of(dataset, values)
    assert router.values(batch).to_pylist() == oracle(dataset, batch)


@pytest.mark.parametrize("name", IDENTITY_COLUMNS)
def test_identity_values_are_those_of_lance(tmp_path: Path, name: str) -> None:
    type_, values = SHARD_COLUMNS[name]
    dataset, router = routed(tmp_path / "t", pa.field("k", type_), identity_column="k")
    batch = batch_of(dataset, values)
    assert router.values(batch).to_pylist() == oracle(dataset, batch) == values
    assert len({router.shard_of(value) for value in values}) == len(values)


def test_unsharded_value_is_that_of_lance(tmp_path: Path) -> None:
    dataset, router = routed(tmp_path / "t", pa.field("k", pa.int64()), unsharded=True)
    batch = batch_of(dataset, [1, 2, None])
    assert router.values(batch).to_pylist() == oracle(dataset, batch) == [0, 0, 0]
    assert router.column is None
    assert [shard for shard, _ in router.split(batch)] == [router.shard_of(None)]


def bucket_router(buckets: int) -> ShardRouter:
    field = ShardingField("bucket", (0,), "bucket", None, "int32", {"num_buckets": str(buckets)})
    return ShardRouter.for_table(details_of(field), schema_of(pa.int64()))


def identity_router(type_: pa.DataType, result_type: str) -> ShardRouter:
    return ShardRouter.for_table(
        details_of(ShardingField("bucket", (0,), "identity", None, result_type)), schema_of(type_)
    )


def details_of(*fields: ShardingField) -> MemWalDetails:
    return MemWalDetails(sharding_specs=(ShardingSpec(1, fields),))


def schema_of(type_: pa.DataType) -> TableSchema:
    return TableSchema(pa.schema([pa.field("k", type_, metadata={FIELD_ID_KEY: b"0"})]), ())


@given(
    keys=st.lists(st.integers(-20, 20) | st.none(), max_size=60),
    buckets=st.integers(1, 9),
    cut=st.integers(0, 10),
)
def test_split_keeps_every_row_once_and_in_order(keys: list[int | None], buckets: int, cut: int) -> None:
    router = bucket_router(buckets)
    batch = pa.record_batch({"k": pa.array(keys, pa.int64()), "row": pa.array(range(len(keys)), pa.int64())})
    batch = batch.slice(cut)
    parts = router.split(batch)
    assert len({shard for shard, _ in parts}) == len(parts)
    assert all(part.num_rows for _, part in parts)
    for shard, part in parts:
        expected = [row for row in batch.to_pylist() if router.shard_of(row["k"]) == shard]
        assert part.to_pylist() == expected
    assert sum(part.num_rows for _, part in parts) == batch.num_rows


@given(st.lists(st.text(max_size=3) | st.none(), max_size=30))
def test_identity_split_gives_every_value_its_shard(keys: list[str | None]) -> None:
    router = identity_router(pa.string(), "utf8")
    batch = pa.record_batch({"k": pa.array(keys, pa.string())})
    parts = {shard: part.column("k").to_pylist() for shard, part in router.split(batch)}
    expected = {router.shard_of(key): [k for k in keys if k == key] for key in keys}
    assert parts == expected


def test_batch_of_one_shard_is_not_copied() -> None:
    batch = pa.record_batch({"k": pa.array([5] * 10)})
    ((_, part),) = bucket_router(8).split(batch)
    assert part is batch


def test_parts_do_not_hold_each_others_rows() -> None:
    batch = pa.record_batch({"k": pa.array(range(10_000))})
    parts = bucket_router(4).split(batch)
    assert len(parts) == 4
    for _, part in parts:
        assert part.get_total_buffer_size() <= 8 * part.num_rows + 64


#: Observed with lancedb 0.40.0: for each value a table was made with ``set_lsm_write_spec`` (bucket,
#: identity or unsharded), one row was written by ``merge_insert``, and this was the directory below
#: ``_mem_wal`` (or the shard that a refusal to switch shards named). It refuses to route nulls.
LANCEDB_IDENTITY: list[tuple[str, Any, str]] = [
    ("int8", 0, "4a0dc4f0-c058-53f9-a779-198482dda67a"),
    ("int8", -1, "874633f6-b94e-5c15-99c3-64565f7be084"),
    ("int8", 127, "fbc61e09-11aa-5c8f-837b-0d62da9fd2fd"),
    ("int16", 1, "7b5acb00-59fb-5670-9adc-28faeff6ad95"),
    ("int16", -(1 << 15), "cafcc69b-bd99-5a2e-acdd-6bdbdf2f2baf"),
    ("int32", 0, "568cdb16-5552-576c-ab9e-6289f37e165b"),
    ("int32", 7, "d8a9c3ca-182a-5872-9c53-414a376aed07"),
    ("int32", -(1 << 31), "e56b1b7a-487f-5b41-a2bb-c74260d4fbef"),
    ("int64", 1, "d2e289e0-8bef-529d-9036-907161abc5f8"),
    ("int64", -(1 << 63), "2c6ce851-9e36-539f-80d8-c2a1c04b8183"),
    ("uint8", 255, "874633f6-b94e-5c15-99c3-64565f7be084"),
    ("uint16", (1 << 16) - 1, "cb457cf3-6f7b-5d4f-8055-f15d5492d3a0"),
    ("uint32", 1 << 31, "e56b1b7a-487f-5b41-a2bb-c74260d4fbef"),
    ("uint64", 1 << 63, "2c6ce851-9e36-539f-80d8-c2a1c04b8183"),
    ("uint64", (1 << 64) - 1, "8a683252-cf82-5ecd-ab99-32c83380b59a"),
    ("boolean", True, "a2c19f99-f09f-59d2-8990-f72d42b1e6c4"),
    ("boolean", False, "4a0dc4f0-c058-53f9-a779-198482dda67a"),
    ("utf8", "", "3faaecb2-2ed3-5f84-b276-f84487228724"),
    ("utf8", "a", "81e4f11a-aed9-5327-9633-84f7b1fa80f4"),
    ("utf8", "é", "80edb09a-d33d-5eaf-ba92-026f03c97650"),
    ("utf8", "a/b\0", "9cf504ea-5495-5b4b-bfdd-4eb723ee0483"),
    ("large_utf8", "é", "80edb09a-d33d-5eaf-ba92-026f03c97650"),
]
LANCEDB_BUCKETS = {1: "e00299e4-8c4b-50fc-bbdd-ce8179135761", 2: "1d8d46d4-1ffd-5f6e-9aea-466d5ea76fdb"}
LANCEDB_UNSHARDED = UUID("aa48498d-ac91-59e2-8452-69f46010ace2")


@pytest.mark.parametrize(("type_name", "value", "shard"), LANCEDB_IDENTITY)
def test_identity_shards_have_the_names_of_lancedb(type_name: str, value: Any, shard: str) -> None:
    router = identity_router(result_type_to_arrow(type_name), type_name)
    assert router.shard_of(value) == UUID(shard)


def test_bucket_shards_and_the_only_one_have_the_names_of_lancedb() -> None:
    field = ShardingField("bucket", (0,), "bucket", None, "int32", {"num_buckets": "4"})
    router = ShardRouter.for_table(details_of(field), schema_of(pa.int32()))
    assert {value: str(router.shard_of(value)) for value in LANCEDB_BUCKETS} == LANCEDB_BUCKETS
    assert unsharded_router().shard_of(None) == LANCEDB_UNSHARDED


def test_former_shard_ids_are_the_same_on_every_machine() -> None:
    # Tables exist that have them.
    assert former_shard_id_of(1, "bucket", bytes(4)) == UUID("02c4dbd5-02e0-5e2a-b6a4-86ca43ae2e65")
    assert former_shard_id_of(1, "bucket", None) == UUID("409699d1-b0d7-5088-81a5-de019ca93a6b")
    assert identity_router(pa.string(), "utf8").shard_of(None) == former_shard_id_of(1, "bucket", None)


def test_null_and_the_text_null_are_different_shards() -> None:
    router = identity_router(pa.string(), "utf8")
    assert len({router.shard_of(each) for each in (None, "null", "")}) == 3


def test_shards_carry_what_their_manifest_needs() -> None:
    router = bucket_router(3)
    shards = router.known_shards()
    details = details_of(ShardingField("bucket", (0,), "bucket", None, "int32", {"num_buckets": "3"}))
    manifests = [
        ShardManifest(
            version=1,
            writer_epoch=0,
            shard_id=shard.shard_id,
            shard_spec_id=shard.spec_id,
            shard_field_entries=shard.field_entries,
        )
        for shard in shards
    ]
    assert [decoded_values(details, each) for each in manifests] == [{"bucket": n} for n in range(3)]
    assert identity_router(pa.int64(), "int64").known_shards() == []
    assert identity_router(pa.string(), "utf8").shard_for(None).field_entries == ()


def test_renamed_sharding_column_still_routes(tmp_path: Path) -> None:
    base = new_table(tmp_path / "t", APPEND_ONLY, bucket_column="id", num_buckets=4)
    before = ShardRouter.for_table(base.details, base.schema)
    base.dataset.alter_columns({"path": "id", "name": "number"})
    base = BaseTable.open(base.uri)
    after = ShardRouter.for_table(base.details, base.schema)
    assert after.column == "number"
    assert [after.shard_of(n) for n in range(20)] == [before.shard_of(n) for n in range(20)]


def test_dropped_sharding_column_is_refused(tmp_path: Path) -> None:
    base = new_table(tmp_path / "t", APPEND_ONLY, bucket_column="id", num_buckets=4)
    base.dataset.drop_columns(["id"])
    base = BaseTable.open(base.uri)
    with pytest.raises(InvalidInputError, match="dropped"):
        ShardRouter.for_table(base.details, base.schema)


def test_manual_table_is_refused_with_a_hint() -> None:
    with pytest.raises(InvalidInputError, match="shard_writer"):
        ShardRouter.for_table(MemWalDetails(), schema_of(pa.int64()))


@pytest.mark.parametrize(
    "fields",
    [
        (ShardingField("a", (0,), None, "k % 3", "int32"),),
        (ShardingField("a", (0,), "year", None, "int32"),),
        (
            ShardingField("a", (0,), "identity", None, "int64"),
            ShardingField("b", (), "unsharded", None, "int32"),
        ),
        (),
    ],
)
def test_spec_that_cannot_be_routed_is_refused(fields: tuple[ShardingField, ...]) -> None:
    with pytest.raises(InvalidInputError, match="shard_writer"):
        ShardRouter.for_table(details_of(*fields), schema_of(pa.int64()))


@pytest.mark.parametrize("count", ["", "0", "1025", "-1", "many"])
def test_spec_with_a_bad_number_of_buckets_is_refused(count: str) -> None:
    field = ShardingField("bucket", (0,), "bucket", None, "int32", {"num_buckets": count})
    with pytest.raises(InvalidInputError, match="num_buckets"):
        ShardRouter.for_table(details_of(field), schema_of(pa.int64()))


def test_value_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no value of column k"):
        bucket_router(4).shard_of("text")


def test_rows_without_the_sharding_column_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="lack k"):
        bucket_router(4).split(pa.record_batch({"x": [1]}))


def test_newest_spec_decides() -> None:
    old = ShardingField("bucket", (0,), "bucket", None, "int32", {"num_buckets": "2"})
    new = ShardingField("bucket", (0,), "bucket", None, "int32", {"num_buckets": "5"})
    details = MemWalDetails(sharding_specs=(ShardingSpec(2, (new,)), ShardingSpec(1, (old,))))
    router = ShardRouter.for_table(details, schema_of(pa.int64()))
    assert router.spec_id == 2
    assert len(router.known_shards()) == 5


# --- shards that are there already ------------------------------------------------------


def unsharded_router() -> ShardRouter:
    return ShardRouter.for_table(
        details_of(ShardingField("bucket", (), "unsharded", None, "int32")), schema_of(pa.int64())
    )


#: How a table is sharded, and two ids of the row with id 1: LanceDB's, and that of earlier versions.
SHARDINGS: dict[str, tuple[dict[str, Any], UUID, UUID]] = {
    "bucket": (
        {"bucket_column": "id", "num_buckets": 4},
        shard_id_of("bucket", bytes(4)),
        former_shard_id_of(1, "bucket", bytes(4)),
    ),
    "identity": (
        {"identity_column": "id"},
        shard_id_of("identity", (1).to_bytes(8, "little")),
        former_shard_id_of(1, "bucket", (1).to_bytes(8, "little")),
    ),
    "unsharded": (
        {"unsharded": True},
        LANCEDB_UNSHARDED,
        former_shard_id_of(1, "bucket", bytes(4)),
    ),
}


@dataclass(frozen=True)
class Sharded:
    """A table, and the shards that the row with id 1 could be in."""

    base: BaseTable
    store: ObjectStore
    lancedb: UUID
    former: UUID

    def router(self) -> ShardRouter:
        return ShardRouter.of_table(BaseTable.open(self.base.uri), self.store)

    def values(self) -> tuple[ShardFieldEntry, ...]:
        return ShardRouter.for_table(self.base.details, self.base.schema).shard_for(1).field_entries

    def make(self, shard_id: UUID, *, silent: bool = False) -> ShardManifestStore:
        """A shard for the row with id 1; Lance says nothing of its values when it makes one."""
        manifests = ShardManifestStore(self.store, shard_id)
        manifests.initialize_shard(1, () if silent else self.values())
        return manifests

    def retire(self, shard_id: UUID) -> None:
        manifests = ShardManifestStore(self.store, shard_id)
        epoch, _ = manifests.claim_epoch(1)
        manifests.seal(epoch)


@pytest.fixture(params=SHARDINGS)
def sharded(request: pytest.FixtureRequest, tmp_path: Path) -> Sharded:
    arguments, lancedb, former = SHARDINGS[request.param]
    base = new_table(tmp_path / "t", **arguments)
    return Sharded(base, ObjectStore.from_uri(base.uri, fsync=False), lancedb, former)


def test_new_shards_get_the_name_of_lancedb(sharded: Sharded) -> None:
    assert sharded.router().shard_of(1) == sharded.lancedb
    sharded.router().shard_for(1).create(sharded.store)
    assert sharded.router().shard_of(1) == sharded.lancedb


def test_a_shard_of_an_earlier_version_stays_in_use(sharded: Sharded) -> None:
    sharded.make(sharded.former)
    shard = sharded.router().shard_for(1)
    assert shard.shard_id == sharded.former
    assert shard.create(sharded.store).version == 1
    assert discover_shards(sharded.store) == [sharded.former]


def test_a_shard_that_lancedb_made_is_used_although_it_does_not_say_its_value(sharded: Sharded) -> None:
    sharded.make(sharded.lancedb, silent=True)
    shard = sharded.router().shard_for(1)
    assert shard.shard_id == sharded.lancedb
    assert shard.create(sharded.store).shard_field_entries == ()


def test_a_shard_that_was_named_by_hand_is_used_by_its_value(sharded: Sharded) -> None:
    chosen = uuid4()
    sharded.make(chosen)
    shard = sharded.router().shard_for(1)
    assert (shard.shard_id, shard.field_entries) == (chosen, sharded.values())
    shard.create(sharded.store)
    batch = pa.record_batch({"id": [1]})
    assert [shard for shard, _ in sharded.router().split(batch)] == [chosen]


def test_two_shards_for_one_value_are_refused(sharded: Sharded) -> None:
    ids = [sharded.lancedb, sharded.former, uuid4()]
    for shard_id in ids:
        sharded.make(shard_id, silent=shard_id == sharded.lancedb)
    with pytest.raises(SplitShardError, match="repair") as caught:
        sharded.router().route(pa.record_batch({"id": [1]}))
    assert caught.value.shard_ids == tuple(ids)
    assert pickle.loads(pickle.dumps(caught.value)).shard_ids == tuple(ids)
    manifests = discover_manifests(sharded.store)
    ((kept, *others),) = sharded.router().groups(manifests)
    assert kept.shard_id == sharded.lancedb, "LanceDB goes on writing there"
    assert {m.shard_id for m in others} == {*ids[1:]}


def test_an_unsharded_table_that_was_divided_by_hand_is_refused(tmp_path: Path) -> None:
    base = new_table(tmp_path / "t")
    store = ObjectStore.from_uri(base.uri, fsync=False)
    for _ in range(2):
        with base.dataset.mem_wal_writer(str(uuid4())):
            pass
    router = ShardRouter.of_table(base, store)
    with pytest.raises(InvalidInputError, match="2 shards, made by hand"):
        router.shard_of(1)
    assert router.groups(discover_manifests(store)) == []


@pytest.mark.parametrize("retired", ["former", "lancedb"])
def test_a_shard_that_is_drained_and_sealed_is_out_of_the_running(sharded: Sharded, retired: str) -> None:
    for shard_id in (sharded.lancedb, sharded.former):
        sharded.make(shard_id)
    sharded.retire(getattr(sharded, retired))
    other = sharded.lancedb if retired == "former" else sharded.former
    shard = sharded.router().shard_for(1)
    assert shard.shard_id == other
    shard.create(sharded.store)


def test_a_sealed_shard_with_rows_is_not_out_of_the_running(sharded: Sharded) -> None:
    for shard_id in (sharded.lancedb, sharded.former):
        sharded.make(shard_id)
    with open_writer(sharded.base, sharded.former, store=sharded.store) as writer:
        writer.put(rows(1, 1))
    ShardManifestStore(sharded.store, sharded.former).seal(writer.epoch)
    with pytest.raises(SplitShardError):
        sharded.router().shard_for(1)


def test_all_shards_retired_gives_a_new_one(sharded: Sharded) -> None:
    sharded.make(sharded.former)
    sharded.retire(sharded.former)
    shard = sharded.router().shard_for(1)
    assert shard.shard_id == sharded.lancedb
    assert shard.create(sharded.store).version == 1


@pytest.mark.parametrize("late", ["former", "lancedb"])
def test_a_rival_that_turned_up_after_the_listing_is_refused_at_the_opening(
    sharded: Sharded, late: str
) -> None:
    if late == "lancedb":
        sharded.make(sharded.former)
    shard = sharded.router().shard_for(1)
    sharded.make(getattr(sharded, late), silent=True)
    with pytest.raises(SplitShardError):
        shard.create(sharded.store)


def test_a_table_writer_refuses_two_shards_for_one_value_and_goes_on_with_others(tmp_path: Path) -> None:
    base = new_table(tmp_path / "t", identity_column="id")
    table = Table.open(base.uri)
    store = ObjectStore.from_uri(base.uri, fsync=False)
    shard = ShardRouter.for_table(base.details, base.schema).shard_for(1)
    for shard_id in (shard.shard_id, *shard.rivals):
        ShardManifestStore(store, shard_id).initialize_shard(1, shard.field_entries)
    with table.writer(fsync=False) as writer:
        with pytest.raises(SplitShardError):
            writer.put(rows(0, 3))
        assert table.count_rows() == 0, "nothing was written"
        writer.put(rows(2, 2))
        assert table.count_rows() == 2
        with pytest.raises(SplitShardError):
            table.shard_for(1)
        assert table.repair().failed == []
        writer.put(rows(0, 3))
    assert table.count_rows() == 4


# --- discovery --------------------------------------------------------------------------


def test_discovery_lists_shards_in_order(any_store: ObjectStore) -> None:
    shard_ids = sorted(uuid4() for _ in range(5))
    for shard_id in reversed(shard_ids):
        ShardManifestStore(any_store, shard_id).initialize_shard(1)
    ShardManifestStore(any_store, shard_ids[2]).claim_epoch(1)
    assert discover_shards(any_store) == shard_ids
    assert [manifest.version for manifest in discover_manifests(any_store)] == [1, 1, 2, 1, 1]


def test_discovery_of_a_table_without_shards_is_empty(any_store: ObjectStore) -> None:
    assert discover_shards(any_store) == []


def test_discovery_skips_foreign_and_half_made_directories_with_a_warning(
    any_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    real, half_made = uuid4(), uuid4()
    foreign = f"backup-{uuid4().hex}"
    ShardManifestStore(any_store, real).initialize_shard()
    any_store.put(f"{layout.MEM_WAL_DIR}/{foreign}/file", b"x")
    any_store.put(f"{layout.MEM_WAL_DIR}/{str(uuid4()).upper()}/file", b"x")
    any_store.put(layout.version_hint(half_made), b'{"version":1}')
    any_store.put(f"{layout.OWN_DIR}/record.json", b"{}")
    with caplog.at_level(logging.WARNING):
        assert discover_shards(any_store) == [real]
        assert discover_shards(any_store) == [real]
    warned = [record.getMessage() for record in caplog.records]
    assert sum(foreign in text for text in warned) == 1, "warned once, not with every read"
    assert sum(str(half_made) in text and "no manifest" in text for text in warned) == 1
    assert len(warned) == 3, "our own directory is no reason to warn"


def test_shard_made_by_a_router_opens_in_lance_with_its_values(tmp_path: Path) -> None:
    base = new_table(tmp_path / "t", bucket_column="id", num_buckets=4)
    store = ObjectStore.from_uri(base.uri, fsync=False)
    shard = ShardRouter.for_table(base.details, base.schema).shard_for(1)
    assert shard.create(store).writer_epoch == 0
    with base.dataset.mem_wal_writer(str(shard.shard_id)) as writer:
        writer.put(rows(1, 1))
    (manifest,) = discover_manifests(store)
    assert manifest.writer_epoch == 1
    assert manifest.shard_spec_id == 1
    assert manifest.shard_field_entries == shard.field_entries
    assert shard.create(store) == manifest, "a shard that exists is left as it is"


def test_shard_with_other_values_is_not_taken_for_its_own(tmp_path: Path) -> None:
    base = new_table(tmp_path / "t", KEYED, bucket_column="id", num_buckets=4)
    store = ObjectStore.from_uri(base.uri, fsync=False)
    shard = ShardRouter.for_table(base.details, base.schema).shard_for(1)
    ShardManifestStore(store, shard.shard_id).initialize_shard(0)
    with pytest.raises(InvalidInputError, match="sharding spec 0"):
        shard.create(store)
    assert ShardManifestStore(store, shard.shard_id).require_latest().version == 1
