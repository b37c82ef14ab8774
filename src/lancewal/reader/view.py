"""TableView: the reads that a table and each of its checkpoints offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import pyarrow as pa

from lancewal.format import TableSchema
from lancewal.reader.front import Queries, search
from lancewal.reader.lookup import LookupResult
from lancewal.reader.scan import Scan
from lancewal.reader.search import checked_nearest, checked_words, find_words, nearest
from lancewal.reader.sql import run_sql
from lancewal.reader.table_reader import TableReader, is_one_key
from lancewal.storage import ObjectStore, read_times


class TableView:
    """Rows of a table to scan, look up and search: the newest ones, or those of a checkpoint.

    A :class:`~lancewal.Table` is one that follows the table. ``table.at(name)`` gives one that shows the
    rows and columns which the table had when the checkpoint was made. Thread-safe.

    >>> import tempfile, lancewal
    >>> vectors = pa.array([[1.0, 0.0], [0.0, 1.0]], pa.list_(pa.float32(), 2))
    >>> data = pa.table({"id": [1, 2], "text": ["a red fox", "a whale"], "v": vectors})
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", data, key="id")
    >>> _ = table.checkpoint("before")
    >>> with table.writer() as writer:
    ...     _ = writer.delete(1)
    >>> view = table.at("before")
    >>> view.count_rows(), table.count_rows(), view.lookup(1)["text"]
    (2, 1, 'a red fox')
    >>> view.vector_search("v", [1.0, 0.0], k=1)["id"].to_pylist()
    [1]
    >>> view.full_text_search("text", "whale")["id"].to_pylist()
    [2]
    >>> view.hybrid_search("v", [1.0, 0.0], "text", "fox", k=1)["id"].to_pylist()
    [1]
    >>> view.scan(columns=["id"], filter="id > 1").to_table().to_pylist()
    [{'id': 2}]
    """

    def __init__(self, store: ObjectStore, reader: TableReader) -> None:
        self._store = store
        self._reader = reader

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    @property
    def uri(self) -> str:
        """Where the table lies."""
        return self._store.uri

    @property
    def schema(self) -> pa.Schema:
        """The columns, read anew."""
        return self._reader.base().schema.plain

    @property
    def table_schema(self) -> TableSchema:
        """The columns with Lance's field ids, and the key. Read anew."""
        return self._reader.base().schema

    @property
    def primary_key(self) -> tuple[str, ...]:
        """The key columns in key order; empty for an append-only table. Read anew."""
        return self._reader.base().schema.primary_key

    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        limit: int | None = None,
        offset: int | None = None,
        with_row_source: bool = False,
    ) -> Scan:
        """All rows, each key once, in its newest version; a fixed state, read when it is asked for.

        ``filter`` is SQL as Lance takes it. It, ``limit`` and ``offset`` apply to the newest
        versions only. ``with_row_source`` adds the columns ``_source`` and ``_shard_id``.
        """
        return self._reader.scan(columns, filter, limit, offset, with_row_source)

    def count_rows(self, filter: str | None = None) -> int:
        """How many rows there are, without reading more than keys and the filter's columns."""
        return self._reader.scan(filter=filter).count_rows()

    @overload
    def lookup(
        self, keys: bool | int | str | bytes | dict[str, Any], columns: Sequence[str] | None = None
    ) -> dict[str, Any] | None: ...

    @overload
    def lookup(self, keys: list[Any], columns: Sequence[str] | None = None) -> LookupResult: ...

    @overload
    def lookup(
        self, keys: Any, columns: Sequence[str] | None = None
    ) -> LookupResult | dict[str, Any] | None: ...

    def lookup(self, keys: Any, columns: Sequence[str] | None = None) -> LookupResult | dict[str, Any] | None:
        """The newest rows of some keys.

        One key (a value; a dict, or a tuple in key order, where the key has several columns)
        gives its row as a dict, or ``None``. A list of keys, an Arrow array, or a table or
        frame with the key columns gives a :class:`LookupResult`: the rows that were found in
        the order asked, and for every key whether it was.
        """
        with read_times.timed(self.uri, "lookup"):
            result = self._reader.lookup(keys, columns)
        if not is_one_key(keys, self._reader.known_base().base.schema):
            return result
        row: list[dict[str, Any]] = result.table.to_pylist()
        return row[0] if row else None

    def search(
        self,
        query: Any = None,
        k: int = 10,
        *,
        vector: Any = None,
        text: str | Sequence[str] | None = None,
        vector_column: str | None = None,
        text_column: str | None = None,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        metric: str | None = None,
    ) -> pa.Table:
        """The ``k`` best rows for a vector, for a text, or for both together, best first.

        ``query`` is a text or a vector; ``text`` and ``vector`` say which, and both make a hybrid search. The
        rows come with ``_distance``, ``_score`` or ``_relevance``, as from :meth:`vector_search`,
        :meth:`full_text_search` and :meth:`hybrid_search`, which take more settings.

        The columns need no name where there is one of vectors, and one text with a full-text index (or one
        text at all, where none has an index). Otherwise ``vector_column`` and ``text_column`` name them.

        A batch of queries, as a list of vectors or texts or an array of two dimensions, gives the ``k`` best
        rows of each, query by query, with the query's number from 0 on as ``_query``. All of them see
        the same state of the table.

        >>> import tempfile, lancewal
        >>> vectors = pa.array([[1.0, 0.0], [0.0, 1.0]], pa.list_(pa.float32(), 2))
        >>> data = pa.table({"id": [1, 2], "text": ["a red fox", "a blue whale"], "vector": vectors})
        >>> table = lancewal.create(tempfile.mkdtemp() + "/animals", data, key="id")
        >>> table.search("fox")["id"].to_pylist(), table.search([0.1, 1.0], k=1)["id"].to_pylist()
        ([1], [2])
        >>> table.search("fox", vector=[1.0, 0.0], columns=["id"]).column_names
        ['id', '_relevance']
        >>> table.search([[1.0, 0.0], [0.0, 1.0]], k=1, columns=["id"]).select(["_query", "id"]).to_pylist()
        [{'_query': 0, 'id': 1}, {'_query': 1, 'id': 2}]
        """
        with read_times.timed(self.uri, "search"):
            return search(
                self._reader.scan(filter=filter),
                Queries.of(query, vector, text),
                k,
                vector_column=vector_column,
                text_column=text_column,
                columns=columns,
                metric=metric,
            )

    def vector_search(
        self,
        column: str,
        query: Any,
        k: int = 10,
        *,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        metric: str | None = None,
        nprobes: int | None = None,
        refine_factor: int | None = None,
    ) -> pa.Table:
        """The ``k`` rows whose vectors are nearest to ``query``, nearest first, with ``_distance``.

        Fresh and old rows together, each key in its newest version; ``filter`` is applied
        before the search. ``metric`` is "l2" (squared), "cosine" or "dot", by default that of
        the column's index. A column without an index is compared row by row. ``nprobes`` and
        ``refine_factor`` are Lance's, for the base table's index. Null vectors are never found;
        under cosine neither are zero vectors, and a zero query finds nothing.
        """
        with read_times.timed(self.uri, "search"):
            scan = self._reader.scan(filter=filter)
            asked = checked_nearest(
                scan.snapshot, column, query, k, metric, scan.predicate, nprobes, refine_factor
            )
            return nearest(scan.snapshot, asked, columns)

    def full_text_search(
        self,
        column: str,
        query: str,
        k: int = 10,
        *,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        operator: str = "or",
        phrase: bool = False,
    ) -> pa.Table:
        """The ``k`` rows that match the words of ``query`` best, best first, with ``_score``.

        ``operator`` "or" asks for any of the words, "and" for all of them; ``phrase`` for all
        next to each other, which needs a base index with positions. Words are taken as the
        column's index takes them (stemming, stop words); a query of stop words alone finds
        nothing. A column without an index is read row by row.
        """
        with read_times.timed(self.uri, "search"):
            scan = self._reader.scan(filter=filter)
            asked = checked_words(scan.snapshot, column, query, k, operator, phrase, scan.predicate)
            return find_words(scan.snapshot, asked, columns)

    def hybrid_search(
        self,
        vector_column: str,
        vector: Any,
        text_column: str,
        text: str,
        k: int = 10,
        *,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """The ``k`` rows that a vector and a text search rank best together, best first, with ``_relevance``.

        Ranks are joined by reciprocal rank fusion: a row counts ``1 / (60 + its rank)`` in each search that
        finds it. Needs a primary key, by which rows of both are recognised.
        """
        with read_times.timed(self.uri, "search"):
            return search(
                self._reader.scan(filter=filter),
                Queries(vector, text),
                k,
                vector_column=vector_column,
                text_column=text_column,
                columns=columns,
            )

    def sql(self, query: str) -> pa.Table:
        """The result of an SQL query, in which the table is called ``t``.

        Any SELECT that DataFusion takes, on the newest versions of all rows; names of columns as they are
        written. Columns that the query uses are read into memory.

        >>> import tempfile, lance, lancewal
        >>> uri = tempfile.mkdtemp() + "/table"
        >>> _ = lance.write_dataset(pa.table({"id": [1, 2], "n": [10, 20]}), uri)
        >>> lancewal.initialize(uri, unsharded=True).sql("SELECT sum(n) AS total FROM t").to_pylist()
        [{'total': 30}]
        """
        return run_sql(query, self.schema, lambda columns: self.scan(columns=columns).to_table())
