"""Scans over all levels: newest wins, deletes hide, filters, limits, counts, sources."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
import pytest

import lancewal
from lancewal.errors import InvalidInputError
from lancewal.reader import TableReader, base_source
from lancewal.reader.base_source import without_rows
from lancewal.storage import ObjectStore
from tests.reader.support import TableUnderTest, everywhere, looked_up, named, names
from tests.tables import APPEND_ONLY, KEY, new_table, open_writer, rows


@pytest.fixture
def table(tmp_path: Path) -> TableUnderTest:
    """Base 0 to 4; an SSTable with 1, 5 and a delete of 2; another with 1, 6; in memory 1, 7, no 3."""
    table = TableUnderTest(tmp_path / "t", data=named({i: f"base {i}" for i in range(5)}))
    table.flushed({1: "one a", 5: "five"}, [2])
    table.flushed({1: "one b", 6: "six"})
    return table


LEVELS = {0: "base 0", 1: "one c", 4: "base 4", 5: "five", 6: "six", 7: "seven"}


def test_the_newest_version_wins_and_deletes_hide_older_ones(table: TableUnderTest) -> None:
    with table.writer() as writer:
        writer.put(named({1: "one c", 3: "gone", 7: "seven"}))
        writer.delete([3])
        assert everywhere(table) == LEVELS
        assert looked_up(table, [7, 3, 2, 1, 0, 99]) == ["seven", None, None, "one c", "base 0", None]
    assert everywhere(table) == LEVELS


def test_flushed_levels_read_as_in_lance(table: TableUnderTest) -> None:
    table.flushed_by_lance({1: "one c", 7: "seven"}, [3])
    assert everywhere(table) == LEVELS == names(table.lance_scan().to_table())
    for key in range(9):
        assert looked_up(table, [key]) == ([row["name"] for row in table.lance_lookup(key)] or [None])
    filtered = names(table.lance_scan().filter("name > 'one' AND id < 7").to_table())
    assert everywhere(table, filter="name > 'one' AND id < 7") == filtered == {1: "one c", 6: "six"}


def test_rows_show_where_they_come_from(table: TableUnderTest) -> None:
    with table.writer() as writer:
        writer.put(named({7: "seven"}))
        for reader in table.readers:
            found = reader.scan(["id"], with_row_source=True).to_table()
            assert found.schema.names == ["id", "_source", "_shard_id"]
            sources = dict(zip(found["id"].to_pylist(), found["_source"].to_pylist(), strict=True))
            assert sources == {
                7: "memtable:3",
                1: "sstable:2",
                6: "sstable:2",
                5: "sstable:1",
                0: "base",
                3: "base",
                4: "base",
            }
            shards = dict(zip(found["id"].to_pylist(), found["_shard_id"].to_pylist(), strict=True))
            assert shards[0] is None
            assert shards[5] == str(table.shard)
            pinned = reader.scan(["name"], "id IN (7, 0)", with_row_source=True).to_table()
            assert sorted(pinned["_source"].to_pylist()) == ["base", "memtable:3"]


@pytest.mark.parametrize("filter", ["name = 'base 1'", "name LIKE 'base 1%'", "id = 1 AND name = 'base 1'"])
def test_deduplication_runs_before_the_filter(table: TableUnderTest, filter: str) -> None:
    assert everywhere(table, filter=filter) == {}


def test_an_update_that_moves_a_row_out_of_the_match_set_hides_its_old_version(table: TableUnderTest) -> None:
    with table.writer() as writer:
        writer.put(named({5: "moved", 6: "moved", 0: "moved"}))
        assert everywhere(table, filter="name IN ('five', 'six', 'base 0')") == {}
        assert everywhere(table, filter="name = 'moved' AND id > 5") == {6: "moved"}


@pytest.mark.parametrize("limit", [0, 1, 3, 5, 6, 100])
def test_a_limit_returns_enough_rows_after_stale_ones_are_dropped(table: TableUnderTest, limit: int) -> None:
    table.flushed({0: "new 0", 1: "new 1", 3: "new 3"})
    whole = everywhere(table)
    for reader in table.readers:
        found = names(reader.scan(limit=limit).to_table())
        assert len(found) == min(limit, len(whole)) == reader.scan(limit=limit).count_rows()
        assert found.items() <= whole.items()
        matching = names(reader.scan(limit=limit, filter="name LIKE '%e%' AND id != 4").to_table())
        assert len(matching) == min(limit, 4)


def test_pages_by_limit_and_offset_are_the_whole_each_row_once(table: TableUnderTest) -> None:
    whole = everywhere(table)
    snapshot = table.live.snapshot()
    assert len(snapshot.shards) == 1
    pages = [table.live.scan(limit=2, offset=start).to_table() for start in range(0, 8, 2)]
    assert names(pa.concat_tables(pages)) == whole
    assert table.live.scan(offset=4).count_rows() == len(whole) - 4
    assert table.live.scan(offset=99).count_rows() == 0 == table.live.scan(offset=99).to_table().num_rows


def test_the_largest_limit_with_the_largest_offset_was_a_storage_error(table: TableUnderTest) -> None:
    largest = (1 << 63) - 1
    for reader in table.readers:
        assert reader.scan(limit=largest, offset=largest).to_table().num_rows == 0
        assert reader.scan(limit=largest, offset=1).to_table().num_rows == len(everywhere(table)) - 1


def test_in_with_a_repeated_key_returns_it_once(table: TableUnderTest) -> None:
    assert everywhere(table, filter="id IN (1, 1, 5, 0, 0)") == {1: "one b", 5: "five", 0: "base 0"}
    assert everywhere(table, filter="id = 1 AND id = 5") == {}
    many = ", ".join(str(i % 7) for i in range(3000))
    assert everywhere(table, filter=f"id IN ({many})") == everywhere(table, filter="id < 7")


def test_a_compacted_sstable_that_is_still_listed_does_not_shadow_newer_base_rows(
    table: TableUnderTest,
) -> None:
    table.compact(2)
    newer = named({1: "base again"})
    table.dataset.merge_insert("id").when_matched_update_all().execute(newer)
    assert everywhere(table) == {0: "base 0", 1: "base again", 3: "base 3", 4: "base 4", 5: "five", 6: "six"}
    assert looked_up(table, [1, 2]) == ["base again", None]


def test_counting_reads_no_data_columns(table: TableUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[str]] = []
    scanner = lance.LanceDataset.scanner

    def watched(self: lance.LanceDataset, columns: list[str] | None = None, **options: object) -> object:
        read.append(["everything"] if columns is None else list(columns))
        return scanner(self, columns=columns, **options)

    monkeypatch.setattr(lance.LanceDataset, "scanner", watched)
    with table.writer() as writer:
        writer.put(named({7: "seven"}))
        assert table.live.scan().count_rows() == 7
        assert table.live.scan(filter="id > 3").count_rows() == 4
    assert not any("name" in columns or "everything" in columns for columns in read)


def test_a_btree_on_the_key_tells_superseded_rows_and_the_answers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableUnderTest(tmp_path / "t", data=named({i: f"base {i}" for i in range(1000)}))
    table.dataset.create_scalar_index("id", "BTREE")
    expected = {i: f"base {i}" for i in range(1000)}
    expected |= {5: "five", 500: "new", 2000: "added"}
    del expected[7], expected[999]
    table.flushed({5: "old five", 2000: "added"}, [7])
    table.flushed({5: "five"}, [999])
    asked: list[str | None] = []
    scanner = lance.LanceDataset.scanner

    def watched(self: lance.LanceDataset, **options: Any) -> object:
        asked.append(options.get("filter"))
        return scanner(self, **options)

    monkeypatch.setattr(lance.LanceDataset, "scanner", watched)
    with table.writer() as writer:
        writer.put(named({500: "new"}))
        assert everywhere(table) == expected
        assert any(filter and "IN (5, 7, 2000)" in filter for filter in asked)
        asked.clear()
        assert everywhere(table, filter="id < 8 OR id > 497") == {
            key: name for key, name in expected.items() if key < 8 or key > 497
        }
        assert not any(filter and "IN (5, 7, 2000)" in filter for filter in asked)
        assert names(table.live.scan(limit=990).to_table()).items() <= expected.items()
        assert table.live.scan(limit=999).to_table().num_rows == 999
    table.compact(3)
    assert everywhere(table) == expected


def test_rows_are_left_out_of_wide_batches_without_copying_them() -> None:
    batch = pa.record_batch({"id": np.arange(10), "wide": [bytes(100_000)] * 10})
    pieces = list(without_rows(batch, np.array([0, 3, 4, 9])))
    assert [piece["id"].to_pylist() for piece in pieces] == [[1, 2], [5, 6, 7, 8]]
    assert pieces[0]["wide"].buffers()[2].address == batch["wide"].buffers()[2].address
    (narrow,) = without_rows(batch.select(["id"]), np.array([0, 3, 4, 9]))
    assert narrow["id"].to_pylist() == [1, 2, 5, 6, 7, 8]
    assert list(without_rows(batch, np.array([], np.int64))) == [batch]


def test_batches_stream_and_stop_when_nobody_reads_on(table: TableUnderTest) -> None:
    reader = table.live.scan().to_batches()
    assert reader.read_next_batch().num_rows > 0
    reader.close()
    assert pa.table(table.live.scan()).num_rows == 6


def test_the_base_is_read_no_further_than_the_stream_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_source, "_MAX_BATCH_ROWS", 1024)
    table = TableUnderTest(tmp_path / "t", data=named({i: f"base {i}" for i in range(20_000)}))
    table.flushed({5: "five"})
    pulled: list[int] = []
    scan = base_source.BaseSource._scan

    def watched(self: base_source.BaseSource, *args: Any, **options: Any) -> Iterator[pa.RecordBatch]:
        for batch in scan(self, *args, **options):
            pulled.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(base_source.BaseSource, "_scan", watched)
    stream = table.live.scan().to_batches()
    assert [stream.read_next_batch().num_rows for _ in range(3)] == [1, 1023, 1024]
    assert len(pulled) == 2
    assert sum(batch.num_rows for batch in stream) == 20_000 - 2048


def test_columns_and_their_order_are_as_asked(table: TableUnderTest) -> None:
    found = table.live.scan(["name", "id"], filter="id = 5 OR name = 'six'").to_table()
    assert found.schema.names == ["name", "id"]
    assert list(table.live.scan(["name"], filter="id = 5").to_pandas()["name"]) == ["five"]
    only = table.live.scan(["name"], filter="id > 4").to_table()
    assert sorted(only["name"].to_pylist()) == ["five", "six"]
    assert only.schema.equals(pa.schema([pa.field("name", pa.string())]), check_metadata=True)


@pytest.mark.parametrize(
    "options",
    [
        {"columns": ["nope"]},
        {"columns": []},
        {"filter": "nope = 1"},
        {"filter": "id ="},
        {"filter": "id = 'text'"},
        {"limit": -1},
        {"offset": -1},
        {"limit": True},
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_read(
    table: TableUnderTest, options: dict[str, object]
) -> None:
    with pytest.raises(InvalidInputError):
        table.live.scan(**options)  # type: ignore[arg-type]


def test_a_column_without_its_list_was_taken_for_letters(tmp_path: Path) -> None:
    table = lancewal.create(tmp_path / "t", [{"id": 1, "i": 2, "d": 3}], key="id")
    with pytest.raises(InvalidInputError, match=r"pass a list of names, such as \['id'\]"):
        table.scan(columns="id")


def test_expressions_for_columns_were_ignored(tmp_path: Path) -> None:
    table = lancewal.create(tmp_path / "t", [{"id": 1, "n": 2}], key="id")
    with pytest.raises(InvalidInputError, match="columns is a dict; pass a list of names"):
        table.scan(columns={"n": "n * 10"})  # type: ignore[arg-type]
    assert table.sql("SELECT n * 10 AS n FROM t").to_pylist() == [{"n": 20}]


@pytest.mark.parametrize("filter", ["case when id > 3 then true else false end", "cast(name as int) = 1"])
def test_a_filter_that_only_lance_refuses_is_our_refusal_too(table: TableUnderTest, filter: str) -> None:
    with pytest.raises(InvalidInputError, match="filter"):
        table.live.scan(filter=filter).to_table()
    with pytest.raises(InvalidInputError, match="filter"):
        table.live.scan(filter=filter).to_batches().read_all()
    with pytest.raises(InvalidInputError, match="filter"):
        table.live.scan(filter=filter).count_rows()


def test_an_append_only_table_reads_every_row_once(tmp_path: Path) -> None:
    data = pa.Table.from_batches([rows(0, 3, schema=APPEND_ONLY)])
    table = TableUnderTest(tmp_path / "t", APPEND_ONLY, data)
    with table.writer() as writer:
        writer.put([rows(0, 3, schema=APPEND_ONLY), rows(0, 3, schema=APPEND_ONLY)])
    with table.writer() as writer:
        writer.put(rows(2, 2, schema=APPEND_ONLY))
        for reader in table.readers:
            found = reader.scan().to_table()
            assert sorted(found["id"].to_pylist()) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3]
            assert reader.scan().count_rows() == 11
            assert reader.scan(filter="id = 2").count_rows() == 4
            assert reader.scan(filter="id >= 2", limit=3).to_table().num_rows == 3
            with pytest.raises(InvalidInputError, match="primary key"):
                reader.lookup([1])


def test_text_and_composite_keys(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            pa.field("tenant", pa.string(), False, {"lance-schema:unenforced-primary-key:position": "1"}),
            pa.field("number", pa.int32(), False, {"lance-schema:unenforced-primary-key:position": "2"}),
            pa.field("value", pa.string()),
        ]
    )

    def some(*entries: tuple[str, int, str]) -> pa.Table:
        return pa.Table.from_pylist([{"tenant": t, "number": n, "value": v} for t, n, v in entries], schema)

    table = TableUnderTest(tmp_path / "t", schema, some(("a", 1, "base"), ("a", 2, "base"), ("b", 1, "base")))
    with table.writer() as writer:
        writer.put(some(("a", 1, "flushed"), ("b", 2, "flushed")))
        writer.delete(pa.table({"tenant": ["b"], "number": pa.array([1], pa.int32())}))
    with table.writer() as writer:
        writer.put(some(("b", 2, "live"), ("c", 1, "live")))
        for reader in table.readers:
            found = {(r["tenant"], r["number"]): r["value"] for r in reader.scan().to_table().to_pylist()}
            assert found == {("a", 1): "flushed", ("a", 2): "base", ("b", 2): "live", ("c", 1): "live"}
            assert reader.scan().count_rows() == 4
            pinned = reader.scan(filter="tenant IN ('a', 'b') AND number IN (1, 2)")
            assert "names 4 keys" in pinned.explain()
            assert sorted(pinned.to_table()["value"].to_pylist()) == ["base", "flushed", "live"]
            assert reader.scan(filter="tenant = 'a'").count_rows() == 2
            keys = [("c", 1), ("b", 1), ("a", 2), ("a", 1), ("c", 9)]
            answer = reader.lookup(keys)
            assert answer.found.tolist() == [True, False, True, True, False]
            assert answer.table["value"].to_pylist() == ["live", "base", "flushed"]
            assert reader.lookup({"number": 2, "tenant": "b"}).table["value"].to_pylist() == ["live"]


def test_a_key_in_two_shards_by_hand_is_shown_once_and_the_same_everywhere(tmp_path: Path) -> None:
    table = TableUnderTest(tmp_path / "t")
    first, second = UUID(int=1), UUID(int=2)
    table.flushed({1: "first"}, shard=first)
    table.flushed({1: "second, older"}, shard=second)
    table.flushed({1: "second"}, shard=second)
    assert everywhere(table) == {1: "second"}
    assert looked_up(table, [1]) == ["second"]


def test_explain_names_levels_and_what_is_pushed_down(table: TableUnderTest) -> None:
    with table.writer() as writer:
        writer.put(named({7: "seven"}))
        text = table.live.scan(filter="name = 'six'", limit=3).explain()
        assert "filter: name = 'six'" in text
        assert "memtable:3, filtered in memory" in text
        assert "sstable:2, filter pushed down" in text
        assert "base: 5 rows, filter pushed down" in text
        assert "MemTables of the writer in this process" in text
        assert "limit: 3, offset: 0" in text
        assert "WAL tail" in table.other.scan().explain()
        assert "key column" in table.live.scan(filter="id = 5").explain()
    table.dataset.create_scalar_index("id", "BTREE")
    assert "BTree" in table.live.scan(filter="id = 5").explain()
    assert "id_idx" in table.live.scan(filter="id > 5").explain()


def test_many_readers_in_threads_agree(table: TableUnderTest) -> None:
    with table.writer() as writer:
        writer.put(named({1: "one c", 7: "seven"}))
        writer.delete([3])
        reader = TableReader(table.store)
        with ThreadPoolExecutor(6) as pool:
            scans = list(pool.map(lambda _: names(reader.scan().to_table()), range(24)))
    assert scans == [LEVELS] * 24


def test_a_table_on_s3_reads_the_same(s3_store: ObjectStore) -> None:
    options = dict(s3_store.storage_options)
    base = new_table(s3_store.uri, data=named({i: f"base {i}" for i in range(5)}), storage_options=options)
    shard = UUID(int=3)
    with open_writer(base, shard, store=s3_store) as writer:
        writer.put(named({1: "one"}))
    with open_writer(base, shard, store=s3_store) as writer:
        writer.put(named({2: "two"}))
        writer.delete([0])
        for live in (True, False):
            reader = TableReader(s3_store, live_writers=live)
            expected = {1: "one", 2: "two", 3: "base 3", 4: "base 4"}
            assert names(reader.scan().to_table()) == expected
            assert names(reader.lookup([2, 4]).table) == {2: "two", 4: "base 4"}


def test_key_metadata_stays_on_the_key_column(table: TableUnderTest) -> None:
    assert table.live.scan().to_table().schema.field("id").metadata == {
        k.encode(): v.encode() for k, v in KEY.items()
    }
