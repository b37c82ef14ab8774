"""``lancewal get`` and ``lancewal delete``: rows by key."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lancewal.cli import console, options
from lancewal.cli import console as figures
from lancewal.cli import console as rows
from lancewal.cli.exits import NOT_FOUND, CommandError, guarded, resumable

if TYPE_CHECKING:
    import pyarrow as pa

    from lancewal.table import Table

Keys = Annotated[
    list[str],
    typer.Argument(
        metavar="KEY…",
        help='Keys. Where a key has several columns, each as JSON: \'{"tenant": 3, "id": 17}\'.',
        show_default=False,
    ),
]


@guarded
def get(
    table: options.TableArgument,
    keys: Keys,
    columns: options.Columns = None,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Show rows by key, in their newest version.

    Ends with code 4 when one of the keys has no row.
    """
    opened = options.open_table(table, option)
    found = opened.lookup(parse_keys(opened, keys), columns=options.names(columns))
    if json:
        for row in rows.json_rows(found.table):
            console.print_json(row, indent=None)
    elif found.table.num_rows:
        console.out().print(rows.table_of(found.table))
    missing = [key for key, was_found in zip(keys, found.found.tolist(), strict=True) if not was_found]
    if missing:
        raise CommandError(f"no row with key {', '.join(missing)}", NOT_FOUND)


@guarded
def delete(
    table: options.TableArgument,
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY…]", help="Keys, as for lancewal get.", show_default=False),
    ] = None,
    filter: Annotated[
        str | None,
        typer.Option(
            "--filter", "-f", metavar="SQL", help="Delete all rows that match instead.", show_default=False
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Delete rows, by key or by filter.

    Durable and visible at once. The shards are taken over for a moment: a writer that another
    process has open on them is fenced and has to be opened again.
    """
    if bool(keys) == (filter is not None):
        raise typer.BadParameter("pass keys, or --filter")
    opened = options.open_table(table, option)
    if keys:
        _refuse_conditions(opened, keys)
        with opened.writer() as writer:
            count = writer.delete(parse_keys(opened, keys)).num_rows
    else:
        count = _delete_matching(opened, str(filter), ask=not yes)
    if json:
        console.print_json({"deleted": count})
    else:
        console.out().print(f"[green]✓[/] {figures.plural(count, 'key')} deleted")


def _refuse_conditions(table: Table, keys: list[str]) -> None:
    from lancewal.writer import is_condition

    for key in keys:
        if is_condition(key, table.schema):
            raise typer.BadParameter(
                f"{key!r} is a condition, and keys are expected here; pass conditions with --filter",
                param_hint="KEY",
            )


def _delete_matching(table: Table, filter: str, *, ask: bool) -> int:
    if not table.primary_key:
        raise CommandError("this table has no primary key; delete with lance.LanceDataset.delete instead", 2)
    scan = table.scan(columns=list(table.primary_key), filter=filter)
    if ask:
        number = scan.count_rows()
        typer.confirm(
            f"Delete {figures.plural(number, 'row')} of {console.visible(table.uri)}?", abort=True, err=True
        )
    count = 0
    with resumable("what was deleted stays deleted"), table.writer() as writer:
        for batch in scan.to_batches():
            count += writer.delete(batch).num_rows
    return count


def parse_keys(table: Table, texts: list[str]) -> Any:
    """Keys in the table's types: a list, or a table where the key has several columns."""
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
