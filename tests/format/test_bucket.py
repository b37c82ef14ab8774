"""The bucket hash against Lance's own routing, for every type it takes."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lance.mem_wal import ShardingField, ShardingSpec, evaluate_sharding_spec
from lance.schema import LanceSchema

from lancewal.errors import InvalidInputError
from lancewal.format.bucket import bucket_hash, bucket_of, check_bucket_type

# As many buckets as Lance takes: the remainder then shows 31 bits of the hash.
MANY = (1 << 31) - 1

FLOATS = {pa.float32(): st.floats(width=32), pa.float64(): st.floats()}
TEXTS = [pa.string(), pa.large_string()]
SIGNED = {pa.int8(): 8, pa.int16(): 16, pa.int32(): 32, pa.int64(): 64, pa.date32(): 32}
SIGNED |= {pa.time32("s"): 31, pa.time32("ms"): 31, pa.time64("us"): 63, pa.time64("ns"): 63}
SIGNED |= {pa.timestamp(unit): 64 for unit in ("s", "ms", "us", "ns")}
SIGNED |= {pa.timestamp("us", "UTC"): 64}
UNSIGNED = {pa.uint8(): 8, pa.uint16(): 16, pa.uint32(): 32, pa.uint64(): 64}
SUPPORTED = [pa.bool_(), *SIGNED, *UNSIGNED, *FLOATS, *TEXTS]

UNSUPPORTED = [
    *(pa.null(), pa.float16(), pa.date64(), pa.duration("us"), pa.binary(), pa.large_binary()),
    *(pa.binary(4), pa.decimal128(10, 2), pa.string_view(), pa.dictionary(pa.int32(), pa.string())),
    *(pa.list_(pa.int32()), pa.list_(pa.float32(), 2), pa.struct([("a", pa.int32())])),
]


@cache
def lance_schema(type_: pa.DataType) -> tuple[pa.Schema, Any]:
    schema = pa.schema([pa.field("k", type_)])
    return schema, LanceSchema.from_pyarrow(schema)


def lance_bucket(array: pa.Array, num_buckets: int) -> list[int]:
    schema, lance = lance_schema(array.type)
    field = ShardingField(
        "b", [0], "bucket", result_type="int32", parameters={"num_buckets": str(num_buckets)}
    )
    batch = pa.record_batch([array], schema=schema)
    result = evaluate_sharding_spec(batch, ShardingSpec(1, [field]), lance)
    return [int(bucket) for bucket in result.column(0).to_pylist()]


def values_of(type_: pa.DataType) -> st.SearchStrategy[Any]:
    if type_ in SIGNED:
        bits = SIGNED[type_]
        return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
    if type_ in UNSIGNED:
        return st.integers(0, (1 << UNSIGNED[type_]) - 1)
    if type_ in FLOATS:
        return FLOATS[type_] | st.sampled_from([0.0, -0.0, float("nan"), float("inf")])
    if type_ in TEXTS:
        return st.text(max_size=40) | st.text("aé€𝄞\0", max_size=12)
    return st.booleans()


@st.composite
def sliced_arrays(draw: st.DrawFn) -> pa.Array:
    type_ = draw(st.sampled_from(SUPPORTED))
    values = draw(st.lists(st.none() | values_of(type_), max_size=40))
    array = pa.array(values, type_)
    start = draw(st.integers(0, len(array)))
    return array[start : draw(st.integers(start, len(array)))]


@settings(max_examples=300)
@given(sliced_arrays(), st.sampled_from([1, 7, 8, 1024, MANY]))
def test_rows_go_where_lance_sends_them(array: pa.Array, num_buckets: int) -> None:
    assert bucket_of(array, num_buckets).tolist() == lance_bucket(array, num_buckets)


@settings(max_examples=50)
@given(sliced_arrays(), st.integers(0, 40))
def test_chunks_hash_as_the_whole(array: pa.Array, cut: int) -> None:
    chunked = pa.chunked_array([array[:cut], array[cut:]], array.type)
    assert bucket_hash(chunked).tolist() == bucket_hash(array).tolist()


@pytest.mark.parametrize("type_", SUPPORTED, ids=str)
def test_every_supported_type_takes_nulls_and_no_rows(type_: pa.DataType) -> None:
    check_bucket_type(type_)
    assert bucket_hash(pa.nulls(3, type_)).tolist() == [0, 0, 0]
    assert bucket_hash(pa.chunked_array([], type_)).tolist() == []


@pytest.mark.parametrize("lengths", [range(5, 80), [20], [0], [3, 300]], ids=str)
def test_many_rows_of_text_hash_as_in_lance(lengths: list[int]) -> None:
    """More rows than are worked on at a time, of mixed and of equal length."""
    random = np.random.default_rng(1)
    texts = ["".join(map(chr, random.integers(1, 1000, n))) for n in random.choice(lengths, 500)]
    array = pa.array(texts * 40, pa.string())
    assert bucket_of(array, MANY).tolist() == lance_bucket(array, MANY)


def test_many_rows_of_numbers_hash_as_in_lance() -> None:
    array = pa.array(np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 40_000))
    assert bucket_of(array, MANY).tolist() == lance_bucket(array, MANY)


def test_a_few_long_texts_among_short_ones_hash_as_in_lance() -> None:
    array = pa.array(["short", "x" * 9_999, None, "€" * 5_000, *(["middling length"] * 40)])
    assert bucket_of(array, MANY).tolist() == lance_bucket(array, MANY)


def test_every_nan_is_one_value_and_raises_no_warning() -> None:
    for patterns in (
        np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32),
        np.array([0x7FF8000000000000, 0x7FF0000000000001, 0xFFFFFFFFFFFFFFFF], np.uint64).view(np.float64),
    ):
        array = pa.array(patterns)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(set(bucket_hash(array).tolist())) == 1
        assert bucket_of(array, MANY).tolist() == lance_bucket(array, MANY)


@pytest.mark.parametrize("type_", FLOATS, ids=str)
def test_both_zeros_go_to_one_bucket(type_: pa.DataType) -> None:
    array = pa.array([0.0, -0.0, None], type_)
    assert bucket_hash(array)[0] == bucket_hash(array)[1] != 0
    assert bucket_of(array, MANY).tolist() == lance_bucket(array, MANY)


def test_bytes_under_a_null_do_not_count() -> None:
    offsets = pa.py_buffer(np.array([0, 3, 6], np.int32))
    array = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"abcxyz"), pa.py_buffer(b"\x02"))
    assert array.to_pylist() == [None, "xyz"]
    assert bucket_of(array, MANY).tolist() == lance_bucket(array, MANY)


def test_the_sign_bit_is_part_of_the_hash() -> None:
    """Without a tail the variant equals the standard hash, whose published value this is."""
    assert np.uint32(bucket_hash(pa.array(["test"])).view(np.uint32)[0]) == 0xBA6BD213


@pytest.mark.parametrize("type_", UNSUPPORTED, ids=str)
def test_types_that_lance_cannot_route_are_refused_by_name(type_: pa.DataType) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        bucket_of(pa.nulls(2, type_), 8)
    assert str(type_) in str(refusal.value)
    with pytest.raises(InvalidInputError):
        check_bucket_type(type_)


@pytest.mark.parametrize("num_buckets", [0, -1, 1 << 31])
def test_a_bucket_count_that_lance_refuses_is_refused(num_buckets: int) -> None:
    with pytest.raises(InvalidInputError):
        bucket_of(pa.array([1]), num_buckets)
    with pytest.raises((ValueError, OSError), match="num_buckets"):
        lance_bucket(pa.array([1]), num_buckets)
