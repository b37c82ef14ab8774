"""WAL entries: what is written is read, and no damage goes unnoticed."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal.errors import InvalidInputError, WalCorruptError
from lancewal.format.wal_entry import (
    WalEntry,
    decode_entry,
    decode_header,
    encode_entry,
    encode_sentinel,
    entry_schema,
)

SHARD = UUID("c0ffee00-0000-4000-8000-000000000001")
POSITION = 7
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

ID = {"lance:field_id": "0"}
SMALL = pa.record_batch(
    [pa.array([1, 2]), pa.array(["a", None])],
    schema=pa.schema([pa.field("id", pa.int64(), metadata=ID), pa.field("name", pa.string())]),
)


def encoded(*batches: pa.RecordBatch, tags: dict[str, str] | None = None, epoch: int = 3) -> bytes:
    return bytes(encode_entry(entry_schema(batches[0].schema, epoch, 2), batches, tags))


def decoded(data: bytes) -> WalEntry:
    return decode_entry(data, SHARD, POSITION)


def as_lance_writes(batch: pa.RecordBatch, metadata: dict[str, str], *, batches: int = 1) -> bytes:
    """An entry without anything of ours."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema.with_metadata(metadata)) as writer:
        for _ in range(batches):
            writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def refuses(data: bytes, match: str | None = None) -> WalCorruptError:
    with pytest.raises(WalCorruptError, match=match) as refusal:
        decoded(data)
    assert (refusal.value.shard_id, refusal.value.position) == (SHARD, POSITION)
    assert str(SHARD) in str(refusal.value)
    assert f"entry {POSITION}" in str(refusal.value)
    return refusal.value


# ---------------------------------------------------------------- round trips

numbers = st.integers(-(2**31), 2**31 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
days = st.dates(datetime.date(1970, 1, 1), datetime.date(2200, 1, 1))
moments = st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2200, 1, 1))
vectors = st.lists(st.floats(width=32, allow_nan=False), min_size=3, max_size=3)

SUPPORTED: list[tuple[pa.DataType, st.SearchStrategy[object]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.int32(), numbers),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint16(), st.integers(0, 2**16 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.string(), texts),
    (pa.large_string(), texts),
    (pa.binary(), st.binary(max_size=9)),
    (pa.large_binary(), st.binary(max_size=9)),
    (pa.binary(4), st.binary(min_size=4, max_size=4)),
    (pa.date32(), days),
    (pa.date64(), days),
    (pa.timestamp("us"), moments),
    (pa.timestamp("us", "UTC"), moments.map(lambda moment: moment.replace(tzinfo=datetime.UTC))),
    (pa.time64("us"), st.times()),
    (pa.duration("us"), st.timedeltas(datetime.timedelta(-1000), datetime.timedelta(1000))),
    (pa.decimal128(10, 2), numbers.map(lambda number: decimal.Decimal(number).scaleb(-2))),
    (pa.decimal256(40, 2), numbers.map(lambda number: decimal.Decimal(number).scaleb(-2))),
    (pa.list_(pa.float32(), 3), vectors),
    (pa.list_(pa.string()), st.lists(st.none() | texts, max_size=4)),
    (pa.large_list(pa.int32()), st.lists(numbers, max_size=4)),
    (
        pa.struct([("x", pa.int32()), ("y", pa.struct([("z", pa.string())]))]),
        st.fixed_dictionaries({"x": numbers, "y": st.none() | st.fixed_dictionaries({"z": texts})}),
    ),
    (pa.map_(pa.string(), pa.int32()), st.dictionaries(texts, numbers, max_size=3).map(dict.items).map(list)),
    (pa.dictionary(pa.int32(), pa.string()), texts),
    (pa.null(), st.none()),
]


@st.composite
def record_batches(draw: st.DrawFn) -> list[pa.RecordBatch]:
    """One to three batches of one schema, some of them slices of larger ones."""
    columns = draw(st.lists(st.sampled_from(SUPPORTED), min_size=1, max_size=5))
    schema = pa.schema(
        [
            pa.field(f"c{number}", type_, metadata={"lance:field_id": str(number * 3)})
            for number, (type_, _) in enumerate(columns)
        ]
    )
    batches = []
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(1, 6))
        arrays = [
            pa.array(draw(st.lists(st.none() | value, min_size=rows, max_size=rows)), type_)
            for type_, value in columns
        ]
        start = draw(st.integers(0, rows - 1))
        batches.append(pa.record_batch(arrays, schema=schema).slice(start))
    return batches


@given(
    record_batches(),
    st.integers(1, 2**64 - 1),
    st.none() | st.integers(1, 2**64 - 1),
    st.dictionaries(texts, texts, max_size=3),
)
@settings(max_examples=150)
def test_any_batches_survive_a_round_trip(
    batches: list[pa.RecordBatch], epoch: int, generation: int | None, tags: dict[str, str]
) -> None:
    data = bytes(encode_entry(entry_schema(batches[0].schema, epoch, generation), batches, tags))
    entry = decoded(data)
    assert (entry.writer_epoch, entry.generation, entry.sentinel) == (epoch, generation, False)
    assert (entry.shard_id, entry.position, entry.num_bytes) == (SHARD, POSITION, len(data))
    assert entry.tags == tags
    assert entry.num_rows == sum(batch.num_rows for batch in batches)
    assert len(entry.batches) == len(batches)
    for read, written in zip(entry.batches, batches, strict=True):
        assert read.schema.equals(written.schema, check_metadata=True)
        assert read.equals(written)
    header = decode_header(data, SHARD, POSITION)
    assert (header.writer_epoch, header.generation, header.sentinel) == (epoch, generation, False)


@given(st.integers(1, 2**64 - 1), st.dictionaries(texts, texts, max_size=4))
def test_any_sentinel_survives_a_round_trip(epoch: int, tags: dict[str, str]) -> None:
    data = bytes(encode_sentinel(epoch, tags))
    entry = decoded(data)
    assert (entry.writer_epoch, entry.generation, entry.sentinel) == (epoch, None, True)
    assert (entry.batches, entry.num_rows, entry.tags) == ([], 0, tags)
    assert decode_header(data, SHARD, POSITION).sentinel


def test_metadata_of_the_entry_is_not_left_on_the_rows() -> None:
    with_pandas = SMALL.replace_schema_metadata({"pandas": "{}"})
    assert decoded(encoded(with_pandas)).batches[0].schema.metadata is None


def test_only_what_lance_knows_is_in_the_schemas_metadata() -> None:
    with_pandas = SMALL.replace_schema_metadata({"pandas": "{}"})
    with pa.ipc.open_stream(encoded(with_pandas, tags={"a": "b"})) as reader:
        assert reader.schema.metadata == {b"writer_epoch": b"3", b"generation": b"2"}


def test_equal_rows_are_told_apart_by_their_write_id() -> None:
    first, second = encoded(SMALL), encoded(SMALL)
    assert first != second
    assert decoded(first).write_id != decoded(second).write_id
    assert encode_sentinel(1) != encode_sentinel(1)


def test_batches_may_have_dictionaries_of_their_own() -> None:
    # Their messages come between the schema and the first batch, where the checksum is looked for.
    first = pa.record_batch({"d": pa.array(["a", "b"]).dictionary_encode(), "e": pa.array(["x", "y"])})
    second = pa.record_batch({"d": pa.array(["c", "a"]).dictionary_encode(), "e": pa.array(["x", "y"])})
    data = encoded(first, second, tags={"t": "v"})
    entry = decoded(data)
    assert [batch.column("d").to_pylist() for batch in entry.batches] == [["a", "b"], ["c", "a"]]
    assert entry.tags == {"t": "v"}
    refuses(data[:-3] + b"\1" + data[-2:], "checksum mismatch")


def test_the_header_is_read_from_the_first_bytes_alone() -> None:
    wide = pa.record_batch({f"c{number}": pa.array([number]) for number in range(50)})
    data = encoded(wide)
    schema_end = 8 + int.from_bytes(data[4:8], "little")
    assert decode_header(data[:schema_end], SHARD, POSITION).generation == 2
    with pytest.raises(WalCorruptError, match="unreadable schema"):
        decode_header(data[: schema_end - 20], SHARD, POSITION)


# ---------------------------------------------------------------- damage

VICTIMS: dict[str, Callable[[], bytes]] = {
    "entry": lambda: encoded(SMALL),
    "entry with tags and two batches": lambda: encoded(SMALL, SMALL.slice(1), tags={"batch": "7"}),
    "entry with a dictionary": lambda: encoded(
        pa.record_batch({"d": pa.array(["a", "b", "a"]).dictionary_encode()})
    ),
    "sentinel": lambda: bytes(encode_sentinel(5)),
    "sentinel with tags": lambda: bytes(encode_sentinel(5, {"sstables": "0a1b2c3d_gen_4"})),
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_every_single_flipped_bit_is_detected(victim: str) -> None:
    data = bytearray(VICTIMS[victim]())
    decoded(bytes(data))
    unnoticed = []
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            try:
                decoded(bytes(data))
                unnoticed.append((at, bit))
            except WalCorruptError as error:
                assert error.position == POSITION  # noqa: PT017
            data[at] ^= 1 << bit
    assert unnoticed == []


@pytest.mark.parametrize("victim", VICTIMS)
def test_every_cut_is_detected(victim: str) -> None:
    data = VICTIMS[victim]()
    for length in range(len(data)):
        refuses(data[:length])


@pytest.mark.parametrize("victim", VICTIMS)
def test_every_single_missing_byte_is_detected(victim: str) -> None:
    data = VICTIMS[victim]()
    for at in range(len(data)):
        refuses(data[:at] + data[at + 1 :])


@pytest.mark.parametrize("victim", VICTIMS)
def test_bytes_after_the_end_are_detected(victim: str) -> None:
    refuses(VICTIMS[victim]() + b"\0")


@given(record_batches(), st.data())
@settings(max_examples=100)
def test_any_changed_byte_of_any_entry_is_detected(
    batches: list[pa.RecordBatch], data: st.DataObject
) -> None:
    entry = bytearray(encoded(*batches))
    at = data.draw(st.integers(0, len(entry) - 1))
    entry[at] = data.draw(st.integers(0, 255).filter(lambda value: value != entry[at]))
    refuses(bytes(entry))


@given(record_batches(), st.data())
@settings(max_examples=50)
def test_any_cut_of_any_entry_is_found(batches: list[pa.RecordBatch], data: st.DataObject) -> None:
    entry = encoded(*batches)
    refuses(entry[: data.draw(st.integers(0, len(entry) - 1))])


@pytest.mark.parametrize("data", [b"", b"\0", b"not an arrow stream", END_OF_STREAM, b"ARROW1\0\0" * 9])
def test_what_is_no_entry_is_refused(data: bytes) -> None:
    refuses(data)


# ---------------------------------------------------------------- entries of others


def test_an_entry_without_a_checksum_is_read_as_it_is() -> None:
    entry = decoded(as_lance_writes(SMALL, {"writer_epoch": "4", "generation": "9"}))
    assert (entry.writer_epoch, entry.generation, entry.write_id, entry.tags) == (4, 9, None, {})
    assert entry.batches == [SMALL]


def test_foreign_metadata_on_a_batch_is_left_alone() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SMALL.schema.with_metadata({"writer_epoch": "4"})) as writer:
        writer.write_batch(SMALL, custom_metadata={"somebody": "else"})
        writer.write_batch(SMALL, custom_metadata={"somebody": "else"})
    assert decoded(sink.getvalue().to_pybytes()).num_rows == 4


def test_the_generation_may_be_unsaid() -> None:
    assert decoded(as_lance_writes(SMALL, {"writer_epoch": "4"})).generation is None


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({}, "no writer_epoch"),
        ({"writer_epoch": ""}, "not a decimal"),
        ({"writer_epoch": "-1"}, "not a decimal"),
        ({"writer_epoch": "1.0"}, "not a decimal"),
        ({"writer_epoch": "٣"}, "not a decimal"),
        ({"writer_epoch": str(2**64)}, "not a decimal"),
        ({"writer_epoch": "1" * 5000}, "not a decimal"),
        ({"writer_epoch": "1", "generation": "two"}, "generation is b'two'"),
    ],
)
def test_an_epoch_or_generation_that_is_no_number_is_refused(
    metadata: dict[str, str], complaint: str
) -> None:
    data = as_lance_writes(SMALL, metadata)
    refuses(data, complaint)
    with pytest.raises(WalCorruptError, match=complaint):
        decode_header(data, SHARD, POSITION)


def test_an_entry_without_rows_that_is_no_sentinel_is_refused() -> None:
    refuses(as_lance_writes(SMALL, {"writer_epoch": "1"}, batches=0), "no record batch")


def test_an_entry_without_a_checksum_that_lost_its_last_batch_is_refused() -> None:
    whole = as_lance_writes(SMALL, {"writer_epoch": "1"}, batches=2)
    half = as_lance_writes(SMALL, {"writer_epoch": "1"}, batches=1).removesuffix(END_OF_STREAM)
    assert whole.startswith(half)
    refuses(half, "end-of-stream")


def test_offsets_that_lead_astray_are_refused_before_they_crash_a_reader() -> None:
    names = pa.array(["aa", "bb", "cc"])
    data = as_lance_writes(pa.record_batch({"name": names}), {"writer_epoch": "1"})
    offsets = names.buffers()[1].to_pybytes()[:16]
    assert data.count(offsets) == 1
    damaged = data.replace(offsets, offsets[:4] + (2**31 - 1).to_bytes(4, "little") + offsets[8:])
    refuses(damaged)


def test_no_single_flipped_bit_of_a_foreign_entry_crashes_a_reader() -> None:
    data = bytearray(as_lance_writes(SMALL, {"writer_epoch": "1", "generation": "1"}))
    noticed = 0
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            try:
                for batch in decoded(bytes(data)).batches:
                    batch.to_pylist()
            except WalCorruptError:
                noticed += 1
            data[at] ^= 1 << bit
    assert noticed > len(data)


# ---------------------------------------------------------------- refusals of the encoder


def test_an_entry_of_no_batches_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least one record batch"):
        encode_entry(entry_schema(SMALL.schema, 1, 1), [])


@pytest.mark.parametrize("generation", [0, -1])
def test_a_generation_below_one_is_refused(generation: int) -> None:
    with pytest.raises(InvalidInputError, match="count from 1"):
        entry_schema(SMALL.schema, 1, generation)


@pytest.mark.parametrize("tags", [{"lancewal:crc32c=": ""}, {"a": "xlancewal:crc32c=00000000"}])
def test_a_tag_that_looks_like_the_checksum_is_refused(tags: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError, match="reserved"):
        encoded(SMALL, tags=tags)
    with pytest.raises(InvalidInputError, match="reserved"):
        encode_sentinel(1, tags)


@pytest.mark.parametrize("version", [None, 1, (1 << 64) - 1])
def test_an_entry_says_for_which_version_of_the_table_it_was_written(version: int | None) -> None:
    data = bytes(encode_entry(entry_schema(SMALL.schema, 1, 1), [SMALL], {"a": "b"}, version))
    entry = decode_entry(data, SHARD, 1)
    assert (entry.base_version, entry.tags) == (version, {"a": "b"})
