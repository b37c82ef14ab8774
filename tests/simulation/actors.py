"""Who is at work in a simulated world: writers, compactors, collectors and readers, each a process."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from uuid import UUID

import pyarrow as pa

from lancewal.base import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.errors import ConflictError, FencedError, LanceWalError, OutcomeUnknownError, StorageError
from lancewal.maintenance import Retention, collect_garbage, compact
from lancewal.reader import TableReader
from lancewal.storage import HostClock
from lancewal.writer import ShardWriter, open_shard_writer
from tests.simulation.oracle import OWN, REGISTERS, History
from tests.simulation.store import Disk, Faults
from tests.simulation.world import Process, World
from tests.tables import KEY, new_table

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=KEY), pa.field("value", pa.int64())])
SHARD = UUID(int=7)
_CONFIG = ShardWriterConfig(fsync=False, durable_write=True, stats_log_interval=None)
_AGE = timedelta(minutes=10)
_RETENTION = Retention(timedelta(0), _AGE, _AGE, _AGE, _AGE, _AGE)


@dataclass
class Simulation:
    """One seed: a table, its actors, and what became of them."""

    seed: int
    directory: Path
    faults: Faults = field(default_factory=Faults)
    history: History = field(default_factory=History)
    #: How often each state was met that a schedule is interesting for.
    met: Counter[str] = field(default_factory=Counter)

    def run(self) -> World:
        """Everybody until the end, and then, without faults, whether the table is whole."""
        self.world = World(self.seed)
        self.disk = Disk(self.world, str(self.directory), self.faults)
        chance = self.world.random
        with self.world.installed():
            for number in range(chance.randint(2, 4)):
                process = Process(
                    f"writer {number + 1}", chance.uniform(-9e4, 9e4), chance.uniform(-1e-3, 1e-3)
                )
                self.world.spawn(process, self._as(process, self._write))
            for name, body in (("compactor", self._compact), ("collector", self._collect)):
                if chance.random() < 0.6:
                    self.world.spawn(process := Process(name), self._as(process, body))
            self.world.spawn(process := Process("reader"), self._as(process, self._read))
            self.world.run()
        self._check_the_end()
        return self.world

    def _as(self, process: Process, body: Callable[[Process], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                body(process)
            except (FencedError, ConflictError, StorageError, OutcomeUnknownError) as error:
                self.met[f"{process.name.split()[0]}: {type(error).__name__}"] += 1

        return run

    # ------------------------------------------------------------------ actors

    def _write(self, process: Process) -> None:
        chance, store = self.world.random, self.disk.store()
        self._pause(chance.choice([0.0, 1.0, 60.0, 900.0]))
        writer = open_shard_writer(
            BaseTable.open(store.uri, store=store), SHARD, _CONFIG, store=store, indexes=()
        )
        for _ in range(chance.randint(1, 4)):
            self._put(writer)
            if chance.random() < 0.3:
                writer.force_seal_active()
                if chance.random() < 0.5:
                    writer.wait_for_flush_drain()
        if chance.random() < 0.7:
            writer.close()

    def _put(self, writer: ShardWriter) -> None:
        put = self.history.begin(self.world.steps)
        keys = [*REGISTERS, OWN + put.number]
        try:
            writer.put(pa.record_batch({"id": keys, "value": [put.number] * 3}, SCHEMA))
        except FencedError:
            self.met["a put meets a fence"] += 1
            raise
        except StorageError:
            put.refused = True
            raise
        put.acknowledged = self.world.steps

    def _compact(self, process: Process) -> None:
        for _ in range(2):
            self._pause(self.world.random.choice([0.0, 5.0, 1000.0]))
            try:
                if compact(self.disk.store(), max_workers=1).generations:
                    self.met["rows were compacted"] += 1
            except LanceWalError as error:
                self.met[f"compact: {type(error).__name__}"] += 1

    def _collect(self, process: Process) -> None:
        for _ in range(3):
            self._pause(self.world.random.choice([0.0, 700.0, 4000.0]))
            clock = HostClock("collector", lambda: self.world.now)
            try:
                report = collect_garbage(
                    self.disk.store(), retention=_RETENTION, now=self.world.time(), clock=clock
                )
            except LanceWalError as error:
                self.met[f"collect: {type(error).__name__}"] += 1
                continue
            for resource, count in report.counts().items():
                self.met[f"collected {resource}"] += count

    def _read(self, process: Process) -> None:
        reader = TableReader(self.disk.store(), live_writers=False)
        shown: frozenset[int] = frozenset()
        for _ in range(self.world.random.randint(1, 4)):
            self._pause(self.world.random.choice([0.0, 0.5, 60.0, 2000.0]))
            must_show = self.history.acknowledged() | shown
            try:
                rows = reader.scan().to_table()
            except (ConflictError, StorageError) as error:
                self.met[f"read: {type(error).__name__}"] += 1
                continue
            shown = self.history.check(_pairs(rows), must_show)

    def _pause(self, seconds: float) -> None:
        self.world.wait("a pause", lambda: False, seconds)

    # ---------------------------------------------------------------- the end

    def _check_the_end(self) -> None:
        """Every acknowledged row is there: for a reader, after a replay, and after all maintenance."""
        self.disk.faults = Faults(0, 0, 0, 0, 0, 0, 0)
        shown: frozenset[int] = frozenset()
        for _ in self._states():
            must_show = self.history.acknowledged() | shown
            shown = self.history.check(
                _pairs(TableReader(self.disk.store(), live_writers=False).scan().to_table()), must_show
            )

    def _states(self) -> Iterator[None]:
        yield
        store = self.disk.store()
        base = BaseTable.open(store.uri, store=store)
        open_shard_writer(base, SHARD, _CONFIG, store=store, indexes=()).close()
        yield
        compact(store)
        yield
        for days in (0, 400):
            now, clock = (
                self.world.time() + timedelta(days=days),
                HostClock("end", partial(float, days * 86400)),
            )
            collect_garbage(store, retention=_RETENTION, now=now, clock=clock)
        yield


def _pairs(rows: pa.Table) -> Iterator[tuple[int, int]]:
    return zip(rows["id"].to_pylist(), rows["value"].to_pylist(), strict=True)


def simulate(seed: int, template: Path, directory: Path) -> Simulation:
    """The world of ``seed``, on a fresh copy of an empty table."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(template, directory)
    simulation = Simulation(seed, directory)
    try:
        simulation.run()
    except BaseException as error:
        error.add_note(f"seed {seed}, after {simulation.world.steps} steps")
        raise
    return simulation


def new_template(directory: Path) -> Path:
    new_table(directory, SCHEMA)
    return directory
