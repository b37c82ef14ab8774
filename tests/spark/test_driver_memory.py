"""The driver plans and commits; rows never pass through it, but for few and for what a commit flushes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.processes import spark_environment

#: How much more a step may take with 100 times the rows: buffers that grow to their limits.
_SLACK_BYTES = 64e6
#: What flushing one shard's log of 48 MB takes; logs of this size are flushed one at a time.
_ONE_LOG_BYTES = 192e6


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
    # The small run comes first and starts every kind of process; its end is what they take idle.
    idle = max(first["peaks_kb"].values())
    growth = {step: (peak - idle) * 1024 for step, peak in second["peaks_kb"].items()}
    assert growth.pop("append to long logs") < _SLACK_BYTES + _ONE_LOG_BYTES
    assert max(growth.values()) < _SLACK_BYTES, growth
