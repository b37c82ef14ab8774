"""``lancewal demo`` and ``lancewal bench``: programs of their own, started from here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from lancewal.cli.exits import CommandError, guarded

Rest = Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENT…]", show_default=False)]


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
    """Show on real rows what works, in about a minute.

    A stream goes in through Spark while a Python service writes and searches; writers are killed and
    recover; everything is compacted and read by plain Lance. Each step is checked.
    """
    switches = [*([] if spark else ["--no-spark"]), *(["--quick"] if quick else [])]
    _run([sys.executable, "-m", "demo", directory, *switches], _checkout_for("the demo is", "make demo"))


@guarded
def bench(arguments: Rest = None) -> None:
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
    """The source checkout that this package is imported from, if it is one."""
    root = Path(__file__).resolve().parents[3]
    return (
        root if (root / "bench" / "__main__.py").is_file() and (root / "pyproject.toml").is_file() else None
    )


def _run(command: list[str], directory: Path) -> None:
    environment = dict(os.environ)
    # The package may be imported from the checkout without being installed.
    paths = [str(directory), str(directory / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    try:
        done = subprocess.run(command, env=environment, check=False)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if done.returncode:
        raise typer.Exit(done.returncode if done.returncode > 0 else 128 - done.returncode)
