"""WalTailer: reads from any process, says so when something is missing, and never waits for its hint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bench.distant import distant_store, measured_depth
from lancewal.errors import CorruptManifestError, InvalidInputError, WalCorruptError, WalTruncatedError
from lancewal.format import encode_entry, entry_schema
from lancewal.shard import WalAppender, WalTailer, tail
from lancewal.storage import ObjectStore, layout
from lancewal.storage.clock import RECHECK_AFTER
from tests.faults import FaultyStore
from tests.patience import PATIENCE, wait_until
from tests.shard.support import (
    SHARD,
    ManualClock,
    batch,
    collect_entries,
    contents,
    cover,
    tailer_of,
    values,
)

WAL = f"{layout.wal_dir(SHARD)}/"


@pytest.fixture(autouse=True)
def no_readers_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that an earlier test dropped count until the garbage collector finds them."""
    monkeypatch.setattr(tail._Window, "_all", set())


def written(store: ObjectStore, count: int) -> WalAppender:
    """A log of ``count`` entries; entry n has the row n."""
    appender = WalAppender.open(store, SHARD)
    for value in range(1, count + 1):
        appender.append([batch(value)])
    return appender


def damage(store: ObjectStore, position: int, change: Callable[[bytes], bytes]) -> None:
    path = layout.wal_entry(SHARD, position)
    store.put(path, change(store.get(path)))


# ---------------------------------------------------------------- single entries


def test_a_position_without_an_entry_is_nothing(any_store: ObjectStore) -> None:
    tailer = tailer_of(any_store)
    assert tailer.read_entry(1) is None
    assert tailer.read_header(1) is None
    assert (tailer.first_position(), tailer.next_position()) == (1, 1)
    assert list(tailer) == []
    written(any_store, 1)
    assert tailer.read_entry(999) is None


def test_an_entry_is_read_without_the_metadata_of_its_storage(memory_store: ObjectStore) -> None:
    written(memory_store, 1)
    entry = tailer_of(memory_store).read_entry(1)
    assert entry is not None
    assert entry.batches[0].schema.metadata is None
    assert entry.num_rows == 1


@pytest.mark.parametrize("position", [0, -1])
def test_a_position_below_one_is_refused(memory_store: ObjectStore, position: int) -> None:
    with pytest.raises(InvalidInputError, match="start at 1"):
        tailer_of(memory_store).read_entry(position)
    with pytest.raises(InvalidInputError, match="start at 1"):
        list(tailer_of(memory_store).entries(position, 3))


def test_bad_arguments_are_refused(memory_store: ObjectStore) -> None:
    with pytest.raises(InvalidInputError, match="is not a UUID"):
        WalTailer(memory_store, "shard one")
    with pytest.raises(InvalidInputError, match="read_ahead"):
        WalTailer(memory_store, SHARD, read_ahead=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data[:200] + bytes([data[200] ^ 4]) + data[201:],
    ],
    ids=["cut", "half", "empty", "flipped bit"],
)
def test_a_damaged_entry_is_refused_by_name(
    memory_store: ObjectStore, change: Callable[[bytes], bytes]
) -> None:
    written(memory_store, 3)
    damage(memory_store, 2, change)
    before = contents(memory_store)
    tailer = tailer_of(memory_store)
    read = tailer.entries()
    assert next(read).position == 1
    with pytest.raises(WalCorruptError, match=rf"entry 2 of shard {SHARD} is corrupt") as refusal:
        next(read)
    assert (refusal.value.shard_id, refusal.value.position) == (SHARD, 2)
    assert contents(memory_store) == before


def test_a_header_is_read_without_the_rows(memory_store: ObjectStore) -> None:
    appender = WalAppender.open(memory_store, SHARD)
    appender.append([pa.record_batch({"id": pa.array(range(50_000))})], generation=4)
    store = FaultyStore(memory_store)
    header = tailer_of(store).read_header(1)
    assert header is not None
    assert (header.writer_epoch, header.generation, header.sentinel) == (1, 4, False)
    assert store.faults.count("get") == 0


def test_the_header_of_a_very_wide_entry_is_read_too(memory_store: ObjectStore) -> None:
    appender = WalAppender.open(memory_store, SHARD)
    wide = pa.record_batch({f"column_{number:05d}": pa.array([1]) for number in range(2000)})
    appender.append([wide], generation=4)
    header = tailer_of(memory_store).read_header(1)
    assert header is not None
    assert header.generation == 4


def test_an_entry_that_was_written_anew_after_its_listing_was_called_corrupt(
    memory_store: ObjectStore,
) -> None:
    """A stalled writer filled a slot that was collected. Seed 153917."""
    written(memory_store, 1)
    path = layout.wal_entry(SHARD, 1)
    info = memory_store.head(path)
    assert info is not None
    memory_store.delete(path)
    wide = pa.record_batch({f"column_{number:05d}": pa.array([1]) for number in range(20)})
    memory_store.put_if_absent(path, encode_entry(entry_schema(wide.schema, 1, 7), [wide]))
    header = tailer_of(memory_store).read_header(1, info)
    assert header is not None
    assert header.generation == 7


def test_a_damaged_header_is_refused_by_name(memory_store: ObjectStore) -> None:
    written(memory_store, 1)
    damage(memory_store, 1, lambda data: data[:40])
    with pytest.raises(WalCorruptError, match=f"entry 1 of shard {SHARD}"):
        tailer_of(memory_store).read_header(1)


def test_headers_of_a_range(any_store: ObjectStore) -> None:
    written(any_store, 2)
    WalAppender.open(any_store, SHARD)
    headers = list(tailer_of(any_store).headers(1, 5))
    assert [header and (header.writer_epoch, header.sentinel) for header in headers] == [
        (1, False),
        (1, False),
        (2, True),
        None,
    ]


# ---------------------------------------------------------------- ranges


@pytest.mark.parametrize("read_ahead", [1, 3, 50])
def test_a_range_is_read_in_order(any_store: ObjectStore, read_ahead: int) -> None:
    written(any_store, 12)
    tailer = WalTailer(any_store, SHARD, read_ahead=read_ahead)
    assert values(tailer) == list(range(1, 13))
    assert values(tailer, 4, 9) == list(range(4, 9))
    assert values(tailer, 10) == [10, 11, 12]
    assert values(tailer, 5, 5) == values(tailer, 13) == []


def test_a_remote_range_is_read_ahead_but_not_far(faulty: FaultyStore) -> None:
    written(faulty.inner, 20)
    read = WalTailer(faulty, SHARD, read_ahead=4).entries(1, 21)
    next(read)
    read.close()  # type: ignore[attr-defined]
    assert 2 <= faulty.faults.count("get", WAL) <= 5


def test_a_cold_tail_of_4000_entries_was_read_eight_at_a_time(tmp_path: Path) -> None:
    appender = WalAppender.open(ObjectStore.from_uri(str(tmp_path), fsync=False), SHARD)
    for value in range(4000):
        appender.append([batch(value)])
    store, backend = distant_store(tmp_path)
    tailer = WalTailer(store, SHARD)
    with measured_depth() as depth:
        # Manifest, four pages of the listing, the entries.
        assert sum(entry.num_rows for entry in tailer.entries(1)) == 4000
        assert depth() <= 60
    assert backend.requests["read"] <= 4000 + 20


class InFlight(FaultyStore):
    """Counts the bytes of entries that were fetched and not yet taken."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.fetched = 0

    def get(self, path: str) -> bytes:
        data: bytes = super().get(path)
        self.fetched += len(data) if path.startswith(WAL) else 0
        return data


def test_large_entries_are_read_few_at_a_time(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of unknown size before they are read: the first eight may be large, what follows fits the bytes."""
    size = 20_000
    monkeypatch.setattr(tail, "_BYTES_AHEAD", 4 * size)
    appender = WalAppender.open(memory_store, SHARD)
    for _ in range(60):
        appender.append([pa.record_batch({"payload": [b"x" * size]})])
    store = InFlight(memory_store)
    most = taken = 0
    for number, entry in enumerate(WalTailer(store, SHARD).entries(1, 61)):
        taken += entry.num_bytes
        if number > 8:
            most = max(most, store.fetched - taken)
    assert 2 * size < most <= 5 * size


def test_readers_of_a_process_share_what_may_be_ahead(memory_store: ObjectStore) -> None:
    written(memory_store, 400)
    readers = [WalTailer(memory_store, SHARD).entries(1, 401) for _ in range(8)]
    windows = [tail._Window(96, 8).__enter__() for _ in readers]
    assert [window.after(None) for window in windows] == [12] * 8
    for window in windows:
        window.__exit__()
    assert tail._Window._all == set()
    assert [sum(1 for _ in read) for read in readers] == [400] * 8


def test_a_hole_is_refused_by_name(any_store: ObjectStore) -> None:
    written(any_store, 5)
    any_store.delete(layout.wal_entry(SHARD, 3))
    for read in (tailer_of(any_store).entries(1, 6), tailer_of(any_store).entries(2, 6)):
        with pytest.raises(WalCorruptError, match=rf"entry 3 of shard {SHARD}.*missing.*up to 5") as refusal:
            list(read)
        assert (refusal.value.shard_id, refusal.value.position) == (SHARD, 3)


def test_an_end_beyond_the_tip_is_a_hole(memory_store: ObjectStore) -> None:
    written(memory_store, 2)
    with pytest.raises(WalCorruptError, match="entry 3"):
        list(tailer_of(memory_store).entries(1, 9))


def test_a_collected_prefix_is_refused_by_name(any_store: ObjectStore) -> None:
    appender = written(any_store, 6)
    cover(appender.manifests, 1, 4)
    collect_entries(any_store, 3)
    tailer = tailer_of(any_store)
    for start in (1, 3):
        with pytest.raises(WalTruncatedError, match=f"position {start} of shard {SHARD}") as refusal:
            list(tailer.entries(start, 7))
        assert (refusal.value.position, refusal.value.first_retained) == (start, 4)
    assert tailer.first_position() == 4
    assert values(tailer) == [4, 5, 6]


def test_an_emptied_wal_has_no_entries_and_no_error(any_store: ObjectStore) -> None:
    appender = written(any_store, 3)
    cover(appender.manifests, 1, 3)
    collect_entries(any_store, 3)
    tailer = tailer_of(any_store)
    assert (tailer.first_position(), tailer.next_position()) == (4, 4)
    assert list(tailer) == []
    with pytest.raises(WalTruncatedError) as refusal:
        list(tailer.entries(2, 4))
    assert refusal.value.first_retained == 4
    appender.append([batch(4)])
    assert values(tailer) == [4]


def test_a_manifest_that_does_not_parse_is_refused(memory_store: ObjectStore) -> None:
    written(memory_store, 1)
    memory_store.put_if_absent(layout.manifest_file(SHARD, 2), b"no manifest")
    tailer = tailer_of(memory_store)
    for ask in (tailer.next_position, tailer.first_position, lambda: list(tailer)):
        with pytest.raises(CorruptManifestError, match=f"version 2 of shard {SHARD}"):
            ask()
    # An entry that is asked for by its position needs no manifest.
    assert tailer.read_entry(1) is not None


# ---------------------------------------------------------------- following


def collecting(entries: Iterator[Any], into: list[int]) -> threading.Thread:
    def follow() -> None:
        for entry in entries:
            for each in entry.batches:
                into.extend(each.column("id").to_pylist())

    thread = threading.Thread(target=follow)
    thread.start()
    return thread


def test_following_sees_entries_as_they_come(any_store: ObjectStore) -> None:
    appender = written(any_store, 2)
    seen: list[int] = []
    stop = threading.Event()
    thread = collecting(
        tailer_of(any_store).follow(stop=stop.is_set, poll_interval=0.001, wait=stop.wait), seen
    )
    for value in (3, 4, 5):
        wait_until(lambda value=value: len(seen) == value - 1)  # type: ignore[misc]
        appender.append([batch(value)])
    wait_until(lambda: len(seen) == 5)
    stop.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert seen == [1, 2, 3, 4, 5]


def test_a_stop_is_heard_at_once_while_waiting(memory_store: ObjectStore) -> None:
    stop = threading.Event()
    seen: list[int] = []
    waiting = threading.Event()

    def wait(seconds: float) -> bool:
        waiting.set()
        return stop.wait(seconds)

    # An hour between polls: only the stop itself can end it in time.
    thread = collecting(tailer_of(memory_store).follow(stop=stop.is_set, poll_interval=3600, wait=wait), seen)
    assert waiting.wait(PATIENCE)
    stop.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_stop_is_asked_for_before_every_read(memory_store: ObjectStore) -> None:
    written(memory_store, 5)
    seen: list[int] = []
    for entry in tailer_of(memory_store).follow(stop=lambda: len(seen) == 3):
        seen.append(entry.position)
    assert seen == [1, 2, 3]
    assert list(tailer_of(memory_store).follow(stop=lambda: True)) == []


def polls(count: int) -> Callable[[], bool]:
    """Stops at the ``count``-th time it is asked."""
    asked = iter(range(count - 1))
    return lambda: next(asked, None) is None


def test_following_starts_where_it_is_told(memory_store: ObjectStore) -> None:
    written(memory_store, 4)
    follow = tailer_of(memory_store).follow(3, stop=polls(4), wait=lambda _: None)
    assert [entry.position for entry in follow] == [3, 4]


def test_following_from_a_collected_position_is_refused(memory_store: ObjectStore) -> None:
    appender = written(memory_store, 4)
    cover(appender.manifests, 1, 3)
    collect_entries(memory_store, 2)
    with pytest.raises(WalTruncatedError) as refusal:
        list(tailer_of(memory_store).follow(1, stop=lambda: False))
    assert (refusal.value.position, refusal.value.first_retained) == (1, 3)


def test_following_that_fell_behind_collection_is_refused(
    memory_store: ObjectStore, clock: ManualClock
) -> None:
    appender = written(memory_store, 1)
    tailer = WalTailer(memory_store, SHARD, clock=clock)
    follow = tailer.follow(stop=lambda: False, wait=lambda _: None)
    assert next(follow).position == 1
    for value in (2, 3):
        appender.append([batch(value)])
    cover(appender.manifests, 1, 3)
    collect_entries(memory_store, 3)
    clock.stall()
    with pytest.raises(WalTruncatedError) as refusal:
        next(follow)
    assert (refusal.value.position, refusal.value.first_retained) == (2, 4)


def test_an_entry_that_comes_and_is_covered_between_two_looks_is_not_lost(faulty: FaultyStore) -> None:
    appender = written(faulty.inner, 1)

    def come() -> None:
        appender.append([batch(2)])
        cover(appender.manifests, 1, 2)

    follow = tailer_of(faulty).follow(2, stop=polls(4), wait=lambda _: None)
    faulty.faults.before("*", come, where="manifest")
    assert [entry.position for entry in follow] == [2]


def test_waiting_for_the_next_entry_costs_one_request_a_poll(faulty: FaultyStore, clock: ManualClock) -> None:
    written(faulty.inner, 1)
    tailer = WalTailer(faulty, SHARD, clock=clock)
    list(tailer.follow(2, stop=polls(10), wait=lambda _: None))
    before = len(faulty.faults.calls)
    list(tailer.follow(2, stop=polls(20), wait=lambda _: None))
    assert len(faulty.faults.calls) - 2 * before == 10
    # Only after minutes is it worth asking whether the position was collected.
    faulty.faults.clear()

    def much_later(_: float) -> None:
        clock.advance(RECHECK_AFTER.total_seconds() + 1)

    list(tailer.follow(2, stop=polls(3), wait=much_later))
    assert faulty.faults.count("list") + faulty.faults.count("head") > 0


# ---------------------------------------------------------------- beside a writer


def test_a_tailer_writes_nothing(memory_store: ObjectStore) -> None:
    written(memory_store, 3)
    before = contents(memory_store)
    tailer = tailer_of(memory_store)
    list(tailer)
    list(tailer.follow(stop=polls(5), wait=lambda _: None))
    assert contents(memory_store) == before


def test_a_shard_without_a_manifest_can_be_read(memory_store: ObjectStore) -> None:
    appender = written(memory_store, 1)
    memory_store.delete_prefix(layout.manifest_dir(SHARD))
    tailer = tailer_of(memory_store)
    assert tailer.read_entry(1) is not None
    assert tailer.next_position() == 2
    with pytest.raises(InvalidInputError, match="no manifest"):
        appender.check_fenced()
