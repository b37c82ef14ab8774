"""Searches for many queries at once: the plain reader and an exact model are the oracles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

import lancewal
from lancewal.errors import InvalidInputError
from lancewal.spark import full_text_search, register_functions, vector_search
from tests.spark.tables import new_table
from tests.tables import KEYED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema([KEYED.field("id"), ("text", pa.string()), ("vector", pa.list_(pa.float32(), 4))])
WORDS = ("lance", "wal", "spark", "arrow", "fox", "dog", "table")


def made(ids: range, seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(random.random(4 * len(ids), dtype=np.float32)), 4)
    texts = [" ".join(random.choice(WORDS, 3)) for _ in ids]
    return pa.table([pa.array(ids, pa.int64()), pa.array(texts), vectors], schema=SCHEMA)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> lancewal.Table:
    """Newer versions in every level; the base in several fragments."""
    table = new_table(tmp_path_factory.mktemp("search") / "table", SCHEMA)
    for seed, ids in enumerate((range(60), range(60, 100))):
        with table.writer() as writer:
            writer.put(made(ids, seed))
        table.flush()
        table.compact(compact_files=False)
    with table.writer() as writer:
        writer.put(made(range(40, 70), 7))
    table.flush()
    with table.writer() as writer:
        writer.put(made(range(30, 50), 9))
        writer.delete([1, 45, 99])
    return table


def test_the_nearest_rows_are_those_of_an_exact_model(spark: SparkSession, table: lancewal.Table) -> None:
    queries = np.random.default_rng(3).random((5, 4), dtype=np.float32)
    frame = spark.createDataFrame(
        [*((i, list(map(float, query))) for i, query in enumerate(queries)), (9, None)],
        "number int, vector array<float>",
    )
    found = vector_search(frame, table.uri, "vector", 6, columns=["id", "text"]).collect()
    rows = table.scan().to_table()
    vectors = np.array(rows["vector"].to_pylist(), np.float32)
    for number, query in enumerate(queries):
        apart = ((vectors - query) ** 2).sum(axis=1)
        expected = [rows["id"][int(i)].as_py() for i in np.argsort(apart, kind="stable")[:6]]
        mine = sorted((row for row in found if row.number == number), key=lambda row: row._rank)
        assert [row.id for row in mine] == expected
        theirs = table.vector_search("vector", query, 6, columns=["id", "text"]).to_pylist()
        assert [(row.id, row.text) for row in mine] == [(row["id"], row["text"]) for row in theirs]
        assert np.allclose([row._distance for row in mine], np.sort(apart)[:6], atol=1e-6)
    assert {row.number for row in found} == set(range(5))


def test_a_filter_comes_before_the_cut(spark: SparkSession, table: lancewal.Table) -> None:
    frame = spark.createDataFrame([([0.5] * 4,)], "query array<float>")
    mine = vector_search(
        frame, table.uri, "vector", 3, query_column="query", columns=["id"], filter="id < 20"
    )
    theirs = table.vector_search("vector", [0.5] * 4, 3, filter="id < 20")["id"].to_pylist()
    assert [row.id for row in mine.orderBy("_rank").collect()] == theirs


def test_words_are_scored_against_the_whole_table(spark: SparkSession, table: lancewal.Table) -> None:
    asked = spark.createDataFrame([("fox",), ("lance wal",), ("nothing",)], "question string")
    found = full_text_search(asked, table.uri, "text", 4, query_column="question", columns=["id"]).collect()
    assert {row.question for row in found} == {"fox", "lance wal"}
    for text in ("fox", "lance wal"):
        mine = sorted((row._rank, row._score) for row in found if row.question == text)
        theirs = table.full_text_search("text", text, 4, columns=["id"])["_score"].to_pylist()
        assert [rank for rank, _ in mine] == [1, 2, 3, 4]
        assert np.allclose([score for _, score in mine], theirs, atol=1e-5)


def test_searches_are_table_functions_of_sql(spark: SparkSession, table: lancewal.Table) -> None:
    register_functions(spark)
    vector = ", ".join(["0.5F"] * 4)
    found = spark.sql(f"SELECT * FROM lance_vector_search('{table.uri}', 'vector', array({vector}), 3)")
    assert found.columns == ["id", "text", "_distance"]
    expected = table.vector_search("vector", [0.5] * 4, 3)["id"].to_pylist()
    assert [row.id for row in found.orderBy("_distance").collect()] == expected
    asked = spark.createDataFrame([(1, "fox"), (2, "spark"), (3, None)], "number int, question string")
    asked.createOrReplaceTempView("asked")
    search = f"lance_full_text_search('{table.uri}', 'text', question, 2)"
    joined = spark.sql(f"SELECT number, s.id FROM asked, LATERAL {search} s").collect()
    assert sorted(row.number for row in joined) == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"column": "nothing"}, "no column"),
        ({"column": "text"}, "float vectors"),
        ({"k": 0}, "at least 1"),
        ({"query_column": "other"}, "pass query_column"),
        ({"columns": ["id", "none"]}, "no column none"),
        ({"filter": "none = 1"}, "none"),
        ({"metric": "far"}, "far"),
        ({"query_column": "text"}, "column 'text' is string; a query is an array of numbers"),
        ({"columns": ["id", "id"]}, "columns names id twice"),
        ({"columns": []}, "columns names nothing"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_a_task_starts(
    spark: SparkSession, table: lancewal.Table, arguments: dict[str, Any], told: str
) -> None:
    frame = spark.createDataFrame(
        [([0.5] * 4, "x", [1.0])], "vector array<float>, text string, nothing array<float>"
    )
    given = {"column": "vector", "k": 1, "columns": ["id"], **arguments}
    with pytest.raises(InvalidInputError, match=told):
        vector_search(frame, table.uri, **given)


@pytest.mark.parametrize("name", ["id", "ID", "_rank"])
def test_a_name_that_both_sides_have_is_refused(
    spark: SparkSession, table: lancewal.Table, name: str
) -> None:
    frame = spark.createDataFrame([(1, [0.5] * 4)], f"{name} long, vector array<float>")
    with pytest.raises(InvalidInputError, match="rename it"):
        vector_search(frame, table.uri, "vector", 1)


def test_dots_and_backticks_in_names_of_queries_were_taken_for_fields_and_quotes(
    spark: SparkSession, table: lancewal.Table
) -> None:
    frame = spark.createDataFrame([(7, [0.5] * 4, "fox")]).toDF("a.b", "the `query", "words.of it")
    near = vector_search(frame, table.uri, "vector", 2, query_column="the `query", columns=["id"])
    assert near.columns == ["a.b", "words.of it", "id", "_distance", "_rank"]
    expected = table.vector_search("vector", [0.5] * 4, 2)["id"].to_pylist()
    assert [tuple(row)[:3] for row in near.orderBy("_rank").collect()] == [(7, "fox", i) for i in expected]
    found = full_text_search(frame, table.uri, "text", 2, query_column="words.of it", columns=["text"])
    assert found.columns == ["a.b", "the `query", "words.of it", "text", "_score", "_rank"]
    assert all("fox" in row.text for row in found.collect())
    assert found.count() == 2


def test_a_question_without_a_word_failed_all_others(spark: SparkSession, table: lancewal.Table) -> None:
    asked = spark.createDataFrame([("",), ("fox",), (" \n",), (None,)], "question string")
    found = full_text_search(asked, table.uri, "text", 1, query_column="question", columns=["id"])
    assert [row.question for row in found.collect()] == ["fox"]
    register_functions(spark)
    asked.createOrReplaceTempView("blank")
    search = f"lance_full_text_search('{table.uri}', 'text', question, 1)"
    rows = spark.sql(f"SELECT question FROM blank, LATERAL {search}").collect()
    assert [row.question for row in rows] == ["fox"]


def test_a_table_with_a_map_failed_in_a_table_function(spark: SparkSession, tmp_path: Path) -> None:
    pairs = pa.map_(pa.string(), pa.int32())
    schema = pa.schema([*SCHEMA, ("pairs", pairs), ("more", pa.list_(pa.struct([("inside", pairs)])))])
    table = new_table(tmp_path / "maps", schema)
    row = {"id": 1, "text": "fox", "vector": [0.5] * 4}
    with table.writer() as writer:
        writer.put([{**row, "pairs": [("a", 1), ("b", None)], "more": [{"inside": [("c", 3)]}]}])
    register_functions(spark)
    search = f"lance_full_text_search('{table.uri}', 'text', 'fox', 1)"
    (found,) = spark.sql(f"SELECT pairs, more FROM {search}").collect()
    assert found.pairs == {"a": 1, "b": None}
    assert found.more[0].inside == {"c": 3}
