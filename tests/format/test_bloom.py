"""The bloom filter: byte for byte what Lance writes, and never a wrong "no"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal.errors import InvalidInputError
from lancewal.format.bloom import FILTER_BYTES, BloomFilter, can_rule_out, key_hashes
from lancewal.format.schema import PRIMARY_KEY_KEY
from lancewal.format.siphash import siphash13_spans, siphash13_words
from lancewal.format.spans import byte_spans
from lancewal.sstable import KeyProbe
from lancewal.storage import layout

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
TEXTS = [pa.string(), pa.large_string()]
BINARIES = [pa.binary(), pa.large_binary()]
ALL = [pa.bool_(), *INTEGERS, *TEXTS, *BINARIES]
HASHED_BY_VALUE = [pa.int32(), pa.int64(), pa.string(), pa.binary()]

Write = tuple[str, Sequence[pa.Array]]


def some_values(type_: pa.DataType, rows: int = 60) -> pa.Array:
    """Values with every length of text from none to several words, and the integers' extremes."""
    random = np.random.default_rng(7)
    if type_ in INTEGERS:
        limits = np.iinfo(type_.to_pandas_dtype())
        picked = random.integers(limits.min, limits.max, rows, dtype=limits.dtype, endpoint=True)
        picked[:2] = limits.min, limits.max
        return pa.array(picked, type_)
    if type_ in TEXTS:
        return pa.array(["é\0x"[i % 3] * (i % 30) + str(i) * (i > 2) for i in range(rows)], type_)
    if type_ in BINARIES:
        return pa.array([random.bytes(i % 30) for i in range(rows)], type_)
    return pa.array([bool(i % 2) for i in range(rows)], type_)


def lance_filter(path: Path, types: Sequence[pa.DataType], writes: Sequence[Write]) -> bytes:
    """The bloom filter that Lance flushes after these puts and deletes."""
    key = {PRIMARY_KEY_KEY: b"true"}
    fields = [pa.field(f"k{i}", t, nullable=False, metadata=key) for i, t in enumerate(types)]
    schema = pa.schema([*fields, pa.field("x", pa.int32())])
    dataset = lance.write_dataset(schema.empty_table(), str(path))
    dataset.initialize_mem_wal(unsharded=True)
    with dataset.mem_wal_writer(str(uuid4()), max_wal_flush_interval_ms=1) as writer:
        for kind, columns in writes:
            if kind == "put":
                payload = pa.array(range(len(columns[0])), pa.int32())
                writer.put(pa.table([*columns, payload], schema=schema))
            else:
                writer.delete(pa.table(list(columns), schema=pa.schema(fields)))
    (written,) = path.glob(f"{layout.MEM_WAL_DIR}/*/*_gen_1/{layout.BLOOM_FILTER_NAME}")
    return written.read_bytes()


@pytest.mark.parametrize("type_", ALL, ids=str)
def test_filters_of_single_keys_equal_lances(type_: pa.DataType, tmp_path: Path) -> None:
    column = some_values(type_)
    written = lance_filter(tmp_path / "t", [type_], [("put", [column])])
    assert BloomFilter.build([column]).to_bytes() == written
    assert len(written) == FILTER_BYTES
    assert BloomFilter.from_bytes(written).might_contain(key_hashes([column])).all()


@pytest.mark.parametrize(
    "types",
    [
        [pa.int64(), pa.int32()],
        [pa.int16(), pa.int64(), pa.bool_(), pa.int32()],
        [pa.string(), pa.int64()],
        [pa.binary(), pa.large_string(), pa.string(), pa.uint8()],
        [pa.bool_(), pa.large_binary()],
    ],
    ids=lambda types: "+".join(map(str, types)),
)
def test_filters_of_composite_keys_equal_lances(types: list[pa.DataType], tmp_path: Path) -> None:
    columns = [some_values(type_) for type_ in types]
    written = lance_filter(tmp_path / "t", types, [("put", columns)])
    assert BloomFilter.build(columns).to_bytes() == written


def test_deleted_and_superseded_keys_are_in_the_filter_as_in_lances(tmp_path: Path) -> None:
    puts = pa.array([1, 2, 3, 2, 1])
    deletes = pa.array([3, 99])
    writes: list[Write] = [("put", [puts]), ("delete", [deletes]), ("put", [pa.array([1])])]
    written = lance_filter(tmp_path / "t", [pa.int64()], writes)
    assert BloomFilter.build([pa.chunked_array([puts, deletes])]).to_bytes() == written
    assert BloomFilter.build([puts]).to_bytes() != written


def test_a_well_filled_filter_equals_lances(tmp_path: Path) -> None:
    """More rows than are worked on at a time."""
    column = pa.array([f"key-{i * i}" for i in range(20_000)])
    written = lance_filter(tmp_path / "t", [pa.string()], [("put", [column])])
    bloom = BloomFilter.build([column])
    assert bloom.to_bytes() == written
    assert bloom.might_contain(key_hashes([column])).all()


def test_adding_in_parts_equals_building_at_once() -> None:
    column = some_values(pa.string())
    parts = BloomFilter()
    for start in range(0, len(column), 7):
        parts.add([column[start : start + 7]])
    assert parts.to_bytes() == BloomFilter.build([column]).to_bytes()
    assert BloomFilter.build([pa.chunked_array([column[:9], column[9:]])]).to_bytes() == parts.to_bytes()


@pytest.mark.parametrize("type_", HASHED_BY_VALUE, ids=str)
def test_keys_that_were_not_added_are_mostly_ruled_out(type_: pa.DataType) -> None:
    column = some_values(type_, 1000)
    half = BloomFilter.build([column[:500]])
    others = [i for i in range(500, 1000) if column[i].as_py() not in set(column[:500].to_pylist())]
    answers = half.might_contain(key_hashes([column]))
    assert answers[:500].all()
    assert answers[others].mean() < 0.02


@pytest.mark.parametrize("type_", [t for t in ALL if t not in HASHED_BY_VALUE], ids=str)
def test_keys_whose_values_lance_does_not_hash_are_never_ruled_out(type_: pa.DataType) -> None:
    column = some_values(type_, 10)
    assert not can_rule_out([pa.int64(), type_])
    assert len(KeyProbe([column]).candidates(BloomFilter())) == 10
    assert len(KeyProbe([pa.array(range(10)), column]).candidates(BloomFilter())) == 10
    assert not len(KeyProbe([pa.array(range(10))]).candidates(BloomFilter()))


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.none() | st.integers(-99, 99), st.none() | st.text(max_size=20)), max_size=30),
    st.integers(0, 30),
)
def test_slices_and_batch_sizes_do_not_change_a_hash(rows: list[tuple[Any, Any]], cut: int) -> None:
    columns = [
        pa.array([row[0] for row in rows], pa.int32()),
        pa.array([row[1] for row in rows], pa.string()),
    ]
    whole = key_hashes(columns).tolist()
    assert key_hashes([c[:cut] for c in columns]).tolist() == whole[:cut]
    assert key_hashes([c[cut:] for c in columns]).tolist() == whole[cut:]


def plain_message(row: Sequence[Any], types: Sequence[pa.DataType]) -> bytes:
    message = b""
    for value, type_ in zip(row, types, strict=True):
        if value is None:
            message += b"\1"
        elif pa.types.is_string(type_):
            message += b"\0" + value.encode() + b"\xff"
        elif pa.types.is_binary(type_):
            message += b"\0" + len(value).to_bytes(8, "little") + value
        elif type_ in HASHED_BY_VALUE:
            message += b"\0" + value.to_bytes(type_.bit_width // 8, "little", signed=True)
        else:
            message += b"\0"
    return message


@pytest.mark.parametrize("types", [HASHED_BY_VALUE, ALL, [pa.int64()], [pa.bool_()]], ids=str)
def test_nulls_are_hashed_as_documented(types: list[pa.DataType]) -> None:
    """Lance's tables refuse null keys, so the documented message is the only witness."""
    rows = [
        [None if (i >> j) % 2 else some_values(t)[i].as_py() for j, t in enumerate(types)] for i in range(40)
    ]
    columns = [pa.array([row[j] for row in rows], t) for j, t in enumerate(types)]
    messages = pa.array([plain_message(row, types) for row in rows], pa.binary())
    assert key_hashes(columns).tolist() == siphash13_spans(byte_spans(messages)).tolist()


@pytest.mark.parametrize("copies", [1, 50], ids=["few rows", "many rows"])
def test_siphash_gives_the_known_values(copies: int) -> None:
    """The values are CPython's own hash of these bytes under ``PYTHONHASHSEED=0``."""
    known = {
        b"a": 0x407448D2B89B1813,
        bytes(range(8)): 0xEAD411E67EBE2EEA,
        bytes(range(15)): 0xF30EB725BB91C9EA,
        bytes(range(16)): 0x8972188433A5C5B7,
        bytes(range(40)): 0x95BC321AB41D8206,
    }
    messages = pa.array(list(known) * copies)
    assert siphash13_spans(byte_spans(messages)).tolist() == list(known.values()) * copies


def test_few_long_messages_among_short_ones_hash_as_they_do_alone() -> None:
    messages = pa.array([b"ab", bytes(1000), b"", b"x" * 777, *[b"0123456789"] * 30])
    together = siphash13_spans(byte_spans(messages)).tolist()
    assert together == [
        int(siphash13_spans(byte_spans(messages[i : i + 1]))[0]) for i in range(len(messages))
    ]


def test_equally_long_messages_hash_the_same_as_words_and_as_spans() -> None:
    raw = np.random.default_rng(3).integers(0, 256, (100, 21), np.uint8)
    padded = np.zeros((100, 24), np.uint8)
    padded[:, :21], padded[:, 23] = raw, 21
    spans = siphash13_spans(byte_spans(pa.array([row.tobytes() for row in raw])))
    assert siphash13_words(padded.view("<u8")).tolist() == spans.tolist()
    assert siphash13_words(padded[:3].view("<u8")).tolist() == spans[:3].tolist()


@pytest.mark.parametrize("size", [0, 31, 32, 64, FILTER_BYTES - 1, FILTER_BYTES - 32, FILTER_BYTES * 2])
def test_what_is_no_filter_is_refused(size: int) -> None:
    with pytest.raises(InvalidInputError, match="bloom filter"):
        BloomFilter.from_bytes(bytes(size))


def test_bytes_survive_a_round_trip() -> None:
    raw = BloomFilter.build([some_values(pa.int64())]).to_bytes()
    assert BloomFilter.from_bytes(raw).to_bytes() == raw


@pytest.mark.parametrize(
    "columns", [[], [pa.array([1.5])], [pa.array([1]), pa.array([1, 2])]], ids=["none", "float", "unequal"]
)
def test_what_is_no_key_is_refused(columns: list[pa.Array]) -> None:
    with pytest.raises(InvalidInputError):
        BloomFilter.build(columns)
    with pytest.raises(InvalidInputError):
        key_hashes(columns)
