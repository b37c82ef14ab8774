"""Every example runs as it stands, and the list of them is whole."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

EXAMPLES = Path(__file__).parents[2] / "examples"
#: What an example needs beyond the environment of the tests.
NEEDS = {"training_set.py": "torch"}
#: They start a Spark of their own.
WITH_SPARK = {"spark_files_to_feed.py", "debezium.py"}


def scripts() -> list[object]:
    return [
        pytest.param(path, id=path.stem, marks=pytest.mark.soak if path.name in WITH_SPARK else ())
        for path in sorted(EXAMPLES.glob("*.py"))
    ]


@pytest.mark.parametrize("script", scripts())
def test_an_example_runs(script: Path, tmp_path: Path) -> None:
    needed = NEEDS.get(script.name)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip()


def test_the_list_of_examples_names_each_of_them() -> None:
    listed = set(re.findall(r"\]\(([\w/.]+)\)", (EXAMPLES / "README.md").read_text()))
    there = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")}
    assert listed == there
