"""Where output goes: results to standard output, everything else to standard error."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
from rich.traceback import Traceback


@dataclass
class Settings:
    """What was said before the command's name."""

    debug: bool = False


settings = Settings()


#: Control characters but for line ends and tabs; what turns the direction of text; half characters.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""``text`` with characters that would command the terminal shown as what they are.

    >>> print(visible("red: \x1b[31m"))
    red: \x1b[31m
    """
    return _UNSEEN.sub(lambda found: ascii(found.group())[1:-1], text)


def plain(text: object) -> str:
    r"""Names and values of others for a text with markup: neither markup nor commands to the terminal.

    >>> print(plain("[bold]\x07"))
    \[bold]\x07
    """
    return escape(visible(str(text)))


def out() -> Console:
    """For what a person reads. Made at every call: tests and pipes replace the streams."""
    return _console(stderr=False)


def err() -> Console:
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    made = Console(stderr=stderr, highlight=False)
    made.push_render_hook(_VisibleHook())
    return made


class _VisibleHook(RenderHook):
    """Whatever is printed: rows, paths, and texts of errors come from others."""

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
    """A remark that is no result."""
    err().print(text, soft_wrap=True)


def error(text: str, label: str = "error") -> None:
    colour = "red" if label == "error" else "yellow"
    err().print(f"[bold {colour}]{label}:[/] {escape(text)}", soft_wrap=True)


def traceback(raised: BaseException) -> None:
    err().print(Traceback.from_exception(type(raised), raised, raised.__traceback__))


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """One JSON document; ``indent=None`` for a line of JSON lines."""
    sys.stdout.write(json_text(value, indent=indent) + "\n")
    sys.stdout.flush()


def json_text(value: Any, *, indent: int | None = None) -> str:
    """JSON that may be shown on a terminal: what commands it is escaped, which changes no value."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _UNSEEN.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def set_up_logging(verbosity: int) -> None:
    """Warnings of the library to standard error; more with every ``-v``."""
    level = [logging.WARNING, logging.INFO, logging.DEBUG][min(verbosity, 2)]
    handler = RichHandler(console=err(), show_path=False, show_time=verbosity > 0, markup=False)
    logger = logging.getLogger("lancewal")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level)


@contextmanager
def progress(*, json: bool, counted: bool = True) -> Iterator[Progress]:
    """A progress display on standard error; silent with ``--json`` and where nobody watches."""
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
