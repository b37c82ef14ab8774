"""``lancewal cost``: the requests and costs of a table on object storage, and the limits of a load."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lancewal.cli import console, options
from lancewal.cli.exits import guarded

if TYPE_CHECKING:
    from lancewal.cost import Limit, Line, Load, Prices

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGTP]?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
#: A limit counts as near above this share.
_NEAR = 0.5


def parse_size(text: str, option: str) -> float:
    """
    >>> parse_size("1TB", "--per-day"), parse_size("500", "--row-size"), parse_size("1.5 kB", "--row-size")
    (1000000000000.0, 500.0, 1500.0)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"{text!r} is no size such as 500, 1kB, 20GB or 1TB", param_hint=option)
    return float(match[1]) * 1000.0 ** _POWERS[match[2].upper()]


@guarded
def cost(
    shards: Annotated[int, typer.Option("--shards", min=1, help="Shards of the table.")] = 8,
    per_day: Annotated[str, typer.Option("--per-day", metavar="SIZE", help="Rows in a day.")] = "10GB",
    row_size: Annotated[str, typer.Option("--row-size", metavar="SIZE", help="One row.")] = "1kB",
    put_rows: Annotated[int, typer.Option("--put-rows", min=1, help="Rows in a put.")] = 1000,
    writers: Annotated[
        int, typer.Option("--writers", min=1, help="Processes or Spark executors that write.")
    ] = 1,
    memory: Annotated[str, typer.Option("--memory", metavar="SIZE", help="Of each of them.")] = "4GB",
    poll: Annotated[
        str, typer.Option("--poll", metavar="DURATION", help="How often a feed and a reader look.")
    ] = "5s",
    put_price: Annotated[float, typer.Option("--put-price", min=0, help="$ per 1,000 PUT or LIST.")] = 0.005,
    get_price: Annotated[float, typer.Option("--get-price", min=0, help="$ per 1,000 GET or HEAD.")] = 0.0004,
    storage_price: Annotated[
        float, typer.Option("--storage-price", min=0, help="$ per GB and month.")
    ] = 0.023,
    json: options.Json = False,
) -> None:
    """Show what a table costs on object storage, and which limits a load reaches first.

    Computed from measured request counts of each operation; no table is read. The default prices are
    those of S3 Standard in us-east-1.
    """
    from lancewal import cost as room

    load = room.Load(
        shards=shards,
        bytes_per_day=parse_size(per_day, "--per-day"),
        row_bytes=parse_size(row_size, "--row-size"),
        rows_per_put=put_rows,
        writers=writers,
        memory=parse_size(memory, "--memory"),
        poll_seconds=console.parse_duration(poll, "--poll").total_seconds(),
    )
    prices = room.Prices(put_price, get_price, storage_price)
    bills = {
        "per_million": room.per_million(load),
        "per_idle_day": room.per_idle_day(load),
        "per_day": room.per_day(load),
    }
    found = room.limits(load)
    if json:
        console.print_json(
            {
                **{name: [line.to_dict(prices) for line in bill] for name, bill in bills.items()},
                "storage_per_month": _month_of_rows(load, prices),
                "limits": [limit.to_dict() for limit in found],
            }
        )
        return
    console.out().print(cost_view(load, prices, bills, found))


def cost_view(
    load: Load, prices: Prices, bills: Mapping[str, Sequence[Line]], limits: Sequence[Limit]
) -> Group:
    day = bills["per_day"]
    total = sum(line.price(prices) for line in day)
    kept = _month_of_rows(load, prices)
    size, rows = console.size(load.bytes_per_day), console.size(load.row_bytes)
    writers = console.plural(load.writers, "writer")
    looks = f"a look every {console.duration(load.poll_seconds)}"
    return Group(
        *_bills(
            {
                "a million …": bills["per_million"],
                f"an idle day, {looks}": bills["per_idle_day"],
                f"a day of {size} in rows of {rows}": day,
            },
            prices,
        ),
        Text(f"together {_price(total)} a day; to keep a month of rows {_price(kept)} a month\n"),
        _limits(f"limits, with {console.plural(load.shards, 'shard')} and {writers}", limits),
        *_advice(limits),
    )


def _month_of_rows(load: Load, prices: Prices) -> float:
    return load.bytes_per_day * 30 / 1e9 * prices.storage


def _table(columns: Mapping[str, int]) -> Table:
    """A table with columns by name and width. A narrow terminal wraps names, but never cuts figures."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for number, (name, width) in enumerate(columns.items()):
        if number:
            table.add_column(name, justify="right", no_wrap=True, min_width=width)
        else:
            table.add_column(name.ljust(width))
    return table


def _bills(bills: Mapping[str, Sequence[Line]], prices: Prices) -> list[RenderableType]:
    """One table per bill, with aligned columns."""
    names = ("PUT, LIST", "GET, HEAD", "written", "price")
    cells = {
        title: [
            (
                line.name,
                _number(line.puts),
                _number(line.gets),
                console.size(line.bytes_written) if line.bytes_written else "",
                _price(line.price(prices)),
            )
            for line in lines
        ]
        for title, lines in bills.items()
    }
    heads = [(title, *names) for title in bills]
    widths = [max(map(len, column)) for column in zip(*heads, *itertools.chain(*cells.values()), strict=True)]
    found: list[RenderableType] = []
    for head, rows in zip(heads, cells.values(), strict=True):
        table = _table(dict(zip(head, widths, strict=True)))
        for row in rows:
            table.add_row(*row)
        found += [table, Text()]
    return found


def _limits(title: str, limits: Sequence[Limit]) -> RenderableType:
    table = _table({title: 0, "now": 0, "at most": 0, "used": 0})
    for limit in limits:
        style = "red" if limit.share > 1 else "yellow" if limit.share > _NEAR else ""
        unit = "" if limit.unit in ("", "bytes") else f" {limit.unit}"
        figures = [
            console.size(n) if limit.unit == "bytes" else _number(n) for n in (limit.value, limit.most)
        ]
        table.add_row(f"{limit.name}{unit}", *figures, Text(_share(limit.share), style=style))
    return table


def _advice(limits: Sequence[Limit]) -> list[RenderableType]:
    over = [limit for limit in limits if limit.share > 1]
    if not over:
        return [Text(f"\nno limit is met; the first would be: {limits[0].name}")]
    return [Text("\nwhat to set"), *(Text(f"• {limit.name}: {limit.advice}") for limit in over)]


def _price(dollars: float) -> str:
    """
    >>> _price(0), _price(0.0034), _price(0.5), _price(1234.567)
    ('$0', '$0.0034', '$0.50', '$1,234.57')
    """
    return "$0" if not dollars else f"${dollars:.2g}" if 0.0001 <= dollars < 0.1 else f"${dollars:,.2f}"


def _number(value: float) -> str:
    """
    >>> _number(0), _number(0.25), _number(33.3), _number(1234.5)
    ('0', '0.25', '33', '1,234')
    """
    return f"{value:.2g}" if 0 < value < 9.5 else f"{value:,.0f}"


def _share(share: float) -> str:
    """
    >>> _share(0.004), _share(0.5), _share(3.21)
    ('<1%', '50%', '321%')
    """
    return "<1%" if share < 0.01 else f"{share:.0%}"
