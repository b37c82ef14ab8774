"""TableWriter: routing, inputs, order, failures of single shards, and its end."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from lance.mem_wal import LsmScanner, ShardSnapshot

import lancewal
from lancewal.errors import (
    ClosedError,
    FencedError,
    InvalidInputError,
    LanceWalError,
    OutcomeUnknownError,
    PartialWriteError,
    SealedShardError,
    ShardOwnedError,
    StorageError,
)
from lancewal.shard import WalTailer
from lancewal.shard.discovery import discover_manifests
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import ObjectStore, layout
from lancewal.table import Table
from lancewal.writer.table_writer import TableWriter, is_stream
from tests.faults import FaultyStore
from tests.patience import PATIENCE, wait_until
from tests.tables import APPEND_ONLY, KEY, KEYED, ids, rows, wal_table

TENANTS = pa.schema(
    [
        pa.field("tenant", pa.string(), nullable=False, metadata=KEY),
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("name", pa.string()),
    ]
)


def faulty(table: Table) -> tuple[Table, FaultyStore]:
    store = FaultyStore(ObjectStore.from_uri(table.uri, fsync=False))
    return Table.open(table.uri, store=store), store


def logged(table: Table) -> dict[UUID, list[dict[str, Any]]]:
    """The rows in the WAL of each shard that has any, in their order."""
    store = ObjectStore.from_uri(table.uri)
    found = {}
    for manifest in discover_manifests(store):
        entries = WalTailer(store, manifest.shard_id)
        shard_rows = [row for entry in entries for batch in entry.batches for row in batch.to_pylist()]
        if shard_rows:
            found[manifest.shard_id] = shard_rows
    return found


def logged_ids(table: Table) -> list[int]:
    return sorted(row["id"] for shard_rows in logged(table).values() for row in shard_rows)


def read_by_lance(table: Table) -> list[dict[str, Any]]:
    """What Lance's own scanner sees of the flushed shards, sorted."""
    snapshots = []
    for manifest in discover_manifests(ObjectStore.from_uri(table.uri)):
        snapshot = ShardSnapshot(str(manifest.shard_id)).with_spec_id(manifest.shard_spec_id)
        snapshot = snapshot.with_current_generation(manifest.current_generation)
        for entry in manifest.sstables:
            snapshot = snapshot.with_sstable(entry.generation, entry.path)
        snapshots.append(snapshot)
    found = LsmScanner.from_snapshots(lance.dataset(table.uri), snapshots).to_table()
    return sorted(found.to_pylist(), key=lambda row: tuple(row[name] for name in table.primary_key))


# --- routing ----------------------------------------------------------------------------


def test_rows_go_to_the_shards_of_their_keys_and_lance_reads_them(table: Table) -> None:
    router = table.router()
    with table.writer() as writer:
        result = writer.put(rows(0, 50))
        assert result.num_rows == 50
        assert result.done()
        assert set(result.shards) == {router.shard_of(n) for n in range(50)}
        for shard, shard_rows in logged(table).items():
            assert {router.shard_of(row["id"]) for row in shard_rows} == {shard}
        assert logged_ids(table) == list(range(50))
    assert read_by_lance(table) == rows(0, 50).to_pylist()


def test_shards_are_claimed_when_their_first_row_comes(table: Table) -> None:
    with table.writer() as writer:
        assert writer.shard_writers == {}
        writer.put(rows(7, 1))
        assert list(writer.shard_writers) == [table.router().shard_of(7)]
    assert sorted(shard.epoch for shard in table.shards()) == [0, 0, 0, 1]


def test_identity_shards_are_created_with_their_value(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", TENANTS, identity="tenant")
    batch = pa.table({"tenant": ["a", "b", "a"], "id": [1, 1, 2], "name": ["x", "y", "z"]})
    with table.writer() as writer:
        writer.put(batch)
        writer.delete(pa.table({"id": [1], "tenant": ["a"]}))
    assert sorted(shard.values["bucket"] for shard in table.shards()) == ["a", "b"]
    assert [(row["tenant"], row["id"]) for row in read_by_lance(table)] == [("a", 2), ("b", 1)]


def test_null_identity_has_a_shard_of_its_own(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", APPEND_ONLY, identity="name")
    with table.writer() as writer:
        writer.put(pa.table({"id": [1, 2, 3], "name": ["a", None, None]}))
    assert sorted(len(each) for each in logged(table).values()) == [1, 2]
    assert sorted(map(str, (shard.values for shard in table.shards()))) == ["{'bucket': 'a'}", "{}"]


def test_unsharded_table_continues_the_shard_that_lance_began(tmp_path: Path) -> None:
    dataset = lance.write_dataset(KEYED.empty_table(), str(tmp_path / "t"))
    dataset.initialize_mem_wal(unsharded=True)
    theirs = "0b5f3d0c-92a5-4d0b-8a3a-0d3c3f3ad111"
    with dataset.mem_wal_writer(theirs) as writer:
        writer.put(rows(0, 3, prefix="old"))
    table = lancewal.open(dataset)
    with table.writer(fsync=False) as writer:
        writer.put(rows(2, 2, prefix="new"))
    assert [str(shard.shard_id) for shard in table.shards()] == [theirs]
    assert [row["name"] for row in read_by_lance(table)] == ["old_0", "old_1", "new_2", "new_3"]


def test_manual_table_is_refused_with_a_hint(tmp_path: Path) -> None:
    dataset = lance.write_dataset(KEYED.empty_table(), str(tmp_path / "t"))
    with pytest.raises(InvalidInputError, match="shard_writer"):
        lancewal.initialize(dataset, by_hand=True).writer()


# --- inputs -----------------------------------------------------------------------------


class StreamOnly:
    """An object whose only interface is the Arrow C stream."""

    def __init__(self, data: pa.Table) -> None:
        self._data = data

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._data.to_reader(max_chunksize=7).__arrow_c_stream__(requested_schema)


TWENTY = pa.Table.from_batches([rows(0, 20)])

INPUTS = {
    "batch": rows(0, 20),
    "table": TWENTY,
    "chunked table": pa.concat_tables([TWENTY.slice(0, 5), TWENTY.slice(5, 0), TWENTY.slice(5)]),
    "list": [rows(0, 10), rows(10, 10)],
    "pandas": TWENTY.to_pandas(),
    "polars": pl.from_arrow(TWENTY),
    "reordered": TWENTY.select(["name", "id"]),
    "stream": StreamOnly(TWENTY),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(table: Table, name: str) -> None:
    with table.writer() as writer:
        assert writer.put(INPUTS[name]).num_rows == 20
    assert read_by_lance(table) == rows(0, 20).to_pylist()


def test_reader_is_written_batch_by_batch(table: Table) -> None:
    produced = []

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, 50, 10):
            produced.append(start)
            # Everything before is in the log by now, so nothing is held back here.
            assert logged_ids(table) == list(range(start))
            yield rows(start, 10)
            yield rows(0, 0)

    with table.writer() as writer:
        reader = pa.RecordBatchReader.from_batches(KEYED, batches())
        assert writer.put(reader).num_rows == 50
        assert produced == [0, 10, 20, 30, 40]
        produced.clear()
    assert read_by_lance(table) == rows(0, 50).to_pylist()


def test_iterator_of_batches_and_frames_is_a_stream(table: Table) -> None:
    parts = [rows(0, 5), pl.from_arrow(TWENTY.slice(5, 5)), TWENTY.slice(10, 5).to_reader(), rows(15, 5)]
    with table.writer() as writer:
        assert writer.put(iter(parts)).num_rows == 20
    assert logged_ids(table) == list(range(20))


def test_frames_and_lists_are_no_streams() -> None:
    assert not any(is_stream(INPUTS[name]) for name in INPUTS if name != "stream")
    assert is_stream(INPUTS["stream"])
    assert is_stream(TWENTY.to_reader())
    assert is_stream(iter([TWENTY]))


@pytest.mark.parametrize("nothing", [[], TWENTY.slice(0, 0), TWENTY.slice(0, 0).to_reader(), iter([])])
def test_nothing_to_write_writes_nothing(table: Table, nothing: Any) -> None:
    with table.writer() as writer:
        result = writer.put(nothing)
        assert (result.num_rows, result.shards, result.done(), result.wait()) == (0, {}, True, True)
        assert writer.shard_writers == {}


def test_missing_nullable_column_is_filled(table: Table) -> None:
    with table.writer() as writer:
        writer.put(pa.table({"id": [1]}))
    assert read_by_lance(table) == [{"id": 1, "name": None}]


def test_numbers_are_converted_unless_a_value_changes_and_text_on_request_only(table: Table) -> None:
    narrow, text = pa.table({"id": pa.array([1], pa.int32())}), pa.table({"id": ["2"]})
    with table.writer(cast=False) as writer, pytest.raises(InvalidInputError, match='cast="numbers"'):
        writer.put(narrow)
    with table.writer() as writer:
        writer.put(narrow)
        with pytest.raises(InvalidInputError, match=r"column id .* row 1 is 1\.5"):
            writer.put(pa.table({"id": [1.0, 1.5]}))
        with pytest.raises(InvalidInputError, match="cast=True"):
            writer.put(text)
    with table.writer(cast=True) as writer:
        writer.put(text)
    assert logged_ids(table) == [1, 2]


SEVERAL_KEYS: dict[str, Any] = {
    "pandas series": pd.Series([1, 2]),
    "pandas series with another index": pd.Series([0, 1, 2])[1:],
    "nullable pandas series": pd.Series([1, 2], dtype="Int64"),
    "pandas index": pd.Index([1, 2]),
    "polars series": pl.Series([1, 2]),
    "numpy array": np.array([1, 2]),
    "chunked array": pa.chunked_array([[1], [2]]),
    "set": {1, 2},
    "keys of a dictionary": {1: "a", 2: "b"}.keys(),
}


@pytest.mark.parametrize("kind", SEVERAL_KEYS)
def test_keys_in_a_column_of_pandas_raised_a_bare_error(table: Table, kind: str) -> None:
    keys = SEVERAL_KEYS[kind]
    with table.writer() as writer:
        writer.put(rows(0, 4))
        assert table.lookup(keys).found.tolist() == [True, True]
        assert writer.delete(keys).num_rows == 2
    assert ids(table.scan().to_table()) == [0, 3]


@pytest.mark.parametrize(
    "keys",
    [pd.Series([1, None]), pd.Series(["a"]), pl.Series([1.5]), np.array([[1]]), pd.Series([], dtype=object)],
)
def test_wrong_keys_in_a_column_are_refused(table: Table, keys: Any) -> None:
    with table.writer() as writer, pytest.raises(InvalidInputError):
        writer.delete(keys)


@pytest.mark.parametrize("data", [pl.Series([1]), pd.Series([1]), pd.DataFrame({"id": [1, "a"]})])
def test_rows_that_arrow_cannot_read_raised_a_bare_error(table: Table, data: Any) -> None:
    with (
        table.writer() as writer,
        pytest.raises(InvalidInputError, match=r"cannot read rows|column id, row 1"),
    ):
        writer.put(data)


def test_delete_of_a_condition_reported_one_row_and_deleted_nothing(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("name", pa.string(), False, KEY), pa.field("text", pa.string())])
    table = wal_table(tmp_path / "names", schema, unsharded=True)
    with table.writer() as writer:
        writer.put(pa.table({"name": ["a", "text = 'x'", "a = b", "text"], "text": ["x", "y", "z", None]}))
        for condition in ("text = 'x'", "name IN ('a')", "text IS NULL", "name LIKE 'a%' AND text < 'z'"):
            with pytest.raises(InvalidInputError, match="is a condition"):
                writer.delete(condition)
        # What is no condition on this table's columns is a key, and so is what comes in a list.
        writer.delete("a = b")
        writer.delete("text")
        writer.delete(["text = 'x'"])
        assert table.scan().to_table()["name"].to_pylist() == ["a"]
        writer.delete(table.scan(columns=["name"], filter="text = 'x'").to_table())
    assert table.count_rows() == 0


def test_column_that_came_after_the_writer_was_said_not_to_be_in_the_table(table: Table) -> None:
    with table.writer() as writer:
        writer.put(rows(0, 8))
        lance.dataset(table.uri).add_columns(pa.schema([pa.field("late", pa.int64())]))
        for put in (writer.put, next(iter(writer.shard_writers.values())).put):
            with pytest.raises(InvalidInputError, match="got the column late after this writer was opened"):
                put(pa.table({"id": [1], "late": [2]}))
            with pytest.raises(InvalidInputError, match="the table has no column never, late; its columns"):
                put(pa.table({"id": [1], "never": [2], "late": [2]}))
    with table.writer() as writer:
        writer.put(pa.table({"id": [1], "late": [2]}))
    assert table.lookup(1, columns=["late"]) == {"late": 2}


FLOATS = pa.schema([*KEYED, pa.field("f", pa.float32()), pa.field("v", pa.list_(pa.float32(), 2))])


def test_cast_stored_infinity_for_a_double_and_rounded_without_being_asked(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "floats", FLOATS, unsharded=True)
    exact = pa.table({"id": [1], "f": [0.5], "v": [[1.5, 2.0]]})
    digits = pa.table({"id": [2, 3], "f": [0.5, 0.1], "v": [[1.5, 2.0], [0.1, 0.2]]})
    huge = pa.table({"id": [4, 5], "f": [0.5, 1e300], "v": [[1.5, 2.0], [1e300, 0.2]]})
    for cast in (True, "exact"):
        with table.writer(cast=cast) as writer:
            writer.put(exact)
            for column in ("f", "v"):
                with pytest.raises(
                    InvalidInputError, match=f'column {column} .*row 1 is .*0.1.*cast="round"'
                ):
                    writer.put(digits.select(["id", column]))
            with pytest.raises(InvalidInputError, match=r"column f .*row 1 is 1e.300"):
                writer.put(huge)
    with table.writer(cast="round") as writer:
        writer.put(digits)
        for column in ("f", "v"):
            with pytest.raises(InvalidInputError, match=f"column {column} .*row 1 is .*1e.300"):
                writer.put(huge.select(["id", column]))
    found = table.scan().to_table().sort_by("id").to_pydict()
    assert found["id"] == [1, 2, 3]
    assert found["f"] == pytest.approx([0.5, 0.5, 0.1])
    assert found["v"][2] == pytest.approx([0.1, 0.2])


def test_cast_of_another_word_is_refused(table: Table) -> None:
    with pytest.raises(InvalidInputError, match="cast is 'nearest'"):
        table.writer(cast="nearest")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [
        pa.table({"id": [1], "nope": [1]}),
        pa.table({"id": ["text"]}),
        pa.table({"id": pa.array([1, None])}),
        pa.table({"name": ["x"]}),
        [rows(0, 3), pa.record_batch({"id": pa.array([1, None])})],
        42,
    ],
)
def test_refused_input_has_no_effect_anywhere(table: Table, bad: Any) -> None:
    with table.writer() as writer:
        with pytest.raises(InvalidInputError):
            writer.put(bad)
        assert writer.shard_writers == {}
    assert logged(table) == {}
    assert {shard.epoch for shard in table.shards()} == {0}


def test_stream_that_turns_bad_says_what_was_written(table: Table) -> None:
    stream = iter([rows(0, 4), pa.record_batch({"id": pa.array([None], pa.int64())}), rows(4, 4)])
    with table.writer() as writer, pytest.raises(InvalidInputError, match="4 rows before it are written"):
        writer.put(stream)
    assert logged_ids(table) == [0, 1, 2, 3]


# --- deletes ----------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [3, [3], pa.array([3]), pa.table({"id": [3]}), pl.DataFrame({"id": [3]})])
def test_delete(table: Table, keys: Any) -> None:
    with table.writer() as writer:
        writer.put(rows(0, 6))
        assert writer.delete(keys).num_rows == 1
    assert [row["id"] for row in read_by_lance(table)] == [0, 1, 2, 4, 5]


def test_deletes_reach_every_shard_and_later_rows_come_back(table: Table) -> None:
    with table.writer() as writer:
        writer.put(rows(0, 40))
        writer.flush()
        assert writer.delete(list(range(40))).num_rows == 40
        writer.put(rows(5, 2, prefix="again"))
    assert read_by_lance(table) == rows(5, 2, prefix="again").to_pylist()


def test_delete_from_a_table_without_a_key_is_refused(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", APPEND_ONLY, bucket=("id", 4))
    with table.writer() as writer, pytest.raises(InvalidInputError, match="no primary key"):
        writer.delete(1)


def test_delete_by_a_key_that_does_not_tell_the_shard_is_refused(tmp_path: Path) -> None:
    # Lance initialises such tables; lancewal.initialize refuses them.
    dataset = lance.write_dataset(KEYED.empty_table(), str(tmp_path / "t"))
    dataset.initialize_mem_wal(bucket_column="name", num_buckets=2)
    with lancewal.open(dataset).writer(fsync=False) as writer:
        writer.put(rows(0, 4))
        with pytest.raises(InvalidInputError, match=r"name is not part of the primary key.*shard_writer"):
            writer.delete(1)


# --- order and concurrency --------------------------------------------------------------


def test_later_rows_of_a_key_win_within_and_between_puts(table: Table) -> None:
    with table.writer() as writer:
        writer.put([rows(0, 20, prefix="a"), rows(0, 20, prefix="b")])
        writer.put(pa.concat_tables([pa.table({"id": [n, n], "name": ["c", f"d_{n}"]}) for n in range(10)]))
    names = [row["name"] for row in read_by_lance(table)]
    assert names == [f"d_{n}" for n in range(10)] + [f"b_{n}" for n in range(10, 20)]


def test_concurrent_puts_keep_the_order_of_each_key(table: Table) -> None:
    rounds = 15

    def work(mine: int) -> None:
        for number in range(rounds):
            writer.put(pa.table({"id": range(mine * 10, mine * 10 + 10), "name": [f"{number:03}"] * 10}))

    with table.writer() as writer:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        versions: dict[int, list[str]] = {}
        for shard_rows in logged(table).values():
            for row in shard_rows:
                versions.setdefault(row["id"], []).append(row["name"])
    assert len(versions) == 40
    assert all(names == [f"{n:03}" for n in range(rounds)] for names in versions.values())
    assert {row["name"] for row in read_by_lance(table)} == {f"{rounds - 1:03}"}


def test_shards_are_written_at_the_same_time(table: Table) -> None:
    table, store = faulty(table)
    first, second = (
        table.router().shard_of(0),
        next(
            shard for n in range(1, 9) if (shard := table.router().shard_of(n)) != table.router().shard_of(0)
        ),
    )
    with table.writer() as writer:
        writer.put(rows(0, 9))
        here = store.faults.pause("put_if_absent", where=layout.wal_dir(first))
        there = store.faults.pause("put_if_absent", where=layout.wal_dir(second))
        with here, there:
            thread = threading.Thread(target=writer.put, args=(rows(0, 9),))
            thread.start()
            # Either alone would never be reached while the other one waits.
            here.wait_until_reached()
            there.wait_until_reached()
        thread.join(PATIENCE)


def test_put_to_one_shard_needs_no_thread(table: Table) -> None:
    with table.writer() as writer:
        before = set(threading.enumerate())
        writer.put(rows(3, 1))
        names = [thread.name for thread in set(threading.enumerate()) - before]
        assert not any(name.startswith("lancewal-shard") for name in names)


# --- failures of single shards ----------------------------------------------------------


def test_failing_shard_names_itself_and_the_others_rows_are_written(table: Table) -> None:
    table, store = faulty(table)
    router = table.router()
    broken = router.shard_of(0)
    expected = [n for n in range(40) if router.shard_of(n) != broken]
    writer = table.writer()
    store.faults.fail("put_if_absent", times=None, where=layout.wal_dir(broken))
    with pytest.raises(PartialWriteError, match=str(broken)) as caught:
        writer.put(rows(0, 40))
    assert list(caught.value.failed) == [broken]
    assert isinstance(caught.value.failed[broken], StorageError)
    assert caught.value.__cause__ is caught.value.failed[broken]
    assert sum(caught.value.written.values()) == len(expected)
    assert set(caught.value.written) == {router.shard_of(n) for n in expected}
    assert logged_ids(table) == expected
    with pytest.raises(PartialWriteError, match="close") as closing:
        writer.close()
    assert list(closing.value.failed) == [broken]
    assert [row["id"] for row in read_by_lance(table)] == expected


def test_shard_that_cannot_be_opened_is_tried_again(table: Table) -> None:
    table, store = faulty(table)
    broken = table.router().shard_of(0)
    with table.writer() as writer:
        store.faults.fail("put_if_absent", where=layout.manifest_dir(broken))
        with pytest.raises(PartialWriteError) as caught:
            writer.put(rows(0, 40))
        assert list(caught.value.failed) == [broken]
        writer.put(rows(0, 40))
    assert read_by_lance(table) == rows(0, 40).to_pylist()


def test_sealed_shard_is_named(table: Table) -> None:
    sealed = table.router().shard_of(0)
    manifests = ShardManifestStore(ObjectStore.from_uri(table.uri), sealed)
    epoch, _ = manifests.claim_epoch(1)
    manifests.seal(epoch)
    with table.writer() as writer, pytest.raises(PartialWriteError) as caught:
        writer.put(rows(0, 1))
    assert isinstance(caught.value.failed[sealed], SealedShardError)
    assert caught.value.written == {}


def test_superseded_writer_learns_which_shards_it_lost(table: Table) -> None:
    router = table.router()
    old = table.writer(take_over="now")
    old.put(rows(0, 40))
    with table.writer(take_over="now") as new:
        new.put(rows(0, 1, prefix="new"))
        with pytest.raises(PartialWriteError) as caught:
            old.put(rows(0, 40, prefix="late"))
    lost = router.shard_of(0)
    assert list(caught.value.failed) == [lost]
    assert isinstance(caught.value.failed[lost], FencedError)
    old.close()
    names = {row["id"]: row["name"] for row in read_by_lance(table)}
    assert names[0] == "new_0"
    assert all(names[n] == f"late_{n}" for n in range(40) if router.shard_of(n) != lost)


def test_failure_within_a_stream_counts_what_came_before(table: Table) -> None:
    table, store = faulty(table)
    broken = table.router().shard_of(0)
    of_broken = [n for n in range(20) if table.router().shard_of(n) == broken]
    writer = table.writer()
    store.faults.fail("put_if_absent", nth=2, times=None, where=layout.wal_dir(broken))
    with pytest.raises(PartialWriteError) as caught:
        writer.put(iter([rows(0, 20), rows(0, 20), rows(0, 20)]))
    assert sum(caught.value.written.values()) == 20 + 20 - len(of_broken)
    assert caught.value.written[broken] == len(of_broken)
    with pytest.raises(PartialWriteError):
        writer.close()


def test_partial_write_error_crosses_processes(table: Table) -> None:
    shard = UUID(int=7)
    error = PartialWriteError("put", {shard: FencedError(shard, 1, 2)}, {UUID(int=8): 5})
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.written) == (str(error), error.written)
    assert isinstance(again.failed[shard], FencedError)


def test_spec_id_mismatch_does_not_bump_the_epoch(table: Table) -> None:
    # A shard of the same id that belongs to no spec: found before anyone is fenced.
    unlucky = table.router().shard_of(0)
    store = ObjectStore.from_uri(table.uri, fsync=False)
    store.delete_prefix(layout.shard_dir(unlucky))
    manifests = ShardManifestStore(store, unlucky)
    manifests.claim_epoch(spec_id=0)
    with table.writer() as writer, pytest.raises(PartialWriteError) as caught:
        writer.put(rows(0, 1))
    assert isinstance(caught.value.failed[unlucky], InvalidInputError)
    newest = ShardManifestStore(store, unlucky).require_latest()
    assert (newest.version, newest.writer_epoch) == (1, 1)


# --- durability, flush, statistics ------------------------------------------------------


def test_rows_that_nobody_waited_for_become_durable_on_request(table: Table) -> None:
    with table.writer(durable_write=False, max_wal_flush_interval=None) as writer:
        result = writer.put(rows(0, 20))
        assert not result.done()
        assert logged(table) == {}
        assert result.wait(PATIENCE)
        assert result.done()
        assert logged_ids(table) == list(range(20))


def test_flush_publishes_every_shard(table: Table) -> None:
    with table.writer() as writer:
        writer.put(rows(0, 40))
        assert all(shard.generations == () for shard in table.shards())
        writer.flush()
        assert all(shard.generations == (1,) for shard in table.shards())
        assert read_by_lance(table) == rows(0, 40).to_pylist()


def test_statistics_add_up_over_shards(table: Table) -> None:
    with table.writer() as writer:
        assert writer.stats().put_count == 0
        writer.put(rows(0, 40))
        stats = writer.stats()
        assert (stats.put_count, stats.put_rows) == (4, 40)
        assert stats.put_time > timedelta(0)


def test_wal_only_writer(table: Table) -> None:
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(0, 20))
        writer.delete(3)
    assert logged_ids(table) == sorted([*range(20), 3])


# --- the end ----------------------------------------------------------------------------


def test_closed_writer_refuses(table: Table) -> None:
    writer = table.writer()
    writer.put(rows(0, 4))
    writer.close()
    writer.close()
    for call in (lambda: writer.put(rows(0, 1)), lambda: writer.delete(1), writer.flush):
        with pytest.raises(ClosedError):
            call()


def test_no_thread_outlives_close(table: Table) -> None:
    before = set(threading.enumerate())
    with table.writer() as writer:
        writer.put(rows(0, 40))
        writer.flush()

    def left() -> set[str]:
        return {thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()}

    assert left() <= {"lancewal-heartbeat"}
    # That of the process ends when it finds that nobody needs it any more.
    wait_until(lambda: not left())


def test_close_waits_for_a_put_under_way(table: Table) -> None:
    table, store = faulty(table)
    writer = table.writer()
    errors: list[Exception] = []

    def put() -> None:
        try:
            writer.put(rows(0, 40))
        except Exception as error:
            errors.append(error)

    with store.faults.pause("put_if_absent", where="/wal/") as pause:
        putting = threading.Thread(target=put)
        putting.start()
        pause.wait_until_reached()
        closing = threading.Thread(target=writer.close)
        closing.start()
        while not writer._closed:
            threading.Event().wait(0.001)
        with pytest.raises(ClosedError):
            writer.put(rows(50, 1))
        assert closing.is_alive()
    putting.join(PATIENCE)
    closing.join(PATIENCE)
    assert errors == []
    assert read_by_lance(table) == rows(0, 40).to_pylist()


def test_error_in_the_body_is_not_hidden_by_a_failing_close(
    table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    table, store = faulty(table)

    def body(writer: TableWriter) -> None:
        writer.put(rows(0, 40))
        store.faults.fail("put_if_absent", times=None, where="manifest")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), table.writer() as writer:
        body(writer)
    assert "close failed" in caplog.text


def test_endless_stream_ends_with_the_writer(table: Table) -> None:
    writer = table.writer()
    started = threading.Event()
    outcome: list[Exception] = []

    def endless() -> Iterator[pa.RecordBatch]:
        while True:
            yield rows(0, 2)
            started.set()

    def put() -> None:
        try:
            writer.put(endless())
        except ClosedError as error:
            outcome.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    assert started.wait(PATIENCE)
    writer.close()
    thread.join(PATIENCE)
    assert len(outcome) == 1


def test_pandas_index_is_no_column(table: Table) -> None:
    frame = pd.DataFrame({"id": [1, 2], "name": ["a", "b"]}, index=[10, 20])
    with table.writer() as writer:
        writer.put(frame)
    assert read_by_lance(table) == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]


def test_threads_that_wait_for_room_each_held_a_copy_of_their_rows(table: Table) -> None:
    """Rows were shaped and split by shard before the wait: 64 threads held 64 copies, whatever the limit."""
    size, limit, threads = 1 << 20, 4 << 20, 64
    ids = pa.array(range(64), pa.int64())
    batch = pa.record_batch([ids, pa.array(["x" * (size // 64)] * 64)], schema=KEYED)
    table, store = faulty(table)
    writer = table.writer(max_memtable_size=limit, max_unflushed_memtable_bytes=limit)
    writer.put(rows(0, 64))
    room = writer._under_way
    route = writer._router.route
    together: list[int] = []

    def counted(batch: pa.RecordBatch) -> Any:
        together.append(room.taken)
        return route(batch)

    writer._router.route = counted  # type: ignore[method-assign]
    with store.faults.pause("put_if_absent", where="/wal/") as pause:
        before = pa.total_allocated_bytes()
        puts = [threading.Thread(target=writer.put, args=(batch,), daemon=True) for _ in range(threads)]
        for put in puts:
            put.start()
        pause.wait_until_reached()
        # All others stand in line: for room, or for the entry that is being written.
        while len(room._left._waiting) < threads - limit // size:
            threading.Event().wait(0.005)
        held = pa.total_allocated_bytes() - before
    for put in puts:
        put.join(PATIENCE)
        assert not put.is_alive()
    writer.close()
    assert max(together) <= limit
    # Their copies, and the entries that are being written of them.
    assert held <= 3 * limit, f"{held >> 20} MiB in hand with a limit of {limit >> 20} MiB"
    assert table.count_rows() == 64


def test_a_put_that_is_larger_than_the_room_goes_alone(table: Table) -> None:
    with table.writer(max_memtable_size=1000, max_unflushed_memtable_bytes=1000) as writer:
        writer.put(rows(0, 2000))
    assert table.count_rows() == 2000


@pytest.mark.parametrize("second", [StorageError("no"), ShardOwnedError(UUID(int=1), "ab" * 8, "there", 7)])
def test_the_error_of_a_second_try_denied_rows_that_the_first_had_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: LanceWalError
) -> None:
    """The shard was lost after the rows had got into its log, and could not be opened again."""
    table = wal_table(tmp_path / "table", unsharded=True)
    writer = table.writer()
    writer.put(rows(0, 1))
    (shard_id, shard_writer), *_ = writer.shard_writers.items()
    write_rows = shard_writer.write_rows

    def written_and_lost(*about: Any) -> None:
        write_rows(*about)
        error = FencedError(shard_id, 1, 2)
        error.may_be_written = True
        raise error

    def not_opened(_: object) -> None:
        raise second

    monkeypatch.setattr(shard_writer, "write_rows", written_and_lost)
    monkeypatch.setattr(writer, "_open_shard", not_opened)
    with pytest.raises(PartialWriteError) as failed:
        writer.put(rows(1, 1))
    assert isinstance(failed.value.failed[shard_id], OutcomeUnknownError)
    assert ids(table.scan().to_table()) == [0, 1]
