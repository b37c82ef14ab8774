"""``lancewal checkpoint create``, ``list`` and ``drop``."""

from __future__ import annotations

from typing import Annotated

import typer

from lancewal.cli import console, options
from lancewal.cli.console import parse_duration, plain
from lancewal.cli.exits import guarded

Name = Annotated[str, typer.Argument(metavar="NAME", help="What the checkpoint is called.")]


@guarded
def create(
    table: options.TableArgument,
    name: Name,
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep", metavar="AGE", help="Let garbage collection drop it at this age, such as 12h or 30d."
        ),
    ] = None,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Keep the current state of the table under a name.

    Copies no row. lancewal query --at NAME and Spark's versionAsOf read it, whatever is written, compacted
    and collected meanwhile.
    """
    age = None if keep is None else parse_duration(keep, "--keep")
    made = options.open_table(table, option).checkpoint(name, keep=age)
    until = "" if made.expires is None else f", kept until {made.expires:%Y-%m-%d %H:%M} UTC"
    text = f"checkpoint {plain(made.name)} of base version {made.version} and all rows above it{until}"
    console.tell(text, made.to_dict(), json=json)


@guarded
def list_(
    table: options.TableArgument, option: options.StorageOptions = None, json: options.Json = False
) -> None:
    """Show the checkpoints of a table, oldest first; with --json one per line."""
    found = options.open_table(table, option).checkpoints()
    if json:
        for each in found:
            console.print_json(each.to_dict(), indent=None)
        return
    for each in found:
        ending = "" if each.expires is None else f"  until {each.expires:%Y-%m-%d %H:%M}"
        state = f"[red]{plain(each.problem)}[/]" if each.problem else f"base version {each.version}{ending}"
        console.out().print(f"{each.created:%Y-%m-%d %H:%M}  {plain(each.name)}  {state}")
    console.note(f"[dim]{console.plural(len(found), 'checkpoint')}[/]")


@guarded
def drop(
    table: options.TableArgument,
    name: Name,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Drop a checkpoint; garbage collection then deletes what only it needed."""
    options.open_table(table, option).drop_checkpoint(name)
    console.tell(f"checkpoint {plain(name)} dropped", {"dropped": name}, json=json)
