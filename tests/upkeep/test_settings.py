"""What a table is kept within: checked, stored with it, shown, and ignored by Lance."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pytest

import lancewal
from lancewal.errors import InvalidInputError
from lancewal.maintenance import UpkeepSettings, read_upkeep_settings
from lancewal.storage import ObjectStore, layout
from tests.tables import KEYED, rows, wal_table


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_sstables", 0),
        ("max_sstables", True),
        ("max_sstables", 2.5),
        ("garbage_age", 5),
        ("garbage_age", timedelta(-1)),
        ("version_age", timedelta(minutes=9)),
        ("max_garbage_bytes", 0),
        ("max_garbage_bytes", True),
        ("interval", timedelta(0)),
        ("max_share", 0),
        ("max_share", 1.5),
        ("max_share", "half"),
    ],
)
def test_wrong_settings_are_refused_and_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=name):
        UpkeepSettings(**{name: value})


def test_settings_are_stored_changed_and_shown(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", upkeep={"max_sstables": 7, "garbage_age": timedelta(hours=2)})
    assert table.status().upkeep == UpkeepSettings(max_sstables=7, garbage_age=timedelta(hours=2))
    assert table.set_upkeep(max_share=0.25).max_sstables == 7
    assert table.set_upkeep(max_garbage_bytes=5).max_garbage_bytes == 5
    assert lancewal.open(tmp_path / "t").status().upkeep.max_garbage_bytes == 5
    assert table.set_upkeep(max_garbage_bytes=None) == table.status().upkeep
    again = lancewal.open(tmp_path / "t")
    assert (again.status().upkeep.max_sstables, again.status().upkeep.max_share) == (7, 0.25)
    assert again.status().to_dict()["upkeep"]["settings"]["garbage_age"] == 7200.0
    assert again.set_upkeep(UpkeepSettings()) == lancewal.open(tmp_path / "t").status().upkeep
    with pytest.raises(InvalidInputError, match="there is no upkeep setting max_sstable;"):
        again.set_upkeep(max_sstable=3)
    # Lance sees a table like any other, and verification nothing unknown.
    with again.writer() as writer:
        writer.put(rows(0, 3))
    again.compact()
    assert lance.dataset(again.uri).count_rows() == 3
    assert again.verify().ok


def test_wrong_settings_leave_the_table_as_it_was(tmp_path: Path) -> None:
    lance.write_dataset(KEYED.empty_table(), str(tmp_path / "t"))
    with pytest.raises(InvalidInputError, match="max_sstables"):
        lancewal.initialize(tmp_path / "t", unsharded=True, upkeep={"max_sstables": 0})
    with pytest.raises(InvalidInputError, match="upkeep settings are"):
        lancewal.initialize(tmp_path / "t", unsharded=True, upkeep="often")  # type: ignore[arg-type]
    assert lance.dataset(str(tmp_path / "t")).mem_wal_index_details() is None


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"max_sstables":9}', b"\xff\xfe", b"[1]"])
def test_a_damaged_record_counts_as_none(tmp_path: Path, damage: bytes) -> None:
    table = wal_table(tmp_path / "t", upkeep={"max_sstables": 9})
    (tmp_path / "t" / layout.UPKEEP_SETTINGS).write_bytes(damage)
    assert table.status().upkeep == UpkeepSettings()


def test_what_a_later_release_added_is_left_out() -> None:
    stored = json.loads(json.dumps({**UpkeepSettings(max_sstables=3).to_dict(), "later": 1}))
    assert UpkeepSettings.from_dict(stored) == UpkeepSettings(max_sstables=3)


def test_a_backup_takes_the_settings_along(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", upkeep={"max_sstables": 5})
    table.backup(tmp_path / "backups")
    lancewal.restore(tmp_path / "backups", tmp_path / "again")
    assert read_upkeep_settings(ObjectStore.from_uri(tmp_path / "again")).max_sstables == 5


@pytest.mark.parametrize("given", [5, "often", {"max_sstable": 3}])
def test_settings_that_are_none_ended_as_an_attribute_error(tmp_path: Path, given: Any) -> None:
    table = wal_table(tmp_path / "t")
    for use in (table.plan_upkeep, table.upkeep, table.upkeeper):
        with pytest.raises(InvalidInputError, match="upkeep setting"):
            use(given)


def test_single_settings_may_be_given_by_name(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t")
    for start in (0, 1):
        with table.writer() as writer:
            writer.put(rows(start, 1))
    assert [str(task.work) for task in table.plan_upkeep()] == ["collect"]
    single = {"max_sstables": 1}
    assert [str(task.work) for task in table.plan_upkeep(single)] == ["compact", "collect"]
    assert table.upkeep(single).ok
    assert table.status().uncompacted.count == 0
