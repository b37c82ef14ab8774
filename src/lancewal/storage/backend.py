"""What a kind of storage has to offer; :class:`~lancewal.storage.ObjectStore` does the rest."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from lancewal.errors import StorageError


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object; ``path`` is relative to the table's root, ``modified`` has a time zone."""

    path: str
    size: int
    modified: datetime


class TransientError(StorageError):
    """The storage failed in a way that may pass; a repetition of the same call is safe."""


#: What S3 deletes with one request.
DELETED_AT_ONCE = 1000


class Backend(Protocol):
    """Raw operations, without retries. Paths are validated and relative to the table's root.

    Failures are :class:`TransientError` where trying again may help, else ``StorageError``. A write that
    failed for good, but may have taken effect, is an ``OutcomeUnknownError``.
    A missing object is ``FileNotFoundError`` on reads, ``None`` on ``head`` and fine on ``delete``.
    """

    def create(self, path: str, data: memoryview) -> bool:
        """Store ``data`` whole or not at all; ``False`` when the storage says that one exists."""

    def settle(self, path: str) -> None:
        """Make an object that is already visible as durable as one that ``create`` returned."""

    def replace(self, path: str, data: memoryview, *, durable: bool) -> None: ...

    def replace_from(self, path: str, chunks: Iterator[bytes]) -> None:
        """As ``replace``, durably, with data that is too large to be held at once."""

    def read(self, path: str) -> bytes: ...

    def read_range(self, path: str, start: int, length: int) -> bytes: ...

    def head(self, path: str) -> ObjectInfo | None: ...

    def list(self, prefix: str) -> builtins.list[ObjectInfo]:
        """Everything below the directory ``prefix`` (``""`` is the root), in any order."""

    def list_directories(self, prefix: str) -> builtins.list[str]: ...

    def list_staging(self, prefix: str) -> builtins.list[ObjectInfo]: ...

    def delete(self, path: str) -> None: ...

    def delete_many(self, paths: Sequence[str]) -> None:
        """Delete up to ``DELETED_AT_ONCE`` objects, in any order; after a failure some may be gone."""

    def delete_prefix(self, prefix: str) -> int: ...
