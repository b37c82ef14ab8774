"""Clusters and drivers as processes that can be killed, each in a session of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyspark

from lancewal.spark.spark_session import find_java_home
from tests.patience import PATIENCE, wait_until
from tests.spark import faulty
from tests.spark.conftest import WORKER_PATH

LOCAL = "local[2,4]"
LOCAL_CLUSTER = "local-cluster[2,1,1024]"
STANDALONE = "standalone"

_EXECUTOR = b"CoarseGrainedExecutorBackend"


def session_members(leader: int) -> list[int]:
    """The processes of a session, also when its leader is gone."""
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


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def kill(pid: int) -> bool:
    """Kill a process; whether it was alive, and is not any more."""
    if not is_alive(pid):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), f"the end of process {pid}")
        return True
    return False


def python_workers() -> list[int]:
    """The workers of the session in this process: forked by a daemon of Spark's, whose command they have."""
    found, pending = [], [(os.getpid(), False)]
    while pending:
        pid, is_forked = pending.pop()
        is_daemon = b"pyspark.daemon" in command_line(pid)
        if is_daemon and is_forked:
            found.append(pid)
        pending += [(child, is_daemon) for child in children_of(pid)]
    return found


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has; others have children too
                found += map(int, Path(thread, "children").read_text().split())
    return found


def kill_session(leader: int) -> None:
    """All processes of a session, and those that they start meanwhile."""
    while alive := [pid for pid in session_members(leader) if is_alive(pid)]:
        for pid in alive:
            kill(pid)


def spark_environment(directory: Path) -> dict[str, str]:
    """Variables for processes of Spark that leave nothing behind outside of ``directory``."""
    home, scratch = directory / "spark", directory / "scratch"
    scratch.mkdir(exist_ok=True)
    if not home.exists():
        home.mkdir()
        # A cluster keeps its applications' files in its home, which is the installed package.
        for each in Path(pyspark.__file__).parent.iterdir():
            if each.name != "work":
                (home / each.name).symlink_to(each)
    java = find_java_home()
    return {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_DIRS": str(scratch),
        "TMPDIR": str(scratch),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": WORKER_PATH,
        "PYSPARK_PYTHON": sys.executable,
        faulty.DIRECTORY: os.environ[faulty.DIRECTORY],
        **({} if java is None else {"JAVA_HOME": java}),
    }


@dataclass
class Cluster:
    """Where drivers run; executors of a cluster that runs by itself live in its workers' sessions."""

    master: str
    directory: Path
    workers: list[int] = field(default_factory=list)

    def executors(self, driver: Driver) -> list[int]:
        leaders = self.workers or [driver.pid]
        found = [pid for leader in leaders for pid in session_members(leader)]
        return [pid for pid in found if _EXECUTOR in command_line(pid) and is_alive(pid)]


class Driver:
    """``python -m module config`` with all that it starts."""

    def __init__(self, module: str, cluster: Cluster, config: Mapping[str, Any]) -> None:
        self.log = cluster.directory / "driver.log"
        conf = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        given = {"master": cluster.master, **config, "conf": {**conf, **config.get("conf", {})}}
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(given)],
                env=spark_environment(cluster.directory),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def expect_success(self) -> None:
        assert self._process.wait(PATIENCE) == 0, self.tail()

    def expect_running(self) -> None:
        assert self.is_running(), self.tail()

    def tail(self) -> str:
        return self.log.read_bytes()[-4000:].decode(errors="replace")

    def kill(self, *, with_executors: bool) -> bool:
        """Kill the driver's Python and Java at once, and all else in the session if that is asked for.

        Executors that are left behind notice, and end by themselves in their own time.
        """
        if not self.is_running():
            return False
        victims = session_members(self.pid)
        if not with_executors:
            victims = [pid for pid in victims if b"SparkSubmit" in command_line(pid)]
        os.kill(self.pid, signal.SIGKILL)
        for pid in victims:
            kill(pid)
        return self._process.wait(PATIENCE) == -signal.SIGKILL

    def end(self) -> None:
        kill_session(self.pid)
        self._process.wait(PATIENCE)


@contextlib.contextmanager
def running_cluster(
    kind: str, directory: Path, own: Sequence[Mapping[str, str]] = ({}, {})
) -> Iterator[Cluster]:
    """One of the three kinds: in the driver, of the driver's own processes, or by itself.

    ``own`` are variables of each worker of the last kind, as its machine would have them.
    """
    if kind != STANDALONE:
        yield Cluster(kind, directory)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"spark://127.0.0.1:{port}"
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.append(_daemon(directory, {}, "master.Master", "127.0.0.1", "--port", str(port)))
        # Speculation needs two hosts.
        for host, variables in zip(("127.0.0.1", "127.0.0.2"), own, strict=True):
            size = ("--cores", "1", "--memory", "1g")
            started.append(_daemon(directory, variables, "worker.Worker", host, *size, url))
        yield Cluster(url, directory, [process.pid for process in started[1:]])
    finally:
        for process in started:
            kill_session(process.pid)
            process.wait(PATIENCE)


def _daemon(
    directory: Path, variables: Mapping[str, str], name: str, host: str, *arguments: str
) -> subprocess.Popen[bytes]:
    environment = spark_environment(directory)
    command = [f"{environment['SPARK_HOME']}/bin/spark-class", f"org.apache.spark.deploy.{name}"]
    with (directory / "cluster.log").open("ab") as output:
        return subprocess.Popen(
            [*command, "--host", host, "--webui-port", "0", *arguments],
            env={
                **environment,
                "SPARK_LOCAL_IP": host,
                "SPARK_WORKER_DIR": str(directory / "work"),
                # It would take a fixed port.
                "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
                **variables,
            },
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
