"""HNSW graphs over vectors that no longer change, built in the background.

A graph is built completely and tested before searches use it, because faiss must not be searched
while it adds vectors. A search sees the whole graph or none.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from lancewal.index.exact import Matrix, Nearest, Vector, Vectors
from lancewal.index.kinds import Metric, RowMask, VectorParams
from lancewal.storage import Bell, is_forked, start_thread

logger = logging.getLogger(__name__)

#: Rows added between two checks whether the graph is still wanted.
_STEP = 256
#: Rows that are held back at first, to measure how well the graph finds neighbours of unknown vectors.
_TRIAL_QUERIES = 48
_TRIAL_NEIGHBOURS = 10
_TRIAL_RECALL = 0.98
_SMALLEST_EF = 32

_threads = threading.local()


def _faiss() -> Any:
    """The faiss library, imported with the first graph: the import is slow, and most MemTables need no graph.

    Untyped, because its stubs cover only part of it.
    """
    import faiss

    return faiss


class Graph:
    """A searchable graph; ``held`` are its vectors, in the graph's own order."""

    def __init__(self, index: Any, metric: Metric, held: Vectors, ef: int) -> None:
        self._index = index
        self._metric = metric
        self.held = held
        self.ef = ef
        links = index.hnsw
        self.memory_bytes = (
            held.memory_bytes + 4 * (links.neighbors.size() + links.levels.size()) + 8 * links.offsets.size()
        )

    def search(self, query: Vector, k: int, ef: int, mask: RowMask | None) -> Nearest:
        """At most ``k`` rows near the query, of the entries that ``mask`` allows."""
        _one_thread()
        params = _faiss().SearchParametersHNSW(efSearch=ef)
        if mask is not None:
            # The bits must outlive the search: faiss keeps a pointer.
            bits = np.packbits(mask, bitorder="little")
            params = _faiss().SearchParametersHNSW(efSearch=ef, sel=_faiss().IDSelectorBitmap(bits))
        # The vectors are stored in full, so these are distances, not estimates.
        measured, entries = self._index.search(query[np.newaxis], k, params=params)
        measured, entries = measured[0], entries[0]
        if entries[-1] < 0:
            measured, entries = measured[entries >= 0], entries[entries >= 0]
        apart = measured if self._metric is Metric.L2 else np.float32(1.0) - measured
        return Nearest(self.held.rows[entries].astype(np.int64), apart)


def build_graph(held: Vectors, params: VectorParams, cancelled: Callable[[], bool]) -> Graph | None:
    """A graph over ``held``, or None if it would not find neighbours well enough, or if it was cancelled.

    Vectors without structure (such as random ones) have no short paths between them; then
    comparing all of them is faster, and exact.
    """
    _one_thread()
    count = len(held.rows)
    # In random order, a stream that arrives topic by topic makes as good a graph as any other, and the last
    # rows are a fair sample.
    order = np.random.default_rng(count).permutation(count)
    metric = _faiss().METRIC_L2 if params.metric is Metric.L2 else _faiss().METRIC_INNER_PRODUCT
    index = _faiss().IndexHNSWFlat(params.dimension, params.m, metric)
    index.hnsw.efConstruction = params.ef_construction
    trial = min(_TRIAL_QUERIES, count // 4)
    queries = held.vectors[order[count - trial :]]
    most_ef = _widest_useful_beam(count, params.dimension)
    ef = None
    # If a quarter of the vectors needs more than half of the widest beam, all of them need more than the
    # widest beam.
    for end, limit in (((count - trial) // 4, most_ef // 2), (count - trial, most_ef)):
        for start in range(index.ntotal, end, _STEP):
            if cancelled():
                return None
            index.add(held.vectors[order[start : min(start + _STEP, end)]])
        ef = _sufficient_ef(index, held.squares[order[:end]], queries, params.metric, limit)
        if ef is None:
            return None
    assert ef is not None
    index.add(queries)
    # Only the copy in the graph's own storage is kept.
    owned = Vectors(held.rows[order], _stored(index), held.squares[order], held.largest)
    return Graph(index, params.metric, owned, ef)


def _widest_useful_beam(count: int, dimension: int) -> int:
    """The widest beam that is still faster than computing all distances (as measured)."""
    return max(_SMALLEST_EF, count // (16 + 6144 // dimension))


def _stored(index: Any) -> Matrix:
    """The vectors inside a graph, without a copy; valid while the graph lives and nothing is added."""
    storage = _faiss().downcast_index(index.storage)
    vectors: Matrix = _faiss().rev_swig_ptr(storage.get_xb(), index.ntotal * index.d)
    return vectors.reshape(index.ntotal, index.d)


def _sufficient_ef(index: Any, squares: Vector, queries: Matrix, metric: Metric, limit: int) -> int | None:
    """The smallest search beam up to ``limit`` that finds nearly all neighbours; None if there is none."""
    estimate = queries @ _stored(index).T
    if metric is Metric.L2:
        estimate = 2 * estimate - squares
    wanted = np.argpartition(-estimate, _TRIAL_NEIGHBOURS, axis=1)[:, :_TRIAL_NEIGHBOURS]
    ef = _SMALLEST_EF
    while ef <= max(limit, _SMALLEST_EF):
        _, found = index.search(queries, _TRIAL_NEIGHBOURS, params=_faiss().SearchParametersHNSW(efSearch=ef))
        hits = sum(len(np.intersect1d(a, b)) for a, b in zip(found, wanted, strict=True))
        if hits >= _TRIAL_RECALL * wanted.size:
            return ef
        ef *= 2
    return None


def _one_thread() -> None:
    """Limit OpenMP to one thread per calling thread: searches are short, and puts need the other cores."""
    if not getattr(_threads, "limited", False):
        _faiss().omp_set_num_threads(1)
        _threads.limited = True


class Buildable(Protocol):
    """An index whose sealed vectors get graphs."""

    params: VectorParams

    def next_without_graph(self) -> Vectors | None: ...
    def take_graph(self, held: Vectors, graph: Graph | None) -> None: ...


class GraphBuilder:
    """Builds graphs, one at a time per process, oldest request first.

    Its thread exists while there is work. It does not keep indexes alive: the graph of an index that was
    freed is abandoned.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[weakref.ref[Buildable]] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._idle = Bell()

    def request(self, index: Buildable) -> None:
        """Build the missing graphs of ``index`` soon."""
        with self._lock:
            self._queue.append(weakref.ref(index))
            if self._thread is None and not self._stopping:
                # A daemon thread, which atexit stops between two steps: it must not keep the process alive.
                thread = threading.Thread(target=self._run, name="lancewal-graphs", daemon=True)
                start_thread(thread)
                self._thread = thread

    def stop(self) -> None:
        """Abandon the work; wait for the current step."""
        if is_forked():
            return  # the work and the thread belong to the parent process
        with self._lock:
            self._stopping = True
        self._idle.wait_for(lambda: self._thread is None)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stopping or not self._queue:
                    self._thread = None
                    break
                reference = self._queue.popleft()
            self._build(reference)
        self._idle.ring()

    def _build(self, reference: weakref.ref[Buildable]) -> None:
        index = reference()
        held = None if index is None else index.next_without_graph()
        if index is None or held is None:
            return
        params = index.params
        del index
        graph = None
        try:
            graph = build_graph(held, params, lambda: self._stopping or reference() is None)
        except Exception:
            logger.exception(
                "a vector graph could not be built; its %d rows are searched exactly", len(held.rows)
            )
        index = reference()
        if index is not None and not self._stopping:
            index.take_graph(held, graph)


BUILDER = GraphBuilder()
atexit.register(BUILDER.stop)
