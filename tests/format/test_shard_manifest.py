"""Shard manifests: our bytes and Lance's are the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import lance
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal.errors import CorruptManifestError, InvalidInputError
from lancewal.format.protos import ShardManifestMessage, unknown_fields
from lancewal.format.shard_manifest import (
    ShardFieldEntry,
    ShardManifest,
    ShardStatus,
    SsTableEntry,
    decode_manifest,
    encode_manifest,
)
from lancewal.storage import layout

SHARD = UUID("3f2b8a52-6a7c-4d0e-9c59-0b7b5b7a1d11")
WRITE_ID = bytes(range(16))

u64 = st.integers(0, 2**64 - 1)
u64_from_1 = st.integers(1, 2**64 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.text("abcdef0123456789_", min_size=1, max_size=20)
sstables = st.builds(
    SsTableEntry,
    u64_from_1,
    names,
    st.none() | u64,
    physical_rows=st.none() | u64,
    primary_key_bytes=st.none() | u64,
    notes=text,
)
manifests = st.builds(
    ShardManifest,
    version=u64_from_1,
    writer_epoch=u64,
    shard_id=st.uuids(),
    replay_after_wal_entry_position=u64,
    wal_entry_position_last_seen=u64,
    current_generation=u64_from_1,
    sstables=st.lists(sstables, max_size=4).map(tuple),
    shard_spec_id=st.integers(0, 2**32 - 1),
    shard_field_entries=st.lists(st.builds(ShardFieldEntry, text, st.binary(max_size=9)), max_size=3).map(
        tuple
    ),
    status=st.sampled_from(ShardStatus),
)


def a_manifest(**changes: object) -> ShardManifest:
    start = ShardManifest(
        version=3,
        writer_epoch=2,
        shard_id=SHARD,
        replay_after_wal_entry_position=4,
        wal_entry_position_last_seen=6,
        current_generation=2,
        sstables=(SsTableEntry(1, "0a1b2c3d_gen_1", 131, 3, 24),),
        shard_spec_id=1,
        shard_field_entries=(ShardFieldEntry("bucket", b"\x02\0\0\0"),),
    )
    return replace(start, **changes)  # type: ignore[arg-type]


def test_a_manifest_without_sstables_that_it_does_not_list_is_the_same_object() -> None:
    """A commit that changes nothing is told by that."""
    manifest = a_manifest()
    (listed,) = manifest.sstables
    later = replace(listed, generation=2)
    assert manifest.without([]) is manifest
    assert manifest.without([later, replace(listed, path="other_gen_1")]) is manifest
    two = replace(manifest, sstables=(listed, later))
    assert two.without([replace(listed, physical_rows=9)]) == replace(manifest, sstables=(later,))


@given(manifests, st.none() | st.binary(min_size=16, max_size=16))
def test_any_manifest_survives_a_round_trip(manifest: ShardManifest, write_id: bytes | None) -> None:
    data = encode_manifest(manifest, write_id)
    assert decode_manifest(memoryview(data), shard_id=manifest.shard_id, version=manifest.version) == manifest
    assert ShardManifestMessage.FromString(data).write_id == (write_id or b"")


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_corrupt_manifest_error(data: bytes) -> None:
    try:
        decode_manifest(data)
    except CorruptManifestError:
        return


@given(manifests, st.data())
def test_a_cut_or_altered_manifest_raises_only_corrupt_manifest_error(
    manifest: ShardManifest, data: st.DataObject
) -> None:
    whole = encode_manifest(manifest, WRITE_ID)
    at = data.draw(st.integers(0, len(whole) - 1))
    altered = bytearray(whole)
    altered[at] ^= data.draw(st.integers(1, 255))
    for damaged in (whole[:at], bytes(altered)):
        try:
            decode_manifest(damaged, shard_id=manifest.shard_id, version=manifest.version)
        except CorruptManifestError:
            continue


def test_a_manifest_cut_inside_a_field_is_refused() -> None:
    data = encode_manifest(a_manifest())
    with pytest.raises(CorruptManifestError, match=f"manifest version 3 of shard {SHARD} is not"):
        decode_manifest(data[:-1], shard_id=SHARD, version=3)


def test_a_manifest_of_another_shard_is_refused() -> None:
    other = uuid4()
    with pytest.raises(CorruptManifestError, match=f"of shard {other} .*belongs to shard {SHARD}"):
        decode_manifest(encode_manifest(a_manifest()), shard_id=other, version=3)


def test_a_manifest_of_another_version_is_refused() -> None:
    with pytest.raises(CorruptManifestError, match=r"manifest version 4 .* its version is 3"):
        decode_manifest(encode_manifest(a_manifest()), shard_id=SHARD, version=4)


@pytest.mark.parametrize("field", ["shard_id", "version", "current_generation"])
def test_a_manifest_without_a_field_that_must_be_there_is_refused(field: str) -> None:
    message = ShardManifestMessage.FromString(encode_manifest(a_manifest()))
    message.ClearField(field)
    with pytest.raises(CorruptManifestError, match=f"{field.replace('_', ' ')} is missing"):
        decode_manifest(message.SerializeToString())


def test_a_shard_id_of_the_wrong_length_is_refused() -> None:
    message = ShardManifestMessage.FromString(encode_manifest(a_manifest()))
    message.shard_id.uuid = b"short"
    with pytest.raises(CorruptManifestError, match="has 5 bytes"):
        decode_manifest(message.SerializeToString())


@pytest.mark.parametrize(
    "path", ["", "/etc", "../other/1_gen_1", "a/../../b", "..", ".", "a/b", "a\\..\\b", "a\nb"]
)
def test_an_sstable_path_that_leads_out_of_the_shard_is_refused(path: str) -> None:
    with pytest.raises(InvalidInputError, match="path"):
        encode_manifest(a_manifest(sstables=(SsTableEntry(1, path),)))
    message = ShardManifestMessage.FromString(encode_manifest(a_manifest()))
    message.sstables[0].path = path
    with pytest.raises(CorruptManifestError, match="path"):
        decode_manifest(message.SerializeToString())


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 0},
        {"current_generation": 0},
        {"writer_epoch": -1},
        {"replay_after_wal_entry_position": 2**64},
        {"shard_spec_id": 2**32},
        {"sstables": (SsTableEntry(0, "a_gen_0"),)},
        {"sstables": (SsTableEntry(1, "\ud800"),)},
        {"shard_field_entries": (ShardFieldEntry(3, b""),)},  # type: ignore[arg-type]
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_manifest_that_cannot_be_is_refused_before_it_is_written(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError, match=str(SHARD)):
        encode_manifest(a_manifest(**changes))


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_write_id_of_the_wrong_length_is_refused(size: int) -> None:
    with pytest.raises(InvalidInputError, match=str(size)):
        encode_manifest(a_manifest(), b"x" * size)


def test_accounting_that_was_not_given_stays_unknown_and_is_not_zero() -> None:
    unknown, zero = SsTableEntry(1, "a"), SsTableEntry(2, "b", 0, 0, 0)
    decoded = decode_manifest(encode_manifest(a_manifest(current_generation=3, sstables=(unknown, zero))))
    assert decoded.sstables == (unknown, zero)


def test_a_later_lance_s_status_is_kept_until_ours_replaces_it() -> None:
    message = ShardManifestMessage.FromString(encode_manifest(a_manifest()))
    message.status = 7
    read = decode_manifest(message.SerializeToString())
    assert read.status is ShardStatus.ACTIVE
    assert ShardManifestMessage.FromString(encode_manifest(read)).status == 7
    sealed = decode_manifest(encode_manifest(replace(read, status=ShardStatus.SEALED)))
    assert sealed.status is ShardStatus.SEALED
    # A seal of ours is taken back by ours alone: what it replaced is gone.
    assert ShardManifestMessage.FromString(encode_manifest(sealed)).status == ShardStatus.SEALED


def _varint(number: int) -> bytes:
    head = bytes([number & 0x7F])
    return head if number < 0x80 else bytes([head[0] | 0x80]) + _varint(number >> 7)


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


# None that this version knows, on any level.
_later_numbers = st.integers(16, 999) | st.integers(1002, 2**29 - 1).filter(lambda n: not 19000 <= n < 20000)
later_fields = st.lists(st.builds(_field, _later_numbers, u64 | st.binary(max_size=40)), max_size=4).map(
    b"".join
)


@given(manifests, later_fields, st.lists(later_fields, min_size=8, max_size=8), st.none() | st.just(WRITE_ID))
def test_fields_of_a_later_lance_were_dropped_when_a_manifest_was_rewritten(
    manifest: ShardManifest, later: bytes, nested: list[bytes], write_id: bytes | None
) -> None:
    """A newer Lance reserves row ids there: without them, two rows would get the same."""
    message = ShardManifestMessage.FromString(encode_manifest(manifest, WRITE_ID))
    for entry, unknown in zip([*message.sstables, *message.shard_field_entries], nested, strict=False):
        entry.MergeFromString(unknown)
    theirs = message.SerializeToString() + later

    read = decode_manifest(theirs)
    changed = replace(read, version=read.version % 2**63 + 1, writer_epoch=7)
    rewritten = encode_manifest(changed, write_id)

    assert read.unknown == later
    assert decode_manifest(rewritten) == changed
    assert rewritten.endswith(later)
    parsed = ShardManifestMessage.FromString(rewritten)
    for entry, unknown in zip([*parsed.sstables, *parsed.shard_field_entries], nested, strict=False):
        assert entry.SerializeToString().endswith(unknown)
        assert unknown_fields(entry) == unknown
    # What is ours is there once, however often it is rewritten.
    assert parsed.write_id == (write_id or b"")
    again = encode_manifest(decode_manifest(rewritten), write_id)
    assert again == rewritten


@given(manifests, st.data())
@settings(max_examples=25)
def test_a_flipped_bit_made_another_table_of_a_manifest(manifest: ShardManifest, data: st.DataObject) -> None:
    whole = encode_manifest(manifest, WRITE_ID)
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptManifestError):
            decode_manifest(bytes(damaged))
    for end in range(len(whole)):
        with pytest.raises(CorruptManifestError):
            decode_manifest(whole[:end])
    with pytest.raises(CorruptManifestError):
        decode_manifest(whole + data.draw(st.binary(min_size=1, max_size=20)))


def test_manifests_of_earlier_versions_of_lancewal_are_read() -> None:
    message = ShardManifestMessage.FromString(encode_manifest(a_manifest()))
    message.write_id = WRITE_ID
    data = message.SerializeToString()
    assert decode_manifest(data) == a_manifest()


def test_a_checksum_that_another_writer_carried_along_is_not_the_files() -> None:
    ours = ShardManifestMessage.FromString(encode_manifest(a_manifest(), WRITE_ID))
    ours.version = 4
    carried = ours.SerializeToString(deterministic=True)
    assert decode_manifest(carried) == a_manifest(version=4)


def test_field_values_do_not_depend_on_the_order_of_the_entries() -> None:
    a, b = ShardFieldEntry("a", b"1"), ShardFieldEntry("b", b"2")
    assert (
        a_manifest(shard_field_entries=(a, b)).field_values
        == a_manifest(shard_field_entries=(b, a)).field_values
    )
    assert a_manifest(shard_field_entries=(a, b)).field_values == {"a": b"1", "b": b"2"}


class Peer:
    """A table that pylance itself made, with its own writers."""

    def __init__(self, root: Path) -> None:
        key = {"lance-schema:unenforced-primary-key": "true"}
        self.schema = pa.schema([pa.field("id", pa.int64(), False, metadata=key), pa.field("t", pa.string())])
        self.root = root
        self.dataset = lance.write_dataset(self.rows(range(10)), str(root))
        self.dataset.initialize_mem_wal(bucket_column="id", num_buckets=4)

    def rows(self, ids: range) -> pa.Table:
        return pa.table([pa.array(ids, pa.int64()), pa.array(["x"] * len(ids))], schema=self.schema)

    def write(self, shard: UUID, ids: range) -> None:
        with self.dataset.mem_wal_writer(str(shard)) as writer:
            writer.put(self.rows(ids))

    def file(self, shard: UUID, version: int) -> Path:
        return self.root / layout.manifest_file(shard, version)

    def put(self, manifest: ShardManifest, write_id: bytes | None = None) -> None:
        path = self.file(manifest.shard_id, manifest.version)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_manifest(manifest, write_id))

    def get(self, shard: UUID, version: int) -> ShardManifest:
        return decode_manifest(self.file(shard, version).read_bytes(), shard_id=shard, version=version)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    return Peer(tmp_path_factory.mktemp("peer") / "table")


def test_we_read_what_pylance_wrote_and_write_the_same_bytes(peer: Peer) -> None:
    shard = uuid4()
    peer.write(shard, range(100, 103))
    claimed, flushed = peer.get(shard, 1), peer.get(shard, 2)
    assert claimed == ShardManifest(version=1, writer_epoch=1, shard_id=shard, shard_spec_id=1)
    (entry,) = flushed.sstables
    assert layout.parse_sstable_name(entry.path) == 1
    assert (entry.generation, entry.physical_rows, entry.primary_key_bytes) == (1, 3, 24)
    assert entry.in_memory_bytes is not None
    assert entry.in_memory_bytes > 24
    assert flushed == replace(
        claimed,
        version=2,
        replay_after_wal_entry_position=1,
        wal_entry_position_last_seen=1,
        current_generation=2,
        sstables=(entry,),
    )
    for version in (1, 2):
        data = peer.file(shard, version).read_bytes()
        assert encode_manifest(decode_manifest(data)) == data
        assert not ShardManifestMessage.FromString(data).write_id


def test_pylance_opens_what_we_wrote_and_keeps_every_field(peer: Peer) -> None:
    shard = uuid4()
    ours = ShardManifest(
        version=1,
        writer_epoch=4,
        shard_id=shard,
        replay_after_wal_entry_position=9,
        wal_entry_position_last_seen=9,
        current_generation=3,
        sstables=(SsTableEntry(1, "0a1b2c3d_gen_1", 0, 5, 40), SsTableEntry(2, "1a1b2c3d_gen_2")),
        shard_spec_id=1,
        shard_field_entries=(
            ShardFieldEntry("bucket", b"\x02\0\0\0"),
            ShardFieldEntry("région", "é".encode()),
        ),
    )
    peer.put(ours, WRITE_ID)
    with peer.dataset.mem_wal_writer(str(shard)):
        theirs = peer.get(shard, 2)
        assert not ShardManifestMessage.FromString(peer.file(shard, 2).read_bytes()).write_id
    assert theirs.field_values == ours.field_values
    assert replace(theirs, shard_field_entries=ours.shard_field_entries) == replace(
        ours, version=2, writer_epoch=5
    )


def test_pylance_refuses_a_shard_that_we_sealed(peer: Peer) -> None:
    shard = uuid4()
    ours = ShardManifest(
        version=1, writer_epoch=1, shard_id=shard, shard_spec_id=1, status=ShardStatus.SEALED
    )
    peer.put(ours, WRITE_ID)
    with pytest.raises(OSError, match="sealed"):
        peer.write(shard, range(3))
    assert not peer.file(shard, 2).exists()
    peer.put(replace(ours, version=2, status=ShardStatus.ACTIVE))
    peer.write(shard, range(3))
    assert peer.get(shard, 3).writer_epoch == 2


def test_pylance_writes_on_top_of_a_shard_that_nobody_has_claimed(peer: Peer) -> None:
    shard = uuid4()
    peer.put(ShardManifest(version=1, writer_epoch=0, shard_id=shard, shard_spec_id=1), WRITE_ID)
    peer.write(shard, range(7, 9))
    last = peer.get(shard, 3)
    assert (last.writer_epoch, last.current_generation, last.sstables[0].physical_rows) == (1, 2, 2)
