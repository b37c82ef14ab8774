"""Who is at work in a simulated world, each in a process of its own."""

from __future__ import annotations

import itertools
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa

from lancewal.base import BaseTable
from lancewal.errors import (
    ConflictError,
    FencedError,
    ForkedError,
    InvalidInputError,
    PartialWriteError,
    StorageError,
    WalTruncatedError,
)
from lancewal.format import PutId
from lancewal.maintenance import Retention, collect_garbage, compact
from lancewal.publish import (
    ChangeFeed,
    Staged,
    Transaction,
    append_transaction,
    begin_append,
    finish_append,
    publish,
)
from lancewal.publish import feed as feed_room
from lancewal.publish import staging as staging_room
from lancewal.publish.sstable_pointers import Fate
from lancewal.reader import TableReader
from lancewal.service import presence, publish_through_owners
from lancewal.shard import Shard, WalAppender
from lancewal.storage import HostClock, ObjectStore
from lancewal.storage.local import LocalBackend
from lancewal.writer import ShardWriter, TableWriter, drain_shard, open_shard_writer
from tests.simulation.common import CONFIG, EXPECTED, ONE_SHARD, SHARD, SMALL, WAL_ONLY, replaced
from tests.simulation.keeping import Keeping
from tests.simulation.ledger import Ledger
from tests.simulation.light import LightTable, rows_of
from tests.simulation.oracle import OWN, REGISTERS, BrokenError, History, Put, Seen
from tests.simulation.owning import Owning
from tests.simulation.plan import Actor, Plan, plan_of
from tests.simulation.reading import CountedReader, changes_of, values_of
from tests.simulation.store import Disk, Faults, Files
from tests.simulation.world import Process, World, uncollected
from tests.tables import KEY, new_table

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=KEY), pa.field("value", pa.int64())])
WITHOUT_KEY = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.int64())])
AGE = timedelta(minutes=10)
_RETENTION = Retention(timedelta(0), AGE, AGE, AGE, AGE, AGE)
_WORLDS = itertools.count()
_NUMBER = re.compile(r" \d")


@dataclass
class Simulation:
    """One world: a table, its actors, and what became of them."""

    plan: Plan
    templates: Path
    directory: Path
    history: History = field(default_factory=History)
    #: How often each state was met that a schedule is interesting for.
    met: Counter[str] = field(default_factory=Counter)

    def run(self) -> Simulation:
        """Everybody until the end, and then, without faults, whether the table is whole."""
        plan = self.plan
        self.config = SMALL if plan.is_small else CONFIG
        self.world = World(plan.schedule)
        self.faults = plan.rates()
        self.history.has_key = plan.has_key
        with ExitStack() as stack:
            stack.enter_context(uncollected())
            # The heart of this process must not get a thread that ends with the world.
            stack.enter_context(replaced([(presence, "_heart", presence._Heart())]))
            self._furnish()
            if self.light is not None:
                stack.enter_context(self.light.installed())
                stack.enter_context(self._counting_fates())
            self.owning = Owning(self, SHARD) if plan.lease else None
            self.keeping = Keeping(self) if plan.is_kept else None
            bodies = self.owning.bodies() if self.owning else {}
            if self.owning:
                stack.enter_context(self.owning.installed())
            if self.keeping:
                bodies |= self.keeping.bodies()
                stack.enter_context(self.keeping.installed())
            with self.world.installed():
                for number, actor in plan.present:
                    process = self._process(f"{actor.kind} {number}")
                    body = bodies.get(actor.kind) or getattr(self, "_" + actor.kind.replace(" ", "_"))
                    self.world.spawn(process, self._as(process, partial(body, actor, process)))
                self.world.run()
            self._check_the_end()
        self.met += self.disk.met
        return self

    def _furnish(self) -> None:
        name = "keyed" if self.plan.has_key else "unkeyed"
        self.light: LightTable | None = None
        self.ledger: Ledger | None = None
        if self.plan.is_light:
            root, files = f"/simulated/{name}", Files()
            self.disk = Disk(self.world, root, self.faults, files, is_near=self.plan.is_near)
            self.light = LightTable(self.disk, self.templates / name, self.met)
            self.ledger = Ledger(files, self.light, self.history, SHARD)
            self.world.watch = self.ledger.look
            return
        shutil.rmtree(self.directory, ignore_errors=True)
        # A path of its own: caches of this process know what an earlier world had under the same names.
        root = str(self.directory / f"{next(_WORLDS):08d}")
        shutil.copytree(self.templates / name, root)
        self.disk = Disk(self.world, root, self.faults, LocalBackend(root, fsync=False), is_near=False)

    @contextmanager
    def _counting_fates(self) -> Iterator[None]:
        real = feed_room.fate_of

        def fate_of(*about: Any) -> Fate:
            fate = real(*about)
            if fate is not Fate.PUBLISHED:
                self.met[f"a pointer in the feed is {fate.value}"] += 1
            return fate

        feed_room.fate_of = fate_of
        try:
            yield
        finally:
            feed_room.fate_of = real

    def _process(self, name: str) -> Process:
        chance = self.world.random
        process = Process(name, chance.uniform(-9e4, 9e4), chance.uniform(-0.05, 0.05))
        if self.owning:
            self.owning.hosts.settle(process)
        return process

    def _as(self, process: Process, body: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                body()
            except EXPECTED as error:
                self._note(process.name, error)

        return run

    def _note(self, who: str, error: Exception) -> None:
        self.met[f"{_NUMBER.split(who)[0]}: {type(error).__name__}"] += 1
        if "at a manifest commit" in str(error):
            self.met["a take-over during a flush"] += 1

    def _pause(self, actor: Actor) -> None:
        """Until others have written something, or for a while."""
        longest, chance, disk = actor.pause, self.world.random, self.disk
        if chance.random() < 0.4:
            enough = disk.changes + chance.randint(1, 20)
            self.world.wait("changes", lambda: disk.changes >= enough, max(longest, 1.0))
        elif longest:
            seconds = chance.choice([0.0, longest * 0.1, longest * chance.random()])
            self.world.wait("a pause", lambda: False, seconds)

    def _base(self, store: ObjectStore) -> BaseTable:
        return BaseTable.open(store.uri, store=store)

    # ---------------------------------------------------------------- writers

    def _writer(self, actor: Actor, process: Process) -> None:
        chance, store = self.world.random, self.disk.store()
        self._pause(actor)
        config = WAL_ONLY if chance.random() < 0.15 else self.config
        writer = open_shard_writer(self._base(store), SHARD, config, store=store, indexes=())
        for _ in range(actor.size):
            self._pause(actor)
            self._write_something(writer, process)
        if chance.random() < 0.7:
            self._pause(actor)
            writer.close()

    def _write_something(self, writer: ShardWriter, process: Process) -> None:
        chance = self.world.random
        what = chance.random()
        if what < 0.1 and self.plan.has_key:
            self._delete(writer)
        elif what < 0.25:
            self._put_at_once(writer, process)
        else:
            self._put(writer)
        if chance.random() < self.plan.flushes and writer.config.enable_memtable:
            writer.force_seal_active()
            if chance.random() < 0.5:
                writer.wait_for_flush_drain()

    def _rows(self, put: Put) -> pa.RecordBatch:
        keys = [*REGISTERS, OWN + put.number] if self.plan.has_key else [OWN + put.number]
        schema = SCHEMA if self.plan.has_key else WITHOUT_KEY
        return pa.record_batch({"id": keys, "value": [put.number] * len(keys)}, schema)

    def _put(self, writer: ShardWriter) -> None:
        put = self.history.begin(self.world.steps)
        with _Outcome(self, put):
            writer.put(self._rows(put))

    def _put_at_once(self, writer: ShardWriter, process: Process) -> None:
        """Two threads of one process, which share an entry or not."""
        others = [partial(self._put, writer)]
        if self.config is SMALL and writer.config.enable_memtable:
            others += [partial(self._put, writer), writer.force_seal_active]
        over: list[bool] = []

        def other(call: Callable[[], None]) -> None:
            try:
                call()
            except EXPECTED:
                self.met["a put beside another fails"] += 1
            finally:
                over.append(True)

        for call in others:
            self.world.spawn(process, partial(other, call), "another thread")
        try:
            self._put(writer)
        finally:
            self.world.wait("the other thread", lambda: len(over) == len(others))

    def _delete(self, writer: ShardWriter) -> None:
        there = sorted(self.history.acknowledged())
        if there:
            delete = self.history.begin_delete(self.world.random.choice(there))
            writer.delete([OWN + delete.put])
            self.history.acknowledge_delete(delete)
            self.met["a row is deleted"] += 1

    def _table_writer(self, actor: Actor, process: Process) -> None:
        """Through the door that applications take, which opens writers of shards by itself."""
        store = self.disk.store()
        self._pause(actor)
        base = self._base(store)

        def open_shard(shard: Shard) -> ShardWriter:
            look = partial(shard.create, store)
            return open_shard_writer(base, shard.shard_id, CONFIG, store=store, look=look, indexes=())

        writer = TableWriter(base.schema, ONE_SHARD, open_shard, is_remote=not store.is_local)
        for _ in range(actor.size):
            self._pause(actor)
            self._put_in_table(writer)
        writer.close()

    def _put_in_table(
        self, writer: TableWriter, put_id: PutId | None = None, under_way: list[Put] | None = None
    ) -> None:
        put = self.history.begin(self.world.steps)
        if under_way is not None:
            under_way.append(put)
        with _Outcome(self, put):
            writer.put(self._rows(put), put_id=put_id)

    def _clone(self, actor: Actor, process: Process) -> None:
        """A machine that is cloned while it writes: two processes with one epoch and one idea of the log."""
        store = self.disk.store()
        self._pause(actor)
        first = WalAppender.open(store, SHARD, keep_metadata=True)
        other_process = self._process(f"{process.name} again")
        other_process.ahead, other_process.drift = process.ahead, process.drift

        def go_on() -> None:
            other_store = self.disk.store()
            manifests = type(first.manifests)(other_store, SHARD)
            second = WalAppender(other_store, manifests, first.epoch, first.claimed, keep_metadata=True)
            second.seed_next_position(first.next_position_hint)
            self._append_some(second, actor)

        self.world.spawn(other_process, self._as(other_process, go_on))
        self._append_some(first, actor)

    def _append_some(self, appender: WalAppender, actor: Actor) -> None:
        for _ in range(actor.size):
            self._pause(actor)
            put = self.history.begin(self.world.steps)
            with _Outcome(self, put):
                appender.append([self._stored(put)])

    def _stored(self, put: Put) -> pa.RecordBatch:
        """The rows as logs and SSTables hold them."""
        rows = self._rows(put)
        assert self.light is not None
        schema = self.light._template.schema.stored
        return pa.RecordBatch.from_arrays([*rows.columns, pa.array([False] * rows.num_rows)], schema=schema)

    def _fork(self, actor: Actor, process: Process) -> None:
        """A process that forks while it writes, and dies: the child has its writer, and must not use it."""
        store = self.disk.store()
        writer = open_shard_writer(self._base(store), SHARD, CONFIG, store=store, indexes=())
        self._put(writer)
        child = Process(f"{process.name} child", process.ahead, process.drift, is_forked=True)

        def write() -> None:
            try:
                writer.put(self._rows(Put(9999, 0)))
            except ForkedError:
                self.met["a forked child is refused"] += 1
            else:
                raise BrokenError("a forked child wrote as its parent")
            writer.close()

        self.world.spawn(child, write)
        self._pause(actor)
        if self.world.random.random() < 0.5:
            self.met["a parent dies after its fork"] += 1
            self.world.kill(process)
        self._put(writer)

    def _drainer(self, actor: Actor, process: Process) -> None:
        for _ in range(actor.size):
            self._pause(actor)
            store = self.disk.store()
            try:
                if drain_shard(self._base(store), store, SHARD, CONFIG).rows:
                    self.met["a log is drained"] += 1
            except EXPECTED as error:
                self._note(process.name, error)

    # ------------------------------------------------------------------- jobs

    def _publisher(self, actor: Actor, process: Process) -> None:
        """A job whose tasks stage SSTables that its driver publishes; it is run again, and beside itself."""

        def run(put: Put, transaction: Transaction) -> None:
            store = self.disk.store()
            staged = [self._staged(store, put) for _ in range(self.world.random.choice([1, 1, 2]))]
            through = publish
            if self.owning is not None:
                self.owning.wait_for_an_owner()
                through = publish_through_owners
            try:
                written = through(self._base(store), store, staged[-1:], transaction)
            except InvalidInputError as error:
                if "staged" not in str(error):
                    raise
                self.met["a publication comes too late"] += 1
                raise ConflictError(str(error)) from error
            if not written or written[0].skipped:
                self.met["a publication is found done"] += 1

        self._job(actor, process, run)

    def _staged(self, store: ObjectStore, put: Put) -> Staged:
        """What a task reports; one that is not asked for its result leaves a directory behind."""
        assert self.light is not None
        number = staging_room.FIRST_STAGED_NUMBER | self.world.random.getrandbits(61)
        entry = staging_room.write_sstable(
            store=store,
            shard_id=SHARD,
            generation=number,
            schema=self.light._template.schema,
            batches=[self._stored(put)],
            storage_version="2.1",
        )
        return Staged(Shard(SHARD, 0, ()), entry, (0,), self._wall_clock())

    def _wall_clock(self) -> float:
        process = self.world.process
        return process.clock(self.world.now) + process.was_set

    def _appender(self, actor: Actor, process: Process) -> None:
        """A job whose tasks append tagged entries; it is run again, and beside itself."""

        def run(put: Put, transaction: Transaction) -> None:
            store = self.disk.store()
            if not begin_append(store, transaction):
                self.met["an append is found done"] += 1
                return
            written = append_transaction(store, Shard(SHARD, 0, ()), [self._stored(put)], transaction)
            if written.skipped:
                self.met["an append is found done"] += 1
            finish_append(store, transaction, [written])

        self._job(actor, process, run)

    def _job(self, actor: Actor, process: Process, run: Callable[[Put, Transaction], None]) -> None:
        """Versions one after the other, each by up to three runs at a time, and again until one succeeds."""
        for version in range(actor.size):
            self._pause(actor)
            put = self.history.begin(self.world.steps)
            transaction = Transaction(f"job of {process.name}", version)
            others: list[Process] = []
            for number in range(self.world.random.choice([0, 0, 1, 2])):
                other = self._process(f"{process.name} run {version}.{number}")
                others.append(other)
                self.world.spawn(other, self._as(other, partial(self._attempt, actor, put, transaction, run)))
            for _ in range(3):
                try:
                    self._attempt(actor, put, transaction, run)
                    break
                except EXPECTED as error:
                    self._note(process.name, error)
                    self.met["a job is run again"] += 1
            if put.acknowledged is None:
                return

    def _attempt(
        self, actor: Actor, put: Put, transaction: Transaction, run: Callable[[Put, Transaction], None]
    ) -> None:
        self._pause(actor)
        run(put, transaction)
        if put.acknowledged is None:
            self.history.acknowledge(put, self.world.steps)

    # ------------------------------------------------------------ maintenance

    def _compactor(self, actor: Actor, process: Process) -> None:
        seen = 0
        for _ in range(actor.size):
            if self.world.random.random() < 0.7:
                self._wait_for_sstable(actor, seen)
            seen = self.disk.sstables
            self._pause(actor)
            limit = self.world.random.choice([1, 60, 1 << 20])
            try:
                report = compact(self.disk.store(), max_commit_bytes=limit)
            except EXPECTED as error:
                self._note(process.name, error)
                if isinstance(error, PartialWriteError):
                    self._check_causes(error)
                continue
            if report.rows_inserted or report.rows_updated or report.rows_deleted:
                self.met["rows were compacted"] += 1
            if report.retries:
                self.met["a compactor loses a race"] += 1

    def _wait_for_sstable(self, actor: Actor, seen: int) -> None:
        """Do not begin before there is something to do."""
        disk = self.disk
        self.world.wait("an SSTable", lambda: disk.sstables > seen, max(actor.pause, 30.0))

    def _check_causes(self, error: PartialWriteError) -> None:
        for cause in error.failed.values():
            if not isinstance(cause, (*EXPECTED, FileNotFoundError, OSError)):
                raise BrokenError(f"a compaction failed: {cause!r}") from cause

    def _collector(self, actor: Actor, process: Process) -> None:
        clock = HostClock(process.name, lambda: process.clock(self.world.now))
        for _ in range(actor.size):
            self._pause(actor)
            try:
                report = collect_garbage(
                    self.disk.store(), retention=_RETENTION, clock=clock, now=self._now()
                )
            except EXPECTED as error:
                self._note(process.name, error)
                continue
            for resource, count in report.counts().items():
                self.met[f"collected {resource}"] += count

    def _now(self) -> object:
        """Beside Lance the world's time: Lance stamps by the real one. Else what the storage's clock says."""
        return None if self.plan.is_light else self.world.time()

    # ---------------------------------------------------------------- readers

    def _reader(self, actor: Actor, process: Process) -> None:
        read = self._light_reads() if self.light is not None else self._lance_reads()
        seen = Seen()
        for _ in range(actor.size):
            self._pause(actor)
            must, began = self.history.now(), self.world.now
            try:
                rows = next(read)
            except FileNotFoundError as error:
                if self.world.now - began < AGE.total_seconds() / 2:
                    raise BrokenError(f"something that a read needs was collected: {error}") from error
                self.met["a read took longer than garbage is kept"] += 1
                return
            except EXPECTED as error:
                self._note(process.name, error)
                return
            seen = self.history.check_reader(rows.items(), seen, must)

    def _light_reads(self) -> Iterator[dict[int, int]]:
        states = CountedReader(self.disk.store(), live_writers=False)
        states.met = self.met
        assert self.light is not None
        while True:
            snapshot = states.snapshot()
            yield rows_of(snapshot, self.light)

    def _lance_reads(self) -> Iterator[dict[int, int]]:
        reader = TableReader(self.disk.store(), live_writers=False)
        while True:
            yield values_of(reader.scan().to_table())

    def _follower(self, actor: Actor, process: Process) -> None:
        store = self.disk.store()
        feed = ChangeFeed(store, self._base(store).schema)
        place: dict[UUID, int] = {}
        changes: list[tuple[int, int | None]] = []
        looked = 0.0  # it begins with the first entry, which may be gone by now
        for _ in range(2 * actor.size):
            self._pause(actor)
            must, began = self.history.acknowledged(), self.world.now
            try:
                goal = feed.advance(place)
                for batch in feed.changes(place, goal):
                    changes += changes_of(batch)
            except WalTruncatedError as error:
                if self.world.now - looked < AGE.total_seconds() / 2:
                    raise BrokenError(f"what a follower needs was collected: {error}") from error
                self.met["a follower is too far behind"] += 1
                return
            except EXPECTED as error:
                self._note(process.name, error)
                return
            place, looked = goal, began
            self.history.check_feed(changes, must)

    # ---------------------------------------------------------------- the end

    def _check_the_end(self) -> None:
        """Every acknowledged row is there: for a reader, after a replay, and after all maintenance."""
        self.disk.faults = Faults.none()
        seen = Seen()
        for _ in self._states():
            if self.keeping:
                self.keeping.check_all()
            read = self._light_reads() if self.light is not None else self._lance_reads()
            seen = self.history.check_reader(next(read).items(), seen, self.history.now())

    def _check_that_the_feed_has(self, shown: frozenset[int]) -> None:
        """Also what nobody knows of, because its writer died: whoever follows has to see what readers do."""
        collects = self.keeping or any(actor.kind == "collector" for _, actor in self.plan.present)
        if self.light is None or collects:
            return  # the feed begins where the log does
        store = self.disk.store()
        feed = ChangeFeed(store, self._base(store).schema)
        changes = [change for batch in feed.changes({}, feed.advance({})) for change in changes_of(batch)]
        self.history.check_feed(changes, shown | self.history.acknowledged())
        self.history.fed -= 1

    def _states(self) -> Iterator[None]:
        yield
        store = self.disk.store()
        open_shard_writer(self._base(store), SHARD, CONFIG, store=store, indexes=()).close()
        yield
        self._check_that_the_feed_has(self.history.shown)
        if self.keeping:
            self.keeping.check_shape()
            yield
        elif self.plan.schedule % 3:
            return
        compact(store)
        yield
        for days in (0, 400):
            self.disk.was_set = days * 86400.0
            now = None if self.light is not None else self.world.time() + timedelta(days=days)
            clock = HostClock("end", partial(float, days * 86400))
            collect_garbage(store, retention=_RETENTION, now=now, clock=clock)
        yield
        if self.keeping:
            self.keeping.check_that_files_go()
            yield


class _Outcome:
    """Notes how a put ended."""

    def __init__(self, simulation: Simulation, put: Put) -> None:
        self._simulation, self._put = simulation, put

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._simulation.history.acknowledge(self._put, self._simulation.world.steps)
            return
        causes = list(error.failed.values()) if isinstance(error, PartialWriteError) else [error]
        if isinstance(causes[0], FencedError):
            self._simulation.met["a put meets a fence"] += 1
        elif isinstance(causes[0], StorageError):
            self._put.refused = True


def simulate(plan: Plan | int, templates: Path, directory: Path) -> Simulation:
    """The world of a plan or a seed, on a fresh copy of an empty table."""
    simulation = Simulation(plan_of(plan) if isinstance(plan, int) else plan, templates, directory)
    try:
        return simulation.run()
    except BaseException as error:
        error.add_note(f"{simulation.plan.command()}\n{simulation.plan}, {simulation.world.steps} steps")
        raise


def new_templates(directory: Path) -> Path:
    new_table(directory / "keyed", SCHEMA)
    new_table(directory / "unkeyed", WITHOUT_KEY)
    return directory
