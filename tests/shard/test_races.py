"""Sixteen threads and four processes race for claims and for positions: one winner each, no gap."""

from __future__ import annotations

import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from lancewal.errors import FencedError
from lancewal.shard import WalAppender
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import ObjectStore
from tests.patience import PATIENCE
from tests.servers import S3Server
from tests.shard.support import SHARD, appender_at, batch, tailer_of, values

THREADS = 16
PROCESSES = 4

T = TypeVar("T")
#: What a racer does: its store, its number, and a way to wait until all are ready.
Racer = Callable[[ObjectStore, int, Callable[[], object]], T]
#: (position, row, epoch) of an append that was acknowledged
Acknowledged = tuple[int, int, int]

_barrier: threading.Barrier


def _meet_at(barrier: threading.Barrier) -> None:
    global _barrier
    _barrier = barrier


def _in_process(racer: Racer[T], uri: str, options: dict[str, str], number: int) -> T:
    store = ObjectStore.from_uri(uri, options, fsync=False)
    store.list()
    return racer(store, number, lambda: _barrier.wait(PATIENCE))


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        PROCESSES, mp_context=spawn, initializer=_meet_at, initargs=(spawn.Barrier(PROCESSES),)
    ) as pool:
        yield pool


def in_threads(racer: Racer[T], store: ObjectStore) -> list[T]:
    barrier = threading.Barrier(THREADS, timeout=PATIENCE)
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda number: racer(store, number, barrier.wait), range(THREADS)))


def in_processes(racer: Racer[T], store: ObjectStore, pool: ProcessPoolExecutor) -> list[T]:
    work = partial(_in_process, racer, store.uri, dict(store.storage_options))
    return list(pool.map(work, range(PROCESSES), timeout=PATIENCE))


@pytest.fixture(params=["local", "s3"])
def shared_store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """Storage that several processes can see."""
    if request.param == "local":
        return ObjectStore.from_uri(tmp_path / "table", fsync=False)
    s3 = request.getfixturevalue("s3")
    assert isinstance(s3, S3Server)
    return ObjectStore.from_uri(s3.uri(f"races-{tmp_path.name}/table"), s3.storage_options)


# ---------------------------------------------------------------- claims


def claims(store: ObjectStore, number: int, ready: Callable[[], object]) -> list[int]:
    manifests = ShardManifestStore(store, SHARD)
    ready()
    return [manifests.claim_epoch()[0] for _ in range(2)]


def check_claims(store: ObjectStore, won: Sequence[list[int]]) -> None:
    epochs = [epoch for each in won for epoch in each]
    assert sorted(epochs) == list(range(1, len(epochs) + 1))
    manifests = ShardManifestStore(store, SHARD)
    assert manifests.require_latest().version == len(epochs)
    for version in range(1, len(epochs) + 1):
        assert manifests.read_version(version).writer_epoch == version


def test_sixteen_threads_claim(any_store: ObjectStore) -> None:
    check_claims(any_store, in_threads(claims, any_store))


def test_four_processes_claim(shared_store: ObjectStore, processes: ProcessPoolExecutor) -> None:
    check_claims(shared_store, in_processes(claims, shared_store, processes))


# ---------------------------------------------------------------- positions under one epoch


def appends_at_one_epoch(store: ObjectStore, number: int, ready: Callable[[], object]) -> list[Acknowledged]:
    """One of the copies that a cloned machine has; it ends where it meets another."""
    appender = appender_at(store, 1)
    acknowledged: list[Acknowledged] = []
    ready()
    with suppress(FencedError):
        for row in (number * 100, number * 100 + 1):
            acknowledged.append((appender.append([batch(row)]).position, row, appender.epoch))
    return acknowledged


def check_positions(store: ObjectStore, racers: Sequence[list[Acknowledged]]) -> None:
    acknowledged = sorted(each for racer in racers for each in racer)
    assert [position for position, _, _ in acknowledged] == list(range(1, len(acknowledged) + 1))
    assert values(tailer_of(store)) == [row for _, row, _ in acknowledged]
    for racer in racers:
        assert racer == sorted(racer), "a writer's own entries keep their order"
    assert any(len(racer) == 2 for racer in racers), "the last one has nobody to meet"


def test_sixteen_threads_append_at_one_epoch(any_store: ObjectStore) -> None:
    ShardManifestStore(any_store, SHARD).claim_epoch()
    check_positions(any_store, in_threads(appends_at_one_epoch, any_store))


def test_four_processes_append_at_one_epoch(
    shared_store: ObjectStore, processes: ProcessPoolExecutor
) -> None:
    ShardManifestStore(shared_store, SHARD).claim_epoch()
    check_positions(shared_store, in_processes(appends_at_one_epoch, shared_store, processes))


# ---------------------------------------------------------------- writers that take over from each other


def takes_over(
    store: ObjectStore, number: int, ready: Callable[[], object]
) -> tuple[int | None, list[Acknowledged]]:
    """Opens the shard and writes until fenced; its epoch when nobody fenced it."""
    acknowledged: list[Acknowledged] = []
    ready()
    try:
        appender = WalAppender.open(store, SHARD)
        for row in range(number * 100, number * 100 + 4):
            acknowledged.append((appender.append([batch(row)]).position, row, appender.epoch))
    except FencedError:
        return None, acknowledged
    return appender.epoch, acknowledged


def check_takeovers(
    store: ObjectStore, outcomes: Sequence[tuple[int | None, list[Acknowledged]]], claims: int
) -> None:
    newest = ShardManifestStore(store, SHARD).require_latest().writer_epoch
    assert newest == claims
    assert newest in [epoch for epoch, _ in outcomes]
    acknowledged = {position: (row, epoch) for _, each in outcomes for position, row, epoch in each}
    entries = list(tailer_of(store))
    assert [entry.position for entry in entries] == list(range(1, len(entries) + 1))
    stored = {
        entry.position: (entry.batches[0].column("id")[0].as_py(), entry.writer_epoch)
        for entry in entries
        if not entry.sentinel
    }
    assert stored == acknowledged
    # Nobody writes behind the sentinel of somebody newer.
    epochs = [entry.writer_epoch for entry in entries]
    assert epochs == sorted(epochs)
    assert max(Counter(entry.writer_epoch for entry in entries if entry.sentinel).values()) == 1


def test_sixteen_threads_take_over_from_each_other(any_store: ObjectStore) -> None:
    check_takeovers(any_store, in_threads(takes_over, any_store), THREADS)


def test_four_processes_take_over_from_each_other(
    shared_store: ObjectStore, processes: ProcessPoolExecutor
) -> None:
    check_takeovers(shared_store, in_processes(takes_over, shared_store, processes), PROCESSES)


def test_after_the_last_sentinel_only_the_newest_writes(any_store: ObjectStore) -> None:
    writers = [WalAppender.open(any_store, SHARD) for _ in range(4)]
    sentinel = writers[-1].sentinel_position
    assert sentinel == 3

    def write(store: ObjectStore, number: int, ready: Callable[[], object]) -> bool:
        writer = writers[number % len(writers)]
        ready()
        try:
            writer.append([batch(number)])
        except FencedError:
            return False
        return True

    written = in_threads(write, any_store)
    assert [number for number, done in enumerate(written) if done] == [3, 7, 11, 15]
    assert sorted(values(tailer_of(any_store), sentinel + 1)) == [3, 7, 11, 15]
