"""Staged SSTables and tagged WAL entries land exactly once, wherever a run dies."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import lance
import pyarrow as pa
import pytest

import lancewal
from lancewal.base.table import BaseTable
from lancewal.errors import (
    ConflictError,
    FencedError,
    InvalidInputError,
    OutcomeUnknownError,
    PartialWriteError,
    StorageError,
)
from lancewal.format import encode_sentinel
from lancewal.format.shard_manifest import ShardManifest
from lancewal.maintenance.checkpoints import create_checkpoint
from lancewal.publish import publishing as publish
from lancewal.publish import staging
from lancewal.publish.feed import ChangeFeed
from lancewal.publish.sstable_pointers import confirmation_tags
from lancewal.publish.staging import STAGED_DELETION_AGE, Staged, Stager, is_staged
from lancewal.publish.transactions import TRANSACTIONS_DIR, Run, Transaction, TransactionLog, Unsettled
from lancewal.reader import TableReader
from lancewal.shard import WalAppender, WalTailer
from lancewal.shard.discovery import discover_manifests
from lancewal.shard.log import retained_positions
from lancewal.shard.manifest import ShardManifestStore
from lancewal.shard.routing import ShardRouter
from lancewal.storage import ObjectStore, layout
from lancewal.writer import drain_shard
from lancewal.writer.intake import Intake
from tests.faults import FAILURES, Call, Faults, FaultyStore
from tests.maintenance.support import collect_later
from tests.tables import APPEND_ONLY, KEYED, fast, rows

SHARDS = 3


class CrashError(Exception):
    """Stands for the death of a process: from here on none of its calls reaches the storage."""


@pytest.fixture(params=["keyed", "append only"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return new_store(tmp_path / "table", KEYED if request.param == "keyed" else APPEND_ONLY)


@pytest.fixture
def keyed(tmp_path: Path) -> ObjectStore:
    return new_store(tmp_path / "table", KEYED)


def new_store(path: Path, schema: pa.Schema) -> ObjectStore:
    lance.write_dataset(schema.empty_table(), str(path))
    lancewal.initialize(str(path), bucket=("id", SHARDS), writer_defaults=fast())
    return ObjectStore.from_uri(path, fsync=False)


def base_of(store: ObjectStore) -> BaseTable:
    return BaseTable.open(store.uri, store=store)


def stored(base: BaseTable, batch: pa.RecordBatch) -> pa.RecordBatch:
    return Intake(base.schema).upserts(batch).batches[0]


def batch_of(base: BaseTable, start: int, count: int, prefix: str = "name") -> pa.RecordBatch:
    return rows(start, count, schema=base.schema.plain, prefix=prefix)


def staged(store: ObjectStore, batch: pa.RecordBatch, task: int = 0) -> list[Staged]:
    base = base_of(store)
    stager = Stager(base, store, ShardRouter.for_table(base.details, base.schema), order=(task,))
    stager.add(stored(base, batch))
    return stager.finish()


def appended(store: ObjectStore, batch: pa.RecordBatch, transaction: Transaction) -> list[publish.ShardWrite]:
    """The whole low-latency way, as driver and tasks do it between them."""
    base = base_of(store)
    router = ShardRouter.for_table(base.details, base.schema)
    if not publish.begin_append(store, transaction):
        return []
    parts = router.route(stored(base, batch))
    written = [publish.append_transaction(store, shard, [part], transaction) for shard, part in parts]
    publish.finish_append(store, transaction, written)
    return written


def appended_at_once(
    store: ObjectStore, batch: pa.RecordBatch, transaction: Transaction
) -> list[publish.ShardWrite]:
    """All shards from one process, as a commit by format does it with few rows."""
    base = base_of(store)
    router = ShardRouter.for_table(base.details, base.schema)
    parts = {shard: [part] for shard, part in router.route(stored(base, batch))}
    return publish.append_rows(store, parts, transaction, base_version=base.version)


def published(
    store: ObjectStore, batch: pa.RecordBatch, transaction: Transaction
) -> list[publish.ShardWrite]:
    return publish.publish(base_of(store), store, staged(store, batch), transaction)


Write = Callable[[ObjectStore, pa.RecordBatch, Transaction], list[publish.ShardWrite]]
WAYS = [published, appended, appended_at_once]


def content(store: ObjectStore) -> list[tuple[int, str]]:
    table = TableReader(ObjectStore.from_uri(store.uri)).scan().to_table()
    return sorted(zip(table["id"].to_pylist(), table["name"].to_pylist(), strict=True))


def fed(store: ObjectStore) -> list[tuple[int, str]]:
    feed = ChangeFeed.open(store.uri)
    changes = pa.Table.from_batches(feed.changes(feed.earliest(), feed.latest()), feed.schema)
    return sorted(zip(changes["id"].to_pylist(), changes["name"].to_pylist(), strict=True))


def expected(*ranges: tuple[int, int]) -> list[tuple[int, str]]:
    return sorted((i, f"name_{i}") for start, count in ranges for i in range(start, start + count))


def test_staged_rows_are_invisible_until_they_are_published_and_then_newest(store: ObjectStore) -> None:
    base = base_of(store)
    with lancewal.open(store.uri).writer() as writer:
        writer.put(batch_of(base, 0, 5, prefix="older"))
    found = staged(store, batch_of(base, 5, 5))
    assert content(store) == sorted((i, f"older_{i}") for i in range(5))
    assert all(is_staged(each.entry.path) for each in found)

    written = publish.publish(base, store, found)

    assert sum(each.rows for each in written) == 5
    assert content(store) == sorted([(i, f"older_{i}") for i in range(5)] + expected((5, 5)))


def test_published_rows_replace_rows_that_were_only_in_the_wal(keyed: ObjectStore) -> None:
    base = base_of(keyed)
    with lancewal.open(keyed.uri).writer(enable_memtable=False) as writer:
        writer.put(batch_of(base, 0, 10, prefix="older"))
    publish.publish(base, keyed, staged(keyed, batch_of(base, 0, 10)))
    assert content(keyed) == expected((0, 10))


def test_pylance_reads_published_sstables_and_goes_on_writing(keyed: ObjectStore) -> None:
    base = base_of(keyed)
    publish.publish(base, keyed, staged(keyed, batch_of(base, 0, 20)))
    seen: list[int] = []
    for manifest in discover_manifests(keyed):
        shard = str(manifest.shard_id)
        dataset = lance.dataset(keyed.uri)
        writer = dataset.mem_wal_writer(shard)
        added = 1000 + len(seen)
        writer.put(batch_of(base, added, 1))
        snapshot = writer.lsm_scanner()
        seen += snapshot.to_table()["id"].to_pylist()
        writer.close()
    assert [i for i in sorted(seen) if i < 1000] == list(range(20))
    assert [i for i, _ in content(keyed) if i < 1000] == list(range(20))


def test_sstables_of_several_tasks_are_published_by_task_and_then_by_their_order(keyed: ObjectStore) -> None:
    base = base_of(keyed)
    first = staged(keyed, batch_of(base, 0, 10, prefix="first"), task=0)
    second = staged(keyed, batch_of(base, 0, 10), task=1)
    publish.publish(base, keyed, [*second, *first])
    assert content(keyed) == expected((0, 10))
    for manifest in discover_manifests(keyed):
        generations = [entry.generation for entry in manifest.sstables]
        assert generations == list(range(1, manifest.current_generation))


def test_a_stager_writes_out_early_and_keeps_the_order_of_a_keys_rows(keyed: ObjectStore) -> None:
    base = base_of(keyed)
    stager = Stager(base, keyed, ShardRouter.for_table(base.details, base.schema), max_bytes=1)
    for prefix in ("a", "b", "name"):
        stager.add(stored(base, batch_of(base, 0, 9, prefix=prefix)))
    found = stager.finish()
    assert len(found) == 3 * len({each.shard for each in found})
    publish.publish(base, keyed, found)
    assert content(keyed) == expected((0, 9))


def test_what_was_staged_too_long_ago_is_refused_before_anything_is_written(keyed: ObjectStore) -> None:
    base = base_of(keyed)
    old = time.time() - STAGED_DELETION_AGE.total_seconds() / 2 - 1
    found = [replace(each, staged_at=old) for each in staged(keyed, batch_of(base, 0, 3))]
    with pytest.raises(InvalidInputError, match="staged"):
        publish.publish(base, keyed, found)
    assert content(keyed) == []
    assert all(manifest.writer_epoch == 0 for manifest in discover_manifests(keyed))


def test_what_was_collected_as_abandoned_is_not_published_although_a_clock_says_it_is_young(
    keyed: ObjectStore,
) -> None:
    """A host's clock was set back, so what it staged two days ago seems to be new."""
    base = base_of(keyed)
    found = staged(keyed, batch_of(base, 0, 3))
    assert collect_later(keyed).counts()["orphans"] == len(found)
    with pytest.raises(PartialWriteError, match=r"staged SSTables .* are gone"):
        publish.publish(base, keyed, found)
    assert content(keyed) == fed(keyed) == []
    again = staged(keyed, batch_of(base, 0, 3))
    publish.publish(base, keyed, again)
    assert content(keyed) == fed(keyed) == expected((0, 3))


def test_what_a_collection_that_stands_still_may_yet_delete_is_not_published(keyed: ObjectStore) -> None:
    """It is there, and its host says that it is young. By the storage's clock a collection may delete it."""
    base = base_of(keyed)
    found = staged(keyed, batch_of(base, 0, 3))
    long_ago = time.time() - STAGED_DELETION_AGE.total_seconds()
    for each in found:
        for info in keyed.list(layout.sstable_dir(each.shard.shard_id, each.entry.path)):
            os.utime(Path(keyed.uri) / info.path, (long_ago, long_ago))
    with pytest.raises(PartialWriteError, match="may take them for abandoned"):
        publish.publish(base, keyed, found)
    assert content(keyed) == fed(keyed) == []


@pytest.mark.parametrize("write", WAYS)
def test_a_transaction_that_is_run_again_writes_nothing(store: ObjectStore, write: Write) -> None:
    base = base_of(store)
    for version in (0, 1):
        write(store, batch_of(base, version * 10, 10), Transaction("app", version))
    for version in (0, 1):
        assert write(store, batch_of(base, version * 10, 10), Transaction("app", version)) == []
    assert content(store) == fed(store) == expected((0, 20))


@pytest.mark.parametrize("write", WAYS)
def test_the_same_versions_of_two_applications_are_different_writes(store: ObjectStore, write: Write) -> None:
    base = base_of(store)
    write(store, batch_of(base, 0, 10), Transaction("one", 0))
    write(store, batch_of(base, 10, 10), Transaction("other", 0))
    assert content(store) == expected((0, 20))


def storage_calls(store: ObjectStore, write: Write, batch: pa.RecordBatch) -> int:
    faulty = FaultyStore(store)
    write(faulty, batch, Transaction("count", 0))
    return len(faulty.faults.calls)


def crash_points(total: int, most: int) -> Iterator[tuple[int, bool]]:
    """Calls to die at, before and after their effect: all of them, or ``most`` spread evenly."""
    points = list(itertools.product(range(1, total + 1), (False, True)))
    return iter(points[:: max(1, -(-len(points) // most))])


#: A prime number of points meets calls before and after their effect alike.
FEW, ALL = 23, 1 << 30
thoroughly = pytest.mark.parametrize(
    "most", [FEW, pytest.param(ALL, marks=pytest.mark.soak)], ids=["few", "all"]
)


@thoroughly
@pytest.mark.parametrize("write", WAYS)
@pytest.mark.parametrize("schema", [KEYED, APPEND_ONLY], ids=["keyed", "append only"])
def test_a_run_that_dies_at_any_storage_call_is_completed_by_the_next(
    tmp_path: Path, schema: pa.Schema, write: Write, most: int
) -> None:
    probe = new_store(tmp_path / "probe", schema)
    total = storage_calls(probe, write, batch_of(base_of(probe), 0, 10))
    store = new_store(tmp_path / "table", schema)
    base = base_of(store)
    done = []
    for version, (call, after) in enumerate(crash_points(total, most)):
        faulty = FaultyStore(store)
        faulty.faults.fail("*", nth=call, after=after, error=CrashError)
        faulty.faults.fail("*", nth=call + 1, times=None, error=CrashError)
        batch = batch_of(base, version * 10, 10)
        try:
            write(faulty, batch, Transaction("app", version))
        except (CrashError, *FAILURES, PartialWriteError):
            write(store, batch, Transaction("app", version))
        done.append((version * 10, 10))
    assert content(store) == expected(*done)
    assert fed(store) == expected(*done)


@thoroughly
@pytest.mark.parametrize(("write", "again"), [(published, appended_at_once), (appended_at_once, published)])
def test_a_run_that_dies_at_any_storage_call_is_completed_by_one_that_takes_the_other_way(
    tmp_path: Path, write: Write, again: Write, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows before, many after, or the reverse; the feed has each of them once too, after compactions."""
    monkeypatch.setattr(publish, "_CONCURRENT_SHARDS", 1)
    probe = new_store(tmp_path / "probe", APPEND_ONLY)
    total = storage_calls(probe, write, batch_of(base_of(probe), 0, 10))
    store = new_store(tmp_path / "table", APPEND_ONLY)
    base = base_of(store)
    done, completed = [], 0
    for version, (call, after) in enumerate(crash_points(total, most)):
        faulty = FaultyStore(store)
        faulty.faults.fail("*", nth=call, after=after, error=CrashError)
        faulty.faults.fail("*", nth=call + 1, times=None, error=CrashError)
        batch = batch_of(base, version * 10, 10)
        try:
            write(faulty, batch, Transaction("app", version))
        except (CrashError, *FAILURES, PartialWriteError):
            completed += any(each.skipped for each in again(store, batch, Transaction("app", version)))
        done.append((version * 10, 10))
        if version % 4 == 3:
            table = lancewal.open(store.uri)
            table.flush()
            table.compact()
    assert completed, "some runs died with a part of their shards written"
    assert content(store) == fed(store) == expected(*done)


def test_rows_of_a_run_that_died_before_its_confirmation_stay_in_the_feed_when_a_run_of_entries_ends_it(
    store: ObjectStore,
) -> None:
    """The end of the transaction frees the proofs of SSTables: the feed took their pointer for dropped."""
    base = base_of(store)
    one, transaction = batch_of(base, 0, 1), Transaction("app", 0)
    faulty = FaultyStore(store)
    faulty.faults.fail("put_if_absent", nth=2, where="/wal/")
    with pytest.raises(PartialWriteError):
        published(faulty, one, transaction)
    assert [each.skipped for each in appended_at_once(store, one, transaction)] == [True]
    lancewal.open(store.uri).compact()
    assert content(store) == fed(store) == expected((0, 1))


@thoroughly
@pytest.mark.parametrize("write", WAYS)
def test_a_run_is_completed_although_compaction_and_collection_came_between(
    tmp_path: Path, write: Write, most: int
) -> None:
    """Everything that proves the write is removed, as maintenance may; the marks remain."""
    probe = new_store(tmp_path / "probe", APPEND_ONLY)
    total = storage_calls(probe, write, batch_of(base_of(probe), 0, 10))
    for version, (call, after) in enumerate(crash_points(total, most)):
        store = new_store(tmp_path / f"table-{version}", APPEND_ONLY)
        base = base_of(store)
        faulty = FaultyStore(store)
        faulty.faults.fail("*", nth=call, after=after, error=CrashError)
        faulty.faults.fail("*", nth=call + 1, times=None, error=CrashError)
        batch = batch_of(base, 0, 10)
        try:
            write(faulty, batch, Transaction("app", 0))
        except (CrashError, *FAILURES, PartialWriteError):
            before = content(store)
            remove_proofs(store)
            write(store, batch, Transaction("app", 0))
            assert sorted(before + content(store)) == expected((0, 10)), f"call {call}, after={after}"


@thoroughly
@pytest.mark.parametrize("after", [False, True], ids=["refused", "lost reply"])
def test_a_storage_error_means_that_rows_are_not_there(tmp_path: Path, most: int, after: bool) -> None:
    """The storage fails at some call and stays away: whoever hears "it did not happen" can rely on it."""
    probe = new_store(tmp_path / "probe", APPEND_ONLY)
    total = storage_calls(probe, published, batch_of(base_of(probe), 0, 10))
    unknown = 0
    for call in range(1, total + 1, max(1, 2 * total // most)):
        store = new_store(tmp_path / f"table-{call}", APPEND_ONLY)
        faulty = FaultyStore(store)
        faulty.faults.fail("*", nth=call, after=after)
        faulty.faults.fail("*", nth=call + 1, times=None)
        base, denied = base_of(store), set[UUID]()
        shards = {i: ShardRouter.of_table(base, store).shard_of(i) for i in range(10)}
        try:
            published(faulty, batch_of(base, 0, 10), Transaction("app", 0))
        except StorageError:
            denied = set(shards.values())
        except OutcomeUnknownError:
            unknown += 1
        except PartialWriteError as error:
            denied = {shard for shard, each in error.failed.items() if isinstance(each, StorageError)}
            unknown += len(denied) < len(error.failed)
        assert denied.isdisjoint(shards[i] for i, _ in content(store)), f"call {call} of {total}"
    assert unknown, "the storage failed after rows were there, too"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("write", WAYS)
def test_rows_that_are_written_are_not_denied_when_their_record_fails(
    store: ObjectStore, write: Write, after: bool
) -> None:
    base = base_of(store)
    faulty = FaultyStore(store)
    faulty.faults.fail("put", where=".done", after=after)
    with pytest.raises(OutcomeUnknownError):
        write(faulty, batch_of(base, 0, 10), Transaction("app", 0))
    assert content(store) == expected((0, 10))
    assert all(each.skipped for each in write(store, batch_of(base, 0, 10), Transaction("app", 0)))
    assert content(store) == fed(store) == expected((0, 10))


def test_published_rows_are_not_denied_when_their_confirmation_fails(store: ObjectStore) -> None:
    base = base_of(store)
    one = batch_of(base, 0, 1)
    faulty = FaultyStore(store)
    # The pointer comes through, and so does the manifest that lists the SSTable.
    faulty.faults.fail("put_if_absent", nth=2, where="/wal/")
    with pytest.raises(PartialWriteError) as caught:
        published(faulty, one, Transaction("app", 0))
    (error,) = caught.value.failed.values()
    assert isinstance(error, OutcomeUnknownError)
    assert content(store) == expected((0, 1))
    assert [each.skipped for each in published(store, one, Transaction("app", 0))] == [True]
    assert content(store) == fed(store) == expected((0, 1))


def test_published_rows_are_not_denied_when_the_shard_is_lost_before_their_confirmation(
    store: ObjectStore,
) -> None:
    base = base_of(store)
    one = batch_of(base, 0, 1)
    faulty = FaultyStore(store)

    def lose_the_shard() -> None:
        claim(store, 0)
        for manifest in discover_manifests(store):
            WalAppender.open(store, manifest.shard_id, manifest.shard_spec_id)
        faulty.faults.fail("put_if_absent", times=None, where="/manifest/")

    faulty.faults.before("put_if_absent", lose_the_shard, nth=2, where="/wal/")
    with pytest.raises(PartialWriteError) as caught:
        published(faulty, one, Transaction("app", 0))
    (error,) = caught.value.failed.values()
    assert isinstance(error, OutcomeUnknownError)
    assert content(store) == expected((0, 1))
    assert [each.skipped for each in published(store, one, Transaction("app", 0))] == [True]
    assert content(store) == fed(store) == expected((0, 1))


def remove_proofs(store: ObjectStore) -> None:
    """What a flush, a compaction, pruning and garbage collection do to a shard, without its rows."""
    base = base_of(store)
    for manifest in discover_manifests(store):
        drain_shard(base, store, manifest.shard_id)
        manifests = ShardManifestStore(store, manifest.shard_id)
        current = manifests.require_latest()
        positions = range(1, current.replay_after_wal_entry_position + 1)
        unsettled = Unsettled.read(store)
        unsettled.preserve(
            manifest.shard_id, sstables=[e.path for e in current.sstables], positions=positions
        )
        manifests.commit_update(None, lambda m: replace(m, sstables=()))
        for position in positions:
            store.delete(layout.wal_entry(manifest.shard_id, position))


def claim(store: ObjectStore, rival_row: int) -> None:
    """What every flush job, task and writer begins with."""
    for manifest in discover_manifests(store):
        ShardManifestStore(store, manifest.shard_id).claim_epoch(manifest.shard_spec_id)


def flush(store: ObjectStore, rival_row: int) -> None:
    base = base_of(store)
    for manifest in discover_manifests(store):
        drain_shard(base, store, manifest.shard_id)


def put(store: ObjectStore, rival_row: int) -> None:
    with lancewal.open(store.uri).writer() as writer:
        writer.put(batch_of(base_of(store), rival_row, 1))


def publish_beside(store: ObjectStore, rival_row: int) -> None:
    published(store, batch_of(base_of(store), rival_row, 1), Transaction(f"rival-{rival_row}", 0))


def compact(store: ObjectStore, rival_row: int) -> None:
    """Takes what is listed off the manifest, so that the feed must know it by other signs."""
    flush(store, rival_row)
    lancewal.open(store.uri).compact()
    compacted = base_of(store).compacted_generation

    def pruned(manifest: ShardManifest) -> ShardManifest:
        left = [e for e in manifest.sstables if e.generation > compacted(manifest.shard_id)]
        return replace(manifest, sstables=tuple(left))

    for manifest in discover_manifests(store):
        names = [entry.path for entry in manifest.sstables]
        Unsettled.read(store).preserve(manifest.shard_id, sstables=names)
        ShardManifestStore(store, manifest.shard_id).commit_update(None, pruned)


Rival = Callable[[ObjectStore, int], None]


def writes_the_shard(call: Call) -> bool:
    return call.kind in ("put_if_absent", "put") and layout.OWN_DIR not in call.path


def any_call(call: Call) -> bool:
    return True


class Meeting(FaultyStore):
    """A store whose user meets somebody at the ``number``-th call that ``is_met``, and is watched at each."""

    def __init__(
        self,
        inner: ObjectStore,
        is_met: Callable[[Call], bool],
        number: int,
        meet: Callable[[], None],
        watch: Callable[[], None],
    ) -> None:
        super().__init__(inner)
        self.faults = _Meetings(is_met, number, meet, watch)

    @property
    def met(self) -> bool:
        return self.faults.left == 0


class _Meetings(Faults):
    def __init__(
        self, is_met: Callable[[Call], bool], number: int, meet: Callable[[], None], watch: Callable[[], None]
    ) -> None:
        super().__init__()
        self._is_met, self._meet, self._watch = is_met, meet, watch
        self.left = number

    def run(self, kind: str, path: str, call: Callable[[], Any]) -> Any:
        if self._is_met(Call(kind, path)):
            self._watch()
            if self.left:
                self.left -= 1
                if not self.left:
                    self._meet()
                    self._watch()
        return super().run(kind, path, call)


class Follower:
    """Reads the feed on from where it stopped, as somebody does who looks at every moment."""

    def __init__(self, store: ObjectStore) -> None:
        self._feed = ChangeFeed.open(store.uri)
        self._place = self._feed.latest()
        self.rows: list[tuple[int, str]] = []

    def look(self) -> None:
        end = self._feed.latest()
        for batch in self._feed.changes(self._place, end):
            self.rows += zip(batch["id"].to_pylist(), batch["name"].to_pylist(), strict=True)
        self._place = end


@pytest.mark.parametrize(
    "is_met", [writes_the_shard, pytest.param(any_call, marks=pytest.mark.soak)], ids=["few", "all"]
)
@pytest.mark.parametrize("rival", [claim, flush, put, publish_beside, compact])
@pytest.mark.parametrize("write", WAYS)
def test_a_rival_at_any_storage_call_put_rows_into_the_feed_twice(
    tmp_path: Path, write: Write, rival: Rival, is_met: Callable[[Call], bool]
) -> None:
    """One shard, and one rival at one call of each write; a follower looks whenever something may be new."""
    lance.write_dataset(APPEND_ONLY.empty_table(), str(tmp_path / "table"))
    lancewal.initialize(str(tmp_path / "table"), unsharded=True, writer_defaults=fast())
    store = ObjectStore.from_uri(tmp_path / "table", fsync=False)
    base = base_of(store)
    published(store, batch_of(base, 0, 5), Transaction("first", 0))
    done = [(0, 5)]
    follower = Follower(store)
    for number in itertools.count(1):
        meeting = Meeting(store, is_met, number, partial(rival, store, 1000 + number), follower.look)
        write(meeting, batch_of(base, number * 10, 5), Transaction("app", number))
        done.append((number * 10, 5))
        if not meeting.met:
            break
        if rival in (put, publish_beside):
            done.append((1000 + number, 1))
    assert number > 4, "the pointer, the manifest and the confirmation are met at the least"
    follower.look()
    assert content(store) == expected(*done)
    assert fed(store) == expected(*done)
    assert sorted(follower.rows) == expected(*done[1:])


def test_a_loser_that_wakes_up_after_the_commit_changes_nothing(keyed: ObjectStore) -> None:
    base = base_of(keyed)
    winner, loser = staged(keyed, batch_of(base, 0, 10)), staged(keyed, batch_of(base, 0, 10, prefix="loser"))
    publish.publish(base, keyed, winner, Transaction("app", 0))
    publish.publish(base, keyed, loser, Transaction("app", 0))
    staged(keyed, batch_of(base, 0, 10, prefix="late"))
    assert content(keyed) == fed(keyed) == expected((0, 10))


def test_a_zombie_run_that_goes_on_after_its_successor_finished_writes_nothing(store: ObjectStore) -> None:
    base = base_of(store)
    router = ShardRouter.for_table(base.details, base.schema)
    transaction = Transaction("app", 0)
    parts = router.route(stored(base, batch_of(base, 0, 10)))
    publish.begin_append(store, transaction)
    publish.append_transaction(store, parts[0][0], [parts[0][1]], transaction)
    appended(store, batch_of(base, 0, 10), transaction)
    remove_proofs(store)
    late = [publish.append_transaction(store, shard, [part], transaction) for shard, part in parts]
    assert all(each.skipped for each in late)


def test_an_entry_that_was_collected_while_a_run_looked_for_it_was_written_twice(store: ObjectStore) -> None:
    """The records were read before a collection left its mark, and the log after it had deleted the entry."""
    base = base_of(store)
    transaction = Transaction("app", 0)
    ((shard, part),) = ShardRouter.for_table(base.details, base.schema).route(
        stored(base, batch_of(base, 0, 1))
    )
    publish.begin_append(store, transaction)
    publish.append_transaction(store, shard, [part], transaction)
    drain_shard(base, store, shard.shard_id)
    faulty = FaultyStore(store)
    faulty.faults.before("get", lambda: collect(store, shard.shard_id), where="/wal/")

    again = publish.append_transaction(faulty, shard, [part], transaction)

    assert again.skipped
    assert content(store) == expected((0, 1))


def collect(store: ObjectStore, shard_id: UUID) -> None:
    """What garbage collection does to a log: marks first."""
    positions = range(
        1, ShardManifestStore(store, shard_id).require_latest().replay_after_wal_entry_position + 1
    )
    Unsettled.read(store).preserve(shard_id, positions=positions)
    store.delete_many([layout.wal_entry(shard_id, position) for position in positions])


def test_a_loser_of_a_write_without_a_name_that_wakes_up_after_its_end_writes_nothing(
    store: ObjectStore,
) -> None:
    """The records of such a write are removed at its end, and with them what says that it is written."""
    base = base_of(store)
    transaction = Transaction.anonymous()
    parts = list(ShardRouter.for_table(base.details, base.schema).route(stored(base, batch_of(base, 0, 20))))
    appended(store, batch_of(base, 0, 20), transaction)
    TransactionLog(store, transaction).forget()
    epochs = [m.writer_epoch for m in discover_manifests(store)]
    with pytest.raises(ConflictError, match="nothing was written"):
        publish.append_transaction(store, parts[0][0], [parts[0][1]], transaction)
    assert fed(store) == content(store) == expected((0, 20))
    assert [m.writer_epoch for m in discover_manifests(store)] == epochs


def test_a_loser_of_a_finished_transaction_does_not_fence_the_writer_that_came_after(
    keyed: ObjectStore,
) -> None:
    base = base_of(keyed)
    transaction = Transaction("app", 0)
    parts = list(ShardRouter.for_table(base.details, base.schema).route(stored(base, batch_of(base, 0, 20))))
    appended(keyed, batch_of(base, 0, 20), transaction)
    with lancewal.open(keyed.uri).writer() as writer:
        writer.put(batch_of(base, 20, 20))
        late = [publish.append_transaction(keyed, shard, [part], transaction) for shard, part in parts]
        writer.put(batch_of(base, 40, 20))
    assert [write.skipped for write in late] == [True] * len(parts)
    assert content(keyed) == expected((0, 60))


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize("behind", ["rows", "a pointer", "another claim's sentinel"])
def test_an_entry_in_an_emptied_slot_passed_for_the_write_of_its_job(
    keyed: ObjectStore, behind: str, collected: bool
) -> None:
    """A task that stood still dropped its entry where nobody replays it. Seeds 542 and 123157."""
    base, transaction = base_of(keyed), Transaction("app", 0)
    batch = batch_of(base, 0, 10)
    ((shard, part), *_) = ShardRouter.for_table(base.details, base.schema).route(stored(base, batch))
    publish.begin_append(keyed, transaction)
    shard.create(keyed)
    stalled = WalAppender.open(keyed, shard.shard_id, shard.spec_id, keep_metadata=True)
    data = stalled.encode([part], tags=transaction.tags)
    position = stalled.next_position_hint
    if behind != "rows":
        successor = WalAppender.open(keyed, shard.shard_id, shard.spec_id)
        if behind == "a pointer":
            successor.append_pointer(confirmation_tags("0" * 16))
    for start in (10, 20):
        with lancewal.open(keyed.uri).writer() as writer:
            writer.put(batch_of(base, start, 10))
    (record,) = empty(keyed, shard.shard_id, position)
    assert f".emptied.{shard.shard_id}." in record
    keyed.put_if_absent(layout.wal_entry(shard.shard_id, position), data)
    if collected:
        # The collection of the stray must not leave a proof of it.
        assert empty(keyed, shard.shard_id, position) == []
    written = appended(keyed, batch, transaction)
    assert not any(each.skipped for each in written)
    assert content(keyed) == expected((0, 30))
    late = [publish.append_transaction(keyed, shard, [part], transaction)]
    assert all(each.skipped for each in late)


def empty(store: ObjectStore, shard_id: UUID, position: int) -> list[str]:
    """Collect the entries up to a position, as garbage collection does; returns what it recorded."""
    recorded = Unsettled.read(store).preserve(shard_id, positions=range(1, position + 1))
    store.delete_many([layout.wal_entry(shard_id, each) for each in range(1, position + 1)])
    return recorded


@pytest.mark.parametrize("finder", ["the next run", "another collection"])
def test_a_slot_was_emptied_and_filled_again_after_the_records_were_read(
    keyed: ObjectStore, finder: str
) -> None:
    base, transaction = base_of(keyed), Transaction("app", 0)
    batch = batch_of(base, 0, 10)
    ((shard, part), *_) = ShardRouter.for_table(base.details, base.schema).route(stored(base, batch))
    publish.begin_append(keyed, transaction)
    shard.create(keyed)
    stalled = WalAppender.open(keyed, shard.shard_id, shard.spec_id, keep_metadata=True)
    data = stalled.encode([part], tags=transaction.tags)
    slot = layout.wal_entry(shard.shard_id, stalled.next_position_hint)
    for start in (10, 20):
        with lancewal.open(keyed.uri).writer() as writer:
            writer.put(batch_of(base, start, 10))
    faulty = FaultyStore(keyed)

    def empty_and_fill() -> None:
        empty(keyed, shard.shard_id, 1)
        keyed.put_if_absent(slot, data)

    faulty.faults.before("get", empty_and_fill, where="/wal/")
    if finder == "the next run":
        written = appended(faulty, batch, transaction)
    else:
        Unsettled.read(faulty).preserve(shard.shard_id, positions=range(1, 2))
        assert not TransactionLog(keyed, transaction).read().marks
        written = appended(keyed, batch, transaction)
    assert not any(each.skipped for each in written)
    assert content(keyed) == expected((0, 30))


@pytest.mark.parametrize("ids", [("a", "b"), ("b", "a")])
def test_the_entry_of_a_run_was_not_believed_because_a_later_run_had_none(
    keyed: ObjectStore, ids: tuple[str, str]
) -> None:
    """A collection recorded for the second run that slots are emptied, and believed that for the first."""
    base, transaction = base_of(keyed), Transaction("app", 0)
    batch = batch_of(base, 0, 10)
    ((shard, part), *_) = ShardRouter.for_table(base.details, base.schema).route(stored(base, batch))
    shard.create(keyed)
    log = TransactionLog(keyed, transaction)
    first = Run(0, ids[0] * 16, floors={shard.shard_id: 1})
    log.start(first)
    position = publish.append_transaction(keyed, shard, [part], transaction, run=first).position
    assert position is not None
    second = Run(0, ids[1] * 16, floors={shard.shard_id: position + 1})
    log.start(second)
    with lancewal.open(keyed.uri).writer() as writer:
        writer.put(batch_of(base, 100, 30))
    drain_shard(base, keyed, shard.shard_id)
    end = ShardManifestStore(keyed, shard.shard_id).require_latest().replay_after_wal_entry_position
    empty(keyed, shard.shard_id, end)
    assert publish.append_transaction(keyed, shard, [part], transaction, run=second).skipped


def test_an_entry_that_a_checkpoint_kept_was_not_believed_after_those_above_it_were_collected(
    tmp_path: Path,
) -> None:
    store = new_store(tmp_path / "table", APPEND_ONLY)
    base, transaction = base_of(store), Transaction("app", 0)
    ((shard, part), *_) = ShardRouter.for_table(base.details, base.schema).route(
        stored(base, batch_of(base, 0, 10))
    )
    shard.create(store)

    def drain(first: int) -> None:
        with lancewal.open(store.uri).writer() as writer:
            writer.put(batch_of(base, first, 10))
        drain_shard(base, store, shard.shard_id)

    drain(100)
    drain(200)
    collect_later(store)
    publish.begin_append(store, transaction)
    position = publish.append_transaction(store, shard, [part], transaction).position
    create_checkpoint(store, "kept")
    drain(300)
    drain(400)
    collect_later(store)
    collect_later(store)
    positions = retained_positions(store, shard.shard_id)
    assert position in positions
    assert positions != list(range(positions[0], positions[-1] + 1))
    assert publish.append_transaction(store, shard, [part], transaction).skipped


def test_a_write_was_not_found_because_others_had_filled_the_slots_of_its_log(tmp_path: Path) -> None:
    """The records were read, then a collection took the entry, and a stray took its place."""
    store = new_store(tmp_path / "table", APPEND_ONLY)
    base, transaction = base_of(store), Transaction("app", 0)
    ((shard, part), *_) = ShardRouter.for_table(base.details, base.schema).route(
        stored(base, batch_of(base, 0, 10))
    )
    shard.create(store)
    publish.begin_append(store, transaction)
    position = publish.append_transaction(store, shard, [part], transaction).position
    assert position is not None
    for start in (100, 200):
        with lancewal.open(store.uri).writer() as writer:
            writer.put(batch_of(base, start, 20))
        drain_shard(base, store, shard.shard_id)
    faulty = FaultyStore(store)

    def empty_and_fill() -> None:
        empty(store, shard.shard_id, position)
        store.put_if_absent(layout.wal_entry(shard.shard_id, position), encode_sentinel(2))

    faulty.faults.before("get", empty_and_fill, where="/wal/")
    assert publish.append_transaction(faulty, shard, [part], transaction).skipped


def test_the_record_of_a_collection_about_a_forgotten_write_stayed_for_ever(keyed: ObjectStore) -> None:
    transaction, shard_id = Transaction.anonymous(), uuid4()
    log = TransactionLog(keyed, transaction)
    log.start(Run(0, floors={shard_id: 1}))
    unsettled = Unsettled.read(keyed)
    log.forget()
    assert unsettled.preserve(shard_id, positions=range(1, 5)) == []
    assert keyed.list(TRANSACTIONS_DIR) == []


def test_records_of_emptied_slots_do_not_pile_up_while_a_job_is_away(keyed: ObjectStore) -> None:
    shard_id, transaction = uuid4(), Transaction("app", 0)
    log = TransactionLog(keyed, transaction)
    log.start(Run(0, floors={shard_id: 1}))
    for end in (5, 9, 9, 7, 12, 20):
        Unsettled.read(keyed).preserve(shard_id, positions=range(1, end))
    history = log.read()
    assert history.emptied == {(0, shard_id): [12, 20]}
    assert history.proven_from(0, shard_id) == 20
    assert history.proven_from(0, uuid4()) == 1
    log.finish()
    assert log.read().emptied == {}
    later = TransactionLog(keyed, Transaction("app", 1))
    later.start(Run(1, floors={}))
    later.finish()
    left = [info.path.rpartition("/")[2] for info in keyed.list(TRANSACTIONS_DIR)]
    assert left
    assert all(name.startswith(f"{1:020d}.") for name in left)


@pytest.mark.parametrize("stalls", ["before the claim", "before the pointer"])
def test_a_run_that_stood_still_for_a_day_listed_sstables_that_were_collected(
    stalls: str, keyed: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their age was looked at once, at the beginning. Seeds 22, 124 and 167 of the simulator."""
    now = time.monotonic()
    monkeypatch.setattr(staging, "boot_time", lambda: now)
    faulty = FaultyStore(keyed)

    def sleep() -> None:
        nonlocal now
        now += STAGED_DELETION_AGE.total_seconds()

    where = "/manifest/" if stalls == "before the claim" else "/wal/"
    faulty.faults.before("put_if_absent", sleep, where=where)
    found = staged(faulty, batch_of(base_of(keyed), 0, 10))
    with pytest.raises(PartialWriteError) as refusal:
        publish.publish(base_of(keyed), faulty, found, Transaction("app", 0))
    causes = [str(each) for each in refusal.value.failed.values()]
    assert causes
    assert all("24.0 hours ago" in cause for cause in causes)
    listed = [entry.path for manifest in discover_manifests(keyed) for entry in manifest.sstables]
    assert not {each.entry.path for each in found if each.shard.shard_id in refusal.value.failed} & {*listed}
    assert published(keyed, batch_of(base_of(keyed), 0, 10), Transaction("app", 0))
    assert content(keyed) == fed(keyed) == expected((0, 10))


def test_two_runs_of_one_transaction_at_the_same_time_write_each_shard_once(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the first run may be through with all other shards when the second one comes to them.
    monkeypatch.setattr(publish, "_CONCURRENT_SHARDS", 1)
    base = base_of(store)
    batch = batch_of(base, 0, 10)
    faulty = FaultyStore(store)
    second: list[Any] = []
    faulty.faults.before(
        "put_if_absent", lambda: second.extend(published(store, batch, Transaction("app", 0))), nth=4
    )
    published(faulty, batch, Transaction("app", 0))
    assert sum(not each.skipped for each in second) >= 1
    assert content(store) == fed(store) == expected((0, 10))


def test_publishing_fences_the_writer_that_is_open_on_the_shard(keyed: ObjectStore) -> None:
    base = base_of(keyed)
    writer = lancewal.open(keyed.uri).writer(take_over="now")  # does not come back
    writer.put(batch_of(base, 0, 10, prefix="live"))
    publish.publish(base, keyed, staged(keyed, batch_of(base, 0, 5)))
    with pytest.raises(PartialWriteError) as failure:
        writer.put(batch_of(base, 20, 10))
    assert {type(error) for error in failure.value.failed.values()} == {FencedError}
    writer.close()
    kept = [row for row in content(keyed) if row[0] < 10]
    assert kept == sorted(expected((0, 5)) + [(i, f"live_{i}") for i in range(5, 10)])


def test_rows_of_a_writer_that_came_between_drain_and_publication_are_kept(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publication would cover its entry of the log without having flushed it."""
    base = base_of(store)
    came: list[bool] = []

    def drain_and_come(*args: Any) -> Any:
        drained = drain_shard(*args)
        if not came:
            came.append(True)
            with lancewal.open(store.uri).writer(enable_memtable=False) as writer:
                writer.put(batch_of(base, 0, 1, prefix="between"))
                writer.put(batch_of(base, 50, 1, prefix="between"))
        return drained

    monkeypatch.setattr(publish, "drain_shard", drain_and_come)
    assert [each.skipped for each in published(store, batch_of(base, 0, 1), Transaction("app", 0))] == [False]
    replaced = [] if base.schema.primary_key else [(0, "between_0")]
    assert content(store) == sorted([*replaced, (0, "name_0"), (50, "between_50")])


def test_the_log_keeps_only_the_newest_version(keyed: ObjectStore) -> None:
    base = base_of(keyed)
    for version in range(5):
        published(keyed, batch_of(base, version, 1), Transaction("app", version))
    names = [info.path.rsplit("/", 1)[-1] for info in keyed.list(f"{layout.OWN_DIR}/transactions")]
    assert {name.split(".")[0] for name in names} == {f"{4:020d}"}
    assert TransactionLog(keyed, Transaction("app", 4)).is_done()
    assert not TransactionLog(keyed, Transaction("app", 5)).is_done()
    assert len(Unsettled.read(keyed)) == 0


def test_a_write_without_a_name_leaves_no_record(keyed: ObjectStore) -> None:
    base = base_of(keyed)
    publish.publish(base, keyed, staged(keyed, batch_of(base, 0, 3)))
    assert keyed.list(f"{layout.OWN_DIR}/transactions") == []


def test_nothing_is_preserved_for_transactions_that_are_done(keyed: ObjectStore) -> None:
    base = base_of(keyed)
    published(keyed, batch_of(base, 0, 10), Transaction("app", 0))
    for manifest in discover_manifests(keyed):
        names = [entry.path for entry in manifest.sstables]
        assert Unsettled.read(keyed).preserve(manifest.shard_id, sstables=names) == []


def test_a_foreign_entry_between_does_not_hide_the_tagged_one(store: ObjectStore) -> None:
    base = base_of(store)
    router = ShardRouter.for_table(base.details, base.schema)
    transaction = Transaction("app", 0)
    parts = router.route(stored(base, batch_of(base, 0, 10)))
    publish.begin_append(store, transaction)
    first = [publish.append_transaction(store, shard, [part], transaction) for shard, part in parts]
    with lancewal.open(store.uri).writer(enable_memtable=False) as writer:
        writer.put(batch_of(base, 100, 30))
    second = [publish.append_transaction(store, shard, [part], transaction) for shard, part in parts]
    assert [each.position for each in second] == [each.position for each in first]
    assert all(each.skipped for each in second)


def test_floors_keep_a_run_from_searching_the_whole_log(keyed: ObjectStore) -> None:
    base = base_of(keyed)
    for version in range(4):
        appended(keyed, batch_of(base, 0, 10), Transaction("app", version))
    faulty = FaultyStore(keyed)
    written = appended(faulty, batch_of(base, 0, 10), Transaction("app", 4))
    read = [c.path for c in faulty.faults.calls if c.kind == "get" and c.path.endswith(layout.WAL_SUFFIX)]
    assert len(written) == SHARDS
    assert read == []


@pytest.mark.parametrize(("app", "version"), [("", 0), ("app", -1), ("app", 1.5), ("app", True)])
def test_a_transaction_without_name_or_number_is_refused(app: str, version: Any) -> None:
    with pytest.raises(InvalidInputError):
        Transaction(app, version)


def test_a_damaged_record_is_named(keyed: ObjectStore) -> None:
    transaction = Transaction("app", 0)
    TransactionLog(keyed, transaction).start(Run(0))
    for info in keyed.list(f"{layout.OWN_DIR}/transactions"):
        keyed.put(info.path, b"{")
    with pytest.raises(StorageError, match="damaged"):
        TransactionLog(keyed, transaction).read()


def test_entries_of_the_low_latency_way_are_one_per_shard_and_version(keyed: ObjectStore) -> None:
    base = base_of(keyed)
    written = appended(keyed, batch_of(base, 0, 40), Transaction("app", 0))
    for each in written:
        entries = [entry for entry in WalTailer(keyed, each.shard_id) if not entry.sentinel]
        assert [entry.num_rows for entry in entries] == [each.rows]
        assert entries[0].generation is None
