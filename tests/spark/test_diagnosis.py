"""What a session lacks, on the driver and on each executor."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import cloudpickle

from lancewal.spark import diagnosis, doctor
from tests.spark.tables import new_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_session_that_has_everything_is_well(spark: SparkSession, tmp_path: Path) -> None:
    found = doctor(spark, new_table(tmp_path / "table").uri)
    assert found.ok, str(found)
    assert [each.executable for each in found.executors] == [sys.executable]
    assert "all is well" in str(found)
    assert str(found).count("pylance") == 2, "a line for the driver, and one for the executor"
    nowhere = doctor(spark, str(tmp_path / "nowhere"))
    assert sum("does not reach the table" in each for each in nowhere.problems) == 2


def test_the_question_needs_no_lancewal_where_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor without lancewal could not unpickle a function of lancewal's."""
    sent = cloudpickle.dumps(diagnosis._probe(None, {}, ("no-such-thing",), 0.0))
    monkeypatch.setitem(sys.modules, "lancewal", None)
    monkeypatch.setitem(sys.modules, "lancewal.spark", None)
    monkeypatch.setitem(sys.modules, "lancewal.spark.diagnosis", None)
    (facts,) = cloudpickle.loads(sent)([])
    assert facts["versions"] == {"no-such-thing": None}


def machine(**other: Any) -> diagnosis.Machine:
    versions = dict.fromkeys((*diagnosis._SAME, *diagnosis._PRESENT), "1")
    made = diagnosis.Machine("executor", "host", "/work", "/bin/python3", "3.11.2", versions, 1 << 40)
    return replace(made, **other)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"python": "3.12.1"}, "set PYSPARK_PYTHON"),
        ({"versions": {**machine().versions, "lancewal": None}}, "has no lancewal"),
        ({"versions": {**machine().versions, "pylance": "2"}}, "has pylance 2, the driver 1"),
        ({"temporary_bytes": 5 << 20}, "has 5 MB left"),
        ({"storage_error": "PermissionError: no"}, "PermissionError"),
    ],
    ids=["python", "missing", "version", "room", "storage"],
)
def test_each_problem_is_named_with_its_executor(other: dict[str, Any], text: str) -> None:
    (problem,) = diagnosis._problems(machine(**other), machine(role="driver"))
    assert text in problem
    assert problem.startswith("executor on host")
    assert list(diagnosis._problems(machine(), machine(role="driver"))) == []


def test_another_version_of_pandas_is_no_problem() -> None:
    other = machine(versions={**machine().versions, "pandas": "2"})
    assert list(diagnosis._problems(other, machine())) == []


def test_executors_that_run_no_python_are_a_problem_too(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("[PYTHON_VERSION_MISMATCH] Python in worker has different version")

    monkeypatch.setattr(diagnosis, "_asked", refuse)
    found = doctor(spark)
    assert not found.ok
    assert "PYSPARK_PYTHON" in str(found)
