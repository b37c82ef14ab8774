"""``lancewal query``, ``sql``, ``get`` and ``tail``: rows by filter, search or key, and their changes."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer
from rich.text import Text

from lancewal.cli import console, options
from lancewal.cli.exits import NOT_FOUND, CommandError, guarded

if TYPE_CHECKING:
    import pyarrow as pa

    from lancewal.publish import ChangeFeed, Positions
    from lancewal.reader import TableView

_TERMINAL_ROWS = 20
_DEFAULT_K = 10
_MARKS = {"upsert": ("~", "cyan"), "insert": ("+", "green"), "delete": ("-", "red")}

Keys = Annotated[
    list[str],
    typer.Argument(
        metavar="KEY…",
        help='Keys. Where a key has several columns, each as JSON: \'{"tenant": 3, "id": 17}\'.',
    ),
]


@guarded
def query(
    table: options.TableArgument,
    filter: Annotated[
        str | None,
        typer.Option("--filter", "-f", metavar="SQL", help="Condition, as Lance takes it."),
    ] = None,
    columns: options.Columns = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            min=0,
            help=f"Rows at most: {_TERMINAL_ROWS} by default, all with --json, {_DEFAULT_K} in a search.",
        ),
    ] = None,
    offset: Annotated[int, typer.Option("--offset", min=0, help="Rows to skip.")] = 0,
    vector: Annotated[
        str | None,
        typer.Option(
            "--vector",
            metavar="COLUMN=VECTOR",
            help="Nearest rows. VECTOR is a JSON list, @FILE with one, or key:KEY for the vector of a row.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="l2, cosine or dot; by default that of the index."),
    ] = None,
    words: Annotated[
        str | None,
        typer.Option(
            "--words",
            metavar="COLUMN=TEXT",
            help="Rows that match words best; with --vector those that both rank best together.",
        ),
    ] = None,
    count: Annotated[bool, typer.Option("--count", help="Print only how many rows there are.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print what would be read, and read nothing.")
    ] = False,
    source: Annotated[
        bool, typer.Option("--source", help="Add the level and the shard of each row.")
    ] = False,
    at: options.At = None,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Read the merged view: base table, SSTables and WAL, newest version of each key.

    --json prints one row per line.
    """
    if (vector or words) and (count or explain or source or offset):
        raise typer.BadParameter("--count, --explain, --source and --offset are not for searches")
    opened = options.open_view(table, option, at)
    names = options.names(columns)
    if vector or words:
        k = _DEFAULT_K if limit is None else limit
        found = _search(opened, vector, words, max(k, 1), filter, names, metric)
        _show(found.slice(0, k), json=json)
        return
    shown = limit if limit is not None or json else _TERMINAL_ROWS + 1
    if count:
        number = opened.scan(filter=filter, limit=limit, offset=offset).count_rows()
        console.print_json({"rows": number}) if json else console.out().print(str(number))
        return
    scan = opened.scan(names, filter, shown, offset, source)
    if explain and json:
        console.print_json({"plan": scan.explain()})
    elif explain:
        console.out().print(scan.explain(), markup=False, soft_wrap=True)
    elif json:
        for batch in scan.to_batches():
            console.print_rows(batch)
    else:
        _show(scan.to_table(), limited=limit is None)


@guarded
def sql(
    table: options.TableArgument,
    query: Annotated[str, typer.Argument(metavar="SELECT", help="A query, in which the table is called t.")],
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Query the merged view with SQL, as in: lancewal sql docs.lance "SELECT count(*) FROM t".

    Takes any SELECT that DataFusion accepts. --json prints one row per line.
    """
    _show(options.open_table(table, option).sql(query), json=json)


def _show(found: pa.Table, *, json: bool = False, limited: bool = False) -> None:
    if json:
        console.print_rows(found)
        return
    more = limited and found.num_rows > _TERMINAL_ROWS
    found = found.slice(0, _TERMINAL_ROWS) if more else found
    if found.num_rows:
        console.out().print(console.table_of(found))
    ending = "; there are more, see --limit" if more else ""
    console.note(f"[dim]{console.plural(found.num_rows, 'row')}{ending}[/]")


def _search(
    table: TableView,
    vector: str | None,
    words: str | None,
    k: int,
    filter: str | None,
    columns: list[str] | None,
    metric: str | None,
) -> pa.Table:
    """Search by vector, by words, or by both together, with :meth:`TableView.search`."""
    asked: dict[str, Any] = {}
    if words is not None:
        asked["text_column"], asked["text"] = _column_and_rest(words, "--words", "COLUMN=TEXT")
    if vector is not None:
        column, said = _column_and_rest(vector, "--vector", "COLUMN=VECTOR")
        asked |= {"vector_column": column, "vector": _vector(table, column, said)}
    return table.search(k=k, filter=filter, columns=columns, metric=metric, **asked)


def _column_and_rest(text: str, option: str, form: str) -> tuple[str, str]:
    column, equals, rest = text.partition("=")
    if not equals or not column or not rest:
        raise typer.BadParameter(f"{text!r} is not {form}", param_hint=option)
    return column, rest


def _vector(table: TableView, column: str, text: str) -> Any:
    if text.startswith("key:"):
        key = text.removeprefix("key:")
        found = table.lookup(parse_keys(table, [key]), columns=[column]).table
        if not found.num_rows or found[column][0].as_py() is None:
            raise CommandError(f"no row with key {key} that has a vector in {column}", NOT_FOUND)
        return found[column][0].as_py()
    if text.startswith("@"):
        text = Path(text[1:]).read_text()
    try:
        value = jsonlib.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not value or not all(isinstance(each, int | float) for each in value):
        raise typer.BadParameter("the vector is no JSON list of numbers", param_hint="--vector")
    return value


@guarded
def get(
    table: options.TableArgument,
    keys: Keys,
    columns: options.Columns = None,
    at: options.At = None,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Show the newest version of rows by key.

    Ends with code 4 if one of the keys has no row.
    """
    opened = options.open_view(table, option, at)
    found = opened.lookup(parse_keys(opened, keys), columns=options.names(columns))
    if json:
        console.print_rows(found.table)
    elif found.table.num_rows:
        console.out().print(console.table_of(found.table))
    missing = [key for key, was_found in zip(keys, found.found.tolist(), strict=True) if not was_found]
    if missing:
        raise CommandError(f"no row with key {', '.join(missing)}", NOT_FOUND)


def parse_keys(table: TableView, texts: list[str]) -> Any:
    """Keys in the table's types: a list, or a table if the key has several columns."""
    import pyarrow as pa

    fields = [table.schema.field(name) for name in table.primary_key]
    if not fields:
        raise CommandError("this table has no primary key; use lancewal query --filter", 2)
    if len(fields) == 1:
        return [_value(fields[0], text) for text in texts]
    found = [_composite(fields, text) for text in texts]
    try:
        return pa.Table.from_pylist(found, pa.schema(fields))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise typer.BadParameter(f"a key does not fit the key columns: {error}", param_hint="KEY") from None


def _value(field: pa.Field, text: str) -> Any:
    import pyarrow as pa

    try:
        value = pa.scalar(text).cast(field.type).as_py()
    except (pa.ArrowException, ValueError):
        raise typer.BadParameter(
            f"{text!r} is no value of the key column {field.name} ({field.type})", param_hint="KEY"
        ) from None
    return value


def _composite(fields: list[pa.Field], text: str) -> dict[str, Any]:
    names = [field.name for field in fields]
    try:
        value = jsonlib.loads(text)
    except ValueError:
        value = None
    if isinstance(value, list) and len(value) == len(names):
        value = dict(zip(names, value, strict=True))
    if not isinstance(value, dict) or set(value) != set(names):
        example = jsonlib.dumps(dict.fromkeys(names, "…"), ensure_ascii=False)
        raise typer.BadParameter(
            f"{text!r} is no key; the key has several columns, pass {example}", param_hint="KEY"
        )
    return value


@guarded
def tail(
    table: options.TableArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep running, and show changes as they arrive.")
    ] = False,
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

    --json prints one change per line, with its kind, shard and WAL position. The feed reaches back as
    far as garbage collection retains the log.
    """
    from lancewal.publish import FEED_COLUMNS, ChangeFeed

    opened = options.open_table(table, option)
    feed = ChangeFeed.open(opened.uri, options.storage_options(option))
    chosen = options.names(columns)
    names = feed.schema.names if chosen is None else [*chosen, *FEED_COLUMNS]
    unknown = [name for name in names if name not in feed.schema.names]
    if unknown:
        raise typer.BadParameter(f"the table has no column {', '.join(unknown)}", param_hint="--columns")
    show = console.print_rows if json else _print_changes
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
    """The last ``limit`` changes of each shard; changes of different shards have no order."""
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


def _print_changes(batch: pa.RecordBatch) -> None:
    out = console.out()
    for row in batch.to_pylist():
        kind, shard = row.pop("_change_type"), row.pop("_shard_id")
        position, _ = row.pop("_wal_position"), row.pop("_writer_epoch")
        mark, colour = _MARKS[kind]
        line = Text.assemble((f"{mark} {kind:<6} ", colour), (f"{shard[:8]}:{position:<5} ", "dim"))
        shown = {name: value for name, value in row.items() if value is not None or kind != "delete"}
        for place, (name, value) in enumerate(shown.items()):
            line.append(("  " if place else "") + f"{console.visible(name)}=", style="dim")
            line.append_text(console.cell(value))
        line.truncate(max(out.width, 20), overflow="ellipsis")
        out.print(line, soft_wrap=True)
    sys.stdout.flush()
