"""Whatever happens to a table, searches find what a brute-force search of its newest rows finds."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lancewal.reader import sstable_source, words
from lancewal.writer.table_writer import TableWriter
from tests.reader.searched import (
    ALL_INDEXES,
    DIMENSION,
    NO_INDEXES,
    Row,
    Searched,
    as_table,
    by_distance,
    by_score,
    ids,
    kill,
    row,
    seal,
)

WORDS = ["fox", "foxes", "dog", "running", "the", "lazy"]
KEYS = st.integers(0, 14)
TEXTS = st.none() | st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join)
ROWS = st.lists(st.tuples(KEYS, TEXTS, st.booleans()), min_size=1, max_size=6)
QUERIES = [("fox", "or"), ("dog fox", "and"), ("lazy running dog", "or"), ("the", "or")]
METRICS = ["l2", "cosine", "dot"]


class Searches(RuleBasedStateMachine):
    """One writer at a time, which may be closed, killed or replaced; two buckets."""

    @initialize(
        rows=ROWS | st.just([]),
        indexed=st.booleans(),
        sync=st.booleans(),
        by_lance=st.booleans(),
    )
    def start(self, rows: list[Any], indexed: bool, sync: bool, by_lance: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        self.exact_scores = not by_lance
        if by_lance:
            self.patch.setattr(words, "MAX_INDEXED_ROWS", 3)
            self.patch.setattr(sstable_source, "EXACT_SSTABLE_ROWS", 3)
        self.directory = tempfile.TemporaryDirectory()
        self.made = 0
        self.checks = 0
        self.model: dict[int, Row] = {}
        self.table = Searched(
            Path(self.directory.name),
            self._rows({key: (key, text, has) for key, text, has in rows}.values()),
            indexes=ALL_INDEXES if indexed else NO_INDEXES,
            bucket=("id", 2),
        )
        self.settings = {"sync_indexed_write": sync, "async_index_buffer_rows": 4}
        self.writer: TableWriter | None = None

    def teardown(self) -> None:
        if hasattr(self, "table"):
            if self.writer is not None:
                kill(self.writer)
            self.directory.cleanup()
            self.patch.undo()

    def _rows(self, drawn: Any) -> list[Row]:
        """Rows with vectors that no other row has, so that no two distances are equal."""
        rows = []
        for key, text, has_vector in drawn:
            self.made += 1
            vector = np.random.default_rng(self.made).normal(size=DIMENSION).astype(np.float32).tolist()
            rows.append(row(key, text, vector if has_vector else None, key % 3))
        self.model.update({each["id"]: each for each in rows})
        return rows

    def _open(self) -> TableWriter:
        if self.writer is None:
            self.writer = self.table.writer(**self.settings)
        return self.writer

    @rule(rows=ROWS)
    def put(self, rows: list[Any]) -> None:
        self._open().put(as_table(self._rows(rows)))

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4))
    def delete(self, keys: list[int]) -> None:
        self._open().delete(keys)
        for key in keys:
            self.model.pop(key, None)

    @rule(wait=st.booleans())
    def freeze(self, wait: bool) -> None:
        seal(self._open(), wait=wait)

    @rule()
    def reopen(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.writer = None

    @rule()
    def crash(self) -> None:
        if self.writer is not None:
            kill(self.writer)
        self.writer = None

    @rule()
    def take_over(self) -> None:
        former, self.writer = self.writer, None
        self._open()
        if former is not None:
            kill(former)

    @rule()
    def compact(self) -> None:
        self.table.table.compact()

    @precondition(lambda self: hasattr(self, "table"))
    @rule()
    def optimize(self) -> None:
        self.table.dataset.optimize.optimize_indices()

    @invariant()
    def searches_agree_with_the_model(self) -> None:
        if not hasattr(self, "writer"):
            return
        self.checks += 1
        random = np.random.default_rng(self.checks)
        self._check_vectors(random.normal(size=DIMENSION), METRICS[self.checks % 3])
        query, operator = QUERIES[self.checks % len(QUERIES)]
        self._check_words(query, operator)
        if self.checks % 3 == 0:
            self._check_filtered(random.normal(size=DIMENSION))

    def _check_vectors(self, query: Any, metric: str) -> None:
        expected = by_distance(self.model.values(), query, metric)
        for k in (2, 100):
            found = self.table.near(query, k, metric=metric)
            assert ids(found) == [id_ for id_, _ in expected[:k]]
            for hit, (id_, distance) in zip(found, expected, strict=False):
                assert hit["_distance"] == pytest.approx(distance, rel=1e-4, abs=1e-4)
                assert {name: hit[name] for name in self.model[id_]} == self.model[id_]

    def _check_words(self, query: str, operator: str) -> None:
        expected = by_score(self.model.values(), query, operator)
        found = self.table.words(query, operator=operator)
        assert set(ids(found)) == set(expected)
        if self.exact_scores:
            assert {hit["id"]: hit["_score"] for hit in found} == pytest.approx(expected, rel=1e-4)
            best = sorted(expected.values(), reverse=True)[:2]
            cut = [hit["_score"] for hit in self.table.words(query, 2, operator=operator)]
            assert cut == pytest.approx(best, rel=1e-4)

    def _check_filtered(self, query: Any) -> None:
        kept = {key: each for key, each in self.model.items() if each["n"] == 1}
        expected = [id_ for id_, _ in by_distance(kept.values(), query)]
        assert ids(self.table.near(query, 3, metric="l2", filter="n = 1")) == expected[:3]
        matching = by_score(self.model.values(), "fox").keys() & kept.keys()
        assert set(ids(self.table.words("fox", filter="n = 1"))) == matching


_SHARED: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
}


def test_searches_equal_a_brute_force_search_after_every_step() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Searches, settings=settings(max_examples=12, stateful_step_count=12, **_SHARED)
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_searches_equal_a_brute_force_search_after_every_step_of_many() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Searches, settings=settings(max_examples=200, stateful_step_count=40, **_SHARED)
    )


class Versions:
    """What one thread writes: every key again and again, with its version in each column."""

    def __init__(self, keys: int) -> None:
        self.keys = keys
        #: By key, the version whose put has begun, and the one whose put has returned.
        self.begun = [0] * keys
        self.done = [0] * keys

    def write(self, writer: TableWriter, rounds: int, freeze_every: int) -> None:
        for version in range(1, rounds + 1):
            for start in range(0, self.keys, 10):
                keys = range(start, min(start + 10, self.keys))
                for key in keys:
                    self.begun[key] = version
                rows = [row(key, f"fox version{version}", [version, key, 0, 0], version) for key in keys]
                writer.put(as_table(rows))
                for key in keys:
                    self.done[key] = version
            if version % freeze_every == 0:
                seal(writer)

    def check(self, search: Callable[[], pa.Table]) -> None:
        """Every key once, in a version that was the newest at some moment of the search."""
        before = list(self.done)
        found = search()
        after = list(self.begun)
        versions = dict(zip(found["id"].to_pylist(), found["n"].to_pylist(), strict=True))
        assert len(versions) == found.num_rows, "a hit came twice"
        assert set(versions) >= {key for key in range(self.keys) if before[key]}, "a row was missed"
        for key, version in versions.items():
            assert before[key] <= version <= after[key], "stale, or from beyond the snapshot"
        for hit in found.select(["n", "text", "v"]).to_pylist():
            assert hit["text"] == f"fox version{hit['n']}"
            assert hit["v"][0] == hit["n"]


@pytest.mark.parametrize("durable", [True, False])
def test_searches_beside_a_writer_see_every_key_once_and_nothing_beyond_their_snapshot(
    tmp_path: Path, durable: bool
) -> None:
    table, versions, errors = Searched(tmp_path, bucket=("id", 2)), Versions(60), list[BaseException]()
    writer = table.writer(
        durable_write=durable, sync_indexed_write=durable, async_index_buffer_rows=50, max_memtable_rows=400
    )
    finished = threading.Event()

    def write() -> None:
        try:
            versions.write(writer, rounds=25, freeze_every=6)
        except BaseException as error:
            errors.append(error)
        finally:
            finished.set()

    def search(number: int) -> None:
        searches: list[Callable[[], pa.Table]] = [
            lambda: table.table.vector_search("v", [0.0, 0.0, 0.0, 0.0], 1000),
            lambda: table.table.full_text_search("text", "fox", 1000),
            lambda: table.table.vector_search("v", [1.0, 2.0, 0.0, 0.0], 1000, filter="n >= 0"),
        ]
        turn = number
        try:
            while not finished.is_set():
                versions.check(searches[turn % 3])
                turn += 1
            for each in searches:
                versions.check(each)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=write),
        *(threading.Thread(target=search, args=(i,)) for i in range(4)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kill(writer)
    assert not errors, errors
