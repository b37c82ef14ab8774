"""``lancewal flush``, ``compact``, ``gc``, ``verify``, ``backup`` and ``restore``."""

from __future__ import annotations

import re
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lancewal.cli import console, options
from lancewal.cli.console import parse_duration, plain
from lancewal.cli.exits import PROBLEMS, guarded, resumable
from lancewal.errors import InvalidInputError

if TYPE_CHECKING:
    from lancewal.maintenance import CompactionReport, GcReport, Progress, VerifyReport
    from lancewal.table import Table

_SHOWN_FINDINGS = 50


@guarded
def flush(
    table: options.TableArgument,
    engine: options.JobEngine = options.Engine.LOCAL,
    take_over: options.TakeOverOption = options.TakeOver.WHEN_GONE,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Flush rows from the WALs to SSTables.

    If another process writes to a shard, it is asked to flush the shard, and the command waits for it. Shards
    without an owner are taken over for a moment. With --take-over now the command takes over the other
    process's shards instead; with --take-over never it refuses them.
    """
    opened = options.open_table(table, option)
    if engine is options.Engine.SPARK:
        _on_spark(opened, "flush", option=option, json=json, take_over=take_over.value)
        return
    before = opened.status().unflushed
    with console.progress(json=json, counted=False) as shown:
        shown.add_task("flushing", total=None, note=console.plural(before.count, "entry", "entries"))
        with resumable("every shard is flushed or as it was"):
            opened.flush(take_over=take_over.value)
    after = opened.status()
    text = (
        f"{console.plural(before.count, 'WAL entry', 'WAL entries')} "
        f"({console.size(before.num_bytes)}) flushed; "
        f"{console.plural(after.uncompacted.count, 'SSTable')} wait for compaction"
    )
    document = {"entries": before.count, "bytes": before.num_bytes, "left": after.unflushed.count}
    console.tell(text if before.count else "nothing to flush", document, json=json)


@guarded
def compact(
    table: options.TableArgument,
    flush: Annotated[bool, typer.Option("--flush", help="Flush first, as lancewal flush does.")] = False,
    indexes: Annotated[
        bool, typer.Option("--indexes/--no-indexes", help="Then bring the base table's indexes up to date.")
    ] = True,
    files: Annotated[
        bool | None,
        typer.Option(
            "--files/--no-files",
            help="Then join all small files of the base table, or none; by default some, where it pays.",
        ),
    ] = None,
    engine: options.JobEngine = options.Engine.LOCAL,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Merge SSTables into the base table.

    Fences no writer, and may run beside writers, readers and other compactions. It may be stopped
    at any time and run again.
    """
    opened = options.open_table(table, option)
    if engine is options.Engine.SPARK:
        if flush:
            _on_spark(opened, "flush", option=option, json=json)
        shape = {"optimize_indexes": indexes, "compact_files": files}
        _on_spark(opened, "compact", option=option, json=json, **shape)
        return
    if flush:
        with resumable("every shard is flushed or as it was"):
            opened.flush()
    waiting = opened.status().uncompacted
    with console.progress(json=json) as shown:
        task = shown.add_task("compacting", total=waiting.rows, note="")
        done: dict[object, int] = {}

        def step(progress: Progress) -> None:
            done[progress.shard_id] = progress.rows
            shown.update(task, completed=sum(done.values()), note=progress.step)

        with resumable("every commit so far is whole"):
            report = opened.compact(optimize_indexes=indexes, compact_files=files, progress=step)
    console.tell(_compacted(report), report.to_dict(), json=json)


def _on_spark(opened: Table, *jobs: str, option: list[str] | None, json: bool, **arguments: Any) -> None:
    from lancewal.cli.spark import run_jobs

    run_jobs(opened.uri, jobs, options.storage_options(option), json=json, **arguments)


def _compacted(report: CompactionReport) -> str:
    if not report.generations:
        return "nothing to compact"
    what = f"{console.plural(report.generations, 'SSTable')} with {console.plural(report.rows_in, 'row')}"
    text = (
        f"{what} compacted in {console.duration(report.seconds)}: "
        f"{console.count(report.rows_upserted)} upserted, "
        f"{console.count(report.rows_deleted)} deleted, {console.plural(report.commits, 'commit')}"
    )
    return text + ("; indexes are up to date" if report.indexes_optimized else "")


@guarded
def gc(
    table: options.TableArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be deleted, delete nothing.")
    ] = False,
    min_age: Annotated[
        str | None,
        typer.Option(
            "--min-age",
            metavar="AGE",
            help="Keep what is younger than this, such as 30min, 12h or 7d; one day by default. At least ten "
            "minutes apply where a stalled writer could lose rows.",
        ),
    ] = None,
    engine: options.JobEngine = options.Engine.LOCAL,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Delete what no writer, reader or retained version needs any more."""
    age: timedelta | None = None if min_age is None else parse_duration(min_age, "--min-age")
    opened = options.open_table(table, option)
    if engine is options.Engine.SPARK:
        _on_spark(opened, "gc", option=option, json=json, min_age=age, dry_run=dry_run)
        return
    with console.progress(json=json, counted=False) as shown:
        shown.add_task("collecting", total=None, note="")
        with resumable("the table is whole"):
            report = opened.gc(dry_run=dry_run, min_age=age)
    console.tell(_collected(report), report.to_dict(), json=json)
    if not json:
        for reason, number in Counter(kept.reason for kept in report.kept).most_common():
            console.out().print(f"  kept {console.count(number)}: {reason}", style="dim", markup=False)


def _collected(report: GcReport) -> str:
    verb = "would delete" if report.dry_run else "deleted"
    counts = [
        f"{console.count(number)} {name.replace('_', ' ')}"
        for name, number in report.counts().items()
        if number
    ]
    return f"{verb} {', '.join(counts) or 'nothing'}, {console.size(report.num_bytes)}"


@guarded
def verify(
    table: options.TableArgument,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Repair what can be repaired, such as indexes and split shards, then verify again.",
        ),
    ] = False,
    accept_lost_entries: Annotated[
        bool,
        typer.Option(
            "--accept-lost-entries", help="Repair, and give up the rows of WAL entries that are missing."
        ),
    ] = False,
    earlier: Annotated[
        str | None,
        typer.Option(
            "--earlier",
            help="With --repair: keep or drop rows of shards from before the table was made anew.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Read no rows, only manifests and what they name.")
    ] = False,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Check every invariant of the write path; changes nothing without --repair or --accept-lost-entries.

    Ends with code 3 if something is wrong.
    """
    if earlier is not None and not repair:
        raise InvalidInputError("--earlier says what --repair does; pass both")
    opened = options.open_table(table, option)
    with console.progress(json=json) as shown:
        task = shown.add_task("verifying", total=len(opened.shards()), note="")
        if repair or accept_lost_entries:
            opened.repair(accept_lost_entries=accept_lost_entries, earlier=earlier)
        report = opened.verify(deep=not quick, progress=lambda shard: shown.advance(task))
    if json:
        console.print_json(report.to_dict())
    else:
        _show_findings(report)
    if not report.ok:
        raise typer.Exit(PROBLEMS)


def _show_findings(report: VerifyReport) -> None:
    out = console.out()
    checked = ", ".join(
        console.plural(number, re.sub("ies$", "y", what).removesuffix("s"), what)
        for what, number in report.checked.items()
    )
    mark = "[green]✓[/]" if report.ok else "[red]✗[/]"
    verdict = "all is well" if report.ok else "problems found"
    out.print(f"{mark} {verdict}; checked {checked} in {console.duration(report.seconds)}")
    colours = {"error": "red", "warning": "yellow", "info": "dim"}
    for finding in report.findings[:_SHOWN_FINDINGS]:
        out.print(
            f"  [{colours[str(finding.severity)]}]{finding.severity}[/] {finding.kind.replace('_', ' ')}: ",
            end="",
        )
        out.print(finding.text, markup=False, soft_wrap=True)
    hidden = len(report.findings) - _SHOWN_FINDINGS
    if hidden > 0:
        out.print(f"  … and {console.count(hidden)} more, see --json")
    if any(finding.repairable for finding in report.findings):
        out.print("  some of it can be put right: lancewal verify --repair")


_OtherOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--backup-option",
        metavar="KEY=VALUE",
        help="A storage option for where the backups are; repeat it for more.",
    ),
]
_Backups = Annotated[str, typer.Argument(metavar="BACKUPS", help="Where the backups of this table are.")]


@guarded
def backup(
    table: options.TableArgument,
    backups: _Backups,
    check: Annotated[
        bool, typer.Option("--check", help="Read all files of the backup again and compare their checksums.")
    ] = False,
    engine: options.JobEngine = options.Engine.LOCAL,
    option: options.StorageOptions = None,
    backup_option: _OtherOptions = None,
    json: options.Json = False,
) -> None:
    """Copy the table as it is now, while writers and maintenance go on.

    Files that the newest backup already has are not copied again. Ends with code 3 if --check finds damage.
    """
    from lancewal.maintenance import check_backup
    from lancewal.storage import ObjectStore

    opened = options.open_table(table, option)
    elsewhere = options.storage_options(backup_option)
    with resumable("a backup that was not finished does not count"):
        if engine is options.Engine.SPARK:
            from lancewal.cli.spark import run_backup

            report = run_backup(table, backups, options.storage_options(option), elsewhere, json=json)
        else:
            report = opened.backup(backups, elsewhere)
    damaged = check_backup(ObjectStore.from_uri(backups, elsewhere), report.id) if check else []
    text = (
        f"backup {report.id}: {console.plural(report.files, 'file')} "
        f"({console.size(report.num_bytes)}), {console.count(report.copied_files)} of them copied "
        f"({console.size(report.copied_bytes)}) in {console.duration(report.seconds)}"
    )
    console.tell(text, {**report.to_dict(), "damaged": damaged}, json=json)
    if damaged:
        for each in [] if json else damaged:
            console.out().print(f"  [red]damaged[/] {plain(each)}")
        raise typer.Exit(PROBLEMS)


@guarded
def restore(
    backups: _Backups,
    table: options.TableArgument,
    backup: Annotated[
        str | None,
        typer.Option("--backup", metavar="ID", help="Which one; the newest by default."),
    ] = None,
    option: options.StorageOptions = None,
    backup_option: _OtherOptions = None,
    json: options.Json = False,
) -> None:
    """Make a table from a backup at an empty place, and compare every file with its checksum."""
    import lancewal

    with resumable("there is no table yet, delete what is there"):
        restored = lancewal.restore(
            backups,
            table,
            backup=backup,
            source_options=options.storage_options(backup_option),
            storage_options=options.storage_options(option),
        )
    shards = len(restored.shards())
    text = f"restored {plain(restored.uri)} with {console.plural(shards, 'shard')}"
    console.tell(text, {"table": restored.uri, "shards": shards}, json=json)
