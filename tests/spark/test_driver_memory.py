"""The driver plans and commits; rows never pass through it, but for what a commit flushes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.processes import spark_environment

#: A commit by format flushes the logs of four shards at a time, 64 MB of each, whatever their size.
_FLUSHED_AT_A_TIME = 4 * 64e6


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_small_driver_handles_a_batch_that_is_larger_than_its_memory(tmp_path: Path) -> None:
    """A Java heap of 512 MB, and Python processes that take hardly more for a batch 100 times as large."""
    small, large = 20_000, 2_000_000
    ran = subprocess.run(
        [sys.executable, "-m", "tests.spark.memory_child", str(tmp_path), str(small), str(large)],
        env=spark_environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    first, second = (json.loads(line) for line in ran.stdout.splitlines())
    assert (first["rows"], second["rows"]) == (small, large)
    assert second["bytes"] > 700e6, "more than the driver's heap of 512 MB"
    growth = (second["python_kb"] - first["python_kb"]) * 1024
    assert growth < _FLUSHED_AT_A_TIME, (
        f"{growth / 1e6:.0f} MB more for {second['bytes'] / 1e6:.0f} MB of rows"
    )
