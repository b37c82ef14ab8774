"""Row positions of a MemTable as indexes take them: in order, each once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from lancewal.errors import InvalidInputError

#: Indexes keep positions in 32 bits.
MAX_ROWS = 2**31 - 1

RowPositions = npt.NDArray[np.int64]
RowMask = npt.NDArray[np.bool_]
_Scalar = TypeVar("_Scalar", bound=np.generic)


def already_in(rows: int, first_row: int, count: int) -> int:
    """How many leading rows of a batch an index that holds ``rows`` rows has already.

    Replays and retries hand in rows again; they must not count twice. A gap would
    leave rows unfindable, so it is refused.

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


def checked_bound(bound: int, rows: int) -> int:
    """``bound`` cut to what is indexed; the caller searches rows above by itself."""
    if bound < 0:
        raise InvalidInputError(f"a visible bound is a number of rows, not {bound}")
    return min(bound, rows)


def grown(array: npt.NDArray[_Scalar], used: int, needed: int) -> npt.NDArray[_Scalar]:
    """``array`` itself if ``needed`` rows fit, else a copy of at least twice its size.

    A reader that holds the old array goes on reading what it saw: only rows above
    every published bound are written afterwards.
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

    A row is merged a logarithmic number of times, and a search meets few runs.
    """
    kept = [*runs, new]
    while len(kept) > 1 and len(kept[-2].rows) < 2 * len(kept[-1].rows):
        newest = kept.pop()
        kept[-1] = merged(kept[-1], newest)
    return tuple(kept)
