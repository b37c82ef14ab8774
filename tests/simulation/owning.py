"""Actors that know of each other by owner records: owners, services, whoever asks them, and vandals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from lancewal.errors import (
    FencedError,
    PartialWriteError,
    ShardOwnedError,
)
from lancewal.format import PutId, encode_record
from lancewal.service import flush_one_through_owner, flush_through_owners, open_owned, presence_at
from lancewal.shard import Shard, ShardManifestStore
from lancewal.storage import ObjectStore, layout
from lancewal.writer import ShardWriter, TableWriter, open_shard_writer
from tests.simulation.common import CONFIG, EXPECTED, ONE_SHARD
from tests.simulation.courtesy import Courtesy, Hosts
from tests.simulation.oracle import BrokenError, Put
from tests.simulation.plan import Actor
from tests.simulation.store import Files
from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.actors import Simulation


class Owning:
    """Owners and those who want something of them, in one world."""

    def __init__(self, simulation: Simulation, shard_id: UUID) -> None:
        self._simulation = simulation
        self._shard_id = shard_id
        plan = simulation.plan
        self.world, self.disk, self.met = simulation.world, simulation.disk, simulation.met
        self.lease = timedelta(seconds=plan.lease)
        self.hosts = Hosts(self.world)
        self.courtesy = Courtesy(
            self.world, self.disk, self.hosts, shard_id, self.lease, plan.is_orderly, self.met
        )
        # Presence names writers that are alive; when Python collects one is no seed's to decide.
        self._kept: list[object] = []
        self.disk.stalls = (0.4 * plan.lease, 1.5 * plan.lease, 4 * plan.lease)
        self.disk.stamp_seconds = 0.0 if plan.is_near else 1.0
        if plan.is_orderly:
            self.disk.watch = self.courtesy.watch

    @contextmanager
    def installed(self) -> Iterator[None]:
        with self.hosts.installed(), self.courtesy.installed():
            yield

    def bodies(self) -> dict[str, Callable[[Actor, Process], None]]:
        return {
            "owner": self._owner,
            "service": self._service,
            "asker": self._asker,
            "vandal": self._vandal,
        }

    # ------------------------------------------------------------------ owners

    def _policy(self) -> str:
        ways = ["when_gone", "when_gone", "when_gone", "never"]
        return self.world.random.choice(ways if self._simulation.plan.is_orderly else [*ways, "now"])

    def _opened(self, store: ObjectStore, take_over: Any) -> ShardWriter:
        base, shard = self._simulation._base(store), Shard(self._shard_id, 0, ())
        opening = self.courtesy.begin(take_over)
        try:
            writer = open_owned(
                store,
                self._shard_id,
                lambda look, claimed: open_shard_writer(
                    base,
                    self._shard_id,
                    self._simulation.config,
                    store=store,
                    look=look,
                    claimed=claimed,
                    indexes=(),
                ),
                look=partial(shard.create, store),
                take_over=take_over,
                lease=self.lease,
            )
        except ShardOwnedError as error:
            self.courtesy.refused(opening, error)
            raise
        self._kept.append(writer)
        self.courtesy.opened(opening, writer.epoch, presence_at(store.uri).owner_id)
        return writer

    def _close(self, writer: ShardWriter, store: ObjectStore) -> None:
        self.courtesy.released.add(writer.epoch)
        writer.close()
        self.courtesy.closed(writer.epoch, presence_at(store.uri).owner_id)

    @contextmanager
    def _life_of(self, process: Process) -> Iterator[None]:
        """It ends with the block, and its heart with it; what is not expected ends the world."""
        try:
            yield
        except EXPECTED as error:
            self._simulation._note(process.name, error)
        self.world.kill(process)

    def _owner(self, actor: Actor, process: Process) -> None:
        """A process that opens the shard, writes, perhaps loses it, and ends in order or not."""
        chance, store = self.world.random, self.disk.store()
        with self._life_of(process):
            for _ in range(chance.choice([1, 1, 2, 3])):
                self._simulation._pause(actor)
                try:
                    writer = self._opened(store, self._policy())
                except ShardOwnedError:
                    continue
                try:
                    self._write(writer, actor, process)
                except EXPECTED as error:
                    self._simulation._note(process.name, error)
                    if isinstance(error, FencedError):
                        self.courtesy.fenced(error)
                if chance.random() < 0.7:
                    self._close(writer, store)

    def _write(self, writer: ShardWriter, actor: Actor, process: Process) -> None:
        for _ in range(actor.size):
            self._simulation._pause(actor)
            self._stall_on_purpose(process)
            self._simulation._write_something(writer, process)

    def _stall_on_purpose(self, process: Process) -> None:
        if not self._simulation.plan.is_orderly and self.world.random.random() < 0.1:
            process.stands_still_until = self.world.now + 1.5 * self.lease.total_seconds()
            self.met["an owner stands still for longer than its lease"] += 1
            self.world.step("standing still")

    def _service(self, actor: Actor, process: Process) -> None:
        """Through the door that applications take: a writer that lost its shard comes back by itself."""
        store = self.disk.store()
        take_over = self._policy()
        opened: list[ShardWriter] = []
        under_way: list[Put] = []
        has_ids = self.world.random.random() < 0.6
        session = self.world.random.randbytes(8).hex()

        def open_shard(_: Shard) -> ShardWriter:
            if opened:
                self.met["a service opens a shard again that it lost"] += 1
            writer = self._opened(store, take_over)
            opened.append(writer)
            if len(opened) > 1:
                self.met["a service comes back"] += 1
                if not has_ids and under_way:
                    under_way[-1].is_repeated = True
            return writer

        self._simulation._pause(actor)
        writer = TableWriter(
            self._simulation._base(store).schema,
            ONE_SHARD,
            open_shard,
            is_remote=not store.is_local,
            come_back_after=self.lease.total_seconds() if take_over == "when_gone" else None,
        )
        self._kept.append(writer)
        with self._life_of(process):
            for number in range(2 * actor.size):
                self._simulation._pause(actor)
                self._stall_on_purpose(process)
                try:
                    put_id = PutId(session, number + 1) if has_ids else None
                    self._simulation._put_in_table(writer, put_id, under_way)
                except PartialWriteError as error:
                    self._simulation._note(process.name, error)
                    for cause in error.failed.values():
                        if isinstance(cause, FencedError):
                            self.courtesy.fenced(cause)
            self.courtesy.released |= {each.epoch for each in opened}
            writer.close()
            if opened:
                self.courtesy.closed(opened[-1].epoch, presence_at(store.uri).owner_id)

    # -------------------------------------------------------------- whoever asks

    def _asker(self, actor: Actor, process: Process) -> None:
        """Wants the shard flushed, by its owner if it has one."""
        store = self.disk.store()
        for _ in range(2 * actor.size):
            self._simulation._pause(actor)
            self.wait_for_an_owner()
            must = self._simulation.history.acknowledged()
            try:
                manifest = ShardManifestStore(store, self._shard_id).read_latest()
                if manifest is None:
                    continue
                base = self._simulation._base(store)
                if self.world.random.random() < 0.5:
                    flush_one_through_owner(base, manifest, store)
                else:
                    flush_through_owners(base, [manifest], store, CONFIG)
            except EXPECTED as error:
                self._simulation._note(process.name, error)
                continue
            self._check_flushed(must)

    def wait_for_an_owner(self) -> None:
        """Mostly, and not for ever: without one there is nobody to ask."""
        if self.world.random.random() < 0.8:
            self.world.wait("an owner", lambda: bool(self._records()), 2 * self.lease.total_seconds())

    def _check_flushed(self, must: frozenset[int]) -> None:
        assert self._simulation.ledger is not None
        missing = must - self._simulation.ledger.flushed() - self._simulation.history.deletes.keys()
        if missing:
            raise BrokenError(f"a flush was done, and rows of puts {sorted(missing)} are not flushed")
        self.met["a flush that was asked for is checked"] += 1

    # ------------------------------------------------------------------- vandals

    def _vandal(self, actor: Actor, process: Process) -> None:
        """Loses, ages, forges, damages records, and sends forged requests."""
        deeds: dict[str, Callable[[str, dict[str, bytes]], None]] = {
            "a record is lost": self._lose,
            "a record is of long ago": partial(self._date, -3.0),
            "a record is of the future": partial(self._date, 3.0),
            "a record is damaged": self._damage,
            "an older record comes back": self._bring_back,
            "a record is forged": self._forge,
            "a request is forged": self._ask_for_nonsense,
            "a request or answer is damaged": partial(self._harm_mail, self._damage),
            "a request or answer is lost": partial(self._harm_mail, self._lose),
        }
        older: dict[str, bytes] = {}
        for _ in range(4 * actor.size):
            self._simulation._pause(actor)
            self.world.wait("a record", lambda: bool(self._records()), self.lease.total_seconds())
            records = self._records()
            name = self.world.random.choice(sorted(deeds)) if records else "a record is forged"
            path = self.world.random.choice(records) if records else ""
            older.setdefault(path, self._files.objects.get(path, b""))
            deeds[name](path, older)
            if not name.startswith("a request or"):
                self.met[name] += 1

    @property
    def _files(self) -> Files:
        assert isinstance(self.disk.files, Files)
        return self.disk.files

    def _records(self) -> list[str]:
        return sorted(
            path
            for path in self._files.objects
            if path.startswith(layout.OWNERS_DIR) and path.endswith(layout.OWNER_RECORD_NAME)
        )

    def _written(self, path: str, data: bytes) -> None:
        self._files.replace(path, memoryview(data), durable=False)
        self.disk.note_written(path)

    def _lose(self, path: str, _: dict[str, bytes]) -> None:
        self._files.delete(path)

    def _date(self, leases: float, path: str, _: dict[str, bytes]) -> None:
        self.disk.written[path] = self.world.now + self.disk.was_set + leases * self.lease.total_seconds()

    def _damage(self, path: str, _: dict[str, bytes]) -> None:
        data = bytearray(self._files.objects[path])
        data[self.world.random.randrange(len(data))] ^= 1 << self.world.random.randrange(8)
        self._written(path, bytes(data))

    def _harm_mail(
        self, harm: Callable[[str, dict[str, bytes]], None], _: str, older: dict[str, bytes]
    ) -> None:
        def mail() -> list[str]:
            return sorted(path for path in self._files.objects if path.endswith((".asked", ".answered")))

        self.world.wait("a request", lambda: bool(mail()), self.lease.total_seconds())
        if found := mail():
            path = self.world.random.choice(found)
            harm(path, older)
            what = "lost" if harm == self._lose else "damaged"
            self.met[f"{'a request' if path.endswith('.asked') else 'an answer'} is {what}"] += 1

    def _bring_back(self, path: str, older: dict[str, bytes]) -> None:
        self._written(path, older[path])

    def _forge(self, path: str, older: dict[str, bytes]) -> None:
        chance = self.world.random
        owner_id = chance.randbytes(8).hex()
        # Whoever waits for an endless lease waits for ten minutes, which are many heartbeats of a short one.
        endless = 1e9 if self.lease >= timedelta(seconds=60) else 4 * self.lease.total_seconds()
        content = {
            "owner": owner_id,
            "host": "nowhere",
            "pid": chance.choice([100, 101, 119, -1, 1 << 70]),
            "machine": chance.choice(["one host", "another host", "no host"]),
            "started": chance.choice(["", "owner 0", "9"]),
            "shards": {str(self._shard_id): chance.choice([0, 1, 2, 1 << 40])},
            "lease_seconds": chance.choice([0.0, self.lease.total_seconds(), endless]),
            "address": chance.choice([None, "nowhere:1"]),
            "beat": 1,
        }
        self._written(layout.owner_record(owner_id), encode_record(content))

    def _ask_for_nonsense(self, path: str, _: dict[str, bytes]) -> None:
        chance = self.world.random
        name = f"{path.rsplit('/', 1)[0]}/{chance.randbytes(8).hex()}"
        entry = {
            "generation": 1,
            "path": chance.choice(["../../other", "0123abcd_gen_1"]),
            "in_memory_bytes": 1,
            "physical_rows": 1,
            "primary_key_bytes": None,
            "notes": "",
            "unknown": "",
        }
        adopt = {"do": "adopt", "app": "nobody", "version": 1, "run": "00" * 16, "age": 0.0}
        asked: dict[str, Any] = chance.choice(
            [
                {"do": "flush", "shards": {str(self._shard_id): None}},
                {"do": "harm", "shards": {str(self._shard_id): None}},
                {**adopt, "shards": {str(self._shard_id): [entry]}},
            ]
        )
        data = chance.choice([encode_record(asked), encode_record(asked), b"{}"])
        self._written(f"{name}.asked", data)
