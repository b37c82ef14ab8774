"""Few rows by format: they go to the logs by way of the driver, exactly once, whichever way a run takes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lancewal
from lancewal.errors import InvalidInputError, PartialWriteError, ShardOwnedError, StorageError
from lancewal.publish import Transaction
from lancewal.shard.discovery import discover_manifests
from lancewal.spark import sink
from lancewal.spark.sink import TaskMessage, commit_write, take_rows
from lancewal.storage import ObjectStore
from tests.patience import wait_until
from tests.service.test_owners import forged
from tests.spark import faulty
from tests.spark.tables import content, named, new_table, options_of
from tests.spark.test_low_latency import entries
from tests.spark.test_stream_faults import changes_in
from tests.tables import APPEND_ONLY, rows


def sent(table: lancewal.Table, *parts: pa.RecordBatch, **options: Any) -> list[Any]:
    """What tasks have for the driver, a part each, as it gets there."""
    parsed = options_of(table, **options)
    told = [take_rows(parsed, iter([part]), number) for number, part in enumerate(parts)]
    return pickle.loads(pickle.dumps(told))  # type: ignore[no-any-return]


def committed(table: lancewal.Table, messages: list[Any], version: int = 0, **options: Any) -> Any:
    return commit_write(options_of(table, **options), messages, Transaction("app", version))


def sstables(table: lancewal.Table) -> int:
    return sum(len(m.sstables) for m in discover_manifests(ObjectStore.from_uri(table.uri)))


def epochs(table: lancewal.Table) -> list[int]:
    return [m.writer_epoch for m in discover_manifests(ObjectStore.from_uri(table.uri))]


def append_only(start: int, count: int) -> pa.RecordBatch:
    return rows(start, count, schema=APPEND_ONLY)


def test_few_rows_of_all_tasks_become_one_entry_for_each_shard_and_tasks_write_nothing(
    tmp_path: Path,
) -> None:
    table = new_table(tmp_path / "table", APPEND_ONLY)
    files = sorted(Path(table.uri).rglob("*"))
    messages = [*sent(table, *(append_only(10 * n, 10) for n in range(3))), None, TaskMessage(3)]
    assert sorted(Path(table.uri).rglob("*")) == files
    written = committed(table, messages)
    assert content(table) == named(0, 30)
    assert sstables(table) == 0
    assert {len(found) for found in entries(table).values()} == {1}
    assert [each.skipped for each in written] == [False] * 3
    assert all(each.wal_bytes and each.position for each in written)


def test_a_commit_that_is_repeated_writes_nothing_and_a_lost_attempts_rows_are_nowhere(
    tmp_path: Path,
) -> None:
    """Spark gives the commit one message of each task; a retried or speculative one's differs in nothing."""
    table = new_table(tmp_path / "table", APPEND_ONLY)
    messages, again = (sent(table, append_only(0, 10), append_only(10, 10)) for _ in range(2))
    assert messages == again
    assert committed(table, messages)
    assert committed(table, again) == []
    assert content(table) == named(0, 20)
    assert changes_in(table.uri) == 20


def test_a_write_without_a_name_leaves_no_records(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table", APPEND_ONLY)
    for _ in range(2):
        commit_write(options_of(table), sent(table, append_only(0, 3)), None)
    assert content(table) == sorted(named(0, 3) * 2)
    assert not list(Path(table.uri).rglob("*.started.*"))


@pytest.mark.parametrize(
    ("first", "second"),
    [({}, {}), ({}, {"walBytes": 0}), ({"walBytes": 0}, {})],
    ids=["few and few", "few and many", "many and few"],
)
def test_a_driver_that_dies_at_any_write_is_completed_by_the_next_whichever_way_it_takes(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lancewal.publish.publishing._CONCURRENT_SHARDS", 1)
    table = new_table(tmp_path / "table", APPEND_ONLY)
    version, partly = 0, 0
    while True:
        part = append_only(20 * version, 20)
        messages = sent(table, part, **first)
        faulty.issue(f"commit {version}")
        try:
            with faulty.dying_commit():
                committed(table, messages, version, **first)
        except (faulty.InjectedError, PartialWriteError) as error:
            written = committed(table, sent(table, part, **second), version, **second)
            partly += 0 < sum(each.skipped for each in written) < len(written)
            if "after all writes" in str(error):
                break
        finally:
            faulty.withdraw()
        version += 1
    assert partly, "some died between two shards"
    assert version > 10
    rows_written = 20 * (version + 1)
    assert content(table) == sorted(named(0, rows_written))
    table.flush()
    table.compact()
    assert content(table) == sorted(named(0, rows_written))
    assert changes_in(table.uri) == rows_written


def test_more_rows_than_fit_into_logs_become_sstables_in_the_order_of_their_tasks(tmp_path: Path) -> None:
    """Of the tasks with few and those with many rows the last one's row of a key wins."""
    table = new_table(tmp_path / "table")
    few = [rows(0, 3, prefix=prefix) for prefix in ("a", "c", "d")]
    parts = [
        few[0],
        rows(0, 300, prefix="b"),
        few[1],
        few[2],
        rows(1, 300, prefix="e"),
        rows(2, 1, prefix="f"),
    ]
    messages = sent(table, *parts, walBytes=2000)
    assert [bool(message.staged) for message in messages] == [False, True, False, False, True, False]
    committed(table, messages[::-1], walBytes=2000)
    expected = {0: "d", 1: "e", 2: "f", 300: "e"}
    assert {i: name.split("_")[0] for i, name in content(table) if i in expected} == expected
    assert entries(table).keys()
    assert not any(entries(table).values())
    assert sstables(table) == 5 * 3 - 2, "neighbours with few rows share theirs, and one row is in one shard"


def test_a_bound_holds_for_all_tasks_together(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    parts = [rows(0, 9), rows(9, 9)]
    messages = sent(table, *parts, walBytes=2 * max(part.nbytes for part in parts))
    assert all(message.rows for message in messages), "each is a small part"
    committed(table, messages, walBytes=parts[0].nbytes)
    assert sstables(table) > 0
    assert not any(entries(table).values())
    assert content(table) == named(0, 18)


def test_what_tasks_send_is_bounded_however_many_there_are() -> None:
    shares = [sink._sent_bytes(sink.DEFAULT_WAL_BYTES, number) for number in range(10_000)]
    assert sum(shares) < 10 * sink.DEFAULT_WAL_BYTES
    for tasks in (1, 7, 200, 10_000):
        evenly = min(sink.DEFAULT_WAL_BYTES // tasks, sink._MOST_SENT_BYTES)
        assert all(share >= evenly for share in shares[:tasks]), tasks


def test_a_refused_row_in_any_task_keeps_the_table_as_it_was(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    bad = pa.record_batch({"id": pa.array([None], pa.int64()), "name": ["x"]})
    with pytest.raises(InvalidInputError, match="nulls in key column id"):
        committed(table, sent(table, rows(0, 9), bad))
    assert content(table) == []
    assert set(epochs(table)) == {0}


def test_logs_that_have_become_long_are_flushed_by_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else might, where all writes come by format and only compaction runs."""
    monkeypatch.setattr(sink, "LONG_TAIL", 4)
    table = new_table(tmp_path / "table", APPEND_ONLY)
    for version in range(4):
        committed(table, sent(table, append_only(20 * version, 20)), version)
        assert len(content(table)) == 20 * (version + 1)
    assert sstables(table) == 3
    table.compact()
    assert table.status().unflushed.count < 6
    assert content(table) == named(0, 80)
    assert changes_in(table.uri) == 80


def test_rows_count_as_written_when_the_flush_after_them_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> None:
        raise StorageError("down")

    monkeypatch.setattr(sink, "LONG_TAIL", 0)
    monkeypatch.setattr(sink, "flush_through_owners", failing)
    table = new_table(tmp_path / "table", APPEND_ONLY)
    assert committed(table, sent(table, append_only(0, 5)))
    assert content(table) == named(0, 5)


def test_never_leaves_shards_alone_whose_owner_is_gone_and_others_take_them(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table", APPEND_ONLY, unsharded=True)
    store = ObjectStore.from_uri(table.uri)
    committed(table, sent(table, append_only(0, 3)))
    [shard] = table.shards()
    forged(store, shard.shard_id, shard.epoch, lease_seconds=0.001)
    wait_until(lambda: table.owners()[0].gone, "the end of a lease")
    with pytest.raises(ShardOwnedError, match="living or gone"):
        committed(table, sent(table, append_only(3, 3)), 1, takeOver="never")
    assert content(table) == named(0, 3)
    assert table.shards() == [shard]
    committed(table, sent(table, append_only(3, 3)), 1)
    assert content(table) == named(0, 6)
    assert sstables(table) == 0
