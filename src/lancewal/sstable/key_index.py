"""The order of an SSTable's rows by key, and the index ``_pk_index`` from keys to row offsets.

A lookup reads only the pages of the index that may hold its keys.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from lance.file import LanceFileReader

from lancewal.base import lance_errors
from lancewal.errors import InvalidInputError, StorageError
from lancewal.format import BloomFilter, can_rule_out, key_columns, key_hashes, key_values, numbers, one_array
from lancewal.sstable.notes import SsTableNotes, checksum
from lancewal.storage import Shelf, layout, ordered_map

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class KeyOrder:
    """Distinct keys in ascending order, each with its newest row.

    ``newest`` is a mask of the newest rows; ``None`` means that all rows are.
    """

    values: pa.Array
    rows: Rows
    newest: Mask | None

    @classmethod
    def of(cls, columns: Sequence[pa.Array | pa.ChunkedArray]) -> KeyOrder:
        """The order of rows in which a later row replaces an earlier row of the same key.

        >>> order = KeyOrder.of([pa.array([7, 3, 7])])
        >>> order.values.to_pylist(), order.rows.tolist(), order.newest.tolist()
        ([3, 7], [1, 2], [False, True, True])
        """
        values = key_values(columns)
        if values.null_count:
            raise InvalidInputError(f"{values.null_count} rows have a null primary key; a key has a value")
        if _strictly_ascending(values):
            return cls(values, np.arange(len(values)), None)
        order = _stable_argsort(values)
        values = values.take(pa.array(order))
        last_of_key = _differs_from_next(values)
        if last_of_key.all():
            return cls(values, order, None)
        rows = order[last_of_key]
        newest = np.zeros(len(order), np.bool_)
        newest[rows] = True
        return cls(values.filter(pa.array(last_of_key)), rows, newest)

    def offsets(self) -> Rows:
        """The position of each key's newest row after all older rows are dropped."""
        if self.newest is None:
            return self.rows
        return (np.cumsum(self.newest, dtype=np.int64) - 1)[self.rows]


def _strictly_ascending(values: pa.Array) -> bool:
    return len(values) < 2 or bool(pc.all(pc.less(values[:-1], values[1:])).as_py())


def _stable_argsort(values: pa.Array) -> Rows:
    if pa.types.is_integer(values.type):
        return np.argsort(numbers(values), kind="stable").astype(np.int64, copy=False)
    # Arrow's sort is stable too.
    return np.asarray(pc.sort_indices(values).to_numpy(), np.int64)


def _differs_from_next(values: pa.Array) -> Mask:
    differs = np.ones(len(values), np.bool_)
    differs[:-1] = pc.not_equal(values[:-1], values[1:]).to_numpy(zero_copy_only=False)
    return differs


ABSENT = -1

#: Lance's default, for files that do not state their page size.
_DEFAULT_PAGE_ROWS = 4096
#: From this many keys on, one pass over a page is cheaper than a search for each key.
_HASHED_SEARCH_KEYS = 8


@dataclass(frozen=True)
class _Page:
    """Keys in ascending order, older versions of a key before newer ones."""

    values: pa.Array
    offsets: Rows

    @cached_property
    def numbers(self) -> npt.NDArray[Any] | None:
        """The keys for numpy's search; ``None`` if they are not integers."""
        return numbers(self.values) if pa.types.is_integer(self.values.type) else None

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes) + self.offsets.nbytes

    def find(self, keys: pa.Array) -> Rows:
        places = self._places(keys)
        found = places != ABSENT
        return np.where(found, self.offsets[np.where(found, places, 0)], ABSENT)

    def _places(self, keys: pa.Array) -> Rows:
        """The last position of every key; ``ABSENT`` for a key that is not in the page."""
        if self.numbers is not None:
            wanted = numbers(keys)
            places = np.searchsorted(self.numbers, wanted, side="right") - 1
            return np.where((places >= 0) & (self.numbers[places] == wanted), places, ABSENT)
        if len(keys) < _HASHED_SEARCH_KEYS:
            return np.array([self._place(key) for key in keys.to_pylist()], np.int64)
        distinct = keys.dictionary_encode()
        hits = pc.index_in(self.values, value_set=distinct.dictionary)
        here = np.flatnonzero(hits.is_valid().to_numpy(zero_copy_only=False))
        places = np.full(len(distinct.dictionary), ABSENT, np.int64)
        # Positions ascend, so the last version of a key overwrites the others.
        places[hits.take(pa.array(here)).to_numpy()] = here
        return np.asarray(places[distinct.indices.to_numpy()])

    def _place(self, key: Any) -> int:
        place = bisect_right(self.values, key, key=_as_py) - 1
        return place if place >= 0 and _as_py(self.values[place]) == key else ABSENT


#: Pages of all open SSTables, by the identity of their index and their number in it.
_pages: Shelf[tuple[object, int], _Page] = Shelf()


def bounds_checksum(least: pa.Array, greatest: pa.Array, page_rows: int) -> int:
    return checksum([least, greatest], page_rows)


def page_checksum(values: pa.Array, offsets: Rows) -> int:
    return checksum([values, pa.array(offsets, pa.int64())])


def damaged_index(directory_uri: str, what: str) -> StorageError:
    return StorageError(
        f"the key index of {directory_uri} is damaged: {what}; repair makes it anew from the rows"
    )


class KeyIndex:
    """The key index of one SSTable; every method may be called from any thread.

    Everything is checked before it is used: a damaged index would find wrong rows, or none. An index
    that lancewal wrote is compared with the checksums in its notes. In an index that Lance wrote, the
    bounds are compared with the pages, and each page, when it is read, with the rows.
    """

    def __init__(
        self,
        directory_uri: str,
        storage_options: dict[str, str],
        notes: SsTableNotes,
        key_of_rows: Callable[[Rows], tuple[Rows, pa.Array]],
        *,
        is_remote: bool = False,
    ) -> None:
        """Read the page bounds; raises StorageError if the files are missing or damaged.

        ``key_of_rows`` returns those of the given row offsets that exist, and their keys.
        """
        self._notes = notes
        self._key_of_rows = key_of_rows
        self._directory_uri = directory_uri
        # Not the URI: a rebuilt index must not find the pages of the old one in the cache.
        self._identity = object()
        self._storage_options = storage_options
        # Idle readers: Lance's file reader serves one thread at a time.
        self._readers: list[LanceFileReader] = []
        with lance_errors(f"read the key index of {directory_uri}"):
            names = (layout.PK_PAGE_LOOKUP_NAME, layout.PK_PAGE_DATA_NAME)
            lookup, data = ordered_map(self._open, names, 2 if is_remote else 1)
            metadata = lookup.metadata().schema.metadata or {}
            pages = lookup.read_all(batch_size=max(lookup.num_rows(), 1)).to_table()
            self._rows: int = data.num_rows()
            self._readers.append(data)
            self._page_rows = int(metadata.get(b"batch_size", _DEFAULT_PAGE_ROWS))
            order = np.argsort(numbers(one_array(pages["page_idx"])), kind="stable")
            self._bounds = _Bounds(*(one_array(pages[name]).take(pa.array(order)) for name in ("min", "max")))
            self.key_type: pa.DataType = self._bounds.least.type
            self._check_bounds(data)

    def _open(self, name: str) -> LanceFileReader:
        return LanceFileReader(layout.child_uri(self._directory_uri, name), self._storage_options)

    def _check_bounds(self, data: LanceFileReader) -> None:
        least, greatest, rows = self._bounds.least, self._bounds.greatest, self._page_rows
        if rows < 1 or len(least) != -(-self._rows // rows):
            raise self._damaged(f"it has {len(least)} pages of {rows} keys for {self._rows} rows")
        if self._notes.bounds is not None:
            if self._notes.bounds != bounds_checksum(least, greatest, rows):
                raise self._damaged("the bounds of its pages do not have their checksum")
            if len(self._notes.pages) != len(least):
                raise self._damaged(f"it has {len(least)} pages, and had {len(self._notes.pages)}")
            return
        starts = np.arange(0, self._rows, rows)
        for bounds, places in ((least, starts), (greatest, np.minimum(starts + rows, self._rows) - 1)):
            found = data.take_rows(places.tolist(), batch_size=len(places)).to_table()
            if not one_array(found["values"]).equals(bounds):
                raise self._damaged("the bounds of its pages are not those of the keys in them")

    def _check_page(self, number: int, page: _Page) -> None:
        if self._notes.bounds is not None:
            if self._notes.pages[number] != page_checksum(page.values, page.offsets):
                raise self._damaged(f"page {number} does not have its checksum")
            return
        ascending = np.argsort(page.offsets, kind="stable")
        offsets = page.offsets[ascending]
        if (offsets[1:] == offsets[:-1]).any():
            raise self._damaged(f"page {number} names a row twice")
        kept, keys = self._key_of_rows(offsets)
        places = ascending[np.searchsorted(offsets, kept)]
        if not page.values.take(pa.array(places)).equals(keys):
            raise self._damaged(f"page {number} names rows that have other keys")

    def _damaged(self, what: str) -> StorageError:
        return damaged_index(self._directory_uri, what)

    def find(self, keys: pa.Array) -> Rows:
        """The row offset of each key's newest version; ``ABSENT`` for a key that is not in the index."""
        if keys.type != self.key_type:
            raise InvalidInputError(f"the keys of {self._directory_uri} are {self.key_type}, not {keys.type}")
        # The newest of a key's versions is in the last page that may hold the key.
        page_of_key = self._bounds.pages(keys)
        wanted = np.unique(page_of_key)
        wanted = wanted[wanted != ABSENT]
        if len(wanted) == 1 and (len(keys) == 1 or (page_of_key != ABSENT).all()):
            return self._load([int(wanted[0])])[0].find(keys)
        found = np.full(len(keys), ABSENT, np.int64)
        for number, page in zip(wanted, self._load(wanted.tolist()), strict=True):
            here = np.flatnonzero(page_of_key == number)
            found[here] = page.find(keys.take(pa.array(here)))
        return found

    def _load(self, wanted: list[int]) -> list[_Page]:
        pages = {number: _pages.get((self._identity, number)) for number in wanted}
        for first, count in _runs([number for number, page in pages.items() if page is None]):
            for number, page in enumerate(self._read(first, count), first):
                with lance_errors(f"check the key index of {self._directory_uri}"):
                    self._check_page(number, page)
                _pages.put((self._identity, number), page, page.nbytes)
                pages[number] = page
        return [page for page in pages.values() if page is not None]

    def _read(self, first: int, count: int) -> list[_Page]:
        start = first * self._page_rows
        rows = min(count * self._page_rows, self._rows - start)
        with lance_errors(f"read the key index of {self._directory_uri}"):
            try:
                reader = self._readers.pop()
            except IndexError:
                reader = self._open(layout.PK_PAGE_DATA_NAME)
            entries = reader.read_range(start, rows, batch_size=rows).to_table()
            self._readers.append(reader)
            values = one_array(entries["values"])
            offsets = numbers(one_array(entries["ids"])).astype(np.int64)
            if values.type != self.key_type or len(values) != rows:
                raise self._damaged(f"{len(values)} {values.type} instead of {rows} {self.key_type}")
        starts = range(0, rows, self._page_rows)
        return [
            # Copy if the run has several pages: a cached page must not keep the others in memory.
            _Page(
                _own_copy(values[at : at + self._page_rows], count), offsets[at : at + self._page_rows].copy()
            )
            for at in starts
        ]


@dataclass(frozen=True)
class _Bounds:
    """The least and the greatest key of each page."""

    least: pa.Array
    greatest: pa.Array

    @cached_property
    def _least_numbers(self) -> npt.NDArray[Any] | None:
        return numbers(self.least) if pa.types.is_integer(self.least.type) else None

    @cached_property
    def _greatest_numbers(self) -> npt.NDArray[Any]:
        return numbers(self.greatest)

    @cached_property
    def _lists(self) -> tuple[list[Any], list[Any]]:
        return self.least.to_pylist(), self.greatest.to_pylist()

    def pages(self, keys: pa.Array) -> Rows:
        """The last page that may hold each key; ``ABSENT`` if no page can."""
        if self._least_numbers is not None:
            wanted = numbers(keys)
            pages = np.searchsorted(self._least_numbers, wanted, side="right") - 1
            inside: Mask = (pages >= 0) & (wanted <= self._greatest_numbers[pages])
            return np.where(inside, pages, ABSENT)
        least, greatest = self._lists
        found = []
        for key in keys.to_pylist():
            page = bisect_right(least, key) - 1
            found.append(page if page >= 0 and key <= greatest[page] else ABSENT)
        return np.array(found, np.int64)


def _as_py(value: Any) -> Any:
    return value.as_py()


def _own_copy(values: pa.Array, count: int) -> pa.Array:
    return values if count == 1 else pa.concat_arrays([values[:0], values])


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs of consecutive ones: the first number of each run, and its length.

    >>> _runs([1, 2, 3, 7])
    [(1, 3), (7, 1)]
    """
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


class KeyProbe:
    """Keys to look up, encoded and hashed once for any number of SSTables."""

    def __init__(
        self,
        columns: Sequence[pa.Array | pa.ChunkedArray],
        part_of: tuple[KeyProbe, pa.Array] | None = None,
    ) -> None:
        """``columns`` are the key columns, in the order of the primary key."""
        self.columns = key_columns(columns)
        self._part_of = part_of

    def __len__(self) -> int:
        return len(self.columns[0])

    def subset(self, rows: Rows) -> KeyProbe:
        """Some of the keys; they share the encoding and the hashes of all keys."""
        if len(rows) == len(self):
            return self
        chosen = pa.array(rows)
        return KeyProbe([column.take(chosen) for column in self.columns], (self, chosen))

    @cached_property
    def values(self) -> pa.Array:
        if self._part_of is None or len(self.columns) == 1:
            return key_values(self.columns)
        whole, chosen = self._part_of
        return whole.values.take(chosen)

    def values_at(self, rows: Rows) -> pa.Array:
        return self.values if len(rows) == len(self) else self.values.take(pa.array(rows))

    @cached_property
    def _complete(self) -> Mask:
        """A mask of the keys without a null. No row has a null key, and as a number a null looks like 0."""
        complete = np.ones(len(self), np.bool_)
        for column in self.columns:
            if column.null_count:
                complete &= column.is_valid().to_numpy(zero_copy_only=False)
        return complete

    @cached_property
    def _hashes(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]] | None:
        if self._part_of is not None:
            whole, chosen = self._part_of
            return None if whole._hashes is None else whole._hashes[chosen.to_numpy()]
        types = [column.type for column in self.columns]
        return key_hashes(self.columns) if can_rule_out(types) else None

    def candidates(self, bloom: BloomFilter | None) -> Rows:
        """The numbers of the keys that an SSTable with this filter may hold."""
        possible = self._complete
        if bloom is not None and self._hashes is not None:
            possible = possible & bloom.might_contain(self._hashes)
        return np.flatnonzero(possible)
