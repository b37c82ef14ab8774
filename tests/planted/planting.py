"""Plants bugs one at a time and finds out who notices: the simulator, after how many worlds, or other tests.

``python -m tests.planted.planting`` plants all of them and prints who did; ``--store`` makes it the figures
of ``docs/testing.md``, ``--only NAME`` plants those whose names have the text. What is stored of other bugs
stays; ``--missing`` plants those of which nothing is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import report
from tests.planted.bug import SOURCE, Bug
from tests.planted.bugs import BUGS

REPOSITORY = SOURCE.parent
WORLDS = int(os.environ.get("PLANTED_WORLDS", "120"))
_NOBODY = "**nobody**"
#: A bug may make somebody wait for ever; that is noticed too.
_PATIENCE_SECONDS = 900.0


@dataclass(frozen=True)
class Verdict:
    """Who noticed a bug; ``layer`` is empty if nobody did."""

    bug: Bug
    layer: str
    worlds: int | None
    symptom: str


@contextmanager
def planted(bug: Bug) -> Iterator[Path]:
    """A copy of the repository with the bug in its code; the tests are the same."""
    with tempfile.TemporaryDirectory(prefix="planted-") as place:
        copy = Path(place)
        shutil.copytree(SOURCE, copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(REPOSITORY / "pyproject.toml", copy)
        for name in ("tests", "docs", "bench", "demo"):
            (copy / name).symlink_to(REPOSITORY / name)
        bug.plant(copy / "src")
        yield copy


def judged(bug: Bug, worlds: int = WORLDS) -> Verdict:
    """Ask the layers in their order."""
    with planted(bug) as copy:
        if bug.simulated and (verdict := _simulated(bug, copy, worlds)) is not None:
            return verdict
        for test in bug.tests:
            done = _run(copy, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test)
            if done is None:
                return Verdict(bug, test, None, "a test does not end")
            failed = [line for line in done.splitlines() if line.startswith(("FAILED ", "ERROR tests"))]
            if failed:
                return Verdict(bug, test, None, failed[0].partition("::")[2].partition(" - ")[0][:120])
    return Verdict(bug, "", None, "")


def _simulated(bug: Bug, copy: Path, worlds: int) -> Verdict | None:
    found = copy / "report.json"
    seeds = f"1:{worlds + 1}"
    done = _run(copy, "-m", "tests.simulation", seeds, "--until-failure", "--report", str(found))
    if done is None:
        return Verdict(bug, "simulator", None, "a world does not end")
    totals = json.loads(found.read_text()) if found.exists() else None
    if totals is None:
        return Verdict(bug, "simulator", 1, done.strip().splitlines()[-1][:120])
    if totals["failures"]:
        symptom = str(totals["failures"][0]["error"]).splitlines()[0]
        return Verdict(bug, "simulator", totals["worlds"], symptom[:120])
    return None


def _run(copy: Path, *command: str) -> str | None:
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout + done.stderr


def all_judged(bugs: list[Bug], worlds: int, processes: int) -> Iterator[Verdict]:
    """As they come."""
    with ThreadPoolExecutor(processes) as pool:
        for done in as_completed(pool.submit(judged, bug, worlds) for bug in bugs):
            yield done.result()


def stored() -> dict[str, Verdict]:
    """The verdicts of ``docs/testing.md``, of bugs that are still in the list."""
    content = report.stored("planted")
    bugs = {bug.name: bug for bug in BUGS}
    return {
        name: Verdict(bugs[name], "" if layer == _NOBODY else layer, worlds, symptom)
        for name, _, layer, worlds, symptom in (content["tables"][0]["rows"] if content else ())
        if name in bugs
    }


def store(new: Mapping[str, Verdict]) -> None:
    """Verdicts that take the place of older ones, in the order of the list."""
    known = {**stored(), **new}
    report.store("planted", page([known[bug.name] for bug in BUGS if bug.name in known]))


def page(verdicts: list[Verdict]) -> dict[str, Any]:
    by_simulator = [each for each in verdicts if each.layer == "simulator"]
    noticed = [each for each in verdicts if each.layer]
    return {
        "title": "Planted bugs: who notices",
        "text": [
            "`tests/planted/bugs.py` is a list of small changes to the protocol's code, each of which drops "
            "one protection. Each is planted into a copy of the code; the simulator is asked first, with up "
            f"to {WORLDS:,} worlds, then the tests that belong to the module. What nobody notices gets a "
            "better oracle or a better test. A row is of the last run that planted the bug: "
            "not all are of the newest code.",
            *_without_verdict(verdicts),
        ],
        "figures": [
            ["bugs in the list", len(BUGS)],
            ["with a verdict", len(verdicts)],
            ["noticed", f"{len(noticed)} of {len(verdicts)}"],
            ["of them by the simulator", len(by_simulator)],
            ["of them by other tests", len(noticed) - len(by_simulator)],
        ],
        "tables": [
            {
                "caption": "Each bug",
                "columns": ["bug", "module", "noticed by", "worlds", "symptom"],
                "rows": [
                    [
                        each.bug.name,
                        f"`{each.bug.file}`",
                        each.layer or _NOBODY,
                        each.worlds,
                        each.symptom,
                    ]
                    for each in verdicts
                ],
            }
        ],
        "command": "python -m tests.planted.planting --store",
    }


def _without_verdict(verdicts: list[Verdict]) -> list[str]:
    known = {each.bug.name for each in verdicts}
    missing = [bug.name for bug in BUGS if bug.name not in known]
    return [f"No verdict yet: {'; '.join(missing)}."] if missing else []


def _read(path: Path) -> dict[str, Verdict]:
    bugs = {bug.name: bug for bug in BUGS}
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: Verdict(bugs[name], *rest) for name, *rest in map(json.loads, lines) if name in bugs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--worlds", type=int, default=WORLDS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--verdicts", type=Path, help="a file of verdicts: those in it are not asked for again"
    )
    parser.add_argument("--missing", action="store_true", help="only bugs without a stored verdict")
    parser.add_argument("--store", action="store_true")
    given = parser.parse_args()
    passed_over = stored() if given.missing else {}
    wanted = [bug for bug in BUGS if given.only in bug.name and bug.name not in passed_over]
    known = _read(given.verdicts) if given.verdicts is not None else {}
    missing = [bug for bug in wanted if bug.name not in known]
    for verdict in all_judged(missing, given.worlds, given.processes):
        known[verdict.bug.name] = verdict
        if given.store:
            store(known)
        if given.verdicts is not None:
            told = [verdict.bug.name, verdict.layer, verdict.worlds, verdict.symptom]
            with given.verdicts.open("a") as file:
                file.write(json.dumps(told) + "\n")
        print(
            f"{verdict.bug.name}: {verdict.layer or 'NOBODY'} {verdict.worlds} {verdict.symptom}", flush=True
        )
    if given.store:
        store(known)


if __name__ == "__main__":
    main()
