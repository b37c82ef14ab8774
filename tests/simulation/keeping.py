"""Actors that keep a table in shape, and those that make, read and drop checkpoints of it.

A checkpoint is read again and again, at the end of the world too: after all rows were compacted, old versions
cleaned up and garbage of more than a year collected it shows the very rows that it showed first. When all are
dropped, their files go with the next collections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lancewal import status as status_room
from lancewal.errors import InvalidInputError, StorageError
from lancewal.maintenance import (
    Retention,
    UpkeepSettings,
    checkpoint_state,
    collect_garbage,
    compact,
    create_checkpoint,
    drop_checkpoint,
    list_checkpoints,
)
from lancewal.maintenance import gc as gc_room
from lancewal.maintenance.commits import at_crash_points
from lancewal.reader import FixedReader, TableState
from lancewal.storage import HostClock, ObjectStore, layout
from lancewal.upkeep import TaskOutcome, Upkeep, Work, plan_upkeep
from lancewal.upkeep.rounds import clean_versions
from lancewal.writer import drain_shard
from tests.simulation.common import CONFIG, EXPECTED, SHARD, replaced
from tests.simulation.light import rows_of
from tests.simulation.oracle import BrokenError, Seen
from tests.simulation.plan import Actor
from tests.simulation.store import Files
from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.actors import Simulation

_AGE = timedelta(minutes=10)
_SLOW_AT = ("checkpoint: the state is read", "checkpoint: tagged")
_DAY = 86400.0


@dataclass(eq=False)
class _Made:
    """A checkpoint that its maker was given, and what it has to show."""

    name: str
    #: What had to be there when it was begun.
    must: Seen
    may_expire: bool
    #: What the first read of it showed.
    rows: dict[int, int] | None = None
    state: TableState | None = None
    #: Somebody drops it, or has.
    is_dropped: bool = False
    #: How many makers of its name had begun; see ``Keeping._may_be_another``.
    makers: int = 0

    @property
    def has_to_be_there(self) -> bool:
        return not self.is_dropped and not self.may_expire


class Keeping:
    """Upkeep and checkpoints of one world."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.world, self.disk, self.met = simulation.world, simulation.disk, simulation.met
        assert simulation.owning is not None
        self._hosts = simulation.owning.hosts
        self._made: list[_Made] = []
        #: Of each name how many drops were begun, and how many of them are not over.
        self._drops: Counter[str] = Counter()
        self._under_way: Counter[str] = Counter()
        #: Of each name how many makers began, without those that were told that it is taken, and how many of
        #: them are not done.
        self._makers: Counter[str] = Counter()
        self._at_it: Counter[str] = Counter()

    def bodies(self) -> dict[str, Callable[[Actor, Process], None]]:
        return {
            "upkeeper": self._upkeeper,
            "checkpointer": self._checkpointer,
            "dropper": self._dropper,
        }

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Clocks of hosts are those of this world within the block."""
        changes: list[tuple[Any, str, Any]] = [
            (status_room, "datetime", SimpleNamespace(now=self._wall_clock)),
            (gc_room, "host_clock", self._host_clock),
            (import_module("lancewal.maintenance.compact"), "host_clock", self._host_clock),
        ]
        at_crash_points(self._at_point)
        try:
            with replaced(changes):
                yield
        finally:
            at_crash_points(None)

    def _at_point(self, name: str) -> None:
        """A maker is slow where its checkpoint is announced, has its state, and is not recorded yet.

        Others bring rows on and collect meanwhile. An hour after the announcement it would be taken for dead.
        """
        chance, simulation = self.world.random, self._simulation
        if name not in _SLOW_AT or not self.world.is_here() or chance.random() > 0.5:
            return
        other = simulation._process(f"{self.world.process.name} is slow")
        over: list[bool] = []
        self.world.spawn(other, simulation._as(other, partial(self._keep_once, other, over)))
        if self.world.wait("a slow maker", lambda: bool(over), 3000.0):
            self.met["rows are collected while a checkpoint is made"] += 1

    def _keep_once(self, process: Process, over: list[bool]) -> None:
        """All that makes garbage of what a reader needed before, and the collections that it takes."""
        store = self.disk.store()
        drain_shard(self._base(store), store, SHARD, CONFIG)
        if self.world.random.random() < 0.5:
            compact(store)
        clock = HostClock(process.name, self._clock_of(process))
        for _ in range(2):
            collect_garbage(store, retention=Retention.of(_AGE), clock=clock)
            self.world.wait("a pause", lambda: False, 1.2 * _AGE.total_seconds())
        over.append(True)

    def _wall_clock(self, _: object) -> datetime:
        if not self.world.is_here():
            return self.world.time(self.world.now + self.disk.was_set)
        return self.world.time(self.world.now + self._hosts.process.was_set)

    def _host_clock(self) -> HostClock:
        process = self._hosts.process
        if not self.world.is_here():
            return HostClock("end", lambda: self.disk.was_set)
        return HostClock(process.name, lambda: process.clock(self.world.now))

    def _base(self, store: ObjectStore) -> Any:
        return self._simulation._base(store)

    # ----------------------------------------------------------------- upkeep

    def _upkeeper(self, actor: Actor, process: Process) -> None:
        """Rounds of the real thing, perhaps beside others that do the same."""
        chance, store = self.world.random, self.disk.store()
        upkeep = Upkeep.here(
            store,
            partial(self._base, store),
            clock=self._clock_of(process),
            most_commits=chance.choice([None, 1]),
        )
        settings = UpkeepSettings(
            max_sstables=chance.choice([1, 1, 2]),
            max_uncompacted_age=timedelta(seconds=chance.choice([0, 30, 900])),
            max_unflushed_age=timedelta(seconds=chance.choice([0, 30, 900])),
            garbage_age=_AGE,
            version_age=_AGE,
        )
        for _ in range(2 * actor.size):
            self._simulation._pause(actor)
            try:
                report = upkeep.round(settings)
            except EXPECTED as error:
                self._simulation._note(process.name, error)
                continue
            for outcome in report.outcomes:
                self._count(outcome)

    def _clock_of(self, process: Process) -> Callable[[], float]:
        return lambda: process.clock(self.world.now)

    def _count(self, outcome: TaskOutcome) -> None:
        work = str(outcome.task.work)
        if outcome.left_to_others:
            self.met["a part of upkeep is left to another process"] += 1
        for error in outcome.failed.values():
            self.met["a part of upkeep fails"] += 1
            if not isinstance(error, (*EXPECTED, OSError)):
                raise BrokenError(f"upkeep ({work}) failed: {error!r}") from error
        if outcome.done and not outcome.failed:
            self.met[f"upkeep: {work}"] += 1

    # ------------------------------------------------------------ checkpoints

    def _checkpointer(self, actor: Actor, process: Process) -> None:
        """Makes checkpoints, reads them, and drops some."""
        chance, store = self.world.random, self.disk.store()
        for number in range(actor.size):
            self._simulation._pause(actor)
            name = chance.choice(["common", f"{process.name.replace(' ', '-')}.{number}"])
            made = self._make(store, name, process)
            if made is None:
                continue
            for _ in range(chance.randint(1, 3)):
                self._read(store, made, process)
                self._simulation._pause(actor)
            if chance.random() < 0.5:
                self._drop(store, name, process)

    def _make(self, store: ObjectStore, name: str, process: Process) -> _Made | None:
        keep = self.world.random.choice([None, None, None, timedelta(minutes=30)])
        must, drops = self._simulation.history.now(), self._drops[name]
        # One that expires leaves its name to another maker, who may have begun before.
        is_dropped = self._under_way[name] > 0 or (keep is not None and self._at_it[name] > 0)
        self._makers[name] += 1
        self._at_it[name] += 1
        makers = self._makers[name]
        try:
            create_checkpoint(store, name, keep=keep)
        except InvalidInputError:
            self._makers[name] -= 1
            self.met["a checkpoint has that name already"] += 1
            return None
        except EXPECTED as error:
            self._simulation._note(process.name, error)
            return None
        finally:
            self._at_it[name] -= 1
        self.met["a checkpoint is made"] += 1
        # A drop may mean it that looked for the name before this one was made, or just now.
        is_dropped |= self._drops[name] > drops
        made = _Made(name, must, keep is not None, is_dropped=is_dropped, makers=makers)
        self._made.append(made)
        return made

    def _dropper(self, actor: Actor, process: Process) -> None:
        """Somebody else, who lists what there is and drops it while it may be read."""
        store = self.disk.store()
        for _ in range(actor.size):
            self.world.wait("a checkpoint", lambda: bool(self._made), 60.0)
            self._simulation._pause(actor)
            try:
                found = list_checkpoints(store)
            except EXPECTED as error:
                self._simulation._note(process.name, error)
                continue
            if found:
                self._drop(store, self.world.random.choice(found).name, process)

    def _drop(self, store: ObjectStore, name: str, process: Process) -> None:
        # Whether it happened is not asked: from now on nobody may count on it.
        for made in self._made:
            made.is_dropped |= made.name == name
        self._drops[name] += 1
        self._under_way[name] += 1
        try:
            drop_checkpoint(store, name)
        except InvalidInputError:
            self.met["a checkpoint that is gone is dropped"] += 1
        except EXPECTED as error:
            self._simulation._note(process.name, error)
        else:
            self.met["a checkpoint is dropped"] += 1
        finally:
            self._under_way[name] -= 1

    def _read(self, store: ObjectStore, made: _Made, process: Process) -> None:
        """It shows what it has always shown, or is not there any more because somebody wanted that."""
        if made.is_dropped:
            return  # there may be another one of that name
        try:
            state = checkpoint_state(store, made.name)
            reader = FixedReader(store, state, f"the checkpoint {made.name!r}")
            assert self._simulation.light is not None
            rows = rows_of(reader.snapshot(), self._simulation.light)
        except (InvalidInputError, FileNotFoundError, StorageError) as error:
            if isinstance(error, StorageError) and "no longer whole" not in str(error):
                self._simulation._note(process.name, error)
            elif made.has_to_be_there:
                raise BrokenError(f"the checkpoint {made.name!r} is not whole: {error}") from error
            else:
                self.met["a checkpoint goes while it is read"] += 1
            return
        except EXPECTED as error:
            self._simulation._note(process.name, error)
            return
        self.met["a checkpoint is read"] += 1
        if made.is_dropped or self._may_be_another(made):
            return
        made.state = state
        if made.rows is None:
            self._check_rows(made, rows)
            made.rows = rows
        elif rows != made.rows:
            raise BrokenError(f"the checkpoint {made.name!r} showed {made.rows}, and shows {rows}")

    def _may_be_another(self, made: _Made) -> bool:
        """Whether it may have expired, and somebody may have made another one of its name since."""
        return made.may_expire and self._makers[made.name] > made.makers

    def _check_rows(self, made: _Made, rows: dict[int, int]) -> None:
        history = self._simulation.history
        shown = history.shown
        history.check(rows.items(), made.must.shown, made.must.gone)
        history.shown = shown

    # ---------------------------------------------------------------- the end

    def check_all(self) -> None:
        """Every checkpoint that nobody dropped, without faults."""
        store, outside = self.disk.store(), Process("end")
        for made in self._made:
            if made.has_to_be_there:
                self._read(store, made, outside)

    def check_shape(self) -> None:
        """A few rounds by somebody who is left alone bring the table into shape, whatever the others left."""
        self.disk.was_set = 100 * _DAY  # after all stamps, and after all that was begun
        store = self.disk.store()
        upkeep = Upkeep.here(store, partial(self._base, store))
        settings = UpkeepSettings(
            max_sstables=1,
            max_uncompacted_age=timedelta(0),
            max_unflushed_age=timedelta(0),
            garbage_age=_AGE,
            version_age=_AGE,
        )
        for _ in range(2):
            for outcome in upkeep.round(settings).outcomes:
                if outcome.failed or outcome.left_to_others:
                    raise BrokenError(f"upkeep failed where nothing else does: {outcome}")
        status = status_room.table_status(store, partial(self._base, store))
        due = [task for task in plan_upkeep(status, settings) if task.work in (Work.FLUSH, Work.COMPACT)]
        if due or status.uncompacted.count or status.unflushed.count:
            raise BrokenError(f"upkeep left work: {due}")
        self.met["upkeep brings the table into shape"] += 1

    def check_that_files_go(self) -> None:
        """Nothing of a checkpoint outlives its drop for longer than garbage is kept."""
        store = self.disk.store()
        needed = self._files_of_checkpoints()
        if any(made.has_to_be_there for made in self._made) and needed:
            self.met["files of a checkpoint outlive their collection"] += 1
        for checkpoint in list_checkpoints(store):
            self._drop(store, checkpoint.name, Process("end"))
        compact(store)
        for days in (800, 1200):
            self.disk.was_set = days * _DAY
            clean_versions(store, timedelta(0))
            collect_garbage(store, retention=Retention.of(_AGE))
        if left := self._files_of_checkpoints():
            raise BrokenError(f"all checkpoints were dropped, and their files are there: {left}")
        if needed:
            self.met["the files of a dropped checkpoint go"] += 1

    def _files_of_checkpoints(self) -> list[str]:
        """What is there of, or for, checkpoints alone: no newest state needs it."""
        light, files = self._simulation.light, self.disk.files
        assert light is not None
        assert isinstance(files, Files)
        marker = light.marker(SHARD)
        entries = {
            layout.parse_wal_name(path.rpartition("/")[2]) or 0: path
            for path in files.objects
            if path.startswith(layout.wal_dir(SHARD) + "/")
        }
        # Entries behind the cursor are no garbage, were they empty; the last one stays in any case.
        assert self._simulation.ledger is not None
        manifest = self._simulation.ledger.manifest()
        covered = (
            range(min(manifest.replay_after_wal_entry_position + 1, max(entries, default=0)))
            if manifest
            else ()
        )
        needed = [path for path in files.objects if path.startswith(layout.CHECKPOINTS_DIR + "/")]
        needed += [name for name in light.tags.versions if name.startswith("lancewal-")]
        for made in self._made:
            for place in made.state.shards if made.state is not None else ():
                needed += [
                    path
                    for entry in place.manifest.sstables
                    if entry.generation <= marker
                    for path in files.objects
                    if path.startswith(layout.sstable_dir(SHARD, entry.path) + "/")
                ]
                needed += [entries[each] for each in place.wal_range if each in entries and each in covered]
        return needed
