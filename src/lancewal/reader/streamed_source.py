"""StreamedSource: a long WAL tail as one level of a merged read, its keys in memory, its rows not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from lancewal.format import KeySet, TableSchema
from lancewal.memtable import MemTableView, selected
from lancewal.predicate import Predicate
from lancewal.reader.memory_source import MemorySource, Narrowed
from lancewal.reader.source import Mask, Request, Rows
from lancewal.storage import ordered_map

#: Entries that are on their way while one is looked at, where each is a round trip.
_REMOTE_AHEAD = 2


@dataclass(frozen=True)
class Part:
    """Some rows in a row, and how to get them: all columns of the table and the tombstones."""

    num_rows: int
    fetch: Callable[[], pa.Table]


class StreamedSource(MemorySource):
    """Rows that are fetched part by part, and only those parts that hold a wanted row.

    ``view`` holds the keys and the tombstones of all rows: it tells which of them count.
    """

    def __init__(
        self, view: MemTableView, schema: TableSchema, parts: Sequence[Part], *, is_remote: bool
    ) -> None:
        super().__init__(view, schema)
        self._parts = parts
        self._starts = np.concatenate([[0], np.cumsum([part.num_rows for part in parts])]).astype(np.int64)
        self._is_remote = is_remote

    def batches(self, request: Request, newer: KeySet) -> Iterator[pa.RecordBatch]:
        predicate = request.predicate
        wanted = self._wanted(predicate, newer)
        # With a limit the first part may be enough.
        for first, rows in self._read(wanted, ahead=request.limit is None):
            mask = wanted[first : first + rows.num_rows]
            yield from selected(rows, mask, request.columns, predicate).to_batches()

    def matching(self, predicate: Predicate | None, newer: KeySet) -> Mask:
        wanted = self._wanted(predicate, newer)
        if predicate is None or self._is_about_keys(predicate):
            return wanted
        matching = np.zeros(self.row_count, np.bool_)
        columns = sorted(predicate.columns) or self._schema.names[:1]
        for first, rows in self._read(wanted):
            here = slice(first, first + rows.num_rows)
            matching[here] = wanted[here] & predicate.mask(rows.select(columns))
        return matching

    def narrowed(self, predicate: Predicate) -> Narrowed | None:
        return None

    def written_name(self, column: str) -> str | None:
        return column

    def column_parts(
        self, name: str, first_row: int = 0, wanted: Mask | None = None
    ) -> Iterator[tuple[int, pa.ChunkedArray]]:
        asked = np.ones(self.row_count, np.bool_) if wanted is None else wanted.copy()
        asked[:first_row] = False
        for first, rows in self._read(asked):
            skipped = max(first_row - first, 0)
            yield first + skipped, rows.column(name).slice(skipped)

    def take(self, positions: Rows, columns: Sequence[str]) -> tuple[pa.Table, Mask]:
        deleted = self._view.tombstones[positions]
        part_of = np.searchsorted(self._starts, positions, side="right") - 1
        pieces, places = [], []
        for part in np.unique(part_of).tolist():
            asked = np.flatnonzero(part_of == part)
            rows = self._parts[part].fetch().select(list(columns))
            # Taken, not cut out: a slice would hold all rows of the part.
            pieces.append(rows.take(pa.array(positions[asked] - self._starts[part])))
            places.append(asked)
        if not pieces:
            return self._schema.stored.empty_table().select(list(columns)), deleted
        found = pa.concat_tables(pieces)
        if len(pieces) > 1:
            found = found.combine_chunks().take(pa.array(np.argsort(np.concatenate(places))))
        return found, deleted

    def _wanted(self, predicate: Predicate | None, newer: KeySet) -> Mask:
        """The rows that count, as far as their keys tell."""
        live = self._live(newer)
        if predicate is not None and self._is_about_keys(predicate):
            live = live & predicate.mask(self._view.stored.select(sorted(predicate.columns)))
        return live

    def _is_about_keys(self, predicate: Predicate) -> bool:
        return bool(predicate.columns) and predicate.columns <= set(self._view.schema.primary_key)

    def _read(self, wanted: Mask, *, ahead: bool = True) -> Iterator[tuple[int, pa.Table]]:
        """The parts that hold a wanted row, each with the position of its first row."""
        bounds = zip(self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True)
        chosen = [place for place, (start, end) in enumerate(bounds) if wanted[start:end].any()]
        workers = _REMOTE_AHEAD if self._is_remote and ahead else 1
        fetched = ordered_map(lambda place: self._parts[place].fetch(), chosen, workers)
        for place, rows in zip(chosen, fetched, strict=True):
            yield int(self._starts[place]), rows
