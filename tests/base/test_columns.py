"""Renamed columns are told from those that only got a dropped one's field id."""

from __future__ import annotations

import pytest

from lancewal.base import columns as column_history
from lancewal.base.columns import ColumnHistory, ColumnLog, ColumnRuns

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
