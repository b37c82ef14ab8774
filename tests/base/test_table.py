"""BaseTable: what pylance tells of a table, and what only its manifest does."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import lance
import pyarrow as pa
import pytest
from lance.mem_wal import CompactedSsTable

import lancewal
from lancewal.base.table import BaseTable, forget_columns, store_column_history
from lancewal.errors import InvalidInputError, LanceWalError, NotInitializedError, StorageError
from lancewal.sstable.opened import _handles as open_handles
from lancewal.storage import ObjectStore, layout
from tests.faults import FaultyStore
from tests.servers import S3Server
from tests.tables import APPEND_ONLY, new_table, rows

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"}),
        pa.field("name", pa.string()),
    ]
)
ROWS = pa.table({"id": [1, 2], "name": ["a", "b"]}, schema=SCHEMA)


def initialised(where: Path | str, **settings: object) -> lance.LanceDataset:
    dataset = lance.write_dataset(ROWS, str(where), **settings)
    dataset.initialize_mem_wal(bucket_column="id", num_buckets=4, max_memtable_rows=77)
    return dataset


def test_an_initialised_table(tmp_path: Path) -> None:
    dataset = initialised(tmp_path / "t")
    base = BaseTable.open(str(tmp_path / "t"))
    assert (base.uri, base.version) == (str(tmp_path / "t"), dataset.version)
    assert base.schema.primary_key == ("id",)
    assert dict(base.schema.field_ids) == {"id": 0, "name": 1}
    assert base.storage_version == dataset.data_storage_version
    assert base.details.writer_config_defaults["max_memtable_rows"] == "77"
    assert len(base.details.sharding_specs) == 1
    assert base.dataset.count_rows() == 2


def test_a_dataset_is_opened_at_its_own_version(tmp_path: Path) -> None:
    old = initialised(tmp_path / "t")
    lance.write_dataset(ROWS, str(tmp_path / "t"), mode="append")
    assert BaseTable.open(old).dataset.count_rows() == 2
    assert BaseTable.open(old.uri).dataset.count_rows() == 4
    assert BaseTable.open(old.uri, version=old.version).version == old.version


def test_a_table_on_s3_is_opened_with_pylances_options(s3: S3Server) -> None:
    uri = s3.uri(f"{uuid4().hex}/t")
    dataset = initialised(uri, storage_options=s3.storage_options)
    for base in (BaseTable.open(uri, s3.storage_options), BaseTable.open(dataset)):
        assert base.storage_options == s3.storage_options
        assert base.details.writer_config_defaults["max_memtable_rows"] == "77"


def test_manifests_under_their_old_names_are_found(tmp_path: Path) -> None:
    initialised(tmp_path / "t", enable_v2_manifest_paths=False)
    assert (tmp_path / "t" / "_versions" / "2.manifest").exists()
    assert BaseTable.open(str(tmp_path / "t")).version == 2


def test_the_compacted_generation_is_told_per_shard(tmp_path: Path) -> None:
    dataset = initialised(tmp_path / "t")
    compacted, other = uuid4(), uuid4()
    marker = CompactedSsTable(str(compacted), 3)
    merge = dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    merge.mark_sstables_as_compacted([marker]).execute(ROWS)
    base = BaseTable.open(str(tmp_path / "t"))
    assert base.compacted_generation(compacted) == 3
    assert base.compacted_generation(other) == 0


def test_a_table_without_the_index_is_not_initialised(tmp_path: Path) -> None:
    lance.write_dataset(ROWS, str(tmp_path / "t"))
    with pytest.raises(NotInitializedError, match=r"lancewal\.initialize"):
        BaseTable.open(str(tmp_path / "t"))


@pytest.mark.parametrize("made", [False, True])
def test_a_place_without_a_table_is_refused(tmp_path: Path, made: bool) -> None:
    if made:
        (tmp_path / "t").mkdir()
        (tmp_path / "t" / "notes.txt").write_text("no table")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidInputError, match=f"no Lance table at {tmp_path / 't'}"):
        BaseTable.open(str(tmp_path / "t"))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_version_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    initialised(tmp_path / "t")
    with pytest.raises(InvalidInputError, match="no version 99"):
        BaseTable.open(str(tmp_path / "t"), version=99)


def test_a_manifest_that_was_cleaned_up_meanwhile_is_a_storage_error(tmp_path: Path) -> None:
    initialised(tmp_path / "t")
    elsewhere = ObjectStore.from_uri(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"manifest of version 2 .* open again"):
        BaseTable.open(str(tmp_path / "t"), store=elsewhere)


def test_a_table_opened_without_a_store_took_a_replaced_column_for_the_old_one(tmp_path: Path) -> None:
    new_table(tmp_path / "t")
    lance.dataset(str(tmp_path / "t")).add_columns(pa.field("draft", pa.string()))
    before = BaseTable.open(str(tmp_path / "t"))
    lance.dataset(before.uri).drop_columns(["draft"])
    lance.dataset(before.uri).add_columns(pa.field("draft", pa.string()))
    now = BaseTable.open(before.uri)
    gc.collect()
    assert now.schema.field_ids == before.schema.field_ids
    assert now.schema.replaced_since(before.version) == {before.schema.field_ids["draft"]}
    assert before.schema.replaced_since(now.version) == {before.schema.field_ids["draft"]}


def test_a_panic_of_lance_over_a_damaged_manifest_was_no_error_of_ours(tmp_path: Path) -> None:
    """Not even an ``Exception``: it flew past every handler of a program that looked after its errors."""
    uri = str(tmp_path / "table")
    new_table(uri, APPEND_ONLY, pa.Table.from_batches([rows(0, 3, schema=APPEND_ONLY)]))
    opened = lancewal.open(uri)
    with opened.writer() as writer:
        writer.put(rows(3, 3, schema=APPEND_ONLY))
    opened.flush()
    manifest = min((tmp_path / "table" / "_versions").glob("*.manifest"))
    (sstable,) = (tmp_path / "table" / "_mem_wal").glob("*/*_gen_1/_versions/*.manifest")
    operations = (
        lambda: lancewal.open(uri),
        lambda: opened.scan().to_table(),
        lambda: opened.scan().explain(),
        opened.count_rows,
        opened.status,
        opened.verify,
        opened.plan_compaction,
        lambda: opened.gc(dry_run=True),
    )

    def try_all() -> None:
        for operation in operations:
            open_handles.clear()
            with suppress(LanceWalError):
                operation()

    panics = 0
    for file, step in ((manifest, 2), (sstable, 8)):
        whole = file.read_bytes()
        for at in range(0, len(whole), step):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            file.write_bytes(damaged)
            try:
                lance.dataset(str(file.parent.parent)).lance_schema.fields()
            except Exception:
                continue
            except BaseException:
                panics += 1
            try_all()
        for length in range(0, len(whole), 100):
            file.write_bytes(whole[:length])
            try_all()
        file.write_bytes(whole)
    assert panics, "none of these flips makes Lance panic any more: find others"


def test_a_history_of_columns_whose_reply_was_lost_failed_the_compaction_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a help for readers only, and what it follows is committed."""
    base = new_table(tmp_path / "t")
    store = FaultyStore(ObjectStore.from_uri(base.uri))
    store.faults.fail("put", after=True, where=layout.COLUMN_HISTORY)
    store_column_history(store, base.version)
    assert "was not stored" in caplog.text


@pytest.mark.parametrize("content", [b"", bytes(500)], ids=["empty", "zeros"])
def test_a_damaged_manifest_of_an_old_version_made_the_table_unreadable_and_unwritable(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A power cut may leave one: Lance does not sync its files, and reads the newest version only."""
    table = lancewal.create(str(tmp_path / "t"), [{"id": 1, "name": "a"}], key="id", unsharded=True)
    with table.writer() as writer:
        writer.put([{"id": 2, "name": "b"}, {"id": 3, "name": "b"}])
    table.compact()
    with table.writer() as writer:
        writer.put({"id": 9, "name": "c"})
    lance.dataset(table.uri).delete("id = 1")
    _newest, *versions = sorted((tmp_path / "t" / "_versions").glob("*.manifest"))
    for old in versions:
        old.write_bytes(content)
    forget_columns(ObjectStore.from_uri(str(tmp_path / "t")))

    again = lancewal.open(str(tmp_path / "t"))
    assert sorted(again.scan().to_table().column("id").to_pylist()) == [2, 3, 9]
    assert again.verify().ok
    with again.writer() as writer:
        writer.put({"id": 10, "name": "d"})
    again.compact()
    assert again.count_rows() == 4
    assert versions[0].name in caplog.text
