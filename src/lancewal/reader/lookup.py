"""Look up rows by primary key: newest level first, up to the first level that knows the key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format import TableSchema, checked_columns, from_python, labelled, no_rows, shown_schema
from lancewal.reader.snapshot import Snapshot
from lancewal.reader.source import ABSENT, Found, Mask, Rows, Source
from lancewal.sstable import KeyProbe
from lancewal.writer import Intake, is_key_sequence, is_tabular

_FOUND, _NOT_FOUND = np.ones(1, np.bool_), np.zeros(1, np.bool_)
# All results share these arrays, so they must be read-only.
_FOUND.flags.writeable = _NOT_FOUND.flags.writeable = False

_Part = tuple[pa.Table, Rows]


@dataclass(frozen=True)
class LookupResult:
    """The rows of the keys that were found, in the order of the keys, and for every key whether it was found.

    >>> import tempfile, lancewal
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1, "text": "a"}], key="id")
    >>> result = table.lookup([1, 2])
    >>> result.found.tolist(), result.table.to_pylist()
    ([True, False], [{'id': 1, 'text': 'a'}])
    """

    table: pa.Table
    found: Mask


def lookup(
    snapshot: Snapshot,
    keys: Sequence[pa.Array],
    columns: Sequence[str] | None = None,
    *,
    row_source: bool = False,
    ahead: Found | None = None,
) -> LookupResult:
    """The newest rows of ``keys``, which are the key columns in key order and of their exact types.

    A key that is given twice has its row twice in the result. ``row_source`` adds the columns ``_source``
    and ``_shard_id``. ``ahead`` is the result of the snapshot's base for a single key, if it was looked up
    in advance.
    """
    names = checked_columns(columns, snapshot.schema)
    shown = shown_schema(snapshot.schema, names, row_source)
    return lookup_shown(snapshot, keys, names, shown, row_source=row_source, ahead=ahead)


def lookup_shown(
    snapshot: Snapshot,
    keys: Sequence[pa.Array],
    names: Sequence[str],
    shown: pa.Schema,
    *,
    row_source: bool,
    ahead: Found | None = None,
) -> LookupResult:
    """Like :func:`lookup`, for columns that are already checked, with the schema of the result."""
    if len(keys[0]) == 1:
        return _one(snapshot, KeyProbe(keys), names, shown, row_source, ahead)
    distinct, number_of = _distinct(keys)
    parts = _find(snapshot, distinct, names, row_source)
    if not parts:
        return LookupResult(no_rows(shown), np.zeros(len(number_of), np.bool_))
    rows = pa.concat_tables([pa.Table.from_arrays(rows.columns, schema=shown) for rows, _ in parts])
    row_of_key = np.full(len(distinct), ABSENT, np.int64)
    row_of_key[np.concatenate([numbers for _, numbers in parts])] = np.arange(rows.num_rows)
    wanted = row_of_key[number_of]
    found = wanted != ABSENT
    order = wanted[found]
    if not np.array_equal(order, np.arange(rows.num_rows)):
        rows = rows.combine_chunks().take(pa.array(order))
    return LookupResult(rows, found)


def _one(
    snapshot: Snapshot,
    key: KeyProbe,
    columns: Sequence[str],
    shown: pa.Schema,
    row_source: bool,
    ahead: Found | None,
) -> LookupResult:
    """Look up a single key. This is the most frequent case, so it avoids the bookkeeping for several keys."""
    prepared = False
    for source in snapshot.newest_levels_first():
        if not source.in_memory and not prepared:
            prepared = True
            snapshot.prepare_lookup(key)
        is_known = ahead is not None and source is snapshot.base_source
        found = ahead if is_known and ahead is not None else source.look_up(key, columns)
        if len(found.numbers):
            # A key may be twice in the base, because Lance permits that; return one row.
            rows = found.rows if len(found.numbers) == 1 else found.rows.slice(len(found.numbers) - 1)
            rows = labelled(rows, source.name, source.shard_id) if row_source else rows
            return LookupResult(pa.Table.from_arrays(rows.columns, schema=shown), _FOUND)
        if len(found.known):
            break
    return LookupResult(no_rows(shown), _NOT_FOUND)


def _distinct(keys: Sequence[pa.Array]) -> tuple[KeyProbe, Rows]:
    """The distinct keys, and for every given key the number of its distinct key."""
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
    """The rows of the keys, level by level, each with the number of its key."""
    parts: list[_Part] = []
    unknown = np.ones(len(keys), np.bool_)
    locator = None
    if len(snapshot.groups) > 1:
        locator = snapshot.base_source.pruner.locate(snapshot.schema, keys.columns)
    prepared = False

    def ask(source: Source, asked: Mask) -> None:
        """Look up the keys that ``asked`` marks; clear the marks of those that the source knows."""
        nonlocal prepared
        numbers = np.flatnonzero(asked)
        if not len(numbers):
            return
        if not source.in_memory and not prepared:
            prepared = True
            snapshot.prepare_lookup(keys.subset(np.flatnonzero(unknown)))
        found = source.look_up(keys.subset(numbers), columns)
        known = numbers[found.known]
        asked[known] = unknown[known] = False
        if len(found.numbers):
            rows = labelled(found.rows, source.name, source.shard_id) if row_source else found.rows
            parts.append((rows, numbers[found.numbers]))

    for shard, group in snapshot.groups:
        here = None if locator is None else locator.keys_in(shard)
        asked = unknown if here is None else unknown & here
        for source in group:
            ask(source, asked)
    ask(snapshot.base_source, unknown)
    return parts


def is_one_key(keys: Any, schema: TableSchema) -> bool:
    """Whether the argument of a caller is a single key, so that the answer is a single row."""
    if isinstance(keys, tuple):
        several = not keys or any(isinstance(each, dict | tuple) for each in keys)
        return not several and len(schema.primary_key) > 1
    return not (is_key_sequence(keys) or is_tabular(keys))


def asked_keys(keys: Any, schema: TableSchema, intake: Intake) -> list[pa.Array]:
    """Convert the keys that a caller passed to key columns in key order."""
    if isinstance(keys, dict):
        keys = [keys]
    if isinstance(keys, (list, tuple)) and keys and all(isinstance(key, (dict, tuple)) for key in keys):
        keys = _from_records(keys, schema)
    elif isinstance(keys, tuple) and len(schema.primary_key) > 1:
        keys = _from_records([keys], schema)
    batches = intake.key_batches(keys)
    names = schema.primary_key
    if not batches:
        return [pa.array([], schema.plain.field(name).type) for name in names]
    if len(batches) == 1:
        return [batches[0].column(name) for name in names]
    return [pa.concat_arrays([batch.column(name) for batch in batches]) for name in names]


def _from_records(keys: Sequence[Any], schema: TableSchema) -> pa.Table:
    """Convert composite keys, given as dictionaries or as tuples in key order, to a table."""
    names = schema.primary_key
    columns: list[list[Any]] = [[] for _ in names]
    for key in keys:
        values = [key.get(name) for name in names] if isinstance(key, dict) else list(key)
        if len(values) != len(names):
            raise InvalidInputError(
                f"a key has the columns {', '.join(names)}; {key!r} has {len(values)} values"
            )
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    try:
        arrays = [
            from_python(c, schema.plain.field(name).type) for name, c in zip(names, columns, strict=True)
        ]
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"the keys do not fit the columns {', '.join(names)}: {error}") from None
    return pa.Table.from_arrays(arrays, list(names))
