"""Stores and tables for tests. ``any_store`` runs a test on each kind of storage."""

from __future__ import annotations

import logging
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

import lancewal
from lancewal.base import BaseTable
from lancewal.storage import ObjectStore
from tests.servers import S3Server
from tests.tables import APPEND_ONLY, new_table, wal_table

# No example fails because the machine is busy. A machine that decides whether a change lands must
# not decide by chance; people and the long runs draw new examples every time.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("patient", _PATIENT)
settings.register_profile("ci", _PATIENT, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "patient")

# A shell lets the commands that it runs in the background ignore Ctrl-C. Tests that press it, and the
# processes that inherit from them, must heed it there too.
signal.signal(signal.SIGINT, signal.default_int_handler)


class OneSparkSession(LoadScopeScheduling):
    """How workers share the tests: a file is run by one of them, and all that Spark does by the same one."""

    def _split_scope(self, nodeid: str) -> str:
        return "spark" if nodeid.startswith("tests/spark/") else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneSparkSession:
    return OneSparkSession(config, log)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """The command line takes the library's log lines for itself; a test must not hand that on."""
    logger = logging.getLogger("lancewal")
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3 server for the whole session; each test should use a prefix of its own."""
    with S3Server() as server:
        yield server


@pytest.fixture
def local_store(tmp_path: Path) -> ObjectStore:
    """A table's directory that does not exist yet, without fsync (tests of durability ask for it)."""
    return ObjectStore.from_uri(tmp_path / "table", fsync=False)


@pytest.fixture
def memory_store() -> ObjectStore:
    return ObjectStore.from_uri(f"memory://{uuid.uuid4().hex}/table")


@pytest.fixture
def s3_store(s3: S3Server) -> ObjectStore:
    return ObjectStore.from_uri(s3.uri(f"{uuid.uuid4().hex}/table"), s3.storage_options)


@pytest.fixture(params=["local", "memory", "s3"])
def any_store(request: pytest.FixtureRequest) -> ObjectStore:
    store = request.getfixturevalue(f"{request.param}_store")
    assert isinstance(store, ObjectStore)
    return store


@pytest.fixture
def table(tmp_path: Path, request: pytest.FixtureRequest) -> lancewal.Table:
    """An empty table with a key, in four buckets, or as ``@pytest.mark.sharding(…)`` says."""
    mark = request.node.get_closest_marker("sharding")
    return wal_table(tmp_path / "table", **({"bucket": ("id", 4)} if mark is None else mark.kwargs))


@pytest.fixture
def base(tmp_path: Path) -> BaseTable:
    """An empty table with a key and one shard, for writers that are opened by hand."""
    return new_table(tmp_path / "keyed")


@pytest.fixture
def append_only(tmp_path: Path) -> BaseTable:
    """As ``base``, without a key: a row that was written twice is seen twice."""
    return new_table(tmp_path / "append-only", APPEND_ONLY)
