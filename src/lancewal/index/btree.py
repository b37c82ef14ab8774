"""BTreeIndex: rows by value, for equality, sets, ranges and nulls.

New rows go to a short tail, which a search scans. A full tail is sorted into a run, and
neighbouring runs are merged so that their sizes grow geometrically. One thread appends, many search:
everything that a search reads hangs on one attribute that is replaced as a whole, so a search sees the state
before an insertion or after it.

Values become keys that sort as Lance's filters compare them. Numbers, booleans, dates and times
become 64-bit integers; text and binary stay bytes. Floats follow Lance: -0.0 equals 0.0, NaN lies
above infinity (and NaN with a sign below negative infinity), every NaN equals itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.errors import InvalidInputError
from lancewal.index.kinds import RowPositions, grown, not_yet_in, with_run


class BTreeIndex:
    """The sorted values of one column.

    Tombstones have NULL in all columns but the key, so :meth:`nulls` returns them too. The caller must drop
    dead rows, as with every index.

    >>> index = BTreeIndex(pa.int64())
    >>> index.insert(pa.array([30, 10, None, 20]), 0)
    >>> found = (index.between(10, 20), index.nulls(), index.equal_to([30]))
    >>> [rows.below(4).tolist() for rows in found]
    [[1, 3], [2], [0]]
    """

    def __init__(self, type_: pa.DataType) -> None:
        if not is_supported(type_):
            raise InvalidInputError(f"a BTree index cannot hold values of type {type_}")
        self.type = type_
        self._runs: SortedRuns = NumberRuns() if is_number_like(type_) else BytesRuns()
        self._nulls = np.empty(0, np.int32)
        self._null_count = 0
        #: Rows below this position are in the index.
        self.rows = 0

    @property
    def memory_bytes(self) -> int:
        return self._runs.memory_bytes + self._nulls.nbytes

    def insert(self, column: pa.Array, first_row: int) -> None:
        """Add the values of ``column``, the first of which is at ``first_row``."""
        if column.type != self.type:
            raise InvalidInputError(f"the index holds {self.type}, the batch {column.type}")
        column = not_yet_in(column, self.rows, first_row)
        if not len(column):
            return
        end = self.rows + len(column)
        rows = np.arange(self.rows, end, dtype=np.int32)
        missing = rows[:0]
        if column.null_count:
            valid = column.is_valid().to_numpy(zero_copy_only=False)
            missing, rows, column = rows[~valid], rows[valid], column.drop_null()
        null_count = self._null_count + len(missing)
        nulls = grown(self._nulls, self._null_count, null_count)
        nulls[self._null_count : null_count] = missing
        # Append to the runs last: they take all values or none, and nothing can fail after them.
        if len(rows):
            self._runs.append(column, rows)
        self._nulls, self._null_count, self.rows = nulls, null_count, end

    def equal_to(self, values: Any) -> Matches:
        """All rows with one of ``values``, except NULL."""
        wanted = values_array(values, self.type).drop_null().unique()
        return Matches(self._runs.equal_to(wanted) if len(wanted) else [])

    def between(
        self, low: Any = None, high: Any = None, low_inclusive: bool = True, high_inclusive: bool = True
    ) -> Matches:
        """All rows with a value between ``low`` and ``high``; None leaves a side open."""
        least = None if low is None else values_array([low], self.type)
        greatest = None if high is None else values_array([high], self.type)
        return Matches(self._runs.between(Range(least, greatest, low_inclusive, high_inclusive)))

    def nulls(self) -> Matches:
        """All rows without a value."""
        # Read the count first: the array, read after it, holds at least as many.
        count = self._null_count
        return Matches([self._nulls[:count]])


@dataclass(frozen=True)
class Matches:
    """Found rows in the order of the index: counting them is free, sorting them is not."""

    parts: Sequence[npt.NDArray[np.int32]]

    def __len__(self) -> int:
        """How many rows there are, without regard to a bound."""
        return sum(map(len, self.parts))

    def below(self, bound: int) -> RowPositions:
        """The rows below ``bound``, in order."""
        if not self.parts:
            return np.empty(0, np.int64)
        rows = self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)
        return np.sort(rows[rows < bound]).astype(np.int64)


def is_supported(type_: pa.DataType) -> bool:
    """Whether a BTree index can hold values of this type."""
    return is_number_like(type_) or is_bytes_like(type_)


NumberKeys = npt.NDArray[np.int64]

#: Type ids, because every batch is checked, and Arrow's own predicates take a microsecond together.
_MOMENTS = frozenset(
    type_.id
    for type_ in (
        *(pa.date32(), pa.date64(), pa.time32("s"), pa.time64("us")),
        *(pa.timestamp("us"), pa.duration("us")),
    )
)
_SIGN = np.uint64(1 << 63)
_MAGNITUDE = np.int64(2**63 - 1)


def is_number_like(type_: pa.DataType) -> bool:
    """Whether the type is an integer, float, boolean, date, time, timestamp or duration."""
    types = pa.types
    return bool(
        types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_) or _is_moment(type_)
    )


def is_bytes_like(type_: pa.DataType) -> bool:
    """Whether the type is text or binary, of any offset width."""
    return type_ in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()) or bool(
        pa.types.is_fixed_size_binary(type_) and not pa.types.is_decimal(type_)
    )


def number_keys(array: pa.Array) -> NumberKeys:
    """One integer per value; ``array`` must have no nulls.

    >>> number_keys(pa.array([-1.0, -0.0, 0.0])).tolist()[1:]
    [0, 0]
    """
    type_ = array.type
    if _is_moment(type_):
        array = array.view(pa.int32() if type_.bit_width == 32 else pa.int64())
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    if values.dtype.kind == "f":
        # Adding zero turns -0.0 into 0.0 and changes nothing else.
        bits = (values.astype(np.float64) + 0.0).view(np.int64)
        return bits ^ ((bits >> 63) & _MAGNITUDE)
    if values.dtype == np.uint64:
        return (values ^ _SIGN).view(np.int64)
    return values.astype(np.int64, copy=False)


def bytes_keys(array: pa.Array) -> pa.LargeBinaryArray:
    """The values as binary with 64-bit offsets, so that runs of any size can be concatenated."""
    return array.cast(pa.binary()).cast(pa.large_binary())


def values_array(values: Any, type_: pa.DataType) -> pa.Array:
    """Convert Python values, or an array of any type that casts without loss, to the column's type."""
    try:
        if isinstance(values, (pa.Array, pa.ChunkedArray)):
            column = values.cast(type_)
            return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        plain = [v.as_py() if isinstance(v, pa.Scalar) else v for v in values]
        if pa.types.is_integer(type_) and any(isinstance(v, float) for v in plain):
            # Arrow would silently truncate 1.5 to 1.
            return pa.array(plain, pa.float64()).cast(type_)
        return pa.array(plain, type_)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise InvalidInputError(f"not a value of the column's type {type_}: {error}") from error


def _is_moment(type_: pa.DataType) -> bool:
    return type_.id in _MOMENTS


Rows = npt.NDArray[np.int32]

#: Every search scans the tail: long enough to make sorting rare, short enough to scan in microseconds.
NUMBER_TAIL = 4096
NUMBER_FRESH = 256
BYTES_TAIL = 1024
#: Overhead of a column slice in a tail: Python and Arrow objects; the values belong to the MemTable.
_CHUNK_BYTES = 256


@dataclass(frozen=True)
class Range:
    """Values between two ends; each end is an array of one value, or None."""

    low: pa.Array | None
    high: pa.Array | None
    low_inclusive: bool = True
    high_inclusive: bool = True


class SortedRuns(Protocol):
    """The pairs of value and row behind a BTree; found rows are not sorted."""

    @property
    def memory_bytes(self) -> int: ...
    def append(self, column: pa.Array, rows: Rows) -> None: ...
    def equal_to(self, values: pa.Array) -> list[Rows]: ...
    def between(self, wanted: Range) -> list[Rows]: ...


class _NumberRun(NamedTuple):
    keys: NumberKeys
    rows: Rows

    @property
    def memory_bytes(self) -> int:
        return self.keys.nbytes + self.rows.nbytes


class _NumberState(NamedTuple):
    runs: tuple[_NumberRun, ...]
    tail: _NumberRun
    tail_length: int
    #: Columns as they came, not yet turned into keys: most batches are small. Grows in place.
    fresh: list[tuple[pa.Array, Rows]]
    fresh_length: int
    fresh_rows: int


class NumberRuns:
    """Pairs whose values are :func:`number_keys`."""

    def __init__(self) -> None:
        self._state = _NumberState((), _empty_number_tail(), 0, [], 0, 0)
        self._run_bytes = 0

    @property
    def memory_bytes(self) -> int:
        state = self._state
        return self._run_bytes + state.tail.memory_bytes + state.fresh_length * _CHUNK_BYTES

    def append(self, column: pa.Array, rows: Rows) -> None:
        runs, tail, start, fresh, length, fresh_rows = self._state
        fresh[length:] = [(column, rows)]  # in place of what a failed insertion left
        state = _NumberState(runs, tail, start, fresh, length + 1, fresh_rows + len(rows))
        if state.fresh_rows <= NUMBER_FRESH:
            self._state = state
            return
        keys, rows = _fresh_pairs(state)
        end = start + len(keys)
        if end <= NUMBER_TAIL:
            tail.keys[start:end] = keys
            tail.rows[start:end] = rows
            self._state = _NumberState(runs, tail, end, [], 0, 0)
            return
        keys = np.concatenate([tail.keys[:start], keys])
        run = _sorted_numbers(keys, np.concatenate([tail.rows[:start], rows]))
        runs = with_run(runs, run, _merged_numbers)
        self._run_bytes = sum(r.memory_bytes for r in runs)
        # Searches may still read the old tail, so the next tail is a new array.
        self._state = _NumberState(runs, _empty_number_tail(), 0, [], 0, 0)

    def equal_to(self, values: pa.Array) -> list[Rows]:
        state = self._state
        wanted = np.sort(number_keys(values))
        found = []
        for run in state.runs:
            starts = run.keys.searchsorted(wanted, "left")
            ends = run.keys.searchsorted(wanted, "right")
            if len(wanted) == 1:
                found.append(run.rows[starts[0] : ends[0]])
            else:
                found.append(run.rows[_ranges(starts, ends - starts)])
        for keys, rows in _unsorted(state):
            found.append(rows[keys == wanted[0] if len(wanted) == 1 else np.isin(keys, wanted)])
        return found

    def between(self, wanted: Range) -> list[Rows]:
        state = self._state
        low = None if wanted.low is None else number_keys(wanted.low)[0]
        high = None if wanted.high is None else number_keys(wanted.high)[0]
        found = []
        for run in state.runs:
            start = 0 if low is None else run.keys.searchsorted(low, _low_side(wanted))
            end = None if high is None else run.keys.searchsorted(high, _high_side(wanted))
            found.append(run.rows[start:end])
        for keys, rows in _unsorted(state):
            inside = np.ones(len(keys), np.bool_)
            if low is not None:
                inside &= keys >= low if wanted.low_inclusive else keys > low
            if high is not None:
                inside &= keys <= high if wanted.high_inclusive else keys < high
            found.append(rows[inside])
        return found


class _BytesRun(NamedTuple):
    keys: pa.LargeBinaryArray
    rows: Rows

    @property
    def memory_bytes(self) -> int:
        return int(self.keys.nbytes) + self.rows.nbytes


class _BytesState(NamedTuple):
    runs: tuple[_BytesRun, ...]
    #: Grows in place; a search takes the first ``tail_length`` entries.
    tail: list[tuple[pa.Array, Rows]]
    tail_length: int
    tail_rows: int


class BytesRuns:
    """Pairs whose values are text or binary, compared byte by byte."""

    def __init__(self) -> None:
        self._state = _BytesState((), [], 0, 0)
        self._run_bytes = 0

    @property
    def memory_bytes(self) -> int:
        return self._run_bytes + self._state.tail_length * _CHUNK_BYTES

    def append(self, column: pa.Array, rows: Rows) -> None:
        runs, tail, length, tail_rows = self._state
        tail[length:] = [(column, rows)]  # in place of what a failed insertion left
        state = _BytesState(runs, tail, length + 1, tail_rows + len(rows))
        if state.tail_rows <= BYTES_TAIL:
            self._state = state
            return
        runs = with_run(runs, _sorted_bytes(*_tail_pairs(state)), _merged_bytes)
        self._run_bytes = sum(r.memory_bytes for r in runs)
        self._state = _BytesState(runs, [], 0, 0)

    def equal_to(self, values: pa.Array) -> list[Rows]:
        state = self._state
        keys = bytes_keys(values)
        wanted = sorted(keys.to_pylist())
        found = []
        for run in state.runs:
            for value in wanted:
                start = bisect_left(run.keys, value, key=_as_bytes)
                found.append(run.rows[start : bisect_right(run.keys, value, start, key=_as_bytes)])
        if state.tail_length:
            tail, rows = _tail_pairs(state)
            found.append(rows[_mask(pc.is_in(tail, value_set=keys))])
        return found

    def between(self, wanted: Range) -> list[Rows]:
        state = self._state
        low = None if wanted.low is None else bytes_keys(wanted.low)[0]
        high = None if wanted.high is None else bytes_keys(wanted.high)[0]
        found = []
        low_bisect = bisect_left if wanted.low_inclusive else bisect_right
        high_bisect = bisect_right if wanted.high_inclusive else bisect_left
        for run in state.runs:
            start = 0 if low is None else low_bisect(run.keys, low.as_py(), key=_as_bytes)
            end = None if high is None else high_bisect(run.keys, high.as_py(), key=_as_bytes)
            found.append(run.rows[start:end])
        if state.tail_length:
            tail, rows = _tail_pairs(state)
            inside = np.ones(len(rows), np.bool_)
            if low is not None:
                inside &= _mask((pc.greater_equal if wanted.low_inclusive else pc.greater)(tail, low))
            if high is not None:
                inside &= _mask((pc.less_equal if wanted.high_inclusive else pc.less)(tail, high))
            found.append(rows[inside])
        return found


def _sorted_numbers(keys: NumberKeys, rows: Rows) -> _NumberRun:
    # Stable sorting is a linear merge where the input is already two sorted runs.
    order = np.argsort(keys, kind="stable")
    return _NumberRun(keys[order], rows[order])


def _merged_numbers(first: _NumberRun, second: _NumberRun) -> _NumberRun:
    return _sorted_numbers(
        np.concatenate([first.keys, second.keys]), np.concatenate([first.rows, second.rows])
    )


def _sorted_bytes(keys: pa.LargeBinaryArray, rows: Rows) -> _BytesRun:
    order = pc.array_sort_indices(keys)
    return _BytesRun(keys.take(order), rows[order.to_numpy()])


def _merged_bytes(first: _BytesRun, second: _BytesRun) -> _BytesRun:
    return _sorted_bytes(
        pa.concat_arrays([first.keys, second.keys]), np.concatenate([first.rows, second.rows])
    )


def _tail_pairs(state: _BytesState) -> tuple[pa.LargeBinaryArray, Rows]:
    chunks = state.tail[: state.tail_length]
    keys = bytes_keys(pa.concat_arrays([column for column, _ in chunks]))
    return keys, np.concatenate([rows for _, rows in chunks])


def _unsorted(state: _NumberState) -> Iterator[_NumberRun]:
    """The pairs that are in no run yet."""
    length = state.tail_length
    yield _NumberRun(state.tail.keys[:length], state.tail.rows[:length])
    if state.fresh_length:
        yield _fresh_pairs(state)


def _fresh_pairs(state: _NumberState) -> _NumberRun:
    chunks = state.fresh[: state.fresh_length]
    keys = number_keys(pa.concat_arrays([column for column, _ in chunks]))
    return _NumberRun(keys, np.concatenate([rows for _, rows in chunks]))


def _empty_number_tail() -> _NumberRun:
    return _NumberRun(np.empty(NUMBER_TAIL, np.int64), np.empty(NUMBER_TAIL, np.int32))


def _ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The numbers of several ranges, concatenated."""
    offsets = np.cumsum(lengths) - lengths
    numbers: npt.NDArray[np.int64] = np.arange(int(lengths.sum())) + np.repeat(starts - offsets, lengths)
    return numbers


def _low_side(wanted: Range) -> Any:
    return "left" if wanted.low_inclusive else "right"


def _high_side(wanted: Range) -> Any:
    return "right" if wanted.high_inclusive else "left"


def _as_bytes(scalar: pa.Scalar) -> Any:
    return scalar.as_py()


def _mask(array: pa.Array) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = array.to_numpy(zero_copy_only=False)
    return mask
