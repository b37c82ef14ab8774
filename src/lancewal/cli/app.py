"""The commands of ``lancewal`` and what they have in common."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from lancewal.cli import (
    console,
    extras,
    ingest,
    init,
    keys,
    maintain,
    query,
    status,
    tail,
)
from lancewal.cli import (
    maintain as backups,
)

# Help texts: paragraphs that fill the terminal, and no types behind switches that take none.


class Command(TyperCommand):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = filled(self.help or "")

    def get_params(self, ctx: Any) -> list[Any]:
        return [without_type(param) for param in super().get_params(ctx)]


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return [without_type(param) for param in super().get_params(ctx)]


def filled(text: str) -> str:
    """Paragraphs as one line each; the lines of a docstring end where the source does.

    >>> filled("Do it.\\n\\nOnce or\\ntwice.")
    'Do it.\\n\\nOnce or twice.'
    """
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def without_type(param: Any) -> Any:
    """``--watch <bool>`` looks as if a value had to follow."""
    if isinstance(param, TyperOption) and param.metavar is None and (param.is_flag or param.count):
        param.metavar = ""
    return param


_ENDING = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage or refused input, 3 verify found problems, "
    "4 no such table or row, 5 another process has taken over, 130 interrupted."
)

app = typer.Typer(
    name="lancewal",
    cls=Group,
    help="A streaming write path for Lance tables.",
    epilog=_ENDING,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_PASS_ON = {"ignore_unknown_options": True}

app.command(cls=Command, rich_help_panel="Write")(init.init)
app.command(cls=Command, rich_help_panel="Write")(ingest.ingest)
app.command(cls=Command, rich_help_panel="Write")(keys.delete)
app.command(cls=Command, rich_help_panel="Read")(query.query)
app.command(cls=Command, rich_help_panel="Read")(keys.get)
app.command(cls=Command, rich_help_panel="Read")(tail.tail)
app.command(cls=Command, rich_help_panel="Operate")(status.status)
app.command(cls=Command, rich_help_panel="Operate")(maintain.flush)
app.command(cls=Command, rich_help_panel="Operate")(maintain.compact)
app.command(cls=Command, rich_help_panel="Operate")(maintain.gc)
app.command(cls=Command, rich_help_panel="Operate")(maintain.verify)
app.command(cls=Command, rich_help_panel="Operate")(backups.backup)
app.command(cls=Command, rich_help_panel="Operate")(backups.restore)
app.command(cls=Command, rich_help_panel="Try")(extras.demo)
app.command(cls=Command, rich_help_panel="Try", context_settings=_PASS_ON)(extras.bench)


def _show_version(wanted: bool) -> None:
    if wanted:
        import lancewal

        typer.echo(f"lancewal {lancewal.__version__}")
        raise typer.Exit


@app.callback()
def common(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error arose; allowed anywhere.")
    ] = False,
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Log more; twice for all.")] = 0,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """A streaming write path for Lance tables."""
    console.settings.debug = debug
    console.set_up_logging(verbose)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and exit with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(app(args=debug_first(given), prog_name="lancewal"))


def debug_first(arguments: list[str]) -> list[str]:
    """``--debug`` belongs before the command; people remember it last.

    >>> debug_first(["status", "t", "--debug"])
    ['--debug', 'status', 't']
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if "--debug" not in arguments[:end]:
        return arguments
    return ["--debug", *(a for a in arguments[:end] if a != "--debug"), *arguments[end:]]
