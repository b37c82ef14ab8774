"""Renamed columns are told from those that only got a dropped one's field id."""

from __future__ import annotations

import pytest

from lancewal import column_history
from lancewal.column_history import ColumnHistory

RENAMED = {1: {0: "a"}, 2: {0: "b"}, 3: {0: "b", 1: "x"}, 4: {0: "c"}}


def test_every_name_since_the_column_was_added_is_a_former_one() -> None:
    history = ColumnHistory(4, RENAMED.get)
    assert [history.was_called(0, name) for name in "abcx"] == [True, True, True, False]


def test_a_name_from_before_the_column_was_dropped_is_another_columns() -> None:
    versions = {1: {0: "a", 1: "draft"}, 2: {0: "a"}, 3: {0: "a", 1: "note"}, 4: {0: "a", 1: "text"}}
    history = ColumnHistory(4, versions.get)
    assert [history.was_called(1, name) for name in ("draft", "note", "text")] == [False, True, True]


def test_a_name_is_believed_where_versions_are_gone() -> None:
    history = ColumnHistory(4, {3: {0: "b"}, 4: {0: "c"}}.get)
    assert history.was_called(0, "a")
    assert not ColumnHistory(4, RENAMED.get).was_called(0, "z")


def test_a_long_history_is_not_read_to_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_history, "MAX_LOOKBACK", 10)
    read: list[int] = []

    def columns_of(version: int) -> dict[int, str]:
        read.append(version)
        return {0: "now"}

    history = ColumnHistory(1_000, columns_of)
    assert history.was_called(0, "once")
    assert len(read) <= 11
    history.was_called(0, "once")
    assert len(read) <= 11
