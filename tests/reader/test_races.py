"""Whatever happens between two storage calls of a reader, it sees the rows of one moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lancewal.maintenance import compact
from lancewal.publish import publish
from lancewal.reader import BaseSource, TableReader, state
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import layout
from lancewal.writer import ShardWriter
from tests.faults import ANY, FaultyStore
from tests.publish.test_feed import staged
from tests.reader.support import TableUnderTest, named
from tests.tables import APPEND_ONLY, KEYED, abandon

Rows = list[tuple[int, str]]


class WatchedReader(TableReader):
    """Lance reads the base table by itself: that counts as a storage call too."""

    _store: FaultyStore

    def _newest_base(self) -> BaseSource:
        return self._store.faults.run("open", "base", super()._newest_base)


def second_first(first: Callable[[], Any], second: Callable[[], Any], *, at_once: bool) -> tuple[Any, Any]:
    """What runs side by side on distant storage, in the other order: the listing and the base come first."""
    later = second()
    return first(), later


class Scene:
    """Rows in the base, in an SSTable and in the log of one shard, and what others may do to them."""

    def __init__(self, where: Path, keyed: bool) -> None:
        self.schema = KEYED if keyed else APPEND_ONLY
        self.table = TableUnderTest(where, self.schema)
        self.moments: list[Rows] = []
        # The shard that a job publishes to.
        shard = staged(self.table.store, self._batch({0: ""}))[0].shard
        shard.create(self.table.store)
        self.table.shard = shard.shard_id
        with self.table.writer() as writer:
            self.put({1: "base", 2: "base"}, writer)
        self.compact()
        with self.table.writer() as writer:
            self.put({2: "flushed", 3: "flushed"}, writer)
        self.writer = self.table.open()
        self.put({3: "logged", 4: "logged"})

    def put(self, rows: Mapping[int, str], writer: ShardWriter | None = None) -> None:
        (writer or self.writer).put(self._batch(rows))
        self.note()

    def note(self) -> None:
        """Remember what there is now. Nothing but a put or a publication may change it."""
        self.moments.append(self.rows(TableReader(self.table.store, live_writers=False)))

    def _batch(self, rows: Mapping[int, str]) -> pa.RecordBatch:
        return named(rows).cast(self.schema).to_batches()[0]

    def flush(self) -> None:
        self.writer.force_seal_active()
        self.writer.wait_for_flush_drain()

    def compact(self) -> None:
        compact(self.table.store)

    def collect(self) -> None:
        """Delete at once what garbage collection deletes when it is old enough."""
        store, shard = self.table.store, self.table.shard
        manifest = ShardManifestStore(store, shard).require_latest()
        for position in range(1, manifest.replay_after_wal_entry_position + 1):
            store.delete(layout.wal_entry(shard, position))

    def succeed(self) -> None:
        """Another writer takes the shard over."""
        self.writer = self.table.open()

    def publish(self) -> None:
        batch = self._batch({4: "published", 7: "published"})
        publish(self.table.live.base(), self.table.store, staged(self.table.store, batch))
        self.note()
        self.writer = self.table.open()

    def rows(self, reader: TableReader) -> Rows:
        found = reader.scan().to_table()
        return sorted(zip(found["id"].to_pylist(), found["name"].to_pylist(), strict=True))


def _flush_and_put(scene: Scene) -> None:
    scene.flush()
    scene.put({4: "later", 5: "later"})


def _flush_and_collect(scene: Scene) -> None:
    _flush_and_put(scene)
    scene.collect()


def _compact(scene: Scene) -> None:
    scene.compact()


def _overtake(scene: Scene) -> None:
    _flush_and_put(scene)
    scene.flush()
    scene.compact()
    scene.collect()
    scene.put({1: "last", 6: "last"})


def _take_over(scene: Scene) -> None:
    scene.succeed()
    scene.put({4: "successor", 6: "successor"})


def _publish(scene: Scene) -> None:
    scene.publish()
    scene.put({7: "after", 8: "after"})


HAPPENINGS: dict[str, Callable[[Scene], None]] = {
    each.__name__.strip("_"): each
    for each in (
        _flush_and_collect,
        _compact,
        _overtake,
        _take_over,
        _publish,
    )
}


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "append only"])
@pytest.mark.parametrize(
    ("live", "warm"), [(True, True), (False, True), (False, False)], ids=["live", "log", "log at first sight"]
)
@pytest.mark.parametrize("happening", list(HAPPENINGS))
@pytest.mark.parametrize("hasty", [False, True], ids=["base last", "base beside the manifests"])
def test_a_scan_shows_one_moment_whatever_happens_at_any_of_its_storage_calls(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hasty: bool,
    happening: str,
    live: bool,
    warm: bool,
    keyed: bool,
) -> None:
    if hasty:
        monkeypatch.setattr(state, "both", second_first)
    number = reached = 0
    while number == reached:
        number += 1
        scene = Scene(tmp_path / str(number), keyed)
        store = FaultyStore(scene.table.store)
        reader = WatchedReader(store, live_writers=live)
        if warm:
            scene.rows(reader)
        happened: list[bool] = []
        first = len(scene.moments) - 1

        def happen(scene: Scene = scene, happened: list[bool] = happened) -> None:
            happened.append(True)
            HAPPENINGS[happening](scene)

        store.faults.clear()
        store.faults.before(ANY, happen, nth=number)
        found = scene.rows(reader)
        store.faults.clear()
        # A live reader may see what was flushed meanwhile, and not what was put after that.
        assert found in scene.moments[first:], f"at call {number}"
        assert scene.rows(reader) == scene.moments[-1]
        reached += bool(happened)
        abandon(scene.writer)
    assert reached > 3
