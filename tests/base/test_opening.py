"""How often a base table is opened: once through each store, and then only looked at."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from lancewal.base import BaseTable
from lancewal.base.markers import stored_markers
from lancewal.errors import StorageError, TableNotFoundError
from lancewal.storage import ObjectStore
from tests.tables import new_table, rows


@pytest.fixture
def table(tmp_path: Path) -> str:
    uri = str(tmp_path / "table")
    new_table(uri)
    return uri


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often Lance opened a table, and how often we read a manifest of a base table."""
    counted: Counter[str] = Counter()
    opened, read = lance.dataset, ObjectStore.get

    def dataset(*args: Any, **kwargs: Any) -> lance.LanceDataset:
        counted["opened"] += 1
        return opened(*args, **kwargs)

    def get(self: ObjectStore, path: str) -> bytes:
        counted["read"] += path.startswith("_versions/")
        return read(self, path)

    monkeypatch.setattr(lance, "dataset", dataset)
    monkeypatch.setattr(ObjectStore, "get", get)
    return counted


def open_at(store: ObjectStore) -> BaseTable:
    return BaseTable.open(store.uri, store.storage_options, store=store)


def commit(uri: str, start: int = 0) -> None:
    lance.LanceDataset(uri).insert(pa.Table.from_batches([rows(start, 3)]))


def test_a_table_that_did_not_change_is_opened_once(table: str, calls: Counter[str]) -> None:
    store = ObjectStore.from_uri(table)
    opened = [open_at(store) for _ in range(5)]
    assert opened[0].refreshed(store) is opened[0]
    assert len({base.version for base in opened}) == 1
    assert calls == {"opened": 1, "read": 1}


def test_each_new_version_is_read_once(table: str, calls: Counter[str]) -> None:
    store = ObjectStore.from_uri(table)
    first = open_at(store)
    for start in range(3):
        commit(table, 10 * start)
        assert open_at(store).dataset.count_rows() == open_at(store).dataset.count_rows() == 3 * start + 3
    newest = first.refreshed(store)
    assert newest.version == first.version + 3
    assert first.dataset.count_rows() == 0
    # The reader that stayed behind reads the version by itself.
    assert calls == {"opened": 1, "read": 5}


def test_columns_that_did_not_change_are_taken_over(table: str) -> None:
    store = ObjectStore.from_uri(table)
    first = open_at(store)
    plain, stored = first.schema.plain, first.schema.stored
    commit(table)
    second = first.refreshed(store)
    assert second.schema.plain is plain
    assert second.schema.stored is stored
    assert (first.schema.version, second.schema.version) == (first.version, second.version)
    lance.LanceDataset(table).add_columns(pa.field("late", pa.string()))
    assert "late" in second.refreshed(store).schema.names
    assert "late" not in second.schema.names


def test_a_commit_moves_no_other_handle(table: str) -> None:
    store = ObjectStore.from_uri(table)
    reader, committer = open_at(store), open_at(store)
    committer.dataset.insert(pa.Table.from_batches([rows(0, 3)]))
    assert (reader.dataset.count_rows(), open_at(store).dataset.count_rows()) == (0, 3)
    assert reader.dataset.version == reader.version == committer.version
    assert committer.committed(store).version == committer.version + 1


def test_what_a_commit_changed_in_the_columns_is_seen(table: str, calls: Counter[str]) -> None:
    """The handle through which it was committed has the new columns already: they must not count as known."""
    store = ObjectStore.from_uri(table)
    base = open_at(store)
    name = base.schema.names[0]
    base.dataset.update_field_metadata({name: {"note": "new"}})
    for after in (base.committed(store), base.refreshed(store), open_at(store)):
        assert after.schema.columns.field(name).metadata[b"note"] == b"new"
    assert b"note" not in base.schema.columns.field(name).metadata
    assert calls["opened"] == 1


def test_another_table_at_the_same_place_is_told_apart(table: str) -> None:
    store = ObjectStore.from_uri(table)
    known = open_at(store)
    shutil.rmtree(table)
    new_table(table, data=pa.Table.from_batches([rows(0, 3)]))
    assert known.version == BaseTable.open(table).version
    assert known.refreshed(store).dataset.count_rows() == open_at(store).dataset.count_rows() == 3


def test_a_table_that_is_gone_is_told(table: str) -> None:
    store = ObjectStore.from_uri(table)
    known = open_at(store)
    shutil.rmtree(table)
    with pytest.raises(TableNotFoundError, match="no Lance table"):
        known.refreshed(store)
    with pytest.raises(TableNotFoundError, match="no Lance table"):
        open_at(store)


def test_what_is_kept_does_not_keep_the_store(table: str) -> None:
    store = ObjectStore.from_uri(table)
    base = open_at(store)
    alive = weakref.ref(store)
    del store
    assert alive() is not None, "the columns' history is read from it"
    del base
    gc.collect()
    assert alive() is None


def test_a_version_that_was_cleaned_up_between_listing_and_reading_was_an_error_for_who_opens_a_shard(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, listed = ObjectStore.from_uri(table), ObjectStore.list

    def list_and_lose(self: ObjectStore, prefix: str) -> Any:
        found = listed(self, prefix)
        monkeypatch.setattr(ObjectStore, "list", listed)
        lance.dataset(table).insert(rows(0, 3))
        lance.dataset(table).cleanup_old_versions(timedelta(0))
        manifests = [info.path for info in found if info.path.endswith(".manifest")]
        assert manifests
        assert not any(map(store.head, manifests)), "nothing was cleaned up"
        return found

    monkeypatch.setattr(ObjectStore, "list", list_and_lose)
    assert stored_markers(store) == {}


def test_versions_that_go_faster_than_they_are_read_are_an_error_and_no_endless_wait(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: ObjectStore, path: str) -> bytes:
        raise FileNotFoundError(path)

    monkeypatch.setattr(ObjectStore, "get", gone)
    with pytest.raises(StorageError, match="try again"):
        stored_markers(ObjectStore.from_uri(table))
