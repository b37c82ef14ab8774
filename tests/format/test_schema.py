"""TableSchema: the field ids that Lance itself puts on the columns of a WAL entry."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import lance
import pyarrow as pa
import pytest

from lancewal.base.table import table_schema
from lancewal.format.schema import FIELD_ID_KEY, TOMBSTONE, field_id, without_field_ids
from lancewal.storage import layout

KEY = {"lance-schema:unenforced-primary-key": "true"}
TYPES = [
    pa.struct([("x", pa.int32()), ("y", pa.struct([("z", pa.string())]))]),
    pa.list_(pa.int32()),
    pa.large_list(pa.string()),
    pa.list_(pa.struct([("a", pa.int32())])),
    pa.list_(pa.list_(pa.int8())),
    pa.list_(pa.float32(), 4),
    pa.list_(pa.struct([("a", pa.int32())]), 2),
    pa.dictionary(pa.int32(), pa.string()),
    pa.decimal128(10, 2),
    pa.timestamp("ns", "UTC"),
    pa.binary(4),
]


def keyed(*fields: pa.Field) -> pa.Schema:
    return pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=KEY), *fields])


def dataset_of(where: Path, schema: pa.Schema, version: str | None = None) -> lance.LanceDataset:
    return lance.write_dataset(schema.empty_table(), str(where), schema=schema, data_storage_version=version)


def schema_in_lances_own_entry(dataset: lance.LanceDataset) -> pa.Schema:
    """The columns of the entry that pylance writes for one row of nulls."""
    dataset.initialize_mem_wal(unsharded=True)
    shard = uuid4()
    columns = [pa.array([1]), *(pa.nulls(1, field.type) for field in list(dataset.schema)[1:])]
    row = pa.record_batch(columns, schema=dataset.schema)
    with dataset.mem_wal_writer(str(shard), max_wal_flush_interval_ms=1) as writer:
        writer.put(row)
    with pa.ipc.open_stream(Path(dataset.uri) / layout.wal_entry(shard, 1)) as reader:
        return reader.schema.remove_metadata()


def test_stored_columns_are_annotated_as_lance_annotates_them(tmp_path: Path) -> None:
    fields = [pa.field(f"c{number}", each) for number, each in enumerate(TYPES)]
    dataset = dataset_of(tmp_path / "t", keyed(*fields))
    expected = schema_in_lances_own_entry(dataset)
    assert table_schema(dataset).stored.equals(expected, check_metadata=True)


def test_maps_are_annotated_as_lance_annotates_them(tmp_path: Path) -> None:
    nested = pa.map_(pa.string(), pa.struct([("a", pa.map_(pa.int32(), pa.int8()))]))
    dataset = dataset_of(tmp_path / "t", keyed(pa.field("m", nested)), "2.2")
    expected = schema_in_lances_own_entry(dataset)
    ours = table_schema(dataset)
    assert ours.stored.equals(expected, check_metadata=True)


def test_field_ids_have_gaps_after_a_column_was_dropped(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "t", keyed(pa.field("a", pa.int8()), pa.field("b", pa.int8())))
    dataset.drop_columns(["a"])
    dataset.add_columns(pa.field("a", pa.string()))
    ours = table_schema(dataset)
    # The new column has the old one's name, and another id.
    assert dict(ours.field_ids) == {"id": 0, "b": 2, "a": 3}
    assert ours.stored.equals(schema_in_lances_own_entry(dataset), check_metadata=True)


def test_a_renamed_column_keeps_its_id(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "t", keyed(pa.field("a", pa.int8())))
    dataset.alter_columns({"path": "a", "name": "z"})
    assert dict(table_schema(dataset).field_ids) == {"id": 0, "z": 1}


def test_the_tombstone_is_last_and_has_no_id(tmp_path: Path) -> None:
    ours = table_schema(dataset_of(tmp_path / "t", keyed(pa.field("a", pa.int8()))))
    last = ours.stored.field(-1)
    assert (last.name, last.type, last.nullable, last.metadata) == (TOMBSTONE, pa.bool_(), False, None)
    assert ours.names == ["id", "a"]


@pytest.mark.parametrize("type_", [*TYPES, pa.map_(pa.string(), pa.int32())])
def test_plain_columns_are_the_tables_own(type_: pa.DataType, tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "t", keyed(pa.field("a", type_, metadata={"mine": "1"})), "2.2")
    assert table_schema(dataset).plain.equals(dataset.schema, check_metadata=True)


def test_a_composite_key_is_in_key_order(tmp_path: Path) -> None:
    position = "lance-schema:unenforced-primary-key:position"
    schema = pa.schema(
        [
            pa.field("b", pa.string(), nullable=False, metadata={**KEY, position: "2"}),
            pa.field("x", pa.int8()),
            pa.field("a", pa.int64(), nullable=False, metadata={**KEY, position: "1"}),
        ]
    )
    assert table_schema(dataset_of(tmp_path / "t", schema)).primary_key == ("a", "b")


def test_a_table_without_a_key(tmp_path: Path) -> None:
    ours = table_schema(dataset_of(tmp_path / "t", pa.schema([("a", pa.int8())])))
    assert ours.primary_key == ()


def test_a_field_without_annotation_has_no_id() -> None:
    field = pa.field("a", pa.struct([pa.field("b", pa.int8(), metadata={FIELD_ID_KEY: b"4"})]))
    assert field_id(field) == -1
    assert field_id(field.type.field(0)) == 4
    assert without_field_ids(field).equals(pa.field("a", pa.struct([("b", pa.int8())])), check_metadata=True)
