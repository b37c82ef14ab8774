"""The whole demo with Spark, as a user starts it: a process of its own, with a session of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lance

import lancewal
from tests.patience import PATIENCE


def test_the_demo_with_spark_holds(tmp_path: Path) -> None:
    where = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "demo", str(where), "--quick"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr + (where / "spark.log").read_text()[-2000:]
    assert "killed with SIGKILL after" in done.stdout
    assert "changes exactly once" in done.stdout
    assert "✗" not in done.stdout
    plain = lance.dataset(str(where / "documents.lance")).count_rows()
    assert plain == lancewal.open(str(where / "documents.lance")).count_rows()
    assert "Spark killed" in (where / "report.html").read_text()
