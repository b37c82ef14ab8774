"""What we read from a base table's manifest is what pylance knows, and more."""

from __future__ import annotations

import os
import pickle
import struct
from dataclasses import asdict
from pathlib import Path
from uuid import UUID, uuid4

import lance
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lance.dataset import Index, LanceOperation
from pyroaring import BitMap

from lancewal.errors import CorruptManifestError
from lancewal.format.base_manifest import (
    MEM_WAL_INDEX_NAME,
    BaseManifest,
    MemWalDetails,
    newest_manifest_name,
    parse_manifest_version,
    read_base_manifest,
)
from lancewal.format.protos import IndexSectionMessage, MemWalIndexDetailsMessage, TableManifestMessage

SHARD, OTHER_SHARD = UUID(int=11), UUID(int=12)


def rows(first: int, count: int) -> pa.Table:
    key = {"lance-schema:unenforced-primary-key": "true"}
    schema = pa.schema([pa.field("id", pa.int64(), False, metadata=key), pa.field("t", pa.string())])
    return pa.table(
        [pa.array(range(first, first + count), pa.int64()), pa.array(["x"] * count)], schema=schema
    )


def newest_file(table: Path) -> bytes:
    newest = newest_manifest_name(os.listdir(table / "_versions"))
    assert newest is not None
    return (table / "_versions" / newest[0]).read_bytes()


def newest(table: Path) -> BaseManifest:
    return read_base_manifest(newest_file(table))


def details_of(table: Path) -> MemWalDetails:
    details = read_base_manifest(newest_file(table)).mem_wal
    assert details is not None
    return details


def assert_details_match_pylance(table: Path) -> None:
    theirs = lance.dataset(str(table)).mem_wal_index_details()
    ours = asdict(details_of(table))
    del ours["compacted"], ours["index_catchup"]
    ours["maintained_indexes"] = list(ours["maintained_indexes"])
    ours["sharding_specs"] = [
        {**spec, "fields": [{**field, "source_ids": list(field["source_ids"])} for field in spec["fields"]]}
        for spec in ours["sharding_specs"]
    ]
    assert ours == theirs


def mark(table: Path, shard: UUID, generation: int, first: int) -> None:
    merge = (
        lance.dataset(str(table)).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    )
    marker = lance.CompactedSsTable(str(shard), generation)
    merge.mark_sstables_as_compacted([marker]).execute(rows(first, 3))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    lance.write_dataset(rows(0, 30), str(tmp_path / "t"), max_rows_per_file=10)
    return tmp_path / "t"


@pytest.fixture(scope="module")
def a_real_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("real") / "t"
    dataset = lance.write_dataset(rows(0, 30), str(path), max_rows_per_file=10)
    dataset.create_scalar_index("t", "BTREE")
    dataset.initialize_mem_wal(bucket_column="id", num_buckets=4)
    return newest_file(path)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"unsharded": True},
        {"identity_column": "t"},
        {"bucket_column": "id", "num_buckets": 8, "maintained_indexes": ["t_idx"]},
        {"unsharded": True, "maintained_indexes": [], "durable_write": False, "max_memtable_rows": 77},
    ],
    ids=str,
)
def test_details_are_what_pylance_shows(table: Path, arguments: dict[str, object]) -> None:
    dataset = lance.dataset(str(table))
    dataset.create_scalar_index("t", "BTREE")
    dataset.initialize_mem_wal(**arguments)
    assert_details_match_pylance(table)
    assert details_of(table).compacted == {}
    assert details_of(table).index_catchup == {}


def test_a_table_without_the_index_has_no_details(table: Path) -> None:
    assert newest(table) == BaseManifest(1, frozenset({0, 1, 2}), (), None)
    lance.dataset(str(table)).create_scalar_index("t", "BTREE")
    assert read_base_manifest(newest_file(table)).mem_wal is None
    assert [index.name for index in newest(table).indexes] == ["t_idx"]


def test_compaction_markers_are_read_per_shard(table: Path) -> None:
    lance.dataset(str(table)).initialize_mem_wal(unsharded=True)
    mark(table, SHARD, 1, 100)
    assert details_of(table).compacted == {SHARD: 1}
    mark(table, OTHER_SHARD, 4, 200)
    mark(table, SHARD, 2, 300)
    assert details_of(table).compacted == {SHARD: 2, OTHER_SHARD: 4}
    assert_details_match_pylance(table)


def test_an_index_has_no_catch_up_until_it_covers_the_compacted_rows(table: Path) -> None:
    lance.dataset(str(table)).create_scalar_index("t", "BTREE")
    lance.dataset(str(table)).initialize_mem_wal(unsharded=True)
    mark(table, SHARD, 1, 100)
    mark(table, OTHER_SHARD, 4, 200)
    assert details_of(table).index_catchup == {}
    lance.dataset(str(table)).optimize.optimize_indices()
    assert details_of(table).index_catchup == {"t_idx": {SHARD: 1, OTHER_SHARD: 4}}
    mark(table, SHARD, 2, 300)
    assert details_of(table).index_catchup == {"t_idx": {SHARD: 1, OTHER_SHARD: 4}}
    assert details_of(table).compacted == {SHARD: 2, OTHER_SHARD: 4}


def test_version_fragments_and_indexes_are_what_pylance_shows(table: Path) -> None:
    lance.dataset(str(table)).create_scalar_index("t", "BTREE")
    lance.dataset(str(table)).initialize_mem_wal(unsharded=True)
    mark(table, SHARD, 1, 100)
    lance.dataset(str(table)).create_scalar_index("id", "BTREE")
    dataset, manifest = lance.dataset(str(table)), newest(table)
    assert manifest.version == dataset.version
    assert manifest.fragment_ids == {fragment.fragment_id for fragment in dataset.get_fragments()}
    theirs = {index.name: index for index in dataset.describe_indices()}
    assert {index.name for index in manifest.indexes} == set(theirs) - {MEM_WAL_INDEX_NAME}
    for index in manifest.indexes:
        (segment,) = theirs[index.name].segments
        assert str(index.uuid) == segment.uuid
        assert index.dataset_version == segment.dataset_version_at_last_update
        assert index.field_ids == tuple(theirs[index.name].fields)
        assert index.fragments == set(segment.fragment_ids)
        assert index.details_type == theirs[index.name].type_url
    assert manifest.covered_fragments("t_idx") == {0, 1, 2}
    assert manifest.covered_fragments("id_idx") == {0, 1, 2, 3}


FRAGMENT_SETS = {
    "none": set(),
    "few": {0, 1, 2, 9},
    "one_run": set(range(100)),
    "full_array": set(range(0, 4096 * 9, 9)),
    "smallest_bitmap": set(range(0, 4097 * 9, 9)),
    "dense": set(range(0, 60_000, 3)),
    "whole_container": set(range(65_536)),
    "runs_in_three_containers": set(range(60_000, 140_000)),
    "runs_in_four_containers": set(range(60_000, 200_000)),
    "far_apart": {0, 70_000, 2**31, 2**32 - 1},
    "runs_and_bitmap_and_array": set(range(70_000, 90_000)) | set(range(200_000, 330_000, 3)) | {5, 500_000},
    "all_but_the_odd_one": set(range(40_000)) - {77, 39_000},
}


def test_every_shape_of_fragment_bitmap_is_read_as_pylance_wrote_it(table: Path) -> None:
    indexes = [
        Index(str(uuid4()), name, [1], 1, fragments, 0, index_details=("/lance.table.BTreeIndexDetails", b""))
        for name, fragments in FRAGMENT_SETS.items()
    ]
    lance.LanceDataset.commit(str(table), LanceOperation.CreateIndex(indexes, []), read_version=1)
    manifest = newest(table)
    assert {index.name: index.fragments or set() for index in manifest.indexes} == FRAGMENT_SETS
    assert manifest.covered_fragments("few") == {0, 1, 2}
    assert manifest.covered_fragments("missing") == frozenset()


@pytest.mark.parametrize("members", FRAGMENT_SETS.values(), ids=FRAGMENT_SETS)
def test_a_fragment_bitmap_that_is_cut_is_refused(members: set[int]) -> None:
    bitmap = BitMap(members)
    bitmap.run_optimize()
    whole = bitmap.serialize()
    assert read_base_manifest(a_file_with_bitmap(whole)).indexes[0].fragments == members
    for kept in {0, 1, 4, 7, len(whole) // 2, len(whole) - 1} - {len(whole)}:
        with pytest.raises(CorruptManifestError, match="no Roaring bitmap"):
            read_base_manifest(a_file_with_bitmap(whole[:kept]))


def test_a_run_that_is_longer_than_its_header_says_is_refused() -> None:
    bitmap = BitMap(range(100))
    bitmap.run_optimize()
    altered = bytearray(bitmap.serialize())
    altered[-1] = 7  # the high byte of the run's length
    assert len(BitMap.deserialize(bytes(altered))) > 100
    with pytest.raises(CorruptManifestError, match="no Roaring bitmap"):
        read_base_manifest(a_file_with_bitmap(bytes(altered)))


def test_segments_of_one_index_cover_their_union(table: Path) -> None:
    segments = [
        Index(
            str(uuid4()), "t_idx", [1], 1, fragments, 0, index_details=("/lance.table.BTreeIndexDetails", b"")
        )
        for fragments in ({0}, {2, 40})
    ]
    lance.LanceDataset.commit(str(table), LanceOperation.CreateIndex(segments, []), read_version=1)
    assert newest(table).covered_fragments("t_idx") == {0, 2}


def test_columns_that_an_index_only_carries_are_no_key_of_it(table: Path) -> None:
    index = Index(str(uuid4()), "wide", [1, 0], 1, {0}, 0, covering_fields=[0])
    lance.LanceDataset.commit(str(table), LanceOperation.CreateIndex([index], []), read_version=1)
    assert [i.field_ids for i in newest(table).indexes] == [(1,)]


def test_details_can_be_sent_to_another_process(a_real_file: bytes) -> None:
    manifest = read_base_manifest(a_real_file)
    assert manifest.mem_wal is not None
    assert pickle.loads(pickle.dumps(manifest)) == manifest


def length_prefixed(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


def a_file(manifest: bytes, index_section: bytes = b"", filler: bytes = b"") -> bytes:
    body = filler + length_prefixed(index_section)
    return body + length_prefixed(manifest) + struct.pack("<QHH4s", len(body), 0, 2, b"LANC")


def a_file_with_details(details: bytes, details_type: str = "/lance.table.MemWalIndexDetails") -> bytes:
    section = IndexSectionMessage()
    section.indices.add(name=MEM_WAL_INDEX_NAME, index_details={"type_url": details_type, "value": details})
    manifest = TableManifestMessage(version=1, index_section=6)
    return a_file(manifest.SerializeToString(), section.SerializeToString(), filler=b"filler")


def a_file_with_bitmap(bitmap: bytes) -> bytes:
    section = IndexSectionMessage()
    section.indices.add(name="i", uuid={"uuid": bytes(16)}, fragment_bitmap=bitmap)
    manifest = TableManifestMessage(version=1, index_section=0)
    return a_file(manifest.SerializeToString(), section.SerializeToString())


def test_the_index_section_may_lie_anywhere_before_the_manifest() -> None:
    details = MemWalIndexDetailsMessage(num_shards=5)
    assert read_base_manifest(a_file_with_details(details.SerializeToString())).mem_wal == MemWalDetails(
        num_shards=5
    )


def test_details_without_the_later_fields_have_their_old_meaning() -> None:
    details = read_base_manifest(a_file_with_details(b"")).mem_wal
    assert details is not None
    assert details.maintain_all_indexes is False


def test_details_of_another_type_are_refused() -> None:
    with pytest.raises(CorruptManifestError, match="VectorIndexDetails"):
        read_base_manifest(a_file_with_details(b"", "/lance.table.VectorIndexDetails"))


def test_a_marker_without_a_shard_is_refused() -> None:
    details = MemWalIndexDetailsMessage()
    details.compacted_sstables.add(generation=3)
    with pytest.raises(CorruptManifestError, match="compaction marker"):
        read_base_manifest(a_file_with_details(details.SerializeToString()))


def test_an_error_names_the_file_and_what_was_found() -> None:
    with pytest.raises(CorruptManifestError, match=r"manifest 7\.manifest .* 3 bytes"):
        read_base_manifest(b"abc", name="7.manifest")
    with pytest.raises(CorruptManifestError, match="lies beyond"):
        read_base_manifest(struct.pack("<QHH4s", 2**63, 0, 2, b"LANC"))
    with pytest.raises(CorruptManifestError, match="ends in b'LACE'"):
        read_base_manifest(struct.pack("<QHH4s", 0, 0, 2, b"LACE"))


def test_a_section_shorter_than_announced_is_refused() -> None:
    manifest = TableManifestMessage(version=1).SerializeToString()
    footer = struct.pack("<QHH4s", 0, 0, 2, b"LANC")
    assert read_base_manifest(length_prefixed(manifest) + footer).version == 1
    with pytest.raises(CorruptManifestError, match=f"cut off: {len(manifest) + 1} bytes announced"):
        read_base_manifest(struct.pack("<I", len(manifest) + 1) + manifest + footer)


@given(st.data())
def test_a_cut_manifest_file_is_refused(a_real_file: bytes, data: st.DataObject) -> None:
    with pytest.raises(CorruptManifestError):
        read_base_manifest(a_real_file[: data.draw(st.integers(0, len(a_real_file) - 1))])


@given(st.data())
def test_an_altered_manifest_file_raises_only_corrupt_manifest_error(
    a_real_file: bytes, data: st.DataObject
) -> None:
    altered = bytearray(a_real_file)
    for at in data.draw(st.lists(st.integers(0, len(altered) - 1), min_size=1, max_size=3)):
        altered[at] = data.draw(st.integers(0, 255))
    try:
        read_base_manifest(bytes(altered))
    except CorruptManifestError:
        return


@given(st.binary(max_size=60), st.binary(max_size=60), st.binary(max_size=60))
def test_random_content_raises_only_corrupt_manifest_error(a: bytes, b: bytes, c: bytes) -> None:
    section = IndexSectionMessage()
    section.indices.add(name="i", uuid={"uuid": bytes(16)}, fragment_bitmap=b":0\0\0" + a)
    section.indices.add(name="j", uuid={"uuid": bytes(16)}, fragment_bitmap=b";0\0\0" + b)
    whole = TableManifestMessage(version=1, index_section=0).SerializeToString()
    for damaged in (
        a,
        a_file(a),
        a_file(whole, b),
        a_file(whole, section.SerializeToString()),
        a_file_with_details(c),
    ):
        try:
            read_base_manifest(damaged)
        except CorruptManifestError:
            continue


@pytest.mark.parametrize("inverted", [True, False])
def test_real_manifest_names_are_understood(tmp_path: Path, inverted: bool) -> None:
    for _ in range(11):
        lance.write_dataset(rows(0, 1), str(tmp_path), mode="append", enable_v2_manifest_paths=inverted)
    names = os.listdir(tmp_path / "_versions")
    versions = sorted(v for v in map(parse_manifest_version, names) if v is not None)
    assert versions == list(range(1, 12))
    found = newest_manifest_name(names)
    assert found is not None
    assert found[1] == lance.dataset(str(tmp_path)).version == 11
    assert read_base_manifest((tmp_path / "_versions" / found[0]).read_bytes()).version == 11


@pytest.mark.parametrize(
    "name",
    [
        "d9223372036854775809.manifest",
        "latest_version_hint.json",
        "4.manifest.tmp",
        "4.manifest-7f0c",
        ".manifest",
        "0.manifest",
        "18446744073709551615.manifest",
        "99999999999999999999.manifest",
        "000000000000000000004.manifest",
        "٤.manifest",
    ],
)
def test_a_name_that_is_no_table_version_is_passed_over(name: str) -> None:
    assert parse_manifest_version(name) is None
    assert newest_manifest_name([name]) is None
    assert newest_manifest_name([name, "3.manifest"]) == ("3.manifest", 3)
