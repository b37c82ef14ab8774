"""Servers that tests run against, each a process of its own that ends with the tests."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.patience import PATIENCE

_BUCKET = "lancewal-tests"
_STOP_SECONDS = 10.0
_PORT_ATTEMPTS = 3

# The server ends when its standard input does.
_RUN = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
from ministack.app import main
main()
"""


class ServerProcess:
    """A process that ends with the block, and with its standard input: also when who started it is killed."""

    process: subprocess.Popen[Any] | None = None
    endpoint = ""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class S3Server(ServerProcess):
    """ministack on a free port of 127.0.0.1, with one bucket; atomic under racing creates."""

    def __init__(self) -> None:
        if importlib.util.find_spec("ministack") is None:
            raise RuntimeError("ministack is not installed: install the project with its dev extra")
        self._directory = tempfile.TemporaryDirectory(prefix="lancewal-s3-")

    @property
    def storage_options(self) -> dict[str, str]:
        """For pylance and for us alike."""
        return {
            "aws_access_key_id": "test-access-key",
            "aws_secret_access_key": "test-secret-key",
            "aws_region": "us-east-1",
            "aws_endpoint": self.endpoint,
            "allow_http": "true",
        }

    def uri(self, prefix: str) -> str:
        return f"s3://{_BUCKET}/{prefix}"

    def __enter__(self) -> S3Server:
        try:
            for attempt in range(1, _PORT_ATTEMPTS + 1):
                try:
                    self._start()
                    break
                except RuntimeError:
                    # Somebody may have taken the port between the search and the start.
                    if attempt == _PORT_ATTEMPTS:
                        raise
            urllib.request.urlopen(
                urllib.request.Request(f"{self.endpoint}/{_BUCKET}", method="PUT"), timeout=PATIENCE
            ).close()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        super().stop()
        self._directory.cleanup()

    def _start(self) -> None:
        port = _free_port()
        log = Path(self._directory.name) / "server.log"
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("AWS_")},
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": str(port),
            "SERVICES": "s3",
            "LOG_LEVEL": "WARNING",
            "TMPDIR": self._directory.name,
        }
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _RUN],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.endpoint = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + PATIENCE
        while not _answers(f"{self.endpoint}/_ministack/health"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"ministack did not start:\n{log.read_text(errors='replace')}")
            time.sleep(0.05)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
