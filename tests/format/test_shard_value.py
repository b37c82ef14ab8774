"""Sharding values as manifests store them."""

from __future__ import annotations

from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancewal.errors import CorruptManifestError, InvalidInputError
from lancewal.format.bucket import decode_shard_value, encode_shard_value, result_type_to_arrow

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
TEXTS = [pa.string(), pa.large_string(), pa.string_view()]


def int_range(arrow_type: pa.DataType) -> tuple[int, int]:
    bits = arrow_type.bit_width
    return (
        (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        if pa.types.is_signed_integer(arrow_type)
        else (0, 2**bits - 1)
    )


@given(st.sampled_from(INTEGERS), st.data())
def test_an_integer_is_stored_as_arrow_stores_it(arrow_type: pa.DataType, data: st.DataObject) -> None:
    value = data.draw(st.integers(*int_range(arrow_type)))
    stored = encode_shard_value(value, arrow_type)
    assert stored == pa.array([value], arrow_type).buffers()[1].to_pybytes()[: arrow_type.bit_width // 8]
    assert decode_shard_value(stored, arrow_type) == value


@given(st.sampled_from(TEXTS), st.text(st.characters(exclude_categories=["Cs"])))
def test_text_is_stored_as_utf8(arrow_type: pa.DataType, value: str) -> None:
    stored = encode_shard_value(value, arrow_type)
    assert stored == value.encode()
    assert decode_shard_value(stored, arrow_type) == value


@pytest.mark.parametrize(("value", "stored"), [(True, b"\x01"), (False, b"\x00")])
def test_a_bool_is_one_byte(value: bool, stored: bytes) -> None:
    assert encode_shard_value(value, pa.bool_()) == stored
    assert decode_shard_value(stored, pa.bool_()) is value


def test_arrow_and_numpy_scalars_are_taken_as_their_value() -> None:
    assert encode_shard_value(pa.scalar(5, pa.int64()), pa.int32()) == b"\5\0\0\0"
    assert encode_shard_value(np.int64(5), pa.int16()) == b"\5\0"
    assert encode_shard_value(np.True_, pa.bool_()) == b"\1"


@pytest.mark.parametrize(
    ("value", "arrow_type"),
    [
        (None, pa.int32()),
        (pa.scalar(None, pa.string()), pa.string()),
        (True, pa.int32()),
        (1, pa.bool_()),
        (128, pa.int8()),
        (-1, pa.uint64()),
        (1.0, pa.int32()),
        ("1", pa.int32()),
        (b"a", pa.string()),
        ("\ud800", pa.string()),
        (1.5, pa.float64()),
    ],
)
def test_a_value_that_is_not_of_the_type_is_refused(value: object, arrow_type: pa.DataType) -> None:
    with pytest.raises(InvalidInputError):
        encode_shard_value(value, arrow_type)


@pytest.mark.parametrize(
    ("data", "arrow_type"),
    [(b"\1\0\0", pa.int32()), (b"", pa.int8()), (b"\2", pa.bool_()), (b"\xff", pa.string())],
)
def test_bytes_that_are_no_such_value_are_corrupt(data: bytes, arrow_type: pa.DataType) -> None:
    with pytest.raises(CorruptManifestError):
        decode_shard_value(data, arrow_type)


@pytest.mark.parametrize("arrow_type", [*INTEGERS, pa.bool_(), pa.string(), pa.large_string()], ids=str)
def test_pylance_s_result_type_names_are_understood(tmp_path: Path, arrow_type: pa.DataType) -> None:
    dataset = lance.write_dataset(pa.table({"c": pa.array([], arrow_type)}), str(tmp_path))
    dataset.initialize_mem_wal(identity_column="c")
    (spec,) = dataset.mem_wal_index_details()["sharding_specs"]
    assert result_type_to_arrow(spec["fields"][0]["result_type"]) == arrow_type


def test_an_unknown_result_type_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match=r"'decimal'.*int32"):
        result_type_to_arrow("decimal")
    with pytest.raises(InvalidInputError, match="double"):
        decode_shard_value(b"12345678", pa.float64())
