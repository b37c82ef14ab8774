"""The storage of one table, with one interface for all kinds of storage."""

from __future__ import annotations

import builtins
import ctypes
import enum
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias, TypeVar

from lancewal.errors import InvalidInputError, OutcomeUnknownError, StorageError
from lancewal.storage.backend import DELETED_AT_ONCE, Backend, ObjectInfo, TransientError, retried
from lancewal.storage.forks import check_process, note_use
from lancewal.storage.local import LocalBackend
from lancewal.storage.location import check_path, check_prefix, is_staging_name, parse_location
from lancewal.storage.options import check_options
from lancewal.storage.remote import open_remote

if TYPE_CHECKING:
    import pyarrow as pa

    Data: TypeAlias = bytes | bytearray | memoryview | pa.Buffer

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

#: Called after each operation with its name, the seconds it took, and its error or ``None``.
Observer: TypeAlias = Callable[[str, float, BaseException | None], None]

#: Sees the calls of all stores of this process, besides a store's own observer.
_shared_observer: Observer | None = None

_ATTEMPTS = 4
_FIRST_DELAY_SECONDS = 0.1


class PutOutcome(enum.Enum):
    """How a put-if-absent ended."""

    CREATED = "created"
    EXISTS = "exists"


def observe_all(observer: Observer | None) -> None:
    """Let ``observer`` see the calls of all stores of this process, including stores that already exist."""
    global _shared_observer
    _shared_observer = observer


def _observed(
    method: Callable[Concatenate[ObjectStore, P], T],
) -> Callable[Concatenate[ObjectStore, P], T]:
    kind = method.__name__

    @functools.wraps(method)
    def observed(self: ObjectStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        check_process()
        if self.observer is None and _shared_observer is None:
            return method(self, *args, **kwargs)
        start = time.perf_counter()
        try:
            result = method(self, *args, **kwargs)
        except BaseException as error:
            self._notify(kind, start, error)
            raise
        self._notify(kind, start, None)
        return result

    return observed


class ObjectStore:
    """Objects below one table's root; every method may be called from any thread.

    Paths are relative to the root and use ``/``. Transient failures are retried a few times. After
    that a read raises :class:`~lancewal.errors.StorageError`, and so does a write that did not happen.
    A write that may have happened raises :class:`~lancewal.errors.OutcomeUnknownError`. Error texts never
    contain credentials.
    ``uri`` and ``storage_options`` are the arguments of pylance for the same table.

    Tests may subclass this class or pass a backend of their own to inject faults.

    >>> store = ObjectStore.from_uri("memory://doctest")
    >>> store.put_if_absent("a/b", b"mine"), store.put_if_absent("a/b", b"other")
    (<PutOutcome.CREATED: 'created'>, <PutOutcome.EXISTS: 'exists'>)
    >>> store.get("a/b"), [each.path for each in store.list("a")]
    (b'mine', ['a/b'])
    """

    def __init__(
        self,
        uri: str,
        backend: Backend,
        storage_options: Mapping[str, str] | None = None,
        *,
        observer: Observer | None = None,
        attempts: int = _ATTEMPTS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        check_process()
        note_use()
        self.uri = uri
        self.storage_options: Mapping[str, str] = MappingProxyType(dict(storage_options or {}))
        self.observer = observer
        #: Represents the store in keys of the process's cache, which must not keep the store alive.
        self.identity = object()
        self._backend = backend
        self._attempts = attempts
        self._sleep = sleep

    @classmethod
    def from_uri(
        cls,
        uri: str | os.PathLike[str],
        storage_options: Mapping[str, str] | None = None,
        *,
        fsync: bool = True,
        observer: Observer | None = None,
    ) -> ObjectStore:
        """Open the store of the table at ``uri``: a path, ``file://``, ``memory://name``, ``s3://``,
        ``az://``, ``abfss://`` or ``gs://``.

        ``fsync`` matters only on local disks: without it a write survives a crash of the process,
        with it also a power cut. Memory stores with the same name are shared within the process.
        """
        options = check_options(storage_options)
        location = parse_location(uri)
        backend: Backend
        if location.kind == "local":
            backend = LocalBackend(location.prefix, fsync=fsync)
        else:
            backend = open_remote(location, options)
        return ObjectStore(location.uri, backend, options, observer=observer)

    def __repr__(self) -> str:
        return f"ObjectStore({self.uri!r})"

    @property
    def is_local(self) -> bool:
        """Whether the objects are files in a directory of this machine."""
        return isinstance(self._backend, LocalBackend)

    @property
    def fsync(self) -> bool:
        """Whether a write is synced to disk before it returns; always false for remote stores."""
        return isinstance(self._backend, LocalBackend) and self._backend.fsync

    def local_path(self, path: str) -> str | None:
        """The absolute file name of an object, or ``None`` when the store is not local."""
        check_path(path)
        return self._backend.full_path(path) if isinstance(self._backend, LocalBackend) else None

    def link(self, path: str) -> ObjectInfo | None:
        """The symbolic link at ``path``; ``None`` if there is none, and on remote stores.

        Links themselves are listed and deleted. Every other access through a link raises a
        ``StorageError``, because its target does not belong to the table.
        """
        check_path(path)
        return self._backend.link(path) if isinstance(self._backend, LocalBackend) else None

    def refuse_links(self, directory: str) -> None:
        """Raise a ``StorageError`` if a symbolic link is in the path of ``directory``, or below it.

        Call it before passing the directory to a library that follows links.
        """
        if isinstance(self._backend, LocalBackend):
            self._backend.refuse_links(check_prefix(directory))

    def check_place(self) -> None:
        """Raise a ``StorageError`` if the table's local directory is no longer the same directory.

        Call it after another library wrote there: such a library creates a missing directory again.
        """
        if isinstance(self._backend, LocalBackend):
            self._backend.check_root()

    @_observed
    def put_if_absent(self, path: str, data: Data) -> PutOutcome:
        """Store ``data`` at ``path`` unless an object is there; in a race exactly one caller gets CREATED.

        ``data`` must contain something that only this call writes, such as a random write id. If
        the store says that an object exists, but its bytes are ours, then an earlier attempt
        succeeded and its reply was lost. That counts as CREATED. So the same call may be
        repeated after an ``OutcomeUnknownError``.
        """
        _check_writable(path)
        view = _byte_view(data)
        return self._persist(lambda: self._create(path, view), writes=True)

    @_observed
    def put(self, path: str, data: Data, *, durable: bool = True) -> None:
        """Store ``data`` at ``path``; replaces an existing object atomically.

        ``durable=False`` saves the syncs of a local disk, for data that a power cut may destroy.
        """
        _check_writable(path)
        view = _byte_view(data)
        self._persist(lambda: self._backend.replace(path, view, durable=durable), writes=True)

    @_observed
    def put_from(self, path: str, chunks: Callable[[], Iterator[bytes]]) -> None:
        """Like :meth:`put`, for data too large for memory; each attempt calls ``chunks`` again."""
        _check_writable(path)
        self._persist(lambda: self._backend.replace_from(path, chunks()), writes=True)

    @_observed
    def get(self, path: str) -> bytes:
        """The object's bytes; raises ``FileNotFoundError`` when there is none."""
        check_path(path)
        return self._persist(lambda: self._backend.read(path))

    @_observed
    def get_range(self, path: str, start: int, length: int) -> bytes:
        """``length`` bytes from ``start``; fewer if the object ends before that."""
        check_path(path)
        if start < 0 or length < 0:
            raise InvalidInputError(f"a range needs start and length of 0 or more, not {start}, {length}")
        if length == 0:
            return b""
        return self._persist(lambda: self._backend.read_range(path, start, length))

    @_observed
    def head(self, path: str) -> ObjectInfo | None:
        """The size and modification time of an object, or ``None`` if there is none."""
        check_path(path)
        return self._persist(lambda: self._backend.head(path))

    @_observed
    def list(self, prefix: str = "") -> builtins.list[ObjectInfo]:
        """All objects in the directory ``prefix`` and below, sorted by path; empty when it is missing.

        ``a/b`` lists ``a/b/c``, but neither ``a/bc`` nor the object ``a/b``. Half-written files
        on a local disk are left out, see :meth:`list_staging`.
        """
        directory = check_prefix(prefix)
        return sorted(self._persist(lambda: self._backend.list(directory)), key=_by_path)

    @_observed
    def list_directories(self, prefix: str = "") -> builtins.list[str]:
        """Names of the directories directly below ``prefix``, sorted.

        On local disks this includes empty directories, and symbolic links, which may lead to directories.
        """
        directory = check_prefix(prefix)
        return sorted(self._persist(lambda: self._backend.list_directories(directory)))

    @_observed
    def list_staging(self, prefix: str = "") -> builtins.list[ObjectInfo]:
        """Staging files below ``prefix``, of writes that are in progress or were killed.

        Only local disks have any. Their age distinguishes the two.
        """
        directory = check_prefix(prefix)
        return sorted(self._persist(lambda: self._backend.list_staging(directory)), key=_by_path)

    @_observed
    def delete(self, path: str) -> None:
        """Delete an object; a missing one is fine.

        A deletion is not synced: after a power cut a deleted local object may be back.
        """
        check_path(path)
        self._persist(lambda: self._backend.delete(path), writes=True)

    @_observed
    def delete_many(self, paths: Sequence[str]) -> None:
        """Delete objects, up to a thousand per request if the store can; missing ones are fine.

        The groups of a thousand are deleted in the given order. Within a group there is no order: a
        remote store may execute a request partly, so after a failure, or if this process is killed, any
        objects of the group may be gone.
        """
        for path in paths:
            check_path(path)
        for start in range(0, len(paths), DELETED_AT_ONCE):
            some = paths[start : start + DELETED_AT_ONCE]
            self._persist(functools.partial(self._backend.delete_many, some), writes=True)

    @_observed
    def delete_prefix(self, prefix: str) -> int:
        """Delete the directory ``prefix`` with all objects and staging files in it; returns how many."""
        directory = check_prefix(prefix)
        if not directory:
            raise InvalidInputError("deleting everything below the table's root is refused; name a directory")
        return self._persist(lambda: self._backend.delete_prefix(directory), writes=True)

    def _notify(self, kind: str, start: float, error: BaseException | None) -> None:
        seconds = time.perf_counter() - start
        for observer in (self.observer, _shared_observer):
            if observer is None:
                continue
            try:
                observer(kind, seconds, error)
            except Exception:
                # A broken metric must not turn a durable write into a failed one.
                logger.exception("the storage observer failed")

    def _create(self, path: str, data: memoryview) -> PutOutcome:
        if self._backend.create(path, data):
            return PutOutcome.CREATED
        try:
            return self._compare(path, data)
        except TransientError:
            raise
        except StorageError as error:
            # The backend's own retries may have created the object, and the comparison failed.
            raise OutcomeUnknownError(f"{path!r} exists, perhaps by this very write: {error}") from error

    def _compare(self, path: str, data: memoryview) -> PutOutcome:
        """Compare the existing object with ``data``: CREATED if it is ours, EXISTS if not."""
        stored = self._backend.head(path)
        if stored is None:
            # S3 also says this while another writer's request is running, and that request may still fail.
            raise TransientError(f"{path!r} in {self.uri} was said to exist, and is not there")
        if stored.size != data.nbytes:
            return PutOutcome.EXISTS
        try:
            content = self._backend.read(path)
        except FileNotFoundError as error:
            raise TransientError(f"{path!r} in {self.uri} vanished while it was compared") from error
        if content != data:
            return PutOutcome.EXISTS
        # The attempt that created it may have failed before its sync.
        self._backend.settle(path)
        return PutOutcome.CREATED

    def _persist(self, call: Callable[[], T], *, writes: bool = False) -> T:
        """Call until it succeeds, fails for good, or the attempts are used up.

        If the call ``writes``, every attempt may have taken effect, except one that failed for good.
        """
        attempts = 0

        def attempt() -> T:
            nonlocal attempts
            attempts += 1
            return call()

        try:
            return retried(
                attempt,
                TransientError,
                attempts=self._attempts,
                first_pause=_FIRST_DELAY_SECONDS,
                sleep=self._sleep,
            )
        except TransientError as error:
            kind = OutcomeUnknownError if writes else StorageError
            raise kind(f"{error}; gave up after {self._attempts} attempts") from error.__cause__
        except StorageError as error:
            if not writes or attempts == 1:
                raise
            text = f"{error}; an earlier attempt may have taken effect"
            raise OutcomeUnknownError(text) from error.__cause__


def _by_path(info: ObjectInfo) -> str:
    return info.path


def _check_writable(path: str) -> None:
    check_path(path)
    if is_staging_name(path[path.rfind("/") + 1 :]):
        raise InvalidInputError(f"path {path!r} looks like a half-written file and would never be listed")


def _byte_view(data: Data) -> memoryview:
    try:
        view = memoryview(data)
        if view.c_contiguous:
            return view if view.format == "B" and view.ndim == 1 else view.cast("B")
    except TypeError:
        logger.debug("%s has no bytes to store", type(data).__name__)
    raise InvalidInputError(f"cannot store {type(data).__name__}: pass contiguous bytes")


def sync_file_system(store: ObjectStore) -> None:
    """Sync the whole file system of the table to disk.

    Lance never syncs. Before rows are deleted elsewhere because the base table has them, the base
    table's own files must survive a power cut. Does nothing on object storage, nor on a
    store that was opened without fsync.
    """
    root = store.local_path("_versions")
    if root is None or not store.fsync:
        return
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # os.sync reports no failure, so it must not replace a failed syncfs.
            if sys.platform != "linux":
                os.sync()
            elif ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        raise StorageError(f"cannot sync the file system of {store.uri}: {error}") from error
