"""Output to the terminal: streams, progress, and readable numbers, durations and rows."""

from __future__ import annotations

import base64
import json
import logging
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.logging import RichHandler
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from rich.traceback import Traceback

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class Settings:
    """The options before the command's name."""

    debug: bool = False


settings = Settings()


#: Control characters except line ends and tabs; characters that change the direction of text; surrogates.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""``text`` with terminal control characters escaped.

    >>> print(visible("red: \x1b[31m"))
    red: \x1b[31m
    """
    return _UNSEEN.sub(lambda found: ascii(found.group())[1:-1], text)


def plain(text: object) -> str:
    r"""``text`` with markup and terminal control characters escaped.

    >>> print(plain("[bold]\x07"))
    \[bold]\x07
    """
    return escape(visible(str(text)))


def out() -> Console:
    """Standard output for people. Created at every call, because tests and pipes replace the streams."""
    return _console(stderr=False)


def err() -> Console:
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    made = Console(stderr=stderr, highlight=False)
    made.push_render_hook(_VisibleHook())
    return made


class _VisibleHook(RenderHook):
    """Escapes everything that is printed, because rows, paths and error texts may come from others."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Visible(each) for each in renderables]


@dataclass
class _Visible:
    shown: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.shown, options):
            yield Segment(text if control else visible(text), style, control)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.shown)


def note(text: str) -> None:
    """Print a remark on standard error, apart from the result."""
    err().print(text, soft_wrap=True)


def error(text: str, label: str = "error") -> None:
    colour = "red" if label == "error" else "yellow"
    err().print(f"[bold {colour}]{label}:[/] {escape(text)}", soft_wrap=True)


def traceback(raised: BaseException) -> None:
    err().print(Traceback.from_exception(type(raised), raised, raised.__traceback__))


def tell(text: str, document: Any, *, json: bool, indent: int | None = 2) -> None:
    """Print a command's result: a line of ``text``, or ``document`` as JSON."""
    if json:
        print_json(document, indent=indent)
    else:
        out().print(f"[green]✓[/] {text}")


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print one JSON document; ``indent=None`` prints it as one line, for JSON lines."""
    sys.stdout.write(json_text(value, indent=indent) + "\n")
    sys.stdout.flush()


def json_text(value: Any, *, indent: int | None = None) -> str:
    """JSON that is safe on a terminal: control characters are escaped, which changes no value."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _UNSEEN.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def set_up_logging(verbosity: int) -> None:
    """Log the library's warnings to standard error, and more with every ``-v``."""
    level = [logging.WARNING, logging.INFO, logging.DEBUG][min(verbosity, 2)]
    handler = RichHandler(console=err(), show_path=False, show_time=verbosity > 0, markup=False)
    logger = logging.getLogger("lancewal")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level)


@contextmanager
def progress(*, json: bool, counted: bool = True) -> Iterator[Progress]:
    """A progress display on standard error; silent with ``--json`` and without a terminal."""
    console = err()
    amount = [BarColumn(bar_width=None), MofNCompleteColumn()] if counted else [BarColumn(bar_width=None)]
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *amount,
        *([] if counted else [TaskProgressColumn()]),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=json or not console.is_terminal,
    ) as shown:
        yield shown


_BARS = "▁▂▃▄▅▆▇█"
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def count(number: int) -> str:
    """
    >>> count(1234567)
    '1,234,567'
    """
    return f"{number:,}"


def plural(number: int, word: str, words: str | None = None) -> str:
    """
    >>> plural(1, "row"), plural(2, "row"), plural(2, "entry", "entries")
    ('1 row', '2 rows', '2 entries')
    """
    return f"{number:,} {word if number == 1 else words or word + 's'}"


def size(number: float) -> str:
    """
    >>> size(0), size(999), size(1234), size(56_700_000), size(1_500_000_000)
    ('0 B', '999 B', '1.2 kB', '57 MB', '1.5 GB')
    """
    value, place = float(number), 0
    while value >= 999.5 and place < len(_UNITS) - 1:
        value, place = value / 1000, place + 1
    shown = f"{value:.1f}" if place and value < 9.95 else f"{value:.0f}"
    return f"{shown} {_UNITS[place]}"


def duration(seconds: float) -> str:
    """
    >>> [duration(s) for s in (0.0004, 0.25, 7, 75, 3_700, 200_000)]
    ['0 s', '0.2 s', '7 s', '1 min', '1 h 1 min', '2 d 7 h']
    """
    if seconds < 0.95:
        return "0 s" if seconds < 0.05 else f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def rate(per_second: float) -> str:
    """
    >>> rate(0), rate(0.4), rate(1234.5)
    ('0/s', '0.4/s', '1,234/s')
    """
    return f"{per_second:.1f}/s" if 0 < per_second < 9.95 else f"{per_second:,.0f}/s"


def sparkline(values: Sequence[float]) -> str:
    """
    >>> sparkline([0, 1, 2, 4])
    '▁▃▅█'
    """
    highest = max(values, default=0)
    if highest <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(7, round(value / highest * 7))] for value in values)


_DURATION_UNITS = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "min": timedelta(minutes=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)")


def parse_duration(text: str, option: str) -> timedelta:
    """
    >>> parse_duration("90min", "--min-age")
    datetime.timedelta(seconds=5400)
    """
    match = _FORM.fullmatch(text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no duration such as 90s, 30min, 12h or 7d", param_hint=option)
    try:
        return float(match[1]) * _DURATION_UNITS[match[2]]
    except OverflowError:
        raise typer.BadParameter(f"{text!r} is longer than any table lives", param_hint=option) from None


_MAX_CELL = 60
_MIN_TEXT = 12
_SHOWN_ELEMENTS = 3


def print_rows(rows: pa.RecordBatch | pa.Table) -> None:
    """Print each row as a line of JSON: bytes as base64, times as ISO 8601, NaN and infinity as null."""
    for row in rows.to_pylist():
        sys.stdout.write(json_text(json_value(row)) + "\n")
    sys.stdout.flush()


def json_value(value: Any) -> Any:
    """
    >>> json_value({"a": b"x", "b": [1.5, float("nan")]})
    {'a': 'eA==', 'b': [1.5, None]}
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {str(key): json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def table_of(rows: pa.Table) -> Table:
    """Rows as a table for the terminal; long values are cut, but numbers never."""
    import pyarrow as pa

    shown = Table(box=None, pad_edge=False, header_style="bold")
    columns = [[cell(value) for value in column.to_pylist()] for column in rows.columns]
    for field, cells in zip(rows.schema, columns, strict=True):
        number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        widest = max((text.cell_len for text in cells), default=0)
        shown.add_column(
            Text(visible(field.name)),
            justify="right" if number else "left",
            overflow="ellipsis",
            no_wrap=True,
            min_width=max(widest, len(field.name)) if number else min(widest, _MIN_TEXT),
        )
    for row in zip(*columns, strict=True):
        shown.add_row(*row)
    return shown


def cell(value: Any) -> Text:
    if value is None:
        return Text("null", style="dim")
    return Text(_cut(visible(_short(value))))


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return _list(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(each)}" for key, each in value.items()) + "}"
    return " ".join(str(value).split())


def _list(values: Sequence[Any]) -> str:
    parts = [
        f"{value:.3g}" if isinstance(value, float) else _short(value) for value in values[:_SHOWN_ELEMENTS]
    ]
    first = ", ".join(parts)
    return f"[{first}, … {len(values)}]" if len(values) > _SHOWN_ELEMENTS else f"[{first}]"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 1] + "…"
