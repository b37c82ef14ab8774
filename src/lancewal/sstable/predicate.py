"""SQL predicates in Lance's dialect over rows that are not in a dataset.

Lance's own engine evaluates them, on a dataset in memory, so that a predicate means the
same whether or not it could be pushed into an SSTable. This is the slow way, for
SSTables whose columns were renamed or added to since.
"""

from __future__ import annotations

import secrets
from functools import lru_cache

import lance
import numpy as np
import pyarrow as pa

from lancewal.base import lance_errors
from lancewal.errors import InvalidInputError, StorageError
from lancewal.format import no_rows, numbers, one_array
from lancewal.sstable.key_index import Mask


@lru_cache(maxsize=128)
def referenced_columns(schema: pa.Schema, predicate: str) -> frozenset[str]:
    """The columns that ``predicate`` is about: those without which Lance cannot plan it.

    Raises InvalidInputError when it does not fit ``schema``.

    >>> sorted(referenced_columns(pa.schema({"a": pa.int64(), "b": pa.string()}), "a > 1"))
    ['a']
    """
    problem = _problem(schema, predicate)
    if problem is not None:
        raise InvalidInputError(f"filter {predicate!r} does not fit the table: {problem}")
    return frozenset(name for name in schema.names if _problem(_without(schema, name), predicate))


def matches(rows: pa.RecordBatch, predicate: str) -> Mask:
    """Which rows a predicate is true for."""
    with lance_errors(f"evaluate filter {predicate!r}"):
        dataset = _in_memory(pa.Table.from_batches([rows]))
        found = dataset.scanner(columns=[], filter=predicate, with_row_address=True).to_table()
    mask = np.zeros(rows.num_rows, np.bool_)
    mask[numbers(one_array(found["_rowaddr"]))] = True
    return mask


def _problem(schema: pa.Schema, predicate: str) -> str | None:
    try:
        with lance_errors(f"evaluate filter {predicate!r}"):
            _empty(schema).scanner(filter=predicate).to_table()
    except StorageError as error:
        return str(error.__cause__)
    return None


@lru_cache(maxsize=128)
def _empty(schema: pa.Schema) -> lance.LanceDataset:
    return _in_memory(no_rows(schema))


def _in_memory(rows: pa.Table) -> lance.LanceDataset:
    return lance.write_dataset(rows, f"memory://{secrets.token_hex(16)}", mode="create")


def _without(schema: pa.Schema, name: str) -> pa.Schema:
    return pa.schema([field for field in schema if field.name != name])
