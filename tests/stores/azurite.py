"""Azurite, Microsoft's emulator of Azure's blob storage, from npm."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from email.utils import formatdate
from pathlib import Path
from types import TracebackType

from tests.patience import PATIENCE

VERSION = "3.37.0"
#: Where it is kept between runs: it has 370 packages.
HOME = Path(tempfile.gettempdir()) / f"lancewal-azurite-{VERSION}-{os.getuid() if os.name == 'posix' else ''}"
_MAIN = "node_modules/azurite/dist/src/blob/main.js"
_ACCOUNT = "devstoreaccount1"
# The key that every Azurite has, from its documentation.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_CONTAINER = "lancewal-tests"
_START_SECONDS = 120.0


def why_not(*, install: bool) -> str | None:
    """Why Azurite cannot be had; ``install`` fetches it where npm can."""
    if shutil.which("node") is None:
        return "Azurite needs Node.js"
    if (HOME / "complete").exists():
        return None
    if not install:
        return f"Azurite is not in {HOME} yet: the soak tests put it there"
    if shutil.which("npm") is None:
        return "Azurite comes from npm, which is not installed"
    with tempfile.TemporaryDirectory(dir=HOME.parent, prefix="lancewal-npm-") as place:
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", f"azurite@{VERSION}"]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True)
        if done.returncode:
            return f"npm could not install Azurite: {done.stderr[-300:]}"
        HOME.mkdir(exist_ok=True)
        shutil.copytree(Path(place) / "node_modules", HOME / "node_modules", dirs_exist_ok=True)
        (HOME / "complete").touch()
    return None


class Azurite:
    """A blob service on a free port of 127.0.0.1, with one container."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="lancewal-azure-", ignore_cleanup_errors=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = ""

    def storage_options(self, endpoint: str) -> dict[str, str]:
        """For pylance and for us alike."""
        return {
            "azure_storage_account_name": _ACCOUNT,
            "azure_storage_account_key": _KEY,
            "azure_endpoint": f"{endpoint}/{_ACCOUNT}",
            "allow_http": "true",
        }

    def uri(self, prefix: str) -> str:
        return f"az://{_CONTAINER}/{prefix}"

    def __enter__(self) -> Azurite:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        command = ["node", str(HOME / _MAIN), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
        command += ["--location", self._directory.name, "--silent", "--skipApiVersionCheck"]
        command += ["--disableTelemetry"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not _listens(port):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("Azurite did not start")
                time.sleep(0.05)
            self._create_container()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._directory.cleanup()

    def _create_container(self) -> None:
        now, version, kind = formatdate(usegmt=True), "2021-08-06", "text/plain"
        resource = f"/{_ACCOUNT}/{_ACCOUNT}/{_CONTAINER}\nrestype:container"
        text = f"PUT\n\n\n\n\n{kind}\n\n\n\n\n\n\nx-ms-date:{now}\nx-ms-version:{version}\n{resource}"
        signature = hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()
        headers = {
            "x-ms-date": now,
            "x-ms-version": version,
            "Content-Type": kind,
            "Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(signature).decode()}",
        }
        url = f"{self.endpoint}/{_ACCOUNT}/{_CONTAINER}?restype=container"
        urllib.request.urlopen(
            urllib.request.Request(url, b"", headers, method="PUT"), timeout=PATIENCE
        ).close()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True
