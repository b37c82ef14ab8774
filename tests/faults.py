"""Stores that misbehave on request: calls that fail before or after their effect, or wait.

``FaultyStore`` stands wherever an ``ObjectStore`` does; ``FaultyBackend`` goes below one, so that
its own retries and comparisons are exercised. Both follow the rules of their ``faults``::

    store = FaultyStore(ObjectStore.from_uri("memory://x"))
    store.faults.fail("put_if_absent", nth=2, after=True)     # stored, but the reply is lost
    with store.faults.pause("put", where="manifest") as pause:
        ...                                                   # another thread calls put
        pause.wait_until_reached()
        ...                                                   # do what should happen meanwhile
        pause.release()                                       # (or leave the block)
    assert [call.path for call in store.faults.calls if call.kind == "put"] == [...]
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from lancewal.errors import OutcomeUnknownError, StorageError
from lancewal.storage import ObjectInfo, ObjectStore, PutOutcome
from lancewal.storage.backend import Backend
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from lancewal.storage.store import Data

T = TypeVar("T")

ANY = "*"
#: What a call raises that fails, before or after its effect.
FAILURES = (StorageError, OutcomeUnknownError)


@dataclass(frozen=True, slots=True)
class Call:
    """One call that reached the store: the method's name and its path or prefix."""

    kind: str
    path: str


@dataclass
class _Rule:
    kind: str
    where: str | Callable[[str], bool]
    first: int
    last: int
    after: bool
    act: Callable[[], None]
    seen: int = 0

    def is_due(self, call: Call) -> bool:
        if self.kind not in (ANY, call.kind):
            return False
        here = self.where in call.path if isinstance(self.where, str) else self.where(call.path)
        if not here:
            return False
        self.seen += 1
        return self.first <= self.seen <= self.last


@dataclass
class Pause:
    """A call that waits. Leaving the ``with`` block releases it, whatever happened inside."""

    _reached: threading.Event = field(default_factory=threading.Event)
    _released: threading.Event = field(default_factory=threading.Event)

    def wait_until_reached(self, timeout: float = PATIENCE) -> None:
        assert self._reached.wait(timeout), "no call came to this pause"

    def release(self) -> None:
        self._released.set()

    def hold(self) -> None:
        self._reached.set()
        assert self._released.wait(PATIENCE), "nobody released this pause"

    def __enter__(self) -> Pause:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Faults:
    """Rules for what goes wrong, and a record of every call. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self.calls: list[Call] = []

    def fail(
        self,
        kind: str = ANY,
        *,
        nth: int = 1,
        times: int | None = 1,
        after: bool = False,
        error: BaseException | Callable[[], BaseException] | None = None,
        where: str | Callable[[str], bool] = "",
    ) -> None:
        """Fail the ``nth`` matching call from now on, and the ``times - 1`` after it (None: for ever).

        ``after=True`` lets the call take effect first: its reply is lost. ``where`` is a part of the
        path, or a function of it. ``error`` is what is raised, by default what a store raises: a
        ``StorageError`` before the effect, and an ``OutcomeUnknownError`` after it.
        """

        def act() -> None:
            if callable(error):
                raise error()
            if error is not None:
                raise error
            default = OutcomeUnknownError if after else StorageError
            raise default(f"injected failure of {kind}")

        last = nth + times - 1 if times is not None else 1 << 62
        self._add(_Rule(kind, where, nth, last, after, act))

    def pause(
        self,
        kind: str = ANY,
        *,
        nth: int = 1,
        after: bool = False,
        where: str | Callable[[str], bool] = "",
    ) -> Pause:
        """Make the ``nth`` matching call from now on wait, before or after its effect."""
        pause = Pause()
        self._add(_Rule(kind, where, nth, nth, after, pause.hold))
        return pause

    def before(
        self, kind: str, action: Callable[[], None], *, nth: int = 1, where: str | Callable[[str], bool] = ""
    ) -> None:
        """Run ``action`` in the calling thread just before the ``nth`` matching call."""
        self._add(_Rule(kind, where, nth, nth, False, action))

    def clear(self) -> None:
        """Forget all rules and calls."""
        with self._lock:
            self._rules.clear()
            self.calls.clear()

    def count(self, kind: str, where: str = "") -> int:
        """How many calls of a kind there were, on paths that contain ``where``."""
        with self._lock:
            return sum(call.kind == kind and where in call.path for call in self.calls)

    def run(self, kind: str, path: str, call: Callable[[], T]) -> T:
        with self._lock:
            made = Call(kind, path)
            self.calls.append(made)
            due = [rule for rule in self._rules if rule.is_due(made)]
        _act([rule for rule in due if not rule.after])
        result = call()
        _act([rule for rule in due if rule.after])
        return result

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)


def _act(rules: Sequence[_Rule]) -> None:
    for rule in rules:
        rule.act()


class FaultyStore(ObjectStore):
    """An ``ObjectStore`` in front of another; kinds are its method names (``put_if_absent``, …)."""

    def __init__(self, inner: ObjectStore, faults: Faults | None = None) -> None:
        super().__init__(inner.uri, inner._backend, inner.storage_options, observer=inner.observer)
        self.inner = inner
        self.faults = faults or Faults()

    def put_if_absent(self, path: str, data: Data) -> PutOutcome:
        return self.faults.run("put_if_absent", path, lambda: self.inner.put_if_absent(path, data))

    def put(self, path: str, data: Data, *, durable: bool = True) -> None:
        self.faults.run("put", path, lambda: self.inner.put(path, data, durable=durable))

    def put_from(self, path: str, chunks: Callable[[], Iterator[bytes]]) -> None:
        self.faults.run("put_from", path, lambda: self.inner.put_from(path, chunks))

    def get(self, path: str) -> bytes:
        return self.faults.run("get", path, lambda: self.inner.get(path))

    def get_range(self, path: str, start: int, length: int) -> bytes:
        return self.faults.run("get_range", path, lambda: self.inner.get_range(path, start, length))

    def head(self, path: str) -> ObjectInfo | None:
        return self.faults.run("head", path, lambda: self.inner.head(path))

    def list(self, prefix: str = "") -> builtins.list[ObjectInfo]:
        return self.faults.run("list", prefix, lambda: self.inner.list(prefix))

    def list_directories(self, prefix: str = "") -> builtins.list[str]:
        return self.faults.run("list_directories", prefix, lambda: self.inner.list_directories(prefix))

    def list_staging(self, prefix: str = "") -> builtins.list[ObjectInfo]:
        return self.faults.run("list_staging", prefix, lambda: self.inner.list_staging(prefix))

    def delete(self, path: str) -> None:
        self.faults.run("delete", path, lambda: self.inner.delete(path))

    def delete_many(self, paths: Sequence[str]) -> None:
        self.faults.run("delete_many", "\n".join(paths), lambda: self.inner.delete_many(paths))

    def delete_prefix(self, prefix: str) -> int:
        return self.faults.run("delete_prefix", prefix, lambda: self.inner.delete_prefix(prefix))


class FaultyBackend:
    """A backend in front of another; kinds are ``create``, ``replace``, ``read``, ``head``, …"""

    def __init__(self, inner: Backend, faults: Faults | None = None) -> None:
        self._inner = inner
        self.faults = faults or Faults()

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        method = getattr(self._inner, kind)

        def call(path: str | Sequence[str], *args: Any, **kwargs: Any) -> Any:
            named = path if isinstance(path, str) else "\n".join(path)
            return self.faults.run(kind, named, lambda: method(path, *args, **kwargs))

        return call
