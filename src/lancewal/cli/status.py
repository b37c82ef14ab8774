"""``lancewal status``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live

from lancewal.cli import console, options
from lancewal.cli.exits import guarded
from lancewal.cli.status_view import History, status_view


@guarded
def status(
    table: options.TableArgument,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Stay, and look again and again.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 2.0,
    times: Annotated[
        int | None,
        typer.Option("--times", min=1, help="Looks until --watch ends by itself.", show_default=False),
    ] = None,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Show what waits for a flush, for compaction and for an index, shard by shard.

    With --watch and --json a document a line.
    """
    opened = options.open_table(table, option)
    if not watch:
        found = opened.status()
        if json:
            console.print_json(found.to_dict())
        else:
            out = console.out()
            out.print(status_view(found, width=out.width))
        return
    try:
        if json:
            _repeat(times, every, lambda: console.print_json(opened.status().to_dict(), indent=None))
            return
        out = console.out()
        history = History()
        with Live(console=out, screen=out.is_terminal, auto_refresh=False) as live:

            def look() -> None:
                found = opened.status()
                history.add(found)
                view = status_view(found, width=out.width, height=out.height, history=history, every=every)
                live.update(Group(view), refresh=True)

            _repeat(times, every, look)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _repeat(times: int | None, every: float, look: Callable[[], None]) -> None:
    done = 0
    while True:
        look()
        done += 1
        if times is not None and done >= times:
            return
        time.sleep(every)
