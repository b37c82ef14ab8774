"""What went wrong once, or in systems like this one; each test is named after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa
import pytest

import lancewal
from lancewal.base.table import BaseTable
from lancewal.maintenance import at_crash_points, compact
from lancewal.maintenance.commits import APPEND_POINTS
from lancewal.reader import TableReader
from lancewal.storage import ObjectStore
from lancewal.table import Table
from tests.reader.support import TableUnderTest, everywhere, looked_up, named
from tests.tables import APPEND_ONLY, KEYED, abandon, fast, rows, wal_table


def readers(table: Table) -> list[TableReader]:
    """Through the writers of this process, from storage alone, and without anything kept."""
    store = ObjectStore.from_uri(table.uri, fsync=False)
    return [table._reader, TableReader(store, live_writers=False)]


# --- shards -----------------------------------------------------------------------------


def test_a_key_in_two_shards_that_name_a_spec_but_no_value_came_twice(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t", bucket_column="id", num_buckets=2, maintained_indexes=[])
    for number, name in ((1, "first"), (2, "second")):
        # Lance's writer makes a shard of the spec without saying which bucket it holds.
        with table.dataset.mem_wal_writer(str(UUID(int=number))) as writer:
            writer.put(named({7: name, number: name}))
    shown = everywhere(table)
    assert shown.keys() == {1, 2, 7}
    assert looked_up(table, [7]) == [shown[7]]
    assert everywhere(table, filter="id = 7") == everywhere(table, filter="id > 6") == {7: shown[7]}


def test_shards_that_say_what_they_hold_are_merged_each_for_itself(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", bucket=("id", 3))
    with table.writer() as writer:
        writer.put(rows(0, 12))
        writer.flush()
        writer.put(rows(0, 12))
        assert len(table.scan().snapshot.groups) == 3


# --- flushing ---------------------------------------------------------------------------


def test_a_flush_failed_because_of_a_writer_here_that_had_been_superseded(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t")
    stale = table.writer(take_over="now")
    stale.put(rows(0, 2))
    # A log-only writer is never read through, so the stale one is still the one known here.
    with table.writer(take_over="now", enable_memtable=False) as successor:
        successor.put(rows(1, 2, prefix="newer"))
        table.flush()
    (shard,) = table.shards()
    assert shard.generations == (1,)
    for reader in readers(table):
        found = reader.scan().to_table().sort_by("id")["name"].to_pylist()
        assert found == ["name_0", "newer_1", "newer_2"]
    for writer in stale.shard_writers.values():
        abandon(writer)


# --- limits -----------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_limit_returned_too_few_rows_where_the_base_held_a_dead_key_many_times(
    tmp_path: Path, limit: int
) -> None:
    doubled = pa.concat_tables([*[named({1: "doubled"})] * 6, named({2: "kept", 3: "kept"})])
    table = TableUnderTest(tmp_path / "t", data=doubled)
    table.flushed({}, [1])
    for reader in table.readers:
        for filter in (None, "name != 'x'"):
            scan = reader.scan(filter=filter, limit=limit)
            found = scan.to_table()["id"].to_pylist()
            assert found == [2, 3][:limit]
            assert scan.count_rows() == len(found)
        assert reader.scan(limit=limit, offset=1).to_table()["id"].to_pylist() == [3]


# --- compaction without a key -----------------------------------------------------------


@pytest.fixture
def dies_at() -> Iterator[Any]:
    """Ends compaction at a named point, as a kill would."""

    def install(point: str) -> None:
        def hook(reached: str) -> None:
            if reached == point:
                raise KeyboardInterrupt

        at_crash_points(hook)

    yield install
    at_crash_points(None)


@pytest.mark.parametrize("point", APPEND_POINTS)
def test_rows_came_twice_while_they_were_appended_but_not_marked_yet(
    tmp_path: Path, dies_at: Any, point: str
) -> None:
    table = wal_table(tmp_path / "t", APPEND_ONLY)
    with table.writer() as writer:
        writer.put(rows(0, 3, schema=APPEND_ONLY))
        writer.flush()
        writer.put(rows(10, 1, schema=APPEND_ONLY))
        dies_at(point)
        with pytest.raises(KeyboardInterrupt):
            compact(ObjectStore.from_uri(table.uri))
        for reader in readers(table):
            assert sorted(reader.scan().to_table()["id"].to_pylist()) == [0, 1, 2, 10]
            assert reader.scan(filter="id < 5").count_rows() == 3


# --- field ids that Lance gives out again -----------------------------------------------


def replace_column(table: Table, old: str, new: str) -> None:
    """Drop one column and add another of the same type, which gets the same field id."""
    number = BaseTable.open(table.uri).schema.field_ids[old]
    lance.dataset(table.uri).drop_columns([old])
    lance.dataset(table.uri).add_columns(pa.field(new, pa.string()))
    assert BaseTable.open(table.uri).schema.field_ids[new] == number, "the case needs Lance to reuse the id"


def test_a_reused_field_id_paired_a_new_column_with_the_values_of_a_dropped_one(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t")
    lance.dataset(table.uri).add_columns(pa.field("first", pa.string()))
    lance.dataset(table.uri).alter_columns({"path": "first", "name": "draft"})

    def check(column: str, expected: str | None) -> None:
        for reader in readers(table):
            assert reader.scan().to_table()[column].to_pylist() == [expected]
            assert reader.scan(filter=f"{column} IS NULL").count_rows() == (expected is None)
            assert reader.lookup([1], [column]).table[column].to_pylist() == [expected]

    writer = table.writer()
    writer.put(pa.table({"id": [1], "name": ["x"], "draft": ["old value"]}))
    check("draft", "old value")
    lance.dataset(table.uri).alter_columns({"path": "draft", "name": "text"})
    check("text", "old value")
    replace_column(table, "text", "note")
    check("note", None)
    writer.flush()
    check("note", None)
    writer.close()
    compact(ObjectStore.from_uri(table.uri))
    check("note", None)


def table_with_drafts_in_its_log(tmp_path: Path) -> Table:
    """Its writer died before it flushed two rows with a column ``draft``."""
    table = wal_table(tmp_path / "t")
    lance.dataset(table.uri).add_columns(pa.field("draft", pa.string()))
    dying = table.writer()
    dying.put(pa.table({"id": [1, 2], "name": ["x", "y"], "draft": ["old value", "old value"]}))
    for shard in dying.shard_writers.values():
        abandon(shard)
    return table


def test_replay_pairs_no_reused_field_id_either(tmp_path: Path) -> None:
    table = table_with_drafts_in_its_log(tmp_path)
    replace_column(table, "draft", "note")
    with table.writer() as writer:
        writer.put(pa.table({"id": [2], "name": ["y"], "note": ["new value"]}))
        for reader in readers(table):
            assert reader.lookup([1, 2]).table["note"].to_pylist() == [None, "new value"]
    for reader in readers(table):
        assert reader.lookup([1, 2]).table["note"].to_pylist() == [None, "new value"]
        assert reader.scan(filter="note = 'old value'").count_rows() == 0


def values(table: Table, column: str) -> dict[int, Any]:
    """A column by id, as every way to read gives it."""
    found: list[dict[int, Any]] = []
    for reader in [*readers(table), TableReader(ObjectStore.from_uri(table.uri), live_writers=False)]:
        shown = reader.scan(["id", column]).to_table()
        found.append(dict(zip(shown["id"].to_pylist(), shown[column].to_pylist(), strict=True)))
        nulls = sum(value is None for value in found[-1].values())
        assert reader.scan(filter=f"{column} IS NULL").count_rows() == nulls
        looked_up = reader.lookup(sorted(found[-1]), [column]).table[column].to_pylist()
        assert looked_up == [found[-1][key] for key in sorted(found[-1])]
    assert all(each == found[0] for each in found), found
    return found[0]


@pytest.mark.parametrize("new", ["draft", "note"])
@pytest.mark.parametrize("has_memtable", [True, False], ids=["MemTable", "log only"])
def test_a_column_showed_the_values_of_the_one_it_replaced_whatever_their_names(
    tmp_path: Path, new: str, has_memtable: bool
) -> None:
    table = wal_table(tmp_path / "t")
    lance.dataset(table.uri).add_columns(pa.field("draft", pa.string()))
    writer = table.writer(enable_memtable=has_memtable)
    old = pa.table({"id": [1, 2], "name": ["x", "y"], "draft": ["old value", "old value"]})
    writer.put(old)
    assert values(table, "draft") == {1: "old value", 2: "old value"}
    replace_column(table, "draft", new)
    assert values(table, new) == {1: None, 2: None}
    # The writer goes on with the columns that it knows.
    writer.put(old.slice(1))
    assert values(table, new) == {1: None, 2: None}
    writer.close()
    table.flush()
    assert values(table, new) == {1: None, 2: None}
    with table.writer() as successor:
        successor.put(pa.table({"id": [2], "name": ["y"], new: ["new value"]}))
        assert values(table, new) == {1: None, 2: "new value"}
    compact(ObjectStore.from_uri(table.uri))
    assert values(table, new) == {1: None, 2: "new value"}


def test_replay_gave_a_column_the_values_of_one_that_had_its_name(tmp_path: Path) -> None:
    table = table_with_drafts_in_its_log(tmp_path)
    replace_column(table, "draft", "draft")
    with table.writer() as writer:
        writer.put(pa.table({"id": [2], "name": ["y"], "draft": ["new value"]}))
        assert values(table, "draft") == {1: None, 2: "new value"}
    assert values(table, "draft") == {1: None, 2: "new value"}


@pytest.mark.parametrize("change", ["add", "replace", "replace by the same name", "rename"])
def test_a_writer_from_before_a_column_changed_lost_the_values_of_later_ones_in_the_log(
    tmp_path: Path, change: str
) -> None:
    table = wal_table(tmp_path / "t")
    lance.dataset(table.uri).add_columns(pa.field("draft", pa.string()))
    # Opened now, but it comes to the shard only with its first row.
    stale = table.writer(take_over="now")
    name = "draft" if change == "replace by the same name" else "note"
    if change == "add":
        lance.dataset(table.uri).add_columns(pa.field(name, pa.string()))
    elif change == "rename":
        lance.dataset(table.uri).alter_columns({"path": "draft", "name": name})
    else:
        replace_column(table, "draft", name)
    newer = table.writer(take_over="now", enable_memtable=False)
    newer.put(pa.table({"id": [1, 2], "name": ["x", "y"], name: ["kept", "kept"]}))
    stale.put(pa.table({"id": [2, 3], "name": ["y", "z"], "draft": ["own", "own"]}))
    own = "own" if change == "rename" else None
    assert values(table, name) == {1: "kept", 2: own, 3: own}
    (shard,) = stale.shard_writers.values()
    assert shard.scan([name]).num_rows == 3
    stale.delete(3)
    assert values(table, name) == {1: "kept", 2: own}
    stale.close()
    assert values(table, name) == {1: "kept", 2: own}
    compact(ObjectStore.from_uri(table.uri))
    assert values(table, name) == {1: "kept", 2: own}


def test_a_stale_writer_failed_on_the_index_of_a_column_that_was_replaced(tmp_path: Path) -> None:
    lance.write_dataset(pa.table({"id": [7], "name": ["base"], "tag": ["t"]}, _tagged()), str(tmp_path / "t"))
    lance.dataset(str(tmp_path / "t")).create_scalar_index("tag", "BTREE")
    lance.dataset(str(tmp_path / "t")).create_scalar_index("name", "BTREE")
    table = lancewal.initialize(tmp_path / "t", writer_defaults=fast(), unsharded=True)
    stale = table.writer()
    lance.dataset(table.uri).drop_columns(["tag"])
    lance.dataset(table.uri).alter_columns({"path": "name", "name": "title"})
    lance.dataset(table.uri).add_columns(pa.field("tag", pa.string()))
    with table.writer(enable_memtable=False) as newer:
        newer.put(pa.table({"id": [1], "title": ["x"], "tag": ["kept"]}))
    with stale:
        stale.put(pa.table({"id": [2], "name": ["y"], "tag": ["own"]}))
        assert values(table, "tag") == {1: "kept", 2: None, 7: None}
        for reader in readers(table):
            assert reader.scan(filter="title = 'y'").count_rows() == 1
            assert reader.scan(filter="tag = 'own'").count_rows() == 0
    assert values(table, "tag") == {1: "kept", 2: None, 7: None}


@pytest.mark.parametrize("schema", [KEYED, APPEND_ONLY], ids=["keyed", "append-only"])
@pytest.mark.parametrize("new", ["draft", "note"])
def test_a_column_that_was_replaced_while_its_rows_were_compacted_got_their_values(
    tmp_path: Path, schema: pa.Schema, new: str
) -> None:
    table = wal_table(tmp_path / "t", schema)
    lance.dataset(table.uri).add_columns(pa.field("draft", pa.string()))
    with table.writer() as writer:
        writer.put(pa.table({"id": [1], "name": ["x"], "draft": ["old value"]}))
    replaced: list[str] = []

    def replace_once(point: str) -> None:
        if not replaced and point in ("merge: rows are read", "append: files are written"):
            replaced.append(point)
            replace_column(table, "draft", new)

    at_crash_points(replace_once)
    try:
        compact(ObjectStore.from_uri(table.uri))
    finally:
        at_crash_points(None)
    assert replaced
    assert lance.dataset(table.uri).to_table()[new].to_pylist() == [None]
    assert table.scan().to_table()[new].to_pylist() == [None]


def test_a_replaced_column_was_taken_for_the_old_one_once_old_versions_were_cleaned_up(
    tmp_path: Path,
) -> None:
    table = wal_table(tmp_path / "t", bucket=("id", 2))
    lance.dataset(table.uri).add_columns(pa.field("draft", pa.string()))
    writer = table.writer()
    writer.put(pa.table({"id": [1], "name": ["x"], "draft": ["old value"]}))
    replace_column(table, "draft", "draft")
    compact(ObjectStore.from_uri(table.uri))
    versions = Path(table.uri) / "_versions"
    *old, _ = sorted(versions.glob("*.manifest"), reverse=True)
    for manifest in old:
        manifest.unlink()
    assert values(table, "draft") == {1: None}
    for shard in writer.shard_writers.values():
        abandon(shard)
    assert values(table, "draft") == {1: None}


def _tagged() -> pa.Schema:
    return pa.schema([*KEYED, pa.field("tag", pa.string())])


def test_a_renamed_column_keeps_its_values_when_the_versions_before_are_gone(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t")
    with table.writer() as writer:
        writer.put(rows(0, 2))
        lance.dataset(table.uri).alter_columns({"path": "name", "name": "title"})
        versions = Path(table.uri) / "_versions"
        *old, _ = sorted(versions.glob("*.manifest"), reverse=True)
        for manifest in old:
            manifest.unlink()
        for reader in readers(table):
            assert sorted(reader.scan().to_table()["title"].to_pylist()) == ["name_0", "name_1"]


def test_old_versions_are_read_once_however_often_a_renamed_column_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = wal_table(tmp_path / "t")
    with table.writer() as writer:
        writer.put(rows(0, 2))
        lance.dataset(table.uri).alter_columns({"path": "name", "name": "title"})
        read: list[str] = []
        get = ObjectStore.get

        def counted(self: ObjectStore, path: str) -> bytes:
            if path.endswith(".manifest"):
                read.append(path)
            return get(self, path)

        monkeypatch.setattr(ObjectStore, "get", counted)
        for number in range(3):
            lance.dataset(table.uri).insert(pa.table({"id": [number + 50], "title": ["x"]}, _titled()))
            for _ in range(2):
                assert table.scan(filter="title = 'name_1'").count_rows() == 1
        # Every version once for itself and, as a column's history, once more.
        assert max(map(read.count, read)) <= 2


def _titled() -> pa.Schema:
    return pa.schema([KEYED.field("id"), pa.field("title", pa.string())])
