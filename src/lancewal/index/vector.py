"""VectorIndex: the nearest rows, by exact search if that is fast, otherwise by graphs.

New vectors go to an open segment that is searched exactly. A full segment is sealed, and a graph is built
for it in the background. Searches are exact until the graph is done, and then use it. An insertion never
waits for a graph, and every row can be found from its insertion on.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.index.exact import (
    NOTHING,
    Local,
    Nearest,
    Vector,
    Vectors,
    checked_query,
    matrix_of,
    merged,
    nearest_exactly,
    prepared,
    ranked,
    unit,
)
from lancewal.index.graph import BUILDER, Graph
from lancewal.index.kinds import Metric, RowMask, VectorParams, checked_bound, grown, not_yet_in
from lancewal.storage import Bell

#: An exact search of this many numbers takes about a millisecond.
_SEGMENT_NUMBERS = 8 * 2**20
_SMALLEST_SEGMENT = 4096
_LARGEST_SEGMENT = 16_384
_FIRST_CAPACITY = 256


class Segment(NamedTuple):
    """The usable vectors of the rows from ``first_row`` to below ``end_row``."""

    held: Vectors
    first_row: int
    end_row: int
    graph: Graph | None = None
    #: Whether the segment has its graph, or stays without one.
    settled: bool = False

    @property
    def memory_bytes(self) -> int:
        return self.graph.memory_bytes if self.graph else self.held.memory_bytes

    def visible(self, bound: int, allowed: RowMask | None) -> Local | None:
        """The entries of rows below ``bound`` that ``allowed`` permits; None for all entries."""
        if self.end_row <= bound and allowed is None:
            return None
        if self.first_row >= bound:
            return np.empty(0, np.intp)
        rows = self.held.rows
        seen = rows < bound
        if allowed is not None:
            # The mask may end at the bound, so rows above, which are excluded already, must not index it.
            seen &= allowed[rows if self.end_row <= bound else np.where(seen, rows, 0)]
        entries: Local = np.flatnonzero(seen)
        return None if len(entries) == len(rows) else entries


class OpenSegment(NamedTuple):
    """Arrays with room to grow; only the first ``length`` entries are valid."""

    room: Vectors
    length: int

    def cut(self) -> Segment:
        """The entries so far, as a segment to search or to seal."""
        length, (rows, vectors, squares, largest) = self.length, self.room
        held = Vectors(rows[:length], vectors[:length], squares[:length], largest)
        return Segment(held, int(rows[0]), int(rows[length - 1]) + 1) if length else Segment(held, 0, 0)

    def with_rows(self, new: Vectors, most: int) -> OpenSegment:
        """This segment with ``new`` appended; together they must fit into ``most`` rows.

        Readers of this segment are not disturbed: only entries above its length are written.
        """
        start, end = self.length, self.length + len(new.rows)
        rows, vectors, squares = (_with_room(array, start, end, most) for array in self.room[:3])
        for target, source in zip((rows, vectors, squares), new[:3], strict=True):
            target[start:end] = source
        largest = max(self.room.largest, float(new.squares.max()))
        return OpenSegment(Vectors(rows, vectors, squares, largest), end)


def open_segment(dimension: int) -> OpenSegment:
    """An empty open segment."""
    return OpenSegment(Vectors.room(_FIRST_CAPACITY, dimension), 0)


def joined(first: Vectors, second: Vectors) -> Vectors:
    """The vectors of both, one after the other."""
    return Vectors(
        np.concatenate([first.rows, second.rows]),
        np.concatenate([first.vectors, second.vectors]),
        np.concatenate([first.squares, second.squares]),
        max(first.largest, second.largest),
    )


def segment_size(dimension: int) -> int:
    """How many vectors a segment holds before it is sealed and gets a graph.

    >>> segment_size(128), segment_size(1024)
    (16384, 8192)
    """
    fitting = _SEGMENT_NUMBERS // max(dimension, 1)
    return min(_LARGEST_SEGMENT, max(_SMALLEST_SEGMENT, 1 << (fitting.bit_length() - 1)))


def _with_room(array: npt.NDArray[Any], used: int, needed: int, most: int) -> npt.NDArray[Any]:
    if needed <= len(array):
        return array
    if 2 * len(array) <= most and needed <= most:
        return grown(array, used, needed)
    larger = np.empty((most, *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger


#: Below this share of allowed rows, comparing just those is faster than searching the graph over all.
_GRAPH_SHARE = 0.25


class _State(NamedTuple):
    sealed: tuple[Segment, ...]
    open: OpenSegment
    #: Vectors whose distances cannot be estimated.
    odd: Vectors


class VectorIndex:
    """The vectors of one column.

    Null vectors are never found. As in Lance, vectors with an undefined distance are never found either:
    vectors with NaN, and zero vectors under cosine.

    >>> index = VectorIndex(VectorParams(2, Metric.L2))
    >>> column = pa.array([[0, 0], None, [3, 4]], pa.list_(pa.float32(), 2))
    >>> index.insert(column, 0)
    >>> index.search([0, 1], 2, bound=3)
    Nearest(positions=array([0, 2]), distances=array([ 1., 18.], dtype=float32))
    """

    def __init__(self, params: VectorParams, *, segment_rows: int | None = None) -> None:
        self.params = params
        self._segment_rows = segment_rows or segment_size(params.dimension)
        self._state = _State((), open_segment(params.dimension), Vectors.room(0, params.dimension))
        #: Rows below this position are in the index.
        self.rows = 0
        self._sealed_bytes = 0
        # Guards the replacement of the state, by the inserting thread and by the builder.
        self._lock = threading.Lock()
        self._settled = Bell()

    @property
    def memory_bytes(self) -> int:
        state = self._state
        return self._sealed_bytes + state.open.room.memory_bytes + state.odd.memory_bytes

    def insert(self, column: pa.Array, first_row: int) -> None:
        """Add the vectors of ``column``, the first of which is at ``first_row``."""
        column = not_yet_in(column, self.rows, first_row)
        if not len(column):
            return
        matrix = matrix_of(column, self.params.dimension)
        rows = np.arange(self.rows, self.rows + len(column), dtype=np.int32)
        if column.null_count:
            rows = rows[column.is_valid().to_numpy(zero_copy_only=False)]
        usable, odd = prepared(rows, matrix, self.params.metric)
        with self._lock:
            sealed_before = len(self._state.sealed)
            # One assignment: a search sees the whole batch or none of it, and a failure changes nothing.
            self._state = state = self._with_rows(self._state, usable, odd)
            self._sealed_bytes = _sealed_bytes(state)
            self.rows += len(column)
        for _ in state.sealed[sealed_before:]:
            BUILDER.request(self)

    def search(
        self,
        query: Any,
        k: int,
        bound: int,
        allowed: RowMask | None = None,
        *,
        exact: bool = False,
    ) -> Nearest:
        """The ``k`` nearest rows below ``bound`` that ``allowed`` (a mask by row) permits.

        The result is shorter if there are fewer. With ``exact`` the graphs are not used. A zero query under
        cosine has no nearest rows.
        """
        if k <= 0:
            raise InvalidInputError(f"the number of neighbours asked for must be positive, not {k}")
        bound = checked_bound(bound, self.rows)
        vector: Vector | None = checked_query(query, self.params.dimension)
        if self.params.metric is Metric.COSINE and vector is not None:
            vector = unit(vector)
        if vector is None:
            return NOTHING
        state = self._state
        found, without_graph = [], []
        for segment in (*state.sealed, state.open.cut()):
            among = segment.visible(bound, allowed)
            near = self._by_graph(segment, vector, k, among) if segment.graph and not exact else None
            if near is None:
                without_graph.append((segment, among))
            else:
                found.append(near)
        if len(state.odd.rows):
            found.append(self._odd(state.odd, vector, k, bound, allowed))
        best = merged(found, k)
        for segment, among in without_graph:
            near = nearest_exactly(self.params.metric, segment.held, vector, k, among, best.cutoff(k))
            best = merged([best, near], k)
        return best

    @property
    def graphs_pending(self) -> int:
        """Sealed segments that wait for their graph; they are searched exactly until then."""
        return sum(not segment.settled for segment in self._state.sealed)

    def wait_for_graphs(self, timeout: float | None = None) -> bool:
        """Wait until no sealed segment waits for its graph; False if that took too long."""
        return self._settled.wait_for(lambda: self.graphs_pending == 0, timeout)

    def next_without_graph(self) -> Vectors | None:
        """The sealed vectors of the next graph; called by the builder."""
        return next((segment.held for segment in self._state.sealed if not segment.settled), None)

    def take_graph(self, held: Vectors, graph: Graph | None) -> None:
        """Take the graph of the vectors ``held``, or None if they stay without one; called by the builder."""
        with self._lock:
            sealed = tuple(
                segment._replace(graph=graph, settled=True, held=graph.held if graph else held)
                if segment.held is held
                else segment
                for segment in self._state.sealed
            )
            self._state = state = self._state._replace(sealed=sealed)
            self._sealed_bytes = _sealed_bytes(state)
        self._settled.ring()

    def _by_graph(self, segment: Segment, query: Vector, k: int, among: Local | None) -> Nearest | None:
        """The nearest rows by the segment's graph; None if an exact search is better."""
        graph, count = segment.graph, len(segment.held.rows)
        assert graph is not None
        share = 1.0 if among is None else len(among) / count
        beam = max(round(graph.ef / max(share, _GRAPH_SHARE)), 2 * k)
        if share < _GRAPH_SHARE or beam > count // 8:
            return None
        mask = None
        if among is not None:
            mask = np.zeros(count, np.bool_)
            mask[among] = True
        near = graph.search(query, k, beam, mask)
        complete = len(near.positions) == min(k, count if among is None else len(among))
        return near if complete else None

    def _odd(self, odd: Vectors, query: Vector, k: int, bound: int, allowed: RowMask | None) -> Nearest:
        among = Segment(odd, 0, self.rows + 1).visible(bound, allowed)
        entries = np.arange(len(odd.rows)) if among is None else among
        return ranked(self.params.metric, odd, query, entries, k)

    def _with_rows(self, state: _State, new: Vectors, odd: Vectors) -> _State:
        sealed, opened = list(state.sealed), state.open
        taken = 0
        while taken < len(new.rows):
            piece = slice(taken, taken + self._segment_rows - opened.length)
            part = Vectors(new.rows[piece], new.vectors[piece], new.squares[piece], new.largest)
            opened = opened.with_rows(part, self._segment_rows)
            taken += len(part.rows)
            if opened.length == self._segment_rows:
                sealed.append(opened.cut())
                opened = open_segment(self.params.dimension)
        return _State(tuple(sealed), opened, joined(state.odd, odd) if len(odd.rows) else state.odd)


def _sealed_bytes(state: _State) -> int:
    return sum(segment.memory_bytes for segment in state.sealed)
