"""Counts the requests of every operation: ``python -m bench.requests`` prints them beside those stored.

``--write`` stores them in ``src/lancewal/cost/requests.json``, where ``lancewal cost`` finds them, and
writes the tables of ``docs/cost.md``. Arguments choose operations by a part of their name; the others keep
their figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import lancewal.cost
from bench import chain
from bench.far import Cost, FarStorage
from bench.operations import OPERATIONS, Lab, Operation
from lancewal.cost import Line, Load, Measured, Prices, limits, measured, per_day, per_idle_day, per_million

STORED = Path(lancewal.cost.__file__).parent / "requests.json"
PAGE = Path(__file__).parent.parent / "docs" / "cost.md"
END = "<!-- end of counted -->"
TRIES = 2
#: The load that the page gives as an example.
EXAMPLE = Load(shards=1000, bytes_per_day=1e12, writers=100)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.requests", description=__doc__)
    parser.add_argument("operations", nargs="*", help="parts of names; all operations by default")
    parser.add_argument("--write", action="store_true", help="store the figures and write docs/cost.md")
    parser.add_argument("--tries", type=int, default=TRIES, help=f"of which the least counts ({TRIES})")
    options = parser.parse_args(arguments)
    chosen = [
        each
        for each in OPERATIONS
        if not options.operations or any(n in each.name for n in options.operations)
    ]
    before = dict(measured()) if STORED.exists() else {}
    console = Console()
    counted: dict[str, Measured] = {}
    with FarStorage() as far, Lab(far) as lab:
        for each in chosen:
            with console.status(each.name):
                counted[each.name] = count(lab, each, options.tries)
    console.print(_compared(before, counted))
    if options.write:
        figures = {**before, **counted}
        write([figures[each.name] for each in OPERATIONS if each.name in figures])


def count(lab: Lab, operation: Operation, tries: int = TRIES) -> Measured:
    cost, peer = lab.measure(operation, tries), lab.measure_peer(operation, tries)
    plain = None if peer is None else (peer.requests, peer.depth)
    return Measured(
        operation.name,
        operation.shards,
        cost.kinds,
        cost.depth,
        cost.bytes_read,
        cost.bytes_written,
        plain,
    )


def write(figures: Sequence[Measured]) -> None:
    lines = [json.dumps(each.to_dict(), ensure_ascii=False) for each in figures]
    STORED.write_text("[\n" + ",\n".join(f"  {line}" for line in lines) + "\n]\n", encoding="utf-8")
    measured.cache_clear()
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def exceeds(operation: Operation, cost: Cost, stored: Measured) -> list[str]:
    """What an operation needs more of than is stored."""
    found = []
    if cost.requests > stored.requests * operation.tolerance:
        found.append(
            f"{cost.requests} requests, not {stored.requests}: {cost.kinds}, not {dict(stored.kinds)}"
        )
    # What many shards do side by side overlaps less on a busy machine.
    slack = max(operation.tolerance, 1.25 if operation.shards > 1 else 1.0)
    if cost.depth > stored.depth * slack:
        found.append(f"a depth of {cost.depth}, not {stored.depth}")
    return found


def meets_goal(operation: Operation, figures: Measured) -> bool | None:
    """Whether the goal is met; ``None`` without one."""
    goal = operation.goal
    if goal.depth is not None:
        beyond = figures.plain[1] if operation.beyond_peer and figures.plain is not None else 0
        return figures.depth <= goal.depth + beyond
    return None if goal.requests is None else figures.requests <= goal.requests


# ---------------------------------------------------------------------- the page


def with_tables(page: str) -> str:
    """``page`` with the tables between its marks made anew from the stored figures."""
    for name, table in (
        ("requests", request_table()),
        ("chain", chain.table(chain.stored())),
        ("per million", money_table(per_million(Load()))),
        ("per idle day", money_table(per_idle_day(Load(shards=64)))),
        ("example", money_table(per_day(EXAMPLE))),
        ("limits", limit_table(EXAMPLE)),
    ):
        start = f"<!-- counted: {name} -->"
        before, found, rest = page.partition(start)
        if not found or END not in rest:
            raise ValueError(f"docs/cost.md has no place for {name}")
        page = "\n".join([before + start, *table, END + rest.partition(END)[2]])
    return page


def request_table() -> list[str]:
    figures = measured()
    lines = [
        "| operation | requests | depth | kinds | read | written | plain Lance | goal |",
        "|---|--:|--:|---|--:|--:|--:|---|",
    ]
    for operation in OPERATIONS:
        each = figures[operation.name]
        kinds = ", ".join(f"{number} {kind}" for kind, number in each.kinds.items())
        plain = "" if each.plain is None else f"{each.plain[0]} / {each.plain[1]}"
        met = {True: ", met", False: ", missed", None: ""}[meets_goal(operation, each)]
        lines.append(
            f"| {operation.name} | {each.requests:,} | {each.depth} | {kinds} | {_size(each.bytes_read)} "
            f"| {_size(each.bytes_written)} | {plain} | {operation.goal.text}{met} |"
        )
    return lines


def money_table(bill: Sequence[Line]) -> list[str]:
    prices = Prices()
    lines = ["| | PUT, LIST | GET, HEAD | price |", "|---|--:|--:|--:|"]
    for line in bill:
        lines.append(f"| {line.name} | {line.puts:,.0f} | {line.gets:,.0f} | {_price(line, prices)} |")
    return lines


def limit_table(load: Load) -> list[str]:
    lines = ["| limit | the load | at most | used | what to set |", "|---|--:|--:|--:|---|"]
    for limit in limits(load):
        unit = f" {limit.unit}" if limit.unit else ""
        advice = limit.advice if limit.share > 1 else ""
        lines.append(
            f"| {limit.name} | {limit.value:,.4g}{unit} | {limit.most:,.4g} | {limit.share:.0%} | {advice} |"
        )
    return lines


def _price(line: Line, prices: Prices) -> str:
    price = line.price(prices)
    return f"${price:,.2f}" if price >= 0.1 or not price else f"${price:.2g}"


def _size(number: int) -> str:
    return f"{number:,} B" if number < 1000 else f"{number / 1000:,.0f} kB"


def _compared(before: Mapping[str, Measured], now: Mapping[str, Measured]) -> Table:
    table = Table("operation", "requests / depth", "stored", "plain Lance", "goal")
    goals = {each.name: each for each in OPERATIONS}
    for name, each in now.items():
        was = before.get(name)
        met = meets_goal(goals[name], each)
        table.add_row(
            name,
            f"{each.requests} / {each.depth}",
            "" if was is None else f"{was.requests} / {was.depth}",
            "" if each.plain is None else f"{each.plain[0]} / {each.plain[1]}",
            "" if met is None else f"{goals[name].goal.text}: {'met' if met else 'missed'}",
        )
    return table


if __name__ == "__main__":
    main()
