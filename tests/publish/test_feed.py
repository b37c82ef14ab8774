"""The change feed: every acknowledged row once, by position, or a loud error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import lance
import pyarrow as pa
import pytest

import lancewal
from lancewal.base.table import BaseTable
from lancewal.errors import InvalidInputError, StorageError, WalTruncatedError
from lancewal.format import encode_entry, entry_schema
from lancewal.publish import publishing as publish
from lancewal.publish.feed import ChangeFeed, feed_schema
from lancewal.publish.sstable_pointers import Fate, SsTablePointer, confirmation_tags, fate_of
from lancewal.publish.staging import Staged, Stager
from lancewal.publish.transactions import Run, Transaction, TransactionLog, Unsettled
from lancewal.shard import WalAppender, WalTailer
from lancewal.shard.discovery import discover_manifests
from lancewal.shard.manifest import ShardManifestStore
from lancewal.shard.routing import ShardRouter
from lancewal.sstable import SsTable
from lancewal.storage import RECHECK_AFTER, ObjectStore, layout
from lancewal.writer.intake import Intake
from tests.faults import FaultyStore
from tests.tables import APPEND_ONLY, KEYED, fast, rows, wal_table

pytestmark = pytest.mark.sharding(unsharded=True)

RUN = "c0ffee"


@pytest.fixture
def store(table: lancewal.Table) -> ObjectStore:
    return ObjectStore.from_uri(table.uri, fsync=False)


def the_shard(table: lancewal.Table) -> UUID:
    return table.shard_for()


def staged(store: ObjectStore, batch: pa.RecordBatch) -> list[Staged]:
    base = BaseTable.open(store.uri)
    stager = Stager(base, store, ShardRouter.for_table(base.details, base.schema))
    stager.add(Intake(base.schema).upserts(batch).batches[0])
    return stager.finish()


def publish_rows(store: ObjectStore, batch: pa.RecordBatch, transaction: Transaction | None = None) -> None:
    publish.publish(BaseTable.open(store.uri), store, staged(store, batch), transaction)


def all_changes(uri: str, start: dict[UUID, int] | None = None) -> list[tuple[int, str | None, str]]:
    feed = ChangeFeed.open(uri)
    begin = feed.earliest() if start is None else start
    found = pa.Table.from_batches(feed.changes(begin, feed.latest()), feed.schema)
    columns = (found[name].to_pylist() for name in ("id", "name", "_change_type"))
    return list(zip(*columns, strict=True))


def test_upserts_and_deletes_come_in_the_order_in_which_they_were_written(table: lancewal.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1, 2))
        writer.delete(1)
        writer.put(rows(1, 1, prefix="again"))
    assert all_changes(table.uri) == [
        (1, "name_1", "upsert"),
        (2, "name_2", "upsert"),
        (1, None, "delete"),
        (1, "again_1", "upsert"),
    ]


def test_rows_of_a_table_without_a_key_are_inserts(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "table", APPEND_ONLY)
    with table.writer() as writer:
        writer.put(rows(1, 1, schema=APPEND_ONLY))
    assert all_changes(table.uri) == [(1, "name_1", "insert")]


def test_rows_carry_shard_position_and_epoch(table: lancewal.Table) -> None:
    for start in (0, 1):
        with table.writer() as writer:
            writer.put(rows(start, 1))
    feed = ChangeFeed.open(table.uri)
    found = pa.Table.from_batches(feed.changes(feed.earliest(), feed.latest()))
    assert set(found["_shard_id"].to_pylist()) == {str(the_shard(table))}
    # The sentinel of the second writer stands between the two.
    assert found["_wal_position"].to_pylist() == [1, 3]
    assert found["_writer_epoch"].to_pylist() == [1, 2]


def test_reading_in_pieces_gives_the_same_as_reading_at_once(
    table: lancewal.Table, store: ObjectStore
) -> None:
    for start in range(0, 6, 2):
        with table.writer() as writer:
            writer.put(rows(start, 1))
            writer.put(rows(start + 1, 1))
        publish_rows(store, rows(100 + start, 2))
    whole = all_changes(table.uri)
    feed = ChangeFeed.open(table.uri)
    place, pieces = feed.earliest(), []
    while (goal := feed.advance(place, max_entries=1)) != place:
        found = pa.Table.from_batches(feed.changes(place, goal), feed.schema)
        pieces += list(zip(*(found[n].to_pylist() for n in ("id", "name", "_change_type")), strict=True))
        place = goal
    assert pieces == whole
    assert len(whole) == 12


def test_published_sstables_appear_where_their_pointer_stands(
    table: lancewal.Table, store: ObjectStore
) -> None:
    with table.writer() as writer:
        writer.put(rows(1, 1))
    publish_rows(store, rows(10, 2))
    with table.writer() as writer:
        writer.put(rows(2, 1))
    assert [row[0] for row in all_changes(table.uri)] == [1, 10, 11, 2]


def test_published_sstables_stay_in_the_feed_after_pruning_them(
    table: lancewal.Table, store: ObjectStore
) -> None:
    publish_rows(store, rows(10, 2))
    ShardManifestStore(store, the_shard(table)).commit_update(None, lambda m: replace(m, sstables=()))
    assert [row[0] for row in all_changes(table.uri)] == [10, 11]


def test_a_pointer_to_collected_sstables_is_an_error_and_no_gap(
    table: lancewal.Table, store: ObjectStore
) -> None:
    publish_rows(store, rows(10, 2))
    for manifest in discover_manifests(store):
        for entry in manifest.sstables:
            store.delete_prefix(layout.sstable_dir(manifest.shard_id, entry.path))
    with pytest.raises(WalTruncatedError):
        all_changes(table.uri)


def test_an_sstable_that_is_collected_while_a_follower_reads_it_is_behind_it(
    table: lancewal.Table, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a StorageError, after which nobody knew that only a snapshot helps."""
    found = staged(store, rows(10, 2))
    shard = the_shard(table)
    appender, _, position = pointer_by_hand(store, shard, tuple(s.entry.path for s in found))
    list_sstables(appender, found, position)
    scan = SsTable.scan

    def collected(sstable: SsTable, *arguments: Any, **how: Any) -> Any:
        store.delete_prefix(layout.sstable_dir(shard, sstable.entry.path))
        return scan(sstable, *arguments, **how)

    monkeypatch.setattr(SsTable, "scan", collected)
    with pytest.raises(WalTruncatedError):
        all_changes(table.uri)


@pytest.mark.parametrize("change", ["a row is lost", "a row is doubled"])
def test_an_sstable_with_another_number_of_rows_than_its_job_wrote_is_no_part_of_the_feed(
    change: str, tmp_path: Path
) -> None:
    table = wal_table(tmp_path / "table", APPEND_ONLY)
    store = ObjectStore.from_uri(table.uri)
    found = staged(store, rows(10, 5, schema=APPEND_ONLY))
    shard = the_shard(table)
    appender, _, position = pointer_by_hand(store, shard, tuple(s.entry.path for s in found))
    list_sstables(appender, found, position)
    assert [row[0] for row in all_changes(table.uri)] == [10, 11, 12, 13, 14]
    directory = layout.sstable_dir(shard, found[0].entry.path)
    uri = layout.child_uri(store.uri, directory)
    before = lance.dataset(uri).to_table()
    for part in ("data", "_versions", "_transactions"):
        store.delete_prefix(f"{directory}/{part}")
    chosen = [0, 1, 3, 4] if change == "a row is lost" else [0, 1, 2, 2, 3, 4]
    lance.write_dataset(before.take(chosen), uri, mode="create")
    SsTable.open(store, shard, found[0].entry).forget()
    with pytest.raises(StorageError, match="the flush wrote 5"):
        all_changes(table.uri)


def test_positions_that_were_collected_are_an_error_and_no_gap(
    table: lancewal.Table, store: ObjectStore
) -> None:
    with table.writer() as writer:
        writer.put(rows(1, 1))
    with table.writer() as writer:
        writer.put(rows(2, 1))
    shard = the_shard(table)
    store.delete(layout.wal_entry(shard, 1))
    with pytest.raises(WalTruncatedError):
        all_changes(table.uri, {shard: 1})
    assert [row[0] for row in all_changes(table.uri)] == [2]


def _collect(table: lancewal.Table, positions: range) -> None:
    for position in positions:
        (Path(table.uri) / layout.wal_entry(the_shard(table), position)).unlink()


def test_a_follower_that_stood_still_took_a_collected_place_for_the_end(table: lancewal.Table) -> None:
    """Found by the simulator, seed 18897 in another order: the feed said that there was nothing new."""
    store = FaultyStore(ObjectStore.from_uri(table.uri, fsync=False))
    now = 0.0
    feed = ChangeFeed(store, table.table_schema, clock=lambda: now)
    with table.writer() as writer:
        writer.put(rows(0, 3))
    place = feed.latest()
    (at,) = place.values()

    def stand_still() -> None:
        nonlocal now
        now = 2 * RECHECK_AFTER.total_seconds()
        for first in (10, 20):
            with table.writer() as writer:
                writer.put(rows(first, 3))
        _collect(table, range(layout.FIRST_WAL_POSITION, at + 1))

    store.faults.before("get", stand_still, where=layout.wal_dir(the_shard(table)))
    end = feed.advance(place)
    assert end == feed.latest() != place
    with pytest.raises(WalTruncatedError):
        list(feed.changes(place, end))


@pytest.mark.parametrize("gap", [False, True])
def test_an_entry_in_an_emptied_slot_came_in_the_feed(table: lancewal.Table, gap: bool) -> None:
    for first in (0, 10, 20):
        with table.writer() as writer:
            writer.put(rows(first, 3))
    feed = ChangeFeed.open(table.uri)
    log = list(WalTailer(ObjectStore.from_uri(table.uri), the_shard(table)).entries())
    slot = next(entry.position for entry in log if entry.sentinel and entry.writer_epoch == 2)
    # The first writer stood still before it wrote this, until its successor's sentinel was collected.
    written = encode_entry(entry_schema(log[0].batches[0].schema, 1, 1), log[0].batches)
    _collect(table, range(layout.FIRST_WAL_POSITION, slot + 1 + gap))
    (Path(table.uri) / layout.wal_entry(the_shard(table), slot)).write_bytes(written)
    with pytest.raises(WalTruncatedError):
        next(feed.changes({the_shard(table): slot}, feed.latest()))


def pointer_by_hand(
    store: ObjectStore, shard: UUID, names: tuple[str, ...]
) -> tuple[WalAppender, SsTablePointer, int]:
    appender = WalAppender.open(store, shard, ShardManifestStore(store, shard).require_latest().shard_spec_id)
    pointer = SsTablePointer(RUN, names, 100, Transaction("app", 0).tags["transaction"])
    return appender, pointer, appender.append_pointer(pointer.tags())


def test_an_entry_in_an_emptied_slot_before_a_pointer_came_in_the_feed(
    table: lancewal.Table, store: ObjectStore
) -> None:
    with table.writer() as writer:
        writer.put(rows(0, 3))
    shard = the_shard(table)
    (first, *_) = WalTailer(store, shard).entries()
    _, _, pointer = pointer_by_hand(store, shard, ("00000000_gen_1",))
    with table.writer() as writer:
        writer.put(rows(10, 3))
    written = encode_entry(entry_schema(first.batches[0].schema, 1, 1), first.batches)
    _collect(table, range(layout.FIRST_WAL_POSITION, pointer))
    (Path(table.uri) / layout.wal_entry(shard, pointer - 1)).write_bytes(written)
    feed = ChangeFeed.open(table.uri)
    with pytest.raises(WalTruncatedError):
        next(feed.changes({shard: pointer - 1}, feed.latest()))


def list_sstables(appender: WalAppender, found: list[Staged], position: int) -> None:
    entries = [each.entry for each in found]
    appender.manifests.commit_update(appender.epoch, lambda m: publish._listing(m, entries, position))


def test_the_feed_waits_at_a_pointer_while_its_outcome_is_open(
    table: lancewal.Table, store: ObjectStore
) -> None:
    found = staged(store, rows(10, 2))
    shard = the_shard(table)
    appender, pointer, position = pointer_by_hand(store, shard, tuple(s.entry.path for s in found))
    feed = ChangeFeed.open(table.uri)
    assert fate_of(store, shard, position, appender.epoch, pointer) is Fate.OPEN
    assert feed.latest()[shard] == position
    with pytest.raises(StorageError, match="not settled"):
        list(feed.read(shard, 1, position + 1))

    list_sstables(appender, found, position)

    assert fate_of(store, shard, position, appender.epoch, pointer) is Fate.PUBLISHED
    assert [row[0] for row in all_changes(table.uri)] == [10, 11]


def test_a_pointer_whose_writer_died_is_dropped_when_another_takes_over(
    table: lancewal.Table, store: ObjectStore
) -> None:
    found = staged(store, rows(10, 2))
    shard = the_shard(table)
    appender, pointer, position = pointer_by_hand(store, shard, tuple(s.entry.path for s in found))
    with table.writer() as writer:
        writer.put(rows(1, 1))
    assert fate_of(store, shard, position, appender.epoch, pointer) is Fate.DROPPED
    assert [row[0] for row in all_changes(table.uri)] == [1]


def test_the_rows_of_a_run_that_died_before_its_confirmation_are_in_the_feed(
    table: lancewal.Table, store: ObjectStore
) -> None:
    """It listed its SSTables and died; somebody else claimed the shard. The manifest is all that tells."""
    found = staged(store, rows(10, 2))
    shard = the_shard(table)
    appender, pointer, position = pointer_by_hand(store, shard, tuple(s.entry.path for s in found))
    list_sstables(appender, found, position)
    with table.writer() as writer:
        writer.put(rows(1, 1))
    assert fate_of(store, shard, position, appender.epoch, pointer) is Fate.PUBLISHED
    assert [row[0] for row in all_changes(table.uri)] == [10, 11, 1]


def test_a_pointer_published_and_pruned_before_its_confirmation_is_not_dropped(
    table: lancewal.Table, store: ObjectStore
) -> None:
    """The crash falls between the manifest commit and the confirmation, then all proof is pruned."""
    found = staged(store, rows(10, 2))
    shard = the_shard(table)
    names = tuple(s.entry.path for s in found)
    TransactionLog(store, Transaction("app", 0)).start(Run(0, RUN, sstables={shard: names}))
    appender, pointer, position = pointer_by_hand(store, shard, names)
    list_sstables(appender, found, position)
    Unsettled.read(store).preserve(shard, sstables=names)
    manifests = ShardManifestStore(store, shard)
    manifests.commit_update(None, lambda m: replace(m, sstables=()))
    assert fate_of(store, shard, position, appender.epoch, pointer) is Fate.PUBLISHED, (
        "same epoch, cursor passed"
    )
    with table.writer() as writer:
        writer.put(rows(1, 1))
    assert fate_of(store, shard, position, appender.epoch, pointer) is Fate.PUBLISHED, "by the mark"
    TransactionLog(store, Transaction("app", 0)).forget()
    assert fate_of(store, shard, position, appender.epoch, pointer) is Fate.DROPPED, "nothing left to tell"
    late = WalAppender.open(store, shard, manifests.require_latest().shard_spec_id)
    late.append_pointer(confirmation_tags(RUN))
    assert fate_of(store, shard, position, appender.epoch, pointer) is Fate.PUBLISHED, (
        "by a late confirmation"
    )


def test_limits_are_shared_fairly_by_shards(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "table", bucket=("id", 3))
    with table.writer(enable_memtable=False) as writer:
        for start in range(0, 200, 20):
            writer.put(rows(start, 20))
    feed = ChangeFeed.open(table.uri)
    begin = feed.earliest()
    after = feed.advance(begin, max_entries=6)
    assert [after[shard] - begin[shard] for shard in sorted(begin)] == [2, 2, 2]
    size = max(
        entry.num_bytes for shard in begin for entry in WalTailer(ObjectStore.from_uri(table.uri), shard)
    )
    by_bytes = feed.advance(begin, max_bytes=4 * size)
    taken = [by_bytes[shard] - begin[shard] for shard in begin]
    assert 3 <= sum(taken) <= 5
    assert max(taken) - min(taken) <= 1
    assert sum(feed.advance(begin, max_bytes=1)[s] - begin[s] for s in begin) == 1
    assert feed.advance(begin) == feed.latest()


def test_a_pointers_rows_count_for_the_limit_of_bytes(table: lancewal.Table, store: ObjectStore) -> None:
    publish_rows(store, rows(0, 20_000))
    publish_rows(store, rows(0, 20_000))
    feed = ChangeFeed.open(table.uri)
    begin, goal = feed.earliest(), feed.advance(feed.earliest(), max_bytes=100_000)
    read = sum(batch.num_rows for batch in feed.changes(begin, goal))
    assert read == 20_000


def test_a_shard_that_appears_later_is_read_from_its_beginning(tmp_path: Path) -> None:
    lance.write_dataset(KEYED.empty_table(), str(tmp_path / "table"))
    table = lancewal.initialize(str(tmp_path / "table"), by_hand=True, writer_defaults=fast())
    with table.shard_writer(UUID(int=1)) as writer:
        writer.put(rows(1, 1))
    place = ChangeFeed.open(table.uri).latest()
    with table.shard_writer(UUID(int=2)) as writer:
        writer.put(rows(2, 1))
    assert [row[0] for row in all_changes(table.uri, place)] == [2]


def test_following_gives_rows_as_they_come_and_stops_when_told(table: lancewal.Table) -> None:
    feed = ChangeFeed.open(table.uri)
    seen: list[int] = []
    waits = 0

    def wait(seconds: float) -> None:
        nonlocal waits
        with table.writer() as writer:
            writer.put(rows(waits, 1))
        waits += 1

    for batch, _ in feed.follow(stop=lambda: len(seen) >= 3, wait=wait):  # noqa: B023
        seen += batch["id"].to_pylist()
    assert seen == [0, 1, 2]


def test_a_follower_goes_on_from_the_place_that_came_with_a_batch(table: lancewal.Table) -> None:
    feed = ChangeFeed.open(table.uri)
    start = feed.latest()
    with table.writer(enable_memtable=False) as writer:
        for i in range(4):
            writer.put(rows(i, 1))
    places = []
    for _, place in feed.follow(start, stop=lambda: len(places) >= 2):
        places.append(place)
    again = [i for batch in feed.changes(places[-1], feed.latest()) for i in batch["id"].to_pylist()]
    assert set(again) >= {1, 2, 3}


def test_columns_that_were_added_since_read_as_nulls(table: lancewal.Table) -> None:
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(1, 1))
    lance.dataset(table.uri).add_columns(pa.schema([pa.field("added", pa.int32())]))
    feed = ChangeFeed.open(table.uri)
    found = pa.Table.from_batches(feed.changes(feed.earliest(), feed.latest()))
    assert found["added"].to_pylist() == [None]
    assert found["name"].to_pylist() == ["name_1"]


def test_a_table_with_columns_of_these_names_has_no_feed(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    schema = pa.schema([*KEYED, pa.field("_wal_position", pa.int64())])
    lance.write_dataset(schema.empty_table(), uri).initialize_mem_wal(unsharded=True)
    with pytest.raises(InvalidInputError, match="_wal_position"):
        feed_schema(BaseTable.open(uri).schema)


@pytest.mark.parametrize("limits", [{"max_entries": 0}, {"max_bytes": 0}])
def test_a_limit_of_nothing_is_refused(table: lancewal.Table, limits: dict[str, int]) -> None:
    feed = ChangeFeed.open(table.uri)
    with pytest.raises(InvalidInputError):
        feed.advance(feed.earliest(), **limits)


def test_the_feed_gave_a_column_the_values_of_one_that_had_its_name(table: lancewal.Table) -> None:
    def replace_draft() -> None:
        lance.dataset(table.uri).drop_columns(["draft"])
        lance.dataset(table.uri).add_columns(pa.field("draft", pa.string()))

    lance.dataset(table.uri).add_columns(pa.field("draft", pa.string()))
    store = ObjectStore.from_uri(table.uri, fsync=False)

    def row(number: int) -> pa.RecordBatch:
        return pa.record_batch({"id": [number], "name": ["x"], "draft": ["written"]})

    with table.writer() as writer:
        writer.put(row(1))
        replace_draft()
    publish_rows(store, row(2))
    replace_draft()
    publish_rows(store, row(3))
    base = BaseTable.open(table.uri)
    transaction = Transaction("job", 1)
    (batch,) = Intake(base.schema).upserts(row(4)).batches
    (shard,) = table.router().known_shards()
    assert publish.begin_append(store, transaction)
    replace_draft()
    publish.append_transaction(store, shard, [batch], transaction, base_version=base.version)
    feed = ChangeFeed.open(table.uri)
    changes = pa.Table.from_batches(feed.changes(feed.earliest(), feed.latest()), feed.schema)
    assert changes["id"].to_pylist() == [1, 2, 3, 4]
    assert changes["draft"].to_pylist() == [None] * 4
    assert table.scan(filter="draft IS NOT NULL").count_rows() == 0
    with table.writer() as writer:
        writer.put(row(5))
        assert table.scan(filter="draft = 'written'").to_table()["id"].to_pylist() == [5]


def test_a_place_that_was_kept_as_json_was_ignored(table: lancewal.Table) -> None:
    """Its shard ids were texts, which were taken for shards of others: all rows came again."""
    with table.writer() as writer:
        writer.put(rows(0, 2))
        (_, place), *_ = table.changes()
        writer.put(rows(2, 2))
        kept = json.loads(json.dumps({str(shard): position for shard, position in place.items()}))
        found = [batch["id"].to_pylist() for batch, _ in table.changes(kept)]
        assert found == [[2, 3]]
        batch, _ = next(table.changes(kept, follow=True))
        assert batch["id"].to_pylist() == [2, 3]
        assert ChangeFeed.open(table.uri).advance(kept) == {the_shard(table): place[the_shard(table)] + 1}


@pytest.mark.parametrize("follow", [True, False])
def test_a_place_behind_the_end_of_the_log_passed_over_what_came_there(
    table: lancewal.Table, follow: bool
) -> None:
    """As after a table was restored: the reader waited, and left out all rows up to its place."""
    with table.writer() as writer:
        writer.put(rows(0, 2))
    (end,) = ChangeFeed.open(table.uri).latest().values()
    assert not list(table.changes({the_shard(table): end}))
    for place in ({the_shard(table): end + 1}, {uuid4(): 2}):
        with pytest.raises(InvalidInputError, match="another table"):
            next(table.changes(place, follow=follow))


@pytest.mark.parametrize("position", [0, -1, 1.5, "1", None, True])
def test_a_place_without_a_position_is_refused(table: lancewal.Table, position: object) -> None:
    for follow in (True, False):
        with pytest.raises(InvalidInputError, match="are whole numbers"):
            next(table.changes({the_shard(table): position}, follow=follow))  # type: ignore[dict-item]
