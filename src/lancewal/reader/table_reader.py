"""The reads of a table and of its checkpoints.

Users call a :class:`TableView`. Its reader chooses the state: a :class:`TableReader` takes the newest state
for each read, a :class:`FixedReader` always takes the state of a checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, overload

import pyarrow as pa

from lancewal.errors import InvalidInputError, LanceWalError, StorageError, TableNotFoundError
from lancewal.format import TableSchema, checked_columns
from lancewal.predicate import Predicate
from lancewal.reader.base_source import BaseSource
from lancewal.reader.front import Queries, search
from lancewal.reader.lookup import LookupResult, asked_keys, is_one_key, lookup
from lancewal.reader.pruning import KeyLocator
from lancewal.reader.scan import Scan
from lancewal.reader.search import checked_nearest, checked_words, find_words, nearest
from lancewal.reader.snapshot import Snapshot
from lancewal.reader.source import Found
from lancewal.reader.sql import run_sql
from lancewal.reader.state import ShardReader, StateReader, TableState
from lancewal.reader.tail import SnapshotMovedError
from lancewal.sstable import KeyProbe
from lancewal.storage import ObjectStore, both, check_process, ordered_map, read_times, span
from lancewal.writer import Intake

logger = logging.getLogger(__name__)

#: The maximum age of the state that a read shows: seconds, or a timedelta; ``None`` for the newest state.
MaxStaleness = float | timedelta | None


class TableReader(StateReader):
    """Merged reads of one table. Thread-safe."""

    def __init__(
        self, store: ObjectStore, *, live_writers: bool = True, max_staleness: MaxStaleness = None
    ) -> None:
        super().__init__(store, live_writers=live_writers, max_staleness=_seconds(max_staleness))
        self._intake: Intake | None = None

    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        limit: int | None = None,
        offset: int | None = None,
        with_row_source: bool = False,
        *,
        max_staleness: float | None = None,
    ) -> Scan:
        """A scan of the present state of the table, or of a state up to ``max_staleness`` seconds ago."""
        began = time.perf_counter()
        snapshot, predicate = self.plan(filter, max_staleness)
        return Scan(snapshot, columns, predicate, limit, offset, with_row_source, time.perf_counter() - began)

    def plan(
        self, filter: str | None, max_staleness: float | None = None
    ) -> tuple[Snapshot, Predicate | None]:
        """The state for a scan or a search, and the filter parsed for its columns."""
        with span("lancewal.plan", table=self._store.uri):
            while True:
                source = self.known_base()
                schema = source.base.schema
                try:
                    predicate = Predicate.parse(filter, schema.plain) if filter is not None else None
                except InvalidInputError:
                    if self._newest_base() is source:
                        raise
                    # The filter may name a column that only the newest version has.
                    continue
                snapshot = self.snapshot(source.pruner.matching(predicate), max_staleness=max_staleness)
                if predicate is None or snapshot.schema.has_columns_of(schema):
                    return snapshot, predicate

    def lookup(self, keys: Any, columns: Sequence[str] | None = None) -> LookupResult:
        """The newest rows of ``keys``: one value, a list of values, or Arrow data with the key columns."""
        max_staleness = None
        while True:
            source = self.known_base()
            base = source.base
            if not base.schema.primary_key:
                raise InvalidInputError("this table has no primary key, so no row can be looked up by it")
            asked = asked_keys(keys, base.schema, self._intake_of(base.schema))
            if not len(asked[0]):
                return lookup(Snapshot(self._newest_base(), ()), asked, columns)
            locator = source.pruner.locate(base.schema, asked)
            snapshot, ahead = self._with_base_rows(
                source, asked, columns, partial(self.snapshot, locator, max_staleness=max_staleness)
            )
            if snapshot.schema.has_columns_of(base.schema):
                try:
                    return lookup(snapshot, asked, columns, ahead=ahead)
                except SnapshotMovedError as error:
                    logger.debug("lookup started again: %s", error)
                    max_staleness = 0.0

    def _with_base_rows(
        self,
        source: BaseSource,
        keys: Sequence[pa.Array],
        columns: Sequence[str] | None,
        take: Callable[[], Snapshot],
    ) -> tuple[Snapshot, Found | None]:
        """The snapshot, and the base's rows of a single key, looked up at the same time on remote storage.

        The base's result is ``None`` if a newer base version was found meanwhile. The base is not searched in
        advance on local storage or with ``max_staleness``, where this saves little, nor where it would mean
        reading all keys of the base.
        """
        is_far = not self._store.is_local and not self._max_staleness
        if len(keys[0]) > 1 or not is_far or not source.finds_keys_fast:
            return take(), None

        def ask() -> Found | None:
            try:
                return source.look_up(KeyProbe(keys), checked_columns(columns, source.base.schema))
            except LanceWalError:
                return None  # a lookup that needs the base searches it again and raises the error then

        snapshot, found = both(take, ask, at_once=True)
        return snapshot, found if snapshot.base_source is source else None

    def _intake_of(self, schema: TableSchema) -> Intake:
        intake = self._intake
        if intake is None or intake.schema is not schema:
            intake = self._intake = Intake(schema)
        return intake


class FixedReader(TableReader):
    """Reads ``state``, which is called ``name`` in errors. Thread-safe.

    The caller must make sure that the files of the state are kept. A read that misses one raises a
    :class:`~lancewal.errors.StorageError`, because it cannot retry with a newer state.
    """

    def __init__(self, store: ObjectStore, state: TableState, name: str) -> None:
        super().__init__(store, live_writers=False)
        self._name = name
        self._places = {place.shard_id: place for place in state.shards}
        self._fixed = [ShardReader.at(store, place) for place in state.shards]
        try:
            self._base = state.base(store.storage_options)
        except TableNotFoundError as error:
            raise self._gone(error) from error

    def snapshot(self, wants: KeyLocator | None = None, *, max_staleness: float | None = None) -> Snapshot:
        """The levels of the state; shards that cannot hold what ``wants`` locates are left out."""
        if max_staleness is not None:
            # Only a lookup that found rows missing passes this, to retry with a newer state.
            raise self._gone("rows of its log were removed")
        base = self._newest_base()
        chosen = self._chosen(self._fixed, wants)
        try:
            shards = tuple(
                ordered_map(
                    lambda shard: shard.open(self._places[shard.shard_id], base.base),
                    chosen.wanted,
                    self._workers(chosen.wanted),
                )
            )
        except SnapshotMovedError as error:
            raise self._gone(error) from error
        return Snapshot(base, shards, chosen.left_out, not self._store.is_local)

    def _newest_base(self) -> BaseSource:
        check_process()
        assert self._base is not None
        return self._base

    def _gone(self, why: object) -> StorageError:
        return StorageError(f"{self._name} of the table at {self._store.uri} is no longer whole: {why}")


class TableView:
    """A table to scan, look up and search: its newest state, or the state of a checkpoint.

    A :class:`~lancewal.Table` is a view that follows the table. ``table.at(name)`` returns a view with the
    rows and columns that the table had when the checkpoint was made. Thread-safe.

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
        """The address of the table."""
        return self._store.uri

    @property
    def schema(self) -> pa.Schema:
        """The columns, read again from storage."""
        return self._reader.base().schema.plain

    @property
    def table_schema(self) -> TableSchema:
        """The columns with Lance's field ids, and the key; read again from storage."""
        return self._reader.base().schema

    @property
    def primary_key(self) -> tuple[str, ...]:
        """The key columns in key order; empty for an append-only table. Read again from storage."""
        return self._reader.base().schema.primary_key

    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        limit: int | None = None,
        offset: int | None = None,
        with_row_source: bool = False,
    ) -> Scan:
        """All rows, each key once, in its newest version.

        The scan is fixed to the state of this moment; its rows are read when they are requested. ``filter``
        is SQL in Lance's dialect. ``filter``, ``limit`` and ``offset`` apply to the newest versions only.
        ``with_row_source`` adds the columns ``_source`` and ``_shard_id``.
        """
        return self._reader.scan(columns, filter, limit, offset, with_row_source)

    def count_rows(self, filter: str | None = None) -> int:
        """How many rows there are; reads keys and the filter's columns at most."""
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
        """The newest rows of ``keys``.

        One key (a value; or, for a key of several columns, a dict or a tuple in key order) returns its row
        as a dict, or ``None``. A list of keys, an Arrow array, or a table or frame with the key columns
        returns a :class:`LookupResult`: the rows that were found, in the order of the keys, and for every
        key whether it was found.
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

        ``query`` is a text or a vector; ``text`` and ``vector`` name the kind explicitly, and both together
        make a hybrid search. The rows come with ``_distance``, ``_score`` or ``_relevance``, as from
        :meth:`vector_search`, :meth:`full_text_search` and :meth:`hybrid_search`, which take more settings.

        The vector column need not be named if there is only one. The text column need not be named if only
        one has a full-text index, or if there is no such index and only one text column. Otherwise
        ``vector_column`` and ``text_column`` name them.

        A batch of queries, as a list of vectors or texts or a two-dimensional array, returns the ``k`` best
        rows of each query, query by query, with the number of the query, from 0 on, as ``_query``. All
        queries see the same state of the table.

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
                *self._reader.plan(filter),
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

        The search covers fresh and old rows, each key in its newest version. ``filter`` is applied
        before the search. ``metric`` is "l2" (squared), "cosine" or "dot"; the default is the metric of
        the column's index. A column without an index is compared row by row. ``nprobes`` and
        ``refine_factor`` are Lance's settings for searches of its indexes. Null vectors are never found. With
        "cosine", zero vectors are not found either, and a zero query finds nothing.
        """
        with read_times.timed(self.uri, "search"):
            snapshot, predicate = self._reader.plan(filter)
            asked = checked_nearest(snapshot, column, query, k, metric, predicate, nprobes, refine_factor)
            return nearest(snapshot, asked, columns)

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

        With ``operator`` "or" a row must have any of the words, with "and" all of them. With ``phrase`` the
        words must be next to each other; this needs a base index with positions. Words are treated as in
        the column's index (stemming, stop words); a query that has only stop words finds nothing. A column
        without an index is read row by row.
        """
        with read_times.timed(self.uri, "search"):
            snapshot, predicate = self._reader.plan(filter)
            asked = checked_words(snapshot, column, query, k, operator, phrase, predicate)
            return find_words(snapshot, asked, columns)

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

        Ranks are merged by reciprocal rank fusion: each search that finds a row adds ``1 / (60 + its rank)``.
        Needs a primary key, to match the rows of both searches.
        """
        with read_times.timed(self.uri, "search"):
            return search(
                *self._reader.plan(filter),
                Queries(vector, text),
                k,
                vector_column=vector_column,
                text_column=text_column,
                columns=columns,
            )

    def sql(self, query: str) -> pa.Table:
        """The result of an SQL query, in which the table is called ``t``.

        The query is any SELECT that DataFusion supports. It sees the newest versions of all rows. Column
        names keep their case. The columns that the query uses are read into memory.

        >>> import tempfile, lance, lancewal
        >>> uri = tempfile.mkdtemp() + "/table"
        >>> _ = lance.write_dataset(pa.table({"id": [1, 2], "n": [10, 20]}), uri)
        >>> lancewal.initialize(uri, unsharded=True).sql("SELECT sum(n) AS total FROM t").to_pylist()
        [{'total': 30}]
        """
        return run_sql(query, self.schema, lambda columns: self.scan(columns=columns).to_table())


def _seconds(max_staleness: MaxStaleness) -> float:
    """The setting in seconds; refuses a value that is not a duration."""
    given: Any = max_staleness
    if isinstance(given, timedelta):
        given = given.total_seconds()
    if given is None:
        return 0.0
    if isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
        raise InvalidInputError(
            f"max_staleness must be a number of seconds, 0 or more, or a timedelta, not {max_staleness!r}"
        )
    return float(given)
