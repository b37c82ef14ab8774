"""Where a WAL begins and ends, whatever the hint says and whatever was collected."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancewal.errors import WalCorruptError
from lancewal.format.shard_manifest import ShardManifest, encode_manifest
from lancewal.shard.log import (
    WatchedTip,
    established_tip,
    find_tip,
    first_readable,
    first_unsettled,
    retained_positions,
)
from lancewal.storage import ObjectStore, layout
from lancewal.storage.clock import RECHECK_AFTER
from tests.faults import FaultyStore
from tests.shard.support import SHARD, ManualClock, doing

SOME = st.integers(0, 40)


def manifest(cursor: int = 0, hint: int = 0) -> ShardManifest:
    return ShardManifest(
        version=1,
        writer_epoch=1,
        shard_id=SHARD,
        replay_after_wal_entry_position=cursor,
        wal_entry_position_last_seen=hint,
    )


def fill(store: ObjectStore, positions: range | list[int]) -> None:
    for position in positions:
        store.put_if_absent(layout.wal_entry(SHARD, position), b"%d" % position)


def fresh() -> ObjectStore:
    """A store that shares nothing, for tests that run many times."""
    return ObjectStore.from_uri(f"memory://tip-{next(_names)}")


_names = iter(range(1_000_000))


@given(length=SOME, cursor=SOME, collected=SOME, hint=st.integers(0, 80) | st.integers(0, 2**64 - 1))
def test_the_tip_is_found_whatever_the_hint_says(length: int, cursor: int, collected: int, hint: int) -> None:
    cursor, collected = min(cursor, length), min(collected, cursor, length)
    store = fresh()
    fill(store, range(collected + 1, length + 1))
    assert find_tip(store, SHARD, manifest(cursor, hint)) == length + 1
    assert established_tip(store, SHARD, manifest(cursor, hint)) == length + 1
    assert WatchedTip(store, SHARD).find(manifest(cursor, hint)) == length + 1
    assert first_readable(store, SHARD, manifest(cursor, hint)) == collected + 1


def test_a_shard_without_a_manifest_starts_at_one(memory_store: ObjectStore) -> None:
    assert find_tip(memory_store, SHARD, None) == 1
    assert established_tip(memory_store, SHARD, None) == 1
    assert first_readable(memory_store, SHARD, None) == 1
    assert first_unsettled(None) == 1


@pytest.mark.parametrize("hint", [0, 5, 10, 11, 99])
def test_the_tip_of_an_emptied_wal_stays_above_the_replay_cursor(
    memory_store: ObjectStore, hint: int
) -> None:
    assert find_tip(memory_store, SHARD, manifest(cursor=10, hint=hint)) == 11
    assert first_readable(memory_store, SHARD, manifest(cursor=10, hint=hint)) == 11


def test_an_entry_in_a_collected_slot_moves_neither_end(memory_store: ObjectStore) -> None:
    fill(memory_store, [3])
    assert find_tip(memory_store, SHARD, manifest(cursor=10, hint=3)) == 11
    assert first_readable(memory_store, SHARD, manifest(cursor=10)) == 11
    fill(memory_store, [9, 10, 11, 12])
    assert find_tip(memory_store, SHARD, manifest(cursor=10, hint=3)) == 13
    assert first_readable(memory_store, SHARD, manifest(cursor=10)) == 9


@pytest.mark.parametrize("length", [1, 2, 3, 100, 1000])
def test_a_search_without_a_hint_costs_a_logarithm(memory_store: ObjectStore, length: int) -> None:
    fill(memory_store, range(1, length + 1))
    store = FaultyStore(memory_store)
    assert find_tip(store, SHARD, manifest()) == length + 1
    assert store.faults.count("head") <= 2 * math.log2(length + 1) + 2
    assert store.faults.count("list") == 0


def test_a_good_hint_costs_two_requests(memory_store: ObjectStore) -> None:
    fill(memory_store, range(1, 101))
    store = FaultyStore(memory_store)
    assert find_tip(store, SHARD, manifest(hint=100)) == 101
    assert store.faults.count("head") == 2


def test_other_files_are_no_positions(memory_store: ObjectStore) -> None:
    fill(memory_store, [0, 1, 2])
    memory_store.put(f"{layout.wal_dir(SHARD)}/notes.arrow", b"")
    memory_store.put(f"{layout.wal_dir(SHARD)}/{layout.reversed_bits(9)}.binpb", b"")
    assert retained_positions(memory_store, SHARD) == [1, 2]
    assert first_readable(memory_store, SHARD, manifest()) == 1


def test_an_entry_that_came_during_the_listing_is_no_gap(memory_store: ObjectStore) -> None:
    class Growing(FaultyStore):
        """Lists without an entry that is there when the listing returns."""

        def list(self, prefix: str = "") -> list:  # type: ignore[type-arg]
            missed = layout.wal_entry(SHARD, 3)
            return [info for info in super().list(prefix) if info.path != missed]

    fill(memory_store, [1, 2, 3, 4])
    assert retained_positions(Growing(memory_store), SHARD) == [1, 2, 4]
    assert first_readable(Growing(memory_store), SHARD, manifest()) == 1


def test_entries_that_came_during_the_search_are_no_harm(memory_store: ObjectStore) -> None:
    fill(memory_store, range(1, 6))
    store = FaultyStore(memory_store)
    store.faults.before("head", doing(lambda: fill(memory_store, range(6, 20))), nth=3)
    assert 6 <= find_tip(store, SHARD, manifest()) <= 20


# ---------------------------------------------------------------- lost entries


def lose(store: ObjectStore, position: int) -> None:
    store.delete(layout.wal_entry(SHARD, position))


def test_a_lost_entry_was_taken_for_the_end_of_the_log(any_store: ObjectStore) -> None:
    """Wherever it was: a search that halves met it, or passed it, by chance."""
    longest = 4 if any_store.uri.startswith("s3:") else 12
    for length in range(2, longest + 1):
        fill(any_store, [length - 1, length])
        for lost in range(1, length):
            lose(any_store, lost)
            for look in (
                established_tip,
                first_readable,
                lambda *where: WatchedTip(*where[:2]).find(where[2]),
            ):
                with pytest.raises(WalCorruptError, match=f"although entry {lost + 1} is there") as refusal:
                    look(any_store, SHARD, manifest())
                assert (refusal.value.shard_id, refusal.value.position) == (SHARD, lost)
            fill(any_store, [lost])
        assert established_tip(any_store, SHARD, manifest()) == length + 1


@given(length=SOME, cursor=SOME, hint=SOME, lost=st.sets(st.integers(1, 40)))
def test_what_is_missing_is_a_loss_only_above_the_cursor_and_below_the_last(
    length: int, cursor: int, hint: int, lost: set[int]
) -> None:
    cursor = min(cursor, length)
    store = fresh()
    left = [position for position in range(1, length + 1) if position not in lost]
    fill(store, left)
    last = max([cursor, *left])
    holes = [position for position in lost if cursor < position < last]
    if not holes:
        assert established_tip(store, SHARD, manifest(cursor, hint)) == last + 1
        return
    with pytest.raises(WalCorruptError) as refusal:
        established_tip(store, SHARD, manifest(cursor, hint))
    assert refusal.value.position == min(holes)


@given(known=st.integers(0, 12), more=st.integers(0, 40), lost=st.integers(1, 60))
def test_a_reader_that_comes_back_notices_any_single_loss_above_what_it_knew(
    known: int, more: int, lost: int
) -> None:
    store = fresh()
    tip = WatchedTip(store, SHARD)
    fill(store, range(1, known + 1))
    assert tip.find(manifest()) == known + 1
    fill(store, range(known + 1, known + more + 1))
    if known < lost:
        lose(store, lost)
    last = max([known, *retained_positions(store, SHARD)])
    if not known < lost < last:
        assert tip.find(manifest()) == last + 1
        return
    # Either at once, or by reading the entries up to the tip: none of them is passed over.
    with suppress(WalCorruptError):
        assert tip.find(manifest()) == last + 1


@pytest.mark.parametrize("lost", [[4], [4, 5], [4, 5, 6]])
def test_what_was_lost_just_where_a_reader_saw_the_end_is_found_by_its_next_listing(
    memory_store: ObjectStore, lost: list[int]
) -> None:
    clock = ManualClock()
    tip = WatchedTip(memory_store, SHARD, clock)
    fill(memory_store, [1, 2, 3])
    assert tip.find(manifest()) == 4
    fill(memory_store, [p for p in range(4, 9) if p not in lost])
    if len(lost) > 1:
        assert tip.find(manifest()) == 4
        clock.advance(RECHECK_AFTER.total_seconds())
    with pytest.raises(WalCorruptError, match="entry 4"):
        tip.find(manifest())


def test_a_reader_that_comes_back_asks_twice_and_lists_now_and_then(memory_store: ObjectStore) -> None:
    clock, store = ManualClock(), FaultyStore(memory_store)
    fill(memory_store, range(1, 101))
    tip = WatchedTip(store, SHARD, clock)
    assert tip.find(manifest()) == 101
    assert (store.faults.count("list"), store.faults.count("head")) == (1, 0)
    store.faults.clear()
    assert tip.find(manifest()) == 101
    assert (store.faults.count("list"), store.faults.count("head")) == (0, 2)
    fill(memory_store, [101])
    store.faults.clear()
    assert tip.find(manifest()) == 102
    assert (store.faults.count("list"), store.faults.count("head")) == (0, 4)
    clock.advance(RECHECK_AFTER.total_seconds())
    store.faults.clear()
    assert tip.find(manifest()) == 102
    assert (store.faults.count("list"), store.faults.count("head")) == (1, 0)


def test_a_reader_lists_more_seldom_where_a_listing_takes_long(memory_store: ObjectStore) -> None:
    clock, store = ManualClock(), FaultyStore(memory_store)
    store.faults.before("list", lambda: clock.advance(60))
    tip = WatchedTip(store, SHARD, clock)
    assert tip.find(manifest()) == 1
    clock.advance(10 * RECHECK_AFTER.total_seconds())
    assert tip.find(manifest()) == 1
    assert store.faults.count("list") == 1


def test_what_was_flushed_and_collected_during_the_search_is_no_loss(memory_store: ObjectStore) -> None:
    fill(memory_store, range(1, 8))

    def flush_and_collect() -> None:
        newer = encode_manifest(manifest(cursor=5))
        memory_store.put_if_absent(layout.manifest_file(SHARD, 1), newer)
        for position in range(1, 6):
            lose(memory_store, position)

    store = FaultyStore(memory_store)
    store.faults.before("list", flush_and_collect)
    assert established_tip(store, SHARD, manifest()) == 8


def test_a_missing_entry_during_the_listing_is_no_loss(memory_store: ObjectStore) -> None:
    class Growing(FaultyStore):
        """Lists without entries that are there when the listing returns."""

        def list(self, prefix: str = "") -> list:  # type: ignore[type-arg]
            missed = [layout.wal_entry(SHARD, position) for position in (3, 4)]
            return [info for info in super().list(prefix) if info.path not in missed]

    fill(memory_store, range(1, 7))
    assert established_tip(Growing(memory_store), SHARD, manifest()) == 7
