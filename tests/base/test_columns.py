"""Renamed columns are told from those that only got a dropped one's field id."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal.base import columns as column_history
from lancewal.base.columns import MEM_WAL_INDEX, ColumnHistory, ColumnLog, ColumnRuns, Traces

RENAMED = {1: {0: "a"}, 2: {0: "b"}, 3: {0: "b", 1: "x"}, 4: {0: "c"}}


def test_every_name_since_the_column_was_added_is_a_former_one() -> None:
    history = ColumnHistory(4, ColumnLog(RENAMED.get))
    assert [history.was_called(0, name) for name in "abcx"] == [True, True, True, False]


def test_a_name_from_before_the_column_was_dropped_is_another_columns() -> None:
    versions = {1: {0: "a", 1: "draft"}, 2: {0: "a"}, 3: {0: "a", 1: "note"}, 4: {0: "a", 1: "text"}}
    history = ColumnHistory(4, ColumnLog(versions.get))
    assert [history.was_called(1, name) for name in ("draft", "note", "text")] == [False, True, True]


def test_a_name_is_believed_where_versions_are_gone() -> None:
    history = ColumnHistory(4, ColumnLog({3: {0: "b"}, 4: {0: "c"}}.get))
    assert history.was_called(0, "a")
    assert not ColumnHistory(4, ColumnLog(RENAMED.get)).was_called(0, "z")


def test_a_long_history_is_not_read_to_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_history, "MAX_LOOKBACK", 10)
    read: list[int] = []

    def columns_of(version: int) -> dict[int, str]:
        read.append(version)
        return {0: "now"}

    history = ColumnHistory(1_000, ColumnLog(columns_of))
    assert history.was_called(0, "once")
    assert len(read) <= 11
    history.was_called(0, "once")
    assert len(read) <= 11


REPLACED = {1: {0: "a", 1: "x"}, 2: {0: "a"}, 3: {0: "a", 1: "x"}, 4: {0: "b", 1: "x"}}


def test_a_column_is_another_one_when_its_id_was_missing_in_between() -> None:
    history = ColumnHistory(4, ColumnLog(REPLACED.get))
    assert [set(history.replaced_since(version)) for version in (1, 2, 3, 4)] == [{1}, {1}, set(), set()]


def test_rows_of_a_later_version_are_compared_too() -> None:
    log = ColumnLog(REPLACED.get)
    assert ColumnHistory(1, log).replaced_since(4) == {1}
    assert ColumnHistory(3, log).replaced_since(4) == set()


def test_a_column_is_taken_for_the_same_where_versions_are_gone() -> None:
    history = ColumnHistory(4, ColumnLog({1: REPLACED[1], 4: REPLACED[4]}.get))
    assert history.replaced_since(1) == set()


def test_stored_runs_tell_what_versions_that_are_gone_would_have_told() -> None:
    stored = ColumnLog(REPLACED.get).unstored_runs(3)
    assert stored is not None
    later = ColumnLog({4: REPLACED[4], 5: REPLACED[4]}.get, lambda: ColumnRuns.from_json(stored.to_json()))
    history = ColumnHistory(5, later)
    assert [set(history.replaced_since(version)) for version in (1, 2, 3, 4)] == [{1}, {1}, set(), set()]
    assert later.unstored_runs(3) is None


def test_stored_runs_are_not_overwritten_by_some_that_know_less() -> None:
    stored = ColumnLog(REPLACED.get).unstored_runs(3)
    log = ColumnLog({4: REPLACED[4], 5: REPLACED[4]}.get)
    assert ColumnHistory(5, log).replaced_since(4) == set()
    log._load = lambda: stored
    runs = log.unstored_runs(5)
    assert runs is not None
    assert (runs.first, dict(runs.since)) == (1, {0: 1, 1: 3})


def test_a_column_added_in_a_gap_may_be_as_old_as_the_gap() -> None:
    runs = ColumnRuns.starting_at(1, [0]).through(5, [0, 1])
    assert dict(runs.since) == {0: 1, 1: 2}


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"first": 1, "version": 2, "since": 3}', b"\xff"])
def test_a_damaged_record_of_runs_is_not_used(data: bytes) -> None:
    assert ColumnRuns.from_json(data) is None


def test_many_versions_are_skipped_where_runs_are_stored() -> None:
    read: list[int] = []

    def fields_of(version: int) -> dict[int, str]:
        read.append(version)
        return {0: "a"}

    log = ColumnLog(fields_of, lambda: ColumnRuns(1, 998, {0: 1}))
    assert ColumnHistory(1_000, log).replaced_since(5) == set()
    assert set(read) == {999, 1_000}


# ---------------------------------------------------------------------- what the ends of a range tell


class Versions:
    """The versions of a table as Lance makes them, and how many of them a log reads."""

    def __init__(self) -> None:
        self.columns: list[int] = [0]
        self.files: dict[str, int] = {}
        self.index = b"0"
        self._names = count()
        self.made: dict[int, tuple[dict[int, str], Traces]] = {}
        self.read: set[int] = set()
        self.commit()

    def commit(self) -> int:
        fields = {number: f"column{number}" for number in self.columns}
        if self.index:
            fields[MEM_WAL_INDEX] = "index"
        self.made[len(self.made) + 1] = fields, Traces(dict(self.files), self.index)
        return len(self.made)

    def name(self) -> str:
        return str(next(self._names))

    def add(self) -> None:
        """A column that no file has values of yet."""
        self.columns.append(max([*self.columns, *self.files.values()], default=-1) + 1)

    def drop(self, place: int) -> None:
        if len(self.columns) > 1:
            del self.columns[place % len(self.columns)]

    def append(self) -> None:
        self.files[self.name()] = max(self.columns)

    def rewrite(self) -> None:
        self.files = {}
        self.append()

    def overwrite(self) -> None:
        self.columns, self.index = [0], b""
        self.rewrite()

    def compact(self) -> None:
        if self.index:
            self.append()
            self.index = self.name().encode()

    def drop_index(self) -> None:
        self.index = b""

    def initialize(self) -> None:
        self.index = self.index or self.name().encode()

    def log(self, load: Callable[[], ColumnRuns | None] | None = None) -> ColumnLog:
        def read(version: int) -> tuple[dict[int, str], Traces] | None:
            if version in self.made:
                self.read.add(version)
            return self.made.get(version)

        return ColumnLog(
            lambda version: None if (found := read(version)) is None else found[0],
            load,
            lambda version: None if (found := read(version)) is None else found[1],
            lambda versions: [version for version in sorted(self.made) if version in versions],
        )


CHANGES = {
    "add": lambda versions, _: versions.add(),
    "drop": lambda versions, place: versions.drop(place),
    "append": lambda versions, _: versions.append(),
    "rewrite": lambda versions, _: versions.rewrite(),
    "overwrite": lambda versions, _: versions.overwrite(),
    "compact": lambda versions, _: versions.compact(),
    "drop index": lambda versions, _: versions.drop_index(),
    "initialize": lambda versions, _: versions.initialize(),
}


@settings(max_examples=40, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 3), st.integers(1, 20)),
        min_size=1,
        max_size=8,
    ),
    gone=st.sets(st.integers(1, 60), max_size=4),
    stored_at=st.none() | st.integers(1, 60),
)
def test_the_ends_of_a_range_tell_what_all_its_versions_would(
    changes: list[tuple[str, int, int]], gone: set[int], stored_at: int | None
) -> None:
    versions = Versions()
    for kind, place, idle in changes:
        CHANGES[kind](versions, place)
        for _ in range(idle):
            versions.commit()
    newest = len(versions.made)
    everything = dict(versions.made)
    stored = None
    if stored_at is not None and stored_at <= newest:
        stored = versions.log().unstored_runs(stored_at)
    for version in gone - {newest}:
        versions.made.pop(version, None)
    log = versions.log(None if stored is None else lambda: stored)
    for start in sorted(versions.made)[::3]:
        for field_id in everything[newest][0]:
            there = [v for v in versions.made if start <= v <= newest]
            if stored is not None:
                # They were made when all versions were there.
                there = sorted({*there, *range(max(start, stored.first), stored.version + 1)})
            expected = all(field_id in everything[version][0] for version in there)
            assert log.is_unbroken(field_id, start, newest) == expected, (start, field_id)


def test_a_thousand_versions_are_judged_by_their_ends() -> None:
    versions = Versions()
    versions.append()
    for _ in range(1_000):
        versions.append()
        versions.commit()
    history = ColumnHistory(1_001, versions.log())
    assert history.replaced_since(2) == set()
    assert history.is_continued_since(2)
    assert len(versions.read) <= 2


def test_one_change_among_a_thousand_versions_is_found_in_a_few_reads() -> None:
    versions = Versions()
    versions.append()
    for number in range(1_000):
        if number == 600:
            versions.add()
        if number == 700:
            versions.compact()
        versions.append()
        versions.commit()
    history = ColumnHistory(1_001, versions.log())
    assert history.replaced_since(2) == {1}
    assert history.replaced_since(700) == set()
    assert history.is_continued_since(2)
    assert len(versions.read) <= 80


def test_a_column_without_values_that_was_dropped_and_added_again_is_another_one() -> None:
    versions = Versions()
    versions.append()
    versions.add()
    for number in range(200):
        if number == 100:
            versions.drop(1)
        if number == 101:
            versions.add()
        versions.commit()
    assert ColumnHistory(201, versions.log()).replaced_since(50) == {1}
    assert ColumnHistory(201, versions.log()).replaced_since(150) == set()


def test_an_index_that_was_dropped_and_made_again_is_another_one() -> None:
    versions = Versions()
    for number in range(200):
        versions.append()
        if number == 100:
            versions.drop_index()
        if number == 101:
            versions.initialize()
        versions.commit()
    assert not ColumnHistory(201, versions.log()).is_continued_since(50)
    assert ColumnHistory(201, versions.log()).is_continued_since(150)
