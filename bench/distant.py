"""A store as far away as object storage, on a local directory: requests, their depth, and latency.

The depth of an operation is the longest chain of its requests that wait on each other: what it
costs in round trips, however many run side by side. It is computed, not timed. Every thread counts the
requests behind it; a call that another thread makes begins with the count of whoever asked for
it, and whoever takes its result goes on with the larger of the two counts.

What pylance asks for by itself, such as opening the base table, is not seen here.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lancewal.storage import ObjectStore, Task
from lancewal.storage.local import LocalBackend

_PAGE = 1000
_clock = threading.local()


class DistantBackend:
    """Looks remote to its store; every request takes ``latency`` seconds, listings one per 1,000 objects."""

    def __init__(self, inner: Any, latency: float = 0.0) -> None:
        self._inner = inner
        self._latency = latency
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        method = getattr(self._inner, kind)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            pages = _pages(len(result)) if isinstance(result, list) else 1
            if kind == "delete_prefix":
                pages = _pages(result) + -(-result // _PAGE)
            self._wait(kind, 0 if kind == "list_staging" else pages)
            return result

        return call

    def _wait(self, kind: str, requests: int) -> None:
        with self._lock:
            self.requests[kind] += requests
        _clock.now = getattr(_clock, "now", 0) + requests
        time.sleep(self._latency * requests)


def _pages(count: int) -> int:
    return max(1, -(-count // _PAGE))


def distant_store(where: Path | str, latency: float = 0.0) -> tuple[ObjectStore, DistantBackend]:
    """The table in a directory, as if it were far away."""
    backend = DistantBackend(LocalBackend(str(where), fsync=False), latency)
    return ObjectStore(str(where), backend), backend


@contextmanager
def measured_depth() -> Iterator[Callable[[], int]]:
    """Within the block, the depth of this thread's requests since its start, and of those it waited for."""
    saved = {name: getattr(Task, name) for name in ("__init__", "run", "result")}

    def begin(self: Any, call: Callable[[], Any]) -> None:
        saved["__init__"](self, call)
        self.clock = getattr(_clock, "now", 0)

    def run(self: Any) -> None:
        before, _clock.now = getattr(_clock, "now", 0), self.clock
        call = self._call

        def timed() -> Any:
            try:
                return call()
            finally:
                self.clock = _clock.now

        self._call = timed
        saved["run"](self)
        _clock.now = before

    def result(self: Any) -> Any:
        try:
            return saved["result"](self)
        finally:
            _clock.now = max(getattr(_clock, "now", 0), self.clock)

    replaced: Sequence[tuple[str, Any]] = (("__init__", begin), ("run", run), ("result", result))
    for name, method in replaced:
        setattr(Task, name, method)
    start = _clock.now = 0
    try:
        yield lambda: int(_clock.now - start)
    finally:
        for name, method in saved.items():
            setattr(Task, name, method)
