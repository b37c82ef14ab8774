"""The Spark tests on other versions of PySpark: ``python -m tests.spark.matrix 4.1 4.2``.

Each version is installed into a directory of its own, outside the project, and put before the pinned one.
What a version cannot do is skipped by the tests themselves. ``--packages`` keeps the directories.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Those that ``pyproject.toml`` allows beside the pinned one.
VERSIONS = ("4.1", "4.2")
#: Every part of the room; the others attack what is the same on each version.
TESTS = (
    "test_diagnosis.py",
    "test_feed_source.py",
    "test_jobs.py",
    "test_low_latency.py",
    "test_merged.py",
    "test_reading.py",
    "test_round_trip.py",
    "test_sink.py",
    "test_versions.py",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.spark.matrix", description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"by default {', '.join(VERSIONS)}")
    parser.add_argument("--packages", type=Path, help="where versions are installed, and found again")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="files of tests/spark")
    given = parser.parse_args(arguments)
    failed = []
    with tempfile.TemporaryDirectory(prefix="lancewal-matrix-") as scratch:
        for version in given.versions:
            started = time.monotonic()
            code = run(version, (given.packages or Path(scratch)) / version, given.tests)
            word = "passed" if code == 0 else f"FAILED ({code})"
            sys.stdout.write(f"PySpark {version}: {word} in {time.monotonic() - started:.0f} s\n")
            sys.stdout.flush()
            failed += [version] if code else []
    return 1 if failed else 0


def run(version: str, packages: Path, tests: Sequence[str]) -> int:
    """Install the version unless it is there, and run the tests with it; pytest's exit code."""
    if not (packages / "pyspark").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*pip, f"pyspark=={version}.*"], check=True)
    path = os.pathsep.join([str(packages), str(ROOT / "src"), str(ROOT)])
    ask = "import pyspark; print(pyspark.__version__)"
    environment = {**os.environ, "PYTHONPATH": path}
    found = subprocess.run(
        [sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    if not found.startswith(version):
        raise RuntimeError(f"PySpark {version} was installed, but {found} is imported")
    files = [str(Path("tests/spark") / name) for name in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
