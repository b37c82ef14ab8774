"""Storage of a simulated world: every call is a step, and the seed decides what goes wrong with it."""

from __future__ import annotations

import builtins
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

from lancewal.errors import OutcomeUnknownError, StorageError
from lancewal.storage import ObjectInfo, ObjectStore
from lancewal.storage.backend import TransientError
from lancewal.storage.local import LocalBackend
from tests.simulation.world import World

T = TypeVar("T")

_DRAWN = re.compile(r"[0-9a-f]{40,}|[0-9a-f]{8}-[0-9a-f-]{27}(?=/)")
_WRITES = frozenset({"create", "replace", "replace_from", "delete", "delete_many", "delete_prefix"})


@dataclass
class Faults:
    """How often each thing goes wrong, and how often it has."""

    fails_before: float = 0.01
    fails_after: float = 0.01
    breaks_before: float = 0.002
    breaks_after: float = 0.002
    half_a_bulk: float = 0.05
    stands_still: float = 0.004
    dies: float = 0.0015
    struck: Counter[str] = field(default_factory=Counter)


class Disk:
    """The directory behind all stores of a world, and when its objects were written by the world's time."""

    def __init__(self, world: World, root: str, faults: Faults) -> None:
        self.world, self.root, self.faults = world, root, faults
        self.files = LocalBackend(root, fsync=False)
        self.written: dict[str, float] = {}

    def store(self) -> ObjectStore:
        """A store as a process of its own opens it: far away."""
        return ObjectStore(self.root, SimulatedBackend(self), sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.world.wait("a pause before a retry", lambda: False, seconds)

    def time_of(self, path: str) -> datetime:
        return self.world.time(self.written.get(path, 0.0))


class SimulatedBackend:
    """Not a local one to the code under test, which therefore reads ahead and side by side."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def _call(self, kind: str, path: str, call: Callable[[], T]) -> T:
        world, faults = self._disk.world, self._disk.faults
        if not world.is_here():
            return call()
        self._disturb(kind in _WRITES)
        # Lance draws the names of its files by itself; the trace of a seed must not depend on them.
        place = _DRAWN.sub("…", f"{kind} {path}")
        world.step(place)
        chance = world.random.random()
        for name, rate, error in (
            ("fails before", faults.fails_before, TransientError),
            ("breaks before", faults.breaks_before, StorageError),
        ):
            chance -= rate
            if chance < 0:
                faults.struck[f"{kind} {name}"] += 1
                raise error(f"simulated: {kind} {path} {name} its effect")
        result = call()
        if kind in _WRITES:
            for name, rate, lost in (
                ("fails after", faults.fails_after, TransientError),
                ("breaks after", faults.breaks_after, OutcomeUnknownError),
            ):
                chance -= rate
                if chance < 0:
                    faults.struck[f"{kind} {name}"] += 1
                    raise lost(f"simulated: the reply of {kind} {path} is lost")
        # The reply takes its time too: others may act before it is here.
        self._disturb(kind in _WRITES)
        world.step(f"reply to {place}")
        return result

    def _disturb(self, is_write: bool) -> None:
        """Before and after a call its process may be stopped for long, or for good."""
        world, faults = self._disk.world, self._disk.faults
        chance = world.random.random()
        if chance < faults.stands_still * (4 if is_write else 1):
            faults.struck["a process stands still"] += 1
            world.process.stands_still_until = world.now + world.random.choice(
                [30.0, 400.0, 3600.0, 90_000.0]
            )
        elif chance > 1 - faults.dies * (4 if is_write else 1):
            faults.struck["a process dies"] += 1
            world.kill(world.process)

    def create(self, path: str, data: memoryview) -> bool:
        def create() -> bool:
            created = self._disk.files.create(path, data)
            if created:
                self._disk.written[path] = self._disk.world.now
            return created

        return self._call("create", path, create)

    def settle(self, path: str) -> None:
        self._call("settle", path, lambda: self._disk.files.settle(path))

    def replace(self, path: str, data: memoryview, *, durable: bool) -> None:
        def replace_() -> None:
            self._disk.files.replace(path, data, durable=False)
            self._disk.written[path] = self._disk.world.now

        self._call("replace", path, replace_)

    def replace_from(self, path: str, chunks: Iterator[bytes]) -> None:
        self._call("replace_from", path, lambda: self._disk.files.replace_from(path, chunks))

    def read(self, path: str) -> bytes:
        return self._call("read", path, lambda: self._disk.files.read(path))

    def read_range(self, path: str, start: int, length: int) -> bytes:
        return self._call("read", path, lambda: self._disk.files.read_range(path, start, length))

    def head(self, path: str) -> ObjectInfo | None:
        return self._call("head", path, lambda: self._timed(self._disk.files.head(path)))

    def list(self, prefix: str) -> builtins.list[ObjectInfo]:
        def listed() -> builtins.list[ObjectInfo]:
            found = (self._timed(info) for info in self._disk.files.list(prefix))
            return [info for info in found if info is not None]

        return self._call("list", prefix, listed)

    def list_directories(self, prefix: str) -> builtins.list[str]:
        return self._call("list", prefix, lambda: self._disk.files.list_directories(prefix))

    def list_staging(self, prefix: str) -> builtins.list[ObjectInfo]:
        return []

    def delete(self, path: str) -> None:
        self._call("delete", path, lambda: self._disk.files.delete(path))

    def delete_many(self, paths: Sequence[str]) -> None:
        def delete() -> None:
            world, faults = self._disk.world, self._disk.faults
            some = builtins.list(paths)
            if world.is_here() and len(some) > 1 and world.random.random() < faults.half_a_bulk:
                faults.struck["delete_many half done"] += 1
                self._disk.files.delete_many([path for path in some if world.random.random() < 0.5])
                raise TransientError("simulated: a bulk deletion was carried out by half")
            self._disk.files.delete_many(some)

        self._call("delete_many", paths[0] if paths else "", delete)

    def delete_prefix(self, prefix: str) -> int:
        return self._call("delete_prefix", prefix, lambda: self._disk.files.delete_prefix(prefix))

    def _timed(self, info: ObjectInfo | None) -> Any:
        return None if info is None else replace(info, modified=self._disk.time_of(info.path))
