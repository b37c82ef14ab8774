"""``lancewal query``: rows by filter, by vector, by words."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lancewal.cli import console, options
from lancewal.cli import console as figures
from lancewal.cli import console as rows
from lancewal.cli.exits import NOT_FOUND, CommandError, guarded
from lancewal.cli.keys import parse_keys

if TYPE_CHECKING:
    import pyarrow as pa

    from lancewal.reader import Scan
    from lancewal.table import Table

_TERMINAL_ROWS = 20
_DEFAULT_K = 10


@guarded
def query(
    table: options.TableArgument,
    filter: Annotated[
        str | None,
        typer.Option(
            "--filter", "-f", metavar="SQL", help="Condition, as Lance takes it.", show_default=False
        ),
    ] = None,
    columns: options.Columns = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            min=0,
            help=f"Rows at most: {_TERMINAL_ROWS} by default, all with --json; of a search {_DEFAULT_K}.",
            show_default=False,
        ),
    ] = None,
    offset: Annotated[int, typer.Option("--offset", min=0, help="Rows to skip.")] = 0,
    vector: Annotated[
        str | None,
        typer.Option(
            "--vector",
            metavar="COLUMN=VECTOR",
            help="Nearest rows. VECTOR is a JSON list, @FILE with one, or key:KEY for the vector of a row.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="l2, cosine or dot; of the index by default.", show_default=False),
    ] = None,
    words: Annotated[
        str | None,
        typer.Option(
            "--words", metavar="COLUMN=TEXT", help="Rows that match words best.", show_default=False
        ),
    ] = None,
    count: Annotated[bool, typer.Option("--count", help="Print only how many rows there are.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print what would be read instead.")] = False,
    source: Annotated[
        bool, typer.Option("--source", help="Add the level and the shard of each row.")
    ] = False,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Read the merged view: base table, SSTables and WAL, newest version of each key.

    With --json one row a line.
    """
    if vector and words:
        raise typer.BadParameter("choose --vector or --words")
    if (vector or words) and (count or explain or source or offset):
        raise typer.BadParameter("--count, --explain, --source and --offset are not for searches")
    opened = options.open_table(table, option)
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
    if explain:
        console.out().print(scan.explain(), markup=False, soft_wrap=True)
    elif json:
        _print_lines(scan)
    else:
        _show(scan.to_table(), limited=limit is None)


def _print_lines(scan: Scan) -> None:
    for batch in scan.to_batches():
        for row in rows.json_rows(batch):
            sys.stdout.write(console.json_text(row) + "\n")
    sys.stdout.flush()


def _show(found: pa.Table, *, json: bool = False, limited: bool = False) -> None:
    if json:
        for row in rows.json_rows(found):
            console.print_json(row, indent=None)
        return
    more = limited and found.num_rows > _TERMINAL_ROWS
    found = found.slice(0, _TERMINAL_ROWS) if more else found
    if found.num_rows:
        console.out().print(rows.table_of(found))
    ending = "; there are more, see --limit" if more else ""
    console.note(f"[dim]{figures.plural(found.num_rows, 'row')}{ending}[/]")


def _search(
    table: Table,
    vector: str | None,
    words: str | None,
    k: int,
    filter: str | None,
    columns: list[str] | None,
    metric: str | None,
) -> pa.Table:
    if words is not None:
        column, text = _column_and_rest(words, "--words", "COLUMN=TEXT")
        return table.full_text_search(column, text, k, filter=filter, columns=columns)
    column, text = _column_and_rest(str(vector), "--vector", "COLUMN=VECTOR")
    return table.vector_search(
        column, _vector(table, column, text), k, filter=filter, columns=columns, metric=metric
    )


def _column_and_rest(text: str, option: str, form: str) -> tuple[str, str]:
    column, equals, rest = text.partition("=")
    if not equals or not column or not rest:
        raise typer.BadParameter(f"{text!r} is not {form}", param_hint=option)
    return column, rest


def _vector(table: Table, column: str, text: str) -> Any:
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
