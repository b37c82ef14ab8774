"""The web service of ``examples/`` as it is deployed: uvicorn with several workers, and its leader killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import lancewal
from tests.patience import PATIENCE, wait_until
from tests.tables import APPEND_ONLY, ids, wal_table

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "fastapi_service" / "app.py"
WORKERS = 3
SCHEMA = APPEND_ONLY.set(1, APPEND_ONLY.field(1).with_name("text"))


class Producer(threading.Thread):
    """Posts one event after the other, each over a connection of its own; notes what was answered."""

    def __init__(self, address: str, first: int) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._first = first
        self._ending = threading.Event()
        self.tried: list[int] = []
        #: The worker that answered each id.
        self.answered: dict[int, int] = {}
        self.refusals: list[str] = []

    def run(self) -> None:
        number = self._first
        while not self._ending.is_set():
            self.tried.append(number)
            try:
                self.answered[number] = post(self._address, [{"id": number, "text": str(number)}])["worker"]
            except urllib.error.HTTPError as error:
                self.refusals.append(f"{error.code}: {error.read().decode()}")
            except OSError:
                pass  # its worker was killed: nobody knows, so it is not sent again
            number += 1

    def end(self) -> None:
        self._ending.set()
        self.join()


def post(address: str, events: list[dict[str, object]]) -> dict[str, int]:
    request = urllib.request.Request(
        f"{address}/events",
        json.dumps(events).encode(),
        {"Content-Type": "application/json", "Connection": "close"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        found: dict[str, int] = json.loads(answer.read())
        return found


@contextmanager
def running(uri: str) -> Iterator[str]:
    """The service on a free port, ended in order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as temporary:
        environment = {
            **os.environ,
            "EVENTS_TABLE": uri,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "TMPDIR": temporary,
        }
        command = ["uvicorn", "examples.fastapi_service.app:app", "--workers", str(WORKERS)]
        service = subprocess.Popen(
            [sys.executable, "-m", *command, "--port", str(port), "--log-level", "warning"],
            cwd=ROOT,
            env=environment,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(address), "the service's first answer")
            yield address
        finally:
            service.send_signal(signal.SIGTERM)
            try:
                service.wait(PATIENCE)
            finally:
                service.kill()
                service.wait()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/events/-1", timeout=PATIENCE):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 404
    except OSError:
        return False


def leaders(table: lancewal.Table) -> list[int]:
    return [owner.pid for owner in table.owners() if owner.shards and not owner.gone]


def test_what_workers_answered_is_there_once_although_their_leader_is_killed(tmp_path: Path) -> None:
    """Without a key a row that was sent twice would show."""
    table = wal_table(tmp_path / "events", SCHEMA, bucket=("id", 2))
    with running(table.uri) as address:
        producers = [Producer(address, first * 1_000_000) for first in range(4)]
        for each in producers:
            each.start()

        def answered() -> Counter[int]:
            return Counter(worker for each in producers for worker in list(each.answered.values()))

        wait_until(lambda: len(answered()) == WORKERS, "an answer of every worker")
        wait_until(lambda: leaders(table), "a leader")
        (leader,) = leaders(table)
        before = answered()
        assert leader in before
        os.kill(leader, signal.SIGKILL)
        wait_until(lambda: leaders(table) not in ([], [leader]), "another leader")
        after = answered()
        wait_until(lambda: sum((answered() - after).values()) > 40, "answers of the others")
        wait_until(lambda: len(answered()) > WORKERS, "an answer of the worker that replaces the dead one")
        for each in producers:
            each.end()
        assert [refusal for each in producers for refusal in each.refusals] == []
        acknowledged = [number for each in producers for number in each.answered]
        with pytest.raises(urllib.error.HTTPError, match="422"):
            post(address, [{"id": "no number", "text": "x"}])
    assert leaders(table) == []
    found = Counter(ids(table.scan().to_table()))
    assert [number for number in acknowledged if found[number] != 1] == []
    tried = {number for each in producers for number in each.tried}
    assert [number for number, times in found.items() if times != 1 or number not in tried] == []
    assert table.status().unflushed.count == 0  # an orderly end flushes


def test_the_page_shows_the_code_that_is_tested() -> None:
    page = (ROOT / "docs" / "gateway.md").read_text()
    mark = r"<!-- not run: it is examples/fastapi_service/app.py[^\n]*-->"
    shown = re.search(rf"{mark}\n```python\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    assert shown[1] == APP.read_text()
