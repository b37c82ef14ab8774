"""What is loaded when: a put needs neither DataFusion nor what the command line shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = ("datafusion", "faiss", "typer", "rich", "pyspark", "prometheus_client", "opentelemetry")


def loaded_after(program: str, directory: Path) -> list[str]:
    script = f"{program}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=directory, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_importing_the_package_loads_no_library(tmp_path: Path) -> None:
    loaded = loaded_after("import lancewal", tmp_path)
    assert not {"pyarrow", "numpy", "lance", "obstore", *HEAVY}.intersection(loaded)


def test_a_put_and_a_lookup_load_no_engine_for_filters(tmp_path: Path) -> None:
    program = """
import lancewal
import tempfile
table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1, "n": 1}], key="id")
with table.writer() as writer:
    writer.put({"id": 2, "n": 2})
assert table.lookup(2) == {"id": 2, "n": 2}
assert table.count_rows("id = 2") == 1
"""
    assert not set(HEAVY).intersection(loaded_after(program, tmp_path))
    assert "datafusion" in loaded_after(program + "table.count_rows('n > 1')", tmp_path)


def test_the_version_is_that_of_the_installed_package() -> None:
    import importlib.metadata

    import lancewal

    assert lancewal.__version__ == importlib.metadata.version("lancewal")
