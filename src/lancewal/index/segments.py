"""Segments: stretches of a vector column, one open and growing, the others sealed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.index.distance import Local, Matrix, Vectors
from lancewal.index.kinds import Metric
from lancewal.index.rows import RowMask, grown

if TYPE_CHECKING:
    from lancewal.index.graph import Graph

#: An exact search of this many numbers takes about a millisecond.
_SEGMENT_NUMBERS = 8 * 2**20
_SMALLEST_SEGMENT = 4096
_LARGEST_SEGMENT = 16_384
_FIRST_CAPACITY = 256


class Segment(NamedTuple):
    """Vectors of rows from ``first_row`` to below ``end_row``, those without a usable one excepted."""

    held: Vectors
    first_row: int
    end_row: int
    graph: Graph | None = None
    #: Whether it is decided that there is a graph, or that none is worth it.
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
            # The mask may end at the bound; what is above is out already.
            seen &= allowed[rows if self.end_row <= bound else np.where(seen, rows, 0)]
        entries: Local = np.flatnonzero(seen)
        return None if len(entries) == len(rows) else entries


class OpenSegment(NamedTuple):
    """Arrays with room to grow; the first ``length`` entries count."""

    room: Vectors
    length: int

    def cut(self) -> Segment:
        """What is in, as a segment to search or to seal."""
        length, (rows, vectors, squares, largest) = self.length, self.room
        held = Vectors(rows[:length], vectors[:length], squares[:length], largest)
        return Segment(held, int(rows[0]), int(rows[length - 1]) + 1) if length else Segment(held, 0, 0)

    def with_rows(self, new: Vectors, most: int) -> OpenSegment:
        """With ``new`` appended, which must fit into ``most`` rows.

        Readers of this segment are not disturbed: only entries above its length are written.
        """
        start, end = self.length, self.length + len(new.rows)
        rows, vectors, squares = (_with_room(array, start, end, most) for array in self.room[:3])
        for target, source in zip((rows, vectors, squares), new[:3], strict=True):
            target[start:end] = source
        largest = max(self.room.largest, float(new.squares.max()))
        return OpenSegment(Vectors(rows, vectors, squares, largest), end)


def open_segment(dimension: int) -> OpenSegment:
    """An empty one."""
    return OpenSegment(_room(_FIRST_CAPACITY, dimension), 0)


def no_vectors(dimension: int) -> Vectors:
    """None at all."""
    return _room(0, dimension)


def joined(first: Vectors, second: Vectors) -> Vectors:
    """Both, one after the other."""
    return Vectors(
        np.concatenate([first.rows, second.rows]),
        np.concatenate([first.vectors, second.vectors]),
        np.concatenate([first.squares, second.squares]),
        max(first.largest, second.largest),
    )


def segment_size(dimension: int) -> int:
    """How many vectors are searched exactly before they get a graph.

    >>> segment_size(128), segment_size(1024)
    (16384, 8192)
    """
    fitting = _SEGMENT_NUMBERS // max(dimension, 1)
    return min(_LARGEST_SEGMENT, max(_SMALLEST_SEGMENT, 1 << (fitting.bit_length() - 1)))


def is_vector(type_: pa.DataType) -> bool:
    """Can a vector index hold this column?"""
    return bool(pa.types.is_fixed_size_list(type_) and pa.types.is_floating(type_.value_type))


def matrix_of(column: pa.Array, dimension: int) -> Matrix:
    """The valid vectors of ``column``, one per line, without a copy where they are float32.

    A null inside a vector counts as 0, as Lance reads it.
    """
    if not is_vector(column.type) or column.type.list_size != dimension:
        raise InvalidInputError(f"the index holds vectors of dimension {dimension}, not {column.type}")
    numbers = column.flatten()
    if numbers.null_count:
        numbers = numbers.fill_null(pa.scalar(0, numbers.type))
    return np.asarray(numbers.to_numpy().reshape(-1, dimension), dtype=np.float32)


def prepared(rows: npt.NDArray[np.int32], matrix: Matrix, metric: Metric) -> tuple[Vectors, Vectors]:
    """Vectors as segments hold them, and odd ones that only a full computation can handle.

    Odd are infinities and vectors so long that their squared length overflows.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("ij,ij->i", matrix, matrix)
    finite = np.isfinite(squares)
    none = no_vectors(matrix.shape[1])
    if metric is Metric.COSINE:
        # Without a finite length above zero there is no direction, hence no cosine.
        directed = finite & (squares > 0)
        if not directed.all():
            rows, matrix, squares = rows[directed], matrix[directed], squares[directed]
        units = matrix / np.sqrt(squares)[:, np.newaxis]
        return Vectors(rows, units, np.ones(len(rows), np.float32), 1.0), none
    if finite.all():
        return Vectors(rows, matrix, squares, 0.0), none
    # NaN is at no distance from anything.
    odd = ~finite & ~np.isnan(matrix).any(axis=1)
    return (
        Vectors(rows[finite], matrix[finite], squares[finite], 0.0),
        Vectors(rows[odd], matrix[odd], squares[odd], np.inf),
    )


def _room(rows: int, dimension: int) -> Vectors:
    vectors = np.empty((rows, dimension), np.float32)
    return Vectors(np.empty(rows, np.int32), vectors, np.empty(rows, np.float32), 0.0)


def _with_room(array: npt.NDArray[Any], used: int, needed: int, most: int) -> npt.NDArray[Any]:
    if needed <= len(array):
        return array
    if 2 * len(array) <= most and needed <= most:
        return grown(array, used, needed)
    larger = np.empty((most, *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger
