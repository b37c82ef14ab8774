"""Storage of a simulated world: every call is a step, and the seed decides what goes wrong with it.

What goes wrong is what the contract of :class:`~lancewal.storage.backend.Backend` allows: a call may fail
before its effect or after it, its effect may come a minute later than its failure, a bulk deletion may be
carried out by half, a listing is no snapshot, and the storage's own clock may be set.
"""

from __future__ import annotations

import builtins
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, TypeVar

from lancewal.errors import OutcomeUnknownError, StorageError
from lancewal.storage import ObjectInfo, ObjectStore
from lancewal.storage.backend import Backend, TransientError
from lancewal.storage.local import LocalBackend
from tests.simulation.world import Process, World

T = TypeVar("T")

_DRAWN = re.compile(r"[0-9a-f]{40,}|[0-9a-f]{8}-[0-9a-f-]{27}(?=/)")
_WRITES = frozenset({"create", "replace", "replace_from", "delete", "delete_many", "delete_prefix"})
#: No request is under way for longer: after that its client has given up, and its connection is closed.
_LATEST = (0.01, 0.4, 5.0, 60.0)
_STALLS = (30.0, 400.0, 3600.0, 90_000.0)


@dataclass
class Faults:
    """How often each thing goes wrong, and how often it has."""

    fails_before: float = 0.01
    fails_after: float = 0.01
    breaks_before: float = 0.002
    breaks_after: float = 0.002
    is_late: float = 0.004
    is_cut: float = 0.005
    is_throttled: float = 0.001
    lists_late: float = 0.1
    half_a_bulk: float = 0.05
    stands_still: float = 0.004
    dies: float = 0.0015
    sets_clocks: float = 0.0005
    struck: Counter[str] = field(default_factory=Counter)

    @classmethod
    def none(cls) -> Faults:
        return cls(**dict.fromkeys(cls.kinds(), 0.0))

    @classmethod
    def kinds(cls) -> list[str]:
        return [each.name for each in fields(cls) if each.name != "struck"]


class Files:
    """A backend that keeps everything in memory and never fails."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        #: Raised by every change.
        self.changes = 0

    def create(self, path: str, data: memoryview) -> bool:
        if path in self.objects:
            return False
        self.objects[path] = bytes(data)
        self.changes += 1
        return True

    def settle(self, path: str) -> None:
        return

    def replace(self, path: str, data: memoryview, *, durable: bool) -> None:
        self.objects[path] = bytes(data)
        self.changes += 1

    def replace_from(self, path: str, chunks: Iterator[bytes]) -> None:
        self.objects[path] = b"".join(chunks)
        self.changes += 1

    def read(self, path: str) -> bytes:
        try:
            return self.objects[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def read_range(self, path: str, start: int, length: int) -> bytes:
        return self.read(path)[start : start + length]

    def head(self, path: str) -> ObjectInfo | None:
        data = self.objects.get(path)
        return None if data is None else ObjectInfo(path, len(data), None)  # type: ignore[arg-type]

    def list(self, prefix: str) -> builtins.list[ObjectInfo]:
        start = f"{prefix}/" if prefix else ""
        return [
            ObjectInfo(path, len(data), None)  # type: ignore[arg-type]
            for path, data in self.objects.items()
            if path.startswith(start)
        ]

    def list_directories(self, prefix: str) -> builtins.list[str]:
        start = f"{prefix}/" if prefix else ""
        below = (path[len(start) :] for path in self.objects if path.startswith(start))
        return sorted({name.partition("/")[0] for name in below if "/" in name})

    def list_staging(self, prefix: str) -> builtins.list[ObjectInfo]:
        return []

    def delete(self, path: str) -> None:
        self.objects.pop(path, None)
        self.changes += 1

    def delete_many(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.delete(path)

    def delete_prefix(self, prefix: str) -> int:
        doomed = [path for path in self.objects if path.startswith(f"{prefix}/")]
        self.delete_many(doomed)
        return len(doomed)


class Disk:
    """What is behind all stores of a world, and when its objects were written by the storage's clock."""

    def __init__(self, world: World, root: str, faults: Faults, files: Backend, *, is_near: bool) -> None:
        self.world, self.root, self.faults, self.files = world, root, faults, files
        self.is_near = is_near
        self.written: dict[str, float] = {}
        #: What the storage's clock is ahead.
        self.was_set = 0.0
        #: Slots that were emptied once.
        self.emptied: set[str] = set()
        self.throttled_until = 0.0
        #: How many objects were written, and how many of them complete an SSTable of a light world.
        self.changes = self.sstables = 0
        self.met: Counter[str] = Counter()
        self.network = Process("the network")
        #: How long a process may stand still.
        self.stalls: Sequence[float] = _STALLS
        #: What its time stamps are rounded down to.
        self.stamp_seconds = 0.0
        #: Told of every object that was written.
        self.watch: Callable[[str], None] | None = None

    def store(self) -> ObjectStore:
        """A store as a process of its own opens it; a near one has one call under way at a time."""
        backend = NearBackend(self) if self.is_near else SimulatedBackend(self)
        return ObjectStore(self.root, backend, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.world.wait("a pause before a retry", lambda: False, seconds)

    def note_written(self, path: str) -> None:
        self.written[path] = self.world.now + self.was_set
        self.changes += 1
        self.sstables += path.endswith("/_versions/1")
        if path in self.emptied:
            self.emptied.discard(path)
            self.met["an emptied slot is filled again"] += 1
        if self.watch is not None:
            self.watch(path)

    def note_deleted(self, paths: Sequence[str]) -> None:
        self.emptied.update(paths)

    def timed(self, info: ObjectInfo | None) -> Any:
        if info is None:
            return None
        written = self.written.get(info.path, 0.0)
        if self.stamp_seconds:
            written -= written % self.stamp_seconds
        return ObjectInfo(info.path, info.size, self.world.time(written))


@lru_cache(maxsize=4096)
def _told(path: str) -> str:
    return _DRAWN.sub("…", path)


class SimulatedBackend:
    """Not a local one to the code under test, which therefore reads ahead and side by side."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def _call(self, kind: str, path: str, call: Callable[[], T]) -> T:
        disk = self._disk
        world, faults = disk.world, disk.faults
        if not world.is_here():
            return call()
        writes = kind in _WRITES
        self._disturb(writes)
        # Lance draws the names of its files by itself; the trace of a seed must not depend on them.
        place = f"{kind} {_told(path)}"
        world.step(place)
        chance = world.random.random()
        if world.now < disk.throttled_until or chance > 1 - faults.is_throttled:
            if world.now >= disk.throttled_until:
                disk.throttled_until = world.now + world.random.choice([0.05, 0.3, 2.0])
            faults.struck["a call is throttled"] += 1
            raise TransientError(f"simulated: slow down, {kind} {path}")
        for name, rate, error in (
            ("fails before", faults.fails_before, TransientError),
            ("breaks before", faults.breaks_before, StorageError),
        ):
            chance -= rate
            if chance < 0:
                faults.struck[f"{kind} {name}"] += 1
                raise error(f"simulated: {kind} {path} {name} its effect")
        if kind in ("create", "replace", "delete", "delete_many"):
            chance -= faults.is_late
            if chance < 0:
                faults.struck[f"{kind} takes effect late"] += 1
                self._later(f"late {place}", call)
                raise TransientError(f"simulated: {kind} {path} takes too long")
        result = call()
        if writes:
            for name, rate, lost in (
                ("fails after", faults.fails_after, TransientError),
                ("breaks after", faults.breaks_after, OutcomeUnknownError),
            ):
                chance -= rate
                if chance < 0:
                    faults.struck[f"{kind} {name}"] += 1
                    raise lost(f"simulated: the reply of {kind} {path} is lost")
        elif kind == "read":
            chance -= faults.is_cut
            if chance < 0:
                faults.struck["a body is cut"] += 1
                raise TransientError(f"simulated: the body of {path} ended too early")
        # The reply takes its time too: others may act before it is here.
        self._disturb(writes)
        world.step(f"reply to {place}")
        return result

    def _later(self, place: str, call: Callable[[], object]) -> None:
        world = self._disk.world

        def land() -> None:
            world.wait(place, lambda: False, world.random.choice(_LATEST))
            try:
                call()
            except StorageError:
                self._disk.met["a late write fails"] += 1

        world.spawn(self._disk.network, land, "lancewal-late")

    def _disturb(self, is_write: bool) -> None:
        """Before and after a call its process may be stopped for long, or for good."""
        disk = self._disk
        world, faults = disk.world, disk.faults
        chance = world.random.random()
        if chance < faults.stands_still * (4 if is_write else 1):
            faults.struck["a process stands still"] += 1
            world.process.stands_still_until = world.now + world.random.choice(disk.stalls)
        elif chance > 1 - faults.dies * (4 if is_write else 1):
            faults.struck["a process dies"] += 1
            world.kill(world.process)
        elif 0.5 < chance < 0.5 + faults.sets_clocks:
            faults.struck["a clock is set"] += 1
            if world.random.random() < 0.5:
                disk.was_set = world.random.choice([-30.0, -1.0, 0.4, 30.0]) * 3600
            else:
                # Publishing goes by it, and allows for half a day.
                world.process.was_set = world.random.choice([-9.0, -1.0, 0.4, 9.0]) * 3600

    def create(self, path: str, data: memoryview) -> bool:
        data = memoryview(bytes(data))

        def create() -> bool:
            created = self._disk.files.create(path, data)
            if created:
                self._disk.note_written(path)
            return created

        return self._call("create", path, create)

    def settle(self, path: str) -> None:
        self._call("settle", path, lambda: self._disk.files.settle(path))

    def replace(self, path: str, data: memoryview, *, durable: bool) -> None:
        data = memoryview(bytes(data))

        def replace_() -> None:
            self._disk.files.replace(path, data, durable=False)
            self._disk.note_written(path)

        self._call("replace", path, replace_)

    def replace_from(self, path: str, chunks: Iterator[bytes]) -> None:
        self._call("replace_from", path, lambda: self._disk.files.replace_from(path, chunks))

    def read(self, path: str) -> bytes:
        return self._call("read", path, lambda: self._disk.files.read(path))

    def read_range(self, path: str, start: int, length: int) -> bytes:
        return self._call("read", path, lambda: self._disk.files.read_range(path, start, length))

    def head(self, path: str) -> ObjectInfo | None:
        return self._call("head", path, lambda: self._disk.timed(self._disk.files.head(path)))

    def list(self, prefix: str) -> builtins.list[ObjectInfo]:
        return self._call("list", prefix, lambda: self._listed(prefix))

    def _listed(self, prefix: str) -> builtins.list[ObjectInfo]:
        """In one moment, or its pages in two."""
        disk = self._disk
        found = [disk.timed(info) for info in disk.files.list(prefix)]
        world = disk.world
        if not world.is_here() or world.random.random() >= disk.faults.lists_late:
            return found
        world.step(f"next page of list {prefix}")
        later = [disk.timed(info) for info in disk.files.list(prefix)]
        if {info.path for info in later} != {info.path for info in found}:
            disk.faults.struck["a listing is no snapshot"] += 1
        names = sorted({info.path for info in (*found, *later)})
        pivot = world.random.choice(names) if names else ""
        return [info for info in found if info.path < pivot] + [info for info in later if info.path >= pivot]

    def list_directories(self, prefix: str) -> builtins.list[str]:
        return self._call("list", prefix, lambda: self._disk.files.list_directories(prefix))

    def list_staging(self, prefix: str) -> builtins.list[ObjectInfo]:
        return []

    def delete(self, path: str) -> None:
        self._call("delete", path, lambda: self._deleted([path]))

    def delete_many(self, paths: Sequence[str]) -> None:
        def delete() -> None:
            world, faults = self._disk.world, self._disk.faults
            some = builtins.list(paths)
            if world.is_here() and len(some) > 1 and world.random.random() < faults.half_a_bulk:
                faults.struck["delete_many half done"] += 1
                self._deleted([path for path in some if world.random.random() < 0.5])
                raise TransientError("simulated: a bulk deletion was carried out by half")
            self._deleted(some)

        self._call("delete_many", paths[0] if paths else "", delete)

    def _deleted(self, paths: Sequence[str]) -> None:
        self._disk.files.delete_many(paths)
        self._disk.note_deleted(paths)

    def delete_prefix(self, prefix: str) -> int:
        return self._call("delete_prefix", prefix, lambda: self._disk.files.delete_prefix(prefix))


class NearBackend(SimulatedBackend, LocalBackend):
    """A local one to the code under test, which makes its calls one after the other."""

    def __init__(self, disk: Disk) -> None:
        LocalBackend.__init__(self, disk.root, fsync=False)
        SimulatedBackend.__init__(self, disk)
