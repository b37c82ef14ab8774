"""The common entry of all searches: by vector, by text or by both, for one query or a batch of them.

If only one column fits, the caller need not name it. All queries of a batch see the same state. A hybrid
search merges the ranks of its two searches by reciprocal rank fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format import TableSchema, refuse_added, row_keys
from lancewal.index import is_text, is_vector
from lancewal.predicate import Predicate
from lancewal.reader.search import checked_nearest, checked_words, find_words, nearest
from lancewal.reader.snapshot import Snapshot

#: The column with a query's number in its batch.
QUERY = "_query"
#: The column with a row's combined relevance in a hybrid search.
RELEVANCE = "_relevance"
#: Damps the first ranks; 60 is the constant of the paper on reciprocal rank fusion.
_DAMPING = 60.0
#: Each search ranks this many times ``k`` rows: a row may be good in both searches and best in neither.
_DEPTH = 4
_LEAST_DEPTH = 50
_ADDED = ("_distance", "_score")

#: A search; its arguments are the number of rows and the columns.
Search = Callable[[int, Sequence[str] | None], pa.Table]


@dataclass(frozen=True)
class Queries:
    """What to search for: a vector, a text or both; in a batch, a list of each."""

    vector: Any
    text: Any
    is_batch: bool = False

    @classmethod
    def of(cls, query: Any = None, vector: Any = None, text: Any = None) -> Queries:
        """Tell texts from vectors, and one query from a batch; refuse any other input."""
        if query is not None:
            kind = "text" if _is_text(query) else "vector"
            if (text if kind == "text" else vector) is not None:
                raise InvalidInputError(f"query is a {kind} already; pass one {kind} only")
            vector, text = (vector, query) if kind == "text" else (query, text)
        if vector is None and text is None:
            raise InvalidInputError("there is nothing to search for; pass a text, a vector or both")
        if text is not None and not _is_text(text):
            raise InvalidInputError(f"text is a string or a list of strings, got {text!r}")
        batches = [
            batch
            for batch, asked in ((_vector_batch(vector), vector), (_text_batch(text), text))
            if asked is not None
        ]
        lengths = [None if batch is None else len(batch) for batch in batches]
        if len(set(lengths)) > 1:
            counts = ["one" if length is None else f"a list of {length}" for length in lengths]
            raise InvalidInputError(
                f"a hybrid search takes a text for each vector; vector is {counts[0]}, text is {counts[1]}"
            )
        if lengths[0] is None:
            return cls(vector, text)
        if not lengths[0]:
            raise InvalidInputError("the batch has no queries")
        return cls(_vector_batch(vector), _text_batch(text), is_batch=True)

    def of_batch(self) -> Iterator[tuple[Any, Any]]:
        """The vector and the text of every query of a batch; ``None`` for a missing one."""
        count = len(self.text if self.vector is None else self.vector)
        nothing = [None] * count
        return zip(self.vector or nothing, self.text or nothing, strict=True)


def search(
    snapshot: Snapshot,
    predicate: Predicate | None,
    queries: Queries,
    k: int,
    *,
    vector_column: str | None,
    text_column: str | None,
    columns: Sequence[str] | None,
    metric: str | None = None,
) -> pa.Table:
    """The best ``k`` rows for every query, among the rows that meet ``predicate``."""
    if metric is not None and queries.vector is None:
        raise InvalidInputError("a metric compares vectors, and none is searched for")
    if queries.vector is not None and vector_column is None:
        vector_column = _the_vector_column(snapshot)
    if queries.text is not None and text_column is None:
        text_column = _the_text_column(snapshot)

    def by_vector(vector: Any, most: int, names: Sequence[str] | None) -> pa.Table:
        asked = checked_nearest(snapshot, str(vector_column), vector, most, metric, predicate)
        return nearest(snapshot, asked, names)

    def by_text(text: Any, most: int, names: Sequence[str] | None) -> pa.Table:
        asked = checked_words(snapshot, str(text_column), text, most, predicate=predicate)
        return find_words(snapshot, asked, names)

    def one(vector: Any, text: Any) -> pa.Table:
        if text is None:
            return by_vector(vector, k, columns)
        if vector is None:
            return by_text(text, k, columns)
        return _hybrid(partial(by_vector, vector), partial(by_text, text), snapshot.schema, k, columns)

    if not queries.is_batch:
        return one(queries.vector, queries.text)
    refuse_added(snapshot.schema, QUERY)
    return pa.concat_tables(
        [_numbered(number, partial(one, *query)) for number, query in enumerate(queries.of_batch())]
    )


def _hybrid(
    vector: Search, text: Search, schema: TableSchema, k: int, columns: Sequence[str] | None
) -> pa.Table:
    """The ``k`` rows with the highest combined relevance; in a tie the vector search decides."""
    if not schema.primary_key:
        raise InvalidInputError(
            "hybrid search needs a primary key, by which the rows of both searches are recognised; run "
            "vector_search and full_text_search and join their rows"
        )
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InvalidInputError(f"k must be a whole number from 1 on, got {k!r}")
    names = None if columns is None else list(dict.fromkeys([*columns, *schema.primary_key]))
    most = max(k * _DEPTH, _LEAST_DEPTH)
    found = [_without_ranks(search(most, names)) for search in (vector, text)]
    rows = pa.concat_tables(found).combine_chunks()
    relevance = np.concatenate([1.0 / (_DAMPING + 1 + np.arange(each.num_rows)) for each in found])
    encoded = row_keys(rows, schema.primary_key).dictionary_encode()
    numbers = encoded.indices.to_numpy()
    total = np.bincount(numbers, relevance, len(encoded.dictionary))
    _, first = np.unique(numbers, return_index=True)
    best = first[np.argsort(-total[numbers[first]], kind="stable")[:k]]
    shown = rows.take(pa.array(best)).append_column(RELEVANCE, pa.array(total[numbers[best]]))
    return shown if columns is None else shown.select([*columns, RELEVANCE])


def _without_ranks(rows: pa.Table) -> pa.Table:
    return rows.drop_columns([name for name in _ADDED if name in rows.column_names])


def _numbered(number: int, search: Callable[[], pa.Table]) -> pa.Table:
    try:
        found = search()
    except InvalidInputError as error:
        raise InvalidInputError(f"query {number}: {error}") from error
    return found.append_column(QUERY, pa.array(np.full(found.num_rows, number, np.int32)))


def _the_vector_column(snapshot: Snapshot) -> str:
    fitting = [field.name for field in snapshot.schema.plain if is_vector(field.type)]
    return _only(fitting, "vector_column", "columns of vectors")


def _the_text_column(snapshot: Snapshot) -> str:
    """The only column with a full-text index; if there is no such index, the only text column."""
    fitting = [field.name for field in snapshot.schema.plain if is_text(field.type)]
    indexed = [name for name in fitting if snapshot.base_source.indexes.text_params(name) is not None]
    return _only(indexed or fitting, "text_column", f"{'indexed ' if indexed else ''}columns of text")


def _only(names: list[str], argument: str, what: str) -> str:
    if len(names) == 1:
        return names[0]
    if not names:
        raise InvalidInputError(f"the table has no {what}")
    raise InvalidInputError(f"the table has several {what}: {', '.join(names)}; choose one with {argument}=")


def _is_text(query: Any) -> bool:
    if isinstance(query, list | tuple):
        return bool(query) and all(isinstance(each, str) for each in query)
    return isinstance(query, str)


def _text_batch(text: Any) -> list[Any] | None:
    return list(text) if isinstance(text, list | tuple) else None


def _vector_batch(vector: Any) -> list[Any] | None:
    """The vectors of a batch; ``None`` for one vector."""
    if isinstance(vector, pa.Array | pa.ChunkedArray):
        return vector.to_pylist() if pa.types.is_nested(vector.type) else None
    if isinstance(vector, list | tuple):
        if not any(isinstance(each, _VECTORS) for each in vector):
            return None
        return [each.as_py() if isinstance(each, pa.Scalar) else each for each in vector]
    return list(vector) if getattr(vector, "ndim", 1) == 2 else None


_VECTORS = (list, tuple, np.ndarray, pa.Array, pa.ListScalar)
