"""One round: what is due gets done, what fails waits, what others do is left to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import lancewal
from lancewal.base import BaseTable
from lancewal.format import encode_record
from lancewal.maintenance import UpkeepSettings
from lancewal.service import note_duty, read_duties
from lancewal.service.owners import machine
from lancewal.shard import ShardManifestStore
from lancewal.storage import ObjectStore, layout, process_totals
from lancewal.upkeep import Done, Means, Upkeep, Work
from tests.tables import KEYED, fast, ids, rows, wal_table

#: Everything at once.
NOTHING_WAITS = UpkeepSettings(
    max_sstables=1,
    max_uncompacted_age=timedelta(0),
    max_unflushed_age=timedelta(0),
    max_index_lag=1,
    max_small_files=1,
    garbage_age=timedelta(0),
)


_DIES = """
import lancewal, os, pyarrow as pa, sys
writer = lancewal.open(sys.argv[1]).writer()
writer.put(pa.table({"id": [1, 2], "name": ["a", "b"]}))
os._exit(1)
"""
_WAL_ONLY = """
import lancewal, pyarrow as pa, sys
writer = lancewal.open(sys.argv[1]).writer(enable_memtable=False)
writer.put(pa.table({"id": [1], "name": ["a"]}))
print("ready", flush=True)
sys.stdin.readline()
writer.put(pa.table({"id": [2], "name": ["b"]}))
writer.close()
"""


def upkeep_of(table: lancewal.Table, **how: Any) -> Upkeep:
    store = ObjectStore.from_uri(table.uri, fsync=False)
    return Upkeep.here(store, lambda: BaseTable.open(store.uri, store=store), **how)


def sstables(table: lancewal.Table, count: int, start: int = 0) -> None:
    """As many SSTables in every shard, of one put each."""
    for number in range(count):
        with table.writer() as writer:
            writer.put(rows(start + 20 * number, 20))


def test_a_round_brings_a_table_into_shape(table: lancewal.Table) -> None:
    sstables(table, 5)
    before = ids(table.scan().to_table())
    assert [task.work for task in table.plan_upkeep()] == [Work.COMPACT, Work.COLLECT]
    report = table.upkeep()
    assert (report.ok, [outcome.task.work for outcome in report.outcomes]) == (
        True,
        [Work.COMPACT, Work.COLLECT],
    )
    status = table.status()
    assert status.uncompacted.count == 0
    assert ids(lance.dataset(table.uri).to_table()) == ids(table.scan().to_table()) == before
    assert len(table.plan_upkeep()) == 0
    assert {duty.work for duty in status.duties} == {"compact", "collect"}
    assert not any(duty.under_way or duty.failures for duty in status.duties)
    assert table.verify().ok


def test_planning_changes_nothing(table: lancewal.Table) -> None:
    sstables(table, 5)

    def files() -> set[Path]:
        return {path for path in Path(table.uri).rglob("*") if path.is_file()}

    before = files()
    assert len(table.plan_upkeep()) == 2
    assert files() == before


def test_rows_in_the_log_of_a_writer_that_is_gone_reach_the_base_in_one_round(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", writer_defaults=fast())
    subprocess.run([sys.executable, "-c", _DIES, table.uri], check=False)
    assert table.status().unflushed.count == 1
    report = table.upkeep(NOTHING_WAITS)
    assert report.ok, str(report)
    assert lance.dataset(table.uri).count_rows() == 2


def test_an_index_that_lance_leaves_as_it_is_made_a_version_of_the_base_with_every_look(
    tmp_path: Path,
) -> None:
    """One that was made of an empty table, and takes more rows than there are."""
    schema = pa.schema([*KEYED, pa.field("vector", pa.list_(pa.float32(), 8))])
    dataset = lance.write_dataset(schema.empty_table(), tmp_path / "t")
    dataset.create_index("vector", "IVF_PQ", num_partitions=1, num_sub_vectors=2)
    table = lancewal.initialize(dataset.uri, unsharded=True, writer_defaults=fast())
    with table.writer() as writer:
        writer.put([{"id": number, "name": "a", "vector": [1.0] * 8} for number in range(20)])
    table.compact()
    upkeep = upkeep_of(table)
    first = upkeep.round(UpkeepSettings(max_index_lag=1))
    assert "Lance does not index the rows of vector_idx yet" in str(first)
    version = lance.dataset(table.uri).version
    assert upkeep.round(UpkeepSettings(max_index_lag=1)).ok
    assert lance.dataset(table.uri).version == version
    with table.writer() as writer:
        writer.put([{"id": number, "name": "a", "vector": [float(number)] * 8} for number in range(300)])
    table.compact(optimize_indexes=False)
    assert upkeep_of(table).round(UpkeepSettings(max_index_lag=1)).ok
    assert [index.rows_behind for index in table.status().indexes] == [0]


def test_an_owner_that_lives_is_asked_to_flush_and_goes_on(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t")
    with table.writer() as writer:
        writer.put(rows(0, 3))
        assert table.upkeep(NOTHING_WAITS).ok
        assert (table.status().unflushed.count, lance.dataset(table.uri).count_rows()) == (0, 3)
        writer.put(rows(3, 3))
    assert ids(table.scan().to_table()) == [0, 1, 2, 3, 4, 5]


def test_an_owner_without_memtables_is_left_alone_and_that_is_no_failure(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t")
    with subprocess.Popen(
        [sys.executable, "-c", _WAL_ONLY, table.uri],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        upkeep = upkeep_of(table)
        first = upkeep.round(NOTHING_WAITS)
        assert first.ok, str(first)
        assert Work.FLUSH not in {each.task.work for each in upkeep.round(NOTHING_WAITS).outcomes}
        child.communicate("go\n")
    assert child.returncode == 0, "its writer was fenced"


@pytest.mark.sharding(bucket=("id", 3))
def test_an_entry_with_an_unreadable_head_stopped_the_upkeep_of_all_shards(table: lancewal.Table) -> None:
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(0, 60))
    poisoned, *_ = (shard.shard_id for shard in table.status().shards)
    store = ObjectStore.from_uri(table.uri, fsync=False)
    for info in store.list(layout.wal_dir(poisoned)):
        store.put(info.path, b"no Arrow at all")
    assert table.status().unflushed.count >= 3
    report = table.upkeep(NOTHING_WAITS)
    [flush] = [each for each in report.outcomes if each.task.work is Work.FLUSH]
    assert flush.failed.keys() == {poisoned}
    waiting = {shard.shard_id: shard.unflushed.count for shard in table.status().shards}
    assert [shard for shard, count in waiting.items() if count] == [poisoned]


@pytest.mark.sharding(bucket=("id", 3))
def test_a_poisoned_shard_does_not_stop_the_others_and_is_tried_again_later(table: lancewal.Table) -> None:
    sstables(table, 2)
    bad = table.status().shards[1]
    [victim] = (Path(table.uri) / layout.shard_dir(bad.shard_id)).glob("*_gen_1")
    hidden = victim.rename(victim.parent.parent.parent / "hidden")
    now = 0.0
    upkeep = upkeep_of(table, clock=lambda: now)
    report = upkeep.round(NOTHING_WAITS)
    assert [set(each.failed) for each in report.outcomes if each.task.work is Work.COMPACT] == [
        {bad.shard_id}
    ]
    assert {s.shard_id for s in table.status().shards if s.uncompacted.count} == {bad.shard_id}
    shown = {duty.work: duty for duty in table.status().duties}["compact"]
    assert (shown.failures, list(shown.failed)) == (1, [str(bad.shard_id)])

    def tried() -> bool:
        return any(each.task.work is Work.COMPACT for each in upkeep.round(NOTHING_WAITS).outcomes)

    # Each pause is twice as long as the one before.
    for pause in (10, 20, 40):
        assert not tried()
        now += pause - 1
        assert not tried()
        now += 2
        assert tried()
    totals = process_totals.by_table()[table.uri]
    assert totals["upkeep.compact.failures"] == 4
    hidden.rename(victim)
    now += 1000
    assert upkeep.round(NOTHING_WAITS).ok
    assert table.status().uncompacted.count == 0
    assert read_duties(ObjectStore.from_uri(table.uri))["compact"].failures == 0


def test_a_shard_that_cannot_be_planned_for_does_not_stop_the_others(table: lancewal.Table) -> None:
    """A hole in a manifest's list ends the plan for all; by themselves the others are compacted."""
    sstables(table, 3)
    store = ObjectStore.from_uri(table.uri, fsync=False)
    bad = table.status().shards[2].shard_id
    ShardManifestStore(store, bad).commit_update(None, lambda m: replace(m, sstables=m.sstables[1:]))
    report = upkeep_of(table).round(NOTHING_WAITS)
    (outcome,) = [each for each in report.outcomes if each.task.work is Work.COMPACT]
    assert set(outcome.failed) == {bad}
    assert {s.shard_id for s in table.status().shards if s.uncompacted.count} == {bad}


def _pretend(table: lancewal.Table, **changes: object) -> None:
    """Another process that compacts, as its record says."""
    store = ObjectStore.from_uri(table.uri, fsync=False)
    note_duty(store, "compact", under_way=True)
    path = Path(table.uri) / layout.UPKEEP_DIR / "compact.json"
    stored = {**json.loads(path.read_bytes()), "machine": "another", **changes}
    stored.pop("crc32c")
    store.put(f"{layout.UPKEEP_DIR}/compact.json", encode_record(stored))


def test_what_another_process_is_at_is_left_to_it(table: lancewal.Table) -> None:
    sstables(table, 5)
    _pretend(table)
    report = table.upkeep()
    assert report.ok
    assert [each.left_to_others for each in report.outcomes] == [True, False]
    assert table.status().uncompacted.count == 20


def test_a_process_that_died_at_work_holds_nobody_up(table: lancewal.Table) -> None:
    """Dead on this host, or begun so long ago that nobody believes it; and a record that is damaged."""
    sstables(table, 5)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    _pretend(table, machine=machine(), pid=dead.pid, started="long before")
    assert not table.upkeep().outcomes[0].left_to_others
    sstables(table, 5)
    _pretend(table, machine=machine(), pid=os.getpid(), started="long before")
    assert not table.upkeep().outcomes[0].left_to_others
    sstables(table, 5)
    _pretend(table)
    record = Path(table.uri) / layout.UPKEEP_DIR / "compact.json"
    old = (datetime.now(UTC) - timedelta(minutes=6)).timestamp()
    os.utime(record, (old, old))
    assert not table.upkeep().outcomes[0].left_to_others
    sstables(table, 5)
    record.write_bytes(b'{"under_way":true}')
    assert not table.upkeep().outcomes[0].left_to_others
    assert table.status().uncompacted.count == 0


def test_a_compaction_of_much_is_done_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = wal_table(tmp_path / "t")
    sstables(table, 6)
    monkeypatch.setattr("lancewal.upkeep.means.COMMIT_BYTES", 1)
    upkeep = upkeep_of(table, most_commits=2)
    waiting = []
    for _ in range(3):
        upkeep.round(NOTHING_WAITS)
        waiting.append(table.status().uncompacted.count)
    assert waiting == [4, 2, 0]
    assert len(table.scan().to_table()) == 120


def test_a_round_that_is_told_to_stop_begins_nothing_more(table: lancewal.Table) -> None:
    sstables(table, 5)
    calls = iter([False, True, True, True, True])
    report = upkeep_of(table).round(stop=lambda: next(calls, True))
    assert len(report.outcomes) == 1
    assert table.status().uncompacted.count == 20  # nothing was begun
    assert table.upkeep().ok
    assert table.status().uncompacted.count == 0


def test_old_versions_and_small_files_of_the_base_go(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t")
    for number in range(6):
        with table.writer() as writer:
            writer.put(rows(10 * number, 10))
        table.compact(compact_files=False, optimize_indexes=False)
    for path in (tmp_path / "t" / "_versions").iterdir():
        os.utime(path, (0, 0))
    settings = UpkeepSettings(max_small_files=2)
    assert [task.work for task in table.plan_upkeep(settings)] == [Work.FILES, Work.VERSIONS, Work.COLLECT]
    report = table.upkeep(settings)
    assert report.ok, str(report)
    assert table.status().small_files == 1
    assert len(table.scan().to_table()) == 60


def test_rows_that_an_index_lacks_are_indexed(tmp_path: Path) -> None:
    dataset = lance.write_dataset(rows_table(0, 50), str(tmp_path / "t"))
    dataset.create_scalar_index("name", "BTREE")
    table = lancewal.initialize(tmp_path / "t", unsharded=True)
    lance.write_dataset(rows_table(50, 30), str(tmp_path / "t"), mode="append")
    settings = UpkeepSettings(max_index_lag=20)
    assert [task.work for task in table.plan_upkeep(settings)][:1] == [Work.INDEX]
    assert table.upkeep(settings).ok
    assert [index.rows_behind for index in table.status().indexes] == [0]


def rows_table(start: int, count: int) -> pa.Table:
    return pa.Table.from_batches([rows(start, count)], KEYED)


def test_too_much_garbage_goes_after_ten_minutes_and_not_after_a_day(table: lancewal.Table) -> None:
    ages: list[timedelta] = []

    class Asked(Means):
        def collect(self, min_age: timedelta) -> Done:
            ages.append(min_age)
            return Done()

    sstables(table, 2)
    table.compact()
    assert table.status().garbage.num_bytes > 10
    store = ObjectStore.from_uri(table.uri, fsync=False)
    for most in (None, 10):
        asked = Upkeep(store, lambda: BaseTable.open(store.uri, store=store), Asked())
        asked.round({"max_garbage_bytes": most})
        store.delete_many([info.path for info in store.list(layout.CLOCK_DIR) if "upkeep" in info.path])
    assert ages == [timedelta(days=1), timedelta(minutes=10)]
