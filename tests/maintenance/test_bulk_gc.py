"""Garbage goes in bulk: in few requests, safely where one is carried out partly, shards side by side."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from bench.distant import DistantBackend, distant_store, measured_depth
from lancewal.config import ShardWriterConfig
from lancewal.errors import StorageError, WalTruncatedError
from lancewal.maintenance import GcReport, Resource, collect_garbage, directories, verify
from lancewal.maintenance.directories import _pointers
from lancewal.publish.publishing import publish
from lancewal.shard import WalAppender, WalTailer, discover_manifests, established_tip
from lancewal.shard.manifest import ShardManifestStore
from lancewal.status import table_status
from lancewal.storage import ObjectStore, layout
from lancewal.writer.drain import flush_shards
from tests.faults import FaultyStore
from tests.maintenance.support import (
    LATER,
    NOTHING_KEPT,
    Site,
    clock_at,
    collect_later,
    look,
    named,
    positions,
    stage,
    three_generations,
    versions,
)
from tests.tables import rows


class Killed(BaseException):
    """The process ends here."""


class PartlyStore(FaultyStore):
    """Carries the first bulk request below ``where`` out for the objects at ``places``, and is killed."""

    def __init__(self, inner: ObjectStore, where: str, places: Sequence[int]) -> None:
        super().__init__(inner)
        self._where, self._places = where, places

    def delete_many(self, paths: Sequence[str]) -> None:
        if not any(self._where in path for path in paths):
            return super().delete_many(paths)
        self.inner.delete_many([paths[place] for place in self._places if place < len(paths)])
        raise Killed


def lengthen(site: Site, entries: int) -> None:
    """So many covered entries more, all alike."""
    data = site.store.get(layout.wal_entry(site.shard_id, positions(site)[-1]))
    last = positions(site)[-1] + entries
    for position in range(positions(site)[-1] + 1, last + 1):
        site.store.put(layout.wal_entry(site.shard_id, position), data, durable=False)
    ShardManifestStore(site.store, site.shard_id).commit_update(
        None,
        lambda m: replace(m, replay_after_wal_entry_position=last, wal_entry_position_last_seen=last),
    )


def far(site: Site) -> tuple[ObjectStore, DistantBackend]:
    return distant_store(site.store.uri)


class TestRequests:
    def test_1600_entries_go_in_20_steps_at_most(self, site: Site) -> None:
        lengthen(site, 1600)
        look(site.store)
        store, backend = far(site)
        with measured_depth() as depth:
            report = collect_garbage(store, retention=NOTHING_KEPT)
            assert depth() <= 20
        assert report.counts()["wal_entries"] == 1604
        assert len(positions(site)) == 1
        assert backend.requests["delete_many"] <= 12
        assert backend.requests.total() <= 40

    def test_nothing_to_do_on_64_shards_is_6_deep_at_most(self, tmp_path: Path) -> None:
        site = Site(tmp_path / "table")
        for _ in range(64):
            WalAppender.open(site.store, uuid4()).append([rows(0, 1)])
        look(site.store)
        store, backend = far(site)
        with measured_depth() as depth:
            assert collect_garbage(store).collected == []
            assert depth() <= 6
        assert backend.requests.total() <= 64 * 4 + 8

    def test_headers_are_read_where_a_pointer_could_matter_and_once(self, site: Site) -> None:
        (staged,) = stage(site, rows(600, 5))
        publish(site.base, site.store, [staged])
        site.compact()
        look(site.store)
        store, backend = far(site)

        def reads() -> int:
            before = backend.requests["read_range"]
            report = collect_later(store, resources=["sstables"])
            assert staged.entry.path in {kept.name for kept in report.kept}
            return backend.requests["read_range"] - before

        collect_later(store, resources=["manifest_entries"])
        assert reads() == len(positions(site))
        assert reads() == 0
        # Another entry in the same slot is another entry.
        entry = layout.wal_entry(site.shard_id, positions(site)[0])
        site.store.put(entry, site.store.get(entry))
        assert reads() == 1

    def test_no_header_is_read_for_sstables_that_a_flush_made(self, site: Site) -> None:
        site.compact()
        look(site.store)
        store, backend = far(site)
        report = collect_later(store, resources=["manifest_entries", "sstables"])
        assert report.counts()["sstables"] == 3
        assert backend.requests["read_range"] == 0
        assert _pointers.get((store.identity, site.shard_id)) is None


class TestPartly:
    @pytest.mark.parametrize("seed", range(8))
    def test_a_hole_in_the_log_is_not_taken_for_its_end(self, site: Site, seed: int) -> None:
        lengthen(site, 30)
        expected, last = site.merged(), positions(site)[-1]
        chance = random.Random(seed)
        gone = [place for place in range(last - 1) if chance.random() < 0.5]
        partly = PartlyStore(site.store, "/wal/", gone)
        with pytest.raises(Killed):
            collect_later(partly, resources=["wal_entries"])
        assert len(positions(site)) == last - len(gone)
        assert established_tip(site.store, site.shard_id, site.manifest) == last + 1
        assert site.merged() == expected
        if gone:
            with pytest.raises(WalTruncatedError):
                list(WalTailer(site.store, site.shard_id).entries(1, last + 1))
        with site.dataset.mem_wal_writer(str(site.shard_id), durable_write=True) as writer:
            assert positions(site)[-1] == last + 1
            writer.put(rows(800, 2))
        assert set(named([800, 801], "name")) <= set(site.merged())
        assert verify(site.store, [site.shard_id]).ok
        site.collect(resources=["wal_entries"])
        assert positions(site)[0] >= last

    def test_a_step_ends_where_lance_begins_to_look_for_the_end(self, site: Site) -> None:
        """Else a hole above that position would be taken for the end, below the replay cursor."""
        lengthen(site, 30)
        last = positions(site)[-1]
        manifests = ShardManifestStore(site.store, site.shard_id)
        manifests.commit_update(None, lambda m: replace(m, wal_entry_position_last_seen=10))
        with pytest.raises(Killed):
            collect_later(PartlyStore(site.store, "/wal/", range(3, 99)), resources=["wal_entries"])
        assert positions(site) == [1, 2, 3, *range(11, last + 1)]
        with site.dataset.mem_wal_writer(str(site.shard_id), durable_write=True):
            assert positions(site)[-1] == last + 1

    @pytest.mark.parametrize("gone", [[], [0], [1], [0, 1], [2, 3], [0, 3, 4], [1, 2, 3]])
    def test_no_hint_makes_an_old_manifest_the_newest(self, site: Site, gone: list[int]) -> None:
        """Whichever objects of a request go: what is left must not look like the end of the chain."""
        newest = site.manifest.version
        assert newest >= 6
        with pytest.raises(Killed):
            collect_later(PartlyStore(site.store, "/manifest/", gone), resources=["manifest_versions"])
        for hint in range(newest + 2):
            site.store.put(layout.version_hint(site.shard_id), b'{"version":%d}' % hint)
            for batch in (1, 2, 3):
                manifests = ShardManifestStore(site.store, site.shard_id, batch)
                assert manifests.require_latest().version == newest
        site.collect(resources=["manifest_versions"])
        assert versions(site) == [newest]

    def test_the_hint_lies_above_the_versions_that_go(self, site: Site) -> None:
        """Lance goes by the hint, and takes a shard whose hinted version is gone for a new one."""
        newest = site.manifest.version
        site.store.put(layout.version_hint(site.shard_id), b'{"version":2}')
        site.collect(resources=["manifest_versions"])
        assert ShardManifestStore(site.store, site.shard_id).read_hint() == newest
        with site.dataset.mem_wal_writer(str(site.shard_id), durable_write=True) as writer:
            writer.put(rows(800, 1))
        assert site.manifest.version > newest

    def test_sstables_that_went_partly_go_in_the_next_collection(self, site: Site) -> None:
        expected = site.merged()
        site.compact()
        look(site.store)
        store, _ = far(site)
        with pytest.raises(Killed):
            collect_later(PartlyStore(store, "_gen_", [0, 2]))
        assert site.merged() == expected
        collect_later(store)
        shard = layout.shard_dir(site.shard_id)
        assert not [info.path for info in site.store.list(shard) if "_gen_" in info.path]
        assert site.merged() == site.plain() == expected


def of_shard(report: GcReport, shard_id: UUID) -> set[Resource]:
    return {each.resource for each in report.collected if each.shard_id == shard_id}


class TestShards:
    def test_a_shard_that_fails_does_not_stop_the_others(self, site: Site) -> None:
        others = [uuid4() for _ in range(3)]
        for other in others:
            site.flush(rows(900, 1), shard_id=other)
            site.flush(rows(901, 1), shard_id=other)
        failing = FaultyStore(far(site)[0])
        look(site.store)
        failing.faults.fail("delete_many", where=str(site.shard_id), times=None)
        with pytest.raises(StorageError, match="injected"):
            collect_garbage(failing, retention=NOTHING_KEPT)
        for other in others:
            names = {info.path.rsplit("/", 1)[-1] for info in site.store.list(layout.wal_dir(other))}
            assert len(names) == 1
        assert len(positions(site)) == 5

    def test_the_report_is_the_same_side_by_side(self, tmp_path: Path) -> None:
        reports = []
        for name in ("near", "far"):
            site = three_generations(tmp_path / name)
            for _ in range(3):
                site.flush(rows(900, 1), shard_id=uuid4())
            site.compact()
            store = site.store if name == "near" else far(site)[0]
            report = collect_later(store)
            shards = [each.shard_id for each in report.collected if each.shard_id is not None]
            assert list(dict.fromkeys(shards)) == sorted(set(shards))
            reports.append(report.counts())
        assert reports[0] == reports[1]

    @pytest.mark.parametrize("what", ["verify", "status", "flush"])
    def test_64_shards_cost_three_times_the_depth_of_one_at_most(self, tmp_path: Path, what: str) -> None:
        depths = []
        for count in (1, 64):
            site = Site(tmp_path / str(count))
            for number in range(count):
                WalAppender.open(site.store, uuid4()).append([rows(number, 1)])
            store, _ = far(site)
            with measured_depth() as depth:
                if what == "verify":
                    assert verify(store, deep=False).ok
                elif what == "flush":
                    flush_shards(site.base, discover_manifests(store), store, ShardWriterConfig())
                else:
                    assert len(table_status(store, lambda: site.base).shards) == count  # noqa: B023
                depths.append(depth())
        assert depths[1] <= 3 * depths[0]


def test_min_age_still_keeps_what_is_young(site: Site) -> None:
    store, _ = far(site)
    collect_garbage(store, min_age=timedelta(0))
    assert len(positions(site)) == 5


def test_a_bulk_load_that_is_published_during_a_collection_stays(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was garbage when the collector looked: nobody had published it for a year."""
    (staged,) = stage(site, rows(600, 5))
    look(site.store)
    doomed: list[str] = []
    decided = directories._groups

    def publish_now(garbage: Sequence[directories._Directory]) -> Iterator[list[directories._Directory]]:
        doomed.extend(each.name for each in garbage)
        publish(site.base, site.store, [staged])
        return decided(garbage)

    monkeypatch.setattr(directories, "_groups", publish_now)
    later = datetime.now(UTC) + LATER
    report = collect_garbage(site.store, resources=["orphans"], now=later, clock=clock_at(later))
    assert (doomed, report.collected) == ([staged.entry.path], [])
    assert set(named(range(600, 605), "name")) <= set(site.merged())
    assert site.verify().ok
