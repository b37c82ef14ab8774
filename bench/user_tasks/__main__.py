"""Run the tasks and count their lines."""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.user_tasks.tasks import TASKS, Task

#: Tools by the name of their package, ours first.
TOOLS = {
    "lancewal": "lancewal",
    "lancedb": "LanceDB",
    "deltalake": "Delta Lake",
    "pyiceberg": "Iceberg",
    "duckdb": "DuckDB",
}
_MODULES = {"deltalake": "delta", "pyiceberg": "iceberg"}
PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"


def module_of(tool: str) -> ModuleType | None:
    """The tool's tasks; ``None`` where it is not installed."""
    try:
        importlib.import_module(tool)
    except ImportError:
        return None
    return importlib.import_module(f"bench.user_tasks.{_MODULES.get(tool, tool)}_tasks")


def lines_of(function: Callable[..., Any]) -> int:
    """The lines that a user writes: the body without blank lines, comments and the docstring."""
    body = inspect.getsource(function).splitlines()
    start = next(n for n, line in enumerate(body) if line.rstrip().endswith(":"))
    return sum(1 for line in body[start + 1 :] if line.strip() and not line.strip().startswith("#"))


def run(module: ModuleType, task: Task) -> int | None:
    """How many lines the task takes; ``None`` where the tool has no way to do it."""
    function = getattr(module, task.name, None)
    if function is None:
        return None
    with tempfile.TemporaryDirectory() as directory:
        uri = f"{directory}/t"
        if not task.on_new_table:
            module.create(uri)
        if not task.on_new_table and not task.on_empty_table:
            module.insert(uri)
        found = function(uri)
        if found is None:
            found = module.contents(uri)
    if not task.expected(found):
        raise AssertionError(f"{module.__name__}.{task.name} gave {found!r}")
    return lines_of(function)


def measure(tools: list[str]) -> dict[str, dict[str, int | None]]:
    """Lines by tool and task, of the tools that are installed."""
    modules = {tool: module for tool in tools if (module := module_of(tool)) is not None}
    return {tool: {task.name: run(module, task) for task in TASKS} for tool, module in modules.items()}


def table_of(found: dict[str, dict[str, int | None]]) -> str:
    lines = ["| task | " + " | ".join(TOOLS[tool] for tool in found) + " |", "|---" * (len(found) + 1) + "|"]
    for task in TASKS:
        cells = ["no" if (n := each[task.name]) is None else str(n) for each in found.values()]
        lines.append(f"| {task.title} | " + " | ".join(cells) + " |")
    sums = [sum(1 for n in each.values() if n is not None) for each in found.values()]
    return "\n".join([*lines, "| *tasks that it can do* | " + " | ".join(map(str, sums)) + " |"])


def behind(found: dict[str, dict[str, int | None]]) -> list[str]:
    """Tasks for which lancewal takes more than one line beyond the best peer, or cannot do at all."""
    ours = found["lancewal"]
    late = []
    for task in TASKS:
        others = [
            n for tool, each in found.items() if tool != "lancewal" and (n := each[task.name]) is not None
        ]
        mine = ours[task.name]
        if mine is None or (others and mine > min(others) + 1):
            late.append(task.title)
    return late


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip())
    parser.add_argument("tools", nargs="*", choices=[*TOOLS, []], help="by default all that are installed")
    parser.add_argument("--write", action="store_true", help=f"store the table in {PAGE.name}")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    asked = given.tools or list(TOOLS)
    found = measure(asked)
    print(table_of(found))
    missing = [TOOLS[tool] for tool in asked if tool not in found]
    if missing:
        print(f"\nnot installed: {', '.join(missing)}")
    if given.write and found.keys() == TOOLS.keys():
        head, _, rest = PAGE.read_text().partition("<!-- table -->\n")
        _, _, tail = rest.partition("<!-- end -->\n")
        PAGE.write_text(f"{head}<!-- table -->\n{table_of(found)}\n<!-- end -->\n{tail}")
    if "lancewal" in found and (late := behind(found)):
        print(f"\nmore than the best peer and one line: {', '.join(late)}")


if __name__ == "__main__":
    main()
