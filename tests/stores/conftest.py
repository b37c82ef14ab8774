"""A place for a table on each kind of store, and the same behind a proxy that loses, cuts and refuses."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.proxy import Proxy
from lancewal.storage import ObjectStore
from tests.servers import S3Server
from tests.stores import azurite
from tests.stores.gcs import GcsServer


@dataclass(frozen=True)
class Place:
    """Where a test may make a table; ``clean`` are options that lead past the proxy."""

    uri: str
    options: dict[str, str] = field(default_factory=dict)
    clean: dict[str, str] = field(default_factory=dict)
    proxy: Proxy | None = None

    def store(self, *, clean: bool = False) -> ObjectStore:
        return ObjectStore.from_uri(self.uri, self.clean if clean else self.options, fsync=False)


@pytest.fixture(scope="session")
def azure(request: pytest.FixtureRequest) -> Iterator[azurite.Azurite]:
    reason = azurite.why_not(install="soak" in request.config.getoption("markexpr").split(" ")[:1])
    if reason is not None:
        pytest.skip(reason)
    with azurite.Azurite() as server:
        yield server


@pytest.fixture(scope="session")
def gcs() -> Iterator[GcsServer]:
    with GcsServer() as server:
        yield server


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """``request.param`` is the kind of store, and after a word "faulty" it is behind a proxy."""
    faulty, kind = request.param.startswith("faulty "), request.param.removeprefix("faulty ")
    if kind == "local":
        yield Place(str(tmp_path / "table"))
        return
    name = f"{uuid.uuid4().hex}/table"
    server: S3Server | azurite.Azurite | GcsServer
    server = request.getfixturevalue(kind)
    clean = _options(server, server.endpoint)
    if not faulty:
        yield Place(server.uri(name), clean, clean)
        return
    with Proxy(server.endpoint) as proxy:
        yield Place(server.uri(name), _options(server, proxy.endpoint), clean, proxy)


def _options(server: S3Server | azurite.Azurite | GcsServer, endpoint: str) -> dict[str, str]:
    if isinstance(server, S3Server):
        return {**server.storage_options, "aws_endpoint": endpoint}
    return server.storage_options(endpoint)
