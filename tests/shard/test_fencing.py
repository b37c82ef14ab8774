"""A writer is stopped before every single call that it makes to the store, and a rival takes over.

Whatever the moment: what was acknowledged is in the rival's flush or in the next
replay, once, and nothing is acknowledged that was begun after the rival was open.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from lancewal.errors import FencedError
from lancewal.shard import WalAppender
from lancewal.shard.log import _fingerprint
from lancewal.shard.manifest import ShardManifestStore
from lancewal.shard.tail import Replay
from lancewal.storage import ObjectStore, layout
from tests.faults import FaultyStore
from tests.shard.support import (
    SHARD,
    ManualClock,
    batch,
    collect_entries,
    collect_manifests,
    cover,
    tailer_of,
)


@dataclass
class World:
    """One shard in memory, the clock of its processes, and what became of the rows."""

    store: ObjectStore
    clock: ManualClock = field(default_factory=ManualClock)
    rows: itertools.count[int] = field(default_factory=itertools.count)
    #: (row, epoch of its writer)
    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    flushed: list[int] = field(default_factory=list)
    #: The generation that a writer's next rows belong to, by its epoch, after its first flush.
    generations: dict[int, int] = field(default_factory=dict)

    def open(self, store: ObjectStore | None = None) -> tuple[WalAppender, list[int]]:
        """Claim the shard; also the rows that the new writer restores."""
        store = store or self.store
        appender = WalAppender.open(store, SHARD, clock=self.clock)
        replay = Replay(appender, tailer_of(store))
        appender.seed_next_position(replay.next_position)
        restored = [value for entry in replay.entries() for value in entry.batches[0]["id"].to_pylist()]
        return appender, restored

    def append(self, appender: WalAppender) -> int:
        row = next(self.rows)
        generation = self.generations.get(appender.epoch) or appender.claimed.current_generation  # type: ignore[union-attr]
        position = appender.append([batch(row)], generation=generation).position
        self.acknowledged.append((row, appender.epoch))
        return position

    def flush(self, appender: WalAppender, position: int, rows: list[int]) -> None:
        """Publish ``rows``, which the entries up to ``position`` hold."""
        manifest = cover(appender.manifests, appender.epoch, position)
        self.generations[appender.epoch] = manifest.current_generation
        self.flushed += rows

    def newest_epoch(self) -> int:
        manifest = ShardManifestStore(self.store, SHARD).read_latest()
        return manifest.writer_epoch if manifest else 0


def take_over(world: World) -> None:
    """A rival opens the shard and writes."""
    appender, _ = world.open()
    world.append(appender)


def take_over_and_die(world: World) -> None:
    """A rival claims, and comes no further than its sentinel."""
    WalAppender.open(world.store, SHARD, clock=world.clock)


def claim_and_die(world: World) -> None:
    ShardManifestStore(world.store, SHARD, clock=world.clock).claim_epoch()


def take_over_and_flush(world: World) -> None:
    """A rival opens, writes, and flushes all it has."""
    appender, restored = world.open()
    position = world.append(appender)
    world.flush(appender, position, [*restored, world.acknowledged[-1][0]])


def take_over_flush_and_collect(world: World) -> None:
    """So much happens that the stalled writer's slots are free again."""
    take_over_and_flush(world)
    take_over_and_flush(world)
    world.clock.stall()
    newest = ShardManifestStore(world.store, SHARD).require_latest()
    collect_entries(world.store, newest.replay_after_wal_entry_position)
    collect_manifests(world.store, newest.version - 1)


RIVALS = [take_over, take_over_and_die, claim_and_die, take_over_and_flush, take_over_flush_and_collect]


def appends_first(world: World, store: ObjectStore) -> None:
    """The first writer of the shard, which has no sentinel to put."""
    appender, _ = world.open(store)
    world.append(appender)
    world.append(appender)


def opens_and_appends(world: World, store: ObjectStore) -> None:
    """A later writer, with entries to replay and a sentinel to put."""
    first, _ = world.open()
    for _ in range(3):
        world.append(first)
    appends_first(world, store)


def searches_late(world: World, store: ObjectStore) -> None:
    """A writer without replay, which searches for the tip at its first append."""
    appender = WalAppender.open(store, SHARD, clock=world.clock)
    world.append(appender)
    world.append(appender)


def meets_conflicts(world: World, store: ObjectStore) -> None:
    """A writer that meets entries of its own, which it had given up, so that it searches again."""
    appender = WalAppender.open(store, SHARD, clock=world.clock)
    world.append(appender)
    other = WalAppender(world.store, appender.manifests, appender.epoch, appender.claimed, world.clock)
    try:
        for _ in range(3):
            position = world.append(other)
            appender._given_up.add(_fingerprint(world.store.get(layout.wal_entry(SHARD, position))))
    except FencedError:
        # The rival came before: then the writer must find that out by itself, too.
        assert world.newest_epoch() > appender.epoch
    world.append(appender)


def flushes(world: World, store: ObjectStore) -> None:
    """A writer that restores, appends, and publishes all of it."""
    first, _ = world.open()
    world.append(first)
    appender, restored = world.open(store)
    position = world.append(appender)
    world.flush(appender, position, [*restored, world.acknowledged[-1][0]])
    world.append(appender)


WRITERS = [appends_first, opens_and_appends, searches_late, meets_conflicts, flushes]

Worlds = Callable[[], World]


@pytest.fixture
def a_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Worlds:
    """Makes a new shard at every call. (On a local disk requests need no threads: twice as fast.)"""
    monkeypatch.setattr("lancewal.shard.log.REFRESH_EVERY", 2)
    numbers = itertools.count()
    return lambda: World(ObjectStore.from_uri(tmp_path / str(next(numbers)), fsync=False))


def calls_of(writer: Callable[[World, ObjectStore], None], a_world: Worlds) -> int:
    world = a_world()
    faulty = FaultyStore(world.store)
    writer(world, faulty)
    return len(faulty.faults.calls)


def check(world: World) -> None:
    """Nothing is lost, nothing is there twice, and the log is whole."""
    _, restored = world.open()
    there = Counter([*world.flushed, *restored])
    assert there >= Counter(row for row, _ in world.acknowledged)
    assert max(there.values(), default=1) == 1
    epochs = [entry.writer_epoch for entry in tailer_of(world.store)]
    assert epochs == sorted(epochs)


@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_takeover_before_any_call(
    writer: Callable[[World, ObjectStore], None], rival: Callable[[World], None], a_world: Worlds
) -> None:
    for moment in range(1, calls_of(writer, a_world) + 1):
        world = a_world()
        faulty = FaultyStore(world.store)
        taken_over: list[tuple[int, int]] = []

        def meanwhile(world: World = world, taken_over: list[tuple[int, int]] = taken_over) -> None:
            rival(world)
            taken_over.append((len(world.acknowledged), world.newest_epoch()))

        faulty.faults.before("*", meanwhile, nth=moment)
        try:
            writer(world, faulty)
        except FencedError:
            assert taken_over
        acknowledged, epoch = taken_over[0]
        if rival is not claim_and_die:
            # Whoever writes now has claimed the shard since.
            assert all(by > epoch for _, by in world.acknowledged[acknowledged:]), f"before call {moment}"
        check(world)


@pytest.mark.parametrize("writer", [opens_and_appends, searches_late])
def test_two_takeovers_before_any_two_calls(
    writer: Callable[[World, ObjectStore], None], a_world: Worlds
) -> None:
    moments = itertools.combinations(range(1, calls_of(writer, a_world) + 1), 2)
    rivals = itertools.cycle([(take_over, take_over_flush_and_collect), (take_over_and_flush, take_over)])
    for both, (one, other) in zip(moments, rivals, strict=False):
        if both[1] - both[0] > 4:
            continue
        world = a_world()
        faulty = FaultyStore(world.store)
        faulty.faults.before("*", partial(one, world), nth=both[0])
        faulty.faults.before("*", partial(other, world), nth=both[1])
        try:
            writer(world, faulty)
        except FencedError:
            assert world.acknowledged
        check(world)
