"""Every type of column that a Lance table can hold, through every level; or refused at the door."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.arrow import bfloat16_array

import lancewal
from lancewal.base.table import BaseTable
from lancewal.errors import InvalidInputError
from lancewal.format.schema import TOMBSTONE, without_field_ids
from lancewal.reader import TableReader
from lancewal.writer import ShardWriter
from tests.shards import manifest_of, store_of, stored_batches
from tests.tables import KEY, abandon, open_writer

VERSIONS = ["2.0", "2.1", "2.2"]
PACKED = {"lance-encoding:packed": "true"}

_WORDS = pa.dictionary(pa.int8(), pa.string())
_INTEGERS = [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]
_PLACE = pa.struct([("x", pa.int32()), ("name", pa.string())])


def _bfloat16(*values: float) -> pa.Array:
    return bfloat16_array(list(values))


def _stamps(unit: str, zone: str | None = None) -> pa.Array:
    return pa.array([0, -5], pa.int64()).cast(pa.timestamp(unit, zone))


#: Two values of each type, under the name of its column.
VALUES: dict[str, pa.Array] = {
    "nothing": pa.nulls(2),
    "truth": pa.array([True, False]),
    **{str(type_): pa.array([1, np.iinfo(type_.to_pandas_dtype()).max], type_) for type_ in _INTEGERS},
    "half": pa.array(np.array([1.5, -0.0], np.float16)),
    "float": pa.array([1.5, float("inf")], pa.float32()),
    "double": pa.array([1.5, -0.0]),
    "bfloat16": _bfloat16(1.5, -2.0),
    "decimal128": pa.array([Decimal("1.25"), Decimal("-9.99")], pa.decimal128(20, 2)),
    "decimal256": pa.array([Decimal("1.25"), Decimal("-9.99")], pa.decimal256(50, 2)),
    "date32": pa.array([dt.date(2024, 2, 29), dt.date(1, 1, 1)], pa.date32()),
    "date64": pa.array([dt.date(2024, 2, 29), dt.date(1, 1, 1)], pa.date64()),
    **{f"time_{unit}": pa.array([dt.time(1, 2, 3), dt.time(0)], pa.time32(unit)) for unit in ("s", "ms")},
    **{f"time_{unit}": pa.array([dt.time(1, 2, 3), dt.time(0)], pa.time64(unit)) for unit in ("us", "ns")},
    **{f"stamp_{unit}": _stamps(unit) for unit in ("s", "ms", "us", "ns")},
    "stamp_zone": _stamps("us", "Europe/Berlin"),
    "stamp_utc": _stamps("ns", "UTC"),
    "duration": pa.array([0, -5], pa.duration("us")),
    "text": pa.array(["a", ""]),
    "large_text": pa.array(["a\0", "😀"], pa.large_string()),
    "bytes": pa.array([b"a", b""]),
    "large_bytes": pa.array([b"\0", b"\xff"], pa.large_binary()),
    "four_bytes": pa.array([b"abcd", b"\0\0\0\0"], pa.binary(4)),
    "list": pa.array([[1, None], []], pa.list_(pa.int32())),
    "large_list": pa.array([["a", None], []], pa.large_list(pa.string())),
    "lists": pa.array([[[1], []], []], pa.list_(pa.list_(pa.int32()))),
    "places": pa.array([[{"x": 1, "name": "a"}], []], pa.list_(_PLACE)),
    "vectors": pa.array([[[1.0, 2.0]], []], pa.list_(pa.list_(pa.float32(), 2))),
    "vector16": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4, dtype=np.float16)), 2),
    "vector32": pa.array([[1, 2], [3, 4]], pa.list_(pa.float32(), 2)),
    "vector64": pa.array([[1, 2], [3, 4]], pa.list_(pa.float64(), 2)),
    "vector_bf16": pa.FixedSizeListArray.from_arrays(_bfloat16(1, 2, 3, 4), 2),
    "vector_u8": pa.array([[1, 2], [3, 4]], pa.list_(pa.uint8(), 2)),
    "flags": pa.array([[True, False], [False, False]], pa.list_(pa.bool_(), 2)),
    "word": pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int8()), ["a", "b"]),
    "word_of_many": pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.uint16()), ["a", "b"]),
    "number_word": pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int32()), [7, 8]),
    "words": pa.array([["a", None], []], pa.list_(_WORDS)),
    "uuid": pa.array([uuid.UUID(int=1).bytes, uuid.UUID(int=2).bytes], pa.uuid()),
    "json": pa.array(['{"a":1}', "[1,2]"], pa.json_()),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), [2]), pa.array([[1, 2], [3, 4]], pa.list_(pa.float32(), 2))
    ),
}
_PAIR = pa.struct([("a", pa.int32()), ("b", pa.float64())])
_STRICT = pa.struct([pa.field("a", pa.int32(), False), pa.field("b", pa.float64(), False)])
#: Structs, which not all file versions can hold as null.
STRUCTS: dict[str, pa.Array] = {
    "place": pa.array([{"x": 1, "name": "a"}, {"x": None, "name": None}], _PLACE),
    "strict": pa.array([{"a": 1, "b": 1.5}, {"a": 2, "b": 2.5}], _STRICT),
    "word_in": pa.StructArray.from_arrays(
        [pa.DictionaryArray.from_arrays(pa.array([None, 0], pa.int8()), ["a"])],
        fields=[pa.field("w", _WORDS)],
    ),
    "document_in": pa.StructArray.from_arrays([VALUES["json"]], fields=[pa.field("j", pa.json_())]),
    "packed": pa.array([{"a": 1, "b": 1.5}, {"a": 2, "b": 2.5}], _PAIR),
    "packed_strict": pa.array([{"a": 1, "b": 1.5}, {"a": 2, "b": 2.5}], _STRICT),
}
MAP = pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int32()))


def _field(name: str, type_: pa.DataType, nullable: bool = True) -> pa.Field:
    return pa.field(name, type_, nullable, PACKED if "packed" in name else None)


class Case:
    """A table with one column of each type, and the values that it must show."""

    def __init__(
        self, where: Path, columns: dict[str, pa.Array], version: str, strict: Sequence[str]
    ) -> None:
        self.columns = columns
        key = pa.field("id", pa.int64(), False, KEY)
        self.schema = pa.schema([key, *(_field(n, c.type, n not in strict) for n, c in columns.items())])
        self.nullable = [name for name in columns if name not in strict and "packed" not in name]
        if version == "2.0":
            self.nullable = [name for name in self.nullable if name not in STRUCTS]
        nothing = pa.table([pa.nulls(0, field.type) for field in self.schema], schema=self.schema)
        lance.write_dataset(nothing, str(where), schema=self.schema, data_storage_version=version)
        self.table = lancewal.initialize(where, unsharded=True, maintained_indexes=[])
        self.base = BaseTable.open(str(where))
        self.shard = self.table.shards()[0].shard_id
        self.readers = [self.table, TableReader(store_of(self.base), live_writers=False)]
        self.model: dict[int, dict[str, Any]] = {}

    def put(self, writer: ShardWriter, ids: Sequence[int], *, nulls: bool = False) -> None:
        columns = {}
        for name, column in self.columns.items():
            empty = pa.nulls(1, column.type)
            both = pa.concat_arrays([column, empty]) if nulls and name in self.nullable else column
            columns[name] = both.take(pa.array([place % len(both) for place in range(len(ids))]))
        rows = pa.table([pa.array(ids, pa.int64()), *columns.values()], schema=self.schema)
        writer.put(rows)
        for place, key in enumerate(ids):
            self.model[key] = {name: column[place].as_py() for name, column in columns.items()}

    def put_by_lance(self, writer: Any, ids: Sequence[int]) -> None:
        rows = pa.table([pa.array(ids, pa.int64()), *self.columns.values()], schema=self.schema)
        # Lance's writer takes JSON in Lance's own encoding only.
        stored = stored_batches(self.base, rows)[0].drop_columns([TOMBSTONE])
        plain = [without_field_ids(field) for field in stored.schema]
        fields = [field.with_nullable(self.schema.field(field.name).nullable) for field in plain]
        columns = [column.cast(field.type) for column, field in zip(stored.columns, fields, strict=True)]
        writer.put(pa.Table.from_arrays(columns, schema=pa.schema(fields)))
        for place, key in enumerate(ids):
            self.model[key] = {name: column[place].as_py() for name, column in self.columns.items()}

    def delete(self, writer: ShardWriter, ids: Sequence[int]) -> None:
        writer.delete(list(ids))
        for key in ids:
            self.model.pop(key, None)

    def check(self) -> None:
        for reader in self.readers:
            assert self.shown(reader.scan().to_table()) == self.wanted()
            assert reader.scan().count_rows() == len(self.model)
            assert self.shown(reader.scan(filter="id >= 0 AND id < 99").to_table()) == self.wanted()
            assert self.shown(reader.lookup(list(range(12))).table) == self.wanted()
            assert self.shown(reader.lookup([0]).table) == {0: self.wanted()[0]}

    def wanted(self) -> dict[int, dict[str, str]]:
        # As text: neither NaN nor the scalars of extension types equal themselves.
        return {key: {name: repr(value) for name, value in row.items()} for key, row in self.model.items()}

    def shown(self, rows: pa.Table) -> dict[int, dict[str, str]]:
        assert rows.schema.equals(self.base.schema.plain)
        values = {name: rows.column(name).to_pylist() for name in self.columns}
        keys = rows.column("id").to_pylist()
        return {key: {name: repr(values[name][i]) for name in values} for i, key in enumerate(keys)}


def _cases() -> Iterator[Any]:
    for version in VERSIONS:
        yield pytest.param(version, VALUES, [], id=f"{version} values")
        yield pytest.param(version, VALUES, [n for n in VALUES if n != "nothing"], id=f"{version} not null")
        yield pytest.param(version, STRUCTS, [], id=f"{version} structs")
        yield pytest.param(version, STRUCTS, list(STRUCTS), id=f"{version} structs not null")
    yield pytest.param("2.2", {"map": MAP}, [], id="2.2 map")


@pytest.mark.parametrize(("version", "columns", "strict"), list(_cases()))
def test_rows_of_every_type_come_back_from_every_level(
    tmp_path: Path, version: str, columns: dict[str, pa.Array], strict: list[str]
) -> None:
    case = Case(tmp_path / "t", columns, version, strict)
    writer = open_writer(case.base, case.shard)
    case.put(writer, [0, 1, 2, 3, 4], nulls=True)
    case.put(writer, [5, 6])
    case.delete(writer, [1, 9])
    case.check()
    abandon(writer)
    case.check()
    # Lance replays the log, adds to it, and flushes it, tombstones included.
    with case.base.dataset.mem_wal_writer(
        str(case.shard), durable_write=True, max_wal_flush_interval_ms=1
    ) as theirs:
        case.put_by_lance(theirs, [1, 9])
        case.check()
    case.check()
    assert manifest_of(case.base, case.shard).sstables, "Lance has flushed nothing"
    writer = open_writer(case.base, case.shard)
    case.put(writer, [0, 7])
    case.put(writer, [8, 10, 11], nulls=True)
    case.delete(writer, [5, 8])
    writer.close()
    case.check()
    case.table.compact()
    case.check()
    assert case.shown(lance.dataset(case.base.uri).to_table()) == case.wanted()
    writer = open_writer(case.base, case.shard)
    case.delete(writer, [0])
    case.put(writer, [0])
    writer.close()
    case.table.compact()
    case.check()


_UNSTORABLE: list[tuple[str, pa.Field]] = [
    *((version, pa.field("c", pa.list_(pa.string(), 2))) for version in VERSIONS),
    *((version, pa.field("c", pa.list_(pa.struct([("a", pa.int32())]), 2))) for version in VERSIONS),
    *((version, pa.field("c", pa.list_(pa.list_(pa.float32(), 2), 2))) for version in VERSIONS),
    *((version, pa.field("c", _PLACE, metadata=PACKED)) for version in VERSIONS),
    *((version, pa.field("c", MAP.type)) for version in ("2.0", "2.1")),
    *((version, pa.field("c", pa.struct([]))) for version in ("2.1", "2.2")),
]


@pytest.mark.parametrize(("version", "field"), _UNSTORABLE, ids=lambda each: str(getattr(each, "type", each)))
def test_a_column_that_lance_creates_and_cannot_store_is_refused_before_any_row(
    tmp_path: Path, version: str, field: pa.Field
) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False, KEY), field])
    uri = str(tmp_path / "t")
    dataset = lance.write_dataset(schema.empty_table(), uri, schema=schema, data_storage_version=version)
    with pytest.raises(InvalidInputError, match="column 'c'"):
        lancewal.initialize(uri, unsharded=True)
    dataset.initialize_mem_wal(unsharded=True)
    with pytest.raises(InvalidInputError, match="column 'c'"):
        lancewal.open(uri).writer()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_null_that_a_packed_struct_cannot_hold_is_refused_by_put(tmp_path: Path, version: str) -> None:
    case = Case(tmp_path / "t", {"packed": STRUCTS["packed"]}, version, [])
    with case.table.writer() as writer:
        for value in (None, {"a": None, "b": 1.0}):
            with pytest.raises(InvalidInputError, match="packed"):
                writer.put(pa.Table.from_pylist([{"id": 1, "packed": value}], schema=case.schema))
        with pytest.raises(InvalidInputError, match="packed"):
            writer.put(pa.table({"id": [1]}))
    assert case.table.scan().count_rows() == 0


def test_nulls_are_still_refused_where_the_table_says_not_null(tmp_path: Path) -> None:
    case = Case(
        tmp_path / "t", {"vector": VALUES["vector32"], "text": VALUES["text"]}, "2.1", ["vector", "text"]
    )
    with case.table.writer() as writer:
        for row in ({"vector": None, "text": "a"}, {"vector": [1, 2], "text": None}):
            nullable = pa.schema([field.with_nullable(True) for field in case.schema])
            with pytest.raises(InvalidInputError, match="cannot be null"):
                writer.put(pa.Table.from_pylist([{"id": 1, **row}], schema=nullable))
        with pytest.raises(InvalidInputError, match="missing"):
            writer.put(pa.table({"id": [1], "text": ["a"]}))
    assert case.table.scan().count_rows() == 0


def test_words_that_are_null_in_a_dictionary_are_nulls_and_do_not_stop_a_flush(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False, KEY), pa.field("w", _WORDS)])
    lance.write_dataset(schema.empty_table(), str(tmp_path / "t"), schema=schema)
    table = lancewal.initialize(tmp_path / "t", unsharded=True)
    with table.writer() as writer:
        for start, words in ((0, ["a", None]), (2, [None, "b"])):
            column = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(words))
            writer.put(pa.table([pa.array([start, start + 1]), column], schema=schema))
        assert table.lookup([3, 2, 1, 0]).table["w"].to_pylist() == ["b", None, None, "a"]
    assert table.lookup([3, 2, 1, 0]).table["w"].to_pylist() == ["b", None, None, "a"]
