"""Backups as a job: a task for each shard, one consistent state, whole or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import lancewal
from lancewal.errors import ConflictError, InvalidInputError, StorageError
from lancewal.maintenance import backup as backups
from lancewal.maintenance import check_backup
from lancewal.spark import JobFailedError, backup, job_tasks, jobs
from lancewal.spark.job_tasks import JobReader
from lancewal.storage import ObjectStore, layout
from tests.cli.support import ok
from tests.patience import PATIENCE, wait_until
from tests.servers import S3Server
from tests.spark.conftest import WORKER_PATH
from tests.spark.processes import kill, kill_session, python_workers, spark_environment
from tests.spark.tables import content, new_table, options_of
from tests.spark.test_merged import fill_all_levels
from tests.tables import APPEND_ONLY, KEYED, rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def restored(tmp_path: Path, name: str = "restored", **which: Any) -> lancewal.Table:
    return lancewal.restore(tmp_path / "backups", tmp_path / name, **which)


def finished(tmp_path: Path) -> list[str]:
    return backups.list_backups(ObjectStore.from_uri(tmp_path / "backups"))


@pytest.mark.parametrize("schema", [KEYED, APPEND_ONLY], ids=["keyed", "append only"])
def test_a_table_is_backed_up_beside_its_writer_and_restored(
    spark: SparkSession, tmp_path: Path, schema: Any
) -> None:
    table = new_table(tmp_path / "table", schema)
    fill_all_levels(table, schema)
    with table.writer() as writer:
        writer.put(rows(200, 5, schema=schema))
        before = content(table)
        first = backup(spark, table.uri, str(tmp_path / "backups"))
        writer.put(rows(300, 5, schema=schema))
        second = backup(spark, table.uri, str(tmp_path / "backups"))
        after = content(table)
    assert content(restored(tmp_path, "first", backup=first.id)) == before
    whole = restored(tmp_path, "second")
    assert content(whole) == after != before
    assert whole.verify().findings == []
    assert check_backup(ObjectStore.from_uri(tmp_path / "backups")) == []
    assert first.copied_files == first.files
    assert second.copied_bytes < second.num_bytes, "what the first has is not copied again"
    # What a process copies by itself goes on from there.
    assert table.backup(tmp_path / "backups").copied_bytes < first.copied_bytes


def test_programs_and_places_elsewhere(
    spark: SparkSession, tmp_path: Path, s3: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    table = new_table(tmp_path / "table")
    fill_all_levels(table, KEYED)
    place = s3.uri("backups-by-spark")
    elsewhere = [f"--backup-storage={name}={value}" for name, value in s3.storage_options.items()]
    assert jobs.main(["backup", table.uri, "--to", place, *elsewhere]) == 0
    told = json.loads(capsys.readouterr().out)
    found = lancewal.restore(place, tmp_path / "one", backup=told["id"], source_options=s3.storage_options)
    assert content(found) == content(table)
    line = ok("backup", table.uri, str(tmp_path / "backups"), "--engine", "spark", "--check", "--json")
    assert line.document["damaged"] == []
    assert content(restored(tmp_path)) == content(table)
    with pytest.raises(InvalidInputError, match="needs --to"):
        jobs.main(["backup", table.uri])
    with pytest.raises(InvalidInputError, match="part of the table"):
        backup(spark, table.uri, f"{table.uri}/backups")


def test_a_task_that_is_killed_is_run_again(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table", bucket=("id", 24))
    fill_all_levels(table, KEYED)
    killed = []

    def kill_a_worker() -> None:
        wait_until((tmp_path / "backups" / "files").exists, "the first copy")
        killed.extend(pid for pid in python_workers() if kill(pid))

    killer = threading.Thread(target=kill_a_worker)
    killer.start()
    try:
        backup(spark, table.uri, str(tmp_path / "backups"))
    finally:
        killer.join()
    assert killed
    assert content(restored(tmp_path)) == content(table)


def in_turn(table: lancewal.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Parts are copied by tasks of this process, each some times over; the last report counts."""

    def run(spark: Any, job: str, uri: str, storage: Any, **given: Any) -> list[jobs.ShardOutcome]:
        given.pop("backup_options")
        reader = JobReader(options_of(uri, job=job, jobArguments=json.dumps(given)), job)
        units = reader.partitions()
        found = {}
        for number, unit in [(n, unit) for n, unit in enumerate(units) for _ in range(times)]:
            (batch,) = reader.read(unit)
            (row,) = batch.to_pylist()
            found.setdefault(number, jobs.ShardOutcome(None, 0.0, json.loads(row["details"]), row["error"]))
        return list(found.values())

    monkeypatch.setattr(jobs, "_run", run)
    backup(None, table.uri, str(tmp_path / "backups"))  # type: ignore[arg-type]


def test_a_second_attempt_of_a_task_writes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a speculative task the loser may be the last to write, and the winner's checksum is recorded."""
    table = new_table(tmp_path / "table")
    fill_all_levels(table, KEYED)
    in_turn(table, tmp_path, monkeypatch, times=2)
    assert check_backup(ObjectStore.from_uri(tmp_path / "backups")) == []
    assert content(restored(tmp_path)) == content(table)


def test_what_is_collected_before_its_task_starts_the_backup_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = new_table(tmp_path / "table")
    fill_all_levels(table, KEYED)
    expected = content(table)
    store = ObjectStore.from_uri(table.uri)
    copy_part, asked = job_tasks.copy_part, []

    def late(*arguments: Any) -> Any:
        asked.append(arguments)
        if len(asked) == 2:
            table.flush()
            for shard in table.shards():
                for position in range(1, shard.wal_tip):
                    store.delete(layout.wal_entry(shard.shard_id, position))
        return copy_part(*arguments)

    monkeypatch.setattr(job_tasks, "copy_part", late)
    in_turn(table, tmp_path, monkeypatch)
    assert len(asked) > 4, "it was planned again"
    assert content(restored(tmp_path)) == expected
    (done,) = finished(tmp_path)
    places = [path.name for path in (tmp_path / "backups" / "backups").iterdir()]
    assert sorted(places) == [done, f"{done}.json"], "nothing is left of the first attempt"


def test_a_shard_that_fails_leaves_no_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = new_table(tmp_path / "table")
    fill_all_levels(table, KEYED)
    table.backup(tmp_path / "backups")
    before, earlier = content(table), finished(tmp_path)
    copy_part, asked = job_tasks.copy_part, []

    def failing(*arguments: Any) -> Any:
        asked.append(arguments)
        if len(asked) == 2:
            raise StorageError("the disk is full")
        return copy_part(*arguments)

    monkeypatch.setattr(job_tasks, "copy_part", failing)
    with pytest.raises(JobFailedError, match="the disk is full"):
        in_turn(table, tmp_path, monkeypatch)
    assert len(asked) > 2, "the others are copied nevertheless"
    assert finished(tmp_path) == earlier
    assert content(restored(tmp_path)) == before
    monkeypatch.setattr(backups, "_ATTEMPTS", 2)

    def gone(*arguments: Any) -> Any:
        raise FileNotFoundError("collected")

    monkeypatch.setattr(job_tasks, "copy_part", gone)
    with pytest.raises(ConflictError, match="larger min_age"):
        in_turn(table, tmp_path, monkeypatch)


@pytest.mark.soak
def test_a_driver_that_is_killed_leaves_the_backup_before_and_the_next_one_is_whole(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table", bucket=("id", 64))
    fill_all_levels(table, KEYED)
    table.backup(tmp_path / "backups")
    before, earlier = content(table), finished(tmp_path)
    with table.writer() as writer:
        writer.put(rows(500, 200))
    table.flush()

    def started() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "lancewal.spark.jobs", "backup", table.uri]
        return subprocess.Popen(
            [*command, "--to", str(tmp_path / "backups"), "--master", "local[2]"],
            env={**spark_environment(tmp_path), "PYTHONPATH": WORKER_PATH},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def places() -> int:
        return sum(path.is_dir() for path in (tmp_path / "backups" / "backups").iterdir())

    driver = started()
    try:
        wait_until(lambda: places() == 2, "the first copy of the second backup")
    finally:
        kill_session(driver.pid)
        driver.wait(PATIENCE)
    assert finished(tmp_path) == earlier
    assert content(restored(tmp_path, "earlier")) == before
    again = started()
    try:
        assert again.wait(PATIENCE) == 0
    finally:
        kill_session(again.pid)
    assert content(restored(tmp_path, "newest")) == content(table)
