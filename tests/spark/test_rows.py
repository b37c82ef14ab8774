"""Rows and changes from Spark in the table's stored form, without a session."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from lancewal.base.table import BaseTable
from lancewal.errors import InvalidInputError
from lancewal.spark.columns import SparkRows
from tests.spark.tables import new_table, options_of
from tests.tables import APPEND_ONLY


@pytest.fixture
def base(tmp_path: Path) -> BaseTable:
    return BaseTable.open(new_table(tmp_path / "table").uri)


def spark_rows(base: BaseTable, change_column: str | None = None) -> SparkRows:
    given = {} if change_column is None else {"changeTypeColumn": change_column}
    return SparkRows(base.schema, base.storage_version, options_of(base.uri, **given))


def stored(rows: SparkRows, batch: pa.RecordBatch) -> list[tuple[int, str | None, bool]]:
    found = rows.stored(batch)
    assert found is not None
    return [tuple(row.values()) for row in found.to_pylist()]


def test_changes_keep_their_order(base: BaseTable) -> None:
    batch = pa.record_batch(
        {
            "op": ["delete", None, "Upsert", "d", "insert", "update_preimage"],
            "id": [1, 2, 1, 3, 3, 4],
            "name": ["x", "b", "a", None, "c", "old"],
        }
    )
    assert stored(spark_rows(base, "op"), batch) == [
        (1, None, True),
        (2, "b", False),
        (1, "a", False),
        (3, None, True),
        (3, "c", False),
    ]


@pytest.mark.parametrize("word", ["delete", "upsert"])
def test_batches_of_one_kind_of_change(base: BaseTable, word: str) -> None:
    batch = pa.record_batch({"op": [word] * 2, "id": [1, 2], "name": ["a", "b"]})
    assert [row[2] for row in stored(spark_rows(base, "op"), batch)] == [word == "delete"] * 2


def test_rows_of_our_own_feed_can_be_applied_as_they_are(base: BaseTable) -> None:
    batch = pa.record_batch(
        {
            "id": [1],
            "name": ["a"],
            "_change_type": ["upsert"],
            "_shard_id": ["s"],
            "_wal_position": [4],
            "_writer_epoch": [1],
        }
    )
    assert stored(spark_rows(base, "_change_type"), batch) == [(1, "a", False)]


def test_nothing_is_left_of_old_versions_alone(base: BaseTable) -> None:
    batch = pa.record_batch({"op": ["update_preimage"], "id": [1], "name": ["a"]})
    assert spark_rows(base, "op").stored(batch) is None
    assert spark_rows(base).stored(pa.record_batch({"id": pa.array([], pa.int64())})) is None


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"op": ["merge"], "id": [1]}, "merge"),
        ({"id": [1]}, "op"),
        ({"op": [1], "id": [1]}, "text"),
    ],
)
def test_changes_that_cannot_be_understood_are_refused(
    base: BaseTable, batch: dict[str, list[object]], reason: str
) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        spark_rows(base, "op").stored(pa.record_batch(batch))


def test_a_column_of_the_table_cannot_say_what_becomes_of_a_row(base: BaseTable) -> None:
    with pytest.raises(InvalidInputError, match="name is a column"):
        spark_rows(base, "name")


def test_deletes_need_a_key(tmp_path: Path) -> None:
    table = new_table(tmp_path / "other", APPEND_ONLY)
    with pytest.raises(InvalidInputError, match="no primary key"):
        spark_rows(BaseTable.open(table.uri), "op").stored(pa.record_batch({"op": ["delete"], "id": [1]}))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (pa.schema({"id": pa.int64(), "other": pa.string()}), "no column other"),
        (pa.schema({"name": pa.string()}), "lack id"),
        (pa.schema({"id": pa.string(), "name": pa.string()}), "column id"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused_before_any_row(
    base: BaseTable, schema: pa.Schema, reason: str
) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        spark_rows(base).check(schema)
