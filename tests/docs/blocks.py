"""Code blocks of a Markdown page, and a way to run them that keeps the page honest.

Python blocks run in order, in one namespace. On a line that ends in ``# → value`` the
expression's ``repr`` must be ``value``; on one that ends in ``# raises Name`` it must raise that
error. Console blocks run where ``<!-- run -->`` stands before them: every line that starts with
``$`` must succeed. JSON must be what a reader of ours takes. ``<!-- setup`` … ``-->`` holds Python that
the page does not show: what a block needs, or what must hold behind it. Whatever is not run says why, as
``<!-- not run: because -->``.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lancewal.format.records import decode_record

ROOT = Path(__file__).resolve().parents[2]
#: Pages that somebody wrote: those of the API hold one name each, and are made from its docstring.
PAGES = [
    ROOT / "README.md",
    *(
        page
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.name == "index.md" or ROOT / "docs" / "api" not in page.parents
    ),
]

_BLOCK = re.compile(
    r"(?P<setup><!-- setup\n(?P<hidden>.*?)-->)"
    r"|(?P<mark><!-- (?:run|not run: [^\n]+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<body>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_EXPECTED = re.compile(r"#\s*→\s*(.+?)\s*$")
_RAISES = re.compile(r"#\s*raises (\w+)")


@dataclass(frozen=True)
class Block:
    language: str
    body: str
    line: int
    marked: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("body") if match["body"] is not None else match.start()) + 1
        if match["setup"]:
            found.append(Block("python", match["hidden"], line, None))
        else:
            body = "".join(each.removeprefix(match["indent"]) for each in match["body"].splitlines(True))
            found.append(Block(match["language"], body, line, match["mark"] and match["mark"].strip()))
    return found


def runs(block: Block) -> bool:
    if block.language in ("python", "json"):
        return block.marked is None
    return block.language == "console" and block.marked == "<!-- run -->"


class Runner:
    """Runs the blocks of one page in one directory."""

    def __init__(self, page: Path, directory: Path, names: Mapping[str, Any] | None = None) -> None:
        """``names`` are there for the page's Python, besides what it defines itself."""
        self._page = page
        self._directory = directory
        self._names: dict[str, Any] = {"__name__": page.stem, **(names or {})}

    def run(self, block: Block) -> None:
        if block.language == "python":
            self._python(block)
        elif block.language == "json":
            # One with a checksum must have the right one.
            assert decode_record(block.body), f"{self._page.name}:{block.line}"
        else:
            self._console(block)

    def _python(self, block: Block) -> None:
        # Pages speak of buckets; here everything lies in the page's own directory.
        source = block.body.replace("s3://bucket/", f"{self._directory}/")
        lines = source.splitlines()
        for statement in ast.parse(source).body:
            end = statement.end_lineno or statement.lineno
            where = f"{self._page.name}:{block.line + statement.lineno - 1}"
            last = lines[end - 1]
            raises, expected = _RAISES.search(last), _EXPECTED.search(last)
            if raises:
                self._must_raise(statement, raises[1], where)
            elif expected and isinstance(statement, ast.Expr):
                value = eval(self._compiled(ast.Expression(statement.value), where, "eval"), self._names)
                assert repr(value) == expected[1], f"{where}: {value!r} instead of {expected[1]}"
            else:
                exec(self._compiled(ast.Module([statement], []), where, "exec"), self._names)

    def _must_raise(self, statement: ast.stmt, name: str, where: str) -> None:
        raised: Exception | None = None
        try:
            exec(self._compiled(ast.Module([statement], []), where, "exec"), self._names)
        except Exception as error:
            raised = error
        assert raised is not None, f"{where}: no {name} was raised"
        names = [kind.__name__ for kind in type(raised).__mro__]
        assert name in names, f"{where}: {raised!r} instead of {name}"

    def _compiled(self, tree: ast.Module | ast.Expression, where: str, mode: str) -> Any:
        return compile(ast.fix_missing_locations(tree), where, mode)

    def _console(self, block: Block) -> None:
        tools = self._directory / ".tools"
        tools.mkdir(exist_ok=True)
        program = tools / "lancewal"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lancewal.cli "$@"\n')
        program.chmod(0o755)
        environment = {
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
        }
        commands = [line for line in block.body.splitlines() if line.startswith("$ ")]
        assert commands, f"{self._page.name}:{block.line} runs nothing: commands begin with a dollar sign"
        for line in commands:
            done = subprocess.run(
                ["bash", "-c", line[2:]],
                cwd=self._directory,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{self._page.name}: {line}\n{done.stderr}"


def run_page(page: Path, directory: Path, names: Mapping[str, Any] | None = None) -> None:
    runner = Runner(page, directory, names)
    for block in blocks(page):
        if runs(block):
            runner.run(block)


def run_page_alone(page: Path, directory: Path) -> None:
    """As :func:`run_page`, in a process of its own."""
    imports = "from pathlib import Path; from tests.docs.blocks import run_page"
    code = f"{imports}; run_page(Path({str(page)!r}), Path.cwd())"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
