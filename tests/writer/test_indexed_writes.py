"""Indexes that a shard writer maintains: in the put or later, counted, replayed, flushed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.mem_wal import LsmVectorSearchPlanner
from lance.mem_wal import ShardSnapshot as LanceShard

import lancewal
from lancewal.errors import InvalidInputError
from lancewal.index.full_text import FullTextIndex
from lancewal.index.kinds import BTreeParams, FullTextParams, IndexSpec, VectorParams
from lancewal.index.vector import VectorIndex
from lancewal.shard.manifest import ShardManifestStore
from lancewal.writer import ShardWriter, open_shard_writer
from tests.patience import PATIENCE, wait_until
from tests.reader.searched import (
    ALL_INDEXES,
    DIMENSION,
    FIELDS,
    NO_INDEXES,
    Row,
    Searched,
    as_table,
    by_distance,
    by_score,
    create_indexes,
    ids,
    random_rows,
    row,
)
from tests.tables import abandon, fast

QUERY = [0.3, -0.2, 0.9, 0.1]


def open_writer(table: Searched, **settings: Any) -> ShardWriter:
    return table.table.shard_writer(table.table.shard_for(), fast(**settings))


def check(table: Searched, model: dict[int, Row]) -> None:
    """Words, vectors and ranges find what the model holds."""
    assert ids(table.near(QUERY, 1000)) == [id_ for id_, _ in by_distance(model.values(), QUERY)]
    expected = by_score(model.values(), "running fox")
    found = table.words("running fox")
    assert {hit["id"]: hit["_score"] for hit in found} == pytest.approx(expected, rel=1e-4)
    for reader in (table.live, table.other):
        rows = reader.scan(filter="n = 3", columns=["id"]).to_table()["id"].to_pylist()
        assert sorted(rows) == sorted(each["id"] for each in model.values() if each["n"] == 3)


def changed(model: dict[int, Row], rows: list[Row]) -> pa.Table:
    model.update({each["id"]: each for each in rows})
    return as_table(rows)


# --- in the put, and later ---------------------------------------------------------------


def test_rows_are_indexed_when_put_returns(tmp_path: Path) -> None:
    table, model = Searched(tmp_path), {}
    with open_writer(table) as writer:
        for seed in range(4):
            writer.put(changed(model, random_rows(range(seed * 4, seed * 4 + 30), seed)))
            view = writer.active_memtable_ref()
            assert view.indexes.rows_indexed == view.row_count == (seed + 1) * 30
            kinds = {type(spec.params) for spec in view.indexes.specs}
            assert kinds == {BTreeParams, FullTextParams, VectorParams}
        check(table, model)
        stats = writer.stats()
        assert (stats.index_update_count, stats.index_update_rows) == (4, 120)
        assert writer.memtable_stats().index_bytes > 0


def test_deferred_indexing_starts_after_so_many_rows(tmp_path: Path) -> None:
    table, model = Searched(tmp_path), {}
    settings = {"async_index_buffer_rows": 50, "async_index_interval": timedelta(hours=1)}
    with open_writer(table, sync_indexed_write=False, **settings) as writer:
        writer.put(changed(model, random_rows(range(30), 0)))
        indexes = writer.active_memtable_ref().indexes
        check(table, model)
        assert indexes.rows_indexed == 0
        writer.put(changed(model, random_rows(range(20, 50), 1)))
        wait_until(lambda: indexes.rows_indexed == 60)
        check(table, model)
        wait_until(lambda: writer.stats().index_update_rows == 60)


def test_deferred_indexing_starts_after_so_long(tmp_path: Path) -> None:
    table, model = Searched(tmp_path), {}
    settings = {"async_index_buffer_rows": 1_000_000, "async_index_interval": timedelta(milliseconds=5)}
    with open_writer(table, sync_indexed_write=False, **settings) as writer:
        for seed in range(3):
            writer.put(changed(model, random_rows(range(30), seed)))
            check(table, model)
            indexes = writer.active_memtable_ref().indexes
            wait_until(lambda indexes=indexes, rows=30 * (seed + 1): indexes.rows_indexed == rows)
        check(table, model)


def test_an_index_that_fails_costs_neither_the_put_nor_a_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table, model = Searched(tmp_path), {}

    def fail(self: object, column: pa.Array, first_row: int) -> None:
        raise MemoryError("no room")

    with open_writer(table) as writer:
        writer.put(changed(model, random_rows(range(20), 0)))
        with monkeypatch.context() as patch:
            patch.setattr(VectorIndex, "insert", fail)
            writer.put(changed(model, random_rows(range(10, 30), 1)))
        writer.put(changed(model, random_rows(range(25, 40), 2)))
        assert writer.active_memtable_ref().indexes.rows_indexed == 20
        assert "searched without an index from row 20 on" in caplog.text
        check(table, model)
        writer.force_seal_active()
        writer.wait_for_flush_drain()
        check(table, model)
        writer.put(changed(model, random_rows(range(35, 50), 3)))
        assert writer.active_memtable_ref().indexes.rows_indexed == 15, "the next MemTable has its indexes"
        check(table, model)


# --- which indexes ------------------------------------------------------------------------

LISTS = pa.schema([*FIELDS, pa.field("tags", pa.list_(pa.string()))])


def with_tags(where: Path, **initialize: Any) -> Searched:
    indexes = {"tags": {"index_type": "LABEL_LIST"}, **ALL_INDEXES}
    data = [{**each, "tags": ["a"]} for each in random_rows(range(10), 0)]
    return Searched(where, data, schema=LISTS, indexes=indexes, **initialize)


def test_an_index_that_cannot_be_maintained_does_not_make_the_table_unwritable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = with_tags(tmp_path)
    with open_writer(table) as writer:
        assert "'tags_idx' (LabelList) cannot be maintained" in caplog.text
        writer.put(as_table([{"id": 100, "tags": ["b"], "v": QUERY}], LISTS))
        assert {spec.name for spec in writer.active_memtable_ref().indexes.specs} == {
            "n_idx",
            "text_idx",
            "v_idx",
        }
        assert ids(table.near(QUERY, 1)) == [100]


def test_an_index_that_cannot_be_maintained_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"'tags_idx'.*cannot be maintained"):
        with_tags(tmp_path, unsharded=True, maintained_indexes=["n_idx", "tags_idx"])
    # Nothing was stored.
    lancewal.initialize(str(tmp_path / "table"), unsharded=True, maintained_indexes=["n_idx"])


def test_the_named_indexes_are_maintained_and_no_others(tmp_path: Path) -> None:
    table = with_tags(tmp_path, unsharded=True, maintained_indexes=["n_idx", "v_idx"])
    with open_writer(table) as writer:
        assert [spec.name for spec in writer.active_memtable_ref().indexes.specs] == ["n_idx", "v_idx"]


def test_a_named_index_that_was_dropped_leaves_the_table_writable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = Searched(tmp_path, unsharded=True, maintained_indexes=["n_idx", "v_idx"])
    writer = open_writer(table)
    writer.put(as_table(random_rows(range(5), 0)))
    abandon(writer)
    del writer  # or the flush goes through it
    table.dataset.drop_index("v_idx")
    table.table.flush()
    assert "no index named 'v_idx'" in caplog.text
    with open_writer(table) as writer:
        assert [spec.name for spec in writer.active_memtable_ref().indexes.specs] == ["n_idx"]
        writer.put(as_table([row(9, v=QUERY)]))
        assert ids(table.near(QUERY, 1)) == [9]
        assert len(table.near(QUERY, 100)) == 6


def test_an_index_spec_that_does_not_fit_the_table_is_refused_before_the_claim(tmp_path: Path) -> None:
    table = Searched(tmp_path)
    wrong = IndexSpec("gone_idx", "gone", 9, VectorParams(DIMENSION))
    shard = table.table.shard_for()
    with pytest.raises(InvalidInputError, match="'gone'"):
        open_shard_writer(table.live.base(), shard, fast(), indexes=[wrong])
    assert ShardManifestStore(table.store, shard).require_latest().writer_epoch == 0


# --- memory -------------------------------------------------------------------------------


def test_index_bytes_alone_freeze_the_memtable(tmp_path: Path) -> None:
    """They were invisible to the limits, and memory grew far beyond them."""
    table, limit = Searched(tmp_path), 600_000
    with open_writer(table, max_memtable_size=limit, max_unflushed_memtable_bytes=2 * limit) as writer:
        start = 0
        while writer.memtable_stats().generation == 1:
            assert writer.memtable_stats().row_count < 6000, "the indexes do not count"
            writer.put(as_table([row(i, f"word{i} other{i}", n=i) for i in range(start, start + 50)]))
            start += 50
        writer.wait_for_flush_drain()
        (entry,) = ShardManifestStore(table.store, writer.shard_id).require_latest().sstables
        assert entry.in_memory_bytes is not None
        assert entry.in_memory_bytes < limit / 2, "the rows alone would have been enough"


def test_index_bytes_hold_puts_back_and_the_flush_lets_them_go(tmp_path: Path) -> None:
    table, model = Searched(tmp_path), {}
    # Empty ones take most of it, so that each MemTable has room for a few puts.
    with open_writer(table) as writer:
        writer.put(changed(model, random_rows(range(20), 0)))
        limit = writer.memtable_stats().estimated_size + 20_000
    with open_writer(table, max_memtable_size=limit, max_unflushed_memtable_bytes=limit) as writer:
        for seed in range(12):
            writer.put(changed(model, random_rows(range(seed * 20, seed * 20 + 40), seed)))
            stats = writer.memtable_stats()
            assert stats.estimated_size + stats.frozen_bytes < 2 * limit
        writer.wait_for_flush_drain()
        assert writer.memtable_stats().generation > 2
        assert writer.stats().backpressure_count > 0
        check(table, model)


def test_the_row_limit_holds_with_a_vector_index(tmp_path: Path) -> None:
    """It was never enforced: the vector index overflowed, and the shard could not be opened again."""
    table, model = Searched(tmp_path), {}
    with open_writer(table, max_memtable_rows=25) as writer:
        for seed in range(8):
            writer.put(changed(model, random_rows(range(seed * 10, seed * 10 + 10), seed)))
            assert writer.memtable_stats().row_count <= 25
        writer.wait_for_flush_drain()
        manifest = ShardManifestStore(table.store, writer.shard_id).require_latest()
        rows = [entry.physical_rows or 0 for entry in manifest.sstables]
        assert rows
        assert all(count <= 25 for count in rows)
        check(table, model)
    with open_writer(table, max_memtable_rows=25):
        check(table, model)


# --- replay -------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_replay_rebuilds_the_indexes_once_and_doubles_no_hit(tmp_path: Path, sync: bool) -> None:
    table, model = Searched(tmp_path), {}
    settings = {"sync_indexed_write": sync, "async_index_interval": timedelta(milliseconds=1)}
    for seed in range(3):
        writer = open_writer(table, **settings)
        indexes = writer.active_memtable_ref().indexes
        wait_until(lambda indexes=indexes, rows=seed * 32: indexes.rows_indexed == rows)
        check(table, model)
        writer.put(changed(model, random_rows(range(seed * 5, seed * 5 + 31), seed)))
        writer.delete([seed])
        del model[seed]
        wait_until(lambda indexes=indexes, rows=(seed + 1) * 32: indexes.rows_indexed == rows)
        words, near = indexes.full_text("text"), indexes.vector("v")
        assert isinstance(words, FullTextIndex)
        assert near is not None
        assert words.rows == near.rows == (seed + 1) * 32
        check(table, model)
        abandon(writer)
        check(table, model)


def test_replay_that_was_interrupted_and_repeated_doubles_no_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, model = Searched(tmp_path), {}
    writer = open_writer(table)
    for seed in range(4):
        writer.put(changed(model, random_rows(range(seed * 5, seed * 5 + 10), seed)))
    abandon(writer)
    inserts: list[int] = []
    insert = FullTextIndex.insert

    def interrupted(self: FullTextIndex, column: pa.Array, first_row: int) -> None:
        inserts.append(1)
        if len(inserts) == 3:
            raise KeyboardInterrupt
        insert(self, column, first_row)

    with monkeypatch.context() as patch:
        patch.setattr(FullTextIndex, "insert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_writer(table)
    check(table, model)
    with open_writer(table) as writer:
        assert writer.active_memtable_ref().indexes.rows_indexed == 40
        check(table, model)
    check(table, model)


# --- flush --------------------------------------------------------------------------------


def sstables(table: Searched, shard: UUID) -> list[lance.LanceDataset]:
    manifest = ShardManifestStore(table.store, shard).require_latest()
    return [lance.dataset(f"{table.uri}/_mem_wal/{shard}/{entry.path}") for entry in manifest.sstables]


def test_flushed_sstables_have_the_maintained_indexes(tmp_path: Path) -> None:
    table = Searched(tmp_path)
    with open_writer(table) as writer:
        writer.put(as_table(random_rows(range(50), 0)))
    (dataset,) = sstables(table, table.table.shard_for())
    found = {each.name: str(each.index_type) for each in dataset.describe_indices()}
    assert found == {"n_idx": "BTree", "text_idx": "Inverted", "v_idx": "IVF_SQ"}


@pytest.mark.parametrize("kind", ["IVF_FLAT", "IVF_PQ"])
def test_pylances_vector_search_finds_our_flushed_rows(tmp_path: Path, kind: str) -> None:
    base = random_rows(range(300), 0)
    options = {"index_type": kind, "metric": "l2", "ivf_centroids": None}
    if kind == "IVF_PQ":
        options["num_sub_vectors"] = 2
    table = Searched(tmp_path, base, indexes={"v": options})
    model = {each["id"]: each for each in base}
    for seed, keys in enumerate([range(250, 330), range(320, 360)], 1):
        with open_writer(table) as writer:
            writer.put(changed(model, random_rows(keys, seed)))
            writer.delete([seed])
            del model[seed]
    shard = table.table.shard_for()
    manifest = ShardManifestStore(table.store, shard).require_latest()
    snapshot = LanceShard(str(shard)).with_current_generation(manifest.current_generation)
    for entry in manifest.sstables:
        snapshot = snapshot.with_sstable(entry.generation, entry.path)
    planner = LsmVectorSearchPlanner(table.dataset, [snapshot], "v", distance_type="l2")
    fresh = {id_: each for id_, each in model.items() if id_ >= 250}
    for id_, each in list(fresh.items())[::17]:
        found = planner.plan_search(pa.array(each["v"], pa.float32()), k=3).to_table()
        assert found["id"][0].as_py() == id_
        assert found["_distance"][0].as_py() == pytest.approx(0, abs=0.05)


def test_an_index_created_while_rows_flow_serves_the_next_writer(tmp_path: Path) -> None:
    table, model = Searched(tmp_path, indexes=NO_INDEXES), {}
    with open_writer(table) as writer:
        writer.put(changed(model, random_rows(range(20), 0)))
        create_indexes(table.dataset, ALL_INDEXES)
        writer.put(changed(model, random_rows(range(10, 30), 1)))
        assert writer.active_memtable_ref().indexes.specs == ()
        check(table, model)
    with open_writer(table) as writer:
        writer.put(changed(model, random_rows(range(25, 40), 2)))
        assert len(writer.active_memtable_ref().indexes.specs) == 3
        check(table, model)


def test_graphs_of_a_large_memtable_find_nearly_all_neighbours(tmp_path: Path) -> None:
    schema = pa.schema([FIELDS[0], FIELDS[3]])
    table = Searched(tmp_path, schema=schema, indexes={"v": ALL_INDEXES["v"]})
    random = np.random.default_rng(0)
    count = 20_000
    centres = 10 * random.normal(size=(50, DIMENSION))
    vectors = centres[random.integers(0, 50, count)] + random.normal(size=(count, DIMENSION))
    vectors = vectors.astype(np.float32)
    writer = open_writer(table)
    for start in range(0, count, 5000):
        values = pa.array(vectors[start : start + 5000].ravel())
        column = pa.FixedSizeListArray.from_arrays(values, DIMENSION)
        writer.put(pa.table([pa.array(np.arange(start, start + 5000)), column], schema=schema))
    index = writer.active_memtable_ref().indexes.vector("v")
    assert index is not None
    hits = 0
    # While graphs are built, and with them.
    for finished in (False, True):
        assert not finished or index.wait_for_graphs(PATIENCE)
        for query in vectors[::2000] + np.float32(0.01):
            true = np.argsort(((vectors - query) ** 2).sum(axis=1))[:10]
            found = table.table.vector_search("v", query, 10, columns=["id"])["id"].to_pylist()
            hits += len(set(found) & set(true.tolist()))
    assert hits >= 190
    abandon(writer)
