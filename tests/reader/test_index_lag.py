"""Rows that a compaction brought and an index of the base lacks: found once, in their newest version."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal.reader import BaseSource, words
from tests.reader.searched import Row, Searched, by_distance, by_score, ids, random_rows, row

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def every_base_is_large() -> Iterator[None]:
    """So that Lance's own full-text index is searched, as it is in tables of more than some thousand rows."""
    before = words.MAX_INDEXED_ROWS
    words.MAX_INDEXED_ROWS = 5
    yield
    words.MAX_INDEXED_ROWS = before


@pytest.fixture
def lagging(tmp_path: Path) -> Searched:
    """Some rows are updated, some deleted, some new, all compacted; no index was brought up to date."""
    searched = Searched(tmp_path, random_rows(range(40), 1))
    searched.flushed([row(1, "ocelot"), row(41, "ocelot dog", [9.0] * 4)], deletes=[2])
    searched.table.compact(optimize_indexes=False)
    return searched


def test_rows_that_the_index_lacks_are_found_by_words(lagging: Searched) -> None:
    assert sorted(ids(lagging.words("ocelot"))) == [1, 41]
    assert sorted(ids(lagging.words("ocelot", filter="id > 1"))) == [41]
    assert ids(lagging.words("ocelot dog", operator="and")) == [41]
    assert 2 not in ids(lagging.words("alpha beta gamma delta fox dog running jumps lazy"))


def test_their_texts_are_read_once_and_not_for_every_search(
    lagging: Searched, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Any] = []
    read = BaseSource._index_of_words

    def counted(self: BaseSource, query: Any, fragments: Any) -> Any:
        reads.append([each.fragment_id for each in fragments])
        return read(self, query, fragments)

    monkeypatch.setattr(BaseSource, "_index_of_words", counted)
    for word in ("ocelot", "fox", "dog"):
        lagging.words(word)
    lacking = lagging.live.base().manifest
    (index,) = {each.name for each in lacking.indexes if "Inverted" in each.details_type}
    assert reads == [sorted(lacking.fragment_ids - lacking.covered_fragments(index))]


def test_an_index_that_is_up_to_date_is_asked_alone(
    lagging: Searched, monkeypatch: pytest.MonkeyPatch
) -> None:
    lagging.dataset.optimize.optimize_indices()
    monkeypatch.delattr(BaseSource, "_index_of_words")
    assert sorted(ids(lagging.words("ocelot"))) == [1, 41]


@given(
    seed=st.integers(0, 10_000),
    updated=st.sets(st.integers(0, 39), max_size=12),
    deleted=st.sets(st.integers(0, 60), max_size=6),
    new=st.integers(0, 12),
    again=st.sets(st.integers(0, 60), max_size=5),
)
@settings(max_examples=12, deadline=None)
def test_searches_find_what_a_search_of_every_row_finds(
    seed: int,
    updated: set[int],
    deleted: set[int],
    new: int,
    again: set[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model: dict[int, Row] = {each["id"]: each for each in random_rows(range(40), seed)}
    searched = Searched(tmp_path_factory.mktemp(f"lag-{next(_numbers)}"), list(model.values()))
    for wanted, gone, compacted in (
        ([*sorted(updated), *range(50, 50 + new)], sorted(deleted), True),
        (sorted(again), [], False),
    ):
        changed = random_rows(wanted, seed + 1 + compacted)
        if changed or gone:
            searched.flushed(changed, gone)
        model |= {each["id"]: each for each in changed}
        for key in gone:
            model.pop(key, None)
        if compacted:
            searched.table.compact(optimize_indexes=False)
    rows = list(model.values())
    for query, operator in (("fox", "or"), ("alpha lazy", "or"), ("dog beta", "and")):
        found = searched.words(query, operator=operator)
        assert sorted(ids(found)) == sorted(by_score(rows, query, operator))
    vector = np.random.default_rng(seed).normal(size=len(rows[0]["v"])).tolist()
    assert ids(searched.near(vector, 5)) == [id_ for id_, _ in by_distance(rows, vector)[:5]]
