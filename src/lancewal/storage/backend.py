"""The operations that each kind of storage implements, and the retry of transient failures.

:class:`~lancewal.storage.ObjectStore` does the rest.
"""

from __future__ import annotations

import builtins
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def numbered(
    infos: Iterable[ObjectInfo], directory: str, parse: Callable[[str], int | None]
) -> dict[int, ObjectInfo]:
    """The objects in ``directory`` by the number that ``parse`` finds in their names, ascending.

    Objects elsewhere, and those without a number, are left out.
    """
    found = {}
    for info in infos:
        parent, _, name = info.path.rpartition("/")
        number = parse(name) if parent == directory else None
        if number is not None:
            found[number] = info
    return dict(sorted(found.items()))


class TransientError(StorageError):
    """A storage failure that may be transient; repeating the call is safe."""


#: How many objects S3 deletes with one request.
DELETED_AT_ONCE = 1000


class Backend(Protocol):
    """Raw operations, without retries. Paths are validated and relative to the table's root.

    A failure raises :class:`TransientError` if a retry may help, else ``StorageError``. A write that failed
    for good, but may have taken effect, raises ``OutcomeUnknownError``.
    If an object is missing, reads raise ``FileNotFoundError``, ``head`` returns ``None``, and ``delete``
    succeeds.
    """

    def create(self, path: str, data: memoryview) -> bool:
        """Store ``data`` atomically; ``False`` if an object with this name exists."""

    def settle(self, path: str) -> None:
        """Make a visible object durable, as if ``create`` had returned for it."""

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
