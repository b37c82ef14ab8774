"""Names and paths, against the layout that Lance uses (its own files: see the interoperation tests)."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancewal.errors import InvalidInputError
from lancewal.storage import ObjectInfo, layout, numbered

SHARD = UUID("0a1b2c3d-0000-4000-8000-00000000000f")
NUMBERS = st.integers(0, 2**64 - 1)


def test_numbers_are_written_as_64_reversed_bits() -> None:
    assert layout.reversed_bits(5) == "101" + "0" * 61
    assert layout.reversed_bits(2**63) == "0" * 63 + "1"


@given(NUMBERS)
def test_reversed_bits_survive_a_round_trip(number: int) -> None:
    assert layout.parse_reversed_bits(layout.reversed_bits(number)) == number


@pytest.mark.parametrize("number", [-1, 2**64])
def test_a_number_beyond_64_bits_is_refused(number: int) -> None:
    with pytest.raises(InvalidInputError, match=str(number)):
        layout.reversed_bits(number)


@given(NUMBERS)
def test_file_names_lead_back_to_their_numbers(number: int) -> None:
    entry = layout.wal_entry(SHARD, number)
    manifest = layout.manifest_file(SHARD, number)
    assert entry.startswith(f"_mem_wal/{SHARD}/wal/")
    assert manifest.startswith(f"_mem_wal/{SHARD}/manifest/")
    assert layout.parse_wal_name(entry.rsplit("/", 1)[-1]) == number
    assert layout.parse_manifest_name(manifest.rsplit("/", 1)[-1]) == number


@pytest.mark.parametrize(
    "name",
    [
        "",
        "0" * 64,
        "0" * 64 + ".binpb",
        "0" * 63 + ".arrow",
        "2" + "0" * 63 + ".arrow",
        "0" * 64 + ".arrow.tmp.1f",
        "0" * 64 + ".arrow#1",
        "." + "0" * 64 + ".arrow",
    ],
)
def test_foreign_and_staging_names_are_no_wal_entries(name: str) -> None:
    assert layout.parse_wal_name(name) is None


@pytest.mark.parametrize("name", ["version_hint.json", "0" * 64 + ".arrow", "1" * 65 + ".binpb", ".binpb"])
def test_foreign_names_are_no_manifests(name: str) -> None:
    assert layout.parse_manifest_name(name) is None


def test_shard_directories_are_lower_case_uuids() -> None:
    assert layout.parse_shard_dir(layout.shard_dir(SHARD).rsplit("/", 1)[-1]) == SHARD
    for name in (str(SHARD).upper(), SHARD.hex, f"{{{SHARD}}}", "_lancewal", ""):
        assert layout.parse_shard_dir(name) is None


def test_a_shard_id_may_be_a_uuid_or_its_text() -> None:
    assert layout.parse_shard_id(SHARD) is SHARD
    assert layout.parse_shard_id(str(SHARD).upper()) == SHARD


@pytest.mark.parametrize("value", ["", "shard-1", "0a1b2c3d", None, 7, b"0a1b2c3d", "_lancewal"])
def test_what_is_no_uuid_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidInputError, match="is not a UUID") as refusal:
        layout.parse_shard_id(value)  # type: ignore[arg-type]
    assert repr(value) in str(refusal.value)


def test_every_flush_attempt_gets_a_directory_of_its_own() -> None:
    names = {layout.fresh_sstable_name(12) for _ in range(100)}
    assert len(names) == 100
    assert {layout.parse_sstable_name(name) for name in names} == {12}


@pytest.mark.parametrize(
    "name", ["0a1b2c3d_gen_0", "0a1b2c3d_gen_", "0a1b2c3_gen_1", "0A1B2C3D_gen_1", "wal"]
)
def test_other_directories_are_no_sstables(name: str) -> None:
    assert layout.parse_sstable_name(name) is None


def test_paths_below_a_table() -> None:
    assert layout.version_hint(SHARD) == f"_mem_wal/{SHARD}/manifest/version_hint.json"
    assert layout.sstable_dir(SHARD, "0a1b2c3d_gen_1") == f"_mem_wal/{SHARD}/0a1b2c3d_gen_1"
    assert layout.child_uri("s3://bucket/table/", "a/b") == "s3://bucket/table/a/b"


def test_objects_by_number_are_those_of_one_directory() -> None:
    now = datetime.now(UTC)
    names = ["a/10.x", "a/2.x", "a/x.x", "a/b/3.x", "b/4.x", "a"]
    infos = [ObjectInfo(name, 1, now) for name in names]
    found = numbered(infos, "a", lambda name: int(name[:-2]) if name[:-2].isdigit() else None)
    assert [(number, info.path) for number, info in found.items()] == [(2, "a/2.x"), (10, "a/10.x")]
