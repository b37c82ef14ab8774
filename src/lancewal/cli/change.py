"""``lancewal delete`` and ``update``: change rows by key or by condition."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lancewal.cli import console, options
from lancewal.cli.exits import REFUSED, CommandError, guarded, resumable
from lancewal.cli.rows import parse_keys

if TYPE_CHECKING:
    import pyarrow as pa

    from lancewal.table import Table

#: Commands that read rows call this option ``--filter``, so that is accepted too.
_WHERE = ("--where", "--filter", "-f")
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@guarded
def delete(
    table: options.TableArgument,
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY…]", help="Keys, as for lancewal get."),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(*_WHERE, metavar="SQL", help="Delete all rows that match instead."),
    ] = None,
    yes: Yes = False,
    take_over: options.TakeOverOption = options.TakeOver.WHEN_GONE,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Delete rows, by key or by condition.

    Deletes are durable and visible at once. If another process writes to the table, it carries them out, and
    they are newer than all rows that it has taken before. With --take-over now the command takes over its
    shards instead.
    """
    if bool(keys) == (where is not None):
        raise typer.BadParameter("pass keys, or --where")
    opened = options.open_table(table, option)
    if keys:
        _refuse_conditions(opened, keys)
        count = _delete_keys(opened, [parse_keys(opened, keys)], take_over, option)
    else:
        matching = _keys_matching(opened, str(where), ask=not yes)
        with resumable("what was deleted stays deleted"):
            count = _delete_keys(opened, matching, take_over, option)
    console.tell(f"{console.plural(count, 'key')} deleted", {"deleted": count}, json=json)


def _refuse_conditions(table: Table, keys: list[str]) -> None:
    from lancewal.writer import is_condition

    for key in keys:
        if is_condition(key, table.schema):
            raise typer.BadParameter(
                f"{key!r} is a condition, and keys are expected here; for conditions use --where or --filter",
                param_hint="KEY",
            )


def _delete_keys(
    table: Table, keys: Iterable[Any], take_over: options.TakeOver, option: list[str] | None
) -> int:
    """Delete through the shards' owners if there are any, otherwise with our own writer."""
    from lancewal.base import BaseTable
    from lancewal.service import delete_through_owners, is_owned

    base = BaseTable.open(table.uri, options.storage_options(option))
    store = base.writer_store()
    if take_over is options.TakeOver.WHEN_GONE and is_owned(store):
        return delete_through_owners(base, store, keys)
    with table.writer(take_over=take_over.value) as writer:
        return sum(writer.delete(some).num_rows for some in keys)


def _keys_matching(table: Table, where: str, *, ask: bool) -> Iterator[pa.RecordBatch]:
    """The keys of the rows that match, after the user has agreed."""
    if not table.primary_key:
        raise CommandError("this table has no primary key; delete with lance.LanceDataset.delete instead", 2)
    scan = table.scan(columns=list(table.primary_key), filter=where)
    if ask:
        _confirm("Delete", table, scan.count_rows())
    return iter(scan.to_batches())


@guarded
def update(
    table: options.TableArgument,
    where: Annotated[str, typer.Option(*_WHERE, metavar="SQL", help="Which rows.")],
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="COLUMN=VALUE",
            help="A column and its new value; null, a JSON list or object, or a value as text. Repeat it.",
        ),
    ] = None,
    expressions: Annotated[
        list[str] | None,
        typer.Option(
            "--set-sql",
            metavar="COLUMN=SQL",
            help="A column and an expression over the row as it was, as in n='n + 1'. Repeat it.",
        ),
    ] = None,
    yes: Yes = False,
    take_over: options.TakeOverOption = options.TakeOver.WHEN_GONE,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Set columns of the rows that match a condition.

    --set gives all rows the same value, --set-sql gives each row the value of an expression. Rows are read
    from one state of the table and written again. Ends with code 5 if another process writes to their shards.
    With --take-over now the command takes over the shards instead.
    """
    opened = options.open_table(table, option)
    new, computed = _new_values(opened, values or []), options.pairs(expressions or [], "--set-sql")
    if not new and not computed:
        raise typer.BadParameter("pass --set or --set-sql")
    if not yes:
        _confirm("Update", opened, opened.count_rows(where))
    with (
        resumable("rows that were updated stay updated"),
        opened.writer(take_over=take_over.value) as writer,
    ):
        count = writer.update(where, new, set_sql=computed).num_rows
    console.tell(f"{console.plural(count, 'row')} updated", {"updated": count}, json=json)


def _new_values(table: Table, texts: list[str]) -> dict[str, Any]:
    schema = table.schema
    given = options.pairs(texts, "--set")
    unknown = [name for name in given if name not in schema.names]
    if unknown:
        raise typer.BadParameter(f"the table has no column {', '.join(unknown)}", param_hint="--set")
    return {name: _new_value(schema.field(name), text) for name, text in given.items()}


def _new_value(field: pa.Field, text: str) -> Any:
    """Parse a text as a value of a column: null, lists and objects as JSON, the rest by the column's type.

    In a text column, a JSON string stands for its content, so that the text ``null`` can be written as
    ``"null"``. Any other text stands for itself.
    """
    import pyarrow as pa

    try:
        value = jsonlib.loads(text)
    except ValueError:
        value = text
    if value is None or isinstance(value, list | dict):
        return value
    try:
        return pa.scalar(value if isinstance(value, str) else text).cast(field.type).as_py()
    except (pa.ArrowException, ValueError):
        raise typer.BadParameter(
            f"{text!r} is no value of the column {field.name} ({field.type})", param_hint="--set"
        ) from None


def _confirm(verb: str, table: Table, count: int) -> None:
    asked = f"{verb} {console.plural(count, 'row')} of {console.visible(table.uri)}?"
    try:
        # click writes a space to standard output, which is for the result alone.
        with redirect_stdout(sys.stderr):
            agreed = typer.confirm(asked, err=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        raise CommandError(
            "nobody was there to answer; pass --yes to do it without a question", REFUSED
        ) from None
    if not agreed:
        raise typer.Abort
