"""Replay: exactly what a claim has to restore, once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal.errors import FencedError, WalCorruptError, WalTruncatedError
from lancewal.format.wal_entry import encode_sentinel
from lancewal.shard import WalAppender
from lancewal.shard.tail import Replay
from lancewal.storage import ObjectStore, layout
from tests.faults import FaultyStore
from tests.shard.support import SHARD, batch, collect_entries, cover, tailer_of


def replay_of(appender: WalAppender, store: ObjectStore) -> Replay:
    return Replay(appender, tailer_of(store))


def rows(replay: Replay) -> list[int]:
    return [value for entry in replay.entries() for value in entry.batches[0].column("id").to_pylist()]


def written(store: ObjectStore, *generations: int | None) -> WalAppender:
    """A log with one entry per generation; entry n has the row n."""
    appender = WalAppender.open(store, SHARD)
    first = tailer_of(store).next_position()
    for row, generation in enumerate(generations, first):
        appender.append([batch(row)], generation=generation)
    return appender


def test_a_new_shard_has_nothing_to_replay(any_store: ObjectStore) -> None:
    appender = WalAppender.open(any_store, SHARD)
    replay = replay_of(appender, any_store)
    assert (replay.range.start, replay.range.stop) == (1, 1)
    assert (len(replay.range), replay.next_position, rows(replay)) == (0, 1, [])


def test_everything_above_the_cursor_is_replayed_up_to_the_own_sentinel(any_store: ObjectStore) -> None:
    first = written(any_store, 1, 1, 2, 2)
    cover(first.manifests, 1, 2)
    appender = WalAppender.open(any_store, SHARD)
    replay = replay_of(appender, any_store)
    assert replay.range == range(3, 5)
    assert rows(replay) == [3, 4]
    assert replay.next_position == 6
    appender.seed_next_position(replay.next_position)
    assert appender.append([batch(6)]).position == 6
    # What came later is none of its business.
    assert rows(replay) == [3, 4]


def test_a_replay_that_was_interrupted_can_be_repeated(memory_store: ObjectStore) -> None:
    written(memory_store, 1, 1, 1)
    appender = WalAppender.open(memory_store, SHARD)
    next(replay_of(appender, memory_store).entries())
    again = WalAppender.open(memory_store, SHARD)
    assert rows(replay_of(again, memory_store)) == [1, 2, 3]


def test_entries_whose_generation_was_drained_are_not_loaded_again(memory_store: ObjectStore) -> None:
    # A compactor may have flushed a generation without moving the cursor over all of it.
    first = written(memory_store, 1, 2, None, 3)
    first.manifests.commit_update(1, lambda m: replace(m, current_generation=3))
    appender = WalAppender.open(memory_store, SHARD)
    assert rows(replay_of(appender, memory_store)) == [3, 4]


def test_sentinels_and_pointers_are_no_rows(memory_store: ObjectStore) -> None:
    written(memory_store, 1).append_pointer({"sstables": "x"})
    written(memory_store, 1)
    appender = WalAppender.open(memory_store, SHARD)
    replay = replay_of(appender, memory_store)
    assert replay.range == range(1, 5)
    assert [entry.position for entry in replay.entries()] == [1, 4]


def test_the_first_writer_replays_what_is_there(memory_store: ObjectStore) -> None:
    # An opener of the first epoch that died before its writer was ready, and is read again.
    appender = written(memory_store, 1, 1)
    replay = replay_of(appender, memory_store)
    assert replay.range == range(1, 3)
    assert (rows(replay), replay.next_position) == ([1, 2], 3)


def test_an_emptied_wal_has_nothing_to_replay(memory_store: ObjectStore) -> None:
    first = written(memory_store, 1, 1)
    cover(first.manifests, 1, 2)
    collect_entries(memory_store, 2)
    appender = WalAppender.open(memory_store, SHARD)
    replay = replay_of(appender, memory_store)
    assert (replay.range.start, replay.range.stop, rows(replay), replay.next_position) == (3, 3, [], 4)


def test_an_entry_of_a_higher_epoch_aborts_the_replay(memory_store: ObjectStore) -> None:
    written(memory_store, 1, 1)
    appender = WalAppender.open(memory_store, SHARD)
    memory_store.put(layout.wal_entry(SHARD, 2), encode_sentinel(9))
    with pytest.raises(FencedError, match="replay aborted at position 2") as refusal:
        rows(replay_of(appender, memory_store))
    assert (refusal.value.local_epoch, refusal.value.stored_epoch) == (2, 9)


def test_a_hole_in_the_range_aborts_the_replay(any_store: ObjectStore) -> None:
    written(any_store, 1, 1, 1)
    appender = WalAppender.open(any_store, SHARD)
    any_store.delete(layout.wal_entry(SHARD, 2))
    with pytest.raises(WalCorruptError, match=f"entry 2 of shard {SHARD}"):
        rows(replay_of(appender, any_store))


def test_a_damaged_entry_in_the_range_aborts_the_replay(memory_store: ObjectStore) -> None:
    written(memory_store, 1, 1, 1)
    path = layout.wal_entry(SHARD, 2)
    memory_store.put(path, memory_store.get(path)[:-9])
    appender = WalAppender.open(memory_store, SHARD)
    with pytest.raises(WalCorruptError, match=f"entry 2 of shard {SHARD}"):
        rows(replay_of(appender, memory_store))


def test_a_range_that_a_successor_flushed_and_collected_is_a_fence(memory_store: ObjectStore) -> None:
    written(memory_store, 1, 1)
    stalled = WalAppender.open(memory_store, SHARD)
    replay = replay_of(stalled, memory_store)
    successor = WalAppender.open(memory_store, SHARD)
    cover(successor.manifests, successor.epoch, 4)
    collect_entries(memory_store, 4)
    with pytest.raises(FencedError):
        rows(replay)


def test_a_range_that_was_collected_by_mistake_is_no_fence(memory_store: ObjectStore) -> None:
    written(memory_store, 1, 1)
    appender = WalAppender.open(memory_store, SHARD)
    replay = replay_of(appender, memory_store)
    cover(appender.manifests, appender.epoch, 2)
    collect_entries(memory_store, 2)
    with pytest.raises(WalTruncatedError):
        rows(replay)


def test_a_successor_during_the_first_writers_open_is_noticed(memory_store: ObjectStore) -> None:
    appender = WalAppender.open(memory_store, SHARD)
    written(memory_store, 1)
    replay = replay_of(appender, memory_store)
    assert rows(replay) == [], "nobody wrote before it"
    appender.seed_next_position(replay.next_position)
    with pytest.raises(FencedError):
        appender.append([batch(1)])


# ---------------------------------------------------------------- splitting a long replay


@given(
    st.lists(st.none() | st.integers(1, 4), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 5),
)
@settings(max_examples=60)
def test_a_flush_during_replay_never_hides_a_later_entry(
    generations: list[int | None], current: int, memtable: int
) -> None:
    """Whatever the generations: after a split every entry that is left still counts."""
    store = ObjectStore.from_uri(f"memory://replay-{next(_names)}")
    first = written(store, *generations)
    first.manifests.commit_update(1, lambda m: replace(m, current_generation=current))
    appender = WalAppender.open(store, SHARD)
    replay = replay_of(appender, store)
    left = {entry.position for entry in replay.entries()}
    for position in range(1, len(generations) + 1):
        later = {at for at in left if at > position}
        # A flush of this MemTable raises the current generation by one.
        kept = {at for at in later if (said := generations[at - 1]) is None or said > memtable}
        assert replay.may_split_after(position, memtable) == (kept == later)


_names = iter(range(1_000_000))


def test_a_long_tail_is_looked_at_once(memory_store: ObjectStore) -> None:
    written(memory_store, *[2] * 10, *[1] * 90)
    store = FaultyStore(memory_store)
    replay = replay_of(WalAppender.open(store, SHARD), store)
    store.faults.clear()
    # The next entry decides: no need to look at all that follow.
    assert not replay.may_split_after(50, 1)
    assert store.faults.count("get_range") <= 64
    for position in range(1, 100):
        replay.may_split_after(position, 1)
    assert replay.may_split_after(100, 1)
    assert store.faults.count("get_range") <= 150
