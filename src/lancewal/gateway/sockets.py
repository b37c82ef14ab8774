"""What Flight's server does not offer: to end its connections, and to leave a forked child in peace.

Flight's server waits at its end until every call is over, and a call that waits for its client's next message
is never over: nothing in Flight's interface wakes it. The operating system does, once the connection under
it is shut down.
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
    """Shut down connections that this process has accepted at ``address``; how many there were.

    All of them, or those of ``peers``, as gRPC names them. On a Unix socket peers have no names.
    """
    cut = 0
    named = None if peers is None else {unquote(peer) for peer in peers}
    for name in os.listdir(_OWN_FILES):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # A copy, so that the server's own file stays its own to close.
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # gone meanwhile
        with connection:
            try:
                if _is_at(connection, address) and (named is None or _peer(connection) in named):
                    connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
            except OSError:
                continue  # not connected: the listening socket itself, or one that has just ended
    return cut


def _peer(connection: socket.socket) -> str | None:
    """The other end in gRPC's words, but for its percent signs."""
    if connection.family == socket.AF_UNIX:
        return None
    host, port, *_ = connection.getpeername()
    host = host.removeprefix("::ffff:")  # an IPv4 client of a socket for both
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _is_at(connection: socket.socket, address: str) -> bool:
    connection.getpeername()  # raises for one that is not connected
    here = connection.getsockname()
    if connection.family == socket.AF_UNIX:
        name = here.decode() if isinstance(here, bytes) else here
        return bool(name) and address == f"grpc+unix://{name}"
    return connection.family in (socket.AF_INET, socket.AF_INET6) and address.endswith(f":{here[1]}")


def _leave_servers_alone() -> None:
    """In a forked child: the servers are its parent's.

    pyarrow has every server shut down when its process ends. A child has none of the server's threads, and
    would wait for them for ever instead of ending.
    """
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = each.peek()
        if alive is not None and isinstance(alive[0], flight.FlightServerBase):
            each.atexit = False


in_forked_child(_leave_servers_alone)
