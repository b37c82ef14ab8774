"""Reading several MemTables as one: the newest version of a key wins, deletes hide older ones."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format import TOMBSTONE, TableSchema, key_values, no_rows, readable_columns, shown
from lancewal.index import IndexStore
from lancewal.memtable.memtable import MemTableView
from lancewal.predicate import Predicate

Mask = npt.NDArray[np.bool_]

#: Chunks below this many rows are joined where many rows are wanted: a copy costs less
#: than a kernel call per chunk, here and in whatever the caller does next.
_SMALL_CHUNK_ROWS = 256
_FEW = 0.05
#: So few rows are cut out of their batches. More are taken from all of them at once, which
#: joins the batches first: milliseconds for thousands of batches with vectors.
FEW_ROWS = 256

#: By MemTable; a MemTable only grows, so what one reader found out serves the next.
_first_rows: weakref.WeakKeyDictionary[IndexStore, list[int]] = weakref.WeakKeyDictionary()


def scan_views(
    views: Sequence[MemTableView],
    schema: TableSchema,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
) -> pa.Table:
    """The live rows of some MemTables, oldest generation first.

    The newest version of a key is found across all of them before ``filter`` is asked.
    """
    names = checked_columns(columns, schema)
    predicate = Predicate.parse(filter, schema.plain) if filter is not None else None
    wanted = pa.schema([schema.plain.field(name) for name in names])
    parts = None if predicate is None else _looked_up(views, schema, names, predicate)
    if parts is None:
        parts = [
            selected(shown(view.stored, schema), mask, names, predicate)
            for view, mask in zip(views, live_masks(views), strict=True)
        ]
    found = [pa.Table.from_arrays(part.columns, schema=wanted) for part in parts if part.num_rows]
    return pa.concat_tables(found) if found else no_rows(wanted)


def _looked_up(
    views: Sequence[MemTableView], schema: TableSchema, columns: Sequence[str], predicate: Predicate
) -> list[pa.Table] | None:
    """The matching rows by the key index, where the filter names all keys; else ``None``."""
    keys = predicate.values_of(schema.primary_key[0]) if len(schema.primary_key) == 1 else None
    if keys is None:
        return None
    parts = []
    for view in reversed(views):
        positions = view.newest_positions(keys)
        found = positions[positions >= 0]
        rows = shown(rows_at(view, found), schema)
        parts.append(selected(rows, ~deleted_rows(rows), columns, predicate))
        keys = keys.filter(pa.array(positions < 0))
    return parts


def rows_at(view: MemTableView, positions: npt.NDArray[np.int64]) -> pa.Table:
    """Rows by position, in the order asked, with the tombstone column."""
    if len(positions) > FEW_ROWS:
        return view.stored.take(pa.array(positions))
    starts = _starts(view)
    pieces = []
    for position in positions.tolist():
        place = bisect_right(starts, position, hi=len(view.batches)) - 1
        pieces.append(view.batches[place].slice(position - starts[place], 1))
    return pa.Table.from_batches(pieces, view.schema.stored)


def deleted_rows(stored: pa.Table) -> Mask:
    """Which rows are deletes."""
    return np.asarray(stored.column(TOMBSTONE).to_numpy(), np.bool_)


def _starts(view: MemTableView) -> list[int]:
    """The first row of each batch of a MemTable, and of some that came after the view."""
    starts = _first_rows.get(view.indexes, [])
    if len(starts) < len(view.batches):
        rows = (batch.num_rows for batch in view.batches[:-1])
        starts = _first_rows[view.indexes] = list(accumulate(rows, initial=0))
    return starts


def live_masks(views: Sequence[MemTableView]) -> list[Mask]:
    """For each view, oldest first, the rows that no later row of any view replaces or deletes."""
    masks = []
    for place, view in enumerate(views):
        mask = view.live_mask
        for newer in views[place + 1 :]:
            if view.schema.primary_key and newer.row_count and view.row_count:
                mask = mask & ~superseded(view, newer)
        masks.append(mask)
    return masks


def superseded(older: MemTableView, newer: MemTableView) -> Mask:
    """Which of the older view's newest rows have a version, or a delete, in the newer one.

    Rows that are already replaced within the older view may or may not be marked.
    """
    if older.row_count <= newer.row_count:
        return newer.newest_positions(view_keys(older)) >= 0
    mask = np.zeros(older.row_count, np.bool_)
    positions = older.newest_positions(view_keys(newer))
    mask[positions[positions >= 0]] = True
    return mask


def view_keys(view: MemTableView) -> pa.Array:
    """The key of every row, older versions and deletes included."""
    return key_values([view.stored.column(name) for name in view.schema.primary_key])


def selected(
    rows: pa.Table, mask: Mask, columns: Sequence[str], predicate: Predicate | None = None
) -> pa.Table:
    """``columns`` of the rows that ``mask`` marks and ``predicate`` is true for."""
    if predicate is not None:
        mask = mask & predicate.mask(rows)
    kept = int(np.count_nonzero(mask))
    chosen = rows.select(list(columns))
    if kept == 0:
        return chosen.slice(0, 0)
    if kept > _FEW * len(mask) and _has_small_chunks(rows):
        chosen = chosen.combine_chunks()
    return chosen if kept == len(mask) else chosen.filter(pa.array(mask))


def checked_columns(columns: Sequence[str] | None, schema: TableSchema) -> list[str]:
    """The columns that were asked for, all of them for ``None``; refuses what the table has not."""
    if columns is None:
        return readable_columns(schema, schema.names) if schema.blob_columns else schema.names
    names = list(columns)
    unknown = [name for name in names if name not in schema.field_ids]
    if unknown:
        raise InvalidInputError(
            f"the table has no column {', '.join(map(repr, unknown))}; "
            f"its columns are {', '.join(schema.names)}"
        )
    if not names or len(set(names)) < len(names):
        raise InvalidInputError(f"select columns by name, each once and at least one, not {names}")
    return readable_columns(schema, names) if schema.blob_columns else names


def _has_small_chunks(rows: pa.Table) -> bool:
    chunks: int = rows.column(0).num_chunks
    return chunks > 1 and bool(rows.num_rows < chunks * _SMALL_CHUNK_ROWS)
