"""The operator's page: what it is told, whom it is told to, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import UUID

import lance
import pyarrow as pa
import pytest

import lancewal
from lancewal.errors import LanceWalError
from lancewal.gateway import Gateway, HealthEndpoint
from lancewal.gateway.health import page_files
from lancewal.service import note_duty
from lancewal.storage import ObjectStore
from tests.faults import FaultyStore
from tests.patience import PATIENCE, wait_until
from tests.tables import fast, rows

TOKEN = "a-token-that-may-read"


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
        return True


HAS_IPV6 = socket.has_ipv6 and _has_ipv6()
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def ask(endpoint: HealthEndpoint, path: str, token: str | None = None) -> tuple[int, str, Mapping[str, str]]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urlopen(Request(endpoint.address + path, headers=headers)) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


def figures(endpoint: HealthEndpoint) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(endpoint, "/status.json")[1])["tables"]["events"]
    return found


def test_the_page_is_told_of_levels_owners_and_how_long_calls_take(
    gateway: Gateway, remote: lancewal.RemoteTable
) -> None:
    with HealthEndpoint(gateway, "127.0.0.1:0", look_every=0.02) as endpoint, remote.writer() as writer:
        writer.put(rows(0, 40))
        remote.flush()
        writer.put(rows(40, 40))
        remote.lookup(1)
        wait_until(lambda: any("lookup" in look["calls"] for look in figures(endpoint)["looks"]))
        wait_until(lambda: figures(endpoint)["looks"][-1]["unflushed_entries"] > 0)
        found = figures(endpoint)
    assert len(found["status"]["shards"]) == 4
    assert found["error"] is None
    [owner] = found["status"]["owners"]
    assert owner["address"] == gateway.address
    last = found["looks"][-1]
    assert (last["uncompacted_sstables"], last["sstables_of_a_shard"]) == (4, 1)
    puts = [look["calls"]["put"] for look in found["looks"] if "put" in look["calls"]]
    assert all(0 < each["p50_ms"] <= each["p99_ms"] and each["per_second"] > 0 for each in puts)
    assert puts


def test_what_upkeep_has_done_was_not_told(gateway: Gateway, events: lancewal.Table) -> None:
    """The page looked for it under a name that nobody wrote."""
    events.checkpoint("monday")
    with HealthEndpoint(gateway, "127.0.0.1:0", look_every=0.02) as endpoint:
        note_duty(events._store, "compact", under_way=True)
        wait_until(lambda: figures(endpoint)["status"])
        note_duty(events._store, "compact", under_way=False, done="3 SSTables compacted")
        wait_until(lambda: figures(endpoint)["upkeep"])
        failed: dict[UUID | None, Exception] = {None: LanceWalError("no room")}
        note_duty(events._store, "compact", under_way=False, failures=2, failed=failed)
        wait_until(lambda: len(figures(endpoint)["upkeep"]) == 2)
        found = figures(endpoint)
    assert [(each["work"], each["done"], each["failures"]) for each in found["upkeep"]] == [
        ("compact", "", 2),
        ("compact", "3 SSTables compacted", 0),
    ]
    assert [each["name"] for each in found["status"]["checkpoints"]] == ["monday"]


def test_a_table_that_cannot_be_looked_at_is_said_and_the_last_state_stays(
    events: lancewal.Table, tmp_path: Path
) -> None:
    store = FaultyStore(ObjectStore.from_uri(events.uri))
    table = lancewal.Table.open(events.uri, store=store)
    with (
        Gateway({"events": table}) as gateway,
        HealthEndpoint(gateway, "127.0.0.1:0", look_every=0.02) as endpoint,
    ):
        wait_until(lambda: figures(endpoint)["status"] is not None)
        Path(events.uri).rename(tmp_path / "elsewhere")
        wait_until(lambda: figures(endpoint)["error"] is not None)
        assert figures(endpoint)["status"]["uri"] == events.uri
        Path(tmp_path / "elsewhere").rename(events.uri)
        wait_until(lambda: figures(endpoint)["error"] is None)


def test_figures_need_the_token_and_the_page_itself_does_not(gateway: Gateway) -> None:
    with HealthEndpoint(gateway, "127.0.0.1:0", token=TOKEN) as endpoint:
        assert ask(endpoint, "/")[0] == 200
        assert ask(endpoint, "/status.json")[0] == 401
        assert ask(endpoint, "/status.json", "another")[0] == 401
        assert ask(endpoint, "/status.json", TOKEN)[0] == 200


def test_only_the_first_of_several_tokens_was_taken(gateway: Gateway) -> None:
    with HealthEndpoint(gateway, "127.0.0.1:0", token=[TOKEN, "its-successor"]) as endpoint:
        assert ask(endpoint, "/status.json", TOKEN)[0] == 200
        assert ask(endpoint, "/status.json", "its-successor")[0] == 200
        assert ask(endpoint, "/status.json", "another")[0] == 401


@pytest.mark.skipif(not HAS_IPV6, reason="this host has no IPv6")
def test_figures_could_not_be_served_over_ipv6(gateway: Gateway) -> None:
    with HealthEndpoint(gateway, "[::1]:0") as endpoint:
        assert endpoint.address.startswith("http://[::1]:")
        assert ask(endpoint, "/ready")[0] == 200


def test_other_machines_are_told_nothing_without_a_token(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lancewal.gateway.health.is_loopback", lambda listen: False)
    with HealthEndpoint(gateway, "127.0.0.1:0") as endpoint:
        assert ask(endpoint, "/ready")[0] == 200
        assert ask(endpoint, "/status.json")[0] == ask(endpoint, "/metrics")[0] == 404


def test_the_page_loads_nothing_from_elsewhere(gateway: Gateway) -> None:
    pages = page_files()
    assert pages.keys() == {"/", "/index.html", "/page.css", "/page.js"}
    for body, _ in pages.values():
        links = set(re.findall(rb"(?:https?:)?//[\w.-]+", body)) - {b"http://www.w3.org"}
        assert not links
    with HealthEndpoint(gateway, "127.0.0.1:0") as endpoint:
        code, _, headers = ask(endpoint, "/")
    assert code == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Content-Type"] == "text/html; charset=utf-8"


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_draws_the_table_and_runs_nothing_of_its_rows(tmp_path: Path) -> None:
    uri = str(tmp_path / "events")
    schema = pa.schema([pa.field("tenant", pa.string(), nullable=False), pa.field("n", pa.int64())])
    lance.write_dataset(schema.empty_table(), uri)
    table = lancewal.initialize(uri, identity="tenant", writer_defaults=fast())
    hostile = "<img src=x onerror=\"document.title='run'\">"
    with Gateway({"events": table}) as gateway:
        with lancewal.connect(gateway.address) as remote, remote.writer() as writer:
            writer.put(pa.table({"tenant": ["ordinary", hostile], "n": [1, 2]}, schema))
        table.checkpoint("monday")
        note_duty(table._store, "compact", under_way=False, done="3 SSTables compacted")
        with HealthEndpoint(gateway, "127.0.0.1:0", look_every=0.02) as endpoint:
            wait_until(lambda: (figures(endpoint)["status"] or {"shards": ()})["shards"])
            document = drawn(endpoint.address, tmp_path)
    assert "<title>lancewal</title>" in document
    assert ">ready" in document
    assert ">2 shards<" in document
    assert ">ordinary<" in document
    assert ">monday<" in document
    assert ">3 SSTables compacted<" in document
    assert "&lt;img src=x" in document
    assert "<img" not in document


def drawn(address: str, directory: Path) -> str:
    """The page after its script has run, as the browser has it."""
    options = [
        "headless",
        "no-sandbox",
        "disable-gpu",
        "no-first-run",
        "dump-dom",
        "virtual-time-budget=4000",
    ]
    options += ["disable-background-networking", "disable-component-update", "disable-sync"]
    done = subprocess.run(
        [
            str(BROWSER),
            *(f"--{option}" for option in options),
            f"--user-data-dir={directory}/profile",
            f"{address}/",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    return done.stdout
