"""Every block of Python in the guide runs, in the order in which it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import lancewal.spark
from tests.spark.conftest import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GUIDE = ROOT / "docs" / "spark.md"


def test_the_guide_runs(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Relative paths are the guide's alone; Spark's own begin where the session was started.
    place = f"{tmp_path}/"
    monkeypatch.setattr(lancewal.spark, "session", lambda *args, **kwargs: spark)
    namespace: dict[str, Any] = {}
    # What the page itself says is not run is run by the test that it names.
    blocks = re.findall(r"(?<! -->\n)```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for number, block in enumerate(blocks):
        code = re.sub(
            r'(["\'`])(?:\./)?(documents|replica|checkpoints/|incoming|in-sql)', rf"\1{place}\2", block
        )
        code = code.replace(f"'{place}documents-from-json'", "'documents-from-json'")
        exec(compile(code, f"{GUIDE.name} block {number}", "exec"), namespace)
    assert len(blocks) >= 12
    found = {
        row.id: row.text
        for row in namespace["documents"]
        .sparkSession.read.format("lancewal")
        .load(f"{place}documents")
        .collect()
    }
    assert found == {2: "two", 3: "three", 4: "four", 5: "five"}
    replica = spark.read.format("lancewal").load(f"{place}replica")
    assert {row.id for row in replica.collect()} == set(found)
