"""The front door: opening, settings, shards by hand, flushing, and what the shards say."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import lance
import polars as pl
import pyarrow as pa
import pytest

import lancewal
from lancewal.config import ShardWriterConfig
from lancewal.errors import (
    FencedError,
    InvalidInputError,
    NotInitializedError,
    PartialWriteError,
    SealedShardError,
)
from lancewal.format.shard_manifest import ShardStatus
from lancewal.maintenance import Retention
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import ObjectStore, layout
from lancewal.table import Table
from lancewal.writer import drain
from tests.faults import FaultyStore
from tests.servers import S3Server
from tests.tables import APPEND_ONLY, KEYED, abandon, fast, rows, wal_table


@pytest.fixture
def manual(tmp_path: Path) -> Table:
    return wal_table(tmp_path / "m", by_hand=True)


def the_shard(table: Table) -> lancewal.ShardInfo:
    (shard,) = table.shards()
    return shard


# --- opening ----------------------------------------------------------------------------


def test_open_takes_paths_uris_and_datasets(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(table.uri)
    monkeypatch.chdir(path.parent)
    ways = [path, str(path), f"file://{path}", path.name, lance.dataset(table.uri), f"{path}/"]
    assert {lancewal.open(way).uri for way in ways} == {table.uri}


def test_open_refuses_a_table_that_is_not_initialised(tmp_path: Path) -> None:
    lance.write_dataset(KEYED.empty_table(), str(tmp_path / "t"))
    with pytest.raises(NotInitializedError, match="initialize"):
        lancewal.open(tmp_path / "t")


def test_open_refuses_what_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no Lance table"):
        lancewal.open(tmp_path / "t")


@pytest.mark.parametrize("address", [None, 3, b"t"])
def test_an_address_that_is_none_was_a_type_error(address: Any, table: Table) -> None:
    for call in (lancewal.open, lancewal.initialize, lancewal.uninitialize, table.backup):
        with pytest.raises(InvalidInputError, match="is no address"):
            call(address)
    with pytest.raises(InvalidInputError, match="is no address"):
        lancewal.create(address, [{"id": 1}])


def test_settings_and_ages_of_another_kind_were_type_errors(table: Table) -> None:
    for call in (table.writer, table.flush):
        with pytest.raises(InvalidInputError, match="a ShardWriterConfig, not"):
            call({"durable_write": False})  # type: ignore[arg-type]
    wrong: Any = 5
    with pytest.raises(InvalidInputError, match="must be a timedelta"):
        table.gc(min_age=wrong)
    with pytest.raises(InvalidInputError, match="must be a timedelta"):
        Retention(wal_entries=wrong)
    assert table.gc(min_age=timedelta.max, dry_run=False).collected == []
    with pytest.raises(InvalidInputError, match="must be a Retention"):
        table.gc(retention=timedelta(1))  # type: ignore[arg-type]


def test_schema_and_key_are_the_tables_own_and_fresh(table: Table) -> None:
    assert table.schema.names == ["id", "name"]
    assert table.primary_key == ("id",)
    lance.dataset(table.uri).add_columns(pa.field("late", pa.int64()))
    assert table.schema.names == ["id", "name", "late"]


def test_importing_the_package_loads_no_heavy_library() -> None:
    code = (
        "import sys, lancewal; assert lancewal.__version__; "
        "heavy = [m for m in ('lance', 'pyarrow', 'obstore', 'faiss', 'datafusion') if m in sys.modules]; "
        "assert not heavy, heavy; lancewal.Table; assert 'lance' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_public_names_exist() -> None:
    for name in lancewal.__all__:
        assert getattr(lancewal, name) is not None
    assert set(lancewal.__all__) <= set(dir(lancewal))
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        lancewal.nope  # noqa: B018


# --- writer settings --------------------------------------------------------------------


def test_stored_writer_defaults_are_applied(tmp_path: Path) -> None:
    stored = {"max_memtable_rows": "7", "durable_write": "false", "fsync": "false"}
    table = wal_table(tmp_path / "t", unsharded=True, writer_defaults=stored)
    with table.writer() as writer:
        writer.put(rows(0, 8))
        (shard_writer,) = writer.shard_writers.values()
        assert shard_writer.config == ShardWriterConfig(max_memtable_rows=7, durable_write=False, fsync=False)
        shard_writer.wait_for_flush_drain()
        assert the_shard(table).generations == (1,), "frozen at the stored limit"
    with table.shard_writer(table.shard_for()) as again:
        assert again.config.max_memtable_rows == 7


def test_arguments_win_over_stored_defaults_and_those_over_ours(tmp_path: Path) -> None:
    stored = {"max_memtable_rows": "7", "max_memtable_batches": "9", "fsync": "false"}
    table = wal_table(tmp_path / "t", by_hand=True, writer_defaults=stored)
    with table.shard_writer(uuid4(), max_memtable_rows=8) as writer:
        config = writer.config
    assert (config.max_memtable_rows, config.max_memtable_batches, config.fsync) == (8, 9, False)
    assert config.max_memtable_size == ShardWriterConfig().max_memtable_size


def test_whole_configuration_replaces_the_stored_defaults(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", by_hand=True, writer_defaults={"max_memtable_rows": "7"})
    # Not a whole number of milliseconds: must not be rounded on the way.
    mine = fast(max_memtable_batches=5, async_index_interval=timedelta(microseconds=1500))
    with table.shard_writer(uuid4(), mine, max_memtable_rows=6) as writer:
        assert writer.config == fast(
            max_memtable_batches=5, async_index_interval=timedelta(microseconds=1500), max_memtable_rows=6
        )


def test_unknown_setting_is_refused_before_any_claim(table: Table) -> None:
    for config in (None, fast()):
        with pytest.raises(InvalidInputError, match="max_memtable_row"):
            table.writer(config, max_memtable_row=5)
        with pytest.raises(InvalidInputError, match="max_memtable_row"):
            table.shard_writer(table.shard_for(1), config, max_memtable_row=5)
    assert {shard.epoch for shard in table.shards()} == {0}


# --- shards -----------------------------------------------------------------------------


def test_shards_tell_their_state(table: Table) -> None:
    shard_id = table.shard_for(1)
    with table.shard_writer(shard_id) as writer:
        writer.put(rows(1, 1))
        writer.put(rows(1, 1))
        (info,) = [each for each in table.shards() if each.shard_id == shard_id]
        assert (info.epoch, info.current_generation, info.generations) == (1, 1, ())
        assert (info.wal_tip, info.tail_length, info.compacted_generation) == (3, 2, 0)
        assert (info.spec_id, info.status) == (1, ShardStatus.ACTIVE)
        assert info.values == {"bucket": table.router().values(rows(1, 1))[0].as_py()}
    (info,) = [each for each in table.shards() if each.shard_id == shard_id]
    assert (info.generations, info.current_generation) == ((1,), 2)
    assert (info.wal_tip, info.tail_length) == (3, 0)


def test_a_sealed_shard_keeps_its_rows_and_takes_no_writer_until_it_is_unsealed(manual: Table) -> None:
    shard_id = manual.create_shard()
    writer = manual.shard_writer(shard_id, durable_write=False)
    writer.put(rows(0, 3))
    manual.seal_shard(shard_id)
    assert the_shard(manual).status is ShardStatus.SEALED
    writer.put(rows(3, 1))
    with pytest.raises(FencedError):
        writer.close()
    with pytest.raises(SealedShardError, match=r"unseal_shard\('"):
        manual.shard_writer(shard_id)
    manual.flush()
    manual.compact()
    assert manual.count_rows() == 3
    manual.seal_shard(shard_id)
    for _ in range(2):
        manual.unseal_shard(str(shard_id))
    assert the_shard(manual).status is ShardStatus.ACTIVE
    with manual.shard_writer(shard_id) as again:
        again.put(rows(3, 1))
    assert manual.count_rows() == 4


def test_rows_in_the_log_of_a_shard_that_is_sealed_can_be_compacted(manual: Table) -> None:
    shard_id = manual.create_shard()
    with manual.shard_writer(shard_id, enable_memtable=False) as writer:
        writer.put(rows(0, 3))
    manual.seal_shard(shard_id)
    assert manual.compact().rows_in == 3
    assert lance.dataset(manual.uri).count_rows() == 3


def test_a_busy_service_took_its_shard_back_before_it_was_sealed(
    manual: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard_id = manual.create_shard()
    real, came_back = drain.drain_shard, iter([True])

    def late(*args: Any) -> object:
        drained = real(*args)
        if next(came_back, False):
            manual.shard_writer(shard_id).close()
        return drained

    monkeypatch.setattr(drain, "drain_shard", late)
    manual.seal_shard(shard_id)
    assert the_shard(manual).status is ShardStatus.SEALED


def test_a_shard_that_is_taken_over_meanwhile_is_not_sealed(
    manual: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard_id = manual.create_shard()
    real = drain.drain_shard

    def late(*args: Any) -> object:
        drained = real(*args)
        manual.shard_writer(shard_id).close()
        return drained

    monkeypatch.setattr(drain, "drain_shard", late)
    with pytest.raises(FencedError):
        manual.seal_shard(shard_id)
    assert the_shard(manual).status is ShardStatus.ACTIVE


def test_a_shard_that_is_not_there_is_neither_sealed_nor_unsealed(manual: Table) -> None:
    for change in (manual.seal_shard, manual.unseal_shard):
        with pytest.raises(InvalidInputError, match="no manifest"):
            change(uuid4())
        with pytest.raises(InvalidInputError):
            change("no id")


def test_unsealing_does_not_give_a_value_two_shards(table: Table) -> None:
    router = table.router()
    store = ObjectStore.from_uri(table.uri)
    taken = router.shard_for(1)
    taken.create(store)
    (rival,) = taken.rivals
    manifests = ShardManifestStore(store, rival)
    manifests.initialize_shard(taken.spec_id, taken.field_entries)
    table.seal_shard(rival)
    with pytest.raises(InvalidInputError, match=f"stays sealed: {taken.shard_id}"):
        table.unseal_shard(rival)
    table.seal_shard(taken.shard_id)
    table.unseal_shard(rival)
    assert [i.shard_id for i in table.shards() if i.status is ShardStatus.SEALED] == [taken.shard_id]


def test_lance_respects_a_shard_that_was_sealed_beside_its_writer(tmp_path: Path) -> None:
    dataset = lance.write_dataset(KEYED.empty_table(), str(tmp_path / "t"))
    dataset.initialize_mem_wal(unsharded=True)
    table = lancewal.open(dataset)
    shard_id = uuid4()
    theirs = dataset.mem_wal_writer(str(shard_id), durable_write=True)
    theirs.put(rows(0, 2))
    table.seal_shard(shard_id)
    with pytest.raises(OSError, match=r"(?i)fenced|epoch"):
        theirs.put(rows(2, 1))
    with pytest.raises(OSError, match="sealed"):
        dataset.mem_wal_writer(str(shard_id))
    assert table.count_rows() == 2
    table.unseal_shard(shard_id)
    with dataset.mem_wal_writer(str(shard_id), durable_write=True) as again:
        again.put(rows(2, 1))
    assert table.count_rows() == 3


def test_shards_of_a_table_that_lance_wrote(tmp_path: Path) -> None:
    dataset = lance.write_dataset(KEYED.empty_table(), str(tmp_path / "t"))
    dataset.initialize_mem_wal(bucket_column="id", num_buckets=2)
    shard_id = uuid4()
    with dataset.mem_wal_writer(str(shard_id)) as writer:
        writer.put(rows(0, 2))
    info = the_shard(lancewal.open(dataset))
    assert (info.shard_id, info.spec_id, info.values, info.generations) == (shard_id, 1, {}, (1,))


def test_shard_for_creates_the_shard_of_a_value(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", identity="id")
    shard_id = table.shard_for(7)
    assert shard_id == table.router().shard_of(7) == table.shard_for(7)
    assert the_shard(table).values == {"bucket": 7}


def test_manual_shards_are_made_by_hand(manual: Table) -> None:
    chosen, random = manual.create_shard("0b5f3d0c-92a5-4d0b-8a3a-0d3c3f3ad111"), manual.create_shard()
    assert manual.create_shard(chosen) == chosen
    assert {shard.shard_id for shard in manual.shards()} == {chosen, random}
    with lance.dataset(manual.uri).mem_wal_writer(str(chosen)) as writer:
        writer.put(rows(0, 1))
    with manual.shard_writer(chosen) as ours:
        assert ours.epoch == 2
        ours.put(rows(1, 1))
    fresh = uuid4()
    with manual.shard_writer(str(fresh)) as ours:
        ours.put(rows(2, 1))
    assert {shard.spec_id for shard in manual.shards()} == {0}
    assert fresh in {shard.shard_id for shard in manual.shards()}


@pytest.mark.parametrize("bad", ["", "nope", 7])
def test_what_is_no_shard_id_is_refused(manual: Table, bad: Any) -> None:
    with pytest.raises(InvalidInputError, match="UUID"):
        manual.shard_writer(bad)
    with pytest.raises(InvalidInputError, match="UUID"):
        manual.create_shard(bad)
    assert manual.shards() == []


def test_sharded_table_takes_no_shards_by_hand(table: Table) -> None:
    with pytest.raises(InvalidInputError, match="shard_for"):
        table.create_shard()
    with pytest.raises(InvalidInputError, match="shard_for"):
        table.shard_writer(uuid4())
    assert len(table.shards()) == 4


# --- reads ------------------------------------------------------------------------------


def names(table: Table, **scan: Any) -> dict[int, str]:
    found = table.scan(**scan).to_table()
    return dict(zip(found["id"].to_pylist(), found["name"].to_pylist(), strict=True))


def test_reads_see_every_level_and_the_newest_version(tmp_path: Path) -> None:
    base_rows = pa.Table.from_batches([rows(0, 6, prefix="base")])
    lance.write_dataset(base_rows, str(tmp_path / "t"))
    table = lancewal.initialize(tmp_path / "t", bucket=("id", 3), writer_defaults=fast())
    with table.writer() as writer:
        writer.put(rows(2, 6, prefix="flushed"))
        writer.flush()
        writer.put(rows(5, 4, prefix="live"))
        writer.delete([0, 7])
        expected = {
            1: "base_1",
            **{n: f"flushed_{n}" for n in (2, 3, 4)},
            **{n: f"live_{n}" for n in (5, 6, 8)},
        }
        other = lancewal.open(table.uri)
        for each in (table, other):
            assert names(each) == expected
            assert each.count_rows() == len(expected)
            assert each.count_rows("id > 4") == 3
            assert names(each, filter="name LIKE 'base%'") == {1: "base_1"}
            assert each.lookup(7) is None
            assert each.lookup(8) == {"id": 8, "name": "live_8"}
    assert names(table) == expected


def test_rows_of_another_process_are_read_once_durable(manual: Table) -> None:
    # Lance's writer is not one of ours, so its rows can only come from the WAL.
    theirs = lance.dataset(manual.uri).mem_wal_writer(str(uuid4()), max_wal_flush_interval_ms=1)
    theirs.put(rows(0, 3))
    assert sorted(names(manual)) == [0, 1, 2]
    theirs.close()
    assert sorted(names(manual)) == [0, 1, 2]


def test_rows_that_are_not_durable_yet_are_read_in_this_process(table: Table) -> None:
    with table.writer(durable_write=False, max_wal_flush_interval=None) as writer:
        writer.put(rows(0, 10))
        assert sorted(names(lancewal.open(table.uri))) == list(range(10))


def test_scan_is_a_fixed_state(table: Table) -> None:
    with table.writer() as writer:
        writer.put(rows(0, 5))
        scan = table.scan()
        writer.put(rows(5, 5))
        assert (scan.count_rows(), table.scan().count_rows()) == (5, 10)


def test_scan_takes_columns_limit_offset_and_source(table: Table) -> None:
    with table.writer() as writer:
        writer.put(rows(0, 10))
        found = table.scan(columns=["name"], limit=4, offset=8, with_row_source=True).to_table()
        assert found.num_rows == 2
        assert found.schema.names[0] == "name"
        assert len(found.schema.names) == 3
        assert "filter pushed down" in table.scan(filter="name = 'x'").explain()


def test_lookup_of_one_key_is_a_row_or_nothing(table: Table) -> None:
    with table.writer() as writer:
        writer.put(rows(0, 5))
        assert table.lookup(3) == {"id": 3, "name": "name_3"}
        assert table.lookup({"id": 3}, columns=["name"]) == {"name": "name_3"}
        assert table.lookup(99) is None


@pytest.mark.parametrize(
    "keys",
    [
        [3, 99, 1, 3],
        (3, 99, 1, 3),
        pa.array([3, 99, 1, 3]),
        pa.chunked_array([[3, 99], [1, 3]]),
        pa.table({"id": [3, 99, 1, 3]}),
        pl.DataFrame({"id": [3, 99, 1, 3]}),
        [{"id": 3}, {"id": 99}, {"id": 1}, {"id": 3}],
    ],
)
def test_lookup_of_many_keys_keeps_their_order(table: Table, keys: Any) -> None:
    with table.writer() as writer:
        writer.put(rows(0, 5))
        result = table.lookup(keys)
    assert isinstance(result, lancewal.LookupResult)
    assert result.found.tolist() == [True, False, True, True]
    assert result.table["id"].to_pylist() == [3, 1, 3]


@pytest.mark.parametrize("one_in_a_list", [[3], (3,), pa.table({"id": [3]})])
def test_list_of_one_key_is_still_a_list(table: Table, one_in_a_list: Any) -> None:
    with table.writer() as writer:
        writer.put(rows(0, 5))
    assert isinstance(table.lookup(one_in_a_list), lancewal.LookupResult)


def test_lookup_of_nothing_is_empty(table: Table) -> None:
    assert table.lookup([]).found.tolist() == []


def test_composite_keys_are_looked_up(tmp_path: Path) -> None:
    key = {"lance-schema:unenforced-primary-key": "true"}
    schema = pa.schema(
        [
            pa.field("tenant", pa.string(), nullable=False, metadata=key),
            pa.field("id", pa.int64(), nullable=False, metadata=key),
            pa.field("name", pa.string()),
        ]
    )
    table = wal_table(tmp_path / "t", schema, identity="tenant")
    with table.writer() as writer:
        writer.put(pa.table({"tenant": ["a", "b"], "id": [1, 1], "name": ["x", "y"]}))
        writer.delete(pa.table({"tenant": ["b"], "id": [1]}))
        first = dict(zip(table.primary_key, ("a", 1), strict=True))
        assert table.lookup(tuple(first.values())) == {"tenant": "a", "id": 1, "name": "x"}
        assert table.lookup({"id": 1, "tenant": "b"}) is None
        assert table.lookup([("a", 1), ("b", 1)]).found.tolist() == [True, False]
        assert table.lookup((("a", 1), ("b", 1))).found.tolist() == [True, False]


def test_lookup_without_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no primary key"):
        wal_table(tmp_path / "t", APPEND_ONLY).lookup(1)


def test_append_only_table_reads_every_row_once(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", APPEND_ONLY, bucket=("id", 2))
    with table.writer() as writer:
        assert writer.put(rows(0, 10, schema=APPEND_ONLY)).num_rows == 10
        writer.flush()
        writer.put(rows(0, 10, schema=APPEND_ONLY))
        assert table.count_rows() == 20
        assert sorted(table.scan().to_table()["id"].to_pylist()) == sorted([*range(10), *range(10)])


def test_failing_shard_leaves_the_others_rows_readable(table: Table) -> None:
    store = FaultyStore(ObjectStore.from_uri(table.uri, fsync=False))
    broken = table.router().shard_of(0)
    store.faults.fail("put_if_absent", times=None, where=layout.wal_dir(broken))
    writer = Table.open(table.uri, store=store).writer()
    with pytest.raises(PartialWriteError):
        writer.put(rows(0, 40))
    expected = [n for n in range(40) if table.router().shard_of(n) != broken]
    assert sorted(names(table)) == expected
    with pytest.raises(PartialWriteError):
        writer.close()
    assert sorted(names(table)) == expected


# --- flush ------------------------------------------------------------------------------


def test_flush_goes_through_the_writers_of_this_process(table: Table) -> None:
    with table.writer() as writer:
        writer.put(rows(0, 40))
        lancewal.open(table.uri).flush()
        assert all(shard.generations == (1,) for shard in table.shards())
        writer.put(rows(0, 40))
        assert {shard.epoch for shard in table.shards()} == {1}, "nobody was fenced"


def test_flush_takes_over_shards_that_nobody_writes(table: Table) -> None:
    writer = table.writer(enable_memtable=False)
    writer.put(rows(0, 40))
    writer.close()
    assert all(shard.tail_length == 1 for shard in table.shards())
    table.flush()
    assert all(shard.generations == (1,) for shard in table.shards())


def test_flush_of_a_crashed_writers_rows(manual: Table) -> None:
    shard = manual.create_shard()
    crashed = manual.shard_writer(shard)
    crashed.put(rows(0, 5))
    abandon(crashed)
    del crashed
    manual.flush()
    assert the_shard(manual).generations == (1,)


def test_flush_with_nothing_to_do_claims_nothing(table: Table) -> None:
    for _ in range(2):
        # The second writer leaves a sentinel behind, which is no row.
        with table.writer() as writer:
            writer.put(rows(0, 40))
    before = table.shards()
    table.flush()
    table.flush()
    assert table.shards() == before


def test_a_writer_that_had_flushed_by_itself_meanwhile_was_fenced_for_nothing(
    manual: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sorted(manual.create_shard() for _ in range(2))
    with manual.shard_writer(first) as writer, manual.shard_writer(second) as idle:
        writer.put(rows(0, 3))
        idle.put(rows(3, 3))
        # As those of another process.
        monkeypatch.setattr(drain, "live_writer", lambda uri, shard_id: None)
        monkeypatch.setattr(drain, "_LOCAL_FLUSHES", 1)
        real = drain.flush_shard

        def flush_shard(base: Any, manifest: Any, *args: Any) -> int:
            flushed = real(base, manifest, *args)
            if manifest.shard_id == first:
                idle.force_seal_active()
                idle.wait_for_flush_drain()
            return flushed

        monkeypatch.setattr(drain, "flush_shard", flush_shard)
        manual.flush()
        assert [shard.epoch for shard in manual.shards()] == [2, 1]
        idle.put(rows(6, 1))
        with pytest.raises(FencedError):
            writer.put(rows(7, 1))
        abandon(writer)


def test_flush_fences_the_writer_of_another_process(manual: Table) -> None:
    shard = manual.create_shard()
    theirs = lance.dataset(manual.uri).mem_wal_writer(str(shard), max_wal_flush_interval_ms=1)
    theirs.put(rows(0, 3))
    manual.flush()
    assert the_shard(manual).epoch == 2
    for call in (lambda: theirs.put(rows(3, 1)), theirs.close):
        with pytest.raises(OSError, match=r"(?i)fenced"):
            call()
    assert the_shard(manual).generations == (1,)


def test_flush_of_wal_only_table_with_a_small_queue(tmp_path: Path) -> None:
    stored = {"enable_memtable": "false", "max_unflushed_memtable_bytes": "1000", "fsync": "false"}
    table = wal_table(tmp_path / "t", unsharded=True, writer_defaults=stored)
    with table.writer() as writer:
        writer.put(rows(0, 40))
    table.flush()
    assert the_shard(table).generations == (1,)


def test_flush_works_whatever_writer_defaults_lance_has_stored(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    dataset = lance.write_dataset(KEYED.empty_table(), uri)
    dataset.initialize_mem_wal(unsharded=True, max_memtable_size=4 << 30, manifest_scan_batch_size=0)
    table = lancewal.open(uri)
    with table.writer(fast(enable_memtable=False)) as writer:
        writer.put(rows(0, 3))
    assert table.status().unflushed.count == 1
    table.flush()
    assert table.status().uncompacted.count == 1
    with table.writer() as writer:
        writer.put(rows(3, 1))
    table.compact()
    assert table.count_rows() == lance.dataset(uri).count_rows() == 4


def test_flush_takes_settings_that_win_over_those_of_the_table(table: Table) -> None:
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(0, 8))
    with pytest.raises(InvalidInputError, match="max_memtable_row"):
        table.flush(max_memtable_row=1)
    with pytest.raises(InvalidInputError, match="max_memtable_rows"):
        table.flush(ShardWriterConfig(fsync=False), max_memtable_rows=0)
    table.flush(max_memtable_rows=1)
    assert table.count_rows() == 8
    assert not table.status().unflushed.count


def test_failing_flush_names_the_shard(table: Table) -> None:
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(0, 40))
    store = FaultyStore(ObjectStore.from_uri(table.uri, fsync=False))
    broken = table.router().shard_of(0)
    store.faults.fail("put_if_absent", times=None, where=layout.manifest_dir(broken))
    with pytest.raises(PartialWriteError, match="flush") as caught:
        Table.open(table.uri, store=store).flush()
    assert list(caught.value.failed) == [broken]
    assert {shard.shard_id for shard in table.shards() if not shard.generations} == {broken}
    table.flush()
    assert all(shard.generations == (1,) for shard in table.shards())


# --- fencing and interop ----------------------------------------------------------------


def test_shard_writer_fences_its_predecessor(table: Table) -> None:
    shard = table.shard_for(1)
    first = table.shard_writer(shard)
    with table.shard_writer(shard, take_over="now") as second:
        with pytest.raises(FencedError):
            first.put(rows(1, 1))
        second.put(rows(1, 1))
    first.close()


def test_lance_takes_over_a_shard_of_ours_and_we_take_it_back(table: Table) -> None:
    shard = table.shard_for(1)
    with table.shard_writer(shard) as ours:
        ours.put(rows(1, 1, prefix="ours"))
    with lance.dataset(table.uri).mem_wal_writer(str(shard)) as theirs:
        theirs.put(rows(1, 1, prefix="theirs"))
    with table.writer() as ours_again:
        ours_again.put(rows(1, 1, prefix="again"))
    (info,) = [each for each in table.shards() if each.shard_id == shard]
    assert (info.epoch, info.generations) == (3, (1, 2, 3))
    assert info.values == {"bucket": table.router().values(rows(1, 1))[0].as_py()}


def test_table_on_s3(s3: S3Server) -> None:
    uri, options = s3.uri(f"{uuid4().hex}/table"), dict(s3.storage_options)
    lance.write_dataset(KEYED.empty_table(), uri, storage_options=options)
    table = lancewal.initialize(uri, bucket=("id", 2), storage_options=options)
    with table.writer() as writer:
        writer.put(rows(0, 10))
    assert sorted(shard.values["bucket"] for shard in table.shards()) == [0, 1]
    assert all(shard.generations == (1,) for shard in table.shards())
