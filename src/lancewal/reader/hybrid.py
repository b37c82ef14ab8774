"""Hybrid search: the ranks of a vector and a text search, joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format import TableSchema, key_values

RELEVANCE = "_relevance"
#: Damps the first ranks; 60 is what reciprocal rank fusion was published with.
_DAMPING = 60.0
#: So many times ``k`` rows of each search are ranked: a row may be good in both and best in neither.
_DEPTH = 4
_LEAST_DEPTH = 50
_ADDED = ("_distance", "_score")

#: A search for its best rows: how many, and with which columns.
Search = Callable[[int, Sequence[str] | None], pa.Table]


def hybrid(
    vector: Search, text: Search, schema: TableSchema, k: int, columns: Sequence[str] | None
) -> pa.Table:
    """The ``k`` rows with the most relevance in both searches together; ties go by the vector search."""
    if not schema.primary_key:
        raise InvalidInputError(
            "hybrid search needs a primary key, by which the rows of both searches are recognised; run "
            "vector_search and full_text_search and join their rows"
        )
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InvalidInputError(f"k must be a whole number from 1 on, got {k!r}")
    names = None if columns is None else list(dict.fromkeys([*columns, *schema.primary_key]))
    most = max(k * _DEPTH, _LEAST_DEPTH)
    found = [_plain(search(most, names)) for search in (vector, text)]
    rows = pa.concat_tables(found).combine_chunks()
    relevance = np.concatenate([1.0 / (_DAMPING + 1 + np.arange(each.num_rows)) for each in found])
    encoded = key_values([rows.column(name) for name in schema.primary_key]).dictionary_encode()
    numbers = encoded.indices.to_numpy()
    total = np.bincount(numbers, relevance, len(encoded.dictionary))
    _, first = np.unique(numbers, return_index=True)
    best = first[np.argsort(-total[numbers[first]], kind="stable")[:k]]
    shown = rows.take(pa.array(best)).append_column(RELEVANCE, pa.array(total[numbers[best]]))
    return shown if columns is None else shown.select([*columns, RELEVANCE])


def _plain(rows: pa.Table) -> pa.Table:
    return rows.drop_columns([name for name in _ADDED if name in rows.column_names])
