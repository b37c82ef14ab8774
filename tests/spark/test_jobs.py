"""Flush, compaction and garbage collection as jobs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import lance
import pytest

import lancewal
from lancewal.base import BaseTable
from lancewal.errors import PartialWriteError
from lancewal.format.shard_manifest import ShardManifest
from lancewal.maintenance import backup, plan_compaction
from lancewal.shard.discovery import discover_manifests
from lancewal.shard.manifest import ShardManifestStore
from lancewal.spark import JobFailedError, compact, flush, gc, job_tasks, jobs
from lancewal.spark.job_tasks import JobReader, Unit
from lancewal.storage import ObjectStore, layout
from tests.cli.support import ok, run
from tests.spark.processes import spark_environment
from tests.spark.tables import content, new_table, options_of, schema_of, spark_content
from tests.spark.test_merged import fill_all_levels
from tests.sstable.test_lineage import Copied
from tests.tables import KEYED, fast, rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import InputPartition


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "append only"])
def test_rows_go_all_the_way_to_the_base_table_and_the_rest_is_collected(
    spark: SparkSession, tmp_path: Path, keyed: bool
) -> None:
    table = new_table(tmp_path / "table", schema_of(keyed))
    fill_all_levels(table, schema_of(keyed))
    expected = content(table)

    flushed = flush(spark, table.uri)

    assert [outcome.shard_id for outcome in flushed] == [info.shard_id for info in table.shards()]
    assert sum(outcome.details["rows"] for outcome in flushed) == (33 if keyed else 30)
    assert [outcome.details["rows"] for outcome in flush(spark, table.uri)] == [0, 0, 0], "nothing is left"
    compacted = compact(spark, table.uri)
    assert len(compacted) == 3
    in_base = lance.dataset(table.uri).to_table().to_pylist()
    assert sorted(tuple(row.values()) for row in in_base) == expected
    assert compact(spark, table.uri) == []
    assert [info.generations for info in table.shards()] == [(), (), ()], "what is compacted is not listed"
    gc(spark, table.uri, dry_run=True)
    collected = gc(spark, table.uri, min_age=timedelta(0))
    assert sum(outcome.details["collected"]["sstables"] for outcome in collected) > 0
    assert content(table) == spark_content(spark, table.uri) == expected


def test_a_compaction_job_changed_what_reads_give_for_keys_in_two_shards(tmp_path: Path) -> None:
    """Two shards by hand with the same keys; the parts of their pack end at the first that fails."""
    lance.write_dataset(KEYED.empty_table(), str(tmp_path / "table"))
    table = lancewal.initialize(str(tmp_path / "table"), by_hand=True, writer_defaults=fast())
    one, other = sorted(uuid4() for _ in range(2))
    for shard, prefix in [(one, "a"), (other, "b"), (other, "c"), (one, "d"), (other, "e")]:
        with table.shard_writer(shard) as writer:
            writer.put(rows(0, 5, prefix=prefix))
    expected = content(table)
    options = options_of(table.uri)
    reader = JobReader(options, "compact")
    (unit,) = reader.partitions()
    assert isinstance(unit, Unit)
    assert [len(parts) for parts in unit.groups] == [5]

    damaged = ObjectStore.from_uri(table.uri)
    (path,) = [entry.path for entry in manifest_of(damaged, other).sstables if entry.generation == 2]
    data = f"{layout.sstable_dir(other, path)}/data"
    (kept,) = [(info.path, damaged.get(info.path)) for info in damaged.list(data)]
    damaged.delete(kept[0])
    assert failed_shards(reader, unit) == {str(one): False, str(other): True}
    left = {(part.shard_id, part.generations[0]) for part in table.plan_compaction().shards}
    assert left == {(other, 2), (one, 2), (other, 3)}, "what comes after it is left"
    damaged.put(*kept)
    table = lancewal.open(table.uri)
    assert content(table) == expected
    for unit in reader.partitions():
        assert failed_shards(reader, unit) == {str(one): False, str(other): False}
    assert content(table) == expected


def failed_shards(reader: JobReader, unit: InputPartition) -> dict[str, bool]:
    reports = [row for batch in reader.read(unit) for row in batch.to_pylist()]
    return {row["shard_id"]: row["error"] is not None for row in reports}


def test_sparks_flush_left_the_generations_of_a_copied_table_below_its_marker(tmp_path: Path) -> None:
    site = Copied(tmp_path)
    site.flush_by_lance(10, "copy")
    reader = JobReader(options_of(site.store.uri), "flush")
    reports = [batch.to_pylist()[0] for unit in reader.partitions() for batch in reader.read(unit)]
    assert [report["error"] for report in reports] == [None]
    assert site.generations == [4], "as Table.flush does"


def manifest_of(store: ObjectStore, shard_id: UUID) -> ShardManifest:
    return ShardManifestStore(store, shard_id).require_latest()


def test_a_shard_that_fails_does_not_stop_the_others_and_fails_the_job_at_its_end(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = new_table(tmp_path / "table")
    fill_all_levels(table, KEYED)
    store = ObjectStore.from_uri(table.uri)
    broken, *healthy = discover_manifests(store)
    entry = layout.wal_entry(broken.shard_id, broken.replay_after_wal_entry_position + 1)
    position = broken.replay_after_wal_entry_position + 1
    while b"id" not in store.get(entry):
        position += 1
        entry = layout.wal_entry(broken.shard_id, position)
    store.delete(entry)
    store.put(entry, b"no entry")

    with pytest.raises(JobFailedError) as failure:
        flush(spark, table.uri)

    assert isinstance(failure.value, PartialWriteError)
    assert list(failure.value.failed) == [broken.shard_id]
    outcomes = {outcome.shard_id: outcome for outcome in failure.value.outcomes}
    assert {shard for shard, outcome in outcomes.items() if outcome.error} == {broken.shard_id}
    assert all(outcomes[manifest.shard_id].details["rows"] for manifest in healthy)
    assert pickle.loads(pickle.dumps(failure.value)).outcomes == failure.value.outcomes
    assert "WalCorruptError" in str(failure.value)
    for manifest in healthy:
        now = next(m for m in discover_manifests(store) if m.shard_id == manifest.shard_id)
        assert now.current_generation == manifest.current_generation + 1
    capsys.readouterr()
    assert jobs.main(["flush", table.uri]) == 1
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 3, "a line for every shard, failed or not"
    assert str(broken.shard_id) in told.err


def test_the_program_prints_a_line_for_each_shard(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = new_table(tmp_path / "table")
    fill_all_levels(table, KEYED)
    assert jobs.main(["flush", table.uri]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(line["details"]["rows"] for line in lines) == 33
    assert jobs.main(["compact", table.uri, "--max-commit-bytes", "100000"]) == 0
    assert jobs.main(["gc", table.uri, "--dry-run", "--min-age-hours", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3 + 4


def test_the_command_line_does_the_same_with_a_session(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    fill_all_levels(table, KEYED)
    expected = content(table)
    flushed = ok("flush", table.uri, "--engine", "spark", "--json").documents
    assert sum(line["details"]["rows"] for line in flushed) == 33
    assert ok("compact", table.uri, "--engine", "spark", "--flush").out.count("✓") == 3 + 3
    in_base = lance.dataset(table.uri).to_table().to_pylist()
    assert sorted(tuple(row.values()) for row in in_base) == expected
    assert ok("gc", table.uri, "--engine", "spark", "--dry-run").out.count("✓") == 3 + 1
    assert run("flush", table.uri, "--engine", "flink").code != 0


@pytest.mark.parametrize("by", ["command line", "program"])
def test_no_indexes_and_no_files_did_not_reach_a_compaction_on_spark(
    spark: SparkSession, tmp_path: Path, by: str
) -> None:
    table = new_table(tmp_path / "table")
    lance.dataset(table.uri).create_scalar_index("id", "BTREE")
    for number in range(5):
        table.writer().put(rows(10 * number, 10))
        flush(spark, table.uri)
        if by == "program":
            assert jobs.main(["compact", table.uri, "--no-indexes", "--no-files"]) == 0
        else:
            ok("compact", table.uri, "--engine", "spark", "--no-indexes", "--no-files")
    store = ObjectStore.from_uri(table.uri)
    manifest = BaseTable.open(table.uri, store=store).manifest
    assert manifest.covered_fragments("id_idx") == frozenset(), "indexes were told to be left alone"
    assert len(manifest.fragment_ids) >= 5, "files were told to be left alone"

    ok("compact", table.uri, "--engine", "spark", "--files")
    manifest = BaseTable.open(table.uri, store=store).manifest
    assert len(manifest.fragment_ids) == 1
    assert manifest.covered_fragments("id_idx") == manifest.fragment_ids
    assert lance.dataset(table.uri).count_rows() == 50


def test_spark_submit_runs_a_job(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    fill_all_levels(table, KEYED)
    environment = spark_environment(tmp_path)
    submit = [f"{environment['SPARK_HOME']}/bin/spark-submit", "--master", "local[1]"]
    conf = ["--conf", "spark.ui.enabled=false", "--conf", "spark.driver.host=127.0.0.1"]
    ran = subprocess.run(
        [*submit, *conf, str(Path(jobs.__file__)), "flush", table.uri],
        env={**environment, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert sum(line["details"]["rows"] for line in lines) == 33


def test_two_tasks_of_a_compaction_did_the_same_work_again_and_again(tmp_path: Path) -> None:
    """Lance lets one of two merges that insert rows commit; the other one did all its work again."""
    table = new_table(tmp_path / "table")
    fill_all_levels(table, KEYED)
    table.flush()
    plan = plan_compaction(ObjectStore.from_uri(table.uri), max_commit_bytes=1)
    reader = JobReader(options_of(table, jobArguments=json.dumps({"plan": plan.to_dict()})), "compact")
    (unit,) = reader.partitions()
    assert isinstance(unit, Unit)
    assert len(unit.groups) == len(plan.packs) > 1


def verified(uri: str) -> dict[str | None, dict[str, Any]]:
    """What the tasks of the job say, each in turn."""
    reader = JobReader(options_of(uri), "verify")
    rows_ = [row for unit in reader.partitions() for b in reader.read(unit) for row in b.to_pylist()]
    assert [row["error"] for row in rows_] == [None] * len(rows_)
    return {row["shard_id"]: json.loads(row["details"]) for row in rows_}


def test_a_verification_finds_what_is_wrong_in_a_shard_and_between_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = new_table(tmp_path / "table")
    fill_all_levels(table, KEYED)
    found = verified(table.uri)
    assert found.keys() == {None, *(str(info.shard_id) for info in table.shards())}
    assert all(each["ok"] for each in found.values())
    whole, parts = table.verify(), found.values()
    checked = {name: sum(each["checked"].get(name, 0) for each in parts) for name in whole.checked}
    assert checked == dict(whole.checked), "together they check what one process does"

    damaged = table.shards()[0].shard_id
    entry = manifest_of(ObjectStore.from_uri(table.uri), damaged).sstables[-1]
    for path in (Path(table.uri) / layout.sstable_dir(damaged, entry.path) / "data").iterdir():
        path.write_bytes(b"damaged")
    lance.write_dataset(lance.dataset(table.uri).to_table().slice(0, 1), table.uri, mode="append")
    found = verified(table.uri)
    assert [shard for shard, each in found.items() if not each["ok"]] in (
        [str(damaged), None],
        [None, str(damaged)],
    )


def test_a_summary_has_shards_failures_and_sums() -> None:
    done = [
        jobs.ShardOutcome(uuid4(), 1.5, {"rows": 7, "through": 3}),
        jobs.ShardOutcome(uuid4(), 0.5, {"rows": 1_000}, "StorageError: gone"),
        jobs.ShardOutcome(None, 0.1, {"bytes": 12}),
    ]
    expected = "flush: 2 shards in 2.0 s (longest 1.5 s), 1 failed, bytes 12, rows 1,007"
    assert jobs.summary("flush", done, 2.0) == expected


def test_jobs_have_descriptions_only_while_they_run(spark: SparkSession) -> None:
    context = spark.sparkContext
    context.setJobDescription("the user's own")
    with jobs._described(spark, "lancewal flush somewhere"):
        assert context.getLocalProperty("spark.job.description") == "lancewal flush somewhere"
    assert context.getLocalProperty("spark.job.description") == "the user's own"
    context.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]


@pytest.mark.parametrize("job", ["flush", "compact", "gc", "verify", "backup"])
def test_no_task_reads_or_writes_files_of_other_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    """Each task runs where the files of other shards cannot be read, and asks for none of them."""
    table = new_table(tmp_path / "table")
    fill_all_levels(table, KEYED)
    given: dict[str, Any] = {"min_age_seconds": 0.0}
    if job == "backup":
        given |= {"to": str(tmp_path / "backups"), "parts": parts_of_a_backup(table)}
    reader = JobReader(options_of(table, job=job, jobArguments=json.dumps(given)), job)
    units = [unit for unit in reader.partitions() if isinstance(unit, Unit)]
    if job == "compact":
        # One task does all shards, so each is tried alone.
        units = [Unit.of(part) for unit in units for parts in unit.groups for part in parts]
    asked: list[str] = []
    for name in ("get", "get_range", "head", "list", "list_directories", "put", "put_if_absent", "delete"):
        monkeypatch.setattr(ObjectStore, name, noted(asked, getattr(ObjectStore, name)))
    shards = {str(info.shard_id) for info in table.shards()}
    done = set()
    for number, unit in enumerate(units):
        mine = {part["shard_id"] for parts in unit.groups for part in parts}
        if None in mine:
            continue
        assert len(mine) == 1
        done |= mine
        alone = tmp_path / f"alone-{number}"
        shutil.copytree(table.uri, alone)
        for other in shards - mine:
            for path in (alone / layout.shard_dir(UUID(other))).rglob("*"):
                if path.is_file():
                    path.write_bytes(b"not to be read")
        asked.clear()
        task = JobReader(
            options_of(str(alone), job=job, jobArguments=json.dumps(arguments_of_a_task(given))), job
        )
        (batch,) = task.read(unit)
        (row,) = batch.to_pylist()
        assert (row["shard_id"], row["error"]) == (*mine, None)
        assert [path for path in asked if any(other in path for other in shards - mine)] == []
        # Lance reads what is compacted, past this door.
        assert job == "compact" or any(next(iter(mine)) in path for path in asked)
    assert done == shards


def arguments_of_a_task(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in job_tasks._PLANS}


def parts_of_a_backup(table: lancewal.Table) -> list[dict[str, Any]]:
    plan = backup._plan(ObjectStore.from_uri(table.uri), "one", {})
    return [part.to_dict() for part in plan.parts]


def noted(asked: list[str], call: Any) -> Any:
    def noting(self: ObjectStore, path: str = "", *arguments: Any, **others: Any) -> Any:
        asked.append(path)
        return call(self, path, *arguments, **others)

    return noting


def test_a_task_is_not_sent_the_plan_of_all_shards(tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    fill_all_levels(table, KEYED)
    names = [str(info.shard_id) for info in table.shards()]
    reader = JobReader(options_of(table, job="flush", jobArguments=json.dumps({"shards": names})), "flush")
    units = reader.partitions()
    sent = [pickle.dumps((reader, unit)) for unit in units]
    assert [[name for name in names if name.encode() in each] for each in sent] == [[name] for name in names]
