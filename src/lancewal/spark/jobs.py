"""Flush, compaction and garbage collection as Spark jobs, one task per shard.

Also a program for ``spark-submit`` and the command line::

    python -m lancewal.spark.jobs compact s3://bucket/table --storage aws_region=eu-central-1
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from lancewal.errors import LanceWalError, PartialWriteError
from lancewal.maintenance.compact import finish_compaction
from lancewal.spark.access import OpenTable
from lancewal.spark.options import Options
from lancewal.spark.spark_session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class ShardOutcome:
    """What a job did in one shard; ``shard_id`` is ``None`` for what belongs to no shard."""

    shard_id: UUID | None
    seconds: float
    details: Mapping[str, Any]
    error: str | None = None


class JobFailedError(PartialWriteError):
    """Some shards failed; ``outcomes`` has what the job did in every shard, in those too."""

    def __init__(self, job: str, outcomes: Sequence[ShardOutcome]) -> None:
        self.outcomes = tuple(outcomes)
        failed: dict[UUID, Exception] = {
            each.shard_id or UUID(int=0): LanceWalError(each.error)
            for each in outcomes
            if each.error is not None
        }
        super().__init__(job, failed, {})

    def __reduce__(self) -> tuple[object, ...]:
        return (JobFailedError, (self.doing, self.outcomes))


def flush(
    spark: SparkSession, uri: str, *, storage_options: Mapping[str, str] | None = None
) -> list[ShardOutcome]:
    """Move the rows of all write-ahead logs to SSTables.

    A shard that has such rows is claimed: **a writer that is open on it is fenced**. Raises a
    :class:`JobFailedError` at the end when some shards failed; so do the other jobs.

    .. code-block:: python

        rows = sum(outcome.details["rows"] for outcome in flush(spark, "s3://bucket/documents"))
    """
    return _finished("flush", _run(spark, "flush", uri, storage_options, {}))


def compact(
    spark: SparkSession,
    uri: str,
    *,
    max_commit_bytes: int | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> list[ShardOutcome]:
    """Bring all SSTables into the base table, one atomic commit or more per shard, in parallel.

    A table without a primary key is compacted by one task: its commits exclude each other.
    """
    outcomes = _run(spark, "compact", uri, storage_options, {"max_commit_bytes": max_commit_bytes})
    if outcomes:
        finish_compaction(OpenTable.open(_options(uri, storage_options)).store)
    return _finished("compact", outcomes)


def gc(
    spark: SparkSession,
    uri: str,
    *,
    min_age: timedelta | None = None,
    dry_run: bool = False,
    storage_options: Mapping[str, str] | None = None,
) -> list[ShardOutcome]:
    """Remove what no writer, reader or retained version needs; ``dry_run`` only says what that is."""
    arguments = {
        "min_age_seconds": None if min_age is None else min_age.total_seconds(),
        "dry_run": dry_run,
    }
    return _finished("gc", _run(spark, "gc", uri, storage_options, arguments))


def _run(
    spark: SparkSession,
    job: str,
    uri: str,
    storage_options: Mapping[str, str] | None,
    arguments: Mapping[str, Any],
) -> list[ShardOutcome]:
    reader = spark.read.format("lancewal").option("job", job).option("jobArguments", json.dumps(arguments))
    for name, value in (storage_options or {}).items():
        reader = reader.option(f"storage.{name}", value)
    rows = reader.load(uri).collect()
    return [
        ShardOutcome(
            None if row.shard_id is None else UUID(row.shard_id),
            row.seconds,
            json.loads(row.details),
            row.error,
        )
        for row in sorted(rows, key=lambda row: row.shard_id or "")
    ]


def _finished(job: str, outcomes: list[ShardOutcome]) -> list[ShardOutcome]:
    """The outcomes; raises when some shards failed, after all were tried."""
    if any(each.error is not None for each in outcomes):
        raise JobFailedError(job, outcomes)
    return outcomes


def _options(uri: str, storage_options: Mapping[str, str] | None) -> Options:
    return Options.parse({"path": uri, **{f"storage.{k}": v for k, v in (storage_options or {}).items()}})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one job and print a line of JSON for each shard; 1 when some failed."""
    given = _parser().parse_args(arguments)
    storage = dict(pair.split("=", 1) for pair in given.storage)
    failure = None
    spark = session(given.master, app_name=f"lancewal {given.job}")
    try:
        if given.job == "flush":
            outcomes = flush(spark, given.uri, storage_options=storage)
        elif given.job == "compact":
            outcomes = compact(
                spark, given.uri, max_commit_bytes=given.max_commit_bytes, storage_options=storage
            )
        else:
            age = None if given.min_age_hours is None else timedelta(hours=given.min_age_hours)
            outcomes = gc(spark, given.uri, min_age=age, dry_run=given.dry_run, storage_options=storage)
    except JobFailedError as error:
        outcomes, failure = list(error.outcomes), error
    for outcome in outcomes:
        sys.stdout.write(json.dumps(asdict(outcome), default=str) + "\n")
    sys.stdout.flush()
    if failure is not None:
        sys.stderr.write(f"{failure}\n")
    return 0 if failure is None else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lancewal.spark.jobs", description=__doc__.split("\n")[0])
    parser.add_argument("job", choices=["flush", "compact", "gc"])
    parser.add_argument("uri", help="the table")
    parser.add_argument(
        "--storage", action="append", default=[], metavar="KEY=VALUE", help="a storage option"
    )
    parser.add_argument("--master", help="Spark's master; by default what spark-submit says, else local[*]")
    parser.add_argument("--max-commit-bytes", type=int, help="compact: rows that go into one commit")
    parser.add_argument("--min-age-hours", type=float, help="gc: the least age of what is removed")
    parser.add_argument("--dry-run", action="store_true", help="gc: only say what would be removed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
