"""A gateway's HTTP endpoint, for orchestrators, Prometheus, and operators with a browser."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from lancewal.errors import InvalidInputError
from lancewal.gateway.access import is_loopback
from lancewal.gateway.server import Gateway
from lancewal.gateway.watch import EVERY, Watch

_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_PAGE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
#: The page loads nothing from other hosts, and no other page may frame it.
_PAGE_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; frame-ancestors 'none'"
)
#: Seconds that a client may take to send its request.
_PATIENCE = 10.0


class HealthEndpoint:
    """Serves ``/live``, ``/ready``, ``/metrics``, and a page for operators at ``/``; a context manager.

    ``/ready`` returns 503 as soon as the gateway accepts no more calls, so that a stopping gateway gets no
    more traffic. The page shows the levels of each shard, the pending work and the latencies of calls, from
    ``/status.json``. Metrics need the extra ``metrics``. If other machines can reach the endpoint, metrics
    and the page's figures are served only with a ``token``, or with any of several.
    """

    def __init__(
        self,
        gateway: Gateway,
        listen: str,
        *,
        token: str | Sequence[str] | None = None,
        look_every: float = EVERY,
    ) -> None:
        host, _, port = listen.rpartition(":")
        if not host or not port.isdecimal():
            raise InvalidInputError(f"the HTTP endpoint is {listen!r}; give host:port, as 127.0.0.1:9464")
        tokens = (token,) if isinstance(token, str) else tuple(token or ())
        may_tell = bool(tokens) or is_loopback(listen)
        self._watch = Watch(gateway.tables, gateway.call_times, look_every) if may_tell else None
        metrics = _metrics_of(gateway) if may_tell else None
        try:
            answers = _Answers(gateway, metrics, self._watch, tokens)
            self._server = _Server((host.strip("[]"), int(port)), answers)
        except (OSError, OverflowError) as error:
            if self._watch is not None:
                self._watch.close()
            raise InvalidInputError(f"cannot listen on {listen}: {error}") from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="lancewal-http", daemon=True)
        self._thread.start()
        self.address = f"http://{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if self._watch is not None:
            self._watch.close()

    def __enter__(self) -> HealthEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Answers:
    """The sources of the answers; ``metrics`` and ``watch`` are ``None`` if they may not be served."""

    gateway: Gateway
    metrics: Callable[[], bytes] | None
    watch: Watch | None
    tokens: tuple[str, ...]

    def status(self) -> dict[str, Any] | None:
        if self.watch is None:
            return None
        gateway = self.gateway
        said = {"address": gateway.address, "ready": gateway.ready, "calls": gateway.calls_under_way}
        return {**said, **self.watch.document()}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], answers: _Answers) -> None:
        self.answers = answers
        self.page = page_files()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _PATIENCE

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        answers = self.server.answers
        if path == "/live":
            self._answer(HTTPStatus.OK, b"alive\n")
        elif path == "/ready":
            ready = answers.gateway.ready
            self._answer(
                HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE,
                b"ready\n" if ready else b"stopping\n",
            )
        elif path in self.server.page:
            self._answer(HTTPStatus.OK, *self.server.page[path])
        elif path == "/metrics" and answers.metrics is not None:
            self._tell(answers.metrics, _TEXT)
        elif path == "/status.json" and answers.watch is not None:
            self._tell(lambda: json.dumps(answers.status()).encode(), _JSON)
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"there are /, /live, /ready, /metrics and /status.json\n")

    do_HEAD = do_GET  # noqa: N815 - the base class calls it by this name

    def _tell(self, answer: Callable[[], bytes], content_type: str) -> None:
        """Answer if the request has a known token."""
        tokens = self.server.answers.tokens
        given = self.headers.get("Authorization", "").encode()
        # All tokens are compared, even after a match.
        known = [hmac.compare_digest(given, f"Bearer {each}".encode()) for each in tokens]
        if not tokens or any(known):
            self._answer(HTTPStatus.OK, answer(), content_type)
        else:
            self._answer(HTTPStatus.UNAUTHORIZED, b"this needs the token, as Authorization: Bearer ...\n")

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str = _TEXT) -> None:
        # The client may be gone.
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", _PAGE_POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because probes come every few seconds."""


def page_files() -> dict[str, tuple[bytes, str]]:
    """The files of the operator's page: body and content type by path."""
    found = {}
    for each in files("lancewal.gateway").joinpath("page").iterdir():
        kind = _PAGE_TYPES.get(each.name.rpartition(".")[2])
        if kind is not None:
            found[f"/{each.name}"] = (each.read_bytes(), f"{kind}; charset=utf-8")
    return {**found, "/": found["/index.html"]}


def _metrics_of(gateway: Gateway) -> Callable[[], bytes] | None:
    """A function that returns this process's metrics; ``None`` without the Prometheus client."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError:
        return None
    from lancewal.metrics import register

    registry = CollectorRegistry()
    register(registry, list(gateway.tables.values()))
    return lambda: bytes(generate_latest(registry))
