"""``lancewal flush``, ``compact`` and ``gc`` with ``--engine spark``: one task per shard, a line for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lancewal.cli import console, figures
from lancewal.cli.spark_start import start_session

if TYPE_CHECKING:
    from lancewal.spark import ShardOutcome


def run_jobs(
    uri: str, jobs: Sequence[str], storage_options: Mapping[str, str], *, json: bool, **arguments: Any
) -> None:
    """Run jobs one after the other and report on every shard, also on those of a job that failed."""
    spark = start_session()
    from lancewal import spark as spark_jobs

    for job in jobs:
        failure = None
        with console.progress(json=json, counted=False) as shown:
            shown.add_task(f"{job} on Spark", total=None, note="")
            try:
                outcomes: Sequence[ShardOutcome] = getattr(spark_jobs, job)(
                    spark, uri, storage_options=storage_options, **arguments
                )
            except spark_jobs.JobFailedError as error:
                outcomes, failure = error.outcomes, error
        _show(job, outcomes, json=json)
        if failure is not None:
            raise failure


def _show(job: str, outcomes: Sequence[ShardOutcome], *, json: bool) -> None:
    if json:
        for outcome in outcomes:
            console.print_json({"job": job, **asdict(outcome), "shard_id": _name(outcome)}, indent=None)
        return
    out = console.out()
    for outcome in outcomes:
        mark = "[green]✓[/]" if outcome.error is None else "[red]✗[/]"
        out.print(f"{mark} {job} of {_name(outcome)} in {figures.duration(outcome.seconds)}: ", end="")
        told = ", ".join(f"{name} {value}" for name, value in outcome.details.items() if _is_figure(value))
        out.print(told if outcome.error is None else outcome.error, markup=False, soft_wrap=True)
    if not outcomes:
        out.print(f"[green]✓[/] {job}: nothing to do")


def _name(outcome: ShardOutcome) -> str:
    return "no shard" if outcome.shard_id is None else str(outcome.shard_id)


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
