"""What a compaction takes off the manifests: by what it read before, from whatever is newest by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.distant import distant_store, measured_depth
from lancewal.maintenance import at_crash_points, compact
from lancewal.shard import ShardManifestStore, discover_manifests
from lancewal.storage import RECHECK_AFTER, ObjectStore, boot_time
from tests.maintenance.support import Site, three_generations
from tests.tables import rows


@pytest.fixture(params=["near", "far"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """Three generations; far away, much is read beside the merge."""
    site = three_generations(tmp_path / "table")
    if request.param == "far":
        site.store, _ = distant_store(tmp_path / "table")
    yield site
    at_crash_points(None)


def once(point: str, act: Callable[[], object]) -> None:
    """``act`` when a compaction first reaches ``point``."""

    def hook(name: str) -> None:
        if name == point:
            at_crash_points(None)
            act()

    at_crash_points(hook)


def test_what_was_compacted_is_listed_no_more(site: Site) -> None:
    site.compact()
    assert site.marker == 3
    assert site.manifest.sstables == ()
    assert ShardManifestStore(site.store, site.shard_id).read_hint() == site.manifest.version


def test_a_generation_that_was_flushed_meanwhile_stays(site: Site) -> None:
    once("merge: rows are read", lambda: site.flush(rows(500, 3, prefix="late")))
    site.compact()
    assert [entry.generation for entry in site.manifest.sstables] == [4]
    assert (500, "late_500") in site.merged()


def test_generations_stay_for_a_version_that_was_tagged_while_rows_were_merged(site: Site) -> None:
    """Tags that were read before the commit would miss it."""
    once("merge: rows are read", lambda: site.dataset.tags.create("before", site.dataset.version))
    site.compact()
    assert site.marker == 3
    assert [entry.generation for entry in site.manifest.sstables] == [1, 2, 3]


def test_a_version_that_was_tagged_before_keeps_only_what_it_does_not_hold(site: Site) -> None:
    site.compact()
    site.flush(rows(700, 3))
    site.dataset.tags.create("between", site.dataset.version)
    site.compact()
    assert [entry.generation for entry in site.manifest.sstables] == [4]


def test_a_compaction_is_finished_when_pruning_fails(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        from lancewal.errors import StorageError

        raise StorageError("no")

    monkeypatch.setattr(ShardManifestStore, "commit_update", fail)
    site.compact()
    assert site.marker == 3
    assert len(site.manifest.sstables) == 3
    assert "still listed" in caplog.text


def test_a_manifest_that_was_read_long_ago_is_not_built_upon(site: Site) -> None:
    """Its successor may have been collected: the place would look free."""
    manifests = ShardManifestStore(site.store, site.shard_id)
    old = site.manifest
    manifests.assume(old, boot_time() - RECHECK_AFTER.total_seconds() - 1)
    asked: list[int] = []

    def unchanged(manifest):  # type: ignore[no-untyped-def]
        asked.append(manifest.version)
        return manifest

    site.flush(rows(900, 1))
    manifests.commit_update(None, unchanged)
    assert asked == [site.manifest.version]
    assert asked[0] > old.version


def test_a_compaction_asks_for_little_in_turn(tmp_path: Path) -> None:
    """Our own requests: manifests, rows, the commit's outcome, and the shorter manifest with its hint."""
    site = three_generations(tmp_path / "table")
    store, backend = distant_store(tmp_path / "table")
    with measured_depth() as depth:
        compact(store)
        assert depth() <= 8
    assert site.manifest.sstables == ()
    assert backend.requests["put"] + backend.requests["put_if_absent"] <= 4


class TestLikelyShards:
    @pytest.fixture
    def far(self, tmp_path: Path) -> tuple[Site, ObjectStore]:
        site = three_generations(tmp_path / "table")
        return site, distant_store(tmp_path / "table")[0]

    def test_their_manifests_are_those_that_a_listing_finds(self, far: tuple[Site, ObjectStore]) -> None:
        site, store = far
        assert discover_manifests(store, [site.shard_id]) == discover_manifests(store) == [site.manifest]

    def test_one_that_does_not_exist_is_left_out(self, far: tuple[Site, ObjectStore]) -> None:
        site, store = far
        from uuid import uuid4

        assert discover_manifests(store, [uuid4(), site.shard_id]) == [site.manifest]

    def test_they_are_read_while_shards_are_listed(self, far: tuple[Site, ObjectStore]) -> None:
        site, store = far
        depths = []
        for likely in ([], [site.shard_id]):
            with measured_depth() as depth:
                discover_manifests(store, likely)
                depths.append(depth())
        assert depths[1] == depths[0] - 1
