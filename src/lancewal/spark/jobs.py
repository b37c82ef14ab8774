"""Flush, compaction, garbage collection, checks, backup and upkeep as Spark jobs; a task does some shards.

``job_tasks`` has the work of a task. This module has the calls that start jobs and report their results.

It is also a program for ``spark-submit`` and the command line::

    python -m lancewal.spark.jobs compact s3://bucket/table --storage aws_region=eu-central-1
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, get_args
from uuid import UUID

from lancewal.errors import InvalidInputError, LanceWalError, PartialWriteError, ShardOwnedError
from lancewal.maintenance import (
    BackupPart,
    BackupReport,
    CopiedPart,
    UpkeepSettings,
    back_up,
    finish_compaction,
    plan_compaction,
)
from lancewal.service import TakeOver, checked_take_over
from lancewal.spark.options import BACKUP_PREFIX, OpenTable, Options
from lancewal.spark.spark_session import session
from lancewal.storage import ObjectStore
from lancewal.upkeep import Done as UpkeepDone
from lancewal.upkeep import Means, Upkeep, UpkeepReport

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

#: The property that Spark's UI shows as a job's description.
_DESCRIPTION = "spark.job.description"


@dataclass(frozen=True)
class ShardOutcome:
    """What a job did in one shard; ``shard_id`` is ``None`` for work that belongs to no shard."""

    shard_id: UUID | None
    seconds: float
    details: Mapping[str, Any]
    error: str | None = None


class JobFailedError(PartialWriteError):
    """Some shards failed; ``outcomes`` says what the job did in every shard, including the failed ones."""

    def __init__(self, job: str, outcomes: Sequence[ShardOutcome]) -> None:
        self.outcomes = tuple(outcomes)
        failed = {shard_id or UUID(int=0): error for shard_id, error in _errors(outcomes).items()}
        super().__init__(job, failed, {})

    def __reduce__(self) -> tuple[object, ...]:
        return (JobFailedError, (self.doing, self.outcomes))


def flush(
    spark: SparkSession,
    uri: str,
    *,
    take_over: TakeOver = "when_gone",
    storage_options: Mapping[str, str] | None = None,
) -> list[ShardOutcome]:
    """Flush the rows of all write-ahead logs to SSTables.

    The owner of a shard is asked to flush it. A shard with unflushed rows and no owner is claimed: **a writer
    that is not known as an owner, such as Lance's own, is fenced**. ``take_over="now"`` claims shards of
    other processes too, "never" refuses them. Raises a :class:`JobFailedError` at the end if some
    shards failed; so do the other jobs.

    .. code-block:: python

        rows = sum(outcome.details["rows"] for outcome in flush(spark, "s3://bucket/documents"))
    """
    checked_take_over(take_over)
    return _finished("flush", _run(spark, "flush", uri, storage_options, take_over=take_over))


def compact(
    spark: SparkSession,
    uri: str,
    *,
    max_commit_bytes: int | None = None,
    optimize_indexes: bool = True,
    compact_files: bool | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> list[ShardOutcome]:
    """Merge all SSTables into the base table, in atomic commits.

    One task does it, because merges that insert rows exclude each other in Lance. It uses all cores of its
    executor. Then the driver tidies the table's indexes and files, as ``Table.compact`` does.
    """
    outcomes = _run(spark, "compact", uri, storage_options, max_commit_bytes=max_commit_bytes)
    if outcomes or compact_files:
        store = OpenTable.open(Options.of(uri, storage_options)).store
        finish_compaction(store, optimize_indexes=optimize_indexes, compact_files=compact_files)
    return _finished("compact", outcomes)


def gc(
    spark: SparkSession,
    uri: str,
    *,
    min_age: timedelta | None = None,
    dry_run: bool = False,
    storage_options: Mapping[str, str] | None = None,
) -> list[ShardOutcome]:
    """Delete what no writer, reader or retained version needs; ``dry_run`` only reports it."""
    age = None if min_age is None else min_age.total_seconds()
    outcomes = _run(spark, "gc", uri, storage_options, min_age_seconds=age, dry_run=dry_run)
    return _finished("gc", outcomes)


def verify(
    spark: SparkSession,
    uri: str,
    *,
    deep: bool = True,
    storage_options: Mapping[str, str] | None = None,
) -> list[ShardOutcome]:
    """Check every shard in a task of its own, and what spans shards in one more task. Changes nothing.

    An outcome's ``details`` have ``ok`` and ``findings``. ``deep`` is as in ``Table.verify``.

    .. code-block:: python

        assert all(outcome.details["ok"] for outcome in verify(spark, "s3://bucket/documents"))
    """
    return _finished("verify", _run(spark, "verify", uri, storage_options, deep=deep))


def backup(
    spark: SparkSession,
    uri: str,
    to: str,
    *,
    storage_options: Mapping[str, str] | None = None,
    backup_options: Mapping[str, str] | None = None,
) -> BackupReport:
    """Copy the table as it is now to ``to``, as ``Table.backup`` does, with a task for each shard.

    The driver reads one consistent state. Each task copies the files of one shard, or some files of the base
    table. Last, the driver writes the record that completes the backup. If the job dies before that, there is
    no backup, and :func:`lancewal.restore` uses the one before. ``backup_options`` are the storage options of
    ``to``.

    .. code-block:: python

        report = backup(spark, "s3://bucket/documents", "s3://elsewhere/backups/documents")
        lancewal.restore("s3://elsewhere/backups/documents", "s3://bucket/yesterday", backup=report.id)
    """

    def copying(parts: Sequence[BackupPart]) -> Iterator[CopiedPart]:
        told = [part.to_dict() for part in parts]
        outcomes = _run(
            spark,
            "backup",
            uri,
            storage_options,
            backup_options=backup_options,
            # The absolute place, because tasks may have another working directory.
            to=destination.uri,
            parts=told,
        )
        for outcome in _finished("backup", outcomes):
            if "copied" in outcome.details:
                yield CopiedPart.from_dict(outcome.details["copied"])
        for outcome in outcomes:
            if "gone" in outcome.details:
                raise FileNotFoundError(outcome.details["gone"])

    store = OpenTable.open(Options.of(uri, storage_options)).store
    destination = ObjectStore.from_uri(to, backup_options)
    return back_up(store, destination, copying)


def upkeep(
    spark: SparkSession,
    uri: str,
    settings: UpkeepSettings | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> UpkeepReport:
    """Do what is due to keep a large table in shape, as ``Table.upkeep`` does, with Spark for the rows.

    Runs one round of what ``Table.plan_upkeep`` returns, by ``settings`` or the table's own. Jobs flush logs,
    compact SSTables and collect garbage. The driver takes care of indexes, small files and old versions of
    the base table. Work that another process is doing is left to it. A shard that fails does not stop the
    others: nothing is raised, and the report has the error.

    .. code-block:: python

        report = upkeep(spark, "s3://bucket/documents")
        assert report.ok, str(report)
    """
    options = Options.of(uri, storage_options)
    store = OpenTable.open(options).store
    means = _OnSpark(spark, uri, storage_options, store)
    return Upkeep(store, lambda: OpenTable.open(options).base, means).round(settings)


@dataclass(frozen=True)
class _OnSpark(Means):
    """Does the work on shards of a round of upkeep with Spark jobs."""

    spark: SparkSession
    uri: str
    storage_options: Mapping[str, str] | None = field(repr=False)
    store: ObjectStore

    def flush(self, shards: Sequence[UUID]) -> UpkeepDone:
        outcomes = self._run("flush", shards=[str(shard) for shard in shards])
        left = frozenset(
            each.shard_id
            for each in outcomes
            if each.shard_id is not None and (each.error or "").startswith(f"{ShardOwnedError.__name__}:")
        )
        failed = {shard: error for shard, error in _errors(outcomes).items() if shard not in left}
        return UpkeepDone(f"{len(outcomes) - len(left) - len(failed)} logs flushed", failed, left)

    def compact(self, shards: Sequence[UUID], stop: Callable[[], bool]) -> UpkeepDone:
        # Planned in the driver, because in a job Spark would wrap an error of the plan in its own.
        plan = plan_compaction(self.store, shards)
        if not plan:
            return UpkeepDone("nothing was left to compact")
        outcomes = self._run("compact", plan=plan.to_dict())
        finish_compaction(self.store)
        sstables = sum(len(each.details.get("generations", ())) for each in outcomes)
        rows = sum(each.details.get("rows_in", 0) for each in outcomes)
        return UpkeepDone(f"{sstables} SSTables with {rows} rows compacted", _errors(outcomes))

    def collect(self, min_age: timedelta) -> UpkeepDone:
        outcomes = gc(self.spark, self.uri, min_age=min_age, storage_options=self.storage_options)
        files = sum(sum(each.details["collected"].values()) for each in outcomes)
        return UpkeepDone(f"{files} files ({sum(each.details['bytes'] for each in outcomes)} bytes) deleted")

    def _run(self, job: str, **arguments: Any) -> list[ShardOutcome]:
        return _run(self.spark, job, self.uri, self.storage_options, **arguments)


def _errors(outcomes: Sequence[ShardOutcome]) -> dict[UUID | None, Exception]:
    return {each.shard_id: LanceWalError(each.error) for each in outcomes if each.error is not None}


def _run(
    spark: SparkSession,
    job: str,
    uri: str,
    storage_options: Mapping[str, str] | None,
    *,
    backup_options: Mapping[str, str] | None = None,
    **arguments: Any,
) -> list[ShardOutcome]:
    elsewhere = {f"{BACKUP_PREFIX}{name}": value for name, value in (backup_options or {}).items()}
    others = {"job": job, "jobArguments": json.dumps(arguments), **elsewhere}
    options = Options.of(uri, storage_options, others)
    started = time.perf_counter()
    with _described(spark, f"lancewal {job} {options.uri}"):
        rows = spark.read.format("lancewal").options(**options.values).load().collect()
    outcomes = [
        ShardOutcome(
            None if row.shard_id is None else UUID(row.shard_id),
            row.seconds,
            json.loads(row.details),
            row.error,
        )
        for row in sorted(rows, key=lambda row: row.shard_id or "")
    ]
    logger.info("%s", summary(job, outcomes, time.perf_counter() - started))
    return outcomes


@contextmanager
def _described(spark: SparkSession, text: str) -> Iterator[None]:
    """Name the jobs of a block in Spark's UI; not possible over Spark Connect."""
    try:
        context = spark.sparkContext
    except Exception:  # the error's class over Spark Connect differs between versions
        yield
        return
    before = context.getLocalProperty(_DESCRIPTION)
    context.setLocalProperty(_DESCRIPTION, text)
    try:
        yield
    finally:
        context.setLocalProperty(_DESCRIPTION, before)  # type: ignore[arg-type]


def summary(job: str, outcomes: Sequence[ShardOutcome], seconds: float) -> str:
    """One line about a whole job: shards, failures, time, and the sums of rows and bytes."""
    sums: Counter[str] = Counter()
    for outcome in outcomes:
        for name, value in outcome.details.items():
            if isinstance(value, int) and name.startswith(("rows", "bytes")):
                sums[name] += value
    shards = {outcome.shard_id for outcome in outcomes if outcome.shard_id is not None}
    failed = sum(outcome.error is not None for outcome in outcomes)
    longest = max((outcome.seconds for outcome in outcomes), default=0.0)
    counted = "".join(f", {name} {value:,}" for name, value in sorted(sums.items()) if value)
    failures = f", {failed} failed" if failed else ""
    return f"{job}: {len(shards)} shards in {seconds:.1f} s (longest {longest:.1f} s){failures}{counted}"


def _finished(job: str, outcomes: list[ShardOutcome]) -> list[ShardOutcome]:
    """The outcomes; raises if some shards failed, after all were tried."""
    if any(each.error is not None for each in outcomes):
        raise JobFailedError(job, outcomes)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one job and print a line of JSON for each shard; returns 1 if a shard failed or is not ok.

    Upkeep, which is several jobs, prints a line for each task, and a backup prints one line.
    """
    given = _parser().parse_args(arguments)
    storage = dict(pair.split("=", 1) for pair in given.storage)
    failure = None
    started = time.perf_counter()
    spark = session(given.master, app_name=f"lancewal {given.job}")
    if given.job == "backup":
        if given.to is None:
            raise InvalidInputError("backup needs --to, the place of the table's backups")
        elsewhere = dict(pair.split("=", 1) for pair in given.backup_storage)
        done = backup(spark, given.uri, given.to, storage_options=storage, backup_options=elsewhere)
        sys.stdout.write(f"{json.dumps(done.to_dict())}\n")
        return 0
    if given.job == "upkeep":
        report = upkeep(spark, given.uri, storage_options=storage)
        sys.stdout.writelines(f"{json.dumps(each.to_dict())}\n" for each in report.outcomes)
        sys.stderr.write(f"{report}\n")
        return 0 if report.ok else 1
    try:
        if given.job == "flush":
            outcomes = flush(spark, given.uri, take_over=given.take_over, storage_options=storage)
        elif given.job == "compact":
            outcomes = compact(
                spark,
                given.uri,
                max_commit_bytes=given.max_commit_bytes,
                optimize_indexes=given.indexes,
                compact_files=given.files,
                storage_options=storage,
            )
        elif given.job == "verify":
            outcomes = verify(spark, given.uri, storage_options=storage)
        else:
            age = None if given.min_age_hours is None else timedelta(hours=given.min_age_hours)
            outcomes = gc(spark, given.uri, min_age=age, dry_run=given.dry_run, storage_options=storage)
    except JobFailedError as error:
        outcomes, failure = list(error.outcomes), error
    for outcome in outcomes:
        sys.stdout.write(json.dumps(asdict(outcome), default=str) + "\n")
    sys.stdout.flush()
    sys.stderr.write(f"{summary(given.job, outcomes, time.perf_counter() - started)}\n")
    if failure is not None:
        sys.stderr.write(f"{failure}\n")
    return 0 if failure is None and all(each.details.get("ok", True) for each in outcomes) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lancewal.spark.jobs", description=__doc__.split("\n")[0])
    parser.add_argument("job", choices=["flush", "compact", "gc", "verify", "upkeep", "backup"])
    parser.add_argument("uri", help="the table")
    parser.add_argument(
        "--storage", action="append", default=[], metavar="KEY=VALUE", help="a storage option"
    )
    parser.add_argument("--master", help="Spark's master; by default what spark-submit says, else local[*]")
    parser.add_argument(
        "--take-over",
        choices=get_args(TakeOver),
        default="when_gone",
        help="flush: when shards that another process has are taken from it",
    )
    parser.add_argument("--max-commit-bytes", type=int, help="compact: rows that go into one commit")
    either = argparse.BooleanOptionalAction
    parser.add_argument(
        "--indexes", action=either, default=True, help="compact: bring the table's indexes up to date"
    )
    parser.add_argument(
        "--files", action=either, help="compact: join all small files of the table, or none; else some"
    )
    parser.add_argument("--min-age-hours", type=float, help="gc: the least age of what is removed")
    parser.add_argument("--dry-run", action="store_true", help="gc: only say what would be removed")
    parser.add_argument("--to", metavar="BACKUPS", help="backup: where the backups of this table are")
    parser.add_argument(
        "--backup-storage",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="backup: a storage option of that place",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
