"""What a session is asked for, without starting one."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from lancewal.errors import InvalidInputError
from lancewal.spark import session


class Builder:
    """Stands for Spark's; remembers what it was told."""

    def __init__(self) -> None:
        self.where: str | None = None
        self.conf: dict[str, str] = {}

    def appName(self, name: str) -> Builder:  # noqa: N802
        return self.config("spark.app.name", name)

    def master(self, url: str) -> Builder:
        self.where = url
        return self

    def remote(self, url: str) -> Builder:
        self.where = url
        return self

    def config(self, name: str, value: str) -> Builder:
        self.conf[name] = value
        return self

    def getOrCreate(self) -> Builder:  # noqa: N802
        return self


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        class _New:
            def __get__(self, *_: object) -> Builder:
                return Builder()

        builder = _New()

    monkeypatch.setattr("pyspark.sql.SparkSession", Session)
    monkeypatch.delenv("MASTER", raising=False)
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)


def asked_for(*arguments: Any, **named: Any) -> Builder:
    started: Any = session(*arguments, **named)
    return started  # type: ignore[no-any-return]


def test_a_session_is_local_unless_somebody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked_for()
    assert found.where == "local[*]"
    assert found.conf["spark.driver.host"] == "127.0.0.1"
    assert found.conf["spark.driver.bindAddress"] == "127.0.0.1"
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert asked_for("spark://host:7077").where == "spark://host:7077"


@pytest.mark.parametrize("variable", ["MASTER", "PYSPARK_GATEWAY_PORT"])
def test_what_the_environment_or_spark_submit_says_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    assert asked_for().where is None


def test_a_cluster_chooses_its_own_addresses() -> None:
    assert "spark.driver.host" not in asked_for("spark://host:7077").conf


def test_settings_of_the_caller_win() -> None:
    conf = asked_for("local[2]", conf={"spark.python.worker.reuse": "false", "spark.x": "1"}).conf
    assert conf["spark.python.worker.reuse"] == "false"
    assert conf["spark.x"] == "1"
    assert conf["spark.sql.python.filterPushdown.enabled"] == "true"


def test_a_server_is_told_only_what_can_be_set_in_a_running_session() -> None:
    found = asked_for(remote="sc://host")
    assert found.where == "sc://host"
    assert set(found.conf) == {"spark.sql.python.filterPushdown.enabled"}
    assert "spark.python.worker.reuse" in asked_for(remote="local[2]").conf


def test_one_place_is_enough() -> None:
    with pytest.raises(InvalidInputError, match="not both"):
        session("local", remote="sc://host")
