"""Backups: one consistent state, copied beside everything else, whole or not at all."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest

import lancewal
from lancewal.errors import ConflictError, InvalidInputError, LanceWalError, StorageError
from lancewal.maintenance.backup import back_up, check_backup, list_backups, read_record
from lancewal.publish.feed import ChangeFeed
from lancewal.storage import ObjectStore, layout
from tests.faults import FaultyStore
from tests.servers import S3Server
from tests.tables import APPEND_ONLY, KEYED, rows, wal_table


def put(table: lancewal.Table, *batches: pa.RecordBatch, deletes: tuple[int, ...] = ()) -> None:
    """Rows that stay in the log."""
    with table.writer(enable_memtable=False) as writer:
        for batch in batches:
            writer.put(batch)
        if deletes:
            writer.delete(list(deletes))


def fill_all_levels(table: lancewal.Table, schema: pa.Schema = KEYED) -> None:
    keyed = schema is KEYED
    put(table, rows(0, 20, schema=schema, prefix="base"), deletes=(3,) if keyed else ())
    table.flush()
    table.compact()
    put(table, rows(10, 10, schema=schema, prefix="flushed"), deletes=(5, 12) if keyed else ())
    table.flush()
    put(table, rows(18, 10, schema=schema, prefix="logged"), deletes=(6,) if keyed else ())


def content(table: lancewal.Table) -> list[tuple[int, str]]:
    found = table.scan().to_table()
    return sorted(zip(found["id"].to_pylist(), found["name"].to_pylist(), strict=True))


@pytest.fixture
def table(tmp_path: Path) -> lancewal.Table:
    table = wal_table(tmp_path / "table", bucket=("id", 2))
    fill_all_levels(table)
    return table


def test_what_a_collection_saw_is_not_said_of_the_restored_table(
    tmp_path: Path, table: lancewal.Table
) -> None:
    table.gc()
    assert table._store.list(layout.LOOKS_DIR)
    table.backup(tmp_path / "backups")
    restored = lancewal.restore(tmp_path / "backups", tmp_path / "restored")
    assert restored._store.list(layout.LOOKS_DIR) == []


@pytest.mark.parametrize("schema", [KEYED, APPEND_ONLY], ids=["key", "no key"])
def test_a_restored_table_has_the_rows_and_goes_on(tmp_path: Path, schema: pa.Schema) -> None:
    how = {"bucket": ("id", 2)} if schema is KEYED else {"unsharded": True}
    table = wal_table(tmp_path / "table", schema, **how)
    fill_all_levels(table, schema)
    lance.dataset(table.uri).create_scalar_index("id", "BTREE")
    before = content(table)
    epochs = {
        shard.shard_id: (shard.epoch, shard.current_generation, shard.wal_tip) for shard in table.shards()
    }
    report = table.backup(tmp_path / "backups")
    put(table, rows(100, 5, schema=schema))
    restored = lancewal.restore(tmp_path / "backups", tmp_path / "restored", backup=report.id)
    assert content(restored) == before
    assert check_backup(ObjectStore.from_uri(tmp_path / "backups")) == []
    assert restored.verify().findings == []
    found = {
        shard.shard_id: (shard.epoch, shard.current_generation, shard.wal_tip) for shard in restored.shards()
    }
    assert found == epochs
    dataset = lance.dataset(restored.uri)
    assert dataset.version == report.version
    assert [index["name"] for index in dataset.list_indices() if index["type"] == "BTree"] == ["id_idx"]
    # Lance's own writer takes over a shard, replays, and writes on.
    shard = restored.shards()[0].shard_id
    with dataset.mem_wal_writer(str(shard), durable_write=True):
        assert content(restored) == before
    put(restored, rows(200, 3, schema=schema))
    restored.flush()
    restored.compact()
    restored.gc(min_age=timedelta(0))
    assert restored.verify().ok
    assert content(restored) == sorted([*before, *((i, f"name_{i}") for i in range(200, 203))])
    assert lance.dataset(restored.uri).count_rows() == len(before) + 3
    assert content(table) == sorted([*before, *((i, f"name_{i}") for i in range(100, 105))])


def test_what_an_earlier_backup_has_is_not_copied_again(tmp_path: Path, table: lancewal.Table) -> None:
    first = table.backup(tmp_path / "backups")
    assert first.copied_files == first.files
    before = content(table)
    put(table, rows(500, 1))
    second = table.backup(tmp_path / "backups")
    source = ObjectStore.from_uri(tmp_path / "backups")
    shared = [file for file in read_record(source).files if file.stored.startswith("files/")]
    assert shared
    assert second.copied_files == second.files - len(shared)
    assert second.copied_bytes < second.num_bytes
    assert list_backups(source) == [first.id, second.id]
    assert content(lancewal.restore(tmp_path / "backups", tmp_path / "one", backup=first.id)) == before
    assert content(lancewal.restore(tmp_path / "backups", tmp_path / "two")) == content(table)


def test_no_backup_could_be_made_beside_a_damaged_record(tmp_path: Path, table: lancewal.Table) -> None:
    source = ObjectStore.from_uri(tmp_path / "backups")
    first, second = table.backup(tmp_path / "backups"), table.backup(tmp_path / "backups")
    source.put(f"backups/{second.id}.json", b"")
    with pytest.raises(StorageError, match="name another backup"):
        lancewal.restore(tmp_path / "backups", tmp_path / "restored")
    third = table.backup(tmp_path / "backups")
    assert third.copied_files == second.copied_files < first.copied_files
    assert content(lancewal.restore(tmp_path / "backups", tmp_path / "restored")) == content(table)
    for id_ in (first.id, third.id):
        source.put(f"backups/{id_}.json", b"")
    fourth = table.backup(tmp_path / "backups")
    assert fourth.copied_files == first.copied_files
    assert check_backup(source) == []


def test_a_backup_that_died_at_any_write_is_no_backup(tmp_path: Path, table: lancewal.Table) -> None:
    store = ObjectStore.from_uri(table.uri)
    earlier = table.backup(tmp_path / "backups").id
    before = content(table)
    put(table, rows(500, 1))
    table.flush()
    plain = ObjectStore.from_uri(tmp_path / "backups", fsync=False)
    for kind in ("put", "put_from"):
        for nth in range(1, 100):
            destination = FaultyStore(plain)
            destination.faults.fail(kind, nth=nth)
            try:
                back_up(store, destination)
            except StorageError:
                assert list_backups(plain) == [earlier]
            else:
                break
        else:
            raise AssertionError("no backup got through")
        last = list_backups(plain)[-1]
        if last != earlier:
            plain.delete(f"backups/{last}.json")
    back_up(store, plain)
    assert content(lancewal.restore(tmp_path / "backups", tmp_path / "earlier", backup=earlier)) == before
    assert content(lancewal.restore(tmp_path / "backups", tmp_path / "newest")) == content(table)


def test_an_sstable_that_was_half_collected_was_backed_up_as_if_it_were_whole(
    tmp_path: Path, table: lancewal.Table
) -> None:
    put(table, rows(500, 3))
    table.flush()
    store = ObjectStore.from_uri(table.uri, fsync=False)
    versions = [
        info.path for info in store.list("_mem_wal") if "_gen_" in info.path and "/_versions/" in info.path
    ]
    assert versions
    for path in versions:
        store.delete(path)
    with pytest.raises(LanceWalError):
        table.backup(tmp_path / "backups")
    assert list_backups(ObjectStore.from_uri(tmp_path / "backups")) == []


def test_every_damaged_or_missing_file_of_a_backup_is_noticed(tmp_path: Path, table: lancewal.Table) -> None:
    table.backup(tmp_path / "backups")
    source = ObjectStore.from_uri(tmp_path / "backups", fsync=False)
    for number, file in enumerate(read_record(source).files):
        good = source.get(file.stored)
        for bad in (good[:-1] + bytes([good[-1] ^ 1]), good + b"?", None):
            source.delete(file.stored) if bad is None else source.put(file.stored, bad)
            assert len(check_backup(source)) == 1
            target = tmp_path / f"restored-{number}"
            with pytest.raises(StorageError, match=r"damaged|missing"):
                lancewal.restore(tmp_path / "backups", target)
            with pytest.raises(InvalidInputError, match="no Lance table"):
                lancewal.open(target)
            ObjectStore.from_uri(target).delete_prefix("_mem_wal")
            for directory in ("data", "_deletions", "_indices", "_versions"):
                ObjectStore.from_uri(target).delete_prefix(directory)
        source.put(file.stored, good)
    assert content(lancewal.restore(tmp_path / "backups", tmp_path / "whole")) == content(table)


def test_what_cannot_be_is_refused(tmp_path: Path, table: lancewal.Table) -> None:
    with pytest.raises(InvalidInputError, match="no finished backup"):
        lancewal.restore(tmp_path / "nothing", tmp_path / "restored")
    with pytest.raises(InvalidInputError, match="part of the table"):
        table.backup(f"{table.uri}/backups")
    table.backup(tmp_path / "backups")
    with pytest.raises(InvalidInputError, match="there is no backup 'x'"):
        lancewal.restore(tmp_path / "backups", tmp_path / "restored", backup="x")
    with pytest.raises(InvalidInputError, match=r"files at .* already"):
        lancewal.restore(tmp_path / "backups", table.uri)
    lance.dataset(table.uri).shallow_clone(str(tmp_path / "clone"), lance.dataset(table.uri).version)
    with pytest.raises(InvalidInputError, match="deep clone"):
        lancewal.open(tmp_path / "clone").backup(tmp_path / "other")


def test_what_is_flushed_and_collected_while_it_is_copied_starts_the_backup_again(
    tmp_path: Path, table: lancewal.Table
) -> None:
    before = content(table)
    store = FaultyStore(ObjectStore.from_uri(table.uri))

    def flush_and_collect() -> None:
        table.flush()
        for shard in table.shards():
            for position in range(1, shard.wal_tip):
                store.inner.delete(layout.wal_entry(shard.shard_id, position))

    store.faults.before("get", flush_and_collect, where=layout.WAL_SUFFIX)
    back_up(store, ObjectStore.from_uri(tmp_path / "backups"))
    assert content(lancewal.restore(tmp_path / "backups", tmp_path / "restored")) == before


def test_half_of_an_sstable_that_was_being_collected_was_taken_for_all_of_it(tmp_path: Path) -> None:
    """The backup was said to be done, and the table restored from it could not be read."""
    table = wal_table(tmp_path / "table", unsharded=True)
    with table.writer() as writer:
        writer.put(rows(0, 3))
    store = FaultyStore(ObjectStore.from_uri(table.uri))
    shard = table.shards()[0].shard_id
    (name,) = [name for name in store.list_directories(layout.shard_dir(shard)) if "_gen_" in name]
    directory = layout.sstable_dir(shard, name)

    def collected_by_half() -> None:
        store.inner.delete_prefix(f"{directory}/_versions")

    store.faults.before("list", collected_by_half, where=directory)
    with pytest.raises(ConflictError, match="larger min_age"):
        back_up(store, ObjectStore.from_uri(tmp_path / "backups"))
    assert not list_backups(ObjectStore.from_uri(tmp_path / "backups"))


def test_to_s3_and_back(tmp_path: Path, table: lancewal.Table, s3: S3Server) -> None:
    where = s3.uri("backups-of-a-table")
    report = table.backup(where, s3.storage_options)
    assert table.backup(where, s3.storage_options).copied_bytes < report.copied_bytes
    restored = lancewal.restore(where, tmp_path / "restored", source_options=s3.storage_options)
    assert content(restored) == content(table)
    remote = (
        lancewal.restore(tmp_path / "local", s3.uri("restored"), storage_options=s3.storage_options)
        if table.backup(tmp_path / "local")
        else None
    )
    assert remote is not None
    assert content(remote) == content(table)


def test_a_backup_under_load_is_one_consistent_state(tmp_path: Path) -> None:
    """A writer, flushes, compactions and collections beside it; both rows of a put have one number."""
    table = wal_table(tmp_path / "table", unsharded=True)
    acknowledged = [0]
    stop, collect = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            number = 0
            with table.writer() as writer:
                while not stop.is_set():
                    number += 1
                    writer.put(pa.table([[1, 2], [str(number)] * 2], schema=KEYED))
                    writer.put(pa.table([[100 + number], [str(number)]], schema=KEYED))
                    acknowledged[0] = number
                    if number % 7 == 0:
                        table.flush()
        except BaseException as error:
            failures.append(error)

    def maintain() -> None:
        try:
            while not stop.is_set():
                table.compact()
                # Once for each backup, at some moment of it: without end, none would get through.
                if collect.is_set():
                    collect.clear()
                    table.gc(min_age=timedelta(0))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for work in (write, maintain)]
    for thread in threads:
        thread.start()
    try:
        for number in range(5):
            reached = acknowledged[0]
            while acknowledged[0] < reached + 10 and not failures:
                stop.wait(0.01)
            least = acknowledged[0]
            collect.set()
            table.backup(tmp_path / "backups")
            most = acknowledged[0] + 1
            found = dict(content(lancewal.restore(tmp_path / "backups", tmp_path / f"restored-{number}")))
            assert found[1] == found[2]
            newest = int(found[1])
            assert least <= newest <= most
            others = sorted(int(name) for key, name in found.items() if key > 100)
            assert others in (list(range(1, newest + 1)), list(range(1, newest)))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures, failures


def test_records_of_streams_speak_of_rows_that_are_in_the_backup(
    tmp_path: Path, table: lancewal.Table
) -> None:
    store = FaultyStore(ObjectStore.from_uri(table.uri))
    done = f"{layout.OWN_DIR}/transactions/abc/{1:020d}.done"
    begun = f"{layout.OWN_DIR}/transactions/abc/{1:020d}.started.run"

    def write_records() -> None:
        store.inner.put(begun, b"{}")
        store.inner.put(done, b"{}")

    store.faults.before("list", write_records, where="/wal")
    back_up(store, ObjectStore.from_uri(tmp_path / "backups"))
    paths = {file.path for file in read_record(ObjectStore.from_uri(tmp_path / "backups")).files}
    assert begun in paths
    assert done not in paths


def test_the_feed_of_a_restored_table_goes_on_where_the_log_was(
    tmp_path: Path, table: lancewal.Table
) -> None:
    place = ChangeFeed.open(table.uri).latest()
    table.backup(tmp_path / "backups")
    restored = lancewal.restore(tmp_path / "backups", tmp_path / "restored")
    feed = ChangeFeed.open(restored.uri)
    assert feed.latest() == place
    put(restored, rows(700, 2))
    changes = pa.Table.from_batches(feed.changes(place, feed.latest()), feed.schema)
    assert sorted(changes["id"].to_pylist()) == [700, 701]
