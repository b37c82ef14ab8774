"""WalAppender: entries in order, without gaps, and never a word from a writer that was superseded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pyarrow as pa
import pytest

from lancewal.errors import (
    ConflictError,
    CorruptManifestError,
    FencedError,
    InvalidInputError,
    OutcomeUnknownError,
    SealedShardError,
    StorageError,
)
from lancewal.format.wal_entry import encode_entry, entry_schema
from lancewal.shard import AppendResult, WalAppender, WalTailer
from lancewal.shard.log import MAX_CONFLICTS, REFRESH_EVERY
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import ObjectStore, PutOutcome, layout
from lancewal.storage.backend import TransientError
from lancewal.storage.clock import RECHECK_AFTER, boot_time
from tests.faults import FaultyBackend, FaultyStore
from tests.shard.support import (
    SHARD,
    ManualClock,
    appender_at,
    batch,
    collect_entries,
    contents,
    cover,
    doing,
    tailer_of,
    values,
)

WAL = f"{layout.wal_dir(SHARD)}/"
LISTED = layout.wal_dir(SHARD)


def successor(store: ObjectStore, *rows: int) -> WalAppender:
    """A writer that takes the shard over and writes one entry per row."""
    appender = WalAppender.open(store, SHARD)
    for row in rows:
        appender.append([batch(row)])
    return appender


def flushed_and_collected(appender: WalAppender, store: ObjectStore) -> None:
    """All entries of the shard are covered by SSTables, and deleted."""
    tip = tailer_of(store).next_position()
    cover(appender.manifests, appender.epoch, tip - 1)
    collect_entries(store, tip - 1)


def left_by_a_predecessor(store: ObjectStore, position: int, value: int) -> None:
    """An entry that a writer of an older epoch got in before the sentinel."""
    schema = entry_schema(batch(value).schema, 0, None)
    outcome = store.put_if_absent(layout.wal_entry(SHARD, position), encode_entry(schema, [batch(value)]))
    assert outcome is PutOutcome.CREATED


# ---------------------------------------------------------------- round trip


def test_what_is_appended_can_be_read(any_store: ObjectStore) -> None:
    appender = WalAppender.open(any_store, str(SHARD))
    assert (appender.shard_id, appender.epoch, appender.sentinel_position) == (SHARD, 1, None)
    first = appender.append([batch(1, 2, 3, 4)])
    assert first == AppendResult(SHARD, 1, 4, any_store.head(layout.wal_entry(SHARD, 1)).size)  # type: ignore[union-attr]
    second = appender.append([batch(5), batch(6, 7)], generation=3, tags={"query": "q"})
    assert (second.position, second.num_rows) == (2, 3)
    tailer = tailer_of(any_store)
    assert (tailer.first_position(), tailer.next_position()) == (1, 3)
    entry = tailer.read_entry(2)
    assert entry is not None
    assert (entry.shard_id, entry.position, entry.writer_epoch) == (SHARD, 2, 1)
    assert (entry.generation, entry.tags, entry.num_bytes) == (3, {"query": "q"}, second.wal_bytes)
    assert entry.batches == [batch(5), batch(6, 7)]


def test_reopening_goes_on_behind_a_sentinel(any_store: ObjectStore) -> None:
    successor(any_store, 1, 2)
    again = WalAppender.open(any_store, SHARD)
    assert (again.epoch, again.sentinel_position, again.next_position_hint) == (2, 3, 4)
    assert again.append([batch(3)]).position == 4
    assert [entry.sentinel for entry in tailer_of(any_store)] == [False, False, True, False]
    assert values(tailer_of(any_store)) == [1, 2, 3]


def test_one_append_costs_one_request(faulty: FaultyStore) -> None:
    appender = successor(faulty, 1)
    faulty.faults.clear()
    appender.append([batch(2)])
    appender.append([batch(3)])
    assert [call.kind for call in faulty.faults.calls] == ["put_if_absent"] * 2


def test_a_change_of_generation_or_field_ids_is_not_missed(memory_store: ObjectStore) -> None:
    def with_id(number: int) -> pa.RecordBatch:
        field = pa.field("id", pa.int64(), metadata={"lance:field_id": str(number)})
        return pa.record_batch([pa.array([number])], schema=pa.schema([field]))

    appender = WalAppender.open(memory_store, SHARD)
    for number, generation in ((0, 1), (0, 2), (5, 2), (0, None)):
        appender.append([with_id(number)], generation=generation)
    read = [(entry.batches[0], entry.generation) for entry in tailer_of(memory_store)]
    assert [generation for _, generation in read] == [1, 2, 2, None]
    assert [each.schema.field(0).metadata[b"lance:field_id"] for each, _ in read] == [b"0", b"0", b"5", b"0"]


def test_a_pointer_is_a_sentinel_with_tags(memory_store: ObjectStore) -> None:
    appender = successor(memory_store, 1)
    assert appender.append_pointer({"sstables": "a"}) == 2
    entry = tailer_of(memory_store).read_entry(2)
    assert entry is not None
    assert (entry.sentinel, entry.tags, entry.writer_epoch) == (True, {"sstables": "a"}, 1)


def test_threads_of_one_appender_share_the_positions(any_store: ObjectStore) -> None:
    appender = WalAppender.open(any_store, SHARD)
    results: list[tuple[int, int]] = []

    def work(thread: int) -> None:
        for number in range(3):
            value = thread * 100 + number
            results.append((appender.append([batch(value)]).position, value))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(position for position, _ in results) == list(range(1, 25))
    assert values(tailer_of(any_store)) == [value for _, value in sorted(results)]


def test_the_clock_of_the_process_never_stands_still() -> None:
    first = boot_time()
    assert 0 < first <= boot_time()


# ---------------------------------------------------------------- bad input

DIFFERING = [
    pa.record_batch({"id": pa.array([1], pa.int32())}),
    pa.record_batch({"key": pa.array([1], pa.int64())}),
    pa.record_batch({"id": pa.array([1], pa.int64()), "b": pa.array([1])}),
    pa.record_batch(
        [pa.array([1], pa.int64())], schema=pa.schema([pa.field("id", pa.int64(), nullable=False)])
    ),
    pa.record_batch(
        [pa.array([1])], schema=pa.schema([pa.field("id", pa.int64(), metadata={"lance:field_id": "4"})])
    ),
]
BAD_BATCHES: list[tuple[object, str]] = [
    ([], "empty batch list"),
    ((), "empty batch list"),
    ([batch(1).slice(1)], "empty batch at index 0"),
    ([batch(1), batch(1).slice(1)], "empty batch at index 1"),
    ([batch(1).select([])], "no columns"),
    *(([batch(1), other], "batch at index 1 has a different schema") for other in DIFFERING),
    (batch(1), "list of record batches"),
    (pa.table({"id": [1]}), "list of record batches"),
    (None, "list of record batches"),
    ([pa.table({"id": [1]})], "a Table at index 0"),
    ([{"id": 1}], "a dict at index 0"),
    ("rows", "a str at index 0"),
]


@pytest.mark.parametrize(("batches", "complaint"), BAD_BATCHES)
def test_bad_batches_are_refused_and_nothing_is_written(
    memory_store: ObjectStore, batches: list[pa.RecordBatch], complaint: str
) -> None:
    appender = successor(memory_store, 1)
    before = contents(memory_store)
    with pytest.raises(InvalidInputError, match=complaint):
        appender.append(batches)
    assert contents(memory_store) == before
    assert appender.append([batch(2)]).position == 2


def test_schemas_may_differ_in_their_own_metadata(memory_store: ObjectStore) -> None:
    other = batch(2).replace_schema_metadata({"pandas": "{}"})
    assert WalAppender.open(memory_store, SHARD).append([batch(1), other]).num_rows == 2


@pytest.mark.parametrize("shard", ["", "no-uuid", None, 3])
def test_a_shard_id_that_is_no_uuid_is_refused(memory_store: ObjectStore, shard: str) -> None:
    with pytest.raises(InvalidInputError, match="is not a UUID"):
        WalAppender.open(memory_store, shard)
    assert contents(memory_store) == {}


def test_what_the_manifest_refuses_is_refused_before_anything_is_written(memory_store: ObjectStore) -> None:
    manifests = ShardManifestStore(memory_store, SHARD)
    manifests.initialize_shard(2)
    before = contents(memory_store)
    with pytest.raises(InvalidInputError, match=f"{SHARD} belongs to sharding spec 2"):
        WalAppender.open(memory_store, SHARD, 3)
    assert contents(memory_store) == before

    manifests.seal(manifests.claim_epoch(2)[0])
    before = contents(memory_store)
    with pytest.raises(SealedShardError, match=str(SHARD)):
        WalAppender.open(memory_store, SHARD, 2)
    assert contents(memory_store) == before

    memory_store.put_if_absent(layout.manifest_file(SHARD, 4), b"no manifest")
    before = contents(memory_store)
    with pytest.raises(CorruptManifestError, match=f"version 4 of shard {SHARD}"):
        WalAppender.open(memory_store, SHARD, 2)
    assert contents(memory_store) == before


# ---------------------------------------------------------------- the fence


def test_a_newer_writer_fences_an_older_one(any_store: ObjectStore) -> None:
    first = successor(any_store, 1)
    second = successor(any_store, 2)
    assert (first.epoch, second.epoch) == (1, 2)
    with pytest.raises(FencedError, match="Writer fenced"):
        first.check_fenced()
    before = contents(any_store)
    for _ in range(2):
        with pytest.raises(FencedError, match="Writer fenced") as refusal:
            first.append([batch(9)])
        assert (refusal.value.local_epoch, refusal.value.stored_epoch) == (1, 2)
    assert contents(any_store) == before
    assert second.append([batch(3)]).position == 4


def test_a_predecessor_cannot_write_into_the_empty_slot_before_the_successors_first_write(
    any_store: ObjectStore,
) -> None:
    first = successor(any_store, 1)
    successor(any_store)
    with pytest.raises(FencedError):
        first.append([batch(9)])
    assert values(tailer_of(any_store)) == [1]


def test_a_writer_that_never_wrote_is_fenced_too(any_store: ObjectStore) -> None:
    # Its search for the tip starts only now, behind the successor's entries.
    first = WalAppender.open(any_store, SHARD)
    successor(any_store, 2, 3)
    with pytest.raises(FencedError):
        first.append([batch(9)])
    assert values(tailer_of(any_store)) == [2, 3]


def test_a_claimer_that_stalls_before_its_sentinel_is_fenced(faulty: FaultyStore) -> None:
    successor(faulty, 1)
    faulty.faults.before("put_if_absent", doing(lambda: successor(faulty.inner, 2)), where=WAL)
    with pytest.raises(FencedError) as refusal:
        WalAppender.open(faulty, SHARD)
    assert (refusal.value.local_epoch, refusal.value.stored_epoch) == (2, 3)
    assert [entry.writer_epoch for entry in tailer_of(faulty)] == [1, 3, 3]


def test_a_put_that_was_under_way_when_the_successor_came_is_fenced(faulty: FaultyStore) -> None:
    first = successor(faulty, 1)
    faulty.faults.before("put_if_absent", doing(lambda: successor(faulty.inner, 2)), where=WAL)
    with pytest.raises(FencedError):
        first.append([batch(9)])
    assert values(tailer_of(faulty)) == [1, 2]


def test_an_append_between_claim_and_sentinel_lies_below_the_sentinel(faulty: FaultyStore) -> None:
    first = successor(faulty.inner, 1)
    faulty.faults.before("put_if_absent", doing(lambda: first.append([batch(2)])), where=WAL)
    second = WalAppender.open(faulty, SHARD)
    assert second.sentinel_position == 3
    assert values(tailer_of(faulty), 1, second.sentinel_position) == [1, 2]
    with pytest.raises(FencedError):
        first.append([batch(9)])


def test_a_search_after_conflicts_does_not_pass_a_successors_sentinel(faulty: FaultyStore) -> None:
    stalled = successor(faulty, 0)
    for value in range(1, REFRESH_EVERY + 1):
        left_by_a_predecessor(faulty.inner, value + 1, value)
    # The next search begins after that many conflicts, each with a good look at the epoch.
    faulty.faults.before("list", doing(lambda: successor(faulty.inner, 99)), where=LISTED)
    with pytest.raises(FencedError):
        stalled.append([batch(-1)])
    assert values(tailer_of(faulty)) == [*range(REFRESH_EVERY + 1), 99]


@pytest.mark.parametrize("others", [1, REFRESH_EVERY - 1, REFRESH_EVERY, 3 * REFRESH_EVERY + 1])
def test_positions_taken_by_a_predecessor_are_passed(memory_store: ObjectStore, others: int) -> None:
    first = successor(memory_store, 0)
    for value in range(1, others + 1):
        left_by_a_predecessor(memory_store, value + 1, value)
    assert first.append([batch(-1)]).position == others + 2
    assert values(tailer_of(memory_store)) == [*range(others + 1), -1]


# ---------------------------------------------------------------- copies of an appender


def twin(appender: WalAppender, store: ObjectStore) -> WalAppender:
    """What a clone of the machine has: the same epoch, and the same idea of the tail."""
    copied = appender_at(store, appender.epoch)
    copied.seed_next_position(appender.next_position_hint)
    return copied


@pytest.mark.parametrize("others", [1, REFRESH_EVERY - 1, REFRESH_EVERY, 3 * REFRESH_EVERY + 1])
def test_entries_of_a_cloned_machine_were_passed_over(any_store: ObjectStore, others: int) -> None:
    """Both went on writing, and a flush of one declared the rows of the other flushed."""
    first = successor(any_store, 0)
    second = twin(first, any_store)
    for value in range(1, others + 1):
        second.append([batch(value)])
    for _ in range(2):
        with pytest.raises(FencedError, match="another process writes under epoch 1") as refusal:
            first.append([batch(-1)])
        assert refusal.value.local_epoch == refusal.value.stored_epoch == 1
    assert second.append([batch(99)]).position == others + 2
    assert values(tailer_of(any_store)) == [*range(others + 1), 99]
    assert successor(any_store, 100).epoch == 2, "whoever ended takes the shard back with a new claim"
    with pytest.raises(FencedError, match="is at epoch 2"):
        second.append([batch(-2)])


def test_entries_of_lance_under_our_own_epoch_end_the_appender(memory_store: ObjectStore) -> None:
    first = successor(memory_store, 0)
    schema = batch(7).schema.with_metadata({"writer_epoch": "1"})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(batch(7).replace_schema_metadata(schema.metadata))
    memory_store.put_if_absent(layout.wal_entry(SHARD, 2), sink.getvalue())
    with pytest.raises(FencedError, match="another process"):
        first.append([batch(8)])


def test_a_copy_is_noticed_before_a_flush_counts(faulty: FaultyStore) -> None:
    first = successor(faulty, 0)
    first.check_alone()
    second = twin(first, faulty.inner)
    second.append([batch(1)])
    with pytest.raises(FencedError, match="another process"):
        first.check_alone()
    second.check_alone()


def test_an_append_beside_the_check_for_copies_is_no_copy(faulty: FaultyStore) -> None:
    first = successor(faulty, 0)
    faulty.faults.before("head", doing(lambda: first.append([batch(1)])), where=WAL)
    first.check_alone()
    assert first.append([batch(2)]).position == 3


@pytest.mark.parametrize("error", [OutcomeUnknownError("timeout"), KeyboardInterrupt()])
def test_an_entry_that_was_given_up_is_still_our_own(faulty: FaultyStore, error: BaseException) -> None:
    """It was stored, but nobody said so; the next append has other rows."""
    first = successor(faulty, 0)
    faulty.faults.fail("put_if_absent", after=True, error=error, where=WAL)
    with pytest.raises(type(error)):
        first.append([batch(1)])
    first.check_alone()
    assert first.append([batch(2)]).position == 3
    assert values(tailer_of(faulty)) == [0, 1, 2]


def test_endless_conflicts_are_given_up(local_store: ObjectStore) -> None:
    class Contested(FaultyStore):
        contested = False

        def put_if_absent(self, path: str, data: object) -> PutOutcome:
            if not self.contested:
                return super().put_if_absent(path, data)
            self.faults.run("put_if_absent", path, lambda: None)
            return PutOutcome.EXISTS

    store = Contested(local_store)
    appender = successor(store, 1)
    store.contested = True
    before = contents(local_store)
    store.faults.clear()
    with pytest.raises(ConflictError, match=f"shard {SHARD}.*epoch 1 still holds"):
        appender.append([batch(2)])
    assert store.faults.count("put_if_absent") == MAX_CONFLICTS
    assert store.faults.count("list", LISTED) >= MAX_CONFLICTS // REFRESH_EVERY - 1
    assert contents(local_store) == before


def test_the_first_writer_has_nobody_to_fence(memory_store: ObjectStore) -> None:
    manifests = ShardManifestStore(memory_store, SHARD)
    manifests.initialize_shard()
    appender = WalAppender.open(memory_store, SHARD)
    assert (appender.epoch, appender.fence_predecessor()) == (1, None)
    assert tailer_of(memory_store).next_position() == 1


@pytest.mark.parametrize("hint", [0, 1, 3, 4, 5, 2**63])
@pytest.mark.parametrize("collected", [0, 2, 3])
def test_a_sentinel_never_lands_below_the_replay_cursor(
    memory_store: ObjectStore, collected: int, hint: int
) -> None:
    first = successor(memory_store, 1, 2, 3)
    cover(first.manifests, 1, 3)
    first.manifests.commit_update(1, lambda m: replace(m, wal_entry_position_last_seen=hint))
    collect_entries(memory_store, collected)
    again = WalAppender.open(memory_store, SHARD)
    assert again.sentinel_position == 4
    assert again.append([batch(4)]).position == 5


def test_a_hint_at_a_sentinel_is_a_hint_like_any_other(memory_store: ObjectStore) -> None:
    successor(memory_store, 1)
    second = successor(memory_store)
    assert second.sentinel_position == 2
    second.manifests.commit_update(None, lambda m: replace(m, wal_entry_position_last_seen=2))
    third = WalAppender.open(memory_store, SHARD)
    assert third.sentinel_position == 3
    assert third.append([batch(4)]).position == 4


def test_an_open_that_failed_at_its_sentinel_can_be_repeated(faulty: FaultyStore) -> None:
    first = successor(faulty.inner, 1)
    faulty.faults.fail("put_if_absent", where=WAL)
    with pytest.raises(StorageError):
        WalAppender.open(faulty, SHARD)
    again = WalAppender.open(faulty, SHARD)
    assert (again.epoch, again.sentinel_position) == (3, 2)
    with pytest.raises(FencedError):
        first.append([batch(9)])


# ---------------------------------------------------------------- a tip that somebody else found


def test_a_tip_that_was_told_needs_no_search(faulty: FaultyStore) -> None:
    appender = WalAppender.open(faulty, SHARD)
    appender.seed_next_position(1)
    faulty.faults.clear()
    assert appender.append([batch(1)]).position == 1
    assert faulty.faults.count("head") == 0


def test_a_tip_that_was_told_after_a_successor_came_is_refused(memory_store: ObjectStore) -> None:
    first = WalAppender.open(memory_store, SHARD)
    successor(memory_store, 2)
    with pytest.raises(FencedError):
        first.seed_next_position(tailer_of(memory_store).next_position())
    with pytest.raises(FencedError):
        first.append([batch(9)])


def test_a_tip_that_was_told_never_takes_a_position_back(memory_store: ObjectStore) -> None:
    appender = successor(memory_store, 1, 2, 3)
    appender.seed_next_position(2)
    assert appender.next_position_hint == 4
    assert appender.append([batch(4)]).position == 4


# ---------------------------------------------------------------- replies that are lost


def losing_replies(store: ObjectStore) -> tuple[ObjectStore, FaultyBackend]:
    backend = FaultyBackend(store._backend)
    return ObjectStore(store.uri, backend, sleep=lambda _: None), backend


def test_a_lost_reply_to_an_append_is_not_taken_for_a_rival(memory_store: ObjectStore) -> None:
    store, backend = losing_replies(memory_store)
    appender = successor(store, 1)
    backend.faults.fail("create", after=True, error=TransientError("the reply was lost"))
    assert appender.append([batch(2)]).position == 2
    assert appender.append([batch(3)]).position == 3
    assert values(tailer_of(memory_store)) == [1, 2, 3]


def test_a_lost_reply_to_a_sentinel_is_not_taken_for_a_rival(memory_store: ObjectStore) -> None:
    store, backend = losing_replies(memory_store)
    successor(store, 1)
    backend.faults.fail("create", after=True, error=TransientError("the reply was lost"), where=WAL)
    assert WalAppender.open(store, SHARD).sentinel_position == 2
    assert tailer_of(memory_store).next_position() == 3


def test_an_append_whose_outcome_is_unknown_can_be_repeated_with_the_same_bytes(faulty: FaultyStore) -> None:
    appender = successor(faulty, 1)
    data = appender.encode([batch(2)])
    faulty.faults.fail("put_if_absent", after=True, where=WAL)
    with pytest.raises(OutcomeUnknownError):
        appender.append_encoded(data)
    assert appender.append_encoded(data) == 2
    assert values(tailer_of(faulty)) == [1, 2]


@pytest.mark.parametrize(
    "lost", [OutcomeUnknownError("timeout"), KeyboardInterrupt()], ids=["reply", "caller"]
)
@pytest.mark.parametrize("kind", ["put_if_absent", "list"], ids=["put", "search for the tip"])
def test_a_refusal_does_not_deny_an_entry_that_was_sent_before(
    faulty: FaultyStore, lost: BaseException, kind: str
) -> None:
    appender = successor(faulty, 1)
    data = appender.encode([batch(2)])
    faulty.faults.fail("put_if_absent", after=True, error=lost, where=WAL)
    with pytest.raises(type(lost)):
        appender.append_encoded(data)
    if kind == "list":
        appender._next = None
    faulty.faults.fail(kind, where="/wal")
    with pytest.raises(OutcomeUnknownError, match="may be written already: injected"):
        appender.append_encoded(data)
    assert values(tailer_of(faulty.inner)) == [1, 2]
    faulty.faults.fail("put_if_absent", nth=1, where="/wal")
    with pytest.raises(StorageError, match="injected"):
        appender.append([batch(3)])


@pytest.mark.parametrize("after", [False, True])
def test_a_failed_append_leaves_no_gap(faulty: FaultyStore, after: bool) -> None:
    appender = successor(faulty, 1)
    faulty.faults.fail("put_if_absent", after=after, where=WAL)
    with pytest.raises(OutcomeUnknownError if after else StorageError):
        appender.append([batch(2)])
    assert appender.append([batch(3)]).position == (3 if after else 2)
    assert values(tailer_of(faulty)) == ([1, 2, 3] if after else [1, 3])


def test_a_store_that_fails_does_not_hide_the_fence(faulty: FaultyStore) -> None:
    first = successor(faulty, 1)
    successor(faulty.inner)
    faulty.faults.fail("put_if_absent", times=None)
    with pytest.raises(FencedError):
        first.append([batch(9)])


def test_a_store_that_fails_altogether_is_a_storage_error(faulty: FaultyStore) -> None:
    appender = successor(faulty, 1)
    faulty.faults.fail(times=None)
    with pytest.raises(StorageError, match="injected failure"):
        appender.append([batch(9)])


# ---------------------------------------------------------------- after garbage collection


def test_a_stalled_writer_that_fills_an_emptied_slot_is_fenced(
    faulty: FaultyStore, clock: ManualClock
) -> None:
    stalled = WalAppender.open(faulty, SHARD, clock=clock)
    stalled.append([batch(1)])

    def meanwhile() -> None:
        flushed_and_collected(successor(faulty.inner, 2), faulty.inner)
        clock.stall()

    faulty.faults.before("put_if_absent", meanwhile, where=WAL)
    with pytest.raises(FencedError):
        stalled.append([batch(9)])
    # The entry it left behind is nowhere near what anybody reads.
    assert faulty.head(layout.wal_entry(SHARD, 2)) is not None
    tailer = tailer_of(faulty)
    assert tailer.first_position() == tailer.next_position() == 4
    assert list(tailer) == []
    assert WalAppender.open(faulty, SHARD).sentinel_position == 4


def test_a_writer_that_stalls_while_it_searches_is_fenced(faulty: FaultyStore, clock: ManualClock) -> None:
    first = successor(faulty.inner, *range(20))
    searching = appender_at(faulty, first.epoch, clock)

    def meanwhile() -> None:
        flushed_and_collected(successor(faulty.inner, 99), faulty.inner)
        clock.stall()

    faulty.faults.before("list", meanwhile, where=LISTED)
    with pytest.raises(FencedError):
        searching.append([batch(-1)])


def test_a_writer_that_stalls_after_its_search_is_fenced(faulty: FaultyStore, clock: ManualClock) -> None:
    successor(faulty.inner, 1)

    def meanwhile() -> None:
        flushed_and_collected(successor(faulty.inner, 2), faulty.inner)
        clock.stall()

    faulty.faults.before("put_if_absent", meanwhile, where=WAL)
    with pytest.raises(FencedError):
        WalAppender.open(faulty, SHARD, clock=clock)


def test_an_idle_writer_is_not_fenced_by_time_alone(faulty: FaultyStore, clock: ManualClock) -> None:
    appender = WalAppender.open(faulty, SHARD, clock=clock)
    for position in (1, 2, 3):
        clock.stall()
        assert appender.append([batch(position)]).position == position
    assert values(tailer_of(faulty)) == [1, 2, 3]


def test_the_epoch_is_checked_again_exactly_when_a_slot_may_have_been_emptied(
    faulty: FaultyStore, clock: ManualClock
) -> None:
    appender = WalAppender.open(faulty, SHARD, clock=clock)
    appender.append([batch(0)])
    half = RECHECK_AFTER.total_seconds()
    for wait, checked in (
        (half - 1, False),
        (half + 1, True),
        (1, False),
        (half - 2, False),
        (half + 1, True),
    ):
        clock.advance(wait)
        faulty.faults.clear()
        appender.append([batch(1)])
        assert (faulty.faults.count("head", "manifest") > 0) is checked


def test_a_check_that_could_not_be_made_is_made_again(faulty: FaultyStore, clock: ManualClock) -> None:
    appender = WalAppender.open(faulty, SHARD, clock=clock)
    appender.append([batch(1)])
    data = appender.encode([batch(2)])
    clock.stall()
    faulty.faults.fail("head", where="manifest")
    with pytest.raises(OutcomeUnknownError, match="may be written already"):
        appender.append_encoded(data)
    successor(faulty.inner)
    with pytest.raises(FencedError):
        appender.append_encoded(data)


def test_an_entry_that_a_successor_had_settled_was_said_not_to_be_written(
    faulty: FaultyStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence was checked, then a successor took over, and then its cursor was read. Seed 98646."""
    appender = WalAppender.open(faulty, SHARD, clock=clock)
    appender.append([batch(1)])
    manifests = appender.manifests
    read_latest = manifests.read_latest
    reads = 0

    def read_late() -> object:
        nonlocal reads
        reads += 1
        if reads == 2:
            flushed_and_collected(successor(faulty.inner), faulty.inner)
        return read_latest()

    clock.stall()
    monkeypatch.setattr(manifests, "read_latest", read_late)
    try:
        appender.append_encoded(appender.encode([batch(2)]))
        denied = False
    except FencedError as error:
        denied = not error.may_be_written
    assert not denied


def test_an_entry_in_a_slot_that_ones_own_flush_emptied_is_written_again(
    faulty: FaultyStore, clock: ManualClock
) -> None:
    claim = WalAppender.open(faulty.inner, SHARD, clock=clock)
    stalled = appender_at(faulty, claim.epoch, clock)

    def meanwhile() -> None:
        for value in (1, 2, 3):
            claim.append([batch(value)])
        flushed_and_collected(claim, faulty.inner)
        clock.stall()

    faulty.faults.before("put_if_absent", meanwhile, where=WAL)
    assert stalled.append([batch(4)]).position == 4
    assert values(tailer_of(faulty), 4) == [4]


@pytest.fixture
def interrupted(faulty: FaultyStore) -> Iterator[Callable[[], None]]:
    def interrupt() -> None:
        raise KeyboardInterrupt

    yield interrupt
    faulty.faults.clear()


def test_an_interrupted_append_leaves_no_gap(faulty: FaultyStore, interrupted: Callable[[], None]) -> None:
    appender = successor(faulty, 1)
    faulty.faults.before("put_if_absent", interrupted, where=WAL)
    with pytest.raises(KeyboardInterrupt):
        appender.append([batch(2)])
    assert appender.append([batch(3)]).position == 2


def test_the_tailer_shows_the_rows_of_every_epoch(memory_store: ObjectStore) -> None:
    for value in (1, 2, 3):
        successor(memory_store, value)
    entries = list(WalTailer(memory_store, SHARD))
    assert [entry.writer_epoch for entry in entries] == [1, 2, 2, 3, 3]
