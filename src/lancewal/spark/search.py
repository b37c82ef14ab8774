"""Searches for many queries at once, over all rows of one state of a table, including fresh ones.

A task searches one part of the table (some shards, some fragments of the base, or a whole indexed base)
for one part of the queries. In each part newer versions hide older ones before the cut to ``k``, and no key
has a visible row in two parts. So the best hits of all parts are the best of the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import types as st
from pyspark.sql.datasource import InputPartition

from lancewal.errors import InvalidInputError
from lancewal.index import CorpusStatistics
from lancewal.reader import (
    Snapshot,
    checked_nearest,
    checked_words,
    find_words,
    nearest,
    read_state,
    words_statistics,
)
from lancewal.spark.columns import arrow_schema, for_spark, quoted, spark_schema
from lancewal.spark.merged import MergedState
from lancewal.spark.options import Options
from lancewal.storage import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DISTANCE, SCORE, RANK = "_distance", "_score", "_rank"
#: Columns that exist only between the stages.
_QUERY, _PART = "__lancewal_query", "__lancewal_part"


@dataclass(frozen=True)
class Search:
    """The search that runs on every part of the table with each query; it is sent to every task."""

    merged: MergedState
    #: The column to search, and the one that holds the queries.
    column: str
    query_column: str
    k: int
    columns: tuple[str, ...]
    sql: str | None = None
    #: Further arguments of :func:`checked_nearest` or :func:`checked_words`.
    how: Mapping[str, Any] = field(default_factory=dict)
    #: The statistics of the whole table for each query text.
    corpora: Mapping[str, CorpusStatistics] = field(default_factory=dict)

    def nearest(self, part: InputPartition, query: Any) -> pa.Table:
        snapshot, predicate = self.merged.snapshot(), self.merged.predicate(self.sql)
        asked = checked_nearest(snapshot, self.column, query, self.k, predicate=predicate, **self.how)
        return nearest(snapshot, asked, self.columns, self.merged.levels(part, None))

    def words(self, part: InputPartition, query: Any) -> pa.Table:
        snapshot, predicate = self.merged.snapshot(), self.merged.predicate(self.sql)
        asked = checked_words(snapshot, self.column, query, self.k, predicate=predicate, **self.how)
        return find_words(snapshot, asked, self.columns, self.merged.levels(part, None), self.corpora[query])

    def statistics(self, part: InputPartition, query: Any) -> CorpusStatistics:
        snapshot = self.merged.snapshot()
        asked = checked_words(snapshot, self.column, query, self.k, **self.how)
        return words_statistics(snapshot, asked, self.merged.levels(part, None))


def vector_search(
    queries: DataFrame,
    uri: str,
    column: str,
    k: int,
    *,
    query_column: str | None = None,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    metric: str | None = None,
    nprobes: int | None = None,
    refine_factor: int | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The ``k`` nearest rows of the table at ``uri`` for every row of ``queries``.

    The query vectors are in ``query_column`` of ``queries`` (by default it has the name of ``column``). The
    result has the other columns of ``queries``, ``columns`` of the table (by default all but the searched
    one), ``_distance``, and ``_rank`` from 1. A null query finds nothing. The other arguments are as in
    :meth:`lancewal.Table.vector_search`.

    .. code-block:: python

        similar = vector_search(new_questions, "s3://bucket/documents", "embedding", k=5, columns=["id"])
    """
    how: dict[str, Any] = {"metric": metric, "nprobes": nprobes, "refine_factor": refine_factor}
    search = _search(queries, uri, column, k, query_column, columns, filter, how, storage_options)
    snapshot = search.merged.snapshot()
    # Refuse an invalid search here, and not in every task.
    asked = checked_nearest(snapshot, column, _any_vector(snapshot, column), k, **how)
    _check_queries(queries.schema[search.query_column], is_vector=True)
    indexed = snapshot.base_source.indexes.metric(column) is asked.metric
    parts = search.merged.search_partitions(column, indexed=indexed)
    return _best(queries, search, Search.nearest, parts, DISTANCE)


def _any_vector(snapshot: Snapshot, column: str) -> list[float]:
    if column not in snapshot.schema.names:
        return []
    type_ = snapshot.schema.plain.field(column).type
    return [0.0] * int(getattr(type_, "list_size", 0))


def full_text_search(
    queries: DataFrame,
    uri: str,
    column: str,
    k: int,
    *,
    query_column: str | None = None,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    operator: str = "or",
    phrase: bool = False,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The ``k`` best rows of the table at ``uri`` for every text of ``queries``.

    The result has the columns of ``queries``, ``columns`` of the table, ``_score`` and ``_rank``. A null and
    a text without a word find nothing. The call
    itself makes a first pass over ``queries`` that counts their words in all parts of the table, so that
    scores are those of the whole table. The arguments are as in :func:`vector_search` and
    :meth:`lancewal.Table.full_text_search`.

    .. code-block:: python

        found = full_text_search(questions, "s3://bucket/documents", "text", k=5, query_column="question")
    """
    how = {"operator": operator, "phrase": phrase}
    search = _search(queries, uri, column, k, query_column, columns, filter, how, storage_options)
    checked_words(search.merged.snapshot(), column, "checked", k, operator, phrase)
    _check_queries(queries.schema[search.query_column], is_vector=False)
    parts = search.merged.search_partitions(column, indexed=True)
    corpora = _corpora(queries, search, parts)
    return _best(queries, replace(search, corpora=corpora), Search.words, parts, SCORE)


def _search(
    queries: DataFrame,
    uri: str,
    column: str,
    k: int,
    query_column: str | None,
    columns: Sequence[str] | None,
    filter: str | None,
    how: Mapping[str, Any],
    storage_options: Mapping[str, str] | None,
) -> Search:
    options = Options.of(uri, storage_options)
    merged = MergedState(options, read_state(ObjectStore.from_uri(options.uri, options.storage)))
    schema = merged.snapshot().schema
    asked = query_column or column
    if asked not in queries.columns:
        raise InvalidInputError(
            f"the queries have no column {asked!r}, but {', '.join(queries.columns)}; pass query_column"
        )
    shown = tuple(name for name in schema.names if name != column) if columns is None else tuple(columns)
    merged.predicate(filter)
    unknown = [name for name in shown if name not in schema.names]
    if unknown:
        raise InvalidInputError(
            f"the table has no column {', '.join(unknown)}, but {', '.join(schema.names)}"
        )
    is_vector = "metric" in how
    again = sorted({name for name in shown if shown.count(name) > 1})
    if again or not shown:
        raise InvalidInputError(f"columns names {', '.join(again) + ' twice' if again else 'nothing'}")
    given = [name for name in queries.columns if not is_vector or name != asked]
    # Spark finds columns in any case, unless it is told that cases differ.
    exact = queries.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    taken = {name if exact else name.lower() for name in (*shown, DISTANCE, SCORE, RANK)}
    twice = sorted(name for name in given if (name if exact else name.lower()) in taken)
    if twice:
        raise InvalidInputError(
            f"both the queries and the result have {', '.join(twice)}; rename it in the queries, or choose "
            "other columns"
        )
    return Search(merged, column, asked, k, shown, filter, how)


def _check_queries(field: st.StructField, *, is_vector: bool) -> None:
    """Refuse here what every task would refuse."""
    type_ = field.dataType
    numbers = isinstance(type_, st.ArrayType) and isinstance(type_.elementType, st.NumericType)
    if not (numbers if is_vector else isinstance(type_, st.StringType)):
        raise InvalidInputError(
            f"the queries' column {field.name!r} is {type_.simpleString()}; "
            f"a query is {'an array of numbers' if is_vector else 'a text'}"
        )


def is_nothing(query: object) -> bool:
    """Whether a query finds nothing: a null, or a text without a word."""
    return query is None or (isinstance(query, str) and not query.strip())


_Find = Callable[[Search, InputPartition, Any], pa.Table]


def _best(
    queries: DataFrame, search: Search, find: _Find, parts: Sequence[InputPartition], value: str
) -> DataFrame:
    """The best of all parts for each query."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    crossed = _crossed(queries, parts)
    schema = search.merged.snapshot().schema
    fields = [schema.plain.field(name) for name in search.columns]
    shown = spark_schema(pa.schema([*fields, (value, pa.float32())]))
    # The query's vector is left out: it tells little, and would be copied for every hit.
    asked = queries.columns.index(search.query_column)
    kept = [place for place in range(len(queries.columns)) if value != DISTANCE or place != asked]
    fields_kept = [queries.schema.fields[place] for place in kept] + [crossed.schema[_QUERY]]
    result = st.StructType([*fields_kept, *shown.fields])
    names = (*map(_plain, kept), _QUERY)
    searching = _Searching(search, find, list(parts), _plain(asked), names, result, shown)
    found = crossed.mapInArrow(searching, result)
    order = F.col(value).asc() if value == DISTANCE else F.col(value).desc()
    keys = [quoted(name) for name in schema.primary_key if name in search.columns]
    ranked = Window.partitionBy(_QUERY).orderBy(order, *keys)
    return found.withColumn(RANK, F.row_number().over(ranked)).filter(F.col(RANK) <= search.k).drop(_QUERY)


def _plain(place: int) -> str:
    """The name of a query's column between stages: PySpark's ``mapInArrow`` takes no dots nor backticks."""
    return f"__lancewal_{place}"


def _crossed(queries: DataFrame, parts: Sequence[InputPartition]) -> DataFrame:
    """Every query with the number of every part; a task gets one part and some of the queries."""
    from pyspark.sql import functions as F  # noqa: N812

    slots = int(queries.sparkSession.conf.get("spark.sql.shuffle.partitions") or 200)
    shares = max(slots // len(parts), 1)
    plain = queries.toDF(*map(_plain, range(len(queries.columns))))
    numbered = plain.withColumn(_QUERY, F.monotonically_increasing_id())
    numbers = F.array(*(F.lit(number) for number in range(len(parts))))
    crossed = numbered.withColumn(_PART, F.explode(numbers))
    place = F.col(_PART) * shares + (F.col(_QUERY) % shares).cast("int")
    return crossed.repartitionById(len(parts) * shares, place.cast("int"))


@dataclass(frozen=True)
class _Searching:
    """The work of a task: it takes rows of a query and a part, and returns rows of a query and a hit."""

    search: Search
    find: _Find
    parts: list[InputPartition]
    #: The column with the queries, and those of the result that come from the queries.
    query_column: str
    kept: tuple[str, ...]
    result: st.StructType
    shown: st.StructType

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        wanted, shown = arrow_schema(self.result), arrow_schema(self.shown)
        for batch in batches:
            for row, part, query in _asked(batch, self.query_column, self.parts):
                for hits in self.find(self.search, part, query).to_batches():
                    same = pa.array([row] * hits.num_rows, pa.int64())
                    asked = [batch.column(name).take(same) for name in self.kept]
                    columns = [*asked, *for_spark(hits, shown).columns]
                    yield pa.RecordBatch.from_arrays(columns, schema=wanted)


def _asked(
    batch: pa.RecordBatch, column: str, parts: Sequence[InputPartition]
) -> Iterator[tuple[int, InputPartition, Any]]:
    numbers, queries = batch.column(_PART).to_pylist(), batch.column(column).to_pylist()
    for row, (number, query) in enumerate(zip(numbers, queries, strict=True)):
        if not is_nothing(query):
            yield row, parts[number], query


def _corpora(
    queries: DataFrame, search: Search, parts: Sequence[InputPartition]
) -> dict[str, CorpusStatistics]:
    """For each query text, the statistics of its words in the whole table."""
    texts = queries.select(quoted(search.query_column)).distinct()
    schema = st.StructType([st.StructField("text", st.StringType()), st.StructField("told", st.StringType())])
    counted = _crossed(texts, parts).mapInArrow(_Counting(search, list(parts)), schema).collect()
    totals: dict[str, CorpusStatistics] = {}
    for text, told in counted:
        totals[text] = totals.get(text, CorpusStatistics()) + CorpusStatistics(**json.loads(told))
    return totals


@dataclass(frozen=True)
class _Counting:
    """The work of a task in the first pass: the statistics of each text in the task's part."""

    search: Search
    parts: list[InputPartition]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            texts, told = [], []
            for _, part, query in _asked(batch, _plain(0), self.parts):
                texts.append(query)
                told.append(json.dumps(asdict(self.search.statistics(part, query))))
            yield pa.RecordBatch.from_arrays(
                [pa.array(texts, pa.string()), pa.array(told, pa.string())], names=["text", "told"]
            )
