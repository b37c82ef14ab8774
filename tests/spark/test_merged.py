"""The merged read's plan and tasks, without a session; the reader of plain Python is the oracle."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from pyspark.sql import datasource as ds

import lancewal
from lancewal.errors import InvalidInputError, StorageError
from lancewal.format import superseded
from lancewal.publish.publishing import publish
from lancewal.reader import snapshot
from lancewal.reader.state import read_state
from lancewal.shard.manifest import ShardManifestStore
from lancewal.spark import merged
from lancewal.spark.columns import spark_schema
from lancewal.spark.merged import BasePartition, MergedReader, ShardPartition
from lancewal.spark.options import OpenTable
from lancewal.storage import ObjectStore, layout
from tests.faults import FaultyStore
from tests.publish.test_feed import staged
from tests.spark.tables import content, named, new_table, options_of, schema_of
from tests.tables import APPEND_ONLY, KEYED, rows


def reader_of(table: lancewal.Table, **given: Any) -> MergedReader:
    options = options_of(table, **given)
    return MergedReader(options, spark_schema(OpenTable.open(options).base.schema.plain))


def read(reader: MergedReader) -> list[tuple[Any, ...]]:
    """As Spark does it: the reader and each partition go to a task by themselves."""
    partitions = reader.partitions()
    task = pickle.loads(pickle.dumps(reader))
    found = []
    for partition in partitions:
        for batch in task.read(pickle.loads(pickle.dumps(partition))):
            found += [tuple(row.values()) for row in batch.to_pylist()]
    return sorted(found)


def fill_all_levels(table: lancewal.Table, schema: pa.Schema) -> None:
    """Rows in the base, in SSTables and in the WAL, and later versions of some in each."""
    with table.writer() as writer:
        writer.put(rows(0, 40, schema=schema, prefix="base"))
    table.flush()
    table.compact()
    with table.writer() as writer:
        writer.put(rows(20, 40, schema=schema, prefix="flushed"))
    with table.writer() as writer:
        writer.put(rows(30, 10, schema=schema, prefix="again"))
        if schema is KEYED:
            writer.delete([1, 21, 31])
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(35, 30, schema=schema, prefix="logged"))
        if schema is KEYED:
            writer.delete([2, 22, 36])


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "append only"])
@pytest.mark.parametrize("how", [{"bucket": ("id", 3)}, {"unsharded": True}], ids=["buckets", "unsharded"])
def test_all_levels_are_merged_as_the_plain_reader_does(
    tmp_path: Path, keyed: bool, how: dict[str, Any]
) -> None:
    table = new_table(tmp_path / "table", schema_of(keyed), **how)
    fill_all_levels(table, schema_of(keyed))
    expected = content(table)
    assert len(expected) == (59 if keyed else 120)
    assert read(reader_of(table)) == expected


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "append only"])
def test_a_large_fragment_is_read_by_several_tasks_without_its_deleted_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keyed: bool
) -> None:
    monkeypatch.setattr(merged, "_MOST_BYTES", 200)
    table = new_table(tmp_path / "table", schema_of(keyed))
    fill_all_levels(table, schema_of(keyed))
    lance.dataset(table.uri).delete("id IN (3, 4, 5, 17, 39)")
    reader = reader_of(table)
    tasks = [each for each in reader.partitions() if isinstance(each, BasePartition)]
    assert len(tasks) > 4
    assert len({each.fragment_ids for each in tasks}) == 1
    assert read(reader) == content(table)
    assert len(read(reader_of(table, limit=7))) >= 7
    one = reader_of(table, filterPushdown="true")
    one.pushFilters([ds.StringStartsWith(("name",), "base")])
    assert [each.rows for each in one.partitions() if isinstance(each, BasePartition)] == [None]
    assert read(one) == [row for row in content(table) if row[1].startswith("base")]


def test_a_large_fragment_without_a_live_row_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged, "_MOST_BYTES", 200)
    table = new_table(tmp_path / "table", KEYED)
    fill_all_levels(table, KEYED)
    lance.dataset(table.uri).delete("id < 38")
    assert read(reader_of(table)) == content(table)


def test_shards_made_by_hand_that_share_keys_are_read_by_one_task(tmp_path: Path) -> None:
    lance.write_dataset(KEYED.empty_table(), str(tmp_path / "table"))
    table = lancewal.initialize(str(tmp_path / "table"), by_hand=True)
    for number in (1, 2):
        with table.shard_writer(f"00000000-0000-0000-0000-00000000000{number}") as writer:
            writer.put(rows(0, 5, prefix=f"shard{number}"))
    reader = reader_of(table)
    assert [p for p in reader.partitions() if isinstance(p, ShardPartition)] == [ShardPartition(((0, 1),))]
    assert read(reader) == content(table)


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "append only"])
def test_filters_are_asked_after_newer_versions_have_hidden_older_ones(tmp_path: Path, keyed: bool) -> None:
    table = new_table(tmp_path / "table", schema_of(keyed))
    fill_all_levels(table, schema_of(keyed))
    for condition in (
        ds.StringStartsWith(("name",), "base"),
        ds.StringStartsWith(("name",), "flushed"),
        ds.GreaterThan(("id",), 33),
        ds.In(("id",), (1, 5, 22, 36, 37)),
    ):
        reader = reader_of(table, filterPushdown="true")
        left = reader.pushFilters([condition])
        assert left == []
        sql = reader._wanted.sql
        expected = sorted(
            tuple(row.values()) for row in lancewal.open(table.uri).scan(filter=sql).to_table().to_pylist()
        )
        assert read(reader) == expected
        assert expected


def test_a_task_compares_no_keys_that_another_one_of_its_process_has_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = new_table(tmp_path / "table")
    fill_all_levels(table, KEYED)
    fill_all_levels(table, KEYED)
    expected = read(reader_of(table))
    passes: list[int] = []

    def counted(levels: Sequence[pa.Array]) -> Any:
        passes.append(sum(map(len, levels)))
        return superseded(levels)

    monkeypatch.setattr(snapshot, "superseded", counted)
    assert read(reader_of(table)) == expected
    assert passes == []


def test_a_filter_on_the_key_rules_out_shards(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    fill_all_levels(table, KEYED)
    reader = reader_of(table, filterPushdown="true")
    reader.pushFilters([ds.EqualTo(("id",), 40)])
    groups = [group for p in reader.partitions() if isinstance(p, ShardPartition) for group in p.groups]
    assert len(groups) == 1
    assert read(reader) == [(40, "logged_40")]


@pytest.mark.parametrize("condition", ["id = 40 OR id = 41", "id IN (40, 41)"])
def test_a_filter_that_is_an_option_goes_with_those_that_are_pushed(tmp_path: Path, condition: str) -> None:
    table = new_table(tmp_path / "table")
    fill_all_levels(table, KEYED)
    assert read(reader_of(table, filter=condition)) == named(40, 2, "logged")
    reader = reader_of(table, filter=condition, filterPushdown="true")
    reader.pushFilters([ds.GreaterThan(("id",), 40)])
    assert read(reader) == named(41, 1, "logged")


def test_filters_are_left_to_spark_unless_told_otherwise(tmp_path: Path) -> None:
    reader = reader_of(new_table(tmp_path / "table"))
    condition = ds.EqualTo(("id",), 40)
    assert list(reader.pushFilters([condition])) == [condition]
    assert reader._wanted.sql is None


def test_a_filter_that_does_not_fit_the_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="absent"):
        reader_of(new_table(tmp_path / "table"), filter="absent = 1")


def test_an_empty_table_has_a_partition_without_rows(tmp_path: Path) -> None:
    reader = reader_of(new_table(tmp_path / "table"))
    assert reader.partitions() == [BasePartition(())]
    assert read(reader) == []


def test_all_tasks_see_one_state_whatever_happens_after_the_plan(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    fill_all_levels(table, KEYED)
    before = content(table)
    reader = reader_of(table)
    reader.partitions()
    with table.writer() as writer:
        writer.put(rows(0, 100, prefix="later"))
    table.flush()
    table.compact()
    assert read(reader) == before
    assert read(reader_of(table)) == sorted((i, f"later_{i}") for i in range(100))


def test_the_plan_reads_no_rows(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(0, 100))
    store = FaultyStore(ObjectStore.from_uri(table.uri))
    read_state(store)
    assert store.faults.count("get", where=layout.WAL_SUFFIX) == 0


def test_rows_published_while_the_state_is_read_are_in_it_or_nothing_after_them_is(tmp_path: Path) -> None:
    """A batch of a job, and then a row of a writer that knows of the batch."""
    table = new_table(tmp_path / "table", unsharded=True)
    plain = ObjectStore.from_uri(table.uri)
    store = FaultyStore(plain)

    def publish_and_put() -> None:
        base = OpenTable.open(options_of(table)).base
        publish(base, plain, staged(plain, rows(10, 2)))
        with table.writer(enable_memtable=False) as writer:
            writer.put(rows(1, 1))

    store.faults.before("list", publish_and_put, where="/wal")
    state = read_state(store)
    reader = reader_of(table)
    reader._merged.state = state
    assert read(reader) == sorted([*named(1, 1), *named(10, 2)])


def test_a_state_whose_log_was_collected_says_so(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table", APPEND_ONLY, unsharded=True)
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(0, 3, schema=APPEND_ONLY))
    reader = reader_of(table)
    table.flush()
    store = ObjectStore.from_uri(table.uri)
    shard = table.shard_for()
    covered = ShardManifestStore(store, shard).require_latest().replay_after_wal_entry_position
    for position in range(1, covered + 1):
        store.delete(layout.wal_entry(shard, position))
    with pytest.raises(StorageError, match="run the query again"):
        read(reader)


def _made_anew(path: Path, base: str, logged: int, *, aside: bool = False) -> lancewal.Table:
    """A table in the same versions as any other of these, and with the same shards.

    With ``aside`` the one before is moved away: its directory has another number then for certain.
    """
    if aside and path.exists():
        path.rename(path.with_name(f"{path.name} before"))
    shutil.rmtree(path, ignore_errors=True)
    table = new_table(path, KEYED, pa.Table.from_batches([rows(0, 3, prefix=base)]), bucket=("id", 1))
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(logged, 1, prefix="logged"))
    return table


@pytest.mark.parametrize("aside", [False, True])
def test_a_table_made_anew_at_its_place_was_read_as_the_one_before(tmp_path: Path, aside: bool) -> None:
    """By a process that had kept the version of that number, and the keys of its log."""
    assert read(reader_of(_made_anew(tmp_path / "table", "old", 0))) == [
        *named(0, 1, "logged"),
        *named(1, 2, "old"),
    ]
    assert read(reader_of(_made_anew(tmp_path / "table", "new", 2, aside=aside))) == [
        *named(0, 2, "new"),
        *named(2, 1, "logged"),
    ]


def test_a_query_whose_table_was_made_anew_says_so(tmp_path: Path) -> None:
    planned = reader_of(_made_anew(tmp_path / "table", "old", 0))
    table = _made_anew(tmp_path / "table", "new", 2)
    # Another query, in the process in which the task of the first one will run.
    read(reader_of(table))
    with pytest.raises(StorageError, match="another table was made at its place; run the query again"):
        read(planned)


@pytest.mark.parametrize("level", ["base", "sstable", "log"])
def test_a_filter_that_fails_on_a_row_was_refused_by_tables_and_an_error_of_storage_in_spark(
    tmp_path: Path, level: str
) -> None:
    table = new_table(tmp_path / "table", unsharded=True)
    with table.writer(enable_memtable=level != "log") as writer:
        writer.put(rows(0, 5))
    if level == "base":
        table.compact()
    condition = "10 / (id - id) > 1"
    with pytest.raises(InvalidInputError, match="filter"):
        table.scan(filter=condition).to_table()
    with pytest.raises(InvalidInputError, match="filter"):
        read(reader_of(table, filter=condition))


def test_a_column_that_was_renamed_under_a_frame_was_a_key_error(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    schema = spark_schema(table.schema)
    lance.dataset(table.uri).alter_columns({"path": "name", "name": "title"})
    with pytest.raises(InvalidInputError, match="no column name any more; its columns are id, title"):
        MergedReader(options_of(table), schema)
