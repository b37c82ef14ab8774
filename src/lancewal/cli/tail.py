"""``lancewal tail``: the change feed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from lancewal.cli import console, options, rows
from lancewal.cli.exits import guarded

if TYPE_CHECKING:
    import pyarrow as pa

    from lancewal.feed import ChangeFeed

_MARKS = {"upsert": ("~", "cyan"), "insert": ("+", "green"), "delete": ("-", "red")}


@guarded
def tail(
    table: options.TableArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with changes as they come.")] = False,
    limit: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Begin with the last N changes of what is retained.")
    ] = 10,
    all_changes: Annotated[bool, typer.Option("--all", help="Begin with everything that is retained.")] = False,
    columns: options.Columns = None,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Show changes in the order of each shard's log.

    With --json a change a line, with its kind, shard and WAL position. The feed reaches back as far as
    garbage collection retains the log.
    """
    from lancewal.feed import FEED_COLUMNS, ChangeFeed

    opened = options.open_table(table, option)
    feed = ChangeFeed.open(opened.uri, options.storage_options(option))
    chosen = options.names(columns)
    names = feed.schema.names if chosen is None else [*chosen, *FEED_COLUMNS]
    unknown = [name for name in names if name not in feed.schema.names]
    if unknown:
        raise typer.BadParameter(f"the table has no column {', '.join(unknown)}", param_hint="--columns")
    show = _json_lines if json else _lines
    end = feed.latest()
    for batch in _recent(feed, dict(end), None if all_changes else limit):
        show(batch.select(names))
    if not follow:
        return
    try:
        for batch, _ in feed.follow(end, stop=lambda: False):
            show(batch.select(names))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _recent(feed: ChangeFeed, end: dict, limit: int | None) -> Iterator[pa.RecordBatch]:
    """The last ``limit`` changes of every shard together: each shard's newest entries are enough."""
    from itertools import chain

    start = feed.earliest()
    if limit is None:
        yield from feed.changes(start, end)
        return
    kept: list[pa.RecordBatch] = []
    for shard, stop in end.items():
        kept += _last_of(feed, shard, start.get(shard, stop), stop, limit)
    # No order holds between shards: take from all of them alike.
    share = _shares([batch.num_rows for batch in kept], limit)
    yield from chain(batch.slice(batch.num_rows - take) for batch, take in zip(kept, share, strict=True) if take)


def _last_of(feed: ChangeFeed, shard: object, first: int, stop: int, limit: int) -> list[pa.RecordBatch]:
    """Batches that hold the last ``limit`` changes of a shard, read backwards entry by entry."""
    found: list[pa.RecordBatch] = []
    count = 0
    position = stop - 1
    while position >= first and count < limit:
        batches = list(feed.read(shard, position, position + 1))
        found = [*batches, *found]
        count += sum(batch.num_rows for batch in batches)
        position -= 1
    return found


def _shares(sizes: list[int], limit: int) -> list[int]:
    """How much of each batch is shown, from the newest on."""
    left = limit
    shares = []
    for size in reversed(sizes):
        take = min(size, left)
        shares.append(take)
        left -= take
    return shares[::-1]


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
            line.append(("  " if place else "") + f"{name}=", style="dim")
            line.append_text(rows.cell(value))
        line.truncate(max(out.width, 20), overflow="ellipsis")
        out.print(line, soft_wrap=True)
    sys.stdout.flush()
