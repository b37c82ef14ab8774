"""What is promised about owners where nothing goes wrong but deaths: nobody stops a writer that lives.

Safety never depends on owner records, so the ledger and the readers check it in every world. What records
are for can only be checked where they are left alone: in an *orderly* world, in which processes die, but no
call fails, nobody stands still, no clock is set, nobody takes a shard "now", and nobody touches a record.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from lancewal.errors import FencedError, ShardOwnedError
from lancewal.format import decode_manifest, decode_record
from lancewal.service import duties, owners, presence, requests
from lancewal.service.presence import Presence
from lancewal.storage import layout
from lancewal.writer import ShardWriter, WriteStats
from lancewal.writer import drain as drain_room
from lancewal.writer import open as opening_room
from lancewal.writer.open import WriterRegistry
from tests.simulation.common import replaced
from tests.simulation.oracle import BrokenError
from tests.simulation.store import Disk, Files
from tests.simulation.world import Process, World

#: Seconds beyond the lease after which the shard of a dead owner has to be had.
_GRACE = 3.0
_OUTSIDE = Process("outside")


class Hosts:
    """What hosts say of their processes, and what each process knows of itself: its heart, its writers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._processes: dict[tuple[str, int], Process] = {}
        self._hearts: dict[Process, Any] = {}
        self._writers: dict[Process, WriterRegistry] = {}
        #: The process of each owner id.
        self.owners: dict[str, Process] = {}
        # For as long as the world: the garbage collector must not decide who is who.
        self._presences: list[Presence] = []

    def settle(self, process: Process) -> None:
        """Give a process a host, and a number that perhaps a dead one had before."""
        chance = self._world.random
        process.host = chance.choice(["one host", "one host", "another host"])
        free = [
            pid
            for pid in range(100, 120)
            if (known := self._processes.get((process.host, pid))) is None or known.is_dead
        ]
        process.pid = chance.choice(free[:3])
        self._processes[process.host, process.pid] = process

    def presence(self, uri: str) -> Presence:
        process = self._world.process
        if process not in self._hearts:
            self._hearts[process] = presence._Heart()
        found: Presence = self._hearts[process].presence(uri)
        if found.owner_id not in self.owners:
            self._presences.append(found)
        self.owners[found.owner_id] = process
        return found

    def add(self, table_uri: str, writer: ShardWriter, stats: WriteStats) -> None:
        """As a process's registry of writers."""
        self._registry().add(table_uri, writer, stats)

    def live_writer(self, table_uri: str, shard_id: UUID) -> ShardWriter | None:
        return self._registry().live_writer(table_uri, shard_id)

    @property
    def process(self) -> Process:
        """Who asks; whoever looks at the end of a world is none of its processes."""
        return self._world.process if self._world.is_here() else _OUTSIDE

    def _registry(self) -> WriterRegistry:
        process = self.process
        if process not in self._writers:
            self._writers[process] = WriterRegistry()
        return self._writers[process]

    def _kill(self, pid: int, _: int) -> None:
        found = self._processes.get((self.process.host, pid))
        if found is None or found.is_dead:
            raise ProcessLookupError(pid)

    def _stat(self, pid: int) -> list[str] | None:
        found = self._processes.get((self.process.host, pid))
        if found is None or found.is_dead:
            return None
        # One that stands still was stopped, or is merely slow.
        stands_still = found.stands_still_until > self._world.now
        state = "T" if stands_still and pid % 2 else "S"
        return [state, *["0"] * 18, str(found.name)]

    @contextmanager
    def installed(self) -> Iterator[None]:
        changes: list[tuple[Any, str, Any]] = [
            (owners, "os", SimpleNamespace(getpid=lambda: self.process.pid, kill=self._kill)),
            (owners, "machine", lambda: self.process.host),
            (duties, "os", SimpleNamespace(getpid=lambda: self.process.pid)),
            (duties, "machine", lambda: self.process.host),
            (owners, "_stat", self._stat),
            (presence, "_heart", self),
            (opening_room, "_registry", self),
            (drain_room, "live_writer", self.live_writer),
        ]
        with replaced(changes):
            yield


@dataclass
class Opening:
    """A shard that somebody wants."""

    process: Process
    take_over: str
    began: float
    epoch: int


@dataclass
class Courtesy:
    """Watches claims and records of one shard; ``is_orderly``: what is promised has to hold."""

    world: World
    disk: Disk
    hosts: Hosts
    shard_id: UUID
    lease: timedelta
    is_orderly: bool
    met: Any
    #: The step at which each process last began to look at the owners.
    looks: dict[Process, int] = field(default_factory=dict)
    #: By epoch who claimed it, and the look before.
    claims: dict[int, tuple[Process, int | None]] = field(default_factory=dict)
    #: By epoch the step at which a record first named it.
    named: dict[int, int] = field(default_factory=dict)
    #: Epochs whose writers are closed, or about to be.
    released: set[int] = field(default_factory=set)
    closed_at: dict[int, float] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        return max(self.claims, default=0)

    def watch(self, path: str) -> None:
        """An object was written."""
        if not self.world.is_here():
            return
        files = self.disk.files
        assert isinstance(files, Files)
        if path.startswith(layout.manifest_dir(self.shard_id) + "/"):
            version = layout.parse_manifest_name(path.rsplit("/", 1)[-1])
            if version is not None:
                manifest = decode_manifest(files.objects[path], shard_id=self.shard_id, version=version)
                if manifest.writer_epoch > self.newest:
                    who = self.world.process
                    self.claims[manifest.writer_epoch] = (who, self.looks.get(who))
        elif path.startswith(layout.OWNERS_DIR) and path.endswith(layout.OWNER_RECORD_NAME):
            epoch = self._named_in(path)
            if epoch is not None:
                self.named.setdefault(epoch, self.world.steps)

    def _named_in(self, path: str) -> int | None:
        assert isinstance(self.disk.files, Files)
        data = self.disk.files.objects.get(path)
        if data is None:
            return None
        try:
            stored = decode_record(data, must_have_checksum=True)
            return None if (epoch := stored["shards"].get(str(self.shard_id))) is None else int(epoch)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    # -------------------------------------------------------------- what happened

    def begin(self, take_over: str) -> Opening:
        return Opening(self.world.process, take_over, self.world.now, self.newest)

    def opened(self, opening: Opening, epoch: int, owner_id: str) -> None:
        """Somebody has the shard: not too late, and its record says so."""
        before = self.claims.get(opening.epoch)
        if before is not None and before[0] is not opening.process:
            self._count_take_over(opening, before[0])
        if not self.is_orderly:
            return
        if self.newest == epoch and self._named_in(layout.owner_record(owner_id)) != epoch:
            raise BrokenError(f"a writer was opened under epoch {epoch}, and no record names it")
        took, changes = self.world.now - opening.began, self.newest - opening.epoch
        if took > changes * (self.lease.total_seconds() + _GRACE):
            raise BrokenError(f"the shard of an owner that is gone was had after {took:.1f} s")
        if before is not None and changes == 1 and took > 1.0:
            last = before[0]
            was_dead = last.died is not None and last.died <= opening.began
            if was_dead and last.host == opening.process.host:
                raise BrokenError(f"an owner was dead on this host, and was waited for: {took:.1f} s")
            if self.closed_at.get(opening.epoch, self.world.now) < opening.began:
                raise BrokenError(f"an owner had closed, and was waited for: {took:.1f} s")

    def _count_take_over(self, opening: Opening, last: Process) -> None:
        if last.is_dead:
            where = "on this host" if last.host == opening.process.host else "elsewhere"
            self.met[f"the shard of a process that died {where} is taken"] += 1
        elif opening.epoch in self.released:
            self.met["a shard is handed over"] += 1
        elif opening.take_over == "when_gone":
            self.met["a shard is taken from one that lives, by mistake"] += 1

    def refused(self, opening: Opening, error: ShardOwnedError) -> None:
        """Somebody was told that another one lives, which has to be so."""
        self.met[f"{opening.take_over}: refused for an owner"] += 1
        if not self.is_orderly or opening.take_over != "when_gone":
            return
        owner = self.hosts.owners.get(error.owner_id)
        if owner is None or (owner.died is not None and owner.died < opening.began):
            raise BrokenError(f"refused for an owner that was dead: {error}")
        if owner is opening.process:
            return  # which has not noticed yet that it lost the shard
        its_epoch = max((epoch for epoch, (who, _) in self.claims.items() if who is owner), default=0)
        if its_epoch < opening.epoch:
            raise BrokenError(f"refused for an owner that was superseded: {error}")

    def fenced(self, error: FencedError) -> None:
        """A writer that lives lost its shard: allowed if whoever took it could not know of it."""
        by, look = self.claims.get(error.local_epoch + 1, (None, None))
        named = self.named.get(error.local_epoch)
        if not self.is_orderly or by is None or by is self.world.process or named is None:
            return
        if look is None or look > named:
            raise BrokenError(f"{by.name} stopped a writer that lives, and could know it: {error}")
        self.met["two claim what nobody has"] += 1

    def closed(self, epoch: int, owner_id: str) -> None:
        """A writer was closed: its record must not keep others out."""
        self.closed_at[epoch] = self.world.now
        if self.is_orderly and (self._named_in(layout.owner_record(owner_id)) or 0) >= epoch:
            raise BrokenError(f"a writer of epoch {epoch} was closed, and its record names the shard")

    def answered(self, owner: owners.Owner, answer: Any) -> None:
        """Somebody asked an owner."""
        if answer is None:
            self.met["a request: its owner is gone"] += 1
            epoch = owner.shards.get(self.shard_id, 0)
            process = self.hosts.owners.get(owner.owner_id)
            lives = process is not None and not process.is_dead
            if self.is_orderly and lives and epoch == self.newest and epoch not in self.released:
                raise BrokenError(f"{owner.owner_id} lives, and was taken for gone by whoever asked it")

    def outcome(self, answer: Any, outcome: Any) -> None:
        if answer is None:
            return
        if outcome is None:
            self.met["a request: its owner has let the shard go"] += 1
        elif isinstance(outcome, ShardOwnedError):
            self.met["a request is refused"] += 1
        elif isinstance(outcome, Exception):
            self.met["a request fails"] += 1
        else:
            self.met["a request is done"] += 1

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Notes who looks and who asks within the block."""
        real_look, real_read = requests.look_at_owners, presence.read_owners
        real_ask, real_outcome = requests._ask, requests._outcome

        def look_at_owners(*about: Any) -> Any:
            self.looks[self.world.process] = self.world.steps
            return real_look(*about)

        def read_owners(*about: Any, **more: Any) -> Any:
            self.looks[self.world.process] = self.world.steps
            return real_read(*about, **more)

        def ask(store: Any, owner: owners.Owner, request: Any) -> Any:
            answer = real_ask(store, owner, request)
            self.answered(owner, answer)
            return answer

        def outcome(shard: UUID, owner: owners.Owner, answer: Any) -> Any:
            found = real_outcome(shard, owner, answer)
            self.outcome(answer, found)
            return found

        changes: list[tuple[Any, str, Any]] = [
            (requests, "look_at_owners", look_at_owners),
            (presence, "read_owners", read_owners),
            (requests, "_ask", ask),
            (requests, "_outcome", outcome),
        ]
        with replaced(changes):
            yield
