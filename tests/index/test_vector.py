"""Nearest rows: equal to a full computation where searches are exact, nearly so by graphs, as in Lance."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancewal.errors import InvalidInputError
from lancewal.index import graph
from lancewal.index import graph as builder
from lancewal.index.exact import Nearest, Vectors, search_rows
from lancewal.index.kinds import Metric, VectorParams
from lancewal.index.vector import VectorIndex
from tests.patience import PATIENCE

FLOAT32 = pa.float32()
Floats = npt.NDArray[np.float32]


def column(vectors: Any, dimension: int, type_: pa.DataType = FLOAT32) -> pa.Array:
    if isinstance(vectors, np.ndarray):
        values = pa.array(vectors.astype(type_.to_pandas_dtype()).ravel(), type_)
        return pa.FixedSizeListArray.from_arrays(values, dimension)
    return pa.array(vectors, pa.list_(type_, dimension))


def full(metric: Metric, vectors: Sequence[Any], query: Any, k: int) -> list[tuple[int, float]]:
    """All distances, in double precision, by the definitions."""
    q = np.asarray(query, np.float64)
    found = []
    with np.errstate(all="ignore"):
        for row, vector in enumerate(vectors):
            if vector is None:
                continue
            v = np.asarray(vector, np.float64)
            if metric is Metric.L2:
                distance = ((v - q) ** 2).sum()
            elif metric is Metric.DOT:
                distance = 1 - v @ q
            else:
                distance = 1 - v @ q / (np.linalg.norm(v) * np.linalg.norm(q))
            if not np.isnan(distance):
                found.append((float(distance), row))
    return [(row, distance) for distance, row in sorted(found)[:k]]


def pairs(nearest: Nearest) -> list[tuple[int, float]]:
    return list(zip(nearest.positions.tolist(), nearest.distances.tolist(), strict=True))


def clustered(rows: int, dimension: int, seed: int = 0) -> Floats:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(1).standard_normal((20, dimension))
    noise = 0.2 * rng.standard_normal((rows, dimension))
    return (centres[rng.integers(0, 20, rows)] + noise).astype(np.float32)


whole_numbers = st.lists(st.none() | st.lists(st.integers(-3, 3), min_size=3, max_size=3), max_size=40)


@pytest.mark.parametrize("metric", Metric)
@given(vectors=whole_numbers, data=st.data())
def test_exact_search_equals_a_full_computation(
    metric: Metric, vectors: list[Any], data: st.DataObject
) -> None:
    # Whole numbers make distances exact, so that ties are ties.
    index = VectorIndex(VectorParams(3, metric), segment_rows=10_000)
    while index.rows < len(vectors):
        step = data.draw(st.integers(1, 12))
        index.insert(column(vectors[index.rows : index.rows + step], 3), index.rows)
    bound = data.draw(st.integers(0, len(vectors)))
    allowed = np.array(data.draw(st.lists(st.booleans(), min_size=bound, max_size=bound)), np.bool_)
    masked = data.draw(st.booleans())
    query = data.draw(st.lists(st.integers(-3, 3), min_size=3, max_size=3))
    k = data.draw(st.integers(1, 12))
    seen = [v if row < bound and (allowed[row] or not masked) else None for row, v in enumerate(vectors)]
    expected = full(metric, seen, query, k)
    hits = index.search(query, k, bound, allowed if masked else None)
    assert hits.distances.tolist() == pytest.approx([d for _, d in expected], abs=1e-6)
    if metric is not Metric.COSINE:
        assert hits.positions.tolist() == [row for row, _ in expected]


@pytest.mark.parametrize("metric", Metric)
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_neighbours_closer_together_than_an_estimate_can_tell_are_still_told_apart(
    metric: Metric, offset: float
) -> None:
    # Far from the origin, |x|² - 2xq loses all digits that matter.
    rng = np.random.default_rng(3)
    vectors = (offset + rng.standard_normal((3000, 16))).astype(np.float32)
    query = (offset + rng.standard_normal(16)).astype(np.float32)
    index = VectorIndex(VectorParams(16, metric), segment_rows=1 << 20)
    index.insert(column(vectors, 16), 0)
    found = index.search(query, 10, 3000)
    expected = full(metric, list(vectors), query, 10)
    assert found.distances.tolist() == pytest.approx([d for _, d in expected], rel=1e-3, abs=2e-6)
    if metric is Metric.L2:
        assert found.positions.tolist() == [row for row, _ in expected]


ODD: list[Any] = [
    [1, 2],
    [0, 0],
    [3, -1],
    None,
    [float("nan"), 1],
    [float("inf"), 0],
    [2, 4],
    [1e30, 1e30],
    [-0.0, 0],
]


@pytest.mark.parametrize("type_", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize("metric", Metric)
@pytest.mark.parametrize("query", [[1.0, 1.0], [0.0, 0.0], [-2.0, 0.5]])
def test_odd_vectors_are_treated_as_lance_treats_them(
    tmp_path: Path, type_: pa.DataType, metric: Metric, query: list[float]
) -> None:
    # Squares that overflow: Lance gives infinity for L2, noise for cosine.
    rows = [row for row in ODD if row is None or metric is Metric.L2 or max(row) < 1e30 or np.inf in row]
    if type_ == pa.float16():
        rows = [None if row is None else [np.float16(x) for x in row] for row in rows if row != [1e30, 1e30]]
    vectors = column(rows, 2, type_)
    dataset = lance.write_dataset(pa.table({"row": range(len(rows)), "v": vectors}), tmp_path / "t")
    found = dataset.to_table(
        columns=["row", "_distance"],
        nearest={"column": "v", "q": np.array(query, np.float32), "k": 20, "metric": metric.value},
    )
    index = VectorIndex(VectorParams(2, metric))
    index.insert(vectors, 0)
    hits = index.search(query, 20, len(rows))
    assert dict(pairs(hits)) == pytest.approx(
        dict(zip(found["row"].to_pylist(), found["_distance"].to_pylist(), strict=True)), abs=1e-6
    )
    assert hits.distances.tolist() == sorted(hits.distances.tolist())


def test_a_null_inside_a_vector_counts_as_zero() -> None:
    vectors = column([[1, None], [1, 2]], 2)
    hits = search_rows((np.arange(2), vectors, np.ones(2, np.bool_)), [1, 2], 5, Metric.L2)
    assert pairs(hits) == [(1, 0.0), (0, 4.0)]


def test_slices_of_a_batch_are_read_at_their_place() -> None:
    vectors = column([[9, 9], [1, 1], None, [2, 2], [9, 9]], 2)
    index = VectorIndex(VectorParams(2))
    index.insert(vectors.slice(1, 3), 0)
    assert pairs(index.search([1, 1], 9, 3)) == [(0, 0.0), (2, 2.0)]


def test_replayed_vectors_are_found_once() -> None:
    index = VectorIndex(VectorParams(2))
    vectors = column([[1, 1], None, [2, 2]], 2)
    index.insert(vectors, 0)
    index.insert(vectors, 0)
    index.insert(column([[2, 2], [3, 3]], 2), 2)
    assert index.rows == 4
    assert index.search([1, 1], 9, 4).positions.tolist() == [0, 2, 3]


def test_bad_queries_are_refused() -> None:
    index = VectorIndex(VectorParams(2))
    index.insert(column([[1, 1]], 2), 0)
    for query in ([1], [1, 2, 3], [[1, 2]], "ab", None, [1, None], [float("nan"), 0], [float("inf"), 0]):
        with pytest.raises(InvalidInputError, match="query"):
            index.search(query, 1, 1)
    for k in (0, -1):
        with pytest.raises(InvalidInputError, match="positive"):
            index.search([1, 1], k, 1)
    with pytest.raises(InvalidInputError, match="bound"):
        index.search([1, 1], 1, -1)


def test_columns_that_are_no_vectors_of_the_dimension_are_refused_and_leave_no_trace() -> None:
    index = VectorIndex(VectorParams(2))
    for wrong in (column([[1, 2, 3]], 3), pa.array([1.0]), pa.array([[1, 2]], pa.list_(pa.uint8(), 2))):
        with pytest.raises(InvalidInputError, match="dimension 2"):
            index.insert(wrong, 0)
    assert index.rows == 0
    with pytest.raises(InvalidInputError, match="float vectors"):
        search_rows((np.arange(1), pa.array([1.0]), np.ones(1, np.bool_)), [1], 1, Metric.L2)


def graphs_of(index: VectorIndex) -> list[graph.Graph | None]:
    return [segment.graph for segment in index._state.sealed]


@pytest.mark.parametrize("metric", Metric)
def test_graphs_find_nearly_all_and_compute_distances_in_full(metric: Metric) -> None:
    rows, dimension = 5000, 24
    vectors = clustered(rows, dimension)
    index = VectorIndex(VectorParams(dimension, metric), segment_rows=2048)
    for start in range(0, rows, 500):
        index.insert(column(vectors[start : start + 500], dimension), start)
    assert index.wait_for_graphs(60)
    assert None not in graphs_of(index)
    hits = 0
    for query in clustered(40, dimension, seed=5):
        found, exact = index.search(query, 10, rows), index.search(query, 10, rows, exact=True)
        hits += len(np.intersect1d(found.positions, exact.positions))
        recomputed = dict(full(metric, list(vectors), query, rows))
        assert dict(pairs(found)) == pytest.approx(
            {row: recomputed[row] for row in found.positions.tolist()}, abs=1e-3
        )
    assert hits >= 0.95 * 400


def test_graphs_keep_the_bound_and_the_mask_and_fill_up_to_k() -> None:
    rows, dimension = 4096, 16
    vectors = clustered(rows, dimension)
    index = VectorIndex(VectorParams(dimension), segment_rows=2048)
    index.insert(column(vectors, dimension), 0)
    assert index.wait_for_graphs(60)
    assert None not in graphs_of(index)
    rng = np.random.default_rng(2)
    for share in (0.001, 0.1, 0.4, 0.9):
        allowed = rng.random(rows) < share
        for bound in (0, 5, 1000, 2048, 3000, rows):
            for query in clustered(3, dimension, seed=9):
                found = index.search(query, 20, bound, allowed[:bound])
                assert (found.positions < bound).all()
                assert allowed[found.positions].all()
                assert len(np.unique(found.positions)) == min(20, np.count_nonzero(allowed[:bound]))


def test_a_graph_that_finds_too_few_is_not_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = clustered(2048, 16)
    index = VectorIndex(VectorParams(16), segment_rows=2048)
    index.insert(column(vectors, 16), 0)
    assert index.wait_for_graphs(60)
    assert None not in graphs_of(index)
    search = graph.Graph.search

    def find_three(self: graph.Graph, query: Any, k: int, ef: int, mask: Any) -> Nearest:
        return search(self, query, min(k, 3), ef, mask)

    monkeypatch.setattr(graph.Graph, "search", find_three)
    allowed = np.arange(2048) % 2 == 0
    for mask in (None, allowed):
        exact = index.search(vectors[5], 10, 2048, mask, exact=True)
        assert pairs(index.search(vectors[5], 10, 2048, mask)) == pairs(exact)


def test_vectors_without_structure_stay_exact() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((2048, 64), dtype=np.float32)
    index = VectorIndex(VectorParams(64), segment_rows=2048)
    index.insert(column(vectors, 64), 0)
    assert index.wait_for_graphs(60)
    assert graphs_of(index) == [None]
    query = rng.standard_normal(64, dtype=np.float32)
    assert index.search(query, 10, 2048).positions.tolist() == [
        r for r, _ in full(Metric.L2, list(vectors), query, 10)
    ]


def test_a_graph_that_cannot_be_built_leaves_its_rows_searchable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(graph, "build_graph", fail)
    index = VectorIndex(VectorParams(4), segment_rows=256)
    vectors = clustered(600, 4)
    index.insert(column(vectors, 4), 0)
    assert index.wait_for_graphs(60)
    assert "could not be built" in caplog.text
    assert index.search(vectors[7], 1, 600).positions.tolist() == [7]
    index.insert(column(vectors, 4), 600)
    assert index.search(vectors[7], 2, 1200).positions.tolist() == [7, 607]


def test_rows_are_found_while_their_graph_is_still_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    may_build = threading.Event()
    build = graph.build_graph

    def wait_and_build(*args: Any) -> graph.Graph | None:
        assert may_build.wait(PATIENCE)
        return build(*args)

    monkeypatch.setattr(graph, "build_graph", wait_and_build)
    vectors = clustered(3000, 8)
    index = VectorIndex(VectorParams(8), segment_rows=1024)
    index.insert(column(vectors, 8), 0)
    assert index.graphs_pending == 2
    assert not index.wait_for_graphs(0)
    expected = [r for r, _ in full(Metric.L2, list(vectors), vectors[100], 10)]
    assert index.search(vectors[100], 10, 3000).positions.tolist() == expected
    before = index.memory_bytes
    may_build.set()
    assert index.wait_for_graphs(60)
    assert index.search(vectors[100], 10, 3000, exact=True).positions.tolist() == expected
    assert index.memory_bytes > before


def test_the_graph_of_a_dropped_index_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, dropped, gave_up = threading.Event(), threading.Event(), threading.Event()

    def build(held: Vectors, params: VectorParams, cancelled: Any) -> None:
        entered.set()
        assert dropped.wait(PATIENCE)
        if cancelled():
            gave_up.set()

    monkeypatch.setattr(graph, "build_graph", build)
    index = VectorIndex(VectorParams(4), segment_rows=256)
    alive = weakref.ref(index)
    index.insert(column(clustered(256, 4), 4), 0)
    assert entered.wait(PATIENCE)
    del index
    gc.collect()
    assert alive() is None
    dropped.set()
    assert gave_up.wait(PATIENCE)


def test_a_stopped_builder_starts_nothing_more() -> None:
    stopped = builder.GraphBuilder()
    stopped.stop()
    index = VectorIndex(VectorParams(4), segment_rows=1 << 20)
    stopped.request(index)
    assert stopped._thread is None


def test_the_index_outgrows_any_number_of_rows_that_was_expected() -> None:
    # The peer's in-memory graph has room for so many rows, and one more poisons the writer.
    index = VectorIndex(VectorParams(4), segment_rows=64)
    vectors = clustered(1000, 4)
    index.insert(column(vectors, 4), 0)
    for start in range(1000, 2000, 7):
        index.insert(column(vectors[start - 1000 : start - 993], 4), start)
    assert index.search(vectors[3], 2, 2000).positions.tolist() == [3, 1003]


def test_memory_counts_every_vector() -> None:
    index = VectorIndex(VectorParams(64))
    empty = index.memory_bytes
    index.insert(column(clustered(3000, 64), 64), 0)
    assert index.memory_bytes >= empty + (3000 - 256) * 64 * 4


def test_faiss_was_imported_by_processes_that_build_no_graph() -> None:
    """It takes a quarter of a second of every command and task, and most MemTables never need it."""
    code = "import sys, lancewal.index, lancewal.table; assert 'faiss' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
