from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import lancewal.spark
from tests.spark.conftest import WORKER_PATH


@pytest.mark.parametrize("name", [name for name in lancewal.spark.__all__ if name != "ShardOutcome"])
def test_a_public_name_is_the_function_also_after_all_modules_were_imported(name: str) -> None:
    for module in ("jobs", "feed_source", "low_latency", "spark_session", "source", "diagnosis"):
        importlib.import_module(f"lancewal.spark.{module}")
    assert callable(getattr(lancewal.spark, name))


def test_an_unknown_name_is_refused_as_everywhere() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        lancewal.spark.__getattr__("nothing")


def test_looking_the_format_up_imports_neither_pylance_nor_pyarrow() -> None:
    """Spark imports every module named pyspark_* in every worker that looks a format up."""
    program = (
        "import sys, pyspark.sql.datasource; before = set(sys.modules); import pyspark_lancewal; "
        "new = set(sys.modules) - before; "
        "print([name for name in ('lance', 'datafusion', 'faiss', 'obstore') if name in new])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": WORKER_PATH},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "[]"
