"""The main tests of the Spark pipeline on every version of PySpark that is allowed: ``make matrix``.

The environment's own version is taken as it is; the others are installed into directories of their own,
outside the project, and put before it. What a version cannot do is skipped by the tests themselves, which
say why. ``--write`` shows the result in the documentation, ``--packages`` keeps the directories.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from xml.etree import ElementTree

from bench.environments import write_between

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "spark.md"
#: Those that ``pyproject.toml`` allows.
VERSIONS = ("4.1", "4.2", "4.3")
#: Every part of the room; the others attack what is the same on each version.
TESTS = (
    "test_answers.py",
    "test_backup.py",
    "test_catalog.py",
    "test_connect.py",
    "test_debezium.py",
    "test_diagnosis.py",
    "test_feed_source.py",
    "test_front.py",
    "test_jobs.py",
    "test_low_latency.py",
    "test_merged.py",
    "test_progress.py",
    "test_reading.py",
    "test_round_trip.py",
    "test_search.py",
    "test_sink.py",
    "test_sql.py",
    "test_vectors.py",
    "test_versions.py",
)


@dataclass(frozen=True)
class Outcome:
    """What came of a version: tests that passed, those that failed, and why some were skipped."""

    version: str
    passed: int
    failed: tuple[str, ...]
    skipped: Counter[str]
    code: int

    @property
    def line(self) -> str:
        told = "; ".join(f"{count}: {reason}" for reason, count in sorted(self.skipped.items())) or "none"
        return f"| {self.version} | {self.passed} | {', '.join(self.failed) or 'none'} | {told} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.spark.matrix", description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"by default {', '.join(VERSIONS)}")
    parser.add_argument("--packages", type=Path, help="where versions are installed, and found again")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="files of tests/spark")
    parser.add_argument("--write", action="store_true", help=f"show the result in {PAGE.name}")
    given = parser.parse_args(arguments)
    found = []
    with tempfile.TemporaryDirectory(prefix="lancewal-matrix-") as scratch:
        for version in given.versions:
            started = time.monotonic()
            path = installed(version, (given.packages or Path(scratch)) / version)
            found.append(run(path, given.tests, Path(scratch) / f"{version}.xml"))
            sys.stdout.write(f"{found[-1].line} {time.monotonic() - started:.0f} s\n")
            sys.stdout.flush()
    if given.write:
        write_between(PAGE, "matrix", table_of(found))
    return 1 if any(each.code for each in found) else 0


def table_of(found: Sequence[Outcome]) -> str:
    head = ["| PySpark | tests that pass | that fail | that are skipped, and why |", "|---|---|---|---|"]
    return "\n".join([*head, *(each.line for each in found)])


def installed(version: str, packages: Path) -> list[Path]:
    """What has to come first on the path for this version; installs it unless it is there."""
    if version_of("pyspark").startswith(f"{version}."):
        return []
    if not (packages / "pyspark").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*pip, f"pyspark=={version}.*"], check=True)
    return [packages]


def run(first: Sequence[Path], tests: Sequence[str], report: Path) -> Outcome:
    """Run the tests with the version that is found at ``first``."""
    path = os.pathsep.join(map(str, [*first, ROOT / "src", ROOT]))
    environment = {**os.environ, "PYTHONPATH": path}
    ask = [sys.executable, "-c", "import pyspark; print(pyspark.__version__)"]
    asked = subprocess.run(ask, env=environment, capture_output=True, text=True, check=True)
    files = [str(Path("tests/spark") / name) for name in tests]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junit-xml={report}",
        *files,
    ]
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    return outcome_of(asked.stdout.strip(), report, code)


def outcome_of(version: str, report: Path, code: int) -> Outcome:
    passed, failed, skipped = 0, [], Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        reason = case.find("skipped")
        if reason is not None:
            skipped[reason.get("message", "")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"`{case.get('name')}`")
        else:
            passed += 1
    return Outcome(version, passed, tuple(failed), skipped, code)


if __name__ == "__main__":
    sys.exit(main())
