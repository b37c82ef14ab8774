"""Exact search for the nearest vectors, with distances that are equal to Lance's ``_distance``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format import one_array
from lancewal.index.kinds import Metric, RowMask, RowPositions

Matrix = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float32]
Local = npt.NDArray[np.intp]
#: Indexes keep positions in 32 bits.
RowNumbers = npt.NDArray[np.int32] | RowPositions

#: Half the distance between 1 and the next float32: the relative error of one operation.
_ROUNDING = 2.0**-24


class Vectors(NamedTuple):
    """Rows with their vectors; for cosine the vectors are scaled to length one."""

    rows: RowNumbers
    vectors: Matrix
    #: Squared lengths, and the largest of them.
    squares: Vector
    largest: float

    @classmethod
    def room(cls, rows: int, dimension: int) -> Vectors:
        """Arrays for this many vectors of a dimension, not filled yet."""
        vectors = np.empty((rows, dimension), np.float32)
        return cls(np.empty(rows, np.int32), vectors, np.empty(rows, np.float32), 0.0)

    @property
    def memory_bytes(self) -> int:
        return self.rows.nbytes + self.vectors.nbytes + self.squares.nbytes


#: A part of a column: the positions of its rows, their vectors, and a mask of the rows that may be found.
ColumnPart = tuple[RowPositions, pa.Array | pa.ChunkedArray, RowMask]


class Nearest(NamedTuple):
    """Rows, nearest first; rows at equal distances are in row order."""

    positions: RowPositions
    distances: Vector

    def cutoff(self, k: int) -> float:
        """The distance beyond which no row is among the ``k`` nearest of these and others."""
        return float(self.distances[-1]) if len(self.distances) >= k else np.inf


NOTHING = Nearest(np.empty(0, np.int64), np.empty(0, np.float32))


def is_vector(type_: pa.DataType) -> bool:
    """Whether a vector index can hold a column of this type."""
    return bool(pa.types.is_fixed_size_list(type_) and pa.types.is_floating(type_.value_type))


def matrix_of(column: pa.Array, dimension: int) -> Matrix:
    """The valid vectors of ``column``, one per row, without a copy if they are float32.

    A null inside a vector counts as 0, as Lance reads it.
    """
    if not is_vector(column.type) or column.type.list_size != dimension:
        raise InvalidInputError(f"the index holds vectors of dimension {dimension}, not {column.type}")
    numbers = column.flatten()
    if numbers.null_count:
        numbers = numbers.fill_null(pa.scalar(0, numbers.type))
    return np.asarray(numbers.to_numpy().reshape(-1, dimension), dtype=np.float32)


def checked_query(query: Any, dimension: int) -> Vector:
    """The query as float32; it must be a vector of finite numbers of that dimension."""
    if isinstance(query, (pa.Array, pa.ChunkedArray, pa.Scalar)):
        query = query.to_pylist() if not isinstance(query, pa.Scalar) else query.as_py()
    try:
        with np.errstate(over="ignore"):  # infinities are refused below
            vector = np.asarray(query, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"the query is not a vector of numbers: {error}") from error
    if vector.shape != (dimension,):
        raise InvalidInputError(f"the query has shape {vector.shape}, the column's vectors ({dimension},)")
    if not np.isfinite(vector).all():
        raise InvalidInputError(
            "the query vector contains NaN, an infinity, a null, or a number beyond 32 bits"
        )
    return vector


def prepared(rows: RowNumbers, matrix: Matrix, metric: Metric) -> tuple[Vectors, Vectors]:
    """Vectors in the form that segments hold, and odd ones, whose distances must be computed in full.

    A vector is odd if it has infinities or is so long that its squared length overflows.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("ij,ij->i", matrix, matrix)
    finite = np.isfinite(squares)
    none = Vectors.room(0, matrix.shape[1])
    if metric is Metric.COSINE:
        # A vector without a finite length above zero has no direction, hence no cosine.
        directed = finite & (squares > 0)
        if not directed.all():
            rows, matrix, squares = rows[directed], matrix[directed], squares[directed]
        units = matrix / np.sqrt(squares)[:, np.newaxis]
        return Vectors(rows, units, np.ones(len(rows), np.float32), 1.0), none
    if finite.all():
        return Vectors(rows, matrix, squares, 0.0), none
    # A vector with NaN has no distance.
    odd = ~finite & ~np.isnan(matrix).any(axis=1)
    return (
        Vectors(rows[finite], matrix[finite], squares[finite], 0.0),
        Vectors(rows[odd], matrix[odd], squares[odd], np.inf),
    )


def unit(vector: Vector) -> Vector | None:
    """The vector at length one; None for a zero vector, which has no direction."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return None if length == 0.0 else np.asarray(vector / length, dtype=np.float32)


def distances(metric: Metric, vectors: Matrix, query: Vector) -> Vector:
    """The distance of each vector, computed in full; NaN where it is undefined."""
    with np.errstate(over="ignore", invalid="ignore"):
        if metric is Metric.L2:
            apart = vectors - query
            result = np.einsum("ij,ij->i", apart, apart)
        else:
            result = np.float32(1.0) - np.einsum("ij,j->i", vectors, query)
    return np.asarray(result, dtype=np.float32)


def search_rows(part: ColumnPart, query: Any, k: int, metric: Metric, known: Nearest = NOTHING) -> Nearest:
    """The exact nearest rows of a part of a column without an index; ``known`` rows compete with them."""
    rows, column, allowed = part
    if not is_vector(column.type):
        raise InvalidInputError(f"vector search needs a column of float vectors, not {column.type}")
    vector: Vector | None = checked_query(query, column.type.list_size)
    if metric is Metric.COSINE and vector is not None:
        vector = unit(vector)
    if vector is None or not len(column):
        return known
    if not allowed.all():
        rows, column = rows[allowed], column.filter(pa.array(allowed))
    array = one_array(column)
    if array.null_count:
        rows = rows[array.is_valid().to_numpy(zero_copy_only=False)]
    usable, odd = prepared(rows, matrix_of(array, column.type.list_size), metric)
    held = usable._replace(largest=float(usable.squares.max(initial=0.0)))
    near = nearest_exactly(metric, held, vector, k, None, known.cutoff(k))
    return merged([known, near, ranked(metric, odd, vector, np.arange(len(odd.rows)), k)], k)


def nearest_exactly(
    metric: Metric, held: Vectors, query: Vector, k: int, among: Local | None, cutoff: float
) -> Nearest:
    """The ``k`` nearest of ``held`` (of its entries ``among``), as if all distances were computed.

    Inner products estimate the distances, and their rounding error is bounded. For all entries that could
    be among the nearest within that bound, the distances are computed in full. Entries farther than
    ``cutoff`` may be left out.
    """
    vectors, squares = held.vectors, held.squares
    if among is not None:
        # Gathering costs a copy: worth it when most entries are out.
        gather = 4 * len(among) < len(vectors)
        if gather:
            vectors, squares = vectors[among], squares[among]
    count = len(vectors) if among is None else len(among)
    if count == 0:
        return NOTHING
    with np.errstate(over="ignore", invalid="ignore"):
        # Not a BLAS product: its threads wait for each other for milliseconds on busy cores.
        estimate = np.vecdot(vectors, query)
        estimate *= np.float32(-2.0 if metric is Metric.L2 else -1.0)
        if metric is Metric.L2:
            estimate += squares
        shift = float(np.dot(query, query)) if metric is Metric.L2 else 1.0
        reach = (np.sqrt(held.largest) + np.sqrt(np.dot(query.astype(np.float64), query))) ** 2
        margin = 4 * (len(query) + 4) * _ROUNDING * float(reach)
    if among is not None and not gather:
        estimate = estimate[among]
    if np.isfinite(margin):
        limit = cutoff - shift + margin
        if not np.isfinite(cutoff) or np.count_nonzero(estimate <= limit) > 4 * k:
            limit = min(limit, float(np.partition(estimate, min(k, count) - 1)[min(k, count) - 1]) + margin)
        candidates = np.flatnonzero(estimate <= limit)
    else:
        candidates = np.arange(count)
    if among is not None:
        candidates = among[candidates]
    return ranked(metric, held, query, candidates, k)


def ranked(metric: Metric, held: Vectors, query: Vector, entries: Local, k: int) -> Nearest:
    """The ``k`` nearest of ``entries``, with their distances computed in full."""
    apart = distances(metric, held.vectors[entries], query)
    return nearest_of(held.rows[entries].astype(np.int64), apart, k)


def nearest_of(positions: RowPositions, apart: Vector, k: int) -> Nearest:
    """The ``k`` nearest of ``positions``; rows with an undefined distance are left out."""
    defined = ~np.isnan(apart)
    if not defined.all():
        positions, apart = positions[defined], apart[defined]
    order = np.lexsort((positions, apart))[:k]
    return Nearest(positions[order], apart[order])


def merged(parts: Sequence[Nearest], k: int) -> Nearest:
    """The ``k`` nearest of all ``parts``."""
    filled = [part for part in parts if len(part.positions)]
    if len(filled) <= 1:
        return filled[0] if filled else NOTHING
    positions, apart = (np.concatenate(arrays) for arrays in zip(*filled, strict=True))
    return nearest_of(positions, apart, k)
