"""Tables that a write makes, without a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from pyspark.sql import types as st

import lancewal
from lancewal.base.table import BaseTable
from lancewal.errors import InvalidInputError, NotInitializedError
from lancewal.spark.creation import creation_options, open_for_writing
from lancewal.spark.front import answer
from lancewal.spark.options import Options
from tests.spark.tables import new_table, options_of

SCHEMA = st.StructType(
    [
        st.StructField("id", st.LongType(), False),
        st.StructField("name", st.StringType(), False),
        st.StructField("v", st.ArrayType(st.FloatType())),
    ]
)


def create(path: Path, **given: Any) -> BaseTable:
    return open_for_writing(options_of(str(path), createIfMissing="true", **given), SCHEMA)


def test_a_keyed_table_in_buckets(tmp_path: Path) -> None:
    base = create(tmp_path / "t", primaryKey="id", numBuckets=4, vectorDimensions="v:2")
    assert base.schema.primary_key == ("id",)
    assert base.schema.plain.field("v").type == pa.list_(pa.field("element", pa.float32()), 2)
    assert base.schema.plain.field("name").nullable, "a delete must be able to leave it out"
    assert len(lancewal.open(base.uri).shards()) == 4


def test_a_composite_key_keeps_the_order_that_was_given(tmp_path: Path) -> None:
    base = create(tmp_path / "t", primaryKey="name,id", bucketColumn="id")
    assert base.schema.primary_key == ("name", "id")
    assert lancewal.open(base.uri).router().column == "id"


def test_a_table_without_a_key_is_unsharded_unless_told_otherwise(tmp_path: Path) -> None:
    assert lancewal.open(create(tmp_path / "one").uri).router().transform == "unsharded"
    assert lancewal.open(create(tmp_path / "two", bucketColumn="id").uri).router().transform == "bucket"
    identity = create(tmp_path / "three", primaryKey="name,id", identityColumn="name")
    assert lancewal.open(identity.uri).router().transform == "identity"


def test_a_key_that_begins_with_bytes_was_refused_without_a_bucket_column(tmp_path: Path) -> None:
    columns = st.StructType([st.StructField("raw", st.BinaryType(), False), *SCHEMA.fields])
    options = options_of(str(tmp_path / "t"), createIfMissing="true", primaryKey="raw,id")
    router = lancewal.open(open_for_writing(options, columns).uri).router()
    assert (router.column, router.num_buckets) == ("id", 4)


@pytest.mark.parametrize(
    "given",
    [
        {"primaryKey": "id", "numBuckets": 3},
        {"primaryKey": "name,id", "bucketColumn": "id", "vectorDimensions": "v:2"},
        {"primaryKey": "id", "unsharded": "true"},
        {"primaryKey": "name,id", "identityColumn": "name"},
        {"bucketColumn": "name"},
        {},
    ],
    ids=str,
)
def test_the_options_that_describe_a_table_make_the_same_one(tmp_path: Path, given: dict[str, Any]) -> None:
    first = create(tmp_path / "one", **given)
    second = create(tmp_path / "two", **creation_options(first))
    assert creation_options(second) == creation_options(first)
    assert second.schema.columns.remove_metadata() == first.schema.columns.remove_metadata()
    assert second.details.sharding_specs == first.details.sharding_specs


def test_a_table_whose_shards_are_chosen_by_hand_could_not_be_shown(tmp_path: Path) -> None:
    table = new_table(tmp_path / "t", by_hand=True)
    shown = answer({"question": "describe", "options": {"path": table.uri}, "arguments": {}})
    assert shown["key"] == ["id"]
    assert shown["properties"]["primaryKey"] == "id"


def test_a_lance_table_without_a_write_path_gets_one(tmp_path: Path) -> None:
    lance.write_dataset(pa.table({"id": [1]}), str(tmp_path / "t"))
    with pytest.raises(NotInitializedError):
        open_for_writing(options_of(str(tmp_path / "t")), SCHEMA)
    assert create(tmp_path / "t").dataset.count_rows() == 1


def test_a_missing_table_is_only_made_when_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="createIfMissing"):
        open_for_writing(options_of(str(tmp_path / "t")), SCHEMA)
    assert not (tmp_path / "t").exists()


def test_a_table_that_is_there_is_used_as_it_is(tmp_path: Path) -> None:
    table = new_table(tmp_path / "t")
    assert create(tmp_path / "t", primaryKey="id", numBuckets=3).uri == table.uri


@pytest.mark.parametrize(
    "given",
    [
        {"primaryKey": "name"},
        {"numBuckets": 7},
        {"bucketColumn": "name"},
        {"identityColumn": "id"},
        {"unsharded": "true"},
        {"vectorDimensions": "name:3"},
    ],
    ids=str,
)
def test_options_that_contradict_the_table_are_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    new_table(tmp_path / "t")
    with pytest.raises(InvalidInputError, match=next(iter(given))):
        create(tmp_path / "t", **given)


@pytest.mark.parametrize(
    "given",
    [
        {"primaryKey": "absent"},
        {"vectorDimensions": "absent:2"},
        {"vectorDimensions": "name:2"},
        {"numBuckets": 2},
        {"primaryKey": "id", "numBuckets": 5000},
        {"primaryKey": "id", "bucketColumn": "name"},
        {"primaryKey": "v"},
        {"bucketColumn": "absent"},
        {"primaryKey": "id", "identityColumn": "id", "numBuckets": 2},
        {"primaryKey": "id", "unsharded": "true", "numBuckets": 1},
        {"primaryKey": "id", "unsharded": "true", "identityColumn": "id"},
    ],
    ids=str,
)
def test_options_that_make_no_table_are_refused_before_anything_is_written(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInputError):
        create(tmp_path / "t", **given)
    assert not (tmp_path / "t").exists()


def test_a_lance_table_with_another_key_gets_no_write_path(tmp_path: Path) -> None:
    """It would take rows as if they had no key, and keep every version of them."""
    lance.write_dataset(pa.table({"id": [1]}), str(tmp_path / "t"))
    with pytest.raises(InvalidInputError, match="primaryKey"):
        create(tmp_path / "t", primaryKey="id")
    with pytest.raises(NotInitializedError):
        lancewal.open(str(tmp_path / "t"))


def test_a_place_is_asked_for_before_anything_else() -> None:
    with pytest.raises(InvalidInputError, match=r"place is missing[^;]*;[^;]*as path$"):
        open_for_writing(Options.parse({}), SCHEMA)
