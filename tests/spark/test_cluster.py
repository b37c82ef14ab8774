"""Real clusters: executors and drivers are killed, and streams go on from their checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
import pytest

from lancewal.spark.java import find_java_home
from tests.spark import faulty
from tests.spark.changes import ChangeFiles
from tests.spark.conftest import WORKER_PATH
from tests.spark.tables import content, new_table, schema_of
from tests.spark.test_stream_faults import changes_in

LOCAL_CLUSTER = "local-cluster[2,1,1024]"
_PATIENCE_SECONDS = 240.0
_EXECUTOR = b"CoarseGrainedExecutorBackend"


@dataclass
class Stream:
    """One stream of changes into a table of its own."""

    name: str
    path: str
    keyed: bool
    directory: Path
    batches: int

    def __post_init__(self) -> None:
        self.files = ChangeFiles(self.directory / "changes", self.keyed, seed=self.batches)
        self.files.add(self.batches)
        self.table = new_table(self.directory / "table", schema_of(self.keyed))

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint"

    def committed(self) -> int:
        """Micro-batches that Spark has noted as done."""
        with contextlib.suppress(FileNotFoundError):
            return sum(name.isdigit() for name in os.listdir(self.checkpoint / "commits"))
        return 0

    def config(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "keyed": self.keyed,
            "uri": self.table.uri,
            "changes": str(self.files.directory),
            "checkpoint": str(self.checkpoint),
        }

    def check(self) -> None:
        assert content(self.table) == self.files.expected(), self.name
        assert changes_in(self.table.uri) == self.files.changes, self.name


def streams(directory: Path, batches: int, kinds: list[tuple[str, bool]]) -> list[Stream]:
    return [
        Stream(f"{path}-{keyed}", path, keyed, directory / f"{path}-{keyed}", batches)
        for path, keyed in kinds
    ]


class Driver:
    """A driver process with all that it starts, in a session of its own."""

    def __init__(self, master: str, found: list[Stream], log: Path) -> None:
        config = {"master": master, "streams": [stream.config() for stream in found]}
        environment = {
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": WORKER_PATH,
            faulty.DIRECTORY: os.environ[faulty.DIRECTORY],
        }
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.driver", json.dumps(config)],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def executors(self) -> list[int]:
        """The process ids of the executors' Java machines, wherever in the session they are."""
        return [pid for pid in session_members(self._process.pid) if _EXECUTOR in command_line(pid)]

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        return self._process.wait(_PATIENCE_SECONDS)

    def kill(self) -> None:
        """The whole session at once, as when the machine goes down."""
        for pid in session_members(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(_PATIENCE_SECONDS)


def session_members(leader: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(name)) == leader:
                    found.append(int(name))
    return found


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def wait_for(condition: Any, driver: Driver) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while driver.is_running() and not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def run_with_kills(
    master: str, found: list[Stream], tmp_path: Path, *, executor_kills: int, driver_kills: int, seed: int = 3
) -> None:
    """Kill executors and drivers after random micro-batches until all streams are through."""
    chance = random.Random(seed)
    log = tmp_path / "driver.log"
    total = sum(stream.batches for stream in found)
    while True:
        driver = Driver(master, found, log)
        try:
            while driver.is_running() and (executor_kills or driver_kills):
                done = sum(stream.committed() for stream in found)
                target = min(done + chance.randint(1, max(2, total // 8)), total - 2)
                wait_for(lambda: sum(s.committed() for s in found) >= target, driver)  # noqa: B023
                time.sleep(chance.random())
                victims = driver.executors()
                if executor_kills and victims and (chance.random() < 0.6 or not driver_kills):
                    executor_kills -= 1
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(chance.choice(victims), signal.SIGKILL)
                elif driver_kills:
                    driver_kills -= 1
                    break
                elif not victims:
                    executor_kills = 0
            else:
                if driver.wait() == 0:
                    return
                tail = log.read_bytes()[-3000:].decode(errors="replace")
                assert "InjectedError" in tail or "exited unexpectedly" in tail or "lost" in tail, tail
        finally:
            driver.kill()


@pytest.mark.timeout(900)
def test_executors_and_a_driver_are_killed_and_every_batch_lands_exactly_once(tmp_path: Path) -> None:
    found = streams(tmp_path, 6, [("sink", True), ("wal", False)])
    run_with_kills(LOCAL_CLUSTER, found, tmp_path, executor_kills=1, driver_kills=1)
    for stream in found:
        stream.check()


ALL_KINDS = [("sink", True), ("sink", False), ("wal", True), ("wal", False)]


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_two_hundred_batches_on_a_local_cluster_while_everything_is_killed(tmp_path: Path) -> None:
    found = streams(tmp_path, 200, ALL_KINDS)
    faulty.issue(
        *(["before kill", "after kill", "after raise"] * 15), *(f"commit {i}" for i in range(0, 40, 2))
    )
    try:
        run_with_kills(LOCAL_CLUSTER, found, tmp_path, executor_kills=10, driver_kills=5)
    finally:
        faulty.withdraw()
    for stream in found:
        stream.check()


@contextlib.contextmanager
def standalone_master() -> Iterator[str]:
    """A master and two workers on different addresses of this machine."""
    home = Path(pyspark.__file__).parent
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "PYTHONPATH": WORKER_PATH,
        "PYSPARK_PYTHON": sys.executable,
    }
    java = find_java_home()
    if java is not None:
        environment["JAVA_HOME"] = java
    url = f"spark://127.0.0.1:{port}"
    deploy = "org.apache.spark.deploy"
    commands = [[f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]]
    for host in ("127.0.0.1", "127.0.0.2"):
        commands.append(
            [
                f"{deploy}.worker.Worker",
                "--host",
                host,
                "--cores",
                "1",
                "--memory",
                "1g",
                "--webui-port",
                "0",
                url,
            ]
        )
    running = [
        subprocess.Popen(
            [str(home / "bin" / "spark-class"), *command],
            env={**environment, "SPARK_LOCAL_IP": command[command.index("--host") + 1]},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        yield url
    finally:
        for process in running:
            for pid in session_members(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_standalone_master_with_two_workers_and_speculation(tmp_path: Path) -> None:
    found = streams(tmp_path, 40, ALL_KINDS)
    with standalone_master() as master:
        run_with_kills(master, found, tmp_path, executor_kills=0, driver_kills=2)
    for stream in found:
        stream.check()
