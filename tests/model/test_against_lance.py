"""Lance's own merged scan and point lookup beside ours, on the same files.

They must agree wherever Lance's are defined. Where Lance refuses or is wrong, a test shows both
answers; ``docs/comparison-with-lance.md`` lists these cases. A test that fails because Lance
now gives the right answer is good news: shorten the page.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lance.mem_wal import LsmPointLookupPlanner, LsmScanner
from lance.mem_wal import ShardSnapshot as LanceShard

import lancewal
from lancewal.reader import TableReader
from lancewal.shard.discovery import discover_manifests
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import ObjectStore
from lancewal.table import Table
from tests.model.table_model import KEY_NUMBERS, NUMBER_KEYS, PAIR_KEYS, WORD_KEYS, Keys, TableModel, as_bag
from tests.reader.support import TableUnderTest, everywhere, looked_up, named
from tests.tables import APPEND_ONLY, rows

DEFAULTS = {"fsync": "false", "stats_log_interval_ms": "0"}

cells = st.lists(st.tuples(st.integers(0, KEY_NUMBERS - 1), st.integers(0, 99)), max_size=6)
deletes = st.lists(st.integers(0, KEY_NUMBERS - 1), max_size=3)
#: Rows, then deletes, of one flush, and whether Lance's writer makes it.
flushes = st.lists(st.tuples(cells, deletes, st.booleans()), min_size=1, max_size=3)


class Sides:
    """One table with two shards, its model, and both ways of writing and reading it."""

    def __init__(self, where: Path, keys: Keys, base: Sequence[tuple[int, int]]) -> None:
        self.model = TableModel(keys)
        self.keys = keys
        dataset = lance.write_dataset(self._rows(dict(base).items()), str(where))
        self.table: Table = lancewal.initialize(
            dataset, bucket=(keys.shard_column, 2), maintained_indexes=[], writer_defaults=DEFAULTS
        )
        self.store = ObjectStore.from_uri(self.table.uri, fsync=False)
        self._note(base)

    def flush(self, cells: Sequence[tuple[int, int]], dead: Sequence[int], by_lance: bool) -> None:
        data = self._rows(cells)
        keys = pa.Table.from_pylist(list(map(self.keys.columns_of, dead)), pa.schema(self.keys.fields))
        if by_lance:
            self._flush_by_lance(data, keys)
        else:
            with self.table.writer() as writer:
                writer.put(data)
                if len(keys):
                    writer.delete(keys)
        self._note(cells)
        for number in dead:
            self.model.delete(self.keys.key(number))

    def lance_snapshots(self) -> list[LanceShard]:
        found = []
        for manifest in discover_manifests(self.store):
            shard = LanceShard(str(manifest.shard_id)).with_spec_id(manifest.shard_spec_id)
            shard = shard.with_current_generation(manifest.current_generation)
            for entry in manifest.sstables:
                shard = shard.with_sstable(entry.generation, entry.path)
            found.append(shard)
        return found

    def lance_scan(self) -> LsmScanner:
        return LsmScanner.from_snapshots(lance.dataset(self.table.uri), self.lance_snapshots())

    def lance_lookup(self, number: int) -> list[dict[str, Any]]:
        columns = self.keys.columns_of(number)
        fields = [pa.field(field.name, field.type) for field in self.keys.fields]
        key = pa.array([columns], pa.struct(fields))
        planner = LsmPointLookupPlanner(lance.dataset(self.table.uri), self.lance_snapshots())
        plan = planner.plan_lookup(key if len(fields) > 1 else key.field(0))
        return list(plan.to_table().to_pylist())

    def _flush_by_lance(self, data: pa.Table, keys: pa.Table) -> None:
        router = self.table.router()
        parts: dict[UUID, list[tuple[bool, pa.RecordBatch]]] = {}
        for is_delete, some in ((False, data), (True, keys)):
            for batch in some.combine_chunks().to_batches():
                for shard, part in router.split(batch):
                    parts.setdefault(shard, []).append((is_delete, part))
        for shard, batches in parts.items():
            with lance.dataset(self.table.uri).mem_wal_writer(
                str(shard), max_wal_flush_interval_ms=1
            ) as writer:
                for is_delete, batch in batches:
                    (writer.delete if is_delete else writer.put)(batch)

    def _rows(self, cells: Any) -> pa.Table:
        shown = [
            {**self.keys.columns_of(number), **{c.name: c.value(seed) for c in self.model.columns}}
            for number, seed in cells
        ]
        return pa.Table.from_pylist(shown, self.model.schema)

    def _note(self, cells: Sequence[tuple[int, int]]) -> None:
        for number, seed in cells:
            self.model.upsert(self.keys.key(number), seed, self.model.columns)


@pytest.mark.parametrize("keys", [NUMBER_KEYS, WORD_KEYS, PAIR_KEYS], ids=["number", "word", "pair"])
@settings(max_examples=6)
@given(base=cells, history=flushes, number=st.integers(0, 99))
def test_lance_gives_the_same_rows(
    keys: Keys, base: list[tuple[int, int]], history: list[Any], number: int
) -> None:
    where = Path(tempfile.mkdtemp(prefix="lancewal-sides-"))
    try:
        sides = Sides(where / "t", keys, base)
        for flush in history:
            sides.flush(*flush)
        _check(sides, number)
    finally:
        shutil.rmtree(where)


def _check(sides: Sides, number: int) -> None:
    table, rows = sides.table, sides.model.rows()
    assert as_bag(sides.lance_scan().to_table().to_pylist()) == as_bag(rows)
    assert as_bag(table.scan().to_table().to_pylist()) == as_bag(rows)
    assert sides.lance_scan().count_rows() == table.count_rows() == len(rows)
    filters = sides.model.filters()
    for place in range(number, number + 4):
        sql, _ = filters[place % len(filters)]
        theirs = sides.lance_scan().filter(sql).to_table().to_pylist()
        assert as_bag(table.scan(filter=sql).to_table().to_pylist()) == as_bag(theirs), sql
        assert table.count_rows(sql) == sides.lance_scan().filter(sql).count_rows() == len(theirs), sql
        for limit, offset in ((0, 0), (2, 0), (3, 1), (99, 2)):
            cut = sides.lance_scan().filter(sql).limit(limit, offset).to_table().num_rows
            assert table.scan(filter=sql, limit=limit, offset=offset).to_table().num_rows == cut, sql
    for key in range(number, number + 5):
        asked = sides.keys.columns_of(key % (KEY_NUMBERS + 2))
        ours = table.lookup(asked)
        assert sides.lance_lookup(key % (KEY_NUMBERS + 2)) == ([] if ours is None else [ours])


# --- where they differ ------------------------------------------------------------------


def lance_names(scan: LsmScanner) -> list[tuple[int, str]]:
    return sorted((row["id"], row["name"]) for row in scan.to_table().to_pylist())


def test_lance_refuses_to_scan_a_table_without_a_key(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t", APPEND_ONLY, pa.table(rows(0, 3, schema=APPEND_ONLY)))
    with table.writer() as writer:
        writer.put(rows(2, 3, schema=APPEND_ONLY))
    with pytest.raises(ValueError, match="no primary key"):
        table.lance_scan().to_table()
    for reader in table.readers:
        assert sorted(reader.scan().to_table()["id"].to_pylist()) == [0, 1, 2, 2, 3, 4]
        assert reader.scan(filter="id = 2").count_rows() == 2


def test_lance_lets_a_compacted_generation_shadow_newer_base_rows(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t", data=named({1: "base", 2: "base"}))
    table.flushed({1: "flushed"}, [2])
    table.compact(1)
    newer = named({1: "newer", 2: "back"})
    merge = table.dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    merge.execute(newer)
    manifest = ShardManifestStore(table.store, table.shard).require_latest()
    listed = LanceShard(str(table.shard)).with_current_generation(manifest.current_generation)
    for entry in manifest.sstables:
        listed = listed.with_sstable(entry.generation, entry.path)
    assert lance_names(LsmScanner.from_snapshots(table.dataset, [listed])) == [(1, "flushed")]
    planner = LsmPointLookupPlanner(table.dataset, [listed])
    assert planner.plan_lookup(pa.array([1], pa.int64())).to_table()["name"].to_pylist() == ["flushed"]
    assert everywhere(table) == {1: "newer", 2: "back"}
    assert looked_up(table, [1, 2]) == ["newer", "back"]


def test_lance_returns_a_key_that_is_in_two_shards_twice(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t")
    for number in (1, 2):
        table.flushed({7: f"shard {number}"}, shard=UUID(int=number))
    assert lance_names(table.lance_scan()) == [(7, "shard 1"), (7, "shard 2")]
    assert looked_up(table, [7]) == ["shard 1"] == list(everywhere(table).values())


def test_lance_needs_the_writer_to_read_rows_that_are_not_flushed(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t", data=named({1: "base"}))
    with table.writer() as writer:
        writer.put(named({1: "logged", 2: "logged"}))
        assert lance_names(table.lance_scan()) == [(1, "base")]
        assert everywhere(table) == {1: "logged", 2: "logged"}


def test_lance_shows_the_values_of_a_dropped_column_in_the_one_that_got_its_id(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t")
    table.dataset.add_columns(pa.field("secret", pa.string()))
    with table.writer() as writer:
        writer.put(pa.table({"id": [1], "name": ["x"], "secret": ["do not show"]}))
    table.dataset.drop_columns(["secret"])
    table.dataset.add_columns(pa.field("note", pa.string()))
    assert table.lance_scan().to_table()["note"].to_pylist() == ["do not show"]
    for reader in table.readers:
        assert reader.scan().to_table()["note"].to_pylist() == [None]
        assert reader.scan(filter="note IS NOT NULL").count_rows() == 0
        assert reader.lookup([1]).table["note"].to_pylist() == [None]


def test_lance_looks_up_one_key_at_a_time(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t", data=named({1: "base"}))
    table.flushed({2: "flushed"})
    planner = LsmPointLookupPlanner(table.dataset, table.lance_snapshots())
    with pytest.raises(ValueError, match="exactly one row"):
        planner.plan_lookup(pa.array([1, 2], pa.int64()))
    assert looked_up(table, [2, 9, 1]) == ["flushed", None, "base"]


def test_lance_adds_the_key_to_the_columns_that_were_asked_for(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t", data=named({1: "base"}))
    assert table.lance_scan().project(["name"]).to_table().column_names == ["name", "id"]
    assert table.live.scan(["name"]).to_table().column_names == ["name"]
    assert table.live.lookup([1], ["name"]).table.column_names == ["name"]


def test_both_show_a_key_twice_that_the_base_itself_holds_twice(tmp_path: Path) -> None:
    doubled = pa.concat_tables([named({1: "a", 2: "a"}), named({1: "b"})])
    table = TableUnderTest(tmp_path / "t", data=doubled)
    table.flushed({3: "flushed"})
    found = TableReader(table.store).scan().to_table().to_pylist()
    assert sorted((row["id"], row["name"]) for row in found) == lance_names(table.lance_scan())
    table.flushed({1: "newest"})
    assert lance_names(table.lance_scan()) == [(1, "newest"), (2, "a"), (3, "flushed")]
    assert everywhere(table) == {1: "newest", 2: "a", 3: "flushed"}
