"""``lancewal serve`` as a process of its own: it serves, is probed, and stops in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lancewal
from tests.cli.support import SOURCE, ok, run
from tests.patience import PATIENCE
from tests.tables import rows, wal_table

TOKEN = "token-of-the-serve-tests"
READS = "token-of-those-who-only-read"


@contextmanager
def serving(*arguments: object) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """A gateway in a child, and what it said of itself; killed at the end if it has not stopped."""
    command = [sys.executable, "-m", "lancewal.cli", "serve", "--json", "--listen", "127.0.0.1:0"]
    child = subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        assert line, child.stderr.read() if child.stderr else ""
        yield json.loads(line), child
    finally:
        child.kill()
        child.communicate()


def probe(address: str, path: str, token: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(address + path)
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_served_table_is_written_read_and_handed_over(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "events.lance", bucket=("id", 2))
    (tmp_path / "tokens").write_text(f"{TOKEN}\n\n")
    (tmp_path / "readers").write_text(f"{READS}\n")
    options = (
        "--tokens",
        tmp_path / "tokens",
        "--read-tokens",
        tmp_path / "readers",
        "--http",
        "127.0.0.1:0",
    )
    with serving(table.uri, *options) as (said, child):
        assert said["tables"] == ["events"]
        with (
            lancewal.connect(said["address"], token=TOKEN, timeout=PATIENCE) as remote,
            remote.writer() as writer,
        ):
            writer.put(rows(0, 10))
            (owner,) = table.owners()
            assert (owner.pid, owner.address) == (child.pid, said["address"])
            shown = " ".join(ok("status", table.uri, columns=300).out.split())
            assert f"process {child.pid} on {owner.host}, at {said['address']}: 2 shards" in shown
            assert probe(said["http"], "/ready")[0] == 200
            assert probe(said["http"], "/live")[0] == 200
            assert probe(said["http"], "/metrics")[0] == 401
            assert probe(said["http"], "/metrics", TOKEN)[0] == 401  # not the one that may write
            code, metrics = probe(said["http"], "/metrics", READS)
            assert code == 200
            assert "lancewal_puts_total" in metrics
            assert probe(said["http"], "/other")[0] == 404
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == 0
    assert table.owners() == []
    assert table.status().unflushed.count == 0
    assert table.count_rows() == 10


def test_a_stand_by_takes_over_from_a_killed_gateway(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "table")
    with (
        serving(table.uri) as (first, child),
        serving(table.uri) as (second, _),
        lancewal.connect([first["address"], second["address"]], timeout=PATIENCE) as remote,
        remote.writer() as writer,
    ):
        writer.put(rows(0, 5))
        with lancewal.connect(second["address"], timeout=PATIENCE) as other, other.writer() as through:
            through.put(rows(5, 5))  # the stand-by names the owner, and the client goes there
        child.kill()
        child.wait()
        writer.put(rows(10, 5))
        assert remote.count_rows() == 15
    assert table.count_rows() == 15


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--listen", "0.0.0.0:0"), "token and a TLS"),
        (("--tokens", "missing"), "cannot read missing"),
        (("--listen", "nowhere"), "host:port"),
        (("--tls-certificate", __file__), "certificate and its key"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    table = wal_table(tmp_path / "table")
    outcome = run("serve", table.uri, *arguments)
    assert outcome.code == 2
    assert text in outcome.error


def test_a_file_of_tokens_that_is_no_text_was_called_a_bug(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_bytes(b"\xff\xfe" * 20)
    outcome = run("serve", wal_table(tmp_path / "table").uri, "--tokens", tokens)
    assert outcome.code == 2
    assert "holds no text" in outcome.error


def test_a_byte_order_mark_was_taken_for_a_part_of_the_token(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN, encoding="utf-8-sig")
    with (
        serving(wal_table(tmp_path / "table").uri, "--tokens", tokens) as (said, _),
        lancewal.connect(said["address"], token=TOKEN, timeout=PATIENCE) as remote,
    ):
        assert remote.count_rows() == 0


def test_two_tables_need_two_names(tmp_path: Path) -> None:
    one, two = wal_table(tmp_path / "a" / "t"), wal_table(tmp_path / "b" / "t")
    assert run("serve", one.uri, two.uri).code == 2
    with serving(one.uri, f"other={two.uri}") as (said, _):
        assert said["tables"] == ["t", "other"]
        with lancewal.connect(said["address"], table="other", timeout=PATIENCE) as remote:
            assert remote.count_rows() == 0
