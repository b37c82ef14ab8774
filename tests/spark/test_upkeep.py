"""A round of upkeep with Spark for the rows: the plan, the records and the report of any other."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pytest

from lancewal.shard import ShardManifestStore, find_tip
from lancewal.spark import jobs, upkeep
from lancewal.storage import ObjectStore, layout
from lancewal.upkeep import Work
from tests.maintenance.arena import ALL_DUE, Arena
from tests.spark.processes import kill, python_workers
from tests.spark.tables import content, new_table, schema_of
from tests.spark.test_merged import fill_all_levels
from tests.tables import KEYED, ids, rows
from tests.upkeep.test_kills import kill_some
from tests.upkeep.test_rounds import NOTHING_WAITS, sstables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all jobs that were run on Spark."""
    names: list[str] = []
    run = jobs._run

    def noted(spark: SparkSession, job: str, *others: Any, **arguments: Any) -> list[jobs.ShardOutcome]:
        names.append(job)
        return run(spark, job, *others, **arguments)

    monkeypatch.setattr(jobs, "_run", noted)
    return names


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "append only"])
def test_a_table_with_many_sstables_and_an_old_log_is_in_shape_afterwards(
    spark: SparkSession, tmp_path: Path, keyed: bool, ran: list[str]
) -> None:
    table = new_table(tmp_path / "table", schema_of(keyed))
    fill_all_levels(table, schema_of(keyed))
    expected = content(table)
    settings = replace(NOTHING_WAITS, max_small_files=32)
    due = [task.work for task in table.plan_upkeep(settings)]
    assert due == [Work.FLUSH, Work.COMPACT, Work.COLLECT]

    report = upkeep(spark, table.uri, settings)

    assert report.ok, str(report)
    assert [outcome.task.work for outcome in report.outcomes] == due
    assert ran == ["flush", "compact", "gc"]
    assert "SSTables with" in report.outcomes[1].done
    in_base = lance.dataset(table.uri).to_table().to_pylist()
    assert sorted(tuple(row.values()) for row in in_base) == expected
    status = table.status()
    assert (status.unflushed.count, status.uncompacted.count) == (0, 0)
    assert {duty.work for duty in status.duties} == set(due)
    assert not any(duty.under_way or duty.failures for duty in status.duties)
    assert len(table.plan_upkeep(settings)) == 0
    assert upkeep(spark, table.uri, settings).outcomes == ()
    assert content(table) == expected


def test_poisoned_shards_do_not_stop_the_others(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One has a log that cannot be read, one a manifest that cannot even be planned for."""
    table = new_table(tmp_path / "table")
    table.set_upkeep(NOTHING_WAITS)
    sstables(table, 3)
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(100, 30))
    store = ObjectStore.from_uri(table.uri, fsync=False)
    unreadable, unplanned, healthy = (shard.shard_id for shard in table.status().shards)
    manifest = ShardManifestStore(store, unreadable).require_latest()
    last = layout.wal_entry(unreadable, find_tip(store, unreadable, manifest) - 1)
    entry = bytearray(store.get(last))
    entry[-100] ^= 0xFF
    store.delete(last)
    store.put(last, bytes(entry))
    ShardManifestStore(store, unplanned).commit_update(None, lambda m: replace(m, sstables=m.sstables[1:]))

    assert jobs.main(["upkeep", table.uri]) == 1

    told = {line["work"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(told["flush"]["failed"]) == [str(unreadable)]
    assert "WalCorruptError" in told["flush"]["failed"][str(unreadable)]
    assert list(told["compact"]["failed"]) == [str(unplanned)]
    left = {
        shard.shard_id: (shard.unflushed.count, shard.uncompacted.count) for shard in table.status().shards
    }
    assert left[healthy] == (0, 0)
    assert left[unreadable][1] == left[unplanned][0] == 0, "the rest of theirs is done"
    duties = {duty.work: duty for duty in table.status().duties}
    assert [duties[work].failures for work in ("flush", "compact")] == [1, 1]


def test_a_living_owner_without_memtables_is_left_alone_and_that_is_no_failure(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = new_table(tmp_path / "table", KEYED, unsharded=True)
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(0, 3))
        report = upkeep(spark, table.uri, NOTHING_WAITS)
        assert report.ok, str(report)
        assert (report.outcomes[0].task.work, report.outcomes[0].done) == (Work.FLUSH, "0 logs flushed")
        writer.put(rows(3, 3))
    assert ids(table.scan().to_table()) == [0, 1, 2, 3, 4, 5]


class Rounds:
    """Rounds of the Spark job, whose workers are killed at random."""

    def __init__(self, spark: SparkSession, arena: Arena, seed: int) -> None:
        self._spark, self._arena = spark, arena
        self._chance = random.Random(seed)
        self.killed = self.compacted = 0

    def __call__(self) -> None:
        """One round. Races that are lost to the others are left for later, as files that cannot be joined.

        Spark runs a task again whose worker was killed, and no planning: that work is left for later too.
        """
        killer = threading.Timer(self._chance.uniform(0.0, 1.0), self._kill_a_worker)
        killer.start()
        try:
            report = upkeep(self._spark, str(self._arena.where), ALL_DUE)
        finally:
            killer.join()
        for outcome in report.outcomes:
            for error in outcome.failed.values():
                allowed = (
                    "ConflictError",
                    "other commits",
                    "Lance found no files",
                    "Python worker exited unexpectedly",
                )
                assert any(each in f"{error!r} {error}" for each in allowed), error
            self.compacted += outcome.task.work is Work.COMPACT and "rows compacted" in outcome.done

    def _kill_a_worker(self) -> None:
        """Of Python, where the rows are; Spark runs its task again."""
        workers = python_workers()
        if workers:
            self.killed += kill(self._chance.choice(workers))


def kill_all_kinds(
    spark: SparkSession,
    where: Path,
    keyed: bool,
    times: int,
    seed: int,
    *,
    workers: int = 1,
    compactions: int = 1,
) -> Rounds:
    """Up to ``times`` kills of processes, until Spark lost so many workers and has compacted so often.

    How long a kill takes depends on the machine: what is waited for is what the test is about.
    """
    with Arena(where, keyed=keyed, seed=seed) as arena:
        rounds = Rounds(spark, arena, seed)
        # With the ages of upkeep: those of the tests' own collector are shorter than Spark may stand still.
        kill_some(
            arena,
            times,
            seed,
            ["upkeep"],
            beside=rounds,
            enough=lambda: rounds.killed >= workers and rounds.compacted >= compactions,
        )
        for _ in range(20):
            # Whether the job or one of the processes gets to it is chance; both have to.
            if rounds.killed and rounds.compacted:
                break
            rounds()
            arena.healthy()
    arena.settle()
    assert arena.checks > 0
    assert rounds.killed
    assert rounds.compacted
    return rounds


def test_three_processes_and_the_spark_job_killed_at_random(spark: SparkSession, tmp_path: Path) -> None:
    kill_all_kinds(spark, tmp_path / "table", keyed=True, times=1, seed=8)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "append only"])
def test_three_processes_and_the_spark_job_killed_many_times(
    spark: SparkSession, tmp_path: Path, keyed: bool
) -> None:
    kill_all_kinds(spark, tmp_path / "table", keyed, times=40, seed=9, workers=12, compactions=4)
