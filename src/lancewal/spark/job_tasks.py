"""The work of the tasks of a maintenance job; :mod:`lancewal.spark.jobs` starts the jobs.

A job is a data source: every partition is the work of a task, every row is the report of a shard. That needs
neither RDDs nor UDFs, so it works on classic sessions and over Spark Connect, and tasks are
scheduled, retried and shown like those of any query. Repeated or concurrent work on a shard
does no harm. A task reads only its own shards and the base table.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

import pyarrow as pa
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceReader, InputPartition

from lancewal.errors import InvalidInputError
from lancewal.maintenance import (
    DEFAULT_COMMIT_BYTES,
    BackupPart,
    CompactionPlan,
    Pack,
    Resource,
    ShardPlan,
    collect_garbage,
    copy_part,
    execute_pack,
    plan_compaction,
)
from lancewal.maintenance import verify as verify_table
from lancewal.service import checked_take_over, flush_one_through_owner
from lancewal.shard import ShardManifestStore, discover_manifests
from lancewal.spark.columns import arrow_schema
from lancewal.spark.options import OpenTable, Options
from lancewal.storage import ObjectStore

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
#: The shard, what was done, and why it failed.
Done: TypeAlias = list[tuple[str | None, Details, Exception | None]]

#: Arguments that only the planning of a job needs.
_PLANS = ("plan", "parts", "shards")


@dataclass
class Unit(InputPartition):
    """The work of one task: parts of the job in groups that run one after the other.

    The parts of a group are done together. Each shard has a report of its own.
    """

    groups: Sequence[Parts]

    @classmethod
    def of(cls, part: Details) -> Unit:
        """The task that does one part."""
        return cls([[part]])


class JobReader(DataSourceReader):
    """Runs a job when its partitions are read."""

    def __init__(self, options: Options, job: str) -> None:
        if job not in _JOBS:
            raise InvalidInputError(f"there is no job {job!r}; there are {', '.join(_JOBS)}")
        self._options = options
        self._job = job
        self._arguments: dict[str, Any] = json.loads(options.text("jobArguments") or "{}")

    def partitions(self) -> list[InputPartition]:
        plan, _ = _JOBS[self._job]
        units = plan(OpenTable.open(self._options), self._arguments)
        # The arguments have a part for every shard. Each task gets its own part in its partition, so the
        # whole plan must not be sent with this object.
        self._arguments = {name: value for name, value in self._arguments.items() if name not in _PLANS}
        self._options = self._options.without("jobArguments")
        return list(units) or [Unit([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Unit)
        _, work = _JOBS[self._job]
        # The destination's credentials are options of their own, which Spark redacts by name.
        arguments = {**self._arguments, "backup_options": self._options.backup_storage}
        for parts in partition.groups:
            started = time.perf_counter()
            try:
                done = work(OpenTable.open(self._options), arguments, parts)
            except Exception as failure:
                # A failed shard must not stop the others. The job fails at its end.
                done = [(part["shard_id"], {}, failure) for part in parts]
            seconds = time.perf_counter() - started
            rows = [_row(self._job, seconds, *each) for each in done]
            yield pa.RecordBatch.from_pylist(rows, schema=arrow_schema(REPORT_SCHEMA))


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
    return [Unit.of({"shard_id": shard}) for shard in shards]


def _flush(table: OpenTable, arguments: Details, parts: Parts) -> Done:
    (part,) = parts
    manifest = ShardManifestStore(table.store, UUID(part["shard_id"])).require_latest()
    take_over = checked_take_over(arguments.get("take_over", "when_gone"))
    rows = flush_one_through_owner(table.base, manifest, table.store, take_over)
    return [(part["shard_id"], {"rows": rows}, None)]


def _plan_compact(table: OpenTable, arguments: Details) -> list[Unit]:
    if "plan" in arguments:
        plan = CompactionPlan.from_dict(arguments["plan"])
    else:
        limit = int(arguments.get("max_commit_bytes") or DEFAULT_COMMIT_BYTES)
        plan = plan_compaction(table.store, max_commit_bytes=limit)
    groups = [
        [
            {"shard_id": str(part.shard_id), "plan": part.to_dict(), "in_order": pack.in_order}
            for part in pack.parts
        ]
        for pack in plan.packs
    ]
    # One task does all packs, for the reason that ``lancewal.maintenance.compact`` gives. With several tasks
    # the job took longer, and left more versions of the base.
    return [Unit(groups)]


def _compact(table: OpenTable, arguments: Details, parts: Parts) -> Done:
    plans = tuple(ShardPlan.from_dict(part["plan"]) for part in parts)
    done = execute_pack(Pack(plans, in_order=parts[0]["in_order"]), store=table.store, base=table.base)
    return [
        (str(shard_id), {} if shard_id in done.failed else report.to_dict(), done.failed.get(shard_id))
        for shard_id, report in done.shards.items()
    ]


def _plan_gc(table: OpenTable, arguments: Details) -> list[Unit]:
    # One more task for work that belongs to no shard.
    return [*_per_shard(table, arguments), Unit.of({"shard_id": None})]


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


def _plan_backup(table: OpenTable, arguments: Details) -> list[Unit]:
    parts = arguments["parts"]
    return [Unit.of({"shard_id": part["shard"] and part["shard"][0], "part": part}) for part in parts]


def _backup(table: OpenTable, arguments: Details, parts: Parts) -> Done:
    (each,) = parts
    destination = ObjectStore.from_uri(arguments["to"], arguments["backup_options"])
    try:
        copied = copy_part(table.store, destination, BackupPart.from_dict(each["part"], table.store))
    except FileNotFoundError as error:
        # Not a failure: the driver plans again.
        return [(each["shard_id"], {"gone": str(error)}, None)]
    return [(each["shard_id"], {"bytes": copied.copied_bytes, "copied": copied.to_dict()}, None)]


_Plan = Callable[[OpenTable, Details], list[Unit]]
_Work = Callable[[OpenTable, Details, Parts], Done]
_JOBS: dict[str, tuple[_Plan, _Work]] = {
    "flush": (_per_shard, _flush),
    "compact": (_plan_compact, _compact),
    "gc": (_plan_gc, _gc),
    "verify": (_plan_gc, _verify),
    "backup": (_plan_backup, _backup),
}
