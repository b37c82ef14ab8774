"""``lancewal tail``: the change feed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer
from rich.console import Console
from rich.text import Text

from lancewal.cli import console, options
from lancewal.cli import console as rows
from lancewal.cli.exits import guarded

if TYPE_CHECKING:
    import pyarrow as pa

    from lancewal.publish import ChangeFeed, Positions

_MARKS = {"upsert": ("~", "cyan"), "insert": ("+", "green"), "delete": ("-", "red")}


@guarded
def tail(
    table: options.TableArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with changes as they come.")] = False,
    limit: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Begin with the last N changes of each shard.")
    ] = 10,
    all_changes: Annotated[
        bool, typer.Option("--all", help="Begin with everything that is retained.")
    ] = False,
    columns: options.Columns = None,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Show changes in the order of each shard's log.

    With --json a change a line, with its kind, shard and WAL position. The feed reaches back as far as
    garbage collection retains the log.
    """
    from lancewal.publish import FEED_COLUMNS, ChangeFeed

    opened = options.open_table(table, option)
    feed = ChangeFeed.open(opened.uri, options.storage_options(option))
    chosen = options.names(columns)
    names = feed.schema.names if chosen is None else [*chosen, *FEED_COLUMNS]
    unknown = [name for name in names if name not in feed.schema.names]
    if unknown:
        raise typer.BadParameter(f"the table has no column {', '.join(unknown)}", param_hint="--columns")
    show = _json_lines if json else _lines
    end = feed.latest()
    for batch in _recent(feed, end, None if all_changes else limit):
        show(batch.select(names))
    if not follow:
        return
    try:
        for batch, _ in feed.follow(end, stop=lambda: False):
            show(batch.select(names))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _recent(feed: ChangeFeed, end: Positions, limit: int | None) -> Iterator[pa.RecordBatch]:
    """The last ``limit`` changes of each shard; shards have no order among each other."""
    start = feed.earliest()
    if limit is None:
        yield from feed.changes(start, end)
        return
    for shard, stop in end.items():
        yield from _last_of(feed, shard, start.get(shard, stop), stop, limit)


def _last_of(feed: ChangeFeed, shard: UUID, first: int, stop: int, limit: int) -> list[pa.RecordBatch]:
    """The last changes of one shard, read backwards entry by entry."""
    found: list[pa.RecordBatch] = []
    left = limit
    for position in range(stop - 1, first - 1, -1):
        if not left:
            break
        for batch in reversed(list(feed.read(shard, position, position + 1))):
            taken = min(batch.num_rows, left)
            left -= taken
            if taken:
                found.insert(0, batch.slice(batch.num_rows - taken))
    return found


def _json_lines(batch: pa.RecordBatch) -> None:
    for row in rows.json_rows(batch):
        console.print_json(row, indent=None)


def _lines(batch: pa.RecordBatch) -> None:
    out: Console = console.out()
    for row in batch.to_pylist():
        kind, shard = row.pop("_change_type"), row.pop("_shard_id")
        position, _ = row.pop("_wal_position"), row.pop("_writer_epoch")
        mark, colour = _MARKS[kind]
        line = Text.assemble((f"{mark} {kind:<6} ", colour), (f"{shard[:8]}:{position:<5} ", "dim"))
        shown = {name: value for name, value in row.items() if value is not None or kind != "delete"}
        for place, (name, value) in enumerate(shown.items()):
            line.append(("  " if place else "") + f"{console.visible(name)}=", style="dim")
            line.append_text(rows.cell(value))
        line.truncate(max(out.width, 20), overflow="ellipsis")
        out.print(line, soft_wrap=True)
    sys.stdout.flush()
