"""Maintenance as a data source: every partition is one shard's work, every row its report.

Going through a source needs neither RDDs nor UDFs, so it works on classic sessions and over
Spark Connect, and tasks are placed, retried and shown like those of any query. Work on a shard
may be repeated, or done twice at a time, without harm.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import pyarrow as pa
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceReader, InputPartition

from lancewal.errors import InvalidInputError
from lancewal.maintenance.compact import execute_shard
from lancewal.maintenance.gc import Resource, collect_garbage
from lancewal.maintenance.plan import DEFAULT_COMMIT_BYTES, ShardPlan, plan_compaction
from lancewal.publish import drain
from lancewal.sharding import discover_manifests
from lancewal.spark.access import OpenTable
from lancewal.spark.columns import arrow_schema
from lancewal.spark.options import Options
from lancewal.writer.drain import has_unflushed_rows

logger = logging.getLogger(__name__)

REPORT_SCHEMA = st.StructType(
    [
        st.StructField("shard_id", st.StringType()),
        st.StructField("seconds", st.DoubleType(), False),
        st.StructField("details", st.StringType(), False),
        st.StructField("error", st.StringType()),
    ]
)


@dataclass
class Unit(InputPartition):
    """The work of one task: parts that are done one after the other, each with a report of its own."""

    parts: tuple[Mapping[str, Any], ...]


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
        for part in partition.parts:
            started = time.perf_counter()
            details: Mapping[str, Any] = {}
            error = None
            try:
                details = work(OpenTable.open(self._options), {**self._arguments, **part})
            except Exception as failure:
                # A shard that fails must not stop the others; the job fails at its end.
                logger.warning("%s failed: %s", self._job, failure, extra={"shard": part.get("shard_id")})
                error = f"{type(failure).__name__}: {failure}"
            row = {
                "shard_id": part.get("shard_id"),
                "seconds": time.perf_counter() - started,
                "details": json.dumps(details, default=str),
                "error": error,
            }
            yield pa.RecordBatch.from_pylist([row], schema=arrow_schema(REPORT_SCHEMA))


def _per_shard(table: OpenTable, arguments: Mapping[str, Any]) -> list[Unit]:
    return [Unit(({"shard_id": str(m.shard_id)},)) for m in discover_manifests(table.store)]


def _flush(table: OpenTable, arguments: Mapping[str, Any]) -> dict[str, Any]:
    shard_id = UUID(arguments["shard_id"])
    manifest = next(m for m in discover_manifests(table.store) if m.shard_id == shard_id)
    if not has_unflushed_rows(manifest, table.store):
        # Claiming it would fence its writer for nothing.
        return {"rows": 0}
    _, rows = drain(table.base, table.store, shard_id)
    return {"rows": rows}


def _plan_compact(table: OpenTable, arguments: Mapping[str, Any]) -> list[Unit]:
    limit = int(arguments.get("max_commit_bytes") or DEFAULT_COMMIT_BYTES)
    plan = plan_compaction(table.base, table.store, max_commit_bytes=limit)
    parts = [{"shard_id": str(shard.shard_id), "plan": shard.to_dict()} for shard in plan.shards]
    if not plan.has_key:
        # Without a key shards would only refuse each other's commits: one task for all.
        return [Unit(tuple(parts))] if parts else []
    return [Unit((part,)) for part in parts]


def _compact(table: OpenTable, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return execute_shard(ShardPlan.from_dict(arguments["plan"]), store=table.store).to_dict()


def _plan_gc(table: OpenTable, arguments: Mapping[str, Any]) -> list[Unit]:
    # What belongs to no shard is one more task.
    return [*_per_shard(table, arguments), Unit(({"shard_id": None},))]


def _gc(table: OpenTable, arguments: Mapping[str, Any]) -> dict[str, Any]:
    shard_id = arguments["shard_id"]
    seconds = arguments.get("min_age_seconds")
    report = collect_garbage(
        table.base,
        table.store,
        min_age=None if seconds is None else timedelta(seconds=seconds),
        resources=[Resource.STAGING_FILES] if shard_id is None else set(Resource) - {Resource.STAGING_FILES},
        shards=[] if shard_id is None else [shard_id],
        dry_run=bool(arguments.get("dry_run")),
    )
    return {"collected": report.counts(), "bytes": sum(each.num_bytes for each in report.collected)}


_Plan = Callable[[OpenTable, Mapping[str, Any]], list[Unit]]
_Work = Callable[[OpenTable, Mapping[str, Any]], dict[str, Any]]
_JOBS: dict[str, tuple[_Plan, _Work]] = {
    "flush": (_per_shard, _flush),
    "compact": (_plan_compact, _compact),
    "gc": (_plan_gc, _gc),
}
