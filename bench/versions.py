"""The wheel on other versions of Python and of pylance, in empty environments: ``python -m bench.versions``.

Interpreters are those on the machine; one that is missing is skipped, and the page says so. ``--write``
stores the result (``bench/versions.json``) and shows it in the documentation. A test compares what
``pyproject.toml`` asks for with the stored result: a range that was not tried does not pass.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.environments import ROOT, Environment, built_wheel, stored, write_between

RESULT = ROOT / "bench" / "versions.json"
PAGE = ROOT / "docs" / "upgrade.md"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
#: Besides the newest one that the wheel takes; each on the oldest Python.
PYLANCES = ("14.0.0", "13.0.0")
#: What the chosen tests need besides the wheel.
TOOLS = (
    *("pytest>=9", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil"),
    *("pandas>=2.2,<3", "polars", "ministack>=1.5,<2"),
)
#: So many failures are enough.
_MOST = 20
#: A file or two of each room: tables, log, filters, replay, lookups, searches, SQL, compaction, and
#: Lance's own writer on the same shards.
TESTS = (
    "tests/test_table.py",
    "tests/test_creation.py",
    "tests/interop/test_wal_with_pylance.py",
    "tests/format/test_wal_entry.py",
    "tests/predicate",
    "tests/writer/test_replay.py",
    "tests/reader/test_lookup.py",
    "tests/reader/test_front.py",
    "tests/reader/test_sql.py",
    "tests/maintenance/test_compact.py",
)


def interpreter(version: str) -> str | None:
    """An interpreter of that version on this machine."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in (*map(str, kept), shutil.which(f"python{version}")):
        if candidate is None:
            continue
        asked = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return candidate
    return None


@dataclass(frozen=True)
class Tried:
    """One line of the matrix; nothing was tried where ``pylance`` is None."""

    python: str
    pylance: str | None
    passed: int = 0
    failed: int = 0
    stopped: bool = False

    def said(self) -> str:
        if self.pylance is None:
            return "not tried: no such interpreter on the machine"
        if not self.failed and not self.stopped:
            return f"{self.passed} pass"
        if not self.failed:
            return "did not come to its end"
        most = "at least " if self.stopped else ""
        return f"{most}{self.failed} of {self.passed + self.failed} fail"


def tested(environment: Environment, python: str, pylance: str) -> Tried:
    """What the tests say with the installed wheel; never with the source of this checkout."""
    began = time.monotonic()
    alone = ["-o", "pythonpath=.", "-p", "no:cacheprovider", "--tb=line", f"--maxfail={_MOST}"]
    done = environment.run("python", "-m", "pytest", *alone, *TESTS, cwd=ROOT, check=False)
    lines = done.out.strip().splitlines() or [done.err.strip()[-200:]]
    print(f"  {lines[-1]} ({time.monotonic() - began:.0f} s)", flush=True)
    print("".join(f"  {line}\n" for line in lines if line.startswith(("FAILED ", "ERROR "))), end="")
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", lines[-1])}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    # A run that ended early, for whatever reason, is no pass.
    stopped = failed >= _MOST or (done.code != 0 and not failed) or not counts
    return Tried(python, pylance, counts.get("passed", 0), failed, stopped)


def run() -> list[Tried]:
    """The matrix, line by line."""
    found: list[Tried] = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        wheel = built_wheel(place)
        asked = [(python, None) for python in PYTHONS] + [(PYTHONS[0], pylance) for pylance in PYLANCES]
        for python, pylance in asked:
            at = interpreter(python)
            print(f"Python {python}, pylance {pylance or 'as asked for'}: {at or 'not here'}", flush=True)
            if at is None:
                found.append(Tried(python, None))
                continue
            environment = Environment.create(place / f"{python}-{pylance}", at)
            environment.install(wheel, *TOOLS)
            if pylance is not None:
                environment.install("--no-deps", f"pylance=={pylance}")
            found.append(tested(environment, *_versions(environment)))
            shutil.rmtree(environment.directory)
    return found


def _versions(environment: Environment) -> tuple[str, str]:
    """The exact versions of Python and pylance there."""
    asked = "import importlib.metadata as m, platform; print(platform.python_version(), m.version('pylance'))"
    python, pylance = environment.run("python", "-c", asked).out.split()
    return python, pylance


def table_of(found: list[dict[str, Any]]) -> str:
    lines = [f"| {each['python']} | {each['pylance'] or ''} | {Tried(**each).said()} |" for each in found]
    return "\n".join(["| Python | pylance | the core tests with the wheel |", "|---|---|---|", *lines])


def kept() -> list[dict[str, Any]]:
    """The stored result."""
    found: list[dict[str, Any]] = json.loads(RESULT.read_text())["tried"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"store the result, and show it in {PAGE.name}")
    given = parser.parse_args()
    found = run()
    print(table_of([asdict(each) for each in found]))
    if given.write:
        stored(RESULT, {"tried": [asdict(each) for each in found]})
        write_between(PAGE, "versions", table_of(kept()))
    # Other versions of pylance are asked to learn something; those that the wheel takes must pass.
    asked_for = found[: len(PYTHONS)]
    return 1 if any(each.failed or each.stopped for each in asked_for) else 0


if __name__ == "__main__":
    sys.exit(main())
