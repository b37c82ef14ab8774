"""Object stores through obstore: S3, Azure, Google Cloud, and memory."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    JoinError,
    NotModifiedError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from lancewal.errors import InvalidInputError, LanceWalError, OutcomeUnknownError, StorageError
from lancewal.storage.backend import ObjectInfo, TransientError
from lancewal.storage.location import Location
from lancewal.storage.options import client_settings
from lancewal.storage.secrets import is_panic, scrubbed

if TYPE_CHECKING:
    from obstore import ObjectMeta

T = TypeVar("T")

_STORES: dict[str, Callable[..., Any]] = {"s3": S3Store, "azure": AzureStore, "gs": GCSStore}
_LOST_RACE = (AlreadyExistsError, PreconditionError, NotModifiedError)
_MAY_PASS = (GenericError, JoinError)
_ADVICE: tuple[tuple[type[BaseException], str], ...] = (
    (PermissionDeniedError, "the credentials lack permission"),
    (UnauthenticatedError, "the credentials were refused"),
    (NotSupportedError, "this store cannot do that (put-if-absent needs conditional writes)"),
)
_LIST_CHUNK = 1000
_WRITES = ("create", "write", "delete")

_memory_stores: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def open_remote(location: Location, options: Mapping[str, str]) -> RemoteBackend:
    """The backend at a remote location; contacts nothing, except perhaps S3 for the bucket's region."""
    if location.kind == "memory":
        with _memory_lock:
            store = _memory_stores.setdefault(location.container, MemoryStore())
        return RemoteBackend(store, location)
    settings = client_settings(location, options)
    refusal: InvalidInputError
    try:
        remote = _STORES[location.kind](
            location.container,
            config=settings.config,
            client_options=settings.client_options,
            retry_config=settings.retry_config,
        )
        return RemoteBackend(remote, location)
    except BaseException as error:
        if not isinstance(error, (BaseError, ValueError, TypeError)) and not is_panic(error):
            raise
        refusal = InvalidInputError(
            f"storage options for {location.uri} were refused: {_first_paragraph(error)}"
        )
    # Raised here, outside of the handler, so that no traceback shows the original's text.
    raise refusal


class RemoteBackend:
    """One prefix in one bucket. obstore's errors become ours, without credentials in their text."""

    def __init__(self, store: Any, location: Location) -> None:
        self._store = store
        self._uri = location.uri
        self._prefix = location.prefix

    def create(self, path: str, data: memoryview) -> bool:
        def attempt() -> bool:
            try:
                obstore.put(self._store, self._key(path), data, mode="create")
            except _LOST_RACE:
                return False
            return True

        return self._call("create", path, attempt)

    def settle(self, path: str) -> None:
        """Nothing to do: an object that a remote store shows is durable."""

    def replace(self, path: str, data: memoryview, *, durable: bool) -> None:
        self._call(
            "write", path, lambda: obstore.put(self._store, self._key(path), data, use_multipart=False)
        )

    def replace_from(self, path: str, chunks: Iterator[bytes]) -> None:
        self._call("write", path, lambda: obstore.put(self._store, self._key(path), chunks))

    def read(self, path: str) -> bytes:
        return self._call("read", path, lambda: bytes(obstore.get(self._store, self._key(path)).bytes()))

    def read_range(self, path: str, start: int, length: int) -> bytes:
        def attempt() -> bytes:
            try:
                return bytes(obstore.get_range(self._store, self._key(path), start=start, length=length))
            except GenericError:
                # A range behind the end is an error, but obstore has no class for it.
                if obstore.head(self._store, self._key(path))["size"] <= start:
                    return b""
                raise

        return self._call("read", path, attempt)

    def head(self, path: str) -> ObjectInfo | None:
        try:
            return self._info(self._call("look up", path, lambda: obstore.head(self._store, self._key(path))))
        except FileNotFoundError:
            return None

    def list(self, prefix: str) -> builtins.list[ObjectInfo]:
        return [self._info(item) for item in self._items(prefix)]

    def list_directories(self, prefix: str) -> builtins.list[str]:
        key = self._key(prefix)
        found = self._call("list", prefix, lambda: obstore.list_with_delimiter(self._store, key or None))
        below = f"{key}/" if key else ""
        return [each[len(below) :].rstrip("/") for each in found["common_prefixes"] if each.startswith(below)]

    def list_staging(self, prefix: str) -> builtins.list[ObjectInfo]:
        """Always empty: remote stores show whole objects only."""
        return []

    def delete(self, path: str) -> None:
        try:
            self._call("delete", path, lambda: obstore.delete(self._store, self._key(path)))
        except FileNotFoundError:
            return

    def delete_many(self, paths: Sequence[str]) -> None:
        keys = [self._key(path) for path in paths]
        try:
            self._call("delete", paths[0], lambda: obstore.delete(self._store, keys))
        except FileNotFoundError:
            # This store fails if some objects are missing, and may have kept objects that exist.
            for path in paths:
                self.delete(path)

    def delete_prefix(self, prefix: str) -> int:
        keys = [item["path"] for item in self._items(prefix)]
        if keys:
            try:
                self._call("delete", prefix, lambda: obstore.delete(self._store, keys))
            except FileNotFoundError as error:
                # Another process deletes here too, and this store reports that as an error. The other
                # objects still have to be deleted.
                raise TransientError(f"objects below {prefix!r} vanished while being deleted") from error
        return len(keys)

    def _key(self, path: str) -> str:
        if not self._prefix:
            return path
        return f"{self._prefix}/{path}" if path else self._prefix

    def _items(self, prefix: str) -> builtins.list[ObjectMeta]:
        key = self._key(prefix)
        below = f"{key}/" if key else ""

        def attempt() -> Iterable[ObjectMeta]:
            return obstore.list(self._store, key or None, chunk_size=_LIST_CHUNK).collect()

        # Some stores treat a prefix as a directory; others match every name that starts with it.
        return [item for item in self._call("list", prefix, attempt) if item["path"].startswith(below)]

    def _info(self, item: ObjectMeta) -> ObjectInfo:
        path = item["path"][len(self._prefix) + 1 :] if self._prefix else item["path"]
        return ObjectInfo(path, item["size"], item["last_modified"])

    def _call(self, action: str, path: str, call: Callable[[], T]) -> T:
        failure: Exception
        try:
            return call()
        except BaseException as error:
            if isinstance(error, FileNotFoundError):
                failure = self._missing(action, path)
            elif isinstance(error, (BaseError, ValueError)) or is_panic(error):
                failure = self._failure(action, path, error)
            else:
                raise
        # Raised here, outside of the handler, so that no traceback shows the original's text.
        raise failure

    def _missing(self, action: str, path: str) -> Exception:
        if action in ("create", "write"):
            return StorageError(
                f"cannot {action} {path!r} in {self._uri}: its bucket or container does not exist"
            )
        return FileNotFoundError(f"{path!r} does not exist in {self._uri}")

    def _failure(self, action: str, path: str, error: BaseException) -> LanceWalError:
        text = _first_paragraph(error)
        advice = next((f"{words}: " for kind, words in _ADVICE if isinstance(error, kind)), "")
        kind: type[LanceWalError] = TransientError if isinstance(error, _MAY_PASS) else StorageError
        if action in _WRITES and is_panic(error):
            kind = OutcomeUnknownError
        failure = kind(f"cannot {action} {path!r} in {self._uri}: {advice}{text}")
        failure.__cause__ = type(error)(text) if isinstance(error, BaseError) else None
        return failure


def _first_paragraph(error: BaseException) -> str:
    """The error's text without the debug dump that follows it, and without anything secret."""
    return scrubbed(" ".join(str(error).split("\n\nDebug source", 1)[0].split()))
