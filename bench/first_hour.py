"""From ``pip install`` in an empty environment to the first durable row and the first search.

``python -m bench.first_hour`` does what the README says, with its own lines, and tells how many commands
and lines that took, and how long. ``--write`` stores the result for the documentation.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from bench.environments import ROOT, Environment, built_wheel, stored, write_between

RESULT = ROOT / "bench" / "first_hour.json"
PAGE = ROOT / "docs" / "tasks.md"

#: Tells when lines of the README's program were done, beside it.
_WATCH = """
import json, sys, time
_began, _times = time.perf_counter(), []
def _done(what):
    _times.append((what, time.perf_counter() - _began))
"""


def program() -> list[str]:
    """The lines of the README's first program."""
    (code, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line for line in code.splitlines() if line.strip()]


def watched(lines: list[str]) -> str:
    """The program, which prints at last when its first put and its first search had returned."""
    told: list[str] = [_WATCH]
    for line in lines:
        told.append(line)
        indent = line[: len(line) - len(line.lstrip())]
        for what in ("put", "search"):
            if re.search(rf"\.\w*{what}\(", line):
                told.append(f"{indent}_done({what!r})")
    told.append("print(json.dumps(_times), file=sys.stderr)")
    return "\n".join(told)


def run() -> dict[str, Any]:
    """Commands, lines and seconds; raises when a step fails."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        wheel = built_wheel(place)
        environment = Environment.create(place / "environment")
        installed = environment.install(wheel)
        script = place / "first.py"
        script.write_text(watched(program()))
        result = environment.run("python", script, cwd=place)
    first: dict[str, float] = {}
    for what, seconds in json.loads(result.err.strip().splitlines()[-1]):
        first.setdefault(what, seconds)
    return {
        "commands": ["pip install lancewal", "python first.py"],
        "lines": len(program()),
        "install_seconds": round(installed, 1),
        "first_put_seconds": round(first["put"], 2),
        "first_search_seconds": round(first["search"], 2),
    }


def text_of(found: dict[str, Any]) -> str:
    return (
        "| step | what it took |\n|---|---|\n"
        f"| commands | {len(found['commands'])}: "
        f"{', '.join(f'`{each}`' for each in found['commands'])} |\n"
        f"| lines of the program, all of the README's first one | {found['lines']} |\n"
        f"| `pip install lancewal` in an empty environment | {found['install_seconds']} s |\n"
        f"| from the start of the program to the first durable put | {found['first_put_seconds']} s |\n"
        f"| … to the first search that finds it | {found['first_search_seconds']} s |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"store the result, and show it in {PAGE.name}")
    given = parser.parse_args()
    found = run()
    print(text_of(found))
    if given.write:
        stored(RESULT, found)
        write_between(PAGE, "first hour", text_of(found))


if __name__ == "__main__":
    main()
