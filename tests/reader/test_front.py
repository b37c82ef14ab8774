"""Table.search: one front for vectors, words and both, against a model of each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import lancewal
from lancewal.errors import InvalidInputError
from tests.reader.searched import (
    ALL_INDEXES,
    APPEND_ONLY,
    FIELDS,
    NO_INDEXES,
    Row,
    Searched,
    as_table,
    by_distance,
    by_score,
    create_indexes,
    random_rows,
)

QUERIES = [[0.3, -0.2, 0.9, 0.1], [-1.0, 0.5, 0.0, 0.2], [0.0, 0.0, 0.1, 0.0]]
TEXTS = ["lazy fox", "alpha", "dog jumps"]
K = 7


@pytest.fixture(scope="module")
def model() -> dict[int, Row]:
    """The newest rows, which :func:`table` holds."""
    rows = {each["id"]: each for each in [*random_rows(range(40), 1), *random_rows(range(30, 60), 2)]}
    del rows[35]
    return rows


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, model: dict[int, Row]) -> Iterable[lancewal.Table]:
    """Rows of the base, some of them replaced in an SSTable, and in a MemTable, one of them deleted."""
    searched = Searched(tmp_path_factory.mktemp("front"), random_rows(range(40), 1))
    newer = random_rows(range(30, 60), 2)
    searched.flushed(newer[:15])
    with searched.writer() as writer:
        writer.put(as_table(newer[15:]))
        writer.delete([35])
        yield searched.table


def nearest_ids(model: dict[int, Row], query: list[float]) -> list[int]:
    return [id_ for id_, _ in by_distance(model.values(), query)]


def by_words(model: dict[int, Row], text: str) -> dict[int, float]:
    return by_score(model.values(), text)


def fused(model: dict[int, Row], query: list[float], scored: list[int], k: int) -> list[float]:
    """The relevance of the best, by the formula: one over sixty and the rank, from one on, in each search."""
    relevance: dict[int, float] = {}
    for ranked in (nearest_ids(model, query)[:50], scored):
        for rank, id_ in enumerate(ranked, 1):
            relevance[id_] = relevance.get(id_, 0.0) + 1 / (60 + rank)
    return sorted(relevance.values(), reverse=True)[:k]


def test_a_vector_alone_finds_the_nearest(table: lancewal.Table, model: dict[int, Row]) -> None:
    expected = nearest_ids(model, QUERIES[0])[:K]
    for found in (table.search(QUERIES[0], K), table.search(vector=np.array(QUERIES[0]), k=K)):
        assert found["id"].to_pylist() == expected
        assert found.column_names[-1] == "_distance"


def test_a_text_alone_finds_the_words(table: lancewal.Table, model: dict[int, Row]) -> None:
    for found in (table.search("lazy fox", 100), table.search(text="lazy fox", k=100)):
        scores = dict(zip(found["id"].to_pylist(), found["_score"].to_pylist(), strict=True))
        assert scores == pytest.approx(by_words(model, "lazy fox"), rel=1e-4)


def test_a_text_and_a_vector_are_ranked_together(table: lancewal.Table, model: dict[int, Row]) -> None:
    scored = table.search("lazy fox", 50)["id"].to_pylist()  # ties have no order in the model
    expected = fused(model, QUERIES[0], scored, K)
    for found in (
        table.search("lazy fox", K, vector=QUERIES[0]),
        table.search(QUERIES[0], K, text="lazy fox"),
        table.hybrid_search("v", QUERIES[0], "text", "lazy fox", K),
    ):
        assert found["_relevance"].to_pylist() == pytest.approx(expected)


def test_filter_columns_and_metric_reach_every_search(table: lancewal.Table, model: dict[int, Row]) -> None:
    some = {id_: row for id_, row in model.items() if row["n"] == 3}
    found = table.search(QUERIES[1], K, filter="n = 3", columns=["id"], metric="cosine")
    assert found["id"].to_pylist() == [id_ for id_, _ in by_distance(some.values(), QUERIES[1], "cosine")[:K]]
    assert found.column_names == ["id", "_distance"]
    words = table.search("fox", 100, filter="n = 3", columns=["id"])
    assert set(words["id"].to_pylist()) == set(by_words(model, "fox")) & set(some)
    both = table.search("fox", 100, vector=QUERIES[1], filter="n = 3", columns=["id"], metric="cosine")
    assert set(both["id"].to_pylist()) == set(some)
    assert both.column_names == ["id", "_relevance"]


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda queries: queries, id="lists"),
        pytest.param(lambda queries: np.array(queries, np.float32), id="array"),
        pytest.param(lambda queries: [np.array(each) for each in queries], id="arrays"),
        pytest.param(lambda queries: pa.array(queries, pa.list_(pa.float32(), 4)), id="arrow"),
        pytest.param(lambda queries: list(pa.array(queries)), id="scalars"),
    ],
)
def test_a_batch_of_vectors_is_each_of_them(table: lancewal.Table, model: dict[int, Row], form: Any) -> None:
    found = table.search(form(QUERIES), K, columns=["id"])
    assert found.schema.field("_query").type == pa.int32()
    expected = [(n, id_) for n, query in enumerate(QUERIES) for id_ in nearest_ids(model, query)[:K]]
    assert list(zip(found["_query"].to_pylist(), found["id"].to_pylist(), strict=True)) == expected


def test_batches_of_texts_and_of_both(table: lancewal.Table) -> None:
    for batch, alone in (
        (table.search(TEXTS, K), [table.search(text, K) for text in TEXTS]),
        (
            table.search(TEXTS, K, vector=QUERIES),
            [table.search(text, K, vector=vector) for text, vector in zip(TEXTS, QUERIES, strict=True)],
        ),
    ):
        numbers = np.repeat(np.arange(3), [each.num_rows for each in alone])
        assert batch["_query"].to_pylist() == numbers.tolist()
        assert batch.drop_columns(["_query"]).to_pylist() == pa.concat_tables(alone).to_pylist()


def test_a_query_of_a_batch_may_find_nothing(table: lancewal.Table) -> None:
    found = table.search(["zebra", "fox"], K)
    assert set(found["_query"].to_pylist()) == {1}
    assert table.search([QUERIES[0]], 1)["_query"].to_pylist() == [0]


def test_a_batch_sees_one_state(table: lancewal.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    take = type(table._reader).snapshot
    monkeypatch.setattr(
        type(table._reader), "snapshot", lambda *args, **how: taken.append(1) or take(*args, **how)
    )
    table.search(TEXTS, K, vector=QUERIES)
    assert len(taken) == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "nothing to search for"),
        ({"query": "fox", "text": "dog"}, "query is a text already"),
        ({"query": QUERIES[0], "vector": QUERIES[0]}, "query is a vector already"),
        ({"text": QUERIES[0]}, "text is a string"),
        ({"query": "fox", "metric": "l2"}, "metric compares vectors"),
        ({"query": "fox", "vector": QUERIES}, "vector is a list of 3, text is one"),
        ({"query": TEXTS[:2], "vector": QUERIES}, "vector is a list of 3, text is a list of 2"),
        ({"query": np.empty((0, 4))}, "no queries"),
        ({"query": [QUERIES[0], [1.0]]}, r"query 1: the query has shape \(1,\)"),
        ({"query": ["fox", " "]}, "query 1: the full-text query is"),
        ({"query": "fox", "text_column": "n"}, "full-text search needs text"),
        ({"query": QUERIES[0], "vector_column": "nope"}, "no column 'nope'"),
        ({"query": QUERIES[0], "k": 0}, "k must be a whole number"),
    ],
)
def test_bad_searches_are_refused(table: lancewal.Table, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        table.search(**arguments)


def test_several_columns_are_named_and_can_be_chosen(tmp_path: Path) -> None:
    schema = pa.schema([*FIELDS, pa.field("title", pa.string()), pa.field("w", pa.list_(pa.float32(), 4))])
    rows = [{**each, "title": "zebra", "w": [9.0, 0.0, 0.0, each["id"]]} for each in random_rows(range(9), 1)]
    searched = Searched(tmp_path, rows, schema=schema, indexes=NO_INDEXES)
    with pytest.raises(InvalidInputError, match="columns of vectors: v, w; choose one with vector_column="):
        searched.table.search(QUERIES[0])
    with pytest.raises(InvalidInputError, match="columns of text: text, title; choose one with text_column="):
        searched.table.search("zebra")
    found = searched.table.search([9.0, 0.0, 0.0, 3.0], 1, vector_column="w")
    assert found["id"].to_pylist() == [3]
    assert searched.table.search("zebra", text_column="title").num_rows == 9
    create_indexes(searched.dataset, {"title": {"index_type": "INVERTED"}})
    assert searched.table.search("zebra").num_rows == 9  # the only one with an index
    create_indexes(searched.dataset, {"text": {"index_type": "INVERTED"}})
    with pytest.raises(InvalidInputError, match="several indexed columns of text: text, title"):
        searched.table.search("zebra")


def test_a_table_without_such_columns_says_so(tmp_path: Path) -> None:
    searched = Searched(tmp_path, schema=pa.schema(FIELDS[:2]), indexes=NO_INDEXES)
    with pytest.raises(InvalidInputError, match="the table has no columns of vectors"):
        searched.table.search(QUERIES[0])
    with pytest.raises(InvalidInputError, match="the table has no columns of text"):
        searched.table.search("fox")


def test_a_table_without_a_key_is_searched_by_vector_and_by_text(tmp_path: Path) -> None:
    rows = random_rows(range(9), 1)
    table = Searched(tmp_path, rows, schema=APPEND_ONLY, indexes=ALL_INDEXES).table
    assert table.search(QUERIES[:2], 1)["_query"].to_pylist() == [0, 1]
    assert table.search("fox", 9).num_rows == sum("fox" in each["text"] for each in rows)
    with pytest.raises(InvalidInputError, match="hybrid search needs a primary key"):
        table.search("fox", vector=QUERIES[0])


def test_a_column_called_query_is_not_hidden_by_a_batch(tmp_path: Path) -> None:
    schema = pa.schema([*FIELDS, pa.field("_query", pa.string())])
    rows = [{**each, "_query": "mine"} for each in random_rows(range(3), 1)]
    table = Searched(tmp_path, rows, schema=schema).table
    assert table.search(QUERIES[0])["_query"].to_pylist() == ["mine"] * 3
    with pytest.raises(InvalidInputError, match="columns of its own named _query"):
        table.search(QUERIES)
