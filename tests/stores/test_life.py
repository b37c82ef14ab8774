"""The life of a table on each kind of store: writers, readers, compaction, collection, publishing, feed."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import lance
import pyarrow as pa
import pytest

import lancewal
from lancewal.base.table import BaseTable
from lancewal.errors import FencedError, LanceWalError
from lancewal.publish import ChangeFeed, Stager, Transaction, publish
from lancewal.shard.routing import ShardRouter
from lancewal.storage import ObjectStore, PutOutcome
from lancewal.writer.intake import Intake
from tests.maintenance.support import collect_later
from tests.stores.conftest import Place
from tests.tables import KEYED, ids, rows

STORES = ["local", "s3", "azure", "gcs"]
RACERS, RACES = 8, 8
#: Shares of the requests that the proxy treats so.
TROUBLE = {"cut": 0.02, "lose": 0.02, "refuse": 0.03, "jitter": 0.005}


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_of_racing_creates_one_wins(place: Place) -> None:
    race(place.store(), RACES)


@pytest.mark.parametrize("place", [f"faulty {kind}" for kind in STORES[1:]], indirect=True)
def test_of_racing_creates_behind_a_faulty_proxy_one_wins(place: Place) -> None:
    """Also when replies are lost: who asks again is told its own write from a rival's."""
    assert place.proxy is not None
    place.proxy.set(**TROUBLE)
    race(place.store(), RACES)


def race(store: ObjectStore, races: int) -> None:
    start = threading.Barrier(RACERS)

    def create(number: int, racer: int) -> PutOutcome:
        start.wait()
        return store.put_if_absent(f"race/{number}", f"racer {racer}".encode())

    with ThreadPoolExecutor(RACERS) as pool:
        for number in range(races):
            outcomes = Counter(pool.map(partial(create, number), range(RACERS)))
            assert outcomes == {PutOutcome.CREATED: 1, PutOutcome.EXISTS: RACERS - 1}


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_the_life_of_a_table(place: Place) -> None:
    table = new_table(place)
    other = lancewal.open(place.uri, place.options)
    writer = table.writer(take_over="now")
    writer.put(rows(0, 20))
    writer.delete([3, 4])
    expected = set(range(20)) - {3, 4}
    assert ids(other.scan().to_table()) == sorted(expected)
    assert ids(other.scan(filter="id > 10").to_table()) == list(range(11, 20))
    writer.flush()
    assert other.lookup(7) == {"id": 7, "name": "name_7"}
    assert other.lookup(3) is None

    # A second writer takes the shards over: the first one never acknowledges again.
    with other.writer(take_over="now") as second:
        second.put(rows(30, 10))
        with pytest.raises(LanceWalError) as refused:
            writer.put(rows(50, 10))
        failed = getattr(refused.value, "failed", {None: refused.value})
        assert all(isinstance(error, FencedError) for error in failed.values())
    writer.close()
    expected |= set(range(30, 40))

    base = BaseTable.open(place.uri, place.options)
    for _ in range(2):  # the second time it is there already
        published(place, base, rows(60, 10), Transaction("job", 1))
    expected |= set(range(60, 70))
    assert ids(table.scan().to_table()) == sorted(expected)
    assert fed(place) == Counter([*range(20), 3, 4, *range(30, 40), *range(60, 70)])

    table.compact()
    collect_later(place.store())
    assert ids(other.scan().to_table()) == sorted(expected)
    assert ids(lance.dataset(place.uri, storage_options=place.options or None).to_table()) == sorted(expected)
    with table.writer(take_over="now") as writer:
        writer.put(rows(0, 1, prefix="again"))
    assert other.lookup(0) == {"id": 0, "name": "again_0"}
    report = table.verify()
    assert report.ok, report


@pytest.mark.parametrize("place", [f"faulty {kind}" for kind in STORES[1:]], indirect=True)
def test_nothing_acknowledged_is_lost_behind_a_faulty_proxy(place: Place) -> None:
    live_in_trouble(place, rounds=2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place", [f"faulty {kind}" for kind in STORES[1:]], indirect=True)
def test_nothing_acknowledged_is_lost_behind_a_faulty_proxy_for_long(place: Place) -> None:
    live_in_trouble(place, rounds=40)


def live_in_trouble(place: Place, rounds: int) -> None:
    assert place.proxy is not None
    table = new_table(place)
    place.proxy.set(**TROUBLE)
    there: set[int] = set()
    maybe: set[int] = set()
    number = 0
    for _ in range(rounds):
        with suppress(LanceWalError), table.writer(take_over="now") as writer:
            for _ in range(6):
                keys = set(range(number, number + 5))
                number += 5
                maybe |= keys
                writer.put(rows(min(keys), 5))
                maybe -= keys
                there |= keys
            keys = {min(there)}
            maybe |= keys
            there -= keys
            writer.delete(sorted(keys))
            maybe -= keys
        for work in (table.flush, table.compact, lambda: collect_later(place.store())):
            with suppress(LanceWalError):
                work()
        with suppress(LanceWalError):
            check(set(ids(table.scan().to_table())), there, maybe)
    place.proxy.set(**dict.fromkeys(TROUBLE, 0.0))
    calm = lancewal.open(place.uri, place.clean)
    found = ids(calm.scan().to_table())
    assert len(found) == len(set(found))
    check(set(found), there, maybe)
    assert there, "nothing was ever acknowledged"
    report = calm.verify()
    assert report.ok, report


def check(found: set[int], there: set[int], maybe: set[int]) -> None:
    assert not there - maybe - found, "an acknowledged row is gone"
    assert not found - there - maybe, "a row is there that was deleted or never put"


def new_table(place: Place) -> lancewal.Table:
    lance.write_dataset(KEYED.empty_table(), place.uri, storage_options=place.clean or None)
    defaults = {"fsync": "false", "stats_log_interval_ms": "0"}
    how = {"bucket": ("id", 2), "writer_defaults": defaults}
    lancewal.initialize(place.uri, storage_options=place.clean, **how)
    return lancewal.open(place.uri, place.options)


def published(place: Place, base: BaseTable, batch: pa.RecordBatch, transaction: Transaction) -> None:
    store = place.store()
    stager = Stager(base, store, ShardRouter.for_table(base.details, base.schema), order=(0,))
    stager.add(Intake(base.schema).upserts(batch).batches[0])
    publish(base, store, stager.finish(), transaction)


def fed(place: Place) -> Counter[int]:
    feed = ChangeFeed.open(place.uri, place.options)
    return Counter(
        i for batch in feed.changes(feed.earliest(), feed.latest()) for i in batch["id"].to_pylist()
    )
