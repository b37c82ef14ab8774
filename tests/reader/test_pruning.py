"""Shards are left out only where no row of theirs can matter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from uuid import UUID, uuid4

import lance
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import lancewal
from lancewal.format import ShardIdentity
from lancewal.reader import Scan, TableReader
from lancewal.reader.pruning import ShardPruner
from lancewal.shard.routing import ShardRouter
from tests.reader.support import TableUnderTest, named, names
from tests.tables import KEY

PLACES = pa.schema(
    [
        pa.field("tenant", pa.string(), False, {"lance-schema:unenforced-primary-key:position": "1"}),
        pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key:position": "2"}),
        pa.field("name", pa.string()),
    ]
)


def write(table: TableUnderTest, rows: pa.Table) -> dict[object, UUID]:
    """Rows to their shards, by our own routing; the shards by the sharding value."""
    base = table.live.base()
    router = ShardRouter.for_table(base.details, base.schema)
    shards: dict[object, UUID] = {}
    batch = rows.combine_chunks().to_batches()[0]
    for shard, part in router.route(batch):
        shard.create(table.store)
        with table.writer(shard.shard_id) as writer:
            writer.put(part)
        shards[router.values(part)[0].as_py()] = shard.shard_id
    return shards


def shards_of(scan: Scan) -> set[UUID]:
    return {shard.shard_id for shard in scan.snapshot.shards}


@pytest.fixture
def bucketed(tmp_path: Path) -> tuple[TableUnderTest, dict[object, UUID]]:
    table = TableUnderTest(
        tmp_path / "t",
        data=named(dict.fromkeys(range(12), "base")),
        bucket_column="id",
        num_buckets=4,
        maintained_indexes=[],
    )
    return table, write(table, named({i: f"n{i}" for i in range(40)}))


def test_equality_and_in_on_a_bucket_column_read_the_shards_of_their_values(
    bucketed: tuple[TableUnderTest, dict[object, UUID]],
) -> None:
    table, shards = bucketed
    assert len(shards) == 4
    reader = TableReader(table.store)
    for filter in ("id = 7", "id IN (7, 7)", "id = 7 AND name LIKE 'n%'", "id IN (7, 8) AND id = 7"):
        scan = reader.scan(filter=filter)
        assert len(shards_of(scan)) == 1
        assert len(scan.snapshot.pruned) == 3
        assert "pruned 3 shards" in scan.explain()
        assert names(scan.to_table()) == {7: "n7"}
        assert scan.count_rows() == 1
    for filter in ("id > 6 AND id < 8", "id = 7 OR id = 7", "NOT id != 7", "abs(id) = 7"):
        scan = reader.scan(filter=filter)
        assert shards_of(scan) == set(shards.values())
        assert names(scan.to_table()) == {7: "n7"}
    assert names(reader.scan(filter="id IN (1, 2, 3, 4, 5, 6)").to_table()) == {
        i: f"n{i}" for i in range(1, 7)
    }
    assert names(reader.scan().to_table()) == {i: f"n{i}" for i in range(40)}


def test_a_key_that_is_nowhere_prunes_too(bucketed: tuple[TableUnderTest, dict[object, UUID]]) -> None:
    table, _ = bucketed
    scan = table.other.scan(filter="id = 4711")
    assert len(shards_of(scan)) == 1
    assert scan.to_table().num_rows == 0


def test_identity_shards_are_compared_by_their_values(tmp_path: Path) -> None:
    rows = pa.table(
        {"tenant": ["a", "b", "c", "a"], "id": [1, 1, 1, 2], "name": ["a1", "b1", "c1", "a2"]}
    ).cast(PLACES)
    table = TableUnderTest(tmp_path / "t", PLACES, identity_column="tenant", maintained_indexes=[])
    shards = write(table, rows)
    scan = table.live.scan(["name"], "tenant IN ('a', 'c') AND name != 'a2'")
    assert shards_of(scan) == {shards["a"], shards["c"]}
    assert sorted(scan.to_table()["name"].to_pylist()) == ["a1", "c1"]
    assert shards_of(table.live.scan(filter="tenant = 'nobody'")) == set()
    answer = table.live.lookup([("b", 1), ("a", 2), ("d", 1)])
    assert answer.found.tolist() == [True, True, False]
    assert answer.table["name"].to_pylist() == ["b1", "a2"]


def test_an_update_that_moved_a_key_to_another_shard_still_hides_its_base_row(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), False, KEY),
            pa.field("tenant", pa.string()),
            pa.field("name", pa.string()),
        ]
    )
    base = pa.table({"id": [1, 2], "tenant": ["x", "x"], "name": ["old", "kept"]}).cast(schema)
    table = TableUnderTest(tmp_path / "t", schema, base, identity_column="tenant", maintained_indexes=[])
    write(table, pa.table({"id": [1], "tenant": ["y"], "name": ["moved"]}).cast(schema))
    for reader in table.readers:
        assert names(reader.scan(filter="tenant = 'x'").to_table()) == {2: "kept"}
        assert reader.scan(filter="tenant = 'x'").count_rows() == 1
        assert names(reader.scan().to_table()) == {1: "moved", 2: "kept"}


def test_shards_that_do_not_say_their_value_are_always_read(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t", bucket_column="id", num_buckets=4, maintained_indexes=[])
    with table.dataset.mem_wal_writer(str(table.shard)) as writer:
        writer.put(named({1: "one", 2: "two"}))
    assert names(table.live.scan(filter="id = 1").to_table()) == {1: "one"}
    assert names(table.live.lookup([1, 2]).table) == {1: "one", 2: "two"}


@pytest.mark.parametrize("column", ["tenant", "id"])
def test_an_unsigned_identity_above_the_signed_range_raised(tmp_path: Path, column: str) -> None:
    big = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    schema = pa.schema(
        [pa.field("id", pa.uint64(), False, KEY), pa.field("name", pa.string())]
        if column == "id"
        else [
            pa.field("tenant", pa.uint64(), False, {"lance-schema:unenforced-primary-key:position": "1"}),
            pa.field("id", pa.uint64(), False, {"lance-schema:unenforced-primary-key:position": "2"}),
            pa.field("name", pa.string()),
        ]
    )
    table = TableUnderTest(tmp_path / "t", schema, identity_column=column, maintained_indexes=[])
    data = pa.table(dict.fromkeys(schema.names[:-1], big) | {"name": [f"n{n}" for n in big]}, schema)
    assert set(write(table, data)) == set(big)
    reader = TableReader(table.store)
    keys = data.select(schema.names[:-1])
    assert reader.lookup(keys).table.to_pylist() == data.to_pylist()
    for number in big:
        found = reader.scan(filter=f"{column} = {number}").to_table()
        assert found["name"].to_pylist() == [f"n{number}"]
        assert reader.lookup(keys.filter(pc.equal(keys[column], pa.scalar(number, pa.uint64())))).found.all()
    inside = reader.scan(filter=f"{column} IN ({', '.join(map(str, big[2:]))})")
    assert inside.count_rows() == 3
    assert len(inside.snapshot.shards) == 3


def test_shards_with_one_value_share_keys_and_others_do_not(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t", bucket_column="id", num_buckets=4, maintained_indexes=[])
    base = table.live.base()
    pruner = ShardPruner(base.details, base.schema)
    first, second, again = (
        ShardIdentity(uuid4(), 1, (("bucket", bytes([bucket, 0, 0, 0])),)) for bucket in (0, 1, 0)
    )
    silent = ShardIdentity(uuid4(), 1, ())
    by_hand = ShardIdentity(uuid4(), 0, ())
    assert pruner.key_groups([]) == []
    assert pruner.key_groups([silent]) == [[silent]]
    assert pruner.key_groups([first, second, again]) == [[first, again], [second]]
    for stranger in (silent, by_hand):
        assert pruner.key_groups([first, second, stranger]) == [[first, second, stranger]]


def _calls_of_readers(work: Callable[[], object]) -> int:
    """How many functions of the reader's modules are called or resumed."""
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event == "call" and "/lancewal/reader/" in frame.f_code.co_filename:
            calls += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_the_work_for_one_key_does_not_grow_with_the_shards(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False, KEY), pa.field("v", pa.int64())])
    calls = []
    for shards in (4, 64):
        where = tmp_path / str(shards)
        lance.write_dataset(pa.table({"id": [0], "v": [0]}, schema), where)
        table = lancewal.initialize(where, bucket=("id", shards))
        with table.writer(enable_memtable=False) as writer:
            writer.put(pa.table({"id": range(shards * 8), "v": range(shards * 8)}, schema))
        assert len([each for each in (where / "_mem_wal").iterdir() if each.name != "_lancewal"]) == shards
        reader = lancewal.open(where)

        def by_key(reader: lancewal.Table = reader) -> object:
            return reader.lookup([5])

        def by_filter(reader: lancewal.Table = reader) -> object:
            return reader.scan(filter="id = 5").to_table()

        by_key(), by_filter()
        calls.append((_calls_of_readers(by_key), _calls_of_readers(by_filter)))
    assert calls[0] == calls[1]
