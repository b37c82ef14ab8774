"""The age of a look is never more than it is, whoever measures it and however often."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lancewal.maintenance.gc as context_module
from lancewal.errors import FencedError, PartialWriteError
from lancewal.maintenance import Resource, collect_garbage
from lancewal.maintenance.needs import Extent, Looks, StoredLooks
from lancewal.publish.publishing import publish
from lancewal.storage import ObjectStore, layout
from lancewal.storage.clock import MIN_DELETION_AGE, HostClock, boot_time, host_clock
from lancewal.writer import open_shard_writer
from tests.faults import FaultyStore
from tests.maintenance.support import (
    Site,
    age,
    clock_at,
    directories,
    named,
    positions,
    stage,
    versions,
)
from tests.tables import abandon, fast, rows

DAY = timedelta(days=1)

SHARD = UUID(int=7)


def new_store() -> ObjectStore:
    return ObjectStore.from_uri(f"memory://looks-{uuid4()}")


@dataclass
class World:
    """True time, and machines that each know only how long they have been up."""

    now: float = 0.0
    booted: dict[int, tuple[int, float]] = field(default_factory=dict)

    def clock(self, host: int) -> HostClock:
        boots, since = self.booted.setdefault(host, (0, -1000.0 * host))
        return HostClock(f"{host}/{boots}", lambda: self.now - since)

    def reboot(self, host: int) -> None:
        boots, _ = self.booted.get(host, (0, 0.0))
        self.booted[host] = boots + 1, self.now


def looks_of(store: ObjectStore, world: World, host: int, extent: Extent) -> Looks:
    return Looks(StoredLooks.read(store, SHARD), extent, world.clock(host))


hosts = st.integers(0, 10)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.integers(1, 5000)),
        st.tuples(st.just("grow"), st.integers(1, 5)),
        st.tuples(st.just("collect"), hosts),
        st.tuples(st.just("lose"), hosts),
        st.tuples(st.just("reboot"), hosts),
    ),
    max_size=60,
)


@given(steps)
def test_a_look_is_never_taken_for_older_than_it_is(does: list[tuple[str, int]]) -> None:
    store, world = new_store(), World()
    reached = 0
    since: dict[int, float] = {}
    names: dict[str, float] = {}
    for what, number in does:
        if what == "pass":
            world.now += number
        elif what == "grow":
            reached += number
            since |= dict.fromkeys(range(reached - number + 1, reached + 1), world.now)
            names[f"dir-{reached}"] = world.now
        elif what == "reboot":
            world.reboot(number)
        else:
            looks = looks_of(store, world, number, Extent(reached, reached, reached))
            # A collector that overwrites another one's record, or dies before its own, does no harm.
            before = looks_of(store, world, number, Extent(reached, reached, reached))
            looks.record(store, dict.fromkeys(names, "held"))
            for each, written in since.items():
                assert looks.age_of("covered", each).total_seconds() <= world.now - written + 1e-6
            for name, written in names.items():
                assert looks.age_of_name(name, "held").total_seconds() <= world.now - written + 1e-6
            if what == "lose":
                before.record(store, None)


@given(
    runs=st.lists(st.tuples(st.integers(1, 100_000), st.integers(0, 2)), min_size=3, max_size=80),
    needed=st.integers(1, 100_000),
)
def test_garbage_waits_little_longer_than_it_must(runs: list[tuple[int, int]], needed: int) -> None:
    """On one machine, whatever the rhythm of its collections and of the table."""
    store, world = new_store(), World()
    seen: list[float] = []
    for gap, grown in runs:
        world.now += gap
        seen += [world.now] * grown
        looks_of(store, world, 1, Extent(covered=len(seen))).record(store, None)
    looks = looks_of(store, world, 1, Extent(covered=len(seen)))
    reach = looks.reach("covered", timedelta(seconds=needed))
    due = [number for number, since in enumerate(seen, 1) if world.now - since >= 1.25 * needed]
    assert reach >= max(due, default=0)
    late = [number for number, since in enumerate(seen, 1) if world.now - since < needed]
    assert reach < min(late, default=len(seen) + 1)


def test_two_machines_that_collect_in_turn_come_forward() -> None:
    store, world = new_store(), World()
    extent = Extent(5, 5, 5)
    for turn in range(6):
        looks_of(store, world, turn % 2, extent).record(store, None)
        world.now += 300
    assert looks_of(store, world, 0, extent).age_of("covered", 5) == timedelta(seconds=1800)
    # The other one began with what was proven then, and has measured since.
    assert looks_of(store, world, 1, extent).age_of("covered", 5) >= timedelta(seconds=1500)


def test_a_machine_that_boots_every_day_still_comes_to_a_week() -> None:
    store, world = new_store(), World()
    for _ in range(15):
        for _ in range(24):
            looks_of(store, world, 1, Extent(5)).record(store, None)
            world.now += 3600
        world.reboot(1)
    assert looks_of(store, world, 1, Extent(5)).reach("covered", timedelta(days=7)) == 5


def test_a_shard_that_was_set_back_is_looked_at_anew() -> None:
    """After a restore the same numbers are given again; what was seen of them was another life's."""
    store, world = new_store(), World()
    looks_of(store, world, 1, Extent(100, 40, 7)).record(store, {"dir": "held"})
    world.now += 10_000
    for set_back in (Extent(50, 40, 7), Extent(100, 39, 7), Extent(100, 40, 6)):
        looks = looks_of(store, world, 1, set_back)
        assert looks.reach("covered", timedelta(seconds=1)) == 0
        assert looks.age_of_name("dir", "held") == timedelta(0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no json",
        b"[]",
        b'{"looks": 3}',
        b'{"looks": [{}]}',
        b'{"looks": [{"covered":1,"version":1,"compacted":1,"names":[],"age":1,"made_by":{}}]}',
        b'{"looks": [{"covered":1,"version":1,"compacted":1,"names":{},"age":Infinity,"made_by":{}}]}',
        b'{"looks": [{"covered":1,"version":1,"compacted":1,"names":{},"age":1,"made_by":{"a":NaN}}]}',
    ],
)
def test_a_damaged_record_begins_anew(content: bytes) -> None:
    store, world = new_store(), World()
    path = f"{layout.OWN_DIR}/looks/{SHARD}.json"
    store.put(path, content)
    looks = looks_of(store, world, 1, Extent(9, 9, 9))
    assert looks.reach("covered", timedelta(seconds=1)) == 0
    looks.record(store, None)
    assert len(json.loads(store.get(path))["looks"]) == 1


def test_a_record_stays_small() -> None:
    store, world = new_store(), World()
    for number in range(2000):
        looks_of(store, world, number % 20, Extent(number, number, number)).record(store, None)
        world.now += 60
    (record,) = store.list(f"{layout.OWN_DIR}/looks")
    assert record.size < 40_000


def test_this_machines_clock_is_the_same_for_all_its_processes() -> None:
    assert host_clock().name == host_clock.__wrapped__().name
    assert host_clock().read is boot_time


class TestClocks:
    """Whatever a clock says, what a collection sees first goes with a later one."""

    AHEAD = timedelta(hours=1)

    def test_a_clock_an_hour_ahead_cannot_empty_the_slot_of_a_writer_that_was_stopped_for_seconds(
        self, tmp_path: Path
    ) -> None:
        site = Site(tmp_path / "table")
        slow = FaultyStore(site.store)
        stale = open_shard_writer(site.base, site.shard_id, fast(durable_write=True), store=slow, indexes=())
        stale.put(rows(0, 1))
        stale.put(rows(1, 1))
        with ThreadPoolExecutor(1) as pool, slow.faults.pause("put_if_absent", where="/wal/") as pause:
            waiting = pool.submit(stale.put, rows(666, 1))
            pause.wait_until_reached()
            site.flush(rows(10, 3))
            site.flush(rows(20, 3))
            site.compact()
            age(site, layout.MEM_WAL_DIR, self.AHEAD)
            for _ in range(2):
                collect_garbage(site.store, min_age=timedelta(0))
            pause.release()
            with pytest.raises(FencedError):
                waiting.result()
        abandon(stale)
        assert positions(site) == list(range(1, 7))
        assert [i for i, _ in site.merged()] == [0, 1, 10, 11, 12, 20, 21, 22]

    def test_nor_the_slot_of_a_manifest_version(self, site: Site) -> None:
        age(site, layout.MEM_WAL_DIR, self.AHEAD)
        before = versions(site)
        for _ in range(2):
            collect_garbage(site.store, min_age=timedelta(0))
        assert versions(site) == before

    def test_the_report_says_when_it_goes(self, site: Site) -> None:
        age(site, layout.MEM_WAL_DIR, self.AHEAD)
        now = datetime.now(UTC)
        first = site.collect(now=now, min_age=timedelta(0), clock=HostClock("host", lambda: 100.0))
        second = site.collect(now=now, min_age=timedelta(0), clock=HostClock("host", lambda: 280.0))
        waiting = {"wal/1", "manifest/1"}
        assert {(kept.name, kept.reason) for kept in first.kept} == {
            (name, "first seen by this collection; goes in a collection 0:10:00 from now or later")
            for name in waiting
        }
        assert {(kept.name, kept.reason) for kept in second.kept} == {
            (name, "first seen 0:03:00 ago; goes in a collection 0:07:00 from now or later")
            for name in waiting
        }

    def test_what_was_seen_long_enough_ago_goes(self, site: Site) -> None:
        age(site, layout.MEM_WAL_DIR, self.AHEAD)
        readings = iter([0.0, 0.0, *[MIN_DELETION_AGE.total_seconds()] * 2])
        clock = HostClock("host", lambda: next(readings))
        now = datetime.now(UTC)
        assert site.collect(now=now, min_age=timedelta(0), clock=clock).collected == []
        newest = site.manifest.version
        site.flush(rows(90, 1))
        age(site, layout.MEM_WAL_DIR, self.AHEAD)
        site.collect(now=now, min_age=timedelta(0), clock=clock)
        # What came after the first look stays.
        assert (positions(site)[0], versions(site)[0]) == (6, newest + 1)

    def test_a_clock_an_hour_back_only_keeps_things_longer(self, site: Site) -> None:
        site.compact()
        site.look()
        back = datetime.now(UTC) - self.AHEAD
        before = positions(site), versions(site)
        site.collect(now=back, min_age=timedelta(0), clock=clock_at(datetime.now(UTC) + DAY))
        assert positions(site) == before[0]
        assert set(before[1]) <= set(versions(site))

    def test_a_bulk_load_under_way_is_not_collected_for_a_clock_two_days_ahead(self, site: Site) -> None:
        """It is refused, because a collection that has stood still may still delete what seems old."""
        (staged,) = stage(site, rows(600, 5))
        age(site, layout.sstable_dir(site.shard_id, staged.entry.path), 2 * DAY)
        for _ in range(2):
            report = collect_garbage(site.store)
        assert [(kept.resource, kept.name) for kept in report.kept] == [(Resource.ORPHANS, staged.entry.path)]
        before = site.merged()
        with pytest.raises(PartialWriteError, match="write the data again"):
            publish(site.base, site.store, [staged])
        assert site.merged() == before
        (again,) = stage(site, rows(600, 5))
        publish(site.base, site.store, [again])
        assert set(named(range(600, 605), "name")) <= set(site.merged())

    def test_a_directory_that_was_written_to_since_is_seen_anew(self, site: Site) -> None:
        dead = layout.sstable_dir(site.shard_id, "0123abcd_gen_2")
        site.store.put(f"{dead}/data/x.lance", b"one")
        site.look()
        site.store.put(f"{dead}/data/y.lance", b"two")
        later = datetime.now(UTC) + 2 * DAY
        site.collect(now=later)
        assert site.store.list(dead)
        site.collect(now=later + 2 * DAY)
        assert not site.store.list(dead)

    def test_sstables_that_reads_may_still_use_survive_a_clock_two_days_ahead(self, site: Site) -> None:
        site.compact()
        age(site, "", 2 * DAY)
        for _ in range(2):
            report = collect_garbage(site.store)
        assert directories(site) == [1, 2, 3]
        assert {kept.reason.split(";")[0] for kept in report.kept if kept.resource is Resource.SSTABLES} == {
            "first seen by this collection"
        }

    def test_the_time_is_the_storages_also_on_a_local_disk(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A mounted file system has a clock of its own: files are as old as it says."""

        class Wrong(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:
                return datetime.now(tz) + timedelta(days=700)

        monkeypatch.setattr(context_module, "datetime", Wrong)
        site.look()
        site.compact()
        collect_garbage(site.store, clock=clock_at(datetime.now(UTC) + 2 * DAY))
        assert (directories(site), len(positions(site))) == ([1, 2, 3], 5)
