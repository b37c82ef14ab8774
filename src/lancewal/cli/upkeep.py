"""``lancewal upkeep``: keeps tables in shape, once or as long as it runs."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from lancewal.cli import console, options
from lancewal.cli.console import plain
from lancewal.cli.exits import guarded, resumable, wait_until_stopped

if TYPE_CHECKING:
    from lancewal.table import Table
    from lancewal.upkeep import TaskOutcome


@guarded
def upkeep(
    tables: Annotated[
        list[str],
        typer.Argument(metavar="TABLE…", help="Paths or URIs of the tables.", show_default=False),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what is due and why, in its order; do nothing.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Keep running, and do what is due when it is.")
    ] = False,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Do what is due in tables: flush, compact, index, join files, clean up old versions, collect garbage.

    Each table's own settings decide what is due (see status). May run beside writers, readers and other
    upkeep, and may be stopped at any time. With --json it prints one document per line: a plan for each
    table with --dry-run, otherwise each task that was done. Ends with code 1 if something failed.
    """
    if dry_run and watch:
        raise typer.BadParameter("--dry-run shows what is due now; leave --watch out")
    opened = [options.open_table(table, option) for table in tables]
    if dry_run:
        for table in opened:
            _show_plan(table, json=json)
        return
    if watch:
        _watch(opened, json=json)
        return
    ok = True
    for table in opened:
        with resumable("every step so far is whole"):
            report = table.upkeep()
        for outcome in report.outcomes:
            _tell(table, outcome, json=json)
        if not report.outcomes and not json:
            console.out().print(f"[green]✓[/] {plain(table.uri)}: nothing is due")
        ok &= report.ok
    if not ok:
        raise typer.Exit(1)


def _show_plan(table: Table, *, json: bool) -> None:
    plan = table.plan_upkeep()
    if json:
        console.print_json(plan.to_dict(), indent=None)
        return
    console.out().print(f"{plain(table.uri)}: {'' if plan else 'nothing is due'}")
    for task in plan:
        shards = f" ({console.plural(len(task.shards), 'shard')})" if task.shards else ""
        console.out().print(f"  {task.work}{shards}: {plain(task.reason)}", soft_wrap=True)


def _watch(tables: list[Table], *, json: bool) -> None:
    """Run upkeep of all tables until SIGTERM or Ctrl-C, which stop it cleanly."""
    telling = threading.Lock()

    def told(table: Table, outcome: TaskOutcome) -> None:
        with telling:
            _tell(table, outcome, json=json)

    with contextlib.ExitStack() as stack:
        for table in tables:
            stack.enter_context(table.upkeeper(report=partial(told, table)))
        wait_until_stopped()


def _tell(table: Table, outcome: TaskOutcome, *, json: bool) -> None:
    if json:
        console.print_json({"uri": table.uri, **outcome.to_dict()}, indent=None)
        return
    mark = "[red]✗[/]" if outcome.failed else "[green]✓[/]"
    console.out().print(f"{mark} {plain(table.uri)}: {plain(str(outcome))}", soft_wrap=True)
