"""Workarounds for Flight's server: cut its connections, and keep it from blocking a forked child's exit.

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
from urllib.parse import unquote

from pyarrow import flight

from lancewal.storage import in_forked_child

_OWN_FILES = "/dev/fd"


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
        name = here.decode() if isinstance(here, bytes) else here
        return bool(name) and address == f"grpc+unix://{name}"
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
