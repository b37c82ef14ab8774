"""Rows by primary key: newest level first, and no further than the first that knows the key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from lancewal.format.schema import TableSchema
from lancewal.memtable.scan import checked_columns
from lancewal.reader.row_source import with_row_source
from lancewal.reader.snapshot import Snapshot
from lancewal.reader.source import ABSENT, Mask, Rows, Source
from lancewal.sstable import KeyProbe


@dataclass(frozen=True)
class LookupResult:
    """The rows of the keys that were found, in the order asked, and for every key whether it was."""

    table: pa.Table
    found: Mask


@dataclass(frozen=True)
class _Part:
    """Rows of one level, and the numbers of the keys that they are for."""

    rows: pa.Table
    keys: Rows


def lookup(
    snapshot: Snapshot,
    keys: Sequence[pa.Array],
    columns: Sequence[str] | None = None,
    *,
    row_source: bool = False,
) -> LookupResult:
    """The newest rows of ``keys``, which are the key columns in key order and of their exact types.

    A key that was asked for twice is answered twice. ``row_source`` adds the columns
    ``_source`` and ``_shard_id``.
    """
    names = checked_columns(columns, snapshot.schema)
    distinct, number_of = _distinct(keys)
    parts = _find(snapshot, distinct, names, row_source)
    shown = with_row_source(pa.schema([snapshot.schema.plain.field(name) for name in names]), row_source)
    if not parts:
        return LookupResult(shown.empty_table(), np.zeros(len(number_of), np.bool_))
    rows = pa.concat_tables([pa.Table.from_arrays(part.rows.columns, schema=shown) for part in parts])
    row_of_key = np.full(len(distinct), ABSENT, np.int64)
    row_of_key[np.concatenate([part.keys for part in parts])] = np.arange(rows.num_rows)
    wanted = row_of_key[number_of]
    found = wanted != ABSENT
    order = wanted[found]
    if not np.array_equal(order, np.arange(rows.num_rows)):
        rows = rows.combine_chunks().take(pa.array(order))
    return LookupResult(rows, found)


def _distinct(keys: Sequence[pa.Array]) -> tuple[KeyProbe, Rows]:
    """Every key once, and for every key asked the number of its one."""
    probe = KeyProbe(keys)
    if len(probe) < 2:
        return probe, np.arange(len(probe))
    encoded = probe.values.dictionary_encode()
    numbers: Rows = encoded.indices.to_numpy().astype(np.int64)
    if len(encoded.dictionary) == len(probe):
        return probe, numbers
    _, first = np.unique(numbers, return_index=True)
    return KeyProbe([column.take(pa.array(first)) for column in probe.columns]), numbers


def _find(snapshot: Snapshot, keys: KeyProbe, columns: Sequence[str], row_source: bool) -> list[_Part]:
    parts: list[_Part] = []
    open_keys = np.ones(len(keys), np.bool_)
    for group in snapshot.groups:
        asked = open_keys & _possible(snapshot, group, keys)
        for source in group:
            numbers = np.flatnonzero(asked)
            if not len(numbers):
                break
            positions = source.find(_subset(keys, numbers))
            hit = positions != ABSENT
            if not hit.any():
                continue
            numbers = numbers[hit]
            asked[numbers] = open_keys[numbers] = False
            rows, deleted = source.take(positions[hit], columns)
            if deleted.any():
                rows, numbers = rows.filter(pa.array(~deleted)), numbers[~deleted]
            if len(numbers):
                parts.append(_Part(_labelled(rows, source, row_source), numbers))
    numbers = np.flatnonzero(open_keys)
    if len(numbers):
        rows, found = snapshot.base_source.lookup(_subset(keys, numbers).columns, columns)
        if rows.num_rows:
            parts.append(_Part(_labelled(rows, None, row_source), numbers[found]))
    return parts


def _possible(snapshot: Snapshot, group: Sequence[Source], keys: KeyProbe) -> Mask:
    """Which keys the shards of a group can hold."""
    every = np.ones(len(keys), np.bool_)
    shards = {source.shard_id for source in group}
    if len(shards) != 1 or len(snapshot.groups) == 1:
        return every
    (identity,) = (shard.identity for shard in snapshot.shards if shard.shard_id in shards)
    mask = snapshot.pruner.keys_of(identity, snapshot.schema, keys.columns)
    return every if mask is None else mask


def _subset(keys: KeyProbe, numbers: Rows) -> KeyProbe:
    if len(numbers) == len(keys):
        return keys
    return KeyProbe([column.take(pa.array(numbers)) for column in keys.columns])


def _labelled(rows: pa.Table, source: Source | None, wanted: bool) -> pa.Table:
    return rows
