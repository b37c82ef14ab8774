"""Where a WAL begins and ends, whatever the hint says and whatever was collected."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal import layout
from lancewal.format.shard_manifest import ShardManifest
from lancewal.objects import ObjectStore
from lancewal.wal.tip import find_tip, first_readable, first_unsettled, retained_positions
from tests.faults import FaultyStore
from tests.wal.support import SHARD, doing

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
@settings(deadline=None)
def test_the_tip_is_found_whatever_the_hint_says(length: int, cursor: int, collected: int, hint: int) -> None:
    cursor, collected = min(cursor, length), min(collected, cursor, length)
    store = fresh()
    fill(store, range(collected + 1, length + 1))
    assert find_tip(store, SHARD, manifest(cursor, hint)) == length + 1
    assert first_readable(store, SHARD, manifest(cursor, hint)) == collected + 1


def test_a_shard_without_a_manifest_starts_at_one(memory_store: ObjectStore) -> None:
    assert find_tip(memory_store, SHARD, None) == 1
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
