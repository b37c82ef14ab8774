"""The composite key encoding: as Lance writes it, in the order of the tuples."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import lance
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lance.file import LanceFileReader

from lancewal.errors import InvalidInputError
from lancewal.format.keys import KEY_TYPES, check_key_types, encode_keys, key_values
from lancewal.format.schema import PRIMARY_KEY_KEY, TableSchema
from lancewal.storage import layout

SIGNED = {pa.int8(): 8, pa.int16(): 16, pa.int32(): 32, pa.int64(): 64}
UNSIGNED = {pa.uint8(): 8, pa.uint16(): 16, pa.uint32(): 32, pa.uint64(): 64}
TEXTS = [pa.string(), pa.large_string()]
BINARIES = [pa.binary(), pa.large_binary()]
ALL = [pa.bool_(), *SIGNED, *UNSIGNED, *TEXTS, *BINARIES]

REFUSED = [
    *(pa.float16(), pa.float32(), pa.float64(), pa.date32(), pa.date64(), pa.time32("s")),
    *(pa.time64("us"), pa.timestamp("us"), pa.duration("us"), pa.binary(4), pa.decimal128(10, 2)),
]

Row = tuple[Any, ...]


def values_of(type_: pa.DataType) -> st.SearchStrategy[Any]:
    if type_ in SIGNED:
        bits = SIGNED[type_]
        return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
    if type_ in UNSIGNED:
        return st.integers(0, (1 << UNSIGNED[type_]) - 1)
    if type_ in TEXTS:
        # Few letters, so that rows share prefixes; zeros, because they are escaped.
        return st.text("\0\1aé𝄞", max_size=6) | st.text(max_size=6)
    if type_ in BINARIES:
        return st.lists(st.sampled_from([0, 1, 254, 255]), max_size=6).map(bytes) | st.binary(max_size=6)
    return st.booleans()


@st.composite
def typed_rows(draw: st.DrawFn, nulls: bool = True) -> tuple[list[pa.DataType], list[Row]]:
    types = draw(st.lists(st.sampled_from(ALL), min_size=1, max_size=4))
    column = [st.none() | values_of(t) if nulls else values_of(t) for t in types]
    return types, draw(st.lists(st.tuples(*column), max_size=12))


def as_columns(types: list[pa.DataType], rows: list[Row]) -> list[pa.Array]:
    return [pa.array([row[i] for row in rows], type_) for i, type_ in enumerate(types)]


def sort_form(row: Row) -> list[tuple[bool, Any]]:
    """A tuple that sorts as the key should: nulls first, text by its UTF-8 bytes."""
    return [(v is not None, v.encode() if isinstance(v, str) else 0 if v is None else v) for v in row]


@settings(max_examples=200)
@given(typed_rows())
def test_bytes_sort_as_the_tuples_do(typed: tuple[list[pa.DataType], list[Row]]) -> None:
    types, rows = typed
    encoded = encode_keys(as_columns(types, rows)).to_pylist()
    by_bytes = sorted(range(len(rows)), key=lambda i: (encoded[i], i))
    by_tuple = sorted(range(len(rows)), key=lambda i: (sort_form(rows[i]), i))
    assert by_bytes == by_tuple


@settings(max_examples=200)
@given(typed_rows())
def test_only_equal_keys_have_equal_bytes(typed: tuple[list[pa.DataType], list[Row]]) -> None:
    types, rows = typed
    encoded = encode_keys(as_columns(types, rows)).to_pylist()
    assert len(set(encoded)) == len({tuple(sort_form(row)) for row in rows})


@settings(max_examples=100)
@given(typed_rows(), st.integers(0, 12), st.integers(0, 12))
def test_slices_and_chunks_encode_as_the_whole(
    typed: tuple[list[pa.DataType], list[Row]], start: int, cut: int
) -> None:
    types, rows = typed
    columns = as_columns(types, rows)
    whole = encode_keys(columns).to_pylist()
    chunked = [pa.chunked_array([c[start:][:cut], c[start:][cut:]], c.type) for c in columns]
    assert encode_keys(chunked).to_pylist() == whole[start:]


def lance_key_index(path: Path, types: list[pa.DataType], rows: list[Row]) -> pa.Table:
    """The ``values`` and ``ids`` that Lance writes when it flushes ``rows`` with this key."""
    key = {PRIMARY_KEY_KEY: b"true"}
    fields = [pa.field(f"k{i}", t, nullable=False, metadata=key) for i, t in enumerate(types)]
    schema = pa.schema([*fields, pa.field("x", pa.int32())])
    dataset = lance.write_dataset(schema.empty_table(), str(path))
    dataset.initialize_mem_wal(unsharded=True)
    with dataset.mem_wal_writer(str(uuid4()), max_wal_flush_interval_ms=1) as writer:
        payload = pa.array(range(len(rows)), pa.int32())
        writer.put(pa.table([*as_columns(types, rows), payload], schema=schema))
    (page_data,) = path.glob(f"{layout.MEM_WAL_DIR}/*/*_gen_1/{layout.PK_PAGE_DATA_NAME}")
    return LanceFileReader(str(page_data)).read_all().to_table()


EXTREMES: dict[str, list[Any]] = {
    "bool": [False, True, False, True, True],
    **{str(t): [-(1 << b - 1), -1, 0, 1, (1 << b - 1) - 1] for t, b in SIGNED.items()},
    **{str(t): [0, 1, 127, 1 << b - 1, (1 << b) - 1] for t, b in UNSIGNED.items()},
    **{str(t): ["", "\0", "a\0\0b", "é𝄞", "longer than eight bytes"] for t in TEXTS},
    **{str(t): [b"", b"\0", b"\xff\0\xff", b"\0\0\1", b"longer than eight bytes"] for t in BINARIES},
}


@pytest.mark.parametrize(
    "types",
    [ALL, ALL[::-1], [pa.int64(), pa.int32()], [pa.string(), pa.int64()]],
    ids=["all", "reversed", 2, 3],
)
def test_composite_keys_equal_what_lance_writes(types: list[pa.DataType], tmp_path: Path) -> None:
    shifted = [EXTREMES[str(t)][i % 5 :] + EXTREMES[str(t)][: i % 5] for i, t in enumerate(types)]
    rows = list(zip(*shifted, strict=True))
    written = lance_key_index(tmp_path / "t", types, rows)
    encoded = encode_keys(as_columns(types, rows)).to_pylist()
    ids = written.column("ids").to_pylist()
    assert sorted(ids) == list(range(len(rows)))
    assert written.column("values").to_pylist() == [encoded[i] for i in ids] == sorted(encoded)


def test_single_column_keys_stay_as_lance_writes_them(tmp_path: Path) -> None:
    rows = [("b",), ("",), ("é",)]
    written = lance_key_index(tmp_path / "t", [pa.string()], rows)
    column = as_columns([pa.string()], rows)[0]
    assert key_values([column]) == column
    assert key_values([pa.chunked_array([column[:1], column[1:]])]) == column
    assert written.column("values").combine_chunks() == column.take(written.column("ids").combine_chunks())


def test_composite_key_values_are_encoded() -> None:
    columns = [pa.array([1, 2]), pa.array(["a", "b"])]
    assert key_values(columns) == encode_keys(columns)


def schema_with_key(type_: pa.DataType) -> TableSchema:
    return TableSchema(pa.schema([pa.field("x", pa.float32()), pa.field("k", type_, nullable=False)]), ("k",))


@pytest.mark.parametrize("type_", ALL, ids=str)
def test_key_types_that_lance_hashes_are_taken(type_: pa.DataType) -> None:
    check_key_types(schema_with_key(type_))
    assert type_ in KEY_TYPES


@pytest.mark.parametrize("type_", REFUSED, ids=str)
def test_key_types_that_lance_cannot_hash_are_refused(type_: pa.DataType) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        check_key_types(schema_with_key(type_))
    assert "'k'" in str(refusal.value)
    assert str(type_) in str(refusal.value)
    for refuse in (encode_keys, key_values):
        with pytest.raises(InvalidInputError):
            refuse([pa.nulls(1, type_)])


def test_lance_refuses_the_same_key_types(tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError), match="unsupported type"):
        lance_key_index(tmp_path / "date", [pa.date32()], [(1,)])
    with pytest.raises((ValueError, OSError), match="unsupported type"):
        lance_key_index(tmp_path / "fixed", [pa.binary(2)], [(b"ab",)])


def test_a_key_column_that_does_not_exist_is_refused() -> None:
    schema = TableSchema(pa.schema([pa.field("x", pa.int64())]), ("gone",))
    with pytest.raises(InvalidInputError, match="'gone'"):
        check_key_types(schema)


def test_key_columns_of_different_length_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"\[2, 1\]"):
        encode_keys([pa.array([1, 2]), pa.array([1])])
    with pytest.raises(InvalidInputError):
        encode_keys([])
