"""Workarounds for Flight's server: why it cannot listen, its connections, and the exit of forked children.

gRPC says that a server did not start, and not why. It also takes a Unix socket away from a process that
listens on it.

At shutdown Flight's server waits until every call has ended. A call that waits for its client's next message
does not end, and nothing in Flight's interface wakes it. The operating system wakes it when the underlying
connection is shut down.
"""

from __future__ import annotations

import os
import socket
import stat
import weakref
from collections.abc import Collection
from urllib.parse import quote, unquote

from pyarrow import flight

from lancewal.storage import in_forked_child

_OWN_FILES = "/dev/fd"
#: Why a server with TLS did not start on an address that is free.
BAD_CERTIFICATE = "the certificate and the key are no PEM files, or do not belong together"


def unix_address(path: str | bytes | os.PathLike[str]) -> str:
    """The address of a Unix socket; it is a URI.

    Its path is escaped twice, because first Arrow decodes it and then gRPC does.

    >>> unix_address("/tmp/user.sock"), unix_address("/tmp/a user.sock")
    ('grpc+unix:///tmp/user.sock', 'grpc+unix:///tmp/a%2520user.sock')
    """
    return f"grpc+unix://{quote(quote(os.fsencode(path)))}"


def is_served(listen: str) -> bool:
    """Whether a process listens at ``unix:PATH``; a socket that a killed process has left is free."""
    if not listen.startswith("unix:"):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(listen.removeprefix("unix:"))
        except OSError:
            return False
        return True


def why_not(listen: str) -> str | None:
    """What the system says against listening there; ``None`` if nothing."""
    try:
        if listen.startswith("unix:"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.bind(listen.removeprefix("unix:"))
            os.unlink(listen.removeprefix("unix:"))
            return None
        host, _, port = listen.rpartition(":")
        family, kind, protocol, _, place = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        return error.strerror or str(error)
    return None


def cut_connections(address: str, peers: Collection[str] | None = None) -> int:
    """Shut down connections that this process has accepted at ``address``; returns how many.

    All of them, or only those of ``peers``, in gRPC's spelling. On a Unix socket peers have no names.
    """
    cut = 0
    named = None if peers is None else {unquote(peer) for peer in peers}
    for name in os.listdir(_OWN_FILES):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # A duplicate, so that only the server closes its own descriptor.
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed in between
        with connection:
            try:
                if _is_at(connection, address) and (named is None or _peer(connection) in named):
                    connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
            except OSError:
                continue  # not connected: the listening socket itself, or one that has just ended
    return cut


def _peer(connection: socket.socket) -> str | None:
    """The other end in gRPC's spelling, without percent-encoding."""
    if connection.family == socket.AF_UNIX:
        return None
    host, port, *_ = connection.getpeername()
    host = host.removeprefix("::ffff:")  # an IPv4 client of a dual-stack socket
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _is_at(connection: socket.socket, address: str) -> bool:
    connection.getpeername()  # raises for one that is not connected
    here = connection.getsockname()
    if connection.family == socket.AF_UNIX:
        return bool(here) and address == unix_address(here)
    return connection.family in (socket.AF_INET, socket.AF_INET6) and address.endswith(f":{here[1]}")


def _leave_servers_alone() -> None:
    """In a forked child, do not shut down the parent's servers at exit.

    pyarrow shuts every server down when its process ends. A child does not have the server's threads, and
    would wait for them for ever.
    """
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = each.peek()
        if alive is not None and isinstance(alive[0], flight.FlightServerBase):
            each.atexit = False


in_forked_child(_leave_servers_alone)
