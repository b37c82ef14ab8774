"""Distances between vectors, equal to Lance's ``_distance``, and exact nearest rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.index.kinds import Metric, RowPositions

Matrix = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float32]
Local = npt.NDArray[np.intp]

#: Half the distance between 1 and the next float32: the relative error of one operation.
_ROUNDING = 2.0**-24


class Vectors(NamedTuple):
    """Rows with their vectors; for cosine the vectors are scaled to length one."""

    rows: npt.NDArray[np.int32]
    vectors: Matrix
    #: Squared lengths, and the largest of them.
    squares: Vector
    largest: float

    @property
    def memory_bytes(self) -> int:
        return self.rows.nbytes + self.vectors.nbytes + self.squares.nbytes


class Nearest(NamedTuple):
    """Rows, nearest first; rows at equal distances are in row order."""

    positions: RowPositions
    distances: Vector


NOTHING = Nearest(np.empty(0, np.int64), np.empty(0, np.float32))


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
