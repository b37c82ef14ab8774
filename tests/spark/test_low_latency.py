"""Routing, and the low-latency way in."""

from __future__ import annotations

import datetime as dt
import pickle
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812

import lancewal
from lancewal.errors import InvalidInputError
from lancewal.format.bucket import bucket_of
from lancewal.publish import Run, Transaction, TransactionLog
from lancewal.shard import ShardRouter, WalTailer
from lancewal.shard.discovery import discover_manifests
from lancewal.spark import route, stream, write
from lancewal.spark.columns import bucket_column, spark_schema
from lancewal.spark.low_latency import Appending, query_id
from lancewal.spark.options import OpenTable
from lancewal.storage import ObjectStore, layout
from tests.spark.tables import content, frame, named, new_table, options_of, spark_content
from tests.spark.test_columns import COLUMNS
from tests.tables import APPEND_ONLY, KEYED, rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROUTABLE = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float", "double", "text", "large_text", "date", "zoned", "local"),
]


def entries(table: lancewal.Table) -> dict[UUID, list[Any]]:
    store = ObjectStore.from_uri(table.uri)
    return {
        m.shard_id: [e for e in WalTailer(store, m.shard_id) if not e.sentinel]
        for m in discover_manifests(store)
    }


def in_spark(name: str, value: Any) -> Any:
    """A value of a column as Spark takes it from Python."""
    if value is None:
        return None
    if name == "uint64":
        return Decimal(value)
    return value.replace(tzinfo=dt.UTC) if name == "zoned" else value


def test_sparks_own_hash_gives_every_value_the_tables_bucket(spark: SparkSession) -> None:
    arrays = {name: pa.array(COLUMNS[name][0], COLUMNS[name][1]) for name in ROUTABLE}
    fields = [pa.field(name, array.type) for name, array in arrays.items()]
    schema = spark_schema(pa.schema(fields))
    values = [tuple(in_spark(name, COLUMNS[name][0][row]) for name in ROUTABLE) for row in range(3)]
    df = spark.createDataFrame(values, schema).coalesce(1)
    found = df.select(*(bucket_column(field, 7).alias(field.name) for field in fields)).collect()
    for name, array in arrays.items():
        assert [row[name] for row in found] == bucket_of(array, 7).tolist(), name


@pytest.mark.parametrize("type_", [pa.timestamp("ms"), pa.time64("us")], ids=str)
def test_a_column_that_spark_hashes_differently_is_refused(spark: SparkSession, type_: pa.DataType) -> None:
    with pytest.raises(InvalidInputError, match="cannot be routed"):
        bucket_column(pa.field("c", type_), 4)


def test_a_routed_frame_has_bucket_i_in_partition_i(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    df = route(frame(spark, named(0, 60)), table.uri, order_by="name").withColumn("p", F.spark_partition_id())
    found = [(row.id, row.p) for row in df.collect()]
    expected = bucket_of(pa.array([i for i, _ in found]), 3).tolist()
    assert [p for _, p in found] == expected


def test_one_entry_per_shard_readable_at_once_and_a_repetition_is_skipped(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = new_table(tmp_path / "table", APPEND_ONLY)
    for _ in range(2):
        write(frame(spark, named(0, 30)).repartition(4), table.uri, txn_app_id="app", txn_version=1)
    write(frame(spark, named(30, 30)), table.uri)
    assert content(table) == named(0, 60)
    assert spark_content(spark, table.uri) == named(0, 60)
    assert {len(found) for found in entries(table).values()} == {2}
    records = ObjectStore.from_uri(table.uri).list(f"{layout.OWN_DIR}/transactions")
    assert len({info.path.rsplit("/", 2)[-2] for info in records}) == 1, "the write without a name left none"


def test_the_greatest_row_of_a_key_wins_where_an_order_is_given(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    changes = [
        (1, "b", "delete"),
        (1, "c", "upsert"),
        (1, "a", "upsert"),
        (2, "y", "delete"),
        (2, "x", "upsert"),
    ]
    df = frame(spark, changes, "id long, name string, op string")
    write(df, table.uri, change_type_column="op", order_by="name")
    assert content(table) == [(1, "c")]


def test_a_column_that_only_says_which_row_is_the_last_need_not_be_in_the_table(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = new_table(tmp_path / "table")
    changes = [(1, "old", "u", 7), (1, "new", "u", 9), (2, "x", "c", 1), (2, None, "d", 2)]
    df = frame(spark, changes, "id long, name string, op string, sequence int").repartition(4)
    write(df, table.uri, change_type_column="op", order_by="sequence")
    assert content(table) == [(1, "new")]
    with pytest.raises(InvalidInputError, match="no column sequence"):
        write(df, table.uri, change_type_column="op")


def test_an_aggregation_in_update_mode_replaces_its_rows(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    (tmp_path / "in").mkdir()
    counted = (
        spark.readStream.schema("id long")
        .json(str(tmp_path / "in"))
        .groupBy("id")
        .agg(F.count("*").cast("string").alias("name"))
    )
    for number, ids in enumerate([[1, 1, 2], [2, 3]]):
        lines = "\n".join(f'{{"id": {i}}}' for i in ids)
        (tmp_path / "in" / f"{number}.json").write_text(lines)
        query = stream(
            counted, table.uri, str(tmp_path / "c"), output_mode="update", trigger={"availableNow": True}
        )
        query.awaitTermination()
    assert content(table) == [(1, "2"), (2, "2"), (3, "1")]
    with pytest.raises(InvalidInputError, match="complete"):
        stream(counted, table.uri, str(tmp_path / "c"), output_mode="complete")
    keyless = new_table(tmp_path / "keyless", APPEND_ONLY)
    with pytest.raises(InvalidInputError, match="by their key"):
        stream(counted, keyless.uri, str(tmp_path / "c"), output_mode="update")


@pytest.mark.parametrize("how", [{"identity": "name"}, {"unsharded": True}], ids=str)
def test_tables_that_are_not_bucketed(spark: SparkSession, tmp_path: Path, how: dict[str, Any]) -> None:
    table = new_table(tmp_path / "table", APPEND_ONLY, **how)
    data = [(i, "abc"[i % 3]) for i in range(12)] + [(99, None)]
    write(frame(spark, data).repartition(3), table.uri, txn_app_id="app", txn_version=0)
    found = table.scan().to_table()
    assert sorted(found["id"].to_pylist()) == [*range(12), 99]
    assert {len(each) for each in entries(table).values()} == {1}
    assert len(entries(table)) == (4 if "identity" in how else 1)


def test_half_an_identity_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    with pytest.raises(InvalidInputError, match="together"):
        write(frame(spark, named(0, 1)), table.uri, txn_app_id="app")
    with pytest.raises(InvalidInputError, match="pass txn_app_id"):
        write(frame(spark, named(0, 1)), table.uri, options={"txnAppId": "app", "txnVersion": "1"})


def task(table: lancewal.Table, transaction: Transaction, tasks: int = 3) -> Appending:
    """As a task gets it."""
    options = options_of(table)
    opened = OpenTable.open(options)
    router = ShardRouter.of_table(opened.base, opened.store)
    run = Run(transaction.version, "0123456789abcdef", floors={})
    if not TransactionLog(opened.store, transaction).read().runs:
        TransactionLog(opened.store, transaction).start(run)
    sent = pickle.dumps(Appending.of(opened, router, options, transaction, run, tasks))
    return pickle.loads(sent)  # type: ignore[no-any-return]


def part_of(table: lancewal.Table, shard: int, count: int = 60) -> pa.RecordBatch:
    batch = rows(0, count, schema=table.schema)
    return batch.filter(pa.array(bucket_of(batch["id"], 3) == shard))


def test_a_retried_and_a_speculative_task_write_nothing_twice(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table", APPEND_ONLY)
    transaction = Transaction("app", 0)
    first = task(table, transaction).append(iter([part_of(table, 1)]), 1)
    again = task(table, transaction).append(iter([part_of(table, 1)]), 1)
    assert [w.skipped for w in first + again] == [False, True]
    task(table, transaction).commit(ObjectStore.from_uri(table.uri), first)
    loser = task(table, transaction).append(iter([part_of(table, 1)]), 1)
    assert [w.skipped for w in loser] == [True]
    assert len(content(table)) == part_of(table, 1).num_rows


def test_a_task_writes_all_its_shards_and_after_a_failure_those_that_lack_it(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table", APPEND_ONLY)
    transaction = Transaction("app", 0)
    both = [part_of(table, 0), part_of(table, 2)]
    first = task(table, transaction).append(iter(both[:1]), 0)
    again = task(table, transaction, tasks=2).append(iter(both), 0)
    assert [w.skipped for w in first] == [False]
    assert sorted(w.skipped for w in again) == [False, True]
    assert len(content(table)) == sum(part.num_rows for part in both)


def test_rows_that_came_to_the_wrong_task_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    transaction = Transaction("app", 0)
    with pytest.raises(InvalidInputError, match="does not own"):
        task(table, transaction).append(iter([part_of(table, 1)]), 0)
    with pytest.raises(InvalidInputError, match="does not own"):
        task(table, transaction).append(iter([part_of(table, 0), part_of(table, 1)]), 0)
    assert content(table) == []


def test_a_refused_row_keeps_its_tasks_shards_as_they_were(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    transaction = Transaction("app", 0)
    bad = pa.record_batch({"id": pa.array([None], pa.int64()), "name": ["x"]})
    with pytest.raises(InvalidInputError, match="nulls in key column"):
        task(table, transaction).append(iter([part_of(table, 0), bad]), 0)
    assert content(table) == []


@pytest.mark.parametrize(
    "columns", [{"id": [0], "new": ["x"]}, {"name": ["x"]}, {"id": ["0"], "name": ["x"]}], ids=str
)
def test_columns_that_the_table_has_no_more_are_refused_by_a_streams_tasks(
    tmp_path: Path, columns: dict[str, list[Any]]
) -> None:
    """The driver checks them only when a stream starts."""
    table = new_table(tmp_path / "table")
    transaction = Transaction("app", 0)
    with pytest.raises(InvalidInputError, match="column"):
        task(table, transaction).append(iter([pa.record_batch(columns)]), 0)
    assert content(table) == []


def test_more_than_an_entry_can_hold_is_sent_the_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lancewal.spark.low_latency.MAX_TASK_BYTES", 100)
    table = new_table(tmp_path / "table", KEYED)
    with pytest.raises(InvalidInputError, match="too much"):
        task(table, Transaction("app", 0)).append(iter([part_of(table, 0)]), 0)


@pytest.mark.parametrize("name", ["c[1]", "c{a,b}", "c*", "c?\\d"])
def test_a_checkpoint_s_path_was_taken_for_a_pattern(spark: SparkSession, tmp_path: Path, name: str) -> None:
    table = new_table(tmp_path / "table")
    frame(spark, named(0, 3)).write.json(str(tmp_path / "in"))
    incoming = spark.readStream.schema("id long, name string").json(str(tmp_path / "in"))
    # Another checkpoint that the pattern would match.
    (tmp_path / "c1").mkdir()
    (tmp_path / "c1" / "metadata").write_text('{"id": "another"}')
    query = stream(incoming, table.uri, str(tmp_path / name), trigger={"availableNow": True})
    query.awaitTermination()
    assert content(table) == named(0, 3)
    assert query_id(spark, str(tmp_path / name)) == str(query.id)
