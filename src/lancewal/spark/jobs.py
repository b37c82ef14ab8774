"""Flush, compaction, garbage collection, checks and upkeep as Spark jobs, with tasks for one or some shards.

A job is a data source: every partition is a task's work, every row the report of a shard. That needs
neither RDDs nor UDFs, so it works on classic sessions and over Spark Connect, and tasks are
scheduled, retried and shown like those of any query. Repeated or concurrent work on a shard
does no harm.

Also a program for ``spark-submit`` and the command line::

    python -m lancewal.spark.jobs compact s3://bucket/table --storage aws_region=eu-central-1
"""

from __future__ import annotations

import argparse
import heapq
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

import pyarrow as pa
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceReader, InputPartition

from lancewal.errors import InvalidInputError, LanceWalError, PartialWriteError, ShardOwnedError
from lancewal.maintenance import (
    DEFAULT_COMMIT_BYTES,
    CompactionPlan,
    Pack,
    Resource,
    ShardPlan,
    UpkeepSettings,
    collect_garbage,
    execute_pack,
    finish_compaction,
    plan_compaction,
)
from lancewal.maintenance import verify as verify_table
from lancewal.service import flush_one_through_owner
from lancewal.shard import ShardManifestStore, discover_manifests
from lancewal.spark.columns import arrow_schema
from lancewal.spark.options import OpenTable, Options
from lancewal.spark.spark_session import session, slots_of
from lancewal.storage import ObjectStore
from lancewal.upkeep import Done as UpkeepDone
from lancewal.upkeep import Means, Upkeep, UpkeepReport

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

REPORT_SCHEMA = st.StructType(
    [
        st.StructField("shard_id", st.StringType()),
        st.StructField("seconds", st.DoubleType(), False),
        st.StructField("details", st.StringType(), False),
        st.StructField("error", st.StringType()),
    ]
)


Details: TypeAlias = Mapping[str, Any]
Parts: TypeAlias = Sequence[Details]
#: Shard, what was done, and why it failed.
Done: TypeAlias = list[tuple[str | None, Details, Exception | None]]

#: The property that Spark's UI shows as a job's description.
_DESCRIPTION = "spark.job.description"
#: A task for fewer small shards costs more than it saves; more tasks only make more commits.
_SHARDS_PER_TASK = 16
_MOST_TASKS = 8
#: From here on a slot of its own, and a commit of its own, pay for a part of a compaction.
_BYTES_PER_TASK = 32 << 20


@dataclass
class Unit(InputPartition):
    """The work of one task: parts that run one after the other, each with a report of its own.

    ``in_order``: no part may run after one that failed. ``as_one``: the parts share their commits.
    """

    parts: tuple[Mapping[str, Any], ...]
    in_order: bool = False
    as_one: bool = False


class JobReader(DataSourceReader):
    """Runs ``flush``, ``compact`` or ``gc`` when its partitions are read."""

    def __init__(self, options: Options, job: str) -> None:
        if job not in _JOBS:
            raise InvalidInputError(f"there is no job {job!r}; there are {', '.join(_JOBS)}")
        self._options = options
        self._job = job
        self._arguments: dict[str, Any] = json.loads(options.text("jobArguments") or "{}")

    def partitions(self) -> list[InputPartition]:
        plan, _ = _JOBS[self._job]
        units = plan(OpenTable.open(self._options), self._arguments)
        return list(units) or [Unit(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Unit)
        _, work = _JOBS[self._job]
        parts = partition.parts
        for some in [parts] if partition.as_one and parts else [(part,) for part in parts]:
            started = time.perf_counter()
            try:
                done = work(OpenTable.open(self._options), self._arguments, some)
            except Exception as failure:
                # A shard that fails must not stop the others; the job fails at its end.
                done = [(part["shard_id"], {}, failure) for part in some]
            seconds = time.perf_counter() - started
            rows = [_row(self._job, seconds, *each) for each in done]
            yield pa.RecordBatch.from_pylist(rows, schema=arrow_schema(REPORT_SCHEMA))
            if partition.in_order and any(row["error"] is not None for row in rows):
                return


def _row(
    job: str, seconds: float, shard_id: str | None, details: Details, failure: Exception | None
) -> Details:
    if failure is not None:
        logger.warning("%s failed: %s", job, failure, extra={"shard": shard_id})
    return {
        "shard_id": shard_id,
        "seconds": seconds,
        "details": json.dumps(details, default=str),
        "error": None if failure is None else f"{type(failure).__name__}: {failure}",
    }


def _per_shard(table: OpenTable, arguments: Details) -> list[Unit]:
    shards = arguments.get("shards")
    if shards is None:
        shards = [str(manifest.shard_id) for manifest in discover_manifests(table.store)]
    return [Unit(({"shard_id": shard},)) for shard in shards]


def _flush(table: OpenTable, arguments: Details, parts: Parts) -> Done:
    (part,) = parts
    manifest = ShardManifestStore(table.store, UUID(part["shard_id"])).require_latest()
    return [(part["shard_id"], {"rows": flush_one_through_owner(table.base, manifest, table.store)}, None)]


def _plan_compact(table: OpenTable, arguments: Details) -> list[Unit]:
    if "plan" in arguments:
        plan = CompactionPlan.from_dict(arguments["plan"])
    else:
        limit = int(arguments.get("max_commit_bytes") or DEFAULT_COMMIT_BYTES)
        plan = plan_compaction(table.store, max_commit_bytes=limit)
    units = []
    for pack in plan.packs:
        shares = [pack.parts] if pack.in_order else _shared_out(pack.parts, int(arguments.get("slots") or 1))
        for share in shares:
            parts = tuple({"shard_id": str(part.shard_id), "plan": part.to_dict()} for part in share)
            units.append(Unit(parts, pack.in_order, as_one=not pack.in_order))
    if plan.has_key or not units:
        return units
    # Without a key commits exclude each other: one task for all.
    return [Unit(tuple(part for unit in units for part in unit.parts), as_one=True)]


def _shared_out(parts: Sequence[ShardPlan], slots: int) -> list[list[ShardPlan]]:
    """Parts for some tasks, of about the same size each.

    Several tasks for many small shards, because reading them takes longer than the commits; and for much
    data as many as there are slots.
    """
    by_number = min(_MOST_TASKS, -(-len(parts) // _SHARDS_PER_TASK))
    by_bytes = min(slots, sum(part.num_bytes for part in parts) // _BYTES_PER_TASK)
    shares: list[list[ShardPlan]] = [[] for _ in range(min(len(parts), max(by_number, by_bytes)))]
    taken = [(0, number) for number in range(len(shares))]
    for part in sorted(parts, key=lambda part: part.num_bytes, reverse=True):
        num_bytes, number = heapq.heappop(taken)
        shares[number].append(part)
        # A shard without rows counts too, so that shares differ little in number.
        heapq.heappush(taken, (num_bytes + part.num_bytes + 1, number))
    return shares


def _compact(table: OpenTable, arguments: Details, parts: Parts) -> Done:
    pack = Pack(tuple(ShardPlan.from_dict(part["plan"]) for part in parts))
    done = execute_pack(pack, store=table.store, base=table.base)
    return [
        (str(shard_id), {} if shard_id in done.failed else report.to_dict(), done.failed.get(shard_id))
        for shard_id, report in done.shards.items()
    ]


def _plan_gc(table: OpenTable, arguments: Details) -> list[Unit]:
    # One more task for what belongs to no shard.
    return [*_per_shard(table, arguments), Unit(({"shard_id": None},))]


def _gc(table: OpenTable, arguments: Details, parts: Parts) -> Done:
    shard_id = parts[0]["shard_id"]
    seconds = arguments.get("min_age_seconds")
    report = collect_garbage(
        table.store,
        min_age=None if seconds is None else timedelta(seconds=seconds),
        resources=[Resource.STAGING_FILES] if shard_id is None else set(Resource) - {Resource.STAGING_FILES},
        shards=[] if shard_id is None else [shard_id],
        dry_run=bool(arguments.get("dry_run")),
    )
    details = {"collected": report.counts(), "bytes": sum(each.num_bytes for each in report.collected)}
    return [(shard_id, details, None)]


def _verify(table: OpenTable, arguments: Details, parts: Parts) -> Done:
    shard_id, deep = parts[0]["shard_id"], bool(arguments.get("deep", True))
    if shard_id is None:
        report = verify_table(table.store, deep=deep, between_shards=True)
    else:
        report = verify_table(table.store, [shard_id], deep=deep)
    findings = [finding.to_dict() for finding in report.findings]
    return [(shard_id, {"ok": report.ok, "findings": findings, "checked": dict(report.checked)}, None)]


_Plan = Callable[[OpenTable, Details], list[Unit]]
_Work = Callable[[OpenTable, Details, Parts], Done]
_JOBS: dict[str, tuple[_Plan, _Work]] = {
    "flush": (_per_shard, _flush),
    "compact": (_plan_compact, _compact),
    "gc": (_plan_gc, _gc),
    "verify": (_plan_gc, _verify),
}


@dataclass(frozen=True)
class ShardOutcome:
    """What a job did in one shard; ``shard_id`` is ``None`` for what belongs to no shard."""

    shard_id: UUID | None
    seconds: float
    details: Mapping[str, Any]
    error: str | None = None


class JobFailedError(PartialWriteError):
    """Some shards failed; ``outcomes`` says what the job did in every shard, also in those."""

    def __init__(self, job: str, outcomes: Sequence[ShardOutcome]) -> None:
        self.outcomes = tuple(outcomes)
        failed = {shard_id or UUID(int=0): error for shard_id, error in _errors(outcomes).items()}
        super().__init__(job, failed, {})

    def __reduce__(self) -> tuple[object, ...]:
        return (JobFailedError, (self.doing, self.outcomes))


def flush(
    spark: SparkSession, uri: str, *, storage_options: Mapping[str, str] | None = None
) -> list[ShardOutcome]:
    """Move the rows of all write-ahead logs to SSTables.

    The owner of a shard is asked to flush it. A shard with such rows that nobody has is claimed: **a writer
    that nobody knows of (Lance's own) is fenced**. Raises a :class:`JobFailedError` at the end when some
    shards failed; so do the other jobs.

    .. code-block:: python

        rows = sum(outcome.details["rows"] for outcome in flush(spark, "s3://bucket/documents"))
    """
    return _finished("flush", _run(spark, "flush", uri, storage_options))


def compact(
    spark: SparkSession,
    uri: str,
    *,
    max_commit_bytes: int | None = None,
    optimize_indexes: bool = True,
    compact_files: bool | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> list[ShardOutcome]:
    """Bring all SSTables into the base table, in parallel, with one or more atomic commits per task.

    A table without a primary key is compacted by one task: its commits exclude each other. Then the driver
    brings the table's indexes and files into shape, as ``Table.compact`` does.
    """
    outcomes = _run(
        spark, "compact", uri, storage_options, max_commit_bytes=max_commit_bytes, slots=slots_of(spark)
    )
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
    """Remove what no writer, reader or retained version needs; ``dry_run`` only reports it."""
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
    """Check every shard in a task of its own, and what spans shards in one more; changes nothing.

    An outcome's ``details`` have ``ok`` and ``findings``. ``deep`` as in ``Table.verify``.

    .. code-block:: python

        assert all(outcome.details["ok"] for outcome in verify(spark, "s3://bucket/documents"))
    """
    return _finished("verify", _run(spark, "verify", uri, storage_options, deep=deep))


def upkeep(
    spark: SparkSession,
    uri: str,
    settings: UpkeepSettings | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> UpkeepReport:
    """Do what is due to keep a large table in shape, as ``Table.upkeep`` does, with Spark for the rows.

    One round, by the table's settings or by others, of what ``Table.plan_upkeep`` tells. Logs are flushed,
    SSTables compacted and garbage collected by jobs; indexes, small files and old versions of the base table
    are the driver's. What another process is at is left to it. A shard that fails does not stop the others:
    nothing is raised, the report has its error.

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
    """The work on shards of a round of upkeep, by jobs."""

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
        # In the driver: from a job an error of the plan would come as one of Spark's.
        plan = plan_compaction(self.store, shards)
        if not plan:
            return UpkeepDone("nothing was left to compact")
        outcomes = self._run("compact", plan=plan.to_dict(), slots=slots_of(self.spark))
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
    **arguments: Any,
) -> list[ShardOutcome]:
    options = Options.of(uri, storage_options, {"job": job, "jobArguments": json.dumps(arguments)})
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
    """Name the jobs of a block in Spark's UI; over Spark Connect there is no way to."""
    try:
        context = spark.sparkContext
    except Exception:  # its class over Spark Connect has changed from version to version
        yield
        return
    before = context.getLocalProperty(_DESCRIPTION)
    context.setLocalProperty(_DESCRIPTION, text)
    try:
        yield
    finally:
        context.setLocalProperty(_DESCRIPTION, before)  # type: ignore[arg-type]


def summary(job: str, outcomes: Sequence[ShardOutcome], seconds: float) -> str:
    """A line about a whole job: shards, failures, time, and the rows and bytes of all."""
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
    """The outcomes; raises when some shards failed, after all were tried."""
    if any(each.error is not None for each in outcomes):
        raise JobFailedError(job, outcomes)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one job and print a line of JSON for each shard; 1 when some failed, or have findings.

    For upkeep, which is several jobs, a line for each task.
    """
    given = _parser().parse_args(arguments)
    storage = dict(pair.split("=", 1) for pair in given.storage)
    failure = None
    started = time.perf_counter()
    spark = session(given.master, app_name=f"lancewal {given.job}")
    if given.job == "upkeep":
        report = upkeep(spark, given.uri, storage_options=storage)
        sys.stdout.writelines(f"{json.dumps(each.to_dict())}\n" for each in report.outcomes)
        sys.stderr.write(f"{report}\n")
        return 0 if report.ok else 1
    try:
        if given.job == "flush":
            outcomes = flush(spark, given.uri, storage_options=storage)
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
    parser.add_argument("job", choices=["flush", "compact", "gc", "verify", "upkeep"])
    parser.add_argument("uri", help="the table")
    parser.add_argument(
        "--storage", action="append", default=[], metavar="KEY=VALUE", help="a storage option"
    )
    parser.add_argument("--master", help="Spark's master; by default what spark-submit says, else local[*]")
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
    return parser


if __name__ == "__main__":
    sys.exit(main())
