"""What orchestrators and Prometheus ask a gateway over HTTP: is it alive, is it ready, what has it done."""

from __future__ import annotations

import contextlib
import hmac
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lancewal.errors import InvalidInputError
from lancewal.gateway.access import is_loopback
from lancewal.gateway.server import Gateway

_TEXT = "text/plain; charset=utf-8"
#: Seconds that a client may take to send its request.
_PATIENCE = 10.0


class HealthEndpoint:
    """Serves ``/live``, ``/ready`` and ``/metrics``; a context manager.

    ``/ready`` is 503 from the moment that the gateway takes no more calls, so that no traffic is sent to one
    that is stopping. Metrics need the extra ``metrics``; where the endpoint can be reached from other
    machines they also need a ``token``.
    """

    def __init__(self, gateway: Gateway, listen: str, *, token: str | None = None) -> None:
        host, _, port = listen.rpartition(":")
        if not host or not port.isdecimal():
            raise InvalidInputError(f"the HTTP endpoint is {listen!r}; give host:port, as 127.0.0.1:9464")
        metrics = _metrics_of(gateway)
        if token is None and not is_loopback(listen):
            metrics = None
        try:
            self._server = _Server((host.strip("[]"), int(port)), gateway, metrics, token)
        except (OSError, OverflowError) as error:
            raise InvalidInputError(f"cannot listen on {listen}: {error}") from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="lancewal-http", daemon=True)
        self._thread.start()
        self.address = f"http://{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> HealthEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        gateway: Gateway,
        metrics: Callable[[], bytes] | None,
        token: str | None,
    ) -> None:
        self.gateway = gateway
        self.metrics = metrics
        self.token = token
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _PATIENCE

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/live":
            self._answer(HTTPStatus.OK, b"alive\n")
        elif path == "/ready":
            ready = self.server.gateway.ready
            self._answer(
                HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE,
                b"ready\n" if ready else b"stopping\n",
            )
        elif path == "/metrics" and self.server.metrics is not None:
            if self._may_see_metrics():
                self._answer(HTTPStatus.OK, self.server.metrics())
            else:
                self._answer(HTTPStatus.UNAUTHORIZED, b"metrics need the token\n")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"there are /live, /ready and /metrics\n")

    do_HEAD = do_GET  # noqa: N815 - the base class calls it by this name

    def _may_see_metrics(self) -> bool:
        token = self.server.token
        given = self.headers.get("Authorization", "")
        return token is None or hmac.compare_digest(given.encode(), f"Bearer {token}".encode())

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        # The client may be gone.
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", _TEXT)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: probes come every few seconds."""


def _metrics_of(gateway: Gateway) -> Callable[[], bytes] | None:
    """What gives the metrics of this process; ``None`` without the Prometheus client."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError:
        return None
    from lancewal.metrics import register

    registry = CollectorRegistry()
    register(registry, gateway.tables)
    return lambda: bytes(generate_latest(registry))
