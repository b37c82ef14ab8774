"""What the indexes of a MemTable have in common: kinds, parameters, row positions and sorted runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.errors import InvalidInputError

#: Indexes keep positions in 32 bits.
MAX_ROWS = 2**31 - 1

RowPositions = npt.NDArray[np.int64]
RowMask = npt.NDArray[np.bool_]
_Scalar = TypeVar("_Scalar", bound=np.generic)


def already_in(rows: int, first_row: int, count: int) -> int:
    """How many leading rows of a batch are already in an index that holds ``rows`` rows.

    Replays and retries insert rows again, and these must not count twice. A gap is refused, because no
    search would find the rows in it.

    >>> already_in(10, 10, 5), already_in(12, 10, 5), already_in(20, 10, 5)
    (0, 2, 5)
    """
    if first_row > rows:
        raise InvalidInputError(
            f"rows are indexed in order: the index holds {rows} rows, the batch starts at row {first_row}"
        )
    if first_row + count > MAX_ROWS:
        raise InvalidInputError(f"an index holds at most {MAX_ROWS} rows; flush the MemTable before")
    return min(count, rows - first_row)


def not_yet_in(column: pa.Array, rows: int, first_row: int) -> pa.Array:
    """The values of ``column``, whose first is at ``first_row``, that an index with ``rows`` rows lacks."""
    known = already_in(rows, first_row, len(column))
    return column.slice(known) if known else column


def batches_not_yet_in(batches: Sequence[pa.RecordBatch], rows: int, first_row: int) -> list[pa.RecordBatch]:
    """Like :func:`not_yet_in`, for the rows of ``batches``, the first of which is at ``first_row``."""
    known = already_in(rows, first_row, sum(batch.num_rows for batch in batches))
    lacking = []
    for batch in batches:
        if known < batch.num_rows:
            lacking.append(batch.slice(known) if known else batch)
        known = max(0, known - batch.num_rows)
    return lacking


def checked_bound(bound: int, rows: int) -> int:
    """``bound``, but at most the number of indexed rows; the caller searches the rows above."""
    if bound < 0:
        raise InvalidInputError(f"a visible bound is a number of rows, not {bound}")
    return min(bound, rows)


def grown(array: npt.NDArray[_Scalar], used: int, needed: int) -> npt.NDArray[_Scalar]:
    """``array`` itself if ``needed`` rows fit, else a copy of at least twice its size.

    Readers of the old array are not disturbed: later writes go only to rows above every published bound.
    """
    if needed <= len(array):
        return array
    larger = np.empty((max(needed, 2 * len(array)), *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger


class _Run(Protocol):
    @property
    def rows(self) -> npt.NDArray[np.int32]: ...


_AnyRun = TypeVar("_AnyRun", bound=_Run)


def with_run(
    runs: tuple[_AnyRun, ...], new: _AnyRun, merged: Callable[[_AnyRun, _AnyRun], _AnyRun]
) -> tuple[_AnyRun, ...]:
    """``runs`` and ``new``, merged from the end until each is at least twice as long as the next.

    So a row is merged a logarithmic number of times, and a search reads few runs.
    """
    kept = [*runs, new]
    while len(kept) > 1 and len(kept[-2].rows) < 2 * len(kept[-1].rows):
        newest = kept.pop()
        kept[-1] = merged(kept[-1], newest)
    return tuple(kept)


class Metric(Enum):
    """The distance between two vectors, equal to Lance's ``_distance``; smaller is nearer."""

    #: The squared Euclidean distance.
    L2 = "l2"
    #: One minus the cosine of the angle; undefined for a zero vector, which is therefore never found.
    COSINE = "cosine"
    #: One minus the inner product.
    DOT = "dot"


@dataclass(frozen=True)
class BTreeParams:
    """The parameters of a BTree; none of them matters in memory."""


@dataclass(frozen=True)
class FullTextParams:
    """Tokenizer settings, with the names and defaults of Lance's inverted index."""

    base_tokenizer: str = "simple"
    language: str = "English"
    max_token_length: int | None = 40
    lower_case: bool = True
    stem: bool = True
    remove_stop_words: bool = True
    custom_stop_words: tuple[str, ...] | None = None
    ascii_folding: bool = True
    min_ngram_length: int = 3
    max_ngram_length: int = 3
    prefix_only: bool = False
    split_identifiers: bool = False
    split_on_numerics: bool = False
    preserve_original: bool = False
    index_operators: bool = False
    #: Positions allow phrase queries; this is a setting of the index, not of the tokenizer.
    with_position: bool = False

    def tokenizer_options(self) -> dict[str, Any]:
        """Keyword arguments for ``lance.tokenize``, and, with ``with_position``, for an inverted index."""
        options = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "with_position"}
        if self.custom_stop_words is not None:
            options["custom_stop_words"] = list(self.custom_stop_words)
        return options


@dataclass(frozen=True)
class VectorParams:
    """The parameters of a vector index: ``m`` links per row and level, a beam of ``ef_construction``."""

    dimension: int
    metric: Metric = Metric.L2
    m: int = 16
    ef_construction: int = 100


@dataclass(frozen=True)
class IndexSpec:
    """One index that MemTables maintain; the class of ``params`` tells its kind."""

    name: str
    column: str
    field_id: int
    params: BTreeParams | FullTextParams | VectorParams
