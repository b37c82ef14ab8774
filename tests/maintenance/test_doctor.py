"""The doctor tells a storage that loses rows from one that does not, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

import lancewal
from lancewal.maintenance import Check, examine
from lancewal.storage import ObjectInfo, ObjectStore, PutOutcome
from tests.faults import FaultyStore
from tests.tables import wal_table


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.from_uri(wal_table(tmp_path / "t").uri)


def checks(store: ObjectStore) -> dict[str, Check]:
    return {check.name: check for check in examine(store)}


def test_a_good_storage_passes_and_is_left_as_it_was(store: ObjectStore) -> None:
    before = [info.path for info in store.list()]
    found = checks(store)
    assert found.keys() == {"create", "read", "list", "clock", "delete", "space"}
    assert all(check.ok is not False for check in found.values())
    assert [info.path for info in store.list()] == before


def test_a_storage_that_overwrites_is_told_from_one_that_creates(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwrite(self: ObjectStore, path: str, data: bytes) -> PutOutcome:
        self.put(path, data)
        return PutOutcome.CREATED

    monkeypatch.setattr(ObjectStore, "put_if_absent", overwrite)
    create = checks(store)["create"]
    assert create.ok is False
    assert "do not write to it" in create.text


def test_a_storage_that_lists_late_is_told(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ObjectStore.list

    def late(self: ObjectStore, prefix: str = "") -> list[ObjectInfo]:
        return listed(self, prefix)[:1]

    monkeypatch.setattr(ObjectStore, "list", late)
    assert checks(store)["list"].ok is False


def test_a_storage_that_fails_is_told_check_by_check(store: ObjectStore) -> None:
    faulty = FaultyStore(store)
    faulty.faults.fail("put_if_absent", nth=1)
    found = checks(faulty)
    assert found["create"].ok is False
    assert "StorageError" in found["create"].text
    assert found["read"].ok is True


def test_a_table_checks_its_own_storage(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t")
    assert isinstance(table, lancewal.Table)
    assert all(check.ok is not False for check in table.check_storage())
