"""The ``lancewal`` command: its subcommands, its common options, and the programs that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from lancewal.cli import (
    change,
    checkpoint,
    console,
    cost,
    doctor,
    ingest,
    init,
    maintain,
    rows,
    seal,
    serve,
    status,
    upkeep,
)
from lancewal.cli.exits import CommandError, guarded


class Command(TyperCommand):
    """A command whose help fills the width of the terminal, and shows no type after a switch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = filled(self.help or "")

    def get_params(self, ctx: Any) -> list[Any]:
        return [without_type(param) for param in super().get_params(ctx)]


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return [without_type(param) for param in super().get_params(ctx)]


def filled(text: str) -> str:
    """Join the lines of each paragraph, because the lines of a docstring end where the source's do.

    >>> filled("Do it.\\n\\nOnce or\\ntwice.")
    'Do it.\\n\\nOnce or twice.'
    """
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def without_type(param: Any) -> Any:
    """Remove the type of a switch, because ``--watch <bool>`` looks as if a value had to follow."""
    if isinstance(param, TyperOption) and param.metavar is None and (param.is_flag or param.count):
        param.metavar = ""
    return param


_ENDING = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage or refused input, 3 a check found problems, "
    "4 no such table or row, 5 another process has or takes the shard, 130 and 143 interrupted."
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


@guarded
def demo(
    directory: Annotated[
        str, typer.Argument(metavar="[DIRECTORY]", help="Where to leave the table and the report.")
    ] = "demo-output",
    spark: Annotated[
        bool, typer.Option("--spark/--no-spark", help="Stream through Spark, or without Java through Python.")
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Few documents, for a first look.")] = False,
) -> None:
    """Show what works on real rows, in one to three minutes.

    Spark writes a stream while a Python service writes and searches; writers are killed and
    recover; everything is compacted and read by plain Lance. Each step is checked.
    """
    switches = [*([] if spark else ["--no-spark"]), *(["--quick"] if quick else [])]
    _run([sys.executable, "-m", "demo", directory, *switches], _checkout_for("the demo is", "make demo"))


@guarded
def bench(arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENT…]")] = None) -> None:
    """Measure lancewal against its peers.

    Needs a source checkout: the benchmarks and the peers are not part of the package. Arguments after
    -- go to the benchmark runner, as in: lancewal bench -- --list
    """
    root = _checkout_for("the benchmarks are", "make bench")
    _run([sys.executable, "-m", "bench", *(arguments or [])], root)


def _checkout_for(what: str, target: str) -> Path:
    root = checkout()
    if root is None:
        raise CommandError(
            f"{what} not part of the installed package; run {target} in a clone of the repository"
        )
    return root


def checkout() -> Path | None:
    """The source checkout that this package is imported from; ``None`` if it is installed."""
    root = Path(__file__).resolve().parents[3]
    return (
        root if (root / "bench" / "__main__.py").is_file() and (root / "pyproject.toml").is_file() else None
    )


def _run(command: list[str], directory: Path) -> None:
    environment = dict(os.environ)
    # The package may run from the checkout without being installed.
    paths = [str(directory), str(directory / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    try:
        done = subprocess.run(command, env=environment, check=False)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if done.returncode:
        raise typer.Exit(done.returncode if done.returncode > 0 else 128 - done.returncode)


_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Write": (init.init, ingest.ingest, change.delete, change.update),
    "Read": (rows.query, rows.sql, rows.get, rows.tail),
    "Operate": (
        serve.serve,
        status.status,
        doctor.doctor,
        cost.cost,
        upkeep.upkeep,
        maintain.flush,
        maintain.compact,
        maintain.gc,
        maintain.verify,
        maintain.backup,
        maintain.restore,
        seal.seal,
        seal.unseal,
    ),
    "Try": (demo,),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        app.command(cls=Command, rich_help_panel=_panel)(_command)
_checkpoints = typer.Typer(
    cls=Group, help="Make, list and drop named states of a table.", no_args_is_help=True
)
for _name, _command in (
    ("create", checkpoint.create),
    ("list", checkpoint.list_),
    ("drop", checkpoint.drop),
):
    _checkpoints.command(_name, cls=Command)(_command)
app.add_typer(_checkpoints, name="checkpoint", rich_help_panel="Operate")
app.command(cls=Command, rich_help_panel="Try", context_settings={"ignore_unknown_options": True})(bench)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and exit with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(app(args=debug_first(given), prog_name="lancewal"))


def debug_first(arguments: list[str]) -> list[str]:
    """Move ``--debug`` before the command, where it belongs, because users add it last.

    >>> debug_first(["status", "t", "--debug"])
    ['--debug', 'status', 't']
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if "--debug" not in arguments[:end]:
        return arguments
    return ["--debug", *(a for a in arguments[:end] if a != "--debug"), *arguments[end:]]
