"""``python -m demo [DIRECTORY]``: tell the story, and leave the table and a report behind."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from demo.narration import Narration
from demo.stage import Scale
from lancewal.errors import InvalidInputError

DEFAULT_DIRECTORY = "demo-output"
#: What a run leaves; a directory with anything else in it holds somebody's work.
_OURS = {"documents.lance", "incoming", "checkpoint", "spark.log", "report.html"}

_QUICK = Scale(library=400, remarks=60, rows_per_file=60, seconds_per_file=0.05, kills=1, puts_per_kill=10)
_WITHOUT = "or leave Spark out with --no-spark"


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    console = Console(highlight=False)
    directory = Path(given.directory)
    try:
        if given.spark:
            check_spark()
        make_room(directory)
    except (InvalidInputError, OSError) as error:
        Console(stderr=True, highlight=False).print(
            f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True
        )
        return 1
    from demo.report import write_report
    from demo.story import tell

    began = time.monotonic()
    narration = Narration(console)
    try:
        stage = tell(directory, narration, _QUICK if given.quick else Scale(), with_spark=given.spark)
    except KeyboardInterrupt:
        console.print("\nstopped; run it again to start over")
        return 130
    seconds = time.monotonic() - began
    report = write_report(stage, seconds)
    console.rule(align="left")
    verdict = "[green]every check held" if narration.holds else "[red]something did not hold, see above"
    console.print(f"{verdict}[/] ({narration.checks} checks, {seconds:.0f} s)")
    console.print(f"  table   {escape(stage.uri)}", soft_wrap=True)
    console.print(f"  report  {escape(str(report))}", soft_wrap=True)
    return 0 if narration.holds else 1


def check_spark() -> None:
    """Refuse before anything is done where Spark cannot run, and say what would help."""
    if find_spec("pyspark") is None or find_spec("pandas") is None:
        raise InvalidInputError(f"the demo needs PySpark: pip install 'lancewal[spark,jre]', {_WITHOUT}")
    from lancewal.spark.spark_session import find_java_home

    try:
        find_java_home()
    except InvalidInputError as error:
        raise InvalidInputError(f"{error}, {_WITHOUT}") from error


def make_room(directory: Path) -> None:
    """An empty directory; what an earlier run left there goes, anything else is not ours to delete."""
    if directory.is_dir():
        others = sorted({path.name for path in directory.iterdir()} - _OURS)
        if others:
            raise InvalidInputError(
                f"{directory} holds {others[0]}, which the demo did not make; name another directory"
            )
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lancewal demo", description="Show on real rows what works.")
    parser.add_argument("directory", nargs="?", default=DEFAULT_DIRECTORY, help="where to leave it all")
    parser.add_argument(
        "--no-spark", dest="spark", action="store_false", help="stream through Python, without Java"
    )
    parser.add_argument("--quick", action="store_true", help="few documents, for a first look")
    return parser


if __name__ == "__main__":
    sys.exit(main())
