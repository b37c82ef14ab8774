"""One table shared by several processes of one machine, such as the workers of a web service.

One of the processes leads: it owns the shards, and serves the others through a Unix socket. A file lock
decides which process leads. The operating system releases the lock when its process ends, however that
happens. A process that cannot reach the leader tries to get the lock, and leads if it succeeds. Every process
resends the puts that were not answered, under the same ids, so none is lost and none is written twice.

Safety does not depend on the lock. If there were two leaders, the epochs of the shards would keep the table
correct.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lancewal.errors import ClosedError, InvalidInputError, LanceWalError
from lancewal.gateway.calls import Limits
from lancewal.gateway.client import RemoteTable
from lancewal.gateway.connection import DEFAULT_TIMEOUT, Connection
from lancewal.gateway.remote_writer import RemoteWriter
from lancewal.gateway.served import durable
from lancewal.gateway.server import Gateway
from lancewal.gateway.sockets import unix_address
from lancewal.storage import check_process, in_forked_child, is_forked
from lancewal.table import Table, open_table
from lancewal.writer import Cast

logger = logging.getLogger(__name__)

#: The most bytes of a Unix socket's path that all systems allow.
_LONGEST_SOCKET_PATH = 100


def share(
    uri: str | os.PathLike[str],
    storage_options: Mapping[str, str] | None = None,
    *,
    directory: str | os.PathLike[str] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    limits: Limits | None = None,
    **writer_settings: Any,
) -> SharedTable:
    """Open a table that several processes of this machine write to, each as if it were alone.

    Call it in each process, with the same arguments, after the processes were started (not before a
    fork). ``directory`` is where their lock and socket are; by default it is a temporary directory of this
    user. A put waits up to ``timeout`` seconds for a leader. ``writer_settings`` are those of
    :meth:`Table.writer`.

    >>> import tempfile, lance, lancewal, pyarrow as pa
    >>> uri = tempfile.mkdtemp() + "/events"
    >>> _ = lance.write_dataset(pa.schema([("id", pa.int64())]).empty_table(), uri)
    >>> _ = lancewal.initialize(uri, unsharded=True)
    >>> with lancewal.share(uri) as shared, shared.writer() as writer:
    ...     _ = writer.put(pa.table({"id": [1, 2, 3]}))
    ...     shared.table.count_rows()
    3
    """
    table = open_table(uri, storage_options)
    place = _Place(table.uri, directory)
    return SharedTable(table, place, timeout, limits, writer_settings)


class SharedTable:
    """This process's part in a shared table; get one from :func:`lancewal.share`. A context manager.

    Read through :attr:`table`, which sees all durable rows.

    >>> import tempfile, lancewal
    >>> uri = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1}], key="id").uri
    >>> with lancewal.share(uri) as shared:  # in every worker of a machine; one of them writes for all
    ...     with shared.writer() as writer:
    ...         _ = writer.put({"id": 2})
    ...     shared.flush()
    ...     shared.table.count_rows()
    2
    """

    def __init__(
        self,
        table: Table,
        place: _Place,
        timeout: float,
        limits: Limits | None,
        writer_settings: Mapping[str, Any],
    ) -> None:
        self.table = table
        self._place = place
        self._limits = limits
        self._settings = durable(writer_settings)
        self._lock = threading.Lock()
        self._gateway: Gateway | None = None
        self._closed = False
        self._connection = Connection(
            [place.address], None, None, timeout, before_try=self._lead_if_nobody_does
        )
        self._remote = RemoteTable(self._connection, "shared")

    @property
    def leads(self) -> bool:
        """Whether this process leads now."""
        return self._gateway is not None

    def writer(self, *, cast: Cast = "numbers") -> RemoteWriter:
        """A writer that writes through the leader; puts are durable when they return."""
        return self._remote.writer(cast=cast)

    def flush(self) -> None:
        """Let the leader move all rows from MemTables and WALs to SSTables."""
        self._remote.flush()

    def close(self) -> None:
        """Accept no more puts here. A leader flushes; the next process that puts becomes the leader.

        In a forked child this does nothing, because the lock and the socket belong to the parent.
        """
        if is_forked():
            return
        with self._lock:
            self._closed = True
            gateway, self._gateway = self._gateway, None
        self._connection.close()
        try:
            if gateway is not None:
                gateway.close()
        finally:
            if gateway is not None:
                self._place.leave()

    def __enter__(self) -> SharedTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lead_if_nobody_does(self) -> None:
        """Get the lock if it is free, and serve; called before each new connection to the leader."""
        check_process()
        with self._lock:
            if self._closed:
                raise ClosedError("this shared table is closed; share it again")
            if self._gateway is not None or not self._place.take():
                return
            try:
                self._gateway = Gateway(
                    {"shared": self.table},
                    listen=f"unix:{self._place.socket}",
                    limits=self._limits,
                    **self._settings,
                )
            except BaseException:
                self._place.leave()
                raise
        logger.info("leads the processes that share %s", self.table.uri)


class _Place:
    """The lock and the socket of the processes that share a table."""

    def __init__(self, uri: str, directory: str | os.PathLike[str] | None) -> None:
        name = hashlib.sha256(uri.rstrip("/").encode()).hexdigest()[:20]
        where = Path(directory) if directory is not None else _own_directory()
        self.socket = where / f"{name}.sock"
        self._lock_path = where / f"{name}.lock"
        self._lock_file: int | None = None
        if len(os.fsencode(self.socket)) > _LONGEST_SOCKET_PATH:
            raise InvalidInputError(
                f"the path {self.socket} is too long for a socket; give a directory with a shorter one"
            )
        if not where.is_dir():
            raise InvalidInputError(f"{where} is no directory; make it, or give another one")

    @property
    def address(self) -> str:
        return unix_address(self.socket)

    def take(self) -> bool:
        """Get the lock; ``False`` while another process has it."""
        file = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        except BaseException:
            os.close(file)
            raise
        # A killed leader may have left its socket. We have the lock, so no process serves there.
        with contextlib.suppress(FileNotFoundError):
            self.socket.unlink()
        self._lock_file = file
        _lock_files.add(file)
        return True

    def leave(self) -> None:
        """Release the lock."""
        file, self._lock_file = self._lock_file, None
        if file is not None:
            with contextlib.suppress(FileNotFoundError):
                self.socket.unlink()
            # Unlock explicitly: a forked child may still have the file open, which would keep the lock.
            fcntl.flock(file, fcntl.LOCK_UN)
            _lock_files.discard(file)
            os.close(file)


#: The locks that this process holds. A forked child must not keep them after the parent has ended.
_lock_files: set[int] = set()


def _let_go_in_child() -> None:
    for file in _lock_files:
        with contextlib.suppress(OSError):
            os.close(file)
    _lock_files.clear()


in_forked_child(_let_go_in_child)


def _own_directory() -> Path:
    """A directory that only this user can access: a user who could write there could pose as the leader."""
    where = Path(tempfile.gettempdir()) / f"lancewal-{os.getuid()}"
    where.mkdir(mode=0o700, exist_ok=True)
    found = where.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or where.is_symlink():
        raise LanceWalError(
            f"{where} is not this user's alone, so others could read what is put; remove it, or give "
            "another directory"
        )
    return where
