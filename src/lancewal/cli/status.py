"""``lancewal status``: shows the state of a table, for any terminal of at least 60 columns."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lancewal.cli import console, options
from lancewal.cli.console import visible
from lancewal.cli.exits import guarded

if TYPE_CHECKING:
    from lancewal.status import Lag, ShardState, TableStatus

#: From this width on there is space for whole shard ids, generations and bytes.
_WIDE = 120
#: From this width on there is space for the beginnings of shard ids.
_MEDIUM, _SHORT_ID = 80, 8
_HISTORY = 60
_SHOWN_INDEXES = 2
_SHOWN_OWNERS = 4
_SHOWN_CHECKPOINTS = 4
#: Lines of a full screen that are not shards.
_OTHER_LINES = 23


@dataclass
class History:
    """The earlier looks, from which the growth rate of each shard's log is computed."""

    _tips: dict[UUID, tuple[datetime, int]] = field(default_factory=dict)
    rates: dict[UUID, float] = field(default_factory=dict)
    totals: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))

    def add(self, status: TableStatus) -> None:
        known = bool(self._tips)
        for shard in status.shards:
            before, tip = self._tips.get(shard.shard_id, (status.taken_at, shard.wal_tip))
            seconds = (status.taken_at - before).total_seconds()
            self.rates[shard.shard_id] = (shard.wal_tip - tip) / seconds if seconds > 0 else 0.0
            self._tips[shard.shard_id] = (status.taken_at, shard.wal_tip)
        if known:
            self.totals.append(sum(self.rates.values()))


def status_view(
    status: TableStatus,
    *,
    width: int,
    height: int | None = None,
    history: History | None = None,
    every: float | None = None,
) -> Group:
    """The whole view; with a ``height`` only as many shards as fit, those that lag the most."""
    parts: list[RenderableType] = [_head(status, width), Text(), _waiting(status, width)]
    if history is not None:
        parts += [_writes(history, width)]
    parts += _owners(status)
    parts += _upkeep(status)
    parts += _checkpoints(status)
    room = None if height is None else max(3, height - _OTHER_LINES)
    parts += [Text(), _shards(status, width, room, history)]
    if every is not None:
        when = status.taken_at.astimezone().strftime("%H:%M:%S")
        parts += [Text(), Text(f"{when}, every {console.duration(every)}; Ctrl-C ends", style="dim")]
    return Group(*parts)


def _head(status: TableStatus, width: int) -> RenderableType:
    names = ", ".join(status.primary_key)
    key = f"key {names}" if len(status.primary_key) == 1 else f"key ({names})" if names else "append-only"
    base = (
        f"{console.plural(status.base_rows, 'row')} in {console.plural(status.base_fragments, 'fragment')}, "
        f"version {status.base_version}"
    )
    shards = console.plural(len(status.shards), "shard")
    title = Text(visible(status.uri), style="bold")
    title.truncate(max(width - 6, 10), overflow="ellipsis")
    lines = Text.assemble(
        ("table  ", "dim"), visible(f"{key}, {status.sharding}, {shards}\n"), ("base   ", "dim"), base
    )
    return Group(Rule(title, align="left", style="dim"), lines)


def _waiting(status: TableStatus, width: int) -> Table:
    """The lags in the order in which rows move: WAL, SSTables, base table, indexes; and the garbage."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    for _ in range(3):
        grid.add_column(justify="right")
    grid.add_column()
    now = status.taken_at
    flush, compact = status.unflushed, status.uncompacted
    grid.add_row(
        "WAL → SSTables",
        console.plural(flush.count, "entry", "entries"),
        "",
        _bytes(flush),
        _age(flush, now),
        style=_dim_when(not flush.count),
    )
    grid.add_row(
        "SSTables → base",
        console.plural(compact.count, "SSTable"),
        "" if compact.rows is None else console.plural(compact.rows, "row"),
        _bytes(compact),
        _age(compact, now),
        style=_dim_when(not compact.count),
    )
    garbage = status.garbage
    if garbage.count:
        # No age is shown: a file's age says how old its rows are, not since when nobody needs it.
        grid.add_row("garbage", console.plural(garbage.count, "file"), "", _bytes(garbage), "", style="dim")
    behind = sorted((i for i in status.indexes if i.rows_behind), key=lambda index: -index.rows_behind)
    named = console.plural(len(status.indexes), "index", "indexes")
    if status.indexes and not behind:
        grid.add_row("base → indexes", named, "", "", "nothing waits", style="dim")
    for place, index in enumerate(behind[:_SHOWN_INDEXES]):
        rows = console.plural(index.rows_behind, "row")
        first = ("base → indexes", named) if place == 0 else ("", "")
        grid.add_row(*first, rows, "", Text(visible(f"not in {index.name}")))
    return grid


def _owners(status: TableStatus) -> list[RenderableType]:
    """A line for each process that writes, those with the most shards first."""
    lines: list[RenderableType] = []
    for owner in sorted(status.owners, key=lambda each: -len(each.shards))[:_SHOWN_OWNERS]:
        shards = console.plural(len(owner.shards), "shard")
        where = f", at {owner.address}" if owner.address else ""
        heard = f"heard of {console.duration(owner.age.total_seconds())} ago"
        text = f"process {owner.pid} on {owner.host}{where}: {shards}, {heard}"
        gone = (", gone", "yellow") if owner.gone else ""
        lines.append(Text.assemble(("writes           ", "dim"), visible(text), gone))
    hidden = len(status.owners) - len(lines)
    return [*lines, *([Text(f"… and {console.plural(hidden, 'owner')} more", style="dim")] if hidden else [])]


def _upkeep(status: TableStatus) -> list[RenderableType]:
    """What is due, and a line for each kind of work that was done or is running."""
    from lancewal.upkeep import plan_upkeep

    due = ", ".join(task.work for task in plan_upkeep(status)) or "nothing is due"
    lines: list[RenderableType] = [Text.assemble(("upkeep           ", "dim"), due)]
    own = _own_settings(status)
    if own:
        lines.append(Text.assemble(("                 ", "dim"), f"kept within {own}"))
    for duty in status.duties:
        ago = console.duration(max(0.0, (status.taken_at - duty.at).total_seconds()))
        where = f"process {duty.pid} on {duty.host}"
        text = f"{duty.work} {ago} ago by {where}: {duty.done or 'nothing was done'}"
        if duty.under_way:
            text = f"{duty.work} under way for {ago}, by {where}"
        failed = (f", failed {console.plural(duty.failures, 'time')}", "yellow") if duty.failures else ""
        lines.append(Text.assemble(("                 ", "dim"), visible(text), failed))
    return lines


def _own_settings(status: TableStatus) -> str:
    """The table's upkeep settings that differ from the defaults."""
    usual, own = type(status.upkeep)().to_dict(), status.upkeep.to_dict()
    shown = []
    for name, value in own.items():
        if value != usual[name]:
            is_age = isinstance(getattr(status.upkeep, name), timedelta)
            text = console.duration(value) if is_age else console.size(value) if "bytes" in name else value
            shown.append(f"{name} {text}")
    return ", ".join(shown)


def _checkpoints(status: TableStatus) -> list[RenderableType]:
    """A line for each checkpoint, the oldest first, because they hold back the most."""
    lines: list[RenderableType] = []
    for each in status.checkpoints[:_SHOWN_CHECKPOINTS]:
        kept = each.checkpoint
        ago = console.duration(max(0.0, (status.taken_at - kept.created).total_seconds()))
        holds = f"holds back {console.plural(each.held.count, 'file')} ({console.size(each.held.num_bytes)})"
        until = "" if kept.expires is None else f", until {kept.expires:%Y-%m-%d %H:%M} UTC"
        text = f"{kept.name}, {ago} old, base version {kept.version}, {holds}{until}"
        if kept.problem is not None:
            text = f"{kept.name}, {ago} old: {kept.problem}"
        style = "" if kept.problem is None else "red"
        lines.append(Text.assemble(("checkpoint       ", "dim"), (visible(text), style)))
    hidden = len(status.checkpoints) - len(lines)
    more = [Text(f"… and {console.plural(hidden, 'checkpoint')} more", style="dim")] if hidden else []
    return [*lines, *more]


def _writes(history: History, width: int) -> Text:
    now = history.totals[-1] if history.totals else 0.0
    bars = console.sparkline(list(history.totals)[-max(width - 40, 10) :])
    return Text.assemble(("WAL growth       ", "dim"), f"{console.rate(now)} ", (bars, "cyan"))


def _shards(status: TableStatus, width: int, room: int | None, history: History | None) -> Group:
    wide = width >= _WIDE
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    # ``lancewal seal`` takes the beginning of an id; a shard without a value has it for its name.
    with_ids = wide or (width >= _MEDIUM and any(shard.values for shard in status.shards))
    table.add_column("\nshard", no_wrap=True)
    if with_ids:
        table.add_column("\nid", no_wrap=True, style="dim")
    table.add_column("\nepoch", justify="right")
    growth = [] if history is None else ["WAL\n+/s"]
    for name in (*growth, "WAL\nentries", "WAL\nbytes", "WAL\nage", "SST\ncount"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("SST\ngenerations", no_wrap=True)
    for name in ("SST\nrows", *(["SST\nbytes"] if wide else []), "SST\nage"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("\nstate", no_wrap=True)
    shown = _most_behind(status, room)
    for shard in shown:
        table.add_row(*_cells(shard, status.taken_at, wide, with_ids, history))
    hidden = len(status.shards) - len(shown)
    more = [Text(f"… and {console.plural(hidden, 'shard')} with less to do", style="dim")] if hidden else []
    if not status.shards:
        more = [Text("no shards yet: the first row of each makes it", style="dim")]
    return Group(table, *more)


def _cells(
    shard: ShardState, now: datetime, wide: bool, with_ids: bool, history: History | None
) -> list[Text]:
    flush, compact = shard.unflushed, shard.uncompacted
    cells = [Text(_name(shard))]
    if with_ids:
        cells.append(Text(str(shard.shard_id)[: None if wide else _SHORT_ID]))
    cells.append(Text(str(shard.epoch)))
    if history is not None:
        rate = history.rates.get(shard.shard_id, 0.0)
        cells.append(_quiet(console.rate(rate).removesuffix("/s"), rate == 0))
    cells += [
        _quiet(console.count(flush.count), not flush.count),
        _quiet(_bytes(flush), not flush.count),
        Text(console.duration(flush.seconds(now)) if flush.count else ""),
        _quiet(console.count(compact.count), not compact.count),
    ]
    if wide:
        cells.append(Text(_generations(shard)))
    cells.append(_quiet("?" if compact.rows is None else console.count(compact.rows), not compact.count))
    if wide:
        cells.append(_quiet(_bytes(compact), not compact.count))
    cells.append(Text(console.duration(compact.seconds(now)) if compact.count else ""))
    state = shard.status.name.lower()
    cells.append(Text(state, style="yellow" if state == "sealed" else ""))
    return cells


def _name(shard: ShardState) -> str:
    values = list(shard.values.values())
    return visible(", ".join(map(str, values))) if values else str(shard.shard_id)[:_SHORT_ID]


def _generations(shard: ShardState) -> str:
    """Which generations wait, and the newest generation that the base holds."""
    held = shard.compacted_generation
    waiting = [number for number in shard.generations if number > held]
    if not waiting:
        return f"base has {held}" if held else "none yet"
    span = f"{waiting[0]}" if len(waiting) == 1 else f"{waiting[0]} to {waiting[-1]}"
    return f"{span}, base has {held}"


def _most_behind(status: TableStatus, room: int | None) -> list[ShardState]:
    if room is None or len(status.shards) <= room:
        return list(status.shards)
    by_lag = sorted(
        status.shards,
        key=lambda shard: (-shard.unflushed.num_bytes - shard.uncompacted.num_bytes, _name(shard)),
    )
    chosen = {shard.shard_id for shard in by_lag[:room]}
    return [shard for shard in status.shards if shard.shard_id in chosen]


def _bytes(lag: Lag) -> str:
    return ("≈" if lag.estimated else "") + console.size(lag.num_bytes)


def _age(lag: Lag, now: datetime) -> str:
    return f"oldest {console.duration(lag.seconds(now))}" if lag.count else "nothing waits"


def _quiet(text: str, quiet: bool) -> Text:
    return Text(text, style="dim" if quiet else "")


def _dim_when(quiet: bool) -> str | None:
    return "dim" if quiet else None


@guarded
def status(
    table: options.TableArgument,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep running, and refresh.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 2.0,
    times: Annotated[
        int | None,
        typer.Option("--times", min=1, help="How many times --watch looks before it ends."),
    ] = None,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Show what waits for a flush, for compaction and for an index, shard by shard.

    With --watch, --json prints one document per line.
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
