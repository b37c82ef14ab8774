"""Gateways and their tables for tests; every server is on the loopback interface and ends with its test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import lancewal
from lancewal.gateway import Gateway
from tests.patience import PATIENCE
from tests.tables import wal_table


@pytest.fixture
def events(tmp_path: Path) -> lancewal.Table:
    """An empty table with a key, in four buckets."""
    return wal_table(tmp_path / "events", bucket=("id", 4))


@pytest.fixture
def gateway(events: lancewal.Table) -> Iterator[Gateway]:
    with Gateway({"events": events}) as serving:
        yield serving


@pytest.fixture
def remote(gateway: Gateway) -> Iterator[lancewal.RemoteTable]:
    with lancewal.connect(gateway.address, table="events", timeout=PATIENCE) as table:
        yield table
