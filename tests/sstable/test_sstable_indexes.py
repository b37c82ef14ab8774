"""Maintained indexes inside SSTables, searched by pylance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from lance.mem_wal import LsmVectorSearchPlanner

from lancewal.format.shard_manifest import SsTableEntry
from lancewal.index.kinds import BTreeParams, FullTextParams, IndexSpec, Metric, VectorParams
from tests.sstable.tables import Base, Row, dead, key_field

DIMENSION = 8


def _vector_spec(metric: Metric) -> IndexSpec:
    return IndexSpec("v_idx", "v", 2, VectorParams(DIMENSION, metric))


BTREE = IndexSpec("x_idx", "x", 1, BTreeParams())
WORDS = IndexSpec("t_idx", "t", 3, FullTextParams(stem=False, with_position=True))


def _vectors(count: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(size=(count, DIMENSION)).astype(np.float32)


def _rows(first: int, count: int, seed: int = 1) -> list[Row]:
    return [
        {"id": first + i, "x": i, "v": vector.tolist(), "t": f"word{i} shared"}
        for i, vector in enumerate(_vectors(count, seed))
    ]


@pytest.fixture
def base(tmp_path: Path) -> Base:
    fields = [
        key_field("id", pa.int64()),
        pa.field("x", pa.int64()),
        pa.field("v", pa.list_(pa.float32(), DIMENSION)),
        pa.field("t", pa.string()),
    ]
    return Base.create(tmp_path / "t", fields, _rows(0, 50, seed=9)).initialize()


def _nearest(base: Base, entry: SsTableEntry, query: list[float], metric: Metric, k: int = 3) -> pa.Table:
    planner = LsmVectorSearchPlanner(base.dataset, [base.snapshot(entry)], "v", distance_type=metric.value)
    return planner.plan_search(pa.array(query, pa.float32()), k=k).to_table()


@pytest.mark.parametrize("metric", list(Metric))
@pytest.mark.parametrize("count", [1, 5, 400])
def test_pylances_vector_search_finds_our_rows(base: Base, metric: Metric, count: int) -> None:
    base.dataset.create_index("v", "IVF_FLAT", metric=metric.value, num_partitions=1)
    rows = _rows(1000, count)
    entry = base.write(rows, indexes=[_vector_spec(metric)])
    # Long vectors, so that the nearest one by inner product is the query itself as well.
    query = [100 * value for value in rows[-1]["v"]] if metric is Metric.DOT else rows[-1]["v"]
    found = _nearest(base, entry, query, metric)
    everything = np.array([row["v"] for row in [*_rows(0, 50, seed=9), *rows]])
    ids = np.array([*range(50), *(row["id"] for row in rows)])
    assert found["id"][0].as_py() == ids[_distances(everything, np.array(query), metric).argmin()]
    assert rows[-1]["id"] in found["id"].to_pylist() or metric is Metric.DOT


def _distances(
    vectors: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    query: np.ndarray[tuple[int], np.dtype[np.float64]],
    metric: Metric,
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if metric is Metric.L2:
        return np.asarray(((vectors - query) ** 2).sum(axis=1))
    products = vectors @ query
    if metric is Metric.DOT:
        return np.asarray(1 - products)
    return np.asarray(1 - products / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query))


def test_deleted_and_missing_vectors_are_no_hits(base: Base) -> None:
    base.dataset.create_index("v", "IVF_FLAT", metric="l2", num_partitions=1)
    rows = _rows(1000, 3)
    target = base.dataset.to_table(filter="id = 7").to_pylist()[0]["v"]
    entry = base.write([*rows, {"id": 2000, "v": None}, dead(id=7)], indexes=[_vector_spec(Metric.L2)])
    found = _nearest(base, entry, target, Metric.L2, k=60)["id"].to_pylist()
    assert 7 not in found
    assert 2000 not in found
    assert {1000, 1001, 1002} <= set(found)


def test_an_sstable_without_any_vector_can_be_searched(base: Base) -> None:
    base.dataset.create_index("v", "IVF_FLAT", metric="l2", num_partitions=1)
    entry = base.write([dead(id=7)], indexes=[_vector_spec(Metric.L2)])
    found = _nearest(base, entry, [0.0] * DIMENSION, Metric.L2, k=60)["id"].to_pylist()
    assert sorted(found) == [i for i in range(50) if i != 7]


def test_most_true_neighbours_are_found_among_many_rows(base: Base) -> None:
    rows = _rows(0, 3000, seed=2)
    dataset = base.lance_sstable(base.write(rows, indexes=[_vector_spec(Metric.L2)]))
    vectors = np.array([row["v"] for row in rows])
    hits = 0
    for query in _vectors(20, seed=3):
        nearest = {"column": "v", "q": query, "k": 10}
        assert "ANN" in dataset.scanner(nearest=nearest).explain_plan()
        found = dataset.to_table(columns=["id"], nearest=nearest)["id"].to_pylist()
        true = _distances(vectors, query.astype(np.float64), Metric.L2).argsort()[:10]
        hits += len(set(found) & set(true.tolist()))
    assert hits >= 190


def test_full_text_has_the_bases_tokenizer(base: Base) -> None:
    base.dataset.create_scalar_index("t", "INVERTED", name="t_idx", stem=False, with_position=True)
    theirs = base.lance_sstable(base.flush_with_pylance(_rows(1000, 5)))
    ours = base.lance_sstable(base.write(_rows(1000, 5), indexes=[WORDS]))
    details = [{d.name: d.details for d in dataset.describe_indices()}["t_idx"] for dataset in (ours, theirs)]
    assert details[0] == details[1]
    for words in ("shared", "word3", "absent"):
        found = [d.to_table(columns=["id"], full_text_query=words) for d in (ours, theirs)]
        assert found[0].sort_by("id") == found[1].sort_by("id")


def test_a_btree_answers_filters(base: Base) -> None:
    dataset = base.lance_sstable(base.write(_rows(1000, 20), indexes=[BTREE]))
    assert "ScalarIndexQuery" in dataset.scanner(filter="x = 3").explain_plan()
    assert dataset.to_table(columns=["id"], filter="x > 17")["id"].to_pylist() == [1018, 1019]


def test_all_indexes_in_one_sstable(base: Base) -> None:
    specs = [BTREE, WORDS, _vector_spec(Metric.L2)]
    entry = base.write(_rows(1000, 20), indexes=specs)
    names = {index.name for index in base.lance_sstable(entry).describe_indices()}
    assert names == {"x_idx", "t_idx", "v_idx"}
    assert base.open(entry).count_live() == 20


def test_an_index_that_cannot_be_built_does_not_make_the_table_unwritable(
    base: Base, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = IndexSpec("t_idx", "t", 3, VectorParams(DIMENSION))
    entry = base.write(_rows(1000, 3), indexes=[wrong, BTREE])
    assert base.open(entry).count_live() == 3
    assert "no index on column 't'" in caplog.text
    assert [index.name for index in base.lance_sstable(entry).describe_indices()] == ["x_idx"]
