"""The wheel on other versions of Python and of pylance, in empty environments: ``python -m bench.versions``.

Interpreters are those on the machine; one that is missing is skipped, and the page says so. ``--write``
stores the result for the documentation.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.environments import ROOT, Environment, built_wheel, write_between

PAGE = ROOT / "docs" / "upgrade.md"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
#: Besides the one that the wheel asks for; each on the oldest Python.
PYLANCES = ("14.0.0", "13.0.0")
#: What the chosen tests need besides the wheel.
TOOLS = (
    *("pytest>=9", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil"),
    *("pandas>=2.2,<3", "polars", "ministack>=1.5,<2"),
)
#: So many failures are enough.
_MOST = 20
#: A file or two of each room: tables, log, filters, replay, lookups, searches, SQL, compaction.
TESTS = (
    "tests/test_table.py",
    "tests/test_creation.py",
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


def outcome(environment: Environment) -> str:
    """What the tests say with the installed wheel; never with the source of this checkout."""
    began = time.monotonic()
    alone = ["-o", "pythonpath=.", "-p", "no:cacheprovider", "-q", "--tb=line", f"--maxfail={_MOST}"]
    done = environment.run("python", "-m", "pytest", *alone, *TESTS, cwd=ROOT, check=False)
    last = (done.out.strip().splitlines() or [done.err.strip()[-200:]])[-1]
    print(f"  {last} ({time.monotonic() - began:.0f} s)", flush=True)
    if done.code == 0:
        return "passes"
    failed = [line for line in done.out.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    print("  " + "\n  ".join(failed), flush=True)
    return f"{len(failed)} tests fail" if len(failed) < _MOST else "fails"


def run() -> list[tuple[str, str, str]]:
    """Python, pylance and what came out, line by line."""
    found: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        wheel = built_wheel(place)
        asked = [(python, None) for python in PYTHONS] + [(PYTHONS[0], pylance) for pylance in PYLANCES]
        for python, pylance in asked:
            at = interpreter(python)
            print(
                f"Python {python}, pylance {pylance or 'as pinned'}: {at or 'not on this machine'}",
                flush=True,
            )
            if at is None:
                found.append((python, "as pinned", "not tried: no such interpreter on the machine"))
                continue
            environment = Environment.create(place / f"{python}-{pylance}", at)
            environment.install(wheel, *TOOLS)
            if pylance is not None:
                environment.install("--no-deps", f"pylance=={pylance}")
            version = environment.run(
                "python", "-c", "import importlib.metadata as m; print(m.version('pylance'))"
            )
            found.append((python, version.out.strip(), outcome(environment)))
            shutil.rmtree(environment.directory)
    return found


def table_of(found: list[tuple[str, str, str]]) -> str:
    lines = [f"| {python} | {pylance} | {text} |" for python, pylance, text in found]
    return "\n".join(["| Python | pylance | the core tests with the wheel |", "|---|---|---|", *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"show the result in {PAGE.name}")
    given = parser.parse_args()
    found = run()
    print(table_of(found))
    if given.write:
        write_between(PAGE, "versions", table_of(found))
    # Other versions of pylance are asked to learn something; those that the wheel takes must pass.
    pinned = found[: len(PYTHONS)]
    return 1 if any("fail" in text for *_, text in pinned) else 0


if __name__ == "__main__":
    sys.exit(main())
