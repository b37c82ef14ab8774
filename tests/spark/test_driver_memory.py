"""The driver plans and commits; rows never pass through it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import WORKER_PATH


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_small_driver_handles_a_batch_that_is_larger_than_its_memory(tmp_path: Path) -> None:
    small, large = 20_000, 2_000_000
    ran = subprocess.run(
        [sys.executable, "-m", "tests.spark.memory_child", str(tmp_path), str(small), str(large)],
        env={**os.environ, "PYTHONPATH": WORKER_PATH, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    first, second = (json.loads(line) for line in ran.stdout.splitlines())
    assert (first["rows"], second["rows"]) == (small, large)
    assert second["bytes"] > 700e6, "more than the driver's heap of 400 MB"
    growth = (second["python_kb"] - first["python_kb"]) * 1024
    assert growth < 0.15 * second["bytes"], (
        f"{growth / 1e6:.0f} MB more for {second['bytes'] / 1e6:.0f} MB of rows"
    )
