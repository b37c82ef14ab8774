"""Search results of several levels, cut to the best and turned into rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.reader.key_set import KeySet
from lancewal.reader.snapshot import Snapshot
from lancewal.reader.source import Rows, Source

Values = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Hits:
    """Rows of one level (``None``: the base, by row id) with their distances or scores, best first."""

    source: Source | None
    rows: Rows
    values: Values

    def __len__(self) -> int:
        return len(self.rows)


def without_superseded(
    fetch: Callable[[int], tuple[pa.Array, Rows, Values]], k: int, newer: KeySet
) -> tuple[Rows, Values]:
    """The best ``k`` rows whose keys no newer level holds.

    ``fetch(n)`` gives the best ``n`` rows: keys, rows and values, fewer when there are no
    more. It is asked for more until enough are left: a row that was replaced must not
    take a fresh one's place.
    """
    wanted = k if not len(newer) else 2 * k
    while True:
        keys, rows, values = fetch(wanted)
        kept = ~newer.contains(keys) if len(newer) else np.ones(len(rows), np.bool_)
        if int(np.count_nonzero(kept)) >= k or len(rows) < wanted:
            return rows[kept][:k], values[kept][:k]
        # Never more than all that could be replaced, plus those asked for.
        wanted = min(4 * wanted, k + len(newer)) if wanted < k + len(newer) else 2 * wanted


def best_rows(
    snapshot: Snapshot,
    parts: Sequence[Hits],
    k: int,
    columns: Sequence[str],
    value_name: str,
    *,
    largest_first: bool,
) -> pa.Table:
    """The best ``k`` of all hits as a table with ``value_name`` as its last column."""
    parts = [part for part in parts if len(part)]
    shown = pa.schema([*(snapshot.schema.plain.field(name) for name in columns), (value_name, pa.float32())])
    if not parts:
        return shown.empty_table()
    values = np.concatenate([part.values for part in parts])
    order = np.argsort(-values if largest_first else values, kind="stable")[:k]
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    rows = np.concatenate([part.rows for part in parts])
    tables, places = [], []
    for number, part in enumerate(parts):
        chosen = np.flatnonzero(owners[order] == number)
        if len(chosen):
            tables.append(_taken(snapshot, part.source, rows[order[chosen]], columns))
            places.append(chosen)
    found = pa.concat_tables(tables).combine_chunks()
    arranged = found.take(pa.array(np.argsort(np.concatenate(places), kind="stable")))
    return pa.Table.from_arrays([*arranged.columns, pa.array(values[order])], schema=shown)


def _taken(snapshot: Snapshot, source: Source | None, rows: Rows, columns: Sequence[str]) -> pa.Table:
    shown = pa.schema([snapshot.schema.plain.field(name) for name in columns])
    table = snapshot.base_source.take(rows, columns) if source is None else source.take(rows, columns)[0]
    return pa.Table.from_arrays(table.columns, schema=shown)
