"""Searches as table functions of SQL, for one query or for each row of another table.

A call is planned once, with the state of the table at that moment. Each task searches the whole table for
its own queries. :func:`lancewal.spark.vector_search` also divides the table among tasks.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.functions import udtf
from pyspark.sql.types import StructType
from pyspark.sql.udtf import AnalyzeArgument, AnalyzeResult

from lancewal.errors import InvalidInputError
from lancewal.reader import Snapshot, checked_nearest, checked_words, find_words, nearest, read_state
from lancewal.spark.columns import arrow_schema, for_spark, spark_schema
from lancewal.spark.options import Options
from lancewal.spark.search import is_nothing
from lancewal.storage import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VECTOR_SEARCH, FULL_TEXT_SEARCH = "lance_vector_search", "lance_full_text_search"


def register_functions(spark: SparkSession) -> None:
    """Register the SQL table functions ``lance_vector_search`` and ``lance_full_text_search``.

    Both take the table's path, the column to search, the query, and the number of rows to return. They return
    all columns of the table except the searched one, and ``_distance`` or ``_score``.

    .. code-block:: python

        register_functions(spark)
        spark.sql("SELECT id FROM lance_vector_search('documents', 'embedding', array(1F, 0F), 5)")
        spark.sql("SELECT q.id, s.* FROM q, LATERAL lance_full_text_search('documents', 'text', q.text, 5) s")
    """
    spark.udtf.register(VECTOR_SEARCH, udtf(_VectorSearch))  # type: ignore[arg-type]
    spark.udtf.register(FULL_TEXT_SEARCH, udtf(_FullTextSearch))  # type: ignore[arg-type]


@dataclass
class _Plan(AnalyzeResult):
    """The plan of a call, with the state of the table pickled for the tasks."""

    planned: bytes = b""


class _Search(ABC):
    """One call of a table function. Spark plans it with ``analyze`` and creates an object in every task."""

    value = ""

    def __init__(self, plan: _Plan) -> None:
        self._uri, state, self._column, self._schema = pickle.loads(plan.planned)
        self._snapshot: Snapshot = state.open({}, state.shards)

    @classmethod
    def _planned(cls, uri: AnalyzeArgument, column: AnalyzeArgument) -> _Plan:
        for name, argument in (("first", uri), ("second", column)):
            if not isinstance(argument.value, str):
                raise InvalidInputError(f"the {name} argument must be a constant text: the table, the column")
        options = Options.of(str(uri.value))
        state = read_state(ObjectStore.from_uri(options.uri))
        table = state.base({}).base.schema
        shown = [field for field in table.plain if field.name != column.value]
        schema = spark_schema(pa.schema([*shown, (cls.value, pa.float32())]))
        return _Plan(schema, planned=pickle.dumps((options.uri, state, column.value, schema)))

    def eval(self, uri: str, column: str, query: Any, k: int) -> Iterator[tuple[Any, ...]]:
        if is_nothing(query):
            return
        found = self._found(query, k, self._schema.fieldNames()[:-1])
        wanted = arrow_schema(self._schema)
        for batch in found.to_batches():
            # Spark takes a map as a dict; Arrow gives a list of pairs, unless told otherwise.
            shown = for_spark(batch, wanted).columns
            columns = [array.to_pylist(maps_as_pydicts="lossy") for array in shown]
            yield from zip(*columns, strict=True)

    @abstractmethod
    def _found(self, query: Any, k: int, columns: list[str]) -> pa.Table:
        """The best ``k`` rows for one query, with ``columns`` and the value that orders them."""


class _VectorSearch(_Search):
    value = "_distance"
    _schema: StructType

    @staticmethod
    def analyze(
        uri: AnalyzeArgument, column: AnalyzeArgument, query: AnalyzeArgument, k: AnalyzeArgument
    ) -> _Plan:
        return _VectorSearch._planned(uri, column)

    def _found(self, query: Any, k: int, columns: list[str]) -> pa.Table:
        return nearest(self._snapshot, checked_nearest(self._snapshot, self._column, query, k), columns)


class _FullTextSearch(_Search):
    value = "_score"

    @staticmethod
    def analyze(
        uri: AnalyzeArgument, column: AnalyzeArgument, query: AnalyzeArgument, k: AnalyzeArgument
    ) -> _Plan:
        return _FullTextSearch._planned(uri, column)

    def _found(self, query: Any, k: int, columns: list[str]) -> pa.Table:
        return find_words(self._snapshot, checked_words(self._snapshot, self._column, query, k), columns)
