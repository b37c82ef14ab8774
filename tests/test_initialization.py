"""Initialisation: what is written, what is refused, and that a refusal writes nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import lance
import pyarrow as pa
import pytest
from lance.mem_wal import CompactedSsTable

import lancewal
from lancewal.base.table import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.errors import InvalidInputError, NotInitializedError, OutcomeUnknownError, StorageError
from lancewal.shard.discovery import discover_shards
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import ObjectStore, layout
from tests.servers import S3Server
from tests.tables import APPEND_ONLY, KEY, KEYED, rows

WIDE = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("tenant", pa.string(), nullable=False, metadata=KEY),
        pa.field("score", pa.float32()),
        pa.field("vector", pa.list_(pa.float32(), 4)),
        pa.field("nested", pa.struct([("inner", pa.int64())])),
    ]
)


def create(where: Path, schema: pa.Schema = KEYED) -> str:
    lance.write_dataset(schema.empty_table(), str(where))
    return str(where)


def content(where: Path) -> dict[str, bytes]:
    return {str(path.relative_to(where)): path.read_bytes() for path in where.rglob("*") if path.is_file()}


# --- what is written --------------------------------------------------------------------

MODES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"by_hand": True}, {}),
    ({"bucket": ("id", 3)}, {"bucket_column": "id", "num_buckets": 3}),
    ({"identity": "tenant"}, {"identity_column": "tenant"}),
    ({"identity": "id"}, {"identity_column": "id"}),
    ({"unsharded": True}, {"unsharded": True}),
    ({"unsharded": True, "maintained_indexes": []}, {"unsharded": True, "maintained_indexes": []}),
    ({"by_hand": True, "maintained_indexes": ["id_idx"]}, {"maintained_indexes": ["id_idx"]}),
]


@pytest.mark.parametrize(("ours", "theirs"), MODES)
def test_index_is_the_one_that_lance_makes(
    tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    datasets = []
    for name in ("ours", "theirs"):
        dataset = lance.write_dataset(WIDE.empty_table(), str(tmp_path / name))
        dataset.create_scalar_index("id", "BTREE")
        datasets.append(dataset)
    table = lancewal.initialize(datasets[0], **ours)
    datasets[1].initialize_mem_wal(**theirs)
    expected = BaseTable.open(datasets[1]).details
    shown = datasets[1].mem_wal_index_details()
    if "maintained_indexes" not in ours:
        # Where all are maintained, ours also names them: LanceDB goes by names.
        expected = replace(expected, maintained_indexes=("id_idx", "tenant_idx", "vector_idx"))
        shown["maintained_indexes"] = list(expected.maintained_indexes)
    assert table.details == expected
    assert lance.dataset(table.uri).mem_wal_index_details() == shown


def stored_details(where: str) -> bytes:
    """The index details' bytes in the newest manifest, by the type's name before them."""
    newest = min((Path(where) / "_versions").glob("*.manifest"))
    head, _, rest = newest.read_bytes().rpartition(b"MemWalIndexDetails\x12")
    assert head
    return rest[1 : 1 + rest[0]]


@pytest.mark.parametrize(("ours", "theirs"), [mode for mode in MODES if "maintained_indexes" not in mode[0]])
def test_index_details_are_byte_equal_to_those_of_lance(
    tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    lancewal.initialize(create(tmp_path / "ours", WIDE), maintained_indexes=[], **ours)
    lance.dataset(create(tmp_path / "theirs", WIDE)).initialize_mem_wal(maintained_indexes=[], **theirs)
    assert stored_details(str(tmp_path / "ours")) == stored_details(str(tmp_path / "theirs"))


def test_lance_writes_and_compacts_in_a_table_that_we_initialised(tmp_path: Path) -> None:
    table = lancewal.initialize(create(tmp_path / "t"), bucket=("id", 2), writer_defaults={"mine": "kept"})
    shard = str(table.shard_for(1))
    with lance.dataset(table.uri).mem_wal_writer(shard) as writer:
        writer.put(rows(1, 1))
    lance.dataset(table.uri).merge_insert(
        "id"
    ).when_matched_update_all().when_not_matched_insert_all().mark_sstables_as_compacted(
        [CompactedSsTable(shard, 1)]
    ).execute(pa.Table.from_batches([rows(1, 1)]))
    assert {str(each): generation for each, generation in table.details.compacted.items()} == {shard: 1}
    assert table.details.writer_config_defaults == {"mine": "kept"}
    lance.dataset(table.uri).optimize.compact_files()
    assert table.details.num_shards == 2


def test_every_bucket_has_its_manifest(tmp_path: Path) -> None:
    table = lancewal.initialize(create(tmp_path / "t"), bucket=("id", 5))
    shards = table.shards()
    assert sorted(shard.values["bucket"] for shard in shards) == [0, 1, 2, 3, 4]
    assert {(shard.spec_id, shard.epoch, shard.tail_length) for shard in shards} == {(1, 0, 0)}


@pytest.mark.parametrize(
    ("sharding", "count"),
    [({"unsharded": True}, 1), ({"identity": "id"}, 0), ({"by_hand": True}, 0), ({}, 4)],
)
def test_shards_that_exist_from_the_start(tmp_path: Path, sharding: dict[str, Any], count: int) -> None:
    assert len(lancewal.initialize(create(tmp_path / "t"), **sharding).shards()) == count


def test_most_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_fsync(monkeypatch)
    table = lancewal.initialize(create(tmp_path / "t"), bucket=("id", 1024))
    assert len(discover_shards(ObjectStore.from_uri(table.uri))) == 1024


def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    from_uri = ObjectStore.from_uri
    monkeypatch.setattr(
        ObjectStore, "from_uri", lambda *args, **options: from_uri(*args, **{**options, "fsync": False})
    )


def test_table_without_a_key_is_initialised(tmp_path: Path) -> None:
    table = lancewal.initialize(create(tmp_path / "t", APPEND_ONLY), bucket=("name", 2))
    assert table.primary_key == ()


def test_table_on_s3_is_initialised(s3: S3Server) -> None:
    uri, options = s3.uri(f"{uuid4().hex}/table"), dict(s3.storage_options)
    dataset = lance.write_dataset(KEYED.empty_table(), uri, storage_options=options)
    table = lancewal.initialize(dataset, bucket=("id", 4))
    assert len(table.shards()) == 4
    assert len(lancewal.open(uri, options).shards()) == 4


def test_old_handle_initialises_the_newest_version(tmp_path: Path) -> None:
    old = lance.write_dataset(KEYED.empty_table(), str(tmp_path / "t"))
    lance.write_dataset(pa.Table.from_batches([rows(0, 3)]), old.uri, mode="append")
    lancewal.initialize(old, unsharded=True)
    assert lance.dataset(old.uri).count_rows() == 3


# --- stored writer defaults -------------------------------------------------------------


def test_writer_defaults_of_a_configuration_come_back(tmp_path: Path) -> None:
    config = ShardWriterConfig(
        durable_write=False,
        sync_indexed_write=False,
        max_wal_flush_interval=None,
        stats_log_interval=None,
        max_memtable_rows=77,
        enable_memtable=False,
        fsync=False,
    )
    table = lancewal.initialize(create(tmp_path / "t"), writer_defaults=config)
    assert ShardWriterConfig.from_defaults(table.details.writer_config_defaults) == config


def test_writer_defaults_keep_keys_of_others(tmp_path: Path) -> None:
    given = {"max_memtable_rows": "7", "hnsw.idx.num_edges": "12", "team": "search"}
    table = lancewal.initialize(create(tmp_path / "t"), writer_defaults=given)
    assert table.details.writer_config_defaults == given
    assert lance.dataset(table.uri).mem_wal_index_details()["writer_config_defaults"] == given


# --- refusals ---------------------------------------------------------------------------

FLOAT_KEY = pa.schema([pa.field("id", pa.float64(), nullable=False, metadata=KEY)])

REFUSED: dict[str, tuple[pa.Schema, dict[str, Any], str]] = {
    "two ways": (WIDE, {"bucket": ("id", 2), "identity": "tenant"}, "one of"),
    "two other ways": (WIDE, {"identity": "tenant", "unsharded": True}, "one of"),
    "missing bucket column": (WIDE, {"bucket": ("nope", 2)}, "no column 'nope'.*id, tenant"),
    "missing identity column": (WIDE, {"identity": "nope"}, "no column 'nope'"),
    "nested column": (WIDE, {"identity": "nested.inner"}, "no column"),
    "no buckets": (WIDE, {"bucket": ("id", 0)}, "1 to 1024"),
    "too many buckets": (WIDE, {"bucket": ("id", 1025)}, "1 to 1024"),
    "buckets as text": (WIDE, {"bucket": ("id", "8")}, "1 to 1024"),
    "buckets without a number": (WIDE, {"bucket": "id"}, r"\('id', 8\)"),
    "bucket by a vector": (WIDE, {"bucket": ("vector", 2)}, "vector cannot be a bucket column"),
    "bucket by a struct": (WIDE, {"bucket": ("nested", 2)}, "nested cannot be a bucket column"),
    "identity by a float": (WIDE, {"identity": "score"}, "score has type float.*bucket by it"),
    "identity by a vector": (WIDE, {"identity": "vector"}, "vector has type"),
    "sharding outside the key": (WIDE, {"bucket": ("score", 2)}, "not part of the primary key"),
    "key that cannot be hashed": (FLOAT_KEY, {"unsharded": True}, "'id' has type double"),
    "unknown index": (WIDE, {"maintained_indexes": ["nope"]}, "no index 'nope'; its indexes are none"),
    "index names as text": (WIDE, {"maintained_indexes": "nope"}, "list of index names"),
    "bad knob": (WIDE, {"writer_defaults": {"max_memtable_rows": "many"}}, "max_memtable_rows is 'many'"),
    "knob below its limit": (WIDE, {"writer_defaults": {"max_memtable_rows": "0"}}, "at least 1"),
    "knob that is no text": (WIDE, {"writer_defaults": {"max_memtable_rows": 7}}, "is not text"),
    "shard as a default": (WIDE, {"writer_defaults": {"shard_id": "x"}}, "shard_id names a shard"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_says_why_and_writes_nothing(tmp_path: Path, case: str) -> None:
    schema, arguments, reason = REFUSED[case]
    uri = create(tmp_path / "t", schema)
    before = content(tmp_path)
    with pytest.raises(InvalidInputError, match=reason):
        lancewal.initialize(uri, **arguments)
    assert content(tmp_path) == before
    with pytest.raises(NotInitializedError, match="initialize"):
        lancewal.open(uri)


def test_second_initialisation_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    uri = create(tmp_path / "t")
    lancewal.initialize(uri, bucket=("id", 2))
    before = content(tmp_path)
    with pytest.raises(InvalidInputError, match="initialised already"):
        lancewal.initialize(uri, unsharded=True)
    assert content(tmp_path) == before


def test_table_that_lance_initialised_is_refused(tmp_path: Path) -> None:
    uri = create(tmp_path / "t")
    lance.dataset(uri).initialize_mem_wal(unsharded=True)
    with pytest.raises(InvalidInputError, match="initialised already"):
        lancewal.initialize(uri)


def test_missing_table_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no Lance table"):
        lancewal.initialize(tmp_path / "t", unsharded=True)
    assert list(tmp_path.iterdir()) == []


def test_rows_of_an_overwritten_table_do_not_come_back(tmp_path: Path) -> None:
    uri = create(tmp_path / "t")
    table = lancewal.initialize(uri, unsharded=True)
    with lance.dataset(uri).mem_wal_writer(str(table.shard_for())) as writer:
        writer.put(rows(0, 3))
    lance.write_dataset(KEYED.empty_table(), uri, mode="overwrite")
    with pytest.raises(InvalidInputError, match=r"earlier table.*delete that directory"):
        lancewal.initialize(uri, unsharded=True)
    ObjectStore.from_uri(uri).delete_prefix(layout.MEM_WAL_DIR)
    assert lancewal.initialize(uri, unsharded=True).shards()[0].generations == ()


# --- races and crashes ------------------------------------------------------------------


def test_one_of_two_racing_initialisations_wins(tmp_path: Path) -> None:
    uri = create(tmp_path / "t")
    start = threading.Barrier(4)
    outcomes: list[int | InvalidInputError] = []

    def race(buckets: int) -> None:
        start.wait()
        try:
            lancewal.initialize(uri, bucket=("id", buckets))
            outcomes.append(buckets)
        except InvalidInputError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [each for each in outcomes if isinstance(each, int)]
    assert len(outcomes) == 4
    assert lancewal.open(uri).details.num_shards == winner
    assert len(lancewal.open(uri).shards()) == winner


def test_rival_between_check_and_commit_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = create(tmp_path / "t")
    open_base = BaseTable.open

    def open_then_lose(*args: Any, **options: Any) -> BaseTable:
        try:
            return open_base(*args, **options)
        except NotInitializedError:
            lance.dataset(uri).initialize_mem_wal(identity_column="id")
            raise

    with monkeypatch.context() as patch:
        patch.setattr(BaseTable, "open", open_then_lose)
        with pytest.raises(InvalidInputError, match="initialised already"):
            lancewal.initialize(uri, bucket=("id", 4))
    assert lancewal.open(uri).router().transform == "identity"


def interrupted(monkeypatch: pytest.MonkeyPatch, create_shard: Callable[..., Any]) -> None:
    monkeypatch.setattr(ShardManifestStore, "initialize_shard", create_shard)


def test_storage_failure_after_the_index_leaves_an_initialised_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageError("the store is down")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        interrupted(patch, fail)
        table = lancewal.initialize(create(tmp_path / "t"), bucket=("id", 3))
        assert table.shards() == []
    assert "the store is down" in caplog.text
    assert table.shard_for(1) == table.shards()[0].shard_id


@pytest.mark.parametrize(
    ("number", "error"), [(104, OutcomeUnknownError), (28, StorageError)], ids=["lost reply", "disk full"]
)
def test_a_commit_that_may_have_taken_effect_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    real = lance.LanceDataset.commit

    def lost(*args: Any, **kwargs: Any) -> None:
        if number == 104:
            real(*args, **kwargs)
        raise OSError(f"LanceError(IO): no answer (os error {number})")

    uri = create(tmp_path / "t")
    with monkeypatch.context() as patch:
        patch.setattr(lance.LanceDataset, "commit", lost)
        with pytest.raises(error, match="no answer"):
            lancewal.initialize(uri, unsharded=True)
    if number == 104:
        assert lancewal.open(uri).router().transform == "unsharded"


def test_kill_between_index_and_shards_heals_at_the_first_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kill(BaseException):
        """No handler of errors catches this."""

    def kill(*_: object, **__: object) -> None:
        raise Kill

    uri = create(tmp_path / "t")
    with monkeypatch.context() as patch:
        interrupted(patch, kill)
        with pytest.raises(Kill):
            lancewal.initialize(uri, bucket=("id", 3))
    table = lancewal.open(uri)
    assert table.shards() == []
    with table.writer(fsync=False) as writer:
        writer.put(rows(0, 30))
    assert sorted(shard.values["bucket"] for shard in table.shards()) == [0, 1, 2]
    shard = table.router().known_shards()[0]
    with table.shard_writer(shard.shard_id, fsync=False) as shard_writer:
        assert shard_writer.epoch == 2
