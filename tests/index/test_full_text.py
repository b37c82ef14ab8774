"""Hits and scores against Lance itself: same rows, same words, same numbers."""

from __future__ import annotations

import tempfile
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lance.query import FullTextOperator, FullTextQuery, MatchQuery, PhraseQuery

from lancewal.errors import InvalidInputError
from lancewal.index import full_text as postings
from lancewal.index.full_text import CorpusStatistics, FullTextIndex, TextHits, index_of
from lancewal.index.kinds import FullTextParams

VOCABULARY = [
    "red",
    "fox",
    "foxes",
    "jumps",
    "the",
    "of",
    "lazy",
    "dog",
    "getUserName",
    "foo_bar",
    "naïve",
    "==",
]
QUERIES = ["fox", "red fox", "fox red fox", "the lazy dog", "getUserName", "foo_bar ==", "zebra", "zebra fox"]
ANALYZERS: list[dict[str, Any]] = [
    {},
    {"base_tokenizer": "whitespace", "stem": False},
    {"language": "German"},
    {"base_tokenizer": "ngram"},
    {"analyzer": "code", "split_identifiers": True, "index_operators": True},
    {"base_tokenizer": "raw"},
    {"custom_stop_words": ["fox"], "lower_case": False},
]


def texts(count: int) -> list[str | None]:
    rng = np.random.default_rng(count)
    made: list[str | None] = [" ".join(rng.choice(VOCABULARY, rng.integers(1, 12))) for _ in range(count - 3)]
    return [*made, "", None, "the of"]


class LanceCorpus:
    """The same rows in a Lance table with an inverted index."""

    def __init__(self, rows: list[str | None], **options: Any) -> None:
        self.directory = tempfile.TemporaryDirectory()
        table = pa.table({"row": range(len(rows)), "text": pa.array(rows, pa.string())})
        self.dataset = lance.write_dataset(table, self.directory.name)
        self.dataset.create_scalar_index("text", "INVERTED", **options)
        params = self.dataset.stats.index_stats("text_idx")["indices"][0]["params"]
        stop_words = params.pop("custom_stop_words")
        known = FullTextParams.__dataclass_fields__
        self.params = FullTextParams(
            **{key: value for key, value in params.items() if key in known},
            custom_stop_words=None if stop_words is None else tuple(stop_words),
        )

    def search(self, query: FullTextQuery) -> dict[int, float]:
        found = self.dataset.to_table(columns=["row", "_score"], full_text_query=query)
        return dict(zip(found["row"].to_pylist(), found["_score"].to_pylist(), strict=True))


def as_dict(hits: TextHits) -> dict[int, float]:
    return dict(zip(hits.positions.tolist(), hits.scores.tolist(), strict=True))


@pytest.mark.parametrize("options", ANALYZERS, ids=str)
def test_match_queries_have_lances_hits_and_scores(options: dict[str, Any]) -> None:
    rows = texts(60)
    corpus = LanceCorpus(rows, **options)
    index = index_of(pa.array(rows), corpus.params)
    for query in QUERIES:
        for operator in FullTextOperator:
            expected = corpus.search(MatchQuery(query, "text", operator=operator))
            hits = index.search(query, index.rows, operator=operator.value.lower())
            assert as_dict(hits) == pytest.approx(expected, rel=1e-5), (query, operator)
            assert hits.scores.dtype == np.float32


def test_phrases_have_lances_hits_and_scores() -> None:
    rows = [*texts(80), "jumps over the lazy dog", "lazy the dog", "dog lazy"]
    corpus = LanceCorpus(rows, with_position=True)
    index = index_of(pa.array(rows), corpus.params)
    for query in ("lazy dog", "red fox", "fox red fox", "dog", "over the lazy", "lazy the dog", "zebra dog"):
        expected = corpus.search(PhraseQuery(query, "text"))
        assert as_dict(index.search(query, index.rows, phrase=True)) == pytest.approx(expected, rel=1e-5), (
            query
        )


@settings(max_examples=12)
@given(
    st.lists(st.lists(st.sampled_from(VOCABULARY), max_size=6).map(" ".join), min_size=1, max_size=30),
    st.data(),
)
def test_rows_above_the_bound_leave_hits_and_scores_as_if_they_were_not_there(
    rows: list[str], data: st.DataObject
) -> None:
    bound = data.draw(st.integers(1, len(rows)))
    corpus = LanceCorpus(list(rows[:bound]))
    index = index_of(pa.array(rows), FullTextParams())
    for query in ("fox red", "dog"):
        expected = corpus.search(MatchQuery(query, "text"))
        assert as_dict(index.search(query, bound)) == pytest.approx(expected, rel=1e-5)


@given(st.lists(st.lists(st.sampled_from(VOCABULARY), max_size=6), max_size=40), st.data())
def test_insertion_in_any_batches_finds_the_same(rows: list[list[str]], data: st.DataObject) -> None:
    column = pa.array([" ".join(words) for words in rows], pa.string())
    whole = index_of(column, FullTextParams(with_position=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postings, "_TAIL", 16)
        pieces = FullTextIndex(FullTextParams(with_position=True))
        while pieces.rows < len(column):
            step = data.draw(st.integers(1, 9))
            pieces.insert(column.slice(pieces.rows, step), pieces.rows)
        for query in ("fox", "red fox", "lazy dog jumps"):
            for options in ({}, {"operator": "and"}, {"phrase": True}):
                expected = whole.search(query, len(column), **options)
                assert as_dict(pieces.search(query, len(column), **options)) == as_dict(expected)


def test_statistics_of_parts_add_up_to_the_scores_of_the_whole() -> None:
    rows = texts(50)
    whole = index_of(pa.array(rows), FullTextParams())
    first, second = (
        index_of(pa.array(part, pa.string()), FullTextParams()) for part in (rows[:20], rows[20:])
    )
    query = "fox lazy zebra"
    together = CorpusStatistics.combined([first.statistics(query, 20), second.statistics(query, 30)])
    assert together == whole.statistics(query, 50)
    hits = as_dict(first.search(query, 20, statistics=together))
    hits |= {20 + row: score for row, score in as_dict(second.search(query, 30, statistics=together)).items()}
    assert hits == as_dict(whole.search(query, 50))


def test_rows_that_are_not_allowed_neither_match_nor_weigh() -> None:
    rows = texts(50)
    index = index_of(pa.array(rows), FullTextParams())
    allowed = np.arange(50) % 3 != 0
    kept = [text for row, text in enumerate(rows) if allowed[row]]
    alone = as_dict(index_of(pa.array(kept), FullTextParams()).search("fox dog", len(kept)))
    positions = np.flatnonzero(allowed)
    expected = {int(positions[row]): score for row, score in alone.items()}
    assert as_dict(index.search("fox dog", 50, allowed=allowed)) == expected


def test_a_column_without_an_index_is_searched_with_lances_defaults() -> None:
    rows = texts(40)
    expected = LanceCorpus(rows).search(MatchQuery("foxes jumping", "text"))
    assert expected
    chunked = pa.chunked_array([pa.array(rows[:7]), pa.array(rows[7:])])
    index = index_of(chunked, FullTextParams(with_position=True))
    assert as_dict(index.search("foxes jumping", 40)) == pytest.approx(expected, rel=1e-5)
    phrases = as_dict(index.search("red fox", 40, phrase=True))
    assert phrases.keys() <= as_dict(index.search("red fox", 40)).keys()


def test_the_limit_keeps_the_best_and_breaks_ties_by_row() -> None:
    index = index_of(pa.array(["fox", "fox fox", "fox", "dog", "fox"]), FullTextParams())
    assert index.search("fox", 5).positions.tolist() == [1, 0, 2, 4]
    assert index.search("fox", 5, limit=2).positions.tolist() == [1, 0]
    assert index.search("fox", 5, limit=3).positions.tolist() == [1, 0, 2]


def test_replayed_texts_do_not_count_twice() -> None:
    index = FullTextIndex(FullTextParams())
    column = pa.array(["red fox", "fox"])
    index.insert(column, 0)
    once = as_dict(index.search("fox", 2))
    index.insert(column, 0)
    index.insert(pa.array(["fox", "dog"]), 1)
    assert index.rows == 3
    assert as_dict(index.search("fox", 2)) == once
    assert index.search("fox", 3).positions.tolist() == [1, 0]


def test_stop_words_alone_match_nothing_and_an_empty_query_is_refused() -> None:
    index = index_of(pa.array(["the fox", ""]), FullTextParams())
    assert not len(index.search("the of", 2).positions)
    assert not len(index.search("the", 2, operator="and").positions)
    for query in ("", "  \n"):
        with pytest.raises(InvalidInputError, match="empty"):
            index.search(query, 2)


def test_phrases_without_positions_and_unknown_operators_are_refused() -> None:
    index = index_of(pa.array(["red fox"]), FullTextParams())
    with pytest.raises(InvalidInputError, match="with_position"):
        index.search("red fox", 1, phrase=True)
    with pytest.raises(InvalidInputError, match="operator"):
        index.search("red fox", 1, operator="xor")
    with pytest.raises(InvalidInputError, match="positive"):
        index.search("fox", 1, limit=0)
    with pytest.raises(InvalidInputError, match="text"):
        index.insert(pa.array([1]), 1)


def test_memory_grows_with_texts() -> None:
    small = index_of(pa.array([f"w{i} fox" for i in range(10)]), FullTextParams())
    large = index_of(pa.array([f"w{i} fox dog" for i in range(20_000)]), FullTextParams())
    assert large.memory_bytes > small.memory_bytes + 20_000 * 100
