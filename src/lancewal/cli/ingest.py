"""``lancewal ingest``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from lancewal.cli import console, options
from lancewal.cli.console import plain
from lancewal.cli.exits import FAILED, REFUSED, CommandError, advised, exit_code, guarded, plain_sentence
from lancewal.cli.init import Plan, shape
from lancewal.errors import InvalidInputError, LanceWalError

if TYPE_CHECKING:
    from lancewal.ingest import Ingestion, IngestReport, SourceFile, Step
    from lancewal.table import Table


@guarded
def ingest(
    table: options.TableArgument,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE…",
            help="Files or directories: Parquet, CSV, JSON lines, Arrow, Lance.",
            autocompletion=options.complete_path,
        ),
    ],
    stream: Annotated[
        bool, typer.Option("--stream", help="Keep running, and take new files as they arrive.")
    ] = False,
    every: Annotated[
        float, typer.Option("--every", min=0.1, help="Seconds between two looks of --stream.")
    ] = 2.0,
    looks: Annotated[
        int | None,
        typer.Option("--looks", min=1, help="How many times --stream looks before it ends."),
    ] = None,
    engine: Annotated[
        options.Engine,
        typer.Option("--engine", help="local: this process; spark: a Spark session, for much data."),
    ] = options.Engine.LOCAL,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="parquet, csv, tsv, jsonl, arrow or lance; by default the ending of a name tells.",
        ),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Create the table, or its write path, when it is missing.")
    ] = False,
    key: options.Key = None,
    bucket: options.Bucket = None,
    identity: options.Identity = None,
    unsharded: options.Unsharded = False,
    vector_column: options.Vectors = None,
    settings: options.Settings = None,
    drop_unknown: Annotated[
        bool, typer.Option("--drop-unknown", help="Leave out columns that the table does not have.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Take files that were taken before.")] = False,
    source: Annotated[
        str | None,
        typer.Option(
            "--source-name",
            metavar="NAME",
            help="Remember files under this name instead of their directory's, for a directory whose path "
            "differs between machines.",
        ),
    ] = None,
    give_up: Annotated[
        bool,
        typer.Option(
            "--give-up", help="Forget a part that an earlier run left unfinished and whose file is gone."
        ),
    ] = False,
    flush: Annotated[
        bool, typer.Option("--flush/--no-flush", help="At the end, move rows from the WAL to SSTables.")
    ] = True,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", metavar="[HOST:]PORT", help="Serve Prometheus metrics while it runs."),
    ] = None,
    take_over: options.TakeOverOption = options.TakeOver.WHEN_GONE,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Ingest files into the table, each row exactly once.

    The table remembers which files it has: a run that was interrupted continues where it stopped, and
    files that were ingested before are skipped. If another process writes to the table, it adopts the
    rows in its own order. Shards without an owner are taken over for a moment. With --take-over now the
    command takes over the other process's shards instead; with --take-over never it refuses the files.
    """
    from lancewal.ingest import Ingestion, find_files

    options.check_sharding(bucket, identity, unsharded)
    storage = options.storage_options(option)
    files = find_files(sources, format)
    if create:
        plan = Plan(
            options.names(key),
            vector_column or (),
            options.bucket(bucket),
            identity,
            unsharded,
            settings=options.pairs(settings, "--set"),
        )
        _ensure(table, storage, files, plan)
    elif key or bucket or identity or unsharded or vector_column or settings:
        raise typer.BadParameter("--key, --vector-column, --set and the sharding are for --create")
    opened = options.open_table(table, option)
    if metrics is not None:
        _serve_metrics(metrics, opened)
    parts = None
    if engine is options.Engine.SPARK:
        from lancewal.cli.spark import SparkParts

        parts = SparkParts(opened, storage, drop_unknown=drop_unknown, take_over=take_over.value)
    new_job = partial(
        Ingestion,
        table,
        storage,
        source=source,
        drop_unknown=drop_unknown,
        again=again,
        parts=parts,
        take_over=take_over.value,
    )
    if give_up:
        _give_up(new_job(), files, sources)
    if stream:
        job = new_job(taken=partial(_print_taken, json=json))
        _watch(job, sources, format, every, looks, json=json, flush=flush, again=again)
    else:
        _once(new_job, files, json=json, flush=flush, again=again)


def _serve_metrics(place: str, table: Table) -> None:
    host, _, port = place.rpartition(":")
    if not port.isdigit():
        raise typer.BadParameter(f"{place!r} is not [HOST:]PORT, such as 9464", param_hint="--metrics")
    try:
        from lancewal.metrics import serve
    except ImportError as error:
        raise CommandError(str(error)) from error
    serve(int(port), host or "127.0.0.1", [table])


def _ensure(table: str, storage: dict[str, str], files: list[SourceFile], plan: Plan) -> None:
    if not files:
        raise CommandError("there is no file yet whose columns a new table could have", REFUSED)
    opened, made = plan.open_or_create(table, storage, files[0])
    if made:
        console.note(f"[dim]created {plain(table)}: {shape(opened.status())}[/]")


def _give_up(job: Ingestion, files: list[SourceFile], sources: list[str]) -> None:
    from lancewal.ingest import directories_of

    for source in dict.fromkeys([*directories_of(sources), *(file.source for file in files)]):
        part = job.give_up(source)
        if part is not None:
            console.note(f"gave up on {plain(part)}")


def _once(
    new_job: Callable[..., Ingestion], files: list[SourceFile], *, json: bool, flush: bool, again: bool
) -> None:
    if not files:
        raise CommandError(
            "there is no file to ingest there; see --format for the endings that are known", REFUSED
        )
    with console.progress(json=json, counted=False) as shown:
        meter = _Meter(shown)
        job = new_job(progress=meter.step)
        pending = job.pending(files)
        meter.start(pending)
        try:
            job.run(files)
            if flush:
                meter.flushing()
                job.flush()
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(_resume_text(job.report, len(pending))) from error
        except InvalidInputError:
            raise
        except LanceWalError as error:
            advice = "run the same command again to go on, nothing is written twice"
            raise CommandError(advised(plain_sentence(error), advice), exit_code(error)) from error
    _print_report(job.report, json=json, again=again)


def _watch(
    job: Ingestion,
    sources: list[str],
    format: str | None,
    every: float,
    looks: int | None,
    *,
    json: bool,
    flush: bool,
    again: bool,
) -> None:
    from lancewal.ingest import watch

    done = 0

    def enough() -> bool:
        return looks is not None and done >= looks

    if not json:
        console.note(
            f"[dim]watching {plain(', '.join(sources))} every {console.duration(every)}; Ctrl-C ends[/]"
        )
    told: set[str] = set()
    try:
        for files in watch(sources, stop=enough, format=format, poll_interval=every):
            done += 1
            job.run([file for file in job.pending(files) if str(file) not in told], skip_refused=True)
            for name in job.report.refused.keys() - told:
                told.add(name)
                console.error(job.report.refused[name], "left out")
    except KeyboardInterrupt as error:
        _print_report(job.report, json=json, again=again)
        raise KeyboardInterrupt(_resume_text(job.report, None)) from error
    if flush:
        job.flush()
    _print_report(job.report, json=json, again=again)
    if job.report.refused:
        raise typer.Exit(FAILED)


def _resume_text(report: IngestReport, files: int | None) -> str:
    of = "" if files is None else f" of {files}"
    taken = f"{report.files}{of} files and {console.plural(report.rows, 'row')} are in the table"
    return f"interrupted; {taken}, none of it twice. Run the same command again to go on"


def _print_taken(file: SourceFile, rows: int, *, json: bool) -> None:
    text = f"{plain(file.name)}  [dim]{console.plural(rows, 'row')}[/]"
    console.tell(text, {"file": str(file), "rows": rows}, json=json, indent=None)


def _print_report(report: IngestReport, *, json: bool, again: bool) -> None:
    text = f"{console.plural(report.rows, 'row')} from {console.plural(report.files, 'file')}"
    if report.skipped:
        why = "taken before the interruption" if again else "taken before (--again takes them)"
        text += f"; {console.plural(report.skipped, 'file')} skipped, {why}"
    console.tell(text, asdict(report), json=json, indent=None)


class _Meter:
    """A progress bar over the bytes of all files."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self._task = shown.add_task("ingesting", total=None, note="")
        self._before: dict[str, float] = {}
        self._rows: dict[str, int] = {}

    def start(self, files: list[SourceFile]) -> None:
        done = 0.0
        for file in files:
            self._before[str(file)] = done
            done += file.size or 1
        self._shown.update(self._task, total=done or 1)

    def step(self, step: Step) -> None:
        name = str(step.file)
        self._rows[name] = step.rows
        done = self._before.get(name, 0.0) + step.fraction * (step.file.size or 1)
        rows = console.plural(sum(self._rows.values()), "row")
        self._shown.update(self._task, completed=done, description=plain(step.file.name), note=rows)

    def flushing(self) -> None:
        self._shown.update(self._task, description="flushing")
