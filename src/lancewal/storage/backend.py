"""The operations that a kind of storage implements, and the retry of those that failed for a moment.

:class:`~lancewal.storage.ObjectStore` does the rest.
"""

from __future__ import annotations

import builtins
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

from lancewal.errors import StorageError

T = TypeVar("T")

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object; ``path`` is relative to the table's root, ``modified`` has a time zone."""

    path: str
    size: int
    modified: datetime


class TransientError(StorageError):
    """The storage failed in a way that may pass; repeating the call is safe."""


#: What S3 deletes with one request.
DELETED_AT_ONCE = 1000


class Backend(Protocol):
    """Raw operations, without retries. Paths are validated and relative to the table's root.

    Failures are :class:`TransientError` where trying again may help, else ``StorageError``. A write that
    failed for good, but may have taken effect, is an ``OutcomeUnknownError``.
    A missing object is ``FileNotFoundError`` on reads, ``None`` on ``head`` and fine on ``delete``.
    """

    def create(self, path: str, data: memoryview) -> bool:
        """Store ``data`` whole or not at all; ``False`` when an object of this name exists."""

    def settle(self, path: str) -> None:
        """Make an object that is already visible as durable as one that ``create`` returned."""

    def replace(self, path: str, data: memoryview, *, durable: bool) -> None: ...

    def replace_from(self, path: str, chunks: Iterator[bytes]) -> None:
        """Like ``replace``, durable, for data that is too large to be held in memory at once."""

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


def retried(
    call: Callable[[], T],
    failure: type[Exception],
    *,
    attempts: int,
    first_pause: float,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call until it succeeds, pausing after each ``failure``; the last attempt's failure is raised.

    Each pause is about twice as long as the one before, and random: callers that collided
    must not collide again.

    >>> answers = iter([1, 0])
    >>> retried(lambda: 1 / (1 - next(answers)), ZeroDivisionError, attempts=2, first_pause=0)
    1.0
    """
    for attempt in range(1, attempts):
        try:
            return call()
        except failure as error:
            logger.debug("attempt %d of %d: %s", attempt, attempts, error)
        sleep(min(first_pause * 2 ** (attempt - 1), _LONGEST_PAUSE_SECONDS) * random.uniform(0.5, 1.0))
    return call()
