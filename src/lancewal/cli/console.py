"""Where output goes: results to standard output, everything else to standard error."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.traceback import Traceback


@dataclass
class Settings:
    """What was said before the command's name."""

    debug: bool = False


settings = Settings()


def out() -> Console:
    """For what a person reads. Made at every call: tests and pipes replace the streams."""
    return Console(highlight=False)


def err() -> Console:
    return Console(stderr=True, highlight=False)


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
    sys.stdout.write(json.dumps(value, indent=indent, ensure_ascii=False) + "\n")
    sys.stdout.flush()


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
